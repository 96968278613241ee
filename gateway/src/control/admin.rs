//! The admin listener: health, metrics, and the state of the edges.
//!
//! The listener has no authentication and shows node names and addresses, so it belongs on loopback. A page in a browser on
//! the same machine must not read it through its own name that resolves to loopback (DNS rebinding). A `Host` other than the
//! machine itself or the bound address is therefore refused. Requests here read tables; only `refresh` and `reload` change any.
//! A request to reload the configuration gives no more power than write access to its files. A page in a browser cannot send it.

mod edges;
mod operations;

#[cfg(test)]
mod tests;

use crate::{
    config::ReloadSender,
    control::{
        api_cache::ApiCacheServer,
        ca_rotation::{self, CaReloadFn, RotationStatus},
        certificate_expiry::{CertificateInUse, CertificateInventory},
        drain::Readiness,
        http::ProblemDetails,
        node_sync::NodeSync,
    },
    metrics::Metrics,
    state::{Nodes, Registry},
};
use axum::{
    Json, Router,
    extract::{Path, Request, State},
    http::{HeaderMap, StatusCode, header, uri::Authority},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use causeway_certs::{LiveCa, NodeName};
use causeway_rt::Exposition;
use causeway_tunnel::{buffered::MemoryBudget, target};
use edges::{EdgeDetail, EdgeSummary};
pub use operations::openapi;
use operations::operations;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::task::spawn_blocking;
use tower_http::{
    compression::CompressionLayer,
    timeout::TimeoutLayer,
    trace::{DefaultOnFailure, TraceLayer},
};
use tracing::Level;

/// Timeout of a request. All data is in memory, so a client that takes longer is stuck.
const WITHIN: Duration = Duration::from_secs(10);

/// State that the admin listener shows.
#[derive(Clone, Debug)]
pub struct AdminState {
    /// The tunnels.
    pub registry: Registry,
    /// The known nodes.
    pub nodes: Nodes,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The memory budget of bytes that clients leave unread.
    pub pressure: Arc<MemoryBudget>,
    /// Whether clients should be sent to this gateway.
    pub readiness: Readiness,
    /// Address of the listener.
    pub address: SocketAddr,
    /// Requests reloads of the configuration.
    pub reloads: ReloadSender,
    /// Reloads the nodes of the data directory, and closes tunnels of rejected nodes.
    pub roll: NodeSync,
    /// The CA that signs.
    pub ca: LiveCa,
    /// The certificates in use.
    pub certificates: CertificateInventory,
    /// Loads a CA that has changed.
    pub take_up: CaReloadFn,
}

/// Returns the admin listener's routes.
pub fn router(app: AdminState) -> Router {
    let address = app.address.ip();
    let router = operations()
        .into_iter()
        .fold(Router::new(), |router, (operation, handler)| {
            router.route(operation.path, handler)
        })
        .fallback(path_unknown)
        .with_state(app);
    bounded(router.layer(middleware::from_fn(move |request, next| {
        guard(address, request, next)
    })))
}

/// Returns the routes of `admin.metrics_listen`: `/metrics` alone. A scraper may use any host name.
pub fn metrics_router(app: AdminState) -> Router {
    let router = Router::new()
        .route("/metrics", get(scrape))
        .fallback(path_unknown)
        .with_state(app);
    bounded(router)
}

async fn path_unknown() -> ProblemDetails {
    ProblemDetails::new(
        StatusCode::NOT_FOUND,
        "path_unknown",
        "this path does not exist",
    )
}

fn bounded(router: Router) -> Router {
    router
        .layer(CompressionLayer::new())
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            WITHIN,
        ))
        // A 503 of `/readyz` is a normal answer, and probes request it every few seconds.
        .layer(TraceLayer::new_for_http().on_failure(DefaultOnFailure::new().level(Level::DEBUG)))
}

/// Refuses requests for another host name.
async fn guard(address: IpAddr, request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(Authority::as_str);
    let host = request
        .headers()
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    // HTTP/1.0 without a Host comes from probes, never from a browser.
    let ours = authority.or(host).is_none_or(|host| is_ours(host, address));
    if ours {
        return next.run(request).await;
    }
    let detail = "the Host is neither localhost nor the address of the admin listener";
    ProblemDetails::new(StatusCode::MISDIRECTED_REQUEST, "misdirected", detail).into_response()
}

