//! A malicious edge: a valid certificate, and frames of its own making (`world::frames`).
//!
//! It dials the tunnel port of a `Site`, where its node is enrolled, and speaks only the part of a tunnel's protocol that a
//! test needs.

use super::{
    LIFE, PATIENCE,
    frames::{self, DATA, END_HEADERS, Frame, HEADERS, PREFACE, SETTINGS, STATUS_200},
    process::GatewayProcess,
};
use causeway_certs::{
    EdgeIdentity, NodeName, NodeRecord, OpenMode, PrivateKey, Store, VerifiedPublicKey,
    install_provider,
    verify::{self, TrustError},
};
use rustls::{ClientConfig, pki_types::ServerName};
use std::{io, path::Path, sync::Arc};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Name of its node.
pub(crate) const NODE: &str = "evil";

/// Names of all its nodes. The gateway throttles the log lines of each node.
pub(crate) const NODES: [&str; 3] = [NODE, "evil-2", "evil-3"];

/// The stream that a gateway opens first.
pub(crate) const CONTROL: u32 = 1;

/// Enrols its nodes at a gateway that is about to start.
pub(crate) fn enrol(data: &Path) {
    let nodes = Store::open(data, OpenMode::Existing).unwrap().nodes();
    let record = |node| NodeRecord {
        node: NodeName::parse(node).unwrap(),
        addresses: Vec::new(),
        pool: None,
        labels: std::collections::BTreeMap::new(),
        enrolled_at: 0,
        order: None,
        serial: String::new(),
        root: None,
        not_after: None,
        revoked: None,
        follows_cluster: false,
        join_key: None,
        other: causeway_certs::OtherFields::new(),
    };
    for node in NODES {
        nodes.put(record(node)).unwrap();
    }
}

fn identity(data: &Path, node: &str) -> EdgeIdentity {
    let ca = Store::open(data, OpenMode::Existing).unwrap().ca();
    let ca = ca.unwrap().unwrap();
    let key = PrivateKey::generate().unwrap();
    let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let node = NodeName::parse(node).unwrap();
    let issued = ca.issue_edge(&csr, &node, LIFE).unwrap();
    EdgeIdentity::new(&ca.root_pem(), &issued.pem(), &key.key_pem()).unwrap()
}

/// Connects to the tunnel port with the configuration that `client` makes.
async fn dial(
    site: &GatewayProcess,
    node: &str,
    client: fn(&EdgeIdentity) -> Result<Arc<ClientConfig>, TrustError>,
) -> TlsStream<TcpStream> {
    install_provider();
    let config = client(&identity(&site.data(), node)).unwrap();
    let tcp = TcpStream::connect(&site.tunnel).await.unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    TlsConnector::from(config).connect(name, tcp).await.unwrap()
}

/// Connects for egress. HTTP/2 has not begun, and the edge is its client.
pub(crate) async fn egress_connection(site: &GatewayProcess) -> TlsStream<TcpStream> {
    dial(site, NODE, verify::egress_client).await
}

/// Opens a connection of one of its nodes for egress, on which the edge is the HTTP/2 client.
pub(crate) async fn egress(site: &GatewayProcess, node: &str) -> TlsStream<TcpStream> {
    let mut io = dial(site, node, verify::egress_client).await;
    let begin = [PREFACE, &frames::settings(&[])].concat();
    frames::send(&mut io, &begin).await.unwrap();
    io
}

/// One tunnel of it.
pub(crate) struct HostileTunnel {
    read: ReadHalf<TlsStream<TcpStream>>,
    write: WriteHalf<TlsStream<TcpStream>>,
}

impl HostileTunnel {
    /// Performs TLS and SETTINGS: the control stream is open, and the gateway's hello is not answered.
    pub(crate) async fn greeted(site: &GatewayProcess) -> Self {
        let io = dial(site, NODE, verify::tunnel_client).await;
        let (read, write) = tokio::io::split(io);
        let mut evil = Self { read, write };
        let mut preface = [0; PREFACE.len()];
        evil.read.read_exact(&mut preface).await.unwrap();
        evil.send(&frames::settings(&[])).await.unwrap();
        evil.send(&frames::frame(SETTINGS, frames::ACK, 0, &[]))
            .await
            .unwrap();
        evil.until(|frame| frame.kind == HEADERS).await;
        evil
    }

