//! Objects of Kubernetes in its protobuf encoding, made from their JSON.
//!
//! Owns the encoding of objects, lists, watch events and statuses; `schema` has the fields of each kind. Never decodes, and
//! has no state. The one rule: fields in the JSON are written, and missing fields are left out. A decoder reads a missing
//! field as its zero value, which has the same meaning as in the JSON. The output of a kube-apiserver for the same JSON
//! differs only in those zero values.
//!
//! A value that is not of its field's type is never left out: the encoding fails, and the response is in JSON. Without its
//! `deletionTimestamp`, for example, an object that is being deleted would look alive.

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

/// Wire types: a variable-length integer, and bytes preceded by their length.
const VARINT: u32 = 0;
const BYTES: u32 = 2;

/// Fields of a list beside its items.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ListMeta<'a> {
    /// The list's resourceVersion.
    pub(crate) version: &'a str,
    /// `continue`: the token for the next page.
    pub(crate) continue_token: Option<&'a str>,
    /// Number of items on the pages after this one.
    pub(crate) remaining: Option<u64>,
}

/// Encodes one object in Kubernetes' envelope, for a GET and as the object of a watch event.
///
/// Returns `None` if its kind has no schema here, or if the object does not match its schema. The response is then in JSON.
pub(crate) fn encode_object(value: &Value) -> Option<Vec<u8>> {
    let api_version = value.get("apiVersion")?.as_str()?;
    let kind = value.get("kind")?.as_str()?;
    Some(encode_envelope(
        api_version,
        kind,
        &encode_message(api_version, kind, value)?,
    ))
}

/// Whether objects of this kind have a schema here.
pub(crate) fn has_schema(api_version: &str, kind: &str) -> bool {
    schema::fields_of_kind(api_version, kind).is_some()
}

/// Encodes one object's own message without envelope, for use in a list. `kind` is that of the object, not the list's.
/// Objects of any kind can be encoded as `PartialObjectMetadata`.
///
/// Returns `None` in the same cases as [`encode_object`].
pub(crate) fn encode_message(api_version: &str, kind: &str, value: &Value) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    put_message(&mut out, schema::fields_of_kind(api_version, kind)?, value)?;
    Some(out)
}

/// Encodes a list in its envelope. The items come from [`encode_message`].
pub(crate) fn encode_list(
    api_version: &str,
    list_kind: &str,
    meta: &ListMeta,
    items: &mut dyn Iterator<Item = &[u8]>,
) -> Vec<u8> {
    let (mut out, object_start) = begin_envelope(api_version, list_kind);
    let start = open_message(&mut out, 1);
    // selfLink, which is empty since Kubernetes 1.20 but still always written.
    put_bytes(&mut out, 1, b"");
    put_bytes(&mut out, 2, meta.version.as_bytes());
    put_bytes(
        &mut out,
        3,
        meta.continue_token.unwrap_or_default().as_bytes(),
    );
    if let Some(remaining) = meta.remaining {
        put_integer(&mut out, 4, remaining);
    }
    close_message(&mut out, start);
    for item in items {
        put_bytes(&mut out, 2, item);
    }
    end_envelope(out, object_start)
}

/// Encodes one event of a watch (`ADDED` and so on) with an object from [`encode_object`], or with a status for `ERROR`.
///
/// The event itself has neither magic nor envelope, but its length in four bytes before it.
pub(crate) fn encode_watch_frame(event_type: &str, object_envelope: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 4];
    put_bytes(&mut out, 1, event_type.as_bytes());
    let object_start = open_message(&mut out, 2);
    put_bytes(&mut out, 1, object_envelope);
    close_message(&mut out, object_start);
    let length = u32::try_from(out.len() - 4).expect("an object has far less than 4 GiB");
    out[..4].copy_from_slice(&length.to_be_bytes());
    out
}

/// Encodes a `Status` in its envelope. A `Status` that does not match its schema is encoded as an empty one: the status code of
/// the response is sufficient.
pub(crate) fn encode_status(value: &Value) -> Vec<u8> {
    encode_envelope(
        "v1",
        "Status",
        &encode_message("v1", "Status", value).unwrap_or_default(),
    )
}

fn encode_envelope(api_version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
    let (mut out, object_start) = begin_envelope(api_version, kind);
    out.extend_from_slice(raw);
    end_envelope(out, object_start)
}

/// Begins the envelope (runtime.Unknown), up to the start of its object.
fn begin_envelope(api_version: &str, kind: &str) -> (Vec<u8>, usize) {
    let mut out = MAGIC.to_vec();
    let start = open_message(&mut out, 1);
    put_bytes(&mut out, 1, api_version.as_bytes());
    put_bytes(&mut out, 2, kind.as_bytes());
    close_message(&mut out, start);
    let object_start = open_message(&mut out, 2);
    (out, object_start)
}

