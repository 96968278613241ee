//! Joining and renewing: an edge's certificate for a token, or for its certificate before.
//!
//! The edge's request proves that it holds its key; that is checked first, so that a bad request does not
//! burn a token. The name comes from the token or from the certificate shown, never from the
//! request. A token is spent on disk before the certificate leaves. Every refusal has one word for
//! the edge (it decides whether to try again) and a sentence for its operator.

mod strangers;

#[cfg(test)]
mod tests;

use crate::{
    control::http::{Peer, Problem},
    metrics::Metrics,
    state::{Node, NodesWriter},
};
use axum::{
    Extension, Json, Router,
    extract::{State, rejection::JsonRejection},
    http::StatusCode,
    routing::post,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use causeway_certs::{
    Ca, CsrKey, Identity, JoinToken, NodeName, NodeRecord, Store, StoreError, TokenBook,
    TokenRecord, TokenRefused,
};
use rustls::pki_types::UnixTime;
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, fmt::Write, sync::Arc, time::Duration};
use strangers::Strangers;
use tokio::task::spawn_blocking;
use tower_http::{limit::RequestBodyLimitLayer, timeout::TimeoutLayer, trace::TraceLayer};
use tracing::{error, info, warn};

/// Largest body: a request for an RSA-8192 key takes 5 KiB in base64.
const MAX_BODY: usize = 64 * 1024;
/// A request needs a signature and a few writes to the disk.
const WITHIN: Duration = Duration::from_secs(10);

/// What issues edges' certificates.
#[derive(Debug)]
pub struct Enrolment {
    /// Who signs.
    pub ca: Arc<Ca>,
    /// Where tokens and enrolled nodes are kept.
    pub store: Store,
    /// The nodes that are welcome from now on.
    pub nodes: NodesWriter,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Life of an edge's certificate.
    pub lifetime: Duration,
    /// The addresses that edges are told.
    pub gateways: Vec<String>,
}

/// An edge that joins.
#[derive(Debug, Deserialize)]
struct Join {
    token: String,
    /// PKCS #10 in DER, as base64.
    csr: String,
    #[serde(default)]
    version: String,
    /// Who the edge believes it is.
    #[serde(default)]
    node: Option<String>,
}

/// An edge whose certificate ends.
#[derive(Debug, Deserialize)]
struct Renew {
    csr: String,
    #[serde(default)]
    version: String,
}

/// What an edge needs to dial a tunnel.
#[derive(Debug, Serialize)]
struct Enrolled {
    certificate: String,
    root: String,
    trust_domain: String,
    node: NodeName,
    gateways: Vec<String>,
}

/// What requests share.
struct Desk {
    enrolment: Enrolment,
    tokens: TokenBook,
    strangers: Strangers,
}

/// The edges' own requests: `POST /v1/enrol` and `POST /v1/renew`.
///
/// # Errors
/// If the data directory holds no CA.
pub fn router(enrolment: Enrolment) -> Result<Router, StoreError> {
    let desk = Desk {
        tokens: enrolment.store.tokens()?,
        enrolment,
        strangers: Strangers::default(),
    };
    Ok(Router::new()
        .route("/v1/enrol", post(enrol))
        .route("/v1/renew", post(renew))
        .layer(RequestBodyLimitLayer::new(MAX_BODY))
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            WITHIN,
        ))
        .layer(TraceLayer::new_for_http())
        .with_state(Arc::new(desk)))
}

async fn enrol(
    State(desk): State<Arc<Desk>>,
    Extension(peer): Extension<Peer>,
    body: Result<Json<Join>, JsonRejection>,
) -> Result<Json<Enrolled>, Problem> {
    let done = match body {
        Ok(Json(join)) => desk.clone().enrol(&peer, join).await,
        Err(rejection) => Err(unreadable(&rejection)),
    };
    desk.report("enrol", &peer, done)
}

