//! A name server of a test's own, whose answers the test chooses.

use std::net::{Ipv4Addr, SocketAddr};
use tokio::{net::UdpSocket, task::JoinSet};

/// A query for an IPv4 address (RFC 1035 §3.2.2).
const A: u8 = 1;

/// A name server at port 53 of an address of loopback, while this value exists.
pub(crate) struct NameServer(#[expect(dead_code, reason = "the task")] JoinSet<()>);

impl NameServer {
    /// Answers each query for the IPv4 address of any name with the result of `addresses`; it has no other records.
    pub(crate) async fn start(
        server: Ipv4Addr,
        addresses: impl Fn() -> Vec<Ipv4Addr> + Send + 'static,
    ) -> Self {
        let socket = UdpSocket::bind(SocketAddr::from((server, 53)));
        let socket = socket.await.unwrap();
        let mut answering = JoinSet::new();
        answering.spawn(answer(socket, addresses));
        Self(answering)
    }
}

async fn answer(socket: UdpSocket, addresses: impl Fn() -> Vec<Ipv4Addr>) {
    let mut question = [0; 512];
    while let Ok((length, from)) = socket.recv_from(&mut question).await {
        // After the head of 12 bytes: one name, its type and class. Further records are dropped.
        let name = question[12..length]
            .iter()
            .position(|byte| *byte == 0)
            .unwrap();
        let end = 12 + name + 5;
        let mut answer = question[..end].to_vec();
        let is_a = answer[end - 3] == A;
        let found = if is_a { addresses() } else { Vec::new() };
        let count = u8::try_from(found.len()).unwrap();
        answer[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, count, 0, 0, 0, 0]);
        for address in found {
            answer.extend([0xc0, 12, 0, A, 0, 1, 0, 0, 0, 0, 0, 4]);
            answer.extend(address.octets());
        }
        socket.send_to(&answer, from).await.unwrap();
    }
}
