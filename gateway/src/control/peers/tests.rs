//! Connections to another gateway over in-memory pipes.

use super::*;
use crate::{
    control::{
        tests::world::new_ca,
        tunnel_listener::peer::{MAX_CONTROL_STREAMS, serve_streams},
    },
    state::{
        directory::{ForwardingGateway, MAX_POOL_NAME_LEN, MAX_POOLS},
        pool_reports::{NamedLeader, PoolReport, ReportedCandidate, ReportedMember},
    },
};
use causeway_certs::{LiveCa, PeerRejected};
use causeway_rt::socket::CountedIo;
use causeway_tunnel::edge_side::{self, EdgeSideConfig};
use rustls::RootCertStore;
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};
use tokio::io::{DuplexStream, duplex};

/// Time after which the attempts to open links fail.
const LINK_TIME: Duration = Duration::from_secs(3);
/// Serial number of the certificate of the other gateway.
const SERIAL: &str = "40aa";

/// Another gateway, which serves this end of a connection.
#[derive(Clone)]
struct OtherGateway {
    registry: Registry,
    /// Whether it rejects the certificate of this gateway from now on.
    rejects: Arc<AtomicBool>,
    tasks: Arc<TaskGroup>,
}

impl OtherGateway {
    fn new() -> Self {
        Self {
            registry: Registry::new(&Workers::on_current_runtime()),
            rejects: Arc::default(),
            tasks: Arc::default(),
        }
    }

    fn serve(&self, io: DuplexStream) {
        let feed = NodeFeed {
            registry: self.registry.clone(),
            ca: LiveCa::new(new_ca("causeway.test")),
            revocation: None,
            instance: "other".to_owned(),
            hello_timeout: Duration::from_secs(5),
        };
        let rejects = self.rejects.clone();
        self.tasks.spawn(info_span!("other"), async move {
            let rejection = || {
                let rejects = rejects.load(SeqCst);
                rejects.then(|| PeerRejected::Revoked("own".to_owned()))
            };
            let io = CountedIo::new(io);
            let traffic = io.traffic();
            let accepting = edge_side::accept(io, traffic, EdgeSideConfig::default());
            let connection = accepting.await.unwrap();
            let refuse = ForwardHandler(Arc::new(|_, _| Box::pin(async {})));
            let from = ForwardingGateway {
                address: (Ipv4Addr::LOCALHOST, 1).into(),
                serial: SERIAL.into(),
            };
            serve_streams((connection, from), &feed, (&refuse, &rejection)).await;
        });
    }

    /// Publishes reports about pools with these names, each as large as a message.
    fn publish(&self, pools: &[&str], since: Instant) {
        let name = |nth: usize| NodeName::parse(&format!("{nth:04}-{}", "n".repeat(50))).unwrap();
        let candidate = ReportedCandidate {
            connected_since: since,
            streams: 0,
            unanswered_since: None,
            is_late: false,
            is_heard: false,
        };
        let members = (0..400).map(|nth| ReportedMember {
            node: name(nth),
            at: vec!["[2001:db8::1]:10271".to_owned(); 4],
            candidate: Some(candidate),
        });
        let report = PoolReport {
            is_draining: false,
            leader: Some(NamedLeader {
                node: name(0),
                since,
                lost_at: None,
            }),
            members: members.collect(),
        };
        let reports = pools
            .iter()
            .map(|pool| ((*pool).to_owned(), Arc::new(report.clone())));
        let exchange = self.registry.directory().pool_exchange();
        exchange.publish(reports.collect());
    }

    /// Returns a connection to this gateway.
    async fn connect(&self, config: GatewaySideConfig) -> Tunnel {
        let (near, far) = duplex(1 << 16);
        self.serve(far);
        let io = CountedIo::new(near);
        let traffic = io.traffic();
        let (tunnel, driver) = gateway_side::connect(io, traffic, config).await.unwrap();
        self.tasks.spawn(info_span!("driver"), async move {
            driver.run().await;
        });
        tunnel
    }

    /// Returns a connector that can open the session with this gateway and the links.
    fn connector(&self) -> Arc<PeerConnector> {
        let other = self.clone();
        let connect: ConnectFn = Arc::new(move |_, _, _| {
            let (near, far) = duplex(1 << 16);
            other.serve(far);
            Box::pin(async move { Ok(peer_io(near)) })
        });
        Arc::new(connector(connect, true))
    }

