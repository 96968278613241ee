//! A tunnel's connection that remembers how TLS ended it.
//!
//! HTTP/2 above sees a failed read and knows no alerts, yet an alert decides how long an edge stays away: a
//! gateway that does not know its certificate is not to be asked every two seconds.

use super::super::trouble::{self, Trouble};
use causeway_tunnel::Ended;
use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// TLS's own error, where it was the end of a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Fault(Arc<Mutex<Option<rustls::Error>>>);

impl Fault {
    pub(super) fn trouble(&self, ended: &Ended) -> Trouble {
        let fault = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Trouble::ended(ended, fault.as_ref())
    }
}

/// A connection that remembers TLS's own error: with TLS 1.3 a gateway refuses a certificate only after the
/// edge's handshake is done, and HTTP/2 knows no alerts.
#[derive(Debug)]
pub(super) struct Heard<S> {
    io: S,
    fault: Fault,
}

impl<S> Heard<S> {
    pub(super) fn new(io: S, fault: Fault) -> Self {
        Self { io, fault }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Heard<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let read = ready!(Pin::new(&mut this.io).poll_read(cx, buf));
        if let Err(error) = &read
            && let Some(error) = trouble::inner(error)
        {
            let mut fault = this.fault.0.lock().unwrap_or_else(PoisonError::into_inner);
            *fault = Some(error.clone());
        }
        Poll::Ready(read)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Heard<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
