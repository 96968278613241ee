//! Frames that the fuzzer writes as the engine's peer. A polite peer writes only what RFC 9113 allows it.

use super::{
    checker::{Checker, MAX_WINDOW, Role, Stream, pattern},
    frame::{
        ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HAS_PRIORITY, HEADERS,
        PADDED, PING, PRIORITY, RST_STREAM, SETTINGS, WINDOW_UPDATE,
    },
    input::Input,
};

/// Fields that a peer adds to a head; the first ones are valid.
const FIELDS: [(&str, &str); 12] = [
    ("a", "b"),
    ("te", "trailers"),
    ("cookie", "c=d"),
    ("x-long", "0123456789012345678901234567890123456789"),
    ("content-length", "0"),
    ("content-length", "5"),
    ("content-length", "+5"),
    ("te", "gzip"),
    ("Upper", "x"),
    ("connection", "close"),
    (":path", "/late"),
    ("bad", "line\nfeed"),
];
const VALID_FIELDS: usize = 4;

type Fields = &'static [(&'static str, &'static str)];

const REQUESTS: [Fields; 9] = [
    &[
        (":method", "GET"),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", "/"),
    ],
    &[(":method", "POST"), (":scheme", "https"), (":path", "/x?y")],
    &[(":method", "CONNECT"), (":authority", "a:1")],
    &[
        (":method", "OPTIONS"),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", "*"),
    ],
    &[
        (":method", "CONNECT"),
        (":protocol", "p"),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", "/"),
    ],
    &[(":method", "GET"), (":scheme", "http"), (":path", "")],
    &[(":method", "GET"), (":path", "/")],
    &[
        (":method", "CONNECT"),
        (":authority", "a:1"),
        (":path", "/"),
    ],
    &[(":status", "200")],
];
const VALID_REQUESTS: usize = 5;

const RESPONSES: [Fields; 8] = [
    &[(":status", "200")],
    &[(":status", "404")],
    &[(":status", "100")],
    &[(":status", "103")],
    &[(":status", "304")],
    &[(":status", "101")],
    &[],
    &[(":status", "200"), (":method", "GET")],
];
const VALID_RESPONSES: usize = 5;

/// Frames that one step of the peer has written.
pub(super) struct Peer<'a, 'b> {
    pub(super) checker: &'a Checker,
    pub(super) input: &'a mut Input<'b>,
    pub(super) out: Vec<u8>,
    /// Whether bytes were written that are not counted, so that the data of streams is no known pattern.
    pub(super) has_raw: bool,
}

impl Peer<'_, '_> {
    fn put(&mut self, kind: u8, flags: u8, stream: u32, payload: impl Into<Vec<u8>>) {
        Frame::new(kind, flags, stream, payload).put(&mut self.out);
    }

    /// Chooses a stream. A polite peer chooses from those for which the condition is true.
    fn stream(&mut self, condition: impl Fn(&Stream) -> bool) -> Option<(u32, Option<&Stream>)> {
        let number = self.input.byte();
        let is_polite = self.checker.is_polite;
        if !is_polite && number >= 240 {
            let id = u32::from(number - 240);
            return Some((id, self.checker.streams.get(&id)));
        }
        let streams = self.checker.streams.iter();
        // A client's GOAWAY names no stream of its own.
        let last = self
            .checker
            .peer_last
            .filter(|_| self.checker.role == Role::Client);
        let is_taken = |id: u32| last.is_none_or(|last| id <= last);
        let streams =
            streams.filter(|(id, stream)| !is_polite || (is_taken(**id) && condition(stream)));
        let count = streams.clone().count();
        let place = usize::from(number).checked_rem(count)?;
        let (id, stream) = { streams }.nth(place)?;
        Some((*id, Some(stream)))
    }

    pub(super) fn step(&mut self, operation: u8) {
        match operation {
            0 | 1 => self.head(),
            2 | 3 => self.data(),
            4 => self.trailers(),
            5 => self.window_update(),
            6 => self.settings(),
            7 => self.acknowledge(),
            8 => {
                let payload = [self.input.byte(); 8];
                self.put(PING, 0, 0, payload);
            }
            9 => {
                let code = self.input.u32();
                if let Some((id, _)) = self.stream(|stream| !stream.peer.has_reset) {
                    self.put(RST_STREAM, 0, id, code.to_be_bytes());
                }
            }
            10 => self.go_away(),
            11 => {
                let (id, payload) = (
                    u32::from(self.input.byte()) | 1,
                    self.input.bytes(5).to_vec(),
                );
                if payload.len() == 5 && payload[..4] != id.to_be_bytes() {
                    self.put(PRIORITY, 0, id, payload);
                }
                self.put(77, 0xff, id, *b"unknown");
            }
            _ if self.checker.is_polite => {}
            12 => {
                let (kind, flags) = (self.input.byte() % 11, self.input.byte());
                let (stream, length) = (u32::from(self.input.byte()), self.input.byte() % 32);
                let payload = self.input.bytes(length.into());
                self.has_raw = true;
                self.put(kind, flags, stream, payload);
            }
            _ => {
                let length = usize::from(self.input.byte());
                self.has_raw = true;
                self.out.extend_from_slice(self.input.bytes(length));
            }
        }
    }

