//! Encoder of header blocks.

use super::{DEFAULT_TABLE_SIZE, FIELD_OVERHEAD, static_table};
use bytes::{BufMut, BytesMut};
use http::HeaderName;
use std::collections::VecDeque;

/// Name of a field of a header block: a pseudo-header field or a field of the map.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Name<'a> {
    Method,
    Scheme,
    Authority,
    Path,
    Status,
    /// RFC 8441 section 4.
    Protocol,
    Field(&'a HeaderName),
}

/// Encoder of all header blocks that one end of a connection sends.
///
/// Strings are not Huffman-coded. On an HTTP request the code would save a third of the bytes of the literals and cost about
/// 2,800 instructions, a quarter of them at the peer. Most bytes are saved by the dynamic table.
#[derive(Debug)]
pub(crate) struct Encoder {
    table: Table,
    /// Smallest size that the table had since the last block, if the size changed. The peer must learn this size as well as
    /// the last one (RFC 7541 section 4.2).
    smallest_size: Option<usize>,
    /// Number of fields that were not indexed because their names had `MAX_VALUES` values in the table.
    unindexed: usize,
}

/// Number of values that the dynamic table takes for one name. It keeps a field with many values (`user-agent` of many
/// clients) from displacing all others.
const MAX_VALUES: u8 = 8;

/// A name with `MAX_VALUES` values in the table still gets each n-th new value indexed, because the old ones may be out of use.
const REPLACEMENT_INTERVAL: usize = 8;

/// Cookies shorter than this are never indexed, because they could be guessed (RFC 7541 section 7.1.3). h2 uses the same bound.
const SHORT_COOKIE: usize = 20;

impl Encoder {
    /// Returns an encoder for a peer with this `SETTINGS_HEADER_TABLE_SIZE`. At most 4,096 octets of it are used.
    pub(crate) fn new(max_size: usize) -> Self {
        let mut encoder = Self {
            table: Table::new(),
            smallest_size: None,
            unindexed: 0,
        };
        encoder.set_max_size(max_size);
        encoder
    }

    /// Obeys a changed `SETTINGS_HEADER_TABLE_SIZE` of the peer from the next block on. At most 4,096 octets are used.
    pub(crate) fn set_max_size(&mut self, size: usize) {
        let size = size.min(DEFAULT_TABLE_SIZE);
        if size != self.table.max_size {
            self.smallest_size = Some(
                self.smallest_size
                    .map_or(size, |smallest| smallest.min(size)),
            );
            self.table.set_max_size(size);
        }
    }

    /// Begins a header block: writes pending updates of the table's size (RFC 7541 section 4.2).
    pub(crate) fn begin(&mut self, block: &mut BytesMut) {
        if let Some(smallest) = self.smallest_size.take() {
            if smallest < self.table.max_size {
                put_integer(block, SIZE_UPDATE, smallest);
            }
            put_integer(block, SIZE_UPDATE, self.table.max_size);
        }
    }

    /// Appends one field to the block. A sensitive field is sent as never indexed (RFC 7541 section 6.2.3).
    pub(crate) fn encode(
        &mut self,
        name: Name<'_>,
        value: &[u8],
        is_sensitive: bool,
        block: &mut BytesMut,
    ) {
        let (name, rule) = match name {
            Name::Field(name) => {
                let name = name.as_str().as_bytes();
                (name, find_rule(name))
            }
            Name::Method => (METHOD.name.as_bytes(), METHOD),
            Name::Scheme => (SCHEME.name.as_bytes(), SCHEME),
            Name::Authority => (AUTHORITY.name.as_bytes(), AUTHORITY),
            Name::Path => (PATH.name.as_bytes(), PATH),
            Name::Status => (STATUS.name.as_bytes(), STATUS),
            Name::Protocol => (PROTOCOL.name.as_bytes(), PROTOCOL),
        };
        let is_sensitive = is_sensitive
            || rule.is_confidential
            || (rule.index == COOKIE && value.len() < SHORT_COOKIE);
        if rule.index > 0
            && !is_sensitive
            && let Some(index) = static_field(rule.index, value)
        {
            block.put_u8(INDEXED.pattern | index);
            return;
        }
        // The name, the value and three integers of at most six octets.
        block.reserve(name.len() + value.len() + 18);
        if rule.max_values == 0 {
            let kind = if is_sensitive {
                NEVER_INDEXED
            } else {
                NOT_INDEXED
            };
            put_literal(block, kind, usize::from(rule.index), name, value);
            return;
        }
        self.encode_with_table((name, rule), value, is_sensitive, block);
    }

