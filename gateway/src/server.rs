//! Builds a gateway from a configuration, and runs it.
//!
//! `bind` builds everything that can fail (data directory, certificates, sockets) and names each failure. `run` opens the
//! listeners, serves until it is stopped, and then drains.

mod addresses;
mod build;
mod ca_reload;
mod certificates;
mod control_servers;
mod data_dir;
mod error;
mod handover;
mod listeners;
mod reload;
mod sockets;
mod tunnel_identity;
mod watchdog;

#[cfg(test)]
mod simulation;

use control_servers::{ControlServers, EndTokens};
pub use error::BindError;
use handover::{Handover, ReleasedPredecessor, RuntimeFiles};
pub use listeners::ListenerDiff;
use listeners::Listeners;
use reload::Reloadable;
pub use reload::{PendingReload, RESTART_KEYS, ReloadSummary, Reloader};
pub use watchdog::Watchdog;

use crate::{
    config::{Config, ReloadSender},
    control::{
        address_conflicts,
        certificate_expiry::CertificateInventory,
        dns,
        drain::{self, Readiness, ReadinessBlock},
        evict,
        heartbeat::AcceptedHeartbeats,
        nat,
        node_sync::NodeSync,
        peers::{PeerConnector, transport::connect_tls},
        pin_writer::PinWriter,
        signer::Signer,
        startup_hold::{self, StartupHold},
        state_sync::StateSync,
        successor::Successor,
    },
    metrics::Metrics,
    proxy::{
        ProxyState, access_review::ReviewClient, authz::Authorize, pod_route::PodLookup, recheck,
    },
    shared_state::StateEngine,
    state::{NodesWriter, PolicyReader, YurtHubEndpoints, pins::NewPin},
    worker::{WorkerId, Workers},
};
use causeway_certs::{HostName, Store};
use causeway_rt::{listener, task::TaskGroup};
use causeway_watch_cache::WatchCache;
use futures_util::future::BoxFuture;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
};
use tokio_util::sync::CancellationToken;
use tracing::info_span;

/// Time for the control plane to send its last messages.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Builder of a gateway: a configuration, and the parts that an embedder replaces.
#[derive(Debug)]
pub struct Gateway {
    config: Config,
    workers: Option<Workers>,
    deciding: AuthorizerSource,
    reloads: ReloadSender,
    pods: Option<Arc<dyn PodLookup>>,
    reviews: Option<(Arc<dyn ReviewClient>, Handle)>,
    state_engine: Option<Arc<dyn StateEngine>>,
    take_over: bool,
}

/// Source of authorization decisions.
#[derive(Debug)]
enum AuthorizerSource {
    By(Arc<dyn Authorize>),
    Policy(PolicyReader),
}

/// Reads and checks the files of certificates, keys and tokens that a configuration names, like a gateway that starts.
///
/// # Errors
/// If one of the files cannot be used.
pub fn check(config: &Config) -> Result<(), BindError> {
    config
        .listeners
        .iter()
        .try_for_each(build::listener::ListenerSource::check)?;
    build::upstream_tls::check(&config.upstream_tls)?;
    tunnel_identity::check(config)
}

