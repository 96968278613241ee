//! A root: its key, and the intermediates that sign in its name, each for one purpose.
//!
//! A leaf is signed by the intermediate of its purpose. An attacker who gets one of these keys is confined to that purpose. The
//! intermediate states its purpose by its extended key usage and by `spiffe://<trust domain>/issuer/<purpose>`. A root from
//! before the separation of purposes has no intermediates, and signs leaves itself.

use std::time::Duration;

use causeway_tls::{Fingerprint, HostName, TrustDomain, pem};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use rustls_pki_types::{CertificateDer, UnixTime};
use time::OffsetDateTime;

use super::error::CaError;
use crate::certificate::{CLOCK_SKEW, Certificate};
use crate::csr::alternative_name;
use crate::identity::{self, IssuerPurpose};
use crate::secret;
use causeway_config::Secret;

/// Lifetime of a root and of its intermediates.
const ROOT_LIFETIME: Duration = Duration::from_hours(24 * 3650);

/// Maximum validity of a listener's certificate: Apple's clients refuse more than 825 days, also below a private CA
/// (<https://support.apple.com/en-us/103769>).
const MAX_LISTENER_VALIDITY: Duration = Duration::from_hours(24 * 825);

/// Maximum length of a common name (RFC 5280, ub-common-name).
const MAX_COMMON_NAME: usize = 64;
/// Path length of a root, which signs its intermediates and the cross certificate for its successor.
const ROOT_PATH_LENGTH: u8 = 2;

/// Properties that differ between kinds of leaf.
pub(super) struct LeafProfile<'a> {
    pub(super) common_name: &'a str,
    pub(super) groups: Option<String>,
    pub(super) uri: Option<String>,
    pub(super) names: &'a [HostName],
    pub(super) lifetime: Duration,
}

impl<'a> LeafProfile<'a> {
    /// Returns the profile of a listener's leaf. The common name is the first DNS name or a fixed text, and never an address.
    /// If the alternative names contain no DNS name, OpenSSL checks the common name against the name constraints for DNS
    /// names.
    pub(super) fn for_listener(names: &'a [HostName], lifetime: Duration) -> Self {
        let dns = names.iter().find_map(|name| match name {
            HostName::Dns(name) => Some(name.as_ref()),
            HostName::Ip(_) => None,
        });
        Self {
            common_name: dns.unwrap_or("causeway listener"),
            groups: None,
            uri: None,
            names,
            lifetime,
        }
    }
}

/// A signing certificate with its key.
pub(super) struct Intermediate {
    pub(super) certificate: CertificateDer<'static>,
    pub(super) issuer: Issuer<'static, KeyPair>,
    pub(super) parsed: Certificate,
}

/// A root.
pub(super) struct Root {
    pub(super) signer: Intermediate,
    /// Intermediates in the order of [`IssuerPurpose::ALL`].
    issuers: Option<Vec<Intermediate>>,
    /// Cross certificate with the same name and key, signed by the root before. By it a peer that trusts only the earlier
    /// root recognises this one.
    pub(super) cross_certificate: Option<CertificateDer<'static>>,
    pub(super) fingerprint: Fingerprint,
    pub(super) domain: TrustDomain,
}

impl Intermediate {
    /// Loads a certificate that may sign, and its key, and checks that they match.
    pub(super) fn load(certificate_pem: &str, key_pem: &str) -> Result<Self, CaError> {
        let bad_certificate = |why| CaError::Unusable {
            part: "certificate",
            why,
        };
        let bad_key = |why| CaError::Unusable { part: "key", why };
        let certificate = pem::parse_certificates(certificate_pem)
            .map_err(bad_certificate)?
            .swap_remove(0);
        let parsed =
            Certificate::parse(&certificate).map_err(|error| bad_certificate(error.to_string()))?;
        if !parsed.is_ca {
            return Err(bad_certificate("it may not sign certificates".into()));
        }
        let key = KeyPair::from_pem(key_pem).map_err(|error| bad_key(error.to_string()))?;
        if key.subject_public_key_info() != parsed.public_key {
            return Err(bad_key("the key does not match the CA certificate".into()));
        }
        Ok(Self {
            issuer: Issuer::from_ca_cert_der(&certificate, key)?,
            certificate,
            parsed,
        })
    }

    pub(super) fn certificate_pem(&self) -> String {
        pem::encode_chain(std::slice::from_ref(&self.certificate))
    }

    pub(super) fn key_pem(&self) -> Secret {
        Secret::new(self.issuer.key().serialize_pem())
    }
}

impl Root {
    /// Creates a new root with new intermediates.
    pub(super) fn create(domain: &TrustDomain) -> Result<Self, CaError> {
        Self::create_valid_from(domain, issue_not_before())
    }

