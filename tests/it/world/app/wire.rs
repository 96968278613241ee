//! A connection of a test app, and the heads that it reads: strict, and only the HTTP that scripts need.

use super::End;
use socket2::SockRef;
use std::{io, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::server::TlsStream;

/// A request's head, as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Every byte up to and with the empty line.
    pub(crate) bytes: Vec<u8>,
}

impl Head {
    /// The request line.
    pub(crate) fn line(&self) -> String {
        self.lines().remove(0)
    }

    /// The method.
    pub(crate) fn method(&self) -> String {
        self.part(0)
    }

    /// The request target.
    pub(crate) fn path(&self) -> String {
        self.part(1)
    }

    /// All fields in their order, names as they were written.
    pub(crate) fn fields(&self) -> Vec<(String, String)> {
        let split = |line: &String| {
            let (name, value) = line.split_once(':').expect("a field has a colon");
            (name.to_owned(), value.trim().to_owned())
        };
        self.lines()[1..].iter().map(split).collect()
    }

    /// The values of the fields of one name, in their order; case of the name does not matter.
    pub(crate) fn values(&self, name: &str) -> Vec<String> {
        let mut fields = self.fields();
        fields.retain(|(found, _)| found.eq_ignore_ascii_case(name));
        fields.into_iter().map(|(_, value)| value).collect()
    }

    /// The value of the only field of that name.
    pub(crate) fn value(&self, name: &str) -> Option<String> {
        let mut values = self.values(name);
        assert!(values.len() < 2, "{name} occurs {} times", values.len());
        values.pop()
    }

    fn lines(&self) -> Vec<String> {
        let text = String::from_utf8_lossy(&self.bytes);
        let text = text.strip_suffix("\r\n\r\n").expect("a whole head");
        text.split("\r\n").map(str::to_owned).collect()
    }

    fn part(&self, index: usize) -> String {
        let line = self.line();
        line.split(' ').nth(index).expect("a request line").into()
    }
}

/// Transport that carries the bytes.
pub(super) trait Transport: AsyncRead + AsyncWrite + Send + Unpin {
    /// The socket below.
    fn tcp(&self) -> &TcpStream;
}

impl Transport for TcpStream {
    fn tcp(&self) -> &TcpStream {
        self
    }
}

impl Transport for TlsStream<TcpStream> {
    fn tcp(&self) -> &TcpStream {
        self.get_ref().0
    }
}

/// A socket, or TLS on one, and the bytes that were read ahead from it.
pub(super) struct BufferedSocket {
    socket: Box<dyn Transport>,
    ahead: Vec<u8>,
}

impl BufferedSocket {
    pub(super) fn new(socket: impl Transport + 'static) -> Self {
        Self {
            socket: Box::new(socket),
            ahead: Vec::new(),
        }
    }

    pub(super) async fn read_head(&mut self) -> Result<Head, End> {
        let bytes = self.read_through(b"\r\n\r\n").await?;
        Ok(Head { bytes })
    }

    /// The body that the head announces, without its framing.
    pub(super) async fn read_body(&mut self, head: &Head) -> Result<Vec<u8>, End> {
        if head.value("Transfer-Encoding").is_some() {
            return self.read_chunks().await;
        }
        let length = head.value("Content-Length").unwrap_or_else(|| "0".into());
        self.read_exact(length.parse().unwrap()).await
    }

    async fn read_chunks(&mut self) -> Result<Vec<u8>, End> {
        let mut body = Vec::new();
        loop {
            let line = self.read_through(b"\r\n").await?;
            let size = String::from_utf8_lossy(&line);
            let size = size.trim_end().split(';').next().unwrap_or_default();
            let size = usize::from_str_radix(size, 16).expect("a chunk's size");
            if size == 0 {
                break;
            }
            body.extend(self.read_exact(size).await?);
            assert_eq!(self.read_exact(2).await?, b"\r\n");
        }
        // Trailers, if any, then the empty line.
        while self.read_through(b"\r\n").await? != b"\r\n" {}
        Ok(body)
    }

    async fn read_through(&mut self, end: &[u8]) -> Result<Vec<u8>, End> {
        loop {
            let found = self.ahead.windows(end.len()).position(|part| part == end);
            if let Some(start) = found {
                return Ok(self.ahead.drain(..start + end.len()).collect());
            }
            self.read_more().await?;
        }
    }

    async fn read_exact(&mut self, length: usize) -> Result<Vec<u8>, End> {
        while self.ahead.len() < length {
            self.read_more().await?;
        }
        Ok(self.ahead.drain(..length).collect())
    }

    /// Reads the next bytes.
    pub(super) async fn read_some(&mut self) -> Result<Vec<u8>, End> {
        if self.ahead.is_empty() {
            self.read_more().await?;
        }
        Ok(std::mem::take(&mut self.ahead))
    }

    /// Stores arriving bytes for later; returns only when the peer ends or resets. Safe to drop at any point.
    pub(super) async fn gone(&mut self) -> End {
        loop {
            if let Err(end) = self.read_more().await {
                return end;
            }
        }
    }

    async fn read_more(&mut self) -> Result<(), End> {
        match self.socket.read_buf(&mut self.ahead).await {
            Ok(0) => Err(End::Finished),
            Ok(_) => Ok(()),
            Err(error) => Err(reset(&error)),
        }
    }

    pub(super) async fn write(&mut self, bytes: &[u8]) -> Result<(), End> {
        let written = self.socket.write_all(bytes).await;
        written.map_err(|error| reset(&error))?;
        let flushed = self.socket.flush().await;
        flushed.map_err(|error| reset(&error))
    }

    pub(super) async fn finish(&mut self) {
        // The peer may have reset it already.
        let _ = self.socket.shutdown().await;
    }

    /// Makes the following close a reset.
    pub(super) fn arm_reset(&self) {
        let socket = SockRef::from(self.socket.tcp());
        socket.set_linger(Some(Duration::ZERO)).unwrap();
    }
}

fn reset(error: &io::Error) -> End {
    let known = [
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::BrokenPipe,
        // TLS that was cut off without close_notify.
        io::ErrorKind::UnexpectedEof,
    ];
    assert!(known.contains(&error.kind()), "{error}");
    End::Reset
}
