//! Certificate revocation lists (CRL, RFC 5280 section 5) of gateways' certificates.
//!
//! A gateway signs one CRL for each issuer of gateways (`sign`), and sends each with the certificate of its issuer. An edge verifies
//! both with its roots and keeps the serial numbers (`gateway_revocations`), which are then refused. Only a key of the CA can sign a
//! CRL, so the owner of a gateway's certificate can revoke no other gateway. The CRL number is for other readers: an edge keeps the
//! revocations of all lists.

mod sign;

use std::fmt::Display;

use causeway_tls::{TrustDomain, pem};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::{PemObject, SectionKind};
use thiserror::Error;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

use crate::certificate::Certificate;
use crate::gateway_revocations::GatewayRevocations;
use crate::identity::{IssuerPurpose, issuer_purpose};
use crate::secret::hex;

/// Maximum length of the CRLs and their issuers as PEM, in bytes. The text fits into one message of the control stream.
pub const MAX_CRL_TEXT: usize = 48 * 1024;
/// Maximum number of CRLs. A rotation has two issuers.
const MAX_CRLS: usize = 4;

/// Error that makes a CRL unusable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CrlError {
    /// The text is too long.
    #[error("the CRLs have more than {MAX_CRL_TEXT} bytes")]
    TooLong,
    /// The text or a part of it cannot be parsed.
    #[error("a CRL cannot be parsed: {0}")]
    Malformed(String),
    /// The issuer of the CRL is not an issuer of gateways' certificates below a trusted root.
    #[error("the issuer of a CRL is not trusted to issue certificates of gateways")]
    UnknownIssuer,
    /// The issuer has not signed the CRL.
    #[error("the signature of a CRL is not valid")]
    Signature,
}

fn malformed(why: impl Display) -> CrlError {
    CrlError::Malformed(format!("{why}"))
}

fn encode(issuer: &CertificateDer<'_>, crl: &[u8]) -> String {
    pem::encode_chain(std::slice::from_ref(issuer)) + &pem::encode("X509 CRL", crl)
}

