//! Refusal of an HTTP/2 connection by its server, with a reason for people.
//!
//! A client that is refused by a plain close cannot tell a refusal from a lost connection. h2 sends no debug data of its caller in
//! a GOAWAY, so both frames are written here.

use causeway_rt::lingering_close;
use std::time::Duration;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

/// Empty SETTINGS frame, which begins the connection of each server (RFC 9113 §3.4).
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
/// Type of a GOAWAY frame (RFC 9113 §6.8).
const GOAWAY: u8 = 7;
/// Error code `REFUSED_STREAM` (RFC 9113 §7): no stream of the connection was processed.
const REFUSED_STREAM: u8 = 7;
/// Maximum number of bytes of the reason.
const MAX_REASON_BYTES: usize = 1024;
/// Maximum time to write both frames, which are shorter than any send buffer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Refuses a connection whose TLS is done, and closes it once its client has read the `reason`.
pub async fn refuse<S: AsyncRead + AsyncWrite + Unpin>(mut io: S, reason: &str) {
    let writing = async {
        io.write_all(&refusal_frames(reason)).await?;
        io.flush().await
    };
    // The client is gone if this fails.
    if let Ok(Ok(())) = timeout(WRITE_TIMEOUT, writing).await {
        lingering_close::close(io).await;
    }
}

fn refusal_frames(reason: &str) -> Vec<u8> {
    let mut end = reason.len().min(MAX_REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let reason = reason.get(..end).unwrap_or_default().as_bytes();
    // The last stream and the error code come before the reason.
    let [.., high, low] = (8 + reason.len()).to_be_bytes();
    let mut frames = SETTINGS.to_vec();
    frames.extend([0, high, low, GOAWAY, 0, 0, 0, 0, 0]);
    frames.extend([0, 0, 0, 0, 0, 0, 0, REFUSED_STREAM]);
    frames.extend(reason);
    frames
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway_side::{self, GatewaySideConfig};
    use std::sync::Arc;
    use tokio::io::duplex;

    #[tokio::test]
    async fn a_refused_client_receives_the_reason() {
        for reason in ["the node edge-1 is revoked".to_owned(), "é".repeat(2000)] {
            let (near, far) = duplex(64 << 10);
            let client = async {
                let (_tunnel, driver) =
                    gateway_side::connect(far, Arc::default(), GatewaySideConfig::default())
                        .await
                        .unwrap();
                driver.run().await.to_string()
            };
            let (end, ()) = tokio::join!(client, refuse(near, &reason));
            assert!(end.contains("refused stream"), "{end}");
            if reason.is_ascii() {
                assert!(end.contains(&reason), "{end}");
            }
        }
    }
}
