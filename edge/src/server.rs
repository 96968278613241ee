//! Edge: combines identity, policy and admin listener, and runs them.
//!
//! The three steps have different errors, in this order: no identity, no free port, and none while the edge runs. Only its
//! owner ends a running edge: `stop` is cancelled, streams end within `timeouts.drain`, and then the edge ends.

mod api_cache;
mod bootstrap;
mod error;
mod external_identity;
mod health_checks;
mod reload;

pub use error::Error;
pub use reload::{PendingReload, RESTART_KEYS, ReloadSummary, Reloader};

use crate::{
    config::{AnnouncedPortPolicy, Config, ReloadSender},
    control::{
        admin,
        api_cache::{ApiCacheConfig, FinalSave},
        csr_bootstrap::CsrClient,
        dial::GatewayConnector,
        egress, evict,
        gateway_list::GatewayList,
        identity_store::IdentityStore,
        network_monitor::NetworkMonitor,
        rejoin_state::RejoinState,
        renew,
        tunnels::{
            connected_gateways::ConnectedGateways,
            context::{NewestSessions, TunnelContext},
        },
    },
    metrics::Metrics,
    proxy::{Policy, Proxy},
    status::{self, Status, StatusReader},
};
use api_cache::{ApiCacheListeners, own_ports};
use arc_swap::ArcSwap;
use bootstrap::{load_or_join, warn_of_expiry};
use causeway_certs::{DirLock, EdgeIdentity, Store, store::OpenMode, verify::tunnel_client};
use causeway_rt::{listener, task::TaskGroup};
use causeway_tunnel::buffered::MemoryBudget;
use external_identity::{ApiCacheTls, Leaves};
use futures_util::future::BoxFuture;
use health_checks::HealthChecks;
use reload::{PolicyInputs, Reloadable, announced_ports_fn, serve_fn, sweep_idle_connections};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::{Semaphore, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, info, info_span, warn};

/// Interval at which a draining edge checks whether it has a successor.
const SUCCESSOR_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Edge with an identity, before it has bound its listeners.
pub struct Edge {
    config: Config,
    store: Store,
    identity: EdgeIdentity,
    policy: Policy,
    csr_client: Option<Arc<dyn CsrClient>>,
    rejoin: bool,
}

/// Edge that has bound its listeners.
pub struct Bound {
    config: Config,
    store: Store,
    identity: EdgeIdentity,
    admin: std::net::TcpListener,
    address: SocketAddr,
    cache_listeners: Option<ApiCacheListeners>,
    status: (status::StatusWriter, StatusReader),
    instance: String,
    reloader: Reloader,
    reloads: ReloadSender,
    /// Client of the cluster, which authenticates this node if its certificate has expired.
    csr_client: Option<Arc<dyn CsrClient>>,
    /// Token that ends connections to upstreams and the admin listener. It is cancelled at the end of the drain, and if the
    /// future that runs this edge is dropped.
    shutdown: CancellationToken,
    /// Lock of the data directory. Two edges with one identity would take the node from each other.
    dir_lock: DirLock,
}

impl Edge {
    /// Opens the data directory and loads its identity. Without an identity, joins with the configured token, until a gateway
    /// answers or `stop` is cancelled.
    ///
    /// # Errors
    /// If the edge has no usable identity, or its configuration is not valid.
    pub async fn open(config: Config, stop: &CancellationToken) -> Result<Self, Error> {
        Self::open_with_progress(config, stop, &|_| {}).await
    }

    /// Does the same as [`Edge::open`], and calls `on_progress` with the reason whenever an attempt to join failed and is
    /// tried again.
    ///
    /// # Errors
    /// If the edge has no usable identity, or its configuration is not valid.
    pub async fn open_with_progress(
        config: Config,
        stop: &CancellationToken,
        on_progress: &(dyn Fn(&str) + Send + Sync),
    ) -> Result<Self, Error> {
        Self::open_with_csr(config, None, (stop, on_progress)).await
    }

