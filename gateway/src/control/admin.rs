//! The admin listener: health, metrics, and the state of the edges.
//!
//! The listener has no authentication and returns node names and addresses, so it belongs on loopback. A web page in a browser on
//! the same machine must not read it by DNS rebinding, through a name that resolves to loopback. The listener therefore refuses a
//! `Host` other than the machine itself or the bound address. Requests read tables; only `refresh` and `reload` change any. A
//! request to reload the configuration gives no more power than write access to its files. A page in a browser cannot send it.

mod edges;
mod operations;
mod peers;

#[cfg(test)]
mod tests;

use crate::{
    config::ReloadSender,
    control::{
        api_cache::ApiCacheServer,
        ca_rotation::{self, CaReloadFn, RotationStatus},
        certificate_expiry::{CertificateInUse, CertificateInventory},
        drain::Readiness,
        gateway_revocation::RevocationStatus,
        http::ProblemDetails,
        node_sync::NodeSync,
        peers::{query_revocations, query_rotation},
        state_sync::StateSync,
    },
    metrics::Metrics,
    state::{EgressUsage, Nodes, Registry, TargetGroup, target_group},
};
use axum::{
    Json, Router,
    extract::{Path, RawQuery, Request, State},
    http::{HeaderMap, StatusCode, header, uri::Authority},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use causeway_certs::{LiveCa, NodeName};
use causeway_rt::Exposition;
use causeway_tunnel::{buffered::MemoryBudget, target};
use edges::EdgeDetail;
pub use operations::openapi;
use operations::operations;
use peers::PeerSummary;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{task::spawn_blocking, time::timeout};
use tower_http::{
    compression::CompressionLayer,
    timeout::TimeoutLayer,
    trace::{DefaultOnFailure, TraceLayer},
};
use tracing::Level;

/// Timeout of a request. All data is in memory, so a client that takes longer is stuck.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for a change to reach the engine of the shared state.
const SHARE_TIMEOUT: Duration = Duration::from_secs(8);

/// Shared state of the admin listener's handlers.
#[derive(Clone, Debug)]
pub struct AdminState {
    /// The tunnels.
    pub registry: Registry,
    /// Connections that edges have opened.
    pub egress_usage: EgressUsage,
    /// The known nodes.
    pub nodes: Nodes,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The memory budget of bytes that clients have not read yet.
    pub memory_budget: Arc<MemoryBudget>,
    /// Whether clients should be sent to this gateway.
    pub readiness: Readiness,
    /// Address of the listener.
    pub address: SocketAddr,
    /// Requests reloads of the configuration.
    pub reload_sender: ReloadSender,
    /// Reloads the nodes of the data directory, and closes tunnels of rejected nodes.
    pub node_sync: NodeSync,
    /// The CA that signs.
    pub ca: LiveCa,
    /// The certificates in use.
    pub certificates: CertificateInventory,
    /// Loads a CA that has changed.
    pub reload_ca: CaReloadFn,
    /// Synchronization of the state that gateways share, if there is any.
    pub state_sync: Option<Arc<StateSync>>,
}

/// Returns the admin listener's routes.
pub fn router(state: AdminState) -> Router {
    let address = state.address.ip();
    let router = operations()
        .into_iter()
        .fold(Router::new(), |router, (operation, handler)| {
            router.route(operation.path, handler)
        })
        .fallback(path_unknown)
        .with_state(state);
    with_common_layers(router.layer(middleware::from_fn(move |request, next| {
        check_host(address, request, next)
    })))
}

/// Returns the routes of `admin.metrics_listen`: `/metrics` alone. A scraper may use any host name.
pub fn metrics_router(state: AdminState) -> Router {
    let router = Router::new()
        .route("/metrics", get(scrape))
        .fallback(path_unknown)
        .with_state(state);
    with_common_layers(router)
}

async fn path_unknown() -> ProblemDetails {
    ProblemDetails::new(
        StatusCode::NOT_FOUND,
        "path_unknown",
        "this path does not exist",
    )
}

fn with_common_layers(router: Router) -> Router {
    router
        .layer(CompressionLayer::new())
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            REQUEST_TIMEOUT,
        ))
        // A 503 of `/readyz` is a normal answer, and probes request it every few seconds.
        .layer(TraceLayer::new_for_http().on_failure(DefaultOnFailure::new().level(Level::DEBUG)))
}

