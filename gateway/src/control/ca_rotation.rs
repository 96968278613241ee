//! Messages to edges during a rotation of the root CA, and the progress of the edges.
//!
//! Each edge receives the trusted roots when it connects and when the roots change. The gateway requests a renewal from an edge
//! whose certificate depends on another root than the signing one. The edge reports the roots that it trusts. This module makes
//! no decisions: `causeway ca rotate` requests the progress, and continues or waits.

use super::broadcast::announce;
use crate::state::{Registry, TunnelInfo, directory::HeldState, registry::NewTunnel};
use causeway_certs::{Ca, Fingerprint, LiveCa, NodeName, RootStage};
use causeway_tunnel::control_stream::GatewayMessage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeSet, HashSet},
    fmt, mem,
    sync::Arc,
    time::Duration,
};

/// Minimum period over which renewals are spread.
const RENEWAL_SPREAD: Duration = Duration::from_secs(5);
/// Additional period for each tunnel: a renewal costs a gateway a signature and two writes.
const RENEWAL_SPREAD_PER_TUNNEL: Duration = Duration::from_millis(10);

/// Function that loads the CA of the data directory, and returns whether it has changed. Blocks on the disk.
#[derive(Clone)]
pub struct CaReloadFn(pub Arc<dyn Fn() -> Result<bool, String> + Send + Sync>);

impl fmt::Debug for CaReloadFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CaReloadFn")
    }
}

/// Maximum number of an edge's roots that are stored.
const MAX_ROOTS: usize = 8;

/// Parses the roots that an edge reports. An invalid root is left out, so that the edge counts as one with other roots. Roots
/// beyond [`MAX_ROOTS`] give no further information.
pub(super) fn parse_roots(roots: &[String]) -> Vec<Fingerprint> {
    let roots = roots.iter().take(MAX_ROOTS);
    roots.filter_map(|root| root.parse().ok()).collect()
}

/// Returns the rotation messages that an edge with this tunnel has not completed yet. `tunnels` returns the number of edges that
/// may renew at once.
pub(crate) fn pending_messages(
    ca: &Ca,
    new_tunnel: &NewTunnel,
    tunnels: impl FnOnce() -> usize,
) -> Vec<GatewayMessage> {
    let Some(trusted_by_edge) = new_tunnel.roots.load_full() else {
        return Vec::new();
    };
    if new_tunnel.certificate.external_chain.is_some() {
        return Vec::new();
    }
    let mut messages = Vec::new();
    if *trusted_by_edge != ca.fingerprints() {
        messages.push(GatewayMessage::Roots {
            pem: ca.bundle_pem(),
        });
    }
    let certificate_root = new_tunnel.certificate.root;
    if certificate_root.is_some_and(|root| root != ca.fingerprint()) {
        let spread = RENEWAL_SPREAD
            + RENEWAL_SPREAD_PER_TUNNEL * u32::try_from(tunnels()).unwrap_or(u32::MAX);
        let within_ms = u64::try_from(spread.as_millis()).unwrap_or(u64::MAX);
        messages.push(GatewayMessage::Renew { within_ms });
    }
    messages
}

/// Sends every connected edge its pending rotation messages.
pub(crate) fn announce_rotation(ca: &Ca, registry: &Registry) {
    let tunnels = registry.connected_nodes();
    announce(registry, |edge| {
        let is_active = !edge.is_leaving();
        let missing = is_active.then(|| pending_messages(ca, &edge.tunnel, || tunnels));
        missing.unwrap_or_default()
    });
}

/// Roots of a gateway, and the progress of the edges that are connected to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct RotationProgress {
    /// The roots that the gateway trusts.
    roots: Vec<RootStatus>,
    /// Number of connected nodes.
    connected: usize,
    /// Connected nodes that are too old to report roots.
    too_old: BTreeSet<NodeName>,
    /// Connected nodes that do not trust all of these roots.
    without_roots: BTreeSet<NodeName>,
    /// Connected nodes whose certificate depends on another root than the signing one.
    on_another_root: BTreeSet<NodeName>,
}

/// Root of a gateway's CA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
struct RootStatus {
    /// Role of the root.
    stage: RootStage,
    /// SHA-256 of the root, in hexadecimal.
    fingerprint: Fingerprint,
}

/// Progress of a rotation at this gateway and at the others.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct RotationStatus {
    #[serde(flatten)]
    pub(super) own: RotationProgress,
    /// Other gateways (`peers`), by address.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) gateways: Vec<PeerRotation>,
}

/// Progress of a rotation at another gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct PeerRotation {
    /// Address at which this gateway reaches it, `host:port`.
    pub(super) address: String,
    /// Its roots and edges; `null` if it could not be asked.
    pub(super) progress: Option<RotationProgress>,
    /// Reason why it could not be asked.
    pub(super) error: Option<String>,
}

