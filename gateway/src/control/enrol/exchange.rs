//! Enrolment by a certificate that a signer of the cluster's own has issued for the node.
//!
//! The certificate is valid for its two hours, as long as no later one has been presented.

use super::{HandlerState, JoinResponse, RenewRequest, broken, key, refuse};
use crate::control::http::{Peer, ProblemDetails};
use axum::http::StatusCode;
use causeway_certs::{NodeName, VerifiedNodeCertificate};
use std::sync::Arc;
use tracing::info;

impl HandlerState {
    pub(super) async fn vouched(
        self: Arc<Self>,
        peer: &Peer,
        asked: RenewRequest,
    ) -> Result<JoinResponse, ProblemDetails> {
        let Some(VerifiedNodeCertificate { node, since }) = peer.vouched.clone() else {
            let detail = if self.enrolment.by_cluster {
                "this request requires the certificate that the cluster's signer has issued for the node"
            } else {
                "this gateway does not exchange certificates of another signer: kubernetes.signer of the edge must equal kubernetes.certificates.signer of the gateway"
            };
            let status = StatusCode::UNAUTHORIZED;
            return Err(refuse(status, "certificate_missing", detail));
        };
        let key = key(&asked.csr)?;
        self.can_judge(&node)?;
        let signer = self.enrolment.signer();
        if let Some(why) = signer.refuses(&node) {
            return Err(refuse(StatusCode::FORBIDDEN, "node_refused", why));
        }
        let known = self.enrolment.nodes.reader().get(&node);
        if known.is_some_and(|known| since < known.joined_at) {
            let why = format!(
                "node {node} has joined after this certificate was issued: request a new certificate from the cluster"
            );
            return Err(refuse(StatusCode::FORBIDDEN, "certificate_replaced", why));
        }
        let version = asked.version;
        info!(%node, ?version, "a node joins with a certificate issued by its cluster");
        let issued = signer.issue((key, &node), None, since).await;
        let issued = issued.map_err(|error| broken(&error))?;
        Ok(self.granted(node, &issued))
    }

    /// Refuses a node that only the cluster can know, until the cluster has named its nodes. The edge may retry.
    pub(super) fn can_judge(&self, node: &NodeName) -> Result<(), ProblemDetails> {
        let nodes = self.enrolment.nodes.reader();
        if !self.enrolment.vouched || nodes.has_cluster() || nodes.get(node).is_some() {
            return Ok(());
        }
        Err(not_yet())
    }
}

/// Returns the error while the nodes of the cluster have not been loaded yet.
pub(super) fn not_yet() -> ProblemDetails {
    let detail = "this gateway has not received the nodes of the cluster yet; try again later";
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let mut problem = refuse(status, "nodes_unknown", detail);
    problem.retry_after = Some(5);
    problem
}
