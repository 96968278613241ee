//! What stands in `leader-hub-POOL`: a function of what stood there, and of the edges that are connected here.
//!
//! Names of leaders are those of no node, `causeway:NODE`: a hub whose own node's name is among them reads at the API, and that of an edge
//! that leads is to read at the edge as all others do. An annotation says which gateway has put each there.

use causeway_gateway::state::PoolHubs;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
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
/// Who has put each edge there: a JSON object of gateways by edges.
const BY: &str = "causeway.io/leaders-by";
/// What names of edges begin with among leaders.
const OURS: &str = "causeway:";
/// An edge that is not connected here any more is taken out after this long: one that dials anew, or a gateway that restarts, is no reason
/// to send hubs elsewhere.
const GRACE: Duration = Duration::from_secs(30);

/// The keys of its data, as `OpenYurt`'s `hubleaderconfig` controller writes them.
const LEADERS: &str = "leaders";
const RESOURCES: &str = "pool-scoped-metadata";
const ENABLED: &str = "enable-leader-election";
const CONNECTED: &str = "interconnectivity";

/// An edge that hubs read at.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Leader {
    /// As it stands in an URL.
    at: String,
    /// The gateway that put it there.
    by: String,
}

/// What hubs of one pool are told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    leaders: BTreeMap<String, Leader>,
    resources: BTreeSet<String>,
    /// What stands there is whole, and nothing else does.
    whole: bool,
}

/// Since when edges that were put there by this gateway are not connected here, by pool.
#[derive(Default)]
pub(super) struct Absent(BTreeMap<String, BTreeMap<String, Instant>>);

impl Absent {
    /// Forgets other pools.
    pub(super) fn look(&mut self, pools: &BTreeSet<&String>) {
        self.0.retain(|pool, _| pools.contains(pool));
    }

    /// Of one pool, now.
    pub(super) fn of(
        &mut self,
        pool: &str,
        now: Instant,
    ) -> (&mut BTreeMap<String, Instant>, Instant) {
        (self.0.entry(pool.to_owned()).or_default(), now)
    }
}

impl Content {
    /// What stands there.
    pub(super) fn read(map: &ConfigMap) -> Self {
        let data = |key: &str| {
            let data = map.data.as_ref();
            data.and_then(|data| data.get(key))
                .map_or("", String::as_str)
        };
        let by = map.annotations().get(BY);
        let by: BTreeMap<String, String> = by
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        let leader = |part: &str| {
            let (name, at) = part.split_once('/')?;
            let by = by.get(name).cloned().unwrap_or_default();
            let at = at.to_owned();
            Some((name.to_owned(), Leader { at, by }))
        };
        let mut read = Self {
            leaders: data(LEADERS).split(',').filter_map(leader).collect(),
            resources: words(data(RESOURCES)),
            whole: true,
        };
        let mut again = ConfigMap::default();
        read.write(&mut again, &map.name_any());
        let same = |key: &str| map.annotations().get(key) == again.annotations().get(key);
        read.whole = map.data == again.data
            && same(BY)
            && map.labels().get(LABEL) == again.labels().get(LABEL);
        read
    }

    /// What is to stand there, with these edges connected here. `known` says whether a node is one of the cluster at all.
    pub(super) fn next(
        &self,
        hubs: Option<&PoolHubs>,
        own: &str,
        known: impl Fn(&str) -> bool,
        (absent, now): (&mut BTreeMap<String, Instant>, Instant),
    ) -> Self {
        let mut leaders = BTreeMap::new();
        for (node, at) in hubs.iter().flat_map(|hubs| &hubs.at) {
            let leader = Leader {
                at: host(*at),
                by: own.to_owned(),
            };
            leaders.insert(format!("{OURS}{node}"), leader);
        }
        let mut gone = BTreeMap::new();
        for (name, leader) in &self.leaders {
            let node = name.strip_prefix(OURS).filter(|node| known(node));
            let (Some(_), false) = (node, leaders.contains_key(name)) else {
                continue;
            };
            if leader.by == own {
                let since = *absent.get(name).unwrap_or(&now);
                if now - since >= GRACE {
                    continue;
                }
                gone.insert(name.clone(), since);
            }
            leaders.insert(name.clone(), leader.clone());
        }
        *absent = gone;
        let resources = match hubs {
            Some(hubs) => hubs.resources.iter().map(ours).collect(),
            None => self.resources.clone(),
        };
        Self {
            leaders,
            resources,
            whole: true,
        }
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
        let by = self.leaders.iter();
        let by: BTreeMap<&str, &str> = by
            .map(|(name, leader)| (name.as_str(), leader.by.as_str()))
            .collect();
        let by = serde_json::to_string(&by).unwrap_or_default();
        map.annotations_mut().insert(BY.to_owned(), by);
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
}

/// An IP as it stands in an URL: hubs write `https://`, this, and their port.
fn host(at: IpAddr) -> String {
    match at {
        IpAddr::V4(at) => at.to_string(),
        IpAddr::V6(at) => format!("[{at}]"),
    }
}

/// A resource as hubs write it: group, version and plural, with nothing before the first slash for the core group.
fn ours(resource: &causeway_pool::Resource) -> String {
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
