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
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take},
    time::{Instant, Sleep, sleep},
};

/// Connection whose bytes in both directions count against the limit of its node.
///
/// It moves a chunk, and then waits until the rate has paid for all bytes of the node up to its own. So the connections of a node take
/// turns. A new connection waits for all bytes that moved before it was opened.
pub(super) struct LimitedIo<F> {
    /// The limit of `Take` is set before each read.
    inner: Take<F>,
    usage: Arc<NodeEgress>,
    rules: EgressRules,
    /// Bytes of the node for which this connection waits.
    moved: u64,
    pause: Option<Pin<Box<Sleep>>>,
}

impl<F: AsyncRead> LimitedIo<F> {
    pub(super) fn new(inner: F, usage: Arc<NodeEgress>, rules: EgressRules) -> Self {
        Self {
            inner: inner.take(0),
            moved: usage.moved(),
            usage,
            rules,
            pause: None,
        }
    }

    /// Waits until bytes may move. Returns their maximum number.
    fn poll_allowed(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            let rate = self.rules.bytes_per_second();
            if rate == 0 {
                return Poll::Ready(usize::MAX);
            }
            match self.usage.pause(self.moved, rate, Instant::now()) {
                None => return Poll::Ready(self.usage.chunk_size(rate)),
                Some(time) => self.pause = Some(Box::pin(sleep(time))),
            }
        }
    }

    fn count(&mut self, bytes: usize) {
        let rate = self.rules.bytes_per_second();
        if rate > 0 && bytes > 0 {
            self.moved = self.usage.count(bytes, rate, Instant::now());
        }
    }
}

impl<F: AsyncRead + ResetOnClose> ResetOnClose for LimitedIo<F> {
    fn abort(&self) {
        self.inner.get_ref().abort();
    }
}

impl<F: AsyncRead + Unpin> AsyncRead for LimitedIo<F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let max = ready!(self.poll_allowed(cx));
        self.inner.set_limit(u64::try_from(max).unwrap_or(u64::MAX));
        let filled_before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        self.count(buf.filled().len() - filled_before);
        Poll::Ready(Ok(()))
    }
}

impl<F: AsyncRead + AsyncWrite + Unpin> AsyncWrite for LimitedIo<F> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let max = ready!(self.poll_allowed(cx));
        let chunk = &buf[..buf.len().min(max)];
        let written = ready!(Pin::new(self.inner.get_mut()).poll_write(cx, chunk))?;
        self.count(written);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.inner.get_mut()).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.inner.get_mut()).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Egress, EgressLimits};
    use futures_util::future::join_all;
    use std::{sync::atomic::Ordering::Relaxed, time::Duration};
    use tokio::io::{AsyncWriteExt, DuplexStream, duplex};

    const RATE: usize = 1_000_000;

    fn with_rate(bytes_per_second: usize) -> Egress {
        Egress {
            limits: EgressLimits {
                bytes_per_second,
                ..EgressLimits::default()
            },
            ..Egress::default()
        }
    }

    /// Opens a connection of the node, with its other end.
    fn open(
        usage: &Arc<NodeEgress>,
        rules: &EgressRules,
    ) -> (LimitedIo<DuplexStream>, DuplexStream) {
        let (near, far) = duplex(1 << 20);
        (LimitedIo::new(near, usage.clone(), rules.clone()), far)
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_connection_for_each_chunk_moves_no_more_bytes() {
        let (usage, rules) = (Arc::default(), EgressRules::new(Some(&with_rate(RATE))));
        let (began, mut moved) = (Instant::now(), 0);
        while began.elapsed() < Duration::from_secs(10) {
            let (mut io, _far) = open(&usage, &rules);
            moved += io.write(&vec![0; 1 << 20]).await.unwrap();
        }
        assert!((10 * RATE..11 * RATE).contains(&moved), "{moved}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_small_message_waits_shortly_for_many_busy_connections() {
        let (usage, rules) = (
            Arc::<NodeEgress>::default(),
            EgressRules::new(Some(&with_rate(RATE))),
        );
        let count = 200;
        usage.streams.store(count, Relaxed);
        let busy = async || {
            let (mut io, mut far) = open(&usage, &rules);
            let mut sink = tokio::io::sink();
            let reading = tokio::io::copy(&mut far, &mut sink);
            let writing = async { io.write_all(&vec![0; 100_000]).await };
            tokio::select! { _ = reading => {}, _ = writing => {} }
        };
        let message = async {
            let (mut io, _far) = open(&usage, &rules);
            sleep(Duration::from_secs(5)).await;
            let begin = Instant::now();
            for _ in 0..5 {
                io.write_all(&[0; 100]).await.unwrap();
            }
            begin.elapsed()
        };
        let (elapsed, _) = tokio::join!(message, join_all((0..count).map(|_| busy())));
        assert!(elapsed < Duration::from_secs(5), "{elapsed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_connection_continues_soon_after_a_reload_without_a_limit() {
        let (usage, rules) = (Arc::default(), EgressRules::new(Some(&with_rate(10_000))));
        let (mut io, mut far) = open(&usage, &rules);
        far.write_all(&vec![0; 1 << 20]).await.unwrap();
        let begin = Instant::now();
        let mut whole = vec![0; 1 << 20];
        let reload = async {
            sleep(Duration::from_secs(10)).await;
            rules.replace(None);
        };
        let (read, ()) = tokio::join!(io.read_exact(&mut whole), reload);
        read.unwrap();
        assert!(begin.elapsed() <= Duration::from_secs(11));
    }

    #[tokio::test(start_paused = true)]
    async fn one_chunk_is_a_share_of_the_burst_in_each_direction() {
        let (usage, rules) = (Arc::default(), EgressRules::new(Some(&with_rate(RATE))));
        let (mut io, mut far) = open(&usage, &rules);
        far.write_all(&vec![0; 1 << 20]).await.unwrap();
        assert_eq!(io.read(&mut vec![0; 1 << 20]).await.unwrap(), RATE / 4);
        assert_eq!(io.write(&vec![0; 1 << 20]).await.unwrap(), RATE / 4);
        far.read_exact(&mut vec![0; RATE / 4]).await.unwrap();
        drop(far);
        let mut rest = Vec::new();
        io.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest.len(), (1 << 20) - RATE / 4, "the end is no limit");
    }
}
