//! Who an edge is where another system makes and renews its certificate: by files, which are read when it starts and at each
//! reload. Whoever renews them causes one.

use super::Error;
use crate::config;
use causeway_certs::{EdgeIdentity, Store, verify::tunnel_client};
use std::{fs, path::Path};

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
