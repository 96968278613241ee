//! Who is not let in on the site network.

use super::world::{Cloud, Edge, Gateway, SOON, World, at, identity, pool, raw};
use causeway_certs::{Ca, EdgeIdentity, GatewayName, TrustDomain, verify::Site};
use causeway_tunnel::hello::Members;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use serde_json::json;
use std::{sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

const ASK: &[u8] = b"GET /api/v1/services HTTP/1.1\r\nHost: edge-1\r\n\r\n";

/// A node with a site, at which `edge-2` is a member as well.
async fn served(world: &World) -> (Gateway, Edge, Members) {
    let gateway = Gateway::start(&world.ca, Cloud::with(&["v1/services"])).await;
    gateway.cloud.put("v1/services", "web");
    let edge = world.edge("edge-1").start(&[&gateway], json!({})).await;
    let mut members = pool("edge-1", &[&edge]);
    members.members.push(at("edge-2", edge.site));
    gateway.tell(&members);
    edge.until(|reader| reader.ready && reader.members.len() == 2)
        .await;
    (gateway, edge, members)
}

/// As whoever has this identity dials a site.
fn dials(identity: &EdgeIdentity) -> Arc<ClientConfig> {
    Site::new(identity, Arc::new(|_| true))
        .unwrap()
        .client()
        .unwrap()
}

async fn dial(edge: &Edge, config: Arc<ClientConfig>) -> std::io::Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect(edge.site).await?;
    let name = ServerName::try_from("edge-1").unwrap();
    TlsConnector::from(config).connect(name, tcp).await
}

/// What is answered to whoever dials so; with TLS 1.3 a refusal comes after the handshake.
async fn answered(edge: &Edge, config: Arc<ClientConfig>) -> std::io::Result<String> {
    let mut tls = dial(edge, config).await?;
    tls.write_all(ASK).await?;
    let mut read = vec![0; 64];
    let count = timeout(SOON, tls.read(&mut read)).await.unwrap()?;
    Ok(String::from_utf8_lossy(&read[..count]).into_owned())
}

#[tokio::test]
async fn a_member_reads_and_nobody_else_does() {
    let world = World::new();
    let (_gateway, edge, _) = served(&world).await;
    let member = answered(&edge, dials(&identity(&world.ca, "edge-2")))
        .await
        .unwrap();
    assert!(member.starts_with("HTTP/1.1 200"), "{member}");
    let another = Ca::create(&TrustDomain::parse("test").unwrap()).unwrap();
    let mut of_another = identity(&another, "edge-2");
    // It believes us, though we do not believe it.
    of_another.roots = identity(&world.ca, "edge-2").roots;
    let mut as_gateway = identity(&world.ca, "edge-2");
    let names = [GatewayName::parse("edge-2").unwrap()];
    as_gateway.leaf = world
        .ca
        .issue_gateway(&names, Duration::from_hours(1))
        .unwrap();
    let mut as_caller = identity(&world.ca, "edge-2");
    as_caller.leaf = world
        .ca
        .issue_caller("edge-2", &[], Duration::from_hours(1))
        .unwrap();
    for (who, stranger) in [
        ("a node of another pool", identity(&world.ca, "edge-3")),
        ("a node of another CA", of_another),
        ("a gateway", as_gateway),
        ("a caller", as_caller),
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
async fn whoever_is_no_member_any_more_is_closed() {
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
async fn handshakes_that_are_not_begun_hold_up_nobody() {
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

/// Shows no certificate.
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
