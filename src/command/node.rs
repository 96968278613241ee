//! `causeway node list|add|revoke|allow|remove`: admission and revocation of nodes at a gateway. `pins` handles the pinned keys
//! of their upstreams.
//!
//! The data directory is changed first, so that the change persists whatever happens to the gateway. Then the command
//! notifies the gateway that runs on it. The gateway has closed the tunnels in question when the command returns.

use anyhow::{anyhow, bail};
use causeway_certs::{NodeName, NodeRecord, Revocation, Store};
use comfy_table::{Table, presets};
use rustls::pki_types::UnixTime;
use serde_json::{Value, json};

use super::{
    data_dir::{self, notify_gateway, open},
    pins,
    token::{self, date},
};
use crate::cli::{ListFormat, NodeAdd, NodeArg, NodeCommand, NodeList, NodeRevoke};
use crate::output::outln;

/// Longest reason, in bytes: it goes to the edge in one line.
const LONGEST: usize = 512;

/// Does what was ordered.
pub(crate) async fn run(order: NodeCommand) -> anyhow::Result<()> {
    let (directory, node, done) = match order {
        NodeCommand::Add(ask) => {
            let (store, node) = open(&ask.data.data_dir, &ask.node)?;
            warn_of_what_is_known(&store, &node, &ask)?;
            store
                .nodes()
                .confirm(&node, ask.confirmed.get(), UnixTime::now().as_secs())?;
            (ask.data.data_dir, node, "admitted")
        }
        NodeCommand::Revoke(ask) => {
            let (store, node) = open(&ask.data.data_dir, &ask.node)?;
            revoke(&store, &node, &ask)?;
            store.pins().forget(&node, None)?;
            (ask.data.data_dir, node, "revoked")
        }
        NodeCommand::Allow(NodeArg { node, data }) => {
            let (store, node) = open(&data.data_dir, &node)?;
            known(store.nodes().set_revoked(&node, None)?, &store, &node)?;
            (data.data_dir, node, "admitted again")
        }
        NodeCommand::List(ask) => return list(&ask),
        NodeCommand::Pins(ask) => return pins::list(&ask),
        NodeCommand::Unpin(ask) => return pins::unpin(ask).await,
        NodeCommand::Remove(NodeArg { node, data }) => {
            let (store, node) = open(&data.data_dir, &node)?;
            known(store.nodes().remove(&node)?, &store, &node)?;
            // Another machine may get this name.
            store.pins().forget(&node, None)?;
            (data.data_dir, node, "removed")
        }
    };
    notify_gateway(&directory, &format!("{node} is {done}")).await
}

/// Prints the nodes of the data directory.
fn list(ask: &NodeList) -> anyhow::Result<()> {
    let all = data_dir::of_gateway(&ask.data.data_dir)?.nodes().all()?;
    match ask.output {
        ListFormat::Table => outln!("{}", table(&all))?,
        ListFormat::Json => {
            let rows: Vec<_> = all.iter().map(row).collect();
            outln!("{}", serde_json::to_string_pretty(&rows)?)?;
        }
    }
    Ok(())
}

fn row(record: &NodeRecord) -> Value {
    let revoked = record.revoked.as_ref();
    json!({
        "node": record.node,
        "state": state(record),
        "pool": record.pool,
        "addresses": record.addresses,
        "labels": record.labels,
        "enrolled": date(record.enrolled_at),
        "certificate_expires": record.not_after.map(date),
        "revoked": revoked.map(|it| json!({ "at": date(it.at), "reason": it.reason })),
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
            date(record.enrolled_at),
            or_none(record.not_after.map(date).unwrap_or_default()),
            or_none(addresses.join(",")),
            or_none(labels.join(",")),
        ]);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.trim_fmt()
}

/// Of a node that is known, this changes what is confirmed, and nothing else.
fn warn_of_what_is_known(store: &Store, node: &NodeName, ask: &NodeAdd) -> anyhow::Result<()> {
    let all = store.nodes().all()?;
    let Some(known) = all.iter().find(|known| known.node == *node) else {
        return Ok(());
    };
    if let Some(revoked) = &known.revoked {
        let reason = &revoked.reason;
        bail!("{node} is revoked: {reason}; `causeway node allow {node}` admits it again");
    }
    token::warn_of_change(known, &ask.confirmed.get(), "this command replaces them");
    Ok(())
}

fn revoke(store: &Store, node: &NodeName, ask: &NodeRevoke) -> anyhow::Result<()> {
    let reason = ask.reason.trim();
    if reason.is_empty() || reason.len() > LONGEST || reason.contains(char::is_control) {
        bail!("--reason must be one line of 1 to {LONGEST} bytes");
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
        .map_err(|error| anyhow!("{error}; to revoke a node that has not joined yet, add --unseen"))
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
