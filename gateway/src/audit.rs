//! The audit log's lines about whoever was turned away before there was a stream.
//!
//! Lines about streams are written by `proxy/access_log.rs`. All have the target [`AUDIT`]; who writes them down, and
//! where, is the binary's.

use std::fmt::Display;

use causeway_rt::listener::RemoteAddr;

/// The target of lines for the audit log.
pub const AUDIT: &str = "audit";

/// A caller whose certificate has ended its handshake: nothing is known of it but why.
pub(crate) fn log_rejected_client(front: &str, peer: RemoteAddr, why: &dyn Display) {
    tracing::info!(front, %peer, %why, "a caller's certificate is refused");
    tracing::info!(target: AUDIT, event = "refused", front, %peer, reason = "certificate", detail = %why);
}

/// An edge that was not let in at the tunnel port, or not given a certificate.
pub(crate) fn log_rejected_edge(edge: &str, peer: &dyn Display, reason: &str, why: &dyn Display) {
    tracing::info!(target: AUDIT, event = "refused", edge, %peer, reason, detail = %why);
}
