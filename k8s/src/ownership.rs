//! Ownership of objects that gateways write: whether an object is ours, and which other manager has written it.

use crate::client::error_message;
use k8s_openapi::{
    api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry,
};
use kube::{
    ResourceExt,
    api::{ObjectMeta, PostParams},
};

/// Field manager under which the API records writes.
const FIELD_MANAGER: &str = "causeway-gateway";
/// Label that marks an object as ours.
pub(crate) const MANAGED_BY_LABEL: (&str, &str) = ("app.kubernetes.io/managed-by", "causeway");

/// Returns the parameters of a patch.
pub(crate) fn patch_params() -> PostParams {
    PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    }
}

/// Returns the metadata to write: those that were read before, with our label.
pub(crate) fn owned_metadata(name: &str, previous: Option<&ConfigMap>) -> ObjectMeta {
    let (key, value) = MANAGED_BY_LABEL;
    let mut metadata = match previous {
        Some(map) => ObjectMeta {
            // The API maintains these itself.
            managed_fields: None,
            ..map.metadata.clone()
        },
        None => ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
    };
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(key.to_owned(), value.to_owned());
    metadata
}

/// Whether an object has our label, or was written by us.
pub(crate) fn is_owned(map: &ConfigMap) -> bool {
    let (key, value) = MANAGED_BY_LABEL;
    let labelled = map.labels().get(key).is_some_and(|found| found == value);
    let is_own_entry = |entry: &ManagedFieldsEntry| entry.manager.as_deref() == Some(FIELD_MANAGER);
    labelled || map.managed_fields().iter().any(is_own_entry)
}

/// Returns the manager of the last write, if the last writer was not this gateway.
pub(crate) fn last_foreign_manager(map: &ConfigMap) -> Option<&str> {
    let last = map.managed_fields().iter();
    let last = last.max_by_key(|entry| entry.time.as_ref().map(|time| time.0))?;
    last.manager.as_deref().filter(|by| *by != FIELD_MANAGER)
}

/// Returns the manager of the last write that was not ours.
pub(crate) fn last_foreign_writer(map: &ConfigMap) -> Option<&str> {
    let fields = map.managed_fields().iter();
    let others = fields.filter(|entry| entry.manager.as_deref() != Some(FIELD_MANAGER));
    let last = others.max_by_key(|entry| entry.time.as_ref().map(|time| time.0))?;
    last.manager.as_deref()
}

/// Error that prevents a `ConfigMap` from being written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    /// An object of another owner has its name.
    #[error("{0}")]
    Foreign(String),
    #[error("{}", error_message(.0))]
    Api(#[from] kube::Error),
    #[error("the cluster's API did not answer in time")]
    Timeout(#[from] tokio::time::error::Elapsed),
}

impl WriteError {
    /// Whether another writer was faster, which is no fault.
    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self, Self::Api(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists())
    }

    /// Whether the object is gone.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Api(kube::Error::Api(status)) if status.is_not_found())
    }

    /// Whether a retry may succeed soon: another writer was faster, or the API did not respond.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Foreign(_) => false,
            Self::Api(kube::Error::Api(_)) => self.is_conflict(),
            Self::Api(_) | Self::Timeout(_) => true,
        }
    }
}
