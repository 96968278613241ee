use super::*;
use crate::local_proxy::{AcceptedClient, ProxyRequest};
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

const GET: &str = "GET http://edge-1:3000/ HTTP/1.1\r\nHost: edge-1:3000\r\n\r\n";
const UPLOAD: &str =
    "POST http://edge-1/ HTTP/1.1\r\nHost: edge-1\r\nContent-Length: 1000000\r\n\r\nstart";

async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let connecting = TcpStream::connect(listener.local_addr().unwrap());
    let (near, accepted) = tokio::join!(connecting, listener.accept());
    (near.unwrap(), accepted.unwrap().0)
}

/// Sends these bytes to the proxy. Returns the connection of the program, and the request.
async fn requested(bytes: &str) -> (TcpStream, HttpExchange<TcpStream>) {
    let (mut near, local) = pair().await;
    near.write_all(bytes.as_bytes()).await.unwrap();
    let request = ProxyRequest::read(local, Duration::from_secs(10)).await;
    match request.ok().unwrap().accept().await {
        Ok(AcceptedClient::Http(exchange)) => (near, exchange),
        _ => panic!("not a plain request: {bytes}"),
    }
}

/// Forwards a request of these bytes. Returns the outcome and the results of both ends.
async fn forwarded<P, D>(
    bytes: &str,
    program: impl AsyncFnOnce(TcpStream) -> P,
    destination: impl AsyncFnOnce(TcpStream) -> D,
) -> (CopyOutcome<io::Error>, P, D) {
    let (near, exchange) = requested(bytes).await;
    let (session, node) = pair().await;
    tokio::join!(exchange.forward(session), program(near), destination(node))
}

async fn rest(mut wire: TcpStream) -> String {
    let mut text = String::new();
    wire.read_to_string(&mut text).await.unwrap();
    text
}

/// Reads until this text ends what was read.
async fn read_until(wire: &mut (impl AsyncRead + Unpin), end: &str) -> String {
    let mut text = String::new();
    while !text.ends_with(end) {
        text.push(char::from(wire.read_u8().await.unwrap()));
    }
    text
}

/// Answers a request without a body. Returns its head, and what followed it.
async fn answer(mut wire: TcpStream, response: &str) -> (String, String) {
    let head = read_until(&mut wire, "\r\n\r\n").await;
    wire.write_all(response.as_bytes()).await.unwrap();
    (head, rest(wire).await)
}

async fn is_reset(mut wire: TcpStream) -> bool {
    let read = wire.read_to_end(&mut Vec::new()).await;
    read.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
}

#[tokio::test]
async fn the_url_decides_about_host_and_fields_of_one_connection_go() {
    let request = "GET http://edge-1:3000/a?b=1 HTTP/1.1\r\nHost: other\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n\
        Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic eDp5\r\nUpgrade: h2c\r\nCookie: a\r\nCookie: b\r\n\r\n\
        GET http://edge-2/ HTTP/1.1\r\nHost: edge-2\r\n\r\n";
    let response = "HTTP/1.1 200 Fine\r\nKeep-Alive: timeout=5\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok";
    let destination = async |wire| answer(wire, response).await;
    let (outcome, response, (head, more)) = forwarded(request, rest, destination).await;
    assert!(matches!(outcome, CopyOutcome::Clean), "{outcome:?}");
    assert_eq!(
        head,
        "GET /a?b=1 HTTP/1.1\r\nHost: edge-1:3000\r\nVia: 1.1 causeway\r\nCookie: a\r\nCookie: b\r\nConnection: close\r\n\r\n"
    );
    assert_eq!(more, "", "the second request is not for this host");
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 Fine\r\n"), "{head}");
    assert_eq!(head.matches("Content-Length: 2").count(), 1, "{head}");
    assert!(head.to_lowercase().contains("connection: close"), "{head}");
    assert!(!head.contains("Keep-Alive"), "{head}");
    assert_eq!(body, "ok");
}

#[tokio::test]
async fn bodies_of_unknown_length_stream_in_both_directions() {
    let request = "POST http://edge-1 HTTP/1.1\r\nHost: edge-1\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n";
    let program = async |mut wire: TcpStream| {
        read_until(&mut wire, "100 Continue\r\n\r\n").await;
        wire.write_all(b"4\r\nping\r\n").await.unwrap();
        read_until(&mut wire, "pong\r\n").await;
        wire.write_all(b"0\r\n\r\n").await.unwrap();
        rest(wire).await
    };
    let destination = async |mut wire: TcpStream| {
        let head = read_until(&mut wire, "ping\r\n").await;
        wire.write_all(b"HTTP/1.1 200 OK\r\n\r\npong")
            .await
            .unwrap();
        read_until(&mut wire, "0\r\n\r\n").await;
        wire.write_all(b"end").await.unwrap();
        head
    };
    let (outcome, response, head) = forwarded(request, program, destination).await;
    assert!(matches!(outcome, CopyOutcome::Clean), "{outcome:?}");
    assert!(head.starts_with("POST / HTTP/1.1\r\n"), "{head}");
    assert_eq!(response, "3\r\nend\r\n0\r\n\r\n");
}

