//! Compiler from the rules of a file to lookup tables.
//!
//! A rule that does not restrict a property matches every value of it; those rules are stored separately, as `any`. Every key of
//! a file is handled explicitly here, so that none is forgotten.

use super::{
    MatchedRule, Policy,
    index::{self, ExactIndex, Index, Labels, Paths, RemainingRules, RuleBits, RuleSet},
};
use crate::config::policy::{self, Action, Effect, NodeSelector, RequestMatch, Subjects};
use causeway_config::{ConfigError, Validate};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Parts of a rule that are needed after its lookup.
#[derive(Debug)]
pub(super) struct CompiledRule {
    pub(super) effect: Effect,
    pub(super) matched: MatchedRule,
    pub(super) labels: Vec<(String, String)>,
    /// Whether the rule is about some kinds, methods or paths of requests only.
    pub(super) depends_on_request: bool,
    /// Patterns of pools.
    pub(super) pools: Vec<String>,
    /// Patterns of namespaces of pods.
    pub(super) pod_namespaces: Vec<String>,
}

/// Condition on one property: the rules that do not restrict it, and an index of the others.
#[derive(Debug, Default)]
pub(super) struct Condition<I> {
    any: RuleSet,
    /// `None` if no rule restricts the property.
    index: Option<I>,
}

impl<I> Condition<I> {
    /// Whether any rule restricts the property.
    pub(super) fn is_named(&self) -> bool {
        self.index.is_some()
    }

    /// Retains those of the remaining rules that do not restrict the property or that `find` finds.
    pub(super) fn narrow(
        &self,
        remaining: &mut RemainingRules,
        find: impl FnOnce(&I, &mut RuleBits),
    ) {
        let Some(index) = self.index.as_ref().filter(|_| !remaining.is_empty()) else {
            return;
        };
        remaining.retain(|found| {
            found.add(&self.any);
            find(index, found);
        });
    }

    /// Retains those of the remaining rules that `find` finds, and `others`. Rules that do not restrict the property are not retained.
    pub(super) fn narrow_to_named(
        &self,
        remaining: &mut RemainingRules,
        others: &RuleSet,
        find: impl FnOnce(&I, &mut RuleBits),
    ) {
        remaining.retain(|found| {
            found.add(others);
            if let Some(index) = &self.index {
                find(index, found);
            }
        });
    }
}

/// Returns the values that each rule names with the rule's number, and the rules that name none.
fn collect_keys<K>(rules: impl Iterator<Item = Option<Vec<K>>>) -> (Vec<(K, usize)>, Vec<usize>) {
    let (mut keys, mut any) = (Vec::new(), Vec::new());
    for (rule, names) in rules.enumerate() {
        match names {
            Some(names) => keys.extend(names.into_iter().map(|name| (name, rule))),
            None => any.push(rule),
        }
    }
    (keys, any)
}

fn build_condition<I: Index>(
    rules: &[policy::Rule],
    keys_of: impl Fn(&policy::Rule) -> Option<Vec<I::Key>>,
) -> Condition<I> {
    let total = rules.len();
    let (keys, any) = collect_keys(rules.iter().map(keys_of));
    Condition {
        index: (any.len() < total).then(|| I::build(keys, total)),
        any: RuleSet::of(any, total),
    }
}

fn subjects(rule: &policy::Rule) -> Option<&Subjects> {
    rule.who.0.as_ref()
}

fn node_selector(rule: &policy::Rule) -> Option<&NodeSelector> {
    rule.r#where.0.as_ref()
}

fn request_match(rule: &policy::Rule) -> Option<&RequestMatch> {
    rule.what.0.as_ref()
}

/// Returns the first port of each range of ports between which no rule distinguishes.
fn sample_ports(rules: &[policy::Rule]) -> Vec<u16> {
    let ranges = rules.iter().filter_map(request_match);
    let ranges = ranges.flat_map(|what| what.ports.0.iter().flatten());
    let borders = ranges.flat_map(|range| {
        let after = range.0.end().checked_add(1);
        [Some(*range.0.start()), after]
    });
    let samples: BTreeSet<u16> = borders.flatten().chain([1]).collect();
    samples.into_iter().collect()
}

