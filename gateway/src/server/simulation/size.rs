//! Size of a fleet: the control path of many gateways, with the directory, pool leaders and DNS of each, in virtual time.
//!
//! Connections between gateways are pipes without TLS, and all nodes of a gateway share one tunnel. So the figures are those of the
//! tables and messages, without those of tunnels. `CAUSEWAY_TEST_FLEET=NODES` sets the number of nodes. The figures are printed.

use crate::{
    config,
    control::{
        api_cache::{ApiCacheServer, leaders::LeaderAssigner},
        dns::holders,
        drain::Readiness,
        peers::{
            ForwardHandler, NodeFeed, PeerConnector, PeerError, PeerTls,
            transport::{ConnectFn, PeerIo},
        },
        tunnel_listener::peer::serve_streams,
    },
    metrics::Metrics,
    state::{
        NewTunnel, Node, NodesWriter, Registry, directory::ForwardingGateway,
        registry::EdgeCertificate,
    },
    worker::Workers,
};
use causeway_certs::{Ca, LiveCa, NodeName, RevokedSerials, TrustDomain, install_provider};
use causeway_rt::{socket::CountedIo, task::TaskGroup};
use causeway_tunnel::{
    Tunnel,
    buffered::MemoryBudget,
    control_stream::{EdgeHello, GatewayMessage},
    edge_side::{self, EdgeSideConfig},
    gateway_side::{self, GatewaySideConfig},
};
use rustls::{ClientConfig, RootCertStore};
use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::{IpAddr, Ipv4Addr},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::{Duration, SystemTime},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex},
    sync::{mpsc, watch},
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

const GATEWAYS: usize = 10;
/// Number of nodes in an ordinary test run.
const NODES: usize = 1_000;
const NODES_PER_POOL: usize = 100;
/// Time in which the nodes of a gateway that died connect to others.
const RETURN_TIME: Duration = Duration::from_secs(5);
/// Time without changes, in which gateways exchange no messages.
const QUIET_TIME: Duration = Duration::from_mins(1);
/// Maximum time until all gateways agree.
const LIMIT: Duration = Duration::from_mins(2);
/// Capacity of a pipe in bytes.
const PIPE: usize = 64 << 10;

