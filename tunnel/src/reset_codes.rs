//! Error codes of resets of streams, below an HTTP/2 server that offers no choice of the code.
//!
//! hyper takes a session that was reset with `NO_ERROR` or CANCEL for complete (hyper 1.12, `H2Upgraded`). These are also the only
//! codes with which hyper's server resets the stream of a session that is dropped: CANCEL, and `NO_ERROR` once the server has ended
//! its half. So a client that uses hyper would take an aborted session for a complete one. [`AbortedStreams`] names the streams of
//! aborted sessions to the connection below hyper, which replaces the code of their resets by `CONNECT_ERROR` (RFC 9113 §8.5).

use crate::frame_parser::{FrameEvent, FrameParser, RST_STREAM};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// Last byte of the error code (RFC 9113 §7) of a stream that is no longer needed.
const CANCEL: u8 = 8;
/// Last byte of the error codes that hyper takes for an ordinary end: `NO_ERROR` and CANCEL. The other bytes are 0.
pub(crate) const ORDINARY_END_CODES: &[u8] = &[0, CANCEL];
/// Last byte of the error code of a session that was reset (RFC 9113 §8.5).
pub(crate) const CONNECT_ERROR: u8 = 10;
/// Maximum number of streams in an [`AbortedStreams`]. The oldest is forgotten. A listener permits fewer concurrent streams, so its reset
/// was sent by then, or its client has reset it.
const MAX_ABORTED: usize = 512;

/// Streams of one connection whose sessions were aborted. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct AbortedStreams(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    streams: Mutex<VecDeque<u32>>,
    /// Whether any session was aborted, so that most connections never lock.
    is_used: AtomicBool,
    /// Whether a session was aborted whose stream is not known.
    has_unknown: AtomicBool,
}

impl AbortedStreams {
    /// Adds the stream of a session, before the session is dropped. If the stream is not known (`None`), the code of each stream that
    /// is reset with CANCEL from now on is replaced. A stream without a session then ends with another error code, which changes nothing for its client.
    pub fn insert(&self, stream: Option<u32>) {
        match stream {
            Some(stream) => {
                let mut streams = self.streams();
                if streams.len() == MAX_ABORTED {
                    streams.pop_front();
                }
                streams.push_back(stream);
            }
            None => self.0.has_unknown.store(true, Relaxed),
        }
        self.0.is_used.store(true, Relaxed);
    }

    /// Whether any session was aborted. Until then no code has to be replaced.
    pub(crate) fn is_used(&self) -> bool {
        self.0.is_used.load(Relaxed)
    }

    /// Returns the codes that are replaced in a reset of this stream.
    fn replaced_codes(&self, stream: u32) -> &'static [u8] {
        if !self.is_used() {
            &[]
        } else if self.streams().contains(&stream) {
            ORDINARY_END_CODES
        } else if self.0.has_unknown.load(Relaxed) {
            &[CANCEL]
        } else {
            &[]
        }
    }

    fn streams(&self) -> MutexGuard<'_, VecDeque<u32>> {
        let streams = &self.0.streams;
        streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Frames that a server writes, and the codes in them that are replaced. h2 writes its frames in parts of any size: all that the
/// socket does not take is written again.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrittenFrames {
    parser: FrameParser,
    /// Codes that are replaced in the reset that has begun and is not complete.
    replaced_codes: &'static [u8],
}

impl WrittenFrames {
    /// Whether the last frame is complete and the next one has not begun.
    pub(crate) fn is_at_frame_boundary(&self) -> bool {
        self.parser.is_at_frame_boundary()
    }

    /// Parses the next bytes. Returns the position of the first byte that [`CONNECT_ERROR`] has to replace.
    pub(crate) fn parse(&mut self, bytes: &[u8], aborted: &AbortedStreams) -> Option<usize> {
        let Self {
            parser,
            replaced_codes,
        } = self;
        let start = bytes.as_ptr().addr();
        let mut position = None;
        parser.parse(bytes, |part| match part {
            FrameEvent::Header(head) if head.kind == RST_STREAM => {
                *replaced_codes = aborted.replaced_codes(head.stream);
            }
            FrameEvent::Header(_) => *replaced_codes = &[],
            FrameEvent::Payload {
                bytes: [before @ .., code],
                remaining: 0,
            } if replaced_codes.contains(code) => {
                position.get_or_insert(before.as_ptr().addr() - start + before.len());
            }
            FrameEvent::Payload { .. } => {}
        });
        position
    }

    /// Returns the bytes to write for the next bytes or the first of them, and the state after these.
    pub(crate) fn replace<'a>(
        &self,
        bytes: &'a [u8],
        aborted: &AbortedStreams,
    ) -> (&'a [u8], Self) {
        let mut all = self.clone();
        let Some(position) = all.parse(bytes, aborted) else {
            return (bytes, all);
        };
        let (before, rest) = bytes.split_at(position);
        let (part, replaced) = if before.is_empty() {
            (rest.get(..1).unwrap_or(rest), &[CONNECT_ERROR][..])
        } else {
            (before, before)
        };
        let mut first = self.clone();
        first.parse(part, aborted);
        (replaced, first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame_parser::{DATA, WINDOW_UPDATE};

    #[test]
    fn resets_of_many_aborted_streams_use_bounded_memory() {
        let aborted = AbortedStreams::default();
        for stream in 0..2_000 {
            aborted.insert(Some(2 * stream + 1));
        }
        assert_eq!(aborted.streams().len(), MAX_ABORTED);
        assert_eq!(aborted.replaced_codes(3_999), ORDINARY_END_CODES);
        assert!(aborted.replaced_codes(1).is_empty());
    }

    #[test]
    fn only_cancel_is_replaced_for_a_stream_that_is_not_known() {
        let aborted = AbortedStreams::default();
        aborted.insert(Some(3));
        assert!(aborted.replaced_codes(1).is_empty());
        aborted.insert(None);
        assert_eq!(aborted.replaced_codes(1), [CANCEL]);
        assert_eq!(aborted.replaced_codes(3), ORDINARY_END_CODES);
    }

    #[test]
    fn codes_are_replaced_however_the_bytes_are_cut() {
        let aborted = AbortedStreams::default();
        aborted.insert(Some(1));
        let (mut written, mut expected) = (Vec::new(), Vec::new());
        for (kind, stream, code, becomes) in [
            (RST_STREAM, 1, 0, CONNECT_ERROR),
            (RST_STREAM, 1, CANCEL, CONNECT_ERROR),
            (RST_STREAM, 1, 2, 2),
            (RST_STREAM, 3, CANCEL, CANCEL),
            (RST_STREAM, 3, 0, 0),
            (DATA, 1, CANCEL, CANCEL),
            (WINDOW_UPDATE, 1, CANCEL, CANCEL),
        ] {
            for (bytes, code) in [(&mut written, code), (&mut expected, becomes)] {
                bytes.extend([0, 0, 4, kind, 0, 0, 0, 0, stream, 0, 0, 0, code]);
            }
        }
        for cut in 1..=written.len() {
            let (mut frames, mut sent) = (WrittenFrames::default(), Vec::new());
            while sent.len() < written.len() {
                let rest = &written[sent.len()..];
                // The buffer of h2 may hold any number of bytes, and the socket takes as many of them as it likes.
                let (bytes, after) = frames.replace(&rest[..rest.len().min(cut)], &aborted);
                sent.extend_from_slice(bytes);
                frames = after;
            }
            assert_eq!(sent, expected, "{cut}");
        }
    }
}
