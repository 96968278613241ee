//! Frames on the wire (RFC 9113 sections 4 and 6): heads, SETTINGS, and the small frames. Pure functions.

use super::{
    error::Reason,
    flow::{DEFAULT_WINDOW, MAX_WINDOW},
};
use bytes::{BufMut, BytesMut};

/// Connection preface of a client (RFC 9113 section 3.4).
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length of a frame's head, in bytes.
pub(super) const HEAD_LEN: usize = 9;
/// Largest payload before any SETTINGS, and least value of `SETTINGS_MAX_FRAME_SIZE` (RFC 9113 section 6.5.2).
pub(super) const DEFAULT_MAX_FRAME: u32 = 1 << 14;
/// Largest value of `SETTINGS_MAX_FRAME_SIZE`.
const LARGEST_MAX_FRAME: u32 = (1 << 24) - 1;
/// Bits of a stream's number; the highest bit is reserved.
const STREAM_MASK: u32 = (1 << 31) - 1;

/// Types of frames.
pub(super) mod kind {
    pub(in super::super) const DATA: u8 = 0;
    pub(in super::super) const HEADERS: u8 = 1;
    pub(in super::super) const PRIORITY: u8 = 2;
    pub(in super::super) const RST_STREAM: u8 = 3;
    pub(in super::super) const SETTINGS: u8 = 4;
    pub(in super::super) const PUSH_PROMISE: u8 = 5;
    pub(in super::super) const PING: u8 = 6;
    pub(in super::super) const GOAWAY: u8 = 7;
    pub(in super::super) const WINDOW_UPDATE: u8 = 8;
    pub(in super::super) const CONTINUATION: u8 = 9;
}

/// Flags of frames.
pub(super) mod flag {
    pub(in super::super) const END_STREAM: u8 = 0x1;
    pub(in super::super) const ACK: u8 = 0x1;
    pub(in super::super) const END_HEADERS: u8 = 0x4;
    pub(in super::super) const PADDED: u8 = 0x8;
    pub(in super::super) const PRIORITY: u8 = 0x20;
}

/// Head of a frame (RFC 9113 section 4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) length: usize,
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
}

impl Head {
    /// Parses the head at the beginning of `bytes`, if all of it is there.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let head: &[u8; HEAD_LEN] = bytes.first_chunk()?;
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = *head;
        Some(Self {
            length: u32::from_be_bytes([0, l0, l1, l2]) as usize,
            kind,
            flags,
            stream: u32::from_be_bytes([s0, s1, s2, s3]) & STREAM_MASK,
        })
    }

    /// Returns the head's bytes.
    pub(super) fn to_bytes(self) -> [u8; HEAD_LEN] {
        let length = u32::try_from(self.length).unwrap_or(u32::MAX).to_be_bytes();
        let stream = self.stream.to_be_bytes();
        [
            length[1], length[2], length[3], self.kind, self.flags, stream[0], stream[1],
            stream[2], stream[3],
        ]
    }

    pub(super) fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Appends a frame whose payload is complete.
pub(super) fn put_frame(out: &mut BytesMut, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let head = Head {
        length: payload.len(),
        kind,
        flags,
        stream,
    };
    out.put_slice(&head.to_bytes());
    out.put_slice(payload);
}

/// Appends a `WINDOW_UPDATE` frame (RFC 9113 section 6.9).
pub(super) fn put_window_update(out: &mut BytesMut, stream: u32, bytes: u32) {
    put_frame(out, kind::WINDOW_UPDATE, 0, stream, &bytes.to_be_bytes());
}

/// Appends a `RST_STREAM` frame (RFC 9113 section 6.4).
pub(super) fn put_reset(out: &mut BytesMut, stream: u32, reason: Reason) {
    put_frame(
        out,
        kind::RST_STREAM,
        0,
        stream,
        &u32::from(reason).to_be_bytes(),
    );
}

/// Appends a GOAWAY frame (RFC 9113 section 6.8).
pub(super) fn put_go_away(out: &mut BytesMut, last_stream: u32, reason: Reason, text: &[u8]) {
    let head = Head {
        length: 8 + text.len(),
        kind: kind::GOAWAY,
        flags: 0,
        stream: 0,
    };
    out.put_slice(&head.to_bytes());
    out.put_u32(last_stream);
    out.put_u32(reason.into());
    out.put_slice(text);
}

