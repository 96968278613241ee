//! Keys of a configuration, from its schema: name, flag, variable, default, description.
//!
//! The doc comments of the types are the only source: the help of flags and the reference both use them. A leaf (a scalar, a
//! list, a map) is one key; the leaves of a section have the name `section.key`. Keys inside lists and maps have no flag of
//! their own.
//!
//! The schema is derived from the types by `schemars` whenever it is needed.

use schemars::{JsonSchema, Schema, generate::SchemaSettings, transform::RecursiveTransform};
use serde_json::{Value, json};

/// One key of a configuration.
#[derive(Clone, Debug)]
pub(crate) struct ConfigKey {
    /// `tunnel.listen`, or `listeners[].name` inside a list.
    pub(crate) name: String,
    /// Form in which a text for the key is parsed.
    pub(crate) form: ValueForm,
    /// Description of the key.
    pub(crate) help: String,
    /// Type of the value, for people.
    pub(crate) kind: String,
    /// Default value in JSON.
    pub(crate) default: Option<Value>,
    /// Whether the key has a flag and a variable of its own.
    pub(crate) settable: bool,
}

/// Form in which the text of a flag or a variable is parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueForm {
    /// Plain text.
    Text,
    /// `true`, `false` or a number.
    Scalar,
    /// Comma-separated texts, or a YAML list.
    List,
    /// YAML.
    Yaml,
}

impl ConfigKey {
    /// Returns the long flag without its dashes: `tunnel-listen`.
    pub(crate) fn flag(&self) -> String {
        self.name.replace(['.', '_'], "-")
    }

    /// Returns the environment variable: `CAUSEWAY_TUNNEL_LISTEN`.
    pub(crate) fn variable(&self) -> String {
        format!("CAUSEWAY_{}", self.name.replace('.', "_").to_uppercase())
    }

    /// Returns the placeholder for the value in help.
    pub(crate) fn placeholder(&self) -> &'static str {
        match self.form {
            ValueForm::Text => "TEXT",
            ValueForm::Scalar => "VALUE",
            ValueForm::List => "LIST",
            ValueForm::Yaml => "YAML",
        }
    }
}

/// Returns the schema of `C` (JSON Schema, draft 2020-12) without references.
pub(super) fn schema_of<C: JsonSchema>() -> Value {
    generate::<C>(settings())
}

/// Returns the schema of `C` as text for editors.
pub(crate) fn json_schema<C: JsonSchema>() -> String {
    let settings = settings().with_transform(RecursiveTransform(allow_empty_section));
    format!("{:#}\n", generate::<C>(settings))
}

fn settings() -> SchemaSettings {
    SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true)
}

fn generate<C: JsonSchema>(settings: SchemaSettings) -> Value {
    let generator = settings.into_generator();
    generator.into_root_schema_for::<C>().to_value()
}

/// Accepts a section without a value (`tunnel:`), as the reader of configuration files does.
fn allow_empty_section(schema: &mut Schema) {
    let is_object = schema.get("type").is_some_and(|kind| kind == "object");
    if is_object && schema.get("required").is_none() {
        schema.insert("type".to_owned(), json!(["object", "null"]));
    }
}

/// Returns all keys of `C`, in the order of its definition.
pub(crate) fn keys<C: JsonSchema>() -> Vec<ConfigKey> {
    let mut keys = Vec::new();
    collect_keys(&schema_of::<C>(), "", true, &mut keys);
    keys
}

fn collect_keys(schema: &Value, prefix: &str, settable: bool, keys: &mut Vec<ConfigKey>) {
    for (name, schema) in properties(schema) {
        let name = format!("{prefix}{name}");
        if is_section(schema) {
            collect_keys(schema, &format!("{name}."), settable, keys);
            continue;
        }
        let text = |field: &str| schema[field].as_str().unwrap_or_default().to_owned();
        keys.push(ConfigKey {
            form: value_form(schema),
            help: text("description"),
            kind: kind(schema),
            default: schema
                .get("default")
                .filter(|value| !value.is_null())
                .cloned(),
            name: name.clone(),
            settable,
        });
        if let Some(nested) = schema.get("items").or_else(|| entry_schema(schema)) {
            let separator = if schema.get("items").is_some() {
                "[]."
            } else {
                ".*."
            };
            collect_keys(nested, &format!("{name}{separator}"), false, keys);
        } else {
            collect_keys(schema, &format!("{name}."), false, keys);
        }
    }
}

/// Returns the known keys of a map, with their schemas.
pub(super) fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema["properties"].as_object().into_iter().flatten()
}

