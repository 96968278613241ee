//! Configuration of a connection.

use super::{flow::DEFAULT_WINDOW, frame::Settings};

/// Configuration of a connection.
#[derive(Clone, Debug)]
pub(super) struct Config {
    pub(super) is_server: bool,
    pub(super) settings: Settings,
    pub(super) connection_window: u32,
    /// Number of streams that may be opened before the peer's SETTINGS.
    pub(super) initial_max_streams: usize,
    /// Number of streams reset by this end whose late frames are ignored. Frames of earlier ones are answered by a reset.
    pub(super) max_remembered_resets: usize,
    /// Number of streams that the peer may have reset before the user got them (CVE-2023-44487).
    pub(super) max_unaccepted_resets: usize,
    /// Number of streams that the peer may make this end reset (CVE-2025-8671).
    pub(super) max_error_resets: Option<usize>,
    /// Whether the peer's frames without data are limited.
    pub(super) limits_frames: bool,
}

impl Config {
    pub(super) fn new(is_server: bool) -> Self {
        Self {
            is_server,
            settings: Settings::default(),
            connection_window: DEFAULT_WINDOW,
            initial_max_streams: 100,
            max_remembered_resets: 50,
            max_unaccepted_resets: 20,
            max_error_resets: Some(1024),
            limits_frames: false,
        }
    }
}
