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
    audit,
    control::{
        expel::{retired, unwelcome},
        http::{Peer, Problem},
    },
    metrics::Metrics,
    state::{Advertised, Node, NodesWriter},
};
use axum::{
    Extension, Json, Router,
    extract::{State, rejection::JsonRejection},
    http::StatusCode,
    routing::post,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use causeway_certs::{
    CsrKey, Fingerprint, Identity, Issued, JoinToken, LiveCa, NodeName, NodeRecord, Standing,
    Store, TokenBook, TokenRecord, TokenRefused,
};
use rustls::pki_types::UnixTime;
use serde::{Deserialize, Serialize};
use std::{
    borrow::Cow,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
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
    pub ca: LiveCa,
    /// Where tokens and enrolled nodes are kept.
    pub store: Store,
    /// The nodes that are welcome from now on.
    pub nodes: NodesWriter,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Life of an edge's certificate.
    pub lifetime: Duration,
    /// The addresses that edges are told.
    pub advertised: Advertised,
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
    /// One joins after the other.
    joining: Mutex<()>,
    strangers: Strangers,
}

/// The edges' own requests: `POST /v1/enrol` and `POST /v1/renew`.
pub fn router(enrolment: Enrolment) -> Router {
    let desk = Desk {
        enrolment,
        joining: Mutex::default(),
        strangers: Strangers::default(),
    };
    Router::new()
        .route("/v1/enrol", post(enrol))
        .route("/v1/renew", post(renew))
        .layer(RequestBodyLimitLayer::new(MAX_BODY))
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            WITHIN,
        ))
        .layer(TraceLayer::new_for_http())
        .with_state(Arc::new(desk))
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
            // Of two that would be one new node, the second finds it joined.
            let _turn = desk.joining.lock().unwrap_or_else(PoisonError::into_inner);
            let (node, record) = desk.redeem(&token, node)?;
            info!(%node, token = %token.id, ?version, "a join token is spent");
            desk.issue(&key, node, record)
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
        let nodes = self.enrolment.nodes.reader();
        match (nodes.get(&node), unwelcome(&nodes, &node, peer.issued)) {
            (None, _) => return Err(unknown(&node)),
            (
                Some(Node {
                    revoked: Some(why), ..
                }),
                _,
            ) => return Err(revoked(&node, &why)),
            (Some(_), Some(why)) => {
                return Err(refuse(StatusCode::FORBIDDEN, "certificate_replaced", why));
            }
            (Some(_), None) => {}
        }
        let root = peer.root;
        let version = renew.version;
        let renewed = spawn_blocking(move || {
            info!(%node, ?version, "a certificate is renewed");
            self.reissue(&key, node, root)
        });
        renewed.await.map_err(|error| broken(&error))?
    }

    /// Spends the token. Blocks on the disk.
    fn redeem(
        &self,
        token: &JoinToken,
        node: Option<NodeName>,
    ) -> Result<(NodeName, TokenRecord), Problem> {
        // An edge that does not say who it is becomes who the token says.
        let node = node.map_or_else(|| self.meant(token), Ok)?;
        let known = self.enrolment.nodes.reader().get(&node);
        let standing = match &known {
            Some(_) => Standing::Known,
            None => Standing::New,
        };
        if let Some(reason) = known.and_then(|known| known.revoked) {
            return Err(revoked(&node, &reason));
        }
        let redeemed = self
            .tokens()
            .redeem(token, (&node, standing), UnixTime::now());
        let record = redeemed.map_err(|why| refused(&why))?;
        Ok((node, record))
    }

    /// Tokens of all roots that are trusted.
    fn tokens(&self) -> TokenBook {
        self.enrolment.store.tokens_of(&self.enrolment.ca.get())
    }

    /// The node for which a token was made.
    fn meant(&self, token: &JoinToken) -> Result<NodeName, Problem> {
        let nodes = self.tokens().meant(token).map_err(|why| refused(&why))?;
        nodes.node().ok_or_else(|| {
            let detail = format!(
                "the join token is for nodes {nodes}: the edge has to say which it is (node)"
            );
            refuse(StatusCode::FORBIDDEN, "node_missing", detail)
        })
    }

    /// The certificate of an edge that joins. Blocks on the disk.
    fn issue(
        &self,
        key: &CsrKey,
        node: NodeName,
        record: TokenRecord,
    ) -> Result<Enrolled, Problem> {
        let TokenRecord {
            addresses,
            pool,
            labels,
            ..
        } = record;
        let now = UnixTime::now().as_secs();
        let known = self.enrolment.nodes.reader().get(&node).unwrap_or_default();
        let confirmed = Node {
            addresses,
            pool,
            labels,
            joined_at: now,
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
            // What was noted of that stays.
            revoked: None,
        };
        let Enrolment { store, nodes, .. } = &self.enrolment;
        store.nodes().put(record).map_err(|error| broken(&error))?;
        nodes.put(node.clone(), confirmed);
        Ok(self.granted(node, &issued))
    }

    /// The next certificate of an enrolled edge. Blocks on the disk, which has the last word: a node that is removed
    /// or revoked meanwhile stays so.
    fn reissue(
        &self,
        key: &CsrKey,
        node: NodeName,
        root: Option<Fingerprint>,
    ) -> Result<Enrolled, Problem> {
        // The connection may be older than the end of the root by which it was let in.
        if let Some(why) = retired(&self.enrolment.ca.get(), &node, root) {
            return Err(refuse(StatusCode::FORBIDDEN, "certificate_replaced", why));
        }
        let issued = self.sign(key, &node)?;
        let nodes = self.enrolment.store.nodes();
        let noted = nodes.renewed(&node, &issued);
        match noted.map_err(|error| broken(&error))? {
            None => Err(unknown(&node)),
            Some(NodeRecord {
                revoked: Some(why), ..
            }) => Err(revoked(&node, &why.reason)),
            Some(_) => Ok(self.granted(node, &issued)),
        }
    }

    fn sign(&self, key: &CsrKey, node: &NodeName) -> Result<Issued, Problem> {
        let Enrolment { ca, lifetime, .. } = &self.enrolment;
        let issued = ca.get().issue_edge(key, node, *lifetime);
        issued.map_err(|error| broken(&error))
    }

    fn granted(&self, node: NodeName, issued: &Issued) -> Enrolled {
        let Enrolment { ca, advertised, .. } = &self.enrolment;
        let ca = ca.get();
        Enrolled {
            certificate: issued.pem(),
            root: ca.bundle_pem(),
            trust_domain: ca.trust_domain().to_string(),
            node,
            gateways: advertised.all(),
        }
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
                let edge = peer.identity.as_ref().map(ToString::to_string);
                let from = peer.address.map(|address| address.to_string());
                audit::refused_edge(
                    edge.as_deref().unwrap_or("(unknown)"),
                    &from.unwrap_or_default(),
                    reason,
                    detail,
                );
                Err(problem)
            }
        }
    }
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
        TokenRefused::Revoked { .. } => (StatusCode::FORBIDDEN, "token_revoked"),
        TokenRefused::NotNew { .. } => (StatusCode::FORBIDDEN, "token_not_new"),
        TokenRefused::OtherNode { .. } => (StatusCode::FORBIDDEN, "token_other_node"),
        TokenRefused::WrongCa => (StatusCode::FORBIDDEN, "token_wrong_ca"),
        TokenRefused::Store(error) => return broken(error),
    };
    refuse(status, reason, why.to_string())
}

fn unknown(node: &NodeName) -> Problem {
    let detail = format!("node {node} is not enrolled at this gateway (or was removed)");
    refuse(StatusCode::FORBIDDEN, "node_unknown", detail)
}

fn revoked(node: &NodeName, reason: &str) -> Problem {
    let detail = format!(
        "node {node} is revoked: {reason}; it is let in again by `causeway edge allow {node}`"
    );
    refuse(StatusCode::FORBIDDEN, "node_revoked", detail)
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