    /// A tunnel that is registered: the next frames are clients' streams.
    pub(crate) async fn registered(site: &GatewayProcess) -> Self {
        Self::registered_as(site, 0).await
    }

    /// The same, as the tunnel of this slot of the node.
    pub(crate) async fn registered_as(site: &GatewayProcess, slot: u32) -> Self {
        let mut evil = Self::greeted(site).await.welcome(slot).await;
        let message = |frame: &Frame| {
            let text = String::from_utf8_lossy(&frame.payload);
            frame.kind == DATA && text.contains("registered")
        };
        evil.until(message).await;
        evil
    }

    /// Answers the gateway's hello.
    pub(crate) async fn welcome(mut self, slot: u32) -> Self {
        self.send(&frames::frame(HEADERS, END_HEADERS, CONTROL, STATUS_200))
            .await
            .unwrap();
        let welcome = serde_json::json!({
            "type": "welcome", "protocol": causeway_tunnel::wire::VERSION, "version": "0",
            "instance": "evil", "started": u64::MAX >> 1, "slot": slot,
        });
        let line = format!("{welcome}\n");
        self.send(&frames::frame(DATA, 0, CONTROL, line.as_bytes()))
            .await
            .unwrap();
        self
    }

    /// Writes; an error is the end of the tunnel.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write.write_all(bytes).await?;
        self.write.flush().await
    }

    /// Reads to a frame.
    pub(crate) async fn until(&mut self, wanted: impl Fn(&Frame) -> bool) -> Frame {
        let reading = async {
            loop {
                let mut head = [0; 9];
                self.read.read_exact(&mut head).await.unwrap();
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
                let mut payload = vec![0; usize::try_from(length).unwrap()];
                self.read.read_exact(&mut payload).await.unwrap();
                let frame = Frame {
                    kind: head[3],
                    flags: head[4],
                    stream: u32::from_be_bytes([head[5], head[6], head[7], head[8]]),
                    payload,
                };
                if wanted(&frame) {
                    return frame;
                }
            }
        };
        timeout(PATIENCE, reading).await.expect("the frame comes")
    }

    /// Returns the next stream of a client.
    pub(crate) async fn stream(&mut self) -> u32 {
        self.until(|frame| frame.kind == HEADERS).await.stream
    }

    /// Writes these bytes repeatedly, and reads all answers, until the gateway ends the tunnel.
    pub(crate) async fn flood(self, bytes: Vec<u8>) {
        let (mut read, mut write) = (self.read, self.write);
        let mut reading = JoinSet::new();
        reading.spawn(async move { tokio::io::copy(&mut read, &mut tokio::io::sink()).await });
        let many = bytes.repeat((16 * 1024 / bytes.len()).max(1));
        let writing = async { while write.write_all(&many).await.is_ok() {} };
        let ended = timeout(PATIENCE, writing).await;
        ended.expect("a flood ends its tunnel");
    }

    /// The same, without reading a byte of the answers.
    pub(crate) async fn flood_deaf(mut self, bytes: Vec<u8>) {
        let many = bytes.repeat((16 * 1024 / bytes.len()).max(1));
        let writing = async { while self.write.write_all(&many).await.is_ok() {} };
        let ended = timeout(PATIENCE, writing).await;
        ended.expect("a flood ends its tunnel");
    }

    /// Waits until the gateway has ended the tunnel.
    pub(crate) async fn ended(mut self) {
        let mut nowhere = tokio::io::sink();
        let reading = tokio::io::copy(&mut self.read, &mut nowhere);
        let ended = timeout(PATIENCE, reading).await;
        // With a reset or without: the tunnel is over.
        let _ = ended.expect("the gateway ends the tunnel");
    }
}
