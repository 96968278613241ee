use super::*;
use tokio::io::{DuplexStream, duplex};

const LIMIT: Duration = Duration::from_secs(10);

/// Requests of SOCKS5 for a CONNECT: the methods (none), the command, the kind of address.
const SOCKS5_DOMAIN: &[u8] = &[5, 1, 0, 5, 1, 0, 3];

fn socks5(host: &str, port: u16) -> Vec<u8> {
    let length = u8::try_from(host.len()).unwrap();
    [
        SOCKS5_DOMAIN,
        &[length],
        host.as_bytes(),
        &port.to_be_bytes(),
    ]
    .concat()
}

/// Returns the result of reading these bytes, and the client's end.
async fn read(
    bytes: &[u8],
) -> (
    Result<ProxyRequest<DuplexStream>, ProxyRequestError>,
    DuplexStream,
) {
    let (mut client, server) = duplex(64 * 1024);
    client.write_all(bytes).await.unwrap();
    (ProxyRequest::read(server, LIMIT).await, client)
}

/// Returns the error of reading these bytes, and the client's answer.
async fn rejected(bytes: &[u8]) -> (String, Vec<u8>) {
    let (mut client, server) = duplex(64 * 1024);
    client.write_all(bytes).await.unwrap();
    client.shutdown().await.unwrap();
    let error = ProxyRequest::read(server, LIMIT).await.err().unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    (error.to_string(), answer)
}

/// Accepts a request for a connection of bytes.
async fn accepted(request: ProxyRequest<DuplexStream>) -> PrefixedStream<DuplexStream> {
    match request.accept().await {
        Ok(AcceptedClient::Bytes(stream)) => stream,
        _ => panic!("not accepted"),
    }
}

