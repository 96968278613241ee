//! Readers and the writer of slices, at a server whose responses the test chooses.

use crate::process::{Load, result};
use serde_json::json;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// An event with its version and its mark, as the API's JSON has them.
fn event(version: u64, mark: char) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let stamp = format!("~{mark}{:016}~", now.as_micros());
    format!(
        r#"{{"type":"MODIFIED","object":{{"metadata":{{"resourceVersion":"{version}","annotations":{{"at":"{stamp}"}}}}}}}}"#
    )
}

/// In two chunks, because real responses are split anywhere.
fn chunks(text: &str) -> String {
    let (head, tail) = text.split_at(text.len() - 9);
    format!(
        "{:x}\r\n{head}\r\n{:x}\r\n{tail}\r\n",
        head.len(),
        tail.len()
    )
}

/// Returns the next request's head, and the connection.
async fn asked(listener: &TcpListener) -> (String, TcpStream) {
    let (mut near, _) = listener.accept().await.unwrap();
    let head = heard(&mut near).await;
    (head, near)
}

async fn heard(near: &mut TcpStream) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        head.push(char::from(near.read_u8().await.unwrap()));
    }
    head
}

async fn say(near: &mut TcpStream, text: &str) {
    near.write_all(text.as_bytes()).await.unwrap();
}

const HEAD: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

#[tokio::test]
async fn a_reader_counts_marked_changes_and_resumes_its_watch() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = listener.local_addr().unwrap();
    let mut load = Load::start(&format!(
        "readers --url http://{url} --count 1 --changes 2 --json"
    ));
    let (head, mut near) = asked(&listener).await;
    assert!(head.contains("sendInitialEvents=true"), "{head}");
    assert!(head.contains("Accept: application/json\r\n"), "{head}");
    let complete = r#"{"annotations":{"k8s.io/initial-events-end":"true"}}"#;
    say(
        &mut near,
        &format!("{HEAD}{}{}", chunks(&event(3, 'm')), chunks(complete)),
    )
    .await;
    // The initial objects are no changes.
    assert_eq!(load.event("ready").await["count"], 1);
    let two = [event(5, 'w'), event(7, 'm')].map(|event| chunks(&event));
    say(&mut near, &format!("{}{}0\r\n\r\n", two[0], two[1])).await;
    let (head, mut near) = asked(&listener).await;
    assert!(head.contains("&resourceVersion=7 "), "{head}");
    say(&mut near, &format!("{HEAD}{}", chunks(&event(8, 'm')))).await;
    let found = load.event("result").await;
    assert_eq!((&found["changes"], &found["again"]), (&json!(2), &json!(1)));
    let counts = found["latency_counts"].as_array().unwrap();
    let often: u64 = counts.iter().map(|step| step[1].as_u64().unwrap()).sum();
    assert_eq!(often, 2, "{found}");
    assert!(load.stop().await.lines.is_empty());
}

#[tokio::test]
async fn slices_are_created_and_changed_and_refusals_are_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = listener.local_addr().unwrap();
    let load = format!("slices --url http://{url} --count 2 --clients 1");
    let (made, ()) = tokio::join!(result(&load), answer(&listener, "POST ", "201 Created", 2));
    assert_eq!((&made["requests"], &made["failed"]), (&json!(2), &json!(0)));
    let more = format!("{load} --changes 3 --rate 1000");
    let (changed, ()) = tokio::join!(result(&more), answer(&listener, "PUT ", "200 OK", 3));
    assert_eq!(changed["requests"], 3);
    let (refused, ()) = tokio::join!(result(&load), answer(&listener, "POST ", "403 No", 1));
    assert_eq!(refused["failed"], 1);
    assert!(
        refused["failures"].to_string().contains("403 No"),
        "{refused}"
    );
}

/// Answers this many requests of one connection, in chunks.
async fn answer(listener: &TcpListener, method: &str, status: &str, count: usize) {
    let (mut near, _) = listener.accept().await.unwrap();
    for _ in 0..count {
        let head = heard(&mut near).await;
        assert!(head.starts_with(method), "{head}");
        let (_, length) = head.split_once("Content-Length: ").unwrap();
        let mut body = vec![0; length.trim().parse().unwrap()];
        near.read_exact(&mut body).await.unwrap();
        let slice: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(slice["endpoints"].as_array().unwrap().len(), 10);
        let answer = format!("HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n");
        say(&mut near, &format!("{answer}2\r\n{{}}\r\n0\r\n\r\n")).await;
    }
}
