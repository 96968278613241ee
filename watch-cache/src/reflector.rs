//! Reflector that fills a store from a source: a list if one is needed, then watch after watch.
//!
//! A store that has a state resumes from it, from any source: versions are the cloud's at each level. A store never goes back by
//! itself. A source that knows less is not used, unless it is in touch with the cloud and stays so for half a minute. Then the
//! cloud itself has gone back.

use crate::{
    object::{Object, TypeMeta},
    store::Store,
};
use bytes::{Bytes, BytesMut};
use flate2::read::GzDecoder;
use futures_util::{
    future::BoxFuture,
    stream::{BoxStream, StreamExt},
};
use http::{
    HeaderMap, StatusCode,
    header::{AGE, CONTENT_ENCODING, RETRY_AFTER},
};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::{io::Read, time::Duration};
use tokio::time::{Instant, timeout};

/// Objects in one part of a list.
const PAGE: usize = 500;
/// The largest part of a list, and the largest event, in bytes.
const MOST: usize = 64 << 20;
/// Size limit of all parts of a list together: an endless list must not fill the memory.
const ALL: usize = 512 << 20;
/// Time limit of a list.
const LIST: Duration = Duration::from_mins(1);
/// Time limit for the start of a watch: one of our sources waits 3 s for a version that it does not know yet.
const BEGIN: Duration = Duration::from_secs(20);
/// A source that is in touch and has known less for this long is right.
const BEHIND: Duration = Duration::from_secs(30);
/// A watch that ends sooner than this without an event has failed.
const SHORT: Duration = Duration::from_secs(1);
/// Maximum `Retry-After` that is accepted from a source.
const AWAY: Duration = Duration::from_mins(5);

/// Source of a store.
pub trait ListWatch: Send + Sync {
    /// Sends a `GET` of a path with its query. The error is a description of the cause.
    fn get(&self, path_and_query: String) -> BoxFuture<'_, Result<SourceResponse, String>>;

    /// Returns the time since the source was last heard of, if it is known. Its data was current until then.
    fn silent(&self) -> Duration {
        Duration::ZERO
    }

    /// Whether it is another [`WatchCache`](crate::WatchCache), which ends watches when it is out of touch itself.
    fn is_pool(&self) -> bool {
        true
    }
}

/// Response of a source.
pub struct SourceResponse {
    /// The status.
    pub status: StatusCode,
    /// Header fields of the response.
    pub headers: HeaderMap,
    /// The bytes as they come.
    pub body: BoxStream<'static, Result<Bytes, String>>,
}

/// Reason why a store is no longer filled.
#[derive(Debug, PartialEq, Eq)]
pub enum ReflectorError {
    /// The source is away or the connection broke off, with a description.
    Broken(String),
    /// The source responds with this status: its message, and its `Retry-After`.
    Refused(StatusCode, String, Option<Duration>),
    /// The source knows less than the store, or has been out of touch itself, and for how long.
    Stale(String, Duration),
}

/// Outcome of a watch.
enum WatchEnd {
    /// The watch has reached its timeout.
    Over,
    /// The known version is too old to resume from.
    Expired,
}

/// Fills the store from the source until that fails. The store counts as lost from the last contact with the source.
pub async fn reflect(store: &Store, source: &dyn ListWatch) -> ReflectorError {
    let begun = Instant::now();
    let ended = match Box::pin(run(store, source)).await {
        Ok(never) => match never {},
        Err(ended) => ended,
    };
    let away = match ended {
        ReflectorError::Stale(_, away) => away,
        _ => Duration::ZERO,
    };
    // Earlier silence belongs to the previous source.
    store.lost_for(source.silent().max(away).min(begun.elapsed()));
    ended
}

async fn run(
    store: &Store,
    source: &dyn ListWatch,
) -> Result<std::convert::Infallible, ReflectorError> {
    let mut known = store.version() > 0;
    loop {
        if !known {
            list(store, source).await?;
        }
        let begun = Instant::now();
        known = match watch(store, source).await? {
            WatchEnd::Expired => false,
            WatchEnd::Over if begun.elapsed() > SHORT => true,
            WatchEnd::Over => return Err(broken("the watch ended immediately")),
        };
    }
}

