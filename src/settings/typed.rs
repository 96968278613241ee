//! What the types of a configuration say of it, held against the files in `schema/`, which are all that a release knows.
//!
//! The types' doc comments, defaults and shapes come out of their derived schemas. These cost a process that derives
//! them most of a megabyte of code, so that only the tests do.

use std::path::Path;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{PrettyFormatter, Serializer};

/// The schema of `C` with nothing referred to elsewhere.
pub(super) fn schema<C: JsonSchema>() -> Value {
    let settings = SchemaSettings::default().with(|settings| settings.inline_subschemas = true);
    settings
        .into_generator()
        .into_root_schema_for::<C>()
        .to_value()
}

/// Fails unless `schema/NAME.json` is what the types say, to the letter: the order of keys is that of the help.
///
/// With `CAUSEWAY_TEST_BLESS` set the file is written instead of compared; what is built next has it.
pub(crate) fn hold<C: JsonSchema>(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src/settings/schema")
        .join(name)
        .with_extension("json");
    let expected = written(&schema::<C>());
    if std::env::var_os("CAUSEWAY_TEST_BLESS").is_some() {
        std::fs::write(path, expected).unwrap();
        return;
    }
    assert!(
        std::fs::read_to_string(&path).unwrap() == expected,
        "{} is not what the types say; run CAUSEWAY_TEST_BLESS=1 cargo test -p causeway --bin causeway",
        path.display()
    );
}

/// Readable as differences, and with no more space than that takes: it is part of the binary as it stands.
fn written(schema: &Value) -> String {
    let mut bytes = Vec::new();
    let mut to = Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(b" "));
    schema.serialize(&mut to).unwrap();
    bytes.push(b'\n');
    String::from_utf8(bytes).unwrap()
}

#[test]
fn the_schemas_are_what_the_types_say() {
    hold::<causeway_gateway::config::Config>("gateway");
    hold::<causeway_edge::config::Config>("edge");
    hold::<causeway_gateway::redirector::Config>("redirect");
    hold::<causeway_gateway::config::policy::Policy>("policy");
}
