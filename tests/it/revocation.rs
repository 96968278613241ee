//! Revocation of nodes: nodes that are revoked, allowed again or removed; tokens for several nodes, and revoked tokens.

use crate::world::{
    World,
    app::App,
    process::{GatewayProcess, causeway},
    until,
};
use serde_json::Value;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    time::{Duration, SystemTime},
};
use tokio::{io::AsyncWriteExt, net::TcpStream};

const URL: &str = "http://edge-1:9100/";

#[tokio::test]
async fn a_revoked_node_loses_its_tunnels_until_it_is_allowed_again() {
    let app = App::saying("it").await;
    let site = GatewayProcess::with_listeners(crate::world::process::OPEN).await;
    let mut edge = site.join("edge-1", app.port()).await;
    let _other = site.join("edge-2", app.port()).await;
    let client = site.nobody();
    assert_eq!(client.get(URL).await.status, 200);
    let order = |line: &str| {
        let order = causeway("node").args(line.split_whitespace());
        order.flag("--data-dir", site.data()).run()
    };

    let message = order("revoke edge-1 --reason stolen").await.ok().stdout;
    assert_eq!(message, "edge-1 is revoked\n");
    assert_eq!(client.get(URL).await.status, 503, "its tunnels have ended");
    assert_eq!(client.get("http://edge-2:9100/").await.status, 200);
    edge.wait_for_line("node edge-1 is revoked: stolen").await;
    edge.kill().await;
    let row = |site: &GatewayProcess| {
        let asked = causeway("status -o json")
            .flag("--data-dir", site.data())
            .run();
        async {
            let rows: Vec<Value> = serde_json::from_str(&asked.await.ok().stdout).unwrap();
            rows.into_iter()
                .find(|row| row["node"] == "edge-1")
                .unwrap()
        }
    };
    let shown = row(&site).await;
    assert_eq!(shown["state"], "revoked");
    assert_eq!(shown["revoked"], "stolen");

    // The node cannot return with its certificate or a new token, not even after a restart of the gateway.
    let site = site.restart(|_| {}).await;
    let mut edge = site.edge("edge-1", app.port()).start();
    edge.wait_for_line("node edge-1 is revoked: stolen").await;
    edge.kill().await;
    let token = site.token("--node edge-1").await;
    std::fs::remove_file(site.edge_data("edge-1").join("edge.json")).unwrap();
    let edge = site.edge("edge-1", app.port()).flag("--join", &token);
    edge.run()
        .await
        .failed(&["revoked: stolen", "causeway node allow edge-1"]);

    let allow = causeway("node allow edge-1").flag("--data-dir", site.data());
    assert_eq!(allow.run().await.ok().stdout, "edge-1 is admitted again\n");
    // The refusal does not use up the token.
    let edge = site.edge("edge-1", app.port()).flag("--join", &token);
    let mut edge = edge.start();
    edge.wait_for_line("tunnel registered").await;
    assert_eq!(site.nobody().get(URL).await.status, 200);

    let remove = causeway("node remove edge-1").flag("--data-dir", site.data());
    remove.run().await.ok();
    assert_ne!(site.nobody().get(URL).await.status, 200);
    edge.wait_for_line("not enrolled at this gateway").await;
    let again = causeway("node remove edge-1").flag("--data-dir", site.data());
    again.run().await.failed(&["no node edge-1", "edge-2"]);
}

/// Every user of the machine can connect to the admin listener, and keep its connections busy with endless heads.
#[tokio::test]
async fn a_full_admin_listener_holds_up_no_command() {
    let app = App::saying("it").await;
    let site = GatewayProcess::with_listeners(crate::world::process::OPEN).await;
    let mut edge = site.join("edge-1", app.port()).await;
    let noted = |data: PathBuf| fs::read_to_string(data.join("run-admin")).unwrap();
    let mut held = Vec::new();
    for address in [noted(site.data()), noted(site.edge_data("edge-1"))] {
        for _ in 0..300 {
            let mut tcp = TcpStream::connect(address.trim()).await.unwrap();
            tcp.write_all(b"GET /healthz HTTP/1.1\r\n").await.unwrap();
            held.push(tcp);
        }
    }
    let of = |line: &str, data: PathBuf| causeway(line).flag("--data-dir", data).run();
    for line in ["health", "reload", "status"] {
        of(line, site.data()).await.ok();
    }
    for line in ["health", "status"] {
        of(line, site.edge_data("edge-1")).await.ok();
    }
    let revoked = of("node revoke edge-1 --reason stolen", site.data()).await;
    assert_eq!(revoked.ok().stdout, "edge-1 is revoked\n");
    assert_eq!(site.nobody().get(URL).await.status, 503);
    edge.wait_for_line("node edge-1 is revoked: stolen").await;
    let socket = site.data().join("run-admin.sock");
    let mode = fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "other users cannot connect to it");
}

