//! The arguments of `causeway edge` that are no edge's: who is welcome at a gateway.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{DataDir, ListFormat, NodeAttributeArgs};

#[derive(Debug, Subcommand)]
pub(crate) enum EdgeCommand {
    /// Let a node in whose certificate another system makes; of a node that is known, confirm something else
    Add(EdgeAdd),
    /// End a node's tunnels within a second, and let it in no more
    Revoke(EdgeRevoke),
    /// Let a node in again that was revoked
    Allow(EdgeNameArg),
    /// Forget a node: it is let in again by a new token, by `add`, or where any node is (`any_node`); to shut one out, revoke it
    Remove(EdgeNameArg),
    /// On the node itself: give up this node's identity, which is kept aside; the next start joins anew with a token
    Leave(EdgeLeave),
    /// List the keys by which apps on nodes are known (`apps.*.pin`)
    Pins(EdgePins),
    /// Forget by which key an app on a node is known: whichever it has when it is met next is believed
    Unpin(EdgeUnpin),
}

#[derive(Debug, Args)]
pub(crate) struct EdgeAdd {
    /// The node
    pub(crate) node: String,
    #[command(flatten)]
    pub(crate) confirmed: NodeAttributeArgs,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct EdgeRevoke {
    /// The node
    pub(crate) node: String,
    /// Why; the edge is told, and `status` shows it
    #[arg(long)]
    pub(crate) reason: String,
    /// Also where the node is not known here, since it has yet to come
    #[arg(long)]
    pub(crate) unseen: bool,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct EdgeNameArg {
    /// The node
    pub(crate) node: String,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct EdgeLeave {
    /// The edge's data directory
    #[arg(
        long,
        value_name = "DIR",
        env = "CAUSEWAY_DATA_DIR",
        default_value = "/var/lib/causeway-edge"
    )]
    pub(crate) data_dir: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct EdgePins {
    /// As a table, or as JSON
    #[arg(short, long, value_enum, default_value_t = ListFormat::Table)]
    pub(crate) output: ListFormat,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct EdgeUnpin {
    /// The node
    pub(crate) node: String,
    /// The app's port; without it, all of the node
    pub(crate) port: Option<u16>,
    #[command(flatten)]
    pub(crate) data: DataDir,
}
