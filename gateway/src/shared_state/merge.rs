//! Comparison of the entries in the data directory with those in the engine.

use causeway_certs::{
    Entries, EntryChange, EntryKey, Fingerprint, NodeRecord, RevocationEntry, RevokedGateway,
    TokenRecord, entry_text, normalize_entry,
};
use std::collections::{BTreeMap, BTreeSet};

/// Digests of the values of the last state that was equal in the data directory and in the engine, by key.
pub(super) type Digests = BTreeMap<String, u64>;

/// Changes that make both sides equal.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct MergePlan {
    /// Changes of the data directory.
    pub(super) local: Vec<EntryChange>,
    /// Changes of the engine.
    pub(super) remote: Vec<EntryChange>,
    /// Entries of the engine that are left as they are on both sides, each with the reason if the entry itself has a fault.
    pub(super) skipped: BTreeMap<String, Option<String>>,
}

/// Returns the digests of these entries, except those of the CA and of keys of other versions.
pub(super) fn digests(entries: &Entries) -> Digests {
    let merged = entries.iter().filter(|(key, _)| is_merged(key));
    merged
        .map(|(key, value)| (key.clone(), digest(value)))
        .collect()
}

/// Compares both sides with the last common state. A side that has changed an entry wins, except where [`merged_value`] decides.
pub(super) fn plan(last: &Digests, local: &Entries, remote: &Entries, now: u64) -> MergePlan {
    let mut plan = MergePlan::default();
    let keys: BTreeSet<&String> = local.keys().chain(remote.keys()).collect();
    let keys = keys.into_iter().filter(|key| is_merged(key));
    // The removal of a node is in the entry of its revocation.
    let (revoked, others): (Vec<_>, Vec<_>) = keys.partition(|key| is_revocation(key));
    let mut removals = BTreeMap::new();
    for key in revoked.into_iter().chain(others) {
        let here = local.get(key);
        let Ok(there) = plan.read(key, here, remote.get(key)) else {
            continue;
        };
        let both = Both {
            base: last.get(key).copied(),
            here,
            there: there.as_ref(),
        };
        let value = merged_value(key, &both, &removals, now);
        if let Some(EntryKey::Revoked(node)) = EntryKey::parse(key)
            && let Some(entry) = both.newest_revocation()
        {
            removals.insert(node, entry);
        }
        let change = |expected: Option<&String>| EntryChange {
            key: key.clone(),
            expected: expected.cloned(),
            value: value.clone(),
        };
        if value.as_ref() != here {
            plan.local.push(change(here));
        }
        if value != there {
            plan.remote.push(change(remote.get(key)));
        }
    }
    plan
}

/// Returns the nodes that a merge adds to one of two sides, both of which had nodes. A removed node may be one of them if it was
/// removed at a gateway that has not shared its state before.
pub(super) fn united_nodes<'a>(
    plan: &'a MergePlan,
    local: &Entries,
    remote: &Entries,
) -> Vec<&'a str> {
    let has_nodes = |side: &Entries| side.keys().any(|key| key.starts_with("node/"));
    if !has_nodes(local) || !has_nodes(remote) {
        return Vec::new();
    }
    let changes = plan.local.iter().chain(&plan.remote);
    let added = changes.filter(|change| change.expected.is_none() && change.value.is_some());
    let nodes = added.filter_map(|change| match EntryKey::parse(&change.key) {
        Some(EntryKey::Node(node)) => Some(node),
        _ => None,
    });
    nodes.collect()
}

/// Marker of an entry that is not merged.
struct Skipped;

impl MergePlan {
    /// Returns the engine's value of an entry as this version writes it.
    fn read(
        &mut self,
        key: &str,
        here: Option<&String>,
        there: Option<&String>,
    ) -> Result<Option<String>, Skipped> {
        if here == there {
            return Ok(there.cloned());
        }
        // A node whose revocation cannot be read must not be admitted.
        let is_hidden = match EntryKey::parse(key) {
            Some(EntryKey::Node(node)) => {
                let revocation = EntryKey::Revoked(node).to_string();
                here.is_none() && self.skipped.contains_key(&revocation)
            }
            _ => false,
        };
        let read = there.map(|text| normalize_entry(key, text)).transpose();
        match read {
            Ok(value) if !is_hidden => Ok(value),
            read => {
                let why = read.err().map(|error| error.to_string());
                self.skipped.insert(key.to_owned(), why);
                Err(Skipped)
            }
        }
    }
}

/// Values of one entry.
struct Both<'a> {
    /// Digest of the last common value.
    base: Option<u64>,
    here: Option<&'a String>,
    there: Option<&'a String>,
}

