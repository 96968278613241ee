//! `YurtHub`s (`OpenYurt` v1.6.1 and later) read here as from a `YurtHub` that leads them: list and watch, over TLS, with
//! the certificate of a node of their cluster.
//!
//! A `YurtHub` selects another source only when its request ends. So its open requests here are closed when this node falls
//! out of touch with the cloud and with every member that is in touch. A watch that begins meanwhile is short. A `YurtHub`
//! whose own connection to the cloud stands, and which has been told so (`leader-hub-POOL`), soon reads at the API itself.
//! One without a connection comes back for the last state.

use super::{
    local_server,
    selected_source::{SelectedSource, SourceKind},
    tls_acceptor::{ClientPolicy, PresentedChain},
};
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
    sync::watch,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

/// Connections at once: a `YurtHub` has one for each resource that it watches.
pub(super) const MAX_CONNECTIONS: usize = 1024;
/// Of these, connections of the `YurtHub` of one node.
pub(super) const MAX_PER_CLIENT: usize = 128;
/// Interval of the checks of a `YurtHub` that stays connected: certificates end.
const AGAIN: Duration = Duration::from_mins(1);
/// Time without any tunnel, and without a member that has one, after which a node is out of touch.
const AWAY: Duration = Duration::from_secs(5);
/// The longest watch, in seconds, while this node has lost its source.
const SHORT_WATCH: u64 = 30;
/// By what a client says how long its watch may last (`ListOptions` of `k8s.io/apimachinery`).
const TIMEOUT: &str = "timeoutSeconds";

/// Connectivity of this node with the cloud, by itself or by another member.
#[derive(Clone)]
pub(super) struct UpstreamHealth {
    pub(super) at: watch::Receiver<Arc<SelectedSource>>,
    /// How many tunnels stand.
    pub(super) standing: watch::Receiver<usize>,
}

impl UpstreamHealth {
    fn is(&self) -> bool {
        match self.at.borrow().who {
            SourceKind::Nobody => false,
            SourceKind::Gateway => *self.standing.borrow() > 0,
            SourceKind::Leader(_) | SourceKind::Neighbour(_) => true,
        }
    }

    /// Waits for a change. False: this edge is stopping.
    async fn changed(&mut self) -> bool {
        tokio::select! {
            changed = self.at.changed() => changed.is_ok(),
            changed = self.standing.changed() => changed.is_ok(),
        }
    }

    /// Returns once it has been lost for a while, after it was there.
    async fn lost(mut self) {
        let mut was = false;
        loop {
            let is = self.is();
            if was && !is {
                match timeout(AWAY, self.changed()).await {
                    Ok(true) => continue,
                    Ok(false) | Err(_) => return,
                }
            }
            was |= is;
            if !self.changed().await {
                return;
            }
        }
    }
}

/// Admission policy for `YurtHub`s.
pub(super) struct YurtHubClients {
    /// Current certificate of this node and the roots that it trusts.
    pub(super) known: watch::Receiver<Option<YurtHubServerTls>>,
    pub(super) touch: UpstreamHealth,
}

impl ClientPolicy for YurtHubClients {
    fn accepts(&self) -> Result<TlsAcceptor, String> {
        let known = self.known.borrow();
        let hubs = known
            .as_ref()
            .ok_or("no certificate is available for YurtHubs")?;
        Ok(hubs.server().into())
    }

    fn guest(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        guest(&self.known, chain)
    }

    fn goes(&self, chain: PresentedChain) -> BoxFuture<'static, String> {
        let (mut known, touch) = (self.known.clone(), self.touch.clone());
        Box::pin(async move {
            let stranger = async {
                loop {
                    if let Err(why) = guest(&known, &chain) {
                        return why;
                    }
                    tokio::select! {
                        changed = known.changed() => if changed.is_err() {
                            return "this edge is stopping".to_owned();
                        },
                        () = sleep(AGAIN) => {}
                    }
                }
            };
            tokio::select! {
                why = stranger => why,
                () = touch.lost() => "this node has lost its source".to_owned(),
            }
        })
    }
}

fn guest(
    known: &watch::Receiver<Option<YurtHubServerTls>>,
    chain: &[CertificateDer<'_>],
) -> Result<String, String> {
    let known = known.borrow();
    let hubs = known
        .as_ref()
        .ok_or("no certificate is available for YurtHubs")?;
    let node = hubs.node(chain, UnixTime::now());
    node.map_err(|refused| refused.to_string())
}

/// Returns the router for `YurtHub`s, which serves these resources.
pub(super) fn serving(
    pool: Arc<WatchCache>,
    resources: Vec<GroupVersionResource>,
    touch: UpstreamHealth,
) -> Router {
    let bounded = move |mut request: Request, next: Next| {
        if !touch.is()
            && let Some(uri) = bounded(request.uri())
        {
            *request.uri_mut() = uri;
        }
        next.run(request)
    };
    let grant = Arc::new(AccessScope {
        resources,
        namespaces: None,
    });
    local_server::serve_options(pool, None, Some(grant)).layer(middleware::from_fn(bounded))
}

/// The same request, whose watch lasts no longer than [`SHORT`].
fn bounded(uri: &Uri) -> Option<Uri> {
    let query = uri.query().unwrap_or_default();
    let words = query.split('&').filter(|word| !word.is_empty());
    let of = |word: &&str| word.split('=').next() == Some(TIMEOUT);
    let said = words.clone().filter(of);
    let said = said.filter_map(|word| word.split_once('=')?.1.parse::<u64>().ok());
    // A missing value and 0 mean the server's own timeout.
    let least = said
        .filter(|seconds| *seconds > 0)
        .min()
        .unwrap_or(SHORT_WATCH);
    let kept = words.filter(|word| !of(word)).map(str::to_owned);
    let all: Vec<_> = kept
        .chain([format!("{TIMEOUT}={}", least.min(SHORT_WATCH))])
        .collect();
    let text = format!("{}?{}", uri.path(), all.join("&"));
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
            who,
            ..SelectedSource::clone(&SelectedSource::nobody())
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_without_neighbours_goes_stale_after_its_last_tunnel() {
        let (who, heard) = watch::channel(at(SourceKind::Nobody));
        let (tunnels, standing) = watch::channel(0);
        let touch = UpstreamHealth {
            at: heard,
            standing,
        };
        assert!(!touch.is());
        let lost = touch.clone().lost();
        let began = Instant::now();
        let changes = async {
            who.send_replace(at(SourceKind::Gateway));
            tunnels.send_replace(1);
            sleep(Duration::from_mins(1)).await;
            assert!(touch.is());
            tunnels.send_replace(0);
            sleep(AWAY / 2).await;
            assert!(!touch.is());
            // It reconnected in time.
            tunnels.send_replace(1);
            sleep(Duration::from_mins(1)).await;
            tunnels.send_replace(0);
        };
        tokio::join!(lost, changes);
        assert_eq!(began.elapsed(), Duration::from_mins(2) + AWAY / 2 + AWAY);
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
            let uri = bounded(&asked.parse().unwrap()).unwrap();
            assert_eq!(uri.query(), Some(answered), "{asked}");
            assert_eq!(uri.path(), "/api/v1/services");
        }
    }
}
