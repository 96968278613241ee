//! Objects as the table that kubectl prints: columns, and the cells of each object in words.
//!
//! The columns and their words are those of kube-apiserver 1.36 (pkg/printers/internalversion), so that `kubectl get`
//! looks the same wherever it reads. A kind that has no columns here gets those of a custom resource without any of
//! its own: Name and Age. The columns' descriptions are left empty, for nothing prints them.
//! Takes objects as they are: what they lack is an empty cell, never a failure.

mod columns;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value, json};
use std::time::SystemTime;

/// What stands in a row beside its cells: `includeObject` of the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Include {
    /// Nothing.
    None,
    /// The object's metadata.
    #[default]
    Metadata,
    /// The whole object.
    Object,
}

/// A `meta.k8s.io/v1` Table of objects of this kind; `meta` has its resourceVersion, `continue` and
/// remainingItemCount.
///
/// In a watch each event is a table of one row, and only the first has `columnDefinitions`: the caller takes them out
/// of the others.
pub(crate) fn table(
    api_version: &str,
    kind: &str,
    rows: &mut dyn Iterator<Item = &Value>,
    include: Include,
    meta: (&str, Option<&str>, Option<u64>),
) -> Value {
    let now = SystemTime::now();
    let columns = columns::of(api_version, kind);
    let rows: Vec<Value> = rows
        .map(|object| {
            let cells: Vec<Value> = columns
                .iter()
                .map(|column| column.cell(object, now))
                .collect();
            json!({ "cells": cells, "object": beside(object, include) })
        })
        .collect();
    let (version, next, remaining) = meta;
    let mut metadata = Map::new();
    metadata.insert("resourceVersion".to_owned(), version.into());
    if let Some(next) = next {
        metadata.insert("continue".to_owned(), next.into());
    }
    if let Some(remaining) = remaining {
        metadata.insert("remainingItemCount".to_owned(), remaining.into());
    }
    let columns: Vec<Value> = columns.iter().map(columns::Column::definition).collect();
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": columns,
        "rows": rows,
    })
}

/// The bookmark that ends a watch's first objects has its annotation even where no object is asked for.
fn beside(object: &Value, include: Include) -> Value {
    let ends_the_first = || {
        object
            .pointer("/metadata/annotations/k8s.io~1initial-events-end")
            .is_some_and(|value| value == "true")
    };
    match include {
        Include::Object => object.clone(),
        Include::None if !ends_the_first() => Value::Null,
        Include::None | Include::Metadata => json!({
            "kind": "PartialObjectMetadata",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": object.get("metadata"),
        }),
    }
}
