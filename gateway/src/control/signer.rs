//! Signs certificates for edges that join by their cluster identity instead of a join token.
//!
//! The component that reads the cluster determines which node makes a request. This module checks that the request names that
//! node and nothing else, and that the node is not refused. Only the key of the request is used (`certs::csr`). The certificate
//! is recorded on the disk before it is sent, as for a token. The node's earlier certificates are then no longer valid.

use super::node_records::NodeRecordWriter;
use crate::state::Nodes;
use causeway_certs::{CsrError, IssuedCertificate, LiveCa, NodeName, VerifiedPublicKey};
use rustls::pki_types::UnixTime;
use std::{fmt, time::Duration};
use tokio::task::spawn_blocking;

/// Maximum clock difference between a cluster and its gateways.
const MAX_CLOCK_SKEW: Duration = Duration::from_mins(1);

/// Signer of certificates for edges of a cluster. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Signer {
    ca: LiveCa,
    nodes: Nodes,
    record_writer: NodeRecordWriter,
    /// Lifetime of an edge's certificate.
    lifetime: Duration,
}

/// Internal error that prevented signing. It may be temporary.
#[derive(Debug, thiserror::Error)]
#[error("the certificate cannot be issued: {0}")]
pub struct SignError(String);

impl SignError {
    fn from_cause(cause: impl fmt::Display) -> Self {
        Self(cause.to_string())
    }
}

impl Signer {
    /// Returns a signer of this CA, which records certificates by this writer.
    pub fn new(
        ca: LiveCa,
        nodes: Nodes,
        record_writer: NodeRecordWriter,
        lifetime: Duration,
    ) -> Self {
        Self {
            ca,
            nodes,
            record_writer,
            lifetime,
        }
    }

    /// Returns the maximum lifetime of a certificate.
    pub fn max_lifetime(&self) -> Duration {
        self.lifetime
    }

    /// Verifies that a request in DER names this node and nothing else, and returns its key.
    ///
    /// # Errors
    /// The reason why the request is invalid.
    pub fn verify_request(
        &self,
        request: &[u8],
        node: &NodeName,
    ) -> Result<VerifiedPublicKey, CsrError> {
        VerifiedPublicKey::verify_edge(request, self.ca.get().trust_domain(), node)
    }

    /// Returns the reason why the node is refused a certificate now, if it is.
    pub fn refusal_reason(&self, node: &NodeName) -> Option<String> {
        let revoked = self.nodes.revocation_reason(node);
        match self.nodes.cluster_says_edge(node) {
            _ if revoked.is_some() => revoked,
            None => Some(format!("the cluster has no Node {node}")),
            Some(false) => Some(format!(
                "Node {node} is not an edge node: it has none of the labels in kubernetes.edge_labels"
            )),
            Some(true) => None,
        }
    }

    /// Issues the certificate of a node whose request was made at `asked_at`, in Unix seconds. Returns the certificate with its
    /// chain, as PEM.
    ///
    /// # Errors
    /// If the certificate cannot be signed or recorded on the disk.
    pub async fn sign(
        &self,
        (key, node): (VerifiedPublicKey, &NodeName),
        lifetime: Option<Duration>,
        asked_at: u64,
    ) -> Result<String, SignError> {
        let issued = self.issue((key, node), lifetime, asked_at).await?;
        Ok(issued.pem())
    }

    /// Issues the certificate like `sign`, and returns all of its data.
    pub(super) async fn issue(
        &self,
        (key, node): (VerifiedPublicKey, &NodeName),
        lifetime: Option<Duration>,
        asked_at: u64,
    ) -> Result<IssuedCertificate, SignError> {
        let (ca, node_name) = (self.ca.get(), node.clone());
        let life = lifetime.map_or(self.lifetime, |life| life.min(self.lifetime));
        // The newest of several requests must win, regardless of the order of signing.
        let since = asked_at
            .min(UnixTime::now().as_secs())
            .saturating_sub(MAX_CLOCK_SKEW.as_secs());
        let issued = spawn_blocking(move || ca.issue_edge(&key, &node_name, life)).await;
        let issued = issued
            .map_err(SignError::from_cause)?
            .map_err(SignError::from_cause)?;
        let recorded = self
            .record_writer
            .record_join(node, since, issued.clone())
            .await;
        let noted = recorded.map_err(SignError::from_cause)?;
        if let Some(revoked) = noted.and_then(|record| record.revoked) {
            let why = format!("node {node} is revoked: {}", revoked.reason);
            return Err(SignError(why));
        }
        Ok(issued)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control::tests::world::{World, name},
        state::ClusterNode,
    };
    use causeway_certs::{EdgeIdentity, PrivateKey, Revocation};

