//! Encoding of objects in the form that a client requests: JSON or protobuf, whole or as metadata alone.

use crate::{
    negotiate::{MediaType, Negotiated, View},
    object::Object,
    protobuf,
    status::ApiStatus,
};
use bytes::Bytes;
use serde_json::{Value, json};
use std::sync::Arc;

/// Form in which one client wants objects of one kind.
#[derive(Clone, Debug)]
pub(crate) struct Encoder {
    pub(crate) form: Negotiated,
    pub(crate) api_version: String,
    pub(crate) kind: String,
}

/// A list, or a part of one.
#[derive(Debug)]
pub(crate) struct ListPage {
    pub(crate) version: u64,
    pub(crate) objects: Vec<Arc<Object>>,
    /// Token of the next part, and number of objects in all remaining parts.
    pub(crate) more: Option<(String, u64)>,
}

/// An event's type on the wire.
pub(crate) const ADDED: &str = "ADDED";
pub(crate) const MODIFIED: &str = "MODIFIED";
pub(crate) const DELETED: &str = "DELETED";
const BOOKMARK: &str = "BOOKMARK";
const ERROR: &str = "ERROR";

impl Encoder {
    /// Returns an identifier of this encoding, different from all others.
    pub(crate) fn word(&self) -> String {
        format!("{:?}{:?}", self.form.format, self.form.shape)
    }

    /// Whether the form is plain JSON, so that nothing has to be converted.
    pub(crate) fn is_plain(&self) -> bool {
        self.form == Negotiated::JSON
    }

    /// Returns the same encoder for JSON, for an object that does not match its schema: no field of it may be lost.
    fn in_json(&self) -> Self {
        let mut json = self.clone();
        json.form.format = MediaType::Json;
        json
    }

    /// Encodes one object as a response. Returns the form that it has as well.
    pub(crate) fn object(&self, object: &Object) -> (Bytes, Negotiated) {
        match (self.form.format, self.form.shape) {
            (MediaType::Json, View::Whole) => (object.json.clone(), self.form),
            (MediaType::Json, _) => (Bytes::from(self.shaped(object).to_string()), self.form),
            (MediaType::Protobuf, _) => match protobuf::object(&self.shaped(object)) {
                Some(bytes) => (bytes.into(), self.form),
                None => self.in_json().object(object),
            },
        }
    }

    /// The object in the shape that is wanted.
    fn shaped(&self, object: &Object) -> Value {
        let value = object.value();
        match self.form.shape {
            View::Whole => value,
            View::Metadata => metadata(&value),
        }
    }

    /// A list, and the form that it has.
    pub(crate) fn list(&self, page: &ListPage) -> (Bytes, Negotiated) {
        match (self.form.format, self.form.shape) {
            (MediaType::Json, View::Whole) => (self.list_json(page), self.form),
            (MediaType::Protobuf, _) => match self.list_protobuf(page) {
                Some(bytes) => (bytes, self.form),
                None => self.in_json().list(page),
            },
            (MediaType::Json, View::Metadata) => {
                let items = page.objects.iter().map(|object| metadata(&object.value()));
                let list = json!({
                    "kind": "PartialObjectMetadataList",
                    "apiVersion": "meta.k8s.io/v1",
                    "metadata": list_meta(page),
                    "items": items.collect::<Vec<_>>(),
                });
                (Bytes::from(list.to_string()), self.form)
            }
        }
    }

    /// Byte for byte what the cloud gave.
    fn list_json(&self, page: &ListPage) -> Bytes {
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
        for (at, object) in page.objects.iter().enumerate() {
            if at > 0 {
                list.push(b',');
            }
            list.extend_from_slice(&object.json);
        }
        list.extend_from_slice(b"]}\n");
        list.into()
    }

    /// Encodes a list as protobuf. Returns `None` if an object does not match its schema.
    fn list_protobuf(&self, page: &ListPage) -> Option<Bytes> {
        let (version, kind) = match self.form.shape {
            View::Metadata => ("meta.k8s.io/v1", "PartialObjectMetadata"),
            View::Whole => (&*self.api_version, &*self.kind),
        };
        let bare = |object: &Arc<Object>| protobuf::bare(version, kind, &object.value());
        let items: Option<Vec<_>> = page.objects.iter().map(bare).collect();
        let items = items?;
        let newest = page.version.to_string();
        let more = page.more.as_ref();
        let meta = protobuf::ListMeta {
            version: &newest,
            next: more.map(|more| more.0.as_str()),
            remaining: more.map(|more| more.1),
        };
        let mut items = items.iter().map(Vec::as_slice);
        let list = protobuf::list(version, &format!("{kind}List"), &meta, &mut items);
        // Shrunk, because the cache counts the length and not the capacity.
        Some(list.into_boxed_slice().into())
    }

    /// Encodes one event of a watch, as a frame of its stream.
    pub(crate) fn event(&self, word: &'static str, object: &Object) -> Bytes {
        if self.is_plain() {
            return frame(word, &object.json);
        }
        self.framed(word, &self.shaped(object))
    }

    fn framed(&self, word: &'static str, value: &Value) -> Bytes {
        match self.form.format {
            MediaType::Json => frame(word, value.to_string().as_bytes()),
            MediaType::Protobuf => match protobuf::object(value) {
                Some(envelope) => protobuf::frame(word, &envelope).into_boxed_slice().into(),
                None => self.error(&ApiStatus::no_protobuf()),
            },
        }
    }

    /// Encodes a bookmark: nothing has happened up to this version. At the end of a watch's initial events it marks that they are
    /// complete.
    pub(crate) fn bookmark(&self, version: u64, is_end: bool) -> Bytes {
        let mut meta = json!({ "resourceVersion": version.to_string() });
        if is_end {
            meta["annotations"] = json!({ "k8s.io/initial-events-end": "true" });
        }
        let (api_version, kind) = match self.form.shape {
            View::Whole => (&*self.api_version, &*self.kind),
            View::Metadata => ("meta.k8s.io/v1", "PartialObjectMetadata"),
        };
        let value = json!({ "kind": kind, "apiVersion": api_version, "metadata": meta });
        self.framed(BOOKMARK, &value)
    }

    /// Encodes an error that ends the watch.
    pub(crate) fn error(&self, failure: &ApiStatus) -> Bytes {
        match self.form.format {
            MediaType::Json => frame(ERROR, failure.value().to_string().as_bytes()),
            MediaType::Protobuf => {
                protobuf::frame(ERROR, &protobuf::status(&failure.value())).into()
            }
        }
    }
}

fn frame(word: &str, object: &[u8]) -> Bytes {
    let mut frame = Vec::with_capacity(object.len() + 40);
    frame.extend_from_slice(b"{\"type\":\"");
    frame.extend_from_slice(word.as_bytes());
    frame.extend_from_slice(b"\",\"object\":");
    frame.extend_from_slice(object);
    frame.extend_from_slice(b"}\n");
    frame.into()
}

fn list_meta(page: &ListPage) -> Value {
    let mut meta = json!({ "resourceVersion": page.version.to_string() });
    if let Some((next, remaining)) = &page.more {
        meta["continue"] = next.as_str().into();
        meta["remainingItemCount"] = (*remaining).into();
    }
    meta
}

/// `PartialObjectMetadata` of an object.
fn metadata(value: &Value) -> Value {
    json!({
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": value["metadata"],
    })
}
