//! Malicious gateway that uses every spelling of an address that the node's owner has not allowed.
//!
//! The listener is real: a service of this machine that is not one of the node's ports.

use super::*;

/// Names and addresses of this machine.
const HERE: [&str; 13] = [
    "127.0.0.1",
    "127.9.9.9",
    "0.0.0.0",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:0.0.0.0]",
    "localhost",
    "LOCALHOST",
    "2130706433",
    "0177.0.0.1",
    "0x7f000001",
    "127.1",
];

/// Reserved addresses of clouds and links, and an address of a private network.
const ELSEWHERE: [&str; 7] = [
    "169.254.169.254",
    "[::ffff:169.254.169.254]",
    "2852039166",
    "0xa9.0xfe.0xa9.0xfe",
    "[fe80::1]",
    "[fd00:ec2::254]",
    "10.0.0.1",
];

/// Returns the reason with which the edge refuses this target.
async fn refusal(world: &World, ask: StreamKind, target: &str) -> RejectCode {
    let opened = world.open(get("/"), ask, target, true).await;
    let answer = timeout(SOON, opened.response).await.unwrap().unwrap();
    let failure = answer.headers()[wire::FAILURE].to_str().unwrap();
    RejectCode::parse(failure).unwrap()
}

#[tokio::test]
async fn no_address_spelling_reaches_a_target_that_is_not_allowed() {
    let secret = TcpListener::bind("[::]:0").await.unwrap();
    let port = secret.local_addr().unwrap().port();
    // The second owner allows every network, but no service of this machine.
    for (hosts, spellings) in [
        (
            json!(["127.0.0.0/8", "::1"]),
            [&HERE[..], &ELSEWHERE].concat(),
        ),
        (json!(["0.0.0.0/0", "::/0"]), HERE.to_vec()),
    ] {
        let config = json!({ "ports": { "80": {} }, "allow": { "hosts": hosts } });
        let world = World::start(config).await;
        for host in spellings {
            for ask in [StreamKind::Tcp, StreamKind::Request] {
                let refused = refusal(&world, ask, &format!("{host}:{port}")).await;
                assert_eq!(refused, RejectCode::Policy, "{host}");
            }
        }
    }
    let reached = timeout(Duration::from_millis(100), secret.accept()).await;
    assert!(reached.is_err(), "no connection was expected");
}
