//! Stores in the data directory the pinned keys of upstreams that were contacted for the first time.
//!
//! Keys that arrive during a write are collected for the next one, so that the first scrape of a fleet takes a few writes. Only
//! nodes that are known and not revoked have keys here; the keys of a removed or revoked node are removed with it. If gateways
//! share their state, the commands remove the keys, because this gateway may not know a node yet that another one knows. A waiting
//! connection receives the key that is on the disk. If a key could not be stored, the connection receives an error, because a key
//! that is not stored is never trusted.

use crate::{
    shared_state::{SharedState, SyncError},
    state::{
        Nodes,
        pins::{NewPin, PinsWriter},
    },
};
use causeway_certs::{NodeName, Pin, PinTable, Store, StoreError};
use rustls_pki_types::UnixTime;
use tokio::{sync::mpsc, task::spawn_blocking};

/// Maximum number of keys of one write.
const MAX_BATCH: usize = 1_024;

/// Writer of the pinned keys of upstreams, to the disk and to their table. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PinWriter {
    /// The data directory.
    pub store: Store,
    /// State that gateways share, in which the first key of an upstream is pinned.
    pub shared_state: Option<SharedState>,
    /// The table of nodes.
    pub nodes: Nodes,
    /// Whether a cluster provides nodes as well, which may have no record here.
    pub follows_cluster: bool,
    /// Writer of the table of pinned keys.
    pub writer: PinsWriter,
}

impl PinWriter {
    /// Stores new keys until no connection can report one any more.
    pub async fn run(self, mut new_pins: mpsc::Receiver<NewPin>) {
        let mut pending = Vec::new();
        while new_pins.recv_many(&mut pending, MAX_BATCH).await > 0 {
            let (pin_writer, batch) = (self.clone(), std::mem::take(&mut pending));
            let earliest = match self.pin_at_all_gateways(&batch).await {
                Ok(earliest) => earliest,
                Err(error) => {
                    refuse(batch, &error.to_string());
                    continue;
                }
            };
            // If the send fails, the waiting task receives the error that the writer has ended.
            let stored_first = spawn_blocking(move || pin_writer.store_pins(batch, earliest)).await;
            if stored_first.unwrap_or(false) {
                tracing::warn!(
                    "this data directory contains no pinned keys: the gateway trusts and pins the first key that each app shows. If the directory is deleted with its pod, this happens again after each restart: set the CA of such apps (`apps.PORT.ca` instead of `pin: true`), keep the directory, or store the keys in a Secret (`kubernetes.state`)"
                );
            }
        }
    }

    /// Pins these keys in the shared state, and returns the ones that are pinned there. Without shared state none is returned.
    async fn pin_at_all_gateways(
        &self,
        new_pins: &[NewPin],
    ) -> Result<Vec<ObservedPin>, SyncError> {
        match &self.shared_state {
            Some(shared) => shared.pin_first(self.admitted_pins(new_pins)).await,
            None => Ok(Vec::new()),
        }
    }

    /// Returns the new keys of nodes that may have keys.
    fn admitted_pins(&self, new_pins: &[NewPin]) -> Vec<ObservedPin> {
        let since = UnixTime::now().as_secs();
        let admitted = new_pins.iter().filter(|met| self.is_admitted(&met.node));
        let observed = admitted.map(|met| {
            let pin = Pin {
                key: met.key,
                since,
            };
            (met.node.clone(), met.port, pin)
        });
        observed.collect()
    }

    /// Reloads the keys from the disk, and drops those of removed or revoked nodes, at all gateways only if this is the only one.
    /// Blocks on the disk.
    ///
    /// # Errors
    /// If the disk cannot be read or written. The keys are then unchanged.
    pub fn refresh(&self) -> Result<(), StoreError> {
        let pins = self.store.pins();
        self.writer.replace(|| {
            self.require_file()?;
            match self.shared_state {
                Some(_) => Ok(self.usable_pins(pins.all()?)),
                None => pins.retain(|node| self.may_be_admitted(node)),
            }
        })
    }

    /// Returns the keys without those of nodes that are not admitted here.
    fn usable_pins(&self, mut stored: PinTable) -> PinTable {
        stored.retain(|node, _| self.may_be_admitted(node));
        stored
    }

    /// Fails if the table has keys but their file is missing, because upstreams would be trusted on first use again.
    fn require_file(&self) -> Result<(), StoreError> {
        if self.writer.is_empty() {
            return Ok(());
        }
        self.store.pins().require()
    }

    fn is_admitted(&self, node: &NodeName) -> bool {
        self.nodes.revocation_reason(node).is_none() && self.nodes.get(node).is_some()
    }

    /// Whether a node may have keys. Until the nodes of the cluster are loaded, an unknown node may have keys.
    fn may_be_admitted(&self, node: &NodeName) -> bool {
        let is_cluster_pending = self.follows_cluster && !self.nodes.has_cluster();
        self.is_admitted(node) || is_cluster_pending && self.nodes.revocation_reason(node).is_none()
    }

