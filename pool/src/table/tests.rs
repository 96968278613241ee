//! Against what kube-apiserver's own printers (v1.36.3) print of the same objects: `tests/printed.json`.

use super::*;
use std::time::Duration;

fn printed() -> Value {
    serde_json::from_str(include_str!("tests/printed.json")).unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

#[test]
fn each_kind_has_kube_apiservers_columns_and_cells() {
    let printed = printed();
    let now = humantime::parse_rfc3339(printed["now"].as_str().unwrap()).unwrap();
    assert_eq!(list(&printed["tables"]).len(), 7);
    for sample in list(&printed["tables"]) {
        let (api_version, kind) = (&sample["apiVersion"], &sample["kind"]);
        let columns = columns::of(api_version.as_str().unwrap(), kind.as_str().unwrap());
        let definitions: Vec<Value> = columns
            .iter()
            .map(columns::Column::definition)
            .map(|column| json!([column["name"], column["format"], column["priority"]]))
            .collect();
        assert_eq!(definitions, list(&sample["columns"]), "{kind}");
        for (object, row) in list(&sample["objects"]).iter().zip(list(&sample["rows"])) {
            let cells: Vec<Value> = columns.iter().map(|one| one.cell(object, now)).collect();
            assert_eq!(cells, list(row), "{object}");
        }
    }
}

#[test]
fn ages_are_those_of_kubectl() {
    let made = SystemTime::UNIX_EPOCH + Duration::from_secs(3);
    let object = json!({"metadata": {"creationTimestamp": "1970-01-01T00:00:03Z"}});
    let age = &columns::of("example.com/v1", "Widget")[1];
    for pair in list(&printed()["ages"]) {
        let seconds = pair[0].as_i64().unwrap();
        let passed = Duration::from_secs(seconds.unsigned_abs());
        let now = if seconds < 0 {
            made - passed
        } else {
            made + passed
        };
        assert_eq!(age.cell(&object, now), pair[1], "{seconds}");
    }
}

#[test]
fn a_kind_without_columns_of_its_own_has_name_and_age() {
    let object = json!({
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {"name": "a", "creationTimestamp": null},
    });
    let table = table(
        "serving.knative.dev/v1",
        "Service",
        &mut std::iter::once(&object),
        Include::default(),
        ("7", None, None),
    );
    assert_eq!(
        table,
        json!({
            "kind": "Table",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": {"resourceVersion": "7"},
            "columnDefinitions": [
                {"name": "Name", "type": "string", "format": "name", "description": "", "priority": 0},
                {"name": "Age", "type": "date", "format": "", "description": "", "priority": 0},
            ],
            "rows": [{
                "cells": ["a", "<unknown>"],
                "object": {
                    "kind": "PartialObjectMetadata",
                    "apiVersion": "meta.k8s.io/v1",
                    "metadata": {"name": "a", "creationTimestamp": null},
                },
            }],
        })
    );
}

#[test]
fn a_row_has_beside_it_what_was_asked_for() {
    let object = json!({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "a"}});
    assert_eq!(beside(&object, Include::Object), object);
    assert_eq!(beside(&object, Include::None), json!(null));
    assert_eq!(
        beside(&object, Include::Metadata)["metadata"],
        object["metadata"]
    );
    // A watch cannot tell otherwise that it has seen all there was.
    let end = json!({"metadata": {"annotations": {"k8s.io/initial-events-end": "true"}}});
    assert_eq!(beside(&end, Include::None)["metadata"], end["metadata"]);
}

#[test]
fn a_page_says_how_to_go_on() {
    let none = &mut std::iter::empty();
    let page = table(
        "v1",
        "Node",
        none,
        Include::None,
        ("7", Some("abc"), Some(5)),
    );
    assert_eq!(
        page["metadata"],
        json!({"resourceVersion": "7", "continue": "abc", "remainingItemCount": 5})
    );
}
