//! Request line of HTTP/1.1, on its way to hyper.
//!
//! hyper accepts targets of [`MAX_URI_BYTES`] bytes and knows the versions 1.0 and 1.1. The part of a target beyond that is
//! stored here for the request, and a later minor version is read as 1.1 (RFC 9110 section 2.5). The path always goes to hyper.

use crate::error::Reason;
use causeway_tunnel::request_target::{MAX_URI_BYTES, OverflowBuffer, TargetOverflow};

/// Longest name of a method, in bytes: RFC 9110 and RFC 3744 have none of more than 17.
const MAX_METHOD_BYTES: usize = 32;
/// Bytes of a target beyond its limit that are discarded. After them hyper refuses the head.
const MAX_DISCARDED_BYTES: usize = 4 << 20;
/// Version that is spoken, up to its last digit.
const VERSION: &[u8] = b"HTTP/1.";

/// The bytes of a target that hyper has not seen.
#[derive(Debug)]
pub enum LongTarget {
    /// They are the rest of the query.
    Rest(TargetOverflow),
    /// They are not stored, for this reason.
    Refused(Reason),
}

/// Position in a request's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParseState {
    /// The method, of which so many bytes were read.
    Method(usize),
    Target,
    /// The version, of which so many bytes were read.
    Version(usize),
    /// Behind the line, or in what is no request line of HTTP/1.1.
    Behind,
}

/// Follows the request line of each head.
#[derive(Debug)]
pub(super) struct RequestLine {
    at: ParseState,
    /// Bytes of the target.
    length: usize,
    has_query: bool,
    has_fragment: bool,
    rest: OverflowBuffer,
    refused: Option<Reason>,
    /// Longest rest that is stored.
    most: usize,
    other_version: bool,
}

