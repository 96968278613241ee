//! HTTP/1.1 request line on its way to hyper.
//!
//! hyper accepts targets of at most [`MAX_URI_BYTES`] bytes and only the versions 1.0 and 1.1. The rest of a longer target is
//! stored here for the request. A later minor version is rewritten to 1.1 (RFC 9110 section 2.5). The path always goes to hyper.

use crate::error::Reason;
use causeway_tunnel::request_target::{MAX_URI_BYTES, OverflowBuffer, TargetOverflow};

/// Maximum length of a method name, in bytes: RFC 9110 and RFC 3744 have none of more than 17.
const MAX_METHOD_BYTES: usize = 32;
/// Maximum number of bytes of a target beyond its limit that are discarded. After them hyper refuses the head.
const MAX_DISCARDED_BYTES: usize = 4 << 20;
/// HTTP version up to its last digit.
const VERSION: &[u8] = b"HTTP/1.";

/// The rest of a target that is not passed to hyper.
#[derive(Debug)]
pub enum LongTarget {
    /// The rest of the query.
    Overflow(TargetOverflow),
    /// The rest was not stored, for this reason.
    Rejected(Reason),
}

/// Position of the parser in a request head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParseState {
    /// In the method, with the number of bytes read.
    Method(usize),
    Target,
    /// In the version, with the number of bytes read.
    Version(usize),
    /// After the line, or in bytes that are not an HTTP/1.1 request line.
    Done,
}

/// Parser of the request line of each head.
#[derive(Debug)]
pub(super) struct RequestLine {
    state: ParseState,
    /// Length of the target so far, in bytes.
    target_len: usize,
    has_query: bool,
    has_fragment: bool,
    overflow: OverflowBuffer,
    rejection: Option<Reason>,
    /// Maximum length of the stored rest, in bytes.
    max_overflow: usize,
    has_other_version: bool,
}

impl RequestLine {
    /// Returns a parser for the first head of a connection. Targets of more than `limit` bytes are refused.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            state: ParseState::Method(0),
            target_len: 0,
            has_query: false,
            has_fragment: false,
            overflow: OverflowBuffer::default(),
            rejection: None,
            max_overflow: limit,
            has_other_version: false,
        }
    }

    /// Begins the next head.
    pub(super) fn begin(&mut self) {
        *self = Self::new(self.max_overflow);
    }

    /// Whether the target is longer than hyper accepts, or is not complete.
    pub(super) fn is_target_too_long(&self) -> bool {
        self.state == ParseState::Target || self.target_len > MAX_URI_BYTES
    }

    /// Whether the line contains another major version.
    pub(super) fn has_other_version(&self) -> bool {
        self.has_other_version
    }

    /// Processes the next bytes, and moves those for hyper to the front. Returns the number of bytes for hyper.
    pub(super) fn rewrite(&mut self, bytes: &mut [u8]) -> usize {
        if self.state == ParseState::Method(0) && is_complete_http11_line(bytes) {
            self.state = ParseState::Done;
        }
        if self.state == ParseState::Done {
            return bytes.len();
        }
        let (mut read_len, mut kept_len) = (0, 0);
        while self.state != ParseState::Done && read_len < bytes.len() {
            let unread = bytes.get_mut(read_len..).unwrap_or_default();
            let (passed, dropped) = match self.state {
                ParseState::Method(_) => (self.parse_method(unread), 0),
                ParseState::Target => self.parse_target(unread),
                ParseState::Version(at) => (self.parse_version(at, unread), 0),
                ParseState::Done => break,
            };
            if kept_len < read_len {
                bytes.copy_within(read_len..read_len + passed, kept_len);
            }
            kept_len += passed;
            read_len += passed + dropped;
        }
        if kept_len == read_len {
            return bytes.len();
        }
        bytes.copy_within(read_len.., kept_len);
        kept_len + bytes.len() - read_len
    }

    /// Returns the part of the target that is not passed to hyper, when the target is complete.
    pub(super) fn take_overflow(&mut self) -> Option<LongTarget> {
        if self.state == ParseState::Target {
            return None;
        }
        if let Some(reason) = self.rejection.take() {
            return Some(LongTarget::Rejected(reason));
        }
        if self.overflow.is_empty() {
            return None;
        }
        Some(LongTarget::Overflow(
            std::mem::take(&mut self.overflow).finish(),
        ))
    }

    fn parse_method(&mut self, bytes: &[u8]) -> usize {
        let mut passed = 0;
        for byte in bytes {
            passed += 1;
            self.state = match (self.state, byte) {
                // A server should ignore an empty line there (RFC 9112 section 2.2).
                (ParseState::Method(0), b'\r' | b'\n') => ParseState::Method(0),
                (ParseState::Method(1..), b' ') => ParseState::Target,
                (ParseState::Method(at), byte)
                    if byte.is_ascii_graphic() && at < MAX_METHOD_BYTES =>
                {
                    ParseState::Method(at + 1)
                }
                _ => ParseState::Done,
            };
            if !matches!(self.state, ParseState::Method(_)) {
                break;
            }
        }
        passed
    }

    /// Returns the number of target bytes that pass to hyper, and the number of target bytes after them that do not.
    fn parse_target(&mut self, bytes: &[u8]) -> (usize, usize) {
        let end = bytes
            .iter()
            .position(|byte| matches!(byte, b' ' | b'\r' | b'\n'));
        let target = bytes.get(..end.unwrap_or(bytes.len())).unwrap_or_default();
        let remaining = MAX_URI_BYTES.saturating_sub(self.target_len);
        let (passed, overflow) = target.split_at(remaining.min(target.len()));
        self.target_len += target.len();
        self.has_query |= passed.contains(&b'?');
        self.has_fragment |= passed.contains(&b'#');
        if !overflow.is_empty() {
            self.store_overflow(overflow);
        }
        if end.is_some() {
            self.state = ParseState::Version(0);
        } else if self.target_len > MAX_URI_BYTES + self.max_overflow + MAX_DISCARDED_BYTES {
            // hyper refuses a head of this size and sends its own response.
            self.state = ParseState::Done;
            self.rejection = Some(Reason::UriTooLong);
        }
        (passed.len(), overflow.len())
    }

    fn store_overflow(&mut self, bytes: &[u8]) {
        if self.rejection.is_some() {
            return;
        }
        // The path must not exceed the limit, because the policy checks the path that hyper has parsed.
        let reason = if !self.has_query || self.overflow.len() + bytes.len() > self.max_overflow {
            Reason::UriTooLong
        } else if self.has_fragment || !bytes.iter().all(|byte| is_query_byte(*byte)) {
            Reason::Malformed
        } else if !self.overflow.append(bytes) {
            Reason::LimitReached
        } else {
            return;
        };
        self.rejection = Some(reason);
        self.overflow = OverflowBuffer::default();
    }

    fn parse_version(&mut self, mut at: usize, bytes: &mut [u8]) -> usize {
        let mut passed = 0;
        for byte in bytes {
            match VERSION.get(at) {
                Some(_) if *byte == b' ' && at == 0 => {
                    passed += 1;
                    continue;
                }
                Some(expected) if expected == byte => {}
                Some(b'1') if byte.is_ascii_digit() => self.has_other_version = true,
                Some(_) => {
                    self.state = ParseState::Done;
                    return passed;
                }
                None => {
                    if matches!(byte, b'2'..=b'9') && !self.has_other_version {
                        *byte = b'1';
                    }
                    self.state = ParseState::Done;
                    return passed + 1;
                }
            }
            at += 1;
            passed += 1;
        }
        self.state = ParseState::Version(at);
        passed
    }
}

