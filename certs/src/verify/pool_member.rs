//! The site network: TLS between edges of one node pool, without a gateway.
//!
//! Both ends present their edge certificate and its issuer. Each end checks three properties of the other's certificate. The
//! certificate is valid now, and our issuer for edges has signed it. It names a node. This node is a member of the pool. The
//! dialling end sets the expected node as the server's name and accepts no other member; the name is not sent. No TLS session
//! resumes, so each handshake checks again that the node is a member.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use causeway_tls::{NodeName, provider};
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

use super::client::{other_error, owned_alpn, to_tls_error};
use super::peer::{PeerRejected, Purpose, check_peer, none_revoked};
use super::roots::TrustError;
use super::server::ALPN_CONTROL;
use super::server::build_server_config;
use super::trust_store::TrustStore;
use crate::certificate::Certificate;
use crate::edge_identity::EdgeIdentity;
use crate::identity::Identity;

/// Predicate that returns whether a node is a member now.
pub type IsMemberFn = Arc<dyn Fn(&NodeName) -> bool + Send + Sync>;

/// Error that makes a peer not acceptable as a member of the pool.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum PoolMemberRejected {
    /// The peer is not one of our edges.
    #[error(transparent)]
    Peer(#[from] PeerRejected),
    /// The peer is not a member of this pool.
    #[error("{0} is not a member of this node's pool")]
    NotAMember(Identity),
    /// The peer is a different member from the one that was dialled.
    #[error("node {found} responds at the address of node {meant}")]
    UnexpectedMember {
        /// Node that the certificate names.
        found: NodeName,
        /// Node that was dialled.
        meant: String,
    },
}

/// TLS of an edge among the members of its pool: its present certificate and roots, and the check of membership.
pub struct PoolMemberTls {
    trust_store: TrustStore,
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
    /// Returns the TLS configuration of this edge, with its present certificate and roots. Fails if an external CA issues the
    /// certificate: the issuer then signs for any purpose.
    pub fn new(edge: &EdgeIdentity, is_member: IsMemberFn) -> Result<Arc<Self>, TrustError> {
        if edge.is_external {
            return Err(TrustError::NoTrustedRoots);
        }
        Ok(Arc::new(Self {
            trust_store: TrustStore::from_roots(&edge.roots, &edge.trust_domain)?,
            is_member,
            edge: edge.clone(),
        }))
    }

    /// Whether the configuration presents and trusts the same certificates as this identity.
    pub fn matches_identity(&self, edge: &EdgeIdentity) -> bool {
        self.edge.leaf == edge.leaf && self.edge.roots == edge.roots
    }

    /// Returns the node that this chain names, if it is a member.
    pub fn verify_member(
        &self,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<NodeName, PoolMemberRejected> {
        // Our CA issues no certificates for the future, so a clock before `not_before` is wrong. Nodes without a
        // battery-backed clock can still reach their pool members.
        let parsed = chain.first().map(Certificate::parse);
        let not_before = parsed.and_then(Result::ok).unwrap_or_default().not_before;
        let now = now.max(UnixTime::since_unix_epoch(Duration::from_secs(not_before)));
        let identity = check_peer(
            Some(chain),
            Purpose::Edge,
            now,
            &self.trust_store,
            &none_revoked,
        )?;
        match identity {
            Identity::Edge(node) if (self.is_member)(&node) => Ok(node),
            found => Err(PoolMemberRejected::NotAMember(found)),
        }
    }

    /// Returns the configuration of the accepting end.
    pub fn server_config(self: &Arc<Self>) -> Result<Arc<ServerConfig>, TrustError> {
        let leaf = self.edge.leaf.resolver();
        let versions = [&version::TLS13];
        Ok(build_server_config(
            &versions,
            self.clone(),
            leaf,
            &ALPN_CONTROL,
            None,
        )?)
    }

    /// Returns the configuration of the dialling end, which speaks HTTP/1.1; the server's name is the expected node.
    pub fn client_config(self: &Arc<Self>) -> Result<Arc<ClientConfig>, TrustError> {
        let leaf = &self.edge.leaf;
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(self.clone())
            .with_client_auth_cert(leaf.chain().to_vec(), leaf.key())?;
        config.alpn_protocols = owned_alpn(&ALPN_CONTROL[1..]);
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
        if issuers.len() > super::issuers::MAX_INTERMEDIATES {
            let why = "the pool member sent too many intermediate certificates";
            return Err(Error::General(why.into()));
        }
        let chain: Vec<_> = [leaf].into_iter().chain(issuers).cloned().collect();
        self.verify_member(&chain, now)
            .map_err(|rejection| match rejection {
                PoolMemberRejected::Peer(rejection) => to_tls_error(rejection),
                refused => other_error(refused),
            })
    }

    fn verify_signature(
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
        expected: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let node = self.verify(leaf, issuers, now)?;
        let expected = expected.to_str();
        if expected.eq_ignore_ascii_case(node.as_str()) {
            return Ok(ServerCertVerified::assertion());
        }
        Err(other_error(PoolMemberRejected::UnexpectedMember {
            found: node,
            meant: expected.into_owned(),
        }))
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // Neither side uses TLS 1.2.
        Err(Error::General("pool members use TLS 1.3 only".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::verify_signature(message, leaf, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        supported_schemes()
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
        // A member has only one certificate.
        &[]
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // Neither side uses TLS 1.2.
        Err(Error::General("pool members use TLS 1.3 only".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::verify_signature(message, leaf, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        supported_schemes()
    }
}

fn supported_schemes() -> Vec<SignatureScheme> {
    provider()
        .signature_verification_algorithms
        .supported_schemes()
}

#[cfg(test)]
mod tests;
