//! `YurtHub`s (`OpenYurt` v1.6.1 and later) read here as at a hub that leads them: list and watch, over TLS, with the certificate of a node of
//! their cluster.
//!
//! A hub goes elsewhere only when its request ends. So what it has open here is closed when this node falls out of touch with the
//! cloud and with whoever has it, and a watch that begins meanwhile is short: a hub whose own link stands, and which has been told so
//! (`leader-hub-POOL`), soon reads at the API itself, and one without a link comes back for the last state.

use super::{
    choose::{At, Who},
    door::{Chain, Host},
    endpoint,
};
use axum::{
    Router,
    extract::Request,
    http::{Uri, uri::PathAndQuery},
    middleware::{self, Next},
};
use causeway_certs::verify::Hubs;
use causeway_pool::Pool;
use futures_util::future::BoxFuture;
use rustls_pki_types::{CertificateDer, UnixTime};
use std::{sync::Arc, time::Duration};
use tokio::{sync::watch, time::sleep};
use tokio_rustls::TlsAcceptor;

/// Connections at once: a hub has one for each resource that it watches.
pub(super) const MOST: usize = 1024;
/// How often a hub that stays is looked at again: certificates end.
const AGAIN: Duration = Duration::from_mins(1);
/// The longest watch, in seconds, while this node is out of touch.
const SHORT: u64 = 30;
/// By what a client says how long its watch may last (`ListOptions` of `k8s.io/apimachinery`).
const TIMEOUT: &str = "timeoutSeconds";

/// Hubs, as they are let in.
pub(super) struct Guests {
    /// Whom this node believes, and what it shows, now.
    pub(super) known: watch::Receiver<Option<Hubs>>,
    pub(super) at: watch::Receiver<Arc<At>>,
}

impl Host for Guests {
    fn accepts(&self) -> Result<TlsAcceptor, String> {
        let known = self.known.borrow();
        let hubs = known.as_ref().ok_or("there is no certificate for hubs")?;
        Ok(hubs.server().into())
    }

    fn guest(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        guest(&self.known, chain)
    }

    fn goes(&self, chain: Chain) -> BoxFuture<'static, String> {
        let (mut known, mut at) = (self.known.clone(), self.at.clone());
        Box::pin(async move {
            let stranger = async {
                loop {
                    if let Err(why) = guest(&known, &chain) {
                        return why;
                    }
                    tokio::select! {
                        changed = known.changed() => if changed.is_err() {
                            return "this edge ends".to_owned();
                        },
                        () = sleep(AGAIN) => {}
                    }
                }
            };
            let lost = async {
                // Whoever chooses is there as long as this is.
                let _ = at.wait_for(|at| at.who != Who::Nobody).await;
                let _ = at.wait_for(|at| at.who == Who::Nobody).await;
            };
            tokio::select! {
                why = stranger => why,
                () = lost => "this node is out of touch".to_owned(),
            }
        })
    }
}

fn guest(
    known: &watch::Receiver<Option<Hubs>>,
    chain: &[CertificateDer<'_>],
) -> Result<String, String> {
    let known = known.borrow();
    let hubs = known.as_ref().ok_or("there is no certificate for hubs")?;
    let node = hubs.node(chain, UnixTime::now());
    node.map_err(|refused| refused.to_string())
}

/// What hubs are served.
pub(super) fn serving(pool: Arc<Pool>, at: watch::Receiver<Arc<At>>) -> Router {
    let bounded = move |mut request: Request, next: Next| {
        if at.borrow().who == Who::Nobody
            && let Some(uri) = bounded(request.uri())
        {
            *request.uri_mut() = uri;
        }
        next.run(request)
    };
    endpoint::serving(pool, None).layer(middleware::from_fn(bounded))
}

/// The same request, whose watch lasts no longer than [`SHORT`].
fn bounded(uri: &Uri) -> Option<Uri> {
    let query = uri.query().unwrap_or_default();
    let words = query.split('&').filter(|word| !word.is_empty());
    let of = |word: &&str| word.split('=').next() == Some(TIMEOUT);
    let said = words.clone().filter(of);
    let said = said.filter_map(|word| word.split_once('=')?.1.parse::<u64>().ok());
    // None, and nothing, are the server's own bound.
    let least = said.filter(|seconds| *seconds > 0).min().unwrap_or(SHORT);
    let kept = words.filter(|word| !of(word)).map(str::to_owned);
    let all: Vec<_> = kept
        .chain([format!("{TIMEOUT}={}", least.min(SHORT))])
        .collect();
    let text = format!("{}?{}", uri.path(), all.join("&"));
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(text).ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

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
