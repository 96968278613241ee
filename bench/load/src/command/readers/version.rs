//! The version of an object, found in the bytes of a watch before its stamp.
//!
//! Both forms have an object's metadata in one order: its UID, its version, and later its annotations.

/// Maximum distance of a version before an annotation.
pub(super) const AHEAD: usize = 1024;

/// In protobuf: field 5 with the 36 letters of a UID, then field 6.
const UID: [u8; 2] = [5 << 3 | 2, 36];
const VERSION: u8 = 6 << 3 | 2;
/// In JSON.
const NAMED: &[u8] = b"\"resourceVersion\":\"";

/// Returns the last version in these bytes.
pub(super) fn last(bytes: &[u8]) -> Option<u64> {
    let starts = (0..bytes.len()).rev();
    let mut digits = starts.filter_map(|at| {
        let rest = &bytes[at..];
        match rest.strip_prefix(NAMED) {
            Some(json) => json.split(|byte| *byte == b'"').next(),
            None => protobuf(rest),
        }
    });
    digits.find_map(|digits| std::str::from_utf8(digits).ok()?.parse().ok())
}

fn protobuf(bytes: &[u8]) -> Option<&[u8]> {
    let behind = bytes.strip_prefix(&UID)?.get(usize::from(UID[1])..)?;
    let [VERSION, length, digits @ ..] = behind else {
        return None;
    };
    digits.get(..usize::from(*length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_version_is_found_in_json_and_in_protobuf() {
        let json = br#"{"resourceVersion":"41"},{"uid":"u","resourceVersion":"42","labels":{}"#;
        assert_eq!(last(json), Some(42));
        let mut bytes = b"....".to_vec();
        for version in [b"141", b"142"] {
            bytes.extend(UID);
            bytes.extend([b'u'; 36]);
            bytes.extend([VERSION, 3]);
            bytes.extend(version);
        }
        assert_eq!(last(&bytes), Some(142));
        assert_eq!(last(&bytes[..bytes.len() - 1]), Some(141));
        assert_eq!(last(b"none"), None);
    }
}
