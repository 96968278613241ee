//! The arguments of `causeway ca`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::config_flags::DataDir;

#[derive(Debug, Subcommand)]
pub(crate) enum Ca {
    /// Create the CA of a data directory
    Init(CaInit),
    /// Replace the root that signs with another one, in three steps
    #[command(subcommand)]
    Rotate(Rotate),
    /// Write the CA, the session ticket secret, the tokens and the nodes to one file; a gateway may be running
    Backup(CaBackup),
    /// Restore a data directory from a backup; no gateway may be running on it
    Restore(CaBackup),
    /// Print a certificate request for an intermediate CA that signs listeners' certificates
    ///
    /// Your own CA signs the request. Clients that trust that CA then verify listeners.
    Csr(CaCsr),
    /// Install the chain that your own CA has issued for the request (a file), or the CA that several gateways share (a directory)
    ///
    /// From then on clients need the root of your CA to verify listeners. ca.pem contains it.
    ///
    /// A shared CA that is older than the data directory's own is not installed. The command may be run again.
    Import(CaImport),
    /// List the serial numbers of the gateways' certificates, and those that are revoked
    Gateways(CaGateways),
    /// Revoke the certificate of a gateway: edges and other gateways refuse it from then on
    ///
    /// `causeway ca gateways` shows the serial numbers. The gateway gets a new certificate when the revocation reaches it, or at its next start. A revocation cannot be undone: edges keep it until the certificate has expired.
    RevokeGateway(CaRevokeGateway),
}

#[derive(Debug, Args)]
pub(crate) struct CaGateways {
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct CaRevokeGateway {
    /// Serial number of the certificate, in hexadecimal
    pub(crate) serial: String,
    /// Reason for the revocation, one line
    #[arg(long, default_value = "revoked by the operator")]
    pub(crate) reason: String,
    /// Revoke the certificate even if it is that of the gateway on this data directory, or of no gateway that is known there
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct CaCsr {
    /// Make a new key, and a new request in place of a pending one. For instance, after a theft of ca.json
    #[arg(long)]
    pub(crate) new: bool,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct CaImport {
    /// PEM file with the signed certificate for the request of `causeway ca csr` first, then the CAs above it up to the root; or a directory with
    /// ca.json and tickets.key, such as a mounted Secret (`causeway k8s ca-secret`)
    #[arg(value_name = "PATH", required_unless_present = "remove")]
    pub(crate) from: Option<PathBuf>,
    /// PEM file with the root at which the chain must end
    #[arg(long, value_name = "FILE")]
    pub(crate) root: Option<PathBuf>,
    /// Remove the imported chain; listeners present certificates of Causeway's own CA again
    #[arg(long, conflicts_with_all = ["from", "root"])]
    pub(crate) remove: bool,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct CaBackup {
    /// Backup file. It contains all keys: its owner can act as any edge and any client
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Rotate {
    /// Create a new root that is trusted beside the old one and signs nothing yet
    Prepare(RotateArgs),
    /// Sign everything with the new root; the old one is still trusted
    Activate(RotateArgs),
    /// Stop trusting the old root
    Retire(RotateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RotateArgs {
    /// Continue even if some edges do not have the new root yet
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct CaInit {
    /// Trust domain of the identities in certificates: `spiffe://NAME`
    #[arg(long, value_name = "NAME", default_value = "causeway.local")]
    pub(crate) trust_domain: causeway_certs::TrustDomain,
    #[command(flatten)]
    pub(crate) data: DataDir,
}
