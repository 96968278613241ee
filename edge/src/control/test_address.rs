//! Addresses of gateways that a test closes and opens again.

use std::{net::SocketAddr, sync::Mutex};
use tokio::net::TcpSocket;

/// Sockets that keep the addresses. None of them listens.
static RESERVED: Mutex<Vec<TcpSocket>> = Mutex::new(Vec::new());

/// Returns an address at which a test can open a listener any number of times.
///
/// The address stays bound until this process ends, so no listener and no connection of another test gets its port. A connection is
/// refused while there is no listener.
pub(super) fn reserved_address() -> SocketAddr {
    let socket = TcpSocket::new_v4().unwrap();
    // tokio's listeners set this option as well. With it, the address may be bound twice, as long as one of the sockets listens.
    socket.set_reuseaddr(true).unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = socket.local_addr().unwrap();
    RESERVED.lock().unwrap().push(socket);
    address
}
