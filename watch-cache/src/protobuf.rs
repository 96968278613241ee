//! Objects of Kubernetes in its protobuf encoding, made from their JSON.
//!
//! Owns the encoding of objects, lists, watch events and statuses; `schema` has the fields of each kind. Never decodes, and has
//! no state. The one rule: fields in the JSON are written, and missing fields are left out. A decoder takes a missing field for
//! its zero value, as the JSON meant it. The output of a kube-apiserver for the same JSON differs only in those zero values.
//!
//! A value that is not of its field's type is never left out: the encoding fails then, and the response is in JSON. A lost
//! `deletionTimestamp` would make a dying object look alive.

mod schema;
#[cfg(test)]
mod tests;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use schema::{Field, Kind};
use serde_json::Value;
use std::time::UNIX_EPOCH;

/// Prefix of every protobuf response of Kubernetes, except a watch's frames.
const MAGIC: &[u8] = b"k8s\0";

/// Wire types: a variable-length integer, and bytes with their length before them.
const VARINT: u32 = 0;
const BYTES: u32 = 2;

/// Fields of a list beside its items.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ListMeta<'a> {
    /// The list's resourceVersion.
    pub(crate) version: &'a str,
    /// `continue`: the token for the next page.
    pub(crate) next: Option<&'a str>,
    /// Number of items on the pages after this one.
    pub(crate) remaining: Option<u64>,
}

/// Encodes one object in Kubernetes' envelope, for a GET and as the object of a watch event.
///
/// Returns `None` if its kind has no schema here, or if the object does not match its schema; the response is JSON then.
pub(crate) fn object(value: &Value) -> Option<Vec<u8>> {
    let api_version = value.get("apiVersion")?.as_str()?;
    let kind = value.get("kind")?.as_str()?;
    Some(envelope(
        api_version,
        kind,
        &bare(api_version, kind, value)?,
    ))
}

/// Whether objects of this kind have a schema here.
pub(crate) fn has(api_version: &str, kind: &str) -> bool {
    schema::fields(api_version, kind).is_some()
}

/// Encodes one object's own message without envelope, for use in a list. `kind` is that of the object, not the list's. As a
/// `PartialObjectMetadata` an object of any kind can be encoded.
///
/// Returns `None` in the same cases as `object`.
pub(crate) fn bare(api_version: &str, kind: &str, value: &Value) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    message(&mut out, schema::fields(api_version, kind)?, value)?;
    Some(out)
}

/// A list in its envelope, of items as `bare` gives them.
pub(crate) fn list(
    api_version: &str,
    list_kind: &str,
    meta: &ListMeta,
    items: &mut dyn Iterator<Item = &[u8]>,
) -> Vec<u8> {
    let (mut out, raw) = begin(api_version, list_kind);
    let start = open(&mut out, 1);
    // selfLink, which is empty since Kubernetes 1.20 but still always written.
    bytes(&mut out, 1, b"");
    bytes(&mut out, 2, meta.version.as_bytes());
    bytes(&mut out, 3, meta.next.unwrap_or_default().as_bytes());
    if let Some(remaining) = meta.remaining {
        integer(&mut out, 4, remaining);
    }
    close(&mut out, start);
    for item in items {
        bytes(&mut out, 2, item);
    }
    end(out, raw)
}

/// Encodes one event of a watch (`ADDED` and so on) with an object as `object` returns it, or a status for `ERROR`.
///
/// The event itself has neither magic nor envelope, but its length in four bytes before it.
pub(crate) fn frame(kind: &str, object_envelope: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 4];
    bytes(&mut out, 1, kind.as_bytes());
    let raw = open(&mut out, 2);
    bytes(&mut out, 1, object_envelope);
    close(&mut out, raw);
    let length = u32::try_from(out.len() - 4).expect("an object has far less than 4 GiB");
    out[..4].copy_from_slice(&length.to_be_bytes());
    out
}

/// Encodes a `Status` in its envelope. A `Status` that does not match its schema is encoded as an empty one: the status code of
/// the response is sufficient.
pub(crate) fn status(value: &Value) -> Vec<u8> {
    envelope(
        "v1",
        "Status",
        &bare("v1", "Status", value).unwrap_or_default(),
    )
}

fn envelope(api_version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
    let (mut out, start) = begin(api_version, kind);
    out.extend_from_slice(raw);
    end(out, start)
}

