//! HTTP/1.1 client for a single request over a connection that the calling code has opened.

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, Response, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tracing::debug_span;

use crate::task::TaskGroup;

/// Sends one request and returns the head of the response. The body can be read until the returned tasks are dropped, which
/// closes the connection.
///
/// # Errors
/// If the connection fails, or the peer does not respond with HTTP/1.1.
pub async fn send<T>(
    io: T,
    request: Request<Full<Bytes>>,
) -> hyper::Result<(Response<Incoming>, TaskGroup)>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::Builder::new()
        .title_case_headers(true)
        .handshake(TokioIo::new(io))
        .await?;
    let tasks = TaskGroup::default();
    tasks.spawn(debug_span!("request"), async move {
        // The request or the body receives the error of the connection.
        let _ = connection.await;
    });
    Ok((sender.send_request(request).await?, tasks))
}