    /// Does the same as [`Edge::open_with_progress`]. If the configuration names a cluster, `csr_client` joins through the
    /// cluster.
    ///
    /// # Errors
    /// If the edge has no usable identity, or its configuration is not valid.
    // Boxed here, so that it is compiled once and not in each caller.
    pub fn open_with_csr<'a>(
        config: Config,
        csr_client: Option<Arc<dyn CsrClient>>,
        join_context: (&'a CancellationToken, &'a (dyn Fn(&str) + Send + Sync)),
    ) -> BoxFuture<'a, Result<Self, Error>> {
        Box::pin(Self::load(config, csr_client, join_context))
    }

    async fn load(
        config: Config,
        csr_client: Option<Arc<dyn CsrClient>>,
        join_context: (&CancellationToken, &(dyn Fn(&str) + Send + Sync)),
    ) -> Result<Self, Error> {
        let store = Store::open(&config.data_dir, OpenMode::Create)?;
        let identity = match &config.identity {
            Some(files) => external_identity::load_with_gateways(files, &store)?,
            None => load_or_join(&config, &store, csr_client.as_deref(), join_context).await?,
        };
        let certificate = identity.node.as_str();
        if let Some(configured) = &config.node
            && !configured.eq_ignore_ascii_case(certificate)
            && let Some(files) = &config.identity
        {
            return Err(external_identity::check_node_name(
                files,
                configured,
                certificate,
            ));
        }
        if config.gateways.is_empty() && identity.gateways.is_empty() {
            return Err(Error::NoGateway);
        }
        let policy = Policy::new(certificate, &config)?;
        Ok(Self {
            config,
            store,
            identity,
            policy,
            csr_client,
            rejoin: false,
        })
    }

    /// Sets whether the configured join token replaces the identity even if gateways accept it. An identity that was obtained
    /// with this token stays.
    #[must_use]
    pub fn rejoin(self, rejoin: bool) -> Self {
        Self { rejoin, ..self }
    }

    /// Returns the name of the node in the certificate.
    pub fn node(&self) -> &str {
        self.identity.node.as_str()
    }

    /// Claims the data directory and binds the listeners. Waits a moment for ports of a draining process on the same
    /// directory, which closes its listeners when it detects the claim.
    ///
    /// # Errors
    /// If another process uses the directory, or an address cannot be bound.
    pub async fn bind(self) -> Result<Bound, Error> {
        let dir_lock = self.store.claim()?;
        let (admin, cache_listeners) = api_cache::bind_all(&self.config).await?;
        let address = admin.local_addr().unwrap_or(self.config.admin.listen);
        let api_cache_tls = ApiCacheTls::read(&self.config, &Leaves::new());
        let instance = format!("{:032x}", rand::random::<u128>());
        let shutdown = CancellationToken::new();
        let metrics = Arc::new(Metrics::default());
        let tasks = Arc::new(TaskGroup::new(&shutdown));
        api_cache_tls.report(&metrics);
        let Self {
            config,
            store,
            identity,
            policy,
            csr_client,
            rejoin,
        } = self;
        let proxy = Proxy::new(
            policy.clone(),
            (config.timeouts.clone(), config.limits.max_headers),
            metrics.clone(),
            tasks.clone(),
        );
        let policy_inputs = PolicyInputs::new(policy.clone(), &proxy);
        Ok(Bound {
            status: status::status_channel(identity.node.as_str(), &instance),
            admin,
            address,
            instance,
            reloader: Reloader::new(Reloadable {
                node: identity.node.as_str().to_owned(),
                trust_domain: identity.trust_domain.clone(),
                initial_config: config.clone(),
                current_proxy: Arc::new(ArcSwap::from_pointee(proxy)),
                ports: Arc::new(ArcSwap::from_pointee(policy.ports())),
                services: Arc::new(ArcSwap::from_pointee(policy.reported_services())),
                policy_inputs,
                own_ports: own_ports(address, cache_listeners.as_ref()),
                unhealthy_ports: watch::Sender::default(),
                metrics,
                tasks,
                external_identity: watch::Sender::new(
                    config.identity.as_ref().map(|_| identity.clone()),
                ),
                rejoin: RejoinState::new(&config, rejoin),
                endpoint_tls: watch::Sender::new(api_cache_tls.endpoint),
                yurthub_tls: watch::Sender::new(api_cache_tls.yurthub),
                listener_certificates: ArcSwap::from_pointee(api_cache_tls.certificates),
            }),
            cache_listeners,
            reloads: ReloadSender::default(),
            csr_client,
            config,
            store,
            identity,
            shutdown,
            dir_lock,
        })
    }
}