#[test]
fn gateways_of_a_large_fleet_agree_on_holders_and_leaders() {
    install_provider();
    let nodes = match std::env::var("CAUSEWAY_TEST_FLEET") {
        Ok(text) => text.parse().expect("CAUSEWAY_TEST_FLEET is a number"),
        Err(_) => NODES,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build();
    runtime.unwrap().block_on(run(nodes));
}

async fn run(nodes: usize) {
    let mut fleet = Fleet::new(nodes).await;
    let mut figures = Figures::new(&fleet);
    fleet.start_gateways();
    fleet.until_agreed("after the start").await;
    figures.print("all gateways connect", &fleet);
    let silent_from = fleet.messages();
    sleep(QUIET_TIME).await;
    figures.print("nothing changes for a minute", &fleet);
    assert_eq!(fleet.messages(), silent_from, "messages without a change");
    fleet.check_dns();
    figures.print("each name is resolved at one gateway", &fleet);
    fleet.kill_first().await;
    fleet.until_agreed("after the death of a gateway").await;
    figures.print("one gateway dies, and its nodes connect elsewhere", &fleet);
    fleet.check_dns();
}

/// One gateway.
struct Gateway {
    number: usize,
    registry: Registry,
    nodes: NodesWriter,
    api_cache: ApiCacheServer,
    /// Tunnel of all nodes, and the queue of their control messages.
    tunnel: Tunnel,
    control: mpsc::Sender<Box<GatewayMessage>>,
    feed: NodeFeed,
    /// Tasks of the gateway, which end with it.
    tasks: Arc<TaskGroup>,
}

/// Gateways that run, by their number.
type Running = Arc<Mutex<HashMap<usize, (NodeFeed, Arc<TaskGroup>)>>>;

struct Fleet {
    gateways: Vec<Gateway>,
    running: Running,
    traffic: Arc<Traffic>,
    /// Numbers of the gateways of each node.
    holders: Vec<[usize; 2]>,
    _edges: TaskGroup,
}

/// Messages and bytes from gateway to gateway.
#[derive(Default)]
struct Traffic {
    messages: AtomicU64,
    bytes: AtomicU64,
}

fn node(number: usize) -> NodeName {
    NodeName::parse(&format!("edge-{number:06}.region-1.example")).unwrap()
}

fn pool(node: usize) -> String {
    format!("pool-{}", node / NODES_PER_POOL)
}

/// Returns the address at which clients reach a gateway.
fn client_address(gateway: usize) -> IpAddr {
    Ipv4Addr::from_bits(0x0a00_0001 + u32::try_from(gateway).unwrap()).into()
}

impl Fleet {
    /// Creates gateways whose nodes are connected.
    async fn new(nodes: usize) -> Self {
        let edges = TaskGroup::default();
        let mut gateways = Vec::new();
        for number in 0..GATEWAYS {
            gateways.push(Gateway::new(number, nodes, &edges).await);
        }
        // The nodes of one gateway are spread over all others.
        let second = |node: usize| node + 1 + node / GATEWAYS % (GATEWAYS - 1);
        let holders = (0..nodes).map(|node| [node % GATEWAYS, second(node) % GATEWAYS]);
        let fleet = Self {
            gateways,
            running: Arc::default(),
            traffic: Arc::default(),
            holders: holders.collect(),
            _edges: edges,
        };
        for (node, holders) in fleet.holders.iter().enumerate() {
            for holder in holders {
                fleet.gateways[*holder].connect_node(node);
            }
        }
        fleet
    }

    fn start_gateways(&self) {
        for gateway in &self.gateways {
            let running = (gateway.feed.clone(), gateway.tasks.clone());
            self.running.lock().unwrap().insert(gateway.number, running);
        }
        for gateway in &self.gateways {
            gateway.start(&self.running, &self.traffic);
        }
    }

    /// Ends the first gateway. Its nodes connect to others, spread over [`RETURN_TIME`].
    async fn kill_first(&mut self) {
        let dead = self.gateways.remove(0);
        self.running.lock().unwrap().remove(&dead.number);
        dead.tasks.drain(Duration::ZERO).await;
        let lost = self.holders.iter_mut().enumerate();
        let lost: Vec<_> = lost
            .filter(|(_, holders)| holders.contains(&dead.number))
            .collect();
        let pause = RETURN_TIME / u32::try_from(lost.len()).unwrap();
        let started = Instant::now();
        for (index, (node, holders)) in (0..).zip(lost) {
            tokio::time::sleep_until(started + pause * index).await;
            let remaining = holders.iter().find(|holder| **holder != dead.number);
            let remaining = *remaining.unwrap();
            let mut others = (1..GATEWAYS).cycle().skip(node % GATEWAYS);
            let next = others.find(|gateway| *gateway != remaining).unwrap();
            *holders = [remaining, next];
            let next = self.gateways.iter().find(|one| one.number == next);
            next.unwrap().connect_node(node);
        }
    }

    fn messages(&self) -> u64 {
        self.traffic.messages.load(Relaxed)
    }

    /// Waits until each gateway knows the holders of each node, and all have named the same leader of each pool.
    async fn until_agreed(&self, when: &str) {
        let started = Instant::now();
        loop {
            let wrong = self.disagreement();
            let Some(wrong) = wrong else {
                break;
            };
            assert!(started.elapsed() < LIMIT, "{when}: {wrong}");
            sleep(Duration::from_millis(100)).await;
        }
        println!("{when}: agreed after {:?}", started.elapsed());
    }

    fn disagreement(&self) -> Option<String> {
        let mut expected = [0; GATEWAYS];
        for holder in self.holders.iter().flatten() {
            expected[*holder] += 1;
        }
        for gateway in &self.gateways {
            let peers = gateway.registry.directory().peers();
            if peers.len() != self.gateways.len() - 1 {
                return Some(format!("{} has {} peers", gateway.number, peers.len()));
            }
            for peer in peers.iter() {
                let number: usize = peer.instance.parse().unwrap();
                if peer.node_count() != expected[number] {
                    let count = peer.node_count();
                    let expected = expected[number];
                    return Some(format!("{count} of {expected} nodes of {number}"));
                }
            }
        }
        self.leader_disagreement()
    }

    fn leader_disagreement(&self) -> Option<String> {
        let mut leaders: BTreeMap<String, NodeName> = BTreeMap::new();
        for gateway in &self.gateways {
            for (pool, leader) in gateway.api_cache.leaders() {
                let known = leaders.entry(pool).or_insert_with(|| leader.clone());
                if *known != leader {
                    return Some(format!("leaders {known} and {leader}"));
                }
            }
        }
        let pools = self.holders.len().div_ceil(NODES_PER_POOL);
        (leaders.len() != pools).then(|| format!("{} of {pools} pools lead", leaders.len()))
    }

    /// Checks that the last gateway resolves each node to its holders.
    fn check_dns(&self) {
        let gateway = self.gateways.last().unwrap();
        let own = [client_address(gateway.number)];
        for (number, expected) in self.holders.iter().enumerate() {
            let mut resolved = holders::addresses(&own, &node(number), &gateway.registry);
            let mut expected = expected.map(client_address);
            resolved.sort();
            expected.sort();
            assert_eq!(resolved, expected, "{}", node(number));
        }
    }
}

impl Gateway {
    async fn new(number: usize, nodes: usize, edges: &TaskGroup) -> Self {
        let workers = Workers::on_current_runtime();
        let registry = Registry::new(&workers);
        registry
            .directory()
            .state_addresses(&[client_address(number)]);
        let records = NodesWriter::default();
        records.upsert_all((0..nodes).map(|number| {
            let record = Node {
                pool: Some(pool(number)),
                ..Node::default()
            };
            (node(number), record)
        }));
        let (control, mut messages) = mpsc::channel(1024);
        edges.spawn(debug_span!("control"), async move {
            while messages.recv().await.is_some() {}
        });
        let rules = config::ApiCache::default();
        let ca = Ca::create(&TrustDomain::parse("test").unwrap()).unwrap();
        Self {
            number,
            api_cache: ApiCacheServer::new(&rules, &records.reader(), &Metrics::new()),
            nodes: records,
            tunnel: tunnel(edges).await,
            control,
            feed: NodeFeed {
                registry: registry.clone(),
                instance: number.to_string(),
                hello_timeout: config::Tunnel::default().hello_timeout,
                ca: LiveCa::new(ca),
                revocation: None,
            },
            registry,
            tasks: Arc::default(),
        }
    }

    fn start(&self, running: &Running, traffic: &Arc<Traffic>) {
        let connector = self.connector(connect_fn(running, traffic));
        let hold = Readiness::default().hold("peers");
        let connecting = connector.run(hold, CancellationToken::new());
        self.tasks.spawn(debug_span!("peers"), connecting);
        let instance = Some(self.feed.instance.as_str().into());
        let assigner =
            LeaderAssigner::new(&self.api_cache, (&self.registry, instance), &self.nodes);
        let assigning = assigner.run(CancellationToken::new(), CancellationToken::new());
        self.tasks.spawn(debug_span!("leaders"), assigning);
    }

    fn connector(&self, connect: ConnectFn) -> PeerConnector {
        let others = (0..GATEWAYS).filter(|number| *number != self.number);
        let addresses = others.map(|number| format!("127.0.0.1:{}", number + 1));
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
            instance: self.feed.instance.as_str().into(),
            registry: self.registry.clone(),
            reads_pools: true,
            workers: Workers::on_current_runtime(),
            memory_budget: Arc::new(MemoryBudget::new(usize::MAX)),
            tls: Arc::new(move || Ok(tls.clone())),
            certificate_changes: watch::channel(()).1,
            revoked: RevokedSerials::default(),
            connect,
            links: TaskGroup::default(),
        }
    }

    fn connect_node(&self, number: usize) {
        let hello = EdgeHello {
            instance: number.to_string(),
            site: Some(vec![format!("192.0.2.1:{}", 1 + number % 60_000)]),
            ..EdgeHello::default()
        };
        let new_tunnel = NewTunnel {
            tunnel: self.tunnel.clone(),
            hello: Arc::new(hello),
            remote_address: (Ipv4Addr::LOCALHOST, 1).into(),
            certificate: EdgeCertificate::default(),
            roots: Arc::default(),
            crls: Arc::default(),
            unhealthy_ports: Arc::default(),
            control: self.control.clone(),
            taken_over: CancellationToken::new(),
        };
        self.registry.register(&node(number), new_tunnel).unwrap();
    }
}

