//! Observer of the frame headers that an HTTP/2 upstream sends, before h2 reads them.
//!
//! h2 does not expose two facts that the client of an upstream needs. The first is the number of streams that the upstream
//! allows at once. It is in the upstream's SETTINGS, and h2 queues further streams silently. The second is the number of
//! interim responses. h2 drops them unread, however many there are, so a stream whose upstream sends them without end never
//! gets its response. The observer fails such a connection, whichever streams they belong to.
//!
//! The observer also replaces the code `NO_ERROR` in resets. Envoy has sent it for each response that it aborts
//! (envoyproxy/envoy#36200), and hyper takes such a response for complete (hyper 1.12, `Incoming`). A response that was received to
//! its end stays complete with every code, and the reset then only ends the request's body (RFC 9113 §8.1). hyper does the same after
//! a GOAWAY without an error that leaves out a stream with a part of its response, so the observer fails such a connection.

use causeway_tunnel::{
    frame_parser::{
        ACK, DATA, END_STREAM, FrameEvent, FrameHeader, FrameParser, GOAWAY, HEADERS, RST_STREAM,
        SETTINGS,
    },
    io_observer::{IoObserver, ObservedIo},
    wire::MAX_INTERIM_RESPONSES,
};
use std::{collections::HashMap, io};
use tokio::sync::watch;

/// Size of a setting, in bytes: identifier and value.
const SETTING_LEN: usize = 6;
const MAX_CONCURRENT_STREAMS: u16 = 3;
/// Size of the last stream's number in a GOAWAY, in bytes.
const LAST_STREAM_LEN: usize = 4;
/// Last byte of the error codes (RFC 9113 §7) of a reset without an error, and of an unexpected error. The other bytes are 0.
const NO_ERROR: u8 = 0;
/// See [`NO_ERROR`]. gRPC maps both codes to the same status.
const INTERNAL_ERROR: u8 = 2;
/// Maximum number of streams whose heads are counted. If an upstream opens more streams that have not ended, the count starts
/// again. Even so, such an upstream is detected, because the limit per stream is far smaller.
const MAX_COUNTED_STREAMS: usize = 4_096;

/// Number of streams that an upstream allows at once, or `None` if it has not sent it yet.
pub type MaxConcurrentStreams = watch::Receiver<Option<u32>>;

/// Wraps a connection to an HTTP/2 upstream in an observer, and returns the number of streams that the upstream allows.
pub fn observe<S>(io: S) -> (ObservedIo<S, Http2Observer>, MaxConcurrentStreams) {
    let (observer, max_streams) = Http2Observer::new();
    (ObservedIo::new(io, observer), max_streams)
}

/// Observer of an upstream's frames, with the facts that it has announced so far.
#[derive(Debug)]
pub struct Http2Observer {
    frames: FrameParser,
    state: ObserverState,
}

#[derive(Debug)]
struct ObserverState {
    /// The setting that is being read, and the number of its bytes that were read.
    partial_setting: Option<([u8; SETTING_LEN], usize)>,
    /// Number of heads without an end, by stream: interim responses, and perhaps the final response.
    heads_by_stream: HashMap<u32, usize>,
    /// Number in the GOAWAY that is being read, and the number of its bytes that were read.
    partial_last_stream: Option<(u32, usize)>,
    /// Reason for which the connection fails.
    violation: Option<&'static str>,
    /// Whether the last frame that began is a reset.
    is_in_reset: bool,
    max_streams_tx: watch::Sender<Option<u32>>,
}

impl Http2Observer {
    fn new() -> (Self, MaxConcurrentStreams) {
        let (max_streams_tx, max_streams) = watch::channel(None);
        let state = ObserverState {
            partial_setting: None,
            heads_by_stream: HashMap::new(),
            partial_last_stream: None,
            violation: None,
            is_in_reset: false,
            max_streams_tx,
        };
        let frames = FrameParser::default();
        (Self { frames, state }, max_streams)
    }
}