fn is_ours(host: &str, address: IpAddr) -> bool {
    let Ok((host, _)) = target::split(host) else {
        return false;
    };
    match host.parse::<IpAddr>() {
        // Rebinding needs a name; on a wildcard any address may be this machine's.
        Ok(ip) => ip.to_canonical().is_loopback() || ip == address || address.is_unspecified(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

async fn readyz(State(app): State<AdminState>) -> (StatusCode, String) {
    let why = app.readiness.why_not().map(str::to_owned);
    let (code, mut text) = match why.or_else(|| app.readiness.held()) {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    };
    for fault in app.readiness.faults() {
        text.extend(["fault: ", &fault, "\n"]);
    }
    (code, text)
}

async fn scrape(State(app): State<AdminState>, fields: HeaderMap) -> Response {
    let edges = app.registry.all();
    let round_trips = edges
        .iter()
        .map(|(_, edge)| edge.admitted.tunnel.round_trip());
    app.metrics.round_trips(round_trips.collect());
    let suspect = edges
        .iter()
        .filter(|(_, edge)| edge.admitted.tunnel.is_suspect());
    app.metrics.suspect(suspect.count());
    app.metrics
        .unread(app.pressure.bytes(), app.pressure.stalls().count());
    app.certificates.update_metrics(&app.metrics);
    if let Some(reading) = &app.roll.reading {
        let stores = reading.pool().stores().iter();
        app.metrics.pool(stores.map(|store| store.status()));
    }
    let accept = fields.get(header::ACCEPT);
    let format = Exposition::negotiate(accept.and_then(|accept| accept.to_str().ok()));
    let content = [(header::CONTENT_TYPE, format.content_type())];
    (content, app.metrics.encode(format)).into_response()
}

async fn all(State(app): State<AdminState>) -> Json<Vec<EdgeSummary>> {
    Json(edges::all(&app.registry, &app.nodes, &led(&app)))
}

/// Returns the certificates in use.
async fn certificates(
    State(app): State<AdminState>,
) -> Result<Json<Vec<CertificateInUse>>, ProblemDetails> {
    app.certificates.list().map(Json).ok_or_else(|| {
        let detail = "a reload is in progress; try again later";
        ProblemDetails::new(StatusCode::SERVICE_UNAVAILABLE, "reloading", detail)
    })
}

/// Returns the leader of each pool, if edges may read.
fn led(app: &AdminState) -> Option<BTreeMap<String, NodeName>> {
    app.roll.reading.as_ref().map(ApiCacheServer::led)
}

/// Resources that edges may read, and the leader of each pool.
#[derive(Debug, Serialize, JsonSchema)]
struct ApiCacheSummary {
    /// The resources.
    resources: Vec<causeway_watch_cache::Status>,
    /// Leading node of each pool.
    leaders: BTreeMap<String, NodeName>,
}

async fn pool(State(app): State<AdminState>) -> Result<Json<ApiCacheSummary>, ProblemDetails> {
    let Some(reading) = &app.roll.reading else {
        let detail =
            "this gateway serves no API objects to edges: the configuration has no api_cache";
        let unknown = ProblemDetails::new(StatusCode::NOT_FOUND, "path_unknown", detail);
        return Err(unknown);
    };
    let stores = reading.pool().stores().iter();
    Ok(Json(ApiCacheSummary {
        resources: stores.map(|store| store.status()).collect(),
        leaders: reading.led(),
    }))
}

/// Requests a reload of the configuration, and returns its result.
async fn reload(State(app): State<AdminState>, fields: HeaderMap) -> (StatusCode, String) {
    let (code, said) = app
        .reloads
        .answer(fields.contains_key(header::ORIGIN))
        .await;
    (StatusCode::from_u16(code).unwrap_or_default(), said)
}

/// Reloads the nodes of the data directory, and returns the nodes whose tunnels were closed for that.
async fn refresh(
    State(app): State<AdminState>,
    fields: HeaderMap,
) -> Result<Json<Vec<NodeName>>, ProblemDetails> {
    if fields.contains_key(header::ORIGIN) {
        let detail = "requests from a browser page are not allowed here";
        return Err(ProblemDetails::new(StatusCode::FORBIDDEN, "origin", detail));
    }
    let failed = |detail: String| {
        ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, "gateway_failed", detail)
    };
    match app.roll.refreshed().await {
        Some(Ok(gone)) => Ok(Json(gone)),
        Some(Err(error)) => Err(failed(error.to_string())),
        None => Err(failed("the gateway is shutting down".to_owned())),
    }
}

/// Returns the roots, and the progress of the edges with them.
async fn rotation(State(app): State<AdminState>) -> Json<RotationStatus> {
    Json(ca_rotation::progress(&app.ca, &app.registry))
}

/// Loads the current CA of the data directory.
async fn take_up(
    State(app): State<AdminState>,
    fields: HeaderMap,
) -> Result<Json<RotationStatus>, ProblemDetails> {
    if fields.contains_key(header::ORIGIN) {
        let detail = "requests from a browser page are not allowed here";
        return Err(ProblemDetails::new(StatusCode::FORBIDDEN, "origin", detail));
    }
    let CaReloadFn(take_up) = app.take_up.clone();
    let taken = spawn_blocking(move || take_up()).await;
    let taken = taken.unwrap_or_else(|failed| Err(failed.to_string()));
    taken.map_err(|error| {
        let detail = format!("the CA in the data directory cannot be loaded: {error}");
        ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, "gateway_failed", detail)
    })?;
    Ok(rotation(State(app)).await)
}

async fn one(
    State(app): State<AdminState>,
    Path(node): Path<String>,
) -> Result<Json<EdgeDetail>, ProblemDetails> {
    let node = NodeName::parse(&node).ok();
    let found = node.and_then(|node| edges::one(&app.registry, &app.nodes, (&node, &led(&app))));
    found.map(Json).ok_or_else(|| {
        let detail = "no node with this name is enrolled at or connected to this gateway";
        ProblemDetails::new(StatusCode::NOT_FOUND, "node_unknown", detail)
    })
}
