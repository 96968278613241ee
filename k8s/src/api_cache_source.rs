//! Source of the API cache from the cluster's API: a list and a watch of each resource, for as long as the gateway runs.
//!
//! 1. `causeway_watch_cache::reflect` fills a store from the API's responses. This module sends the requests and repeats them.
//! 2. Cached objects stay while the API is away, and clients learn the age of the cache.
//! 3. A missing permission is logged with its remedy: it is the only fault that does not end by waiting.

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

/// The longest pauses between tries: edges that read anew wait for these, too.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Interval at which the API is asked for its version: it may be upgraded while the gateway runs.
const UPGRADES: Duration = Duration::from_mins(5);

/// Source that fills the cache for edges from the cluster's API.
pub struct ApiCacheSource {
    /// The cluster's API.
    pub client: Client,
    /// Cache from which edges read.
    pub pool: Arc<WatchCache>,
}

impl ApiCacheSource {
    /// Runs the source. Never returns.
    pub async fn run(self) -> Infallible {
        let source = ApiClient::new(self.client);
        let stores = self.pool.stores().iter();
        let all = stores.map(|store| keep(store, &source).boxed());
        let releases = async {
            loop {
                source.release(&self.pool).await;
                sleep(UPGRADES).await;
            }
        };
        tokio::select! {
            // The future completes only if there are no resources.
            _ = join_all(all) => pending().await,
            never = releases => never,
            never = source.listen() => never,
        }
    }
}

/// Keeps one store in step with the API. Never returns.
async fn keep(store: &Store, source: &ApiClient) -> Infallible {
    let mut trouble = LogThrottle::new("reading the objects that edges may read");
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    let mut returns = source.returns();
    loop {
        returns.mark_unchanged();
        let ended = {
            let (mut following, mut changes) = (pin!(reflect(store, source)), store.changed());
            let mut well = false;
            loop {
                tokio::select! {
                    ended = &mut following => break ended,
                    Ok(()) = changes.changed(), if !well => {
                        well = store.status().lost.is_none();
                        if well {
                            trouble.over();
                            backoff.reset();
                        }
                    }
                }
            }
        };
        let (why, after) = explained(store.resource(), ended);
        trouble.say(&why);
        let pause = backoff.refused(after, rand::random());
        // If the API has asked for a pause, the gateway waits for that time.
        let returned = async {
            if after.is_none() && returns.changed().await.is_ok() {
                backoff.reset();
            } else {
                pending::<()>().await;
            }
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = returned => {}
        }
    }
}

/// Returns the reason why a resource is not followed, with its remedy, and the delay that the API asks for, if any.
fn explained(resource: &GroupVersionResource, ended: ReflectorError) -> (String, Option<Duration>) {
    let (why, after) = match ended {
        ReflectorError::Broken(why) | ReflectorError::Stale(why, _) => (why, None),
        ReflectorError::Refused(StatusCode::FORBIDDEN, why, after) => {
            let todo = "the gateway's ClusterRole must allow list and watch for it (deploy/components/api-cache)";
            (format!("{why}; {todo}"), after)
        }
        ReflectorError::Refused(StatusCode::NOT_FOUND, _, after) => {
            let why = "the cluster's API does not serve it; remove it from api_cache.resources";
            (why.to_owned(), after)
        }
        ReflectorError::Refused(status, why, after) => (format!("{status}: {why}"), after),
    };
    (format!("{resource}: {why}"), after)
}

#[cfg(test)]
mod tests;