/// Verifies CRLs as a gateway sends them with these roots. Returns the revocations in the valid ones, and an error for each other one.
///
/// # Errors
/// If the text is too long or cannot be parsed.
pub fn verify_crls(
    text: &str,
    roots: &[CertificateDer<'_>],
    domain: &TrustDomain,
) -> Result<(GatewayRevocations, Vec<CrlError>), CrlError> {
    if text.len() > MAX_CRL_TEXT {
        return Err(CrlError::TooLong);
    }
    let (mut revocations, mut errors) = (GatewayRevocations::default(), Vec::new());
    for (issuer, der) in parse_pairs(text)? {
        match verify((&issuer, &der), (roots, domain), &mut revocations) {
            Ok(()) => {}
            Err(error @ CrlError::Malformed(_)) => return Err(error),
            Err(error) => errors.push(error),
        }
    }
    Ok((revocations, errors))
}

/// Returns the CRLs of a text, each with the certificate before it.
fn parse_pairs(text: &str) -> Result<Vec<(CertificateDer<'static>, Vec<u8>)>, CrlError> {
    let (mut pairs, mut issuer) = (Vec::new(), None);
    for section in <(SectionKind, Vec<u8>)>::pem_slice_iter(text.as_bytes()) {
        match section.map_err(malformed)? {
            (SectionKind::Certificate, der) => issuer = Some(CertificateDer::from(der)),
            (SectionKind::Crl, der) => {
                let issuer = issuer.take();
                let issuer =
                    issuer.ok_or_else(|| malformed("the certificate of its issuer is missing"))?;
                pairs.push((issuer, der));
            }
            _ => return Err(malformed("there is another kind of PEM block")),
        }
    }
    if pairs.is_empty() || pairs.len() > MAX_CRLS {
        let count = pairs.len();
        return Err(malformed(format_args!(
            "there must be 1 to {MAX_CRLS}, not {count}"
        )));
    }
    Ok(pairs)
}

/// Verifies one CRL, and adds its revocations.
fn verify(
    (issuer, der): (&CertificateDer<'_>, &[u8]),
    (roots, domain): (&[CertificateDer<'_>], &TrustDomain),
    revocations: &mut GatewayRevocations,
) -> Result<(), CrlError> {
    if !is_gateway_issuer(issuer, roots, domain)? {
        return Err(CrlError::UnknownIssuer);
    }
    let (trailing, crl) = CertificateRevocationList::from_der(der).map_err(malformed)?;
    let (_, above) = X509Certificate::from_der(issuer).map_err(malformed)?;
    let is_of_issuer = crl.issuer().as_raw() == above.subject().as_raw();
    if !is_of_issuer || crl.verify_signature(above.public_key()).is_err() {
        return Err(CrlError::Signature);
    }
    // We write none. A critical one could restrict the list to a part of the certificates.
    if !trailing.is_empty() || crl.extensions().iter().any(|extension| extension.critical) {
        return Err(malformed("it has critical extensions, or bytes follow it"));
    }
    for revoked in crl.iter_revoked_certificates() {
        let date = u64::try_from(revoked.revocation_date.timestamp()).unwrap_or_default();
        revocations.insert(hex(revoked.raw_serial()), date);
    }
    Ok(())
}

/// Whether this is the certificate of an issuer of gateways below one of the roots, or a root that issues them itself.
fn is_gateway_issuer(
    issuer: &CertificateDer<'_>,
    roots: &[CertificateDer<'_>],
    domain: &TrustDomain,
) -> Result<bool, CrlError> {
    if roots.contains(issuer) {
        return Ok(true);
    }
    let parsed = Certificate::parse(issuer).map_err(malformed)?;
    if issuer_purpose(&parsed, domain) != Some(IssuerPurpose::Replicas) {
        return Ok(false);
    }
    let (_, issuer) = X509Certificate::from_der(issuer).map_err(malformed)?;
    let is_signed_by = |root: &CertificateDer<'_>| {
        X509Certificate::from_der(root).is_ok_and(|(_, root)| {
            issuer.issuer().as_raw() == root.subject().as_raw()
                && issuer.verify_signature(Some(root.public_key())).is_ok()
        })
    };
    Ok(roots.iter().any(is_signed_by))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::Ca;
    use crate::store::{OpenMode, RevokedGateways, Store};

    fn domain() -> TrustDomain {
        TrustDomain::parse("td").unwrap()
    }

    /// Returns a list with these revocations, the last one made last.
    fn revoked(serials: &[&str]) -> RevokedGateways {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        for serial in serials {
            store.revoke_gateway(serial, "stolen").unwrap();
        }
        store.revoked_gateways().unwrap()
    }

    fn crls(ca: &Ca, serials: &[&str]) -> String {
        ca.sign_crls(&revoked(serials)).unwrap().unwrap()
    }

    fn verify(text: &str, ca: &Ca) -> Result<(GatewayRevocations, Vec<CrlError>), CrlError> {
        verify_crls(text, &[ca.root().clone()], &domain())
    }

    #[test]
    fn a_crl_of_the_own_ca_revokes_its_serial_numbers() {
        let ca = Ca::create(&domain()).unwrap();
        assert_eq!(ca.sign_crls(&RevokedGateways::default()).unwrap(), None);
        let text = crls(&ca, &["40aabb", "41cc"]);
        let (list, errors) = verify(&text, &ca).unwrap();
        assert_eq!(errors, []);
        assert!(list.is_revoked("40aabb") && list.is_revoked("41cc"));
        assert!(!list.is_revoked("40aa"));
        // webpki reads the same list.
        let (_, der) = parse_pairs(&text).unwrap().remove(0);
        let read = webpki::OwnedCertRevocationList::from_der(&der).unwrap();
        let read = webpki::CertRevocationList::from(read);
        assert!(read.find_serial(&[0x41, 0xcc]).unwrap().is_some());
    }

    #[test]
    fn a_root_without_intermediates_signs_its_crl_itself() {
        let ca = Ca::create(&domain()).unwrap();
        let old = Ca::load(&ca.root_pem(), ca.key_pem().expose()).unwrap();
        assert!(old.signs_leaves_directly());
        let (list, errors) = verify(&crls(&old, &["40aa"]), &old).unwrap();
        assert!(errors.is_empty() && list.is_revoked("40aa"));
    }

    #[test]
    fn during_a_rotation_each_root_has_a_crl() {
        let before = Ca::create(&domain()).unwrap();
        let old_root = before.root().clone();
        let (ca, _) = before.prepare().unwrap();
        let (ca, _) = ca.activate().unwrap();
        let text = crls(&ca, &["40aa"]);
        for root in [&old_root, ca.root()] {
            let (list, errors) = verify_crls(&text, std::slice::from_ref(root), &domain()).unwrap();
            assert_eq!(errors, [CrlError::UnknownIssuer]);
            assert!(list.is_revoked("40aa"));
        }
    }

    #[test]
    fn only_an_issuer_of_gateways_below_a_trusted_root_can_revoke() {
        let (ca, other) = (
            Ca::create(&domain()).unwrap(),
            Ca::create(&domain()).unwrap(),
        );
        let (own, foreign) = (crls(&ca, &["40aa"]), crls(&other, &["40bb"]));
        let refused = |text: &str| {
            let (list, errors) = verify(text, &ca).unwrap();
            assert_eq!(list, GatewayRevocations::default());
            errors
        };
        assert_eq!(refused(&foreign), [CrlError::UnknownIssuer]);
        let (issuer, _) = parse_pairs(&own).unwrap().remove(0);
        let (_, signed_by_other) = parse_pairs(&foreign).unwrap().remove(0);
        // The name in the CRL is another one.
        assert_eq!(
            refused(&encode(&issuer, &signed_by_other)),
            [CrlError::Signature]
        );
        let (issuer, mut changed) = parse_pairs(&own).unwrap().remove(0);
        let position = changed
            .windows(2)
            .position(|it| it == [0x40, 0xaa])
            .unwrap();
        changed[position + 1] = 0xbb;
        assert_eq!(refused(&encode(&issuer, &changed)), [CrlError::Signature]);
        // The intermediate of edges is below the root as well.
        let leaf_issuer = ca.anchors().into_iter();
        let edges = leaf_issuer.filter(|it| it.purpose == Some(IssuerPurpose::Edges));
        let edges = edges.map(|it| it.certificate.clone()).next().unwrap();
        let (_, crl) = parse_pairs(&own).unwrap().remove(0);
        assert_eq!(refused(&encode(&edges, &crl)), [CrlError::UnknownIssuer]);
    }

    #[test]
    fn texts_that_are_too_long_or_malformed_are_refused() {
        let ca = Ca::create(&domain()).unwrap();
        let text = crls(&ca, &["40aa"]);
        let long = text.clone() + &"\n".repeat(MAX_CRL_TEXT);
        assert_eq!(verify(&long, &ca), Err(CrlError::TooLong));
        let many = text.repeat(MAX_CRLS + 1);
        let crl_only = &text[text.find("-----BEGIN X509 CRL").unwrap()..];
        let (issuer, _) = parse_pairs(&text).unwrap().remove(0);
        for wrong in [
            "",
            &many,
            crl_only,
            &ca.root_pem(),
            &encode(&issuer, b"no CRL"),
        ] {
            let error = verify(wrong, &ca).unwrap_err();
            assert!(matches!(error, CrlError::Malformed(_)), "{error}");
        }
    }

    #[test]
    fn the_longest_list_is_within_the_bound() {
        let before = Ca::create(&domain()).unwrap();
        let (ca, _) = before.prepare().unwrap();
        let serial = |nth: usize| format!("40{nth:030x}");
        let serials: Vec<_> = (0..256).map(serial).collect();
        let serials: Vec<_> = serials.iter().map(String::as_str).collect();
        let mut list = revoked(&serials);
        // Gateways that share their state may have more together.
        let mut newest = list.0[&serial(0)].clone();
        newest.at += 1;
        list.0.insert(serial(256), newest);
        let text = ca.sign_crls(&list).unwrap().unwrap();
        assert!(text.len() < MAX_CRL_TEXT, "{}", text.len());
        let (sent, _) = verify(&text, &ca).unwrap();
        assert_eq!(sent.serials().len(), 256);
        assert!(sent.is_revoked(&serial(256)));
    }
}
