//! A stream's place in a trace: W3C Trace Context, level 1.
//!
//! What a caller sent in `traceparent` passes as it came. Where it sent none, or nonsense, the trace begins here. This
//! is done for every request, so it formats into a buffer of its own.

use data_encoding::HEXLOWER;
use http::{HeaderMap, HeaderName, HeaderValue};

/// §3.3 of the recommendation.
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
/// §3.2 of the recommendation.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Hex digits of a trace's id, and of a span's: two for each byte.
const TRACE: usize = 32;
const SPAN: usize = 16;
const BYTES: usize = TRACE / 2 + SPAN / 2;

/// The trace of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trace {
    id: [u8; TRACE],
    /// This hop's span, for where the caller sent none.
    span: [u8; SPAN],
    /// Whether the caller's is sound.
    came: bool,
}

impl Trace {
    /// The caller's, if its `traceparent` is sound, or a new one.
    pub fn of(fields: &HeaderMap) -> Self {
        let mut all = fields.get_all(TRACEPARENT).iter();
        let mut trace = Self::begin();
        // Two are none: nobody can tell which counts.
        if let (Some(only), None) = (all.next(), all.next())
            && let Some(id) = sound(only)
        {
            (trace.id, trace.came) = (id, true);
        }
        trace
    }

    /// A new one.
    pub fn begin() -> Self {
        let bytes: [u8; BYTES] = rand::random();
        let (mut id, mut span) = ([0; TRACE], [0; SPAN]);
        HEXLOWER.encode_mut(&bytes[..TRACE / 2], &mut id);
        HEXLOWER.encode_mut(&bytes[TRACE / 2..], &mut span);
        Self {
            id,
            span,
            came: false,
        }
    }

    /// Its id: 32 hex digits.
    pub fn as_str(&self) -> &str {
        // Hex digits all of them.
        std::str::from_utf8(&self.id).unwrap_or_default()
    }

    /// Puts `traceparent` into a head that has no sound one, or has it no more. Its value never comes again: in HPACK's
    /// table it would push out what does (RFC 7541 §6.2.3).
    pub fn put(&self, fields: &mut HeaderMap) {
        if !self.came {
            // It belongs to what was replaced (§4.3).
            fields.remove(TRACESTATE);
        }
        if !self.came || !fields.contains_key(TRACEPARENT) {
            let mut text = *b"00-00000000000000000000000000000000-0000000000000000-01";
            text[3..3 + TRACE].copy_from_slice(&self.id);
            text[4 + TRACE..4 + TRACE + SPAN].copy_from_slice(&self.span);
            if let Ok(value) = HeaderValue::from_bytes(&text) {
                fields.insert(TRACEPARENT, value);
            }
        }
        if let Some(value) = fields.get_mut(TRACEPARENT) {
            value.set_sensitive(true);
        }
    }
}

/// The trace's id of a sound `traceparent` (§3.2.2): version, trace, span, flags; later versions may add to it.
fn sound(value: &HeaderValue) -> Option<[u8; TRACE]> {
    let mut parts = value.as_bytes().split(|byte| *byte == b'-');
    let (version, trace, span) = (parts.next()?, parts.next()?, parts.next()?);
    let flags = parts.next()?;
    let ends = parts.next().is_none();
    let is_hex = |part: &[u8], length: usize| {
        part.len() == length
            && part
                .iter()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let zero = |part: &[u8]| part.iter().all(|byte| *byte == b'0');
    let sound = is_hex(version, 2)
        && version != b"ff"
        && (ends || version != b"00")
        && is_hex(trace, TRACE)
        && is_hex(span, SPAN)
        && is_hex(flags, 2)
        && !zero(trace)
        && !zero(span);
    sound.then(|| trace.try_into().ok()).flatten()
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
    fn a_sound_traceparent_passes_as_it_came() {
        for text in [
            format!("00-{CAME}-00f067aa0ba902b7-01"),
            // A later version may say more.
            format!("01-{CAME}-00f067aa0ba902b7-01-more"),
        ] {
            let mut fields = with(&text);
            let trace = Trace::of(&fields);
            assert_eq!(trace.as_str(), CAME);
            trace.put(&mut fields);
            assert_eq!(fields[TRACEPARENT], text);
            assert!(fields[TRACEPARENT].is_sensitive());
        }
    }

    #[test]
    fn nonsense_is_replaced_by_a_sound_one() {
        for text in [
            &format!("00-{CAME}-0000000000000000-01"),
            &format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
            &format!("ff-{CAME}-00f067aa0ba902b7-01"),
            &format!("00-{}-00f067aa0ba902b7-01", CAME.to_uppercase()),
            &format!("00-{CAME}-00f067aa0ba902b7"),
            &format!("00-{CAME}-00f067aa0ba902b7-01-more"),
            "nonsense",
        ] {
            let mut fields = with(text);
            let trace = Trace::of(&fields);
            assert_ne!(trace.as_str(), CAME, "{text}");
            trace.put(&mut fields);
            assert_eq!(Trace::of(&fields).as_str(), trace.as_str(), "{text}");
            assert!(fields[TRACEPARENT].is_sensitive());
        }
    }

    #[test]
    fn a_trace_that_was_taken_away_on_the_way_goes_on() {
        let trace = Trace::of(&with(&format!("00-{CAME}-00f067aa0ba902b7-01")));
        let mut fields = HeaderMap::new();
        trace.put(&mut fields);
        assert_eq!(Trace::of(&fields).as_str(), CAME);
    }

    #[test]
    fn two_are_none_and_the_state_of_a_trace_that_was_replaced_goes() {
        let mut fields = with(&format!("00-{CAME}-00f067aa0ba902b7-01"));
        fields.append(TRACEPARENT, fields[TRACEPARENT].clone());
        fields.insert(TRACESTATE, HeaderValue::from_static("vendor=1"));
        let trace = Trace::of(&fields);
        trace.put(&mut fields);
        assert_ne!(trace.as_str(), CAME);
        assert_eq!(fields.get_all(TRACEPARENT).iter().count(), 1);
        assert!(!fields.contains_key(TRACESTATE));
    }

    #[test]
    fn each_stream_without_a_trace_begins_its_own() {
        let (one, other) = (Trace::of(&HeaderMap::new()), Trace::begin());
        assert_ne!(one.as_str(), other.as_str());
        assert_eq!(one.as_str().len(), 32);
    }
}
