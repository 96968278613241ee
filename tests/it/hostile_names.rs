//! Names whose meaning changes between two questions: what counts is the address that is dialled.
//!
//! The edge is the built binary in a mount namespace, where a name server of the test's own is the only source
//! of names. It answers each question differently from the one before.

use crate::world::{
    app::App,
    process::{Site, causeway_asking},
    tool::need,
};
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use tokio::{net::UdpSocket, task::JoinSet};

/// Of the name server; of loopback, where nobody else listens.
const SERVER: Ipv4Addr = Ipv4Addr::new(127, 53, 17, 1);
/// Allowed, and nobody's (RFC 5737).
const ALLOWED: [u8; 4] = [192, 0, 2, 7];
/// Not allowed, and the app's.
const FORBIDDEN: [u8; 4] = [127, 0, 0, 1];
/// A question for an IPv4 address (RFC 1035 §3.2.2).
const A: u8 = 1;

/// Answers by turns; counts the questions for an IPv4 address.
async fn answer_by_turns(socket: UdpSocket, asked: Arc<AtomicUsize>) {
    let mut question = [0; 512];
    while let Ok((length, from)) = socket.recv_from(&mut question).await {
        // Behind the head of 12 bytes: one name, its type and class. Further records are dropped.
        let name = question[12..length]
            .iter()
            .position(|byte| *byte == 0)
            .unwrap();
        let end = 12 + name + 5;
        let mut answer = question[..end].to_vec();
        let is_a = answer[end - 3] == A;
        answer[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
        if is_a {
            let turn = asked.fetch_add(1, Ordering::SeqCst);
            let address = [ALLOWED, FORBIDDEN][turn % 2];
            answer.extend([0xc0, 12, 0, A, 0, 1, 0, 0, 0, 0, 0, 4]);
            answer.extend(address);
        }
        socket.send_to(&answer, from).await.unwrap();
    }
}

#[tokio::test]
async fn a_name_that_changes_its_address_is_judged_by_the_one_that_is_dialled() {
    need!("curl", "mounts");
    let server = SocketAddr::from((SERVER, 53));
    let (asked, mut answering) = (Arc::new(AtomicUsize::new(0)), JoinSet::new());
    let socket = UdpSocket::bind(server).await.unwrap();
    answering.spawn(answer_by_turns(socket, asked.clone()));
    let app = App::saying("it").await;
    let site = Site::start().await;
    let token = site.token("--node edge-1").await;
    let target = format!("{{9100: {{target: \"rebind.test:{}\"}}}}", app.port());
    let mut edge = causeway_asking(server.ip(), &site.path(""))
        .args([
            "edge",
            "--admin-listen",
            "127.0.0.1:0",
            "--timeouts-dial",
            "1s",
        ])
        .flag("--gateway", &site.tunnel)
        .flag("--data-dir", site.edge_data("edge-1"))
        .flag("--ports", target)
        .flag("--allow-hosts", "[192.0.2.0/24]")
        .flag("--join", token)
        .start();
    edge.said("tunnel registered").await;
    for turn in 0..4 {
        let said = site.curl("edge-1", "").run().await.ok().text();
        let refused = said.contains("does not allow rebind.test");
        assert_eq!(refused, turn % 2 == 1, "{turn}: {said}");
        // One question: whoever asks again before it dials has judged another address.
        assert_eq!(asked.load(Ordering::SeqCst), turn + 1, "{said}");
    }
    assert_eq!(app.connections(), 0);
}
