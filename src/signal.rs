//! Handling of SIGTERM, SIGINT and SIGHUP, or of the events of a Windows console.
//!
//! The first SIGTERM or SIGINT cancels `stop`, and the process drains. The second cancels `abort`, and the command returns at
//! once, whatever is still open. SIGHUP causes a reload of the configuration. On Windows, Ctrl-Break counts as SIGTERM, Ctrl-C as
//! SIGINT, and the end of the console window as SIGHUP.

use std::io;

use anyhow::Context;
use system::{Hangup, Interrupt, Terminate};
use tokio_util::sync::CancellationToken;

#[cfg(unix)]
mod system {
    use std::io;
    pub(crate) use tokio::signal::unix::{
        Signal as Hangup, Signal as Interrupt, Signal as Terminate,
    };
    use tokio::signal::unix::{SignalKind, signal};

    pub(super) fn terminate() -> io::Result<Terminate> {
        signal(SignalKind::terminate())
    }

    pub(super) fn interrupt() -> io::Result<Interrupt> {
        signal(SignalKind::interrupt())
    }

    pub(super) fn hangup() -> io::Result<Hangup> {
        signal(SignalKind::hangup())
    }
}

#[cfg(windows)]
mod system {
    pub(crate) use tokio::signal::windows::{
        CtrlBreak as Terminate, CtrlC as Interrupt, CtrlClose as Hangup,
    };
    pub(super) use tokio::signal::windows::{
        ctrl_break as terminate, ctrl_c as interrupt, ctrl_close as hangup,
    };
}

/// Signals of a process that runs until it receives a signal to stop.
pub(crate) struct Signals {
    /// Cancelled by the first SIGTERM or SIGINT.
    pub(crate) stop: CancellationToken,
    /// Cancelled by the second SIGTERM or SIGINT.
    pub(crate) abort: CancellationToken,
    /// Stream of SIGHUPs, for the task that handles them. SIGHUP does not end the process.
    pub(crate) hangup: Option<Hangup>,
    terminate: Terminate,
    interrupt: Interrupt,
}

impl Signals {
    /// Installs the handlers. From then on the signals no longer end the process by themselves.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let install = || -> io::Result<Self> {
            Ok(Self {
                stop: CancellationToken::new(),
                abort: CancellationToken::new(),
                hangup: Some(system::hangup()?),
                terminate: system::terminate()?,
                interrupt: system::interrupt()?,
            })
        };
        install().context("cannot install the signal handlers")
    }

    /// Runs `future` until it ends, and returns its outcome, or `None` if a second signal came before.
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

/// Cancels `stop` at the first signal and `abort` at the second.
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