/// Accessors of the sets of nodes in the progress.
const NODE_SETS: [fn(&mut RotationProgress) -> &mut BTreeSet<NodeName>; 3] = [
    |progress| &mut progress.too_old,
    |progress| &mut progress.without_roots,
    |progress| &mut progress.on_another_root,
];

impl RotationProgress {
    /// Splits the progress into parts with at most this number of nodes each.
    pub(super) fn into_parts(mut self, max_nodes: usize) -> Vec<Self> {
        let mut parts = Vec::new();
        for nodes_of in NODE_SETS {
            let nodes: Vec<_> = mem::take(nodes_of(&mut self)).into_iter().collect();
            for chunk in nodes.chunks(max_nodes) {
                let mut part = Self::default();
                nodes_of(&mut part).extend(chunk.iter().cloned());
                parts.push(part);
            }
        }
        parts.push(self);
        parts
    }

    /// Adds a part.
    pub(super) fn merge(&mut self, mut part: Self) {
        for nodes_of in NODE_SETS {
            nodes_of(self).append(nodes_of(&mut part));
        }
        self.roots.append(&mut part.roots);
        self.connected += part.connected;
    }
}

/// Returns the roots of this gateway, and the progress of its edges.
pub(super) fn rotation_progress(ca: &LiveCa, registry: &Registry) -> RotationProgress {
    let ca = ca.get();
    let edges = registry.all();
    let active: HashSet<_> = edges
        .iter()
        .filter_map(|(node, edge)| (!edge.is_leaving()).then_some(node))
        .collect();
    // Another tunnel tells more than one that leaves. Certificates of an external CA were not issued by this CA.
    let is_counted = |node: &NodeName, edge: &TunnelInfo| {
        let holders = || registry.directory().holders(node).into_iter();
        let is_replaced =
            || active.contains(node) || holders().any(|(_, state)| state == HeldState::Connected);
        edge.tunnel.certificate.external_chain.is_none() && !(edge.is_leaving() && is_replaced())
    };
    let counted = edges.iter().filter(|(node, edge)| is_counted(node, edge));
    let counted: Vec<_> = counted.collect();
    let current = || counted.iter().copied();
    let nodes_where = |is: &dyn Fn(&TunnelInfo) -> bool| {
        let found = current().filter(|(_, edge)| is(edge));
        found.map(|(node, _)| node.clone()).collect()
    };
    let stages = ca.roots().into_iter().map(|(stage, _)| stage);
    let trusted = ca.fingerprints();
    let trusts_all_roots = |edge: &TunnelInfo| {
        let roots = edge.tunnel.roots.load();
        let roots = roots.as_deref().map(Vec::as_slice).unwrap_or_default();
        trusted.iter().all(|root| roots.contains(root))
    };
    let all: BTreeSet<_> = current().map(|(node, _)| node).collect();
    let is_on_signing_root =
        |edge: &TunnelInfo| edge.tunnel.certificate.root == Some(ca.fingerprint());
    RotationProgress {
        connected: all.len(),
        too_old: nodes_where(&|edge| edge.tunnel.roots.load().is_none()),
        without_roots: nodes_where(&|edge| !trusts_all_roots(edge)),
        on_another_root: nodes_where(&|edge| !is_on_signing_root(edge)),
        roots: stages
            .zip(ca.fingerprints())
            .map(|(stage, fingerprint)| RootStatus { stage, fingerprint })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control::tests::world::new_ca,
        state::registry::tests::{World, node},
    };

    #[tokio::test(start_paused = true)]
    async fn a_tunnel_that_leaves_counts_until_the_node_has_another_one() {
        let world = World::new();
        let ca = LiveCa::new(new_ca("causeway.test").prepare().unwrap().0);
        let connected = || rotation_progress(&ca, &world.registry).without_roots;
        let (tunnel, _) = world.register("edge", 0).await.unwrap();
        world.registry.mark_leaving(&node(), tunnel);
        assert_eq!(connected(), [node()].into(), "it is connected nowhere else");
        let peer = world.peer("other", HeldState::Draining).await;
        assert_eq!(connected(), [node()].into());
        peer.set_node(node(), Some(HeldState::Connected));
        assert_eq!(connected(), [].into(), "the other gateway counts it");
        world.registry.directory().remove(&peer);
        let (active, _) = world.register("edge", 1).await.unwrap();
        assert_eq!(rotation_progress(&ca, &world.registry).connected, 1);
        world.registry.mark_leaving(&node(), active);
        assert_eq!(connected(), [node()].into());
    }
}