impl IoObserver for Http2Observer {
    fn rewrite_read(&mut self, bytes: &mut [u8]) {
        let (start, state) = (bytes.as_ptr().addr(), &mut self.state);
        let mut reset_codes = Vec::new();
        self.frames.parse(bytes, |part| match part {
            FrameEvent::Header(head) => state.on_frame_header(head),
            FrameEvent::Payload { bytes, remaining } => {
                if let ([before @ .., NO_ERROR], 0, true) = (bytes, remaining, state.is_in_reset) {
                    reset_codes.push(before.as_ptr().addr() - start + before.len());
                }
                state.on_payload(bytes, remaining);
            }
        });
        for position in reset_codes {
            if let Some(code) = bytes.get_mut(position) {
                *code = INTERNAL_ERROR;
            }
        }
    }

    fn on_read(&mut self, _: &[u8]) -> io::Result<()> {
        match self.state.violation {
            Some(detail) => Err(io::Error::new(io::ErrorKind::InvalidData, detail)),
            None => Ok(()),
        }
    }
}

impl ObserverState {
    /// Handles the beginning of a frame.
    fn on_frame_header(&mut self, head: FrameHeader) {
        let FrameHeader { kind, stream, .. } = head;
        self.is_in_reset = kind == RST_STREAM;
        self.partial_last_stream = (kind == GOAWAY).then_some((0, 0));
        match kind {
            DATA | HEADERS if head.flags & END_STREAM != 0 => {
                self.heads_by_stream.remove(&stream);
            }
            RST_STREAM => drop(self.heads_by_stream.remove(&stream)),
            HEADERS => self.count_head(stream),
            SETTINGS if head.flags & ACK == 0 => self.partial_setting = Some(([0; SETTING_LEN], 0)),
            _ => {}
        }
    }

    fn count_head(&mut self, stream: u32) {
        if self.heads_by_stream.len() >= MAX_COUNTED_STREAMS {
            self.heads_by_stream.clear();
        }
        let heads = self.heads_by_stream.entry(stream).or_default();
        *heads += 1;
        // One of them may be the final response.
        if *heads > MAX_INTERIM_RESPONSES + 1 {
            self.violation = Some("it sent too many interim responses without a final response");
        }
    }

    /// Reads the last stream in a GOAWAY (RFC 9113 §6.8).
    fn read_last_stream(&mut self, part: &[u8]) {
        let Some((number, read)) = &mut self.partial_last_stream else {
            return;
        };
        for byte in part.iter().take(LAST_STREAM_LEN - *read) {
            *number = *number << 8 | u32::from(*byte);
            *read += 1;
        }
        // The first bit is reserved.
        let last = *number & (u32::MAX >> 1);
        let is_answered = |stream: &u32| *stream > last;
        if *read == LAST_STREAM_LEN && self.heads_by_stream.keys().any(is_answered) {
            self.violation = Some("its GOAWAY leaves out a stream that it has begun to answer");
        }
    }

