//! Gateways that share their durable state in a real etcd: every command works at any of them, and a gateway that loses its data
//! directory forgets nothing.

use crate::{
    apps::by_path,
    peers::{list_gateways, peers_of, serial_of},
    pins::{FixedCertificate, key},
    world::{
        PATIENCE,
        app::App,
        authority::Authority,
        etcd::Etcd,
        link::Link,
        process::{ExitedProcess, GatewayProcess, OPEN, Output, Process, causeway},
        tool::{Tool, need},
        until,
    },
};
use futures_util::{StreamExt, future::join_all, stream};
use rustls::version::TLS13;
use serde_json::Value;
use std::{
    fs,
    time::{Duration, SystemTime},
};
use test_summary::unused_port;

const URL: &str = "http://edge-1:9100/";
/// Number of tokens for which two gateways race.
const RACES: usize = 8;

/// Returns a gateway with an empty data directory, which gets the CA from etcd once `first` has stored it there.
async fn another(etcd: &Etcd, first: &GatewayProcess) -> GatewayProcess {
    another_with(&configuration(etcd, "/causeway/"), first).await
}

async fn another_with(configuration: &str, first: &GatewayProcess) -> GatewayProcess {
    first.until_ready().await;
    let folder = tempfile::tempdir().unwrap();
    GatewayProcess::of(folder, "127.0.0.1:0", configuration).await
}

fn configuration(etcd: &Etcd, prefix: &str) -> String {
    configuration_at(&etcd.url(), prefix)
}

fn configuration_at(endpoint: &str, prefix: &str) -> String {
    format!("{OPEN}\nstate: {{ etcd: {{ endpoints: [\"{endpoint}\"], prefix: {prefix} }} }}")
}

/// Starts two gateways that forward requests to each other.
async fn two_peers(etcd: &Etcd) -> [GatewayProcess; 2] {
    let tunnels = [unused_port(), unused_port()].map(|port| format!("127.0.0.1:{port}"));
    let configuration = format!(
        "{}\npeers: {{ addresses: [\"{}\"] }}",
        configuration(etcd, "/causeway/"),
        tunnels.join("\", \"")
    );
    let one = GatewayProcess::listening(&tunnels[0], &configuration).await;
    one.until_ready().await;
    let folder = tempfile::tempdir().unwrap();
    let two = GatewayProcess::of(folder, &tunnels[1], &configuration).await;
    let sites = [one, two];
    until_connected(&sites).await;
    sites
}

/// Waits until each gateway knows the nodes of the other one.
async fn until_connected(sites: &[GatewayProcess; 2]) {
    for site in sites {
        until("the gateways are connected", async || {
            let peers = peers_of(site).await;
            peers.len() == 1 && peers[0]["synchronized"] == true
        })
        .await;
    }
}

/// Starts the edge of a node that joins at the first gateway, and has tunnels at both.
async fn join_at_both(sites: &[GatewayProcess; 2], node: &str, app: &App) -> Process {
    let [one, two] = sites;
    let token = one.token(&format!("--node {node}")).await;
    let edge = one.edge(node, app.port());
    let edge = edge.flag("--gateway", &two.tunnel).flag("--join", token);
    let edge = edge.start();
    until_held(sites, node).await;
    edge
}

/// Waits until each gateway has a tunnel of the node.
async fn until_held(sites: &[GatewayProcess; 2], node: &str) {
    for site in sites {
        until(&format!("each gateway holds {node}"), async || {
            let row = site.node(node).await;
            row["tunnels"].as_u64().is_some_and(|count| count > 0)
        })
        .await;
    }
}

/// Runs a command on the gateway's data directory.
async fn order(site: &GatewayProcess, line: &str) -> ExitedProcess {
    causeway(line).flag("--data-dir", site.data()).run().await
}

async fn until_known(site: &GatewayProcess, node: &str, state: &str) {
    let is_known = async || site.node(node).await["state"] == state;
    until(&format!("{node} is {state}"), is_known).await;
}

