//! Indexes from values to the rules that name them: sets of rules, and their lookup.
//!
//! The cost of a lookup does not depend on the number of values that rules name. The exception is a pattern with a star inside:
//! each such pattern is tried.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

const WORD_BITS: usize = u64::BITS as usize;

/// Set of rules: a few as numbers, many as bits, whichever takes fewer steps.
#[derive(Clone, Debug)]
pub(super) enum RuleSet {
    Sparse(Vec<usize>),
    Dense(Box<[u64]>),
}

impl Default for RuleSet {
    fn default() -> Self {
        Self::Sparse(Vec::new())
    }
}

impl RuleSet {
    /// Returns the set of these rules of `total`.
    pub(super) fn of(rules: impl IntoIterator<Item = usize>, total: usize) -> Self {
        let indices: Vec<usize> = rules.into_iter().collect();
        let words = total.div_ceil(WORD_BITS);
        if indices.len() <= words {
            return Self::Sparse(indices);
        }
        let mut many = RuleBits::empty(total);
        many.add(&Self::Sparse(indices));
        Self::Dense(many.0.into())
    }
}

/// Rules as bits.
#[derive(Debug)]
pub(super) struct RuleBits(Vec<u64>);

impl RuleBits {
    /// Returns an empty set for `total` rules.
    pub(super) fn empty(total: usize) -> Self {
        Self(vec![0; total.div_ceil(WORD_BITS)])
    }

    /// Adds rules.
    pub(super) fn add(&mut self, rules: &RuleSet) {
        match rules {
            RuleSet::Sparse(few) => {
                for rule in few {
                    self.0[rule / WORD_BITS] |= 1 << (rule % WORD_BITS);
                }
            }
            RuleSet::Dense(many) => {
                for (word, more) in self.0.iter_mut().zip(many) {
                    *word |= more;
                }
            }
        }
    }

    /// Returns the rules in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().flat_map(|(index, word)| {
            let mut word = *word;
            std::iter::from_fn(move || {
                let bit = (word != 0).then(|| word.trailing_zeros() as usize)?;
                word &= word - 1;
                Some(index * WORD_BITS + bit)
            })
        })
    }
}

/// Rules that remain, and a buffer for the rules that the next condition finds.
#[derive(Debug)]
pub(super) struct RemainingRules {
    remaining: RuleBits,
    found: RuleBits,
}

impl RemainingRules {
    /// Returns a set of all of `total` rules.
    pub(super) fn all(total: usize) -> Self {
        let mut left = vec![u64::MAX; total.div_ceil(WORD_BITS)];
        if let (Some(last), tail_bits @ 1..) = (left.last_mut(), total % WORD_BITS) {
            *last = (1 << tail_bits) - 1;
        }
        Self {
            remaining: RuleBits(left),
            found: RuleBits::empty(total),
        }
    }

    /// Retains the rules that `find` finds too.
    pub(super) fn retain(&mut self, find: impl FnOnce(&mut RuleBits)) {
        self.found.0.fill(0);
        find(&mut self.found);
        for (word, found) in self.remaining.0.iter_mut().zip(&self.found.0) {
            *word &= found;
        }
    }

    /// Whether no rule remains.
    pub(super) fn is_empty(&self) -> bool {
        self.remaining.0.iter().all(|word| *word == 0)
    }

    /// Returns the remaining rules in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.remaining.iter()
    }
}

/// Index that is built from keys with the rules that name them.
pub(super) trait Index: Default {
    type Key;
    /// Returns an index of `total` rules from these keys.
    fn build(keys: Vec<(Self::Key, usize)>, total: usize) -> Self;
}

fn group_rules<K: std::hash::Hash + Eq>(
    named: Vec<(K, usize)>,
    total: usize,
) -> HashMap<K, RuleSet> {
    let mut groups: HashMap<K, Vec<usize>> = HashMap::new();
    for (key, rule) in named {
        groups.entry(key).or_default().push(rule);
    }
    let set = |rules: Vec<usize>| RuleSet::of(rules, total);
    groups
        .into_iter()
        .map(|(key, rules)| (key, set(rules)))
        .collect()
}

/// Index by exact text.
#[derive(Debug, Default)]
pub(super) struct ExactIndex(HashMap<String, RuleSet>);

