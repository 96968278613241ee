//! Configuration of connections: the options of both roles.

use super::{config::Config, flow::MAX_WINDOW};
use std::marker::PhantomData;

/// Role of the end that opens streams.
#[derive(Clone, Copy, Debug)]
pub struct ClientRole;

/// Role of the end that accepts streams.
#[derive(Clone, Copy, Debug)]
pub struct ServerRole;

/// Configuration of a connection, for one of the roles.
#[derive(Clone, Debug)]
pub struct Builder<R> {
    pub(super) config: Config,
    role: PhantomData<R>,
}

impl<R> Builder<R> {
    pub(super) fn with_config(config: Config) -> Self {
        Self {
            config,
            role: PhantomData,
        }
    }

    /// Sets the window of each stream, in bytes.
    pub fn initial_window_size(&mut self, size: u32) -> &mut Self {
        self.config.settings.initial_window_size = Some(size.min(MAX_WINDOW));
        self
    }

    /// Sets the window of the connection, in bytes.
    pub fn initial_connection_window_size(&mut self, size: u32) -> &mut Self {
        self.config.connection_window = size.min(MAX_WINDOW);
        self
    }

    /// Sets the largest frame that is accepted, in bytes.
    pub fn max_frame_size(&mut self, size: u32) -> &mut Self {
        self.config.settings.max_frame_size = Some(size.clamp(1 << 14, (1 << 24) - 1));
        self
    }

    /// Sets the largest header list that is accepted, in bytes.
    pub fn max_header_list_size(&mut self, size: u32) -> &mut Self {
        self.config.settings.max_header_list_size = Some(size);
        self
    }

    /// Sets the number of streams reset by this end whose late frames are ignored.
    pub fn max_concurrent_reset_streams(&mut self, max: usize) -> &mut Self {
        self.config.max_remembered_resets = max;
        self
    }

    /// Sets the number of streams that the peer may reset before they are accepted.
    pub fn max_pending_accept_reset_streams(&mut self, max: usize) -> &mut Self {
        self.config.max_unaccepted_resets = max;
        self
    }

    /// Sets the number of streams that the peer may make this end reset.
    pub fn max_local_error_reset_streams(&mut self, max: Option<usize>) -> &mut Self {
        self.config.max_error_resets = max;
        self
    }

    /// Limits the frames of the peer that carry no part of a body. A peer that floods this end with them loses the connection.
    pub fn limit_control_frames(&mut self) -> &mut Self {
        self.config.limits_frames = true;
        self
    }
}
