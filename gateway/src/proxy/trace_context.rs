//! Trace identifiers of streams (W3C Trace Context, level 1).
//!
//! The gateway exports no spans. A client's `traceparent` and `tracestate` therefore pass unchanged, and none is added. A parent
//! that is never exported would remove the root from the application's trace, and its sampled flag would override samplers. The
//! identifier here is only for the access record and the problem body.

use data_encoding::HEXLOWER;
use http::{HeaderMap, HeaderName, HeaderValue};

/// Trace field of section 3.2 of the recommendation.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Number of hexadecimal digits of the identifiers of a trace and of a span.
const TRACE_ID_LEN: usize = 32;
const SPAN_ID_LEN: usize = 16;

/// Identifier of a stream in access records and problem bodies: the trace of a valid `traceparent`, or else a random one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trace([u8; TRACE_ID_LEN]);

impl Trace {
    /// Returns the trace of the client's `traceparent`, or a new identifier if that is absent or invalid.
    pub fn from_headers(fields: &HeaderMap) -> Self {
        let mut all = fields.get_all(TRACEPARENT).iter();
        match (all.next(), all.next()) {
            (Some(only), None) => trace_id(only).map_or_else(Self::generate, Self),
            // Several fields are treated as none, because it is not clear which one is valid.
            _ => Self::generate(),
        }
    }

    /// Returns a new identifier.
    pub fn generate() -> Self {
        let bytes: [u8; TRACE_ID_LEN / 2] = rand::random();
        let mut id = [0; TRACE_ID_LEN];
        HEXLOWER.encode_mut(&bytes, &mut id);
        Self(id)
    }

    /// Returns the trace with these hexadecimal digits.
    pub fn parse(digits: &[u8]) -> Option<Self> {
        let is_hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let all: [u8; TRACE_ID_LEN] = digits.try_into().ok()?;
        all.iter().all(is_hex).then_some(Self(all))
    }

    /// Returns the 32 hexadecimal digits.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

/// Keeps `traceparent` out of the dynamic table of HPACK (RFC 7541 section 6.2.3), because its value never repeats and would
/// evict values that do.
pub(super) fn never_index(fields: &mut HeaderMap) {
    if let Some(value) = fields.get_mut(TRACEPARENT) {
        value.set_sensitive(true);
    }
}

/// Returns the trace identifier of a valid `traceparent` (section 3.2.2): version, trace, span, flags. Later versions may
/// append to it.
fn trace_id(value: &HeaderValue) -> Option<[u8; TRACE_ID_LEN]> {
    let mut parts = value.as_bytes().split(|byte| *byte == b'-');
    let (version, trace, span) = (parts.next()?, parts.next()?, parts.next()?);
    let flags = parts.next()?;
    let is_last = parts.next().is_none();
    let is_hex = |part: &[u8], length: usize| {
        part.len() == length
            && part
                .iter()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_all_zero = |part: &[u8]| part.iter().all(|byte| *byte == b'0');
    let valid = is_hex(version, 2)
        && version != b"ff"
        && (is_last || version != b"00")
        && is_hex(trace, TRACE_ID_LEN)
        && is_hex(span, SPAN_ID_LEN)
        && is_hex(flags, 2)
        && !is_all_zero(trace)
        && !is_all_zero(span);
    valid.then(|| trace.try_into().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAME: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn with(text: &str) -> HeaderMap {
        let mut fields = HeaderMap::new();
        fields.insert(TRACEPARENT, HeaderValue::from_str(text).unwrap());
        fields
    }

    #[test]
    fn a_valid_traceparent_names_the_trace() {
        for text in [
            format!("00-{CAME}-00f067aa0ba902b7-01"),
            // A later version may append fields.
            format!("01-{CAME}-00f067aa0ba902b7-01-more"),
        ] {
            assert_eq!(Trace::from_headers(&with(&text)).as_str(), CAME);
        }
    }

    #[test]
    fn an_invalid_traceparent_names_no_trace() {
        for text in [
            &format!("00-{CAME}-0000000000000000-01"),
            &format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
            &format!("ff-{CAME}-00f067aa0ba902b7-01"),
            &format!("00-{}-00f067aa0ba902b7-01", CAME.to_uppercase()),
            &format!("00-{CAME}-00f067aa0ba902b7"),
            &format!("00-{CAME}-00f067aa0ba902b7-01-more"),
            "nonsense",
        ] {
            let trace = Trace::from_headers(&with(text));
            assert_ne!(trace.as_str(), CAME, "{text}");
            assert_eq!(trace.as_str().len(), TRACE_ID_LEN);
        }
        let mut twice = with(&format!("00-{CAME}-00f067aa0ba902b7-01"));
        twice.append(TRACEPARENT, twice[TRACEPARENT].clone());
        assert_ne!(Trace::from_headers(&twice).as_str(), CAME);
        assert_ne!(Trace::from_headers(&HeaderMap::new()), Trace::generate());
    }

    #[test]
    fn a_traceparent_is_kept_out_of_hpacks_table_and_none_is_added() {
        let mut fields = with("nonsense");
        never_index(&mut fields);
        assert_eq!(fields[TRACEPARENT], "nonsense");
        assert!(fields[TRACEPARENT].is_sensitive());
        let mut none = HeaderMap::new();
        never_index(&mut none);
        assert!(none.is_empty());
    }
}
