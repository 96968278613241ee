//! Configuration section `api_cache`: cluster resources that edges may read, for clients on their nodes.
//!
//! Without the section, edges read nothing. The gateway caches the listed resources in memory, filled from the cluster's API or
//! from a directory. The tunnel port serves them to an edge according to the first rule for the edge's pool.

use std::path::PathBuf;

use causeway_config::{ByteSize, ConfigErrors};
use causeway_watch_cache::{AccessScope, CacheLimits, GroupVersionResource};
use serde::{Deserialize, Serialize};

/// Minimum of `event_buffer`: one object of the largest size that etcd accepts has to fit.
const MIN_EVENT_BUFFER: usize = 2 << 20;

/// Cluster resources that edges may read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ApiCache {
    /// Resources that the gateway caches, `GROUP/VERSION/PLURAL`, or `VERSION/PLURAL` of the core group.
    pub resources: Vec<String>,
    /// Rules of what edges may read. The first rule for an edge's pool applies; an edge without a rule reads nothing. Without this key: every edge reads everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow: Option<Vec<AccessRule>>,
    /// Concurrent connections by which edges read: one of the leader of each pool, and one of each edge that has no leader to read from.
    pub connections: usize,
    /// Bytes of encoded answers that are cached for the next identical request.
    #[serde(with = "ByteSize")]
    pub cache: usize,
    /// Bytes of the latest changes of each resource. An edge that was disconnected resumes from these changes and does not read everything again.
    #[serde(with = "ByteSize")]
    pub event_buffer: usize,
    /// Directory of JSON or YAML files with objects, in place of a cluster's API; read again when one of them changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifests: Option<PathBuf>,
}

/// Rule of what edges of some pools may read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AccessRule {
    /// Confirmed pools; `*` stands for any characters. Without this key: every edge, also one without a pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pools: Option<Vec<String>>,
    /// The subset of `api_cache.resources` that the edges may read. Without this key: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Vec<String>>,
    /// Namespaces whose objects the edges may read. Without this key: all namespaces, and cluster-scoped objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<Vec<String>>,
}

/// Rule that applies to an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessLevel {
    /// There are no rules: the edge may read everything.
    Everything,
    /// The rule of `api_cache.allow` with this index.
    Rule(usize),
    /// No rule applies to the edge.
    Nothing,
}

impl Default for ApiCache {
    fn default() -> Self {
        let resources = GroupVersionResource::defaults();
        Self {
            // The resources that kube-proxy and CoreDNS read, and that OpenYurt serves in a pool.
            resources: resources.iter().map(ToString::to_string).collect(),
            allow: None,
            // 20,000 edges in pools of 10 have 2,000 leaders. The remaining connections suffice for 688 pools, a third of all,
            // that lose their leader at the same time: each has 9 other edges.
            connections: 8192,
            // Each resource as JSON and as protobuf, for a cluster with some thousand Services.
            cache: 64 << 20,
            // Some minutes of changes during a large rollout.
            event_buffer: 8 << 20,
            manifests: None,
        }
    }
}

impl ApiCache {
    /// Returns the resources of a configuration that has been validated.
    pub fn resources(&self) -> Vec<GroupVersionResource> {
        parse_resources(&self.resources)
    }

    /// Returns the memory limits of the cache.
    pub fn limits(&self) -> CacheLimits {
        CacheLimits {
            response_bytes: u64::try_from(self.cache).unwrap_or(u64::MAX),
            event_buffer_bytes: self.event_buffer,
        }
    }

    /// Returns the rule that applies to an edge of this pool.
    pub fn access_level(&self, pool: Option<&str>) -> AccessLevel {
        let Some(rules) = &self.allow else {
            return AccessLevel::Everything;
        };
        let matches_pool = |rule: &AccessRule| match (&rule.pools, pool) {
            (None, _) => true,
            (Some(patterns), Some(pool)) => patterns.iter().any(|one| matches_pattern(one, pool)),
            (Some(_), None) => false,
        };
        rules
            .iter()
            .position(matches_pool)
            .map_or(AccessLevel::Nothing, AccessLevel::Rule)
    }

    /// Returns the scope that the rule allows, or `None` if the rule allows everything.
    pub fn access_scope(&self, right: AccessLevel) -> Option<AccessScope> {
        let rule = match right {
            AccessLevel::Everything => return None,
            AccessLevel::Rule(index) => self.allow.as_ref().and_then(|rules| rules.get(index)),
            AccessLevel::Nothing => None,
        };
        let empty_scope = || AccessScope {
            resources: Vec::new(),
            namespaces: None,
        };
        Some(rule.map_or_else(empty_scope, |rule| AccessScope {
            resources: parse_resources(rule.resources.as_ref().unwrap_or(&self.resources)),
            namespaces: rule.namespaces.clone(),
        }))
    }

