//! Signing of the CRLs of a CA.

use std::cmp::Reverse;

use rcgen::{
    CertificateRevocationListParams, KeyIdMethod, RevocationReason, RevokedCertParams, SerialNumber,
};

use super::encode;
use crate::ca::{Ca, CaError, GATEWAY_LIFETIME, to_offset_date_time};
use crate::secret;
use crate::store::{MAX_REVOKED, RevokedGateways};

impl Ca {
    /// Signs the CRLs with these revocations, one for each issuer of gateways, and returns them as PEM, each behind the
    /// certificate of its issuer. Returns `None` if nothing is revoked.
    ///
    /// Of too many revocations, as gateways that share their state may have, the newest ones are in the lists.
    ///
    /// Serial numbers are random, so each list has all of them, whichever root is above the certificates.
    pub fn sign_crls(&self, revoked: &RevokedGateways) -> Result<Option<String>, CaError> {
        let Some(number) = revoked.crl_number() else {
            return Ok(None);
        };
        let at = revoked.last_revoked_at();
        let next = at.saturating_add(GATEWAY_LIFETIME.as_secs());
        let mut newest: Vec<_> = revoked.iter().collect();
        newest.sort_by_key(|(_, revocation)| Reverse(revocation.at));
        let newest = newest.into_iter().take(MAX_REVOKED);
        let entries = newest.filter_map(|(serial, revocation)| {
            Some(RevokedCertParams {
                serial_number: SerialNumber::from_slice(&secret::from_hex(serial)?),
                revocation_time: to_offset_date_time(revocation.at),
                reason_code: Some(RevocationReason::KeyCompromise),
                invalidity_date: None,
            })
        });
        let params = CertificateRevocationListParams {
            this_update: to_offset_date_time(at),
            next_update: to_offset_date_time(next),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: entries.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let mut text = String::new();
        for (certificate, issuer) in self.gateway_issuers() {
            let crl = params.signed_by(issuer)?;
            text += &encode(certificate, crl.der());
        }
        Ok(Some(text))
    }
}