#[tokio::test]
async fn a_body_of_unknown_length_arrives_with_each_method() {
    for method in ["GET", "HEAD", "DELETE"] {
        let request = format!(
            "{method} http://edge-1/ HTTP/1.1\r\nHost: edge-1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nping\r\n0\r\n\r\n"
        );
        let destination = async |mut wire: TcpStream| {
            let head = read_until(&mut wire, "\r\n\r\n").await;
            let body = read_until(&mut wire, "0\r\n\r\n").await;
            let response = b"HTTP/1.1 204 No Content\r\n\r\n";
            wire.write_all(response).await.unwrap();
            (head, body)
        };
        let forwarding = forwarded(&request, rest, destination);
        let forwarding = timeout(Duration::from_secs(10), forwarding);
        let (outcome, response, (head, body)) = forwarding.await.unwrap();
        assert!(matches!(outcome, CopyOutcome::Clean), "{outcome:?}");
        assert!(head.contains("Transfer-Encoding: chunked\r\n"), "{head}");
        assert_eq!(body, "4\r\nping\r\n0\r\n\r\n", "{method}");
        assert!(response.starts_with("HTTP/1.1 204 "), "{response}");
    }
}

#[tokio::test]
async fn the_target_and_te_are_those_for_a_server() {
    for (request, expected) in [
        ("OPTIONS http://edge-1", "OPTIONS * "),
        ("OPTIONS http://edge-1/", "OPTIONS / "),
        ("OPTIONS http://edge-1?a", "OPTIONS /?a "),
        ("GET http://edge-1", "GET / "),
    ] {
        let request = format!("{request} HTTP/1.1\r\nHost: edge-1\r\nTE: trailers, gzip\r\n\r\n");
        let destination = async |wire| answer(wire, "HTTP/1.1 204 No Content\r\n\r\n").await;
        let (_, _, (head, _)) = forwarded(&request, rest, destination).await;
        assert!(head.starts_with(expected), "{head}");
        assert!(head.contains("\r\nTe: trailers\r\n"), "{head}");
        assert!(head.contains("\r\nConnection: close, TE\r\n"), "{head}");
    }
}

#[tokio::test]
async fn a_status_without_a_phrase_stays_without_one() {
    for response in ["HTTP/1.1 520 ", "HTTP/1.1 520"] {
        let response = format!("{response}\r\nContent-Length: 0\r\n\r\n");
        let destination = async |wire| answer(wire, &response).await;
        let (_, answered, _) = forwarded(GET, rest, destination).await;
        assert!(answered.starts_with("HTTP/1.1 520 \r\n"), "{answered}");
    }
}

/// Also a body of HTTP/1.0, whose end is that of the connection.
#[tokio::test]
async fn a_response_that_breaks_off_is_a_reset() {
    let old = "GET http://edge-1/ HTTP/1.0\r\n\r\n";
    for (request, response, is_reset_behind) in [
        (GET, "Content-Length: 9\r\n\r\nhalf", false),
        (
            GET,
            "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
            false,
        ),
        (GET, "\r\nhalf", true),
        (old, "\r\nhalf", true),
    ] {
        let destination = async |mut wire: TcpStream| {
            read_until(&mut wire, "\r\n\r\n").await;
            let head = format!("HTTP/1.1 200 OK\r\n{response}");
            wire.write_all(head.as_bytes()).await.unwrap();
            wire
        };
        let program = async |mut wire: TcpStream| {
            read_until(&mut wire, "half").await;
            wire
        };
        let (near, exchange) = requested(request).await;
        let (session, node) = pair().await;
        let both = async {
            let (near, node) = tokio::join!(program(near), destination(node));
            if is_reset_behind {
                node.abort();
            }
            drop(node);
            is_reset(near).await
        };
        let (outcome, was_reset) = tokio::join!(exchange.forward(session), both);
        assert!(was_reset, "{request}{response}");
        assert!(matches!(outcome, CopyOutcome::Stream(_)), "{outcome:?}");
    }
}

