//! Joins with tokens, in batches.
//!
//! Tokens and nodes are in one file each, which every write replaces, and the engine of the shared state answers after a round trip.
//! So joins that arrive during a batch are collected for the next one, as in `node_records`. A fleet that joins at once takes a few
//! writes, and not two of each node.
//!
//! A batch has at most one join of each node. If two edges join as the same new node, the second one sees that the node has joined.
//! A token that this gateway knows to be invalid is refused before its join waits for a batch, so it does not wait for the engine.

use super::{
    Enrolled, HandlerState, JoinResponse, internal_problem, nodes_pending_problem, problem,
    revoked_node_problem, token_problem, unavailable_problem,
};
use crate::{
    control::http::ProblemDetails,
    shared_state::{CONCURRENT_REQUESTS, RedeemError, SharedState},
    state::nodes::record_revoked,
};
use axum::http::StatusCode;
use causeway_certs::{
    Fingerprint, JoinToken, Joining, NodeName, NodePattern, NodeStatus, RepeatCheck,
    RevocationEntry, Store, StoreError, TokenRecord, TokenRejected, TokenStore, VerifiedPublicKey,
};
use rustls::pki_types::UnixTime;
use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};
use tokio::{sync::oneshot, task::spawn_blocking};
use tracing::{Span, info, warn};

/// Maximum number of joins in a batch. Each step of a batch takes one round trip of the engine: of the 256 joins that may wait,
/// the last ones are answered within the timeout of their requests, even if the engine takes 300 ms for each round trip.
const MAX_BATCH: usize = CONCURRENT_REQUESTS;

/// Request of an edge that joins with a token. The edge holds the key.
pub(super) struct JoinAttempt {
    pub(super) token: JoinToken,
    /// Name of the node as the edge knows it.
    pub(super) node: Option<NodeName>,
    pub(super) key: VerifiedPublicKey,
    pub(super) version: String,
}

/// A join that was not answered yet.
pub(super) struct PendingJoin {
    attempt: JoinAttempt,
    responder: oneshot::Sender<Result<JoinResponse, ProblemDetails>>,
}

impl PendingJoin {
    fn respond(self, result: Result<JoinResponse, ProblemDetails>) {
        // The receiver is gone if the edge has disconnected.
        let _ = self.responder.send(result);
    }

    /// Whether the edge has disconnected.
    fn is_abandoned(&self) -> bool {
        self.responder.is_closed()
    }
}

/// Tokens of the data directory as they were read last, so that many joins at once do not read the file one by one. A token only
/// becomes invalid in time, so an older copy refuses no valid token.
#[derive(Default)]
pub(super) struct KnownTokens(Mutex<Option<TokenCopy>>);

struct TokenCopy {
    /// Times of the last changes of the data directory before the file was read.
    changed: [Option<SystemTime>; 6],
    records: Arc<[TokenRecord]>,
}

impl KnownTokens {
    /// Returns the tokens of a data directory. Blocks on the disk.
    fn read(&self, store: &Store, tokens: &TokenStore) -> Result<Arc<[TokenRecord]>, StoreError> {
        let mut copy = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = store.entry_changes();
        if let Some(copy) = copy.as_ref().filter(|copy| copy.changed == changed) {
            return Ok(copy.records.clone());
        }
        let records: Arc<[TokenRecord]> = tokens.all()?.into();
        *copy = Some(TokenCopy {
            changed,
            records: records.clone(),
        });
        Ok(records)
    }
}

/// A node that joins with a token.
struct Applicant {
    join: PendingJoin,
    node: NodeName,
    status: NodeStatus,
    repeat: RepeatCheck,
}

impl From<Applicant> for PendingJoin {
    fn from(applicant: Applicant) -> Self {
        applicant.join
    }
}

impl Applicant {
    fn joining(&self) -> (&JoinToken, Joining<'_>) {
        let joining = Joining {
            node: &self.node,
            status: self.status,
            repeat: Some(self.repeat),
        };
        (&self.join.attempt.token, joining)
    }
}

