//! Hosts of the simulation: gateways and edges.

use super::requests::{REQUEST_ID, RequestLog, RequestRecord, SESSION, send_requests};
use crate::{
    config,
    control::{
        drain::Readiness,
        peers::{
            ForwardHandler, NodeFeed, PeerConnector, PeerError, PeerTls,
            transport::{CONNECT_TIMEOUT, ConnectFn, PeerIo},
        },
        tunnel_listener::peer::serve_streams as serve_peer_streams,
    },
    proxy::{
        ProxyState, peer,
        tests::{answer, proxy, proxy_state, serve_streams},
    },
    state::{NewTunnel, Registry, directory::ForwardingGateway, registry::EdgeCertificate},
    worker::Workers,
};
use causeway_certs::{Ca, LiveCa, NodeName, RevokedSerials, TrustDomain, install_provider};
use causeway_rt::{socket::CountedIo, task::TaskGroup};
use causeway_tunnel::{
    control_stream::EdgeHello,
    edge_side::{self, EdgeSideConfig, IncomingStream, StreamRequest},
    gateway_side::{self, GatewaySideConfig},
    liveness::KeepaliveConfig,
};
use futures_util::future::join_all;
use rustls::{ClientConfig, RootCertStore};
use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, SystemTime},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;
use turmoil::net::{TcpListener, TcpStream};

pub(super) const GATEWAYS: usize = 3;
pub(super) const EDGES: usize = 5;
/// Port of a gateway for other gateways.
const PEER_PORT: u16 = 10262;
/// Port of a gateway for edges. A round trip stands for TLS and the hello: the gateway sends a byte, and the edge answers with its
/// number and with that of its process.
const EDGE_PORT: u16 = 10263;
/// Time of a long response.
pub(super) const SESSION_TIME: Duration = Duration::from_secs(8);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before an edge dials again.
const REDIAL_DELAY: Duration = Duration::from_millis(500);

/// Returns the name of a gateway's host.
pub(super) fn gateway(number: usize) -> String {
    format!("gateway-{number}")
}

/// Returns the name of an edge's host, which is also the name of its node.
pub(super) fn edge(number: usize) -> String {
    format!("edge-{number}")
}

pub(super) fn node(edge_number: usize) -> NodeName {
    NodeName::parse(&edge(edge_number)).unwrap()
}

/// Returns the gateways at which an edge has tunnels.
pub(super) fn holders(edge: usize) -> [usize; 2] {
    [edge % GATEWAYS, (edge + 1) % GATEWAYS]
}

/// Tables that the checks read, and the log of all requests.
#[derive(Clone)]
pub(super) struct World(Arc<Inner>);

struct Inner {
    /// Time in which requests are sent.
    load: Range<Duration>,
    requests: Mutex<RequestLog>,
    /// State of each gateway that runs.
    gateways: Mutex<[Option<Arc<ProxyState>>; GATEWAYS]>,
    /// Number of processes of each edge so far.
    edge_processes: Mutex<[u8; EDGES]>,
}

impl World {
    pub(super) fn new(load: Range<Duration>) -> Self {
        install_provider();
        Self(Arc::new(Inner {
            load,
            requests: Mutex::default(),
            gateways: Mutex::default(),
            edge_processes: Mutex::default(),
        }))
    }

    pub(super) fn load(&self) -> Range<Duration> {
        self.0.load.clone()
    }

    pub(super) fn log(&self) -> MutexGuard<'_, RequestLog> {
        self.0.requests.lock().unwrap()
    }

    pub(super) fn requests(&self) -> Vec<RequestRecord> {
        self.log().records.clone()
    }

    /// Returns the state of a gateway that runs.
    pub(super) fn gateway(&self, number: usize) -> Option<Arc<ProxyState>> {
        self.0.gateways.lock().unwrap()[number].clone()
    }

    /// Records that a gateway has been killed.
    pub(super) fn forget_gateway(&self, number: usize) {
        self.0.gateways.lock().unwrap()[number] = None;
        self.log().forget_entry(number);
    }
}

