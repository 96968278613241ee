//! One connection to a gateway: resolve, connect, maybe through a proxy, TLS.
//!
//! Names are resolved anew at each attempt and all their addresses are tried in turn, IPv4 and IPv6, each given
//! up after `timeouts.tcp`. Through a proxy (HTTP CONNECT or SOCKS5) the proxy resolves the name. Which
//! gateway answers is for its certificate to say, so the dialled name is only SNI.

use super::trouble::Trouble;
use crate::config::{Config, Timeouts};
use arc_swap::ArcSwap;
use causeway_config::host_port;
use causeway_rt::resolve;
use causeway_tunnel::{
    Target,
    socket::{Counted, tune_tunnel},
    wire,
};
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

/// How gateways are dialled.
pub(crate) struct Dialler {
    tls: ArcSwap<ClientConfig>,
    timeouts: Timeouts,
    proxy: Option<Matcher>,
}

/// A connection to a gateway, authenticated.
#[derive(Debug)]
pub(crate) struct Dialled {
    /// The connection.
    pub(crate) io: TlsStream<Counted<TcpStream>>,
    /// The gateway, as it was dialled.
    pub(crate) place: Place,
    /// What its TLS handshake took.
    pub(crate) round_trip: Duration,
}

/// Where a gateway was found: its configured name, and the address that it led to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    /// `host:port`, as configured or told.
    pub(crate) gateway: String,
    /// Its address; `None` behind a proxy.
    pub(crate) address: Option<SocketAddr>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.gateway)?;
        let own = self.address.map(|address| address.to_string());
        match own.filter(|own| *own != self.gateway) {
            Some(address) => write!(f, " ({address})"),
            None => Ok(()),
        }
    }
}

impl Dialler {
    /// Dials as `config` says, with this identity or trust.
    pub(crate) fn new(tls: Arc<ClientConfig>, config: &Config) -> Self {
        let proxy = config.proxy.as_ref().map(|proxy| {
            Matcher::builder()
                .all(proxy.expose())
                .no(config.no_proxy.join(","))
                .build()
        });
        Self {
            tls: ArcSwap::new(tls),
            timeouts: config.timeouts.clone(),
            proxy,
        }
    }

    /// From now on dials with this identity or trust.
    pub(crate) fn identify(&self, tls: Arc<ClientConfig>) {
        self.tls.store(tls);
    }

    /// The first of the gateways that answers. The place to `avoid` comes last: behind its address may be another gateway.
    ///
    /// # Errors
    /// The trouble that says most.
    pub(crate) async fn dial(
        &self,
        gateways: &[String],
        avoid: Option<&Place>,
    ) -> Result<Dialled, Trouble> {
        let mut worst: Option<Trouble> = None;
        for gateway in gateways {
            match self.dial_gateway(gateway, avoid).await {
                Ok(dialled) => {
                    if let Some(trouble) = worst {
                        let what = trouble.what();
                        info!(%gateway, what, "a gateway before this one could not be used");
                    }
                    return Ok(dialled);
                }
                Err(trouble) => {
                    debug!(%gateway, trouble = trouble.what(), "gateway not reached");
                    worst = Some(trouble.or_worse(worst));
                }
            }
        }
        if let Some(place) = avoid {
            match self.dial_at(place).await {
                Ok(dialled) => return Ok(dialled),
                Err(trouble) => worst = Some(trouble.or_worse(worst)),
            }
        }
        Err(worst.unwrap_or_else(|| Trouble::silent("no gateway is known")))
    }

    /// The gateway at this place.
    ///
    /// # Errors
    /// The trouble with it.
    pub(crate) async fn dial_at(&self, place: &Place) -> Result<Dialled, Trouble> {
        let (host, port) = host_port(&place.gateway).map_err(Trouble::silent)?;
        self.dial_place(place, host, port).await
    }

    /// Where each of the gateways is to be found now, in their order.
    pub(crate) async fn places_of(
        &self,
        gateways: &[String],
    ) -> Vec<(String, Result<Vec<Place>, Trouble>)> {
        let found = gateways.iter().map(async |gateway| {
            let places = match host_port(gateway) {
                Ok((host, port)) => self.places(gateway, host, port).await,
                Err(why) => Err(Trouble::silent(why)),
            };
            (gateway.clone(), places)
        });
        join_all(found).await
    }

