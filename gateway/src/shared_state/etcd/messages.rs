//! Requests and responses of etcd's JSON gateway (`api/etcdserverpb/rpc.proto`): keys and values are base64, 64-bit integers
//! are strings, and fields with their default value are absent.

use base64::{Engine, engine::general_purpose::STANDARD};
use causeway_certs::EntryChange;
use serde::{Deserialize, Deserializer, de};
use serde_json::{Value, json};

/// Maximum number of keys in a response. etcd 3.4 limits a response to 4 MiB, so that entries may have 8 KiB on average; an
/// entry of a node has less than 1 KiB.
pub(crate) const PAGE_LIMIT: usize = 500;

/// Code of gRPC: the caller has no permission.
pub(crate) const PERMISSION_DENIED: i64 = 7;
/// Code of gRPC: the state of the system does not allow the operation.
pub(crate) const FAILED_PRECONDITION: i64 = 9;
/// Code of gRPC: the service is unavailable.
pub(crate) const UNAVAILABLE: i64 = 14;
/// Code of gRPC: the token is not valid.
pub(crate) const UNAUTHENTICATED: i64 = 16;

/// Fields that all responses have.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(crate) struct Header {
    /// Revision of the store when the response was made.
    #[serde(default, deserialize_with = "integer")]
    pub(crate) revision: i64,
}

/// A key with its value.
#[derive(Debug, Deserialize)]
pub(crate) struct KeyValue {
    #[serde(deserialize_with = "base64_bytes")]
    pub(crate) key: Vec<u8>,
    #[serde(default, deserialize_with = "base64_bytes")]
    value: Vec<u8>,
    /// Revision of the last change.
    #[serde(default, deserialize_with = "integer")]
    pub(crate) mod_revision: i64,
}

impl KeyValue {
    /// Returns the key without the prefix.
    ///
    /// # Errors
    /// If the key is not UTF-8 text, or begins with another prefix.
    pub(crate) fn name(&self, prefix: &str) -> Result<String, String> {
        let text = str::from_utf8(&self.key).ok();
        let name = text.and_then(|text| text.strip_prefix(prefix));
        name.map(str::to_owned).ok_or_else(|| {
            format!(
                "the key {:?} is not an entry of Causeway; remove it from etcd",
                String::from_utf8_lossy(&self.key)
            )
        })
    }

    /// Returns the value.
    ///
    /// # Errors
    /// If the value is not UTF-8 text.
    pub(crate) fn value(self) -> Result<String, String> {
        String::from_utf8(self.value).map_err(|_| {
            format!(
                "the value of {:?} is not text; remove this key from etcd",
                String::from_utf8_lossy(&self.key)
            )
        })
    }
}

/// Response to [`range`].
#[derive(Debug, Deserialize)]
pub(crate) struct RangeResponse {
    #[serde(default)]
    pub(crate) header: Header,
    #[serde(default)]
    pub(crate) kvs: Vec<KeyValue>,
    /// Whether there are further keys in the range.
    #[serde(default)]
    pub(crate) more: bool,
    /// Number of keys in the range.
    #[serde(default, deserialize_with = "integer")]
    pub(crate) count: i64,
}

/// Response to [`compare_and_swap`].
#[derive(Debug, Deserialize)]
pub(crate) struct TxnResponse {
    #[serde(default)]
    pub(crate) header: Header,
    /// Whether the comparison was true.
    #[serde(default)]
    pub(crate) succeeded: bool,
    #[serde(default)]
    responses: Vec<OperationResponse>,
}

#[derive(Debug, Deserialize)]
struct OperationResponse {
    response_range: Option<RangeResponse>,
}

impl TxnResponse {
    /// Returns the current value, which a failed comparison reads.
    pub(crate) fn current(self) -> Option<KeyValue> {
        let range = self.responses.into_iter().next()?.response_range?;
        range.kvs.into_iter().next()
    }
}

/// Response to [`authenticate`].
#[derive(Deserialize)]
pub(crate) struct AuthenticateResponse {
    pub(crate) token: String,
}

