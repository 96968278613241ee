//! The pseudo-header field `:protocol` of an extended CONNECT (RFC 8441 section 4).

use bytes::Bytes;
use std::fmt;

/// Protocol of an extended CONNECT, an extension of a request.
#[derive(Clone, PartialEq, Eq)]
pub struct Protocol(Bytes);

impl Protocol {
    /// Returns the protocol's name.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }

    /// Returns the protocol with this name, unless the name is not UTF-8.
    pub(super) fn from_bytes(name: Bytes) -> Option<Self> {
        std::str::from_utf8(&name).is_ok().then_some(Self(name))
    }
}

impl From<&str> for Protocol {
    fn from(name: &str) -> Self {
        Self(Bytes::copy_from_slice(name.as_bytes()))
    }
}

impl fmt::Debug for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}
