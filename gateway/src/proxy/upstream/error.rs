//! Errors of requests to an upstream: a reason of the error table and a sentence.
//!
//! Each sentence names the port and the node. An error of the tunnel's stream below takes precedence over the error that HTTP or
//! TLS derives from it.

use crate::{
    error::{Error, Reason},
    proxy::route::Route,
};
use causeway_certs::{Fingerprint, Pin};
use causeway_tunnel::StreamError;
use causeway_upstream::response_error::{describe, find};
use rustls::CertificateError;
use std::{
    io::{self, ErrorKind::UnexpectedEof},
    time::{Duration, UNIX_EPOCH},
};
use tokio_util::sync::CancellationToken;

/// Returns the error of an upstream that broke the protocol or closed the connection early.
pub(super) fn broken_upstream(route: &Route, what: &str) -> Error {
    Reason::TargetBroken.error(describe_upstream(route, what))
}

/// Returns the error of an upstream that took too long.
pub(super) fn upstream_timeout(route: &Route, what: &str) -> Error {
    Reason::TargetTimeout.error(describe_upstream(route, what))
}

/// Returns a sentence such as "port 10250 of edge-1 did something".
pub(super) fn describe_upstream(route: &Route, what: &str) -> String {
    format!("port {} of {} {what}", route.target.port, route.node)
}

/// Error of an upstream whose key is not the pinned one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its key is {met} instead of {}", known.key)]
pub(super) struct KeyMismatch {
    pub(super) known: Pin,
    pub(super) met: Fingerprint,
}

impl KeyMismatch {
    /// Returns the error for the client.
    pub(super) fn into_error(self, route: &Route) -> Error {
        let Self { known, met } = self;
        let (node, port) = (&route.node, route.target.port);
        let since = UNIX_EPOCH + Duration::from_secs(known.since);
        let since = humantime::format_rfc3339_seconds(since);
        let what = format!(
            "has a new key: SHA-256 {met}, but key {} has been pinned since {since}; if the key was replaced on purpose, run `causeway node unpin {node} {port}` at the gateway",
            known.key
        );
        Reason::TargetKeyChanged.error(describe_upstream(route, &what))
    }

    /// Returns the key mismatch that a TLS error contains.
    fn of(error: &rustls::Error) -> Option<Self> {
        match error {
            rustls::Error::InvalidCertificate(CertificateError::Other(other)) => {
                other.0.downcast_ref().copied()
            }
            _ => None,
        }
    }
}

/// Returns the error of a TLS handshake with the upstream that failed.
pub(super) fn tls_error(route: &Route, error: &io::Error) -> Error {
    if let Some(stream) = find::<StreamError>(error) {
        return tunnel_stream_error(route, stream, "during the TLS handshake");
    }
    match find::<rustls::Error>(error) {
        Some(error) => match KeyMismatch::of(error) {
            Some(mismatch) => mismatch.into_error(route),
            None => broken_upstream(route, &describe_tls_error(error)),
        },
        None if error.kind() == UnexpectedEof => {
            broken_upstream(route, "closed the connection during the TLS handshake")
        }
        None => broken_upstream(route, &format!("failed TLS: {error}")),
    }
}

/// Describes a TLS error of the upstream.
fn describe_tls_error(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(why) => describe_certificate_error(why),
        rustls::Error::AlertReceived(alert) => {
            format!(
                "refused the TLS handshake or the client certificate of upstream_tls: {alert:?}"
            )
        }
        rustls::Error::InvalidMessage(_) => "does not speak TLS".to_owned(),
        other => format!("failed TLS: {other}"),
    }
}

fn describe_certificate_error(why: &CertificateError) -> String {
    match why {
        // `BadSignature` occurs if another CA has the same name, as after a cluster was created again.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "shows a certificate that none of the CAs of upstream_tls has signed".to_owned()
        }
        CertificateError::NotValidForNameContext {
            expected,
            presented,
        } => {
            let names = match presented.as_slice() {
                [] => "no name at all".to_owned(),
                names => names
                    .iter()
                    .map(|name| unwrap_name(name))
                    .collect::<Vec<_>>()
                    .join(", "),
            };
            format!(
                "shows a certificate for {names}, but neither for {} nor for a confirmed address of this node",
                expected.to_str()
            )
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("shows a certificate that has expired: {why}")
        }
        why => format!("shows a certificate that is not trusted: {why}"),
    }
}

/// Returns a name without the wrapper that rustls adds, such as in `DnsName("edge-1")`.
fn unwrap_name(name: &str) -> &str {
    let inner = name.split_once('(').map_or(name, |(_, inner)| inner);
    inner.trim_end_matches(')').trim_matches('"')
}

/// Returns the error of an incomplete response; `phase` describes the point at which it broke.
pub(super) fn response_error(route: &Route, error: &hyper::Error, phase: &str) -> Error {
    if let Some(stream) = find::<StreamError>(error) {
        return tunnel_stream_error(route, stream, phase);
    }
    if let Some(error) = find::<rustls::Error>(error) {
        return broken_upstream(route, &describe_tls_error(error));
    }
    let bounds = "more fields than limits.max_headers of this gateway allows, or with a head of more than 256 KiB";
    broken_upstream(route, &describe(error, phase, bounds))
}

/// Returns the error of the tunnel's stream below the upstream's connection; `phase` describes the point at which it broke. A
/// reset comes from the upstream, because an edge gives a reason for a rejection, and the streams of a draining edge are lost.
fn tunnel_stream_error(route: &Route, error: &StreamError, phase: &str) -> Error {
    match error {
        StreamError::Reset { .. } => {
            broken_upstream(route, &format!("reset the connection {phase}"))
        }
        error => Error::from_stream_error(route.node.as_str(), error),
    }
}

/// Returns the error of a stream on an upstream's connection; `phase` describes the point at which it broke. The tunnel below may
/// have left.
pub(super) fn upstream_stream_error(
    route: &Route,
    tunnel_leaving: &CancellationToken,
    (error, phase): (&StreamError, &str),
) -> Error {
    match error {
        StreamError::Reset { .. } => broken_upstream(route, &format!("reset the request {phase}")),
        StreamError::Lost { .. } if !tunnel_leaving.is_cancelled() => {
            broken_upstream(route, &format!("closed the connection {phase}"))
        }
        error => Error::from_stream_error(route.node.as_str(), error),
    }
}
