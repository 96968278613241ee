//! Where this node's programs read: Kubernetes' own API over HTTP/1.1 or HTTP/2 without TLS, on loopback.
//!
//! It knows no callers and serves nothing but reading. A page in a browser on this machine does not read it under a name of its
//! own (`listen`).

use super::choose::At;
use crate::control::listen::{Any, Own, guard};
use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderValue, header::AGE},
    middleware,
};
use causeway_pool::{Grant, Pool};
use std::sync::Arc;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// Connections at once: a node's kube-proxy, name server and some more have a few each.
const MOST: usize = 256;

/// What is served here; to neighbours (`at`) a view that comes from another one of them is as one that is out of touch, though
/// not for long. Who has a `grant` reads what that says, and who has none everything.
pub(super) fn serving(
    pool: Arc<Pool>,
    at: Option<watch::Receiver<Arc<At>>>,
    grant: Option<Arc<Grant>>,
) -> Router {
    Router::new().fallback(move |request: Request| {
        let (pool, at, grant) = (pool.clone(), at.clone(), grant.clone());
        async move {
            // What comes with a question is not looked at: there is nothing to write.
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

/// Serves this machine until `stop`.
pub(super) async fn run(
    listener: TcpListener,
    (router, node): (Router, String),
    stop: CancellationToken,
) {
    let address = listener.local_addr().map(|address| address.ip()).ok();
    let own = Arc::new(Own { address, node });
    let router = router.layer(middleware::from_fn(move |request, next| {
        guard(own.clone(), request, next)
    }));
    let listener = Any::at_most(MOST, listener, stop.clone());
    tokio::select! {
        served = async { axum::serve(listener, router).await } => {
            debug!(?served, "the reader's endpoint ended");
        }
        () = stop.cancelled() => {}
    }
}