impl<'a> Both<'a> {
    /// Returns the value of the only side that has changed the entry, or of the side in the data directory if both have.
    fn changed(&self) -> Option<String> {
        let value = if self.has_changed(self.here) {
            self.here
        } else {
            self.there
        };
        value.cloned()
    }

    /// Whether both sides have changed the entry.
    fn is_conflict(&self) -> bool {
        self.has_changed(self.here) && self.has_changed(self.there)
    }

    fn has_changed(&self, value: Option<&String>) -> bool {
        value.map(|text| digest(text)) != self.base
    }

    /// Returns the value of the side that has the entry.
    fn present(&self) -> Option<&'a String> {
        self.here.or(self.there)
    }

    fn newest_revocation(&self) -> Option<RevocationEntry> {
        let parse = |text: Option<&String>| serde_json::from_str(text?).ok();
        let (here, there) = (parse(self.here), parse(self.there));
        match (here, there) {
            (Some(here), Some(there)) => Some(RevocationEntry::newest(here, there)),
            (here, there) => here.or(there),
        }
    }
}

/// Returns the value that both sides get.
///
/// The absence of an entry is also the result of an engine that was restored from a backup, which is not always recognised. So an
/// absent entry neither ends a revocation, nor removes a node or a token that can still be used. A revocation is ended and a node
/// is removed by the value of the entry `revoked/NAME`. The newest enrolment of a node wins, a token has the uses of both sides, and
/// the first pinned key of an upstream is the one in the engine.
fn merged_value(
    key: &str,
    both: &Both<'_>,
    removals: &BTreeMap<&str, RevocationEntry>,
    now: u64,
) -> Option<String> {
    let (entry, pair) = (EntryKey::parse(key), both.here.zip(both.there));
    match entry {
        Some(EntryKey::Revoked(_)) => match both.newest_revocation() {
            Some(newest) if newest.is_outdated(now) => None,
            Some(newest) if both.here != both.there => Some(entry_text(&newest)),
            _ => both.present().cloned(),
        },
        Some(EntryKey::Node(node)) => {
            let record = |text: &String| serde_json::from_str::<NodeRecord>(text).ok();
            let removal = removals.get(node);
            let is_removed = |text: &&String| {
                removal.is_some_and(|end| record(text).is_some_and(|record| end.removes(&record)))
            };
            let left = Both {
                here: both.here.filter(|text| !is_removed(text)),
                there: both.there.filter(|text| !is_removed(text)),
                ..*both
            };
            match left.here.zip(left.there) {
                Some((here, there)) => {
                    newest_record(here, there, left.is_conflict()).or_else(|| left.changed())
                }
                None => left.present().cloned(),
            }
        }
        Some(EntryKey::Token(_)) => match pair {
            Some((here, there)) if here != there => {
                merge_token_texts(here, there).or_else(|| both.changed())
            }
            None if both.present().is_some_and(|text| can_be_used(text, now)) => {
                both.present().cloned()
            }
            _ => three_way(both),
        },
        // It is the same on both sides, and ends by its age only.
        Some(EntryKey::RevokedGateway(_)) => {
            let revoked = |text: &String| serde_json::from_str::<RevokedGateway>(text).ok();
            let is_outdated = |text: &&String| revoked(text).is_some_and(|it| it.is_outdated(now));
            let present = both.there.or(both.here);
            present.filter(|text| !is_outdated(text)).cloned()
        }
        _ => three_way(both),
    }
}

/// Returns the value of the side that has changed an entry. If both have, a new entry stays, a removal wins, and the value of the
/// engine does.
fn three_way(both: &Both<'_>) -> Option<String> {
    if !both.is_conflict() {
        return both.changed();
    }
    if both.here.is_some() && both.there.is_some() {
        return both.there.cloned();
    }
    both.present().filter(|_| both.base.is_none()).cloned()
}

/// Whether a token has not expired.
fn can_be_used(text: &str, now: u64) -> bool {
    let token = serde_json::from_str::<TokenRecord>(text);
    token.is_ok_and(|token| token.expires > now)
}

/// Returns the token with the uses of both sides, revoked if one side has revoked it.
pub(super) fn merge_tokens(here: TokenRecord, there: TokenRecord) -> TokenRecord {
    let mut merged = there;
    for join in here.used {
        if !merged.used.contains(&join) {
            merged.used.push(join);
        }
    }
    merged.used.sort_by_key(|join| join.at);
    for (field, value) in here.other {
        merged.other.entry(field).or_insert(value);
    }
    merged.revoked = match (here.revoked, merged.revoked) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    };
    merged
}

