//! HTTP semantics of upstreams' answers, over both paths to an upstream and both versions of HTTP that clients speak.

use crate::{
    testbed::TestBed,
    world::{
        World,
        app::{App, Head, PauseGate, Script, answer},
        client::{Answer, Client, assert_problem, exchange, read, read_head, read_to_end, whole},
        frames,
    },
};
use causeway_edge::config::Port;
use hyper::Request;
use tokio::{io::AsyncWriteExt, net::TcpStream};

/// Runs `check` with a client of each HTTP version, first where the edge speaks HTTP to the upstream, then where the
/// gateway itself does.
async fn over_both_roads(
    choose: impl Fn(&Head) -> Script + Send + Sync + Clone + 'static,
    check: impl AsyncFn(&App, &TestBed, &Client),
) {
    let app = App::http(choose.clone()).await;
    let testbed = TestBed::to(&app).await;
    for client in [testbed.client(), testbed.http2()] {
        check(&app, &testbed, &client).await;
    }
    let (app, testbed) = Box::pin(TestBed::secured(choose)).await;
    for client in [testbed.client(), testbed.http2()] {
        check(&app, &testbed, &client).await;
    }
}

async fn ask(client: &Client, method: &str, path: &str) -> Answer {
    let request = Request::builder().method(method);
    let request = request.uri(format!("https://edge-1:9100{path}"));
    client.send(request.body(whole("")).unwrap()).await
}

fn framed(head: &Head) -> Script {
    let path = head.path();
    let (fields, body) = match path.as_str() {
        "/length-beside-chunks" => (
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            "2\r\nok\r\n0\r\n\r\n",
        ),
        "/list-of-equal-lengths" => ("Content-Length: 2, 2\r\n", "ok"),
        "/equal-lengths" => ("Content-Length: 2\r\nContent-Length: 2\r\n", "ok"),
        "/long-number" => ("Content-Length: 0000000000000000000002\r\n", "ok"),
        "/different-lengths" => ("Content-Length: 2, 3\r\n", "okk"),
        "/no-length" => ("Content-Length: two\r\n", "ok"),
        "/length-of-an-interim-answer" => {
            let bytes = "HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\n\
                         HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n";
            return Script::new().body().write(bytes);
        }
        "/no-content" => {
            let bytes = "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n";
            return Script::new().body().write(bytes);
        }
        other => panic!("{other}"),
    };
    let head_only = head.method() == "HEAD";
    let body = if head_only { "" } else { body };
    let answer = format!("HTTP/1.1 200 OK\r\n{fields}\r\n{body}");
    Script::new().body().write(answer)
}

/// RFC 9112 section 6.3: `Transfer-Encoding` overrides `Content-Length`, and equal lengths are one.
#[tokio::test]
async fn upstream_answers_get_new_framing() {
    Box::pin(over_both_roads(framed, async |_, _, client| {
        for path in [
            "/length-beside-chunks",
            "/list-of-equal-lengths",
            "/equal-lengths",
            "/long-number",
            "/length-of-an-interim-answer",
        ] {
            let answer = ask(client, "GET", path).await;
            assert_eq!(
                (answer.status, answer.text().as_str()),
                (200, "ok"),
                "{path}"
            );
            let lengths = answer.fields.get_all("content-length").iter().count();
            assert!(lengths < 2, "{path}: {:?}", answer.fields);
        }
        for path in ["/list-of-equal-lengths", "/equal-lengths", "/long-number"] {
            let answer = ask(client, "HEAD", path).await;
            assert_eq!(answer.status, 200, "{path}");
            assert_eq!(answer.field("content-length"), "2", "{path}");
        }
        let answer = ask(client, "GET", "/no-content").await;
        assert_eq!((answer.status, answer.field("content-length")), (204, ""));
    }))
    .await;
}

#[tokio::test]
async fn lengths_that_differ_are_the_fault_of_the_upstream() {
    Box::pin(over_both_roads(framed, async |app, _, client| {
        for (method, path) in [
            ("GET", "/different-lengths"),
            ("HEAD", "/different-lengths"),
            ("GET", "/no-length"),
            ("HEAD", "/no-length"),
        ] {
            let answer = ask(client, method, path).await;
            assert_eq!(answer.status, 502, "{method} {path}");
            let proxy = answer.field("proxy-status");
            let by_edge = format!("{} on edge-1 sent", app.address());
            let by_gateway = "port 9100 of edge-1 sent";
            assert!(
                proxy.contains(&by_edge) || proxy.contains(by_gateway),
                "{method} {path}: {proxy}"
            );
            if method == "GET" {
                assert_problem(&answer, 502, "target_broken", "sent");
            }
        }
    }))
    .await;
}