/// Whether the bytes begin with a whole HTTP/1.1 line that hyper accepts unchanged, as almost all heads do.
fn is_complete_http11_line(bytes: &[u8]) -> bool {
    let prefix = bytes.get(..MAX_URI_BYTES).unwrap_or(bytes);
    let end = memchr::memchr(b'\n', prefix);
    let line = end.and_then(|end| prefix.get(..end));
    line.is_some_and(|line| line.ends_with(b" HTTP/1.1\r"))
}

/// Whether a query may contain this byte, by hyper's rules (`http::uri`).
fn is_query_byte(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b'#' | b'<' | b'>')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes the bytes in parts of this size. Returns the bytes for hyper, and the rest of the target.
    fn passed(bytes: &str, cut: usize) -> (String, Option<LongTarget>) {
        let (mut line, mut kept, mut beyond) = (RequestLine::new(100_000), Vec::new(), None);
        for part in bytes.as_bytes().chunks(cut) {
            let mut part = part.to_vec();
            let length = line.rewrite(&mut part);
            kept.extend_from_slice(&part[..length]);
            beyond = beyond.or(line.take_overflow());
        }
        (String::from_utf8(kept).unwrap(), beyond)
    }

    #[test]
    fn the_line_is_parsed_for_every_split() {
        let query = "0123456789".repeat(7_000);
        let target = format!("/a?{query}");
        let (first, rest) = target.split_at(MAX_URI_BYTES);
        let head = format!("\r\nGET {target} HTTP/1.2\r\nA: GET /a HTTP/1.2\r\n\r\n");
        let expected = format!("\r\nGET {first} HTTP/1.1\r\nA: GET /a HTTP/1.2\r\n\r\n");
        for cut in [1, 2, 7, 65_533, 65_539, 65_540, 65_541, 70_000, 100_000] {
            let (kept, beyond) = passed(&head, cut);
            assert!(kept == expected, "{cut}");
            let Some(LongTarget::Overflow(TargetOverflow(found))) = beyond else {
                panic!("{cut}: {beyond:?}");
            };
            assert!(found == rest, "{cut}");
        }
    }

    #[test]
    fn short_targets_and_other_bytes_pass_unchanged() {
        let long = "x".repeat(200_000);
        for bytes in [
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
            "GET / HTTP/1.0\r\nA: b HTTP/1.2\r\n\r\n".to_owned(),
            "GET /\r\n\r\n".to_owned(),
            format!("{long} {long}"),
            format!("GET / HTTP/1.1\r\nA: {long}\r\n\r\n"),
        ] {
            for cut in [1, 5, 70_000, 1_000_000] {
                let (kept, beyond) = passed(&bytes, cut);
                assert!(kept == bytes && beyond.is_none(), "{cut}");
            }
        }
    }
}
