//! A gateway's control plane on real sockets.

use super::{FakeEdge, LONG, SHORT, welcome};
use crate::control::{
    api_cache::{ApiCacheServer, leaders::LeaderAssigner},
    drain::Readiness,
    enrol::{self, Enrolment},
    gateway_revocation::GatewayRevocation,
    heartbeat::HeartbeatVerifier,
    node_records::NodeRecordWriter,
    node_sync::NodeSync,
    pin_writer::PinWriter,
    tunnel_listener::{
        EgressHandler, LiveTls, Tls, TunnelListener, TunnelPortLimits, edge_verifier,
    },
};
use crate::{
    config,
    metrics::Metrics,
    state::{
        AdvertisedGateways, AnnouncedPortsCell, GatewayEndpoints, Node, Nodes, NodesWriter,
        Registry, pins::pins,
    },
    worker::Workers,
};
use arc_swap::ArcSwap;
use causeway_certs::{
    Ca, ClusterCa, EdgeIdentity, GatewayName, LeafCertificate, LiveCa, NodeName, OpenMode,
    PinTable, PrivateKey, Store, TrustDomain, TrustStore, VerifiedPublicKey, external,
    install_provider,
    verify::{self, TicketSecret},
};
use causeway_rt::{listener::BoundSocket, socket::CountedIo, task::TaskGroup};
use causeway_tunnel::control_stream::{EdgeHello, EdgeMessage, GatewayMessage};
use rustls::{ClientConfig, pki_types::ServerName};
use std::{io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    net::TcpStream,
    runtime::Handle,
    time::{sleep, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::sync::CancellationToken;
use tracing::info_span;

const LIFE: Duration = Duration::from_hours(1);

pub(crate) fn name(text: &str) -> NodeName {
    NodeName::parse(text).unwrap()
}

pub(crate) fn new_ca(domain: &str) -> Ca {
    Ca::create(&TrustDomain::parse(domain).unwrap()).unwrap()
}

/// Returns an identity of an edge, issued by this CA.
pub(crate) fn identity(ca: &Ca, node: &str) -> EdgeIdentity {
    let key = PrivateKey::generate().unwrap();
    let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let issued = ca.issue_edge(&csr, &name(node), LIFE).unwrap();
    EdgeIdentity::new(&ca.bundle_pem(), &issued.pem(), &key.key_pem()).unwrap()
}

/// Returns the certificate that the tunnel port presents.
pub(crate) fn shown(ca: &Ca) -> LeafCertificate {
    let names = [GatewayName::parse("127.0.0.1").unwrap()];
    ca.issue_gateway(&names, LIFE).unwrap()
}

/// Returns the state of the enrolment.
fn enrolment(
    (ca, store): (&LiveCa, &Store),
    (nodes, ledger): (&NodesWriter, &NodeRecordWriter),
    metrics: &Arc<Metrics>,
) -> Enrolment {
    Enrolment {
        ca: ca.clone(),
        store: store.clone(),
        nodes: nodes.clone(),
        shared_state: None,
        record_writer: ledger.clone(),
        metrics: metrics.clone(),
        lifetime: LIFE,
        advertised: advertised(&["gw.example:10262"]),
        accepts_cluster_identity: true,
        accepts_cluster_certificates: true,
    }
}

fn advertised(all: &[&str]) -> AdvertisedGateways {
    AdvertisedGateways::new(GatewayEndpoints {
        gateways: all.iter().map(ToString::to_string).collect(),
        replicas: None,
    })
}

/// Returns settings of a tunnel port that soon closes the tunnels of edges which send no hello, or which stay although they are
/// refused. A slow machine must not end anything else.
pub(crate) fn impatient() -> config::Tunnel {
    config::Tunnel {
        handshake_timeout: LONG,
        hello_timeout: SHORT,
        close_after: LONG,
        ..config::Tunnel::default()
    }
}

/// Starts the tasks that send messages to members of node pools.
fn pool_tasks(
    tasks: &TaskGroup,
    leaders: LeaderAssigner,
    heartbeats: &HeartbeatVerifier,
    (registry, stop): (&Registry, &CancellationToken),
) {
    tasks.spawn(
        info_span!("leaders"),
        leaders.run(stop.clone(), CancellationToken::new()),
    );
    let nonces = heartbeats.clone().run(registry.clone(), stop.clone());
    tasks.spawn(info_span!("heartbeats"), nonces);
}

/// The tunnel port of a gateway.
pub(crate) struct World {
    pub(crate) ca: Arc<Ca>,
    /// Holder of the CA that the gateway uses now.
    pub(crate) live: LiveCa,
    pub(crate) store: Store,
    pub(crate) nodes: NodesWriter,
    pub(crate) registry: Registry,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) readiness: Readiness,
    pub(crate) address: SocketAddr,
    pub(crate) stop: CancellationToken,
    tls: LiveTls,
    leaf: LeafCertificate,
    /// Server of the API cache.
    pub(crate) reading: Option<ApiCacheServer>,
    /// Revocations of gateways' certificates.
    pub(crate) gateway_revocation: GatewayRevocation,
    pub(crate) heartbeats: HeartbeatVerifier,
    /// Dropping it ends the gateway at once.
    pub(crate) tasks: TaskGroup,
    _dir: tempfile::TempDir,
}

/// Returns the future that serves a tunnel port, and its address.
fn serve(
    admission: TunnelListener,
    stop: CancellationToken,
) -> (impl Future<Output = ()> + Send, SocketAddr) {
    let bound = BoundSocket::tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = bound.local_addr().unwrap();
    let enrolment_ended = CancellationToken::new();
    let tokens = (stop.clone(), stop);
    (admission.run(bound, tokens, enrolment_ended), address)
}

/// Returns a data directory with a CA.
fn store_with_ca() -> (tempfile::TempDir, Store, Arc<Ca>) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("data"), OpenMode::Create).unwrap();
    let ca = Arc::new(new_ca("test.example"));
    store.save_ca(&ca).unwrap();
    (dir, store, ca)
}