    /// Opens a session with this gateway, whose links cannot be opened.
    async fn open_session(&self, reads_pools: bool) -> PeerSession {
        let (near, far) = duplex(1 << 16);
        self.serve(far);
        let near = Mutex::new(Some(near));
        let connect: ConnectFn = Arc::new(move |_, _, _| {
            let control = near.lock().unwrap().take();
            Box::pin(async move {
                let Some(io) = control else {
                    sleep(LINK_TIME).await;
                    return Err(PeerError::Connect(io::ErrorKind::TimedOut.into()));
                };
                Ok(peer_io(io))
            })
        });
        let connector = Arc::new(connector(connect, reads_pools));
        PeerSession::open(&connector, &address()).await.unwrap()
    }
}

fn peer_io(io: DuplexStream) -> PeerIo {
    let io = CountedIo::new(io);
    PeerIo {
        traffic: io.traffic(),
        io: Box::new(io),
        round_trip: Duration::ZERO,
        serial: SERIAL.to_owned(),
    }
}

/// Returns the address of the other gateway.
fn address() -> PeerAddress {
    PeerAddress {
        host: "other.test".to_owned(),
        address: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
    }
}

fn connector(connect: ConnectFn, reads_pools: bool) -> PeerConnector {
    let tls = ClientConfig::builder().with_root_certificates(RootCertStore::empty());
    let tls = PeerTls {
        config: Arc::new(tls.with_no_client_auth()),
        not_after: SystemTime::now() + Duration::from_hours(24),
    };
    let workers = Workers::on_current_runtime();
    PeerConnector {
        config: config::Peers::default(),
        settings: config::Tunnel::default(),
        limits: config::Limits::default(),
        instance: "own".into(),
        registry: Registry::new(&workers),
        reads_pools,
        workers,
        memory_budget: Arc::default(),
        tls: Arc::new(move || Ok(tls.clone())),
        certificate_changes: watch::channel(()).1,
        connect,
        revoked: RevokedSerials::default(),
        links: TaskGroup::default(),
    }
}

/// Lets time pass, so that the clock can reach back. It may begin with the process.
async fn start() -> Instant {
    tokio::time::advance(Duration::from_mins(1)).await;
    Instant::now() - Duration::from_secs(30)
}

#[tokio::test(start_paused = true)]
async fn reports_about_pools_do_not_wait_for_the_links() {
    let (since, other) = (start().await, OtherGateway::new());
    let opened_at = Instant::now();
    let publish_later = async {
        sleep(LINK_TIME / 2).await;
        other.publish(&["north"], since);
        std::future::pending::<()>().await;
    };
    let session = tokio::select! {
        session = Box::pin(other.open_session(true)) => session,
        () = publish_later => unreachable!(),
    };
    assert!(opened_at.elapsed() >= LINK_TIME);
    let directory = session.connector.registry.directory();
    let reports = directory.pool_reports("north");
    let leader = reports[0].report.leader.as_ref().unwrap();
    assert_eq!(leader.since, since);
    assert!(directory.pool_exchange().take_changed().contains("north"));
}

