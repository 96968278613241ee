//! Identity of an edge whose certificate an external CA issues and renews as files. The files are read at the start and at
//! each reload, and a renewal of the files causes a reload.

use super::error::Error;
use crate::{config, metrics::Metrics};
use causeway_certs::{
    EdgeIdentity, LeafCertificate, Role, Store, external,
    verify::{ServerOnlyTls, YurtHubServerTls, tunnel_client},
};
use rustls_pki_types::UnixTime;
use std::{collections::BTreeMap, fmt, fs, path::Path};
use tracing::warn;

/// Loads the identity from the files, with the gateways that were learned before.
pub(super) fn load_with_gateways(
    files: &config::Identity,
    store: &Store,
) -> Result<EdgeIdentity, Error> {
    let mut identity = load(files)?;
    identity.gateways = store.learned_gateways()?;
    Ok(identity)
}

/// Loads the identity from the files.
pub(super) fn load(files: &config::Identity) -> Result<EdgeIdentity, Error> {
    let (chain, key) = (read_file(&files.chain)?, read_file(&files.key)?);
    let identity = EdgeIdentity::from_external(&read_file(&files.ca)?, &chain, &key);
    let identity = identity.map_err(|error| identity_error(files, &error))?;
    // Rejects an identity that cannot be used for tunnels.
    tunnel_client(&identity)?;
    Ok(identity)
}

/// Returns the error of the certificate in the files.
pub(super) fn identity_error(files: &config::Identity, why: &dyn fmt::Display) -> Error {
    Error::Identity {
        path: files.chain.display().to_string(),
        why: why.to_string(),
    }
}

/// Certificates by the listener that presents them.
pub(super) type Leaves = BTreeMap<&'static str, LeafCertificate>;

/// TLS configuration of the API cache's listeners, as far as it can be loaded. An edge must run even if these files are not
/// valid.
#[derive(Default)]
pub(super) struct ApiCacheTls {
    /// Certificate of the listener for this node's programs.
    pub(super) endpoint: Option<ServerOnlyTls>,
    /// Certificate of the listener for `YurtHub`s, and the roots for the clients' certificates.
    pub(super) yurthub: Option<YurtHubServerTls>,
    /// Certificates that the listeners present.
    pub(super) certificates: Leaves,
    /// Errors of configured files that could not be loaded.
    pub(super) errors: Vec<Error>,
}

impl ApiCacheTls {
    /// Reads the files of the listeners. Certificates that are not valid do not replace valid ones of `current`.
    pub(super) fn read(config: &config::Config, current: &Leaves) -> Self {
        let mut tls = Self::default();
        let Some(api_cache) = &config.api_cache else {
            return tls;
        };
        let current_of = |listener| current.get(listener);
        let endpoint = api_cache.tls.as_ref();
        let endpoint = endpoint.map(|files| load_endpoint_tls(files, current_of("endpoint")));
        tls.endpoint = tls.record("endpoint", endpoint);
        let yurthub = api_cache
            .yurthub
            .as_ref()
            .map(|files| load_yurthub_tls(files, current_of("hubs")));
        tls.yurthub = tls.record("hubs", yurthub);
        tls
    }

    /// Logs the errors at the start of an edge, and publishes the expiry of the certificates.
    pub(super) fn report(&self, metrics: &Metrics) {
        for fault in &self.errors {
            warn!(error = %fault, "this listener refuses all clients until the error is corrected; the files are watched");
        }
        metrics.set_listener_expiries(&self.certificates);
        if !self.errors.is_empty() {
            metrics.mark_startup_errors();
        }
    }

    fn record<T>(
        &mut self,
        listener: &'static str,
        loaded: Option<Result<(T, LeafCertificate), Error>>,
    ) -> Option<T> {
        match loaded? {
            Ok((server_tls, leaf)) => {
                self.certificates.insert(listener, leaf);
                Some(server_tls)
            }
            Err(error) => {
                self.errors.push(error);
                None
            }
        }
    }
}

fn load_endpoint_tls(
    files: &config::ServerCertificate,
    current: Option<&LeafCertificate>,
) -> Result<(ServerOnlyTls, LeafCertificate), Error> {
    let key_files = CertificateFiles("api_cache.tls");
    let leaf = key_files.leaf(&files.certificate, &files.key, current)?;
    let server_tls = ServerOnlyTls::new(&leaf);
    let server_tls = server_tls.map_err(|error| key_files.error_at(&files.certificate, &error))?;
    key_files.warn_if_expired(&leaf, &files.certificate);
    Ok((server_tls, leaf))
}

fn load_yurthub_tls(
    files: &config::YurtHubListener,
    current: Option<&LeafCertificate>,
) -> Result<(YurtHubServerTls, LeafCertificate), Error> {
    let key_files = CertificateFiles("api_cache.yurthub");
    let leaf = key_files.leaf(&files.certificate, &files.key, current)?;
    let roots = external::parse_roots(&key_files.read_text(&files.ca)?);
    let roots = roots.map_err(|error| key_files.error_at(&files.ca, &error))?;
    let at = files.listen.ip().to_canonical();
    let server_tls = YurtHubServerTls::new(&leaf, &roots, at);
    let server_tls = server_tls.map_err(|error| key_files.error_at(&files.certificate, &error))?;
    key_files.warn_if_expired(&leaf, &files.certificate);
    Ok((server_tls, leaf))
}

/// Configuration key of the files of an API cache listener.
struct CertificateFiles(&'static str);

impl CertificateFiles {
    fn read_text(&self, path: &Path) -> Result<String, Error> {
        fs::read_to_string(path).map_err(|error| self.error_at(path, &error))
    }

    fn leaf(
        &self,
        certificate: &Path,
        key: &Path,
        current: Option<&LeafCertificate>,
    ) -> Result<LeafCertificate, Error> {
        let (chain, key) = (self.read_text(certificate)?, self.read_text(key)?);
        LeafCertificate::load_for(Role::Server, &chain, &key)
            .and_then(|leaf| leaf.replacing(current, UnixTime::now()))
            .map_err(|error| self.error_at(certificate, &error))
    }

    fn error_at(&self, path: &Path, why: &dyn fmt::Display) -> Error {
        Error::ApiCacheFile {
            key: self.0,
            path: path.display().to_string(),
            why: why.to_string(),
        }
    }

    fn warn_if_expired(&self, leaf: &LeafCertificate, path: &Path) {
        if leaf.not_after() < UnixTime::now() {
            warn!(key = self.0, path = %path.display(), "the certificate has expired: clients that verify it cannot read until it is replaced");
        }
    }
}

/// Returns the error of a certificate that is for another node. The right certificate may be issued later.
pub(super) fn check_node_name(
    files: &config::Identity,
    configured: &str,
    certificate: &str,
) -> Error {
    let why = format!(
        "the certificate is for node {certificate}, but the configuration names {configured}"
    );
    identity_error(files, &why)
}

fn read_file(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|error| Error::Identity {
        path: path.display().to_string(),
        why: error.to_string(),
    })
}
