//! HTTP/1.1 on a connection to an upstream, before its first request.

use causeway_tunnel::{
    error::is_close,
    io_observer::{IoObserver, ObservedIo},
    request_target::{TargetOverflow, TargetWriter},
};
use hyper::{
    body::Body,
    client::conn::http1::{Builder, Connection, SendRequest},
};
use hyper_util::rt::TokioIo;
use std::{
    error::Error,
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};

/// HTTP version without the last digit of its number.
const VERSION: &[u8] = b"HTTP/1.";

/// Maximum number of fields of a response that hyper accepts by default.
const HYPER_MAX_HEADERS: usize = 100;

/// A connection in the form that hyper requires.
pub type Http1Io<S> = TokioIo<ObservedIo<TargetWriter<S>, Answering>>;

/// Observer that records whether the upstream has sent a byte since the last request. Clones share the record.
#[derive(Clone, Debug, Default)]
pub struct Answering(Arc<AtomicBool>, StatusLine);

impl Answering {
    /// Resets the record for another request.
    pub fn reset(&self) {
        self.0.store(false, Relaxed);
    }

    /// Whether the upstream closed the connection without a byte of a response to the last request, which failed with
    /// `error`.
    pub fn closed_unanswered(&self, error: &hyper::Error) -> bool {
        let is_closed = error.is_incomplete_message() || is_close(error);
        is_closed && !self.0.load(Relaxed)
    }
}

impl IoObserver for Answering {
    fn rewrite_read(&mut self, bytes: &mut [u8]) {
        if !bytes.is_empty() {
            if !self.0.swap(true, Relaxed) {
                self.1.begin();
            }
            self.1.rewrite(bytes);
        }
    }

    /// Ignores broken pipes and resets. An upstream that has responded before it has read the request's body may then close
    /// its connection, and the response must still be read.
    fn on_write_failed(&mut self, error: io::Error) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Ok(()),
            _ => Err(error),
        }
    }
}

/// Begins HTTP/1.1 on a connection. `overflow` is the rest of the first request's target. The limits are the maximum number
/// of fields of a response head and its maximum size in bytes, or hyper's default.
///
/// # Errors
/// If hyper does not accept the connection.
pub async fn handshake<S, B>(
    connection: S,
    overflow: Option<TargetOverflow>,
    (max_headers, max_buffer): (usize, Option<usize>),
) -> hyper::Result<(SendRequest<B>, Connection<Http1Io<S>, B>, Answering)>
where
    S: AsyncRead + AsyncWrite + Unpin,
    B: Body<Data: Send, Error: Into<Box<dyn Error + Send + Sync>>> + 'static,
{
    let observer = Answering::default();
    let connection = ObservedIo::new(TargetWriter::new(connection, overflow), observer.clone());
    let mut builder = Builder::new();
    builder.title_case_headers(true);
    if max_headers != HYPER_MAX_HEADERS {
        // Setting it costs an allocation for each response, so the default is not set.
        builder.max_headers(max_headers);
    }
    if let Some(bytes) = max_buffer {
        builder.max_buf_size(bytes);
    }
    let (sender, connection) = builder.handshake(TokioIo::new(connection)).await?;
    Ok((sender, connection, observer))
}

/// Returns the connection below HTTP/1.1.
pub fn into_inner<S>(io: Http1Io<S>) -> S {
    io.into_inner().into_inner().into_inner()
}

/// Adapter that makes hyper read a later minor version as 1.1 (RFC 9110 section 2.5), since hyper knows only 1.0 and 1.1. If
/// an interim response (1xx) comes first, its line is adapted instead of the final response's.
#[derive(Clone, Debug, Default)]
pub(crate) struct StatusLine {
    /// Number of bytes of [`VERSION`] that were read, or one more after the version.
    position: usize,
}

impl StatusLine {
    /// Begins another response.
    pub(crate) fn begin(&mut self) {
        self.position = 0;
    }

    /// Processes the next bytes.
    pub(crate) fn rewrite(&mut self, bytes: &mut [u8]) {
        let mut bytes = bytes.iter_mut();
        while self.position <= VERSION.len()
            && let Some(byte) = bytes.next()
        {
            match VERSION.get(self.position) {
                Some(expected) if expected == byte => self.position += 1,
                Some(_) => self.position = VERSION.len() + 1,
                None => {
                    if matches!(byte, b'2'..=b'9') {
                        *byte = b'1';
                    }
                    self.position += 1;
                }
            }
        }
    }
}