    /// Writes HEADERS that open a stream, or a response on one.
    fn head(&mut self) {
        let is_polite = self.checker.is_polite;
        let (id, all, valid) = if self.checker.role == Role::Server {
            let last = self.checker.streams.last_key_value();
            let next = last.map_or(1, |(last, _)| last + 2);
            let is_full = self.checker.open_streams() >= self.checker.limits.max_streams as usize;
            if is_polite && (is_full || self.checker.is_leaving()) {
                return;
            }
            (next, &REQUESTS[..], VALID_REQUESTS)
        } else {
            let chosen = self.stream(|stream| !stream.peer.has_head && stream.peer.is_open());
            let Some((id, _)) = chosen else { return };
            (id, &RESPONSES[..], VALID_RESPONSES)
        };
        let valid = if is_polite { valid } else { all.len() };
        let place = usize::from(self.input.byte()) % valid;
        let is_interim = self.checker.role == Role::Client && matches!(place, 2 | 3);
        let flags = self.input.byte();
        let is_end = flags & 1 != 0 && !(is_polite && is_interim);
        let mut block = Vec::new();
        for (name, value) in all[place] {
            put_field(&mut block, name, value);
        }
        self.fields(&mut block, flags >> 1);
        self.block(id, is_end, block);
    }

    /// Appends fields, or any bytes as a header block.
    fn fields(&mut self, block: &mut Vec<u8>, count: u8) {
        let is_polite = self.checker.is_polite;
        if count & 7 == 7 && !is_polite {
            let length = self.input.byte();
            block.extend_from_slice(self.input.bytes(length.into()));
            return;
        }
        let valid = if is_polite {
            VALID_FIELDS
        } else {
            FIELDS.len()
        };
        for _ in 0..count & 7 {
            let (name, value) = FIELDS[usize::from(self.input.byte()) % valid];
            put_field(block, name, value);
        }
    }

    /// Writes a header block in frames.
    fn block(&mut self, id: u32, is_end: bool, block: Vec<u8>) {
        let form = self.input.byte();
        let end = if is_end { END_STREAM } else { 0 };
        let mut first = Vec::new();
        let mut flags = end;
        let padding = if form & 1 == 0 { 0 } else { form >> 4 };
        if form & 1 != 0 {
            flags |= PADDED;
            first.push(padding);
        }
        if form & 2 != 0 {
            flags |= HAS_PRIORITY;
            first.extend_from_slice(&[0, 0, 0, 0, 7]);
        }
        // Few frames, as from any real peer.
        let parts = if form & 4 == 0 { 1 } else { 3 };
        let size = block.len().div_ceil(parts).max(1);
        let (start, rest) = block.split_at(size.min(block.len()));
        first.extend_from_slice(start);
        first.extend(vec![0; padding.into()]);
        let is_whole = rest.is_empty() && (self.checker.is_polite || form & 8 == 0);
        self.put(
            HEADERS,
            flags | if is_whole { END_HEADERS } else { 0 },
            id,
            first,
        );
        let mut rest = rest.chunks(size).peekable();
        while let Some(part) = rest.next() {
            let is_last = rest.peek().is_none();
            self.put(
                CONTINUATION,
                if is_last { END_HEADERS } else { 0 },
                id,
                part,
            );
        }
    }

    fn trailers(&mut self) {
        let has_head = self.has_head();
        let chosen = self.stream(|stream| has_head(stream) && stream.peer.is_open());
        let Some((id, _)) = chosen else { return };
        let flags = self.input.byte();
        let mut block = Vec::new();
        self.fields(&mut block, flags >> 1);
        self.block(id, self.checker.is_polite || flags & 1 == 0, block);
    }

    /// Returns whether a stream has the head after which the peer may send data.
    fn has_head(&self) -> impl Fn(&Stream) -> bool + use<> {
        let role = self.checker.role;
        move |stream| role == Role::Server || stream.peer.has_head
    }