    /// Handles a part of a frame's payload.
    fn on_payload(&mut self, part: &[u8], remaining: u32) {
        self.read_last_stream(part);
        let Some((setting, filled)) = &mut self.partial_setting else {
            return;
        };
        for byte in part {
            setting[*filled] = *byte;
            *filled = (*filled + 1) % SETTING_LEN;
            let [high, low, value @ ..] = *setting;
            if *filled == 0 && u16::from_be_bytes([high, low]) == MAX_CONCURRENT_STREAMS {
                self.max_streams_tx
                    .send_replace(Some(u32::from_be_bytes(value)));
            }
        }
        if remaining == 0 {
            self.partial_setting = None;
            // RFC 9113 §6.5.2: without this setting there is no limit.
            let set_unlimited = |max_streams: &mut Option<u32>| {
                let was_unset = max_streams.is_none();
                *max_streams = max_streams.or(Some(u32::MAX));
                was_unset
            };
            self.max_streams_tx.send_if_modified(set_unlimited);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Http2Observer {
        fn read(&mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
            let mut bytes = bytes.to_vec();
            self.rewrite_read(&mut bytes);
            self.on_read(&bytes).map(|()| bytes)
        }
    }

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        let head = [0, 0, length, kind, flags, 0, 0, 0, stream];
        [&head[..], payload].concat()
    }

    #[test]
    fn the_upstream_stream_limit_is_read_for_every_split() {
        let window = [0, 4, 0, 1, 0, 0];
        for (settings, allowed) in [
            (vec![], u32::MAX),
            (window.to_vec(), u32::MAX),
            ([window, [0, 3, 0, 0, 1, 2]].concat(), 258),
        ] {
            let bytes = [
                frame(SETTINGS, 0, 0, &settings),
                frame(SETTINGS, ACK, 0, &[]),
                // A payload that looks like the setting, and SETTINGS without it.
                frame(DATA, 0, 1, &[0, 3, 0, 0, 0, 9]),
                frame(SETTINGS, 0, 0, &window),
            ];
            let bytes = bytes.concat();
            for cut in 1..=bytes.len() {
                let (mut ear, message) = Http2Observer::new();
                for part in bytes.chunks(cut) {
                    ear.read(part).unwrap();
                }
                assert_eq!(*message.borrow(), Some(allowed), "{cut}");
            }
        }
    }

    #[test]
    fn interim_answers_without_end_are_heard_by_stream() {
        let (mut ear, _allowed) = Http2Observer::new();
        let head = |stream| frame(HEADERS, 4, stream, b"\x88");
        for _ in 0..=MAX_INTERIM_RESPONSES {
            ear.read(&head(1)).unwrap();
            ear.read(&head(3)).unwrap();
        }
        let ended = frame(HEADERS, 4 | END_STREAM, 3, b"\x88");
        ear.read(&ended).unwrap();
        ear.read(&head(3)).unwrap();
        assert!(ear.read(&head(1)).is_err());
    }

    #[test]
    fn a_goaway_leaves_out_no_stream_with_a_part_of_its_response() {
        let ended = frame(HEADERS, 4 | END_STREAM, 5, b"\x88");
        for (last, is_accepted) in [(1, false), (3, true), (5, true)] {
            // Graceful ends begin with the highest number.
            let notice = frame(GOAWAY, 0, 0, &[0x7f, 0xff, 0xff, 0xff, 0, 0, 0, NO_ERROR]);
            let goaway = frame(GOAWAY, 0, 0, &[0x80, 0, 0, last, 0, 0, 0, NO_ERROR]);
            let sent = [frame(HEADERS, 4, 3, b"\x88"), ended.clone(), notice, goaway].concat();
            for cut in 1..=sent.len() {
                let (mut ear, _allowed) = Http2Observer::new();
                let mut parts = sent.chunks(cut);
                let read = parts.try_for_each(|part| ear.read(part).map(drop));
                assert_eq!(read.is_ok(), is_accepted, "{last} {cut}");
            }
        }
    }

    #[test]
    fn a_reset_always_has_an_error_for_every_split() {
        const CANCEL: u8 = 8;
        let reset = |code| frame(RST_STREAM, 0, 1, &[0, 0, 0, code]);
        let with = |no_error, cancel| {
            let others = frame(DATA, 0, 3, &[NO_ERROR; 4]);
            [reset(no_error), others, reset(cancel)].concat()
        };
        let sent = with(NO_ERROR, CANCEL);
        for cut in 1..=sent.len() {
            let (mut ear, _allowed) = Http2Observer::new();
            let parts = sent.chunks(cut).map(|part| ear.read(part).unwrap());
            let read = parts.collect::<Vec<_>>().concat();
            assert_eq!(read, with(INTERNAL_ERROR, CANCEL), "{cut}");
        }
    }
}