/// Ends the envelope after its object: contentEncoding and contentType, which are always written, and always empty.
fn end_envelope(mut out: Vec<u8>, object_start: usize) -> Vec<u8> {
    close_message(&mut out, object_start);
    put_bytes(&mut out, 3, b"");
    put_bytes(&mut out, 4, b"");
    out
}

/// Encodes the fields that `value` has. Fields that the schema does not contain belong to a newer Kubernetes. They are left
/// out, as an equally old decoder would skip them.
fn put_message(out: &mut Vec<u8>, fields: &[Field], value: &Value) -> Option<()> {
    let object = value.as_object()?;
    for Field(name, number, kind) in fields {
        if let Some(value) = object.get(*name) {
            put_field(out, *number, kind, value)?;
        }
    }
    Some(())
}

/// Encodes one field. Returns `None` if the value is not of the field's kind.
fn put_field(out: &mut Vec<u8>, number: u32, kind: &Kind, value: &Value) -> Option<()> {
    match (kind, value) {
        (_, Value::Null) => {}
        (Kind::Text, Value::String(text)) => put_bytes(out, number, text.as_bytes()),
        // Protobuf encodes negative numbers as 64-bit two's complement for every field size.
        (Kind::Int, Value::Number(int)) => put_integer(out, number, int.as_i64()?.cast_unsigned()),
        (Kind::Flag, Value::Bool(flag)) => put_integer(out, number, u64::from(*flag)),
        (Kind::Bytes, Value::String(text)) => put_bytes(out, number, &STANDARD.decode(text).ok()?),
        (Kind::Repeated(item_kind), Value::Array(items)) => {
            for item in items {
                // A null in an array counts as an item, which protobuf cannot encode.
                (!item.is_null()).then_some(())?;
                put_field(out, number, item_kind, item)?;
            }
        }
        (Kind::Map(value_kind), Value::Object(entries)) => {
            for (key, value) in entries {
                let start = open_message(out, number);
                put_bytes(out, 1, key.as_bytes());
                put_field(out, 2, value_kind, value)?;
                close_message(out, start);
            }
        }
        _ => {
            let start = open_message(out, number);
            put_nested(out, kind, value)?;
            close_message(out, start);
        }
    }
    Some(())
}

/// Encodes the content of a field that is a message of its own.
fn put_nested(out: &mut Vec<u8>, kind: &Kind, value: &Value) -> Option<()> {
    match (kind, value) {
        (Kind::Message(fields), _) => put_message(out, fields, value)?,
        (Kind::Time, Value::String(text)) => {
            let time = humantime::parse_rfc3339(text).ok()?;
            put_integer(out, 1, time.duration_since(UNIX_EPOCH).ok()?.as_secs());
            // Kubernetes omits the nanoseconds of Time, because its JSON does not have them.
            put_integer(out, 2, 0);
        }
        (Kind::Quantity, Value::String(text)) => put_bytes(out, 1, text.as_bytes()),
        (Kind::IntOrText, Value::Number(int)) => {
            put_integer(out, 1, 0);
            put_integer(out, 2, int.as_i64()?.cast_unsigned());
            put_bytes(out, 3, b"");
        }
        (Kind::IntOrText, Value::String(text)) => {
            put_integer(out, 1, 1);
            put_integer(out, 2, 0);
            put_bytes(out, 3, text.as_bytes());
        }
        (Kind::Json, _) => put_bytes(out, 1, value.to_string().as_bytes()),
        _ => return None,
    }
    Some(())
}

fn put_integer(out: &mut Vec<u8>, number: u32, value: u64) {
    put_varint(out, u64::from(number << 3 | VARINT));
    put_varint(out, value);
}

fn put_bytes(out: &mut Vec<u8>, number: u32, value: &[u8]) {
    put_varint(out, u64::from(number << 3 | BYTES));
    put_varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Begins a message within another. Returns its position, for `close_message`.
fn open_message(out: &mut Vec<u8>, number: u32) -> usize {
    put_varint(out, u64::from(number << 3 | BYTES));
    out.len()
}

/// Ends the message that began at `start`. Its length has to precede it and is known only now. So the length is appended, and
/// rotated to the beginning of the message.
fn close_message(out: &mut Vec<u8>, start: usize) {
    let content_end = out.len();
    put_varint(out, (content_end - start) as u64);
    let length = out.len() - content_end;
    out[start..].rotate_right(length);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}
