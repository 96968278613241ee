//! Cache of the answers of the cluster's review API. Concurrent requests with the same review share one call.
//!
//! A review runs in its own task, so a request that is cancelled does not cancel the review for the others. The wait of a request
//! and the review each have a timeout. Refusals are cached for less time than permissions. A missing answer is cached for a
//! second, which is enough for many simultaneous requests. Keys are hashes of tokens, never tokens. The answer for a token with
//! an expiry is never used after that expiry.

use super::types::{ReviewAttributes, ReviewClient, ReviewError, UserInfo};
use crate::{config::Kubernetes, metrics::Metrics, proxy::authn::jwt};
use causeway_rt::{Cache, CachedValue};
use causeway_rt::{
    connection_limit::{ConnectionLimit, Source},
    task::TaskGroup,
};
use sha2::{Digest, Sha256};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{runtime::Handle, sync::oneshot, time::timeout};
use tracing::info_span;

/// Time for which a missing answer is cached.
const ERROR_TTL: Duration = Duration::from_secs(1);
/// Maximum number of cached answers of each kind. With more, the API is called more often.
const MAX_CACHED: u64 = 20_000;
/// Maximum number of concurrent reviews of each kind. A client that sends thousands of wrong tokens delays only itself, and
/// neither the cluster's API nor clients from other addresses.
const MAX_CONCURRENT_REVIEWS: usize = 64;

type Key = [u8; 32];

/// Cache of reviews, and the client that makes the missing ones.
#[derive(Debug)]
pub struct ReviewCache {
    review_client: Arc<dyn ReviewClient>,
    token_reviews: CachedResults,
    access_reviews: CachedResults,
    /// Runtime of the review client, on which reviews run.
    runtime: Handle,
    tasks: TaskGroup,
    review_timeout: Duration,
}

/// Cached answers of one kind of review.
#[derive(Clone, Debug)]
struct CachedResults {
    review_kind: &'static str,
    cache: Cache<Key, CachedResult>,
    /// Time for which answers are cached.
    ttl: Ttl,
    concurrency_limit: ConnectionLimit,
    health: Arc<ReviewHealth>,
}

#[derive(Clone, Debug)]
enum CachedResult {
    /// The token identifies this user, until this Unix time in seconds at most.
    Authenticated(Arc<UserInfo>, Option<u64>),
    Allowed,
    Refused,
    Failed(ReviewError),
}

impl ReviewCache {
    /// Returns a cache that makes reviews with `review_client` on its runtime. `review_timeout` limits the wait for an answer.
    pub fn new(
        (review_client, runtime): (Arc<dyn ReviewClient>, Handle),
        kubernetes: &Kubernetes,
        review_timeout: Duration,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let health = Arc::new(ReviewHealth {
            metrics: metrics.clone(),
            is_failing: AtomicBool::default(),
        });
        let new_cache = |kind, allowed, refused| CachedResults {
            review_kind: kind,
            cache: Cache::new(MAX_CACHED),
            ttl: Ttl { allowed, refused },
            // Waiting reviews are neither evicted nor refused.
            concurrency_limit: ConnectionLimit::new(kind, MAX_CONCURRENT_REVIEWS, drop),
            health: health.clone(),
        };
        Self {
            review_client,
            token_reviews: new_cache(
                "token",
                kubernetes.token_allowed_for,
                kubernetes.token_refused_for,
            ),
            access_reviews: new_cache(
                "access",
                kubernetes.review_allowed_for,
                kubernetes.review_refused_for,
            ),
            runtime,
            tasks: TaskGroup::default(),
            review_timeout,
        }
    }

    /// Returns the user of this token, if the token is valid for these audiences.
    ///
    /// # Errors
    /// If there is no answer.
    pub async fn review_token(
        &self,
        token: &str,
        audiences: &[String],
        source: impl Into<Source>,
    ) -> Result<Option<Arc<UserInfo>>, ReviewError> {
        // An expired token needs no review.
        let expires_at = jwt::unverified_expiry(token);
        if expires_at.is_some_and(is_expired) {
            return Ok(None);
        }
        let mut key = KeyHasher::default();
        key.add(token);
        key.add_all(audiences);
        let review = || {
            let (by, token, audiences) = (
                self.review_client.clone(),
                token.to_owned(),
                audiences.to_vec(),
            );
            async move {
                match by.review_token(&token, &audiences).await {
                    Ok(Some(account)) => CachedResult::Authenticated(Arc::new(account), expires_at),
                    Ok(None) => CachedResult::Refused,
                    Err(review_error) => CachedResult::Failed(review_error),
                }
            }
        };
        match self
            .cached_review(&self.token_reviews, key.finish(), source.into(), review)
            .await
        {
            CachedResult::Authenticated(account, until) => {
                Ok((!until.is_some_and(is_expired)).then_some(account))
            }
            CachedResult::Failed(unanswered) => Err(unanswered),
            CachedResult::Allowed | CachedResult::Refused => Ok(None),
        }
    }

