//! Connection pool: idle connections to upstreams, and the tasks that drive all connections.
//!
//! Connections are grouped by tunnel, port and credentials. So none is used for another node, none of a tunnel that leaves, and
//! none with credentials that a reload has replaced. A connection's own task puts it into the pool and removes it; a request
//! takes the one that was used last. The pool also has the HTTP/2 connections, with the state of their upstream (`shared`). Each
//! worker has a list of its own for its nodes, so it shares no lock.

use super::{
    http1::{ConnState, Http1Connection},
    http2::UpstreamHttp2Pool,
    tls::UpstreamTls,
};
use crate::{proxy::StreamContext, state::TunnelId, worker::WorkerId};
use causeway_rt::task::TaskGroup;
use causeway_upstream::pool::Pool;
use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
    time::Duration,
};
use tracing::Span;

/// Key of interchangeable connections.
#[derive(Clone, Debug)]
pub(super) struct ConnectionPoolKey {
    worker: WorkerId,
    tunnel: TunnelId,
    port: u16,
    app: Arc<UpstreamTls>,
}

impl ConnectionPoolKey {
    pub(super) fn of(way: StreamContext<'_>, app: &Arc<UpstreamTls>) -> Self {
        Self {
            worker: way.proxy.worker,
            tunnel: way.id,
            port: way.route.target.port,
            app: app.clone(),
        }
    }
}

impl PartialEq for ConnectionPoolKey {
    fn eq(&self, other: &Self) -> bool {
        (self.tunnel, self.port) == (other.tunnel, other.port) && Arc::ptr_eq(&self.app, &other.app)
    }
}

impl Eq for ConnectionPoolKey {}

impl Hash for ConnectionPoolKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.tunnel, self.port, Arc::as_ptr(&self.app)).hash(state);
    }
}

/// Connections of one worker.
type WorkerPool = Pool<ConnectionPoolKey, Http1Connection, UpstreamHttp2Pool>;

/// Pool of the connections to upstreams.
pub(crate) struct ConnectionPool {
    /// By worker.
    pools: Vec<WorkerPool>,
    bound: Duration,
    tasks: TaskGroup,
}

impl ConnectionPool {
    /// Returns an empty pool for this many workers; an idle connection stays for `bound` at most.
    pub(crate) fn new(workers: usize, bound: Duration) -> Self {
        Self {
            pools: (0..workers.max(1)).map(|_| Pool::default()).collect(),
            bound,
            tasks: TaskGroup::default(),
        }
    }

    pub(super) fn bound(&self) -> Duration {
        self.bound
    }

    /// Runs the task of a connection, which ends with this pool at the latest.
    pub(super) fn spawn(&self, span: Span, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(span, task);
    }

    /// Takes this line away, if it lies here.
    pub(super) fn remove(&self, key: &ConnectionPoolKey, life: &Arc<ConnState>) -> bool {
        let removed = self
            .of(key)
            .remove(key, |line| Arc::ptr_eq(&line.life, life));
        self.sweep(key);
        removed
    }

    /// Lets no further stream onto this one of them.
    pub(super) fn forget(&self, key: &ConnectionPoolKey, number: u64) {
        self.of(key).shared(key).forget(number);
        self.sweep(key);
    }

    /// Removes the state of an upstream that has no connection any more.
    fn sweep(&self, key: &ConnectionPoolKey) {
        self.of(key).forget_shared(key, |shared| !shared.is_empty());
    }

    /// Returns the connections of the key's worker.
    pub(super) fn of(&self, key: &ConnectionPoolKey) -> &WorkerPool {
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
