//! SIGTERM and SIGINT ask the process to stop; SIGHUP asks it to read its configuration anew.
//!
//! The first SIGTERM or SIGINT cancels `stop`, and what runs drains. The second cancels
//! `now`, and the command returns at once, whatever is still open.

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Signals of a process that runs until it is asked to stop.
pub(crate) struct Signals {
    /// Cancelled by the first SIGTERM or SIGINT.
    pub(crate) stop: CancellationToken,
    /// Cancelled by the second.
    pub(crate) abort: CancellationToken,
    /// Each SIGHUP, for the task that handles it. It ends no process.
    pub(crate) hangup: Option<Signal>,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Takes the signals over; from here on they no longer end the process by themselves.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let install = |kind| signal(kind).context("cannot install the signal handlers");
        Ok(Self {
            stop: CancellationToken::new(),
            abort: CancellationToken::new(),
            hangup: Some(install(SignalKind::hangup())?),
            terminate: install(SignalKind::terminate())?,
            interrupt: install(SignalKind::interrupt())?,
        })
    }

    /// Runs `future` until it ends (its outcome), or until a second signal ends it (none).
    pub(crate) async fn run<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = std::pin::pin!(future);
        loop {
            tokio::select! {
                biased;
                outcome = &mut future => return Some(outcome),
                _ = self.terminate.recv() => handle_signal("SIGTERM", &self.stop, &self.abort),
                _ = self.interrupt.recv() => handle_signal("SIGINT", &self.stop, &self.abort),
                () = self.abort.cancelled() => return None,
            }
        }
    }
}

/// The first signal asks, the second ends.
fn handle_signal(name: &str, stop: &CancellationToken, abort: &CancellationToken) {
    if stop.is_cancelled() {
        tracing::warn!("second {name}: stopping at once");
        abort.cancel();
    } else {
        tracing::info!("{name}: draining; a second signal stops at once");
        stop.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_drains_and_the_second_ends() {
        let (stop, now) = (CancellationToken::new(), CancellationToken::new());
        handle_signal("SIGTERM", &stop, &now);
        assert!(stop.is_cancelled() && !now.is_cancelled());
        handle_signal("SIGINT", &stop, &now);
        assert!(now.is_cancelled());
    }
}
