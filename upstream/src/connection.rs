//! A connection to an upstream: cleartext or TLS, and the HTTP versions that it offers. The close of either can be made a reset.

use bytes::{Buf, Bytes};
use causeway_rt::socket::ResetOnClose;
use causeway_tunnel::wire;
use rustls::ClientConfig;
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

/// A connection to an upstream, with bytes that were read from it too early: bytes behind a 101 may be in the same segment
/// (invariant 9).
#[derive(Debug)]
pub struct UpstreamIo<S> {
    prefix: Bytes,
    io: Either<S, Box<TlsStream<S>>>,
}

impl<S> UpstreamIo<S> {
    /// Wraps a cleartext connection.
    pub fn plain(io: S) -> Self {
        Self {
            prefix: Bytes::new(),
            io: Either::Left(io),
        }
    }

    /// Wraps a TLS connection.
    pub fn tls(tls: TlsStream<S>) -> Self {
        Self {
            prefix: Bytes::new(),
            io: Either::Right(Box::new(tls)),
        }
    }

    /// Puts bytes that were already read from the connection back in front of it.
    #[must_use]
    pub fn with_prefix(self, prefix: Bytes) -> Self {
        Self { prefix, ..self }
    }

    /// Whether the upstream chose HTTP/2.
    pub fn chose_http2(&self) -> bool {
        matches!(&self.io, Either::Right(tls) if tls.get_ref().1.alpn_protocol() == Some(wire::ALPN_H2))
    }
}

impl<S: ResetOnClose> ResetOnClose for UpstreamIo<S> {
    fn abort(&self) {
        match &self.io {
            Either::Left(io) => io.abort(),
            Either::Right(tls) => tls.get_ref().0.abort(),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for UpstreamIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.prefix.is_empty() {
            return Pin::new(&mut self.io).poll_read(cx, buf);
        }
        let part = self.prefix.len().min(buf.remaining());
        buf.put_slice(&self.prefix[..part]);
        self.prefix.advance(part);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for UpstreamIo<S> {
    causeway_rt::forward!(io: poll_write, poll_write_vectored, is_write_vectored, poll_flush, poll_shutdown);
}

/// HTTP versions that a new connection may negotiate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alpn {
    /// HTTP/2 or HTTP/1.1, as the upstream chooses.
    Any,
    /// HTTP/1.1 only, for upgrades.
    Http1,
}

/// A TLS configuration for each [`Alpn`].
#[derive(Clone, Debug)]
pub struct AlpnConfigs {
    any: Arc<ClientConfig>,
    http1: Arc<ClientConfig>,
}

impl AlpnConfigs {
    /// Creates the configurations from one without ALPN.
    pub fn new(mut config: ClientConfig) -> Self {
        config.alpn_protocols = vec![wire::ALPN_HTTP11.to_vec()];
        let http1 = Arc::new(config.clone());
        config.alpn_protocols.insert(0, wire::ALPN_H2.to_vec());
        Self {
            any: Arc::new(config),
            http1,
        }
    }

    /// Returns the configuration that offers these versions.
    pub fn config_for(&self, alpn: Alpn) -> Arc<ClientConfig> {
        match alpn {
            Alpn::Any => self.any.clone(),
            Alpn::Http1 => self.http1.clone(),
        }
    }
}
