//! Enrolment and renewal: issues an edge's certificate for a join token, its previous certificate, or a certificate of its
//! cluster.
//!
//! `join` processes the requests with tokens in batches, so that a fleet that joins at once takes a few writes.
//!
//! The edge's request proves possession of its key. This is checked first, so that a bad request does not use up a token. The
//! node name comes from the token or from the presented certificate, never from the request. A token is spent on disk before the
//! certificate is sent. Every refusal has one word for the edge, which decides whether to retry, and a sentence for its operator.

mod issue;
mod join;
mod rate_limit;

#[cfg(test)]
mod tests;

use crate::{
    audit,
    control::{
        eligibility::rejection_reason,
        http::{Peer, ProblemDetails},
        node_records::NodeRecordWriter,
    },
    metrics::Metrics,
    shared_state::{SharedState, SyncError},
    state::{AdvertisedGateways, Node, NodesWriter, registry::EdgeCertificate},
};
use axum::{
    Extension, Json, Router,
    body::Bytes,
    extract::{FromRequest, Request, State, rejection::JsonRejection},
    http::StatusCode,
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
    routing::post,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use causeway_certs::{
    Identity, IssuedCertificate, JoinToken, LiveCa, NodeName, NodeRecord, Store, StoreError,
    TokenRejected, VerifiedPublicKey,
};
use causeway_rt::{connection_limit::ConnectionLimit, task::TaskGroup};
use join::{JoinAttempt, KnownTokens, PendingJoin};
use rate_limit::JoinRateLimiter;
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, net::IpAddr, sync::Arc, time::Duration};
use tokio::{sync::Mutex, time::timeout};
use tower_http::{limit::RequestBodyLimitLayer, timeout::TimeoutLayer, trace::TraceLayer};
use tracing::{error, info, warn};

/// Maximum size of a body: a request for an RSA-8192 key takes 5 KiB in base64.
const MAX_BODY: usize = 16 * 1024;
/// Maximum number of concurrent requests without a certificate: 4 MiB in total. Further ones wait for a permit.
const MAX_UNAUTHENTICATED: usize = 256;
/// Timeout of a request, which needs a signature and a few writes to the disk, and up to eight answers of the shared state, one after
/// the other. An edge waits for 30 s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(25);

/// Timeout of the body of a request. Without it, strangers who send no body would keep their permits until the timeout of the request,
/// and so keep edges out that join.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// State of the enrolment service.
#[derive(Debug)]
pub struct Enrolment {
    /// The CA that signs.
    pub ca: LiveCa,
    /// Store of tokens and enrolled nodes.
    pub store: Store,
    /// Table to which enrolled nodes are added.
    pub nodes: NodesWriter,
    /// State that gateways share, in which tokens are spent.
    pub shared_state: Option<SharedState>,
    /// Writer of renewals.
    pub record_writer: NodeRecordWriter,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Lifetime of an edge's certificate.
    pub lifetime: Duration,
    /// The addresses that are announced to edges.
    pub advertised: AdvertisedGateways,
    /// Whether edges may join by their identity in the cluster, here or at another gateway of this CA.
    pub accepts_cluster_identity: bool,
    /// Whether edges may join by a certificate that one of the cluster's signers issued.
    pub accepts_cluster_certificates: bool,
}

/// Request of an edge that joins.
#[derive(Debug, Deserialize)]
struct JoinRequest {
    token: String,
    /// PKCS #10 in DER, as base64.
    csr: String,
    #[serde(default)]
    version: String,
    /// Name of the node as the edge knows it.
    #[serde(default)]
    node: Option<String>,
}

/// Request of an edge whose certificate expires.
#[derive(Debug, Deserialize)]
struct RenewRequest {
    csr: String,
    #[serde(default)]
    version: String,
}

/// Data that an edge needs to open a tunnel.
#[derive(Debug, Serialize)]
struct JoinResponse {
    certificate: String,
    root: String,
    trust_domain: String,
    node: NodeName,
    gateways: Vec<String>,
}

/// Certificate of an edge that joins, with the records of its node on the disk and in the table.
struct Enrolled {
    issued: IssuedCertificate,
    record: NodeRecord,
    node: Node,
}

/// State that requests share.
struct HandlerState {
    enrolment: Enrolment,
    /// Joins that wait for the next batch.
    pending_joins: std::sync::Mutex<Vec<PendingJoin>>,
    /// Locked while batches of joins are processed.
    enrolment_lock: Arc<Mutex<()>>,
    /// Batches of joins.
    tasks: TaskGroup,
    rate_limiter: JoinRateLimiter,
    known_tokens: KnownTokens,
}

