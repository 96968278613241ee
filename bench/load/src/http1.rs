//! Minimal HTTP/1.1 client for generators: one request at a time, answers with a known length, bodies are discarded.
//!
//! Cheap on purpose: the CPU time of a generator is missing elsewhere. Unknown input is an error and never a wrong count,
//! and so is an unexpected chunked answer.

use anyhow::{Context, bail, ensure};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// A connection of any kind.
pub(crate) trait IoStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> IoStream for T {}

/// Space for each read.
const READ: usize = 256 << 10;
/// Space for a head and a small body.
const SMALL: usize = 8 << 10;
/// Longest head.
const HEAD: usize = 64 << 10;
/// Longest chunk.
const CHUNK: usize = 64 << 20;
/// Largest number of fields in a head.
const FIELDS: usize = 64;

/// A connection with its bytes that were read and not used yet.
pub(crate) struct Connection {
    io: Box<dyn IoStream>,
    unread: BytesMut,
}

/// The head of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Its status.
    pub(crate) status: u16,
    /// The reason phrase.
    pub(crate) reason: String,
    /// Length of its body; `None` if the connection's end marks the end of the body.
    pub(crate) length: Option<u64>,
    /// Whether the connection ends after it.
    pub(crate) close: bool,
    /// Whether its body comes in chunks.
    pub(crate) chunked: bool,
}

impl Connection {
    /// A connection without traffic so far.
    pub(crate) fn new(io: impl IoStream + 'static) -> Self {
        Self {
            io: Box::new(io),
            unread: BytesMut::new(),
        }
    }

    /// Sends a request's head, or any bytes.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.io.write_all(bytes).await.context("cannot send")?;
        self.io.flush().await.context("cannot send")
    }

    /// Closes the sending side.
    pub(crate) async fn finish(&mut self) -> anyhow::Result<()> {
        self.io.shutdown().await.context("cannot end")
    }

    /// Sends a request and reads the head of its answer.
    pub(crate) async fn ask(&mut self, request: &[u8]) -> anyhow::Result<Head> {
        self.send(request).await?;
        self.head().await
    }

    /// Reads the next head that is not interim; a 101 is not interim.
    pub(crate) async fn head(&mut self) -> anyhow::Result<Head> {
        let head = self.any_head().await?;
        ensure!(
            !head.chunked,
            "a chunked answer: this path requires a Content-Length"
        );
        Ok(head)
    }

    /// The same for an answer that may be chunked; [`Line::chunk`] and [`Line::pass`] read the chunks.
    pub(crate) async fn any_head(&mut self) -> anyhow::Result<Head> {
        loop {
            while let Some((head, length)) = parse(&self.unread)? {
                self.unread.advance(length);
                if !(100..200).contains(&head.status) || head.status == 101 {
                    return Ok(head);
                }
            }
            if self.unread.len() > HEAD {
                bail!("a head is longer than {HEAD} bytes");
            }
            if self.read(SMALL).await? == 0 {
                bail!("the connection ended before an answer");
            }
        }
    }

    /// Reads that many bytes and discards them.
    pub(crate) async fn skip(&mut self, mut bytes: u64) -> anyhow::Result<()> {
        while bytes > 0 {
            match self.some(bytes).await? {
                0 => bail!("the connection ended {bytes} bytes too early"),
                read => bytes -= read,
            }
        }
        Ok(())
    }

    /// Reads up to that many bytes and discards them. 0 is the end.
    pub(crate) async fn some(&mut self, most: u64) -> anyhow::Result<u64> {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        if self.unread.is_empty() && self.read(most.clamp(SMALL, READ)).await? == 0 {
            return Ok(0);
        }
        let read = self.unread.len().min(most);
        self.unread.advance(read);
        Ok(u64::try_from(read)?)
    }

    /// Returns the next chunk of a body when it is complete; an empty chunk is the body's end.
    pub(crate) async fn chunk(&mut self) -> anyhow::Result<Option<Bytes>> {
        let (ahead, length) = loop {
            match httparse::parse_chunk_size(&self.unread) {
                Ok(httparse::Status::Complete((ahead, length))) => break (ahead, length),
                Ok(httparse::Status::Partial) => {}
                Err(_) => bail!("a chunk begins without a size"),
            }
            if self.read(SMALL).await? == 0 {
                bail!("the connection ended within a body");
            }
        };
        let length = usize::try_from(length)?;
        ensure!(length <= CHUNK, "a chunk is longer than {CHUNK} bytes");
        // No peer here sends trailers, so after the last chunk, too, there is only a line's end.
        let whole = ahead + length + 2;
        while self.unread.len() < whole {
            let missing = whole - self.unread.len();
            if self.read(missing.clamp(SMALL, READ)).await? == 0 {
                bail!("the connection ended within a chunk");
            }
        }
        let mut chunk = self.unread.split_to(whole).freeze();
        chunk.advance(ahead);
        chunk.truncate(length);
        Ok((length > 0).then_some(chunk))
    }

    /// Discards the body of this answer in any form.
    pub(crate) async fn pass(&mut self, head: &Head) -> anyhow::Result<()> {
        if !head.chunked {
            return self.skip(head.length.unwrap_or(0)).await;
        }
        while self.chunk().await?.is_some() {}
        Ok(())
    }

    /// Reads the bytes until the end of the connection: a sentence, not a body.
    pub(crate) async fn rest(&mut self) -> anyhow::Result<Vec<u8>> {
        let mut rest = self.unread.split().to_vec();
        let limited = (&mut self.io).take(u64::try_from(HEAD)?);
        tokio::pin!(limited);
        limited
            .read_to_end(&mut rest)
            .await
            .context("cannot read")?;
        Ok(rest)
    }

    /// Reads exactly as many bytes as `into` has.
    pub(crate) async fn exact(&mut self, into: &mut [u8]) -> anyhow::Result<()> {
        while self.unread.len() < into.len() {
            if self.read(SMALL).await? == 0 {
                bail!("the connection ended");
            }
        }
        self.unread.copy_to_slice(into);
        Ok(())
    }

    async fn read(&mut self, room: usize) -> anyhow::Result<usize> {
        self.unread.reserve(room);
        let mut room = (&mut self.unread).limit(room);
        self.io.read_buf(&mut room).await.context("cannot read")
    }
}

