//! `causeway edge add|revoke|allow|remove`: admission and revocation of edges at a gateway. `pins` handles the pins of their
//! upstreams.
//!
//! The data directory is changed first, so that the change persists whatever happens to the gateway. Then the command
//! notifies the gateway that runs on it. The gateway has closed the tunnels in question when the command returns.

use anyhow::{Context, anyhow, bail};
use causeway_certs::{NodeName, Revocation, Store};
use hyper::Method;
use rustls::pki_types::UnixTime;

use std::path::Path;

use super::{admin_client, data_dir, edge, pins, token};
use crate::cli::{EdgeAdd, EdgeCommand, EdgeNameArg, EdgeRevoke};
use crate::output::outln;

/// Longest reason, in bytes: it goes to the edge in one line.
const LONGEST: usize = 512;

/// Does what was ordered.
pub(crate) async fn run(order: EdgeCommand) -> anyhow::Result<()> {
    let (directory, node, done) = match order {
        EdgeCommand::Add(ask) => {
            let (store, node) = open(&ask.data.data_dir, &ask.node)?;
            warn_of_what_is_known(&store, &node, &ask)?;
            store
                .nodes()
                .confirm(&node, ask.confirmed.get(), UnixTime::now().as_secs())?;
            (ask.data.data_dir, node, "let in")
        }
        EdgeCommand::Revoke(ask) => {
            let (store, node) = open(&ask.data.data_dir, &ask.node)?;
            revoke(&store, &node, &ask)?;
            store.pins().forget(&node, None)?;
            (ask.data.data_dir, node, "revoked")
        }
        EdgeCommand::Allow(EdgeNameArg { node, data }) => {
            let (store, node) = open(&data.data_dir, &node)?;
            known(store.nodes().set_revoked(&node, None)?, &store, &node)?;
            (data.data_dir, node, "allowed again")
        }
        EdgeCommand::Leave(ask) => return edge::leave(&ask),
        EdgeCommand::Pins(ask) => return pins::list(&ask),
        EdgeCommand::Unpin(ask) => return pins::unpin(ask).await,
        EdgeCommand::Remove(EdgeNameArg { node, data }) => {
            let (store, node) = open(&data.data_dir, &node)?;
            known(store.nodes().remove(&node)?, &store, &node)?;
            // Another machine may come by this name.
            store.pins().forget(&node, None)?;
            (data.data_dir, node, "removed")
        }
    };
    notify_gateway(&directory, &format!("{node} is {done}")).await
}

/// Has the gateway that runs on the directory take up what was changed there, and says what was done.
pub(super) async fn notify_gateway(directory: &Path, done: &str) -> anyhow::Result<()> {
    let Some(address) = admin_client::address_from_data_dir(directory)? else {
        outln!("{done}; no gateway runs in {}", directory.display())?;
        return Ok(());
    };
    let told = admin_client::request(Method::POST, &address, "/api/v1/refresh").await;
    let (status, body) = told.with_context(|| {
        format!(
            "{done} in {}, but the gateway that should run there was not told: a reload (SIGHUP, `systemctl reload causeway-gateway`) or its next start applies it",
            directory.display()
        )
    })?;
    if !status.is_success() {
        let said = String::from_utf8_lossy(&body);
        bail!(
            "{done} on the disk, but the gateway at {address} did not take it up: {status} {}",
            said.trim()
        );
    }
    outln!("{done}")?;
    Ok(())
}

pub(super) fn open(directory: &Path, node: &str) -> anyhow::Result<(Store, NodeName)> {
    let node = NodeName::parse(node)?;
    Ok((data_dir::of_gateway(directory)?, node))
}

/// Of a node that is known, this changes what is confirmed, and nothing else.
fn warn_of_what_is_known(store: &Store, node: &NodeName, ask: &EdgeAdd) -> anyhow::Result<()> {
    let all = store.nodes().all()?;
    let Some(known) = all.iter().find(|known| known.node == *node) else {
        return Ok(());
    };
    if let Some(revoked) = &known.revoked {
        let reason = &revoked.reason;
        bail!("{node} is revoked: {reason}; `causeway edge allow {node}` lets it in again");
    }
    token::warn_of_change(
        known,
        &ask.confirmed.get(),
        "from now on it has what this says",
    );
    Ok(())
}

fn revoke(store: &Store, node: &NodeName, ask: &EdgeRevoke) -> anyhow::Result<()> {
    let reason = ask.reason.trim();
    if reason.is_empty() || reason.len() > LONGEST || reason.contains(char::is_control) {
        bail!("--reason: a line of 1 to {LONGEST} bytes, for whoever wonders later");
    }
    let revoked = Revocation {
        at: UnixTime::now().as_secs(),
        reason: reason.to_owned(),
    };
    if ask.unseen {
        return Ok(store.nodes().shut_out(node, &revoked)?);
    }
    let found = store.nodes().set_revoked(node, Some(revoked))?;
    known(found, store, node)
        .map_err(|error| anyhow!("{error}; where it has yet to come, say --unseen"))
}

fn known(found: bool, store: &Store, node: &NodeName) -> anyhow::Result<()> {
    if found {
        return Ok(());
    }
    let names: Vec<_> = store
        .nodes()
        .all()?
        .into_iter()
        .map(|record| record.node.to_string())
        .collect();
    match names.len() {
        0 => bail!("no node is known here"),
        1..=20 => bail!("{node} is not known here; there are: {}", names.join(", ")),
        many => bail!("{node} is not known here; `causeway status` shows which {many} are"),
    }
}
