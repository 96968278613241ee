//! Servers of the edge's own listeners, whose connections are limited in number and end with a token.
//!
//! axum's server does not end its connections. Here each connection ends with its own token, whether it waits for a read or a
//! write.

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{ConnectInfo, Request, connect_info::Connected},
    http::{
        HeaderValue, StatusCode, Version,
        header::{CONNECTION, HOST},
        uri::Authority,
    },
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
    serve::{IncomingStream, Listener},
};
use causeway_certs::verify::ServerOnlyTls;
use causeway_rt::connection_limit::{Busy, ConnectionLimit, Slot};
use causeway_tunnel::target;
use futures_util::future::BoxFuture;
use http_body::{Frame, SizeHint};
use socket2::{SockRef, TcpKeepalive};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Interval of the TCP keepalive probes. A peer that has disappeared is detected after three intervals, because readers wait
/// for days on a silent connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 2;
/// Time after which a client that acknowledges none of the sent bytes counts as disconnected (`TCP_USER_TIMEOUT`).
const USER_TIMEOUT: Duration = Duration::from_secs(30);

/// Sets the socket options that detect a peer that has disappeared.
pub(super) fn set_keepalive(tcp: &TcpStream) {
    let socket = SockRef::from(tcp);
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_INTERVAL)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_PROBES);
    // Refused options cost time, not correctness.
    let _ = socket.set_tcp_nodelay(true);
    let _ = socket.set_tcp_keepalive(&keepalive);
    let _ = socket.set_tcp_user_timeout(Some(USER_TIMEOUT));
}

/// Listener with a limited number of connections, which end with `stop` at the latest.
pub(super) struct LimitedListener {
    listener: TcpListener,
    limit: ConnectionLimit,
    stop: CancellationToken,
}

impl LimitedListener {
    pub(super) fn new(
        limit: ConnectionLimit,
        listener: TcpListener,
        stop: CancellationToken,
    ) -> Self {
        Self {
            listener,
            limit,
            stop,
        }
    }
}

