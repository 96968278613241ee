//! Who an edge is where another system makes and renews its certificate: by files, which are read when it starts and at each
//! reload. Whoever renews them causes one.

use super::Error;
use crate::config;
use causeway_certs::{
    EdgeIdentity, Leaf, Store, given,
    verify::{Hubs, tunnel_client},
};
use rustls_pki_types::UnixTime;
use std::{fmt, fs, path::Path};
use tracing::warn;

/// What the files say, with the gateways that were learned before.
pub(super) fn open(files: &config::Identity, store: &Store) -> Result<EdgeIdentity, Error> {
    let mut identity = read(files)?;
    identity.gateways = store.learned_gateways()?;
    Ok(identity)
}

/// What the files say.
pub(super) fn read(files: &config::Identity) -> Result<EdgeIdentity, Error> {
    let (chain, key) = (text(&files.chain)?, text(&files.key)?);
    let identity = EdgeIdentity::given(&text(&files.ca)?, &chain, &key);
    let fault = |why: String| Error::Identity {
        path: files.chain.display().to_string(),
        why,
    };
    let identity = identity.map_err(|error| fault(error.to_string()))?;
    // Whatever cannot be dialled with is not taken up.
    tunnel_client(&identity)?;
    Ok(identity)
}

/// Whom the listener for hubs lets in, and what it shows them, if there is one.
pub(super) fn hubs(config: &config::Config) -> Result<Option<Hubs>, Error> {
    let reader = config.reader.as_ref();
    let Some(files) = reader.and_then(|reader| reader.hubs.as_ref()) else {
        return Ok(None);
    };
    let fault = |path: &Path, why: &dyn fmt::Display| Error::Hubs {
        path: path.display().to_string(),
        why: why.to_string(),
    };
    let text = |path: &Path| fs::read_to_string(path).map_err(|error| fault(path, &error));
    let (chain, key) = (text(&files.certificate)?, text(&files.key)?);
    let leaf = Leaf::load(&chain, &key).map_err(|error| fault(&files.certificate, &error))?;
    let roots = given::roots(&text(&files.ca)?).map_err(|error| fault(&files.ca, &error))?;
    let at = files.listen.ip().to_canonical();
    let hubs = Hubs::new(&leaf, &roots, at).map_err(|error| fault(&files.certificate, &error))?;
    if leaf.not_after() < UnixTime::now() {
        // An edge is needed all the same.
        warn!(path = %files.certificate.display(), "the certificate that hubs are shown has ended: hubs get nothing here until it is another");
    }
    Ok(Some(hubs))
}

/// The certificate is not this node's: of those that another system makes the right one may be there soon.
pub(super) fn other_node(config: &config::Config, configured: &str, certificate: &str) -> Error {
    match &config.identity {
        Some(files) => Error::Identity {
            path: files.chain.display().to_string(),
            why: format!("it is for node {certificate}, the configuration says {configured}"),
        },
        None => Error::OtherNode {
            configured: configured.to_owned(),
            certificate: certificate.to_owned(),
        },
    }
}

fn text(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|error| Error::Identity {
        path: path.display().to_string(),
        why: error.to_string(),
    })
}
