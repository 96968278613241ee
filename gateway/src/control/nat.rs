//! Redirects connections to node addresses to listeners, by nftables rules in the kernel of this host.
//!
//! This module owns one nftables table, built from the table of nodes. It contains each address that is confirmed for exactly one
//! node. If the configuration requires it, the table also contains pod networks that belong to exactly one node or, if Pod objects
//! are followed, the addresses of the pods of edge nodes. Connections to this host itself, and to ports without a listener, are
//! never redirected. A change of one address changes one element. All rules are replaced at the start, when listeners or pod
//! networks change, and after a failed change. The kernel's tracked
//! connections to added and removed addresses are deleted, except while another process still hands over its redirections.

mod conntrack;
mod family;
mod netlink;
mod rules;
mod table;

use crate::{
    config::{Listener, Redirect},
    state::{Nodes, NodesWriter},
};
use ipnet::IpNet;
use netlink::Netlink;
pub use netlink::NetlinkError;
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use table::Table;
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

/// Pause after a change that the kernel refused.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Time for which changes of pods are collected: in a large cluster some pod changes at any time.
const POD_DELAY: Duration = Duration::from_millis(500);

/// Error that prevents redirection.
#[derive(Debug, thiserror::Error)]
pub enum NatError {
    /// The process lacks the capability.
    #[error(
        "needs CAP_NET_ADMIN to write nftables rules (systemd: AmbientCapabilities=CAP_NET_ADMIN; containers: capabilities.add NET_ADMIN, and the host's network)"
    )]
    NotAllowed,
    /// The kernel does not support nftables.
    #[error("this kernel has no nftables: {0}")]
    Unsupported(io::Error),
    /// Another running process has a table of this name.
    #[error(
        "another running process owns the nftables table inet {0}; stop that process, or choose another table name (redirect.table)"
    )]
    TableInUse(String),
    /// The kernel refused the rules.
    #[error(
        "the kernel refused the nftables rules (they need Linux 5.12, with nft_fib_inet and nft_redir): {0}"
    )]
    Kernel(NetlinkError),
}

/// Ports on this host to which node ports are redirected, by origin of the connection and by address family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortMap {
    /// Ports for connections that this host makes.
    local: [BTreeMap<u16, u16>; 2],
    /// Ports for connections that this host would forward.
    forwarded_ports: [BTreeMap<u16, u16>; 2],
    /// Ports to which all ports of pods are redirected: first for connections that this host makes, then for forwarded ones.
    pods: [[Option<u16>; 2]; 2],
}

impl PortMap {
    /// Returns the ports for `redirect`, with listeners at these addresses.
    pub(crate) fn new(
        redirect: &Redirect,
        listeners: &[Listener],
        bound_addresses: &[(String, Option<SocketAddr>)],
    ) -> Self {
        let mut ports = Self::default();
        let address_of = |listener: &Listener| {
            let bound = bound_addresses
                .iter()
                .find(|(name, _)| *name == listener.name);
            bound.and_then(|(_, address)| *address)
        };
        for (port, listener) in redirect.by_port(listeners) {
            if let Some(at) = address_of(listener) {
                ports.redirect_port(port, at);
            }
        }
        if let Some(at) = redirect.pod_listener(listeners).and_then(address_of) {
            ports.redirect_pods(at);
        }
        ports
    }

    fn redirect_pods(&mut self, at: SocketAddr) {
        for (family, _) in accepted_families(at)
            .iter()
            .enumerate()
            .filter(|(_, takes)| **takes)
        {
            self.pods[0][family] = Some(at.port());
            self.pods[1][family] = Some(at.port()).filter(|_| at.ip().is_unspecified());
        }
    }

    fn redirect_port(&mut self, port: u16, at: SocketAddr) {
        for (family, _) in accepted_families(at)
            .iter()
            .enumerate()
            .filter(|(_, takes)| **takes)
        {
            self.local[family].insert(port, at.port());
            if at.ip().is_unspecified() {
                self.forwarded_ports[family].insert(port, at.port());
            }
        }
    }

    fn ports_of(&self, local: bool, v4: bool) -> &BTreeMap<u16, u16> {
        let families = if local {
            &self.local
        } else {
            &self.forwarded_ports
        };
        &families[usize::from(!v4)]
    }

