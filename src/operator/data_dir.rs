//! A gateway's data directory, as commands open it beside a running gateway.
//!
//! The commands never create one implicitly: a mistyped path must not become an empty directory.

use std::path::Path;

use anyhow::{Context, bail};
use causeway_certs::{Ca, NodeName, OpenMode, Store, StoreError};
use hyper::{Method, body::Bytes};

use super::admin_client;
use crate::output::{errln, outln};

/// Path at which a gateway loads the nodes again, and shares changes.
const REFRESH_PATH: &str = "/api/v1/refresh";

/// Opens the directory of a gateway. It may lack a CA if an external CA makes the certificates of edges.
pub(super) fn open_gateway_store(directory: &Path) -> anyhow::Result<Store> {
    let path = directory.display();
    let not_a_gateway = || {
        format!(
            "{path} is not the data directory of a gateway; give that directory with --data-dir, or start the gateway, which creates it"
        )
    };
    let store = Store::open(directory, OpenMode::Existing).with_context(not_a_gateway)?;
    if !store.is_gateway_dir() {
        bail!("{}", not_a_gateway());
    }
    Ok(store)
}

/// Opens the directory and reads its CA. Both must exist.
pub(super) fn open_with_ca(directory: &Path) -> anyhow::Result<(Store, Ca)> {
    let remedy = || {
        let directory = directory.display();
        format!(
            "no CA in {directory}; create one with: causeway ca init --data-dir {directory} (a gateway with tunnel.identity, whose edges have certificates of an external CA, needs none)"
        )
    };
    let store = match Store::open(directory, OpenMode::Existing) {
        Err(error @ StoreError::Missing { .. }) => return Err(error).with_context(remedy),
        // A directory that this user cannot read may have a CA.
        opened => opened?,
    };
    let ca = store.ca()?.with_context(remedy)?;
    Ok((store, ca))
}

/// Notifies the gateway that runs on the directory of a change, and prints what was done.
pub(super) async fn notify_gateway(directory: &Path, description: &str) -> anyhow::Result<()> {
    match post(directory, REFRESH_PATH, description).await? {
        Some(_) => outln!("{description}")?,
        None => outln!("{description}; no gateway runs in {}", directory.display())?,
    }
    Ok(())
}

/// Has the gateway that runs on the directory share a change with other gateways, if it shares its state. A failure is only
/// reported, because the gateway tries again.
pub(super) async fn share(directory: &Path, description: &str) {
    if let Err(error) = post(directory, REFRESH_PATH, description).await {
        errln!("warning: {error:#}");
    }
}

/// Has the gateway that runs on the directory apply a change. Returns its response, or `None` if no gateway runs there. The
/// text of an error begins with `description`, which states the change in the directory.
pub(super) async fn post(
    directory: &Path,
    path: &str,
    description: &str,
) -> anyhow::Result<Option<Bytes>> {
    let Some(address) = admin_client::address_from_data_dir(directory)? else {
        return Ok(None);
    };
    let response = admin_client::request(Method::POST, &address, path).await;
    let (status, body) = response.with_context(|| {
        format!(
            "{description} in {}, but the gateway on this data directory does not answer; it applies the change at a reload (SIGHUP, `systemctl reload causeway-gateway`) or at its next start",
            directory.display()
        )
    })?;
    if !status.is_success() {
        let message = String::from_utf8_lossy(&body);
        bail!(
            "{description} on disk, but the gateway at {address} reports: {status} {}",
            message.trim()
        );
    }
    Ok(Some(body))
}

pub(super) fn open_for_node(directory: &Path, node: &str) -> anyhow::Result<(Store, NodeName)> {
    let node = NodeName::parse(node)?;
    Ok((open_gateway_store(directory)?, node))
}
