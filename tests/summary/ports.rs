//! Ports for servers that cannot choose one themselves, or that start again at the same one.

use socket2::{Domain, Socket, Type};
use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

/// First of the ports. All are below the range from which Linux takes the ports of connections (`ip_local_port_range`).
const FIRST: u32 = 20_000;
const COUNT: u32 = 12_000;
/// Number of ports by which the first ones of two test programs differ at least, if their process ids do.
const STEP: u32 = 101;

static TAKEN: AtomicU32 = AtomicU32::new(0);

/// Returns a port that is free at all addresses, and that this process has not returned before.
///
/// No connection gets it either. With a port that the system chooses, a connection may take it before the server does, and a
/// client that connects repeatedly may even connect to itself.
///
/// # Panics
///
/// If no such port is free.
pub fn unused_port() -> u16 {
    let first = std::process::id().wrapping_mul(STEP);
    for _ in 0..COUNT {
        let port = FIRST + first.wrapping_add(TAKEN.fetch_add(1, Relaxed)) % COUNT;
        let port = u16::try_from(port).expect("the range ends below 65,536");
        if bind(port).is_ok() {
            return port;
        }
    }
    panic!("no port from {FIRST} on is free");
}

/// Binds a socket to the port at all addresses, and closes it.
///
/// The socket never listens. A child that another thread forks meanwhile keeps a copy of it until it executes its program, and a
/// socket that listens would refuse the port to the server.
fn bind(port: u16) -> io::Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())
}
