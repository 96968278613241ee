//! Compares the tables with the `generated.proto` files of the newest Kubernetes among the modules of `tests/kube/assets`. So
//! an update of that module fails here if there are fields that no table has.

use super::*;
use std::{collections::HashMap, fs, io::Write, path::PathBuf, process::Command};

/// Location of the files of each API, below the module k8s.io/api or k8s.io/apimachinery.
const FILES: &[(usize, &str)] = &[
    (0, "core/v1"),
    (0, "discovery/v1"),
    (0, "networking/v1"),
    (1, "pkg/apis/meta/v1"),
];
/// The package of messages that every API uses.
const META: &str = "k8s.io.apimachinery.pkg.apis.meta.v1";

/// Name, number and type of each field, by message.
type Messages = HashMap<String, Vec<(String, u32, String)>>;

/// Returns the folders of both modules in Go's cache. `.ci/setup` installs them.
fn modules() -> Option<Vec<PathBuf>> {
    let listed = Command::new("go")
        .args(["list", "-m", "-f", "{{.Dir}}"])
        .args(["k8s.io/api", "k8s.io/apimachinery"])
        .current_dir(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/kube/assets/coredns"
        ))
        .env("GOFLAGS", "-mod=readonly")
        .env("GOPROXY", "off")
        .output()
        .ok()?;
    let folders = String::from_utf8(listed.stdout).ok()?;
    let folders: Vec<_> = folders.split_whitespace().map(PathBuf::from).collect();
    let here = folders.len() == 2;
    let required = std::env::var_os("CAUSEWAY_TEST_REQUIRE_ALL").is_some_and(|value| value == "1");
    assert!(here || !required, "needs k8s.io/api: .ci/setup");
    here.then_some(folders)
}

/// Adds the messages of a file.
fn read(text: &str, messages: &mut Messages) {
    let package = text.lines().find_map(|line| line.strip_prefix("package "));
    let package = package.unwrap().trim_end_matches(';');
    let mut message = String::new();
    for line in text.lines() {
        let line = line.replace("map<string, ", "map<");
        let words: Vec<_> = line.trim_end_matches(';').split_whitespace().collect();
        let (label, kind, name, number) = match *words {
            ["message", name, "{"] => {
                message = format!("{package}.{name}");
                continue;
            }
            ["optional", kind, name, "=", number] => ("", kind, name, number),
            ["repeated", kind, name, "=", number] => ("repeated ", kind, name, number),
            [map, name, "=", number] if map.starts_with("map<") => {
                let kind = map.trim_start_matches("map<").trim_end_matches('>');
                ("map ", kind, name, number)
            }
            _ => continue,
        };
        let kind = match (kind.strip_prefix('.'), kind) {
            (Some(full), _) => full.to_owned(),
            (None, "string" | "bool" | "int32" | "int64" | "bytes") => kind.to_owned(),
            (None, _) => format!("{package}.{kind}"),
        };
        let field = (
            name.to_owned(),
            number.parse().unwrap(),
            label.to_owned() + &kind,
        );
        messages.entry(message.clone()).or_default().push(field);
    }
}

/// Records each field of a message that no table has, or that a table has with a difference. Further fields of a table
/// occur in no object.
fn compare(fields: &[Field], message: &str, all: &Messages, missing: &mut Vec<String>) {
    for (name, number, kind) in &all[message] {
        let known = fields
            .iter()
            .find(|field| field.0 == name && field.1 == *number);
        if !known.is_some_and(|field| fits(&field.2, kind, all, missing)) {
            missing.push(format!("{message}: {kind} {name} = {number}"));
        }
    }
}

fn fits(kind: &Kind, proto: &str, all: &Messages, missing: &mut Vec<String>) -> bool {
    match (kind, proto) {
        (Kind::Text, "string")
        | (Kind::Int, "int32" | "int64")
        | (Kind::Flag, "bool")
        | (Kind::Bytes, "bytes")
        | (Kind::Quantity, "k8s.io.apimachinery.pkg.api.resource.Quantity")
        | (Kind::IntOrText, "k8s.io.apimachinery.pkg.util.intstr.IntOrString") => true,
        (Kind::Time, _) => proto == format!("{META}.Time"),
        (Kind::Json, _) => proto == format!("{META}.FieldsV1"),
        (Kind::Repeated(each), _) => proto
            .strip_prefix("repeated ")
            .is_some_and(|proto| fits(each, proto, all, missing)),
        (Kind::Map(each), _) => proto
            .strip_prefix("map ")
            .is_some_and(|proto| fits(each, proto, all, missing)),
        (Kind::Message(fields), _) if all.contains_key(proto) => {
            compare(fields, proto, all, missing);
            true
        }
        _ => false,
    }
}

#[test]
fn each_field_of_kubernetes_is_in_its_table() {
    let Some(modules) = modules() else {
        let skipped =
            "each_field_of_kubernetes_is_in_its_table: skipped: needs k8s.io/api: .ci/setup";
        writeln!(std::io::stderr().lock(), "{skipped}").unwrap();
        return;
    };
    let mut all = Messages::new();
    for (module, folder) in FILES {
        let file = modules[*module].join(folder).join("generated.proto");
        read(&fs::read_to_string(file).unwrap(), &mut all);
    }
    let mut missing = Vec::new();
    for (api_version, kind, fields) in KINDS {
        let package = match (*api_version, *kind) {
            ("meta.k8s.io/v1", _) | (_, "Status") => META,
            ("v1", _) => "k8s.io.api.core.v1",
            ("discovery.k8s.io/v1", _) => "k8s.io.api.discovery.v1",
            ("networking.k8s.io/v1", _) => "k8s.io.api.networking.v1",
            _ => panic!("no file is known for {api_version}"),
        };
        compare(fields, &format!("{package}.{kind}"), &all, &mut missing);
    }
    assert!(missing.is_empty(), "in no table: {missing:#?}");
}