/// A GET that makes an upstream fail does so once: an upstream that answered anything, or reset, may have executed the
/// request.
#[tokio::test]
async fn garbage_or_a_reset_on_a_reused_connection_is_not_retried() {
    let choose = |head: &Head| match head.path().as_str() {
        "/garbage" => answer::garbage(),
        "/half-a-head" => Script::new().write("HTTP/1.1 200 OK\r\nContent-Le").close(),
        "/only-hints" => Script::new()
            .write("HTTP/1.1 103 Early Hints\r\n\r\n")
            .close(),
        "/reset" => Script::new().reset(),
        _ => answer::ok("well"),
    };
    Box::pin(over_both_roads(choose, async |app, testbed, client| {
        for path in ["/garbage", "/half-a-head", "/only-hints", "/reset"] {
            assert_eq!(ask(client, "GET", "/well").await.text(), "well");
            // Its connection is idle once the stream is over.
            testbed.until_idle().await;
            let before = app.requests();
            let answer = ask(client, "GET", path).await;
            assert_problem(&answer, 502, "target_broken", "edge-1");
            assert_eq!(app.requests(), before + 1, "{path}");
        }
    }))
    .await;
}

const ATTACH: &str =
    "POST /attach HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n";

fn attach(head: &Head) -> Script {
    assert!(head.path().starts_with("/attach"));
    if head.path() == "/attach/refused" {
        return answer::refuse_upgrade("409 Conflict", "not you");
    }
    let hint = if head.path() == "/attach/hints" {
        HINT
    } else {
        ""
    };
    let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n";
    Script::new().body().write(hint).write(switch).echo()
}

/// As Docker's clients ask for `attach` and `exec`.
async fn attaches(app: &App, testbed: &TestBed) {
    let large = "x".repeat(300_000);
    for (fields, framed, body) in [
        ("Content-Length: 3\r\n\r\n".to_owned(), "xyz", "xyz"),
        (
            "Transfer-Encoding: chunked\r\n\r\n".to_owned(),
            "1\r\nx\r\n2\r\nyz\r\n0\r\n\r\n",
            "xyz",
        ),
        (
            "Transfer-Encoding: chunked\r\n\r\n".to_owned(),
            "0\r\n\r\n",
            "",
        ),
        (
            format!("Content-Length: {}\r\n\r\n", large.len()),
            large.as_str(),
            large.as_str(),
        ),
    ] {
        let mut wire = testbed.tls().await;
        let head = exchange(&mut wire, format!("{ATTACH}{fields}{framed}")).await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        assert!(app.body().await == body.as_bytes());
        wire.write_all(b"hello").await.unwrap();
        assert_eq!(read(&mut wire, 5).await, b"hello");
        wire.shutdown().await.unwrap();
        assert_eq!(read_to_end(&mut wire).await.unwrap(), b"");
    }
    let hinted = ATTACH.replace("/attach", "/attach/hints") + "Content-Length: 3\r\n\r\nxyz";
    let mut wire = testbed.tls().await;
    let head = exchange(&mut wire, hinted).await;
    assert!(head.starts_with("HTTP/1.1 103 "), "{head}");
    let head = read_head(&mut wire).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    drop(wire);
    let refused = ATTACH.replace("/attach", "/attach/refused") + "Content-Length: 3\r\n\r\nxyz";
    let refused = testbed.client().raw("edge-1", refused).await;
    assert_eq!((refused.status, refused.text().as_str()), (409, "not you"));
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_upgrade_with_a_body_is_switched_behind_the_body() {
    let app = App::http(attach).await;
    attaches(&app, &TestBed::to(&app).await).await;
    let (app, testbed) = TestBed::secured(attach).await;
    attaches(&app, &testbed).await;
}

#[tokio::test]
async fn the_body_of_an_upgrade_may_have_64_kib_without_a_length() {
    let app = App::http(attach).await;
    let testbed = TestBed::to(&app).await;
    let chunked = |length: usize| {
        let body = "x".repeat(length);
        format!("{ATTACH}Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n{body}\r\n0\r\n\r\n")
    };
    let mut wire = testbed.tls().await;
    let head = exchange(&mut wire, chunked(64 << 10)).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    drop(wire);
    let answer = testbed
        .client()
        .raw("edge-1", chunked((64 << 10) + 1))
        .await;
    assert_problem(
        &answer,
        413,
        "content_too_large",
        "more than 65536 bytes and no Content-Length",
    );
    assert_eq!(app.requests(), 1);
    testbed.until_idle().await;
}

const HINT: &str = "HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\nConnection: x-hop\r\nX-Hop: 1\r\n\r\n";

/// Interim answers. The client gets each of them before the upstream continues.
fn hinting(gate: &PauseGate) -> impl Fn(&Head) -> Script + Send + Sync + Clone + 'static {
    let gate = gate.clone();
    move |head| match head.path().as_str() {
        "/hints" => Script::new()
            .body()
            .write(HINT)
            .until(&gate)
            .write("HTTP/1.1 102 Processing\r\n\r\n")
            .until(&gate)
            .write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        "/at-once" => answer::after_hints("ok"),
        "/continue" => answer::after_continue("taken"),
        other => panic!("{other}"),
    }
}

