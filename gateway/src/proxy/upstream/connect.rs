//! TLS to a trusted upstream, over a CONNECT stream of the node's tunnel.
//!
//! Both versions of HTTP begin on such a connection. It ends in order only if it was not given up. A connection that is dropped
//! before is reset, so that no upstream takes an abandoned request for a complete one (design trap 3).

use super::{
    error,
    http1::ConnState,
    pin,
    tls::{self, Alpn, UpstreamTls},
};
use crate::{
    error::Error,
    proxy::{StreamContext, relay},
};
use causeway_tunnel::{status_line::StatusLine, stream_io::StreamIo, wire};
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
pub(super) struct UpstreamConnection {
    pub(super) guarded: ResetOnDrop,
    pub(super) life: Arc<ConnState>,
}

impl UpstreamConnection {
    /// Opens a stream to the target of the route and does the handshake on it.
    ///
    /// # Errors
    /// The refusal of the edge, or the reason why TLS failed or the upstream is not trusted.
    pub(super) async fn to(
        way: StreamContext<'_>,
        app: &UpstreamTls,
        offer: Alpn,
    ) -> Result<Self, Error> {
        let shared = &way.proxy.shared;
        let deadline = Instant::now() + shared.timeouts.connect;
        let (send, receive) = relay::open(way).await?;
        let name = tls::name(&way.route.node)
            .ok_or_else(|| error::broken(way.route, "cannot be asked for by this node's name"))?;
        let connector = app.connector(offer);
        let eviction = receive.eviction();
        let connecting = connector.connect(name, StreamIo::new(send, receive));
        let tls = match timeout_at(deadline, connecting).await {
            Ok(Ok(tls)) => tls,
            Ok(Err(error)) => return Err(error::of_tls(way.route, &error)),
            Err(_) => return Err(error::slow(way.route, "did not finish TLS in time")),
        };
        let life = Arc::new(ConnState {
            key: pin::believed(way, app, (&tls, deadline)).await?,
            eviction,
            ..ConnState::default()
        });
        let guarded = ResetOnDrop {
            tls,
            life: life.clone(),
            status: StatusLine::default(),
        };
        let dialled = Self { guarded, life };
        shared.metrics.app_connected(dialled.chose_http2());
        Ok(dialled)
    }

    /// Whether the upstream chose HTTP/2.
    pub(super) fn chose_http2(&self) -> bool {
        self.guarded.chose_http2()
    }
}

/// TLS that ends in order only if it was not given up. Then it waits for the upstream's end, since a connection that is dropped
/// before that is reset.
#[derive(Debug)]
pub(super) struct ResetOnDrop<S = StreamIo> {
    tls: TlsStream<S>,
    life: Arc<ConnState>,
    status: StatusLine,
}

impl<S> ResetOnDrop<S> {
    /// Discards writes that fail by a reset. An upstream that has answered before it read the request's body may reset its
    /// connection over that: the answer is still to be read, and further writes are discarded.
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

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for ResetOnDrop<S> {
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
            this.status.rewrite(new);
        }
        read
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ResetOnDrop<S> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use causeway_certs::verify::provider;
    use http::Request;
    use http_body::Frame;
    use http_body_util::StreamBody;
    use hyper::client::conn::http1;
    use hyper_util::rt::TokioIo;
    use rustls::{ClientConfig, RootCertStore, ServerConfig, pki_types::PrivateKeyDer};
    use std::{convert::Infallible, sync::atomic::AtomicBool};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
        sync::{Notify, mpsc},
    };
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    /// A connection whose peer resets it when more is sent, from a moment on.
    struct Resetting {
        io: DuplexStream,
        resets: Arc<AtomicBool>,
        written: Arc<Notify>,
    }

    impl AsyncRead for Resetting {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for Resetting {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.resets.load(Relaxed) {
                self.written.notify_one();
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            Pin::new(&mut self.io).poll_write(cx, buf)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_shutdown(cx)
        }
    }

    fn configs() -> (Arc<ClientConfig>, Arc<ServerConfig>) {
        let made = rcgen::generate_simple_self_signed(["app".to_owned()]).unwrap();
        let (certificate, key) = (made.cert.der().clone(), made.signing_key.serialize_der());
        let key = PrivateKeyDer::try_from(key).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone()).unwrap();
        let client = ClientConfig::builder_with_provider(provider());
        let client = client.with_safe_default_protocol_versions().unwrap();
        let client = client.with_root_certificates(roots).with_no_client_auth();
        let server = ServerConfig::builder_with_provider(provider());
        let server = server.with_safe_default_protocol_versions().unwrap();
        let server = server.with_no_client_auth();
        let server = server.with_single_cert(vec![certificate], key).unwrap();
        (Arc::new(client), Arc::new(server))
    }

    #[tokio::test]
    async fn an_answer_is_read_though_the_app_has_reset_its_connection_over_the_body() {
        let (client, server) = configs();
        let (near, far) = duplex(64 << 10);
        let (resets, written) = (Arc::<AtomicBool>::default(), Arc::<Notify>::default());
        let near = Resetting {
            io: near,
            resets: resets.clone(),
            written: written.clone(),
        };
        let connector = TlsConnector::from(client);
        let connecting = connector.connect("app".try_into().unwrap(), near);
        let (tls, far) = tokio::join!(connecting, TlsAcceptor::from(server).accept(far));
        let guarded = ResetOnDrop {
            tls: tls.unwrap(),
            life: Arc::default(),
            status: StatusLine::default(),
        };
        let handshake = http1::handshake(TokioIo::new(guarded)).await;
        let (mut sender, connection) = handshake.unwrap();
        let (body, mut parts) = mpsc::channel::<Bytes>(1);
        let parts = futures_util::stream::poll_fn(move |cx| {
            let part = ready!(parts.poll_recv(cx));
            Poll::Ready(part.map(|part| Ok::<_, Infallible>(Frame::data(part))))
        });
        let request = Request::post("/").body(StreamBody::new(parts)).unwrap();
        let app = async {
            let mut far = far.unwrap();
            let mut head = [0; 1024];
            assert!(far.read(&mut head).await.unwrap() > 0);
            resets.store(true, Relaxed);
            body.send(Bytes::from_static(b"some of it")).await.unwrap();
            written.notified().await;
            let answer = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n";
            far.write_all(answer).await.unwrap();
            far.flush().await.unwrap();
            std::future::pending::<Infallible>().await
        };
        let answer = tokio::select! {
            answer = sender.send_request(request) => answer.unwrap(),
            ended = connection => panic!("it ended without an answer: {ended:?}"),
            never = app => match never {},
        };
        assert_eq!(answer.status(), 413);
    }
}
