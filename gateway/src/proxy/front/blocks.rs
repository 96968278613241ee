//! Where a caller's field lists begin and end, in what it sends over HTTP/2.
//!
//! The engine bounds how large a list is and in how many frames it may come, not how long that takes, and no
//! other frame may come in between (RFC 9113 §6.10). Only the heads of frames are looked at, as they pass
//! between TLS and the engine; what does not begin as HTTP/2 does is not looked at.

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
/// Length, kind, flags, stream.
const HEAD: usize = 9;

/// Where the caller stands between its field lists.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// How much of the preface has come; `None` where something else came.
    preface: Option<usize>,
    seen: bool,
    head: [u8; HEAD],
    have: usize,
    /// Bytes to the next frame.
    skip: usize,
    /// A list has begun.
    open: bool,
    /// This frame is its last.
    last: bool,
}

impl Blocks {
    /// Takes the next bytes. True where a list has begun in them and goes on behind them, false where one has ended
    /// and none goes on.
    pub(super) fn pass(&mut self, mut bytes: &[u8]) -> Option<bool> {
        bytes = self.greeted(bytes)?;
        let mut changed = None;
        while !bytes.is_empty() {
            if self.skip == 0 {
                let part = bytes.len().min(HEAD - self.have);
                let (taken, rest) = bytes.split_at(part);
                self.head[self.have..self.have + part].copy_from_slice(taken);
                self.have += part;
                bytes = rest;
                if self.have < HEAD {
                    break;
                }
                changed = self.begin().or(changed);
            }
            let skipped = bytes.len().min(self.skip);
            self.skip -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            if self.skip == 0 && self.open && self.last {
                self.open = false;
                changed = Some(false);
            }
        }
        changed
    }

    /// What lies behind the preface.
    fn greeted<'a>(&mut self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        if !std::mem::replace(&mut self.seen, true) {
            self.preface = Some(0);
        }
        let have = self.preface?;
        let part = bytes.len().min(PREFACE.len() - have);
        let (taken, rest) = bytes.split_at(part);
        let sound = PREFACE.get(have..have + part) == Some(taken);
        self.preface = sound.then_some(have + part);
        sound.then_some(rest)
    }

    /// A frame's head is complete. True where a list begins with it.
    fn begin(&mut self) -> Option<bool> {
        let [high, middle, low, kind, flags, ..] = self.head;
        self.have = 0;
        let length = u32::from_be_bytes([0, high, middle, low]);
        self.skip = usize::try_from(length).unwrap_or(usize::MAX);
        if !matches!(kind, HEADERS | CONTINUATION) {
            return None;
        }
        self.last = flags & END_HEADERS != 0;
        let begins = !std::mem::replace(&mut self.open, true);
        begins.then_some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, length: u8) -> Vec<u8> {
        let mut bytes = vec![0, 0, length, kind, flags, 0, 0, 0, 1];
        bytes.extend(vec![0xff; usize::from(length)]);
        bytes
    }

    #[test]
    fn a_list_is_open_from_its_first_frame_to_the_end_of_its_last_however_it_is_cut() {
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
            let (mut blocks, mut open, mut at) = (Blocks::default(), false, 0);
            for part in bytes.chunks(cut) {
                open = blocks.pass(part).unwrap_or(open);
                at += part.len();
                assert_eq!(open, blocks.open, "cut to {cut}, at {at}");
                let known = opened.iter().find(|(end, _)| *end == at);
                assert!(known.is_none_or(|(_, known)| *known == open), "{cut} {at}");
            }
            assert!(open, "{cut}");
        }
    }

    #[test]
    fn what_is_not_http2_is_not_looked_at() {
        let mut blocks = Blocks::default();
        for _ in 0..3 {
            let mut text = b"PRINT / HTTP/1.1\r\n".to_vec();
            text.extend(frame(HEADERS, 0, 3));
            assert_eq!(blocks.pass(&text), None);
        }
        assert!(!blocks.open);
    }
}
