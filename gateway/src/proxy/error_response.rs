//! Error responses: the only place that turns an [`Error`] into a response.
//!
//! Each response has three forms at once: the status and `application/problem+json` (RFC 9457), a `Proxy-Status` field (RFC
//! 9209), and the same word in metrics and log through the record. The response to a CONNECT also has the sentence in the reason
//! phrase, the only part that kube-apiserver shows. A listener with `errors: kubernetes` answers 502 with plain text, the only
//! form that kubectl shows in every case. Only an upgrade gets a Kubernetes `Status`, because kubectl parses the response to an
//! upgrade as YAML. It shows nothing of a text that happens to be YAML, such as `what: why`. gRPC clients get `grpc-status` and
//! `grpc-message` in a "Trailers-Only" response, on any listener.

pub(super) mod unparsed;

use crate::{
    config::{ErrorFormat, ListenerProtocol},
    error::{Error, Reason},
    proxy::{access_log::AccessRecord, listener::Listener, response_body::ResponseBody},
};
use causeway_tunnel::headers;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode,
    header::{CONTENT_TYPE, PROXY_AUTHENTICATE, RETRY_AFTER, UPGRADE, WWW_AUTHENTICATE},
};
use hyper::ext::ReasonPhrase;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde_json::json;
use unparsed::problem_of;

const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// Challenge for clients that can send a user and a password only (RFC 7617).
const BASIC_CHALLENGE: &str = "Basic realm=\"causeway\"";
/// Bytes that a `grpc-message` percent-encodes, besides those that are not ASCII.
const GRPC_ENCODED: &AsciiSet = &CONTROLS.add(b'%');
/// Maximum number of characters of an error's sentence in a field, because clients limit the size of a head.
const MAX_DETAIL_CHARS: usize = 512;

/// Protocol in which a client expects errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorProtocol {
    /// Plain HTTP.
    Http,
    /// HTTP/1.1 upgrade.
    Upgrade,
    /// gRPC.
    Grpc,
}

impl ErrorProtocol {
    /// Returns the protocol of a request.
    pub fn of<B>(request: &Request<B>) -> Self {
        let fields = request.headers();
        if headers::is_grpc(fields) && request.method() != Method::CONNECT {
            Self::Grpc
        } else if fields.contains_key(UPGRADE) {
            Self::Upgrade
        } else {
            Self::Http
        }
    }
}

/// Returns the error response to a request of this protocol. `asks_gateway` says whether the request is for a resource of the
/// gateway itself, rather than for an upstream.
pub fn error_response(
    listener: &Listener,
    record: &AccessRecord,
    (protocol, asks_gateway): (ErrorProtocol, bool),
    error: &Error,
) -> Response<ResponseBody> {
    record.record_failure(error);
    if protocol == ErrorProtocol::Grpc {
        record.response_started(StatusCode::OK);
        let mut response = Response::new(ResponseBody::empty());
        grpc_fields(response.headers_mut(), error);
        return response;
    }
    let status = match listener.error_format {
        ErrorFormat::Problem => problem_status((listener, asks_gateway), error.reason),
        ErrorFormat::Kubernetes => StatusCode::BAD_GATEWAY,
    };
    record.response_started(status);
    let (content_type, text) = match listener.error_format {
        ErrorFormat::Problem => {
            let reason = (error.reason, status);
            let problem = problem_of(reason, &error.detail, record.trace().as_str());
            ("application/problem+json", problem)
        }
        ErrorFormat::Kubernetes if protocol == ErrorProtocol::Upgrade => {
            ("application/json", kubernetes_status(error))
        }
        ErrorFormat::Kubernetes => ("text/plain; charset=utf-8", format!("{error}\n")),
    };
    let mut response = Response::new(ResponseBody::text(text));
    *response.status_mut() = status;
    set_error_headers(response.headers_mut(), (listener, asks_gateway), error);
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    // Applies to all requests to a `connect` listener, and to a CONNECT of an egress selector to another kind of listener.
    if (listener.protocol == ListenerProtocol::Connect || record.is_connect_request())
        && let Ok(phrase) = ReasonPhrase::try_from(visible_ascii(&error.detail))
    {
        response.extensions_mut().insert(phrase);
    }
    response
}

/// Returns the status of an error. The client of a proxy is asked for the credential by another status (RFC 9110 §15.5.8).
fn problem_status((listener, asks_gateway): (&Listener, bool), reason: Reason) -> StatusCode {
    if reason == Reason::Unauthenticated && listener.is_proxy() && !asks_gateway {
        StatusCode::PROXY_AUTHENTICATION_REQUIRED
    } else {
        reason.status()
    }
}

/// Returns a `Status` of Kubernetes' API as JSON.
fn kubernetes_status(error: &Error) -> String {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {},
        "status": "Failure", "message": error.detail, "code": StatusCode::BAD_GATEWAY.as_u16(),
    });
    status.to_string()
}

