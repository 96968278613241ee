//! Flow-control windows (RFC 9113 sections 5.2 and 6.9).

/// Largest window (RFC 9113 section 6.9.1).
pub(super) const MAX_WINDOW: u32 = (1 << 31) - 1;
/// Window of connections and streams before any SETTINGS (RFC 9113 section 6.9.2).
pub(super) const DEFAULT_WINDOW: u32 = 65_535;
/// Window of a new stream over a far link, in bytes.
const FAR_WINDOW: u32 = 256 << 10;
/// Number of bytes. Once its reader has taken as many, a stream gets the largest window. A client that reads nothing takes less:
/// its connection's buffers are full before, in both kernels (400 KiB), TLS and HTTP.
const BULK_BODY: u32 = 768 << 10;

/// Window of the peer: bytes that this end may send.
#[derive(Clone, Copy, Debug)]
pub(super) struct SendWindow(i64);

impl SendWindow {
    pub(super) fn new(size: u32) -> Self {
        Self(i64::from(size))
    }

    /// Returns the bytes that may be sent. The window may be negative after SETTINGS (RFC 9113 section 6.9.2).
    pub(super) fn size(self) -> usize {
        usize::try_from(self.0).unwrap_or(0)
    }

    /// Takes bytes that are sent.
    pub(super) fn take(&mut self, bytes: usize) {
        self.0 -= signed(bytes);
    }

    /// Changes the window by a `WINDOW_UPDATE` or by SETTINGS. Returns `false` if it exceeds the maximum.
    #[must_use]
    pub(super) fn change(&mut self, by: i64) -> bool {
        self.0 += by;
        self.0 <= i64::from(MAX_WINDOW)
    }
}

/// Window of this end: bytes that the peer may send.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecvWindow {
    /// Size once all bytes that have arrived are released and announced.
    target: i64,
    /// Bytes that the peer may send as far as it knows. Negative after SETTINGS that lowered the window.
    size: i64,
    /// Bytes that were released and not announced. Negative while a smaller target is not reached.
    released: i64,
}

impl RecvWindow {
    pub(super) fn new(size: u32) -> Self {
        let size = i64::from(size);
        Self {
            target: size,
            size,
            released: 0,
        }
    }

    /// Takes bytes that have arrived. Returns `false` if the peer exceeds the window.
    #[must_use]
    pub(super) fn take(&mut self, bytes: usize) -> bool {
        self.size -= signed(bytes);
        self.size >= 0 || bytes == 0
    }

    /// Returns the bytes that the peer may send as far as it knows.
    pub(super) fn left(self) -> usize {
        usize::try_from(self.size).unwrap_or(0)
    }

    /// Releases bytes, which a `WINDOW_UPDATE` may announce.
    pub(super) fn release(&mut self, bytes: usize) {
        self.released += signed(bytes);
    }

    /// Changes the window by SETTINGS that the peer has acknowledged.
    pub(super) fn change(&mut self, by: i64) {
        self.target += by;
        self.size += by;
    }

    /// Changes the size that the window is to have. The peer learns of more by the next `WINDOW_UPDATE`. What it may already
    /// send stays, so a smaller size is reached by releases that are not announced.
    pub(super) fn resize(&mut self, target: u32) {
        let target = i64::from(target);
        self.released += target - self.target;
        self.target = target;
    }

    /// Returns the bytes that the peer may send once all released ones are announced.
    #[cfg(test)]
    pub(super) fn total(self) -> i64 {
        self.size + self.released
    }

    /// Whether a `WINDOW_UPDATE` is due: half of the window was released, or more than the peer may still send. The latter counts
    /// from an eighth on, so that a slow reader causes no flood of tiny frames.
    pub(super) fn is_due(self) -> bool {
        self.released > 0
            && (self.released * 2 >= self.target
                || (self.size < self.released && self.released * 8 >= self.target))
    }

