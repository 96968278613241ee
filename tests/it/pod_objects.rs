//! Pods by Pod objects: a cluster in which the addresses of pods are in no `spec.podCIDRs`, as with pools of Calico and Cilium.

use crate::{
    redirect::Pods,
    world::{
        app::App,
        cluster::Cluster,
        netns::{HUB, NEED, SharedNetwork},
        process::{GatewayProcess, causeway},
        tool::{Tool, need},
        until,
    },
};
use serde_json::json;
use std::{net::Ipv4Addr, path::Path};

fn configuration(cluster: &Cluster) -> String {
    let kubernetes = json!({
        "kubeconfig": cluster.kubeconfig(),
        "pod_networks": ["10.244.0.0/16", "10.250.0.0/16"],
        "pods": {},
    });
    format!(
        "listeners: [{{ name: web, protocol: https, listen: \"127.0.0.1:0\", port: 9100 }}]\nkubernetes: {kubernetes}"
    )
}

/// Returns the body and the status of a request of the client alice. The certificate must have the host, if it is a name.
async fn get(site: &GatewayProcess, host: &str, port: u16) -> String {
    let certificate = if host.parse::<Ipv4Addr>().is_ok() {
        "--insecure"
    } else {
        "--fail-early"
    };
    let answer = Tool::curl()
        .args([Path::new("--cacert"), &site.data().join("ca.pem")])
        .args([Path::new("--cert"), &site.path("alice.pem")])
        .args([Path::new("--key"), &site.path("alice-key.pem")])
        .args([certificate, "--max-time", "20", "-w", " %{http_code}"])
        .args(["--connect-to", &format!("{host}:{port}:{}", site.listener)])
        .args([format!("https://{host}:{port}/")]);
    answer.run().await.ok().text().to_owned()
}

#[tokio::test]
async fn pods_in_no_pod_cidr_are_reached_on_their_nodes() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    let cluster = Cluster::at(HUB).await;
    let site = GatewayProcess::listening(&format!("{HUB}:0"), &configuration(&cluster)).await;
    let mut one = Pods::at(&street, &site, "edge-1", "10.0.0.0/8").await;
    let mut two = Pods::at(&street, &site, "edge-2", "10.0.0.0/8").await;
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &["10.244.1.0/24"]);
    cluster.node_with_pods("edge-2", true, &["10.0.0.12"], &["10.244.2.0/24"]);
    let at_one = one.pod("10.250.0.7", "one").await.port();
    let at_two = two.pod("10.250.0.7", "two").await.port();
    cluster.pod("shop", "web-0", "edge-1", "10.250.0.7");
    until("the pod is known", async || {
        get(&site, "10.250.0.7", at_one).await == "one 200"
    })
    .await;
    assert_eq!(get(&site, "web-0.shop.pod", at_one).await, "one 200");

    // An address in the podCIDR of a node is no pod's, although the node would serve it.
    let no_pod = one.pod("10.244.1.7", "no pod").await.port();
    for (host, port) in [
        ("10.244.1.7", no_pod),
        ("10.250.0.8", at_one),
        ("web-1.shop.pod", at_one),
    ] {
        let answer = get(&site, host, port).await;
        assert!(
            answer.contains("no running pod") && answer.ends_with(" 404"),
            "{answer}"
        );
    }

    cluster.delete_pod("shop", "web-0");
    cluster.pod("shop", "web-0", "edge-2", "10.250.0.7");
    until("the pod has moved", async || {
        get(&site, "10.250.0.7", at_two).await == "two 200"
    })
    .await;
    assert_eq!(get(&site, "web-0.shop.pod", at_two).await, "two 200");

    // A second pod with the address, as a stolen kubelet can report it, gets nothing, and neither does the first.
    cluster.pod("shop", "thief", "edge-1", "10.250.0.7");
    until("the address is nobody's", async || {
        get(&site, "10.250.0.7", at_two).await.ends_with(" 404")
    })
    .await;
    let ended = json!({ "phase": "Failed", "podIPs": [{ "ip": "10.250.0.7" }] });
    cluster.put_pod(("shop", "thief"), "edge-1", &ended);
    until("a pod that has ended gives its address up", async || {
        get(&site, "10.250.0.7", at_two).await == "two 200"
    })
    .await;
}

#[tokio::test]
async fn without_the_right_to_read_pods_only_pods_are_unavailable() {
    need!("curl");
    let cluster = Cluster::at(Ipv4Addr::LOCALHOST).await;
    cluster.refuse_pods(true);
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &["10.244.1.0/24"]);
    let site = GatewayProcess::with_listeners(&configuration(&cluster)).await;
    let app = App::saying("node").await;
    let _edge = site.join("edge-1", app.port()).await;
    let why = "pods is forbidden";
    let status = || causeway("status").flag("--data-dir", site.data()).run();
    until("the fault is reported", async || {
        status().await.stdout.contains(why)
    })
    .await;
    let lost = async || {
        let metrics = site.metrics().await;
        metrics.sum("cluster_pods_lost_timestamp_seconds", &[])
    };
    assert!(lost().await > 0);
    assert_eq!(get(&site, "edge-1", 9100).await, "node 200");
    for host in ["10.244.1.7", "web.shop.pod"] {
        let answer = get(&site, host, 9100).await;
        assert!(answer.contains(why) && answer.ends_with(" 503"), "{answer}");
    }
    let elsewhere = get(&site, "10.99.0.1", 9100).await;
    assert!(elsewhere.ends_with(" 404"), "{elsewhere}");

    cluster.refuse_pods(false);
    until("the pods are loaded", async || {
        get(&site, "10.244.1.7", 9100).await.ends_with(" 404")
    })
    .await;
    until("the fault is over", async || {
        !status().await.stdout.contains(why) && lost().await == 0
    })
    .await;
}
