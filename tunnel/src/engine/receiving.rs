//! The peer's byte stream between two calls: parts of frames and of header blocks.

use super::{frame::PREFACE, streams::Key};
use bytes::BytesMut;

/// State of the peer's byte stream between two calls.
#[derive(Debug)]
pub(super) struct Receiving {
    /// Bytes of the preface that are still to come.
    pub(super) preface_left: usize,
    pub(super) has_settings: bool,
    pub(super) data: Option<Data>,
    pub(super) block: Option<Block>,
    pub(super) empty_frames: usize,
    /// Number of frames since the task of the connection has reset it.
    pub(super) frames: usize,
    /// Kind of the last frame, or of those that flooded this end.
    pub(super) last_kind: u8,
}

impl Receiving {
    pub(super) fn new(is_server: bool) -> Self {
        Self {
            preface_left: if is_server { PREFACE.len() } else { 0 },
            has_settings: false,
            data: None,
            block: None,
            empty_frames: 0,
            frames: 0,
            last_kind: 0,
        }
    }

    /// Whether the peer's preface has arrived, as far as it is not a frame.
    pub(super) fn has_preface(&self) -> bool {
        self.preface_left == 0
    }

    /// Whether the last frame is incomplete.
    pub(super) fn is_inside_frame(&self) -> bool {
        self.data.is_some() || self.block.is_some()
    }
}

/// DATA frame of which parts are still to come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Data {
    /// Stream whose reader gets the payload; otherwise it is discarded.
    pub(super) stream: Option<Key>,
    pub(super) payload: usize,
    pub(super) padding: usize,
    pub(super) end_stream: bool,
}

/// Header block that CONTINUATION frames complete.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) stream: u32,
    pub(super) end_stream: bool,
    pub(super) bytes: BytesMut,
    pub(super) frames: usize,
}
