//! Table of the pods that each client may reach, by their names and by their addresses.

use super::outcome;
use crate::{
    redirect::Pods,
    world::{
        cluster::Cluster,
        netns::{HUB, NEED, SharedNetwork},
        process::{GatewayProcess, causeway},
        tool::{Tool, need},
        until,
    },
};
use serde_json::json;
use std::{fs, net::Ipv4Addr, path::Path};

/// Rules for pods. `ann` and `bea` have certificates.
const POD_RULES: &str = "rules:
  - { who: { users: [ann] }, where: { pod_namespaces: [shop] }, what: { ports: [8080] }, then: allow }
  - { who: { users: [bea] }, where: { nodes: [edge-1], pod_namespaces: [bank] }, then: allow }
  # Without namespaces: pods as well, by their node.
  - { who: { users: [bea] }, where: { nodes: [edge-2] }, what: { ports: [8080] }, then: allow }
  - { who: { users: [\"system:anonymous\"] }, where: { nodes: [edge-2], pod_namespaces: [shop] }, then: allow }
";

/// Pods of a cluster, at two edges and in the cloud: namespace, name, node, address.
const PODS: [(&str, &str, &str, &str); 5] = [
    ("shop", "web", "edge-1", "10.250.0.1"),
    ("bank", "web", "edge-1", "10.250.0.2"),
    ("shop", "till", "edge-2", "10.250.0.3"),
    ("shop", "cloud", "cloud-1", "10.250.0.4"),
    // The owner of edge-1 does not allow this address.
    ("shop", "shut", "edge-1", "10.250.0.5"),
];

/// Client, pod, port, and the outcome. An anonymous client does not learn which pods exist.
const POD_ROWS: [(&str, &str, u16, &str); 21] = [
    ("ann", "web.shop", 8080, "web"),
    ("ann", "web.shop", 9090, "403 forbidden"),
    ("ann", "till.shop", 8080, "till"),
    ("ann", "web.bank", 8080, "403 forbidden"),
    ("ann", "shut.shop", 8080, "403 edge_policy"),
    ("ann", "cloud.shop", 8080, "404 node_unknown"),
    ("ann", "nobody.shop", 8080, "404 node_unknown"),
    ("bea", "web.bank", 8080, "bank"),
    // Allowed, but the pod does not listen.
    ("bea", "web.bank", 9090, "502 target_refused"),
    ("bea", "web.shop", 8080, "403 forbidden"),
    ("bea", "till.shop", 8080, "till"),
    ("bea", "till.shop", 9090, "403 forbidden"),
    ("bea", "nobody.bank", 8080, "404 node_unknown"),
    ("cleo", "web.shop", 8080, "403 forbidden"),
    ("cleo", "till.shop", 8080, "403 forbidden"),
    ("anonymous", "till.shop", 8080, "till"),
    ("anonymous", "web.shop", 8080, "401 unauthenticated"),
    ("anonymous", "web.bank", 8080, "401 unauthenticated"),
    ("anonymous", "cloud.shop", 8080, "401 unauthenticated"),
    ("anonymous", "shut.shop", 8080, "401 unauthenticated"),
    ("anonymous", "nobody.shop", 8080, "401 unauthenticated"),
];

/// Returns the outcome of a request to a pod, by its name or by its address.
async fn get_pod(site: &GatewayProcess, who: &str, host: &str, port: u16) -> String {
    let curl = Tool::curl().args([Path::new("--cacert"), &site.data().join("ca.pem")]);
    let curl = if who == "anonymous" {
        curl
    } else {
        let file = |end: &str| site.path(&format!("{who}{end}.pem"));
        let curl = curl.args([Path::new("--cert"), &file("")]);
        curl.args([Path::new("--key"), &file("-key")])
    };
    // The certificate of the listener has the names of pods, and no addresses.
    let is_address = host.parse::<Ipv4Addr>().is_ok();
    let curl = curl.args(is_address.then_some("--insecure"));
    let to = format!("{host}:{port}:{}", site.listener);
    let url = format!("https://{host}:{port}/");
    let curl = curl.args(["-w", "\n%{http_code}", "--connect-to", &to, &url]);
    let output = curl.run().await.ok().text();
    let (body, status) = output.rsplit_once('\n').unwrap();
    outcome(status.parse().unwrap(), body)
}

/// Starts a gateway that follows the pods of a cluster, and makes the clients' certificates.
async fn site_of_pods(cluster: &Cluster) -> GatewayProcess {
    let kubernetes = json!({
        "kubeconfig": cluster.kubeconfig(), "pod_networks": ["10.250.0.0/16"], "pods": {},
    });
    let rules = cluster.kubeconfig().with_file_name("policy.yaml");
    fs::write(&rules, POD_RULES).unwrap();
    let configuration = format!(
        "listeners: [{{ name: web, protocol: https, listen: \"127.0.0.1:0\", anonymous: true }}]\n\
         kubernetes: {kubernetes}\npolicy: {}",
        rules.display()
    );
    let site = GatewayProcess::listening(&format!("{HUB}:0"), &configuration).await;
    for who in ["ann", "bea", "cleo"] {
        let made = causeway(&format!("client certificate --name {who}"));
        let made = made.flag("--out", site.folder().path());
        made.flag("--data-dir", site.data()).run().await.ok();
    }
    site
}

#[tokio::test]
async fn pods_at_an_https_listener() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    let cluster = Cluster::at(HUB).await;
    for (node, is_edge, address) in [
        ("edge-1", true, "10.0.0.11"),
        ("edge-2", true, "10.0.0.12"),
        ("cloud-1", false, "10.0.0.13"),
    ] {
        cluster.node_with_pods(node, is_edge, &[address], &[]);
    }
    for (namespace, name, node, address) in PODS {
        cluster.pod(namespace, name, node, address);
    }
    let site = Box::pin(site_of_pods(&cluster)).await;
    let allowed = "10.250.0.1,10.250.0.2";
    let mut one = Box::pin(Pods::at(&street, &site, "edge-1", allowed)).await;
    let mut two = Box::pin(Pods::at(&street, &site, "edge-2", "10.250.0.3")).await;
    one.pod_at("10.250.0.1", 8080, "web").await;
    one.pod_at("10.250.0.2", 8080, "bank").await;
    one.pod_at("10.250.0.5", 8080, "shut").await;
    two.pod_at("10.250.0.3", 8080, "till").await;
    for pod in ["web", "till"] {
        until("the pod is known", async || {
            get_pod(&site, "ann", &format!("{pod}.shop.pod"), 8080).await == pod
        })
        .await;
    }
    for (who, pod, port, expected) in POD_ROWS {
        let known = PODS
            .iter()
            .find(|known| pod == format!("{}.{}", known.1, known.0));
        let address = known.map_or("10.250.0.99", |known| known.3);
        for host in [format!("{pod}.pod").as_str(), address] {
            let found = get_pod(&site, who, host, port).await;
            assert_eq!(found, expected, "{who} to {host}:{port}");
        }
    }
}