/// Opens a tunnel whose edge never receives a request.
async fn tunnel(tasks: &TaskGroup) -> Tunnel {
    let (near, far) = duplex(PIPE);
    tasks.spawn(debug_span!("edge"), async move {
        let io = CountedIo::new(far);
        let traffic = io.traffic();
        let accepting = edge_side::accept(io, traffic, EdgeSideConfig::default());
        let mut edge = accepting.await.unwrap();
        while edge.next_stream().await.is_ok() {}
    });
    let io = CountedIo::new(near);
    let traffic = io.traffic();
    let connecting = gateway_side::connect(io, traffic, GatewaySideConfig::default());
    let (tunnel, driver) = connecting.await.unwrap();
    tasks.spawn(
        debug_span!("tunnel"),
        async move { drop(driver.run().await) },
    );
    tunnel
}

/// Returns a function that connects to a gateway that runs, by the number in its port.
fn connect_fn(running: &Running, traffic: &Arc<Traffic>) -> ConnectFn {
    let (running, traffic) = (running.clone(), traffic.clone());
    Arc::new(move |address, _, _| {
        let number = usize::from(address.address.port()) - 1;
        let target = running.lock().unwrap().get(&number).cloned();
        let traffic = traffic.clone();
        Box::pin(async move {
            let refused = || PeerError::Connect(io::ErrorKind::ConnectionRefused.into());
            let (feed, tasks) = target.ok_or_else(refused)?;
            let (near, far) = duplex(PIPE);
            tasks.spawn(debug_span!("peer"), serve_peer(feed, far));
            let io = CountedIo::new(CountedPipe {
                pipe: near,
                traffic,
            });
            Ok(PeerIo {
                traffic: io.traffic(),
                io: Box::new(io),
                round_trip: Duration::from_millis(1),
                serial: String::new(),
            })
        })
    })
}

