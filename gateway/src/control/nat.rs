//! Leads callers of the nodes' own addresses to fronts, by nftables rules in this host's kernel.
//!
//! Owns one table of rules, made of the table of nodes: an address is in it as long as it is confirmed and names one
//! node. Never leads away what is for this host itself, and nothing to a port without a front. A change of one address
//! is one element; all is replaced at the start, when fronts move, and when a change was not taken. What the kernel
//! remembers of an address that comes or goes is forgotten.

mod conntrack;
mod netlink;
mod rules;
mod table;

use crate::{
    config::{Front, Redirect},
    state::{Nodes, NodesWriter},
};
use netlink::Netlink;
pub use netlink::Refused;
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

/// After a change that the kernel did not take.
const AGAIN: Duration = Duration::from_secs(1);

/// What keeps connections from being redirected.
#[derive(Debug, thiserror::Error)]
pub enum NatError {
    /// The process lacks the capability.
    #[error(
        "needs CAP_NET_ADMIN, to write rules of nftables (systemd: AmbientCapabilities=CAP_NET_ADMIN; containers: capabilities.add NET_ADMIN, and the host's network)"
    )]
    NotAllowed,
    /// The kernel cannot do it.
    #[error("this kernel has no nftables: {0}")]
    Unsupported(io::Error),
    /// Another process that runs has a table of this name.
    #[error(
        "another process that runs owns the nftables table inet {0}; end it, or give this one another name (redirect.table of a gateway, table of `causeway redirect`)"
    )]
    Taken(String),
    /// The kernel refused the rules.
    #[error(
        "the kernel refused the rules of nftables (they need Linux 5.12, with nft_fib_inet and nft_redir): {0}"
    )]
    Kernel(Refused),
}

/// Which port here a node's port is led to, by where the connection comes from and by family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports {
    /// Connections that this host makes.
    local: [BTreeMap<u16, u16>; 2],
    /// Connections that it would forward.
    forwarded: [BTreeMap<u16, u16>; 2],
}

impl Ports {
    /// What `redirect` asks for, of fronts that stand at these addresses.
    pub(crate) fn new(
        redirect: &Redirect,
        fronts: &[Front],
        standing: &[(String, Option<SocketAddr>)],
    ) -> Self {
        let mut ports = Self::default();
        for (port, front) in redirect.by_port(fronts) {
            let stands = standing.iter().find(|(name, _)| *name == front.name);
            let Some(at) = stands.and_then(|(_, address)| *address) else {
                continue;
            };
            ports.lead(port, at);
        }
        ports
    }

    /// All of these lead to the one listener that stands at this address.
    pub(crate) fn all_to(at: SocketAddr, led: impl IntoIterator<Item = u16>) -> Self {
        let mut ports = Self::default();
        led.into_iter().for_each(|port| ports.lead(port, at));
        ports
    }

    fn lead(&mut self, port: u16, at: SocketAddr) {
        let everywhere = at.ip().is_unspecified();
        // An IPv6 wildcard takes IPv4 as well.
        let families = [at.is_ipv4() || everywhere, at.is_ipv6()];
        for (place, _) in families.iter().enumerate().filter(|(_, takes)| **takes) {
            self.local[place].insert(port, at.port());
            if everywhere {
                self.forwarded[place].insert(port, at.port());
            }
        }
    }

    fn of(&self, local: bool, v4: bool) -> &BTreeMap<u16, u16> {
        let families = if local { &self.local } else { &self.forwarded };
        &families[usize::from(!v4)]
    }
}

/// Addresses that may be led elsewhere whoever has them.
fn routable(address: &IpAddr) -> bool {
    let broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    !(address.is_loopback() || address.is_unspecified() || address.is_multicast() || broadcast)
}

/// The rules as they are in the kernel.
#[derive(Debug)]
struct Rules {
    table: Table,
    /// Where connections are forgotten: of the same network as the table, whichever thread is at work.
    memory: Netlink,
    edges: BTreeSet<IpAddr>,
    ports: Ports,
    /// Whether all of it is there as it should be.
    sound: bool,
    /// Whether it was said that connections are not forgotten.
    complained: bool,
}

