//! Notifications to the service manager: the process is ready, its status, its watchdog, its stop.
//!
//! The protocol is `sd_notify(3)`: lines `KEY=VALUE` in one datagram to the socket that `NOTIFY_SOCKET` names. Without that
//! variable nothing happens. The process never waits for the service manager: a message that the manager does not accept is
//! lost, and the next one follows soon. `WATCHDOG=1` means that the whole process responds: at a gateway every worker on its
//! own runtime, at an edge its one runtime, on which this code runs.

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
const STATUS_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which the status of an edge is checked, and that of a gateway that is not ready yet.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which an edge that has not joined counts as started, so that a gateway does not delay units that wait for the
/// edge.
const JOIN_GRACE: Duration = Duration::from_secs(15);
/// Time beyond its drain that a process may take for its last messages.
const STOP_MARGIN: Duration = Duration::from_secs(10);

/// Variable that names the socket of the service manager.
pub(crate) const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// Connects to the service manager that the environment names.
///
/// # Errors
/// If the socket cannot be connected.
pub(crate) fn connect_from_environment() -> io::Result<Option<UnixDatagram>> {
    let address = std::env::var_os(NOTIFY_SOCKET).filter(|text| !text.is_empty());
    address.as_deref().map(connect).transpose()
}

fn connect(address: &OsStr) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(address)?,
    };
    socket.connect_addr(&address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Connection to the service manager, if there is one. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct SystemdNotifier(Option<Arc<NotifySocket>>);

#[derive(Debug)]
struct NotifySocket {
    socket: UnixDatagram,
    watchdog: Option<Duration>,
    last_status: Mutex<LastStatus>,
}

/// Status that was sent last.
#[derive(Debug, Default)]
struct LastStatus {
    ready: bool,
    stopping: bool,
    status: String,
    last_alive: Option<Instant>,
}

impl SystemdNotifier {
    /// Connects as the variables `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` state.
    pub(crate) fn from_environment() -> Self {
        let socket = match connect_from_environment() {
            Ok(Some(socket)) => socket,
            Ok(None) => return Self(None),
            Err(error) => {
                tracing::warn!(%error, "cannot connect to the service manager (NOTIFY_SOCKET); it receives no status");
                return Self(None);
            }
        };
        let env_number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        let is_for_this_process =
            env_number("WATCHDOG_PID").is_none_or(|id| id == u64::from(std::process::id()));
        let watchdog =
            env_number("WATCHDOG_USEC").filter(|micros| is_for_this_process && *micros > 0);
        Self::new(socket, watchdog.map(Duration::from_micros))
    }

    fn new(socket: UnixDatagram, watchdog: Option<Duration>) -> Self {
        let last_status = Mutex::default();
        Self(Some(Arc::new(NotifySocket {
            socket,
            watchdog,
            last_status,
        })))
    }

    /// Reports that the process is ready. Later calls only send the status.
    pub(crate) fn notify_ready(&self, status: &str) {
        let Some(channel) = &self.0 else { return };
        let is_first = channel.with_last_status(|last| !std::mem::replace(&mut last.ready, true));
        if is_first {
            channel.send("READY=1");
        }
        self.notify_status(status);
    }

    /// Sends the status of the process in one line, unless it is the same as the last one.
    pub(crate) fn notify_status(&self, status: &str) {
        let Some(channel) = &self.0 else { return };
        let status = status.replace(['\n', '\r'], " ");
        if channel.with_last_status(|last| last.status != status) {
            channel.send(&format!("STATUS={status}"));
            channel.with_last_status(|last| last.status = status);
        }
    }

    /// Reports that the process ends within `grace` and [`STOP_MARGIN`]. Later calls send nothing.
    fn notify_stopping(&self, grace: Duration) {
        let Some(channel) = &self.0 else { return };
        if channel.with_last_status(|last| std::mem::replace(&mut last.stopping, true)) {
            return;
        }
        let timeout_micros = (grace + STOP_MARGIN).as_micros();
        channel.send(&format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={timeout_micros}"));
        self.notify_status(&format!(
            "stopping: open streams have at most {} to end",
            humantime::format_duration(grace)
        ));
    }

    /// Reports that the whole process responds, not more often than the watchdog needs.
    fn notify_alive(&self) {
        let Some(channel) = &self.0 else { return };
        let (now, min_interval) = (Instant::now(), channel.notify_interval() / 2);
        let is_recent = |last| now.duration_since(last) < min_interval;
        if channel.watchdog.is_some()
            && !channel.with_last_status(|last| last.last_alive.is_some_and(is_recent))
        {
            channel.send("WATCHDOG=1");
            channel.with_last_status(|last| last.last_alive = Some(now));
        }
    }

    /// Runs a gateway, and reports its status.
    pub(crate) async fn run_gateway<T>(
        &self,
        watchdog: Watchdog,
        (stop, grace): (CancellationToken, Duration),
        future: impl Future<Output = T>,
    ) -> T {
        run_alongside(future, async {
            let interval = self.notify_interval().await;
            loop {
                let silent = watchdog.unresponsive_workers(interval).await;
                if silent.is_empty() {
                    self.notify_alive();
                } else {
                    let workers: Vec<_> = silent.iter().map(|worker| worker.0).collect();
                    tracing::error!(?workers, "workers have not responded for {interval:?}");
                    self.notify_status(&format!("workers {workers:?} do not respond"));
                }
                if stop.is_cancelled() {
                    self.notify_stopping(grace);
                } else if silent.is_empty() && watchdog.is_ready() {
                    self.notify_ready(&count(
                        watchdog.nodes(),
                        "node connected",
                        "nodes connected",
                    ));
                }
                let pause = if watchdog.is_ready() {
                    interval
                } else {
                    CHECK_INTERVAL
                };
                self.pause(pause, &stop).await;
            }
        })
        .await
    }

    /// Runs the future that joins, if an edge has not joined yet.
    pub(crate) async fn run_join<T>(&self, future: impl Future<Output = T>) -> T {
        let waiting_status = "not joined yet: no gateway has answered yet";
        self.run_startup(future, waiting_status).await
    }

    /// Runs work that must finish before the rest can begin. The process counts as started once the first attempt has failed:
    /// its status contains the reason then. The service manager does not wait until an operator resolves the cause.
    pub(crate) async fn run_startup<T>(
        &self,
        future: impl Future<Output = T>,
        waiting_status: &str,
    ) -> T {
        run_alongside(future, async {
            self.notify_interval().await;
            let started = Instant::now();
            loop {
                sleep(CHECK_INTERVAL).await;
                self.notify_alive();
                if started.elapsed() >= JOIN_GRACE {
                    self.notify_ready_once(waiting_status);
                }
            }
        })
        .await
    }

    /// Reports the reason for which an edge has not joined yet.
    pub(crate) fn notify_not_joined(&self, why: &str) {
        self.notify_ready(&format!("not joined yet: {why}"));
    }

    /// Reports the reason for which a gateway has not started yet.
    pub(crate) fn notify_not_started(&self, why: &str) {
        self.notify_ready(&format!("not serving yet: {why}"));
    }

    /// Runs an edge that has an identity, and reports its status.
    pub(crate) async fn run_edge<T>(
        &self,
        status_reader: StatusReader,
        stopping: (CancellationToken, Duration),
        future: impl Future<Output = T>,
    ) -> T {
        run_alongside(
            future,
            self.run_notifications(stopping, || edge_status_line(&status_reader.status())),
        )
        .await
    }

    /// Reports that the process is ready, if that was not reported before.
    fn notify_ready_once(&self, status: &str) {
        let is_ready = |channel: &Arc<NotifySocket>| channel.with_last_status(|last| last.ready);
        if !self.0.as_ref().is_some_and(is_ready) {
            self.notify_ready(status);
        }
    }

    /// Returns the interval of watchdog messages. Never returns without a service manager.
    async fn notify_interval(&self) -> Duration {
        match &self.0 {
            Some(channel) => channel.notify_interval(),
            None => pending().await,
        }
    }

    /// Reports the status of a process that is ready as soon as it runs, until the future is dropped.
    async fn run_notifications(
        &self,
        (stop, grace): (CancellationToken, Duration),
        status_line: impl Fn() -> String,
    ) -> Infallible {
        self.notify_interval().await;
        loop {
            self.notify_alive();
            if stop.is_cancelled() {
                self.notify_stopping(grace);
            } else {
                self.notify_ready(&status_line());
            }
            self.pause(CHECK_INTERVAL, &stop).await;
        }
    }

    /// Waits for `time`, or until the process must stop and has not reported that yet.
    async fn pause(&self, time: Duration, stop: &CancellationToken) {
        let is_stopping =
            |channel: &Arc<NotifySocket>| channel.with_last_status(|last| last.stopping);
        if self.0.as_ref().is_some_and(is_stopping) {
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
    /// Returns the interval of watchdog messages: a quarter of the watchdog's timeout, so that a message may be late.
    fn notify_interval(&self) -> Duration {
        self.watchdog.map_or(STATUS_INTERVAL, |watchdog| {
            (watchdog / 4).min(STATUS_INTERVAL)
        })
    }

    fn with_last_status<T>(&self, action: impl FnOnce(&mut LastStatus) -> T) -> T {
        action(
            &mut self
                .last_status
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }

    fn send(&self, words: &str) {
        if let Err(error) = self.socket.send(words.as_bytes()) {
            tracing::debug!(%error, words, "cannot send the status to the service manager");
        }
    }
}

/// Returns the outcome of `future`, and runs `notifications` meanwhile. `future` is polled first.
async fn run_alongside<T>(
    future: impl Future<Output = T>,
    notifications: impl Future<Output = Infallible>,
) -> T {
    tokio::select! {
        biased;
        outcome = future => outcome,
        never = notifications => match never {},
    }
}

fn count(count: usize, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// Returns the status of an edge in one line.
fn edge_status_line(status: &Status) -> String {
    let mut connected: Vec<&str> = Vec::new();
    let mut locations = BTreeSet::new();
    for tunnel in &status.tunnels {
        if !connected.contains(&tunnel.gateway.as_str()) {
            connected.push(&tunnel.gateway);
        }
        let address_text = tunnel.address;
        let address_text = address_text.map_or_else(String::new, |address| format!(" ({address})"));
        locations.insert(format!("{}{address_text}", tunnel.gateway));
    }
    let (node, known_gateways) = (&status.node, status.gateways.len());
    // Number of gateways that the gateways announce, because one address may lead to several.
    let shortfall = status
        .reached
        .filter(|reached| reached.gateways < reached.wanted.unwrap_or(u32::MAX).min(reached.of));
    match &status.trouble {
        _ if shortfall.is_some() && !connected.is_empty() => {
            let (reached, of) = shortfall.map_or((0, 0), |short| (short.gateways, short.of));
            let wanted = shortfall.and_then(|short| short.wanted);
            let wanted = wanted.map_or_else(String::new, |wanted| format!(" ({wanted} wanted)"));
            let locations: Vec<_> = locations.into_iter().collect();
            let locations = locations.join(", ");
            format!("{node}: connected to {reached} of {of} gateways{wanted}: {locations}")
        }
        // One name resolves to several gateways.
        _ if locations.len() > connected.len() => {
            let locations: Vec<_> = locations.into_iter().collect();
            format!("{node}: connected to {}", locations.join(", "))
        }
        _ if connected.len() == 1 && known_gateways == 1 => {
            format!("{node}: connected to {}", connected[0])
        }
        _ if !connected.is_empty() && status.reached.is_some() => {
            format!("{node}: connected to {}", connected.join(", "))
        }
        _ if !connected.is_empty() => format!(
            "{node}: connected to {} of {known_gateways} gateways: {}",
            connected.len(),
            connected.join(", ")
        ),
        Some(trouble) => format!("{node}: not connected: {}; retrying", trouble.what),
        None => format!(
            "{node}: connecting to {}",
            count(known_gateways, "gateway", "gateways")
        ),
    }
}

#[cfg(test)]
mod tests;
