//! A cloud, gateways that serve its objects, and edges.

use super::super::{super::http_server::AcceptedConnections, local_server::cache_router};
use super::Nodes;
use crate::{
    Config,
    control::test_address::reserved_address,
    status::{self, ApiCacheStatus, Status},
};
use bytes::Bytes;
use causeway_certs::{
    Ca, EdgeIdentity, GatewayName, Identity, NodeName, PrivateKey, Purpose, Store, TrustDomain,
    TrustStore, VerifiedPublicKey, check_peer,
    store::OpenMode,
    verify::{TicketSecret, join_server, none_revoked, tunnel_server},
};
use causeway_rt::{socket::CountedIo, task::TaskGroup};
use causeway_tunnel::{
    control_stream::{
        EdgeHello, EdgeMessage, GatewayHello, GatewayMessage, NodePoolMember, NodePoolMembers,
    },
    gateway_side, wire,
};
use causeway_watch_cache::{
    CacheLimits, GroupVersionResource, ListWatch, SourceResponse, WatchCache, disk::SnapshotDir,
    reflect,
};
use futures_util::{StreamExt, future::BoxFuture, stream};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use rustls::{ServerConfig, server::Acceptor};
use rustls_pki_types::UnixTime;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    net::{TcpListener, TcpStream},
    sync::{broadcast, mpsc, watch},
    time::{sleep, timeout},
};
use tokio_rustls::LazyConfigAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::info_span;

pub(super) const SOON: Duration = Duration::from_mins(2);
const HOUR: Duration = Duration::from_hours(1);
const CACHE_LIMITS: CacheLimits = CacheLimits {
    response_bytes: 1 << 20,
    event_buffer_bytes: 1 << 20,
};

/// Versions by resource and name.
type Objects = BTreeMap<(String, String), u64>;

/// API with its objects.
pub(super) struct Cloud {
    objects: Mutex<(u64, Objects)>,
    events: broadcast::Sender<(String, String, u64)>,
    resources: Vec<GroupVersionResource>,
}

fn object(name: &str, version: u64) -> Value {
    json!({ "metadata": { "name": name, "namespace": "n", "resourceVersion": version.to_string() } })
}

impl Cloud {
    pub(super) fn with(resources: &[&str]) -> Arc<Self> {
        Arc::new(Self {
            objects: Mutex::new((1, BTreeMap::new())),
            events: broadcast::Sender::new(256),
            resources: resources.iter().map(|text| text.parse().unwrap()).collect(),
        })
    }

    /// Adds or changes this object.
    pub(super) fn put(&self, resource: &str, name: &str) {
        let mut objects = self.objects.lock().unwrap();
        objects.0 += 1;
        let version = objects.0;
        objects.1.insert((resource.into(), name.into()), version);
        let _ = self.events.send((resource.into(), name.into(), version));
    }

    fn list(&self, resource: &str) -> Bytes {
        let objects = self.objects.lock().unwrap();
        let of = objects.1.iter().filter(|((own, _), _)| own == resource);
        let items: Vec<_> = of
            .map(|((_, name), version)| object(name, *version))
            .collect();
        let list = json!({ "kind": "ServiceList", "apiVersion": "v1", "metadata": { "resourceVersion": objects.0.to_string() }, "items": items });
        list.to_string().into()
    }

    /// Returns events after this version, the oldest first.
    fn watch(
        &self,
        resource: &str,
        after: u64,
    ) -> stream::BoxStream<'static, Result<Bytes, String>> {
        let objects = self.objects.lock().unwrap();
        let receiver = self.events.subscribe();
        let mut known: Vec<_> = objects
            .1
            .iter()
            .filter(|((own, _), version)| own == resource && **version > after)
            .map(|((own, name), version)| (own.clone(), name.clone(), *version))
            .collect();
        known.sort_by_key(|event| event.2);
        let resource = resource.to_owned();
        let later = stream::unfold(receiver, async |mut receiver| {
            Some((receiver.recv().await.ok()?, receiver))
        });
        let all = stream::iter(known).chain(later);
        let of = all.filter(move |event| std::future::ready(event.0 == resource));
        let line = |(_, name, version): (String, String, u64)| {
            let event = json!({ "type": "ADDED", "object": object(&name, version) });
            Ok(Bytes::from(format!("{event}\n")))
        };
        of.map(line).boxed()
    }
}