/// Data of the disk on which the joins of a batch depend.
struct JoinTables {
    tokens: Vec<TokenRecord>,
    ended: BTreeMap<NodeName, RevocationEntry>,
}

impl HandlerState {
    /// Joins with the next batch. A token that is spent gets its certificate, even if the edge disconnects meanwhile.
    pub(super) async fn join_with_batch(
        self: Arc<Self>,
        attempt: JoinAttempt,
    ) -> Result<JoinResponse, ProblemDetails> {
        if self.enrolment.shared_state.is_some() {
            let (token, key) = (attempt.token.clone(), attempt.key.fingerprint());
            let check = move |state: &Self, ()| state.check_known_token(&token, key).err();
            if let Some(problem) = self.on_disk((), check).await {
                return Err(problem);
            }
        }
        let (responder, mut response) = oneshot::channel();
        self.with_pending_joins(|pending| pending.push(PendingJoin { attempt, responder }));
        let guard = tokio::select! {
            biased;
            joined = &mut response => return joined.map_err(|error| internal_problem(&error))?,
            guard = self.enrolment_lock.clone().lock_owned() => guard,
        };
        let state = self.clone();
        self.tasks.spawn(Span::current(), async move {
            let _guard = guard;
            state.process_pending_joins().await;
        });
        response.await.map_err(|error| internal_problem(&error))?
    }

    fn with_pending_joins<T>(&self, with: impl FnOnce(&mut Vec<PendingJoin>) -> T) -> T {
        let pending = self.pending_joins.lock();
        with(&mut pending.unwrap_or_else(PoisonError::into_inner))
    }

    async fn process_pending_joins(self: Arc<Self>) {
        loop {
            let joins = self.with_pending_joins(|pending| {
                pending.retain(|join| !join.is_abandoned());
                let later = pending.split_off(pending.len().min(MAX_BATCH));
                mem::replace(pending, later)
            });
            if joins.is_empty() {
                return;
            }
            self.join_all(joins).await;
        }
    }

    /// Spends the tokens, and issues the certificates of the edges that join.
    async fn join_all(self: &Arc<Self>, joins: Vec<PendingJoin>) {
        let shared = self.enrolment.shared_state.clone();
        let redeemed = match &shared {
            Some(shared) => self.redeem_at_all_gateways(shared, joins).await,
            None => self.on_disk(joins, Self::check_joins_and_redeem).await,
        };
        let enrolled = self.on_disk(redeemed, Self::issue_all).await;
        let admitted = match &shared {
            Some(shared) => share_nodes(shared, enrolled).await,
            None => enrolled,
        };
        self.on_disk(admitted, Self::admit_all).await;
    }

    /// Runs work that blocks on the disk. Returns nothing if the process ends: the responders of the joins are then dropped.
    pub(super) async fn on_disk<J: Send + 'static, T: Default + Send + 'static>(
        self: &Arc<Self>,
        joins: J,
        work: impl FnOnce(&Self, J) -> T + Send + 'static,
    ) -> T {
        let state = self.clone();
        let done = spawn_blocking(move || work(&state, joins)).await;
        done.unwrap_or_default()
    }

    /// Refuses a token without the engine of the shared state, if this gateway knows that it is not valid. Blocks on the disk.
    fn check_known_token(&self, token: &JoinToken, key: Fingerprint) -> Result<(), ProblemDetails> {
        let (store, tokens) = (&self.enrolment.store, self.tokens());
        let records = self.known_tokens.read(store, &tokens);
        let records = records.map_err(|error| internal_problem(&error))?;
        let known = TokenStore::check_known(&records, token, key, UnixTime::now());
        known.map(drop).map_err(|why| token_problem(&why))
    }

    /// Whether this gateway knows a token with this secret, valid or not. Blocks on the disk.
    pub(super) fn is_known_token(&self, token: &JoinToken) -> bool {
        let records = (self.known_tokens).read(&self.enrolment.store, &self.tokens());
        records.is_ok_and(|records| TokenStore::nodes_of(&records, token).is_ok())
    }

