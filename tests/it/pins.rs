//! Apps with pinned keys: the gateway trusts the key of the first connection, independent of the certificates' contents.

use crate::{
    apps::by_path,
    world::{
        World,
        app::App,
        authority::Authority,
        client::assert_problem,
        edge::Edge,
        process::{ExitedProcess, GatewayProcess, OPEN, causeway},
        until,
    },
};
use causeway_certs::{Fingerprint, LeafCertificate, NodeName, Pin};
use causeway_edge::config::Protocol;
use causeway_gateway::config;
use futures_util::future::join;
use rustls::{
    ServerConfig, SupportedProtocolVersion,
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
    version::{TLS12, TLS13},
};
use serde_json::Value;
use std::{
    fs::{self, File},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

const KUBELET: u16 = 10250;
const URL: &str = "https://edge-1:10250/";
/// After this the app closes the connection.
const ONCE: &str = "https://edge-1:10250/once";

/// Certificates with their keys; an upstream shows one of them.
#[derive(Debug)]
pub(crate) struct FixedCertificate {
    keys: Vec<Arc<CertifiedKey>>,
    now: AtomicUsize,
    /// Shows the next one on each connection.
    turns: bool,
}

impl FixedCertificate {
    pub(crate) fn of(leaves: &[&LeafCertificate], turns: bool) -> Arc<Self> {
        Arc::new(Self {
            keys: leaves.iter().map(|leaf| leaf.certified_key()).collect(),
            now: AtomicUsize::new(0),
            turns,
        })
    }

    pub(crate) fn now(&self, number: usize) {
        self.now.store(number, SeqCst);
    }

    /// TLS of an app.
    pub(crate) fn serve(
        self: &Arc<Self>,
        version: &'static SupportedProtocolVersion,
    ) -> Arc<ServerConfig> {
        let builder = ServerConfig::builder_with_protocol_versions(&[version]);
        let builder = builder.with_no_client_auth();
        Arc::new(builder.with_cert_resolver(self.clone()))
    }
}

impl ResolvesServerCert for FixedCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let number = if self.turns {
            self.now.fetch_add(1, SeqCst)
        } else {
            self.now.load(SeqCst)
        };
        Some(self.keys[number % self.keys.len()].clone())
    }
}

fn pinned() -> config::UpstreamTls {
    config::UpstreamTls {
        pin: true,
        ..config::UpstreamTls::default()
    }
}

async fn world() -> World {
    let build = World::build();
    let build = build.config(|config| drop(config.upstream_tls.insert(KUBELET, pinned())));
    build.start().await
}

async fn edge(world: &World, app: &App) -> Edge {
    let plan = world.edge("edge-1");
    plan.port_as(KUBELET, Protocol::Tcp, app.address())
        .join()
        .await
}

/// `causeway edge` with these arguments, beside the gateway of this directory.
async fn order(line: &str, data: &Path) -> ExitedProcess {
    let order = causeway("node").args(line.split_whitespace());
    order.flag("--data-dir", data).run().await
}

pub(crate) fn key(leaf: &LeafCertificate) -> Fingerprint {
    Fingerprint::of_key(&leaf.chain()[0]).unwrap()
}

/// Returns the pin of edge-1's kubelet on disk.
fn noted(world: &World) -> Option<Pin> {
    let all = world.store().pins().all().unwrap();
    let node = NodeName::parse("edge-1").unwrap();
    all.get(&node)?.get(&KUBELET).copied()
}

