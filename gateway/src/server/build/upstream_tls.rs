//! Builds the upstreams with which the gateway itself speaks TLS: the trusted CAs, and the certificate that the gateway presents.
//!
//! The build reads the files that the configuration names. Each error names the port and the file. An upstream whose
//! configuration and files have not changed is kept, with its connections.

use crate::{
    config,
    proxy::upstream::{ByPort, ServerTrust, UpstreamTls, UpstreamTlsPorts, UpstreamTlsSource},
    server::error::BindError,
    state::{Nodes, Pins},
};
use causeway_certs::{LeafCertificate, Role};
use rustls_pki_types::{CertificateDer, UnixTime, pem::PemObject};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Reads and builds all upstreams, and keeps those of `now` that have not changed.
pub(crate) fn read_all(
    configs: &BTreeMap<u16, config::UpstreamTls>,
    (nodes, pins): (&Nodes, &Pins),
    current_ports: Option<&UpstreamTlsPorts>,
) -> Result<ByPort, BindError> {
    let build = |(port, app): (&u16, &config::UpstreamTls)| {
        let mut source = read(*port, app)?;
        if let (Some(leaf), Some(path)) = (source.client_certificate.take(), &app.certificate) {
            let current = current_ports.and_then(|now| now.client_certificate(*port));
            let leaf = leaf.replacing(current.as_ref(), UnixTime::now());
            source.client_certificate =
                Some(leaf.map_err(|why| file(*port, path.clone(), why.to_string()))?);
        }
        if let Some(unchanged) =
            current_ports.and_then(|now| now.reuse_if_same_source(*port, &source))
        {
            return Ok((*port, unchanged));
        }
        let named = [&app.ca, &app.certificate].into_iter().flatten().next();
        let path = named.cloned().unwrap_or_default();
        let built = UpstreamTls::new(source, *port, (nodes, pins));
        let built = built.map_err(|why| file(*port, path, why))?;
        Ok((*port, Arc::new(built)))
    };
    configs.iter().map(build).collect()
}

/// Reads the files of all upstreams.
pub(crate) fn check(apps: &BTreeMap<u16, config::UpstreamTls>) -> Result<(), BindError> {
    apps.iter()
        .try_for_each(|(port, app)| read(*port, app).map(drop))
}

fn read(port: u16, app: &config::UpstreamTls) -> Result<UpstreamTlsSource, BindError> {
    let trust = match (&app.ca, app.pin, app.verify) {
        (Some(path), ..) => ServerTrust::Signed(roots(port, path)?),
        (None, true, _) => ServerTrust::Pinned,
        (None, false, false) => ServerTrust::Any,
        (None, false, true) => {
            let why = format!("upstream_tls.{port} needs \"ca\", or pin: true, or verify: false");
            return Err(BindError::Name(why));
        }
    };
    let leaf = match (&app.certificate, &app.key) {
        // The certificate is requested, and used when it has been issued.
        (Some(certificate), _) if app.signer.is_some() && !certificate.exists() => None,
        (Some(certificate), Some(key)) => {
            let leaf = LeafCertificate::load_for(
                Role::Client,
                &text(port, certificate)?,
                &text(port, key)?,
            );
            Some(leaf.map_err(|error| file(port, certificate.clone(), error.to_string()))?)
        }
        _ => None,
    };
    Ok(UpstreamTlsSource {
        trust,
        client_certificate: leaf,
    })
}

fn roots(port: u16, path: &Path) -> Result<Vec<CertificateDer<'static>>, BindError> {
    let pem = text(port, path)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let found = certificates.map_err(|error| file(port, path.to_owned(), error.to_string()))?;
    if found.is_empty() {
        let why = "it contains no certificate".to_owned();
        return Err(file(port, path.to_owned(), why));
    }
    Ok(found)
}

fn text(port: u16, path: &Path) -> Result<String, BindError> {
    std::fs::read_to_string(path).map_err(|error| file(port, path.to_owned(), error.to_string()))
}

fn file(port: u16, path: PathBuf, why: String) -> BindError {
    BindError::File {
        what: format!("upstream_tls.{port}"),
        path,
        why,
    }
}
