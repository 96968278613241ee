//! `causeway supervise`: runs a gateway as a child process of a service manager's unit.
//!
//! systemd starts the next process of a unit only when the main process has ended. With this command as the main process, a
//! restart does not wait for the open streams of the gateway: after SIGTERM this process ends as soon as the child reports that it
//! stops, and the child drains beside its successor, which takes over its sockets. The unit needs `KillMode=process`.
//!
//! A gateway that has run for a while is started again soon, and one that ends at once is tried again after
//! [`MIN_RESTART_INTERVAL`]. The delay is here, because systemd delays longer after repeated failures only since version 254.
//!
//! Messages of the child (`sd_notify(3)`) are passed on, because only those of the main process count.

use std::process::ExitStatus;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::net::UnixDatagram;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep_until, timeout};

use crate::cli::operator as cli;
use crate::operator::systemd::NOTIFY_SOCKET;
use crate::operator::{EXIT_CONFIG, EXIT_USAGE};

/// Maximum length of a message to the service manager, in bytes.
const MAX_MESSAGE: usize = 4096;
/// Time in which a child reports that it stops. With `KillMode=process` the service manager never kills a child that hangs, and
/// its successor could not take over from it.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time between the starts of a process that ends without a request to stop.
const MIN_RESTART_INTERVAL: Duration = Duration::from_secs(5);
/// Line with which a process reports that it stops.
const STOPPING: &[u8] = b"STOPPING=1";

/// Failure of the child, with its exit code.
#[derive(Debug, thiserror::Error)]
#[error("the process has ended: {0}")]
pub(crate) struct ChildFailed(ExitStatus);

impl ChildFailed {
    /// Returns the exit code of a child that has logged its failure. Returns `None` after a signal.
    pub(crate) fn exit_code(&self) -> Option<u8> {
        self.0.code()?.try_into().ok()
    }

    /// Whether another attempt may succeed.
    fn may_be_restarted(&self) -> bool {
        !matches!(self.exit_code(), Some(EXIT_USAGE | EXIT_CONFIG))
    }
}

/// End of a child that has not failed.
enum Ended {
    /// By SIGTERM or SIGINT to this process.
    Stopped,
    ByItself,
}

/// Runs the command as a child process, until it ends or until SIGTERM or SIGINT. If another attempt may follow, returns
/// [`MIN_RESTART_INTERVAL`] after the start at the earliest, whatever the reason.
pub(crate) async fn run(args: cli::Supervise) -> anyhow::Result<()> {
    let next_start = Instant::now() + MIN_RESTART_INTERVAL;
    let mut signals = Signals::listen().context("cannot install the signal handlers")?;
    let ended = run_child(&args, &mut signals).await;
    let may_be_restarted = match &ended {
        Ok(Ended::Stopped) => false,
        Ok(Ended::ByItself) => true,
        Err(error) => error
            .downcast_ref()
            .is_none_or(ChildFailed::may_be_restarted),
    };
    if may_be_restarted {
        tokio::select! {
            () = sleep_until(next_start) => {}
            _ = signals.abort.recv() => {}
            () = signals.stop.recv() => return Ok(()),
        }
    }
    ended.map(|_| ())
}

async fn run_child(args: &cli::Supervise, signals: &mut Signals) -> anyhow::Result<Ended> {
    let relay = NotifyRelay::from_environment().context("cannot relay messages to systemd")?;
    // Read before the program file may be replaced.
    let program = std::env::current_exe().context("cannot find the program file")?;
    let mut command = Command::new(program);
    command.args(&args.command).env_remove("WATCHDOG_PID");
    command.env(NOTIFY_SOCKET, relay.path());
    let mut child = command.spawn().context("cannot start the process")?;
    loop {
        tokio::select! {
            status = child.wait() => {
                let status = status.context("cannot wait for the process")?;
                if status.success() {
                    return Ok(Ended::ByItself);
                }
                return Err(ChildFailed(status).into());
            }
            () = signals.stop.recv() => {
                stop(&mut child, &relay).await?;
                return Ok(Ended::Stopped);
            }
            _ = signals.hangup.recv() => send(&child, Signal::SIGHUP)?,
            _ = signals.abort.recv() => {
                send(&child, Signal::SIGKILL)?;
                anyhow::bail!("the process did not respond in time (watchdog), and was killed");
            }
            _ = relay.pass_on() => {}
        }
    }
}

/// Signals to this process.
struct Signals {
    stop: StopSignals,
    hangup: tokio::signal::unix::Signal,
    /// systemd sends it when the watchdog has expired.
    abort: tokio::signal::unix::Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            stop: StopSignals {
                terminate: signal(SignalKind::terminate())?,
                interrupt: signal(SignalKind::interrupt())?,
            },
            hangup: signal(SignalKind::hangup())?,
            abort: signal(SignalKind::from_raw(Signal::SIGABRT as i32))?,
        })
    }
}

/// SIGTERM and SIGINT.
struct StopSignals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl StopSignals {
    async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Stops the child. Returns when it has ended or reports that it stops. Kills a child that does neither.
async fn stop(child: &mut Child, relay: &NotifyRelay) -> anyhow::Result<()> {
    send(child, Signal::SIGTERM)?;
    let stopping = async {
        tokio::select! {
            _ = child.wait() => {}
            () = relay.pass_on_until_stopping() => {}
        }
    };
    if timeout(STOP_TIMEOUT, stopping).await.is_ok() {
        return Ok(());
    }
    send(child, Signal::SIGKILL)?;
    anyhow::bail!("the process did not stop within {STOP_TIMEOUT:?}, and was killed")
}

fn send(child: &Child, signal: Signal) -> anyhow::Result<()> {
    // A child that was waited for has no id any more.
    let Some(id) = child.id().and_then(|id| id.try_into().ok()) else {
        return Ok(());
    };
    kill(Pid::from_raw(id), signal).with_context(|| format!("cannot send {signal} to the process"))
}

/// Socket for messages of the child, and the socket of the service manager.
struct NotifyRelay {
    child: UnixDatagram,
    manager: Option<UnixDatagram>,
    /// Private directory of the child's socket, which is removed at the end.
    directory: TempDir,
}

impl NotifyRelay {
    /// Connects to the service manager, if the environment names one.
    fn from_environment() -> anyhow::Result<Self> {
        let manager = crate::operator::systemd::connect_from_environment()?;
        let directory = tempfile::tempdir()?;
        let child = UnixDatagram::bind(directory.path().join("notify"))?;
        Ok(Self {
            child,
            manager: manager.map(UnixDatagram::from_std).transpose()?,
            directory,
        })
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("notify")
    }

    /// Passes on one message of the child. Returns whether the message says that the child stops.
    async fn pass_on(&self) -> bool {
        let mut message = [0; MAX_MESSAGE];
        let Ok(length) = self.child.recv(&mut message).await else {
            return std::future::pending().await;
        };
        let message = &message[..length];
        if let Some(manager) = &self.manager {
            // A message that the manager does not accept is lost, and the next one follows soon.
            let _ = manager.try_send(message);
        }
        message
            .split(|byte| *byte == b'\n')
            .any(|line| line == STOPPING)
    }

    async fn pass_on_until_stopping(&self) {
        while !self.pass_on().await {}
    }
}
