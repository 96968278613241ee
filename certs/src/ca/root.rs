//! A root: its key, and the intermediates that sign in its name, each for one purpose.
//!
//! A leaf is signed by the intermediate of its purpose. An attacker who gets one of these keys is confined to that purpose. The
//! intermediate states its purpose by its extended key usage and by `spiffe://<trust domain>/issuer/<purpose>`. A root from
//! before the separation of purposes has no intermediates, and signs leaves itself.

use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use rustls_pki_types::{CertificateDer, UnixTime};
use time::OffsetDateTime;

use super::error::CaError;
use crate::certificate::{CLOCK_SKEW, Certificate};
use crate::identity::{self, IssuerPurpose};
use crate::name::{HostName, TrustDomain};
use crate::pem;
use crate::secret::{self, Fingerprint};
use causeway_config::Secret;

/// Lifetime of a root and of its intermediates.
const LIFETIME: Duration = Duration::from_hours(24 * 3650);

/// Longest validity of a listener's certificate: Apple's clients refuse more than 825 days, also below a private CA
/// (<https://support.apple.com/en-us/103769>).
const MAX_LISTENER_VALIDITY: Duration = Duration::from_hours(24 * 825);

/// Longest common name (RFC 5280, ub-common-name).
const MAX_COMMON_NAME: usize = 64;
/// A root signs its intermediates, and the certificate by which its successor's are recognised.
const DEPTH: u8 = 2;

/// Properties that differ between kinds of leaf.
pub(super) struct LeafProfile<'a> {
    pub(super) common_name: &'a str,
    pub(super) groups: Option<String>,
    pub(super) uri: Option<String>,
    pub(super) names: &'a [HostName],
    pub(super) lifetime: Duration,
}

