//! Access policy: compiled rules that allow or deny requests of clients to nodes. The first rule that matches decides.
//!
//! 1. Each rule is a bit. For each property that rules match (client, network, node, pool, port, method, path, kind of stream) an
//!    index returns the rules that name a value.
//! 2. A stream's values are looked up one after the other, and each narrows the remaining rules. 10,000 rules are 157 words, so
//!    their number has little influence on the time.
//! 3. The lowest bit that remains is the first rule that matches. Without one, nothing is allowed.
//!
//! An unknown value counts as the worst case. A TCP session may carry any method and path, and a path that upstreams read in
//! two ways may be any path. Which of several pods has an address may be unknown. Such a value matches no rule that allows only
//! some values, and every rule that denies some. A denied path is denied in lower and upper case. The same holds for services
//! of a node, which a rule may not have thought of: only a rule that names services allows them, and a rule that denies the
//! whole node denies them.

mod compile;
mod index;

use crate::config::policy::{Action, Effect, canonical};
use arc_swap::ArcSwapOption;
use causeway_certs::NodeName;
use compile::{CompiledRule, Condition};
use index::{ExactIndex, Labels, Paths, Patterns, Prefixes, RuleSet};
use std::{
    borrow::Cow,
    collections::BTreeMap,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Release},
        },
    },
};

/// Group of all authenticated clients (Kubernetes' `user.AllAuthenticated`).
pub const AUTHENTICATED: &str = "system:authenticated";
/// Group of all other clients (Kubernetes' `user.AllUnauthenticated`).
pub const UNAUTHENTICATED: &str = "system:unauthenticated";
/// Name of all other clients (Kubernetes' `user.Anonymous`).
pub const ANONYMOUS: &str = "system:anonymous";

/// Input of a policy decision.
#[derive(Clone, Copy, Debug)]
pub struct PolicyInput<'a> {
    /// Name of the client; ignored for an anonymous client.
    pub user: &'a str,
    /// Groups of the client.
    pub groups: &'a [String],
    /// URIs in the client's certificate.
    pub uris: &'a [String],
    /// Whether the client is identified.
    pub is_authenticated: bool,
    /// Address of the client; a unix socket has no address.
    pub client_address: Option<IpAddr>,
    /// Node; `None` for a target that no edge serves.
    pub node: Option<&'a NodeName>,
    /// Address that the gateway dials itself, if there is no node.
    pub direct_address: Option<IpAddr>,
    /// Confirmed pool of the node.
    pub pool: Option<&'a str>,
    /// Confirmed labels of the node.
    pub labels: &'a BTreeMap<String, String>,
    /// Service of the node, if the stream goes to one.
    pub service: Option<&'a str>,
    /// Pod to which the stream goes.
    pub pod: PodInput<'a>,
    /// Port of the node or address; `None` for a service.
    pub port: Option<u16>,
    /// The kind of stream.
    pub action: Action,
    /// The method.
    pub method: &'a str,
    /// The path as it is sent upstream, without the query.
    pub path: &'a str,
}

impl PolicyInput<'_> {
    /// Returns the canonical path; `None` for a session, whose paths are unknown, or if upstreams may read the path differently.
    fn path(&self) -> Option<Cow<'_, str>> {
        match self.action {
            Action::Connect => None,
            Action::Request | Action::Upgrade => canonical(self.path),
        }
    }
}

/// Pod to which a stream goes, as far as rules depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodInput<'a> {
    /// The stream does not go to a pod that a Pod object names.
    #[default]
    None,
    /// A pod in this namespace.
    Namespace(&'a str),
    /// A pod, but it is not known which one.
    Unknown,
}

/// Decision of the policy, with the rule that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Whether the access is allowed.
    pub allow: bool,
    /// The rule that matched, or `None` if none did.
    pub matched: Option<MatchedRule>,
}

/// Rule that matched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchedRule {
    /// Name of the rule, or its position.
    pub rule: Arc<str>,
    /// Line of the policy file in which the rule begins, from 1; 0 for a rule of `egress`, which has no line.
    pub line: usize,
}

