//! Rules of which fields the encoder puts into the dynamic table.

use super::static_table;

/// Number of values that the dynamic table takes for one name. It keeps a field with many values (`user-agent` of many
/// clients) from displacing all others.
pub(super) const MAX_VALUES: u8 = 8;

/// Cookies shorter than this are never indexed, because they could be guessed (RFC 7541 section 7.1.3). h2 uses the same bound.
const SHORT_COOKIE: usize = 20;

/// Name of a field with its rule.
pub(super) struct FieldName<'a> {
    pub(super) octets: &'a [u8],
    /// Hash of the name. Names with a rule of their own have keys that no other name has. They have the bit `UNIQUE_KEY`.
    pub(super) key: u32,
    pub(super) rule: &'static Rule,
}

/// How fields of one name are encoded.
pub(super) struct Rule {
    name: &'static str,
    /// Key of the name, see `FieldName`.
    key: u32,
    /// First index of the name in the static table, or 0.
    pub(super) index: u8,
    /// Whether the static table has values of the name that are not empty.
    pub(super) has_static_values: bool,
    /// Number of values in the dynamic table. It is 1 for changing values whose name is not in the static table, so that at
    /// least the name is found in the dynamic table.
    pub(super) max_values: u8,
    /// Values shorter than this are sensitive.
    pub(super) sensitive_below: usize,
}

pub(super) static AUTHORITY: Rule = rule(":authority");
pub(super) static METHOD: Rule = rule(":method");
pub(super) static PATH: Rule = rule(":path");
pub(super) static SCHEME: Rule = rule(":scheme");
pub(super) static STATUS: Rule = rule(":status");
pub(super) static PROTOCOL: Rule = rule(":protocol");

/// Fields that are never indexed, like those that the caller marks as sensitive.
const CONFIDENTIAL: [&str; 2] = ["authorization", "proxy-authorization"];

/// Fields whose values are not indexed, because most of them are seen only once. Cookies are among them, because clients share
/// a tunnel and with it the table.
const CHANGING: [&str; 33] = [
    ":path",
    "age",
    "content-length",
    "content-range",
    "cookie",
    "date",
    "etag",
    "expires",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "last-modified",
    "location",
    "range",
    "referer",
    "set-cookie",
    "cf-ray",
    "grpc-timeout",
    "idempotency-key",
    "last-event-id",
    "server-timing",
    "traceparent",
    "uber-trace-id",
    "x-amzn-trace-id",
    "x-b3-spanid",
    "x-b3-traceid",
    "x-cloud-trace-context",
    "x-correlation-id",
    "x-envoy-upstream-service-time",
    "x-ratelimit-remaining",
    "x-request-id",
];

/// Number of names with a rule of their own: the pseudo-header fields, the header fields of the static table, and the changing
/// ones that are not there.
const RULES: usize = 6 + static_table::LENGTH - (static_table::FIRST_HEADER - 1) + 15;

/// Rules of the names above. Other names have `OTHER_RULE`.
static RULES_BY_POSITION: [Rule; RULES] = build_rules();

/// Positions in `RULES_BY_POSITION` plus one, or 0, found by the key of the name with linear probing.
static RULE_SLOTS: [u8; 256] = build_rule_slots();

const fn build_rules() -> [Rule; RULES] {
    let mut rules = [const { rule("") }; RULES];
    let pseudo_headers = [
        ":authority",
        ":method",
        ":path",
        ":scheme",
        ":status",
        ":protocol",
    ];
    let mut count = 0;
    while count < pseudo_headers.len() {
        rules[count] = rule(pseudo_headers[count]);
        count += 1;
    }
    let mut index = static_table::FIRST_HEADER;
    while index <= static_table::LENGTH {
        rules[count] = rule(static_table::ENTRIES[index - 1].0);
        count += 1;
        index += 1;
    }
    let mut changing = 0;
    while changing < CHANGING.len() {
        let rule = rule(CHANGING[changing]);
        if rule.index == 0 {
            rules[count] = rule;
            count += 1;
        }
        changing += 1;
    }
    assert!(count == RULES);
    rules
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "fewer than 256 rules; `TryFrom` is not const"
)]
const fn build_rule_slots() -> [u8; 256] {
    let rules = build_rules();
    let mut slots = [0; 256];
    let mut position = 0;
    while position < RULES {
        let key = rules[position].key;
        let mut slot = first_slot(key);
        while slots[slot] != 0 {
            assert!(
                rules[slots[slot] as usize - 1].key != key,
                "keys of rules must be unique"
            );
            slot = (slot + 1) % slots.len();
        }
        slots[slot] = position as u8 + 1;
        position += 1;
    }
    slots
}

