//! Controller that publishes the edges of a pool at which `YurtHub` reads: `leader-hub-POOL`, a `ConfigMap` of `OpenYurt`
//! v1.6.1 and later, which `YurtHub` watches.
//!
//! 1. The content follows from the edges that are connected here, and from the present content (`render`): each gateway adds
//!    and removes its own edges. So several gateways maintain the map together, without waiting for each other.
//! 2. All such maps are listed at each change and every 15 s. Only differences are written, at the version that was read.
//! 3. A map of another owner is left unchanged and reported: `OpenYurt`'s own controller may be writing it.
//!
//! Never ends the process: it retries after any error.

mod render;

use crate::{
    log_throttle::LogThrottle,
    ownership::{
        MANAGED_BY_LABEL, WriteError, is_owned, last_foreign_manager, last_foreign_writer,
        owned_metadata, patch_params,
    },
};
use causeway_certs::NodeName;
use causeway_gateway::{config, state};
use causeway_rt::backoff::Backoff;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client, ResourceExt, api::ListParams};
use render::{CONFIGMAP_NAME_LABEL as HUBS, LeaderMap, PREFIX, RenderContext};
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
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of the reconciliations without a change.
const RESYNC_INTERVAL: Duration = Duration::from_secs(15);
/// Time during which changes are collected and then written together.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Maximum pauses between attempts: while the API does not respond, and while the API refuses.
const BACKOFF_RANGE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(1));

/// Controller of the leader maps of `YurtHub`.
pub(crate) struct YurtHubLeaders {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the `ConfigMap`s that `YurtHub` watches.
    pub settings: config::YurtHub,
    /// Addresses at which `YurtHub` reads.
    pub endpoints: watch::Receiver<state::YurtHubEndpoints>,
    /// Table of nodes: an edge whose node is no longer in it is removed.
    pub nodes: state::Nodes,
    /// Name of this gateway among others. A random part is appended.
    pub gateway: String,
}

impl YurtHubLeaders {
    /// Runs the controller. Never returns.
    pub(crate) async fn run(self) -> Infallible {
        let mut reconciler = Reconciler {
            api: Api::namespaced(self.client, &self.settings.namespace),
            namespace: self.settings.namespace,
            identity: format!("{}_{:016x}", self.gateway, rand::random::<u64>()),
            nodes: self.nodes,
            absent_since: BTreeMap::new(),
            written: BTreeMap::new(),
        };
        let mut endpoints = self.endpoints;
        let mut failure_log = LogThrottle::new("writing the leader ConfigMaps for YurtHubs");
        let mut backoff = Backoff::new(BACKOFF_RANGE.0, BACKOFF_RANGE.1);
        loop {
            let current = endpoints.borrow_and_update().clone();
            let pause = match reconciler.reconcile(&current).await {
                Ok(failures) if failures.is_empty() => {
                    failure_log.log_recovery();
                    backoff.reset();
                    RESYNC_INTERVAL
                }
                // All other ConfigMaps are up to date.
                Ok(failures) => {
                    failure_log.log_failure(&failures.join("; "));
                    backoff.reset();
                    RESYNC_INTERVAL
                }
                Err(failure) => {
                    failure_log.log_failure(&failure.to_string());
                    if failure.is_transient() {
                        backoff.silent(rand::random())
                    } else {
                        backoff.refused(None, rand::random())
                    }
                }
            };
            // The writer exists as long as the gateway.
            let _ = timeout(pause, endpoints.changed()).await;
            sleep(DEBOUNCE).await;
        }
    }
}

/// State between two reconciliations.
struct Reconciler {
    api: Api<ConfigMap>,
    namespace: String,
    identity: String,
    nodes: state::Nodes,
    /// Edges of each pool that are no longer connected here, and the time since when.
    absent_since: BTreeMap<String, BTreeMap<String, Instant>>,
    /// Map of each pool that was written last.
    written: BTreeMap<String, LeaderMap>,
}

