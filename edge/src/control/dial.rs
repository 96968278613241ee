//! Connection to a gateway: name resolution, TCP, an optional proxy, and TLS.
//!
//! Names are resolved again at each attempt. Their addresses are tried as in RFC 8305 ([`happy_eyeballs`]). Each attempt ends after
//! `timeouts.tcp`. A proxy (HTTP CONNECT or SOCKS5) resolves the name itself. The dialled name is only the SNI, because the
//! certificate identifies the gateway.

use super::connect_error::ConnectError;
use crate::config::{Config, Timeouts};
use arc_swap::ArcSwap;
use causeway_config::{Secret, host_port};
use causeway_rt::happy_eyeballs::{self, connect_within, interleave_families, race};
use causeway_rt::resolve;
use causeway_rt::socket::{CountedIo, set_tunnel_options};
use causeway_tunnel::{Target, wire};
use futures_util::future::join_all;
use http::Uri;
use hyper_util::{
    client::{
        legacy::connect::proxy::{SocksV5, Tunnel},
        proxy::matcher::{Intercept, Matcher},
    },
    rt::TokioIo,
};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use std::{error::Error, fmt, io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    net::TcpStream,
    time::{Instant, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tower::{ServiceExt, service_fn};
use tracing::{debug, info};

/// Connector that dials gateways.
pub(crate) struct GatewayConnector {
    tls: ArcSwap<ClientConfig>,
    timeouts: Timeouts,
    proxy: Option<Proxy>,
}

/// Proxy, and the targets that are dialled without it.
struct Proxy {
    uri: Secret,
    /// Entries of `no_proxy`: `*`, a domain, an address, a network, or a host with the one port that is exempt.
    exempt: Vec<String>,
}

impl Proxy {
    /// Returns the proxy for this target, or `None` if the target is exempt.
    fn intercept(&self, host: &str, port: u16) -> Option<Intercept> {
        let for_port = |entry: &String| match host_port(entry) {
            Ok((host, only_port)) => (only_port == port).then(|| host.to_owned()),
            Err(_) => Some(entry.clone()),
        };
        let exempt: Vec<_> = self.exempt.iter().filter_map(for_port).collect();
        if exempt.iter().any(|entry| entry.trim() == "*") {
            return None;
        }
        let uri = format!("https://{}", Target::new(host, port));
        let matcher = Matcher::builder()
            .all(self.uri.expose())
            .no(exempt.join(","))
            .build();
        matcher.intercept(&uri.parse().ok()?)
    }
}

/// Authenticated connection to a gateway.
#[derive(Debug)]
pub(crate) struct GatewayConnection {
    pub(crate) io: TlsStream<CountedIo<TcpStream>>,
    /// Gateway, as it was dialled.
    pub(crate) gateway_addr: GatewayAddr,
    /// Duration of the TLS handshake.
    pub(crate) round_trip: Duration,
}

/// Address of a gateway: its configured name, and the address that the name resolved to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GatewayAddr {
    /// `host:port`, as configured or announced.
    pub(crate) gateway: String,
    /// Resolved address, or `None` behind a proxy.
    pub(crate) address: Option<SocketAddr>,
}

impl fmt::Display for GatewayAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.gateway)?;
        let resolved = self.address.map(|address| address.to_string());
        match resolved.filter(|own| *own != self.gateway) {
            Some(address) => write!(f, " ({address})"),
            None => Ok(()),
        }
    }
}

impl GatewayConnector {
    /// Creates a connector with the timeouts and the proxy of `config`. `tls` has the identity and the trusted roots.
    pub(crate) fn new(tls: Arc<ClientConfig>, config: &Config) -> Self {
        let proxy = config.proxy.as_ref().map(|uri| Proxy {
            uri: uri.clone(),
            exempt: config.no_proxy.clone(),
        });
        Self {
            tls: ArcSwap::new(tls),
            timeouts: config.timeouts.clone(),
            proxy,
        }
    }

    /// Sets the identity and the trusted roots for all later dials.
    pub(crate) fn set_tls(&self, tls: Arc<ClientConfig>) {
        self.tls.store(tls);
    }

