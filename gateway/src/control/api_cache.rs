//! API cache server for edges: connections at the tunnel port through which edges read resources of the cluster.
//!
//! 1. An edge connects by `h2`, as for joining, and presents its certificate. `control::tunnel_listener` finishes TLS.
//! 2. The edge is checked as for a tunnel, and its pool selects the rule of `api_cache.allow` that applies.
//! 3. The [`WatchCache`] answers each request. The connection's lifetime is unlimited, because watches are long.
//! 4. The connection ends when the node is rejected, when another rule applies, when the node has too many newer connections, or
//!    when the gateway drains. Watches then end in order, as the API server ends them, and lists get a short time to finish.
//!
//! `leaders` selects the edge of each pool that reads here for all other members, together with the other gateways
//! (`leader_naming`).

mod leader_naming;
mod leader_policy;
pub mod leaders;

#[cfg(test)]
mod tests;

use super::{
    eligibility::rejection_reason,
    http::{self, Peer, ServerLimits},
};
use crate::{
    config::{self, AccessLevel},
    metrics::Metrics,
    state::{
        ApiCacheConnections, Nodes, YurtHubEndpoints, api_cache_connections::ConnectionGuard,
        registry::EdgeCertificate,
    },
};
use axum::{
    Json, Router,
    body::Body,
    extract::Request,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use causeway_certs::NodeName;
use causeway_rt::socket::{CountedIo, Socket};
use causeway_watch_cache::{AccessScope, GroupVersionResource, WatchCache};
use futures_util::future::BoxFuture;
use http_body::Frame;
use leader_policy::NodePoolLeaders;
use serde_json::json;
use std::{
    convert::Infallible,
    fmt,
    future::pending,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    sync::{Notify, Semaphore, watch},
    time::sleep,
};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Maximum number of connections of one node: one for its cache, and further ones while it reconnects.
const MAX_CONNECTIONS_PER_NODE: usize = 4;
/// Limits of an API cache connection. An edge forwards the watches of each client on its node: some tens at once.
const CONNECTION_LIMITS: ServerLimits = ServerLimits {
    max_lifetime: None,
    streams: 64,
    grace: Duration::from_secs(2),
    // A refused edge sends no further requests.
    last_request: Duration::ZERO,
};
/// Period over which connections are closed when the gateway drains. A fleet that reconnects all at once would overload it.
const DRAIN_SPREAD: Duration = Duration::from_secs(3);

/// Server of the API cache, with the access rules and the leaders of pools. Cheap to clone.
#[derive(Clone)]
pub struct ApiCacheServer {
    rules: Arc<config::ApiCache>,
    watch_cache: Arc<WatchCache>,
    nodes: Nodes,
    connections: ApiCacheConnections,
    permits: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    /// Notified when the leaders of pools have to be checked.
    leaders_changed: Arc<Notify>,
    leaders: NodePoolLeaders,
    /// Endpoints at which `YurtHub`s read.
    yurthub_endpoints: Arc<watch::Sender<YurtHubEndpoints>>,
}

/// Connected edge that passed the checks to read from the API cache.
pub(super) struct AuthorizedEdge {
    pub(super) io: TlsStream<CountedIo<Socket>>,
    pub(super) node: NodeName,
    pub(super) certificate: EdgeCertificate,
    pub(super) peer: Peer,
}

/// Reason why an edge may not read here.
#[derive(Debug, thiserror::Error)]
pub(super) enum AccessDenied {
    #[error("the number of API cache connections has reached api_cache.connections")]
    Full,
    #[error("{0}")]
    NotAdmitted(String),
}

impl ApiCacheServer {
    /// Returns a server for these rules, with an empty cache.
    pub fn new(rules: &config::ApiCache, nodes: &Nodes, metrics: &Arc<Metrics>) -> Self {
        metrics.set_reader_limit(rules.connections);
        Self {
            watch_cache: WatchCache::new(&rules.resources(), &rules.limits()),
            rules: Arc::new(rules.clone()),
            nodes: nodes.clone(),
            connections: ApiCacheConnections::default(),
            permits: Arc::new(Semaphore::new(
                rules.connections.min(Semaphore::MAX_PERMITS),
            )),
            metrics: metrics.clone(),
            leaders_changed: Arc::default(),
            leaders: NodePoolLeaders::default(),
            yurthub_endpoints: Arc::default(),
        }
    }

    /// Returns the cache.
    pub fn watch_cache(&self) -> &Arc<WatchCache> {
        &self.watch_cache
    }

    /// Returns the leader of each pool that has an edge here.
    pub(crate) fn leaders(&self) -> std::collections::BTreeMap<String, NodeName> {
        self.leaders.get()
    }

    /// Returns a watch of the endpoints at which `YurtHub`s of each pool read.
    pub fn watch_yurthub_endpoints(&self) -> watch::Receiver<YurtHubEndpoints> {
        self.yurthub_endpoints.subscribe()
    }

    /// Returns the resources that edges of this pool may read.
    fn readable_resources(&self, pool: &str) -> Vec<GroupVersionResource> {
        let right = self.rules.access_level(Some(pool));
        let grant = self.rules.access_scope(right);
        grant.map_or_else(|| self.rules.resources(), |grant| grant.resources)
    }

    /// Requests a check of the leaders, because an edge has connected.
    pub(super) fn request_leader_check(&self) {
        self.leaders_changed.notify_one();
    }

    /// Closes connections of nodes that are rejected, or whose rule has changed. `additional_reason` returns a further reason to
    /// close a connection.
    pub(super) fn close_rejected(
        &self,
        additional_reason: impl Fn(&NodeName, &EdgeCertificate) -> Option<String>,
    ) {
        self.connections.cancel_where(|node, connection| {
            rejection_reason(&self.nodes, node, &connection.certificate)
                .or_else(|| additional_reason(node, &connection.certificate))
                .or_else(|| {
                    let has_changed = self.access_level(node) != connection.access;
                    has_changed
                        .then(|| "the set of objects that it may read has changed".to_owned())
                })
        });
    }

    /// Returns the rule that applies to a node.
    fn access_level(&self, node: &NodeName) -> AccessLevel {
        self.nodes
            .with(node, |known| self.rules.access_level(known.pool.as_deref()))
    }

    /// Serves one connection until it ends or is closed. `rejection` returns the reason why its certificate is no longer valid.
    pub(super) async fn serve(
        &self,
        reader: AuthorizedEdge,
        rejection: impl Fn(&EdgeCertificate) -> Option<String>,
        (stop, drain): (CancellationToken, Duration),
    ) -> Result<(), AccessDenied> {
        let Ok(_permit) = self.permits.try_acquire() else {
            self.metrics.count_limit_reached("api_cache_connections");
            return Err(AccessDenied::Full);
        };
        let (node, certificate) = (&reader.node, reader.certificate);
        let right = self.access_level(node);
        let credentials = (certificate.clone(), right);
        let connection_guard =
            self.connections
                .register(node, credentials, MAX_CONNECTIONS_PER_NODE);
        // A check of all connections that ran before this one was registered did not include it.
        let rejection_reason_now =
            rejection_reason(&self.nodes, node, &certificate).or_else(|| rejection(&certificate));
        if let Some(why) = rejection_reason_now {
            return Err(AccessDenied::NotAdmitted(why));
        }
        let _reader_guard = self.metrics.reader_guard();
        tracing::debug!(%node, ?right, "{node} reads here");
        let router = self.router(right, &connection_guard);
        let serving = http::serve(
            reader.io,
            router,
            (reader.peer, None),
            CONNECTION_LIMITS,
            connection_guard.cancel_token.clone().into(),
        );
        let drain_close = async {
            stop.cancelled().await;
            sleep(DRAIN_SPREAD.min(drain / 4).mul_f64(rand::random())).await;
            connection_guard.cancel_token.cancel();
            pending::<Infallible>().await
        };
        tokio::select! {
            () = serving => Ok(()),
            never = drain_close => match never {},
        }
    }

    /// Returns the routes for edges with this rule.
    fn router(&self, access_level: AccessLevel, connection_guard: &ConnectionGuard) -> Router {
        let connection_state = Arc::new(ConnectionState {
            watch_cache: self.watch_cache.clone(),
            is_forbidden: access_level == AccessLevel::Nothing,
            grant: self.rules.access_scope(access_level),
            cancel_token: connection_guard.cancel_token.clone(),
        });
        Router::new().fallback(move |request: Request| connection_state.clone().answer(request))
    }
}

impl fmt::Debug for ApiCacheServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rules, readings) = (&self.rules, &self.connections);
        f.debug_struct("ApiCacheServer")
            .field("rules", rules)
            .field("readings", readings)
            .finish_non_exhaustive()
    }
}

