//! Pods of the cluster, by address and by name.
//!
//! The table has the pods of all nodes, because an address of a pod in the cloud must not be routed to an edge. A pod
//! has an address only within the configured networks. If several running pods have one address, no edge is reached by
//! it: a stolen kubelet can write any address into the status of its own pods. A pod gives its address up when its
//! time of deletion has passed. Each map is split into shards, so that a change copies only a small part, and readers
//! never wait.
//!
//! A table that was not loaded yet, that has too many pods, or whose source was lost for five minutes, names no pod at
//! all.

use super::policy::PodInput;
use arc_swap::ArcSwap;
use causeway_certs::NodeName;
use causeway_rt::log_throttle::LogThrottle;
use causeway_tunnel::target;
use ipnet::IpNet;
use rustls_pki_types::UnixTime;
use std::{
    borrow::Borrow,
    collections::{HashMap, HashSet},
    hash::{BuildHasher, Hash, RandomState},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::{sync::watch, time::Instant};

/// Time without the source after which the table is no longer used: addresses of pods are assigned again.
pub const MAX_LOST: Duration = Duration::from_mins(5);
/// Minimum time between two log lines about addresses outside the networks of pods.
const OUTSIDE_LOG_INTERVAL: Duration = Duration::from_hours(1);
/// Number of shards of each map: with 200,000 pods, a change copies about 400 entries.
const SHARDS: usize = 512;
/// Last label of the name of a pod.
const SUFFIX: &str = ".pod";
/// Maximum length of a name in DNS, in bytes (RFC 1035 section 2.3.4).
const MAX_NAME: usize = 253;

/// Pod that has an address of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// `NAMESPACE/NAME`.
    pub name: Arc<str>,
    /// Node on which the pod runs.
    pub node: NodeName,
    /// Addresses of the pod, the primary one first.
    pub addresses: Box<[IpAddr]>,
    /// Time at which the pod is expected to be gone, in Unix seconds (`metadata.deletionTimestamp`).
    pub ends_at: Option<u64>,
}

impl Pod {
    fn is_running(&self) -> bool {
        self.ends_at
            .is_none_or(|at| UnixTime::now().as_secs() <= at)
    }
}

/// Result of looking up a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PodLookup {
    /// Pods are not followed, or the address is outside their networks.
    NotFollowed,
    /// The table cannot be used, for this reason.
    Unavailable(Arc<str>),
    /// No running pod.
    Unknown,
    /// Exactly one running pod.
    Pod(Arc<Pod>),
    /// Several running pods.
    Several(Vec<Arc<Pod>>),
}

/// Meaning of the name of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodMatch {
    /// The pod on this edge node, at this address.
    Pod(NodeName, IpAddr),
    /// The pod is on a node that is not at the edge, at these addresses.
    Elsewhere(Vec<IpAddr>),
    /// No running pod has the name and an address that is its alone.
    Unknown,
    /// The pod is not known now, for this reason.
    Undecided(Arc<str>),
}

/// Pod to which a stream goes, as it was when the stream was routed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DestinationPod {
    /// The stream does not go to a pod that a Pod object names.
    #[default]
    None,
    /// The only pod that has the address, as `NAMESPACE/NAME`.
    Pod(Arc<str>),
    /// No pod, or several pods, have the address, which can only be that of a pod.
    Unknown,
    /// The pods are not known now, for this reason.
    Undecided(Arc<str>),
}

impl DestinationPod {
    /// Returns `NAMESPACE/NAME` of the pod, if there is exactly one.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Pod(name) => Some(name),
            Self::None | Self::Unknown | Self::Undecided(_) => None,
        }
    }

    /// Returns the input of rules.
    pub fn policy_input(&self) -> PodInput<'_> {
        match self {
            Self::None => PodInput::None,
            Self::Pod(name) => match name.split_once('/') {
                Some((namespace, _)) => PodInput::Namespace(namespace),
                None => PodInput::Unknown,
            },
            Self::Unknown | Self::Undecided(_) => PodInput::Unknown,
        }
    }
}