async fn hints_arrive_over_http1(testbed: &TestBed, gate: &PauseGate) {
    let mut wire = testbed.tcp("plain").await;
    // On the same connection again: nothing of the first is left.
    for _ in 0..2 {
        let head = "GET /hints HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
        let hint = exchange(&mut wire, head).await.to_lowercase();
        assert!(hint.starts_with("http/1.1 103 early hints\r\n"), "{hint}");
        assert!(
            hint.contains("\r\nlink: </style.css>; rel=preload\r\n"),
            "{hint}"
        );
        assert!(!hint.contains("x-hop"), "{hint}");
        gate.open();
        let processing = read_head(&mut wire).await;
        assert!(processing.starts_with("HTTP/1.1 102 "), "{processing}");
        gate.open();
        let last = read_head(&mut wire).await;
        assert!(last.starts_with("HTTP/1.1 200 "), "{last}");
        assert_eq!(read(&mut wire, 2).await, b"ok");
    }
    let head = "GET /at-once HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
    let hint = exchange(&mut wire, head).await;
    assert!(hint.starts_with("HTTP/1.1 103 "), "{hint}");
    let last = read_head(&mut wire).await;
    assert!(last.starts_with("HTTP/1.1 200 "), "{last}");
    // A client of HTTP/1.0 does not know interim answers (RFC 9110 section 15.2).
    gate.open();
    gate.open();
    let head = "GET /hints HTTP/1.0\r\nHost: edge-1:9100\r\n\r\n";
    let last = exchange(&mut testbed.tcp("plain").await, head).await;
    assert!(last.starts_with("HTTP/1.0 200 "), "{last}");
}

/// The status of the next answer on a stream, interim or not.
async fn status(wire: &mut TcpStream, stream: u32) -> u16 {
    loop {
        let frame = frames::next(wire).await.unwrap();
        if frame.kind == frames::HEADERS && frame.stream == stream {
            return frame.status();
        }
        assert!(frame.stream != stream || frame.kind != frames::RST_STREAM);
    }
}

async fn hints_arrive_over_http2(testbed: &TestBed, gate: &PauseGate) {
    let mut wire = testbed.tcp("plain").await;
    let asked = |stream: u32, method: &str, path: &str, expect: bool| {
        let mut list = vec![
            (":method", method),
            (":scheme", "http"),
            (":path", path),
            (":authority", "edge-1:9100"),
        ];
        list.extend(expect.then_some(("expect", "100-continue")));
        let end = if expect { 0 } else { frames::END_STREAM };
        let flags = frames::END_HEADERS | end;
        frames::frame(frames::HEADERS, flags, stream, &frames::fields(&list))
    };
    // A client that makes its table smaller gets no interim answers.
    let begin = [frames::PREFACE, &frames::settings(&[])].concat();
    frames::send(&mut wire, &begin).await.unwrap();
    let hints = asked(1, "GET", "/hints", false);
    frames::send(&mut wire, &hints).await.unwrap();
    assert_eq!(status(&mut wire, 1).await, 103);
    gate.open();
    assert_eq!(status(&mut wire, 1).await, 102);
    // Beside the first stream, which has no answer yet.
    let waits = asked(3, "POST", "/continue", true);
    frames::send(&mut wire, &waits).await.unwrap();
    assert_eq!(status(&mut wire, 3).await, 100);
    let body = frames::frame(frames::DATA, frames::END_STREAM, 3, b"body");
    frames::send(&mut wire, &body).await.unwrap();
    assert_eq!(status(&mut wire, 3).await, 200);
    gate.open();
    assert_eq!(status(&mut wire, 1).await, 200);
    let hint = asked(5, "GET", "/at-once", false);
    frames::send(&mut wire, &hint).await.unwrap();
    assert_eq!(status(&mut wire, 5).await, 103);
    assert_eq!(status(&mut wire, 5).await, 200);
}