impl Gateway {
    /// Returns a gateway with this validated configuration.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            workers: None,
            // Without rules, every client that a listener admits is allowed everything.
            deciding: AuthorizerSource::Policy(PolicyReader::default()),
            reloads: ReloadSender::default(),
            pods: None,
            reviews: None,
            state_engine: None,
            take_over: false,
        }
    }

    /// Sets whether the gateway takes over the sockets of a gateway that runs on the same data directory. That gateway then drains
    /// and ends. Otherwise the directory must not be in use.
    #[must_use]
    pub fn take_over(mut self, take_over: bool) -> Self {
        self.take_over = take_over;
        self
    }

    /// Sets the authorizer of requests.
    #[must_use]
    pub fn authorizer(mut self, authorizer: Arc<dyn Authorize>) -> Self {
        self.deciding = AuthorizerSource::By(authorizer);
        self
    }

    /// Authorizes requests by this policy, which may be replaced at any time.
    #[must_use]
    pub fn policy(mut self, policy: PolicyReader) -> Self {
        self.deciding = AuthorizerSource::Policy(policy);
        self
    }

    /// Forwards reload requests of the admin listener to `reloads`.
    #[must_use]
    pub fn reloads(mut self, reloads: ReloadSender) -> Self {
        self.reloads = reloads;
        self
    }

    /// Sets the lookup of the nodes of pods, for kube-apiservers whose requests name only the pod.
    #[must_use]
    pub fn pods(mut self, pods: Arc<dyn PodLookup>) -> Self {
        self.pods = Some(pods);
        self
    }

    /// Sets the client of reviews of tokens and of access to kubelets, for listeners that require reviews. The reviews run on the
    /// runtime from which this function is called.
    ///
    /// # Panics
    /// If called outside of a runtime.
    #[must_use]
    pub fn reviews(mut self, reviews: Arc<dyn ReviewClient>) -> Self {
        self.reviews = Some((reviews, Handle::current()));
        self
    }

    /// Sets the engine by which the gateway shares its durable state with others. Without it the state is in the data directory
    /// alone.
    #[must_use]
    pub fn state_engine(mut self, engine: Option<Arc<dyn StateEngine>>) -> Self {
        self.state_engine = engine;
        self
    }

    /// Runs on these workers instead of starting its own threads.
    #[must_use]
    pub fn workers(mut self, workers: Workers) -> Self {
        self.workers = Some(workers);
        self
    }

    /// Opens the data directory, and binds all listeners.
    ///
    /// # Errors
    /// The missing, malformed or occupied item, by name.
    pub fn bind(self) -> Result<Bound, BindError> {
        build::bind_gateway(self)
    }
}

/// Returns the names by which edges reach a gateway with this configuration, which are the names in its certificate.
///
/// # Errors
/// If an address contains no valid name.
pub fn advertised_names(config: &Config) -> Result<Vec<HostName>, BindError> {
    tunnel_identity::host_names(&config.tunnel.advertise, config.tunnel.listen.ip())
}

/// Gateway whose listeners are bound.
#[derive(Debug)]
pub struct Bound {
    config: Config,
    store: Store,
    /// Writer of pinned keys of upstreams, and the receiver of new pins.
    pins: (PinWriter, mpsc::Receiver<NewPin>),
    handover: Handover,
    workers: Workers,
    owned_workers: OwnedWorkers,
    shared: Arc<ProxyState>,
    tasks: Arc<TaskGroup>,
    servers: ControlServers,
    reloader: Reloader,
    readiness: Readiness,
}

/// Workers that this gateway started itself, and that end with it.
#[derive(Debug)]
struct OwnedWorkers(Option<Workers>);

impl Drop for OwnedWorkers {
    fn drop(&mut self) {
        if let Some(workers) = &self.0 {
            workers.stop();
        }
    }
}

/// Way in which a gateway has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// It was stopped.
    Stopped,
    /// Another process has taken over its sockets and its data directory.
    HandedOver,
    /// It has not served: the running process did not hand over in time, and continues.
    NotHandedOver,
}

/// Addresses of the bound listeners of a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundAddresses {
    /// The tunnel port.
    pub tunnel: SocketAddr,
    /// The admin listener.
    pub admin: SocketAddr,
    /// The DNS server, if there is one.
    pub dns: Option<SocketAddr>,
    /// The listeners for clients by name; unix sockets have no address.
    pub listeners: Vec<(String, Option<SocketAddr>)>,
}

impl BoundAddresses {
    /// Returns the address of a listener, if it has one.
    pub fn listener(&self, name: &str) -> Option<SocketAddr> {
        self.listeners.iter().find(|(known, _)| known == name)?.1
    }
}

/// Evicts stalled streams.
fn evict_stalled(config: Config, shared: &ProxyState) -> impl Future<Output = ()> + use<> {
    let memory_budget = shared.limits.memory_budget().clone();
    evict::run(config, memory_budget, shared.metrics.clone())
}

impl Bound {
    /// Returns the addresses of the listeners, with the ports that the system chose.
    ///
    /// # Panics
    /// Never, because a bound TCP socket has an address.
    pub fn addresses(&self) -> BoundAddresses {
        let tcp = |bound: &listener::BoundSocket| {
            bound
                .local_addr()
                .expect("a bound TCP socket has an address")
        };
        BoundAddresses {
            tunnel: tcp(&self.servers.tunnel_socket),
            admin: tcp(&self.servers.admin.admin),
            dns: self
                .servers
                .dns
                .as_ref()
                .and_then(dns::BoundSockets::local_addr),
            listeners: self.reloader.parts().listeners.addresses(),
        }
    }

