//! Streams as HTTP bodies, and bodies into streams.
//!
//! A reset stays a reset: [`StreamReceiver`] as a body ends with an error that has h2's error code as its source. [`pump`]
//! joins chunks that are ready together into one frame (invariant 1: an upstream that answers in chunks of a few bytes),
//! never waiting for more.

use crate::{
    error::StreamError,
    stream::{StreamReceiver, StreamSender},
};
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::timeout;

impl Body for StreamReceiver {
    type Data = Bytes;
    type Error = StreamError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        let this = self.get_mut();
        match ready!(this.poll_data(cx)) {
            Some(chunk) => Poll::Ready(Some(chunk.map(Frame::data))),
            None => match ready!(this.poll_trailers(cx)) {
                Ok(trailers) => Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers)))),
                Err(error) => Poll::Ready(Some(Err(error))),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_end()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// Number of bytes. Shorter chunks are joined with the data that is ready behind them.
const MIN_CHUNK_BYTES: usize = 16 * 1024;

/// Error that ends the forwarding of a body before its end.
#[derive(Debug, thiserror::Error)]
pub enum PumpError<E> {
    /// The body itself failed: its peer closed the connection or violated the protocol.
    #[error("the body failed: {0}")]
    Body(E),
    /// The stream failed.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The other end has consumed nothing for this long.
    #[error("no bytes were read for {0:?}")]
    Stalled(Duration),
}

/// Sends all of `body`, and its trailers, into the stream. If the body fails, the stream is reset after the chunks that the
/// body returned before.
/// If `write_timeout` is set and the other end has not taken a chunk by then, the stream is reset.
///
/// # Errors
/// If the body or the stream fails, or `write_timeout` has passed.
pub async fn pump<B>(
    mut body: B,
    send: &mut StreamSender,
    write_timeout: Option<Duration>,
) -> Result<(), PumpError<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut next_frame = None;
    loop {
        let frame = if let Some(frame) = next_frame.take() {
            frame
        } else {
            tokio::select! {
                biased;
                frame = frame(&mut body) => frame,
                error = send.wait_for_reset() => return Err(error.into()),
            }
        };
        let frame = match frame {
            None => return Ok(send.end()?),
            Some(Err(error)) => {
                send.flush_and_abort().await;
                return Err(PumpError::Body(error));
            }
            Some(Ok(frame)) => frame,
        };
        match frame.into_data() {
            Ok(chunk) => {
                let chunk = coalesce(chunk, &mut body, &mut next_frame);
                if chunk.is_empty() {
                    continue;
                }
                if body.is_end_stream() && next_frame.is_none() {
                    return send_with_timeout(write_timeout, send, async |send| {
                        send.send_last(chunk).await
                    })
                    .await;
                }
                send_with_timeout(write_timeout, send, async |send| {
                    send.send_data(chunk).await
                })
                .await?;
            }
            Err(trailers_frame) => {
                let trailers = trailers_frame
                    .into_trailers()
                    .unwrap_or_else(|_| HeaderMap::new());
                return Ok(send.send_trailers(trailers)?);
            }
        }
    }
}

/// Sends one chunk, and resets the stream if that takes longer than `write_timeout`.
async fn send_with_timeout<E>(
    write_timeout: Option<Duration>,
    send: &mut StreamSender,
    send_chunk: impl AsyncFnOnce(&mut StreamSender) -> Result<(), StreamError>,
) -> Result<(), PumpError<E>> {
    let Some(write_timeout) = write_timeout else {
        return Ok(send_chunk(send).await?);
    };
    if let Ok(result) = timeout(write_timeout, send_chunk(send)).await {
        return Ok(result?);
    }
    send.abort();
    Err(PumpError::Stalled(write_timeout))
}

type PolledFrame<E> = Option<Option<Result<Frame<Bytes>, E>>>;

/// Appends the data that is ready behind a short chunk. A frame that is not data stays in `next_frame`.
fn coalesce<B>(first: Bytes, body: &mut B, next_frame: &mut PolledFrame<B::Error>) -> Bytes
where
    B: Body<Data = Bytes> + Unpin,
{
    if first.len() >= MIN_CHUNK_BYTES || body.is_end_stream() {
        return first;
    }
    let mut joined = BytesMut::new();
    let mut first_chunk = Some(first);
    while joined.len() < MIN_CHUNK_BYTES && !body.is_end_stream() {
        match frame(body).now_or_never() {
            Some(Some(Ok(frame))) if frame.is_data() => {
                let Ok(more) = frame.into_data() else { break };
                if let Some(first) = first_chunk.take() {
                    joined.extend_from_slice(&first);
                }
                joined.extend_from_slice(&more);
            }
            polled => {
                *next_frame = polled;
                break;
            }
        }
    }
    first_chunk.unwrap_or_else(|| joined.freeze())
}

fn frame<B>(body: &mut B) -> impl Future<Output = Option<Result<Frame<Bytes>, B::Error>>>
where
    B: Body<Data = Bytes> + Unpin,
{
    poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx))
}
