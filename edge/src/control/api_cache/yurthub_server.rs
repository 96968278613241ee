//! Listener for `YurtHub`s (`OpenYurt` v1.6.1 and later), which read here as from a leader `YurtHub`. They list and watch over
//! TLS, with the certificate of a node of their cluster.
//!
//! A `YurtHub` selects another source only when its request ends. So this node closes their open requests when it has lost
//! both the cloud and every member that is connected with the cloud. A watch that begins meanwhile is short. A `YurtHub` with
//! its own connection to the cloud soon reads from the API itself, once `leader-hub-POOL` has informed it. A `YurtHub`
//! without a connection comes back for the last state.

use super::{
    local_server,
    selected_source::{SelectedSource, SourceKind},
    tls_acceptor::{ClientPolicy, PresentedChain, QuotaAcceptor},
};
use crate::metrics::Metrics;
use axum::{
    Router,
    extract::Request,
    http::{Uri, uri::PathAndQuery},
    middleware::{self, Next},
};
use causeway_certs::verify::YurtHubServerTls;
use causeway_watch_cache::{AccessScope, GroupVersionResource, WatchCache};
use futures_util::future::BoxFuture;
use rustls_pki_types::{CertificateDer, UnixTime};
use std::{sync::Arc, time::Duration};
use tokio::{
    net::TcpListener,
    sync::watch,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

/// Maximum number of connections. A `YurtHub` has one for each resource that it watches.
const MAX_CONNECTIONS: usize = 1024;
/// Maximum number of connections of the `YurtHub` of one node.
const MAX_PER_CLIENT: usize = 128;
/// Interval at which a connected `YurtHub` is checked again, because certificates expire.
const RECHECK_INTERVAL: Duration = Duration::from_mins(1);
/// Time without any tunnel, and without a member that has one, after which a node counts as disconnected.
const LOST_AFTER: Duration = Duration::from_secs(5);
/// Maximum duration of a watch, in seconds, while this node has lost its source.
const MAX_WATCH_WHILE_LOST_SECS: u64 = 30;
/// Query parameter with the maximum duration of a watch (`ListOptions` of `k8s.io/apimachinery`).
const TIMEOUT_PARAM: &str = "timeoutSeconds";

/// Connectivity of this node with the cloud, by itself or by another member.
#[derive(Clone)]
pub(super) struct UpstreamHealth {
    pub(super) selected: watch::Receiver<Arc<SelectedSource>>,
    /// Number of open tunnels.
    pub(super) tunnel_count: watch::Receiver<usize>,
}

impl UpstreamHealth {
    fn is_connected(&self) -> bool {
        match self.selected.borrow().kind {
            SourceKind::Unselected => false,
            SourceKind::Gateway => *self.tunnel_count.borrow() > 0,
            SourceKind::Leader(_) | SourceKind::Member(_) => true,
        }
    }

    /// Waits for a change. Returns false if this edge is stopping.
    async fn changed(&mut self) -> bool {
        tokio::select! {
            changed = self.selected.changed() => changed.is_ok(),
            changed = self.tunnel_count.changed() => changed.is_ok(),
        }
    }

    /// Returns once the connection has been lost for [`LOST_AFTER`] after it was established.
    async fn wait_until_lost(mut self) {
        let mut was_connected = false;
        loop {
            let is_connected = self.is_connected();
            if was_connected && !is_connected {
                match timeout(LOST_AFTER, self.changed()).await {
                    Ok(true) => continue,
                    Ok(false) | Err(_) => return,
                }
            }
            was_connected |= is_connected;
            if !self.changed().await {
                return;
            }
        }
    }
}

/// Admission policy for `YurtHub`s.
pub(super) struct YurtHubClients {
    /// Current certificate of the listener, and the roots for the clients' certificates.
    pub(super) tls: watch::Receiver<Option<YurtHubServerTls>>,
    pub(super) health: UpstreamHealth,
}

impl YurtHubClients {
    /// Returns an acceptor that admits these clients.
    pub(super) fn into_acceptor(
        self,
        listener: TcpListener,
        metrics: Arc<Metrics>,
    ) -> QuotaAcceptor {
        QuotaAcceptor {
            listener,
            policy: Arc::new(self),
            client_kind: "hub",
            metrics,
            max_connections: MAX_CONNECTIONS,
            max_per_client: MAX_PER_CLIENT,
        }
    }
}

impl ClientPolicy for YurtHubClients {
    fn acceptor(&self) -> Result<TlsAcceptor, String> {
        let current = self.tls.borrow();
        let server_tls = current
            .as_ref()
            .ok_or("no certificate is available for YurtHubs")?;
        Ok(server_tls.server_config().into())
    }

    fn client_name(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        client_node(&self.tls, chain)
    }

    fn wait_for_revocation(&self, chain: PresentedChain) -> BoxFuture<'static, String> {
        let (mut tls, health) = (self.tls.clone(), self.health.clone());
        Box::pin(async move {
            let revoked = async {
                loop {
                    if let Err(why) = client_node(&tls, &chain) {
                        return why;
                    }
                    tokio::select! {
                        changed = tls.changed() => if changed.is_err() {
                            return "this edge is stopping".to_owned();
                        },
                        () = sleep(RECHECK_INTERVAL) => {}
                    }
                }
            };
            tokio::select! {
                why = revoked => why,
                () = health.wait_until_lost() => "this node has lost its source".to_owned(),
            }
        })
    }
}

