//! Options of a request: its path and query, as Kubernetes' REST API has them (`ListOptions` of `meta/v1`).

use crate::{resource::GroupVersionResource, status::ApiStatus};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Parsed path of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequestPath<'a> {
    /// Objects of a resource: in a namespace, with a name.
    Objects {
        group: &'a str,
        version: &'a str,
        plural: &'a str,
        namespace: Option<&'a str>,
        name: Option<&'a str>,
    },
    /// `/version`.
    Version,
    /// `/healthz` and similar paths.
    Health,
    /// `/api`.
    Core,
    /// `/apis`.
    Groups,
    /// `/apis/GROUP`.
    Group(&'a str),
    /// `/api/v1`, `/apis/GROUP/VERSION`.
    Resources { group: &'a str, version: &'a str },
}

impl<'a> RequestPath<'a> {
    pub(crate) fn parse(path: &'a str) -> Option<Self> {
        let parts: Vec<_> = path.trim_matches('/').split('/').collect();
        let (group, version, segments) = match parts[..] {
            ["version"] => return Some(Self::Version),
            ["healthz" | "livez" | "readyz", ..] => return Some(Self::Health),
            ["api"] => return Some(Self::Core),
            ["apis"] => return Some(Self::Groups),
            ["apis", group] => return Some(Self::Group(group)),
            ["api", version, ref segments @ ..] => ("", version, segments),
            ["apis", group, version, ref segments @ ..] => (group, version, segments),
            _ => return None,
        };
        let (namespace, plural, name) = match *segments {
            [] => return Some(Self::Resources { group, version }),
            [plural] => (None, plural, None),
            [plural, name] => (None, plural, Some(name)),
            ["namespaces", namespace, plural] => (Some(namespace), plural, None),
            ["namespaces", namespace, plural, name] => (Some(namespace), plural, Some(name)),
            _ => return None,
        };
        Some(Self::Objects {
            group,
            version,
            plural,
            namespace,
            name,
        })
    }

    pub(crate) fn matches_resource(&self, resource: &GroupVersionResource) -> bool {
        let Self::Objects {
            group,
            version,
            plural,
            ..
        } = self
        else {
            return false;
        };
        (*group, *version, *plural) == (&*resource.group, &*resource.version, &*resource.plural)
    }
}

/// Version that a request requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VersionMatch {
    /// The newest version, or any.
    Any,
    /// This version or a later one.
    NotOlderThan(u64),
    /// Exactly this version.
    Exact(u64),
}

/// Options of a list or a watch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a parameter of its own"
)]
pub(crate) struct ListOptions {
    pub(crate) watch: bool,
    pub(crate) resource_version: String,
    pub(crate) version_match: String,
    pub(crate) limit: usize,
    pub(crate) continue_token: String,
    pub(crate) labels: String,
    pub(crate) fields: String,
    pub(crate) timeout: Option<Duration>,
    pub(crate) bookmarks: bool,
    pub(crate) initial_events: Option<bool>,
    /// Whether the client refuses a watch while this cache has lost its own source. Such a client is a follower that has
    /// another source.
    pub(crate) require_fresh: bool,
}

impl ListOptions {
    pub(crate) fn parse(query: &str) -> Result<Self, ApiStatus> {
        let mut options = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = value.replace('+', " ");
            let value = percent_decode_str(&value).decode_utf8();
            let value = value.map_err(|_| ApiStatus::malformed(format!("{name} is not UTF-8")))?;
            options.set(name, &value)?;
        }
        Ok(options)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), ApiStatus> {
        let malformed =
            |expected: &str| ApiStatus::malformed(format!("{name}={value:?} is not {expected}"));
        let parse_bool = || match value {
            "" | "1" | "true" | "True" | "TRUE" | "t" | "T" => Ok(true),
            "0" | "false" | "False" | "FALSE" | "f" | "F" => Ok(false),
            _ => Err(malformed("true or false")),
        };
        match name {
            "watch" => self.watch = parse_bool()?,
            "allowWatchBookmarks" => self.bookmarks = parse_bool()?,
            "sendInitialEvents" => self.initial_events = Some(parse_bool()?),
            "fresh" => self.require_fresh = parse_bool()?,
            "resourceVersion" => value.clone_into(&mut self.resource_version),
            "resourceVersionMatch" => value.clone_into(&mut self.version_match),
            "continue" => value.clone_into(&mut self.continue_token),
            "labelSelector" => value.clone_into(&mut self.labels),
            "fieldSelector" => value.clone_into(&mut self.fields),
            "limit" | "timeoutSeconds" if value.is_empty() => {}
            "limit" => self.limit = value.parse().map_err(|_| malformed("a number"))?,
            "timeoutSeconds" => {
                let seconds: u64 = value
                    .parse()
                    .map_err(|_| malformed("a number of seconds"))?;
                self.timeout = (seconds > 0).then(|| Duration::from_secs(seconds));
            }
            // Kubernetes ignores unknown parameters too.
            _ => {}
        }
        Ok(())
    }

    /// Returns the version as a number; 0 stands for any version.
    pub(crate) fn version_number(&self) -> Result<u64, ApiStatus> {
        if self.resource_version.is_empty() {
            return Ok(0);
        }
        let malformed = |_| {
            let text = &self.resource_version;
            ApiStatus::malformed(format!("resourceVersion: Invalid value: {text:?}"))
        };
        self.resource_version.parse().map_err(malformed)
    }

    /// Returns the version that the list must have.
    pub(crate) fn requested_version(&self) -> Result<VersionMatch, ApiStatus> {
        let number = self.version_number()?;
        let forbidden =
            |why: &str| Err(ApiStatus::malformed(format!("resourceVersionMatch: {why}")));
        match &*self.version_match {
            "" if number == 0 => Ok(VersionMatch::Any),
            "" | "NotOlderThan" if !self.continue_token.is_empty() => {
                forbidden("not allowed together with continue")
            }
            "" => Ok(VersionMatch::NotOlderThan(number)),
            _ if self.resource_version.is_empty() => {
                forbidden("only allowed together with resourceVersion")
            }
            "NotOlderThan" if number == 0 => Ok(VersionMatch::Any),
            "NotOlderThan" => Ok(VersionMatch::NotOlderThan(number)),
            "Exact" if number == 0 => forbidden("Exact requires a resourceVersion other than 0"),
            "Exact" => Ok(VersionMatch::Exact(number)),
            _ => forbidden("must be Exact or NotOlderThan"),
        }
    }
}

