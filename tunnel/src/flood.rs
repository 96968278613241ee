//! A bound on what a peer may make of HTTP/2's small frames: work for this end, and nothing for anybody.
//!
//! The engine bounds what frames may hold, not how many come. Each frame from the peer that carries nothing of a
//! body costs points; streams that this end opens and bytes that it sends earn some, since those bring such
//! frames about, and time earns the rest. Whoever has none left ends its tunnel. Only the heads of frames are
//! looked at, as they pass between TLS and the engine.
//!
//! Frames of a body cost nothing, since apps that send a few bytes at a time are ordinary. But small ones that nobody
//! takes are counted (see [`crate::small`]), and a peer that sends thousands at once lets the others have
//! their turn in between.

use crate::small::Small;
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

/// Points at the beginning, and at most: all streams of a full tunnel may end at once, several times over.
const MOST: u64 = 100_000;
/// Points that a second earns. Liveness and windows need less than one PING and SETTINGS a second.
const PER_SECOND: u64 = 10_000;
/// Points that a stream earns: its answer, its trailers, its reset, and interim answers now and then.
const PER_STREAM: u64 = 8;
/// Bytes sent that earn a point: peers give windows back in larger parts.
const BYTES: u64 = 1024;
/// What a frame costs that an honest peer sends seldom or never.
const RARE: u64 = 10;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
/// Length, kind, flags, stream.
const HEAD: usize = 9;
/// Frames that are read before others on this thread get their turn.
const TURN: u32 = 1_000;
/// What a client sends before its first frame (RFC 9113 §3.4).
const PREFACE: u32 = 24;

/// The client's connection, which fails when its peer floods it.
#[derive(Debug)]
pub(crate) struct Guarded<S> {
    io: S,
    read: Heads,
    written: Heads,
    purse: Purse,
    small: Arc<Small>,
    /// Frames since others had their turn.
    frames: u32,
}

impl<S> Guarded<S> {
    /// A connection whose preface is still to be sent.
    pub(crate) fn new(io: S, small: Arc<Small>) -> Self {
        Self {
            io,
            small,
            frames: 0,
            read: Heads::default(),
            written: Heads {
                skip: PREFACE,
                ..Heads::default()
            },
            purse: Purse {
                points: MOST,
                counted: Instant::now(),
                bytes: 0,
            },
        }
    }

    fn sent(&mut self, bytes: &[u8]) {
        let mut streams = 0;
        self.written
            .pass(bytes, |head| streams += u64::from(head.kind == HEADERS));
        self.purse.sent(bytes.len(), streams);
    }
}

/// What is seen of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    kind: u8,
    /// Of the payload, in bytes.
    length: u32,
    stream: u32,
}

/// Where one direction stands between frames.
#[derive(Debug, Default)]
struct Heads {
    head: [u8; HEAD],
    have: usize,
    /// Bytes to the next head.
    skip: u32,
}

impl Heads {
    /// Shows each frame whose head ends in these bytes.
    fn pass(&mut self, mut bytes: &[u8], mut seen: impl FnMut(Head)) {
        while !bytes.is_empty() {
            if self.skip > 0 {
                let skipped = bytes
                    .len()
                    .min(usize::try_from(self.skip).unwrap_or(usize::MAX));
                self.skip -= u32::try_from(skipped).unwrap_or(self.skip);
                bytes = bytes.get(skipped..).unwrap_or_default();
                continue;
            }
            let part = bytes.len().min(HEAD - self.have);
            let (taken, rest) = bytes.split_at(part);
            self.head[self.have..self.have + part].copy_from_slice(taken);
            self.have += part;
            bytes = rest;
            if self.have == HEAD {
                let [high, middle, low, kind, _, a, b, c, d] = self.head;
                self.skip = u32::from_be_bytes([0, high, middle, low]);
                self.have = 0;
                seen(Head {
                    kind,
                    length: self.skip,
                    // The first bit means nothing (RFC 9113 §4.1).
                    stream: u32::from_be_bytes([a & 0x7f, b, c, d]),
                });
            }
        }
    }
}

/// The peer's points.
#[derive(Debug)]
struct Purse {
    points: u64,
    counted: Instant,
    /// Sent, and not yet turned into points.
    bytes: u64,
}

