//! Large transfers in both directions at once, whose hashes must be equal at both ends.
//!
//! With `CAUSEWAY_TEST_FULL=1` each direction has 500 MB.

use super::tool::full;
use sha2::{Digest, Sha256};
use std::{
    io,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

const CHUNK: usize = 64 << 10;

/// Hashes of the bytes that one end has sent and received.
#[derive(Debug)]
struct Transfer {
    sent: io::Result<Vec<u8>>,
    received: io::Result<(usize, Vec<u8>)>,
}

/// Server that sends bytes to its first client, and receives as many.
pub(crate) struct TransferServer {
    pub(crate) address: SocketAddr,
    pub(crate) length: usize,
    serving: JoinSet<Transfer>,
}

impl TransferServer {
    /// Returns a server of 500 MB, or less if long runs are not wanted.
    pub(crate) async fn start() -> Self {
        Self::of(if full() { 500_000_000 } else { 32_000_000 }).await
    }

    /// Returns a server of this many bytes.
    pub(crate) async fn of(length: usize) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let (wire, _) = listener.accept().await.unwrap();
            transfer(wire, length, 1).await
        });
        Self {
            address,
            length,
            serving,
        }
    }

    /// Transfers all bytes over a connection to the server, and asserts that they arrive unchanged at both ends.
    pub(crate) async fn transfer(mut self, wire: TcpStream) {
        let here = transfer(wire, self.length, 2).await;
        let there = self.serving.join_next().await.unwrap().unwrap();
        let (up, down) = (here.sent.unwrap(), there.sent.unwrap());
        assert_eq!(here.received.unwrap(), (self.length, down));
        assert_eq!(there.received.unwrap(), (self.length, up));
    }
}

/// Sends bytes that depend on `seed`, and receives at the same time.
async fn transfer(wire: TcpStream, length: usize, seed: u8) -> Transfer {
    let (read, write) = wire.into_split();
    let written = AtomicUsize::new(0);
    let sending = send(write, (length, seed), &written);
    let (received, sent) = tokio::join!(receive(read), sending);
    Transfer { sent, received }
}

/// Writes bytes that depend on `seed`, counts those that were accepted, and writes the end. Returns their hash.
pub(crate) async fn send(
    mut wire: impl AsyncWrite + Unpin,
    (length, seed): (usize, u8),
    written: &AtomicUsize,
) -> io::Result<Vec<u8>> {
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    for (number, offset) in (0..length).step_by(CHUNK).enumerate() {
        chunk.truncate(length - offset);
        for (index, byte) in chunk.iter_mut().enumerate() {
            *byte = (number.wrapping_mul(31) ^ index.wrapping_mul(7)).to_le_bytes()[0] ^ seed;
        }
        hash.update(&chunk);
        wire.write_all(&chunk).await?;
        written.fetch_add(chunk.len(), Relaxed);
    }
    wire.shutdown().await?;
    Ok(hash.finalize().to_vec())
}

/// Reads to the end, and returns the number of bytes with their hash.
pub(crate) async fn receive(mut wire: impl AsyncRead + Unpin) -> io::Result<(usize, Vec<u8>)> {
    let (mut hash, mut total, mut chunk) = (Sha256::new(), 0, vec![0; CHUNK]);
    loop {
        match wire.read(&mut chunk).await? {
            0 => return Ok((total, hash.finalize().to_vec())),
            read => {
                total += read;
                hash.update(&chunk[..read]);
            }
        }
    }
}
