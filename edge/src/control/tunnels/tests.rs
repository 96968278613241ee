//! Tunnels over real sockets and TLS, to gateways that are built from the gateway side of a tunnel.

mod count;
mod every;
mod revoked_gateways;

use crate::{
    Bound, Config, Edge, Error,
    control::test_address::reserved_address,
    status::{StatusReader, TunnelStatus},
};
use causeway_certs::{
    Ca, EdgeIdentity, GatewayName, LeafCertificate, NodeAttributes, NodeName, PrivateKey, Store,
    TrustDomain, VerifiedPublicKey,
    store::OpenMode,
    verify::{TicketSecret, TrustStore, join_server, tunnel_server},
};
use causeway_rt::{socket::CountedIo, task::TaskGroup};
use causeway_tunnel::{
    StreamKind, StreamReceiver, StreamSender, Tunnel,
    control_stream::{
        ControlStream, EdgeHello, EdgeMessage, GatewayHello, GatewayMessage, GoAway,
        NodePoolMembers,
    },
    gateway_side, wire,
};
use futures_util::FutureExt;
use http::Request;
use serde_json::{Value, json};
use std::{
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{Instant, sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::info_span;

const SOON: Duration = Duration::from_mins(2);
const HOUR: Duration = Duration::from_hours(1);

/// Advances the paused time at once, for all tasks that wait for it.
async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

/// Gateway that admits every edge of its CA.
struct Gateway {
    address: SocketAddr,
    registered: mpsc::Receiver<Registered>,
    tasks: TaskGroup,
}

/// Tunnel that an edge has opened.
struct Registered {
    tunnel: Tunnel,
    control: ControlStream,
    welcome: EdgeHello,
}

#[derive(Clone)]
struct Says {
    instance: String,
    gateways: Vec<String>,
    replicas: Option<u32>,
    dismiss: Option<GoAway>,
}

fn ca() -> Arc<Ca> {
    Arc::new(Ca::create(&TrustDomain::parse("test").unwrap()).unwrap())
}

fn issue_leaf(ca: &Ca) -> LeafCertificate {
    ca.issue_gateway(&[GatewayName::parse("localhost").unwrap()], HOUR)
        .unwrap()
}

fn acceptor(ca: &Ca, trusted: &Ca) -> TlsAcceptor {
    acceptor_with(&issue_leaf(ca), trusted)
}

fn acceptor_with(leaf: &LeafCertificate, trusted: &Ca) -> TlsAcceptor {
    let trust = TrustStore::from_ca(trusted).unwrap();
    TlsAcceptor::from(tunnel_server(leaf.resolver(), &trust, &TicketSecret::random()).unwrap())
}

impl Gateway {
    async fn start(ca: &Arc<Ca>) -> Self {
        let says = Says {
            instance: format!("{:032x}", rand::random::<u128>()),
            gateways: Vec::new(),
            replicas: None,
            dismiss: None,
        };
        Self::start_on(reserved_address(), acceptor(ca, ca), says).await
    }

    async fn start_on(address: SocketAddr, acceptor: TlsAcceptor, says: Says) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (told, registered) = mpsc::channel(16);
        let tasks = TaskGroup::default();
        tasks.spawn(info_span!("gateway"), async move {
            let tunnels = TaskGroup::default();
            while let Ok((tcp, _)) = listener.accept().await {
                let (acceptor, says, told) = (acceptor.clone(), says.clone(), told.clone());
                tunnels.spawn(info_span!("tunnel"), async move {
                    let Ok(tls) = acceptor.accept(CountedIo::new(tcp)).await else {
                        return;
                    };
                    let traffic = tls.get_ref().0.traffic();
                    let settings = gateway_side::GatewaySideConfig::default();
                    let Ok((tunnel, driver)) = gateway_side::connect(tls, traffic, settings).await
                    else {
                        return;
                    };
                    tokio::join!(driver.run(), async {
                        if let Some(registered) = greet(tunnel, says).await {
                            let _ = told.send(registered).await;
                        }
                    });
                });
            }
        });
        Self {
            address,
            registered,
            tasks,
        }
    }

    async fn next(&mut self) -> Registered {
        timeout(SOON, self.registered.recv())
            .await
            .unwrap()
            .unwrap()
    }
}

async fn greet(tunnel: Tunnel, says: Says) -> Option<Registered> {
    let mut control = tunnel.open_control_stream().await.ok()?;
    let hello = GatewayHello {
        protocol: wire::VERSION,
        version: "test".into(),
        gateway: "gateway".into(),
        instance: Some(says.instance),
        node: "edge-1".into(),
        gateways: says.gateways,
        replicas: says.replicas,
        crowded: false,
    };
    control.send(&GatewayMessage::Hello(hello)).await.ok()?;
    let EdgeMessage::Welcome(welcome) = control.receive().await.ok()? else {
        return None;
    };
    if let Some(why) = says.dismiss {
        let dismiss = GatewayMessage::Dismiss {
            why,
            detail: "by a test".into(),
            retry_after_ms: 90_000,
        };
        control.send(&dismiss).await.ok()?;
        control.receive::<EdgeMessage>().await.ok();
        return None;
    }
    control.send(&GatewayMessage::Registered).await.ok()?;
    Some(Registered {
        tunnel,
        control,
        welcome: *welcome,
    })
}

/// Data directory and CA of an edge.
struct World {
    data: TempDir,
    ca: Arc<Ca>,
}

struct Running {
    reader: StatusReader,
    admin: SocketAddr,
    stop: CancellationToken,
    tasks: TaskGroup,
}

impl World {
    /// Creates an edge that has joined `ca`.
    fn joined(ca: &Arc<Ca>) -> Self {
        let data = TempDir::new().unwrap();
        let key = PrivateKey::generate().unwrap();
        let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
        let issued = ca
            .issue_edge(&csr, &NodeName::parse("edge-1").unwrap(), HOUR)
            .unwrap();
        let identity = EdgeIdentity::new(&ca.root_pem(), &issued.pem(), &key.key_pem()).unwrap();
        Store::open(data.path(), OpenMode::Create)
            .unwrap()
            .save_edge(&identity)
            .unwrap();
        Self {
            data,
            ca: ca.clone(),
        }
    }

    fn config(&self, gateways: &[String], more: Value) -> Config {
        let mut config: Config = serde_json::from_value(more).unwrap();
        config.data_dir = self.data.path().into();
        config.gateways = gateways.to_vec();
        config.admin.listen = "127.0.0.1:0".parse().unwrap();
        // A gateway of these tests answers, however slow the machine is, and each further dial counts.
        let timeouts = &mut config.timeouts;
        (timeouts.tcp, timeouts.tls, timeouts.hello) = (SOON, SOON, SOON);
        config
    }

    async fn run(&self, gateways: &[String], more: Value) -> Running {
        let edge = Edge::open(self.config(gateways, more), &CancellationToken::new())
            .await
            .unwrap();
        Running::start(edge.bind().await.unwrap())
    }
}

impl Running {
    fn start(bound: Bound) -> Self {
        let (stop, tasks) = (CancellationToken::new(), TaskGroup::default());
        let (reader, admin) = (bound.status_reader(), bound.local_addr());
        let asked = stop.clone();
        tasks.spawn(info_span!("edge"), async move {
            bound.run(asked).await.unwrap();
        });
        Self {
            reader,
            admin,
            stop,
            tasks,
        }
    }

    /// Ends the edge at once, as if its process was killed. The data directory is free afterwards.
    async fn kill(self) {
        self.tasks.drain(Duration::ZERO).await;
    }

    /// Waits until the edge's status is as wanted.
    async fn until(
        &self,
        wanted: impl Fn(&crate::status::Status) -> bool,
    ) -> crate::status::Status {
        self.reader.wait_for(wanted).await
    }

    async fn admin(&self, path: &str) -> String {
        let mut tcp = TcpStream::connect(self.admin).await.unwrap();
        let ask = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        tcp.write_all(ask.as_bytes()).await.unwrap();
        let mut answer = String::new();
        tcp.read_to_string(&mut answer).await.unwrap();
        answer
    }
}

/// Starts an upstream that echoes.
async fn echo(tasks: &TaskGroup) -> SocketAddr {
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = app.local_addr().unwrap();
    tasks.spawn(info_span!("app"), async move {
        let sessions = TaskGroup::default();
        while let Ok((mut tcp, _)) = app.accept().await {
            sessions.spawn(info_span!("echo"), async move {
                let (mut read, mut write) = tcp.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    address
}

async fn session(tunnel: &Tunnel) -> (StreamSender, StreamReceiver) {
    let target = "edge-1:7".parse().unwrap();
    let opened = tunnel
        .open(Request::new(()), &StreamKind::Tcp, &target, false)
        .await
        .unwrap();
    let answer = timeout(SOON, opened.response).await.unwrap().unwrap();
    assert_eq!(answer.status(), 200, "{:?}", answer.headers());
    (opened.send, answer.into_body())
}

async fn round_trip(send: &mut StreamSender, receive: &mut StreamReceiver, bytes: usize) {
    let (mut left_to_read, chunk) = (bytes, bytes::Bytes::from(vec![7; bytes]));
    let reading = async {
        while left_to_read > 0 {
            left_to_read -= receive.next_chunk().await.unwrap().unwrap().len();
        }
    };
    let (written, ()) = timeout(SOON, async { tokio::join!(send.send_data(chunk), reading) })
        .await
        .unwrap();
    written.unwrap();
}

/// Moves bulk until the edge has opened a further tunnel, however long the dial takes.
async fn bulk_tunnel(
    gateway: &mut Gateway,
    send: &mut StreamSender,
    receive: &mut StreamReceiver,
) -> Registered {
    let mut next = pin!(gateway.next());
    loop {
        round_trip(send, receive, 4 << 20).await;
        if let Some(registered) = next.as_mut().now_or_never() {
            return registered;
        }
    }
}

/// Lets a second pass, and waits until each of these tunnels has answered a probe. The kernel may deliver bytes later than such steps
/// last, and a tunnel that receives nothing for 15 of them counts as silent.
async fn pass_second(alive: &[&Tunnel]) {
    let second = Duration::from_secs(1);
    pass(second).await;
    for tunnel in alive {
        tunnel.request_probe();
        let answers = async {
            while tunnel.is_open() && tunnel.idle_for() >= second {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(SOON, answers).await.unwrap();
    }
}

/// Lets time pass until the edge has sent a message.
async fn pass_until_message(
    edge: &Running,
    control: &mut ControlStream,
    alive: &[&Tunnel],
) -> EdgeMessage {
    let passing = async {
        let mut message = pin!(control.receive::<EdgeMessage>());
        loop {
            if let Some(message) = message.as_mut().now_or_never() {
                return message.unwrap();
            }
            pass_second(alive).await;
            // Sockets make progress meanwhile.
            edge.admin("/metrics").await;
        }
    };
    timeout(SOON, passing).await.unwrap()
}

/// Lets time pass, as [`pass_until_message`] does, until all tunnels that leave have ended. The edge may dial a gateway again at once.
async fn pass_until_left(edge: &Running, alive: &[&Tunnel]) {
    let is_leaving = |tunnel: &TunnelStatus| tunnel.state == "draining";
    let passing = async {
        while edge.reader.status().tunnels.iter().any(is_leaving) {
            pass_second(alive).await;
            edge.admin("/metrics").await;
        }
    };
    timeout(SOON, passing).await.unwrap();
}

/// Lets time pass for which a leaving tunnel without streams would not stay open. The stream moves bytes meanwhile.
async fn pass_with_stream(
    send: &mut StreamSender,
    receive: &mut StreamReceiver,
    alive: &[&Tunnel],
) {
    for _ in 0..20 {
        pass_second(alive).await;
        round_trip(send, receive, 1000).await;
    }
}

/// Configuration with an upstream at port 7. Additional tunnels end after a time without bulk that is longer than a dial takes.
fn bulk(app: SocketAddr) -> Value {
    json!({ "ports": { "7": { "target": app.to_string() } }, "tunnels": { "bulk_idle": "10s" } })
}

#[tokio::test]
async fn an_edge_identifies_itself_and_serves() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let app = echo(&tasks).await;
    let mut gateway = Gateway::start(&ca).await;
    let world = World::joined(&ca);
    let more = json!({ "ports": { "7": { "target": app.to_string() } }, "labels": { "site": "north" }, "pool": "p" });
    let edge = world.run(&[gateway.address.to_string()], more).await;
    let registered = gateway.next().await;
    let welcome = &registered.welcome;
    assert_eq!(
        (
            welcome.slot,
            welcome.ports.as_slice(),
            welcome.pool.as_deref()
        ),
        (0, &[7][..], Some("p"))
    );
    assert_eq!(
        (welcome.labels["site"].as_str(), welcome.instance.len()),
        ("north", 32)
    );
    let (mut send, mut receive) = session(&registered.tunnel).await;
    round_trip(&mut send, &mut receive, 1000).await;
    let status = edge.until(|status| status.state == "connected").await;
    assert_eq!((status.tunnels.len(), status.tunnels[0].opened), (1, 2));
    let health = edge.admin("/healthz").await;
    assert!(
        health.starts_with("HTTP/1.1 200") && health.ends_with("connected\n"),
        "{health}"
    );
    let metrics = edge.admin("/metrics").await;
    for line in [
        "causeway_edge_tunnels 1",
        "causeway_edge_open_streams{kind=\"tcp\"} 1",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
    let status = edge.admin("/status").await;
    assert!(
        status.contains("\"node\":\"edge-1\"") && status.contains(&gateway.address.to_string()),
        "{status}"
    );
}

#[tokio::test]
async fn reported_gateways_are_stored_and_used_after_a_restart() {
    let ca = ca();
    let mut told = Gateway::start(&ca).await;
    let says = Says {
        instance: "gateway".into(),
        gateways: vec![told.address.to_string(), "nonsense".into()],
        replicas: None,
        dismiss: None,
    };
    let mut first = Gateway::start_on(reserved_address(), acceptor(&ca, &ca), says).await;
    let world = World::joined(&ca);
    let configured = [first.address.to_string()];
    let edge = world.run(&configured, json!({})).await;
    first.next().await;
    edge.until(|status| status.gateways.len() == 2).await;
    // The status shows only addresses that are on the disk.
    edge.kill().await;
    drop(first);
    let _edge = world.run(&configured, json!({})).await;
    told.next().await;
}

#[tokio::test]
async fn a_drain_connects_elsewhere_first_and_open_streams_continue() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let app = echo(&tasks).await;
    let (mut old, mut new) = (Gateway::start(&ca).await, Gateway::start(&ca).await);
    let world = World::joined(&ca);
    let gateways = [old.address.to_string(), new.address.to_string()];
    let edge = world
        .run(
            &gateways,
            json!({ "ports": { "7": { "target": app.to_string() } } }),
        )
        .await;
    let Registered {
        tunnel,
        mut control,
        welcome,
    } = old.next().await;
    let (mut send, mut receive) = session(&tunnel).await;
    control
        .send(&GatewayMessage::Drain {
            grace_ms: 1000,
            successor: false,
        })
        .await
        .unwrap();
    let second = new.next().await;
    assert_eq!(
        (&second.welcome.instance, second.welcome.slot),
        (&welcome.instance, 0)
    );
    let left = timeout(SOON, control.receive::<EdgeMessage>())
        .await
        .unwrap()
        .unwrap();
    assert!(matches!(left, EdgeMessage::Leave { .. }));
    let alive = [&second.tunnel];
    pass_with_stream(&mut send, &mut receive, &alive).await;
    let status = edge.reader.status();
    assert_eq!(status.tunnels.len(), 2, "{status:?}");
    send.end().unwrap();
    assert!(receive.next_chunk().await.is_none());
    pass_until_left(&edge, &alive).await;
}

#[tokio::test]
async fn an_edge_serves_both_gateways_until_it_stops() {
    let ca = ca();
    let (mut old, mut new) = (Gateway::start(&ca).await, Gateway::start(&ca).await);
    let world = World::joined(&ca);
    let gateways = [old.address.to_string(), new.address.to_string()];
    let edge = world.run(&gateways, json!({})).await;
    let Registered {
        tunnel: _tunnel,
        mut control,
        ..
    } = old.next().await;
    let drain = GatewayMessage::Drain {
        grace_ms: 600_000,
        successor: false,
    };
    control.send(&drain).await.unwrap();
    let _second = new.next().await;
    for expected in [true, false] {
        let left = timeout(SOON, control.receive::<EdgeMessage>()).await;
        let left = left.unwrap().unwrap();
        assert!(
            matches!(left, EdgeMessage::Leave { serves, .. } if serves == expected),
            "{left:?}"
        );
        edge.stop.cancel();
    }
}

/// Another gateway may be behind the address of a load balancer.
#[tokio::test]
async fn a_drain_tries_the_same_address_if_there_is_no_other() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let app = echo(&tasks).await;
    let mut gateway = Gateway::start(&ca).await;
    let world = World::joined(&ca);
    let more = json!({
        "tunnels": { "gateways": "one" },
        "ports": { "7": { "target": app.to_string() } },
    });
    let _edge = world.run(&[gateway.address.to_string()], more).await;
    let mut first = gateway.next().await;
    let (mut send, mut receive) = session(&first.tunnel).await;
    let drain = GatewayMessage::Drain {
        grace_ms: 60_000,
        successor: false,
    };
    first.control.send(&drain).await.unwrap();
    let _second = gateway.next().await;
    let left = timeout(SOON, first.control.receive::<EdgeMessage>()).await;
    assert!(matches!(left.unwrap().unwrap(), EdgeMessage::Leave { .. }));
    round_trip(&mut send, &mut receive, 1000).await;
}

#[tokio::test]
async fn a_superseded_edge_backs_off_at_the_maximum_and_says_so() {
    let ca = ca();
    let says = Says {
        instance: "gateway".into(),
        gateways: Vec::new(),
        replicas: None,
        dismiss: Some(GoAway::Superseded),
    };
    let gateway = Gateway::start_on(reserved_address(), acceptor(&ca, &ca), says).await;
    let world = World::joined(&ca);
    let edge = world.run(&[gateway.address.to_string()], json!({})).await;
    let status = edge.until(|status| status.state == "refused").await;
    assert!(status.trouble.unwrap().what.contains("superseded"));
    let health = edge.admin("/healthz").await;
    assert!(
        health.starts_with("HTTP/1.1 503") && health.contains("by a test"),
        "{health}"
    );
    drop(gateway.tasks);
}

#[tokio::test]
async fn an_unknown_certificate_is_reported_as_unknown() {
    let (ca, other) = (ca(), ca());
    let says = Says {
        instance: "gateway".into(),
        gateways: Vec::new(),
        replicas: None,
        dismiss: None,
    };
    let gateway = Gateway::start_on(reserved_address(), acceptor(&ca, &other), says).await;
    let world = World::joined(&ca);
    let edge = world.run(&[gateway.address.to_string()], json!({})).await;
    let status = edge.until(|status| status.state == "refused").await;
    let what = status.trouble.unwrap().what;
    assert!(
        what.contains("does not accept this node's certificate"),
        "{what}"
    );
}

#[tokio::test]
async fn a_gateway_of_another_ca_receives_no_data() {
    let (ca, other) = (ca(), ca());
    let gateway = Gateway::start(&other).await;
    let world = World::joined(&ca);
    let edge = world.run(&[gateway.address.to_string()], json!({})).await;
    let status = edge.until(|status| status.state == "refused").await;
    assert!(status.trouble.unwrap().what.contains("UnknownIssuer"));
}

#[tokio::test]
async fn an_edge_is_back_soon_after_its_gateway_is() {
    let ca = ca();
    let mut gateway = Gateway::start(&ca).await;
    let (address, world) = (gateway.address, World::joined(&ca));
    let edge = world.run(&[address.to_string()], json!({})).await;
    let first = gateway.next().await;
    drop((first, gateway));
    let away =
        |status: &crate::status::Status| status.state == "connecting" && status.trouble.is_some();
    let trouble = edge.until(away).await.trouble.unwrap();
    let pause = trouble.retry_at - trouble.at;
    assert!(pause <= 2_000, "it dials again in {pause} ms");
    let says = Says {
        instance: "gateway".into(),
        gateways: Vec::new(),
        replicas: None,
        dismiss: None,
    };
    let mut gateway = Gateway::start_on(address, acceptor(&ca, &ca), says).await;
    gateway.next().await;
}

#[tokio::test]
async fn bulk_adds_a_second_tunnel_until_bulk_ends() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let app = echo(&tasks).await;
    let mut gateway = Gateway::start(&ca).await;
    let world = World::joined(&ca);
    let edge = world.run(&[gateway.address.to_string()], bulk(app)).await;
    let first = gateway.next().await;
    let (mut send, mut receive) = session(&first.tunnel).await;
    let Registered {
        tunnel: second,
        mut control,
        welcome,
    } = bulk_tunnel(&mut gateway, &mut send, &mut receive).await;
    assert_eq!(
        (welcome.slot, &welcome.instance),
        (1, &first.welcome.instance)
    );
    let both = [&first.tunnel, &second];
    let left = pass_until_message(&edge, &mut control, &both).await;
    assert!(matches!(left, EdgeMessage::Leave { .. }));
    // A gateway that has not received the message yet may still open a stream.
    for _ in 0..5 {
        pass_second(&both).await;
        edge.admin("/metrics").await;
    }
    let (mut send, mut receive) = session(&second).await;
    round_trip(&mut send, &mut receive, 1000).await;
    drop((send, receive));
    pass_until_left(&edge, &[&first.tunnel]).await;
    let status = edge.reader.status();
    let slots: Vec<_> = status.tunnels.iter().map(|tunnel| tunnel.slot).collect();
    assert_eq!(slots, [0], "{status:?}");
}

#[tokio::test]
async fn the_next_bulk_tunnel_supersedes_the_leaving_one() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let app = echo(&tasks).await;
    let mut gateway = Gateway::start(&ca).await;
    let world = World::joined(&ca);
    let edge = world.run(&[gateway.address.to_string()], bulk(app)).await;
    let first = gateway.next().await;
    let (mut send, mut receive) = session(&first.tunnel).await;
    let mut sessions: Vec<(Registered, StreamSender, StreamReceiver)> = Vec::new();
    for round in 0..3 {
        let mut further = bulk_tunnel(&mut gateway, &mut send, &mut receive).await;
        let before = round > 0;
        assert_eq!(
            (further.welcome.slot, further.welcome.takes_over),
            (1, before)
        );
        let (mut send, mut receive) = session(&further.tunnel).await;
        round_trip(&mut send, &mut receive, 1000).await;
        let earlier = sessions.iter().map(|(further, _, _)| &further.tunnel);
        let alive: Vec<_> = earlier.chain([&first.tunnel, &further.tunnel]).collect();
        let left = pass_until_message(&edge, &mut further.control, &alive).await;
        assert!(matches!(
            left,
            EdgeMessage::Leave {
                until_idle: true,
                ..
            }
        ));
        sessions.push((further, send, receive));
        for (_, send, receive) in &mut sessions {
            round_trip(send, receive, 1000).await;
        }
    }
    drop(sessions);
    pass_until_left(&edge, &[&first.tunnel]).await;
    // No tunnel is left, so there are no streams to keep.
    let next = bulk_tunnel(&mut gateway, &mut send, &mut receive).await;
    assert!(!next.welcome.takes_over);
}

#[tokio::test]
async fn an_edge_that_another_process_succeeds_keeps_its_open_streams() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let app = echo(&tasks).await;
    let mut gateway = Gateway::start(&ca).await;
    let world = World::joined(&ca);
    let more = json!({ "ports": { "7": { "target": app.to_string() } } });
    let edge = world.run(&[gateway.address.to_string()], more).await;
    let Registered {
        tunnel,
        mut control,
        ..
    } = gateway.next().await;
    let (mut send, mut receive) = session(&tunnel).await;
    let dismiss = GatewayMessage::Dismiss {
        why: GoAway::Superseded,
        detail: "by a test".into(),
        retry_after_ms: 90_000,
    };
    control.send(&dismiss).await.unwrap();
    let status = edge.until(|status| status.trouble.is_some()).await;
    assert_eq!(
        (status.state, status.tunnels[0].state),
        ("refused", "draining")
    );
    assert!(status.trouble.unwrap().what.contains("superseded"));
    round_trip(&mut send, &mut receive, 1000).await;
    drop((send, receive));
    pass_until_left(&edge, &[]).await;
    assert!(edge.reader.status().tunnels.is_empty());
}

#[tokio::test]
async fn an_edge_that_stops_leaves_and_gives_open_streams_their_time() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let app = echo(&tasks).await;
    let mut gateway = Gateway::start(&ca).await;
    let world = World::joined(&ca);
    let more = json!({ "ports": { "7": { "target": app.to_string() } } });
    let edge = world.run(&[gateway.address.to_string()], more).await;
    let Registered {
        tunnel,
        mut control,
        ..
    } = gateway.next().await;
    let (mut send, mut receive) = session(&tunnel).await;
    edge.stop.cancel();
    let left = timeout(SOON, control.receive::<EdgeMessage>())
        .await
        .unwrap()
        .unwrap();
    assert!(matches!(left, EdgeMessage::Leave { .. }));
    // Nothing happens on the open stream meanwhile.
    pass(Duration::from_millis(300)).await;
    round_trip(&mut send, &mut receive, 1000).await;
    send.end().unwrap();
    assert!(receive.next_chunk().await.is_none());
    assert_eq!(edge.tasks.drain(SOON).await, 0);
}

/// Starts a proxy that speaks HTTP CONNECT or SOCKS5 and requires `user:secret`.
async fn proxy(tasks: &TaskGroup, socks: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tasks.spawn(info_span!("proxy"), async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let far = if socks {
                socks5(&mut near).await
            } else {
                connect(&mut near).await
            };
            let mut far = TcpStream::connect(("127.0.0.1", far)).await.unwrap();
            let _ = copy_bidirectional(&mut near, &mut far).await;
        }
    });
    address
}

