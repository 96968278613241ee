//! Routing of requests: each rule of the routing order, over real sockets.
//!
//! The original destination needs nftables rules; `proxy::route` tests it without them.

use crate::world::{
    GATEWAY_NAME, World,
    app::{App, Script},
    client::{assert_problem, exchange, read},
    gateway::{anonymous, fixed, listener},
};
use causeway_certs::NodeName;
use causeway_edge::config::Protocol;
use causeway_gateway::{
    config::{Listener, ListenerProtocol},
    worker::Workers,
};

#[tokio::test]
async fn the_sni_names_the_node() {
    let world = World::start().await;
    let (one, two) = (App::saying("one").await, App::saying("two").await);
    let _one = world.edge("edge-1").port(9100, one.address()).join().await;
    let _two = world.edge("edge-2").port(9100, two.address()).join().await;
    for client in [world.client(), world.client().http2()] {
        assert_eq!(client.get("https://edge-1:9100/").await.text(), "one");
        assert_eq!(client.get("https://edge-2:9100/").await.text(), "two");
    }
}

#[tokio::test]
async fn a_host_that_names_no_node_passes_untouched() {
    let world = World::start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(10250, app.address()).join().await;
    // The exact text that kube-apiserver sends: no port of it is the node's.
    for host in ["Kubernetes.Default.svc:443", "10.96.0.1", "[fd00::1]:9100"] {
        let client = world.client().sni("edge-1").host(host);
        assert_eq!(client.get("https://edge-1/").await.text(), "it", "{host}");
        assert_eq!(app.head().await.value("host").unwrap(), host);
        assert_eq!(client.http2().get("https://edge-1/").await.text(), "it");
        assert_eq!(app.head().await.value("host").unwrap(), host);
    }
}

#[tokio::test]
async fn an_sni_and_a_host_of_two_nodes_are_refused() {
    let world = World::start().await;
    let (one, two) = (App::saying("one").await, App::saying("two").await);
    let _one = world.edge("edge-1").port(9100, one.address()).join().await;
    let _two = world.edge("edge-2").port(9100, two.address()).join().await;
    for client in [world.client(), world.client().http2()] {
        let answer = client.sni("edge-1").get("https://edge-2:9100/").await;
        assert_problem(
            &answer,
            421,
            "misdirected",
            "the SNI names edge-1, and the Host \"edge-2:9100\" names edge-2",
        );
    }
    assert_eq!((one.requests(), two.requests()), (0, 0));
}

#[tokio::test]
async fn an_sni_without_a_node_falls_back_to_the_host() {
    let world = World::start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    for client in [
        world.client().sni(GATEWAY_NAME),
        world.client().sni("127.0.0.1"),
    ] {
        assert_eq!(client.get("https://edge-1:9100/").await.text(), "it");
        assert_eq!(
            client.http2().get("https://EDGE-1:9100/").await.text(),
            "it"
        );
    }
}

#[tokio::test]
async fn a_listener_may_stand_for_one_node() {
    let plain = Listener {
        anonymous: true,
        ..fixed("plain", ListenerProtocol::Http, "edge-1", 9100)
    };
    let bytes = fixed("bytes", ListenerProtocol::Tcp, "edge-1", 22);
    let world = World::build().listener(plain).listener(bytes).start().await;
    let app = App::saying("it").await;
    let echo = App::tcp(Script::new().echo()).await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let _edge = edge.port_as(22, Protocol::Tcp, echo.address()).join().await;
    let _other = world.edge("edge-2").port(9100, app.address()).join().await;

    let answer = world
        .client_at("plain")
        .get("http://whoever.example/")
        .await;
    assert_eq!(answer.text(), "it");
    assert_eq!(app.head().await.value("host").unwrap(), "whoever.example");
    let answer = world.client_at("plain").get("http://edge-2:9100/").await;
    assert_problem(&answer, 421, "misdirected", "this listener names edge-1");
    let mut wire = world
        .client_at("bytes")
        .tls_stream(GATEWAY_NAME, &[])
        .await
        .unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut wire, b"ping")
        .await
        .unwrap();
    assert_eq!(read(&mut wire, 4).await, b"ping");
}

#[tokio::test]
async fn the_host_names_the_node_by_name_or_by_a_confirmed_address() {
    let world = World::build()
        .listener(anonymous("plain", ListenerProtocol::Http))
        .start()
        .await;
    let app = App::saying("it").await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let edge = edge.address("10.0.0.7").address("fd00::7");
    let _edge = edge
        .config(|config| config.addresses = vec!["10.9.9.9".parse().unwrap()])
        .join()
        .await;
    let client = world.client_at("plain");
    for host in [
        "edge-1:9100",
        "EDGE-1:9100",
        "10.0.0.7:9100",
        "[fd00::7]:9100",
    ] {
        assert_eq!(
            client.get(&format!("http://{host}/")).await.text(),
            "it",
            "{host}"
        );
    }
    let claimed = client.get("http://10.9.9.9:9100/").await;
    assert_problem(&claimed, 404, "node_unknown", "10.9.9.9");
}

