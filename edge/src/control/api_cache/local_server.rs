//! Listener for this node's programs: the Kubernetes API over HTTP/1.1 or HTTP/2, with or without TLS, on loopback.
//!
//! The listener has no authentication and serves only reads. It checks the host name of each request, so that a browser page
//! on this machine cannot read it (DNS rebinding). Over TLS the names of the certificate are valid as well.

use super::{
    selected_source::SelectedSource,
    tls_acceptor::{ClientPolicy, PresentedChain, QuotaAcceptor},
};
use crate::{
    control::http_server::{AllowedHosts, ConnectionPlace, LimitedListener, check_host, hold_slot},
    metrics::Metrics,
};
use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderValue, header::AGE},
    middleware,
};
use causeway_certs::verify::ServerOnlyTls;
use causeway_rt::connection_limit::ConnectionLimit;
use causeway_watch_cache::{AccessScope, WatchCache};
use futures_util::future::BoxFuture;
use rustls_pki_types::CertificateDer;
use std::{future::pending, sync::Arc};
use tokio::{net::TcpListener, sync::watch};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// Maximum number of connections. A node's kube-proxy, its name server and some other programs have a few each.
const MAX_CONNECTIONS: usize = 256;

/// Returns the router of a listener. The router for pool members has `selected`. While this node does not read from a
/// gateway, a response without an `Age` gets one of 0 s, and the view does not count as fresh. A client with a `scope` reads
/// the resources of the scope, and a client without one reads everything.
pub(super) fn cache_router(
    cache: Arc<WatchCache>,
    selected: Option<watch::Receiver<Arc<SelectedSource>>>,
    scope: Option<Arc<AccessScope>>,
) -> Router {
    Router::new().fallback(move |request: Request| {
        let (cache, selected, scope) = (cache.clone(), selected.clone(), scope.clone());
        async move {
            // The request body is ignored, because the API cache is read-only.
            let (head, _) = request.into_parts();
            let mut response = cache
                .handle_request(&head, scope.as_deref())
                .await
                .map(Body::new);
            if selected.is_some_and(|at| !at.borrow().is_from_gateway()) {
                let age = response.headers_mut().entry(AGE);
                age.or_insert(HeaderValue::from_static("0"));
            }
            response
        }
    })
}

/// Listener for this node's programs, with its certificate if it uses TLS.
pub(super) struct LocalServer {
    pub(super) listener: TcpListener,
    pub(super) certificate: Option<watch::Receiver<Option<ServerOnlyTls>>>,
}

impl LocalServer {
    /// Serves the programs of this machine until `stop`.
    pub(super) async fn run(
        self,
        (router, node): (Router, String),
        metrics: Arc<Metrics>,
        stop: CancellationToken,
    ) {
        let Self {
            listener,
            certificate: shown,
        } = self;
        let allowed_hosts = Arc::new(AllowedHosts {
            address: listener.local_addr().map(|address| address.ip()).ok(),
            node,
            certificate: shown.clone(),
        });
        let router = router.layer(middleware::from_fn(move |request, next| {
            check_host(allowed_hosts.clone(), request, next)
        }));
        let Some(certificate) = shown else {
            let limit = metrics.connection_limit("reader_endpoint", MAX_CONNECTIONS);
            return serve_plain(limit, listener, router, stop).await;
        };
        let acceptor = QuotaAcceptor {
            listener,
            policy: Arc::new(AnyClient(certificate)),
            client_kind: "program",
            metrics,
            max_connections: MAX_CONNECTIONS,
            // All programs count as one client.
            max_per_client: MAX_CONNECTIONS,
        };
        acceptor.run(router, stop).await;
    }
}

async fn serve_plain(
    limit: ConnectionLimit,
    listener: TcpListener,
    router: Router,
    stop: CancellationToken,
) {
    let listener = LimitedListener::new(limit, listener, stop.clone());
    let router = router.layer(middleware::from_fn(hold_slot));
    let service = router.into_make_service_with_connect_info::<ConnectionPlace>();
    tokio::select! {
        served = async { axum::serve(listener, service).await } => {
            debug!(?served, "the API cache listener stopped");
        }
        () = stop.cancelled() => {}
    }
}

/// Policy that admits every program on this node, with the current certificate of the listener.
struct AnyClient(watch::Receiver<Option<ServerOnlyTls>>);

impl ClientPolicy for AnyClient {
    fn acceptor(&self) -> Result<TlsAcceptor, String> {
        let certificate = self.0.borrow();
        let certificate = certificate
            .as_ref()
            .ok_or("no certificate is available for this listener")?;
        Ok(certificate.server_config().into())
    }

    fn client_name(&self, _: &[CertificateDer<'_>]) -> Result<String, String> {
        Ok("a program on this node".to_owned())
    }

    /// Never returns, because the client has presented no certificate.
    fn wait_for_revocation(&self, _: PresentedChain) -> BoxFuture<'static, String> {
        Box::pin(pending())
    }
}
