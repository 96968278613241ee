//! Content of `leader-hub-POOL`: a function of its former content, and of the edges that are connected here.
//!
//! Names of leaders are never names of nodes, but `causeway:NODE`. A `YurtHub` whose own node is among the leaders reads at
//! the API, but the `YurtHub` of a leader edge must read at the edge as all others do. An annotation lists the gateways of
//! each edge, and the resources that `YurtHub` can read there. Each gateway adds and removes only itself, and an edge without
//! gateways is removed.

use causeway_gateway::state::NodePoolEndpoints;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};
use tokio::time::Instant;

/// Prefix of each map's name, followed by the pool.
pub(super) const PREFIX: &str = "leader-hub-";
/// Label by which `YurtHub` finds the map. Its value is the map's name.
pub(super) const CONFIGMAP_NAME_LABEL: &str = "openyurt.io/configmap-name";
/// Annotation with the attributes of each leader edge: a JSON object.
const LEADERS_ANNOTATION: &str = "causeway.io/leaders";
/// Prefix of names of edges among leaders.
const EDGE_PREFIX: &str = "causeway:";
/// Delay before an edge that is no longer connected here is removed. A short reconnection should not move `YurtHub` to
/// another edge.
const REMOVAL_DELAY: Duration = Duration::from_secs(30);
/// Interval at which a gateway confirms its edges, in seconds. A gateway without a confirmation for `CONFIRM_EXPIRY` has
/// ended, even if clocks differ.
const CONFIRM_INTERVAL: u64 = 10 * 60;
const CONFIRM_EXPIRY: u64 = 30 * 60;
/// Maximum number of edges of one pool in the map.
const MAX_LEADERS: usize = 8;

/// Keys of the map's data, as `OpenYurt`'s `hubleaderconfig` controller writes them.
const LEADERS_KEY: &str = "leaders";
const RESOURCES_KEY: &str = "pool-scoped-metadata";
const ELECTION_KEY: &str = "enable-leader-election";
const INTERCONNECTIVITY_KEY: &str = "interconnectivity";

/// An edge at which `YurtHub` reads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
struct LeaderEntry {
    /// Address of the edge in the form of a URL.
    #[serde(skip)]
    at: String,
    /// Gateways to which the edge is connected, and the time of each gateway's last confirmation, in Unix seconds.
    #[serde(default)]
    by: BTreeMap<String, u64>,
    /// Resources that `YurtHub` can read there, in its format.
    #[serde(default)]
    resources: BTreeSet<String>,
}

/// Leaders of one pool for `YurtHub`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LeaderMap {
    leaders: BTreeMap<String, LeaderEntry>,
    /// Resources that `YurtHub` was last configured to read, if there is no edge.
    resources: BTreeSet<String>,
    /// Whether the map has exactly this content.
    is_canonical: bool,
}

/// Gateway that renders the map, and the time.
pub(super) struct RenderContext<'a> {
    /// Name of this gateway.
    pub(super) gateway: &'a str,
    pub(super) now: Instant,
    /// Time in Unix seconds.
    pub(super) unix_now: u64,
    /// Edges of this gateway that are no longer connected here, and the time since when.
    pub(super) absent_since: &'a mut BTreeMap<String, Instant>,
    /// Whether a node that is not connected here may be a leader.
    pub(super) may_lead: &'a dyn Fn(&str) -> bool,
}

impl LeaderMap {
    /// Parses the content of a map.
    pub(super) fn parse(map: &ConfigMap) -> Self {
        let data = |key: &str| {
            let data = map.data.as_ref();
            data.and_then(|data| data.get(key))
                .map_or("", String::as_str)
        };
        let recorded = map.annotations().get(LEADERS_ANNOTATION);
        let mut recorded: BTreeMap<String, LeaderEntry> = recorded
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        let mut leader = |part: &str| {
            let (name, address) = part.split_once('/')?;
            let mut leader = recorded.remove(name).unwrap_or_default();
            address.clone_into(&mut leader.at);
            Some((name.to_owned(), leader))
        };
        let mut read = Self {
            leaders: data(LEADERS_KEY)
                .split(',')
                .filter_map(&mut leader)
                .collect(),
            resources: split_list(data(RESOURCES_KEY)),
            is_canonical: true,
        };
        let mut rendered = ConfigMap::default();
        read.write(&mut rendered, &map.name_any());
        let same_annotation =
            |key: &str| map.annotations().get(key) == rendered.annotations().get(key);
        read.is_canonical = map.data == rendered.data
            && same_annotation(LEADERS_ANNOTATION)
            && map.labels().get(CONFIGMAP_NAME_LABEL)
                == rendered.labels().get(CONFIGMAP_NAME_LABEL);
        read
    }