    /// Connects to the first of the gateways that answers. The address `avoid` is tried last, because another gateway may be
    /// behind it.
    ///
    /// # Errors
    /// The most informative of all errors.
    pub(crate) async fn dial(
        &self,
        gateways: &[String],
        avoid: Option<&GatewayAddr>,
    ) -> Result<GatewayConnection, ConnectError> {
        let mut worst: Option<ConnectError> = None;
        for gateway in gateways {
            match self.dial_gateway(gateway, avoid).await {
                Ok(dialled) => {
                    if let Some(error) = worst {
                        let what = error.detail();
                        info!(%gateway, what, "connected to this gateway after others could not be used");
                    }
                    return Ok(dialled);
                }
                Err(error) => {
                    debug!(%gateway, trouble = error.detail(), "cannot connect to gateway");
                    worst = Some(error.or_worse(worst));
                }
            }
        }
        if let Some(gateway_addr) = avoid {
            match self.dial_addr(gateway_addr).await {
                Ok(dialled) => return Ok(dialled),
                Err(error) => worst = Some(error.or_worse(worst)),
            }
        }
        Err(worst.unwrap_or_else(|| ConnectError::silent("no gateway is configured")))
    }

    /// Connects to the gateway at this address.
    ///
    /// # Errors
    /// If the connection or the TLS handshake fails.
    pub(crate) async fn dial_addr(
        &self,
        gateway_addr: &GatewayAddr,
    ) -> Result<GatewayConnection, ConnectError> {
        let (host, port) = host_port(&gateway_addr.gateway).map_err(ConnectError::silent)?;
        let tcp = self.connect(gateway_addr, host, port).await?;
        self.handshake(gateway_addr, tcp, host).await
    }

    /// Resolves the current addresses of each gateway, in the order of `gateways`.
    pub(crate) async fn resolve_all(
        &self,
        gateways: &[String],
    ) -> Vec<(String, Result<Vec<GatewayAddr>, ConnectError>)> {
        let resolving = gateways.iter().map(async |gateway| {
            let addresses = match host_port(gateway) {
                Ok((host, port)) => self.resolve_addrs(gateway, host, port).await,
                Err(why) => Err(ConnectError::silent(why)),
            };
            (gateway.clone(), addresses)
        });
        join_all(resolving).await
    }

    async fn dial_gateway(
        &self,
        gateway: &str,
        avoid: Option<&GatewayAddr>,
    ) -> Result<GatewayConnection, ConnectError> {
        let (host, port) = host_port(gateway).map_err(ConnectError::silent)?;
        let mut worst = None;
        let mut addresses = self.resolve_addrs(gateway, host, port).await?;
        addresses.retain(|place| Some(place) != avoid);
        let is_v6 = |place: &GatewayAddr| place.address.is_some_and(|address| address.is_ipv6());
        let mut addresses = interleave_families(addresses, is_v6);
        // If a server that is not a gateway responds, the next address is tried.
        loop {
            let connect = |addr: GatewayAddr| async move { self.connect(&addr, host, port).await };
            let (connected, errors) = race(&mut addresses, connect).await;
            worst = errors
                .into_iter()
                .fold(worst, |worst, error| Some(error.or_worse(worst)));
            let Some((addr, tcp)) = connected else { break };
            match self.handshake(&addr, tcp, host).await {
                Ok(dialled) => return Ok(dialled),
                Err(error) => worst = Some(error.or_worse(worst)),
            }
        }
        Err(worst.unwrap_or_else(|| {
            ConnectError::silent(format!("{gateway} resolves to no other address"))
        }))
    }

    fn intercept(&self, host: &str, port: u16) -> Option<Intercept> {
        self.proxy.as_ref()?.intercept(host, port)
    }

