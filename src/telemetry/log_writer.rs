//! The log on standard error. A thread of its own writes it in batches.
//!
//! A request never waits for the reader of the log. Lines are dropped if the queue is full or they cannot be written. Both
//! are counted, and the log reports them.

use std::convert::Infallible;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};

/// Maximum number of lines in the queue: at 400 bytes each 6 MiB, and half a second of 30,000 requests per second.
const MAX_LINES: usize = 16_384;
/// Maximum size of one write, in bytes.
const MAX_BATCH_BYTES: usize = 64 << 10;
/// Time for which the process waits at its end for the reader of the log.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum interval between two reports of dropped lines.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Log of this process. Dropping the value writes all queued lines.
pub(super) struct LogWriter {
    writer: NonBlocking,
    dropped: DroppedLines,
    /// `None` once the worker was stopped.
    worker: Option<WorkerGuard>,
    /// Disconnected once the worker has written everything.
    written: Receiver<Infallible>,
}

/// Counts of dropped lines.
#[derive(Clone, Debug, Default)]
pub(super) struct DroppedLines {
    /// Lines that were dropped because the queue was full.
    queue: Arc<OnceLock<ErrorCounter>>,
    /// Lines that could not be written.
    failed: Arc<AtomicU64>,
}

impl DroppedLines {
    pub(super) fn lines(&self) -> u64 {
        let queue = self.queue.get().map_or(0, ErrorCounter::dropped_lines);
        let queue = u64::try_from(queue).unwrap_or(u64::MAX);
        queue.saturating_add(self.failed.load(Relaxed))
    }
}

impl LogWriter {
    /// Starts the thread that writes to `out`.
    pub(super) fn new(out: impl Write + Send + 'static) -> Self {
        Self::with_queue_limit(out, MAX_LINES)
    }

    fn with_queue_limit(out: impl Write + Send + 'static, lines: usize) -> Self {
        let dropped = DroppedLines::default();
        let (done_sender, done_receiver) = channel();
        let batches = BatchWriter {
            out,
            batch: Vec::with_capacity(MAX_BATCH_BYTES),
            lines: 0,
            dropped: dropped.clone(),
            reported: (0, None),
            _done_sender: done_sender,
        };
        let (writer, worker) = NonBlockingBuilder::default()
            .buffered_lines_limit(lines)
            .thread_name("log")
            .finish(batches);
        // Set only here.
        let _ = dropped.queue.set(writer.error_counter());
        Self {
            writer,
            dropped,
            worker: Some(worker),
            written: done_receiver,
        }
    }

    pub(super) fn writer(&self) -> NonBlocking {
        self.writer.clone()
    }

    pub(super) fn dropped(&self) -> DroppedLines {
        self.dropped.clone()
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        // Stops the worker once the queue is empty, and waits at most one second.
        self.worker = None;
        let _ = self.written.recv_timeout(FLUSH_TIMEOUT);
    }
}

/// Collects lines, and writes them when the queue is empty or the batch is full.
struct BatchWriter<W> {
    out: W,
    batch: Vec<u8>,
    /// Number of lines in the batch.
    lines: u64,
    dropped: DroppedLines,
    /// Number of dropped lines that the log has reported, and the time of the last report.
    reported: (u64, Option<Instant>),
    _done_sender: Sender<Infallible>,
}

impl<W: Write> BatchWriter<W> {
    fn write_batch(&mut self) {
        if self.out.write_all(&self.batch).is_err() {
            self.dropped.failed.fetch_add(self.lines, Relaxed);
        }
        self.batch.clear();
        self.lines = 0;
    }
}

impl<W: Write> Write for BatchWriter<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.batch.len() + line.len() > MAX_BATCH_BYTES {
            self.write_batch();
        }
        self.batch.extend_from_slice(line);
        self.lines += 1;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write_batch();
        let (lines, (reported, last)) = (self.dropped.lines(), self.reported);
        if lines > reported && last.is_none_or(|last| last.elapsed() >= REPORT_INTERVAL) {
            self.reported = (lines, Some(Instant::now()));
            tracing::warn!(
                lines,
                "log lines are missing, because standard error is not read fast enough"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Reader of the log that accepts one write per signal.
    struct Gated {
        began: mpsc::Sender<()>,
        go: Receiver<()>,
        writes: mpsc::Sender<String>,
    }

    impl Write for Gated {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.began.send(());
            // Without a gate it accepts everything.
            let _ = self.go.recv();
            let text = String::from_utf8(bytes.to_vec()).unwrap();
            let _ = self.writes.send(text);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_unread_log_blocks_no_task_and_its_lines_are_counted() {
        let ((began, begins), (open, go), (writes, all)) = (channel(), channel(), channel());
        let lines = LogWriter::with_queue_limit(Gated { began, go, writes }, 4);
        let mut line_queue = lines.writer();
        line_queue.write_all(b"first\n").unwrap();
        begins.recv().unwrap();
        // The worker hangs in its write: four find room.
        for line in 0..10 {
            line_queue
                .write_all(format!("{line}\n").as_bytes())
                .unwrap();
        }
        assert_eq!(lines.dropped().lines(), 6);
        drop(open);
        // Queued lines are written before the process exits.
        drop(lines);
        let all: Vec<String> = all.iter().collect();
        assert_eq!(all, ["first\n", "0\n1\n2\n3\n"]);
    }

    #[test]
    fn process_exit_waits_for_a_slow_reader_of_the_log() {
        let ((began, begins), (open, go)) = (channel(), channel());
        let (writes, written) = channel();
        let lines = LogWriter::new(Gated { began, go, writes });
        let mut line_queue = lines.writer();
        line_queue.write_all(b"first\n").unwrap();
        begins.recv().unwrap();
        line_queue.write_all(b"last\n").unwrap();
        let ((ended, end), start) = (channel(), Instant::now());
        std::thread::scope(|threads| {
            threads.spawn(move || {
                drop(lines);
                let _ = ended.send(());
            });
            // The worker's own guard gives up before this.
            let waits = end.recv_timeout(FLUSH_TIMEOUT / 2);
            drop(open);
            assert!(waits.is_err(), "it ended without its last lines");
            end.recv().unwrap();
        });
        // A machine that was stopped meanwhile may have used up the whole time.
        if start.elapsed() < FLUSH_TIMEOUT {
            assert_eq!(written.try_iter().collect::<String>(), "first\nlast\n");
        }
    }

    /// A disk that is full.
    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        let lines = LogWriter::new(Full);
        let (mut writer, dropped) = (lines.writer(), lines.dropped());
        for _ in 0..3 {
            writer.write_all(b"line\n").unwrap();
        }
        drop(lines);
        assert_eq!(dropped.lines(), 3);
    }
}