fn client_node(
    tls: &watch::Receiver<Option<YurtHubServerTls>>,
    chain: &[CertificateDer<'_>],
) -> Result<String, String> {
    let current = tls.borrow();
    let server_tls = current
        .as_ref()
        .ok_or("no certificate is available for YurtHubs")?;
    let node = server_tls.verify_node(chain, UnixTime::now());
    node.map_err(|refused| refused.to_string())
}

/// Returns the router for `YurtHub`s, which serves these resources.
pub(super) fn router(
    cache: Arc<WatchCache>,
    resources: Vec<GroupVersionResource>,
    health: UpstreamHealth,
) -> Router {
    let limit_watches = move |mut request: Request, next: Next| {
        if !health.is_connected()
            && let Some(uri) = limit_watch(request.uri())
        {
            *request.uri_mut() = uri;
        }
        next.run(request)
    };
    let grant = Arc::new(AccessScope {
        resources,
        namespaces: None,
    });
    local_server::cache_router(cache, None, Some(grant)).layer(middleware::from_fn(limit_watches))
}

/// Returns the URI of the same request with a timeout of at most [`MAX_WATCH_WHILE_LOST_SECS`].
fn limit_watch(uri: &Uri) -> Option<Uri> {
    let query = uri.query().unwrap_or_default();
    let params = query.split('&').filter(|word| !word.is_empty());
    let is_timeout = |param: &&str| param.split('=').next() == Some(TIMEOUT_PARAM);
    let timeouts = params.clone().filter(is_timeout);
    let timeouts = timeouts.filter_map(|word| word.split_once('=')?.1.parse::<u64>().ok());
    // A missing value and 0 mean the server's own timeout.
    let requested = timeouts
        .filter(|seconds| *seconds > 0)
        .min()
        .unwrap_or(MAX_WATCH_WHILE_LOST_SECS);
    let others = params.filter(|word| !is_timeout(word)).map(str::to_owned);
    let new_params: Vec<_> = others
        .chain([format!(
            "{TIMEOUT_PARAM}={}",
            requested.min(MAX_WATCH_WHILE_LOST_SECS)
        )])
        .collect();
    let text = format!("{}?{}", uri.path(), new_params.join("&"));
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(text).ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    fn at(who: SourceKind) -> Arc<SelectedSource> {
        Arc::new(SelectedSource {
            kind: who,
            ..SelectedSource::clone(&SelectedSource::unselected())
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_without_neighbours_goes_stale_after_its_last_tunnel() {
        let (who, heard) = watch::channel(at(SourceKind::Unselected));
        let (tunnels, standing) = watch::channel(0);
        let touch = UpstreamHealth {
            selected: heard,
            tunnel_count: standing,
        };
        assert!(!touch.is_connected());
        let lost = touch.clone().wait_until_lost();
        let began = Instant::now();
        let changes = async {
            who.send_replace(at(SourceKind::Gateway));
            tunnels.send_replace(1);
            sleep(Duration::from_mins(1)).await;
            assert!(touch.is_connected());
            tunnels.send_replace(0);
            sleep(LOST_AFTER / 2).await;
            assert!(!touch.is_connected());
            // It reconnected in time.
            tunnels.send_replace(1);
            sleep(Duration::from_mins(1)).await;
            tunnels.send_replace(0);
        };
        tokio::join!(lost, changes);
        assert_eq!(
            began.elapsed(),
            Duration::from_mins(2) + LOST_AFTER / 2 + LOST_AFTER
        );
    }

    #[test]
    fn a_watch_at_a_node_that_is_out_of_touch_is_short() {
        for (asked, answered) in [
            (
                "/api/v1/services?watch=true",
                "watch=true&timeoutSeconds=30",
            ),
            ("/api/v1/services", "timeoutSeconds=30"),
            (
                "/api/v1/services?timeoutSeconds=577&watch=1&resourceVersion=7",
                "watch=1&resourceVersion=7&timeoutSeconds=30",
            ),
            (
                "/api/v1/services?timeoutSeconds=5&watch=1",
                "watch=1&timeoutSeconds=5",
            ),
            ("/api/v1/services?timeoutSeconds=0", "timeoutSeconds=30"),
            ("/api/v1/services?timeoutSeconds=x", "timeoutSeconds=30"),
        ] {
            let uri = limit_watch(&asked.parse().unwrap()).unwrap();
            assert_eq!(uri.query(), Some(answered), "{asked}");
            assert_eq!(uri.path(), "/api/v1/services");
        }
    }
}