#[tokio::test]
async fn a_gateway_that_finds_no_ca_names_both_places() {
    need!("etcd");
    let etcd = Etcd::start().await;
    let folder = tempfile::tempdir().unwrap();
    let refused = GatewayProcess::refused(&folder, &configuration(&etcd, "/causeway/")).await;
    // Not 78: the next start may succeed.
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    refused.failed(&[
        "there is no CA in",
        "or in etcd",
        "once the gateway with the CA is ready",
    ]);
}

#[tokio::test]
async fn each_command_works_at_any_gateway() {
    need!("etcd");
    let (etcd, app) = (Etcd::start().await, App::saying("it").await);
    let one = GatewayProcess::with_listeners(&configuration(&etcd, "/causeway/")).await;
    let two = another(&etcd, &one).await;
    two.until_ready().await;
    let roots = |site: &GatewayProcess| fs::read(site.data().join("ca.pem")).unwrap();
    assert_eq!(roots(&one), roots(&two));

    // A token of one gateway is spent at the other one, once.
    let token = one.token("--node edge-1").await;
    let edge = two.edge("edge-1", app.port()).flag("--join", &token);
    let mut edge = edge.start();
    edge.wait_for_line("tunnel registered").await;
    assert_eq!(two.nobody().get(URL).await.status, 200);
    let again = one.edge("edge-1", app.port());
    let again = again.flag("--join", &token).run().await;
    again.failed(&["the join token was already used"]);
    until_known(&one, "edge-1", "away").await;

    // The edge is admitted at the gateway that did not issue its certificate, and loses its tunnel by a command at the other one.
    edge.stop().await.ok();
    two.forget_gateways("edge-1");
    let ports = format!("{{9100: {{target: \"127.0.0.1:{}\"}}}}", app.port());
    let mut edge = causeway("edge --admin-listen 127.0.0.1:0")
        .flag("--gateway", &one.tunnel)
        .flag("--data-dir", two.edge_data("edge-1"))
        .flag("--ports", ports)
        .start();
    edge.wait_for_line("tunnel registered").await;
    assert_eq!(one.nobody().get(URL).await.status, 200);
    let revoked = order(&two, "node revoke edge-1 --reason stolen").await.ok();
    assert_eq!(revoked.stdout, "edge-1 is revoked\n");
    edge.wait_for_line("node edge-1 is revoked: stolen").await;
    until("the other gateway has no tunnel of it", async || {
        one.nobody().get(URL).await.status != 200
    })
    .await;

    // A gateway whose data directory is lost has the state again from its start.
    let two = two.restart(|data| fs::remove_dir_all(data).unwrap()).await;
    two.until_ready().await;
    assert_eq!(two.node("edge-1").await["state"], "revoked");
    order(&two, "node allow edge-1").await.ok();
    until_known(&one, "edge-1", "away").await;

    edge.kill().await;
}

/// Two machines show one token to two gateways at the same time.
#[tokio::test]
async fn one_of_two_gateways_spends_a_token_for_which_they_race() {
    need!("etcd");
    let (etcd, app) = (Etcd::start().await, App::saying("it").await);
    let one = GatewayProcess::with_listeners(&configuration(&etcd, "/causeway/")).await;
    let two = another(&etcd, &one).await;
    two.until_ready().await;
    let sites = [&one, &two];
    for round in 0..RACES {
        let node = format!("edge-{round}");
        let token = one.token(&format!("--node {node}")).await;
        // Each machine has a key of its own.
        let edges = sites.map(|site| site.edge(&node, app.port()).flag("--join", &token).start());
        let joining = edges.map(async |mut edge| (edge.says("tunnel registered").await, edge));
        let (joined, refused): (Vec<_>, Vec<_>) = join_all(joining)
            .await
            .into_iter()
            .partition(|(is_joined, _)| *is_joined);
        assert_eq!((joined.len(), refused.len()), (1, 1), "{node}");
        for (_, edge) in refused {
            let message = ["the join token was already used"];
            edge.ended().await.failed(&message);
        }
        for (_, edge) in joined {
            edge.stop().await.ok();
        }
        for site in sites {
            until_known(site, &node, "away").await;
        }
    }
}

