//! Run with: cargo run --example embed_gateway
//!
//! A gateway and an edge in a process of one's own: the edge joins with a token, dials the gateway, and
//! one HTTPS request goes through both. The configuration structs are those of the YAML files.

use std::{error::Error, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, routing::get};
use causeway_certs::{Access, Ca, NodeName, Store, TrustDomain};
use causeway_edge::Edge;
use causeway_edge::config::{Port, Secret};
use causeway_gateway::Gateway;
use causeway_gateway::config::{Front, Kind, Listen};
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result {
    // Once in each process: Causeway's TLS is aws-lc-rs.
    causeway_certs::install_provider();
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let folder = tempfile::tempdir()?;

    // A gateway wants a data directory with a CA in it; `causeway ca init` does the same.
    let data_dir = folder.path().join("gateway");
    let store = Store::open(&data_dir, Access::Create)?;
    let ca = Ca::create(&TrustDomain::parse("embedded.example")?)?;
    store.save_ca(&ca)?;

    let mut config = causeway_gateway::Config {
        data_dir,
        fronts: vec![Front::new("https", Kind::Https, Listen::Tcp(loopback))],
        ..Default::default()
    };
    config.tunnel.listen = loopback;
    config.admin.listen = loopback;
    config.timeouts.drain = Duration::from_millis(500);
    let gateway = Gateway::new(config).bind()?;
    let addresses = gateway.addresses();
    let front = addresses.front("https").ok_or("the front has an address")?;
    println!("gateway: tunnels {}, front {front}", addresses.tunnel);

    // What the node serves: an app on a free port, which the gateway's callers reach as port 9100.
    let listener = TcpListener::bind(loopback).await?;
    let app_address = listener.local_addr()?;
    let app = Router::new().route("/", get(|| async { "hello from behind the NAT\n" }));

    let name = NodeName::parse("edge-1")?;
    let token = store
        .tokens()?
        .create(&name, Duration::from_mins(5), Vec::new(), None)?;
    let mut config = causeway_edge::Config {
        data_dir: folder.path().join("edge"),
        gateways: vec![addresses.tunnel.to_string()],
        join: Some(Secret::new(token.text().expose())),
        ..Default::default()
    };
    config.admin.listen = loopback;
    let target = Some(app_address.to_string());
    config.ports.insert(
        9100,
        Port {
            target,
            ..Port::default()
        },
    );

    let stop = CancellationToken::new();
    let story = async {
        // Joins over the network, so the gateway has to run by now.
        let edge = Edge::open(config, &stop).await?.bind()?;
        println!("edge: joined as {}", edge.node());
        let status = edge.reader();
        let call = async {
            while status.status().state != "connected" {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let answer = call(&ca, front).await;
            stop.cancel();
            answer
        };
        let (ran, answer) = tokio::join!(edge.run(stop.clone()), call);
        ran?;
        print!("{}", answer?);
        Result::Ok(())
    };
    let serve_app = axum::serve(listener, app).with_graceful_shutdown(stop.clone().cancelled_owned());
    let ended = async {
        let told = story.await;
        // Also when the story came to no good end.
        stop.cancel();
        told
    };
    let ((), served, told) = tokio::join!(gateway.run(stop.clone()), serve_app, ended);
    served?;
    told
}

/// One request to port 9100 of edge-1, as a caller with a certificate of the gateway's own CA.
async fn call(ca: &Ca, front: SocketAddr) -> Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(ca.root().clone())?;
    let caller = ca.issue_caller("example", &[], Duration::from_mins(5))?;
    let key = PrivateKeyDer::from_pem_slice(caller.key_pem().expose().as_bytes())?;
    let chain: Vec<CertificateDer> = caller.chain().to_vec();
    let tls = rustls::ClientConfig::builder()
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?;

    let tcp = TcpStream::connect(front).await?;
    let mut io = TlsConnector::from(Arc::new(tls))
        .connect(ServerName::try_from("edge-1")?, tcp)
        .await?;
    io.write_all(b"GET / HTTP/1.1\r\nhost: edge-1:9100\r\nconnection: close\r\n\r\n")
        .await?;
    let mut answer = String::new();
    io.read_to_string(&mut answer).await?;
    Ok(answer)
}
