//! Apps on the node's side of a test: real sockets on port 0, only tokio, exact to the byte.
//!
//! An app plays a [`Script`] of steps: one per connection (`tcp`), or one per request, chosen by its head (`http`). Its
//! observations (heads, bodies, the end of each connection) go into channels that a test awaits, each wait with a limit, so
//! that no test sleeps. No HTTP library takes part: the app sends exactly what a script writes, and records exactly what it
//! received.

pub(crate) mod answer;
mod script;
#[cfg(test)]
mod tests;
mod wire;

pub(crate) use script::{PauseGate, Script};
pub(crate) use wire::Head;

use rustls::ServerConfig;
use script::Outcome;
use socket2::{Domain, SockRef, Socket, Type};
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use test_summary::unused_port;
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, TcpStream},
    sync::{
        Mutex,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    },
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use wire::BufferedSocket;

/// Number of bytes that the system buffers of an upstream's response that the peer does not read.
const SEND: usize = 256 << 10;
/// Limit of a wait for an observation of an app.
const PATIENCE: Duration = Duration::from_mins(2);

/// The end of a connection, seen from the app.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The peer ended its sending side (FIN).
    Finished,
    /// The peer reset the connection, or accepted no more.
    Reset,
}

/// Record of what an upstream received.
struct Record {
    heads: UnboundedSender<Head>,
    bodies: UnboundedSender<Vec<u8>>,
    ends: UnboundedSender<End>,
    shown: std::sync::Mutex<Vec<Vec<u8>>>,
    connections: AtomicUsize,
    requests: AtomicUsize,
}

type Receiver<T> = Mutex<UnboundedReceiver<T>>;

/// A running app; dropping it ends its listener and its connections.
pub(crate) struct App {
    address: SocketAddr,
    record: Arc<Record>,
    heads: Receiver<Head>,
    bodies: Receiver<Vec<u8>>,
    ends: Receiver<End>,
    /// Bound and never listened on, for `refusing`: the kernel refuses connections, and no other process gets the port.
    _reserved: Option<Socket>,
    serving: JoinSet<()>,
}

impl App {
    /// An HTTP/1.1 app with keep-alive: `choose` picks the script from each request's head, before its body
    /// has been read.
    pub(crate) async fn http(choose: impl Fn(&Head) -> Script + Send + Sync + 'static) -> Self {
        Self::start(Arc::new(Behaviour::Http(Box::new(choose)))).await
    }

    /// The same over TLS.
    pub(crate) async fn https(
        tls: Arc<ServerConfig>,
        choose: impl Fn(&Head) -> Script + Send + Sync + 'static,
    ) -> Self {
        let tls = Some((tls.into(), false));
        Self::start_with(Arc::new(Behaviour::Http(Box::new(choose))), tls).await
    }

    /// The same, after a PROXY v2 header, which [`App::body`] returns.
    pub(crate) async fn https_behind_proxy(
        tls: Arc<ServerConfig>,
        choose: impl Fn(&Head) -> Script + Send + Sync + 'static,
    ) -> Self {
        let tls = Some((tls.into(), true));
        Self::start_with(Arc::new(Behaviour::Http(Box::new(choose))), tls).await
    }

    /// An app that plays the same script on each connection and then closes it.
    pub(crate) async fn tcp(script: Script) -> Self {
        Self::start(Arc::new(Behaviour::Tcp(script))).await
    }

    /// An address that refuses connections.
    pub(crate) fn refusing() -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        socket.bind(&any.into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        Self::new(address, Some(socket))
    }

    /// A normal app: 200 with `body` for every request.
    pub(crate) async fn saying(body: &str) -> Self {
        let body = body.to_owned();
        Self::http(move |_| answer::ok(&body)).await
    }

    /// Returns the address that the upstream listens on.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The port of [`App::address`].
    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Returns the number of connections accepted so far.
    pub(crate) fn connections(&self) -> usize {
        self.record.connections.load(Ordering::SeqCst)
    }

    /// Returns the client certificates shown so far, in DER.
    pub(crate) fn shown(&self) -> Vec<Vec<u8>> {
        self.record.shown.lock().unwrap().clone()
    }

    /// Returns the number of request heads read so far.
    pub(crate) fn requests(&self) -> usize {
        self.record.requests.load(Ordering::SeqCst)
    }

    /// Counts from now on, and stores no observations: for a long test.
    pub(crate) async fn forget(&self) {
        self.heads.lock().await.close();
        self.bodies.lock().await.close();
        self.ends.lock().await.close();
    }

    /// Returns the next request's head, as soon as it has been read.
    pub(crate) async fn head(&self) -> Head {
        next(&self.heads, "request").await
    }

    /// Returns the next body (HTTP), or all bytes up to the peer's FIN (`read_to_end`), once complete.
    pub(crate) async fn body(&self) -> Vec<u8> {
        next(&self.bodies, "complete body").await
    }

