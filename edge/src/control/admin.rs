//! The admin listener: health, metrics and status.
//!
//! It authenticates nobody and says nothing secret; it belongs on loopback, and a page in a
//! browser there does not read it under a name of its own (DNS rebinding). An edge is healthy
//! while a tunnel stands or gateways are dialled in the ordinary way, and not while they refuse it; it is
//! ready while a tunnel stands.

use crate::{
    config::Reloads,
    metrics::Metrics,
    state::{Reader, Status},
};
use axum::{
    Json, Router,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{CONTENT_TYPE, HOST, ORIGIN},
        uri::Authority,
    },
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
    serve::Listener,
};
use causeway_tunnel::{socket::AnyIo, target};
use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};
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
    reloads: Reloads,
}

/// Serves until `stop`.
pub(crate) async fn run(
    listener: TcpListener,
    (reader, metrics, reloads): (Reader, Arc<Metrics>, Reloads),
    stop: CancellationToken,
) {
    let own = Arc::new(Own {
        address: listener.local_addr().map(|address| address.ip()).ok(),
        node: reader.status().node,
    });
    let router = Router::new()
        .route("/healthz", get(health))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics_text))
        .route("/status", get(status))
        .route("/api/v1/reload", post(reload))
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            BOUND,
        ))
        .layer(middleware::from_fn(move |request, next| {
            guard(own.clone(), request, next)
        }))
        .with_state(Tables {
            reader,
            metrics,
            reloads,
        });
    tokio::select! {
        // Its answers are short: nothing is lost when it ends at once.
        served = async { axum::serve(Any(listener), router).await } => {
            debug!(?served, "the admin listener ended");
        }
        () = stop.cancelled() => {}
    }
}

/// A listener whose connections are of the kind that all small servers and clients share.
struct Any(TcpListener);

impl Listener for Any {
    type Io = AnyIo;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (AnyIo, SocketAddr) {
        let (tcp, from) = Listener::accept(&mut self.0).await;
        (Box::new(tcp), from)
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// Refuses requests for somebody else's name.
async fn guard(own: Arc<Own>, request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(Authority::as_str);
    let host = request.headers().get(HOST).map(HeaderValue::to_str);
    let host = host.map(Result::unwrap_or_default);
    // HTTP/1.0 without a Host comes from probes, never from a browser.
    if authority.or(host).is_none_or(|host| own.is(host)) {
        return next.run(request).await;
    }
    let said = "the Host is neither localhost nor this node nor the admin listener's address\n";
    (StatusCode::MISDIRECTED_REQUEST, said).into_response()
}

/// The names by which this listener is asked.
struct Own {
    /// Where it listens.
    address: Option<IpAddr>,
    /// The node: callers that come through the road know it by that.
    node: String,
}

impl Own {
    fn is(&self, host: &str) -> bool {
        let Ok((host, _)) = target::split(host) else {
            return false;
        };
        match host.parse::<IpAddr>() {
            // Rebinding needs a name; on a wildcard any address may be this machine's.
            Ok(ip) => {
                let ip = ip.to_canonical();
                ip.is_loopback()
                    || self
                        .address
                        .is_some_and(|own| own == ip || own.is_unspecified())
            }
            Err(_) => {
                host.eq_ignore_ascii_case("localhost") || host.eq_ignore_ascii_case(&self.node)
            }
        }
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

/// Has the configuration read anew, and says what that did.
async fn reload(State(tables): State<Tables>, fields: HeaderMap) -> (StatusCode, String) {
    let (code, said) = tables.reloads.answer(fields.contains_key(ORIGIN)).await;
    (StatusCode::from_u16(code).unwrap_or_default(), said)
}

async fn status(State(tables): State<Tables>) -> Response {
    Json(tables.reader.status()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(address: &str) -> Own {
        Own {
            address: address.parse().ok(),
            node: "edge-1".into(),
        }
    }

    #[test]
    fn a_name_that_is_not_this_machines_is_refused() {
        let own_address = own("10.0.0.5");
        for host in [
            "localhost:10266",
            "127.0.0.1",
            "[::1]:10266",
            "10.0.0.5:10266",
            "Edge-1:10266",
        ] {
            assert!(own_address.is(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:10266",
            "10.0.0.6",
            "localhost.evil",
            "edge-2",
            "",
        ] {
            assert!(!own_address.is(host), "{host}");
        }
        assert!(own("0.0.0.0").is("10.0.0.6"));
    }
}
