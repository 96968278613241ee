//! HPACK, the compression of header fields in HTTP/2 (RFC 7541).
//!
//! The decoder implements all of the RFC. The encoder uses both tables but no Huffman code. In this module the fields of a
//! request are those that the engine sends and receives: pseudo-header fields and the fields of a `HeaderMap`.

mod decoder;
mod encoder;
mod error;
mod huffman;
mod indexing_rules;
mod static_table;

#[cfg(test)]
mod tests;

pub(super) use decoder::{Decoder, Field};
pub(super) use encoder::{Encoder, Name};
pub(super) use error::DecodeError;
