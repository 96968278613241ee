//! Client of the cluster's API as a source of an API cache, with a check that the API still responds.
//!
//! A watch without changes is silent for a minute. A watch whose peer disappeared without a close is silent for longer. So an
//! API that has sent nothing for 5 s is probed, at almost no cost. An API that does not respond for 5 s counts as
//! unavailable: its watches are ended, and the age of the cache counts from the last response. This applies to the API as a
//! whole. If only one watch loses its connection, others show that the API responds, until the read of that watch times out
//! (5 min).

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
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence of the API after which it is probed.
const PROBE_AFTER: Duration = Duration::from_secs(5);
/// Time limit of a probe, which makes two attempts.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two failed probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Path of the probe. The API responds to it under any load: API priority and fairness does not delay it.
const PROBE_PATH: &str = "/livez";

/// Client of the cluster's API. Cheap to clone.
#[derive(Clone)]
pub(super) struct ApiClient {
    client: Client,
    health: Arc<Mutex<ApiHealth>>,
}

/// Health of the API.
struct ApiHealth {
    last_response: Instant,
    /// Token that ends the requests that were sent before the API was found to be unavailable.
    cancel_token: CancellationToken,
    /// Whether the last request got no response.
    last_request_failed: bool,
    /// Number of responses after a request that got none.
    recoveries: watch::Sender<u64>,
}

impl ApiClient {
    pub(super) fn new(client: Client) -> Self {
        let health = ApiHealth {
            last_response: Instant::now(),
            cancel_token: CancellationToken::new(),
            last_request_failed: false,
            recoveries: watch::Sender::default(),
        };
        Self {
            client,
            health: Arc::new(Mutex::new(health)),
        }
    }

    fn lock_health(&self) -> MutexGuard<'_, ApiHealth> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_response(&self) {
        let mut health = self.lock_health();
        health.last_response = Instant::now();
        if std::mem::take(&mut health.last_request_failed) {
            health.recoveries.send_modify(|returns| *returns += 1);
        }
    }

    /// Returns a receiver that changes whenever the API responds again after a failure.
    pub(super) fn subscribe_recoveries(&self) -> watch::Receiver<u64> {
        self.lock_health().recoveries.subscribe()
    }

    /// Probes the API whenever it has been silent for a while.
    pub(super) async fn run_probes(&self) -> Infallible {
        loop {
            let last_response = self.lock_health().last_response;
            sleep_until(last_response + PROBE_AFTER).await;
            if self.lock_health().last_response == last_response && !self.probe().await {
                // The reader receives the error.
                let stale_token = {
                    let mut health = self.lock_health();
                    health.last_request_failed = true;
                    std::mem::take(&mut health.cancel_token)
                };
                stale_token.cancel();
                sleep(PROBE_INTERVAL).await;
            }
        }
    }

    /// Whether the API responds in time. An immediate error proves nothing about open watches: it may come from a missing
    /// token or a full file table. If several servers are behind one address, the probe may reach another one.
    async fn probe(&self) -> bool {
        let last_response = self.lock_health().last_response;
        let deadline = Instant::now() + PROBE_TIMEOUT;
        while Instant::now() < deadline && self.lock_health().last_response == last_response {
            let next_attempt = Instant::now() + PROBE_INTERVAL;
            let probe_request = async {
                let response = self.send_get(PROBE_PATH.to_owned()).await?;
                // Read to its end, so that the connection can be reused.
                response.body.try_collect::<Vec<_>>().await
            };
            if !matches!(timeout(PROBE_TIMEOUT / 2, probe_request).await, Ok(Ok(_))) {
                sleep_until(next_attempt).await;
            }
        }
        self.lock_health().last_response > last_response
    }

    async fn send_get(&self, path_and_query: String) -> Result<SourceResponse, String> {
        let request = Request::get(path_and_query).header("accept", "application/json");
        let request = request.body(Body::empty());
        let request = request.map_err(|error| error.to_string())?;
        let result = self.client.send(request).await;
        let response = result.map_err(|error| {
            self.lock_health().last_request_failed = true;
            error_message(&error)
        })?;
        self.record_response();
        let cancel_token = self.lock_health().cancel_token.clone();
        let (head, body) = response.into_parts();
        let stream_state = (body.into_data_stream(), cancel_token, self.clone());
        let body = unfold(stream_state, async |(mut body, cancel_token, api)| {
            let chunk = match cancel_token.run_until_cancelled(body.next()).await {
                None => Err(silence_error()),
                Some(chunk) => chunk?.map_err(|error| error.to_string()),
            };
            if chunk.is_ok() {
                api.record_response();
            }
            Some((chunk, (body, cancel_token, api)))
        });
        Ok(SourceResponse {
            status: head.status,
            headers: head.headers,
            body: body.boxed(),
        })
    }

    /// Sets the API's version as the version of the cache. Without it, the cache reports the oldest version that serves the
    /// same API.
    pub(super) async fn refresh_version(&self, cache: &WatchCache) {
        let version_request = async {
            let response = self.send_get("/version".to_owned()).await?;
            if !response.status.is_success() {
                return Err(response.status.to_string());
            }
            let chunks: Vec<Bytes> = response.body.try_collect().await?;
            Ok(Bytes::from(chunks.concat()))
        };
        match timeout(VERSION_TIMEOUT, version_request).await {
            Ok(Ok(json)) => cache.set_version_info(json),
            Ok(Err(why)) => tracing::debug!(why, "the cluster's API did not report its version"),
            Err(_) => tracing::debug!("the cluster's API did not report its version in time"),
        }
    }
}

fn silence_error() -> String {
    format!(
        "the cluster's API sends nothing and did not answer {PROBE_PATH} within {PROBE_TIMEOUT:?}"
    )
}

impl ListWatch for ApiClient {
    fn get(&self, path_and_query: String) -> BoxFuture<'_, Result<SourceResponse, String>> {
        Box::pin(self.send_get(path_and_query))
    }

    fn time_since_contact(&self) -> Duration {
        self.lock_health().last_response.elapsed()
    }

    fn is_watch_cache(&self) -> bool {
        false
    }
}
