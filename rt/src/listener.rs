//! Listening sockets whose accept cannot fail.
//!
//! Errors are logged and retried here, for example a peer that disconnects in the queue, or a process without free file
//! descriptors. So an accept loop has no errors to handle. A unix socket has mode 0600 from the beginning.

use crate::socket::{Socket, set_tcp_options};
use socket2::{Domain, Protocol, SockRef, Type};
use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::{
    net::{TcpListener, UnixListener},
    time::sleep,
};

/// Delay before a retry if the process or the machine lacks a resource.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Address of the peer, as the socket reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RemoteAddr {
    /// A TCP peer.
    Tcp(SocketAddr),
    /// A process on this machine, by its user id.
    Unix(u32),
}

impl RemoteAddr {
    /// Returns the address of a TCP peer. IPv4-mapped addresses become IPv4.
    pub fn ip(self) -> Option<IpAddr> {
        match self {
            Self::Tcp(address) => Some(address.ip().to_canonical()),
            Self::Unix(_) => None,
        }
    }
}

impl fmt::Display for RemoteAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(uid) => write!(f, "unix:uid={uid}"),
        }
    }
}

/// Bound socket that belongs to no runtime yet. Each thread attaches a clone of it.
#[derive(Debug)]
pub enum BoundSocket {
    /// TCP.
    Tcp(std::net::TcpListener),
    /// Unix socket and its path. The path stays: the next process that binds it takes it over if no process answers there.
    Unix(std::os::unix::net::UnixListener, PathBuf),
}

impl BoundSocket {
    /// Binds a TCP address. An IPv6 wildcard also accepts IPv4.
    ///
    /// # Errors
    /// The error of the system, most often that the address is in use.
    pub fn tcp(address: SocketAddr) -> io::Result<Self> {
        let domain = Domain::for_address(address);
        let socket = socket2::Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            socket.set_only_v6(!address.ip().is_unspecified())?;
        }
        socket.bind(&address.into())?;
        socket.listen(4096)?;
        socket.set_nonblocking(true)?;
        Ok(Self::Tcp(socket.into()))
    }

    /// Binds a unix socket with mode 0600. Replaces a socket file on which no process listens any more.
    ///
    /// # Errors
    /// If a process listens there or the path is not a socket, or the error of the system.
    pub fn unix(path: &Path) -> io::Result<Self> {
        clear_stale(path)?;
        Self::unix_replacing(path)
    }

    /// Binds a unix socket with mode 0600, and replaces any socket at this path.
    ///
    /// # Errors
    /// The error of the system, for example for a path of more than about 90 bytes.
    pub fn unix_replacing(path: &Path) -> io::Result<Self> {
        // Bound inside a private directory and then moved, so that no other user can ever connect.
        let temp_dir = path.with_extension(format!("bind-{}", std::process::id()));
        // A killed process may have left it; in a container the next process has the same id.
        let _ = std::fs::remove_dir_all(&temp_dir);
        std::fs::DirBuilder::new().mode(0o700).create(&temp_dir)?;
        let listener = bind_private(&temp_dir, path);
        let _ = std::fs::remove_dir_all(&temp_dir);
        Ok(Self::Unix(listener?, path.to_owned()))
    }

    /// Returns a TCP socket that another process has bound.
    pub fn inherited_tcp(descriptor: OwnedFd) -> Self {
        Self::Tcp(descriptor.into())
    }

    /// Returns a unix socket that another process has bound at this path.
    pub fn inherited_unix(descriptor: OwnedFd, path: &Path) -> Self {
        Self::Unix(descriptor.into(), path.to_owned())
    }

    /// Returns another handle of the same socket, for another thread.
    ///
    /// # Errors
    /// The error of the system.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(tcp) => Self::Tcp(tcp.try_clone()?),
            Self::Unix(unix, path) => Self::Unix(unix.try_clone()?, path.clone()),
        })
    }

    /// Returns the TCP address, with the port that the system chose.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(tcp) => tcp.local_addr().ok(),
            Self::Unix(..) => None,
        }
    }

    /// Attaches the socket to this thread's runtime.
    ///
    /// # Errors
    /// If the runtime cannot register it.
    pub fn attach(self) -> io::Result<SocketListener> {
        Ok(match self {
            Self::Tcp(tcp) => SocketListener::Tcp(TcpListener::from_std(tcp)?),
            Self::Unix(unix, _) => SocketListener::Unix(UnixListener::from_std(unix)?),
        })
    }
}

