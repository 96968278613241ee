//! Joining: a token becomes a certificate, once.
//!
//! The key is made here and stays here; the gateway gets a request for it. Before there is any root, the token's
//! CA hash is the trust: a gateway of another CA is not even told the token. A refusal is final and says
//! which it is; a network that is silent, or a gateway that is busy, is tried again until it answers.

use super::{
    dial::{Dialled, Dialler},
    trouble::Trouble,
};
use crate::config::Config;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use causeway_certs::{
    CsrError, EdgeIdentity, EdgeKey, Fingerprint, JoinToken, WrongCa, verify::join_client,
};
use causeway_tunnel::{backoff::Backoff, wire};
use http::{
    Request, StatusCode,
    header::{CONTENT_TYPE, HOST},
};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use serde::{Deserialize, Serialize};
use std::{pin::pin, sync::Arc, time::Duration};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

/// Largest answer to a request for a certificate, in bytes.
const MOST: usize = 256 * 1024;
/// How long a gateway may take to answer: it stores the certificate first.
const ANSWER: Duration = Duration::from_secs(30);

/// Why an edge could not join. None of these mends itself.
#[derive(Debug, thiserror::Error)]
pub enum EnrolError {
    /// The gateway does not know the token.
    #[error("the gateway does not know this join token: {0}")]
    Unknown(String),
    /// The token's time is over.
    #[error("the join token has expired: {0}")]
    Expired(String),
    /// The token was used before.
    #[error("the join token was used already: {0}")]
    Used(String),
    /// The token is for another node.
    #[error("the join token is for another node: {0}")]
    OtherNode(String),
    /// The gateway's CA is not the one that the token names.
    #[error(transparent)]
    WrongCa(#[from] WrongCa),
    /// The gateway refused for another reason.
    #[error("the gateway refused to enrol this node: {0}")]
    Refused(String),
    /// The gateway's answer makes no identity.
    #[error("the gateway's answer is not a certificate for this node: {0}")]
    Answer(String),
    /// Key or request could not be made.
    #[error(transparent)]
    Key(#[from] CsrError),
    /// TLS could not be set up.
    #[error("cannot set up TLS: {0}")]
    Tls(String),
}

/// What an attempt came to.
enum Failed {
    /// For good.
    Final(EnrolError),
    /// For now.
    Trouble(Trouble),
}

#[derive(Serialize)]
struct Asking<'a> {
    token: &'a str,
    csr: String,
    version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<&'a str>,
}

#[derive(Deserialize)]
struct Granted {
    certificate: String,
    root: String,
    #[serde(default)]
    gateways: Vec<String>,
}

#[derive(Default, Deserialize)]
struct Problem {
    #[serde(default)]
    reason: String,
    #[serde(default)]
    detail: String,
}

/// Joins with `token` at one of the gateways of `config`.
///
/// Returns only with an identity or a final error: silence is tried again. Drop the future to stop.
///
/// # Errors
/// What the gateway refused.
pub(crate) async fn join(token: &JoinToken, config: &Config) -> Result<EdgeIdentity, EnrolError> {
    let key = EdgeKey::generate()?;
    let secret = token.text();
    let asking = Asking {
        token: secret.expose(),
        csr: STANDARD.encode(key.request()?),
        version: env!("CARGO_PKG_VERSION"),
        node: config.node.as_deref(),
    };
    let text =
        serde_json::to_vec(&asking).map_err(|error| EnrolError::Answer(error.to_string()))?;
    let dialler = Dialler::new(trust(token.root)?, config);
    let mut backoff = Backoff::new(config.backoff.silent_max, config.backoff.refused_max);
    let granted = loop {
        match attempt(&dialler, config, Bytes::from(text.clone())).await {
            Ok(granted) => break granted,
            Err(Failed::Final(error)) => return Err(error),
            Err(Failed::Trouble(trouble)) => {
                let delay = trouble.delay(&mut backoff, rand::random());
                warn!(what = trouble.what(), retry_in = ?delay, "not joined yet");
                sleep(delay).await;
            }
        }
    };
    let identity = identity(&granted, &key, token.root)?;
    info!(node = identity.node.as_str(), "joined");
    Ok(identity)
}

/// Joining speaks HTTP/1.1: one request needs no more.
fn trust(root: Fingerprint) -> Result<Arc<ClientConfig>, EnrolError> {
    let config = join_client(root).map_err(|error| EnrolError::Tls(error.to_string()))?;
    let mut config = ClientConfig::clone(&config);
    config.alpn_protocols = vec![wire::ALPN_HTTP11.to_vec()];
    Ok(Arc::new(config))
}

fn identity(
    granted: &Granted,
    key: &EdgeKey,
    root: Fingerprint,
) -> Result<EdgeIdentity, EnrolError> {
    let mut identity = EdgeIdentity::new(&granted.root, &granted.certificate, &key.key_pem())
        .map_err(|error| EnrolError::Answer(error.to_string()))?;
    if identity.fingerprint() != root {
        let presented = identity.fingerprint();
        return Err(WrongCa {
            presented,
            expected: root,
        }
        .into());
    }
    identity.gateways.clone_from(&granted.gateways);
    Ok(identity)
}

async fn attempt(dialler: &Dialler, config: &Config, text: Bytes) -> Result<Granted, Failed> {
    let dialled = dialler
        .dial(&config.gateways, None)
        .await
        .map_err(|trouble| match trouble.wrong_ca() {
            Some(wrong) => Failed::Final(wrong.into()),
            None => Failed::Trouble(trouble),
        })?;
    let silent = |what: String| Failed::Trouble(Trouble::silent(what));
    match timeout(ANSWER, ask(dialled, text)).await {
        Ok(Ok((status, body))) => read(status, &body),
        Ok(Err(what)) => Err(silent(format!(
            "the gateway did not answer the request to join: {what}"
        ))),
        Err(_) => Err(silent(
            "the gateway did not answer the request to join in time".into(),
        )),
    }
}

async fn ask(dialled: Dialled, text: Bytes) -> Result<(StatusCode, Bytes), String> {
    let words = |error: hyper::Error| error.to_string();
    let request = Request::post("/v1/enrol")
        .header(HOST, dialled.place.gateway.as_str())
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(text))
        .map_err(|error| error.to_string())?;
    let (mut sender, connection) = http1::Builder::new()
        .title_case_headers(true)
        .handshake(TokioIo::new(dialled.io))
        .await
        .map_err(words)?;
    let asking = async {
        let answer = sender.send_request(request).await.map_err(words)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MOST).collect().await;
        body.map(|body| (status, body.to_bytes()))
            .map_err(|error| error.to_string())
    };
    let mut asking = pin!(asking);
    tokio::select! {
        biased;
        answered = &mut asking => answered,
        // A connection that is over has given its error to the request.
        _ = connection => asking.await,
    }
}

