//! Blocking part of the enrolment: spends tokens and issues certificates.

use super::{
    Enrolment, HandlerState, JoinResponse, RenewRequest, internal_problem, problem,
    revoked_node_problem, token_problem, unavailable_problem, unknown_node_problem, verify_csr,
};
use crate::{
    control::{
        eligibility::untrusted_reason,
        http::{Peer, ProblemDetails},
        signer::Signer,
    },
    shared_state::{RedeemError, SharedState, SyncError},
    state::{Node, nodes::record_revoked, registry::EdgeCertificate},
};
use axum::http::StatusCode;
use causeway_certs::{
    Fingerprint, IssuedCertificate, JoinToken, Joining, NodeName, NodePattern, NodeRecord,
    NodeStatus, OtherFields, RepeatCheck, TokenRecord, TokenStore, VerifiedNodeCertificate,
    VerifiedPublicKey,
};
use rustls::pki_types::UnixTime;
use std::sync::Arc;
use tokio::task::spawn_blocking;
use tracing::info;

impl Enrolment {
    /// Returns the signer for edges that join by their cluster identity.
    pub(super) fn signer(&self) -> Signer {
        Signer {
            ca: self.ca.clone(),
            nodes: self.nodes.reader(),
            record_writer: self.record_writer.clone(),
            lifetime: self.lifetime,
        }
    }
}

/// Certificate of an edge that joins, with the records of its node on the disk and in the table.
struct Enrolled {
    issued: IssuedCertificate,
    record: NodeRecord,
    node: Node,
}

/// A node that joins with a token.
struct Applicant {
    node: NodeName,
    status: NodeStatus,
    repeat: RepeatCheck,
}

impl Applicant {
    fn joining(&self) -> Joining<'_> {
        Joining {
            node: &self.node,
            status: self.status,
            repeat: Some(self.repeat),
        }
    }
}

impl HandlerState {
    /// Spends the token, and issues the certificate of the edge that joins.
    pub(super) async fn join(
        self: Arc<Self>,
        token: JoinToken,
        node: Option<NodeName>,
        key: VerifiedPublicKey,
        version: &str,
    ) -> Result<JoinResponse, ProblemDetails> {
        let (shared, id) = (self.enrolment.shared_state.clone(), token.id.clone());
        let fingerprint = key.fingerprint();
        let (applicant, record) = match &shared {
            Some(shared) => {
                let join = (token, node, fingerprint);
                self.redeem_at_all_gateways(shared, join).await?
            }
            None => {
                self.on_disk(move |state| state.redeem(&token, node, fingerprint))
                    .await?
            }
        };
        let Applicant { node, status, .. } = applicant;
        info!(%node, token = %id, ?version, "a join token was used");
        let enrolled = self
            .on_disk(move |state| state.issue(&key, &node, record))
            .await?;
        if let Some(shared) = &shared {
            share_node(shared, &enrolled.record, status).await?;
        }
        self.on_disk(move |state| state.admit(enrolled)).await
    }

    /// Refuses a token without the engine of the shared state and without the lock of enrolments, if this gateway knows that the
    /// token is not valid. Takes over a token that this gateway does not know.
    pub(super) async fn check_token(
        self: &Arc<Self>,
        token: &JoinToken,
        key: Fingerprint,
    ) -> Result<(), ProblemDetails> {
        let checked = self.tokens().check_root(token);
        checked.map_err(|why| token_problem(&why))?;
        let Some(shared) = &self.enrolment.shared_state else {
            return Ok(());
        };
        let presented = token.clone();
        let check = move |state: &Self| {
            let known = state.tokens().check_known(&presented, key, UnixTime::now());
            known.map_err(|why| token_problem(&why))
        };
        if !self.on_disk(check).await? {
            // Another gateway may have created the token a moment ago.
            let fetched = shared.fetch_token(&token.id).await;
            fetched.map_err(|why| unavailable_problem(&why))?;
        }
        Ok(())
    }