/// Returns a matching name for each pattern of services.
fn sample_services(rules: &[policy::Rule]) -> Vec<String> {
    let nodes = rules.iter().filter_map(node_selector);
    let patterns = nodes.flat_map(|nodes| nodes.services.0.iter().flatten());
    let samples: BTreeSet<_> = patterns.map(|pattern| pattern.replace('*', "x")).collect();
    samples.into_iter().collect()
}

impl Policy {
    /// Compiles the rules of a file.
    ///
    /// # Errors
    /// All faults of the rules, including empty keys, which would otherwise not restrict anything.
    pub fn compile(file: &policy::Policy) -> Result<Self, Vec<ConfigError>> {
        let faults = file.validate();
        if faults.is_empty() {
            Ok(Self::from_rules(&file.rules))
        } else {
            Err(faults)
        }
    }

    fn from_rules(rules: &[policy::Rule]) -> Self {
        let deny_rules = |restricts: fn(&RequestMatch) -> bool| {
            let is_matching_deny = |rule: &policy::Rule| {
                rule.then == Effect::Deny && request_match(rule).is_some_and(restricts)
            };
            let matching = rules
                .iter()
                .enumerate()
                .filter(|(_, rule)| is_matching_deny(rule));
            RuleSet::of(matching.map(|(index, _)| index), rules.len())
        };
        Self {
            rules: rules
                .iter()
                .enumerate()
                .map(|(index, rule)| compile_rule(rule, index))
                .collect(),
            identities: compile_identities(rules),
            networks: compile_networks(rules, |rule| subjects(rule)?.networks.0.as_ref()),
            direct: compile_networks(rules, |rule| node_selector(rule)?.direct.0.as_ref()),
            nodes: build_condition(rules, |rule| node_selector(rule)?.nodes.0.clone()),
            sample_ports: sample_ports(rules),
            sample_services: sample_services(rules),
            pools: build_condition(rules, |rule| node_selector(rule)?.pools.0.clone()),
            labels: compile_labels(rules),
            services: build_condition(rules, |rule| node_selector(rule)?.services.0.clone()),
            pods: build_condition(rules, |rule| node_selector(rule)?.pod_namespaces.0.clone()),
            deny_pods: deny_pods(rules),
            deny_services: deny_services(rules),
            ports: build_condition(rules, |rule| {
                let ports = request_match(rule)?.ports.0.as_ref()?;
                let is_all =
                    |ports: &policy::PortRange| *ports.0.start() <= 1 && *ports.0.end() == u16::MAX;
                // A rule that denies all ports denies the services too.
                if rule.then == Effect::Deny && ports.iter().any(is_all) {
                    return None;
                }
                Some(
                    ports
                        .iter()
                        .flat_map(|ports| {
                            index::prefixes_of_range(*ports.0.start(), *ports.0.end())
                        })
                        .collect(),
                )
            }),
            methods: build_condition(rules, |rule| request_match(rule)?.methods.0.clone()),
            paths: build_condition(rules, |rule| request_match(rule)?.paths.0.clone()),
            actions: compile_actions(rules),
            deny_methods: deny_rules(|what| what.methods.0.is_some()),
            deny_paths: deny_rules(|what| what.paths.0.is_some()),
            deny_paths_lowercase: lowercase_deny_paths(rules),
        }
    }
}

fn deny_services(rules: &[policy::Rule]) -> RuleSet {
    let is_deny = |(_, rule): &(usize, &policy::Rule)| {
        let nodes = node_selector(rule);
        rule.then == Effect::Deny && nodes.is_none_or(|nodes| nodes.services.0.is_none())
    };
    let deny_rules = rules.iter().enumerate().filter(is_deny);
    RuleSet::of(deny_rules.map(|(index, _)| index), rules.len())
}

fn deny_pods(rules: &[policy::Rule]) -> RuleSet {
    let is_deny = |(_, rule): &(usize, &policy::Rule)| {
        let nodes = node_selector(rule);
        rule.then == Effect::Deny && nodes.is_some_and(|nodes| nodes.pod_namespaces.0.is_some())
    };
    let deny_rules = rules.iter().enumerate().filter(is_deny);
    RuleSet::of(deny_rules.map(|(index, _)| index), rules.len())
}

fn lowercase_deny_paths(rules: &[policy::Rule]) -> Paths {
    let paths = |rule| request_match(rule)?.paths.0.as_ref();
    let is_deny = |(_, rule): &(usize, &policy::Rule)| rule.then == Effect::Deny;
    let deny_rules = rules.iter().enumerate().filter(is_deny);
    let named = deny_rules.flat_map(|(index, rule)| {
        let paths = paths(rule).into_iter().flatten();
        paths.map(move |path| (path.to_lowercase(), index))
    });
    Paths::build(named.collect(), rules.len())
}

