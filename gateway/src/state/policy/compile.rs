//! Compiler from the rules of a file to the tables that find them.
//!
//! A rule that does not restrict a property is found for every value of it: those rules are stored separately, as `any`. Every
//! key of a file has its line here, so that none is forgotten.

use super::{
    MatchedRule, Policy,
    index::{self, ExactIndex, Index, Labels, Paths, RemainingRules, RuleBits, RuleSet},
};
use crate::config::policy::{self, Action, Effect, NodeSelector, RequestMatch, Subjects};
use causeway_config::{ConfigError, Validate};
use std::collections::{BTreeMap, HashMap};

/// Parts of a rule that are needed after it was found.
#[derive(Debug)]
pub(super) struct CompiledRule {
    pub(super) then: Effect,
    pub(super) matched: MatchedRule,
    pub(super) labels: Vec<(String, String)>,
    /// Patterns of pools.
    pub(super) pools: Vec<String>,
}

/// One thing that rules speak of: those that do not, and an index of the others.
#[derive(Debug, Default)]
pub(super) struct Condition<I> {
    any: RuleSet,
    /// `None` where no rule speaks of it.
    index: Option<I>,
}

impl<I> Condition<I> {
    /// Whether any rule speaks of it.
    pub(super) fn is_named(&self) -> bool {
        self.index.is_some()
    }

    /// Retains, of the remaining rules, those that do not match on it and those that `find` finds.
    pub(super) fn narrow(&self, left: &mut RemainingRules, find: impl FnOnce(&I, &mut RuleBits)) {
        let Some(index) = self.index.as_ref().filter(|_| !left.is_empty()) else {
            return;
        };
        left.narrow(|found| {
            found.add(&self.any);
            find(index, found);
        });
    }
}

/// Returns the values that each rule names, with the rule's number, and the rules that name none.
fn named<K>(rules: impl Iterator<Item = Option<Vec<K>>>) -> (Vec<(K, usize)>, Vec<usize>) {
    let (mut keys, mut any) = (Vec::new(), Vec::new());
    for (rule, names) in rules.enumerate() {
        match names {
            Some(names) => keys.extend(names.into_iter().map(|name| (name, rule))),
            None => any.push(rule),
        }
    }
    (keys, any)
}

fn table<I: Index>(
    rules: &[policy::Rule],
    names: impl Fn(&policy::Rule) -> Option<Vec<I::Key>>,
) -> Condition<I> {
    let total = rules.len();
    let (keys, any) = named(rules.iter().map(names));
    Condition {
        index: (any.len() < total).then(|| I::of(keys, total)),
        any: RuleSet::of(any, total),
    }
}

fn who(rule: &policy::Rule) -> Option<&Subjects> {
    rule.who.0.as_ref()
}

fn nodes(rule: &policy::Rule) -> Option<&NodeSelector> {
    rule.r#where.0.as_ref()
}

fn what(rule: &policy::Rule) -> Option<&RequestMatch> {
    rule.what.0.as_ref()
}

impl Policy {
    /// Compiles the rules of a file.
    ///
    /// # Errors
    /// All that is wrong with them: a key that is there and empty would otherwise narrow nothing.
    pub fn compile(file: &policy::Policy) -> Result<Self, Vec<ConfigError>> {
        let faults = file.validate();
        if faults.is_empty() {
            Ok(Self::of(&file.rules))
        } else {
            Err(faults)
        }
    }

    fn of(rules: &[policy::Rule]) -> Self {
        let denies = |narrows: fn(&RequestMatch) -> bool| {
            let denies =
                |rule: &policy::Rule| rule.then == Effect::Deny && what(rule).is_some_and(narrows);
            let found = rules.iter().enumerate().filter(|(_, rule)| denies(rule));
            RuleSet::of(found.map(|(index, _)| index), rules.len())
        };
        Self {
            rules: rules
                .iter()
                .enumerate()
                .map(|(index, rule)| compiled(rule, index))
                .collect(),
            who: identities(rules),
            networks: networks(rules, |rule| who(rule)?.networks.0.as_ref()),
            direct: networks(rules, |rule| nodes(rule)?.direct.0.as_ref()),
            nodes: table(rules, |rule| nodes(rule)?.nodes.0.clone()),
            pools: table(rules, |rule| nodes(rule)?.pools.0.clone()),
            labels: labels(rules),
            ports: table(rules, |rule| {
                let ports = what(rule)?.ports.0.as_ref()?.iter();
                Some(
                    ports
                        .flat_map(|ports| index::range(*ports.0.start(), *ports.0.end()))
                        .collect(),
                )
            }),
            methods: table(rules, |rule| what(rule)?.methods.0.clone()),
            paths: table(rules, |rule| what(rule)?.paths.0.clone()),
            acts: acts(rules),
            deny_methods: denies(|what| what.methods.0.is_some()),
            deny_paths: denies(|what| what.paths.0.is_some()),
            deny_folded: folded(rules),
        }
    }
}

