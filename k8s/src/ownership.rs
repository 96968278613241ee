//! Objects that gateways write: which are ours, and who else has written them.

use k8s_openapi::{
    api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry,
};
use kube::{
    ResourceExt,
    api::{ObjectMeta, PostParams},
};

/// By whom the API notes that something was written.
const MANAGER: &str = "causeway-gateway";
/// What says that an object is ours.
pub(crate) const LABEL: (&str, &str) = ("app.kubernetes.io/managed-by", "causeway");

/// How it is written.
pub(crate) fn patch_params() -> PostParams {
    PostParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PostParams::default()
    }
}

/// What is written of its metadata: what was read before, and that it is ours.
pub(crate) fn metadata(name: &str, before: Option<&ConfigMap>) -> ObjectMeta {
    let (key, value) = LABEL;
    let mut metadata = match before {
        Some(map) => ObjectMeta {
            // The API keeps these itself.
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

/// Whether it has our label, or was written by us.
pub(crate) fn is_ours(map: &ConfigMap) -> bool {
    let (key, value) = LABEL;
    let labelled = map.labels().get(key).is_some_and(|found| found == value);
    let by_us = |entry: &ManagedFieldsEntry| entry.manager.as_deref() == Some(MANAGER);
    labelled || map.managed_fields().iter().any(by_us)
}

/// Who wrote it last, where that was somebody else.
pub(crate) fn last_foreign_manager(map: &ConfigMap) -> Option<&str> {
    let last = map.managed_fields().iter();
    let last = last.max_by_key(|entry| entry.time.as_ref().map(|time| time.0))?;
    last.manager.as_deref().filter(|by| *by != MANAGER)
}

/// Who else wrote it last, by the name that one gave.
pub(crate) fn foreign_managers(map: &ConfigMap) -> Option<&str> {
    let fields = map.managed_fields().iter();
    let others = fields.filter(|entry| entry.manager.as_deref() != Some(MANAGER));
    let last = others.max_by_key(|entry| entry.time.as_ref().map(|time| time.0))?;
    last.manager.as_deref()
}