/// Begins the envelope (runtime.Unknown), up to the start of its object.
fn begin(api_version: &str, kind: &str) -> (Vec<u8>, usize) {
    let mut out = MAGIC.to_vec();
    let start = open(&mut out, 1);
    bytes(&mut out, 1, api_version.as_bytes());
    bytes(&mut out, 2, kind.as_bytes());
    close(&mut out, start);
    let raw = open(&mut out, 2);
    (out, raw)
}

/// Ends the envelope after its object: contentEncoding and contentType, which are always written, and always empty.
fn end(mut out: Vec<u8>, raw: usize) -> Vec<u8> {
    close(&mut out, raw);
    bytes(&mut out, 3, b"");
    bytes(&mut out, 4, b"");
    out
}

/// Encodes the fields that `value` has. Fields that the schema does not know are of a newer Kubernetes than the schema: they are
/// left out, as an equally old decoder would skip them.
fn message(out: &mut Vec<u8>, fields: &[Field], value: &Value) -> Option<()> {
    let object = value.as_object()?;
    for Field(name, number, kind) in fields {
        if let Some(value) = object.get(*name) {
            put(out, *number, kind, value)?;
        }
    }
    Some(())
}

/// Encodes one field. Returns `None` if the value is not of the field's kind.
fn put(out: &mut Vec<u8>, number: u32, kind: &Kind, value: &Value) -> Option<()> {
    match (kind, value) {
        (_, Value::Null) => {}
        (Kind::Text, Value::String(text)) => bytes(out, number, text.as_bytes()),
        // Protobuf encodes negative numbers as 64-bit two's complement for every field size.
        (Kind::Int, Value::Number(whole)) => integer(out, number, whole.as_i64()?.cast_unsigned()),
        (Kind::Flag, Value::Bool(flag)) => integer(out, number, u64::from(*flag)),
        (Kind::Bytes, Value::String(text)) => bytes(out, number, &STANDARD.decode(text).ok()?),
        (Kind::Many(each), Value::Array(items)) => {
            for item in items {
                // A null in an array counts as an item, which protobuf cannot encode.
                (!item.is_null()).then_some(())?;
                put(out, number, each, item)?;
            }
        }
        (Kind::Map(each), Value::Object(entries)) => {
            for (key, value) in entries {
                let start = open(out, number);
                bytes(out, 1, key.as_bytes());
                put(out, 2, each, value)?;
                close(out, start);
            }
        }
        _ => {
            let start = open(out, number);
            within(out, kind, value)?;
            close(out, start);
        }
    }
    Some(())
}

/// Encodes the content of a field that is a message of its own.
fn within(out: &mut Vec<u8>, kind: &Kind, value: &Value) -> Option<()> {
    match (kind, value) {
        (Kind::Message(fields), _) => message(out, fields, value)?,
        (Kind::Time, Value::String(text)) => {
            let time = humantime::parse_rfc3339(text).ok()?;
            integer(out, 1, time.duration_since(UNIX_EPOCH).ok()?.as_secs());
            // Kubernetes omits the nanoseconds of Time, because its JSON does not have them.
            integer(out, 2, 0);
        }
        (Kind::Quantity, Value::String(text)) => bytes(out, 1, text.as_bytes()),
        (Kind::IntOrText, Value::Number(whole)) => {
            integer(out, 1, 0);
            integer(out, 2, whole.as_i64()?.cast_unsigned());
            bytes(out, 3, b"");
        }
        (Kind::IntOrText, Value::String(text)) => {
            integer(out, 1, 1);
            integer(out, 2, 0);
            bytes(out, 3, text.as_bytes());
        }
        (Kind::Json, _) => bytes(out, 1, value.to_string().as_bytes()),
        _ => return None,
    }
    Some(())
}

fn integer(out: &mut Vec<u8>, number: u32, value: u64) {
    varint(out, u64::from(number << 3 | VARINT));
    varint(out, value);
}

fn bytes(out: &mut Vec<u8>, number: u32, value: &[u8]) {
    varint(out, u64::from(number << 3 | BYTES));
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Begins a message within another. Returns its position, for `close`.
fn open(out: &mut Vec<u8>, number: u32) -> usize {
    varint(out, u64::from(number << 3 | BYTES));
    out.len()
}

/// Ends the message that began at `start`. Its length belongs before it and is known only now. The length is written behind the
/// message, and rotated to its beginning.
fn close(out: &mut Vec<u8>, start: usize) {
    let behind = out.len();
    varint(out, (behind - start) as u64);
    let length = out.len() - behind;
    out[start..].rotate_right(length);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}