/// RFC 9110 section 15.2: a proxy forwards interim answers, and none waits for the next.
#[tokio::test]
async fn interim_answers_reach_clients_of_both_versions() {
    let gate = PauseGate::new();
    let app = App::http(hinting(&gate)).await;
    let testbed = TestBed::to(&app).await;
    hints_arrive_over_http1(&testbed, &gate).await;
    hints_arrive_over_http2(&testbed, &gate).await;
    let (app, testbed) = Box::pin(TestBed::secured(hinting(&gate))).await;
    hints_arrive_over_http1(&testbed, &gate).await;
    hints_arrive_over_http2(&testbed, &gate).await;
    drop(app);
}

/// RFC 9209 section 2.3 has a type for each.
#[tokio::test]
async fn a_target_that_cannot_be_dialled_is_reported_by_its_cause() {
    let world = World::start().await;
    let refusing = App::refusing();
    let targets = [
        (1, refusing.address().to_string()),
        // With a label that is too long, for which the edge asks no name server.
        (2, format!("{}.invalid:80", "x".repeat(64))),
    ];
    let edge = world.edge("edge-1").config(|config| {
        for (number, target) in &targets {
            let port = Port {
                target: Some(target.clone()),
                ..Port::default()
            };
            config.ports.insert(*number, port);
        }
    });
    let _edge = edge.join().await;
    for (number, status, reason, error) in [
        (1, 502, "target_refused", "connection_refused"),
        (2, 502, "target_unresolved", "dns_error"),
    ] {
        let answer = world
            .client()
            .get(&format!("https://edge-1:{number}/"))
            .await;
        assert_problem(&answer, status, reason, "edge-1");
        let expected = format!("causeway; error={error}; ");
        assert!(
            answer.field("proxy-status").starts_with(&expected),
            "{answer}"
        );
    }
}

/// RFC 9110 section 7.2.
#[tokio::test]
async fn host_is_the_first_field_of_a_request() {
    let choose = |head: &Head| {
        let fields = head.fields();
        answer::ok(
            &fields
                .first()
                .map(|(name, value)| format!("{name}: {value}"))
                .unwrap_or_default(),
        )
    };
    Box::pin(over_both_roads(choose, async |_, _, client| {
        for (method, body) in [("GET", ""), ("POST", "body")] {
            let request = Request::builder()
                .method(method)
                .uri("https://edge-1:9100/")
                .header("x-a", "1")
                .header("cookie", "a=1")
                .header("x-a", "2");
            let answer = client.send(request.body(whole(body)).unwrap()).await;
            assert_eq!(answer.text(), "Host: edge-1:9100", "{method}");
        }
    }))
    .await;
}

/// RFC 9110 section 2.5: a later minor version is read as the one that is known.
#[tokio::test]
async fn an_answer_of_http_1_2_is_read_as_one_of_1_1() {
    let choose = |head: &Head| {
        let version = head.path().replace('/', "");
        let text = format!("HTTP/{version} 200 OK\r\nContent-Length: 8\r\n\r\nHTTP/1.2");
        Script::new().body().write(text)
    };
    Box::pin(over_both_roads(choose, async |_, _, client| {
        for _ in 0..2 {
            for version in ["1.2", "1.9"] {
                let answer = ask(client, "GET", &format!("/{version}")).await;
                assert_eq!(
                    (answer.status, &*answer.text()),
                    (200, "HTTP/1.2"),
                    "{version}"
                );
            }
        }
        let answer = ask(client, "GET", "/2.0").await;
        assert_problem(&answer, 502, "target_broken", "not HTTP");
    }))
    .await;
}

fn with_many_fields(head: &Head) -> Script {
    let count = head.path().trim_start_matches('/').parse().unwrap();
    let fields = "X-Many: 1\r\n".repeat(count);
    Script::new().write(format!(
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n{fields}\r\nok"
    ))
}

#[tokio::test]
async fn an_answer_of_too_many_fields_names_the_limit() {
    Box::pin(over_both_roads(with_many_fields, async |_, _, client| {
        assert_eq!(ask(client, "GET", "/90").await.status, 200);
        let answer = ask(client, "GET", "/150").await;
        assert_problem(
            &answer,
            502,
            "target_broken",
            "more fields than limits.max_headers",
        );
    }))
    .await;
}

#[tokio::test]
async fn the_limit_of_an_answers_fields_can_be_raised() {
    let world = World::start().await;
    let app = App::http(with_many_fields).await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let _edge = edge
        .config(|config| config.limits.max_headers = 200)
        .join()
        .await;
    let client = world.client().http2();
    assert_eq!(ask(&client, "GET", "/150").await.status, 200);
    let build = TestBed::build().config(|config| config.limits.max_headers = 200);
    let (_app, testbed) = Box::pin(TestBed::secured_by(build, with_many_fields)).await;
    assert_eq!(ask(&testbed.http2(), "GET", "/150").await.status, 200);
}