/// Serves a connection of another gateway, which forwards no request.
async fn serve_peer(feed: NodeFeed, pipe: DuplexStream) {
    let io = CountedIo::new(pipe);
    let traffic = io.traffic();
    let handler = ForwardHandler(Arc::new(|_, _| Box::pin(async {})));
    if let Ok(connection) = edge_side::accept(io, traffic, EdgeSideConfig::default()).await {
        let from = ForwardingGateway {
            address: ([192, 0, 2, 1], 1).into(),
            serial: "".into(),
        };
        serve_streams((connection, from), &feed, (&handler, &|| None)).await;
    }
}

/// Pipe that counts the messages and bytes that it delivers. A message is a line that contains a JSON object.
struct CountedPipe {
    pipe: DuplexStream,
    traffic: Arc<Traffic>,
}

impl AsyncRead for CountedPipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.pipe).poll_read(context, buffer))?;
        let read = &buffer.filled()[before..];
        let messages = read.windows(2).filter(|pair| *pair == b"}\n").count();
        self.traffic.messages.fetch_add(messages as u64, Relaxed);
        self.traffic.bytes.fetch_add(read.len() as u64, Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for CountedPipe {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.pipe).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_shutdown(context)
    }
}

/// Figures of one phase after another.
struct Figures {
    messages: u64,
    bytes: u64,
    resident: u64,
    real_time: std::time::Instant,
}

impl Figures {
    fn new(fleet: &Fleet) -> Self {
        println!(
            "{GATEWAYS} gateways, {} nodes with two tunnels each, {} MiB resident",
            fleet.holders.len(),
            resident_bytes() >> 20
        );
        Self::now(fleet)
    }

    fn now(fleet: &Fleet) -> Self {
        Self {
            messages: fleet.messages(),
            bytes: fleet.traffic.bytes.load(Relaxed),
            resident: resident_bytes(),
            real_time: std::time::Instant::now(),
        }
    }

    /// Prints the figures of a phase that ends now.
    fn print(&mut self, phase: &str, fleet: &Fleet) {
        let now = Self::now(fleet);
        println!(
            "{phase}: {} messages, {} KiB, {} MiB more resident for all gateways, {:?} of real time",
            now.messages - self.messages,
            (now.bytes - self.bytes) >> 10,
            now.resident.saturating_sub(self.resident) >> 20,
            now.real_time - self.real_time
        );
        *self = now;
    }
}

/// Returns the resident memory of this process in bytes, or 0 if the system does not tell.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
