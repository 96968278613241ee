//! Limit on the control frames of a client, below an HTTP/2 server that has none.
//!
//! h2 limits resets and the size of frames, but serves SETTINGS, PING, PRIORITY, `WINDOW_UPDATE` and frames of unknown kinds
//! without a limit. Each of these frames costs tokens. A client earns tokens by its requests and by the bytes that it
//! receives, since those cause such frames, and over time. A client without tokens gets GOAWAY with `ENHANCE_YOUR_CALM` (RFC
//! 9113 §10.5). The bytes that it still sends are discarded until it has read the GOAWAY. HTTP/1.1 is not limited.
//!
//! The codes of resets that hyper would take for the complete end of a session are replaced in both directions: those of the client,
//! and those of aborted sessions to the client, see [`crate::reset_codes`].

use crate::{
    frame_parser::{
        CONTINUATION, ClientFrames, DATA, FrameEvent, GOAWAY, HEADERS, PRIORITY, RST_STREAM,
        WINDOW_UPDATE,
    },
    reset_codes::{AbortedStreams, CONNECT_ERROR, ORDINARY_END_CODES, WrittenFrames},
    token_bucket::TokenBucket,
};
use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

/// Number of tokens at the beginning, which is also the maximum.
const MAX_TOKENS: u64 = 10_000;
/// Tokens that a client earns per second.
const TOKENS_PER_SECOND: u64 = 1_000;
/// Tokens that a request earns: the cost of a client's usual frames for one stream, with a PING and a PRIORITY.
const TOKENS_PER_STREAM: u64 = 24;
/// Tokens for a frame that an honest client rarely sends: SETTINGS, PING, unknown kinds.
const RARE_FRAME_COST: u64 = 10;
/// Error code for a peer that generates excessive load (RFC 9113 §7).
const ENHANCE_YOUR_CALM: u32 = 11;
/// Time that a client gets to read the GOAWAY before its connection closes.
const GOAWAY_GRACE: Duration = Duration::from_secs(1);
/// Maximum number of bytes that are discarded during this time.
const MAX_DISCARDED_BYTES: usize = 1 << 20;

/// Client connection whose control frames are limited.
#[derive(Debug)]
pub struct ControlFrameLimiter<S, F> {
    io: S,
    on_flood: F,
    read_frames: ClientFrames,
    written_frames: WrittenFrames,
    aborted: AbortedStreams,
    bucket: TokenBucket,
    last_stream: u32,
    /// Whether the last frame that began is a reset.
    in_reset: bool,
    goaway_close: Option<Box<GoAwayClose>>,
}

impl<S, F: Fn()> ControlFrameLimiter<S, F> {
    /// Wraps a new connection. `on_flood` is called when the client has exceeded the limit.
    pub fn new(io: S, on_flood: F) -> Self {
        Self {
            io,
            on_flood,
            read_frames: ClientFrames::default(),
            written_frames: WrittenFrames::default(),
            aborted: AbortedStreams::default(),
            bucket: TokenBucket::new(MAX_TOKENS, TOKENS_PER_SECOND),
            last_stream: 0,
            in_reset: false,
            goaway_close: None,
        }
    }

    /// Replaces the codes of the resets of these streams.
    #[must_use]
    pub fn with_aborted_streams(mut self, aborted: AbortedStreams) -> Self {
        self.aborted = aborted;
        self
    }

    /// Whether the budget covers the frames that begin in these bytes. Replaces the codes of resets.
    fn charge(&mut self, bytes: &mut [u8]) -> bool {
        let Self {
            read_frames,
            bucket,
            last_stream,
            in_reset,
            ..
        } = self;
        let mut now = None;
        let mut is_covered = true;
        let mut reset_codes = Vec::new();
        let start = bytes.as_ptr().addr();
        read_frames.parse(bytes, |part| {
            let head = match part {
                FrameEvent::Header(head) => head,
                FrameEvent::Payload { bytes, remaining } => {
                    if *in_reset && remaining == 0 && !bytes.is_empty() {
                        reset_codes.push(bytes.as_ptr().addr() - start + bytes.len() - 1);
                    }
                    return;
                }
            };
            *in_reset = head.kind == RST_STREAM;
            let cost = match head.kind {
                DATA => return,
                // A request; trailers use an existing stream.
                HEADERS if head.stream > *last_stream => {
                    *last_stream = head.stream;
                    return bucket.earn_for_sent(0, 1, TOKENS_PER_STREAM);
                }
                HEADERS | CONTINUATION | PRIORITY | RST_STREAM | WINDOW_UPDATE => 1,
                _ => RARE_FRAME_COST,
            };
            is_covered &= bucket.try_spend(cost, *now.get_or_insert_with(Instant::now));
        });
        for position in reset_codes {
            if let Some(code) = bytes.get_mut(position)
                && ORDINARY_END_CODES.contains(code)
            {
                *code = CONNECT_ERROR;
            }
        }
        is_covered
    }