    fn encode_with_table(
        &mut self,
        (name, rule): (&[u8], Rule),
        value: &[u8],
        is_sensitive: bool,
        block: &mut BytesMut,
    ) {
        let found = self.table.find(rule.hash, name, value);
        let name_index = if rule.index > 0 {
            usize::from(rule.index)
        } else {
            found.name_index
        };
        if is_sensitive {
            put_literal(block, NEVER_INDEXED, name_index, name, value);
        } else if found.index > 0 {
            put_integer(block, INDEXED, found.index);
        } else if self.is_worth_indexing(&rule, found.values, name.len() + value.len()) {
            put_literal(block, NEWLY_INDEXED, name_index, name, value);
            self.table.insert(rule.hash, name, value);
        } else {
            put_literal(block, NOT_INDEXED, name_index, name, value);
        }
    }

    /// Whether a field becomes an entry of the table. `values` is the number of entries with its name, `length` the number of
    /// octets of its name and value.
    fn is_worth_indexing(&mut self, rule: &Rule, values: u8, length: usize) -> bool {
        // A field of more than half of the table would displace most of the other ones.
        if (length + FIELD_OVERHEAD) * 2 > self.table.max_size {
            return false;
        }
        if values < rule.max_values {
            return true;
        }
        if rule.max_values < MAX_VALUES {
            return false;
        }
        self.unindexed = self.unindexed.wrapping_add(1);
        self.unindexed.is_multiple_of(REPLACEMENT_INTERVAL)
    }
}

/// Representation of a field or of a size update: the pattern of its first octet and the number of bits that the first octet
/// leaves for an integer (RFC 7541 section 6).
#[derive(Clone, Copy)]
struct Representation {
    pattern: u8,
    prefix: u32,
}

const INDEXED: Representation = Representation {
    pattern: 0x80,
    prefix: 7,
};
const NEWLY_INDEXED: Representation = Representation {
    pattern: 0x40,
    prefix: 6,
};
const NOT_INDEXED: Representation = Representation {
    pattern: 0x00,
    prefix: 4,
};
const NEVER_INDEXED: Representation = Representation {
    pattern: 0x10,
    prefix: 4,
};
const SIZE_UPDATE: Representation = Representation {
    pattern: 0x20,
    prefix: 5,
};
/// A string without Huffman code (RFC 7541 section 5.2).
const STRING: Representation = Representation {
    pattern: 0x00,
    prefix: 7,
};

/// Writes an integer (RFC 7541 section 5.1).
fn put_integer(block: &mut BytesMut, representation: Representation, value: usize) {
    let Representation { pattern, prefix } = representation;
    let prefix_max = (1_usize << prefix) - 1;
    if value < prefix_max {
        block.put_u8(pattern | low_octet(value));
        return;
    }
    block.put_u8(pattern | low_octet(prefix_max));
    let mut rest = value - prefix_max;
    while rest >= 0x80 {
        block.put_u8(low_octet(rest) | 0x80);
        rest >>= 7;
    }
    block.put_u8(low_octet(rest));
}

fn low_octet(value: usize) -> u8 {
    value.to_le_bytes()[0]
}

fn put_string(block: &mut BytesMut, string: &[u8]) {
    put_integer(block, STRING, string.len());
    block.extend_from_slice(string);
}

/// Writes a field with its value, and with its name if `name_index` is 0 (RFC 7541 section 6.2).
fn put_literal(
    block: &mut BytesMut,
    kind: Representation,
    name_index: usize,
    name: &[u8],
    value: &[u8],
) {
    put_integer(block, kind, name_index);
    if name_index == 0 {
        put_string(block, name);
    }
    put_string(block, value);
}

