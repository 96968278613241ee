//! `causeway nodes`: the nodes and ports that the user may reach, as the gateway lists them for this user.

use comfy_table::{Table, presets};
use serde::{Deserialize, Serialize};

use crate::access::gateway_client::{GatewayClient, RequestError};
use crate::access::profile::ProfileDirectory;
use crate::cli::{Nodes, NodesFormat, ProfileArg};
use crate::output::{errln, outln};

/// Path of the list at a `connect` listener.
const PATH: &str = "/.well-known/causeway/nodes";

/// Answer of the gateway.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NodeList {
    /// Name of the client, as the gateway identified it.
    pub(super) client: String,
    /// The nodes.
    pub(super) nodes: Vec<ReachableNode>,
}

/// One node.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReachableNode {
    /// Name of the node.
    pub(super) node: String,
    /// Whether the node has a tunnel.
    connected: bool,
    /// Ports that the edge reports and that the user may reach.
    ports: Vec<u16>,
    /// Whether the user may open a session to some port, rather than only send it some requests. Gateways of earlier versions do
    /// not tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) connect: Option<bool>,
    /// Services that the edge reports and that the user may reach, each reached as `SERVICE.NODE`. Gateways of earlier versions do not list them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    services: Vec<String>,
    /// Confirmed pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    /// Confirmed labels.
    #[serde(default)]
    labels: std::collections::BTreeMap<String, String>,
}

/// Runs the command.
pub(crate) async fn run(args: Nodes) -> anyhow::Result<()> {
    let (_, client) = open_client(&args.profile)?;
    let list = fetch(&client).await?;
    if args.output == NodesFormat::Json {
        return outln!("{}", serde_json::to_string_pretty(&list)?);
    }
    if list.nodes.is_empty() {
        errln!("the gateway allows {} to reach no node", list.client);
        return Ok(());
    }
    outln!("{}", table(&list))
}

/// Returns a client for the selected profile, with the name of the profile.
pub(super) fn open_client(profile: &ProfileArg) -> anyhow::Result<(String, GatewayClient)> {
    let directory = ProfileDirectory::of_user()?;
    let (name, profile) = directory.select(profile.profile.as_deref())?;
    Ok((name, GatewayClient::new(profile)?))
}

/// Returns the nodes that the user may reach.
pub(super) async fn fetch(client: &GatewayClient) -> Result<NodeList, RequestError> {
    let body = client.get(PATH).await?;
    serde_json::from_slice(&body).map_err(|error| {
        let context = format!("{} sent no list of nodes", client.gateway());
        RequestError::Unreachable(anyhow::Error::from(error).context(context))
    })
}

fn table(list: &NodeList) -> String {
    let or_none = |text: String| if text.is_empty() { "-".into() } else { text };
    let mut table = Table::new();
    let header = ["NODE", "STATE", "PORTS", "SERVICES", "POOL", "LABELS"];
    table.load_style(presets::NOTHING).set_header(header);
    for row in &list.nodes {
        let ports: Vec<_> = row.ports.iter().map(ToString::to_string).collect();
        let labels = row.labels.iter();
        let labels: Vec<_> = labels
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        table.add_row([
            row.node.clone(),
            if row.connected { "connected" } else { "away" }.to_owned(),
            or_none(ports.join(",")),
            or_none(row.services.join(",")),
            or_none(row.pool.clone().unwrap_or_default()),
            or_none(labels.join(",")),
        ]);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.trim_fmt()
}
