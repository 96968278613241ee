//! The check that every acceptor makes after every handshake, resumed or not.
//!
//! 1. A certificate is there, and valid now: a resumed session carries that of the first one.
//! 2. One of ours has signed it, or else a foreign root that this acceptor trusts.
//! 3. Its purpose, its kind and what its signer signs are those of this port, and it is not revoked.
//!
//! Costs one signature to verify, where ours is not remembered: a resumed handshake has verified none. An edge that
//! looks at a gateway follows the chain to its root, which is one signature more.

use std::fmt;

use rustls::{CertificateError as TlsCertificateError, Error as TlsError};
use rustls_pki_types::{CertificateDer, UnixTime};
use thiserror::Error;
use webpki::{EndEntityCert, KeyUsage};

use super::issuers::is_anothers;
use super::{TrustStore, provider, root_key};
use crate::certificate::{Certificate, CertificateError, date};
use crate::identity::{Identity, IssuerPurpose, issuer_purpose};
use crate::name::NameError;
use crate::secret::Fingerprint;

/// As what a peer comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// An edge on the tunnel port.
    Edge,
    /// A caller on a front.
    Caller,
    /// A gateway, as the server that an edge dialled.
    Gateway,
}

impl fmt::Display for Purpose {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Edge => "edge",
            Self::Caller => "caller",
            Self::Gateway => "gateway",
        })
    }
}

/// Asked with the serial number (as in the certificate) and the identity: is it revoked?
pub type IsRevokedFn<'a> = &'a dyn Fn(&[u8], &Identity) -> bool;

/// The answer of whoever keeps no list of revoked certificates.
pub fn none_revoked(_serial: &[u8], _identity: &Identity) -> bool {
    false
}

/// Why a peer is not let in.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PeerRejected {
    /// No certificate; a caller may authenticate otherwise.
    #[error("no certificate presented")]
    Missing,
    /// No root that this port trusts has signed it.
    #[error("the certificate is not issued by a CA that is trusted here")]
    UnknownIssuer,
    /// Ended.
    #[error("the certificate expired at {}", date(*not_after))]
    Expired {
        /// Its last second.
        not_after: u64,
    },
    /// Not begun: one of the two clocks is wrong.
    #[error("the certificate is not valid before {}; check the clocks", date(*not_before))]
    NotYetValid {
        /// Its first second.
        not_before: u64,
    },
    /// The extended key usage does not permit this.
    #[error("the certificate's purpose does not permit to come as {wanted}")]
    WrongPurpose {
        /// As what the peer came.
        wanted: Purpose,
    },
    /// Genuine, but of another kind.
    #[error("a certificate of kind {found} cannot come as {wanted}")]
    Kind {
        /// As what the peer came.
        wanted: Purpose,
        /// Of which kind the certificate is.
        found: &'static str,
    },
    /// Genuine by its signature, but whoever made it signs for another purpose.
    #[error("what signs {found} cannot have made a certificate to come as {wanted}")]
    WrongIssuer {
        /// As what the peer came.
        wanted: Purpose,
        /// What its signer signs.
        found: IssuerPurpose,
    },
    /// A cluster's CA has signed it, and for somebody else than a node.
    #[error(
        "the certificate is that of \"{found}\"; of the cluster's CA only exactly \"{wanted}\" without further names is an edge's"
    )]
    Subject {
        /// Whose it is.
        found: String,
        /// How nodes are named.
        wanted: String,
    },
    /// Genuine, but no longer welcome.
    #[error("the certificate of {0} is revoked")]
    Revoked(String),
    /// Signed by a trusted root, but it carries no usable identity.
    #[error(transparent)]
    Identity(#[from] NameError),
    /// Any other fault of the certificate.
    #[error("the certificate is invalid: {0}")]
    Invalid(String),
}

/// Who a peer is, and by which certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedPeer {
    /// Who it is.
    pub identity: Identity,
    /// The certificate's serial number, in hexadecimal.
    pub serial: String,
    /// When it was issued, in Unix seconds, if it is our own.
    pub issued_at: u64,
    /// The certificate's last second.
    pub not_after: u64,
    /// The root on which it hangs: of ours where who signs in our name is known, or one that was given.
    pub root: Option<Fingerprint>,
}

