//! The redirector's admin listener: health, metrics and reload, kept as the gateway's is.

use super::Fares;
use crate::{
    control::admin::{kept, scraped},
    metrics::RedirectorMetrics,
};
use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::Response,
    routing::{get, post},
};
use causeway_config::Reloads;
use std::{net::IpAddr, sync::Arc};

/// What is shown.
#[derive(Clone, Debug)]
pub(super) struct App {
    pub(super) fares: Fares,
    pub(super) metrics: Arc<RedirectorMetrics>,
    /// Who reads the configuration anew.
    pub(super) reloads: Reloads,
}

/// The pages, at this address.
pub(super) fn router(app: App, address: IpAddr) -> Router {
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .route("/api/v1/reload", post(reload))
        .with_state(app);
    kept(router, address)
}

async fn readyz(State(app): State<App>) -> (StatusCode, String) {
    match app.fares.trouble() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

async fn scrape(State(app): State<App>, fields: HeaderMap) -> Response {
    app.metrics.addresses(app.fares.addresses());
    scraped(&fields, |format| app.metrics.encode(format))
}

/// Has the configuration read anew, and says what that did.
async fn reload(State(app): State<App>, fields: HeaderMap) -> (StatusCode, String) {
    let page = fields.contains_key(header::ORIGIN);
    let (code, said) = app.reloads.answer(page).await;
    (StatusCode::from_u16(code).unwrap_or_default(), said)
}