/// Returns the index of the entry of the static table with this value. `name_index` is the first index of the name.
fn static_field(name_index: u8, value: &[u8]) -> Option<u8> {
    match (name_index, value) {
        (2, b"GET") | (4, b"/") | (6, b"http") | (8, b"200") | (16, b"gzip, deflate") => {
            Some(name_index)
        }
        (2, b"POST") => Some(3),
        (4, b"/index.html") => Some(5),
        (6, b"https") => Some(7),
        (8, b"204") => Some(9),
        (8, b"206") => Some(10),
        (8, b"304") => Some(11),
        (8, b"400") => Some(12),
        (8, b"404") => Some(13),
        (8, b"500") => Some(14),
        _ => None,
    }
}

/// How fields of one name are encoded.
#[derive(Clone, Copy)]
struct Rule {
    name: &'static str,
    hash: u32,
    /// First index of the name in the static table, or 0.
    index: u8,
    /// Number of values in the dynamic table. It is 1 for changing values whose name is not in the static table, so that at
    /// least the name is found in the dynamic table.
    max_values: u8,
    is_confidential: bool,
}

const AUTHORITY: Rule = rule(":authority");
const METHOD: Rule = rule(":method");
const PATH: Rule = rule(":path");
const SCHEME: Rule = rule(":scheme");
const STATUS: Rule = rule(":status");
const PROTOCOL: Rule = rule(":protocol");

/// Index of `cookie` in the static table.
const COOKIE: u8 = 32;

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

/// Number of names with a rule of their own: those of header fields in the static table (one name has no second entry) and the
/// changing ones that are not there.
const RULES: usize = static_table::LENGTH - (static_table::FIRST_HEADER - 1) + 15;

/// Rules of the names above. Other names have the rule of `find_rule`.
static NAMED_RULES: [Rule; RULES] = build_rules();

/// Positions in `NAMED_RULES` plus one, or 0, found by the hash of the name with linear probing.
static RULE_SLOTS: [u8; 256] = build_rule_slots();

