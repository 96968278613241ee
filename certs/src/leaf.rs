//! A leaf: a certificate chain with its private key, ready for rustls.
//!
//! Checks once, on construction, that chain and key belong together, so that its use cannot fail. Never issues certificates
//! (`ca` does) and never decides who receives them (`resolver` does).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use causeway_tls::{pem, provider};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use thiserror::Error;

use crate::certificate::{Certificate, CertificateError, format_date};
use causeway_config::Secret;

/// Error that makes a chain and a key unusable as a leaf.
#[derive(Debug, Error)]
pub enum LeafCertificateError {
    /// The text is not PEM of the expected kind.
    #[error("unreadable {part}: {why}")]
    Pem {
        /// `certificate` or `private key`.
        part: &'static str,
        /// Description of the fault.
        why: String,
    },
    /// The certificate cannot be parsed.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The key is of an unknown kind or does not belong to the certificate.
    #[error("the private key does not match the certificate: {0}")]
    Key(#[from] rustls::Error),
    /// The certificate is for another usage.
    #[error("the extended key usage of the certificate does not contain {0}")]
    Usage(&'static str),
    /// The certificate is not valid now, but the certificate that it would replace is.
    #[error(
        "the new certificate is valid from {from} to {to}, which is not now; the current certificate is valid and stays in use"
    )]
    Period {
        /// First second of validity, in the format of RFC 3339.
        from: String,
        /// Last second of validity, in the format of RFC 3339.
        to: String,
    },
}

/// The role in TLS that a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `serverAuth`.
    Server,
    /// `clientAuth`.
    Client,
}

/// A chain, the leaf first, and its key. Cheap to clone; `Debug` does not show the key.
#[derive(Clone)]
pub struct LeafCertificate {
    certified: Arc<CertifiedKey>,
    key: Arc<PrivateKeyDer<'static>>,
    not_before: u64,
    not_after: u64,
}

/// Leaves are equal if they have the same chain and the same key.
impl PartialEq for LeafCertificate {
    fn eq(&self, other: &Self) -> bool {
        self.certified.cert == other.certified.cert && self.key == other.key
    }
}

impl fmt::Debug for LeafCertificate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("LeafCertificate")
            .field("not_after", &self.not_after)
            .finish_non_exhaustive()
    }
}

impl LeafCertificate {
    pub(crate) fn new(
        chain: Vec<CertificateDer<'static>>,
        pkcs8: Vec<u8>,
    ) -> Result<Self, LeafCertificateError> {
        Self::with_key(chain, PrivatePkcs8KeyDer::from(pkcs8).into())
    }

    /// Loads a chain and a key, for instance an operator's own certificate for a listener.
    pub fn load(chain_pem: &str, key_pem: &str) -> Result<Self, LeafCertificateError> {
        let chain =
            pem::parse_certificates(chain_pem).map_err(|why| LeafCertificateError::Pem {
                part: "certificate",
                why,
            })?;
        let key = pem::private_key(key_pem).map_err(|why| LeafCertificateError::Pem {
            part: "private key",
            why,
        })?;
        Self::with_key(chain, key)
    }

    /// Loads a chain and a key for this role.
    pub fn load_for(
        role: Role,
        chain_pem: &str,
        key_pem: &str,
    ) -> Result<Self, LeafCertificateError> {
        let leaf = Self::load(chain_pem, key_pem)?;
        let parsed = leaf.chain().first().map(Certificate::parse).transpose()?;
        let parsed = parsed.unwrap_or_default();
        let (has_usage, usage) = match role {
            Role::Server => (parsed.server_auth, "serverAuth"),
            Role::Client => (parsed.client_auth, "clientAuth"),
        };
        if has_usage || parsed.is_any_purpose {
            return Ok(leaf);
        }
        Err(LeafCertificateError::Usage(usage))
    }

    /// Returns this leaf, unless it must not replace `current`, the leaf in use. A valid leaf is not replaced by one that has
    /// expired or is not valid yet. If neither is valid, the clock may be wrong, and the new leaf wins.
    pub fn replacing(
        self,
        current: Option<&Self>,
        now: UnixTime,
    ) -> Result<Self, LeafCertificateError> {
        if self.is_valid_at(now) || current.is_none_or(|it| *it == self || !it.is_valid_at(now)) {
            return Ok(self);
        }
        Err(LeafCertificateError::Period {
            from: format_date(self.not_before),
            to: format_date(self.not_after),
        })
    }

