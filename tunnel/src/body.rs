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

/// Chunks shorter than this are joined with what is ready behind them.
const JOIN_BELOW: usize = 16 * 1024;

/// Why a body did not get through.
#[derive(Debug, thiserror::Error)]
pub enum PumpError<E> {
    /// The body itself failed: its peer went away or broke the protocol.
    #[error("the body failed: {0}")]
    Body(E),
    /// The stream failed.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The other end has taken nothing for this long.
    #[error("no bytes were read for {0:?}")]
    Stalled(Duration),
}

/// Sends all of `body`, and its trailers, into the stream. A body that fails resets the stream, behind what it
/// brought before. With `patience` the stream is reset when the other end takes nothing of a chunk for so long.
///
/// # Errors
/// If the body or the stream fails, or patience ends.
pub async fn pump<B>(
    mut body: B,
    send: &mut StreamSender,
    patience: Option<Duration>,
) -> Result<(), PumpError<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut next = None;
    loop {
        let frame = if let Some(frame) = next.take() {
            frame
        } else {
            tokio::select! {
                biased;
                frame = frame(&mut body) => frame,
                error = send.reset() => return Err(error.into()),
            }
        };
        let frame = match frame {
            None => return Ok(send.end()?),
            Some(Err(error)) => {
                send.break_off().await;
                return Err(PumpError::Body(error));
            }
            Some(Ok(frame)) => frame,
        };
        match frame.into_data() {
            Ok(chunk) => {
                let chunk = join(chunk, &mut body, &mut next);
                if chunk.is_empty() {
                    continue;
                }
                if body.is_end_stream() && next.is_none() {
                    return patient(patience, send, async |send| send.last(chunk).await).await;
                }
                patient(patience, send, async |send| send.data(chunk).await).await?;
            }
            Err(other) => {
                let trailers = other.into_trailers().unwrap_or_else(|_| HeaderMap::new());
                return Ok(send.trailers(trailers)?);
            }
        }
    }
}

/// Sends one chunk; gives the stream up if that takes longer than `patience`.
async fn patient<E>(
    patience: Option<Duration>,
    send: &mut StreamSender,
    chunk: impl AsyncFnOnce(&mut StreamSender) -> Result<(), StreamError>,
) -> Result<(), PumpError<E>> {
    let Some(patience) = patience else {
        return Ok(chunk(send).await?);
    };
    if let Ok(taken) = timeout(patience, chunk(send)).await {
        return Ok(taken?);
    }
    send.abort();
    Err(PumpError::Stalled(patience))
}

type PolledFrame<E> = Option<Option<Result<Frame<Bytes>, E>>>;

/// Appends what is ready behind a short chunk. What is not data is left in `next`.
fn join<B>(first: Bytes, body: &mut B, next: &mut PolledFrame<B::Error>) -> Bytes
where
    B: Body<Data = Bytes> + Unpin,
{
    if first.len() >= JOIN_BELOW || body.is_end_stream() {
        return first;
    }
    let mut joined = BytesMut::new();
    let mut single = Some(first);
    while joined.len() < JOIN_BELOW && !body.is_end_stream() {
        match frame(body).now_or_never() {
            Some(Some(Ok(frame))) if frame.is_data() => {
                let Ok(more) = frame.into_data() else { break };
                if let Some(first) = single.take() {
                    joined.extend_from_slice(&first);
                }
                joined.extend_from_slice(&more);
            }
            other => {
                *next = other;
                break;
            }
        }
    }
    single.unwrap_or_else(|| joined.freeze())
}

fn frame<B>(body: &mut B) -> impl Future<Output = Option<Result<Frame<Bytes>, B::Error>>>
where
    B: Body<Data = Bytes> + Unpin,
{
    poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx))
}
