//! The frame reader of the crate h2, with which the engine's parsers are compared.

use super::transport::Transport;
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use h2::{Codec, frame::Frame, proto::Error};

/// Reader of frames, with the state of header compression.
pub struct H2Reader {
    codec: Codec<Transport, Bytes>,
    transport: Transport,
}

impl Default for H2Reader {
    fn default() -> Self {
        let transport = Transport::default();
        Self {
            codec: Codec::new(transport.clone()),
            transport,
        }
    }
}

impl H2Reader {
    /// Changes `SETTINGS_HEADER_TABLE_SIZE`, which the sender of the frames has acknowledged.
    pub fn set_table_size(&mut self, size: usize) {
        self.codec.set_recv_header_table_size(size);
    }

    /// Reads one frame. `None` if it is no complete frame of a known type.
    pub fn read(&mut self, frame: &[u8]) -> Option<Result<Frame, Error>> {
        self.transport.0.borrow_mut().input.extend_from_slice(frame);
        self.codec.next().now_or_never().flatten()
    }
}
