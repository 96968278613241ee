//! An upstream: the server that a port leads to, and a connection to it.
//!
//! A connection is TCP, or TLS over TCP as the port's configuration wants it.

use super::{Proxy, dial, upstream_tls::UpstreamTls};
use crate::config::Protocol;
use causeway_tunnel::{RejectCode, Target, error::Rejected};
use causeway_upstream::{alpn::Alpn, connection};
use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};
use tokio::{
    net::TcpStream,
    time::{Instant, timeout_at},
};
use tokio_rustls::TlsConnector;

/// A connection to an upstream.
pub(super) type UpstreamIo = connection::UpstreamIo<TcpStream>;

/// Key of an upstream, by which connections are pooled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum UpstreamKey {
    /// Upstream of a port of the node.
    Port(u16),
    /// Something else that the allow-list permits.
    Other(Target),
}

/// Upstream of a port, or another permitted target.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(super) id: UpstreamKey,
    pub(super) node: Arc<str>,
    pub(super) target: Target,
    /// Addresses that are tried as well, at the same port, if the target does not take a connection.
    pub(super) also: Vec<IpAddr>,
    pub(super) scheme: Protocol,
    pub(super) tls: Option<UpstreamTls>,
}

impl Upstream {
    /// Returns the beginning of a sentence about the upstream: "127.0.0.1:9100 on edge-1".
    pub(super) fn sentence(&self) -> String {
        format!("{} on {}", self.target, self.node)
    }

    /// A new connection that is ready for HTTP, until `deadline`, and the address that took it.
    pub(super) async fn connect(
        &self,
        way: &Proxy,
        offer: Alpn,
        deadline: Instant,
    ) -> Result<(UpstreamIo, SocketAddr), Rejected> {
        let (tcp, address) = self.dial(way, deadline).await?;
        let connection = match &self.tls {
            None => UpstreamIo::plain(tcp),
            Some(tls) => self.secure(tls, tcp, (offer, deadline)).await?,
        };
        Ok((connection, address))
    }

    /// A new TCP connection, counted, and the address that took it.
    pub(super) async fn dial(
        &self,
        way: &Proxy,
        deadline: Instant,
    ) -> Result<(TcpStream, SocketAddr), Rejected> {
        let began = Instant::now();
        let dialled = dial::dial(&way.policy, self, deadline).await;
        let cause = dialled.as_ref().err().map(|refused| refused.refusal);
        way.metrics.dialled(cause, began.elapsed());
        dialled.inspect_err(|refused| {
            if refused.refusal == RejectCode::Exhausted {
                way.exhaustion.write(self, refused);
            }
        })
    }

    async fn secure(
        &self,
        tls: &UpstreamTls,
        tcp: TcpStream,
        (offer, deadline): (Alpn, Instant),
    ) -> Result<UpstreamIo, Rejected> {
        let connector = TlsConnector::from(tls.configs().offering(offer));
        match timeout_at(deadline, connector.connect(tls.server_name(), tcp)).await {
            Ok(Ok(stream)) => Ok(UpstreamIo::tls(stream)),
            Ok(Err(error)) => {
                let why = dial::reason(&error);
                let detail = format!("{} failed TLS with {}: {why}", self.node, self.target);
                Err(RejectCode::TargetBroken.because(detail))
            }
            Err(_) => Err(dial::slow(self, "did not complete TLS in time")),
        }
    }
}
