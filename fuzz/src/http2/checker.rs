//! Observer of a conversation from outside: knows from the bytes of both ends what RFC 9113 allows the engine to write, and
//! panics if it writes something else. It takes a frame of the peer into account as soon as the frame is sent, so that it allows
//! slightly more than the engine may do.

use super::frame::{
    self, ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HEADERS, PING, PRIORITY,
    RST_STREAM, SETTINGS, WINDOW_UPDATE,
};
use bytes::{Buf, BytesMut};
use causeway_tunnel::engine::fuzzing::{HpackDecoder, HpackField};
use std::collections::{BTreeMap, VecDeque};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DEFAULT_WINDOW: i64 = 65_535;
pub(super) const MAX_WINDOW: i64 = (1 << 31) - 1;
/// Codes that the engine's user resets streams with, and those of dropped streams. All others mean that the peer is at fault.
const USER_CODES: [u32; 4] = [0, 2, 7, 8];

/// First bytes of an interim response as the fuzzer encodes it.
const INTERIM: &[u8] = b"\0\x07:status\x031";

/// Largest limit of windows that the engine's user sets, in bytes.
pub(super) const MAX_WINDOW_LIMIT: u32 = 1 << 20;

/// Role of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Client,
    Server,
}

/// Limits of the engine's configuration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) stream_window: u32,
    pub(super) connection_window: u32,
    pub(super) max_frame: u32,
    pub(super) max_streams: u32,
    pub(super) max_header_list: u32,
}

/// Parts of a stream that one end has sent.
#[derive(Debug, Default)]
pub(super) struct Sent {
    pub(super) has_head: bool,
    pub(super) has_ended: bool,
    pub(super) has_reset: bool,
    pub(super) bytes: u64,
}

impl Sent {
    pub(super) fn is_open(&self) -> bool {
        !self.has_ended && !self.has_reset
    }
}

#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) peer: Sent,
    pub(super) engine: Sent,
    /// Bytes that the peer may send.
    pub(super) peer_window: i64,
    /// Bytes that the engine may send.
    pub(super) engine_window: i64,
    /// Whether the engine has processed the peer's reset.
    is_settled: bool,
    /// Whether the peer's response has no body, because the request was HEAD.
    pub(super) has_no_body: bool,
}

impl Stream {
    pub(super) fn is_open(&self) -> bool {
        !self.peer.has_reset
            && !self.engine.has_reset
            && !(self.peer.has_ended && self.engine.has_ended)
    }
}

/// Header block that is not complete.
type Block = Option<(u32, bool, Vec<u8>)>;
type Settings = Vec<(u16, u32)>;

pub(super) struct Checker {
    pub(super) role: Role,
    pub(super) limits: Limits,
    /// Whether the peer obeys the RFC.
    pub(super) is_polite: bool,
    pub(super) streams: BTreeMap<u32, Stream>,
    input: BytesMut,
    input_block: Block,
    output: BytesMut,
    output_block: Block,
    /// Bytes of the preface that are still to come: the peer's, the engine's.
    preface_left: [usize; 2],
    has_output: bool,
    /// SETTINGS of the peer without an acknowledgement, and those of the engine.
    pub(super) peer_settings: VecDeque<Settings>,
    pub(super) engine_settings: VecDeque<Settings>,
    peer_pings: VecDeque<Vec<u8>>,
    pub(super) engine_pings: Vec<Vec<u8>>,
    /// Windows of new streams.
    peer_initial: i64,
    engine_initial: i64,
    /// Largest window that the engine has announced.
    largest_initial: i64,
    pub(super) peer_connection: i64,
    pub(super) engine_connection: i64,
    max_frame: usize,
    max_streams: usize,
    decoder: HpackDecoder,
    /// Whether the peer's bytes are no frames any more.
    is_lost: bool,
    /// Last stream and code of the engine's GOAWAY.
    pub(super) engine_left: Option<(u32, u32)>,
    /// Last stream in the peer's GOAWAY.
    pub(super) peer_last: Option<u32>,
}

