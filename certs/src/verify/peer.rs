//! The check that every acceptor makes after every handshake, resumed or not.
//!
//! 1. There is a certificate, and it is valid now: a resumed session carries that of the first handshake.
//! 2. One of our issuers has signed it, or a foreign root that this acceptor trusts.
//! 3. Its purpose, its kind and its issuer's purpose match this port, and it is not revoked. The trust store has the revoked
//!    certificates of gateways, and the calling function those of edges.
//!
//! The check verifies one signature, unless the result for our own certificate is cached: a resumed handshake has verified
//! none. An edge that checks a gateway follows the chain to its root, which is one signature more.

use std::fmt;

use causeway_tls::{Fingerprint, NameError, provider};
use rustls::{CertificateError as TlsCertificateError, Error as TlsError};
use rustls_pki_types::{CertificateDer, UnixTime};
use thiserror::Error;
use webpki::{EndEntityCert, KeyUsage};

use super::issuers::is_other_issuer;
use super::trust_store::{TrustStore, root_key};
use crate::certificate::{Certificate, CertificateError, format_date};
use crate::identity::{Identity, IssuerPurpose, issuer_purpose};

/// Role of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// An edge on the tunnel port.
    Edge,
    /// A client of a listener.
    Client,
    /// A gateway, as the server that an edge dialled.
    Gateway,
    /// A gateway, as the client of another gateway's tunnel port.
    Peer,
}

impl fmt::Display for Purpose {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Edge => "edge",
            Self::Client => "client",
            Self::Gateway => "gateway",
            Self::Peer => "peer of a gateway",
        })
    }
}

/// Revocation check by serial number (as in the certificate) and identity. Returns whether the certificate is revoked.
pub type IsRevokedFn<'a> = &'a dyn Fn(&[u8], &Identity) -> bool;

/// Returns `false`: a revocation check for peers without a revocation list.
pub fn none_revoked(_serial: &[u8], _identity: &Identity) -> bool {
    false
}

/// Error that rejects a peer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PeerRejected {
    /// There is no certificate. A client may authenticate by other means.
    #[error("no certificate presented")]
    NoCertificate,
    /// The certificate is not signed by any root that this port trusts.
    #[error("the certificate is not issued by a CA that is trusted here")]
    UnknownIssuer,
    /// The certificate has expired.
    #[error("the certificate expired at {}", format_date(*not_after))]
    Expired {
        /// Last second of the certificate.
        not_after: u64,
    },
    /// The certificate is not valid yet: one of the two clocks is wrong.
    #[error("the certificate is not valid before {}; check the clocks of both machines", format_date(*not_before))]
    NotYetValid {
        /// First second of the certificate.
        not_before: u64,
    },
    /// A CA certificate above the certificate has expired or is not valid yet.
    #[error("an issuer of the certificate is not valid now: {0}")]
    IssuerPeriod(String),
    /// The extended key usage does not permit this role.
    #[error("the certificate's purpose does not permit use as {wanted}")]
    WrongPurpose {
        /// Role of the peer.
        wanted: Purpose,
    },
    /// The certificate is genuine, but of another kind.
    #[error("a certificate of kind {found} cannot be used as {wanted}")]
    WrongKind {
        /// Role of the peer.
        wanted: Purpose,
        /// Kind of the certificate.
        found: &'static str,
    },
    /// The signature is genuine, but its issuer signs for another purpose.
    #[error(
        "the issuer of certificates for {found} cannot issue a certificate for use as {wanted}"
    )]
    WrongIssuer {
        /// Role of the peer.
        wanted: Purpose,
        /// Purpose for which the issuer signs.
        found: IssuerPurpose,
    },
    /// A cluster's CA has signed the certificate, but not for a node.
    #[error(
        "the certificate has the subject \"{found}\"; an edge's certificate of the cluster's CA must have exactly the subject \"{wanted}\" and no other names"
    )]
    Subject {
        /// Subject of the certificate.
        found: String,
        /// Subject that nodes have.
        wanted: String,
    },
    /// The certificate is genuine, but revoked.
    #[error("the certificate of {0} is revoked")]
    Revoked(String),
    /// A trusted root has signed the certificate, but it carries no usable identity.
    #[error(transparent)]
    Identity(#[from] NameError),
    /// The certificate has any other fault.
    #[error("the certificate is invalid: {0}")]
    Invalid(String),
}