/// Waits for `work` as long as the body moves, because an upstream may read for hours. `progress` is the number of consumed
/// parts of the body. Returns `None` if none was consumed for `idle_timeout`.
pub async fn while_moving<T>(
    idle_timeout: Duration,
    progress: &AtomicUsize,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    loop {
        let before = progress.load(Relaxed);
        match timeout(idle_timeout, &mut work).await {
            Ok(done) => return Some(done),
            Err(_) if progress.load(Relaxed) == before => return None,
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use http::Request;
    use http_body::Frame;
    use http_body_util::StreamBody;
    use std::future::pending;
    use std::{
        convert::Infallible,
        pin::Pin,
        task::{Context, Poll, ready},
    };
    use tokio::time::{Instant, sleep};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadBuf, duplex},
        sync::{Notify, mpsc},
    };

    /// A connection whose peer resets it, from a given time on, when more is sent.
    struct Resetting {
        io: DuplexStream,
        resets: Arc<AtomicBool>,
        written: Arc<Notify>,
    }

    impl AsyncRead for Resetting {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for Resetting {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.resets.load(Relaxed) {
                self.written.notify_one();
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            Pin::new(&mut self.io).poll_write(cx, buf)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_shutdown(cx)
        }
    }

    #[tokio::test]
    async fn an_answer_is_read_after_the_upstream_reset_the_request_body() {
        let (near, mut far) = duplex(64 << 10);
        let (resets, written) = (Arc::<AtomicBool>::default(), Arc::<Notify>::default());
        let near = Resetting {
            io: near,
            resets: resets.clone(),
            written: written.clone(),
        };
        let begun = handshake(near, None, (HYPER_MAX_HEADERS, None)).await;
        let (mut sender, connection, _) = begun.unwrap();
        let (body, mut parts) = mpsc::channel::<Bytes>(1);
        let parts = futures_util::stream::poll_fn(move |cx| {
            let part = ready!(parts.poll_recv(cx));
            Poll::Ready(part.map(|part| Ok::<_, Infallible>(Frame::data(part))))
        });
        let request = Request::post("/").body(StreamBody::new(parts)).unwrap();
        let app = async {
            let mut head = [0; 1024];
            assert!(far.read(&mut head).await.unwrap() > 0);
            resets.store(true, Relaxed);
            body.send(Bytes::from_static(b"some of it")).await.unwrap();
            written.notified().await;
            let answer = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n";
            far.write_all(answer).await.unwrap();
            far.flush().await.unwrap();
            std::future::pending::<Infallible>().await
        };
        let answer = tokio::select! {
            answer = sender.send_request(request) => answer.unwrap(),
            ended = connection => panic!("it ended without an answer: {ended:?}"),
            never = app => match never {},
        };
        assert_eq!(answer.status(), 413);
    }

    #[test]
    fn later_minor_versions_are_read_as_1_1_however_the_line_is_cut() {
        for (line, read) in [
            ("HTTP/1.2 200 OK\r\n", "HTTP/1.1 200 OK\r\n"),
            ("HTTP/1.9 204\r\nx: HTTP/1.2", "HTTP/1.1 204\r\nx: HTTP/1.2"),
            ("HTTP/1.0 200 OK\r\n", "HTTP/1.0 200 OK\r\n"),
            ("HTTP/2.2 200 OK\r\n", "HTTP/2.2 200 OK\r\n"),
            ("XHTTP/1.2 200 OK\r\n", "XHTTP/1.2 200 OK\r\n"),
        ] {
            for cut in 1..=line.len() {
                let (mut status, mut bytes) = (StatusLine::default(), line.as_bytes().to_vec());
                for part in bytes.chunks_mut(cut) {
                    status.rewrite(part);
                }
                assert_eq!(String::from_utf8(bytes).unwrap(), read, "{cut}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_lasts_while_parts_are_taken_and_one_bound_more() {
        let (taken, bound) = (AtomicUsize::new(0), Duration::from_secs(10));
        let began = Instant::now();
        let parts = async {
            for _ in 0..5 {
                sleep(Duration::from_secs(9)).await;
                taken.fetch_add(1, Relaxed);
            }
            pending::<()>().await;
        };
        assert!(while_moving(bound, &taken, parts).await.is_none());
        assert!(began.elapsed() >= Duration::from_secs(45) + Duration::from_secs(5));
        let late = async { sleep(bound / 2).await };
        assert!(while_moving(bound, &taken, late).await.is_some());
    }
}