/// State that the requests of one connection share.
struct ConnectionState {
    watch_cache: Arc<WatchCache>,
    /// Whether no rule applies to this edge.
    is_forbidden: bool,
    grant: Option<AccessScope>,
    cancel_token: CancellationToken,
}

impl ConnectionState {
    fn answer(self: Arc<Self>, request: Request) -> BoxFuture<'static, Response> {
        Box::pin(async move {
            if self.is_forbidden {
                return forbidden();
            }
            let (head, _) = request.into_parts();
            let answer = self
                .watch_cache
                .handle_request(&head, self.grant.as_ref())
                .await;
            answer.map(|body| {
                if !body.is_watch() {
                    return Body::new(body);
                }
                Body::new(CancellableWatch {
                    body: Box::pin(body),
                    cancelled: Box::pin(self.cancel_token.clone().cancelled_owned()),
                })
            })
        })
    }
}

/// Returns the answer for an edge to which no rule applies.
fn forbidden() -> Response {
    let message = "the gateway does not let this node read from the cluster: no rule in its api_cache.allow matches the node's pool";
    let status = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": "Forbidden",
        "code": StatusCode::FORBIDDEN.as_u16(),
    });
    (StatusCode::FORBIDDEN, Json(status)).into_response()
}

/// Watch response that ends in order when its connection is cancelled.
struct CancellableWatch {
    body: Pin<Box<causeway_watch_cache::ResponseBody>>,
    cancelled: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl http_body::Body for CancellableWatch {
    type Data = bytes::Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Infallible>>> {
        if self.cancelled.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        self.body.as_mut().poll_frame(context)
    }
}