async fn connect(near: &mut TcpStream) -> u16 {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        head.push(char::from(near.read_u8().await.unwrap()));
    }
    assert!(
        head.contains("Proxy-Authorization: Basic dXNlcjpzZWNyZXQ="),
        "{head}"
    );
    near.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
    let target = head.split(' ').nth(1).unwrap();
    target.rsplit(':').next().unwrap().parse().unwrap()
}

async fn socks5(near: &mut TcpStream) -> u16 {
    let mut read = [0; 64];
    assert_eq!(near.read(&mut read).await.unwrap(), 3);
    near.write_all(&[5, 2]).await.unwrap();
    let count = near.read(&mut read).await.unwrap();
    assert_eq!(&read[..count], b"\x01\x04user\x06secret");
    near.write_all(&[1, 0]).await.unwrap();
    let count = near.read(&mut read).await.unwrap();
    near.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0])
        .await
        .unwrap();
    u16::from_be_bytes([read[count - 2], read[count - 1]])
}

#[tokio::test]
async fn gateways_are_reached_through_a_proxy_with_credentials() {
    for (socks, scheme) in [(false, "http"), (true, "socks5")] {
        let (tasks, ca) = (TaskGroup::default(), ca());
        let mut gateway = Gateway::start(&ca).await;
        let world = World::joined(&ca);
        let proxy = format!("{scheme}://user:secret@{}", proxy(&tasks, socks).await);
        // Only the proxy could know this name.
        let gateways = [format!("gateway.invalid:{}", gateway.address.port())];
        let _edge = world.run(&gateways, json!({ "proxy": proxy })).await;
        gateway.next().await;
    }
}