async fn renew(
    State(desk): State<Arc<Desk>>,
    Extension(peer): Extension<Peer>,
    body: Result<Json<Renew>, JsonRejection>,
) -> Result<Json<Enrolled>, Problem> {
    let done = match body {
        Ok(Json(renew)) => desk.clone().renew(&peer, renew).await,
        Err(rejection) => Err(unreadable(&rejection)),
    };
    desk.report("renew", &peer, done)
}

impl Desk {
    async fn enrol(self: Arc<Self>, peer: &Peer, join: Join) -> Result<Enrolled, Problem> {
        if let Some(wait) = peer
            .address
            .and_then(|address| self.strangers.wait(address))
        {
            let mut problem = refuse(
                StatusCode::TOO_MANY_REQUESTS,
                "too_many_attempts",
                "too many wrong join tokens came from this address",
            );
            problem.retry_after = Some(wait);
            return Err(problem);
        }
        let key = key(&join.csr)?;
        let token = JoinToken::parse(&join.token).map_err(|error| {
            refuse(
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
                refuse(StatusCode::BAD_REQUEST, "node_malformed", error.to_string())
            })?;
        let (desk, address, version) = (self.clone(), peer.address, join.version);
        let enrolled = spawn_blocking(move || {
            let record = desk.redeem(&token, node)?;
            info!(node = %record.node, token = %token.id, ?version, "a join token is spent");
            desk.issue(&key, record)
        });
        let enrolled = enrolled.await.map_err(|error| broken(&error))?;
        if let (Err(problem), Some(address)) = (&enrolled, address)
            && problem.reason == "token_unknown"
        {
            self.strangers.failed(address);
        }
        enrolled
    }

    async fn renew(self: Arc<Self>, peer: &Peer, renew: Renew) -> Result<Enrolled, Problem> {
        let Some(Identity::Edge(node)) = peer.identity.clone() else {
            return Err(refuse(
                StatusCode::UNAUTHORIZED,
                "certificate_missing",
                "renewing needs the edge's certificate; without one, join with a token",
            ));
        };
        let key = key(&renew.csr)?;
        let known = self.enrolment.nodes.reader().get(&node);
        let Some(known) = known else {
            return Err(refuse(
                StatusCode::FORBIDDEN,
                "node_unknown",
                format!("node {node} is not enrolled at this gateway (or was removed)"),
            ));
        };
        let version = renew.version;
        let renewed = spawn_blocking(move || {
            info!(%node, ?version, "a certificate is renewed");
            self.reissue(&key, node, known)
        });
        renewed.await.map_err(|error| broken(&error))?
    }

    /// Spends the token. Blocks on the disk.
    fn redeem(&self, token: &JoinToken, node: Option<NodeName>) -> Result<TokenRecord, Problem> {
        // An edge that does not say who it is becomes who the token says.
        let node = node.map_or_else(|| self.meant(token), Ok)?;
        let redeemed = self.tokens.redeem(token, &node, UnixTime::now());
        redeemed.map_err(|why| refused(&why))
    }

    /// The node for which a token was made.
    fn meant(&self, token: &JoinToken) -> Result<NodeName, Problem> {
        let tokens = self.tokens.all().map_err(|error| broken(&error))?;
        let record = tokens.into_iter().find(|record| record.id == token.id);
        let unknown = || refused(&TokenRefused::Unknown);
        record.map(|record| record.node).ok_or_else(unknown)
    }

    /// The certificate of an edge that joins. Blocks on the disk.
    fn issue(&self, key: &CsrKey, record: TokenRecord) -> Result<Enrolled, Problem> {
        let TokenRecord {
            node,
            addresses,
            pool,
            labels,
            ..
        } = record;
        let known = self.enrolment.nodes.reader().get(&node).unwrap_or_default();
        let confirmed = Node {
            addresses,
            pool,
            labels,
            ..known
        };
        self.sign(key, node, confirmed, UnixTime::now().as_secs())
    }

    /// The next certificate of an enrolled edge. Blocks on the disk.
    fn reissue(&self, key: &CsrKey, node: NodeName, known: Node) -> Result<Enrolled, Problem> {
        let records = self
            .enrolment
            .store
            .nodes()
            .all()
            .map_err(|error| broken(&error))?;
        let before = records.into_iter().find(|record| record.node == node);
        let enrolled_at = before.map_or_else(|| UnixTime::now().as_secs(), |old| old.enrolled_at);
        self.sign(key, node, known, enrolled_at)
    }

    fn sign(
        &self,
        key: &CsrKey,
        node: NodeName,
        confirmed: Node,
        enrolled_at: u64,
    ) -> Result<Enrolled, Problem> {
        let Enrolment {
            ca,
            store,
            nodes,
            lifetime,
            gateways,
            ..
        } = &self.enrolment;
        let issued = ca
            .issue_edge(key, &node, *lifetime)
            .map_err(|error| broken(&error))?;
        let record = NodeRecord {
            node: node.clone(),
            addresses: confirmed.addresses.clone(),
            pool: confirmed.pool.clone(),
            labels: confirmed.labels.clone(),
            enrolled_at,
            serial: hex(&issued.serial),
        };
        store.nodes().put(record).map_err(|error| broken(&error))?;
        nodes.put(node.clone(), confirmed);
        Ok(Enrolled {
            certificate: issued.pem(),
            root: ca.root_pem(),
            trust_domain: ca.trust_domain().to_string(),
            node,
            gateways: gateways.clone(),
        })
    }

    /// Counts and logs how it ended.
    fn report(
        &self,
        operation: &'static str,
        peer: &Peer,
        done: Result<Enrolled, Problem>,
    ) -> Result<Json<Enrolled>, Problem> {
        let outcome = done
            .as_ref()
            .map_or_else(|problem| problem.reason, |_| "ok");
        self.enrolment.metrics.enrolment(operation, outcome);
        let from = peer.address.map(tracing::field::display);
        match done {
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
                Err(problem)
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // A String takes all that is written.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn key(csr: &str) -> Result<CsrKey, Problem> {
    let invalid = |detail| refuse(StatusCode::BAD_REQUEST, "csr_invalid", detail);
    let der = STANDARD
        .decode(csr)
        .map_err(|error| invalid(format!("the certificate request is not base64: {error}")))?;
    CsrKey::verify(&der).map_err(|error| invalid(error.to_string()))
}

fn refuse(
    status: StatusCode,
    reason: &'static str,
    detail: impl Into<Cow<'static, str>>,
) -> Problem {
    Problem::new(status, reason, detail)
}

fn refused(why: &TokenRefused) -> Problem {
    let (status, reason) = match why {
        TokenRefused::Unknown => (StatusCode::FORBIDDEN, "token_unknown"),
        TokenRefused::Expired { .. } => (StatusCode::FORBIDDEN, "token_expired"),
        TokenRefused::Used { .. } => (StatusCode::FORBIDDEN, "token_used"),
        TokenRefused::OtherNode { .. } => (StatusCode::FORBIDDEN, "token_other_node"),
        TokenRefused::WrongCa => (StatusCode::FORBIDDEN, "token_wrong_ca"),
        TokenRefused::Store(error) => return broken(error),
    };
    refuse(status, reason, why.to_string())
}

fn unreadable(rejection: &JsonRejection) -> Problem {
    let detail: Cow<'static, str> = match rejection {
        // Its words quote what was sent, which may be a token.
        JsonRejection::JsonDataError(_) => {
            "the body is not the JSON object that is expected here".into()
        }
        other => other.body_text().into(),
    };
    refuse(rejection.status(), "request_malformed", detail)
}

/// The gateway's own fault: its log says which, the edge only that it may try again.
fn broken(why: &dyn std::error::Error) -> Problem {
    error!(%why, "cannot issue an edge's certificate");
    let mut problem = refuse(
        StatusCode::INTERNAL_SERVER_ERROR,
        "gateway_failed",
        "the gateway could not issue the certificate; its log says why",
    );
    problem.retry_after = Some(10);
    problem
}