/// The cloud's API as the source of a store.
struct Api(Arc<Cloud>);

impl ListWatch for Api {
    fn get(&self, asked: String) -> BoxFuture<'_, Result<SourceResponse, String>> {
        let (path, query) = asked.split_once('?').unwrap();
        let resource = self
            .0
            .resources
            .iter()
            .find(|one| one.path() == path)
            .unwrap()
            .to_string();
        let version = query
            .split('&')
            .find_map(|pair| pair.strip_prefix("resourceVersion="));
        let body = if query.contains("watch=true") {
            self.0.watch(&resource, version.unwrap().parse().unwrap())
        } else {
            let list = self.0.list(&resource);
            stream::once(async { Ok(list) }).boxed()
        };
        Box::pin(std::future::ready(Ok(SourceResponse {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            body,
        })))
    }

    fn is_watch_cache(&self) -> bool {
        false
    }
}

/// Gateway that admits every edge of its CA, accepts tunnels and serves reads.
pub(super) struct Gateway {
    pub(super) address: SocketAddr,
    pub(super) cloud: Arc<Cloud>,
    members: watch::Sender<Option<NodePoolMembers>>,
    welcomes: tokio::sync::Mutex<mpsc::Receiver<EdgeHello>>,
    readings: Arc<AtomicUsize>,
    tasks: TaskGroup,
}

/// Gateway that has been stopped.
pub(super) struct Gone {
    address: SocketAddr,
    pub(super) cloud: Arc<Cloud>,
}

#[derive(Clone)]
struct TestListener {
    tunnel: Arc<ServerConfig>,
    control: Arc<ServerConfig>,
    trust: TrustStore,
    members: watch::Receiver<Option<NodePoolMembers>>,
    welcomes: mpsc::Sender<EdgeHello>,
    reads: mpsc::Sender<(DuplexStream, SocketAddr)>,
    readings: Arc<AtomicUsize>,
}

impl Gateway {
    pub(super) async fn start(ca: &Arc<Ca>, cloud: Arc<Cloud>) -> Self {
        Self::start_on(reserved_address(), ca, cloud).await
    }

    async fn start_on(address: SocketAddr, ca: &Arc<Ca>, cloud: Arc<Cloud>) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let tasks = TaskGroup::default();
        let pool = WatchCache::new(&cloud.resources, &CACHE_LIMITS);
        for store in pool.stores() {
            let (store, api) = (store.clone(), Api(cloud.clone()));
            tasks.spawn(info_span!("store"), async move {
                reflect(&store, &api).await;
            });
        }
        let leaf = ca
            .issue_gateway(&[GatewayName::parse("localhost").unwrap()], HOUR)
            .unwrap();
        let trust = TrustStore::from_ca(ca).unwrap();
        let (reads, accepted) = mpsc::channel(1);
        let (told, welcomes) = mpsc::channel(16);
        let members = watch::Sender::new(None);
        let readings = Arc::new(AtomicUsize::new(0));
        let door = TestListener {
            tunnel: tunnel_server(leaf.resolver(), &trust, &TicketSecret::random()).unwrap(),
            control: join_server(leaf.resolver(), &trust, None).unwrap(),
            members: members.subscribe(),
            welcomes: told,
            reads,
            readings: readings.clone(),
            trust,
        };
        tasks.spawn(info_span!("serve"), async move {
            let listener = AcceptedConnections {
                connections: accepted,
                address,
            };
            let _ = axum::serve(listener, cache_router(pool, None, None)).await;
        });
        tasks.spawn(info_span!("gateway"), async move {
            let connections = TaskGroup::default();
            while let Ok((tcp, from)) = listener.accept().await {
                let door = door.clone();
                connections.spawn(info_span!("connection"), async move {
                    door.serve(tcp, from).await;
                });
            }
        });
        Self {
            address,
            cloud,
            members,
            welcomes: tokio::sync::Mutex::new(welcomes),
            readings,
            tasks,
        }
    }

    /// Announces the members to all edges.
    pub(super) fn tell(&self, members: &NodePoolMembers) {
        self.members.send_replace(Some(members.clone()));
    }

    pub(super) async fn welcomed(&self) -> EdgeHello {
        let mut welcomes = self.welcomes.lock().await;
        timeout(SOON, welcomes.recv()).await.unwrap().unwrap()
    }

    /// Returns the number of connections on which edges have read.
    pub(super) fn readings(&self) -> usize {
        self.readings.load(Relaxed)
    }

    pub(super) async fn stop(self) -> Gone {
        self.tasks.drain(Duration::ZERO).await;
        Gone {
            address: self.address,
            cloud: self.cloud.clone(),
        }
    }
}

