//! The page of the reference that lists the rights of the shipped manifests. It is made from `deploy/` and not from the program,
//! so only the test makes it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::operator::config_loader::parse_untyped;

/// Purpose of each role that a binding of the manifests names.
const PURPOSES: &[(&str, &str)] = &[
    (
        "ClusterRole causeway-gateway",
        "reads names, addresses and labels of Nodes: the gateway admits and routes by them",
    ),
    (
        "ClusterRole causeway-gateway-certificates",
        "approves and signs the requests of edges that join by the cluster (`kubernetes.certificates`), of its own signer alone",
    ),
    (
        "Role kube-system/causeway-gateway-ca",
        "publishes the CA that edges trust",
    ),
    (
        "Role default/causeway-gateway-certificates",
        "writes an event for a request that it leaves alone",
    ),
    (
        "Role default/causeway-gateway-events",
        "writes a warning about a Node that has the address of another Node",
    ),
    (
        "Role causeway/causeway-gateway-tunnels",
        "reads the Service of the tunnel port and counts the gateways behind it (`kubernetes.advertise`)",
    ),
    (
        "Role causeway/causeway-gateway-state",
        "stores the state that all gateways share, and their CA (`kubernetes.state`)",
    ),
    (
        "Role causeway/causeway-gateway-ports",
        "reads the list of ports, sets the ports of the Service of clients, and writes events about faults of the list (`kubernetes.ports`)",
    ),
    (
        "Role kube-system/causeway-gateway-hubs",
        "tells YurtHubs the edges of their pool to read at (`kubernetes.yurthub`)",
    ),
    (
        "Role kube-system/causeway-ca",
        "reads the CA of the gateways",
    ),
    (
        "ClusterRole causeway-gateway-api-cache",
        "reads the objects that edges may read (`api_cache.resources`); a resource that is added there needs a rule here",
    ),
    (
        "ClusterRole causeway-gateway-heartbeats",
        "marks and taints Nodes with delegated heartbeats, and keeps their condition `Ready` (`kubernetes.heartbeats`)",
    ),
    (
        "ClusterRole causeway-gateway-pods",
        "reads Pods: the gateway routes to pods by them (`kubernetes.pods`)",
    ),
    (
        "Role kube-node-lease/causeway-gateway-heartbeats",
        "renews the Leases of nodes that have lost their gateways",
    ),
    (
        "Role kube-system/causeway-gateway-heartbeats",
        "selects the one gateway that manages taints, by the Lease `causeway-heartbeats`",
    ),
    (
        "ClusterRole causeway-gateway-kubelet-client",
        "requests the gateway's client certificate for kubelets, and approves it (`upstream_tls.*.signer`, `approve`). The right to approve is for every request at this signer",
    ),
    (
        "ClusterRole causeway-edge",
        "requests the certificate of an edge, with a pod's account; kubelets have this right already",
    ),
    (
        "ClusterRole system:auth-delegator",
        "creates TokenReviews and SubjectAccessReviews (`token_review`, `subject_access_review`)",
    ),
    (
        "ClusterRole system:kubelet-api-admin",
        "uses kubelets with the gateway's client certificate, as kube-apiserver does",
    ),
];

/// Role with its rules, and the overlays and components that have it.
#[derive(Default)]
struct Role {
    rules: Vec<Value>,
    places: BTreeSet<String>,
}

/// Roles by subject and then by name.
type Subjects = BTreeMap<String, BTreeMap<String, Role>>;

