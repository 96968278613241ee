//! Messages to edges while the root of all certificates is replaced, and the progress of the edges.
//!
//! Each edge gets the trusted roots when it connects and when the roots change. An edge whose certificate depends on another
//! root than the signing one is asked to renew. The edge in turn reports the roots that it trusts. This module decides nothing:
//! `causeway ca rotate` requests the progress, and continues or waits.

use super::broadcast::announce;
use crate::state::{Registry, TunnelInfo, registry::NewTunnel};
use causeway_certs::{Ca, Fingerprint, LiveCa, NodeName, RootStage};
use causeway_tunnel::control_stream::GatewayMessage;
use schemars::JsonSchema;
use serde::Serialize;
use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

/// Minimum period over which renewals are spread.
const SPREAD: Duration = Duration::from_secs(5);
/// Additional period for each tunnel: a renewal costs a gateway a signature and two writes.
const EACH: Duration = Duration::from_millis(10);

/// Function that loads the CA of the data directory, and returns whether it has changed. Blocks on the disk.
#[derive(Clone)]
pub struct CaReloadFn(pub Arc<dyn Fn() -> Result<bool, String> + Send + Sync>);

impl fmt::Debug for CaReloadFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CaReloadFn")
    }
}

/// Maximum number of an edge's roots that are stored.
const MOST_ROOTS: usize = 8;

/// Parses the roots that an edge reports. An invalid one is left out, so that the edge counts as one with other roots. More than
/// a few give no further information.
pub(super) fn named(roots: &[String]) -> Vec<Fingerprint> {
    let roots = roots.iter().take(MOST_ROOTS);
    roots.filter_map(|root| root.parse().ok()).collect()
}

/// Returns the messages that an edge with this tunnel still has to act on. `tunnels` returns how many edges might do so at once.
pub(crate) fn missing(
    ca: &Ca,
    admitted: &NewTunnel,
    tunnels: impl FnOnce() -> usize,
) -> Vec<GatewayMessage> {
    let Some(believes) = admitted.roots.load_full() else {
        return Vec::new();
    };
    if admitted.certificate.given.is_some() {
        return Vec::new();
    }
    let mut lines = Vec::new();
    if *believes != ca.fingerprints() {
        lines.push(GatewayMessage::Roots {
            pem: ca.bundle_pem(),
        });
    }
    let hangs = admitted.certificate.root;
    if hangs.is_some_and(|root| root != ca.fingerprint()) {
        let within = SPREAD + EACH * u32::try_from(tunnels()).unwrap_or(u32::MAX);
        let within_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        lines.push(GatewayMessage::Renew { within_ms });
    }
    lines
}

/// Sends every connected edge the messages that it still has to act on.
pub(crate) fn tell(ca: &Ca, registry: &Registry) {
    let tunnels = registry.connected();
    announce(registry, |edge| {
        let current = !edge.is_leaving();
        let missing = current.then(|| missing(ca, &edge.admitted, || tunnels));
        missing.unwrap_or_default()
    });
}

/// The roots, and the progress of the connected edges.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct RotationStatus {
    /// The roots that this gateway trusts.
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

/// Root of the gateway's CA.
#[derive(Debug, Serialize, JsonSchema)]
struct RootStatus {
    /// Role of the root.
    stage: RootStage,
    /// SHA-256 of the root, in hexadecimal.
    fingerprint: Fingerprint,
}

/// Returns the progress of a rotation.
pub(super) fn progress(ca: &LiveCa, registry: &Registry) -> RotationStatus {
    let ca = ca.get();
    let edges = registry.all();
    // Certificates of an external CA were not issued by this CA.
    let counts =
        |edge: &TunnelInfo| !edge.is_leaving() && edge.admitted.certificate.given.is_none();
    let current = || edges.iter().filter(|(_, edge)| counts(edge));
    let those = |is: &dyn Fn(&TunnelInfo) -> bool| {
        let found = current().filter(|(_, edge)| is(edge));
        found.map(|(node, _)| node.clone()).collect()
    };
    let stages = ca.roots().into_iter().map(|(stage, _)| stage);
    let trusted = ca.fingerprints();
    let believes = |edge: &TunnelInfo| {
        let roots = edge.admitted.roots.load();
        let roots = roots.as_deref().map(Vec::as_slice).unwrap_or_default();
        trusted.iter().all(|root| roots.contains(root))
    };
    let all: BTreeSet<_> = current().map(|(node, _)| node).collect();
    let hangs = |edge: &TunnelInfo| edge.admitted.certificate.root == Some(ca.fingerprint());
    RotationStatus {
        connected: all.len(),
        too_old: those(&|edge| edge.admitted.roots.load().is_none()),
        without_roots: those(&|edge| !believes(edge)),
        on_another_root: those(&|edge| !hangs(edge)),
        roots: stages
            .zip(ca.fingerprints())
            .map(|(stage, fingerprint)| RootStatus { stage, fingerprint })
            .collect(),
    }
}