#[tokio::test]
async fn nodes_are_added_and_tokens_revoked_at_any_gateway() {
    need!("etcd");
    let etcd = Etcd::start().await;
    let one = GatewayProcess::with_listeners(&configuration(&etcd, "/causeway/")).await;
    let two = another(&etcd, &one).await;
    two.until_ready().await;
    let added = order(&two, "node add edge-1 --pool north").await.ok();
    assert_eq!(added.stdout, "edge-1 is admitted\n");
    until("the other gateway knows the new node", async || {
        one.node("edge-1").await["pool"] == "north"
    })
    .await;

    let token = one.token("--node edge-2").await;
    let mut id = None;
    until("the token is at the other gateway", async || {
        let listed = order(&two, "token list -o json").await.ok();
        let tokens: Value = serde_json::from_str(&listed.stdout).unwrap();
        let first = tokens[0]["id"].as_str();
        id = first.map(str::to_owned);
        id.is_some()
    })
    .await;
    let line = format!("token revoke {}", id.unwrap());
    order(&two, &line).await.ok();
    for site in [&one, &two] {
        let joining = site.edge("edge-2", 1).flag("--join", &token);
        let refused = joining.run().await;
        refused.failed(&["the join token was revoked"]);
    }
}

#[tokio::test]
async fn a_pinned_key_is_removed_at_any_gateway() {
    need!("etcd");
    let (etcd, authority) = (Etcd::start().await, Authority::new());
    let (first, second) = (authority.app(&["a"]), authority.app(&["b"]));
    let shows = FixedCertificate::of(&[&first, &second], false);
    let app = App::https(shows.serve(&TLS13), by_path).await;
    let configuration = format!(
        "{}\nupstream_tls: {{ 9100: {{ pin: true }} }}",
        configuration(&etcd, "/causeway/")
    );
    let one = GatewayProcess::with_listeners(&configuration).await;
    let two = another_with(&configuration, &one).await;
    two.until_ready().await;
    let ports = format!(
        "{{9100: {{target: \"127.0.0.1:{}\", scheme: tcp}}}}",
        app.port()
    );
    let mut edge = causeway("edge --admin-listen 127.0.0.1:0")
        .flag("--gateway", &one.tunnel)
        .flag("--data-dir", one.edge_data("edge-1"))
        .flag("--ports", ports)
        .flag("--join", one.token("--node edge-1").await)
        .start();
    edge.wait_for_line("tunnel registered").await;
    let has_pin = async |site: &GatewayProcess, key: &str| {
        let listed = order(site, "node pins").await.ok();
        listed.stdout.contains(key)
    };
    // The upstream closes the connection, so the next request sees its key again.
    let url = format!("{URL}once");
    assert_eq!(one.nobody().get(&url).await.text(), "once");
    let [first, second] = [key(&first), key(&second)].map(|key| key.to_string());
    until("the other gateway has the pinned key", async || {
        has_pin(&two, &first).await
    })
    .await;

    shows.now(1);
    let refused = one.nobody().get(&url).await;
    assert_eq!(refused.status, 502, "{refused}");
    let removed = order(&two, "node unpin edge-1 9100").await.ok();
    let expected = "the pinned key of edge-1 at port 9100 is removed\n";
    assert_eq!(removed.stdout, expected);
    until("the next key is pinned", async || {
        one.nobody().get(&url).await.status == 200
    })
    .await;
    until("the other gateway has the next key", async || {
        has_pin(&two, &second).await
    })
    .await;
    assert!(!has_pin(&two, &first).await && !has_pin(&one, &first).await);
    edge.kill().await;
}

