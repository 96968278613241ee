//! Parser of HTTP/2 frames as they pass below h2 (RFC 9113 §4.1), for code that needs facts that h2 does not expose.

/// Connection preface that a client sends before its first frame (RFC 9113 §3.4).
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Kinds of frames (RFC 9113 §6).
pub const DATA: u8 = 0;
/// See [`DATA`].
pub const HEADERS: u8 = 1;
/// See [`DATA`].
pub const PRIORITY: u8 = 2;
/// See [`DATA`].
pub const RST_STREAM: u8 = 3;
/// See [`DATA`].
pub const SETTINGS: u8 = 4;
/// See [`DATA`].
pub const PING: u8 = 6;
/// See [`DATA`].
pub const GOAWAY: u8 = 7;
/// See [`DATA`].
pub const WINDOW_UPDATE: u8 = 8;
/// See [`DATA`].
pub const CONTINUATION: u8 = 9;

/// A flag of DATA and HEADERS.
pub const END_STREAM: u8 = 1;
/// A flag of SETTINGS and PING.
pub const ACK: u8 = 1;
/// A flag of HEADERS and CONTINUATION.
pub const END_HEADERS: u8 = 4;

/// Length, kind, flags, stream.
const FRAME_HEADER_LEN: usize = 9;

/// Header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// [`DATA`] and so on.
    pub kind: u8,
    /// [`END_STREAM`] and so on, by kind.
    pub flags: u8,
    /// Length of the payload, in bytes.
    pub length: u32,
    /// Identifier of the stream; 0 is the connection.
    pub stream: u32,
}

/// Next part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameEvent<'a> {
    /// A frame begins.
    Header(FrameHeader),
    /// A part of the frame's payload. A frame without a payload has one empty part.
    Payload {
        /// Bytes of this part.
        bytes: &'a [u8],
        /// Number of payload bytes that follow.
        remaining: u32,
    },
}

/// Parser state of one direction of a connection.
#[derive(Clone, Debug, Default)]
pub struct FrameParser {
    head_buf: [u8; FRAME_HEADER_LEN],
    head_len: usize,
    /// Payload bytes of the present frame that have not come yet.
    remaining: u32,
}

impl FrameParser {
    /// Creates a parser for the bytes of a client: it begins with the preface, which is reported as payload.
    pub fn for_client() -> Self {
        Self {
            remaining: u32::try_from(PREFACE.len()).unwrap_or(0),
            ..Self::default()
        }
    }

    /// Whether the last frame is complete and the next one has not begun.
    pub fn is_at_frame_boundary(&self) -> bool {
        self.head_len == 0 && self.remaining == 0
    }

    /// Parses the next bytes, in parts of any size, and calls `on_event` for each part of a frame.
    pub fn parse<'a>(&mut self, mut bytes: &'a [u8], mut on_event: impl FnMut(FrameEvent<'a>)) {
        while !bytes.is_empty() {
            let needed = match self.remaining {
                0 => FRAME_HEADER_LEN - self.head_len,
                left => usize::try_from(left).unwrap_or(usize::MAX),
            };
            let (part, rest) = bytes.split_at(needed.min(bytes.len()));
            bytes = rest;
            if self.remaining > 0 {
                self.remaining -= u32::try_from(part.len()).unwrap_or(self.remaining);
                on_event(FrameEvent::Payload {
                    bytes: part,
                    remaining: self.remaining,
                });
            } else if let Some(head) = self.parse_header(part) {
                on_event(FrameEvent::Header(head));
                if head.length == 0 {
                    on_event(FrameEvent::Payload {
                        bytes: &[],
                        remaining: 0,
                    });
                }
            }
        }
    }

    /// Parses a part of a frame header. Returns the header once it is complete.
    fn parse_header(&mut self, part: &[u8]) -> Option<FrameHeader> {
        self.head_buf[self.head_len..self.head_len + part.len()].copy_from_slice(part);
        self.head_len += part.len();
        if self.head_len < FRAME_HEADER_LEN {
            return None;
        }
        let [high, middle, low, kind, flags, stream @ ..] = self.head_buf;
        self.head_len = 0;
        self.remaining = u32::from_be_bytes([0, high, middle, low]);
        Some(FrameHeader {
            kind,
            flags,
            length: self.remaining,
            // The first bit is reserved.
            stream: u32::from_be_bytes(stream) & (u32::MAX >> 1),
        })
    }
}

/// Parser of the frames that a client sends. A connection that does not begin with the HTTP/2 preface has no frames.
#[derive(Debug)]
pub struct ClientFrames {
    /// Number of preface bytes that have arrived, or `None` if other bytes arrived.
    preface_len: Option<usize>,
    frames: FrameParser,
}

impl Default for ClientFrames {
    fn default() -> Self {
        Self {
            preface_len: Some(0),
            frames: FrameParser::default(),
        }
    }
}

impl ClientFrames {
    /// Whether the whole preface has arrived.
    pub fn is_http2(&self) -> bool {
        self.preface_len == Some(PREFACE.len())
    }

    /// Whether other bytes than the preface have arrived.
    pub fn is_not_http2(&self) -> bool {
        self.preface_len.is_none()
    }

    /// Parses the next bytes, in parts of any size, and calls `on_event` for each part of a frame.
    pub fn parse<'a>(&mut self, bytes: &'a [u8], on_event: impl FnMut(FrameEvent<'a>)) {
        let Some(received) = self.preface_len else {
            return;
        };
        let (preface_part, rest) = bytes.split_at(bytes.len().min(PREFACE.len() - received));
        let matches_preface =
            PREFACE.get(received..received + preface_part.len()) == Some(preface_part);
        self.preface_len = matches_preface.then_some(received + preface_part.len());
        if matches_preface {
            self.frames.parse(rest, on_event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_found_however_the_bytes_are_cut() {
        let mut bytes = PREFACE.to_vec();
        let sent = [
            (HEADERS, END_HEADERS, 3_u8),
            (DATA, 0, 0),
            (RST_STREAM, 0, 4),
        ];
        for (kind, flags, length) in sent {
            bytes.extend([0, 0, length, kind, flags, 0x80, 0, 1, 2]);
            bytes.extend(vec![kind; usize::from(length)]);
        }
        let heads = sent.map(|(kind, flags, length)| FrameHeader {
            kind,
            flags,
            length: length.into(),
            stream: 258,
        });
        for cut in 1..=bytes.len() {
            let mut frames = FrameParser::for_client();
            let (mut seen, mut payload, mut ends) = (Vec::new(), Vec::new(), 0);
            for part in bytes.chunks(cut) {
                frames.parse(part, |part| match part {
                    FrameEvent::Header(head) => seen.push(head),
                    FrameEvent::Payload {
                        bytes,
                        remaining: left,
                    } => {
                        payload.extend_from_slice(bytes);
                        ends += usize::from(left == 0);
                    }
                });
            }
            assert_eq!(seen, heads, "{cut}");
            let whole = [PREFACE, &[HEADERS; 3], &[RST_STREAM; 4]].concat();
            assert_eq!((payload, ends), (whole, 4), "{cut}");
        }
    }
}