/// Says who the peer of a finished handshake is, or why it may not stay.
pub fn check_peer(
    chain: Option<&[CertificateDer<'_>]>,
    purpose: Purpose,
    now: UnixTime,
    trust: &TrustStore,
    revoked: IsRevokedFn<'_>,
) -> Result<Identity, PeerRejected> {
    verify_peer(chain, purpose, now, trust, revoked).map(|proven| proven.identity)
}

/// As [`check_peer`], and says by which certificate.
pub fn verify_peer(
    chain: Option<&[CertificateDer<'_>]>,
    purpose: Purpose,
    now: UnixTime,
    trust: &TrustStore,
    revoked: IsRevokedFn<'_>,
) -> Result<VerifiedPeer, PeerRejected> {
    let (leaf, issuers) = chain
        .and_then(<[_]>::split_first)
        .ok_or(PeerRejected::Missing)?;
    let facts = Certificate::read(leaf).map_err(unreadable)?;
    if now.as_secs() > facts.not_after {
        return Err(PeerRejected::Expired {
            not_after: facts.not_after,
        });
    }
    if now.as_secs() < facts.not_before {
        return Err(PeerRejected::NotYetValid {
            not_before: facts.not_before,
        });
    }
    let signed = ChainInProgress {
        leaf,
        issuers,
        now,
        purpose,
    };
    let (serial, serial_hex) = (facts.serial.clone(), facts.serial_hex());
    let (issued_at, not_after) = (facts.issued_at(), facts.not_after);
    let mut root = None;
    let identity = if let Some(signer) = signed.by_us(trust)? {
        let identity = Identity::ours(&facts, &trust.domain)?;
        check_kind(&identity, &facts, purpose)?;
        if let Some(found) = signer.purpose.filter(|found| *found != purpose.issuing()) {
            let wanted = purpose;
            return Err(PeerRejected::WrongIssuer { wanted, found });
        }
        root = signer.root;
        identity
    } else if signed.by_a_foreign_root(trust)? {
        // Where one CA makes the certificates of edges and of callers, an edge's is no caller's.
        if let Some(found) = Identity::machine(&facts, &trust.domain) {
            let wanted = purpose;
            return Err(PeerRejected::Kind { wanted, found });
        }
        Identity::foreign(facts)
    } else {
        return Err(PeerRejected::UnknownIssuer);
    };
    if revoked(&serial, &identity) {
        return Err(PeerRejected::Revoked(identity.to_string()));
    }
    Ok(VerifiedPeer {
        identity,
        serial: serial_hex,
        issued_at,
        not_after,
        root,
    })
}

/// A chain whose signatures are being checked.
struct ChainInProgress<'a> {
    leaf: &'a CertificateDer<'a>,
    issuers: &'a [CertificateDer<'a>],
    now: UnixTime,
    purpose: Purpose,
}

/// Who of us has signed: for which purpose that one is, and below which root.
struct SignerInfo {
    purpose: Option<IssuerPurpose>,
    root: Option<Fingerprint>,
}