fn broken(why: impl Into<String>) -> ReflectorError {
    ReflectorError::Broken(why.into())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListResponse<'a> {
    kind: String,
    metadata: ListMeta,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ListMeta {
    resource_version: String,
    r#continue: String,
}

async fn list(store: &Store, source: &dyn ListWatch) -> Result<(), ReflectorError> {
    let path = store.resource().path();
    let version = store.version();
    // A pool source with older data must wait; the newest version of the cloud is always right.
    let held = source.is_pool() && version > 0 && !is_right(store);
    let api_version = store.resource().api_version();
    let (mut objects, mut from, mut read) = (Vec::new(), String::new(), 0);
    loop {
        let query = if !from.is_empty() {
            format!("?limit={PAGE}&continue={from}")
        } else if held {
            format!("?limit={PAGE}&resourceVersion={version}&resourceVersionMatch=NotOlderThan")
        } else {
            format!("?limit={PAGE}")
        };
        let asked = source.get(format!("{path}{query}"));
        let (bytes, age) = timeout(LIST, whole(store, asked))
            .await
            .map_err(|_| broken("no list response within a minute"))??;
        read += bytes.len();
        if read > ALL {
            return Err(broken(format!(
                "a list response is larger than {ALL} bytes"
            )));
        }
        let malformed =
            |why: &dyn std::fmt::Display| broken(format!("cannot parse a list response: {why}"));
        let page: ListResponse<'_> =
            serde_json::from_slice(&bytes).map_err(|error| malformed(&error))?;
        let kind = page
            .kind
            .strip_suffix("List")
            .ok_or_else(|| malformed(&page.kind))?;
        let named = TypeMeta {
            kind,
            api_version: &api_version,
        };
        for item in page.items.into_iter().flatten() {
            objects.push(Object::read(item, named).map_err(|error| malformed(&error))?);
        }
        from = page.metadata.r#continue;
        if from.is_empty() {
            let version: u64 = page.metadata.resource_version.parse().unwrap_or_default();
            if version == 0 {
                return Err(malformed(&"it has no resourceVersion"));
            }
            in_touch(store, age)?;
            store.learn(kind);
            store.replace(version, objects);
            store.found(age);
            return Ok(());
        }
    }
}

/// Whether a source that knows less than the store has been in touch long enough to be trusted.
fn is_right(store: &Store) -> bool {
    store.is_behind().is_some_and(|lasts| lasts > BEHIND)
}

/// A view that has an age is of no use to a store that has something.
fn in_touch(store: &Store, age: Option<Duration>) -> Result<(), ReflectorError> {
    let why = || "the source itself is disconnected from the cloud".to_owned();
    match age {
        Some(age) if store.version() > 0 => Err(ReflectorError::Stale(why(), age)),
        _ => Ok(()),
    }
}

/// A whole answer, and how old its view is.
async fn whole(
    store: &Store,
    asked: BoxFuture<'_, Result<SourceResponse, String>>,
) -> Result<(Vec<u8>, Option<Duration>), ReflectorError> {
    let mut answer = asked.await.map_err(ReflectorError::Broken)?;
    let bytes = drained(&mut answer).await?;
    if !answer.status.is_success() {
        return Err(map_status(store, &answer, &bytes));
    }
    Ok((bytes, view_age(&answer.headers)))
}

async fn drained(answer: &mut SourceResponse) -> Result<Vec<u8>, ReflectorError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = answer.body.next().await {
        bytes.extend_from_slice(&chunk.map_err(ReflectorError::Broken)?);
        if bytes.len() > MOST {
            return Err(broken(format!("a response is larger than {MOST} bytes")));
        }
    }
    if answer
        .headers
        .get(CONTENT_ENCODING)
        .is_none_or(|coding| coding != "gzip")
    {
        return Ok(bytes);
    }
    let mut plain = Vec::new();
    let read = GzDecoder::new(&*bytes)
        .take(MOST as u64 + 1)
        .read_to_end(&mut plain);
    match read {
        Ok(length) if length <= MOST => Ok(plain),
        Ok(_) => Err(broken(format!("a response is larger than {MOST} bytes"))),
        Err(error) => Err(broken(format!("cannot decompress a response: {error}"))),
    }
}

async fn watch(store: &Store, source: &dyn ListWatch) -> Result<WatchEnd, ReflectorError> {
    if is_right(store) {
        return Ok(WatchEnd::Expired);
    }
    let (path, version) = (store.resource().path(), store.version());
    let fresh = if source.is_pool() { "&fresh=true" } else { "" };
    // Jitter for watches that began at the same time.
    let seconds = rand::random_range(240..480);
    let asked = source.get(format!(
        "{path}?watch=true&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={seconds}{fresh}"
    ));
    let answer = timeout(BEGIN, asked).await;
    let mut answer = answer
        .map_err(|_| broken("a watch did not start within 20 s"))?
        .map_err(ReflectorError::Broken)?;
    if answer.status == StatusCode::GONE {
        return Ok(WatchEnd::Expired);
    }
    if !answer.status.is_success() {
        let bytes = timeout(BEGIN, drained(&mut answer)).await;
        let bytes = bytes.map_err(|_| broken("no response within 20 s"))??;
        return Err(map_status(store, &answer, &bytes));
    }
    let age = view_age(&answer.headers);
    in_touch(store, age)?;
    store.found(age);
    let within = Duration::from_secs(seconds) + BEGIN;
    match timeout(within, events(store, &mut answer)).await {
        Ok(watched) => watched,
        Err(_) => Err(broken("a watch did not end at its timeout")),
    }
}

