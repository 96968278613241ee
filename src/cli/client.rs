//! Arguments of `causeway client`: credentials of clients.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::data_dir::DataDir;

#[derive(Debug, Subcommand)]
pub(crate) enum ClientCommand {
    /// Issue a client certificate, signed by the gateway's CA
    Certificate(ClientCertificate),
    /// Create a bearer token. The file keeps its hash; the token is printed once
    Token(ClientToken),
    /// Revoke all bearer tokens of a client
    ///
    /// A certificate is revoked by its serial number in the gateway's key `listeners[].client_auth.revoked`.
    Revoke(ClientRevoke),
}

#[derive(Debug, Args)]
pub(crate) struct ClientCertificate {
    /// Name of the client
    #[arg(long)]
    pub(crate) name: String,
    /// Group of the client; may be given several times
    #[arg(long = "group", value_name = "GROUP")]
    pub(crate) groups: Vec<String>,
    /// Lifetime of the certificate
    #[arg(long, default_value = "30d", value_parser = humantime::parse_duration)]
    pub(crate) ttl: Duration,
    /// Directory for NAME.pem and NAME-key.pem
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct ClientToken {
    /// Name of the client
    #[arg(long)]
    pub(crate) name: String,
    /// Group of the client; may be given several times
    #[arg(long = "group", value_name = "GROUP")]
    pub(crate) groups: Vec<String>,
    /// Token file, the listener's `client_auth.tokens`; created if absent
    #[arg(long)]
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ClientRevoke {
    /// Name of the client
    #[arg(long)]
    pub(crate) name: String,
    /// Token file, the listener's `client_auth.tokens`
    #[arg(long)]
    pub(crate) file: PathBuf,
}
