//! Source of a connection that a proxy forwards with a PROXY v2 header.
//!
//! This module reads that header, which precedes all other bytes. Only a peer in `proxy_protocol` has to send one, because the
//! client could not be distinguished from the proxy without it. Version 1 is refused. The header is limited in size, and shares
//! the timeout of the TLS handshake of the client or edge.

use ipnet::IpNet;
use proxy_header::{ParseConfig, Protocol, ProxiedAddress, ProxyHeader};
use std::{io, net::IpAddr};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Length of the fixed part of a header, whose last two bytes are the length of the rest.
const FIXED_HEADER_LEN: usize = 16;
/// Maximum length of the rest, in bytes. Addresses are 36 bytes at most; the other contents (TLS versions, names, identifiers) a
/// few hundred.
const MAX_VARIABLE_LEN: usize = 4096;
/// First bytes of a header of version 2.
const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// Whether connections from this address begin with a header, because it is in one of the configured `networks`.
pub fn is_proxied(networks: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    networks.iter().any(|network| network.contains(&address))
}

/// Reads the header, and no byte after it. Returns no address if the proxy connects on its own behalf, for example for a health
/// check of the listener.
///
/// # Errors
/// If there is no header, or it is invalid.
pub async fn read(socket: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<ProxiedAddress>> {
    let mut header = vec![0; FIXED_HEADER_LEN];
    // Read first, so that a client that sends other and fewer bytes is detected before the header is complete.
    socket.read_exact(&mut header[..SIGNATURE.len()]).await?;
    if !header.starts_with(SIGNATURE) {
        return Err(invalid_data("it does not begin with a PROXY v2 header"));
    }
    socket.read_exact(&mut header[SIGNATURE.len()..]).await?;
    let length = usize::from(u16::from_be_bytes([
        header[FIXED_HEADER_LEN - 2],
        header[FIXED_HEADER_LEN - 1],
    ]));
    if length > MAX_VARIABLE_LEN {
        return Err(invalid_data("the PROXY header is too long"));
    }
    header.resize(FIXED_HEADER_LEN + length, 0);
    socket.read_exact(&mut header[FIXED_HEADER_LEN..]).await?;
    parse(&header)
}

/// Parses a whole header.
///
/// # Errors
/// If its version is not 2, or its protocol is not TCP.
fn parse(header: &[u8]) -> io::Result<Option<ProxiedAddress>> {
    let config = ParseConfig {
        include_tlvs: false,
        allow_v1: false,
        allow_v2: true,
    };
    let parsed = ProxyHeader::parse(header, config);
    let (header, _) = parsed.map_err(|_| invalid_data("the PROXY header is malformed"))?;
    match header.proxied_address() {
        Some(proxied) if proxied.protocol != Protocol::Stream => {
            Err(invalid_data("the PROXY header is not for TCP"))
        }
        proxied => Ok(proxied.cloned()),
    }
}

fn invalid_data(detail: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(command: u8, family: u8, addresses: &[u8]) -> Vec<u8> {
        let length = u16::try_from(addresses.len()).unwrap().to_be_bytes();
        [SIGNATURE, &[command, family], &length, addresses].concat()
    }

    /// A connection from 10.0.0.1:4000 to 10.0.0.2:10250.
    const V4: &[u8] = &[10, 0, 0, 1, 10, 0, 0, 2, 0x0f, 0xa0, 0x28, 0x0a];

    async fn said(bytes: &[u8]) -> (io::Result<Option<ProxiedAddress>>, usize) {
        let mut bytes = bytes;
        let said = read(&mut bytes).await;
        (said, bytes.len())
    }

    #[tokio::test]
    async fn a_header_gives_source_and_destination_and_reads_no_further() {
        let extra = [V4, &[0x04, 0, 2, 7, 7]].concat();
        for addresses in [V4, &extra] {
            let sent = [&header(0x21, 0x11, addresses), &b"hello"[..]].concat();
            let (said, left) = said(&sent).await;
            let said = said.unwrap().unwrap();
            assert_eq!(said.source.to_string(), "10.0.0.1:4000");
            assert_eq!(said.destination.to_string(), "10.0.0.2:10250");
            assert_eq!(left, 5);
        }
        let (itself, _) = said(&header(0x20, 0x00, &[])).await;
        assert_eq!(itself.unwrap(), None);
    }

    #[tokio::test]
    async fn malformed_headers_are_refused() {
        let whole = header(0x21, 0x11, V4);
        let mut refused = vec![
            b"PROXY TCP4 10.0.0.1 10.0.0.2 4000 10250\r\n".to_vec(),
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            header(0x11, 0x11, V4),
            header(0x22, 0x11, V4),
            header(0x21, 0x12, V4),
            header(0x21, 0x21, V4),
            header(0x21, 0x11, &[0; MAX_VARIABLE_LEN + 1]),
        ];
        refused.extend((0..whole.len()).map(|cut| whole[..cut].to_vec()));
        for sent in refused {
            assert!(said(&sent).await.0.is_err(), "{sent:?}");
        }
    }
}
