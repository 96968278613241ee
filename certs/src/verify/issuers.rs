//! Our own issuers, and a cache of the certificates that they have signed: a signature is verified once, not at every handshake.
//!
//! Each of our intermediates is an anchor of its own, for one purpose. A certificate by the intermediate of another purpose is
//! ours, but not valid for this one. Edges reconnect with the same certificates. Over the same bytes by the same signer a
//! signature does not change, so [`SignatureCache`] holds digests. Other facts are checked each time: the dates here, revocation
//! in `check_peer`. Certificates between a leaf and our issuer are ignored.

use super::roots::{TrustError, store, verifier};
use crate::ca::Ca;
use crate::certificate::Certificate;
use crate::crypto::provider;
use crate::identity::IssuerPurpose;
use crate::secret::Fingerprint;
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

/// Certificates behind a client's own, at most. Each may cost a signature before it is known to lead nowhere.
pub(super) const MOST_BEHIND: usize = 8;

/// Certificates of one generation. Two generations are cached, 4 MiB at most.
const GENERATION: usize = 16_384;

/// First and last second of a certificate and the place of its signer, by the digest of its bytes.
type CacheGeneration = HashMap<[u8; 32], (RangeInclusive<u64>, usize)>;

/// Cache of verified signatures: the newer generation, and the one before it.
#[derive(Debug, Default)]
struct SignatureCache(Mutex<(CacheGeneration, CacheGeneration)>);

impl SignatureCache {
    /// Returns the issuer of this certificate, if the signature was verified and the certificate is within its dates.
    fn by(&self, digest: &[u8; 32], now: UnixTime) -> Option<usize> {
        let mut generations = self.generations();
        let (newer, older) = &mut *generations;
        let (dates, by) = newer.get(digest).or_else(|| older.get(digest)).cloned()?;
        if !newer.contains_key(digest) {
            keep(&mut generations, *digest, (dates.clone(), by));
        }
        dates.contains(&now.as_secs()).then_some(by)
    }

    fn keep(&self, digest: [u8; 32], dates: RangeInclusive<u64>, by: usize) {
        keep(&mut self.generations(), digest, (dates, by));
    }

    fn generations(&self) -> MutexGuard<'_, (CacheGeneration, CacheGeneration)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn keep(
    (newer, older): &mut (CacheGeneration, CacheGeneration),
    digest: [u8; 32],
    facts: (RangeInclusive<u64>, usize),
) {
    if newer.len() >= GENERATION {
        *older = mem::take(newer);
    }
    newer.insert(digest, facts);
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
    all: Vec<Issuer>,
    seen: SignatureCache,
}

impl Issuers {
    /// Whether one of the issuers is below this root.
    pub(super) fn know(&self, root: Fingerprint) -> bool {
        self.all.iter().any(|issuer| issuer.root == root)
    }

    pub(super) fn of(ca: &Ca) -> Result<Self, TrustError> {
        let issuer = |anchor: crate::ca::TrustAnchor<'_>| {
            Ok(Issuer {
                purpose: anchor.purpose,
                root: anchor.root,
                verifier: verifier(&store([anchor.certificate])?)?,
            })
        };
        Ok(Self {
            all: ca
                .anchors()
                .into_iter()
                .map(issuer)
                .collect::<Result<_, TrustError>>()?,
            seen: SignatureCache::default(),
        })
    }

    /// Returns the issuer that has signed this client's certificate, if the certificate is valid now.
    pub(super) fn find(&self, leaf: &CertificateDer<'_>, now: UnixTime) -> Result<&Issuer, Error> {
        let digest = Sha256::digest(leaf).into();
        if let Some(issuer) = self.seen.by(&digest, now).and_then(|by| self.all.get(by)) {
            return Ok(issuer);
        }
        for (by, issuer) in self.all.iter().enumerate() {
            match issuer.verifier.verify_client_cert(leaf, &[], now) {
                Ok(_) => {
                    if let Ok(facts) = Certificate::read(leaf) {
                        let dates = facts.not_before..=facts.not_after;
                        self.seen.keep(digest, dates, by);
                    }
                    return Ok(issuer);
                }
                Err(error) if is_anothers(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Err(CertificateError::UnknownIssuer.into())
    }

    fn hints(&self, asked: IssuerPurpose) -> impl Iterator<Item = DistinguishedName> {
        let all = self.all.iter();
        let asked = all.filter(move |issuer| issuer.purpose.is_none_or(|purpose| purpose == asked));
        asked.flat_map(|issuer| issuer.verifier.root_hint_subjects().to_vec())
    }
}

/// Whether another CA has signed. A bad signature under our issuer's name is the same case: another root may have the same name.
pub(super) fn is_anothers(error: &Error) -> bool {
    matches!(
        error,
        Error::InvalidCertificate(
            CertificateError::UnknownIssuer
                | CertificateError::BadSignature
                | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. }
        )
    )
}

/// Verifier of client certificates for rustls: of ours, of other CAs', or of both.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    own: Option<Arc<Issuers>>,
    foreign: Option<Arc<dyn ClientCertVerifier>>,
    required: bool,
    hints: Vec<DistinguishedName>,
}

