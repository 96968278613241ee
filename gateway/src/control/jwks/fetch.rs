//! One fetch of a JSON Web Key Set: resolve, connect, TLS, one GET.
//!
//! The server is trusted by its certificate; without TLS the server must be this machine. Redirects are not followed. At most
//! [`MAX_RESPONSE_BYTES`] bytes of a response are read.

use crate::state::KeySet;
use bytes::Bytes;
use causeway_certs::verify::provider;
use causeway_rt::{http_client, resolve};
use causeway_tunnel::wire;
use http::{
    Request, StatusCode, Uri,
    header::{ACCEPT, HOST, USER_AGENT},
};
use http_body_util::{BodyExt, Full, Limited};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject};
use std::{fmt, sync::Arc, time::Duration};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Maximum size of a response in bytes; a set with 256 keys and their certificates fits.
const MAX_RESPONSE_BYTES: usize = 1 << 20;

/// Server from which a key set is fetched.
pub(super) struct JwksSource {
    url: Uri,
    host: String,
    port: u16,
    /// TLS; `None` means plain HTTP.
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// URL without its query, which may contain a secret.
impl fmt::Display for JwksSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let authority = self
            .url
            .authority()
            .map_or("", |authority| authority.as_str());
        let scheme = self.url.scheme_str().unwrap_or_default();
        write!(f, "{scheme}://{authority}{}", self.url.path())
    }
}

/// Timeout of connecting to one address, so that an address that does not answer leaves time for the next one.
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);

impl JwksSource {
    /// Returns the source for a URL. Its server must present a certificate of `ca` (in PEM), or else of a CA that the system
    /// trusts.
    ///
    /// # Errors
    /// If there is no CA to verify the server with.
    pub(super) fn new(url: &Uri, ca: Option<&str>) -> Result<Self, String> {
        let host = url.host().unwrap_or_default();
        let host = host
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned();
        let is_https = url.scheme_str() == Some("https");
        let tls = if is_https {
            let name = ServerName::try_from(host.clone());
            let name = name.map_err(|_| format!("{host} is not a valid name in a certificate"))?;
            Some((connector(root_store(ca)?)?, name))
        } else {
            None
        };
        Ok(Self {
            port: url.port_u16().unwrap_or(if is_https { 443 } else { 80 }),
            url: url.clone(),
            host,
            tls,
        })
    }

    /// Returns the current keys of the source.
    ///
    /// # Errors
    /// The reason why there are none.
    pub(super) async fn fetch(&self) -> Result<KeySet, String> {
        let tcp = self.dial().await?;
        let text = match &self.tls {
            None => self.get(tcp).await?,
            Some((connector, name)) => {
                let tls = connector.connect(name.clone(), tcp).await;
                let tls = tls.map_err(|error| format!("TLS: {error}"))?;
                self.get(tls).await?
            }
        };
        KeySet::parse(&text)
    }

    async fn dial(&self) -> Result<TcpStream, String> {
        let (host, port) = (&self.host, self.port);
        let addresses = resolve(host, port).await;
        let found = addresses.map_err(|error| format!("{host} cannot be resolved: {error}"))?;
        let mut last_error =
            format!("{host} is not this machine, but http:// is allowed only for this machine");
        for address in found {
            // The name may resolve to another address than it did when the configuration was read.
            if self.tls.is_none() && !address.ip().to_canonical().is_loopback() {
                continue;
            }
            match timeout(DIAL_TIMEOUT, TcpStream::connect(address)).await {
                Ok(Ok(tcp)) => return Ok(tcp),
                Ok(Err(error)) => last_error = format!("{address} cannot be reached: {error}"),
                Err(_) => last_error = format!("{address} does not answer within {DIAL_TIMEOUT:?}"),
            }
        }
        Err(last_error)
    }

    async fn get(
        &self,
        io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> Result<Bytes, String> {
        let authority = self
            .url
            .authority()
            .map_or("", |authority| authority.as_str());
        let path = self.url.path_and_query().map_or("/", |path| path.as_str());
        let request = Request::get(path)
            .header(HOST, authority)
            .header(ACCEPT, "application/json")
            .header(USER_AGENT, concat!("causeway/", env!("CARGO_PKG_VERSION")))
            .body(Full::<Bytes>::default())
            .map_err(|error| error.to_string())?;
        let (response, _connection) = http_client::send(io, request)
            .await
            .map_err(|error| format!("no answer: {error}"))?;
        let status = response.status();
        if status.is_redirection() {
            return Err(format!(
                "{status}: redirects are not followed; configure the URL to which it redirects"
            ));
        }
        if status != StatusCode::OK {
            return Err(format!("the answer is {status}"));
        }
        let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES)
            .collect()
            .await;
        body.map(http_body_util::Collected::to_bytes)
            .map_err(|error| {
                format!(
                    "the answer is larger than {MAX_RESPONSE_BYTES} bytes or is incomplete: {error}"
                )
            })
    }
}

fn connector(roots: RootCertStore) -> Result<TlsConnector, String> {
    let config =
        ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let config = config.map_err(|error| error.to_string())?;
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![wire::ALPN_HTTP11.to_vec()];
    Ok(Arc::new(config).into())
}

fn root_store(ca: Option<&str>) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    let Some(ca) = ca else {
        let native_certs = rustls_native_certs::load_native_certs();
        if roots.add_parsable_certificates(native_certs.certs).0 == 0 {
            return Err("the system has no CA certificates to verify the URL of the keys (install ca-certificates, or set jwks_ca)".to_owned());
        }
        return Ok(roots);
    };
    for root in CertificateDer::pem_slice_iter(ca.as_bytes()) {
        let root = root.map_err(|error| error.to_string())?;
        roots.add(root).map_err(|error| error.to_string())?;
    }
    if roots.is_empty() {
        return Err("it contains no certificate".to_owned());
    }
    Ok(roots)
}
