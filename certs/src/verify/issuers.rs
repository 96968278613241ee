//! Our own issuers, and a cache of the certificates that they have signed: a signature is verified once, not at every
//! handshake.
//!
//! Each of our intermediates is an anchor of its own, for one purpose. A certificate by the intermediate of another purpose
//! is ours, but not valid for this one. Edges reconnect with the same certificates. The result for the same bytes and the
//! same signer never changes, so [`SignatureCache`] stores digests. Other properties are checked each time: the dates here,
//! revocation in `check_peer`. Certificates between a leaf and our issuer are ignored.

use super::roots::{TrustError, build_verifier, root_store};
use crate::ca::Ca;
use crate::certificate::Certificate;
use crate::identity::IssuerPurpose;
use causeway_tls::{Fingerprint, provider};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::{verify_tls12_signature, verify_tls13_signature},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use rustls_pki_types::{CertificateDer, UnixTime};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    mem,
    ops::RangeInclusive,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Maximum number of certificates behind a client's own. Each may cost the verification of a signature before the chain turns
/// out to be invalid.
pub(super) const MAX_INTERMEDIATES: usize = 8;

/// Maximum size of an unknown certificate and those behind it, in bytes. They stay in memory as long as the connection.
const MAX_DEFERRED_BYTES: usize = 16 << 10;

/// Maximum number of certificates of one generation. Two generations are cached, 4 MiB at most.
const MAX_GENERATION_ENTRIES: usize = 16_384;

/// First and last second of a certificate and the index of its signer, by the digest of its bytes.
type CacheGeneration = HashMap<[u8; 32], (RangeInclusive<u64>, usize)>;

/// Cache of verified signatures: the newer generation, and the one before it.
#[derive(Debug, Default)]
struct SignatureCache(Mutex<(CacheGeneration, CacheGeneration)>);

impl SignatureCache {
    /// Returns the index of this certificate's issuer, if the signature was verified and the certificate is valid now.
    fn issuer_of(&self, digest: &[u8; 32], now: UnixTime) -> Option<usize> {
        let mut generations = self.lock();
        let (newer, older) = &mut *generations;
        let (dates, issuer_index) = newer.get(digest).or_else(|| older.get(digest)).cloned()?;
        if !newer.contains_key(digest) {
            insert_entry(&mut generations, *digest, (dates.clone(), issuer_index));
        }
        dates.contains(&now.as_secs()).then_some(issuer_index)
    }

    fn insert(&self, digest: [u8; 32], dates: RangeInclusive<u64>, issuer_index: usize) {
        insert_entry(&mut self.lock(), digest, (dates, issuer_index));
    }

    fn lock(&self) -> MutexGuard<'_, (CacheGeneration, CacheGeneration)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn insert_entry(
    (newer, older): &mut (CacheGeneration, CacheGeneration),
    digest: [u8; 32],
    entry: (RangeInclusive<u64>, usize),
) {
    if newer.len() >= MAX_GENERATION_ENTRIES {
        *older = mem::take(newer);
    }
    newer.insert(digest, entry);
}

/// One of our own issuers.
#[derive(Debug)]
pub(super) struct Issuer {
    /// Purpose of the certificates that it signs. A root from before the separation of purposes signs everything.
    pub(super) purpose: Option<IssuerPurpose>,
    /// The root above the issuer.
    pub(super) root: Fingerprint,
    verifier: Arc<dyn ClientCertVerifier>,
}

/// All our own issuers, and the cache of their verified signatures.
#[derive(Debug)]
pub(super) struct Issuers {
    list: Vec<Issuer>,
    signature_cache: SignatureCache,
}

impl Issuers {
    /// Whether one of the issuers is below this root.
    pub(super) fn contains_root(&self, root: Fingerprint) -> bool {
        self.list.iter().any(|issuer| issuer.root == root)
    }