/// Another machine gets the name of a node whose first machine was copied or stolen, and still runs.
#[tokio::test]
async fn a_new_enrolment_ends_older_tunnels_at_each_gateway() {
    need!("etcd");
    let etcd = Etcd::start().await;
    let (old, new) = (App::saying("old").await, App::saying("new").await);
    let sites = two_peers(&etcd).await;
    let [one, two] = &sites;
    let mut older = join_at_both(&sites, "edge-1", &old).await;
    let row = one.node("edge-1").await;
    let old_serial = row["details"][0]["certificate"].clone();
    assert!(old_serial.is_string(), "{row}");
    // Gateways compare the seconds in which certificates were issued.
    let next_second = SystemTime::now() + Duration::from_secs(1);
    until("the next certificate is later", async || {
        SystemTime::now() > next_second
    })
    .await;

    // The other gateway learns of the enrolment only by the shared state.
    let newest = two
        .edge("edge-1", new.port())
        .args(["--tunnels-gateways", "one"])
        .flag("--join", two.token("--node edge-1").await);
    let mut newest = newest.start();
    newest.wait_for_line("tunnel registered").await;
    for site in &sites {
        until("the older tunnels have ended", async || {
            let row = site.node("edge-1").await;
            let details = row["details"].as_array();
            details.is_none_or(|all| all.iter().all(|it| it["certificate"] != old_serial))
        })
        .await;
        until("the newest machine serves", async || {
            site.nobody().get(URL).await.text() == "new"
        })
        .await;
    }
    let refused = "was issued before the node joined again";
    older.wait_for_line(refused).await;
    older.kill().await;

    // The older machine does not come back when the newest one is away.
    newest.kill().await;
    for site in &sites {
        let older = causeway("edge --admin-listen 127.0.0.1:0 --tunnels-gateways one")
            .flag("--gateways", &site.tunnel)
            .flag("--data-dir", one.edge_data("edge-1"))
            .flag("--ports", "{9100: {}}");
        let mut older = older.start();
        older.wait_for_line(refused).await;
        older.kill().await;
        assert_ne!(site.nobody().get(URL).await.text(), "old");
    }
}

/// Returns the roots of a gateway, as the admin API shows them.
async fn roots_of(site: &GatewayProcess) -> Vec<Value> {
    let answer = site.api("ca").await;
    answer["roots"].as_array().unwrap().clone()
}

#[tokio::test]
async fn each_step_of_a_rotation_works_at_any_gateway() {
    need!("etcd");
    let (etcd, app) = (Etcd::start().await, App::saying("it").await);
    let sites = two_peers(&etcd).await;
    let [one, two] = &sites;
    let edge = join_at_both(&sites, "edge-1", &app).await;
    let old = roots_of(one).await;
    order(two, "ca rotate prepare").await.ok();
    // The other gateway and the edge need a moment for the new root.
    for (site, step) in [(one, "activate"), (two, "retire")] {
        until(&format!("{step} succeeds"), async || {
            let done = order(site, &format!("ca rotate {step}")).await;
            done.code == Some(0)
        })
        .await;
    }
    until("both gateways have the new root alone", async || {
        let (first, second) = (roots_of(one).await, roots_of(two).await);
        first.len() == 1 && first == second && first != old
    })
    .await;
    until_connected(&sites).await;
    for site in &sites {
        until("a request succeeds at each gateway", async || {
            site.nobody().get(URL).await.status == 200
        })
        .await;
    }
    assert!(edge.written().count("certificate is renewed") > 0);
    edge.kill().await;
}

