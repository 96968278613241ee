//! Client of the cluster's API as a source of an API cache, with a check that the API still responds.
//!
//! A watch without changes is silent for a minute. A watch whose other end is gone without a close is silent for longer. So an
//! API that has sent nothing for 5 s is probed, at almost no cost. An API that does not respond for 5 s is away: its watches are
//! ended, and the age of the cache counts from the last response. This holds for the API as a whole: if one watch alone loses its
//! connection, others show that the API responds, until its read times out (5 min).

use crate::client::error_message;
use bytes::Bytes;
use causeway_watch_cache::{ListWatch, SourceResponse, WatchCache};
use futures_util::{StreamExt, TryStreamExt, future::BoxFuture, stream::unfold};
use http::Request;
use http_body_util::BodyExt;
use kube::{Client, client::Body};
use std::{
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

/// Time limit for the API's version.
const BOUND: Duration = Duration::from_secs(10);
/// Silence of the API after which it is probed.
const SILENT: Duration = Duration::from_secs(5);
/// Time limit of a probe, in two tries.
const LIVES: Duration = Duration::from_secs(5);
/// Pause between two failed probes.
const AGAIN: Duration = Duration::from_secs(1);
/// Path of the probe. The API answers it under any load: no priority and fairness delays it.
const ASKED: &str = "/livez";

/// Client of the cluster's API. Cheap to clone.
#[derive(Clone)]
pub(super) struct ApiClient {
    client: Client,
    line: Arc<Mutex<ApiHealth>>,
}

/// Health of the API.
struct ApiHealth {
    heard: Instant,
    /// Token that ends the requests that were sent before the API was found to be away.
    away: CancellationToken,
    /// The last request got no answer.
    failed: bool,
    /// Counts answers after a request that got none.
    returns: watch::Sender<u64>,
}

impl ApiClient {
    pub(super) fn new(client: Client) -> Self {
        let line = ApiHealth {
            heard: Instant::now(),
            away: CancellationToken::new(),
            failed: false,
            returns: watch::Sender::default(),
        };
        Self {
            client,
            line: Arc::new(Mutex::new(line)),
        }
    }

    fn line(&self) -> MutexGuard<'_, ApiHealth> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hears(&self) {
        let mut line = self.line();
        line.heard = Instant::now();
        if std::mem::take(&mut line.failed) {
            line.returns.send_modify(|returns| *returns += 1);
        }
    }

    /// Returns a receiver that changes whenever the API responds again after a failure.
    pub(super) fn returns(&self) -> watch::Receiver<u64> {
        self.line().returns.subscribe()
    }

    /// Probes the API whenever it has been silent for a while.
    pub(super) async fn listen(&self) -> Infallible {
        loop {
            let heard = self.line().heard;
            sleep_until(heard + SILENT).await;
            if self.line().heard == heard && !self.lives().await {
                // The reader receives the error.
                let away = {
                    let mut line = self.line();
                    line.failed = true;
                    std::mem::take(&mut line.away)
                };
                away.cancel();
                sleep(AGAIN).await;
            }
        }
    }

    /// Returns whether the API responds in time. An immediate failure proves nothing about open watches: a token that is not
    /// available, a full table of files. If several servers are behind one address, the probe may reach another one.
    async fn lives(&self) -> bool {
        let heard = self.line().heard;
        let end = Instant::now() + LIVES;
        while Instant::now() < end && self.line().heard == heard {
            let again = Instant::now() + AGAIN;
            let asking = async {
                let answer = self.ask(ASKED.to_owned()).await?;
                // Read to its end, so that the connection can be reused.
                answer.body.try_collect::<Vec<_>>().await
            };
            if !matches!(timeout(LIVES / 2, asking).await, Ok(Ok(_))) {
                sleep_until(again).await;
            }
        }
        self.line().heard > heard
    }

    async fn ask(&self, path_and_query: String) -> Result<SourceResponse, String> {
        let request = Request::get(path_and_query).header("accept", "application/json");
        let request = request.body(Body::empty());
        let request = request.map_err(|error| error.to_string())?;
        let asked = self.client.send(request).await;
        let answer = asked.map_err(|error| {
            self.line().failed = true;
            error_message(&error)
        })?;
        self.hears();
        let away = self.line().away.clone();
        let (head, body) = answer.into_parts();
        let reading = (body.into_data_stream(), away, self.clone());
        let body = unfold(reading, async |(mut body, away, api)| {
            let chunk = match away.run_until_cancelled(body.next()).await {
                None => Err(gone()),
                Some(chunk) => chunk?.map_err(|error| error.to_string()),
            };
            if chunk.is_ok() {
                api.hears();
            }
            Some((chunk, (body, away, api)))
        });
        Ok(SourceResponse {
            status: head.status,
            headers: head.headers,
            body: body.boxed(),
        })
    }

    /// Has the cache report the API's version as its own. Without it, the cache reports the oldest version that serves the same.
    pub(super) async fn release(&self, pool: &WatchCache) {
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
            Ok(Err(why)) => tracing::debug!(why, "the cluster's API did not report its version"),
            Err(_) => tracing::debug!("the cluster's API did not report its version in time"),
        }
    }
}

fn gone() -> String {
    format!("the cluster's API sends nothing and did not answer {ASKED} within {LIVES:?}")
}

impl ListWatch for ApiClient {
    fn get(&self, path_and_query: String) -> BoxFuture<'_, Result<SourceResponse, String>> {
        Box::pin(self.ask(path_and_query))
    }

    fn silent(&self) -> Duration {
        self.line().heard.elapsed()
    }

    fn is_pool(&self) -> bool {
        false
    }
}
