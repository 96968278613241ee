//! Route of a client to an upstream: TCP or a unix socket, TLS or none, through a CONNECT or directly.

use crate::{cli, http1::Connection};
use anyhow::{Context, bail};
use causeway_certs::verify::provider;
use causeway_config::ListenAddr;
use causeway_rt::resolve;
use causeway_rt::socket::set_tcp_options;
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, HandshakeKind, RootCertStore, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject};
use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};
use tokio::{
    net::{TcpStream, UnixStream},
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Maximum time to open a connection. It is long because the benchmark measures overloaded gateways.
const OPENING: Duration = Duration::from_secs(30);

/// A route to an app, to be opened as often as needed.
pub(crate) struct Route {
    /// Address to dial.
    pub(crate) place: ListenAddr,
    /// TLS with the first hop, if any.
    pub(crate) tls: Option<Tls>,
    /// The target of a CONNECT.
    pub(crate) connect: Option<String>,
}

/// TLS with the first hop.
pub(crate) struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

/// An open route.
pub(crate) struct OpenRoute {
    /// The connection, at whose end the app listens.
    pub(crate) line: Connection,
    /// Whether its TLS session was resumed, if it has one.
    pub(crate) resumed: Option<bool>,
}

impl Route {
    /// The route to the target of a URL; `to` is dialled in its place. Over https any certificate is accepted.
    pub(crate) async fn of(
        url: &http::Uri,
        to: Option<SocketAddr>,
        caller: &cli::ClientIdentity,
    ) -> anyhow::Result<Self> {
        let host = url.host().context("the URL names no host")?;
        let secure = match url.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => bail!("the URL begins with neither http:// nor https://"),
        };
        let port = url.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let bare = host.trim_matches(['[', ']']);
        let place = match to {
            Some(to) => to,
            None => *resolve(bare, port)
                .await
                .with_context(|| format!("cannot resolve {host} (--to sets the address to dial)"))?
                .first()
                .with_context(|| format!("{host} has no address"))?,
        };
        let tls = if secure {
            let name = ServerName::try_from(bare.to_owned())?;
            Some(Tls::new(name, None, caller, &[b"http/1.1"])?)
        } else {
            None
        };
        Ok(Self {
            place: ListenAddr::Tcp(place),
            tls,
            connect: None,
        })
    }

    /// Opens it.
    ///
    /// # Errors
    ///
    /// If it is not open within half a minute, with the failed step.
    pub(crate) async fn open(&self) -> anyhow::Result<OpenRoute> {
        let opening = timeout(OPENING, self.lay());
        let opened = opening.await.context("not open within 30 s");
        opened
            .and_then(|laid| laid)
            .with_context(|| format!("{}", self.place))
    }

    async fn lay(&self) -> anyhow::Result<OpenRoute> {
        let mut opened = match &self.place {
            ListenAddr::Tcp(address) => {
                let tcp = TcpStream::connect(address).await.context("cannot dial")?;
                set_tcp_options(&tcp);
                self.secure(tcp).await?
            }
            ListenAddr::Unix(path) => {
                let unix = UnixStream::connect(path).await.context("cannot dial")?;
                self.secure(unix).await?
            }
        };
        if let Some(target) = &self.connect {
            let asked = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
            let head = opened.line.ask(asked.as_bytes()).await?;
            if head.status != 200 {
                bail!(
                    "CONNECT {target} was answered {} {}",
                    head.status,
                    head.reason
                );
            }
        }
        Ok(opened)
    }

    async fn secure<S: crate::http1::IoStream + 'static>(
        &self,
        socket: S,
    ) -> anyhow::Result<OpenRoute> {
        let Some(tls) = &self.tls else {
            return Ok(OpenRoute {
                line: Connection::new(socket),
                resumed: None,
            });
        };
        let io: TlsStream<S> = tls
            .connector
            .connect(tls.name.clone(), socket)
            .await
            .context("TLS failed")?;
        let resumed = io.get_ref().1.handshake_kind() == Some(HandshakeKind::Resumed);
        Ok(OpenRoute {
            line: Connection::new(io),
            resumed: Some(resumed),
        })
    }
}

impl Tls {
    /// Sessions are kept and resumed unless [`Tls::forgetful`] turns this off.
    pub(crate) fn new(
        name: ServerName<'static>,
        ca: Option<&Path>,
        caller: &cli::ClientIdentity,
        alpn: &[&[u8]],
    ) -> anyhow::Result<Self> {
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?;
        let builder = match ca {
            Some(ca) => builder.with_root_certificates(roots(ca)?),
            None => builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate(provider()))),
        };
        let mut config = match (&caller.cert, &caller.key) {
            (Some(cert), Some(key)) => {
                let read = PrivateKeyDer::from_pem_file(key)
                    .with_context(|| format!("no key in {}", key.display()))?;
                builder.with_client_auth_cert(certificates(cert)?, read)?
            }
            _ => builder.with_no_client_auth(),
        };
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        Ok(Self {
            connector: TlsConnector::from(Arc::new(config)),
            name,
        })
    }

    /// Each handshake is a full one.
    pub(crate) fn forgetful(mut self) -> Self {
        let mut config = ClientConfig::clone(self.connector.config());
        config.resumption = Resumption::disabled();
        self.connector = TlsConnector::from(Arc::new(config));
        self
    }
}

fn certificates(path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let place = || format!("no certificate in {}", path.display());
    let read: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path)
        .with_context(place)?
        .collect();
    let read = read.with_context(place)?;
    anyhow::ensure!(!read.is_empty(), "{}", place());
    Ok(read)
}

fn roots(path: &Path) -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate)?;
    }
    Ok(roots)
}

/// Accepts any certificate, at the cost of accepting a good one: the server's signature is verified.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
