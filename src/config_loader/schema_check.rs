//! Holds a value against its schema, and takes out what does not fit.
//!
//! Finds what serde would stop at one by one: unknown keys (with the nearest known one),
//! missing keys, wrong types, words that an enumeration does not have. What does not fit
//! is taken out of the value, so that the rest can still be read and judged. A list
//! element that goes leaves its number to nobody: `Pruned` turns later numbers back.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::env_expand::Environment;
use super::path::{PathSegment, ValuePath};
use super::schema;
use super::suggestion::nearest;

/// A fault found: whether it is about the key or its value, where, and what.
#[derive(Debug)]
pub(super) struct SchemaError {
    pub(super) at_key: bool,
    pub(super) path: ValuePath,
    pub(super) message: String,
}

/// Parts that were removed from a value.
#[derive(Debug, Default)]
pub(super) struct PrunedValue {
    paths: Vec<ValuePath>,
    elements: BTreeMap<ValuePath, BTreeSet<usize>>,
}

impl PrunedValue {
    pub(super) fn add(&mut self, path: ValuePath) {
        if let (Some(list), Some(PathSegment::Index(index))) = (path.parent(), path.steps().last())
        {
            self.elements.entry(list).or_default().insert(*index);
        }
        self.paths.push(path);
    }

    /// A path in what is left → the path in what was written.
    pub(super) fn original(&self, path: &ValuePath) -> ValuePath {
        let mut written = ValuePath::default();
        for step in path.steps() {
            written = match (step, self.elements.get(&written)) {
                (PathSegment::Index(index), Some(gone)) => {
                    let left = (0..).filter(|number| !gone.contains(number)).nth(*index);
                    written.index(left.unwrap_or(*index))
                }
                _ => written.step(step.clone()),
            };
        }
        written
    }

    /// Something inside this value was taken out, so that it may lack what was written.
    pub(super) fn within(&self, path: &ValuePath) -> bool {
        self.paths
            .iter()
            .any(|gone| gone.steps().starts_with(path.steps()))
    }

    /// The list element or map entry around a value that was taken out: what else is
    /// wrong with it cannot be told before that is put right.
    pub(super) fn spoilt(&self) -> BTreeSet<String> {
        let owner = |gone: &ValuePath| {
            let element = gone
                .steps()
                .iter()
                .position(|step| matches!(step, PathSegment::Index(_)));
            let take = element.map_or(gone.steps().len().min(2), |index| index + 1);
            let start = ValuePath::default();
            gone.steps()
                .iter()
                .take(take)
                .fold(start, |path, step| path.step(step.clone()))
        };
        self.paths
            .iter()
            .map(|gone| owner(gone).to_string())
            .collect()
    }
}

/// Checks and prunes.
#[derive(Debug, Default)]
pub(super) struct SchemaChecker {
    pub(super) findings: Vec<SchemaError>,
    pub(super) pruned: PrunedValue,
    variables: Environment,
}

impl SchemaChecker {
    /// With what addresses of listeners may name.
    pub(super) fn by(variables: Environment) -> Self {
        Self {
            variables,
            ..Self::default()
        }
    }

    /// Whether the value, less what was taken out of it, can stay.
    pub(super) fn check(&mut self, value: &mut Value, schema: &Value, path: &ValuePath) -> bool {
        if value.is_null() && !schema::allows(schema, "null") && schema::allows(schema, "object") {
            // `tunnel:` with every line below it commented out.
            *value = Value::Object(Map::new());
        }
        let words = schema::words(schema);
        if !words.is_empty() && value.is_null() {
            let message = format!(
                "has no value; it must be one of {}, or remove the key",
                words.join(", ")
            );
            self.find(false, path.clone(), message);
            return false;
        }
        if !words.is_empty() {
            return self.word(value, &words, path);
        }
        if let Some(expected) = mismatch(value, schema) {
            self.find(false, path.clone(), expected);
            return false;
        }
        if let (Value::String(text), "listen") = (&mut *value, format(schema)) {
            match self.variables.fill(text) {
                Ok(filled) => *text = filled,
                Err(absent) => {
                    self.find(false, path.clone(), absent);
                    return false;
                }
            }
        }
        match value {
            Value::Object(map) if schema::entries(schema).is_some() => {
                self.entries(map, schema, path)
            }
            Value::Object(map) => self.properties(map, schema, path),
            Value::Array(list) => {
                self.elements(list, &schema["items"], path);
                true
            }
            _ => true,
        }
    }

