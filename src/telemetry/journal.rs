//! Lines for the systemd journal: each begins with its priority, and the journal has the time.

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Prefix of an error's line, see `sd-daemon(3)`.
pub(super) const ERROR: &str = "<3>";

/// Whether standard error is connected to the journal: `JOURNAL_STREAM` names its device and inode (`systemd.exec(5)`).
pub(super) fn is_stderr() -> bool {
    let Some(stream) = std::env::var_os("JOURNAL_STREAM") else {
        return false;
    };
    let stderr = std::io::stderr().as_fd().try_clone_to_owned();
    let metadata = stderr.and_then(|stderr| File::from(stderr).metadata());
    metadata.is_ok_and(|stderr| *stream == *format!("{}:{}", stderr.dev(), stderr.ino()))
}

/// Format of events with the priority before each line.
pub(super) struct PriorityFormat<F>(pub(super) F);

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
    ) -> fmt::Result {
        writer.write_str(priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => ERROR,
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        _ => "<7>",
    }
}