#[tokio::test]
async fn an_address_of_two_nodes_names_neither() {
    let world = World::build()
        .listener(anonymous("plain", ListenerProtocol::Http))
        .start()
        .await;
    let app = App::saying("it").await;
    for node in ["edge-1", "edge-2"] {
        let edge = world
            .edge(node)
            .port(9100, app.address())
            .address("192.168.0.2");
        // The enrolment has confirmed it, so that the node need not be connected.
        drop(edge.join().await);
    }
    let answer = world
        .client_at("plain")
        .get("http://192.168.0.2:9100/")
        .await;
    assert_problem(
        &answer,
        421,
        "misdirected",
        "192.168.0.2 is an address of several nodes (edge-1, edge-2)",
    );
}

#[tokio::test]
async fn the_authority_of_a_connect_names_node_and_port() {
    let world = World::build()
        .listener(listener("connect", ListenerProtocol::Connect))
        .start()
        .await;
    let echo = App::tcp(Script::new().echo()).await;
    let edge = world
        .edge("edge-1")
        .port_as(22, Protocol::Tcp, echo.address());
    let _edge = edge.address("10.0.0.7").join().await;
    for authority in ["edge-1:22", "10.0.0.7:22"] {
        let client = world.client_at("connect");
        let mut wire = client.tls_stream(GATEWAY_NAME, &[]).await.unwrap();
        // kube-apiserver's Host is always this one.
        let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nping");
        let answer = exchange(&mut wire, head).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert_eq!(read(&mut wire, 4).await, b"ping");
    }
}

#[tokio::test]
async fn the_port_comes_from_a_node_host_else_from_the_listener() {
    let world = World::build()
        .listener(Listener {
            port: Some(9100),
            ..listener("metrics", ListenerProtocol::Https)
        })
        .listener(anonymous("plain", ListenerProtocol::Http))
        .start()
        .await;
    let (kubelet, metrics) = (App::saying("kubelet").await, App::saying("metrics").await);
    let edge = world.edge("edge-1").port(10250, kubelet.address());
    let _edge = edge.port(9100, metrics.address()).join().await;

    let client = world.client();
    assert_eq!(client.get("https://edge-1/").await.text(), "kubelet");
    assert_eq!(client.get("https://edge-1:9100/").await.text(), "metrics");
    let listens = world.listener("https").port();
    let foreign = client.host(&format!("{GATEWAY_NAME}:{listens}"));
    assert_eq!(foreign.get("https://edge-1/").await.text(), "kubelet");
    let client = world.client_at("metrics");
    assert_eq!(client.get("https://edge-1/").await.text(), "metrics");
    assert_eq!(client.get("https://edge-1:10250/").await.text(), "kubelet");
    let answer = world.client_at("plain").get("http://edge-1/").await;
    assert_problem(&answer, 400, "malformed", "names no port of edge-1");
}

#[tokio::test]
async fn a_client_cannot_say_the_target_in_our_own_words() {
    let world = World::start().await;
    let (app, other) = (App::saying("it").await, App::saying("other").await);
    let edge = world.edge("edge-1").port(9100, app.address());
    let _edge = edge.port(22, other.address()).join().await;
    for name in [
        causeway_tunnel::wire::TARGET.as_str(),
        causeway_tunnel::wire::FAILURE.as_str(),
        causeway_tunnel::wire::SWITCHED.as_str(),
    ] {
        let mut wire = world
            .client()
            .tls_stream("edge-1", &["http/1.1"])
            .await
            .unwrap();
        let head = format!("GET / HTTP/1.1\r\nHost: edge-1:9100\r\n{name}: edge-1:22\r\n\r\n");
        let answer = exchange(&mut wire, head).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert_eq!(app.head().await.value(name), None);
    }
    assert_eq!(other.requests(), 0);
}

/// Regression case of envoyproxy/envoy#41536: a request that another worker accepts than the one with the tunnel.
#[tokio::test]
async fn only_routes_known_from_the_host_alone_cross_workers() {
    let listener = anonymous("plain", ListenerProtocol::Http);
    let world = World::build().listener(listener).workers(2).start().await;
    let workers = Workers::start(2).unwrap();
    let worker = |node: &str| workers.worker_of(&NodeName::parse(node).unwrap());
    let mut names = (1..).map(|number| format!("edge-{number}"));
    let one = names.next().unwrap();
    let two = names.find(|name| worker(name) != worker(&one)).unwrap();
    let app = App::saying("it").await;
    let _one = world.edge(&one).port(9100, app.address()).join().await;
    let _two = world.edge(&two).port(9100, app.address()).join().await;

    for node in [&one, &two, &one, &two] {
        let answer = world.client().get(&format!("https://{node}:9100/")).await;
        assert_eq!(answer.text(), "it");
    }
    assert_eq!(world.metrics().await.sum("streams_crossed_total", &[]), 0);
    let mut connection = world.client_at("plain").connect("").await.unwrap();
    for node in [&one, &two] {
        let answer = connection
            .get(&format!("http://{node}:9100/"))
            .await
            .unwrap();
        assert_eq!(answer.text(), "it");
    }
    assert_eq!(world.metrics().await.sum("streams_crossed_total", &[]), 1);
}