    /// Returns how the peer ended the next connection that ends. A connection that the app itself ends is not reported.
    pub(crate) async fn end(&self) -> End {
        next(&self.ends, "end of a connection").await
    }

    fn new(address: SocketAddr, reserved: Option<Socket>) -> Self {
        let (head_sender, heads) = unbounded_channel();
        let (body_sender, bodies) = unbounded_channel();
        let (end_sender, ends) = unbounded_channel();
        Self {
            address,
            record: Arc::new(Record {
                heads: head_sender,
                bodies: body_sender,
                ends: end_sender,
                shown: std::sync::Mutex::default(),
                connections: AtomicUsize::new(0),
                requests: AtomicUsize::new(0),
            }),
            heads: Mutex::new(heads),
            bodies: Mutex::new(bodies),
            ends: Mutex::new(ends),
            _reserved: reserved,
            serving: JoinSet::new(),
        }
    }

    async fn start(play: Arc<Behaviour>) -> Self {
        Self::start_with(play, None).await
    }

    /// Starts an app, perhaps with TLS and perhaps with a PROXY v2 header before TLS.
    async fn start_with(play: Arc<Behaviour>, tls: Option<(TlsAcceptor, bool)>) -> Self {
        // No listener of another test had this port, whose clients might still connect.
        let address = (Ipv4Addr::LOCALHOST, unused_port());
        let listener = TcpListener::bind(address).await.unwrap();
        let mut app = Self::new(listener.local_addr().unwrap(), None);
        let record = app.record.clone();
        app.serving.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut socket, _) = listener.accept().await.unwrap();
                // Otherwise the many small writes of a script wait for each other's acknowledgement.
                socket.set_nodelay(true).unwrap();
                // Thousands of them would take all the memory that the system has for TCP.
                SockRef::from(&socket).set_send_buffer_size(SEND).unwrap();
                record.connections.fetch_add(1, Ordering::SeqCst);
                let (play, record) = (play.clone(), record.clone());
                match tls.clone() {
                    None => connections.spawn(serve(BufferedSocket::new(socket), play, record)),
                    Some((tls, has_proxy_header)) => connections.spawn(async move {
                        if has_proxy_header {
                            let header = read_proxy_header(&mut socket).await;
                            record.bodies.send(header).unwrap();
                        }
                        // The peer rejects the certificate, or shows none: it is gone.
                        if let Ok(tls) = tls.accept(socket).await {
                            let shown = tls.get_ref().1.peer_certificates();
                            let shown = shown.and_then(|chain| chain.first());
                            record
                                .shown
                                .lock()
                                .unwrap()
                                .extend(shown.map(|leaf| leaf.to_vec()));
                            serve(BufferedSocket::new(tls), play, record).await;
                        }
                    }),
                };
            }
        });
        app
    }
}

async fn read_proxy_header(socket: &mut TcpStream) -> Vec<u8> {
    let mut header = vec![0; 16];
    socket.read_exact(&mut header).await.unwrap();
    let length = u16::from_be_bytes([header[14], header[15]]);
    header.resize(16 + usize::from(length), 0);
    socket.read_exact(&mut header[16..]).await.unwrap();
    header
}

async fn next<T>(seen: &Receiver<T>, what: &str) -> T {
    timeout(PATIENCE, async { seen.lock().await.recv().await })
        .await
        .unwrap_or_else(|_| panic!("the app saw no {what} within {PATIENCE:?}"))
        .expect("the app has the other end")
}

/// Behaviour of an upstream on a connection.
enum Behaviour {
    Http(Box<dyn Fn(&Head) -> Script + Send + Sync>),
    Tcp(Script),
}

async fn serve(mut wire: BufferedSocket, play: Arc<Behaviour>, record: Arc<Record>) {
    let ended = match &*play {
        Behaviour::Tcp(script) => match script.play(&mut wire, None, &record).await {
            Outcome::Gone(end) => Some(end),
            Outcome::Done | Outcome::Over => None,
        },
        Behaviour::Http(choose) => serve_requests(&mut wire, choose, &record).await,
    };
    if let Some(end) = ended {
        let _ = record.ends.send(end);
    }
}

async fn serve_requests(
    wire: &mut BufferedSocket,
    choose: &(dyn Fn(&Head) -> Script + Send + Sync),
    record: &Record,
) -> Option<End> {
    loop {
        let head = match wire.read_head().await {
            Ok(head) => head,
            Err(end) => return Some(end),
        };
        record.requests.fetch_add(1, Ordering::SeqCst);
        let _ = record.heads.send(head.clone());
        match choose(&head).play(wire, Some(&head), record).await {
            Outcome::Done => {}
            Outcome::Over => return None,
            Outcome::Gone(end) => return Some(end),
        }
    }
}