/// Read access to the table. Cheap to clone; reads never wait. Empty until pods are followed.
#[derive(Clone, Debug, Default)]
pub(super) struct Pods(Arc<OnceLock<PodTable>>);

#[derive(Debug)]
struct PodTable {
    networks: Box<[IpNet]>,
    status: ArcSwap<Status>,
    by_address: Shards<IpAddr, Vec<Arc<Pod>>>,
    by_name: Shards<Arc<str>, Arc<Pod>>,
    conflict_throttle: LogThrottle,
    outside_throttle: LogThrottle,
    /// Notifies of changed pods. The request path never uses it.
    changed: watch::Sender<()>,
}

/// Condition of the table.
#[derive(Debug)]
enum Status {
    /// The table is not filled, and its source has not answered or failed yet.
    Pending,
    /// The table is not filled, for this reason.
    Unavailable(Arc<str>),
    /// The table is filled, and its source answers.
    Current,
    /// The table is filled, and its source does not answer since then, for this reason.
    Lost(Instant, Arc<str>),
}

impl Pods {
    /// Starts to follow pods in these networks. Does nothing if pods are followed already.
    pub(super) fn follow(&self, networks: &[IpNet]) {
        self.0.get_or_init(|| PodTable {
            networks: networks.into(),
            status: ArcSwap::from_pointee(Status::Pending),
            by_address: Shards::new(),
            by_name: Shards::new(),
            conflict_throttle: LogThrottle::default(),
            outside_throttle: LogThrottle::default(),
            changed: watch::Sender::default(),
        });
    }

    /// Whether pods are followed.
    pub(super) fn are_followed(&self) -> bool {
        self.0.get().is_some()
    }

    /// Subscribes to later changes of the pods; `None` if pods are not followed.
    pub(super) fn subscribe(&self) -> Option<watch::Receiver<()>> {
        self.0.get().map(|table| table.changed.subscribe())
    }

    /// Whether pods are followed, and their source has not answered or failed yet.
    pub(super) fn are_pending(&self) -> bool {
        let table = self.0.get();
        table.is_some_and(|table| matches!(&**table.status.load(), Status::Pending))
    }

    /// Returns the addresses of all pods, or `None` if the table cannot be used.
    pub(super) fn addresses(&self) -> Option<Vec<IpAddr>> {
        let table = self.0.get()?;
        table
            .unavailable_reason()
            .is_none()
            .then(|| table.by_address.keys())
    }

    /// Returns the pod with this address.
    pub(super) fn by_address(&self, address: IpAddr) -> PodLookup {
        let address = address.to_canonical();
        let table = self.0.get().filter(|table| table.covers(address));
        let Some(table) = table else {
            return PodLookup::NotFollowed;
        };
        if let Some(reason) = table.unavailable_reason() {
            return PodLookup::Unavailable(reason);
        }
        let all = table.by_address.get(&address).unwrap_or_default();
        let mut running: Vec<_> = all.into_iter().filter(|pod| pod.is_running()).collect();
        match (running.len(), running.pop()) {
            (1, Some(pod)) => PodLookup::Pod(pod),
            (_, Some(pod)) => {
                running.push(pod);
                PodLookup::Several(running)
            }
            (_, None) => PodLookup::Unknown,
        }
    }

    /// Returns the pod with this name, `NAMESPACE/NAME`.
    pub(super) fn by_name(&self, name: &str) -> PodLookup {
        let Some(table) = self.0.get() else {
            return PodLookup::NotFollowed;
        };
        if let Some(reason) = table.unavailable_reason() {
            return PodLookup::Unavailable(reason);
        }
        let pod = table.by_name.get(name);
        pod.filter(|pod| pod.is_running())
            .map_or(PodLookup::Unknown, PodLookup::Pod)
    }
}