    fn find(&mut self, at_key: bool, path: ValuePath, message: impl Into<String>) {
        let message = message.into();
        self.findings.push(SchemaError {
            at_key,
            path,
            message,
        });
    }

    fn word(&mut self, value: &Value, words: &[&str], path: &ValuePath) -> bool {
        let given = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if words.contains(&given.as_str()) {
            return true;
        }
        let near = nearest(&given, words.iter().copied());
        let hint = near.map_or(String::new(), |word| format!("; did you mean \"{word}\"?"));
        self.find(
            false,
            path.clone(),
            format!("\"{given}\" is not one of {}{hint}", words.join(", ")),
        );
        false
    }

    fn properties(
        &mut self,
        map: &mut Map<String, Value>,
        schema: &Value,
        path: &ValuePath,
    ) -> bool {
        let known: BTreeMap<_, _> = schema::properties(schema).collect();
        let given: BTreeSet<String> = map.keys().cloned().collect();
        map.retain(|key, value| {
            let here = path.key(key);
            let keep = if let Some(schema) = known.get(key) {
                self.check(value, schema, &here)
            } else {
                let names = known.keys().map(|name| name.as_str());
                self.find(true, here.clone(), unknown(key, names));
                false
            };
            if !keep {
                self.pruned.add(here);
            }
            keep
        });
        let required = schema["required"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str);
        let mut whole = true;
        for name in required.filter(|name| !map.contains_key(*name)) {
            whole = false;
            if !given.contains(name) {
                let help = schema["properties"][name]["description"]
                    .as_str()
                    .unwrap_or_default();
                self.find(
                    false,
                    path.clone(),
                    format!(
                        "the key \"{name}\" is missing ({})",
                        help.trim_end_matches('.')
                    ),
                );
            }
        }
        whole
    }

    fn entries(&mut self, map: &mut Map<String, Value>, schema: &Value, path: &ValuePath) -> bool {
        let numbers = schema.get("patternProperties").is_some();
        let entry = schema::entries(schema).cloned().unwrap_or_default();
        map.retain(|key, value| {
            let here = path.key(key);
            // Ports are the only map with a pattern.
            let keep = if numbers && key.parse::<u16>().is_err() {
                self.find(
                    true,
                    here.clone(),
                    format!("\"{key}\" is not a port; ports are 1 to 65535"),
                );
                false
            } else {
                self.check(value, &entry, &here)
            };
            if !keep {
                self.pruned.add(here);
            }
            keep
        });
        true
    }

    fn elements(&mut self, list: &mut Vec<Value>, schema: &Value, path: &ValuePath) {
        let mut index = 0;
        list.retain_mut(|value| {
            let here = path.index(index);
            index += 1;
            let keep = self.check(value, schema, &here);
            if !keep {
                self.pruned.add(here);
            }
            keep
        });
    }
}

/// Keys of earlier versions, each with its present name.
const RENAMED: &[(&str, &str)] = &[
    ("cores", "workers"),
    ("fronts", "listeners"),
    ("kind", "protocol"),
    ("callers", "client_auth"),
    ("direct", "direct_networks"),
    ("apps", "upstream_tls"),
    ("readers", "api_cache"),
    ("reader", "api_cache"),
    ("site", "members"),
    ("hubs", "yurthub"),
    ("window", "event_buffer"),
    ("per_caller", "per_client"),
    ("unread", "buffered_bytes"),
    ("uri_bytes", "max_uri_bytes"),
    ("kubernetes_uri_bytes", "max_kubernetes_uri_bytes"),
    ("header_bytes", "max_header_bytes"),
    ("headers", "max_headers"),
    ("open", "connect"),
    ("app_idle", "upstream_idle"),
];

