//! What an HTTP/2 app is heard to say before the engine reads it: the heads of its frames, no more.
//!
//! The engine keeps two things to itself that the edge must know. How many streams the app allows at once
//! is in its SETTINGS; the engine queues what goes beyond without a word. Interim answers it drops unread,
//! however many there are, so an app that sends them without end never comes to its answer: such an app's connection
//! fails, whichever stream they were for.

use causeway_tunnel::wire::MOST_INTERIMS;
use std::{
    collections::HashMap,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
/// Flags of DATA and HEADERS, and of SETTINGS.
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
/// Length, kind, flags, stream.
const HEAD: usize = 9;
/// Identifier and value.
const SETTING: usize = 6;
const MAX_CONCURRENT_STREAMS: u16 = 3;
/// Streams whose heads are counted, at most. Who opens so many that did not end begins to count anew: an app needs
/// far fewer frames to be found out.
const MOST_COUNTED: usize = 4_096;

/// How many streams an app allows at once. `None`: it has not said yet.
pub(super) type Allowed = watch::Receiver<Option<u32>>;

/// A connection to an HTTP/2 app that is listened to.
#[derive(Debug)]
pub(super) struct Heard<S> {
    io: S,
    ear: Ear,
}

impl<S> Heard<S> {
    pub(super) fn new(io: S) -> (Self, Allowed) {
        let (allows, allowed) = watch::channel(None);
        let ear = Ear {
            head: [0; HEAD],
            have: 0,
            left: 0,
            settings: None,
            heads: HashMap::new(),
            allows,
        };
        (Self { io, ear }, allowed)
    }
}

/// Where the app's bytes stand between frames, and what they have said.
#[derive(Debug)]
struct Ear {
    head: [u8; HEAD],
    have: usize,
    /// Bytes to the next head.
    left: u32,
    /// The setting that is being read, while its frame is.
    settings: Option<([u8; SETTING], usize)>,
    /// Heads without an end, by stream: interim answers, and perhaps the answer.
    heads: HashMap<u32, usize>,
    allows: watch::Sender<Option<u32>>,
}

impl Ear {
    /// False if the app has sent interim answers without end.
    fn hear(&mut self, mut bytes: &[u8]) -> bool {
        let mut sane = true;
        while !bytes.is_empty() {
            let wanted = if self.left > 0 {
                usize::try_from(self.left).unwrap_or(usize::MAX)
            } else {
                HEAD - self.have
            };
            let (part, rest) = bytes.split_at(wanted.min(bytes.len()));
            bytes = rest;
            if self.left > 0 {
                self.payload(part);
            } else {
                self.head[self.have..self.have + part.len()].copy_from_slice(part);
                self.have += part.len();
                if self.have == HEAD {
                    self.have = 0;
                    sane &= self.frame();
                }
            }
        }
        sane
    }

    /// A frame begins.
    fn frame(&mut self) -> bool {
        let [high, middle, low, kind, flags, stream @ ..] = self.head;
        self.left = u32::from_be_bytes([0, high, middle, low]);
        let stream = u32::from_be_bytes(stream) & (u32::MAX >> 1);
        match kind {
            DATA | HEADERS if flags & END_STREAM != 0 => drop(self.heads.remove(&stream)),
            RST_STREAM => drop(self.heads.remove(&stream)),
            HEADERS => return self.count(stream),
            SETTINGS if flags & ACK == 0 => {
                self.settings = Some(([0; SETTING], 0));
                self.payload(&[]);
            }
            _ => {}
        }
        true
    }

    fn count(&mut self, stream: u32) -> bool {
        if self.heads.len() >= MOST_COUNTED {
            self.heads.clear();
        }
        let heads = self.heads.entry(stream).or_default();
        *heads += 1;
        // One of them may be the answer.
        *heads <= MOST_INTERIMS + 1
    }

    /// Some of a frame's payload.
    fn payload(&mut self, part: &[u8]) {
        self.left = u32::try_from(part.len()).map_or(0, |part| self.left.saturating_sub(part));
        let Some((setting, have)) = &mut self.settings else {
            return;
        };
        for byte in part {
            setting[*have] = *byte;
            *have = (*have + 1) % SETTING;
            let [high, low, value @ ..] = *setting;
            if *have == 0 && u16::from_be_bytes([high, low]) == MAX_CONCURRENT_STREAMS {
                self.allows.send_replace(Some(u32::from_be_bytes(value)));
            }
        }
        if self.left == 0 {
            self.settings = None;
            // RFC 9113 §6.5.2: who says nothing sets no limit.
            let unlimited = |allowed: &mut Option<u32>| {
                let silent = allowed.is_none();
                *allowed = allowed.or(Some(u32::MAX));
                silent
            };
            self.allows.send_if_modified(unlimited);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Heard<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        if this
            .ear
            .hear(buf.filled().get(before..).unwrap_or_default())
        {
            return Poll::Ready(Ok(()));
        }
        let why = "it sent interim answers without end instead of an answer";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Heard<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, buf)
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
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        let head = [0, 0, length, kind, flags, 0, 0, 0, stream];
        [&head[..], payload].concat()
    }

    #[test]
    fn what_an_app_allows_is_heard_however_its_bytes_are_cut() {
        let window = [0, 4, 0, 1, 0, 0];
        for (settings, allowed) in [
            (vec![], u32::MAX),
            (window.to_vec(), u32::MAX),
            ([window, [0, 3, 0, 0, 1, 2]].concat(), 258),
        ] {
            let bytes = [
                frame(SETTINGS, 0, 0, &settings),
                frame(SETTINGS, ACK, 0, &[]),
                // A payload that looks like the setting, and SETTINGS that say nothing of it.
                frame(DATA, 0, 1, &[0, 3, 0, 0, 0, 9]),
                frame(SETTINGS, 0, 0, &window),
            ];
            let bytes = bytes.concat();
            for cut in 1..=bytes.len() {
                let (mut heard, said) = Heard::new(());
                for part in bytes.chunks(cut) {
                    assert!(heard.ear.hear(part));
                }
                assert_eq!(*said.borrow(), Some(allowed), "{cut}");
            }
        }
    }

    #[test]
    fn interim_answers_without_end_are_heard_by_stream() {
        let (mut app, _allowed) = Heard::new(());
        let head = |stream| frame(HEADERS, 4, stream, b"\x88");
        for _ in 0..=MOST_INTERIMS {
            assert!(app.ear.hear(&head(1)));
            assert!(app.ear.hear(&head(3)));
        }
        let ended = frame(HEADERS, 4 | END_STREAM, 3, b"\x88");
        assert!(app.ear.hear(&ended));
        assert!(app.ear.hear(&head(3)));
        assert!(!app.ear.hear(&head(1)));
    }
}
