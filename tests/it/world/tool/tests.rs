//! Tests of the tools: the client scripts and the servers understand each other without a gateway between them. A failure
//! here is no fault of the gateway.

use super::*;
use crate::world::app::{App, Script, answer};

/// A Python server, and its address.
async fn server(script: &str) -> (Running, String) {
    let mut server = Tool::python(script).start();
    let listening = server.json().await;
    assert_eq!(listening["event"], "listening");
    let address = format!("127.0.0.1:{}", listening["port"]);
    (server, address)
}

#[tokio::test]
async fn a_child_gets_its_input_and_gives_its_output() {
    let ran = Tool::new("cat")
        .input("in both directions")
        .run()
        .await
        .ok();
    assert_eq!(ran.text(), "in both directions");
    let ran = Tool::new("sh")
        .args(["-c", "echo \"$WHY\" >&2; exit 7"])
        .env("WHY", "because")
        .run()
        .await;
    assert_eq!((ran.status.code(), ran.stderr.trim()), (Some(7), "because"));
}

#[tokio::test]
async fn a_running_child_is_talked_to_by_lines() {
    let mut cat = Tool::new("cat").start();
    cat.send("{\"heard\":1}\nrest").await;
    assert_eq!(cat.json().await["heard"], 1);
    cat.close_input();
    assert_eq!(cat.finish().await.ok().text(), "rest");

    let sleeper = Tool::new("sleep").args(["600"]).start();
    sleeper.signal("TERM").await;
    assert!(!sleeper.finish().await.status.success());
}

#[tokio::test]
#[should_panic(expected = "did not end within")]
async fn a_child_that_never_ends_is_given_up() {
    let hurry = Duration::from_millis(50);
    Tool::new("sleep").args(["600"]).within(hurry).run().await;
}

#[test]
fn a_missing_tool_is_detected() {
    assert!(!is_here("no-such-program-anywhere"));
    assert!(!is_here("python:no_such_module"));
    assert!(is_here("bash"));
}

#[tokio::test]
async fn curl_reaches_an_app() {
    super::need!("curl");
    let app = App::saying("hi").await;
    let url = format!("http://{}/there", app.address());
    assert_eq!(Tool::curl().args([url]).run().await.ok().text(), "hi");
    assert_eq!(app.head().await.path(), "/there");
}

#[tokio::test]
async fn netcat_half_closes() {
    super::need!("nc");
    let app = App::tcp(Script::new().read_to_end().write("got it")).await;
    let port = app.port().to_string();
    let nc = Tool::nc().args(["127.0.0.1", &port]).input("all of it");
    assert_eq!(nc.run().await.ok().text(), "got it");
    assert_eq!(app.body().await, b"all of it");
}

#[tokio::test]
async fn the_websocket_scripts_agree() {
    super::need!("python:websockets");
    let (mut server, address) = server("ws_server.py").await;
    let client = Tool::python("ws_client.py").args(["--address", &address]);
    assert_eq!(client.run().await.ok().json()["ok"], true);
    let opened = server.json().await;
    let host = serde_json::json!(["Host", "edge-1:9100"]);
    assert!(opened["fields"].as_array().unwrap().contains(&host));
    server.finish().await.ok();
}

#[tokio::test]
async fn the_websocket_client_tells_of_a_refusal() {
    super::need!("python:websockets");
    let app = App::http(|_| answer::refuse_upgrade("403 Forbidden", "not for you")).await;
    let address = app.address().to_string();
    let client = Tool::python("ws_client.py").args(["--address", &address]);
    let verdict = client.run().await.json();
    assert_eq!(
        (&verdict["status"], &verdict["body"]),
        (&403.into(), &"not for you".into())
    );
}

#[tokio::test]
async fn the_grpc_scripts_agree() {
    super::need!("python:grpc");
    let (server, address) = server("grpc_server.py").await;
    let client = Tool::python("grpc_client.py").args(["--address", &address]);
    assert_eq!(client.run().await.ok().json()["ok"], true);
    let message = server.finish().await.ok().text();
    assert!(
        message.contains(r#"{"event": "cancelled", "method": "Hang"}"#),
        "{message}"
    );
}

#[tokio::test]
async fn the_h2c_app_answers_curl() {
    super::need!("curl", "python:h2");
    let (mut server, address) = server("h2c_server.py").await;
    let curl = Tool::curl().args(["--http2-prior-knowledge", "-d", "in both directions"]);
    let curl = curl.args([format!("http://{address}/")]);
    assert_eq!(curl.run().await.ok().text(), "in both directions");
    assert_eq!(server.json().await["event"], "opened");
    assert_eq!(server.json().await["event"], "request");
    server.finish().await.ok();
}
