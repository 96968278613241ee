//! Revocations of gateways' certificates that an edge has received.
//!
//! Only verified CRLs (`crl`) add serial numbers, and nothing removes one before the certificate has expired. So no gateway that
//! knows fewer revocations, or an old CRL that is sent again, makes an edge accept a revoked certificate. A revocation that a gateway
//! still announces stays, even if the certificate has expired by the clock of the edge: the clock may be ahead, and be corrected.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Seconds for which a revocation is stored after its date: the longest lifetime of a gateway's certificate (`ca`), which is 7 days,
/// and a day for clocks that differ.
const RETENTION_SECS: u64 = 8 * 24 * 3600;

/// Dates of revocation in Unix seconds, by the serial number of the certificate in hexadecimal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GatewayRevocations(BTreeMap<String, u64>);

impl GatewayRevocations {
    /// Adds a revocation.
    pub(crate) fn insert(&mut self, serial: String, date: u64) {
        let latest = self.0.entry(serial).or_default();
        *latest = date.max(*latest);
    }

    /// Returns the received revocations, and those of these whose certificates have not expired at `now`, in Unix seconds.
    #[must_use]
    pub fn merged(&self, received: Self, now: u64) -> Self {
        let is_current = |date: u64| date.saturating_add(RETENTION_SECS) >= now;
        let mut merged = received;
        for (serial, date) in self.0.iter().filter(|(_, date)| is_current(**date)) {
            merged.insert(serial.clone(), *date);
        }
        merged
    }

    /// Whether the certificate with this serial number is revoked.
    pub fn is_revoked(&self, serial: &str) -> bool {
        self.0.contains_key(serial)
    }

    /// Returns the serial numbers of the revoked certificates.
    pub fn serials(&self) -> BTreeSet<String> {
        self.0.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::GATEWAY_LIFETIME;

    fn revocations(all: &[(&str, u64)]) -> GatewayRevocations {
        let all = all
            .iter()
            .map(|(serial, date)| ((*serial).to_owned(), *date));
        GatewayRevocations(all.collect())
    }

    #[test]
    fn no_received_list_removes_a_revocation() {
        let (own, received) = (revocations(&[("40aa", 9)]), revocations(&[("40bb", 5)]));
        let both = revocations(&[("40aa", 9), ("40bb", 5)]);
        assert_eq!(own.merged(received.clone(), 10), both);
        assert_eq!(received.merged(own, 10), both);
        assert_eq!(both.merged(GatewayRevocations::default(), 10), both);
        let again = revocations(&[("40aa", 2)]);
        assert_eq!(both.merged(again, 10), both, "the later date counts");
    }

    #[test]
    fn a_revocation_ends_after_its_certificate() {
        let date = 1_000_000_000;
        let all = revocations(&[("40aa", date)]);
        let lifetime = GATEWAY_LIFETIME.as_secs();
        for (now, is_revoked) in [
            (0, true),
            (date + lifetime, true),
            (date + 2 * lifetime, false),
        ] {
            let merged = all.merged(GatewayRevocations::default(), now);
            assert_eq!(merged.is_revoked("40aa"), is_revoked, "{now}");
            // A gateway that announces it has another clock.
            let merged = GatewayRevocations::default().merged(all.clone(), now);
            assert!(merged.is_revoked("40aa"), "{now}");
        }
    }
}
