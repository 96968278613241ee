//! State of the API cache: for `/status`, for metrics, and in the log whenever the state changes.
//!
//! A node is `pending` until it has a view of all its resources. After that it is a follower or the leader. It is ready while
//! the view is complete and connected with its source. It stays healthy without a source, because it serves the objects that
//! it has.

use super::{
    gateway_source::GatewaySource,
    membership::Membership,
    selected_source::{SelectedSource, SourceKind},
};
use crate::status::ApiCacheStatus;
use causeway_watch_cache::WatchCache;
use futures_util::future::select_all;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::{sync::watch, time::sleep};
use tracing::info;

/// Time within which several changes are reported as one.
const DEBOUNCE: Duration = Duration::from_millis(100);

/// Reporter of the cache's state. Cheap to clone.
#[derive(Clone)]
pub(super) struct StatusReporter {
    pub(super) node: String,
    pub(super) cache: Arc<WatchCache>,
    pub(super) membership: Membership,
    pub(super) selected: watch::Receiver<Arc<SelectedSource>>,
    /// Source that reads from gateways, for the name of the gateway. Weak, because the source leads to the status table,
    /// which owns this reporter.
    pub(super) gateway: Weak<GatewaySource>,
}

impl StatusReporter {
    /// Returns a function that reports the current state.
    pub(super) fn status(self) -> Box<dyn Fn() -> ApiCacheStatus + Send + Sync> {
        Box::new(move || self.current())
    }

    fn current(&self) -> ApiCacheStatus {
        let stores = self.cache.stores().iter();
        let resources: Vec<_> = stores.map(|store| store.status()).collect();
        let membership = self.membership.current();
        let pending = resources.iter().any(|resource| !resource.synced);
        let is_leader = membership.pool.is_some() && membership.leader.as_ref() == Some(&self.node);
        ApiCacheStatus {
            role: match (pending, is_leader) {
                (true, _) => "pending",
                (false, true) => "leader",
                (false, false) => "follower",
            },
            healthy: !pending,
            ready: resources.iter().all(|one| one.synced && one.lost.is_none()),
            pool: membership.pool,
            leader: membership.leader,
            reads_at: self.current_source(),
            members: membership.members.into_iter().map(|one| one.node).collect(),
            resources,
        }
    }

    fn current_source(&self) -> Option<String> {
        match &self.selected.borrow().kind {
            SourceKind::Unselected => None,
            SourceKind::Gateway => self.gateway.upgrade()?.gateway(),
            SourceKind::Leader(member) | SourceKind::Member(member) => Some(member.node.clone()),
        }
    }

    /// Logs changes of the state for as long as it is polled.
    pub(super) async fn run(mut self) {
        let stores = self.cache.stores().iter();
        let mut store_changes: Vec<_> = stores.map(|store| store.subscribe()).collect();
        let mut membership_changes = self.membership.changes();
        let mut last_logged = None;
        loop {
            let status = self.current();
            let summary = (status.role, status.ready);
            if last_logged != Some(summary) {
                let (role, ready, healthy) = (status.role, status.ready, status.healthy);
                let (leader, reads_at) = (status.leader, status.reads_at);
                info!(role, healthy, ready, leader, reads_at, "reading");
                last_logged = Some(summary);
            }
            tokio::select! {
                () = any_changed(&mut store_changes) => {}
                changed = membership_changes.changed() => if changed.is_err() {
                    return;
                },
                changed = self.selected.changed() => if changed.is_err() {
                    return;
                },
            }
            sleep(DEBOUNCE).await;
            store_changes
                .iter_mut()
                .for_each(watch::Receiver::mark_unchanged);
        }
    }
}

/// Waits until one of these stores has changed, or has lost or found its source.
pub(super) async fn any_changed(changes: &mut [watch::Receiver<u64>]) {
    if changes.is_empty() {
        return std::future::pending().await;
    }
    // The store lives at least as long as this task.
    let _ = select_all(changes.iter_mut().map(|one| Box::pin(one.changed()))).await;
}
