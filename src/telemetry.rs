//! Logs: format and filter from the configuration, to standard error; and the audit log, to its file.
//!
//! Set up once, before the runtime. `RUST_LOG` wins over the configured filter, because
//! whoever sets it is looking for something now. No colours where nobody can see them.
//! The audit log is written by a thread of its own: a disk that hangs holds nobody up. What it cannot keep up with is lost,
//! and said.

mod audit;

use std::io::IsTerminal;
use std::path::Path;

use anyhow::Context;
use causeway_config::{Log, LogFormat};
use causeway_gateway::audit::AUDIT;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

pub(crate) use audit::Audit;

/// Starts logging for the rest of the process. What is returned is dropped last: it writes what is left of the audit log.
pub(crate) fn start(log: &Log, audit: Option<&Path>) -> anyhow::Result<Option<Audit>> {
    let filter = match std::env::var(EnvFilter::DEFAULT_ENV) {
        Ok(text) if !text.is_empty() => filter(&text).context("RUST_LOG")?,
        _ => filter(&log.filter).context("log.filter")?,
    };
    // It has a file of its own, or nobody wants it.
    let filter = filter.add_directive(format!("{AUDIT}=off").parse()?);
    // It calls each try of an API that is away an error; whoever tries says so once.
    let filter = filter.add_directive("kube_client::client::builder=off".parse()?);
    let lines = fmt::layer().with_writer(std::io::stderr);
    let lines = match log.format {
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).boxed(),
    };
    let audit = audit.map(Audit::open).transpose()?;
    let audited = audit.as_ref().map(|audit| {
        fmt::layer()
            .json()
            .flatten_event(true)
            .with_target(false)
            .with_level(false)
            .with_current_span(false)
            .with_span_list(false)
            .with_writer(audit.writer())
            .with_filter(Targets::new().with_target(AUDIT, LevelFilter::INFO))
    });
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(audited)
        .try_init()
        .context("cannot start the log")?;
    Ok(audit)
}

/// Reads a filter.
pub(crate) fn filter(text: &str) -> anyhow::Result<EnvFilter> {
    EnvFilter::try_new(text).with_context(|| {
        format!(
            "\"{text}\" is no log filter; write a level such as info, or info,causeway_tunnel=debug"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_says_what_to_write() {
        assert!(filter("info,causeway_tunnel=debug").is_ok());
        let error = format!("{:#}", filter("causeway=loud").unwrap_err());
        assert!(
            error.contains("causeway=loud") && error.contains("such as info"),
            "{error}"
        );
    }
}
