//! A connection to an upstream: in the clear, or TLS over it. Either way its close can be made a reset.

use causeway_rt::socket::ResetOnClose;
use causeway_tunnel::wire;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

/// A connection to an upstream.
#[derive(Debug)]
pub struct UpstreamIo<S>(Either<S, Box<TlsStream<S>>>);

impl<S> UpstreamIo<S> {
    /// Returns a connection in the clear.
    pub fn plain(io: S) -> Self {
        Self(Either::Left(io))
    }

    /// Returns a connection over TLS.
    pub fn tls(io: TlsStream<S>) -> Self {
        Self(Either::Right(Box::new(io)))
    }

    /// Whether the upstream chose HTTP/2.
    pub fn chose_http2(&self) -> bool {
        match &self.0 {
            Either::Left(_) => false,
            Either::Right(tls) => tls.get_ref().1.alpn_protocol() == Some(wire::ALPN_H2),
        }
    }
}

impl<S: ResetOnClose> ResetOnClose for UpstreamIo<S> {
    fn abort(&self) {
        match &self.0 {
            Either::Left(plain) => plain.abort(),
            Either::Right(tls) => tls.get_ref().0.abort(),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for UpstreamIo<S> {
    causeway_rt::forward!(0: poll_read);
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for UpstreamIo<S> {
    causeway_rt::forward!(0: poll_write, poll_write_vectored, is_write_vectored, poll_flush, poll_shutdown);
}
