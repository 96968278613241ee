//! `causeway ca rotate prepare|activate|retire`: replaces the root that signs with another one.
//!
//! Each step changes the data directory atomically, and then notifies the gateway that runs on it. A repeated step changes
//! nothing and notifies again. A step that would exclude edges of any gateway is refused with the names of their nodes, unless
//! it is forced. So is a step that another gateway is not ready for, or if another gateway cannot be asked.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, bail};
use causeway_certs::{Ca, Fingerprint, NodeName, RootStage, RotationStep, Store};
use rustls::pki_types::UnixTime;
use serde::Deserialize;

use super::{admin_client, data_dir};
use crate::cli::operator::{Rotate, RotateArgs};
use crate::output::outln;

/// Path at which a gateway reports the progress of edges.
const PROGRESS_PATH: &str = "/api/v1/ca";
/// Maximum number of nodes that a message names. It only counts the rest.
const MAX_NAMED_NODES: usize = 5;

/// Rotation status that a gateway reports.
#[derive(Debug, Deserialize)]
pub(super) struct RotationStatus {
    #[serde(flatten)]
    own: RotationProgress,
    /// Other gateways.
    #[serde(default)]
    gateways: Vec<PeerRotation>,
}

/// Roots and connected edges of one gateway.
#[derive(Debug, Deserialize)]
struct RotationProgress {
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
    fingerprint: Fingerprint,
}

#[derive(Debug, Deserialize)]
struct PeerRotation {
    address: String,
    /// `None` if the gateway could not be asked.
    progress: Option<RotationProgress>,
    error: Option<String>,
}

/// Condition of a step that all gateways and their edges must fulfil before it.
#[derive(Clone, Copy)]
struct Condition {
    /// Stage of the root that each gateway must have.
    stage: RootStage,
    /// Says that a gateway does not have that root.
    gateway_lags: &'static str,
    /// Returns the edges that do not fulfil the condition.
    lagging_edges: fn(&RotationProgress) -> &BTreeSet<NodeName>,
    /// Says that edges do not fulfil the condition.
    edges_lag: &'static str,
}

/// Condition of `activate`.
const TRUSTS_PREPARED_ROOT: Condition = Condition {
    stage: RootStage::Prepared,
    gateway_lags: "has not loaded the prepared root",
    lagging_edges: |progress| &progress.without_roots,
    edges_lag: "do not trust the prepared root yet",
};

/// Condition of `retire`.
const USES_ACTIVE_ROOT: Condition = Condition {
    stage: RootStage::Active,
    gateway_lags: "does not sign with the new root yet",
    lagging_edges: |progress| &progress.on_another_root,
    edges_lag: "still have certificates of the old root",
};

impl RotationProgress {
    /// Returns the root in this stage.
    fn root(&self, stage: RootStage) -> Option<Fingerprint> {
        let root = self.roots.iter().find(|root| root.stage == stage)?;
        Some(root.fingerprint)
    }

    /// Whether a root is common with another gateway. Gateways with certificates of an external CA may have separate CAs.
    fn shares_root(&self, other: &Self) -> bool {
        let mut roots = self.roots.iter();
        roots.any(|root| {
            other
                .roots
                .iter()
                .any(|it| it.fingerprint == root.fingerprint)
        })
    }
}

impl RotationStatus {
    /// Describes each other gateway that does not fulfil the condition, or whose edges do not, or that cannot be asked.
    fn lagging_gateways(&self, condition: Condition) -> Vec<String> {
        let required_root = self.own.root(condition.stage);
        let describe = |gateway: &PeerRotation| {
            let address = &gateway.address;
            let Some(progress) = &gateway.progress else {
                let reason = gateway.error.as_deref().unwrap_or("it gave no answer");
                return Some(format!("gateway {address} cannot be asked ({reason})"));
            };
            if !progress.shares_root(&self.own) {
                return None;
            }
            if progress.root(condition.stage) != required_root {
                return Some(format!("gateway {address} {}", condition.gateway_lags));
            }
            let edges = (condition.lagging_edges)(progress);
            let (count, connected) = (edges.len(), progress.connected);
            (!edges.is_empty()).then(|| {
                let (lag, nodes) = (condition.edges_lag, format_nodes(edges));
                format!(
                    "{count} of {connected} connected edges of gateway {address} {lag}: {nodes}"
                )
            })
        };
        self.gateways.iter().filter_map(describe).collect()
    }

