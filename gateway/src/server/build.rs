//! Builds a gateway: data directory, tables, certificates, sockets, listeners, in this order.
//!
//! All errors are reported here, before any client is served. Each error names the faulty item.

pub(super) mod listener;
mod tunnel_listener;
pub(super) mod upstream_tls;

use super::{
    AuthorizerSource, Bound, Gateway, OwnedWorkers,
    addresses::advertised,
    ca_reload::CaReload,
    certificates,
    control_servers::{AdminListeners, ControlServers},
    data_dir::DataDirState,
    error::BindError,
    handover::{self, Handover, Predecessor},
    listeners::Listeners,
    reload::{Reloadable, Reloader},
    sockets::{self, InheritedSockets, OpenSockets, SocketName, TUNNEL_PORT, bind},
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
        state_sync::StateSync,
        successor::Successor,
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
    state::{AdvertisedGateways, AnnouncedPortsCell, EgressRules, EgressUsage, Registry},
    worker::{WorkerId, Workers},
};
use causeway_certs::{DirLock, Store};
use causeway_rt::{listener::BoundSocket, task::TaskGroup};
use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};
use tokio::{runtime::Handle, sync::watch};
use tokio_util::sync::CancellationToken;
use tunnel_listener::build_tunnel_listener;

const ADMIN_LISTENER: &str = "the admin listener (admin.listen)";
const METRICS_LISTENER: &str = "admin.metrics_listen";

pub(super) fn bind_gateway(gateway: Gateway) -> Result<Bound, BindError> {
    let (config, successor) = (gateway.config, Successor::default());
    let base = DataDirState::open(&config, gateway.state_engine)?;
    let (early_claim, predecessor, inherited) = take_over(&base.store, gateway.take_over)?;
    let authorizer = authorizer(gateway.deciding, &config, &base)?;
    let (workers, owned_workers) = start_workers(gateway.workers, &config)?;
    let listen = ListenAddr::Tcp(config.tunnel.listen);
    let tunnel = bind(TUNNEL_PORT, &listen, &inherited)?;
    let admin = admin_listeners(&config, &inherited)?;
    let deciders = (authorizer, gateway.pods, gateway.reviews);
    let shared = Arc::new(build_proxy_state(&config, &base, &workers, deciders)?);
    let (dns, names) = bind_dns(&config, &shared, &inherited)?;
    let inputs = (base.external_identity.clone(), &base.gateway_revocation);
    let identity = TunnelIdentity::new(&base.ca, &base.store, &config, inputs)?;
    let (ending, tasks) = (CancellationToken::new(), Arc::new(TaskGroup::default()));
    let listeners = bind_listeners(
        (&config, &base),
        (&shared, &workers),
        (&tasks, &ending),
        (&inherited, &successor),
    )?;
    inherited.close();
    // From here on the directory may be written to.
    let dir_lock = early_claim.map_or_else(|| base.store.claim(), Ok)?;
    let address = tunnel.local_addr();
    let to_edges = build_announcements(&config, address);
    let inputs = (&workers, &identity, (&tasks, &ending));
    let tunnel_listener = build_tunnel_listener(&config, &base, &shared, inputs, &to_edges)?;
    let (ports, nat) = install_redirects(&config, &base, &listeners, predecessor.is_some())?;
    let authority = build_ca_reload(&base, &tunnel_listener, (&identity, &listeners));
    let reloader = build_reloader(
        (&config, &base, &shared),
        (authority, listeners, identity),
        (to_edges, address),
        (names, ports),
    );
    let readiness = Readiness::default();
    let admin_inputs = (&readiness, &admin, gateway.reloads);
    let admin_state = admin_app(&base, &shared, (admin_inputs, &reloader));
    let servers = ControlServers {
        tunnel_listener,
        tunnel_socket: tunnel,
        admin,
        admin_state,
        dns,
        nat,
    };
    let sockets = open_sockets(&config, &servers);
    Ok(Bound {
        config,
        handover: Handover::new(dir_lock, predecessor, sockets, successor),
        store: base.store,
        pins: (base.pin_writer, base.new_pins),
        workers,
        owned_workers,
        shared,
        tasks,
        servers,
        reloader,
        readiness,
    })
}

/// Builds and binds the listeners for clients.
fn bind_listeners(
    (config, base): (&Config, &DataDirState),
    (shared, workers): (&Arc<ProxyState>, &Workers),
    tasks: (&Arc<TaskGroup>, &CancellationToken),
    handover: (&InheritedSockets, &Successor),
) -> Result<Arc<Listeners>, BindError> {
    let listeners = Listeners::new(&base.ca, shared, workers, tasks, handover);
    listeners.plan(&config.listeners)?.apply(None::<fn()>);
    Ok(Arc::new(listeners))
}

/// Returns the given workers, or starts the configured number, whose threads end with the gateway.
fn start_workers(
    workers: Option<Workers>,
    config: &Config,
) -> Result<(Workers, OwnedWorkers), BindError> {
    if let Some(workers) = workers {
        return Ok((workers, OwnedWorkers(None)));
    }
    let workers = Workers::start(config.workers).map_err(BindError::Workers)?;
    Ok((workers.clone(), OwnedWorkers(Some(workers))))
}