    /// Announces the released bytes, of which there are some. Returns their number.
    pub(super) fn announce(&mut self) -> u32 {
        debug_assert!(self.released > 0);
        let released = u32::try_from(self.released).unwrap_or(0);
        self.size += i64::from(released);
        self.released -= i64::from(released);
        released
    }
}

/// Limits for the windows of streams towards an end. A stream gets the largest window once its reader has taken many bytes, so that
/// a stream whose reader never reads holds little.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowLimits {
    /// Largest window, in bytes. If it is less than the initial window, that applies.
    pub max: u32,
    /// Whether a stream begins with up to 256 KiB, because a round trip costs more than a `WINDOW_UPDATE`.
    pub is_far: bool,
}

/// Sizes of the windows of streams.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamWindows {
    /// Window by SETTINGS.
    pub(super) initial: u32,
    pub(super) limits: WindowLimits,
}

impl StreamWindows {
    /// Returns the window of a stream whose reader has taken this many bytes.
    pub(super) fn after(self, taken: u32) -> u32 {
        let step = match taken {
            BULK_BODY.. => MAX_WINDOW,
            _ if self.limits.is_far => FAR_WINDOW,
            _ => self.initial,
        };
        step.min(self.limits.max).max(self.initial)
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_is_due_after_half_of_the_window_or_when_the_peer_has_less_left() {
        let mut window = RecvWindow::new(1000);
        assert!(window.take(600));
        window.release(300);
        assert!(!window.is_due());
        window.release(200);
        assert!(window.is_due());
        assert_eq!(window.announce(), 500);
        assert!(window.take(900));
        assert!(!window.take(1));
        let mut nearly_full = RecvWindow::new(1000);
        assert!(nearly_full.take(1000));
        nearly_full.release(10);
        assert!(!nearly_full.is_due(), "tiny updates cause tiny frames");
        nearly_full.release(115);
        assert!(nearly_full.is_due());
    }

    #[test]
    fn smaller_settings_make_earlier_releases_due() {
        let mut window = RecvWindow::new(1000);
        assert!(window.take(400));
        window.release(400);
        assert!(!window.is_due());
        window.change(-900);
        assert!(window.is_due());
        assert_eq!(window.announce(), 400);
    }

    #[test]
    fn a_resized_window_grows_by_the_next_update_and_shrinks_by_withheld_ones() {
        let mut window = RecvWindow::new(1000);
        assert!(window.take(500));
        window.release(500);
        window.resize(4000);
        assert!(window.is_due());
        assert_eq!((window.announce(), window.total()), (3500, 4000));

        window.resize(1000);
        assert!(window.take(3000));
        window.release(2900);
        assert!(!window.is_due(), "the peer may still send 1,000 bytes");
        assert!(window.take(1000));
        window.release(1100);
        assert!(window.is_due());
        assert_eq!((window.announce(), window.total()), (1000, 1000));
    }

    #[test]
    fn the_window_of_a_stream_follows_what_its_reader_takes() {
        let window = |max, is_far, taken| {
            let limits = WindowLimits { max, is_far };
            let initial = DEFAULT_WINDOW;
            StreamWindows { initial, limits }.after(taken)
        };
        for taken in [0, (768 << 10) - 1] {
            assert_eq!(window(4 << 20, false, taken), DEFAULT_WINDOW);
            assert_eq!(window(4 << 20, true, taken), 256 << 10);
            assert_eq!(window(100_000, true, taken), 100_000);
        }
        for is_far in [false, true] {
            assert_eq!(window(4 << 20, is_far, 768 << 10), 4 << 20);
            assert_eq!(window(0, is_far, u32::MAX), DEFAULT_WINDOW, "never less");
        }
    }

    #[test]
    fn a_send_window_may_be_negative_and_has_a_maximum() {
        let mut window = SendWindow::new(10);
        window.take(10);
        assert!(window.change(-5));
        assert_eq!(window.size(), 0);
        assert!(window.change(6));
        assert_eq!(window.size(), 1);
        assert!(!window.change(i64::from(MAX_WINDOW)));
    }
}
