//! Checks and properties of a request, before any decision about it.
//!
//! The module is pure. It does the checks that the parser leaves to us: the number of Hosts, whether Host fits the target, and
//! control characters. It determines the kind of stream that the request asks for, and the authority that it names. An ambiguous
//! request is refused here, so that policy and upstream never see two different requests.

use crate::{
    config,
    error::{Error, Reason},
};
use causeway_tunnel::{
    StreamKind, headers,
    request_target::{MAX_URI_BYTES, TargetOverflow},
    wire,
};
use http::{
    HeaderMap, HeaderValue, Method, Request, Version,
    header::{AUTHORIZATION, CONTENT_LENGTH, HOST, PROXY_AUTHORIZATION, TRANSFER_ENCODING},
};
use http_body::Body;

impl From<&StreamKind> for config::policy::Action {
    fn from(kind: &StreamKind) -> Self {
        match kind {
            StreamKind::Request => Self::Request,
            StreamKind::Upgrade(_) => Self::Upgrade,
            StreamKind::Tcp => Self::Connect,
        }
    }
}

/// Limits of a request head.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// Maximum length of the target, in bytes.
    pub target_bytes: usize,
    /// Maximum size of the fields, in bytes.
    pub header_bytes: usize,
    /// Maximum number of fields.
    pub max_headers: usize,
}

/// Refuses a request that is too large or ambiguous.
///
/// # Errors
/// [`Reason::UriTooLong`], [`Reason::HeaderTooLarge`] or [`Reason::Malformed`]; [`Reason::LimitReached`] if no memory is left for
/// long targets.
pub fn check<B>(request: &Request<B>, limits: RequestLimits) -> Result<(), Error> {
    check_target(request, limits.target_bytes)?;
    let fields = request.headers();
    let (header_bytes, headers) = (limits.header_bytes, limits.max_headers);
    if fields.len() > headers {
        let detail = format!(
            "the request has {} header fields; at most {headers} are allowed",
            fields.len()
        );
        return Err(Reason::HeaderTooLarge.error(detail));
    }
    // Counted like an HTTP/2 header list (RFC 9113 §6.5.2), without its 32 bytes per field.
    let size: usize = fields
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + 4)
        .sum();
    if size > header_bytes {
        let detail = format!(
            "the request's fields have {size} bytes, at most {header_bytes} are allowed (limits.max_header_bytes)"
        );
        return Err(Reason::HeaderTooLarge.error(detail));
    }
    if fields.get_all(HOST).iter().nth(1).is_some() {
        return Err(Reason::Malformed.error("the request has more than one Host"));
    }
    // With several fields, the gateway could check one and the app could use the other (RFC 9110 §11.6.2 allows one).
    for (name, detail) in [
        (AUTHORIZATION, "the request has more than one Authorization"),
        (
            PROXY_AUTHORIZATION,
            "the request has more than one Proxy-Authorization",
        ),
    ] {
        if fields.get_all(name).iter().nth(1).is_some() {
            return Err(Reason::Malformed.error(detail));
        }
    }
    if fields.contains_key(CONTENT_LENGTH) && fields.contains_key(TRANSFER_ENCODING) {
        return Err(
            Reason::Malformed.error("the request has both Content-Length and Transfer-Encoding")
        );
    }
    if !headers::is_unencoded_or_chunked(fields) {
        return Err(Reason::Malformed.error("a Transfer-Encoding must be chunked and nothing else"));
    }
    if request.version() == Version::HTTP_11 && !fields.contains_key(HOST) {
        return Err(Reason::Malformed.error("an HTTP/1.1 request needs a Host"));
    }
    check_path(request)
}

