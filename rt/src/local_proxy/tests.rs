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
    let mut stream = request.accept().await.unwrap();
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
        drop(request.accept().await.unwrap());
        let expected = [5, 0, 5, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        assert_eq!(answer(client).await, expected);
    }
}

#[tokio::test]
async fn bytes_behind_a_socks5_request_are_kept() {
    let sent = [socks5("edge-1", 22), b"early".to_vec()].concat();
    let (request, mut client) = read(&sent).await;
    let mut stream = request.ok().unwrap().accept().await.unwrap();
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
        let (request, client) = read(b"CONNECT edge-1:22 HTTP/1.1\r\n\r\n").await;
        request
            .ok()
            .unwrap()
            .refuse(failure, "edge-1 is away")
            .await;
        let text = String::from_utf8(answer(client).await).unwrap();
        assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{text}");
        assert!(text.ends_with("\r\n\r\nedge-1 is away\n"), "{text}");

        let (request, client) = read(&socks5("edge-1", 22)).await;
        request.ok().unwrap().refuse(failure, "").await;
        assert_eq!(answer(client).await[2..4], [5, code]);
    }
}

#[tokio::test]
async fn requests_that_are_no_connect_get_their_reason() {
    let many = "X: y\r\n".repeat(MAX_HEADERS + 1);
    let long = format!("X: {}\r\n", "y".repeat(MAX_HEAD_BYTES));
    let cases = [
        (
            "GET / HTTP/1.1\r\n\r\n".to_owned(),
            "405",
            "does not serve GET",
        ),
        (
            "GET http://edge-1/ HTTP/1.1\r\n\r\n".to_owned(),
            "405",
            "--proxytunnel",
        ),
        (
            "CONNECT edge-1 HTTP/1.1\r\n\r\n".to_owned(),
            "400",
            "\"edge-1\" is not",
        ),
        (
            "CONNECT edge-1:0 HTTP/1.1\r\n\r\n".to_owned(),
            "400",
            "is not a valid",
        ),
        (
            "CONNECT me@edge-1:1 HTTP/1.1\r\n\r\n".to_owned(),
            "400",
            "is not a valid",
        ),
        ("\u{16}\u{3}\u{1}\r\n\r\n".to_owned(), "400", "neither"),
        (
            format!("CONNECT edge-1:1 HTTP/1.1\r\n{many}\r\n"),
            "431",
            "fields",
        ),
        (
            format!("CONNECT edge-1:1 HTTP/1.1\r\n{long}\r\n"),
            "431",
            "bytes",
        ),
    ];
    for (request, status, reason) in cases {
        let (error, answer) = rejected(request.as_bytes()).await;
        let text = String::from_utf8(answer).unwrap();
        assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{text}");
        assert!(text.contains(reason) && error.contains(reason), "{text}");
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
