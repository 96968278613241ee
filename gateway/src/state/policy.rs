//! Access policy: compiled rules of which clients may do what on which node. The first rule that matches decides.
//!
//! 1. Each rule is a bit. For each property that rules match (client, network, node, pool, port, method, path, kind of stream) an
//!    index returns the rules that name a value.
//! 2. A stream's values are looked up one after the other, and each narrows the remaining rules: 10,000 rules are 157 words, so
//!    their number hardly counts.
//! 3. The lowest bit that remains is the first rule that matches. Without one, nothing is allowed.
//!
//! An unknown value counts as the worst one: a TCP session may carry any method and path, and a path that upstreams read in two
//! ways may be any. It matches no rule that allows some of them, and each that denies some. A denied path is denied in small and
//! capital letters.

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
    /// The client's name; an anonymous client's is ignored.
    pub user: &'a str,
    /// The client's groups.
    pub groups: &'a [String],
    /// The URIs in the client's certificate.
    pub uris: &'a [String],
    /// Whether the client is identified.
    pub is_authenticated: bool,
    /// The client's address; a unix socket has no address.
    pub client_address: Option<IpAddr>,
    /// The node; `None` for a target that is at no edge.
    pub node: Option<&'a NodeName>,
    /// The address that the gateway dials itself, if there is no node.
    pub direct_address: Option<IpAddr>,
    /// Its confirmed pool.
    pub pool: Option<&'a str>,
    /// Its confirmed labels.
    pub labels: &'a BTreeMap<String, String>,
    /// The port.
    pub port: u16,
    /// The kind of stream.
    pub action: Action,
    /// The method.
    pub method: &'a str,
    /// The path as it will be sent, without the query.
    pub path: &'a str,
}

impl PolicyInput<'_> {
    /// Returns the path as every upstream reads it; a session's is not known.
    fn path(&self) -> Option<Cow<'_, str>> {
        match self.action {
            Action::Connect => None,
            Action::Request | Action::Upgrade => canonical(self.path),
        }
    }
}

/// Decision of the policy, with the rule that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Whether the access is allowed.
    pub allow: bool,
    /// The rule that matched, or `None` if none did.
    pub matched: Option<MatchedRule>,
}

/// A rule that matched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchedRule {
    /// Its name, or its place.
    pub rule: Arc<str>,
    /// The line of the policy file that it begins in, from 1.
    pub line: usize,
}

/// Compiled rules.
#[derive(Debug, Default)]
pub struct Policy {
    rules: Vec<CompiledRule>,
    /// By user, group and SPIFFE id: one of them is enough.
    identities: Condition<(Patterns, Patterns, Patterns)>,
    networks: Condition<(Prefixes<32>, Prefixes<128>)>,
    nodes: Condition<Patterns>,
    direct: Condition<(Prefixes<32>, Prefixes<128>)>,
    pools: Condition<Patterns>,
    /// By the rarest of each rule's labels.
    labels: Condition<Labels>,
    ports: Condition<Prefixes<16>>,
    methods: Condition<ExactIndex>,
    paths: Condition<Paths>,
    actions: Condition<ExactIndex>,
    /// Rules that deny some methods, and some paths.
    deny_methods: RuleSet,
    deny_paths: RuleSet,
    /// The latter by their paths in small letters.
    deny_paths_lowercase: Paths,
}

impl Policy {
    /// How many rules there are.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there is none, so that nothing is allowed.
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

    /// Returns the rules that depend on labels of a node, each with all that a node needs to have.
    pub fn rules_by_labels(&self) -> impl Iterator<Item = (&MatchedRule, &[(String, String)])> {
        let all = self.rules.iter();
        let labelled = all.filter(|rule| !rule.labels.is_empty());
        labelled.map(|rule| (&rule.matched, &*rule.labels))
    }

    /// Returns a pool for each pattern of pools that a rule names.
    pub fn sample_pools(&self) -> impl Iterator<Item = String> {
        let patterns = self.rules.iter().flat_map(|rule| &rule.pools);
        patterns.map(|pattern| pattern.replace('*', "x"))
    }

    /// Decides.
    pub fn decide(&self, input: &PolicyInput<'_>) -> Decision {
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
        self.ports.narrow(&mut remaining, |ports, into| {
            ports.find(input.port.into(), into);
        });
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
        let matched = remaining
            .iter()
            .map(|index| &self.rules[index])
            .find(|rule| {
                rule.labels
                    .iter()
                    .all(|(key, value)| input.labels.get(key) == Some(value))
            });
        Decision {
            allow: matched.is_some_and(|rule| rule.effect == Effect::Allow),
            matched: matched.map(|rule| rule.matched.clone()),
        }
    }

    fn narrow_by_identity(&self, input: &PolicyInput<'_>, remaining: &mut index::RemainingRules) {
        self.identities
            .narrow(remaining, |(users, groups, spiffe), into| {
                if !input.is_authenticated {
                    // Only if written explicitly: `*` matches every authenticated client.
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

/// Read access to the policy: a cheap clone that never waits.
#[derive(Clone, Debug, Default)]
pub struct PolicyReader(Arc<Current>);

#[derive(Debug, Default)]
struct Current {
    policy: ArcSwapOption<Policy>,
    generation: AtomicU64,
}

impl PolicyReader {
    /// Decides by the rules that hold now; where there are none, everything is allowed.
    pub fn decide(&self, input: &PolicyInput<'_>) -> Decision {
        match self.0.policy.load().as_ref() {
            Some(rules) => rules.decide(input),
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

    /// Returns the rules that hold now, if there are any.
    pub fn rules(&self) -> Option<Arc<Policy>> {
        self.0.policy.load_full()
    }

    /// Whether there are no rules.
    pub fn allows_all(&self) -> bool {
        self.0.policy.load().is_none()
    }

    /// Returns how often the rules were replaced.
    pub fn generation(&self) -> u64 {
        self.0.generation.load(Acquire)
    }
}

/// The writing side.
#[derive(Debug)]
pub struct PolicyWriter(PolicyReader);

impl PolicyWriter {
    /// With these rules to begin with; without any, everything is allowed.
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

    /// Replaces the rules, for every stream that begins from now on, and soon for those that are open.
    pub fn replace(&self, policy: Option<Policy>) {
        let rules = &self.0.0;
        rules.policy.store(policy.map(Arc::new));
        rules.generation.fetch_add(1, Release);
    }
}

#[cfg(test)]
mod tests;
