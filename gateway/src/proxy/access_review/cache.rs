//! Cache of the review answers of the cluster's API. Each question is asked once for all requests that wait.
//!
//! A question is asked in a task of its own: a request that leaves does not cancel the answer for the others. The wait of a
//! request and the question itself each have a bound. Refusals are cached for less time than permissions. A missing answer is
//! cached for a second, which is enough for a herd of requests. Keys are hashes of tokens, never tokens. A token that names its
//! expiry never counts beyond that.

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
const UNKNOWN: Duration = Duration::from_secs(1);
/// Maximum number of cached answers of each kind; beyond, the API is asked more often.
const MOST: u64 = 20_000;
/// Maximum number of concurrent questions of each kind. A client that sends thousands of wrong tokens waits by itself; neither
/// the cluster's API nor clients from other addresses do.
const AT_ONCE: usize = 64;

type Key = [u8; 32];

/// Cache of reviews, and the client that asks for the missing ones.
#[derive(Debug)]
pub struct ReviewCache {
    by: Arc<dyn ReviewClient>,
    tokens: CachedResults,
    accesses: CachedResults,
    /// Runtime on which questions are asked: that of the review client.
    runtime: Handle,
    tasks: TaskGroup,
    bound: Duration,
}

/// The answers of one kind.
#[derive(Clone, Debug)]
struct CachedResults {
    kind: &'static str,
    cache: Cache<Key, CachedResult>,
    /// For how long.
    lives: Ttl,
    room: ConnectionLimit,
    heard: Arc<ReviewHealth>,
}

#[derive(Clone, Debug)]
enum CachedResult {
    /// A token is theirs, until this second since 1970 at most.
    Theirs(Arc<UserInfo>, Option<u64>),
    Allowed,
    Refused,
    Unknown(ReviewError),
}

impl ReviewCache {
    /// Asks `by` on this runtime, and waits for no answer longer than `bound`.
    pub fn new(
        (by, runtime): (Arc<dyn ReviewClient>, Handle),
        kubernetes: &Kubernetes,
        bound: Duration,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let heard = Arc::new(ReviewHealth {
            metrics: metrics.clone(),
            failing: AtomicBool::default(),
        });
        let known = |kind, allowed, refused| CachedResults {
            kind,
            cache: Cache::new(MOST),
            lives: Ttl { allowed, refused },
            // Waiting reviews are neither evicted nor refused.
            room: ConnectionLimit::new(kind, AT_ONCE, drop),
            heard: heard.clone(),
        };
        Self {
            by,
            tokens: known(
                "token",
                kubernetes.token_allowed_for,
                kubernetes.token_refused_for,
            ),
            accesses: known(
                "access",
                kubernetes.review_allowed_for,
                kubernetes.review_refused_for,
            ),
            runtime,
            tasks: TaskGroup::default(),
            bound,
        }
    }

    /// Returns the user of this token, if it counts for these audiences.
    ///
    /// # Errors
    /// If there is no answer.
    pub async fn token(
        &self,
        token: &str,
        audiences: &[String],
        from: impl Into<Source>,
    ) -> Result<Option<Arc<UserInfo>>, ReviewError> {
        // An expired token needs no review.
        let until = jwt::end(token);
        if until.is_some_and(is_over) {
            return Ok(None);
        }
        let mut key = KeyHasher::default();
        key.add(token);
        key.many(audiences);
        let question = || {
            let (by, token, audiences) = (self.by.clone(), token.to_owned(), audiences.to_vec());
            async move {
                match by.token(&token, &audiences).await {
                    Ok(Some(account)) => CachedResult::Theirs(Arc::new(account), until),
                    Ok(None) => CachedResult::Refused,
                    Err(unanswered) => CachedResult::Unknown(unanswered),
                }
            }
        };
        match self
            .answer(&self.tokens, key.ended(), from.into(), question)
            .await
        {
            CachedResult::Theirs(account, until) => {
                Ok((!until.is_some_and(is_over)).then_some(account))
            }
            CachedResult::Unknown(unanswered) => Err(unanswered),
            CachedResult::Allowed | CachedResult::Refused => Ok(None),
        }
    }

    /// Whether they may.
    ///
    /// # Errors
    /// If there is no answer.
    pub async fn access(
        &self,
        access: ReviewAttributes,
        from: impl Into<Source>,
    ) -> Result<bool, ReviewError> {
        let key = key(&access);
        let question = || {
            let by = self.by.clone();
            async move {
                match by.access(&access).await {
                    Ok(true) => CachedResult::Allowed,
                    Ok(false) => CachedResult::Refused,
                    Err(unanswered) => CachedResult::Unknown(unanswered),
                }
            }
        };
        match self
            .answer(&self.accesses, key, from.into(), question)
            .await
        {
            CachedResult::Unknown(unanswered) => Err(unanswered),
            answer => Ok(matches!(answer, CachedResult::Allowed)),
        }
    }

