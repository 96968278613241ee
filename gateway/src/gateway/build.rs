//! Builds a gateway: data directory, tables, certificates, sockets, fronts, in this order.
//!
//! Everything that can fail fails here, before anything is served, and says what it is.

pub(super) mod app;
mod edges;
pub(super) mod front;

use super::{
    AdminListeners, BindError, Bound, Deciding, Gateway, Threads,
    authority::Authority,
    fronts::Fronts,
    identity::{Given, Identity},
    inventory,
    reload::{Parts, Reloader},
};
use crate::{
    config::{self, Config, Listen, Reloads},
    control::{
        admin,
        admit::Admission,
        certificate_expiry::Inventory,
        dns::{self, Names, Zones},
        drain::Readiness,
        expel::{self, Roll},
        nat::{Nat, Ports},
        pins::Keeper,
        rotation::TakeUp,
    },
    core::{CoreId, Cores},
    metrics::Metrics,
    proxy::{
        Shared,
        app::{Apps, Kept},
        authorize::{Authorize, ByPolicy},
        limits::{Count, Limits},
        pods::Pods,
        recheck::OpenStreams,
        reviews::{Answers, Reviews},
    },
    state::{
        Advertised, ListedPorts, NodesWriter, Pins, Registry, Whereabouts,
        pins::{Met, pins},
    },
};
use causeway_certs::{Access, Ca, LiveCa, Store, StoreError};
use causeway_tunnel::{listener, task::Tasks};
use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
};
use tokio_util::sync::CancellationToken;

/// Reason for refusals until the cluster's nodes are known.
const NODES_PENDING: &str = "the nodes of the cluster are not known yet";

/// What a data directory holds, the CA and the nodes that have joined; and what stands in for that CA.
struct Base {
    store: Store,
    ca: LiveCa,
    nodes: NodesWriter,
    pins: Pins,
    keeper: Keeper,
    meetings: mpsc::Receiver<Met>,
    given: Option<Given>,
}

impl Base {
    fn open(config: &Config) -> Result<Self, BindError> {
        let given = config.tunnel.identity.as_ref().map(Given::read);
        let given = given.transpose()?;
        let no_ca = || BindError::NoCa(config.data_dir.clone());
        // Where edges bring certificates there may be no CA, and so nothing to begin with.
        let access = given.as_ref().map_or(Access::Existing, |_| Access::Create);
        let there = config.data_dir.exists();
        let store = match Store::open(&config.data_dir, access) {
            Err(StoreError::Missing { .. }) => return Err(no_ca()),
            opened => opened?,
        };
        let ca = match (store.ca()?, &given) {
            (Some(ca), Some(given)) if *ca.trust_domain() != given.domain => {
                let (own, given) = (ca.trust_domain(), &given.domain);
                return Err(BindError::Name(format!(
                    "tunnel.identity is of trust domain {given}, and the CA in {} of {own}: both have to be of one; take that CA's ca.json away, or make one by `causeway ca init --trust-domain {given}`",
                    config.data_dir.display()
                )));
            }
            (Some(ca), _) => ca,
            (None, Some(given)) => Ca::unbelieved(&given.domain)?,
            (None, None) => return Err(no_ca()),
        };
        if !there {
            let data_dir = config.data_dir.display();
            tracing::warn!(%data_dir, "the data directory was made now, so no node is known here yet, and none is revoked");
        }
        let nodes = known(config, &store)?;
        let (pins, writer, meetings) = pins(store.pins().all()?);
        let keeper = Keeper {
            store: store.clone(),
            nodes: nodes.reader(),
            cluster: config.kubernetes.is_some(),
            writer,
        };
        Ok(Self {
            nodes,
            pins,
            keeper,
            meetings,
            ca: LiveCa::new(ca),
            store,
            given,
        })
    }
}

