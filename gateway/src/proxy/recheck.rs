//! Open streams, and the check whether their clients may still have them.
//!
//! A stream begins with two decisions: the identity of the client (`authn`), and its authorization (`authz`). Both are made again
//! for each open stream within a second or so of a change of listeners, policy, trusted roots, tokens, revocations or the labels
//! and pool of its node, and for a stream whose certificate or JWT no longer counts. A stream that would be refused now ends,
//! with the refusal as its reason. A stream without a decision goes on: an outage of the cluster's API ends no session.

use super::{
    Proxy, ProxyState,
    access_log::AccessRecord,
    authn::{bearer, jwt::Expired},
    authz::{Action, AuthzRequest, Destination},
    direct,
    listener::ClientConnection,
    response_body::FLUSH_TIMEOUT,
};
use crate::{
    error::{Error, Reason},
    worker::WorkerId,
};
use arc_swap::ArcSwap;
use causeway_rt::task::TaskGroup;
use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use http::{HeaderMap, HeaderValue, Method, Request, header::AUTHORIZATION};
use slab::Slab;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Release},
        },
    },
    time::Duration,
};
use tokio::time::{MissedTickBehavior, interval, sleep};

/// Time between two checks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Streams that are checked before others on their worker have a turn.
const MAX_CONCURRENT_CHECKS: usize = 32;

/// The open streams of a gateway, by the worker that serves them.
#[derive(Debug)]
pub struct OpenStreams {
    workers: Box<[Mutex<Slab<Weak<AccessRecord>>>]>,
    /// Rises with each change that may refuse a stream which is open.
    changes: AtomicU64,
}

/// The place of a stream among those that are open.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamIndex(WorkerId, usize);

impl OpenStreams {
    /// No streams, of this many workers.
    pub fn new(workers: usize) -> Self {
        Self {
            workers: (0..workers).map(|_| Mutex::default()).collect(),
            changes: AtomicU64::new(0),
        }
    }

    /// Has all open streams checked again.
    pub fn changed(&self) {
        self.changes.fetch_add(1, Release);
    }

    pub(super) fn insert(&self, worker: WorkerId, record: &Arc<AccessRecord>) -> StreamIndex {
        StreamIndex(worker, self.worker(worker).insert(Arc::downgrade(record)))
    }

    pub(super) fn remove(&self, StreamIndex(worker, index): StreamIndex) {
        self.worker(worker).try_remove(index);
    }

    fn worker(&self, worker: WorkerId) -> MutexGuard<'_, Slab<Weak<AccessRecord>>> {
        let streams = &self.workers[worker.0 % self.workers.len()];
        streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the streams of a worker of which this holds.
    fn select(
        &self,
        worker: WorkerId,
        wanted: impl Fn(&AccessRecord) -> bool,
    ) -> Vec<Arc<AccessRecord>> {
        // Outside the lock: the last holder of a record removes it.
        let all: Vec<_> = self
            .worker(worker)
            .iter()
            .map(|(_, open)| open.clone())
            .collect();
        let open = all.iter().filter_map(Weak::upgrade);
        open.filter(|record| wanted(record)).collect()
    }
}

/// The request that a stream was allowed for.
#[derive(Debug)]
pub(super) struct GrantedAccess {
    pub(super) act: Action,
    pub(super) method: Method,
    /// The path of the request, without its query.
    pub(super) path: String,
    /// The port that a CONNECT names.
    pub(super) port: Option<u16>,
    /// The credential of the request, where it counts.
    pub(super) authorization: Option<HeaderValue>,
}

impl GrantedAccess {
    pub(super) fn new<B>(act: Action, request: &Request<B>, connection: &ClientConnection) -> Self {
        // Copied: a field may be a slice of a whole read buffer.
        let copied = |value: &HeaderValue| {
            let mut copy = HeaderValue::from_bytes(value.as_bytes()).ok()?;
            copy.set_sensitive(true);
            Some(copy)
        };
        let credential = request.headers().get(AUTHORIZATION);
        let credential = credential.filter(|_| matches!(connection.credentials.client, Ok(None)));
        Self {
            act,
            method: request.method().clone(),
            path: match act {
                Action::Connect => String::new(),
                Action::Request | Action::Upgrade => request.uri().path().to_owned(),
            },
            port: request.uri().port_u16(),
            authorization: credential.and_then(copied),
        }
    }

    /// Returns the access of a session of a TCP listener.
    pub(super) fn session() -> Self {
        Self {
            act: Action::Connect,
            method: Method::CONNECT,
            path: String::new(),
            port: None,
            authorization: None,
        }
    }
}

impl ProxyState {
    /// Returns the number of changes after which open streams are decided about again.
    pub(super) fn changes(&self) -> u64 {
        let changes = self.streams.changes.load(Acquire);
        changes.wrapping_add(self.authorizer.changes())
    }
}

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
        let changes = shared.changes();
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