impl Gone {
    pub(super) async fn again(self, ca: &Arc<Ca>) -> Gateway {
        Gateway::start_on(self.address, ca, self.cloud).await
    }
}

impl TestListener {
    async fn serve(self, tcp: TcpStream, from: SocketAddr) {
        let lazy = LazyConfigAcceptor::new(Acceptor::default(), CountedIo::new(tcp));
        let Ok(start) = lazy.await else { return };
        let tunnel = start
            .client_hello()
            .alpn()
            .is_some_and(|mut alpn| alpn.any(|one| one == wire::ALPN_TUNNEL));
        let config = if tunnel {
            self.tunnel.clone()
        } else {
            self.control.clone()
        };
        let Ok(tls) = start.into_stream(config).await else {
            return;
        };
        if !tunnel {
            assert_eq!(tls.get_ref().1.alpn_protocol(), Some(wire::ALPN_H2));
            self.readings.fetch_add(1, Relaxed);
            // The connection ends with the gateway, like the connections of a real one.
            let (near, mut far) = tokio::io::duplex(64 * 1024);
            self.reads.send((near, from)).await.unwrap();
            let mut tls = tls;
            let _ = tokio::io::copy_bidirectional(&mut tls, &mut far).await;
            return;
        }
        let shown = tls.get_ref().1.peer_certificates();
        let found = check_peer(
            shown,
            Purpose::Edge,
            UnixTime::now(),
            &self.trust,
            &none_revoked,
        );
        let Ok(Identity::Edge(node)) = found else {
            return;
        };
        let traffic = tls.get_ref().0.traffic();
        let Ok((tunnel, driver)) =
            gateway_side::connect(tls, traffic, gateway_side::GatewaySideConfig::default()).await
        else {
            return;
        };
        tokio::select! {
            _ = driver.run() => {}
            _ = self.talk(&tunnel, node.as_str().to_owned()) => {}
        }
    }

    async fn talk(mut self, tunnel: &causeway_tunnel::Tunnel, node: String) -> Option<()> {
        let mut control = tunnel.open_control_stream().await.ok()?;
        let hello = GatewayHello {
            protocol: wire::VERSION,
            version: "test".into(),
            gateway: "gateway".into(),
            instance: None,
            node,
            gateways: Vec::new(),
            replicas: None,
            crowded: false,
        };
        control.send(&GatewayMessage::Hello(hello)).await.ok()?;
        let EdgeMessage::Welcome(welcome) = control.receive().await.ok()? else {
            return None;
        };
        let reads = welcome.site.is_some();
        control.send(&GatewayMessage::Registered).await.ok()?;
        self.welcomes.send(*welcome).await.ok()?;
        loop {
            let told = self.members.borrow_and_update().clone();
            if let Some(told) = told.filter(|_| reads) {
                control.send(&GatewayMessage::Pool(told)).await.ok()?;
            }
            self.members.changed().await.ok()?;
        }
    }
}

/// Site whose nodes have certificates of one CA.
pub(super) struct World {
    pub(super) ca: Arc<Ca>,
}

/// Node that has joined, with its data directory.
pub(super) struct Node {
    name: &'static str,
    data: TempDir,
}

/// A running edge.
pub(super) struct Edge {
    pub(super) node: &'static str,
    pub(super) endpoint: SocketAddr,
    pub(super) site: SocketAddr,
    reader: status::StatusReader,
    admin: SocketAddr,
    stop: CancellationToken,
    tasks: TaskGroup,
}

