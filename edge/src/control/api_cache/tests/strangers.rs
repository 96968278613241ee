//! Clients that are refused on the site network.

use super::super::{member_server::max_per_member, tls_acceptor::HANDSHAKE_TIMEOUT};
use super::world::{Cloud, Edge, Gateway, SOON, World, at, identity, pool, raw};
use causeway_certs::{Ca, EdgeIdentity, GatewayName, TrustDomain, verify::PoolMemberTls};
use causeway_tunnel::control_stream::NodePoolMembers;
use causeway_watch_cache::GroupVersionResource;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use nix::sys::resource::{Resource as Limit, getrlimit, setrlimit};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use serde_json::json;
use std::{str::FromStr, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{Instant, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

const ASK: &[u8] = b"GET /api/v1/services HTTP/1.1\r\nHost: edge-1\r\n\r\n";

/// Starts a node with a member listener, in a pool that also has `edge-2`.
async fn served(world: &World) -> (Gateway, Edge, NodePoolMembers) {
    let gateway = Gateway::start(&world.ca, Cloud::with(&["v1/services"])).await;
    gateway.cloud.put("v1/services", "web");
    let edge = world.edge("edge-1").start(&[&gateway], json!({})).await;
    let mut members = pool("edge-1", &[&edge]);
    members.members.push(at("edge-2", edge.site));
    gateway.tell(&members);
    edge.until(|api_cache| api_cache.ready && api_cache.members.len() == 2)
        .await;
    (gateway, edge, members)
}

/// Returns the configuration with which a node of this identity connects to a member listener.
fn dials(identity: &EdgeIdentity) -> Arc<ClientConfig> {
    PoolMemberTls::new(identity, Arc::new(|_| true))
        .unwrap()
        .client_config()
        .unwrap()
}

async fn dial(edge: &Edge, config: Arc<ClientConfig>) -> std::io::Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect(edge.site).await?;
    let name = ServerName::try_from("edge-1").unwrap();
    TlsConnector::from(config).connect(name, tcp).await
}

/// Returns the answer to a client with this configuration. With TLS 1.3 a refusal follows the handshake.
async fn answered(edge: &Edge, config: Arc<ClientConfig>) -> std::io::Result<String> {
    let mut tls = dial(edge, config).await?;
    tls.write_all(ASK).await?;
    let mut read = vec![0; 64];
    let count = timeout(SOON, tls.read(&mut read)).await.unwrap()?;
    Ok(String::from_utf8_lossy(&read[..count]).into_owned())
}

#[tokio::test]
async fn only_a_pool_member_may_read() {
    let world = World::new();
    let (_gateway, edge, _) = served(&world).await;
    let member = answered(&edge, dials(&identity(&world.ca, "edge-2")))
        .await
        .unwrap();
    assert!(member.starts_with("HTTP/1.1 200"), "{member}");
    let another = Ca::create(&TrustDomain::parse("test").unwrap()).unwrap();
    let mut of_another = identity(&another, "edge-2");
    // The client trusts this node, but this node does not trust the client.
    of_another.roots = identity(&world.ca, "edge-2").roots;
    let mut as_gateway = identity(&world.ca, "edge-2");
    let names = [GatewayName::parse("edge-2").unwrap()];
    as_gateway.leaf = world
        .ca
        .issue_gateway(&names, Duration::from_hours(1))
        .unwrap();
    let mut as_client = identity(&world.ca, "edge-2");
    as_client.leaf = world
        .ca
        .issue_client("edge-2", &[], Duration::from_hours(1))
        .unwrap();
    for (who, stranger) in [
        ("a node of another pool", identity(&world.ca, "edge-3")),
        ("a node of another CA", of_another),
        ("a gateway", as_gateway),
        ("a client", as_client),
    ] {
        let answer = answered(&edge, dials(&stranger)).await;
        assert!(
            answer
                .as_ref()
                .is_err_and(|error| !error.to_string().is_empty()),
            "{who}: {answer:?}"
        );
    }
    let mut nobody = ClientConfig::clone(&dials(&identity(&world.ca, "edge-2")));
    nobody.client_auth_cert_resolver = Arc::new(Nobody);
    assert!(answered(&edge, Arc::new(nobody)).await.is_err());
    let plain = raw(
        edge.site,
        "GET /api/v1/services HTTP/1.1\r\nHost: edge-1\r\n\r\n",
    )
    .await;
    assert!(!plain.contains("HTTP/1.1"), "{plain}");
}

#[tokio::test]
async fn the_connection_of_a_removed_member_is_closed() {
    let world = World::new();
    let (gateway, edge, mut members) = served(&world).await;
    let mut tls = dial(&edge, dials(&identity(&world.ca, "edge-2")))
        .await
        .unwrap();
    tls.write_all(b"GET /api/v1/services?watch=1 HTTP/1.1\r\nHost: edge-1\r\n\r\n")
        .await
        .unwrap();
    let mut read = vec![0; 4096];
    assert!(timeout(SOON, tls.read(&mut read)).await.unwrap().unwrap() > 0);
    members.members.pop();
    gateway.tell(&members);
    let ended = timeout(SOON, async {
        while let Ok(1..) = tls.read(&mut read).await {}
    });
    assert!(ended.await.is_ok());
}

#[tokio::test]
async fn unstarted_handshakes_delay_no_other_connection() {
    let world = World::new();
    let (_gateway, edge, _) = served(&world).await;
    let mut silent = Vec::new();
    for _ in 0..32 {
        silent.push(TcpStream::connect(edge.site).await.unwrap());
    }
    let member = answered(&edge, dials(&identity(&world.ca, "edge-2")))
        .await
        .unwrap();
    assert!(member.starts_with("HTTP/1.1 200"), "{member}");
}

#[tokio::test]
async fn an_address_that_shakes_no_hands_loses_its_oldest() {
    let world = World::new();
    let (_gateway, edge, _) = served(&world).await;
    let (mut silent, begun) = (Vec::new(), Instant::now());
    // More than the limit of simultaneous handshakes.
    for _ in 0..300 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        silent.push(socket.connect(edge.site).await.unwrap());
    }
    let member = answered(&edge, dials(&identity(&world.ca, "edge-2")))
        .await
        .unwrap();
    assert!(member.starts_with("HTTP/1.1 200"), "{member}");
    let ended = timeout(SOON, silent[0].read_u8()).await.unwrap();
    assert!(ended.is_err(), "{ended:?}");
    let ended = silent[299].read_u8().now_or_never();
    // On a slow machine its own time may be over.
    let is_over = begun.elapsed() >= HANDSHAKE_TIMEOUT;
    assert!(ended.is_none() || is_over, "{ended:?}");
}

