//! An intermediate for listeners' certificates that another CA has signed, such as a company's.
//!
//! Clients that trust the root of that CA verify listeners. The intermediate is independent of our roots and of their
//! rotation, and vouches for nobody on the tunnel port. Its key is made here and stays in `ca.json`.

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    PublicKeyData,
};
use rustls_pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage};
use x509_parser::prelude::{FromDer, X509Certificate, X509Error};

use super::root::{Intermediate, LeafProfile, sign_leaf, subject};
use super::{Ca, CaError, LeafCertificate, RotationStep};
use crate::certificate::{CaConstraints, Certificate, date};
use crate::crypto::provider;
use crate::identity::IssuerPurpose;
use crate::name::HostName;
use crate::pem;
use crate::secret::Fingerprint;
use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Names that are logged because a chain does not permit them, at most.
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
    /// Last second of the replaced chain, in Unix time.
    pub(super) until: u64,
}

/// Intermediate with the certificates up to its root.
pub(super) struct ListenerChain {
    /// Its `not_after` is that of the chain's first certificate to expire.
    pub(super) signer: Intermediate,
    /// The intermediate first, the root last.
    pub(super) certificates: Vec<CertificateDer<'static>>,
    pub(super) fingerprint: Fingerprint,
    pub(super) limits_names: bool,
    /// Names of listeners and nodes that the chain does not permit, as far as that was logged.
    reported: Mutex<HashSet<String>>,
}

/// Facts of the intermediate in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerCaInfo {
    /// The intermediate.
    pub intermediate: CaCertificateInfo,
    /// The root that clients trust.
    pub root: CaCertificateInfo,
    /// The certificate of the chain that ends first.
    pub first_to_end: CaCertificateInfo,
    /// Whether the chain has name constraints.
    pub limits_names: bool,
}

/// Facts of one certificate of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaCertificateInfo {
    /// The certificate.
    pub certificate: CertificateDer<'static>,
    /// Its common name, or its whole subject if it has none. Without control characters.
    pub subject: String,
    /// SHA-256 of the certificate.
    pub fingerprint: Fingerprint,
    /// Its last second.
    pub not_after: UnixTime,
}

impl CaCertificateInfo {
    /// Reads the facts of a CA's certificate.
    ///
    /// # Errors
    /// If it cannot be parsed.
    pub fn read(certificate: &CertificateDer<'_>) -> Result<Self, CaError> {
        let ends = Duration::from_secs(Certificate::read(certificate)?.not_after);
        Ok(Self {
            subject: CaConstraints::read(certificate)?.subject.common,
            fingerprint: Fingerprint::of(certificate),
            not_after: UnixTime::since_unix_epoch(ends),
            certificate: certificate.clone().into_owned(),
        })
    }
}

fn unusable(why: String) -> CaError {
    CaError::Unusable { part: "chain", why }
}

impl ListenerCa {
    /// Whether this state is `before` or a later one.
    pub(super) fn goes_on_from(&self, before: &Self) -> bool {
        let content = |of: &Self| {
            let key = of.request_key.as_ref();
            let chain = of.chain.as_ref().map(|chain| chain.fingerprint);
            (key.map(KeyPair::subject_public_key_info), chain)
        };
        self.generation > before.generation
            || self.generation == before.generation && content(self) == content(before)
    }

    /// Returns the chain, unless it has expired: listeners then use our own intermediate again.
    pub(super) fn valid_chain(&self) -> Option<&ListenerChain> {
        let now = UnixTime::now();
        self.chain.as_ref().filter(|it| it.is_valid_at(now))
    }

    /// Returns the chain's fingerprint, and whether the chain is valid.
    pub(super) fn version_at(&self, now: UnixTime) -> Option<(Fingerprint, bool)> {
        let chain = self.chain.as_ref()?;
        Some((chain.fingerprint, chain.is_valid_at(now)))
    }

    /// Returns the roots that clients of listeners need beside our own: that of the chain, and former ones.
    pub(super) fn client_roots(&self) -> String {
        let now = UnixTime::now().as_secs();
        let chain = self.chain.iter().flat_map(ListenerChain::root);
        let former = self.former_roots.iter().filter(|root| now <= root.until);
        let roots: Vec<_> = chain
            .chain(former.map(|root| &root.certificate))
            .cloned()
            .collect();
        pem::encode_chain(&roots)
    }

