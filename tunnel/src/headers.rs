//! Header fields between HTTP/1.1 and HTTP/2, as pure functions with the RFC's section each.
//!
//! Fields that are not named here pass unchanged. That includes the number, order and bytes of fields with the same name
//! (`X-Stream-Protocol-Version` occurs five times, and the order has a meaning).

use crate::wire::PRIVATE_PREFIX;
use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{
        AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, Entry, HOST, TE, TRAILER,
        TRANSFER_ENCODING, UPGRADE,
    },
    uri::Authority,
};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Fields that belong to one connection, besides those that `Connection` names.
static HOP_BY_HOP_HEADERS: [HeaderName; 6] = [
    CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Removes the fields that belong to one connection only (RFC 9110 §7.6.1): `Connection` and the fields that it names,
/// `Keep-Alive`, `Proxy-Connection`, `Transfer-Encoding`, `Upgrade`, and `TE` except for `trailers`.
///
/// `Connection` cannot remove the fields on which routing and framing depend (`Host`, `Content-Length` …).
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // A single pass, because most messages have none of these headers.
    if !headers.keys().any(|name| HOP_BY_HOP_HEADERS.contains(name)) {
        return;
    }
    let connection_listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|token| HeaderName::from_bytes(token.trim().as_bytes()).ok())
        .filter(|name| name != HOST && name != CONTENT_LENGTH && name != TE && name != TRAILER)
        .collect();
    for name in connection_listed {
        headers.remove(name);
    }
    for name in HOP_BY_HOP_HEADERS.iter().filter(|name| *name != TE) {
        headers.remove(name);
    }
    keep_te_trailers(headers);
}

/// Removes all values of `TE` except `trailers`, the only value that HTTP/2 permits (RFC 9113 §8.2.2).
fn keep_te_trailers(headers: &mut HeaderMap) {
    if !headers.contains_key(TE) {
        return;
    }
    let trailers = contains_token(headers, &TE, "trailers");
    headers.remove(TE);
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

/// Whether a comma-separated field holds `token`, independent of its case and parameters.
pub fn contains_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|item| item.split(';').next())
        .any(|item| item.trim().eq_ignore_ascii_case(token))
}

/// Returns the size of a header list as HTTP/2 counts it (RFC 7541 §4.1): each field counts 32 bytes more than its name and
/// value.
pub fn header_list_size(headers: &HeaderMap) -> usize {
    let fields = headers.iter();
    fields
        .map(|(name, value)| name.as_str().len() + value.len() + 32)
        .sum()
}

/// Whether a body has no transfer coding, or only `chunked`. A parser decodes `chunked` once, as the last coding (RFC 9112
/// §6.1). The receiver would get the bytes of any other coding without its name.
pub fn is_unencoded_or_chunked(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let first = codings.next();
    let is_plain_or_chunked =
        first.is_none_or(|value| value.as_bytes().eq_ignore_ascii_case(b"chunked"));
    is_plain_or_chunked && codings.next().is_none()
}

/// Rebuilds the fields that frame a response (RFC 9112 §6.3), before the fields of one connection are removed. A
/// `Content-Length` beside `Transfer-Encoding` or in a 1xx or 204 is removed. Equal lengths become one field.
///
/// # Errors
/// The fault of the response's sender, as the end of a sentence whose subject is the sender.
pub fn normalize_response_framing(
    status: StatusCode,
    fields: &mut HeaderMap,
) -> Result<(), &'static str> {
    if !is_unencoded_or_chunked(fields) {
        return Err("sent a response whose Transfer-Encoding is not just chunked");
    }
    let mut lengths = fields.get_all(CONTENT_LENGTH).iter();
    let Some(first) = lengths.next() else {
        return Ok(());
    };
    // RFC 9110 §8.6 for the latter two.
    let ignores_content_length = fields.contains_key(TRANSFER_ENCODING)
        || status.is_informational()
        || status == StatusCode::NO_CONTENT;
    if ignores_content_length {
        fields.remove(CONTENT_LENGTH);
        return Ok(());
    }
    if lengths.next().is_none() && is_valid_length(first.as_bytes()) {
        return Ok(());
    }
    let length = common_length(fields)
        .ok_or("sent a response with different or invalid values of Content-Length")?;
    fields.insert(CONTENT_LENGTH, HeaderValue::from(length));
    Ok(())
}

