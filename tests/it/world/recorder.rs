//! Strict upstream: it reads HTTP/1.1 as strictly as the RFC allows and records every byte that it received.
//!
//! The narrowest interpretation of RFC 9112 decides what a request is and where the next begins: CRLF only, one Host, one
//! length or `chunked` alone. Input that needs a wider interpretation is a fault, and stays in the record as one.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nit";

/// Bytes that a connection delivered as one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReceivedRequest {
    pub(crate) method: String,
    pub(crate) target: String,
    /// In order; bytes are characters.
    pub(crate) fields: Vec<(String, String)>,
    /// `None`: the body never came to its end.
    pub(crate) body: Option<String>,
}

impl ReceivedRequest {
    /// The values of the fields of one name.
    pub(crate) fn values(&self, name: &str) -> Vec<&str> {
        let mut fields: Vec<_> = self.fields.iter().collect();
        fields.retain(|(found, _)| found.eq_ignore_ascii_case(name));
        fields
            .into_iter()
            .map(|(_, value)| value.as_str())
            .collect()
    }
}

type Seen = Arc<Mutex<Vec<Result<ReceivedRequest, String>>>>;

/// The app; dropping it ends it.
pub(crate) struct Recorder {
    address: SocketAddr,
    seen: Seen,
    _serving: JoinSet<()>,
}

impl Recorder {
    /// Listens on a port of loopback.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Seen::default();
        let mut serving = JoinSet::new();
        let record = seen.clone();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                connections.spawn(serve(socket, record.clone()));
            }
        });
        Self {
            address,
            seen,
            _serving: serving,
        }
    }

    /// Returns the address that the recorder listens on.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the requests since the last call, in order of their beginning. A fault is input that no strict parser would
    /// accept.
    pub(crate) fn take(&self) -> Vec<Result<ReceivedRequest, String>> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

async fn serve(mut socket: TcpStream, seen: Seen) {
    let mut bytes = Vec::new();
    loop {
        let begun = bytes.len();
        if begun == 0 && !more(&mut socket, &mut bytes).await {
            return;
        }
        let head = loop {
            match split(&bytes, b"\r\n\r\n") {
                Some(length) => break text(&bytes.drain(..length).collect::<Vec<_>>()),
                None if more(&mut socket, &mut bytes).await => {}
                None => {
                    let fault = format!("half a head: {:?}", text(&bytes));
                    return seen.lock().unwrap().push(Err(fault));
                }
            }
        };
        let arrived = match parse(&head) {
            Ok(arrived) => arrived,
            Err(why) => return seen.lock().unwrap().push(Err(format!("{why}: {head:?}"))),
        };
        let place = {
            let mut seen = seen.lock().unwrap();
            seen.push(Ok(arrived.clone()));
            seen.len() - 1
        };
        let Some(body) = body(&mut socket, &mut bytes, &arrived).await else {
            return;
        };
        let entry = body.map(|body| ReceivedRequest {
            body: Some(body),
            ..arrived
        });
        // A test that has taken the record meanwhile has seen the head, and no end.
        if let Some(slot) = seen.lock().unwrap().get_mut(place) {
            *slot = entry;
        }
        if socket.write_all(ANSWER).await.is_err() {
            return;
        }
    }
}

/// A body as the head frames it; `None` if it breaks off.
async fn body(
    socket: &mut TcpStream,
    bytes: &mut Vec<u8>,
    head: &ReceivedRequest,
) -> Option<Result<String, String>> {
    if !head.values("transfer-encoding").is_empty() {
        return chunks(socket, bytes).await;
    }
    let length = head.values("content-length").first().map_or("0", |v| v);
    let length: usize = length.parse().unwrap();
    Some(Ok(text(&exactly(socket, bytes, length).await?)))
}

async fn chunks(socket: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<Result<String, String>> {
    let mut body = String::new();
    loop {
        let line = line(socket, bytes).await?;
        let hex = !line.is_empty() && line.bytes().all(|byte| byte.is_ascii_hexdigit());
        let size = usize::from_str_radix(&line, 16);
        let Some(size) = size.ok().filter(|_| hex) else {
            return Some(Err(format!("a chunk's size is {line:?}")));
        };
        if size == 0 {
            break;
        }
        body += &text(&exactly(socket, bytes, size).await?);
        if exactly(socket, bytes, 2).await? != b"\r\n" {
            return Some(Err("a chunk is longer than its size".into()));
        }
    }
    while !line(socket, bytes).await?.is_empty() {}
    Some(Ok(body))
}

async fn line(socket: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<String> {
    loop {
        if let Some(length) = split(bytes, b"\r\n") {
            let line: Vec<u8> = bytes.drain(..length).collect();
            return Some(text(&line[..length - 2]));
        }
        more(socket, bytes).await.then_some(())?;
    }
}

async fn exactly(socket: &mut TcpStream, bytes: &mut Vec<u8>, length: usize) -> Option<Vec<u8>> {
    while bytes.len() < length {
        more(socket, bytes).await.then_some(())?;
    }
    Some(bytes.drain(..length).collect())
}

async fn more(socket: &mut TcpStream, bytes: &mut Vec<u8>) -> bool {
    matches!(socket.read_buf(bytes).await, Ok(length) if length > 0)
}

fn split(bytes: &[u8], end: &[u8]) -> Option<usize> {
    let found = bytes.windows(end.len()).position(|part| part == end)?;
    Some(found + end.len())
}

/// Bytes as characters of the same number.
pub(crate) fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

fn parse(head: &str) -> Result<ReceivedRequest, &'static str> {
    let head = head.strip_suffix("\r\n\r\n").ok_or("no end")?;
    let mut lines = head.split("\r\n");
    let ours = |c: char| c == '\t' || !c.is_ascii_control();
    let words: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, "HTTP/1.1"] = words[..] else {
        return Err("the request line has other than three words");
    };
    let token = |c: char| c.is_ascii_graphic() && !"()<>@,;:\\\"/[]?={}".contains(c);
    if method.is_empty() || !method.chars().all(token) {
        return Err("the method is no token");
    }
    if target.is_empty() || target.chars().any(|c| c <= ' ' || c == '\x7f') {
        return Err("the target has a control character");
    }
    let mut arrived = ReceivedRequest {
        method: method.into(),
        target: target.into(),
        ..ReceivedRequest::default()
    };
    for line in lines {
        let (name, value) = line.split_once(':').ok_or("a line has no colon")?;
        if name.is_empty() || !name.chars().all(token) {
            return Err("a field's name is no token");
        }
        if !value.chars().all(ours) {
            return Err("a field has a control character");
        }
        let value = value.trim_matches([' ', '\t']);
        arrived.fields.push((name.into(), value.into()));
    }
    let lengths = arrived.values("content-length");
    let codings = arrived.values("transfer-encoding");
    let digits = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if arrived.values("host").len() != 1 {
        return Err("other than one Host");
    }
    if lengths.len() + codings.len() > 1 || !lengths.iter().all(digits) {
        return Err("the length can be read in two ways");
    }
    if codings.iter().any(|coding| *coding != "chunked") {
        return Err("a transfer coding that is not chunked");
    }
    Ok(arrived)
}
