//! Connections to upstreams: the pool of idle ones, and the tasks that drive all of them.
//!
//! Connections are grouped by tunnel, port and credentials. A connection is therefore never used for another node, after its
//! tunnel leaves, or with credentials that a reload has replaced. A connection's own task puts it into the pool and removes it. A
//! request uses the connection that was used last. The pool also has the HTTP/2 connections, with the state of their upstream
//! (`shared`). Each worker has its own list for its nodes, so it shares no lock.

use super::{
    request_body::{ConnState, UpstreamRequestBody},
    tls::UpstreamTls,
};
use crate::{state::TunnelId, worker::WorkerId};
use causeway_certs::{Fingerprint, NodeName};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::Tunnel;
use causeway_upstream::{
    http1::Answering,
    http2_pool::{self, Http2Pool},
    pool::Pool,
};
use hyper::{
    Request, Response,
    body::Incoming,
    client::conn::{TrySendError, http1},
};
use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::sync::mpsc;
use tracing::Span;

/// Key of interchangeable connections.
#[derive(Clone, Debug)]
pub(super) struct ConnectionPoolKey {
    pub(super) worker: WorkerId,
    pub(super) tunnel: TunnelId,
    /// The node: a link to a peer leads to several nodes.
    pub(super) node: NodeName,
    pub(super) port: u16,
    pub(super) app: Arc<UpstreamTls>,
}

impl PartialEq for ConnectionPoolKey {
    fn eq(&self, other: &Self) -> bool {
        (self.tunnel, &self.node, self.port) == (other.tunnel, &other.node, other.port)
            && Arc::ptr_eq(&self.app, &other.app)
    }
}

impl Eq for ConnectionPoolKey {}

impl Hash for ConnectionPoolKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.tunnel, &self.node, self.port, Arc::as_ptr(&self.app)).hash(state);
    }
}

/// Connection that can send a request.
#[derive(Debug)]
pub(super) struct Http1Connection {
    pub(super) sender: http1::SendRequest<UpstreamRequestBody>,
    pub(super) life: Arc<ConnState>,
    pub(super) answering: Answering,
    /// Channel that returns the connection to its task when it becomes idle.
    pub(super) back: mpsc::Sender<Http1Connection>,
}

impl Http1Connection {
    /// Whether the connection can send a request, as far as is known.
    pub(super) fn is_alive(&self) -> bool {
        !self.sender.is_closed() && !self.life.cancel_token.is_cancelled()
    }

    pub(super) fn into_in_use(self) -> InUse {
        InUse(Some(self))
    }
}

/// Connection in use by a request. Dropping it resets it.
#[derive(Debug)]
pub(super) struct InUse(Option<Http1Connection>);

impl InUse {
    /// Sends the request, and waits for the head of the response.
    pub(super) async fn send_request(
        &mut self,
        request: Request<UpstreamRequestBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<UpstreamRequestBody>>> {
        let line = self.0.as_mut().expect("a line that is asked on is there");
        line.answering.reset();
        line.sender.try_send_request(request).await
    }

    /// Whether the upstream closed the connection without a byte of a response to the last request, which failed with `error`.
    pub(super) fn was_closed_without_response(&self, error: &hyper::Error) -> bool {
        let connection = self.0.as_ref();
        connection.is_some_and(|line| line.answering.closed_unanswered(error))
    }

    pub(super) fn conn_state(&self) -> Option<&Arc<ConnState>> {
        self.0.as_ref().map(|line| &line.life)
    }

    /// Whether the upstream accepted no part of a request body for too long.
    pub(super) fn is_stalled(&self) -> bool {
        self.conn_state()
            .is_some_and(|life| life.is_stalled.load(Relaxed))
    }

    /// Returns the connection to the pool after a complete response.
    pub(super) fn return_to_pool(&mut self) {
        if let Some(connection) = self.0.take() {
            let back = connection.back.clone();
            // A connection whose task has ended needs no idle handling.
            let _ = back.try_send(connection);
        }
    }

    /// Records that the connection has switched from HTTP to another protocol.
    pub(super) fn mark_upgraded(&mut self) {
        self.0 = None;
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(line) = &self.0 {
            line.life.cancel_token.cancel();
        }
    }
}

/// HTTP/2 connections to an upstream of one tunnel.
pub(super) type UpstreamHttp2Pool = Http2Pool<Http2Connection>;

/// HTTP/2 connection to an upstream.
#[derive(Clone, Debug)]
pub(super) struct Http2Connection {
    pub(super) tunnel: Tunnel,
    /// Key by which the upstream was verified, if it is verified by its key.
    pub(super) key: Option<Fingerprint>,
}

impl http2_pool::MultiplexedConnection for Http2Connection {
    fn has_capacity(&self, taken: usize, allowed: usize) -> bool {
        // The body of a request may continue after its response.
        taken.max(self.tunnel.load().open_streams()) < allowed
    }
}

/// Permit to open a stream.
pub(super) type UpstreamStreamPermit = http2_pool::StreamSlot<Http2Connection>;

/// Connection pool of one worker.
type WorkerPool = Pool<ConnectionPoolKey, Http1Connection, UpstreamHttp2Pool>;

/// Pool of the connections to upstreams.
pub(crate) struct ConnectionPool {
    /// Pools by worker.
    pools: Vec<WorkerPool>,
    idle_timeout: Duration,
    tasks: TaskGroup,
}

impl ConnectionPool {
    /// Returns an empty pool for this many workers. A connection is idle for at most `idle_timeout`.
    pub(crate) fn new(workers: usize, idle_timeout: Duration) -> Self {
        Self {
            pools: (0..workers.max(1)).map(|_| Pool::default()).collect(),
            idle_timeout,
            tasks: TaskGroup::default(),
        }
    }

    pub(super) fn idle_timeout(&self) -> Duration {
        self.idle_timeout
    }

    /// Spawns the task of a connection, which ends no later than this pool.
    pub(super) fn spawn(&self, span: Span, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(span, task);
    }

    /// Removes the connection with this state from the pool. Returns whether the pool contained it.
    pub(super) fn remove(&self, key: &ConnectionPoolKey, conn_state: &Arc<ConnState>) -> bool {
        let was_removed = self
            .worker_pool(key)
            .remove(key, |line| Arc::ptr_eq(&line.life, conn_state));
        self.remove_empty_state(key);
        was_removed
    }

    /// Removes the HTTP/2 connection with this number, so that it gets no further streams.
    pub(super) fn close_to_streams(&self, key: &ConnectionPoolKey, number: u64) {
        self.worker_pool(key).shared(key).remove(number);
        self.remove_empty_state(key);
    }

    /// Removes the state of an upstream without connections.
    fn remove_empty_state(&self, key: &ConnectionPoolKey) {
        self.worker_pool(key)
            .forget_shared(key, |shared| !shared.is_empty());
    }

    /// Returns the connections of the key's worker.
    pub(super) fn worker_pool(&self, key: &ConnectionPoolKey) -> &WorkerPool {
        &self.pools[key.worker.0 % self.pools.len()]
    }
}

impl fmt::Debug for ConnectionPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionPool")
            .field("lines", &self.tasks.len())
            .finish_non_exhaustive()
    }
}
