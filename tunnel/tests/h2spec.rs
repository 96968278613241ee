//! Conformance of the tunnel's own HTTP/2 engine, in the role of an edge, to RFC 9113 and RFC 7541, checked by h2spec.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use bytes::Bytes;
use causeway_tunnel::{
    engine::{Error, RecvStream, server},
    wire,
};
use futures_util::{StreamExt, stream::FuturesUnordered};
use http::{Request, Response};
use std::{env, future::poll_fn, io::Write, net::Ipv4Addr};
use test_summary::Skipped;
use tokio::{
    net::{TcpListener, TcpStream},
    process::Command,
};

/// Body of each response. Some cases need one that is longer than their windows.
const BODY: &[u8] = b"an answer that is longer than the windows of some cases";

/// Window of each stream, in bytes: more than the largest frame, as that of a tunnel.
const STREAM_WINDOW: u32 = 1 << 20;
/// Cases that the engine fails on purpose: RFC 9113 section 5.3.2 deprecates priorities, of which these cases demand a check
/// (RFC 7540 section 5.3.1). The engine ignores priorities, and with them streams that depend on themselves.
const FAILED_ON_PURPOSE: [&str; 2] = [
    "Sends HEADERS frame that depend on itself",
    "Sends PRIORITY frame that depend on itself",
];

/// Whether h2spec is available. Reports the test as skipped if it is not.
async fn has_h2spec() -> bool {
    let output = Command::new("h2spec").arg("--version").output().await;
    if output.is_ok_and(|output| output.status.success()) {
        return true;
    }
    let command = r#"PATH="$(tests/h2spec/build):$PATH" cargo test -p causeway-tunnel"#;
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    // libtest hides the output of `eprintln!`.
    let mut stderr = std::io::stderr().lock();
    writeln!(stderr, "{name}: skipped: needs h2spec: {command}").unwrap();
    let skipped = Skipped::of_this_run(env!("CARGO_TARGET_TMPDIR"));
    skipped.add(&name, "needs h2spec", command).unwrap();
    false
}

/// Reads a request to its end, then answers it.
async fn answer(
    request: Request<RecvStream>,
    mut respond: server::SendResponse<Bytes>,
) -> Result<(), Error> {
    let mut body = request.into_body();
    while let Some(chunk) = poll_fn(|cx| body.poll_data(cx)).await {
        body.flow_control().release_capacity(chunk?.len())?;
    }
    poll_fn(|cx| body.poll_trailers(cx)).await?;
    let mut send = respond.send_response(Response::new(()), false)?;
    send.send_data(Bytes::from_static(BODY), true)
}

/// Serves a connection with the limits of an edge.
async fn serve(io: TcpStream) -> Result<(), Error> {
    let mut connection = server::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(wire::CONNECTION_WINDOW)
        .max_frame_size(wire::MAX_FRAME)
        .max_header_list_size(wire::MAX_HEADER_LIST)
        .max_concurrent_streams(100)
        .enable_connect_protocol()
        .handshake::<_, Bytes>(io)
        .await?;
    let mut answers = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(accepted) => {
                    let (request, respond) = accepted?;
                    answers.push(answer(request, respond));
                }
                None => return Ok(()),
            },
            // A stream that the peer has violated or reset is an ordinary end of its answer.
            Some(_) = answers.next() => {}
        }
    }
}

async fn serve_all(listener: TcpListener) {
    let mut connections = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => connections.push(serve(accepted.unwrap().0)),
            Some(_) = connections.next() => {}
        }
    }
}

#[tokio::test]
async fn the_engine_passes_h2spec() {
    if !has_h2spec().await {
        return;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let mut command = Command::new("h2spec");
    command
        .args(["--strict", "--timeout", "10", "--port", &port])
        // Five such fields, Huffman-coded, are larger than a frame of the size that the server announces.
        .args(["--max-header-length", "16000"])
        .kill_on_drop(true);
    let output = tokio::select! {
        output = command.output() => output.unwrap(),
        () = serve_all(listener) => unreachable!("the server does not end"),
    };
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(report.contains(" tests, "), "{report}");
    let (_, failures) = report.split_once("Failures:").unwrap_or_default();
    let failed = failures.lines().filter(|line| line.contains('×'));
    let failed: Vec<_> = failed
        .filter(|line| !FAILED_ON_PURPOSE.iter().any(|case| line.ends_with(case)))
        .collect();
    assert!(failed.is_empty(), "{failed:?}\n{failures}");
}
