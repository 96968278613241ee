//! Listener for this node's programs: Kubernetes' own API over HTTP/1.1 or HTTP/2, with TLS or without, on loopback.
//!
//! It has no authentication and serves only reads. A page in a browser on this machine does not read it under a name of its
//! own (`listen`): over TLS the names of the certificate count.

use super::{
    selected_source::SelectedSource,
    tls_acceptor::{ClientPolicy, PresentedChain, QuotaAcceptor},
};
use crate::{
    control::http_server::{
        AllowedHosts, ConnectionPlace, LimitedListener, check_host, keep_place,
    },
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

/// Connections at once: a node's kube-proxy, name server and some more have a few each.
const MOST: usize = 256;

/// Returns the router of a listener. For pool members (`at`) a view that comes from another member is marked as out of
/// touch, though not for long. A client with a `grant` reads the resources of the grant, and a client without one
/// everything.
pub(super) fn serve_options(
    pool: Arc<WatchCache>,
    at: Option<watch::Receiver<Arc<SelectedSource>>>,
    grant: Option<Arc<AccessScope>>,
) -> Router {
    Router::new().fallback(move |request: Request| {
        let (pool, at, grant) = (pool.clone(), at.clone(), grant.clone());
        async move {
            // The request body is ignored, because the API cache is read-only.
            let (head, _) = request.into_parts();
            let mut answer = pool.answer(&head, grant.as_deref()).await.map(Body::new);
            if at.is_some_and(|at| !at.borrow().is_first_hand()) {
                let age = answer.headers_mut().entry(AGE);
                age.or_insert(HeaderValue::from_static("0"));
            }
            answer
        }
    })
}

/// The listener, with what is shown there if programs read over TLS.
pub(super) struct LocalServer {
    pub(super) listener: TcpListener,
    pub(super) shown: Option<watch::Receiver<Option<ServerOnlyTls>>>,
}

impl LocalServer {
    /// Serves this machine until `stop`.
    pub(super) async fn run(
        self,
        (router, node): (Router, String),
        metrics: Arc<Metrics>,
        stop: CancellationToken,
    ) {
        let Self { listener, shown } = self;
        let own = Arc::new(AllowedHosts {
            address: listener.local_addr().map(|address| address.ip()).ok(),
            node,
            shown: shown.clone(),
        });
        let router = router.layer(middleware::from_fn(move |request, next| {
            check_host(own.clone(), request, next)
        }));
        let Some(shown) = shown else {
            let places = metrics.connection_limit("reader_endpoint", MOST);
            return plain(places, listener, router, stop).await;
        };
        let door = QuotaAcceptor {
            listener,
            host: Arc::new(AnyClient(shown)),
            guests: "program",
            metrics,
            most: MOST,
            // All programs count as one client.
            each: MOST,
        };
        door.run(router, stop).await;
    }
}

async fn plain(
    limit: ConnectionLimit,
    listener: TcpListener,
    router: Router,
    stop: CancellationToken,
) {
    let listener = LimitedListener::new(limit, listener, stop.clone());
    let router = router.layer(middleware::from_fn(keep_place));
    let service = router.into_make_service_with_connect_info::<ConnectionPlace>();
    tokio::select! {
        served = async { axum::serve(listener, service).await } => {
            debug!(?served, "the API cache listener stopped");
        }
        () = stop.cancelled() => {}
    }
}

/// This node's own programs: any of them, by what it is shown now.
struct AnyClient(watch::Receiver<Option<ServerOnlyTls>>);

impl ClientPolicy for AnyClient {
    fn accepts(&self) -> Result<TlsAcceptor, String> {
        let shown = self.0.borrow();
        let shown = shown
            .as_ref()
            .ok_or("no certificate is available for this listener")?;
        Ok(shown.server().into())
    }

    fn guest(&self, _: &[CertificateDer<'_>]) -> Result<String, String> {
        Ok("a program on this node".to_owned())
    }

    /// It has shown nothing that could end.
    fn goes(&self, _: PresentedChain) -> BoxFuture<'static, String> {
        Box::pin(pending())
    }
}