impl Checker {
    pub(super) fn new(role: Role, limits: Limits, is_polite: bool) -> Self {
        let preface_left = match role {
            Role::Client => [0, PREFACE.len()],
            Role::Server => [PREFACE.len(), 0],
        };
        Self {
            role,
            limits,
            is_polite,
            streams: BTreeMap::new(),
            input: BytesMut::new(),
            input_block: None,
            output: BytesMut::new(),
            output_block: None,
            preface_left,
            has_output: false,
            peer_settings: VecDeque::new(),
            engine_settings: VecDeque::new(),
            peer_pings: VecDeque::new(),
            engine_pings: Vec::new(),
            peer_initial: DEFAULT_WINDOW,
            engine_initial: DEFAULT_WINDOW,
            largest_initial: DEFAULT_WINDOW,
            peer_connection: DEFAULT_WINDOW,
            engine_connection: DEFAULT_WINDOW,
            max_frame: 1 << 14,
            // The engine's own limit before the peer's SETTINGS.
            max_streams: 100,
            decoder: HpackDecoder::new(4096),
            is_lost: false,
            engine_left: None,
            peer_last: None,
        }
    }

    /// Whether the engine has nothing to say to new streams.
    pub(super) fn is_leaving(&self) -> bool {
        self.engine_left.is_some() || self.peer_last.is_some()
    }

    /// Notes that the engine has processed all input and written all its output.
    pub(super) fn settle(&mut self) {
        if self.is_lost || self.preface_left[0] > 0 {
            return;
        }
        for stream in self.streams.values_mut() {
            stream.is_settled |= stream.peer.has_reset;
        }
        if self.role == Role::Server && self.engine_left.is_none() {
            assert!(self.open_streams() <= self.limits.max_streams as usize);
        }
    }

    /// Returns the streams that count against the limit of the end that opens them.
    pub(super) fn open_streams(&self) -> usize {
        self.streams
            .values()
            .filter(|stream| stream.is_open())
            .count()
    }

    // The peer's bytes.

    pub(super) fn observe_input(&mut self, mut bytes: &[u8]) {
        let left = self.preface_left[0].min(bytes.len());
        let start = PREFACE.len() - self.preface_left[0];
        self.is_lost |= bytes[..left] != PREFACE[start..start + left];
        self.preface_left[0] -= left;
        bytes = &bytes[left..];
        if self.is_lost {
            return;
        }
        self.input.extend_from_slice(bytes);
        while let Some(frame) = Frame::take(&mut self.input, self.limits.max_frame as usize) {
            match frame {
                Ok(frame) => self.observe_peer_frame(&frame),
                Err(_) => self.is_lost = true,
            }
            if self.is_lost {
                return;
            }
        }
    }

    fn observe_peer_frame(&mut self, frame: &Frame) {
        let is_end = frame.has(END_STREAM);
        match frame.kind {
            HEADERS => {
                self.input_block = Some((frame.stream, is_end, Vec::new()));
                self.observe_peer_block(frame);
            }
            CONTINUATION => self.observe_peer_block(frame),
            DATA => {
                let length = frame.payload.len() as i64;
                self.peer_connection -= length;
                if let Some(stream) = self.streams.get_mut(&frame.stream) {
                    stream.peer_window -= length;
                    stream.peer.bytes += frame.data().map_or(0, <[u8]>::len) as u64;
                    stream.peer.has_ended |= is_end;
                }
            }
            RST_STREAM => {
                if let Some(stream) = self.streams.get_mut(&frame.stream) {
                    stream.peer.has_reset = true;
                }
            }
            SETTINGS if frame.has(ACK) => self.apply_engine_settings(),
            SETTINGS => self.peer_settings.push_back(settings(frame)),
            PING if !frame.has(ACK) => self.peer_pings.push_back(frame.payload.clone()),
            GOAWAY => {
                let last = frame.u32(0) & !(1 << 31);
                self.peer_last = Some(self.peer_last.map_or(last, |earlier| earlier.min(last)));
            }
            WINDOW_UPDATE => {
                let by = i64::from(frame.u32(0) & !(1 << 31));
                if frame.stream == 0 {
                    self.engine_connection += by;
                } else if let Some(stream) = self.streams.get_mut(&frame.stream) {
                    stream.engine_window += by;
                }
            }
            _ => {}
        }
    }