/// Sets the fields of a "Trailers-Only" response, whose HTTP status is always 200.
fn grpc_fields(headers: &mut HeaderMap, error: &Error) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    let status = error.reason.grpc_status();
    headers.insert(GRPC_STATUS, HeaderValue::from(u16::from(status)));
    let message: String = error.detail.chars().take(MAX_DETAIL_CHARS).collect();
    let message = utf8_percent_encode(&message, GRPC_ENCODED).to_string();
    if let Ok(message) = HeaderValue::try_from(message) {
        headers.insert(GRPC_MESSAGE, message);
    }
    proxy_status(headers, error);
}

fn proxy_status(headers: &mut HeaderMap, error: &Error) {
    let detail = visible_ascii(&error.detail)
        .replace('\\', "\\\\")
        .replace('"', "\\\"");
    let kind = error.reason.proxy_status();
    let status = format!(
        "causeway; error={kind}; details=\"{}: {detail}\"",
        error.reason.word()
    );
    if let Ok(status) = HeaderValue::try_from(status) {
        headers.insert(PROXY_STATUS, status);
    }
}

fn set_error_headers(
    headers: &mut HeaderMap,
    (listener, asks_gateway): (&Listener, bool),
    error: &Error,
) {
    proxy_status(headers, error);
    if listener.error_format == ErrorFormat::Kubernetes {
        return;
    }
    if let Some(retry_after) = error.reason.retry_after() {
        headers.insert(RETRY_AFTER, HeaderValue::from(retry_after.as_secs()));
    }
    if error.reason == Reason::Unauthenticated && listener.authentication.accepts_bearer_tokens() {
        // RFC 6750 §3: no error code if the request contained no token.
        let challenge = if error.is_token_error {
            "Bearer realm=\"causeway\", error=\"invalid_token\""
        } else {
            "Bearer realm=\"causeway\""
        };
        let field = if listener.is_proxy() && !asks_gateway {
            PROXY_AUTHENTICATE
        } else {
            WWW_AUTHENTICATE
        };
        headers.insert(field.clone(), HeaderValue::from_static(challenge));
        if listener.authentication.accepts_basic {
            // In a field of its own: some clients read one challenge from each field.
            headers.append(field, HeaderValue::from_static(BASIC_CHALLENGE));
        }
    }
    if error.reason == Reason::MethodNotAllowed {
        // The methods of the target of the request (RFC 9110 §10.2.1). A proxy itself has no other targets than its resources.
        let allow = match (listener.is_proxy(), asks_gateway) {
            (true, true) => "GET",
            (true, false) => "",
            (false, _) => "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS",
        };
        headers.insert(http::header::ALLOW, HeaderValue::from_static(allow));
    }
}

/// Returns the text as visible ASCII and spaces, which a status line and a quoted string can contain.
fn visible_ascii(text: &str) -> String {
    let replace_invisible = |each: char| {
        if each.is_ascii_graphic() || each == ' ' {
            each
        } else {
            '?'
        }
    };
    text.chars()
        .map(replace_invisible)
        .take(MAX_DETAIL_CHARS)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_take_the_form_of_the_requests_protocol() {
        let protocol = |method: &str, name: HeaderName, value: &str| {
            let request = Request::builder().method(method).header(name, value);
            ErrorProtocol::of(&request.body(()).unwrap())
        };
        let grpc = "application/grpc";
        assert_eq!(protocol("POST", CONTENT_TYPE, grpc), ErrorProtocol::Grpc);
        assert_eq!(protocol("CONNECT", CONTENT_TYPE, grpc), ErrorProtocol::Http);
        assert_eq!(
            protocol("GET", UPGRADE, "websocket"),
            ErrorProtocol::Upgrade
        );
        assert_eq!(ErrorProtocol::of(&Request::new(())), ErrorProtocol::Http);
    }

    #[test]
    fn a_grpc_message_is_percent_encoded_and_bounded() {
        for (detail, message) in [
            ("port 1: a/b \"c\"", "port 1: a/b \"c\""),
            ("100% of\r\nedge", "100%25 of%0D%0Aedge"),
            ("jürgen", "j%C3%BCrgen"),
        ] {
            let mut fields = HeaderMap::new();
            grpc_fields(&mut fields, &Reason::TargetRefused.error(detail));
            assert_eq!(fields[GRPC_STATUS], "14");
            assert_eq!(fields[GRPC_MESSAGE], message);
        }
        let mut fields = HeaderMap::new();
        grpc_fields(&mut fields, &Reason::EdgePolicy.error("x".repeat(70_000)));
        assert_eq!(fields[GRPC_STATUS], "7");
        assert_eq!(fields[GRPC_MESSAGE].len(), MAX_DETAIL_CHARS);
    }

    #[test]
    fn grpc_statuses_are_envoys() {
        for reason in Reason::ALL {
            let expected = match reason {
                Reason::Malformed => 13,
                Reason::Unauthenticated => 16,
                Reason::Forbidden | Reason::EdgePolicy => 7,
                Reason::Misdirected
                | Reason::UriTooLong
                | Reason::VersionNotSupported
                | Reason::HeaderTooLarge
                | Reason::ContentTooLarge
                | Reason::MethodNotAllowed
                | Reason::ClientClosed => 2,
                _ => 14,
            };
            assert_eq!(reason.grpc_status(), expected, "{}", reason.word());
        }
    }
}
