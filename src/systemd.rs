//! Notifications to the service manager: the process is ready, its status, its watchdog, its stop.
//!
//! The protocol is `sd_notify(3)`: lines `KEY=VALUE` in one datagram to the socket that `NOTIFY_SOCKET` names. Without that
//! variable nothing happens. The process never waits for the service manager: a message that the manager does not take is
//! lost, and the next one comes soon. `WATCHDOG=1` means that the whole process answers: at a gateway every worker on its own
//! runtime, at an edge its one runtime, on which this code runs.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::ffi::OsStr;
use std::future::pending;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use causeway_edge::status::{Status, StatusReader};
use causeway_gateway::Watchdog;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

/// Interval of a gateway's status messages, unless a watchdog needs a shorter one.
const RHYTHM: Duration = Duration::from_secs(10);
/// Interval at which an edge's status is checked, and at which a gateway that is not ready yet is asked.
const LOOK: Duration = Duration::from_secs(1);
/// Time after which an edge that has not joined counts as started, so that a gateway does not delay units that wait for the
/// edge.
const JOINING: Duration = Duration::from_secs(15);
/// Time beyond its drain that a process may take for its last messages.
const FAREWELL: Duration = Duration::from_secs(10);

/// Connection to the service manager, if there is one. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct SystemdNotifier(Option<Arc<NotifySocket>>);

#[derive(Debug)]
struct NotifySocket {
    socket: UnixDatagram,
    watchdog: Option<Duration>,
    told: Mutex<LastStatus>,
}

/// Status that the service manager received last.
#[derive(Debug, Default)]
struct LastStatus {
    ready: bool,
    stopping: bool,
    status: String,
    alive: Option<Instant>,
}

impl SystemdNotifier {
    /// As `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` say.
    pub(crate) fn from_environment() -> Self {
        let Some(address) = std::env::var_os("NOTIFY_SOCKET").filter(|text| !text.is_empty())
        else {
            return Self(None);
        };
        let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        let ours = number("WATCHDOG_PID").is_none_or(|id| id == u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC").filter(|micros| ours && *micros > 0);
        match Self::connect(&address, watchdog.map(Duration::from_micros)) {
            Ok(notify) => notify,
            Err(error) => {
                tracing::warn!(?address, %error, "cannot connect to the service manager (NOTIFY_SOCKET); it receives no status");
                Self(None)
            }
        }
    }

    fn connect(address: &OsStr, watchdog: Option<Duration>) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        let address = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(address)?,
        };
        socket.connect_addr(&address)?;
        socket.set_nonblocking(true)?;
        let told = Mutex::default();
        Ok(Self(Some(Arc::new(NotifySocket {
            socket,
            watchdog,
            told,
        }))))
    }

    /// The process does what it is there for. Only the first call says more than a status.
    pub(crate) fn ready(&self, status: &str) {
        let Some(channel) = &self.0 else { return };
        let first = channel.told(|told| !std::mem::replace(&mut told.ready, true));
        if first {
            channel.say("READY=1");
        }
        self.status(status);
    }

    /// Sends the status of the process in one line, unless it is the same as the last one.
    pub(crate) fn status(&self, status: &str) {
        let Some(channel) = &self.0 else { return };
        let status = status.replace(['\n', '\r'], " ");
        if channel.told(|told| told.status != status) {
            channel.say(&format!("STATUS={status}"));
            channel.told(|told| told.status = status);
        }
    }

    /// The process ends within `grace` and a little more. Only the first call says anything.
    fn stopping(&self, grace: Duration) {
        let Some(channel) = &self.0 else { return };
        if channel.told(|told| std::mem::replace(&mut told.stopping, true)) {
            return;
        }
        let most = (grace + FAREWELL).as_micros();
        channel.say(&format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={most}"));
        self.status(&format!(
            "stopping: open streams have at most {} to end",
            humantime::format_duration(grace)
        ));
    }

    /// Reports that the whole process answers, no more often than the watchdog needs.
    fn alive(&self) {
        let Some(channel) = &self.0 else { return };
        let (now, due) = (Instant::now(), channel.rhythm() / 2);
        let soon = |last| now.duration_since(last) < due;
        if channel.watchdog.is_some() && !channel.told(|told| told.alive.is_some_and(soon)) {
            channel.say("WATCHDOG=1");
            channel.told(|told| told.alive = Some(now));
        }
    }

    /// Runs a gateway, and tells how it fares.
    pub(crate) async fn gateway<T>(
        &self,
        pulse: Watchdog,
        (stop, grace): (CancellationToken, Duration),
        run: impl Future<Output = T>,
    ) -> T {
        beside(run, async {
            let rhythm = self.rhythm().await;
            loop {
                let silent = pulse.silent(rhythm).await;
                if silent.is_empty() {
                    self.alive();
                } else {
                    let workers: Vec<_> = silent.iter().map(|worker| worker.0).collect();
                    tracing::error!(?workers, "workers have not responded for {rhythm:?}");
                    self.status(&format!("workers {workers:?} do not respond"));
                }
                if stop.is_cancelled() {
                    self.stopping(grace);
                } else if silent.is_empty() && pulse.is_ready() {
                    self.ready(&count(pulse.nodes(), "node connected", "nodes connected"));
                }
                let pause = if pulse.is_ready() { rhythm } else { LOOK };
                self.pause(pause, &stop).await;
            }
        })
        .await
    }

    /// Joins, if an edge still has to.
    pub(crate) async fn joining<T>(&self, join: impl Future<Output = T>) -> T {
        let silence = "not joined yet: no gateway has answered yet";
        self.beginning(join, silence).await
    }

    /// Runs work that must finish before the rest can begin. The process counts as started once the first attempt has failed:
    /// its status contains the reason then. The service manager does not wait until an operator resolves the cause.
    pub(crate) async fn beginning<T>(&self, work: impl Future<Output = T>, silence: &str) -> T {
        beside(work, async {
            self.rhythm().await;
            let begun = Instant::now();
            loop {
                sleep(LOOK).await;
                self.alive();
                if begun.elapsed() >= JOINING {
                    self.told_ready(silence);
                }
            }
        })
        .await
    }

    /// Why an edge has not joined yet.
    pub(crate) fn not_joined(&self, why: &str) {
        self.ready(&format!("not joined yet: {why}"));
    }

    /// Why a gateway has not begun yet.
    pub(crate) fn not_begun(&self, why: &str) {
        self.ready(&format!("not serving yet: {why}"));
    }

    /// Runs an edge that knows who it is, and tells how it fares.
    pub(crate) async fn edge<T>(
        &self,
        reader: StatusReader,
        stopping: (CancellationToken, Duration),
        run: impl Future<Output = T>,
    ) -> T {
        beside(run, self.watch(stopping, || fares(&reader.status()))).await
    }

    /// Ready, if that was not said before.
    fn told_ready(&self, status: &str) {
        let known = |channel: &Arc<NotifySocket>| channel.told(|told| told.ready);
        if !self.0.as_ref().is_some_and(known) {
            self.ready(status);
        }
    }

    /// Returns the interval of watchdog messages. Never returns without a service manager.
    async fn rhythm(&self) -> Duration {
        match &self.0 {
            Some(channel) => channel.rhythm(),
            None => pending().await,
        }
    }

    /// Tells how something fares that is ready as soon as it runs, until it is dropped.
    async fn watch(
        &self,
        (stop, grace): (CancellationToken, Duration),
        fares: impl Fn() -> String,
    ) -> Infallible {
        self.rhythm().await;
        loop {
            self.alive();
            if stop.is_cancelled() {
                self.stopping(grace);
            } else {
                self.ready(&fares());
            }
            self.pause(LOOK, &stop).await;
        }
    }

    /// Waits, but not after the process was asked to stop and has not reported so.
    async fn pause(&self, time: Duration, stop: &CancellationToken) {
        let known = |channel: &Arc<NotifySocket>| channel.told(|told| told.stopping);
        if self.0.as_ref().is_some_and(known) {
            sleep(time).await;
        } else {
            tokio::select! {
                () = sleep(time) => {}
                () = stop.cancelled() => {}
            }
        }
    }
}