impl ClientVerifier {
    pub(super) fn new(
        own: Option<Arc<Issuers>>,
        foreign: Option<Arc<dyn ClientCertVerifier>>,
        (asked, required): (IssuerPurpose, bool),
    ) -> Arc<Self> {
        let ours = own.iter().flat_map(|own| own.hints(asked));
        let theirs = foreign
            .iter()
            .flat_map(|foreign| foreign.root_hint_subjects().to_vec());
        Arc::new(Self {
            hints: ours.chain(theirs).collect(),
            own,
            foreign,
            required,
        })
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let ours = self.own.as_ref().map(|own| own.find(leaf, now));
        match (ours, &self.foreign) {
            (Some(Ok(_)), _) => Ok(ClientCertVerified::assertion()),
            (Some(Err(error)), None) => Err(error),
            (Some(Err(error)), Some(_)) if !is_anothers(&error) => Err(error),
            (_, Some(_)) if issuers.len() > MOST_BEHIND => {
                let why = "the client sent too many intermediate certificates";
                Err(Error::General(why.into()))
            }
            (_, Some(foreign)) => foreign.verify_client_cert(leaf, issuers, now),
            (None, None) => Err(CertificateError::UnknownIssuer.into()),
        }
    }

    fn offer_client_auth(&self) -> bool {
        true
    }

    fn client_auth_mandatory(&self) -> bool {
        self.required
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &provider().signature_verification_algorithms;
        verify_tls12_signature(message, leaf, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &provider().signature_verification_algorithms;
        verify_tls13_signature(message, leaf, signed, algorithms)
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

    /// A verified certificate passes even if its signers would refuse it now; nothing else passes.
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
        let (knows, mut stranger) = (Issuers::of(&ours).unwrap(), Issuers::of(&other).unwrap());
        assert_eq!(passes(&stranger, &ann), None);
        assert_eq!(passes(&knows, &ann), Some(Some(IssuerPurpose::Clients)));
        stranger.seen = knows.seen;
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
        let roots = store([ca.root()]).unwrap();
        let asked = (IssuerPurpose::Clients, true);
        let clients = ClientVerifier::new(None, Some(verifier(&roots).unwrap()), asked);
        let with = |count| {
            let behind = vec![behind[0].clone(); count];
            clients.verify_client_cert(own, &behind, UnixTime::now())
        };
        with(MOST_BEHIND).unwrap();
        assert!(matches!(with(MOST_BEHIND + 1), Err(Error::General(_))));
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
        let most = u64::try_from(GENERATION).unwrap();
        for number in 0..5 * most {
            seen.keep(digest(number), 0..=100, 3);
            // Used all the time, so it is never evicted.
            assert_eq!(seen.by(&digest(0), now), Some(3));
        }
        assert!(seen.by(&digest(1), now).is_none());
        let generations = seen.generations();
        assert!(generations.0.len() <= GENERATION && generations.1.len() <= GENERATION);
    }

    #[test]
    fn dates_are_looked_at_each_time() {
        let seen = SignatureCache::default();
        seen.keep([1; 32], 10..=20, 0);
        let at = |seconds| {
            seen.by(
                &[1; 32],
                UnixTime::since_unix_epoch(Duration::from_secs(seconds)),
            )
            .is_some()
        };
        assert_eq!([9, 10, 20, 21].map(at), [false, true, true, false]);
    }
}
