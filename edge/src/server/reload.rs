//! Reload of the configuration of a running edge: the new data path is built completely, and then new streams use it.
//!
//! Open streams stay on their previous data path with its connections to upstreams. They end if the policy of the new
//! configuration refuses them. Keys that cannot change while an edge runs are reported, and take effect at the next start.

use super::{
    error::Error,
    external_identity::{self, ApiCacheTls, Leaves},
};
use crate::{
    config::{ApiCache, Config},
    control::{
        rejoin_state::{RejoinState, TokenSource},
        tunnels::context::{AnnouncedPortsFn, ServeFn, UnhealthyPorts},
    },
    metrics::Metrics,
    proxy::{LocalNode, Policy, Proxy},
};
use arc_swap::ArcSwap;
use causeway_certs::{
    EdgeIdentity, TrustDomain,
    verify::{ServerOnlyTls, YurtHubServerTls},
};
use causeway_config::{RestartKey, RestartKeys};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::control_stream::AnnouncedPorts;
use rustls_pki_types::UnixTime;
use std::{
    collections::BTreeMap,
    fmt,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// Interval at which pooled connections to upstreams are checked.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Data path that new streams use.
pub(super) type CurrentProxy = Arc<ArcSwap<Proxy>>;

/// Returns the function through which tunnel sessions use the data path.
pub(super) fn serve_fn(now: &CurrentProxy) -> ServeFn {
    let now = now.clone();
    Arc::new(move |request| {
        let (proxy, now) = (now.load_full(), now.clone());
        Box::pin(async move { proxy.serve(request, || now.load_full()).await })
    })
}

/// Returns the function through which tunnel sessions report listed ports.
pub(super) fn announced_ports_fn(reloader: &Reloader) -> AnnouncedPortsFn {
    let reloader = reloader.clone();
    Arc::new(move |listed, from| reloader.parts().apply_announced_ports(listed, from))
}

/// Closes expired idle connections to upstreams.
pub(super) async fn sweep_idle_connections(now: CurrentProxy) {
    let mut tick = interval(SWEEP_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Long streams keep the proxy with which they started.
    let mut proxies: Vec<Weak<Proxy>> = Vec::new();
    loop {
        tick.tick().await;
        let newest = Arc::downgrade(&now.load_full());
        if !proxies.iter().any(|way| way.ptr_eq(&newest)) {
            proxies.push(newest);
        }
        proxies.retain(|way| way.upgrade().inspect(|way| way.sweep()).is_some());
    }
}

/// Handle that reloads a running edge. Cheap to clone.
#[derive(Clone)]
pub struct Reloader(Arc<Reloadable>);

/// State that a reload touches.
pub(super) struct Reloadable {
    pub(super) node: String,
    pub(super) trust_domain: TrustDomain,
    /// Configuration with which the edge was started.
    pub(super) initial_config: Config,
    pub(super) current_proxy: CurrentProxy,
    pub(super) ports: Arc<ArcSwap<Vec<u16>>>,
    pub(super) services: Arc<ArcSwap<BTreeMap<String, u16>>>,
    /// Ports whose health checks fail.
    pub(super) unhealthy_ports: watch::Sender<UnhealthyPorts>,
    pub(super) policy_inputs: Mutex<PolicyInputs>,
    /// Ports of the admin listener, and of the API cache's listener for this node's programs.
    pub(super) own_ports: Vec<u16>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) tasks: Arc<TaskGroup>,
    /// Identity that an external CA issues, if the edge uses one.
    pub(super) external_identity: watch::Sender<Option<EdgeIdentity>>,
    /// Inputs of the decision whether the identity is replaced.
    pub(super) rejoin: Arc<RejoinState>,
    /// Certificate of the listener for this node's programs, if they read over TLS.
    pub(super) endpoint_tls: watch::Sender<Option<ServerOnlyTls>>,
    /// Certificate and roots of the listener for `YurtHub`s, if there is one.
    pub(super) yurthub_tls: watch::Sender<Option<YurtHubServerTls>>,
    /// Certificates that both listeners present.
    pub(super) listener_certificates: ArcSwap<Leaves>,
}

/// Maximum number of remembered local addresses of connections to gateways. Addresses that the node has lost are harmless,
/// because the edge does not connect to them.
const MAX_OWN_ADDRESSES: usize = 8;

/// Inputs from which the current data path has been built.
pub(super) struct PolicyInputs {
    /// Policy of the owner's configuration.
    policy: Policy,
    /// Ports that a gateway listed last.
    announced: AnnouncedPorts,
    /// Local addresses of the connections to gateways that listed ports, the most recent one last.
    own_addresses: Vec<IpAddr>,
    /// Token that is cancelled once the owner has applied another policy.
    replaced: CancellationToken,
}

impl PolicyInputs {
    /// Creates the inputs before any gateway has listed ports.
    pub(super) fn new(policy: Policy, proxy: &Proxy) -> Mutex<Self> {
        Mutex::new(Self {
            policy,
            announced: AnnouncedPorts::default(),
            own_addresses: Vec::new(),
            replaced: proxy.replaced().clone(),
        })
    }
}

impl Reloadable {
    /// Changes the inputs, and builds the data path that new streams use. Returns the node ports that are served then.
    fn update_policy(&self, change: impl FnOnce(&mut PolicyInputs)) -> Vec<u16> {
        // The lock makes concurrent changes see each other.
        let mut policy_inputs = self
            .policy_inputs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        change(&mut policy_inputs);
        let local_node = LocalNode {
            ports: self.own_ports.clone(),
            addresses: policy_inputs.own_addresses.clone(),
        };
        let policy = policy_inputs
            .policy
            .clone()
            .with_announced(&policy_inputs.announced, &local_node);
        let ports = policy.ports();
        self.services.store(Arc::new(policy.reported_services()));
        let proxy = Proxy::new(
            policy,
            (
                self.initial_config.timeouts.clone(),
                self.initial_config.limits.max_headers,
            ),
            self.metrics.clone(),
            self.tasks.clone(),
        );
        let proxy = proxy.with_replaced_token(policy_inputs.replaced.clone());
        self.current_proxy.store(Arc::new(proxy));
        self.ports.store(Arc::new(ports.clone()));
        ports
    }

    /// Takes over the cluster's node ports that a gateway listed. The gateway was dialled from the node's address `from`.
    pub(super) fn apply_announced_ports(&self, announced: AnnouncedPorts, from: Option<IpAddr>) {
        let count = announced.http.len() + announced.tcp.len();
        if count > AnnouncedPorts::MAX_PORTS {
            let most = AnnouncedPorts::MAX_PORTS;
            warn!(
                count,
                most, "a gateway listed more ports than allowed; keeping the previous list"
            );
            return;
        }
        let policy_inputs = self
            .policy_inputs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // The edge may connect to gateways from several addresses of this node, and each gateway sends the list.
        let from = from.filter(|from| !policy_inputs.own_addresses.contains(from));
        let is_unchanged = policy_inputs.announced == announced && from.is_none();
        drop(policy_inputs);
        if !is_unchanged {
            let ports = self.update_policy(|allowed| {
                allowed.announced = announced;
                allowed.own_addresses.extend(from);
                let excess = allowed
                    .own_addresses
                    .len()
                    .saturating_sub(MAX_OWN_ADDRESSES);
                allowed.own_addresses.drain(..excess);
            });
            info!(?ports, "the gateway listed ports");
        }
    }
}

/// New configuration that is completely built but not in use yet. Dropping it changes nothing.
pub struct PendingReload<'a> {
    reloadable: &'a Reloadable,
    policy: Policy,
    external_identity: Option<EdgeIdentity>,
    token: TokenSource,
    api_cache_tls: ApiCacheTls,
    restart_keys: Vec<&'static str>,
}