    /// Returns the port on this host to which connections to pods are redirected.
    fn pod_port(&self, local: bool, v4: bool) -> Option<u16> {
        self.pods[usize::from(!local)][usize::from(!v4)]
    }

    fn redirects_pods(&self) -> bool {
        self.pods.iter().flatten().any(Option::is_some)
    }
}

/// Returns the families that a listener at this address accepts: IPv4, IPv6. An IPv6 wildcard accepts IPv4 as well.
fn accepted_families(at: SocketAddr) -> [bool; 2] {
    [at.is_ipv4() || at.ip().is_unspecified(), at.is_ipv6()]
}

/// Destinations of all nodes whose connections are redirected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RedirectSet {
    /// The addresses of the nodes.
    edge_addresses: BTreeSet<IpAddr>,
    /// The networks of the nodes' pods.
    pod_networks: BTreeSet<IpNet>,
    /// The addresses of the nodes' pods, in place of their networks, if Pod objects are followed.
    pod_addresses: Option<BTreeSet<IpAddr>>,
}

/// Change of a set of addresses.
#[derive(Debug, Default)]
struct AddressChange {
    added: BTreeSet<IpAddr>,
    removed: BTreeSet<IpAddr>,
}

impl AddressChange {
    fn between(before: &BTreeSet<IpAddr>, after: &BTreeSet<IpAddr>) -> Self {
        Self {
            added: after.difference(before).copied().collect(),
            removed: before.difference(after).copied().collect(),
        }
    }

    fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty()
    }

    fn contains(&self, address: &IpAddr) -> bool {
        self.added.contains(address) || self.removed.contains(address)
    }
}

/// Whether connections to this address may be redirected at all.
fn is_redirectable(address: &IpAddr) -> bool {
    let broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    !(address.is_loopback() || address.is_unspecified() || address.is_multicast() || broadcast)
}

/// Takeover of the redirections of another process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Takeover {
    /// Cancelled when the rules contain the addresses of all nodes.
    pub(crate) complete: CancellationToken,
    /// Cancelled when this process serves clients. Until then the previous process deletes tracked connections.
    pub(crate) serving: CancellationToken,
}

/// The rules in the kernel.
#[derive(Debug)]
struct KernelRules {
    table: Table,
    /// Socket for deleting tracked connections. It stays in the network namespace of the table, on any thread.
    conntrack_socket: Netlink,
    redirected: RedirectSet,
    ports: PortMap,
    /// Whether the rules in the kernel are complete.
    is_complete: bool,
    /// Whether tracked connections belong to the streams of a previous process, whose redirections this process continues.
    keeps_connections: bool,
    /// Whether a warning was logged that tracked connections are not deleted.
    has_warned: bool,
}

impl KernelRules {
    /// Adds the addresses of pods to the destinations, if Pod objects are followed. While the pods are not known, their addresses stay.
    fn add_pods(&self, wanted: &mut RedirectSet, ports: &PortMap, nodes: &Nodes) {
        if !nodes.follows_pods() {
            return;
        }
        let known = || {
            let mut all = nodes.edge_pod_addresses()?;
            all.retain(is_redirectable);
            Some(all)
        };
        let pods = if ports.redirects_pods() {
            known().or_else(|| self.redirected.pod_addresses.clone())
        } else {
            None
        };
        wanted.pod_addresses = Some(pods.unwrap_or_default());
    }

