//! Begin and end of a client's header blocks over HTTP/2.
//!
//! h2 limits the size of a block and the number of its frames, but not the time of a block. No other frame may come in between
//! (RFC 9113 §6.10). Only frame headers are parsed as they pass between TLS and h2. Bytes that do not begin as HTTP/2 does are
//! not parsed.

use causeway_tunnel::frame_parser::{
    CONTINUATION, ClientFrames, END_HEADERS, FrameEvent, FrameHeader, HEADERS,
};

/// Tracker of the header blocks that a client sends.
#[derive(Debug, Default)]
pub(super) struct HeaderBlockTracker {
    frames: ClientFrames,
    header_block: HeaderBlock,
}

#[derive(Debug, Default)]
struct HeaderBlock {
    /// Whether a block has begun and not ended.
    is_open: bool,
    /// Whether this frame is the last one of the block.
    is_last_frame: bool,
}

impl HeaderBlockTracker {
    /// Processes the next bytes. Returns `Some(true)` if a block begins in them and does not end. Returns `Some(false)` if a
    /// block ends in them and no other one is open.
    pub(super) fn track(&mut self, bytes: &[u8]) -> Option<bool> {
        let mut changed = None;
        self.frames.parse(bytes, |part| {
            let change = match part {
                FrameEvent::Header(head) => self.header_block.begin_frame(head),
                FrameEvent::Payload {
                    remaining: left, ..
                } => self.header_block.payload_read(left),
            };
            changed = change.or(changed);
        });
        changed
    }
}

impl HeaderBlockTracker {
    /// Whether the connection uses HTTP/2, as far as is known.
    pub(super) fn is_http2(&self) -> bool {
        self.frames.is_http2()
    }

    /// Whether the connection uses another protocol than HTTP/2, as far as is known.
    pub(super) fn is_other_protocol(&self) -> bool {
        self.frames.is_not_http2()
    }
}

impl HeaderBlock {
    /// Processes the begin of a frame. Returns `Some(true)` if a block begins with it.
    fn begin_frame(&mut self, head: FrameHeader) -> Option<bool> {
        if !matches!(head.kind, HEADERS | CONTINUATION) {
            return None;
        }
        self.is_last_frame = head.flags & END_HEADERS != 0;
        let is_start = !std::mem::replace(&mut self.is_open, true);
        is_start.then_some(true)
    }

    /// Processes a part of a frame, of which `left` bytes remain. Returns `Some(false)` if a block ends with it.
    fn payload_read(&mut self, left: u32) -> Option<bool> {
        let is_end = left == 0 && self.is_open && self.is_last_frame;
        self.is_open &= !is_end;
        is_end.then_some(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_tunnel::frame_parser::PREFACE;

    fn frame(kind: u8, flags: u8, length: u8) -> Vec<u8> {
        let mut bytes = vec![0, 0, length, kind, flags, 0, 0, 0, 1];
        bytes.extend(vec![0xff; usize::from(length)]);
        bytes
    }

    #[test]
    fn a_header_list_is_open_until_its_last_frame_for_every_split() {
        let mut bytes = PREFACE.to_vec();
        let mut opened = Vec::new();
        for (kind, flags, length, open) in [
            (4, 0, 6, false),
            (HEADERS, 0, 3, true),
            (CONTINUATION, 0, 0, true),
            (CONTINUATION, END_HEADERS, 2, false),
            (0, END_HEADERS, 5, false),
            (HEADERS, END_HEADERS, 0, false),
            (HEADERS, END_HEADERS | 1, 7, false),
            (HEADERS, 0, 1, true),
        ] {
            bytes.extend(frame(kind, flags, length));
            opened.push((bytes.len(), open));
        }
        for cut in 1..=bytes.len() {
            let (mut blocks, mut open, mut at) = (HeaderBlockTracker::default(), false, 0);
            for part in bytes.chunks(cut) {
                open = blocks.track(part).unwrap_or(open);
                at += part.len();
                assert_eq!(open, blocks.header_block.is_open, "cut to {cut}, at {at}");
                let known = opened.iter().find(|(end, _)| *end == at);
                assert!(known.is_none_or(|(_, known)| *known == open), "{cut} {at}");
            }
            assert!(open, "{cut}");
        }
    }

    #[test]
    fn non_http2_bytes_are_not_inspected() {
        let mut blocks = HeaderBlockTracker::default();
        for _ in 0..3 {
            let mut text = b"PRINT / HTTP/1.1\r\n".to_vec();
            text.extend(frame(HEADERS, 0, 3));
            assert_eq!(blocks.track(&text), None);
        }
        assert!(!blocks.header_block.is_open);
    }
}
