//! The site network: neighbours of one pool read here, over TLS with the nodes' own certificates.
//!
//! A view from here is fresh only while this node reads at a gateway itself; when it does not any more, its neighbours are closed,
//! to ask anew. Who comes is asked again after the handshake, and whenever the list of members changes: whoever is no member any more is
//! closed. What this node shows and believes is its identity as it is at each handshake, so a renewed certificate and another root
//! need no word here.

use super::{
    choose::At,
    door::{Chain, Host},
    told::Told,
};
use crate::control::held::Held;
use causeway_certs::verify::Site;
use causeway_tunnel::hello::Members;
use futures_util::future::BoxFuture;
use rustls_pki_types::{CertificateDer, UnixTime};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{sync::watch, time::sleep};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tracing::info;

/// Connections at once: each watch of a member is one, and each list for a moment.
pub(super) const fn most(resources: usize) -> usize {
    Members::MOST * (resources + 1)
}

/// Of these, for one member, with what has not ended yet; it may read more resources than this node.
pub(super) fn each(resources: usize) -> usize {
    (4 * (resources + 1)).max(32)
}

/// How often a neighbour that stays is looked at again: certificates end, and roots go out of use.
const AGAIN: Duration = Duration::from_mins(1);

/// What this node shows and believes on its site network. Cheap to clone.
#[derive(Clone)]
pub(super) struct Tls(Arc<Inner>);

struct Inner {
    held: Held,
    told: Told,
    made: Mutex<Option<Arc<Made>>>,
}

/// Both ends, of one identity.
pub(super) struct Made {
    site: Arc<Site>,
    accepts: TlsAcceptor,
    pub(super) dials: TlsConnector,
}

impl Tls {
    pub(super) fn new(held: Held, told: Told) -> Self {
        let made = Mutex::default();
        Self(Arc::new(Inner { held, told, made }))
    }

    /// Both ends as this node is now.
    ///
    /// # Errors
    /// If its certificate has no place on a site network.
    pub(super) fn now(&self) -> Result<Arc<Made>, String> {
        let identity = self.0.held.identity();
        let mut made = self.0.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = made.as_ref().filter(|made| made.site.is_of(&identity)) {
            return Ok(made.clone());
        }
        let build = || {
            let site = Site::new(&identity, self.0.told.is_member())?;
            Ok(Made {
                accepts: site.server()?.into(),
                dials: site.client()?.into(),
                site,
            })
        };
        let both = build().map_err(|error: causeway_certs::verify::TrustError| {
            format!("this node's certificate is not for its neighbours: {error}")
        })?;
        Ok(made.insert(Arc::new(both)).clone())
    }

    /// The node that has shown this, if it is a neighbour still.
    fn neighbour(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        let member = self.now()?.site.member(chain, UnixTime::now());
        member
            .map(|node| node.as_str().to_owned())
            .map_err(|refused| refused.to_string())
    }
}

/// Where neighbours come in.
pub(super) struct Neighbours {
    pub(super) tls: Tls,
    pub(super) at: watch::Receiver<Arc<At>>,
}

impl Host for Neighbours {
    fn accepts(&self) -> Result<TlsAcceptor, String> {
        Ok(self.tls.now()?.accepts.clone())
    }

    fn guest(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        self.tls.neighbour(chain)
    }

    fn goes(&self, chain: Chain) -> BoxFuture<'static, String> {
        let (tls, at) = (self.tls.clone(), self.at.clone());
        Box::pin(async move {
            tokio::select! {
                why = turns_stranger(&tls, &chain) => {
                    info!(why, "no neighbour any more: its connection is closed");
                    why
                }
                () = loses_touch(at) => "this node does not read at a gateway any more".to_owned(),
            }
        })
    }
}

/// Returns when this node, which has read at a gateway, does not any more: whoever reads here is to ask anew.
async fn loses_touch(mut at: watch::Receiver<Arc<At>>) {
    // Whoever chooses is there as long as this is.
    let _ = at.wait_for(|at| at.is_first_hand()).await;
    let _ = at.wait_for(|at| !at.is_first_hand()).await;
}

/// Returns once this is no neighbour's any more, with why.
async fn turns_stranger(tls: &Tls, chain: &[CertificateDer<'_>]) -> String {
    let mut told = tls.0.told.changes();
    loop {
        if let Err(why) = tls.neighbour(chain) {
            return why;
        }
        tokio::select! {
            changed = told.changed() => if changed.is_err() {
                return "this edge ends".to_owned();
            },
            () = sleep(AGAIN) => {}
        }
    }
}