async fn answer(mut client: DuplexStream) -> Vec<u8> {
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn connect_of_curl_is_accepted_and_early_bytes_are_kept() {
    let head = "CONNECT edge-1:22 HTTP/1.1\r\nHost: edge-1:22\r\nUser-Agent: curl/8\r\nProxy-Connection: Keep-Alive\r\n\r\n";
    let (request, mut client) = read(format!("{head}SSH-2.0").as_bytes()).await;
    let request = request.ok().unwrap();
    assert_eq!((request.host.as_str(), request.port), ("edge-1", 22));
    let mut stream = accepted(request).await;
    client.write_all(b"-x").await.unwrap();
    client.shutdown().await.unwrap();
    let mut received = String::new();
    stream.read_to_string(&mut received).await.unwrap();
    assert_eq!(received, "SSH-2.0-x");
    drop(stream);
    let text = String::from_utf8(answer(client).await).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 ") && text.ends_with("\r\n\r\n"));
}

#[tokio::test]
async fn socks5_names_of_255_bytes_are_passed_on_unresolved() {
    for host in ["edge-1", &"a".repeat(255)] {
        let (request, client) = read(&socks5(host, 9100)).await;
        let request = request.ok().unwrap();
        assert_eq!((request.host.as_str(), request.port), (host, 9100));
        drop(accepted(request).await);
        let expected = [5, 0, 5, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        assert_eq!(answer(client).await, expected);
    }
}

#[tokio::test]
async fn bytes_behind_a_socks5_request_are_kept() {
    let sent = [socks5("edge-1", 22), b"early".to_vec()].concat();
    let (request, mut client) = read(&sent).await;
    let mut stream = accepted(request.ok().unwrap()).await;
    client.shutdown().await.unwrap();
    let mut received = String::new();
    stream.read_to_string(&mut received).await.unwrap();
    assert_eq!(received, "early");
}

#[tokio::test]
async fn addresses_have_no_brackets_in_either_protocol() {
    let v6 = [&[5, 1, 0, 5, 1, 0, 4][..], &[0; 15], &[1, 0, 80]].concat();
    for bytes in [b"CONNECT [::1]:80 HTTP/1.1\r\n\r\n".to_vec(), v6] {
        let (request, _client) = read(&bytes).await;
        let request = request.ok().unwrap();
        assert_eq!((request.host.as_str(), request.port), ("::1", 80));
    }
}

#[tokio::test(start_paused = true)]
async fn each_failure_has_its_code_and_http_the_reason() {
    for (failure, status, code) in [
        (ConnectFailure::Forbidden, "403", 2),
        (ConnectFailure::Unreachable, "502", 4),
        (ConnectFailure::Refused, "502", 5),
        (ConnectFailure::TimedOut, "504", 6),
        (ConnectFailure::Other, "502", 1),
    ] {
        for head in ["CONNECT edge-1:22", "GET http://edge-1/"] {
            let head = format!("{head} HTTP/1.1\r\nHost: edge-1\r\n\r\n");
            let (request, client) = read(head.as_bytes()).await;
            let request = request.ok().unwrap();
            request.refuse(failure, "edge-1 is away").await;
            let text = String::from_utf8(answer(client).await).unwrap();
            assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{text}");
            assert!(text.ends_with("\r\n\r\nedge-1 is away\n"), "{text}");
        }

        let (request, client) = read(&socks5("edge-1", 22)).await;
        request.ok().unwrap().refuse(failure, "").await;
        assert_eq!(answer(client).await[2..4], [5, code]);
    }
}

#[tokio::test]
async fn a_request_for_a_url_names_its_host_and_port() {
    for (url, host, port) in [
        ("http://edge-1/", "edge-1", 80),
        ("HTTP://edge-1:3000?x=1", "edge-1", 3000),
        ("http://[2001:db8::1]:8080/", "2001:db8::1", 8080),
    ] {
        for version in ["1.0", "1.1"] {
            let head = format!("GET {url} HTTP/{version}\r\nHost: other\r\n\r\n");
            let (request, _client) = read(head.as_bytes()).await;
            let request = request.ok().unwrap();
            assert_eq!((request.host.as_str(), request.port), (host, port));
            assert!(matches!(
                request.accept().await,
                Ok(AcceptedClient::Http(_))
            ));
        }
    }
}

/// Checks that each of these requests is refused with 400, and this part of the reason.
async fn assert_refused(requests: &[(String, &str)]) {
    for (head, reason) in requests {
        let (error, answer) = rejected(head.as_bytes()).await;
        let text = String::from_utf8(answer).unwrap();
        assert!(text.starts_with("HTTP/1.1 400 "), "{head}: {text}");
        assert!(
            text.contains(reason) && error.contains(reason),
            "{head}: {text}"
        );
    }
}

#[tokio::test]
async fn targets_that_cannot_be_served_get_their_reason() {
    let get = |target: &str| format!("GET {target} HTTP/1.1\r\nHost: edge-1\r\n\r\n");
    let connect = |target: &str| format!("CONNECT {target} HTTP/1.1\r\n\r\n");
    assert_refused(&[
        (get("/"), "target of GET must begin with http://"),
        (get("edge-1:80"), "must begin with http://"),
        (get("*"), "must begin with http://"),
        (get("ftp://edge-1/"), "must begin with http://"),
        (get("https://edge-1/"), "by CONNECT only"),
        (get("http://"), "no valid HOST:PORT"),
        (get("http://me@edge-1/"), "no valid HOST:PORT"),
        (get("http://edge-1:0/"), "no valid HOST:PORT"),
        (get("http://edge-1:65536/"), "no valid HOST:PORT"),
        (get("http://edge-1:+80/"), "no valid HOST:PORT"),
        (get("http://ed%67e-1/"), "no valid HOST:PORT"),
        (connect("edge-1"), "\"edge-1\" has no valid HOST:PORT"),
        (connect("edge-1:0"), "no valid HOST:PORT"),
        (connect("me@edge-1:1"), "no valid HOST:PORT"),
        ("\u{16}\u{3}\u{1}\r\n\r\n".to_owned(), "neither"),
    ])
    .await;
}

#[tokio::test]
async fn requests_that_two_parsers_could_read_differently_are_refused() {
    let post = |fields: &str| format!("POST http://edge-1/ HTTP/1.1\r\n{fields}\r\n\r\n");
    let body = |fields: &str| post(&format!("Host: edge-1\r\n{fields}"));
    let old = "POST http://edge-1/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n";
    let (length, chunked) = ("Content-Length: 1", "Transfer-Encoding: chunked");
    assert_refused(&[
        (post("X: y"), "one Host"),
        (post("Host: a\r\nhost: a"), "one Host"),
        (
            body(&format!("{length}\r\n{chunked}")),
            "both Content-Length",
        ),
        (
            body(&format!("{length}\r\n{length}")),
            "invalid Content-Length",
        ),
        (body("Content-Length: 1, 1"), "invalid Content-Length"),
        (body("Content-Length: +1"), "invalid Content-Length"),
        (body(&format!("{chunked}\r\n{chunked}")), "nothing else"),
        (body("Transfer-Encoding: gzip, chunked"), "nothing else"),
        (body("Transfer-Encoding: xchunked"), "nothing else"),
        (old.to_owned(), "nothing else"),
        (body("X : y"), "neither"),
        (body("X: y\r\n z"), "neither"),
    ])
    .await;
}

#[tokio::test]
async fn heads_that_are_too_large_are_refused() {
    let many = "X: y\r\n".repeat(MAX_HEADERS + 1);
    let long = format!("X: {}\r\n", "y".repeat(MAX_HEAD_BYTES));
    for line in ["CONNECT edge-1:1", "GET http://edge-1/"] {
        for (fields, reason) in [(&many, "fields"), (&long, "bytes")] {
            let head = format!("{line} HTTP/1.1\r\n{fields}\r\n");
            let (error, answer) = rejected(head.as_bytes()).await;
            let text = String::from_utf8(answer).unwrap();
            assert!(text.starts_with("HTTP/1.1 431 "), "{text}");
            assert!(text.contains(reason) && error.contains(reason), "{text}");
        }
    }
}

#[tokio::test]
async fn socks_requests_without_connect_get_their_code() {
    let command = |command| [5, 1, 0, 5, command, 0, 1, 127, 0, 0, 1, 0, 80];
    let bad_host = socks5("edge-1:1 HTTP/1.1\r\nx", 80);
    for (bytes, answer) in [
        (command(2).to_vec(), vec![5, 0, 5, 7]),
        (command(3).to_vec(), vec![5, 0, 5, 7]),
        (command(9).to_vec(), vec![5, 0, 5, 7]),
        (bad_host, vec![5, 0, 5, 4]),
        (vec![5, 1, 2], vec![5, 255]),
        (vec![4, 1, 0, 80, 127, 0, 0, 1, 0], vec![0, 91]),
    ] {
        let (_, received) = rejected(&bytes).await;
        assert_eq!(received.get(..answer.len()), Some(&answer[..]), "{bytes:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_does_not_end_is_given_up() {
    for start in [&b"CONNECT edge-1:22 HTTP/1.1\r\n"[..], &[5, 1], &[]] {
        let (request, _client) = read(start).await;
        let error = request.err().unwrap();
        assert!(matches!(error, ProxyRequestError::TimedOut(_)), "{error}");
    }
    let (error, _) = rejected(b"CONNECT edge-1").await;
    assert!(error.contains("ended before"), "{error}");
}
