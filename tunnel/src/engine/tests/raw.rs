//! A connection's state machine with a peer that writes raw frames.

use super::super::{
    config::Config,
    connection::State,
    error::Reason,
    frame::{self, HEAD_LEN, Head, PREFACE, flag, kind},
    outgoing::Outgoing,
};
use bytes::{BufMut, Bytes, BytesMut};

/// A frame that the state machine has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
    pub(super) payload: Bytes,
}

/// Consequence of the peer's frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Neither a reset nor an end.
    Accepted,
    /// `RST_STREAM`.
    Stream(u32, Reason),
    /// GOAWAY and the end.
    Connection(Reason),
}

/// A state machine whose peer's bytes the test writes.
pub(super) struct Peer {
    pub(super) state: State,
}

impl Peer {
    /// A server that has read preface and SETTINGS.
    pub(super) fn of_server(change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(true);
        change(&mut config);
        let mut peer = Self {
            state: State::new(config),
        };
        peer.feed(PREFACE);
        peer.feed(&settings(&[]));
        peer.feed(&frame(kind::SETTINGS, flag::ACK, 0, &[]));
        peer.take();
        peer
    }

    /// A client that has read SETTINGS.
    pub(super) fn of_client() -> Self {
        let mut peer = Self {
            state: State::new(Config::new(false)),
        };
        peer.feed(&settings(&[]));
        peer.take();
        peer
    }

    /// Gives bytes to the state machine.
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        let mut read = BytesMut::from(bytes);
        self.state.receive(&mut read, (0, bytes.len()));
        self.state.check_end();
    }

    /// Returns the frames of one batch that the state machine writes, as one would be written now.
    pub(super) fn take_batch(&mut self) -> Vec<Frame> {
        let mut out = Outgoing::default();
        self.state.drain(&mut out);
        let mut bytes = out.into_bytes();
        if bytes.starts_with(PREFACE) {
            drop(bytes.split_to(PREFACE.len()));
        }
        let mut frames = Vec::new();
        while let Some(head) = Head::parse(&bytes) {
            let mut frame = bytes.split_to(HEAD_LEN + head.length);
            frames.push(Frame {
                kind: head.kind,
                flags: head.flags,
                stream: head.stream,
                payload: frame.split_off(HEAD_LEN).freeze(),
            });
        }
        assert!(bytes.is_empty());
        frames
    }

    /// Returns all frames that the state machine writes.
    pub(super) fn take(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        loop {
            let batch = self.take_batch();
            if batch.is_empty() {
                return frames;
            }
            frames.extend(batch);
        }
    }

    /// Returns what the state machine makes of the frames.
    pub(super) fn verdict(&mut self, frames: &[Vec<u8>]) -> Verdict {
        for frame in frames {
            self.feed(frame);
        }
        let mut verdict = Verdict::Accepted;
        for frame in self.take() {
            let code = |start: usize| {
                let code = frame.payload[start..start + 4].try_into().unwrap();
                Reason::from(u32::from_be_bytes(code))
            };
            match frame.kind {
                kind::GOAWAY => {
                    assert!(self.state.end.is_some());
                    return Verdict::Connection(code(4));
                }
                kind::RST_STREAM => verdict = Verdict::Stream(frame.stream, code(0)),
                _ => {}
            }
        }
        verdict
    }
}

pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = BytesMut::new();
    frame::put_frame(&mut out, kind, flags, stream, payload);
    out.to_vec()
}

pub(super) fn settings(values: &[(u16, u32)]) -> Vec<u8> {
    let mut payload = BytesMut::new();
    for (id, value) in values {
        payload.put_u16(*id);
        payload.put_u32(*value);
    }
    frame(kind::SETTINGS, 0, 0, &payload)
}

pub(super) fn window_update(stream: u32, bytes: u32) -> Vec<u8> {
    frame(kind::WINDOW_UPDATE, 0, stream, &bytes.to_be_bytes())
}

pub(super) fn reset(stream: u32, reason: Reason) -> Vec<u8> {
    frame(
        kind::RST_STREAM,
        0,
        stream,
        &u32::from(reason).to_be_bytes(),
    )
}

/// Returns a header block of literal fields.
pub(super) fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            assert!(text.len() < 127);
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

/// Fields of an ordinary request.
pub(super) const GET: [(&str, &str); 4] = [
    (":method", "GET"),
    (":scheme", "http"),
    (":authority", "a"),
    (":path", "/"),
];

/// HEADERS with these fields behind those of an ordinary request.
pub(super) fn request(stream: u32, end: bool, more: &[(&str, &str)]) -> Vec<u8> {
    headers(stream, end, &[&GET[..], more].concat())
}

pub(super) fn headers(stream: u32, end: bool, fields: &[(&str, &str)]) -> Vec<u8> {
    let end_flag = if end { flag::END_STREAM } else { 0 };
    frame(
        kind::HEADERS,
        end_flag | flag::END_HEADERS,
        stream,
        &block(fields),
    )
}

pub(super) fn data(stream: u32, end: bool, payload: &[u8]) -> Vec<u8> {
    frame(
        kind::DATA,
        if end { flag::END_STREAM } else { 0 },
        stream,
        payload,
    )
}