/// Message of the stream of a watch.
#[derive(Debug, Deserialize)]
pub(crate) struct WatchMessage {
    pub(crate) result: Option<WatchResponse>,
    pub(crate) error: Option<Status>,
}

/// Changes, or a change of the watch itself.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct WatchResponse {
    #[serde(default)]
    pub(crate) canceled: bool,
    /// Oldest revision that etcd still has, if the watch begins at an older one.
    #[serde(default, deserialize_with = "integer")]
    pub(crate) compact_revision: i64,
    #[serde(default)]
    pub(crate) cancel_reason: String,
    #[serde(default)]
    pub(crate) events: Vec<Event>,
}

/// Change of a key.
#[derive(Debug, Deserialize)]
pub(crate) struct Event {
    #[serde(default, rename = "type")]
    pub(crate) kind: EventKind,
    pub(crate) kv: KeyValue,
}

/// Kind of a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum EventKind {
    #[default]
    Put,
    Delete,
}

/// Error of etcd.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Status {
    #[serde(default, alias = "grpc_code")]
    pub(crate) code: i64,
    #[serde(default)]
    pub(crate) message: String,
}

impl Status {
    /// Whether the token must be renewed. A token of an earlier version of the users is invalid too.
    pub(crate) fn is_unauthenticated(&self) -> bool {
        self.code == UNAUTHENTICATED || self.message.contains("revision of auth store is old")
    }
}

/// Returns a request for the keys of a range. `revision` is 0 for the current one.
pub(crate) fn range((key, end): (&str, &str), limit: usize, revision: i64) -> Value {
    json!({
        "key": encode(key), "range_end": encode(end), "limit": limit, "revision": revision,
    })
}

/// Returns a request for the number of keys of a range, and for one key that has changed since this revision.
pub(crate) fn changed_since((key, end): (&str, &str), revision: i64) -> Value {
    json!({
        "key": encode(key), "range_end": encode(end), "limit": 1, "keys_only": true,
        "min_mod_revision": revision + 1,
    })
}

/// Returns a request for a key.
pub(crate) fn get(key: &str) -> Value {
    json!({ "key": encode(key) })
}

/// Returns a transaction that changes an entry if it has the expected value, and else reads it.
pub(crate) fn compare_and_swap(prefix: &str, change: &EntryChange) -> Value {
    let key = encode(&format!("{prefix}{}", change.key));
    let compare = match &change.expected {
        Some(value) => {
            json!({ "key": key, "target": "VALUE", "result": "EQUAL", "value": encode(value) })
        }
        None => {
            json!({ "key": key, "target": "CREATE", "result": "EQUAL", "create_revision": 0 })
        }
    };
    let success = match &change.value {
        Some(value) => json!({ "request_put": { "key": key, "value": encode(value) } }),
        None => json!({ "request_delete_range": { "key": key } }),
    };
    let failure = json!({ "request_range": { "key": key } });
    json!({ "compare": [compare], "success": [success], "failure": [failure] })
}

/// Returns a request for the changes of a range, from this revision on.
pub(crate) fn watch((key, end): (&str, &str), start_revision: i64) -> Value {
    let request = json!({
        "key": encode(key), "range_end": encode(end), "start_revision": start_revision,
        "progress_notify": true, "fragment": true,
    });
    json!({ "create_request": request })
}

/// Returns a request for a token.
pub(crate) fn authenticate(user: &str, password: &str) -> Value {
    json!({ "name": user, "password": password })
}

/// Returns the end of the range of all keys with this prefix.
pub(crate) fn prefix_end(prefix: &str) -> String {
    let mut end = prefix.to_owned();
    while let Some(last) = end.pop() {
        // No character follows the last one.
        if let Some(next) = (last..=char::MAX).nth(1) {
            end.push(next);
            return end;
        }
    }
    // The range of all keys.
    "\0".to_owned()
}

fn encode(text: &str) -> String {
    STANDARD.encode(text)
}

fn base64_bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(from)?;
    STANDARD.decode(text).map_err(de::Error::custom)
}