    fn observe_peer_block(&mut self, frame: &Frame) {
        let Some((id, is_end, mut block)) = self.input_block.take() else {
            return;
        };
        block.extend_from_slice(frame.fragment().unwrap_or_default());
        if !frame.has(END_HEADERS) {
            self.input_block = Some((id, is_end, block));
            return;
        }
        let is_new = !self.streams.contains_key(&id);
        if is_new && (self.role == Role::Client || id % 2 == 0) {
            return;
        }
        let (peer_initial, engine_initial) = (self.peer_initial, self.engine_initial);
        let stream = self.streams.entry(id).or_insert_with(|| Stream {
            peer_window: peer_initial,
            engine_window: engine_initial,
            ..Stream::default()
        });
        stream.peer.has_ended |= is_end;
        stream.peer.has_head |= !block.starts_with(INTERIM);
    }

    fn apply_engine_settings(&mut self) {
        for (id, value) in self.engine_settings.pop_front().into_iter().flatten() {
            if id == 4 {
                let by = i64::from(value) - self.peer_initial;
                self.peer_initial += by;
                let streams = self.streams.values_mut();
                streams.for_each(|stream| stream.peer_window += by);
            }
        }
    }

    // The engine's bytes.

    pub(super) fn observe_output(&mut self, mut bytes: &[u8]) {
        let left = self.preface_left[1].min(bytes.len());
        let start = PREFACE.len() - self.preface_left[1];
        assert_eq!(bytes[..left], PREFACE[start..start + left], "the preface");
        self.preface_left[1] -= left;
        bytes = &bytes[left..];
        self.output.extend_from_slice(bytes);
        while let Some(frame) = Frame::take(&mut self.output, self.max_frame) {
            let frame = frame.expect("the frame is no larger than the peer allows");
            if !std::mem::replace(&mut self.has_output, true) {
                assert_eq!(
                    (frame.kind, frame.flags),
                    (SETTINGS, 0),
                    "SETTINGS come first"
                );
            }
            if self.output_block.is_some() {
                assert_eq!(
                    frame.kind, CONTINUATION,
                    "a header block is not interrupted"
                );
            }
            self.observe_engine_frame(&frame);
        }
    }

    fn observe_engine_frame(&mut self, frame: &Frame) {
        match frame.kind {
            DATA => self.observe_engine_data(frame),
            HEADERS => {
                assert!(!frame.has(frame::PADDED) && !frame.has(frame::HAS_PRIORITY));
                let is_end = frame.has(END_STREAM);
                self.output_block = Some((frame.stream, is_end, Vec::new()));
                self.observe_engine_block(frame);
            }
            CONTINUATION => self.observe_engine_block(frame),
            PRIORITY => panic!("the engine sends no PRIORITY"),
            RST_STREAM => {
                assert_eq!(frame.payload.len(), 4);
                let code = frame.u32(0);
                assert!(
                    !self.is_polite || USER_CODES.contains(&code),
                    "reset by {code}"
                );
                // A stream is closed once a higher one is opened (RFC 9113 section 5.1.1).
                let highest = self.streams.last_key_value().map_or(0, |(id, _)| *id);
                if self.streams.contains_key(&frame.stream) || frame.stream > highest {
                    self.engine_stream(frame).engine.has_reset = true;
                }
            }
            SETTINGS if frame.has(ACK) => {
                assert_eq!((frame.stream, frame.payload.len()), (0, 0));
                self.apply_peer_settings();
            }
            SETTINGS => {
                let settings = settings(frame);
                for (id, value) in &settings {
                    if *id == 4 {
                        self.largest_initial = self.largest_initial.max(i64::from(*value));
                    }
                }
                self.engine_settings.push_back(settings);
            }
            frame::PUSH_PROMISE => panic!("the engine does not push"),
            PING if frame.has(ACK) => {
                let sent = self.peer_pings.pop_front();
                assert_eq!(
                    sent,
                    Some(frame.payload.clone()),
                    "PINGs are answered in order"
                );
            }
            PING => {
                assert_eq!((frame.stream, frame.payload.len()), (0, 8));
                self.engine_pings.push(frame.payload.clone());
            }
            GOAWAY => self.observe_engine_go_away(frame),
            WINDOW_UPDATE => self.observe_engine_window(frame),
            kind => panic!("a frame of unknown type {kind}"),
        }
    }

