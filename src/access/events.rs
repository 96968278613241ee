//! Messages of commands that run until a signal: lines for people, or a line of JSON for each event.
//!
//! The address of a local port is always printed, because scripts wait for it. Connections are printed on a terminal only, as
//! pipes should contain nothing that nobody asked for. Failures go to standard error.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::net::SocketAddr;

use serde_json::json;

use crate::output::{errln, outln};

/// Printer of events.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Events {
    json: bool,
    is_terminal: bool,
}

impl Events {
    /// Returns a printer, of JSON or of lines for people.
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            is_terminal: io::stdout().is_terminal(),
        }
    }

    /// Prints that a local port is open, with `text` for people.
    pub(crate) fn listening(
        self,
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

    /// Prints that a session to a target begins.
    pub(crate) fn connection(self, peer: SocketAddr, target: &str) {
        // The command goes on although nobody reads its output.
        if self.json {
            let _ = outln!(
                "{}",
                json!({"event": "connection", "peer": peer, "target": target})
            );
        } else if self.is_terminal {
            let _ = outln!("Handling connection from {peer} to {target}");
        }
    }

    /// Prints that a session could not begin.
    pub(crate) fn refused(self, target: &str, reason: &dyn Display) {
        self.failure("refused", target, reason);
    }

    /// Prints that a session broke. This is ordinary if programs do not close their connections in order, so only a person or a
    /// program that wants all events sees it.
    pub(crate) fn broken(self, target: &str, reason: &dyn Display) {
        if self.json || self.is_terminal {
            self.failure("broken", target, reason);
        }
    }

    fn failure(self, event: &str, target: &str, reason: &dyn Display) {
        if self.json {
            let reason = reason.to_string();
            let _ = outln!(
                "{}",
                json!({"event": event, "target": target, "reason": reason})
            );
        } else {
            errln!("causeway: {target}: {reason}");
        }
    }
}
