//! How the cluster's API is reached: by a kubeconfig file, or as a pod of the cluster.
//!
//! Nothing is dialled here: an API server that is away is waited for by whoever asks it something.

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
    runtime::watcher,
};
use std::{path::Path, time::Duration};

/// How long a connection to the API server may take.
const CONNECT: Duration = Duration::from_secs(5);
/// A watch that says nothing for so long is dead: the server ends it long before.
const SILENCE: Duration = Duration::from_secs(130);

/// The sentence that says what to do: what the API server says itself, where it says something.
pub(crate) fn said(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return status.message.clone();
    }
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(inner) = next {
        let said = inner.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        next = inner.source();
    }
    text
}

/// As [`said`], of a watch.
pub(crate) fn watch_said(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(cause)
        | watcher::Error::WatchStartFailed(cause)
        | watcher::Error::WatchFailed(cause) => said(cause),
        watcher::Error::WatchError(status) => status.message.clone(),
        watcher::Error::NoResourceVersion => error.to_string(),
    }
}

/// How long a watch may take before it is asked for anew, in seconds.
pub(crate) fn watch_timeout() -> u32 {
    u32::try_from(SILENCE.as_secs()).unwrap_or(u32::MAX) - 10
}

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