/// Returns the page as Markdown.
pub(super) fn page() -> String {
    let mut text = "# Rights in a cluster\n\n\
        This page lists each account of the manifests in `deploy/`, with its rights at the API of the cluster. The overlays (`addresses`, `clients`,\n\
        `dns`, `egress`, `ports`) are the ways of the chart; a component adds to any of them. Leave out what you do not use.\n"
        .to_owned();
    let (subjects, overlays) = subjects();
    for (subject, roles) in subjects {
        let _ = write!(
            text,
            "\n## {subject}\n\n| role | in | purpose |\n| --- | --- | --- |\n"
        );
        for (name, role) in &roles {
            let purpose = PURPOSES.iter().find(|(role, _)| role == name);
            let (_, purpose) = purpose.unwrap_or_else(|| panic!("no purpose of {name}"));
            let places: Vec<_> = role.places.iter().map(String::as_str).collect();
            let places = if role.places == overlays {
                "all overlays".to_owned()
            } else {
                places.join(", ")
            };
            let _ = writeln!(text, "| `{name}` | {places} | {purpose} |");
        }
        let _ = write!(
            text,
            "\n| role | API group | resources | names | verbs |\n| --- | --- | --- | --- | --- |\n"
        );
        for (name, role) in &roles {
            if role.rules.is_empty() {
                let _ = writeln!(text, "| `{name}` | defined by Kubernetes | | | |");
            }
            for rule in &role.rules {
                let cell = |field: &str| {
                    let all = rule[field].as_array().into_iter().flatten();
                    let all = all.filter_map(Value::as_str).map(|one| match one {
                        "" => "core".to_owned(),
                        one => format!("`{one}`"),
                    });
                    all.collect::<Vec<_>>().join(", ")
                };
                let cells = ["apiGroups", "resources", "resourceNames", "verbs"].map(cell);
                let _ = writeln!(text, "| `{name}` | {} |", cells.join(" | "));
            }
        }
    }
    text
}

/// Returns the roles of each subject, and the names of all overlays.
fn subjects() -> (Subjects, BTreeSet<String>) {
    let mut subjects = Subjects::new();
    let mut overlays = BTreeSet::new();
    let mut bound = BTreeSet::new();
    for (place, file) in files() {
        if !place.starts_with("component") {
            overlays.insert(place.clone());
        }
        let objects = objects(&file);
        for binding in &objects {
            if !matches!(
                binding["kind"].as_str(),
                Some("RoleBinding" | "ClusterRoleBinding")
            ) {
                continue;
            }
            let reference = &binding["roleRef"];
            let name = role_name(reference, &binding["metadata"]["namespace"]);
            let found = objects
                .iter()
                .find(|object| role_name(object, &object["metadata"]["namespace"]) == name);
            bound.insert(name.clone());
            for subject in binding["subjects"].as_array().unwrap() {
                let roles = subjects.entry(subject_name(subject)).or_default();
                let role = roles.entry(name.clone()).or_default();
                role.places.insert(place.clone());
                role.rules = found
                    .map(|found| found["rules"].as_array().unwrap().clone())
                    .unwrap_or_default();
            }
        }
        for object in &objects {
            let name = role_name(object, &object["metadata"]["namespace"]);
            let is_role = matches!(object["kind"].as_str(), Some("Role" | "ClusterRole"));
            assert!(
                !is_role || bound.contains(&name),
                "{name} is bound to no subject"
            );
        }
    }
    for (name, _) in PURPOSES {
        assert!(bound.contains(*name), "{name} is in no manifest");
    }
    (subjects, overlays)
}

/// Returns the rendered manifests of each overlay, and the roles of each component.
fn files() -> Vec<(String, PathBuf)> {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let entries = |folder: &str| {
        let entries = std::fs::read_dir(deploy.join(folder)).unwrap();
        let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    };
    let name = |path: &Path| path.file_stem().unwrap().to_string_lossy().into_owned();
    let overlays = entries("chart/manifests").into_iter();
    let overlays = overlays.map(|path| (name(&path), path));
    let components = entries("components").into_iter();
    let components = components
        .map(|path| (format!("component {}", name(&path)), path.join("rbac.yaml")))
        .filter(|(_, file)| file.exists());
    overlays.chain(components).collect()
}

fn objects(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap();
    let documents = text.split("\n---\n");
    documents.map(|text| parse_untyped(text).unwrap()).collect()
}

/// Returns the kind and the name of a role, or of a reference to one.
fn role_name(role: &Value, namespace: &Value) -> String {
    let kind = role["kind"].as_str().unwrap_or_default();
    let name = role["name"].as_str().or(role["metadata"]["name"].as_str());
    let name = name.unwrap_or_default();
    match namespace.as_str() {
        Some(namespace) if kind == "Role" => format!("{kind} {namespace}/{name}"),
        _ => format!("{kind} {name}"),
    }
}

fn subject_name(subject: &Value) -> String {
    let text = |field: &str| subject[field].as_str().unwrap_or_default();
    match subject["namespace"].as_str() {
        Some(namespace) => format!("{} `{namespace}/{}`", text("kind"), text("name")),
        None => format!("{} `{}`", text("kind"), text("name")),
    }
}