/// Answers one request to join.
async fn enrolling(
    tasks: &TaskGroup,
    ca: &Arc<Ca>,
    answer: impl Fn(Value) -> (u16, Value) + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let leaf = ca
        .issue_gateway(&[GatewayName::parse("localhost").unwrap()], HOUR)
        .unwrap();
    let trust = TrustStore::from_ca(ca).unwrap();
    let acceptor = TlsAcceptor::from(join_server(leaf.resolver(), &trust, None).unwrap());
    tasks.spawn(info_span!("enrol"), async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let Ok(mut tls) = acceptor.accept(tcp).await else {
                continue;
            };
            let mut read = Vec::new();
            let body = loop {
                read.push(tls.read_u8().await.unwrap());
                if let Some(head) = read.windows(4).position(|four| four == b"\r\n\r\n")
                    && let Ok(body) = serde_json::from_slice(&read[head + 4..])
                {
                    assert!(read.starts_with(b"POST /v1/enrol HTTP/1.1\r\n"));
                    break body;
                }
            };
            let (status, body) = answer(body);
            let body = body.to_string();
            let text = format!(
                "HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            tls.write_all(text.as_bytes()).await.unwrap();
            tls.flush().await.unwrap();
        }
    });
    address
}

fn token(world: &World) -> causeway_certs::JoinToken {
    let store = TempDir::new().unwrap();
    let store = Store::open(store.path(), OpenMode::Create).unwrap();
    store.save_ca(&world.ca).unwrap();
    let node = NodeName::parse("edge-1").unwrap();
    store
        .tokens()
        .unwrap()
        .create(&node, HOUR, NodeAttributes::default())
        .unwrap()
}

