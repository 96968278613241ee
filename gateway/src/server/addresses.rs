//! Listen addresses of a gateway, and the addresses that it announces to edges.

use super::{error::BindError, handover::InheritedSockets};
use crate::{
    config::{self, ListenAddr},
    state::GatewayEndpoints,
};
use causeway_rt::listener::BoundSocket;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Use of the tunnel port's socket.
pub(super) const TUNNEL_PORT: &str = "the tunnel port (tunnel.listen)";

/// Returns the endpoints that are announced to edges: this gateway's addresses (by default its listen address), those of further
/// gateways, and the number of gateways.
pub(super) fn advertised(
    config: &config::Tunnel,
    bound_address: Option<SocketAddr>,
) -> GatewayEndpoints {
    let mut all = config.advertise.clone();
    if all.is_empty() {
        let listens = bound_address.filter(|address| !address.ip().is_unspecified());
        all.extend(listens.map(|address| address.to_string()));
    }
    all.extend_from_slice(&config.gateways);
    GatewayEndpoints {
        gateways: all,
        replicas: config.replicas,
    }
}

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
