//! Proxy requests of programs on this machine: SOCKS5 and HTTP CONNECT on one port.
//!
//! The first byte of a connection tells the two protocols apart: 5 is the version of SOCKS5 (RFC 1928), and no method of HTTP
//! begins with it. [`ProxyRequest::read`] returns the requested host without resolving it. The calling code connects, and then
//! accepts or refuses the request in the protocol of its client. All other requests are answered here with their reason.

use crate::{lingering_close, socket::PrefixedStream};
use bytes::{Buf, BytesMut};
use fast_socks5::{
    ReplyError, Socks5Command,
    server::{Socks5ServerProtocol, SocksServerError, states::CommandRead},
};
use httparse::Status;
use hyper::{Method, StatusCode, http::uri::Authority};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    str::FromStr,
    time::Duration,
};
use thiserror::Error;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

/// Maximum number of bytes of an HTTP request head. A CONNECT of a browser has less than 1 KiB.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// Maximum number of header fields of an HTTP request.
const MAX_HEADERS: usize = 64;
/// Maximum number of bytes of a host name: the length of a domain in a SOCKS5 request is one byte.
const MAX_HOST_BYTES: usize = 255;
/// Maximum time to write an answer. Each answer is shorter than any send buffer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Answer to a request of SOCKS4: version 0, code 91 (request rejected), and six bytes that are ignored.
const SOCKS4_REJECTED: [u8; 8] = [0, 91, 0, 0, 0, 0, 0, 0];
/// Address in a SOCKS5 reply: the local address of the connection is unknown.
const UNKNOWN_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Request of a local program for a connection to a host.
pub struct ProxyRequest<S> {
    /// Requested host: a name that nobody has resolved, or an address without brackets.
    pub host: String,
    /// Requested port.
    pub port: u16,
    client: Client<S>,
}

/// Connection of the program, in the protocol of its request.
enum Client<S> {
    Socks5(Box<Socks5ServerProtocol<PrefixedStream<S>, CommandRead>>),
    Http(PrefixedStream<S>),
}

/// Kind of a failed connection, for the code of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectFailure {
    /// A rule forbids the connection: 403, SOCKS5 code 2.
    Forbidden,
    /// The host is unknown or not connected: 502, SOCKS5 code 4.
    Unreachable,
    /// The host refused the connection: 502, SOCKS5 code 5.
    Refused,
    /// The host did not answer in time: 504, SOCKS5 code 6.
    TimedOut,
    /// Any other failure: 502, SOCKS5 code 1.
    Other,
}

impl ConnectFailure {
    fn status(self) -> StatusCode {
        match self {
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::TimedOut => StatusCode::GATEWAY_TIMEOUT,
            Self::Unreachable | Self::Refused | Self::Other => StatusCode::BAD_GATEWAY,
        }
    }

    fn reply(self) -> ReplyError {
        match self {
            Self::Forbidden => ReplyError::ConnectionNotAllowed,
            Self::Unreachable => ReplyError::HostUnreachable,
            Self::Refused => ReplyError::ConnectionRefused,
            Self::TimedOut => ReplyError::TtlExpired,
            Self::Other => ReplyError::GeneralFailure,
        }
    }
}

