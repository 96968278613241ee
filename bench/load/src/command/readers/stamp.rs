//! The time of a change, as it stands in an annotation of what is changed, and is found in the bytes of a watch.
//!
//! `~m1763933000123456~`: a mark, and microseconds of the Unix epoch. It is the same text in JSON and in protobuf, so whoever looks
//! for it has to know neither.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What stands around it, and nowhere else in a slice.
const AROUND: u8 = b'~';
/// Digits of the microseconds, from 2001 to 2286.
const DIGITS: usize = 16;
/// Its whole length.
pub(super) const LENGTH: usize = DIGITS + 3;

/// The text of this moment.
pub(crate) fn now(mark: char) -> String {
    let around = char::from(AROUND);
    format!("{around}{mark}{:016}{around}", since().as_micros())
}

fn since() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default()
}

/// How long ago each change with that mark was made, and how much of `bytes` has been looked at: a stamp may be cut in two.
pub(super) fn ages(bytes: &[u8], mark: u8, mut found: impl FnMut(Duration)) -> usize {
    let (now, mut at) = (since(), 0);
    while let Some(next) = bytes[at..].iter().position(|byte| *byte == AROUND) {
        let Some(text) = bytes.get(at + next..at + next + LENGTH) else {
            return at + next;
        };
        match made(text, mark) {
            Some(made) => {
                found(now.saturating_sub(made));
                at += next + LENGTH;
            }
            None => at += next + 1,
        }
    }
    bytes.len()
}

/// When it was made, if this is a stamp with that mark.
fn made(text: &[u8], mark: u8) -> Option<Duration> {
    let [AROUND, marked, digits @ .., AROUND] = text else {
        return None;
    };
    if *marked != mark {
        return None;
    }
    let digits = std::str::from_utf8(digits).ok()?;
    digits.parse().ok().map(Duration::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str) -> (usize, usize) {
        let mut found = 0;
        let looked = ages(text.as_bytes(), b'm', |age| {
            assert!(age < Duration::from_secs(60));
            found += 1;
        });
        (found, looked)
    }

    #[test]
    fn stamps_are_found_by_their_mark_and_one_that_is_cut_waits_for_its_rest() {
        let (ours, other) = (now('m'), now('w'));
        assert_eq!(ours.len(), LENGTH);
        let text = format!("a{ours}b{other}c~d{ours}");
        assert_eq!(count(&text), (2, text.len()));
        let cut = format!("ab{}", &ours[..7]);
        assert_eq!(count(&cut), (0, 2));
        assert_eq!(count(""), (0, 0));
    }
}
