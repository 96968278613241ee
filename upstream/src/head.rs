//! Request heads in the form of the upstream's HTTP version.
//!
//! Fields pass unchanged, except those of one connection, which the client has already removed.

use causeway_tunnel::{Target, headers};
use http::{
    HeaderValue, Method, Request, Uri, Version,
    header::{CONNECTION, CONTENT_LENGTH, HOST, TE, TRANSFER_ENCODING, UPGRADE},
    uri::PathAndQuery,
};

/// Converts a request for `target` to HTTP/1.1.
pub fn to_http1<B>(request: &mut Request<B>, target: &Target, has_body: bool) {
    to_origin(request, target);
    let fields = request.headers_mut();
    if has_body && !fields.contains_key(CONTENT_LENGTH) {
        // Set explicitly, because hyper assumes that a GET has no body.
        fields.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if fields.contains_key(TE) {
        // RFC 9110 §10.1.4.
        fields.insert(CONNECTION, HeaderValue::from_static("TE"));
    }
}

/// Converts a request for `target` to an upgrade to the protocol that `token` names. Returns `None` if no field can carry the
/// token.
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
        // RFC 9110 §8.6; kubectl's POST has it too, and CONNECT cannot carry it.
        fields.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    Some(())
}

/// Sets path, Host and cookies in the form of HTTP/1.1.
fn to_origin<B>(request: &mut Request<B>, target: &Target) {
    let path = request.uri().path_and_query().cloned();
    let authority = request.uri().authority().cloned();
    *request.version_mut() = Version::HTTP_11;
    *request.uri_mut() = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    let fields = request.headers_mut();
    headers::join_cookies(fields);
    if let Some(authority) = authority {
        headers::restore_host_from_authority(fields, &authority);
    } else if !fields.contains_key(HOST)
        && let Ok(host) = HeaderValue::try_from(target.to_host_port())
    {
        headers::set_host(fields, host);
    }
}

/// Converts a request for `target` to HTTP/2, whose pseudo-fields are derived from an absolute URI.
pub fn to_http2<B>(request: &mut Request<B>, target: &Target, scheme: &'static str) {
    let path = request.uri().path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let authority = headers::take_host(request.headers_mut());
    let authority = authority.or_else(|| request.uri().authority().cloned());
    *request.version_mut() = Version::HTTP_2;
    let authority =
        authority.map_or_else(|| target.to_host_port(), |authority| authority.to_string());
    let uri = Uri::builder()
        .scheme(scheme)
        .authority(authority)
        .path_and_query(path);
    if let Ok(uri) = uri.build() {
        *request.uri_mut() = uri;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, fields: &[(&str, &str)]) -> Request<()> {
        let mut request = Request::builder().method(method).uri("https://a.b/c?d");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap()
    }

    fn text(request: &Request<()>, name: &str) -> Option<String> {
        let value = request.headers().get(name)?;
        Some(value.to_str().unwrap().to_owned())
    }

    #[test]
    fn a_head_of_either_version_becomes_one_of_the_other() {
        let target = Target::new("edge-1", 80);
        let mut request = request(
            "GET",
            &[("te", "trailers"), ("cookie", "a=1"), ("cookie", "b=2")],
        );
        to_http1(&mut request, &target, true);
        assert_eq!(
            (request.version(), request.uri()),
            (Version::HTTP_11, &Uri::from_static("/c?d"))
        );
        for (name, value) in [
            ("host", "a.b"),
            ("cookie", "a=1; b=2"),
            ("connection", "TE"),
            ("transfer-encoding", "chunked"),
        ] {
            assert_eq!(text(&request, name).as_deref(), Some(value));
        }
        to_http2(&mut request, &target, "http");
        assert_eq!(
            (request.version(), request.uri()),
            (Version::HTTP_2, &Uri::from_static("http://a.b/c?d"))
        );
        assert_eq!(text(&request, "host"), None);
        *request.uri_mut() = Uri::from_static("/");
        to_http2(&mut request, &target, "http");
        assert_eq!(request.uri(), "http://edge-1:80/");
    }

    #[test]
    fn the_length_of_an_upgrade_is_that_of_its_body() {
        for (method, fields, has_body, length, coding) in [
            ("GET", &[("content-length", "5")][..], false, None, None),
            ("POST", &[], false, Some("0"), None),
            ("POST", &[("content-length", "5")], true, Some("5"), None),
            ("POST", &[], true, None, Some("chunked")),
        ] {
            let mut request = request(method, fields);
            let upgrade = ("websocket", has_body);
            to_upgrade(&mut request, &Target::new("edge-1", 80), upgrade).unwrap();
            assert_eq!(text(&request, "upgrade").as_deref(), Some("websocket"));
            assert_eq!(text(&request, "content-length").as_deref(), length);
            assert_eq!(text(&request, "transfer-encoding").as_deref(), coding);
        }
    }
}