/// Returns the schema of the values of a map with arbitrary keys.
pub(super) fn entry_schema(schema: &Value) -> Option<&Value> {
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
pub(super) fn allows_type(schema: &Value, type_name: &str) -> bool {
    match &schema["type"] {
        Value::String(only) => only == type_name,
        Value::Array(several) => several.iter().any(|one| one == type_name),
        _ => false,
    }
}

/// Returns the values of an enumeration.
pub(super) fn enum_values(schema: &Value) -> Vec<&str> {
    let listed = schema["enum"].as_array().into_iter().flatten();
    let described = schema["oneOf"].as_array().into_iter().flatten();
    listed
        .chain(described.map(|one| &one["const"]))
        .filter_map(Value::as_str)
        .collect()
}

fn is_section(schema: &Value) -> bool {
    schema.get("properties").is_some() && !allows_type(schema, "null")
}

fn value_form(schema: &Value) -> ValueForm {
    if allows_type(schema, "array") {
        let is_text = allows_type(&schema["items"], "string");
        return if is_text {
            ValueForm::List
        } else {
            ValueForm::Yaml
        };
    }
    if allows_type(schema, "object") {
        return ValueForm::Yaml;
    }
    if allows_type(schema, "string") || !enum_values(schema).is_empty() {
        return ValueForm::Text;
    }
    ValueForm::Scalar
}

/// Returns the type of a value in the words of the reference.
fn kind(schema: &Value) -> String {
    let words = enum_values(schema);
    if !words.is_empty() {
        let words: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
        return words.join(", ");
    }
    match schema["format"].as_str() {
        Some("human-duration") => return "duration".into(),
        Some("size") => return "size".into(),
        Some("listen") => return "address".into(),
        Some("ip") => return "IP address".into(),
        Some("uint16") => return "port".into(),
        Some("gateway-count") => return "`one`, `every`, number".into(),
        _ => {}
    }
    if allows_type(schema, "array") {
        return format!("list of: {}", kind(&schema["items"]));
    }
    if let Some(inner) = entry_schema(schema) {
        let key = schema.get("patternProperties").map_or("text", |_| "port");
        return format!("map of {key} to: {}", kind(inner));
    }
    let simple = [
        ("object", "map"),
        ("boolean", "boolean"),
        ("integer", "number"),
    ];
    let known = simple.iter().find(|(name, _)| allows_type(schema, name));
    known.map_or("text", |(_, word)| word).into()
}

/// Returns a default value as it would stand in the file.
pub(crate) fn plain_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        // The default listener: the description explains it.
        Value::Array(list) if list.iter().any(Value::is_object) => "…".into(),
        Value::Array(list) => format!(
            "[{}]",
            list.iter().map(plain_text).collect::<Vec<_>>().join(", ")
        ),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn unique_and_explained<C: JsonSchema>() {
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
    }

    fn validator<C: JsonSchema>() -> impl Fn(&std::path::Path) -> Result<(), String> {
        let schema: Value = serde_json::from_str(&json_schema::<C>()).unwrap();
        let dialect = "https://json-schema.org/draft/2020-12/schema";
        assert_eq!(schema["$schema"], dialect);
        let mut compiler = boon::Compiler::new();
        compiler.enable_format_assertions();
        compiler.add_resource("config.json", schema).unwrap();
        let mut schemas = boon::Schemas::new();
        // Also validates the schema itself against its dialect.
        let index = compiler.compile("config.json", &mut schemas).unwrap();
        move |file| {
            let text = std::fs::read_to_string(file).unwrap();
            let value = crate::operator::config_loader::parse_untyped(&text).unwrap();
            let result = schemas.validate(&value, index);
            result.map_err(|error| format!("{}: {error:#}", file.display()))
        }
    }

    /// Returns the configuration files in `examples`, `packaging` and the fixtures for the process that reads them.
    fn shipped(side: &str) -> Vec<std::path::PathBuf> {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let entries = |folder: &std::path::Path| {
            let entries = std::fs::read_dir(folder).unwrap();
            entries.map(|entry| entry.unwrap().path())
        };
        let folders = entries(&root.join("examples")).filter(|path| path.is_dir());
        let mut files: Vec<_> = folders
            .chain([root.join("packaging")])
            .map(|folder| folder.join(side).with_extension("yaml"))
            .filter(|file| file.exists())
            .collect();
        let of_side = |file: &std::path::PathBuf| {
            let name = file.file_name().unwrap().to_string_lossy();
            name.starts_with(&format!("{side}-")) && name.ends_with(".yaml")
        };
        files.extend(entries(&root.join("tests/fixtures/config/valid")).filter(of_side));
        files
    }

    /// Each YAML block of the book has keys of a gateway or of an edge, or is another program's.
    #[test]
    fn yaml_blocks_of_the_book_are_accepted_by_a_schema() {
        let gateway = validator::<causeway_gateway::config::Config>();
        let edge = validator::<causeway_edge::config::Config>();
        let folder = tempfile::tempdir().unwrap();
        let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
        let mut count = 0;
        for part in ["tutorials", "howto", "migrate"] {
            for page in std::fs::read_dir(docs.join(part)).unwrap() {
                let page = page.unwrap().path();
                let text = std::fs::read_to_string(&page).unwrap();
                let blocks = text.split("```yaml\n").skip(1);
                for block in blocks.filter_map(|rest| rest.split("```").next()) {
                    let foreign = [
                        "scrape_configs:",
                        "apiVersion:",
                        "rules:",
                        "policy:",
                        "expect:",
                    ];
                    if foreign
                        .iter()
                        .any(|key| block.lines().any(|line| line.starts_with(key)))
                    {
                        continue;
                    }
                    let file = folder.path().join("block.yaml");
                    std::fs::write(&file, block).unwrap();
                    let faults = [gateway(&file), edge(&file)];
                    assert!(
                        faults.iter().any(Result::is_ok),
                        "{}:\n{block}\n{faults:#?}",
                        page.display()
                    );
                    count += 1;
                }
            }
        }
        assert!(count > 20, "{count}");
    }

    #[test]
    fn json_schema_accepts_every_shipped_configuration() {
        let gateway = validator::<causeway_gateway::config::Config>();
        let edge = validator::<causeway_edge::config::Config>();
        for (side, least, validate) in [
            ("gateway", 10, &gateway as &dyn Fn(&std::path::Path) -> _),
            ("edge", 5, &edge),
        ] {
            let files = shipped(side);
            assert!(files.len() >= least, "{files:?}");
            let faults: Vec<String> = files
                .iter()
                .filter_map(|file| validate(file).err())
                .collect();
            assert!(faults.is_empty(), "{}", faults.join("\n"));
        }
    }

    #[test]
    fn editors_find_the_schema_of_each_example() {
        for side in ["gateway", "edge"] {
            let first = format!("# yaml-language-server: $schema={side}.schema.json\n");
            let is_fixture =
                |file: &std::path::PathBuf| file.to_string_lossy().contains("fixtures");
            for file in shipped(side).iter().filter(|file| !is_fixture(file)) {
                let text = std::fs::read_to_string(file).unwrap();
                assert!(text.starts_with(&first), "{}", file.display());
            }
        }
    }

    #[test]
    fn json_schema_rejects_unknown_keys_and_wrong_types() {
        let validate = validator::<causeway_gateway::config::Config>();
        let invalid = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let invalid = invalid.join("tests/fixtures/config/invalid");
        for name in ["gateway-unknown-keys.yaml", "gateway-types.yaml"] {
            assert!(validate(&invalid.join(name)).is_err(), "{name}");
        }
    }

    /// Returns the schema without texts for people, which the README has.
    fn without_texts(schema: &mut serde_json::Value) {
        if let Some(object) = schema.as_object_mut() {
            // A key of a configuration may have one of these names, and is an object itself.
            object.retain(|key, value| {
                let text = ["$schema", "title", "description"].contains(&key.as_str());
                !(text && value.is_string()) && (key != "default" || value.get("type").is_some())
            });
            object.values_mut().for_each(without_texts);
        } else if let Some(list) = schema.as_array_mut() {
            list.iter_mut().for_each(without_texts);
        }
    }

    /// With `CAUSEWAY_TEST_BLESS` set the chart's schema is written instead of compared.
    #[test]
    fn the_chart_refuses_keys_that_the_configuration_lacks() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/deploy/chart/values.schema.json"
        );
        let text = std::fs::read_to_string(path).unwrap();
        let mut values: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (place, schema) in [
            (
                "/properties/gateway/properties/config",
                json_schema::<causeway_gateway::config::Config>(),
            ),
            (
                "/properties/edge/properties/config",
                json_schema::<causeway_edge::config::Config>(),
            ),
        ] {
            let mut schema = serde_json::from_str(&schema).unwrap();
            without_texts(&mut schema);
            *values.pointer_mut(place).unwrap() = schema;
        }
        let expected = format!("{values:#}\n");
        if std::env::var_os("CAUSEWAY_TEST_BLESS").is_some() {
            std::fs::write(path, expected).unwrap();
            return;
        }
        assert!(
            text == expected,
            "deploy/chart/values.schema.json is not what the code says; run CAUSEWAY_TEST_BLESS=1 cargo test -p causeway chart"
        );
    }

    #[test]
    fn json_schema_is_the_same_each_time() {
        let schema = json_schema::<causeway_gateway::config::Config>;
        assert_eq!(schema(), schema());
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
        assert_eq!(find("tunnel.advertise").unwrap().form, ValueForm::List);
        assert_eq!(find("listeners").unwrap().form, ValueForm::Yaml);
        assert_eq!(find("workers").unwrap().form, ValueForm::Scalar);
        assert_eq!(find("access_log").unwrap().form, ValueForm::Text);
        assert!(!find("listeners[].client_auth.tokens").unwrap().settable);
    }
}
