//! Synchronization of revocations of nodes and pinned keys of upstreams with a Secret, which outlives pods and is common to
//! all gateways.
//!
//! Each gateway has them in its data directory as well. The last state that was equal in both is stored there, so that a
//! change on either side can be detected. A local change is written to the Secret, and a change of the Secret is applied
//! locally. If both sides changed one entry, the local one wins. A write names the version that was read. So if two gateways
//! write at once, the second one reads again.

use crate::{client::error_message, log_throttle::LogThrottle};
use causeway_certs::{NodeName, Pin, Revocation, Store, StoreError};
use causeway_gateway::control::{drain::ReadinessBlock, node_sync::NodeSync};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{Api, Client, api::PostParams};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    fmt::Display,
    time::Duration,
};
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};

/// Interval at which the Secret is read.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Time to wait for further local changes.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Time limit of the API's response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of attempts to write while other gateways write.
const MAX_ATTEMPTS: usize = 5;
/// Key of the Secret.
const SECRET_KEY: &str = "state.json";
/// Name of the last common state in the data directory.
const LAST_STATE_FILE: &str = "shared-state";

/// Synchronizes the data directory of a gateway with a Secret.
pub struct SharedState {
    /// The cluster's API.
    pub client: Client,
    /// Namespace of the Secret.
    pub namespace: String,
    /// Name of the Secret.
    pub name: String,
    /// The gateway's nodes and pinned keys.
    pub node_sync: NodeSync,
}

/// State that gateways share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct State {
    revoked: BTreeMap<NodeName, Revocation>,
    /// Pinned keys by `NODE:PORT`.
    pins: BTreeMap<String, Pin>,
}

impl SharedState {
    /// Waits until the state of the Secret is applied. Clients wait until then.
    pub async fn initial_sync(&self, readiness_block: ReadinessBlock) {
        let mut failure_log = self.failure_log();
        while let Err(why) = self.synchronize().await {
            let reason = format!("revocations and pinned keys have not been loaded yet: {why}");
            self.node_sync.nodes.set_pending(&reason);
            readiness_block.set_reason(reason);
            failure_log.log_failure(&why);
            sleep(POLL_INTERVAL).await;
        }
        failure_log.log_recovery();
    }

    /// Runs the synchronization. Never returns.
    pub async fn run(self) -> Infallible {
        let mut failure_log = self.failure_log();
        let mut changes = self.node_sync.nodes.subscribe();
        loop {
            match self.synchronize().await {
                Ok(()) => failure_log.log_recovery(),
                Err(why) => failure_log.log_failure(&why),
            }
            tokio::select! {
                Ok(()) = changes.changed() => sleep(BATCH_INTERVAL).await,
                () = sleep(POLL_INTERVAL) => {}
            }
        }
    }

    fn failure_log(&self) -> LogThrottle {
        tracing::debug!(
            namespace = self.namespace,
            name = self.name,
            "sharing state in a Secret"
        );
        LogThrottle::new("storing revocations and pinned keys in the cluster's Secret")
    }

    /// Synchronizes the data directory and the Secret.
    async fn synchronize(&self) -> Result<(), String> {
        let api = Api::<Secret>::namespaced(self.client.clone(), &self.namespace);
        for _ in 0..MAX_ATTEMPTS {
            let response = timeout(REQUEST_TIMEOUT, api.get(&self.name)).await;
            let mut secret = response
                .map_err(|_| TIMEOUT_MESSAGE)?
                .map_err(|error| self.secret_error(&error))?;
            let remote = secret.data.as_ref().and_then(|data| data.get(SECRET_KEY));
            let remote = match remote.filter(|text| !text.0.is_empty()) {
                Some(text) => serde_json::from_slice(&text.0).map_err(|error| {
                    format!("{SECRET_KEY} of the Secret cannot be parsed: {error}")
                })?,
                None => State::default(),
            };
            let (merged, changed) = self.apply_remote(remote.clone()).await?;
            if changed {
                // Tunnels of nodes that are revoked now end.
                if let Some(Err(error)) = self.node_sync.refresh_detached().await {
                    return Err(error.to_string());
                }
            }
            if merged != remote {
                let text = serde_json::to_vec(&merged).map_err(error_text)?;
                let data = secret.data.get_or_insert_default();
                data.insert(SECRET_KEY.to_owned(), ByteString(text));
                let parameters = PostParams::default();
                let written = api.replace(&self.name, &parameters, &secret);
                match timeout(REQUEST_TIMEOUT, written)
                    .await
                    .map_err(|_| TIMEOUT_MESSAGE)?
                {
                    Ok(_) => tracing::info!("revocations and pinned keys are in the Secret"),
                    Err(kube::Error::Api(status)) if status.is_conflict() => continue,
                    Err(error) => return Err(self.secret_error(&error)),
                }
            }
            return self.on_disk(move |store| save_last(store, &merged)).await;
        }
        Err("other gateways change the Secret too often".to_owned())
    }

    fn secret_error(&self, error: &kube::Error) -> String {
        format!(
            "Secret {}/{}: {}",
            self.namespace,
            self.name,
            error_message(error)
        )
    }

