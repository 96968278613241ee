//! Messages of commands that run until a signal: lines for people, or a line of JSON for each event.
//!
//! The address of a local port is always printed, because scripts wait for it. Connections are printed on a terminal only, as
//! pipes should contain nothing that nobody asked for. Failures go to standard error.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use serde_json::json;

use crate::output::{errln, outln};

/// Number of lines that wait for a reader of the output. Further ones are dropped, because sessions must not wait for it.
const MAX_WAITING_LINES: usize = 256;

/// Printer of events. Cheap to clone. A thread of its own prints the lines, because a terminal or a pipe may stop reading.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    json: bool,
    is_terminal: bool,
    lines: SyncSender<Line>,
    dropped: Arc<AtomicUsize>,
}

/// Line for standard output or standard error.
#[derive(Debug)]
enum Line {
    Output(String),
    Error(String),
}

impl Events {
    /// Returns a printer, of JSON or of lines for people.
    pub(crate) fn new(json: bool) -> Self {
        let (lines, waiting) = sync_channel(MAX_WAITING_LINES);
        let dropped = Arc::<AtomicUsize>::default();
        let count = dropped.clone();
        // The thread ends with the last clone of this printer, or with the process.
        #[expect(
            clippy::disallowed_methods,
            reason = "it serves no connections, and may wait for a reader for ever"
        )]
        thread::spawn(move || print_lines(&waiting, &count));
        Self {
            json,
            is_terminal: io::stdout().is_terminal(),
            lines,
            dropped,
        }
    }

    fn print(&self, line: Line) {
        if self.lines.try_send(line).is_err() {
            self.dropped.fetch_add(1, Relaxed);
        }
    }

    /// Prints that a local port is open, with `text` for people.
    pub(crate) fn listening(
        &self,
        local: SocketAddr,
        target: &str,
        text: &str,
    ) -> anyhow::Result<()> {
        if self.json {
            let line = json!({"event": "listening", "address": local, "target": target});
            return outln!("{line}");
        }
        outln!("{text}")
    }

    /// Prints that a session to a target begins, with `text` for people.
    pub(crate) fn connection(&self, peer: SocketAddr, target: &str, text: &str) {
        if self.json {
            let line = json!({"event": "connection", "peer": peer, "target": target});
            self.print(Line::Output(line.to_string()));
        } else if self.is_terminal {
            self.print(Line::Output(text.to_owned()));
        }
    }

    /// Prints that a session could not begin.
    pub(crate) fn refused(&self, target: &str, reason: &dyn Display) {
        self.failure("refused", target, reason);
    }

    /// Prints that a session broke. This is ordinary if programs do not close their connections in order, so only a person or a
    /// program that wants all events sees it.
    pub(crate) fn broken(&self, target: &str, reason: &dyn Display) {
        if self.json || self.is_terminal {
            self.failure("broken", target, reason);
        }
    }

    fn failure(&self, event: &str, target: &str, reason: &dyn Display) {
        if self.json {
            let reason = reason.to_string();
            let line = json!({"event": event, "target": target, "reason": reason});
            self.print(Line::Output(line.to_string()));
        } else {
            self.print(Line::Error(format!("causeway: {target}: {reason}")));
        }
    }
}

/// Prints lines until no printer is left. The command goes on although nobody reads its output.
fn print_lines(lines: &Receiver<Line>, dropped: &AtomicUsize) {
    for line in lines {
        match line {
            Line::Output(text) => drop(outln!("{text}")),
            Line::Error(text) => errln!("{text}"),
        }
        let count = dropped.swap(0, Relaxed);
        if count > 0 {
            errln!("causeway: {count} messages were not printed, because the output was not read");
        }
    }
}
