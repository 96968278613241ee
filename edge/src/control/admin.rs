//! The admin listener: health, metrics and status.
//!
//! It authenticates nobody, says nothing secret and changes nothing; it belongs on loopback. An edge is healthy
//! while a tunnel stands or gateways are dialled in the ordinary way, and not while they refuse it.

use crate::{metrics::Metrics, state::Reader};
use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use std::{sync::Arc, time::Duration};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_http::timeout::TimeoutLayer;
use tracing::debug;

/// No answer here takes longer than this.
const BOUND: Duration = Duration::from_secs(5);

#[derive(Clone)]
struct Tables {
    reader: Reader,
    metrics: Arc<Metrics>,
}

/// Serves until `stop`.
pub(crate) async fn run(
    listener: TcpListener,
    reader: Reader,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    let router = Router::new()
        .route("/healthz", get(health))
        .route("/metrics", get(metrics_text))
        .route("/status", get(status))
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            BOUND,
        ))
        .with_state(Tables { reader, metrics });
    tokio::select! {
        // Its answers are short: nothing is lost when it ends at once.
        served = async { axum::serve(listener, router).await } => {
            debug!(?served, "the admin listener ended");
        }
        () = stop.cancelled() => {}
    }
}

async fn health(State(tables): State<Tables>) -> Response {
    let status = tables.reader.status();
    let code = match status.state {
        "refused" => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::OK,
    };
    let trouble = status
        .trouble
        .map_or_else(String::new, |trouble| format!(": {}", trouble.what));
    (code, format!("{}{trouble}\n", status.state)).into_response()
}

async fn metrics_text(State(tables): State<Tables>) -> Response {
    match tables.metrics.text() {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(CONTENT_TYPE, kind)], text).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn status(State(tables): State<Tables>) -> Response {
    Json(tables.reader.status()).into_response()
}