    /// Returns the data directory.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the table of nodes, for a source of further node data.
    pub fn nodes(&self) -> NodesWriter {
        self.reloader.parts().authority.node_sync.nodes.clone()
    }

    /// Returns the node state, for components that share it with other gateways.
    pub fn node_sync(&self) -> NodeSync {
        self.reloader.parts().authority.node_sync.clone()
    }

    fn state_sync(&self) -> Option<Arc<StateSync>> {
        self.servers.admin_state.state_sync.clone()
    }

    /// Returns a future that ends when the shared state is loaded, at once if none is shared.
    pub fn state_loaded(&self) -> impl Future<Output = ()> + use<> {
        let shared = self.state_sync().map(|sync| sync.shared.clone());
        async move {
            if let Some(shared) = shared {
                shared.wait_synchronized().await;
            }
        }
    }

    /// Returns the signer for edges of a cluster, for the component that receives their certificate requests.
    pub fn signer(&self) -> Signer {
        let authority = &self.reloader.parts().authority;
        Signer::new(
            authority.ca.clone(),
            authority.node_sync.nodes.reader(),
            authority.record_writer.clone(),
            self.config.tunnel.edge_certificate_lifetime,
        )
    }

    /// Returns the watch cache, for the component that fills it, if the API cache is enabled.
    pub fn watch_cache(&self) -> Option<Arc<WatchCache>> {
        let api_cache = self.servers.tunnel_listener.api_cache.as_ref()?;
        Some(api_cache.watch_cache().clone())
    }

    /// Returns a watch of the endpoints at which `YurtHub`s of each pool read, if the API cache is enabled.
    pub fn watch_yurthub_endpoints(&self) -> Option<watch::Receiver<YurtHubEndpoints>> {
        Some(
            self.servers
                .tunnel_listener
                .api_cache
                .as_ref()?
                .watch_yurthub_endpoints(),
        )
    }

    /// Returns the accepted heartbeats of nodes without a gateway, if they are enabled, for the component that renews Leases.
    pub fn heartbeats(&self) -> Option<AcceptedHeartbeats> {
        self.servers
            .tunnel_listener
            .heartbeats
            .as_ref()?
            .take_accepted()
    }

    /// Returns a watch of the roots that edges have to trust, as PEM.
    pub fn roots(&self) -> watch::Receiver<String> {
        self.reloader.parts().authority.roots.subscribe()
    }

    /// Returns the metrics of the gateway.
    pub fn metrics(&self) -> Arc<Metrics> {
        self.shared.metrics.clone()
    }

    /// Keeps the gateway unready (`/readyz`) until the returned value is dropped.
    pub fn hold(&self, reason: impl Into<String>) -> ReadinessBlock {
        self.readiness.hold(reason)
    }

    /// Returns the state of `/readyz`.
    pub fn readiness(&self) -> Readiness {
        self.readiness.clone()
    }

    /// Returns a handle that checks the liveness of the gateway at any time.
    pub fn watchdog(&self) -> Watchdog {
        Watchdog {
            workers: self.workers.clone(),
            registry: self.shared.registry.clone(),
            readiness: self.readiness.clone(),
        }
    }

    /// Returns a token that is cancelled when another process serves clients in place of this one.
    pub fn handed_over(&self) -> CancellationToken {
        self.handover.successor().serving
    }

    /// Returns a handle that replaces the configuration of the gateway at any time.
    pub fn reloader(&self) -> Reloader {
        self.reloader.clone()
    }

