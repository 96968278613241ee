//! Flow-control windows (RFC 9113 sections 5.2 and 6.9).

/// Largest window (RFC 9113 section 6.9.1).
pub(super) const MAX_WINDOW: u32 = (1 << 31) - 1;
/// Window of connections and streams before any SETTINGS (RFC 9113 section 6.9.2).
pub(super) const DEFAULT_WINDOW: u32 = 65_535;

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
    /// Bytes that the peer may send as far as it knows. Negative after SETTINGS that lowered the window.
    size: i64,
    /// Bytes that were released and not announced.
    released: i64,
}

impl RecvWindow {
    pub(super) fn new(size: u32) -> Self {
        Self {
            size: i64::from(size),
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
        self.size += by;
    }

    /// Returns the bytes that the peer may send once all released ones are announced.
    #[cfg(test)]
    pub(super) fn total(self) -> i64 {
        self.size + self.released
    }

    /// Whether a `WINDOW_UPDATE` is due for a window of `target` bytes: half of it was released, or more than the peer may still
    /// send. The latter counts from an eighth on, so that a slow reader causes no flood of tiny frames.
    pub(super) fn is_due(self, target: u32) -> bool {
        let target = i64::from(target);
        self.released > 0
            && (self.released * 2 >= target
                || (self.size < self.released && self.released * 8 >= target))
    }

    /// Announces the released bytes. Returns their number.
    pub(super) fn announce(&mut self) -> u32 {
        let released = std::mem::take(&mut self.released);
        self.size += released;
        u32::try_from(released).unwrap_or(MAX_WINDOW)
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
        assert!(!window.is_due(1000));
        window.release(200);
        assert!(window.is_due(1000));
        assert_eq!(window.announce(), 500);
        assert!(window.take(900));
        assert!(!window.take(1));
        let mut nearly_full = RecvWindow::new(1000);
        assert!(nearly_full.take(1000));
        nearly_full.release(10);
        assert!(!nearly_full.is_due(1000), "tiny updates cause tiny frames");
        nearly_full.release(115);
        assert!(nearly_full.is_due(1000));
    }

    #[test]
    fn a_smaller_window_makes_earlier_releases_due() {
        let mut window = RecvWindow::new(1000);
        assert!(window.take(400));
        window.release(400);
        assert!(!window.is_due(1000));
        window.change(-900);
        assert!(window.is_due(100));
        assert_eq!(window.announce(), 400);
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
