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
    pub known: bool,
    /// The client's address; a unix socket has no address.
    pub from: Option<IpAddr>,
    /// The node; `None` for a target that is at no edge.
    pub node: Option<&'a NodeName>,
    /// The address that the gateway dials itself, if there is no node.
    pub direct: Option<IpAddr>,
    /// Its confirmed pool.
    pub pool: Option<&'a str>,
    /// Its confirmed labels.
    pub labels: &'a BTreeMap<String, String>,
    /// The port.
    pub port: u16,
    /// The kind of stream.
    pub act: Action,
    /// The method.
    pub method: &'a str,
    /// The path as it will be sent, without the query.
    pub path: &'a str,
}

impl PolicyInput<'_> {
    /// Returns the path as every upstream reads it; a session's is not known.
    fn path(&self) -> Option<Cow<'_, str>> {
        match self.act {
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
    pub by: Option<MatchedRule>,
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
    who: Condition<(Patterns, Patterns, Patterns)>,
    networks: Condition<(Prefixes<32>, Prefixes<128>)>,
    nodes: Condition<Patterns>,
    direct: Condition<(Prefixes<32>, Prefixes<128>)>,
    pools: Condition<Patterns>,
    /// By the rarest of each rule's labels.
    labels: Condition<Labels>,
    ports: Condition<Prefixes<16>>,
    methods: Condition<ExactIndex>,
    paths: Condition<Paths>,
    acts: Condition<ExactIndex>,
    /// Rules that deny some methods, and some paths.
    deny_methods: RuleSet,
    deny_paths: RuleSet,
    /// The latter by their paths in small letters.
    deny_folded: Paths,
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
    pub fn reads_nodes(&self) -> bool {
        self.reads_pools() || self.labels.is_named()
    }

    /// Whether any rule depends on the pool of a node.
    pub fn reads_pools(&self) -> bool {
        self.pools.is_named()
    }

    /// Returns the rules that depend on labels of a node, each with all that a node needs to have.
    pub fn by_labels(&self) -> impl Iterator<Item = (&MatchedRule, &[(String, String)])> {
        let all = self.rules.iter();
        let labelled = all.filter(|rule| !rule.labels.is_empty());
        labelled.map(|rule| (&rule.matched, &*rule.labels))
    }

    /// Returns a pool for each pattern of pools that a rule names.
    pub fn pools(&self) -> impl Iterator<Item = String> {
        let patterns = self.rules.iter().flat_map(|rule| &rule.pools);
        patterns.map(|pattern| pattern.replace('*', "x"))
    }

    /// Decides.
    pub fn decide(&self, asked: &PolicyInput<'_>) -> Decision {
        let mut left = index::RemainingRules::all(self.rules.len());
        self.narrow_who(asked, &mut left);
        self.nodes.narrow(&mut left, |nodes, into| {
            if let Some(node) = asked.node {
                nodes.find(node.as_str(), into);
            }
        });
        self.direct.narrow(&mut left, |direct, into| {
            find_address(direct, asked.direct, into);
        });
        self.pools.narrow(&mut left, |pools, into| {
            if let Some(pool) = asked.pool {
                pools.find(pool, into);
            }
        });
        self.labels
            .narrow(&mut left, |labels, into| labels.find(asked.labels, into));
        self.ports
            .narrow(&mut left, |ports, into| ports.find(asked.port.into(), into));
        self.acts
            .narrow(&mut left, |acts, into| acts.find(asked.act.word(), into));
        self.methods.narrow(&mut left, |methods, into| {
            methods.find(asked.method, into);
            // Some apps read `post` as POST.
            let odd = asked.method.bytes().any(|b| b.is_ascii_lowercase());
            if odd || asked.act == Action::Connect {
                into.add(&self.deny_methods);
            }
        });
        self.paths
            .narrow(&mut left, |paths, into| match asked.path() {
                Some(path) => {
                    paths.find(&path, into);
                    // Some apps read `/ADMIN` as `/admin`.
                    self.deny_folded.find_folded(&path, into);
                }
                None => into.add(&self.deny_paths),
            });
        let first = left.iter().map(|index| &self.rules[index]).find(|rule| {
            rule.labels
                .iter()
                .all(|(key, value)| asked.labels.get(key) == Some(value))
        });
        Decision {
            allow: first.is_some_and(|rule| rule.then == Effect::Allow),
            by: first.map(|rule| rule.matched.clone()),
        }
    }

    fn narrow_who(&self, asked: &PolicyInput<'_>, left: &mut index::RemainingRules) {
        self.who.narrow(left, |(users, groups, spiffe), into| {
            if !asked.known {
                // Only if written explicitly: `*` matches every authenticated client.
                users.find_word(ANONYMOUS, into);
                return groups.find_word(UNAUTHENTICATED, into);
            }
            users.find(asked.user, into);
            groups.find_word(AUTHENTICATED, into);
            // A client's own claim that it is authenticated or anonymous is ignored.
            let said = asked.groups.iter().map(String::as_str);
            for group in said.filter(|group| ![AUTHENTICATED, UNAUTHENTICATED].contains(group)) {
                groups.find(group, into);
            }
            for uri in asked.uris {
                spiffe.find(uri, into);
            }
        });
        self.networks.narrow(left, |networks, into| {
            find_address(networks, asked.from, into);
        });
    }
}

fn find_address(
    (four, six): &(Prefixes<32>, Prefixes<128>),
    address: Option<IpAddr>,
    into: &mut index::RuleBits,
) {
    match address.map(|ip| ip.to_canonical()) {
        Some(IpAddr::V4(ip)) => four.find(ip.to_bits().into(), into),
        Some(IpAddr::V6(ip)) => six.find(ip.to_bits(), into),
        None => {}
    }
}

/// Read access to the policy: a cheap clone that never waits.
#[derive(Clone, Debug, Default)]
pub struct PolicyReader(Arc<Current>);

#[derive(Debug, Default)]
struct Current {
    policy: ArcSwapOption<Policy>,
    replaced: AtomicU64,
}

impl PolicyReader {
    /// Decides by the rules that hold now; where there are none, everything is allowed.
    pub fn decide(&self, asked: &PolicyInput<'_>) -> Decision {
        match self.0.policy.load().as_ref() {
            Some(rules) => rules.decide(asked),
            None => Decision {
                allow: true,
                by: None,
            },
        }
    }

    /// Whether any rule depends on the pool or the labels of a node.
    pub fn reads_nodes(&self) -> bool {
        self.0
            .policy
            .load()
            .as_ref()
            .is_some_and(|rules| rules.reads_nodes())
    }

    /// Returns the rules that hold now, if there are any.
    pub fn rules(&self) -> Option<Arc<Policy>> {
        self.0.policy.load_full()
    }

    /// Whether there are no rules.
    pub fn is_open(&self) -> bool {
        self.0.policy.load().is_none()
    }

    /// Returns how often the rules were replaced.
    pub fn replaced(&self) -> u64 {
        self.0.replaced.load(Acquire)
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
            replaced: AtomicU64::new(0),
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
        rules.replaced.fetch_add(1, Release);
    }
}

#[cfg(test)]
mod tests;
