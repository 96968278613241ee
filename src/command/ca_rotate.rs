//! `causeway ca rotate prepare|activate|retire`: replaces the root that signs with another one.
//!
//! Each step changes the data directory atomically, and then notifies the gateway that runs on it. A repeated step changes
//! nothing and notifies again. A step that would exclude edges is refused with the names of their nodes, unless it is forced.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, bail};
use causeway_certs::{Ca, Fingerprint, NodeName, RootStage, RotationStep, Store};
use rustls::pki_types::UnixTime;
use serde::Deserialize;

use super::{admin_client, data_dir};
use crate::cli::{Rotate, RotateArgs};
use crate::output::outln;

/// Path at which a gateway reports the progress of edges.
const PROGRESS_PATH: &str = "/api/v1/ca";
/// Maximum number of nodes that a message names. It only counts the rest.
const MAX_NAMED_NODES: usize = 5;

/// Rotation status that a gateway reports.
#[derive(Debug, Deserialize)]
pub(super) struct RotationStatus {
    roots: Vec<RootStatus>,
    connected: usize,
    #[serde(default)]
    too_old: BTreeSet<NodeName>,
    without_roots: BTreeSet<NodeName>,
    on_another_root: BTreeSet<NodeName>,
}

#[derive(Debug, Deserialize)]
struct RootStatus {
    stage: RootStage,
}

/// Runs a step of the rotation.
pub(crate) async fn run(subcommand: Rotate) -> anyhow::Result<()> {
    match subcommand {
        Rotate::Prepare(args) => prepare(&args).await,
        Rotate::Activate(args) => activate(&args).await,
        Rotate::Retire(args) => retire(&args).await,
    }
}

async fn prepare(args: &RotateArgs) -> anyhow::Result<()> {
    let directory = &args.data.data_dir;
    let (store, _) = data_dir::open_with_ca(directory)?;
    let (ca, step) = apply_step(&store, Ca::prepare)?;
    print_step(
        step,
        "a new root is prepared; it is trusted in addition to the root that signs",
        "a new root has already been prepared",
    )?;
    if let Some((_, next)) = ca.other() {
        outln!("signs     {}\nprepared  {next}", ca.fingerprint())?;
    }
    let progress_text = load_in_gateway(directory)
        .await?
        .map_or_else(String::new, |progress| {
            let (connected, without_root) = (progress.connected, progress.without_roots.len());
            format!(
                "{} of {connected} connected edges trust it; ",
                connected - without_root.min(connected)
            )
        });
    outln!(
        "{progress_text}copy the new {} to the clients that use it {}; next: causeway ca rotate activate",
        store.root_path().display(),
        if ca.signs_leaves_directly() {
            "before that step, because the old root signs listener certificates directly"
        } else {
            "before the old root is retired"
        }
    )?;
    Ok(())
}

async fn activate(args: &RotateArgs) -> anyhow::Result<()> {
    let directory = &args.data.data_dir;
    let (store, ca) = data_dir::open_with_ca(directory)?;
    let is_prepared = matches!(ca.other(), Some((RootStage::Prepared, _)));
    if is_prepared
        && !args.force
        && let Some(progress) = load_in_gateway(directory).await?
        && !progress.without_roots.is_empty()
    {
        if !progress.too_old.is_empty() {
            bail!(
                "{} of {} connected edges have a version that cannot install a new root: {}; upgrade them first, or continue with --force and let them join again with new tokens afterwards",
                progress.too_old.len(),
                progress.connected,
                format_nodes(&progress.too_old)
            );
        }
        bail!(
            "{} of {} connected edges do not trust the prepared root yet: {}; wait for them (causeway status), or continue with --force: they receive the root later",
            progress.without_roots.len(),
            progress.connected,
            format_nodes(&progress.without_roots)
        );
    }
    let (ca, step) = apply_step(&store, Ca::activate)?;
    print_step(
        step,
        "the new root signs certificates from now on",
        "the new root signs certificates already",
    )?;
    outln!("signs     {}", ca.fingerprint())?;
    load_in_gateway(directory).await?;
    outln!(
        "the old root is still trusted; edges renew their certificates with the new root; next: causeway ca rotate retire"
    )?;
    Ok(())
}

async fn retire(args: &RotateArgs) -> anyhow::Result<()> {
    let directory = &args.data.data_dir;
    let (store, ca) = data_dir::open_with_ca(directory)?;
    let is_retiring = matches!(ca.other(), Some((RootStage::Retiring, _)));
    if is_retiring && !args.force {
        let mut remaining = on_another_root(&store, ca.fingerprint())?;
        if let Some(progress) = load_in_gateway(directory).await? {
            remaining.extend(progress.on_another_root);
        }
        if !remaining.is_empty() {
            bail!(
                "{} enrolled edges still have certificates of the old root and would be refused: {}; wait until they have renewed (causeway status), remove nodes that no longer exist (causeway node remove NODE), or continue with --force: these edges are then refused",
                remaining.len(),
                format_nodes(&remaining)
            );
        }
    }
    let (ca, step) = apply_step(&store, Ca::retire)?;
    print_step(
        step,
        "the old root is no longer trusted",
        "there is only one root; there is nothing to retire",
    )?;
    outln!("signs     {}", ca.fingerprint())?;
    load_in_gateway(directory).await?;
    if step == RotationStep::Applied {
        outln!(
            "join tokens and client certificates of the old root are no longer valid; create new ones where they are needed"
        )?;
    }
    if let Some(line) = unchanged_listener_key(&ca) {
        outln!("{line}")?;
    }
    Ok(())
}

