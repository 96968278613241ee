//! TCP session: bytes in both directions between a stream and an upstream.
//!
//! The edge connects to the upstream before it answers the stream, because otherwise a refused port would look like success
//! (invariant 4). The bytes are raw, whatever the port's scheme is: the client itself uses TLS if the upstream requires it. A
//! reset on either side becomes a reset on the other side.

use super::{
    dial::{Connected, Dialer},
    response::{ResponseTail, UpstreamResponse},
    upstream::{RequestError, Upstream, UpstreamIo, broken},
};
use crate::metrics::StreamOutcome;
use causeway_tunnel::{
    StreamError, StreamReceiver, StreamSender,
    copy::{self, CopyOutcome},
};
use http::Response;
use proxy_header::{ProxiedAddress, ProxyHeader};
use std::net::{IpAddr, SocketAddr};
use tokio::{io::AsyncWriteExt, time::timeout_at};

/// Connects to the upstream, and sends the PROXY header if the port's configuration requires it.
pub(super) async fn dial_upstream(
    dialer: &Dialer,
    upstream: &Upstream,
    (body, source): (StreamReceiver, Option<SocketAddr>),
    connected: &Connected,
) -> Result<UpstreamResponse, RequestError> {
    let deadline = dialer.deadline();
    let (mut tcp, address) = dialer.dial(upstream, deadline).await?;
    connected.set(address);
    if upstream.proxy_protocol {
        let header = proxy_header(source, address);
        let sent = timeout_at(deadline, tcp.write_all(&header)).await;
        if !matches!(sent, Ok(Ok(()))) {
            return Err(broken(
                upstream,
                "closed the connection before the PROXY header",
            ));
        }
    }
    Ok(UpstreamResponse {
        head: Response::new(()),
        then: ResponseTail::Bytes(Box::new(UpstreamIo::plain(tcp)), body),
    })
}

/// Returns a PROXY v2 header for a session of this client. Without a known client, the header says so (`LOCAL`).
fn proxy_header(source: Option<SocketAddr>, destination: SocketAddr) -> Vec<u8> {
    let header = source.map_or_else(ProxyHeader::with_local, |source| {
        let (source, destination) = to_same_family(source, destination);
        ProxyHeader::with_address(ProxiedAddress::stream(source, destination))
    });
    let mut bytes = Vec::new();
    // Fails only for a header with more contents than fit into 64 KiB.
    let _ = header.encode_v2(&mut bytes);
    bytes
}

/// Returns both addresses in IPv6 if they differ in their family, because a header has only one.
fn to_same_family(source: SocketAddr, destination: SocketAddr) -> (SocketAddr, SocketAddr) {
    let source = SocketAddr::new(source.ip().to_canonical(), source.port());
    if source.is_ipv4() == destination.is_ipv4() {
        return (source, destination);
    }
    let to_ipv6 = |address: SocketAddr| match address.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), address.port()),
        IpAddr::V6(_) => address,
    };
    (to_ipv6(source), to_ipv6(destination))
}

/// Copies bytes until both directions have ended. Upgrades use this too.
pub(super) async fn relay_bytes(
    socket: UpstreamIo,
    send: StreamSender,
    receive: StreamReceiver,
) -> StreamOutcome {
    let counters = copy::ByteCounters::default();
    match copy::relay(socket, send, receive, &counters, false).await {
        CopyOutcome::Clean => StreamOutcome::Done,
        CopyOutcome::Socket(_) => StreamOutcome::UpstreamFailed,
        CopyOutcome::Stream(StreamError::Lost { .. }) => StreamOutcome::TunnelLost,
        CopyOutcome::Stream(StreamError::Evicted) => StreamOutcome::Evicted,
        CopyOutcome::Stream(_) => StreamOutcome::ClientClosed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(source: Option<&str>, destination: &str) -> Vec<u8> {
        let source = source.map(|source| source.parse().unwrap());
        proxy_header(source, destination.parse().unwrap())
    }

    #[test]
    fn a_proxy_header_has_both_addresses_in_one_family() {
        let start = b"\r\n\r\n\0\r\nQUIT\n";
        let addresses = b"\x21\x11\0\x0c\xc0\0\x02\x07\x0a\0\0\x01\x12\x67\0\x16";
        for source in ["192.0.2.7:4711", "[::ffff:192.0.2.7]:4711"] {
            let sent = header(Some(source), "10.0.0.1:22");
            assert_eq!(sent, [&start[..], addresses].concat(), "{source}");
        }
        let mixed = header(Some("192.0.2.7:4711"), "[2001:db8::1]:22");
        assert_eq!(mixed[12..16], *b"\x21\x21\0\x24");
        assert_eq!(mixed[26..32], *b"\xff\xff\xc0\0\x02\x07");
        assert_eq!(mixed.len(), 52);
        assert_eq!(header(None, "10.0.0.1:22")[12..], *b"\x20\0\0\0");
    }
}
