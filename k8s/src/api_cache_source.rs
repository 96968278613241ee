//! Source of the API cache from the cluster's API: a list and a watch of each resource, as long as the gateway runs.
//!
//! 1. `causeway_watch_cache::reflect` fills a store from the API's responses. This module sends the requests and repeats
//!    them.
//! 2. Cached objects stay while the API does not respond, and clients receive the age of the cache.
//! 3. A missing permission is logged with its remedy: it is the only error that does not end by waiting.

mod client;

use crate::log_throttle::LogThrottle;
use causeway_rt::backoff::Backoff;
use causeway_watch_cache::{GroupVersionResource, ReflectorError, Store, WatchCache, reflect};
use client::ApiClient;
use futures_util::future::{FutureExt, join_all};
use http::StatusCode;
use kube::Client;
use std::{convert::Infallible, future::pending, pin::pin, sync::Arc, time::Duration};
use tokio::time::sleep;

/// Maximum pauses between attempts: while the API does not respond, and while it refuses. Edges that list again wait for
/// these, too.
const BACKOFF_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Interval at which the API's version is requested, since the API may be upgraded while the gateway runs.
const VERSION_INTERVAL: Duration = Duration::from_mins(5);

/// Source that fills the cache for edges from the cluster's API.
pub(crate) struct ApiCacheSource {
    /// The cluster's API.
    pub client: Client,
    /// Cache from which edges read.
    pub cache: Arc<WatchCache>,
}

impl ApiCacheSource {
    /// Runs the source. Never returns.
    pub(crate) async fn run(self) -> Infallible {
        let source = ApiClient::new(self.client);
        let stores = self.cache.stores().iter();
        let reflectors = stores.map(|store| sync_store(store, &source).boxed());
        let version_refresh = async {
            loop {
                source.refresh_version(&self.cache).await;
                sleep(VERSION_INTERVAL).await;
            }
        };
        tokio::select! {
            // The future completes only if there are no resources.
            _ = join_all(reflectors) => pending().await,
            never = version_refresh => never,
            never = source.run_probes() => never,
        }
    }
}

/// Synchronizes one store with the API. Never returns.
async fn sync_store(store: &Store, source: &ApiClient) -> Infallible {
    let mut failure_log = LogThrottle::new("reading the objects that edges may read");
    let mut backoff = Backoff::new(BACKOFF_RANGE.0, BACKOFF_RANGE.1);
    let mut recoveries = source.subscribe_recoveries();
    loop {
        recoveries.mark_unchanged();
        let reflect_error = {
            let (mut reflection, mut changes) = (pin!(reflect(store, source)), store.subscribe());
            let mut is_synced = false;
            loop {
                tokio::select! {
                    ended = &mut reflection => break ended,
                    Ok(()) = changes.changed(), if !is_synced => {
                        is_synced = store.status().lost.is_none();
                        if is_synced {
                            failure_log.log_recovery();
                            backoff.reset();
                        }
                    }
                }
            }
        };
        let (why, retry_after) = describe_error(store.resource(), reflect_error);
        failure_log.log_failure(&why);
        let pause = backoff.refused(retry_after, rand::random());
        // If the API has requested a pause, the gateway waits for that time.
        let recovery = async {
            if retry_after.is_none() && recoveries.changed().await.is_ok() {
                backoff.reset();
            } else {
                pending::<()>().await;
            }
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = recovery => {}
        }
    }
}

/// Returns the reason for which a resource is not followed, with its remedy, and the delay that the API requests, if any.
fn describe_error(
    resource: &GroupVersionResource,
    error: ReflectorError,
) -> (String, Option<Duration>) {
    let (why, retry_after) = match error {
        ReflectorError::Broken(why) | ReflectorError::Stale(why, _) => (why, None),
        ReflectorError::Refused(StatusCode::FORBIDDEN, why, retry_after) => {
            let remedy = "the gateway's ClusterRole must allow list and watch for it (deploy/components/api-cache)";
            (format!("{why}; {remedy}"), retry_after)
        }
        ReflectorError::Refused(StatusCode::NOT_FOUND, _, retry_after) => {
            let why = "the cluster's API does not serve it; remove it from api_cache.resources";
            (why.to_owned(), retry_after)
        }
        ReflectorError::Refused(status, why, retry_after) => {
            (format!("{status}: {why}"), retry_after)
        }
    };
    (format!("{resource}: {why}"), retry_after)
}

#[cfg(test)]
mod tests;