impl Reconciler {
    /// Reconciles all maps. Returns the reasons for which some maps could not be reconciled.
    async fn reconcile(
        &mut self,
        endpoints: &state::YurtHubEndpoints,
    ) -> Result<Vec<String>, WriteError> {
        let list_params = ListParams::default().labels(HUBS);
        let listed = timeout(REQUEST_TIMEOUT, self.api.list(&list_params)).await??;
        let maps: BTreeMap<String, ConfigMap> = listed
            .into_iter()
            .filter_map(|map| Some((map.name_any().strip_prefix(PREFIX)?.to_owned(), map)))
            .collect();
        let owned = maps.iter().filter(|(_, map)| is_owned(map));
        let pools: BTreeSet<&String> = owned
            .map(|(pool, _)| pool)
            .chain(endpoints.keys())
            .collect();
        self.absent_since.retain(|pool, _| pools.contains(pool));
        self.written.retain(|pool, _| pools.contains(pool));
        let mut failures = Vec::new();
        for pool in pools {
            let pool_endpoints = endpoints.get(pool);
            let mut write_result = self
                .reconcile_pool(pool, maps.get(pool), pool_endpoints)
                .await;
            if write_result.as_ref().is_err_and(WriteError::is_conflict) {
                // Another process was faster, or the object exists without the label by which it would have been listed.
                write_result = match timeout(
                    REQUEST_TIMEOUT,
                    self.api.get_opt(&format!("{PREFIX}{pool}")),
                )
                .await?
                {
                    Ok(map) => {
                        self.reconcile_pool(pool, map.as_ref(), pool_endpoints)
                            .await
                    }
                    Err(error) => Err(error.into()),
                };
            }
            failures.extend(
                write_result
                    .err()
                    .map(|failure| format!("{pool}: {failure}")),
            );
        }
        Ok(failures)
    }

    async fn reconcile_pool(
        &mut self,
        pool: &str,
        previous: Option<&ConfigMap>,
        endpoints: Option<&state::NodePoolEndpoints>,
    ) -> Result<(), WriteError> {
        if let Some(map) = previous.filter(|map| !is_owned(map)) {
            return Err(self.foreign_error(map));
        }
        let found = previous.map(LeaderMap::parse).unwrap_or_default();
        let desired = self.desired_map(pool, &found, endpoints);
        if found == desired {
            self.written.insert(pool.to_owned(), desired);
            return Ok(());
        }
        let name = format!("{PREFIX}{pool}");
        let mut map = ConfigMap {
            metadata: owned_metadata(&name, previous),
            ..ConfigMap::default()
        };
        desired.write(&mut map, &name);
        let parameters = patch_params();
        match previous {
            Some(_) => {
                timeout(REQUEST_TIMEOUT, self.api.replace(&name, &parameters, &map)).await??
            }
            None => timeout(REQUEST_TIMEOUT, self.api.create(&parameters, &map)).await??,
        };
        let last_written = self.written.get(pool);
        let changed = last_written.is_some_and(|before| !before.has_same_leaders(&found));
        if let Some(by) = previous.and_then(last_foreign_manager).filter(|_| changed) {
            tracing::warn!(
                configmap = name,
                by,
                "another process changed the leader ConfigMap for YurtHubs, and this gateway restored it; if that was OpenYurt's own controller, disable that controller permanently \
                 (yurt-manager --controllers=-hubleader,-hubleaderconfig,*)"
            );
        } else if !desired.has_same_leaders(&found) {
            let leaders = desired.leaders();
            tracing::info!(
                configmap = name,
                leaders,
                "the leader ConfigMap for YurtHubs was written"
            );
        }
        self.written.insert(pool.to_owned(), desired);
        Ok(())
    }

    fn desired_map(
        &mut self,
        pool: &str,
        found: &LeaderMap,
        endpoints: Option<&state::NodePoolEndpoints>,
    ) -> LeaderMap {
        let nodes = &self.nodes;
        // Before the nodes of the cluster are loaded, readers must not conclude that there are none.
        let may_lead = |node: &str| {
            NodeName::parse(node).is_ok_and(|node| {
                nodes.revocation_reason(&node).is_none()
                    && (!nodes.has_cluster() || nodes.get(&node).is_some())
            })
        };
        let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut context = RenderContext {
            gateway: &self.identity,
            now: Instant::now(),
            unix_now: elapsed.map_or(0, |since| since.as_secs()),
            absent_since: self.absent_since.entry(pool.to_owned()).or_default(),
            may_lead: &may_lead,
        };
        found.next_content(endpoints, &mut context)
    }

    /// Returns the error that a map is not ours, with its remedy.
    fn foreign_error(&self, map: &ConfigMap) -> WriteError {
        let (key, value) = MANAGED_BY_LABEL;
        let (name, namespace) = (map.name_any(), &self.namespace);
        let by = last_foreign_writer(map).map(|by| format!(" but to {by}"));
        WriteError::Foreign(format!(
            "the ConfigMap {namespace}/{name} does not belong to a gateway{} and is not changed: hubs of that pool use the leaders in it. Disable \
             OpenYurt's controller permanently (yurt-manager --controllers=-hubleader,-hubleaderconfig,*), and transfer the ConfigMap \
             (kubectl -n {namespace} label configmap {name} {key}={value} --overwrite)",
            by.unwrap_or_default()
        ))
    }
}
