//! Listener on the site network: members of one node pool read here, over TLS with the certificates of their nodes.
//!
//! A view from here is fresh only while this node itself reads from a gateway. When this node loses the gateway, it closes
//! the members' connections, so that the members select a source again. A client's membership is checked after the handshake,
//! and whenever the list of members changes. The connection of a node that is no longer a member is closed. Each handshake
//! uses the current identity of this node, so renewed certificates and new roots need no notification here.

use super::{
    membership::Membership,
    selected_source::SelectedSource,
    tls_acceptor::{ClientPolicy, PresentedChain, QuotaAcceptor},
};
use crate::{control::identity_store::IdentityStore, metrics::Metrics};
use causeway_certs::verify::PoolMemberTls;
use causeway_tunnel::control_stream::NodePoolMembers;
use futures_util::future::BoxFuture;
use rustls_pki_types::{CertificateDer, UnixTime};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{net::TcpListener, sync::watch, time::sleep};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tracing::info;

/// Returns the maximum number of connections. Each watch of a member uses one, and each list uses one for a moment.
const fn max_connections(resources: usize) -> usize {
    NodePoolMembers::MAX_MEMBERS * (resources + 1)
}

/// Returns the maximum number of connections of one member, including those that are still closing. The member may read more
/// resources than this node.
pub(super) fn max_per_member(resources: usize) -> usize {
    (4 * (resources + 1)).max(32)
}

/// Interval at which a connected member is checked again, because certificates expire and roots are removed.
const RECHECK_INTERVAL: Duration = Duration::from_mins(1);

/// Certificate and roots of this node on its site network. Cheap to clone.
#[derive(Clone)]
pub(super) struct MemberTls(Arc<Inner>);

struct Inner {
    identity_store: IdentityStore,
    membership: Membership,
    cached: Mutex<Option<Arc<MemberTlsPair>>>,
}

/// Server and client side of TLS for one identity.
pub(super) struct MemberTlsPair {
    tls: Arc<PoolMemberTls>,
    acceptor: TlsAcceptor,
    pub(super) connector: TlsConnector,
}

impl MemberTls {
    pub(super) fn new(identity_store: IdentityStore, membership: Membership) -> Self {
        let cached = Mutex::default();
        Self(Arc::new(Inner {
            identity_store,
            membership,
            cached,
        }))
    }

    /// Returns both sides of TLS for the current identity of this node.
    ///
    /// # Errors
    /// If the certificate of this node cannot be used on a site network.
    pub(super) fn current(&self) -> Result<Arc<MemberTlsPair>, String> {
        let identity = self.0.identity_store.identity();
        let mut cached = self.0.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cached_pair) = cached
            .as_ref()
            .filter(|made| made.tls.matches_identity(&identity))
        {
            return Ok(cached_pair.clone());
        }
        let build = || {
            let tls = PoolMemberTls::new(&identity, self.0.membership.is_member())?;
            Ok(MemberTlsPair {
                acceptor: tls.server_config()?.into(),
                connector: tls.client_config()?.into(),
                tls,
            })
        };
        let pair = build().map_err(|error: causeway_certs::verify::TrustError| {
            format!("this node's certificate cannot be used with pool members: {error}")
        })?;
        Ok(cached.insert(Arc::new(pair)).clone())
    }

    /// Returns the name of the node that has presented this chain, if the node is still a member.
    fn member_name(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        let member = self.current()?.tls.verify_member(chain, UnixTime::now());
        member
            .map(|node| node.as_str().to_owned())
            .map_err(|error| error.to_string())
    }
}

/// Admission policy for pool members.
pub(super) struct MemberClients {
    pub(super) tls: MemberTls,
    pub(super) selected: watch::Receiver<Arc<SelectedSource>>,
}

impl MemberClients {
    /// Returns an acceptor that admits these clients. Its connection limits grow with the number of cached resources.
    pub(super) fn into_acceptor(
        self,
        listener: TcpListener,
        resource_count: usize,
        metrics: Arc<Metrics>,
    ) -> QuotaAcceptor {
        QuotaAcceptor {
            listener,
            policy: Arc::new(self),
            client_kind: "neighbour",
            metrics,
            max_connections: max_connections(resource_count),
            max_per_client: max_per_member(resource_count),
        }
    }
}

impl ClientPolicy for MemberClients {
    fn acceptor(&self) -> Result<TlsAcceptor, String> {
        Ok(self.tls.current()?.acceptor.clone())
    }

    fn client_name(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        self.tls.member_name(chain)
    }

    fn wait_for_revocation(&self, chain: PresentedChain) -> BoxFuture<'static, String> {
        let (tls, selected) = (self.tls.clone(), self.selected.clone());
        Box::pin(async move {
            tokio::select! {
                why = wait_until_revoked(&tls, &chain) => {
                    info!(why, "closing the connection of a node that is no longer a pool member");
                    why
                }
                () = wait_until_upstream_lost(selected) => "this node no longer reads from a gateway".to_owned(),
            }
        })
    }
}

/// Returns when this node stops reading from a gateway after it has read from one. The clients must then select a source
/// again.
async fn wait_until_upstream_lost(mut selected: watch::Receiver<Arc<SelectedSource>>) {
    // The source selector lives at least as long as this task.
    let _ = selected.wait_for(|at| at.is_from_gateway()).await;
    let _ = selected.wait_for(|at| !at.is_from_gateway()).await;
}

/// Returns the reason once the node of this chain is no longer a member.
async fn wait_until_revoked(tls: &MemberTls, chain: &[CertificateDer<'_>]) -> String {
    let mut membership_changes = tls.0.membership.changes();
    loop {
        if let Err(why) = tls.member_name(chain) {
            return why;
        }
        tokio::select! {
            changed = membership_changes.changed() => if changed.is_err() {
                return "this edge is stopping".to_owned();
            },
            () = sleep(RECHECK_INTERVAL) => {}
        }
    }
}
