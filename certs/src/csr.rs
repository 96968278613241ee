//! Certificate requests: created on the edge, checked on the gateway.
//!
//! The edge's key never leaves the edge: `PrivateKey` creates the key and a request that proves its possession.
//! `VerifiedPublicKey` is the part that the gateway takes from a request: the public key, after its signature was verified.
//! Names, usages and CA:TRUE in a request are not even read, unless people see them in a cluster. In that case the request
//! must name its node only.

use causeway_tls::{Fingerprint, HostName, NodeName, TrustDomain};
use rcgen::{CertificateParams, KeyPair, PublicKeyData, SanType, SubjectPublicKeyInfo};
use thiserror::Error;
use x509_parser::certification_request::X509CertificationRequestInfo;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::{FromDer, X509CertificationRequest};
use x509_parser::public_key::PublicKey;

use crate::identity::{edge_uri, gateway_uri};
use crate::signer_profile::SignerProfile;
use causeway_config::Secret;

/// Largest request that is accepted: an RSA-8192 request takes about 3 KiB.
const MAX_REQUEST: usize = 16 * 1024;
/// Shortest RSA key that is signed (NIST SP 800-57: 112 bits of security).
const MIN_RSA_BITS: usize = 2048;
/// id-Ed25519 (RFC 8410, section 3).
const ED25519: &str = "1.3.101.112";

/// Error that refuses a request.
#[derive(Debug, Error)]
pub enum CsrError {
    /// The request is larger than any honest one.
    #[error("the certificate request has {0} bytes, more than the {MAX_REQUEST} allowed")]
    TooLarge(usize),
    /// The input is not a certificate request.
    #[error("not a certificate request (PKCS #10 in DER): {0}")]
    Malformed(String),
    /// The signature is invalid: the sender does not hold the key.
    #[error("the certificate request is not signed by its own key")]
    Signature,
    /// Keys of this kind are not signed.
    #[error(
        "{0} keys are not accepted: use ECDSA P-256 or P-384, Ed25519, or RSA with at least 2048 bits"
    )]
    Key(String),
    /// The request does not state exactly the identity of its node.
    #[error(
        "the certificate request {asks}; the request of an edge must have no subject and exactly one name, the URI {uri}"
    )]
    UnexpectedContent {
        /// Description of the fault.
        asks: String,
        /// URI that the request should name.
        uri: String,
    },
    /// The subject or names are wrong, so the cluster's own signer would issue a certificate for another identity.
    #[error(
        "the certificate request {asks}; the request of an edge must have exactly the subject {wanted}, and nothing else"
    )]
    Subject {
        /// Description of the fault.
        asks: String,
        /// Subject that the request should have.
        wanted: String,
    },
    /// The key could not be created or used on this machine.
    #[error("cannot create the key or the certificate request: {0}")]
    Local(#[source] rcgen::Error),
}

/// Public key of a request whose signature was verified.
#[derive(Debug)]
pub struct VerifiedPublicKey(SubjectPublicKeyInfo);

impl VerifiedPublicKey {
    /// Returns the key of a request in DER, if the sender holds the key and the key is strong enough.
    pub fn verify(der: &[u8]) -> Result<Self, CsrError> {
        if der.len() > MAX_REQUEST {
            return Err(CsrError::TooLarge(der.len()));
        }
        let (trailing, request) = X509CertificationRequest::from_der(der)
            .map_err(|error| CsrError::Malformed(error.to_string()))?;
        if !trailing.is_empty() {
            return Err(CsrError::Malformed(
                "there are extra bytes after the request".into(),
            ));
        }
        let key = &request.certification_request_info.subject_pki;
        check_strength(key)?;
        request
            .verify_signature()
            .map_err(|_| CsrError::Signature)?;
        SubjectPublicKeyInfo::from_der(key.raw)
            .map(Self)
            .map_err(|_| CsrError::Key(key.algorithm.algorithm.to_id_string()))
    }

    /// Verifies a request that names this node and no other identity.
    pub fn verify_edge(
        der: &[u8],
        domain: &TrustDomain,
        node: &NodeName,
    ) -> Result<Self, CsrError> {
        let key = Self::verify(der)?;
        let (_, request) = X509CertificationRequest::from_der(der)
            .map_err(|error| CsrError::Malformed(error.to_string()))?;
        let uri = edge_uri(domain, node);
        match unexpected_extension(&request.certification_request_info, &uri) {
            None => Ok(key),
            Some(fault) => Err(CsrError::UnexpectedContent { asks: fault, uri }),
        }
    }

