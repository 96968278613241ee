//! One light edge: dial, hello, serve, and again.
//!
//! The limits and the backoff are those of an edge, so that a gateway sees a real storm of edges.

use super::{super::mint::Identity, Fleet};
use crate::files;
use bytes::{Buf, Bytes, BytesMut};
use causeway_rt::{
    backoff::Backoff,
    socket::{CountedIo, set_tunnel_options},
};
use causeway_tunnel::{
    StreamKind, StreamReceiver, StreamSender,
    control_stream::{ControlStream, ControlStreamError, EdgeHello, EdgeMessage, GatewayMessage},
    edge_side::{self, EdgeSide, EdgeSideConfig, IncomingStream, StreamRequest},
    wire,
};
use http::{HeaderValue, Response, header::CONTENT_LENGTH};
use rustls::HandshakeKind;
use rustls_pki_types::ServerName;
use std::{io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};
use tokio::{
    net::{TcpSocket, TcpStream},
    time::{Instant, sleep, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tracing::Span;

/// Time limits of a gateway's TCP handshake, and of its TLS and hello: an edge's defaults.
const TCP: Duration = Duration::from_secs(2);
const BOUND: Duration = Duration::from_secs(5);
/// The longest waits of an edge: without an answer, and after a refusal by a gateway.
const SILENT_MAX: Duration = Duration::from_secs(2);
const REFUSED_MAX: Duration = Duration::from_mins(1);

pub(super) type IoStream = TlsStream<CountedIo<TcpStream>>;

/// One node of the fleet.
pub(super) struct Node {
    identity: Identity,
    fleet: Arc<Fleet>,
    /// Number of the gateway that the node dials next, modulo the number of gateways.
    next_gateway: usize,
}

/// Reason for the lack of a tunnel.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    /// Nothing listens at the address.
    #[error("{0}")]
    Absent(String),
    /// No answer; the node retries soon.
    #[error("{0}")]
    Silent(String),
    /// The gateway refused the node, possibly with a time to wait.
    #[error("{0}")]
    Refused(String, Option<Duration>),
}

/// A registered tunnel.
struct RegisteredTunnel {
    server: EdgeSide<IoStream>,
    control: ControlStream,
}

impl Node {
    /// Creates a node that begins at the gateway with this number.
    pub(super) fn new(identity: Identity, fleet: Arc<Fleet>, next_gateway: usize) -> Self {
        Self {
            identity,
            fleet,
            next_gateway,
        }
    }

    /// Dials, serves, and dials again, without end.
    pub(super) async fn live(mut self) {
        let mut backoff = Backoff::new(SILENT_MAX, REFUSED_MAX);
        let mut stood = false;
        loop {
            let failed = match self.register(stood).await {
                Ok(standing) => {
                    stood = true;
                    backoff.reset();
                    self.fleet.roll.up();
                    let failed = standing.serve(&self.fleet).await;
                    self.fleet.roll.down();
                    self.next_gateway += 1;
                    failed
                }
                Err(failed) => {
                    self.fleet.roll.failed(&failed);
                    // An edge dials each address separately, so an address where nothing listens does not delay the others.
                    if let Failed::Absent(_) = failed {
                        self.next_gateway += 1;
                    }
                    failed
                }
            };
            sleep(pause(&failed, &mut backoff)).await;
        }
    }

    async fn register(&self, stood: bool) -> Result<RegisteredTunnel, Failed> {
        // At the beginning some at a time, because the time of the first registration is not measured; later without limit.
        let _turn = if stood {
            None
        } else {
            self.fleet.first.acquire().await.ok()
        };
        let (io, round_trip) = dial(&self.identity, &self.fleet, self.next_gateway).await?;
        let greeted = timeout(BOUND, greet((io, round_trip), &self.identity, &self.fleet)).await;
        greeted.unwrap_or_else(|_| Err(Failed::Silent("no hello in time".into())))
    }
}

fn pause(failed: &Failed, backoff: &mut Backoff) -> Duration {
    let random = rand::random();
    match failed {
        Failed::Absent(_) | Failed::Silent(_) => backoff.silent(random),
        Failed::Refused(_, asked) => backoff.refused(*asked, random),
    }
}

/// Connects to a gateway. On loopback each node has an address of its own, as edges have, and so all ports. With one address for
/// thousands of connections to one port, the kernel would search for a free port most of the time.
async fn connect(gateway: SocketAddr, node: u32) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if gateway.ip().is_loopback() {
        let [.., high, middle, low] = node.to_be_bytes();
        socket.bind(SocketAddr::from(([127, 1 + high, middle, low], 0)))?;
    }
    socket.connect(gateway).await
}

