//! The keys of a configuration, out of its schema: name, flag, variable, default, meaning.
//!
//! The types' doc comments are the only text: flags' help and the README's reference both
//! come from here. A leaf (a scalar, a list, a map) is one key; a section's leaves are
//! named `section.key`. Keys inside lists and maps have no flag of their own.
//!
//! Schemas are files, in `schema/`: deriving them in each process that asks would be most of a megabyte of code. A test
//! writes them, and holds them against the types ever after (`typed`).

use serde_json::Value;

/// What is read of a file, a variable or a flag, with its schema.
pub(crate) trait Described {
    /// The schema, in JSON, with nothing referred to elsewhere.
    const SCHEMA: &'static str;
}

impl Described for causeway_gateway::config::Config {
    const SCHEMA: &'static str = include_str!("schema/gateway.json");
}

impl Described for causeway_edge::config::Config {
    const SCHEMA: &'static str = include_str!("schema/edge.json");
}

impl Described for causeway_gateway::redirector::Config {
    const SCHEMA: &'static str = include_str!("schema/redirect.json");
}

impl Described for causeway_gateway::config::policy::Policy {
    const SCHEMA: &'static str = include_str!("schema/policy.json");
}

/// One key of a configuration.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    /// `tunnel.listen`, or `fronts[].name` inside a list.
    pub(crate) name: String,
    /// How a text given for it is read.
    pub(crate) form: Form,
    /// What it means.
    pub(crate) help: String,
    /// What holds without it, in JSON.
    pub(crate) default: Option<Value>,
    /// It has a flag and a variable of its own.
    pub(crate) settable: bool,
}

/// How a text given in a flag or a variable is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// As it stands.
    Text,
    /// `true`, `false` or a number.
    Scalar,
    /// Comma-separated texts, or a YAML list.
    List,
    /// YAML.
    Yaml,
}

impl Key {
    /// The long flag without its dashes: `tunnel-listen`.
    pub(crate) fn flag(&self) -> String {
        self.name.replace(['.', '_'], "-")
    }

    /// The environment variable: `CAUSEWAY_TUNNEL_LISTEN`.
    pub(crate) fn variable(&self) -> String {
        format!("CAUSEWAY_{}", self.name.replace('.', "_").to_uppercase())
    }

    /// What stands for the value in help.
    pub(crate) fn placeholder(&self) -> &'static str {
        match self.form {
            Form::Text => "TEXT",
            Form::Scalar => "VALUE",
            Form::List => "LIST",
            Form::Yaml => "YAML",
        }
    }
}

/// The schema of `C`.
pub(super) fn of<C: Described>() -> Value {
    read(C::SCHEMA)
}

fn read(schema: &str) -> Value {
    serde_json::from_str(schema).expect("a test has written it")
}

/// All keys of `C`, in the order of its definition.
pub(crate) fn keys<C: Described>() -> Vec<Key> {
    keys_of(&of::<C>())
}

/// All keys that this schema knows, in its order.
pub(super) fn keys_of(schema: &Value) -> Vec<Key> {
    let mut keys = Vec::new();
    collect(schema, "", true, &mut keys);
    keys
}

fn collect(schema: &Value, prefix: &str, settable: bool, keys: &mut Vec<Key>) {
    for (name, schema) in properties(schema) {
        let name = format!("{prefix}{name}");
        if is_section(schema) {
            collect(schema, &format!("{name}."), settable, keys);
            continue;
        }
        let text = |field: &str| schema[field].as_str().unwrap_or_default().to_owned();
        keys.push(Key {
            form: form(schema),
            help: text("description"),
            default: schema
                .get("default")
                .filter(|value| !value.is_null())
                .cloned(),
            name: name.clone(),
            settable,
        });
        if let Some(inner) = schema.get("items").or_else(|| entries(schema)) {
            let hole = if schema.get("items").is_some() {
                "[]."
            } else {
                ".*."
            };
            collect(inner, &format!("{name}{hole}"), false, keys);
        } else {
            collect(schema, &format!("{name}."), false, keys);
        }
    }
}

/// The known keys of a map, with their schemas.
pub(super) fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema["properties"].as_object().into_iter().flatten()
}

/// The schema of a map's values where its keys are free.
pub(super) fn entries(schema: &Value) -> Option<&Value> {
    let patterns = schema["patternProperties"].as_object();
    patterns
        .and_then(|patterns| patterns.values().next())
        .or_else(|| {
            schema
                .get("additionalProperties")
                .filter(|inner| inner.is_object())
        })
}

/// Whether the value may have this type.
pub(super) fn allows(schema: &Value, kind: &str) -> bool {
    match &schema["type"] {
        Value::String(only) => only == kind,
        Value::Array(several) => several.iter().any(|one| one == kind),
        _ => false,
    }
}

/// The words of an enumeration.
pub(super) fn words(schema: &Value) -> Vec<&str> {
    let listed = schema["enum"].as_array().into_iter().flatten();
    let described = schema["oneOf"].as_array().into_iter().flatten();
    listed
        .chain(described.map(|one| &one["const"]))
        .filter_map(Value::as_str)
        .collect()
}

fn is_section(schema: &Value) -> bool {
    schema.get("properties").is_some() && !allows(schema, "null")
}

fn form(schema: &Value) -> Form {
    if allows(schema, "array") {
        let text = allows(&schema["items"], "string");
        return if text { Form::List } else { Form::Yaml };
    }
    if allows(schema, "object") {
        return Form::Yaml;
    }
    if allows(schema, "string") || !words(schema).is_empty() {
        return Form::Text;
    }
    Form::Scalar
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn unique_and_explained<C: Described>() {
        let keys = keys::<C>();
        let mut flags = HashSet::new();
        for key in keys.iter().filter(|key| key.settable) {
            assert!(flags.insert(key.flag()), "two keys share --{}", key.flag());
            assert!(!["config", "check-config", "help"].contains(&key.flag().as_str()));
        }
        for key in &keys {
            assert!(key.help.ends_with('.'), "{} is not explained", key.name);
        }
    }

    #[test]
    fn every_key_has_a_flag_of_its_own_and_is_explained() {
        unique_and_explained::<causeway_gateway::config::Config>();
        unique_and_explained::<causeway_edge::config::Config>();
        unique_and_explained::<causeway_gateway::redirector::Config>();
    }

    #[test]
    fn sections_lists_and_maps_are_named_as_they_are_written() {
        let keys = keys::<causeway_gateway::config::Config>();
        let find = |name: &str| keys.iter().find(|key| key.name == name);
        let listen = find("tunnel.listen").unwrap();
        assert_eq!(
            (listen.flag(), listen.variable()),
            ("tunnel-listen".into(), "CAUSEWAY_TUNNEL_LISTEN".into())
        );
        assert_eq!(find("tunnel.advertise").unwrap().form, Form::List);
        assert_eq!(find("fronts").unwrap().form, Form::Yaml);
        assert_eq!(find("cores").unwrap().form, Form::Scalar);
        assert_eq!(find("access_log").unwrap().form, Form::Text);
        assert!(!find("fronts[].callers.tokens").unwrap().settable);
    }
}
