//! The redirector's admin listener: health and metrics, kept as the gateway's is.

use super::Fares;
use crate::{
    control::admin::{kept, scraped},
    metrics::RedirectorMetrics,
};
use axum::{Router, extract::State, http::StatusCode, response::IntoResponse, routing::get};
use std::{net::IpAddr, sync::Arc};

/// What is shown.
#[derive(Clone, Debug)]
pub(super) struct App {
    pub(super) fares: Fares,
    pub(super) metrics: Arc<RedirectorMetrics>,
}

/// The pages, at this address.
pub(super) fn router(app: App, address: IpAddr) -> Router {
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .with_state(app);
    kept(router, address)
}

async fn readyz(State(app): State<App>) -> (StatusCode, String) {
    match app.fares.trouble() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

async fn scrape(State(app): State<App>) -> impl IntoResponse {
    app.metrics.addresses(app.fares.addresses());
    scraped(app.metrics.encode())
}
