//! How the cluster's API is reached: by a kubeconfig file, or as a pod of the cluster.
//!
//! Nothing is dialled here: an API server that is away is waited for by whoever asks it something. A file's text is read by the
//! reader of YAML that whoever calls has anyway; `kube` brings another, of half a megabyte.

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
    runtime::watcher,
};
use serde_json::Value;
use std::{fs, path::Path, time::Duration};

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
        cause: String,
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

/// How YAML is read, or the JSON that it may be; or what is wrong with it, with its line.
pub type ReadYaml = fn(&str) -> Result<Value, String>;

/// A client of the cluster's API.
///
/// # Errors
/// If the file, or the pod's service account, is missing or malformed.
pub async fn client(kubeconfig: Option<&Path>, yaml: ReadYaml) -> Result<Client, ClientError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let failed = |cause: String| ClientError::Kubeconfig {
                path: path.display().to_string(),
                cause,
            };
            let file = read(path, yaml).map_err(failed)?;
            let options = KubeConfigOptions::default();
            let config = Config::from_custom_kubeconfig(file, &options);
            config.await.map_err(|error| failed(error.to_string()))?
        }
        None => Config::incluster().map_err(ClientError::NoPod)?,
    };
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    Client::try_from(config).map_err(ClientError::Build)
}

/// What a kubeconfig says, with the files that it names where they are.
fn read(path: &Path, yaml: ReadYaml) -> Result<Kubeconfig, String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let read = serde_json::from_value(yaml(&text)?);
    let mut file: Kubeconfig = read.map_err(|error| error.to_string())?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let named = |file: &mut Option<String>| {
        if let Some(file) = file {
            *file = folder.join(&*file).display().to_string();
        }
    };
    for cluster in file
        .clusters
        .iter_mut()
        .filter_map(|one| one.cluster.as_mut())
    {
        named(&mut cluster.certificate_authority);
    }
    for user in file
        .auth_infos
        .iter_mut()
        .filter_map(|one| one.auth_info.as_mut())
    {
        named(&mut user.client_certificate);
        named(&mut user.client_key);
        named(&mut user.token_file);
        // A program without a folder is looked for as a shell would.
        if let Some(exec) = &mut user.exec
            && exec
                .command
                .as_ref()
                .is_some_and(|command| command.contains('/'))
        {
            named(&mut exec.command);
        }
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Result<Value, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn files_that_a_kubeconfig_names_are_looked_for_beside_it() {
        let folder =
            std::env::temp_dir().join(format!("causeway-kubeconfig-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("config");
        let text = r#"{
            "clusters": [{ "name": "c", "cluster": { "server": "https://10.0.0.1:6443", "certificate-authority": "ca.crt", "insecure-skip-tls-verify": false } }],
            "users": [
                { "name": "u", "user": { "client-certificate": "/abs/u.crt", "client-key": "keys/u.key" } },
                { "name": "e", "user": { "exec": { "command": "./plugin", "apiVersion": "client.authentication.k8s.io/v1" } } },
                { "name": "p", "user": { "exec": { "command": "aws", "apiVersion": "client.authentication.k8s.io/v1" } } }
            ],
            "contexts": [{ "name": "x", "context": { "cluster": "c", "user": "u" } }],
            "current-context": "x"
        }"#;
        fs::write(&path, text).unwrap();
        let file = read(&path, json).unwrap();
        let beside = |name: &str| Some(folder.join(name).display().to_string());
        let cluster = file.clusters[0].cluster.as_ref().unwrap();
        assert_eq!(cluster.certificate_authority, beside("ca.crt"));
        let user = |at: usize| file.auth_infos[at].auth_info.clone().unwrap();
        assert_eq!(user(0).client_certificate.as_deref(), Some("/abs/u.crt"));
        assert_eq!(user(0).client_key, beside("keys/u.key"));
        assert_eq!(user(1).exec.unwrap().command, beside("./plugin"));
        assert_eq!(user(2).exec.unwrap().command.as_deref(), Some("aws"));
        for (text, says) in [
            ("nonsense", "line 1"),
            (r#"{ "clusters": 3 }"#, "invalid type"),
        ] {
            fs::write(&path, text).unwrap();
            let error = read(&path, json).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        fs::remove_dir_all(&folder).unwrap();
        assert!(read(&path, json).unwrap_err().contains("No such file"));
    }
}
