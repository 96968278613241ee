//! Issues certificates: for edges that join, for renewals, and for certificates of the cluster's signer.

use super::{
    Enrolled, Enrolment, HandlerState, JoinResponse, RenewRequest, internal_problem,
    nodes_pending_problem, problem, revoked_node_problem, unavailable_problem,
    unknown_node_problem, verify_csr,
};
use crate::{
    control::{
        eligibility::untrusted_reason,
        http::{Peer, ProblemDetails},
        signer::Signer,
    },
    state::{Node, nodes::record_revoked, registry::EdgeCertificate},
};
use axum::http::StatusCode;
use causeway_certs::{
    IssuedCertificate, NodeName, NodeRecord, OtherFields, TokenRecord, VerifiedNodeCertificate,
    VerifiedPublicKey,
};
use rustls::pki_types::UnixTime;
use std::sync::Arc;
use tokio::task::spawn_blocking;
use tracing::info;

impl Enrolment {
    /// Returns the signer for edges that join by their cluster identity.
    pub(super) fn signer(&self) -> Signer {
        let (nodes, record_writer) = (self.nodes.reader(), self.record_writer.clone());
        Signer::new(self.ca.clone(), nodes, record_writer, self.lifetime)
    }
}

impl HandlerState {
    /// Looks up a node in the shared state that this gateway does not know.
    pub(super) async fn fetch_node(&self, node: &NodeName) -> Result<(), ProblemDetails> {
        if let Some(shared) = &self.enrolment.shared_state {
            let fetched = shared.fetch_node(node).await;
            if let Some(record) = fetched.map_err(|why| unavailable_problem(&why))? {
                self.enrolment.record_writer.add_stored(record);
            }
        }
        Ok(())
    }

    /// Issues the certificate of an edge that joins. It is not admitted yet.
    pub(super) fn issue(
        &self,
        key: &VerifiedPublicKey,
        node: &NodeName,
        record: TokenRecord,
    ) -> Result<Enrolled, ProblemDetails> {
        let TokenRecord {
            addresses,
            pool,
            labels,
            nodes,
            ..
        } = record;
        let now = UnixTime::now().as_secs();
        let reader = self.enrolment.nodes.reader();
        let was_named_by_token = reader
            .get_record(node)
            .is_some_and(|known| !known.follows_cluster);
        let previous = reader.get(node).unwrap_or_default();
        let confirmed = Node {
            addresses,
            pool,
            labels,
            joined_at: now,
            join_key: Some(key.fingerprint()),
            follows_cluster: nodes.node().is_none() && !was_named_by_token,
            ..previous
        };
        let issued = self.sign(key, node)?;
        let record = NodeRecord {
            node: node.clone(),
            addresses: confirmed.addresses.clone(),
            pool: confirmed.pool.clone(),
            labels: confirmed.labels.clone(),
            enrolled_at: now,
            order: None,
            serial: issued.serial_hex(),
            root: Some(issued.root),
            not_after: Some(issued.not_after.as_secs()),
            // The store keeps a revocation that is already recorded.
            revoked: None,
            follows_cluster: confirmed.follows_cluster,
            join_key: confirmed.join_key,
            other: OtherFields::new(),
        };
        Ok(Enrolled {
            issued,
            record,
            node: confirmed,
        })
    }

