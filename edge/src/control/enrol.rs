//! Enrolment: exchanges a join token for a certificate, once.
//!
//! The edge generates the key, which never leaves this machine, and the gateway receives a certificate request. Before the
//! edge has any root, it trusts the CA hash in the token: a gateway of another CA does not even receive the token. A refusal
//! is final and has a specific error. If the network is silent or the gateway is busy, the edge tries again until it gets an
//! answer.

use super::{
    connect_error::ConnectError,
    dial::GatewayConnector,
    enrol_client::{self, EnrolRequest, EnrolRequestError, EnrolResponse},
};
use crate::config::Config;
use causeway_certs::{
    CsrError, EdgeIdentity, Fingerprint, GatewayRevocations, JoinToken, PrivateKey, UnexpectedCa,
    verify::rejoin_client,
};
use causeway_rt::backoff::Backoff;
use rustls::ClientConfig;
use std::sync::Arc;
use tokio::time::sleep;
use tracing::{info, warn};

/// Maximum number of further attempts with a token that no gateway knows. A load balancer may have several gateways behind
/// one address, each with its own tokens. With the delays of refusals these attempts take 6 to 12 s.
const MAX_UNKNOWN_TOKEN_TRIES: u32 = 5;

/// Callback that receives the reason why joining takes longer than it should.
pub(crate) type ProgressFn<'a> = dyn Fn(&str) + Send + Sync + 'a;

