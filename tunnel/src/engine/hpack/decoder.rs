//! Decoder of header blocks.

use super::{
    error::DecodeError,
    huffman,
    static_table::{self, DEFAULT_TABLE_SIZE, FIELD_OVERHEAD},
};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, StatusCode, header};
use std::{collections::VecDeque, str};

/// Decoded field. Its parts share their memory with the dynamic table, so that a field from the table costs no copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    Method(Method),
    /// Valid UTF-8, as all `Bytes` here.
    Scheme(Bytes),
    Authority(Bytes),
    Path(Bytes),
    Status(StatusCode),
    /// RFC 8441 section 4.
    Protocol(Bytes),
    Header(HeaderName, HeaderValue),
}

/// Decoder of all header blocks that one end of a connection receives.
#[derive(Debug)]
pub(crate) struct Decoder {
    table: Table,
    /// `SETTINGS_HEADER_TABLE_SIZE` that the peer acknowledged.
    limit: usize,
    /// Smallest limit since the last block, if the table was larger. The next block must begin with an update to this size or a
    /// smaller one (RFC 7541 section 4.2).
    required_update: Option<usize>,
    /// Memory for strings that are Huffman-coded.
    scratch: Vec<u8>,
}

/// `scratch` is kept from block to block up to this capacity.
const KEPT_SCRATCH: usize = 512;

impl Decoder {
    /// Returns a decoder with this `SETTINGS_HEADER_TABLE_SIZE`. A smaller one than the initial 4,096 octets must be set later,
    /// if the peer may send blocks before it has acknowledged the SETTINGS.
    pub(crate) fn new(max_size: usize) -> Self {
        let mut decoder = Self {
            table: Table::new(),
            limit: DEFAULT_TABLE_SIZE,
            required_update: None,
            scratch: Vec::new(),
        };
        decoder.set_max_size(max_size);
        decoder
    }

    /// Changes `SETTINGS_HEADER_TABLE_SIZE`. To be called when the peer has acknowledged it.
    pub(crate) fn set_max_size(&mut self, size: usize) {
        self.limit = size;
        if size < self.required_update.unwrap_or(self.table.max_size) {
            self.required_update = Some(size);
        }
    }

    /// Size of the dynamic table (RFC 7541 section 4.1).
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn table_size(&self) -> usize {
        self.table.size
    }

    /// Decodes a complete header block. `on_field` gets each field and its size (name, value and 32 octets, RFC 9113 section
    /// 6.5.2). The decoder goes on after fields that are malformed or that the caller ignores, because they belong to the table.
    pub(crate) fn decode(
        &mut self,
        block: &[u8],
        mut on_field: impl FnMut(Field, usize),
    ) -> Result<(), DecodeError> {
        let mut reader = Reader { rest: block };
        self.update_size(&mut reader)?;
        let mut is_malformed = false;
        while let Some(first) = reader.peek() {
            if first & 0x80 == 0 {
                let (field, size) = self.literal_field(first, &mut reader)?;
                match field {
                    Ok(field) => on_field(field, size),
                    Err(_) => is_malformed = true,
                }
                continue;
            }
            // An indexed field (RFC 7541 section 6.1).
            let index = reader.integer(7)?;
            if let Some((field, size)) = static_field(index) {
                on_field(field, size);
                continue;
            }
            let entry = self.table.get(index).ok_or(DecodeError::Compression)?;
            match &entry.field {
                Ok(field) => on_field(field.clone(), entry.size),
                Err(_) => is_malformed = true,
            }
        }
        if self.scratch.capacity() > KEPT_SCRATCH {
            self.scratch = Vec::new();
        }
        if is_malformed {
            Err(DecodeError::Malformed)
        } else {
            Ok(())
        }
    }

    /// Reads size updates, which stand only at the start of a block (RFC 7541 section 4.2).
    fn update_size(&mut self, reader: &mut Reader<'_>) -> Result<(), DecodeError> {
        while let Some(first) = reader.peek()
            && first & 0xe0 == 0x20
        {
            let size = reader.integer(5)?;
            if size > self.required_update.take().unwrap_or(self.limit) {
                return Err(DecodeError::Compression);
            }
            self.table.set_max_size(size);
        }
        if self.required_update.is_some() {
            Err(DecodeError::Compression)
        } else {
            Ok(())
        }
    }

    /// Decodes a field with a literal value (RFC 7541 section 6.2).
    fn literal_field(
        &mut self,
        first: u8,
        reader: &mut Reader<'_>,
    ) -> Result<(Result<Field, FieldName>, usize), DecodeError> {
        let is_newly_indexed = first & 0x40 != 0;
        if !is_newly_indexed && first & 0x20 != 0 {
            // A size update after a field.
            return Err(DecodeError::Compression);
        }
        let index = reader.integer(if is_newly_indexed { 6 } else { 4 })?;
        let name = if index == 0 {
            FieldName::new(reader.string(&mut self.scratch)?)
        } else if let Some(name) = FieldName::from_static_table(index) {
            name
        } else {
            self.table
                .get(index)
                .ok_or(DecodeError::Compression)?
                .name()
        };
        let value = reader.string(&mut self.scratch)?;
        let size = name.length() + value.len() + FIELD_OVERHEAD;
        let is_never_indexed = !is_newly_indexed && first & 0x10 != 0;
        let field = name.with_value(value, is_never_indexed);
        if is_newly_indexed {
            self.table.insert(&field, size);
        }
        Ok((field, size))
    }
}