#[tokio::test]
async fn only_the_first_key_of_an_upstream_is_trusted_after_restarts() {
    for version in [&TLS13, &TLS12] {
        let authority = Authority::new();
        // A certificate that ended a year ago, for another name.
        let (first, second) = (
            authority.expired_app(&["nobody"]),
            authority.app(&["edge-1"]),
        );
        let shows = FixedCertificate::of(&[&first, &second], false);
        let app = App::https(shows.serve(version), by_path).await;
        let mut world = world().await;
        let edge = edge(&world, &app).await;
        assert_eq!(noted(&world), None);
        assert_eq!(world.client().get(ONCE).await.text(), "once");
        assert_eq!(noted(&world).unwrap().key, key(&first));
        assert_eq!(world.client().get(ONCE).await.text(), "once");
        assert_eq!(app.requests(), 2);

        world.kill_gateway().await;
        world.start_gateway().await;
        world.until_tunnels("edge-1", 1).await;
        shows.now(1);
        let refused = world.client().get(URL).await;
        for says in [
            &format!(
                "port 10250 of edge-1 has a new key: SHA-256 {}",
                key(&second)
            ),
            &format!("but key {} has been pinned", key(&first)),
            "`causeway node unpin edge-1 10250`",
        ] {
            assert_problem(&refused, 502, "target_key_changed", says);
        }
        assert_eq!(app.requests(), 2, "it got no request");
        let metrics = world.metrics().await;
        assert_eq!(metrics.outcomes("https", "target_key_changed"), 1);
        shows.now(0);
        assert_eq!(world.client().get(URL).await.text(), "well");
        drop(edge);
    }
}

#[tokio::test]
async fn a_key_that_is_shown_and_not_held_is_not_noted() {
    let authority = Authority::new();
    let (theirs, own) = (authority.app(&["edge-1"]), authority.app(&["edge-1"]));
    for version in [&TLS13, &TLS12] {
        let lying = CertifiedKey::new(theirs.chain().to_vec(), own.certified_key().key.clone());
        let shows = Arc::new(FixedCertificate {
            keys: vec![Arc::new(lying), theirs.certified_key()],
            now: AtomicUsize::new(0),
            turns: false,
        });
        let app = App::https(shows.serve(version), by_path).await;
        let world = world().await;
        let _edge = edge(&world, &app).await;
        let answer = world.client().get(URL).await;
        assert_problem(&answer, 502, "target_broken", "port 10250 of edge-1");
        assert_eq!((noted(&world), app.requests()), (None, 0));
        shows.now(1);
        assert_eq!(world.client().get(URL).await.text(), "well");
        assert_eq!(noted(&world).unwrap().key, key(&theirs));
        // The key is known by now, but still not trusted.
        shows.now(0);
        assert_eq!(world.client().get(ONCE).await.text(), "once");
        let answer = world.client().get(URL).await;
        assert_problem(&answer, 502, "target_broken", "port 10250 of edge-1");
    }
}

#[tokio::test]
async fn of_two_keys_that_are_met_at_once_one_is_believed() {
    let authority = Authority::new();
    let (first, second) = (authority.app(&["a"]), authority.app(&["b"]));
    let shows = FixedCertificate::of(&[&first, &second], true);
    let app = App::https(shows.serve(&TLS13), by_path).await;
    let world = world().await;
    let _edge = edge(&world, &app).await;
    let disk = File::options()
        .write(true)
        .open(world.folder().join("gateway/.lock"))
        .unwrap();
    disk.lock().unwrap();
    // An upgrade does not wait for other requests.
    let upgrade =
        "GET /refused HTTP/1.1\r\nHost: edge-1:10250\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n";
    let client = world.client();
    let asking = join(client.get(URL), client.raw("edge-1", upgrade));
    let met = async {
        until("both handshakes are done", async || app.connections() == 2).await;
        assert_eq!(app.requests(), 0);
        disk.unlock().unwrap();
    };
    let ((plain, upgraded), ()) = tokio::join!(asking, met);
    let refused = if plain.status == 200 {
        &upgraded
    } else {
        assert_eq!(
            (upgraded.status, upgraded.text().as_str()),
            (403, "not you")
        );
        &plain
    };
    assert_problem(
        refused,
        502,
        "target_key_changed",
        "node unpin edge-1 10250",
    );
    let known = noted(&world).unwrap().key;
    assert!([key(&first), key(&second)].contains(&known));
    assert!(
        refused
            .text()
            .contains(&format!("but key {known} has been pinned"))
    );
}

