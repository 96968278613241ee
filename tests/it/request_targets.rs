//! Request targets that are longer than `http::Uri` allows, over both paths to an upstream.

use crate::{
    smuggling::RecordingUpstream,
    testbed::TestBed,
    world::{
        GATEWAY_NAME, World,
        app::{App, Head, Script, answer},
        client::{Answer, assert_problem, exchange, read},
        gateway::{Build, anonymous},
    },
};
use causeway_edge::config::Protocol;
use causeway_gateway::config::{ErrorFormat, ListenerProtocol};
use std::fmt::Write as _;
use tokio::io::AsyncWriteExt;

const KIB: usize = 1024;

/// The usual listeners, and one for a kube-apiserver.
fn build(judge: &RecordingUpstream) -> Build {
    let mut kubelets = anonymous("kubelets", ListenerProtocol::Https);
    kubelets.errors = ErrorFormat::Kubernetes;
    TestBed::build()
        .listener(kubelets)
        .authorizer(judge.clone())
}

/// A target of this length.
fn target(length: usize) -> String {
    let mut target = "/exec/default/pod/container?command=".to_owned();
    // No two parts of it are the same.
    for number in 0.. {
        if target.len() >= length {
            break;
        }
        write!(target, "{number}&command=").unwrap();
    }
    target.truncate(length);
    target
}

fn attached(head: &Head) -> Script {
    if head.method() == "POST" {
        return answer::switch("tcp", head.path().as_bytes());
    }
    answer::ok(&head.path())
}

async fn get(testbed: &TestBed, listener: &str, target: &str) -> Answer {
    let request =
        format!("GET {target} HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n");
    testbed.client_at(listener).raw("edge-1", request).await
}

/// As kubectl sends a long command line by way of kube-apiserver.
async fn long_targets_arrive(testbed: &TestBed, judge: &RecordingUpstream) {
    for length in [65_534, 65_535, 200 * KIB, 1000 * KIB, 1024 * KIB] {
        let target = target(length);
        let answer = get(testbed, "kubelets", &target).await;
        assert_eq!(answer.status, 200, "{length}: {}", answer.text());
        assert!(answer.text() == target, "{length}");
    }
    let target = target(1000 * KIB);
    let upgrade = format!(
        "POST {target} HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
    );
    let mut wire = testbed
        .client_at("kubelets")
        .wire("edge-1", &["http/1.1"])
        .await
        .unwrap();
    let head = exchange(&mut *wire, upgrade).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(read(&mut wire, target.len()).await == target.as_bytes());
    wire.write_all(b"hello").await.unwrap();
    assert_eq!(read(&mut wire, 5).await, b"hello");
    drop(wire);
    // A body behind a long target, and another request on the same connection.
    let mut wire = testbed
        .client_at("kubelets")
        .wire("edge-1", &["http/1.1"])
        .await
        .unwrap();
    for _ in 0..2 {
        let put =
            format!("PUT {target} HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 4\r\n\r\nbody");
        let head = exchange(&mut *wire, put).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(read(&mut wire, target.len()).await == target.as_bytes());
        let head = exchange(
            &mut *wire,
            "GET /short HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n",
        )
        .await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert_eq!(read(&mut wire, 6).await, b"/short");
    }
    let mut judged = judge.paths();
    judged.retain(|path| path != "/exec/default/pod/container" && path != "/short");
    assert!(judged.is_empty(), "{judged:?}");
}

#[tokio::test]
async fn targets_of_a_mebibyte_reach_kubelets() {
    let judge = RecordingUpstream::default();
    let app = App::http(attached).await;
    let testbed = TestBed::along(build(&judge), Protocol::Http, app.address()).await;
    long_targets_arrive(&testbed, &judge).await;
    let record = testbed.log().records().pop().unwrap();
    assert!(record["path"].as_str().unwrap().len() < 100, "{record}");
}

