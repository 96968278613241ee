//! An upstream: the server that a port leads to, and a connection to it.
//!
//! A connection is TCP, or TLS over TCP as the port's configuration wants it; either way its close can be made a reset.
//! [`Rewind`] puts back in front of a connection the bytes that were read from it too early: the bytes behind a 101 may
//! share its segment (invariant 9).

use super::{Proxy, dial, upstream_tls::UpstreamTls};
use crate::config::Protocol;
use bytes::{Buf, Bytes};
use causeway_rt::socket::ResetOnClose;
use causeway_tunnel::{RejectCode, Target, error::Rejected};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, timeout_at},
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::either::Either;

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

/// A connection to an upstream: in the clear, or over TLS.
#[derive(Debug)]
pub(super) struct UpstreamIo(Either<TcpStream, Box<TlsStream<TcpStream>>>);

impl From<TcpStream> for UpstreamIo {
    fn from(tcp: TcpStream) -> Self {
        Self(Either::Left(tcp))
    }
}

/// HTTP versions that a new connection may come to speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alpn {
    /// HTTP/2 or HTTP/1.1, as the upstream chooses.
    Any,
    /// HTTP/1.1 only: upgrades.
    Http1,
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
            None => tcp.into(),
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
        let connector = TlsConnector::from(tls.config(offer));
        match timeout_at(deadline, connector.connect(tls.server_name(), tcp)).await {
            Ok(Ok(stream)) => Ok(UpstreamIo(Either::Right(Box::new(stream)))),
            Ok(Err(error)) => {
                let why = dial::reason(&error);
                let detail = format!("{} failed TLS with {}: {why}", self.node, self.target);
                Err(RejectCode::TargetBroken.because(detail))
            }
            Err(_) => Err(dial::slow(self, "did not finish TLS in time")),
        }
    }
}

impl UpstreamIo {
    /// Whether the upstream chose HTTP/2.
    pub(super) fn chose_http2(&self) -> bool {
        match &self.0 {
            Either::Left(_) => false,
            Either::Right(tls) => tls.get_ref().1.alpn_protocol() == Some(b"h2"),
        }
    }
}

impl ResetOnClose for UpstreamIo {
    fn abort(&self) {
        match &self.0 {
            Either::Left(tcp) => tcp.abort(),
            Either::Right(tls) => tls.get_ref().0.abort(),
        }
    }
}

impl AsyncRead for UpstreamIo {
    causeway_rt::forward!(0: poll_read);
}

impl AsyncWrite for UpstreamIo {
    causeway_rt::forward!(0: poll_write, poll_write_vectored, is_write_vectored, poll_flush, poll_shutdown);
}

/// A connection, behind bytes that were read from it already.
#[derive(Debug)]
pub(super) struct Rewind {
    early: Bytes,
    connection: UpstreamIo,
}

impl Rewind {
    pub(super) fn new(early: Bytes, connection: UpstreamIo) -> Self {
        Self { early, connection }
    }
}

impl ResetOnClose for Rewind {
    fn abort(&self) {
        self.connection.abort();
    }
}

impl AsyncRead for Rewind {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.early.is_empty() {
            return Pin::new(&mut this.connection).poll_read(cx, buf);
        }
        let part = this.early.len().min(buf.remaining());
        buf.put_slice(&this.early[..part]);
        this.early.advance(part);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Rewind {
    causeway_rt::forward!(connection: poll_write, poll_flush, poll_shutdown);
}
