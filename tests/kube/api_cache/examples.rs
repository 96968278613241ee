//! The files of the examples, in the form in which these tests run them.

use std::{fs, path::Path};

/// A file of the example, with this cloud's addresses and files.
pub(super) fn example(name: &str, changes: &[(&str, String)]) -> String {
    example_of("api-cache", name, changes)
}

/// The same of another example.
pub(super) fn example_of(example: &str, name: &str, changes: &[(&str, String)]) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let folder = folder.join(example);
    let mut text = fs::read_to_string(folder.join(name)).unwrap();
    for (theirs, here) in changes {
        assert!(text.contains(theirs), "{name} has no {theirs}");
        text = text.replace(theirs, here);
    }
    text
}

/// Returns a configuration with the section below this key from another one.
pub(super) fn with_lines_of(config: &str, other: &str, key: &str) -> String {
    let (_, lines) = other.split_once(key).unwrap();
    assert_eq!(config.matches(key).count(), 1, "{config}");
    config.replace(key, &format!("{key}{lines}"))
}
