//! Causeway's identities: who somebody is, by certificate or token, and where that is kept.
//!
//! Owns rcgen and rustls' configurations; opens no socket and knows neither HTTP nor Kubernetes.
//! Read in this order: names, what a certificate says, the CA that issues, the requests it is
//! asked, what it hands out, the tokens that ask, the edge's own identity, who is let in, which
//! leaf a front shows, and the directory that keeps it all.
//! The one rule: an identity is what our own root signed, never what anyone claims.

pub mod name;

pub mod certificate;
pub mod identity;

pub mod secret;

pub mod ca;
pub mod csr;
pub mod leaf;

pub mod caller;
pub mod token;

pub mod cluster;
pub mod edge;
pub mod given;

pub mod resolver;
pub mod verify;

pub mod store;

mod pem;

pub use ca::{Above, Ca, CaError, Issued, LiveCa, OperatorCa, Stage, Step};
pub use caller::{CallerToken, CallerTokens};
pub use certificate::Certificate;
pub use cluster::{ClusterSubject, ClusterTrust, Vouched};
pub use csr::{CsrError, CsrKey, EdgeKey};
pub use edge::EdgeIdentity;
pub use identity::{Identity, Issuing};
pub use leaf::{Leaf, LeafError, Role};
pub use name::{FrontName, GatewayName, HostName, NameError, NodeName, NodePattern, TrustDomain};
pub use pem::{certificates, encode_chain};
pub use resolver::{FrontResolver, LiveLeaf};
pub use secret::{Fingerprint, Secret};
pub use store::{
    Access, Backup, Claim, NodeChange, NodeRecord, Nodes, Pending, Pin, PinTable, Pins,
    ReleasedClaim, Requested, Revocation, Shared, Store, StoreError, TakenUp,
};
pub use token::{Confirmed, JoinToken, Standing, TokenBook, TokenError, TokenRecord, TokenRefused};
pub use verify::{
    FrontTrust, NotAGateway, PeerRefused, Purpose, Trust, WrongCa, check_peer, install_provider,
};
