//! Access records of streams that break off after the head of their answer: each has a reason.

use crate::{
    apps::by_path,
    testbed::{TestBed, URL},
    world::{
        World,
        app::{App, PauseGate, answer, answer::pattern},
        client::{Wire, exchange, read, read_head, whole},
        until,
    },
};
use causeway_edge::config::Protocol;
use hyper::Request;
use serde_json::{Value, json};
use socket2::SockRef;
use std::time::Duration;
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tokio_rustls::client::TlsStream;

const GET: &str = "GET /endless HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
const EXEC: &str =
    "GET /exec HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";

fn request(path: &str) -> Request<crate::world::client::Body> {
    Request::get(format!("{URL}{path}"))
        .body(whole(""))
        .unwrap()
}

/// Waits for this many records, and returns their statuses and reasons.
async fn recorded(world: &World, number: usize) -> Vec<(Value, Value)> {
    until("each stream is recorded", async || {
        world.log().records().len() >= number
    })
    .await;
    let records = world.log().records().into_iter();
    let mut all: Vec<_> = records
        .map(|record| (record["status"].clone(), record["reason"].clone()))
        .collect();
    all.sort_by_key(|(status, _)| status.as_u64());
    all
}

/// Ends the connection with a reset.
fn reset(tcp: &TcpStream) {
    SockRef::from(tcp).set_linger(Some(Duration::ZERO)).unwrap();
}

fn reset_tls(wire: &TlsStream<TcpStream>) {
    reset(wire.get_ref().0);
}

async fn begin(wire: &mut (impl Wire + ?Sized), head: &str, status: &str) {
    let answer = exchange(wire, head).await;
    assert!(
        answer.starts_with(&format!("HTTP/1.1 {status} ")),
        "{answer}"
    );
}

#[tokio::test]
async fn a_client_that_leaves_during_an_answer_or_session_is_recorded() {
    let app = App::http(by_path).await;
    let testbed = TestBed::to(&app).await;
    let mut http1 = testbed.tls().await;
    begin(&mut http1, GET, "200").await;
    drop(http1);
    recorded(&testbed, 1).await;
    let mut http2 = testbed.http2().connect("edge-1").await.unwrap();
    drop(http2.open(request("endless")).await.unwrap());
    recorded(&testbed, 2).await;
    let mut connect = testbed.connect("edge-1:9100").await;
    begin(&mut connect, GET, "200").await;
    reset_tls(&connect);
    drop(connect);
    let mut bytes = testbed.tcp("bytes").await;
    begin(&mut bytes, GET, "200").await;
    reset(&bytes);
    drop(bytes);
    let mut upgrade = testbed.tls().await;
    begin(&mut upgrade, EXEC, "101").await;
    reset_tls(&upgrade);
    drop(upgrade);
    let closed = |status: u16| (json!(status), json!("client_closed"));
    let all = [101, 200, 200, 200, 200].map(closed);
    assert_eq!(recorded(&testbed, 5).await, all);
}

#[tokio::test]
async fn so_is_a_client_of_an_app_that_the_gateway_speaks_tls_to() {
    let (_app, testbed) = TestBed::secured(by_path).await;
    let mut http1 = testbed.tls().await;
    begin(&mut http1, GET, "200").await;
    drop(http1);
    let mut http2 = testbed.http2().connect("edge-1").await.unwrap();
    drop(http2.open(request("endless")).await.unwrap());
    let mut upgrade = testbed.tls().await;
    begin(&mut upgrade, EXEC, "101").await;
    reset_tls(&upgrade);
    drop(upgrade);
    let closed = |status: u16| (json!(status), json!("client_closed"));
    assert_eq!(recorded(&testbed, 3).await, [101, 200, 200].map(closed));
}

#[tokio::test]
async fn an_aborting_target_and_a_lost_tunnel_are_recorded() {
    let gate = PauseGate::new();
    let (held, never) = (gate.clone(), PauseGate::new());
    let choose = move |head: &crate::world::app::Head| match head.path().as_str() {
        "/reset" => answer::reset_in_mid_body(&held),
        _ => answer::parts("text/plain", &["never"], &never),
    };
    let app = App::http(choose).await;
    let mut testbed = TestBed::to_as(Protocol::Http, app.address()).await;
    let mut http1 = testbed.tls().await;
    begin(&mut http1, &GET.replace("endless", "reset"), "200").await;
    let mut http2 = testbed.http2().connect("edge-1").await.unwrap();
    let answer = http2.open(request("reset")).await.unwrap();
    gate.open();
    gate.open();
    let broken = (json!(200), json!("target_broken"));
    assert_eq!(
        recorded(&testbed, 2).await,
        [broken.clone(), broken.clone()]
    );
    drop((http1, answer));
    let mut http1 = testbed.tls().await;
    begin(&mut http1, GET, "200").await;
    let _answer = http2.open(request("endless")).await.unwrap();
    let mut connect = testbed.connect("edge-1:9100").await;
    begin(&mut connect, GET, "200").await;
    testbed.edge.kill().await;
    let reasons: Vec<Value> = recorded(&testbed, 5)
        .await
        .into_iter()
        .map(|(_, reason)| reason)
        .collect();
    let lost = reasons.iter().filter(|reason| **reason == "tunnel_lost");
    assert_eq!(lost.count(), 3, "{reasons:?}");
}

#[tokio::test]
async fn a_complete_request_is_recorded_without_a_reason() {
    let app = App::http(by_path).await;
    let testbed = TestBed::to(&app).await;
    for client in [testbed.client(), testbed.http2()] {
        for (method, path) in [
            ("GET", ""),
            ("HEAD", "head"),
            ("GET", "until-close"),
            ("GET", "large"),
        ] {
            let answer = client.ask(method, &format!("{URL}{path}"), "").await;
            assert_eq!(answer.status, 200, "{answer}");
        }
    }
    let mut upgrade = testbed.tls().await;
    begin(&mut upgrade, EXEC, "101").await;
    read(&mut upgrade, pattern(3_000).len()).await;
    upgrade.shutdown().await.unwrap();
    let mut connect = testbed.connect("edge-1:9100").await;
    connect
        .write_all(b"GET /once HTTP/1.1\r\nHost: it\r\n\r\n")
        .await
        .unwrap();
    read_head(&mut connect).await;
    read(&mut connect, 4).await;
    connect.shutdown().await.unwrap();
    let all = recorded(&testbed, 10).await;
    assert!(all.iter().all(|(_, reason)| reason.is_null()), "{all:?}");
}
