//! Reflector that fills a store from a source: a list if one is needed, then one watch after another.
//!
//! A store with a state resumes from it, with any source, because versions are the cloud's at each level. A store never
//! returns to an older state by itself. A source with an older state is not used, unless it has had contact with the cloud
//! for half a minute. In that case the cloud itself has returned to an older state.

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

/// Number of objects in one page of a list.
const PAGE_SIZE: usize = 500;
/// Maximum size of a page of a list, and of an event, in bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
/// Maximum size of all pages of a list together, in bytes. It prevents an endless list from filling the memory.
const MAX_LIST_BYTES: usize = 512 << 20;
/// Time limit of a list.
const LIST_TIMEOUT: Duration = Duration::from_mins(1);
/// Time limit for the start of a watch. A watch cache as a source waits 3 s for a version that it does not know yet.
const WATCH_START_TIMEOUT: Duration = Duration::from_secs(20);
/// Time after which a connected source with an older state is trusted.
const MAX_BEHIND: Duration = Duration::from_secs(30);
/// Minimum duration of a watch. A watch that ends earlier without an event has failed.
const MIN_WATCH_DURATION: Duration = Duration::from_secs(1);
/// Maximum `Retry-After` that is accepted from a source.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(5);

/// Source of a store.
pub trait ListWatch: Send + Sync {
    /// Sends a `GET` of a path with its query. The error is a description of the cause.
    fn get(&self, path_and_query: String) -> BoxFuture<'_, Result<SourceResponse, String>>;

    /// Returns the time since the last contact with the source, if it is known. The source's data was current until then.
    fn time_since_contact(&self) -> Duration {
        Duration::ZERO
    }

    /// Whether the source is another [`WatchCache`](crate::WatchCache), which ends watches when it has lost its own source.
    fn is_watch_cache(&self) -> bool {
        true
    }
}

/// Response of a source.
pub struct SourceResponse {
    /// The status.
    pub status: StatusCode,
    /// Header fields of the response.
    pub headers: HeaderMap,
    /// The bytes of the body as they arrive.
    pub body: BoxStream<'static, Result<Bytes, String>>,
}

/// Reason for which a store is no longer filled.
#[derive(Debug, PartialEq, Eq)]
pub enum ReflectorError {
    /// The source does not respond or the connection was lost, with a description.
    Broken(String),
    /// The source responds with this status: its message, and its `Retry-After`.
    Refused(StatusCode, String, Option<Duration>),
    /// The source has an older state than the store, or has lost its own source for this time.
    Stale(String, Duration),
}

/// Outcome of a watch.
enum WatchEnd {
    /// The watch has reached its timeout.
    Completed,
    /// The known version is too old to resume from.
    Expired,
}

/// Fills the store from the source until that fails. The store counts as lost from the last contact with the source.
pub async fn reflect(store: &Store, source: &dyn ListWatch) -> ReflectorError {
    let started = Instant::now();
    let error = match Box::pin(run(store, source)).await {
        Ok(never) => match never {},
        Err(error) => error,
    };
    let stale_for = match error {
        ReflectorError::Stale(_, away) => away,
        _ => Duration::ZERO,
    };
    // Earlier silence belongs to the previous source.
    store.mark_lost(
        source
            .time_since_contact()
            .max(stale_for)
            .min(started.elapsed()),
    );
    error
}

