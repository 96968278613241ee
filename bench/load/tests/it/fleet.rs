//! A fleet at a real gateway: registration, requests, a restart of the gateway, and handshakes.

use crate::process::{Gateway, Load, result};
use causeway_certs::{OpenMode, Store};
use serde_json::json;
use std::{fs, path::Path, time::Duration};

const NODES: usize = 20;

/// Mints the nodes and a client; returns the flags of both.
async fn mint(folder: &Path) -> (String, String) {
    let (data, out) = (folder.join("data"), folder.join("fleet.json"));
    let line = format!(
        "mint --data-dir {} --nodes {NODES} --out {}",
        data.display(),
        out.display()
    );
    let minted = Load::start(&line).wait().await;
    assert_eq!(minted.last()["nodes"], NODES);
    let ca = Store::open(&data, OpenMode::Existing).unwrap();
    let ca = ca.ca().unwrap().unwrap();
    let leaf = ca
        .issue_client("bench", &[], Duration::from_hours(1))
        .unwrap();
    let (root, caller) = (folder.join("ca.pem"), folder.join("caller.pem"));
    fs::write(&root, ca.root_pem()).unwrap();
    fs::write(&caller, leaf.chain_pem() + leaf.key_pem().expose()).unwrap();
    let caller = caller.display();
    (
        format!("--identities {}", out.display()),
        format!(
            "--cert {caller} --key {caller} --tls --ca {}",
            root.display()
        ),
    )
}

#[tokio::test]
async fn a_fleet_answers_falls_with_its_gateway_and_comes_back() {
    causeway_certs::install_provider();
    let folder = tempfile::tempdir().unwrap();
    let (identities, caller) = mint(folder.path()).await;
    let data = folder.path().join("data");
    let gateway = Gateway::start(&data, "127.0.0.1:0").await;
    let tunnel = gateway.tunnel.clone();
    let mut fleet = Load::start(&format!("fleet --gateway {tunnel} {identities}"));
    fleet.event("ready").await;
    let up = fleet.event("up").await;
    assert_eq!(
        (&up["nodes"], &up["full"]),
        (&json!(NODES), &json!(NODES)),
        "{up}"
    );

    for node in [1, NODES] {
        let target = format!("--target node-{node}:9100 --clients 2 --for 100ms {caller}");
        let front = &gateway.https;
        let met = result(&format!("connect --listener {front} {target}")).await;
        assert_eq!(
            (&met["failed"], &met["full"]),
            (&json!(0), &json!(2)),
            "{met}"
        );
        let proxy = &gateway.connect;
        let met = result(&format!("connect --proxy {proxy} {target}")).await;
        assert_eq!(met["failed"], 0, "{met}");
    }
    let front = &gateway.https;
    let caller = caller.split(" --tls").next().unwrap();
    let mut idle = Load::start(&format!(
        "idle --url https://node-2:9100/any --to {front} --count 5 {caller}"
    ));
    idle.event("ready").await;
    assert_eq!(idle.stop().await.last()["alive"], 5);

    gateway.kill().await;
    fleet.event("fell").await;
    let gateway = Gateway::start(&data, &tunnel).await;
    let back = fleet.event("back").await;
    assert_eq!(
        (&back["nodes"], &back["fell"]),
        (&json!(NODES), &json!(NODES)),
        "{back}"
    );
    let bins = back["per_100_ms"].as_array().unwrap();
    let came: u64 = bins.iter().map(|bin| bin[1].as_u64().unwrap()).sum();
    assert_eq!(came, 20, "{back}");
    fleet.stop().await.last();
    gateway.kill().await;
}

#[tokio::test]
async fn a_node_whose_gateway_ends_goes_to_the_next_one() {
    causeway_certs::install_provider();
    let folder = tempfile::tempdir().unwrap();
    let (identities, _) = mint(folder.path()).await;
    let data = folder.path().join("data");
    let gateway = Gateway::start(&data, "127.0.0.1:0").await;
    // Nobody listens at the first address.
    let gateways = format!("127.0.0.1:1,{}", gateway.tunnel);
    let half = NODES / 2;
    let mut fleet = Load::start(&format!(
        "fleet --gateway {gateways} {identities} --skip {half} --nodes {half}"
    ));
    fleet.event("ready").await;
    let up = fleet.event("up").await;
    assert_eq!(up["nodes"], half, "{up}");
    fleet.stop().await.last();
    gateway.kill().await;
}

#[tokio::test]
async fn nodes_join_at_once_by_one_token_or_by_a_token_each() {
    causeway_certs::install_provider();
    let folder = tempfile::tempdir().unwrap();
    mint(folder.path()).await;
    let data = folder.path().join("data");
    let gateway = Gateway::start(&data, "127.0.0.1:0").await;
    let tunnel = gateway.tunnel.clone();
    let join = format!(
        "join --gateway {tunnel} --data-dir {} --nodes 5",
        data.display()
    );
    for flags in ["--prefix one-", "--prefix own- --tokens-of-their-own"] {
        let met = result(&format!("{join} {flags}")).await;
        assert_eq!(
            (&met["joined"], &met["left"]),
            (&json!(5), &json!(0)),
            "{met}"
        );
    }
    gateway.kill().await;
    let store = Store::open(&data, OpenMode::Existing).unwrap();
    assert_eq!(store.nodes().all().unwrap().len(), NODES + 10);
}

#[tokio::test]
async fn handshakes_are_resumed_or_not_as_asked() {
    causeway_certs::install_provider();
    let folder = tempfile::tempdir().unwrap();
    let (identities, _) = mint(folder.path()).await;
    let data = folder.path().join("data");
    let gateway = Gateway::start(&data, "127.0.0.1:0").await;
    let load = format!(
        "fleet --gateway {} {identities} --handshakes-only --clients 2",
        gateway.tunnel
    );
    let count = |met: &serde_json::Value, what: &str| met[what].as_u64().unwrap();
    // A busy machine may count no handshake within a short time.
    let measure = async |flags: &str| {
        for time in ["400ms", "4s"] {
            let met = result(&format!("{load} {flags} --for {time}")).await;
            if count(&met, "handshakes") > 0 {
                return met;
            }
        }
        result(&format!("{load} {flags} --for 40s")).await
    };
    let full = measure("--resume no").await;
    assert!(
        count(&full, "handshakes") > 0 && count(&full, "resumed") == 0,
        "{full}"
    );
    for hello in ["", "--hello"] {
        let met = measure(&format!("--resume yes {hello}")).await;
        // The first connection of each client has no session to resume.
        assert!(
            count(&met, "handshakes") > 0 && count(&met, "full") <= 2,
            "{met}"
        );
        assert_eq!(met["counts"]["failures"], json!({}), "{met}");
    }
    gateway.kill().await;
}