/// Returns the routes for edges' own requests: `POST /v1/enrol`, `POST /v1/vouched` and `POST /v1/renew`.
pub fn router(enrolment: Enrolment) -> Router {
    let state = HandlerState {
        enrolment,
        pending_joins: std::sync::Mutex::default(),
        enrolment_lock: Arc::default(),
        tasks: TaskGroup::default(),
        rate_limiter: JoinRateLimiter::default(),
        known_tokens: KnownTokens::default(),
    };
    let routes = Router::new()
        .route("/v1/enrol", post(enrol))
        .route("/v1/vouched", post(vouched))
        .route("/v1/renew", post(renew));
    with_common_layers(routes).with_state(Arc::new(state))
}

/// Returns the same routes for edges with certificates of an external CA: each request is refused with the reason.
pub fn disabled_router(metrics: Arc<Metrics>) -> Router {
    // The body is read to its end: over HTTP/2 a reset of an unread body could arrive before the answer.
    let refuse_request = move |Extension(peer): Extension<Peer>, _: Bytes| async move {
        let problem = problem(
            StatusCode::NOT_IMPLEMENTED,
            "certificates_given",
            "this gateway issues no certificates: edges use certificates of an external CA (identity)",
        );
        report(&metrics, "enrol", &peer, Err(problem))
    };
    with_common_layers(
        Router::new()
            .route("/v1/enrol", post(refuse_request.clone()))
            .route("/v1/vouched", post(refuse_request.clone()))
            .route("/v1/renew", post(refuse_request)),
    )
}

fn with_common_layers<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    let concurrency_limit = ConnectionLimit::new("joining", MAX_UNAUTHENTICATED, drop);
    let limit_concurrency =
        move |Extension(peer): Extension<Peer>, request: Request, next: Next| {
            let room = concurrency_limit.clone();
            async move {
                let address = peer.address.filter(|_| peer.identity.is_none());
                let _slot = match address {
                    Some(address) => Some(room.acquire(address).await),
                    None => None,
                };
                match read_body(request).await {
                    Ok(request) => next.run(request).await,
                    Err(rejection) => rejection,
                }
            }
        };
    router
        .layer(from_fn(limit_concurrency))
        .layer(RequestBodyLimitLayer::new(MAX_BODY))
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            REQUEST_TIMEOUT,
        ))
        .layer(TraceLayer::new_for_http())
}

/// Reads the body of a request within its timeout.
async fn read_body(request: Request) -> Result<Request, Response> {
    let (head, body) = request.into_parts();
    match timeout(BODY_TIMEOUT, Bytes::from_request(Request::new(body), &())).await {
        Ok(Ok(body)) => Ok(Request::from_parts(head, body.into())),
        Ok(Err(rejection)) => Err(rejection.into_response()),
        Err(_) => {
            let detail = format!("the body did not arrive within {BODY_TIMEOUT:?}");
            // An edge does not repeat a request after a status of 4xx.
            let problem = problem(StatusCode::GATEWAY_TIMEOUT, "body_timeout", detail);
            Err(problem.into_response())
        }
    }
}

async fn enrol(
    State(state): State<Arc<HandlerState>>,
    Extension(peer): Extension<Peer>,
    body: Result<Json<JoinRequest>, JsonRejection>,
) -> Result<Json<JoinResponse>, ProblemDetails> {
    let result = match body {
        Ok(Json(join)) => state.clone().enrol(&peer, join).await,
        Err(rejection) => Err(malformed_request_problem(&rejection)),
    };
    report(&state.enrolment.metrics, "enrol", &peer, result)
}

async fn renew(
    State(state): State<Arc<HandlerState>>,
    Extension(peer): Extension<Peer>,
    body: Result<Json<RenewRequest>, JsonRejection>,
) -> Result<Json<JoinResponse>, ProblemDetails> {
    let result = match body {
        Ok(Json(renew)) => state.clone().renew(&peer, renew).await,
        Err(rejection) => Err(malformed_request_problem(&rejection)),
    };
    report(&state.enrolment.metrics, "renew", &peer, result)
}

async fn vouched(
    State(state): State<Arc<HandlerState>>,
    Extension(peer): Extension<Peer>,
    body: Result<Json<RenewRequest>, JsonRejection>,
) -> Result<Json<JoinResponse>, ProblemDetails> {
    let result = match body {
        Ok(Json(asked)) => state.clone().exchange_certificate(&peer, asked).await,
        Err(rejection) => Err(malformed_request_problem(&rejection)),
    };
    report(&state.enrolment.metrics, "vouched", &peer, result)
}