impl Listener for LimitedListener {
    type Io = LimitedConnection<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let (tcp, from) = Listener::accept(&mut self.listener).await;
            set_keepalive(&tcp);
            // Above the limit a client is closed at once, so that it retries instead of waiting.
            let Ok(slot) = self.limit.admit(from.ip()) else {
                continue;
            };
            return (
                LimitedConnection::new(tcp, slot, self.stop.child_token()),
                from,
            );
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Listener for connections that another task has accepted, and whose TLS handshake it has completed.
pub(super) struct AcceptedConnections<S> {
    pub(super) connections: mpsc::Receiver<(S, SocketAddr)>,
    pub(super) address: SocketAddr,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Listener for AcceptedConnections<S> {
    type Io = S;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (S, SocketAddr) {
        match self.connections.recv().await {
            Some(accepted) => accepted,
            // The accepting task has ended, and ends the server as well.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// Connection that occupies a slot of a [`ConnectionLimit`]. It ends with its token, or when it is evicted for another
/// connection. [`hold_slot`] prevents the eviction while a request is processed.
pub(super) struct LimitedConnection<S> {
    io: S,
    over: BoxFuture<'static, ()>,
    _end_guard: DropGuard,
    slot: Slot,
    /// Name of the authenticated client, if there is one.
    client: Option<Arc<str>>,
}

impl<S> LimitedConnection<S> {
    /// Creates a connection that ends with `token`. The token is cancelled when the connection is dropped.
    pub(super) fn new(io: S, slot: Slot, token: CancellationToken) -> Self {
        let (closed, evicted) = (token.clone(), slot.clone());
        Self {
            io,
            over: Box::pin(async move {
                evicted.run(pin!(closed.cancelled())).await;
            }),
            _end_guard: token.drop_guard(),
            slot,
            client: None,
        }
    }

    /// Sets the name of the authenticated client.
    #[must_use]
    pub(super) fn of(self, client: &str) -> Self {
        Self {
            client: Some(client.into()),
            ..self
        }
    }

    /// Returns an error once the connection must end.
    fn check_open(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.over.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LimitedConnection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_open(context)?;
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LimitedConnection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_open(context)?;
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_open(context)?;
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_open(context)?;
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_open(context)?;
        Pin::new(&mut self.io).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

/// Slot and client of a connection, in the extensions of its requests.
#[derive(Clone)]
pub(super) struct ConnectionPlace {
    slot: Slot,
    client: Option<Arc<str>>,
}

impl ConnectionPlace {
    fn of<S>(connection: &LimitedConnection<S>) -> Self {
        Self {
            slot: connection.slot.clone(),
            client: connection.client.clone(),
        }
    }

    /// Returns the name of the authenticated client, if there is one.
    pub(super) fn client(&self) -> Option<&str> {
        self.client.as_deref()
    }
}

impl Connected<IncomingStream<'_, LimitedListener>> for ConnectionPlace {
    fn connect_info(stream: IncomingStream<'_, LimitedListener>) -> Self {
        Self::of(stream.io())
    }
}

impl<S> Connected<IncomingStream<'_, AcceptedConnections<LimitedConnection<S>>>> for ConnectionPlace
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    fn connect_info(stream: IncomingStream<'_, AcceptedConnections<LimitedConnection<S>>>) -> Self {
        Self::of(stream.io())
    }
}

/// Protects the slot of a connection from the start of the request's processing to the last byte of the response. A
/// connection without a request, for example one whose request head never ends, can be evicted.
pub(super) async fn hold_slot(request: Request, next: Next) -> Response {
    let connection_slot = request.extensions().get::<ConnectInfo<ConnectionPlace>>();
    let busy = connection_slot.map(|ConnectInfo(place)| place.slot.busy());
    let response = next.run(request).await;
    response.map(|body| Body::new(PlacedBody { body, _busy: busy }))
}

/// Body of a response, which protects the slot of its connection until it is written.
struct PlacedBody {
    body: Body,
    _busy: Option<Busy>,
}

impl http_body::Body for PlacedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Adds `Connection: close` to each HTTP/1.1 response once the edge stops, and hyper then closes the connection. A close
/// without that header could lose a request that the client has already sent (RFC 9112, section 9.6).
pub(super) fn with_connection_close(router: Router, stop: CancellationToken) -> Router {
    router.layer(from_fn(move |request: Request, next: Next| {
        let stop = stop.clone();
        async move {
            let is_http2 = request.version() == Version::HTTP_2;
            let mut response = next.run(request).await;
            if !is_http2 && stop.is_cancelled() {
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(CONNECTION, close);
            }
            response
        }
    }))
}

/// Refuses requests for a foreign host name. Otherwise a browser page on this machine could read a listener under its own
/// name (DNS rebinding).
pub(super) async fn check_host(
    allowed_hosts: Arc<AllowedHosts>,
    request: Request,
    next: Next,
) -> Response {
    let authority = request.uri().authority().map(Authority::as_str);
    let host = request.headers().get(HOST).map(HeaderValue::to_str);
    let host = host.map(Result::unwrap_or_default);
    // HTTP/1.0 without a Host comes from probes, never from a browser.
    if authority
        .or(host)
        .is_none_or(|host| allowed_hosts.contains(host))
    {
        return next.run(request).await;
    }
    let message = "the Host header must be localhost, this node, this listener's address or a name in its certificate\n";
    (StatusCode::MISDIRECTED_REQUEST, message).into_response()
}

/// Host names that are valid for a listener.
pub(super) struct AllowedHosts {
    /// Address of the listener.
    pub(super) address: Option<IpAddr>,
    /// Name of the node, which clients use that connect through a tunnel.
    pub(super) node: String,
    /// Certificate of the listener. Its names are valid, because a page cannot own a name in the certificate.
    pub(super) certificate: Option<watch::Receiver<Option<ServerOnlyTls>>>,
}

impl AllowedHosts {
    fn contains(&self, host: &str) -> bool {
        let Ok((host, _)) = target::split_host_port(host) else {
            return false;
        };
        match host.parse::<IpAddr>() {
            // Rebinding needs a name; on a wildcard any address may be this machine's.
            Ok(ip) => {
                let ip = ip.to_canonical();
                ip.is_loopback()
                    || self
                        .address
                        .is_some_and(|own| own == ip || own.is_unspecified())
                    || self.is_in_certificate(host)
            }
            Err(_) => {
                host.eq_ignore_ascii_case("localhost")
                    || host.eq_ignore_ascii_case(&self.node)
                    || self.is_in_certificate(host)
            }
        }
    }

    fn is_in_certificate(&self, host: &str) -> bool {
        let certificate = self.certificate.as_ref().map(watch::Receiver::borrow);
        certificate
            .is_some_and(|shown| shown.as_ref().is_some_and(|shown| shown.matches_host(host)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use causeway_certs::LeafCertificate;
    use futures_util::{StreamExt, stream};
    use std::convert::Infallible;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    fn own(address: &str) -> AllowedHosts {
        AllowedHosts {
            address: address.parse().ok(),
            node: "edge-1".into(),
            certificate: None,
        }
    }

    #[test]
    fn a_name_that_is_not_this_machines_is_refused() {
        let own_address = own("10.0.0.5");
        for host in [
            "localhost:10266",
            "127.0.0.1",
            "[::1]:10266",
            "10.0.0.5:10266",
            "Edge-1:10266",
        ] {
            assert!(own_address.contains(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:10266",
            "10.0.0.6",
            "localhost.evil",
            "edge-2",
            "",
        ] {
            assert!(!own_address.contains(host), "{host}");
        }
        assert!(own("0.0.0.0").contains("10.0.0.6"));
    }

    #[test]
    fn names_and_addresses_of_the_served_certificate_are_local() {
        let key = rcgen::KeyPair::generate().unwrap();
        let names = ["kubernetes.default.svc", "10.96.0.1"].map(str::to_owned);
        let made = rcgen::CertificateParams::new(names).unwrap();
        let made = made.self_signed(&key).unwrap();
        let leaf = LeafCertificate::load(&made.pem(), &key.serialize_pem()).unwrap();
        let shown = ServerOnlyTls::new(&leaf).unwrap();
        let known = AllowedHosts {
            certificate: Some(watch::channel(Some(shown)).1),
            ..own("127.0.0.1")
        };
        for host in ["kubernetes.default.svc:10270", "10.96.0.1", "localhost"] {
            assert!(known.contains(host), "{host}");
        }
        for host in ["kubernetes.default", "10.96.0.2", "evil.example"] {
            assert!(!known.contains(host), "{host}");
        }
    }

    #[tokio::test]
    async fn a_connection_ends_with_its_token_and_gives_its_place_back() {
        let places = ConnectionLimit::new("test", 1, drop);
        let place = || places.admit(IpAddr::from([127, 0, 0, 1]));
        let (near, mut far) = duplex(64);
        let token = CancellationToken::new();
        let settled = place().unwrap();
        settled.protect();
        let mut kept = LimitedConnection::new(near, settled, token.clone());
        far.write_all(b"x").await.unwrap();
        assert_eq!(kept.read_u8().await.unwrap(), b'x');
        assert!(place().is_err());
        let (read, ()) = tokio::join!(kept.read_u8(), async { token.cancel() });
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        drop(kept);
        assert!(place().is_ok());
    }

    #[tokio::test]
    async fn a_connection_that_sends_no_request_yields_its_slot() {
        let places = ConnectionLimit::new("test", 1, drop);
        let place = || places.admit(IpAddr::from([127, 0, 0, 1]));
        let (near, _far) = duplex(64);
        let mut silent = LimitedConnection::new(near, place().unwrap(), CancellationToken::new());
        let (read, next) = tokio::join!(silent.read_u8(), async { place() });
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        assert!(next.is_ok());
    }

    #[tokio::test]
    async fn only_a_connection_with_an_answered_request_keeps_its_slot() {
        let first = stream::iter([Ok::<_, Infallible>("one")]);
        let watch = move || async move { Body::from_stream(first.chain(stream::pending())) };
        let router = Router::new()
            .route("/watch", get(watch))
            .layer(from_fn(hold_slot));
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let limit = ConnectionLimit::new("test", 1, drop);
        let listener = LimitedListener::new(limit, tcp, CancellationToken::new());
        let service = router.into_make_service_with_connect_info::<ConnectionPlace>();
        let serving = async { axum::serve(listener, service).await };
        let clients = async {
            let connect = async |text: &str| {
                let mut tcp = TcpStream::connect(address).await.unwrap();
                tcp.write_all(text.as_bytes()).await.unwrap();
                tcp
            };
            let mut unfinished = connect("GET /watch HTTP/1.1\r\n").await;
            let mut watching = connect("GET /watch HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
            assert_eq!(unfinished.read(&mut [0]).await.unwrap_or(0), 0);
            let mut read = String::new();
            while !read.contains("one") {
                let byte = watching.read_u8().await.unwrap();
                read.push(char::from(byte));
            }
            let mut third = connect("").await;
            assert_eq!(third.read(&mut [0]).await.unwrap_or(0), 0);
        };
        tokio::select! {
            () = clients => {}
            _ = serving => panic!("the server has ended"),
        }
    }
}
