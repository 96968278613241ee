//! Queries over UDP.
//!
//! An answer must be sent from the queried address, or the client takes it for another server's. A socket on a wildcard address
//! needs that address for each answer (`IP_PKTINFO`). An answer that the system does not accept at once is dropped, so that a
//! slow link does not delay the next query.

use super::{
    handler::Transport,
    names::{MAX_QUERY_SIZE, NodeNames},
};
use nix::{
    cmsg_space,
    libc::{in_addr, in_pktinfo, in6_pktinfo},
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg,
        setsockopt, sockopt,
    },
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    net,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};
use tokio::{io::Interest, net::UdpSocket, time::sleep};
use tokio_util::sync::CancellationToken;

/// Pause after a receive error, as when the machine lacks a resource.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// Local address to which the query was sent.
#[derive(Clone, Copy, Debug)]
enum LocalAddr {
    V4(in_pktinfo),
    V6(in6_pktinfo),
}

/// A query's length, its source, and the queried address.
type Received = (usize, SockaddrStorage, Option<LocalAddr>);

pub(super) async fn run(socket: net::UdpSocket, names: &NodeNames, stop: &CancellationToken) {
    let socket = match UdpSocket::from_std(socket) {
        Ok(socket) => socket,
        Err(error) => {
            tracing::error!(%error, "cannot answer DNS over UDP: the socket cannot be registered with the runtime");
            return;
        }
    };
    let mut buffer = [0; MAX_QUERY_SIZE];
    let mut has_logged = false;
    loop {
        let received = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            came = socket.async_io(Interest::READABLE, || receive(&socket, &mut buffer)) => came,
        };
        match received {
            Ok((length, from, local_addr)) => {
                if let Some(answer) = names.answer(&buffer[..length], Transport::Udp) {
                    send(&socket, &answer, (&from, local_addr));
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut has_logged, true) {
                    tracing::warn!(%error, "cannot receive DNS queries, retrying");
                }
                sleep(ERROR_PAUSE).await;
            }
        }
    }
}

/// Makes the system note the queried address of each query that arrives from now on.
pub(super) fn request_local_addresses(socket: &impl AsFd, is_ipv6: bool) -> io::Result<()> {
    if is_ipv6 {
        setsockopt(socket, sockopt::Ipv6RecvPacketInfo, &true)?;
    } else {
        setsockopt(socket, sockopt::Ipv4PacketInfo, &true)?;
    }
    Ok(())
}

fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<Received> {
    let mut control_buffer = cmsg_space!(in_pktinfo, in6_pktinfo);
    let mut parts = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::empty();
    let message = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut control_buffer),
        flags,
    )?;
    let local_addr = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Ipv4PacketInfo(info) => Some(LocalAddr::V4(in_pktinfo {
            // The routing table decides the return path.
            ipi_ifindex: 0,
            ipi_addr: in_addr { s_addr: 0 },
            ..info
        })),
        ControlMessageOwned::Ipv6PacketInfo(info) => Some(LocalAddr::V6(in6_pktinfo {
            ipi6_ifindex: 0,
            ..info
        })),
        _ => None,
    });
    let from = message.address.ok_or(io::ErrorKind::InvalidData)?;
    Ok((message.bytes, from, local_addr))
}

fn send(
    socket: &UdpSocket,
    answer: &[u8],
    (to, local_addr): (&SockaddrStorage, Option<LocalAddr>),
) {
    let source_info = match &local_addr {
        Some(LocalAddr::V4(info)) => Some(ControlMessage::Ipv4PacketInfo(info)),
        Some(LocalAddr::V6(info)) => Some(ControlMessage::Ipv6PacketInfo(info)),
        None => None,
    };
    let sent = socket.try_io(Interest::WRITABLE, || {
        let parts = [IoSlice::new(answer)];
        let fd = socket.as_raw_fd();
        Ok(sendmsg(
            fd,
            &parts,
            source_info.as_slice(),
            MsgFlags::empty(),
            Some(to),
        )?)
    });
    if let Err(error) = sent {
        tracing::debug!(%error, "a DNS answer was dropped");
    }
}

#[cfg(test)]
mod tests {
    use super::{super::BoundSockets, *};
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    #[tokio::test]
    async fn a_query_before_the_start_has_the_address_to_which_it_was_sent() {
        for listen in [
            IpAddr::from(Ipv4Addr::UNSPECIFIED),
            IpAddr::from(Ipv6Addr::UNSPECIFIED),
        ] {
            let bound = BoundSockets::bind((listen, 0).into()).unwrap();
            let port = bound.local_addr().unwrap().port();
            let client = net::UdpSocket::bind("127.0.0.1:0").unwrap();
            client.send_to(b"query", ("127.0.0.2", port)).unwrap();
            let socket = UdpSocket::from_std(bound.udp).unwrap();
            let mut buffer = [0; MAX_QUERY_SIZE];
            let reading = socket.async_io(Interest::READABLE, || receive(&socket, &mut buffer));
            let queried: IpAddr = match reading.await.unwrap() {
                (5, _, Some(LocalAddr::V4(info))) => {
                    Ipv4Addr::from_bits(u32::from_be(info.ipi_spec_dst.s_addr)).into()
                }
                (5, _, Some(LocalAddr::V6(info))) => {
                    IpAddr::from(Ipv6Addr::from(info.ipi6_addr.s6_addr)).to_canonical()
                }
                other => panic!("{other:?}"),
            };
            assert_eq!(queried, Ipv4Addr::new(127, 0, 0, 2), "{listen}");
        }
    }
}