/// Reason why an edge could not join. None of these errors goes away by itself.
#[derive(Debug, thiserror::Error)]
pub enum EnrolError {
    /// The gateway does not know the token.
    #[error("{0}")]
    Unknown(String),
    /// The token has expired.
    #[error("{0}")]
    Expired(String),
    /// The token was used before.
    #[error("{0}")]
    Used(String),
    /// The token was revoked.
    #[error("{0}")]
    Revoked(String),
    /// The token is for another node.
    #[error("{0}")]
    OtherNode(String),
    /// The token is for new nodes, and this one has joined before.
    #[error("{0}")]
    NotNew(String),
    /// The token is for several nodes, and this edge has not sent the name of its node.
    #[error("{0}; set the name of this node with --node NAME")]
    Unnamed(String),
    /// The gateway's CA is not the one that the token names.
    #[error(transparent)]
    UnexpectedCa(#[from] UnexpectedCa),
    /// The node is revoked, so no token is accepted for it.
    #[error("{0}")]
    NodeRevoked(String),
    /// The gateway refused for another reason.
    #[error("{0}")]
    Refused(String),
    /// The gateway's response contains no valid identity.
    #[error("the gateway's response is not a certificate for this node: {0}")]
    MalformedResponse(String),
    /// The key or the certificate request could not be created.
    #[error(transparent)]
    Key(#[from] CsrError),
    /// TLS could not be set up.
    #[error("cannot set up TLS: {0}")]
    Tls(String),
}

impl EnrolError {
    /// Whether the token is the cause, so that only another token helps.
    pub fn is_token_error(&self) -> bool {
        matches!(
            self,
            Self::Unknown(_)
                | Self::Expired(_)
                | Self::Used(_)
                | Self::Revoked(_)
                | Self::OtherNode(_)
                | Self::NotNew(_)
                | Self::Unnamed(_)
        )
    }
}

/// Joins with `token` at one of the gateways of `config`, and refuses gateways with `revoked` certificates.
///
/// Returns only with an identity or a final error. Every other failure is tried again, and `on_progress` is called each time.
/// Drop the future to stop.
///
/// # Errors
/// If the gateway refuses the token or the node, or has another CA than the token names.
pub(crate) async fn join(
    token: &JoinToken,
    (config, revoked): (&Config, &GatewayRevocations),
    on_progress: &ProgressFn<'_>,
) -> Result<EdgeIdentity, EnrolError> {
    let request = JoinRequest::new(token, config.node.as_deref(), (config, revoked))?;
    let mut backoff = Backoff::new(config.backoff.silent_max, config.backoff.refused_max);
    let mut unknown_tries = 0;
    let identity = loop {
        let trouble = match request.send(&config.gateways).await {
            Ok(identity) => break identity,
            Err(NotJoined::Retryable(connect_error)) => connect_error
                .wrong_ca()
                .map_or(Ok(connect_error), |wrong| Err(EnrolError::from(wrong)))?,
            Err(NotJoined::Refused(error @ EnrolError::Unknown(_)))
                if unknown_tries < MAX_UNKNOWN_TOKEN_TRIES =>
            {
                unknown_tries += 1;
                ConnectError::refused(format!(
                    "{error}; another gateway behind the same address may know the token"
                ))
            }
            Err(NotJoined::Refused(error)) => return Err(error),
        };
        let delay = trouble.delay(&mut backoff, rand::random());
        warn!(what = trouble.detail(), retry_in = ?delay, "not joined yet");
        on_progress(trouble.detail());
        sleep(delay).await;
    };
    info!(node = identity.node.as_str(), "joined");
    Ok(identity)
}

/// Request to join with a token. The key stays the same however often the request is sent.
pub(crate) struct JoinRequest {
    key: PrivateKey,
    request: EnrolRequest,
    connector: GatewayConnector,
    /// Fingerprint of the root that the token names.
    expected_root: Fingerprint,
}

/// Reason why a request to join returned no identity.
pub(crate) enum NotJoined {
    /// A later request may succeed.
    Retryable(ConnectError),
    /// The gateway refuses, and will refuse again.
    Refused(EnrolError),
}

impl JoinRequest {
    /// Creates a request for the node of this name, which refuses gateways with `revoked` certificates. Without a
    /// name, the token determines the node.
    ///
    /// # Errors
    /// If the key or the TLS configuration cannot be created.
    pub(crate) fn new(
        token: &JoinToken,
        node: Option<&str>,
        (config, revoked): (&Config, &GatewayRevocations),
    ) -> Result<Self, EnrolError> {
        let key = PrivateKey::generate()?;
        Ok(Self {
            request: EnrolRequest::new(&key)?.with_token(token.text(), node),
            connector: GatewayConnector::new(tls_config(token.root, revoked)?, config),
            expected_root: token.root,
            key,
        })
    }

    /// Sends the request to one gateway after the other, until one knows the token. The token is sent only to a gateway of
    /// the CA that the token names.
    ///
    /// # Errors
    /// The refusal of a gateway, or the reason why none answered. The token is unknown only if all gateways report that.
    pub(crate) async fn send(&self, gateways: &[String]) -> Result<EdgeIdentity, NotJoined> {
        let (mut worst, mut unknown) = (None, None);
        for gateway in gateways {
            match self.send_to(gateway).await {
                Err(NotJoined::Retryable(next)) => worst = Some(next.or_worse(worst)),
                Err(NotJoined::Refused(error @ EnrolError::Unknown(_))) => unknown = Some(error),
                outcome => return outcome,
            }
        }
        // An unreachable gateway may know the token, so its error has precedence.
        Err(match (worst, unknown) {
            (None, Some(unknown)) => NotJoined::Refused(unknown),
            (Some(trouble), _) => NotJoined::Retryable(trouble),
            (None, None) => NotJoined::Retryable(ConnectError::silent("no gateway is configured")),
        })
    }

    async fn send_to(&self, gateway: &String) -> Result<EdgeIdentity, NotJoined> {
        let gateways = std::slice::from_ref(gateway);
        let response = self
            .request
            .send(&self.connector, gateways, "/v1/enrol")
            .await;
        let granted = response.map_err(|error| match error {
            EnrolRequestError::Retryable(error) => NotJoined::Retryable(error),
            EnrolRequestError::MalformedResponse(why) => {
                NotJoined::Refused(EnrolError::MalformedResponse(why))
            }
            EnrolRequestError::Refused { reason, detail } => {
                NotJoined::Refused(to_enrol_error(gateway, &reason, &detail))
            }
        })?;
        build_identity(&granted, &self.key, self.expected_root).map_err(NotJoined::Refused)
    }
}

fn tls_config(
    root: Fingerprint,
    revoked: &GatewayRevocations,
) -> Result<Arc<ClientConfig>, EnrolError> {
    let config =
        rejoin_client(root, revoked).map_err(|error| EnrolError::Tls(error.to_string()))?;
    Ok(enrol_client::http1(&config))
}

fn build_identity(
    granted: &EnrolResponse,
    key: &PrivateKey,
    expected_root: Fingerprint,
) -> Result<EdgeIdentity, EnrolError> {
    let mut identity = EdgeIdentity::new(&granted.root, &granted.certificate, &key.key_pem())
        .map_err(|error| EnrolError::MalformedResponse(error.to_string()))?;
    // The token was sent only to a server below the root in the token; during a rotation there are two roots.
    let roots = identity.fingerprints();
    if let (false, Some(presented)) = (roots.contains(&expected_root), roots.first()) {
        return Err(UnexpectedCa {
            presented: *presented,
            expected: expected_root,
        }
        .into());
    }
    identity.gateways.clone_from(&granted.gateways);
    Ok(identity)
}

/// Returns the error for a gateway's reason. Its text names the gateway.
fn to_enrol_error(gateway: &str, reason: &str, detail: &str) -> EnrolError {
    let error = match reason {
        "token_unknown" => EnrolError::Unknown,
        "token_expired" => EnrolError::Expired,
        "token_used" => EnrolError::Used,
        "token_revoked" => EnrolError::Revoked,
        "token_other_node" => EnrolError::OtherNode,
        "token_not_new" => EnrolError::NotNew,
        "node_missing" => EnrolError::Unnamed,
        "node_revoked" => EnrolError::NodeRevoked,
        _ => EnrolError::Refused,
    };
    error(format!(
        "the gateway {gateway} refused to let this node join: {detail}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_refusal_is_final_and_specific() {
        for (reason, is_of_token) in [
            ("token_unknown", true),
            ("token_expired", true),
            ("token_used", true),
            ("token_revoked", true),
            ("token_other_node", true),
            ("token_not_new", true),
            ("node_missing", true),
            ("node_revoked", false),
            ("csr_invalid", false),
        ] {
            let error = to_enrol_error("gw:10262", reason, "said so");
            assert_eq!(error.is_token_error(), is_of_token, "{reason}");
            let text = error.to_string();
            assert!(text.contains("gateway gw:10262") && text.contains("said so"));
            assert_eq!(text.contains("--node NAME"), reason == "node_missing");
        }
    }
}
