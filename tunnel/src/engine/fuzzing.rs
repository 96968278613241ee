//! The pure parts of the engine as functions over bytes, for the fuzz targets.

use super::{
    error::Reason,
    frame::{self, HEAD_LEN, Head, Settings, flag, kind},
    hpack::{DecodeError, Decoder, Encoder, Field, Name},
};
use bytes::{Bytes, BytesMut};
use http::HeaderName;

/// Parses the first frame of `bytes`, and writes what was parsed again. Returns the frame's length as well, and `None` if the
/// frame is incomplete.
///
/// # Errors
/// The code of the error that the frame is, whatever the state of its stream.
pub fn rewrite_frame(bytes: &[u8]) -> Option<(usize, Result<BytesMut, Reason>)> {
    let head = Head::parse(bytes)?;
    let length = HEAD_LEN + head.length;
    let payload = bytes.get(HEAD_LEN..length)?;
    let mut out = BytesMut::new();
    let written = rewrite(head, payload, &mut out);
    Some((length, written.map(|()| out)))
}

fn rewrite(head: Head, payload: &[u8], out: &mut BytesMut) -> Result<(), Reason> {
    match head.kind {
        kind::HEADERS => {
            let fragment = frame::header_fragment(head, payload)?;
            let end_stream = head.has(flag::END_STREAM);
            frame::put_block(out, (head.stream, end_stream), payload.len(), |block| {
                block.extend_from_slice(fragment);
            });
        }
        kind::RST_STREAM => {
            frame::put_reset(out, head.stream, frame::parse_u32(payload)?.into());
        }
        kind::SETTINGS if !head.has(flag::ACK) => Settings::parse(payload)?.put(out),
        kind::GOAWAY => {
            let (last, reason, text) = frame::parse_go_away(payload)?;
            frame::put_go_away(out, last, reason, text);
        }
        kind::WINDOW_UPDATE => {
            frame::put_window_update(out, head.stream, frame::parse_increment(payload)?);
        }
        _ => frame::put_frame(out, head.kind, head.flags, head.stream, payload),
    }
    Ok(())
}

/// Field of a header block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HpackField {
    /// Name, with the colon of a pseudo-header field.
    pub name: Bytes,
    /// Value of the field.
    pub value: Bytes,
    /// Whether no intermediary may index the field (RFC 7541 section 7.1.3).
    pub is_sensitive: bool,
    /// Size, in bytes (RFC 7541 section 4.1).
    pub size: usize,
}

impl HpackField {
    fn new(field: Field, size: usize) -> Self {
        let is_sensitive = matches!(&field, Field::Header(_, value) if value.is_sensitive());
        let copy = Bytes::copy_from_slice;
        let (name, value) = match field {
            Field::Method(method) => (":method", copy(method.as_str().as_bytes())),
            Field::Scheme(scheme) => (":scheme", scheme),
            Field::Authority(authority) => (":authority", authority),
            Field::Path(path) => (":path", path),
            Field::Status(status) => (":status", copy(status.as_str().as_bytes())),
            Field::Protocol(protocol) => (":protocol", protocol),
            Field::Header(name, value) => {
                return Self {
                    name: copy(name.as_str().as_bytes()),
                    value: copy(value.as_bytes()),
                    is_sensitive,
                    size,
                };
            }
        };
        Self {
            name: Bytes::from_static(name.as_bytes()),
            value,
            is_sensitive,
            size,
        }
    }
}

/// Decoder of the header blocks of one end of a connection.
#[derive(Debug)]
pub struct HpackDecoder(Decoder);

impl HpackDecoder {
    /// Creates a decoder with this `SETTINGS_HEADER_TABLE_SIZE`.
    pub fn new(max_size: usize) -> Self {
        Self(Decoder::new(max_size))
    }

    /// Changes `SETTINGS_HEADER_TABLE_SIZE`, which the peer has acknowledged.
    pub fn set_max_size(&mut self, size: usize) {
        self.0.set_max_size(size);
    }

    /// Returns the size of the dynamic table, in bytes.
    pub fn table_size(&self) -> usize {
        self.0.table_size()
    }

    /// Decodes a block. Returns its valid fields, and the code of the error that the block is.
    pub fn decode(&mut self, block: &[u8]) -> (Vec<HpackField>, Result<(), Reason>) {
        let mut fields = Vec::new();
        let decoded = self.0.decode(block, |field, size| {
            fields.push(HpackField::new(field, size));
        });
        let decoded = decoded.map_err(|error| match error {
            DecodeError::Malformed => Reason::PROTOCOL_ERROR,
            DecodeError::Compression => Reason::COMPRESSION_ERROR,
        });
        (fields, decoded)
    }
}

/// Encoder of the header blocks of one end of a connection.
#[derive(Debug)]
pub struct HpackEncoder(Encoder);

impl HpackEncoder {
    /// Creates an encoder for a peer with this `SETTINGS_HEADER_TABLE_SIZE`.
    pub fn new(max_size: usize) -> Self {
        Self(Encoder::new(max_size))
    }

    /// Obeys a changed `SETTINGS_HEADER_TABLE_SIZE` of the peer.
    pub fn set_max_size(&mut self, size: usize) {
        self.0.set_max_size(size);
    }

    /// Encodes a block. Fields with invalid names are left out.
    pub fn encode(&mut self, fields: &[HpackField]) -> BytesMut {
        let mut block = BytesMut::new();
        self.0.begin(&mut block);
        for field in fields {
            let name = HeaderName::from_lowercase(&field.name);
            let name = match (&field.name[..], &name) {
                (b":method", _) => Name::Method,
                (b":scheme", _) => Name::Scheme,
                (b":authority", _) => Name::Authority,
                (b":path", _) => Name::Path,
                (b":status", _) => Name::Status,
                (b":protocol", _) => Name::Protocol,
                (_, Ok(name)) => Name::Field(name),
                (_, Err(_)) => continue,
            };
            self.0
                .encode(name, &field.value, field.is_sensitive, &mut block);
        }
        block
    }
}
