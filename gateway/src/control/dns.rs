//! DNS server for node names: resolves the name of a node to the address of this gateway, or of the gateways that hold the node.
//!
//! This module owns the sockets, one for datagrams and one for connections at the same address, and counts queries. `handler`
//! builds the answers from the current table of nodes. Nothing is cached, so nothing is stale. The server is never on the data
//! path, never queries another server, and accepts only queries.

mod handler;
pub(crate) mod holders;
mod names;
mod tcp;
mod udp;
mod zones;

pub use handler::{EdgeAddressesFn, QueryOutcome, Transport, answer};
pub use names::NodeNames;
pub use zones::Zones;

use causeway_rt::listener;
use socket2::{Domain, Protocol, Type};
use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::{AsFd, OwnedFd},
};
use tokio_util::sync::CancellationToken;

/// Maximum number of attempts to find a port that is free for datagrams and connections, if the system chooses the port.
const MAX_BIND_ATTEMPTS: usize = 16;

/// The UDP and TCP sockets, which are not yet registered with a runtime.
#[derive(Debug)]
pub struct BoundSockets {
    udp: UdpSocket,
    tcp: listener::BoundSocket,
}

impl BoundSockets {
    /// Binds UDP and TCP at one address. An IPv6 wildcard takes IPv4 as well.
    ///
    /// # Errors
    /// The system's error, most often that the address is in use.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let attempts = if address.port() == 0 {
            MAX_BIND_ATTEMPTS
        } else {
            1
        };
        let mut result = Self::bind_once(address);
        for _ in 1..attempts {
            if result.is_ok() {
                break;
            }
            result = Self::bind_once(address);
        }
        result
    }

    fn bind_once(address: SocketAddr) -> io::Result<Self> {
        let tcp = listener::BoundSocket::tcp(address)?;
        // If the system chooses the port, UDP and TCP use the same one.
        let address = tcp.local_addr().unwrap_or(address);
        let domain = Domain::for_address(address);
        let udp = socket2::Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
        if address.is_ipv6() {
            udp.set_only_v6(!address.ip().is_unspecified())?;
        }
        // Before the first query arrives: it would be answered from another address.
        udp::request_local_addresses(&udp, address.is_ipv6())?;
        udp.bind(&address.into())?;
        udp.set_nonblocking(true)?;
        Ok(Self {
            udp: udp.into(),
            tcp,
        })
    }

    /// Returns sockets that another process has bound at one address.
    pub fn inherited(udp: OwnedFd, tcp: OwnedFd) -> Self {
        Self {
            udp: udp.into(),
            tcp: listener::BoundSocket::inherited_tcp(tcp),
        }
    }

    /// Returns other handles of the same sockets: of that for datagrams, and of that for connections.
    ///
    /// # Errors
    /// The error of the system.
    pub fn try_clone(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        let tcp = self.tcp.as_fd().try_clone_to_owned()?;
        Ok((self.udp.try_clone()?.into(), tcp))
    }

    /// Returns the address, with the port that the system chose.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.tcp.local_addr()
    }
}

/// Answers until `stop`.
pub async fn run(bound: BoundSockets, names: NodeNames, stop: CancellationToken) {
    tokio::join!(
        udp::run(bound.udp, &names, &stop),
        tcp::run(bound.tcp, &names, &stop),
    );
}