impl Index for ExactIndex {
    type Key = String;

    fn build(keys: Vec<(String, usize)>, total: usize) -> Self {
        Self(group_rules(keys, total))
    }
}

impl ExactIndex {
    pub(super) fn find(&self, key: &str, into: &mut RuleBits) {
        if let Some(rules) = self.0.get(key) {
            into.add(rules);
        }
    }
}

/// Index by labels, of which a node has many.
#[derive(Debug, Default)]
pub(super) struct Labels(HashMap<String, ExactIndex>);

impl Index for Labels {
    type Key = (String, String);

    fn build(named: Vec<((String, String), usize)>, total: usize) -> Self {
        let mut keys: HashMap<String, Vec<(String, usize)>> = HashMap::new();
        for ((key, value), rule) in named {
            keys.entry(key).or_default().push((value, rule));
        }
        let exact = |values| ExactIndex::build(values, total);
        Self(
            keys.into_iter()
                .map(|(key, values)| (key, exact(values)))
                .collect(),
        )
    }
}

impl Labels {
    pub(super) fn find(&self, labels: &BTreeMap<String, String>, into: &mut RuleBits) {
        for (key, value) in labels {
            if let Some(values) = self.0.get(key) {
                values.find(value, into);
            }
        }
    }
}

/// Index by patterns in which `*` stands for any characters.
#[derive(Debug, Default)]
pub(super) struct Patterns {
    exact: ExactIndex,
    /// `edge-*`: by the text before the star.
    prefixes: Affixes,
    /// `*-edge`: by the text after the star.
    suffixes: Affixes,
    /// Patterns with stars elsewhere: the texts between the stars.
    inner_wildcards: Vec<(Vec<String>, RuleSet)>,
}

#[derive(Debug, Default)]
struct Affixes {
    lengths: BTreeSet<usize>,
    rules: HashMap<String, RuleSet>,
}

impl Affixes {
    fn of(keys: Vec<(String, usize)>, total: usize) -> Self {
        Self {
            lengths: keys.iter().map(|(text, _)| text.len()).collect(),
            rules: group_rules(keys, total),
        }
    }

    /// Adds the rules for each prefix or suffix of a text of this length, for each length in the index.
    fn find<'a>(
        &self,
        length: usize,
        part: impl Fn(usize) -> Option<&'a str>,
        into: &mut RuleBits,
    ) {
        for length in self.lengths.range(..=length) {
            if let Some(rules) = part(*length).and_then(|part| self.rules.get(part)) {
                into.add(rules);
            }
        }
    }
}

impl Index for Patterns {
    type Key = String;

    fn build(keys: Vec<(String, usize)>, total: usize) -> Self {
        let (mut exact, mut beginnings, mut endings) = (Vec::new(), Vec::new(), Vec::new());
        let mut others: HashMap<Vec<String>, Vec<usize>> = HashMap::new();
        for (pattern, rule) in keys {
            let parts: Vec<&str> = pattern.split('*').collect();
            match parts.as_slice() {
                [_] => exact.push((pattern, rule)),
                [beginning, ""] => beginnings.push(((*beginning).to_owned(), rule)),
                ["", ending] => endings.push(((*ending).to_owned(), rule)),
                parts => {
                    let parts = parts.iter().map(|&part| part.to_owned()).collect();
                    others.entry(parts).or_default().push(rule);
                }
            }
        }
        Self {
            exact: ExactIndex::build(exact, total),
            prefixes: Affixes::of(beginnings, total),
            suffixes: Affixes::of(endings, total),
            inner_wildcards: others
                .into_iter()
                .map(|(parts, rules)| (parts, RuleSet::of(rules, total)))
                .collect(),
        }
    }
}

impl Patterns {
    /// Adds the rules that name exactly this text, without patterns.
    pub(super) fn find_exact(&self, text: &str, into: &mut RuleBits) {
        self.exact.find(text, into);
    }

    pub(super) fn find(&self, text: &str, into: &mut RuleBits) {
        self.exact.find(text, into);
        let length = text.len();
        self.prefixes.find(length, |part| text.get(..part), into);
        self.suffixes
            .find(length, |part| text.get(length - part..), into);
        for (parts, rules) in &self.inner_wildcards {
            if matches_parts(parts, text) {
                into.add(rules);
            }
        }
    }
}