/// Returns the text of [`merge_tokens`]. `None` if a text cannot be parsed.
fn merge_token_texts(here: &str, there: &str) -> Option<String> {
    let here = serde_json::from_str(here).ok()?;
    let there = serde_json::from_str(there).ok()?;
    Some(entry_text(&merge_tokens(here, there)))
}

/// Returns the record with the later enrolment, or `None` for two records of one enrolment of which only one has changed.
fn newest_record(here: &str, there: &str, is_conflict: bool) -> Option<String> {
    let parse = |text: &str| serde_json::from_str::<NodeRecord>(text).ok();
    let (one, other) = (parse(here)?, parse(there)?);
    if one.order() == other.order() && !is_conflict {
        return None;
    }
    let age = |record: &NodeRecord| (record.order(), record.not_after);
    let newest = if age(&other) > age(&one) { there } else { here };
    Some(newest.to_owned())
}

fn is_revocation(key: &str) -> bool {
    matches!(EntryKey::parse(key), Some(EntryKey::Revoked(_)))
}

fn is_merged(key: &str) -> bool {
    !matches!(EntryKey::parse(key), None | Some(EntryKey::Ca))
}

/// Returns the first 8 bytes of the SHA-256 of a value.
fn digest(value: &str) -> u64 {
    let digest = Fingerprint::digest(value.as_bytes());
    let bytes = digest.as_bytes().iter().take(8);
    bytes.fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::{NodeName, Pin};

    fn entries(list: &[(&str, &str)]) -> Entries {
        let entry = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        list.iter().map(entry).collect()
    }

    /// Time of the merges, in Unix seconds.
    const NOW: u64 = 1_000;

    /// Applies a plan to both sides, which must be equal afterwards.
    fn merged(last: &Entries, mut local: Entries, mut remote: Entries) -> Entries {
        let plan = plan(&digests(last), &local, &remote, NOW);
        for (side, changes) in [(&mut local, plan.local), (&mut remote, plan.remote)] {
            for change in changes {
                assert_eq!(side.get(&change.key), change.expected.as_ref());
                side.remove(&change.key);
                side.extend(change.value.map(|value| (change.key, value)));
            }
        }
        assert_eq!(local, remote);
        local
    }

    fn revoked(at: u64) -> String {
        format!(r#"{{"at":{at},"reason":"stolen"}}"#)
    }

    fn lifted(at: u64, lifted: u64) -> String {
        format!(r#"{{"at":{at},"reason":"stolen","lifted":{lifted}}}"#)
    }

    fn removed(enrolled_at: u64, lifted: u64) -> String {
        format!(r#"{{"at":1,"reason":"removed","lifted":{lifted},"removed":{enrolled_at}}}"#)
    }

    fn record(at: u64, not_after: Option<u64>) -> String {
        let node = NodeName::parse("edge-1").unwrap();
        entry_text(&NodeRecord {
            not_after,
            ..NodeRecord::name_only(&node, at)
        })
    }

    fn token(used: &str, revoked: &str, expires: u64) -> String {
        let hash = entry_text(&Fingerprint::digest(b"secret"));
        format!(
            r#"{{"id":"a","hash":{hash},"nodes":"edge-*","addresses":[],"pool":null,"created":1,"expires":{expires},"uses":3,"used":[{used}]{revoked}}}"#
        )
    }

    /// Merges one entry in every order of the sides.
    fn assert_merged(
        key: &str,
        base: Option<&str>,
        one: Option<&str>,
        other: Option<&str>,
        expected: Option<&str>,
    ) {
        let side = |text: Option<&str>| text.map(|text| (key.to_owned(), text.to_owned()));
        let side = |text| Entries::from_iter(side(text));
        for (here, there) in [(one, other), (other, one)] {
            let all = merged(&side(base), side(here), side(there));
            assert_eq!(
                all.get(key).map(String::as_str),
                expected,
                "{here:?} {there:?}"
            );
        }
    }

    /// Returns entries of pins, which differ by the times.
    fn pins(list: &[(&str, u64)]) -> Entries {
        let key = Fingerprint::digest(b"key");
        let pin = |(upstream, since): &(&str, u64)| {
            let pin = Pin { key, since: *since };
            (format!("pin/{upstream}"), entry_text(&pin))
        };
        list.iter().map(pin).collect()
    }

    #[test]
    fn the_side_that_changed_an_entry_wins() {
        let last = pins(&[("a:1", 1), ("b:1", 1), ("c:1", 1), ("d:1", 1)]);
        let local = pins(&[("a:1", 2), ("b:1", 1), ("c:1", 1), ("e:1", 1)]);
        let remote = pins(&[("a:1", 1), ("b:1", 3), ("d:1", 1), ("f:1", 1)]);
        let expected = pins(&[("a:1", 2), ("b:1", 3), ("e:1", 1), ("f:1", 1)]);
        assert_eq!(merged(&last, local, remote.clone()), expected);
        // A data directory without the last common state and without entries takes over everything.
        let empty = Entries::new();
        assert_eq!(merged(&empty, Entries::new(), remote.clone()), remote);
        // Both sides have changed it.
        let (last, local) = (pins(&[("n:1", 1)]), pins(&[("n:1", 2), ("n:2", 2)]));
        let remote = pins(&[("n:1", 3), ("n:2", 3)]);
        assert_eq!(merged(&last, local.clone(), remote.clone()), remote);
        assert_eq!(merged(&last, pins(&[("n:1", 2)]), empty.clone()), empty);
    }

    #[test]
    fn a_first_merge_names_the_nodes_that_one_side_lacks() {
        let node = |name: &str| {
            let name = NodeName::parse(name).unwrap();
            (
                format!("node/{name}"),
                entry_text(&NodeRecord::name_only(&name, 5)),
            )
        };
        let side = |names: &[&str]| names.iter().map(|name| node(name)).collect::<Entries>();
        let united = |local: &[&str], remote: &[&str]| {
            let (local, mut remote) = (side(local), side(remote));
            // The removal of this node is known.
            remote.insert("revoked/gone".to_owned(), removed(5, 6));
            let plan = plan(&Digests::new(), &local, &remote, NOW);
            let nodes = united_nodes(&plan, &local, &remote);
            nodes.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(united(&["a", "b", "gone"], &["b", "c"]), ["c", "a"]);
        assert!(united(&[], &["b", "c"]).is_empty());
        assert!(united(&["a"], &[]).is_empty());
    }

    #[test]
    fn an_entry_that_cannot_be_read_is_left_alone() {
        let (good, bad) = (record(5, None), r#"{"node":"edge-1"}"#);
        let key = "node/edge-1";
        let other = [("revoked/edge-2", revoked(3)), ("node/other", good.clone())];
        let remote = [
            (key, bad),
            (other[0].0, &other[0].1),
            (other[1].0, &other[1].1),
        ];
        for local in [&[][..], &[(key, &*good)]] {
            let plan = plan(&Digests::new(), &entries(local), &entries(&remote), NOW);
            assert_eq!(plan.remote, []);
            let changed: Vec<_> = plan.local.iter().map(|change| &change.key).collect();
            assert_eq!(changed, [other[0].0]);
            let skipped: Vec<_> = plan.skipped.keys().collect();
            assert_eq!(skipped, [key, "node/other"]);
        }
        // A node whose revocation cannot be read is not admitted.
        let remote = entries(&[(key, &good), ("revoked/edge-1", r#"{"until":3}"#)]);
        let plan = plan(&Digests::new(), &Entries::new(), &remote, NOW);
        assert_eq!((plan.local, plan.remote), (Vec::new(), Vec::new()));
        assert_eq!(plan.skipped[key], None);
        let why = plan.skipped["revoked/edge-1"].as_deref().unwrap();
        assert!(why.contains("revoked/edge-1"), "{why}");
    }

    #[test]
    fn fields_of_later_versions_stay_and_their_order_is_no_change() {
        let ours = record(5, Some(9)).replace('}', r#","color":"red","zone":{"b":1,"a":2}}"#);
        let theirs = r#"{"zone":{"b":1,"a":2},"follows_cluster":true,"color":"red","not_after":9,"serial":"","enrolled_at":5,"pool":null,"addresses":[],"node":"edge-1"}"#;
        let side = |text: &str| entries(&[("node/edge-1", text)]);
        let (here, there) = (side(&ours), side(theirs));
        let same = plan(&digests(&here), &here, &there, NOW);
        assert_eq!(same, MergePlan::default());
        let taken = plan(&Digests::new(), &Entries::new(), &there, NOW);
        assert_eq!(taken.local[0].value.as_ref(), Some(&ours));
        assert_eq!(taken.remote, []);
    }

    #[test]
    fn a_revocation_ends_by_a_later_value_and_never_by_its_absence() {
        let (first, end, second) = (revoked(7), lifted(7, 9), revoked(10));
        let [first, end, second] = [&first, &end, &second].map(|text| Some(text.as_str()));
        let merge = |base, one, other, expected| {
            assert_merged("revoked/a", base, one, other, expected);
        };
        for base in [None, first, end, second] {
            merge(base, first, None, first);
            merge(base, end, None, end);
            merge(base, first, end, end);
            merge(base, first, second, second);
            merge(base, end, second, second);
        }
        // The revocation and its end were in the same second.
        let at_once = lifted(7, 7);
        merge(first, first, Some(&at_once), Some(&at_once));
        // The end is forgotten after 90 days.
        let late = NOW + 91 * 86_400;
        let side = |text: &str| entries(&[("revoked/a", text)]);
        let plan = plan(
            &digests(&side(&at_once)),
            &side(&at_once),
            &side(&at_once),
            late,
        );
        assert_eq!((plan.local.len(), plan.remote.len()), (1, 1));
        assert_eq!(plan.local[0].value, None);
    }

    #[test]
    fn a_revocation_of_a_gateway_ends_by_its_age_only() {
        let key = "revoked-gateway/40aa";
        let text = r#"{"at":1,"reason":"stolen","not_after":2000,"sequence":5}"#;
        for base in [None, Some(text)] {
            assert_merged(key, base, Some(text), None, Some(text));
        }
        let side = entries(&[(key, text)]);
        let merge = |now| plan(&digests(&side), &side, &side, now);
        assert_eq!(merge(2000 + 86_400), MergePlan::default());
        let late = merge(2001 + 86_400);
        assert_eq!((late.local.len(), late.remote.len()), (1, 1));
        assert_eq!(late.local[0].value, None);
    }

    #[test]
    fn a_node_is_removed_by_a_value_and_never_by_its_absence() {
        let (old, renewed, again) = (record(5, Some(9)), record(5, Some(20)), record(7, Some(9)));
        for (base, present) in [(&old, &old), (&old, &renewed), (&again, &old)] {
            let present = Some(present.as_str());
            assert_merged("node/edge-1", Some(base), present, None, present);
        }
        let removal = removed(5, 6);
        let side = |record: &str| entries(&[("node/edge-1", record), ("revoked/edge-1", &removal)]);
        let alone = entries(&[("revoked/edge-1", &removal)]);
        let last = entries(&[("node/edge-1", &old)]);
        for restored in [&old, &renewed] {
            let there = entries(&[("node/edge-1", restored)]);
            assert_eq!(merged(&last, alone.clone(), there.clone()), alone);
            assert_eq!(merged(&last, there, alone.clone()), alone);
            assert_eq!(merged(&last, alone.clone(), side(restored)), alone);
        }
        assert_eq!(merged(&last, alone.clone(), side(&again)), side(&again));
        // The engine was restored: its record is from before the last enrolment.
        assert_merged(
            "node/edge-1",
            Some(&again),
            Some(&again),
            Some(&old),
            Some(&again),
        );
    }

    #[test]
    fn the_newest_enrolment_wins_and_later_versions_keep_their_entries() {
        let (old, new) = (record(5, Some(9)), record(7, Some(8)));
        for (here, there) in [(&old, &new), (&new, &old)] {
            let side = |text: &str| entries(&[("node/edge-1", text)]);
            let all = merged(&Entries::new(), side(here), side(there));
            assert_eq!(all["node/edge-1"], new);
        }
        let renewed = record(7, Some(20));
        let side = |text: &str| entries(&[("node/edge-1", text)]);
        let all = merged(&Entries::new(), side(&renewed), side(&new));
        assert_eq!(all["node/edge-1"], renewed);
        let later = entries(&[("quota/edge-1", "x"), ("ca", "y")]);
        let untouched = plan(&Digests::new(), &Entries::new(), &later, NOW);
        assert_eq!(untouched, MergePlan::default());
    }

    #[test]
    fn a_token_has_the_uses_and_the_revocation_of_both_sides() {
        let (one, two) = (r#"{"node":"edge-1","at":2}"#, r#"{"node":"edge-2","at":3}"#);
        let (valid, revoked) = (NOW + 1, r#","revoked":5"#);
        let all = token(&format!("{one},{two}"), revoked, valid);
        let (here, there) = (token(two, "", valid), token(one, revoked, valid));
        let merge = |base: &str, one, other, expected| {
            assert_merged("token/a", Some(base), one, other, expected);
        };
        let unused = token("", "", valid);
        merge(&unused, Some(&here), Some(&there), Some(&all));
        // A backup without the uses or without the token undoes nothing.
        merge(&all, Some(&all), Some(&unused), Some(&all));
        merge(&all, Some(&all), None, Some(&all));
        let expired = token(one, "", NOW);
        merge(&expired, Some(&expired), None, None);
    }
}
