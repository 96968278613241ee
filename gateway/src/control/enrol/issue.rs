//! Blocking part of the enrolment: spends tokens and issues certificates.

use super::{
    Enrolment, HandlerState, JoinResponse, broken, exchange::not_yet, refuse, refused, revoked,
    unknown,
};
use crate::{
    control::{eligibility::untrusted_reason, http::ProblemDetails, signer::Signer},
    state::{Node, nodes::record_revoked, registry::EdgeCertificate},
};
use axum::http::StatusCode;
use causeway_certs::{
    IssuedCertificate, JoinToken, NodeName, NodePattern, NodeRecord, NodeStatus, TokenRecord,
    TokenStore, VerifiedPublicKey,
};
use rustls::pki_types::UnixTime;
use std::sync::Arc;
use tokio::task::spawn_blocking;

impl Enrolment {
    /// Returns the signer for edges that join by their identity in the cluster.
    pub(super) fn signer(&self) -> Signer {
        Signer {
            ca: self.ca.clone(),
            nodes: self.nodes.reader(),
            ledger: self.ledger.clone(),
            lifetime: self.lifetime,
        }
    }
}

impl HandlerState {
    /// Spends the token. Blocks on the disk.
    pub(super) fn redeem(
        &self,
        token: &JoinToken,
        node: Option<NodeName>,
    ) -> Result<(NodeName, TokenRecord), ProblemDetails> {
        // An edge that does not name its node takes the node name in the token.
        let node = node.map_or_else(|| self.meant(token), Ok)?;
        // A node that only the cluster knows has not joined here yet, so it is new.
        let nodes = self.enrolment.nodes.reader();
        let standing = match nodes.recorded(&node) {
            Some(_) => NodeStatus::Known,
            None => NodeStatus::New,
        };
        if let Some(why) = nodes.revoked(&node) {
            return Err(revoked(why));
        }
        self.may_name_itself(token, &node)?;
        let redeemed = self
            .tokens()
            .redeem(token, (&node, standing), UnixTime::now());
        let record = redeemed.map_err(|why| refused(&why))?;
        Ok((node, record))
    }

    /// Checks that a node may take this name by a token that does not name it. A cluster's node that is not at the edge may not,
    /// or the owner of such a token would get that node's traffic. The token is not spent, and the reason may be temporary.
    fn may_name_itself(&self, token: &JoinToken, node: &NodeName) -> Result<(), ProblemDetails> {
        // Faults of the token itself are reported when the token is used.
        let names_it = |meant: NodePattern| meant.node().is_some();
        if self.tokens().meant(token).map_or(true, names_it) {
            return Ok(());
        }
        let nodes = self.enrolment.nodes.reader();
        let mut problem = if nodes.pending().is_some() {
            not_yet()
        } else if nodes.is_clusters_edge(node) == Some(false) {
            let detail = format!(
                "the cluster's Node {node} is not an edge node: give it one of the labels in kubernetes.edge_labels, or join with a token that names it (`causeway token create --node {node}`)"
            );
            refuse(StatusCode::SERVICE_UNAVAILABLE, "node_elsewhere", detail)
        } else {
            return Ok(());
        };
        problem.retry_after.get_or_insert(60);
        Err(problem)
    }

    /// Returns the tokens of all trusted roots.
    fn tokens(&self) -> TokenStore {
        self.enrolment.store.tokens_of(&self.enrolment.ca.get())
    }

    /// Returns the node for which a token was made.
    fn meant(&self, token: &JoinToken) -> Result<NodeName, ProblemDetails> {
        let nodes = self.tokens().meant(token).map_err(|why| refused(&why))?;
        nodes.node().ok_or_else(|| {
            let detail =
                format!("the join token is for nodes {nodes}: set the name of the edge (node)");
            refuse(StatusCode::FORBIDDEN, "node_missing", detail)
        })
    }