#[tokio::test]
async fn the_certificate_of_a_gateway_is_revoked_at_any_gateway() {
    need!("etcd");
    let (etcd, app) = (Etcd::start().await, App::saying("it").await);
    let sites = two_peers(&etcd).await;
    let [one, two] = &sites;
    let edge = join_at_both(&sites, "edge-1", &app).await;
    let token = one.token("--node edge-2").await;
    let at_one_gateway = two.edge("edge-2", app.port()).flag("--join", token);
    let at_one_gateway = at_one_gateway.args(["--tunnels-gateways", "one"]);
    let mut at_one_gateway = at_one_gateway.start();
    at_one_gateway.wait_for_line("tunnel registered").await;
    let serial = serial_of(one).await;
    let line = format!("ca revoke-gateway {serial} --reason stolen");
    let revoked = order(two, &line).await.ok();
    let expected = format!("the certificate {serial} is revoked\n");
    assert_eq!(revoked.stdout, expected);
    until("the gateway has another certificate", async || {
        serial_of(one).await != serial
    })
    .await;
    until_connected(&sites).await;
    until_held(&sites, "edge-1").await;
    for site in &sites {
        until("each gateway lists the revocation", async || {
            let listed = list_gateways(site).await;
            [&*serial, "stolen", "2 of 2 connected nodes have confirmed"]
                .iter()
                .all(|text| listed.contains(text))
        })
        .await;
        assert_eq!(site.nobody().get(URL).await.status, 200);
    }
    edge.kill().await;
    at_one_gateway.kill().await;
}

#[tokio::test]
async fn without_etcd_edges_stay_and_what_cannot_be_decided_is_refused() {
    need!("etcd");
    let (mut etcd, app) = (Etcd::start().await, App::saying("it").await);
    let one = GatewayProcess::with_listeners(&configuration(&etcd, "/causeway/")).await;
    let two = another(&etcd, &one).await;
    two.until_ready().await;
    let edge = one.join("edge-1", app.port()).await;
    let token = one.token("--node edge-2").await;
    until_known(&two, "edge-1", "away").await;

    etcd.stop();
    let has_fault = async || {
        one.readyz()
            .await
            .contains("fault: the shared state cannot be synchronized")
    };
    until("the gateway reports that etcd is away", has_fault).await;
    assert!(one.readyz().await.starts_with("ready\n"));
    assert_eq!(one.nobody().get(URL).await.status, 200);
    let mut joining = one
        .edge("edge-2", app.port())
        .flag("--join", &token)
        .start();
    joining
        .wait_for_line("the shared state of the gateways cannot be reached")
        .await;
    let revoked = order(&two, "node revoke edge-1 --reason stolen").await;
    revoked.failed(&[
        "edge-1 is revoked on disk",
        "the other gateways have not received it yet",
    ]);
    assert_eq!(one.nobody().get(URL).await.status, 200);
    // A gateway with a copy starts without etcd.
    let two = two.restart(|_| {}).await;
    assert_eq!(two.node("edge-1").await["state"], "revoked");

    etcd.start_again().await;
    joining.wait_for_line("tunnel registered").await;
    until_known(&one, "edge-1", "revoked").await;
    assert_ne!(one.nobody().get(URL).await.status, 200);
    one.until_ready().await;
    edge.kill().await;
    joining.kill().await;
}

