//! Tests of the schedule with test clocks, and of renewals over TLS with a gateway that sends prepared responses.

use super::*;
use crate::{Bound, Config, Edge, config, control::csr_bootstrap::tests::Api, status::Status};
use base64::{Engine, engine::general_purpose::STANDARD};
use causeway_certs::{
    Ca, GatewayName, NodeName, OpenMode, Store, TrustDomain, VerifiedPublicKey,
    verify::{TrustStore, join_server},
};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::wire;
use rustls_pki_types::CertificateDer;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    iter,
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tracing::info_span;

const SOON: Duration = Duration::from_mins(2);
const HOUR: Duration = Duration::from_hours(1);
const DAY: Duration = Duration::from_hours(24);
/// Remaining lifetime of a certificate whose renewal is due at once, because certificates begin an hour before they are
/// issued.
const DUE: Duration = Duration::from_mins(10);
const ENDED: Duration = Duration::ZERO;

fn day(number: u32) -> SystemTime {
    UNIX_EPOCH + DAY * number
}

#[test]
fn renewal_is_due_at_two_thirds_of_life_or_earlier_by_jitter() {
    let at = |random| RenewalSchedule::new(day(100), day(115), random).renews_at;
    let second = Duration::from_secs(1);
    let near = |one: SystemTime, other: SystemTime| one < other + second && other < one + second;
    assert!(near(at(0.0), day(110)));
    assert!(near(at(1.0), day(109)));
    assert!(at(1.0) < at(0.5) && at(0.5) < at(0.0));
    let reversed = RenewalSchedule::new(day(115), day(100), 0.5);
    assert_eq!(reversed.renews_at, day(100));
}

/// Returns a number from 0 to 1 that looks random and is the same in each run.
fn fraction(node: usize, renewal: u32) -> f64 {
    let mut hasher = DefaultHasher::new();
    (node, renewal).hash(&mut hasher);
    let bits = u32::try_from(hasher.finish() >> 32).unwrap();
    f64::from(bits) / f64::from(u32::MAX)
}

/// Returns the maximum number of these times that are in one hour.
fn busiest_hour(times: &[SystemTime]) -> usize {
    let mut hours: BTreeMap<u64, usize> = BTreeMap::new();
    for time in times {
        let since = time.duration_since(UNIX_EPOCH).unwrap();
        *hours.entry(since.as_secs() / HOUR.as_secs()).or_default() += 1;
    }
    hours.into_values().max().unwrap()
}

#[test]
fn renewals_of_nodes_that_joined_at_once_spread_more_with_each_renewal() {
    let (nodes, lifetime) = (2_000, DAY * 7);
    let mut renewed_at = vec![day(100); nodes];
    let mut busiest = Vec::new();
    for renewal in 0..52 {
        for (node, at) in renewed_at.iter_mut().enumerate() {
            let random = fraction(node, renewal);
            *at = RenewalSchedule::new(*at, *at + lifetime, random).renews_at;
        }
        busiest.push(busiest_hour(&renewed_at));
    }
    // The first renewals take eleven hours, so 180 nodes renew in an hour on average. After months they take days.
    let limits = iter::repeat_n(240, 4)
        .chain(iter::repeat_n(160, 20))
        .chain(iter::repeat(80));
    let is_spread = busiest
        .iter()
        .zip(limits)
        .all(|(count, limit)| *count <= limit);
    assert!(is_spread, "{busiest:?}");
}

/// Wall clock that runs with tokio's clock and can be set.
struct Clock {
    began: Instant,
    offset: AtomicU64,
}

impl Clock {
    fn now(&self) -> SystemTime {
        let offset = Duration::from_secs(self.offset.load(Relaxed));
        UNIX_EPOCH + offset + self.began.elapsed()
    }

