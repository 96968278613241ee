//! Workers: threads with one current-thread runtime each, and one more for tasks that visit all nodes.
//!
//! A node belongs to the worker with the index hash(node) mod the number of workers, and so do its tunnels. The sockets of its
//! clients belong to the same worker if the `ClientHello` or the original destination names the node. A request then never
//! changes threads. This is the only file that starts threads.

use causeway_certs::NodeName;
use causeway_rt::turns::Turns;
use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash, Hasher},
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

/// Index of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkerId(pub usize);

/// Number of TLS handshakes of edges, and of clients, that a worker answers between two polls of any other task. Each takes about a third of a millisecond of CPU
/// time.
const HANDSHAKES_PER_TURN: usize = 8;

/// All workers of a gateway. Dropping the last clone ends their threads.
#[derive(Clone, Debug)]
pub struct Workers {
    list: Arc<[Worker]>,
    /// Runtime of tasks that visit all nodes.
    control: Handle,
    /// The threads; `None` if the only worker is the current runtime.
    threads: Option<Arc<WorkerThreads>>,
}

#[derive(Debug)]
struct Worker {
    runtime: Handle,
    edge_turns: Turns,
    client_turns: Turns,
}

impl Worker {
    fn new(runtime: Handle) -> Self {
        Self {
            runtime,
            edge_turns: Turns::new(HANDSHAKES_PER_TURN),
            client_turns: Turns::new(HANDSHAKES_PER_TURN),
        }
    }
}

#[derive(Debug)]
struct WorkerThreads {
    stop: CancellationToken,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Workers {
    /// Starts `count` threads; 0 means one for each CPU that this process may use.
    ///
    /// # Errors
    /// If the system provides no further thread or no event queue.
    pub fn start(count: usize) -> io::Result<Self> {
        let count = match count {
            0 => std::thread::available_parallelism()?.get(),
            count => count,
        };
        let mut workers = Vec::with_capacity(count);
        let threads = WorkerThreads {
            stop: CancellationToken::new(),
            threads: Mutex::default(),
        };
        for index in 0..count {
            let runtime = threads.spawn(format!("worker-{index}"))?;
            workers.push(Worker::new(runtime));
        }
        Ok(Self {
            list: workers.into(),
            control: threads.spawn("control".to_owned())?,
            threads: Some(Arc::new(threads)),
        })
    }

    /// Returns the current runtime as the only worker, for tests and for small embedders.
    pub fn on_current_runtime() -> Self {
        Self {
            list: Arc::new([Worker::new(Handle::current())]),
            control: Handle::current(),
            threads: None,
        }
    }

    /// Ends the threads that were started, and all tasks on them. The tasks are dropped before this function returns, which
    /// resets their streams.
    pub fn stop(&self) {
        if let Some(threads) = &self.threads {
            threads.end();
        }
    }

    /// Returns the worker of a node.
    pub fn worker_of(&self, node: &NodeName) -> WorkerId {
        let mut hasher = DefaultHasher::new();
        node.hash(&mut hasher);
        let count = u64::try_from(self.list.len()).unwrap_or(1);
        WorkerId(usize::try_from(hasher.finish() % count).unwrap_or(0))
    }

    /// Returns the runtime of a worker.
    pub fn runtime(&self, worker: WorkerId) -> &Handle {
        &self.worker(worker).runtime
    }

    /// Returns the runtime of tasks that visit all nodes, for which requests and tunnels on a worker would wait.
    pub fn control(&self) -> &Handle {
        &self.control
    }

    /// Returns the turns of TLS handshakes at the tunnel port on a worker.
    pub fn edge_turns(&self, worker: WorkerId) -> &Turns {
        &self.worker(worker).edge_turns
    }

    /// Returns the turns of TLS handshakes of clients on a worker.
    pub fn client_turns(&self, worker: WorkerId) -> &Turns {
        &self.worker(worker).client_turns
    }

    fn worker(&self, worker: WorkerId) -> &Worker {
        &self.list[worker.0 % self.list.len()]
    }

    /// Returns all workers.
    pub fn all(&self) -> impl Iterator<Item = WorkerId> + use<> {
        (0..self.list.len()).map(WorkerId)
    }
}

impl WorkerThreads {
    /// Starts a thread with a runtime of its own.
    fn spawn(&self, name: String) -> io::Result<Handle> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (handle, stop) = (runtime.handle().clone(), self.stop.clone());
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || runtime.block_on(stop.cancelled()))?;
        self.all().push(thread);
        Ok(handle)
    }

    fn all(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        self.stop.cancel();
        let current_thread = std::thread::current().id();
        let threads = std::mem::take(&mut *self.all());
        for thread in threads {
            // A task of the worker itself may drop the last clone.
            if thread.thread().id() != current_thread {
                // A worker that panicked has already logged the panic.
                let _ = thread.join();
            }
        }
    }
}

impl Drop for WorkerThreads {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_keeps_its_worker_and_nodes_spread() {
        let workers = Workers::start(2).unwrap();
        let mut seen = [0; 2];
        for index in 0..200 {
            let node = NodeName::parse(&format!("edge-{index}")).unwrap();
            assert_eq!(workers.worker_of(&node), workers.worker_of(&node));
            seen[workers.worker_of(&node).0] += 1;
        }
        assert!(seen.iter().all(|count| *count > 60), "{seen:?}");
    }

    #[test]
    fn each_worker_runs_on_its_own_thread() {
        let workers = Workers::start(2).unwrap();
        let ids: Vec<_> = workers
            .all()
            .map(|worker| {
                let (sender, receiver) = std::sync::mpsc::channel();
                #[allow(clippy::disallowed_methods, reason = "a test")]
                workers.runtime(worker).spawn(async move {
                    sender.send(std::thread::current().id()).unwrap();
                });
                receiver.recv().unwrap()
            })
            .collect();
        assert_ne!(ids[0], ids[1]);
    }
}
