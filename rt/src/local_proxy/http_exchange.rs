//! One HTTP request of a program, which is forwarded to the host of its URL (RFC 9112 section 3.2.2), and its response.
//!
//! hyper parses and writes both messages, so neither side sees the framing of the other one. Fields of one connection are
//! removed. Both connections close behind the response: a later request could be for another host. A message that breaks in the
//! middle is a reset for its receiver, also if the receiver could take it for complete.

use super::{
    ANSWER_TIMEOUT,
    client_io::{ClientBody, ClientIo, RequestState},
    respond,
};
use crate::{
    copy::CopyOutcome,
    http_fields::{normalize_response_framing, set_host, strip_hop_by_hop},
    lingering_close,
    socket::{PrefixedStream, ResetOnClose, ResetUnlessComplete},
};
use futures_util::future::OptionFuture;
use hyper::{
    Request, Response, StatusCode, Uri, Version,
    body::{Body, Incoming},
    client::conn::http1 as client_http1,
    header::{
        CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderValue, PROXY_AUTHORIZATION, TE,
        TRANSFER_ENCODING, VIA,
    },
    server::conn::http1 as server_http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use std::{error::Error as _, future::poll_fn, io, task::Poll, time::Duration};
use thiserror::Error;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Mutex,
    time::timeout,
};

/// Maximum time for the end of a connection to a destination, once the program has the response.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Request of a program for a URL with `http://`, whose destination is connected.
pub struct HttpExchange<S> {
    /// Connection of the program, with the request in front.
    pub(super) client: PrefixedStream<S>,
    /// Place of the URL.
    pub(super) place: UrlPlace,
}

/// Place that the URL of a request names.
#[derive(Debug)]
pub(super) struct UrlPlace {
    /// Host of the URL, with its port if the URL has one.
    pub(super) authority: HeaderValue,
    /// Path and query of the URL, or `*` for the whole server.
    pub(super) target: Uri,
}

/// Reason why there is no response, although the destination was reached.
#[derive(Debug, Error)]
enum ExchangeError {
    #[error("the body of the request is invalid or incomplete: {0}")]
    RequestBody(hyper::Error),
    #[error("the destination closed the connection, or sent no valid response: {0}")]
    Upstream(hyper::Error),
    #[error("the destination {0}")]
    Response(&'static str),
}

/// End of an exchange, for the two connections.
enum ExchangeEnd {
    /// The program has the whole response.
    Complete {
        /// Whether the destination has the whole request.
        has_request: bool,
    },
    /// There is no response. The program gets the reason.
    NoResponse {
        is_fault_of_client: bool,
        reason: String,
    },
    /// The program aborted.
    Client(io::Error),
    /// The response broke off.
    Upstream(hyper::Error),
}

impl<S: AsyncRead + AsyncWrite + ResetOnClose + Unpin> HttpExchange<S> {
    /// Forwards the request and the response over a connection to the destination, and closes both connections. If the future is
    /// dropped before, both are reset.
    pub async fn forward<U>(self, upstream: U) -> CopyOutcome<io::Error>
    where
        U: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
    {
        let state = RequestState::default();
        let client = ClientIo::new(self.client, state.clone());
        let mut client = ResetUnlessComplete::new(client);
        let mut upstream = ResetUnlessComplete::new(upstream);
        let ends = (&mut client.socket, &mut upstream.socket);
        match exchange(ends, &self.place, &state).await {
            ExchangeEnd::Complete { has_request } => {
                client.complete();
                let closing_client = lingering_close::close(&mut client.socket);
                if has_request {
                    upstream.complete();
                    tokio::join!(closing_client, lingering_close::close(&mut upstream.socket));
                } else {
                    drop(upstream);
                    closing_client.await;
                }
                CopyOutcome::Clean
            }
            ExchangeEnd::NoResponse {
                is_fault_of_client,
                reason,
            } => {
                drop(upstream);
                client.complete();
                let (status, outcome) = if is_fault_of_client {
                    (StatusCode::BAD_REQUEST, CopyOutcome::Socket as fn(_) -> _)
                } else {
                    (StatusCode::BAD_GATEWAY, CopyOutcome::Stream as fn(_) -> _)
                };
                let answering = respond(&mut client.socket, status, &reason);
                let _ = timeout(ANSWER_TIMEOUT, answering).await;
                outcome(io::Error::other(reason))
            }
            ExchangeEnd::Client(error) => CopyOutcome::Socket(error),
            ExchangeEnd::Upstream(error) => CopyOutcome::Stream(io::Error::other(error)),
        }
    }
}

async fn exchange<C, U>(
    (client, upstream): (&mut C, &mut U),
    place: &UrlPlace,
    state: &RequestState,
) -> ExchangeEnd
where
    C: AsyncRead + AsyncWrite + Unpin,
    U: AsyncRead + AsyncWrite + Unpin,
{
    let connecting = client_http1::Builder::new()
        .title_case_headers(true)
        .handshake(TokioIo::new(upstream));
    let (sender, connection) = match connecting.await {
        Ok(connected) => connected,
        Err(error) => return failed_end(error),
    };
    let sender = Mutex::new(sender);
    let service = service_fn(|request| {
        let (sender, request) = (&sender, into_upstream_request(request, place, state));
        async move {
            let sent = sender.lock().await.send_request(request).await;
            into_client_response(sent.map_err(ExchangeError::from_send_error)?)
        }
    });
    let serving = server_http1::Builder::new()
        .keep_alive(false)
        .auto_date_header(false)
        .title_case_headers(true)
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(client), service);
    let (mut serving, mut connection) = (Box::pin(serving), Some(Box::pin(connection)));
    let mut upstream_end = None;
    let served = loop {
        tokio::select! {
            biased;
            Some(ended) = OptionFuture::from(connection.as_mut()) => {
                upstream_end = Some(ended);
                // It holds the body of the request, and hyper waits until an unread body is read or dropped.
                connection = None;
            }
            served = &mut serving => break served,
            // Only `serving` changes this state, so nothing has to wake the task.
            () = poll_fn(|_| if state.is_client_gone() { Poll::Ready(()) } else { Poll::Pending }) => {
                return ExchangeEnd::Client(io::ErrorKind::ConnectionAborted.into());
            }
        }
    };
    // Ends the body of a request whose response came before the destination had read it.
    drop(serving);
    if let Err(error) = served {
        return failed_end(error);
    }
    if let Some(connection) = connection {
        upstream_end = timeout(CLOSE_TIMEOUT, connection).await.ok();
    }
    ExchangeEnd::Complete {
        has_request: matches!(upstream_end, Some(Ok(()))),
    }
}

