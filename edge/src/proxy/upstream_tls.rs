//! TLS to upstreams: verified by the CA that the port's configuration names, or not at all if the configuration says so.
//!
//! A port with the scheme https does not load without a CA and without `verify: false`, so certificates are never silently
//! unverified. Plain requests offer HTTP/2, and upgrades offer only HTTP/1.1. Kubelets select neither with ALPN, and speak
//! HTTP/1.1.

use crate::config::{Port, Protocol};
use causeway_certs::verify::{NoServerVerification, provider};
use causeway_tunnel::Target;
use causeway_upstream::connection::AlpnConfigs;
use rustls::{ClientConfig, RootCertStore, client::WantsClientCert};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Reason why TLS to an upstream cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The target of a port or service is not `HOST:PORT`.
    #[error("{0}.target: \"{1}\" is not HOST:PORT")]
    Target(String, String),
    /// A port with the scheme https has neither a CA nor `verify: false`.
    #[error("{0}: https needs \"ca\", or verify: false to accept any certificate")]
    Unverified(String),
    /// The configured name of the upstream's certificate is not a valid name.
    #[error("{0}.server_name: \"{1}\" is not a host name")]
    Name(String, String),
    /// A file cannot be read or has no usable content.
    #[error("{path}: {why}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Description of the fault.
        why: String,
    },
    /// The client certificate does not match its key.
    #[error("{0}.certificate: {1}")]
    Certificate(String, rustls::Error),
}

/// TLS configuration of one upstream.
#[derive(Clone, Debug)]
pub(crate) struct UpstreamTls {
    configs: AlpnConfigs,
    server_name: ServerName<'static>,
}

impl UpstreamTls {
    pub(super) fn configs(&self) -> &AlpnConfigs {
        &self.configs
    }

    pub(super) fn server_name(&self) -> ServerName<'static> {
        self.server_name.clone()
    }
}

/// Reads the files of a port or service, if its scheme is https. The key of the configuration is for errors.
pub(super) fn load(
    key: &str,
    port: &Port,
    target: &Target,
) -> Result<Option<UpstreamTls>, TlsError> {
    if port.scheme != Protocol::Https {
        return Ok(None);
    }
    let server_name = port.server_name.as_deref().unwrap_or(&target.host);
    let server_name = ServerName::try_from(server_name.to_owned())
        .map_err(|_| TlsError::Name(key.to_owned(), server_name.to_owned()))?;
    let config = with_client_certificate(key, port, builder_with_roots(key, port)?)?;
    Ok(Some(UpstreamTls {
        configs: AlpnConfigs::new(config),
        server_name,
    }))
}

type WantsClient = rustls::ConfigBuilder<ClientConfig, WantsClientCert>;

fn builder_with_roots(path: &str, port: &Port) -> Result<WantsClient, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::Certificate(path.to_owned(), error))?;
    match &port.ca {
        Some(path) => {
            let mut roots = RootCertStore::empty();
            let (added, _) = roots.add_parsable_certificates(read_certificates(path)?);
            if added == 0 {
                return Err(file_error(path, &"holds no usable CA certificate"));
            }
            Ok(builder.with_root_certificates(roots))
        }
        None if port.verify => Err(TlsError::Unverified(path.to_owned())),
        None => Ok(builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(NoServerVerification))),
    }
}

fn with_client_certificate(
    path: &str,
    port: &Port,
    builder: WantsClient,
) -> Result<ClientConfig, TlsError> {
    let (Some(certificate), Some(key)) = (&port.certificate, &port.key) else {
        return Ok(builder.with_no_client_auth());
    };
    let chain = read_certificates(certificate)?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|error| file_error(key, &error))?;
    builder
        .with_client_auth_cert(chain, key)
        .map_err(|error| TlsError::Certificate(path.to_owned(), error))
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let certificates: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| file_error(path, &error))?;
    if certificates.is_empty() {
        return Err(file_error(path, &"holds no certificate"));
    }
    Ok(certificates)
}

fn file_error(path: &Path, why: &impl ToString) -> TlsError {
    TlsError::File {
        path: path.to_owned(),
        why: why.to_string(),
    }
}
