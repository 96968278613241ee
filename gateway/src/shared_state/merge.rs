//! Comparison of the entries in the data directory with those in the engine.

use causeway_certs::{
    Entries, EntryChange, EntryKey, Fingerprint, NodeRecord, TokenRecord, entry_text,
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
}

/// Returns the digests of these entries, except those of the CA and of keys of other versions.
pub(super) fn digests(entries: &Entries) -> Digests {
    let merged = entries.iter().filter(|(key, _)| is_merged(key));
    merged
        .map(|(key, value)| (key.clone(), digest(value)))
        .collect()
}

/// Compares both sides with the last common state. A side that has changed an entry wins; if both have, [`resolve`] decides.
pub(super) fn plan(last: &Digests, local: &Entries, remote: &Entries) -> MergePlan {
    let mut plan = MergePlan::default();
    let keys: BTreeSet<&String> = local.keys().chain(remote.keys()).collect();
    for key in keys.into_iter().filter(|key| is_merged(key)) {
        let (here, there) = (local.get(key), remote.get(key));
        if here == there {
            continue;
        }
        let base = last.get(key).copied();
        let has_changed = |value: Option<&String>| value.map(|text| digest(text)) != base;
        let value = match (has_changed(here), has_changed(there)) {
            (true, true) => resolve(key, base.is_some(), here, there),
            (true, false) => here.cloned(),
            (false, _) => there.cloned(),
        };
        let change = |expected: Option<&String>| EntryChange {
            key: key.clone(),
            expected: expected.cloned(),
            value: value.clone(),
        };
        if value.as_ref() != here {
            plan.local.push(change(here));
        }
        if value.as_ref() != there {
            plan.remote.push(change(there));
        }
    }
    plan
}

/// Returns the value of an entry that both sides have changed since the last common state, in which it `existed` or not.
///
/// A revocation stays. A removal of another entry wins, so that a node that was removed at one gateway does not come back by a
/// renewal at another one. A token has the uses of both sides. The newest enrolment of a node wins, and the first pinned key of
/// an upstream is the one in the engine.
fn resolve(
    key: &str,
    existed: bool,
    here: Option<&String>,
    there: Option<&String>,
) -> Option<String> {
    let entry = EntryKey::parse(key);
    let (Some(here), Some(there)) = (here, there) else {
        let stays = matches!(entry, Some(EntryKey::Revoked(_))) || !existed;
        return here.or(there).filter(|_| stays).cloned();
    };
    let merged = match entry {
        Some(EntryKey::Token(_)) => merge_tokens(here, there),
        Some(EntryKey::Node(_)) => newest_record(here, there),
        Some(EntryKey::Pin(..)) => Some(there.clone()),
        _ => None,
    };
    Some(merged.unwrap_or_else(|| here.clone()))
}

/// Returns the token with the uses of both sides, revoked if one side has revoked it. `None` if a text cannot be parsed.
fn merge_tokens(here: &str, there: &str) -> Option<String> {
    let mut merged: TokenRecord = serde_json::from_str(there).ok()?;
    let here: TokenRecord = serde_json::from_str(here).ok()?;
    for join in here.used {
        if !merged.used.contains(&join) {
            merged.used.push(join);
        }
    }
    merged.used.sort_by_key(|join| join.at);
    merged.revoked = match (here.revoked, merged.revoked) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    };
    Some(entry_text(&merged))
}

