//! Content of `leader-hub-POOL`: a function of its former content, and of the edges that are connected here.
//!
//! Names of leaders are never names of nodes, but `causeway:NODE`. A `YurtHub` whose own node is among the leaders reads at the
//! API, and the `YurtHub` of a leader edge is to read at the edge as all others do. An annotation lists the gateways of each
//! edge, and the resources that `YurtHub` can read there. Each gateway adds and removes itself alone, and an edge without
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

/// Prefix of each map's name; the pool follows.
pub(super) const PREFIX: &str = "leader-hub-";
/// Label by which `YurtHub` finds the map. Its value is the map's name.
pub(super) const LABEL: &str = "openyurt.io/configmap-name";
/// Annotation with the facts of each leader edge: a JSON object.
const KNOWN: &str = "causeway.io/leaders";
/// Prefix of names of edges among leaders.
const OURS: &str = "causeway:";
/// Delay before an edge that is no longer connected here is removed: an edge that reconnects should not cause `YurtHub` to move.
const GRACE: Duration = Duration::from_secs(30);
/// Interval at which a gateway confirms its edges, in seconds. A gateway without a confirmation for `ENDED` has ended, whatever
/// clocks say.
const AGAIN: u64 = 10 * 60;
const ENDED: u64 = 30 * 60;
/// Edges of one pool in the map, at most.
const MOST: usize = 8;

/// Keys of the map's data, as `OpenYurt`'s `hubleaderconfig` controller writes them.
const LEADERS: &str = "leaders";
const RESOURCES: &str = "pool-scoped-metadata";
const ENABLED: &str = "enable-leader-election";
const CONNECTED: &str = "interconnectivity";

/// An edge at which `YurtHub` reads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
struct LeaderEntry {
    /// Address of the edge in the form of a URL.
    #[serde(skip)]
    at: String,
    /// Gateways that have the edge, and the time of each one's last confirmation, in Unix seconds.
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
    /// Resources that `YurtHub` was told to read, if there is no edge.
    resources: BTreeSet<String>,
    /// Whether the map has exactly this content.
    whole: bool,
}

/// Gateway that renders the map, and the time.
pub(super) struct RenderContext<'a> {
    /// Name of this gateway.
    pub(super) own: &'a str,
    pub(super) now: Instant,
    /// Time in Unix seconds.
    pub(super) clock: u64,
    /// Edges of this gateway that are no longer connected here, and since when.
    pub(super) absent: &'a mut BTreeMap<String, Instant>,
    /// Whether a node may be a leader at all, if this gateway does not serve it.
    pub(super) may: &'a dyn Fn(&str) -> bool,
}

impl LeaderMap {
    /// Parses the content of a map.
    pub(super) fn read(map: &ConfigMap) -> Self {
        let data = |key: &str| {
            let data = map.data.as_ref();
            data.and_then(|data| data.get(key))
                .map_or("", String::as_str)
        };
        let known = map.annotations().get(KNOWN);
        let mut known: BTreeMap<String, LeaderEntry> = known
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        let mut leader = |part: &str| {
            let (name, at) = part.split_once('/')?;
            let mut leader = known.remove(name).unwrap_or_default();
            at.clone_into(&mut leader.at);
            Some((name.to_owned(), leader))
        };
        let mut read = Self {
            leaders: data(LEADERS).split(',').filter_map(&mut leader).collect(),
            resources: words(data(RESOURCES)),
            whole: true,
        };
        let mut again = ConfigMap::default();
        read.write(&mut again, &map.name_any());
        let same = |key: &str| map.annotations().get(key) == again.annotations().get(key);
        read.whole = map.data == again.data
            && same(KNOWN)
            && map.labels().get(LABEL) == again.labels().get(LABEL);
        read
    }

