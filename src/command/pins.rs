//! `causeway node pins|unpin`: pinned keys of apps, which are trusted on first use (`upstream_tls.*.pin`).
//!
//! The data directory has the keys. A gateway that runs on it has applied the change when the command returns.

use anyhow::bail;
use causeway_certs::{Pin, PinTable};
use comfy_table::{Table, presets};
use serde_json::json;

use super::{data_dir, token::date};
use crate::cli::{ListFormat, NodeList, NodeUnpin};
use crate::output::outln;

/// Prints the pinned keys by node and port.
pub(super) fn list(ask: &NodeList) -> anyhow::Result<()> {
    let all = data_dir::of_gateway(&ask.data.data_dir)?.pins().all()?;
    match ask.output {
        ListFormat::Table => outln!("{}", table(&all))?,
        ListFormat::Json => {
            let rows: Vec<_> = rows(&all)
                .map(|(node, port, pin)| {
                    json!({ "node": node, "port": port, "key": pin.key, "since": date(pin.since) })
                })
                .collect();
            outln!("{}", serde_json::to_string_pretty(&rows)?)?;
        }
    }
    Ok(())
}

fn rows(all: &PinTable) -> impl Iterator<Item = (&str, u16, &Pin)> {
    all.iter().flat_map(|(node, ports)| {
        let pins = ports.iter();
        pins.map(move |(port, pin)| (node.as_str(), *port, pin))
    })
}

fn table(all: &PinTable) -> String {
    if all.is_empty() {
        return "no pinned keys; with pin: true in upstream_tls, the gateway pins the key of an app at the first connection".into();
    }
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(["NODE", "PORT", "KEY (SHA-256)", "SINCE"]);
    for (node, port, pin) in rows(all) {
        table.add_row([
            node.to_owned(),
            port.to_string(),
            pin.key.to_string(),
            date(pin.since),
        ]);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.trim_fmt()
}

/// Removes the pinned keys of a node, or of one of its ports.
pub(super) async fn unpin(ask: NodeUnpin) -> anyhow::Result<()> {
    let (store, name) = data_dir::open(&ask.data.data_dir, &ask.node)?;
    let forgotten = store.pins().forget(&name, ask.port)?;
    if forgotten.is_empty() {
        let which = match ask.port {
            Some(port) => format!("port {port} of {name}"),
            None => name.to_string(),
        };
        bail!("no key of {which} is pinned here; `causeway node pins` lists the pinned keys");
    }
    let ports: Vec<_> = forgotten.keys().map(u16::to_string).collect();
    let done = format!(
        "the pinned key of {name} at port {} is removed",
        ports.join(", ")
    );
    data_dir::notify_gateway(&ask.data.data_dir, &done).await
}
