//! Forwarding headers towards applications: set for every kind of request, and no client can forge them.

use crate::{
    testbed::{TestBed, URL},
    world::{
        World,
        app::{App, Head, Script, answer},
        client::{Client, exchange, read_to_end},
        gateway::anonymous,
        tool::{Tool, need},
    },
};
use causeway_edge::config::Protocol;
use causeway_gateway::config::{ForwardingHeader, Listener, ListenerProtocol};
use std::net::SocketAddr;

const UPGRADE: &str = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade, X-Forwarded-For\r\nUpgrade: websocket\r\n\
                       X-Forwarded-For: 192.0.2.1\r\nX_Real_IP: 192.0.2.1\r\nX-Forwarded-Ssl: off\r\n\r\n";

/// Answers requests, and switches protocols if a client asks for that.
pub(crate) fn script(head: &Head) -> Script {
    match head.value("upgrade") {
        Some(_) => answer::switch("websocket", b"first"),
        None => answer::ok("it"),
    }
}

fn forging(client: Client) -> Client {
    client
        .field("forwarded", "for=192.0.2.1;proto=http")
        .field("x-forwarded-for", "192.0.2.1")
        .field("x_forwarded_for", "192.0.2.1")
        .field("x-forwarded-proto", "ftp")
        .field("x-forwarded-host", "192.0.2.1")
        .field("x-forwarded-ssl", "192.0.2.1")
        .field("x-real-ip", "192.0.2.1")
}

#[track_caller]
fn assert_set(head: &Head, proto: &str) {
    let forwarded = format!("for=127.0.0.1;host=\"edge-1:9100\";proto={proto}");
    for (name, value) in [
        ("forwarded", forwarded.as_str()),
        ("x-forwarded-for", "127.0.0.1"),
        ("x-forwarded-proto", proto),
        ("x-forwarded-host", "edge-1:9100"),
        ("x-real-ip", "127.0.0.1"),
    ] {
        assert_eq!(head.values(name), [value], "{head:?}");
    }
    let text = String::from_utf8_lossy(&head.bytes).to_lowercase();
    assert!(!text.contains("192.0.2.1"), "{text}");
    assert!(!text.contains("-ssl"), "{text}");
}

#[tokio::test]
async fn an_upstream_gets_unforgeable_address_scheme_and_host() {
    let app = App::http(script).await;
    let testbed = TestBed::to(&app).await;
    let (secured, asked_here) = TestBed::secured(script).await;
    for (app, testbed) in [(&app, &testbed), (&secured, &asked_here)] {
        for client in [testbed.client(), testbed.http2()] {
            assert_eq!(client.get(URL).await.text(), "it");
            assert_set(&app.head().await, "https");
            assert_eq!(forging(client).get(URL).await.text(), "it");
            assert_set(&app.head().await, "https");
        }
        for client in [
            testbed.client_at("plain"),
            testbed.client_at("plain").http2(),
        ] {
            let answer = forging(client).get("http://edge-1:9100/").await;
            assert_eq!(answer.text(), "it");
            assert_set(&app.head().await, "http");
        }
        let mut wire = testbed.tls().await;
        let answer = exchange(&mut wire, UPGRADE).await;
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        assert_set(&app.head().await, "https");
        let mut wire = testbed.tcp("plain").await;
        let answer = exchange(&mut wire, UPGRADE).await;
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        assert_set(&app.head().await, "http");
    }
}

#[tokio::test]
async fn only_a_trusted_proxy_is_believed_at_a_listener() {
    let app = App::http(script).await;
    let trusting = Listener {
        trusted_proxies: vec!["127.0.0.1/32".parse().unwrap()],
        ..anonymous("trusting", ListenerProtocol::Http)
    };
    let world = World::build().listener(trusting).start().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let url = "http://edge-1:9100/";
    for client in [
        world.client_at("trusting"),
        world.client_at("trusting").http2(),
    ] {
        let proxied = client
            .field("forwarded", "for=192.0.2.1")
            .field("x-forwarded-for", "198.51.100.7, 192.0.2.1")
            .field("x_forwarded_for", "203.0.113.9")
            .field("x-forwarded-proto", "https")
            .field("x-forwarded-host", "shop.example")
            .field("x-real-ip", "192.0.2.1");
        proxied.get(url).await;
        let head = app.head().await;
        let ours = "for=127.0.0.1;host=\"edge-1:9100\";proto=http";
        assert_eq!(head.values("forwarded"), ["for=192.0.2.1", ours]);
        assert_eq!(
            head.values("x-forwarded-for"),
            ["198.51.100.7, 192.0.2.1, 127.0.0.1"]
        );
        assert_eq!(head.values("x-forwarded-proto"), ["https"]);
        assert_eq!(head.values("x-forwarded-host"), ["shop.example"]);
        assert_eq!(head.values("x-real-ip"), ["192.0.2.1"]);
        assert!(head.values("x_forwarded_for").is_empty(), "{head:?}");

        proxied.from("127.0.0.2").get(url).await;
        let head = app.head().await;
        assert_eq!(head.values("x-forwarded-for"), ["127.0.0.2"]);
        assert_eq!(head.values("x-forwarded-proto"), ["http"]);
        assert_eq!(head.values("x-forwarded-host"), ["edge-1:9100"]);
        assert_eq!(head.values("x-real-ip"), ["127.0.0.2"]);
        let ours = "for=127.0.0.2;host=\"edge-1:9100\";proto=http";
        assert_eq!(head.values("forwarded"), [ours]);
    }
}