/// Returns `NAMESPACE/NAME` of the pod that the host `NAME.NAMESPACE.pod` means, without regard to case. The pod need
/// not exist.
pub(super) fn parse_host(host: &str) -> Option<String> {
    if host.len() > MAX_NAME {
        return None;
    }
    let host = host.to_ascii_lowercase();
    let (name, namespace) = host.strip_suffix(SUFFIX)?.rsplit_once('.')?;
    // In the cluster's own DNS such a name means the address.
    let is_address = name.replace('-', ".").parse::<Ipv4Addr>().is_ok()
        || name.replace('-', ":").parse::<Ipv6Addr>().is_ok();
    let is_name = !is_address
        && target::is_service_name(namespace)
        && name.split('.').all(target::is_service_name);
    is_name.then(|| format!("{namespace}/{name}"))
}

/// Returns the namespace of the pod that the host `NAME.NAMESPACE.pod` means. The pod need not exist.
pub fn namespace_of_host(host: &str) -> Option<String> {
    let key = parse_host(host)?;
    let (namespace, _) = key.split_once('/')?;
    Some(namespace.to_owned())
}

impl PodTable {
    fn covers(&self, address: IpAddr) -> bool {
        let is_special = match address {
            IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        let is_special = is_special
            || address.is_loopback()
            || address.is_unspecified()
            || address.is_multicast();
        !is_special && self.networks.iter().any(|net| net.contains(&address))
    }

    fn unavailable_reason(&self) -> Option<Arc<str>> {
        match &**self.status.load() {
            Status::Pending => Some("the pods of the cluster have not been loaded yet".into()),
            Status::Unavailable(reason) => Some(reason.clone()),
            Status::Lost(since, why) if since.elapsed() >= MAX_LOST => Some(
                format!("the pods of the cluster have not been read for {MAX_LOST:?}: {why}")
                    .into(),
            ),
            Status::Current | Status::Lost(..) => None,
        }
    }

    /// Whether several pods have this address, running or not.
    fn is_shared(&self, address: IpAddr) -> bool {
        let all = self.by_address.get(&address);
        all.is_some_and(|all| all.len() > 1)
    }

    /// Returns the addresses of a pod that the table may contain, each once.
    fn own_addresses(&self, pod: &Pod) -> Vec<IpAddr> {
        let mut addresses: Vec<IpAddr> = Vec::new();
        for address in pod.addresses.iter().map(IpAddr::to_canonical) {
            if !self.covers(address) {
                self.log_outside(address, &pod.name);
            } else if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        addresses
    }

    fn log_outside(&self, address: IpAddr, pod: &str) {
        if let Some(count) = self.outside_throttle.record_within(OUTSIDE_LOG_INTERVAL) {
            tracing::warn!(%address, pod, count, "the address of a pod is outside kubernetes.pod_networks: it leads to no edge, and no rule with pod_namespaces matches it, not even one that denies");
        }
    }

    fn log_conflict(&self, address: IpAddr, pods: &[Arc<Pod>]) {
        if pods.iter().filter(|pod| pod.is_running()).count() > 1
            && let Some(count) = self.conflict_throttle.record()
        {
            let names: Vec<_> = pods
                .iter()
                .map(|pod| format!("{} on {}", pod.name, pod.node))
                .collect();
            tracing::warn!(%address, pods = names.join(", "), count, "several pods have one address; no edge is reached by it");
        }
    }
}

/// Write access to the table of pods, for its only writer.
#[derive(Debug)]
pub struct PodsWriter {
    pods: Pods,
    max_pods: usize,
    /// Pods in the table. If there were too many, the last number of them, although the table is empty then.
    count: usize,
    /// Addresses that several pods have, running or not.
    shared: HashSet<IpAddr>,
}

/// The cluster has more pods than the table may contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the cluster has more than {0} pods with addresses of their own (kubernetes.pods.max_pods)"
)]
pub struct TooManyPods(pub usize);

impl PodsWriter {
    pub(super) fn new(pods: &Pods, max_pods: usize) -> Option<Self> {
        pods.are_followed().then(|| Self {
            pods: pods.clone(),
            max_pods,
            count: 0,
            shared: HashSet::new(),
        })
    }

    /// Returns the number of pods in the table, or, if there are too many, the number at which the table was put out of use.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the maximum number of pods in the table.
    pub fn max_pods(&self) -> usize {
        self.max_pods
    }