    async fn dial_gateway(&self, gateway: &str, avoid: Option<&Place>) -> Result<Dialled, Trouble> {
        let (host, port) = host_port(gateway).map_err(Trouble::silent)?;
        let mut worst = None;
        for place in self.places(gateway, host, port).await? {
            if Some(&place) == avoid {
                continue;
            }
            match self.dial_place(&place, host, port).await {
                Ok(dialled) => return Ok(dialled),
                Err(trouble) => worst = Some(trouble.or_worse(worst)),
            }
        }
        Err(worst
            .unwrap_or_else(|| Trouble::silent(format!("{gateway} leads to no other address"))))
    }

    fn intercept(&self, host: &str, port: u16) -> Option<Intercept> {
        let uri: Uri = format!("https://{}", Target::new(host, port))
            .parse()
            .ok()?;
        self.proxy.as_ref()?.intercept(&uri)
    }

    async fn places(&self, gateway: &str, host: &str, port: u16) -> Result<Vec<Place>, Trouble> {
        let place = |address| Place {
            gateway: gateway.to_owned(),
            address,
        };
        if self.intercept(host, port).is_some() {
            return Ok(vec![place(None)]);
        }
        match timeout(self.timeouts.tls, resolve(host, port)).await {
            Ok(Ok(addresses)) => Ok(addresses
                .into_iter()
                .map(|address| place(Some(address)))
                .collect()),
            Ok(Err(error)) => Err(Trouble::silent(format!(
                "could not resolve {host}: {error}"
            ))),
            Err(_) => Err(Trouble::silent(format!("{host} was not resolved in time"))),
        }
    }

    async fn dial_place(&self, place: &Place, host: &str, port: u16) -> Result<Dialled, Trouble> {
        let tcp = match (place.address, self.intercept(host, port)) {
            (Some(address), _) => self.connect(place, address).await?,
            (None, Some(proxy)) => self.through(&proxy, host, port).await?,
            (None, None) => {
                return Err(Trouble::silent(format!("{} has no address", place.gateway)));
            }
        };
        tune_tunnel(&tcp);
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| Trouble::silent(format!("{host} is no host name")))?;
        let began = Instant::now();
        let connector = TlsConnector::from(self.tls.load_full());
        match timeout(
            self.timeouts.tls,
            connector.connect(name, Counted::new(tcp)),
        )
        .await
        {
            Ok(Ok(mut io)) => {
                io.get_mut().1.set_buffer_limit(Some(wire::TLS_BUFFER));
                Ok(Dialled {
                    io,
                    place: place.clone(),
                    round_trip: began.elapsed(),
                })
            }
            Ok(Err(error)) => Err(Trouble::handshake(&place.gateway, &error)),
            Err(_) => Err(Trouble::slow_handshake(&place.gateway)),
        }
    }

    async fn connect(&self, place: &Place, address: SocketAddr) -> Result<TcpStream, Trouble> {
        let bound = self.timeouts.tcp;
        connect(address, bound).await.map_err(|error| {
            let what = format!("could not dial {} ({address}): {error}", place.gateway);
            if error.kind() == io::ErrorKind::TimedOut {
                Trouble::unanswered(what, bound)
            } else {
                Trouble::silent(what)
            }
        })
    }

    /// A connection through the proxy.
    async fn through(
        &self,
        proxy: &Intercept,
        host: &str,
        port: u16,
    ) -> Result<TcpStream, Trouble> {
        let bound = self.timeouts.tcp;
        let dial =
            service_fn(
                move |uri: Uri| async move { dial_proxy(&uri, bound).await.map(TokioIo::new) },
            );
        let target: Uri = format!("https://{}", Target::new(host, port))
            .parse()
            .map_err(|_| Trouble::silent(format!("{host} is no host")))?;
        let uri = proxy.uri().clone();
        let asking = async {
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
        match timeout(bound + self.timeouts.tls, asking).await {
            Ok(connected) => connected.map(TokioIo::into_inner),
            Err(_) => Err(Trouble::silent("the proxy did not answer in time")),
        }
    }
}

fn refused_by_proxy(error: &(dyn Error + 'static)) -> Trouble {
    let mut cause = Some(error);
    while let Some(each) = cause {
        if let Some(error) = each.downcast_ref::<io::Error>() {
            return Trouble::silent(format!("the proxy could not be used: {error}"));
        }
        cause = each.source();
    }
    Trouble::refused(format!("the proxy refused: {error}"))
}

async fn dial_proxy(uri: &Uri, bound: Duration) -> io::Result<TcpStream> {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let port = uri
        .port_u16()
        .unwrap_or(if uri.scheme_str() == Some("http") {
            80
        } else {
            1080
        });
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in resolve(host, port).await? {
        match connect(address, bound).await {
            Ok(tcp) => return Ok(tcp),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn connect(address: SocketAddr, bound: Duration) -> io::Result<TcpStream> {
    timeout(bound, TcpStream::connect(address))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