    /// Stores new keys, or those that are pinned at all gateways. Returns whether they are the first keys in this data directory.
    /// Blocks on the disk.
    fn store_pins(&self, new_pins: Vec<NewPin>, at_all_gateways: Vec<ObservedPin>) -> bool {
        let since = UnixTime::now().as_secs();
        let mut stored = PinTable::new();
        let mut was_empty = false;
        let written = self.writer.replace(|| {
            self.require_file()?;
            let new = match self.shared_state {
                Some(_) => at_all_gateways,
                None => self.admitted_pins(&new_pins),
            };
            was_empty = self.store.pins().all()?.is_empty();
            stored = self.store.pins().record_new(&new)?;
            Ok::<_, StoreError>(self.usable_pins(stored.clone()))
        });
        let failed = written.err().map(|error| error.to_string());
        for met in new_pins {
            let pin = stored.get(&met.node).and_then(|ports| ports.get(&met.port));
            let result = match (&failed, pin) {
                (Some(why), _) => Err(why.clone()),
                (None, Some(pin)) => Ok(*pin),
                (None, None) if self.is_admitted(&met.node) => {
                    Err("too many keys of this node are pinned already".to_owned())
                }
                (None, None) => Err("the node is no longer admitted".to_owned()),
            };
            log_result(&met, &result, since);
            // The stream that reported the key may have ended.
            let _ = met.responder.send(result);
        }
        was_empty && !stored.is_empty()
    }
}

/// Key of an upstream on this node at this port.
type ObservedPin = (NodeName, u16, Pin);

/// Reports to the waiting requests that their keys are not pinned.
fn refuse(new_pins: Vec<NewPin>, why: &str) {
    for met in new_pins {
        let result = Err(format!("the key cannot be pinned at all gateways: {why}"));
        log_result(&met, &result, 0);
        // The stream that reported the key may have ended.
        let _ = met.responder.send(result);
    }
}