/// Maximum number of digits that HTTP/2 libraries accept in a length: any number of 19 digits fits into 64 bits.
const MAX_LENGTH_DIGITS: usize = 19;

fn is_valid_length(value: &[u8]) -> bool {
    (1..=MAX_LENGTH_DIGITS).contains(&value.len()) && value.iter().all(u8::is_ascii_digit)
}

/// Returns the number that all values of `Content-Length`, and all items of lists in them, share.
fn common_length(fields: &HeaderMap) -> Option<u64> {
    let mut common = None;
    for value in fields.get_all(CONTENT_LENGTH) {
        for item in value.to_str().ok()?.split(',') {
            let item = item.trim();
            let digits = item.trim_start_matches('0');
            let number = match digits {
                "" if !item.is_empty() => 0,
                digits if is_valid_length(digits.as_bytes()) => digits.parse().ok()?,
                _ => return None,
            };
            if *common.get_or_insert(number) != number {
                return None;
            }
        }
    }
    common
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

/// Sets the Host field, in front of the other fields, because some servers expect it there.
pub fn set_host(headers: &mut HeaderMap, host: HeaderValue) {
    headers.remove(HOST);
    let first = headers.keys().next().cloned();
    headers.insert(HOST, host);
    // `HeaderMap` moves the last entry, here Host, into the place of a removed one.
    let Some(first) = first else { return };
    if let Entry::Occupied(first) = headers.entry(first) {
        if first.iter().nth(1).is_none() {
            let (name, value) = first.remove_entry();
            headers.append(name, value);
            return;
        }
        let (name, values) = first.remove_entry_mult();
        let values: Vec<_> = values.collect();
        for value in values {
            headers.append(name.clone(), value);
        }
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
    fn hop_by_hop_fields_go_and_all_others_stay() {
        let mut headers = fields(&[
            ("connection", "close, X-Hop, Host"),
            ("x-hop", "1"),
            ("host", "edge-1"),
            ("keep-alive", "5"),
            ("te", "gzip, Trailers;q=1"),
            ("transfer-encoding", "chunked"),
            ("x-stream-protocol-version", "v5"),
            ("x-stream-protocol-version", "v4"),
        ]);
        strip_hop_by_hop(&mut headers);
        let left = fields(&[
            ("host", "edge-1"),
            ("te", "trailers"),
            ("x-stream-protocol-version", "v5"),
            ("x-stream-protocol-version", "v4"),
        ]);
        assert_eq!(headers, left);
    }

    #[test]
    fn answers_get_new_framing() {
        let reframed = |status: u16, lines: &[(&'static str, &'static str)]| {
            let mut headers = fields(lines);
            let status = StatusCode::from_u16(status).unwrap();
            normalize_response_framing(status, &mut headers).map(|()| {
                let lengths = headers.get_all(CONTENT_LENGTH).iter();
                let lengths: Vec<_> = lengths.map(|value| value.to_str().unwrap()).collect();
                lengths.join("|")
            })
        };
        for (status, lines, length) in [
            (200, &[("content-length", "2")][..], "2"),
            (200, &[("content-length", "2, 2")], "2"),
            (
                200,
                &[("content-length", "2"), ("content-length", "2")],
                "2",
            ),
            (200, &[("content-length", "0000000000000000000002")], "2"),
            (200, &[("content-length", "00,0")], "0"),
            (304, &[("content-length", "7 , 7")], "7"),
            (204, &[("content-length", "2")], ""),
            (103, &[("content-length", "2")], ""),
            (
                200,
                &[("content-length", "5"), ("transfer-encoding", "chunked")],
                "",
            ),
        ] {
            assert_eq!(reframed(status, lines).unwrap(), length, "{lines:?}");
        }
        for lines in [
            &[("content-length", "2, 3")][..],
            &[("content-length", "2"), ("content-length", "3")],
            &[("content-length", "2,")],
            &[("content-length", "")],
            &[("content-length", "+2")],
            &[("content-length", "0x2")],
            &[("content-length", "20000000000000000000")],
            &[("transfer-encoding", "gzip, chunked")],
        ] {
            assert!(reframed(200, lines).is_err(), "{lines:?}");
        }
    }

    #[test]
    fn te_without_trailers_goes() {
        let mut headers = fields(&[("te", "gzip")]);
        strip_hop_by_hop(&mut headers);
        assert!(headers.is_empty());
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
