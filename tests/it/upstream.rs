//! HTTP semantics of what an upstream answers, over both roads to it and both versions of HTTP that clients speak.

use crate::{
    road::Road,
    world::{
        app::{App, Head, Script},
        caller::{Answer, Caller, assert_problem, whole},
    },
};
use hyper::Request;

/// Runs `check` with a client of each HTTP version, first where the edge speaks HTTP to the upstream, then where the
/// gateway itself does.
async fn over_both_roads(
    choose: impl Fn(&Head) -> Script + Send + Sync + Clone + 'static,
    check: impl AsyncFn(&App, &Road, &Caller),
) {
    let app = App::http(choose.clone()).await;
    let road = Road::to(&app).await;
    for caller in [road.caller(), road.http2()] {
        check(&app, &road, &caller).await;
    }
    let (app, road) = Box::pin(Road::secured(choose)).await;
    for caller in [road.caller(), road.http2()] {
        check(&app, &road, &caller).await;
    }
}

async fn ask(caller: &Caller, method: &str, path: &str) -> Answer {
    let request = Request::builder().method(method);
    let request = request.uri(format!("https://edge-1:9100{path}"));
    caller.send(request.body(whole("")).unwrap()).await
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
async fn answers_of_upstreams_are_framed_anew() {
    over_both_roads(framed, async |_, _, caller| {
        for path in [
            "/length-beside-chunks",
            "/list-of-equal-lengths",
            "/equal-lengths",
            "/long-number",
            "/length-of-an-interim-answer",
        ] {
            let answer = ask(caller, "GET", path).await;
            assert_eq!((answer.status, answer.text().as_str()), (200, "ok"), "{path}");
            let lengths = answer.fields.get_all("content-length").iter().count();
            assert!(lengths < 2, "{path}: {:?}", answer.fields);
        }
        for path in ["/list-of-equal-lengths", "/equal-lengths", "/long-number"] {
            let answer = ask(caller, "HEAD", path).await;
            assert_eq!(answer.status, 200, "{path}");
            assert_eq!(answer.field("content-length"), "2", "{path}");
        }
        let answer = ask(caller, "GET", "/no-content").await;
        assert_eq!((answer.status, answer.field("content-length")), (204, ""));
    })
    .await;
}

#[tokio::test]
async fn lengths_that_differ_are_the_fault_of_the_upstream() {
    over_both_roads(framed, async |app, _, caller| {
        for (method, path) in [
            ("GET", "/different-lengths"),
            ("HEAD", "/different-lengths"),
            ("GET", "/no-length"),
            ("HEAD", "/no-length"),
        ] {
            let answer = ask(caller, method, path).await;
            assert_eq!(answer.status, 502, "{method} {path}");
            let proxy = answer.field("proxy-status");
            let by_edge = format!("{} on edge-1 answered", app.address());
            let by_gateway = "port 9100 of edge-1 answered";
            assert!(
                proxy.contains(&by_edge) || proxy.contains(by_gateway),
                "{method} {path}: {proxy}"
            );
            if method == "GET" {
                assert_problem(&answer, 502, "target_broken", "answered");
            }
        }
    })
    .await;
}