impl PeerRejected {
    /// Whether the certificate proves nothing: its issuer is not trusted, it or an issuer is not valid now, or it is not for this use. A client may
    /// authenticate by other means then. A certificate that is genuine and refused, such as a revoked one, is different.
    pub fn is_unverified(&self) -> bool {
        matches!(
            self,
            Self::UnknownIssuer
                | Self::Expired { .. }
                | Self::NotYetValid { .. }
                | Self::IssuerPeriod(_)
                | Self::WrongPurpose { .. }
        )
    }
}

/// Identity of a peer, and the certificate that proves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedPeer {
    /// The peer's identity.
    pub identity: Identity,
    /// The certificate's serial number, in hexadecimal.
    pub serial: String,
    /// Time of issue, in Unix seconds, if the certificate is our own.
    pub issued_at: u64,
    /// The certificate's last second.
    pub not_after: u64,
    /// Root above the certificate: one of ours if our issuers are known, or one of an external CA.
    pub root: Option<Fingerprint>,
}

/// Returns the identity of the peer of a finished handshake, or the reason for which the peer is rejected.
pub fn check_peer(
    chain: Option<&[CertificateDer<'_>]>,
    purpose: Purpose,
    now: UnixTime,
    trust: &TrustStore,
    revoked: IsRevokedFn<'_>,
) -> Result<Identity, PeerRejected> {
    verify_peer(chain, purpose, now, trust, revoked).map(|verified| verified.identity)
}

/// Verifies a peer like [`check_peer`], and also returns the properties of its certificate.
pub fn verify_peer(
    chain: Option<&[CertificateDer<'_>]>,
    purpose: Purpose,
    now: UnixTime,
    trust: &TrustStore,
    revoked: IsRevokedFn<'_>,
) -> Result<VerifiedPeer, PeerRejected> {
    let (leaf, issuers) = chain
        .and_then(<[_]>::split_first)
        .ok_or(PeerRejected::NoCertificate)?;
    let parsed = Certificate::parse(leaf).map_err(certificate_error)?;
    if now.as_secs() > parsed.not_after {
        return Err(PeerRejected::Expired {
            not_after: parsed.not_after,
        });
    }
    if now.as_secs() < parsed.not_before {
        return Err(PeerRejected::NotYetValid {
            not_before: parsed.not_before,
        });
    }
    let chain_check = ChainInProgress {
        leaf,
        issuers,
        now,
        purpose,
    };
    let (serial, serial_hex) = (parsed.serial.clone(), parsed.serial_hex());
    let (issued_at, not_after) = (parsed.issued_at(), parsed.not_after);
    let mut root = None;
    let identity = if let Some(signer) = chain_check.find_own_signer(trust)? {
        let identity = Identity::from_own(&parsed, &trust.domain)?;
        check_kind(&identity, &parsed, purpose)?;
        if let Some(found) = signer
            .purpose
            .filter(|found| *found != purpose.required_issuer())
        {
            let wanted = purpose;
            return Err(PeerRejected::WrongIssuer { wanted, found });
        }
        root = signer.root;
        identity
    } else if chain_check.has_foreign_signer(trust)? {
        // If one CA issues the certificates of edges and clients, an edge's must not be used as a client's.
        if let Some(found) = Identity::own_machine_kind(&parsed, &trust.domain) {
            let wanted = purpose;
            return Err(PeerRejected::WrongKind { wanted, found });
        }
        Identity::from_foreign(parsed)
    } else {
        return Err(PeerRejected::UnknownIssuer);
    };
    if revoked(&serial, &identity) {
        return Err(PeerRejected::Revoked(identity.to_string()));
    }
    if identity == Identity::Gateway && trust.revoked_gateways.contains(&serial_hex) {
        let holder = format!("the gateway with serial number {serial_hex}");
        return Err(PeerRejected::Revoked(holder));
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

/// Our issuer that has signed the leaf: its purpose, and the root above it.
struct SignerInfo {
    purpose: Option<IssuerPurpose>,
    root: Option<Fingerprint>,
}

impl ChainInProgress<'_> {
    fn find_own_signer(&self, trust: &TrustStore) -> Result<Option<SignerInfo>, PeerRejected> {
        match (&trust.issuers, self.purpose) {
            (Some(issuers), Purpose::Edge | Purpose::Client | Purpose::Peer) => {
                let found = issuers.find(self.leaf, self.now);
                self.classify(found).map(|found| {
                    found.map(|issuer| SignerInfo {
                        purpose: issuer.purpose,
                        root: Some(issuer.root),
                    })
                })
            }
            _ => self.verify_to_root(trust),
        }
    }

    /// Whether a foreign root has signed the certificate. Only clients may have a foreign certificate.
    fn has_foreign_signer(&self, trust: &TrustStore) -> Result<bool, PeerRejected> {
        match (&trust.foreign_verifier, self.purpose) {
            (Some(foreign), Purpose::Client) => {
                let verified = foreign.verify_client_cert(self.leaf, self.issuers, self.now);
                self.classify(verified).map(|verified| verified.is_some())
            }
            _ => Ok(false),
        }
    }

    /// Follows the chain to one of our roots. Only the issuer of the leaf counts, and no other certificate of the chain.
    fn verify_to_root(&self, trust: &TrustStore) -> Result<Option<SignerInfo>, PeerRejected> {
        use webpki::Error;
        if trust.roots.is_empty() {
            return Ok(None);
        }
        let usage = match self.purpose {
            Purpose::Gateway => KeyUsage::server_auth(),
            Purpose::Edge | Purpose::Client | Purpose::Peer => KeyUsage::client_auth(),
        };
        let invalid = |error: Error| PeerRejected::Invalid(error.to_string());
        let leaf = EndEntityCert::try_from(self.leaf).map_err(invalid)?;
        let algorithms = provider().signature_verification_algorithms.all;
        let anchors = &trust.roots.roots;
        let path_result = leaf.verify_for_usage(
            algorithms,
            anchors,
            self.issuers,
            self.now,
            usage,
            None,
            None,
        );
        match path_result {
            Ok(path) => {
                if trust.is_external() {
                    let (purpose, root) = (None, Some(root_key(path.anchor())));
                    return Ok(Some(SignerInfo { purpose, root }));
                }
                let signer = path.intermediate_certificates().next();
                let parsed_signer = signer.map(|signer| Certificate::parse(&signer.der()));
                let purpose = match parsed_signer.transpose().map_err(certificate_error)? {
                    // The root signed the leaf directly.
                    None => None,
                    Some(parsed_signer) => Some(
                        issuer_purpose(&parsed_signer, &trust.domain)
                            .ok_or(PeerRejected::UnknownIssuer)?,
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
            // The leaf's own period is checked before.
            Err(error @ (Error::CertExpired { .. } | Error::CertNotValidYet { .. })) => {
                Err(PeerRejected::IssuerPeriod(error.to_string()))
            }
            Err(error) => Err(invalid(error)),
        }
    }

    /// Returns the result of a verification, or `None` if other signers have signed the certificate.
    fn classify<T>(&self, outcome: Result<T, TlsError>) -> Result<Option<T>, PeerRejected> {
        match outcome {
            Ok(found) => Ok(Some(found)),
            Err(error) if is_other_issuer(&error) => Ok(None),
            // The leaf's own period is checked before.
            Err(
                error @ TlsError::InvalidCertificate(
                    TlsCertificateError::Expired
                    | TlsCertificateError::ExpiredContext { .. }
                    | TlsCertificateError::NotValidYet
                    | TlsCertificateError::NotValidYetContext { .. },
                ),
            ) => Err(PeerRejected::IssuerPeriod(error.to_string())),
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
    /// Returns the purpose of the issuer for certificates of this purpose.
    pub(super) fn required_issuer(self) -> IssuerPurpose {
        match self {
            Self::Edge => IssuerPurpose::Edges,
            Self::Client => IssuerPurpose::Clients,
            Self::Gateway | Self::Peer => IssuerPurpose::Replicas,
        }
    }
}

/// Checks that the certificate's extended key usage and identity match the purpose. Our own certificates always have an
/// extended key usage, so a missing one is refused too.
fn check_kind(
    identity: &Identity,
    parsed: &Certificate,
    purpose: Purpose,
) -> Result<(), PeerRejected> {
    let has_usage = match purpose {
        Purpose::Edge | Purpose::Client | Purpose::Peer => parsed.client_auth,
        Purpose::Gateway => parsed.server_auth,
    };
    match (purpose, identity) {
        (Purpose::Edge, Identity::Edge(_))
        | (Purpose::Client, Identity::Client { .. })
        | (Purpose::Gateway | Purpose::Peer, Identity::Gateway)
            if has_usage =>
        {
            Ok(())
        }
        (Purpose::Edge, Identity::Edge(_))
        | (Purpose::Client, Identity::Client { .. })
        | (Purpose::Gateway | Purpose::Peer, Identity::Gateway) => {
            Err(PeerRejected::WrongPurpose { wanted: purpose })
        }
        _ => Err(PeerRejected::WrongKind {
            wanted: purpose,
            found: identity.kind(),
        }),
    }
}

fn certificate_error(error: CertificateError) -> PeerRejected {
    PeerRejected::Identity(error.into())
}
