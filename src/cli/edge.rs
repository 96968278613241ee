//! The arguments of `causeway edge` that are no edge's: who is welcome at a gateway.

use clap::{Args, Subcommand};

use super::{ConfirmedArgs, DataDir};

#[derive(Debug, Subcommand)]
pub(crate) enum EdgeOrder {
    /// Let a node in whose certificate another system makes; of a node that is known, confirm something else
    Add(EdgeAdd),
    /// End a node's tunnels within a second, and let it in no more
    Revoke(EdgeRevoke),
    /// Let a node in again that was revoked
    Allow(EdgeNamed),
    /// Forget a node: it is let in again by a new token, by `add`, or where any node is (`any_node`); to shut one out, revoke it
    Remove(EdgeNamed),
}

#[derive(Debug, Args)]
pub(crate) struct EdgeAdd {
    /// The node
    pub(crate) node: String,
    #[command(flatten)]
    pub(crate) confirmed: ConfirmedArgs,
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
pub(crate) struct EdgeNamed {
    /// The node
    pub(crate) node: String,
    #[command(flatten)]
    pub(crate) data: DataDir,
}
