//! Compares the encoding with the output of Kubernetes' own Go types and codecs (v0.36.3) for the same objects. Each file has an
//! object's JSON and Go's protobuf of it, as base64. In `every-*` each field of the type has a value other than zero.

use super::*;
use serde_json::{Map, json};

/// Returns the JSON and the bytes that Go wrote.
fn sample(text: &str) -> (Value, Vec<u8>) {
    let file: Value = serde_json::from_str(text).unwrap();
    let proto = STANDARD.decode(file["protobuf"].as_str().unwrap()).unwrap();
    (file["object"].clone(), proto)
}

macro_rules! sample {
    ($name:literal) => {
        sample(include_str!(concat!("tests/", $name, ".json")))
    };
}

/// Checks a sample in which every field is set: then no field is written by Go only.
fn with_every_field(sample: (Value, Vec<u8>)) {
    let (object, go) = sample;
    let ours = super::encode_object(&object).unwrap();
    assert_eq!(decoded(&go), object, "the output of Go");
    assert_eq!(decoded(&ours), object, "our output");
    assert_eq!(ours, go);
}

/// Checks a sample in the form in which kube-apiserver sends it: Go writes zeros that are not in the JSON.
fn as_it_is_met(sample: (Value, Vec<u8>)) {
    let (object, go) = sample;
    let ours = decoded(&super::encode_object(&object).unwrap());
    assert_eq!(ours, without(&object, &|value| value.is_null()));
    let zeros = [json!(null), json!(""), json!(0), json!(false), json!({})];
    let zero = |value: &Value| zeros.contains(value);
    assert_eq!(without(&decoded(&go), &zero), without(&object, &zero));
}

#[test]
fn an_endpoint_slice_with_every_field_matches_go() {
    with_every_field(sample!("every-endpointslice"));
}

#[test]
fn endpoints_with_every_field_match_go() {
    with_every_field(sample!("every-endpoints"));
}

#[test]
fn a_service_with_every_field_matches_go() {
    with_every_field(sample!("every-service"));
}

#[test]
fn a_namespace_with_every_field_matches_go() {
    with_every_field(sample!("every-namespace"));
}

#[test]
fn a_node_with_every_field_matches_go() {
    with_every_field(sample!("every-node"));
}

#[test]
fn a_config_map_with_every_field_matches_go() {
    with_every_field(sample!("every-configmap"));
}

#[test]
fn a_service_cidr_with_every_field_matches_go() {
    with_every_field(sample!("every-servicecidr"));
}

#[test]
fn metadata_alone_with_every_field_matches_go() {
    with_every_field(sample!("every-partialobjectmetadata"));
}

#[test]
fn a_status_with_every_field_matches_go() {
    let (object, go) = sample!("every-status");
    assert_eq!(encode_status(&object), go);
    with_every_field((object, go));
}

#[test]
fn real_objects_match_their_json() {
    as_it_is_met(sample!("service"));
    as_it_is_met(sample!("endpointslice"));
    as_it_is_met(sample!("bookmark"));
    as_it_is_met(sample!("status"));
}

#[test]
fn a_list_matches_go() {
    let (object, go) = sample!("list");
    let items: Vec<Vec<u8>> = object["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| encode_message("discovery.k8s.io/v1", "EndpointSlice", item).unwrap())
        .collect();
    let meta = ListMeta {
        version: "12345",
        continue_token: Some("eyJ2Ijo"),
        remaining: Some(300),
    };
    let mut items = items.iter().map(Vec::as_slice);
    let ours = encode_list(
        "discovery.k8s.io/v1",
        "EndpointSliceList",
        &meta,
        &mut items,
    );
    assert_eq!(ours, go);
}

#[test]
fn a_watch_event_is_framed_as_go_frames_it() {
    let (event, go) = sample!("frame");
    let object = super::encode_object(&event["object"]).unwrap();
    assert_eq!(encode_watch_frame("MODIFIED", &object), go);
}

#[test]
fn metadata_alone_can_be_said_of_an_object_of_any_kind() {
    let (object, _) = sample!("service");
    let ours = encode_message("meta.k8s.io/v1", "PartialObjectMetadata", &object).unwrap();
    let fields = schema::fields_of_kind("meta.k8s.io/v1", "PartialObjectMetadata").unwrap();
    assert_eq!(
        Value::Object(message_of(&ours, fields))["metadata"],
        object["metadata"]
    );
}

#[test]
fn objects_that_do_not_match_a_schema_are_not_sent_in_protobuf() {
    let widget = json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {}});
    assert_eq!(super::encode_object(&widget), None);
    assert!(!has_schema("example.com/v1", "Widget"));
    // Two kinds of this name, with different fields.
    assert!(has_schema("v1", "Service") && !has_schema("serving.knative.dev/v1", "Service"));
    for spoilt in [
        json!({"metadata": {"deletionTimestamp": "yesterday"}}),
        json!({"metadata": {"generation": "3"}}),
        json!({"metadata": {"generation": 1.5}}),
        json!({"metadata": {"labels": ["a"]}}),
        json!({"metadata": {"finalizers": [null]}}),
        json!({"metadata": "a"}),
        json!({"binaryData": {"a": "not base64!"}}),
        json!([]),
    ] {
        assert_eq!(encode_message("v1", "ConfigMap", &spoilt), None, "{spoilt}");
    }
}

