//! Bare streams: raw bytes, for heads and sessions that no HTTP library may touch.
//!
//! Each wait has a limit; missing bytes fail the test, whose message has the received bytes.

use super::bounded;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// A connection of any kind.
pub(crate) trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// Reads a head from a bare stream, and no byte after it.
pub(crate) async fn read_head(wire: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    let reading = async {
        while !head.ends_with(b"\r\n\r\n") {
            match wire.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(error) => panic!("{error} behind {:?}", String::from_utf8_lossy(&head)),
            }
        }
    };
    bounded(reading).await.expect("a head comes in time");
    String::from_utf8(head).unwrap()
}

/// Sends these bytes on a bare stream and reads the head of the answer.
pub(crate) async fn exchange(wire: &mut (impl Wire + ?Sized), bytes: impl AsRef<[u8]>) -> String {
    let mut wire = wire;
    wire.write_all(bytes.as_ref()).await.unwrap();
    wire.flush().await.unwrap();
    read_head(&mut wire).await
}

/// Reads this many bytes.
pub(crate) async fn read(wire: &mut (impl AsyncRead + Unpin), length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let reading = bounded(wire.read_exact(&mut bytes)).await;
    reading.expect("the bytes come in time").unwrap();
    bytes
}

/// Reads to the end.
pub(crate) async fn read_to_end(wire: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bounded(wire.read_to_end(&mut bytes))
        .await
        .expect("the end comes in time")?;
    Ok(bytes)
}
