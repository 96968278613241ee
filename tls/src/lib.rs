//! Basics of TLS that the users' client shares with gateway and edge, on every system.
//!
//! Names in certificates, fingerprints, PEM, the cryptographic provider, and the verifier of connections whose content is
//! verified otherwise. `causeway-certs` has everything that issues, stores or verifies identities.

mod crypto;
mod fingerprint;
pub mod name;
pub mod pem;

pub use crypto::{NoServerVerification, install_provider, provider};
pub use fingerprint::{Fingerprint, FingerprintError};
pub use name::{
    GatewayName, HostName, ListenerName, NameError, NodeName, NodePattern, TrustDomain,
};
pub use pem::{encode_chain, parse_certificates};
