//! Start of a TLS connection that ends at the upstream: reads the ClientHello, whose server name (SNI, RFC 6066 section 3) names the
//! node, and keeps its bytes for the upstream.
//!
//! rustls parses the ClientHello, which may be split into several records and segments. It need not be one that rustls itself would
//! accept, except that it must have `signature_algorithms`, as every client of TLS 1.2 or later sends. With ECH the outer name counts.

use super::refusal::{first_byte, handshake_failed, log_refusal, refuse_name, refuse_plaintext};
use crate::proxy::{Proxy, route};
use bytes::{Bytes, BytesMut};
use causeway_rt::{
    lingering_close, listener::RemoteAddr, read_limit::MAX_CLIENT_HELLO, socket::Socket,
};
use rustls::server::Acceptor;
use std::{io, net::SocketAddr};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, timeout_at},
};

/// ClientHello of a connection whose TLS ends at the upstream.
pub(super) struct PassthroughHello {
    /// Server name, if the client sent one.
    pub(super) server_name: Option<String>,
    /// All bytes that were read.
    pub(super) bytes: Bytes,
}

/// Error of reading a ClientHello.
enum HelloError {
    Io(io::Error),
    /// The bytes are no ClientHello. The client gets this alert.
    Invalid(rustls::Error, Vec<u8>),
}

/// Reads the ClientHello, and checks that it names a node. Returns `None` if it was refused. The client then gets an alert.
pub(super) async fn read_client_hello(
    proxy: &Proxy,
    mut socket: Socket,
    (peer, original): (RemoteAddr, Option<SocketAddr>),
) -> Option<(Socket, PassthroughHello)> {
    let deadline = Instant::now() + proxy.shared.timeouts.tls;
    if let Ok(Some(b'A'..=b'Z')) = timeout_at(deadline, first_byte(&socket)).await {
        handshake_failed(proxy, "plaintext", &"the client does not speak TLS");
        refuse_plaintext(socket).await;
        return None;
    }
    let hello = match timeout_at(deadline, read(&mut socket)).await {
        Ok(Ok(hello)) => hello,
        Ok(Err(HelloError::Io(error))) => {
            handshake_failed(proxy, "hello", &error);
            return None;
        }
        Ok(Err(HelloError::Invalid(error, alert))) => {
            handshake_failed(proxy, "hello", &error);
            if socket.write_all(&alert).await.is_ok() {
                lingering_close::close(socket).await;
            }
            return None;
        }
        Err(_) => {
            handshake_failed(proxy, "slow", &"no ClientHello in time");
            return None;
        }
    };
    if is_unrecognized(proxy, &hello, original) {
        handshake_failed(proxy, "unrecognized_name", &"no node has this server name");
        log_refusal(
            proxy,
            peer,
            (hello.server_name.as_deref(), "UnrecognisedName"),
            "the server name of a client names no node, or the client sent none and this listener has no default node",
        );
        refuse_name(socket).await;
        return None;
    }
    Some((socket, hello))
}

/// Whether the nodes are known, and neither the server name nor this listener names one of them.
fn is_unrecognized(proxy: &Proxy, hello: &PassthroughHello, original: Option<SocketAddr>) -> bool {
    let input = (proxy.listener).connection_route_input(hello.server_name.as_deref(), original);
    // A client must not learn which pods exist: a session to an unknown pod ends as one that is not allowed.
    proxy.shared.nodes.pending_reason().is_none()
        && !route::names_pod(&input, &proxy.shared.nodes)
        && route::bound_node(&input, &proxy.shared.nodes).is_none()
}

