//! Refusals at the start of a TLS connection: what the client, the log and the metrics are told.

use crate::proxy::Proxy;
use causeway_rt::{lingering_close, listener::RemoteAddr, socket::Socket};
use std::time::Duration;
use tokio::io::AsyncWriteExt;

/// Minimum time between two log lines about refusals at one listener.
const LOG_INTERVAL: Duration = Duration::from_mins(1);

/// Response to a request without TLS.
const PLAINTEXT_REFUSED: &str = "HTTP/1.1 400 Bad Request\r\n\
    Content-Type: text/plain; charset=utf-8\r\n\
    Content-Length: 62\r\n\
    Connection: close\r\n\
    Proxy-Status: causeway; error=http_request_error; details=\"malformed: this listener speaks TLS\"\r\n\r\n\
    This listener speaks TLS: the URL has to begin with https://.\n";

/// Record with the fatal alert `unrecognized_name`. Alerts are plaintext until the keys are agreed on (RFC 8446, section 5.1).
const UNRECOGNIZED_NAME: [u8; 7] = [21, 3, 3, 0, 2, 2, 112];

/// Returns the first byte that a client sends over TCP, without consuming it.
pub(super) async fn first_byte(socket: &Socket) -> Option<u8> {
    let mut first = [0];
    let length = socket.tcp()?.peek(&mut first).await.ok()?;
    (length > 0).then_some(first[0])
}

/// Answers a client that speaks HTTP to a TLS listener, so that its user sees a sentence instead of the bytes of an alert.
pub(super) async fn refuse_plaintext(mut socket: Socket) {
    if socket.write_all(PLAINTEXT_REFUSED.as_bytes()).await.is_ok() {
        lingering_close::close(socket).await;
    }
}

/// Ends a handshake with the alert `unrecognized_name` (RFC 6066, section 3). rustls would send `access_denied` if it has no
/// certificate to present.
pub(super) async fn refuse_name(mut socket: Socket) {
    if socket.write_all(&UNRECOGNIZED_NAME).await.is_ok() {
        lingering_close::close(socket).await;
    }
}

/// Logs why a client was refused a connection, at most once a minute per listener.
pub(super) fn log_refusal(
    proxy: &Proxy,
    peer: RemoteAddr,
    (server_name, alert): (Option<&str>, &str),
    message: &'static str,
) {
    if let Some(count) = proxy
        .listener
        .tls_refusal_throttle
        .record_within(LOG_INTERVAL)
    {
        let listener = &proxy.listener.name;
        tracing::info!(listener, %peer, server_name, alert, count, "{message}");
    }
}

/// Counts and logs a failed handshake.
pub(super) fn handshake_failed(proxy: &Proxy, why: &'static str, error: &dyn std::fmt::Display) {
    proxy
        .shared
        .metrics
        .handshake_failed(proxy.listener.protocol.as_str(), why);
    tracing::debug!(listener = proxy.listener.name, why, %error, "a client's TLS handshake failed");
}