/// Result of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReloadSummary {
    /// Node ports that are served.
    pub ports: Vec<u16>,
    /// Keys that differ from the initial configuration and take effect at the next start.
    pub restart_keys: Vec<&'static str>,
    /// Parts that were not replaced, with the reason. These are files of the API cache's listeners, whose errors do not block
    /// the other parts.
    pub unchanged: Vec<String>,
}

impl Reloader {
    pub(super) fn new(parts: Reloadable) -> Self {
        Self(Arc::new(parts))
    }

    pub(super) fn parts(&self) -> &Reloadable {
        &self.0
    }

    /// Reads and builds everything that `config` requires, which has been validated. Nothing is in use before
    /// [`PendingReload::apply`].
    ///
    /// # Errors
    /// If anything is missing or malformed. Nothing has changed then.
    pub fn prepare(&self, config: &Config) -> Result<PendingReload<'_>, Error> {
        // `kubernetes` and everything derived from it change only at the next start.
        let began = self.0.initial_config.kubernetes.clone();
        let effective = Config {
            kubernetes: began,
            ..config.clone()
        };
        Ok(PendingReload {
            policy: Policy::new(&self.0.node, &effective)?,
            external_identity: self.load_external_identity(config)?,
            token: TokenSource::from_config(config),
            // An invalid listener certificate is reported and keeps its old value; the rest of the reload continues.
            api_cache_tls: ApiCacheTls::read(
                &with_current_listeners(&self.0.initial_config, config),
                &self.0.listener_certificates.load(),
            ),
            restart_keys: RESTART_KEYS.changed(&self.0.initial_config, config),
            reloadable: &self.0,
        })
    }

    /// Returns the identity that the external CA has issued meanwhile, or `None` if the edge has no external CA.
    fn load_external_identity(&self, config: &Config) -> Result<Option<EdgeIdentity>, Error> {
        let (Some(files), Some(_)) = (&config.identity, &self.0.initial_config.identity) else {
            return Ok(None);
        };
        let mut next = external_identity::load(files)?;
        let current = self
            .0
            .external_identity
            .borrow()
            .as_ref()
            .map(|now| now.leaf.clone());
        let leaf = next.leaf.replacing(current.as_ref(), UnixTime::now());
        next.leaf = leaf.map_err(|error| external_identity::identity_error(files, &error))?;
        let (node, domain) = (&self.0.node, &self.0.trust_domain);
        if next.node.as_str() == node && next.trust_domain == *domain {
            return Ok(Some(next));
        }
        let why = format!(
            "the certificate is for node {} of trust domain {}, but this edge stays {node} of {domain} until a restart",
            next.node, next.trust_domain
        );
        Err(external_identity::identity_error(files, &why))
    }

    /// Counts a configuration that was refused, because it could not be read or prepared.
    pub fn record_refusal(&self) {
        self.0.metrics.count_reload(false);
    }
}