impl RequestLine {
    /// Begins with the first head of a connection; targets of more than `limit` bytes are refused.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            at: ParseState::Method(0),
            length: 0,
            has_query: false,
            has_fragment: false,
            rest: OverflowBuffer::default(),
            refused: None,
            most: limit,
            other_version: false,
        }
    }

    /// Begins another head.
    pub(super) fn begin(&mut self) {
        *self = Self::new(self.most);
    }

    /// Whether the target is longer than hyper accepts, or has not come to its end.
    pub(super) fn is_target_too_long(&self) -> bool {
        self.at == ParseState::Target || self.length > MAX_URI_BYTES
    }

    /// Whether the line names another major version.
    pub(super) fn is_of_other_version(&self) -> bool {
        self.other_version
    }

    /// Takes the next bytes, and moves those for hyper to their beginning. Returns how many these are.
    pub(super) fn rewrite(&mut self, bytes: &mut [u8]) -> usize {
        if self.at == ParseState::Method(0) && is_token_byte(bytes) {
            self.at = ParseState::Behind;
        }
        if self.at == ParseState::Behind {
            return bytes.len();
        }
        let (mut read, mut kept) = (0, 0);
        while self.at != ParseState::Behind && read < bytes.len() {
            let rest = bytes.get_mut(read..).unwrap_or_default();
            let (passed, dropped) = match self.at {
                ParseState::Method(_) => (self.method(rest), 0),
                ParseState::Target => self.target(rest),
                ParseState::Version(at) => (self.version(at, rest), 0),
                ParseState::Behind => break,
            };
            if kept < read {
                bytes.copy_within(read..read + passed, kept);
            }
            kept += passed;
            read += passed + dropped;
        }
        if kept == read {
            return bytes.len();
        }
        bytes.copy_within(read.., kept);
        kept + bytes.len() - read
    }

    /// Returns the part of the target that hyper has not seen, once the target has come to its end.
    pub(super) fn take_overflow(&mut self) -> Option<LongTarget> {
        if self.at == ParseState::Target {
            return None;
        }
        if let Some(reason) = self.refused.take() {
            return Some(LongTarget::Refused(reason));
        }
        if self.rest.is_empty() {
            return None;
        }
        Some(LongTarget::Rest(std::mem::take(&mut self.rest).finish()))
    }

    fn method(&mut self, bytes: &[u8]) -> usize {
        let mut passed = 0;
        for byte in bytes {
            passed += 1;
            self.at = match (self.at, byte) {
                // RFC 9112 section 2.2 has the server ignore an empty line there.
                (ParseState::Method(0), b'\r' | b'\n') => ParseState::Method(0),
                (ParseState::Method(1..), b' ') => ParseState::Target,
                (ParseState::Method(at), byte)
                    if byte.is_ascii_graphic() && at < MAX_METHOD_BYTES =>
                {
                    ParseState::Method(at + 1)
                }
                _ => ParseState::Behind,
            };
            if !matches!(self.at, ParseState::Method(_)) {
                break;
            }
        }
        passed
    }

    /// Returns how many bytes of the target pass, and how many behind them do not.
    fn target(&mut self, bytes: &[u8]) -> (usize, usize) {
        let end = bytes
            .iter()
            .position(|byte| matches!(byte, b' ' | b'\r' | b'\n'));
        let target = bytes.get(..end.unwrap_or(bytes.len())).unwrap_or_default();
        let room = MAX_URI_BYTES.saturating_sub(self.length);
        let (passed, beyond) = target.split_at(room.min(target.len()));
        self.length += target.len();
        self.has_query |= passed.contains(&b'?');
        self.has_fragment |= passed.contains(&b'#');
        if !beyond.is_empty() {
            self.keep(beyond);
        }
        if end.is_some() {
            self.at = ParseState::Version(0);
        } else if self.length > MAX_URI_BYTES + self.most + MAX_DISCARDED_BYTES {
            // hyper refuses a head of this size and answers itself.
            self.at = ParseState::Behind;
            self.refused = Some(Reason::UriTooLong);
        }
        (passed.len(), beyond.len())
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.refused.is_some() {
            return;
        }
        // The policy checks the path that hyper has parsed.
        let reason = if !self.has_query || self.rest.len() + bytes.len() > self.most {
            Reason::UriTooLong
        } else if self.has_fragment || !bytes.iter().all(|byte| is_query_byte(*byte)) {
            Reason::Malformed
        } else if !self.rest.append(bytes) {
            Reason::LimitReached
        } else {
            return;
        };
        self.refused = Some(reason);
        self.rest = OverflowBuffer::default();
    }

    fn version(&mut self, mut at: usize, bytes: &mut [u8]) -> usize {
        let mut passed = 0;
        for byte in bytes {
            match VERSION.get(at) {
                Some(_) if *byte == b' ' && at == 0 => {
                    passed += 1;
                    continue;
                }
                Some(expected) if expected == byte => {}
                Some(b'1') if byte.is_ascii_digit() => self.other_version = true,
                Some(_) => {
                    self.at = ParseState::Behind;
                    return passed;
                }
                None => {
                    if matches!(byte, b'2'..=b'9') && !self.other_version {
                        *byte = b'1';
                    }
                    self.at = ParseState::Behind;
                    return passed + 1;
                }
            }
            at += 1;
            passed += 1;
        }
        self.at = ParseState::Version(at);
        passed
    }
}

/// Whether bytes begin with a whole line of HTTP/1.1 that hyper accepts unchanged. Almost all heads do.
fn is_token_byte(bytes: &[u8]) -> bool {
    let most = bytes.get(..MAX_URI_BYTES).unwrap_or(bytes);
    let end = memchr::memchr(b'\n', most);
    let line = end.and_then(|end| most.get(..end));
    line.is_some_and(|line| line.ends_with(b" HTTP/1.1\r"))
}

/// Whether a byte may stand in a query, by hyper's rules (`http::uri`).
fn is_query_byte(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b'#' | b'<' | b'>')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes the bytes in parts of this size. Returns those for hyper, and the part beyond.
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
            let Some(LongTarget::Rest(TargetOverflow(found))) = beyond else {
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
