//! Signing keys of issuers behind a URL: fetched while they are in use, periodically, and when a key is missing.
//!
//! 1. Listeners that name the same URL with the same settings share one table and one task, also across a reload.
//! 2. The task fetches the keys, then waits for `jwks_refresh` or for a request with an unknown key. Two fetches are at least
//!    `MIN_FETCH_INTERVAL` apart.
//! 3. A fetch that fails leaves the keys unchanged; the table determines when they are too old. Retries begin at once and slow
//!    down. A gateway starts without keys, and has keys after the first successful fetch.
//!
//! Fetches are never on the data path, which reads the keys from `state::jwks`.

mod fetch;

use crate::{
    config::{Jwks, Jwt},
    metrics::Metrics,
    state::{
        JwksCache, JwksWriter, KeySet,
        jwks::{MIN_FETCH_INTERVAL, WeakJwksCache},
    },
};
use causeway_rt::task::TaskGroup;
use fetch::JwksSource;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep_until},
};
use tracing::info_span;

/// Maximum time between retries for an issuer that does not answer, so that the gateway soon uses an issuer that is available
/// again.
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);

/// Fetchers of all issuers whose keys are behind a URL.
#[derive(Debug)]
pub struct JwksFetchers {
    tasks: TaskGroup,
    runtime: Handle,
    /// Timeout of one fetch.
    fetch_timeout: Duration,
    metrics: Arc<Metrics>,
    shared: Mutex<HashMap<JwksEndpoint, WeakJwksCache>>,
}

/// Settings of a source of keys. Listeners with equal settings share the keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct JwksEndpoint {
    url: String,
    /// Contents of the file `jwks_ca`.
    ca: Option<String>,
    refresh: Duration,
    max_age: Duration,
}

impl JwksFetchers {
    /// Returns an empty set. `tasks` run on `runtime`; a fetch takes `fetch_timeout` at most.
    pub fn new(
        tasks: TaskGroup,
        runtime: Handle,
        fetch_timeout: Duration,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            tasks,
            runtime,
            fetch_timeout,
            metrics,
            shared: Mutex::default(),
        }
    }

    /// Returns the keys of an issuer and fetches them from now on while they are in use. `ca` is the contents of `jwks_ca`.
    ///
    /// # Errors
    /// If the certificate of the URL's server could not be verified.
    pub fn keys(&self, jwt: &Jwt, ca: Option<&str>) -> Result<JwksCache, String> {
        let Jwks::Url(url) = &jwt.jwks else {
            return Err("keys in a file are not fetched".to_owned());
        };
        let endpoint = JwksEndpoint {
            url: url.to_string(),
            ca: ca.map(str::to_owned),
            refresh: jwt.jwks_refresh,
            max_age: jwt.jwks_max_age,
        };
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(keys) = shared.get(&endpoint).and_then(WeakJwksCache::upgrade) {
            return Ok(keys);
        }
        let source = Arc::new(JwksSource::new(url, ca)?);
        let (keys, writer) = JwksCache::refreshable(jwt.jwks_max_age);
        shared.retain(|_, keys| keys.upgrade().is_some());
        shared.insert(endpoint, keys.downgrade());
        let (metrics, bound, refresh) =
            (self.metrics.clone(), self.fetch_timeout, jwt.jwks_refresh);
        let span = info_span!("jwks", url = %source);
        let task = async move {
            let fetch = || {
                let (source, metrics) = (source.clone(), metrics.clone());
                async move { fetch_once(&source, bound, &metrics).await }
            };
            tokio::select! {
                () = run_fetches(&writer, refresh, fetch) => {}
                () = writer.all_readers_dropped() => {}
            }
        };
        self.tasks.spawn_on(&self.runtime, span, task);
        Ok(keys)
    }
}

async fn fetch_once(
    source: &JwksSource,
    fetch_timeout: Duration,
    metrics: &Metrics,
) -> Option<KeySet> {
    let fetched = match tokio::time::timeout(fetch_timeout, source.fetch()).await {
        Ok(fetched) => fetched,
        Err(_) => Err(format!("no answer within {fetch_timeout:?}")),
    };
    metrics.count_jwks_fetch(fetched.is_ok());
    fetched
        .inspect_err(|error| {
            tracing::warn!(url = %source, error, "the keys of a JWT issuer cannot be fetched; the previous keys stay valid until jwks_max_age");
        })
        .ok()
}

/// Fetches at each due time. Never ends.
async fn run_fetches<F>(writer: &JwksWriter, refresh: Duration, mut fetch: impl FnMut() -> F)
where
    F: Future<Output = Option<KeySet>>,
{
    let mut failures = 0;
    loop {
        let began = Instant::now();
        writer.fetch_started();
        let fetched = fetch().await;
        let next = if fetched.is_some() {
            failures = 0;
            refresh
        } else {
            failures += 1;
            (MIN_FETCH_INTERVAL * failures)
                .min(MAX_RETRY_DELAY)
                .min(refresh)
        };
        if writer.fetch_finished(fetched) {
            tracing::info!("the keys of a JWT issuer changed");
        }
        tokio::select! {
            () = sleep_until(began + next) => {}
            () = writer.fetch_requested() => sleep_until(began + MIN_FETCH_INTERVAL).await,
        }
    }
}

#[cfg(test)]
mod tests;
