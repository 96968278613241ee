//! The audit log's lines about whoever was turned away before there was a stream.
//!
//! Lines about streams are written by `proxy/access.rs`. All have the target [`AUDIT`]; who writes them down, and
//! where, is the binary's.

use std::fmt::Display;

use causeway_tunnel::listener::Peer;

/// The target of lines for the audit log.
pub const AUDIT: &str = "audit";

/// A caller whose certificate has ended its handshake: nothing is known of it but why.
pub(crate) fn refused_caller(front: &str, peer: Peer, why: &dyn Display) {
    tracing::info!(front, %peer, %why, "a caller's certificate is refused");
    tracing::info!(target: AUDIT, event = "refused", front, %peer, reason = "certificate", detail = %why);
}

/// An edge that was not let in at the tunnel port, or not given a certificate.
pub(crate) fn refused_edge(edge: &str, peer: &dyn Display, reason: &str, why: &dyn Display) {
    tracing::info!(target: AUDIT, event = "refused", edge, %peer, reason, detail = %why);
}
