//! Cases of HTTP/1.1: bytes in, answers out.

use super::{AFTER, Expect, FirstRequest, SeenRequest, TestSetup, bytes, cases, report};
use crate::{
    testbed::TestBed,
    world::{GATEWAY_NAME, PATIENCE, client::Wire},
};
use serde::Deserialize;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    /// Bytes as characters.
    send: String,
    /// Added this many times in place of `{many}` in `send`.
    #[serde(default)]
    many: Option<(String, usize)>,
    /// Name of the one listener that the case applies to, if the two listeners differ.
    #[serde(default)]
    only: Option<String>,
    expect: Expect,
}

impl Case {
    fn bytes(&self) -> Vec<u8> {
        let many = self.many.as_ref();
        let many = many.map_or_else(String::new, |(text, times)| text.repeat(*times));
        bytes(&self.send.replace("{many}", &many))
    }
}

#[tokio::test]
async fn ambiguous_bytes_are_refused_or_parsed_as_one_request() {
    let ground = TestSetup::new().await;
    let cases = cases::<Case>("http1.json");
    let mut faults = Vec::new();
    for listener in ["https", "plain"] {
        for case in &cases {
            if case.only.as_ref().is_some_and(|only| only != listener) {
                continue;
            }
            let mut wire: Box<dyn Wire> = match listener {
                "https" => Box::new(ground.testbed.tls().await),
                _ => Box::new(ground.testbed.tcp(listener).await),
            };
            let seen = play(&mut *wire, case).await;
            drop(wire);
            if let Err(fault) = ground.check(&case.expect, &seen).await {
                faults.push(format!("  {listener}, {}:\n{fault}", case.name));
            }
        }
    }
    report("http1", 90, cases.len(), &faults);
}

async fn play(wire: &mut dyn Wire, case: &Case) -> SeenRequest {
    let sent = case.bytes();
    // A listener may close before it has read everything.
    let _ = wire.write_all(&sent).await;
    let _ = wire.flush().await;
    let mut first = FirstRequest::ExitedProcess("closed");
    let head = sent.starts_with(b"HEAD ");
    for _ in 0..case.expect.requests.len().max(1) {
        match answer(wire, head).await {
            Some(status) => first = FirstRequest::Status(status),
            None => {
                return SeenRequest {
                    first,
                    after: false,
                };
            }
        }
    }
    let after = format!("GET {AFTER} HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n");
    let _ = wire.write_all(after.as_bytes()).await;
    let _ = wire.flush().await;
    let after = answer(wire, false).await;
    let more = answer(wire, false).await;
    assert_eq!(more, None, "an answer that nobody asked for: {}", case.name);
    let served = after == Some(200);
    assert!(served || after.is_none(), "behind {}: {after:?}", case.name);
    SeenRequest {
        first,
        after: served,
    }
}

/// The status of the next final answer, which has a length.
async fn answer(wire: &mut dyn Wire, head_only: bool) -> Option<u16> {
    let read = async {
        loop {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(wire.read_u8().await.ok()?);
            }
            let head = String::from_utf8(head).unwrap().to_lowercase();
            let status: u16 = head.split(' ').nth(1).unwrap().parse().unwrap();
            let length = head.split("content-length: ").nth(1);
            let length = length.map_or("0", |rest| rest.lines().next().unwrap());
            let length = if head_only {
                0
            } else {
                length.parse().unwrap()
            };
            wire.read_exact(&mut vec![0; length]).await.ok()?;
            if status >= 200 {
                return Some(status);
            }
        }
    };
    timeout(PATIENCE, read).await.expect("an answer or an end")
}

/// Sends a CONNECT and ends the session, if there is one; returns the answer's status.
pub(super) async fn connect(testbed: &TestBed, sent: &[u8]) -> u16 {
    let client = testbed.client_at("connect");
    let mut wire = client
        .tls_stream(GATEWAY_NAME, &["http/1.1"])
        .await
        .unwrap();
    wire.write_all(sent).await.unwrap();
    wire.flush().await.unwrap();
    let Some(status) = answer(&mut wire, false).await else {
        return 0;
    };
    let _ = wire.shutdown().await;
    let _ = timeout(PATIENCE, wire.read_to_end(&mut Vec::new())).await;
    status
}
