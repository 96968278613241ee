//! Revocations of gateways' certificates, in `revoked-gateways.json`.
//!
//! A certificate is named by its serial number, which is random. A revocation is stored until no certificate with the serial
//! number can be valid any more, so the list has a bound. From the list each gateway signs the same CRLs ([`crate::crl`]).

use std::collections::BTreeMap;

use rustls_pki_types::UnixTime;
use serde::{Deserialize, Serialize};

use super::atomic_file::{OtherFields, StoreError};
use super::data_dir::Store;
use crate::ca::GATEWAY_LIFETIME;

pub(super) const REVOKED_GATEWAYS_FILE: &str = "revoked-gateways.json";
/// Time for which a revocation is stored after the last certificate with its serial number has expired, for clocks that are
/// behind.
const RETENTION_SECS: u64 = 24 * 3600;
/// Maximum number of revocations. Their CRLs fit into one message to an edge.
pub(crate) const MAX_REVOKED: usize = 256;
/// Bits of a CRL number for the length of the list.
const LENGTH_BITS: u32 = 16;

/// Revocation of one certificate of a gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevokedGateway {
    /// Start of the revocation, in Unix seconds.
    pub at: u64,
    /// Reason, for people.
    pub reason: String,
    /// Last second at which a certificate with the serial number can be valid, in Unix time.
    pub not_after: u64,
    /// Number that is larger than those of all revocations that were known when this one was made.
    sequence: u64,
    /// Fields of later versions.
    #[serde(flatten)]
    other: OtherFields,
}

impl RevokedGateway {
    /// Whether the revocation is so old that it is no longer stored.
    pub fn is_outdated(&self, now: u64) -> bool {
        self.not_after.saturating_add(RETENTION_SECS) < now
    }
}

/// Revocations by the serial number of the certificate, in hexadecimal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevokedGateways(pub(crate) BTreeMap<String, RevokedGateway>);

impl RevokedGateways {
    /// Returns the revocations with the serial numbers.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &RevokedGateway)> {
        self.0.iter().map(|(serial, it)| (serial.as_str(), it))
    }

    /// Returns the serial numbers.
    pub fn serials(&self) -> impl Iterator<Item = String> {
        self.0.keys().cloned()
    }

    /// Returns the number of the CRLs with these revocations, or `None` without any.
    ///
    /// The number depends on the list only, so all gateways with the same list sign CRLs with the same number. A list with a
    /// further revocation always has a higher number, also if two gateways have each made one that the other lacks.
    pub(crate) fn crl_number(&self) -> Option<u64> {
        let newest = self.0.values().map(|it| it.sequence).max()?;
        let length = u64::try_from(self.0.len()).unwrap_or(u64::MAX);
        Some((newest << LENGTH_BITS) | length.min((1 << LENGTH_BITS) - 1))
    }

    /// Returns the start of the newest revocation, in Unix seconds.
    pub(crate) fn last_revoked_at(&self) -> u64 {
        self.0.values().map(|it| it.at).max().unwrap_or_default()
    }

    /// Replaces or removes the revocation of a serial number.
    pub(super) fn set(&mut self, serial: &str, revoked: Option<RevokedGateway>) {
        self.0.remove(serial);
        self.0
            .extend(revoked.map(|revoked| (serial.to_owned(), revoked)));
    }

    fn next_sequence(&self) -> u64 {
        let now = UnixTime::now().as_secs().saturating_mul(1000);
        let newest = self.0.values().map(|it| it.sequence).max();
        newest.map_or(now, |newest| now.max(newest.saturating_add(1)))
    }
}

/// Returns a serial number as this program writes it, or `None` if the text is not one. OpenSSL writes upper case, with or without
/// colons.
pub fn parse_serial(text: &str) -> Option<String> {
    let serial = text.trim().replace(':', "").to_ascii_lowercase();
    let is_hex = serial.bytes().all(|byte| byte.is_ascii_hexdigit());
    // RFC 5280 section 4.1.2.2: at most 20 bytes.
    let has_length = (2..=40).contains(&serial.len()) && serial.len().is_multiple_of(2);
    (is_hex && has_length).then_some(serial)
}

impl Store {
    /// Returns the revocations of gateways' certificates.
    pub fn revoked_gateways(&self) -> Result<RevokedGateways, StoreError> {
        let stored = self.dir.read_json(REVOKED_GATEWAYS_FILE)?;
        Ok(stored.unwrap_or_default())
    }