/// Returns the TLS of a tunnel port with this certificate.
fn live_tls(ca: &Ca, leaf: &LeafCertificate) -> LiveTls {
    let trust = TrustStore::from_ca(ca).unwrap();
    let tls = Tls::new(leaf.resolver(), trust, &TicketSecret::random()).unwrap();
    Arc::new(ArcSwap::from_pointee(tls))
}

impl World {
    pub(crate) fn start() -> Self {
        Self::on(&Workers::on_current_runtime())
    }

    /// Starts a gateway that follows a cluster whose nodes are not loaded yet.
    pub(crate) fn of_a_cluster() -> Self {
        Self::with(&Workers::on_current_runtime(), true)
    }

    pub(crate) fn on(workers: &Workers) -> Self {
        Self::with(workers, false)
    }

    /// Starts a gateway with an API cache under these rules.
    pub(crate) fn read(api_cache: &config::ApiCache) -> Self {
        Self::made(&Workers::on_current_runtime(), false, Some(api_cache))
    }

    /// Starts a gateway with an API cache and these settings of the tunnel port.
    pub(crate) fn read_with(settings: config::Tunnel) -> Self {
        Self::built(
            &Workers::on_current_runtime(),
            false,
            Some(&config::ApiCache::default()),
            (settings, TunnelPortLimits::default()),
        )
    }

    /// Starts a gateway with this time limit of handshakes.
    pub(crate) fn with_handshake_timeout(handshake_timeout: Duration) -> Self {
        let settings = config::Tunnel {
            handshake_timeout,
            ..impatient()
        };
        let settings = (settings, TunnelPortLimits::default());
        Self::built(&Workers::on_current_runtime(), false, None, settings)
    }

    /// Starts a gateway to which connections from 127.0.0.1 begin with a PROXY header, with these limits.
    pub(crate) fn behind_a_balancer(places: TunnelPortLimits) -> Self {
        let settings = config::Tunnel {
            proxy_protocol: vec!["127.0.0.1/32".parse().unwrap()],
            hello_timeout: LONG,
            ..impatient()
        };
        let workers = Workers::on_current_runtime();
        Self::built(&workers, false, None, (settings, places))
    }

    /// Starts a gateway that waits long for the hello of an edge.
    pub(crate) fn patient() -> Self {
        let settings = config::Tunnel {
            hello_timeout: LONG,
            ..impatient()
        };
        let settings = (settings, TunnelPortLimits::default());
        Self::built(&Workers::on_current_runtime(), false, None, settings)
    }

    fn with(workers: &Workers, cluster: bool) -> Self {
        Self::made(workers, cluster, None)
    }

