//! Two edges that claim one name, as after the copy of a disk: the newest serves, the older receives the reason, none flaps.
//!
//! Real processes. `CAUSEWAY_TEST_FULL=1` also waits for the older to take over.

use crate::world::{
    PATIENCE,
    app::App,
    netns::{HUB, NEED, SharedNetwork},
    process::{GatewayProcess, causeway},
    tool::{Tool, full, need},
};
use std::{
    path::Path,
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

const URL: &str = "http://edge-1:9100/";
/// Log message of a gateway about an edge that has connected. The reason for the end of the older one's tunnel contains "has
/// connected from".
const ARRIVED: &str = "edge-1 connected ";

/// A copy of a node's disk.
async fn copy(from: &Path, to: &Path) {
    let copied = Tool::new("cp").args(["-a".as_ref(), from, to]).run();
    copied.await.ok();
}

/// Returns the message of `causeway health` about an edge that is not healthy.
async fn complaint(data: &Path) -> String {
    let asked = causeway("health").flag("--data-dir", data).run().await;
    asked.failed(&[])
}

#[tokio::test]
async fn the_newest_of_two_edges_with_one_identity_serves() {
    let (old, new) = (App::saying("old").await, App::saying("new").await);
    let site = GatewayProcess::open_to_all("127.0.0.1:0").await;
    let mut older = site.join("edge-1", old.port()).await;
    copy(&site.edge_data("edge-1"), &site.edge_data("clone")).await;
    let mut newest = site.edge("clone", new.port()).start();
    newest.wait_for_line("tunnel registered").await;

    let told = older.wait_for_line("cannot open a tunnel").await;
    let told_at = Instant::now();
    assert!(told.contains("superseded"), "{told}");
    assert!(
        told.contains("a newer edge process of node edge-1 has connected from 127.0.0.1"),
        "{told}"
    );
    let (_, retry) = told.split_once("retry_in=").unwrap();
    let retry = retry
        .split(' ')
        .next()
        .and_then(|text| text.strip_suffix('s'));
    let retry: f64 = retry.unwrap().parse().unwrap();
    assert!(retry >= 40.0, "it connects again in {retry} s");
    let told = complaint(&site.edge_data("edge-1")).await;
    assert!(told.contains("superseded"), "{told}");

    let client = site.nobody();
    for _ in 0..20 {
        assert_eq!(client.get(URL).await.text(), "new");
    }
    // Once each: neither edge reconnects to replace the other, until the pause has ended on a very slow machine.
    site.gateway.wrote(ARRIVED, 2, PATIENCE).await;
    let (arrived, older_text) = (site.gateway.written().count(ARRIVED), older.written());
    if told_at.elapsed() < Duration::from_secs(40) {
        assert_eq!(arrived, 2);
        assert_eq!(older_text.count("tunnel registered"), 1);
        assert_eq!(newest.written().count("tunnel ended"), 0);
    }
    if full() {
        newest.kill().await;
        // The gateway asked it to stay away for a minute; the edge adds up to half of that.
        let bound = Duration::from_mins(3);
        older.wrote("tunnel registered", 2, bound).await;
        assert_eq!(client.get(URL).await.text(), "old");
    }
}

#[tokio::test]
async fn the_end_of_a_half_dead_tunnel_does_not_touch_the_newer_one() {
    need!(NEED);
    let street = SharedNetwork::new();
    let (dead, alive) = (street.host(), street.host());
    let (old, new) = {
        let old = {
            let _there = dead.enter();
            App::saying("old").await
        };
        let _there = alive.enter();
        (old, App::saying("new").await)
    };
    let mut site = GatewayProcess::open_to_all(&format!("{HUB}:0")).await;
    let mut older = site.join_by(dead.causeway(), "edge-1", old.port()).await;
    dead.cut();
    copy(&site.edge_data("edge-1"), &site.edge_data("clone")).await;
    let newest = site.edge_of(alive.causeway(), "clone", new.port());
    let mut newest = newest.start();
    newest.wait_for_line("tunnel registered").await;
    let client = site.nobody();
    assert_eq!(client.get(URL).await.text(), "new");

    site.gateway.wait_for_line("edge-1 disconnected").await;
    assert_eq!(client.get(URL).await.text(), "new");
    older.wait_for_line("tunnel ended").await;
    dead.mend();
    older
        .line("why it is not wanted", |line| line.contains("superseded"))
        .await;
    assert_eq!(client.get(URL).await.text(), "new");
    assert_eq!(site.gateway.written().count("edge-1 disconnected"), 1);
    let mut clients = JoinSet::new();
    for _ in 0..20 {
        let client = client.clone();
        clients.spawn(async move { assert_eq!(client.get(URL).await.text(), "new") });
    }
    while let Some(called) = clients.join_next().await {
        called.unwrap();
    }
}