/// Returns a handler that grants the request with this CA.
fn grant(ca: &Arc<Ca>, told: String) -> impl Fn(Value) -> (u16, Value) + Send + use<> {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let ca = ca.clone();
    move |asked| {
        let csr = STANDARD.decode(asked["csr"].as_str().unwrap()).unwrap();
        let node = NodeName::parse("edge-1").unwrap();
        let issued = ca
            .issue_edge(&VerifiedPublicKey::verify(&csr).unwrap(), &node, HOUR)
            .unwrap();
        assert!(asked["token"].as_str().unwrap().starts_with("cwj1."));
        let body = json!({
            "certificate": issued.pem(), "root": ca.root_pem(), "trust_domain": "test", "node": "edge-1",
            "gateways": [told],
        });
        (200, body)
    }
}

#[tokio::test]
async fn a_token_becomes_an_identity_that_needs_no_token_any_more() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let mut gateway = Gateway::start(&ca).await;
    let joins = enrolling(&tasks, &ca, grant(&ca, gateway.address.to_string())).await;
    let world = World {
        data: TempDir::new().unwrap(),
        ca,
    };
    let mut config = world.config(&[joins.to_string()], json!({}));
    config.join = Some(token(&world).text());
    let edge = Edge::open(config, &CancellationToken::new()).await.unwrap();
    assert_eq!(edge.node(), "edge-1");
    drop((edge, tasks));
    let _edge = world.run(&[], json!({ "node": "edge-1" })).await;
    gateway.next().await;
}

