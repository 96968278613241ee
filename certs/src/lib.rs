//! Causeway's identities: identification by certificate or token, and the storage of both.
//!
//! Owns rcgen and rustls' configurations, opens no socket, and knows neither HTTP nor Kubernetes. Reading order: the content of a
//! certificate, the CA that issues, certificate requests, issued leaves, and join tokens. Then follow the edge's
//! own identity, the verification of peers, the selection of a leaf at a listener, and the data directory that stores it all.
//! The one rule: an identity is what our own root has signed, never a claim of the peer.

pub mod certificate;
pub mod identity;

mod secret;

pub mod ca;
pub mod csr;
pub mod leaf;

pub mod crl;
mod gateway_revocations;

pub mod bearer_tokens;
pub mod token;

pub mod edge_identity;
pub mod external;
pub mod heartbeat;
pub mod kubernetes_ca;
pub mod signer_profile;

pub mod resolver;
pub mod verify;

pub mod store;

pub use bearer_tokens::{StaticToken, StaticTokens};
pub use ca::{
    Ca, CaCertificateInfo, CaError, GATEWAY_LIFETIME, IssuedCertificate, ListenerCaInfo, LiveCa,
    RootStage, RotationStep,
};
pub use causeway_config::Secret;
pub use causeway_tls::{
    Fingerprint, GatewayName, HostName, ListenerName, NameError, NodeName, NodePattern,
    TrustDomain, encode_chain, install_provider, parse_certificates,
};
pub use certificate::Certificate;
pub use crl::{CrlError, MAX_CRL_TEXT, verify_crls};
pub use csr::{CsrError, PrivateKey, VerifiedPublicKey};
pub use edge_identity::EdgeIdentity;
pub use gateway_revocations::GatewayRevocations;
pub use heartbeat::{HeartbeatSignatureError, HeartbeatStatement};
pub use identity::{Identity, IssuerPurpose, edge_uri};
pub use kubernetes_ca::{ClusterCa, VerifiedNodeCertificate};
pub use leaf::{LeafCertificate, LeafCertificateError, Role};
pub use resolver::{KnownName, ReloadableCert, SniCertResolver};
pub use signer_profile::SignerProfile;
pub use store::{
    Backup, DirLock, Entries, EntryChange, EntryKey, ImportOutcome, NodeRecord, NodeStore,
    NodeUpdate, OpenMode, OtherFields, PendingCsr, Pin, PinTable, Pins, ReleasedClaim, Requested,
    Revocation, RevocationEntry, RevokedGateway, RevokedGateways, SharedCa, Store, StoreError,
    entry_text, normalize_entry, parse_serial,
};
pub use token::{
    JoinToken, Joining, NodeAttributes, NodeStatus, RepeatCheck, TokenError, TokenRecord,
    TokenRejected, TokenStore,
};
pub use verify::{
    ListenerClientTrust, NotAGateway, PeerRejected, Purpose, RevokedSerials, TrustStore,
    UnexpectedCa, check_peer,
};
