//! The configuration reference: a Markdown table, out of the schema.
//!
//! The README holds one for each side between markers; a test keeps them equal to this.

use std::fmt::Write;

use serde_json::Value;

use super::{ProcessConfig, keys};

/// All keys of `C` as a Markdown table: key, flag, variable, default, meaning.
pub(crate) fn reference<C: ProcessConfig>() -> String {
    let mut table = String::from(
        "| key | flag | variable | default | meaning |\n| --- | --- | --- | --- | --- |\n",
    );
    for key in keys::<C>() {
        let (flag, variable) = if key.settable {
            (
                format!("`--{}`", key.flag()),
                format!("`{}`", key.variable()),
            )
        } else {
            (String::new(), String::new())
        };
        let default = key
            .default
            .as_ref()
            .map_or(String::new(), |value| format!("`{}`", plain(value)));
        let meaning = key.help.replace('|', "\\|").replace('\n', " ");
        let name = &key.name;
        // Writing into a String cannot fail.
        let _ = writeln!(
            table,
            "| `{name}` | {flag} | {variable} | {default} | {meaning} |"
        );
    }
    table
}

/// A default as one would write it in the file.
pub(crate) fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        // The default listener; the meaning describes it.
        Value::Array(list) if list.iter().any(Value::is_object) => "…".into(),
        Value::Array(list) => format!(
            "[{}]",
            list.iter().map(plain).collect::<Vec<_>>().join(", ")
        ),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `CAUSEWAY_TEST_BLESS` set the README is written instead of compared.
    fn in_readme<C: ProcessConfig>(side: &str) {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
        let readme = std::fs::read_to_string(path).unwrap();
        let (start, end) = (
            format!("<!-- {side} reference -->\n"),
            format!("<!-- /{side} reference -->"),
        );
        let (before, rest) = readme
            .split_once(&start)
            .expect("the marker stands in the README");
        let (section, after) = rest
            .split_once(&end)
            .expect("the end marker stands in the README");
        let expected = format!("\n{}\n", reference::<C>());
        if std::env::var_os("CAUSEWAY_TEST_BLESS").is_some() {
            std::fs::write(path, format!("{before}{start}{expected}{end}{after}")).unwrap();
            return;
        }
        assert!(
            section == expected,
            "README.md is not what the code says; run CAUSEWAY_TEST_BLESS=1 cargo test -p causeway reference"
        );
    }

    /// One test, so that two do not write the file at once.
    #[test]
    fn the_readme_reference_matches_the_code() {
        in_readme::<causeway_gateway::config::Config>("gateway");
        in_readme::<causeway_edge::config::Config>("edge");
    }
}
