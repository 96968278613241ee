//! Connections to members of etcd, with TLS for `https://`.
//!
//! The files of the CA and of the certificate are read again for each connection, so a renewed certificate needs no restart.

use std::{
    error::Error,
    fmt, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    task::{Context, Poll, ready},
    time::Duration,
};

use crate::config::{Certificate, Etcd};
use causeway_certs::verify::provider;
use causeway_rt::resolve;
use futures_util::{FutureExt, future::BoxFuture};
use http::Uri;
use hyper_rustls::{HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::{
    client::legacy::connect::{HttpConnector, dns::Name},
    rt::TokioIo,
};
use rustls::{CertificateError, ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio::{net::TcpStream, task::spawn_blocking};
use tower_service::Service;

/// Time limit of a connection to one host, so that a host that does not answer leaves time for the next member.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Time after which TCP probes an idle connection, and interval of the probes. A peer that is silent for 25 s is gone.
const KEEPALIVE_TIME: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;

/// Files for TLS.
#[derive(Clone, Debug)]
pub(crate) struct TlsFiles {
    ca: Option<PathBuf>,
    certificate: Option<Certificate>,
}

impl TlsFiles {
    pub(crate) fn new(config: &Etcd) -> Self {
        Self {
            ca: config.ca.clone(),
            certificate: config.certificate.clone(),
        }
    }

    /// Reads the files.
    ///
    /// # Errors
    /// If a file cannot be read or parsed.
    pub(crate) fn load(&self) -> Result<ClientConfig, FileError> {
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| FileError(error.to_string()))?
            .with_root_certificates(self.roots()?);
        let Some(Certificate { chain, key }) = &self.certificate else {
            return Ok(builder.with_no_client_auth());
        };
        let certificates = read_certificates(chain)?;
        let private_key = PrivateKeyDer::from_pem_file(key);
        let private_key = private_key.map_err(|error| FileError::new(key, &error))?;
        builder
            .with_client_auth_cert(certificates, private_key)
            .map_err(|error| FileError::new(chain, &error))
    }

    fn roots(&self) -> Result<RootCertStore, FileError> {
        let mut roots = RootCertStore::empty();
        let Some(path) = &self.ca else {
            let system = rustls_native_certs::load_native_certs();
            if roots.add_parsable_certificates(system.certs).0 == 0 {
                let message = "the system has no CA certificates; set state.etcd.ca";
                return Err(FileError(message.to_owned()));
            }
            return Ok(roots);
        };
        if roots.add_parsable_certificates(read_certificates(path)?).0 == 0 {
            return Err(FileError::new(path, &"holds no usable CA certificate"));
        }
        Ok(roots)
    }

    /// Returns an explanation of an error of TLS.
    fn explain(&self, error: &rustls::Error) -> String {
        use CertificateError as Fault;
        let rustls::Error::InvalidCertificate(fault) = error else {
            return match error {
                rustls::Error::AlertReceived(alert) => format!(
                    "it ended TLS with the alert {alert:?}; if it requires client certificates, check state.etcd.certificate"
                ),
                _ => format!("TLS: {error}"),
            };
        };
        match fault {
            Fault::UnknownIssuer | Fault::BadSignature => match &self.ca {
                Some(path) => format!(
                    "its certificate is not signed by a CA of {} (state.etcd.ca)",
                    path.display()
                ),
                None => "its certificate is not signed by a CA that the system trusts; set state.etcd.ca".to_owned(),
            },
            Fault::NotValidForName | Fault::NotValidForNameContext { .. } => {
                "its certificate does not contain the host; correct state.etcd.endpoints, or add the host to its certificate".to_owned()
            }
            Fault::Expired | Fault::ExpiredContext { .. } => {
                "its certificate has expired; renew the certificate of etcd".to_owned()
            }
            other => format!("its certificate is not valid: {other}"),
        }
    }

    /// Returns the reason of a failed request.
    pub(crate) fn reason(&self, error: &(dyn Error + 'static)) -> String {
        let mut cause = Some(error);
        let mut last = error;
        while let Some(error) = cause {
            if let Some(error) = error.downcast_ref::<FileError>() {
                return error.to_string();
            }
            if let Some(error) = error.downcast_ref::<rustls::Error>() {
                return self.explain(error);
            }
            // rustls' errors are in those of the connection, which have them not as their source.
            let inner = error
                .downcast_ref::<io::Error>()
                .and_then(io::Error::get_ref);
            last = error;
            cause = match inner {
                Some(inner) => Some(inner),
                None => error.source(),
            };
        }
        last.to_string()
    }
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let certificates = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let certificates: Vec<_> = certificates.map_err(|error| FileError::new(path, &error))?;
    if certificates.is_empty() {
        return Err(FileError::new(path, &"holds no certificate"));
    }
    Ok(certificates)
}

/// A file that cannot be used.
#[derive(Debug)]
pub(crate) struct FileError(String);

impl FileError {
    pub(crate) fn new(path: &Path, why: &impl fmt::Display) -> Self {
        Self(format!("{}: {why}", path.display()))
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl Error for FileError {}

/// Connector of the HTTP client.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    http: HttpConnector<Resolver>,
    tls: TlsFiles,
}

impl Connector {
    pub(crate) fn new(tls: TlsFiles) -> Self {
        let mut http = HttpConnector::new_with_resolver(Resolver);
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(CONNECT_TIMEOUT));
        http.set_keepalive(Some(KEEPALIVE_TIME));
        http.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
        http.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
        Self { http, tls }
    }
}

impl Service<Uri> for Connector {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        ready!(self.http.poll_ready(context))?;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, url: Uri) -> Self::Future {
        let (mut http, tls) = (self.http.clone(), self.tls.clone());
        async move {
            if url.scheme_str() != Some("https") {
                return Ok(MaybeHttpsStream::Http(http.call(url).await?));
            }
            let config = spawn_blocking(move || tls.load()).await??;
            let builder = HttpsConnectorBuilder::new().with_tls_config(config);
            let mut connector = builder.https_only().enable_http1().wrap_connector(http);
            connector.call(url).await
        }
        .boxed()
    }
}

/// Resolver of host names, the same one as of all other connections.
#[derive(Clone, Debug)]
struct Resolver;

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        async move {
            let mut addresses = resolve(name.as_str(), 0).await?;
            // This name is allowed without TLS, so it must be this machine.
            if name.as_str().eq_ignore_ascii_case("localhost") {
                addresses.retain(|address| address.ip().to_canonical().is_loopback());
            }
            Ok(addresses.into_iter())
        }
        .boxed()
    }
}