    async fn resolve_addrs(
        &self,
        gateway: &str,
        host: &str,
        port: u16,
    ) -> Result<Vec<GatewayAddr>, ConnectError> {
        let to_addr = |address| GatewayAddr {
            gateway: gateway.to_owned(),
            address,
        };
        if self.intercept(host, port).is_some() {
            return Ok(vec![to_addr(None)]);
        }
        match timeout(self.timeouts.tls, resolve(host, port)).await {
            Ok(Ok(addresses)) => Ok(addresses
                .into_iter()
                .map(|address| to_addr(Some(address)))
                .collect()),
            Ok(Err(error)) => Err(ConnectError::silent(format!(
                "could not resolve {host}: {error}"
            ))),
            Err(_) => Err(ConnectError::silent(format!(
                "timeout while resolving {host}"
            ))),
        }
    }

    /// Opens a TCP connection to this address, or through the proxy.
    async fn connect(
        &self,
        gateway_addr: &GatewayAddr,
        host: &str,
        port: u16,
    ) -> Result<TcpStream, ConnectError> {
        match (gateway_addr.address, self.intercept(host, port)) {
            (Some(address), _) => self.connect_to(gateway_addr, address).await,
            (None, Some(proxy)) => self.connect_via_proxy(&proxy, host, port).await,
            (None, None) => Err(ConnectError::silent(format!(
                "{} has no address",
                gateway_addr.gateway
            ))),
        }
    }

    async fn handshake(
        &self,
        gateway_addr: &GatewayAddr,
        tcp: TcpStream,
        host: &str,
    ) -> Result<GatewayConnection, ConnectError> {
        set_tunnel_options(&tcp);
        // The zone of an address is local to this machine (RFC 6874).
        let host = host.split_once('%').map_or(host, |(address, _)| address);
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| ConnectError::silent(format!("{host} is not a host name")))?;
        let started = Instant::now();
        let connector = TlsConnector::from(self.tls.load_full());
        match timeout(
            self.timeouts.tls,
            connector.connect(name, CountedIo::new(tcp)),
        )
        .await
        {
            Ok(Ok(mut io)) => {
                io.get_mut().1.set_buffer_limit(Some(wire::TLS_BUFFER));
                Ok(GatewayConnection {
                    io,
                    gateway_addr: gateway_addr.clone(),
                    round_trip: started.elapsed(),
                })
            }
            Ok(Err(error)) => Err(ConnectError::handshake(&gateway_addr.gateway, &error)),
            Err(_) => Err(ConnectError::slow_handshake(&gateway_addr.gateway)),
        }
    }

    async fn connect_to(
        &self,
        gateway_addr: &GatewayAddr,
        address: SocketAddr,
    ) -> Result<TcpStream, ConnectError> {
        let tcp_timeout = self.timeouts.tcp;
        connect_within(address, tcp_timeout).await.map_err(|error| {
            let what = format!(
                "could not dial {} ({address}): {error}",
                gateway_addr.gateway
            );
            if error.kind() == io::ErrorKind::TimedOut {
                ConnectError::unanswered(what, tcp_timeout)
            } else {
                ConnectError::silent(what)
            }
        })
    }

    /// Opens a connection through the proxy.
    async fn connect_via_proxy(
        &self,
        proxy: &Intercept,
        host: &str,
        port: u16,
    ) -> Result<TcpStream, ConnectError> {
        let tcp_timeout = self.timeouts.tcp;
        let dial = service_fn(move |uri: Uri| async move {
            dial_proxy(&uri, tcp_timeout).await.map(TokioIo::new)
        });
        let target: Uri = format!("https://{}", Target::new(host, port))
            .parse()
            .map_err(|_| ConnectError::silent(format!("{host} is not a host")))?;
        let uri = proxy.uri().clone();
        let connecting = async {
            if uri
                .scheme_str()
                .is_some_and(|scheme| scheme.starts_with("socks5"))
            {
                let mut socks = SocksV5::new(uri, dial);
                if let Some((user, password)) = proxy.raw_auth() {
                    socks = socks.with_auth(user.to_owned(), password.to_owned());
                }
                socks
                    .oneshot(target)
                    .await
                    .map_err(|error| refused_by_proxy(&error))
            } else {
                let mut tunnel = Tunnel::new(uri, dial);
                if let Some(credentials) = proxy.basic_auth() {
                    tunnel = tunnel.with_auth(credentials.clone());
                }
                tunnel
                    .oneshot(target)
                    .await
                    .map_err(|error| refused_by_proxy(&error))
            }
        };
        match timeout(tcp_timeout + self.timeouts.tls, connecting).await {
            Ok(connected) => connected.map(TokioIo::into_inner),
            Err(_) => Err(ConnectError::silent("the proxy did not respond in time")),
        }
    }
}