/// An integer, as a number or as text.
#[derive(Deserialize)]
#[serde(untagged)]
enum Integer {
    Number(i64),
    Text(String),
}

fn integer<'de, D: Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    match Integer::deserialize(from)? {
        Integer::Number(number) => Ok(number),
        Integer::Text(text) => text.parse().map_err(de::Error::custom),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_before_the_next_text() {
        assert_eq!(prefix_end("/causeway/"), "/causeway0");
        assert_eq!(prefix_end("/a\u{10ffff}"), "/b");
        assert_eq!(prefix_end("\u{10ffff}"), "\0");
    }

    #[test]
    fn a_change_compares_the_expected_value() {
        let change = |expected: Option<&str>, value: Option<&str>| {
            compare_and_swap(
                "/c/",
                &EntryChange {
                    key: "ca".to_owned(),
                    expected: expected.map(str::to_owned),
                    value: value.map(str::to_owned),
                },
            )
        };
        let key = STANDARD.encode("/c/ca");
        let created = change(None, Some("1"));
        assert_eq!(created["compare"][0]["target"], "CREATE");
        assert_eq!(created["compare"][0]["create_revision"], 0);
        assert_eq!(created["success"][0]["request_put"]["value"], "MQ==");
        assert_eq!(created["failure"][0]["request_range"]["key"], key);
        let removed = change(Some("1"), None);
        assert_eq!(removed["compare"][0]["target"], "VALUE");
        assert_eq!(removed["compare"][0]["value"], "MQ==");
        assert_eq!(removed["success"][0]["request_delete_range"]["key"], key);
    }

    #[test]
    fn responses_of_the_gateway_are_parsed() {
        // As etcd 3.4 writes them.
        let range = r#"{"header":{"cluster_id":"1","revision":"9007199254740993"},"kvs":[{"key":"L2MvY2E=","mod_revision":"4","value":"MQ=="},{"key":"L2MvYg==","mod_revision":"5"}],"more":true,"count":"3"}"#;
        let range: RangeResponse = serde_json::from_str(range).unwrap();
        assert_eq!(range.header.revision, 9_007_199_254_740_993);
        assert!(range.more && range.count == 3);
        let mut kvs = range.kvs.into_iter();
        let first = kvs.next().unwrap();
        assert_eq!(first.mod_revision, 4);
        assert_eq!(first.name("/c/").as_deref(), Ok("ca"));
        assert!(first.name("/d/").unwrap_err().contains("/c/ca"));
        assert_eq!(first.value().as_deref(), Ok("1"));
        assert_eq!(kvs.next().unwrap().value().as_deref(), Ok(""));

        let event = r#"{"result":{"header":{"revision":"7"},"events":[{"kv":{"key":"L2E="}},{"type":"DELETE","kv":{"key":"L2E=","mod_revision":"7"}}]}}"#;
        let message: WatchMessage = serde_json::from_str(event).unwrap();
        let events = message.result.unwrap().events;
        let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
        assert_eq!(kinds, [EventKind::Put, EventKind::Delete]);

        let canceled = r#"{"result":{"canceled":true,"compact_revision":"12"}}"#;
        let message: WatchMessage = serde_json::from_str(canceled).unwrap();
        let response = message.result.unwrap();
        assert!(response.canceled && response.compact_revision == 12);

        let error =
            r#"{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: no leader"}}"#;
        let message: WatchMessage = serde_json::from_str(error).unwrap();
        assert_eq!(message.error.unwrap().code, UNAVAILABLE);
        // `error` is a text in responses to single requests of etcd 3.5 and earlier.
        let status = r#"{"error":"x","message":"x","code":16}"#;
        let status: Status = serde_json::from_str(status).unwrap();
        assert!(status.is_unauthenticated());
    }

    #[test]
    fn a_value_that_is_not_text_is_named() {
        let kv: KeyValue = serde_json::from_str(r#"{"key":"L2E=","value":"/w=="}"#).unwrap();
        assert!(kv.value().unwrap_err().contains("\"/a\" is not text"));
    }
}
