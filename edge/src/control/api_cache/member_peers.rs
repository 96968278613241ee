//! Connections to the other members of the pool for requests that do not concern the cache, over TLS with the nodes'
//! certificates.

use super::{member_server::MemberTls, member_source::MemberSource, membership::Membership};
use causeway_rt::task::TaskGroup;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// The other members of the pool, as a gateway announced them last.
pub(crate) struct MemberPeers {
    own_node: String,
    membership: Membership,
    tls: MemberTls,
    tasks: Arc<TaskGroup>,
}

/// One of the other members.
pub(crate) struct MemberPeer(MemberSource);

impl MemberPeers {
    pub(super) fn new(
        own_node: &str,
        (membership, tls): (Membership, MemberTls),
        tasks: &Arc<TaskGroup>,
    ) -> Self {
        Self {
            own_node: own_node.to_owned(),
            membership,
            tls,
            tasks: tasks.clone(),
        }
    }

    /// Returns the other members that have an address.
    pub(crate) fn all(&self) -> Vec<MemberPeer> {
        let mut members = self.membership.current().members;
        members.retain(|member| member.node != self.own_node && !member.at.is_empty());
        let peer = |member| MemberSource::new(member, self.tls.clone(), self.tasks.clone());
        members.into_iter().map(peer).map(MemberPeer).collect()
    }
}

impl MemberPeer {
    pub(crate) fn node(&self) -> &str {
        &self.0.member.node
    }

    /// Connects to the first address of the member that answers.
    ///
    /// # Errors
    /// If none answers.
    pub(crate) async fn connect(&self) -> Result<TlsStream<TcpStream>, String> {
        self.0.dial().await
    }
}
