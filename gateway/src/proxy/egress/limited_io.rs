//! Connection that keeps to the limit of bytes per second of its node.

use crate::state::{EgressRules, egress::NodeEgress};
use causeway_rt::socket::ResetOnClose;
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

/// Connection whose bytes in both directions count against the limit of its node.
pub(super) struct LimitedIo<F> {
    inner: F,
    usage: Arc<NodeEgress>,
    rules: EgressRules,
    /// Wait after bytes beyond the limit.
    pause: Option<Pin<Box<Sleep>>>,
}

impl<F> LimitedIo<F> {
    pub(super) fn new(inner: F, usage: Arc<NodeEgress>, rules: EgressRules) -> Self {
        Self {
            inner,
            usage,
            rules,
            pause: None,
        }
    }

    fn poll_allowed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        Poll::Ready(())
    }

    fn count(&mut self, bytes: usize) {
        let rate = self.rules.bytes_per_second();
        let wait_until = self.usage.take_bytes(bytes, rate, Instant::now());
        self.pause = wait_until.map(|time| Box::pin(sleep_until(time)));
    }
}

impl<F: ResetOnClose> ResetOnClose for LimitedIo<F> {
    fn abort(&self) {
        self.inner.abort();
    }
}

impl<F: AsyncRead + Unpin> AsyncRead for LimitedIo<F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_allowed(cx));
        let filled_before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        self.count(buf.filled().len() - filled_before);
        Poll::Ready(Ok(()))
    }
}

impl<F: AsyncWrite + Unpin> AsyncWrite for LimitedIo<F> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_allowed(cx));
        let written = ready!(Pin::new(&mut self.inner).poll_write(cx, buf))?;
        self.count(written);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