/// Performs TCP and TLS with the gateway of this number; returns the duration of the TLS handshake.
pub(super) async fn dial(
    identity: &Identity,
    fleet: &Fleet,
    number: usize,
) -> Result<(IoStream, Duration), Failed> {
    let gateway = fleet.gateways[number % fleet.gateways.len()];
    let silent = |what: &str, error: &io::Error| {
        let hint = if files::ran_out(error) {
            " (raise the limit of open files)"
        } else {
            ""
        };
        Failed::Silent(format!("{what}: {error}{hint}"))
    };
    let tcp = timeout(TCP, connect(gateway, identity.number))
        .await
        .map_err(|_| Failed::Silent("TCP: no answer in time".into()))?
        .map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => Failed::Absent(format!("TCP: {error}")),
            _ => silent("TCP", &error),
        })?;
    set_tunnel_options(&tcp);
    let name = ServerName::from(gateway.ip());
    let connector = TlsConnector::from(identity.tls.clone());
    let began = Instant::now();
    let io = timeout(BOUND, connector.connect(name, CountedIo::new(tcp)))
        .await
        .map_err(|_| Failed::Silent("TLS: not finished in time".into()))?
        .map_err(|error| silent("TLS", &error))?;
    let resumed = io.get_ref().1.handshake_kind() == Some(HandshakeKind::Resumed);
    fleet.roll.shook_hands(resumed);
    Ok((io, began.elapsed()))
}

/// Performs HTTP/2 and the hello, until the gateway reports that the tunnel is registered.
async fn greet(
    (io, round_trip): (IoStream, Duration),
    identity: &Identity,
    fleet: &Arc<Fleet>,
) -> Result<RegisteredTunnel, Failed> {
    let settings = EdgeSideConfig {
        round_trip,
        ..EdgeSideConfig::default()
    };
    let traffic = io.get_ref().0.traffic();
    let mut server = edge_side::accept(io, traffic, settings)
        .await
        .map_err(|ended| Failed::Silent(format!("HTTP/2: {ended}")))?;
    let mut control = loop {
        match server.next_stream().await {
            Ok(IncomingStream::Control(control)) => break control,
            Ok(IncomingStream::Stream(_)) => {}
            Err(ended) => return Err(Failed::Silent(format!("hello: {ended}"))),
        }
    };
    match drive(&mut server, fleet, control.receive()).await? {
        GatewayMessage::Hello(hello) if *hello.node == *identity.node => {}
        other => return Err(unexpected(&other)),
    }
    let welcome = EdgeMessage::Welcome(Box::new(welcome(fleet)));
    drive(&mut server, fleet, control.send(&welcome)).await?;
    loop {
        match drive(&mut server, fleet, control.receive()).await? {
            GatewayMessage::Registered => {
                return Ok(RegisteredTunnel {
                    server,
                    control: *control,
                });
            }
            GatewayMessage::Gateways { .. } => {}
            other => return Err(unexpected(&other)),
        }
    }
}

/// As [`greet`], and hangs up.
pub(super) async fn greet_once(
    dialled: (IoStream, Duration),
    identity: &Identity,
    fleet: &Arc<Fleet>,
) -> Result<(), Failed> {
    greet(dialled, identity, fleet).await.map(drop)
}

fn welcome(fleet: &Fleet) -> EdgeHello {
    EdgeHello {
        protocol: wire::VERSION,
        version: env!("CARGO_PKG_VERSION").into(),
        instance: fleet.instance.clone(),
        ..EdgeHello::default()
    }
}

