//! An edge: identity, policy and admin listener put together, then run.
//!
//! The three steps fail for reasons of their own and in this order: no identity, no port, nothing. Once an edge
//! runs, only its owner ends it: ask (`stop`), wait (`timeouts.drain`), end.

mod api_cache;
mod bootstrap;
mod error;
mod external_identity;
mod reload;

pub use error::Error;
pub use reload::{PendingReload, RESTART_KEYS, ReloadSummary, Reloader};

use crate::{
    config::{Config, ReloadSender, announced_ports::AnnouncedPortPolicy},
    control::{
        admin,
        api_cache::{ApiCacheConfig, FinalSave},
        csr_bootstrap::CsrClient,
        dial::GatewayConnector,
        evict,
        gateway_list::GatewayList,
        identity_store::IdentityStore,
        network_monitor::NetworkMonitor,
        rejoin_state::RejoinState,
        renew,
        tunnels::{
            connected_gateways::ConnectedGateways, context::TunnelContext,
            newest_sessions::NewestSessions,
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
use reload::{PolicyInputs, Reloadable, listing, serving, sweep};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::{Semaphore, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, info, info_span, warn};

/// How often an edge that drains looks whether it has a successor.
const LOOK: Duration = Duration::from_millis(100);

/// An edge that knows who it is.
pub struct Edge {
    config: Config,
    store: Store,
    identity: EdgeIdentity,
    policy: Policy,
    cluster: Option<Arc<dyn CsrClient>>,
    rejoin: bool,
}

/// An edge that has its admin port.
pub struct Bound {
    config: Config,
    store: Store,
    identity: EdgeIdentity,
    admin: std::net::TcpListener,
    address: SocketAddr,
    reading: Option<ApiCacheListeners>,
    table: (status::StatusWriter, StatusReader),
    instance: String,
    reloader: Reloader,
    reloads: ReloadSender,
    /// Says who this node is, where its certificate has ended.
    cluster: Option<Arc<dyn CsrClient>>,
    /// Ends connections to upstreams and the admin listener at the end of the drain, and if the future that runs this edge
    /// is dropped.
    done: CancellationToken,
    /// Two edges of one identity would take the node from each other.
    claim: DirLock,
}

impl Edge {
    /// Opens the data directory and takes up the identity in it; joins with the configured token if there is none.
    /// Joining goes on until a gateway answers or `stop`.
    ///
    /// # Errors
    /// If the edge cannot be who it should be, or its configuration does not hold.
    pub async fn open(config: Config, stop: &CancellationToken) -> Result<Self, Error> {
        Self::open_telling(config, stop, &|_| {}).await
    }

    /// Does the same as [`Edge::open`], and calls `tell` with the reason whenever an attempt to join failed and is tried
    /// again.
    ///
    /// # Errors
    /// If the edge cannot be who it should be, or its configuration does not hold.
    pub async fn open_telling(
        config: Config,
        stop: &CancellationToken,
        tell: &(dyn Fn(&str) + Send + Sync),
    ) -> Result<Self, Error> {
        Self::open_by(config, None, (stop, tell)).await
    }

    /// Does what [`Edge::open_telling`] does; where the configuration names a cluster, that one says who this node is.
    ///
    /// # Errors
    /// If the edge cannot be who it should be, or its configuration does not hold.
    pub async fn open_by(
        config: Config,
        cluster: Option<Arc<dyn CsrClient>>,
        while_joining: (&CancellationToken, &(dyn Fn(&str) + Send + Sync)),
    ) -> Result<Self, Error> {
        let store = Store::open(&config.data_dir, OpenMode::Create)?;
        let identity = match &config.identity {
            Some(files) => external_identity::load_with_gateways(files, &store)?,
            // Boxed: enrolment is large, and most edges have enrolled before.
            None => {
                Box::pin(load_or_join(
                    &config,
                    &store,
                    cluster.as_deref(),
                    while_joining,
                ))
                .await?
            }
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
            cluster,
            rejoin: false,
        })
    }

    /// Replaces the identity by the configured join token even though gateways accept it. The identity stays if the token
    /// has brought it already.
    #[must_use]
    pub fn rejoin(self, rejoin: bool) -> Self {
        Self { rejoin, ..self }
    }

    /// The node, as the certificate says.
    pub fn node(&self) -> &str {
        self.identity.node.as_str()
    }

    /// Claims the data directory and binds the listeners. Waits a moment for ports of a process that drains on the same
    /// directory, which gives them up when it sees the claim.
    ///
    /// # Errors
    /// If another process lives on the directory, or an address cannot be had.
    pub async fn bind(self) -> Result<Bound, Error> {
        let claim = self.store.claim()?;
        let (admin, reading) = api_cache::bind_all(&self.config).await?;
        let address = admin.local_addr().unwrap_or(self.config.admin.listen);
        let faces = ApiCacheTls::read(&self.config, &Leaves::new());
        let instance = format!("{:032x}", rand::random::<u128>());
        let done = CancellationToken::new();
        let (metrics, tasks) = (
            Arc::new(Metrics::default()),
            Arc::new(TaskGroup::new(&done)),
        );
        faces.report(&metrics);
        let Self {
            config,
            store,
            identity,
            policy,
            cluster,
            rejoin,
        } = self;
        let way = Proxy::new(
            policy.clone(),
            (config.timeouts.clone(), config.limits.max_headers),
            metrics.clone(),
            tasks.clone(),
        );
        let allowed = PolicyInputs::begin(policy.clone(), &way);
        Ok(Bound {
            table: status::table(identity.node.as_str(), &instance),
            admin,
            address,
            instance,
            reloader: Reloader::new(Reloadable {
                node: identity.node.as_str().to_owned(),
                trust_domain: identity.trust_domain.clone(),
                began: config.clone(),
                now: Arc::new(ArcSwap::from_pointee(way)),
                ports: Arc::new(ArcSwap::from_pointee(policy.ports())),
                allowed,
                own: own_ports(address, reading.as_ref()),
                metrics,
                tasks,
                given: watch::Sender::new(config.identity.as_ref().map(|_| identity.clone())),
                rejoin: RejoinState::new(&config, rejoin),
                shown: watch::Sender::new(faces.endpoint),
                hubs: watch::Sender::new(faces.hubs),
                leaves: ArcSwap::from_pointee(faces.leaves),
            }),
            reading,
            reloads: ReloadSender::default(),
            cluster,
            config,
            store,
            identity,
            done,
            claim,
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

/// Reads the files that a configuration names, also those of the API cache's listeners, without which an edge runs and
/// serves no clients there.
///
/// # Errors
/// If a file cannot be used.
pub fn check(config: &Config) -> Result<(), Error> {
    config
        .identity
        .as_ref()
        .map(external_identity::load)
        .transpose()?;
    Policy::new(config.node.as_deref().unwrap_or_default(), config)?;
    ApiCacheTls::read(config, &Leaves::new())
        .faults
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
    pub fn reader_addr(&self) -> Option<SocketAddr> {
        self.reading.as_ref()?.endpoint()
    }

    /// Returns the address at which the members of its pool read the API cache, if they do.
    pub fn site_addr(&self) -> Option<SocketAddr> {
        self.reading.as_ref()?.site()
    }

    /// The node, as the certificate says.
    pub fn node(&self) -> &str {
        self.identity.node.as_str()
    }

    /// Returns the address at which `YurtHub`s read the API cache, if they do.
    pub fn hubs_addr(&self) -> Option<SocketAddr> {
        self.reading.as_ref()?.hubs()
    }

    /// By which to give the edge another configuration, at any time from now on.
    pub fn reloader(&self) -> Reloader {
        self.reloader.clone()
    }

    /// Passes on to `reloads` what the admin listener is asked to read anew.
    #[must_use]
    pub fn reloads(mut self, reloads: ReloadSender) -> Self {
        self.reloads = reloads;
        self
    }

    /// The data directory.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns a reader of the edge's status, valid at any time from now on.
    pub fn reader(&self) -> StatusReader {
        self.table.1.clone()
    }

    /// Returns the current status of the edge.
    pub fn status(&self) -> Status {
        self.table.1.status()
    }

    /// Runs until `stop`, then leaves the gateways and gives open streams `timeouts.drain` to end.
    ///
    /// # Errors
    /// If TLS cannot be set up; nothing ends an edge that runs but `stop`.
    pub async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        let Self {
            config,
            store,
            identity,
            admin,
            address,
            reading,
            table: (writer, reader),
            instance,
            reloader,
            reloads,
            cluster,
            done,
            claim,
        } = self;
        let fault = api_cache::fault(address, "admin.listen");
        let admin = TcpListener::from_std(admin).map_err(fault)?;
        let admin = (admin, admin_socket(&store));
        let tls = tunnel_client(&identity)?;
        warn_of_expiry(&identity);
        let _ended = done.clone().drop_guard();
        let (over, stopping) = (done.child_token(), stop.clone());
        let (writer, node) = (Arc::new(writer), identity.node.as_str().to_owned());
        let parts = reloader.parts();
        let (metrics, tasks) = (&parts.metrics, &parts.tasks);
        announce(&config, (&node, address), &parts.ports.load());
        let held = IdentityStore::new(identity, store);
        let reading = api_cache::from_config((&config, parts), &held, reading)?;
        let links = Arc::new(TunnelContext {
            node,
            instance,
            ports: parts.ports.clone(),
            dialler: GatewayConnector::new(tls, &config),
            gateways: GatewayList::new(config.gateways.clone(), held.clone(), writer.clone()),
            serve: serving(&parts.now),
            list: listing(&reloader),
            members: reading.as_ref().map(ApiCacheConfig::hears),
            metrics: metrics.clone(),
            pressure: Arc::new(MemoryBudget::new(config.limits.stalled)),
            places: Arc::new(Semaphore::new(config.limits.streams)),
            state: writer,
            reached: ConnectedGateways::default(),
            newest: NewestSessions::default(),
            anew: watch::Sender::default(),
            held: held.clone(),
            renewal: watch::Sender::default(),
            rejoin: parts.rejoin.clone(),
            stop,
            config,
            cluster,
        });
        let kept = api_cache::start(reading, (&links, parts), (&reader, &over));
        attend(parts, &links, (admin, reader, reloads), &over);
        let tunnels = (links, NetworkMonitor::listen(tasks));
        let renewed = (held, parts.given.subscribe());
        Box::pin(live(tunnels, renewed, (claim, &stopping, &over), kept)).await;
        Ok(())
    }
}

/// Binds the socket for commands. The edge has the claim on the directory, so that a socket there is that of a process
/// that is gone or has made way.
fn admin_socket(store: &Store) -> Option<UnixListener> {
    let bound = listener::BoundSocket::unix_instead(&store.admin_socket());
    match bound.and_then(listener::BoundSocket::attach) {
        Ok(listener::SocketListener::Unix(socket)) => Some(socket),
        Ok(listener::SocketListener::Tcp(_)) => None,
        Err(error) => {
            warn!(%error, "cannot open the unix socket for commands; commands use the admin listener");
            None
        }
    }
}

/// Begins the admin listener, and the tasks that manage upstreams' connections and stalled streams.
fn attend(
    parts: &Reloadable,
    links: &TunnelContext,
    (admin, reader, reloads): (admin::Listeners, StatusReader, ReloadSender),
    done: &CancellationToken,
) {
    let (tasks, metrics) = (&parts.tasks, &parts.metrics);
    let (limits, pressure) = (links.config.limits.clone(), &links.pressure);
    let shown = (reader, (metrics.clone(), pressure.clone()), reloads);
    let ends = (links.stop.clone(), done.clone());
    tasks.spawn(info_span!("admin"), admin::run(admin, shown, ends));
    tasks.spawn(info_span!("sweep"), sweep(parts.now.clone()));
    let evicting = evict::run(limits, pressure.clone(), metrics.clone());
    tasks.spawn(info_span!("evict"), evicting);
}

/// Keeps the tunnels, and renews the certificate by them, until `stop` and the end of the last tunnel. Then what was read is
/// left on the disk.
async fn live(
    (links, changes): (Arc<TunnelContext>, NetworkMonitor),
    (held, made): (IdentityStore, watch::Receiver<Option<EdgeIdentity>>),
    (claim, stop, over): (DirLock, &CancellationToken, &CancellationToken),
    reading: Option<FinalSave>,
) {
    let renewing = renew::run(links.clone(), held.clone(), made);
    let beside = async {
        // A draining edge needs no new certificate.
        stop.run_until_cancelled(renewing).await;
        make_way(claim, &held, over).await;
    };
    tokio::select! {
        () = links.run(changes) => {}
        // Runs as long as there are tunnels.
        () = beside.instrument(info_span!("renew")) => {}
    }
    // After a takeover the new process owns the saved data.
    if !over.is_cancelled() {
        api_cache::shutdown(reading).await;
    }
}

/// Gives up the data directory, and everything else that a successor needs once there is one: it is written to no more, and
/// listeners end. Open streams go on.
async fn make_way(claim: DirLock, held: &IdentityStore, over: &CancellationToken) {
    let released = claim.release();
    while !released.is_taken() {
        sleep(LOOK).await;
    }
    info!("another process has taken over the data directory; closing the listeners for it");
    held.release();
    over.cancel();
    std::future::pending::<()>().await;
}

fn announce(config: &Config, (node, admin): (&str, SocketAddr), ports: &[u16]) {
    info!(node, %admin, ?ports, "edge is running");
    if ports.is_empty() && AnnouncedPortPolicy::of(config).is_empty() {
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