    pub(super) fn from_ca(ca: &Ca) -> Result<Self, TrustError> {
        let issuer = |anchor: crate::ca::TrustAnchor<'_>| {
            Ok(Issuer {
                purpose: anchor.purpose,
                root: anchor.root,
                verifier: build_verifier(&root_store([anchor.certificate])?)?,
            })
        };
        Ok(Self {
            list: ca
                .anchors()
                .into_iter()
                .map(issuer)
                .collect::<Result<_, TrustError>>()?,
            signature_cache: SignatureCache::default(),
        })
    }

    /// Returns the issuer that has signed this client's certificate, if the certificate is valid now.
    pub(super) fn find(&self, leaf: &CertificateDer<'_>, now: UnixTime) -> Result<&Issuer, Error> {
        let digest = Sha256::digest(leaf).into();
        if let Some(issuer) = self
            .signature_cache
            .issuer_of(&digest, now)
            .and_then(|by| self.list.get(by))
        {
            return Ok(issuer);
        }
        for (index, issuer) in self.list.iter().enumerate() {
            match issuer.verifier.verify_client_cert(leaf, &[], now) {
                Ok(_) => {
                    if let Ok(parsed) = Certificate::parse(leaf) {
                        let dates = parsed.not_before..=parsed.not_after;
                        self.signature_cache.insert(digest, dates, index);
                    }
                    return Ok(issuer);
                }
                Err(error) if is_other_issuer(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Err(CertificateError::UnknownIssuer.into())
    }

    fn hint_subjects(&self, wanted: IssuerPurpose) -> impl Iterator<Item = DistinguishedName> {
        let all = self.list.iter();
        let matching =
            all.filter(move |issuer| issuer.purpose.is_none_or(|purpose| purpose == wanted));
        matching.flat_map(|issuer| issuer.verifier.root_hint_subjects().to_vec())
    }
}

/// Whether another CA has signed. A bad signature under our issuer's name counts too, since another root may have the same
/// name.
pub(super) fn is_other_issuer(error: &Error) -> bool {
    matches!(
        error,
        Error::InvalidCertificate(
            CertificateError::UnknownIssuer
                | CertificateError::BadSignature
                | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. }
        )
    )
}

/// Whether this error means that a certificate proves nothing, see [`PeerRejected::is_unverified`](super::PeerRejected::is_unverified).
fn is_unverified(error: &Error) -> bool {
    is_other_issuer(error)
        || matches!(
            error,
            Error::InvalidCertificate(
                CertificateError::Expired
                    | CertificateError::ExpiredContext { .. }
                    | CertificateError::NotValidYet
                    | CertificateError::NotValidYetContext { .. }
                    | CertificateError::InvalidPurpose
                    | CertificateError::InvalidPurposeContext { .. }
            )
        )
}

/// Requirement of a handshake on the client's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificateRequirement {
    /// A trusted certificate.
    Required,
    /// A trusted certificate, or none.
    Optional,
    /// A trusted certificate, one that proves nothing (of an unknown CA, expired, for another use), or none. `verify_peer` rejects the
    /// second, and the client may authenticate by other means: kubectl presents the certificate of its cluster also to a proxy that
    /// accepts only tokens.
    Deferred,
}

/// Verifier of client certificates for rustls: of our own, of those of other CAs, or of both.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    own_issuers: Option<Arc<Issuers>>,
    foreign_verifier: Option<Arc<dyn ClientCertVerifier>>,
    requirement: CertificateRequirement,
    hints: Vec<DistinguishedName>,
}

impl ClientVerifier {
    pub(super) fn new(
        own_issuers: Option<Arc<Issuers>>,
        foreign_verifier: Option<Arc<dyn ClientCertVerifier>>,
        (purpose, requirement): (IssuerPurpose, CertificateRequirement),
    ) -> Arc<Self> {
        let own_hints = own_issuers
            .iter()
            .flat_map(|own| own.hint_subjects(purpose));
        let foreign_hints = foreign_verifier
            .iter()
            .flat_map(|foreign| foreign.root_hint_subjects().to_vec());
        Arc::new(Self {
            hints: own_hints.chain(foreign_hints).collect(),
            own_issuers,
            foreign_verifier,
            requirement,
        })
    }
}

