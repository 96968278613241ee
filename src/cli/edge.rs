//! Arguments of `causeway edge`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::RunArgs;

/// Arguments of a running edge, or a command about its identity.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Edge {
    #[command(subcommand)]
    pub(crate) command: Option<EdgeCommand>,
    /// Replace this node's identity with the token of --join or --join-file, even if gateways accept it; the old identity is kept as a copy
    #[arg(long)]
    pub(crate) rejoin: bool,
    #[command(flatten)]
    pub(crate) run: RunArgs<causeway_edge::config::Config>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum EdgeCommand {
    /// Give up this node's identity, which is kept as a copy; the next start joins with a new token
    Leave(EdgeLeave),
}

#[derive(Debug, Args)]
pub(crate) struct EdgeLeave {
    /// Data directory of the edge
    #[arg(
        long,
        value_name = "DIR",
        env = "CAUSEWAY_DATA_DIR",
        default_value = "/var/lib/causeway-edge"
    )]
    pub(crate) data_dir: PathBuf,
}
