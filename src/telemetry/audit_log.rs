//! The file of the audit log: private, appended to, and followed where it is moved away (logrotate).

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context;
use causeway_certs::store::open_private;
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};

/// Lines that wait for the disk: some seconds of a busy gateway's.
const LINES: usize = 10_000;
/// How often is looked whether the file is where it was.
const LOOK: Duration = Duration::from_secs(1);
/// How often is said that lines are lost.
const SAID: Duration = Duration::from_secs(10);

/// The audit log of this process; dropping it writes what is left.
pub(crate) struct AuditLog {
    writer: NonBlocking,
    lost: Arc<OnceLock<ErrorCounter>>,
    _worker: WorkerGuard,
}

impl AuditLog {
    /// Opens the file, 0600, or makes it.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let file = ReopeningFile::open(path).with_context(|| {
            let path = path.display();
            format!("cannot append to the audit log {path} (audit_log)")
        })?;
        let lost = file.lost.clone();
        let (writer, worker) = NonBlockingBuilder::default()
            .buffered_lines_limit(LINES)
            .thread_name("audit")
            .finish(file);
        // Set once, here.
        let _ = lost.set(writer.error_counter());
        Ok(Self {
            lost,
            writer,
            _worker: worker,
        })
    }

    /// Returns a function that counts the lines for which there was no room.
    pub(super) fn lost(&self) -> impl Fn() -> u64 + Send + Sync + use<> {
        let lost = self.lost.clone();
        move || {
            let lines = lost.get().map_or(0, ErrorCounter::dropped_lines);
            u64::try_from(lines).unwrap_or(u64::MAX)
        }
    }

    pub(super) fn writer(&self) -> NonBlocking {
        self.writer.clone()
    }
}

impl Drop for AuditLog {
    fn drop(&mut self) {
        let lost = self.lost.get().map_or(0, ErrorCounter::dropped_lines);
        if lost > 0 {
            tracing::error!(lost, "{TOO_SLOW}");
        }
    }
}

const TOO_SLOW: &str = "more was written to the audit log than its disk takes; lines are missing";

/// A file that is opened anew where its path leads elsewhere.
struct ReopeningFile {
    path: PathBuf,
    file: File,
    looked: Instant,
    /// Counts the lines for which there was no room.
    lost: Arc<OnceLock<ErrorCounter>>,
    told: DropReport,
}

/// Last report of lost lines.
#[derive(Default)]
struct DropReport {
    lost: usize,
    last: Option<Instant>,
}

impl DropReport {
    /// Whether it is time to say something again.
    fn again(&mut self) -> bool {
        let due = self.last.is_none_or(|last| last.elapsed() >= SAID);
        if due {
            self.last = Some(Instant::now());
        }
        due
    }
}

impl ReopeningFile {
    fn open(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            file: appended(path)?,
            looked: Instant::now(),
            lost: Arc::default(),
            told: DropReport::default(),
        })
    }

    fn follow(&mut self) -> io::Result<()> {
        if self.looked.elapsed() < LOOK {
            return Ok(());
        }
        self.looked = Instant::now();
        let own = self.file.metadata()?;
        let there = std::fs::metadata(&self.path);
        let same = there.is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino()));
        if !same {
            self.file = appended(&self.path)?;
        }
        Ok(())
    }
}

fn appended(path: &Path) -> io::Result<File> {
    open_private(path, OpenOptions::new().append(true))
}

impl Write for ReopeningFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Where no other can be had, the old one is better than none.
        let _ = self.follow();
        let lost = self.lost.get().map_or(0, ErrorCounter::dropped_lines);
        if lost > self.told.lost && self.told.again() {
            self.told.lost = lost;
            tracing::error!(lost, "{TOO_SLOW}");
        }
        let written = self.file.write(bytes);
        if let Err(error) = &written
            && error.kind() != io::ErrorKind::Interrupted
            && self.told.again()
        {
            let path = self.path.display();
            tracing::error!(%path, %error, "the audit log cannot be written; lines are missing");
        }
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_that_was_moved_away_is_begun_anew_and_nothing_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let (path, moved) = (folder.path().join("audit"), folder.path().join("audit.1"));
        let mut file = ReopeningFile::open(&path).unwrap();
        file.write_all(b"one\n").unwrap();
        std::fs::rename(&path, &moved).unwrap();
        // As if a second had passed.
        file.looked = Instant::now().checked_sub(LOOK).unwrap();
        file.write_all(b"two\n").unwrap();
        assert_eq!(std::fs::read_to_string(&moved).unwrap(), "one\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two\n");
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
