//! How TLS ended a tunnel's connection.
//!
//! HTTP/2 above sees a failed read and knows no alerts, yet an alert decides how long an edge stays away: a
//! gateway that does not know its certificate is not to be asked every two seconds. With TLS 1.3 it says so
//! only after the edge's handshake is done.

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

/// TLS's own error, where it was the end of a connection.
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