/// Continuation of a partial list: the `continue` of a list's metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ContinueToken {
    #[serde(rename = "v")]
    pub(crate) version: u64,
    /// Namespace of the last object that was sent.
    #[serde(rename = "ns")]
    pub(crate) namespace: String,
    #[serde(rename = "n")]
    pub(crate) name: String,
}

impl ContinueToken {
    pub(crate) fn parse(text: &str) -> Result<Self, ApiStatus> {
        let bytes = URL_SAFE_NO_PAD.decode(text).ok();
        let parsed = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        parsed.ok_or_else(|| ApiStatus::malformed("continue key is not valid"))
    }

    pub(crate) fn encode(&self) -> String {
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_map_like_in_kubernetes() {
        let slices: GroupVersionResource = "discovery.k8s.io/v1/endpointslices".parse().unwrap();
        let of = |path| RequestPath::parse(path).unwrap();
        let all = of("/apis/discovery.k8s.io/v1/endpointslices");
        assert!(all.matches_resource(&slices));
        let one = of("/apis/discovery.k8s.io/v1/namespaces/n/endpointslices/a");
        assert!(one.matches_resource(&slices));
        assert!(matches!(
            one,
            RequestPath::Objects {
                namespace: Some("n"),
                name: Some("a"),
                ..
            }
        ));
        let namespaces = of("/api/v1/namespaces/n");
        assert!(matches!(
            namespaces,
            RequestPath::Objects {
                plural: "namespaces",
                namespace: None,
                name: Some("n"),
                ..
            }
        ));
        assert_eq!(
            of("/api/v1"),
            RequestPath::Resources {
                group: "",
                version: "v1"
            }
        );
        assert_eq!(of("/apis/a"), RequestPath::Group("a"));
        assert_eq!(of("/readyz/x"), RequestPath::Health);
        for path in [
            "/",
            "/api/v1/namespaces/n/pods/a/log",
            "/metrics",
            "/openapi/v3",
        ] {
            assert_eq!(RequestPath::parse(path), None, "{path}");
        }
    }

    #[test]
    fn options_are_parsed_and_faults_are_named() {
        let options = ListOptions::parse("watch=1&labelSelector=a%20in%20(b%2Cc)&fieldSelector=metadata.name%3Dx&limit=5&timeoutSeconds=7&resourceVersion=9&allowWatchBookmarks=true").unwrap();
        assert!(options.watch && options.bookmarks);
        assert_eq!(
            (options.labels.as_str(), options.fields.as_str()),
            ("a in (b,c)", "metadata.name=x")
        );
        assert_eq!(
            (options.limit, options.timeout),
            (5, Some(Duration::from_secs(7)))
        );
        assert_eq!(
            options.requested_version(),
            Ok(VersionMatch::NotOlderThan(9))
        );
        for query in ["watch=maybe", "limit=-1", "timeoutSeconds=x"] {
            let failure = ListOptions::parse(query).unwrap_err();
            let name = query.split('=').next().unwrap();
            assert!(
                failure.to_json()["message"]
                    .as_str()
                    .unwrap()
                    .contains(name)
            );
        }
    }

    #[test]
    fn the_version_of_a_list_follows_the_kubernetes_rules() {
        for (query, expected) in [
            ("", Some(VersionMatch::Any)),
            ("resourceVersion=0", Some(VersionMatch::Any)),
            (
                "resourceVersion=0&resourceVersionMatch=NotOlderThan",
                Some(VersionMatch::Any),
            ),
            (
                "resourceVersion=5&resourceVersionMatch=Exact",
                Some(VersionMatch::Exact(5)),
            ),
            (
                "resourceVersion=5&resourceVersionMatch=NotOlderThan",
                Some(VersionMatch::NotOlderThan(5)),
            ),
            ("resourceVersion=0&resourceVersionMatch=Exact", None),
            ("resourceVersionMatch=Exact", None),
            ("resourceVersion=5&resourceVersionMatch=Nearly", None),
            ("resourceVersion=x", None),
        ] {
            let version = ListOptions::parse(query).unwrap().requested_version();
            assert_eq!(version.ok(), expected, "{query}");
        }
    }

    #[test]
    fn a_written_continue_token_parses_back() {
        let told = ContinueToken {
            version: 7,
            namespace: "n".into(),
            name: "a".into(),
        };
        assert_eq!(ContinueToken::parse(&told.encode()), Ok(told));
        assert!(ContinueToken::parse("nonsense").is_err());
    }
}
