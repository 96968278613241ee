//! Recheck of open streams: whether their clients are still allowed to use them.
//!
//! A stream begins with two decisions: the identity of the client (`authn`), and its authorization (`authz`). Both are repeated
//! for each open stream within about a second of a change. Changes are those of listeners, policy, trusted roots, tokens,
//! revocations, and the labels and pool of its node. They are also repeated for a stream whose certificate or JWT is no longer
//! valid. A stream that would be refused now ends, with the refusal as its reason. A stream without a decision continues, so that
//! an outage of the cluster's API ends no session.

use super::{
    Proxy, ProxyState,
    access_log::AccessRecord,
    authn::{bearer, jwt::Expired},
    authz::{AuthzRequest, Destination},
    direct,
    response_body::FLUSH_TIMEOUT,
    route::Route,
};
use crate::{
    error::{Error, Reason},
    worker::WorkerId,
};
use arc_swap::ArcSwap;
use causeway_rt::task::TaskGroup;
use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use std::{sync::Arc, time::Duration};
use tokio::time::{MissedTickBehavior, interval, sleep};

/// Time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Number of streams that are checked before other streams of their worker are served.
const MAX_CONCURRENT_CHECKS: usize = 32;

/// Checks the open streams of one worker until the gateway stops.
pub async fn run_rechecks(shared: Arc<ProxyState>, worker: WorkerId, tasks: Arc<TaskGroup>) {
    let mut ticks = interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut pending_checks = FuturesUnordered::new();
    let mut labels_seen = 0;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            Some(()) = pending_checks.next() => continue,
        }
        let changes = shared.streams.generation();
        let (label_generation, relabelled) = shared.nodes.relabelled_since(labels_seen);
        labels_seen = label_generation;
        let is_due = |record: &AccessRecord| {
            let is_current = record.swap_decided_generation(changes) == changes;
            !is_current || record.has_expired_credential() || record.leads_to(&relabelled)
        };
        for (index, record) in shared
            .streams
            .select(worker, is_due)
            .into_iter()
            .enumerate()
        {
            if index % MAX_CONCURRENT_CHECKS == MAX_CONCURRENT_CHECKS - 1 {
                tokio::task::yield_now().await;
            }
            if record.set_checking(true) {
                // The pending decision may not include this change.
                record.request_recheck();
                continue;
            }
            let mut checking = Box::pin(check(&shared, worker, &tasks, record));
            // Most decisions do not wait, and a decision that waits does not delay others.
            if checking.as_mut().now_or_never().is_none() {
                pending_checks.push(checking);
            }
        }
    }
}

/// Repeats the decisions about a stream, and ends the stream if it is refused.
async fn check(
    shared: &Arc<ProxyState>,
    worker: WorkerId,
    tasks: &Arc<TaskGroup>,
    record: Arc<AccessRecord>,
) {
    let proxy = Proxy {
        shared: shared.clone(),
        listener: record.listener().latest(),
        worker,
        tasks: tasks.clone(),
    };
    match proxy.recheck_stream(&record).await {
        Ok(()) => {}
        Err(refusal) if refusal.reason == Reason::DependencyUnavailable => record.request_recheck(),
        Err(refusal) => {
            tracing::debug!(%refusal, "a stream was closed because its client is no longer authorized");
            record.terminate(&refusal);
            let open = Arc::downgrade(&record);
            drop(record);
            sleep(FLUSH_TIMEOUT).await;
            if let Some(record) = open.upgrade() {
                record.evict();
            }
            return;
        }
    }
    record.set_checking(false);
}

impl Proxy {
    async fn recheck_stream(&self, record: &AccessRecord) -> Result<(), Error> {
        let (Some(granted), Some((client, route))) =
            (record.granted_access(), record.client_and_route())
        else {
            return Ok(());
        };
        let connection = record.connection();
        let port = route.as_ref().map_or(granted.port, Route::port);
        if let Some(certificate) = &client.certificate {
            let tls = self.listener.tls.as_ref().map(ArcSwap::load);
            let trust = tls.as_ref().map(|tls| &tls.trust);
            certificate.prove(trust, self.listener.disconnect_expired)?;
        }
        // Results of another listener are not used.
        bearer::forget(&connection.credentials.last_token);
        let expired = if self.listener.disconnect_expired {
            Expired::Reject
        } else {
            Expired::AcceptFor(&client)
        };
        let identified = self
            .identify_with(connection, (granted.authorization.as_ref(), expired), port)
            .await;
        let (client, dependency_unavailable) = match identified {
            Err(error) if error.reason == Reason::DependencyUnavailable => {
                client.is_in_time(self.listener.disconnect_expired)?;
                (client, Some(error))
            }
            identified => (identified?, None),
        };
        record.set_client(&client);
        let direct_address = record.direct_address();
        if let Some((address, _)) = direct_address {
            direct::check(&self.listener, &self.shared.nodes, address)?;
        }
        let direct_destination = direct_address
            .as_ref()
            .map(|(address, pod)| Destination::Direct(*address, pod));
        // If neither is known, the stream has not been authorized yet.
        let Some(destination) = route.as_ref().map(Destination::Node).or(direct_destination) else {
            return dependency_unavailable.map_or(Ok(()), Err);
        };
        let (method, path) = record.method_and_path(granted.action);
        let authz_request = AuthzRequest {
            client: &client,
            remote_address: connection.peer,
            destination,
            action: granted.action,
            method,
            path,
        };
        self.authorize(&authz_request, record).await?;
        dependency_unavailable.map_or(Ok(()), Err)
    }
}
