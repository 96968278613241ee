//! The access policy file: rules that allow or deny requests of clients to nodes. The first rule that matches decides.
//!
//! A missing key does not restrict a rule. An empty key is a fault, because a list that a template left empty must not widen a
//! rule that the list was to restrict. A pattern that can never match, or has two meanings, is a fault as well.

use causeway_config::{ConfigError, ConfigErrors, IpNetList, Specified, Validate};
use ipnet::IpNet;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    fmt,
    ops::RangeInclusive,
    str::FromStr,
};

/// Maximum number of rules, far above practical policies. It limits the cost of one file.
const MAX_RULES: usize = 100_000;

/// Access policy of clients on nodes. A request that no rule allows is refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The rules; the first that matches decides.
    pub rules: Vec<Rule>,
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Name in logs; unique.
    #[serde(default)]
    pub name: Option<String>,
    /// Clients that the rule applies to. Without this key: every client that a listener admits.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub who: Specified<Subjects>,
    /// Nodes that the rule applies to. Without this key: all.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub r#where: Specified<NodeSelector>,
    /// Requests that the rule applies to. Without this key: all.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub what: Specified<RequestMatch>,
    /// Effect of the rule: `allow` or `deny`.
    pub then: Effect,
    /// Line of the file in which the rule begins, from 1; 0 without a file.
    #[serde(skip)]
    pub line: usize,
}

/// Clients that a rule applies to. A client must match one of `users`, `groups` or `spiffe`, and must come from one of `networks`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Subjects {
    /// Names of clients; `*` stands for any characters. An anonymous client is `system:anonymous`, which only the literal name matches.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub users: Specified<Vec<String>>,
    /// Groups of clients. Authenticated clients are in `system:authenticated`, others are in `system:unauthenticated`.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub groups: Specified<Vec<String>>,
    /// URIs in client certificates: `spiffe://example.org/ns/monitoring/*`.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub spiffe: Specified<Vec<String>>,
    /// Source networks of clients.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub networks: Specified<SourceNetworks>,
}

/// Nodes that a rule applies to: those that match every given key. With `direct` the rule applies to no node, with `services` to services of the nodes, and with `pod_namespaces` to pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeSelector {
    /// Names of nodes; `*` stands for any characters.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub nodes: Specified<Vec<String>>,
    /// Confirmed pools.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub pools: Specified<Vec<String>>,
    /// Confirmed labels; a node must have all of them.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub labels: Specified<BTreeMap<String, String>>,
    /// Names of services of these nodes (`services` of an edge), in place of the nodes themselves; `*` stands for any characters. Without this key a rule that allows applies to no service. A rule that denies applies to the services of its nodes as well, unless it has `ports`.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub services: Specified<Vec<String>>,
    /// Namespaces of pods, in place of the nodes themselves: pods of these nodes, and without a key for nodes also pods that a listener dials itself. `*` stands for any characters. Needs `kubernetes.pods`. Only a pod that is known by its Pod object, and that has its address alone, matches a rule that allows. A rule without this key applies to pods as well.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub pod_namespaces: Specified<Vec<String>>,
    /// Networks of addresses that no edge serves and that a listener dials itself (its key `direct_networks`), in place of nodes.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub direct: Specified<SourceNetworks>,
}

/// Requests that a rule applies to: those that match every given key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RequestMatch {
    /// Ports of the node: `10250`, or `"30000-32767"`. A rule with this key applies to no service.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub ports: Specified<Vec<PortRange>>,
    /// HTTP methods.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub methods: Specified<Vec<String>>,
    /// Paths, each with everything below it: `/metrics` includes `/metrics/cadvisor`.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub paths: Specified<Vec<String>>,
    /// Kinds of streams: `request`, `upgrade` or `connect`.
    #[serde(default, skip_serializing_if = "Specified::is_absent")]
    pub streams: Specified<Vec<Action>>,
}