const fn first_slot(key: u32) -> usize {
    (key >> 24) as usize
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "an index of at most 61; `TryFrom` is not const"
)]
const fn rule(name: &'static str) -> Rule {
    let mut index = 0;
    let mut entry = static_table::LENGTH;
    while entry > 0 {
        if is_same(static_table::ENTRIES[entry - 1].0, name) {
            index = entry as u8;
        }
        entry -= 1;
    }
    let max_values = match (contains(&CHANGING, name), index) {
        (false, _) => MAX_VALUES,
        (true, 0) => 1,
        (true, _) => 0,
    };
    let sensitive_below = if contains(&CONFIDENTIAL, name) {
        usize::MAX
    } else if is_same(name, "cookie") {
        SHORT_COOKIE
    } else {
        0
    };
    let has_static_values = matches!(index, 2 | 4 | 6 | 8 | 16);
    Rule {
        name,
        key: hash_name(name.as_bytes()) | UNIQUE_KEY,
        index,
        has_static_values,
        max_values,
        sensitive_below,
    }
}

const fn contains(names: &[&str], name: &str) -> bool {
    let mut position = 0;
    while position < names.len() {
        if is_same(names[position], name) {
            return true;
        }
        position += 1;
    }
    false
}

const fn is_same(left: &str, right: &str) -> bool {
    let (left, right) = (left.as_bytes(), right.as_bytes());
    if left.len() != right.len() {
        return false;
    }
    let mut position = 0;
    while position < left.len() {
        if left[position] != right[position] {
            return false;
        }
        position += 1;
    }
    true
}

/// Rule of names without a rule of their own.
static OTHER_RULE: Rule = rule("");

impl<'a> FieldName<'a> {
    /// Returns a name that has a rule.
    pub(super) fn with_rule(rule: &'static Rule) -> Self {
        Self {
            octets: rule.name.as_bytes(),
            key: rule.key,
            rule,
        }
    }

    /// Returns a name of a header field with its rule.
    pub(super) fn new(octets: &'a [u8]) -> Self {
        let hash = hash_name(octets);
        let key = hash | UNIQUE_KEY;
        let mut slot = first_slot(key);
        while let Some(position) = RULE_SLOTS[slot].checked_sub(1) {
            let rule = &RULES_BY_POSITION[usize::from(position)];
            if rule.key == key && rule.name.as_bytes() == octets {
                return Self { octets, key, rule };
            }
            slot = (slot + 1) % RULE_SLOTS.len();
        }
        Self {
            octets,
            key: hash & !UNIQUE_KEY,
            rule: &OTHER_RULE,
        }
    }

    /// Whether no other name has the same key.
    pub(super) fn has_unique_key(&self) -> bool {
        self.key & UNIQUE_KEY != 0
    }
}

/// Bit of the keys of all names with a rule of their own. Other names do not have this bit.
const UNIQUE_KEY: u32 = 1;

/// Hashes a name by its length, its first and its last octets. A hash of all octets takes several times as long. Peers that
/// choose names with equal hashes gain nothing, because the table holds at most 128 entries.
const fn hash_name(name: &[u8]) -> u32 {
    let (first, last) = if let (Some(first), Some(last)) =
        (name.first_chunk::<8>(), name.last_chunk::<8>())
    {
        (u64::from_le_bytes(*first), u64::from_le_bytes(*last))
    } else if let (Some(first), Some(last)) = (name.first_chunk::<4>(), name.last_chunk::<4>()) {
        // `u64::from` is not const.
        (
            u32::from_le_bytes(*first) as u64,
            u32::from_le_bytes(*last) as u64,
        )
    } else if let (Some(first), Some(last)) = (name.first(), name.last()) {
        (*first as u64, *last as u64)
    } else {
        (0, 0)
    };
    let mixed = first ^ last.rotate_left(29) ^ (name.len() as u64) << 56;
    // 2^64 divided by the golden ratio.
    (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}
