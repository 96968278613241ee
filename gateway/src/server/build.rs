//! Builds a gateway: data directory, tables, certificates, sockets, listeners, in this order.
//!
//! Everything that can fail fails here, before anything is served, and with an error that names it.

pub(super) mod listener;
mod tunnel_listener;
pub(super) mod upstream_tls;

use super::{
    AdminListeners, AuthorizerSource, Bound, Gateway, OwnedWorkers,
    addresses::{advertised, bind},
    ca_reload::CaReload,
    certificates,
    data_dir::DataDirState,
    error::BindError,
    listeners::Listeners,
    reload::{Reloadable, Reloader},
    tunnel_identity::TunnelIdentity,
};
use crate::{
    config::{Config, ListenAddr, ReloadSender},
    control::{
        admin,
        ca_rotation::CaReloadFn,
        certificate_expiry::CertificateInventory,
        dns::{self, NodeNames, Zones},
        drain::Readiness,
        nat::{Nat, PortMap},
        node_sync::NodeSync,
        tunnel_listener::TunnelListener,
    },
    metrics::Metrics,
    proxy::{
        ProxyState,
        access_log::OpenStreams,
        access_review::{ReviewCache, ReviewClient},
        authz::{Authorize, PolicyAuthorizer},
        limits::{Counter, Limits},
        pod_route::PodLookup,
        upstream::{ConnectionPool, UpstreamTlsPorts},
    },
    state::{AdvertisedGateways, AnnouncedPortsCell, Registry},
    worker::{WorkerId, Workers},
};
use causeway_certs::Store;
use causeway_rt::{listener::BoundSocket, task::TaskGroup};
use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};
use tokio::{runtime::Handle, sync::watch};
use tokio_util::sync::CancellationToken;
use tunnel_listener::admission;

pub(super) fn bound(gateway: Gateway) -> Result<Bound, BindError> {
    let config = gateway.config;
    let base = DataDirState::open(&config)?;
    let authorizer = authorizer(gateway.deciding, &config, &base)?;
    let (workers, threads) = started(gateway.workers, &config)?;
    let tunnel = bind("the tunnel port", &ListenAddr::Tcp(config.tunnel.listen))?;
    let admin = admin_listeners(&config)?;
    let hooks = (authorizer, gateway.pods, gateway.reviews);
    let shared = Arc::new(shared(&config, &base, &workers, hooks)?);
    let (dns, names) = dns(&config, &shared)?;
    let port = (&config, base.given.clone());
    let identity = TunnelIdentity::new(&base.ca, &base.store, port)?;
    let (ending, tasks) = (CancellationToken::new(), Arc::new(TaskGroup::default()));
    let owner = (&tasks, &ending);
    let listeners = Arc::new(Listeners::new(&base.ca, &shared, &workers, owner));
    listeners.plan(&config.listeners)?.apply(None::<fn()>);
    // From here on the directory may be written to.
    let claim = base.store.claim()?;
    let address = tunnel.local_addr();
    let to_edges = to_edges(&config, address);
    let admission = admission(&config, &base, &shared, (&workers, &identity), &to_edges)?;
    let (ports, nat) = redirected(&config, &base, &listeners)?;
    let authority = Arc::new(authority(&base, &admission, (&identity, &listeners)));
    let reloader = Reloader::new(Reloadable {
        authority,
        began: config.clone(),
        tunnel: address,
        listeners,
        identity,
        to_edges,
        nodes: base.nodes.clone(),
        names,
        ports,
        shared: shared.clone(),
    });
    let readiness = Readiness::default();
    let admin_app = admin_app(
        &base,
        &shared,
        ((&readiness, &admin, gateway.reloads), &reloader),
    );
    Ok(Bound {
        config,
        claim,
        admin_socket: admin_socket(&base.store),
        store: base.store,
        pins: (base.keeper, base.meetings),
        workers,
        threads,
        shared,
        tasks,
        admission,
        tunnel,
        admin,
        admin_app,
        dns,
        reloader,
        nat,
        readiness,
        ending,
    })
}