/// Kind of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// A plain request.
    Request,
    /// A request that switches protocols (kubectl exec, websocket).
    Upgrade,
    /// A TCP session, by CONNECT or through a `tcp` listener.
    Connect,
}

impl Action {
    /// Returns the word of the policy file.
    pub fn word(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Upgrade => "upgrade",
            Self::Connect => "connect",
        }
    }
}

/// Effect of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// The request is allowed.
    Allow,
    /// The request is denied.
    Deny,
}

/// Networks, as a list that also takes plain addresses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(transparent)]
pub struct SourceNetworks(#[serde(with = "IpNetList")] pub Vec<IpNet>);

/// A port, or ports from one to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRange(pub RangeInclusive<u16>);

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
        let range = match text.split_once('-') {
            None => number(text).map(|port| port..=port),
            Some((first, last)) => number(first)
                .zip(number(last))
                .map(|(first, last)| first..=last)
                .filter(|range| !range.is_empty()),
        };
        range.map(Self).ok_or_else(|| {
            format!(
                "\"{text}\" is not a valid port; write 10250, or \"30000-32767\", from 1 to 65535"
            )
        })
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.0.start(), self.0.end());
        if first == last {
            write!(f, "{first}")
        } else {
            write!(f, "{first}-{last}")
        }
    }
}

impl Serialize for PortRange {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PortRange {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(u64),
            Text(String),
        }
        let text = match Written::deserialize(from)? {
            Written::Number(number) => number.to_string(),
            Written::Text(text) => text,
        };
        text.parse().map_err(de::Error::custom)
    }
}

impl schemars::JsonSchema for PortRange {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Ports".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": ["integer", "string"] })
    }
}

impl Rule {
    /// Returns the rule's label for logs and refusals: its name, or its position.
    pub fn label(&self, index: usize) -> String {
        let name = self.name.clone();
        name.unwrap_or_else(|| format!("rules[{index}]"))
    }
}

impl Validate for Policy {
    fn validate(&self) -> Vec<ConfigError> {
        let mut faults = ConfigErrors::default();
        if self.rules.len() > MAX_RULES {
            let message = format!(
                "there are {} rules, but at most {MAX_RULES} are allowed",
                self.rules.len()
            );
            faults.add("rules", message);
        }
        let mut names = HashSet::new();
        for (index, rule) in self.rules.iter().enumerate() {
            let path = format!("rules[{index}]");
            let mut check = RuleValidator {
                path: &path,
                faults: &mut faults,
            };
            if let Some(name) = &rule.name {
                check.name(name, names.insert(name.as_str()));
            }
            check.check_subjects(&rule.who);
            check.check_nodes(&rule.r#where);
            check.check_request(&rule.what);
            check.check_service_ports(rule);
        }
        faults.into_vec()
    }
}

/// Collects the faults of one rule.
struct RuleValidator<'a> {
    path: &'a str,
    faults: &'a mut ConfigErrors,
}