    async fn answer<Q>(
        &self,
        known: &CachedResults,
        key: Key,
        from: Source,
        question: impl FnOnce() -> Q,
    ) -> CachedResult
    where
        Q: Future<Output = CachedResult> + Send + 'static,
    {
        if let Some(answer) = known.cache.get(&key).await {
            return answer;
        }
        let (tell, told) = oneshot::channel();
        let (known, question, bound) = (known.clone(), question(), self.bound);
        let asking = async move {
            let fetch = known.ask(question, from, bound);
            // A client that has disconnected waits for no answer.
            let _ = tell.send(known.cache.get_or_fetch(key, fetch).await);
        };
        self.tasks
            .spawn_on(&self.runtime, info_span!("review"), asking);
        match timeout(bound, told).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => unknown("the gateway is shutting down"),
            Err(_) => silent(bound),
        }
    }
}

impl CachedResults {
    async fn ask(
        &self,
        question: impl Future<Output = CachedResult>,
        from: Source,
        bound: Duration,
    ) -> CachedValue<CachedResult> {
        let asked = async {
            let _room = self.room.acquire(from).await;
            question.await
        };
        let answer = timeout(bound, asked).await;
        let answer = answer.unwrap_or_else(|_| silent(bound));
        self.heard.note(self.kind, &answer);
        CachedValue {
            ttl: self.lives.of(&answer),
            value: answer,
        }
    }
}

/// Health of the review API. Every answer is counted; a log line is written when answers cease and when they resume.
#[derive(Debug)]
struct ReviewHealth {
    metrics: Arc<Metrics>,
    failing: AtomicBool,
}

impl ReviewHealth {
    fn note(&self, kind: &'static str, answer: &CachedResult) {
        let outcome = match answer {
            CachedResult::Theirs(..) | CachedResult::Allowed => "allowed",
            CachedResult::Refused => "refused",
            CachedResult::Unknown(_) => "failed",
        };
        self.metrics.reviewed(kind, outcome);
        let fails = matches!(answer, CachedResult::Unknown(_));
        if self.failing.swap(fails, Relaxed) == fails {
            return;
        }
        if let CachedResult::Unknown(ReviewError { says, cause }) = answer {
            tracing::warn!(kind, %cause, "clients cannot be reviewed and are refused: {says}");
        } else {
            tracing::info!("clients can be reviewed again");
        }
    }
}

fn unknown(says: &'static str) -> CachedResult {
    CachedResult::Unknown(ReviewError {
        says: says.into(),
        cause: says.into(),
    })
}

fn silent(bound: Duration) -> CachedResult {
    let says = format!("the cluster's API did not answer within {bound:?}");
    CachedResult::Unknown(ReviewError {
        cause: says.as_str().into(),
        says: says.into(),
    })
}

fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

fn is_over(end: u64) -> bool {
    now() >= Duration::from_secs(end)
}

/// Time for which answers are cached.
#[derive(Clone, Copy, Debug)]
struct Ttl {
    allowed: Duration,
    refused: Duration,
}

impl Ttl {
    fn of(self, answer: &CachedResult) -> Duration {
        match answer {
            CachedResult::Theirs(_, Some(end)) => {
                let left = Duration::from_secs(*end).saturating_sub(now());
                left.min(self.allowed)
            }
            CachedResult::Theirs(_, None) | CachedResult::Allowed => self.allowed,
            CachedResult::Refused => self.refused,
            CachedResult::Unknown(_) => UNKNOWN,
        }
    }
}

fn key(access: &ReviewAttributes) -> Key {
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
    key.many(&account.groups);
    for (name, values) in &account.extra {
        key.add(name);
        key.many(values);
    }
    key.ended()
}

/// A hash of texts, of which no two lists have the same.
#[derive(Default)]
struct KeyHasher(Sha256);

impl KeyHasher {
    fn add(&mut self, text: &str) {
        self.0.update(text.len().to_le_bytes());
        self.0.update(text);
    }

    fn many(&mut self, texts: &[String]) {
        self.0.update(texts.len().to_le_bytes());
        for text in texts {
            self.add(text);
        }
    }

    fn ended(self) -> Key {
        self.0.finalize().into()
    }
}

#[cfg(test)]
mod tests;