    fn data(&mut self) {
        let has_head = self.has_head();
        let is_polite = self.checker.is_polite;
        let chosen =
            self.stream(|stream| has_head(stream) && stream.peer.is_open() && !stream.has_no_body);
        let Some((id, stream)) = chosen else { return };
        let (window, place) =
            stream.map_or((0, 0), |stream| (stream.peer_window, stream.peer.bytes));
        let (mut length, flags) = (self.input.length(), self.input.byte());
        let padding = if flags & 2 == 0 {
            0
        } else {
            usize::from(flags >> 2)
        };
        let overhead = if flags & 2 == 0 { 0 } else { padding + 1 };
        if is_polite {
            let window = window.min(self.checker.peer_connection).max(0) as usize;
            let max = window.min(self.checker.limits.max_frame as usize);
            if max < overhead {
                return;
            }
            length = length.min(max - overhead);
        }
        let mut payload = Vec::with_capacity(length + overhead);
        if flags & 2 != 0 {
            payload.push(padding as u8);
        }
        payload.extend((0..length as u64).map(|offset| pattern(id, place + offset)));
        payload.resize(length + overhead, 0);
        let end = if flags & 1 == 0 { 0 } else { END_STREAM };
        self.put(
            DATA,
            end | if flags & 2 == 0 { 0 } else { PADDED },
            id,
            payload,
        );
    }

    fn window_update(&mut self) {
        let by = self
            .input
            .choose(&[0, 1, 100, 5_000, 65_535, 1 << 20, 1 << 30, 1]);
        let by = if by == 0 { self.input.u32() } else { by };
        let is_polite = self.checker.is_polite;
        let bounded = |by: u32, window: i64| {
            let room = u32::try_from(MAX_WINDOW - window).unwrap_or(0);
            if is_polite { by.min(room) } else { by }
        };
        if self.input.byte() & 1 == 0 {
            self.put_update(0, bounded(by, self.checker.engine_connection));
        } else if let Some((id, stream)) = self.stream(|stream| stream.is_open()) {
            // A change of the initial window may follow, and must not overflow either.
            let window = stream.map_or(0, |stream| stream.engine_window + (1 << 21));
            self.put_update(id, bounded(by, window));
        }
    }

    pub(super) fn put_update(&mut self, stream: u32, by: u32) {
        let by = if self.checker.is_polite {
            by.min(MAX_WINDOW as u32)
        } else {
            by
        };
        if by > 0 || !self.checker.is_polite {
            self.put(WINDOW_UPDATE, 0, stream, by.to_be_bytes());
        }
    }

    fn settings(&mut self) {
        // A peer that does not read the acknowledgements floods.
        if self.checker.is_polite && self.checker.peer_settings.len() > 50 {
            return;
        }
        let mut payload = Vec::new();
        for _ in 0..self.input.byte() % 4 {
            let (id, value): (u16, u32) = match self.input.byte() % 8 {
                0 => (1, self.input.choose(&[0, 64, 200, 4096, 10_000])),
                1 => (3, self.input.choose(&[0, 1, 2, 10, 200])),
                2 => (4, self.input.choose(&[0, 1, 500, 65_535, 1 << 20])),
                3 => (5, self.input.choose(&[1 << 14, 20_000, 1 << 16])),
                4 => (6, self.input.choose(&[0, 500, 1 << 20])),
                5 => (8, 1),
                6 => (0x0f0f, self.input.u32()),
                _ if self.checker.is_polite => (9, 1),
                _ => (self.input.byte().into(), self.input.u32()),
            };
            payload.extend_from_slice(&id.to_be_bytes());
            payload.extend_from_slice(&value.to_be_bytes());
        }
        self.put(SETTINGS, 0, 0, payload);
    }

    /// Acknowledges the engine's SETTINGS and PINGs.
    pub(super) fn acknowledge(&mut self) {
        for _ in 0..self.checker.engine_settings.len() {
            self.put(SETTINGS, ACK, 0, []);
        }
        for payload in &self.checker.engine_pings {
            Frame::new(PING, ACK, 0, payload.clone()).put(&mut self.out);
        }
        if !self.checker.is_polite && self.input.byte() > 250 {
            self.put(SETTINGS, ACK, 0, []);
        }
    }

    fn go_away(&mut self) {
        let (code, last) = (self.input.byte() % 15, self.input.byte());
        let highest = self.checker.streams.last_key_value();
        let highest = highest.map_or(0, |(id, _)| *id);
        let last = if last < 128 { highest } else { u32::from(last) };
        let payload = [last.to_be_bytes(), u32::from(code).to_be_bytes()].concat();
        self.put(GOAWAY, 0, 0, payload);
    }
}

/// Appends a literal field without indexing (RFC 7541 section 6.2.2).
fn put_field(block: &mut Vec<u8>, name: &str, value: &str) {
    block.push(0);
    for text in [name, value] {
        block.push(text.len() as u8);
        block.extend_from_slice(text.as_bytes());
    }
}