    /// Creates a root with new intermediates, valid from `not_before` on. A root that replaces another has the same
    /// `not_before` as the other, for machines whose clocks are behind.
    pub(super) fn create_valid_from(
        domain: &TrustDomain,
        not_before: u64,
    ) -> Result<Self, CaError> {
        let key = KeyPair::generate()?;
        let now = UnixTime::now().as_secs();
        let not_after = now.saturating_add(ROOT_LIFETIME.as_secs());
        // If all roots had the same name, a certificate of another gateway
        // would be reported as badly signed instead of unknown.
        let id = u32::from_be_bytes(secret::random_bytes::<4>());
        let mut params = ca_params((not_before, not_after), ROOT_PATH_LENGTH);
        params.distinguished_name =
            distinguished_name(&format!("Causeway {id:08x} {domain}"), None);
        params.subject_alt_names = vec![SanType::URI(identity::root_uri(domain).try_into()?)];
        let root = params.self_signed(&key)?;
        let mut root = Self::load(&root.pem(), &key.serialize_pem())?;
        let make_intermediate = |purpose| root.intermediate(purpose, id);
        root.issuers = Some(
            IssuerPurpose::ALL
                .map(make_intermediate)
                .into_iter()
                .collect::<Result<_, _>>()?,
        );
        Ok(root)
    }

    /// Loads a root that signs leaves itself.
    pub(super) fn load(certificate_pem: &str, key_pem: &str) -> Result<Self, CaError> {
        let signer = Intermediate::load(certificate_pem, key_pem)?;
        let domain =
            identity::trust_domain_of_root(&signer.parsed).map_err(|error| CaError::Unusable {
                part: "certificate",
                why: error.to_string(),
            })?;
        let fingerprint = Fingerprint::of_certificate(&signer.certificate);
        Ok(Self {
            fingerprint,
            signer,
            issuers: None,
            cross_certificate: None,
            domain,
        })
    }

    /// Combines a root with the stored intermediates, in the order of [`IssuerPurpose::ALL`].
    pub(super) fn with_intermediates(
        mut self,
        issuers: Option<Vec<Intermediate>>,
        cross_certificate: Option<CertificateDer<'static>>,
    ) -> Result<Self, CaError> {
        let bad = |why: String| CaError::Unusable {
            part: "certificate",
            why,
        };
        for (purpose, signer) in IssuerPurpose::ALL.iter().zip(issuers.iter().flatten()) {
            if identity::issuer_purpose(&signer.parsed, &self.domain) != Some(*purpose) {
                return Err(bad(format!(
                    "it is not the intermediate that signs {purpose}"
                )));
            }
        }
        let cross_parsed = cross_certificate
            .as_ref()
            .map(Certificate::parse)
            .transpose()?;
        if cross_parsed.is_some_and(|parsed| parsed.public_key != self.signer.parsed.public_key) {
            return Err(bad(
                "the previous root has cross-signed another root".to_owned()
            ));
        }
        (self.issuers, self.cross_certificate) = (issuers, cross_certificate);
        Ok(self)
    }

    #[cfg(test)]
    pub(super) fn end_issuers(&mut self, not_after: UnixTime) {
        for issuer in self.issuers.iter_mut().flatten() {
            issuer.parsed.not_after = not_after.as_secs();
        }
    }

    pub(super) fn issuers(&self) -> Option<&[Intermediate]> {
        self.issuers.as_deref()
    }

    fn intermediate(&self, purpose: IssuerPurpose, id: u32) -> Result<Intermediate, CaError> {
        let (key, domain) = (KeyPair::generate()?, &self.domain);
        let parsed = &self.signer.parsed;
        let mut params = ca_params((parsed.not_before, parsed.not_after), 0);
        params.distinguished_name =
            distinguished_name(&format!("Causeway {id:08x} {purpose} {domain}"), None);
        let uri = identity::issuer_uri(domain, purpose);
        params.subject_alt_names = vec![SanType::URI(uri.try_into()?)];
        params.extended_key_usages = extended_key_usages(purpose);
        params.use_authority_key_identifier_extension = true;
        let signed = params.signed_by(&key, &self.signer.issuer)?;
        Intermediate::load(&signed.pem(), &key.serialize_pem())
    }