/// Returns an identity of this CA for a node.
pub(super) fn identity(ca: &Ca, node: &str) -> EdgeIdentity {
    let key = PrivateKey::generate().unwrap();
    let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let issued = ca
        .issue_edge(&csr, &NodeName::parse(node).unwrap(), HOUR)
        .unwrap();
    EdgeIdentity::new(&ca.root_pem(), &issued.pem(), &key.key_pem()).unwrap()
}

impl World {
    pub(super) fn new() -> Self {
        let domain = TrustDomain::parse("test").unwrap();
        Self {
            ca: Arc::new(Ca::create(&domain).unwrap()),
        }
    }

    pub(super) fn edge(&self, name: &'static str) -> Node {
        let data = TempDir::new().unwrap();
        let store = Store::open(data.path(), OpenMode::Create).unwrap();
        store.save_edge(&identity(&self.ca, name)).unwrap();
        Node { name, data }
    }
}

impl Node {
    /// Saves these members, as if a gateway had announced them before the last stop.
    pub(super) fn knows(&self, members: &NodePoolMembers) {
        let store = Store::open(self.data.path(), OpenMode::Existing).unwrap();
        let text = serde_json::to_string(members).unwrap();
        store.write_runtime("members", &text).unwrap();
    }

    /// Waits until this state of the Services and a pool with this leader are on the disk. The edge does not report its saves.
    pub(super) async fn until_saved(&self, services: &causeway_watch_cache::Status, leader: &str) {
        let snapshots = SnapshotDir::new(self.data.path().join("pool"), 1 << 20);
        let store = Store::open(self.data.path(), OpenMode::Existing).unwrap();
        let is_saved = || {
            let cache = WatchCache::new(&["v1/services".parse().unwrap()], &CACHE_LIMITS);
            assert_eq!(snapshots.load(&cache), Vec::<String>::new());
            let text = store.read_runtime("members").unwrap().unwrap_or_default();
            let members = serde_json::from_str::<NodePoolMembers>(&text).unwrap_or_default();
            cache.stores()[0].status().version == services.version
                && members.leader.as_deref() == Some(leader)
        };
        let saved = async {
            while !is_saved() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(SOON, saved).await.expect("the state is saved");
    }

    /// Starts a cache of Services, for the node itself and the members of its pool. `more` contains additional keys of
    /// `api_cache`.
    pub(super) async fn start(&self, gateways: &[&Gateway], more: Value) -> Edge {
        let mut api_cache = json!({
            "listen": "127.0.0.1:0",
            "resources": ["v1/services"],
            "members": { "listen": "127.0.0.1:0", "addresses": ["localhost:10271"] },
            "save_every": "50ms",
        });
        api_cache
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        self.start_with(gateways, Some(api_cache)).await
    }

    pub(super) async fn start_with(&self, gateways: &[&Gateway], api_cache: Option<Value>) -> Edge {
        let nowhere = ["127.0.0.1:9".to_owned()].to_vec();
        let known: Vec<_> = gateways.iter().map(|one| one.address.to_string()).collect();
        let mut config = json!({ "backoff": { "silent_max": "200ms", "refused_max": "500ms" } });
        if let Some(mut api_cache) = api_cache {
            api_cache["listen"] = json!("127.0.0.1:0");
            config["api_cache"] = api_cache;
        }
        let mut config: Config = serde_json::from_value(config).unwrap();
        config.data_dir = self.data.path().into();
        config.gateways = if known.is_empty() { nowhere } else { known };
        config.admin.listen = "127.0.0.1:0".parse().unwrap();
        // The gateways of these tests answer, however slow the machine is.
        let timeouts = &mut config.timeouts;
        (timeouts.tcp, timeouts.tls, timeouts.hello) = (SOON, SOON, SOON);
        let edge = crate::Edge::open(config, &CancellationToken::new())
            .await
            .unwrap();
        let bound = edge.bind().await.unwrap();
        let (stop, tasks) = (CancellationToken::new(), TaskGroup::default());
        let asked = stop.clone();
        let none = "127.0.0.1:9".parse().unwrap();
        let running = Edge {
            node: self.name,
            endpoint: bound.api_cache_addr().unwrap_or(none),
            site: bound.members_addr().unwrap_or(none),
            reader: bound.status_reader(),
            admin: bound.local_addr(),
            stop,
            tasks,
        };
        running
            .tasks
            .spawn(info_span!("edge", node = self.name), async move {
                bound.run(asked).await.unwrap();
            });
        running
    }
}

impl Edge {
    /// Ends the edge at once, as if its process was killed. The data directory is free afterwards.
    pub(super) async fn kill(self) {
        self.tasks.drain(Duration::ZERO).await;
    }