/// Whether there is a gateway to dial: one is configured, or the data directory has one from an earlier connection.
pub fn knows_gateway(config: &Config) -> bool {
    let learned = || {
        let store = Store::open(&config.data_dir, OpenMode::Existing).ok()?;
        match &config.identity {
            Some(_) => store.learned_gateways().ok(),
            None => Some(store.edge().ok()??.gateways),
        }
    };
    !config.gateways.is_empty() || learned().is_some_and(|gateways| !gateways.is_empty())
}

/// Reads the files that a configuration names. These include the files of the API cache's listeners, which an edge can run
/// without, although such a listener then serves no clients.
///
/// # Errors
/// If a file cannot be used.
pub fn check_files(config: &Config) -> Result<(), Error> {
    config
        .identity
        .as_ref()
        .map(external_identity::load)
        .transpose()?;
    Policy::new(config.node.as_deref().unwrap_or_default(), config)?;
    ApiCacheTls::read(config, &Leaves::new())
        .errors
        .into_iter()
        .next()
        .map_or(Ok(()), Err)
}

impl Bound {
    /// Returns the address of the admin listener.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address at which this node's programs read the API cache, if it is enabled.
    pub fn api_cache_addr(&self) -> Option<SocketAddr> {
        self.cache_listeners.as_ref()?.local_addr()
    }

    /// Returns the address at which pool members read the API cache, if that listener is configured.
    pub fn members_addr(&self) -> Option<SocketAddr> {
        self.cache_listeners.as_ref()?.members_addr()
    }

    /// Returns the name of the node in the certificate.
    pub fn node(&self) -> &str {
        self.identity.node.as_str()
    }

    /// Returns the address at which `YurtHub`s read the API cache, if that listener is configured.
    pub fn yurthub_addr(&self) -> Option<SocketAddr> {
        self.cache_listeners.as_ref()?.yurthub_addr()
    }

    /// Returns the handle that applies another configuration, valid at any time from now on.
    pub fn reloader(&self) -> Reloader {
        self.reloader.clone()
    }

    /// Sends reload requests of the admin listener to `reloads`.
    #[must_use]
    pub fn with_reloads(mut self, reloads: ReloadSender) -> Self {
        self.reloads = reloads;
        self
    }

    /// Returns the store of the data directory.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns a reader of the edge's status, valid at any time from now on.
    pub fn status_reader(&self) -> StatusReader {
        self.status.1.clone()
    }

    /// Returns the current status of the edge.
    pub fn status(&self) -> Status {
        self.status.1.status()
    }