    /// Connects to the other gateways, if there are any. The gateway is not ready until their nodes are known.
    fn spawn_peers(&self, (tasks, runtime): (&TaskGroup, &Handle), stop: &CancellationToken) {
        let Some(config) = self.config.peers.clone() else {
            return;
        };
        let listener = &self.servers.tunnel_listener;
        let identity = &self.reloader.parts().identity;
        let connector = PeerConnector {
            config: *config,
            settings: self.config.tunnel.clone(),
            limits: self.config.limits.clone(),
            instance: listener.instance.clone(),
            registry: self.shared.registry.clone(),
            reads_pools: listener.api_cache.is_some(),
            workers: self.workers.clone(),
            memory_budget: self.shared.limits.memory_budget().clone(),
            tls: identity.peer_tls(&listener.tls),
            certificate_changes: identity.certificate_changes(),
            revoked: listener.gateway_revocation.revoked(),
            connect: Arc::new(|address, tls, limit| Box::pin(connect_tls(address, tls, limit))),
            links: TaskGroup::default(),
        };
        let reason = "waiting for the nodes of the other gateways (peers)";
        let connecting = connector.run(self.readiness.hold(reason), stop.clone());
        tasks.spawn_on(runtime, info_span!("peers"), connecting);
    }

    /// Starts the background tasks. Their end is not awaited. A gateway whose predecessor serves clients is ready without its edges.
    fn spawn_background(&self, has_predecessor: bool) -> TaskGroup {
        let (tasks, runtime) = (TaskGroup::default(), self.workers.control());
        watch(
            (&tasks, runtime),
            self.reloader.parts(),
            &self.shared.metrics,
            self.servers.admin_state.certificates.clone(),
        );
        let evicting = evict_stalled(self.config.clone(), &self.shared);
        tasks.spawn_on(runtime, info_span!("evict"), evicting);
        if let Some(state_sync) = self.state_sync() {
            tasks.spawn_on(runtime, info_span!("shared_state"), async move {
                state_sync.run().await;
            });
        }
        let wait = self.config.timeouts.edges;
        if !wait.is_zero() && !has_predecessor {
            let startup_hold = StartupHold {
                store: self.store.clone(),
                registry: self.shared.registry.clone(),
                nodes: self.reloader.parts().authority.node_sync.nodes.reader(),
                max_wait: wait,
            };
            let hold = self.readiness.hold("waiting for edges (timeouts.edges)");
            tasks.spawn_on(runtime, info_span!("arrivals"), startup_hold.run(hold));
        }
        for worker in self.workers.all() {
            let checks = recheck::run_rechecks(self.shared.clone(), worker, self.tasks.clone());
            tasks.spawn_on(self.workers.runtime(worker), info_span!("recheck"), checks);
        }
        tasks
    }

    /// Serves until `stop` or until another process has taken over, then drains for at most the configured time. Returns when all
    /// connections have ended.
    // Boxed here, so that it is compiled once and not in each caller.
    pub fn run(self, stop: CancellationToken) -> BoxFuture<'static, RunEnd> {
        Box::pin(self.serve(stop))
    }

    async fn serve(mut self, stop: CancellationToken) -> RunEnd {
        let taken_over = self.handover.take_over(&self.store, &self.reloader).await;
        let Ok(predecessor) = taken_over else {
            return RunEnd::NotHandedOver;
        };
        let addresses = self.addresses();
        let (grace, successor) = (self.shared.timeouts.drain, self.handover.successor());
        // Dropping this future stops the gateway: first its tasks, then the threads that it started.
        let background_tasks = self.spawn_background(predecessor.is_some());
        let (control_tasks, tokens) = (TaskGroup::default(), EndTokens::default());
        let runtime = self.workers.runtime(WorkerId(0));
        self.spawn_peers((&control_tasks, runtime), &tokens.close);
        let (_threads, beside) = (self.owned_workers, background_tasks);
        let _end = self.tasks.guard();
        let (parts, registry) = (self.reloader.parts(), &self.shared.registry);
        let predecessor = (predecessor, self.servers.redirect_takeover());
        self.servers
            .spawn(parts, &self.store, (&control_tasks, runtime), &tokens);
        let files = RuntimeFiles::new(&self.store, addresses.admin, &successor);
        let (pin_writer, meetings) = self.pins;
        beside.spawn_on(runtime, info_span!("pins"), pin_writer.run(meetings));
        open_listeners(parts, (&self.readiness, &self.store), predecessor, &stop).await;
        let (claim, server) = self.handover.server(&self.store, &self.reloader, grace);
        let serving = server.run(claim, tokens.clone());
        control_tasks.spawn_on(runtime, info_span!("handover"), serving);
        tracing::info!(tunnel = %addresses.tunnel, admin = %addresses.admin, "gateway ready");

        tokio::select! {
            () = stop.cancelled() => {}
            () = successor.ready.cancelled() => {}
        }
        // Edges that were asked to connect to other gateways must not reconnect here.
        tokens.accept.cancel();
        let release = async {
            startup_hold::save_connected_nodes(&self.store, registry).await;
            tokens.enrolment_ended.cancelled().await;
            successor.released.cancel();
        };
        let draining = async {
            // Until the successor serves clients, nothing changes for them.
            let stopped = async {
                stop.cancelled().await;
                successor.wait_until_serving(Duration::ZERO).await;
            };
            tokio::select! {
                () = successor.wait_until_serving(grace / 2) => {}
                () = stopped => {}
            }
            tokens.drain.cancel();
            let progress = (&self.readiness, &successor);
            drain_streams(&self.shared, &self.tasks, &parts.listeners, progress).await
        };
        let ((), cut_streams) = tokio::join!(release, draining);
        drop(files);
        tokens.close.cancel();
        let stuck = control_tasks.drain(SHUTDOWN_GRACE).await;
        tracing::info!(cut = cut_streams, stuck, "gateway stopped");
        if successor.serving.is_cancelled() {
            RunEnd::HandedOver
        } else {
            RunEnd::Stopped
        }
    }
}

