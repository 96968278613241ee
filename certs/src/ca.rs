//! The certificate authority: one root, and everything it signs.
//!
//! Owns the root's key. Every certificate is built here from what the caller of a function states:
//! of a request only the verified public key is taken (`CsrKey`), never its names, usages or its
//! wish to be a CA. An edge and a caller get clientAuth only, gateways and fronts serverAuth only,
//! so that no certificate can stand in for another kind.
//! Never asks whether somebody may have a certificate; that is the token's or the operator's word.

use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use rustls_pki_types::{CertificateDer, UnixTime};
use thiserror::Error;
use time::OffsetDateTime;

use crate::certificate::{CLOCK_SKEW, Certificate, CertificateError};
use crate::csr::CsrKey;
use crate::identity;
use crate::leaf::{Leaf, LeafError};
use crate::name::{self, FrontName, GatewayName, HostName, NameError, NodeName, TrustDomain};
use crate::pem;
use crate::secret::{self, Fingerprint, Secret};

/// How long a root lives.
const ROOT_LIFETIME: Duration = Duration::from_hours(24 * 3650);
/// Longest common name (RFC 5280, ub-common-name).
const MAX_COMMON_NAME: usize = 64;

/// Why a root could not be made or read, or a certificate not be signed.
#[derive(Debug, Error)]
pub enum CaError {
    /// The stored root or key is unusable.
    #[error("the CA's {part} is unusable: {why}")]
    Unusable {
        /// `certificate` or `key`.
        part: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The root has ended; nothing that it signs would be accepted.
    #[error("the CA's certificate has expired; make a new CA and enrol the edges again")]
    Expired,
    /// A name does not fit into a certificate.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Our own new certificate does not read.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// Our own new certificate and key do not go together.
    #[error(transparent)]
    Leaf(#[from] LeafError),
    /// rcgen refused.
    #[error("cannot sign: {0}")]
    Sign(#[from] rcgen::Error),
}

/// A certificate for a key that somebody else holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issued {
    /// The certificate.
    pub certificate: CertificateDer<'static>,
    /// Its last second of validity.
    pub not_after: UnixTime,
    /// Its serial number, as it stands in the certificate.
    pub serial: Vec<u8>,
}

impl Issued {
    /// The certificate as PEM.
    pub fn pem(&self) -> String {
        pem::encode_chain(std::slice::from_ref(&self.certificate))
    }
}

/// A root with its key. `Debug` shows neither.
pub struct Ca {
    root: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
    domain: TrustDomain,
    fingerprint: Fingerprint,
    not_after: u64,
}

impl std::fmt::Debug for Ca {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Ca")
            .field("domain", &self.domain)
            .field("fingerprint", &self.fingerprint)
            .finish_non_exhaustive()
    }
}

/// What tells one kind of leaf from another.
struct Kind<'a> {
    common_name: &'a str,
    groups: Option<String>,
    uri: Option<String>,
    names: &'a [HostName],
    purpose: ExtendedKeyUsagePurpose,
    lifetime: Duration,
}

impl Ca {
    /// Makes a new root with a new key.
    pub fn create(domain: &TrustDomain) -> Result<Self, CaError> {
        let key = KeyPair::generate()?;
        let now = UnixTime::now().as_secs();
        let mut params = CertificateParams::default();
        params.serial_number = Some(serial());
        params.not_before = moment(now.saturating_sub(CLOCK_SKEW.as_secs()));
        params.not_after = moment(now.saturating_add(ROOT_LIFETIME.as_secs()));
        // Roots of one name would differ in their signatures only: a certificate of another gateway
        // would be called badly signed instead of unknown.
        let id = u32::from_be_bytes(secret::random::<4>());
        params.distinguished_name = subject(&format!("Causeway {id:08x} {domain}"), None);
        params.subject_alt_names = vec![SanType::URI(identity::root_uri(domain).try_into()?)];
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let root = params.self_signed(&key)?;
        Self::load(&root.pem(), &key.serialize_pem())
    }

    /// Reads a root and its key, and checks that they are one.
    pub fn load(certificate_pem: &str, key_pem: &str) -> Result<Self, CaError> {
        let bad_certificate = |why| CaError::Unusable {
            part: "certificate",
            why,
        };
        let bad_key = |why| CaError::Unusable { part: "key", why };
        let root = pem::certificates(certificate_pem)
            .map_err(bad_certificate)?
            .swap_remove(0);
        let facts = Certificate::read(&root).map_err(|error| bad_certificate(error.to_string()))?;
        if !facts.authority {
            return Err(bad_certificate("it may not sign certificates".into()));
        }
        let domain =
            identity::domain_of_root(&facts).map_err(|error| bad_certificate(error.to_string()))?;
        let key = KeyPair::from_pem(key_pem).map_err(|error| bad_key(error.to_string()))?;
        if key.subject_public_key_info() != facts.public_key {
            return Err(bad_key("it is not the key of the CA's certificate".into()));
        }
        let issuer = Issuer::from_ca_cert_der(&root, key)?;
        let fingerprint = Fingerprint::of(&root);
        Ok(Self {
            root,
            issuer,
            domain,
            fingerprint,
            not_after: facts.not_after,
        })
    }