impl PendingReload<'_> {
    /// Applies the configuration for all streams that begin from now on. Open streams that it refuses end.
    pub fn apply(self) -> ReloadSummary {
        let Self {
            reloadable: edge,
            policy,
            external_identity,
            token,
            api_cache_tls,
            restart_keys,
        } = self;
        edge.rejoin.token.store(Arc::new(token));
        if external_identity.is_some() {
            edge.external_identity.send_replace(external_identity);
        }
        if api_cache_tls.endpoint.is_some() {
            edge.endpoint_tls.send_replace(api_cache_tls.endpoint);
        }
        if api_cache_tls.yurthub.is_some() {
            edge.yurthub_tls.send_replace(api_cache_tls.yurthub);
        }
        edge.metrics
            .set_listener_expiries(&api_cache_tls.certificates);
        let mut leaves = (**edge.listener_certificates.load()).clone();
        leaves.extend(api_cache_tls.certificates);
        edge.listener_certificates.store(Arc::new(leaves));
        let unchanged: Vec<String> = api_cache_tls.errors.iter().map(Error::to_string).collect();
        for fault in &unchanged {
            warn!(
                fault,
                "cannot replace a listener's certificate; the previous one stays in use"
            );
        }
        let mut replaced = CancellationToken::new();
        let ports = edge.update_policy(|allowed| {
            allowed.policy = policy;
            std::mem::swap(&mut allowed.replaced, &mut replaced);
        });
        replaced.cancel();
        edge.metrics.count_reload(unchanged.is_empty());
        ReloadSummary {
            ports,
            restart_keys,
            unchanged,
        }
    }
}

/// Returns the configuration with the current listeners, which stay until the next start. Their files are read and checked
/// for their current addresses.
fn with_current_listeners(initial: &Config, updated: &Config) -> Config {
    let mut config = updated.clone();
    let (Some(initial), Some(updated)) = (&initial.api_cache, &mut config.api_cache) else {
        config.api_cache = None;
        return config;
    };
    if initial.tls.is_none() {
        updated.tls = None;
    }
    match (&mut updated.yurthub, &initial.yurthub) {
        (Some(now), Some(began)) => now.listen = began.listen,
        (hubs, _) => *hubs = None,
    }
    config
}

