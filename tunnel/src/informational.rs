//! Interim responses (1xx, RFC 9110 §15.2) of an HTTP server. hyper cannot send them.
//!
//! hyper sends one response per request. [`InformationalIo`] lies below hyper and writes interim responses between hyper's
//! own writes. For HTTP/1.1 it writes them after hyper has flushed all of the last response, for HTTP/2 as a frame between
//! two frames. The fields do not change the compression state of the connection (RFC 7541 §6.2.2). Interim responses are
//! advice: one that does not fit, or that cannot be written before the response, is dropped.
//!
//! hyper does not report the HTTP/2 stream of a request. It hands streams over in the order in which they begin, except those
//! that it refuses itself. It writes such a refusal before it hands over the streams that came behind. After a refusal, and
//! while one may wait for the socket, streams cannot be identified reliably. That connection gets no more interim responses.
//! The same holds for a connection whose client shrinks the compression table. The next head then has to announce the new
//! size first (RFC 7541 §4.2), and only hyper can write that.

use crate::frame_parser::{
    ACK, CONTINUATION, ClientFrames, END_HEADERS, FrameEvent, FrameParser, GOAWAY, HEADERS,
    RST_STREAM, SETTINGS,
};
use bytes::{Buf, Bytes};
use futures_util::task::AtomicWaker;
use http::{HeaderMap, StatusCode};
use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum size of an interim response, in bytes: any HTTP/2 peer accepts this many in one frame (RFC 9113 §4.2).
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Maximum number of interim responses that wait for the socket of one connection.
const MAX_QUEUED: usize = 16;
/// Maximum size of the waiting interim responses, in bytes. It limits the memory for a client that reads nothing. Hints that
/// a browser uses are far smaller.
const MAX_QUEUED_BYTES: usize = 32 << 10;

/// Request that an interim response belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeId {
    /// A request whose client accepts no interim responses, or whose stream is not known.
    None,
    /// The present request of an HTTP/1.1 connection.
    Http1,
    /// The request of this HTTP/2 stream.
    Http2(u32),
}

/// Interim answers of one connection. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct InformationalResponses(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Number of interim responses that wait.
    queued_count: AtomicUsize,
    /// Number of streams that have begun and that hyper has not handed over.
    pending_count: AtomicUsize,
    /// Whether the socket accepts no bytes now.
    blocked: AtomicBool,
    waker: AtomicWaker,
}

#[derive(Debug, Default)]
struct Queue {
    responses: VecDeque<(ExchangeId, Bytes)>,
    pending_streams: VecDeque<u32>,
    /// Whether new streams cannot be identified any more.
    is_out_of_sync: bool,
}

impl Queue {
    fn mark_out_of_sync(&mut self) {
        self.is_out_of_sync = true;
        self.pending_streams.clear();
    }
}

impl InformationalResponses {
    /// Returns the stream of the HTTP/2 request that hyper hands over now.
    pub fn next_exchange(&self) -> ExchangeId {
        let shared = &self.0;
        let mut queue = shared.queue();
        let stream = queue.pending_streams.pop_front();
        // Refusals of earlier streams may not have been written yet.
        queue.is_out_of_sync |= shared.blocked.load(Relaxed) && !queue.pending_streams.is_empty();
        if queue.is_out_of_sync {
            queue.pending_streams.clear();
        }
        shared
            .pending_count
            .store(queue.pending_streams.len(), Relaxed);
        match stream {
            Some(stream) if !queue.is_out_of_sync => ExchangeId::Http2(stream),
            _ => ExchangeId::None,
        }
    }