/// Returns the end of an exchange by the error of the program's connection. An error of the service, or of the response's body,
/// is a user's error to hyper.
fn failed_end(error: hyper::Error) -> ExchangeEnd {
    let cause = error.source().and_then(|cause| cause.downcast_ref());
    match cause {
        Some(cause) => ExchangeEnd::NoResponse {
            is_fault_of_client: matches!(cause, ExchangeError::RequestBody(_)),
            reason: cause.to_string(),
        },
        None if error.is_user() => ExchangeEnd::Upstream(error),
        None => ExchangeEnd::Client(io::Error::other(error)),
    }
}

impl ExchangeError {
    fn from_send_error(error: hyper::Error) -> Self {
        if error.is_user() {
            Self::RequestBody(error)
        } else {
            Self::Upstream(error)
        }
    }
}

/// Returns the request in the form for the destination itself (RFC 9112 section 3.2.1). The URL decides about the host, not
/// `Host`.
fn into_upstream_request(
    mut request: Request<Incoming>,
    place: &UrlPlace,
    state: &RequestState,
) -> Request<ClientBody> {
    *request.uri_mut() = place.target.clone();
    *request.version_mut() = Version::HTTP_11;
    let is_at_end = request.body().is_end_stream();
    let fields = request.headers_mut();
    let has_length = fields.contains_key(CONTENT_LENGTH);
    forward_fields(fields);
    fields.remove(PROXY_AUTHORIZATION);
    // RFC 9110 section 10.1.4.
    let for_one_connection = if fields.contains_key(TE) {
        "close, TE"
    } else {
        "close"
    };
    fields.insert(CONNECTION, HeaderValue::from_static(for_one_connection));
    set_host(fields, place.authority.clone());
    if !has_length && !is_at_end {
        // Without this, hyper sends GET and HEAD without their bodies.
        fields.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    request.map(|body| ClientBody::new(body, state.clone()))
}

fn into_client_response(
    mut response: Response<Incoming>,
) -> Result<Response<Incoming>, ExchangeError> {
    let status = response.status();
    if status == StatusCode::SWITCHING_PROTOCOLS {
        let fault = "switched to another protocol, for which no request had asked";
        return Err(ExchangeError::Response(fault));
    }
    *response.version_mut() = Version::HTTP_11;
    let fields = response.headers_mut();
    normalize_response_framing(status, fields).map_err(ExchangeError::Response)?;
    forward_fields(fields);
    Ok(response)
}

/// Removes the fields of one connection, and adds this proxy to `Via` (RFC 9110 section 7.6.3).
fn forward_fields(fields: &mut HeaderMap) {
    strip_hop_by_hop(fields);
    fields.append(VIA, HeaderValue::from_static("1.1 causeway"));
}

#[cfg(test)]
mod tests;