    /// Installs a chain, and keeps the root of the one before if it is another.
    fn install(&mut self, chain: ListenerChain) {
        let before = self.chain.take();
        let before = before.iter().filter_map(|before| {
            Some(FormerRoot {
                certificate: before.root().first()?.clone(),
                until: before.signer.facts.not_after,
            })
        });
        self.former_roots.extend(before);
        let now = UnixTime::now().as_secs();
        let stays =
            |root: &FormerRoot| now <= root.until && *chain.root() != [root.certificate.clone()];
        self.former_roots.retain(stays);
        self.former_roots.sort_by_key(|root| Reverse(root.until));
        let mut seen = HashSet::new();
        self.former_roots
            .retain(|root| seen.insert(root.certificate.clone()));
        self.chain = Some(chain);
        self.generation += 1;
    }

    /// Whether a certificate is of the pending request, or of the intermediate in use.
    fn is_ours(&self, certificate: &CertificateDer<'_>) -> Result<bool, CaError> {
        let public_key = Certificate::read(certificate)?.public_key;
        Ok(self.key_for(&public_key).is_ok())
    }

    /// Reverses a chain that begins with its root, as some CAs write it.
    fn put_intermediate_first(&self, chain: &mut [CertificateDer<'_>]) -> Result<(), CaError> {
        let [first, .., last] = chain else {
            return Ok(());
        };
        if !self.is_ours(first)? && self.is_ours(last)? {
            chain.reverse();
        }
        Ok(())
    }

    /// Returns the key, as PEM, that belongs to the first certificate of a chain.
    fn key_for(&self, public_key: &[u8]) -> Result<String, CaError> {
        let installed = self.chain.iter().map(|chain| chain.signer.issuer.key());
        let mut keys = self.request_key.iter().chain(installed).peekable();
        if keys.peek().is_none() {
            return Err(unusable(
                "no request was made in this data directory: make one by `causeway ca csr` and have it signed".into(),
            ));
        }
        let found = keys.find(|key| key.subject_public_key_info() == public_key);
        found.map(KeyPair::serialize_pem).ok_or_else(|| {
            unusable(
                "its first certificate has another public key than the request of this data directory: put the signed certificate first; `causeway ca csr` prints the request again".into(),
            )
        })
    }
}

impl ListenerChain {
    /// Reads what was checked when it was imported.
    pub(super) fn load(chain_pem: &str, key_pem: &str) -> Result<Self, CaError> {
        let certificates = pem::certificates(chain_pem).map_err(unusable)?;
        let mut signer = Intermediate::load(chain_pem, key_pem)?;
        for certificate in &certificates {
            let ends = Certificate::read(certificate)?.not_after;
            signer.facts.not_after = signer.facts.not_after.min(ends);
        }
        Ok(Self {
            signer,
            fingerprint: Fingerprint::digest(pem::encode_chain(&certificates).as_bytes()),
            limits_names: limits_names(&certificates),
            reported: Mutex::default(),
            certificates,
        })
    }

    fn is_valid_at(&self, now: UnixTime) -> bool {
        now.as_secs() <= self.signer.facts.not_after
    }

    /// Returns the root, which clients trust and listeners do not send.
    pub(super) fn root(&self) -> &[CertificateDer<'static>] {
        let end = self.certificates.len().saturating_sub(1);
        self.certificates.get(end..).unwrap_or_default()
    }

    /// Returns the certificates that listeners send behind the leaf.
    pub(super) fn sent(&self) -> &[CertificateDer<'static>] {
        let end = self.certificates.len().saturating_sub(1);
        self.certificates.get(..end).unwrap_or_default()
    }

    /// Signs a leaf, with a name or none, and verifies it as a client does that trusts the root only.
    fn verify_name(&self, name: Option<&HostName>) -> Result<(), CaError> {
        let names = name.map_or(&[][..], std::slice::from_ref);
        let profile = LeafProfile::of_listener(names, Duration::from_mins(1));
        let key = KeyPair::generate()?;
        let leaf = sign_leaf(&self.signer, IssuerPurpose::Listeners, &key, profile)?;
        let signer = CaConstraints::read(&self.signer.certificate)?;
        if CaConstraints::read(&leaf)?.issuer.der != signer.subject.der {
            return Err(unusable(format!(
                "the subject of {} has an attribute twice, or several in one part, and cannot be copied into certificates; have the request signed with its own subject",
                signer.subject.common
            )));
        }
        let shown = name.map_or_else(|| "no name".to_owned(), ToString::to_string);
        self.verify(&leaf).map_err(|error| {
            unusable(match error {
                webpki::Error::NameConstraintViolation => format!(
                    "its name constraints do not permit {shown}; have the request signed by a CA that permits the names of nodes and listeners"
                ),
                error => format!("a certificate that it signs for {shown} does not verify: {error}"),
            })
        })
    }