#[tokio::test]
async fn a_refused_token_is_final_and_so_is_a_gateway_of_another_ca() {
    let (tasks, ca, other) = (TaskGroup::default(), ca(), ca());
    let world = World {
        data: TempDir::new().unwrap(),
        ca: ca.clone(),
    };
    let refuse = |_| {
        (
            410,
            json!({ "reason": "token_expired", "detail": "an hour ago" }),
        )
    };
    let refuses = enrolling(&tasks, &ca, refuse).await;
    let another = enrolling(&tasks, &other, grant(&other, String::new())).await;
    for (gateway, words) in [
        (refuses, "refused to let this node join: an hour ago"),
        (another, "the token expects"),
    ] {
        let mut config = world.config(&[gateway.to_string()], json!({}));
        config.join = Some(token(&world).text());
        let opened = timeout(SOON, Edge::open(config, &CancellationToken::new()))
            .await
            .unwrap();
        let error = opened.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Starts a server that answers each connection with these bytes, after its first bytes have arrived, and closes it.
async fn says(tasks: &TaskGroup, answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tasks.spawn(info_span!("server"), async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            let _ = tcp.read(&mut [0; 4096]).await;
            let _ = tcp.write_all(answer).await;
            let _ = tcp.shutdown().await;
            // If the connection was reset before the client has read the answer, the answer would be lost.
            while tcp.read(&mut [0; 4096]).await.is_ok_and(|read| read > 0) {}
        }
    });
    address
}

