//! TLS error that ended a tunnel's connection.
//!
//! HTTP/2 only gets a failed read and no TLS alert. The alert determines how long an edge waits: it must not dial a gateway
//! that does not know its certificate every two seconds. With TLS 1.3 the gateway sends the alert only after the edge has
//! completed its handshake.

use super::super::connect_error::{self, ConnectError};
use causeway_rt::socket::CountedIo;
use causeway_tunnel::{
    TunnelEnd,
    io_observer::{IoObserver, ObservedIo},
};
use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// Connection of a tunnel.
pub(super) type TunnelIo = ObservedIo<TlsStream<CountedIo<TcpStream>>, TlsErrorSlot>;

/// TLS error that ended a connection, if there was one.
#[derive(Clone, Debug, Default)]
pub(super) struct TlsErrorSlot(Arc<Mutex<Option<rustls::Error>>>);

impl TlsErrorSlot {
    pub(super) fn to_connect_error(&self, ended: &TunnelEnd) -> ConnectError {
        let tls_error = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ConnectError::tunnel_ended(ended, tls_error.as_ref())
    }
}

impl IoObserver for TlsErrorSlot {
    fn on_read_failed(&mut self, error: &io::Error) {
        if let Some(error) = connect_error::find_tls_error(error) {
            let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            *slot = Some(error.clone());
        }
    }
}