    /// Verifies a request whose subject, in the form of the cluster's own signer, is exactly this node.
    pub fn verify_subject(
        der: &[u8],
        subject: SignerProfile,
        node: &NodeName,
    ) -> Result<Self, CsrError> {
        let key = Self::verify(der)?;
        let (_, request) = X509CertificationRequest::from_der(der)
            .map_err(|error| CsrError::Malformed(error.to_string()))?;
        let info = &request.certification_request_info;
        let fault = match subject.node_of_subject(&info.subject) {
            Some(found) if found != *node => format!("is for node {found}, and not for {node}"),
            None => format!("has the subject \"{}\"", info.subject),
            Some(_) if !info.attributes().is_empty() => "contains more than its subject".to_owned(),
            Some(_) => return Ok(key),
        };
        let wanted = subject.to_string();
        Err(CsrError::Subject {
            asks: fault,
            wanted,
        })
    }

    /// Returns the SHA-256 of the key (`SubjectPublicKeyInfo`).
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::digest(&self.0.subject_public_key_info())
    }

    pub(crate) fn public_key(&self) -> &SubjectPublicKeyInfo {
        &self.0
    }
}

/// Whether two requests in PEM are equal except for their signatures: one key, one subject, the same names and extensions.
/// Signatures differ even with the same key.
pub fn is_same_request(one: &[u8], other: &[u8]) -> bool {
    let content = |pem: &[u8]| {
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem).ok()?;
        let (_, request) = X509CertificationRequest::from_der(&pem.contents).ok()?;
        Some(request.certification_request_info.raw.to_vec())
    };
    content(one).is_some_and(|content_of_one| content(other) == Some(content_of_one))
}

/// Returns a name as an alternative name of a certificate.
pub(crate) fn alternative_name(name: &HostName) -> Result<SanType, rcgen::Error> {
    Ok(match name {
        HostName::Dns(name) => SanType::DnsName(name.as_ref().try_into()?),
        HostName::Ip(address) => SanType::IpAddress(*address),
    })
}

/// Returns a description of an unexpected part of a request, or `None` if the request has only this one name.
fn unexpected_extension(request: &X509CertificationRequestInfo<'_>, uri: &str) -> Option<String> {
    if request.subject.iter().next().is_some() {
        return Some(format!("has the subject \"{}\"", request.subject));
    }
    let mut parsed = request.attributes().iter().map(|attribute| {
        use x509_parser::cri_attributes::ParsedCriAttribute::ExtensionRequest;
        match attribute.parsed_attribute() {
            ExtensionRequest(requested) => Ok(&requested.extensions),
            _ => Err(format!("has the attribute {}", attribute.oid)),
        }
    });
    let extensions = match (parsed.next(), parsed.next()) {
        (Some(Ok(extensions)), None) => extensions,
        (Some(Err(other)), _) | (_, Some(Err(other))) => return Some(other),
        (None, _) => return Some("contains no name".to_owned()),
        (_, Some(Ok(_))) => return Some("contains two lists of extensions".to_owned()),
    };
    let names = match extensions.as_slice() {
        [one] => match one.parsed_extension() {
            ParsedExtension::SubjectAlternativeName(names) => &names.general_names,
            _ => return Some(format!("contains the extension {}", one.oid)),
        },
        several => {
            let all: Vec<_> = several.iter().map(|each| each.oid.to_string()).collect();
            return Some(format!("contains the extensions {}", all.join(", ")));
        }
    };
    match names.as_slice() {
        [GeneralName::URI(only)] if *only == uri => None,
        others => {
            let all: Vec<_> = others.iter().map(ToString::to_string).collect();
            Some(format!("contains the names {}", all.join(", ")))
        }
    }
}

fn check_strength(key: &x509_parser::x509::SubjectPublicKeyInfo<'_>) -> Result<(), CsrError> {
    let malformed = |error: x509_parser::error::X509Error| CsrError::Malformed(error.to_string());
    match key.parsed().map_err(malformed)? {
        PublicKey::RSA(rsa) if rsa.key_size() >= MIN_RSA_BITS => Ok(()),
        PublicKey::RSA(rsa) => Err(CsrError::Key(format!("RSA-{}", rsa.key_size()))),
        PublicKey::EC(point) if matches!(point.key_size(), 256 | 384) => Ok(()),
        PublicKey::EC(point) => Err(CsrError::Key(format!("EC-{}", point.key_size()))),
        _ if key.algorithm.algorithm.to_id_string() == ED25519 => Ok(()),
        _ => Err(CsrError::Key(key.algorithm.algorithm.to_id_string())),
    }
}

/// Private key of an edge, or of a gateway whose certificate an external CA issues: P-256. `Debug` does not show it.
pub struct PrivateKey(KeyPair);

