//! Check of open streams: whether their clients may still have them.
//!
//! A stream begins with two decisions: the identity of the client (`authn`), and its authorization (`authz`). Both are made again
//! for each open stream within a second or so of a change of listeners, policy, trusted roots, tokens, revocations or the labels
//! and pool of its node, and for a stream whose certificate or JWT no longer counts. A stream that would be refused now ends,
//! with the refusal as its reason. A stream without a decision goes on: an outage of the cluster's API ends no session.

use super::{
    Proxy, ProxyState,
    access_log::AccessRecord,
    authn::{bearer, jwt::Expired},
    authz::{AuthzRequest, Destination},
    direct,
    response_body::FLUSH_TIMEOUT,
};
use crate::{
    error::{Error, Reason},
    worker::WorkerId,
};
use arc_swap::ArcSwap;
use causeway_rt::task::TaskGroup;
use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use http::{HeaderMap, header::AUTHORIZATION};
use std::{sync::Arc, time::Duration};
use tokio::time::{MissedTickBehavior, interval, sleep};

/// Time between two checks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Streams that are checked before others on their worker have a turn.
const MAX_CONCURRENT_CHECKS: usize = 32;

/// Checks the open streams of one worker for as long as the gateway runs.
pub async fn run(shared: Arc<ProxyState>, worker: WorkerId, tasks: Arc<TaskGroup>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut waiting = FuturesUnordered::new();
    let mut labels_seen = 0;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            Some(()) = waiting.next() => continue,
        }
        let changes = shared.streams.changes();
        let (labels, relabelled) = shared.nodes.relabelled_since(labels_seen);
        labels_seen = labels;
        let due = |record: &AccessRecord| {
            let seen = record.decided_at(changes) == changes;
            !seen || record.has_lapsed() || record.leads_to(&relabelled)
        };
        for (index, record) in shared.streams.select(worker, due).into_iter().enumerate() {
            if index % MAX_CONCURRENT_CHECKS == MAX_CONCURRENT_CHECKS - 1 {
                tokio::task::yield_now().await;
            }
            if record.checking(true) {
                // The decision that is under way may not have seen this change.
                record.decide_anew();
                continue;
            }
            let mut checked = Box::pin(check(&shared, worker, &tasks, record));
            // Most decisions do not wait, and a decision that waits delays no other.
            if checked.as_mut().now_or_never().is_none() {
                waiting.push(checked);
            }
        }
    }
}

/// Decides about a stream again, and ends it if it is refused.
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
    match proxy.decide_again(&record).await {
        Ok(()) => {}
        Err(refusal) if refusal.reason == Reason::DependencyUnavailable => record.decide_anew(),
        Err(refusal) => {
            tracing::debug!(%refusal, "a stream was closed because its client is no longer authorized");
            record.end(&refusal);
            let open = Arc::downgrade(&record);
            drop(record);
            sleep(FLUSH_TIMEOUT).await;
            if let Some(record) = open.upgrade() {
                record.evict();
            }
            return;
        }
    }
    record.checking(false);
}

impl Proxy {
    async fn decide_again(&self, record: &AccessRecord) -> Result<(), Error> {
        let Some((allowed, client, route)) = record.allowed() else {
            return Ok(());
        };
        let mut fields = HeaderMap::new();
        if let Some(authorization) = &allowed.authorization {
            fields.insert(AUTHORIZATION, authorization.clone());
        }
        let connection = record.connection();
        let port = route.as_ref().map(|route| route.target.port);
        let port = port.or(allowed.port);
        if let Some(certificate) = &client.certificate {
            let tls = self.listener.tls.as_ref().map(ArcSwap::load);
            let trust = tls.as_ref().map(|tls| &tls.trust);
            certificate.prove(trust, self.listener.disconnect_expired)?;
        }
        // Results of another listener are not used.
        bearer::forget(&connection.credentials.last_token);
        let expired = if self.listener.disconnect_expired {
            Expired::Refused
        } else {
            Expired::Taken(&client)
        };
        let identified = self.identify_by(connection, (&fields, expired), port).await;
        let (client, dependency_unavailable) = match identified {
            Err(error) if error.reason == Reason::DependencyUnavailable => {
                client.is_in_time(self.listener.disconnect_expired)?;
                (client, Some(error))
            }
            identified => (identified?, None),
        };
        record.client(&client);
        if let Some(address) = record.direct() {
            direct::check(&self.listener, &self.shared.nodes, address)?;
        }
        let dialled = record.direct().map(Destination::Direct);
        // If neither is known yet, the stream has not been authorized yet.
        let Some(destination) = route.as_ref().map(Destination::Node).or(dialled) else {
            return dependency_unavailable.map_or(Ok(()), Err);
        };
        let ask = AuthzRequest {
            client: &client,
            from: connection.peer,
            destination,
            act: allowed.act,
            method: &allowed.method,
            path: &allowed.path,
        };
        self.authorize(&ask, record).await?;
        dependency_unavailable.map_or(Ok(()), Err)
    }
}
