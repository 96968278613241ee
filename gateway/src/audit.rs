//! Audit log lines about clients and edges that were rejected before a stream began.
//!
//! `proxy/access_log.rs` writes the lines about streams. All lines have the target [`AUDIT`]. The binary decides how and where
//! they are written.

use std::fmt::Display;

use causeway_rt::listener::RemoteAddr;

/// Target of the lines for the audit log.
pub const AUDIT: &str = "audit";

/// Logs a client whose handshake failed because of its certificate. The gateway knows only the reason about such a client.
pub(crate) fn log_rejected_client(listener: &str, peer: RemoteAddr, why: &dyn Display) {
    tracing::info!(listener, %peer, %why, "a client's certificate is refused");
    tracing::info!(target: AUDIT, event = "refused", listener, %peer, reason = "certificate", detail = %why);
}

/// Logs an edge that was rejected at the tunnel port, or refused a certificate.
pub(crate) fn log_rejected_edge(edge: &str, peer: &dyn Display, reason: &str, why: &dyn Display) {
    tracing::info!(target: AUDIT, event = "refused", edge, %peer, reason, detail = %why);
}
