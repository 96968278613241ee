//! Builds a gateway: data directory, tables, certificates, sockets, fronts, in this order.
//!
//! Everything that can fail fails here, before anything is served, and says what it is.

mod front;

use super::{BindError, Bound, Deciding, Gateway, Threads};
use crate::{
    config::{self, Config, Listen},
    control::{
        admin,
        admit::{Admission, Tls},
        drain::Readiness,
        enrol,
    },
    core::Cores,
    metrics::Metrics,
    proxy::{
        Proxy, Shared,
        authorize::{AnyCaller, Authorize, ByPolicy},
        front::Door,
        limits::Limits,
    },
    state::{Node, NodesWriter, Registry},
};
use causeway_certs::{Access, Ca, HostName, LiveLeaf, Store, StoreError};
use causeway_tunnel::{listener, target, task::Tasks};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};
use tokio_util::sync::CancellationToken;

/// How long the gateway's own certificate is valid; it is renewed at half of that.
const LIFETIME: Duration = Duration::from_hours(7 * 24);

/// The certificate that edges see, and what renews it.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    ca: Arc<Ca>,
    names: Vec<HostName>,
    leaf: Arc<LiveLeaf>,
}

impl Identity {
    fn new(ca: &Arc<Ca>, config: &config::Tunnel) -> Result<Self, BindError> {
        let names = names(&config.advertise, config.listen.ip())?;
        let leaf = Arc::new(LiveLeaf::new(ca.issue_gateway(&names, LIFETIME)?));
        Ok(Self {
            ca: ca.clone(),
            names,
            leaf,
        })
    }

    /// Issues a new certificate whenever half of the old one's life is over. Never ends.
    pub(super) async fn renew(self) {
        loop {
            tokio::time::sleep(LIFETIME / 2).await;
            match self.ca.issue_gateway(&self.names, LIFETIME) {
                Ok(leaf) => self.leaf.swap(leaf),
                Err(error) => {
                    tracing::error!(%error, "the gateway's certificate cannot be renewed");
                }
            }
        }
    }
}

/// The names in `host:port` texts; without any, the address itself and the loopback.
fn names(texts: &[String], listen: IpAddr) -> Result<Vec<HostName>, BindError> {
    let mut names = Vec::new();
    for text in texts {
        let host = target::split(text).map_or(text.as_str(), |(host, _)| host);
        let name =
            HostName::parse(host).map_err(|error| BindError::Name(format!("{text:?}: {error}")))?;
        names.push(name);
    }
    if names.is_empty() {
        let loopback = [
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(Ipv6Addr::LOCALHOST),
        ];
        names.extend(
            loopback
                .into_iter()
                .chain((!listen.is_unspecified()).then_some(listen))
                .map(HostName::from),
        );
    }
    Ok(names)
}

/// What a data directory holds: the CA, and the nodes that have joined.
struct Base {
    store: Store,
    ca: Arc<Ca>,
    nodes: NodesWriter,
}

impl Base {
    fn open(config: &Config) -> Result<Self, BindError> {
        let store = match Store::open(&config.data_dir, Access::Existing) {
            Err(StoreError::Missing { .. }) => {
                return Err(BindError::NoCa(config.data_dir.clone()));
            }
            opened => opened?,
        };
        let ca = store.ca()?;
        let ca = ca.ok_or_else(|| BindError::NoCa(config.data_dir.clone()))?;
        Ok(Self {
            nodes: known(&store)?,
            ca: Arc::new(ca),
            store,
        })
    }
}

pub(super) fn bound(gateway: Gateway) -> Result<Bound, BindError> {
    let Gateway {
        config,
        cores,
        deciding,
    } = gateway;
    let base = Base::open(&config)?;
    let authorizer = authorizer(deciding, &config, &base)?;
    let (cores, threads) = if let Some(cores) = cores {
        (cores, Threads(None))
    } else {
        let cores = Cores::start(config.cores).map_err(BindError::Cores)?;
        (cores.clone(), Threads(Some(cores)))
    };
    let tunnel = bind("the tunnel port", &Listen::Tcp(config.tunnel.listen))?;
    let admin = bind("the admin listener", &Listen::Tcp(config.admin.listen))?;
    let identity = Identity::new(&base.ca, &config.tunnel)?;
    let shared = Arc::new(shared(&config, &base, &cores, authorizer));
    let (ending, tasks) = (CancellationToken::new(), Arc::new(Tasks::default()));
    let doors = doors(&config, &base, &shared, &cores, (&tasks, &ending))?;
    // From here on the directory may be written to.
    let claim = base.store.claim()?;
    let admission = admission(&config, &base, &shared, (&cores, &identity), &tunnel)?;
    let readiness = Readiness::default();
    let admin_app = admin::App {
        nodes: shared.nodes.clone(),
        registry: shared.registry.clone(),
        metrics: shared.metrics.clone(),
        pressure: shared.limits.pressure().clone(),
        readiness: readiness.clone(),
        address: admin.local_addr().unwrap_or(config.admin.listen),
    };
    Ok(Bound {
        config,
        claim,
        store: base.store,
        cores,
        threads,
        shared,
        tasks,
        admission,
        tunnel,
        admin,
        admin_app,
        doors,
        identity,
        readiness,
        ending,
    })
}

