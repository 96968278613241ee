//! Controller that tells `YurtHub` at which edges of its pool to read: `leader-hub-POOL`, a `ConfigMap` of `OpenYurt` v1.6.1 and
//! later, which `YurtHub` watches.
//!
//! 1. The content follows from the edges that are connected here, and from the present content (`render`): each gateway adds and
//!    removes its own edges. So several gateways maintain the map together, and none waits for another.
//! 2. All such maps are listed at each change, and every few seconds. Only differences are written, at the version that was read.
//! 3. A map of another owner is left unchanged and reported: `OpenYurt`'s own controller may be writing it.
//!
//! Never ends the process: it retries after any failure.

mod render;

use crate::{
    client::error_message,
    log_throttle::LogThrottle,
    ownership::{LABEL, foreign_managers, is_ours, last_foreign_manager, metadata, patch_params},
};
use causeway_certs::NodeName;
use causeway_gateway::{config, state};
use causeway_rt::backoff::Backoff;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client, ResourceExt, api::ListParams};
use render::{LABEL as HUBS, LeaderMap, PREFIX, RenderContext};
use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

/// Time limit of one request.
const BOUND: Duration = Duration::from_secs(10);
/// Interval of the reconciliations without a change.
const LOOK: Duration = Duration::from_secs(15);
/// Time during which changes are collected and then written together.
const GATHER: Duration = Duration::from_secs(1);
/// Longest pauses between tries: while the API does not respond, and while the API refuses.
const PAUSES: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(1));

/// Controller of the leader maps of `YurtHub`.
pub struct YurtHubLeaders {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the `ConfigMap`s that `YurtHub` watches.
    pub rules: config::YurtHub,
    /// Addresses at which `YurtHub` reads.
    pub hubs: watch::Receiver<state::YurtHubEndpoints>,
    /// Table of nodes: an edge whose node is no longer in it is removed.
    pub nodes: state::Nodes,
    /// Name of this gateway among others; a random part is added.
    pub gateway: String,
}

impl YurtHubLeaders {
    /// Runs the controller. Never returns.
    pub async fn run(self) -> Infallible {
        let mut writer = Reconciler {
            api: Api::namespaced(self.client, &self.rules.namespace),
            namespace: self.rules.namespace,
            own: format!("{}_{:016x}", self.gateway, rand::random::<u64>()),
            nodes: self.nodes,
            absent: BTreeMap::new(),
            written: BTreeMap::new(),
        };
        let mut hubs = self.hubs;
        let mut trouble = LogThrottle::new("writing the leader ConfigMaps for YurtHubs");
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        loop {
            let now = hubs.borrow_and_update().clone();
            let pause = match writer.settle(&now).await {
                Ok(failures) if failures.is_empty() => {
                    trouble.over();
                    backoff.reset();
                    LOOK
                }
                // All other ConfigMaps are up to date.
                Ok(failures) => {
                    trouble.say(&failures.join("; "));
                    backoff.reset();
                    LOOK
                }
                Err(failure) => {
                    trouble.say(&failure.to_string());
                    if failure.passes() {
                        backoff.silent(rand::random())
                    } else {
                        backoff.refused(None, rand::random())
                    }
                }
            };
            // The writer exists as long as the gateway.
            let _ = timeout(pause, hubs.changed()).await;
            sleep(GATHER).await;
        }
    }
}

/// State between two reconciliations.
struct Reconciler {
    api: Api<ConfigMap>,
    namespace: String,
    own: String,
    nodes: state::Nodes,
    /// Edges of each pool that are no longer connected here, and since when.
    absent: BTreeMap<String, BTreeMap<String, Instant>>,
    /// Map that was written last, by pool.
    written: BTreeMap<String, LeaderMap>,
}

impl Reconciler {
    /// Reconciles all maps. Returns the reasons for the maps that could not be reconciled.
    async fn settle(&mut self, hubs: &state::YurtHubEndpoints) -> Result<Vec<String>, WriteError> {
        let asked = ListParams::default().labels(HUBS);
        let listed = timeout(BOUND, self.api.list(&asked)).await??;
        let maps: BTreeMap<String, ConfigMap> = listed
            .into_iter()
            .filter_map(|map| Some((map.name_any().strip_prefix(PREFIX)?.to_owned(), map)))
            .collect();
        let ours = maps.iter().filter(|(_, map)| is_ours(map));
        let pools: BTreeSet<&String> = ours.map(|(pool, _)| pool).chain(hubs.keys()).collect();
        self.absent.retain(|pool, _| pools.contains(pool));
        self.written.retain(|pool, _| pools.contains(pool));
        let mut failures = Vec::new();
        for pool in pools {
            let of_pool = hubs.get(pool);
            let mut put = self.put(pool, maps.get(pool), of_pool).await;
            if put.as_ref().is_err_and(WriteError::is_conflict) {
                // Another process was faster, or the object exists without the label by which it would have been listed.
                put = match timeout(BOUND, self.api.get_opt(&format!("{PREFIX}{pool}"))).await? {
                    Ok(map) => self.put(pool, map.as_ref(), of_pool).await,
                    Err(error) => Err(error.into()),
                };
            }
            failures.extend(put.err().map(|failure| format!("{pool}: {failure}")));
        }
        Ok(failures)
    }