    fn check_joins_and_redeem(&self, joins: Vec<PendingJoin>) -> Vec<(Applicant, TokenRecord)> {
        let applicants = self.check_joins(joins);
        let uses: Vec<_> = applicants.iter().map(Applicant::joining).collect();
        match self.tokens().redeem_all(&uses, UnixTime::now()) {
            Ok(results) => {
                let results = results
                    .into_iter()
                    .map(|result| result.map_err(|why| token_problem(&why)));
                keep_accepted(applicants, results.collect())
            }
            Err(error) => refuse_all(applicants, &internal_problem(&error)),
        }
    }

    /// Spends the tokens in the shared state.
    async fn redeem_at_all_gateways(
        self: &Arc<Self>,
        shared: &SharedState,
        joins: Vec<PendingJoin>,
    ) -> Vec<(Applicant, TokenRecord)> {
        let (mut joins, unknown) = self.on_disk(joins, Self::refuse_invalid_tokens).await;
        let fetched = fetch_tokens(shared, unknown).await;
        let (fetched, unknown) = self.on_disk(fetched, Self::refuse_invalid_tokens).await;
        refuse_all::<()>(unknown, &token_problem(&TokenRejected::Unknown));
        joins.extend(fetched);
        let applicants = self.on_disk(joins, Self::check_joins).await;
        let applicants = self.fetch_new_nodes(shared, applicants).await;
        let uses: Vec<_> = applicants.iter().map(Applicant::joining).collect();
        let results = match shared.redeem_all(&self.tokens(), &uses).await {
            Ok(results) => results,
            Err(error) => return refuse_all(applicants, &unavailable_problem(&error)),
        };
        let nodes = applicants.iter().map(|applicant| &applicant.node);
        let results = results.into_iter().zip(nodes).map(|(result, node)| {
            result.map_err(|why| match why {
                RedeemError::Rejected(why) => token_problem(&why),
                RedeemError::NodeRevoked { reason } => {
                    revoked_node_problem(record_revoked(node, &reason))
                }
                RedeemError::Unavailable(why) => unavailable_problem(&why),
            })
        });
        let results = results.collect();
        keep_accepted(applicants, results)
    }

    /// Refuses tokens without the engine of the shared state, if this gateway knows that they are not valid. Returns the joins with
    /// known and with unknown tokens. Blocks on the disk.
    fn refuse_invalid_tokens(
        &self,
        joins: Vec<PendingJoin>,
    ) -> (Vec<PendingJoin>, Vec<PendingJoin>) {
        let records = match self.tokens().all() {
            Ok(records) => records,
            Err(error) => return (refuse_all(joins, &internal_problem(&error)), Vec::new()),
        };
        let (mut known, mut unknown, now) = (Vec::new(), Vec::new(), UnixTime::now());
        for join in joins {
            let JoinAttempt { token, key, .. } = &join.attempt;
            match TokenStore::check_known(&records, token, key.fingerprint(), now) {
                Ok(true) => known.push(join),
                Ok(false) => unknown.push(join),
                Err(why) => join.respond(Err(token_problem(&why))),
            }
        }
        (known, unknown)
    }

    /// Takes over the nodes that this gateway does not know, and checks these joins again.
    async fn fetch_new_nodes(
        self: &Arc<Self>,
        shared: &SharedState,
        applicants: Vec<Applicant>,
    ) -> Vec<Applicant> {
        let new = applicants
            .iter()
            .filter(|applicant| applicant.status == NodeStatus::New);
        let new: Vec<_> = new.map(|applicant| applicant.node.clone()).collect();
        let fetched = shared.fetch_nodes_now(&new).await;
        let mut failed = BTreeMap::new();
        for (node, record) in new.into_iter().zip(fetched) {
            match record {
                // A synchronization may have taken over the node meanwhile.
                Ok(record) => record.into_iter().for_each(|record| {
                    self.enrolment.record_writer.add_stored(record);
                }),
                Err(error) => drop(failed.insert(node, unavailable_problem(&error))),
            }
        }
        let results = applicants
            .iter()
            .map(|applicant| match failed.remove(&applicant.node) {
                Some(problem) => Err(problem),
                None => Ok(()),
            });
        let results = results.collect();
        let fetched = keep_accepted(applicants, results);
        let joins = fetched.into_iter().map(|(applicant, ())| applicant.join);
        self.on_disk(joins.collect(), Self::check_joins).await
    }

