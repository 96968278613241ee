//! The admin listener: health, metrics and status.
//!
//! It has no authentication and shows no secrets; it belongs on loopback, and a page in a browser there does not read it
//! under a name of its own (DNS rebinding). An edge is healthy while a tunnel stands or gateways are dialled in the ordinary
//! way, and not while they refuse it; it is ready while a tunnel stands.

use super::http_server::{
    AllowedHosts, ConnectionPlace, LimitedListener, announcing_close, check_host, keep_place,
};
use crate::{
    config::{Admin, ReloadSender},
    metrics::Metrics,
    status::{Status, StatusReader},
};
use axum::{
    Json, Router,
    extract::State,
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

/// No answer here takes longer than this.
const BOUND: Duration = Duration::from_secs(5);

/// Connections at once.
const CONNECTIONS: usize = 256;

/// The admin listener, and the socket in the data directory for commands.
pub(crate) type Listeners = (TcpListener, Option<UnixListener>);

#[derive(Clone)]
struct AdminState {
    reader: StatusReader,
    metrics: Arc<Metrics>,
    pressure: Arc<MemoryBudget>,
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

/// Serves until `stop`; connections end with their next response once the edge is `stopping`.
pub(crate) async fn run(
    (listener, socket): Listeners,
    (reader, (metrics, pressure), reloads): (
        StatusReader,
        (Arc<Metrics>, Arc<MemoryBudget>),
        ReloadSender,
    ),
    (stopping, stop): (CancellationToken, CancellationToken),
) {
    let limited = metrics.clone();
    let own = Arc::new(AllowedHosts {
        address: listener.local_addr().map(|address| address.ip()).ok(),
        node: reader.status().node,
        shown: None,
    });
    let router = operations()
        .into_iter()
        .fold(Router::new(), |router, (operation, handler)| {
            router.route(operation.path, handler)
        })
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            BOUND,
        ))
        .layer(middleware::from_fn(move |request, next| {
            check_host(own.clone(), request, next)
        }))
        .with_state(AdminState {
            reader,
            metrics,
            pressure,
            reloads,
        });
    let router = announcing_close(router, stopping);
    let limit = limited.connection_limit("admin_connections", CONNECTIONS);
    let listener = LimitedListener::new(limit, listener, stop.clone());
    let places = router.clone().layer(middleware::from_fn(keep_place));
    let places = places.into_make_service_with_connect_info::<ConnectionPlace>();
    tokio::select! {
        // Responses are short, so nothing is lost if the listener stops at once.
        served = async { axum::serve(listener, places).await } => {
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

async fn health(State(tables): State<AdminState>) -> Response {
    let status = tables.reader.status();
    let well = status.state != "refused";
    answer(well, status)
}

async fn ready(State(tables): State<AdminState>) -> Response {
    let status = tables.reader.status();
    let ready = status.state == "connected";
    answer(ready, status)
}

fn answer(well: bool, status: Status) -> Response {
    let code = if well {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let trouble = status
        .trouble
        .map_or_else(String::new, |trouble| format!(": {}", trouble.what));
    (code, format!("{}{trouble}\n", status.state)).into_response()
}

async fn metrics_text(State(tables): State<AdminState>, fields: HeaderMap) -> Response {
    if let Some(reading) = tables.reader.status().api_cache {
        tables.metrics.reads(&reading);
    }
    tables.metrics.stalled(tables.pressure.stalls().count());
    let accept = fields.get(ACCEPT);
    let format = Exposition::negotiate(accept.and_then(|accept| accept.to_str().ok()));
    let content = [(CONTENT_TYPE, format.content_type())];
    (content, tables.metrics.encode(format)).into_response()
}

/// Has the configuration read anew, and says what that did.
async fn reload(State(tables): State<AdminState>, fields: HeaderMap) -> (StatusCode, String) {
    let (code, said) = tables.reloads.answer(fields.contains_key(ORIGIN)).await;
    (StatusCode::from_u16(code).unwrap_or_default(), said)
}

async fn status(State(tables): State<AdminState>) -> Response {
    Json(tables.reader.status()).into_response()
}
