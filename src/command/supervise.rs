//! `causeway supervise`: runs a gateway as a child process of a service manager's unit.
//!
//! systemd starts the next process of a unit only when the main process has ended. With this command as the main process, a
//! restart does not wait for the open streams of the gateway: SIGTERM ends this process at once, and the child drains beside its
//! successor, which takes over its sockets. The unit needs `KillMode=process`.
//!
//! Messages of the child (`sd_notify(3)`) are passed on, because only those of the main process count.

use std::process::ExitStatus;

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::net::UnixDatagram;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli;
use crate::systemd::NOTIFY_SOCKET;

/// Maximum length of a message to the service manager, in bytes.
const MAX_MESSAGE: usize = 4096;

/// Failure of the child, with its exit code.
#[derive(Debug, thiserror::Error)]
#[error("the process has ended: {0}")]
pub(crate) struct ChildFailed(ExitStatus);

impl ChildFailed {
    /// Returns the exit code of the child. A signal counts as a failure.
    pub(crate) fn exit_code(&self) -> u8 {
        self.0
            .code()
            .and_then(|code| code.try_into().ok())
            .unwrap_or(1)
    }
}

/// Runs the command as a child process, until it ends or until SIGTERM or SIGINT.
pub(crate) async fn run(args: cli::Supervise) -> anyhow::Result<()> {
    let listen = |kind| signal(kind).context("cannot install the signal handlers");
    let mut terminate = listen(SignalKind::terminate())?;
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut hangup = listen(SignalKind::hangup())?;
    // systemd sends it when the watchdog has expired.
    let mut abort = listen(SignalKind::from_raw(Signal::SIGABRT as i32))?;
    let relay = NotifyRelay::from_environment().context("cannot relay messages to systemd")?;
    // Read before the program file may be replaced.
    let program = std::env::current_exe().context("cannot find the program file")?;
    let mut command = Command::new(program);
    command.args(&args.command).env_remove("WATCHDOG_PID");
    if let Some(relay) = &relay {
        command.env(NOTIFY_SOCKET, relay.path());
    }
    let mut child = command.spawn().context("cannot start the process")?;
    loop {
        tokio::select! {
            status = child.wait() => {
                let status = status.context("cannot wait for the process")?;
                return if status.success() { Ok(()) } else { Err(ChildFailed(status).into()) };
            }
            _ = terminate.recv() => return send(&child, Signal::SIGTERM),
            _ = interrupt.recv() => return send(&child, Signal::SIGTERM),
            _ = hangup.recv() => send(&child, Signal::SIGHUP)?,
            _ = abort.recv() => {
                send(&child, Signal::SIGKILL)?;
                anyhow::bail!("the process did not respond in time (watchdog), and was killed");
            }
            () = pass_on(relay.as_ref()) => {}
        }
    }
}

fn send(child: &Child, signal: Signal) -> anyhow::Result<()> {
    // A child that was waited for has no id any more.
    let Some(id) = child.id().and_then(|id| id.try_into().ok()) else {
        return Ok(());
    };
    kill(Pid::from_raw(id), signal).with_context(|| format!("cannot send {signal} to the process"))
}

/// Passes on one message of the child. Never returns without a service manager.
async fn pass_on(relay: Option<&NotifyRelay>) {
    match relay {
        Some(relay) => relay.pass_on().await,
        None => std::future::pending().await,
    }
}

/// Socket for messages of the child, and the socket of the service manager.
struct NotifyRelay {
    child: UnixDatagram,
    manager: UnixDatagram,
    /// Private directory of the child's socket, which is removed at the end.
    directory: TempDir,
}

impl NotifyRelay {
    /// Connects to the service manager, if the environment names one.
    fn from_environment() -> anyhow::Result<Option<Self>> {
        let Some(manager) = crate::systemd::connect_from_environment()? else {
            return Ok(None);
        };
        let directory = tempfile::tempdir()?;
        let child = UnixDatagram::bind(directory.path().join("notify"))?;
        let manager = UnixDatagram::from_std(manager)?;
        Ok(Some(Self {
            child,
            manager,
            directory,
        }))
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("notify")
    }

    async fn pass_on(&self) {
        let mut message = [0; MAX_MESSAGE];
        let Ok(length) = self.child.recv(&mut message).await else {
            return std::future::pending().await;
        };
        // A message that the manager does not accept is lost, and the next one follows soon.
        let _ = self.manager.try_send(&message[..length]);
    }
}