/// Reason why a connection had no usable proxy request. The client has received an answer, if its protocol has one.
#[derive(Debug, Error)]
pub enum ProxyRequestError {
    /// The client closed the connection before its request was complete.
    #[error("the connection ended before the request was complete")]
    Incomplete,
    /// The request was not complete in time.
    #[error("the request was not complete within {0:?}")]
    TimedOut(Duration),
    /// The request cannot be served.
    #[error("{0}")]
    Rejected(String),
    /// The client violated SOCKS5, or its connection broke.
    #[error("SOCKS5: {0}")]
    Socks5(#[from] SocksServerError),
    /// The connection broke.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl<S: AsyncRead + AsyncWrite + Unpin> ProxyRequest<S> {
    /// Reads the request of a new connection, within `limit`.
    ///
    /// # Errors
    /// If there is no usable request. The connection is then closed.
    pub async fn read(io: S, limit: Duration) -> Result<Self, ProxyRequestError> {
        timeout(limit, Self::read_unbounded(io))
            .await
            .unwrap_or(Err(ProxyRequestError::TimedOut(limit)))
    }

    async fn read_unbounded(mut io: S) -> Result<Self, ProxyRequestError> {
        let mut received = BytesMut::with_capacity(1024);
        io.read_buf(&mut received).await?;
        match received.first() {
            None => Err(ProxyRequestError::Incomplete),
            Some(5) => read_socks5(PrefixedStream::new(received.freeze(), io)).await,
            Some(4) => {
                io.write_all(&SOCKS4_REJECTED).await?;
                lingering_close::close(io).await;
                let why = "SOCKS4 is not supported; use SOCKS5 or HTTP CONNECT";
                Err(ProxyRequestError::Rejected(why.into()))
            }
            Some(_) => read_http(received, io).await,
        }
    }

    /// Reports success to the client, and returns its connection.
    ///
    /// # Errors
    /// If the connection broke.
    pub async fn accept(self) -> Result<PrefixedStream<S>, ProxyRequestError> {
        let answer = async {
            match self.client {
                Client::Socks5(socks) => Ok(socks.reply_success(UNKNOWN_ADDRESS).await?),
                Client::Http(mut io) => {
                    io.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")
                        .await?;
                    io.flush().await?;
                    Ok(io)
                }
            }
        };
        timeout(ANSWER_TIMEOUT, answer)
            .await
            .unwrap_or(Err(ProxyRequestError::TimedOut(ANSWER_TIMEOUT)))
    }

    /// Reports a failure to the client, and closes the connection. A SOCKS5 reply has only a code; an HTTP response also has the
    /// reason.
    pub async fn refuse(self, failure: ConnectFailure, reason: &str) {
        let answer = async {
            match self.client {
                Client::Socks5(socks) => {
                    // The client is gone if this fails.
                    let _ = socks.reply_error(&failure.reply()).await;
                }
                Client::Http(io) => respond(io, failure.status(), "", reason).await,
            }
        };
        let _ = timeout(ANSWER_TIMEOUT, answer).await;
    }
}

async fn read_socks5<S: AsyncRead + AsyncWrite + Unpin>(
    io: PrefixedStream<S>,
) -> Result<ProxyRequest<S>, ProxyRequestError> {
    let socks = Socks5ServerProtocol::accept_no_auth(io).await?;
    let (socks, command, address) = socks.read_command().await?;
    if !matches!(command, Socks5Command::TCPConnect) {
        socks.reply_error(&ReplyError::CommandNotSupported).await?;
        let why = "SOCKS5: BIND and UDP ASSOCIATE are not supported";
        return Err(ProxyRequestError::Rejected(why.into()));
    }
    let (host, port) = address.into_string_and_port();
    if !is_host(&host) || port == 0 {
        socks.reply_error(&ReplyError::HostUnreachable).await?;
        let why = format!("SOCKS5: {host:?} with port {port} is not a valid host and port");
        return Err(ProxyRequestError::Rejected(why));
    }
    let client = Client::Socks5(Box::new(socks));
    Ok(ProxyRequest { host, port, client })
}

async fn read_http<S: AsyncRead + AsyncWrite + Unpin>(
    mut received: BytesMut,
    mut io: S,
) -> Result<ProxyRequest<S>, ProxyRequestError> {
    loop {
        match parse_connect(&received) {
            Ok(Some((head_bytes, host, port))) => {
                received.advance(head_bytes);
                let client = Client::Http(PrefixedStream::new(received.freeze(), io));
                return Ok(ProxyRequest { host, port, client });
            }
            Ok(None) if received.len() < MAX_HEAD_BYTES => {}
            Ok(None) => return reject(io, HttpRejection::TooLarge).await,
            Err(rejection) => return reject(io, rejection).await,
        }
        if io.read_buf(&mut received).await? == 0 {
            return Err(ProxyRequestError::Incomplete);
        }
    }
}

/// Reason why an HTTP request cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
enum HttpRejection {
    Malformed,
    TooLarge,
    Method(String),
    Authority(String),
}

/// Returns the length of a complete CONNECT request, its host and its port, or `None` if more bytes are needed.
fn parse_connect(received: &[u8]) -> Result<Option<(usize, String, u16)>, HttpRejection> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut fields);
    let head_bytes = match request.parse(received) {
        Ok(Status::Complete(head_bytes)) => head_bytes,
        Ok(Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(HttpRejection::TooLarge),
        Err(_) => return Err(HttpRejection::Malformed),
    };
    let method = request.method.unwrap_or_default();
    if method != Method::CONNECT.as_str() {
        return Err(HttpRejection::Method(method.to_owned()));
    }
    let text = request.path.unwrap_or_default();
    let authority = Authority::from_str(text).ok();
    let target = authority.and_then(|authority| {
        let host = authority.host();
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        let host = bare.unwrap_or(host);
        let port = authority.port_u16().filter(|port| *port != 0)?;
        (is_host(host) && !text.contains('@')).then(|| (host.to_owned(), port))
    });
    match target {
        Some((host, port)) => Ok(Some((head_bytes, host, port))),
        None => Err(HttpRejection::Authority(text.to_owned())),
    }
}

/// Answers a request that cannot be served.
async fn reject<S: AsyncRead + AsyncWrite + Unpin, T>(
    io: S,
    rejection: HttpRejection,
) -> Result<T, ProxyRequestError> {
    let (status, field, reason) = match rejection {
        HttpRejection::Malformed => (
            StatusCode::BAD_REQUEST,
            "",
            "this port is a proxy for HTTP CONNECT and SOCKS5, and the request is neither".into(),
        ),
        HttpRejection::TooLarge => (
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            "",
            format!(
                "the request head has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} fields"
            ),
        ),
        HttpRejection::Method(method) => (
            StatusCode::METHOD_NOT_ALLOWED,
            "Allow: CONNECT\r\n",
            format!(
                "this port is a proxy for HTTP CONNECT and SOCKS5; it does not serve {method} (for URLs with http:// \
                 use SOCKS5, or curl --proxytunnel)"
            ),
        ),
        HttpRejection::Authority(text) => (
            StatusCode::BAD_REQUEST,
            "",
            format!("{text:?} is not a valid HOST:PORT"),
        ),
    };
    respond(io, status, field, &reason).await;
    Err(ProxyRequestError::Rejected(reason))
}

/// Sends an error response, and closes the connection once the client has read it.
async fn respond<S: AsyncRead + AsyncWrite + Unpin>(
    mut io: S,
    status: StatusCode,
    field: &str,
    reason: &str,
) {
    let body = format!("{reason}\n");
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n{field}Connection: close\r\n\r\n{body}",
        body.len()
    );
    if io.write_all(response.as_bytes()).await.is_ok() {
        lingering_close::close(io).await;
    }
}

/// Whether a text can be the host of a CONNECT request: an address, or a name without characters that have a meaning there.
fn is_host(text: &str) -> bool {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_name = (1..=MAX_HOST_BYTES).contains(&text.len()) && text.bytes().all(is_name);
    is_name || text.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests;