/// Keys whose changes a reload only reports.
pub const RESTART_KEYS: RestartKeys<Config> = RestartKeys(&[
    RestartKey::whole("data_dir", |one, two| one.data_dir != two.data_dir),
    RestartKey::whole("node", |one, two| one.node != two.node),
    RestartKey::whole("gateways", |one, two| one.gateways != two.gateways),
    RestartKey {
        name: "identity",
        reloads: &["identity.chain", "identity.key", "identity.ca"],
        differs: |one, two| one.identity.is_some() != two.identity.is_some(),
    },
    RestartKey::whole("kubernetes", |one, two| one.kubernetes != two.kubernetes),
    RestartKey::whole("proxy", |one, two| one.proxy != two.proxy),
    RestartKey::whole("no_proxy", |one, two| one.no_proxy != two.no_proxy),
    RestartKey::whole("admin", |one, two| one.admin != two.admin),
    RestartKey::whole("labels", |one, two| one.labels != two.labels),
    RestartKey::whole("addresses", |one, two| one.addresses != two.addresses),
    RestartKey::whole("pool", |one, two| one.pool != two.pool),
    RestartKey {
        name: "api_cache",
        reloads: &[
            "api_cache.tls.certificate",
            "api_cache.tls.key",
            "api_cache.yurthub.certificate",
            "api_cache.yurthub.key",
            "api_cache.yurthub.ca",
        ],
        differs: |one, two| non_reloadable(one) != non_reloadable(two),
    },
    RestartKey::whole("egress", |one, two| one.egress != two.egress),
    RestartKey::whole("heartbeat", |one, two| one.heartbeat != two.heartbeat),
    RestartKey::whole("tunnels", |one, two| one.tunnels != two.tunnels),
    RestartKey::whole("limits", |one, two| one.limits != two.limits),
    RestartKey::whole("timeouts", |one, two| one.timeouts != two.timeouts),
    RestartKey::whole("backoff", |one, two| one.backoff != two.backoff),
    RestartKey::whole("log", |one, two| one.log != two.log),
]);

/// Returns the keys of the API cache without the paths that each reload reads.
fn non_reloadable(config: &Config) -> Option<ApiCache> {
    config.api_cache.as_ref().map(ApiCache::without_files)
}

