//! Listening sockets of a gateway: bound, passed on to another process, or taken over from one.

use super::error::BindError;
use crate::{config::ListenAddr, control::dns};
use causeway_rt::listener::BoundSocket;
use serde::{Deserialize, Serialize};
use std::{
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Use of the tunnel port's socket.
pub(super) const TUNNEL_PORT: &str = "the tunnel port (tunnel.listen)";

/// Use of the DNS server's sockets.
pub(super) const DNS_SERVER: &str = "the DNS server (dns.listen)";

/// Name of a listening socket in a handover: its use, its kind, its configured address, and its port if the system chose it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SocketName {
    r#use: String,
    /// `tcp`, `udp` or `unix`.
    kind: String,
    listen: String,
    port: Option<u16>,
}

impl SocketName {
    pub(super) fn new(r#use: &str, kind: &str, listen: String) -> Self {
        Self {
            r#use: r#use.to_owned(),
            kind: kind.to_owned(),
            listen,
            port: None,
        }
    }

    /// Returns the name of a socket that is bound to this address.
    pub(super) fn bound_to(self, address: Option<SocketAddr>) -> Self {
        let port = address.map(|address| address.port());
        Self { port, ..self }
    }

    /// Returns the name of a stream socket.
    pub(super) fn of_listener(r#use: &str, listen: &ListenAddr) -> Self {
        let kind = match listen {
            ListenAddr::Tcp(_) => "tcp",
            ListenAddr::Unix(_) => "unix",
        };
        Self::new(r#use, kind, listen.to_string())
    }

    /// Whether the socket has this use.
    pub(super) fn is_for(&self, r#use: &str) -> bool {
        self.r#use == r#use
    }

    /// Whether a socket with this name can be used as `wanted`.
    pub(super) fn serves(&self, wanted: &Self) -> bool {
        if self.kind != wanted.kind {
            return false;
        }
        let Some(listen) = self.listen.strip_suffix(":0") else {
            return self.listen == wanted.listen;
        };
        // The system chose the port.
        let is_same_use = self.listen == wanted.listen && self.r#use == wanted.r#use;
        is_same_use
            || self
                .port
                .is_some_and(|port| wanted.listen == format!("{listen}:{port}"))
    }
}

/// Open sockets of another process, by name, until they are taken. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct InheritedSockets(Arc<Mutex<Vec<(SocketName, OwnedFd)>>>);

impl InheritedSockets {
    /// Takes the socket with this address and kind, if there is one. A port that the system chose is found by its use.
    pub(super) fn take(&self, wanted: &SocketName) -> Option<OwnedFd> {
        let mut sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let index = sockets.iter().position(|(name, _)| name.serves(wanted))?;
        Some(sockets.swap_remove(index).1)
    }

    /// Closes the sockets that were not taken.
    pub(super) fn close(&self) {
        let mut sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.clear();
    }
}

impl From<Vec<(SocketName, OwnedFd)>> for InheritedSockets {
    fn from(sockets: Vec<(SocketName, OwnedFd)>) -> Self {
        Self(Arc::new(Mutex::new(sockets)))
    }
}

/// Sockets that a gateway hands over, beside those of its listeners for clients.
#[derive(Debug, Default)]
pub(super) struct OpenSockets(Mutex<Vec<(SocketName, OwnedFd)>>);

impl OpenSockets {
    /// Adds another handle of a socket. Without it the next process binds the address itself.
    pub(super) fn add(&self, name: SocketName, socket: &impl AsFd) {
        if let Ok(descriptor) = socket.as_fd().try_clone_to_owned() {
            self.lock().push((name, descriptor));
        }
    }

    /// Closes the handles whose names match.
    pub(super) fn close(&self, matches: impl Fn(&SocketName) -> bool) {
        self.lock().retain(|(name, _)| !matches(name));
    }

    /// Returns other handles of the sockets.
    pub(super) fn handles(&self) -> Vec<(SocketName, OwnedFd)> {
        let sockets = self.lock();
        let handles = sockets
            .iter()
            .filter_map(|(name, descriptor)| Some((name.clone(), descriptor.try_clone().ok()?)));
        handles.collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(SocketName, OwnedFd)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the socket that a predecessor has passed on, or binds the address.
pub(super) fn bind(
    what: &str,
    listen: &ListenAddr,
    inherited: &InheritedSockets,
) -> Result<BoundSocket, BindError> {
    let name = SocketName::of_listener(what, listen);
    let bound = match listen {
        ListenAddr::Tcp(address) => match inherited.take(&name) {
            Some(descriptor) => Ok(BoundSocket::inherited_tcp(descriptor)),
            None => BoundSocket::tcp(*address),
        },
        // A service manager may have removed the directory of the socket since.
        ListenAddr::Unix(path) => match inherited.take(&name).filter(|_| path.exists()) {
            Some(descriptor) => Ok(BoundSocket::inherited_unix(descriptor, path)),
            None => BoundSocket::unix(path),
        },
    };
    bound.map_err(|cause| BindError::Listen {
        what: what.to_owned(),
        listen: listen.to_string(),
        cause,
    })
}

/// Names of the DNS server's sockets.
pub(super) fn dns_names(listen: SocketAddr) -> [SocketName; 2] {
    let name = |kind| SocketName::new(DNS_SERVER, kind, listen.to_string());
    [name("udp"), name("tcp")]
}

/// Takes over the sockets of the DNS server, if there are both.
pub(super) fn inherited_dns(
    inherited: &InheritedSockets,
    listen: SocketAddr,
) -> Option<dns::BoundSockets> {
    let [udp, tcp] = dns_names(listen);
    let (udp, tcp) = inherited.take(&udp).zip(inherited.take(&tcp))?;
    Some(dns::BoundSockets::inherited(udp, tcp))
}
