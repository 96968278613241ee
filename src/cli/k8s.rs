//! Arguments that describe a cluster.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::data_dir::DataDir;

#[derive(Debug, Subcommand)]
pub(crate) enum K8s {
    /// Print the egress selector configuration by which kube-apiserver uses a connect listener
    EgressConfig(EgressConfig),
    /// Print the CA file for kube-apiserver's `--kubelet-certificate-authority`, for listeners with certificates of the gateway's CA
    CaBundle(CaBundle),
    /// Print the Secret with the CA that several gateways share: a new CA, or that of a data directory
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
    /// Trust domain of the identities in certificates: `spiffe://NAME`
    #[arg(long, value_name = "NAME", default_value = "causeway.local")]
    pub(crate) trust_domain: causeway_certs::TrustDomain,
    /// Data directory of the gateway whose CA is used; if absent, a new CA is created
    #[arg(long, value_name = "DIR", conflicts_with = "trust_domain")]
    pub(crate) data_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CaBundle {
    /// CA file of kubelets that are not reached through a listener, such as those in the cloud; may be given several times
    #[arg(long, value_name = "FILE")]
    pub(crate) kubelet_ca: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) data: DataDir,
}

#[derive(Debug, Args)]
pub(crate) struct EgressConfig {
    /// Unix socket of the listener, if kube-apiserver runs on the same host
    #[arg(long, value_name = "PATH", conflicts_with_all = ["url", "ca", "certificate", "key", "server_name"])]
    pub(crate) socket: Option<PathBuf>,
    /// URL of the listener, `https://HOST:PORT`
    #[arg(long, required_unless_present = "socket", requires_all = ["certificate", "key"])]
    pub(crate) url: Option<String>,
    /// CA file for the listener's certificate, as a path on kube-apiserver's host (`ca.pem` of the gateway)
    #[arg(long, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// Client certificate file of kube-apiserver (`causeway client certificate`)
    #[arg(long, value_name = "FILE")]
    pub(crate) certificate: Option<PathBuf>,
    /// Key file of that certificate
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,
    /// Name in the listener's certificate, if the URL has another one
    #[arg(long, value_name = "NAME")]
    pub(crate) server_name: Option<String>,
}