    /// Records bytes that were written as they are.
    fn record_written(&mut self, bytes: &[u8]) {
        if self.read_frames.is_http2() {
            self.written_frames.parse(bytes, &self.aborted);
            self.bucket.earn_for_sent(bytes.len(), 0, TOKENS_PER_STREAM);
        }
    }

    /// Whether resets in the next bytes may have codes that have to be replaced. Else the bytes are only recorded once they are written.
    fn may_replace_codes(&self) -> bool {
        self.read_frames.is_http2() && self.aborted.is_used()
    }

    /// Whether the code of a reset in these bytes has to be replaced.
    fn has_replaced_code(&self, bufs: &[io::IoSlice<'_>]) -> bool {
        if !self.may_replace_codes() {
            return false;
        }
        let mut frames = self.written_frames.clone();
        (bufs.iter()).any(|buf| frames.parse(buf, &self.aborted).is_some())
    }
}

/// Close of a connection whose client has exceeded the limit.
#[derive(Debug)]
struct GoAwayClose {
    goaway: Vec<u8>,
    sent: usize,
    discarded: usize,
    deadline: Pin<Box<Sleep>>,
}

impl GoAwayClose {
    fn new(last_stream: u32, between_frames: bool) -> Self {
        let mut goaway = Vec::new();
        // No frame can be sent in the middle of another frame.
        if between_frames {
            goaway.extend([0, 0, 8, GOAWAY, 0, 0, 0, 0, 0]);
            goaway.extend(last_stream.to_be_bytes());
            goaway.extend(ENHANCE_YOUR_CALM.to_be_bytes());
        }
        Self {
            goaway,
            sent: 0,
            discarded: 0,
            deadline: Box::pin(sleep(GOAWAY_GRACE)),
        }
    }

    /// Returns `Ready` once the client has closed the connection, or `GOAWAY_GRACE` has passed.
    fn poll<S>(&mut self, io: &mut S, cx: &mut Context<'_>) -> Poll<io::Result<()>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        if self.deadline.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        while let Some(rest @ [_, ..]) = self.goaway.get(self.sent..) {
            self.sent += ready!(Pin::new(&mut *io).poll_write(cx, rest))?;
        }
        ready!(Pin::new(&mut *io).poll_flush(cx))?;
        ready!(Pin::new(&mut *io).poll_shutdown(cx))?;
        let mut scratch = [0; 4096];
        while self.discarded < MAX_DISCARDED_BYTES {
            let mut buf = ReadBuf::new(&mut scratch);
            ready!(Pin::new(&mut *io).poll_read(cx, &mut buf))?;
            if buf.filled().is_empty() {
                break;
            }
            self.discarded += buf.filled().len();
        }
        Poll::Ready(Ok(()))
    }
}

fn flood_error() -> io::Error {
    let detail = "the client sent too many HTTP/2 control frames";
    io::Error::new(io::ErrorKind::InvalidData, detail)
}

impl<S, F> AsyncRead for ControlFrameLimiter<S, F>
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Fn() + Unpin,
{
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.goaway_close.is_none() {
            let filled_before = buf.filled().len();
            ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
            let read = buf.filled_mut().get_mut(filled_before..);
            if this.charge(read.unwrap_or_default()) {
                return Poll::Ready(Ok(()));
            }
            buf.set_filled(filled_before);
            (this.on_flood)();
            let goaway_close =
                GoAwayClose::new(this.last_stream, this.written_frames.is_at_frame_boundary());
            this.goaway_close = Some(Box::new(goaway_close));
        }
        if let Some(goaway_close) = &mut this.goaway_close {
            // It does not matter if the peer is already gone.
            let _ = ready!(goaway_close.poll(&mut this.io, cx));
        }
        Poll::Ready(Err(flood_error()))
    }
}

