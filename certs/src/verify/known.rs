//! Certificates that our root was seen to have signed: the signature is verified once, not at every handshake.
//!
//! A fleet comes back with the certificates that it had. Over the same bytes by the same root a signature does not
//! change, so a [`Seen`] belongs to one set of roots and holds digests; what does change is looked at each
//! time: the dates here, revocation in `check_peer`. Only what the root itself has signed is kept, since
//! an intermediate has dates of its own.

use super::{TrustError, verifier};
use crate::certificate::Certificate;
use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::danger::HandshakeSignatureValid,
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

/// Certificates of one generation; two are kept, 4 MiB at most.
const GENERATION: usize = 16_384;

/// First and last second of a certificate, by the digest of its bytes.
type Generation = HashMap<[u8; 32], RangeInclusive<u64>>;

/// What was verified: the newer generation, and the one before it.
#[derive(Debug, Default)]
pub(super) struct Seen(Mutex<(Generation, Generation)>);

impl Seen {
    /// Whether this one was verified, and is within its dates.
    fn has(&self, digest: &[u8; 32], now: UnixTime) -> bool {
        let mut generations = self.generations();
        let (newer, older) = &mut *generations;
        let Some(dates) = newer.get(digest).or_else(|| older.get(digest)).cloned() else {
            return false;
        };
        if !newer.contains_key(digest) {
            keep(&mut generations, *digest, dates.clone());
        }
        dates.contains(&now.as_secs())
    }

    fn keep(&self, digest: [u8; 32], dates: RangeInclusive<u64>) {
        keep(&mut self.generations(), digest, dates);
    }

    fn generations(&self) -> MutexGuard<'_, (Generation, Generation)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn keep(
    (newer, older): &mut (Generation, Generation),
    digest: [u8; 32],
    dates: RangeInclusive<u64>,
) {
    if newer.len() >= GENERATION {
        *older = mem::take(newer);
    }
    newer.insert(digest, dates);
}

/// rustls' verifier of client certificates, with a memory.
#[derive(Debug)]
struct Remembering {
    inner: Arc<dyn ClientCertVerifier>,
    seen: Arc<Seen>,
}

/// [`verifier`] below `roots`, of which `seen` remembers what they have signed.
pub(super) fn remembering(
    roots: &Arc<RootCertStore>,
    seen: &Arc<Seen>,
    required: bool,
) -> Result<Arc<dyn ClientCertVerifier>, TrustError> {
    Ok(Arc::new(Remembering {
        inner: verifier(roots, required)?,
        seen: Arc::clone(seen),
    }))
}

impl ClientCertVerifier for Remembering {
    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let digest = Sha256::digest(leaf).into();
        if self.seen.has(&digest, now) {
            return Ok(ClientCertVerified::assertion());
        }
        let by_the_root = self.inner.verify_client_cert(leaf, &[], now);
        if by_the_root.is_err() && !issuers.is_empty() {
            return self.inner.verify_client_cert(leaf, issuers, now);
        }
        if by_the_root.is_ok()
            && let Ok(facts) = Certificate::read(leaf)
        {
            self.seen.keep(digest, facts.not_before..=facts.not_after);
        }
        by_the_root
    }

    fn offer_client_auth(&self) -> bool {
        self.inner.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.inner.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, leaf, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, leaf, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ca, Leaf, TrustDomain, verify::store};
    use std::time::Duration;

    /// What was verified passes even where the roots would not have it; nothing else does.
    #[test]
    fn a_certificate_is_verified_once_and_each_for_itself() {
        let ca = || Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let (ours, other) = (ca(), ca());
        let seen = Arc::default();
        let below = |ca: &Ca| remembering(&store([ca.root()]).unwrap(), &seen, true).unwrap();
        let leaf = |name| {
            ours.issue_caller(name, &[], Duration::from_hours(1))
                .unwrap()
        };
        let (ann, bob) = (leaf("ann"), leaf("bob"));
        let passes = |verifier: &dyn ClientCertVerifier, leaf: &Leaf| {
            let verified = verifier.verify_client_cert(&leaf.chain()[0], &[], UnixTime::now());
            verified.is_ok()
        };
        let (knows, stranger) = (below(&ours), below(&other));
        assert!(!passes(&*stranger, &ann));
        assert!(passes(&*knows, &ann));
        assert!(passes(&*stranger, &ann), "it was not asked again");
        assert!(!passes(&*stranger, &bob));
    }

    #[test]
    fn what_was_seen_lately_is_kept_and_memory_is_bounded() {
        let seen = Seen::default();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(50));
        let digest = |number: u64| {
            let mut digest = [0; 32];
            digest[..8].copy_from_slice(&number.to_be_bytes());
            digest
        };
        let most = u64::try_from(GENERATION).unwrap();
        for number in 0..5 * most {
            seen.keep(digest(number), 0..=100);
            // Comes all the time, and so is never forgotten.
            assert!(seen.has(&digest(0), now));
        }
        assert!(!seen.has(&digest(1), now));
        let generations = seen.generations();
        assert!(generations.0.len() <= GENERATION && generations.1.len() <= GENERATION);
    }

    #[test]
    fn dates_are_looked_at_each_time() {
        let seen = Seen::default();
        seen.keep([1; 32], 10..=20);
        let at = |seconds| {
            seen.has(
                &[1; 32],
                UnixTime::since_unix_epoch(Duration::from_secs(seconds)),
            )
        };
        assert_eq!([9, 10, 20, 21].map(at), [false, true, true, false]);
    }
}
