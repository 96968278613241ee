//! How the cluster's API is reached: by a kubeconfig file, or as a pod of the cluster.
//!
//! Nothing is dialled here: an API server that is away is waited for by whoever asks it something.

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use std::{path::Path, time::Duration};

/// How long a connection to the API server may take.
const CONNECT: Duration = Duration::from_secs(5);
/// A watch that says nothing for so long is dead: the server ends it long before.
pub(crate) const SILENCE: Duration = Duration::from_secs(130);

/// What keeps a client from being made.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig cannot be used.
    #[error("{path}: {cause}")]
    Kubeconfig {
        /// The file.
        path: String,
        /// Why.
        cause: kube::config::KubeconfigError,
    },
    /// There is no service account.
    #[error(
        "kubernetes.kubeconfig is not set, and this is no pod with a service account: {0}; name a kubeconfig"
    )]
    NoPod(kube::config::InClusterError),
    /// What the configuration names cannot be used: certificates, a proxy.
    #[error("the API server's client cannot be built: {0}")]
    Build(kube::Error),
}

/// A client of the cluster's API.
///
/// # Errors
/// If the file, or the pod's service account, is missing or malformed.
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let failed = |cause| ClientError::Kubeconfig {
                path: path.display().to_string(),
                cause,
            };
            let file = Kubeconfig::read_from(path).map_err(failed)?;
            let options = KubeConfigOptions::default();
            let config = Config::from_custom_kubeconfig(file, &options);
            config.await.map_err(failed)?
        }
        None => Config::incluster().map_err(ClientError::NoPod)?,
    };
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    Client::try_from(config).map_err(ClientError::Build)
}
