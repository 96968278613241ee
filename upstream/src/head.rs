//! Request heads in the form of the upstream's HTTP version.
//!
//! Fields pass as they came, save those of one connection, which the client has removed.

use causeway_tunnel::{Target, headers};
use http::{
    HeaderValue, Method, Request, Uri, Version,
    header::{CONNECTION, CONTENT_LENGTH, HOST, TE, TRANSFER_ENCODING, UPGRADE},
    uri::PathAndQuery,
};

/// Puts a request for `target` into the form of HTTP/1.1.
pub fn to_http1<B>(request: &mut Request<B>, target: &Target, has_body: bool) {
    to_origin(request, target);
    let fields = request.headers_mut();
    if has_body && !fields.contains_key(CONTENT_LENGTH) {
        // Said outright, since the engine takes it for granted that a GET has no body.
        fields.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if fields.contains_key(TE) {
        // RFC 9110 §10.1.4.
        fields.insert(CONNECTION, HeaderValue::from_static("TE"));
    }
}

/// Puts a request for `target` into the form of an upgrade to the protocol that `token` names. Returns `None` if no field can
/// carry the token.
pub fn to_upgrade<B>(
    request: &mut Request<B>,
    target: &Target,
    (token, has_body): (&str, bool),
) -> Option<()> {
    to_origin(request, target);
    let has_content = matches!(
        *request.method(),
        Method::POST | Method::PUT | Method::PATCH
    );
    let fields = request.headers_mut();
    fields.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    fields.insert(UPGRADE, HeaderValue::from_str(token).ok()?);
    if has_body {
        if !fields.contains_key(CONTENT_LENGTH) {
            fields.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        return Some(());
    }
    fields.remove(CONTENT_LENGTH);
    if has_content {
        // RFC 9110 §8.6; kubectl's POST says so too, and CONNECT could not carry it.
        fields.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    Some(())
}

/// Path, Host and cookies as HTTP/1.1 has them.
fn to_origin<B>(request: &mut Request<B>, target: &Target) {
    let path = request.uri().path_and_query().cloned();
    let authority = request.uri().authority().cloned();
    *request.version_mut() = Version::HTTP_11;
    *request.uri_mut() = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    let fields = request.headers_mut();
    headers::join_cookies(fields);
    if let Some(authority) = authority {
        headers::put_host(fields, &authority);
    } else if !fields.contains_key(HOST)
        && let Ok(host) = HeaderValue::try_from(target.text())
    {
        headers::set_host(fields, host);
    }
}

/// Puts a request for `target` into the form of HTTP/2, whose pseudo-fields are made from an absolute URI.
pub fn to_http2<B>(request: &mut Request<B>, target: &Target, scheme: &'static str) {
    let path = request.uri().path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let authority = headers::take_host(request.headers_mut());
    let authority = authority.or_else(|| request.uri().authority().cloned());
    *request.version_mut() = Version::HTTP_2;
    let authority = authority.map_or_else(|| target.text(), |authority| authority.to_string());
    let uri = Uri::builder()
        .scheme(scheme)
        .authority(authority)
        .path_and_query(path);
    if let Ok(uri) = uri.build() {
        *request.uri_mut() = uri;
    }
}

/// Whether a request can be repeated (RFC 9110 §9.2.2), if it has no body.
pub fn is_idempotent<B>(request: &Request<B>) -> bool {
    matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::PUT | Method::DELETE
    )
}

/// Returns a copy of a request without its body.
pub fn copy<B, C: Default>(request: &Request<B>) -> Request<C> {
    let mut copy = Request::new(C::default());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    copy.headers_mut().clone_from(request.headers());
    copy.extensions_mut().clone_from(request.extensions());
    copy
}