/// Reads from the socket until the ClientHello is complete.
async fn read(
    socket: &mut (impl tokio::io::AsyncRead + Unpin),
) -> Result<PassthroughHello, HelloError> {
    let mut acceptor = Acceptor::default();
    let mut bytes = BytesMut::with_capacity(2 << 10);
    loop {
        let parsed = bytes.len();
        let length = socket.read_buf(&mut bytes).await.map_err(HelloError::Io)?;
        let fault = match length {
            0 => Some(io::ErrorKind::UnexpectedEof.into()),
            _ if bytes.len() > MAX_CLIENT_HELLO => {
                let error = "the start of the connection is too long";
                Some(io::Error::new(io::ErrorKind::InvalidData, error))
            }
            _ => None,
        };
        if let Some(fault) = fault {
            return Err(HelloError::Io(fault));
        }
        let mut received = &bytes[parsed..];
        while !received.is_empty() {
            acceptor.read_tls(&mut received).map_err(HelloError::Io)?;
            match acceptor.accept() {
                Ok(None) => {}
                Ok(Some(accepted)) => {
                    let server_name = accepted.client_hello().server_name().map(str::to_owned);
                    return Ok(PassthroughHello {
                        server_name,
                        bytes: bytes.freeze(),
                    });
                }
                Err((error, mut alert)) => {
                    let mut record = Vec::new();
                    // Writing to memory cannot fail.
                    let _ = alert.write_all(&mut record);
                    return Err(HelloError::Invalid(error, record));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GREASE value of cipher suites and extensions (RFC 8701).
    const GREASE: u16 = 0x0a0a;

    fn with_length(bytes: &[u8]) -> Vec<u8> {
        let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
        [&length, bytes].concat()
    }

    fn extension(number: u16, content: &[u8]) -> Vec<u8> {
        [&number.to_be_bytes()[..], &with_length(content)].concat()
    }

    fn name_extension(name: &str) -> Vec<u8> {
        let entry = [&[0], &*with_length(name.as_bytes())].concat();
        extension(0, &with_length(&entry))
    }

    /// Returns the handshake message of a TLS 1.2 client with GREASE and these extensions.
    fn client_hello(extensions: &[Vec<u8>]) -> Vec<u8> {
        let suites = [GREASE.to_be_bytes(), 0xc02f_u16.to_be_bytes()].concat();
        let schemes = extension(13, &with_length(&[4, 3, 8, 4]));
        let grease = extension(GREASE, &[]);
        let extensions = [grease, schemes, extensions.concat()].concat();
        let body = [
            &[3, 3][..],
            &[7; 32],
            &[0],
            &with_length(&suites),
            &[1, 0],
            &with_length(&extensions),
        ]
        .concat();
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        [&[1], &length[1..], &body].concat()
    }

    /// Returns the message in records of this length.
    fn records(message: &[u8], length: usize) -> Vec<u8> {
        let record = |part: &[u8]| [&[22, 3, 1], &*with_length(part)].concat();
        message.chunks(length).flat_map(record).collect()
    }

    /// Reads a hello that arrives in segments of this length. Checks that its bytes are complete.
    async fn name_in(bytes: &[u8], segment: usize) -> Result<Option<String>, HelloError> {
        let (mut client, mut server) = tokio::io::duplex(segment);
        let sending = async move {
            let _ = client.write_all(bytes).await;
            // The end of the stream, which only a reader of more bytes notices.
            drop(client);
            std::future::pending::<()>().await;
        };
        let hello = tokio::select! {
            hello = read(&mut server) => hello?,
            () = sending => unreachable!("it has no end"),
        };
        assert!(bytes.starts_with(&hello.bytes));
        Ok(hello.server_name)
    }

    #[tokio::test]
    async fn the_server_name_is_read_from_any_split_of_records_and_segments() {
        let small = client_hello(&[name_extension("edge-1")]);
        let padding = extension(21, &[0; 12 << 10]);
        let large = client_hello(&[padding, name_extension("edge-1")]);
        for (message, record, segment) in [
            (&small, 16_000, 16_000),
            (&small, 16_000, 1),
            (&small, 5, 3),
            (&small, 1, 7),
            (&large, 16_000, 1_400),
            (&large, 4_000, 1_400),
        ] {
            let bytes = records(message, record);
            let name = name_in(&bytes, segment).await;
            let name = name.ok().flatten();
            assert_eq!(name.as_deref(), Some("edge-1"), "{record} {segment}");
        }
    }

    #[tokio::test]
    async fn a_hello_with_encrypted_client_hello_has_its_outer_name() {
        let encrypted = [
            &[0, 0, 1, 0, 1, 9][..],
            &with_length(&[5; 32]),
            &with_length(&[6; 200]),
        ];
        let encrypted = extension(0xfe0d, &encrypted.concat());
        let message = client_hello(&[encrypted, name_extension("edge-1")]);
        let name = name_in(&records(&message, 16_000), 16_000).await.ok();
        assert_eq!(name.flatten().as_deref(), Some("edge-1"));
    }

    #[tokio::test]
    async fn bytes_behind_the_hello_are_kept() {
        let mut bytes = records(&client_hello(&[name_extension("edge-1")]), 16_000);
        bytes.extend_from_slice(&[23, 3, 3, 0, 2, 1, 2]);
        let (mut client, mut server) = tokio::io::duplex(bytes.len());
        client.write_all(&bytes).await.unwrap();
        let hello = read(&mut server).await.ok();
        assert_eq!(hello.map(|hello| hello.bytes).unwrap(), bytes);
    }

    #[tokio::test]
    async fn a_hello_without_a_name_or_with_an_address_names_nothing() {
        for extensions in [vec![], vec![name_extension("10.0.0.1")]] {
            let bytes = records(&client_hello(&extensions), 16_000);
            assert_eq!(name_in(&bytes, 16_000).await.ok(), Some(None));
        }
    }

    #[tokio::test]
    async fn other_bytes_get_an_alert() {
        for bytes in [
            &b"\x16\x03\x01\x00\x06\x02\0\0\x02hi"[..],
            b"\x00\x01\x02\x03\x04\x05",
        ] {
            let alert = match name_in(bytes, 100).await {
                Err(HelloError::Invalid(_, alert)) => alert,
                Err(HelloError::Io(error)) => panic!("{bytes:?}: {error}"),
                Ok(_) => panic!("{bytes:?}"),
            };
            assert_eq!(alert[..3], [21, 3, 3], "{bytes:?}");
        }
    }

    #[tokio::test]
    async fn a_hello_that_is_cut_or_too_long_is_refused() {
        let bytes = records(&client_hello(&[name_extension("edge-1")]), 16_000);
        let cut = name_in(&bytes[..bytes.len() - 1], 16_000).await;
        assert!(
            matches!(cut, Err(HelloError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof)
        );
        let padding = extension(21, &vec![0; MAX_CLIENT_HELLO]);
        let bytes = records(&client_hello(&[padding]), 16_000);
        let long = name_in(&bytes[..bytes.len() - 4], 2_000).await;
        assert!(
            matches!(long, Err(HelloError::Io(error)) if error.kind() == io::ErrorKind::InvalidData)
        );
    }
}