/// Checks a stolen machine, which still has its certificate when another machine has taken the node's place.
#[tokio::test]
async fn a_node_revoked_by_configuration_cannot_return() {
    let mut world = World::start().await;
    let app = App::saying("it").await;
    let mut edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let other = world.edge("edge-2").port(9100, app.address());
    let _other = other.join().await;
    let names = ["edge-1", "edge-3"].map(str::to_owned).to_vec();
    let changed = world
        .reload(|config| config.tunnel.revoked = names)
        .unwrap();
    assert!(changed.revoked);
    let says = "tunnel.revoked names it";
    until(
        "its tunnel has ended, and the edge has the reason",
        async || {
            let trouble = edge.status().trouble;
            trouble.is_some_and(|trouble| trouble.what.contains(says))
        },
    )
    .await;
    let client = world.client();
    assert_eq!(client.get(URL).await.status, 503);
    assert_eq!(client.get("http://edge-2:9100/").await.status, 200);
    assert_eq!(world.node("edge-1").await["state"], "revoked");
    // It cannot return with a new process, nor join with a token if it was never there.
    edge.stop().await;
    edge.start().await.unwrap();
    until("it is refused again", async || {
        let trouble = edge.status().trouble;
        trouble.is_some_and(|trouble| trouble.what.contains(says))
    })
    .await;
    let never = world.edge("edge-3").open().await.err().unwrap();
    assert!(never.to_string().contains(says), "{never}");

    let changed = world.reload(|config| config.tunnel.revoked.clear());
    assert!(changed.unwrap().revoked);
    edge.stop().await;
    edge.start().await.unwrap();
    until("it is back", async || client.get(URL).await.status == 200).await;
}

#[tokio::test]
async fn a_certificate_from_before_a_new_enrolment_is_refused() {
    let app = App::saying("it").await;
    let site = GatewayProcess::with_listeners(crate::world::process::OPEN).await;
    site.join("edge-1", app.port()).await.stop().await.ok();
    let (place, stolen) = (site.edge_data("edge-1"), site.edge_data("thief"));
    let made = std::fs::metadata(place.join("edge.json")).unwrap();
    std::fs::rename(&place, &stolen).unwrap();
    // The gateway compares the dates of a certificate and of the enrolment in seconds.
    let next = made.modified().unwrap() + Duration::from_secs(2);
    until("another second has begun", async || {
        SystemTime::now() > next
    })
    .await;
    for _ in 0..2 {
        let successor = site.join("edge-1", app.port()).await;
        let mut thief = site.edge("thief", app.port()).start();
        thief
            .wait_for_line("was issued before the node joined again")
            .await;
        thief.kill().await;
        assert_eq!(site.nobody().get(URL).await.text(), "it");
        successor.kill().await;
        std::fs::remove_dir_all(&place).unwrap();
    }
}

#[tokio::test]
async fn a_token_for_several_joins_works_until_used_up_or_revoked() {
    let app = App::saying("it").await;
    let site = GatewayProcess::with_listeners(crate::world::process::OPEN).await;
    let token = site.token("--node site-7-* --uses 2 --pool seven").await;
    let joins = |node: &str| {
        let edge = site.edge(node, app.port()).flag("--join", &token);
        edge.flag("--node", node)
    };
    let mut first = joins("site-7-a").start();
    first.wait_for_line("tunnel registered").await;
    let url = "http://site-7-a:9100/";
    until("it is reached", async || {
        site.nobody().get(url).await.status == 200
    })
    .await;
    let unnamed = site.edge("unnamed", app.port()).flag("--join", &token);
    unnamed
        .run()
        .await
        .failed(&["for nodes site-7-*", "--node NAME"]);
    joins("site-8-a")
        .run()
        .await
        .failed(&["not for node site-8-a"]);
    // A holder of such a token cannot replace an existing node.
    first.stop().await.ok();
    std::fs::remove_file(site.edge_data("site-7-a").join("edge.json")).unwrap();
    joins("site-7-a").run().await.failed(&["joined before"]);

    let list = causeway("token list -o json").flag("--data-dir", site.data());
    let listed: Value = serde_json::from_str(&list.run().await.ok().stdout).unwrap();
    assert_eq!(listed[0]["nodes"], "site-7-*");
    assert_eq!(listed[0]["state"], "good");
    assert_eq!(listed[0]["used"][0]["node"], "site-7-a");
    let id = listed[0]["id"].as_str().unwrap();
    let secret = token.split('.').nth(2).unwrap();
    assert!(
        !listed.to_string().contains(secret),
        "secrets are not shown"
    );
    let revoke = causeway("token revoke").args([id]);
    revoke.flag("--data-dir", site.data()).run().await.ok();
    joins("site-7-b").run().await.failed(&["revoked"]);
    let table = causeway("token list").flag("--data-dir", site.data());
    let table = table.run().await.ok().stdout;
    assert!(
        table.contains("revoked") && table.contains("1/2"),
        "{table}"
    );
    let unknown = causeway("token revoke nobody").flag("--data-dir", site.data());
    unknown.run().await.failed(&["there is no token nobody"]);
}