#[tokio::test]
async fn a_slow_etcd_delays_decisions_and_one_that_is_too_slow_refuses_them() {
    need!("etcd");
    let (etcd, app) = (Etcd::start().await, App::saying("it").await);
    let link = Link::to(etcd.address()).await;
    let configuration = configuration_at(&format!("http://{}", link.address()), "/causeway/");
    let one = GatewayProcess::with_listeners(&configuration).await;
    let two = another_with(&configuration, &one).await;
    two.until_ready().await;
    let edge = one.join("edge-1", app.port()).await;
    let tokens = [
        one.token("--node edge-2").await,
        one.token("--node edge-3").await,
    ];

    // Each answer takes half a second, and may take 5 s on a busy machine.
    link.delay(Duration::from_millis(250), 0..0);
    let joining = two.edge("edge-2", app.port());
    let mut joined = joining.flag("--join", &tokens[0]).start();
    joined.wait_for_line("tunnel registered").await;
    until_known(&one, "edge-2", "away").await;
    let revoked = order(&two, "node revoke edge-2 --reason stolen").await;
    revoked.ok();
    until_known(&one, "edge-2", "revoked").await;
    assert_eq!(one.nobody().get(URL).await.status, 200);
    one.until_ready().await;

    // No answer comes in time.
    link.delay(Duration::from_secs(4), 0..0);
    let joining = two.edge("edge-3", app.port());
    let joining = joining.env("CAUSEWAY_BACKOFF_REFUSED_MAX", "1s");
    let mut joined = joining.flag("--join", &tokens[1]).start();
    joined
        .wait_for_line("the shared state of the gateways cannot be reached")
        .await;
    let revoked = order(&two, "node revoke edge-2 --reason lost").await;
    revoked.failed(&["the other gateways have not received it yet"]);
    until("the gateway reports that etcd is too slow", async || {
        let fault = "fault: the shared state cannot be synchronized";
        two.readyz().await.contains(fault)
    })
    .await;
    assert!(two.readyz().await.starts_with("ready\n"));
    assert_eq!(one.nobody().get(URL).await.status, 200);

    link.delay(Duration::ZERO, 0..0);
    joined.wait_for_line("tunnel registered").await;
    two.until_ready().await;
    until_known(&one, "edge-3", "away").await;
    edge.kill().await;
}

#[tokio::test]
async fn an_etcd_that_is_restored_from_a_backup_undoes_no_decision() {
    need!("etcd");
    let (mut etcd, app) = (Etcd::start().await, App::saying("it").await);
    let one = GatewayProcess::with_listeners(&configuration(&etcd, "/causeway/")).await;
    let two = another(&etcd, &one).await;
    two.until_ready().await;
    let revoked = one.join("edge-1", app.port()).await;
    let removed = one.join("edge-2", app.port()).await;
    let token = one.token("--node edge-3").await;
    until_known(&two, "edge-2", "away").await;
    until("the token is in etcd", async || {
        let listed = order(&two, "token list").await.ok();
        listed.stdout.contains("edge-3")
    })
    .await;
    let backup = etcd.stop_and_copy().await;
    etcd.start_again().await;

    order(&two, "node revoke edge-1 --reason stolen").await.ok();
    until_known(&one, "edge-1", "revoked").await;
    order(&two, "node remove edge-2").await.ok();
    let is_gone = async |site: &GatewayProcess| site.node("edge-2").await["state"].is_null();
    until("the node is removed", async || is_gone(&one).await).await;
    let edge = one.edge("edge-3", app.port()).flag("--join", &token);
    let mut joined = edge.start();
    joined.wait_for_line("tunnel registered").await;
    until_known(&two, "edge-3", "away").await;

    etcd.restore(&backup).await;
    // A gateway without files sees what the others have stored again.
    let third = another(&etcd, &one).await;
    third.until_ready().await;
    for site in [&one, &two, &third] {
        until_known(site, "edge-1", "revoked").await;
        until("the node stays removed", async || is_gone(site).await).await;
        site.until_ready().await;
        let thief = site.edge("thief", app.port()).flag("--join", &token);
        let refused = thief.run().await;
        refused.failed(&["the join token was already used"]);
    }
    until_known(&third, "edge-3", "away").await;
    assert_eq!(one.nobody().get("http://edge-3:9100/").await.status, 200);
    for edge in [revoked, removed] {
        assert_eq!(edge.written().count("tunnel registered"), 1);
    }
    let logs = [one.gateway.written(), two.gateway.written()];
    let is_noticed = |log: &Output| log.count("it was restored from a backup") == 1;
    assert!(logs.iter().any(is_noticed), "{logs:#?}");
}