impl Purse {
    fn sent(&mut self, bytes: usize, streams: u64) {
        self.bytes += u64::try_from(bytes).unwrap_or(u64::MAX);
        self.earn(self.bytes / BYTES + streams * PER_STREAM);
        self.bytes %= BYTES;
    }

    fn earn(&mut self, points: u64) {
        self.points = self.points.saturating_add(points).min(MOST);
    }

    /// Takes a frame's price; false where there is not enough.
    fn pay(&mut self, kind: u8, now: Instant) -> bool {
        let price = match kind {
            HEADERS | CONTINUATION | RST_STREAM | WINDOW_UPDATE => 1,
            _ => RARE,
        };
        if self.points < price {
            let micros = now.saturating_duration_since(self.counted).as_micros();
            let micros = u64::try_from(micros).unwrap_or(u64::MAX);
            self.earn(micros.saturating_mul(PER_SECOND) / 1_000_000);
            self.counted = now;
        }
        match self.points.checked_sub(price) {
            Some(left) => self.points = left,
            None => return false,
        }
        true
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.frames >= TURN {
            this.frames = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        let new = buf.filled().get(before..).unwrap_or_default();
        let (purse, small, now) = (&mut this.purse, &this.small, Instant::now());
        let (mut flooded, mut frames) = (None, 0);
        this.read.pass(
            new,
            |Head {
                 kind,
                 length,
                 stream,
             }| {
                frames += 1;
                if kind == DATA {
                    small.came(stream, usize::try_from(length).unwrap_or(usize::MAX));
                } else if !purse.pay(kind, now) {
                    flooded = Some(kind);
                }
            },
        );
        this.frames += frames;
        let Some(kind) = flooded else {
            return Poll::Ready(Ok(()));
        };
        let why = format!("the edge floods its tunnel with {}", name(kind));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)))
    }
}

fn name(kind: u8) -> &'static str {
    match kind {
        HEADERS => "HEADERS",
        RST_STREAM => "RST_STREAM",
        4 => "SETTINGS",
        6 => "PING",
        WINDOW_UPDATE => "WINDOW_UPDATE",
        CONTINUATION => "CONTINUATION",
        _ => "frames of rare kinds",
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.io).poll_write(cx, buf))?;
        this.sent(buf.get(..written).unwrap_or_default());
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.io).poll_write_vectored(cx, bufs))?;
        let mut left = written;
        for buf in bufs {
            let part = buf.len().min(left);
            this.sent(buf.get(..part).unwrap_or_default());
            left -= part;
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn purse() -> Purse {
        Purse {
            points: MOST,
            counted: Instant::now(),
            bytes: 0,
        }
    }

    fn times(purse: &mut Purse, kind: u8, now: Instant) -> u64 {
        (0..2 * MOST).take_while(|_| purse.pay(kind, now)).count() as u64
    }

    #[test]
    fn heads_are_found_however_the_bytes_are_cut() {
        let mut bytes = vec![7; 24];
        for (kind, length) in [(HEADERS, 3_u8), (DATA, 0), (RST_STREAM, 4)] {
            bytes.extend([0, 0, length, kind, 0, 0, 0, 0, 1]);
            bytes.extend(vec![0xff; usize::from(length)]);
        }
        for cut in 1..=bytes.len() {
            let mut heads = Heads {
                skip: PREFACE,
                ..Heads::default()
            };
            let mut seen = Vec::new();
            for part in bytes.chunks(cut) {
                heads.pass(part, |head| {
                    seen.push((head.kind, head.length, head.stream));
                });
            }
            let frames = [(HEADERS, 3, 1), (DATA, 0, 1), (RST_STREAM, 4, 1)];
            assert_eq!(seen, frames, "{cut}");
        }
    }

    #[test]
    fn a_flood_is_paid_for_a_while_and_time_and_traffic_earn_more() {
        let mut purse = purse();
        let now = purse.counted;
        assert_eq!(times(&mut purse, 6, now), MOST / RARE);
        let later = now + Duration::from_secs(1);
        assert_eq!(times(&mut purse, 6, later), PER_SECOND / RARE);
        purse.sent(usize::try_from(BYTES).unwrap() * 5, 2);
        assert_eq!(times(&mut purse, HEADERS, later), 5 + 2 * PER_STREAM);
    }
}
