//! The first bytes of a TLS connection, split at any position, through the parser of listeners and the tunnel port.
//!
//! The first byte is the number of bytes in each piece.

#![no_main]

use causeway_certs::{ListenerName, NodeName};
use libfuzzer_sys::fuzz_target;
use rustls::server::Acceptor;
use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::LazyConfigAcceptor;

/// Stream that delivers bytes in pieces and has no peer that reads.
struct Pieces<'a> {
    left: &'a [u8],
    size: usize,
}

impl AsyncRead for Pieces<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let piece = self.size.min(self.left.len()).min(buf.remaining());
        let (piece, rest) = self.left.split_at(piece);
        buf.put_slice(piece);
        self.left = rest;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pieces<'_> {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((size, left)) = bytes.split_first() else {
        return;
    };
    let pieces = Pieces {
        left,
        size: usize::from(*size) + 1,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.expect("a runtime without drivers needs nothing");
    let accepted = LazyConfigAcceptor::new(Acceptor::default(), pieces);
    let Ok(start) = runtime.block_on(accepted) else {
        return;
    };
    let hello = start.client_hello();
    let protocols = hello.alpn().into_iter().flatten().count();
    assert!(protocols <= left.len());
    if let Some(name) = hello.server_name() {
        assert!(name.is_ascii(), "{name:?}");
        let _ = (NodeName::parse(name), ListenerName::parse(name));
    }
});
