//! Discovery of the available resources, for clients that request it first: `/api`, `/apis` and below (`APIVersions`,
//! `APIGroupList`, `APIGroup`, `APIResourceList` of `meta/v1`).

use crate::{list_options::RequestPath, store::Store};
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc};

/// Returns the response to a path of discovery, or `None` if no resource of it is served.
pub(crate) fn discovery_response(path: &RequestPath<'_>, stores: &[&Arc<Store>]) -> Option<Value> {
    match path {
        RequestPath::Core => Some(core_versions(stores)),
        RequestPath::Groups => {
            let groups = group_versions(stores);
            let groups: Vec<_> = groups
                .iter()
                .map(|(name, versions)| api_group(name, versions))
                .collect();
            Some(json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups }))
        }
        RequestPath::Group(name) => {
            let groups = group_versions(stores);
            let versions = groups.get(name)?;
            let mut group = api_group(name, versions);
            group["kind"] = "APIGroup".into();
            group["apiVersion"] = "v1".into();
            Some(group)
        }
        RequestPath::Resources { group, version } => resource_list(group, version, stores),
        _ => None,
    }
}

fn core_versions(stores: &[&Arc<Store>]) -> Value {
    let core = stores.iter().map(|store| store.resource());
    let core = core.filter(|resource| resource.group.is_empty());
    let mut versions: Vec<_> = core.map(|resource| &resource.version).collect();
    versions.sort();
    versions.dedup();
    json!({ "kind": "APIVersions", "versions": versions, "serverAddressByClientCIDRs": [] })
}

/// Returns the versions of each group except the core one.
fn group_versions<'a>(stores: &[&'a Arc<Store>]) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for resource in stores.iter().map(|store| store.resource()) {
        if !resource.group.is_empty() {
            let versions = groups.entry(&*resource.group).or_default();
            if !versions.contains(&&*resource.version) {
                versions.push(&*resource.version);
            }
        }
    }
    groups
}

fn api_group(name: &str, versions: &[&str]) -> Value {
    let versions: Vec<_> = versions
        .iter()
        .map(|version| json!({ "groupVersion": format!("{name}/{version}"), "version": version }))
        .collect();
    json!({ "name": name, "versions": versions, "preferredVersion": versions.first() })
}

fn resource_list(group: &str, version: &str, stores: &[&Arc<Store>]) -> Option<Value> {
    let matching = stores.iter().filter(|store| {
        let resource = store.resource();
        resource.group == group && resource.version == version
    });
    let resources: Vec<_> = matching
        .filter_map(|store| {
            let (resource, kind) = (store.resource(), store.kind()?);
            Some(json!({
                "name": resource.plural,
                "singularName": kind.kind.to_lowercase(),
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": ["get", "list", "watch"],
                "shortNames": resource.short_names(),
            }))
        })
        .collect();
    let resource = stores.iter().map(|store| store.resource());
    let name = resource
        .clone()
        .find(|resource| resource.group == group && resource.version == version)?;
    Some(json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": name.api_version(),
        "resources": resources,
    }))
}