    /// Signs a cross certificate for the root that follows this one.
    pub(super) fn cross_sign(&self, next: &Self) -> Result<CertificateDer<'static>, CaError> {
        let parsed = &self.signer.parsed;
        let not_after = parsed.not_after.min(next.signer.parsed.not_after);
        let mut params = ca_params((parsed.not_before, not_after), 1);
        let name = next
            .signer
            .parsed
            .common_name
            .as_deref()
            .unwrap_or_default();
        params.distinguished_name = distinguished_name(name, None);
        let uri = identity::root_uri(&next.domain);
        params.subject_alt_names = vec![SanType::URI(uri.try_into()?)];
        params.use_authority_key_identifier_extension = true;
        let signed = params.signed_by(next.signer.issuer.key(), &self.signer.issuer)?;
        Ok(signed.der().clone())
    }

    /// Returns the intermediate of a purpose, or the root if it signs leaves itself.
    pub(super) fn issuer_of(&self, purpose: IssuerPurpose) -> &Intermediate {
        let issuers = self.issuers.as_deref().into_iter().flatten();
        let mut issuers = IssuerPurpose::ALL.iter().zip(issuers);
        let intermediate = issuers.find(|(issuer_purpose, _)| **issuer_purpose == purpose);
        intermediate.map_or(&self.signer, |(_, signer)| signer)
    }

    /// Signs a leaf, and returns it with the certificates between it and this root.
    pub(super) fn sign(
        &self,
        purpose: IssuerPurpose,
        key: &impl PublicKeyData,
        profile: LeafProfile<'_>,
    ) -> Result<Vec<CertificateDer<'static>>, CaError> {
        let signer = self.issuer_of(purpose);
        let leaf = sign_leaf(signer, purpose, key, profile)?;
        let issuer = self.issuers.as_ref().map(|_| signer.certificate.clone());
        Ok([leaf].into_iter().chain(issuer).collect())
    }
}

/// Signs a leaf.
pub(super) fn sign_leaf(
    signer: &Intermediate,
    purpose: IssuerPurpose,
    key: &impl PublicKeyData,
    profile: LeafProfile<'_>,
) -> Result<CertificateDer<'static>, CaError> {
    let now = UnixTime::now().as_secs();
    if now > signer.parsed.not_after {
        return Err(CaError::Expired);
    }
    let not_after = now
        .saturating_add(profile.lifetime.as_secs())
        .min(signer.parsed.not_after);
    let mut names = Vec::with_capacity(profile.names.len() + 1);
    for name in profile.names {
        names.push(alternative_name(name)?);
    }
    if let Some(uri) = profile.uri {
        names.push(SanType::URI(uri.try_into()?));
    }
    // Machines whose clocks are behind verify server certificates. Gateways verify the others, and read the time of issue
    // from `not_before`.
    let not_before = match purpose {
        IssuerPurpose::Replicas => signer.parsed.not_before,
        IssuerPurpose::Listeners => {
            let earliest = not_after.saturating_sub(MAX_LISTENER_VALIDITY.as_secs());
            let earliest = signer.parsed.not_before.max(earliest.saturating_add(1));
            earliest.min(issue_not_before())
        }
        IssuerPurpose::Edges | IssuerPurpose::Clients => issue_not_before(),
    };
    let mut params = params_with_dates(not_before, not_after);
    params.distinguished_name = distinguished_name(profile.common_name, profile.groups);
    params.subject_alt_names = names;
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = extended_key_usages(purpose);
    // Strict verifiers (Python from 3.13 on) refuse a leaf without it.
    params.use_authority_key_identifier_extension = true;
    Ok(params.signed_by(key, &signer.issuer)?.der().clone())
}

/// Returns the extended key usages of an intermediate and of its leaves. A gateway is a server for edges and a client of other
/// gateways.
fn extended_key_usages(purpose: IssuerPurpose) -> Vec<ExtendedKeyUsagePurpose> {
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    match purpose {
        IssuerPurpose::Edges | IssuerPurpose::Clients => vec![ClientAuth],
        IssuerPurpose::Listeners => vec![ServerAuth],
        IssuerPurpose::Replicas => vec![ServerAuth, ClientAuth],
    }
}

fn ca_params((not_before, not_after): (u64, u64), depth: u8) -> CertificateParams {
    let mut params = params_with_dates(not_before, not_after);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(depth));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// Returns `not_before` of a certificate that is issued now, in Unix seconds.
fn issue_not_before() -> u64 {
    UnixTime::now()
        .as_secs()
        .saturating_sub(CLOCK_SKEW.as_secs())
}

fn params_with_dates(not_before: u64, not_after: u64) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.serial_number = Some(random_serial());
    params.not_before = to_offset_date_time(not_before);
    params.not_after = to_offset_date_time(not_after);
    params
}

pub(super) fn distinguished_name(common_name: &str, groups: Option<String>) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    if let Some(groups) = groups {
        subject.push(DnType::OrganizationName, groups);
    }
    let truncated: String = common_name.chars().take(MAX_COMMON_NAME).collect();
    subject.push(DnType::CommonName, truncated);
    subject
}

/// Returns a random serial number. rcgen otherwise derives it from the key: a renewal with the same key would repeat it, and
/// revoking one certificate would revoke both.
fn random_serial() -> SerialNumber {
    let mut bytes = secret::random_bytes::<16>();
    // Positive and without a leading zero, so that it reads back as it was written.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    SerialNumber::from_slice(&bytes)
}

/// Converts Unix seconds. A time that no certificate can state (after the year 9999) becomes 1970, which expires at once.
/// Such a time does not occur, since no certificate is valid longer than its root.
pub(crate) fn to_offset_date_time(seconds: u64) -> OffsetDateTime {
    i64::try_from(seconds)
        .ok()
        .and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok())
        .unwrap_or(OffsetDateTime::UNIX_EPOCH)
}