    /// Returns whether the access is allowed.
    ///
    /// # Errors
    /// If there is no answer.
    pub async fn review_access(
        &self,
        access: ReviewAttributes,
        source: impl Into<Source>,
    ) -> Result<bool, ReviewError> {
        let key = access_key(&access);
        let review = || {
            let by = self.review_client.clone();
            async move {
                match by.review_access(&access).await {
                    Ok(true) => CachedResult::Allowed,
                    Ok(false) => CachedResult::Refused,
                    Err(review_error) => CachedResult::Failed(review_error),
                }
            }
        };
        match self
            .cached_review(&self.access_reviews, key, source.into(), review)
            .await
        {
            CachedResult::Failed(unanswered) => Err(unanswered),
            answer => Ok(matches!(answer, CachedResult::Allowed)),
        }
    }

    async fn cached_review<Q>(
        &self,
        results: &CachedResults,
        key: Key,
        source: Source,
        review: impl FnOnce() -> Q,
    ) -> CachedResult
    where
        Q: Future<Output = CachedResult> + Send + 'static,
    {
        if let Some(answer) = results.cache.get(&key).await {
            return answer;
        }
        let (response_sender, response_receiver) = oneshot::channel();
        let (known, question, bound) = (results.clone(), review(), self.review_timeout);
        let asking = async move {
            let fetch = known.run_review(question, source, bound);
            // The send fails if the client has disconnected.
            let _ = response_sender.send(known.cache.get_or_fetch(key, fetch).await);
        };
        self.tasks
            .spawn_on(&self.runtime, info_span!("review"), asking);
        match timeout(bound, response_receiver).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => failed_review("the gateway is shutting down"),
            Err(_) => timed_out_review(bound),
        }
    }
}

impl CachedResults {
    async fn run_review(
        &self,
        review: impl Future<Output = CachedResult>,
        source: Source,
        review_timeout: Duration,
    ) -> CachedValue<CachedResult> {
        let limited_review = async {
            let _slot = self.concurrency_limit.acquire(source).await;
            review.await
        };
        let answer = timeout(review_timeout, limited_review).await;
        let answer = answer.unwrap_or_else(|_| timed_out_review(review_timeout));
        self.health.record_answer(self.review_kind, &answer);
        CachedValue {
            ttl: self.ttl.ttl_of(&answer),
            value: answer,
        }
    }
}

/// Health of the review API. Every answer is counted. A log line is written when answers stop and when they resume.
#[derive(Debug)]
struct ReviewHealth {
    metrics: Arc<Metrics>,
    is_failing: AtomicBool,
}

impl ReviewHealth {
    fn record_answer(&self, kind: &'static str, answer: &CachedResult) {
        let outcome = match answer {
            CachedResult::Authenticated(..) | CachedResult::Allowed => "allowed",
            CachedResult::Refused => "refused",
            CachedResult::Failed(_) => "failed",
        };
        self.metrics.count_review(kind, outcome);
        let is_failure = matches!(answer, CachedResult::Failed(_));
        if self.is_failing.swap(is_failure, Relaxed) == is_failure {
            return;
        }
        if let CachedResult::Failed(ReviewError {
            detail: says,
            cause,
        }) = answer
        {
            tracing::warn!(kind, %cause, "clients cannot be reviewed and are refused: {says}");
        } else {
            tracing::info!("clients can be reviewed again");
        }
    }
}

fn failed_review(detail: &'static str) -> CachedResult {
    CachedResult::Failed(ReviewError {
        detail: detail.into(),
        cause: detail.into(),
    })
}

fn timed_out_review(review_timeout: Duration) -> CachedResult {
    let detail = format!("the cluster's API did not answer within {review_timeout:?}");
    CachedResult::Failed(ReviewError {
        cause: detail.as_str().into(),
        detail: detail.into(),
    })
}

fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

fn is_expired(expires_at: u64) -> bool {
    now() >= Duration::from_secs(expires_at)
}

/// Time for which answers are cached.
#[derive(Clone, Copy, Debug)]
struct Ttl {
    allowed: Duration,
    refused: Duration,
}

impl Ttl {
    fn ttl_of(self, answer: &CachedResult) -> Duration {
        match answer {
            CachedResult::Authenticated(_, Some(end)) => {
                let left = Duration::from_secs(*end).saturating_sub(now());
                left.min(self.allowed)
            }
            CachedResult::Authenticated(_, None) | CachedResult::Allowed => self.allowed,
            CachedResult::Refused => self.refused,
            CachedResult::Failed(_) => ERROR_TTL,
        }
    }
}

fn access_key(access: &ReviewAttributes) -> Key {
    let ReviewAttributes {
        account,
        verb,
        node,
        subresource,
    } = access;
    let mut key = KeyHasher::default();
    for text in [&account.user, &account.uid, *verb, node, *subresource] {
        key.add(text);
    }
    key.add_all(&account.groups);
    for (name, values) in &account.extra {
        key.add(name);
        key.add_all(values);
    }
    key.finish()
}

/// Hash of a list of texts, without collisions between lists of different texts.
#[derive(Default)]
struct KeyHasher(Sha256);

impl KeyHasher {
    fn add(&mut self, text: &str) {
        self.0.update(text.len().to_le_bytes());
        self.0.update(text);
    }

    fn add_all(&mut self, texts: &[String]) {
        self.0.update(texts.len().to_le_bytes());
        for text in texts {
            self.add(text);
        }
    }

    fn finish(self) -> Key {
        self.0.finalize().into()
    }
}

#[cfg(test)]
mod tests;
