//! Time of a change, as an annotation of the changed object contains it, and as it is found in the bytes of a watch.
//!
//! `~m1763933000123456~`: a mark, and microseconds of the Unix epoch. The text is the same in JSON and in protobuf, so a
//! search for it needs to parse neither.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Delimiter on both sides of a stamp; it occurs nowhere else in a slice.
const AROUND: u8 = b'~';
/// Digits of the microseconds, from 2001 to 2286.
const DIGITS: usize = 16;
/// Its whole length.
pub(super) const LENGTH: usize = DIGITS + 3;

/// Returns the text of the present time.
pub(crate) fn now(mark: char) -> String {
    let around = char::from(AROUND);
    format!("{around}{mark}{:016}{around}", since().as_micros())
}

fn since() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default()
}

/// Reports the position of each stamp, with the age of its change if the stamp has that mark. Returns how much of `bytes`
/// has been examined: a stamp may be split.
pub(super) fn all(bytes: &[u8], mark: u8, mut found: impl FnMut(usize, Option<Duration>)) -> usize {
    let (now, mut at) = (since(), 0);
    while let Some(next) = bytes[at..].iter().position(|byte| *byte == AROUND) {
        at += next;
        let Some(text) = bytes.get(at..at + LENGTH) else {
            return at;
        };
        match made(text) {
            Some((marked, made)) => {
                found(at, (marked == mark).then(|| now.saturating_sub(made)));
                at += LENGTH;
            }
            None => at += 1,
        }
    }
    bytes.len()
}

/// Returns its mark and its time, if this is a stamp.
fn made(text: &[u8]) -> Option<(u8, Duration)> {
    let [AROUND, mark, digits @ .., AROUND] = text else {
        return None;
    };
    let digits = std::str::from_utf8(digits).ok()?.parse().ok()?;
    Some((*mark, Duration::from_micros(digits)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> (Vec<(usize, bool)>, usize) {
        let mut found = Vec::new();
        let looked = all(text.as_bytes(), b'm', |at, age| {
            assert!(age.is_none_or(|age| age < Duration::from_mins(1)));
            found.push((at, age.is_some()));
        });
        (found, looked)
    }

    #[test]
    fn stamps_are_found_and_a_cut_stamp_waits_for_its_rest() {
        let (ours, other) = (now('m'), now('w'));
        assert_eq!(ours.len(), LENGTH);
        let text = format!("a{ours}b{other}c~d{ours}");
        let all = vec![(1, true), (2 + LENGTH, false), (5 + 2 * LENGTH, true)];
        assert_eq!(found(&text), (all, text.len()));
        assert_eq!(found(&format!("ab{}", &ours[..7])), (vec![], 2));
        assert_eq!(found(""), (vec![], 0));
    }
}