/// Runs a gateway, and sends requests of its clients.
pub(super) async fn run_gateway(number: usize, world: World) -> turmoil::Result {
    let workers = Workers::on_current_runtime();
    let registry = Registry::new(&workers);
    let nodes: Vec<_> = (0..EDGES).map(node).collect();
    let shared = proxy_state(&registry, &nodes);
    world.0.gateways.lock().unwrap()[number] = Some(shared.clone());
    let feed = NodeFeed {
        registry: registry.clone(),
        instance: format!("{:x}", rand::random::<u64>()),
        hello_timeout: config::Tunnel::default().hello_timeout,
        ca: LiveCa::new(Ca::create(&TrustDomain::parse("test")?)?),
        revocation: None,
    };
    let tasks = TaskGroup::default();
    let connector = connector(&workers, &shared, &feed.instance);
    let connecting = connector.run(Readiness::default().hold("peers"), CancellationToken::new());
    tasks.spawn(debug_span!("peers"), connecting);
    let (edges, peers) = (listen(EDGE_PORT).await?, listen(PEER_PORT).await?);
    let accepting = TaskGroup::default();
    let (tunnels, links) = (TaskGroup::default(), TaskGroup::default());
    accepting.spawn(debug_span!("edges"), async move {
        while let Ok((tcp, from)) = edges.accept().await {
            let serving = serve_tunnel(registry.clone(), tcp, from);
            tunnels.spawn(debug_span!("tunnel"), async move { drop(serving.await) });
        }
    });
    let (state, log) = (shared.clone(), world.clone());
    accepting.spawn(debug_span!("peers"), async move {
        while let Ok((tcp, from)) = peers.accept().await {
            let handler = forward_handler(&state, &log, (from, number));
            let serving = serve_peer(feed.clone(), handler, (tcp, from));
            links.spawn(debug_span!("peer"), serving);
        }
    });
    send_requests(number, &world, &proxy(&shared)).await;
    std::future::pending().await
}

async fn listen(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await
}

fn connector(workers: &Workers, shared: &ProxyState, instance: &str) -> PeerConnector {
    let addresses = (0..GATEWAYS).map(|number| {
        let address = turmoil::lookup(gateway(number));
        SocketAddr::new(address, PEER_PORT).to_string()
    });
    let tls = ClientConfig::builder().with_root_certificates(RootCertStore::empty());
    let tls = PeerTls {
        config: Arc::new(tls.with_no_client_auth()),
        not_after: SystemTime::now() + Duration::from_hours(24),
    };
    PeerConnector {
        config: config::Peers {
            addresses: addresses.collect(),
            ..config::Peers::default()
        },
        settings: config::Tunnel::default(),
        limits: config::Limits::default(),
        instance: instance.into(),
        registry: shared.registry.clone(),
        reads_pools: false,
        workers: workers.clone(),
        memory_budget: shared.limits.memory_budget().clone(),
        tls: Arc::new(move || Ok(tls.clone())),
        certificate_changes: watch::channel(()).1,
        revoked: RevokedSerials::default(),
        connect: connect_fn(),
        links: TaskGroup::default(),
    }
}

/// Returns a function that opens connections between gateways without TLS.
fn connect_fn() -> ConnectFn {
    Arc::new(|address, _, _| {
        Box::pin(async move {
            let started = Instant::now();
            let connecting = TcpStream::connect(address.address);
            let connected = timeout(CONNECT_TIMEOUT, connecting).await;
            let timeout_error = |_| io::ErrorKind::TimedOut.into();
            let tcp = connected.map_err(timeout_error).flatten();
            let io = CountedIo::new(tcp.map_err(PeerError::Connect)?);
            Ok(PeerIo {
                traffic: io.traffic(),
                io: Box::new(io),
                round_trip: started.elapsed(),
                serial: String::new(),
            })
        })
    })
}

