//! The file of the audit log. The file is private and appended to. Each reload opens it again, since logrotate renames it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context;
use causeway_certs::store::open_private;
pub(super) use causeway_gateway::audit::AUDIT;
use tracing::{Subscriber, level_filters::LevelFilter};
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::{Layer, filter::Targets, fmt, registry::LookupSpan};

/// Maximum number of lines that wait for the disk: a few seconds of a busy gateway.
const MAX_QUEUED_LINES: usize = 10_000;
/// Minimum interval between two reports of lost lines.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Whether a reload requests that the file be opened again.
static REOPEN: AtomicBool = AtomicBool::new(false);

/// Audit log of this process. Dropping the value writes all queued lines.
pub(crate) struct AuditLog {
    writer: NonBlocking,
    drop_counter: Arc<OnceLock<ErrorCounter>>,
    _worker: WorkerGuard,
}

impl AuditLog {
    /// Opens the file, or creates it with mode 0600.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let file = AuditFile::open(path).with_context(|| {
            let path = path.display();
            format!("cannot append to the audit log {path} (audit_log)")
        })?;
        let drop_counter = file.drop_counter.clone();
        let (writer, worker) = NonBlockingBuilder::default()
            .buffered_lines_limit(MAX_QUEUED_LINES)
            .thread_name("audit")
            .finish(file);
        // Set only here.
        let _ = drop_counter.set(writer.error_counter());
        Ok(Self {
            drop_counter,
            writer,
            _worker: worker,
        })
    }

    /// Returns a function that returns the number of lines that were dropped because the queue was full.
    pub(super) fn dropped_lines(&self) -> impl Fn() -> u64 + Send + Sync + use<> {
        let drop_counter = self.drop_counter.clone();
        move || {
            let lines = drop_counter.get().map_or(0, ErrorCounter::dropped_lines);
            u64::try_from(lines).unwrap_or(u64::MAX)
        }
    }

    /// Returns the layer that writes the events of the audit log.
    pub(super) fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        fmt::layer()
            .log_internal_errors(false)
            .json()
            .flatten_event(true)
            .with_target(false)
            .with_level(false)
            .with_current_span(false)
            .with_span_list(false)
            .with_writer(self.writer.clone())
            .with_filter(Targets::new().with_target(AUDIT, LevelFilter::INFO))
    }
}

impl Drop for AuditLog {
    fn drop(&mut self) {
        let lost = self
            .drop_counter
            .get()
            .map_or(0, ErrorCounter::dropped_lines);
        if lost > 0 {
            tracing::error!(lost, "{TOO_SLOW}");
        }
    }
}

const TOO_SLOW: &str = "the disk of the audit log is too slow; lines are missing";

/// Requests that the audit log's file, if there is one, be opened again before the next line.
pub(crate) fn reopen() {
    REOPEN.store(true, Ordering::Relaxed);
}

/// Writer of the audit log's thread.
struct AuditFile {
    path: PathBuf,
    file: File,
    /// Counter of the lines that were dropped because the queue was full.
    drop_counter: Arc<OnceLock<ErrorCounter>>,
    drop_report: DropReport,
}

/// Last report of lost lines.
#[derive(Default)]
struct DropReport {
    reported: usize,
    last_report: Option<Instant>,
}

impl DropReport {
    /// Whether the next report is due.
    fn is_due(&mut self) -> bool {
        let is_due = self
            .last_report
            .is_none_or(|last| last.elapsed() >= REPORT_INTERVAL);
        if is_due {
            self.last_report = Some(Instant::now());
        }
        is_due
    }
}

impl AuditFile {
    fn open(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            file: open_append(path)?,
            drop_counter: Arc::default(),
            drop_report: DropReport::default(),
        })
    }
}

fn open_append(path: &Path) -> io::Result<File> {
    open_private(path, OpenOptions::new().append(true))
}

impl Write for AuditFile {
    /// Writes a complete line to one file.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let path = self.path.display();
        if REOPEN.swap(false, Ordering::Relaxed) {
            match open_append(&self.path) {
                Ok(file) => self.file = file,
                Err(error) => {
                    tracing::error!(%path, %error, "cannot reopen the audit log; still writing to the file that was open before");
                }
            }
        }
        let lost = self
            .drop_counter
            .get()
            .map_or(0, ErrorCounter::dropped_lines);
        if lost > self.drop_report.reported && self.drop_report.is_due() {
            self.drop_report.reported = lost;
            tracing::error!(lost, "{TOO_SLOW}");
        }
        let written = self.file.write_all(line);
        if let Err(error) = &written
            && self.drop_report.is_due()
        {
            tracing::error!(%path, %error, "cannot write to the audit log; lines are missing");
        }
        written.map(|()| line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn lines_go_to_the_old_file_until_a_new_private_file_is_open() {
        let folder = tempfile::tempdir().unwrap();
        let (path, moved) = (folder.path().join("audit"), folder.path().join("audit.1"));
        let mut writer = AuditFile::open(&path).unwrap();
        writer.write_all(b"one\n").unwrap();
        fs::rename(&path, &moved).unwrap();
        fs::create_dir(&path).unwrap();
        reopen();
        writer.write_all(b"two\n").unwrap();
        fs::remove_dir(&path).unwrap();
        reopen();
        writer.write_all(b"three\n").unwrap();
        assert_eq!(fs::read_to_string(&moved).unwrap(), "one\ntwo\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
