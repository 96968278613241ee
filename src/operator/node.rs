//! `causeway node list|add|revoke|allow|remove`: admission and revocation of nodes at a gateway. `pins` handles the pinned keys
//! of their upstreams.
//!
//! The data directory is changed first, so that the change persists whatever happens to the gateway. Then the command
//! notifies the gateway that runs on it. The gateway has closed the tunnels in question when the command returns.

use anyhow::{anyhow, bail};
use causeway_certs::{NodeName, NodeRecord, OtherFields, Revocation, Store};
use comfy_table::{Table, presets};
use rustls::pki_types::UnixTime;
use serde_json::{Value, json};

use super::{
    data_dir::{self, notify_gateway, open_for_node},
    pins,
    token::{self, format_date},
};
use crate::cli::operator::{ListFormat, NodeAdd, NodeArg, NodeCommand, NodeList, NodeRevoke};
use crate::output::outln;

/// Maximum length of a reason, in bytes: it is sent to the edge in one line.
const MAX_REASON_BYTES: usize = 512;

/// Runs the command.
pub(crate) async fn run(command: NodeCommand) -> anyhow::Result<()> {
    let (directory, node, outcome) = match command {
        NodeCommand::Add(args) => {
            let (store, node) = open_for_node(&args.data.data_dir, &args.node)?;
            warn_if_known(&store, &node, &args)?;
            store.nodes().confirm(
                &node,
                args.confirmed.to_attributes(),
                UnixTime::now().as_secs(),
            )?;
            (args.data.data_dir, node, "admitted")
        }
        NodeCommand::Revoke(args) => {
            let (store, node) = open_for_node(&args.data.data_dir, &args.node)?;
            revoke(&store, &node, &args)?;
            store.pins().remove(&node, None)?;
            (args.data.data_dir, node, "revoked")
        }
        NodeCommand::Allow(NodeArg { node, data }) => {
            let (store, node) = open_for_node(&data.data_dir, &node)?;
            check_found(store.nodes().set_revoked(&node, None)?, &store, &node)?;
            (data.data_dir, node, "admitted again")
        }
        NodeCommand::List(args) => return list(&args),
        NodeCommand::Pins(args) => return pins::list(&args),
        NodeCommand::Unpin(args) => return pins::unpin(args).await,
        NodeCommand::Remove(NodeArg { node, data }) => {
            let (store, node) = open_for_node(&data.data_dir, &node)?;
            check_found(store.nodes().remove(&node)?, &store, &node)?;
            // Another machine may get this name.
            store.pins().remove(&node, None)?;
            (data.data_dir, node, "removed")
        }
    };
    notify_gateway(&directory, &format!("{node} is {outcome}")).await
}

/// Prints the nodes of the data directory.
fn list(args: &NodeList) -> anyhow::Result<()> {
    let all = data_dir::open_gateway_store(&args.data.data_dir)?
        .nodes()
        .all()?;
    match args.output {
        ListFormat::Table => outln!("{}", table(&all))?,
        ListFormat::Json => {
            let rows: Vec<_> = all.iter().map(json_row).collect();
            outln!("{}", serde_json::to_string_pretty(&rows)?)?;
        }
    }
    Ok(())
}

fn json_row(record: &NodeRecord) -> Value {
    let revoked = record.revoked.as_ref();
    json!({
        "node": record.node,
        "state": state(record),
        "pool": record.pool,
        "addresses": record.addresses,
        "labels": record.labels,
        "enrolled": format_date(record.enrolled_at),
        "certificate_expires": record.not_after.map(format_date),
        "revoked": revoked.map(|it| json!({ "at": format_date(it.at), "reason": it.reason })),
    })
}

fn state(record: &NodeRecord) -> &'static str {
    if record.revoked.is_some() {
        "revoked"
    } else {
        "admitted"
    }
}

fn table(all: &[NodeRecord]) -> String {
    if all.is_empty() {
        return "no nodes; create a join token with: causeway token create --node NODE".into();
    }
    let or_none = |text: String| if text.is_empty() { "-".into() } else { text };
    let mut table = Table::new();
    let header = [
        "NODE",
        "STATE",
        "POOL",
        "ENROLLED",
        "EXPIRES",
        "ADDRESSES",
        "LABELS",
    ];
    table.load_style(presets::NOTHING).set_header(header);
    for record in all {
        let addresses: Vec<_> = record.addresses.iter().map(ToString::to_string).collect();
        let labels = record.labels.iter();
        let labels: Vec<_> = labels
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        table.add_row([
            record.node.to_string(),
            state(record).to_owned(),
            or_none(record.pool.clone().unwrap_or_default()),
            format_date(record.enrolled_at),
            or_none(record.not_after.map(format_date).unwrap_or_default()),
            or_none(addresses.join(",")),
            or_none(labels.join(",")),
        ]);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.trim_fmt()
}

/// Warns if the node is known already: the command then changes its confirmed attributes and nothing else.
fn warn_if_known(store: &Store, node: &NodeName, args: &NodeAdd) -> anyhow::Result<()> {
    let all = store.nodes().all()?;
    let Some(existing) = all.iter().find(|known| known.node == *node) else {
        return Ok(());
    };
    if let Some(revoked) = &existing.revoked {
        let reason = &revoked.reason;
        bail!("{node} is revoked: {reason}; `causeway node allow {node}` admits it again");
    }
    token::warn_of_change(
        existing,
        &args.confirmed.to_attributes(),
        "this command replaces them",
    );
    Ok(())
}

fn revoke(store: &Store, node: &NodeName, args: &NodeRevoke) -> anyhow::Result<()> {
    let reason = args.reason.trim();
    if reason.is_empty() || reason.len() > MAX_REASON_BYTES || reason.contains(char::is_control) {
        bail!("--reason must be one line of 1 to {MAX_REASON_BYTES} bytes");
    }
    let revoked = Revocation {
        at: UnixTime::now().as_secs(),
        reason: reason.to_owned(),
        other: OtherFields::new(),
    };
    if args.unseen {
        return Ok(store.nodes().revoke_or_create(node, &revoked)?);
    }
    let found = store.nodes().set_revoked(node, Some(revoked))?;
    check_found(found, store, node)
        .map_err(|error| anyhow!("{error}; to revoke a node that has not joined yet, add --unseen"))
}

fn check_found(found: bool, store: &Store, node: &NodeName) -> anyhow::Result<()> {
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
        0 => bail!("this data directory has no nodes"),
        1..=20 => bail!(
            "this data directory has no node {node}; it has: {}",
            names.join(", ")
        ),
        many => bail!(
            "this data directory has no node {node}; `causeway node list` shows its {many} nodes"
        ),
    }
}