fn unknown<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> String {
    let known: Vec<_> = known.collect();
    let renamed = RENAMED.iter().find(|(old, _)| *old == key);
    let renamed = renamed
        .map(|(_, new)| *new)
        .filter(|new| known.contains(new));
    match renamed.or_else(|| nearest(key, known.iter().copied())) {
        Some(near) => format!("unknown key; did you mean \"{near}\"?"),
        None if known.is_empty() => "unknown key; remove it".into(),
        None => format!(
            "unknown key; the keys allowed here are {}",
            known.join(", ")
        ),
    }
}

/// Returns what must be written instead if the value has the wrong type or is out of bounds.
fn mismatch(value: &Value, schema: &Value) -> Option<String> {
    let fits = match value {
        Value::Null => schema::allows(schema, "null"),
        Value::Bool(_) => schema::allows(schema, "boolean"),
        Value::Number(number) => {
            schema::allows(schema, "integer")
                && number
                    .as_u64()
                    .is_some_and(|number| bounded(number, schema))
        }
        Value::String(text) if schema["format"] == "ip" => text.parse::<std::net::IpAddr>().is_ok(),
        Value::String(_) => schema::allows(schema, "string"),
        Value::Array(_) => schema::allows(schema, "array"),
        Value::Object(_) => schema::allows(schema, "object"),
    };
    if fits || schema.get("type").is_none() {
        return None;
    }
    let expected = match schema["format"].as_str() {
        Some("human-duration") => {
            "must be a duration with its unit, such as 5s, 500ms or 1m 30s".into()
        }
        Some("size") => "must be a number of bytes, such as 64KiB, 16MiB or 65536".into(),
        Some("ip") => {
            "must be an address without a port, such as 192.168.1.7 or 2001:db8::7".into()
        }
        Some("listen") => "must be IP:PORT, such as 0.0.0.0:10263 or [::]:10263".into(),
        _ if schema::allows(schema, "boolean") => "must be true or false".into(),
        _ if schema::allows(schema, "integer") => match schema["maximum"].as_u64() {
            Some(maximum) => format!("must be a number from 0 to {maximum}"),
            None => "must be a whole number, 0 or more".into(),
        },
        _ if schema::allows(schema, "array") => {
            "must be a list: write [ONE, TWO], or a line \"- ONE\" for each".into()
        }
        _ if schema::allows(schema, "object") => {
            "must be a map: lines of \"key: value\", indented further".into()
        }
        _ => "must be text; put it in quotes".into(),
    };
    Some(if value.is_null() {
        format!("has no value; it {expected}, or remove the key")
    } else {
        expected
    })
}

fn format(schema: &Value) -> &str {
    schema["format"].as_str().unwrap_or_default()
}

fn bounded(number: u64, schema: &Value) -> bool {
    schema["maximum"]
        .as_u64()
        .is_none_or(|maximum| number <= maximum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_word_is_suggested_and_a_far_one_is_not() {
        let known = ["port", "listen", "node", "header_bytes"];
        let near = |word| nearest(word, known.into_iter());
        assert_eq!(near("prot"), Some("port"));
        assert_eq!(near("Listen"), Some("listen"));
        assert_eq!(near("header-bytes"), Some("header_bytes"));
        assert_eq!(near("header"), Some("header_bytes"));
        assert_eq!(near("colour"), None);
    }

    #[test]
    fn numbers_of_list_elements_are_turned_back() {
        let list = ValuePath::default().key("listeners");
        let mut pruned = PrunedValue::default();
        pruned.add(list.index(0));
        pruned.add(list.index(2));
        let original = pruned.original(&list.index(1).key("listen"));
        assert_eq!(original.to_string(), "listeners[3].listen");
        assert!(pruned.within(&list) && !pruned.within(&list.index(1)));
    }
}
