//! Response of an upstream: its head, and the content behind it. The body of a response holds its connection, which returns
//! to the pool after the last byte.

use super::{
    http1_pool::{ConnectionPool, PooledConnection},
    upstream::{Upstream, UpstreamIo, UpstreamKey},
};
use bytes::Bytes;
use causeway_tunnel::StreamReceiver;
use causeway_upstream::http2_pool::StreamPermit;
use http::Response;
use http_body::{Body as _, Frame};
use hyper::body::Incoming;
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

/// Response of an upstream.
pub(super) struct UpstreamResponse {
    pub(super) head: Response<()>,
    pub(super) then: ResponseTail,
}

/// Content behind the head of a response.
pub(super) enum ResponseTail {
    /// Body of the response.
    Body(ResponseBody),
    /// Bytes in both directions.
    Bytes(Box<UpstreamIo>, StreamReceiver),
}

/// Body of a response, with the connection that it is read from.
pub(super) enum ResponseBody {
    Http1 {
        key: UpstreamKey,
        connection: Box<PooledConnection>,
        incoming: Incoming,
    },
    Http2 {
        incoming: Incoming,
        _permit: Arc<StreamPermit>,
    },
}

impl ResponseBody {
    pub(super) fn http1(
        upstream: &Upstream,
        connection: Box<PooledConnection>,
        incoming: Incoming,
    ) -> Self {
        Self::Http1 {
            key: upstream.id.clone(),
            connection,
            incoming,
        }
    }

    pub(super) fn http2(permit: Arc<StreamPermit>, incoming: Incoming) -> Self {
        Self::Http2 {
            incoming,
            _permit: permit,
        }
    }

    /// Whether the body is empty or has ended.
    pub(super) fn is_end(&self) -> bool {
        match self {
            Self::Http1 { incoming, .. } | Self::Http2 { incoming, .. } => incoming.is_end_stream(),
        }
    }

    /// Returns the connection to the pool, after the last byte.
    pub(super) async fn return_connection(self, pool: &ConnectionPool) {
        if let Self::Http1 {
            key: app,
            connection: line,
            incoming,
        } = self
        {
            drop(incoming);
            pool.checkin(app, line).await;
        }
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Http2 { incoming, .. } => Pin::new(incoming).poll_frame(cx),
            Self::Http1 {
                connection,
                incoming,
                ..
            } => connection.poll_frame(incoming, cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_end()
    }
}
