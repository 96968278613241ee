//! The arguments of `causeway ca`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::DataDir;

#[derive(Debug, Subcommand)]
pub(crate) enum Ca {
    /// Make the CA of a data directory
    Init(CaInit),
    /// Make a certificate by which a caller is known to fronts
    Caller(CaClient),
    /// Let another root take the place of the one that signs, in three steps
    #[command(subcommand)]
    Rotate(Rotate),
    /// Write CA, secret of session tickets, tokens and nodes into one file; a gateway may run meanwhile
    Backup(CaBackup),
    /// Make a data directory what it was when a backup was made; no gateway may run on it
    Restore(CaBackup),
    /// Print a certificate request for an intermediate that signs listeners' certificates: your own CA signs it, so that clients
    /// that trust that CA verify listeners
    Csr(CaCsr),
    /// Install the chain that your own CA has made of the request (a file), or take up the CA that several gateways share (a
    /// folder such as a mounted Secret), if it is not behind; may be run again
    Import(CaImport),
}

#[derive(Debug, Args)]
pub(crate) struct CaCsr {
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct CaImport {
    /// A file in PEM: the signed request of `causeway ca csr`, and then the CAs above it up to the root; or a folder with ca.json
    /// and tickets.key (`causeway k8s ca-secret`)
    #[arg(value_name = "PATH")]
    pub(crate) from: PathBuf,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct CaBackup {
    /// The backup; whoever has it can be any edge and any caller
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Rotate {
    /// Make a new root that is trusted beside the one that signs, and signs nothing yet
    Prepare(RotateArgs),
    /// Let the new root sign everything; the old one is trusted still
    Activate(RotateArgs),
    /// Trust the old root no more
    Retire(RotateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RotateArgs {
    /// Go on although edges are left behind
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct CaInit {
    /// Under which name identities stand in certificates: `spiffe://NAME`
    #[arg(long, value_name = "NAME", default_value = "causeway.local")]
    pub(crate) trust_domain: causeway_certs::TrustDomain,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct CaClient {
    /// Name of the caller
    #[arg(long)]
    pub(crate) name: String,
    /// Group of the caller; may be given several times
    #[arg(long = "group", value_name = "GROUP")]
    pub(crate) groups: Vec<String>,
    /// Life of the certificate
    #[arg(long, default_value = "30d", value_parser = humantime::parse_duration)]
    pub(crate) ttl: Duration,
    /// Directory for NAME.pem and NAME-key.pem
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) data: DataDir,
}
