//! Answers that apps give, good and bad, each a script for `App::http`.

use super::script::Script;
pub(crate) use super::script::pattern;
use std::fmt::Write;

const EMPTY: [(&str, &str); 0] = [];

/// 200 with this body, after the request's body has been read.
pub(crate) fn ok(body: &str) -> Script {
    Script::new().body().write(whole("200 OK", EMPTY, body))
}

/// 200 with these bytes.
pub(crate) fn bytes(body: &[u8]) -> Script {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
    Script::new().body().write(head).write(body)
}

/// Any status such as `404 Not Found`, with fields and body, after the request's body has been read.
pub(crate) fn status<'a>(
    status: &str,
    fields: impl IntoIterator<Item = (&'a str, &'a str)>,
    body: &str,
) -> Script {
    Script::new().body().write(whole(status, fields, body))
}

/// 200 with the request's body.
pub(crate) fn mirror() -> Script {
    Script::new().mirror()
}

/// Accepts the request and never answers.
pub(crate) fn silence() -> Script {
    Script::new().silence()
}

/// Bytes that are not HTTP.
pub(crate) fn garbage() -> Script {
    Script::new()
        .write("\x16\x03\x01 not HTTP at all\r\n\r\n")
        .close()
}

/// Promises 1000 bytes, sends `cut short` and closes.
pub(crate) fn close_in_mid_body() -> Script {
    Script::new().write(cut_short()).close()
}

/// Promises 1000 bytes, sends `cut short` and resets the connection once the gate opens.
///
/// The gate is for tests that wait until those bytes have arrived: a reset overtakes bytes in flight.
pub(crate) fn reset_in_mid_body(gate: &super::PauseGate) -> Script {
    Script::new().write(cut_short()).until(gate).reset()
}

/// Closes without an answer.
pub(crate) fn close() -> Script {
    Script::new().close()
}

/// Answers 413 while the body is still arriving, and discards the body.
pub(crate) fn before_the_body() -> Script {
    let answer = whole(
        "413 Content Too Large",
        [("Connection", "close")],
        "too much",
    );
    Script::new().write(answer).silence()
}

/// 100 as soon as the head was read, then 200 once the body was.
pub(crate) fn after_continue(body: &str) -> Script {
    Script::new()
        .write("HTTP/1.1 100 Continue\r\n\r\n")
        .body()
        .write(whole("200 OK", EMPTY, body))
}

/// 103 with a link, then 200.
pub(crate) fn after_hints(body: &str) -> Script {
    Script::new()
        .body()
        .write("HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n")
        .write(whole("200 OK", EMPTY, body))
}

/// `total` bytes of [`pattern`] in chunks of 64: enough to end a connection of an unmodified h2.
pub(crate) fn small_chunks(total: usize) -> Script {
    Script::new()
        .body()
        .write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        .chunks(64, total)
}

/// Returns the response to a HEAD: the length of a body that does not follow.
pub(crate) fn to_head(length: usize) -> Script {
    Script::new().body().write(format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n"
    ))
}

/// A body that ends with the connection.
pub(crate) fn until_close(body: &str) -> Script {
    Script::new()
        .body()
        .write(format!(
            "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{body}"
        ))
        .close()
}

/// A chunked body, a gate before each part: for bytes that must not be held back.
pub(crate) fn parts(kind: &str, parts: &[&str], gate: &super::PauseGate) -> Script {
    let head =
        format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n");
    let begun = Script::new().body().write(head);
    let told = parts.iter().fold(begun, |script, part| {
        let chunk = format!("{:x}\r\n{part}\r\n", part.len());
        script.until(gate).write(chunk)
    });
    told.until(gate).write("0\r\n\r\n")
}

/// A body without end; `App::end` reports when the client has left.
pub(crate) fn endless() -> Script {
    let chunk = format!("400\r\n{}\r\n", "x".repeat(0x400));
    Script::new()
        .body()
        .write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        .forever(chunk)
}

/// 101 to this protocol with `first` in the same segment, then echoes all bytes until the FIN.
pub(crate) fn switch(protocol: &str, first: &[u8]) -> Script {
    let head = format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n"
    );
    Script::new()
        .write([head.as_bytes(), first].concat())
        .echo()
}

/// Refuses an upgrade with this status (`403 Forbidden`) and a body of plain text.
pub(crate) fn refuse_upgrade(refusal: &str, body: &str) -> Script {
    let fields = [("Content-Type", "text/plain"), ("X-Refused-By", "the app")];
    status(refusal, fields, body)
}

fn whole<'a>(
    status: &str,
    fields: impl IntoIterator<Item = (&'a str, &'a str)>,
    body: &str,
) -> Vec<u8> {
    let mut answer = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in fields {
        let _ = write!(answer, "{name}: {value}\r\n");
    }
    format!("{answer}\r\n{body}").into_bytes()
}

fn cut_short() -> &'static str {
    "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ncut short"
}