impl HandlerState {
    async fn enrol(
        self: Arc<Self>,
        peer: &Peer,
        join: JoinRequest,
    ) -> Result<JoinResponse, ProblemDetails> {
        let parsed = JoinToken::parse(&join.token).ok();
        let token_id = parsed.as_ref().map(|token| token.id.clone());
        let token_id = token_id.unwrap_or_default();
        let wait = match peer.address {
            Some(address) => self.retry_join_after(address, parsed).await,
            None => None,
        };
        if let Some(wait) = wait {
            let mut problem = problem(
                StatusCode::TOO_MANY_REQUESTS,
                "too_many_attempts",
                "too many join requests from this address, or with this token, were refused",
            );
            problem.retry_after = Some(wait);
            return Err(problem);
        }
        let (limiter, address, presented) = (self.clone(), peer.address, join.token.clone());
        let enrolled = self.enrol_once(join).await;
        if let (Err(problem), Some(address)) = (&enrolled, address)
            && problem.status.is_client_error()
        {
            match problem.reason {
                // Only somebody who has the secret of the token receives these reasons.
                "token_used" | "token_expired" | "token_revoked" => {
                    limiter
                        .rate_limiter
                        .record_invalid_token(address, &token_id);
                }
                _ => limiter.rate_limiter.record_failure(address, &presented),
            }
        }
        enrolled
    }

    /// Returns the number of seconds until a join from this address with this token may be tried again, if it is limited now.
    async fn retry_join_after(
        self: &Arc<Self>,
        address: IpAddr,
        token: Option<JoinToken>,
    ) -> Option<u16> {
        let token_id = token.as_ref().map_or("", |token| &token.id);
        let wait = self.rate_limiter.retry_token_after(address, token_id);
        if wait.is_some() {
            return wait;
        }
        let wait = self.rate_limiter.retry_after(address)?;
        let Some(token) = token else {
            return Some(wait);
        };
        let is_known = move |state: &Self, ()| state.is_known_token(&token);
        (!self.on_disk((), is_known).await).then_some(wait)
    }

    async fn enrol_once(
        self: Arc<Self>,
        join: JoinRequest,
    ) -> Result<JoinResponse, ProblemDetails> {
        let verify_csr = verify_csr(&join.csr)?;
        let token = JoinToken::parse(&join.token).map_err(|error| {
            problem(
                StatusCode::BAD_REQUEST,
                "token_malformed",
                error.to_string(),
            )
        })?;
        let node = join
            .node
            .as_deref()
            .map(NodeName::parse)
            .transpose()
            .map_err(|error| {
                problem(StatusCode::BAD_REQUEST, "node_malformed", error.to_string())
            })?;
        let checked = self.tokens().check_root(&token);
        checked.map_err(|why| token_problem(&why))?;
        self.join_with_batch(JoinAttempt {
            token,
            node,
            key: verify_csr,
            version: join.version,
        })
        .await
    }

    async fn renew(
        self: Arc<Self>,
        peer: &Peer,
        renew: RenewRequest,
    ) -> Result<JoinResponse, ProblemDetails> {
        let Some(Identity::Edge(node)) = peer.identity.clone() else {
            return Err(problem(
                StatusCode::UNAUTHORIZED,
                "certificate_missing",
                "renewal requires the edge's certificate; an edge without one must join with a token",
            ));
        };
        let key = verify_csr(&renew.csr)?;
        let nodes = self.enrolment.nodes.reader();
        let certificate = EdgeCertificate {
            issued_at: peer.issued_at,
            root: peer.root,
            ..EdgeCertificate::default()
        };
        self.check_nodes_loaded(&node)?;
        if nodes.get(&node).is_none() {
            self.fetch_node(&node).await?;
        }
        if nodes.get(&node).is_none() {
            return Err(unknown_node_problem(&node));
        }
        if let Some(reason) = nodes.revocation_reason(&node) {
            return Err(revoked_node_problem(reason));
        }
        if let Some(why) = rejection_reason(&nodes, &node, &certificate) {
            return Err(problem(StatusCode::FORBIDDEN, "certificate_replaced", why));
        }
        let version = renew.version;
        info!(%node, ?version, "a certificate is renewed");
        self.reissue(key, node, certificate).await
    }
}