pub(super) fn bound(gateway: Gateway) -> Result<Bound, BindError> {
    let Gateway {
        config,
        cores,
        deciding,
        reloads,
        pods,
        reviews,
    } = gateway;
    let base = Base::open(&config)?;
    let authorizer = authorizer(deciding, &config, &base)?;
    let (cores, threads) = started(cores, &config)?;
    let tunnel = bind("the tunnel port", &Listen::Tcp(config.tunnel.listen))?;
    let admin = admin_listeners(&config)?;
    let shared = Arc::new(shared(&config, &base, &cores, (authorizer, pods, reviews))?);
    let (dns, names) = dns(&config, &shared)?;
    let port = (&config, base.given.clone());
    let identity = Identity::new(&base.ca, &base.store, port)?;
    let (ending, tasks) = (CancellationToken::new(), Arc::new(Tasks::default()));
    let fronts = Arc::new(Fronts::new(&base.ca, &shared, &cores, (&tasks, &ending)));
    fronts.plan(&config.fronts)?.apply(None::<fn()>);
    // From here on the directory may be written to.
    let claim = base.store.claim()?;
    let address = tunnel.local_addr();
    let to_edges = to_edges(&config, address);
    let admission = edges::admission(&config, &base, &shared, (&cores, &identity), &to_edges)?;
    let (ports, nat) = redirected(&config, &base, &fronts)?;
    let authority = Arc::new(authority(&base, &admission, (&identity, &fronts)));
    let reloader = Reloader::new(Parts {
        authority,
        began: config.clone(),
        tunnel: address,
        fronts,
        identity,
        to_edges,
        nodes: base.nodes.clone(),
        names,
        ports,
        shared: shared.clone(),
    });
    let readiness = Readiness::default();
    let admin_app = admin_app(&base, &shared, ((&readiness, &admin, reloads), &reloader));
    Ok(Bound {
        config,
        claim,
        admin_socket: admin_socket(&base.store),
        store: base.store,
        pins: (base.keeper, base.meetings),
        cores,
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

/// The cores that there are, or those of the configuration, whose threads then end with the gateway.
fn started(cores: Option<Cores>, config: &Config) -> Result<(Cores, Threads), BindError> {
    if let Some(cores) = cores {
        return Ok((cores, Threads(None)));
    }
    let cores = Cores::start(config.cores).map_err(BindError::Cores)?;
    Ok((cores.clone(), Threads(Some(cores))))
}

/// What is redirected, for reloads to say anew, and what keeps to it.
fn redirected(
    config: &Config,
    base: &Base,
    fronts: &Fronts,
) -> Result<(watch::Sender<Ports>, Option<Nat>), BindError> {
    let Some(redirect) = &config.redirect else {
        return Ok((watch::Sender::default(), None));
    };
    let ports = Ports::new(redirect, &config.fronts, &fronts.addresses());
    let (ports, told) = watch::channel(ports);
    let nat = Nat::install(&redirect.table, &base.nodes, told)?;
    Ok((ports, Some(nat)))
}

fn authority(
    base: &Base,
    admission: &Admission,
    (identity, fronts): (&Identity, &Arc<Fronts>),
) -> Authority {
    Authority {
        store: base.store.clone(),
        ca: base.ca.clone(),
        tls: admission.tls.clone(),
        identity: identity.clone(),
        fronts: fronts.clone(),
        registry: admission.registry.clone(),
        ledger: admission.ledger.clone(),
        roots: watch::Sender::new(base.ca.get().bundle_pem()),
        roll: Roll {
            store: base.store.clone(),
            nodes: base.nodes.clone(),
            keeper: base.keeper.clone(),
            tls: admission.tls.clone(),
            registry: admission.registry.clone(),
            reading: admission.reading.clone(),
            tasks: Arc::default(),
            runtime: admission.cores.runtime(CoreId(0)).clone(),
        },
        changing: Mutex::default(),
    }
}

/// Binds the admin listener, and that of metrics if there is one.
fn admin_listeners(config: &Config) -> Result<AdminListeners, BindError> {
    let listen = Listen::Tcp(config.admin.listen);
    let metrics = config.admin.metrics_listen.as_ref();
    Ok(AdminListeners {
        pages: bind("the admin listener", &listen)?,
        metrics: metrics
            .map(|listen| bind("admin.metrics_listen", listen))
            .transpose()?,
    })
}

/// Binds the socket for commands. The caller has the claim on the directory, so that a socket there is a dead process's.
fn admin_socket(store: &Store) -> Option<listener::Bound> {
    let bound = listener::Bound::unix_instead(&store.admin_socket());
    bound
        .inspect_err(|error| {
            tracing::warn!(%error, "no unix socket for commands: they use the admin listener");
        })
        .ok()
}

fn admin_app(
    base: &Base,
    shared: &Shared,
    ((readiness, bound, reloads), reloader): ((&Readiness, &AdminListeners, Reloads), &Reloader),
) -> admin::App {
    let (reloader, roll) = (reloader.clone(), reloader.parts().authority.roll.clone());
    let listens = reloader.parts().began.admin.listen;
    let certificates = {
        let reloader = reloader.clone();
        Inventory(Arc::new(move || inventory::list(reloader.parts())))
    };
    let take_up = move || {
        let authority = &reloader.parts().authority;
        authority.take_up().map_err(|error| error.to_string())
    };
    admin::App {
        nodes: shared.nodes.clone(),
        registry: shared.registry.clone(),
        metrics: shared.metrics.clone(),
        pressure: shared.limits.pressure().clone(),
        readiness: readiness.clone(),
        address: bound.pages.local_addr().unwrap_or(listens),
        reloads,
        ca: base.ca.clone(),
        certificates,
        take_up: TakeUp(Arc::new(take_up)),
        roll,
    }
}

fn authorizer(
    deciding: Deciding,
    config: &Config,
    base: &Base,
) -> Result<Arc<dyn Authorize>, BindError> {
    match (deciding, &config.policy.0) {
        (Deciding::By(authorizer), _) => Ok(authorizer),
        // Never open because somebody forgot to read it.
        (Deciding::Policy(policy), Some(path)) if policy.is_open() => Err(BindError::File {
            what: "policy".to_owned(),
            path: path.clone(),
            why: "its rules were not given to this gateway (Gateway::policy)".to_owned(),
        }),
        (Deciding::Policy(policy), _) => Ok(Arc::new(ByPolicy {
            policy,
            nodes: base.nodes.reader(),
        })),
    }
}

/// Who decides and who knows, beside the tables.
type Asked = (
    Arc<dyn Authorize>,
    Option<Arc<dyn Pods>>,
    Option<(Arc<dyn Reviews>, Handle)>,
);

fn shared(
    config: &Config,
    base: &Base,
    cores: &Cores,
    (authorizer, pods, reviews): Asked,
) -> Result<Shared, BindError> {
    let known = (&base.nodes.reader(), &base.pins);
    let by_port = app::read_all(&config.apps, known, None)?;
    let kept = Kept::new(cores.all().count(), config.timeouts.idle_keepalive);
    let (metrics, bound) = (Metrics::new(), config.timeouts.authorize);
    let kubernetes = config.kubernetes.clone().unwrap_or_default();
    let answers = |asked| Answers::new(asked, &kubernetes, bound, &metrics);
    Ok(Shared {
        reviews: reviews.map(answers),
        nodes: base.nodes.reader(),
        registry: Registry::new(cores),
        limits: Limits::new(config.limits.clone(), &metrics),
        direct: Count::default(),
        streams: OpenStreams::new(cores.all().count()),
        authorizer,
        apps: Apps::new(by_port, kept, base.pins.clone()),
        pods,
        metrics,
        timeouts: config.timeouts.clone(),
        access_log: config.access_log,
        uri_bytes: config.limits.uri_bytes,
        kubernetes_uri_bytes: config.limits.kubernetes_uri_bytes,
        header_bytes: config.limits.header_bytes,
        max_headers: config.limits.headers,
    })
}

/// What edges are told: this gateway's addresses (without any, where it listens), its siblings', and how many they are.
pub(super) fn advertised(config: &config::Tunnel, listens: Option<SocketAddr>) -> Whereabouts {
    let mut all = config.advertise.clone();
    if all.is_empty() {
        let listens = listens.filter(|address| !address.ip().is_unspecified());
        all.extend(listens.map(|address| address.to_string()));
    }
    all.extend_from_slice(&config.gateways);
    Whereabouts {
        gateways: all,
        replicas: config.replicas,
    }
}

fn known(config: &Config, store: &Store) -> Result<NodesWriter, BindError> {
    let nodes = NodesWriter::default();
    nodes.replace(expel::records(store)?);
    nodes.zones(&config.zones());
    nodes.revoke(config.tunnel.unwelcome());
    if config.kubernetes.is_some() {
        nodes.pending(NODES_PENDING);
    }
    Ok(nodes)
}

pub(super) fn bind(what: &str, listen: &Listen) -> Result<listener::Bound, BindError> {
    let bound = match listen {
        Listen::Tcp(address) => listener::Bound::tcp(*address),
        Listen::Unix(path) => listener::Bound::unix(path),
    };
    bound.map_err(|cause| BindError::Listen {
        what: what.to_owned(),
        listen: listen.to_string(),
        cause,
    })
}

fn dns(config: &Config, shared: &Shared) -> Result<(Option<dns::Bound>, Names), BindError> {
    let bound = config.dns.0.as_ref().map(|dns| {
        dns::Bound::at(dns.listen).map_err(|cause| BindError::Listen {
            what: "the DNS server".to_owned(),
            listen: dns.listen.to_string(),
            cause,
        })
    });
    let zones = Zones::of(config).map_err(BindError::Name)?;
    let names = Names::new(zones, shared.nodes.clone(), shared.metrics.clone());
    Ok((bound.transpose()?, names))
}

/// What edges are told.
fn to_edges(config: &Config, address: Option<SocketAddr>) -> (Advertised, ListedPorts) {
    let advertised = Advertised::new(advertised(&config.tunnel, address));
    (advertised, ListedPorts::new(config.listed.clone()))
}