/// Returns the revision of etcd, which counts the writes of all clients.
async fn revision(etcd: &Etcd) -> u64 {
    let url = format!("{}/v3/kv/range", etcd.url());
    let first_key = r#"{"key":"AA=="}"#;
    let answer = Tool::curl().args(["-d", first_key, &url]).run().await.ok();
    let header = answer.json()["header"].take();
    header["revision"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn edges_that_reconnect_or_are_probed_write_nothing_to_etcd() {
    const EDGES: usize = 20;
    const CONNECTED: &str = " connected ";
    need!("etcd");
    let etcd = Etcd::start().await;
    let probing = "tunnel: { ping_after: 100ms, ping_timeout: 5s }";
    let config = format!("{}\n{probing}", configuration(&etcd, "/causeway/"));
    let one = GatewayProcess::with_listeners(&config).await;
    one.until_ready().await;
    let before = revision(&etcd).await;
    let joining = (0..EDGES).map(|number| {
        let one = &one;
        async move { one.join(&format!("edge-{number}"), 1).await }
    });
    let edges: Vec<_> = stream::iter(joining).buffered(4).collect().await;
    // The token, its use, and the record of the node.
    let joined = revision(&etcd).await;
    assert_eq!(joined - before, 3 * u64::try_from(EDGES).unwrap());

    let mut one = one;
    for _ in 0..3 {
        one = one.restart(|_| {}).await;
        one.gateway.wrote(CONNECTED, EDGES, PATIENCE).await;
        one.until_ready().await;
    }
    assert_eq!(revision(&etcd).await, joined);
    drop(edges);
}

#[tokio::test]
async fn the_state_moves_from_a_data_directory_to_etcd_and_back() {
    need!("etcd");
    let (etcd, app) = (Etcd::start().await, App::saying("it").await);
    let site = GatewayProcess::with_listeners(OPEN).await;
    drop(site.join("edge-1", app.port()).await);
    order(&site, "node revoke edge-2 --unseen --reason lost")
        .await
        .ok();
    let (from, to) = (site.path("gateway.yaml"), site.path("etcd.yaml"));
    let text = fs::read_to_string(&from).unwrap();
    let endpoint = etcd.url();
    let section =
        format!("state: {{ etcd: {{ endpoints: [\"{endpoint}\"], prefix: /moved/ }} }}\n");
    fs::write(&to, text + &section).unwrap();
    let migrate = || {
        causeway("state migrate")
            .flag("--from", &from)
            .flag("--to", &to)
    };
    migrate().run().await.failed(&[
        "is in use by another causeway process",
        "end the gateway first",
    ]);
    let (folder, tunnel) = (site.folder().path().to_owned(), site.tunnel.clone());
    site.gateway.stop().await.ok();
    let copied = migrate().run().await.ok();
    let expected = "copied 2 nodes, 1 revocations, 1 join tokens, 0 pinned keys and the CA";
    assert!(copied.stdout.contains(expected), "{}", copied.stdout);
    migrate().run().await.ok();
    let back = folder.join("back.yaml");
    fs::write(
        &back,
        format!("data_dir: {}\n", folder.join("back").display()),
    )
    .unwrap();
    let returned = causeway("state migrate")
        .flag("--from", &to)
        .flag("--to", &back);
    returned.run().await.ok();
    let nodes = |name: &str| fs::read_to_string(folder.join(name).join("nodes.json")).unwrap();
    assert_eq!(nodes("back"), nodes("gateway"));
    let moved = GatewayProcess::of(
        tempfile::tempdir().unwrap(),
        &tunnel,
        &configuration(&etcd, "/moved/"),
    )
    .await;
    moved.until_ready().await;
    let rows: Value = moved.node("edge-2").await;
    assert_eq!(rows["revoked"], "lost");
    let other = GatewayProcess::with_listeners(OPEN).await;
    let other_file = other.path("gateway.yaml");
    other.gateway.stop().await.ok();
    let refused = causeway("state migrate")
        .flag("--from", &other_file)
        .flag("--to", &to);
    refused.run().await.failed(&["has another state already"]);
}