#[tokio::test]
async fn an_upstream_without_a_stored_pin_gets_no_request() {
    let authority = Authority::new();
    let leaf = authority.app(&["edge-1"]);
    let app = App::https(authority.serve(&leaf, false), by_path).await;
    let world = world().await;
    let _edge = edge(&world, &app).await;
    let place = world.folder().join("gateway/pins.json");
    fs::create_dir_all(place.join("in-the-way")).unwrap();
    for _ in 0..2 {
        let answer = world.client().get(URL).await;
        let says = "connects for the first time, but its key cannot be recorded";
        assert_problem(&answer, 503, "dependency_unavailable", says);
    }
    assert_eq!(app.requests(), 0);
    fs::remove_dir_all(&place).unwrap();
    assert_eq!(world.client().get(URL).await.text(), "well");
    assert_eq!(noted(&world).unwrap().key, key(&leaf));
}

#[tokio::test]
async fn keys_can_be_listed_and_forgotten_and_end_with_their_node() {
    let authority = Authority::new();
    let (first, second) = (authority.app(&["a"]), authority.app(&["b"]));
    let shows = FixedCertificate::of(&[&first, &second], false);
    let app = App::https(shows.serve(&TLS13), by_path).await;
    // Each worker has its own pool of kept connections.
    let one = format!("{OPEN}\nworkers: 1\nupstream_tls: {{ 9100: {{ pin: true }} }}");
    let site = GatewayProcess::with_listeners(&one).await;
    let ports = format!(
        "{{9100: {{target: \"127.0.0.1:{}\", scheme: tcp}}}}",
        app.port()
    );
    let token = site.token("--node edge-1").await;
    let joining = || {
        let edge = causeway("edge --admin-listen 127.0.0.1:0").flag("--gateway", &site.tunnel);
        edge.flag("--data-dir", site.edge_data("edge-1"))
            .flag("--ports", &ports)
    };
    let mut edge = joining().flag("--join", token).start();
    edge.wait_for_line("tunnel registered").await;
    let data = site.data();
    let order = async |line: &str| order(line, &data).await;
    let none = order("pins").await.ok().stdout;
    assert!(none.contains("no pinned keys"), "{none}");
    order("unpin edge-1 9100")
        .await
        .failed(&["no key of port 9100 of edge-1", "causeway node pins"]);

    let client = site.nobody();
    let get = async || client.get("http://edge-1:9100/").await;
    assert_eq!(get().await.text(), "well");
    let listed = order("pins").await.ok().stdout;
    let row = format!("edge-1  9100  {}", key(&first));
    assert!(listed.lines().nth(1).unwrap().starts_with(&row), "{listed}");
    let rows: Value = serde_json::from_str(&order("pins -o json").await.ok().stdout).unwrap();
    assert_eq!(rows[0]["key"], key(&first).to_string());

    // The kept connections were made with a key that is no longer trusted.
    shows.now(1);
    assert_eq!((get().await.status, app.connections()), (200, 1));
    let message = order("unpin edge-1 9100").await.ok().stdout;
    assert_eq!(
        message,
        "the pinned key of edge-1 at port 9100 is removed\n"
    );
    assert_eq!((get().await.status, app.connections()), (200, 2));
    let known = order("pins").await.ok().stdout;
    assert!(known.contains(&key(&second).to_string()), "{known}");

    order("revoke edge-1 --reason stolen").await.ok();
    let none = order("pins").await.ok().stdout;
    assert!(none.contains("no pinned keys"), "{none}");
    edge.kill().await;
    order("allow edge-1").await.ok();
    let mut edge = joining().start();
    edge.wait_for_line("tunnel registered").await;
    assert_eq!(get().await.status, 200);
    let known = order("pins").await.ok().stdout;
    assert!(known.contains(&key(&second).to_string()), "{known}");

    site.gateway.stop().await.ok();
    assert_eq!(order("pins").await.ok().stdout, known);
    let message = order("remove edge-1").await.ok().stdout;
    assert!(message.contains("no gateway runs in"), "{message}");
    let none = order("pins").await.ok().stdout;
    assert!(none.contains("no pinned keys"), "{none}");
}
