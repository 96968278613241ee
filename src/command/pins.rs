//! `causeway edge pins|unpin`: by which keys apps are known that are believed from their first use on (`apps.*.pin`).
//!
//! The data directory says which; what is forgotten there is forgotten by a gateway that runs on it when this returns.

use anyhow::bail;
use causeway_certs::{Pin, PinTable};
use comfy_table::{Table, presets};
use serde_json::json;

use super::{data_dir, edges, token::date};
use crate::cli::{EdgePins, EdgeUnpin, ListFormat};
use crate::output::outln;

/// Shows them, by node and port.
pub(super) fn list(ask: &EdgePins) -> anyhow::Result<()> {
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
        return "no app is known by its key; apps whose configuration says pin: true are, once they were asked".into();
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

/// Forgets those of a node, or of one port of it.
pub(super) async fn unpin(ask: EdgeUnpin) -> anyhow::Result<()> {
    let (store, node) = edges::open(&ask.data.data_dir, &ask.node)?;
    let forgotten = store.pins().forget(&node, ask.port)?;
    if forgotten.is_empty() {
        let which = match ask.port {
            Some(port) => format!("port {port} of {node}"),
            None => node.to_string(),
        };
        bail!("no key of {which} is noted here; `causeway edge pins` shows which are");
    }
    let ports: Vec<_> = forgotten.keys().map(u16::to_string).collect();
    let done = format!(
        "by which key {node} is known at {} is forgotten",
        ports.join(", ")
    );
    edges::notify_gateway(&ask.data.data_dir, &done).await
}
