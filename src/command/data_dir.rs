//! A gateway's data directory, as the commands beside a running gateway open it.
//!
//! They never create one implicitly: a mistyped path must not become an empty directory.

use std::path::Path;

use anyhow::{Context, bail};
use causeway_certs::{Ca, NodeName, OpenMode, Store};
use hyper::{Method, body::Bytes};

use super::admin_client;
use crate::output::outln;

/// The directory of a gateway, which may have no CA where edges bring their certificates.
pub(super) fn of_gateway(directory: &Path) -> anyhow::Result<Store> {
    let shown = directory.display();
    let none = || {
        format!(
            "{shown} is not the data directory of a gateway; give that directory with --data-dir, or start the gateway, which creates it"
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
            "no CA in {directory}; create one with: causeway ca init --data-dir {directory} (a gateway with tunnel.identity, whose edges have certificates of an external CA, needs none)"
        )
    };
    let store = Store::open(directory, OpenMode::Existing).with_context(remedy)?;
    let ca = store.ca()?.with_context(remedy)?;
    Ok((store, ca))
}

/// Notifies the gateway that runs on the directory of a change, and prints what was done.
pub(super) async fn notify_gateway(directory: &Path, done: &str) -> anyhow::Result<()> {
    match post(directory, "/api/v1/refresh", done).await? {
        Some(_) => outln!("{done}")?,
        None => outln!("{done}; no gateway runs in {}", directory.display())?,
    }
    Ok(())
}

/// Has the gateway that runs on the directory apply a change. Returns its answer, or `None` if no gateway runs there. An error
/// begins with what was `done` in the directory.
pub(super) async fn post(
    directory: &Path,
    path: &str,
    done: &str,
) -> anyhow::Result<Option<Bytes>> {
    let Some(address) = admin_client::address_from_data_dir(directory)? else {
        return Ok(None);
    };
    let answer = admin_client::request(Method::POST, &address, path).await;
    let (status, body) = answer.with_context(|| {
        format!(
            "{done} in {}, but the gateway on this data directory does not answer; it applies the change at a reload (SIGHUP, `systemctl reload causeway-gateway`) or at its next start",
            directory.display()
        )
    })?;
    if !status.is_success() {
        let said = String::from_utf8_lossy(&body);
        bail!(
            "{done} on disk, but the gateway at {address} did not apply the change: {status} {}",
            said.trim()
        );
    }
    Ok(Some(body))
}

pub(super) fn open(directory: &Path, node: &str) -> anyhow::Result<(Store, NodeName)> {
    let node = NodeName::parse(node)?;
    Ok((of_gateway(directory)?, node))
}
