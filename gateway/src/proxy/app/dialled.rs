//! TLS to an app that is believed, over a CONNECT stream of the node's tunnel.
//!
//! What both versions of HTTP begin on. It ends in order only if nobody has given it up: what is dropped before is reset,
//! so that no app takes what was given up for what was wanted (design trap 3).

use super::{
    failure,
    line::Life,
    pin,
    tls::{self, AppTls, Offer},
};
use crate::{
    error::Error,
    proxy::{Way, relay},
};
use causeway_tunnel::{duplex::Duplex, status_line::StatusLine, wire};
use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, timeout_at},
};
use tokio_rustls::client::TlsStream;

/// A connection that nothing was asked on yet.
pub(super) struct Dialled {
    pub(super) guarded: Guarded,
    pub(super) life: Arc<Life>,
}

impl Dialled {
    /// Opens a stream to the way's target and does the handshake on it.
    ///
    /// # Errors
    /// As the edge says, or why TLS failed, or why the app is not believed.
    pub(super) async fn to(way: Way<'_>, app: &AppTls, offer: Offer) -> Result<Self, Error> {
        let shared = &way.proxy.shared;
        let deadline = Instant::now() + shared.timeouts.open;
        let (send, receive) = relay::open(way).await?;
        let name = tls::name(&way.route.node)
            .ok_or_else(|| failure::broken(way.route, "cannot be asked for by this node's name"))?;
        let connector = app.connector(offer);
        let eviction = receive.eviction();
        let connecting = connector.connect(name, Duplex::new(send, receive));
        let tls = match timeout_at(deadline, connecting).await {
            Ok(Ok(tls)) => tls,
            Ok(Err(error)) => return Err(failure::of_tls(way.route, &error)),
            Err(_) => return Err(failure::slow(way.route, "did not finish TLS in time")),
        };
        let life = Arc::new(Life {
            key: pin::believed(way, app, (&tls, deadline)).await?,
            eviction,
            ..Life::default()
        });
        let guarded = Guarded {
            tls,
            life: life.clone(),
            status: StatusLine::default(),
        };
        let dialled = Self { guarded, life };
        shared.metrics.app_connected(dialled.chose_http2());
        Ok(dialled)
    }

    /// Whether the app chose HTTP/2.
    pub(super) fn chose_http2(&self) -> bool {
        self.guarded.chose_http2()
    }
}

/// TLS that ends in order only if nobody has given it up; and then it waits for the app's end, since what is dropped before
/// that is reset.
#[derive(Debug)]
pub(super) struct Guarded {
    tls: TlsStream<Duplex>,
    life: Arc<Life>,
    status: StatusLine,
}

impl Guarded {
    /// An app that has answered before it read the request's body may reset its connection over that: the answer is still to
    /// be read, and what is written from then on is thrown away.
    fn written<T>(&self, written: Poll<io::Result<T>>, all: T) -> Poll<io::Result<T>> {
        match written {
            Poll::Ready(Err(error))
                if matches!(
                    error.kind(),
                    io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                ) && !self.chose_http2()
                    && !self.life.switched.load(Relaxed) =>
            {
                Poll::Ready(Ok(all))
            }
            written => written,
        }
    }

    fn chose_http2(&self) -> bool {
        self.tls.get_ref().1.alpn_protocol() == Some(wire::ALPN_H2)
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let read = Pin::new(&mut this.tls).poll_read(cx, buf);
        if let Some(new @ [_, ..]) = buf.filled_mut().get_mut(before..) {
            if !this.life.answering.swap(true, Relaxed) {
                this.status.begin();
            }
            this.status.pass(new);
        }
        read
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tls).poll_write(cx, buf);
        self.written(written, buf.len())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.tls).poll_flush(cx);
        self.written(flushed, ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.life.end.is_cancelled() {
            // The engine may come here before its task hears of it.
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        ready!(Pin::new(&mut self.tls).poll_shutdown(cx))?;
        while !self.life.switched.load(Relaxed) {
            let mut room = [0; 1024];
            let mut last = ReadBuf::new(&mut room);
            // How it ends is all the same.
            let read = ready!(Pin::new(&mut self.tls).poll_read(cx, &mut last));
            if read.is_err() || last.filled().is_empty() {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tls).poll_write_vectored(cx, bufs);
        self.written(written, bufs.iter().map(|buf| buf.len()).sum())
    }

    fn is_write_vectored(&self) -> bool {
        self.tls.is_write_vectored()
    }
}
