//! Identity of an edge whose certificate an external CA issues and renews: by files, which are read when it starts and at
//! each reload. The renewal of the files causes a reload.

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
    let (chain, key) = (text(&files.chain)?, text(&files.key)?);
    let identity = EdgeIdentity::given(&text(&files.ca)?, &chain, &key);
    let identity = identity.map_err(|error| fault(files, &error))?;
    // Rejects an identity that cannot be used for tunnels.
    tunnel_client(&identity)?;
    Ok(identity)
}

/// An error about the certificate in the files.
pub(super) fn fault(files: &config::Identity, why: &dyn fmt::Display) -> Error {
    Error::Identity {
        path: files.chain.display().to_string(),
        why: why.to_string(),
    }
}

/// Certificates by the listener that shows them.
pub(super) type Leaves = BTreeMap<&'static str, LeafCertificate>;

/// Certificates of the API cache's listeners and the clients that they admit, as far as they can be loaded: an edge is
/// needed whether these files are sound or not.
#[derive(Default)]
pub(super) struct ApiCacheTls {
    /// Certificate of the listener for this node's programs.
    pub(super) endpoint: Option<ServerOnlyTls>,
    /// Certificate of the listener for `YurtHub`s, and the roots by which it admits them.
    pub(super) hubs: Option<YurtHubServerTls>,
    /// The certificates that are shown.
    pub(super) leaves: Leaves,
    /// Why what is configured and missing here cannot be had.
    pub(super) faults: Vec<Error>,
}

impl ApiCacheTls {
    /// Reads the files of the listeners. Certificates that are not valid do not replace valid ones of `current`.
    pub(super) fn read(config: &config::Config, current: &Leaves) -> Self {
        let mut faces = Self::default();
        let Some(api_cache) = &config.api_cache else {
            return faces;
        };
        let of = |listener| current.get(listener);
        let endpoint = api_cache.tls.as_ref();
        let endpoint = endpoint.map(|files| shown(files, of("endpoint")));
        faces.endpoint = faces.noted("endpoint", endpoint);
        let hubs = api_cache
            .yurthub
            .as_ref()
            .map(|files| hubs(files, of("hubs")));
        faces.hubs = faces.noted("hubs", hubs);
        faces
    }

    /// Says what is wrong as an edge begins, and when the certificates end.
    pub(super) fn report(&self, metrics: &Metrics) {
        for fault in &self.faults {
            warn!(error = %fault, "this listener refuses all clients until the error is corrected; the files are watched");
        }
        metrics.listeners_end(&self.leaves);
        if !self.faults.is_empty() {
            metrics.begins_with_faults();
        }
    }

    fn noted<T>(
        &mut self,
        listener: &'static str,
        read: Option<Result<(T, LeafCertificate), Error>>,
    ) -> Option<T> {
        match read? {
            Ok((face, leaf)) => {
                self.leaves.insert(listener, leaf);
                Some(face)
            }
            Err(fault) => {
                self.faults.push(fault);
                None
            }
        }
    }
}

fn shown(
    files: &config::ServerCertificate,
    current: Option<&LeafCertificate>,
) -> Result<(ServerOnlyTls, LeafCertificate), Error> {
    let of = CertificateFiles("api_cache.tls");
    let leaf = of.leaf(&files.certificate, &files.key, current)?;
    let shown = ServerOnlyTls::new(&leaf);
    let shown = shown.map_err(|error| of.fault(&files.certificate, &error))?;
    of.warn_of_end(&leaf, &files.certificate);
    Ok((shown, leaf))
}

fn hubs(
    files: &config::YurtHubListener,
    current: Option<&LeafCertificate>,
) -> Result<(YurtHubServerTls, LeafCertificate), Error> {
    let of = CertificateFiles("api_cache.yurthub");
    let leaf = of.leaf(&files.certificate, &files.key, current)?;
    let roots = external::roots(&of.text(&files.ca)?);
    let roots = roots.map_err(|error| of.fault(&files.ca, &error))?;
    let at = files.listen.ip().to_canonical();
    let hubs = YurtHubServerTls::new(&leaf, &roots, at);
    let hubs = hubs.map_err(|error| of.fault(&files.certificate, &error))?;
    of.warn_of_end(&leaf, &files.certificate);
    Ok((hubs, leaf))
}

/// Files of a listener of the API cache, by the key that names them.
struct CertificateFiles(&'static str);

impl CertificateFiles {
    fn text(&self, path: &Path) -> Result<String, Error> {
        fs::read_to_string(path).map_err(|error| self.fault(path, &error))
    }

    fn leaf(
        &self,
        certificate: &Path,
        key: &Path,
        current: Option<&LeafCertificate>,
    ) -> Result<LeafCertificate, Error> {
        let (chain, key) = (self.text(certificate)?, self.text(key)?);
        LeafCertificate::load_for(Role::Server, &chain, &key)
            .and_then(|leaf| leaf.replacing(current, UnixTime::now()))
            .map_err(|error| self.fault(certificate, &error))
    }

    fn fault(&self, path: &Path, why: &dyn fmt::Display) -> Error {
        Error::Reader {
            key: self.0,
            path: path.display().to_string(),
            why: why.to_string(),
        }
    }

    fn warn_of_end(&self, leaf: &LeafCertificate, path: &Path) {
        if leaf.not_after() < UnixTime::now() {
            warn!(key = self.0, path = %path.display(), "the certificate has expired: clients that verify it cannot read until it is replaced");
        }
    }
}

/// The certificate is another node's: the right one may be there soon.
pub(super) fn check_node_name(
    files: &config::Identity,
    configured: &str,
    certificate: &str,
) -> Error {
    let why = format!(
        "the certificate is for node {certificate}, but the configuration names {configured}"
    );
    fault(files, &why)
}

fn text(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|error| Error::Identity {
        path: path.display().to_string(),
        why: error.to_string(),
    })
}