    /// Sends an interim response. The fields must be ready for the client.
    pub fn send(&self, exchange: ExchangeId, status: StatusCode, fields: &HeaderMap) {
        let bytes = match exchange {
            ExchangeId::None => return,
            ExchangeId::Http1 => encode_http1(status, fields),
            ExchangeId::Http2(stream) => encode_http2(stream, status, fields),
        };
        let mut queue = self.0.queue();
        let queued_bytes: usize = queue.responses.iter().map(|(_, bytes)| bytes.len()).sum();
        let fits = bytes.len() <= MAX_HEAD_BYTES && queued_bytes + bytes.len() <= MAX_QUEUED_BYTES;
        if fits && queue.responses.len() < MAX_QUEUED {
            queue.responses.push_back((exchange, bytes.into()));
            self.0.queued_count.store(queue.responses.len(), Relaxed);
            self.0.waker.wake();
        }
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pop_queued(&self) -> Option<Bytes> {
        if self.queued_count.load(Relaxed) == 0 {
            return None;
        }
        let mut queue = self.queue();
        let response = queue.responses.pop_front();
        self.queued_count.store(queue.responses.len(), Relaxed);
        response.map(|(_, bytes)| bytes)
    }

    /// Stops interim responses over HTTP/2.
    fn disable_http2(&self) {
        self.queue().mark_out_of_sync();
        self.pending_count.store(0, Relaxed);
        self.drop_queued(|of| matches!(of, ExchangeId::Http2(_)));
    }

    fn record_stream(&self, stream: u32) {
        let mut queue = self.queue();
        if !queue.is_out_of_sync {
            queue.pending_streams.push_back(stream);
            self.pending_count
                .store(queue.pending_streams.len(), Relaxed);
        }
    }

    /// Drops the waiting interim responses of the matching requests.
    fn drop_queued(&self, matches: impl Fn(ExchangeId) -> bool) {
        if self.queued_count.load(Relaxed) > 0 {
            let mut queue = self.queue();
            queue.responses.retain(|(exchange, _)| !matches(*exchange));
            self.queued_count.store(queue.responses.len(), Relaxed);
        }
    }

    /// Handles a frame that hyper has written.
    fn record_written_frame(&self, kind: u8, stream: u32) {
        if matches!(kind, RST_STREAM | HEADERS) {
            // The final response was sent.
            self.drop_queued(|of| of == ExchangeId::Http2(stream));
        }
        let may_refuse =
            matches!(kind, RST_STREAM | HEADERS) && self.pending_count.load(Relaxed) > 0;
        // h2 ignores streams that begin after a GOAWAY.
        if may_refuse || kind == GOAWAY {
            let mut queue = self.queue();
            // h2 may or may not return a stream that it has reset.
            if kind == GOAWAY || queue.pending_streams.contains(&stream) {
                queue.mark_out_of_sync();
                self.pending_count.store(0, Relaxed);
            }
        }
    }
}

/// Encodes an interim response of HTTP/1.1 (RFC 9112 §4).
fn encode_http1(status: StatusCode, fields: &HeaderMap) -> Vec<u8> {
    let reason = status.canonical_reason().unwrap_or_default();
    let mut bytes = format!("HTTP/1.1 {} {reason}\r\n", status.as_str()).into_bytes();
    for (name, value) in fields {
        bytes.extend_from_slice(name.as_str().as_bytes());
        bytes.extend_from_slice(b": ");
        bytes.extend_from_slice(value.as_bytes());
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(b"\r\n");
    bytes
}

/// Encodes an interim response of HTTP/2: a HEADERS frame without `END_STREAM` (RFC 9113 §8.1). Its fields are literals
/// without indexing (RFC 7541 §6.2.2).
fn encode_http2(stream: u32, status: StatusCode, fields: &HeaderMap) -> Vec<u8> {
    const FRAME_HEADER_LEN: usize = 9;
    /// The name `:status` in the static table (RFC 7541, Appendix A).
    const STATUS_NAME_INDEX: u8 = 8;
    let mut bytes = vec![0; FRAME_HEADER_LEN];
    bytes.push(STATUS_NAME_INDEX);
    encode_string(&mut bytes, status.as_str().as_bytes());
    for (name, value) in fields {
        bytes.push(0);
        encode_string(&mut bytes, name.as_str().as_bytes());
        encode_string(&mut bytes, value.as_bytes());
    }
    let length = u32::try_from(bytes.len() - FRAME_HEADER_LEN).unwrap_or(u32::MAX);
    let [_, length @ ..] = length.to_be_bytes();
    bytes[..3].copy_from_slice(&length);
    bytes[3] = HEADERS;
    bytes[4] = END_HEADERS;
    bytes[5..FRAME_HEADER_LEN].copy_from_slice(&stream.to_be_bytes());
    bytes
}

/// Appends a string without Huffman coding, preceded by its length with a prefix of seven bits (RFC 7541 §5).
fn encode_string(bytes: &mut Vec<u8>, text: &[u8]) {
    const PREFIX: usize = 127;
    if text.len() < PREFIX {
        bytes.extend(u8::try_from(text.len()));
    } else {
        bytes.push(0x7f);
        let mut rest = text.len() - PREFIX;
        while rest >= 128 {
            bytes.extend(u8::try_from(rest % 128 + 128));
            rest /= 128;
        }
        bytes.extend(u8::try_from(rest));
    }
    bytes.extend_from_slice(text);
}

/// Parser state of the client's SETTINGS.
#[derive(Debug, Default)]
struct Settings {
    /// Whether a SETTINGS frame has begun and not ended.
    in_frame: bool,
    /// Number of SETTINGS frames that have arrived.
    frames: usize,
    /// Bytes of a value that has not arrived completely.
    partial_value: Vec<u8>,
}

impl Settings {
    /// Whether the compression table may have become smaller.
    fn may_shrink_table(&mut self, part: FrameEvent<'_>) -> bool {
        /// Size of one setting, in bytes: identifier and value (RFC 9113 §6.5.1).
        const SETTING_LEN: usize = 6;
        /// Initial size of the compression table (RFC 7541 §4.2, RFC 9113 §6.5.2).
        const DEFAULT_TABLE_SIZE: u32 = 4096;
        match part {
            FrameEvent::Header(head) => {
                self.in_frame = head.kind == SETTINGS && head.flags & ACK == 0;
                self.frames += usize::from(self.in_frame);
                self.partial_value.clear();
                false
            }
            FrameEvent::Payload { bytes, .. } if self.in_frame => {
                self.partial_value.extend_from_slice(bytes);
                let may_shrink = self.partial_value.chunks_exact(SETTING_LEN).any(|value| {
                    let (name, size) = value.split_at(2);
                    let size = size
                        .iter()
                        .fold(0, |size, byte| size << 8 | u32::from(*byte));
                    name == [0, 1] && (size < DEFAULT_TABLE_SIZE || self.frames > 1)
                });
                let complete_len = self.partial_value.len() / SETTING_LEN * SETTING_LEN;
                self.partial_value.drain(..complete_len);
                may_shrink
            }
            FrameEvent::Payload { .. } => false,
        }
    }
}

/// A client's connection, on which interim answers are written as well.
#[derive(Debug)]
pub struct InformationalIo<S> {
    io: S,
    responses: InformationalResponses,
    read_frames: ClientFrames,
    last_stream: u32,
    settings: Settings,
    write_parser: FrameParser,
    /// Whether hyper has begun a head of several frames and not ended it.
    in_head: bool,
    /// Whether hyper has written nothing since its last flush.
    flushed: bool,
    /// Rest of the interim response that is being written.
    partial_response: Bytes,
}

impl<S> InformationalIo<S> {
    /// Wraps a new connection.
    pub fn new(io: S, responses: InformationalResponses) -> Self {
        Self {
            io,
            responses,
            read_frames: ClientFrames::default(),
            last_stream: 0,
            settings: Settings::default(),
            write_parser: FrameParser::default(),
            in_head: false,
            flushed: true,
            partial_response: Bytes::new(),
        }
    }

    fn observe_read(&mut self, bytes: &[u8]) {
        let Self {
            read_frames,
            last_stream,
            settings,
            responses,
            ..
        } = self;
        read_frames.parse(bytes, |part| {
            if let FrameEvent::Header(head) = part
                && head.kind == HEADERS
                && head.stream > *last_stream
            {
                *last_stream = head.stream;
                responses.0.record_stream(head.stream);
            }
            if settings.may_shrink_table(part) {
                responses.0.disable_http2();
            }
        });
    }

    fn observe_write(&mut self, bytes: &[u8]) {
        if !self.read_frames.is_http2() {
            return;
        }
        let Self {
            write_parser,
            in_head,
            responses,
            ..
        } = self;
        write_parser.parse(bytes, |part| {
            let FrameEvent::Header(head) = part else {
                return;
            };
            let is_head_frame = matches!(head.kind, HEADERS | CONTINUATION);
            *in_head = is_head_frame && head.flags & END_HEADERS == 0;
            responses.0.record_written_frame(head.kind, head.stream);
        });
    }
}

impl<S: AsyncWrite + Unpin> InformationalIo<S> {
    /// Writes the interim responses that may be sent now. While the result is pending, no other bytes may be written.
    fn poll_write_responses(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            while !self.partial_response.is_empty() {
                let sent = ready!(Pin::new(&mut self.io).poll_write(cx, &self.partial_response))?;
                if sent == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.partial_response.advance(sent);
            }
            let can_write = if self.read_frames.is_http2() {
                self.write_parser.is_at_frame_boundary() && !self.in_head
            } else {
                self.flushed
            };
            match can_write.then(|| self.responses.0.pop_queued()).flatten() {
                Some(next) => self.partial_response = next,
                None => return Poll::Ready(Ok(())),
            }
        }
    }

    /// Prepares for bytes from hyper, which belong to a response if the connection speaks HTTP/1.1.
    fn poll_before_hyper_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_responses(cx))?;
        self.flushed = false;
        self.responses.0.drop_queued(|of| of == ExchangeId::Http1);
        Poll::Ready(Ok(()))
    }

    fn record_blocked<T>(&self, polled: &Poll<T>) {
        let blocked = polled.is_pending();
        if self.responses.0.blocked.load(Relaxed) != blocked {
            self.responses.0.blocked.store(blocked, Relaxed);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for InformationalIo<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let filled_before = buf.filled().len();
        let polled = Pin::new(&mut this.io).poll_read(cx, buf);
        if polled.is_pending() {
            this.responses.0.waker.register(cx.waker());
        }
        this.observe_read(buf.filled().get(filled_before..).unwrap_or_default());
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for InformationalIo<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_before_hyper_write(cx))?;
        let polled = Pin::new(&mut this.io).poll_write(cx, buf);
        this.record_blocked(&polled);
        let written = ready!(polled)?;
        this.observe_write(buf.get(..written).unwrap_or_default());
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // h2 has nothing left to write when it flushes.
        this.flushed = true;
        ready!(this.poll_write_responses(cx))?;
        Pin::new(&mut this.io).poll_flush(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_before_hyper_write(cx))?;
        let polled = Pin::new(&mut this.io).poll_write_vectored(cx, bufs);
        this.record_blocked(&polled);
        let written = ready!(polled)?;
        let mut left = written;
        for buf in bufs {
            let part = buf.len().min(left);
            this.observe_write(buf.get(..part).unwrap_or_default());
            left -= part;
        }
        Poll::Ready(Ok(written))
    }

    causeway_rt::forward!(io: poll_shutdown, is_write_vectored);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame_parser::PREFACE;
    use http::{HeaderValue, Request, Response};
    use std::future::poll_fn;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, duplex},
        time::{Duration, timeout},
    };

    const SOON: Duration = Duration::from_mins(1);

    fn links(length: usize) -> HeaderMap {
        let mut fields = HeaderMap::new();
        let link = HeaderValue::try_from("x".repeat(length)).unwrap();
        fields.append("link", link.clone());
        fields.append("link", link);
        fields
    }

    #[tokio::test]
    async fn interim_answers_reach_the_streams_of_an_http2_client() {
        let (near, far) = duplex(1 << 10);
        let interims = InformationalResponses::default();
        let io = InformationalIo::new(near, interims.clone());
        let serving = async {
            let mut server = h2::server::handshake(io).await.unwrap();
            let mut replies = Vec::new();
            while let Some(accepted) = server.accept().await {
                let (_, reply) = accepted.unwrap();
                replies.push((interims.next_exchange(), reply));
                if replies.len() < 3 {
                    continue;
                }
                // In reverse order: streams do not wait for each other.
                for (exchange, mut reply) in replies.drain(..).rev() {
                    let ExchangeId::Http2(stream) = exchange else {
                        panic!("{exchange:?}")
                    };
                    let length = usize::try_from(stream).unwrap() * 100;
                    let hints = StatusCode::EARLY_HINTS;
                    interims.send(exchange, hints, &links(length));
                    interims.send(exchange, hints, &links(MAX_HEAD_BYTES));
                    // HPACK compresses it with the earlier header fields.
                    let mut answer = Response::new(());
                    answer.headers_mut().extend(links(length));
                    reply.send_response(answer, true).unwrap();
                }
            }
        };
        let asking = async {
            let (mut client, connection) = h2::client::handshake(far).await.unwrap();
            let asked = async {
                let mut answers = Vec::new();
                for _ in 0..3 {
                    client = client.ready().await.unwrap();
                    let request = Request::get("http://a/").body(()).unwrap();
                    answers.push(client.send_request(request, true).unwrap().0);
                }
                for answer in &mut answers {
                    let length = usize::try_from(answer.stream_id().as_u32()).unwrap() * 100;
                    let hint = poll_fn(|cx| answer.poll_informational(cx)).await;
                    let hint = hint.unwrap().unwrap();
                    assert_eq!(hint.status(), StatusCode::EARLY_HINTS);
                    assert_eq!(*hint.headers(), links(length));
                    let answer = answer.await.unwrap();
                    assert_eq!(answer.status(), StatusCode::OK);
                    assert_eq!(*answer.headers(), links(length));
                }
            };
            tokio::select! {
                () = asked => {}
                ended = connection => panic!("{ended:?}"),
            }
        };
        timeout(SOON, async { tokio::join!(serving, asking) })
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn streams_after_a_refused_stream_have_no_interim_answers() {
        let request = |stream: u8, block: &[u8]| {
            let length = u8::try_from(block.len()).unwrap();
            [
                &[0, 0, length, HEADERS, END_HEADERS | 1, 0, 0, 0, stream],
                block,
            ]
            .concat()
        };
        let sound = [0x82, 0x86, 0x84, 0x41, 1, b'a'];
        let sent = [
            PREFACE,
            &[0, 0, 0, SETTINGS, 0, 0, 0, 0, 0],
            &request(1, &sound),
        ];
        let refused = [
            // Without a path.
            &request(3, &[0x82])[..],
            &request(5, &sound),
        ];
        let (near, mut far) = duplex(1 << 16);
        far.write_all(&sent.concat()).await.unwrap();
        let interims = InformationalResponses::default();
        let io = InformationalIo::new(near, interims.clone());
        let mut server = h2::server::handshake(io).await.unwrap();
        for expected in [ExchangeId::Http2(1), ExchangeId::None] {
            let accepted = timeout(SOON, server.accept()).await.unwrap();
            drop(accepted.unwrap().unwrap());
            assert_eq!(interims.next_exchange(), expected);
            far.write_all(&refused.concat()).await.unwrap();
        }
    }

    #[tokio::test]
    async fn http1_interim_answers_precede_an_answer_and_never_split_one() {
        let (near, mut far) = duplex(1 << 10);
        let interims = InformationalResponses::default();
        let mut io = InformationalIo::new(near, interims.clone());
        let hint = || interims.send(ExchangeId::Http1, StatusCode::EARLY_HINTS, &links(1));
        hint();
        io.write_all(b"one ").await.unwrap();
        // hyper may have more bytes of the first response.
        hint();
        io.write_all(b"two ").await.unwrap();
        io.flush().await.unwrap();
        hint();
        io.flush().await.unwrap();
        io.write_all(b"three").await.unwrap();
        drop(io);
        let mut read = String::new();
        far.read_to_string(&mut read).await.unwrap();
        let hint = "HTTP/1.1 103 Early Hints\r\nlink: x\r\nlink: x\r\n\r\n";
        assert_eq!(read, format!("{hint}one two {hint}three"));
    }

    #[tokio::test]
    async fn http2_interim_answers_never_split_a_head() {
        let (near, mut far) = duplex(1 << 10);
        let interims = InformationalResponses::default();
        let mut io = InformationalIo::new(near, interims.clone());
        far.write_all(PREFACE).await.unwrap();
        io.read_exact(&mut [0; PREFACE.len()]).await.unwrap();
        let part = |kind, flags| [0, 0, 1, kind, flags, 0, 0, 0, 1, 0x88];
        let (first, last) = (part(HEADERS, 0), part(CONTINUATION, END_HEADERS));
        let hint = encode_http2(3, StatusCode::EARLY_HINTS, &links(1));
        io.write_all(&first).await.unwrap();
        interims.send(ExchangeId::Http2(3), StatusCode::EARLY_HINTS, &links(1));
        io.flush().await.unwrap();
        io.write_all(&last).await.unwrap();
        io.flush().await.unwrap();
        drop(io);
        let mut read = Vec::new();
        far.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, [&first[..], &last, &hint].concat());
    }

    #[test]
    fn a_client_that_reads_no_bytes_buffers_few_answers_and_bytes() {
        for (length, most) in [(1, MAX_QUEUED), (6_000, 2)] {
            let interims = InformationalResponses::default();
            for stream in 0..100 {
                let exchange = ExchangeId::Http2(2 * stream + 1);
                interims.send(exchange, StatusCode::EARLY_HINTS, &links(length));
            }
            assert_eq!(interims.0.queue().responses.len(), most, "{length}");
        }
    }

    #[test]
    fn a_client_that_shrinks_the_table_gets_no_interim_answers() {
        let settings = |values: &[(u16, u32)]| {
            let length = u8::try_from(values.len() * 6).unwrap();
            let mut bytes = vec![0, 0, length, SETTINGS, 0, 0, 0, 0, 0];
            for (name, value) in values {
                bytes.extend(name.to_be_bytes());
                bytes.extend(value.to_be_bytes());
            }
            bytes
        };
        let request = [0, 0, 1, HEADERS, END_HEADERS, 0, 0, 0, 1, 0x82];
        let other = (4, 1 << 20);
        for (sent, known) in [
            (settings(&[]), true),
            (settings(&[other, (1, 4096)]), true),
            (settings(&[(1, 65_536), other]), true),
            (settings(&[other, (1, 4095)]), false),
            (settings(&[(1, 0)]), false),
            (
                [settings(&[(1, 65_536)]), settings(&[(1, 8192)])].concat(),
                false,
            ),
        ] {
            for cut in [1, 5, 1000] {
                let interims = InformationalResponses::default();
                let mut io = InformationalIo::new(tokio::io::empty(), interims.clone());
                for part in [PREFACE, &sent, &request].concat().chunks(cut) {
                    io.observe_read(part);
                }
                let exchange = interims.next_exchange();
                assert_eq!(exchange == ExchangeId::Http2(1), known, "{sent:?} {cut}");
            }
        }
    }
}
