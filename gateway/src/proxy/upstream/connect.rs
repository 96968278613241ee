//! TLS to a verified upstream, over a CONNECT stream of the node's tunnel.
//!
//! Both versions of HTTP begin on such a connection. A connection that was abandoned or is dropped early is reset. Otherwise an
//! upstream could take an abandoned request for a complete one (design trap 3).

use super::{
    error, pin,
    pool::ConnectionPoolKey,
    request_body::ConnState,
    tls::{self, UpstreamTls},
};
use crate::{
    error::Error,
    proxy::{context::StreamContext, relay},
};
use causeway_tunnel::{
    io_observer::{IoObserver, ObservedIo},
    stream_io::StreamIo,
};
use causeway_upstream::connection::{Alpn, UpstreamIo};
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, timeout_at},
};

/// Returns the key of the connections that a stream may use.
pub(super) fn pool_key(way: StreamContext<'_>, app: &Arc<UpstreamTls>) -> ConnectionPoolKey {
    ConnectionPoolKey {
        worker: way.proxy.worker,
        tunnel: way.id,
        node: way.route.node.clone(),
        port: way.route.target.port,
        app: app.clone(),
    }
}

/// Connection that ends normally only if it was not abandoned.
pub(super) type GuardedIo = ObservedIo<UpstreamIo<StreamIo>, ResetOnDrop>;

/// Connection without any request yet.
pub(super) struct UpstreamConnection {
    pub(super) guarded: GuardedIo,
    pub(super) conn_state: Arc<ConnState>,
}

impl UpstreamConnection {
    /// Opens a stream to the target of the route and does the handshake on it.
    ///
    /// # Errors
    /// The rejection of the edge, or the reason why TLS failed or the upstream is not trusted.
    pub(super) async fn open(
        ctx: StreamContext<'_>,
        upstream_tls: &UpstreamTls,
        alpn: Alpn,
    ) -> Result<Self, Error> {
        let shared = &ctx.proxy.shared;
        let deadline = Instant::now() + shared.timeouts.connect;
        let (sender, receiver) = relay::open_tcp_stream(ctx, None, shared.timeouts.connect).await?;
        let name = tls::server_name(&ctx.route.node).ok_or_else(|| {
            error::broken_upstream(ctx.route, "cannot be requested by this node's name")
        })?;
        let connector = upstream_tls.connector(alpn);
        let eviction = receiver.eviction_handle();
        let connecting = connector.connect(name, StreamIo::new(sender, receiver));
        let tls = match timeout_at(deadline, connecting).await {
            Ok(Ok(tls)) => tls,
            Ok(Err(error)) => return Err(error::tls_error(ctx.route, &error)),
            Err(_) => {
                return Err(error::upstream_timeout(
                    ctx.route,
                    "did not complete TLS in time",
                ));
            }
        };
        let conn_state = Arc::new(ConnState {
            key: pin::ensure_pinned(ctx.route, upstream_tls.pins(), (&tls, deadline)).await?,
            eviction,
            ..ConnState::default()
        });
        let guarded = ObservedIo::new(UpstreamIo::tls(tls), ResetOnDrop(conn_state.clone()));
        let connection = Self {
            guarded,
            conn_state,
        };
        shared
            .metrics
            .count_upstream_connection(connection.chose_http2());
        Ok(connection)
    }

    /// Whether the upstream chose HTTP/2.
    pub(super) fn chose_http2(&self) -> bool {
        self.guarded.get_ref().chose_http2()
    }
}

/// Observer that closes TLS normally only if the connection was not abandoned. The observer then waits for the upstream's end,
/// since a connection that is dropped before it is reset.
#[derive(Debug)]
pub(super) struct ResetOnDrop(Arc<ConnState>);

impl IoObserver for ResetOnDrop {
    fn poll_shutdown<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        io: &mut S,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        if self.0.cancel_token.is_cancelled() {
            // hyper may reach this point before its task is notified.
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        ready!(Pin::new(&mut *io).poll_shutdown(cx))?;
        loop {
            let mut buffer = [0; 1024];
            let mut read_buf = ReadBuf::new(&mut buffer);
            // The result of the read does not matter.
            let read = ready!(Pin::new(&mut *io).poll_read(cx, &mut read_buf));
            if read.is_err() || read_buf.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}