/// Whether a text begins with the first part, ends with the last, and contains the others in between, in order.
fn matches_parts(parts: &[String], text: &str) -> bool {
    let [first, between @ .., last] = parts else {
        return false;
    };
    let inner = text
        .strip_prefix(first.as_str())
        .and_then(|remainder| remainder.strip_suffix(last.as_str()));
    inner.is_some_and(|inner| {
        between
            .iter()
            .try_fold(inner, |rest, part| {
                rest.split_once(part.as_str()).map(|(_, rest)| rest)
            })
            .is_some()
    })
}

/// Index by the leading bits of a number with `WIDTH` bits, for networks and ranges of ports.
#[derive(Debug, Default)]
pub(super) struct Prefixes<const WIDTH: u32> {
    lengths: BTreeSet<u32>,
    rules: HashMap<(u32, u128), RuleSet>,
}

impl<const WIDTH: u32> Index for Prefixes<WIDTH> {
    /// Number of leading bits, and the bits.
    type Key = (u32, u128);

    fn build(named: Vec<((u32, u128), usize)>, total: usize) -> Self {
        let named: Vec<_> = named
            .into_iter()
            .map(|((length, number), rule)| ((length, Self::leading_bits(length, number)), rule))
            .collect();
        Self {
            lengths: named.iter().map(|((length, _), _)| *length).collect(),
            rules: group_rules(named, total),
        }
    }
}

impl<const WIDTH: u32> Prefixes<WIDTH> {
    /// Returns the leading bits of a number; 0 for a length of 0, because a shift by 128 would overflow.
    fn leading_bits(length: u32, number: u128) -> u128 {
        number.checked_shr(WIDTH - length).unwrap_or(0)
    }

    pub(super) fn find(&self, number: u128, into: &mut RuleBits) {
        for length in &self.lengths {
            if let Some(rules) = self
                .rules
                .get(&(*length, Self::leading_bits(*length, number)))
            {
                into.add(rules);
            }
        }
    }
}

/// Returns the leading bits of a network, and whether the network is IPv4.
pub(super) fn network_prefix(net: &ipnet::IpNet) -> (bool, (u32, u128)) {
    let length = u32::from(net.prefix_len());
    match net.network() {
        IpAddr::V4(ip) => (true, (length, ip.to_bits().into())),
        // IPv4-mapped addresses of clients are compared as IPv4 addresses.
        IpAddr::V6(ip) => match ip.to_ipv4_mapped() {
            Some(ip) if length >= 96 => (true, (length - 96, ip.to_bits().into())),
            _ => (false, (length, ip.to_bits())),
        },
    }
}

/// Returns the smallest list of prefixes that covers exactly the numbers from `first` to `last`.
pub(super) fn prefixes_of_range(first: u16, last: u16) -> Vec<(u32, u128)> {
    let (mut next, end) = (u32::from(first), u32::from(last) + 1);
    let mut prefixes = Vec::new();
    while next < end {
        // The block is as large as the alignment of its start and the remaining range allow.
        let alignment_bits = next.trailing_zeros().min(16);
        let remaining_bits = (end - next).ilog2();
        let bits = alignment_bits.min(remaining_bits);
        prefixes.push((16 - bits, next.into()));
        next += 1 << bits;
    }
    prefixes
}

/// Index by the path itself or one of its parents.
#[derive(Debug, Default)]
pub(super) struct Paths {
    root: RuleSet,
    prefixes: Affixes,
}

impl Index for Paths {
    type Key = String;

    fn build(keys: Vec<(String, usize)>, total: usize) -> Self {
        let (root, below): (Vec<_>, Vec<_>) = keys.into_iter().partition(|(path, _)| path == "/");
        Self {
            root: RuleSet::of(root.into_iter().map(|(_, rule)| rule), total),
            prefixes: Affixes::of(below, total),
        }
    }
}

impl Paths {
    /// Adds the rules for a path after its conversion to lower case. The index must be built from paths in lower case.
    pub(super) fn find_folded(&self, path: &str, into: &mut RuleBits) {
        if !self.prefixes.rules.is_empty() {
            self.find(&path.to_lowercase(), into);
        }
    }