/// Description in one line, for people.
impl fmt::Display for ReloadSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ports.is_empty() {
            f.write_str("serves no ports")?;
        } else {
            let ports: Vec<_> = self.ports.iter().map(u16::to_string).collect();
            write!(f, "serves {}", ports.join(", "))?;
        }
        if !self.restart_keys.is_empty() {
            let keys = self.restart_keys.join(", ");
            write!(f, "; takes effect at the next start: {keys}")?;
        }
        for fault in &self.unchanged {
            write!(f, "; not changed: {fault}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::YurtHubListener;
    use serde_json::{Value, json};

    fn config(message: Value) -> Config {
        serde_json::from_value(message).unwrap()
    }

    /// Returns the reloader of an edge with this initial configuration, whose gateway has listed port 9051.
    fn began(message: Value) -> Reloader {
        let began = config(message);
        let policy = Policy::new("edge-1", &began).unwrap();
        let (metrics, tasks) = (Arc::default(), Arc::default());
        let proxy = Proxy::new(
            policy.clone(),
            (began.timeouts.clone(), began.limits.max_headers),
            Arc::clone(&metrics),
            Arc::clone(&tasks),
        );
        let allowed = PolicyInputs::new(policy, &proxy);
        let edge = Reloader::new(Reloadable {
            node: "edge-1".into(),
            trust_domain: TrustDomain::parse("causeway.local").unwrap(),
            initial_config: began,
            current_proxy: Arc::new(ArcSwap::from_pointee(proxy)),
            unhealthy_ports: watch::Sender::default(),
            ports: Arc::default(),
            services: Arc::default(),
            policy_inputs: allowed,
            own_ports: vec![10266],
            metrics,
            tasks,
            external_identity: watch::Sender::default(),
            rejoin: RejoinState::new(&Config::default(), false),
            endpoint_tls: watch::Sender::default(),
            yurthub_tls: watch::Sender::default(),
            listener_certificates: ArcSwap::default(),
        });
        edge.parts()
            .apply_announced_ports(listed(&[9051, 10266]), None);
        edge
    }

    fn listed(ports: &[u16]) -> AnnouncedPorts {
        AnnouncedPorts {
            http: ports.to_vec(),
            tcp: Vec::new(),
        }
    }

    fn serves(edge: &Reloader) -> Vec<u16> {
        edge.parts().ports.load().to_vec()
    }

    #[test]
    fn files_are_read_for_the_listeners_that_there_are() {
        let listening = |began: &Value, now: &Value| {
            let read = with_current_listeners(
                &config(json!({ "api_cache": began })),
                &config(json!({ "api_cache": now })),
            );
            let api_cache = read.api_cache.unwrap();
            let at = |hubs: YurtHubListener| (hubs.listen.to_string(), hubs.ca);
            (api_cache.tls.is_some(), api_cache.yurthub.map(at))
        };
        let hubs =
            |at: &str, ca: &str| json!({ "listen": at, "certificate": "c", "key": "k", "ca": ca });
        let tls = json!({ "certificate": "c", "key": "k" });
        let all = |at: &str, ca: &str| json!({ "tls": tls, "yurthub": hubs(at, ca) });
        let (here, there) = ("10.0.0.1:10269", "10.0.0.2:10269");
        assert_eq!(
            listening(&all(here, "old"), &all(there, "new")),
            (true, Some((here.to_owned(), "new".into())))
        );
        assert_eq!(listening(&json!({}), &all(there, "new")), (false, None));
        assert_eq!(listening(&all(here, "old"), &json!({})), (false, None));
    }

    #[tokio::test]
    async fn cluster_membership_needs_a_restart_and_narrowing_does_not() {
        let edge = began(json!({ "kubernetes": {} }));
        assert_eq!(serves(&edge), [9051]);
        for (message, ports) in [
            (json!({}), vec![9051]),
            (json!({ "listed_ports": [] }), vec![]),
            (
                json!({ "kubernetes": {}, "listed_ports": ["9051"] }),
                vec![9051],
            ),
        ] {
            let done = edge.prepare(&config(message.clone())).unwrap().apply();
            assert_eq!(
                (&done.ports, serves(&edge)),
                (&ports, ports.clone()),
                "{message}"
            );
        }
        let alone = began(json!({}));
        let done = alone.prepare(&config(json!({ "kubernetes": {} })));
        let done = done.unwrap().apply();
        assert_eq!(
            (done.ports, done.restart_keys),
            (vec![], vec!["kubernetes"])
        );
    }

    #[tokio::test]
    async fn api_cache_files_reload_and_faults_block_no_other_change() {
        let api_cache = |key: &str, listen: &str| json!({ "kubernetes": {}, "api_cache": { "listen": listen, "tls": { "certificate": "/nowhere/c.pem", "key": key } } });
        let edge = began(api_cache("/nowhere/k.pem", "127.0.0.1:10270"));
        for (message, waits) in [
            (api_cache("/elsewhere/k.pem", "127.0.0.1:10270"), vec![]),
            (
                api_cache("/nowhere/k.pem", "127.0.0.1:10280"),
                vec!["api_cache"],
            ),
            (
                json!({ "kubernetes": {}, "api_cache": {} }),
                vec!["api_cache"],
            ),
        ] {
            let faulty = message["api_cache"]["tls"].is_object();
            let mut narrowed = message.clone();
            narrowed["listed_ports"] = json!([]);
            let done = edge.prepare(&config(narrowed)).unwrap().apply();
            assert_eq!(
                (&done.ports, &done.restart_keys),
                (&vec![], &waits),
                "{message}"
            );
            assert_eq!(
                done.to_string().contains("not changed: api_cache.tls"),
                faulty,
                "{done}"
            );
        }
    }

    #[tokio::test]
    async fn an_oversized_list_keeps_the_previous_list() {
        let edge = began(json!({ "kubernetes": {} }));
        let all: Vec<u16> = (1..=u16::MAX).collect();
        let most = u16::try_from(AnnouncedPorts::MAX_PORTS).unwrap();
        for too_many in [u16::MAX, most + 1] {
            edge.parts()
                .apply_announced_ports(listed(&all[..usize::from(too_many)]), None);
            assert_eq!(serves(&edge), [9051]);
        }
        edge.parts()
            .apply_announced_ports(listed(&all[..AnnouncedPorts::MAX_PORTS]), None);
        assert_eq!(serves(&edge).len(), AnnouncedPorts::MAX_PORTS);
    }

    #[tokio::test]
    async fn a_dialled_gateway_address_stays_while_any_gateway_lists_it() {
        let edge = began(json!({ "kubernetes": {} }));
        let known = || {
            edge.parts()
                .policy_inputs
                .lock()
                .unwrap()
                .own_addresses
                .clone()
        };
        let (one, two) = ("192.168.1.7".parse().unwrap(), "10.0.0.5".parse().unwrap());
        for from in [one, two, one] {
            edge.parts()
                .apply_announced_ports(listed(&[9051]), Some(from));
        }
        assert_eq!(known(), [one, two]);
        for last in 1..=20 {
            let from = std::net::Ipv4Addr::new(10, 0, 1, last).into();
            edge.parts()
                .apply_announced_ports(listed(&[9051]), Some(from));
        }
        assert_eq!(known().len(), MAX_OWN_ADDRESSES);
    }
}