    /// Returns the next content, with these edges connected here.
    pub(super) fn next(
        &self,
        hubs: Option<&NodePoolEndpoints>,
        looks: &mut RenderContext<'_>,
    ) -> Self {
        let mut leaders = self.kept(hubs, looks);
        for (node, at) in hubs.iter().flat_map(|hubs| &hubs.at) {
            let name = format!("{OURS}{node}");
            let before = leaders.remove(&name);
            let is_new = before.is_none();
            let mut leader = before.unwrap_or_default();
            leader.at = host(*at);
            leader.resources = hubs
                .iter()
                .flat_map(|hubs| &hubs.resources)
                .map(ours)
                .collect();
            let said = leader.by.entry(looks.own.to_owned()).or_default();
            if looks.clock.abs_diff(*said) >= AGAIN {
                *said = looks.clock;
            }
            // A leader without the objects that all others have would leave YurtHubs without data.
            let others = common(&leaders);
            let fits = others.is_none_or(|others| !others.is_disjoint(&leader.resources));
            if fits && !(is_new && leaders.len() >= MOST) {
                leaders.insert(name, leader);
            }
        }
        Self {
            resources: common(&leaders).unwrap_or_else(|| self.resources.clone()),
            leaders,
            whole: true,
        }
    }

    /// Returns the leaders that stay, without the facts of edges that are connected here.
    fn kept(
        &self,
        hubs: Option<&NodePoolEndpoints>,
        looks: &mut RenderContext<'_>,
    ) -> BTreeMap<String, LeaderEntry> {
        let here =
            |node: &str| hubs.is_some_and(|hubs| hubs.at.keys().any(|own| own.as_str() == node));
        let (mut kept, mut gone) = (BTreeMap::new(), BTreeMap::new());
        for (name, leader) in &self.leaders {
            let Some(node) = name.strip_prefix(OURS) else {
                continue;
            };
            let mut leader = leader.clone();
            leader
                .by
                .retain(|by, said| by == looks.own || looks.clock.abs_diff(*said) < ENDED);
            if !here(node) {
                if leader.by.contains_key(looks.own) {
                    let since = *looks.absent.get(name).unwrap_or(&looks.now);
                    gone.insert(name.clone(), since);
                    if looks.now - since >= GRACE {
                        leader.by.remove(looks.own);
                    }
                }
                if leader.by.is_empty() || !(looks.may)(node) {
                    continue;
                }
            }
            kept.insert(name.clone(), leader);
        }
        *looks.absent = gone;
        kept
    }

    /// Writes the content to a map.
    pub(super) fn write(&self, map: &mut ConfigMap, name: &str) {
        let resources: Vec<&str> = self.resources.iter().map(String::as_str).collect();
        let enabled = !self.leaders.is_empty();
        let data = [
            (LEADERS, self.leaders()),
            (RESOURCES, resources.join(",")),
            (ENABLED, enabled.to_string()),
            (CONNECTED, "true".to_owned()),
        ];
        map.data = Some(data.map(|(key, value)| (key.to_owned(), value)).into());
        let known = serde_json::to_string(&self.leaders).unwrap_or_default();
        map.annotations_mut().insert(KNOWN.to_owned(), known);
        map.labels_mut().insert(LABEL.to_owned(), name.to_owned());
    }

    /// Returns the leaders in `YurtHub`'s format: sorted, each `NAME/IP`.
    pub(super) fn leaders(&self) -> String {
        let all = self.leaders.iter();
        let all: Vec<String> = all
            .map(|(name, leader)| format!("{name}/{}", leader.at))
            .collect();
        all.join(",")
    }

    /// Whether both maps tell `YurtHub` the same.
    pub(super) fn tells(&self, other: &Self) -> bool {
        self.leaders() == other.leaders() && self.resources == other.resources
    }
}

/// Returns the resources that can be read at each leader, or `None` if there is no leader.
fn common(leaders: &BTreeMap<String, LeaderEntry>) -> Option<BTreeSet<String>> {
    let all = leaders.values().map(|leader| leader.resources.clone());
    all.reduce(|all, one| &all & &one)
}

/// Returns an IP for a URL: `YurtHub` writes `https://`, this, and its port.
fn host(at: IpAddr) -> String {
    match at {
        IpAddr::V4(at) => at.to_string(),
        IpAddr::V6(at) => format!("[{at}]"),
    }
}

/// Returns a resource in `YurtHub`'s format: group, version and plural, with nothing before the first slash for the core group.
fn ours(resource: &causeway_watch_cache::GroupVersionResource) -> String {
    format!(
        "{}/{}/{}",
        resource.group, resource.version, resource.plural
    )
}

fn words(text: &str) -> BTreeSet<String> {
    let words = text.split(',').filter(|word| !word.is_empty());
    words.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests;