    /// Runs work that blocks on the disk.
    async fn on_disk<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, ProblemDetails> + Send + 'static,
    ) -> Result<T, ProblemDetails> {
        let state = self.clone();
        let done = spawn_blocking(move || work(&state)).await;
        done.map_err(|error| internal_problem(&error))?
    }

    /// Spends the token. Blocks on the disk.
    fn redeem(
        &self,
        token: &JoinToken,
        node: Option<NodeName>,
        key: Fingerprint,
    ) -> Result<(Applicant, TokenRecord), ProblemDetails> {
        let applicant = self.check_join(token, node, key)?;
        let redeemed = self
            .tokens()
            .redeem(token, applicant.joining(), UnixTime::now());
        let record = redeemed.map_err(|why| token_problem(&why))?;
        Ok((applicant, record))
    }

    /// Spends the token in the shared state.
    async fn redeem_at_all_gateways(
        self: &Arc<Self>,
        shared: &SharedState,
        (token, node, key): (JoinToken, Option<NodeName>, Fingerprint),
    ) -> Result<(Applicant, TokenRecord), ProblemDetails> {
        let check = |node: Option<NodeName>| {
            let token = token.clone();
            self.on_disk(move |state| state.check_join(&token, node, key))
        };
        let mut applicant = check(node).await?;
        if applicant.status == NodeStatus::New {
            let fetched = shared.fetch_node_now(&applicant.node).await;
            self.add_fetched(fetched)?;
            applicant = check(Some(applicant.node)).await?;
        }
        let tokens = self.tokens();
        let redeemed = shared.redeem(&tokens, &token, applicant.joining());
        let record = redeemed.await.map_err(|why| match why {
            RedeemError::Rejected(why) => token_problem(&why),
            RedeemError::NodeRevoked { reason } => {
                revoked_node_problem(record_revoked(&applicant.node, &reason))
            }
            RedeemError::Unavailable(why) => unavailable_problem(&why),
        })?;
        Ok((applicant, record))
    }

    /// Looks up a node in the shared state that this gateway does not know.
    pub(super) async fn fetch_node(&self, node: &NodeName) -> Result<(), ProblemDetails> {
        if let Some(shared) = &self.enrolment.shared_state {
            self.add_fetched(shared.fetch_node(node).await)?;
        }
        Ok(())
    }

    fn add_fetched(
        &self,
        fetched: Result<Option<NodeRecord>, SyncError>,
    ) -> Result<(), ProblemDetails> {
        if let Some(record) = fetched.map_err(|why| unavailable_problem(&why))? {
            self.enrolment.record_writer.add_stored(record);
        }
        Ok(())
    }

    /// Returns the node that joins with this token. Blocks on the disk.
    ///
    /// # Errors
    /// If the node may not join. The token is not spent.
    fn check_join(
        &self,
        token: &JoinToken,
        node: Option<NodeName>,
        key: Fingerprint,
    ) -> Result<Applicant, ProblemDetails> {
        // If the edge does not name its node, the token's node name is used.
        let node = node.map_or_else(|| self.node_of_token(token), Ok)?;
        // A node that only the cluster knows has not joined here yet and counts as new.
        let nodes = self.enrolment.nodes.reader();
        let known = nodes.get_record(&node);
        let status = match &known {
            Some(_) => NodeStatus::Known,
            None => NodeStatus::New,
        };
        if let Some(why) = nodes.revocation_reason(&node) {
            return Err(revoked_node_problem(why));
        }
        self.check_node_name(token, &node)?;
        let ended = self.enrolment.store.nodes().ended_revocation(&node);
        let ended = ended.map_err(|error| internal_problem(&error))?;
        let repeat = RepeatCheck {
            key,
            last_join_key: known.and_then(|known| known.join_key),
            removed_at: ended
                .filter(|end| end.removed.is_some())
                .and_then(|end| end.lifted),
        };
        Ok(Applicant {
            node,
            status,
            repeat,
        })
    }

    /// Checks that a node may take this name by a token that does not name a node. The name of a cluster node without an edge is
    /// refused, or the owner of such a token would receive that node's traffic. The token is not spent, and the reason may be
    /// temporary.
    fn check_node_name(&self, token: &JoinToken, node: &NodeName) -> Result<(), ProblemDetails> {
        // An invalid token is reported later, when it is redeemed.
        let names_one_node = |meant: NodePattern| meant.node().is_some();
        if self.tokens().nodes_of(token).map_or(true, names_one_node) {
            return Ok(());
        }
        let nodes = self.enrolment.nodes.reader();
        let mut problem = if nodes.pending_reason().is_some() {
            nodes_pending_problem()
        } else if nodes.cluster_says_edge(node) == Some(false) {
            let detail = format!(
                "the cluster's Node {node} is not an edge node: give it one of the labels in kubernetes.edge_labels, or join with a token that names it (`causeway token create --node {node}`)"
            );
            problem(StatusCode::SERVICE_UNAVAILABLE, "node_elsewhere", detail)
        } else {
            return Ok(());
        };
        problem.retry_after.get_or_insert(60);
        Err(problem)
    }

    /// Returns the token store for all trusted roots.
    fn tokens(&self) -> TokenStore {
        self.enrolment.store.tokens_of(&self.enrolment.ca.get())
    }

    /// Returns the node for which a token was made.
    fn node_of_token(&self, token: &JoinToken) -> Result<NodeName, ProblemDetails> {
        let nodes = self
            .tokens()
            .nodes_of(token)
            .map_err(|why| token_problem(&why))?;
        nodes.node().ok_or_else(|| {
            let detail =
                format!("the join token is for nodes {nodes}: set the name of the edge (node)");
            problem(StatusCode::FORBIDDEN, "node_missing", detail)
        })
    }

    /// Issues the certificate of an edge that joins. It is not admitted yet.
    fn issue(
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

    /// Admits the node, whose earlier certificates are then no longer accepted. Blocks on the disk.
    fn admit(&self, enrolled: Enrolled) -> Result<JoinResponse, ProblemDetails> {
        let Enrolled {
            issued,
            record,
            node,
        } = enrolled;
        let Enrolment { store, nodes, .. } = &self.enrolment;
        let name = record.node.clone();
        let stored = store.nodes().put(record);
        stored.map_err(|error| internal_problem(&error))?;
        nodes.upsert(name.clone(), node);
        Ok(self.join_response(name, &issued))
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

/// Stores the record of a node that joins in the shared state.
///
/// # Errors
/// If the node was new, and joins through another gateway at the same time. If the engine does not answer, the node is admitted
/// here, and the next synchronization stores its record: the token is spent.
async fn share_node(
    shared: &SharedState,
    record: &NodeRecord,
    status: NodeStatus,
) -> Result<(), ProblemDetails> {
    let node = &record.node;
    match shared.store_node(record, status).await {
        Ok(true) => Ok(()),
        Ok(false) => {
            let detail = format!("node {node} has joined through another gateway a moment ago");
            Err(problem(StatusCode::FORBIDDEN, "token_not_new", detail))
        }
        Err(error) => {
            tracing::warn!(%node, %error, "the record of node {node} has not reached the other gateways yet");
            Ok(())
        }
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