    /// Returns the nodes that join. Refuses joins as nodes that may not join, whose tokens are not spent. Further joins of the same
    /// node wait for the next batch. Blocks on the disk.
    fn check_joins(&self, joins: Vec<PendingJoin>) -> Vec<Applicant> {
        let tokens = self.tokens().all();
        let ended = self.enrolment.store.nodes().ended_revocations();
        let tables = match (tokens, ended) {
            (Ok(tokens), Ok(ended)) => JoinTables { tokens, ended },
            (Err(error), _) | (_, Err(error)) => {
                return refuse_all(joins, &internal_problem(&error));
            }
        };
        let (mut applicants, mut names) = (Vec::new(), BTreeSet::new());
        for join in joins {
            match self.check_join(&tables, &join.attempt) {
                Ok((node, ..)) if names.contains(&node) => {
                    self.with_pending_joins(|pending| pending.push(join));
                }
                Ok((node, status, repeat)) => {
                    names.insert(node.clone());
                    applicants.push(Applicant {
                        join,
                        node,
                        status,
                        repeat,
                    });
                }
                Err(problem) => join.respond(Err(problem)),
            }
        }
        applicants
    }

    /// Returns the node that joins.
    ///
    /// # Errors
    /// If the node may not join. The token is not spent.
    fn check_join(
        &self,
        tables: &JoinTables,
        attempt: &JoinAttempt,
    ) -> Result<(NodeName, NodeStatus, RepeatCheck), ProblemDetails> {
        let meant = TokenStore::nodes_of(&tables.tokens, &attempt.token);
        // If the edge does not name its node, the token's node name is used.
        let node = match &attempt.node {
            Some(node) => node.clone(),
            None => node_of_token(meant.as_ref().map_err(token_problem)?)?,
        };
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
        // An invalid token is reported later, when it is redeemed.
        if meant.is_ok_and(|meant| meant.node().is_none()) {
            self.check_node_name(&node)?;
        }
        let ended = tables.ended.get(&node);
        let repeat = RepeatCheck {
            key: attempt.key.fingerprint(),
            last_join_key: known.as_ref().and_then(|known| known.join_key),
            last_joined_at: known.map(|known| known.joined_at),
            removed_at: ended
                .filter(|end| end.removed.is_some())
                .and_then(|end| end.lifted),
        };
        Ok((node, status, repeat))
    }