    /// Returns all connected edges that are too old to report roots.
    fn too_old(&self) -> BTreeSet<NodeName> {
        let others = self.gateways.iter().filter_map(|it| it.progress.as_ref());
        let all = others.chain([&self.own]).flat_map(|it| &it.too_old);
        all.cloned().collect()
    }
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
    let (store, ca) = data_dir::open_with_ca(directory)?;
    let (ca, step) = apply_step(&store, &ca, Ca::prepare)?;
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
            let own = progress.own;
            let (connected, without_root) = (own.connected, own.without_roots.len());
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
    {
        check_activation(&progress)?;
    }
    let (ca, step) = apply_step(&store, &ca, Ca::activate)?;
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

/// Refuses an activation that would exclude edges of any gateway.
fn check_activation(progress: &RotationStatus) -> anyhow::Result<()> {
    let too_old = progress.too_old();
    if !too_old.is_empty() {
        bail!(
            "{} connected edges have a version that cannot install a new root: {}; upgrade them first, or continue with --force and let them join again with new tokens afterwards",
            too_old.len(),
            format_nodes(&too_old)
        );
    }
    let own = &progress.own;
    let mut lagging = progress.lagging_gateways(TRUSTS_PREPARED_ROOT);
    if !own.without_roots.is_empty() {
        let (count, connected) = (own.without_roots.len(), own.connected);
        let nodes = format_nodes(&own.without_roots);
        lagging.insert(
            0,
            format!(
                "{count} of {connected} connected edges do not trust the prepared root yet: {nodes}"
            ),
        );
    }
    if !lagging.is_empty() {
        bail!(
            "{}; wait for them (causeway status), or continue with --force: they receive the root later",
            lagging.join("; ")
        );
    }
    Ok(())
}

async fn retire(args: &RotateArgs) -> anyhow::Result<()> {
    let directory = &args.data.data_dir;
    let (store, ca) = data_dir::open_with_ca(directory)?;
    let is_retiring = matches!(ca.other(), Some((RootStage::Retiring, _)));
    if is_retiring && !args.force {
        let mut remaining = on_another_root(&store, ca.fingerprint())?;
        let mut lagging = Vec::new();
        if let Some(progress) = load_in_gateway(directory).await? {
            lagging = progress.lagging_gateways(USES_ACTIVE_ROOT);
            remaining.extend(progress.own.on_another_root);
        }
        check_retirement(&remaining, lagging)?;
    }
    let (ca, step) = apply_step(&store, &ca, Ca::retire)?;
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

/// Refuses a retirement that would exclude enrolled edges, or that other gateways are not ready for.
fn check_retirement(
    remaining: &BTreeSet<NodeName>,
    mut lagging: Vec<String>,
) -> anyhow::Result<()> {
    if !remaining.is_empty() {
        let (count, nodes) = (remaining.len(), format_nodes(remaining));
        lagging.insert(
            0,
            format!(
                "{count} enrolled edges still have certificates of the old root and would be refused: {nodes}"
            ),
        );
    }
    if !lagging.is_empty() {
        bail!(
            "{}; wait until they have renewed (causeway status), remove nodes that no longer exist (causeway node remove NODE), or continue with --force: these edges are then refused",
            lagging.join("; ")
        );
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

/// Applies a step to the CA whose condition was checked. Refuses it if another command, or the shared state, has changed the rotation
/// since `checked` was read: the condition of the step was then not checked for the roots that the step would change.
fn apply_step(
    store: &Store,
    checked: &Ca,
    step: impl FnOnce(Ca) -> Result<(Ca, RotationStep), causeway_certs::CaError>,
) -> anyhow::Result<(Ca, RotationStep)> {
    store.change_ca(|ca| {
        if (ca.fingerprint(), ca.other()) != (checked.fingerprint(), checked.other()) {
            bail!("another step of the rotation was applied meanwhile; run this command again");
        }
        Ok(step(ca)?)
    })
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
    let (connected, has_stage) = (progress.own.connected, |stage| {
        progress.own.root(stage).is_some()
    });
    let (description, condition) = if has_stage(RootStage::Prepared) {
        (
            "a new root is prepared; it is trusted by",
            TRUSTS_PREPARED_ROOT,
        )
    } else if has_stage(RootStage::Retiring) {
        (
            "a new root signs certificates; its certificates are used by",
            USES_ACTIVE_ROOT,
        )
    } else {
        return None;
    };
    let remaining = (condition.lagging_edges)(&progress.own);
    let mut text = format!(
        "{description} {} of {connected} connected edges",
        connected - remaining.len().min(connected)
    );
    if !remaining.is_empty() {
        let _ = write!(text, ", but not by {}", format_nodes(remaining));
    }
    for gateway in progress.lagging_gateways(condition) {
        let _ = write!(text, "; {gateway}");
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the progress of a gateway with these roots, each a stage and a letter, and these lagging edges.
    fn progress(roots: &[(&str, &str)], lagging: &[&str]) -> serde_json::Value {
        let roots: Vec<_> = roots
            .iter()
            .map(|(stage, letter)| serde_json::json!({ "stage": stage, "fingerprint": letter.repeat(64) }))
            .collect();
        serde_json::json!({
            "roots": roots, "connected": 2, "too_old": [], "without_roots": lagging, "on_another_root": lagging,
        })
    }

    /// Returns the status of a gateway without lagging edges, beside these other gateways.
    fn status(roots: &[(&str, &str)], gateways: &[(&str, serde_json::Value)]) -> RotationStatus {
        let mut own = progress(roots, &[]);
        let gateways = gateways.iter().map(|(address, progress)| {
            serde_json::json!({ "address": address, "progress": progress, "error": "it is silent" })
        });
        own["gateways"] = gateways.collect();
        serde_json::from_value(own).unwrap()
    }

    #[test]
    fn each_gateway_that_lags_is_named_with_its_edges() {
        let [prepared, behind] = [
            &[("active", "a"), ("prepared", "b")][..],
            &[("active", "a")],
        ];
        let gateways = [
            ("ready:1", progress(prepared, &[])),
            ("edges:1", progress(prepared, &["n1"])),
            ("behind:1", progress(behind, &[])),
            ("silent:1", serde_json::Value::Null),
            ("separate:1", progress(&[("active", "c")], &["n2"])),
        ];
        let status = status(prepared, &gateways);
        let refused = check_activation(&status).unwrap_err().to_string();
        let expected = "1 of 2 connected edges of gateway edges:1 do not trust the prepared root yet: n1; \
            gateway behind:1 has not loaded the prepared root; gateway silent:1 cannot be asked (it is silent); wait";
        assert!(refused.starts_with(expected), "{refused}");
        assert!(refused.contains("--force"), "{refused}");
    }

    #[test]
    fn a_retirement_waits_for_gateways_that_sign_with_the_old_root() {
        let [activated, behind] = [
            &[("active", "b"), ("retiring", "a")][..],
            &[("active", "a"), ("prepared", "b")],
        ];
        let ready = status(activated, &[("ready:1", progress(activated, &[]))]);
        let lagging = ready.lagging_gateways(USES_ACTIVE_ROOT);
        assert!(check_retirement(&BTreeSet::new(), lagging).is_ok());
        let gateways = [
            ("behind:1", progress(behind, &[])),
            ("edges:1", progress(activated, &["n1"])),
        ];
        let lagging = status(activated, &gateways).lagging_gateways(USES_ACTIVE_ROOT);
        let refused = check_retirement(&BTreeSet::new(), lagging).unwrap_err();
        let expected = "gateway behind:1 does not sign with the new root yet; \
            1 of 2 connected edges of gateway edges:1 still have certificates of the old root: n1; wait";
        assert!(refused.to_string().starts_with(expected), "{refused}");
    }

    /// The shared state can bring the step of another gateway while a command checks its condition.
    #[test]
    fn no_step_is_applied_to_a_rotation_whose_condition_was_not_checked() {
        type Step = fn(Ca) -> Result<(Ca, RotationStep), causeway_certs::CaError>;
        let steps: [(Step, Step); 2] = [(Ca::prepare, Ca::activate), (Ca::activate, Ca::retire)];
        let folder = tempfile::tempdir().unwrap();
        let domain = "causeway.test".parse().unwrap();
        let (store, _) = crate::operator::ca::ensure_ca(folder.path(), &domain).unwrap();
        for (by_another, step) in steps {
            let checked = store.ca().unwrap().unwrap();
            let (current, _) = apply_step(&store, &checked, by_another).unwrap();
            let refused = apply_step(&store, &checked, step).unwrap_err().to_string();
            assert!(refused.contains("run this command again"), "{refused}");
            let stored = store.ca().unwrap().unwrap();
            assert_eq!(stored.other(), current.other());
        }
        let checked = store.ca().unwrap().unwrap();
        let (retired, step) = apply_step(&store, &checked, Ca::retire).unwrap();
        assert_eq!((retired.other(), step), (None, RotationStep::Applied));
    }

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