    /// Runs until `stop`, then leaves the gateways and gives open streams `timeouts.drain` to end.
    ///
    /// # Errors
    /// If TLS cannot be set up. Only `stop` ends a running edge.
    // Boxed here, so that it is compiled once and not in each caller.
    pub fn run(self, stop: CancellationToken) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(self.serve(stop))
    }

    async fn serve(self, stop: CancellationToken) -> Result<(), Error> {
        let Self {
            config,
            store,
            identity,
            admin,
            address,
            cache_listeners,
            status: (writer, reader),
            instance,
            reloader,
            reloads,
            csr_client,
            shutdown,
            dir_lock,
        } = self;
        let bind_error = api_cache::bind_error(address, "admin.listen");
        let admin = TcpListener::from_std(admin).map_err(bind_error)?;
        let admin = (admin, admin_socket(&store));
        warn_of_expiry(&identity);
        let _ended = shutdown.clone().drop_guard();
        let (writer, node) = (Arc::new(writer), identity.node.as_str().to_owned());
        let parts = reloader.parts();
        log_startup(&config, (&node, address), &parts.ports.load());
        let identity_store = IdentityStore::new(identity, store);
        let cache = api_cache::from_config((&config, parts), &identity_store, cache_listeners)?;
        let context = Arc::new(TunnelContext {
            node,
            instance,
            ports: parts.ports.clone(),
            services: parts.services.clone(),
            unhealthy_ports: parts.unhealthy_ports.subscribe(),
            connector: GatewayConnector::new(tunnel_client(&identity_store.identity())?, &config),
            gateways: GatewayList::new(
                config.gateways.clone(),
                identity_store.clone(),
                writer.clone(),
            ),
            serve_stream: serve_fn(&parts.current_proxy),
            on_announced_ports: announced_ports_fn(&reloader),
            membership: cache.as_ref().map(ApiCacheConfig::membership),
            heartbeats: api_cache::heartbeat_relay(&config, &parts.metrics),
            metrics: parts.metrics.clone(),
            memory_budget: Arc::new(MemoryBudget::new(config.limits.stalled)),
            stream_permits: Arc::new(Semaphore::new(config.limits.streams)),
            status: writer,
            connected_gateways: ConnectedGateways::new(config.tunnels.gateways.max_gateways()),
            newest_sessions: NewestSessions::default(),
            reconnect: watch::Sender::default(),
            identity_store,
            renewal_requests: watch::Sender::default(),
            rejoin: parts.rejoin.clone(),
            stop,
            config,
            csr_client,
        });
        let admin = (admin, reader, reloads);
        run_until_stopped((context, parts), cache, admin, (dir_lock, &shutdown)).await;
        Ok(())
    }
}

/// Starts the tasks of an edge, and keeps its tunnels until it stops and the last tunnel has ended.
async fn run_until_stopped(
    (context, parts): (Arc<TunnelContext>, &Reloadable),
    cache_config: Option<ApiCacheConfig>,
    (admin, reader, reloads): (admin::Listeners, StatusReader, ReloadSender),
    (dir_lock, shutdown): (DirLock, &CancellationToken),
) {
    let listeners_stop = shutdown.child_token();
    let final_save = api_cache::start(cache_config, (&context, parts), (&reader, &listeners_stop));
    spawn_admin_tasks(parts, &context, (admin, reader, reloads), &listeners_stop);
    let egress_tokens = (&parts.tasks, &listeners_stop);
    let egress = context.config.egress.as_ref();
    let egress = egress.map(|config| egress::start(config, &context, egress_tokens));
    let tunnels = (context, NetworkMonitor::start(&parts.tasks));
    let external_identity = parts.external_identity.subscribe();
    let handover = (dir_lock, &listeners_stop);
    Box::pin(run_tunnels(
        tunnels,
        external_identity,
        handover,
        (final_save, egress),
    ))
    .await;
}

/// Binds the socket for commands. The edge has claimed the directory, so an existing socket belongs to a process that has
/// ended or has handed over.
fn admin_socket(store: &Store) -> Option<UnixListener> {
    let bound_socket = listener::BoundSocket::unix_replacing(&store.admin_socket());
    match bound_socket.and_then(listener::BoundSocket::attach) {
        Ok(listener::SocketListener::Unix(socket)) => Some(socket),
        Ok(listener::SocketListener::Tcp(_)) => None,
        Err(error) => {
            warn!(%error, "cannot open the unix socket for commands; commands use the admin listener");
            None
        }
    }
}

