//! The arguments of `causeway ca`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::DataDir;

#[derive(Debug, Subcommand)]
pub(crate) enum Ca {
    /// Make the CA of a data directory, or have the one that is there signed by your own
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
    /// Take up the CA that several gateways share, from a folder such as a mounted Secret, if it is not behind; may be run again
    Import(CaImport),
}

#[derive(Debug, Args)]
pub(crate) struct CaImport {
    /// The folder with ca.json and tickets.key (`causeway k8s ca-secret`)
    #[arg(value_name = "DIR")]
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
    Prepare(RotatePrepare),
    /// Let the new root sign everything; the old one is trusted still
    Activate(RotateArgs),
    /// Trust the old root no more
    Retire(RotateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RotatePrepare {
    #[command(flatten)]
    pub(crate) operator: OperatorCaArgs,
    #[command(flatten)]
    pub(crate) step: RotateArgs,
}

/// Location of an operator's own CA, if one is to sign.
#[derive(Debug, Default, Args)]
pub(crate) struct OperatorCaArgs {
    /// Your own CA's certificate in PEM, then those by which it hangs on its root: it signs the root of this one, so
    /// that fronts are believed by whoever trusts yours
    #[arg(long, value_name = "FILE", requires = "from_key")]
    pub(crate) from_certificate: Option<PathBuf>,
    /// Your own CA's private key in PEM; used at once, and not kept
    #[arg(long, value_name = "FILE", requires = "from_certificate")]
    pub(crate) from_key: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RotateArgs {
    /// Go on although edges, or callers that trust your own CA alone, are left behind
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
    pub(crate) operator: OperatorCaArgs,
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
