//! Encoding of objects in the form that a client requests: JSON or protobuf, whole or as metadata alone.

use crate::{
    negotiate::{MediaType, Negotiated, View},
    object::Object,
    protobuf,
    status::ApiStatus,
};
use bytes::Bytes;
use moka::sync::Cache;
use serde_json::{Value, json};
use std::sync::Arc;

/// Cost of an entry beyond its response, in bytes.
const ENTRY_OVERHEAD: usize = 160;

/// Encoder for objects of one kind in the form that one client requests.
#[derive(Clone, Debug)]
pub(crate) struct Encoder {
    pub(crate) negotiated: Negotiated,
    pub(crate) api_version: String,
    pub(crate) kind: String,
}

/// A list, or a part of one.
#[derive(Debug)]
pub(crate) struct ListPage {
    pub(crate) version: u64,
    pub(crate) objects: Vec<Arc<Object>>,
    /// Token of the next part, and number of objects in all remaining parts.
    pub(crate) continuation: Option<(String, u64)>,
}

/// Types of events on the wire.
pub(crate) const ADDED: &str = "ADDED";
pub(crate) const MODIFIED: &str = "MODIFIED";
pub(crate) const DELETED: &str = "DELETED";
const BOOKMARK: &str = "BOOKMARK";
const ERROR: &str = "ERROR";

impl Encoder {
    /// Returns an identifier of this encoding, different from all others.
    pub(crate) fn cache_key(&self) -> String {
        format!("{:?}{:?}", self.negotiated.format, self.negotiated.view)
    }

    /// Whether the form is plain JSON, so that nothing has to be converted.
    pub(crate) fn is_plain(&self) -> bool {
        self.negotiated == Negotiated::JSON
    }

    /// Returns the same encoder for JSON, for an object that does not match its schema: no field of it may be lost.
    fn as_json(&self) -> Self {
        let mut json = self.clone();
        json.negotiated.format = MediaType::Json;
        json
    }

    /// Encodes one object as a response. Also returns the form of the response.
    pub(crate) fn encode_object(&self, object: &Object) -> (Bytes, Negotiated) {
        match (self.negotiated.format, self.negotiated.view) {
            (MediaType::Json, View::Whole) => (object.json.clone(), self.negotiated),
            (MediaType::Json, _) => (
                Bytes::from(self.apply_view(object).to_string()),
                self.negotiated,
            ),
            (MediaType::Protobuf, _) => match protobuf::encode_object(&self.apply_view(object)) {
                Some(bytes) => (bytes.into(), self.negotiated),
                None => self.as_json().encode_object(object),
            },
        }
    }

    /// Returns the object in the requested view.
    fn apply_view(&self, object: &Object) -> Value {
        let value = object.to_value();
        match self.negotiated.view {
            View::Whole => value,
            View::Metadata => partial_metadata(&value),
        }
    }

    /// Encodes a list. Also returns its form.
    pub(crate) fn encode_list(&self, page: &ListPage) -> (Bytes, Negotiated) {
        match (self.negotiated.format, self.negotiated.view) {
            (MediaType::Json, View::Whole) => (self.encode_list_json(page), self.negotiated),
            (MediaType::Protobuf, _) => match self.encode_list_protobuf(page) {
                Some(bytes) => (bytes, self.negotiated),
                None => self.as_json().encode_list(page),
            },
            (MediaType::Json, View::Metadata) => {
                let items = page
                    .objects
                    .iter()
                    .map(|object| partial_metadata(&object.to_value()));
                let list = json!({
                    "kind": "PartialObjectMetadataList",
                    "apiVersion": "meta.k8s.io/v1",
                    "metadata": list_meta(page),
                    "items": items.collect::<Vec<_>>(),
                });
                (Bytes::from(list.to_string()), self.negotiated)
            }
        }
    }

    /// Encodes a list as JSON, each object byte for byte as the cloud sent it.
    fn encode_list_json(&self, page: &ListPage) -> Bytes {
        let length: usize = page
            .objects
            .iter()
            .map(|object| object.json.len() + 1)
            .sum();
        let mut list = String::with_capacity(length + 256).into_bytes();
        let (kind, version) = (&self.kind, &self.api_version);
        let head = format!(
            "{{\"kind\":\"{kind}List\",\"apiVersion\":\"{version}\",\"metadata\":{},\"items\":[",
            list_meta(page)
        );
        list.extend_from_slice(head.as_bytes());
        for (index, object) in page.objects.iter().enumerate() {
            if index > 0 {
                list.push(b',');
            }
            list.extend_from_slice(&object.json);
        }
        list.extend_from_slice(b"]}\n");
        list.into()
    }