    fn move_to(&self, time: SystemTime) {
        let since = time.duration_since(UNIX_EPOCH).unwrap();
        self.offset.store(since.as_secs(), Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn renewal_uses_the_wall_clock_and_follows_sleep_within_an_hour() {
    let schedule = RenewalSchedule::new(day(100), day(115), 0.0);
    let clock = Clock {
        began: Instant::now(),
        offset: AtomicU64::default(),
    };
    clock.move_to(day(109));
    schedule.wait(|| clock.now()).await;
    let waited = clock.began.elapsed();
    assert!(waited.abs_diff(DAY) < HOUR, "{waited:?}");

    // The time is 1970, as on a machine without a battery-backed clock until it gets the time.
    clock.move_to(day(0));
    let began = Instant::now();
    let set = async {
        // The test is about time, and the clock is paused.
        sleep(HOUR * 5 / 2).await;
        clock.move_to(day(112));
    };
    tokio::join!(schedule.wait(|| clock.now()), set);
    assert_eq!(began.elapsed().as_secs(), 3 * HOUR.as_secs());
}

#[test]
fn a_clock_that_is_ahead_does_not_renew_again_and_again() {
    let pause = |lifetime, ahead| {
        let (issued, now) = (day(100), day(100) + ahead);
        let schedule = RenewalSchedule::new(issued.max(now), issued + lifetime, 0.0);
        schedule.pause_after_issue(lifetime, now)
    };
    for ahead in [ENDED, HOUR / 2] {
        assert_eq!(pause(HOUR, ahead), None);
    }
    for (lifetime, ahead, expected) in [(HOUR, HOUR, HOUR / 2), (DAY, DAY * 2, HOUR)] {
        assert_eq!(pause(lifetime, ahead), Some(expected));
    }
}

#[test]
fn an_expired_certificate_needs_a_token_despite_network_errors() {
    let schedule = RenewalSchedule::new(day(100), day(115), 0.0);
    let weighed = |now| schedule.error_to_report(ConnectError::silent("nobody there"), now);
    assert_eq!(weighed(day(115)).label(), "silent");
    let ended = weighed(day(116));
    assert_eq!(ended.label(), "refused_permanently");
    for words in ["rejoin with a new token", "clock", "nobody there"] {
        assert!(ended.detail().contains(words), "{}", ended.detail());
    }
}

fn ca() -> Arc<Ca> {
    Arc::new(Ca::create(&TrustDomain::parse("test").unwrap()).unwrap())
}

/// Issues a certificate for the request in `asked`.
fn issue(ca: &Ca, node: &str, asked: &Value) -> Value {
    let csr = STANDARD.decode(asked["csr"].as_str().unwrap()).unwrap();
    let (key, node) = (
        VerifiedPublicKey::verify(&csr).unwrap(),
        NodeName::parse(node).unwrap(),
    );
    let issued = ca.issue_edge(&key, &node, DAY * 7).unwrap();
    json!({ "certificate": issued.pem(), "root": ca.root_pem(), "gateways": ["told.test:1"] })
}

/// Gateway that answers renewals. It closes each tunnel after it has received the edge's certificate.
struct Gateway {
    address: SocketAddr,
    dials: mpsc::UnboundedReceiver<CertificateDer<'static>>,
    _tasks: TaskGroup,
}

impl Gateway {
    async fn start(ca: &Ca, answer: impl Fn(Value) -> (u16, Value) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let name = GatewayName::parse("localhost").unwrap();
        let leaf = ca.issue_gateway(&[name], HOUR).unwrap();
        let trust = TrustStore::from_ca(ca).unwrap();
        let config = join_server(leaf.resolver(), &trust, None).unwrap();
        let mut config = rustls::ServerConfig::clone(&config);
        config.alpn_protocols = vec![wire::ALPN_TUNNEL.to_vec(), wire::ALPN_HTTP11.to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let (seen, dials) = mpsc::unbounded_channel();
        let tasks = TaskGroup::default();
        tasks.spawn(info_span!("gateway"), async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let Ok(mut tls) = acceptor.accept(tcp).await else {
                    continue;
                };
                let shown = tls.get_ref().1.peer_certificates();
                let shown = shown.expect("the edge shows its certificate")[0].clone();
                if tls.get_ref().1.alpn_protocol() == Some(wire::ALPN_TUNNEL) {
                    seen.send(shown.into_owned()).ok();
                } else {
                    let asked = asked(&mut tls).await;
                    let (status, body) = answer(asked);
                    reply(&mut tls, status, &body.to_string()).await;
                }
            }
        });
        Self {
            address,
            dials,
            _tasks: tasks,
        }
    }

    /// Waits for a tunnel whose edge presents this certificate.
    async fn dialled_with(&mut self, certificate: &CertificateDer<'_>) {
        let dialled = async { while self.dials.recv().await.unwrap() != *certificate {} };
        timeout(SOON, dialled).await.unwrap();
    }
}

async fn asked(tls: &mut TlsStream<TcpStream>) -> Value {
    let mut read = Vec::new();
    loop {
        read.push(tls.read_u8().await.unwrap());
        if let Some(head) = read.windows(4).position(|four| four == b"\r\n\r\n")
            && let Ok(body) = serde_json::from_slice::<Value>(&read[head + 4..])
        {
            assert!(read.starts_with(b"POST /v1/renew HTTP/1.1\r\n"));
            assert!(body.get("token").is_none());
            return body;
        }
    }
}

async fn reply(tls: &mut TlsStream<TcpStream>, status: u16, body: &str) {
    let length = body.len();
    let text = format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n{body}");
    tls.write_all(text.as_bytes()).await.unwrap();
    tls.flush().await.unwrap();
}

/// Data directory of an edge that has joined, and its first identity.
struct Joined {
    data: TempDir,
    before: EdgeIdentity,
}

impl Joined {
    /// Creates an edge whose certificate has this remaining lifetime.
    fn new(ca: &Ca, life: Duration) -> Self {
        let (data, key) = (TempDir::new().unwrap(), PrivateKey::generate().unwrap());
        let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
        let node = NodeName::parse("edge-1").unwrap();
        let issued = ca.issue_edge(&csr, &node, life).unwrap();
        let before = EdgeIdentity::new(&ca.root_pem(), &issued.pem(), &key.key_pem());
        let mut before = before.unwrap();
        before.gateways = vec!["kept.test:1".to_owned()];
        let store = Store::open(data.path(), OpenMode::Create).unwrap();
        store.save_edge(&before).unwrap();
        Self { data, before }
    }

    fn stored(&self) -> EdgeIdentity {
        let store = Store::open(self.data.path(), OpenMode::Existing).unwrap();
        store.edge().unwrap().unwrap()
    }

    fn is_as_before(&self) -> bool {
        let (now, before) = (self.stored().leaf, &self.before.leaf);
        now.chain() == before.chain() && now.key_pem() == before.key_pem()
    }

    async fn bind(&self, gateway: SocketAddr) -> Bound {
        self.bind_in(gateway, None).await
    }

    /// Binds an edge that belongs to this cluster, if there is one.
    async fn bind_in(&self, gateway: SocketAddr, cluster: Option<Arc<Api>>) -> Bound {
        let mut config = Config {
            data_dir: self.data.path().into(),
            gateways: vec![gateway.to_string()],
            ..Config::default()
        };
        config.admin.listen = "127.0.0.1:0".parse().unwrap();
        config.backoff.silent_max = Duration::from_millis(50);
        // An edge waits for the time limit of a dial before it treats its identity as refused.
        let dial = Duration::from_secs(10);
        let timeouts = &mut config.timeouts;
        (timeouts.tcp, timeouts.tls, timeouts.hello) = (dial, dial, dial);
        config.kubernetes = cluster.as_ref().map(|_| config::Kubernetes::default());
        let (cluster, stop) = (cluster.map(|api| api as _), CancellationToken::new());
        let edge = Edge::open_with_csr(config, cluster, (&stop, &|_| {})).await;
        edge.unwrap().bind().await.unwrap()
    }

    /// Runs the edge until its status is as wanted.
    async fn run_until(&self, gateway: SocketAddr, wanted: impl Fn(&Status) -> bool) -> Status {
        Self::until(self.bind(gateway).await, wanted).await
    }

    async fn until(bound: Bound, wanted: impl Fn(&Status) -> bool) -> Status {
        let reader = bound.status_reader();
        tokio::select! {
            status = reader.wait_for(wanted) => status,
            ended = Box::pin(bound.run(CancellationToken::new())) => panic!("{ended:?}"),
        }
    }
}

async fn metrics(admin: SocketAddr) -> String {
    let mut tcp = TcpStream::connect(admin).await.unwrap();
    let ask = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    tcp.write_all(ask).await.unwrap();
    let mut answer = String::new();
    tcp.read_to_string(&mut answer).await.unwrap();
    answer
}

fn trouble(status: &Status) -> Option<&str> {
    let trouble = status.certificate.as_ref()?.trouble.as_ref()?;
    Some(&trouble.what)
}

#[tokio::test]
async fn a_renewal_is_stored_with_a_new_key_and_used_by_the_next_dial() {
    let ca = ca();
    let edge = Joined::new(&ca, DUE);
    let grants = ca.clone();
    let mut gateway =
        Gateway::start(&ca, move |asked| (200, issue(&grants, "edge-1", &asked))).await;
    let bound = edge.bind(gateway.address).await;
    let (reader, admin) = (bound.status_reader(), bound.local_addr());
    // The renewal may end before the first dial begins.
    let renewed = async {
        reader.wait_for(|_| !edge.is_as_before()).await;
        let after = edge.stored();
        gateway.dialled_with(&after.leaf.chain()[0]).await;
        (after, metrics(admin).await)
    };
    let (after, metrics) = tokio::select! {
        after = renewed => after,
        ended = bound.run(CancellationToken::new()) => panic!("{ended:?}"),
    };
    let before = &edge.before;
    assert_ne!(after.leaf.key_pem(), before.leaf.key_pem());
    assert_eq!(
        (&after.node, &after.roots, &after.trust_domain),
        (&before.node, &before.roots, &before.trust_domain)
    );
    assert_eq!(after.gateways, before.gateways);
    let ends = after.leaf.not_after().as_secs();
    for line in [
        "causeway_edge_renewals_total{outcome=\"renewed\"} 1\n".to_owned(),
        format!("causeway_edge_certificate_expiry_timestamp_seconds {ends}\n"),
    ] {
        assert!(metrics.contains(&line), "{metrics}");
    }
    let certificate = reader.status().certificate.unwrap();
    assert_eq!(certificate.not_after, ends * 1000);
    assert!(certificate.renews_at < certificate.not_after && certificate.trouble.is_none());
}

#[tokio::test]
async fn a_refused_renewal_is_reported_and_keeps_the_stored_identity() {
    let ca = ca();
    let edge = Joined::new(&ca, DUE);
    let refuse = |_| {
        (
            403,
            json!({ "reason": "node_unknown", "detail": "it was removed" }),
        )
    };
    let gateway = Gateway::start(&ca, refuse).await;
    let status = edge
        .run_until(gateway.address, |status| trouble(status).is_some())
        .await;
    let message = trouble(&status).unwrap();
    assert!(
        message.contains("(node_unknown): it was removed"),
        "{status:#?}"
    );
    let trouble = status.certificate.unwrap().trouble.unwrap();
    // The delay is the maximum of a minute, less jitter.
    assert!(
        trouble.refused && trouble.retry_at >= trouble.at + 30_000,
        "{trouble:?}"
    );
    assert!(edge.is_as_before());
}

#[tokio::test]
async fn a_certificate_for_another_node_or_of_another_ca_is_not_taken() {
    let (ours, other) = (ca(), ca());
    for (grants, node, words) in [
        (ours.clone(), "edge-2", "it is for node edge-2"),
        (other, "edge-1", "it is of another CA"),
    ] {
        let edge = Joined::new(&ours, DUE);
        let gateway = Gateway::start(&ours, move |asked| (200, issue(&grants, node, &asked))).await;
        let wanted =
            |status: &Status| trouble(status).is_some_and(|message| message.contains(words));
        edge.run_until(gateway.address, wanted).await;
        assert!(edge.is_as_before());
    }
}

#[tokio::test]
async fn an_expired_certificate_is_refused_and_the_token_is_named() {
    let ca = ca();
    let edge = Joined::new(&ca, ENDED);
    let gateway = Gateway::start(&ca, |_| panic!("it was let in")).await;
    // The test is about time: certificates count whole seconds, and this one expires now.
    let ends = UNIX_EPOCH + Duration::from_secs(edge.before.leaf.not_after().as_secs() + 1);
    sleep(ends.duration_since(SystemTime::now()).unwrap_or_default()).await;
    let wanted = |status: &Status| {
        trouble(status).is_some_and(|message| {
            message.contains("rejoin with a new token") && message.contains("CertificateExpired")
        })
    };
    edge.run_until(gateway.address, wanted).await;
}

#[tokio::test]
async fn a_silent_gateway_is_asked_again_until_it_answers() {
    let ca = ca();
    let edge = Joined::new(&ca, DUE);
    let (grants, busy) = (ca.clone(), AtomicU64::new(2));
    let answer = move |asked| match busy.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1))
    {
        Ok(_) => (503, json!({})),
        Err(_) => (200, issue(&grants, "edge-1", &asked)),
    };
    let gateway = Gateway::start(&ca, answer).await;
    let renewed = edge.before.leaf.not_after().as_secs() * 1000;
    let wanted = |status: &Status| {
        let certificate = status.certificate.as_ref();
        certificate.is_some_and(|certificate| certificate.not_after > renewed)
    };
    edge.run_until(gateway.address, wanted).await;
    assert!(!edge.is_as_before());
}