    /// Returns the stream of an engine's frame other than the HEADERS that open it.
    fn engine_stream(&mut self, frame: &Frame) -> &mut Stream {
        let stream = self.streams.get_mut(&frame.stream);
        stream.unwrap_or_else(|| panic!("the stream is idle: {frame:?}"))
    }

    fn observe_engine_data(&mut self, frame: &Frame) {
        let length = frame.payload.len() as i64;
        self.engine_connection -= length;
        assert!(
            self.engine_connection >= 0 || length == 0,
            "the connection's window"
        );
        let stream = self.engine_stream(frame);
        assert!(
            stream.engine.has_head && stream.engine.is_open(),
            "{stream:?}"
        );
        assert!(!stream.is_settled, "DATA after the peer's reset");
        stream.engine_window -= length;
        assert!(
            stream.engine_window >= 0 || length == 0,
            "the stream's window"
        );
        for byte in &frame.payload {
            assert_eq!(
                *byte,
                pattern(frame.stream, stream.engine.bytes),
                "byte order"
            );
            stream.engine.bytes += 1;
        }
        assert!(length > 0 || frame.has(END_STREAM), "an empty frame");
        stream.engine.has_ended |= frame.has(END_STREAM);
    }

    fn observe_engine_block(&mut self, frame: &Frame) {
        let Some((id, is_end, mut block)) = self.output_block.take() else {
            panic!("CONTINUATION without HEADERS");
        };
        assert_eq!(id, frame.stream);
        block.extend_from_slice(&frame.payload);
        if !frame.has(END_HEADERS) {
            self.output_block = Some((id, is_end, block));
            return;
        }
        let (fields, decoded) = self.decoder.decode(&block);
        decoded.expect("the peer can decode the block");
        if self.role == Role::Client && !self.streams.contains_key(&id) {
            self.open_engine_stream(id, &fields);
        }
        let role = self.role;
        let stream = self.engine_stream(frame);
        assert!(stream.engine.is_open(), "HEADERS after the end: {stream:?}");
        assert!(!stream.is_settled, "HEADERS after the peer's reset");
        let status = fields.first().filter(|field| field.name == ":status");
        let is_interim = status.is_some_and(|field| field.value[0] == b'1');
        if stream.engine.has_head {
            assert!(is_end, "trailers end the stream");
            assert!(fields.iter().all(|field| field.name[0] != b':'));
        } else if is_interim {
            assert!(!is_end, "an interim response ends nothing");
        } else {
            assert_eq!(status.is_some(), role == Role::Server);
            stream.engine.has_head = true;
        }
        stream.engine.has_ended |= is_end;
    }

