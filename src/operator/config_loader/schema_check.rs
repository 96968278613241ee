//! Checks a value against its schema, and removes the parts that do not conform.
//!
//! Finds all faults at once, while serde stops at the first one. Faults are unknown keys (with the nearest known one), missing
//! keys, wrong types, and words that an enumeration does not have. The faulty parts are removed from the value, so that the rest
//! can still be deserialized and validated. A removed list element shifts the numbers behind it. `PrunedValue` maps later numbers
//! back to the original ones.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::env_expand::Environment;
use super::path::{PathSegment, ValuePath};
use super::schema;
use crate::suggestion::nearest;

/// Fault: whether it concerns the key or its value, its path, and its description.
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
    removed_elements: BTreeMap<ValuePath, BTreeSet<usize>>,
}

impl PrunedValue {
    pub(super) fn add(&mut self, path: ValuePath) {
        if let (Some(list), Some(PathSegment::Index(index))) =
            (path.parent(), path.segments().last())
        {
            self.removed_elements
                .entry(list)
                .or_default()
                .insert(*index);
        }
        self.paths.push(path);
    }

    /// Returns the path in the original value for a path in the pruned one.
    pub(super) fn original_path(&self, path: &ValuePath) -> ValuePath {
        let mut original = ValuePath::default();
        for step in path.segments() {
            original = match (step, self.removed_elements.get(&original)) {
                (PathSegment::Index(index), Some(removed)) => {
                    let original_index =
                        (0..).filter(|number| !removed.contains(number)).nth(*index);
                    original.index(original_index.unwrap_or(*index))
                }
                _ => original.child(step.clone()),
            };
        }
        original
    }

    /// Whether a part of this value was removed, so that the value may lack what the file contains.
    pub(super) fn has_removed_within(&self, path: &ValuePath) -> bool {
        self.paths
            .iter()
            .any(|gone| gone.segments().starts_with(path.segments()))
    }

    /// Returns the list elements and map entries from which a part was removed. Other faults in them cannot be detected
    /// before the removed part is corrected.
    pub(super) fn affected_elements(&self) -> BTreeSet<String> {
        let owner_path = |removed_path: &ValuePath| {
            let element = removed_path
                .segments()
                .iter()
                .position(|step| matches!(step, PathSegment::Index(_)));
            let length = element.map_or(removed_path.segments().len().min(2), |index| index + 1);
            let start = ValuePath::default();
            removed_path
                .segments()
                .iter()
                .take(length)
                .fold(start, |path, step| path.child(step.clone()))
        };
        self.paths
            .iter()
            .map(|gone| owner_path(gone).to_string())
            .collect()
    }
}

/// Checker that also prunes.
#[derive(Debug, Default)]
pub(super) struct SchemaChecker {
    pub(super) errors: Vec<SchemaError>,
    pub(super) pruned: PrunedValue,
    variables: Environment,
}

impl SchemaChecker {
    /// Creates a checker with the variables that addresses of listeners may name.
    pub(super) fn with_environment(environment: Environment) -> Self {
        Self {
            variables: environment,
            ..Self::default()
        }
    }

    /// Checks and prunes a value. Returns whether the rest of it can stay.
    pub(super) fn check(&mut self, value: &mut Value, schema: &Value, path: &ValuePath) -> bool {
        if value.is_null()
            && !schema::allows_type(schema, "null")
            && schema::allows_type(schema, "object")
        {
            // `tunnel:` with all lines below it commented out.
            *value = Value::Object(Map::new());
        }
        let enum_values = schema::enum_values(schema);
        if !enum_values.is_empty() && value.is_null() {
            let message = format!(
                "has no value; it must be one of {}, or remove the key",
                enum_values.join(", ")
            );
            self.report(false, path.clone(), message);
            return false;
        }
        if !enum_values.is_empty() {
            return self.check_enum_value(value, &enum_values, path);
        }
        if let Some(expected) = type_mismatch(value, schema) {
            self.report(false, path.clone(), expected);
            return false;
        }
        if let (Value::String(text), "listen") = (&mut *value, format_of(schema)) {
            match self.variables.expand(text) {
                Ok(expanded) => *text = expanded,
                Err(message) => {
                    self.report(false, path.clone(), message);
                    return false;
                }
            }
        }
        match value {
            Value::Object(map) if schema::entry_schema(schema).is_some() => {
                self.check_entries(map, schema, path)
            }
            Value::Object(map) => self.check_properties(map, schema, path),
            Value::Array(list) => {
                self.check_elements(list, &schema["items"], path);
                true
            }
            _ => true,
        }
    }

    fn report(&mut self, at_key: bool, path: ValuePath, message: impl Into<String>) {
        let message = message.into();
        self.errors.push(SchemaError {
            at_key,
            path,
            message,
        });
    }

    fn check_enum_value(&mut self, value: &Value, allowed: &[&str], path: &ValuePath) -> bool {
        let value_text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if allowed.contains(&value_text.as_str()) {
            return true;
        }
        let suggestion = nearest(&value_text, allowed.iter().copied());
        let hint = suggestion.map_or(String::new(), |word| format!("; did you mean \"{word}\"?"));
        self.report(
            false,
            path.clone(),
            format!(
                "\"{value_text}\" is not one of {}{hint}",
                allowed.join(", ")
            ),
        );
        false
    }