/// Appends a header block as HEADERS and, if it is larger than a frame of the peer, CONTINUATION (RFC 9113 section 6.10).
/// `encode` appends the block.
pub(super) fn put_block(
    out: &mut BytesMut,
    (stream, end_stream): (u32, bool),
    max_frame: usize,
    encode: impl FnOnce(&mut BytesMut),
) {
    let start = out.len();
    out.put_bytes(0, HEAD_LEN);
    encode(out);
    let end_flag = if end_stream { flag::END_STREAM } else { 0 };
    let length = out.len() - start - HEAD_LEN;
    let mut head = Head {
        length: length.min(max_frame),
        kind: kind::HEADERS,
        flags: end_flag,
        stream,
    };
    if length <= max_frame {
        head.flags |= flag::END_HEADERS;
        out[start..start + HEAD_LEN].copy_from_slice(&head.to_bytes());
        return;
    }
    out[start..start + HEAD_LEN].copy_from_slice(&head.to_bytes());
    let rest = out.split_off(start + HEAD_LEN + max_frame);
    let mut parts = rest.chunks(max_frame).peekable();
    while let Some(part) = parts.next() {
        let flags = if parts.peek().is_none() {
            flag::END_HEADERS
        } else {
            0
        };
        put_frame(out, kind::CONTINUATION, flags, stream, part);
    }
}

/// Returns the payload of HEADERS without padding and priority (RFC 9113 section 6.2).
pub(super) fn header_fragment(head: Head, payload: &[u8]) -> Result<&[u8], Reason> {
    let (mut rest, mut padding) = (payload, 0);
    if head.has(flag::PADDED) {
        let (length, after) = rest.split_first().ok_or(Reason::FRAME_SIZE_ERROR)?;
        (rest, padding) = (after, usize::from(*length));
    }
    if head.has(flag::PRIORITY) {
        rest = rest.get(5..).ok_or(Reason::FRAME_SIZE_ERROR)?;
    }
    let length = rest.len().checked_sub(padding);
    length
        .and_then(|length| rest.get(..length))
        .ok_or(Reason::PROTOCOL_ERROR)
}

/// Returns the number in a payload of four bytes.
pub(super) fn parse_u32(payload: &[u8]) -> Result<u32, Reason> {
    let bytes = payload.try_into().map_err(|_| Reason::FRAME_SIZE_ERROR)?;
    Ok(u32::from_be_bytes(bytes))
}

/// Returns the increment of a `WINDOW_UPDATE` frame, which may be an invalid 0.
pub(super) fn parse_increment(payload: &[u8]) -> Result<u32, Reason> {
    Ok(parse_u32(payload)? & STREAM_MASK)
}

/// Returns last stream, code and text of a GOAWAY frame.
pub(super) fn parse_go_away(payload: &[u8]) -> Result<(u32, Reason, &[u8]), Reason> {
    let (last, rest) = payload
        .split_at_checked(4)
        .ok_or(Reason::FRAME_SIZE_ERROR)?;
    let (reason, text) = rest.split_at_checked(4).ok_or(Reason::FRAME_SIZE_ERROR)?;
    Ok((
        parse_u32(last)? & STREAM_MASK,
        Reason::from(parse_u32(reason)?),
        text,
    ))
}

/// Values of a SETTINGS frame (RFC 9113 section 6.5.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) header_table_size: Option<u32>,
    /// Smallest of the frame's values of `SETTINGS_HEADER_TABLE_SIZE` (RFC 7541 section 4.2). Never sent.
    pub(super) smallest_table_size: Option<u32>,
    pub(super) enable_push: Option<u32>,
    pub(super) max_concurrent_streams: Option<u32>,
    pub(super) initial_window_size: Option<u32>,
    pub(super) max_frame_size: Option<u32>,
    pub(super) max_header_list_size: Option<u32>,
    /// RFC 8441 section 3.
    pub(super) enable_connect_protocol: Option<u32>,
}

impl Settings {
    /// Returns the window of new streams.
    pub(super) fn window(&self) -> u32 {
        self.initial_window_size.unwrap_or(DEFAULT_WINDOW)
    }

    /// Returns the largest payload of a frame.
    pub(super) fn max_frame(&self) -> u32 {
        self.max_frame_size.unwrap_or(DEFAULT_MAX_FRAME)
    }

    fn entries(&mut self) -> [(u16, &mut Option<u32>); 7] {
        [
            (1, &mut self.header_table_size),
            (2, &mut self.enable_push),
            (3, &mut self.max_concurrent_streams),
            (4, &mut self.initial_window_size),
            (5, &mut self.max_frame_size),
            (6, &mut self.max_header_list_size),
            (8, &mut self.enable_connect_protocol),
        ]
    }

    /// Parses a payload. Unknown settings are ignored.
    pub(super) fn parse(payload: &[u8]) -> Result<Self, Reason> {
        if !payload.len().is_multiple_of(6) {
            return Err(Reason::FRAME_SIZE_ERROR);
        }
        let mut settings = Self::default();
        for entry in payload.chunks_exact(6) {
            let [i0, i1, v0, v1, v2, v3] = *entry else {
                continue;
            };
            let id = u16::from_be_bytes([i0, i1]);
            let value = u32::from_be_bytes([v0, v1, v2, v3]);
            check_setting(id, value)?;
            if let Some((_, slot)) = settings
                .entries()
                .into_iter()
                .find(|(known, _)| *known == id)
            {
                *slot = Some(value);
            }
            if id == 1 {
                let earlier = settings.smallest_table_size.unwrap_or(value);
                settings.smallest_table_size = Some(earlier.min(value));
            }
        }
        Ok(settings)
    }