/// Starts a gateway's client listener: TLS with a certificate of the CA, for HTTP.
async fn listener(tasks: &TaskGroup, ca: &Ca, alpn: &[&[u8]]) -> String {
    let leaf = ca.issue_listener(&[GatewayName::parse("localhost").unwrap()], HOUR);
    let trust = TrustStore::from_ca(ca).unwrap();
    let config = join_server(leaf.unwrap().resolver(), &trust, None).unwrap();
    let mut config = Arc::unwrap_or_clone(config);
    config.alpn_protocols = alpn.iter().map(|one| one.to_vec()).collect();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tasks.spawn(info_span!("listener"), async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let _ = acceptor.accept(tcp).await;
        }
    });
    address
}

#[tokio::test]
async fn a_port_that_is_not_the_tunnel_port_is_named_with_the_default() {
    let (tasks, ca) = (TaskGroup::default(), ca());
    let http: &[&[u8]] = &[b"h2", b"http/1.1"];
    for gateway in [
        listener(&tasks, &ca, http).await,
        listener(&tasks, &ca, &[]).await,
        says(&tasks, b"HTTP/1.1 400 Bad Request\r\n\r\n").await,
        says(&tasks, b"SSH-2.0-OpenSSH_9.9\r\n").await,
        says(&tasks, b"").await,
    ] {
        let mut message = Vec::new();
        let edge = World::joined(&ca)
            .run(std::slice::from_ref(&gateway), json!({}))
            .await;
        let status = edge.until(|status| status.trouble.is_some()).await;
        message.push(status.trouble.unwrap().what);
        edge.kill().await;

        let joining = World {
            data: TempDir::new().unwrap(),
            ca: ca.clone(),
        };
        let mut config = joining.config(std::slice::from_ref(&gateway), json!({}));
        config.join = Some(token(&joining).text());
        let stop = CancellationToken::new();
        let heard = std::sync::Mutex::new(None);
        let tell = |why: &str| {
            *heard.lock().unwrap() = Some(why.to_owned());
            stop.cancel();
        };
        let opened = Edge::open_with_progress(config, &stop, &tell).await;
        assert!(matches!(opened, Err(Error::Stopped)), "{opened:?}");
        message.extend(heard.into_inner().unwrap());

        assert_eq!(message.len(), 2);
        for what in message {
            assert!(
                what.contains(&gateway) && what.contains("tunnel port") && what.contains("10262"),
                "{what}"
            );
        }
    }
}

