//! An intermediate for listeners' certificates that another CA has signed, such as a company's CA.
//!
//! Clients that trust the root of that CA verify listeners. The intermediate is independent of our roots and of their
//! rotation, and is not accepted on the tunnel port. Its key is created here and stays in `ca.json`.

use causeway_tls::{Fingerprint, HostName, pem, provider};
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    PublicKeyData,
};
use rustls_pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage};
use x509_parser::prelude::{FromDer, X509Certificate, X509Error};

use super::root::{Intermediate, LeafProfile, distinguished_name, sign_leaf};
use super::{Ca, CaError, LeafCertificate, RotationStep};
use crate::certificate::{CaConstraints, Certificate, format_date};
use crate::identity::IssuerPurpose;
use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Maximum number of names that are logged because a chain does not permit them.
const MAX_REPORTED: usize = 10_000;

/// State of the intermediate: the key of a pending request, and the chain in use.
#[derive(Default)]
pub(super) struct ListenerCa {
    /// Number of changes so far. A copy with a smaller number is behind.
    pub(super) generation: u64,
    pub(super) request_key: Option<KeyPair>,
    pub(super) chain: Option<ListenerChain>,
    /// Roots of chains that were replaced. Clients keep them until the chains have ended.
    pub(super) former_roots: Vec<FormerRoot>,
}

/// Root of a chain that was replaced by one with another root.
pub(super) struct FormerRoot {
    pub(super) certificate: CertificateDer<'static>,
    /// Expiry of the replaced chain, in Unix seconds.
    pub(super) expires: u64,
}

/// Intermediate with the certificates up to its root.
pub(super) struct ListenerChain {
    /// Its `not_after` is that of the chain's first certificate to expire.
    pub(super) signer: Intermediate,
    /// Certificates, the intermediate first and the root last.
    pub(super) certificates: Vec<CertificateDer<'static>>,
    pub(super) fingerprint: Fingerprint,
    pub(super) has_name_constraints: bool,
    /// Names of listeners and nodes that the chain does not permit and that were already logged.
    reported: Mutex<HashSet<String>>,
}

/// Properties of the intermediate in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerCaInfo {
    /// The intermediate.
    pub intermediate: CaCertificateInfo,
    /// The root that clients trust.
    pub root: CaCertificateInfo,
    /// The certificate of the chain that expires first.
    pub first_to_expire: CaCertificateInfo,
    /// Whether the chain has name constraints.
    pub has_name_constraints: bool,
}

/// Properties of one certificate of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaCertificateInfo {
    /// The certificate.
    pub certificate: CertificateDer<'static>,
    /// Its common name, or its whole subject if it has none. Without control characters.
    pub subject: String,
    /// SHA-256 of the certificate.
    pub fingerprint: Fingerprint,
    /// Last second of its validity.
    pub not_after: UnixTime,
}

impl CaCertificateInfo {
    /// Reads the properties of a CA certificate.
    ///
    /// # Errors
    /// If the certificate cannot be parsed.
    pub fn parse(certificate: &CertificateDer<'_>) -> Result<Self, CaError> {
        let not_after = Duration::from_secs(Certificate::parse(certificate)?.not_after);
        Ok(Self {
            subject: CaConstraints::parse(certificate)?.subject.display_name,
            fingerprint: Fingerprint::of_certificate(certificate),
            not_after: UnixTime::since_unix_epoch(not_after),
            certificate: certificate.clone().into_owned(),
        })
    }
}

fn chain_error(why: String) -> CaError {
    CaError::Unusable { part: "chain", why }
}

impl ListenerCa {
    /// Whether this state is `previous` or a later one.
    pub(super) fn is_same_or_newer(&self, previous: &Self) -> bool {
        let content = |state: &Self| {
            let key = state.request_key.as_ref();
            let chain = state.chain.as_ref().map(|chain| chain.fingerprint);
            (key.map(KeyPair::subject_public_key_info), chain)
        };
        self.generation > previous.generation
            || self.generation == previous.generation && content(self) == content(previous)
    }

