//! The cluster's API → what edges read: a list and a watch of each resource, for as long as the gateway runs.
//!
//! 1. `causeway_watch_cache::follow` fills a store by what the API answers; here is only how that is asked, and when again.
//! 2. What was read stays while the API is away, and says to readers how old it is.
//! 3. A right that is missing is named with what to do: nothing else ends by waiting.

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
/// How often it is asked for its version: it is upgraded while we run.
const UPGRADES: Duration = Duration::from_mins(5);

/// Fills what edges read from the cluster's API.
pub struct ApiCacheSource {
    /// The cluster's API.
    pub client: Client,
    /// What edges read.
    pub pool: Arc<WatchCache>,
}

impl ApiCacheSource {
    /// Never ends.
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
            // Only of no resources it is done.
            _ = join_all(all) => pending().await,
            never = releases => never,
            never = source.listen() => never,
        }
    }
}

/// Keeps one store in step.
async fn keep(store: &Store, source: &ApiClient) -> Infallible {
    let mut trouble = LogThrottle::new("reading what edges may read");
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
        // Where the API has asked for a pause it gets that.
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

/// Why a resource is not followed, with what to do, and when to come again.
fn explained(resource: &GroupVersionResource, ended: ReflectorError) -> (String, Option<Duration>) {
    let (why, after) = match ended {
        ReflectorError::Broken(why) | ReflectorError::Stale(why, _) => (why, None),
        ReflectorError::Refused(StatusCode::FORBIDDEN, why, after) => {
            let todo = "the gateway's ClusterRole has to allow list and watch of it (deploy/components/readers)";
            (format!("{why}; {todo}"), after)
        }
        ReflectorError::Refused(StatusCode::NOT_FOUND, _, after) => {
            let why = "the cluster's API does not serve it; take it out of readers.resources";
            (why.to_owned(), after)
        }
        ReflectorError::Refused(status, why, after) => (format!("{status}: {why}"), after),
    };
    (format!("{resource}: {why}"), after)
}

#[cfg(test)]
mod tests;