async fn events(store: &Store, answer: &mut SourceResponse) -> Result<WatchEnd, ReflectorError> {
    let mut unread = BytesMut::new();
    let mut seen = 0;
    while let Some(chunk) = answer.body.next().await {
        unread.extend_from_slice(&chunk.map_err(ReflectorError::Broken)?);
        while let Some(end) = unread
            .get(seen..)
            .and_then(|new| new.iter().position(|byte| *byte == b'\n'))
        {
            let line = unread.split_to(seen + end + 1);
            seen = 0;
            if let Some(watched) = event(store, &line)? {
                return Ok(watched);
            }
        }
        seen = unread.len();
        if seen > MOST {
            return Err(broken(format!("a watch event is larger than {MOST} bytes")));
        }
    }
    Ok(WatchEnd::Over)
}

#[derive(Deserialize)]
struct WatchEvent<'a> {
    r#type: String,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: ListMeta,
}

fn event(store: &Store, line: &[u8]) -> Result<Option<WatchEnd>, ReflectorError> {
    let malformed =
        |why: &dyn std::fmt::Display| broken(format!("cannot parse a watch event: {why}"));
    let happened: WatchEvent<'_> =
        serde_json::from_slice(line).map_err(|error| malformed(&error))?;
    let api_version = store.resource().api_version();
    let read = |raw: &RawValue| {
        let named = TypeMeta {
            kind: "",
            api_version: &api_version,
        };
        Object::read(raw, named).map_err(|error| malformed(&error))
    };
    let object = happened.object;
    match &*happened.r#type {
        kind @ ("ADDED" | "MODIFIED" | "DELETED") => store.apply(read(object)?, kind == "DELETED"),
        "BOOKMARK" => {
            let marked: Bookmark =
                serde_json::from_str(object.get()).map_err(|error| malformed(&error))?;
            let version = marked.metadata.resource_version;
            store.pass(version.parse().unwrap_or_default());
        }
        "ERROR" => {
            let said: SourceStatus = serde_json::from_str(object.get()).unwrap_or_default();
            if said.is_gone() {
                return Ok(Some(WatchEnd::Expired));
            }
            return Err(broken(format!(
                "the watch returned an error: {}",
                said.message
            )));
        }
        other => return Err(malformed(&other)),
    }
    Ok(None)
}

/// Returns the time for which the source's own source has been away, if it is.
fn view_age(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(AGE)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// A Kubernetes `Status`, as far as it matters here.
#[derive(Default, Deserialize)]
#[serde(default)]
struct SourceStatus {
    message: String,
    code: u16,
    details: StatusDetails,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StatusDetails {
    causes: Vec<StatusCause>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StatusCause {
    reason: String,
}

impl SourceStatus {
    /// Whether the requested version is too old to resume from.
    fn is_gone(&self) -> bool {
        self.code == StatusCode::GONE.as_u16()
    }

    /// Whether the source does not know the requested version yet.
    fn is_behind(&self) -> bool {
        let mut causes = self.details.causes.iter();
        causes.any(|cause| cause.reason == "ResourceVersionTooLarge")
    }
}

/// Returns the meaning of a failure, by its status and its message.
fn map_status(store: &Store, answer: &SourceResponse, bytes: &[u8]) -> ReflectorError {
    let said: SourceStatus = serde_json::from_slice(bytes).unwrap_or_default();
    let behind = said.is_behind();
    let message = if said.message.is_empty() {
        answer.status.to_string()
    } else {
        said.message
    };
    if behind && view_age(&answer.headers).is_none() {
        store.behind();
        return ReflectorError::Stale(message, Duration::ZERO);
    }
    let retry = answer.headers.get(RETRY_AFTER);
    let retry = retry
        .and_then(|text| text.to_str().ok()?.parse().ok())
        .map(|seconds| Duration::from_secs(seconds).min(AWAY));
    ReflectorError::Refused(answer.status, message, retry)
}

#[cfg(test)]
mod tests;