    /// Returns the chain, unless it has expired. Listeners then present our own intermediate again.
    pub(super) fn valid_chain(&self) -> Option<&ListenerChain> {
        let now = UnixTime::now();
        self.chain.as_ref().filter(|it| it.is_valid_at(now))
    }

    /// Returns the chain's fingerprint, and whether the chain is valid.
    pub(super) fn version_at(&self, now: UnixTime) -> Option<(Fingerprint, bool)> {
        let chain = self.chain.as_ref()?;
        Some((chain.fingerprint, chain.is_valid_at(now)))
    }

    /// Returns the roots that clients of listeners need in addition to our own: that of the chain, and those of replaced
    /// chains.
    pub(super) fn client_roots(&self) -> String {
        let now = UnixTime::now().as_secs();
        let chain = self.chain.iter().flat_map(ListenerChain::root);
        let former = self.former_roots.iter().filter(|root| now <= root.expires);
        let roots: Vec<_> = chain
            .chain(former.map(|root| &root.certificate))
            .cloned()
            .collect();
        pem::encode_chain(&roots)
    }

    /// Installs a chain, and keeps the root of the previous chain if it is a different one.
    fn install(&mut self, chain: ListenerChain) {
        let previous = self.chain.take();
        let previous = previous.iter().filter_map(|before| {
            Some(FormerRoot {
                certificate: before.root().first()?.clone(),
                expires: before.signer.parsed.not_after,
            })
        });
        self.former_roots.extend(previous);
        let now = UnixTime::now().as_secs();
        let is_needed =
            |root: &FormerRoot| now <= root.expires && *chain.root() != [root.certificate.clone()];
        self.former_roots.retain(is_needed);
        self.former_roots.sort_by_key(|root| Reverse(root.expires));
        let mut seen = HashSet::new();
        self.former_roots
            .retain(|root| seen.insert(root.certificate.clone()));
        self.chain = Some(chain);
        self.generation += 1;
    }

    /// Whether a certificate has the key of the pending request or of the intermediate in use.
    fn has_key_for(&self, certificate: &CertificateDer<'_>) -> Result<bool, CaError> {
        let public_key = Certificate::parse(certificate)?.public_key;
        Ok(self.key_for(&public_key).is_ok())
    }

    /// Reverses a chain that begins with its root, as some CAs write it.
    fn put_intermediate_first(&self, chain: &mut [CertificateDer<'_>]) -> Result<(), CaError> {
        let [first, .., last] = chain else {
            return Ok(());
        };
        if !self.has_key_for(first)? && self.has_key_for(last)? {
            chain.reverse();
        }
        Ok(())
    }

    /// Returns the key, as PEM, that belongs to the first certificate of a chain.
    fn key_for(&self, public_key: &[u8]) -> Result<String, CaError> {
        let installed = self.chain.iter().map(|chain| chain.signer.issuer.key());
        let mut keys = self.request_key.iter().chain(installed).peekable();
        if keys.peek().is_none() {
            return Err(chain_error(
                "no request was made in this data directory: make one by `causeway ca csr` and have it signed".into(),
            ));
        }
        let found = keys.find(|key| key.subject_public_key_info() == public_key);
        found.map(KeyPair::serialize_pem).ok_or_else(|| {
            chain_error(
                "its first certificate has another public key than the request of this data directory: put the signed certificate first; `causeway ca csr` prints the request again".into(),
            )
        })
    }
}

impl ListenerChain {
    /// Loads a chain that was checked when it was imported.
    pub(super) fn load(chain_pem: &str, key_pem: &str) -> Result<Self, CaError> {
        let certificates = pem::parse_certificates(chain_pem).map_err(chain_error)?;
        let mut signer = Intermediate::load(chain_pem, key_pem)?;
        for certificate in &certificates {
            let not_after = Certificate::parse(certificate)?.not_after;
            signer.parsed.not_after = signer.parsed.not_after.min(not_after);
        }
        Ok(Self {
            signer,
            fingerprint: Fingerprint::digest(pem::encode_chain(&certificates).as_bytes()),
            has_name_constraints: has_name_constraints(&certificates),
            reported: Mutex::default(),
            certificates,
        })
    }

