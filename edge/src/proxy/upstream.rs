//! Upstream: the server that a port leads to, and the errors of requests to it.

use super::upstream_tls::UpstreamTls;
use crate::config::{HealthCheck, Protocol};
use causeway_tunnel::{RejectCode, StreamError, Target, error::Rejected};
use causeway_upstream::{
    connection,
    response_error::{describe, find},
};
use std::{net::IpAddr, sync::Arc};
use tokio::net::TcpStream;

/// Connection to an upstream.
pub(super) type UpstreamIo = connection::UpstreamIo<TcpStream>;

/// Key of an upstream, by which connections are pooled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum UpstreamKey {
    /// Upstream of a port of the node.
    Port(u16),
    /// Upstream of a service behind the node.
    Service(String),
    /// Another target that the allow-list permits.
    Other(Target),
}

/// Upstream of a port or of a service, or another permitted target.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(super) id: UpstreamKey,
    pub(super) node: Arc<str>,
    pub(super) target: Target,
    /// Further addresses to try at the same port, if the target does not accept a connection.
    pub(super) fallback_addresses: Vec<IpAddr>,
    pub(super) scheme: Protocol,
    pub(super) tls: Option<UpstreamTls>,
    /// Whether TCP sessions begin with a PROXY header.
    pub(super) proxy_protocol: bool,
    pub(super) health_check: Option<HealthCheck>,
}

impl Upstream {
    /// Returns the beginning of a sentence about the upstream: "127.0.0.1:9100 on edge-1".
    pub(super) fn describe(&self) -> String {
        format!("{} on {}", self.target, self.node)
    }
}

/// Reason why there is no response.
#[derive(Debug)]
pub(super) enum RequestError {
    /// The client receives the reason.
    Refused(Rejected),
    /// The stream of the client has failed, so there is no client left to answer.
    Client,
}

impl From<Rejected> for RequestError {
    fn from(rejection: Rejected) -> Self {
        Self::Refused(rejection)
    }
}

/// Returns the error of an upstream that took too long.
pub(super) fn timeout_error(upstream: &Upstream, what: &str) -> Rejected {
    RejectCode::TargetTimeout.with_detail(format!("{} {what}", upstream.describe()))
}

/// Returns the error of an upstream that answered incorrectly.
pub(super) fn broken(app: &Upstream, what: &str) -> RequestError {
    let detail = format!("{} {what}", app.describe());
    RejectCode::TargetBroken.with_detail(detail).into()
}

/// Returns the error of a request that the upstream did not answer, or that the client did not complete.
pub(super) fn map_error(upstream: &Upstream, error: &hyper::Error) -> RequestError {
    if caused_by_client(error) {
        return RequestError::Client;
    }
    let limits = "more fields than limits.max_headers of this edge allows, or with a head of more than 400 kB";
    broken(
        upstream,
        &describe(error, "before it sent a response", limits),
    )
}

pub(super) fn caused_by_client(error: &hyper::Error) -> bool {
    find::<StreamError>(error).is_some() || error.is_body_write_aborted()
}
