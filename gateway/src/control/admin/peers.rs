//! The other gateways in the admin API.

use crate::state::directory::{Directory, Peer};
use schemars::JsonSchema;
use serde::Serialize;

/// State of another gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum PeerState {
    /// It answers.
    Connected,
    /// It does not answer at present.
    Suspect,
    /// It drains.
    Draining,
}

/// One other gateway.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(super) struct PeerSummary {
    /// Address at which this gateway reached it, `host:port`.
    address: String,
    /// State of the gateway.
    state: PeerState,
    /// Version of its program.
    version: String,
    /// Random identifier of its process.
    instance: String,
    /// Serial number of its certificate, in hexadecimal.
    serial: String,
    /// Time at which the connection was opened (RFC 3339).
    since: String,
    /// Whether all of its nodes are known.
    synchronized: bool,
    /// Number of nodes whose tunnels it holds.
    nodes: usize,
    /// Number of open connections for requests.
    links: usize,
    /// Round-trip time, in milliseconds.
    rtt_ms: f64,
    /// Time for which it has not answered a probe, in milliseconds. Data about its nodes can be this old.
    lag_ms: f64,
}

/// Returns all other gateways in the order of their addresses.
pub(super) fn list_peers(directory: &Directory) -> Vec<PeerSummary> {
    let mut peers: Vec<_> = directory.peers().iter().map(|peer| summary(peer)).collect();
    peers.sort_by(|one, two| one.address.cmp(&two.address));
    peers
}

fn summary(peer: &Peer) -> PeerSummary {
    let state = match (peer.is_suspect(), peer.is_draining()) {
        (true, _) => PeerState::Suspect,
        (false, true) => PeerState::Draining,
        (false, false) => PeerState::Connected,
    };
    let control = peer.control();
    PeerSummary {
        address: peer.address.to_string(),
        state,
        version: peer.version.clone(),
        instance: peer.instance.clone(),
        serial: peer.serial.clone(),
        since: humantime::format_rfc3339_millis(peer.since).to_string(),
        synchronized: peer.is_synchronized(),
        nodes: peer.node_count(),
        links: peer.link_count(),
        rtt_ms: control.round_trip().as_secs_f64() * 1e3,
        lag_ms: control.unanswered_for().as_secs_f64() * 1e3,
    }
}