/// Compiled rules.
#[derive(Debug, Default)]
pub struct Policy {
    rules: Vec<CompiledRule>,
    /// Conditions on user, group and SPIFFE id, of which one has to match.
    identities: Condition<(Patterns, Patterns, Patterns)>,
    networks: Condition<(Prefixes<32>, Prefixes<128>)>,
    nodes: Condition<Patterns>,
    direct: Condition<(Prefixes<32>, Prefixes<128>)>,
    pools: Condition<Patterns>,
    /// Conditions on labels, by the rarest label of each rule.
    labels: Condition<Labels>,
    services: Condition<Patterns>,
    /// Conditions on namespaces of pods.
    pods: Condition<Patterns>,
    /// Rules that deny some pods.
    deny_pods: RuleSet,
    /// Rules that deny services although they name none.
    deny_services: RuleSet,
    ports: Condition<Prefixes<16>>,
    /// First port of each range of ports between which no rule distinguishes.
    sample_ports: Vec<u16>,
    /// A name for each pattern of services of a rule.
    sample_services: Vec<String>,
    methods: Condition<ExactIndex>,
    paths: Condition<Paths>,
    actions: Condition<ExactIndex>,
    /// Rules that deny some methods or paths.
    deny_methods: RuleSet,
    deny_paths: RuleSet,
    /// Rules that deny some paths, by the paths in lower case.
    deny_paths_lowercase: Paths,
}

impl Policy {
    /// Returns the number of rules.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there are no rules, so that nothing is allowed.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Whether any rule depends on the pool or the labels of a node.
    pub fn depends_on_nodes(&self) -> bool {
        self.depends_on_pools() || self.labels.is_named()
    }

    /// Whether any rule depends on the pool of a node.
    pub fn depends_on_pools(&self) -> bool {
        self.pools.is_named()
    }

    /// Whether any rule depends on the pod to which a stream goes.
    pub fn depends_on_pods(&self) -> bool {
        self.pods.is_named()
    }

    /// Returns a matching namespace for each pattern of namespaces of a rule.
    pub fn sample_pod_namespaces(&self) -> impl Iterator<Item = String> {
        let patterns = self.rules.iter().flat_map(|rule| &rule.pod_namespaces);
        patterns.map(|pattern| pattern.replace('*', "x"))
    }

    /// Returns the first rule that depends on the pod to which a stream goes.
    pub fn first_rule_of_pods(&self) -> Option<&MatchedRule> {
        let mut rules = self.rules.iter();
        rules
            .find(|rule| !rule.pod_namespaces.is_empty())
            .map(|rule| &rule.matched)
    }

    /// Returns the rules that depend on labels of a node, each with all labels that a node must have.
    pub fn rules_by_labels(&self) -> impl Iterator<Item = (&MatchedRule, &[(String, String)])> {
        let all = self.rules.iter();
        let labelled = all.filter(|rule| !rule.labels.is_empty());
        labelled.map(|rule| (&rule.matched, &*rule.labels))
    }

    /// Returns a matching pool for each pool pattern of a rule.
    pub fn sample_pools(&self) -> impl Iterator<Item = String> {
        let patterns = self.rules.iter().flat_map(|rule| &rule.pools);
        patterns.map(|pattern| pattern.replace('*', "x"))
    }

    /// Returns a matching name for each pattern of services of a rule. A rule before it may treat this name differently from
    /// other names that match: if it denies `*x`, the sample of `cam*` is denied.
    pub fn sample_services(&self) -> &[String] {
        &self.sample_services
    }

    /// Returns ports such that each other port is treated like one of them.
    pub fn sample_ports(&self) -> &[u16] {
        &self.sample_ports
    }