#[tokio::test]
async fn one_member_does_not_take_the_places_of_others() {
    let world = World::new();
    let (gateway, edge, mut members) = served(&world).await;
    members.members.push(at("edge-3", edge.site));
    gateway.tell(&members);
    edge.until(|api_cache| api_cache.members.len() == 3).await;
    let greedy = dials(&identity(&world.ca, "edge-2"));
    let mut held = Vec::new();
    let filling = async {
        while held.len() < max_per_member(1) {
            // A slow machine may need longer than the time of a handshake.
            held.extend(watches(&edge, greedy.clone(), "v1/services").await);
        }
    };
    timeout(SOON, filling).await.expect("it gets its places");
    let more = watches(&edge, greedy.clone(), "v1/services").await;
    assert!(more.is_err(), "it gets no more");
    let other = answered(&edge, dials(&identity(&world.ca, "edge-3")))
        .await
        .unwrap();
    assert!(other.starts_with("HTTP/1.1 200"), "{other}");
    drop(held);
    let again = timeout(SOON, async {
        while watches(&edge, greedy.clone(), "v1/services").await.is_err() {}
    });
    assert!(again.await.is_ok());
}

#[tokio::test]
async fn a_pool_of_as_many_as_there_can_be_reads_all_at_one_of_them() {
    // Both ends of each connection are in this process.
    let (_, most) = getrlimit(Limit::RLIMIT_NOFILE).unwrap();
    setrlimit(Limit::RLIMIT_NOFILE, most, most).unwrap();
    let resources = [
        "v1/services",
        "v1/endpoints",
        "discovery.k8s.io/v1/endpointslices",
    ];
    let world = World::new();
    let gateway = Gateway::start(&world.ca, Cloud::with(&resources)).await;
    let node = world.edge("edge-1");
    let edge = node
        .start(&[&gateway], json!({ "resources": resources }))
        .await;
    let mut members = pool("edge-1", &[&edge]);
    let names: Vec<_> = (1..NodePoolMembers::MAX_MEMBERS)
        .map(|at| format!("member-{at}"))
        .collect();
    members
        .members
        .extend(names.iter().map(|name| at(name, edge.site)));
    gateway.tell(&members);
    edge.until(|api_cache| {
        api_cache.ready && api_cache.members.len() == NodePoolMembers::MAX_MEMBERS
    })
    .await;
    let each = names.iter().map(|name| dials(&identity(&world.ca, name)));
    let all: Vec<_> = each
        .flat_map(|config| resources.map(|resource| watches(&edge, config.clone(), resource)))
        .collect();
    let held: Vec<_> = stream::iter(all).buffered(16).try_collect().await.unwrap();
    assert_eq!(
        held.len(),
        (NodePoolMembers::MAX_MEMBERS - 1) * resources.len()
    );
}

/// Opens a watch and waits until it has begun.
async fn watches(
    edge: &Edge,
    config: Arc<ClientConfig>,
    resource: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut tls = dial(edge, config).await?;
    let path = GroupVersionResource::from_str(resource).unwrap().path();
    let ask = format!("GET {path}?watch=1 HTTP/1.1\r\nHost: {}\r\n\r\n", edge.node);
    tls.write_all(ask.as_bytes()).await?;
    let mut read = [0; 12];
    timeout(SOON, tls.read_exact(&mut read)).await.unwrap()?;
    assert_eq!(read, *b"HTTP/1.1 200");
    Ok(tls)
}

/// Client configuration without a certificate.
#[derive(Debug)]
struct Nobody;

impl rustls::client::ResolvesClientCert for Nobody {
    fn resolve(
        &self,
        _: &[&[u8]],
        _: &[rustls::SignatureScheme],
    ) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}
