//! Lingering close, which leaves the peer time to read the reason.
//!
//! A peer that uses TLS 1.3 has finished its handshake, and sent its first request, before its own certificate is verified. A
//! close with unread bytes is a reset, which overtakes the alert: the peer then reports a broken pipe and not the actual
//! fault. So the alert is followed by a FIN. Bytes that still arrive are discarded until the peer has closed, within a limit
//! of bytes and of time (RFC 9112, section 9.6).

use std::time::Duration;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, sink},
    time::timeout,
};

/// Maximum time to wait for the peer: enough for a response over a bad link, and for one retransmission. A refused peer may
/// hold the connection for this time.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of bytes to discard. It is more than a head, which follows a handshake; a body is not waited for.
const MAX_DISCARDED_BYTES: u64 = 128 * 1024;

/// Ends the writing half, and drops the connection once its peer has closed it, at most after 2 s or 128 KiB.
pub async fn close<S: AsyncRead + AsyncWrite + Unpin>(mut io: S) {
    let linger = async {
        io.shutdown().await?;
        tokio::io::copy(&mut io.take(MAX_DISCARDED_BYTES), &mut sink()).await
    };
    // The connection ends in any case; a closed peer has read what it needs.
    let _ = timeout(LINGER_TIMEOUT, linger).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{io::duplex, time::Instant};

    #[tokio::test(start_paused = true)]
    async fn sent_bytes_are_read_and_late_bytes_break_no_close() {
        let (mut near, mut far) = duplex(64);
        let message = async {
            far.read_u8().await.unwrap();
            // The client sends its whole request before it reads the response.
            far.write_all(&[0; 4096]).await.unwrap();
            let mut rest = Vec::new();
            far.read_to_end(&mut rest).await.unwrap();
            drop(far);
        };
        near.write_u8(1).await.unwrap();
        let begun = Instant::now();
        tokio::join!(close(near), message);
        assert_eq!(
            begun.elapsed(),
            Duration::ZERO,
            "it left, and was waited for"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_neither_reads_nor_leaves_is_awaited_in_bounds() {
        let (near, _silent) = duplex(64);
        let begun = Instant::now();
        close(near).await;
        assert_eq!(begun.elapsed(), LINGER_TIMEOUT);

        let (near, mut far) = duplex(64 * 1024);
        let talks = async {
            let mut sent = 0;
            while far.write_all(&[0; 1024]).await.is_ok() {
                sent += 1024;
            }
            sent
        };
        let ((), sent) = tokio::join!(close(near), talks);
        assert!(
            sent < MAX_DISCARDED_BYTES + 128 * 1024,
            "{sent} bytes were accepted"
        );
        assert_eq!(begun.elapsed(), LINGER_TIMEOUT, "and that took no time");
    }
}
