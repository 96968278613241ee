//! Run with: `cargo run --example authorizer`
//!
//! Shows a custom `Authorize`, which the gateway calls for every stream before the edge receives it: the group `ops` may do
//! everything, `readers` may only GET. Clients authenticate with bearer tokens, whose hashes are in a file. The rest of
//! this file is a gateway, an edge and an app to test it with.

use std::{error::Error, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use axum::{Router, routing::any};
use causeway_certs::{Ca, NodeAttributes, NodeName, OpenMode, StaticTokens, Store, TrustDomain};
use causeway_edge::Edge;
use causeway_edge::config::Port;
use causeway_gateway::Gateway;
use causeway_gateway::config::{ClientAuth, ListenAddr, Listener, ListenerProtocol};
use causeway_gateway::proxy::authz::{Action, Authorize, AuthzDecision, AuthzRequest};
use hyper::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Access policy by the client's groups.
#[derive(Debug)]
struct ByGroup;

impl Authorize for ByGroup {
    // Must not wait. A policy that has to ask another service returns `Verdict::Ask` with a future.
    fn authorize(&self, ask: &AuthzRequest<'_>) -> AuthzDecision {
        let is_in = |group: &str| ask.client.groups.iter().any(|one| one == group);
        // An upgrade is a GET too, but the bytes after it are more than reading.
        let reads = ask.action == Action::Request && ask.method == Method::GET;
        if is_in("ops") || is_in("readers") && reads {
            return AuthzDecision::Allow;
        }
        let (client, method, to) = (ask.client, ask.method, ask.destination);
        AuthzDecision::Deny(format!("{client} may not {method} {} at {to}", ask.path).into())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result {
    causeway_certs::install_provider();
    let folder = tempfile::tempdir()?;
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();

    // Does the same as `causeway client token`: the file gets hashes, the clients keep the tokens.
    let (reader, first) = StaticTokens::generate("prometheus", &["readers".into()])?;
    let (operator, second) = StaticTokens::generate("alice", &["ops".into()])?;
    std::fs::write(
        folder.path().join("clients"),
        format!("{first}\n{second}\n"),
    )?;

    let listener = Box::pin(road(folder.path(), &stop, &mut tasks)).await?;
    for (token, method) in [(&reader, "GET"), (&reader, "DELETE"), (&operator, "DELETE")] {
        let answer = call(listener, method, token.expose()).await?;
        println!("{answer}\n");
    }

    stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

/// Starts gateway, edge and upstream; returns the address of an `http` listener.
async fn road(
    folder: &Path,
    stop: &CancellationToken,
    tasks: &mut JoinSet<Result>,
) -> Result<SocketAddr> {
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let store = Store::open(folder.join("gateway"), OpenMode::Create)?;
    store.save_ca(&Ca::create(&TrustDomain::parse("embedded.example")?)?)?;
    let mut listener = Listener::new("http", ListenerProtocol::Http, ListenAddr::Tcp(loopback));
    listener.client_auth = ClientAuth {
        own_ca: false,
        tokens: Some(folder.join("clients")),
        ..ClientAuth::default()
    };
    let mut config = causeway_gateway::Config {
        data_dir: folder.join("gateway"),
        listeners: vec![listener],
        ..Default::default()
    };
    config.tunnel.listen = loopback;
    config.admin.listen = loopback;
    config.timeouts.drain = Duration::from_millis(500);
    let gateway = Gateway::new(config).authorizer(Arc::new(ByGroup)).bind()?;
    let addresses = gateway.addresses();
    let stopped = stop.clone();
    tasks.spawn(async move {
        gateway.run(stopped).await;
        Ok(())
    });

    let app = TcpListener::bind(loopback).await?;
    let port = Port {
        target: Some(app.local_addr()?.to_string()),
        ..Port::default()
    };
    let router = Router::new().fallback(any(
        |method: Method| async move { format!("{method} done") },
    ));
    let serving = axum::serve(app, router).with_graceful_shutdown(stop.clone().cancelled_owned());
    tasks.spawn(async move { Ok(serving.await?) });

    let name = NodeName::parse("edge-1")?;
    let token = store
        .tokens()?
        .create(&name, Duration::from_mins(5), NodeAttributes::default())?;
    let mut config = causeway_edge::Config {
        data_dir: folder.join("edge"),
        gateways: vec![addresses.tunnel.to_string()],
        join: Some(token.text()),
        ports: [(9100, port)].into(),
        ..Default::default()
    };
    config.admin.listen = loopback;
    edge(config, stop, tasks).await?;
    addresses.listener("http").ok_or("no address".into())
}

/// Starts an edge and returns when it is connected.
async fn edge(
    config: causeway_edge::Config,
    stop: &CancellationToken,
    tasks: &mut JoinSet<Result>,
) -> Result {
    let edge = Edge::open(config, stop).await?.bind().await?;
    let status = edge.status_reader();
    let stopped = stop.clone();
    tasks.spawn(async move { Ok(edge.run(stopped).await?) });
    let connected = async {
        while status.status().state != "connected" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    Ok(tokio::time::timeout(Duration::from_secs(10), connected).await?)
}

/// Sends one request to port 9100 of edge-1; returns the status line and the body of its answer.
async fn call(listener: SocketAddr, method: &str, token: &str) -> Result<String> {
    let mut io = TcpStream::connect(listener).await?;
    let head = format!(
        "{method} /jobs/7 HTTP/1.1\r\nhost: edge-1:9100\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\r\n"
    );
    io.write_all(head.as_bytes()).await?;
    let mut answer = String::new();
    io.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no head")?;
    let status = head.lines().next().unwrap_or_default();
    Ok(format!("{method}: {status}\n{body}"))
}