/// What the gateway answered.
fn read(status: StatusCode, body: &[u8]) -> Result<Granted, Failed> {
    if status.is_success() {
        return serde_json::from_slice(body)
            .map_err(|error| Failed::Final(EnrolError::Answer(error.to_string())));
    }
    let problem: Problem = serde_json::from_slice(body).unwrap_or_default();
    let detail = if problem.detail.is_empty() {
        status.to_string()
    } else {
        problem.detail
    };
    if !status.is_client_error() || status == StatusCode::TOO_MANY_REQUESTS {
        return Err(Failed::Trouble(Trouble::refused(format!(
            "the gateway cannot enrol now: {detail}"
        ))));
    }
    Err(Failed::Final(match problem.reason.as_str() {
        "token_unknown" => EnrolError::Unknown(detail),
        "token_expired" => EnrolError::Expired(detail),
        "token_used" => EnrolError::Used(detail),
        "token_other_node" => EnrolError::OtherNode(detail),
        _ => EnrolError::Refused(detail),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(status: u16, reason: &str) -> Failed {
        let body = json!({ "reason": reason, "detail": "said so" }).to_string();
        read(StatusCode::from_u16(status).unwrap(), body.as_bytes())
            .err()
            .unwrap()
    }

    #[test]
    fn each_refusal_of_a_token_is_final_and_says_which() {
        for (reason, words) in [
            ("token_unknown", "does not know"),
            ("token_expired", "expired"),
            ("token_used", "used already"),
            ("token_other_node", "another node"),
            ("csr_invalid", "refused"),
        ] {
            let Failed::Final(error) = refused(403, reason) else {
                panic!("{reason} is not final");
            };
            let text = error.to_string();
            assert!(text.contains(words) && text.contains("said so"), "{text}");
        }
    }

    #[test]
    fn a_busy_gateway_is_asked_again() {
        for status in [429, 500, 503] {
            assert!(
                matches!(refused(status, "busy"), Failed::Trouble(_)),
                "{status}"
            );
        }
    }
}