    fn is_valid_at(&self, now: UnixTime) -> bool {
        now.as_secs() <= self.signer.parsed.not_after
    }

    /// Returns the root, which clients trust and listeners do not send.
    pub(super) fn root(&self) -> &[CertificateDer<'static>] {
        let end = self.certificates.len().saturating_sub(1);
        self.certificates.get(end..).unwrap_or_default()
    }

    /// Returns the certificates that listeners send behind the leaf.
    pub(super) fn sent_intermediates(&self) -> &[CertificateDer<'static>] {
        let end = self.certificates.len().saturating_sub(1);
        self.certificates.get(..end).unwrap_or_default()
    }

    /// Signs a leaf with one name or without a name, and verifies it like a client that trusts only the root.
    fn verify_name(&self, name: Option<&HostName>) -> Result<(), CaError> {
        let names = name.map_or(&[][..], std::slice::from_ref);
        let profile = LeafProfile::for_listener(names, Duration::from_mins(1));
        let key = KeyPair::generate()?;
        let leaf = sign_leaf(&self.signer, IssuerPurpose::Listeners, &key, profile)?;
        let signer = CaConstraints::parse(&self.signer.certificate)?;
        if CaConstraints::parse(&leaf)?.issuer.der != signer.subject.der {
            return Err(chain_error(format!(
                "the subject of {} has an attribute twice, or several in one part, and cannot be copied into certificates; have the request signed with its own subject",
                signer.subject.display_name
            )));
        }
        let name_text = name.map_or_else(|| "no name".to_owned(), ToString::to_string);
        self.verify(&leaf).map_err(|error| {
            chain_error(match error {
                webpki::Error::NameConstraintViolation => format!(
                    "its name constraints do not permit {name_text}; have the request signed by a CA that permits the names of nodes and listeners"
                ),
                error => format!("a certificate that it signs for {name_text} does not verify: {error}"),
            })
        })
    }

    /// Verifies a leaf like a client that trusts only the root.
    fn verify(&self, leaf: &CertificateDer<'_>) -> Result<(), webpki::Error> {
        let [root] = self.root() else {
            return Err(webpki::Error::UnknownIssuer);
        };
        EndEntityCert::try_from(leaf)?.verify_for_usage(
            provider().signature_verification_algorithms.all,
            &[webpki::anchor_from_trusted_cert(root)?],
            self.sent_intermediates(),
            UnixTime::now(),
            KeyUsage::server_auth(),
            None,
            None,
        )?;
        Ok(())
    }

    /// Signs a leaf, unless the chain's name constraints exclude one of its names: a client would reject that leaf.
    pub(super) fn issue(
        &self,
        names: &[HostName],
        lifetime: Duration,
    ) -> Result<Option<LeafCertificate>, CaError> {
        let (key, purpose) = (KeyPair::generate()?, IssuerPurpose::Listeners);
        let profile = LeafProfile::for_listener(names, lifetime);
        let leaf = sign_leaf(&self.signer, purpose, &key, profile)?;
        if self.has_name_constraints
            && let Err(error) = self.verify(&leaf)
        {
            self.log_not_permitted(names, &error);
            return Ok(None);
        }
        let chain = [leaf]
            .into_iter()
            .chain(self.sent_intermediates().iter().cloned());
        Ok(Some(LeafCertificate::new(
            chain.collect(),
            key.serialize_der(),
        )?))
    }

