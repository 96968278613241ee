//! A name server of a test's own, whose answers the test chooses.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use tokio::{net::UdpSocket, task::JoinSet};

/// A query for an IPv4 address (RFC 1035 §3.2.2).
pub(crate) const A: u8 = 1;
/// A query for an IPv6 address (RFC 3596 §2.1).
pub(crate) const AAAA: u8 = 28;

/// A query for the addresses of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Query {
    /// Name without the dot of the root.
    pub(crate) name: String,
    /// Low byte of the type.
    pub(crate) kind: u8,
}

/// A name server at port 53 of an address of loopback, while this value exists.
pub(crate) struct NameServer(#[expect(dead_code, reason = "the task")] JoinSet<()>);

impl NameServer {
    /// Answers each query for the IPv4 address of any name with the result of `addresses`; it has no other records.
    pub(crate) async fn start(
        server: Ipv4Addr,
        addresses: impl Fn() -> Vec<Ipv4Addr> + Send + 'static,
    ) -> Self {
        let is_a = move |query: &Query| match query.kind {
            A => addresses().into_iter().map(IpAddr::V4).collect(),
            _ => Vec::new(),
        };
        Self::start_with(server, is_a).await
    }

    /// Answers each query with those addresses that `addresses` returns for it and that are of its type.
    pub(crate) async fn start_with(
        server: Ipv4Addr,
        addresses: impl Fn(&Query) -> Vec<IpAddr> + Send + 'static,
    ) -> Self {
        let socket = UdpSocket::bind(SocketAddr::from((server, 53)));
        let socket = socket.await.unwrap();
        let mut answering = JoinSet::new();
        answering.spawn(answer(socket, addresses));
        Self(answering)
    }
}

async fn answer(socket: UdpSocket, addresses: impl Fn(&Query) -> Vec<IpAddr>) {
    let mut question = [0; 512];
    while let Ok((length, from)) = socket.recv_from(&mut question).await {
        // After the head of 12 bytes: one name, its type and class. Further records are dropped.
        let name = question[12..length]
            .iter()
            .position(|byte| *byte == 0)
            .unwrap();
        let end = 12 + name + 5;
        let mut answer = question[..end].to_vec();
        let query = Query {
            name: text(&question[12..12 + name]),
            kind: answer[end - 3],
        };
        let records = addresses(&query).into_iter().filter_map(|address| {
            let bytes = match (query.kind, address) {
                (A, IpAddr::V4(v4)) => v4.octets().to_vec(),
                (AAAA, IpAddr::V6(v6)) => v6.octets().to_vec(),
                _ => return None,
            };
            let length = u8::try_from(bytes.len()).unwrap();
            let head = [0xc0, 12, 0, query.kind, 0, 1, 0, 0, 0, 0, 0, length];
            Some([&head[..], &bytes].concat())
        });
        let records: Vec<_> = records.collect();
        let count = u8::try_from(records.len()).unwrap();
        answer[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, count, 0, 0, 0, 0]);
        answer.extend(records.concat());
        socket.send_to(&answer, from).await.unwrap();
    }
}

/// Returns the name of a question, whose labels have a length each.
fn text(mut labels: &[u8]) -> String {
    let mut name = Vec::new();
    while let Some((length, rest)) = labels.split_first() {
        let (label, rest) = rest.split_at(usize::from(*length));
        name.push(String::from_utf8_lossy(label).into_owned());
        labels = rest;
    }
    name.join(".")
}