fn compile_rule(rule: &policy::Rule, index: usize) -> CompiledRule {
    let labels = node_selector(rule).and_then(|nodes| nodes.labels.0.clone());
    let pools = node_selector(rule).and_then(|nodes| nodes.pools.0.clone());
    let pod_namespaces = node_selector(rule).and_then(|nodes| nodes.pod_namespaces.0.clone());
    let depends_on_request = request_match(rule).is_some_and(|what| {
        what.streams.0.is_some() || what.methods.0.is_some() || what.paths.0.is_some()
    });
    CompiledRule {
        effect: rule.then,
        depends_on_request,
        matched: MatchedRule {
            rule: rule.label(index).into(),
            line: rule.line,
        },
        labels: labels.into_iter().flatten().collect(),
        pools: pools.unwrap_or_default(),
        pod_namespaces: pod_namespaces.unwrap_or_default(),
    }
}

/// Compiles the label conditions. A node has all labels of a rule, so one label finds the rule; the rarest label finds the fewest
/// rules that do not match.
fn compile_labels(rules: &[policy::Rule]) -> Condition<Labels> {
    fn rule_labels(rule: &policy::Rule) -> Option<&BTreeMap<String, String>> {
        node_selector(rule)?.labels.0.as_ref()
    }
    let mut counts: HashMap<(&String, &String), usize> = HashMap::new();
    for label in rules.iter().filter_map(rule_labels).flatten() {
        *counts.entry(label).or_default() += 1;
    }
    build_condition(rules, |rule| {
        let rarest = rule_labels(rule)?
            .iter()
            .min_by_key(|label| counts.get(label))?;
        Some(vec![(rarest.0.clone(), rarest.1.clone())])
    })
}

fn compile_actions(rules: &[policy::Rule]) -> Condition<ExactIndex> {
    build_condition(rules, |rule| {
        let actions = request_match(rule)?.streams.0.as_ref()?.iter();
        Some(
            actions
                .copied()
                .map(Action::word)
                .map(str::to_owned)
                .collect(),
        )
    })
}

/// Compiles the identity conditions. A rule that names users, groups or SPIFFE ids is found by each of them; a rule that names
/// none of the three is found by every client.
fn compile_identities(
    rules: &[policy::Rule],
) -> Condition<(index::Patterns, index::Patterns, index::Patterns)> {
    let total = rules.len();
    let names_any =
        |who: &Subjects| who.users.0.is_some() || who.groups.0.is_some() || who.spiffe.0.is_some();
    let build_index = |names: fn(&Subjects) -> Option<Vec<String>>| {
        let (keys, _) = collect_keys(rules.iter().map(|rule| subjects(rule).and_then(names)));
        index::Patterns::build(keys, total)
    };
    let any: Vec<usize> = (0..total)
        .filter(|rule| subjects(&rules[*rule]).is_none_or(|who| !names_any(who)))
        .collect();
    Condition {
        index: (any.len() < total).then(|| {
            (
                build_index(|who| who.users.0.clone()),
                build_index(|who| who.groups.0.clone()),
                build_index(|who| who.spiffe.0.clone()),
            )
        }),
        any: RuleSet::of(any, total),
    }
}

fn compile_networks(
    rules: &[policy::Rule],
    networks_of: impl Fn(&policy::Rule) -> Option<&policy::SourceNetworks>,
) -> Condition<(index::Prefixes<32>, index::Prefixes<128>)> {
    let total = rules.len();
    let network_keys = |rule| {
        Some(
            networks_of(rule)?
                .0
                .iter()
                .map(index::network_prefix)
                .collect(),
        )
    };
    let (keys, any) = collect_keys::<(bool, (u32, u128))>(rules.iter().map(network_keys));
    let keys_of_family = |is_ipv4: bool| {
        let matching = keys.iter().filter(|((is_four, _), _)| *is_four == is_ipv4);
        matching.map(|((_, key), rule)| (*key, *rule)).collect()
    };
    Condition {
        index: (any.len() < total).then(|| {
            (
                Index::build(keys_of_family(true), total),
                Index::build(keys_of_family(false), total),
            )
        }),
        any: RuleSet::of(any, total),
    }
}