/// Returns the record with the later enrolment, and of one enrolment the one with the later certificate.
fn newest_record(here: &str, there: &str) -> Option<String> {
    let age = |text: &str| {
        let record: NodeRecord = serde_json::from_str(text).ok()?;
        Some((record.enrolled_at, record.not_after))
    };
    let newest = if age(there)? > age(here)? {
        there
    } else {
        here
    };
    Some(newest.to_owned())
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
    use causeway_certs::NodeName;

    fn entries(list: &[(&str, &str)]) -> Entries {
        let entry = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        list.iter().map(entry).collect()
    }

    /// Applies a plan to both sides, which must be equal afterwards.
    fn merged(last: &Entries, mut local: Entries, mut remote: Entries) -> Entries {
        let plan = plan(&digests(last), &local, &remote);
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

    #[test]
    fn the_side_that_changed_an_entry_wins() {
        let last = entries(&[
            ("revoked/same", "1"),
            ("revoked/here", "1"),
            ("revoked/there", "1"),
            ("revoked/allowed-here", "1"),
            ("revoked/allowed-there", "1"),
        ]);
        let local = entries(&[
            ("revoked/same", "1"),
            ("revoked/here", "2"),
            ("revoked/there", "1"),
            ("revoked/allowed-there", "1"),
            ("revoked/new-here", "1"),
        ]);
        let remote = entries(&[
            ("revoked/same", "1"),
            ("revoked/here", "1"),
            ("revoked/there", "3"),
            ("revoked/allowed-here", "1"),
            ("revoked/new-there", "1"),
        ]);
        let expected = entries(&[
            ("revoked/same", "1"),
            ("revoked/here", "2"),
            ("revoked/there", "3"),
            ("revoked/new-here", "1"),
            ("revoked/new-there", "1"),
        ]);
        assert_eq!(merged(&last, local, remote.clone()), expected);
        // A data directory without the last common state and without entries takes over everything.
        let empty = Entries::new();
        assert_eq!(merged(&empty, Entries::new(), remote.clone()), remote);
    }

    #[test]
    fn a_revocation_stays_a_removal_wins_and_the_first_pin_is_the_engines() {
        let last = entries(&[
            ("revoked/a", "1"),
            ("revoked/b", "1"),
            ("pin/n:1", "1"),
            ("node/a", "1"),
            ("node/b", "1"),
        ]);
        let local = entries(&[
            ("revoked/a", "2"),
            ("pin/n:1", "2"),
            ("pin/n:2", "2"),
            ("node/a", "renewed"),
        ]);
        let remote = entries(&[
            ("revoked/b", "3"),
            ("pin/n:1", "3"),
            ("pin/n:2", "3"),
            ("node/b", "renewed"),
        ]);
        let expected = entries(&[
            ("revoked/a", "2"),
            ("revoked/b", "3"),
            ("pin/n:1", "3"),
            ("pin/n:2", "3"),
        ]);
        assert_eq!(merged(&last, local, remote), expected);
    }

    #[test]
    fn the_newest_enrolment_wins_and_later_versions_keep_their_entries() {
        let record = |at: u64, not_after: Option<u64>| {
            let node = NodeName::parse("edge-1").unwrap();
            let record = NodeRecord::name_only(&node, at);
            entry_text(&NodeRecord {
                not_after,
                ..record
            })
        };
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
        let untouched = plan(&Digests::new(), &Entries::new(), &later);
        assert_eq!(untouched, MergePlan::default());
    }

    #[test]
    fn a_token_has_the_uses_and_the_revocation_of_both_sides() {
        let token = |used: &str, revoked: &str| {
            let hash = entry_text(&Fingerprint::digest(b"secret"));
            format!(
                r#"{{"id":"a","hash":{hash},"nodes":"edge-*","addresses":[],"pool":null,"created":1,"expires":9,"uses":3,"used":[{used}]{revoked}}}"#
            )
        };
        let (one, two) = (r#"{"node":"edge-1","at":2}"#, r#"{"node":"edge-2","at":3}"#);
        let last = entries(&[("token/a", &token("", ""))]);
        let local = entries(&[("token/a", &token(two, ""))]);
        let remote = entries(&[("token/a", &token(one, r#","revoked":5"#))]);
        let all = merged(&last, local, remote);
        let expected = token(&format!("{one},{two}"), r#","revoked":5"#);
        assert_eq!(all["token/a"], expected);
    }
}