    pub(super) fn find(&self, path: &str, into: &mut RuleBits) {
        into.add(&self.root);
        let bytes = path.as_bytes();
        let ends_at_segment = |length| bytes.get(length).is_none_or(|next| *next == b'/');
        let prefix_at = |length| path.get(..length).filter(|_| ends_at_segment(length));
        self.prefixes.find(path.len(), prefix_at, into);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(total: usize, find: impl FnOnce(&mut RuleBits)) -> Vec<usize> {
        let mut found = RuleBits::empty(total);
        find(&mut found);
        found.iter().collect()
    }

    #[test]
    fn sets_are_the_same_however_they_are_kept() {
        for total in [1, 63, 64, 65, 1000] {
            let all: Vec<usize> = (0..total).collect();
            assert_eq!(RemainingRules::all(total).iter().collect::<Vec<_>>(), all);
            for step in [1, 2, 7, 900] {
                let some: Vec<usize> = (0..total).step_by(step).collect();
                let rules = RuleSet::of(some.clone(), total);
                assert_eq!(found(total, |left| left.add(&rules)), some);
            }
        }
    }

    #[test]
    fn stars_match_any_characters_at_any_position() {
        let patterns = ["edge-1", "edge-*", "*-1", "*", "e*1", "e*g*1", "**", "é*"];
        let named = patterns.iter().enumerate();
        let named = named
            .map(|(rule, text)| ((*text).to_owned(), rule))
            .collect();
        let index = Patterns::build(named, patterns.len());
        let fits = |text: &str| {
            let rules = found(patterns.len(), |left| index.find(text, left));
            rules
                .into_iter()
                .map(|rule| patterns[rule])
                .collect::<Vec<_>>()
        };
        assert_eq!(
            fits("edge-1"),
            ["edge-1", "edge-*", "*-1", "*", "e*1", "e*g*1", "**"]
        );
        assert_eq!(fits("edge-"), ["edge-*", "*", "**"]);
        assert_eq!(fits("e1"), ["*", "e*1", "**"]);
        assert_eq!(fits("é1"), ["*", "**", "é*"]);
        assert_eq!(fits(""), ["*", "**"]);
    }

    #[test]
    fn parts_of_a_pattern_never_overlap() {
        for (pattern, text, fits) in [
            ("aa*a", "aa", false),
            ("aa*a", "aaa", true),
            ("a*b*b", "ab", false),
            ("a*b*b", "abb", true),
        ] {
            let parts: Vec<String> = pattern.split('*').map(str::to_owned).collect();
            assert_eq!(matches_parts(&parts, text), fits, "{pattern} {text}");
        }
    }

    #[test]
    fn a_range_of_ports_holds_its_ports_and_no_other() {
        for (first, last) in [
            (1, 1),
            (1, 65535),
            (0, 65535),
            (80, 443),
            (30000, 32767),
            (65535, 65535),
            (1023, 1025),
        ] {
            let named = prefixes_of_range(first, last)
                .into_iter()
                .map(|key| (key, 0))
                .collect();
            let index = Prefixes::<16>::build(named, 1);
            for port in 0..=u16::MAX {
                let holds = !found(1, |left| index.find(port.into(), left)).is_empty();
                assert_eq!(
                    holds,
                    (first..=last).contains(&port),
                    "{port} in {first}-{last}"
                );
            }
        }
    }

    #[test]
    fn a_path_matches_its_descendants_by_whole_segments() {
        let paths = ["/", "/logs", "/logs/a"];
        let named = paths.iter().enumerate();
        let named = named
            .map(|(rule, text)| ((*text).to_owned(), rule))
            .collect();
        let index = Paths::build(named, paths.len());
        let rules = |path: &str| found(paths.len(), |left| index.find(path, left));
        assert_eq!(rules("/"), [0]);
        assert_eq!(rules("/logs"), [0, 1]);
        assert_eq!(rules("/logs/"), [0, 1]);
        assert_eq!(rules("/logs/a/b"), [0, 1, 2]);
        assert_eq!(rules("/logs/ab"), [0, 1]);
        assert_eq!(rules("/logsa"), [0]);
    }
}
