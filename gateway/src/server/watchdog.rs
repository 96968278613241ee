//! Liveness of a gateway, for the service that supervises the process.
//!
//! The check runs a short task on the runtime of each worker. If a worker hangs, its nodes are not served, while all other
//! workers continue, and so do the health checks that they answer.

use crate::{
    control::drain::Readiness,
    state::Registry,
    worker::{WorkerId, Workers},
};
use causeway_rt::task::TaskGroup;
use std::time::Duration;
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};
use tracing::info_span;

/// Liveness checks of a gateway from outside. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Watchdog {
    pub(super) workers: Workers,
    pub(super) registry: Registry,
    pub(super) readiness: Readiness,
}

impl Watchdog {
    /// Waits for an answer of every worker. Returns the workers that do not answer within `wait_limit`.
    pub async fn unresponsive_workers(&self, wait_limit: Duration) -> Vec<WorkerId> {
        let deadline = Instant::now() + wait_limit;
        // Dropping this group cancels the probes that have not run.
        let tasks = TaskGroup::default();
        let ping = |worker| {
            let (responder, response) = oneshot::channel();
            let answer = async move {
                let _ = responder.send(());
            };
            tasks.spawn_on(self.workers.runtime(worker), info_span!("pulse"), answer);
            (worker, response)
        };
        let pings: Vec<_> = self.workers.all().map(ping).collect();
        let mut silent = Vec::new();
        for (worker, response) in pings {
            if !matches!(timeout_at(deadline, response).await, Ok(Ok(()))) {
                silent.push(worker);
            }
        }
        silent
    }

    /// Whether all listeners are open and the gateway does not drain.
    pub fn is_ready(&self) -> bool {
        self.readiness.not_ready_reason().is_none()
    }

    /// Returns the number of nodes that have a tunnel here.
    pub fn nodes(&self) -> usize {
        self.registry.connected_nodes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const SOON: Duration = Duration::from_mins(2);

    #[tokio::test]
    async fn a_worker_that_hangs_is_named_and_the_others_are_not() {
        let workers = Workers::start(3).unwrap();
        let pulse = Watchdog {
            registry: Registry::new(&workers),
            readiness: Readiness::default(),
            workers,
        };
        assert_eq!(pulse.unresponsive_workers(SOON).await, []);
        let ((hangs, hung), (release, held)) = (mpsc::channel(), mpsc::channel::<()>());
        let tasks = TaskGroup::default();
        tasks.spawn_on(
            pulse.workers.runtime(WorkerId(1)),
            info_span!("hang"),
            async move {
                hangs.send(()).unwrap();
                let _ = held.recv();
            },
        );
        hung.recv().unwrap();
        // On a busy machine another worker may be late as well, but not always.
        let only_it = async {
            loop {
                let silent = pulse.unresponsive_workers(Duration::from_secs(3)).await;
                assert!(silent.contains(&WorkerId(1)), "{silent:?}");
                if silent.len() == 1 {
                    return;
                }
            }
        };
        timeout_at(Instant::now() + SOON, only_it).await.unwrap();
        release.send(()).unwrap();
        assert_eq!(pulse.unresponsive_workers(SOON).await, []);
    }
}
