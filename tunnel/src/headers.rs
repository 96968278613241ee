//! Header fields between HTTP/1.1 and HTTP/2, as pure functions with the RFC's section each.
//!
//! Fields that are not named here pass unchanged. That includes the number, order and bytes of fields with the same name
//! (`X-Stream-Protocol-Version` occurs five times, and the order has a meaning).

use crate::wire::PRIVATE_PREFIX;
pub use causeway_rt::http_fields::{
    contains_token, is_unencoded_or_chunked, normalize_response_framing, set_host, strip_hop_by_hop,
};
use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, HOST, TE, TRAILER, UPGRADE},
    uri::Authority,
};

/// Returns the size of a header list as HTTP/2 counts it (RFC 7541 §4.1): each field counts 32 bytes more than its name and
/// value.
pub fn header_list_size(headers: &HeaderMap) -> usize {
    let fields = headers.iter();
    fields
        .map(|(name, value)| name.as_str().len() + value.len() + 32)
        .sum()
}

/// Returns the protocols to which a request asks to switch (RFC 9110 §7.8), if there are any. `Upgrade` counts only if
/// `Connection` names it.
pub fn upgrade_token(headers: &HeaderMap) -> Option<&str> {
    let token = headers.get(UPGRADE)?.to_str().ok()?;
    (contains_token(headers, &CONNECTION, "upgrade") && !token.is_empty()).then_some(token)
}

/// Whether the content type is gRPC's: alone, or with a suffix for the encoding of messages such as `+proto`. gRPC-Web
/// (`application/grpc-web`) does not count: HTTP/1.1 carries it, and its clients read HTTP statuses.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let Some(content_type) = headers.get(http::header::CONTENT_TYPE) else {
        return false;
    };
    let split = content_type.as_bytes().split_at_checked(GRPC.len());
    split.is_some_and(|(media_type, suffix)| {
        media_type.eq_ignore_ascii_case(GRPC)
            && matches!(suffix.first(), None | Some(b'+' | b';' | b' '))
    })
}

/// Removes every private field, so that a client cannot speak for a gateway, nor an upstream for an edge.
pub fn strip_private(headers: &mut HeaderMap) {
    let private_names: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with(PRIVATE_PREFIX))
        .cloned()
        .collect();
    for name in private_names {
        headers.remove(name);
    }
}

/// Removes from trailers the fields for routing or framing and those of one connection (RFC 9110 §6.5.1), and every private
/// field.
pub fn clean_trailers(trailers: &mut HeaderMap) {
    strip_hop_by_hop(trailers);
    strip_private(trailers);
    for name in [AUTHORIZATION, CONTENT_LENGTH, HOST, TE, TRAILER] {
        trailers.remove(name);
    }
}

/// Removes and returns the Host field, which becomes `:authority` (RFC 9113 §8.3.1).
pub fn take_host(headers: &mut HeaderMap) -> Option<Authority> {
    let host = headers.remove(HOST)?;
    Authority::from_maybe_shared(bytes::Bytes::copy_from_slice(host.as_bytes())).ok()
}

/// Sets the Host field from `:authority`, in front of the other fields (RFC 9110 §7.2).
pub fn restore_host_from_authority(headers: &mut HeaderMap, authority: &Authority) {
    if let Ok(value) = HeaderValue::from_str(authority.as_str()) {
        set_host(headers, value);
    }
}

/// Joins cookies that HTTP/2 split into several fields (RFC 9113 §8.2.3).
pub fn join_cookies(headers: &mut HeaderMap) {
    let mut crumbs = headers.get_all(COOKIE).iter();
    let (Some(first), Some(second)) = (crumbs.next(), crumbs.next()) else {
        return;
    };
    let mut joined = first.as_bytes().to_vec();
    for crumb in std::iter::once(second).chain(crumbs) {
        joined.extend_from_slice(b"; ");
        joined.extend_from_slice(crumb.as_bytes());
    }
    if let Ok(joined) = HeaderValue::from_bytes(&joined) {
        headers.insert(COOKIE, joined);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn an_upgrade_needs_its_connection_option() {
        let asked = fields(&[
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "SPDY/3.1"),
        ]);
        assert_eq!(upgrade_token(&asked), Some("SPDY/3.1"));
        assert_eq!(upgrade_token(&fields(&[("upgrade", "h2c")])), None);
    }

    #[test]
    fn grpc_is_known_by_its_content_type_and_grpc_web_is_not_grpc() {
        for (kind, expected) in [
            ("application/grpc", true),
            ("application/grpc+proto", true),
            ("Application/gRPC; charset=utf-8", true),
            ("application/grpc-web", false),
            ("application/grpc-web+proto", false),
            ("application/json", false),
            ("", false),
        ] {
            assert_eq!(
                is_grpc(&fields(&[("content-type", kind)])),
                expected,
                "{kind}"
            );
        }
        assert!(!is_grpc(&HeaderMap::new()));
    }

    #[test]
    fn split_cookies_are_joined_in_order() {
        let mut headers = fields(&[("cookie", "a=1"), ("cookie", "b=2"), ("cookie", "c=3")]);
        join_cookies(&mut headers);
        assert_eq!(headers, fields(&[("cookie", "a=1; b=2; c=3")]));
    }

    #[test]
    fn private_fields_of_strangers_go() {
        let mut headers = fields(&[("causeway-target", "10.0.0.1:22"), ("x", "1")]);
        strip_private(&mut headers);
        assert_eq!(headers, fields(&[("x", "1")]));
    }

    #[test]
    fn trailers_carry_no_framing_or_routing_fields() {
        let mut trailers = fields(&[
            ("causeway-target", "127.0.0.1:22"),
            ("connection", "x-hop"),
            ("x-hop", "1"),
            ("transfer-encoding", "chunked"),
            ("content-length", "9"),
            ("authorization", "Bearer x"),
            ("host", "other"),
            ("te", "trailers"),
            ("grpc-status", "0"),
        ]);
        clean_trailers(&mut trailers);
        assert_eq!(trailers, fields(&[("grpc-status", "0")]));
    }

    #[test]
    fn host_is_inserted_and_repeated_field_values_keep_their_order() {
        let all = [("a", "1"), ("b", "2"), ("a", "3"), ("c", "4"), ("a", "5")];
        for count in 0..=all.len() {
            let mut headers = fields(&all[..count]);
            let expected = headers.clone();
            restore_host_from_authority(&mut headers, &Authority::from_static("edge-1"));
            assert_eq!(headers.keys().next(), Some(&HOST));
            assert_eq!(headers.remove(HOST).unwrap(), "edge-1");
            assert_eq!(headers, expected, "{count}");
        }
    }

    #[test]
    fn host_and_authority_are_one() {
        let mut headers = fields(&[("host", "edge-1:9100")]);
        let authority = take_host(&mut headers).unwrap();
        assert!(headers.is_empty());
        restore_host_from_authority(&mut headers, &authority);
        assert_eq!(headers, fields(&[("host", "edge-1:9100")]));
    }
}