    /// Logs names that the chain does not permit, once for each name.
    fn log_not_permitted(&self, names: &[HostName], error: &webpki::Error) {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        let names = names.join(", ");
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if reported.len() < MAX_REPORTED && reported.insert(names.clone()) {
            tracing::warn!(
                names,
                %error,
                "the imported chain of listeners does not permit these names: their certificate is signed by Causeway's own CA, and clients that trust only the chain's root reject it"
            );
        }
    }
}

/// Checks each certificate of a chain, and that the next certificate has signed it, up to a root.
fn check_chain(chain: &[CertificateDer<'_>]) -> Result<(), CaError> {
    let mut issuers = chain.iter().skip(1);
    for (below, certificate) in (0..).zip(chain) {
        let constraints = CaConstraints::parse(certificate)?;
        let name = &constraints.subject.display_name;
        check_ca(&constraints, &Certificate::parse(certificate)?, below)?;
        let above = match issuers.next() {
            Some(above) => above,
            None if constraints.is_root() => certificate,
            None => {
                return Err(chain_error(format!(
                    "it ends at {name}, which {} has signed: append that certificate, and so on up to the root",
                    constraints.issuer.display_name
                )));
            }
        };
        let issuer = CaConstraints::parse(above)?.subject;
        if constraints.issuer.der != issuer.der {
            return Err(chain_error(format!(
                "{name} is signed by {}, but the next certificate is {}: put each certificate before its issuer, and no other certificate into the file",
                constraints.issuer.display_name, issuer.display_name
            )));
        }
        if !is_signed_by(certificate, above) {
            return Err(chain_error(format!(
                "the signature of {name} is not by the key of {} behind it; that may be an older or a newer certificate of the same CA",
                issuer.display_name
            )));
        }
    }
    Ok(())
}

/// Whether a signature is valid, as far as its algorithm is known here. [`ListenerChain::verify`] checks all signatures, but
/// does not report the wrong one.
fn is_signed_by(certificate: &CertificateDer<'_>, above: &CertificateDer<'_>) -> bool {
    let parse = |der| X509Certificate::from_der(der).ok().map(|(_, read)| read);
    let (Some(below), Some(above)) = (parse(certificate), parse(above)) else {
        return false;
    };
    let verified = below.verify_signature(Some(above.public_key()));
    !matches!(verified, Err(X509Error::SignatureVerificationError))
}

/// Checks that a certificate may now be a CA with `below` other CAs between itself and the listeners' certificates.
fn check_ca(constraints: &CaConstraints, parsed: &Certificate, below: u32) -> Result<(), CaError> {
    let name = &constraints.subject.display_name;
    let now = UnixTime::now().as_secs();
    let why = if !constraints.can_sign {
        format!(
            "{name} may not sign certificates; it must be a CA certificate (CA:TRUE, and keyCertSign as key usage)"
        )
    } else if now > parsed.not_after {
        format!("{name} expired at {}", format_date(parsed.not_after))
    } else if now < parsed.not_before {
        let not_before = format_date(parsed.not_before);
        format!("{name} is not valid before {not_before}; check the clocks")
    } else if !constraints.allows_server_auth {
        format!("{name} is not for servers: its extended key usage has no serverAuth")
    } else if let Some(depth) = constraints.path_length.filter(|depth| *depth < below) {
        format!(
            "{name} permits {depth} CAs below it (pathLenConstraint), and {below} stand before it in the file"
        )
    } else {
        return Ok(());
    };
    Err(chain_error(why))
}

/// Checks that the intermediate cannot sign certificates of clients, even if its key is stolen.
fn check_usage(certificate: &CertificateDer<'_>) -> Result<(), CaError> {
    let intermediate = Certificate::parse(certificate)?;
    if intermediate.server_auth && !intermediate.client_auth && !intermediate.is_any_purpose {
        return Ok(());
    }
    Err(chain_error(format!(
        "{} may sign certificates of clients too; ask the CA to sign the request with the extended key usage serverAuth and no other (openssl: extendedKeyUsage=serverAuth)",
        intermediate
            .common_name
            .as_deref()
            .unwrap_or("its first certificate")
    )))
}

impl Ca {
    /// Creates the key of a request, unless a request is pending.
    ///
    /// # Errors
    /// If no key can be created.
    pub fn request_listener_ca(self) -> Result<(Self, RotationStep), CaError> {
        if self.listeners.request_key.is_some() {
            return Ok((self, RotationStep::Unchanged));
        }
        self.renew_listener_request()
    }

    /// Creates the key of a request, and replaces that of a pending request.
    ///
    /// # Errors
    /// If no key can be created.
    pub fn renew_listener_request(mut self) -> Result<(Self, RotationStep), CaError> {
        self.listeners.request_key = Some(KeyPair::generate()?);
        self.listeners.generation += 1;
        Ok((self, RotationStep::Applied))
    }

    /// Returns the pending request in PEM. Its signature differs each time, but its content does not.
    ///
    /// # Errors
    /// If it cannot be signed.
    pub fn listener_request_pem(&self) -> Result<Option<String>, CaError> {
        let Some(key) = &self.listeners.request_key else {
            return Ok(None);
        };
        let id = Fingerprint::digest(&key.subject_public_key_info()).to_string();
        let id: String = id.chars().take(8).collect();
        let mut params = CertificateParams::default();
        let name = format!("Causeway {id} listeners {}", self.trust_domain());
        params.distinguished_name = distinguished_name(&name, None);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        Ok(Some(params.serialize_request(key)?.pem()?))
    }

    /// Installs the signed request with the certificates up to the root. The signed request comes first, and each certificate
    /// is followed by the one that has signed it.
    ///
    /// # Errors
    /// If the chain is malformed, or does not permit a certificate for one of `names`.
    pub fn import_listener_chain(
        mut self,
        chain_pem: &str,
        names: &[HostName],
    ) -> Result<(Self, RotationStep), CaError> {
        let mut certificates = pem::parse_certificates(chain_pem).map_err(chain_error)?;
        self.listeners.put_intermediate_first(&mut certificates)?;
        let intermediate = certificates.first().ok_or(CaError::Expired)?;
        let public_key = Certificate::parse(intermediate)?.public_key;
        let key = self.listeners.key_for(&public_key)?;
        check_chain(&certificates)?;
        check_usage(intermediate)?;
        let chain = ListenerChain::load(&pem::encode_chain(&certificates), &key)?;
        for name in std::iter::once(None).chain(names.iter().map(Some)) {
            chain.verify_name(name)?;
        }
        let installed = self.listeners.chain.as_ref();
        if installed.is_some_and(|it| it.fingerprint == chain.fingerprint) {
            return Ok((self, RotationStep::Unchanged));
        }
        self.listeners
            .request_key
            .take_if(|key| key.subject_public_key_info() == public_key);
        self.listeners.install(chain);
        Ok((self, RotationStep::Applied))
    }

    /// Removes the imported chain and its key. Listeners then present certificates of our own intermediate again.
    #[must_use]
    pub fn remove_listener_chain(mut self) -> (Self, RotationStep) {
        if self.listeners.chain.take().is_none() {
            return (self, RotationStep::Unchanged);
        }
        self.listeners.former_roots.clear();
        self.listeners.generation += 1;
        (self, RotationStep::Applied)
    }

    /// Returns the properties of the imported intermediate, if there is one, even if it has expired.
    pub fn listener_ca(&self) -> Option<ListenerCaInfo> {
        let certificates = &self.listeners.chain.as_ref()?.certificates;
        let infos: Result<Vec<_>, _> = certificates.iter().map(CaCertificateInfo::parse).collect();
        let infos = infos.ok()?;
        Some(ListenerCaInfo {
            intermediate: infos.first()?.clone(),
            root: infos.last()?.clone(),
            first_to_expire: infos.iter().min_by_key(|it| it.not_after)?.clone(),
            has_name_constraints: has_name_constraints(certificates),
        })
    }

    /// Whether the other CA has an earlier request or chain for listeners than this one.
    pub fn has_newer_listener_ca(&self, other: &Self) -> bool {
        self.listeners.generation > other.listeners.generation
    }

    /// Returns those names for which the imported chain permits no certificate. For these names listeners present
    /// certificates of our own intermediate.
    pub fn names_outside_chain(&self, names: Vec<HostName>) -> Vec<HostName> {
        let chain = self.listeners.chain.as_ref();
        let Some(chain) = chain.filter(|chain| chain.has_name_constraints) else {
            return Vec::new();
        };
        let is_not_permitted = |name: &HostName| chain.verify_name(Some(name)).is_err();
        names.into_iter().filter(is_not_permitted).collect()
    }
}

fn has_name_constraints(chain: &[CertificateDer<'_>]) -> bool {
    let parsed = chain.iter().map(CaConstraints::parse);
    parsed
        .flatten()
        .any(|constraints| constraints.has_name_constraints)
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::signed_request;
