//! Arguments that describe a cluster.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::DataDir;

#[derive(Debug, Subcommand)]
pub(crate) enum K8s {
    /// Print the configuration of the egress selector by which kube-apiserver comes through a connect front
    EgressConfig(EgressConfig),
    /// Print the CAs that kube-apiserver's `--kubelet-certificate-authority` has to know where fronts show certificates by the gateway's CA
    CaBundle(CaBundle),
    /// Print the Secret by which several gateways have one CA: a new one, or that of a data directory
    CaSecret(CaSecret),
}

#[derive(Debug, Args)]
pub(crate) struct CaSecret {
    /// Namespace of the Secret
    #[arg(long, value_name = "NAME", default_value = "causeway")]
    pub(crate) namespace: String,
    /// Name of the Secret
    #[arg(long, default_value = "causeway-ca")]
    pub(crate) name: String,
    /// Under which name identities stand in certificates: `spiffe://NAME`
    #[arg(long, value_name = "NAME", default_value = "causeway.local")]
    pub(crate) trust_domain: causeway_certs::TrustDomain,
    /// Data directory of a gateway, whose CA it is to be; without it a new one is made
    #[arg(long, value_name = "DIR", conflicts_with = "trust_domain")]
    pub(crate) data_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CaBundle {
    /// File of the CA of kubelets that are reached without a front, such as those of the cloud (again for each)
    #[arg(long, value_name = "FILE")]
    pub(crate) kubelet_ca: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct EgressConfig {
    /// The front's unix socket, where kube-apiserver runs on the same host
    #[arg(long, value_name = "PATH", conflicts_with_all = ["url", "ca", "certificate", "key", "server_name"])]
    pub(crate) socket: Option<PathBuf>,
    /// URL of the listener, `https://HOST:PORT`
    #[arg(long, required_unless_present = "socket", requires_all = ["certificate", "key"])]
    pub(crate) url: Option<String>,
    /// File of the CA of the front's certificate, as kube-apiserver's host knows it (`ca.pem` of the gateway)
    #[arg(long, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// File of the certificate that kube-apiserver shows (`causeway ca caller`)
    #[arg(long, value_name = "FILE")]
    pub(crate) certificate: Option<PathBuf>,
    /// File of its key
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,
    /// The name in the front's certificate, where the URL has another
    #[arg(long, value_name = "NAME")]
    pub(crate) server_name: Option<String>,
}