    /// Updates the rules in the kernel to these destinations and ports.
    fn apply(&mut self, wanted: RedirectSet, ports: PortMap) -> Result<(), NatError> {
        let none = BTreeSet::new();
        let previous = &self.redirected;
        let edges = AddressChange::between(&previous.edge_addresses, &wanted.edge_addresses);
        let pod_addresses = AddressChange::between(
            previous.pod_addresses.as_ref().unwrap_or(&none),
            wanted.pod_addresses.as_ref().unwrap_or(&none),
        );
        let pods: Vec<_> = wanted
            .pod_networks
            .symmetric_difference(&self.redirected.pod_networks)
            .collect();
        let result = if !self.is_complete || ports != self.ports || !pods.is_empty() {
            self.table.replace(&wanted, &ports)
        } else if edges.is_empty() && pod_addresses.is_empty() {
            return Ok(());
        } else {
            self.table.change(&edges, &pod_addresses)
        };
        self.is_complete = result.is_ok();
        result?;
        let changed = !(edges.is_empty() && pod_addresses.is_empty() && pods.is_empty());
        let is_moved = |address: &IpAddr| {
            edges.contains(address)
                || pod_addresses.contains(address)
                || pods.iter().any(|net| net.contains(address))
        };
        let forgotten = if changed && !self.keeps_connections {
            conntrack::delete_connections(&self.conntrack_socket, is_moved)
        } else {
            Ok(0)
        };
        (self.redirected, self.ports) = (wanted, ports);
        match forgotten {
            Ok(0) => {}
            Ok(forgotten) => tracing::debug!(
                forgotten,
                "connection tracking entries of addresses that move to another node are deleted"
            ),
            Err(error) if !std::mem::replace(&mut self.has_warned, true) => {
                tracing::warn!(%error, "connections that began before an address moved to another node continue unchanged: the kernel does not list them (nf_conntrack_netlink)");
            }
            Err(_) => {}
        }
        Ok(())
    }
}

/// Redirection rules, from the start of the process to its end.
#[derive(Debug)]
pub struct Nat {
    rules: KernelRules,
    nodes: Nodes,
    changes: watch::Receiver<()>,
    /// Changes of pods, if Pod objects are followed.
    pod_changes: Option<watch::Receiver<()>>,
    ports: watch::Receiver<PortMap>,
    takeover: Option<Takeover>,
    /// Pod networks that were already reported as not redirected.
    reported_networks: BTreeSet<IpNet>,
}

impl Nat {
    /// Writes the rules for the current nodes to the table of this name. Beside a process that hands over, which still owns its
    /// table, the rules are written to a second table. The tracked connections of that process continue.
    ///
    /// # Errors
    /// The reason why they cannot be written.
    pub fn install(
        table: &str,
        nodes: &NodesWriter,
        ports: &watch::Receiver<PortMap>,
        has_predecessor: bool,
    ) -> Result<Self, NatError> {
        match Self::install_table(table, nodes, ports.clone(), has_predecessor) {
            Err(NatError::TableInUse(_)) if has_predecessor => {
                let table = format!("{table}-2");
                Self::install_table(&table, nodes, ports.clone(), has_predecessor)
            }
            installed => installed,
        }
    }

    fn install_table(
        table: &str,
        nodes: &NodesWriter,
        ports: watch::Receiver<PortMap>,
        has_predecessor: bool,
    ) -> Result<Self, NatError> {
        let mut nat = Self {
            rules: KernelRules {
                table: Table::open(table)?,
                conntrack_socket: Netlink::open().map_err(NatError::Unsupported)?,
                redirected: RedirectSet::default(),
                ports: PortMap::default(),
                is_complete: false,
                keeps_connections: has_predecessor,
                has_warned: false,
            },
            changes: nodes.subscribe(),
            pod_changes: nodes.subscribe_pods(),
            nodes: nodes.reader(),
            ports,
            takeover: has_predecessor.then(Takeover::default),
            reported_networks: BTreeSet::new(),
        };
        let is_loaded = nat.is_loaded();
        let (mut led, ports) = nat.desired_state();
        nat.rules.add_pods(&mut led, &ports, &nat.nodes);
        nat.rules.apply(led, ports)?;
        nat.note_applied(is_loaded);
        let addresses = nat.rules.redirected.edge_addresses.len();
        tracing::info!(
            table,
            addresses,
            "connections to node addresses are redirected"
        );
        Ok(nat)
    }

    /// Returns the takeover from another process, if there is one.
    pub(crate) fn takeover(&self) -> Option<Takeover> {
        self.takeover.clone()
    }

    /// Whether the nodes of the cluster are loaded, if there is a cluster, and so are the pods, if they are redirected and can be read.
    fn is_loaded(&self) -> bool {
        let awaits_pods = self.nodes.awaits_pods() && self.ports.borrow().redirects_pods();
        self.nodes.pending_reason().is_none() && !awaits_pods
    }