    fn is_valid_at(&self, now: UnixTime) -> bool {
        (self.not_before..=self.not_after).contains(&now.as_secs())
    }

    fn with_key(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, LeafCertificateError> {
        let first = chain
            .first()
            .ok_or(rustls::Error::NoCertificatesPresented)?;
        let Certificate {
            not_before,
            not_after,
            ..
        } = Certificate::parse(first)?;
        let certified = CertifiedKey::from_der(chain, key.clone_key(), &provider())?;
        Ok(Self {
            certified: Arc::new(certified),
            key: Arc::new(key),
            not_before,
            not_after,
        })
    }

    /// Returns the chain, the leaf's own certificate first.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.certified.cert
    }

    /// Returns the chain as PEM.
    pub fn chain_pem(&self) -> String {
        pem::encode_chain(self.chain())
    }

    /// Returns the private key as PEM.
    pub fn key_pem(&self) -> Secret {
        let label = match *self.key {
            PrivateKeyDer::Pkcs1(_) => "RSA PRIVATE KEY",
            PrivateKeyDer::Sec1(_) => "EC PRIVATE KEY",
            _ => "PRIVATE KEY",
        };
        Secret::new(pem::encode(label, self.key.secret_der()))
    }

    /// Returns chain and key in the form that rustls requires.
    pub fn certified_key(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.certified)
    }

    /// Returns a copy of the key for rustls' client builder.
    pub(crate) fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }

    /// Returns the last second of validity.
    pub fn not_after(&self) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(self.not_after))
    }

    /// Returns a resolver that always presents this leaf, for a configuration that never changes it.
    pub fn resolver(&self) -> Arc<dyn ResolvesServerCert> {
        Arc::new(SingleCertResolver(self.certified_key()))
    }
}

#[derive(Debug)]
struct SingleCertResolver(Arc<CertifiedKey>);

impl ResolvesServerCert for SingleCertResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ca, TrustDomain};

    fn leaf() -> LeafCertificate {
        let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        ca.issue_listener(&[], Duration::from_mins(1)).unwrap()
    }

    #[test]
    fn a_written_leaf_parses_back() {
        let leaf = leaf();
        let again = LeafCertificate::load(&leaf.chain_pem(), leaf.key_pem().expose()).unwrap();
        assert_eq!(again.chain(), leaf.chain());
        assert_eq!(again.key_pem(), leaf.key_pem());
        assert_eq!(again.not_after(), leaf.not_after());
    }

    #[test]
    fn a_key_of_another_leaf_is_refused() {
        let refused = LeafCertificate::load(&leaf().chain_pem(), leaf().key_pem().expose());
        assert!(matches!(refused, Err(LeafCertificateError::Key(_))));
    }

    #[test]
    fn debug_does_not_show_the_key() {
        assert!(!format!("{:?}", leaf()).contains("key"));
    }

    #[test]
    fn a_leaf_is_read_for_its_role_alone() {
        let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let server = ca.issue_listener(&[], Duration::from_mins(1)).unwrap();
        let read = |role, leaf: &LeafCertificate| {
            LeafCertificate::load_for(role, &leaf.chain_pem(), leaf.key_pem().expose())
        };
        read(Role::Server, &server).unwrap();
        let refused = read(Role::Client, &server).unwrap_err();
        assert!(
            matches!(refused, LeafCertificateError::Usage("clientAuth")),
            "{refused}"
        );
        let key = rcgen::KeyPair::generate().unwrap();
        let made = rcgen::CertificateParams::default()
            .self_signed(&key)
            .unwrap();
        let any = LeafCertificate::load(&made.pem(), &key.serialize_pem()).unwrap();
        read(Role::Client, &any).unwrap();
    }

    #[test]
    fn a_valid_leaf_is_replaced_by_valid_ones_alone() {
        let ending = |not_before, not_after| LeafCertificate {
            not_before,
            not_after,
            ..leaf()
        };
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let (ended, valid, later) = (ending(1, 10), ending(5, 30), ending(40, 50));
        for (next, current, now, replaces) in [
            (&later, Some(&valid), 20, false),
            (&ended, Some(&valid), 20, false),
            (&valid, Some(&ended), 20, true),
            (&valid, Some(&valid), 35, true),
            (&later, Some(&valid), 35, true),
            (&ended, None, 20, true),
            (&valid, Some(&later), 6, true),
        ] {
            let done = next.clone().replacing(current, at(now));
            assert_eq!(done.is_ok(), replaces, "{next:?} {current:?} {now}");
        }
    }
}