#[tokio::test]
async fn a_change_of_gateways_and_a_renewal_do_not_undo_each_other() {
    let ca = ca();
    let (edge, other) = (Joined::new(&ca, DUE), Joined::new(&ca, HOUR));
    let store = Store::open(edge.data.path(), OpenMode::Existing).unwrap();
    let held = IdentityStore::new(edge.before.clone(), store);
    let leaf = other.before.leaf.clone();
    let (one, two) = tokio::join!(
        held.update(|identity| identity.gateways = vec!["new.test:1".to_owned()]),
        held.update(move |identity| identity.leaf = leaf),
    );
    one.unwrap();
    two.unwrap();
    for identity in [held.identity(), edge.stored()] {
        assert_eq!(identity.gateways, ["new.test:1"]);
        assert_eq!(identity.leaf.chain(), other.before.leaf.chain());
    }
    // A data directory that cannot be written causes no change.
    drop(edge);
    let leaf = other.before.leaf.clone();
    let unkept = held
        .update(move |identity| {
            identity.gateways.clear();
            identity.leaf = leaf;
        })
        .await;
    unkept.unwrap_err();
    assert_eq!(held.identity().gateways, ["new.test:1"]);
}

#[tokio::test]
async fn an_identity_of_a_lost_ca_is_replaced_by_the_clusters_word() {
    let (edge, api) = (Joined::new(&ca(), DAY), Arc::new(Api::new("edge-1")));
    let mut gateway = Gateway::start(&api.ca, |_| panic!("it was asked to renew")).await;
    let bound = edge.bind_in(gateway.address, Some(api.clone())).await;
    let reader = bound.status_reader();
    let replaced = async {
        reader.wait_for(|_| !edge.is_as_before()).await;
        let after = edge.stored();
        gateway.dialled_with(&after.leaf.chain()[0]).await;
        after
    };
    let after = tokio::select! {
        after = timeout(3 * SOON, replaced) => after.unwrap(),
        ended = bound.run(CancellationToken::new()) => panic!("{ended:?}"),
    };
    assert_eq!(after.fingerprints(), api.ca.fingerprints());
}

#[tokio::test]
async fn a_foreign_gateway_triggers_no_request_to_the_cluster() {
    let api = Arc::new(Api::new("edge-1"));
    let edge = Joined::new(&api.ca, DAY);
    let stranger = Gateway::start(&ca(), |_| panic!("it was asked to renew")).await;
    let bound = edge.bind_in(stranger.address, Some(api.clone())).await;
    let message = |status: &Status| {
        let trouble = status.trouble.as_ref();
        trouble.is_some_and(|trouble| trouble.what.contains("another server answers"))
    };
    let published = |status: &Status| {
        let trouble = status.trouble.as_ref();
        trouble.is_some_and(|trouble| trouble.what.contains("the cluster publishes"))
    };
    Joined::until(bound, |status| message(status) && published(status)).await;
    assert!(edge.is_as_before() && api.asked.lock().unwrap().is_empty());
}
