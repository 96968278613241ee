//! `passthrough` listeners: the server name selects the node, and TLS is between the client and the app.

use crate::world::{
    World,
    app::{App, answer},
    authority::Authority,
    client::{exchange, read},
    edge::Edge,
    gateway::{Build, anonymous},
    tool::{Running, Tool, need},
    until,
};
use causeway_certs::LeafCertificate;
use causeway_edge::config::Protocol;
use causeway_gateway::{
    config::{Listener, ListenerProtocol, policy},
    state::{Policy, PolicyWriter},
};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use serde_json::{Value, json};
use std::{fs, sync::Arc};
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tokio_rustls::TlsConnector;

const NODES: [&str; 3] = ["edge-1", "edge-2", "closed"];

/// Listener for port 9100 of the named node, or of `node` for clients that name none.
fn listener(name: &str, node: Option<&str>) -> Listener {
    Listener {
        node: node.map(str::to_owned),
        port: Some(9100),
        ..anonymous(name, ListenerProtocol::Passthrough)
    }
}

/// Three nodes, whose apps answer with the names of the nodes to clients with a certificate. The policy excludes the third.
struct Site {
    world: World,
    client: LeafCertificate,
    apps: Vec<App>,
    _edges: Vec<Edge>,
}

impl Site {
    async fn start() -> Self {
        let rules = json!([
            { "where": { "nodes": ["closed"] }, "then": "deny" },
            { "what": { "ports": [9100] }, "then": "allow" },
        ]);
        let listeners = [listener("named", None), listener("default", Some("edge-2"))];
        Self::with(&rules, listeners).await
    }

    /// With this policy and these listeners.
    async fn with(rules: &Value, listeners: [Listener; 2]) -> Self {
        let rules = serde_json::from_value(json!({ "rules": rules }));
        let rules: policy::Policy = rules.unwrap();
        let rules = PolicyWriter::new(Some(Policy::compile(&rules).unwrap()));
        let world = World::build().policy(rules.reader()).workers(2);
        let world = listeners.into_iter().fold(world, Build::listener);
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
        let from = "127.0.0.1";
        self.get_from(from, listener, host, with_certificate).await
    }