/// Unread part of a header block.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.rest.first().copied()
    }

    /// Reads an integer whose first octet has a prefix of this many bits (RFC 7541 section 5.1).
    #[inline]
    fn integer(&mut self, prefix: u32) -> Result<usize, DecodeError> {
        let (first, rest) = self.rest.split_first().ok_or(DecodeError::Compression)?;
        self.rest = rest;
        let prefix_max = (1_usize << prefix) - 1;
        let value = usize::from(*first) & prefix_max;
        if value < prefix_max {
            Ok(value)
        } else {
            self.integer_rest(value)
        }
    }

    /// Reads the rest of an integer. More than four octets fail, so that the integer is below 2^28 + 2^7.
    fn integer_rest(&mut self, mut value: usize) -> Result<usize, DecodeError> {
        for shift in [0, 7, 14, 21] {
            let (octet, rest) = self.rest.split_first().ok_or(DecodeError::Compression)?;
            self.rest = rest;
            value += usize::from(octet & 0x7f) << shift;
            if octet & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(DecodeError::Compression)
    }

    /// Reads a string (RFC 7541 section 5.2). If it is Huffman-coded, it is decoded into `scratch`.
    fn string<'b>(&mut self, scratch: &'b mut Vec<u8>) -> Result<&'b [u8], DecodeError>
    where
        'a: 'b,
    {
        let is_huffman = self.peek().is_some_and(|octet| octet & 0x80 != 0);
        let length = self.integer(7)?;
        let (string, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or(DecodeError::Compression)?;
        self.rest = rest;
        if !is_huffman {
            return Ok(string);
        }
        let length = huffman::decode(string, scratch)?;
        scratch.get(..length).ok_or(DecodeError::Compression)
    }
}

/// Name of a field.
#[derive(Clone, Debug)]
enum FieldName {
    Method,
    Scheme,
    Authority,
    Path,
    Status,
    Protocol,
    Header(HeaderName),
    /// No valid name, and its length. Uppercase letters are invalid (RFC 9113 section 8.2.1).
    Invalid(usize),
}

impl FieldName {
    fn new(name: &[u8]) -> Self {
        if name.first() == Some(&b':') {
            return match name {
                b":method" => Self::Method,
                b":scheme" => Self::Scheme,
                b":authority" => Self::Authority,
                b":path" => Self::Path,
                b":status" => Self::Status,
                b":protocol" => Self::Protocol,
                _ => Self::Invalid(name.len()),
            };
        }
        HeaderName::from_lowercase(name).map_or(Self::Invalid(name.len()), Self::Header)
    }

    fn from_static_table(index: usize) -> Option<Self> {
        Some(match index {
            1 => Self::Authority,
            2 | 3 => Self::Method,
            4 | 5 => Self::Path,
            6 | 7 => Self::Scheme,
            8..static_table::FIRST_HEADER => Self::Status,
            _ => Self::Header(static_name(index)?.clone()),
        })
    }

    fn length(&self) -> usize {
        match self {
            Self::Path => ":path".len(),
            Self::Method | Self::Scheme | Self::Status => ":method".len(),
            Self::Protocol => ":protocol".len(),
            Self::Authority => ":authority".len(),
            Self::Header(name) => name.as_str().len(),
            Self::Invalid(length) => *length,
        }
    }

    /// Returns the field, or the name if one of both is invalid.
    fn with_value(self, value: &[u8], is_never_indexed: bool) -> Result<Field, Self> {
        let field = match self {
            Self::Header(name) => {
                return match HeaderValue::from_bytes(value) {
                    Ok(mut value) => {
                        // A proxy must forward the field in the same way (RFC 7541 section 6.2.3).
                        value.set_sensitive(is_never_indexed);
                        Ok(Field::Header(name, value))
                    }
                    Err(_) => Err(Self::Header(name)),
                };
            }
            Self::Method => Method::from_bytes(value).ok().map(Field::Method),
            Self::Status => StatusCode::from_bytes(value).ok().map(Field::Status),
            Self::Scheme => text(value).map(Field::Scheme),
            Self::Authority => text(value).map(Field::Authority),
            Self::Path => text(value).map(Field::Path),
            Self::Protocol => text(value).map(Field::Protocol),
            Self::Invalid(_) => None,
        };
        field.ok_or(self)
    }
}

fn text(value: &[u8]) -> Option<Bytes> {
    str::from_utf8(value)
        .ok()
        .map(|value| Bytes::copy_from_slice(value.as_bytes()))
}