    /// Encodes a list as protobuf. Returns `None` if an object does not match its schema.
    fn encode_list_protobuf(&self, page: &ListPage) -> Option<Bytes> {
        let (version, kind) = match self.negotiated.view {
            View::Metadata => ("meta.k8s.io/v1", "PartialObjectMetadata"),
            View::Whole => (&*self.api_version, &*self.kind),
        };
        let encode_item =
            |object: &Arc<Object>| protobuf::encode_message(version, kind, &object.to_value());
        let items: Option<Vec<_>> = page.objects.iter().map(encode_item).collect();
        let items = items?;
        let version_text = page.version.to_string();
        let continuation = page.continuation.as_ref();
        let meta = protobuf::ListMeta {
            version: &version_text,
            continue_token: continuation.map(|more| more.0.as_str()),
            remaining: continuation.map(|more| more.1),
        };
        let mut items = items.iter().map(Vec::as_slice);
        let list = protobuf::encode_list(version, &format!("{kind}List"), &meta, &mut items);
        // Shrunk, because the cache counts the length and not the capacity.
        Some(list.into_boxed_slice().into())
    }

    /// Encodes one event of a watch, as a frame of its stream.
    pub(crate) fn encode_event(&self, event_type: &'static str, object: &Object) -> Bytes {
        if self.is_plain() {
            return json_frame(event_type, &object.json);
        }
        self.encode_frame(event_type, &self.apply_view(object))
    }

    fn encode_frame(&self, event_type: &'static str, value: &Value) -> Bytes {
        match self.negotiated.format {
            MediaType::Json => json_frame(event_type, value.to_string().as_bytes()),
            MediaType::Protobuf => match protobuf::encode_object(value) {
                Some(envelope) => protobuf::encode_watch_frame(event_type, &envelope)
                    .into_boxed_slice()
                    .into(),
                None => self.encode_error(&ApiStatus::no_protobuf()),
            },
        }
    }

    /// Encodes a bookmark, which states that nothing has happened up to this version. At the end of a watch's initial events
    /// it marks that they are complete.
    pub(crate) fn encode_bookmark(&self, version: u64, is_end: bool) -> Bytes {
        let mut meta = json!({ "resourceVersion": version.to_string() });
        if is_end {
            meta["annotations"] = json!({ "k8s.io/initial-events-end": "true" });
        }
        let (api_version, kind) = match self.negotiated.view {
            View::Whole => (&*self.api_version, &*self.kind),
            View::Metadata => ("meta.k8s.io/v1", "PartialObjectMetadata"),
        };
        let value = json!({ "kind": kind, "apiVersion": api_version, "metadata": meta });
        self.encode_frame(BOOKMARK, &value)
    }

    /// Encodes an error that ends the watch.
    pub(crate) fn encode_error(&self, failure: &ApiStatus) -> Bytes {
        match self.negotiated.format {
            MediaType::Json => json_frame(ERROR, failure.to_json().to_string().as_bytes()),
            MediaType::Protobuf => {
                protobuf::encode_watch_frame(ERROR, &protobuf::encode_status(&failure.to_json()))
                    .into()
            }
        }
    }
}

fn json_frame(event_type: &str, object: &[u8]) -> Bytes {
    let mut frame = Vec::with_capacity(object.len() + 40);
    frame.extend_from_slice(b"{\"type\":\"");
    frame.extend_from_slice(event_type.as_bytes());
    frame.extend_from_slice(b"\",\"object\":");
    frame.extend_from_slice(object);
    frame.extend_from_slice(b"}\n");
    frame.into()
}

fn list_meta(page: &ListPage) -> Value {
    let mut meta = json!({ "resourceVersion": page.version.to_string() });
    if let Some((next, remaining)) = &page.continuation {
        meta["continue"] = next.as_str().into();
        meta["remainingItemCount"] = (*remaining).into();
    }
    meta
}

/// Returns the `PartialObjectMetadata` of an object.
fn partial_metadata(value: &Value) -> Value {
    json!({
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": value["metadata"],
    })
}

/// Cache of encoded responses by request, bounded in bytes. Cheap to clone. All clients that send the same request share it.
#[derive(Clone, Debug)]
pub(crate) struct ResponseCache(Cache<Box<str>, Bytes>);

impl ResponseCache {
    /// Returns a cache with room for this many bytes.
    pub(crate) fn new(max_bytes: u64) -> Self {
        let cache = Cache::builder()
            .max_capacity(max_bytes)
            .weigher(weight)
            .build();
        Self(cache)
    }

    pub(crate) fn get(&self, key: &str) -> Option<Bytes> {
        self.0.get(key)
    }

    pub(crate) fn put(&self, key: &str, bytes: &Bytes) {
        self.0.insert(key.into(), bytes.clone());
    }

    /// Returns the size of the cached responses, in bytes.
    #[cfg(test)]
    pub(crate) fn cached_bytes(&self) -> u64 {
        self.0.run_pending_tasks();
        self.0.weighted_size()
    }
}

/// Returns the cost of an entry, in bytes.
#[expect(clippy::borrowed_box, reason = "the signature of moka's weigher")]
fn weight(key: &Box<str>, bytes: &Bytes) -> u32 {
    u32::try_from(key.len() + bytes.len() + ENTRY_OVERHEAD).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_response_cache_stays_within_its_size() {
        let cache = ResponseCache::new(100_000);
        let bytes = Bytes::from(vec![0; 1000]);
        for number in 0..1000 {
            cache.put(&format!("{number}"), &bytes);
            assert!(cache.cached_bytes() <= 100_000);
        }
        assert!((0..1000).any(|number| cache.get(&format!("{number}")).is_some()));
        assert!(cache.get("1001").is_none());
    }
}
