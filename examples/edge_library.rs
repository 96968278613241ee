//! Run with: `cargo run --example edge_library`
//!
//! Shows the edge as a library: a program on a node makes itself reachable, without an agent beside it. Its app listens on
//! loopback, an edge in the same process serves it to the gateway, and `Status` shows the state of the edge. The gateway,
//! at the end of this file, runs on another machine in production.

use std::{error::Error, net::SocketAddr, path::Path, time::Duration};

use axum::{Router, routing::get};
use causeway_certs::{Ca, NodeAttributes, NodeName, OpenMode, Store, TrustDomain};
use causeway_edge::config::{Port, Secret};
use causeway_edge::{Config, Edge, status::StatusReader};
use causeway_gateway::Gateway;
use causeway_gateway::config::{ListenAddr, Listener, ListenerProtocol};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result {
    causeway_certs::install_provider();
    let folder = tempfile::tempdir()?;
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let (gateway, listener, token) = gateway(folder.path(), &stop, &mut tasks)?;

    // The program's own service.
    let socket = TcpListener::bind("127.0.0.1:0").await?;
    let app = socket.local_addr()?;
    let router = Router::new().route("/temperature", get(|| async { "21.5" }));
    let serving =
        axum::serve(socket, router).with_graceful_shutdown(stop.clone().cancelled_owned());
    tasks.spawn(async move { Ok(serving.await?) });

    // Clients reach it as port 80 of this node, and no other port of this machine.
    let port = Port {
        target: Some(app.to_string()),
        ..Port::default()
    };
    let mut config = Config {
        data_dir: folder.path().join("edge"),
        gateways: vec![gateway.to_string()],
        // Needed once: the data directory keeps the certificate that the edge obtains with it.
        join: Some(Secret::new(token)),
        ports: [(80, port)].into(),
        ..Config::default()
    };
    config.admin.listen = SocketAddr::from(([127, 0, 0, 1], 0));
    let edge = Edge::open(config, &stop).await?.bind().await?;
    let status = edge.status_reader();
    show("bound", &status);
    let stopped = stop.clone();
    tasks.spawn(async move { Ok(edge.run(stopped).await?) });

    let connected = async {
        while status.status().state != "connected" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), connected).await?;
    show("running", &status);
    println!("a client reads {}", call(listener).await?);
    show("called", &status);

    // The edge leaves its gateways in order: open sessions get `timeouts.drain` to end.
    stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

/// Prints the edge's status. The admin listener returns the same as JSON at `/status`.
fn show(when: &str, edge: &StatusReader) {
    let status = edge.status();
    println!("{when}: {} is {}", status.node, status.state);
    for tunnel in &status.tunnels {
        println!(
            "  tunnel {} to {}: {} streams so far, {} bytes sent",
            tunnel.slot, tunnel.gateway, tunnel.opened, tunnel.sent
        );
    }
    if let Some(trouble) = &status.trouble {
        println!("  trouble: {}", trouble.what);
    }
}

/// Starts a gateway; returns its tunnel port, an `http` listener, and a token for a node.
fn gateway(
    folder: &Path,
    stop: &CancellationToken,
    tasks: &mut JoinSet<Result>,
) -> Result<(SocketAddr, SocketAddr, String)> {
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let store = Store::open(folder.join("gateway"), OpenMode::Create)?;
    store.save_ca(&Ca::create(&TrustDomain::parse("embedded.example")?)?)?;
    let name = NodeName::parse("sensor-1")?;
    let token = store
        .tokens()?
        .create(&name, Duration::from_mins(5), NodeAttributes::default())?;
    let listener = Listener {
        anonymous: true,
        ..Listener::new("http", ListenerProtocol::Http, ListenAddr::Tcp(loopback))
    };
    let mut config = causeway_gateway::Config {
        data_dir: folder.join("gateway"),
        listeners: vec![listener],
        ..Default::default()
    };
    config.tunnel.listen = loopback;
    config.admin.listen = loopback;
    config.timeouts.drain = Duration::from_millis(500);
    let gateway = Gateway::new(config).bind()?;
    let addresses = gateway.addresses();
    let listener = addresses.listener("http").ok_or("no address")?;
    let stopped = stop.clone();
    tasks.spawn(async move {
        gateway.run(stopped).await;
        Ok(())
    });
    Ok((addresses.tunnel, listener, token.text().expose().to_owned()))
}

/// Sends one request to port 80 of sensor-1; returns the body of its answer.
async fn call(listener: SocketAddr) -> Result<String> {
    let mut io = TcpStream::connect(listener).await?;
    io.write_all(b"GET /temperature HTTP/1.1\r\nhost: sensor-1:80\r\nconnection: close\r\n\r\n")
        .await?;
    let mut answer = String::new();
    io.read_to_string(&mut answer).await?;
    let (_, body) = answer.split_once("\r\n\r\n").ok_or("no head")?;
    Ok(body.to_owned())
}