    fn open_engine_stream(&mut self, id: u32, fields: &[HpackField]) {
        assert!(id % 2 == 1, "a client's stream has an odd number");
        let last = self.streams.last_key_value().map_or(0, |(last, _)| *last);
        assert!(id > last, "numbers ascend");
        assert!(
            self.open_streams() < self.max_streams,
            "the peer allows no more streams"
        );
        let names: Vec<&[u8]> = fields.iter().map(|field| &field.name[..]).collect();
        assert!(names.starts_with(&[b":method"]), "{names:?}");
        let stream = Stream {
            peer_window: self.peer_initial,
            engine_window: self.engine_initial,
            has_no_body: fields[0].value == "HEAD",
            ..Stream::default()
        };
        self.streams.insert(id, stream);
    }

    /// Applies the peer's oldest SETTINGS, which the engine acknowledges.
    fn apply_peer_settings(&mut self) {
        let settings = self.peer_settings.pop_front();
        let settings = settings.expect("SETTINGS are acknowledged once");
        let sizes = settings.iter().filter(|(id, _)| *id == 1);
        if let Some((_, smallest)) = sizes.clone().min_by_key(|(_, size)| *size) {
            self.decoder.set_max_size(*smallest as usize);
        }
        if let Some((_, last)) = sizes.last() {
            self.decoder.set_max_size(*last as usize);
        }
        let last = |id| settings.iter().rev().find(|(other, _)| *other == id);
        match last(3) {
            Some((_, max)) => self.max_streams = *max as usize,
            // Once the peer's first SETTINGS are there, the default is no limit.
            None if self.max_streams == 100 => self.max_streams = usize::MAX,
            None => {}
        }
        if let Some((_, window)) = last(4) {
            let by = i64::from(*window) - self.engine_initial;
            self.engine_initial += by;
            let streams = self.streams.values_mut();
            streams.for_each(|stream| stream.engine_window += by);
        }
        if let Some((_, size)) = last(5) {
            self.max_frame = *size as usize;
        }
    }

    fn observe_engine_go_away(&mut self, frame: &Frame) {
        let (last, code) = (frame.u32(0), frame.u32(4));
        assert!(!self.is_polite || code == 0, "ended by {code}");
        assert!(self.engine_left.is_none_or(|(earlier, _)| last <= earlier));
        self.engine_left = Some((last, code));
    }

    /// Returns the length of a DATA frame of the peer that is not complete: the engine may have read its beginning.
    fn partial_data(&self) -> i64 {
        let mut head = &self.input[..];
        if head.len() < 4 || head[3] != DATA {
            return 0;
        }
        head.get_uint(3) as i64
    }

    fn observe_engine_window(&mut self, frame: &Frame) {
        let by = i64::from(frame.u32(0));
        assert!(by > 0, "an update by 0");
        let partial = self.partial_data();
        if frame.stream == 0 {
            self.peer_connection += by;
            let max = DEFAULT_WINDOW.max(i64::from(self.limits.connection_window)) + partial;
            assert!(self.peer_connection <= max, "the connection's window grows");
            return;
        }
        // The engine's user may widen the windows up to this size.
        let max = self.largest_initial.max(i64::from(MAX_WINDOW_LIMIT)) + partial;
        let stream = self.engine_stream(frame);
        assert!(!stream.engine.has_reset, "an update after a reset");
        stream.peer_window += by;
        assert!(
            stream.peer_window <= max,
            "the stream's window grows: {stream:?}"
        );
    }
}

fn settings(frame: &Frame) -> Settings {
    let entries = frame.payload.chunks_exact(6);
    entries
        .map(|entry| {
            let value = [entry[2], entry[3], entry[4], entry[5]];
            (
                u16::from_be_bytes([entry[0], entry[1]]),
                u32::from_be_bytes(value),
            )
        })
        .collect()
}

/// Byte at this place of the data that either end sends on a stream.
pub(super) fn pattern(stream: u32, place: u64) -> u8 {
    (place.wrapping_mul(7).wrapping_add(u64::from(stream)) & 0xff) as u8
}