impl ClientVerifier {
    fn verify_issuer(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let own_result = self.own_issuers.as_ref().map(|own| own.find(leaf, now));
        match (own_result, &self.foreign_verifier) {
            (Some(Ok(_)), _) => Ok(ClientCertVerified::assertion()),
            (Some(Err(error)), None) => Err(error),
            (Some(Err(error)), Some(_)) if !is_other_issuer(&error) => Err(error),
            (_, Some(_)) if issuers.len() > MAX_INTERMEDIATES => {
                let why = "the client sent too many intermediate certificates";
                Err(Error::General(why.into()))
            }
            (_, Some(verifier)) => verifier.verify_client_cert(leaf, issuers, now),
            (None, None) => Err(CertificateError::UnknownIssuer.into()),
        }
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match self.verify_issuer(leaf, issuers, now) {
            Err(error)
                if self.requirement == CertificateRequirement::Deferred
                    && is_unverified(&error)
                    && leaf.len() + issuers.iter().map(|one| one.len()).sum::<usize>()
                        <= MAX_DEFERRED_BYTES =>
            {
                Ok(ClientCertVerified::assertion())
            }
            result => result,
        }
    }

    fn offer_client_auth(&self) -> bool {
        true
    }

    fn client_auth_mandatory(&self) -> bool {
        self.requirement == CertificateRequirement::Required
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &provider().signature_verification_algorithms;
        verify_tls12_signature(message, leaf, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &provider().signature_verification_algorithms;
        verify_tls13_signature(message, leaf, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LeafCertificate, TrustDomain};
    use std::time::Duration;

    /// A verified certificate is accepted even if its signers would refuse it now. No other certificate is.
    #[test]
    fn each_certificate_is_verified_once() {
        let ca = || Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let (ours, other) = (ca(), ca());
        let leaf = |name| {
            ours.issue_client(name, &[], Duration::from_hours(1))
                .unwrap()
        };
        let (ann, bob) = (leaf("ann"), leaf("bob"));
        let passes = |issuers: &Issuers, leaf: &LeafCertificate| {
            issuers
                .find(&leaf.chain()[0], UnixTime::now())
                .ok()
                .map(|issuer| issuer.purpose)
        };
        let (knows, mut stranger) = (
            Issuers::from_ca(&ours).unwrap(),
            Issuers::from_ca(&other).unwrap(),
        );
        assert_eq!(passes(&stranger, &ann), None);
        assert_eq!(passes(&knows, &ann), Some(Some(IssuerPurpose::Clients)));
        stranger.signature_cache = knows.signature_cache;
        assert_eq!(
            passes(&stranger, &ann),
            Some(Some(IssuerPurpose::Clients)),
            "no second verification was made"
        );
        assert_eq!(passes(&stranger, &bob), None);
    }

    #[test]
    fn client_certificates_are_read_up_to_the_chain_limit() {
        let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let leaf = ca
            .issue_client("ann", &[], Duration::from_hours(1))
            .unwrap();
        let (own, behind) = leaf.chain().split_first().unwrap();
        let roots = root_store([ca.root()]).unwrap();
        let asked = (IssuerPurpose::Clients, CertificateRequirement::Required);
        let clients = ClientVerifier::new(None, Some(build_verifier(&roots).unwrap()), asked);
        let with = |count| {
            let behind = vec![behind[0].clone(); count];
            clients.verify_client_cert(own, &behind, UnixTime::now())
        };
        with(MAX_INTERMEDIATES).unwrap();
        assert!(matches!(
            with(MAX_INTERMEDIATES + 1),
            Err(Error::General(_))
        ));
    }

    #[test]
    fn recently_verified_issuers_are_cached_and_memory_is_bounded() {
        let seen = SignatureCache::default();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(50));
        let digest = |number: u64| {
            let mut digest = [0; 32];
            digest[..8].copy_from_slice(&number.to_be_bytes());
            digest
        };
        let most = u64::try_from(MAX_GENERATION_ENTRIES).unwrap();
        for number in 0..5 * most {
            seen.insert(digest(number), 0..=100, 3);
            // Used all the time, so it is never evicted.
            assert_eq!(seen.issuer_of(&digest(0), now), Some(3));
        }
        assert!(seen.issuer_of(&digest(1), now).is_none());
        let generations = seen.lock();
        assert!(
            generations.0.len() <= MAX_GENERATION_ENTRIES
                && generations.1.len() <= MAX_GENERATION_ENTRIES
        );
    }

    #[test]
    fn dates_are_looked_at_each_time() {
        let seen = SignatureCache::default();
        seen.insert([1; 32], 10..=20, 0);
        let at = |seconds| {
            seen.issuer_of(
                &[1; 32],
                UnixTime::since_unix_epoch(Duration::from_secs(seconds)),
            )
            .is_some()
        };
        assert_eq!([9, 10, 20, 21].map(at), [false, true, true, false]);
    }
}
