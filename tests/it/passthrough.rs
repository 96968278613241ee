//! `passthrough` listeners: the server name selects the node, and TLS is between the client and the app.

use crate::world::{
    World,
    app::{App, answer},
    authority::Authority,
    edge::Edge,
    gateway::anonymous,
    tool::{Tool, need},
    until,
};
use causeway_certs::LeafCertificate;
use causeway_gateway::{
    config::{Listener, ListenerProtocol, policy},
    state::{Policy, PolicyWriter},
};
use serde_json::json;
use std::fs;

const NODES: [&str; 3] = ["edge-1", "edge-2", "closed"];

/// Three nodes, whose apps answer with the names of the nodes to clients with a certificate. The policy excludes the third.
struct Site {
    world: World,
    client: LeafCertificate,
    apps: Vec<App>,
    _edges: Vec<Edge>,
}

impl Site {
    async fn start() -> Self {
        let rules = json!({ "rules": [
            { "where": { "nodes": ["closed"] }, "then": "deny" },
            { "what": { "ports": [9100] }, "then": "allow" },
        ] });
        let rules: policy::Policy = serde_json::from_value(rules).unwrap();
        let rules = PolicyWriter::new(Some(Policy::compile(&rules).unwrap()));
        let listener = |name: &str, node: Option<&str>| Listener {
            node: node.map(str::to_owned),
            port: Some(9100),
            ..anonymous(name, ListenerProtocol::Passthrough)
        };
        let world = World::build()
            .policy(rules.reader())
            .listener(listener("named", None))
            .listener(listener("default", Some("edge-2")))
            .workers(2);
        let world = Box::pin(world.start()).await;
        let authority = Authority::new();
        let client = authority.client("ann");
        let pem = client.chain_pem() + client.key_pem().expose();
        fs::write(world.folder().join("client.pem"), pem).unwrap();
        fs::write(world.folder().join("ca.pem"), authority.pem()).unwrap();
        let (mut apps, mut edges) = (Vec::new(), Vec::new());
        for node in NODES {
            let tls = authority.serve(&authority.app(&[node, "127.0.0.1"]), true);
            let app = App::https(tls, move |_| answer::ok(node)).await;
            let edge = world.edge(node).port(9100, app.address());
            edges.push(Box::pin(edge.join()).await);
            apps.push(app);
        }
        Self {
            world,
            client,
            apps,
            _edges: edges,
        }
    }

    /// Returns curl's output and its exit code, for a request with this host to a listener.
    async fn get(
        &self,
        listener: &str,
        host: &str,
        with_certificate: bool,
    ) -> (String, Option<i32>) {
        let folder = self.world.folder();
        let to = format!("::{}", self.world.listener(listener));
        let mut curl = Tool::curl().args(["--connect-to", &to, "--cacert"]);
        curl = curl.args([folder.join("ca.pem")]);
        if with_certificate {
            curl = curl.args(["--cert"]).args([folder.join("client.pem")]);
        }
        let ran = curl.args([format!("https://{host}:9100/")]).run().await;
        (format!("{}{}", ran.text(), ran.stderr), ran.status.code())
    }
}

#[tokio::test]
async fn tls_is_between_the_client_and_the_app_of_the_named_node() {
    need!("curl");
    let site = Box::pin(Site::start()).await;
    for (index, node) in NODES[..2].iter().enumerate() {
        for listener in ["named", "default"] {
            let (output, code) = site.get(listener, node, true).await;
            assert_eq!((output.as_str(), code), (*node, Some(0)));
        }
        let shown = site.apps[index].shown();
        assert_eq!(shown, vec![site.client.chain()[0].to_vec(); 2], "{node}");
        // The app refuses the client, not the gateway.
        let (output, code) = site.get("named", node, false).await;
        assert_eq!(code, Some(56), "{output}");
    }
}

#[tokio::test]
async fn a_client_without_a_server_name_reaches_the_default_node_or_gets_an_alert() {
    need!("curl");
    let site = Box::pin(Site::start()).await;
    // curl sends no server name for an address.
    let (output, code) = site.get("default", "127.0.0.1", true).await;
    assert_eq!((output.as_str(), code), ("edge-2", Some(0)));
    for (listener, host) in [
        ("named", "127.0.0.1"),
        ("named", "edge-9"),
        ("default", "edge-9"),
    ] {
        let (output, code) = site.get(listener, host, true).await;
        assert_eq!(code, Some(35), "{output}");
        assert!(output.contains("unrecognized name"), "{output}");
    }
}

#[tokio::test]
async fn a_node_that_the_policy_excludes_and_clients_without_tls_are_refused() {
    need!("curl");
    let site = Box::pin(Site::start()).await;
    let (output, code) = site.get("named", "closed", true).await;
    assert_eq!(code, Some(35), "{output}");
    assert_eq!(site.apps[2].connections(), 0);
    let counted = async || site.world.metrics().await.outcomes("named", "forbidden") == 1;
    until("the refused session is counted", counted).await;
    let url = format!("http://{}/", site.world.listener("named"));
    let plain = Tool::curl().args([url]).run().await;
    assert!(
        plain.text().contains("This listener speaks TLS"),
        "{}",
        plain.text()
    );
}