/// Opens the listeners to clients, after a takeover only when the edges have connected and their addresses are redirected here.
async fn open_listeners(
    parts: &Reloadable,
    (readiness, store): (&Readiness, &Store),
    (predecessor, redirects): (Option<ReleasedPredecessor>, Option<nat::Takeover>),
    stop: &CancellationToken,
) {
    let redirects = redirects.as_ref();
    // No other process deletes tracked connections from then on.
    let _in_charge = redirects.map(|redirects| redirects.serving.clone().drop_guard());
    let registry = &parts.shared.registry;
    let Some(predecessor) = predecessor else {
        registry.record_serving();
        parts.listeners.open();
        return readiness.set_ready();
    };
    // Clients are served, by the predecessor until this process is.
    readiness.set_ready();
    let nodes = parts.authority.node_sync.nodes.reader();
    let complete = predecessor.wait_until_complete(registry, &nodes, redirects);
    stop.run_until_cancelled(complete).await;
    registry.record_serving();
    parts.listeners.open();
    predecessor.report_serving().await;
    startup_hold::forget_connected_nodes(store).await;
}

/// Drains edges, listeners and streams within `timeouts.drain`. Returns the number of streams that had not ended by then.
async fn drain_streams(
    shared: &ProxyState,
    streams: &TaskGroup,
    listeners: &Listeners,
    (readiness, successor): (&Readiness, &Successor),
) -> usize {
    let close = CancellationToken::new();
    let grace = shared.timeouts.drain;
    let clients = || shared.limits.open_connections();
    let edges = drain::drain(
        &shared.registry,
        &shared.metrics,
        readiness,
        drain::DrainListeners {
            close: &close,
            clients: &clients,
            egress: shared.egress_usage.clone(),
            successor: successor.clone(),
        },
        grace,
    );
    // Before streams are cut, so that their records say why.
    let streams = streams.drain_with(grace, || shared.registry.expire_drain());
    let (cut_streams, (), ()) = tokio::join!(streams, edges, listeners.retire(&close));
    cut_streams
}

/// Starts background tasks. They renew the tunnel port's certificate, and close tunnels of nodes that are no longer at the edge.
/// They report addresses that several nodes share, and certificates that expire.
fn watch(
    (tasks, runtime): (&TaskGroup, &Handle),
    parts: &Reloadable,
    metrics: &Arc<Metrics>,
    certificates: CertificateInventory,
) {
    let renewal = parts.identity.clone().renew();
    tasks.spawn_on(runtime, info_span!("identity"), renewal);
    let node_sync = parts.authority.node_sync.clone();
    tasks.spawn_on(runtime, info_span!("expel"), node_sync.follow_cluster());
    let nodes = parts.authority.node_sync.nodes.clone();
    let conflicts = address_conflicts::run(nodes, metrics.clone());
    tasks.spawn_on(runtime, info_span!("address_conflicts"), conflicts);
    tasks.spawn_on(runtime, info_span!("certificates"), certificates.watch());
}