fn folded(rules: &[policy::Rule]) -> Paths {
    let paths = |rule| what(rule)?.paths.0.as_ref();
    let denies = |(_, rule): &(usize, &policy::Rule)| rule.then == Effect::Deny;
    let of = rules.iter().enumerate().filter(denies);
    let named = of.flat_map(|(index, rule)| {
        let paths = paths(rule).into_iter().flatten();
        paths.map(move |path| (path.to_lowercase(), index))
    });
    Paths::of(named.collect(), rules.len())
}

fn compiled(rule: &policy::Rule, index: usize) -> CompiledRule {
    let labels = nodes(rule).and_then(|nodes| nodes.labels.0.clone());
    let pools = nodes(rule).and_then(|nodes| nodes.pools.0.clone());
    CompiledRule {
        then: rule.then,
        matched: MatchedRule {
            rule: rule.called(index).into(),
            line: rule.line,
        },
        labels: labels.into_iter().flatten().collect(),
        pools: pools.unwrap_or_default(),
    }
}

/// A node has all labels of a rule, so one finds it; the rarest finds the fewest in vain.
fn labels(rules: &[policy::Rule]) -> Condition<Labels> {
    fn of(rule: &policy::Rule) -> Option<&BTreeMap<String, String>> {
        nodes(rule)?.labels.0.as_ref()
    }
    let mut counts: HashMap<(&String, &String), usize> = HashMap::new();
    for label in rules.iter().filter_map(of).flatten() {
        *counts.entry(label).or_default() += 1;
    }
    table(rules, |rule| {
        let rarest = of(rule)?.iter().min_by_key(|label| counts.get(label))?;
        Some(vec![(rarest.0.clone(), rarest.1.clone())])
    })
}

fn acts(rules: &[policy::Rule]) -> Condition<ExactIndex> {
    table(rules, |rule| {
        let acts = what(rule)?.streams.0.as_ref()?.iter();
        Some(acts.copied().map(Action::word).map(str::to_owned).collect())
    })
}

/// A rule that names users, groups or SPIFFE ids is found by each of them; one that names none of the three by anybody.
fn identities(
    rules: &[policy::Rule],
) -> Condition<(index::Patterns, index::Patterns, index::Patterns)> {
    let total = rules.len();
    let speaks =
        |who: &Subjects| who.users.0.is_some() || who.groups.0.is_some() || who.spiffe.0.is_some();
    let index = |names: fn(&Subjects) -> Option<Vec<String>>| {
        let (keys, _) = named(rules.iter().map(|rule| who(rule).and_then(names)));
        index::Patterns::of(keys, total)
    };
    let any: Vec<usize> = (0..total)
        .filter(|rule| who(&rules[*rule]).is_none_or(|who| !speaks(who)))
        .collect();
    Condition {
        index: (any.len() < total).then(|| {
            (
                index(|who| who.users.0.clone()),
                index(|who| who.groups.0.clone()),
                index(|who| who.spiffe.0.clone()),
            )
        }),
        any: RuleSet::of(any, total),
    }
}

fn networks(
    rules: &[policy::Rule],
    of: impl Fn(&policy::Rule) -> Option<&policy::SourceNetworks>,
) -> Condition<(index::Prefixes<32>, index::Prefixes<128>)> {
    let total = rules.len();
    let nets = |rule| Some(of(rule)?.0.iter().map(index::network).collect());
    let (keys, any) = named::<(bool, (u32, u128))>(rules.iter().map(nets));
    let family = |four: bool| {
        let family = keys.iter().filter(|((is_four, _), _)| *is_four == four);
        family.map(|((_, key), rule)| (*key, *rule)).collect()
    };
    Condition {
        index: (any.len() < total).then(|| {
            (
                Index::of(family(true), total),
                Index::of(family(false), total),
            )
        }),
        any: RuleSet::of(any, total),
    }
}
