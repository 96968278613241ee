//! Other gateways (peers): finds them, keeps their nodes in the directory, and opens the links by which requests reach them.
//!
//! Each gateway dials each other one at its tunnel port: once for control, where the peer states its nodes and reports about node
//! pools (`feed`), and once from each worker for requests. Control has a connection of its own, so requests never delay it. A peer
//! is removed with its control connection, and all its entries with it. A process that answers with this process's own identifier
//! is this process. `queries` asks all peers for the progress of a rotation or of revocations.

mod feed;
mod message;
mod queries;
pub(crate) mod transport;

#[cfg(test)]
mod tests;

pub(crate) use feed::NodeFeed;
pub(crate) use queries::{query_revocations, query_rotation};

use crate::{
    config,
    control::{drain::ReadinessBlock, gateway_revocation::wait_revoked},
    state::{
        Registry,
        directory::{ForwardingGateway, HeldState, Peer, PeerLink},
        peer_addresses::{AddressOwner, ConnectFailure, PeerAddress},
    },
    worker::{WorkerId, Workers},
};
use causeway_certs::{NodeName, RevokedSerials};
use causeway_config::host_port;
use causeway_rt::{backoff::Backoff, log_throttle::FailureThrottle, resolve, task::TaskGroup};
use causeway_tunnel::{
    Tunnel, TunnelEnd,
    buffered::MemoryBudget,
    control_stream::{ControlStream, ControlStreamError},
    edge_side::StreamRequest,
    gateway_side::{self, ConnectionDriver, GatewaySideConfig},
};
use feed::own_hello;
use futures_util::{
    FutureExt,
    future::{BoxFuture, OptionFuture, join_all},
};
use message::{PROTOCOL, PeerHello, PeerMessage, PoolEntry};
use rustls::ClientConfig;
use std::{
    collections::{HashMap, HashSet},
    fmt, io,
    pin::pin,
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio::{
    sync::{oneshot, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{Span, debug, info, info_span, warn};
use transport::{ConnectFn, PeerIo, PeerStream};

/// Time limit of a name's resolution.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Divisor of `limits.buffered_bytes`: bytes that the streams of one link may leave unread before its windows shrink.
const LINK_BUDGET_DIVISOR: usize = 4;
/// Age of a connection at which a new one replaces it, long before the certificates expire.
const MAX_AGE: Duration = Duration::from_hours(24);
/// Minimum of this age, for a certificate that seems to have expired because the clock is wrong.
const MIN_AGE: Duration = Duration::from_mins(1);
/// Interval in which names are resolved until they could be resolved once.
const FIRST_RESOLVE_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum delay between attempts to reach a gateway.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
/// Delay before an address is dialled again that led to this process, or to a peer that is known by another address.
const KNOWN_GATEWAY_DELAY: Duration = Duration::from_secs(15);
/// Interval of checks whether the streams of a link have ended.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum time for which a gateway that starts waits for its peers.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves a request that another gateway has forwarded.
#[derive(Clone)]
pub struct ForwardHandler(
    /// Function that serves one request of that gateway.
    pub Arc<dyn Fn(StreamRequest, ForwardingGateway) -> BoxFuture<'static, ()> + Send + Sync>,
);

impl fmt::Debug for ForwardHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ForwardHandler")
    }
}

/// TLS with which a gateway dials other gateways.
#[derive(Clone, Debug)]
pub struct PeerTls {
    /// The configuration.
    pub config: Arc<ClientConfig>,
    /// End of the validity of the certificate that this gateway presents.
    pub not_after: SystemTime,
}

/// Returns the current TLS for other gateways, or the reason why there is none.
pub type PeerTlsFn = Arc<dyn Fn() -> Result<PeerTls, String> + Send + Sync>;

/// Connector to the other gateways.
pub struct PeerConnector {
    /// Section `peers` of the configuration.
    pub config: config::Peers,
    /// Timeouts and limits of tunnels, which hold for links as well.
    pub settings: config::Tunnel,
    /// Limits of this gateway, which hold for links to all nodes of a peer together.
    pub limits: config::Limits,
    /// Random identifier of this process.
    pub instance: Arc<str>,
    /// The tunnels and the directory.
    pub registry: Registry,
    /// Whether this gateway has an API cache, for which it needs the reports of peers about node pools.
    pub reads_pools: bool,
    /// Workers, each of which has its own links.
    pub workers: Workers,
    /// Memory budget of bytes that clients have not read yet.
    pub memory_budget: Arc<MemoryBudget>,
    /// The current TLS configuration.
    pub tls: PeerTlsFn,
    /// Notifies of changes of the certificate that this gateway presents.
    pub certificate_changes: watch::Receiver<()>,
    /// Revoked certificates of gateways.
    pub revoked: RevokedSerials,
    /// Function that opens connections.
    pub(crate) connect: ConnectFn,
    /// Tasks of the links, which may outlive the control connection.
    pub links: TaskGroup,
}

impl fmt::Debug for PeerConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerConnector")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// Error of a connection to a peer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    #[error("this address leads to this gateway itself")]
    OwnProcess,
    /// Includes the identifier of the process.
    #[error("the gateway is connected by another address")]
    Duplicate(String),
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    #[error("TLS: {0}")]
    Tls(String),
    #[error("{0}")]
    Http2(String),
    #[error("control stream: {0}")]
    Control(#[from] ControlStreamError),
    #[error("the address leads to another gateway now")]
    OtherProcess,
    #[error("its certificate with serial number {0} is revoked")]
    Revoked(String),
    #[error("it uses version {0} of the protocol between gateways, and this gateway {PROTOCOL}")]
    Version(u32),
}

impl PeerError {
    /// Returns the process at the address, if the address cannot be used for its sake.
    fn owner(&self) -> Option<AddressOwner> {
        match self {
            Self::OwnProcess => Some(AddressOwner::OwnProcess),
            Self::Duplicate(instance) => Some(AddressOwner::Peer(instance.clone())),
            _ => None,
        }
    }

    /// Whether something at the address answered.
    fn is_answered(&self) -> bool {
        match self {
            Self::Connect(error) => error.kind() == io::ErrorKind::ConnectionRefused,
            _ => true,
        }
    }
}

impl PeerConnector {
    /// Keeps connections to all peers until `stop`. Drops `hold` when the nodes of the peers that can be reached are known.
    pub async fn run(self, hold: ReadinessBlock, stop: CancellationToken) {
        let connector = Arc::new(self);
        // The tasks of links hold the connector, so dropping it would not end them.
        let _end = connector.links.guard();
        stop.run_until_cancelled(connector.follow_names(hold)).await;
    }

    async fn follow_names(self: Arc<Self>, hold: ReadinessBlock) {
        let tasks = TaskGroup::default();
        let mut followed: HashMap<PeerAddress, watch::Sender<bool>> = HashMap::new();
        let (mut hold, started) = (Some(hold), Instant::now());
        let mut throttle = FailureThrottle::default();
        let addresses = self.registry.directory().addresses();
        loop {
            let (resolved, failures) = self.resolve_all().await;
            let is_complete = failures.is_empty();
            // The name of a Service may resolve only once this gateway is ready.
            let is_fault = !is_complete && hold.is_none();
            if is_fault && throttle.should_log(&failures) {
                warn!(%failures, "cannot resolve peers.addresses: gateways behind these names are not found");
            }
            let mut first_attempts = Vec::new();
            for (address, _) in followed.extract_if(|_, listed| listed.is_closed()) {
                addresses.remove(&address);
            }
            for address in &resolved {
                addresses.set_listed(address, true);
                if let Some(listed) = followed.get(address) {
                    listed.send_replace(true);
                    continue;
                }
                let (attempted, first_attempt) = oneshot::channel();
                first_attempts.push(first_attempt);
                let (listed, is_listed) = watch::channel(true);
                let following = self.clone().follow(address.clone(), attempted, is_listed);
                tasks.spawn(info_span!("peer", %address), following);
                followed.insert(address.clone(), listed);
            }
            // A name server that fails removes no gateway.
            if is_complete {
                for (address, listed) in &followed {
                    let is_listed = resolved.contains(address);
                    listed.send_replace(is_listed);
                    addresses.set_listed(address, is_listed);
                }
            }
            let remaining = START_TIMEOUT.saturating_sub(started.elapsed());
            if hold.is_some() {
                // Each attempt reports its end. After the timeout, this gateway serves without the peers that do not answer.
                let _ = timeout(remaining, join_all(first_attempts)).await;
            }
            if is_complete || started.elapsed() >= START_TIMEOUT {
                hold = None;
            }
            sleep(match hold {
                Some(_) => FIRST_RESOLVE_INTERVAL,
                None => self.config.resolve_after,
            })
            .await;
        }
    }

    /// Returns the addresses of all configured names, and the names that could not be resolved, each with its error.
    async fn resolve_all(&self) -> (HashSet<PeerAddress>, String) {
        let names = self.config.addresses.iter();
        let names: Vec<_> = names.filter_map(|text| host_port(text).ok()).collect();
        let resolving = names.iter().map(async |(host, port)| {
            let resolved = timeout(RESOLVE_TIMEOUT, resolve(host, *port)).await;
            let timeout_error = || io::Error::from(io::ErrorKind::TimedOut);
            (*host, resolved.map_err(|_| timeout_error()).flatten())
        });
        let (mut addresses, mut failures) = (HashSet::new(), Vec::new());
        for (host, resolved) in join_all(resolving).await {
            match resolved {
                Ok(resolved) => addresses.extend(resolved.into_iter().map(|address| PeerAddress {
                    host: host.to_owned(),
                    address,
                })),
                Err(error) => failures.push(format!("{host}: {error}")),
            }
        }
        (addresses, failures.join("; "))
    }

    /// Keeps a connection to the gateway at this address for as long as the address is listed, and for as long as the connection
    /// lasts then. Drops `attempted` after the first attempt.
    async fn follow(
        self: Arc<Self>,
        address: PeerAddress,
        attempted: oneshot::Sender<()>,
        mut is_listed: watch::Receiver<bool>,
    ) {
        let mut attempted = Some(attempted);
        let mut backoff = Backoff::new(MAX_RETRY_DELAY, MAX_RETRY_DELAY);
        let mut reported = None;
        // Sessions that end by themselves, while the next one is opened.
        let earlier = TaskGroup::default();
        loop {
            if !*is_listed.borrow_and_update() {
                let listed_again = is_listed.changed();
                tokio::select! {
                    () = wait_until_empty(&earlier) => return,
                    // The sender is dropped with the connector.
                    changed = listed_again => if changed.is_err() { return } else { continue },
                }
            }
            let peer_removed = self.registry.directory().peer_removed();
            let opened = PeerSession::open(&self, &address).await;
            attempted.take();
            let delay = match opened {
                Ok(mut session) => {
                    let owner = AddressOwner::Peer(session.peer.instance.clone());
                    let addresses = self.registry.directory().addresses();
                    addresses.record_owner(&address, owner);
                    backoff.reset();
                    reported = None;
                    info!(gateway = %address, version = session.peer.version, "connected to another gateway");
                    let end = if session.peer.is_draining() {
                        SessionEnd::Draining
                    } else {
                        session.run().await
                    };
                    match end {
                        SessionEnd::Lost(error) => {
                            warn!(gateway = %address, %error, "lost the connection to another gateway");
                        }
                        SessionEnd::Replaced => {}
                        end => {
                            debug!(gateway = %address, ?end, "a new connection to another gateway follows");
                            earlier.spawn(Span::current(), session.run_to_end());
                        }
                    }
                    backoff.silent(rand::random())
                }
                Err(error) => {
                    self.record_error(&address, &error, &mut reported);
                    match error.owner() {
                        Some(_) => KNOWN_GATEWAY_DELAY,
                        None => backoff.silent(rand::random()),
                    }
                }
            };
            tokio::select! {
                () = sleep(delay) => {}
                // The gateway may have been connected by another address.
                () = peer_removed => sleep(backoff.silent(rand::random())).await,
            }
        }
    }

    /// Records a failed attempt. Logs it, unless it is the one that was logged last.
    fn record_error(
        &self,
        address: &PeerAddress,
        error: &PeerError,
        reported: &mut Option<String>,
    ) {
        let (addresses, reason) = (self.registry.directory().addresses(), error.to_string());
        if let Some(owner) = error.owner() {
            debug!(gateway = %address, %error, "this address is not used");
            return addresses.record_owner(address, owner);
        }
        if reported.as_ref() != Some(&reason) {
            warn!(gateway = %address, %error, "cannot connect to another gateway");
            *reported = Some(reason.clone());
        }
        let is_answered = error.is_answered();
        let failure = ConnectFailure {
            reason,
            is_answered,
        };
        addresses.record_failure(address, failure);
    }

    /// Connects to a gateway and begins HTTP/2.
    async fn dial(&self, address: &PeerAddress) -> Result<DialledPeer, PeerError> {
        let tls = (self.tls)().map_err(PeerError::Tls)?.config;
        let connecting = (self.connect)(address.clone(), tls, self.settings.handshake_timeout);
        let PeerIo {
            io,
            traffic,
            round_trip,
            serial,
        } = connecting.await?;
        let config = GatewaySideConfig {
            keepalive: self.settings.keepalive(),
            budget: self.limits.buffered_bytes / LINK_BUDGET_DIVISOR,
            node_budget: Arc::default(),
            max_streams: self.limits.streams,
            // A link closes its control stream after the hello.
            control_streams: 0,
            round_trip,
            memory_budget: self.memory_budget.clone(),
            is_trusted: true,
        };
        let (tunnel, driver) = gateway_side::connect(io, traffic, config)
            .await
            .map_err(|end| PeerError::Http2(end.to_string()))?;
        // A gateway of the same protocol version passes both on, and its own edges may refuse them.
        tunnel.allow_long_targets(true);
        tunnel.allow_upgrade_bodies(true);
        Ok(DialledPeer {
            tunnel,
            driver,
            serial,
        })
    }

    /// Exchanges hellos. Returns the control stream, on which the peer sends its nodes if `wants_nodes`.
    async fn exchange_hello(
        &self,
        tunnel: &Tunnel,
        wants_nodes: bool,
    ) -> Result<(ControlStream, PeerHello), PeerError> {
        let exchange = async {
            let mut control = tunnel.open_control_stream().await?;
            let hello = own_hello(&self.instance, wants_nodes);
            control.send(&PeerMessage::Hello(hello)).await?;
            match control.receive().await? {
                PeerMessage::Hello(hello) => Ok((control, hello)),
                _ => Err(ControlStreamError::Closed),
            }
        };
        let bound = self.settings.hello_timeout;
        let exchanged = timeout(bound, exchange).await;
        let (control, hello) = exchanged.map_err(|_| ControlStreamError::TooSlow(bound))??;
        if hello.protocol != PROTOCOL {
            return Err(PeerError::Version(hello.protocol));
        }
        Ok((control, hello))
    }

    /// Opens a link to a peer, and runs it until it ends.
    async fn run_link(
        &self,
        (peer, address): (&Peer, &PeerAddress),
        worker: WorkerId,
        (opened, session_end): (impl FnOnce(), &CancellationToken),
    ) -> Result<TunnelEnd, PeerError> {
        let DialledPeer {
            tunnel,
            driver,
            serial,
        } = self.dial(address).await?;
        let mut driving = pin!(driver.run());
        let greeting = async {
            let (_, hello) = self.exchange_hello(&tunnel, false).await?;
            if hello.instance == peer.instance {
                Ok(())
            } else {
                Err(PeerError::OtherProcess)
            }
        };
        tokio::select! {
            greeted = greeting => greeted?,
            end = &mut driving => return Ok(end),
        }
        let id = self.registry.next_tunnel_id();
        let link = PeerLink {
            tunnel: tunnel.clone(),
            id,
        };
        peer.set_link(worker, Some(link));
        opened();
        let drained = async {
            session_end.cancelled().await;
            // Requests and sessions on the link continue until they end.
            tunnel.drain();
            wait_idle(&tunnel).await;
        };
        let end = tokio::select! {
            end = &mut driving => Ok(end),
            () = drained => Ok(TunnelEnd::Closed),
            () = wait_revoked(&self.revoked, &serial) => Err(PeerError::Revoked(serial.clone())),
        };
        peer.set_link(worker, None);
        end
    }

    /// Keeps a link of one worker to a peer until the control connection ends. Reports the end of its first attempt.
    async fn keep_link(
        self: Arc<Self>,
        (peer, address): (Arc<Peer>, PeerAddress),
        worker: WorkerId,
        (attempted, session_end): (oneshot::Sender<()>, CancellationToken),
    ) {
        let (mut attempted, mut is_reported) = (Some(attempted), false);
        let mut backoff = Backoff::new(MAX_RETRY_DELAY, MAX_RETRY_DELAY);
        while !session_end.is_cancelled() {
            let opened = || {
                attempted.take();
                self.wake_waiting(peer.node_names());
            };
            let started = Instant::now();
            let running = self.run_link((&peer, &address), worker, (opened, &session_end));
            match Box::pin(running).await {
                Ok(end) => debug!(gateway = %address, %end, "a link to another gateway ended"),
                Err(error) if is_reported => {
                    debug!(gateway = %address, %error, "cannot open a link to another gateway");
                }
                Err(error) => {
                    is_reported = true;
                    warn!(gateway = %address, %error, "cannot open a connection for requests to another gateway");
                }
            }
            if started.elapsed() > MAX_RETRY_DELAY {
                backoff.reset();
            }
            attempted.take();
            let delay = sleep(backoff.silent(rand::random()));
            session_end.run_until_cancelled(delay).await;
        }
    }

    fn wake_waiting(&self, nodes: impl IntoIterator<Item = NodeName>) {
        self.registry.record_arrival();
        if self.registry.has_waiting_requests() {
            for node in nodes {
                self.registry.wake_waiting(&node);
            }
        }
    }
}

/// Waits until no task runs in a group that may get further ones.
async fn wait_until_empty(tasks: &TaskGroup) {
    while !tasks.is_empty() {
        sleep(IDLE_CHECK_INTERVAL).await;
    }
}

/// Waits until no stream is open on a link that gets no new ones.
async fn wait_idle(tunnel: &Tunnel) {
    while tunnel.load().open_streams() > 0 {
        sleep(IDLE_CHECK_INTERVAL).await;
    }
}

/// Returns the time after which a new connection should replace one with a certificate that is valid until `not_after`. It is
/// random, so that not all gateways connect again at the same time.
fn max_age(not_after: SystemTime) -> Duration {
    let validity = not_after.duration_since(SystemTime::now());
    let limit = MAX_AGE.min(validity.unwrap_or_default() / 2);
    limit.mul_f64(rand::random_range(0.5..1.0)).max(MIN_AGE)
}

/// Connection to another gateway on which HTTP/2 has begun.
struct DialledPeer {
    tunnel: Tunnel,
    driver: ConnectionDriver<Box<dyn PeerStream>>,
    /// Serial number of the other gateway's certificate, in hexadecimal.
    serial: String,
}

/// Reason for which [`PeerSession::run`] returns.
#[derive(Debug)]
enum SessionEnd {
    /// The peer drains. The session continues until the connection ends.
    Draining,
    /// The connection is old, or the certificate of this gateway has changed. The session continues until a new one has replaced
    /// it.
    Aged,
    /// Another connection to the same process has replaced this one.
    Replaced,
    /// The connection has ended, or the certificate of the peer is revoked.
    Lost(PeerError),
}

/// Control connection to a peer, whose nodes are in the directory for as long as this value lives.
struct PeerSession {
    connector: Arc<PeerConnector>,
    peer: Arc<Peer>,
    control: ControlStream,
    /// Nodes of a snapshot that is not complete.
    snapshot: Option<HashMap<NodeName, HeldState>>,
    /// Whether a report about a pool was refused.
    has_refused_pools: bool,
    /// Cancelled when the session ends.
    session_end: CancellationToken,
    /// Time at which a new connection should replace this one; `None` once that is under way.
    aged_at: Option<Instant>,
    /// Notifies of a change of the certificate with which this gateway has connected.
    certificate_changes: watch::Receiver<()>,
    /// The task of the connection.
    _driver: TaskGroup,
}

impl Drop for PeerSession {
    fn drop(&mut self) {
        self.session_end.cancel();
        if self.connector.registry.directory().remove(&self.peer) {
            self.record_left(&self.peer.node_names());
        }
    }
}

impl PeerSession {
    async fn open(
        connector: &Arc<PeerConnector>,
        address: &PeerAddress,
    ) -> Result<Self, PeerError> {
        let mut certificate_changes = connector.certificate_changes.clone();
        certificate_changes.mark_unchanged();
        let not_after = (connector.tls)().map_err(PeerError::Tls)?.not_after;
        let DialledPeer {
            tunnel,
            driver,
            serial,
        } = connector.dial(address).await?;
        let tasks = TaskGroup::default();
        let driving = Box::pin(driver.run());
        tasks.spawn(info_span!("peer_control"), async move {
            driving.await;
        });
        let (control, hello) = connector.exchange_hello(&tunnel, true).await?;
        if *hello.instance == *connector.instance {
            return Err(PeerError::OwnProcess);
        }
        let directory = connector.registry.directory();
        if directory.is_connected_elsewhere(&hello.instance, &address.to_string()) {
            return Err(PeerError::Duplicate(hello.instance));
        }
        let workers = connector.workers.all().count();
        let identity = (hello.instance, hello.version);
        let mut peer = Peer::new(&address.to_string(), identity, tunnel, workers);
        peer.serial = serial;
        let peer = Arc::new(peer);
        let mut session = Self {
            connector: connector.clone(),
            peer,
            control,
            snapshot: None,
            has_refused_pools: false,
            session_end: CancellationToken::new(),
            aged_at: Some(Instant::now() + max_age(not_after)),
            certificate_changes,
            _driver: tasks,
        };
        // The nodes are known before requests are sent there, and before an earlier connection to the process is replaced.
        timeout(START_TIMEOUT, session.read_snapshot())
            .await
            .map_err(|_| ControlStreamError::TooSlow(START_TIMEOUT))??;
        // Messages do not wait for the links: the peer may drain, and durations in reports about pools count from their arrival.
        let mut links_attempted = pin!(session.open_links(address));
        loop {
            tokio::select! {
                () = &mut links_attempted => break,
                received = session.control.receive() => session.apply(received?),
            }
        }
        if !directory.add(&session.peer) {
            return Err(PeerError::Duplicate(session.peer.instance.clone()));
        }
        connector.wake_waiting(session.peer.node_names());
        Ok(session)
    }

    /// Applies the messages of the peer until all of its nodes are known.
    async fn read_snapshot(&mut self) -> Result<(), ControlStreamError> {
        while !self.peer.is_synchronized() {
            let message = self.control.receive().await?;
            self.apply(message);
        }
        Ok(())
    }

    /// Opens the links of all workers. Returns a future that ends with the first attempt of each.
    fn open_links(&self, address: &PeerAddress) -> impl Future<Output = ()> + use<> {
        let workers = &self.connector.workers;
        let attempts = workers.all().map(|worker| {
            let (attempted, attempt) = oneshot::channel();
            let to = (self.peer.clone(), address.clone());
            let session_end = self.session_end.clone();
            let keeping = self.connector.clone();
            let keeping = keeping.keep_link(to, worker, (attempted, session_end));
            let span = info_span!("peer_link", gateway = %address);
            let links = &self.connector.links;
            links.spawn_on(workers.runtime(worker), span, keeping);
            attempt
        });
        // The sender is dropped when the attempt has ended.
        join_all(attempts.collect::<Vec<_>>()).map(drop)
    }

    /// Applies the messages of the peer until the session has to be followed by another one, or ends.
    async fn run(&mut self) -> SessionEnd {
        loop {
            let age = OptionFuture::from(self.aged_at.map(sleep_until));
            let is_aged = tokio::select! {
                biased;
                () = self.peer.replaced().cancelled() => return SessionEnd::Replaced,
                received = self.control.receive() => {
                    let was_draining = self.peer.is_draining();
                    match received {
                        Ok(message) => self.apply(message),
                        Err(error) => return SessionEnd::Lost(error.into()),
                    }
                    if self.peer.is_draining() && !was_draining {
                        return SessionEnd::Draining;
                    }
                    false
                }
                () = wait_revoked(&self.connector.revoked, &self.peer.serial) => {
                    return SessionEnd::Lost(PeerError::Revoked(self.peer.serial.clone()));
                }
                Some(()) = age => true,
                // Other gateways close connections that depend on a root which they do not trust any more.
                Ok(()) = self.certificate_changes.changed() => true,
            };
            if is_aged && self.aged_at.take().is_some() {
                return SessionEnd::Aged;
            }
        }
    }

    /// Runs the session until it ends or is replaced.
    async fn run_to_end(mut self) {
        while !matches!(self.run().await, SessionEnd::Lost(_) | SessionEnd::Replaced) {}
    }

    fn apply(&mut self, message: PeerMessage) {
        match message {
            PeerMessage::Snapshot => self.snapshot = Some(HashMap::new()),
            PeerMessage::Nodes { nodes } => {
                for entry in nodes {
                    let (node, state, unhealthy) = entry.into_parts();
                    self.peer.set_unhealthy_ports(node.clone(), unhealthy);
                    self.set_node(node, state);
                }
            }
            PeerMessage::Synchronized => {
                if let Some(nodes) = self.snapshot.take() {
                    let names: Vec<NodeName> = nodes.keys().cloned().collect();
                    let earlier = self.peer.node_names().into_iter();
                    let left: Vec<_> = earlier.filter(|node| !nodes.contains_key(node)).collect();
                    self.peer.replace_nodes(nodes);
                    self.record_left(&left);
                    self.connector.wake_waiting(names);
                }
            }
            PeerMessage::Addresses { addresses } => self.peer.set_addresses(addresses),
            PeerMessage::Draining => self.peer.mark_draining(),
            PeerMessage::Pools { pools } if self.connector.reads_pools => self.set_pools(pools),
            PeerMessage::Pools { .. }
            | PeerMessage::Hello(_)
            | PeerMessage::RotationRequest
            | PeerMessage::Rotation { .. }
            | PeerMessage::RevocationsRequest
            | PeerMessage::Revocations { .. }
            | PeerMessage::Unknown => {}
        }
    }

    fn set_pools(&mut self, entries: Vec<PoolEntry>) {
        let (now, mut changed) = (Instant::now(), Vec::new());
        for entry in entries {
            let (pool, report) = entry.into_parts(now);
            if self.peer.set_pool(pool.clone(), report) {
                changed.push(pool);
            } else if !self.has_refused_pools {
                self.has_refused_pools = true;
                warn!(gateway = %self.peer.address, "ignored a node pool of another gateway: it has too many pools, or too long a name");
            }
        }
        let exchange = self.connector.registry.directory().pool_exchange();
        exchange.mark_changed(changed);
    }

    fn record_left(&self, nodes: &[NodeName]) {
        for node in nodes {
            let registry = &self.connector.registry;
            registry.record_left_peer(node, &self.peer.address);
        }
    }

    fn set_node(&mut self, node: NodeName, state: Option<HeldState>) {
        match (&mut self.snapshot, state) {
            (Some(snapshot), Some(state)) => {
                snapshot.insert(node, state);
            }
            (Some(snapshot), None) => {
                snapshot.remove(&node);
            }
            (None, state) => {
                self.peer.set_node(node.clone(), state);
                if state.is_none() {
                    self.record_left(&[node]);
                } else {
                    self.connector.wake_waiting([node]);
                }
            }
        }
    }
}
