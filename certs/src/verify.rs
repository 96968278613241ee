//! Verification of peers: rustls' configurations and the check after every handshake.
//!
//! Owns every `ServerConfig` and `ClientConfig` that carries identity, and `check_peer`. A tunnel's TLS session resumes at
//! every gateway that shares its secret, a listener's at that listener alone, and none resumes at the port that issues
//! certificates. A session without a client certificate can never resume where one is required. The one rule: a handshake,
//! resumed or not, proves nothing until `check_peer` has returned the identity of the peer. The identity comes from one of
//! our own issuers or from a foreign root, and the two are never confused.

mod client;
mod issuers;
pub(crate) mod peer;
mod pool_member;
pub(crate) mod roots;
mod server;
pub(crate) mod session_tickets;
pub(crate) mod trust_store;
mod yurthub;

pub use causeway_tls::{NoServerVerification, install_provider, provider};
pub use client::{
    NotAGateway, UnexpectedCa, control_client, csr_exchange_client, egress_client, join_client,
    peer_client, pinned_root, rejoin_client, tunnel_client,
};
pub use issuers::CertificateRequirement;
pub use peer::{
    IsRevokedFn, PeerRejected, Purpose, VerifiedPeer, check_peer, none_revoked, verify_peer,
};
pub use pool_member::{IsMemberFn, PoolMemberRejected, PoolMemberTls};
pub use roots::TrustError;
pub use server::ServerOnlyTls;
pub use server::{egress_server, join_server, listener_server, peer_server, tunnel_server};
pub use session_tickets::TicketSecret;
pub use trust_store::{ListenerClientTrust, RevokedSerials, TrustStore};
pub use yurthub::YurtHubServerTls;

#[cfg(test)]
mod tests;