impl std::fmt::Debug for PrivateKey {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("PrivateKey(***)")
    }
}

impl PrivateKey {
    /// Creates a new key.
    pub fn generate() -> Result<Self, CsrError> {
        KeyPair::generate().map(Self).map_err(CsrError::Local)
    }

    /// Loads a key that `key_pem` has written.
    pub fn load(pem: &str) -> Result<Self, CsrError> {
        KeyPair::from_pem(pem).map(Self).map_err(CsrError::Local)
    }

    /// Builds a request for this key, in DER. The request names no identity: the name comes from the token.
    pub fn request(&self) -> Result<Vec<u8>, CsrError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        let request = params.serialize_request(&self.0).map_err(CsrError::Local)?;
        Ok(request.der().to_vec())
    }

    /// Builds a request for this key that names a node in the form that a cluster's signer requires, in PEM.
    pub fn edge_request(&self, domain: &TrustDomain, node: &NodeName) -> Result<String, CsrError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        let uri = edge_uri(domain, node);
        let uri = uri.try_into().map_err(CsrError::Local)?;
        params.subject_alt_names = vec![SanType::URI(uri)];
        let request = params.serialize_request(&self.0).map_err(CsrError::Local)?;
        request.pem().map_err(CsrError::Local)
    }

    /// Builds a request for this key in the form that the cluster's own signer requires.
    pub fn cluster_request(
        &self,
        subject: SignerProfile,
        node: &NodeName,
    ) -> Result<String, CsrError> {
        let mut params = CertificateParams::default();
        let mut name = rcgen::DistinguishedName::new();
        name.push(rcgen::DnType::OrganizationName, subject.organization());
        name.push(
            rcgen::DnType::CommonName,
            format!("{}{node}", subject.common_name_prefix()),
        );
        params.distinguished_name = name;
        let request = params.serialize_request(&self.0).map_err(CsrError::Local)?;
        request.pem().map_err(CsrError::Local)
    }

    /// Builds a request for this key whose subject is a user of a cluster, by the common name alone, in PEM.
    pub fn user_request(&self, user: &str) -> Result<String, CsrError> {
        let mut params = CertificateParams::default();
        let mut name = rcgen::DistinguishedName::new();
        name.push(rcgen::DnType::CommonName, user);
        params.distinguished_name = name;
        let request = params.serialize_request(&self.0).map_err(CsrError::Local)?;
        request.pem().map_err(CsrError::Local)
    }

    /// Builds a request for this key that names a gateway in the form for an external CA's signer, in PEM.
    pub fn gateway_request(
        &self,
        domain: &TrustDomain,
        names: &[HostName],
    ) -> Result<String, CsrError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        let uri = gateway_uri(domain).try_into();
        let uri_name = SanType::URI(uri.map_err(CsrError::Local)?);
        let names = names.iter().map(alternative_name);
        let names: Result<Vec<_>, _> = std::iter::once(Ok(uri_name)).chain(names).collect();
        params.subject_alt_names = names.map_err(CsrError::Local)?;
        let request = params.serialize_request(&self.0).map_err(CsrError::Local)?;
        request.pem().map_err(CsrError::Local)
    }

    /// Returns the private key as PEM.
    pub fn key_pem(&self) -> Secret {
        Secret::new(self.0.serialize_pem())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256, SignatureAlgorithm};

    fn request(algorithm: &'static SignatureAlgorithm) -> Vec<u8> {
        let key = KeyPair::generate_for(algorithm).unwrap();
        CertificateParams::default()
            .serialize_request(&key)
            .unwrap()
            .der()
            .to_vec()
    }

    #[test]
    fn an_edges_request_is_accepted() {
        let key = PrivateKey::generate().unwrap();
        VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
        assert_eq!(
            PrivateKey::load(key.key_pem().expose()).unwrap().key_pem(),
            key.key_pem()
        );
    }

    #[test]
    fn the_other_strong_keys_are_accepted() {
        for algorithm in [&PKCS_ECDSA_P384_SHA384, &PKCS_ED25519, &PKCS_RSA_SHA256] {
            VerifiedPublicKey::verify(&request(algorithm)).unwrap();
        }
    }

    #[test]
    fn requests_ask_the_same_if_key_and_subject_are_the_same() {
        let [key, other] = [(); 2].map(|()| PrivateKey::generate().unwrap());
        let of = |key: &PrivateKey, user| key.user_request(user).unwrap().into_bytes();
        let ours = of(&key, "gateway");
        assert!(is_same_request(&ours, &of(&key, "gateway")));
        for another in [of(&key, "admin"), of(&other, "gateway"), Vec::new()] {
            assert!(!is_same_request(&ours, &another));
        }
        assert!(!is_same_request(b"", b""));
    }

    fn td() -> TrustDomain {
        TrustDomain::parse("test.example").unwrap()
    }

    fn edge_1() -> NodeName {
        NodeName::parse("edge-1").unwrap()
    }

    #[test]
    fn a_cluster_request_names_only_its_node() {
        let key = PrivateKey::generate().unwrap();
        let pem = key.edge_request(&td(), &edge_1()).unwrap();
        let der = pem_of(&pem);
        VerifiedPublicKey::verify_edge(&der, &td(), &edge_1()).unwrap();
        let refused = |domain: &str, node: &str| {
            let domain = TrustDomain::parse(domain).unwrap();
            let node = NodeName::parse(node).unwrap();
            VerifiedPublicKey::verify_edge(&der, &domain, &node)
                .unwrap_err()
                .to_string()
        };
        let message = refused("test.example", "edge-2");
        assert!(
            message.contains("edge/edge-1") && message.contains("edge/edge-2"),
            "{message}"
        );
        assert!(refused("other.example", "edge-1").contains("test.example"));
    }

    fn pem_of(pem: &str) -> Vec<u8> {
        use rustls_pki_types::{CertificateSigningRequestDer, pem::PemObject};
        let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes());
        der.unwrap().to_vec()
    }

    #[test]
    fn extra_fields_of_a_cluster_request_are_refused_by_name() {
        let uri = |text: &str| SanType::URI(text.try_into().unwrap());
        let own = || uri("spiffe://test.example/edge/edge-1");
        let bare = || {
            let mut params = CertificateParams::default();
            params.distinguished_name = rcgen::DistinguishedName::new();
            params
        };
        let refused = |params: CertificateParams| {
            let key = KeyPair::generate().unwrap();
            let request = params.serialize_request(&key).unwrap();
            let refused = VerifiedPublicKey::verify_edge(request.der(), &td(), &edge_1());
            refused.unwrap_err().to_string()
        };
        assert!(refused(bare()).contains("contains no name"));
        let mut named = bare();
        named.subject_alt_names = vec![own()];
        named.distinguished_name.push(
            rcgen::DnType::CommonName,
            rcgen::DnValue::Utf8String("edge-1".into()),
        );
        assert!(refused(named).contains("has the subject"));
        let mut two = bare();
        two.subject_alt_names = vec![own(), SanType::DnsName("listener".try_into().unwrap())];
        assert!(refused(two).contains("listener"));
        let mut usage = bare();
        usage.subject_alt_names = vec![own()];
        usage.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
        assert!(refused(usage).contains("contains the extensions"));
        let mut authority = bare();
        authority.subject_alt_names = vec![own()];
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        assert!(refused(authority).contains("contains the extensions"));
    }

    #[test]
    fn a_p521_key_is_refused_by_name() {
        let refused =
            VerifiedPublicKey::verify(&request(&rcgen::PKCS_ECDSA_P521_SHA512)).unwrap_err();
        assert!(matches!(refused, CsrError::Key(_)), "{refused}");
    }

    #[test]
    fn a_request_with_another_key_is_refused() {
        let mut der = request(&rcgen::PKCS_ECDSA_P256_SHA256);
        let other = PrivateKey::generate().unwrap();
        let (mine, theirs) = (point(&der), other.0.public_key_raw().to_vec());
        let at = der
            .windows(mine.len())
            .position(|window| window == mine)
            .unwrap();
        der[at..at + theirs.len()].copy_from_slice(&theirs);
        assert!(matches!(
            VerifiedPublicKey::verify(&der),
            Err(CsrError::Signature)
        ));
    }

    fn point(der: &[u8]) -> Vec<u8> {
        let (_, request) = X509CertificationRequest::from_der(der).unwrap();
        request
            .certification_request_info
            .subject_pki
            .subject_public_key
            .data
            .to_vec()
    }

    #[test]
    fn malformed_requests_are_refused() {
        assert!(matches!(
            VerifiedPublicKey::verify(b""),
            Err(CsrError::Malformed(_))
        ));
        assert!(matches!(
            VerifiedPublicKey::verify(&vec![0x30; 17_000]),
            Err(CsrError::TooLarge(17_000))
        ));
        let mut long = request(&rcgen::PKCS_ECDSA_P256_SHA256);
        long.push(0);
        assert!(matches!(
            VerifiedPublicKey::verify(&long),
            Err(CsrError::Malformed(_))
        ));
        let short = &request(&rcgen::PKCS_ECDSA_P256_SHA256)[..40];
        assert!(matches!(
            VerifiedPublicKey::verify(short),
            Err(CsrError::Malformed(_))
        ));
    }
}