impl NotifySocket {
    /// A quarter of what the watchdog allows: a sign of life may come late by as much again.
    fn rhythm(&self) -> Duration {
        self.watchdog
            .map_or(RHYTHM, |watchdog| (watchdog / 4).min(RHYTHM))
    }

    fn told<T>(&self, look: impl FnOnce(&mut LastStatus) -> T) -> T {
        look(&mut self.told.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn say(&self, words: &str) {
        if let Err(error) = self.socket.send(words.as_bytes()) {
            tracing::debug!(%error, words, "cannot send the status to the service manager");
        }
    }
}

/// The outcome of `work`, while `telling` goes on beside it. The work comes first whenever both could go on.
async fn beside<T>(work: impl Future<Output = T>, telling: impl Future<Output = Infallible>) -> T {
    tokio::select! {
        biased;
        outcome = work => outcome,
        never = telling => match never {},
    }
}

fn count(count: usize, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// How an edge fares, in one line.
fn fares(status: &Status) -> String {
    let mut held: Vec<&str> = Vec::new();
    let mut places = BTreeSet::new();
    for tunnel in &status.tunnels {
        if !held.contains(&tunnel.gateway.as_str()) {
            held.push(&tunnel.gateway);
        }
        let own = tunnel.address;
        let own = own.map_or_else(String::new, |address| format!(" ({address})"));
        places.insert(format!("{}{own}", tunnel.gateway));
    }
    let (node, known) = (&status.node, status.gateways.len());
    // The count that the gateways announce, because one address may lead to several.
    let short = status
        .reached
        .filter(|reached| reached.gateways < reached.of);
    match &status.trouble {
        _ if short.is_some() && !held.is_empty() => {
            let (reached, of) = short.map_or((0, 0), |short| (short.gateways, short.of));
            let places: Vec<_> = places.into_iter().collect();
            let places = places.join(", ");
            format!("{node}: connected to {reached} of {of} gateways: {places}")
        }
        // One name resolves to several gateways.
        _ if places.len() > held.len() => {
            let places: Vec<_> = places.into_iter().collect();
            format!("{node}: connected to {}", places.join(", "))
        }
        _ if held.len() == 1 && known == 1 => format!("{node}: connected to {}", held[0]),
        _ if !held.is_empty() => format!(
            "{node}: connected to {} of {known} gateways: {}",
            held.len(),
            held.join(", ")
        ),
        Some(trouble) => format!("{node}: not connected: {}; retrying", trouble.what),
        None => format!(
            "{node}: connecting to {}",
            count(known, "gateway", "gateways")
        ),
    }
}

#[cfg(test)]
mod tests;
