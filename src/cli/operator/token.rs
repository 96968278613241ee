//! The arguments of `causeway token`.

use std::net::IpAddr;
use std::time::Duration;

use causeway_certs::NodeAttributes;
use causeway_gateway::config::policy;
use clap::{Args, Subcommand, ValueEnum};

use super::config_flags::DataDir;

#[derive(Debug, Subcommand)]
pub(crate) enum Token {
    /// Create a join token for one node, used once, or for several nodes of a pattern
    Create(TokenCreate),
    /// List the tokens with their nodes, uses and expiry
    List(TokenList),
    /// Revoke tokens: no node joins with them any more; nodes that have joined stay
    Revoke(TokenRevoke),
}

#[derive(Debug, Args)]
pub(crate) struct TokenCreate {
    /// Name of the node that may join, or a pattern for names of new nodes, such as 'site-7-*'
    #[arg(long)]
    pub(crate) node: String,
    /// Number of nodes that may join, for a pattern
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) uses: u32,
    /// Lifetime of the token
    #[arg(long, default_value = "1h", value_parser = humantime::parse_duration)]
    pub(crate) ttl: Duration,
    #[command(flatten)]
    pub(crate) confirmed: NodeAttributeArgs,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

/// Confirmed attributes of a node, given by the operator who admits the node.
#[derive(Clone, Debug, Args)]
pub(crate) struct NodeAttributeArgs {
    /// Confirmed address of the node; may be given several times
    #[arg(long = "address", value_name = "IP")]
    pub(crate) addresses: Vec<IpAddr>,
    /// Confirmed pool of the node
    #[arg(long)]
    pub(crate) pool: Option<String>,
    /// Confirmed label of the node, for the policy; may be given several times
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub(crate) labels: Vec<(String, String)>,
}

impl NodeAttributeArgs {
    pub(crate) fn to_attributes(&self) -> NodeAttributes {
        NodeAttributes {
            addresses: self.addresses.clone(),
            pool: self.pool.clone(),
            labels: self.labels.iter().cloned().collect(),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct TokenList {
    /// Output format
    #[arg(short, long, value_enum, default_value_t = ListFormat::Table)]
    pub(crate) output: ListFormat,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ListFormat {
    /// One line for each entry
    Table,
    /// All details, in JSON
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct TokenRevoke {
    /// Ids of the tokens, as `token list` shows them
    #[arg(required = true, value_name = "ID")]
    pub(crate) ids: Vec<String>,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

/// `KEY=VALUE`.
pub(super) fn label(text: &str) -> Result<(String, String), String> {
    let Some((key, value)) = text.split_once('=') else {
        return Err("write KEY=VALUE, as in tier=gold".into());
    };
    if let Some(fault) = policy::label_fault(key).or_else(|| policy::label_fault(value)) {
        return Err(fault);
    }
    Ok((key.to_owned(), value.to_owned()))
}
