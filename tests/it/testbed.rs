//! A gateway with all kinds of listeners, edge-1, and an app as its port 9100.
//!
//! For tests of the data path. Listeners: `https` (certificate), `plain` (http), `bytes` (tcp to port 9100), `connect` and
//! `unix` (connect); all but the first admit every client, so that any program can be used.

use crate::world::{
    GATEWAY_NAME, World,
    app::{App, Head, Script},
    authority::Authority,
    client::{Client, Wire, exchange},
    edge::Edge,
    gateway::{Build, anonymous, fixed},
    tool::Tool,
};
use causeway_edge::config::Protocol;
use causeway_gateway::config::{self, ListenAddr, Listener, ListenerProtocol};
use std::{net::SocketAddr, ops::Deref, path::PathBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// The app, by the name that clients use.
pub(crate) const URL: &str = "https://edge-1:9100/";

/// A world with all its parts; the edge is dropped first.
pub(crate) struct TestBed {
    pub(crate) edge: Edge,
    world: World,
}

impl TestBed {
    /// Builds it with an app that speaks HTTP/1.1.
    pub(crate) async fn to(app: &App) -> Self {
        Self::to_as(Protocol::Http, app.address()).await
    }

    /// Builds it with an app that speaks another protocol.
    pub(crate) async fn to_as(scheme: Protocol, app: SocketAddr) -> Self {
        Box::pin(Self::along(Self::build(), scheme, app)).await
    }

    /// Builds it with an app that speaks TLS with the gateway itself: the edge passes bytes.
    pub(crate) async fn secured(
        choose: impl Fn(&Head) -> Script + Send + Sync + 'static,
    ) -> (App, Self) {
        Self::secured_by(Self::build(), choose).await
    }

    /// The same with these listeners.
    pub(crate) async fn secured_by(
        build: Build,
        choose: impl Fn(&Head) -> Script + Send + Sync + 'static,
    ) -> (App, Self) {
        let authority = Authority::new();
        let ca = build.folder().join("apps.pem");
        std::fs::write(&ca, authority.pem()).unwrap();
        let tls = authority.serve(&authority.app(&["edge-1"]), false);
        let app = App::https(tls, choose).await;
        let ours = config::UpstreamTls {
            ca: Some(ca),
            ..config::UpstreamTls::default()
        };
        let build = build.config(|config| drop(config.upstream_tls.insert(9100, ours)));
        let testbed = Box::pin(Self::along(build, Protocol::Tcp, app.address())).await;
        (app, testbed)
    }

    /// The listeners, which a test may change before they open.
    pub(crate) fn build() -> Build {
        let build = World::build();
        let unix = ListenAddr::Unix(build.folder().join("connect.sock"));
        build
            .listener(anonymous("plain", ListenerProtocol::Http))
            .listener(Listener {
                anonymous: true,
                ..fixed("bytes", ListenerProtocol::Tcp, "edge-1", 9100)
            })
            .listener(anonymous("connect", ListenerProtocol::Connect))
            .listener(Listener::new("unix", ListenerProtocol::Connect, unix))
    }

    /// Builds it with these listeners.
    pub(crate) async fn along(build: Build, scheme: Protocol, app: SocketAddr) -> Self {
        // Boxed: a gateway's configuration is large.
        let world = Box::pin(build.start()).await;
        let edge = world.edge("edge-1").port_as(9100, scheme, app);
        let edge = Box::pin(edge.join()).await;
        Self { edge, world }
    }

    /// Builds it from an existing world and edge.
    pub(crate) fn of(world: World, edge: Edge) -> Self {
        Self { edge, world }
    }

    /// Stops the gateway in order, waits for its end, and starts it again.
    pub(crate) async fn restart_gateway(&mut self) {
        self.world.stop_gateway().await;
        self.world.start_gateway().await;
    }

    /// The unix socket of `unix`.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder().join("connect.sock")
    }

    /// TLS to `https` for bytes of HTTP/1.1.
    pub(crate) async fn tls(&self) -> TlsStream<TcpStream> {
        let opened = self.client().tls_stream("edge-1", &["http/1.1"]).await;
        opened.unwrap()
    }

    /// TCP to a listener that speaks no TLS.
    pub(crate) async fn tcp(&self, listener: &str) -> TcpStream {
        self.client_at(listener).tcp_stream().await
    }

    /// A CONNECT to this target that was answered, through TLS.
    pub(crate) async fn connect(&self, target: &str) -> TlsStream<TcpStream> {
        let client = self.client_at("connect");
        let mut wire = client.tls_stream(GATEWAY_NAME, &[]).await.unwrap();
        let head = format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
        let answer = exchange(&mut wire, head).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        wire
    }

    /// A TCP session with the app: through `connect`, or `bytes`.
    pub(crate) async fn session(&self, connects: bool) -> Box<dyn Wire> {
        if connects {
            Box::new(self.connect("edge-1:9100").await)
        } else {
            Box::new(self.tcp("bytes").await)
        }
    }

    /// A client that speaks HTTP/2.
    pub(crate) fn http2(&self) -> Client {
        self.client().http2()
    }

    /// The ids of the node's tunnels, the eldest first.
    pub(crate) async fn tunnels(&self) -> Vec<u64> {
        self.details("id").await
    }

    /// Returns this figure of each of the node's tunnels, the eldest first.
    pub(crate) async fn details(&self, name: &str) -> Vec<u64> {
        let node = self.node("edge-1").await;
        let mut rows = node["details"].as_array().unwrap().clone();
        rows.sort_by_key(|row| row["id"].as_u64());
        rows.iter().map(|row| row[name].as_u64().unwrap()).collect()
    }

    /// A script of `clients` that calls `https` with a certificate.
    pub(crate) fn python(&self, script: &str) -> Tool {
        let leaf = self.client_leaf("python");
        let certificate = self.write(&leaf.chain_pem());
        let key = self.write(leaf.key_pem().expose());
        Tool::python(script)
            .args(["--address", &self.listener("https").to_string()])
            .args(["--ca".into(), self.root_path()])
            .args(["--cert".into(), certificate])
            .args(["--key".into(), key])
    }
}

impl Deref for TestBed {
    type Target = World;

    fn deref(&self) -> &World {
        &self.world
    }
}
