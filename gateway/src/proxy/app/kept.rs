//! Lines to apps that are kept for the next request, and the tasks that drive all lines.
//!
//! They lie by tunnel, port and credentials: never one node's for another, none of a tunnel that leaves, none made with
//! what a reload has replaced. A line's own task lays it by and takes it away; whoever asks takes the one that was used
//! last. Connections of HTTP/2 lie here too, with what is known of their app (`shared`). A list for each core, of which the nodes are: locks are its own.

use super::{
    line::{Life, Line},
    shared::Shared,
    tls::AppTls,
};
use crate::{core::CoreId, proxy::Way, state::TunnelId};
use causeway_tunnel::task::Tasks;
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tracing::Span;

/// Idle lines to one app of one tunnel at most: as many as an edge keeps for an app.
const MOST_IDLE: usize = 256;

/// Which lines are alike.
#[derive(Clone, Debug)]
pub(super) struct Key {
    core: CoreId,
    tunnel: TunnelId,
    port: u16,
    app: Arc<AppTls>,
}

impl Key {
    pub(super) fn of(way: Way<'_>, app: &Arc<AppTls>) -> Self {
        Self {
            core: way.proxy.core,
            tunnel: way.id,
            port: way.route.target.port,
            app: app.clone(),
        }
    }
}

/// Lines of one tunnel to one port, each by the credentials that it was made with.
type Idle = HashMap<(TunnelId, u16), Vec<(Arc<AppTls>, Line)>>;

/// The same of connections that requests share.
type Connections = HashMap<(TunnelId, u16), Vec<(Arc<AppTls>, Arc<Shared>)>>;

/// What is kept.
pub(crate) struct Kept {
    idle: Vec<Mutex<Idle>>,
    shared: Vec<Mutex<Connections>>,
    bound: Duration,
    tasks: Tasks,
}

impl Kept {
    /// Nothing yet, on this many cores; what is idle is kept for `bound` at most.
    pub(crate) fn new(cores: usize, bound: Duration) -> Self {
        Self {
            idle: (0..cores.max(1)).map(|_| Mutex::default()).collect(),
            shared: (0..cores.max(1)).map(|_| Mutex::default()).collect(),
            bound,
            tasks: Tasks::default(),
        }
    }

    pub(super) fn bound(&self) -> Duration {
        self.bound
    }

    /// Runs the task of a line, which ends with all of this at the latest.
    pub(super) fn spawn(&self, span: Span, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(span, task);
    }

    /// The line that was used last, if one is alive.
    pub(super) fn take(&self, key: &Key) -> Option<Line> {
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

    /// Lays a line by, unless there are enough.
    pub(super) fn put(&self, key: &Key, line: Line) -> bool {
        let mut idle = self.idle(key);
        let lines = idle.entry((key.tunnel, key.port)).or_default();
        let room = lines.len() < MOST_IDLE;
        if room {
            lines.push((key.app.clone(), line));
        }
        room
    }

    /// Takes this line away, if it lies here.
    pub(super) fn remove(&self, key: &Key, life: &Arc<Life>) -> bool {
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
    pub(super) fn shared(&self, key: &Key) -> Arc<Shared> {
        let mut all = self.connections(key);
        let here = all.entry((key.tunnel, key.port)).or_default();
        if let Some((_, shared)) = here.iter().find(|(app, _)| Arc::ptr_eq(app, &key.app)) {
            return shared.clone();
        }
        let shared = Arc::<Shared>::default();
        here.push((key.app.clone(), shared.clone()));
        shared
    }

    /// Lets no further stream onto this one of them.
    pub(super) fn forget(&self, key: &Key, number: u64) {
        self.shared(key).forget(number);
        self.sweep(key);
    }

    /// Forgets what is known of an app that has no connection any more. A request that is about to dial one holds what it
    /// will put there.
    fn sweep(&self, key: &Key) {
        let mut all = self.connections(key);
        let Some(here) = all.get_mut(&(key.tunnel, key.port)) else {
            return;
        };
        here.retain(|(_, shared)| Arc::strong_count(shared) > 1 || !shared.is_empty());
        if here.is_empty() {
            all.remove(&(key.tunnel, key.port));
        }
    }

    fn connections(&self, key: &Key) -> MutexGuard<'_, Connections> {
        let list = &self.shared[key.core.0 % self.shared.len()];
        list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn idle(&self, key: &Key) -> MutexGuard<'_, Idle> {
        let list = &self.idle[key.core.0 % self.idle.len()];
        list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept")
            .field("lines", &self.tasks.len())
            .finish_non_exhaustive()
    }
}