    pub(super) fn validate(&self, of_a_cluster: bool, faults: &mut ConfigErrors) {
        let bounds = [("cache", self.cache), ("connections", self.connections)];
        faults.check_at_least_one("api_cache", &bounds);
        if self.event_buffer < MIN_EVENT_BUFFER {
            faults.add(
                "api_cache.event_buffer",
                "is less than 2MiB, which a single object can need",
            );
        }
        if self.resources.is_empty() {
            let message = "is empty; list at least one resource, or remove the key to use the default resources";
            faults.add("api_cache.resources", message);
        }
        let mut earlier = Vec::new();
        for (index, text) in self.resources.iter().enumerate() {
            let path = format!("api_cache.resources[{index}]");
            match text.parse::<GroupVersionResource>() {
                Err(error) => faults.add(path, error.to_string()),
                Ok(known) if earlier.contains(&known) => {
                    faults.add(path, "is the same as an earlier one; remove it");
                }
                Ok(new) => earlier.push(new),
            }
        }
        for (index, rule) in self.allow.iter().flatten().enumerate() {
            rule.validate(&format!("api_cache.allow[{index}]"), &earlier, faults);
        }
        match (&self.manifests, of_a_cluster) {
            (None, false) => {
                let message = "has no source to read from; add the section \"kubernetes\", or set \"manifests\" to a directory";
                faults.add("api_cache", message);
            }
            (Some(_), true) => {
                let message = "the objects are read from the cluster of the section \"kubernetes\"; remove this key";
                faults.add("api_cache.manifests", message);
            }
            _ => {}
        }
    }
}

impl AccessRule {
    fn validate(&self, path: &str, cached: &[GroupVersionResource], faults: &mut ConfigErrors) {
        let lists = [
            ("pools", &self.pools),
            ("resources", &self.resources),
            ("namespaces", &self.namespaces),
        ];
        for (key, list) in lists {
            let list = list.as_ref();
            if list.is_some_and(Vec::is_empty) {
                let message = "is empty and would match nothing; list at least one value, or remove the key to match any value";
                faults.add(format!("{path}.{key}"), message);
            }
            let blank = |text: &String| text.is_empty() || text.contains(char::is_whitespace);
            if let Some(index) = list.and_then(|list| list.iter().position(blank)) {
                faults.add(
                    format!("{path}.{key}[{index}]"),
                    "is empty or contains a space",
                );
            }
        }
        for (index, text) in self.resources.iter().flatten().enumerate() {
            let known = text.parse::<GroupVersionResource>().ok();
            if !known.is_some_and(|known| cached.contains(&known)) {
                let message = format!(
                    "\"{text}\" is not listed in api_cache.resources; add it there, or remove it here"
                );
                faults.add(format!("{path}.resources[{index}]"), message);
            }
        }
    }
}

fn parse_resources(texts: &[String]) -> Vec<GroupVersionResource> {
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

/// Whether a name matches a pattern in which `*` stands for any characters.
pub(super) fn matches_pattern(pattern: &str, name: &str) -> bool {
    let Some((begin, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let (Some(name), Some((middle, end))) = (
        name.strip_prefix(begin),
        rest.rsplit_once('*').or(Some(("", rest))),
    ) else {
        return false;
    };
    let Some(mut remaining) = name.strip_suffix(end) else {
        return false;
    };
    // Each part is matched as early as possible, which finds a match whenever there is one.
    middle.split('*').all(|part| {
        let found = remaining.find(part);
        remaining = found
            .and_then(|at| remaining.get(at + part.len()..))
            .unwrap_or_default();
        found.is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(all: &[&str]) -> Vec<String> {
        all.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, name, expected) in [
            ("north", "north", true),
            ("north", "north-1", false),
            ("north-*", "north-1", true),
            ("north-*", "north", false),
            ("*", "", true),
            ("*-1", "north-1", true),
            ("a*b*c", "a-b-c", true),
            ("a*b*c", "a-c", false),
            ("ab*ba", "aba", false),
            ("a**c", "ac", true),
        ] {
            assert_eq!(matches_pattern(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn the_first_rule_of_a_pool_applies_and_no_rules_allow_all() {
        let mut api_cache = ApiCache::default();
        assert_eq!(api_cache.access_level(None), AccessLevel::Everything);
        assert!(api_cache.access_scope(AccessLevel::Everything).is_none());
        let rule = |pools, namespaces| AccessRule {
            pools,
            resources: Some(texts(&["v1/services"])),
            namespaces,
        };
        api_cache.allow = Some(vec![
            rule(Some(texts(&["north-*", "south"])), Some(texts(&["shop"]))),
            rule(Some(texts(&["*"])), None),
        ]);
        assert_eq!(
            api_cache.access_level(Some("north-1")),
            AccessLevel::Rule(0)
        );
        assert_eq!(api_cache.access_level(Some("west")), AccessLevel::Rule(1));
        // An object without a pool belongs to no pool, even if its name suggests one.
        assert_eq!(api_cache.access_level(None), AccessLevel::Nothing);
        let grant = api_cache.access_scope(AccessLevel::Rule(0)).unwrap();
        assert_eq!(
            grant.resources,
            parse_resources(&["v1/services".to_owned()])
        );
        assert_eq!(grant.namespaces, Some(texts(&["shop"])));
        assert!(
            api_cache
                .access_scope(AccessLevel::Nothing)
                .unwrap()
                .resources
                .is_empty()
        );
        api_cache.allow = Some(vec![AccessRule::default()]);
        assert_eq!(api_cache.access_level(None), AccessLevel::Rule(0));
        assert_eq!(
            api_cache
                .access_scope(AccessLevel::Rule(0))
                .unwrap()
                .resources
                .len(),
            3
        );
    }
}