#[tokio::test]
async fn an_edge_without_identity_token_or_gateway_names_the_lack() {
    let (stop, ca) = (CancellationToken::new(), ca());
    let nobody = World {
        data: TempDir::new().unwrap(),
        ca: ca.clone(),
    };
    let gateways = ["127.0.0.1:9".to_owned()];
    let opened = Edge::open(nobody.config(&gateways, json!({})), &stop).await;
    assert!(matches!(opened, Err(Error::NoIdentity(_))));
    let joined = World::joined(&ca);
    let opened = Edge::open(joined.config(&[], json!({})), &stop).await;
    assert!(matches!(opened, Err(Error::NoGateway)));
    let opened = Edge::open(joined.config(&gateways, json!({ "node": "edge-2" })), &stop).await;
    assert!(matches!(opened, Err(Error::OtherNode { .. })));
}

#[tokio::test]
async fn a_silent_gateway_is_asked_to_join_again_until_stopped() {
    let world = World {
        data: TempDir::new().unwrap(),
        ca: ca(),
    };
    let mut config = world.config(&["127.0.0.1:9".to_owned()], json!({}));
    config.join = Some(token(&world).text());
    let stop = CancellationToken::new();
    let told = AtomicUsize::new(0);
    let tell = |why: &str| {
        assert!(why.contains("127.0.0.1:9"), "{why}");
        if told.fetch_add(1, Relaxed) == 1 {
            stop.cancel();
        }
    };
    let opened = Edge::open_with_progress(config, &stop, &tell).await;
    assert!(matches!(opened, Err(Error::Stopped)));
}