#[tokio::test]
async fn a_listener_sets_the_fields_that_it_is_configured_for() {
    let app = App::http(script).await;
    let some = Listener {
        forwarding_headers: vec![ForwardingHeader::XForwardedProto],
        ..anonymous("some", ListenerProtocol::Http)
    };
    let world = World::build().listener(some).start().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let forging = forging(world.client_at("some"));
    forging.get("http://edge-1:9100/").await;
    let head = app.head().await;
    assert_eq!(head.values("x-forwarded-proto"), ["http"]);
    for name in [
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-real-ip",
    ] {
        assert!(head.values(name).is_empty(), "{name}: {head:?}");
    }
}

#[tokio::test]
async fn the_source_of_a_proxy_header_is_the_client() {
    let app = App::http(|_| answer::until_close("it")).await;
    let proxied = Listener {
        proxy_protocol: vec!["127.0.0.1/32".parse().unwrap()],
        // The proxy is the peer of the socket, and not the peer of a request.
        trusted_proxies: vec!["127.0.0.1/32".parse().unwrap()],
        ..anonymous("proxied", ListenerProtocol::Http)
    };
    let world = World::build().listener(proxied).start().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let mut wire = world.client_at("proxied").tcp_stream().await;
    // From 192.0.2.7:4000 to 10.0.0.1:80.
    let header = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\x00\x02\x07\x0a\0\0\x01\x0f\xa0\0\x50";
    let request = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nX-Forwarded-For: 203.0.113.1\r\nConnection: close\r\n\r\n";
    let sent = [&header[..], request.as_bytes()].concat();
    tokio::io::AsyncWriteExt::write_all(&mut wire, &sent)
        .await
        .unwrap();
    read_to_end(&mut wire).await.unwrap();
    let head = app.head().await;
    assert_eq!(head.values("x-forwarded-for"), ["192.0.2.7"]);
    assert_eq!(head.values("x-real-ip"), ["192.0.2.7"]);
}

#[tokio::test]
async fn curl_is_not_redirected_for_ever_by_an_app_that_forces_https() {
    need!("curl");
    // Decides as gunicorn and Django do.
    let app = App::http(|head| {
        if head.value("x-forwarded-proto").as_deref() == Some("https") {
            return answer::ok("secure");
        }
        let redirect = format!(
            "HTTP/1.1 301 Moved Permanently\r\nLocation: {URL}\r\nContent-Length: 0\r\n\r\n"
        );
        Script::new().write(redirect)
    })
    .await;
    let testbed = TestBed::to(&app).await;
    for flag in ["--http1.1", "--http2"] {
        let curl = testbed.curl([flag, "-L", "--max-redirs", "5", URL]);
        assert_eq!(curl.run().await.ok().text(), "secure");
    }
}

#[tokio::test]
async fn gunicorn_learns_the_scheme_of_the_request() {
    need!("curl", "python:gunicorn");
    let mut app = Tool::python("gunicorn_server.py").start();
    let port: u16 = app.json().await["port"].to_string().parse().unwrap();
    let testbed = TestBed::to_as(Protocol::Http, SocketAddr::from(([127, 0, 0, 1], port))).await;
    for flag in ["--http1.1", "--http2"] {
        let curl = testbed.curl([flag, "-L", "--max-redirs", "5", "-w", " %{http_code}", URL]);
        let message = curl.run().await.ok().text();
        assert_eq!(message, "secure for 127.0.0.1 200", "{flag}");
    }
}