    /// Notes that the rules in the kernel match the nodes, which were loaded before if `is_loaded`.
    fn note_applied(&mut self, is_loaded: bool) {
        let Some(takeover) = &self.takeover else {
            return;
        };
        if is_loaded {
            takeover.complete.cancel();
        }
        // To this process, all addresses of the first list of nodes are new, but their tracked connections are in use. Without
        // the entry, a response leaves without translation, and the client's kernel resets the connection.
        if is_loaded && takeover.serving.is_cancelled() {
            self.rules.keeps_connections = false;
        }
    }

    /// Waits until this process has to delete tracked connections itself.
    fn wait_until_in_charge(&self) -> impl Future<Output = ()> + use<> {
        let takeover = self.takeover.clone();
        let takeover = takeover.filter(|_| self.rules.keeps_connections && self.is_loaded());
        async move {
            match takeover {
                Some(takeover) => takeover.serving.cancelled_owned().await,
                None => std::future::pending().await,
            }
        }
    }

    fn desired_state(&mut self) -> (RedirectSet, PortMap) {
        let ports = self.ports.borrow_and_update().clone();
        let mut edges = self.nodes.edge_addresses();
        edges.retain(is_redirectable);
        let mut pods = BTreeSet::new();
        if ports.redirects_pods() && !self.nodes.follows_pods() {
            let [alone, shared] = self.nodes.edge_pod_networks();
            self.warn_shared_networks(shared);
            pods = alone;
            pods.retain(|net| is_redirectable(&net.network()) && is_redirectable(&net.broadcast()));
        }
        (
            RedirectSet {
                edge_addresses: edges,
                pod_networks: pods,
                pod_addresses: None,
            },
            ports,
        )
    }

    /// Logs each shared pod network once. The clients only see that no server answers.
    fn warn_shared_networks(&mut self, shared: BTreeSet<IpNet>) {
        let new: Vec<_> = shared.difference(&self.reported_networks).collect();
        if let Some(network) = new.first() {
            tracing::warn!(
                %network,
                networks = new.len(),
                "several nodes have pods or addresses in this network: connections to its pods are not redirected, and no pod address in it leads to a node"
            );
        }
        self.reported_networks = shared;
    }

    /// Keeps the rules up to date until `stop`, then removes them.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            let is_complete = self.rules.is_complete;
            let in_charge = self.wait_until_in_charge();
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Ok(()) = self.changes.changed() => {}
                () = wait_for_pods(self.pod_changes.as_mut()) => {}
                Ok(()) = self.ports.changed() => {}
                () = sleep(RETRY_DELAY), if !is_complete => {}
                () = in_charge, if is_complete => {}
            }
            let is_loaded = self.is_loaded();
            let (mut led, ports) = self.desired_state();
            let (mut rules, nodes) = (self.rules, self.nodes.clone());
            // The kernel waits for its other workers before it answers. A blocking thread waits, so that clients of this gateway
            // do not.
            let started_at = Instant::now();
            let done = spawn_blocking(move || {
                rules.add_pods(&mut led, &ports, &nodes);
                let done = rules.apply(led, ports);
                (rules, done)
            });
            let Ok((rules, done)) = done.await else {
                return tracing::error!(
                    "redirection stopped because of an internal error; the next start creates the rules again"
                );
            };
            self.rules = rules;
            let (addresses, took) = (
                self.rules.redirected.edge_addresses.len(),
                started_at.elapsed(),
            );
            tracing::debug!(addresses, ?took, "redirections match the current nodes");
            match done {
                Ok(()) => self.note_applied(is_loaded),
                Err(error) => {
                    tracing::warn!(%error, "redirections could not be updated, retrying");
                }
            }
        }
        if let Err(error) = self.rules.table.remove() {
            tracing::warn!(%error, "redirections could not be removed");
        }
    }
}

/// Waits for changes of pods, and then until more changes have been collected.
async fn wait_for_pods(changes: Option<&mut watch::Receiver<()>>) {
    let has_changed = match changes {
        Some(changes) => changes.changed().await.is_ok(),
        None => false,
    };
    if has_changed {
        sleep(POD_DELAY).await;
    } else {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests;
