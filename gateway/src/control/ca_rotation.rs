//! What edges are told while the root of all certificates is being replaced, and how far they are.
//!
//! Each edge is told the roots that are trusted when these change, and when it comes; and to renew, where its certificate
//! hangs on another root than the one that signs. It says in turn which roots it believes. Nothing is decided here:
//! `causeway ca rotate` asks, and goes on or waits.

use super::broadcast::announce;
use crate::state::{Registry, TunnelInfo, registry::NewTunnel};
use causeway_certs::{Ca, Fingerprint, LiveCa, NodeName, RootStage};
use causeway_tunnel::control_stream::GatewayMessage;
use serde::Serialize;
use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

/// Renewals are spread over this at least.
const SPREAD: Duration = Duration::from_secs(5);
/// And over so much for each tunnel: a renewal costs a gateway a signature and two writes.
const EACH: Duration = Duration::from_millis(10);

/// Takes up the CA that the data directory has; whether it is another than before. Blocks on the disk.
#[derive(Clone)]
pub struct CaReloadFn(pub Arc<dyn Fn() -> Result<bool, String> + Send + Sync>);

impl fmt::Debug for CaReloadFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CaReloadFn")
    }
}

/// Most roots of an edge that are remembered.
const MOST_ROOTS: usize = 8;

/// The roots that an edge names: what is none says that it has others, and more than a few say nothing more.
pub(super) fn named(roots: &[String]) -> Vec<Fingerprint> {
    let roots = roots.iter().take(MOST_ROOTS);
    roots.filter_map(|root| root.parse().ok()).collect()
}

/// What an edge with this tunnel has not done yet. `tunnels` says how many might have to do it at once.
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

/// Tells every edge that is here what it has not done yet.
pub(crate) fn tell(ca: &Ca, registry: &Registry) {
    let tunnels = registry.connected();
    announce(registry, |edge| {
        let current = !edge.is_leaving();
        let missing = current.then(|| missing(ca, &edge.admitted, || tunnels));
        missing.unwrap_or_default()
    });
}

/// The roots, and how far the edges are that are here.
#[derive(Debug, Serialize)]
pub(super) struct RotationStatus {
    roots: Vec<RootStatus>,
    /// Nodes that are connected.
    connected: usize,
    /// Those of them that are too old to hear of roots.
    too_old: BTreeSet<NodeName>,
    /// Those of them that do not believe all of these roots.
    without_roots: BTreeSet<NodeName>,
    /// Those of them whose certificate hangs on another root than the one that signs.
    on_another_root: BTreeSet<NodeName>,
}

#[derive(Debug, Serialize)]
struct RootStatus {
    stage: RootStage,
    fingerprint: Fingerprint,
}

/// How far a rotation is.
pub(super) fn progress(ca: &LiveCa, registry: &Registry) -> RotationStatus {
    let ca = ca.get();
    let edges = registry.all();
    // Certificates of another system are none of this CA's.
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