/// Refuses a target that is too long, or that was not stored for another reason (see `listener::LongTarget`).
fn check_target<B>(request: &Request<B>, max_bytes: usize) -> Result<(), Error> {
    let extensions = request.extensions();
    let rejection = extensions.get::<Reason>().copied();
    if let Some(reason) = rejection.filter(|reason| *reason != Reason::UriTooLong) {
        return Err(reason.error(if reason == Reason::LimitReached {
            "requests with long targets use all memory that the gateway reserves for them"
        } else {
            "the target of the request has bytes that are not allowed in a query"
        }));
    }
    let path = request
        .uri()
        .path_and_query()
        .map_or("", |path| path.as_str());
    if !path.is_ascii() {
        // Servers differ in whether they encode such bytes, so policy and app could see different paths.
        let detail = "the target of the request has bytes that are not ASCII; percent-encode them (RFC 3986)";
        return Err(Reason::Malformed.error(detail));
    }
    let overflow = extensions.get::<TargetOverflow>();
    let length = path.len() + overflow.map_or(0, |TargetOverflow(rest)| rest.len());
    if rejection.is_none() && length <= max_bytes {
        return Ok(());
    }
    let detail = if rejection.is_some() {
        format!(
            "the target of the request is too long: at most {max_bytes} bytes are allowed \
             (limits.max_uri_bytes, limits.max_kubernetes_uri_bytes), and {MAX_URI_BYTES} of a path"
        )
    } else {
        format!(
            "the target of the request has {length} bytes, at most {max_bytes} are allowed \
             (limits.max_uri_bytes, limits.max_kubernetes_uri_bytes)"
        )
    };
    Err(Reason::UriTooLong.error(detail))
}

/// Refuses trailers that are larger than a head is allowed to be.
///
/// # Errors
/// [`Reason::HeaderTooLarge`].
pub fn check_trailers(
    fields: &HeaderMap,
    header_bytes: usize,
    max_fields: usize,
) -> Result<(), Error> {
    // Includes RFC 7541's 32 bytes per field (§4.1), because an app's HTTP/2 counts them and ends its connection.
    let size = headers::header_list_size(fields);
    if fields.len() <= max_fields && size <= header_bytes {
        return Ok(());
    }
    Err(Reason::HeaderTooLarge.error(format!(
        "the request's trailers are {} fields of {size} bytes, at most {max_fields} of {header_bytes} are allowed",
        fields.len()
    )))
}

/// Checks the form of the target (RFC 9112 §3.2): only CONNECT has an authority as its target, and only OPTIONS has `*`.
/// Otherwise the policy would check a path that no rule begins with, or a missing one.
fn check_path<B>(request: &Request<B>) -> Result<(), Error> {
    let path = request.uri().path();
    let (is_valid, rule) = match *request.method() {
        Method::CONNECT => (path.is_empty(), "is host:port"),
        Method::OPTIONS if path == "*" => return Ok(()),
        _ => (path.starts_with('/'), "begins with a slash"),
    };
    if is_valid {
        return Ok(());
    }
    let detail = format!("the target of a {} {rule}", request.method());
    Err(Reason::Malformed.error(detail))
}

/// Whether a request may be sent again although an edge may have received it: one without effects (RFC 9110 §9.2.1) and without a
/// body.
pub fn is_repeatable(kind: &StreamKind, method: &Method, end_stream: bool) -> bool {
    *kind == StreamKind::Request && end_stream && method.is_safe()
}

/// Returns the kind of stream that the request asks for, on a listener with this protocol.
///
/// # Errors
/// [`Reason::Malformed`] for a CONNECT with content, [`Reason::MethodNotAllowed`] if a listener with this protocol does not serve
/// it.
pub fn stream_kind<B: Body>(
    request: &Request<B>,
    listener: config::ListenerProtocol,
) -> Result<StreamKind, Error> {
    let is_connect_method = is_connect(request.method());
    match (listener, is_connect_method) {
        // A CONNECT has no content (RFC 9110 §9.3.6), and bytes parsed as content would be missing from the session.
        (config::ListenerProtocol::Connect, true)
            if request.version() < Version::HTTP_2 && !request.body().is_end_stream() =>
        {
            Err(Reason::Malformed.error("a CONNECT request must not have content"))
        }
        (config::ListenerProtocol::Connect, true) => Ok(StreamKind::Tcp),
        (config::ListenerProtocol::Connect, false) => {
            check_absolute(request)?;
            Ok(request_kind(request))
        }
        (_, true) => Err(Reason::MethodNotAllowed
            .error("CONNECT is served by a listener with protocol connect only")),
        (_, false) => Ok(request_kind(request)),
    }
}

fn request_kind<B>(request: &Request<B>) -> StreamKind {
    upgrade_protocol(request).map_or(StreamKind::Request, |token| {
        StreamKind::Upgrade(token.to_owned())
    })
}