/// Describes the key for listeners' certificates, which no rotation replaces.
fn unchanged_listener_key(ca: &Ca) -> Option<String> {
    let chain = ca.listener_ca()?;
    Some(format!(
        "the key of listeners' certificates below the root '{}' is unchanged; after a theft of ca.json replace it too: causeway ca csr --new, causeway ca import, and have the owner of that root revoke '{}'",
        chain.root.subject, chain.intermediate.subject
    ))
}

fn apply_step(
    store: &Store,
    step: impl FnOnce(Ca) -> Result<(Ca, RotationStep), causeway_certs::CaError>,
) -> anyhow::Result<(Ca, RotationStep)> {
    store.change_ca(|ca| Ok(step(ca)?))
}

/// Has the gateway that runs on the directory load the CA. Returns the progress of the edges, or `None` if no gateway runs
/// there.
pub(super) async fn load_in_gateway(directory: &Path) -> anyhow::Result<Option<RotationStatus>> {
    let Some(body) = data_dir::post(directory, PROGRESS_PATH, "the CA is changed").await? else {
        return Ok(None);
    };
    let progress = serde_json::from_slice(&body);
    Ok(Some(progress.context(
        "the gateway's answer does not contain the progress of the edges",
    )?))
}

/// Returns the nodes whose certificates are valid and below another root, as recorded in the directory.
fn on_another_root(store: &Store, root: Fingerprint) -> anyhow::Result<BTreeSet<NodeName>> {
    let now = UnixTime::now().as_secs();
    let records = store.nodes().all()?.into_iter();
    let remaining = records.filter(|record| {
        let is_expired = record.not_after.is_some_and(|not_after| not_after < now);
        // Nodes with certificates of an external CA have no serial.
        let has_serial = !record.serial.is_empty();
        has_serial && record.root != Some(root) && !is_expired && record.revoked.is_none()
    });
    Ok(remaining.map(|record| record.node).collect())
}

fn print_step(
    step: RotationStep,
    done_message: &str,
    unchanged_message: &str,
) -> anyhow::Result<()> {
    outln!(
        "{}",
        if step == RotationStep::Applied {
            done_message
        } else {
            unchanged_message
        }
    )
}

/// Returns a list of the first few nodes.
fn format_nodes(nodes: &BTreeSet<NodeName>) -> String {
    let mut text = String::new();
    for node in nodes.iter().take(MAX_NAMED_NODES) {
        let comma = if text.is_empty() { "" } else { ", " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{comma}{node}");
    }
    if nodes.len() > MAX_NAMED_NODES {
        let _ = write!(text, " and {} more", nodes.len() - MAX_NAMED_NODES);
    }
    text
}

/// Returns the progress of a rotation for the list of edges, or nothing if no rotation is under way.
pub(super) async fn status_line(address: &admin_client::AdminAddress) -> Option<String> {
    let (status, body) = admin_client::get(address, PROGRESS_PATH).await.ok()?;
    // Edges and older gateways do not have this endpoint.
    let progress: RotationStatus = serde_json::from_slice(&body)
        .ok()
        .filter(|_| status.is_success())?;
    let connected = progress.connected;
    let has_stage = |stage| {
        progress
            .roots
            .iter()
            .any(|root: &RootStatus| root.stage == stage)
    };
    let (description, remaining) = if has_stage(RootStage::Prepared) {
        (
            "a new root is prepared; it is trusted by",
            &progress.without_roots,
        )
    } else if has_stage(RootStage::Retiring) {
        (
            "a new root signs certificates; its certificates are used by",
            &progress.on_another_root,
        )
    } else {
        return None;
    };
    let mut text = format!(
        "{description} {} of {connected} connected edges",
        connected - remaining.len().min(connected)
    );
    if !remaining.is_empty() {
        let _ = write!(text, ", but not by {}", format_nodes(remaining));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_nodes_are_named_and_the_rest_is_counted() {
        let nodes = |count: u32| (1..=count).map(|n| NodeName::parse(&format!("n{n}")).unwrap());
        assert_eq!(format_nodes(&nodes(2).collect()), "n1, n2");
        assert_eq!(
            format_nodes(&nodes(7).collect()),
            "n1, n2, n3, n4, n5 and 2 more"
        );
    }
}
