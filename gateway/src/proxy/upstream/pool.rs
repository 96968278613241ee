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
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tracing::Span;

/// Maximum number of idle connections to one upstream of one tunnel: as many as an edge pools for an upstream.
const MOST_IDLE: usize = 256;

/// Key of interchangeable connections.
#[derive(Clone, Debug)]
pub(super) struct ConnectionPoolKey {
    core: WorkerId,
    tunnel: TunnelId,
    port: u16,
    app: Arc<UpstreamTls>,
}

impl ConnectionPoolKey {
    pub(super) fn of(way: StreamContext<'_>, app: &Arc<UpstreamTls>) -> Self {
        Self {
            core: way.proxy.core,
            tunnel: way.id,
            port: way.route.target.port,
            app: app.clone(),
        }
    }
}

/// Connections of one tunnel to one port, each with its credentials.
type IdleHttp1 = HashMap<(TunnelId, u16), Vec<(Arc<UpstreamTls>, Http1Connection)>>;

/// HTTP/2 connections of one tunnel to one port, which requests share, each with its credentials.
type Http2Connections = HashMap<(TunnelId, u16), Vec<(Arc<UpstreamTls>, Arc<UpstreamHttp2Pool>)>>;

/// Pool of the connections to upstreams.
pub(crate) struct ConnectionPool {
    idle: Vec<Mutex<IdleHttp1>>,
    shared: Vec<Mutex<Http2Connections>>,
    bound: Duration,
    tasks: TaskGroup,
}

impl ConnectionPool {
    /// Returns an empty pool for this many workers; an idle connection stays for `bound` at most.
    pub(crate) fn new(cores: usize, bound: Duration) -> Self {
        Self {
            idle: (0..cores.max(1)).map(|_| Mutex::default()).collect(),
            shared: (0..cores.max(1)).map(|_| Mutex::default()).collect(),
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

    /// Returns the connection that was used last, if one is alive.
    pub(super) fn take(&self, key: &ConnectionPoolKey) -> Option<Http1Connection> {
        let mut idle = self.idle(key);
        let lines = idle.get_mut(&(key.tunnel, key.port))?;
        let mut found = None;
        while let Some(at) = lines
            .iter()
            .rposition(|(app, _)| Arc::ptr_eq(app, &key.app))
        {
            let (_, line) = lines.remove(at);
            if line.is_alive() {
                found = Some(line);
                break;
            }
        }
        if lines.is_empty() {
            idle.remove(&(key.tunnel, key.port));
        }
        found
    }

    /// Puts a connection into the pool, unless the pool has enough of them.
    pub(super) fn put(&self, key: &ConnectionPoolKey, line: Http1Connection) -> bool {
        let mut idle = self.idle(key);
        let lines = idle.entry((key.tunnel, key.port)).or_default();
        let room = lines.len() < MOST_IDLE;
        if room {
            lines.push((key.app.clone(), line));
        }
        room
    }

    /// Takes this line away, if it lies here.
    pub(super) fn remove(&self, key: &ConnectionPoolKey, life: &Arc<ConnState>) -> bool {
        let mut idle = self.idle(key);
        let Some(lines) = idle.get_mut(&(key.tunnel, key.port)) else {
            drop(idle);
            self.sweep(key);
            return false;
        };
        let at = lines
            .iter()
            .position(|(_, line)| Arc::ptr_eq(&line.life, life));
        let removed = at.map(|at| lines.remove(at));
        if lines.is_empty() {
            idle.remove(&(key.tunnel, key.port));
        }
        drop(idle);
        self.sweep(key);
        removed.is_some()
    }

    /// The connections that requests share.
    pub(super) fn shared(&self, key: &ConnectionPoolKey) -> Arc<UpstreamHttp2Pool> {
        let mut all = self.connections(key);
        let here = all.entry((key.tunnel, key.port)).or_default();
        if let Some((_, shared)) = here.iter().find(|(app, _)| Arc::ptr_eq(app, &key.app)) {
            return shared.clone();
        }
        let shared = Arc::<UpstreamHttp2Pool>::default();
        here.push((key.app.clone(), shared.clone()));
        shared
    }

    /// Lets no further stream onto this one of them.
    pub(super) fn forget(&self, key: &ConnectionPoolKey, number: u64) {
        self.shared(key).forget(number);
        self.sweep(key);
    }

    /// Removes the state of an upstream that has no connection any more. A request that is about to dial one holds the state that
    /// it will use.
    fn sweep(&self, key: &ConnectionPoolKey) {
        let mut all = self.connections(key);
        let Some(here) = all.get_mut(&(key.tunnel, key.port)) else {
            return;
        };
        here.retain(|(_, shared)| Arc::strong_count(shared) > 1 || !shared.is_empty());
        if here.is_empty() {
            all.remove(&(key.tunnel, key.port));
        }
    }

    fn connections(&self, key: &ConnectionPoolKey) -> MutexGuard<'_, Http2Connections> {
        let list = &self.shared[key.core.0 % self.shared.len()];
        list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn idle(&self, key: &ConnectionPoolKey) -> MutexGuard<'_, IdleHttp1> {
        let list = &self.idle[key.core.0 % self.idle.len()];
        list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ConnectionPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionPool")
            .field("lines", &self.tasks.len())
            .finish_non_exhaustive()
    }
}