fn refused_by_proxy(error: &(dyn Error + 'static)) -> ConnectError {
    let mut cause = Some(error);
    while let Some(current) = cause {
        if let Some(error) = current.downcast_ref::<io::Error>() {
            return ConnectError::silent(format!("cannot use the proxy: {error}"));
        }
        cause = current.source();
    }
    let what = format!("the proxy refused: {error}");
    // The types of these errors are private to the library.
    let denials = ["proxy authorization required", "credentials not accepted"];
    if denials.iter().any(|denied| what.ends_with(denied)) {
        return ConnectError::unwelcome(format!("{what}; set the user and password in `proxy`"));
    }
    ConnectError::refused(what)
}

async fn dial_proxy(uri: &Uri, connect_timeout: Duration) -> io::Result<TcpStream> {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let port = uri
        .port_u16()
        .unwrap_or(if uri.scheme_str() == Some("http") {
            80
        } else {
            1080
        });
    happy_eyeballs::connect(host, port, connect_timeout).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn no_proxy_matches_all_or_domains_networks_and_ports() {
        for (exempt, host, port, direct) in [
            ("*", "gw.example", 10262, true),
            ("*", "10.0.0.1", 10262, true),
            ("*", "2001:db8::1", 10262, true),
            ("gw.example:10262", "gw.example", 10262, true),
            ("gw.example:10262", "gw.example", 443, false),
            ("10.0.0.1:10262", "10.0.0.1", 10262, true),
            ("10.0.0.1:10262", "10.0.0.1", 443, false),
            ("[2001:db8::1]:10262", "2001:db8::1", 10262, true),
            (".example", "gw.example", 10262, true),
            ("10.0.0.0/8", "10.0.0.1", 10262, true),
            ("other.example", "gw.example", 10262, false),
        ] {
            let proxy = Proxy {
                uri: Secret::new("http://proxy.example:3128"),
                exempt: vec!["localhost".into(), exempt.into()],
            };
            let found = proxy.intercept(host, port).is_none();
            assert_eq!(found, direct, "{exempt}: {host} {port}");
        }
    }

    /// Returns the error of a proxy that sends these answers, one after each read.
    async fn trouble_with(scheme: &str, answers: &[&'static [u8]]) -> ConnectError {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let proxy = async {
            let (mut tcp, _) = listener.accept().await.unwrap();
            for answer in answers {
                assert!(tcp.read(&mut [0; 1024]).await.unwrap() > 0);
                tcp.write_all(answer).await.unwrap();
            }
            // Reads until the edge closes the connection.
            while tcp.read(&mut [0; 1024]).await.unwrap_or(0) > 0 {}
        };
        let config = Config {
            proxy: Some(Secret::new(format!("{scheme}://user:wrong@{address}"))),
            ..Config::default()
        };
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let tls = ClientConfig::builder_with_provider(provider.into())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let dialler = GatewayConnector::new(Arc::new(tls), &config);
        let gateways = ["gw.example:10262".to_owned()];
        let (done, ()) = tokio::join!(dialler.dial(&gateways, None), proxy);
        done.unwrap_err()
    }

    #[tokio::test]
    async fn a_proxy_that_rejects_the_password_is_retried_most_rarely() {
        let http: &[&[u8]] = &[b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"];
        // RFC 1929: authentication with user and password, refused.
        let socks: &[&[u8]] = &[&[5, 2], &[1, 1]];
        let busy: &[&[u8]] = &[b"HTTP/1.1 502 Bad Gateway\r\n\r\n"];
        for (scheme, answers, word) in [
            ("http", http, "refused_permanently"),
            ("socks5h", socks, "refused_permanently"),
            ("http", busy, "refused"),
        ] {
            let trouble = trouble_with(scheme, answers).await;
            assert_eq!(trouble.label(), word, "{}", trouble.detail());
        }
    }
}