impl RuleValidator<'_> {
    fn add(&mut self, key: &str, message: impl Into<String>) {
        self.faults.add(format!("{}.{key}", self.path), message);
    }

    fn name(&mut self, name: &str, is_unique: bool) {
        if name.trim().is_empty() || name.chars().any(char::is_control) {
            self.add(
                "name",
                "must be one or more words; remove the key if the rule needs no name",
            );
        } else if !is_unique {
            let message = format!(
                "the name \"{name}\" is used by an earlier rule; each rule needs its own name"
            );
            self.add("name", message);
        }
    }

    /// Adds the faults of each item of a given list, and a fault if the list is empty.
    fn check_each<T>(
        &mut self,
        key: &str,
        list: &Specified<Vec<T>>,
        fault: impl Fn(&T) -> Option<String>,
    ) {
        let Some(list) = &list.0 else { return };
        if list.is_empty() {
            self.add(key, EMPTY);
        }
        for (index, one) in list.iter().enumerate() {
            if let Some(message) = fault(one) {
                self.add(&format!("{key}[{index}]"), message);
            }
        }
    }

    fn check_subjects(&mut self, who: &Specified<Subjects>) {
        let Some(who) = &who.0 else { return };
        if *who == Subjects::default() {
            self.add("who", "is empty; set users, groups, spiffe or networks, or remove the key to match every client");
        }
        self.check_each("who.users", &who.users, |text| pattern_fault(text));
        self.check_each("who.groups", &who.groups, |text| pattern_fault(text));
        self.check_each("who.spiffe", &who.spiffe, |text| {
            let other = || {
                format!("\"{text}\" is not a SPIFFE ID; write spiffe://example.org/ns/monitoring/*")
            };
            pattern_fault(text).or_else(|| (!text.starts_with("spiffe://")).then(other))
        });
        if who
            .networks
            .0
            .as_ref()
            .is_some_and(|list| list.0.is_empty())
        {
            self.add("who.networks", EMPTY);
        }
    }

    fn check_nodes(&mut self, nodes: &Specified<NodeSelector>) {
        let Some(nodes) = &nodes.0 else { return };
        if *nodes == NodeSelector::default() {
            self.add(
                "where",
                "is empty; set nodes, pools, labels, services, pod_namespaces or direct, or remove the key to match all nodes",
            );
        }
        if let Some(direct) = &nodes.direct.0 {
            if direct.0.is_empty() {
                self.add("where.direct", EMPTY);
            }
            let others = NodeSelector {
                direct: nodes.direct.clone(),
                pod_namespaces: nodes.pod_namespaces.clone(),
                ..NodeSelector::default()
            };
            if *nodes != others {
                self.add("where.direct", "matches only addresses that belong to no node, so nodes, pools, labels and services in the same rule match nothing; write two rules");
            }
        }
        self.check_each("where.nodes", &nodes.nodes, |text| {
            let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.*".contains(c);
            let other = || format!("\"{text}\" cannot be a node name; names have lower-case letters, digits, '-' and '.', and * matches any of them");
            pattern_fault(text).or_else(|| (!text.chars().all(letter)).then(other))
        });
        self.check_each("where.pools", &nodes.pools, |text| pattern_fault(text));
        self.check_each("where.services", &nodes.services, |text| {
            let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-*".contains(c);
            let other = || format!("\"{text}\" cannot be the name of a service; names have lower-case letters, digits and '-', and * matches any of them");
            pattern_fault(text).or_else(|| (!text.chars().all(letter)).then(other))
        });
        self.check_each("where.pod_namespaces", &nodes.pod_namespaces, |text| {
            namespace_fault(text)
        });
        if nodes.services.0.is_some() && nodes.pod_namespaces.0.is_some() {
            self.add(
                "where.pod_namespaces",
                "matches only pods, so the rule matches none of where.services; write two rules",
            );
        }
        if nodes.labels.0.as_ref().is_some_and(BTreeMap::is_empty) {
            self.add("where.labels", EMPTY);
        }
        for (key, value) in nodes.labels.0.iter().flatten() {
            if let Some(message) = label_fault(key).or_else(|| label_fault(value)) {
                self.add("where.labels", message);
            }
        }
    }

    fn check_service_ports(&mut self, rule: &Rule) {
        let nodes = rule.r#where.0.as_ref();
        let has_services = nodes.is_some_and(|nodes| nodes.services.0.is_some());
        let request = rule.what.0.as_ref();
        if has_services && request.is_some_and(|request| request.ports.0.is_some()) {
            self.add("what.ports", "are ports of the node, so the rule matches none of where.services; a service has only one port, remove this key");
        }
    }

    fn check_request(&mut self, what: &Specified<RequestMatch>) {
        let Some(what) = &what.0 else { return };
        if *what == RequestMatch::default() {
            self.add("what", "is empty; set ports, methods, paths or streams, or remove the key to match everything");
        }
        self.check_each("what.ports", &what.ports, |_| None);
        self.check_each("what.methods", &what.methods, |text| {
            let letter = |b: u8| b.is_ascii_uppercase() || b"-_".contains(&b);
            let is_valid = !text.is_empty() && text.bytes().all(letter);
            (!is_valid).then(|| {
                format!("\"{text}\" is not a valid method; write GET, POST and so on, in capitals")
            })
        });
        self.check_each("what.paths", &what.paths, |text| path_fault(text));
        self.check_each("what.streams", &what.streams, |_| None);
    }
}

