//! Arguments of `causeway node`: admission of nodes at a gateway.

use clap::{Args, Subcommand};

use super::data_dir::DataDir;
use super::token::{ListFormat, NodeAttributeArgs};

#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// List the nodes of the data directory, connected or not, and the revoked ones
    List(NodeList),
    /// Admit a node whose certificate an external CA issues, or change the confirmed attributes of a known node
    Add(NodeAdd),
    /// Close a node's tunnels within a second and refuse the node from then on
    Revoke(NodeRevoke),
    /// Admit a revoked node again
    Allow(NodeArg),
    /// Forget a node. It is admitted again with a new token, by `add`, or where any node is admitted (`any_node`); to refuse it, revoke it
    Remove(NodeArg),
    /// List the pinned keys of apps on nodes (`upstream_tls.*.pin`)
    Pins(NodeList),
    /// Forget the pinned key of an app on a node: the gateway trusts the key that the app has at the next connection
    Unpin(NodeUnpin),
}

#[derive(Debug, Args)]
pub(crate) struct NodeAdd {
    /// Name of the node
    pub(crate) node: String,
    #[command(flatten)]
    pub(crate) confirmed: NodeAttributeArgs,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct NodeRevoke {
    /// Name of the node
    pub(crate) node: String,
    /// Reason, which is sent to the edge and shown by `status`
    #[arg(long)]
    pub(crate) reason: String,
    /// Revoke the node although it has never joined this gateway
    #[arg(long)]
    pub(crate) unseen: bool,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct NodeArg {
    /// Name of the node
    pub(crate) node: String,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct NodeList {
    /// Output format
    #[arg(short, long, value_enum, default_value_t = ListFormat::Table)]
    pub(crate) output: ListFormat,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct NodeUnpin {
    /// Name of the node
    pub(crate) node: String,
    /// Port of the app; all ports of the node if absent
    pub(crate) port: Option<u16>,
    #[command(flatten)]
    pub(crate) data: DataDir,
}