/// Claims the data directory at once and takes over from a running process, if the gateway may do that.
fn take_over(
    store: &Store,
    may_take_over: bool,
) -> Result<(Option<DirLock>, Option<Predecessor>, InheritedSockets), BindError> {
    if !may_take_over {
        return Ok((None, None, InheritedSockets::default()));
    }
    let (claim, taken_over) = handover::claim_or_take_over(store)?;
    let (predecessor, sockets) = taken_over.unzip();
    Ok((Some(claim), predecessor, sockets.unwrap_or_default()))
}

/// Returns handles of the sockets that a successor takes over, beside those of the listeners for clients.
fn open_sockets(config: &Config, servers: &ControlServers) -> OpenSockets {
    let sockets = OpenSockets::default();
    let add = |used_for, listen: &ListenAddr, socket: &BoundSocket| {
        let name = SocketName::of_listener(used_for, listen).bound_to(socket.local_addr());
        sockets.add(name, socket);
    };
    let (tunnel, admin) = (&servers.tunnel_socket, &servers.admin);
    add(TUNNEL_PORT, &ListenAddr::Tcp(config.tunnel.listen), tunnel);
    add(
        ADMIN_LISTENER,
        &ListenAddr::Tcp(config.admin.listen),
        &admin.admin,
    );
    let metrics = config
        .admin
        .metrics_listen
        .as_ref()
        .zip(admin.metrics.as_ref());
    if let Some((listen, metrics)) = metrics {
        add(METRICS_LISTENER, listen, metrics);
    }
    if let Some((listen, dns)) = config.dns.0.as_ref().zip(servers.dns.as_ref())
        && let Ok((udp, tcp)) = dns.try_clone()
    {
        let [udp_name, tcp_name] = sockets::dns_names(listen.listen);
        sockets.add(udp_name.bound_to(dns.local_addr()), &udp);
        sockets.add(tcp_name.bound_to(dns.local_addr()), &tcp);
    }
    sockets
}

/// Returns the sender of redirected ports, for reloads, and the task that applies them.
fn install_redirects(
    config: &Config,
    base: &DataDirState,
    listeners: &Listeners,
    has_predecessor: bool,
) -> Result<(watch::Sender<PortMap>, Option<Nat>), BindError> {
    let Some(redirect) = &config.redirect else {
        return Ok((watch::Sender::default(), None));
    };
    let ports = PortMap::new(redirect, &config.listeners, &listeners.addresses());
    let (ports, port_receiver) = watch::channel(ports);
    let nat = Nat::install(
        &redirect.table,
        &base.nodes,
        &port_receiver,
        has_predecessor,
    )?;
    Ok((ports, Some(nat)))
}

fn build_ca_reload(
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
        record_writer: admission.record_writer.clone(),
        roots: watch::Sender::new(base.ca.get().bundle_pem()),
        node_sync: NodeSync {
            store: base.store.clone(),
            nodes: base.nodes.clone(),
            pin_writer: base.pin_writer.clone(),
            tls: admission.tls.clone(),
            registry: admission.registry.clone(),
            api_cache: admission.api_cache.clone(),
            gateway_revocation: base.gateway_revocation.clone(),
            tasks: Arc::default(),
            runtime: admission.workers.runtime(WorkerId(0)).clone(),
        },
        change_lock: Mutex::default(),
    }
}

fn build_reloader(
    (config, base, shared): (&Config, &DataDirState, &Arc<ProxyState>),
    (authority, listeners, identity): (CaReload, Arc<Listeners>, TunnelIdentity),
    (announcements, tunnel): ((AdvertisedGateways, AnnouncedPortsCell), Option<SocketAddr>),
    (names, ports): (NodeNames, watch::Sender<PortMap>),
) -> Reloader {
    Reloader::new(Reloadable {
        authority: Arc::new(authority),
        startup_config: config.clone(),
        tunnel,
        listeners,
        identity,
        announcements,
        nodes: base.nodes.clone(),
        names,
        ports,
        shared: shared.clone(),
    })
}

/// Binds the admin listener, and the metrics listener if one is configured.
fn admin_listeners(
    config: &Config,
    inherited: &InheritedSockets,
) -> Result<AdminListeners, BindError> {
    let listen = ListenAddr::Tcp(config.admin.listen);
    let metrics = config.admin.metrics_listen.as_ref();
    Ok(AdminListeners {
        admin: bind(ADMIN_LISTENER, &listen, inherited)?,
        metrics: metrics
            .map(|listen| bind(METRICS_LISTENER, listen, inherited))
            .transpose()?,
    })
}

