//! Connections between pool members while a node's certificate and roots change.

use super::super::{
    member_server::{MemberClients, MemberTls},
    membership::Membership,
    selected_source::{SelectedSource, SourceKind},
    tls_acceptor::{ClientPolicy, PresentedChain},
};
use super::world::{SOON, at, identity};
use crate::control::identity_store::IdentityStore;
use causeway_certs::{Ca, EdgeIdentity, Store, TrustDomain, store::OpenMode};
use causeway_tunnel::control_stream::NodePoolMembers;
use futures_util::FutureExt;
use rustls_pki_types::{CertificateDer, ServerName};
use std::sync::Arc;
use tempfile::TempDir;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

/// Node with the members of its pool and without sockets.
struct Node {
    held: IdentityStore,
    host: MemberClients,
    _data: TempDir,
    _at: watch::Sender<Arc<SelectedSource>>,
}

impl Node {
    fn new(ca: &Ca, name: &str) -> Self {
        let data = TempDir::new().unwrap();
        let store = Store::open(data.path(), OpenMode::Create).unwrap();
        let told = Membership::load(&store);
        let nowhere = "127.0.0.1:9".parse().unwrap();
        told.updater("gateway").update(NodePoolMembers {
            pool: Some("north".into()),
            leader: None,
            members: ["edge-1", "edge-2"].map(|node| at(node, nowhere)).into(),
        });
        let held = IdentityStore::new(identity(ca, name), store);
        let tls = MemberTls::new(held.clone(), told);
        let (sender, at) = watch::channel(Arc::new(SelectedSource {
            generation: 0,
            kind: SourceKind::Unselected,
            source: None,
        }));
        Self {
            held,
            host: MemberClients { tls, selected: at },
            _data: data,
            _at: sender,
        }
    }

    /// Makes the node present a certificate of this CA from now on.
    async fn shows(&self, ca: &Ca) {
        let node = self.held.identity().node;
        let leaf = identity(ca, node.as_str()).leaf;
        let change = move |own: &mut EdgeIdentity| own.leaf = leaf;
        self.held.update(change).await.unwrap();
    }

    /// Makes the node trust these roots from now on.
    async fn believes(&self, roots: &[&Ca]) {
        let roots: Vec<_> = roots.iter().map(|ca| ca.root().clone()).collect();
        let change = move |own: &mut EdgeIdentity| own.roots = roots;
        self.held.update(change).await.unwrap();
    }

    /// Returns the chain that `other` presents to this node, and the certificate that this node presents. If the connection
    /// is refused, returns the reason.
    async fn receives(
        &self,
        other: &Self,
    ) -> Result<(PresentedChain, CertificateDer<'static>), String> {
        let (near, far) = tokio::io::duplex(16 * 1024);
        let name = self.held.identity().node.as_str().to_owned();
        let dials = other.host.tls.current()?.connector.clone();
        let (accepted, dialled) = tokio::join!(
            self.host.acceptor()?.accept(near),
            dials.connect(ServerName::try_from(name).unwrap(), far)
        );
        let (accepted, dialled) = match (accepted, dialled) {
            (Ok(accepted), Ok(dialled)) => (accepted, dialled),
            (Err(error), _) | (_, Err(error)) => return Err(error.to_string()),
        };
        let shown = |certificates: Option<&[CertificateDer<'static>]>| -> PresentedChain {
            certificates.unwrap_or_default().into()
        };
        let chain = shown(accepted.get_ref().1.peer_certificates());
        self.host.client_name(&chain)?;
        let own = shown(dialled.get_ref().1.peer_certificates());
        Ok((chain, own[0].clone()))
    }
}

#[tokio::test(start_paused = true)]
async fn renewed_certificates_and_roots_apply_to_an_open_listener() {
    let domain = TrustDomain::parse("test").unwrap();
    let (old, new) = (Ca::create(&domain).unwrap(), Ca::create(&domain).unwrap());
    let (one, two) = (Node::new(&old, "edge-1"), Node::new(&old, "edge-2"));
    let leaf = |node: &Node| node.held.identity().leaf.chain()[0].clone();
    let (first, shown) = one.receives(&two).await.unwrap();
    assert_eq!((&first[0], &shown), (&leaf(&two), &leaf(&one)));

    // Both certificates are renewed: open connections stay, and new connections use the new certificates.
    one.shows(&old).await;
    two.shows(&old).await;
    let (second, again) = one.receives(&two).await.unwrap();
    assert!(second[0] != first[0] && again != shown);
    assert_eq!((&second[0], &again), (&leaf(&two), &leaf(&one)));
    let mut goes = one.host.wait_for_revocation(first);
    assert_eq!(goes.as_mut().now_or_never(), None);

    // A root is added, which one node has before the other.
    one.believes(&[&old, &new]).await;
    two.believes(&[&old, &new]).await;
    two.shows(&new).await;
    let (third, _) = one.receives(&two).await.unwrap();
    two.receives(&one).await.unwrap();
    assert_eq!(goes.as_mut().now_or_never(), None);

    // The old root is removed. Only the connections of peers that presented a certificate of that root are closed.
    one.shows(&new).await;
    one.believes(&[&new]).await;
    let began = Instant::now();
    let why = timeout(6 * SOON, goes).await.expect("the connection ends");
    assert!(began.elapsed() <= 4 * SOON, "{:?}", began.elapsed());
    assert!(!why.is_empty());
    assert_eq!(one.host.wait_for_revocation(third).now_or_never(), None);
    one.receives(&two).await.unwrap();
    two.shows(&old).await;
    one.receives(&two).await.unwrap_err();
    two.receives(&one).await.unwrap_err();
}