/// Starts the admin listener, and the tasks that manage upstreams' connections and stalled streams.
fn spawn_admin_tasks(
    parts: &Reloadable,
    context: &TunnelContext,
    (admin, reader, reloads): (admin::Listeners, StatusReader, ReloadSender),
    listeners_stop: &CancellationToken,
) {
    let (tasks, metrics) = (&parts.tasks, &parts.metrics);
    let (limits, memory_budget) = (context.config.limits.clone(), &context.memory_budget);
    let admin_context = (reader, (metrics.clone(), memory_budget.clone()), reloads);
    let stop_tokens = (context.stop.clone(), listeners_stop.clone());
    tasks.spawn(
        info_span!("admin"),
        admin::run(admin, admin_context, stop_tokens),
    );
    tasks.spawn(
        info_span!("sweep"),
        sweep_idle_connections(parts.current_proxy.clone()),
    );
    let checks = HealthChecks {
        current_proxy: parts.current_proxy.clone(),
        unhealthy_ports: parts.unhealthy_ports.clone(),
        metrics: metrics.clone(),
    };
    tasks.spawn(info_span!("health_checks"), checks.run());
    let evict_task = evict::run(limits, memory_budget.clone(), metrics.clone());
    tasks.spawn(info_span!("evict"), evict_task);
}

/// Time of open egress connections after the last tunnel has ended. Many never end, such as the watches of a kubelet, and the next
/// process starts only after the end of this one.
const EGRESS_GRACE: Duration = Duration::from_secs(2);

/// Maintains the tunnels and renews the certificate, until the edge stops and the last tunnel has ended. Then saves the API
/// cache on the disk.
async fn run_tunnels(
    (context, changes): (Arc<TunnelContext>, NetworkMonitor),
    external_identity: watch::Receiver<Option<EdgeIdentity>>,
    (dir_lock, listeners_stop): (DirLock, &CancellationToken),
    (final_save, egress): (Option<FinalSave>, Option<Arc<TaskGroup>>),
) {
    let drain_time = context.config.timeouts.drain;
    let (identity_store, stop) = (context.identity_store.clone(), context.stop.clone());
    let renewal = renew::run(context.clone(), identity_store.clone(), external_identity);
    let renewal_and_handover = async {
        // A draining edge needs no new certificate.
        stop.run_until_cancelled(renewal).await;
        hand_over_data_dir(dir_lock, &identity_store, listeners_stop).await;
    };
    let sessions = async {
        context.run(changes).await;
        if let Some(sessions) = egress {
            sessions.drain(EGRESS_GRACE.min(drain_time)).await;
        }
    };
    tokio::select! {
        () = sessions => {}
        // Runs as long as there are tunnels.
        () = renewal_and_handover.instrument(info_span!("renew")) => {}
    }
    // After a takeover the new process owns the saved data.
    if !listeners_stop.is_cancelled() {
        api_cache::shutdown(final_save).await;
    }
}

/// Releases the data directory. Once a successor has claimed it, stops writing to it and closes the listeners. Open streams
/// continue.
async fn hand_over_data_dir(
    dir_lock: DirLock,
    identity_store: &IdentityStore,
    listeners_stop: &CancellationToken,
) {
    let released = dir_lock.release();
    while !released.is_taken() {
        sleep(SUCCESSOR_CHECK_INTERVAL).await;
    }
    info!("another process has taken over the data directory; closing the listeners for it");
    identity_store.release();
    listeners_stop.cancel();
    std::future::pending::<()>().await;
}

fn log_startup(config: &Config, (node, admin): (&str, SocketAddr), ports: &[u16]) {
    info!(node, %admin, ?ports, "edge is running");
    if ports.is_empty() && AnnouncedPortPolicy::from_config(config).is_empty() {
        warn!(
            "this edge serves no ports: configure some, for example with --ports '{{9100: {{}}}}'"
        );
    }
}

impl std::fmt::Debug for Edge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Edge")
            .field("node", &self.node())
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bound")
            .field("node", &self.node())
            .field("admin", &self.address)
            .finish_non_exhaustive()
    }
}
