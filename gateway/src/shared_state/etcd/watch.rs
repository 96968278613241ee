//! Stream of the changes of a range.

use bytes::BytesMut;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::Instant;

use super::{
    client::MAX_MESSAGE_BYTES,
    messages::{WatchMessage, WatchResponse},
};

/// Stream of the changes of a range, one JSON message in each line.
#[derive(Debug)]
pub(crate) struct Watch {
    /// URL of the member.
    pub(crate) endpoint: String,
    /// Time of the last message, or of the last check that none is missing.
    pub(crate) last_checked: Instant,
    body: Incoming,
    buffer: BytesMut,
    /// Number of bytes in the buffer that are no end of a line.
    scanned: usize,
}

impl Watch {
    pub(crate) fn new(endpoint: String, body: Incoming) -> Self {
        Self {
            endpoint,
            last_checked: Instant::now(),
            body,
            buffer: BytesMut::new(),
            scanned: 0,
        }
    }

    /// Returns the next message. Dropping the future loses nothing.
    ///
    /// # Errors
    /// If the watch has ended.
    pub(crate) async fn next(&mut self) -> Result<WatchResponse, String> {
        loop {
            if let Some(length) = memchr::memchr(b'\n', &self.buffer[self.scanned..]) {
                let line = self.buffer.split_to(self.scanned + length + 1);
                self.scanned = 0;
                self.last_checked = Instant::now();
                return parse(&line);
            }
            self.scanned = self.buffer.len();
            if self.scanned > MAX_MESSAGE_BYTES {
                return Err(format!(
                    "a message is larger than {MAX_MESSAGE_BYTES} bytes"
                ));
            }
            match self.body.frame().await {
                None => return Err("the member closed the connection".to_owned()),
                Some(Err(error)) => return Err(format!("the connection failed: {error}")),
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.buffer.extend_from_slice(data);
                    }
                }
            }
        }
    }
}

fn parse(line: &[u8]) -> Result<WatchResponse, String> {
    let message: WatchMessage = serde_json::from_slice(line)
        .map_err(|error| format!("a message cannot be parsed: {error}"))?;
    if let Some(error) = message.error {
        return Err(error.message);
    }
    let response = message.result.unwrap_or_default();
    if response.compact_revision > 0 {
        return Err(format!(
            "changes before revision {} have been compacted",
            response.compact_revision
        ));
    }
    if response.canceled {
        return Err(format!("etcd canceled it: {}", response.cancel_reason));
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_watch_has_a_reason() {
        for (line, part) in [
            ("{", "cannot be parsed"),
            (r#"{"error":{"message":"no leader"}}"#, "no leader"),
            (
                r#"{"result":{"canceled":true,"compact_revision":"12"}}"#,
                "before revision 12",
            ),
            (
                r#"{"result":{"canceled":true,"cancel_reason":"denied"}}"#,
                "canceled it: denied",
            ),
        ] {
            let reason = parse(line.as_bytes()).unwrap_err();
            assert!(reason.contains(part), "{line}: {reason}");
        }
        assert!(parse(br#"{"result":{"created":true}}"#).is_ok());
    }
}
