//! Egress: connections that edges open to the cloud or to other edges. Everything that no rule allows is denied.
//!
//! A missing key in `who` or `ports` does not restrict a rule. An empty key is a fault, because a list that a template left empty must
//! not widen a rule that the list was to restrict.

use super::{
    api_cache::matches_pattern,
    policy::{PortRange, SourceNetworks, label_fault, namespace_fault},
};
use causeway_certs::NodeName;
use causeway_config::{ByteSize, ConfigErrors, Specified, host_port};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};

/// Minimum of `bytes_per_second`. Below it, one chunk of a connection would take longer than the timeouts of its peers.
const MIN_BYTES_PER_SECOND: usize = 10_000;

/// Connections that edges open: which nodes may connect to which destinations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Egress {
    /// Destinations with a name of their own: `kube-apiserver: 10.0.0.1:6443`. An edge asks for the name, and the gateway connects to the address. An IP address here may also be an address of the gateway's own machine.
    pub destinations: BTreeMap<String, String>,
    /// Rules that allow connections. A connection that no rule allows is refused.
    pub rules: Vec<EgressRule>,
    /// Limits of the connections of one node.
    pub limits: EgressLimits,
}

/// One rule.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EgressRule {
    /// Name in logs; unique.
    #[serde(default)]
    pub name: Option<String>,
    /// Nodes that may connect: those that match every given key. Without this key: all nodes.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub who: Specified<EgressSubjects>,
    /// Destinations to which they may connect.
    pub to: EgressTargets,
}

/// Nodes that a rule applies to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EgressSubjects {
    /// Names of nodes; `*` stands for any characters.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub nodes: Specified<Vec<String>>,
    /// Confirmed pools; `*` stands for any characters.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub pools: Specified<Vec<String>>,
    /// Confirmed labels; a node must have all of them.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub labels: Specified<BTreeMap<String, String>>,
}

/// Destinations of a rule: everything that one of `destinations`, `names`, `networks`, `nodes` and `pod_namespaces` lists, at one of `ports`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EgressTargets {
    /// Keys of `egress.destinations`.
    pub destinations: Vec<String>,
    /// Names of hosts; `*` stands for any characters. The gateway resolves them. Addresses of the gateway's machine, loopback, link-local and metadata addresses are refused, unless `networks` of the same rule lists them.
    pub names: Vec<String>,
    /// Networks. A network does not include addresses of the gateway's machine, loopback, link-local and metadata addresses that lie in it, unless it contains nothing else.
    pub networks: SourceNetworks,
    /// Names of other nodes; `*` stands for any characters. The gateway connects through the tunnel of the other node, whose edge must serve the port, and whose `policy` applies to the client `spiffe://TRUST-DOMAIN/edge/NODE`.
    pub nodes: Vec<String>,
    /// Namespaces of pods at other nodes or in the cloud, by name or by address; `*` stands for any characters. Needs `kubernetes.pods`. Only a pod that is known by its Pod object, and that has its address alone, is allowed. A pod at another edge is reached as with `nodes`. For a pod in the cloud the address must be an ordinary one, as with `names`.
    pub pod_namespaces: Vec<String>,
    /// Ports: `443`, or `"30000-32767"`. Without this key: all. For a key of `egress.destinations`, the port of its address counts, not the port that the edge asks for.
    #[serde(skip_serializing_if = "Specified::is_absent")]
    pub ports: Specified<Vec<PortRange>>,
}

/// Limits of the connections of one node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EgressLimits {
    /// Open connections of one node.
    pub connections: usize,
    /// Bytes per second of one node at this gateway, in both directions together. 0 is no limit.
    #[serde(with = "ByteSize")]
    pub bytes_per_second: usize,
}

impl Default for EgressLimits {
    fn default() -> Self {
        Self {
            // kubelet, a hub and agents of a node have some tens of connections, and each pod a few.
            connections: 1024,
            bytes_per_second: 0,
        }
    }
}

impl EgressRule {
    /// Returns the rule's label for logs: its name, or its position.
    pub fn label(&self, index: usize) -> String {
        let name = self.name.clone();
        name.unwrap_or_else(|| format!("egress.rules[{index}]"))
    }
}

impl EgressSubjects {
    /// Whether a node with this confirmed pool and these labels is one of the subjects.
    pub(crate) fn includes(
        &self,
        node: &NodeName,
        pool: Option<&str>,
        labels: &BTreeMap<String, String>,
    ) -> bool {
        let is_listed = |patterns: &Specified<Vec<String>>, name: Option<&str>| {
            patterns
                .0
                .as_ref()
                .is_none_or(|patterns| name.is_some_and(|name| matches_any(patterns, name)))
        };
        let has_labels = self.labels.0.as_ref().is_none_or(|wanted| {
            let mut wanted = wanted.iter();
            wanted.all(|(key, value)| labels.get(key) == Some(value))
        });
        is_listed(&self.nodes, Some(node.as_str())) && is_listed(&self.pools, pool) && has_labels
    }
}

/// Whether one of the patterns, in which `*` stands for any characters, matches a name.
pub(crate) fn matches_any(patterns: &[String], name: &str) -> bool {
    patterns
        .iter()
        .any(|pattern| matches_pattern(pattern, name))
}

impl Egress {
    /// Whether any rule depends on the pool or the labels of a node.
    pub(crate) fn depends_on_nodes(&self) -> bool {
        let mut subjects = self.rules.iter().filter_map(|rule| rule.who.0.as_ref());
        subjects.any(|who| !who.pools.is_absent() || !who.labels.is_absent())
    }