    /// Appends the frame.
    pub(super) fn put(mut self, out: &mut BytesMut) {
        let mut payload = BytesMut::new();
        for (id, value) in self.entries() {
            if let Some(value) = value {
                payload.put_u16(id);
                payload.put_u32(*value);
            }
        }
        put_frame(out, kind::SETTINGS, 0, 0, &payload);
    }
}

/// Checks a value (RFC 9113 section 6.5.2).
fn check_setting(id: u16, value: u32) -> Result<(), Reason> {
    match id {
        2 | 8 if value > 1 => Err(Reason::PROTOCOL_ERROR),
        4 if value > MAX_WINDOW => Err(Reason::FLOW_CONTROL_ERROR),
        5 if !(DEFAULT_MAX_FRAME..=LARGEST_MAX_FRAME).contains(&value) => {
            Err(Reason::PROTOCOL_ERROR)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_and_settings_survive_the_wire() {
        let head = Head {
            length: 0x01_02_03,
            kind: kind::HEADERS,
            flags: flag::END_HEADERS,
            stream: 5,
        };
        let mut bytes = head.to_bytes();
        assert_eq!(Head::parse(&bytes), Some(head));
        bytes[5] |= 0x80;
        assert_eq!(
            Head::parse(&bytes),
            Some(head),
            "the reserved bit is ignored"
        );
        assert_eq!(Head::parse(&bytes[..8]), None);
        let settings = Settings {
            header_table_size: Some(0),
            smallest_table_size: Some(0),
            max_frame_size: Some(1 << 16),
            enable_connect_protocol: Some(1),
            ..Settings::default()
        };
        let mut out = BytesMut::new();
        settings.put(&mut out);
        assert_eq!(Settings::parse(&out[HEAD_LEN..]), Ok(settings));
    }

    #[test]
    fn invalid_settings_have_the_codes_of_the_rfc() {
        for (entry, reason) in [
            ([0, 2, 0, 0, 0, 2], Reason::PROTOCOL_ERROR),
            ([0, 4, 0x80, 0, 0, 0], Reason::FLOW_CONTROL_ERROR),
            ([0, 5, 0, 0, 0x3f, 0xff], Reason::PROTOCOL_ERROR),
            ([0, 5, 1, 0, 0, 0], Reason::PROTOCOL_ERROR),
            ([0, 8, 0, 0, 0, 2], Reason::PROTOCOL_ERROR),
        ] {
            assert_eq!(Settings::parse(&entry), Err(reason));
        }
        assert_eq!(Settings::parse(&[0; 5]), Err(Reason::FRAME_SIZE_ERROR));
        assert_eq!(
            Settings::parse(&[9; 6]),
            Ok(Settings::default()),
            "unknown settings are ignored"
        );
    }

    #[test]
    fn a_large_block_continues_in_frames_of_the_peers_size() {
        let mut out = BytesMut::new();
        put_block(&mut out, (1, true), 10, |block| block.put_bytes(7, 25));
        let (mut frames, mut rest) = (Vec::new(), &out[..]);
        while let Some(head) = Head::parse(rest) {
            frames.push((head.kind, head.flags, head.length));
            rest = &rest[HEAD_LEN + head.length..];
        }
        assert_eq!(
            frames,
            [
                (kind::HEADERS, flag::END_STREAM, 10),
                (kind::CONTINUATION, 0, 10),
                (kind::CONTINUATION, flag::END_HEADERS, 5)
            ]
        );
    }

    #[test]
    fn padding_and_priority_are_removed_and_checked() {
        let head = |flags| Head {
            length: 0,
            kind: kind::HEADERS,
            flags,
            stream: 1,
        };
        let both = flag::PADDED | flag::PRIORITY;
        assert_eq!(
            header_fragment(head(both), &[2, 0, 0, 0, 0, 0, 9, 0, 0]),
            Ok(&[9][..])
        );
        assert_eq!(header_fragment(head(flag::PADDED), &[1, 0]), Ok(&[][..]));
        assert_eq!(
            header_fragment(head(flag::PADDED), &[2, 0]),
            Err(Reason::PROTOCOL_ERROR)
        );
        assert_eq!(
            header_fragment(head(flag::PADDED), &[]),
            Err(Reason::FRAME_SIZE_ERROR)
        );
        assert_eq!(
            header_fragment(head(flag::PRIORITY), &[0; 4]),
            Err(Reason::FRAME_SIZE_ERROR)
        );
    }
}
