//! The site network: edges of one pool among themselves, without a gateway.
//!
//! Both ends show the certificate by which they are edges, with what signed it, and each asks the same three things of the
//! other: that it hangs below our roots by the one that signs edges and holds now, that it names a node, and that this node is
//! a member. Whoever dials says which node it means, as the server's name, and takes no other member for it; the name does
//! not travel. Nothing resumes: a handshake is what says that a node is still a member.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::verify_tls13_signature;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme,
    version,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use thiserror::Error as ThisError;

use super::client::{alert, other, owned};
use super::server::config;
use super::{
    ALPN_CONTROL, PeerRejected, Purpose, TrustError, TrustStore, check_peer, none_revoked, provider,
};
use crate::certificate::Certificate;
use crate::edge_identity::EdgeIdentity;
use crate::identity::Identity;
use crate::name::NodeName;

/// Says whether a node is a member now.
pub type IsMemberFn = Arc<dyn Fn(&NodeName) -> bool + Send + Sync>;

/// Why a peer is no neighbour.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum PoolMemberRejected {
    /// It is no edge of ours.
    #[error(transparent)]
    Peer(#[from] PeerRejected),
    /// It is one of another pool.
    #[error("{0} is no member of this node's pool")]
    NoMember(Identity),
    /// It is another member than the one that was dialled.
    #[error("node {found} answers where {meant} was expected")]
    Another {
        /// Whom the certificate names.
        found: NodeName,
        /// Who was dialled.
        meant: String,
    },
}

/// An edge among the members of its pool: its certificate and roots as they are now, and who is a member.
pub struct PoolMemberTls {
    trust: TrustStore,
    is_member: IsMemberFn,
    edge: EdgeIdentity,
}

impl fmt::Debug for PoolMemberTls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("PoolMemberTls")
            .field("node", &self.edge.node)
            .finish_non_exhaustive()
    }
}

impl PoolMemberTls {
    /// This edge with what it shows and believes now. Fails for one whose certificate another system makes: what signs those
    /// signs for anybody.
    pub fn new(edge: &EdgeIdentity, is_member: IsMemberFn) -> Result<Arc<Self>, TrustError> {
        if edge.given {
            return Err(TrustError::NobodyTrusted);
        }
        Ok(Arc::new(Self {
            trust: TrustStore::below(&edge.roots, &edge.trust_domain)?,
            is_member,
            edge: edge.clone(),
        }))
    }

    /// Whether it shows and believes what this identity does.
    pub fn is_of(&self, edge: &EdgeIdentity) -> bool {
        self.edge.leaf == edge.leaf && self.edge.roots == edge.roots
    }

    /// The node that comes with this chain, if it is a member.
    pub fn member(
        &self,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<NodeName, PoolMemberRejected> {
        // A clock that is behind a member's certificate is wrong: our CA issues none for a later time. Nodes without a
        // battery-backed clock still find their neighbours.
        let facts = chain.first().map(Certificate::read);
        let begins = facts.and_then(Result::ok).unwrap_or_default().not_before;
        let now = now.max(UnixTime::since_unix_epoch(Duration::from_secs(begins)));
        let found = check_peer(Some(chain), Purpose::Edge, now, &self.trust, &none_revoked)?;
        match found {
            Identity::Edge(node) if (self.is_member)(&node) => Ok(node),
            found => Err(PoolMemberRejected::NoMember(found)),
        }
    }

    /// The accepting end.
    pub fn server(self: &Arc<Self>) -> Result<Arc<ServerConfig>, TrustError> {
        let leaf = self.edge.leaf.resolver();
        let versions = [&version::TLS13];
        Ok(config(&versions, self.clone(), leaf, &ALPN_CONTROL, None)?)
    }

    /// The dialling end, which speaks HTTP/1.1; the server's name is the node that is meant.
    pub fn client(self: &Arc<Self>) -> Result<Arc<ClientConfig>, TrustError> {
        let leaf = &self.edge.leaf;
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(self.clone())
            .with_client_auth_cert(leaf.chain().to_vec(), leaf.key())?;
        config.alpn_protocols = owned(&ALPN_CONTROL[1..]);
        config.resumption = Resumption::disabled();
        config.enable_sni = false;
        Ok(Arc::new(config))
    }

    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<NodeName, Error> {
        if issuers.len() > super::issuers::MOST_BEHIND {
            let why = "more certificates stand behind the member's than any chain has";
            return Err(Error::General(why.into()));
        }
        let chain: Vec<_> = [leaf].into_iter().chain(issuers).cloned().collect();
        self.member(&chain, now).map_err(|refused| match refused {
            PoolMemberRejected::Peer(refused) => alert(refused),
            refused => other(refused),
        })
    }

    fn signed(
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &provider().signature_verification_algorithms;
        verify_tls13_signature(message, leaf, signed, algorithms)
    }
}

impl ServerCertVerifier for PoolMemberTls {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        meant: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let node = self.verify(leaf, issuers, now)?;
        let meant = meant.to_str();
        if meant.eq_ignore_ascii_case(node.as_str()) {
            return Ok(ServerCertVerified::assertion());
        }
        Err(other(PoolMemberRejected::Another {
            found: node,
            meant: meant.into_owned(),
        }))
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // Neither end speaks it.
        Err(Error::General("members of a site speak TLS 1.3".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::signed(message, leaf, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        schemes()
    }
}

impl ClientCertVerifier for PoolMemberTls {
    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify(leaf, issuers, now)
            .map(|_| ClientCertVerified::assertion())
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A member has one certificate to show.
        &[]
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // Neither end speaks it.
        Err(Error::General("members of a site speak TLS 1.3".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::signed(message, leaf, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        schemes()
    }
}

fn schemes() -> Vec<SignatureScheme> {
    provider()
        .signature_verification_algorithms
        .supported_schemes()
}

#[cfg(test)]
mod tests;