#[test]
fn a_status_that_is_none_is_an_empty_one() {
    let empty = encode_status(&json!({}));
    assert_eq!(encode_status(&json!({"code": "four"})), empty);
    assert_eq!(
        decoded(&empty),
        json!({"apiVersion": "v1", "kind": "Status"})
    );
}

#[test]
fn fields_of_a_newer_kubernetes_are_passed_over() {
    let namespace = json!({"metadata": {"name": "a"}, "later": {"than": "this"}});
    let known = json!({"metadata": {"name": "a"}});
    assert_eq!(
        encode_message("v1", "Namespace", &namespace),
        encode_message("v1", "Namespace", &known)
    );
}

/// Returns the value without the parts that `drop` selects, the innermost first.
fn without(value: &Value, drop: &dyn Fn(&Value) -> bool) -> Value {
    match value {
        Value::Object(entries) => entries
            .iter()
            .map(|(key, value)| (key.clone(), without(value, drop)))
            .filter(|(_, value)| !drop(value))
            .collect::<Map<_, _>>()
            .into(),
        Value::Array(items) => items.iter().map(|item| without(item, drop)).collect(),
        other => other.clone(),
    }
}

/// Decodes an object in its envelope to JSON.
fn decoded(envelope: &[u8]) -> Value {
    let mut object = Map::new();
    let (mut kind, mut api_version, mut raw) = (String::new(), String::new(), Vec::new());
    for (number, part) in parts(envelope.strip_prefix(MAGIC).unwrap()) {
        match number {
            1 => {
                for (number, part) in parts(part.bytes()) {
                    *[&mut api_version, &mut kind][number as usize - 1] = part.text();
                }
            }
            2 => raw = part.bytes().to_vec(),
            _ => assert!(part.bytes().is_empty()),
        }
    }
    object.extend(message_of(
        &raw,
        schema::fields_of_kind(&api_version, &kind).unwrap(),
    ));
    object.insert("kind".to_owned(), kind.into());
    object.insert("apiVersion".to_owned(), api_version.into());
    object.into()
}

fn message_of(bytes: &[u8], fields: &[Field]) -> Map<String, Value> {
    let mut object = Map::new();
    for (number, part) in parts(bytes) {
        let Field(name, _, kind) = fields
            .iter()
            .find(|field| field.1 == number)
            .unwrap_or_else(|| panic!("field {number} is in no table"));
        let entry = object.entry(*name).or_insert(Value::Null);
        match kind {
            Kind::Repeated(each) => match entry {
                Value::Array(items) => items.push(value_of(&part, each)),
                _ => *entry = vec![value_of(&part, each)].into(),
            },
            Kind::Map(each) => {
                let pair: Vec<_> = parts(part.bytes());
                if !entry.is_object() {
                    *entry = json!({});
                }
                entry[pair[0].1.text()] = value_of(&pair[1].1, each);
            }
            _ => *entry = value_of(&part, kind),
        }
    }
    object
}

fn value_of(part: &Part, kind: &Kind) -> Value {
    let within = || parts(part.bytes());
    match kind {
        Kind::Text => part.text().into(),
        Kind::Int => part.int().into(),
        Kind::Flag => (part.int() == 1).into(),
        Kind::Bytes => STANDARD.encode(part.bytes()).into(),
        // Go's zero time is an empty message.
        Kind::Time if part.bytes().is_empty() => Value::Null,
        Kind::Time => {
            let seconds = within()[0].1.int().unsigned_abs();
            let time = UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            humantime::format_rfc3339_seconds(time).to_string().into()
        }
        Kind::Quantity => within()[0].1.text().into(),
        Kind::IntOrText if within()[0].1.int() == 1 => within()[2].1.text().into(),
        Kind::IntOrText => within()[1].1.int().into(),
        Kind::Json => serde_json::from_slice(within()[0].1.bytes()).unwrap(),
        Kind::Message(fields) => message_of(part.bytes(), fields).into(),
        Kind::Repeated(_) | Kind::Map(_) => unreachable!("neither is within the other"),
    }
}

enum Part<'a> {
    Int(u64),
    Bytes(&'a [u8]),
}

impl<'a> Part<'a> {
    fn int(&self) -> i64 {
        match self {
            Part::Int(value) => value.cast_signed(),
            Part::Bytes(_) => panic!("bytes where a number belongs"),
        }
    }

    fn bytes(&self) -> &'a [u8] {
        match self {
            Part::Bytes(bytes) => bytes,
            Part::Int(_) => panic!("a number where bytes belong"),
        }
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes().to_vec()).unwrap()
    }
}

fn parts(mut bytes: &[u8]) -> Vec<(u32, Part<'_>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = taken(&mut bytes);
        let value = taken(&mut bytes);
        let number = u32::try_from(tag >> 3).unwrap();
        if tag & 7 == u64::from(VARINT) {
            found.push((number, Part::Int(value)));
        } else {
            assert_eq!(tag & 7, u64::from(BYTES));
            let (value, rest) = bytes.split_at(usize::try_from(value).unwrap());
            found.push((number, Part::Bytes(value)));
            bytes = rest;
        }
    }
    found
}

fn taken(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (first, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            break;
        }
    }
    value
}
