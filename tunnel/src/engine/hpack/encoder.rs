//! Encoder of header blocks.

use super::{
    indexing_rules::{
        AUTHORITY, FieldName, MAX_VALUES, METHOD, PATH, PROTOCOL, Rule, SCHEME, STATUS,
    },
    static_table::{self, DEFAULT_TABLE_SIZE, FIELD_OVERHEAD},
};
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
/// Strings are not Huffman-coded. The code would save a third of the octets of literals, but take about 2,800 instructions for a
/// typical request, and more at the peer. The dynamic table saves most octets in any case.
#[derive(Debug)]
pub(crate) struct Encoder {
    table: Table,
    /// Smallest size that the table had since the last block, if the size changed. The peer must learn this size as well as
    /// the last one (RFC 7541 section 4.2).
    smallest_size: Option<usize>,
    /// Number of fields that were not indexed because their names had `MAX_VALUES` values in the table.
    unindexed: usize,
}

/// A name with `MAX_VALUES` values in the table still gets each n-th new value indexed, because the old ones may be out of use.
const REPLACEMENT_INTERVAL: usize = 8;

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
        let name = match name {
            Name::Field(name) => FieldName::new(name.as_str().as_bytes()),
            Name::Method => FieldName::with_rule(&METHOD),
            Name::Scheme => FieldName::with_rule(&SCHEME),
            Name::Authority => FieldName::with_rule(&AUTHORITY),
            Name::Path => FieldName::with_rule(&PATH),
            Name::Status => FieldName::with_rule(&STATUS),
            Name::Protocol => FieldName::with_rule(&PROTOCOL),
        };
        let rule = name.rule;
        // The name, the value and three integers of at most six octets.
        block.reserve(name.octets.len() + value.len() + 18);
        let is_sensitive = is_sensitive || value.len() < rule.sensitive_below;
        if !is_sensitive
            && rule.has_static_values
            && let Some(index) = static_field(rule.index, value)
        {
            block.put_u8(INDEXED.pattern | index);
        } else if is_sensitive || rule.max_values == 0 {
            self.encode_unindexed(&name, value, is_sensitive, block);
        } else {
            self.encode_with_table(&name, value, block);
        }
    }

    /// Encodes a field as a literal that does not become an entry of the dynamic table. Its name may be there.
    fn encode_unindexed(
        &self,
        name: &FieldName<'_>,
        value: &[u8],
        is_sensitive: bool,
        block: &mut BytesMut,
    ) {
        let rule = name.rule;
        let kind = if is_sensitive {
            NEVER_INDEXED
        } else {
            NOT_INDEXED
        };
        let mut name_index = usize::from(rule.index);
        if name_index == 0 && rule.max_values > 0 {
            name_index = self.table.find(name, value).name_index;
        }
        put_literal(block, kind, name_index, name.octets, value);
    }

    fn encode_with_table(&mut self, name: &FieldName<'_>, value: &[u8], block: &mut BytesMut) {
        let found = self.table.find(name, value);
        if found.index > 0 {
            put_integer(block, INDEXED, found.index);
            return;
        }
        let rule = name.rule;
        let name_index = if rule.index > 0 {
            usize::from(rule.index)
        } else {
            found.name_index
        };
        if self.is_worth_indexing(rule, found.values, name.octets.len() + value.len()) {
            put_literal(block, NEWLY_INDEXED, name_index, name.octets, value);
            self.table.insert(name, value);
        } else {
            put_literal(block, NOT_INDEXED, name_index, name.octets, value);
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
#[inline]
fn put_integer(block: &mut BytesMut, representation: Representation, value: usize) {
    let Representation { pattern, prefix } = representation;
    let prefix_max = (1_usize << prefix) - 1;
    if value < prefix_max {
        block.put_u8(pattern | low_octet(value));
    } else {
        block.put_u8(pattern | low_octet(prefix_max));
        put_integer_rest(block, value - prefix_max);
    }
}

fn put_integer_rest(block: &mut BytesMut, mut rest: usize) {
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
    match name_index {
        2 => match value {
            b"GET" => Some(2),
            b"POST" => Some(3),
            _ => None,
        },
        4 => match value {
            b"/" => Some(4),
            b"/index.html" => Some(5),
            _ => None,
        },
        6 => match value {
            b"http" => Some(6),
            b"https" => Some(7),
            _ => None,
        },
        8 => match value {
            b"200" => Some(8),
            b"204" => Some(9),
            b"206" => Some(10),
            b"304" => Some(11),
            b"400" => Some(12),
            b"404" => Some(13),
            b"500" => Some(14),
            _ => None,
        },
        16 if value == b"gzip, deflate" => Some(16),
        _ => None,
    }
}

/// Dynamic table of the encoder (RFC 7541 section 2.3.2).
///
/// Entries of names whose keys begin with the same five bits form a chain from the newest to the oldest. An entry that leaves
/// the table needs no change of its chain: the chain ends at the first number below that of the oldest entry.
#[derive(Debug)]
struct Table {
    /// The oldest entry comes first.
    entries: VecDeque<Entry>,
    /// Number of the newest entry of each chain, or 0.
    chains: [u64; CHAINS],
    /// Number of entries that left the table, which is one less than the number of the oldest entry.
    evicted: u64,
    size: usize,
    max_size: usize,
}

const CHAINS: usize = 32;

fn chain(key: u32) -> usize {
    (key >> 27) as usize
}

#[derive(Debug)]
struct Entry {
    /// Key of the name, see `FieldName`.
    key: u32,
    name_length: u32,
    /// Number of the next older entry of the chain, or 0.
    older: u64,
    /// Name and value.
    octets: Box<[u8]>,
}

/// Result of a search. An index of 0 means that there is no such entry.
#[derive(Default)]
struct TableMatch {
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

    fn find(&self, name: &FieldName<'_>, value: &[u8]) -> TableMatch {
        let mut found = TableMatch::default();
        let mut number = self.chains[chain(name.key)];
        while let Some((position, entry)) = self.entry(number) {
            number = entry.older;
            if entry.key != name.key {
                continue;
            }
            let Some((entry_name, entry_value)) =
                entry.octets.split_at_checked(entry.name_length as usize)
            else {
                continue;
            };
            if !name.has_unique_key() && entry_name != name.octets {
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

    fn insert(&mut self, name: &FieldName<'_>, value: &[u8]) {
        let octets = [name.octets, value].concat().into_boxed_slice();
        let size = octets.len() + FIELD_OVERHEAD;
        self.shrink_to(self.max_size.saturating_sub(size));
        let (Ok(name_length), true) = (u32::try_from(name.octets.len()), size <= self.max_size)
        else {
            debug_assert!(
                false,
                "`is_worth_indexing` allowed a field that is larger than the table"
            );
            return;
        };
        let newest = &mut self.chains[chain(name.key)];
        let older = *newest;
        *newest = self.evicted + self.entries.len() as u64 + 1;
        self.entries.push_back(Entry {
            key: name.key,
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
