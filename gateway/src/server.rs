//! Builds a gateway from a configuration, and runs it.
//!
//! `bind` builds everything that can fail (data directory, certificates, sockets) and names each failure. `run` opens the
//! listeners, serves until it is stopped, and then drains.

mod addresses;
mod build;
mod ca_reload;
mod certificates;
mod data_dir;
mod error;
mod listeners;
mod reload;
mod tunnel_identity;
mod watchdog;

pub use error::BindError;
pub use listeners::ListenerDiff;
use listeners::Listeners;
use reload::Reloadable;
pub use reload::{PendingReload, RESTART_KEYS, ReloadSummary, Reloader};
pub use watchdog::Watchdog;

use crate::{
    config::{Config, ReloadSender},
    control::{
        address_conflicts, admin,
        api_cache::leaders::LeaderAssigner,
        certificate_expiry::CertificateInventory,
        dns,
        drain::{self, Readiness, ReadinessBlock},
        evict,
        heartbeat::AcceptedHeartbeats,
        http,
        nat::Nat,
        node_sync::NodeSync,
        pin_writer::PinWriter,
        signer::Signer,
        startup_hold::{self, StartupHold},
        tunnel_listener::TunnelListener,
    },
    metrics::Metrics,
    proxy::{
        ProxyState, access_review::ReviewClient, authz::Authorize, pod_route::PodLookup, recheck,
    },
    state::{NodesWriter, PolicyReader, YurtHubEndpoints, pins::NewPin},
    worker::{WorkerId, Workers},
};
use axum::Router;
use causeway_certs::{DirLock, HostName, Store};
use causeway_rt::{listener, task::TaskGroup};
use causeway_watch_cache::WatchCache;
use futures_util::future::OptionFuture;
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
        }
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
    /// Lock of the data directory. Another gateway on the directory would issue under the same CA and write the same files.
    dir_lock: DirLock,
    workers: Workers,
    owned_workers: OwnedWorkers,
    shared: Arc<ProxyState>,
    tasks: Arc<TaskGroup>,
    tunnel_listener: TunnelListener,
    tunnel_socket: listener::BoundSocket,
    admin: AdminListeners,
    /// Socket for commands. Its connections do not count against the limit of the admin listener.
    admin_socket: Option<listener::BoundSocket>,
    admin_state: admin::AdminState,
    dns: Option<dns::BoundSockets>,
    reloader: Reloader,
    nat: Option<Nat>,
    readiness: Readiness,
    /// Cancelled when listeners and connections have to finish.
    end_token: CancellationToken,
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
            tunnel: tcp(&self.tunnel_socket),
            admin: tcp(&self.admin.admin),
            dns: self.dns.as_ref().and_then(dns::BoundSockets::local_addr),
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

    /// Returns the signer for edges of a cluster, for the component that receives their certificate requests.
    pub fn signer(&self) -> Signer {
        let authority = &self.reloader.parts().authority;
        Signer {
            ca: authority.ca.clone(),
            nodes: authority.node_sync.nodes.reader(),
            record_writer: authority.record_writer.clone(),
            lifetime: self.config.tunnel.edge_certificate_lifetime,
        }
    }

    /// Returns the watch cache, for the component that fills it, if the API cache is enabled.
    pub fn watch_cache(&self) -> Option<Arc<WatchCache>> {
        let api_cache = self.tunnel_listener.api_cache.as_ref()?;
        Some(api_cache.watch_cache().clone())
    }

    /// Returns a watch of the endpoints at which `YurtHub`s of each pool read, if the API cache is enabled.
    pub fn watch_yurthub_endpoints(&self) -> Option<watch::Receiver<YurtHubEndpoints>> {
        Some(
            self.tunnel_listener
                .api_cache
                .as_ref()?
                .watch_yurthub_endpoints(),
        )
    }

    /// Returns the accepted heartbeats of nodes without a gateway, if they are enabled, for the component that renews Leases.
    pub fn heartbeats(&self) -> Option<AcceptedHeartbeats> {
        self.tunnel_listener.heartbeats.as_ref()?.take_accepted()
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

    /// Returns a handle that replaces the configuration of the gateway at any time.
    pub fn reloader(&self) -> Reloader {
        self.reloader.clone()
    }

    /// Starts the background tasks. Their end is not awaited.
    fn spawn_background(&self) -> TaskGroup {
        let (tasks, runtime) = (TaskGroup::default(), self.workers.runtime(WorkerId(0)));
        watch(
            (&tasks, runtime),
            self.reloader.parts(),
            &self.shared.metrics,
            self.admin_state.certificates.clone(),
        );
        let evicting = evict_stalled(self.config.clone(), &self.shared);
        tasks.spawn_on(runtime, info_span!("evict"), evicting);
        let wait = self.config.timeouts.edges;
        if !wait.is_zero() {
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

    /// Serves until `stop`, then drains for at most the configured time. Returns when all connections have ended.
    pub async fn run(self, stop: CancellationToken) {
        let addresses = self.addresses();
        // Dropping this future stops the gateway: first its tasks, then the threads that it started.
        let background_tasks = self.spawn_background();
        let (_threads, _claim, beside) = (self.owned_workers, self.dir_lock, background_tasks);
        let _end = self.tasks.guard();
        let (control_tasks, close_token) = (TaskGroup::default(), CancellationToken::new());
        let drain_token = CancellationToken::new();
        let runtime = self.workers.runtime(WorkerId(0));
        self.reloader.parts().listeners.open();
        let parts = self.reloader.parts();
        spawn_pool_tasks(
            &self.tunnel_listener,
            parts,
            (&control_tasks, runtime),
            &drain_token,
        );
        let admission = self
            .tunnel_listener
            .run(self.tunnel_socket, drain_token.clone());
        control_tasks.spawn_on(runtime, info_span!("admission"), admission);
        let stop_signals = http::Stop {
            end_announced: drain_token.clone(),
            end: close_token.clone(),
        };
        let admin = (self.admin, self.admin_socket);
        let metrics = self.shared.metrics.clone();
        let admin = serve_admin(admin, self.admin_state, metrics, stop_signals);
        control_tasks.spawn_on(runtime, info_span!("admin"), admin);
        if let Some((bound, address)) = self.dns.zip(addresses.dns) {
            let names = self.reloader.parts().names.clone();
            let answering = dns::run(bound, names, close_token.clone());
            control_tasks.spawn_on(runtime, info_span!("dns"), answering);
            tracing::info!(%address, "answering DNS queries for node names");
        }
        let (pin_writer, meetings) = self.pins;
        beside.spawn_on(runtime, info_span!("pins"), pin_writer.run(meetings));
        if let Some(nat) = self.nat {
            control_tasks.spawn_on(
                runtime,
                info_span!("redirect"),
                nat.run(close_token.clone()),
            );
        }
        self.readiness.set_ready();
        tracing::info!(tunnel = %addresses.tunnel, admin = %addresses.admin, "gateway ready");

        stop.cancelled().await;
        // Edges that were asked to connect to other gateways must not reconnect here.
        drain_token.cancel();
        startup_hold::save_connected_nodes(&self.store, &self.shared.registry).await;
        let listeners = &self.reloader.parts().listeners;
        let readiness = (&self.readiness, &self.end_token);
        let cut_streams = drain_streams(&self.shared, &self.tasks, listeners, readiness).await;
        close_token.cancel();
        let stuck = control_tasks.drain(SHUTDOWN_GRACE).await;
        tracing::info!(cut = cut_streams, stuck, "gateway stopped");
    }
}

/// Starts the tasks that send messages to members of node pools until `stop`.
fn spawn_pool_tasks(
    tunnel_listener: &TunnelListener,
    parts: &Reloadable,
    (tasks, runtime): (&TaskGroup, &Handle),
    stop: &CancellationToken,
) {
    let registry = &tunnel_listener.registry;
    if let Some(api_cache) = &tunnel_listener.api_cache {
        let nodes = &parts.authority.node_sync.nodes;
        let leaders = LeaderAssigner::new(api_cache, registry, nodes).run(stop.clone());
        tasks.spawn_on(runtime, info_span!("leaders"), leaders);
    }
    if let Some(heartbeats) = tunnel_listener.heartbeats.clone() {
        let nonces = heartbeats.run(registry.clone(), stop.clone());
        tasks.spawn_on(runtime, info_span!("heartbeats"), nonces);
    }
}

/// Drains edges, listeners and streams within `timeouts.drain`. Returns the number of streams that had not ended by then.
async fn drain_streams(
    shared: &ProxyState,
    streams: &TaskGroup,
    listeners: &Listeners,
    (readiness, end_token): (&Readiness, &CancellationToken),
) -> usize {
    let grace = shared.timeouts.drain;
    let clients = || shared.limits.open_connections();
    let edges = drain::drain(
        &shared.registry,
        &shared.metrics,
        readiness,
        drain::DrainListeners {
            close: end_token,
            clients: &clients,
        },
        grace,
    );
    // Before streams are cut, so that their records say why.
    let streams = streams.drain_with(grace, || shared.registry.expire_drain());
    let (cut_streams, (), ()) = tokio::join!(streams, edges, listeners.retire());
    cut_streams
}

/// Listeners of the section `admin`.
#[derive(Debug)]
struct AdminListeners {
    admin: listener::BoundSocket,
    /// Listener for scrapers on other hosts, which serves only metrics.
    metrics: Option<listener::BoundSocket>,
}

/// Serves the admin listener, the metrics listener, and the socket for commands if there is one. Each has its own connection
/// limit.
async fn serve_admin(
    (listeners, socket): (AdminListeners, Option<listener::BoundSocket>),
    state: admin::AdminState,
    metrics: Arc<Metrics>,
    stop: http::Stop,
) {
    let (admin_router, metrics_router) =
        (admin::router(state.clone()), admin::metrics_router(state));
    let serve = |name, bound, router: &Router| {
        let limit = metrics.connection_limit(name, http::MAX_CONNECTIONS);
        http::run(bound, router.clone(), limit, stop.clone())
    };
    let socket = socket.map(|socket| serve("admin_socket_connections", socket, &admin_router));
    let metrics_server = listeners
        .metrics
        .map(|bound| serve("metrics_connections", bound, &metrics_router));
    tokio::join!(
        serve("admin_connections", listeners.admin, &admin_router),
        OptionFuture::from(socket),
        OptionFuture::from(metrics_server),
    );
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