/// Returns the given workers, or starts those of the configuration, whose threads then end with the gateway.
fn started(
    workers: Option<Workers>,
    config: &Config,
) -> Result<(Workers, OwnedWorkers), BindError> {
    if let Some(workers) = workers {
        return Ok((workers, OwnedWorkers(None)));
    }
    let workers = Workers::start(config.workers).map_err(BindError::Workers)?;
    Ok((workers.clone(), OwnedWorkers(Some(workers))))
}

/// Returns the sender of redirected ports, for reloads, and the task that applies them.
fn redirected(
    config: &Config,
    base: &DataDirState,
    listeners: &Listeners,
) -> Result<(watch::Sender<PortMap>, Option<Nat>), BindError> {
    let Some(redirect) = &config.redirect else {
        return Ok((watch::Sender::default(), None));
    };
    let ports = PortMap::new(redirect, &config.listeners, &listeners.addresses());
    let (ports, told) = watch::channel(ports);
    let nat = Nat::install(&redirect.table, &base.nodes, told)?;
    Ok((ports, Some(nat)))
}

fn authority(
    base: &DataDirState,
    admission: &TunnelListener,
    (identity, listeners): (&TunnelIdentity, &Arc<Listeners>),
) -> CaReload {
    CaReload {
        store: base.store.clone(),
        ca: base.ca.clone(),
        tls: admission.tls.clone(),
        identity: identity.clone(),
        listeners: listeners.clone(),
        registry: admission.registry.clone(),
        ledger: admission.ledger.clone(),
        roots: watch::Sender::new(base.ca.get().bundle_pem()),
        roll: NodeSync {
            store: base.store.clone(),
            nodes: base.nodes.clone(),
            keeper: base.keeper.clone(),
            tls: admission.tls.clone(),
            registry: admission.registry.clone(),
            reading: admission.reading.clone(),
            tasks: Arc::default(),
            runtime: admission.workers.runtime(WorkerId(0)).clone(),
        },
        changing: Mutex::default(),
    }
}

/// Binds the admin listener, and that of metrics if there is one.
fn admin_listeners(config: &Config) -> Result<AdminListeners, BindError> {
    let listen = ListenAddr::Tcp(config.admin.listen);
    let metrics = config.admin.metrics_listen.as_ref();
    Ok(AdminListeners {
        pages: bind("the admin listener", &listen)?,
        metrics: metrics
            .map(|listen| bind("admin.metrics_listen", listen))
            .transpose()?,
    })
}

/// Binds the socket for commands. The client holds the lock of the directory, so an existing socket is a dead process's.
fn admin_socket(store: &Store) -> Option<BoundSocket> {
    let bound = BoundSocket::unix_instead(&store.admin_socket());
    bound
        .inspect_err(|error| {
            tracing::warn!(%error, "the Unix socket for commands is not available: commands use the admin listener");
        })
        .ok()
}

fn admin_app(
    base: &DataDirState,
    shared: &ProxyState,
    ((readiness, bound, reloads), reloader): (
        (&Readiness, &AdminListeners, ReloadSender),
        &Reloader,
    ),
) -> admin::AdminState {
    let (reloader, roll) = (reloader.clone(), reloader.parts().authority.roll.clone());
    let listens = reloader.parts().began.admin.listen;
    let certificates = {
        let reloader = reloader.clone();
        CertificateInventory(Arc::new(move || {
            certificates::certificates_in_use(reloader.parts())
        }))
    };
    let take_up = move || {
        let authority = &reloader.parts().authority;
        authority.take_up().map_err(|error| error.to_string())
    };
    admin::AdminState {
        nodes: shared.nodes.clone(),
        registry: shared.registry.clone(),
        metrics: shared.metrics.clone(),
        pressure: shared.limits.pressure().clone(),
        readiness: readiness.clone(),
        address: bound.pages.local_addr().unwrap_or(listens),
        reloads,
        ca: base.ca.clone(),
        certificates,
        take_up: CaReloadFn(Arc::new(take_up)),
        roll,
    }
}