impl ChainInProgress<'_> {
    fn by_us(&self, trust: &TrustStore) -> Result<Option<SignerInfo>, PeerRejected> {
        match (&trust.issuers, self.purpose) {
            (Some(issuers), Purpose::Edge | Purpose::Caller) => {
                let found = issuers.find(self.leaf, self.now);
                self.judge(found).map(|found| {
                    found.map(|issuer| SignerInfo {
                        purpose: issuer.purpose,
                        root: Some(issuer.root),
                    })
                })
            }
            _ => self.below_a_root(trust),
        }
    }

    /// Only callers may come with a foreign certificate.
    fn by_a_foreign_root(&self, trust: &TrustStore) -> Result<bool, PeerRejected> {
        match (&trust.foreign, self.purpose) {
            (Some(foreign), Purpose::Caller) => {
                let verified = foreign.verify_client_cert(self.leaf, self.issuers, self.now);
                self.judge(verified).map(|verified| verified.is_some())
            }
            _ => Ok(false),
        }
    }

    /// Follows the chain to one of our roots. What counts is who has signed the leaf, and no other in the chain.
    fn below_a_root(&self, trust: &TrustStore) -> Result<Option<SignerInfo>, PeerRejected> {
        use webpki::Error;
        if trust.roots.is_empty() {
            return Ok(None);
        }
        let usage = match self.purpose {
            Purpose::Gateway => KeyUsage::server_auth(),
            Purpose::Edge | Purpose::Caller => KeyUsage::client_auth(),
        };
        let invalid = |error: Error| PeerRejected::Invalid(error.to_string());
        let leaf = EndEntityCert::try_from(self.leaf).map_err(invalid)?;
        let algorithms = provider().signature_verification_algorithms.all;
        let anchors = &trust.roots.roots;
        let found = leaf.verify_for_usage(
            algorithms,
            anchors,
            self.issuers,
            self.now,
            usage,
            None,
            None,
        );
        match found {
            Ok(path) => {
                if trust.is_given() {
                    let (purpose, root) = (None, Some(root_key(path.anchor())));
                    return Ok(Some(SignerInfo { purpose, root }));
                }
                let signer = path.intermediate_certificates().next();
                let facts = signer.map(|signer| Certificate::read(&signer.der()));
                let purpose = match facts.transpose().map_err(unreadable)? {
                    // A root that signs leaves itself.
                    None => None,
                    Some(facts) => Some(
                        issuer_purpose(&facts, &trust.domain).ok_or(PeerRejected::UnknownIssuer)?,
                    ),
                };
                let root = None;
                Ok(Some(SignerInfo { purpose, root }))
            }
            Err(
                Error::UnknownIssuer
                | Error::InvalidSignatureForPublicKey
                | Error::UnsupportedSignatureAlgorithmForPublicKeyContext(_),
            ) => Ok(None),
            Err(Error::RequiredEkuNotFoundContext(_)) => Err(PeerRejected::WrongPurpose {
                wanted: self.purpose,
            }),
            Err(error) => Err(invalid(error)),
        }
    }

    /// Whether these have signed.
    fn judge<T>(&self, outcome: Result<T, TlsError>) -> Result<Option<T>, PeerRejected> {
        match outcome {
            Ok(found) => Ok(Some(found)),
            Err(error) if is_anothers(&error) => Ok(None),
            Err(TlsError::InvalidCertificate(
                TlsCertificateError::InvalidPurpose
                | TlsCertificateError::InvalidPurposeContext { .. },
            )) => Err(PeerRejected::WrongPurpose {
                wanted: self.purpose,
            }),
            Err(error) => Err(PeerRejected::Invalid(error.to_string())),
        }
    }
}

impl Purpose {
    /// Who signs what comes so.
    pub(super) fn issuing(self) -> IssuerPurpose {
        match self {
            Self::Edge => IssuerPurpose::Edges,
            Self::Caller => IssuerPurpose::Callers,
            Self::Gateway => IssuerPurpose::Replicas,
        }
    }
}

/// Our own certificates always name their purpose, so a missing extension is refused too.
fn check_kind(
    identity: &Identity,
    facts: &Certificate,
    purpose: Purpose,
) -> Result<(), PeerRejected> {
    let usage = match purpose {
        Purpose::Edge | Purpose::Caller => facts.client_auth,
        Purpose::Gateway => facts.server_auth,
    };
    match (purpose, identity) {
        (Purpose::Edge, Identity::Edge(_))
        | (Purpose::Caller, Identity::Caller { .. })
        | (Purpose::Gateway, Identity::Gateway)
            if usage =>
        {
            Ok(())
        }
        (Purpose::Edge, Identity::Edge(_))
        | (Purpose::Caller, Identity::Caller { .. })
        | (Purpose::Gateway, Identity::Gateway) => {
            Err(PeerRejected::WrongPurpose { wanted: purpose })
        }
        _ => Err(PeerRejected::Kind {
            wanted: purpose,
            found: identity.kind(),
        }),
    }
}

fn unreadable(error: CertificateError) -> PeerRejected {
    PeerRejected::Identity(NameError::Certificate(error))
}
