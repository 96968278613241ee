//! Enrolment by a certificate that one of the cluster's signers has issued for the node.
//!
//! Such a certificate stays valid for its lifetime of two hours, unless a later one has been presented.

use super::{HandlerState, JoinResponse, RenewRequest, internal_problem, problem, verify_csr};
use crate::control::http::{Peer, ProblemDetails};
use axum::http::StatusCode;
use causeway_certs::{NodeName, VerifiedNodeCertificate};
use std::sync::Arc;
use tracing::info;

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

/// Returns the error for requests before the nodes of the cluster are loaded.
pub(super) fn nodes_pending_problem() -> ProblemDetails {
    let detail = "this gateway has not received the nodes of the cluster yet; try again later";
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let mut problem = problem(status, "nodes_unknown", detail);
    problem.retry_after = Some(5);
    problem
}
