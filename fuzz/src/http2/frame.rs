//! Frames on the wire (RFC 9113 section 4.1), without the engine's code.

use bytes::{Buf, BufMut, BytesMut};

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const PRIORITY: u8 = 2;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PUSH_PROMISE: u8 = 5;
pub(super) const PING: u8 = 6;
pub(super) const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;

/// Flag of DATA and HEADERS, and of SETTINGS and PING.
pub(super) const END_STREAM: u8 = 1;
pub(super) const ACK: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;
pub(super) const PADDED: u8 = 8;
pub(super) const HAS_PRIORITY: u8 = 0x20;

#[derive(Debug)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
    pub(super) payload: Vec<u8>,
}

impl Frame {
    pub(super) fn new(kind: u8, flags: u8, stream: u32, payload: impl Into<Vec<u8>>) -> Self {
        let payload = payload.into();
        Self {
            kind,
            flags,
            stream,
            payload,
        }
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Returns the number at this place of the payload.
    pub(super) fn u32(&self, place: usize) -> u32 {
        let bytes = self.payload.get(place..place + 4);
        bytes.map_or(0, |mut bytes| bytes.get_u32())
    }

    /// Returns the payload without padding, or `None` if its padding is invalid.
    pub(super) fn data(&self) -> Option<&[u8]> {
        if !self.has(PADDED) {
            return Some(&self.payload);
        }
        let (padding, rest) = self.payload.split_first()?;
        rest.get(..rest.len().checked_sub(usize::from(*padding))?)
    }

    /// Returns the part of a header block in HEADERS or CONTINUATION, or `None` if its padding is invalid.
    pub(super) fn fragment(&self) -> Option<&[u8]> {
        if self.kind == CONTINUATION {
            return Some(&self.payload);
        }
        let skipped = if self.has(HAS_PRIORITY) { 5 } else { 0 };
        self.data()?.get(skipped..)
    }

    /// Removes the first frame of `bytes`, if it is complete and at most `max_length` long.
    pub(super) fn take(bytes: &mut BytesMut, max_length: usize) -> Option<Result<Self, usize>> {
        let mut head = bytes.get(..9)?;
        let length = head.get_uint(3) as usize;
        if length > max_length {
            return Some(Err(length));
        }
        let (kind, flags, stream) = (head.get_u8(), head.get_u8(), head.get_u32() & !(1 << 31));
        if bytes.len() < 9 + length {
            return None;
        }
        bytes.advance(9);
        let payload = bytes.split_to(length);
        Some(Ok(Self::new(kind, flags, stream, &payload[..])))
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        out.put_uint(self.payload.len() as u64, 3);
        out.put_u8(self.kind);
        out.put_u8(self.flags);
        out.put_u32(self.stream);
        out.put_slice(&self.payload);
    }
}