    /// Verifies a leaf as a client does that trusts the root only.
    fn verify(&self, leaf: &CertificateDer<'_>) -> Result<(), webpki::Error> {
        let [root] = self.root() else {
            return Err(webpki::Error::UnknownIssuer);
        };
        EndEntityCert::try_from(leaf)?.verify_for_usage(
            provider().signature_verification_algorithms.all,
            &[webpki::anchor_from_trusted_cert(root)?],
            self.sent(),
            UnixTime::now(),
            KeyUsage::server_auth(),
            None,
            None,
        )?;
        Ok(())
    }

    /// Signs a leaf, unless the chain's name constraints do not permit one of its names. A client would reject that.
    pub(super) fn mint(
        &self,
        names: &[HostName],
        lifetime: Duration,
    ) -> Result<Option<LeafCertificate>, CaError> {
        let (key, purpose) = (KeyPair::generate()?, IssuerPurpose::Listeners);
        let profile = LeafProfile::of_listener(names, lifetime);
        let leaf = sign_leaf(&self.signer, purpose, &key, profile)?;
        if self.limits_names
            && let Err(error) = self.verify(&leaf)
        {
            self.report(names, &error);
            return Ok(None);
        }
        let chain = [leaf].into_iter().chain(self.sent().iter().cloned());
        Ok(Some(LeafCertificate::new(
            chain.collect(),
            key.serialize_der(),
        )?))
    }