    /// Applies changes of other gateways to the data directory. Returns the state of both, and whether the directory was changed.
    async fn apply_remote(&self, remote: State) -> Result<(State, bool), String> {
        self.on_disk(move |store| {
            let last = load_last(store)?;
            if !last.revoked.is_empty() {
                // A missing file does not mean that no node is revoked.
                store.nodes().require()?;
            }
            if !last.pins.is_empty() {
                store.pins().require()?;
            }
            let mut changed = false;
            let mut merged = State::default();
            let revoked = store.nodes().change_revoked(|local| {
                let merged_revoked = merge(&last.revoked, local, &remote.revoked);
                changed |= merged_revoked != *local;
                *local = merged_revoked;
            })?;
            merged.revoked = revoked;
            let pins = store.pins().change(|local| {
                let flat = flatten_pins(local);
                let merged_pins = merge(&last.pins, &flat, &remote.pins);
                changed |= merged_pins != flat;
                if merged_pins != flat {
                    *local = unflatten_pins(&merged_pins);
                }
            })?;
            merged.pins = flatten_pins(&pins);
            Ok((merged, changed))
        })
        .await
    }

    /// Runs a disk operation on another thread than the one that receives signals.
    async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, String> {
        let store = self.node_sync.store.clone();
        let result = spawn_blocking(move || work(&store)).await;
        result.map_err(error_text)?.map_err(error_text)
    }
}

const TIMEOUT_MESSAGE: &str = "the cluster's API did not answer in time";

/// Returns the merged entries of both sides. Each side may have changed those of `last`.
fn merge<K: Ord + Clone, V: PartialEq + Clone>(
    last: &BTreeMap<K, V>,
    local: &BTreeMap<K, V>,
    remote: &BTreeMap<K, V>,
) -> BTreeMap<K, V> {
    let keys: BTreeSet<&K> = local.keys().chain(remote.keys()).collect();
    let entry = |key: &K| {
        let side = if local.get(key) == last.get(key) {
            remote
        } else {
            local
        };
        Some((key.clone(), side.get(key)?.clone()))
    };
    keys.into_iter().filter_map(entry).collect()
}

fn load_last(store: &Store) -> Result<State, StoreError> {
    let text = store.read_runtime(LAST_STATE_FILE)?;
    // Without the last state, all entries of both sides count as new, and none is lost.
    let parsed = text.and_then(|text| serde_json::from_str(&text).ok());
    Ok(parsed.unwrap_or_default())
}

fn save_last(store: &Store, state: &State) -> Result<(), StoreError> {
    if load_last(store)? == *state {
        return Ok(());
    }
    let text = serde_json::to_string(state).unwrap_or_default();
    store.write_runtime(LAST_STATE_FILE, &text)
}

fn flatten_pins(pins: &causeway_certs::PinTable) -> BTreeMap<String, Pin> {
    let pins_of_node = |(node, ports): (&NodeName, &BTreeMap<u16, Pin>)| {
        let key = |(port, pin): (&u16, &Pin)| (format!("{node}:{port}"), *pin);
        ports.iter().map(key).collect::<Vec<_>>()
    };
    pins.iter().flat_map(pins_of_node).collect()
}

/// Returns the pins by node and port. A key that cannot be parsed is left out.
fn unflatten_pins(pins: &BTreeMap<String, Pin>) -> causeway_certs::PinTable {
    let mut table = causeway_certs::PinTable::new();
    for (key, pin) in pins {
        let parts = key.rsplit_once(':');
        let parsed = parts.and_then(|(node, port)| {
            Some((NodeName::parse(node).ok()?, port.parse::<u16>().ok()?))
        });
        if let Some((node, port)) = parsed {
            table.entry(node).or_default().insert(port, *pin);
        }
    }
    table
}

fn error_text(error: impl Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(entries: &[(&'static str, u8)]) -> BTreeMap<&'static str, u8> {
        entries.iter().copied().collect()
    }

    #[test]
    fn changes_of_both_sides_are_kept_and_the_own_one_wins() {
        let last = map(&[
            ("same", 1),
            ("changed", 1),
            ("both", 1),
            ("gone", 1),
            ("left", 1),
        ]);
        let here = map(&[
            ("same", 1),
            ("changed", 1),
            ("both", 2),
            ("left", 1),
            ("new", 5),
        ]);
        let there = map(&[
            ("same", 1),
            ("changed", 3),
            ("both", 3),
            ("gone", 1),
            ("other", 6),
        ]);
        let merged = merge(&last, &here, &there);
        let expected = [
            ("same", 1),
            ("changed", 3),
            ("both", 2),
            ("new", 5),
            ("other", 6),
        ];
        assert_eq!(merged, map(&expected));
        // A new pod without state takes over the contents of the Secret.
        assert_eq!(merge(&map(&[]), &map(&[]), &there), there);
    }

    #[test]
    fn pins_are_read_back_as_they_were() {
        let ca = causeway_certs::Ca::create(&"td".parse().unwrap()).unwrap();
        let key = ca.fingerprint();
        let pin = Pin { key, since: 7 };
        let node = NodeName::parse("edge-1.example").unwrap();
        let table: causeway_certs::PinTable = [(node, [(10250, pin)].into())].into();
        assert_eq!(unflatten_pins(&flatten_pins(&table)), table);
    }
}