#[tokio::test]
async fn mebibyte_targets_reach_upstreams_over_gateway_tls() {
    let judge = RecordingUpstream::default();
    let (_app, testbed) = Box::pin(TestBed::secured_by(build(&judge), attached)).await;
    long_targets_arrive(&testbed, &judge).await;
}

#[tokio::test]
async fn a_target_that_is_too_long_is_414_and_its_connection_goes_on() {
    let judge = RecordingUpstream::default();
    let app = App::http(attached).await;
    let testbed = TestBed::along(build(&judge), Protocol::Http, app.address()).await;
    for length in [64 * KIB + 1, 200 * KIB, 2048 * KIB] {
        let answer = get(&testbed, "plain", &target(length)).await;
        let says = if length == 64 * KIB + 1 {
            "has 65537 bytes"
        } else {
            "is too long"
        };
        assert_problem(&answer, 414, "uri_too_long", says);
    }
    // The policy decides by the path, so the engine has to see the whole path.
    for path in [70 * KIB, 300 * KIB] {
        let answer = get(&testbed, "plain", &format!("/{}", "x".repeat(path))).await;
        assert_problem(&answer, 414, "uri_too_long", "65534 of a path");
    }
    let answer = get(&testbed, "kubelets", &target(1024 * KIB + 1)).await;
    assert_eq!(answer.status, 502);
    assert!(
        answer.text().contains("has 1048577 bytes, at most 1048576"),
        "{answer}"
    );
    let records = testbed.log().records();
    assert!(
        records
            .iter()
            .all(|record| record["reason"] == "uri_too_long")
    );
    assert_eq!(records.len(), 6);

    let mut wire = testbed
        .client_at("plain")
        .wire("edge-1", &[])
        .await
        .unwrap();
    let refused = format!(
        "GET {} HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n",
        target(300 * KIB)
    );
    let head = exchange(&mut *wire, refused).await;
    assert!(head.starts_with("HTTP/1.1 414 "), "{head}");
    let length = head.to_ascii_lowercase();
    let (_, length) = length.split_once("content-length: ").unwrap();
    read(
        &mut wire,
        length.split_once('\r').unwrap().0.parse().unwrap(),
    )
    .await;
    let head = exchange(
        &mut *wire,
        "GET /short HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n",
    )
    .await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

/// The gateway keeps nothing of an endless target, or of a target with bytes that no query has; the client gets the reason.
#[tokio::test]
async fn the_rest_of_a_target_is_checked() {
    let judge = RecordingUpstream::default();
    let app = App::http(attached).await;
    let testbed = TestBed::along(build(&judge), Protocol::Http, app.address()).await;
    for bad in ["#", "\"", "<", "\u{e4}", "\t"] {
        let target = target(100 * KIB) + bad + "x";
        let answer = get(&testbed, "kubelets", &target).await;
        assert_eq!(answer.status, 502, "{bad}");
        assert!(
            answer.text().contains("not allowed in a query"),
            "{bad}: {answer}"
        );
    }
    assert_eq!(app.requests(), 0);
    let answer = get(&testbed, "plain", &target(6 << 20)).await;
    assert_eq!(answer.status, 414, "{answer}");
    assert!(
        answer.text().contains("longer than can be parsed"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_target_beyond_its_limit_is_414_over_both_versions() {
    let world = World::build().config(|config| config.limits.max_uri_bytes = 10_000);
    let world = world.start().await;
    let app = App::http(attached).await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    for client in [world.client(), world.client().http2()] {
        let client = client.sni(GATEWAY_NAME);
        let ask = async |length| {
            let url = format!("https://edge-1:9100{}", target(length));
            client.get(&url).await
        };
        assert_eq!(ask(10_000).await.status, 200);
        let says = "has 10001 bytes, at most 10000 are allowed (limits.max_uri_bytes";
        assert_problem(&ask(10_001).await, 414, "uri_too_long", says);
    }
}