/// Refuses requests for another host name.
async fn check_host(address: IpAddr, request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(Authority::as_str);
    let host = request
        .headers()
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    // Only probes send HTTP/1.0 without a Host, never a browser.
    let is_own_host = authority
        .or(host)
        .is_none_or(|host| is_own_host_name(host, address));
    if is_own_host {
        return next.run(request).await;
    }
    let detail = "the Host is neither localhost nor the address of the admin listener";
    ProblemDetails::new(StatusCode::MISDIRECTED_REQUEST, "misdirected", detail).into_response()
}

fn is_own_host_name(host: &str, address: IpAddr) -> bool {
    let Ok((host, _)) = target::split_host_port(host) else {
        return false;
    };
    match host.parse::<IpAddr>() {
        // Rebinding needs a name. On a wildcard listener, any address may belong to this machine.
        Ok(ip) => ip.to_canonical().is_loopback() || ip == address || address.is_unspecified(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

async fn readyz(State(app): State<AdminState>) -> (StatusCode, String) {
    let reason = app.readiness.not_ready_reason().map(str::to_owned);
    let (code, mut text) = match reason.or_else(|| app.readiness.hold_reason()) {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    };
    for fault in app.readiness.faults() {
        text.extend(["fault: ", &fault, "\n"]);
    }
    (code, text)
}

/// Runs work that visits each tunnel on a thread of its own. It takes milliseconds for thousands of tunnels, for which the requests
/// of a worker would wait.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ProblemDetails> {
    spawn_blocking(work).await.map_err(|error| {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        ProblemDetails::new(status, "internal", error.to_string())
    })
}

async fn scrape(
    State(app): State<AdminState>,
    fields: HeaderMap,
) -> Result<Response, ProblemDetails> {
    run_blocking(move || encode_metrics(&app, &fields)).await
}

fn encode_metrics(app: &AdminState, fields: &HeaderMap) -> Response {
    let mut round_trips = Vec::new();
    let mut suspect_tunnels = 0;
    let mut unhealthy = BTreeMap::new();
    app.registry.for_each_tunnel(|node, edge| {
        round_trips.push(edge.tunnel.tunnel.round_trip());
        suspect_tunnels += usize::from(edge.tunnel.tunnel.is_suspect());
        if let Some(ports) = edge.tunnel.unhealthy_ports.load_full() {
            unhealthy.insert(node.clone(), ports.len());
        }
    });
    app.metrics.set_unhealthy_ports(unhealthy.values().sum());
    app.metrics.set_round_trips(round_trips);
    app.metrics.set_suspect_tunnels(suspect_tunnels);
    app.metrics.set_unread(
        app.memory_budget.bytes(),
        app.memory_budget.stall_monitor().stalled_count(),
    );
    let ([connected, suspect, draining], nodes) = app.registry.directory().count();
    let by_state = [
        ("connected", connected),
        ("suspect", suspect),
        ("draining", draining),
    ];
    app.metrics.set_peers(by_state, nodes);
    app.metrics.set_peer_lag(app.registry.directory().lag());
    app.certificates.update_metrics(&app.metrics);
    if let Some(api_cache) = &app.node_sync.api_cache {
        let stores = api_cache.watch_cache().stores().iter();
        app.metrics
            .set_resource_status(stores.map(|store| store.status()));
    }
    let accept = fields.get(header::ACCEPT);
    let format = Exposition::negotiate(accept.and_then(|accept| accept.to_str().ok()));
    let content = [(header::CONTENT_TYPE, format.content_type())];
    (content, app.metrics.encode(format)).into_response()
}

async fn list_edges(State(app): State<AdminState>) -> Result<Response, ProblemDetails> {
    let list = move || {
        let edges = edges::list_edges(
            &app.registry,
            (&app.nodes, &app.egress_usage),
            &pool_leaders(&app),
        );
        Json(edges).into_response()
    };
    run_blocking(list).await
}

/// Returns the nodes as targets for Prometheus: with a port in the query every known node, so that a node that is away remains a
/// target, else the ports and services that the edges report to this gateway.
async fn list_targets(
    State(app): State<AdminState>,
    RawQuery(query): RawQuery,
) -> Result<Response, ProblemDetails> {
    let port = target_group::requested_port(query.as_deref())
        .map_err(|why| ProblemDetails::new(StatusCode::BAD_REQUEST, "malformed", why))?;
    let list = move || {
        let names = app.nodes.names().into_iter().map(|node| (node, None));
        let mut hellos: BTreeMap<_, _> = names.collect();
        app.registry.for_each_tunnel(|node, tunnel| {
            hellos.insert(node.clone(), Some(tunnel.tunnel.hello.clone()));
        });
        let mut groups = Vec::new();
        for (node, hello) in &hellos {
            let data = app.nodes.get(node).unwrap_or_default();
            if data.revoked.is_some() {
                continue;
            }
            let reported = hello.as_deref().filter(|_| port.is_none());
            let ports = port.as_slice().iter();
            let ports = ports.chain(reported.iter().flat_map(|hello| &hello.ports));
            let ports: Vec<_> = ports.copied().collect();
            let services = reported.iter().flat_map(|hello| hello.services());
            let services = services.filter(|(name, _)| !app.nodes.hides_service(name, node));
            groups.extend(TargetGroup::for_node((node, &data), &ports, services));
        }
        Json(groups).into_response()
    };
    run_blocking(list).await
}

async fn other_gateways(State(app): State<AdminState>) -> Json<Vec<PeerSummary>> {
    Json(peers::list_peers(app.registry.directory()))
}

async fn certificates(
    State(app): State<AdminState>,
) -> Result<Json<Vec<CertificateInUse>>, ProblemDetails> {
    app.certificates.list().map(Json).ok_or_else(|| {
        let detail = "a reload is in progress; try again later";
        ProblemDetails::new(StatusCode::SERVICE_UNAVAILABLE, "reloading", detail)
    })
}

/// Returns the leader of each pool, if the API cache is enabled.
fn pool_leaders(app: &AdminState) -> Option<BTreeMap<String, NodeName>> {
    app.node_sync
        .api_cache
        .as_ref()
        .map(ApiCacheServer::leaders)
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
    let Some(reading) = &app.node_sync.api_cache else {
        let detail =
            "this gateway serves no API objects to edges: the configuration has no api_cache";
        let not_configured = ProblemDetails::new(StatusCode::NOT_FOUND, "path_unknown", detail);
        return Err(not_configured);
    };
    let stores = reading.watch_cache().stores().iter();
    Ok(Json(ApiCacheSummary {
        resources: stores.map(|store| store.status()).collect(),
        leaders: reading.leaders(),
    }))
}

/// Requests a reload of the configuration, and returns its result.
async fn reload(State(app): State<AdminState>, fields: HeaderMap) -> (StatusCode, String) {
    let (code, message) = app
        .reload_sender
        .handle_admin_request(fields.contains_key(header::ORIGIN))
        .await;
    (StatusCode::from_u16(code).unwrap_or_default(), message)
}

/// Reloads the nodes of the data directory, and returns the nodes whose tunnels the reload closed.
async fn refresh(
    State(app): State<AdminState>,
    fields: HeaderMap,
) -> Result<Json<Vec<NodeName>>, ProblemDetails> {
    if fields.contains_key(header::ORIGIN) {
        let detail = "requests from a browser page are not allowed here";
        return Err(ProblemDetails::new(StatusCode::FORBIDDEN, "origin", detail));
    }
    let internal_error = |detail: String| {
        ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, "gateway_failed", detail)
    };
    let closed = match app.node_sync.refresh_detached().await {
        Some(Ok(closed)) => closed,
        Some(Err(error)) => return Err(internal_error(error.to_string())),
        None => return Err(internal_error("the gateway is shutting down".to_owned())),
    };
    share_changes(&app).await?;
    Ok(Json(closed))
}

/// Applies a change of the data directory at the other gateways, if the state is shared.
async fn share_changes(app: &AdminState) -> Result<(), ProblemDetails> {
    let Some(state_sync) = &app.state_sync else {
        return Ok(());
    };
    let shared = timeout(SHARE_TIMEOUT, state_sync.synchronize_now()).await;
    let why = match shared {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(why)) => why,
        Err(_) => format!(
            "{} did not answer within {SHARE_TIMEOUT:?}",
            state_sync.shared.engine()
        ),
    };
    let detail = format!(
        "this gateway has applied the change, but the other gateways have not received it yet: {why}; they receive it as soon as the engine of the shared state answers"
    );
    let status = StatusCode::SERVICE_UNAVAILABLE;
    Err(ProblemDetails::new(status, "state_unavailable", detail))
}

