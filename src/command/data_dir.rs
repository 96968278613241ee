//! A gateway's data directory, as the commands beside a running gateway open it.
//!
//! They never create one implicitly: a mistyped path must not become an empty directory.

use std::path::Path;

use anyhow::{Context, bail};
use causeway_certs::{Ca, OpenMode, Store};

/// The directory of a gateway, which may have no CA where edges bring their certificates.
pub(super) fn of_gateway(directory: &Path) -> anyhow::Result<Store> {
    let shown = directory.display();
    let none = || {
        format!(
            "{shown} is no data directory of a gateway; name that by --data-dir, or start the gateway, which makes it"
        )
    };
    let store = Store::open(directory, OpenMode::Existing).with_context(none)?;
    if !store.is_of_a_gateway() {
        bail!("{}", none());
    }
    Ok(store)
}

/// The directory and its CA; both must be there.
pub(super) fn with_ca(directory: &Path) -> anyhow::Result<(Store, Ca)> {
    let remedy = || {
        let directory = directory.display();
        format!(
            "no CA in {directory}; make one with: causeway ca init --data-dir {directory} (a gateway whose edges bring certificates, tunnel.identity, needs none)"
        )
    };
    let store = Store::open(directory, OpenMode::Existing).with_context(remedy)?;
    let ca = store.ca()?.with_context(remedy)?;
    Ok((store, ca))
}