    /// The same from another address of loopback.
    async fn get_from(
        &self,
        from: &str,
        listener: &str,
        host: &str,
        with_certificate: bool,
    ) -> (String, Option<i32>) {
        let folder = self.world.folder();
        let to = format!("::{}", self.world.listener(listener));
        let mut curl = Tool::curl().args(["--connect-to", &to, "--cacert"]);
        curl = curl.args([folder.join("ca.pem")]);
        curl = curl.args(["--interface", from]);
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
        // The alert, or the end behind it, arrives after the handshake: before curl sends its request (55), or later (56).
        assert!(matches!(code, Some(55 | 56)), "{code:?} {output}");
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

/// Only the gateway knows the address of a client, and the app the certificate.
#[tokio::test]
async fn networks_of_clients_decide_at_the_listener_and_in_the_policy() {
    need!("curl");
    let rules = json!([
        { "who": { "networks": ["127.0.0.2/32", "127.0.0.3/32"] }, "where": { "nodes": ["edge-1"] }, "then": "allow" },
        { "who": { "networks": ["127.0.0.4/32"] }, "where": { "nodes": ["edge-*"] }, "then": "allow" },
    ]);
    let networks = ["127.0.0.2/32", "127.0.0.4/32"].map(|network| network.parse().unwrap());
    let listed = Listener {
        anonymous_from: networks.to_vec(),
        ..listener("listed", None)
    };
    let site = Box::pin(Site::with(&rules, [listener("every", None), listed])).await;
    for (listener, from, node, is_allowed) in [
        ("every", "127.0.0.1", "edge-1", false),
        ("every", "127.0.0.2", "edge-1", true),
        ("every", "127.0.0.2", "edge-2", false),
        ("every", "127.0.0.3", "edge-1", true),
        ("every", "127.0.0.4", "edge-1", true),
        ("every", "127.0.0.4", "edge-2", true),
        ("every", "127.0.0.4", "closed", false),
        ("listed", "127.0.0.1", "edge-1", false),
        ("listed", "127.0.0.2", "edge-1", true),
        ("listed", "127.0.0.2", "edge-2", false),
        // The policy allows this client, and the listener does not.
        ("listed", "127.0.0.3", "edge-1", false),
        ("listed", "127.0.0.4", "edge-2", true),
    ] {
        let index = NODES.iter().position(|known| *known == node).unwrap();
        let before = site.apps[index].connections();
        let (output, code) = site.get_from(from, listener, node, true).await;
        let row = format!("{from} to {node} at {listener}: {output}");
        let expected = if is_allowed { 0 } else { 35 };
        assert_eq!(code, Some(expected), "{row}");
        assert_eq!(output == node, is_allowed, "{row}");
        let connections = site.apps[index].connections() - before;
        assert_eq!(connections, usize::from(is_allowed), "{row}");
    }
    for (listener, reason, count) in [
        ("every", "forbidden", 3),
        ("listed", "forbidden", 1),
        ("listed", "unauthenticated", 2),
    ] {
        let counted = async || site.world.metrics().await.outcomes(listener, reason) == count;
        until("each refused session is counted", counted).await;
    }
}

/// A proxy that gives the original destination stands for a redirection by the kernel.
#[tokio::test]
async fn a_client_without_a_server_name_reaches_the_node_that_it_dialled() {
    let authority = Authority::new();
    let through = Listener {
        original_destination: true,
        proxy_protocol: vec!["127.0.0.1/32".parse().unwrap()],
        ..listener("through", Some("edge-1"))
    };
    let world = Box::pin(World::build().listener(through).start()).await;
    let mut edges = Vec::new();
    for (node, address) in [("edge-1", "10.0.0.11"), ("edge-2", "10.0.0.12")] {
        let tls = authority.serve(&authority.app(&[node]), false);
        let app = App::https(tls, move |_| answer::ok(node)).await;
        // The port is that of the destination, and not that of the listener.
        let edge = world.edge(node).address(address).port(9200, app.address());
        edges.push((Box::pin(edge.join()).await, app));
    }
    let mut roots = RootCertStore::empty();
    let root = CertificateDer::from_pem_slice(authority.pem().as_bytes());
    roots.add(root.unwrap()).unwrap();
    let config = ClientConfig::builder().with_root_certificates(roots);
    let config = config.with_no_client_auth();
    for (sends_name, host, node) in [
        (false, 12, "edge-2"),
        (false, 11, "edge-1"),
        // No node has this address, so it is the default node.
        (false, 99, "edge-1"),
        // The server name precedes the destination.
        (true, 12, "edge-1"),
    ] {
        let mut socket = TcpStream::connect(world.listener("through")).await.unwrap();
        let header = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x07\x0a\0\0";
        let (from, to) = (4711_u16.to_be_bytes(), 9200_u16.to_be_bytes());
        let header = [&header[..], &[host], &from, &to].concat();
        socket.write_all(&header).await.unwrap();
        let mut config = config.clone();
        config.enable_sni = sends_name;
        let connector = TlsConnector::from(Arc::new(config));
        // The certificate has only the name of the node.
        let name = ServerName::try_from(node).unwrap();
        let mut tls = connector.connect(name, socket).await.unwrap();
        exchange(&mut tls, "GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
        let body = read(&mut tls, node.len()).await;
        assert_eq!(body, node.as_bytes(), "{host}");
        tls.shutdown().await.unwrap();
    }
    world.until_idle().await;
    // A session may end after a later one.
    let records = world.log().records();
    let of_second = records.iter().filter(|record| record["node"] == "edge-2");
    assert_eq!((of_second.count(), records.len()), (1, 4), "{records:?}");
}

/// Waits for the app's next event of this name.
async fn event(app: &mut Running, name: &str) -> Value {
    loop {
        let event = app.json().await;
        if event["event"] == name {
            return event;
        }
    }
}

/// All kinds of call: streams in both directions, trailers, deadlines, aborts.
#[tokio::test]
async fn grpc_passes_with_the_certificates_of_client_and_app() {
    need!("python:grpc");
    let world = World::build().listener(listener("named", None));
    let world = Box::pin(world.start()).await;
    let authority = Authority::new();
    let files = |leaf: &LeafCertificate| {
        [leaf.chain_pem().as_str(), leaf.key_pem().expose()].map(|pem| world.write(pem))
    };
    let ca = world.write(authority.pem());
    let app = Tool::python("grpc_server.py").args(files(&authority.app(&["edge-1"])));
    let mut app = app.args([&ca]).start();
    let port = event(&mut app, "listening").await["port"].as_u64().unwrap();
    let address = ([127, 0, 0, 1], u16::try_from(port).unwrap()).into();
    let edge = world.edge("edge-1").port_as(9100, Protocol::Tcp, address);
    let _edge = Box::pin(edge.join()).await;

    let client = || {
        let client = Tool::python("grpc_client.py").args(["--ca".as_ref(), ca.as_os_str()]);
        client.args(["--address", &world.listener("named").to_string()])
    };
    // The app refuses this client, not the gateway.
    let refused = client().args(["--error"]).run().await.json();
    assert_eq!(refused["code"], "UNAVAILABLE", "{refused}");
    let [certificate, key] = files(&authority.client("ann"));
    let known = client().args(["--cert".as_ref(), certificate.as_os_str()]);
    let known = known.args(["--key".as_ref(), key.as_os_str()]);
    let verdict = known.run().await.json();
    assert_eq!(verdict["ok"], true, "{verdict:#}");
    assert_eq!(event(&mut app, "call").await["client"], json!(["ann"]));
    for _ in 0..2 {
        assert_eq!(event(&mut app, "cancelled").await["method"], "Hang");
    }
    world.until_idle().await;
    let sessions = world
        .metrics()
        .await
        .sum("streams_total", &[("listener", "named")]);
    assert_eq!(sessions, 2, "one connection of each client");
}