#[tokio::test(start_paused = true)]
async fn a_gateway_without_api_cache_keeps_no_reports_about_pools() {
    let (since, other) = (start().await, OtherGateway::new());
    other.publish(&["north"], since);
    let session = Box::pin(other.open_session(false)).await;
    let directory = session.connector.registry.directory();
    assert_eq!(directory.pool_reports("north").len(), 0);
    assert_eq!(directory.pool_exchange().take_changed().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn reports_of_a_slow_peer_count_to_their_sending() {
    let (since, other) = (start().await, OtherGateway::new());
    // The window of a stream holds one message.
    let config = GatewaySideConfig {
        budget: 64 << 10,
        ..GatewaySideConfig::default()
    };
    let tunnel = other.connect(config).await;
    let mut control = tunnel.open_control_stream().await.unwrap();
    let hello = PeerMessage::Hello(own_hello("own", true));
    control.send(&hello).await.unwrap();
    while control.receive::<PeerMessage>().await.unwrap() != PeerMessage::Synchronized {}
    let too_long = "a".repeat(MAX_POOL_NAME_LEN + 1);
    other.publish(&["a", &too_long, "b", "c", "d", "e"], since);
    sleep(Duration::from_secs(10)).await;
    let (mut last, mut names) = (None, Vec::new());
    while last.as_ref().is_none_or(|(pool, _)| pool != "e") {
        let message = control.receive().await.unwrap();
        if let PeerMessage::Pools { pools } = message {
            assert_eq!(pools.len(), 1);
            let mut entries = pools.into_iter();
            last = entries.next().map(|entry| entry.into_parts(Instant::now()));
            names.extend(last.iter().map(|(pool, _)| pool.clone()));
        }
    }
    assert_eq!(names, ["a", "b", "c", "d", "e"]);
    let (_, report) = last.unwrap();
    assert_eq!(report.unwrap().leader.unwrap().since, since);
}

#[tokio::test(start_paused = true)]
async fn control_streams_of_a_connection_are_limited() {
    let other = OtherGateway::new();
    let tunnel = other.connect(GatewaySideConfig::default()).await;
    let exchange_hello = async || {
        let mut control = tunnel.open_control_stream().await?;
        let hello = PeerMessage::Hello(own_hello("own", false));
        control.send(&hello).await?;
        let _: PeerMessage = control.receive().await?;
        Ok::<_, ControlStreamError>(control)
    };
    let mut open = Vec::new();
    for _ in 0..MAX_CONTROL_STREAMS {
        open.push(exchange_hello().await.unwrap());
    }
    assert!(exchange_hello().await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_peer_reports_about_a_limited_number_of_pools() {
    let session = Box::pin(OtherGateway::new().open_session(true)).await;
    let set = |pool: &str| {
        let report = Some(PoolReport::default());
        session.peer.set_pool(pool.to_owned(), report)
    };
    assert!(!set(&"p".repeat(MAX_POOL_NAME_LEN + 1)));
    assert!(set(&"p".repeat(MAX_POOL_NAME_LEN)));
    assert!((1..MAX_POOLS).all(|nth| set(&nth.to_string())));
    assert!(!set("0") && set("1"));
    assert!(session.peer.set_pool("1".to_owned(), None));
    assert!(set("0"));
}

#[test]
fn a_certificate_that_seems_expired_replaces_no_connection_at_once() {
    assert!(max_age(SystemTime::UNIX_EPOCH) >= MIN_AGE);
}

#[tokio::test(start_paused = true)]
async fn a_session_ends_when_the_certificate_of_the_peer_is_revoked() {
    let connector = OtherGateway::new().connector();
    let to = address();
    let opening = Box::pin(PeerSession::open(&connector, &to));
    let mut session = opening.await.unwrap();
    connector.revoked.replace([SERIAL.to_owned()].into());
    let end = timeout(Duration::from_mins(1), session.run()).await;
    let is_revoked = |end: &SessionEnd| matches!(end, SessionEnd::Lost(PeerError::Revoked(_)));
    assert!(end.is_ok_and(|end| is_revoked(&end)));
}

#[tokio::test(start_paused = true)]
async fn a_link_ends_when_the_certificate_of_the_peer_is_revoked() {
    let connector = OtherGateway::new().connector();
    let to = address();
    let opening = Box::pin(PeerSession::open(&connector, &to));
    let session = opening.await.unwrap();
    let worker = connector.workers.all().next().unwrap();
    // The session goes on.
    let session_end = CancellationToken::new();
    let revoke = || connector.revoked.replace([SERIAL.to_owned()].into());
    let to = (&*session.peer, &to);
    let running = connector.run_link(to, worker, (revoke, &session_end));
    let end = Box::pin(timeout(Duration::from_mins(1), running)).await;
    assert!(matches!(end, Ok(Err(PeerError::Revoked(serial))) if serial == SERIAL));
}

#[tokio::test(start_paused = true)]
async fn a_connection_ends_when_the_certificate_of_its_gateway_is_rejected() {
    let other = OtherGateway::new();
    let tunnel = other.connect(GatewaySideConfig::default()).await;
    let mut control = tunnel.open_control_stream().await.unwrap();
    let hello = PeerMessage::Hello(own_hello("own", true));
    control.send(&hello).await.unwrap();
    let _: PeerMessage = control.receive().await.unwrap();
    other.rejects.store(true, SeqCst);
    let end = async { while control.receive::<PeerMessage>().await.is_ok() {} };
    timeout(Duration::from_mins(1), end).await.unwrap();
}