/// Waits for `future` while the tunnel is driven.
async fn drive<T>(
    server: &mut EdgeSide<IoStream>,
    fleet: &Arc<Fleet>,
    future: impl Future<Output = Result<T, ControlStreamError>>,
) -> Result<T, Failed> {
    let mut future = pin!(future);
    loop {
        tokio::select! {
            done = &mut future => {
                return done.map_err(|error| Failed::Silent(format!("hello: {error}")));
            }
            next = server.next_stream() => match next {
                Ok(incoming) => take(incoming, fleet),
                Err(ended) => return Err(Failed::Silent(format!("the tunnel ended: {ended}"))),
            },
        }
    }
}

fn unexpected(line: &GatewayMessage) -> Failed {
    match line {
        GatewayMessage::Dismiss {
            detail,
            retry_after_ms,
            ..
        } => Failed::Refused(
            format!("dismissed: {detail}"),
            Some(Duration::from_millis(*retry_after_ms)),
        ),
        GatewayMessage::Drain { .. } => Failed::Silent("the gateway drains".into()),
        _ => Failed::Refused("something that has no place in a hello".into(), None),
    }
}

impl RegisteredTunnel {
    /// Serves until the tunnel ends.
    async fn serve(mut self, fleet: &Arc<Fleet>) -> Failed {
        let mut heard = true;
        loop {
            tokio::select! {
                next = self.server.next_stream() => match next {
                    Ok(incoming) => take(incoming, fleet),
                    Err(ended) => return Failed::Silent(format!("the tunnel ended: {ended}")),
                },
                line = self.control.receive(), if heard => match line {
                    Ok(line @ GatewayMessage::Dismiss { .. }) => return unexpected(&line),
                    // There is no other gateway: a draining tunnel is served until it ends.
                    Ok(_) => {}
                    Err(_) => heard = false,
                },
            }
        }
    }
}

fn take(incoming: IncomingStream, fleet: &Arc<Fleet>) {
    if let IncomingStream::Stream(asked) = incoming {
        fleet.roll.asked();
        fleet
            .streams
            .spawn(Span::none(), answer(*asked, fleet.body.clone()));
    }
}

/// Answers each request with the body, also those inside a session, and echoes the bytes of an upgrade. A failed stream is
/// reset when it is dropped.
async fn answer(asked: StreamRequest, bytes: Bytes) {
    let StreamRequest {
        kind,
        body,
        responder,
        ..
    } = asked;
    let mut head = Response::new(());
    match kind {
        StreamKind::Request => {
            let length = HeaderValue::from(bytes.len());
            head.headers_mut().insert(CONTENT_LENGTH, length);
            if read(body).await
                && let Ok(mut send) = responder.send(head, false)
            {
                // A client that has left needs no answer.
                let _ = send.send_last(bytes).await;
            }
        }
        StreamKind::Upgrade(token) => {
            let Ok(token) = HeaderValue::try_from(token) else {
                return;
            };
            head.headers_mut().insert(wire::SWITCHED, token);
            if let Ok(send) = responder.send(head, false) {
                echo(send, body).await;
            }
        }
        StreamKind::Tcp => {
            if let Ok(send) = responder.send(head, false) {
                converse(send, body, &bytes).await;
            }
        }
    }
}

/// Reads to the end; returns whether the end was in order.
async fn read(mut body: StreamReceiver) -> bool {
    while let Some(chunk) = body.next_chunk().await {
        if chunk.is_err() {
            return false;
        }
    }
    true
}

async fn echo(mut send: StreamSender, mut body: StreamReceiver) {
    while let Some(Ok(chunk)) = body.next_chunk().await {
        if send.send_data(chunk).await.is_err() {
            return;
        }
    }
    // The other side may have gone first.
    let _ = send.end();
}

/// HTTP/1.1 for requests without a body.
async fn converse(mut send: StreamSender, mut body: StreamReceiver, bytes: &Bytes) {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", bytes.len());
    let whole = Bytes::from([head.as_bytes(), bytes].concat());
    let mut unread = BytesMut::new();
    while let Some(Ok(chunk)) = body.next_chunk().await {
        unread.extend_from_slice(&chunk);
        while let Some(end) = unread.windows(4).position(|end| end == b"\r\n\r\n") {
            unread.advance(end + 4);
            if send.send_data(whole.clone()).await.is_err() {
                return;
            }
        }
    }
    // The other side may have gone first.
    let _ = send.end();
}
