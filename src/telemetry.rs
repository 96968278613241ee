//! Logs: format and filter from the configuration, to standard error; and the audit log, to its file.
//!
//! The logs are set up once, before the runtime. `RUST_LOG` overrides the configured filter, because a user who sets it is
//! looking for something now. The systemd journal gets each line's priority, and no time in the text. Colours are off if the
//! output cannot show them or the user does not want them (`NO_COLOR`). Both logs are written by threads of their own: a disk
//! that hangs, or a slow reader, delays no other thread. Lines that such a thread cannot keep up with are lost. The metrics
//! count lost lines, and the log reports them.

#[cfg_attr(not(target_os = "linux"), path = "telemetry/no_audit_log.rs")]
pub(crate) mod audit_log;
mod log_writer;

use crate::output::{errln, explain};
use anyhow::{Context, bail};
use audit_log::{AUDIT, AuditLog};
use causeway_config::{Log, LogFormat};
use log_writer::LogWriter;
use serde_json::json;
use std::{borrow::Cow, ffi::OsStr, io::IsTerminal, path::Path, time::SystemTime};
use tracing::{
    Event, Level, Subscriber,
    level_filters::{LevelFilter, STATIC_MAX_LEVEL},
};
use tracing_subscriber::{
    EnvFilter, Layer,
    fmt::{self, FmtContext, FormatEvent, FormatFields, format::Writer},
    layer::SubscriberExt,
    registry::LookupSpan,
    util::SubscriberInitExt,
};

/// Prefix of an error's line, see `sd-daemon(3)`.
const JOURNAL_ERROR: &str = "<3>";

/// Logs of this process. Dropping the value writes all queued lines.
pub(crate) struct Logs {
    // Dropped first, because it may log a message.
    _audit: Option<AuditLog>,
    _stderr: LogWriter,
}

/// Starts logging for the rest of the process. The returned value is dropped last.
pub(crate) fn start(log: &Log, audit: Option<&Path>) -> anyhow::Result<Logs> {
    // The audit log has its own file, or is disabled.
    let filter = effective_filter(log)?.add_directive(format!("{AUDIT}=off").parse()?);
    // kube logs an error for each attempt on an unreachable API server; our callers log it once.
    let filter = filter.add_directive("kube_client::client::builder=off".parse()?);
    let stderr = LogWriter::new(std::io::stderr());
    // Internal error messages would panic if standard error itself fails.
    let lines = fmt::layer()
        .log_internal_errors(false)
        .with_writer(stderr.writer());
    let lines = match log.format {
        LogFormat::Json if is_journal() => lines
            .json()
            .flatten_event(true)
            .map_event_format(PriorityFormat)
            .boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
        LogFormat::Text if is_journal() => lines
            .with_ansi(false)
            .without_time()
            .map_event_format(PriorityFormat)
            .boxed(),
        LogFormat::Text => {
            let colours = has_colours(
                std::io::stderr().is_terminal(),
                std::env::var_os("NO_COLOR").as_deref(),
            );
            lines.with_ansi(colours).boxed()
        }
    };
    let audit = audit.map(AuditLog::open).transpose()?;
    let audit_layer = audit.as_ref().map(AuditLog::layer);
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(audit_layer)
        .try_init()
        .context("cannot initialize the log")?;
    if log.format == LogFormat::Json {
        std::panic::set_hook(Box::new(|panic| {
            report_error(LogFormat::Json, &panic.to_string());
        }));
    }
    count_dropped(&stderr, audit.as_ref());
    if let Cow::Owned(capped_filter) = cap_levels(&filter_text(log), STATIC_MAX_LEVEL) {
        tracing::warn!(
            "this build has no log messages below {STATIC_MAX_LEVEL}; using the filter \"{capped_filter}\""
        );
    }
    Ok(Logs {
        _audit: audit,
        _stderr: stderr,
    })
}

/// Registers the counters of dropped lines with the metrics.
fn count_dropped(stderr: &LogWriter, audit: Option<&AuditLog>) {
    let (dropped, audit_dropped) = (stderr.dropped(), audit.map(AuditLog::dropped_lines));
    causeway_rt::count_dropped_log_lines(move || {
        let audit_dropped = audit_dropped.as_ref().map(|lost| ("audit", lost()));
        [("stderr", dropped.lines())]
            .into_iter()
            .chain(audit_dropped)
            .collect()
    });
}

/// Writes the error that ends the process, in the format of its log.
pub(crate) fn report_error(format: LogFormat, message: &str) {
    let priority = if is_journal() { JOURNAL_ERROR } else { "" };
    match format {
        LogFormat::Text => errln!("{priority}{message}"),
        // The format of log lines.
        LogFormat::Json => {
            let now = humantime::format_rfc3339_micros(SystemTime::now()).to_string();
            let line = json!({
                "timestamp": now, "level": "ERROR", "message": message, "target": "causeway",
            });
            errln!("{priority}{line}");
        }
    }
}

/// Writes the failure that ends the process, as [`report_error`] does. For people the line begins with the name of the program.
pub(crate) fn report_failure(format: LogFormat, error: &anyhow::Error) {
    let message = explain(error);
    match format {
        LogFormat::Text => report_error(format, &format!("causeway: {message}")),
        LogFormat::Json => report_error(format, &message),
    }
}