fn authorizer(
    deciding: Deciding,
    config: &Config,
    base: &Base,
) -> Result<Arc<dyn Authorize>, BindError> {
    match (deciding, &config.policy.0) {
        (Deciding::By(authorizer), _) => Ok(authorizer),
        (Deciding::Policy(policy), _) => Ok(Arc::new(ByPolicy {
            policy,
            nodes: base.nodes.reader(),
        })),
        // Never open because somebody forgot to read it.
        (Deciding::Nobody, Some(path)) => Err(BindError::File {
            what: "policy".to_owned(),
            path: path.clone(),
            why: "its rules were not given to this gateway (Gateway::policy)".to_owned(),
        }),
        (Deciding::Nobody, None) => Ok(Arc::new(AnyCaller)),
    }
}

fn shared(config: &Config, base: &Base, cores: &Cores, authorizer: Arc<dyn Authorize>) -> Shared {
    Shared {
        nodes: base.nodes.reader(),
        registry: Registry::new(cores),
        limits: Limits::new(config.limits.clone()),
        authorizer,
        metrics: Metrics::new(),
        timeouts: config.timeouts.clone(),
        access_log: config.access_log,
        header_bytes: config.limits.header_bytes,
        max_headers: config.limits.headers,
    }
}

/// All fronts: each with its socket bound, and its proxy on each core.
fn doors(
    config: &Config,
    base: &Base,
    shared: &Arc<Shared>,
    cores: &Cores,
    (tasks, ending): (&Arc<Tasks>, &CancellationToken),
) -> Result<Vec<(String, Door, listener::Bound)>, BindError> {
    let mut doors = Vec::with_capacity(config.fronts.len());
    for front in &config.fronts {
        let listener = bind(&format!("front {:?}", front.name), &front.listen)?;
        let listens = listener.local_addr().map(|address| address.port());
        let built = Arc::new(front::build(front, &base.ca, shared, listens)?);
        let proxy = |core| Proxy {
            shared: shared.clone(),
            front: built.clone(),
            core,
            tasks: tasks.clone(),
        };
        let door = Door::new(cores, cores.all().map(proxy).collect(), ending.clone());
        doors.push((front.name.clone(), door, listener));
    }
    Ok(doors)
}

fn known(store: &Store) -> Result<NodesWriter, BindError> {
    let nodes = NodesWriter::default();
    let records = store.nodes().all()?.into_iter().map(|record| {
        let node = Node {
            addresses: record.addresses,
            pool: record.pool,
            labels: record.labels,
            ..Node::default()
        };
        (record.node, node)
    });
    nodes.replace(records.collect());
    Ok(nodes)
}

fn bind(what: &str, listen: &Listen) -> Result<listener::Bound, BindError> {
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

fn admission(
    config: &Config,
    base: &Base,
    shared: &Shared,
    (cores, identity): (&Cores, &Identity),
    tunnel: &listener::Bound,
) -> Result<Admission, BindError> {
    let mut settings = config.tunnel.clone();
    if settings.advertise.is_empty()
        && let Some(address) = tunnel
            .local_addr()
            .filter(|address| !address.ip().is_unspecified())
    {
        settings.advertise.push(address.to_string());
    }
    let gateways = settings
        .advertise
        .iter()
        .chain(&settings.gateways)
        .cloned()
        .collect();
    let enrolment = enrol::Enrolment {
        ca: base.ca.clone(),
        store: base.store.clone(),
        nodes: base.nodes.clone(),
        metrics: shared.metrics.clone(),
        lifetime: settings.edge_certificate_lifetime,
        gateways,
    };
    let trust = |cause| BindError::Trust {
        what: "the tunnel port".to_owned(),
        cause,
    };
    let name = settings
        .advertise
        .first()
        .cloned()
        .unwrap_or_else(|| "gateway".to_owned());
    Ok(Admission {
        cores: cores.clone(),
        registry: shared.registry.clone(),
        nodes: shared.nodes.clone(),
        metrics: shared.metrics.clone(),
        tls: Tls::new(
            identity.leaf.clone(),
            base.ca.root(),
            base.ca.trust_domain(),
            &base.store.ticket_secret()?,
        )
        .map_err(trust)?,
        settings,
        pressure: shared.limits.pressure().clone(),
        drain: config.timeouts.drain,
        name,
        enrol: enrol::router(enrolment)?,
    })
}
