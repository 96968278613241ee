//! Asking a gateway for a certificate: one request over a connection of its own.
//!
//! `enrol` asks with a token, `renew` with the certificate before; what travels is the same but for that.
//! It is HTTP/1.1, since one request needs no more. Says what came of it and decides nothing: what a refusal
//! means is for the asker to say.

use super::{
    connect_error::{self, ConnectError},
    dial::{GatewayConnection, GatewayConnector},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use causeway_certs::{CsrError, PrivateKey, Secret};
use causeway_rt::http_client;
use causeway_tunnel::wire;
use http::{
    Request, StatusCode,
    header::{CONTENT_TYPE, HOST},
};
use http_body_util::{BodyExt, Full, Limited};
use rustls::ClientConfig;
use serde::{Deserialize, Serialize, Serializer};
use std::{error::Error, io, sync::Arc, time::Duration};
use tokio::time::timeout;

/// Largest answer to a request for a certificate, in bytes.
const MAX_RESPONSE_BYTES: usize = 256 * 1024;
/// How long a gateway may take to answer: it stores the certificate first.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Request to a gateway for a certificate.
#[derive(Serialize)]
pub(crate) struct EnrolRequest {
    /// The join token; a renewal has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(serialize_with = "exposed")]
    token: Option<Secret>,
    csr: String,
    version: &'static str,
    /// Node name that the edge assumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
}

/// Answer of a gateway that grants a certificate.
#[derive(Deserialize)]
pub(crate) struct EnrolResponse {
    pub(crate) certificate: String,
    pub(crate) root: String,
    #[serde(default)]
    pub(crate) gateways: Vec<String>,
}

/// Why nothing was granted.
#[derive(Debug)]
pub(crate) enum EnrolRequestError {
    /// The gateway refused this request, and would again: its reason and its sentence.
    Refused { reason: String, detail: String },
    /// The gateway's answer does not read.
    MalformedResponse(String),
    /// It may work later.
    Retryable(ConnectError),
}

#[derive(Default, Deserialize)]
struct ProblemDetails {
    #[serde(default)]
    reason: String,
    #[serde(default)]
    detail: String,
}

/// The token itself: it goes to the gateway alone.
#[expect(clippy::ref_option, reason = "serde passes the field by reference")]
fn exposed<S: Serializer>(token: &Option<Secret>, to: S) -> Result<S::Ok, S::Error> {
    token.as_ref().map(Secret::expose).serialize(to)
}

impl EnrolRequest {
    /// A request for a certificate for `key`.
    ///
    /// # Errors
    /// If the key cannot sign it.
    pub(crate) fn new(key: &PrivateKey) -> Result<Self, CsrError> {
        Ok(Self {
            token: None,
            csr: STANDARD.encode(key.request()?),
            version: env!("CARGO_PKG_VERSION"),
            node: None,
        })
    }

    /// The same with a token, and the name that the edge believes to be its own.
    pub(crate) fn with_token(self, token: Secret, node: Option<&str>) -> Self {
        Self {
            token: Some(token),
            node: node.map(ToOwned::to_owned),
            ..self
        }
    }

    /// Asks the first of the gateways that answers.
    ///
    /// # Errors
    /// The refusal of a gateway, or the reason why none answered.
    pub(crate) async fn send(
        &self,
        connector: &GatewayConnector,
        gateways: &[String],
        path: &str,
    ) -> Result<EnrolResponse, EnrolRequestError> {
        let payload = serde_json::to_vec(self)
            .map_err(|error| EnrolRequestError::MalformedResponse(error.to_string()))?;
        let connection = connector.dial(gateways, None).await;
        let connection = connection.map_err(EnrolRequestError::Retryable)?;
        let response = timeout(RESPONSE_TIMEOUT, post(connection, path, payload.into())).await;
        let timeout_error =
            || ConnectError::silent("the gateway did not respond to the request in time");
        let response = response.unwrap_or_else(|_| Err(timeout_error()));
        let (status, body) = response.map_err(EnrolRequestError::Retryable)?;
        parse_response(status, &body)
    }
}

/// The same trust and identity for HTTP/1.1.
pub(crate) fn http1(config: &ClientConfig) -> Arc<ClientConfig> {
    let mut config = config.clone();
    config.alpn_protocols = vec![wire::ALPN_HTTP11.to_vec()];
    Arc::new(config)
}

async fn post(
    connection: GatewayConnection,
    path: &str,
    payload: Bytes,
) -> Result<(StatusCode, Bytes), ConnectError> {
    let request = Request::post(path)
        .header(HOST, connection.gateway_addr.gateway.as_str())
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(payload))
        .map_err(|error| ConnectError::silent(error.to_string()))?;
    let (response, _connection) = http_client::send(connection.io, request)
        .await
        .map_err(|error| request_error(&error))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES)
        .collect()
        .await;
    body.map(|body| (status, body.to_bytes()))
        .map_err(|error| request_error(&*error))
}

/// With TLS 1.3 a gateway refuses a certificate only after the edge's handshake is done: the alert is what the
/// request fails with.
fn request_error(error: &(dyn Error + 'static)) -> ConnectError {
    let mut cause = Some(error);
    while let Some(current) = cause {
        let tls = current
            .downcast_ref::<io::Error>()
            .and_then(connect_error::find_tls_error);
        if let Some(tls) = tls {
            return ConnectError::tls(tls);
        }
        cause = current.source();
    }
    ConnectError::silent(format!(
        "the gateway did not respond to the request: {error}"
    ))
}

/// Parses the gateway's answer.
fn parse_response(status: StatusCode, body: &[u8]) -> Result<EnrolResponse, EnrolRequestError> {
    if status.is_success() {
        return serde_json::from_slice(body)
            .map_err(|error| EnrolRequestError::MalformedResponse(error.to_string()));
    }
    let ProblemDetails { reason, detail } = serde_json::from_slice(body).unwrap_or_default();
    let detail = if detail.is_empty() {
        status.to_string()
    } else {
        detail
    };
    if !status.is_client_error() || status == StatusCode::TOO_MANY_REQUESTS {
        return Err(EnrolRequestError::Retryable(ConnectError::refused(
            format!("the gateway cannot issue a certificate now: {detail}"),
        )));
    }
    Err(EnrolRequestError::Refused { reason, detail })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_gateway_is_asked_again_and_one_that_refuses_says_why() {
        let body = br#"{ "reason": "because", "detail": "said so" }"#;
        for status in [429, 500, 503] {
            let read = parse_response(StatusCode::from_u16(status).unwrap(), body);
            assert!(
                matches!(read, Err(EnrolRequestError::Retryable(_))),
                "{status}"
            );
        }
        let Err(EnrolRequestError::Refused { reason, detail }) =
            parse_response(StatusCode::FORBIDDEN, body)
        else {
            panic!("no refusal");
        };
        assert_eq!((reason.as_str(), detail.as_str()), ("because", "said so"));
        let Err(EnrolRequestError::Refused { detail, .. }) =
            parse_response(StatusCode::NOT_FOUND, b"<html>")
        else {
            panic!("no refusal");
        };
        assert_eq!(detail, "404 Not Found");
    }
}