    /// The root certificate.
    pub fn root(&self) -> &CertificateDer<'static> {
        &self.root
    }

    /// The root certificate as PEM, for `curl --cacert`.
    pub fn root_pem(&self) -> String {
        pem::encode_chain(std::slice::from_ref(&self.root))
    }

    /// The root's private key as PEM.
    pub fn key_pem(&self) -> Secret {
        Secret::new(self.issuer.key().serialize_pem())
    }

    /// The trust domain that the root names.
    pub fn trust_domain(&self) -> &TrustDomain {
        &self.domain
    }

    /// What a join token carries to tell this root from others.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// A certificate for an edge's key: this node, as a client, and nothing else.
    pub fn issue_edge(
        &self,
        key: &CsrKey,
        node: &NodeName,
        lifetime: Duration,
    ) -> Result<Issued, CaError> {
        let kind = Kind {
            common_name: node.as_str(),
            groups: None,
            uri: Some(identity::edge_uri(&self.domain, node)),
            names: &[node.into()],
            purpose: ExtendedKeyUsagePurpose::ClientAuth,
            lifetime,
        };
        let certificate = self.sign(key.public_key(), kind)?;
        let facts = Certificate::read(&certificate)?;
        let not_after = UnixTime::since_unix_epoch(Duration::from_secs(facts.not_after));
        Ok(Issued {
            certificate,
            not_after,
            serial: facts.serial,
        })
    }

    /// A gateway's leaf for its tunnel port. The chain includes the root, in which an edge that
    /// knows only the fingerprint of its token recognises this CA.
    pub fn issue_gateway(
        &self,
        names: &[GatewayName],
        lifetime: Duration,
    ) -> Result<Leaf, CaError> {
        let kind = Kind {
            common_name: "causeway gateway",
            groups: None,
            uri: Some(identity::gateway_uri(&self.domain)),
            names,
            purpose: ExtendedKeyUsagePurpose::ServerAuth,
            lifetime,
        };
        self.leaf(kind, true)
    }

    /// A leaf that a front shows to its callers under these names.
    pub fn mint_front(&self, names: &[FrontName], lifetime: Duration) -> Result<Leaf, CaError> {
        let first = names.first().map(ToString::to_string);
        let kind = Kind {
            common_name: first.as_deref().unwrap_or("causeway front"),
            groups: None,
            uri: None,
            names,
            purpose: ExtendedKeyUsagePurpose::ServerAuth,
            lifetime,
        };
        self.leaf(kind, false)
    }

    /// A caller's certificate with its key. The groups stand in one organization, with commas.
    pub fn issue_caller(
        &self,
        name: &str,
        groups: &[String],
        lifetime: Duration,
    ) -> Result<Leaf, CaError> {
        name::check_caller(name)?;
        let groups = identity::join_groups(groups)?;
        let kind = Kind {
            common_name: name,
            groups: Some(groups).filter(|groups| !groups.is_empty()),
            uri: Some(identity::caller_uri(&self.domain, name)),
            names: &[],
            purpose: ExtendedKeyUsagePurpose::ClientAuth,
            lifetime,
        };
        self.leaf(kind, false)
    }

    fn leaf(&self, kind: Kind<'_>, with_root: bool) -> Result<Leaf, CaError> {
        let key = KeyPair::generate()?;
        let mut chain = vec![self.sign(&key, kind)?];
        if with_root {
            chain.push(self.root.clone());
        }
        Ok(Leaf::new(chain, key.serialize_der())?)
    }

    fn sign(
        &self,
        key: &impl PublicKeyData,
        kind: Kind<'_>,
    ) -> Result<CertificateDer<'static>, CaError> {
        let now = UnixTime::now().as_secs();
        if now > self.not_after {
            return Err(CaError::Expired);
        }
        let ends = now
            .saturating_add(kind.lifetime.as_secs())
            .min(self.not_after);
        let mut names = Vec::with_capacity(kind.names.len() + 1);
        for name in kind.names {
            names.push(match name {
                HostName::Dns(name) => SanType::DnsName(name.as_ref().try_into()?),
                HostName::Ip(address) => SanType::IpAddress(*address),
            });
        }
        if let Some(uri) = kind.uri {
            names.push(SanType::URI(uri.try_into()?));
        }
        let mut params = CertificateParams::default();
        params.serial_number = Some(serial());
        params.not_before = moment(now.saturating_sub(CLOCK_SKEW.as_secs()));
        params.not_after = moment(ends);
        params.distinguished_name = subject(kind.common_name, kind.groups);
        params.subject_alt_names = names;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![kind.purpose];
        // Strict verifiers (Python from 3.13 on) refuse a leaf without it.
        params.use_authority_key_identifier_extension = true;
        Ok(params.signed_by(key, &self.issuer)?.der().clone())
    }
}

fn subject(common_name: &str, groups: Option<String>) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    if let Some(groups) = groups {
        subject.push(DnType::OrganizationName, groups);
    }
    let short: String = common_name.chars().take(MAX_COMMON_NAME).collect();
    subject.push(DnType::CommonName, short);
    subject
}

/// Random, because rcgen otherwise derives it from the key: a renewal with the same key would
/// repeat it, and revoking one certificate would revoke both.
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

#[cfg(test)]
mod tests;
