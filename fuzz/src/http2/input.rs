//! Input of the fuzzer as numbers. After its end all numbers are 0.

/// Unread rest of an input.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    /// Returns at most `length` bytes.
    pub fn bytes(&mut self, length: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    pub(super) fn u32(&mut self) -> u32 {
        let bytes = self.bytes(4);
        bytes
            .iter()
            .fold(0, |number, byte| number << 8 | u32::from(*byte))
    }

    /// Returns a length that is often small and at most 56 KiB.
    pub(super) fn length(&mut self) -> usize {
        match self.byte() {
            small @ ..200 => usize::from(small),
            large => usize::from(large - 199) << 10,
        }
    }

    pub fn choose<T: Copy>(&mut self, values: &[T]) -> T {
        values[usize::from(self.byte()) % values.len()]
    }
}
