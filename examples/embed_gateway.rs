//! Run with: `cargo run --example embed_gateway`
//!
//! Shows a gateway and an edge in the caller's own process: the edge joins with a token, dials the gateway, and one HTTPS
//! request passes through both. The configuration structs are those of the YAML files.

use std::{error::Error, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use axum::{Router, routing::get};
use causeway_certs::{Ca, JoinToken, NodeAttributes, NodeName, OpenMode, Store, TrustDomain};
use causeway_edge::config::Port;
use causeway_edge::{Edge, status::StatusReader};
use causeway_gateway::config::{ListenAddr, Listener, ListenerProtocol};
use causeway_gateway::{Bound, Gateway};
use rustls::RootCertStore;
use rustls::pki_types::{PrivateKeyDer, ServerName, pem::PemObject};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result {
    // Once in each process: Causeway's TLS is aws-lc-rs.
    causeway_certs::install_provider();
    let folder = tempfile::tempdir()?;
    let stop = CancellationToken::new();
    let mut tasks: JoinSet<Result> = JoinSet::new();

    // Do the same as `causeway ca init` and `causeway token create`.
    let store = Store::open(folder.path().join("gateway"), OpenMode::Create)?;
    let ca = Ca::create(&TrustDomain::parse("embedded.example")?)?;
    store.save_ca(&ca)?;
    let name = NodeName::parse("edge-1")?;
    let token = store
        .tokens()?
        .create(&name, Duration::from_mins(5), NodeAttributes::default())?;

    let gateway = gateway(folder.path())?;
    let addresses = gateway.addresses();
    let listener = addresses
        .listener("https")
        .ok_or("the listener has an address")?;
    println!("gateway: tunnels {}, listener {listener}", addresses.tunnel);
    let stopped = stop.clone();
    tasks.spawn(async move {
        gateway.run(stopped).await;
        Ok(())
    });

    // The node's service: an app on a free port.
    let socket = TcpListener::bind("127.0.0.1:0").await?;
    let app = socket.local_addr()?;
    let router = Router::new().route("/", get(|| async { "hello from behind the NAT\n" }));
    let stopped = stop.clone().cancelled_owned();
    let serving = axum::serve(socket, router).with_graceful_shutdown(stopped);
    tasks.spawn(async move { Ok(serving.await?) });

    // To join, the edge sends a request to the gateway, which has to run by now.
    let config = edge(folder.path(), addresses.tunnel, app, &token);
    let edge = Edge::open(config, &stop).await?.bind().await?;
    println!("edge: joined as {}", edge.node());
    let status = edge.status_reader();
    let stopped = stop.clone();
    tasks.spawn(async move { Ok(edge.run(stopped).await?) });

    tokio::time::timeout(Duration::from_secs(10), connected(&status)).await?;
    print!("{}", call(&ca, listener).await?);

    // Requests the shutdown, then waits: both drain, each for at most its configured time.
    stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

fn gateway(folder: &Path) -> Result<Bound> {
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut config = causeway_gateway::Config {
        data_dir: folder.join("gateway"),
        listeners: vec![Listener::new(
            "https",
            ListenerProtocol::Https,
            ListenAddr::Tcp(loopback),
        )],
        ..Default::default()
    };
    config.tunnel.listen = loopback;
    config.admin.listen = loopback;
    config.timeouts.drain = Duration::from_millis(500);
    Ok(Gateway::new(config).bind()?)
}

/// Starts an edge that serves `app` as port 9100 of its node.
fn edge(
    folder: &Path,
    gateway: SocketAddr,
    app: SocketAddr,
    token: &JoinToken,
) -> causeway_edge::Config {
    let mut config = causeway_edge::Config {
        data_dir: folder.join("edge"),
        gateways: vec![gateway.to_string()],
        join: Some(token.text()),
        ..Default::default()
    };
    config.admin.listen = SocketAddr::from(([127, 0, 0, 1], 0));
    let port = Port {
        target: Some(app.to_string()),
        ..Port::default()
    };
    config.ports.insert(9100, port);
    config
}

async fn connected(edge: &StatusReader) {
    while edge.status().state != "connected" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Sends one request to port 9100 of edge-1, as a client with a certificate of the gateway's own CA.
async fn call(ca: &Ca, listener: SocketAddr) -> Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(ca.root().clone())?;
    let client = ca.issue_client("example", &[], Duration::from_mins(5))?;
    let key = PrivateKeyDer::from_pem_slice(client.key_pem().expose().as_bytes())?;
    let tls = rustls::ClientConfig::builder()
        .with_root_certificates(roots)
        .with_client_auth_cert(client.chain().to_vec(), key)?;

    let tcp = TcpStream::connect(listener).await?;
    let mut io = TlsConnector::from(Arc::new(tls))
        .connect(ServerName::try_from("edge-1")?, tcp)
        .await?;
    io.write_all(b"GET / HTTP/1.1\r\nhost: edge-1:9100\r\nconnection: close\r\n\r\n")
        .await?;
    let mut answer = String::new();
    io.read_to_string(&mut answer).await?;
    Ok(answer)
}
