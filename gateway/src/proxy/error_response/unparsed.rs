//! Response to a head that cannot be parsed, for which there is no record yet.

use crate::{config::ErrorFormat, error::Reason};
use http::StatusCode;
use serde::Serialize;

/// Problem details (RFC 9457 §3), with this gateway's extension members.
#[derive(Debug, Serialize)]
struct ProblemDetails<'a> {
    r#type: String,
    title: &'static str,
    status: u16,
    detail: &'a str,
    reason: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    trace: &'a str,
}

/// Returns the whole HTTP/1.1 response to a head that cannot be parsed for this reason.
pub(in crate::proxy) fn unparsed_response(error_format: ErrorFormat, reason: Reason) -> Vec<u8> {
    let detail = unparsed_detail(reason);
    let (status, content_type, text) = match error_format {
        ErrorFormat::Problem => {
            let problem = problem_of((reason, reason.status()), detail, "");
            (reason.status(), "application/problem+json", problem)
        }
        ErrorFormat::Kubernetes => {
            let text = format!("{detail}\n");
            (StatusCode::BAD_GATEWAY, "text/plain; charset=utf-8", text)
        }
    };
    let (reason_word, error) = (reason.word(), reason.proxy_status());
    let phrase = status.canonical_reason().unwrap_or_default();
    format!(
        "HTTP/1.1 {} {phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nConnection: close\r\n\
         Proxy-Status: causeway; error={error}; details=\"{reason_word}: {detail}\"\r\n\r\n{text}",
        status.as_u16(),
        text.len(),
    )
    .into_bytes()
}

/// Returns the message for a head that cannot be parsed for this reason.
pub(in crate::proxy) fn unparsed_detail(reason: Reason) -> &'static str {
    match reason {
        Reason::UriTooLong => "the target of the request is longer than can be parsed",
        Reason::HeaderTooLarge => {
            "the head of the request is larger than can be parsed: it has more than twice limits.max_header_bytes or limits.max_headers"
        }
        Reason::VersionNotSupported => {
            "the request line has an HTTP version other than 1; a connection without the HTTP/2 preface must use HTTP/1.1"
        }
        _ => "the head of the request is not HTTP/1.1",
    }
}

pub(super) fn problem_of(
    (reason, status): (Reason, StatusCode),
    detail: &str,
    trace: &str,
) -> String {
    let word = reason.word();
    let problem = ProblemDetails {
        r#type: format!("urn:causeway:problem:{word}"),
        title: reason.title(),
        status: status.as_u16(),
        detail,
        reason: word,
        trace,
    };
    serde_json::to_string(&problem).unwrap_or_default()
}
