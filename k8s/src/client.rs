//! Client of the cluster's API, with a kubeconfig file or as a pod of the cluster.
//!
//! This module opens no connection. If an API server does not respond, the code that sends a request waits for it.

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
    runtime::watcher,
};
use std::{path::Path, time::Duration};

/// Time limit of a connection to the API server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of a read. A response that stops for so long is dead: kube's watches of one object end after 290 s.
const READ_TIMEOUT: Duration = Duration::from_mins(5);
/// Timeout of a watch of many objects, in seconds, after which the watch is requested again. If the server has not ended a
/// watch, kube ends it a few seconds later.
pub(crate) const WATCH_TIMEOUT: u32 = 120;

/// Returns the message of an error: the API server's own message, if it has one.
pub(crate) fn error_message(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return status.message.clone();
    }
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(inner) = next {
        let message = inner.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        next = inner.source();
    }
    text
}

/// Returns the message of a watch's error, like [`error_message`].
pub(crate) fn watch_error_message(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(cause)
        | watcher::Error::WatchStartFailed(cause)
        | watcher::Error::WatchFailed(cause) => error_message(cause),
        watcher::Error::WatchError(status) => status.message.clone(),
        watcher::Error::NoResourceVersion => error.to_string(),
    }
}

/// Error that prevents a client from being made.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig cannot be used.
    #[error("{path}: {cause}")]
    Kubeconfig {
        /// The file.
        path: String,
        /// Cause of the error.
        cause: String,
    },
    /// There is no service account.
    #[error(
        "kubernetes.kubeconfig is not set, and this process does not run in a pod with a service account: {0}; set kubernetes.kubeconfig"
    )]
    NoPod(kube::config::InClusterError),
    /// A part that the configuration names cannot be used: certificates or a proxy.
    #[error("the client for the API server cannot be built: {0}")]
    Build(kube::Error),
}

/// Builds a client of the cluster's API.
///
/// # Errors
/// If the file, or the pod's service account, is missing or malformed.
pub async fn build_client(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let to_error = |error: KubeconfigError| ClientError::Kubeconfig {
                path: path.display().to_string(),
                cause: kubeconfig_error_message(&error),
            };
            let file = Kubeconfig::read_from(path).map_err(to_error)?;
            let options = KubeConfigOptions::default();
            let config = Config::from_custom_kubeconfig(file, &options);
            config.await.map_err(to_error)?
        }
        None => Config::incluster().map_err(ClientError::NoPod)?,
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    // Otherwise the idle time of a connection before a request would count as a part of the read timeout.
    config.reset_reader_on_write = true;
    Client::try_from(config).map_err(ClientError::Build)
}

/// Returns the cause of an error in one line. The calling function names the file.
fn kubeconfig_error_message(error: &KubeconfigError) -> String {
    match error {
        KubeconfigError::ReadConfig(cause, _) => cause.to_string(),
        KubeconfigError::Parse(cause) => cause.without_snippet().to_string(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn error_of_a_kubeconfig_names_file_place_and_cause_in_one_line() {
        let folder =
            std::env::temp_dir().join(format!("causeway-kubeconfig-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("config");
        let cause = async |text: &str| {
            std::fs::write(&path, text).unwrap();
            let error = build_client(Some(&path)).await.err().unwrap().to_string();
            let cause = error.strip_prefix(&format!("{}: ", path.display()));
            cause.unwrap().to_owned()
        };
        for (text, part) in [
            ("nonsense", "line 1"),
            ("apiVersion: v1\nclusters: 3", "line 2"),
            ("clusters: [", "line 1"),
            ("", "current context"),
            ("current-context: x", "current context"),
        ] {
            let output = cause(text).await;
            assert!(output.contains(part) && !output.contains('\n'), "{output}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
        let error = build_client(Some(&path)).await.err().unwrap().to_string();
        assert_eq!(
            error.matches(&*path.to_string_lossy()).count(),
            1,
            "{error}"
        );
        assert!(error.contains("No such file"), "{error}");
    }
}
