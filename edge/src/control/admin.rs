//! The admin listener: health, metrics and status.
//!
//! The listener has no authentication and shows no secrets. It belongs on loopback, and it checks the host name of each
//! request, so that a browser page on this machine cannot read it (DNS rebinding). An edge is healthy while a tunnel is open,
//! or while it connects to gateways and they do not refuse it. It is ready while a tunnel is open. `/readyz?cache` is about
//! the API cache alone.

use super::http_server::{
    AllowedHosts, ConnectionPlace, LimitedListener, check_host, hold_slot, with_connection_close,
};
use crate::{
    config::{Admin, ReloadSender},
    metrics::Metrics,
    status::{ApiCacheStatus, Status, StatusReader},
};
use axum::{
    Json, Router,
    extract::{RawQuery, State},
    handler::Handler,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE, ORIGIN},
    },
    middleware,
    response::{IntoResponse, Response},
    routing::{MethodFilter, MethodRouter, on},
};
use causeway_config::openapi::{self, Operation, Response as ApiResponse};
use causeway_rt::Exposition;
use causeway_tunnel::buffered::MemoryBudget;
use serde_json::Value;
use std::{future::pending, sync::Arc, time::Duration};
use tokio::net::{TcpListener, UnixListener};
use tokio_util::sync::CancellationToken;
use tower_http::timeout::TimeoutLayer;
use tracing::debug;

/// Time limit of every response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 256;

/// The admin listener, and the socket in the data directory for commands.
pub(crate) type Listeners = (TcpListener, Option<UnixListener>);

#[derive(Clone)]
struct AdminState {
    status_reader: StatusReader,
    metrics: Arc<Metrics>,
    memory_budget: Arc<MemoryBudget>,
    reloads: ReloadSender,
}

/// Operation with the handler of its method.
type Route = (Operation, MethodRouter<AdminState>);

/// Returns the operations. The router and the OpenAPI document are made from this one table.
fn operations() -> Vec<Route> {
    let state = "State, and the last failure";
    vec![
        route(
            Operation::get("/healthz", "Health")
                .text(200, state)
                .text(503, "The same: gateways refuse the edge"),
            health,
        ),
        route(
            Operation::get("/readyz", "Readiness")
                .text(200, state)
                .text(503, "The same: the edge has no tunnel"),
            ready,
        ),
        route(
            Operation::get("/metrics", "Metrics").metrics(),
            metrics_text,
        ),
        route(
            Operation::get("/status", "Status of the edge").json::<Status>("The status"),
            status,
        ),
        route(
            Operation::post("/api/v1/reload", "Reload the configuration").reload(),
            reload,
        ),
    ]
}

fn route<H: Handler<T, AdminState>, T: 'static>(operation: Operation, handler: H) -> Route {
    let method = if operation.is_post {
        MethodFilter::POST
    } else {
        MethodFilter::GET
    };
    (operation, on(method, handler))
}

/// Returns the OpenAPI document of the admin listener.
pub fn openapi(version: &str) -> Value {
    let operations = operations();
    openapi::document(
        ("Admin API of the Causeway edge", version),
        &Admin::default().listen.to_string(),
        operations.iter().map(|(operation, _)| operation),
        &[
            ApiResponse::text(421, "The `Host` is another one"),
            ApiResponse::text(504, "The edge did not answer within 5 s"),
        ],
    )
}

