//! Header fields of messages that a proxy forwards, as pure functions with the RFC's section each.

use hyper::{
    HeaderMap, StatusCode,
    header::{
        CONNECTION, CONTENT_LENGTH, Entry, HOST, HeaderName, HeaderValue, TE, TRAILER,
        TRANSFER_ENCODING, UPGRADE,
    },
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

/// Whether a value of `Content-Length` is one number that all parsers accept.
pub(crate) fn is_valid_length(value: &[u8]) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let field = |(name, value): &(&'static str, &'static str)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        };
        lines.iter().map(field).collect()
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
}