/// Registers the tunnel of an edge, and runs it until it ends.
async fn serve_tunnel(registry: Registry, mut tcp: TcpStream, from: SocketAddr) -> io::Result<()> {
    let greeting = async {
        tcp.write_u8(0).await?;
        Ok::<_, io::Error>((tcp.read_u8().await?, tcp.read_u8().await?))
    };
    let (number, process) = timeout(HANDSHAKE_TIMEOUT, greeting).await??;
    let io = CountedIo::new(tcp);
    let traffic = io.traffic();
    let config = GatewaySideConfig {
        // Longer than by default, so that a silent tunnel is late for some seconds before it is not selected at all.
        keepalive: KeepaliveConfig {
            suspect_after: Duration::from_secs(10),
            ..KeepaliveConfig::default()
        },
        control_streams: 0,
        ..GatewaySideConfig::default()
    };
    let connecting = gateway_side::connect(io, traffic, config);
    let Ok((tunnel, driver)) = connecting.await else {
        return Ok(());
    };
    let hello = EdgeHello {
        instance: process.to_string(),
        ..EdgeHello::default()
    };
    let new_tunnel = NewTunnel {
        tunnel,
        hello: Arc::new(hello),
        remote_address: from,
        certificate: EdgeCertificate::default(),
        roots: Arc::default(),
        crls: Arc::default(),
        unhealthy_ports: Arc::default(),
        control: mpsc::channel(1).0,
        taken_over: CancellationToken::new(),
    };
    let node = node(number.into());
    if let Ok((id, replaced)) = registry.register(&node, new_tunnel) {
        for old in replaced {
            old.tunnel.tunnel.tunnel.close();
        }
        driver.run().await;
        registry.unregister(&node, id);
    }
    Ok(())
}

/// Serves a connection of another gateway.
async fn serve_peer(feed: NodeFeed, handler: ForwardHandler, (tcp, from): (TcpStream, SocketAddr)) {
    let io = CountedIo::new(tcp);
    let traffic = io.traffic();
    if let Ok(connection) = edge_side::accept(io, traffic, EdgeSideConfig::default()).await {
        let from = ForwardingGateway {
            address: from,
            serial: "".into(),
        };
        serve_peer_streams((connection, from), &feed, (&handler, &|| None)).await;
    }
}

/// Returns the handler of requests on a connection, which also logs them.
fn forward_handler(
    shared: &Arc<ProxyState>,
    world: &World,
    (from, to): (SocketAddr, usize),
) -> ForwardHandler {
    let mut numbers = 0..GATEWAYS;
    let sender = numbers.find(|number| turmoil::lookup(gateway(*number)) == from.ip());
    let sender = sender.unwrap();
    let (shared, world) = (shared.clone(), world.clone());
    ForwardHandler(Arc::new(move |request, from| {
        world.log().forwarded(request_id(&request), (sender, to));
        let shared = shared.clone();
        Box::pin(async move { peer::serve(&shared, request, from).await })
    }))
}

fn request_id(request: &StreamRequest) -> usize {
    let id = request.head.headers().get(REQUEST_ID).unwrap();
    id.to_str().unwrap().parse().unwrap()
}

/// Returns the time from the head of the response to its body.
fn response_time(request: &StreamRequest) -> Duration {
    if request.head.uri().path() == SESSION {
        SESSION_TIME
    } else {
        Duration::ZERO
    }
}

/// Runs an edge, whose upstream answers with the name of the node.
pub(super) async fn run_edge(number: usize, world: World) -> turmoil::Result {
    let process = {
        let mut processes = world.0.edge_processes.lock().unwrap();
        processes[number] += 1;
        processes[number]
    };
    let tunnels = holders(number).map(|holder| keep_tunnel((number, process), holder, &world));
    join_all(tunnels).await;
    Ok(())
}

async fn keep_tunnel((number, process): (usize, u8), holder: usize, world: &World) {
    let preface = [u8::try_from(number).unwrap(), process];
    let address = SocketAddr::new(turmoil::lookup(gateway(holder)), EDGE_PORT);
    let connect = async || {
        let mut tcp = TcpStream::connect(address).await?;
        tcp.read_u8().await?;
        tcp.write_all(&preface).await?;
        Ok::<_, io::Error>(tcp)
    };
    loop {
        if let Ok(Ok(tcp)) = timeout(HANDSHAKE_TIMEOUT, connect()).await {
            serve_streams(tcp, watch::channel(false).1, |stream, tasks| {
                if let IncomingStream::Stream(request) = stream {
                    world.log().served(request_id(&request), number);
                    let delay = response_time(&request);
                    let answering = answer(*request, edge(number), delay);
                    tasks.spawn(debug_span!("request"), answering);
                }
            })
            .await;
        }
        sleep(REDIAL_DELAY).await;
    }
}
