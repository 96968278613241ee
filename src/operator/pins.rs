//! `causeway node pins|unpin`: pinned keys of apps, which are trusted on first use (`upstream_tls.*.pin`).
//!
//! The data directory has the keys. A gateway that runs on it has applied the change when the command returns.

use anyhow::bail;
use causeway_certs::{Pin, PinTable};
use comfy_table::{Table, presets};
use serde_json::json;

use super::{data_dir, token::format_date};
use crate::cli::operator::{ListFormat, NodeList, NodeUnpin};
use crate::output::outln;

/// Prints the pinned keys by node and port.
pub(super) fn list(args: &NodeList) -> anyhow::Result<()> {
    let all = data_dir::open_gateway_store(&args.data.data_dir)?
        .pins()
        .all()?;
    match args.output {
        ListFormat::Table => outln!("{}", table(&all))?,
        ListFormat::Json => {
            let rows: Vec<_> = pin_rows(&all)
                .map(|(node, port, pin)| {
                    json!({ "node": node, "port": port, "key": pin.key, "since": format_date(pin.since) })
                })
                .collect();
            outln!("{}", serde_json::to_string_pretty(&rows)?)?;
        }
    }
    Ok(())
}

fn pin_rows(all: &PinTable) -> impl Iterator<Item = (&str, u16, &Pin)> {
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
    for (node, port, pin) in pin_rows(all) {
        table.add_row([
            node.to_owned(),
            port.to_string(),
            pin.key.to_string(),
            format_date(pin.since),
        ]);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.trim_fmt()
}

/// Removes the pinned keys of a node, or of one of its ports.
pub(super) async fn unpin(args: NodeUnpin) -> anyhow::Result<()> {
    let (store, name) = data_dir::open_for_node(&args.data.data_dir, &args.node)?;
    let removed = store.pins().remove(&name, args.port)?;
    if removed.is_empty() {
        let subject = match args.port {
            Some(port) => format!("port {port} of {name}"),
            None => name.to_string(),
        };
        bail!("no key of {subject} is pinned here; `causeway node pins` lists the pinned keys");
    }
    let ports: Vec<_> = removed.keys().map(u16::to_string).collect();
    let description = format!(
        "the pinned key of {name} at port {} is removed",
        ports.join(", ")
    );
    data_dir::notify_gateway(&args.data.data_dir, &description).await
}