    /// Logs, once, that the chain does not permit these names.
    fn report(&self, names: &[HostName], error: &webpki::Error) {
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

/// Checks each certificate, and that each is signed by the one behind it, up to a root.
fn check_chain(chain: &[CertificateDer<'_>]) -> Result<(), CaError> {
    let mut behind = chain.iter().skip(1);
    for (below, certificate) in (0..).zip(chain) {
        let authority = CaConstraints::read(certificate)?;
        let name = &authority.subject.common;
        check_ca(&authority, &Certificate::read(certificate)?, below)?;
        let above = match behind.next() {
            Some(above) => above,
            None if authority.is_root() => certificate,
            None => {
                return Err(unusable(format!(
                    "it ends at {name}, which {} has signed: append that certificate, and so on up to the root",
                    authority.issuer.common
                )));
            }
        };
        let issuer = CaConstraints::read(above)?.subject;
        if authority.issuer.der != issuer.der {
            return Err(unusable(format!(
                "{name} is signed by {}, but the next certificate is {}: put each certificate before its issuer, and no other certificate into the file",
                authority.issuer.common, issuer.common
            )));
        }
        if !is_signed_by(certificate, above) {
            return Err(unusable(format!(
                "the signature of {name} is not by the key of {} behind it; that may be an older or a newer certificate of the same CA",
                issuer.common
            )));
        }
    }
    Ok(())
}

/// Whether a signature is right, as far as its kind is known here. `verify_leaf` checks all of them, without saying which is wrong.
fn is_signed_by(certificate: &CertificateDer<'_>, above: &CertificateDer<'_>) -> bool {
    let read = |der| X509Certificate::from_der(der).ok().map(|(_, read)| read);
    let (Some(below), Some(above)) = (read(certificate), read(above)) else {
        return false;
    };
    let verified = below.verify_signature(Some(above.public_key()));
    !matches!(verified, Err(X509Error::SignatureVerificationError))
}

/// Checks that a certificate may be, now, a CA with `below` others between itself and the listeners' certificates.
fn check_ca(authority: &CaConstraints, facts: &Certificate, below: u32) -> Result<(), CaError> {
    let name = &authority.subject.common;
    let now = UnixTime::now().as_secs();
    let why = if !authority.signs {
        format!(
            "{name} may not sign certificates; it must be a CA certificate (CA:TRUE, and keyCertSign as key usage)"
        )
    } else if now > facts.not_after {
        format!("{name} expired at {}", date(facts.not_after))
    } else if now < facts.not_before {
        let begins = date(facts.not_before);
        format!("{name} is not valid before {begins}; check the clocks")
    } else if !authority.servers {
        format!("{name} is not for servers: its extended key usage has no serverAuth")
    } else if let Some(depth) = authority.depth.filter(|depth| *depth < below) {
        format!(
            "{name} permits {depth} CAs below it (pathLenConstraint), and {below} stand before it in the file"
        )
    } else {
        return Ok(());
    };
    Err(unusable(why))
}

/// Checks that the intermediate cannot sign certificates of clients, whoever has its key.
fn check_usage(certificate: &CertificateDer<'_>) -> Result<(), CaError> {
    let intermediate = Certificate::read(certificate)?;
    if intermediate.server_auth && !intermediate.client_auth && !intermediate.any_use {
        return Ok(());
    }
    Err(unusable(format!(
        "{} may sign certificates of clients too; ask the CA to sign the request with the extended key usage serverAuth and no other (openssl: extendedKeyUsage=serverAuth)",
        intermediate
            .common_name
            .as_deref()
            .unwrap_or("its first certificate")
    )))
}

impl Ca {
    /// Makes the key of a request, unless one is pending.
    ///
    /// # Errors
    /// If no key can be made.
    pub fn request_listener_ca(self) -> Result<(Self, RotationStep), CaError> {
        if self.listeners.request_key.is_some() {
            return Ok((self, RotationStep::Standing));
        }
        self.renew_listener_request()
    }

    /// Makes the key of a request, in place of that of a pending request.
    ///
    /// # Errors
    /// If no key can be made.
    pub fn renew_listener_request(mut self) -> Result<(Self, RotationStep), CaError> {
        self.listeners.request_key = Some(KeyPair::generate()?);
        self.listeners.generation += 1;
        Ok((self, RotationStep::Made))
    }

    /// Returns the pending request in PEM. Its signature differs each time, its content does not.
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
        params.distinguished_name = subject(&name, None);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        Ok(Some(params.serialize_request(key)?.pem()?))
    }

    /// Installs the signed request, followed by the certificates up to the root, each before the one that has signed it.
    ///
    /// # Errors
    /// If the chain is not that, or does not permit a certificate for one of `names`.
    pub fn import_listener_chain(
        mut self,
        chain_pem: &str,
        names: &[HostName],
    ) -> Result<(Self, RotationStep), CaError> {
        let mut certificates = pem::certificates(chain_pem).map_err(unusable)?;
        self.listeners.put_intermediate_first(&mut certificates)?;
        let intermediate = certificates.first().ok_or(CaError::Expired)?;
        let public_key = Certificate::read(intermediate)?.public_key;
        let key = self.listeners.key_for(&public_key)?;
        check_chain(&certificates)?;
        check_usage(intermediate)?;
        let chain = ListenerChain::load(&pem::encode_chain(&certificates), &key)?;
        for name in std::iter::once(None).chain(names.iter().map(Some)) {
            chain.verify_name(name)?;
        }
        let installed = self.listeners.chain.as_ref();
        if installed.is_some_and(|it| it.fingerprint == chain.fingerprint) {
            return Ok((self, RotationStep::Standing));
        }
        self.listeners
            .request_key
            .take_if(|key| key.subject_public_key_info() == public_key);
        self.listeners.install(chain);
        Ok((self, RotationStep::Made))
    }

    /// Removes the imported chain and its key: listeners present certificates of our own intermediate again.
    #[must_use]
    pub fn remove_listener_chain(mut self) -> (Self, RotationStep) {
        if self.listeners.chain.take().is_none() {
            return (self, RotationStep::Standing);
        }
        self.listeners.former_roots.clear();
        self.listeners.generation += 1;
        (self, RotationStep::Made)
    }

    /// Returns the facts of the imported intermediate, if there is one, even if it has expired.
    pub fn listener_ca(&self) -> Option<ListenerCaInfo> {
        let certificates = &self.listeners.chain.as_ref()?.certificates;
        let all: Result<Vec<_>, _> = certificates.iter().map(CaCertificateInfo::read).collect();
        let all = all.ok()?;
        Some(ListenerCaInfo {
            intermediate: all.first()?.clone(),
            root: all.last()?.clone(),
            first_to_end: all.iter().min_by_key(|it| it.not_after)?.clone(),
            limits_names: limits_names(certificates),
        })
    }

    /// Whether the other CA has an earlier request or chain for listeners than this one.
    pub fn has_newer_listener_ca(&self, other: &Self) -> bool {
        self.listeners.generation > other.listeners.generation
    }

    /// Returns those names for which the imported chain permits no certificate. Listeners present certificates of our own
    /// intermediate for them.
    pub fn names_outside_chain(&self, names: Vec<HostName>) -> Vec<HostName> {
        let chain = self.listeners.chain.as_ref();
        let Some(chain) = chain.filter(|chain| chain.limits_names) else {
            return Vec::new();
        };
        let outside = |name: &HostName| chain.verify_name(Some(name)).is_err();
        names.into_iter().filter(outside).collect()
    }
}

fn limits_names(chain: &[CertificateDer<'_>]) -> bool {
    let read = chain.iter().map(CaConstraints::read);
    read.flatten().any(|authority| authority.limits_names)
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::signed_request;