/// Refuses a request to a proxy whose target is not in absolute form (RFC 9112 §3.2.2) with the scheme `http`.
fn check_absolute<B>(request: &Request<B>) -> Result<(), Error> {
    match request.uri().scheme_str() {
        Some("http") => Ok(()),
        Some("https") => Err(Reason::Malformed.error(
            "the target of a request to a proxy must begin with http://; for https:// the client has to send a CONNECT",
        )),
        Some(_) => Err(Reason::Malformed.error("the target of a request to a proxy must begin with http://")),
        None => Err(Reason::MethodNotAllowed.error(
            "this listener is a proxy: it serves CONNECT, and requests whose target is http://NODE:PORT/",
        )),
    }
}

/// Replaces the Host of a request to a proxy by the authority of its target (RFC 9112 §3.2.2).
pub fn replace_host<B>(request: &mut Request<B>) {
    let authority = request.uri().authority();
    if request.method() != Method::CONNECT
        && let Some(authority) =
            authority.and_then(|named| HeaderValue::from_str(named.as_str()).ok())
    {
        request.headers_mut().insert(HOST, authority);
    }
}

/// Returns the protocol to switch to. A server may ignore an upgrade (RFC 9110 §7.8). The gateway ignores upgrades to HTTP
/// itself, with TLS (RFC 2817) or without, because requests inside the upgrade would bypass the policy.
fn upgrade_protocol<B>(request: &Request<B>) -> Option<&str> {
    let token = headers::upgrade_token(request.headers())?;
    let is_http11 = request.version() == Version::HTTP_11;
    let is_http_or_tls = |each: &str| {
        let each = each.trim().to_ascii_lowercase();
        ["h2", "h3", "http", "tls"]
            .iter()
            .any(|kind| each.starts_with(kind))
    };
    let has_http_or_tls = token.split(',').any(is_http_or_tls);
    (is_http11 && !has_http_or_tls).then_some(token)
}

/// Returns the authority that a request names in its target or its Host. If both name one, they must be the same.
///
/// # Errors
/// [`Reason::Malformed`] if they differ or are not a valid authority.
pub fn authority<B>(request: &Request<B>) -> Result<Option<&str>, Error> {
    let target = request.uri().authority().map(http::uri::Authority::as_str);
    // The Host of a CONNECT is not used, because its sender chooses it freely: kube-apiserver writes 127.0.0.1 (RFC 9110 §9.3.6).
    if request.method() == Method::CONNECT {
        return Ok(target);
    }
    let host = host_header(request.headers())?;
    match (target, host) {
        (Some(target), Some(host)) if !target.eq_ignore_ascii_case(host) => Err(Reason::Malformed
            .error(format!(
                "the request's target names {target:?} and its Host {host:?}"
            ))),
        (Some(named), _) | (None, Some(named)) if named.contains('@') => {
            Err(Reason::Malformed.error("a Host must not have user information"))
        }
        (target, host) => Ok(target.or(host)),
    }
}

fn host_header(fields: &HeaderMap) -> Result<Option<&str>, Error> {
    let Some(value) = fields.get(HOST) else {
        return Ok(None);
    };
    let text = value
        .to_str()
        .ok()
        .filter(|text| text.parse::<http::uri::Authority>().is_ok() || text.is_empty());
    match text {
        Some("") => Ok(None),
        Some(text) => Ok(Some(text)),
        None => Err(Reason::Malformed.error("the Host field does not contain a valid host")),
    }
}

/// Prepares a client's fields for a tunnel: removes the fields of its connection, and those that only the gateway may set.
pub fn strip_connection_headers(fields: &mut HeaderMap) {
    headers::strip_hop_by_hop(fields);
    headers::strip_private(fields);
    // A credential for this gateway.
    fields.remove(PROXY_AUTHORIZATION);
    debug_assert!(!fields.contains_key(wire::TARGET));
}