    /// Starts a gateway with these limits, and with the default timeouts.
    pub(crate) fn with_places(places: TunnelPortLimits) -> Self {
        let settings = config::Tunnel::default();
        Self::built(
            &Workers::on_current_runtime(),
            false,
            None,
            (settings, places),
        )
    }

    fn made(workers: &Workers, cluster: bool, api_cache: Option<&config::ApiCache>) -> Self {
        Self::built(
            workers,
            cluster,
            api_cache,
            (impatient(), TunnelPortLimits::default()),
        )
    }

    fn built(
        workers: &Workers,
        cluster: bool,
        api_cache: Option<&config::ApiCache>,
        (settings, places): (config::Tunnel, TunnelPortLimits),
    ) -> Self {
        install_provider();
        let (dir, store, ca) = store_with_ca();
        let (leaf, live) = (shown(&ca), LiveCa::new(store.ca().unwrap().unwrap()));
        let (nodes, metrics) = (NodesWriter::default(), Metrics::new());
        let (registry, tls) = (Registry::new(workers), live_tls(&ca, &leaf));
        let ledger = NodeRecordWriter::new(&store, &nodes);
        let reading = api_cache.map(|rules| ApiCacheServer::new(rules, &nodes.reader(), &metrics));
        let heartbeats = HeartbeatVerifier::new(&nodes.reader(), edge_verifier(&tls), &metrics);
        let gateway_revocation = GatewayRevocation::load(&store, &live, false).unwrap();
        let enrolment = enrolment((&live, &store), (&nodes, &ledger), &metrics);
        let admission = TunnelListener {
            instance: "gateway".into(),
            workers: workers.clone(),
            registry: registry.clone(),
            nodes: nodes.reader(),
            cluster: cluster.then(|| nodes.subscribe()),
            metrics: metrics.clone(),
            tls: tls.clone(),
            shared_state: None,
            record_writer: ledger,
            ca: live.clone(),
            settings,
            limits: places,
            memory_budget: Arc::default(),
            drain: LONG,
            advertised: advertised(&["gw.example:10262", "gw2.example:10262"]),
            announced_ports: AnnouncedPortsCell::default(),
            gateway_revocation: gateway_revocation.clone(),
            enrol: enrol::router(enrolment),
            egress: EgressHandler(Arc::new(|_| None)),
            api_cache: reading.clone(),
            peer_streams: None,
            heartbeats: Some(heartbeats.clone()),
            early_throttle: Arc::default(),
        };
        let (stop, tasks) = (CancellationToken::new(), TaskGroup::default());
        let (running, address) = serve(admission, stop.clone());
        tasks.spawn(info_span!("gateway"), running);
        if let Some(reading) = &reading {
            let leaders = LeaderAssigner::new(reading, (&registry, Some("gateway".into())), &nodes);
            pool_tasks(&tasks, leaders, &heartbeats, (&registry, &stop));
        }
        Self {
            ca,
            live,
            store,
            nodes,
            registry,
            metrics,
            readiness: Readiness::default(),
            address,
            stop,
            tls,
            leaf,
            reading,
            gateway_revocation,
            heartbeats,
            tasks,
            _dir: dir,
        }
    }

    pub(crate) fn reader(&self) -> Nodes {
        self.nodes.reader()
    }

    /// Makes the tunnel port trust the current roots of the CA. Its own certificate does not change.
    pub(crate) fn take_up(&self) {
        let tickets = TicketSecret::random();
        let trust = TrustStore::from_ca(&self.live.get()).unwrap();
        let tls = Tls::new(self.leaf.resolver(), trust, &tickets);
        self.tls.store(Arc::new(tls.unwrap()));
    }

    /// Makes the tunnel port accept nodes with certificates of the cluster's own signers.
    pub(crate) fn believe(&self, cluster: ClusterCa, tickets: &TicketSecret) {
        let trust = TrustStore::from_ca(&self.ca).unwrap();
        let tls = Tls::new(self.leaf.resolver(), trust, tickets).unwrap();
        let tls = tls
            .with_cluster_ca(self.leaf.resolver(), Some(cluster))
            .unwrap();
        self.tls.store(Arc::new(tls));
    }

