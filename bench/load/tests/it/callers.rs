//! Clients: requests and bytes that are counted, upgrades that are kept open.

use crate::process::{Load, app, result};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

#[tokio::test]
async fn requests_are_counted_over_kept_connections_and_over_new_ones() {
    let (_app, address) = app().await;
    let load = format!("connect --listener {address} --target any:1 --clients 3 --for 300ms");
    let kept = result(&load).await;
    assert_eq!(
        (&kept["connections"], &kept["failed"]),
        (&json!(3), &json!(0))
    );
    assert!(kept["requests"].as_u64() >= Some(3), "{kept}");
    let new = result(&format!("{load} --new")).await;
    assert!(
        new["connections"].as_u64() >= new["requests"].as_u64(),
        "{new}"
    );
    assert_eq!(new["failed"], 0, "{new}");
}

#[tokio::test]
async fn bytes_arrive_whole_plain_and_inside_an_upgrade() {
    let (_app, address) = app().await;
    let load = format!("connect --listener {address} --target any:1 --clients 2");
    for direction in [
        "--download 3000000",
        "--upload 3000000",
        "--download 3000000 --upgrade /source/3000000",
        "--upload 3000000 --upgrade /drain",
    ] {
        assert_eq!(
            result(&format!("{load} {direction}")).await["bytes"],
            6_000_000,
            "{direction}"
        );
    }
    // One byte less than the client requested is no result.
    let short = format!("{load} --download 7 --upgrade /source/6");
    let outcome = Load::start(&short).wait().await;
    assert!(!outcome.good && outcome.complaint.contains("1 bytes too early"));
}

#[tokio::test]
async fn refusals_are_named() {
    let (_app, address) = app().await;
    let missing = format!("connect --listener {address} --target any:1 --path /none --for 50ms");
    let outcome = Load::start(&missing).wait().await;
    assert!(!outcome.good && outcome.complaint.contains("no request"));
    let failures = &outcome.lines.last().unwrap()["failures"];
    assert!(failures["404 Not Found"].as_u64() >= Some(1), "{failures}");

    let many = format!("idle --url http://{address}/echo --count 100000000");
    let outcome = Load::start(&many).wait().await;
    assert!(
        !outcome.good && outcome.complaint.contains("ulimit"),
        "{}",
        outcome.complaint
    );
}

#[tokio::test]
async fn a_connect_is_asked_for_and_its_refusal_is_named() {
    let (_app, address) = app().await;
    let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let place = proxy.local_addr().unwrap();
    let load = format!("connect --proxy {place} --target {address} --for 100ms");
    let (asked, ()) = tokio::join!(Load::start(&load).wait(), pass_one(&proxy));
    assert!(asked.last()["requests"].as_u64() >= Some(1));

    let refusing = async {
        let (mut near, _) = proxy.accept().await.unwrap();
        heard(&mut near).await;
        near.write_all(b"HTTP/1.1 502 it is off\r\n\r\n")
            .await
            .unwrap();
        // No process listens there.
        drop((near, proxy));
    };
    let (asked, ()) = tokio::join!(Load::start(&load).wait(), refusing);
    let failures = asked.lines.last().unwrap()["failures"].to_string();
    assert!(!asked.good, "{failures}");
}

/// Reads a head to its end.
async fn heard(near: &mut tokio::net::TcpStream) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        head.push(char::from(near.read_u8().await.unwrap()));
    }
    head
}

/// Serves one CONNECT correctly.
async fn pass_one(proxy: &TcpListener) {
    let (mut near, _) = proxy.accept().await.unwrap();
    let head = heard(&mut near).await;
    let target = head.strip_prefix("CONNECT ").unwrap();
    let (target, _) = target.split_once(" HTTP/1.1\r\nHost: ").unwrap();
    let mut far = tokio::net::TcpStream::connect(target).await.unwrap();
    near.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
    // Either end may close first when the time is over.
    let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
}

#[tokio::test]
async fn upgrades_idle_until_stopped() {
    let (_app, address) = app().await;
    let url = format!("--url http://{address}");
    let mut idle = Load::start(&format!("idle {url}/echo --count 20"));
    assert_eq!(idle.event("ready").await["count"], 20);
    let rested = idle.stop().await;
    assert_eq!(
        (&rested.last()["alive"], &rested.last()["dead"]),
        (&json!(20), &json!(0))
    );

    // A connection that does not echo does not count as alive.
    let mut gone = Load::start(&format!("idle {url}/source/0 --count 2"));
    gone.event("ready").await;
    assert_eq!(gone.stop().await.last()["dead"], 2);
}
