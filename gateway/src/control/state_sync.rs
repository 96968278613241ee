//! Synchronization of the data directory with the state that gateways share, and what follows from changes of other gateways:
//! the tables are loaded again, and tunnels of nodes that are revoked now are closed.

use super::{
    ca_rotation::CaReloadFn,
    drain::{Readiness, ReadinessBlock},
    node_sync::NodeSync,
};
use crate::shared_state::{Applied, SharedState, SyncError};
use causeway_rt::log_throttle::FailureThrottle;
use std::{convert::Infallible, sync::Arc, time::Duration};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};

/// Time to wait for further changes after the first one.
const BATCH_INTERVAL: Duration = Duration::from_millis(200);
/// Interval of attempts while the engine does not answer.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Interval at which the state is compared if no change is reported.
const FULL_INTERVAL: Duration = Duration::from_mins(5);
/// Time for which a gateway with a copy of the state waits for the engine before it is ready.
const READY_WITHOUT_ENGINE: Duration = Duration::from_secs(30);

/// Task that synchronizes the state of a gateway.
#[derive(Clone, Debug)]
pub struct StateSync {
    /// The shared state.
    pub shared: SharedState,
    /// Node state of the gateway.
    pub node_sync: NodeSync,
    /// Loads a CA that has changed.
    pub reload_ca: CaReloadFn,
    /// State of `/readyz`.
    pub readiness: Readiness,
}

impl StateSync {
    /// Runs the synchronization. Clients wait until it has succeeded once; at a gateway with a copy of the state, for a limited
    /// time. Never returns.
    pub async fn run(self: Arc<Self>) -> Infallible {
        let engine = self.shared.engine().to_string();
        let (begun, has_copy) = (Instant::now(), self.shared.has_copy().await);
        let pending = format!("the shared state has not been loaded from {engine} yet");
        let mut block = Some(self.readiness.hold(pending));
        let (mut fault, mut skipped) = (None, None);
        let mut throttle = FailureThrottle::default();
        loop {
            let synchronized = self.shared.synchronize().await;
            let applied = self.apply(synchronized).await;
            // A fault of the CA does not stop the other entries.
            self.report_skipped(&mut skipped);
            match applied {
                Ok(()) => {
                    if fault.take().is_some() {
                        tracing::info!(engine, "the shared state is synchronized again");
                    }
                    throttle = FailureThrottle::default();
                    block = None;
                }
                Err(why) => {
                    if throttle.should_log(&why) {
                        tracing::warn!(
                            engine,
                            why,
                            "the shared state cannot be synchronized; retrying"
                        );
                    }
                    let reason = format!("the shared state cannot be synchronized: {why}");
                    if let Some(block) = &block {
                        block.set_reason(&*reason);
                    }
                    fault = Some(self.readiness.report_fault(reason));
                    if has_copy && begun.elapsed() >= READY_WITHOUT_ENGINE {
                        self.shared.continue_with_copy();
                        block = None;
                    }
                    sleep(RETRY_INTERVAL).await;
                    continue;
                }
            }
            // A timeout only means that nothing was reported.
            let _ = timeout(FULL_INTERVAL, self.shared.changed()).await;
            sleep(BATCH_INTERVAL).await;
        }
    }

    /// Reports the entries that this version cannot read as one fault, and logs it if it has changed.
    fn report_skipped(&self, reported: &mut Option<(String, ReadinessBlock)>) {
        let faults = self.shared.skipped();
        let Some(first) = faults.first() else {
            *reported = None;
            return;
        };
        let fault = format!(
            "{} entries of the shared state cannot be read and are left unchanged, for example: {first}",
            faults.len()
        );
        if reported.as_ref().is_none_or(|(last, _)| *last != fault) {
            tracing::warn!(engine = %self.shared.engine(), ?faults, "{fault}");
            let block = self.readiness.report_fault(&*fault);
            *reported = Some((fault, block));
        }
    }

    /// Synchronizes at once, for a command, and applies the changes of other gateways.
    ///
    /// # Errors
    /// The reason for the log.
    pub async fn synchronize_now(&self) -> Result<(), String> {
        self.apply(self.shared.synchronize_now().await).await
    }

    /// Loads the tables again, if synchronizations have changed the data directory.
    async fn apply(&self, synchronized: Result<(), SyncError>) -> Result<(), String> {
        let mut unapplied = Unapplied::take(&self.shared);
        let loaded = self.load(unapplied.applied).await;
        if loaded.is_ok() {
            unapplied.applied = Applied::default();
        }
        synchronized.map_err(|error| error.to_string())?;
        loaded
    }

    async fn load(&self, applied: Applied) -> Result<(), String> {
        if applied.ca {
            let CaReloadFn(reload) = self.reload_ca.clone();
            let reloaded = spawn_blocking(move || reload()).await;
            reloaded.map_err(|error| error.to_string())??;
        }
        if applied.nodes
            && let Some(Err(error)) = self.node_sync.refresh_detached().await
        {
            return Err(error.to_string());
        }
        Ok(())
    }
}

/// Changes that are being applied. Dropping the value gives back those that are not applied, so that none is lost with the
/// future of a command that disconnects.
struct Unapplied<'a> {
    shared: &'a SharedState,
    applied: Applied,
}

impl<'a> Unapplied<'a> {
    fn take(shared: &'a SharedState) -> Self {
        let applied = std::mem::take(&mut *shared.unapplied());
        Self { shared, applied }
    }
}

impl Drop for Unapplied<'_> {
    fn drop(&mut self) {
        let mut unapplied = self.shared.unapplied();
        unapplied.nodes |= self.applied.nodes;
        unapplied.ca |= self.applied.ca;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{control::tests::world::World, shared_state::tests::MemoryEngine};

    #[tokio::test(start_paused = true)]
    async fn a_fault_of_the_ca_hides_no_entry_that_cannot_be_read() {
        let (world, engine) = (World::start(), MemoryEngine::default());
        let shared = SharedState::new(Arc::new(engine.clone()), world.store.clone(), true);
        shared.synchronize().await.unwrap();
        let set = |key: &str, value: &str| {
            let (key, value) = (key.to_owned(), value.to_owned());
            engine.with(|entries| entries.insert(key, value)).unwrap();
        };
        set("ca", "{}");
        let sync = Arc::new(StateSync {
            shared,
            node_sync: world.roll(),
            reload_ca: CaReloadFn(Arc::new(|| Ok(false))),
            readiness: world.readiness.clone(),
        });
        let has_fault = |part: &str| {
            let faults = world.readiness.faults();
            faults.iter().any(|fault| fault.contains(part))
        };
        let wait_for = async |part: &str, expected: bool| {
            while has_fault(part) != expected {
                sleep(Duration::from_millis(100)).await;
            }
        };
        let steps = async {
            wait_for("the entry `ca` cannot be parsed", true).await;
            set("node/edge-2", "{}");
            wait_for("node/edge-2", true).await;
            let removed = engine.with(|entries| entries.remove("node/edge-2"));
            assert!(removed.unwrap().is_some());
            wait_for("node/edge-2", false).await;
            assert!(has_fault("the entry `ca` cannot be parsed"));
        };
        tokio::select! {
            never = sync.clone().run() => match never {},
            done = timeout(Duration::from_mins(1), steps) => done.unwrap(),
        }
    }
}
