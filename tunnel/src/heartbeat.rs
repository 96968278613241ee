//! Delegated heartbeat: the statement of a node without a gateway that its kubelet is alive.
//!
//! 1. The gateway sends members of node pools a nonce every [`NONCE_INTERVAL`]
//!    ([`GatewayMessage::HeartbeatNonce`](crate::control_stream::GatewayMessage::HeartbeatNonce)).
//! 2. The node asks a member for the nonce, signs it with the key of its certificate, and gives the member the
//!    [`DelegatedHeartbeat`].
//! 3. The member sends it to the gateway that issued the nonce, unchanged. The gateway verifies it.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Path at a pool member: `GET` returns the nonce, `POST` takes a heartbeat.
pub const PATH: &str = "/causeway/v1/heartbeat";
/// Interval in which a gateway sends a nonce to a tunnel, and in which a node without a gateway sends heartbeats.
pub const NONCE_INTERVAL: Duration = Duration::from_secs(10);
/// Age up to which a gateway accepts a nonce.
pub const NONCE_LIFETIME: Duration = Duration::from_secs(20);

/// Maximum length of a nonce.
pub const MAX_NONCE: usize = 64;
/// Maximum length of a heartbeat as JSON: a certificate and its issuer as PEM need about 2 KiB.
pub const MAX_HEARTBEAT: usize = 16 * 1024;

/// State of a node's kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KubeletState {
    /// The kubelet has answered its health check within the last seconds.
    Alive,
    /// State that this version does not know.
    #[serde(other)]
    Unknown,
}

impl KubeletState {
    /// Returns the text that is signed.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Unknown => "unknown",
        }
    }
}

/// Nonce that a pool member hands out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatNonce {
    /// The nonce.
    pub nonce: String,
}

/// Heartbeat of a node without a gateway, signed by the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelegatedHeartbeat {
    /// The node.
    pub node: String,
    /// Nonce of the gateway.
    pub nonce: String,
    /// The node's certificate and its issuers, as PEM.
    pub chain: String,
    /// Signature over nonce, node and state of the kubelet by the key of the certificate, in base64.
    pub signature: String,
    /// State of the node's kubelet.
    pub kubelet: KubeletState,
}

impl DelegatedHeartbeat {
    /// Maximum length of the name of a node, which is a DNS name.
    const MAX_NODE: usize = 253;
    /// Maximum length of the signature in base64: ECDSA P-256 has 72 bytes at most.
    const MAX_SIGNATURE: usize = 128;
    /// Maximum length of the certificates.
    const MAX_CHAIN: usize = 12 * 1024;

    /// Whether no field is longer than it may be.
    pub fn is_within_limits(&self) -> bool {
        self.node.len() <= Self::MAX_NODE
            && self.nonce.len() <= MAX_NONCE
            && self.signature.len() <= Self::MAX_SIGNATURE
            && self.chain.len() <= Self::MAX_CHAIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control_stream::{EdgeMessage, GatewayMessage};
    use crate::wire::MAX_MESSAGE;

    fn largest() -> DelegatedHeartbeat {
        DelegatedHeartbeat {
            node: "n".repeat(DelegatedHeartbeat::MAX_NODE),
            nonce: "0".repeat(MAX_NONCE),
            // A line break takes two bytes in JSON.
            chain: "c".repeat(DelegatedHeartbeat::MAX_CHAIN - 256) + &"\n".repeat(256),
            signature: "s".repeat(DelegatedHeartbeat::MAX_SIGNATURE),
            kubelet: KubeletState::Alive,
        }
    }

    #[test]
    fn the_largest_heartbeat_fits_into_a_request_and_a_message() {
        let heartbeat = largest();
        assert!(heartbeat.is_within_limits());
        let request = serde_json::to_vec(&heartbeat).unwrap();
        assert!(request.len() <= MAX_HEARTBEAT, "{}", request.len());
        let line = serde_json::to_string(&EdgeMessage::DelegatedHeartbeat(Box::new(heartbeat)));
        let line = line.unwrap();
        assert!(line.len() <= MAX_MESSAGE, "{}", line.len());
        let read: EdgeMessage = serde_json::from_str(&line).unwrap();
        assert!(matches!(read, EdgeMessage::DelegatedHeartbeat(_)));
        let longer = DelegatedHeartbeat {
            node: "n".repeat(DelegatedHeartbeat::MAX_NODE + 1),
            ..largest()
        };
        assert!(!longer.is_within_limits());
    }

    #[test]
    fn an_older_peer_ignores_messages_that_it_does_not_know() {
        let line = r#"{"type":"of_a_later_version","nonce":"abc","chain":["x"]}"#;
        let read: GatewayMessage = serde_json::from_str(line).unwrap();
        assert_eq!(read, GatewayMessage::Unknown);
        let read: EdgeMessage = serde_json::from_str(line).unwrap();
        assert_eq!(read, EdgeMessage::Unknown);
        let line = r#"{"type":"heartbeat_nonce","nonce":"abc"}"#;
        let read: GatewayMessage = serde_json::from_str(line).unwrap();
        let nonce = "abc".to_owned();
        assert_eq!(read, GatewayMessage::HeartbeatNonce { nonce });
        let state: KubeletState = serde_json::from_str("\"dozing\"").unwrap();
        assert_eq!(state, KubeletState::Unknown);
    }
}