    /// Returns the decision of the first rule that matches.
    pub fn decide(&self, input: &PolicyInput<'_>) -> Decision {
        let mut remaining = self.rules_for_destination(input);
        self.actions.narrow(&mut remaining, |acts, into| {
            acts.find(input.action.word(), into);
        });
        self.methods.narrow(&mut remaining, |methods, into| {
            methods.find(input.method, into);
            // Some apps read `post` as POST.
            let has_lowercase = input.method.bytes().any(|b| b.is_ascii_lowercase());
            if has_lowercase || input.action == Action::Connect {
                into.add(&self.deny_methods);
            }
        });
        self.paths
            .narrow(&mut remaining, |paths, into| match input.path() {
                Some(path) => {
                    paths.find(&path, into);
                    // Some apps read `/ADMIN` as `/admin`.
                    self.deny_paths_lowercase.find_folded(&path, into);
                }
                None => into.add(&self.deny_paths),
            });
        self.first_match(&remaining, input, |_| true)
    }

    /// Returns the decision about the destination itself: whether a rule allows some request to it, whatever its kind, method and
    /// path. A rule that denies only some requests does not count.
    pub fn decide_destination(&self, input: &PolicyInput<'_>) -> Decision {
        let remaining = self.rules_for_destination(input);
        self.first_match(&remaining, input, |rule| {
            rule.effect == Effect::Allow || !rule.depends_on_request
        })
    }

    /// Returns the decision of the first of the remaining rules whose labels match and that `counts` accepts.
    fn first_match(
        &self,
        remaining: &index::RemainingRules,
        input: &PolicyInput<'_>,
        counts: impl Fn(&CompiledRule) -> bool,
    ) -> Decision {
        let has_labels = |rule: &CompiledRule| {
            let mut labels = rule.labels.iter();
            labels.all(|(key, value)| input.labels.get(key) == Some(value))
        };
        let mut rules = remaining.iter().map(|index| &self.rules[index]);
        let matched = rules.find(|rule| counts(rule) && has_labels(rule));
        Decision {
            allow: matched.is_some_and(|rule| rule.effect == Effect::Allow),
            matched: matched.map(|rule| rule.matched.clone()),
        }
    }

    /// Returns the rules about this client and this destination, whatever the request. Only one of the labels is checked.
    fn rules_for_destination(&self, input: &PolicyInput<'_>) -> index::RemainingRules {
        let mut remaining = index::RemainingRules::all(self.rules.len());
        self.narrow_by_identity(input, &mut remaining);
        self.nodes.narrow(&mut remaining, |nodes, into| {
            if let Some(node) = input.node {
                nodes.find(node.as_str(), into);
            }
        });
        self.direct.narrow(&mut remaining, |direct, into| {
            find_address(direct, input.direct_address, into);
        });
        self.pools.narrow(&mut remaining, |pools, into| {
            if let Some(pool) = input.pool {
                pools.find(pool, into);
            }
        });
        self.labels.narrow(&mut remaining, |labels, into| {
            labels.find(input.labels, into);
        });
        self.narrow_by_service(input, &mut remaining);
        self.narrow_by_pod(input, &mut remaining);
        self.ports.narrow(&mut remaining, |ports, into| {
            if let Some(port) = input.port {
                ports.find(port.into(), into);
            }
        });
        remaining
    }

    fn narrow_by_identity(&self, input: &PolicyInput<'_>, remaining: &mut index::RemainingRules) {
        self.identities
            .narrow(remaining, |(users, groups, spiffe), into| {
                if !input.is_authenticated {
                    // An anonymous client matches only an explicit name: `*` matches every authenticated client.
                    users.find_exact(ANONYMOUS, into);
                    return groups.find_exact(UNAUTHENTICATED, into);
                }
                users.find(input.user, into);
                groups.find_exact(AUTHENTICATED, into);
                // A client's own claim that it is authenticated or anonymous is ignored.
                let claimed_groups = input.groups.iter().map(String::as_str);
                for group in
                    claimed_groups.filter(|group| ![AUTHENTICATED, UNAUTHENTICATED].contains(group))
                {
                    groups.find(group, into);
                }
                for uri in input.uris {
                    spiffe.find(uri, into);
                }
            });
        self.networks.narrow(remaining, |networks, into| {
            find_address(networks, input.client_address, into);
        });
    }