    /// Makes the tunnel port trust the CA as an external one, and admit every node with one of its certificates.
    pub(crate) fn admit_any_node(&self) {
        let roots = external::parse_roots(&self.ca.bundle_pem()).unwrap();
        let trust = TrustStore::external(&roots, self.ca.trust_domain()).unwrap();
        let tls = Tls::new(self.leaf.resolver(), trust, &TicketSecret::random()).unwrap();
        self.tls.store(Arc::new(tls.any_node(true)));
    }

    /// Returns the node state of the gateway.
    pub(crate) fn roll(&self) -> NodeSync {
        let (_, writer, _) = pins(PinTable::new());
        NodeSync {
            store: self.store.clone(),
            nodes: self.nodes.clone(),
            pin_writer: PinWriter {
                shared_state: None,
                store: self.store.clone(),
                nodes: self.reader(),
                follows_cluster: false,
                writer,
            },
            tls: self.tls.clone(),
            registry: self.registry.clone(),
            api_cache: self.reading.clone(),
            gateway_revocation: self.gateway_revocation.clone(),
            tasks: Arc::default(),
            runtime: Handle::current(),
        }
    }

    /// Enrols an edge, and returns its identity.
    pub(crate) fn enrolled(&self, node: &str) -> EdgeIdentity {
        self.nodes.upsert(name(node), Node::default());
        identity(&self.ca, node)
    }

    /// Opens TLS to the tunnel port.
    pub(crate) async fn tls(
        &self,
        config: Arc<ClientConfig>,
    ) -> io::Result<TlsStream<CountedIo<TcpStream>>> {
        self.tls_on(TcpStream::connect(self.address).await?, config)
            .await
    }

    /// Connects by TLS on this connection to the tunnel port.
    pub(crate) async fn tls_on(
        &self,
        tcp: TcpStream,
        config: Arc<ClientConfig>,
    ) -> io::Result<TlsStream<CountedIo<TcpStream>>> {
        let server = ServerName::try_from("127.0.0.1").unwrap();
        TlsConnector::from(config)
            .connect(server, CountedIo::new(tcp))
            .await
    }

    /// Opens a tunnel up to the gateway's hello. Dials again if the gateway has closed the tunnel before, because the machine was
    /// slow.
    pub(crate) async fn dial(&self, identity: &EdgeIdentity) -> FakeEdge {
        let dialling = async {
            loop {
                let config = verify::tunnel_client(identity).unwrap();
                let io = self.tls(config).await.unwrap();
                if let Some(edge) = FakeEdge::greeted(io).await {
                    return edge;
                }
            }
        };
        timeout(LONG, dialling)
            .await
            .expect("the gateway sends no hello")
    }

    /// Opens a tunnel, sends this hello, and returns the tunnel with the gateway's answer. Dials again if the gateway has closed the
    /// tunnel without an answer, because the hello was late on a slow machine.
    pub(crate) async fn says(
        &self,
        identity: &EdgeIdentity,
        welcome: EdgeHello,
    ) -> (FakeEdge, GatewayMessage) {
        let welcome = EdgeMessage::Welcome(Box::new(welcome));
        let talking = async {
            loop {
                let mut edge = self.dial(identity).await;
                if edge.control.send(&welcome).await.is_ok()
                    && let Ok(heard) = edge.control.receive::<GatewayMessage>().await
                {
                    return (edge, heard);
                }
            }
        };
        timeout(LONG, talking)
            .await
            .expect("the gateway does not answer")
    }

    /// Opens a registered tunnel.
    pub(crate) async fn joined(
        &self,
        identity: &EdgeIdentity,
        instance: &str,
        slot: u32,
    ) -> FakeEdge {
        let (edge, heard) = self.says(identity, welcome(instance, slot)).await;
        assert_eq!(heard, GatewayMessage::Registered);
        edge
    }

    /// Waits until a condition is met. Conditions read metrics, tables and counts of tasks, most of which cannot notify of
    /// changes, so this function polls.
    pub(crate) async fn until(&self, what: impl Fn(&Self) -> bool) {
        let looking = async {
            while !what(self) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, looking)
            .await
            .expect("the condition was never met");
    }

    /// Whether a metric has this value.
    pub(crate) fn counted(&self, line: &str) -> bool {
        let line = format!("causeway_gateway_{line}");
        self.metrics
            .encode(causeway_rt::Exposition::OpenMetrics)
            .lines()
            .any(|found| found == line)
    }
}