/// Serves until `stop`. Once the edge is `stopping`, each connection ends with its next response.
pub(crate) async fn run(
    (listener, socket): Listeners,
    (reader, (metrics, pressure), reloads): (
        StatusReader,
        (Arc<Metrics>, Arc<MemoryBudget>),
        ReloadSender,
    ),
    (stopping, stop): (CancellationToken, CancellationToken),
) {
    let limit_metrics = metrics.clone();
    let allowed_hosts = Arc::new(AllowedHosts {
        address: listener.local_addr().map(|address| address.ip()).ok(),
        node: reader.status().node,
        certificate: None,
    });
    let router = operations()
        .into_iter()
        .fold(Router::new(), |router, (operation, handler)| {
            router.route(operation.path, handler)
        })
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            REQUEST_TIMEOUT,
        ))
        .layer(middleware::from_fn(move |request, next| {
            check_host(allowed_hosts.clone(), request, next)
        }))
        .with_state(AdminState {
            status_reader: reader,
            metrics,
            memory_budget: pressure,
            reloads,
        });
    let router = with_connection_close(router, stopping);
    let limit = limit_metrics.connection_limit("admin_connections", MAX_CONNECTIONS);
    let listener = LimitedListener::new(limit, listener, stop.clone());
    let service = router.clone().layer(middleware::from_fn(hold_slot));
    let service = service.into_make_service_with_connect_info::<ConnectionPlace>();
    tokio::select! {
        // Responses are short, so nothing is lost if the listener stops at once.
        served = async { axum::serve(listener, service).await } => {
            debug!(?served, "the admin listener stopped");
        }
        // Only the owner of the data directory and root can connect, so no connection limit is needed.
        served = async {
            match socket {
                Some(socket) => axum::serve(socket, router).await,
                None => pending().await,
            }
        } => {
            debug!(?served, "the command socket stopped");
        }
        () = stop.cancelled() => {}
    }
}

async fn health(State(state): State<AdminState>) -> Response {
    let status = state.status_reader.status();
    let is_healthy = status.state != "refused";
    health_response(is_healthy, status)
}

async fn ready(State(state): State<AdminState>, RawQuery(query): RawQuery) -> Response {
    let status = state.status_reader.status();
    if query.as_deref() == Some("cache") {
        return cache_ready(status.api_cache.as_ref());
    }
    let is_ready = status.state == "connected";
    health_response(is_ready, status)
}

/// Answers whether the API cache has a full view and is connected to its source. Without a source it serves its last full view.
fn cache_ready(cache: Option<&ApiCacheStatus>) -> Response {
    let (code, text) = match cache {
        None => (
            StatusCode::SERVICE_UNAVAILABLE,
            "disabled: this edge has no API cache (api_cache)",
        ),
        Some(cache) if cache.ready => (StatusCode::OK, "ready"),
        Some(cache) if cache.healthy => {
            let text =
                "healthy: the cache serves its last full view, and is not connected to its source";
            (StatusCode::SERVICE_UNAVAILABLE, text)
        }
        Some(_) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "pending: the cache has no full view yet",
        ),
    };
    (code, format!("{text}\n")).into_response()
}

fn health_response(is_ok: bool, status: Status) -> Response {
    let code = if is_ok {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let detail = status
        .trouble
        .map_or_else(String::new, |trouble| format!(": {}", trouble.what));
    (code, format!("{}{detail}\n", status.state)).into_response()
}

async fn metrics_text(State(state): State<AdminState>, headers: HeaderMap) -> Response {
    if let Some(cache_status) = state.status_reader.status().api_cache {
        state.metrics.update_api_cache(&cache_status);
    }
    state
        .metrics
        .set_stalled(state.memory_budget.stall_monitor().stalled_count());
    let accept = headers.get(ACCEPT);
    let format = Exposition::negotiate(accept.and_then(|accept| accept.to_str().ok()));
    let content = [(CONTENT_TYPE, format.content_type())];
    (content, state.metrics.encode(format)).into_response()
}

/// Reloads the configuration and returns a summary of the result.
async fn reload(State(state): State<AdminState>, headers: HeaderMap) -> (StatusCode, String) {
    let (code, summary) = state
        .reloads
        .handle_admin_request(headers.contains_key(ORIGIN))
        .await;
    (StatusCode::from_u16(code).unwrap_or_default(), summary)
}

async fn status(State(state): State<AdminState>) -> Response {
    Json(state.status_reader.status()).into_response()
}