    fn narrow_by_service(&self, input: &PolicyInput<'_>, remaining: &mut index::RemainingRules) {
        match input.service {
            Some(service) => {
                let find = |services: &Patterns, into: &mut _| services.find(service, into);
                self.services
                    .narrow_to_named(remaining, &self.deny_services, find);
            }
            None => self.services.narrow(remaining, |_, _| {}),
        }
    }

    fn narrow_by_pod(&self, input: &PolicyInput<'_>, remaining: &mut index::RemainingRules) {
        self.pods
            .narrow(remaining, |namespaces, into| match input.pod {
                PodInput::Namespace(namespace) => namespaces.find(namespace, into),
                PodInput::Unknown => into.add(&self.deny_pods),
                PodInput::None => {}
            });
    }
}

fn find_address(
    (ipv4, ipv6): &(Prefixes<32>, Prefixes<128>),
    address: Option<IpAddr>,
    into: &mut index::RuleBits,
) {
    match address.map(|ip| ip.to_canonical()) {
        Some(IpAddr::V4(ip)) => ipv4.find(ip.to_bits().into(), into),
        Some(IpAddr::V6(ip)) => ipv6.find(ip.to_bits(), into),
        None => {}
    }
}

/// Read access to the policy. Cheap to clone; reads never wait.
#[derive(Clone, Debug, Default)]
pub struct PolicyReader(Arc<Current>);

#[derive(Debug, Default)]
struct Current {
    policy: ArcSwapOption<Policy>,
    generation: AtomicU64,
}

impl PolicyReader {
    /// Decides by the current rules. Without rules, everything is allowed.
    pub fn decide(&self, input: &PolicyInput<'_>) -> Decision {
        self.decide_by(|rules| rules.decide(input))
    }

    /// Decides about the destination itself, as [`Policy::decide_destination`]. Without rules, everything is allowed.
    pub fn decide_destination(&self, input: &PolicyInput<'_>) -> Decision {
        self.decide_by(|rules| rules.decide_destination(input))
    }

    fn decide_by(&self, decide: impl FnOnce(&Policy) -> Decision) -> Decision {
        match self.0.policy.load().as_ref() {
            Some(rules) => decide(rules),
            None => Decision {
                allow: true,
                matched: None,
            },
        }
    }

    /// Whether any rule depends on the pool or the labels of a node.
    pub fn depends_on_nodes(&self) -> bool {
        self.0
            .policy
            .load()
            .as_ref()
            .is_some_and(|rules| rules.depends_on_nodes())
    }

    /// Whether any rule depends on the pod to which a stream goes.
    pub fn depends_on_pods(&self) -> bool {
        let rules = self.0.policy.load();
        rules.as_ref().is_some_and(|rules| rules.depends_on_pods())
    }

    /// Returns the current rules, if there are any.
    pub fn rules(&self) -> Option<Arc<Policy>> {
        self.0.policy.load_full()
    }

    /// Whether there are no rules.
    pub fn allows_all(&self) -> bool {
        self.0.policy.load().is_none()
    }

    /// Returns the number of times that the rules were replaced.
    pub fn generation(&self) -> u64 {
        self.0.generation.load(Acquire)
    }
}

/// Write access to the policy.
#[derive(Debug)]
pub struct PolicyWriter(PolicyReader);

impl PolicyWriter {
    /// Returns a writer with these rules. Without rules, everything is allowed.
    pub fn new(policy: Option<Policy>) -> Self {
        Self(PolicyReader(Arc::new(Current {
            policy: ArcSwapOption::from_pointee(policy),
            generation: AtomicU64::new(0),
        })))
    }

    /// Returns read access to the policy.
    pub fn reader(&self) -> PolicyReader {
        self.0.clone()
    }

    /// Replaces the rules, for every new stream at once, and for open streams soon.
    pub fn replace(&self, policy: Option<Policy>) {
        let rules = &self.0.0;
        rules.policy.store(policy.map(Arc::new));
        rules.generation.fetch_add(1, Release);
    }
}

#[cfg(test)]
mod tests;
