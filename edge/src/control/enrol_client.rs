//! Client of the gateways' certificate endpoints: one request on a separate connection.
//!
//! `enrol` sends a token, and `renew` authenticates with the previous certificate. The requests are otherwise the same. They
//! use HTTP/1.1, because one request needs no more. This module only returns the result; the callers decide how to handle a
//! refusal.

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

/// Maximum size of a response to a certificate request, in bytes.
const MAX_RESPONSE_BYTES: usize = 256 * 1024;
/// Time limit of a response. The gateway stores the certificate before it answers.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Request to a gateway for a certificate.
#[derive(Serialize)]
pub(crate) struct EnrolRequest {
    /// Join token; `None` for a renewal.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(serialize_with = "exposed")]
    token: Option<Secret>,
    csr: String,
    version: &'static str,
    /// Node name that the edge assumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
}

/// Response of a gateway that has issued a certificate.
#[derive(Deserialize)]
pub(crate) struct EnrolResponse {
    pub(crate) certificate: String,
    pub(crate) root: String,
    #[serde(default)]
    pub(crate) gateways: Vec<String>,
}

/// Reason why no certificate was issued.
#[derive(Debug)]
pub(crate) enum EnrolRequestError {
    /// The gateway refused this request, and will refuse it again. Contains its reason and its description.
    Refused { reason: String, detail: String },
    /// The gateway's response cannot be parsed.
    MalformedResponse(String),
    /// A later request may succeed.
    Retryable(ConnectError),
}

#[derive(Default, Deserialize)]
struct ProblemDetails {
    #[serde(default)]
    reason: String,
    #[serde(default)]
    detail: String,
}

/// Serializes the token in plain text, because the request goes only to the gateway.
#[expect(clippy::ref_option, reason = "serde passes the field by reference")]
fn exposed<S: Serializer>(token: &Option<Secret>, to: S) -> Result<S::Ok, S::Error> {
    token.as_ref().map(Secret::expose).serialize(to)
}

impl EnrolRequest {
    /// Creates a request for a certificate for `key`.
    ///
    /// # Errors
    /// If the key cannot sign the certificate request.
    pub(crate) fn new(key: &PrivateKey) -> Result<Self, CsrError> {
        Ok(Self {
            token: None,
            csr: STANDARD.encode(key.request()?),
            version: env!("CARGO_PKG_VERSION"),
            node: None,
        })
    }

    /// Adds a token, and the name that the edge assumes for its node.
    pub(crate) fn with_token(self, token: Secret, node: Option<&str>) -> Self {
        Self {
            token: Some(token),
            node: node.map(ToOwned::to_owned),
            ..self
        }
    }

    /// Sends the request to the first of the gateways that answers.
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

/// Returns a copy of the configuration that offers only HTTP/1.1.
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

/// Converts an error of the request. With TLS 1.3 a gateway refuses a certificate only after the edge has completed its
/// handshake, so the request fails with the alert.
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

/// Parses the gateway's response.
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