    fn check_properties(
        &mut self,
        map: &mut Map<String, Value>,
        schema: &Value,
        path: &ValuePath,
    ) -> bool {
        let known_keys: BTreeMap<_, _> = schema::properties(schema).collect();
        let given_keys: BTreeSet<String> = map.keys().cloned().collect();
        map.retain(|key, value| {
            let child_path = path.key(key);
            let is_valid = if let Some(schema) = known_keys.get(key) {
                self.check(value, schema, &child_path)
            } else {
                let names = known_keys.keys().map(|name| name.as_str());
                self.report(true, child_path.clone(), unknown_key_message(key, names));
                false
            };
            if !is_valid {
                self.pruned.add(child_path);
            }
            is_valid
        });
        let required = schema["required"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str);
        let mut is_complete = true;
        for name in required.filter(|name| !map.contains_key(*name)) {
            is_complete = false;
            if !given_keys.contains(name) {
                let help = schema["properties"][name]["description"]
                    .as_str()
                    .unwrap_or_default();
                self.report(
                    false,
                    path.clone(),
                    format!(
                        "the key \"{name}\" is missing ({})",
                        help.trim_end_matches('.')
                    ),
                );
            }
        }
        is_complete
    }

    fn check_entries(
        &mut self,
        map: &mut Map<String, Value>,
        schema: &Value,
        path: &ValuePath,
    ) -> bool {
        let has_port_keys = schema.get("patternProperties").is_some();
        let entry = schema::entry_schema(schema).cloned().unwrap_or_default();
        map.retain(|key, value| {
            let child_path = path.key(key);
            // Ports are the only map with a pattern.
            let is_valid = if has_port_keys && key.parse::<u16>().is_err() {
                self.report(
                    true,
                    child_path.clone(),
                    format!("\"{key}\" is not a port; ports are 1 to 65535"),
                );
                false
            } else {
                self.check(value, &entry, &child_path)
            };
            if !is_valid {
                self.pruned.add(child_path);
            }
            is_valid
        });
        true
    }

    fn check_elements(&mut self, list: &mut Vec<Value>, schema: &Value, path: &ValuePath) {
        let mut index = 0;
        list.retain_mut(|value| {
            let child_path = path.index(index);
            index += 1;
            let is_valid = self.check(value, schema, &child_path);
            if !is_valid {
                self.pruned.add(child_path);
            }
            is_valid
        });
    }
}

/// Keys of earlier versions, each with its present name.
const RENAMED_KEYS: &[(&str, &str)] = &[
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

fn unknown_key_message<'a>(key: &str, known_keys: impl Iterator<Item = &'a str>) -> String {
    let known_keys: Vec<_> = known_keys.collect();
    let renamed = RENAMED_KEYS.iter().find(|(old, _)| *old == key);
    let renamed = renamed
        .map(|(_, new)| *new)
        .filter(|new| known_keys.contains(new));
    match renamed.or_else(|| nearest(key, known_keys.iter().copied())) {
        Some(suggestion) => format!("unknown key; did you mean \"{suggestion}\"?"),
        None if known_keys.is_empty() => "unknown key; remove it".into(),
        None => format!(
            "unknown key; the keys allowed here are {}",
            known_keys.join(", ")
        ),
    }
}

/// Returns a description of valid values if the value has the wrong type or is out of bounds.
fn type_mismatch(value: &Value, schema: &Value) -> Option<String> {
    let is_match = match value {
        Value::Null => schema::allows_type(schema, "null"),
        Value::Bool(_) => schema::allows_type(schema, "boolean"),
        Value::Number(number) => {
            schema::allows_type(schema, "integer")
                && number
                    .as_u64()
                    .is_some_and(|number| is_in_bounds(number, schema))
        }
        Value::String(text) if schema["format"] == "ip" => text.parse::<std::net::IpAddr>().is_ok(),
        Value::String(_) => schema::allows_type(schema, "string"),
        Value::Array(_) => schema::allows_type(schema, "array"),
        Value::Object(_) => schema::allows_type(schema, "object"),
    };
    if is_match || schema.get("type").is_none() {
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
        Some("gateway-count") => "must be one, every or a number from 1 to 64".into(),
        _ if schema::allows_type(schema, "boolean") => "must be true or false".into(),
        _ if schema::allows_type(schema, "integer") => match schema["maximum"].as_u64() {
            Some(maximum) => format!("must be a number from 0 to {maximum}"),
            None => "must be a whole number, 0 or more".into(),
        },
        _ if schema::allows_type(schema, "array") => {
            "must be a list: write [ONE, TWO], or a line \"- ONE\" for each".into()
        }
        _ if schema::allows_type(schema, "object") => {
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

fn format_of(schema: &Value) -> &str {
    schema["format"].as_str().unwrap_or_default()
}

fn is_in_bounds(number: u64, schema: &Value) -> bool {
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
        let original = pruned.original_path(&list.index(1).key("listen"));
        assert_eq!(original.to_string(), "listeners[3].listen");
        assert!(pruned.has_removed_within(&list) && !pruned.has_removed_within(&list.index(1)));
    }
}