impl<'a> LeafProfile<'a> {
    /// Returns the profile of a listener's leaf. An address is no common name: where no DNS name is among the alternative names,
    /// OpenSSL checks the common name by the name constraints of DNS names.
    pub(super) fn of_listener(names: &'a [HostName], lifetime: Duration) -> Self {
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

/// A certificate that signs, with its key.
pub(super) struct Intermediate {
    pub(super) certificate: CertificateDer<'static>,
    pub(super) issuer: Issuer<'static, KeyPair>,
    pub(super) facts: Certificate,
}

/// A root.
pub(super) struct Root {
    pub(super) own: Intermediate,
    /// Intermediates in the order of [`IssuerPurpose::ALL`].
    issuers: Option<Vec<Intermediate>>,
    /// Cross certificate of the same name and key by the root before. A peer that trusts only that one recognises this root by
    /// it.
    pub(super) crossed: Option<CertificateDer<'static>>,
    pub(super) fingerprint: Fingerprint,
    pub(super) domain: TrustDomain,
}

impl Intermediate {
    /// Reads a certificate that may sign, and its key, and checks that they match.
    pub(super) fn load(certificate_pem: &str, key_pem: &str) -> Result<Self, CaError> {
        let bad_certificate = |why| CaError::Unusable {
            part: "certificate",
            why,
        };
        let bad_key = |why| CaError::Unusable { part: "key", why };
        let certificate = pem::certificates(certificate_pem)
            .map_err(bad_certificate)?
            .swap_remove(0);
        let facts =
            Certificate::read(&certificate).map_err(|error| bad_certificate(error.to_string()))?;
        if !facts.authority {
            return Err(bad_certificate("it may not sign certificates".into()));
        }
        let key = KeyPair::from_pem(key_pem).map_err(|error| bad_key(error.to_string()))?;
        if key.subject_public_key_info() != facts.public_key {
            return Err(bad_key("the key does not match the CA certificate".into()));
        }
        Ok(Self {
            issuer: Issuer::from_ca_cert_der(&certificate, key)?,
            certificate,
            facts,
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
    /// A new root with new intermediates.
    pub(super) fn create(domain: &TrustDomain) -> Result<Self, CaError> {
        Self::create_since(domain, begin())
    }

    /// Creates a root with new intermediates, valid from `begins` on. A root that replaces another is valid from the beginning of
    /// the other, for machines whose clocks are behind.
    pub(super) fn create_since(domain: &TrustDomain, begins: u64) -> Result<Self, CaError> {
        let key = KeyPair::generate()?;
        let now = UnixTime::now().as_secs();
        let ends = now.saturating_add(LIFETIME.as_secs());
        // If all roots had the same name, a certificate of another gateway
        // would be reported as badly signed instead of unknown.
        let id = u32::from_be_bytes(secret::random::<4>());
        let mut params = authority((begins, ends), DEPTH);
        params.distinguished_name = subject(&format!("Causeway {id:08x} {domain}"), None);
        params.subject_alt_names = vec![SanType::URI(identity::root_uri(domain).try_into()?)];
        let root = params.self_signed(&key)?;
        let mut root = Self::load(&root.pem(), &key.serialize_pem())?;
        let make = |purpose| root.intermediate(purpose, id);
        root.issuers = Some(
            IssuerPurpose::ALL
                .map(make)
                .into_iter()
                .collect::<Result<_, _>>()?,
        );
        Ok(root)
    }

    /// Reads a root that signs leaves itself.
    pub(super) fn load(certificate_pem: &str, key_pem: &str) -> Result<Self, CaError> {
        let own = Intermediate::load(certificate_pem, key_pem)?;
        let domain = identity::domain_of_root(&own.facts).map_err(|error| CaError::Unusable {
            part: "certificate",
            why: error.to_string(),
        })?;
        let fingerprint = Fingerprint::of(&own.certificate);
        Ok(Self {
            fingerprint,
            own,
            issuers: None,
            crossed: None,
            domain,
        })
    }

    /// Combines a root with the stored intermediates, in the order of [`IssuerPurpose::ALL`].
    pub(super) fn with(
        mut self,
        issuers: Option<Vec<Intermediate>>,
        crossed: Option<CertificateDer<'static>>,
    ) -> Result<Self, CaError> {
        let bad = |why: String| CaError::Unusable {
            part: "certificate",
            why,
        };
        for (purpose, signer) in IssuerPurpose::ALL.iter().zip(issuers.iter().flatten()) {
            if identity::issuer_purpose(&signer.facts, &self.domain) != Some(*purpose) {
                return Err(bad(format!(
                    "it is not the intermediate that signs {purpose}"
                )));
            }
        }
        let again = crossed.as_ref().map(Certificate::read).transpose()?;
        if again.is_some_and(|facts| facts.public_key != self.own.facts.public_key) {
            return Err(bad(
                "the previous root has cross-signed another root".to_owned()
            ));
        }
        (self.issuers, self.crossed) = (issuers, crossed);
        Ok(self)
    }

    #[cfg(test)]
    pub(super) fn end_issuers(&mut self, not_after: UnixTime) {
        for issuer in self.issuers.iter_mut().flatten() {
            issuer.facts.not_after = not_after.as_secs();
        }
    }

    pub(super) fn issuers(&self) -> Option<&[Intermediate]> {
        self.issuers.as_deref()
    }

    fn intermediate(&self, purpose: IssuerPurpose, id: u32) -> Result<Intermediate, CaError> {
        let (key, domain) = (KeyPair::generate()?, &self.domain);
        let own = &self.own.facts;
        let mut params = authority((own.not_before, own.not_after), 0);
        params.distinguished_name = subject(&format!("Causeway {id:08x} {purpose} {domain}"), None);
        let uri = identity::issuer_uri(domain, purpose);
        params.subject_alt_names = vec![SanType::URI(uri.try_into()?)];
        params.extended_key_usages = usages(purpose);
        params.use_authority_key_identifier_extension = true;
        let signed = params.signed_by(&key, &self.own.issuer)?;
        Intermediate::load(&signed.pem(), &key.serialize_pem())
    }

    /// Signs the root that follows this one.
    pub(super) fn cross(&self, next: &Self) -> Result<CertificateDer<'static>, CaError> {
        let own = &self.own.facts;
        let ends = own.not_after.min(next.own.facts.not_after);
        let mut params = authority((own.not_before, ends), 1);
        let name = next.own.facts.common_name.as_deref().unwrap_or_default();
        params.distinguished_name = subject(name, None);
        let uri = identity::root_uri(&next.domain);
        params.subject_alt_names = vec![SanType::URI(uri.try_into()?)];
        params.use_authority_key_identifier_extension = true;
        let signed = params.signed_by(next.own.issuer.key(), &self.own.issuer)?;
        Ok(signed.der().clone())
    }

    /// Signs a leaf; then come the certificates by which it hangs on this root.
    pub(super) fn sign(
        &self,
        purpose: IssuerPurpose,
        key: &impl PublicKeyData,
        kind: LeafProfile<'_>,
    ) -> Result<Vec<CertificateDer<'static>>, CaError> {
        let issuers = self.issuers.as_deref().into_iter().flatten();
        let mut issuers = IssuerPurpose::ALL.iter().zip(issuers);
        let intermediate = issuers.find(|(of, _)| **of == purpose);
        let intermediate = intermediate.map(|(_, signer)| signer);
        let signer = intermediate.unwrap_or(&self.own);
        let leaf = sign_leaf(signer, purpose, key, kind)?;
        let behind = intermediate.map(|signer| signer.certificate.clone());
        Ok([leaf].into_iter().chain(behind).collect())
    }
}

/// Signs a leaf.
pub(super) fn sign_leaf(
    signer: &Intermediate,
    purpose: IssuerPurpose,
    key: &impl PublicKeyData,
    kind: LeafProfile<'_>,
) -> Result<CertificateDer<'static>, CaError> {
    let now = UnixTime::now().as_secs();
    if now > signer.facts.not_after {
        return Err(CaError::Expired);
    }
    let ends = now
        .saturating_add(kind.lifetime.as_secs())
        .min(signer.facts.not_after);
    let mut names = Vec::with_capacity(kind.names.len() + 1);
    for name in kind.names {
        names.push(name.alternative()?);
    }
    if let Some(uri) = kind.uri {
        names.push(SanType::URI(uri.try_into()?));
    }
    // Machines with slow clocks verify server certificates. Gateways verify the others, and read the time
    // of issue from `not_before`.
    let begins = match purpose {
        IssuerPurpose::Replicas => signer.facts.not_before,
        IssuerPurpose::Listeners => {
            let earliest = ends.saturating_sub(MAX_LISTENER_VALIDITY.as_secs());
            let earliest = signer.facts.not_before.max(earliest.saturating_add(1));
            earliest.min(begin())
        }
        IssuerPurpose::Edges | IssuerPurpose::Clients => begin(),
    };
    let mut params = dated(begins, ends);
    params.distinguished_name = subject(kind.common_name, kind.groups);
    params.subject_alt_names = names;
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = usages(purpose).into_iter().take(1).collect();
    // Strict verifiers (Python from 3.13 on) refuse a leaf without it.
    params.use_authority_key_identifier_extension = true;
    Ok(params.signed_by(key, &signer.issuer)?.der().clone())
}

/// Extended key usages that an intermediate permits. Its leaves have the first one; a gateway that is a client of another gateway needs both.
fn usages(purpose: IssuerPurpose) -> Vec<ExtendedKeyUsagePurpose> {
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    match purpose {
        IssuerPurpose::Edges | IssuerPurpose::Clients => vec![ClientAuth],
        IssuerPurpose::Listeners => vec![ServerAuth],
        IssuerPurpose::Replicas => vec![ServerAuth, ClientAuth],
    }
}

fn authority((begins, ends): (u64, u64), depth: u8) -> CertificateParams {
    let mut params = dated(begins, ends);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(depth));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// Returns the beginning of a certificate that is issued now, in Unix seconds.
fn begin() -> u64 {
    UnixTime::now()
        .as_secs()
        .saturating_sub(CLOCK_SKEW.as_secs())
}

fn dated(begins: u64, ends: u64) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.serial_number = Some(serial());
    params.not_before = moment(begins);
    params.not_after = moment(ends);
    params
}

pub(super) fn subject(common_name: &str, groups: Option<String>) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    if let Some(groups) = groups {
        subject.push(DnType::OrganizationName, groups);
    }
    let short: String = common_name.chars().take(MAX_COMMON_NAME).collect();
    subject.push(DnType::CommonName, short);
    subject
}

/// Returns a random serial number. rcgen otherwise derives it from the key: a renewal with the same key would repeat it, and
/// revoking one certificate would revoke both.
fn serial() -> SerialNumber {
    let mut bytes = secret::random::<16>();
    // Positive and without a leading zero, so that it reads back as it was written.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    SerialNumber::from_slice(&bytes)
}

/// A moment that no certificate can name (after the year 9999) becomes 1970, which expires at once:
/// it cannot arise, since every end is cut to the root's.
fn moment(seconds: u64) -> OffsetDateTime {
    i64::try_from(seconds)
        .ok()
        .and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok())
        .unwrap_or(OffsetDateTime::UNIX_EPOCH)
}