    /// Issues the certificate of an edge that joins. Blocks on the disk.
    pub(super) fn issue(
        &self,
        key: &VerifiedPublicKey,
        node: NodeName,
        record: TokenRecord,
    ) -> Result<JoinResponse, ProblemDetails> {
        let TokenRecord {
            addresses,
            pool,
            labels,
            nodes,
            ..
        } = record;
        let now = UnixTime::now().as_secs();
        let reader = self.enrolment.nodes.reader();
        let named_before = reader
            .recorded(&node)
            .is_some_and(|known| !known.follows_cluster);
        let known = reader.get(&node).unwrap_or_default();
        let confirmed = Node {
            addresses,
            pool,
            labels,
            joined_at: now,
            follows_cluster: nodes.node().is_none() && !named_before,
            ..known
        };
        let issued = self.sign(key, &node)?;
        let record = NodeRecord {
            node: node.clone(),
            addresses: confirmed.addresses.clone(),
            pool: confirmed.pool.clone(),
            labels: confirmed.labels.clone(),
            enrolled_at: now,
            serial: issued.serial_hex(),
            root: Some(issued.root),
            not_after: Some(issued.not_after.as_secs()),
            // A revocation that is already recorded stays.
            revoked: None,
            follows_cluster: confirmed.follows_cluster,
        };
        let Enrolment { store, nodes, .. } = &self.enrolment;
        store.nodes().put(record).map_err(|error| broken(&error))?;
        nodes.put(node.clone(), confirmed);
        Ok(self.granted(node, &issued))
    }

    /// Issues the next certificate of an enrolled edge. The disk decides: a node that is removed or revoked meanwhile stays so.
    pub(super) async fn reissue(
        self: Arc<Self>,
        key: VerifiedPublicKey,
        node: NodeName,
        shown: EdgeCertificate,
    ) -> Result<JoinResponse, ProblemDetails> {
        let (desk, of) = (self.clone(), node.clone());
        let (nodes, issued_at) = (self.enrolment.nodes.reader(), shown.issued_at);
        let issued = spawn_blocking(move || {
            // The root that admitted this connection may have been retired in the meantime.
            let ca = desk.enrolment.ca.get();
            let believed = |root| ca.fingerprints().contains(&root);
            let believed = shown.root.is_none_or(believed);
            if let Some(why) = untrusted_reason(believed, &of, &shown) {
                return Err(refuse(StatusCode::FORBIDDEN, "certificate_replaced", why));
            }
            desk.sign(&key, &of)
        });
        let issued = issued.await.map_err(|error| broken(&error))??;
        let vouched = self.enrolment.vouched && nodes.is_clusters_edge(&node) == Some(true);
        if vouched && nodes.recorded(&node).is_none() {
            let arrived = self.enrolment.ledger.arrived_at(&node, issued_at).await;
            arrived.map_err(|error| broken(&error))?;
        }
        let noted = self.enrolment.ledger.renewed(&node, issued.clone()).await;
        match noted.map_err(|error| broken(&error))? {
            None => Err(unknown(&node)),
            Some(NodeRecord {
                revoked: Some(why), ..
            }) => Err(revoked(record_revoked(&node, &why.reason))),
            Some(_) => Ok(self.granted(node, &issued)),
        }
    }

    fn sign(
        &self,
        key: &VerifiedPublicKey,
        node: &NodeName,
    ) -> Result<IssuedCertificate, ProblemDetails> {
        let Enrolment { ca, lifetime, .. } = &self.enrolment;
        let issued = ca.get().issue_edge(key, node, *lifetime);
        issued.map_err(|error| broken(&error))
    }

    pub(super) fn granted(&self, node: NodeName, issued: &IssuedCertificate) -> JoinResponse {
        let Enrolment { ca, advertised, .. } = &self.enrolment;
        let ca = ca.get();
        JoinResponse {
            certificate: issued.pem(),
            root: ca.bundle_pem(),
            trust_domain: ca.trust_domain().to_string(),
            node,
            gateways: advertised.all().gateways,
        }
    }
}