    /// Returns the number of addresses that several running pods have.
    pub fn count_conflicts(&self) -> usize {
        let Some(table) = self.pods.0.get() else {
            return 0;
        };
        let is_conflict = |address: &&IpAddr| {
            let all = table.by_address.get(*address).unwrap_or_default();
            all.iter().filter(|pod| pod.is_running()).count() > 1
        };
        self.shared.iter().filter(is_conflict).count()
    }

    /// Whether a pod has an address for which the table decides.
    pub fn has_address(&self, pod: &Pod) -> bool {
        let table = self.pods.0.get();
        table.is_some_and(|table| !table.own_addresses(pod).is_empty())
    }

    /// Replaces all pods. The table is then in use.
    ///
    /// # Errors
    /// If there are too many pods. The table is then empty and out of use.
    pub fn replace(&mut self, pods: Vec<Pod>) -> Result<(), TooManyPods> {
        let Some(table) = self.pods.0.get() else {
            return Ok(());
        };
        let mut by_name: HashMap<Arc<str>, Arc<Pod>> = HashMap::new();
        for mut pod in pods {
            pod.addresses = table.own_addresses(&pod).into();
            if !pod.addresses.is_empty() {
                by_name.insert(pod.name.clone(), Arc::new(pod));
            }
        }
        if by_name.len() > self.max_pods {
            self.count = by_name.len();
            return Err(self.overflow());
        }
        let mut by_address: HashMap<IpAddr, Vec<Arc<Pod>>> = HashMap::new();
        for pod in by_name.values() {
            for address in &pod.addresses {
                by_address.entry(*address).or_default().push(pod.clone());
            }
        }
        self.shared.clear();
        for (address, pods) in by_address.iter().filter(|(_, pods)| pods.len() > 1) {
            table.log_conflict(*address, pods);
            self.shared.insert(*address);
        }
        self.count = by_name.len();
        table.by_address.replace(by_address);
        table.by_name.replace(by_name);
        table.status.store(Arc::new(Status::Current));
        table.changed.send_replace(());
        Ok(())
    }

    /// Adds or changes a pod.
    ///
    /// # Errors
    /// If there are too many pods. The table is then empty and out of use.
    pub fn upsert(&mut self, mut pod: Pod) -> Result<(), TooManyPods> {
        let pods = self.pods.clone();
        let Some(table) = pods.0.get() else {
            return Ok(());
        };
        pod.addresses = table.own_addresses(&pod).into();
        let known = table.by_name.get(&*pod.name);
        if pod.addresses.is_empty() {
            self.remove(&pod.name);
        } else if known.is_none() && self.count >= self.max_pods {
            return Err(self.overflow());
        } else if known.as_deref() != Some(&pod) {
            self.count += usize::from(known.is_none());
            let pod = Arc::new(pod);
            table.set(known.as_ref(), Some(&pod));
            self.update_shared(table, known.iter().chain([&pod]));
        }
        Ok(())
    }

    /// Removes the pod with this name, `NAMESPACE/NAME`.
    pub fn remove(&mut self, name: &str) {
        let pods = self.pods.clone();
        let known = pods.0.get().map(|table| (table, table.by_name.get(name)));
        if let Some((table, Some(pod))) = known {
            self.count -= 1;
            table.set(Some(&pod), None);
            self.update_shared(table, [&pod].into_iter());
        }
    }