/// Counts and logs the result of a request.
fn report(
    metrics: &Metrics,
    operation: &'static str,
    peer: &Peer,
    result: Result<JoinResponse, ProblemDetails>,
) -> Result<Json<JoinResponse>, ProblemDetails> {
    let outcome = result
        .as_ref()
        .map_or_else(|problem| problem.reason, |_| "ok");
    metrics.count_enrolment(operation, outcome);
    let from = peer.address.map(tracing::field::display);
    match result {
        Ok(enrolled) => {
            info!(node = %enrolled.node, from, operation, "issued an edge's certificate");
            Ok(Json(enrolled))
        }
        Err(problem) => {
            let (reason, detail) = (problem.reason, &problem.detail);
            warn!(
                from,
                operation,
                reason,
                ?detail,
                "refused an edge's certificate"
            );
            let vouched = peer.cluster_certificate.as_ref();
            let edge = peer.identity.as_ref().map(ToString::to_string);
            let edge = edge.or_else(|| vouched.map(|vouched| vouched.node.to_string()));
            let from = peer.address.map(|address| address.to_string());
            audit::log_rejected_edge(
                edge.as_deref().unwrap_or("(unknown)"),
                &from.unwrap_or_default(),
                reason,
                detail,
            );
            Err(problem)
        }
    }
}

fn verify_csr(csr: &str) -> Result<VerifiedPublicKey, ProblemDetails> {
    let csr_invalid = |detail| problem(StatusCode::BAD_REQUEST, "csr_invalid", detail);
    let der = STANDARD
        .decode(csr)
        .map_err(|error| csr_invalid(format!("the certificate request is not base64: {error}")))?;
    VerifiedPublicKey::verify(&der).map_err(|error| csr_invalid(error.to_string()))
}

fn problem(
    status: StatusCode,
    reason: &'static str,
    detail: impl Into<Cow<'static, str>>,
) -> ProblemDetails {
    ProblemDetails::new(status, reason, detail)
}

fn token_problem(why: &TokenRejected) -> ProblemDetails {
    let (status, reason) = match why {
        TokenRejected::Unknown => (StatusCode::FORBIDDEN, "token_unknown"),
        TokenRejected::Expired { .. } => (StatusCode::FORBIDDEN, "token_expired"),
        TokenRejected::Used { .. } => (StatusCode::FORBIDDEN, "token_used"),
        TokenRejected::Revoked { .. } => (StatusCode::FORBIDDEN, "token_revoked"),
        TokenRejected::NotNew { .. } => (StatusCode::FORBIDDEN, "token_not_new"),
        TokenRejected::OtherNode { .. } => (StatusCode::FORBIDDEN, "token_other_node"),
        TokenRejected::UnexpectedCa => (StatusCode::FORBIDDEN, "token_wrong_ca"),
        TokenRejected::Store(error) => return internal_problem(error),
    };
    problem(status, reason, why.to_string())
}

fn unknown_node_problem(node: &NodeName) -> ProblemDetails {
    let detail = format!("node {node} is not enrolled at this gateway (or was removed)");
    problem(StatusCode::FORBIDDEN, "node_unknown", detail)
}

fn revoked_node_problem(why: String) -> ProblemDetails {
    problem(StatusCode::FORBIDDEN, "node_revoked", why)
}

fn malformed_request_problem(rejection: &JsonRejection) -> ProblemDetails {
    let detail: Cow<'static, str> = match rejection {
        // The text of this error quotes the body, which may contain a token.
        JsonRejection::JsonDataError(_) => "the body is not the expected JSON object".into(),
        other => other.body_text().into(),
    };
    problem(rejection.status(), "request_malformed", detail)
}

/// Returns the error for a decision that needs the shared state, while its engine does not answer. The edge retries.
fn unavailable_problem(why: &SyncError) -> ProblemDetails {
    error!(%why, "cannot issue an edge's certificate");
    let detail = match why {
        // The log has the cause, which may quote the entry.
        SyncError::Store(StoreError::Entry { key, .. }) => Cow::from(format!(
            "the gateway cannot decide this now, because the entry {key} of the shared state of the gateways cannot be parsed; see the log of the gateway"
        )),
        _ => "the gateway cannot decide this now, because the shared state of the gateways cannot be reached; try again later".into(),
    };
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let mut problem = problem(status, "state_unavailable", detail);
    problem.retry_after = Some(10);
    problem
}

/// Returns the error for an internal failure. The log contains the cause; the edge only receives that it may retry.
fn internal_problem(why: &dyn std::error::Error) -> ProblemDetails {
    error!(%why, "cannot issue an edge's certificate");
    let mut problem = problem(
        StatusCode::INTERNAL_SERVER_ERROR,
        "gateway_failed",
        "the gateway could not issue the certificate; see its log for the cause",
    );
    problem.retry_after = Some(10);
    problem
}

/// Returns the error for requests before the nodes of the cluster are loaded.
fn nodes_pending_problem() -> ProblemDetails {
    let detail = "this gateway has not received the nodes of the cluster yet; try again later";
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let mut problem = problem(status, "nodes_unknown", detail);
    problem.retry_after = Some(5);
    problem
}