const fn build_rules() -> [Rule; RULES] {
    let mut rules = [AUTHORITY; RULES];
    let mut count = 0;
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
        let mut slot = rules[position].hash as usize % 256;
        while slots[slot] != 0 {
            slot = (slot + 1) % 256;
        }
        slots[slot] = position as u8 + 1;
        position += 1;
    }
    slots
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
    let is_changing = contains(&CHANGING, name);
    let is_confidential = contains(&CONFIDENTIAL, name);
    let max_values = match (is_confidential, is_changing, index) {
        (true, ..) => 0,
        (_, true, 0) => 1,
        (_, true, _) => 0,
        (_, false, _) => MAX_VALUES,
    };
    Rule {
        name,
        hash: hash_name(name.as_bytes()),
        index,
        max_values,
        is_confidential,
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

fn find_rule(name: &[u8]) -> Rule {
    let hash = hash_name(name);
    let mut slot = hash as usize % 256;
    while let Some(rule) = usize::from(RULE_SLOTS[slot])
        .checked_sub(1)
        .and_then(|position| NAMED_RULES.get(position))
    {
        if rule.hash == hash && rule.name.as_bytes() == name {
            return *rule;
        }
        slot = (slot + 1) % 256;
    }
    Rule {
        name: "",
        hash,
        index: 0,
        max_values: MAX_VALUES,
        is_confidential: false,
    }
}

/// Hashes a name by its length, its first and its last octets, because names differ there and a hash of all octets takes several
/// times as long. Peers that choose names with equal hashes gain nothing: the table holds at most 128 entries.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the upper half of the product and a part of the length"
)]
const fn hash_name(name: &[u8]) -> u32 {
    let (first, last) = if let (Some(first), Some(last)) = (name.first_chunk(), name.last_chunk()) {
        (u64::from_le_bytes(*first), u64::from_le_bytes(*last))
    } else if let (Some(first), Some(last)) = (name.first_chunk(), name.last_chunk()) {
        (
            u32::from_le_bytes(*first) as u64,
            u32::from_le_bytes(*last) as u64,
        )
    } else if let [first, .., last] = name {
        (*first as u64, *last as u64)
    } else {
        (0, name.len() as u64)
    };
    let mixed = first ^ last.rotate_left(29) ^ (name.len() as u64) << 56;
    // 2^64 divided by the golden ratio.
    (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

/// Dynamic table of the encoder (RFC 7541 section 2.3.2).
///
/// Entries of names with equal hashes form a chain from the newest to the oldest. An entry that leaves the table needs no change
/// of its chain: the chain ends at the first number below that of the oldest entry.
#[derive(Debug)]
struct Table {
    /// The oldest entry comes first.
    entries: VecDeque<Entry>,
    /// Number of the newest entry for each hash modulo the number of chains, or 0.
    chains: [u64; CHAINS],
    /// Number of entries that left the table, which is one less than the number of the oldest entry.
    evicted: u64,
    size: usize,
    max_size: usize,
}

const CHAINS: usize = 32;

#[derive(Debug)]
struct Entry {
    hash: u32,
    name_length: u32,
    /// Number of the next older entry of the chain, or 0.
    older: u64,
    /// Name and value.
    octets: Box<[u8]>,
}

/// Result of a search. An index of 0 means that there is no such entry.
#[derive(Default)]
struct Found {
    /// Index of the entry with this name and value.
    index: usize,
    /// Index of the newest entry with this name.
    name_index: usize,
    /// Number of entries with this name.
    values: u8,
}

impl Table {
    fn new() -> Self {
        Self {
            entries: VecDeque::new(),
            chains: [0; CHAINS],
            evicted: 0,
            size: 0,
            max_size: DEFAULT_TABLE_SIZE,
        }
    }

    fn find(&self, hash: u32, name: &[u8], value: &[u8]) -> Found {
        let mut found = Found::default();
        let mut number = self.chains[hash as usize % CHAINS];
        while let Some((position, entry)) = self.entry(number) {
            number = entry.older;
            if entry.hash != hash {
                continue;
            }
            let Some((entry_name, entry_value)) =
                entry.octets.split_at_checked(entry.name_length as usize)
            else {
                continue;
            };
            if entry_name != name {
                continue;
            }
            let index = static_table::LENGTH + self.entries.len() - position;
            found.values += 1;
            if found.name_index == 0 {
                found.name_index = index;
            }
            if entry_value == value {
                found.index = index;
                break;
            }
        }
        found
    }

    /// Returns the entry with this number and its position in `entries`.
    fn entry(&self, number: u64) -> Option<(usize, &Entry)> {
        // 0 and numbers of entries that left the table become too large or fail.
        let position = usize::try_from(number.checked_sub(self.evicted + 1)?).ok()?;
        Some((position, self.entries.get(position)?))
    }

    fn insert(&mut self, hash: u32, name: &[u8], value: &[u8]) {
        let octets = [name, value].concat().into_boxed_slice();
        let size = octets.len() + FIELD_OVERHEAD;
        self.shrink_to(self.max_size.saturating_sub(size));
        let (Ok(name_length), true) = (u32::try_from(name.len()), size <= self.max_size) else {
            debug_assert!(false, "is_worth_indexing");
            return;
        };
        let chain = &mut self.chains[hash as usize % CHAINS];
        let older = *chain;
        *chain = self.evicted + self.entries.len() as u64 + 1;
        self.entries.push_back(Entry {
            hash,
            name_length,
            older,
            octets,
        });
        self.size += size;
    }

    fn set_max_size(&mut self, size: usize) {
        self.max_size = size;
        self.shrink_to(size);
        self.entries.shrink_to_fit();
    }

    fn shrink_to(&mut self, size: usize) {
        while self.size > size
            && let Some(entry) = self.entries.pop_front()
        {
            self.size -= entry.octets.len() + FIELD_OVERHEAD;
            self.evicted += 1;
        }
    }
}