impl AsFd for BoundSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(tcp) => tcp.as_fd(),
            Self::Unix(unix, _) => unix.as_fd(),
        }
    }
}

fn bind_private(temp_dir: &Path, path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    let temp_path = temp_dir.join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&temp_path)?;
    std::fs::set_permissions(&temp_path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    std::fs::rename(&temp_path, path)?;
    Ok(listener)
}

fn clear_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(metadata) if !metadata.file_type().is_socket() => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "the path exists and is not a socket",
        )),
        Ok(_) if std::os::unix::net::UnixStream::connect(path).is_ok() => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another process already listens on this path",
        )),
        Ok(_) => std::fs::remove_file(path),
    }
}

/// A listening socket on this thread's runtime.
#[derive(Debug)]
pub enum SocketListener {
    /// TCP.
    Tcp(TcpListener),
    /// Unix.
    Unix(UnixListener),
}

impl SocketListener {
    /// Returns the next connection. Never fails: errors are logged and retried.
    pub async fn accept(&self) -> (Socket, RemoteAddr) {
        let mut is_logged = false;
        loop {
            match self.try_accept().await {
                Ok(accepted) => return accepted,
                Err(error) if is_peer_error(&error) => {
                    tracing::debug!(%error, "a client disconnected before its connection was accepted");
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_logged, true) {
                        tracing::warn!(%error, "cannot accept connections; retrying");
                    }
                    sleep(RETRY_DELAY).await;
                }
            }
        }
    }

    async fn try_accept(&self) -> io::Result<(Socket, RemoteAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (tcp, address) = listener.accept().await?;
                set_tcp_options(&tcp);
                Ok((tcp.into(), RemoteAddr::Tcp(address)))
            }
            Self::Unix(listener) => {
                let (unix, _) = listener.accept().await?;
                let uid = unix.peer_cred()?.uid();
                Ok((unix.into(), RemoteAddr::Unix(uid)))
            }
        }
    }
}

fn is_peer_error(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

/// Returns the destination of a redirected connection before DNAT (`SO_ORIGINAL_DST`), if it was redirected.
pub fn original_destination(socket: &Socket) -> Option<SocketAddr> {
    let tcp = socket.tcp()?;
    let local = tcp.local_addr().ok()?;
    let sock = SockRef::from(tcp);
    let original = if local.ip().to_canonical().is_ipv4() {
        sock.original_dst_v4()
    } else {
        sock.original_dst_v6()
    };
    let original = original.ok()?.as_socket()?;
    let canonical = |address: SocketAddr| (address.ip().to_canonical(), address.port());
    (canonical(original) != canonical(local)).then_some(original)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_unix_socket_is_private_and_replaces_only_a_dead_one() {
        let folder = std::env::temp_dir().join(format!("causeway-listener-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("listener.sock");
        let first = BoundSocket::unix(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let taken = BoundSocket::unix(&path).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        let again = BoundSocket::unix(&path).unwrap().attach().unwrap();
        let (connected, accepted) =
            tokio::join!(tokio::net::UnixStream::connect(&path), again.accept());
        connected.unwrap();
        assert!(matches!(accepted.1, RemoteAddr::Unix(_)));
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "a file").unwrap();
        assert!(BoundSocket::unix(&path).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[tokio::test]
    async fn an_address_in_use_says_so() {
        let first = BoundSocket::tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let error = BoundSocket::tcp(first.local_addr().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
