//! Health checks of upstreams: a connection or an HTTP request, over the same policy, resolution and TLS as streams.

use super::{Proxy, dial::Dialer, upstream::Upstream};
use crate::config::{HealthCheck, Protocol};
use bytes::Bytes;
use causeway_rt::http_client;
use causeway_tunnel::Target;
use causeway_upstream::connection::Alpn;
use http::{Request, header::HOST};
use http_body_util::Full;
use tokio::time::{Instant, timeout_at};

/// Health check of a port, with the target that it checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortCheck {
    pub(crate) check: HealthCheck,
    pub(crate) target: Target,
    pub(crate) scheme: Protocol,
}

impl PortCheck {
    /// Whether another check has the same target.
    pub(crate) fn is_same_target(&self, other: &Self) -> bool {
        (&self.target, self.scheme) == (&other.target, other.scheme)
    }
}

impl Proxy {
    /// Returns the ports with a health check.
    pub(crate) fn health_checks(&self) -> Vec<(u16, PortCheck)> {
        let ports = self.client.dialer.policy.configured_ports();
        let checks = ports.filter_map(|(port, upstream)| {
            let check = PortCheck {
                check: upstream.health_check.clone()?,
                target: upstream.target.clone(),
                scheme: upstream.scheme,
            };
            Some((port, check))
        });
        checks.collect()
    }

    /// Checks the upstream of a port once.
    ///
    /// # Errors
    /// The reason why the upstream is not healthy.
    pub(crate) async fn check_health(&self, port: u16, check: &HealthCheck) -> Result<(), String> {
        let dialer = &self.client.dialer;
        let mut ports = dialer.policy.configured_ports();
        let (_, upstream) = ports
            .find(|(configured, _)| *configured == port)
            .ok_or("the port is not configured")?;
        check_upstream(dialer, upstream, check).await
    }
}

async fn check_upstream(
    dialer: &Dialer,
    upstream: &Upstream,
    check: &HealthCheck,
) -> Result<(), String> {
    let deadline = Instant::now() + check.timeout;
    let connected = dialer
        .connect_unrecorded(upstream, Alpn::Http1, deadline)
        .await;
    let io = connected.map_err(|rejection| rejection.detail.to_string())?;
    let Some(path) = &check.path else {
        return Ok(());
    };
    let request = Request::get(path)
        .header(HOST, upstream.target.to_string())
        .body(Full::<Bytes>::default())
        .map_err(|error| error.to_string())?;
    let answered = timeout_at(deadline, http_client::send(io, request)).await;
    let answered = answered.map_err(|_| format!("no answer within {:?}", check.timeout))?;
    let (answer, _connection) = answered.map_err(|error| error.to_string())?;
    match answer.status() {
        status if status.is_success() || status.is_redirection() => Ok(()),
        status => Err(format!("{path} answered {status}")),
    }
}
