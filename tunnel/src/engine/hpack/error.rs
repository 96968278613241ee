//! Errors of header blocks.

/// Error of a header block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DecodeError {
    /// The encoding is invalid, and the table may differ from that of the peer. This is a connection error of type
    /// `COMPRESSION_ERROR` (RFC 9113 section 4.3).
    #[error("invalid HPACK encoding")]
    Compression,
    /// A field has an invalid name or value. The request or response is malformed, which is a stream error (RFC 9113
    /// section 8.1.1). All other fields were decoded.
    #[error("invalid name or value of a header field")]
    Malformed,
}
