//! State of the API cache: for `/status`, for metrics, and in the log whenever it changes.
//!
//! A node is `pending` until it has a view of everything that it reads; then it follows, or leads. It is ready while that
//! view is complete and in touch with its source. It stays healthy without a source, since it serves the objects that it
//! has.

use super::{
    changes::any_changed,
    gateway_source::GatewaySource,
    membership::Membership,
    selected_source::{SelectedSource, SourceKind},
};
use crate::status::ApiCacheStatus;
use causeway_watch_cache::WatchCache;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::{sync::watch, time::sleep};
use tracing::info;

/// Time within which several changes are reported as one.
const TOGETHER: Duration = Duration::from_millis(100);

/// Reporter of the cache's state. Cheap to clone.
#[derive(Clone)]
pub(super) struct StatusReporter {
    pub(super) own: String,
    pub(super) pool: Arc<WatchCache>,
    pub(super) told: Membership,
    pub(super) at: watch::Receiver<Arc<SelectedSource>>,
    /// It knows the table that shows this.
    pub(super) gateway: Weak<GatewaySource>,
}

impl StatusReporter {
    /// Returns a function that reports the current state.
    pub(super) fn status(self) -> Box<dyn Fn() -> ApiCacheStatus + Send + Sync> {
        Box::new(move || self.now())
    }

    fn now(&self) -> ApiCacheStatus {
        let stores = self.pool.stores().iter();
        let resources: Vec<_> = stores.map(|store| store.status()).collect();
        let told = self.told.now();
        let pending = resources.iter().any(|resource| !resource.synced);
        let leads = told.pool.is_some() && told.leader.as_ref() == Some(&self.own);
        ApiCacheStatus {
            role: match (pending, leads) {
                (true, _) => "pending",
                (false, true) => "leader",
                (false, false) => "follower",
            },
            healthy: !pending,
            ready: resources.iter().all(|one| one.synced && one.lost.is_none()),
            pool: told.pool,
            leader: told.leader,
            reads_at: self.reads_at(),
            members: told.members.into_iter().map(|one| one.node).collect(),
            resources,
        }
    }

    fn reads_at(&self) -> Option<String> {
        match &self.at.borrow().who {
            SourceKind::Nobody => None,
            SourceKind::Gateway => self.gateway.upgrade()?.at(),
            SourceKind::Leader(member) | SourceKind::Neighbour(member) => Some(member.node.clone()),
        }
    }

    /// Says in the log what changes, for as long as it is polled.
    pub(super) async fn run(mut self) {
        let stores = self.pool.stores().iter();
        let mut changes: Vec<_> = stores.map(|store| store.changed()).collect();
        let mut told = self.told.changes();
        let mut said = None;
        loop {
            let now = self.now();
            let short = (now.role, now.ready);
            if said != Some(short) {
                let (role, ready, healthy) = (now.role, now.ready, now.healthy);
                let (leader, reads_at) = (now.leader, now.reads_at);
                info!(role, healthy, ready, leader, reads_at, "reading");
                said = Some(short);
            }
            tokio::select! {
                () = any_changed(&mut changes) => {}
                heard = told.changed() => if heard.is_err() {
                    return;
                },
                turned = self.at.changed() => if turned.is_err() {
                    return;
                },
            }
            sleep(TOGETHER).await;
            changes.iter_mut().for_each(watch::Receiver::mark_unchanged);
        }
    }
}