    /// Stops the edge in order.
    pub(super) async fn stop(self) {
        self.stop.cancel();
        assert_eq!(self.tasks.drain(SOON).await, 0);
    }

    /// Waits until the cache has the wanted status.
    pub(super) async fn until(&self, wanted: impl Fn(&ApiCacheStatus) -> bool) -> ApiCacheStatus {
        let wanted = |status: &Status| status.api_cache.as_ref().is_some_and(&wanted);
        let status = self.reader.wait_for(wanted).await;
        status.api_cache.unwrap()
    }

    pub(super) async fn admin(&self, path: &str) -> String {
        let ask = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        raw(self.admin, &ask).await
    }
}

/// Returns a pool member with its address.
pub(super) fn at(node: &str, site: SocketAddr) -> NodePoolMember {
    NodePoolMember {
        node: node.into(),
        at: vec![site.to_string()],
    }
}

/// Returns a pool with these nodes.
pub(super) fn pool(leader: &str, nodes: Nodes<'_>) -> NodePoolMembers {
    NodePoolMembers {
        pool: Some("north".into()),
        leader: Some(leader.into()),
        members: nodes.iter().map(|edge| at(edge.node, edge.site)).collect(),
    }
}

/// Returns the whole response to these bytes.
pub(super) async fn raw(address: SocketAddr, ask: &str) -> String {
    let mut tcp = TcpStream::connect(address).await.unwrap();
    tcp.write_all(ask.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A reset after the answer is an end as well.
    let _ = timeout(SOON, tcp.read_to_end(&mut answer)).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

async fn ask(endpoint: SocketAddr, path: &str) -> (TaskGroup, http::Response<Incoming>) {
    let tasks = TaskGroup::default();
    let io = TcpStream::connect(endpoint).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(io)).await.unwrap();
    tasks.spawn(info_span!("client"), async {
        let _ = connection.await;
    });
    let request = Request::get(path)
        .header("host", "localhost")
        .body(Full::<Bytes>::default());
    let answer = timeout(SOON, sender.send_request(request.unwrap())).await;
    (tasks, answer.unwrap().unwrap())
}

/// Returns the status and the body of the response.
pub(super) async fn get(endpoint: SocketAddr, path: &str) -> (u16, Value) {
    let (_tasks, answer) = ask(endpoint, path).await;
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap())
}

/// Watch of the changes after one version.
pub(super) struct Watch {
    body: Incoming,
    unread: Vec<u8>,
    _tasks: TaskGroup,
}

pub(super) async fn watching(endpoint: SocketAddr, path: &str, version: &str) -> Watch {
    let (tasks, answer) = ask(
        endpoint,
        &format!("{path}?watch=1&resourceVersion={version}"),
    )
    .await;
    assert_eq!(answer.status(), StatusCode::OK);
    Watch {
        body: answer.into_body(),
        unread: Vec::new(),
        _tasks: tasks,
    }
}

impl Watch {
    /// Returns the name of the next object.
    pub(super) async fn next(&mut self) -> String {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                let event: Value = serde_json::from_slice(&line).unwrap();
                assert_eq!(event["type"], "ADDED", "{event}");
                return event["object"]["metadata"]["name"]
                    .as_str()
                    .unwrap()
                    .to_owned();
            }
            let frame = timeout(SOON, self.body.frame())
                .await
                .unwrap()
                .unwrap()
                .unwrap();
            self.unread.extend_from_slice(&frame.into_data().unwrap());
        }
    }

    /// Waits for the end of the watch.
    pub(super) async fn end(&mut self) {
        while let Some(Ok(_)) = self.body.frame().await {}
    }
}