const EMPTY: &str = "is empty and would match nothing; list at least one value, or remove the key to match any value";

/// Returns the fault of a pattern, if there is one.
fn pattern_fault(text: &str) -> Option<String> {
    if text.is_empty() {
        return Some("is empty; write a name, or * for any".into());
    }
    if text.trim() != text || text.chars().any(char::is_control) {
        return Some(format!(
            "{text:?} begins or ends with a space, or contains a character that is not allowed in a name"
        ));
    }
    None
}

/// Returns the fault of a label's key or value, if there is one.
pub fn label_fault(text: &str) -> Option<String> {
    let star = || {
        format!("\"{text}\" contains *, which is not a wildcard in a label; write the whole word")
    };
    pattern_fault(text).or_else(|| text.contains('*').then(star))
}

/// Maximum length of the name of a namespace, in bytes (RFC 1123 section 2.1, RFC 1035 section 2.3.4).
const MAX_NAMESPACE: usize = 63;

/// Returns the fault of a pattern of namespaces, if there is one.
pub(crate) fn namespace_fault(text: &str) -> Option<String> {
    let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-*".contains(c);
    let literal_len = text.len() - text.matches('*').count();
    // RFC 1123 labels (Kubernetes' `IsDNS1123Label`); * may match nothing.
    let is_possible = text.chars().all(letter)
        && !text.starts_with('-')
        && !text.ends_with('-')
        && literal_len <= MAX_NAMESPACE;
    let other = || {
        format!(
            "\"{text}\" cannot be the name of a namespace; names have at most {MAX_NAMESPACE} lower-case letters, digits and '-', with '-' neither first nor last, and * matches any of them"
        )
    };
    pattern_fault(text).or_else(|| (!is_possible).then(other))
}

/// Returns the fault of a path, if there is one.
fn path_fault(text: &str) -> Option<String> {
    if canonical(text).as_deref() != Some(text) || text.contains(['*', '?', '#']) {
        return Some(format!(
            "\"{text}\" is not a valid path for a rule; write /metrics, without *, ?, %, ; and dots between slashes: \
             it also matches all paths below it"
        ));
    }
    if text.len() > 1 && text.ends_with('/') {
        return Some(format!(
            "write \"{}\": it matches the path itself and all paths below it",
            text.trim_end_matches('/')
        ));
    }
    None
}

/// Returns the path as every upstream reads it, decoded once; `None` if upstreams may differ.
///
/// Upstreams read paths in many ways: they decode, join `//`, follow `..`, and cut at `;`. A path that an upstream may read as
/// another path has no canonical form. Authorization by path then assumes the worst case. The path that is sent to the upstream
/// is never changed.
pub fn canonical(path: &str) -> Option<Cow<'_, str>> {
    // Some apps decode an encoded slash to a separator, and others treat it as a character.
    let is_encoded_separator = |triple: &[u8]| {
        let [b'%', high, low] = triple else {
            return false;
        };
        matches!(
            (high, low.to_ascii_lowercase()),
            (b'2', b'f') | (b'5', b'c')
        )
    };
    if path.contains('%') && path.as_bytes().windows(3).any(is_encoded_separator) {
        return None;
    }
    let text = percent_decode_str(path).decode_utf8().ok()?;
    let is_ambiguous = |c: char| c.is_control() || matches!(c, '%' | '\\' | ';' | '?' | '#');
    let mut segments = text.strip_prefix('/')?.split('/').peekable();
    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        if matches!(segment, "." | "..")
            || (segment.is_empty() && !last)
            || segment.contains(is_ambiguous)
        {
            return None;
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests;