fn log_result(new_pin: &NewPin, result: &Result<Pin, String>, now: u64) {
    let NewPin {
        node, port, key, ..
    } = new_pin;
    match result {
        Ok(pin) if pin.key == *key && pin.since == now => {
            tracing::info!(%node, port, %key, "the key of port {port} of {node} is now pinned");
        }
        // The stream whose key was refused reports the error.
        Ok(_) => {}
        Err(why) => {
            tracing::error!(%node, port, %key, why, "the key of port {port} of {node} cannot be recorded");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control::tests::world::name,
        shared_state::tests::MemoryEngine,
        state::{ClusterNode, Node, NodesWriter, Pins, pins::pins},
    };
    use causeway_certs::{Fingerprint, OpenMode};
    use futures_util::future::join_all;
    use std::time::Duration;
    use tokio::sync::oneshot;

    const BOUND: Duration = Duration::from_mins(2);

    struct World {
        folder: tempfile::TempDir,
        keeper: PinWriter,
        nodes: NodesWriter,
        pins: Pins,
        meetings: Option<mpsc::Receiver<NewPin>>,
    }

    impl World {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let store = Store::open(folder.path().join("data"), OpenMode::Create).unwrap();
            let nodes = NodesWriter::default();
            let (pins, writer, meetings) = pins(PinTable::new());
            for node in ["edge-1", "edge-2"] {
                nodes.upsert(name(node), Node::default());
            }
            let keeper = PinWriter {
                store,
                shared_state: None,
                nodes: nodes.reader(),
                follows_cluster: true,
                writer,
            };
            Self {
                folder,
                keeper,
                nodes,
                pins,
                meetings: Some(meetings),
            }
        }

        /// Runs `work` while the pin writer stores new keys.
        async fn while_kept<T>(&mut self, work: impl AsyncFnOnce(&Self) -> T) -> T {
            let (keeper, meetings) = (self.keeper.clone(), self.meetings.take().unwrap());
            tokio::select! {
                () = keeper.run(meetings) => unreachable!("somebody may meet an app"),
                done = work(self) => done,
            }
        }

        async fn met(&self, node: &str, key: &str) -> Result<Pin, String> {
            self.pins
                .pin_first_use((&name(node), 1), a(key), BOUND)
                .await
        }
    }

    fn a(key: &str) -> Fingerprint {
        key.repeat(64).parse().unwrap()
    }

    #[test]
    fn first_keys_of_a_data_directory_are_separated_from_later_keys() {
        let world = World::new();
        let note = |node: &str, key: &str| {
            let (responder, _receiver) = oneshot::channel();
            world.keeper.store_pins(
                vec![NewPin {
                    node: name(node),
                    port: 1,
                    key: a(key),
                    responder,
                }],
                Vec::new(),
            )
        };
        assert!(!note("edge-9", "a"), "the node is not admitted");
        assert!(note("edge-1", "a"));
        assert!(!note("edge-1", "b"), "it is refused");
        assert!(!note("edge-2", "a"));
    }

    #[tokio::test]
    async fn concurrent_first_contacts_all_get_the_one_key_on_disk() {
        let mut world = World::new();
        let noted = world
            .while_kept(async |world| {
                let keys = ["a", "b", "c", "d"].into_iter().cycle().take(64);
                join_all(keys.map(|key| world.met("edge-1", key))).await
            })
            .await;
        let first = noted[0].clone().unwrap();
        assert!(noted.iter().all(|told| *told == Ok(first)), "{noted:?}");
        let on_disk = world.keeper.store.pins().all().unwrap();
        assert_eq!(on_disk[&name("edge-1")][&1], first);
        assert_eq!(world.pins.get(&name("edge-1"), 1), Some(first));
        assert_eq!(world.pins.get(&name("edge-1"), 2), None);
    }

    #[tokio::test]
    async fn a_full_disk_leaves_an_upstream_unpinned_until_writes_work() {
        let mut world = World::new();
        let (file, aside) = ("pins.json", "aside");
        let path = |name: &str| world.folder.path().join("data").join(name);
        let (file, aside) = (path(file), path(aside));
        // The written file is renamed to this path.
        std::fs::create_dir(&file).unwrap();
        std::fs::write(file.join(aside.file_name().unwrap()), "").unwrap();
        world
            .while_kept(async |world| {
                world.met("edge-1", "a").await.unwrap_err();
                assert_eq!(world.pins.get(&name("edge-1"), 1), None);
                std::fs::remove_dir_all(&file).unwrap();
                assert_eq!(world.met("edge-1", "b").await.unwrap().key, a("b"));
            })
            .await;
    }

    #[tokio::test]
    async fn keys_end_with_their_node_and_a_revoked_node_gets_none() {
        let mut world = World::new();
        world
            .while_kept(async |world| {
                for node in ["edge-1", "edge-2"] {
                    world.met(node, "a").await.unwrap();
                }
                world.nodes.remove(&name("edge-1"));
                // Another gateway has admitted these nodes, and the cluster may not have reported them yet.
                world.keeper.refresh().unwrap();
                assert!(world.pins.get(&name("edge-1"), 1).is_some());
                let here = ClusterNode {
                    is_edge: true,
                    ..ClusterNode::default()
                };
                world.nodes.replace_cluster([(name("edge-4"), here)].into());
                world.met("edge-4", "a").await.unwrap();
                let message = world.met("edge-3", "a").await.unwrap_err();
                assert!(message.contains("no longer admitted"), "{message}");
                world.keeper.refresh().unwrap();
                assert_eq!(world.pins.get(&name("edge-1"), 1), None);
                assert!(world.pins.get(&name("edge-2"), 1).is_some());
                world.met("edge-1", "b").await.unwrap_err();
            })
            .await;
        let left = world.keeper.store.pins().all().unwrap();
        let kept = [name("edge-2"), name("edge-4")];
        assert_eq!(left.into_keys().collect::<Vec<_>>(), kept);
        // The pins of nodes that the configuration revokes are dropped too.
        let revoked = [name("edge-4")].into();
        world.nodes.replace_revoked(revoked);
        world.keeper.refresh().unwrap();
        assert_eq!(world.pins.get(&name("edge-4"), 1), None);
    }

    #[test]
    fn a_gateway_that_does_not_know_a_node_yet_keeps_its_shared_pins() {
        let mut world = World::new();
        let store = world.keeper.store.clone();
        let engine = std::sync::Arc::new(MemoryEngine::default());
        world.keeper.shared_state = Some(SharedState::new(engine, store, false));
        let pin = Pin {
            key: a("a"),
            since: 1,
        };
        let observed = ["edge-1", "edge-8"].map(|node| (name(node), 1, pin));
        let pins = world.keeper.store.pins();
        pins.record_new(&observed).unwrap();
        // The nodes of the cluster are loaded, without the newest one.
        world.nodes.replace_cluster([].into());
        world.keeper.refresh().unwrap();
        assert_eq!(pins.all().unwrap().len(), 2);
        assert_eq!(world.pins.get(&name("edge-1"), 1), Some(pin));
        assert_eq!(world.pins.get(&name("edge-8"), 1), None);
        world.nodes.upsert(name("edge-8"), Node::default());
        world.keeper.refresh().unwrap();
        assert_eq!(world.pins.get(&name("edge-8"), 1), Some(pin));
        // A new key of another node does not drop them either.
        world
            .keeper
            .store_pins(Vec::new(), vec![(name("edge-2"), 1, pin)]);
        assert_eq!(pins.all().unwrap().len(), 3);
    }

    #[tokio::test]
    async fn waiters_without_a_pin_writer_time_out_within_the_bound() {
        let mut world = World::new();
        let little = Duration::from_millis(20);
        let node = name("edge-1");
        let late = world.pins.pin_first_use((&node, 1), a("a"), little).await;
        assert!(late.unwrap_err().contains("within"));
        drop(world.meetings.take());
        let ending = world.met("edge-1", "a").await.unwrap_err();
        assert!(ending.contains("shutting down"), "{ending}");
    }
}
