//! Proxy requests of programs on this machine: SOCKS5 and HTTP on one port.
//!
//! The first byte of a connection tells the two protocols apart: 5 is the version of SOCKS5 (RFC 1928), and no method of HTTP
//! begins with it. [`ProxyRequest::read`] returns the requested host without resolving it. The calling code connects, and then
//! accepts or refuses the request in the protocol of its client. A request for a URL with `http://` is then forwarded by
//! [`HttpExchange`]. All other requests are answered here with their reason. So are requests with a path alone, which a web page
//! can make a browser send to any port of its machine.

mod client_io;
mod http_exchange;

use crate::{http_fields::is_valid_length, lingering_close, socket::PrefixedStream};
use bytes::{Buf, BytesMut};
use fast_socks5::{
    ReplyError, Socks5Command,
    server::{Socks5ServerProtocol, SocksServerError, states::CommandRead},
};
use http_exchange::UrlPlace;
use httparse::Status;
use hyper::{
    Method, StatusCode, Uri,
    header::{CONTENT_LENGTH, HOST, HeaderName, HeaderValue, TRANSFER_ENCODING},
    http::uri::{Authority, PathAndQuery},
};
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

pub use http_exchange::HttpExchange;

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
    Connect(PrefixedStream<S>),
    Http(HttpExchange<S>),
}

/// Connection of a program whose request was accepted.
pub enum AcceptedClient<S> {
    /// The bytes of the program are for the destination.
    Bytes(PrefixedStream<S>),
    /// The program has sent an HTTP request for the destination.
    Http(HttpExchange<S>),
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