    /// Issues the next certificate of an enrolled edge. The record on disk decides: a node that was removed or revoked meanwhile
    /// gets no certificate.
    pub(super) async fn reissue(
        self: Arc<Self>,
        key: VerifiedPublicKey,
        node: NodeName,
        certificate: EdgeCertificate,
    ) -> Result<JoinResponse, ProblemDetails> {
        let (state, node_name) = (self.clone(), node.clone());
        let (nodes, issued_at) = (self.enrolment.nodes.reader(), certificate.issued_at);
        let issued = spawn_blocking(move || {
            // The root under which this connection was admitted may have been retired in the meantime.
            let ca = state.enrolment.ca.get();
            let is_trusted_root = |root| ca.fingerprints().contains(&root);
            let believed = certificate.root.is_none_or(is_trusted_root);
            if let Some(why) = untrusted_reason(believed, &node_name, &certificate) {
                return Err(problem(StatusCode::FORBIDDEN, "certificate_replaced", why));
            }
            state.sign(&key, &node_name)
        });
        let issued = issued.await.map_err(|error| internal_problem(&error))??;
        let is_cluster_edge =
            self.enrolment.accepts_cluster_identity && nodes.cluster_says_edge(&node) == Some(true);
        if is_cluster_edge && nodes.get_record(&node).is_none() {
            let recorded = self
                .enrolment
                .record_writer
                .ensure_record_at(&node, issued_at)
                .await;
            recorded.map_err(|error| internal_problem(&error))?;
        }
        let renewed = self
            .enrolment
            .record_writer
            .record_renewal(&node, issued.clone())
            .await;
        match renewed.map_err(|error| internal_problem(&error))? {
            None => Err(unknown_node_problem(&node)),
            Some(NodeRecord {
                revoked: Some(why), ..
            }) => Err(revoked_node_problem(record_revoked(&node, &why.reason))),
            Some(_) => Ok(self.join_response(node, &issued)),
        }
    }

    fn sign(
        &self,
        key: &VerifiedPublicKey,
        node: &NodeName,
    ) -> Result<IssuedCertificate, ProblemDetails> {
        let Enrolment { ca, lifetime, .. } = &self.enrolment;
        let issued = ca.get().issue_edge(key, node, *lifetime);
        issued.map_err(|error| internal_problem(&error))
    }

    pub(super) fn join_response(&self, node: NodeName, issued: &IssuedCertificate) -> JoinResponse {
        let Enrolment { ca, advertised, .. } = &self.enrolment;
        let ca = ca.get();
        JoinResponse {
            certificate: issued.pem(),
            root: ca.bundle_pem(),
            trust_domain: ca.trust_domain().to_string(),
            node,
            gateways: advertised.get().gateways,
        }
    }
}

impl HandlerState {
    pub(super) async fn exchange_certificate(
        self: Arc<Self>,
        peer: &Peer,
        request: RenewRequest,
    ) -> Result<JoinResponse, ProblemDetails> {
        let Some(VerifiedNodeCertificate { node, since }) = peer.cluster_certificate.clone() else {
            let detail = if self.enrolment.accepts_cluster_certificates {
                "this request requires the certificate that the cluster's signer has issued for the node"
            } else {
                "this gateway does not exchange certificates of another signer: kubernetes.signer of the edge must equal kubernetes.certificates.signer of the gateway"
            };
            let status = StatusCode::UNAUTHORIZED;
            return Err(problem(status, "certificate_missing", detail));
        };
        let key = verify_csr(&request.csr)?;
        self.check_nodes_loaded(&node)?;
        let signer = self.enrolment.signer();
        if let Some(why) = signer.refusal_reason(&node) {
            return Err(problem(StatusCode::FORBIDDEN, "node_refused", why));
        }
        let node_data = self.enrolment.nodes.reader().get(&node);
        if node_data.is_some_and(|known| since < known.joined_at) {
            let why = format!(
                "node {node} has joined after this certificate was issued: request a new certificate from the cluster"
            );
            return Err(problem(StatusCode::FORBIDDEN, "certificate_replaced", why));
        }
        let version = request.version;
        info!(%node, ?version, "a node joins with a certificate issued by its cluster");
        let certificate = signer.issue((key, &node), None, since).await;
        let issued = certificate.map_err(|error| internal_problem(&error))?;
        Ok(self.join_response(node, &issued))
    }

    /// Refuses a node that only the cluster can know while the nodes of the cluster are not loaded. The edge may retry.
    pub(super) fn check_nodes_loaded(&self, node: &NodeName) -> Result<(), ProblemDetails> {
        let nodes = self.enrolment.nodes.reader();
        if !self.enrolment.accepts_cluster_identity
            || nodes.has_cluster()
            || nodes.get(node).is_some()
        {
            return Ok(());
        }
        Err(nodes_pending_problem())
    }
}
