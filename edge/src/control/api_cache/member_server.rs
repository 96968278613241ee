//! The site network: members of one node pool read here, over TLS with the nodes' own certificates.
//!
//! A view from here is fresh only while this node reads at a gateway itself. When it does not any more, the connections of
//! the members are closed, so that they select a source anew. A client's membership is checked after the handshake, and
//! whenever the list of members changes. The connection of a node that is no longer a member is closed. This node uses its
//! current identity at each handshake, so a renewed certificate and another root need no notification here.

use super::{
    membership::Membership,
    selected_source::SelectedSource,
    tls_acceptor::{ClientPolicy, PresentedChain},
};
use crate::control::identity_store::IdentityStore;
use causeway_certs::verify::PoolMemberTls;
use causeway_tunnel::control_stream::NodePoolMembers;
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
pub(super) const fn max_connections(resources: usize) -> usize {
    NodePoolMembers::MOST * (resources + 1)
}

/// Of these, for one member, with what has not ended yet; it may read more resources than this node.
pub(super) fn max_per_member(resources: usize) -> usize {
    (4 * (resources + 1)).max(32)
}

/// Interval of the checks of a member that stays connected: certificates end, and roots go out of use.
const AGAIN: Duration = Duration::from_mins(1);

/// Certificate and roots of this node on its site network. Cheap to clone.
#[derive(Clone)]
pub(super) struct MemberTls(Arc<Inner>);

struct Inner {
    held: IdentityStore,
    told: Membership,
    made: Mutex<Option<Arc<MemberTlsPair>>>,
}

/// Both ends, of one identity.
pub(super) struct MemberTlsPair {
    site: Arc<PoolMemberTls>,
    accepts: TlsAcceptor,
    pub(super) dials: TlsConnector,
}

impl MemberTls {
    pub(super) fn new(held: IdentityStore, told: Membership) -> Self {
        let made = Mutex::default();
        Self(Arc::new(Inner { held, told, made }))
    }

    /// Both ends as this node is now.
    ///
    /// # Errors
    /// If its certificate has no place on a site network.
    pub(super) fn now(&self) -> Result<Arc<MemberTlsPair>, String> {
        let identity = self.0.held.identity();
        let mut made = self.0.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = made.as_ref().filter(|made| made.site.is_of(&identity)) {
            return Ok(made.clone());
        }
        let build = || {
            let site = PoolMemberTls::new(&identity, self.0.told.is_member())?;
            Ok(MemberTlsPair {
                accepts: site.server()?.into(),
                dials: site.client()?.into(),
                site,
            })
        };
        let both = build().map_err(|error: causeway_certs::verify::TrustError| {
            format!("this node's certificate cannot be used with pool members: {error}")
        })?;
        Ok(made.insert(Arc::new(both)).clone())
    }

    /// Returns the node that has presented this chain, if it is still a member.
    fn neighbour(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        let member = self.now()?.site.member(chain, UnixTime::now());
        member
            .map(|node| node.as_str().to_owned())
            .map_err(|refused| refused.to_string())
    }
}

/// Admission policy for pool members.
pub(super) struct MemberClients {
    pub(super) tls: MemberTls,
    pub(super) at: watch::Receiver<Arc<SelectedSource>>,
}

impl ClientPolicy for MemberClients {
    fn accepts(&self) -> Result<TlsAcceptor, String> {
        Ok(self.tls.now()?.accepts.clone())
    }

    fn guest(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        self.tls.neighbour(chain)
    }

    fn goes(&self, chain: PresentedChain) -> BoxFuture<'static, String> {
        let (tls, at) = (self.tls.clone(), self.at.clone());
        Box::pin(async move {
            tokio::select! {
                why = membership_revoked(&tls, &chain) => {
                    info!(why, "closing the connection of a node that is no longer a pool member");
                    why
                }
                () = upstream_lost(at) => "this node no longer reads from a gateway".to_owned(),
            }
        })
    }
}

/// Returns when this node, which has read at a gateway, does not any more: its clients are then to select a source anew.
async fn upstream_lost(mut at: watch::Receiver<Arc<SelectedSource>>) {
    // The source selector lives at least as long as this task.
    let _ = at.wait_for(|at| at.is_first_hand()).await;
    let _ = at.wait_for(|at| !at.is_first_hand()).await;
}

/// Returns the reason once this chain is no longer that of a member.
async fn membership_revoked(tls: &MemberTls, chain: &[CertificateDer<'_>]) -> String {
    let mut told = tls.0.told.changes();
    loop {
        if let Err(why) = tls.neighbour(chain) {
            return why;
        }
        tokio::select! {
            changed = told.changed() => if changed.is_err() {
                return "this edge is stopping".to_owned();
            },
            () = sleep(AGAIN) => {}
        }
    }
}
