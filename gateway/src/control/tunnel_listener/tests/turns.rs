//! Turns of handshakes: the work of a handshake is done in its turn.

use super::super::tls::Tls;
use crate::control::tests::world::{identity, new_ca, shown};
use causeway_certs::{TrustStore, install_provider, verify, verify::TicketSecret};
use causeway_rt::{socket::Socket, task::TaskGroup, turns::Turns};
use rustls::{
    ClientConnection,
    pki_types::ServerName,
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    task::yield_now,
};
use tracing::Span;

const PER_TURN: usize = 2;
const ALL: usize = 100;

/// Resolver that counts the handshakes which are computed.
#[derive(Debug)]
struct CountingResolver {
    resolver: Arc<dyn ResolvesServerCert>,
    count: AtomicUsize,
}

impl ResolvesServerCert for CountingResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.count.fetch_add(1, SeqCst);
        self.resolver.resolve(hello)
    }
}

#[tokio::test]
async fn other_tasks_run_between_a_few_handshakes() {
    install_provider();
    let ca = new_ca("test.example");
    let resolver = Arc::new(CountingResolver {
        resolver: shown(&ca).resolver(),
        count: AtomicUsize::new(0),
    });
    let trust = TrustStore::from_ca(&ca).unwrap();
    let tls = Tls::new(resolver.clone(), trust, &TicketSecret::random());
    let (tls, turns) = (Arc::new(tls.unwrap()), Arc::new(Turns::new(PER_TURN)));
    let client = verify::tunnel_client(&identity(&ca, "edge-1")).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tasks = TaskGroup::default();
    let (mut peers, mut sockets) = (Vec::new(), Vec::new());
    for _ in 0..ALL {
        let name = ServerName::from(address.ip());
        let mut hello = Vec::new();
        let mut connection = ClientConnection::new(client.clone(), name).unwrap();
        connection.write_tls(&mut hello).unwrap();
        let mut peer = TcpStream::connect(address).await.unwrap();
        peer.write_all(&hello).await.unwrap();
        peers.push(peer);
        let (tcp, _) = listener.accept().await.unwrap();
        sockets.push(Socket::from(tcp));
    }
    for socket in sockets {
        let (tls, turns) = (tls.clone(), turns.clone());
        tasks.spawn(Span::none(), async move {
            let slot = async { Ok(((), turns.acquire().await)) };
            // The peer never finishes its handshake.
            drop(tls.handshake((socket, false), slot).await);
        });
    }
    let mut before = 0;
    while before < ALL {
        yield_now().await;
        let now = resolver.count.load(SeqCst);
        // The runtime polls this task twice in a turn at most.
        assert!(now - before <= 2 * PER_TURN, "{} at once", now - before);
        before = now;
    }
}
