//! Frames on their way to the transport.

use bytes::{Buf, Bytes, BytesMut};
use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
};
use tokio::io::AsyncWrite;

/// Number of slices of a vectored write.
const MAX_SLICES: usize = 16;
/// Frames to be written: bytes, and large payloads between them.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    pub(super) bytes: BytesMut,
    written: usize,
    /// Large payloads, each with its place in `bytes`.
    large: VecDeque<(usize, Bytes)>,
    large_len: usize,
}

impl Outgoing {
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.written + self.large_len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends frames and empties their buffer.
    pub(super) fn take(&mut self, frames: &mut BytesMut) {
        if self.bytes.is_empty() {
            std::mem::swap(&mut self.bytes, frames);
        } else {
            self.bytes.extend_from_slice(frames);
            frames.clear();
        }
    }

    /// Returns all bytes, in order.
    #[cfg(test)]
    pub(super) fn into_bytes(mut self) -> BytesMut {
        let mut all = BytesMut::new();
        while !self.is_empty() {
            let (slices, count) = self.slices();
            let length: usize = slices[..count].iter().map(|slice| slice.len()).sum();
            slices[..count]
                .iter()
                .for_each(|slice| all.extend_from_slice(slice));
            self.advance(length);
        }
        all
    }

    /// Appends a payload without a copy.
    pub(super) fn put_large(&mut self, payload: Bytes) {
        self.large_len += payload.len();
        self.large.push_back((self.bytes.len(), payload));
    }

    /// Returns the bytes before the next large payload.
    fn small(&self) -> &[u8] {
        let end = self
            .large
            .front()
            .map_or(self.bytes.len(), |(place, _)| *place);
        self.bytes.get(self.written..end).unwrap_or_default()
    }

    fn slices(&self) -> ([IoSlice<'_>; MAX_SLICES], usize) {
        let mut slices = [IoSlice::new(&[]); MAX_SLICES];
        let (mut count, mut start) = (0, self.written);
        let large = self
            .large
            .iter()
            .map(|(place, payload)| (*place, &payload[..]));
        for (place, payload) in large.chain([(self.bytes.len(), &[][..])]) {
            for part in [self.bytes.get(start..place).unwrap_or_default(), payload] {
                if count < MAX_SLICES && !part.is_empty() {
                    slices[count] = IoSlice::new(part);
                    count += 1;
                }
            }
            start = place;
        }
        (slices, count)
    }

    fn advance(&mut self, mut count: usize) {
        while count > 0 {
            let small = self.small().len();
            if small > 0 {
                let part = small.min(count);
                self.written += part;
                count -= part;
            } else if let Some((_, payload)) = self.large.front_mut() {
                let part = payload.len().min(count);
                payload.advance(part);
                (self.large_len, count) = (self.large_len - part, count - part);
                if payload.is_empty() {
                    self.large.pop_front();
                }
            } else {
                break;
            }
        }
        if self.is_empty() {
            self.bytes.clear();
            self.written = 0;
        }
    }

    pub(super) fn poll_write<S>(&mut self, io: &mut S, cx: &mut Context<'_>) -> Poll<io::Result<()>>
    where
        S: AsyncWrite + Unpin,
    {
        while !self.is_empty() {
            let polled = if self.large.is_empty() {
                Pin::new(&mut *io).poll_write(cx, self.small())
            } else if io.is_write_vectored() {
                let (slices, count) = self.slices();
                Pin::new(&mut *io).poll_write_vectored(cx, &slices[..count])
            } else {
                let large = self.large.front().map_or(&[][..], |(_, payload)| payload);
                let small = self.small();
                Pin::new(&mut *io).poll_write(cx, if small.is_empty() { large } else { small })
            };
            match polled {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(count)) => self.advance(count),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_parts_leave_in_order_in_writes_of_any_size() {
        for step in [1, 2, 3, 7, 100] {
            let mut out = Outgoing::default();
            out.bytes.extend_from_slice(b"ab");
            out.put_large(Bytes::from_static(b"CDE"));
            out.put_large(Bytes::from_static(b"F"));
            out.bytes.extend_from_slice(b"gh");
            out.put_large(Bytes::from_static(b"I"));
            out.bytes.extend_from_slice(b"j");
            let mut written = Vec::new();
            while !out.is_empty() {
                let (slices, count) = out.slices();
                let all: Vec<u8> = slices[..count]
                    .iter()
                    .flat_map(|slice| slice.to_vec())
                    .collect();
                assert_eq!(all.len(), out.len());
                let part = step.min(all.len());
                written.extend_from_slice(&all[..part]);
                out.advance(part);
            }
            assert_eq!(written, b"abCDEFghIj");
        }
    }
}
