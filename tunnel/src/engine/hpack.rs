//! HPACK, the compression of header fields in HTTP/2 (RFC 7541).
//!
//! The decoder implements all of the RFC. The encoder uses both tables but no Huffman code. In this module the fields of a
//! request are those that the engine sends and receives: pseudo-header fields and the fields of a `HeaderMap`.

mod decoder;
mod encoder;
mod huffman;
mod indexing_rules;
mod static_table;

#[cfg(test)]
mod tests;

pub(super) use decoder::{Decoder, Field};
pub(super) use encoder::{Encoder, Name};

/// Error of a header block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum DecodeError {
    /// The encoding is invalid, and the table may differ from that of the peer. This is a connection error of type
    /// `COMPRESSION_ERROR` (RFC 9113 section 4.3).
    #[error("invalid HPACK encoding")]
    Compression,
    /// A field has an invalid name or value. The request or response is malformed, which is a stream error (RFC 9113
    /// section 8.1.1). All other fields were decoded.
    #[error("invalid name or value of a header field")]
    Malformed,
}

/// Size of the dynamic table before SETTINGS change it (RFC 9113 section 6.5.2).
const DEFAULT_TABLE_SIZE: usize = 4096;

/// Size that each field has in addition to its name and value (RFC 7541 section 4.1, RFC 9113 section 6.5.2).
const FIELD_OVERHEAD: usize = 32;
