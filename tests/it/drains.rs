//! A gateway that drains informs its clients: kept connections are told to close, and no request on them is lost.

use crate::{
    testbed::{TestBed, URL},
    world::{
        World,
        app::{App, Head, Script, answer},
        client::{exchange, read_to_end, whole},
        until,
    },
};
use futures_util::future::join_all;
use hyper::{Request, header::CONNECTION};
use std::time::Duration;
use tokio::{io::AsyncWriteExt, net::TcpStream};

/// Longer than any test waits.
const LONG: Duration = Duration::from_mins(10);

async fn testbed(app: &App) -> TestBed {
    let build = World::build().config(|config| config.timeouts.drain = LONG);
    let world = Box::pin(build.start()).await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let edge = edge.config(|config| config.timeouts.drain = LONG);
    let edge = Box::pin(edge.join()).await;
    TestBed::of(world, edge)
}

fn by_path(head: &Head) -> Script {
    match head.path().as_str() {
        "/endless" => answer::endless(),
        "/exec" => answer::switch("SPDY/3.1", b"first"),
        _ => answer::ok("it"),
    }
}

#[tokio::test]
async fn each_http1_answer_in_a_drain_announces_connection_close() {
    let app = App::http(by_path).await;
    let testbed = testbed(&app).await;
    // The listeners stay open while a stream lasts whose edge has no other gateway.
    let lasting = testbed.http2().connect("edge-1").await.unwrap();
    let request = Request::get(format!("{URL}endless")).body(whole(""));
    let _held = lasting.hold(request.unwrap());
    until("a stream lasts", async || app.requests() == 1).await;
    let mut kept = testbed.client().connect("edge-1").await.unwrap();
    let mut http2 = testbed.http2().connect("edge-1").await.unwrap();
    for connection in [&mut kept, &mut http2] {
        let answer = connection.get(URL).await.unwrap();
        let told = answer.field("connection");
        assert_eq!((answer.status, told), (200, ""), "{answer}");
    }
    testbed.drain_gateway();
    until("it drains", async || {
        testbed.admin_text("/readyz").await.0 == 503
    })
    .await;
    let mut fresh = testbed.client().connect("edge-1").await.unwrap();
    for connection in [&mut kept, &mut fresh] {
        let answer = connection.get(URL).await.unwrap();
        let told = answer.field("connection");
        assert_eq!((answer.status, told), (200, "close"), "{answer}");
        assert!(connection.get(URL).await.is_err(), "it continues");
    }
    // Responses of the gateway itself are no exception.
    let refused = testbed.client().get("https://edge-1:9999/").await;
    let told = refused.field("connection");
    assert_eq!((refused.status, told), (403, "close"), "{refused}");
    let answer = http2.get(URL).await.unwrap();
    let told = answer.fields.get(CONNECTION);
    assert_eq!((answer.status, told), (200, None), "{answer}");
    // After a 101 no HTTP message can end the connection.
    let exec = "GET /exec HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
    let head = exchange(&mut testbed.tls().await, exec)
        .await
        .to_lowercase();
    let switches = head.starts_with("http/1.1 101 ") && head.contains("connection: upgrade\r\n");
    assert!(switches && !head.contains("close"), "{head}");
}

#[tokio::test]
async fn clients_with_kept_connections_lose_no_answer_in_a_drain() {
    let app = App::saying("it").await;
    let testbed = testbed(&app).await;
    let client = testbed.client();
    let clients = (0..8).map(|_| async {
        let mut answers = 0;
        // Waits until the listener accepts no connection.
        while let Ok(mut connection) = client.connect("edge-1").await {
            loop {
                let answer = connection.get(URL).await;
                let answer = answer.unwrap_or_else(|error| panic!("after {answers}: {error}"));
                assert_eq!(answer.status, 200, "{answer}");
                answers += 1;
                if answer.field("connection") == "close" {
                    break;
                }
            }
        }
        answers
    });
    let drain = async {
        until("the clients send requests", async || app.requests() > 100).await;
        testbed.drain_gateway();
    };
    let (answers, ()) = tokio::join!(join_all(clients), drain);
    assert!(answers.iter().all(|answers| *answers > 0), "{answers:?}");
}

/// The edge's own listeners do the same.
#[tokio::test]
async fn a_draining_edge_announces_close_on_its_admin_listener() {
    let app = App::http(by_path).await;
    let testbed = testbed(&app).await;
    let lasting = testbed.http2().connect("edge-1").await.unwrap();
    let request = Request::get(format!("{URL}endless")).body(whole(""));
    let _held = lasting.hold(request.unwrap());
    until("a stream lasts", async || app.requests() == 1).await;
    let admin = testbed.edge.admin();
    let mut kept = TcpStream::connect(admin).await.unwrap();
    let ask = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let before = exchange(&mut kept, ask).await.to_lowercase();
    assert!(!before.contains("connection: close"), "{before}");
    testbed.edge.drain();
    until("the edge announces its drain", async || {
        let mut fresh = TcpStream::connect(admin).await.unwrap();
        let message = exchange(&mut fresh, ask).await.to_lowercase();
        message.contains("connection: close")
    })
    .await;
    kept.write_all(ask.as_bytes()).await.unwrap();
    let last = read_to_end(&mut kept).await.unwrap();
    let last = String::from_utf8_lossy(&last).to_lowercase();
    assert!(last.contains("connection: close"), "{last}");
}
