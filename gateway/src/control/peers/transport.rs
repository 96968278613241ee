//! Connections to other gateways below HTTP/2. Production uses TLS over TCP ([`connect_tls`]), and tests a simulated network.

use super::PeerError;
use crate::state::peer_addresses::PeerAddress;
use causeway_certs::Certificate;
use causeway_rt::socket::{CountedIo, IoActivity, set_tunnel_options};
use causeway_tunnel::wire;
use futures_util::future::BoxFuture;
use rustls::{ClientConfig, pki_types::ServerName};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{Instant, timeout},
};
use tokio_rustls::TlsConnector;

/// Time limit of a TCP connection attempt.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Byte stream to another gateway.
pub(crate) trait PeerStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> PeerStream for S {}

/// Connection to another gateway, on which HTTP/2 has not begun.
pub(crate) struct PeerIo {
    /// The stream.
    pub(crate) io: Box<dyn PeerStream>,
    /// Times of the last bytes on the network.
    pub(crate) traffic: Arc<IoActivity>,
    /// Round trip that was measured while the connection was opened.
    pub(crate) round_trip: Duration,
    /// Serial number of the other gateway's certificate, in hexadecimal.
    pub(crate) serial: String,
}

/// Connects to the gateway at an address, with this configuration and time limit of TLS.
pub(crate) type ConnectFn = Arc<
    dyn Fn(
            PeerAddress,
            Arc<ClientConfig>,
            Duration,
        ) -> BoxFuture<'static, Result<PeerIo, PeerError>>
        + Send
        + Sync,
>;

/// Connects to a gateway over TCP and TLS.
pub(crate) async fn connect_tls(
    address: PeerAddress,
    config: Arc<ClientConfig>,
    handshake_timeout: Duration,
) -> Result<PeerIo, PeerError> {
    let timeout_error = || io::Error::from(io::ErrorKind::TimedOut);
    let tcp = timeout(CONNECT_TIMEOUT, TcpStream::connect(address.address)).await;
    let tcp = tcp
        .map_err(|_| timeout_error())
        .flatten()
        .map_err(PeerError::Connect)?;
    set_tunnel_options(&tcp);
    let host = address.host.split('%').next().unwrap_or_default();
    let name = ServerName::try_from(host.to_owned());
    let name = name.map_err(|error| PeerError::Tls(error.to_string()))?;
    let started = Instant::now();
    let connecting = TlsConnector::from(config).connect(name, CountedIo::new(tcp));
    let connected = timeout(handshake_timeout, connecting).await;
    let mut io = connected
        .map_err(|_| timeout_error())
        .flatten()
        .map_err(|error| PeerError::Tls(error.to_string()))?;
    io.get_mut().1.set_buffer_limit(Some(wire::TLS_BUFFER));
    let certificate = io.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let certificate = certificate.map(Certificate::parse).transpose();
    let certificate = certificate.map_err(|error| PeerError::Tls(error.to_string()))?;
    Ok(PeerIo {
        serial: certificate.unwrap_or_default().serial_hex(),
        traffic: io.get_ref().0.traffic(),
        io: Box::new(io),
        round_trip: started.elapsed(),
    })
}