    async fn put(
        &mut self,
        pool: &str,
        before: Option<&ConfigMap>,
        hubs: Option<&state::NodePoolEndpoints>,
    ) -> Result<(), WriteError> {
        if let Some(map) = before.filter(|map| !is_ours(map)) {
            return Err(self.foreign(map));
        }
        let found = before.map(LeaderMap::read).unwrap_or_default();
        let wanted = self.wanted(pool, &found, hubs);
        if found == wanted {
            self.written.insert(pool.to_owned(), wanted);
            return Ok(());
        }
        let name = format!("{PREFIX}{pool}");
        let mut map = ConfigMap {
            metadata: metadata(&name, before),
            ..ConfigMap::default()
        };
        wanted.write(&mut map, &name);
        let parameters = patch_params();
        match before {
            Some(_) => timeout(BOUND, self.api.replace(&name, &parameters, &map)).await??,
            None => timeout(BOUND, self.api.create(&parameters, &map)).await??,
        };
        let known = self.written.get(pool);
        let changed = known.is_some_and(|before| !before.tells(&found));
        if let Some(by) = before.and_then(last_foreign_manager).filter(|_| changed) {
            tracing::warn!(
                configmap = name,
                by,
                "another process changed the leader ConfigMap for YurtHubs, and this gateway restored it; if that was OpenYurt's own controller, disable that controller permanently \
                 (yurt-manager --controllers=-hubleader,-hubleaderconfig,*)"
            );
        } else if !wanted.tells(&found) {
            let leaders = wanted.leaders();
            tracing::info!(
                configmap = name,
                leaders,
                "the leader ConfigMap for YurtHubs was written"
            );
        }
        self.written.insert(pool.to_owned(), wanted);
        Ok(())
    }

    fn wanted(
        &mut self,
        pool: &str,
        found: &LeaderMap,
        hubs: Option<&state::NodePoolEndpoints>,
    ) -> LeaderMap {
        let nodes = &self.nodes;
        // Before the nodes of the cluster are loaded, readers must not conclude that there are none.
        let may = |node: &str| {
            NodeName::parse(node).is_ok_and(|node| {
                nodes.revoked(&node).is_none()
                    && (!nodes.has_cluster() || nodes.get(&node).is_some())
            })
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut looks = RenderContext {
            own: &self.own,
            now: Instant::now(),
            clock: since.map_or(0, |since| since.as_secs()),
            absent: self.absent.entry(pool.to_owned()).or_default(),
            may: &may,
        };
        found.next(hubs, &mut looks)
    }

    /// Returns the error that a map is not ours, with its remedy.
    fn foreign(&self, map: &ConfigMap) -> WriteError {
        let (key, value) = LABEL;
        let (name, namespace) = (map.name_any(), &self.namespace);
        let by = foreign_managers(map).map(|by| format!(" but to {by}"));
        WriteError::Foreign(format!(
            "the ConfigMap {namespace}/{name} does not belong to a gateway{} and is not changed: hubs of that pool use the leaders in it. Disable \
             OpenYurt's controller permanently (yurt-manager --controllers=-hubleader,-hubleaderconfig,*), and transfer the ConfigMap \
             (kubectl -n {namespace} label configmap {name} {key}={value} --overwrite)",
            by.unwrap_or_default()
        ))
    }
}

/// Error that prevents a map from being written.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    /// An object of another owner has its name.
    #[error("{0}")]
    Foreign(String),
    #[error("{}", error_message(.0))]
    Asked(#[from] kube::Error),
    #[error("the cluster's API did not answer in time")]
    Silent(#[from] tokio::time::error::Elapsed),
}

impl WriteError {
    /// Whether another writer was faster, which is no fault.
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Asked(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists())
    }

    /// Whether trying again soon may do.
    fn passes(&self) -> bool {
        match self {
            Self::Foreign(_) => false,
            Self::Asked(kube::Error::Api(_)) => self.is_conflict(),
            Self::Asked(_) | Self::Silent(_) => true,
        }
    }
}