/// Returns the trusted roots, and how many edges have adopted them, here and at the other gateways.
async fn rotation(State(app): State<AdminState>) -> Json<RotationStatus> {
    // Without a rotation there is nothing to compare.
    let is_rotating = app.ca.get().other().is_some();
    let gateways = if is_rotating {
        query_rotation(app.registry.directory()).await
    } else {
        Vec::new()
    };
    Json(RotationStatus {
        own: ca_rotation::rotation_progress(&app.ca, &app.registry),
        gateways,
    })
}

/// Returns how many of the nodes at this gateway and at the other ones know the revocations of gateways.
async fn revocations(State(app): State<AdminState>) -> Json<RevocationStatus> {
    let revocation = &app.node_sync.gateway_revocation;
    let others = if revocation.count() > 0 {
        query_revocations(app.registry.directory()).await
    } else {
        Vec::new()
    };
    Json(revocation.status(&app.registry, others))
}

/// Loads the current CA of the data directory.
async fn load_ca(
    State(app): State<AdminState>,
    fields: HeaderMap,
) -> Result<Json<RotationStatus>, ProblemDetails> {
    if fields.contains_key(header::ORIGIN) {
        let detail = "requests from a browser page are not allowed here";
        return Err(ProblemDetails::new(StatusCode::FORBIDDEN, "origin", detail));
    }
    let CaReloadFn(take_up) = app.reload_ca.clone();
    let reloaded = spawn_blocking(move || take_up()).await;
    let taken = reloaded.unwrap_or_else(|join_error| Err(join_error.to_string()));
    taken.map_err(|error| {
        let detail = format!("the CA in the data directory cannot be loaded: {error}");
        ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, "gateway_failed", detail)
    })?;
    share_changes(&app).await?;
    Ok(rotation(State(app)).await)
}

async fn get_edge(
    State(app): State<AdminState>,
    Path(node): Path<String>,
) -> Result<Json<EdgeDetail>, ProblemDetails> {
    let node = NodeName::parse(&node).ok();
    let edge_detail = node.and_then(|node| {
        edges::find_edge(
            &app.registry,
            (&app.nodes, &app.egress_usage),
            (&node, &pool_leaders(&app)),
        )
    });
    edge_detail.map(Json).ok_or_else(|| {
        let detail = "no node with this name is enrolled at or connected to this gateway";
        ProblemDetails::new(StatusCode::NOT_FOUND, "node_unknown", detail)
    })
}