/// Whether a log gets colours (<https://no-color.org>).
fn has_colours(is_terminal: bool, no_color: Option<&OsStr>) -> bool {
    is_terminal && no_color.is_none_or(OsStr::is_empty)
}

/// Returns the text of the filter: `RUST_LOG`, else the configured one.
fn filter_text(log: &Log) -> String {
    let variable = std::env::var(EnvFilter::DEFAULT_ENV);
    let variable = variable.ok().filter(|text| !text.is_empty());
    variable.unwrap_or_else(|| log.filter.clone())
}

/// Returns the filter for this process.
pub(crate) fn effective_filter(log: &Log) -> anyhow::Result<EnvFilter> {
    let text = filter_text(log);
    let key = if text == log.filter {
        "log.filter"
    } else {
        EnvFilter::DEFAULT_ENV
    };
    parse_filter(&text).context(key)
}

/// Parses a filter.
pub(crate) fn parse_filter(text: &str) -> anyhow::Result<EnvFilter> {
    let invalid_filter = || {
        format!(
            "\"{text}\" is not a log filter; write a level such as info, or info,causeway_tunnel=debug"
        )
    };
    // The parser takes a single word as a target, which would silence all others.
    let is_directive =
        |word: &str| word.contains(['=', '[']) || word.parse::<LevelFilter>().is_ok();
    let mut directives = text
        .split(',')
        .map(str::trim)
        .filter(|word| !word.is_empty());
    if directives.clone().next().is_none() {
        bail!(invalid_filter());
    }
    // Commas within brackets separate something else.
    if !text.contains('[')
        && let Some(word) = directives.find(|word| !is_directive(word))
    {
        bail!("{}: \"{word}\" is not a log level", invalid_filter());
    }
    EnvFilter::try_new(cap_levels(text, STATIC_MAX_LEVEL)).with_context(invalid_filter)
}

/// Returns the filter with each level that this build does not have replaced by the nearest one that it has: the parser
/// would print advice for developers.
fn cap_levels(text: &str, max_level: LevelFilter) -> Cow<'_, str> {
    let exceeds_max = |word: &str| {
        let level = word.rsplit('=').next().unwrap_or(word).trim();
        level
            .parse::<LevelFilter>()
            .is_ok_and(|level| level > max_level)
    };
    if text.contains('[') || !text.split(',').any(exceeds_max) {
        return Cow::Borrowed(text);
    }
    let words = text.split(',').map(|word| match word.rsplit_once('=') {
        _ if !exceeds_max(word) => word.to_owned(),
        Some((target, _)) => format!("{target}={max_level}"),
        None => max_level.to_string(),
    });
    Cow::Owned(words.collect::<Vec<_>>().join(","))
}

/// Whether standard error is connected to the journal: `JOURNAL_STREAM` names its device and inode (`systemd.exec(5)`).
#[cfg(target_os = "linux")]
fn is_journal() -> bool {
    use std::os::{fd::AsFd, unix::fs::MetadataExt};
    let Some(stream) = std::env::var_os("JOURNAL_STREAM") else {
        return false;
    };
    let stderr = std::io::stderr().as_fd().try_clone_to_owned();
    let metadata = stderr.and_then(|stderr| std::fs::File::from(stderr).metadata());
    metadata.is_ok_and(|stderr| *stream == *format!("{}:{}", stderr.dev(), stderr.ino()))
}

#[cfg(not(target_os = "linux"))]
fn is_journal() -> bool {
    false
}

/// Format of events with the priority before each line.
struct PriorityFormat<F>(F);

impl<S, N, F> FormatEvent<S, N> for PriorityFormat<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        writer.write_str(priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => JOURNAL_ERROR,
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        _ => "<7>",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_error_states_the_expected_format() {
        for good in [
            "info",
            "INFO,causeway_tunnel=debug",
            "off",
            "warn,",
            "3",
            "info,h2[a{b}]=debug",
        ] {
            assert!(parse_filter(good).is_ok(), "{good}");
        }
        for bad in [
            "causeway=loud",
            "verbos",
            "info,verbos",
            "",
            ",",
            "info debug",
        ] {
            let error = format!("{:#}", parse_filter(bad).unwrap_err());
            assert!(
                error.contains(&format!("\"{bad}\"")) && error.contains("such as info"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_missing_log_level_maps_to_the_nearest_available_one() {
        let debug = LevelFilter::DEBUG;
        for (text, taken) in [
            ("trace", "debug"),
            (
                "info,causeway_tunnel=TRACE,h2=5",
                "info,causeway_tunnel=debug,h2=debug",
            ),
            ("info,causeway_tunnel=debug", "info,causeway_tunnel=debug"),
        ] {
            assert_eq!(cap_levels(text, debug), taken);
        }
        assert!(matches!(
            cap_levels("trace", LevelFilter::TRACE),
            Cow::Borrowed(_)
        ));
    }

    #[test]
    fn no_color_means_no_colours() {
        assert!(has_colours(true, None) && has_colours(true, Some(OsStr::new(""))));
        assert!(!has_colours(true, Some(OsStr::new("1"))) && !has_colours(false, None));
    }
}