impl Rules {
    /// Makes the kernel's rules these.
    fn become_these(&mut self, edges: BTreeSet<IpAddr>, ports: Ports) -> Result<(), NatError> {
        let added: BTreeSet<_> = edges.difference(&self.edges).copied().collect();
        let removed: BTreeSet<_> = self.edges.difference(&edges).copied().collect();
        let done = if !self.sound || ports != self.ports {
            self.table.replace(&edges, &ports)
        } else if added.is_empty() && removed.is_empty() {
            return Ok(());
        } else {
            self.table.change(&added, &removed)
        };
        self.sound = done.is_ok();
        done?;
        (self.edges, self.ports) = (edges, ports);
        let handed = &added | &removed;
        if handed.is_empty() {
            return Ok(());
        }
        match conntrack::forget(&self.memory, &handed) {
            Ok(0) => {}
            Ok(forgotten) => tracing::debug!(
                forgotten,
                "connections to addresses that change hands are forgotten"
            ),
            Err(error) if !std::mem::replace(&mut self.complained, true) => {
                tracing::warn!(%error, "connections that began before an address changed hands go on as they were: the kernel does not tell of them (nf_conntrack_netlink)");
            }
            Err(_) => {}
        }
        Ok(())
    }
}

/// Redirections, from the start of a process to its end.
#[derive(Debug)]
pub struct Nat {
    rules: Rules,
    nodes: Nodes,
    changes: watch::Receiver<()>,
    ports: watch::Receiver<Ports>,
}

impl Nat {
    /// Writes the rules for what is known now, as the table of this name.
    ///
    /// # Errors
    /// What keeps them from being written.
    pub fn install(
        table: &str,
        nodes: &NodesWriter,
        ports: watch::Receiver<Ports>,
    ) -> Result<Self, NatError> {
        let mut nat = Self {
            rules: Rules {
                table: Table::open(table)?,
                memory: Netlink::open().map_err(NatError::Unsupported)?,
                edges: BTreeSet::new(),
                ports: Ports::default(),
                sound: false,
                complained: false,
            },
            changes: nodes.changes(),
            nodes: nodes.reader(),
            ports,
        };
        let (edges, ports) = nat.wanted();
        nat.rules.become_these(edges, ports)?;
        let addresses = nat.rules.edges.len();
        tracing::info!(
            table,
            addresses,
            "connections to nodes' own addresses are redirected"
        );
        Ok(nat)
    }

    fn wanted(&mut self) -> (BTreeSet<IpAddr>, Ports) {
        let mut edges = self.nodes.edge_addresses();
        edges.retain(routable);
        (edges, self.ports.borrow_and_update().clone())
    }

    /// Keeps the rules as the tables say until `stop`, then takes them away.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            let sound = self.rules.sound;
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Ok(()) = self.changes.changed() => {}
                Ok(()) = self.ports.changed() => {}
                () = sleep(AGAIN), if !sound => {}
            }
            let (edges, ports) = self.wanted();
            let mut rules = self.rules;
            // The kernel waits for its other cores before it answers: callers here do not wait for that.
            let began = Instant::now();
            let done = spawn_blocking(move || {
                let done = rules.become_these(edges, ports);
                (rules, done)
            });
            let Ok((rules, done)) = done.await else {
                return tracing::error!(
                    "redirections ended by a fault; the next start makes them anew"
                );
            };
            self.rules = rules;
            let (addresses, took) = (self.rules.edges.len(), began.elapsed());
            tracing::debug!(addresses, ?took, "redirections are as the nodes are");
            if let Err(error) = done {
                tracing::warn!(%error, "redirections are not as they should be, trying again");
            }
        }
        if let Err(error) = self.rules.table.remove() {
            tracing::warn!(%error, "redirections could not be taken away");
        }
    }
}

#[cfg(test)]
mod tests;