fn authorizer(
    deciding: AuthorizerSource,
    config: &Config,
    base: &DataDirState,
) -> Result<Arc<dyn Authorize>, BindError> {
    match (deciding, &config.policy.0) {
        (AuthorizerSource::By(authorizer), _) => Ok(authorizer),
        // Must not allow everything only because the caller has not loaded the policy file.
        (AuthorizerSource::Policy(policy), Some(path)) if policy.is_open() => {
            Err(BindError::File {
                what: "policy".to_owned(),
                path: path.clone(),
                why: "the gateway was built without its rules (Gateway::policy)".to_owned(),
            })
        }
        (AuthorizerSource::Policy(policy), _) => Ok(Arc::new(PolicyAuthorizer {
            policy,
            nodes: base.nodes.reader(),
        })),
    }
}

/// Sources of decisions beside the tables: the authorizer, the pod lookup and the reviews.
type Deciders = (
    Arc<dyn Authorize>,
    Option<Arc<dyn PodLookup>>,
    Option<(Arc<dyn ReviewClient>, Handle)>,
);

fn shared(
    config: &Config,
    base: &DataDirState,
    workers: &Workers,
    (authorizer, pods, reviews): Deciders,
) -> Result<ProxyState, BindError> {
    let known = (&base.nodes.reader(), &base.pins);
    let by_port = upstream_tls::read_all(&config.upstream_tls, known, None)?;
    let kept = ConnectionPool::new(workers.all().count(), config.timeouts.idle_keepalive);
    let (metrics, bound) = (Metrics::new(), config.timeouts.authorize);
    let kubernetes = config.kubernetes.clone().unwrap_or_default();
    let answers = |asked| ReviewCache::new(asked, &kubernetes, bound, &metrics);
    let registry = Registry::new(workers);
    Ok(ProxyState {
        reviews: reviews.map(answers),
        nodes: base.nodes.reader(),
        limits: Arc::new(Limits::new(config.limits.clone(), &metrics)),
        direct: Counter::default(),
        streams: Arc::new(OpenStreams::new(
            workers.all().count(),
            (authorizer.clone(), registry.clone()),
            (config.access_log, config.timeouts.drain),
        )),
        registry,
        authorizer,
        apps: UpstreamTlsPorts::new(by_port, kept, base.pins.clone()),
        pods,
        metrics,
        timeouts: config.timeouts.clone(),
        uri_bytes: config.limits.max_uri_bytes,
        kubernetes_uri_bytes: config.limits.max_kubernetes_uri_bytes,
        header_bytes: config.limits.max_header_bytes,
        max_headers: config.limits.max_headers,
    })
}

fn dns(
    config: &Config,
    shared: &ProxyState,
) -> Result<(Option<dns::BoundSockets>, NodeNames), BindError> {
    let bound = config.dns.0.as_ref().map(|dns| {
        dns::BoundSockets::at(dns.listen).map_err(|cause| BindError::Listen {
            what: "the DNS server".to_owned(),
            listen: dns.listen.to_string(),
            cause,
        })
    });
    let zones = Zones::of(config).map_err(BindError::Name)?;
    let names = NodeNames::new(zones, shared.nodes.clone(), shared.metrics.clone());
    Ok((bound.transpose()?, names))
}

/// Returns the addresses and ports that are announced to edges.
fn to_edges(
    config: &Config,
    address: Option<SocketAddr>,
) -> (AdvertisedGateways, AnnouncedPortsCell) {
    let advertised = AdvertisedGateways::new(advertised(&config.tunnel, address));
    (advertised, AnnouncedPortsCell::new(config.listed.clone()))
}
