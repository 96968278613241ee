//! The cluster's API → what edges read: a list and a watch of each resource, for as long as the gateway runs.
//!
//! 1. `causeway_pool::follow` fills a store by what the API answers; here is only how that is asked, and when again.
//! 2. What was read stays while the API is away, and says to readers how old it is.
//! 3. A right that is missing is named with what to do: nothing else ends by waiting.

use crate::{client::said, trouble::Trouble};
use bytes::Bytes;
use causeway_pool::{Answer, Ended, Pool, Resource, Source, Store, follow};
use causeway_tunnel::backoff::Backoff;
use futures_util::{
    StreamExt, TryStreamExt,
    future::{BoxFuture, FutureExt, join_all},
};
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use kube::{Client, client::Body};
use std::{convert::Infallible, future::pending, pin::pin, sync::Arc, time::Duration};
use tokio::time::{sleep, timeout};

/// The longest pauses between tries: edges that read anew wait for these, too.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How long the API may take to say its version.
const BOUND: Duration = Duration::from_secs(10);
/// How often it is asked for its version: it is upgraded while we run.
const UPGRADES: Duration = Duration::from_mins(5);

/// Fills what edges read from the cluster's API.
pub struct Follower {
    /// The cluster's API.
    pub client: Client,
    /// What edges read.
    pub pool: Arc<Pool>,
}

impl Follower {
    /// Never ends.
    pub async fn run(self) -> Infallible {
        let source = Api(self.client);
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
        }
    }
}

/// Keeps one store in step.
async fn keep(store: &Store, source: &Api) -> Infallible {
    let mut trouble = Trouble::new("reading what edges may read");
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    loop {
        let ended = {
            let (mut following, mut changes) = (pin!(follow(store, source)), store.changed());
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
        sleep(backoff.refused(after, rand::random())).await;
    }
}

/// Why a resource is not followed, with what to do, and when to come again.
fn explained(resource: &Resource, ended: Ended) -> (String, Option<Duration>) {
    let (why, after) = match ended {
        Ended::Broken(why) | Ended::Stale(why) => (why, None),
        Ended::Refused(StatusCode::FORBIDDEN, why, after) => {
            let todo = "the gateway's ClusterRole has to allow list and watch of it (deploy/components/readers)";
            (format!("{why}; {todo}"), after)
        }
        Ended::Refused(StatusCode::NOT_FOUND, _, after) => {
            let why = "the cluster's API does not serve it; take it out of readers.resources";
            (why.to_owned(), after)
        }
        Ended::Refused(status, why, after) => (format!("{status}: {why}"), after),
    };
    (format!("{resource}: {why}"), after)
}

/// The cluster's API as what a pool is filled from.
struct Api(Client);

impl Api {
    async fn ask(&self, path_and_query: String) -> Result<Answer, String> {
        let request = Request::get(path_and_query).header("accept", "application/json");
        let request = request.body(Body::empty());
        let request = request.map_err(|error| error.to_string())?;
        let answer = self.0.send(request).await.map_err(|error| said(&error))?;
        let (head, body) = answer.into_parts();
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            body: body
                .into_data_stream()
                .map_err(|error| error.to_string())
                .boxed(),
        })
    }

    /// Has the pool say the API's version as its own. Without it, it says the oldest that serves the same.
    async fn release(&self, pool: &Pool) {
        let asked = async {
            let answer = self.ask("/version".to_owned()).await?;
            if !answer.status.is_success() {
                return Err(answer.status.to_string());
            }
            let chunks: Vec<Bytes> = answer.body.try_collect().await?;
            Ok(Bytes::from(chunks.concat()))
        };
        match timeout(BOUND, asked).await {
            Ok(Ok(json)) => pool.release(json),
            Ok(Err(why)) => tracing::debug!(why, "the cluster's API does not say its version"),
            Err(_) => tracing::debug!("the cluster's API does not say its version in time"),
        }
    }
}

impl Source for Api {
    fn get(&self, path_and_query: String) -> BoxFuture<'_, Result<Answer, String>> {
        Box::pin(self.ask(path_and_query))
    }

    fn is_pool(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