    /// Whether any rule depends on the pod to which a connection goes.
    pub(crate) fn depends_on_pods(&self) -> bool {
        let mut rules = self.rules.iter();
        rules.any(|rule| !rule.to.pod_namespaces.is_empty())
    }

    /// Adds the faults. `follows_pods` is whether the gateway follows Pod objects.
    pub(super) fn validate(&self, follows_pods: bool, faults: &mut ConfigErrors) {
        for (name, address) in &self.destinations {
            let path = format!("egress.destinations.{name}");
            if !is_name(name, false) {
                let message = format!(
                    "\"{name}\" is not a valid name of a destination; use lower-case letters, digits, '-', '_' and '.'"
                );
                faults.add(path.clone(), message);
            }
            if let Err(message) = host_port(address) {
                faults.add(path, message);
            }
        }
        let mut names = HashSet::new();
        for (index, rule) in self.rules.iter().enumerate() {
            let path = format!("egress.rules[{index}]");
            if let Some(name) = &rule.name {
                if name.trim().is_empty() || name.chars().any(char::is_control) {
                    let message =
                        "must be one or more words; remove the key if the rule needs no name";
                    faults.add(format!("{path}.name"), message);
                } else if !names.insert(name) {
                    let message = format!(
                        "the name \"{name}\" is used by an earlier rule; each rule needs its own name"
                    );
                    faults.add(format!("{path}.name"), message);
                }
            }
            check_subjects(&format!("{path}.who"), &rule.who, faults);
            self.check_targets(&format!("{path}.to"), (&rule.to, follows_pods), faults);
        }
        faults.check_at_least_one("egress.limits", &[("connections", self.limits.connections)]);
        if (1..MIN_BYTES_PER_SECOND).contains(&self.limits.bytes_per_second) {
            let message =
                "would stop connections for minutes; use at least 10kB, or 0 for no limit";
            faults.add("egress.limits.bytes_per_second", message);
        }
    }

    fn check_targets(
        &self,
        path: &str,
        (to, follows_pods): (&EgressTargets, bool),
        faults: &mut ConfigErrors,
    ) {
        let EgressTargets {
            destinations,
            names,
            networks,
            nodes,
            pod_namespaces,
            ports,
        } = to;
        let lists = [destinations, names, nodes, pod_namespaces];
        if networks.0.is_empty() && lists.iter().all(|list| list.is_empty()) {
            let message = "lists no destination, so the rule allows nothing; set destinations, names, networks, nodes or pod_namespaces";
            faults.add(path, message);
        }
        for (index, pattern) in pod_namespaces.iter().enumerate() {
            if let Some(message) = namespace_fault(pattern) {
                faults.add(format!("{path}.pod_namespaces[{index}]"), message);
            }
        }
        if !pod_namespaces.is_empty() && !follows_pods {
            let message = "the gateway does not know which pods have which addresses, so this matches nothing; set kubernetes.pods";
            faults.add(format!("{path}.pod_namespaces"), message);
        }
        for (index, name) in destinations.iter().enumerate() {
            if !self.destinations.contains_key(name) {
                let message = format!(
                    "\"{name}\" is not a key of egress.destinations; add it there, or write it in names if it is a host"
                );
                faults.add(format!("{path}.destinations[{index}]"), message);
            }
        }
        for (key, list) in [("names", names), ("nodes", nodes)] {
            for (index, pattern) in list.iter().enumerate() {
                if !is_name(pattern, true) {
                    let message = format!(
                        "\"{pattern}\" cannot match a name; names have lower-case letters, digits, '-', '_' and '.', and * stands for any of them"
                    );
                    faults.add(format!("{path}.{key}[{index}]"), message);
                } else if key == "names" && pattern.parse::<std::net::IpAddr>().is_ok() {
                    let message = format!("\"{pattern}\" is an address; write it in networks");
                    faults.add(format!("{path}.{key}[{index}]"), message);
                }
            }
        }
        if ports.0.as_ref().is_some_and(Vec::is_empty) {
            faults.add(format!("{path}.ports"), EMPTY);
        }
    }
}

const EMPTY: &str = "is empty and would match nothing; list at least one value, or remove the key to match any value";

fn check_subjects(path: &str, who: &Specified<EgressSubjects>, faults: &mut ConfigErrors) {
    let Some(who) = &who.0 else { return };
    if *who == EgressSubjects::default() {
        let message = "is empty; set nodes, pools or labels, or remove the key to match all nodes";
        faults.add(path, message);
    }
    for (key, list) in [("nodes", &who.nodes), ("pools", &who.pools)] {
        let Some(list) = &list.0 else { continue };
        if list.is_empty() {
            faults.add(format!("{path}.{key}"), EMPTY);
        }
        for (index, pattern) in list.iter().enumerate() {
            if pattern.trim() != pattern
                || pattern.is_empty()
                || pattern.chars().any(char::is_control)
            {
                let message = "is empty or has a character that is not allowed in a name; write a name, or * for any";
                faults.add(format!("{path}.{key}[{index}]"), message);
            }
        }
    }
    if who.labels.0.as_ref().is_some_and(BTreeMap::is_empty) {
        faults.add(format!("{path}.labels"), EMPTY);
    }
    for (key, value) in who.labels.0.iter().flatten() {
        if let Some(message) = label_fault(key).or_else(|| label_fault(value)) {
            faults.add(format!("{path}.labels"), message);
        }
    }
}

/// Whether a text is a name in lower case, or a pattern of such names.
fn is_name(text: &str, may_be_pattern: bool) -> bool {
    let is_letter =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte);
    let is_valid = |byte: u8| is_letter(byte) || (may_be_pattern && byte == b'*');
    !text.is_empty() && text.bytes().all(is_valid)
}