async fn run(
    store: &Store,
    source: &dyn ListWatch,
) -> Result<std::convert::Infallible, ReflectorError> {
    let mut is_listed = store.version() > 0;
    loop {
        if !is_listed {
            list(store, source).await?;
        }
        let started = Instant::now();
        is_listed = match watch(store, source).await? {
            WatchEnd::Expired => false,
            WatchEnd::Completed if started.elapsed() > MIN_WATCH_DURATION => true,
            WatchEnd::Completed => return Err(broken("the watch ended immediately")),
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
    // A watch cache with older data must wait. The newest version of the cloud is always right.
    let require_newer = source.is_watch_cache() && version > 0 && !is_source_trusted(store);
    let api_version = store.resource().api_version();
    let (mut objects, mut continue_token, mut total_bytes) = (Vec::new(), String::new(), 0);
    loop {
        let query = if !continue_token.is_empty() {
            format!("?limit={PAGE_SIZE}&continue={continue_token}")
        } else if require_newer {
            format!(
                "?limit={PAGE_SIZE}&resourceVersion={version}&resourceVersionMatch=NotOlderThan"
            )
        } else {
            format!("?limit={PAGE_SIZE}")
        };
        let request = source.get(format!("{path}{query}"));
        let (bytes, age) = timeout(LIST_TIMEOUT, read_response(store, request))
            .await
            .map_err(|_| broken("no list response within a minute"))??;
        total_bytes += bytes.len();
        if total_bytes > MAX_LIST_BYTES {
            return Err(broken(format!(
                "a list response is larger than {MAX_LIST_BYTES} bytes"
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
        let type_meta = TypeMeta {
            kind,
            api_version: &api_version,
        };
        for item in page.items.into_iter().flatten() {
            objects.push(Object::parse(item, type_meta).map_err(|error| malformed(&error))?);
        }
        continue_token = page.metadata.r#continue;
        if continue_token.is_empty() {
            let version: u64 = page.metadata.resource_version.parse().unwrap_or_default();
            if version == 0 {
                return Err(malformed(&"it has no resourceVersion"));
            }
            check_freshness(store, age)?;
            store.set_kind(kind);
            store.replace(version, objects);
            store.mark_connected(age);
            return Ok(());
        }
    }
}

/// Whether a source with an older state than the store has been connected long enough to be trusted.
fn is_source_trusted(store: &Store) -> bool {
    store
        .behind_duration()
        .is_some_and(|duration| duration > MAX_BEHIND)
}

/// Returns an error if the source's data has an age and the store is not empty: such data is of no use to the store.
fn check_freshness(store: &Store, age: Option<Duration>) -> Result<(), ReflectorError> {
    let why = || "the source itself is disconnected from the cloud".to_owned();
    match age {
        Some(age) if store.version() > 0 => Err(ReflectorError::Stale(why(), age)),
        _ => Ok(()),
    }
}

/// Reads a complete response. Returns its bytes, and the age of its data.
async fn read_response(
    store: &Store,
    request: BoxFuture<'_, Result<SourceResponse, String>>,
) -> Result<(Vec<u8>, Option<Duration>), ReflectorError> {
    let mut response = request.await.map_err(ReflectorError::Broken)?;
    let bytes = read_body(&mut response).await?;
    if !response.status.is_success() {
        return Err(map_status(store, &response, &bytes));
    }
    Ok((bytes, view_age(&response.headers)))
}

async fn read_body(response: &mut SourceResponse) -> Result<Vec<u8>, ReflectorError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.body.next().await {
        bytes.extend_from_slice(&chunk.map_err(ReflectorError::Broken)?);
        if bytes.len() > MAX_RESPONSE_BYTES {
            return Err(broken(format!(
                "a response is larger than {MAX_RESPONSE_BYTES} bytes"
            )));
        }
    }
    if response
        .headers
        .get(CONTENT_ENCODING)
        .is_none_or(|coding| coding != "gzip")
    {
        return Ok(bytes);
    }
    let mut decompressed = Vec::new();
    let result = GzDecoder::new(&*bytes)
        .take(MAX_RESPONSE_BYTES as u64 + 1)
        .read_to_end(&mut decompressed);
    match result {
        Ok(length) if length <= MAX_RESPONSE_BYTES => Ok(decompressed),
        Ok(_) => Err(broken(format!(
            "a response is larger than {MAX_RESPONSE_BYTES} bytes"
        ))),
        Err(error) => Err(broken(format!("cannot decompress a response: {error}"))),
    }
}

async fn watch(store: &Store, source: &dyn ListWatch) -> Result<WatchEnd, ReflectorError> {
    if is_source_trusted(store) {
        return Ok(WatchEnd::Expired);
    }
    let (path, version) = (store.resource().path(), store.version());
    let fresh_parameter = if source.is_watch_cache() {
        "&fresh=true"
    } else {
        ""
    };
    // Jitter for watches that began at the same time.
    let seconds = rand::random_range(240..480);
    let request = source.get(format!(
        "{path}?watch=true&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={seconds}{fresh_parameter}"
    ));
    let response = timeout(WATCH_START_TIMEOUT, request).await;
    let mut response = response
        .map_err(|_| broken("a watch did not start within 20 s"))?
        .map_err(ReflectorError::Broken)?;
    if response.status == StatusCode::GONE {
        return Ok(WatchEnd::Expired);
    }
    if !response.status.is_success() {
        let bytes = timeout(WATCH_START_TIMEOUT, read_body(&mut response)).await;
        let bytes = bytes.map_err(|_| broken("no response within 20 s"))??;
        return Err(map_status(store, &response, &bytes));
    }
    let age = view_age(&response.headers);
    check_freshness(store, age)?;
    store.mark_connected(age);
    let watch_timeout = Duration::from_secs(seconds) + WATCH_START_TIMEOUT;
    match timeout(watch_timeout, read_events(store, &mut response)).await {
        Ok(watch_end) => watch_end,
        Err(_) => Err(broken("a watch did not end at its timeout")),
    }
}

async fn read_events(
    store: &Store,
    response: &mut SourceResponse,
) -> Result<WatchEnd, ReflectorError> {
    let mut buffer = BytesMut::new();
    let mut scanned = 0;
    while let Some(chunk) = response.body.next().await {
        buffer.extend_from_slice(&chunk.map_err(ReflectorError::Broken)?);
        while let Some(end) = buffer
            .get(scanned..)
            .and_then(|new| new.iter().position(|byte| *byte == b'\n'))
        {
            let line = buffer.split_to(scanned + end + 1);
            scanned = 0;
            if let Some(watch_end) = apply_event(store, &line)? {
                return Ok(watch_end);
            }
        }
        scanned = buffer.len();
        if scanned > MAX_RESPONSE_BYTES {
            return Err(broken(format!(
                "a watch event is larger than {MAX_RESPONSE_BYTES} bytes"
            )));
        }
    }
    Ok(WatchEnd::Completed)
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

fn apply_event(store: &Store, line: &[u8]) -> Result<Option<WatchEnd>, ReflectorError> {
    let malformed =
        |why: &dyn std::fmt::Display| broken(format!("cannot parse a watch event: {why}"));
    let watch_event: WatchEvent<'_> =
        serde_json::from_slice(line).map_err(|error| malformed(&error))?;
    let api_version = store.resource().api_version();
    let parse_object = |raw: &RawValue| {
        let type_meta = TypeMeta {
            kind: "",
            api_version: &api_version,
        };
        Object::parse(raw, type_meta).map_err(|error| malformed(&error))
    };
    let object = watch_event.object;
    match &*watch_event.r#type {
        event_type @ ("ADDED" | "MODIFIED" | "DELETED") => {
            store.apply(parse_object(object)?, event_type == "DELETED");
        }
        "BOOKMARK" => {
            let bookmark: Bookmark =
                serde_json::from_str(object.get()).map_err(|error| malformed(&error))?;
            let version = bookmark.metadata.resource_version;
            store.advance_version(version.parse().unwrap_or_default());
        }
        "ERROR" => {
            let status: SourceStatus = serde_json::from_str(object.get()).unwrap_or_default();
            if status.is_gone() {
                return Ok(Some(WatchEnd::Expired));
            }
            return Err(broken(format!(
                "the watch returned an error: {}",
                status.message
            )));
        }
        other => return Err(malformed(&other)),
    }
    Ok(None)
}

/// Returns the time since which the source has lost its own source, if it has.
fn view_age(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(AGE)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Relevant part of a Kubernetes `Status`.
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
fn map_status(store: &Store, response: &SourceResponse, bytes: &[u8]) -> ReflectorError {
    let status: SourceStatus = serde_json::from_slice(bytes).unwrap_or_default();
    let is_behind = status.is_behind();
    let message = if status.message.is_empty() {
        response.status.to_string()
    } else {
        status.message
    };
    if is_behind && view_age(&response.headers).is_none() {
        store.mark_behind();
        return ReflectorError::Stale(message, Duration::ZERO);
    }
    let retry_after = response.headers.get(RETRY_AFTER);
    let retry_after = retry_after
        .and_then(|text| text.to_str().ok()?.parse().ok())
        .map(|seconds| Duration::from_secs(seconds).min(MAX_RETRY_AFTER));
    ReflectorError::Refused(response.status, message, retry_after)
}

#[cfg(test)]
mod tests;
