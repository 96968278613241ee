//! Name of a resource: group, version and plural name.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, str::FromStr};

/// A resource of Kubernetes' API. Its text form is `discovery.k8s.io/v1/endpointslices`, or `v1/services` for the core group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupVersionResource {
    /// API group; empty for the core group.
    pub group: String,
    /// The version within the group.
    pub version: String,
    /// Name in paths, in the plural.
    pub plural: String,
}

/// The name of the resource is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a resource; write GROUP/VERSION/PLURAL as in discovery.k8s.io/v1/endpointslices, or VERSION/PLURAL as in v1/services"
)]
pub struct ResourceError(String);

/// Kind of a resource's objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupVersionKind {
    /// Name of the kind, such as `EndpointSlice`.
    pub(crate) kind: String,
    /// Whether its objects are in namespaces.
    pub(crate) namespaced: bool,
}

/// Properties of resources that are known before the first list: kind, whether namespaced, short names.
const KNOWN_RESOURCES: [(&str, &str, bool, &[&str]); 8] = [
    (
        "discovery.k8s.io/v1/endpointslices",
        "EndpointSlice",
        true,
        &[],
    ),
    ("v1/endpoints", "Endpoints", true, &["ep"]),
    ("v1/services", "Service", true, &["svc"]),
    ("v1/namespaces", "Namespace", false, &["ns"]),
    ("v1/nodes", "Node", false, &["no"]),
    ("v1/configmaps", "ConfigMap", true, &["cm"]),
    ("v1/pods", "Pod", true, &["po"]),
    (
        "networking.k8s.io/v1/servicecidrs",
        "ServiceCIDR",
        false,
        &[],
    ),
];

impl GroupVersionResource {
    /// Returns the default resources: `EndpointSlice`s, Endpoints and Services.
    pub fn defaults() -> Vec<Self> {
        let known = KNOWN_RESOURCES.iter().take(3);
        known.filter_map(|known| known.0.parse().ok()).collect()
    }

    /// Returns the path of all objects, such as `/apis/discovery.k8s.io/v1/endpointslices`.
    pub fn path(&self) -> String {
        if self.group.is_empty() {
            return format!("/api/{}/{}", self.version, self.plural);
        }
        format!("/apis/{}/{}/{}", self.group, self.version, self.plural)
    }

    /// Returns the API version, such as `discovery.k8s.io/v1` or `v1`.
    pub(crate) fn api_version(&self) -> String {
        if self.group.is_empty() {
            return self.version.clone();
        }
        format!("{}/{}", self.group, self.version)
    }

    /// Returns the name that Kubernetes uses in messages, such as `endpointslices.discovery.k8s.io`.
    pub(crate) fn qualified_name(&self) -> String {
        if self.group.is_empty() {
            return self.plural.clone();
        }
        format!("{}.{}", self.plural, self.group)
    }

    /// Returns the kind of the resource, if it is known before the first list.
    pub(crate) fn kind(&self) -> Option<GroupVersionKind> {
        self.known_properties().map(|known| GroupVersionKind {
            kind: known.1.to_owned(),
            namespaced: known.2,
        })
    }

    pub(crate) fn short_names(&self) -> &'static [&'static str] {
        self.known_properties().map_or(&[], |known| known.3)
    }

    fn known_properties(
        &self,
    ) -> Option<&'static (&'static str, &'static str, bool, &'static [&'static str])> {
        let name = self.to_string();
        KNOWN_RESOURCES.iter().find(|known| known.0 == name)
    }
}

impl FromStr for GroupVersionResource {
    type Err = ResourceError;

    fn from_str(text: &str) -> Result<Self, ResourceError> {
        let parts: Vec<_> = text.split('/').collect();
        let (group, version, plural) = match parts[..] {
            // OpenYurt writes the core group as an empty one: `/v1/services`.
            [group, version, plural] => (group, version, plural),
            [version, plural] => ("", version, plural),
            _ => return Err(ResourceError(text.to_owned())),
        };
        let is_valid_name = |text: &str, extra: &str| {
            let is_allowed =
                |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || extra.contains(c);
            text.chars().all(is_allowed)
        };
        let is_version =
            version.starts_with('v') && version.len() > 1 && is_valid_name(version, "");
        let is_plural = !plural.is_empty() && is_valid_name(plural, "-.");
        if !is_version || !is_plural || !is_valid_name(group, "-.") {
            return Err(ResourceError(text.to_owned()));
        }
        Ok(Self {
            group: group.to_owned(),
            version: version.to_owned(),
            plural: plural.to_owned(),
        })
    }
}

impl fmt::Display for GroupVersionResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.group.is_empty() {
            write!(f, "{}/", self.group)?;
        }
        write!(f, "{}/{}", self.version, self.plural)
    }
}

impl Serialize for GroupVersionResource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GroupVersionResource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_is_written_as_it_is_read_and_has_its_path() {
        for (text, path) in [
            (
                "discovery.k8s.io/v1/endpointslices",
                "/apis/discovery.k8s.io/v1/endpointslices",
            ),
            ("v1/services", "/api/v1/services"),
        ] {
            let resource: GroupVersionResource = text.parse().unwrap();
            assert_eq!(
                (resource.to_string().as_str(), resource.path().as_str()),
                (text, path)
            );
        }
        let resource: GroupVersionResource = "/v1/services".parse().unwrap();
        assert_eq!(resource.to_string(), "v1/services");
        assert_eq!(GroupVersionResource::defaults().len(), 3);
        assert!(
            GroupVersionResource::defaults()
                .iter()
                .all(|one| one.kind().is_some())
        );
    }

    #[test]
    fn an_unknown_resource_is_reported() {
        for text in [
            "services",
            "v1/",
            "/services",
            "a/b/c/d",
            "V1/services",
            "v1/a b",
            "v1/../x",
        ] {
            let error = text.parse::<GroupVersionResource>().unwrap_err();
            assert!(error.to_string().contains("GROUP/VERSION/PLURAL"), "{text}");
        }
    }
}