    /// Returns the next content, if the edges in `endpoints` are connected here.
    pub(super) fn next_content(
        &self,
        endpoints: Option<&NodePoolEndpoints>,
        context: &mut RenderContext<'_>,
    ) -> Self {
        let mut leaders = self.remaining_leaders(endpoints, context);
        for (node, address) in endpoints.iter().flat_map(|hubs| &hubs.addresses) {
            let name = format!("{EDGE_PREFIX}{node}");
            let previous = leaders.remove(&name);
            let is_new = previous.is_none();
            let mut leader = previous.unwrap_or_default();
            leader.at = url_host(*address);
            leader.resources = endpoints
                .iter()
                .flat_map(|hubs| &hubs.resources)
                .map(resource_path)
                .collect();
            let confirmed_at = leader.by.entry(context.gateway.to_owned()).or_default();
            if context.unix_now.abs_diff(*confirmed_at) >= CONFIRM_INTERVAL {
                *confirmed_at = context.unix_now;
            }
            // A leader without the objects that all others have would leave YurtHubs without data.
            let shared_resources = common_resources(&leaders);
            let has_common_resources =
                shared_resources.is_none_or(|others| !others.is_disjoint(&leader.resources));
            if has_common_resources && !(is_new && leaders.len() >= MAX_LEADERS) {
                leaders.insert(name, leader);
            }
        }
        Self {
            resources: common_resources(&leaders).unwrap_or_else(|| self.resources.clone()),
            leaders,
            is_canonical: true,
        }
    }

    /// Returns the leaders that stay, without the attributes of edges that are connected here.
    fn remaining_leaders(
        &self,
        endpoints: Option<&NodePoolEndpoints>,
        context: &mut RenderContext<'_>,
    ) -> BTreeMap<String, LeaderEntry> {
        let is_connected = |node: &str| {
            endpoints.is_some_and(|hubs| hubs.addresses.keys().any(|own| own.as_str() == node))
        };
        let (mut remaining, mut absent_since) = (BTreeMap::new(), BTreeMap::new());
        for (name, leader) in &self.leaders {
            let Some(node) = name.strip_prefix(EDGE_PREFIX) else {
                continue;
            };
            let mut leader = leader.clone();
            leader.by.retain(|by, confirmed_at| {
                by == context.gateway || context.unix_now.abs_diff(*confirmed_at) < CONFIRM_EXPIRY
            });
            if !is_connected(node) {
                if leader.by.contains_key(context.gateway) {
                    let since = *context.absent_since.get(name).unwrap_or(&context.now);
                    absent_since.insert(name.clone(), since);
                    if context.now - since >= REMOVAL_DELAY {
                        leader.by.remove(context.gateway);
                    }
                }
                if leader.by.is_empty() || !(context.may_lead)(node) {
                    continue;
                }
            }
            remaining.insert(name.clone(), leader);
        }
        *context.absent_since = absent_since;
        remaining
    }

    /// Writes the content to a map.
    pub(super) fn write(&self, map: &mut ConfigMap, name: &str) {
        let resources: Vec<&str> = self.resources.iter().map(String::as_str).collect();
        let enabled = !self.leaders.is_empty();
        let data = [
            (LEADERS_KEY, self.leaders()),
            (RESOURCES_KEY, resources.join(",")),
            (ELECTION_KEY, enabled.to_string()),
            (INTERCONNECTIVITY_KEY, "true".to_owned()),
        ];
        map.data = Some(data.map(|(key, value)| (key.to_owned(), value)).into());
        let recorded = serde_json::to_string(&self.leaders).unwrap_or_default();
        map.annotations_mut()
            .insert(LEADERS_ANNOTATION.to_owned(), recorded);
        map.labels_mut()
            .insert(CONFIGMAP_NAME_LABEL.to_owned(), name.to_owned());
    }

    /// Returns the leaders in `YurtHub`'s format: sorted, each `NAME/IP`.
    pub(super) fn leaders(&self) -> String {
        let all = self.leaders.iter();
        let all: Vec<String> = all
            .map(|(name, leader)| format!("{name}/{}", leader.at))
            .collect();
        all.join(",")
    }

    /// Whether both maps have the same meaning for `YurtHub`.
    pub(super) fn has_same_leaders(&self, other: &Self) -> bool {
        self.leaders() == other.leaders() && self.resources == other.resources
    }
}

/// Returns the resources that can be read at each leader, or `None` if there is no leader.
fn common_resources(leaders: &BTreeMap<String, LeaderEntry>) -> Option<BTreeSet<String>> {
    let all = leaders.values().map(|leader| leader.resources.clone());
    all.reduce(|all, one| &all & &one)
}

/// Returns an IP address for a URL: `YurtHub` writes `https://`, this text, and its port.
fn url_host(address: IpAddr) -> String {
    match address {
        IpAddr::V4(at) => at.to_string(),
        IpAddr::V6(at) => format!("[{at}]"),
    }
}

/// Returns a resource in `YurtHub`'s format: group, version and plural, with nothing before the first slash for the core group.
fn resource_path(resource: &causeway_watch_cache::GroupVersionResource) -> String {
    format!(
        "{}/{}/{}",
        resource.group, resource.version, resource.plural
    )
}

fn split_list(text: &str) -> BTreeSet<String> {
    let words = text.split(',').filter(|word| !word.is_empty());
    words.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests;