    /// Finds out which addresses of these pods several pods have now.
    fn update_shared<'a>(&mut self, table: &PodTable, pods: impl Iterator<Item = &'a Arc<Pod>>) {
        for address in pods.flat_map(|pod| &pod.addresses) {
            if table.is_shared(*address) {
                self.shared.insert(*address);
            } else {
                self.shared.remove(address);
            }
        }
    }

    /// Reports that the source answers. Has no effect on a table that is not filled.
    pub fn set_found(&self) {
        if let Some(table) = self.pods.0.get()
            && matches!(&**table.status.load(), Status::Lost(..))
        {
            table.status.store(Arc::new(Status::Current));
        }
    }

    /// Reports that the source does not answer, for this reason.
    pub fn set_lost(&self, why: &str) {
        self.set_lost_since(Instant::now(), why);
    }

    /// Reports that the source does not answer, and when the table was current for the last time. The time does not
    /// change while the source stays lost.
    pub fn set_lost_since(&self, since: Instant, why: &str) {
        let Some(table) = self.pods.0.get() else {
            return;
        };
        let status = match &**table.status.load() {
            Status::Pending | Status::Unavailable(_) => {
                Status::Unavailable(format!("the pods of the cluster are not loaded: {why}").into())
            }
            Status::Current => Status::Lost(since, why.into()),
            Status::Lost(since, _) => Status::Lost(*since, why.into()),
        };
        table.status.store(Arc::new(status));
        table.changed.send_replace(());
    }

    /// Empties the table because of too many pods, and puts it out of use.
    fn overflow(&mut self) -> TooManyPods {
        let error = TooManyPods(self.max_pods);
        if let Some(table) = self.pods.0.get() {
            let status = Status::Unavailable(error.to_string().into());
            table.status.store(Arc::new(status));
            table.by_address.replace(HashMap::new());
            table.by_name.replace(HashMap::new());
        }
        self.shared.clear();
        error
    }
}

impl PodTable {
    /// Replaces a pod in both maps.
    fn set(&self, old: Option<&Arc<Pod>>, new: Option<&Arc<Pod>>) {
        let addresses =
            |pod: Option<&Arc<Pod>>| pod.map(|pod| pod.addresses.clone()).unwrap_or_default();
        let (old_addresses, new_addresses) = (addresses(old), addresses(new));
        let dropped = old_addresses
            .iter()
            .filter(|address| !new_addresses.contains(address));
        for address in dropped.chain(&new_addresses) {
            self.by_address.edit(address, |map| {
                let all = map.entry(*address).or_default();
                all.retain(|pod| old.is_none_or(|old| pod.name != old.name));
                all.extend(new.filter(|pod| pod.addresses.contains(address)).cloned());
                self.log_conflict(*address, all);
                if all.is_empty() {
                    map.remove(address);
                }
            });
        }
        if let Some(name) = new.or(old).map(|pod| &pod.name) {
            self.by_name.edit(name, |map| {
                match new {
                    Some(pod) => map.insert(name.clone(), pod.clone()),
                    None => map.remove(name),
                };
            });
        }
        self.changed.send_replace(());
    }
}

/// Hash map in parts that are replaced one by one, so that readers never wait and a change is cheap.
#[derive(Debug)]
struct Shards<K, V> {
    maps: Box<[ArcSwap<HashMap<K, V>>]>,
    hasher: RandomState,
}

impl<K: Clone + Eq + Hash, V: Clone> Shards<K, V> {
    fn new() -> Self {
        Self {
            maps: (0..SHARDS).map(|_| ArcSwap::default()).collect(),
            hasher: RandomState::new(),
        }
    }

    fn index<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        usize::try_from(self.hasher.hash_one(key) % SHARDS as u64).unwrap_or_default()
    }

    fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let shard = self.maps.get(self.index(key))?;
        shard.load().get(key).cloned()
    }

    fn keys(&self) -> Vec<K> {
        let shards = self.maps.iter().map(ArcSwap::load);
        let keys = shards.flat_map(|shard| shard.keys().cloned().collect::<Vec<_>>());
        keys.collect()
    }

    fn edit(&self, key: &K, change: impl FnOnce(&mut HashMap<K, V>)) {
        if let Some(shard) = self.maps.get(self.index(key)) {
            let mut map = HashMap::clone(&shard.load());
            change(&mut map);
            shard.store(Arc::new(map));
        }
    }

    fn replace(&self, all: HashMap<K, V>) {
        let mut parts: Vec<HashMap<K, V>> = (0..SHARDS).map(|_| HashMap::new()).collect();
        for (key, value) in all {
            let index = self.index(&key);
            parts[index].insert(key, value);
        }
        for (shard, part) in self.maps.iter().zip(parts) {
            shard.store(Arc::new(part));
        }
    }
}

#[cfg(test)]
mod tests;