impl<S, F> AsyncWrite for ControlFrameLimiter<S, F>
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Fn() + Unpin,
{
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.goaway_close.is_some() {
            // The read side closes the connection and wakes its task.
            return Poll::Pending;
        }
        if !this.may_replace_codes() {
            let written = ready!(Pin::new(&mut this.io).poll_write(cx, buf))?;
            this.record_written(buf.get(..written).unwrap_or_default());
            return Poll::Ready(Ok(written));
        }
        let (bytes, frames) = this.written_frames.replace(buf, &this.aborted);
        let written = ready!(Pin::new(&mut this.io).poll_write(cx, bytes))?;
        if written == bytes.len() {
            this.written_frames = frames;
        } else {
            let part = bytes.get(..written).unwrap_or_default();
            this.written_frames.parse(part, &this.aborted);
        }
        this.bucket.earn_for_sent(written, 0, TOKENS_PER_STREAM);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.goaway_close.is_some() {
            return Poll::Pending;
        }
        Pin::new(&mut this.io).poll_flush(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.goaway_close.is_some() {
            return Poll::Pending;
        }
        if this.has_replaced_code(bufs) {
            let first = bufs.iter().find(|buf| !buf.is_empty());
            return Pin::new(this).poll_write(cx, first.map_or(&[][..], |buf| buf));
        }
        let written = ready!(Pin::new(&mut this.io).poll_write_vectored(cx, bufs))?;
        let mut left = written;
        for buf in bufs {
            let part = buf.len().min(left);
            this.record_written(buf.get(..part).unwrap_or_default());
            left -= part;
        }
        Poll::Ready(Ok(written))
    }

    causeway_rt::forward!(io: poll_shutdown, is_write_vectored);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame_parser::{ACK, PING, PREFACE, SETTINGS};
    use std::cell::Cell;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
        sync::mpsc,
    };

    const UNKNOWN: u8 = 0xfa;

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        let mut bytes = vec![0, 0, length, kind, flags];
        bytes.extend(stream.to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    /// Returns the bytes that a client receives after it has sent `sent` to a server that reads on.
    async fn told(sent: &[u8]) -> (Vec<u8>, bool) {
        let (near, mut far): (DuplexStream, DuplexStream) = duplex(64 << 10);
        let floods = Cell::new(false);
        let mut calm = ControlFrameLimiter::new(near, || floods.set(true));
        let server = async {
            calm.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
            let mut sink = [0; 4096];
            while let Ok(1..) = calm.read(&mut sink).await {}
            drop(calm);
        };
        let client = async {
            // A server that closes the connection breaks the pipe after it has sent the reason.
            let _ = far.write_all(&[PREFACE, sent].concat()).await;
            let _ = far.shutdown().await;
            let mut told = Vec::new();
            far.read_to_end(&mut told).await.unwrap();
            told
        };
        let ((), told) = tokio::join!(server, client);
        (told, floods.get())
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_control_frames_gets_enhance_your_calm() {
        let request = frame(HEADERS, 5, 7, &[0x82]);
        for (kind, payload, most) in [
            (SETTINGS, &[][..], MAX_TOKENS / RARE_FRAME_COST),
            (SETTINGS, &[0, 4, 0, 0, 1, 0], MAX_TOKENS / RARE_FRAME_COST),
            (PING, &[7; 8], MAX_TOKENS / RARE_FRAME_COST),
            (UNKNOWN, &[1], MAX_TOKENS / RARE_FRAME_COST),
            (PRIORITY, &[0, 0, 0, 0, 1], MAX_TOKENS),
            (WINDOW_UPDATE, &[0, 0, 0, 1], MAX_TOKENS),
        ] {
            let stream = u32::from(kind == PRIORITY) * 7;
            let many = |count: u64| {
                let flood = frame(kind, 0, stream, payload).repeat(usize::try_from(count).unwrap());
                [request.clone(), flood].concat()
            };
            let (told, flooded) = told(&many(most)).await;
            assert!(!flooded && told.len() == 9, "{kind}");
            let (told, flooded) = self::told(&many(most + TOKENS_PER_STREAM + 2)).await;
            assert!(flooded, "{kind}");
            let goaway = frame(GOAWAY, 0, 0, &[0, 0, 0, 7, 0, 0, 0, 11]);
            assert_eq!(told[9..], goaway, "{kind}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answers_to_sent_frames_use_no_control_frame_budget() {
        let (near, mut far) = duplex(1 << 20);
        let mut calm = ControlFrameLimiter::new(near, || panic!("it is no flood"));
        far.write_all(PREFACE).await.unwrap();
        let mut read = vec![0; 1 << 20];
        calm.read_exact(&mut read[..PREFACE.len()]).await.unwrap();
        for _ in 0..2_000 {
            // 16 KiB of data, and two window updates and an acknowledgement in return.
            calm.write_all(&frame(DATA, 0, 1, &[0; 200]).repeat(80))
                .await
                .unwrap();
            far.read_exact(&mut read[..80 * 209]).await.unwrap();
            let update = frame(WINDOW_UPDATE, 0, 1, &[0, 0, 64, 0]);
            let both = [update.clone(), update, frame(PING, ACK, 0, &[0; 8])].concat();
            far.write_all(&both).await.unwrap();
            calm.read_exact(&mut read[..both.len()]).await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn ordinary_codes_of_resets_become_errors() {
        let mut sent = PREFACE.to_vec();
        let mut expected = PREFACE.to_vec();
        // The payload of other frames stays, also that of the same length.
        for (kind, code, becomes) in [
            (RST_STREAM, 0, CONNECT_ERROR),
            (RST_STREAM, 8, CONNECT_ERROR),
            (RST_STREAM, 7, 7),
            (WINDOW_UPDATE, 8, 8),
            (DATA, 0, 0),
        ] {
            sent.extend(frame(kind, 0, 1, &[0, 0, 0, code]));
            expected.extend(frame(kind, 0, 1, &[0, 0, 0, becomes]));
        }
        for cut in 1..=sent.len() {
            let (near, mut far) = duplex(1 << 10);
            let mut limiter = ControlFrameLimiter::new(near, || panic!("it is no flood"));
            let mut read = Vec::new();
            for part in sent.chunks(cut) {
                far.write_all(part).await.unwrap();
                let mut buf = vec![0; part.len()];
                limiter.read_exact(&mut buf).await.unwrap();
                read.extend(buf);
            }
            assert_eq!(read, expected, "{cut}");
        }
    }

    /// Connection that takes at most this many bytes in one write, so that the frames of h2 are cut anywhere.
    #[derive(Debug)]
    struct CutIo(DuplexStream, usize);

    impl AsyncRead for CutIo {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for CutIo {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            let length = buf.len().min(self.1);
            Pin::new(&mut self.0).poll_write(cx, &buf[..length])
        }

        fn poll_write_vectored(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bufs: &[io::IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let bytes = bufs.iter().flat_map(|buf| buf.iter().copied());
            self.poll_write(cx, &bytes.collect::<Vec<_>>())
        }

        fn is_write_vectored(&self) -> bool {
            true
        }

        causeway_rt::forward!(0: poll_flush, poll_shutdown);
    }

    /// Answers each request with 300 bytes, and drops its stream once the client has received them. Streams of paths below
    /// `/aborted` are aborted, and responses to paths that end with `/ended` are whole.
    async fn serve_aborted(
        near: CutIo,
        aborted: AbortedStreams,
        until_received: &mut mpsc::Receiver<()>,
    ) {
        let limiter = ControlFrameLimiter::new(near, || panic!("it is no flood"));
        let io = limiter.with_aborted_streams(aborted.clone());
        let mut server = h2::server::handshake(io).await.unwrap();
        let mut open = None;
        loop {
            let (request, mut respond) = tokio::select! {
                Some(()) = until_received.recv() => {
                    drop(open.take());
                    continue;
                }
                accepted = server.accept() => accepted.unwrap().unwrap(),
            };
            let path = request.uri().path();
            if path.starts_with("/aborted") {
                aborted.insert(Some(respond.stream_id().as_u32()));
            }
            let head = http::Response::new(());
            let mut send = respond.send_response(head, false).unwrap();
            let is_last = path.ends_with("/ended");
            let chunk = bytes::Bytes::from_static(&[8; 300]);
            send.send_data(chunk, is_last).unwrap();
            open = Some((request, send));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn resets_of_aborted_streams_reach_the_client_as_errors() {
        for cut in [1, 5, 12, 13, 14, 1 << 16] {
            let (near, far) = duplex(1 << 16);
            let near = CutIo(near, cut);
            let aborted = AbortedStreams::default();
            let (received_all, mut until_received) = mpsc::channel(1);
            let server = serve_aborted(near, aborted, &mut until_received);
            let client = async {
                let (requests, connection) = h2::client::handshake(far).await.unwrap();
                let asking = async {
                    for (path, code) in [
                        ("/", h2::Reason::CANCEL),
                        ("/aborted", h2::Reason::CONNECT_ERROR),
                        ("/aborted/ended", h2::Reason::CONNECT_ERROR),
                        ("/ended", h2::Reason::NO_ERROR),
                    ] {
                        let request = http::Request::get(format!("http://a{path}")).body(());
                        let mut requests = requests.clone().ready().await.unwrap();
                        let (answer, mut send) =
                            requests.send_request(request.unwrap(), false).unwrap();
                        let mut body = answer.await.unwrap().into_body();
                        let mut received = 0;
                        while received < 300 {
                            received += body.data().await.unwrap().unwrap().len();
                        }
                        received_all.send(()).await.unwrap();
                        let reset = std::future::poll_fn(|cx| send.poll_reset(cx)).await;
                        assert_eq!(reset.unwrap(), code, "{cut} {path}");
                    }
                };
                tokio::select! {
                    () = asking => {}
                    ended = connection => panic!("{ended:?}"),
                }
            };
            tokio::select! {
                () = server => {}
                () = client => {}
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn http_1_passes_untouched() {
        let (near, mut far) = duplex(64 << 10);
        let mut calm = ControlFrameLimiter::new(near, || panic!("these are no frames"));
        let mut text = b"POST / HTTP/1.1\r\n\r\n".to_vec();
        text.extend(frame(PING, 0, 0, &[0; 8]).repeat(2_000));
        far.write_all(&text).await.unwrap();
        let mut read = vec![0; text.len()];
        calm.read_exact(&mut read).await.unwrap();
        assert_eq!(read, text);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_no_bytes_is_awaited_within_a_bound() {
        let (near, mut far) = duplex(1 << 20);
        let mut calm = ControlFrameLimiter::new(near, || {});
        let flood = frame(PING, 0, 0, &[0; 8]).repeat(2_000);
        far.write_all(&[PREFACE, &flood].concat()).await.unwrap();
        let began = Instant::now();
        let mut sink = [0; 4096];
        while let Ok(1..) = calm.read(&mut sink).await {}
        assert_eq!(began.elapsed(), GOAWAY_GRACE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_working_h2_client_is_served_and_a_flooding_one_gets_why() {
        const BODY: &[u8] = &[0; 16 << 10];
        let (near, far) = duplex(1 << 20);
        let floods = Cell::new(0);
        let server = async {
            let calm = ControlFrameLimiter::new(near, || floods.set(floods.get() + 1));
            let mut server = h2::server::handshake(calm).await.unwrap();
            while let Some(Ok((_, mut respond))) = server.accept().await {
                let mut body = respond
                    .send_response(http::Response::new(()), false)
                    .unwrap();
                body.send_data(bytes::Bytes::from_static(BODY), true)
                    .unwrap();
            }
        };
        let client = async {
            let (requests, mut connection) = h2::client::handshake(far).await.unwrap();
            let mut pings = connection.ping_pong().unwrap();
            let work = async {
                for _ in 0..2_000 {
                    let request = http::Request::get("http://a/").body(()).unwrap();
                    let mut requests = requests.clone().ready().await.unwrap();
                    let (answer, _) = requests.send_request(request, true).unwrap();
                    let mut body = answer.await.unwrap().into_body();
                    while let Some(data) = body.data().await {
                        let length = data.unwrap().len();
                        body.flow_control().release_capacity(length).unwrap();
                    }
                    pings.ping(h2::Ping::opaque()).await.unwrap();
                }
                assert_eq!(floods.get(), 0);
                while pings.ping(h2::Ping::opaque()).await.is_ok() {}
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = work => unreachable!("it waits for the end of its connection"),
                ended = connection => ended.unwrap_err(),
            }
        };
        let ((), error) = tokio::join!(server, client);
        assert!(error.is_remote() && error.is_go_away(), "{error}");
        assert_eq!(error.reason(), Some(h2::Reason::ENHANCE_YOUR_CALM));
        assert_eq!(floods.get(), 1);
    }
}
