//! Client of the `ConfigMap`s of one hosts file. Reads, writes and removes them, and changes no other objects.
//!
//! A `ConfigMap` is ours if it has our label, or if we wrote it before. Any other of that name is left unchanged and
//! reported. Each write names the version that was read, so that no other change is lost unnoticed.

use crate::{
    client::watch_error_message,
    ownership::{MANAGED_BY_LABEL, WriteError, last_foreign_writer, owned_metadata, patch_params},
};
use futures_util::{StreamExt, TryStreamExt, stream::BoxStream};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, PartialObjectMeta, Preconditions},
    runtime::{WatchStreamExt, watcher::watch_object},
};
use std::time::Duration;
use tokio::time::timeout;

/// Time limit of one request; a file can be close to a megabyte.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Client and names of the `ConfigMap`s.
#[derive(Clone)]
pub(super) struct ConfigMaps {
    client: Client,
    namespace: String,
    name: String,
    key: String,
}

/// Version of a `ConfigMap`, `None` if there is no such object, or the reason for which the version is not known.
pub(super) type ResourceVersion = Result<Option<String>, String>;

impl ConfigMaps {
    pub(super) fn new(client: Client, namespace: &str, (name, key): (&str, &str)) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            key: key.to_owned(),
        }
    }

    /// Returns the name of the file with this number.
    pub(super) fn name(&self, number: usize) -> String {
        match number {
            0 => self.name.clone(),
            number => format!("{}-{number}", self.name),
        }
    }

    fn api(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(super) async fn read(&self, number: usize) -> Result<Option<ConfigMap>, WriteError> {
        let (api, name) = (self.api(), self.name(number));
        timeout(REQUEST_TIMEOUT, api.get_opt(&name))
            .await?
            .map_err(Into::into)
    }

    /// Replaces the version that was read with this text.
    pub(super) async fn write(
        &self,
        number: usize,
        previous: Option<&ConfigMap>,
        text: &str,
    ) -> Result<ConfigMap, WriteError> {
        let (api, name) = (self.api(), self.name(number));
        let parameters = patch_params();
        let map = ConfigMap {
            data: Some([(self.key.clone(), text.to_owned())].into()),
            binary_data: None,
            immutable: None,
            metadata: owned_metadata(&name, previous),
        };
        let written = match previous {
            Some(_) => timeout(REQUEST_TIMEOUT, api.replace(&name, &parameters, &map)).await?,
            None => timeout(REQUEST_TIMEOUT, api.create(&parameters, &map)).await?,
        };
        Ok(written?)
    }

    /// Removes the version that was read.
    pub(super) async fn remove(&self, map: &ConfigMap) -> Result<(), WriteError> {
        let (api, name) = (self.api(), map.name_any());
        let preconditions = Preconditions {
            resource_version: map.resource_version(),
            uid: map.uid(),
        };
        let parameters = DeleteParams::default().preconditions(preconditions);
        timeout(REQUEST_TIMEOUT, api.delete(&name, &parameters)).await??;
        Ok(())
    }

    /// Whether the object has this content and no other.
    pub(super) fn has_content(&self, map: &ConfigMap, text: &str) -> bool {
        let data = map.data.iter().flatten();
        let binary = map.binary_data.iter().flatten();
        data.eq([(&self.key, &text.to_owned())]) && binary.count() == 0
    }

    /// Returns the error that the object is not ours, with its remedy.
    pub(super) fn foreign_error(&self, map: &ConfigMap) -> WriteError {
        let (key, value) = MANAGED_BY_LABEL;
        let (name, namespace) = (map.name_any(), &self.namespace);
        let by = match last_foreign_writer(map) {
            Some(other) => format!(" but to {other}"),
            None => String::new(),
        };
        WriteError::Foreign(format!(
            "the ConfigMap {namespace}/{name} does not belong to this gateway{by} and is not changed: set \
             kubernetes.hosts.name to another name, delete the ConfigMap, or transfer it to Causeway \
             (kubectl -n {namespace} label configmap {name} {key}={value} --overwrite)"
        ))
    }

    /// Returns a stream of the versions of the file with this number, from now on.
    pub(super) fn watch_versions(
        &self,
        number: usize,
    ) -> BoxStream<'static, (usize, ResourceVersion)> {
        // For an object that exists already, only its version is requested.
        let api =
            Api::<PartialObjectMeta<ConfigMap>>::namespaced(self.client.clone(), &self.namespace);
        let updates = watch_object(api, &self.name(number)).default_backoff();
        let version = |map: PartialObjectMeta<ConfigMap>| map.resource_version();
        updates
            .map_ok(move |map| map.and_then(version))
            .map_err(|error| watch_error_message(&error))
            .map(move |version| (number, version))
            .boxed()
    }
}