    /// Checks that a node may take this name by a token that does not name a node. The name of a cluster node without an edge is
    /// refused, or the owner of such a token would receive that node's traffic. The token is not spent, and the reason may be
    /// temporary.
    fn check_node_name(&self, node: &NodeName) -> Result<(), ProblemDetails> {
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
    pub(super) fn tokens(&self) -> TokenStore {
        self.enrolment.store.tokens_of(&self.enrolment.ca.get())
    }

    /// Issues the certificates. The nodes are not admitted yet.
    fn issue_all(&self, redeemed: Vec<(Applicant, TokenRecord)>) -> Vec<(Applicant, Enrolled)> {
        let (applicants, records): (Vec<_>, Vec<_>) = redeemed.into_iter().unzip();
        let issue = |(applicant, record): (&Applicant, TokenRecord)| {
            let (node, attempt) = (&applicant.node, &applicant.join.attempt);
            let (token, version) = (&attempt.token.id, &attempt.version);
            info!(%node, %token, ?version, "a join token was used");
            self.issue(&attempt.key, node, record)
        };
        let issued = applicants.iter().zip(records).map(issue).collect();
        keep_accepted(applicants, issued)
    }

    /// Admits the nodes, whose earlier certificates are then no longer accepted, and answers the joins. Blocks on the disk.
    fn admit_all(&self, enrolled: Vec<(Applicant, Enrolled)>) {
        if enrolled.is_empty() {
            return;
        }
        let (applicants, enrolled): (Vec<_>, Vec<_>) = enrolled.into_iter().unzip();
        let records = enrolled.iter().map(|enrolled| enrolled.record.clone());
        if let Err(error) = self.enrolment.store.nodes().put_all(records) {
            refuse_all::<()>(applicants, &internal_problem(&error));
            return;
        }
        let nodes = enrolled.iter();
        let nodes = nodes.map(|enrolled| (enrolled.record.node.clone(), enrolled.node.clone()));
        self.enrolment.nodes.upsert_all(nodes);
        for (applicant, enrolled) in applicants.into_iter().zip(enrolled) {
            let response = self.join_response(applicant.node, &enrolled.issued);
            applicant.join.respond(Ok(response));
        }
    }
}

/// Refuses all joins for the same reason. Returns the accepted ones: none.
fn refuse_all<T>(
    joins: impl IntoIterator<Item = impl Into<PendingJoin>>,
    problem: &ProblemDetails,
) -> Vec<T> {
    for join in joins {
        join.into().respond(Err(problem.clone()));
    }
    Vec::new()
}

/// Refuses the joins whose results are errors. Returns the others with their results.
fn keep_accepted<T>(
    applicants: Vec<Applicant>,
    results: Vec<Result<T, ProblemDetails>>,
) -> Vec<(Applicant, T)> {
    let mut accepted = Vec::new();
    for (applicant, result) in applicants.into_iter().zip(results) {
        match result {
            Ok(value) => accepted.push((applicant, value)),
            Err(problem) => applicant.join.respond(Err(problem)),
        }
    }
    accepted
}

/// Takes over tokens that this gateway does not know: another gateway may have created them a moment ago.
async fn fetch_tokens(shared: &SharedState, joins: Vec<PendingJoin>) -> Vec<PendingJoin> {
    if joins.is_empty() {
        return joins;
    }
    let ids = joins.iter().map(|join| join.attempt.token.id.clone());
    let ids: BTreeSet<_> = ids.collect();
    let failed = match shared
        .fetch_tokens(ids.iter().map(String::as_str).collect())
        .await
    {
        Ok(failed) => failed,
        Err(error) => return refuse_all(joins, &unavailable_problem(&error)),
    };
    let mut fetched = Vec::new();
    for join in joins {
        match failed.get(join.attempt.token.id.as_str()) {
            Some(error) => join.respond(Err(unavailable_problem(error))),
            None => fetched.push(join),
        }
    }
    fetched
}

/// Stores the records of nodes that join in the shared state. Refuses a node that was new, and has joined through another gateway at
/// the same time. If the engine does not answer, the node is admitted here, and the next synchronization stores its record: the
/// token is spent.
async fn share_nodes(
    shared: &SharedState,
    enrolled: Vec<(Applicant, Enrolled)>,
) -> Vec<(Applicant, Enrolled)> {
    let records = enrolled
        .iter()
        .map(|(applicant, enrolled)| (&enrolled.record, applicant.status));
    let stored = match shared.store_nodes(&records.collect::<Vec<_>>()).await {
        Ok(stored) => stored,
        Err(error) => {
            let applicants = enrolled.into_iter().map(|(applicant, _)| applicant);
            return refuse_all(applicants, &internal_problem(&error));
        }
    };
    let mut shared_nodes = Vec::new();
    for ((applicant, enrolled), stored) in enrolled.into_iter().zip(stored) {
        let node = &applicant.node;
        match stored {
            Ok(true) => {}
            Ok(false) => {
                let detail = format!("node {node} has joined through another gateway a moment ago");
                let problem = problem(StatusCode::FORBIDDEN, "token_not_new", detail);
                applicant.join.respond(Err(problem));
                continue;
            }
            Err(error) => {
                warn!(%node, %error, "the record of node {node} has not reached the other gateways yet");
            }
        }
        shared_nodes.push((applicant, enrolled));
    }
    shared_nodes
}

/// Returns the node for which a token was made.
fn node_of_token(meant: &NodePattern) -> Result<NodeName, ProblemDetails> {
    meant.node().ok_or_else(|| {
        let detail =
            format!("the join token is for nodes {meant}: set the name of the edge (node)");
        problem(StatusCode::FORBIDDEN, "node_missing", detail)
    })
}