fn admin_app(
    base: &DataDirState,
    shared: &ProxyState,
    ((readiness, admin_listeners, reloads), reloader): (
        (&Readiness, &AdminListeners, ReloadSender),
        &Reloader,
    ),
) -> admin::AdminState {
    let (reloader, node_sync) = (
        reloader.clone(),
        reloader.parts().authority.node_sync.clone(),
    );
    let configured_address = reloader.parts().startup_config.admin.listen;
    let certificates = {
        let reloader = reloader.clone();
        CertificateInventory(Arc::new(move || {
            certificates::certificates_in_use(reloader.parts())
        }))
    };
    let reload_ca = move || {
        let authority = &reloader.parts().authority;
        authority.reload_ca().map_err(|error| error.to_string())
    };
    let reload_ca = CaReloadFn(Arc::new(reload_ca));
    let state_sync = |shared| StateSync {
        shared,
        node_sync: node_sync.clone(),
        reload_ca: reload_ca.clone(),
        readiness: readiness.clone(),
    };
    let state_sync = base.shared_state.clone().map(state_sync).map(Arc::new);
    admin::AdminState {
        nodes: shared.nodes.clone(),
        registry: shared.registry.clone(),
        egress_usage: shared.egress_usage.clone(),
        metrics: shared.metrics.clone(),
        memory_budget: shared.limits.memory_budget().clone(),
        readiness: readiness.clone(),
        address: admin_listeners
            .admin
            .local_addr()
            .unwrap_or(configured_address),
        reload_sender: reloads,
        ca: base.ca.clone(),
        certificates,
        reload_ca,
        node_sync,
        state_sync,
    }
}

fn authorizer(
    source: AuthorizerSource,
    config: &Config,
    base: &DataDirState,
) -> Result<Arc<dyn Authorize>, BindError> {
    match (source, &config.policy.0) {
        (AuthorizerSource::By(authorizer), _) => Ok(authorizer),
        // Must not allow everything only because the caller has not loaded the policy file.
        (AuthorizerSource::Policy(policy), Some(path)) if policy.allows_all() => {
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

/// Sources of decisions besides the tables: the authorizer, the pod lookup and the reviews.
type Deciders = (
    Arc<dyn Authorize>,
    Option<Arc<dyn PodLookup>>,
    Option<(Arc<dyn ReviewClient>, Handle)>,
);

fn build_proxy_state(
    config: &Config,
    base: &DataDirState,
    workers: &Workers,
    (authorizer, pods, reviews): Deciders,
) -> Result<ProxyState, BindError> {
    let known = (&base.nodes.reader(), &base.pins);
    let by_port = upstream_tls::read_all(&config.upstream_tls, known, None)?;
    let pool = ConnectionPool::new(workers.all().count(), config.timeouts.idle_keepalive);
    let (metrics, bound) = (Metrics::new(), config.timeouts.authorize);
    let kubernetes = config.kubernetes.clone().unwrap_or_default();
    let new_review_cache = |asked| ReviewCache::new(asked, &kubernetes, bound, &metrics);
    let registry = Registry::new(workers);
    Ok(ProxyState {
        reviews: reviews.map(new_review_cache),
        nodes: base.nodes.reader(),
        limits: Arc::new(Limits::new(config.limits.clone(), &metrics)),
        direct_streams: Counter::default(),
        streams: Arc::new(OpenStreams::new(
            workers.all().count(),
            (authorizer.clone(), registry.clone()),
            (config.access_log, config.timeouts.drain),
        )),
        registry,
        egress: EgressRules::new(config.egress.as_ref()),
        egress_usage: EgressUsage::default(),
        authorizer,
        upstream_tls_ports: UpstreamTlsPorts::new(by_port, pool, base.pins.clone()),
        pods,
        metrics,
        timeouts: config.timeouts.clone(),
        max_uri_bytes: config.limits.max_uri_bytes,
        max_kubernetes_uri_bytes: config.limits.max_kubernetes_uri_bytes,
        header_bytes: config.limits.max_header_bytes,
        max_headers: config.limits.max_headers,
    })
}

fn bind_dns(
    config: &Config,
    shared: &ProxyState,
    inherited: &InheritedSockets,
) -> Result<(Option<dns::BoundSockets>, NodeNames), BindError> {
    let bound = config.dns.0.as_ref().map(|dns| {
        if let Some(sockets) = sockets::inherited_dns(inherited, dns.listen) {
            return Ok(sockets);
        }
        dns::BoundSockets::bind(dns.listen).map_err(|cause| BindError::Listen {
            what: "the DNS server (dns.listen)".to_owned(),
            listen: dns.listen.to_string(),
            cause,
        })
    });
    let zones = Zones::from_config(config).map_err(BindError::Name)?;
    let names = NodeNames::new(
        zones,
        shared.nodes.clone(),
        shared.registry.clone(),
        shared.metrics.clone(),
    );
    Ok((bound.transpose()?, names))
}

/// Returns the addresses and ports that are announced to edges.
fn build_announcements(
    config: &Config,
    address: Option<SocketAddr>,
) -> (AdvertisedGateways, AnnouncedPortsCell) {
    let advertised = AdvertisedGateways::new(advertised(&config.tunnel, address));
    (
        advertised,
        AnnouncedPortsCell::new(config.announced_ports.clone()),
    )
}