    /// Reports success to the client, unless the response of the destination does, and returns its connection.
    ///
    /// # Errors
    /// If the connection broke.
    pub async fn accept(self) -> Result<AcceptedClient<S>, ProxyRequestError> {
        let answer = async {
            let io = match self.client {
                Client::Socks5(socks) => socks.reply_success(UNKNOWN_ADDRESS).await?,
                Client::Connect(mut io) => {
                    io.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")
                        .await?;
                    io.flush().await?;
                    io
                }
                Client::Http(exchange) => return Ok(AcceptedClient::Http(exchange)),
            };
            Ok(AcceptedClient::Bytes(io))
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
                Client::Connect(io) | Client::Http(HttpExchange { client: io, .. }) => {
                    respond(io, failure.status(), reason).await;
                }
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
    let request = loop {
        match parse_http(&received) {
            Ok(Some(request)) => break request,
            Ok(None) if received.len() < MAX_HEAD_BYTES => {}
            Ok(None) => return reject(io, HttpRejection::TooLarge).await,
            Err(rejection) => return reject(io, rejection).await,
        }
        if io.read_buf(&mut received).await? == 0 {
            return Err(ProxyRequestError::Incomplete);
        }
    };
    let HttpRequest { host, port, kind } = request;
    let client = match kind {
        HttpRequestKind::Connect { head_bytes } => {
            received.advance(head_bytes);
            Client::Connect(PrefixedStream::new(received.freeze(), io))
        }
        HttpRequestKind::Forward(place) => Client::Http(HttpExchange {
            client: PrefixedStream::new(received.freeze(), io),
            place,
        }),
    };
    Ok(ProxyRequest { host, port, client })
}

/// Head of an HTTP request that can be served.
#[derive(Debug)]
struct HttpRequest {
    host: String,
    port: u16,
    kind: HttpRequestKind,
}

#[derive(Debug)]
enum HttpRequestKind {
    /// CONNECT. The bytes behind the head are for the destination.
    Connect { head_bytes: usize },
    /// Request for a URL with `http://`.
    Forward(UrlPlace),
}

/// Reason why an HTTP request cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
enum HttpRejection {
    Malformed,
    TooLarge,
    Ambiguous(&'static str),
    /// The method, of a target that is neither an authority nor a URL with `http://`.
    Target(String),
    Https,
    Authority(String),
}

/// Parses the head of a request, or returns `None` if more bytes are needed.
fn parse_http(received: &[u8]) -> Result<Option<HttpRequest>, HttpRejection> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut fields);
    let head_bytes = match request.parse(received) {
        Ok(Status::Complete(head_bytes)) if head_bytes <= MAX_HEAD_BYTES => head_bytes,
        Ok(Status::Complete(_)) | Err(httparse::Error::TooManyHeaders) => {
            return Err(HttpRejection::TooLarge);
        }
        Ok(Status::Partial) => return Ok(None),
        Err(_) => return Err(HttpRejection::Malformed),
    };
    let method = request.method.unwrap_or_default();
    let target = request.path.unwrap_or_default();
    let invalid = || HttpRejection::Authority(target.to_owned());
    if method == Method::CONNECT.as_str() {
        let (host, port) = parse_authority(target, None).ok_or_else(invalid)?;
        let kind = HttpRequestKind::Connect { head_bytes };
        return Ok(Some(HttpRequest { host, port, kind }));
    }
    let has_scheme = |scheme: &str| {
        let start = target.get(..scheme.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    if has_scheme("https://") {
        return Err(HttpRejection::Https);
    } else if !has_scheme("http://") {
        return Err(HttpRejection::Target(method.to_owned()));
    }
    let url = Uri::from_str(target).map_err(|_| invalid())?;
    let authority = url.authority().ok_or_else(invalid)?;
    let (host, port) = parse_authority(authority.as_str(), Some(80)).ok_or_else(invalid)?;
    check_unambiguous(&request).map_err(HttpRejection::Ambiguous)?;
    // RFC 9112 sections 3.2.1 and 3.2.4. The parsed URL does not tell whether its path is missing.
    let has_no_path = target.len() == "http://".len() + authority.as_str().len();
    let path = if has_no_path && method == Method::OPTIONS.as_str() {
        PathAndQuery::from_static("*")
    } else {
        url.path_and_query().cloned().ok_or_else(invalid)?
    };
    let kind = HttpRequestKind::Forward(UrlPlace {
        authority: HeaderValue::from_str(authority.as_str()).map_err(|_| invalid())?,
        target: Uri::from(path),
    });
    Ok(Some(HttpRequest { host, port, kind }))
}

/// Parses a host and a port, which may be missing if there is a default. The host is returned without brackets.
fn parse_authority(text: &str, default_port: Option<u16>) -> Option<(String, u16)> {
    let authority = Authority::from_str(text).ok()?;
    let host = authority.host();
    // The text begins with something else if it has user information.
    let port = match text.strip_prefix(host)? {
        "" => default_port?,
        port => {
            let digits = port.strip_prefix(':')?;
            let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse().ok().filter(|_| is_number)?
        }
    };
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let host = bare.unwrap_or(host);
    (is_host(host) && port != 0).then(|| (host.to_owned(), port))
}

/// Refuses a request that two parsers could read differently (RFC 9112 sections 3.2 and 6.3).
fn check_unambiguous(request: &httparse::Request<'_, '_>) -> Result<(), &'static str> {
    let values = |name: HeaderName| {
        let fields = request.headers.iter();
        let fields = fields.filter(move |field| field.name.eq_ignore_ascii_case(name.as_str()));
        fields.map(|field| field.value)
    };
    let is_http_11 = request.version == Some(1);
    let hosts = values(HOST).count();
    if hosts > 1 || (hosts == 0 && is_http_11) {
        return Err("the request does not have one Host");
    }
    let (mut lengths, mut codings) = (values(CONTENT_LENGTH), values(TRANSFER_ENCODING));
    match (lengths.next(), codings.next()) {
        (Some(_), Some(_)) => Err("the request has both Content-Length and Transfer-Encoding"),
        (Some(length), None) if !is_valid_length(length) || lengths.next().is_some() => {
            Err("the request has an invalid Content-Length")
        }
        (None, Some(coding))
            if !is_http_11
                || !coding.eq_ignore_ascii_case(b"chunked")
                || codings.next().is_some() =>
        {
            Err("a Transfer-Encoding must be chunked and nothing else")
        }
        _ => Ok(()),
    }
}

/// Answers a request that cannot be served.
async fn reject<S: AsyncRead + AsyncWrite + Unpin, T>(
    io: S,
    rejection: HttpRejection,
) -> Result<T, ProxyRequestError> {
    let (status, reason) = match rejection {
        HttpRejection::Malformed => (
            StatusCode::BAD_REQUEST,
            "this port is a proxy for HTTP and SOCKS5, and the request is neither".into(),
        ),
        HttpRejection::TooLarge => (
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            format!(
                "the request head has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} fields"
            ),
        ),
        HttpRejection::Ambiguous(reason) => (StatusCode::BAD_REQUEST, reason.into()),
        HttpRejection::Target(method) => (
            StatusCode::BAD_REQUEST,
            format!(
                "this port is a proxy for HTTP and SOCKS5, and no server: the target of {method} must begin with http://"
            ),
        ),
        HttpRejection::Https => (
            StatusCode::BAD_REQUEST,
            "a proxy serves URLs with https:// by CONNECT only".into(),
        ),
        HttpRejection::Authority(text) => (
            StatusCode::BAD_REQUEST,
            format!("{text:?} has no valid HOST:PORT"),
        ),
    };
    respond(io, status, &reason).await;
    Err(ProxyRequestError::Rejected(reason))
}

/// Sends an error response, and closes the connection once the client has read it.
async fn respond<S: AsyncRead + AsyncWrite + Unpin>(mut io: S, status: StatusCode, reason: &str) {
    let body = format!("{reason}\n");
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    if io.write_all(response.as_bytes()).await.is_ok() {
        lingering_close::close(io).await;
    }
}

/// Whether a text can be the host of a request: an address, or a name without characters that have a meaning there.
fn is_host(text: &str) -> bool {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_name = (1..=MAX_HOST_BYTES).contains(&text.len()) && text.bytes().all(is_name);
    is_name || text.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests;