/// Names of the header fields of the static table.
static NAMES: [HeaderName; static_table::LENGTH - static_table::FIRST_HEADER + 1] = [
    header::ACCEPT_CHARSET,
    header::ACCEPT_ENCODING,
    header::ACCEPT_LANGUAGE,
    header::ACCEPT_RANGES,
    header::ACCEPT,
    header::ACCESS_CONTROL_ALLOW_ORIGIN,
    header::AGE,
    header::ALLOW,
    header::AUTHORIZATION,
    header::CACHE_CONTROL,
    header::CONTENT_DISPOSITION,
    header::CONTENT_ENCODING,
    header::CONTENT_LANGUAGE,
    header::CONTENT_LENGTH,
    header::CONTENT_LOCATION,
    header::CONTENT_RANGE,
    header::CONTENT_TYPE,
    header::COOKIE,
    header::DATE,
    header::ETAG,
    header::EXPECT,
    header::EXPIRES,
    header::FROM,
    header::HOST,
    header::IF_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_NONE_MATCH,
    header::IF_RANGE,
    header::IF_UNMODIFIED_SINCE,
    header::LAST_MODIFIED,
    header::LINK,
    header::LOCATION,
    header::MAX_FORWARDS,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::RANGE,
    header::REFERER,
    header::REFRESH,
    header::RETRY_AFTER,
    header::SERVER,
    header::SET_COOKIE,
    header::STRICT_TRANSPORT_SECURITY,
    header::TRANSFER_ENCODING,
    header::USER_AGENT,
    header::VARY,
    header::VIA,
    header::WWW_AUTHENTICATE,
];

fn static_name(index: usize) -> Option<&'static HeaderName> {
    NAMES.get(index.checked_sub(static_table::FIRST_HEADER)?)
}

/// Returns a field of the static table and its size.
fn static_field(index: usize) -> Option<(Field, usize)> {
    let (name, value) = static_table::ENTRIES.get(index.checked_sub(1)?)?;
    let field = match index {
        1 => Field::Authority(Bytes::new()),
        2 => Field::Method(Method::GET),
        3 => Field::Method(Method::POST),
        4 | 5 => Field::Path(Bytes::from_static(value.as_bytes())),
        6 | 7 => Field::Scheme(Bytes::from_static(value.as_bytes())),
        8 => Field::Status(StatusCode::OK),
        9 => Field::Status(StatusCode::NO_CONTENT),
        10 => Field::Status(StatusCode::PARTIAL_CONTENT),
        11 => Field::Status(StatusCode::NOT_MODIFIED),
        12 => Field::Status(StatusCode::BAD_REQUEST),
        13 => Field::Status(StatusCode::NOT_FOUND),
        14 => Field::Status(StatusCode::INTERNAL_SERVER_ERROR),
        _ => Field::Header(static_name(index)?.clone(), HeaderValue::from_static(value)),
    };
    Some((field, name.len() + value.len() + FIELD_OVERHEAD))
}

/// Dynamic table of the decoder (RFC 7541 section 2.3.2).
#[derive(Debug)]
struct Table {
    /// The newest entry comes first.
    entries: VecDeque<Entry>,
    size: usize,
    max_size: usize,
}

/// Decoded field with its size. A field that is malformed still occupies the table: then only its name is of use.
#[derive(Debug)]
struct Entry {
    field: Result<Field, FieldName>,
    size: usize,
}

impl Entry {
    fn name(&self) -> FieldName {
        match &self.field {
            Ok(Field::Method(_)) => FieldName::Method,
            Ok(Field::Scheme(_)) => FieldName::Scheme,
            Ok(Field::Authority(_)) => FieldName::Authority,
            Ok(Field::Path(_)) => FieldName::Path,
            Ok(Field::Status(_)) => FieldName::Status,
            Ok(Field::Protocol(_)) => FieldName::Protocol,
            Ok(Field::Header(name, _)) => FieldName::Header(name.clone()),
            Err(name) => name.clone(),
        }
    }
}

impl Table {
    fn new() -> Self {
        Self {
            entries: VecDeque::new(),
            size: 0,
            max_size: DEFAULT_TABLE_SIZE,
        }
    }

    /// Returns the entry with this index, which counts from the end of the static table.
    fn get(&self, index: usize) -> Option<&Entry> {
        self.entries
            .get(index.checked_sub(static_table::LENGTH + 1)?)
    }

    /// Inserts a field. One that is larger than the table empties it (RFC 7541 section 4.4).
    fn insert(&mut self, field: &Result<Field, FieldName>, size: usize) {
        self.shrink_to(self.max_size.saturating_sub(size));
        if size <= self.max_size {
            self.entries.push_front(Entry {
                field: field.clone(),
                size,
            });
            self.size += size;
        }
    }

    fn set_max_size(&mut self, size: usize) {
        self.max_size = size;
        self.shrink_to(size);
        self.entries.shrink_to_fit();
    }

    fn shrink_to(&mut self, size: usize) {
        while self.size > size
            && let Some(entry) = self.entries.pop_back()
        {
            self.size -= entry.size;
        }
    }
}