/// Also behind bytes that HTTP does not read, in the segment of the request or in later ones.
#[tokio::test]
async fn a_program_that_leaves_resets_the_destination() {
    let chunked = "POST http://edge-1/ HTTP/1.1\r\nHost: edge-1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n";
    let trailers = "POST http://edge-1/ HTTP/1.1\r\nHost: edge-1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\nA: 1\r\n\r\n";
    let whole = "POST http://edge-1/ HTTP/1.1\r\nHost: edge-1\r\nContent-Length: 4\r\n\r\nbody";
    for (request, seen) in [
        (GET, "\r\n\r\n"),
        (UPLOAD, "start"),
        (&format!("{GET}\r\n"), "\r\n\r\n"),
        (&format!("{GET}{GET}"), "\r\n\r\n"),
        (&format!("{whole}\r\n"), "body"),
        (&format!("{chunked}{GET}"), "0\r\n\r\n"),
        (chunked, "0\r\n\r\n"),
        (&format!("{trailers}{GET}"), "0\r\n\r\n"),
    ] {
        let many = GET.repeat(10_000);
        let behind = ["", GET, &many];
        for (later, resets) in behind
            .iter()
            .flat_map(|later| [(later, false), (later, true)])
        {
            let (left, leaves) = tokio::sync::oneshot::channel();
            let program = async |mut wire: TcpStream| {
                leaves.await.unwrap();
                wire.write_all(later.as_bytes()).await.unwrap();
                if resets {
                    wire.abort();
                }
                drop(wire);
            };
            let destination = async |mut wire: TcpStream| {
                read_until(&mut wire, seen).await;
                left.send(()).unwrap();
                is_reset(wire).await
            };
            let forwarding = forwarded(request, program, destination);
            let forwarding = timeout(Duration::from_secs(10), forwarding).await;
            let (outcome, (), was_reset) = forwarding.expect(request);
            let row = format!("{request} and {} bytes, resets: {resets}", later.len());
            assert!(was_reset, "{row}");
            assert!(matches!(outcome, CopyOutcome::Socket(_)), "{outcome:?}");
        }
    }
}

/// A program that sends on without end, in a thread of its own, still gets its response.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn many_bytes_behind_a_request_delay_no_response() {
    let program = async |wire: TcpStream| {
        let (mut read, mut write) = wire.into_split();
        let mut sending = JoinSet::new();
        sending.spawn(async move { while write.write_all(&[b'x'; 4096]).await.is_ok() {} });
        read_until(&mut read, "ok").await
    };
    let response = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let destination = async |wire| answer(wire, response).await;
    let forwarding = timeout(
        Duration::from_secs(10),
        forwarded(GET, program, destination),
    );
    let (outcome, response, (_, more)) = forwarding.await.unwrap();
    assert!(matches!(outcome, CopyOutcome::Clean), "{outcome:?}");
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert_eq!(more, "");
}

/// The program closes its connection behind the response, as curl does.
#[tokio::test]
async fn an_early_response_arrives_although_the_upload_does_not_end() {
    let program = async |mut wire: TcpStream| read_until(&mut wire, "\r\n\r\n").await;
    let destination = async |mut wire: TcpStream| {
        read_until(&mut wire, "start").await;
        let response = b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n";
        wire.write_all(response).await.unwrap();
        is_reset(wire).await
    };
    let (_, response, was_reset) = forwarded(UPLOAD, program, destination).await;
    assert!(response.starts_with("HTTP/1.1 413 "), "{response}");
    assert!(was_reset, "the destination has not got the whole request");
}

/// The program stays open, and sends no more of its body.
#[tokio::test]
async fn an_early_response_ends_the_exchange_if_the_destination_closes() {
    let program = async |mut wire: TcpStream| {
        let response = read_until(&mut wire, "\r\n\r\n").await;
        (response, rest(wire).await)
    };
    let destination = async |mut wire: TcpStream| {
        read_until(&mut wire, "start").await;
        let response = b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n";
        wire.write_all(response).await.unwrap();
    };
    let forwarding = forwarded(UPLOAD, program, destination);
    let forwarding = timeout(Duration::from_secs(10), forwarding);
    let (outcome, (response, more), ()) = forwarding.await.unwrap();
    assert!(matches!(outcome, CopyOutcome::Clean), "{outcome:?}");
    assert!(response.starts_with("HTTP/1.1 413 "), "{response}");
    assert_eq!(more, "");
}

#[tokio::test]
async fn a_destination_without_a_valid_response_is_502_with_the_reason() {
    for (response, reason) in [
        ("", "closed the connection"),
        ("SSH-2.0-OpenSSH_9.2\r\n", "sent no valid response"),
        (
            "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
            "switched to another protocol",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            "Transfer-Encoding is not just chunked",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
            "",
        ),
    ] {
        let destination = async |mut wire: TcpStream| {
            read_until(&mut wire, "\r\n\r\n").await;
            wire.write_all(response.as_bytes()).await.unwrap();
        };
        let (outcome, answer, ()) = forwarded(GET, rest, destination).await;
        let is_502 = answer.starts_with("HTTP/1.1 502 ") && answer.contains(reason);
        assert!(is_502, "{response}: {answer}");
        assert!(matches!(outcome, CopyOutcome::Stream(_)), "{outcome:?}");
    }
}

#[tokio::test]
async fn an_invalid_request_body_is_400_and_a_reset_of_the_destination() {
    let request =
        "POST http://edge-1/ HTTP/1.1\r\nHost: edge-1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n";
    let (outcome, answer, was_reset) = forwarded(request, rest, is_reset).await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(was_reset);
    assert!(matches!(outcome, CopyOutcome::Socket(_)), "{outcome:?}");
}