/// Returns the head at the beginning of `bytes` and its length, if it is complete.
fn parse(bytes: &[u8]) -> anyhow::Result<Option<(Head, usize)>> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut response = httparse::Response::new(&mut fields);
    let length = match response
        .parse(bytes)
        .context("this is not an HTTP/1.1 answer")?
    {
        httparse::Status::Complete(length) => length,
        httparse::Status::Partial => return Ok(None),
    };
    let mut head = Head {
        status: response.code.unwrap_or_default(),
        reason: response.reason.unwrap_or_default().to_owned(),
        length: None,
        close: false,
        chunked: false,
    };
    for field in response.headers {
        if field.name.eq_ignore_ascii_case("content-length") {
            let text = std::str::from_utf8(field.value)?;
            head.length = Some(
                text.trim()
                    .parse()
                    .context("a Content-Length is not a number")?,
            );
        } else if field.name.eq_ignore_ascii_case("connection") {
            head.close = field.value.eq_ignore_ascii_case(b"close");
        } else if field.name.eq_ignore_ascii_case("transfer-encoding") {
            head.chunked = field.value.eq_ignore_ascii_case(b"chunked");
            ensure!(head.chunked, "a body has an unknown framing");
        }
    }
    if matches!(head.status, 204 | 304) {
        head.length = Some(0);
    }
    Ok(Some((head, length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn interim_answers_are_passed_over_and_bodies_counted() {
        let (near, mut far) = tokio::io::duplex(1024);
        let mut line = Connection::new(near);
        let message =
            "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 Fine\r\ncontent-LENGTH: 3\r\n\r\nabcdef";
        far.write_all(message.as_bytes()).await.unwrap();
        let head = line.head().await.unwrap();
        assert_eq!(
            (head.status, head.reason.as_str(), head.length),
            (200, "Fine", Some(3))
        );
        line.skip(3).await.unwrap();
        let mut rest = [0; 3];
        line.exact(&mut rest).await.unwrap();
        assert_eq!(&rest, b"def");
        drop(far);
        assert!(line.skip(1).await.is_err());
    }

    #[tokio::test]
    async fn chunks_arrive_whole_and_only_if_expected() {
        let (near, mut far) = tokio::io::duplex(16);
        let mut line = Connection::new(near);
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let message = format!("{head}3\r\nabc\r\n11;x=y\r\ndefghijklmnopqrst\r\n0\r\n\r\n{head}");
        let says = async {
            far.write_all(message.as_bytes()).await.unwrap();
        };
        let reads = async {
            assert!(line.any_head().await.unwrap().chunked);
            assert_eq!(line.chunk().await.unwrap().unwrap(), "abc");
            assert_eq!(line.chunk().await.unwrap().unwrap(), "defghijklmnopqrst");
            assert_eq!(line.chunk().await.unwrap(), None);
            assert!(line.head().await.is_err());
        };
        tokio::join!(says, reads);
    }

    #[test]
    fn malformed_input_is_an_error() {
        assert!(parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n").is_err());
        assert!(parse(b"SSH-2.0\r\n\r\n").is_err());
        assert_eq!(parse(b"HTTP/1.1 200 OK\r\nContent-").unwrap(), None);
    }
}