/// Whether a method is CONNECT.
pub(crate) fn is_connect(method: &Method) -> bool {
    method == Method::CONNECT
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::Empty;

    fn request(lines: &[(&str, &str)], uri: &str) -> Request<Empty<bytes::Bytes>> {
        let mut builder = Request::builder().uri(uri);
        for (name, value) in lines {
            builder = builder.header(*name, *value);
        }
        builder.body(Empty::new()).unwrap()
    }

    fn refused(lines: &[(&str, &str)], uri: &str) -> Reason {
        let request = request(lines, uri);
        let bounds = RequestLimits {
            target_bytes: 500,
            header_bytes: 1000,
            max_headers: 10,
        };
        let checked = check(&request, bounds).and_then(|()| authority(&request).map(|_| ()));
        checked.unwrap_err().reason
    }

    #[test]
    fn ambiguous_requests_are_malformed() {
        for (lines, uri) in [
            (&[("host", "a"), ("host", "a")][..], "/"),
            (
                &[
                    ("host", "a"),
                    ("authorization", "Bearer good"),
                    ("authorization", "Basic other"),
                ][..],
                "/",
            ),
            (
                &[
                    ("host", "a"),
                    ("content-length", "1"),
                    ("transfer-encoding", "chunked"),
                ][..],
                "/",
            ),
            (&[][..], "/"),
            (&[("host", "b")][..], "http://a/"),
            (
                &[("host", "a"), ("transfer-encoding", "gzip, chunked")][..],
                "/",
            ),
            (
                &[
                    ("host", "a"),
                    ("transfer-encoding", "chunked"),
                    ("transfer-encoding", "chunked"),
                ][..],
                "/",
            ),
            (&[("host", "a")][..], "*"),
            (&[("host", "a:1")][..], "a:1"),
            (&[("host", "user@a")][..], "/"),
            (&[("host", "a b")][..], "/"),
        ] {
            assert_eq!(refused(lines, uri), Reason::Malformed, "{lines:?} {uri}");
        }
    }

    #[test]
    fn a_long_target_is_414_and_a_large_head_431() {
        let long = "x".repeat(2000);
        let target = format!("/{long}");
        assert_eq!(refused(&[("host", "a")], &target), Reason::UriTooLong);
        assert_eq!(
            refused(&[("host", "a"), ("x", &long)], "/"),
            Reason::HeaderTooLarge
        );
        let many = [("host", "a"); 11];
        assert_eq!(refused(&many, "/"), Reason::HeaderTooLarge);
    }

    #[test]
    fn trailers_may_be_as_large_as_a_head() {
        let list = |count: usize, length: usize| -> HeaderMap {
            let each = |number| {
                let name = format!("x-{number:02}")
                    .parse::<http::HeaderName>()
                    .unwrap();
                (name, "x".repeat(length).parse().unwrap())
            };
            (0..count).map(each).collect()
        };
        assert!(check_trailers(&list(10, 64), 1000, 10).is_ok());
        for (count, length) in [(10, 65), (11, 0), (1, 2000)] {
            let refused = check_trailers(&list(count, length), 1000, 10).unwrap_err();
            assert_eq!(
                refused.reason,
                Reason::HeaderTooLarge,
                "{count} of {length}"
            );
        }
    }

    #[test]
    fn an_upgrade_to_http_or_tls_is_a_plain_request() {
        let kind_of = |lines: &[(&str, &str)]| {
            stream_kind(&request(lines, "/"), config::ListenerProtocol::Https).unwrap()
        };
        assert_eq!(
            kind_of(&[("connection", "Upgrade"), ("upgrade", "websocket")]),
            StreamKind::Upgrade("websocket".into())
        );
        let with_body = request(&[("connection", "Upgrade"), ("upgrade", "tcp")], "/");
        let with_body = with_body.map(|_| http_body_util::Full::new(bytes::Bytes::from("xyz")));
        assert_eq!(
            stream_kind(&with_body, config::ListenerProtocol::Https).unwrap(),
            StreamKind::Upgrade("tcp".into())
        );
        for token in ["h2c", "H2C", "TLS/1.0", "HTTP/2.0", "websocket, tls/1.2"] {
            let fields = [("connection", "Upgrade"), ("upgrade", token)];
            assert_eq!(kind_of(&fields), StreamKind::Request, "{token}");
        }
        assert_eq!(kind_of(&[("upgrade", "websocket")]), StreamKind::Request);
    }

    #[test]
    fn connect_is_accepted_only_by_connect_listeners() {
        let mut connect = request(&[("host", "127.0.0.1")], "edge-1:10250");
        *connect.method_mut() = Method::CONNECT;
        assert_eq!(
            stream_kind(&connect, config::ListenerProtocol::Connect).unwrap(),
            StreamKind::Tcp
        );
        assert_eq!(
            authority(&connect).unwrap(),
            Some("edge-1:10250"),
            "its Host is not compared"
        );
        let elsewhere = stream_kind(&connect, config::ListenerProtocol::Https).unwrap_err();
        assert_eq!(elsewhere.reason, Reason::MethodNotAllowed);
        let get = request(&[("host", "a")], "/");
        assert!(stream_kind(&get, config::ListenerProtocol::Connect).is_err());
    }
}
