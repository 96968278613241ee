//! The admin listener: health, metrics and status.
//!
//! It authenticates nobody, says nothing secret and changes nothing; it belongs on loopback, and a page in a
//! browser there does not read it under a name of its own (DNS rebinding). An edge is healthy
//! while a tunnel stands or gateways are dialled in the ordinary way, and not while they refuse it; it is
//! ready while a tunnel stands.

use crate::{
    metrics::Metrics,
    state::{Reader, Status},
};
use axum::{
    Json, Router,
    extract::{Request, State},
    http::{
        HeaderValue, StatusCode,
        header::{CONTENT_TYPE, HOST},
        uri::Authority,
    },
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use causeway_tunnel::target;
use std::{net::IpAddr, sync::Arc, time::Duration};
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
    let address = listener.local_addr().map(|address| address.ip()).ok();
    let router = Router::new()
        .route("/healthz", get(health))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics_text))
        .route("/status", get(status))
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            BOUND,
        ))
        .layer(middleware::from_fn(move |request, next| {
            guard(address, request, next)
        }))
        .with_state(Tables { reader, metrics });
    tokio::select! {
        // Its answers are short: nothing is lost when it ends at once.
        served = async { axum::serve(listener, router).await } => {
            debug!(?served, "the admin listener ended");
        }
        () = stop.cancelled() => {}
    }
}

/// Refuses requests for somebody else's name.
async fn guard(address: Option<IpAddr>, request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(Authority::as_str);
    let host = request.headers().get(HOST).map(HeaderValue::to_str);
    let host = host.map(Result::unwrap_or_default);
    // HTTP/1.0 without a Host comes from probes, never from a browser.
    if authority.or(host).is_none_or(|host| is_ours(host, address)) {
        return next.run(request).await;
    }
    let said = "the Host is neither localhost nor the admin listener's address\n";
    (StatusCode::MISDIRECTED_REQUEST, said).into_response()
}

fn is_ours(host: &str, address: Option<IpAddr>) -> bool {
    let Ok((host, _)) = target::split(host) else {
        return false;
    };
    match host.parse::<IpAddr>() {
        // Rebinding needs a name; on a wildcard any address may be this machine's.
        Ok(ip) => {
            let ip = ip.to_canonical();
            ip.is_loopback() || address.is_some_and(|own| own == ip || own.is_unspecified())
        }
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

async fn health(State(tables): State<Tables>) -> Response {
    let status = tables.reader.status();
    let well = status.state != "refused";
    answer(well, status)
}

async fn ready(State(tables): State<Tables>) -> Response {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_not_this_machines_is_refused() {
        let own: IpAddr = "10.0.0.5".parse().unwrap();
        for host in [
            "localhost:10266",
            "127.0.0.1",
            "[::1]:10266",
            "10.0.0.5:10266",
        ] {
            assert!(is_ours(host, Some(own)), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:10266",
            "10.0.0.6",
            "localhost.evil",
            "",
        ] {
            assert!(!is_ours(host, Some(own)), "{host}");
        }
        assert!(is_ours("10.0.0.6", Some(IpAddr::from([0, 0, 0, 0]))));
    }
}