    fn signer(world: &World) -> Signer {
        let record_writer = NodeRecordWriter::new(&world.store, &world.nodes);
        let lifetime = Duration::from_hours(1);
        Signer::new(world.live.clone(), world.reader(), record_writer, lifetime)
    }

    fn member(edge: bool) -> ClusterNode {
        ClusterNode {
            is_edge: edge,
            ..ClusterNode::default()
        }
    }

    fn request(world: &World, key: &PrivateKey, node: &str) -> Vec<u8> {
        use rustls::pki_types::{CertificateSigningRequestDer, pem::PemObject};
        let pem = key
            .edge_request(world.ca.trust_domain(), &name(node))
            .unwrap();
        let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes());
        der.unwrap().to_vec()
    }

    #[tokio::test]
    async fn a_cluster_approved_node_gets_a_certificate_replacing_older() {
        let world = World::start();
        let (signer, key) = (signer(&world), PrivateKey::generate().unwrap());
        world
            .nodes
            .replace_cluster([(name("edge-1"), member(true))].into());
        let now = UnixTime::now().as_secs();
        let request = request(&world, &key, "edge-1");
        let read = || signer.verify_request(&request, &name("edge-1")).unwrap();
        let shorter = Some(Duration::from_mins(10));
        let node = name("edge-1");
        let asked = signer.sign((read(), &node), shorter, now);
        let chain = asked.await.unwrap();
        let edge = EdgeIdentity::new(&world.ca.bundle_pem(), &chain, &key.key_pem()).unwrap();
        assert_eq!(edge.node, name("edge-1"));
        assert!(edge.leaf.not_after().as_secs() <= now + 660);
        let known = world.reader().get(&name("edge-1")).unwrap();
        assert_eq!(known.joined_at, now - 60, "as the clocks may differ");
        // A certificate requested earlier does not replace the newer one.
        let earlier = signer.sign((read(), &node), None, now - 500);
        earlier.await.unwrap();
        let known = world.reader().get(&name("edge-1")).unwrap();
        assert_eq!(known.joined_at, now - 60);
        assert_eq!(world.store.nodes().all().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_foreign_or_revoked_node_is_refused_with_the_reason() {
        let world = World::start();
        let signer = signer(&world);
        let refused = |node: &str| signer.refusal_reason(&name(node)).unwrap_or_default();
        assert!(refused("edge-1").contains("no Node edge-1"));
        world.nodes.replace_cluster(
            [
                (name("edge-1"), member(true)),
                (name("cloud"), member(false)),
            ]
            .into(),
        );
        assert_eq!(refused("edge-1"), "");
        assert!(refused("cloud").contains("not an edge node"));
        world.nodes.replace_revoked([name("edge-1")].into());
        assert!(refused("edge-1").contains("tunnel.revoked names it"));
        world.nodes.replace_revoked([].into());
        assert_eq!(refused("edge-1"), "");
        let revoked = Revocation {
            at: 1,
            reason: "stolen".to_owned(),
            other: causeway_certs::OtherFields::new(),
        };
        let store = &world.store;
        store
            .nodes()
            .revoke_or_create(&name("edge-1"), &revoked)
            .unwrap();
        let key = PrivateKey::generate().unwrap();
        let request = request(&world, &key, "edge-1");
        let key = signer.verify_request(&request, &name("edge-1")).unwrap();
        // The record on the disk takes precedence.
        let refusal = signer.sign((key, &name("edge-1")), None, 0).await;
        assert!(refusal.unwrap_err().to_string().contains("stolen"));
        assert!(refused("edge-1").contains("causeway node allow edge-1"));
    }
}
