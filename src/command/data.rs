//! A gateway's data directory, as the commands beside a running gateway open it.
//!
//! They never make one by the way: a mistyped path must not become an empty directory.

use std::path::Path;

use anyhow::Context;
use causeway_certs::{Access, Ca, Store};

/// The directory and its CA; both must be there.
pub(super) fn with_ca(directory: &Path) -> anyhow::Result<(Store, Ca)> {
    let remedy = || {
        let directory = directory.display();
        format!("no CA in {directory}; make one with: causeway ca init --data-dir {directory}")
    };
    let store = Store::open(directory, Access::Existing).with_context(remedy)?;
    let ca = store.ca()?.with_context(remedy)?;
    Ok((store, ca))
}
