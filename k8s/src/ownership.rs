//! Ownership of objects that gateways write: whether an object is ours, and which other manager has written it.

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
