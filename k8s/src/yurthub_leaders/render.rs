//! What stands in `leader-hub-POOL`: a function of what stood there, and of the edges that are connected here.
//!
//! Names of leaders are those of no node, `causeway:NODE`: a hub whose own node's name is among them reads at the API, and that of an edge
//! that leads is to read at the edge as all others do. An annotation says which gateways have each of them, and what hubs can read there:
//! each gateway adds and removes itself alone, and an edge that no gateway has is taken out.

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

/// What each map's name begins with; the pool follows.
pub(super) const PREFIX: &str = "leader-hub-";
/// The label by which hubs find it, whose value is its name.
pub(super) const LABEL: &str = "openyurt.io/configmap-name";
/// What is known of each edge that stands there: a JSON object.
const KNOWN: &str = "causeway.io/leaders";
/// What names of edges begin with among leaders.
const OURS: &str = "causeway:";
/// An edge that is not connected here any more is taken out after this long: one that dials anew is no reason to send hubs elsewhere.
const GRACE: Duration = Duration::from_secs(30);
/// A gateway says so often that it goes on having its edges, in seconds; one that has not for so long has ended, whatever clocks say.
const AGAIN: u64 = 10 * 60;
const ENDED: u64 = 30 * 60;
/// Edges of one pool that hubs are told.
const MOST: usize = 8;

/// The keys of its data, as `OpenYurt`'s `hubleaderconfig` controller writes them.
const LEADERS: &str = "leaders";
const RESOURCES: &str = "pool-scoped-metadata";
const ENABLED: &str = "enable-leader-election";
const CONNECTED: &str = "interconnectivity";

/// An edge that hubs read at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
struct LeaderEntry {
    /// As it stands in an URL.
    #[serde(skip)]
    at: String,
    /// The gateways that have it, and when each has said so last, in Unix seconds.
    #[serde(default)]
    by: BTreeMap<String, u64>,
    /// What hubs can read there, as they write it.
    #[serde(default)]
    resources: BTreeSet<String>,
}

/// What hubs of one pool are told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LeaderMap {
    leaders: BTreeMap<String, LeaderEntry>,
    /// What they were told that they can read, where there is no edge.
    resources: BTreeSet<String>,
    /// What stands there is whole, and nothing else does.
    whole: bool,
}

/// Who looks, and when.
pub(super) struct RenderContext<'a> {
    /// This gateway.
    pub(super) own: &'a str,
    pub(super) now: Instant,
    /// In Unix seconds.
    pub(super) clock: u64,
    /// Since when edges that this gateway had are not connected here.
    pub(super) absent: &'a mut BTreeMap<String, Instant>,
    /// Whether a node may stand there at all, if nobody serves it here.
    pub(super) may: &'a dyn Fn(&str) -> bool,
}

impl LeaderMap {
    /// What stands there.
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

    /// What is to stand there, with these edges connected here.
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
            // One that has nothing of what all others have would leave hubs nothing to read.
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

    /// Those that stay, without what is known of edges that are connected here.
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

    /// Makes a map say it.
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

    /// As hubs read them: sorted, each `NAME/IP`.
    pub(super) fn leaders(&self) -> String {
        let all = self.leaders.iter();
        let all: Vec<String> = all
            .map(|(name, leader)| format!("{name}/{}", leader.at))
            .collect();
        all.join(",")
    }

    /// Whether hubs are told the same.
    pub(super) fn tells(&self, other: &Self) -> bool {
        self.leaders() == other.leaders() && self.resources == other.resources
    }
}

/// What can be read at each of them; nothing where there is none.
fn common(leaders: &BTreeMap<String, LeaderEntry>) -> Option<BTreeSet<String>> {
    let all = leaders.values().map(|leader| leader.resources.clone());
    all.reduce(|all, one| &all & &one)
}

/// An IP as it stands in an URL: hubs write `https://`, this, and their port.
fn host(at: IpAddr) -> String {
    match at {
        IpAddr::V4(at) => at.to_string(),
        IpAddr::V6(at) => format!("[{at}]"),
    }
}

/// A resource as hubs write it: group, version and plural, with nothing before the first slash for the core group.
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