    /// Revokes the certificate of a gateway with this serial number. Returns `false` if it was revoked before.
    ///
    /// # Errors
    /// If the file cannot be read or written, or has its maximum number of revocations.
    pub fn revoke_gateway(&self, serial: &str, reason: &str) -> Result<bool, StoreError> {
        let _lock = self.dir.lock()?;
        let mut revoked = self.revoked_gateways()?;
        let now = UnixTime::now().as_secs();
        if revoked.0.contains_key(serial) {
            return Ok(false);
        }
        let sequence = revoked.next_sequence();
        revoked.0.retain(|_, it| !it.is_outdated(now));
        if revoked.0.len() >= MAX_REVOKED {
            return Err(StoreError::Full {
                path: self.dir.path(REVOKED_GATEWAYS_FILE),
                max: MAX_REVOKED,
            });
        }
        let revocation = RevokedGateway {
            at: now,
            reason: reason.to_owned(),
            not_after: now.saturating_add(GATEWAY_LIFETIME.as_secs()),
            sequence,
            other: OtherFields::new(),
        };
        revoked.0.insert(serial.to_owned(), revocation);
        self.dir.write_json(REVOKED_GATEWAYS_FILE, &revoked)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::OpenMode;

    fn list(sequences: &[(&str, u64)]) -> RevokedGateways {
        let revocation = |sequence| RevokedGateway {
            at: 7,
            reason: "stolen".to_owned(),
            not_after: 9,
            sequence,
            other: OtherFields::new(),
        };
        let entries = sequences.iter();
        RevokedGateways(
            entries
                .map(|(serial, sequence)| ((*serial).to_owned(), revocation(*sequence)))
                .collect(),
        )
    }

    #[test]
    fn a_list_with_a_further_revocation_has_a_higher_number() {
        let number = |sequences: &[(&str, u64)]| list(sequences).crl_number();
        assert_eq!(number(&[]), None);
        // Two gateways have each made a revocation that the other lacks.
        let (one, other) = (number(&[("aa", 5)]), number(&[("bb", 6)]));
        let both = number(&[("aa", 5), ("bb", 6)]);
        assert!(one < other && other < both);
        let same_time = number(&[("bb", 6), ("cc", 6)]);
        assert!(same_time < number(&[("aa", 5), ("bb", 6), ("cc", 6)]));
        assert!(both < number(&[("dd", 7)]), "older ones have expired");
    }

    #[test]
    fn a_revocation_is_stored_once_and_for_a_limited_time() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        assert!(store.revoke_gateway("aa", "stolen").unwrap());
        assert!(!store.revoke_gateway("aa", "again").unwrap());
        let first = store.revoked_gateways().unwrap();
        let (_, aa) = first.iter().next().unwrap();
        assert_eq!(aa.reason, "stolen");
        assert!(!aa.is_outdated(aa.not_after));
        assert!(aa.is_outdated(aa.not_after + RETENTION_SECS + 1));
        assert!(store.revoke_gateway("bb", "stolen").unwrap());
        let second = store.revoked_gateways().unwrap();
        assert!(first.crl_number() < second.crl_number());
        let mut old = second.clone();
        for revocation in old.0.values_mut() {
            revocation.not_after = 9;
        }
        let newest = second.0.values().map(|it| it.sequence).max();
        store.dir.write_json(REVOKED_GATEWAYS_FILE, &old).unwrap();
        assert!(store.revoke_gateway("cc", "stolen").unwrap());
        let third = store.revoked_gateways().unwrap();
        assert_eq!(third.serials().collect::<Vec<_>>(), ["cc"]);
        assert!(third.0.values().map(|it| it.sequence).max() > newest);
    }

    #[test]
    fn the_number_of_revocations_is_limited() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        let mut full = RevokedGateways::default();
        store.revoke_gateway("aa", "stolen").unwrap();
        let stored = store.revoked_gateways().unwrap().0["aa"].clone();
        for number in 0..MAX_REVOKED {
            full.0.insert(format!("{number:08x}"), stored.clone());
        }
        store.dir.write_json(REVOKED_GATEWAYS_FILE, &full).unwrap();
        let error = store.revoke_gateway("aa", "stolen").unwrap_err();
        assert!(error.to_string().contains("256"), "{error}");
    }

    #[test]
    fn serial_numbers_are_read_as_openssl_writes_them() {
        let read = |text: &str| parse_serial(text);
        assert_eq!(read(" 4F:0a:B1\n").as_deref(), Some("4f0ab1"));
        assert_eq!(read("4F0AB1").as_deref(), Some("4f0ab1"));
        for wrong in ["", "4", "4f0", "gateway-1", &"aa".repeat(21)] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
