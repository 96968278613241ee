//! Pinned keys of upstreams: the key with which each upstream was first seen, by node and port.
//!
//! The pins have a file of their own, separate from the records of nodes. The file of pins is written when an upstream is
//! first seen, that of records when a node connects. A pin stays until it is removed explicitly: the first key wins over any
//! later key. A write covers all pins, so code with many new pins records them at once. Nothing is written if nothing
//! changes.

use std::collections::BTreeMap;

use causeway_tls::{Fingerprint, NodeName};
use serde::{Deserialize, Serialize};

use super::atomic_file::{Dir, OtherFields, StoreError};
use super::data_dir::Store;

pub(super) const PINS_FILE: &str = "pins.json";
/// Maximum number of pinned ports of one node, so that the file has a bound. A node has far fewer upstreams.
const MAX_PINS_PER_NODE: usize = 256;

/// The key by which an upstream is identified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// SHA-256 of the public key (`SubjectPublicKeyInfo`) in its certificate.
    pub key: Fingerprint,
    /// Time when the key was first seen, in Unix seconds.
    pub since: u64,
}

/// All pins, by node and port.
pub type PinTable = BTreeMap<NodeName, BTreeMap<u16, Pin>>;

/// A pin as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PinEntry {
    #[serde(flatten)]
    pin: Pin,
    /// Fields of later versions.
    #[serde(flatten)]
    other: OtherFields,
}

/// Content of the file.
pub(super) type StoredPins = BTreeMap<NodeName, BTreeMap<u16, PinEntry>>;

fn pins_of(ports: BTreeMap<u16, PinEntry>) -> BTreeMap<u16, Pin> {
    let ports = ports.into_iter();
    ports.map(|(port, entry)| (port, entry.pin)).collect()
}

fn table_of(stored: StoredPins) -> PinTable {
    let nodes = stored.into_iter();
    nodes.map(|(node, ports)| (node, pins_of(ports))).collect()
}

/// Pinned keys of one data directory.
#[derive(Debug, Clone)]
pub struct Pins {
    dir: Dir,
}

impl Store {
    /// Returns the pinned keys of upstreams.
    pub fn pins(&self) -> Pins {
        Pins {
            dir: self.dir.clone(),
        }
    }
}

impl Pins {
    /// Returns all pins.
    pub fn all(&self) -> Result<PinTable, StoreError> {
        Ok(table_of(self.read()?))
    }

    fn read(&self) -> Result<StoredPins, StoreError> {
        Ok(self.dir.read_json(PINS_FILE)?.unwrap_or_default())
    }

    /// Fails if the file of pins is missing. Code that has read the file before must not take a missing file for an empty one.
    pub fn require(&self) -> Result<(), StoreError> {
        self.dir.require(PINS_FILE)
    }

    /// Records each pin unless its upstream has a pin already or its node has too many. Returns the recorded pins of all nodes.
    pub fn record_new(&self, observed: &[(NodeName, u16, Pin)]) -> Result<PinTable, StoreError> {
        self.change(|pins| {
            for (node, port, pin) in observed {
                let node_pins = pins.entry(node.clone()).or_default();
                if node_pins.len() < MAX_PINS_PER_NODE {
                    node_pins.entry(*port).or_insert_with(|| PinEntry {
                        pin: *pin,
                        other: OtherFields::new(),
                    });
                }
            }
        })
    }

    /// Removes the pins of a node, or of one port of it. Returns the removed pins.
    pub fn remove(
        &self,
        node: &NodeName,
        port: Option<u16>,
    ) -> Result<BTreeMap<u16, Pin>, StoreError> {
        let mut removed = BTreeMap::new();
        self.change(|pins| match port {
            None => removed = pins_of(pins.remove(node).unwrap_or_default()),
            Some(port) => {
                let found = pins.get_mut(node).and_then(|pins| pins.remove(&port));
                removed.extend(found.map(|entry| (port, entry.pin)));
            }
        })?;
        Ok(removed)
    }

    /// Removes the nodes for which `keep` returns `false`. Returns the recorded pins.
    pub fn retain(&self, keep: impl Fn(&NodeName) -> bool) -> Result<PinTable, StoreError> {
        self.change(|pins| pins.retain(|node, _| keep(node)))
    }

    /// Changes the pins under the lock, and returns the recorded ones. An error leaves the file unchanged.
    fn change(&self, change: impl FnOnce(&mut StoredPins)) -> Result<PinTable, StoreError> {
        let _lock = self.dir.lock()?;
        let previous = self.read()?;
        let mut pins = previous.clone();
        change(&mut pins);
        pins.retain(|_, ports| !ports.is_empty());
        if pins != previous {
            self.dir.write_json(PINS_FILE, &pins)?;
        }
        Ok(table_of(pins))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::OpenMode;

    fn name(text: &str) -> NodeName {
        NodeName::parse(text).unwrap()
    }

    fn pin(key: &str) -> Pin {
        Pin {
            key: Fingerprint::digest(key.as_bytes()),
            since: 7,
        }
    }

    fn store() -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        (folder, store)
    }

    #[test]
    fn the_first_key_stays_until_forgotten_by_port_or_node() {
        let (_folder, store) = store();
        let (pins, node) = (store.pins(), name("edge-1"));
        let met = |port, key| (node.clone(), port, pin(key));
        let noted = pins
            .record_new(&[met(1, "a"), met(1, "b"), met(2, "c")])
            .unwrap();
        let expected = BTreeMap::from([(1, pin("a")), (2, pin("c"))]);
        assert_eq!(noted[&node], expected);
        let later = pins.record_new(&[met(1, "b")]).unwrap();
        assert_eq!((&later, pins.all().unwrap()), (&noted, noted.clone()));
        assert_eq!(pins.remove(&node, Some(1)).unwrap(), [(1, pin("a"))].into());
        assert!(pins.remove(&node, Some(1)).unwrap().is_empty());
        assert_eq!(
            pins.record_new(&[met(1, "b")]).unwrap()[&node][&1],
            pin("b")
        );
        assert_eq!(pins.remove(&node, None).unwrap().len(), 2);
        assert!(pins.all().unwrap().is_empty());
    }

    #[test]
    fn a_node_has_so_many_pins_and_no_more_and_another_has_its_own() {
        let (_folder, store) = store();
        let (pins, node) = (store.pins(), name("edge-1"));
        let most = u16::try_from(MAX_PINS_PER_NODE).unwrap();
        let met: Vec<_> = (1..=most + 1)
            .map(|port| (node.clone(), port, pin("a")))
            .collect();
        let noted = pins.record_new(&met).unwrap();
        assert_eq!(noted[&node].len(), MAX_PINS_PER_NODE);
        assert!(!noted[&node].contains_key(&(most + 1)));
        let other = name("edge-2");
        assert!(pins.record_new(&[(other.clone(), 1, pin("b"))]).unwrap()[&other].contains_key(&1));
        let kept = pins.retain(|known| *known == other).unwrap();
        assert_eq!(kept.keys().collect::<Vec<_>>(), [&other]);
    }

    #[test]
    fn unchanged_pins_are_not_written_and_damaged_ones_are_named() {
        let (folder, store) = store();
        store.pins().retain(|_| true).unwrap();
        let file = folder.path().join(PINS_FILE);
        assert!(!file.exists());
        std::fs::write(&file, "{\"edge-1\": {\"10250\": 1}}").unwrap();
        let message = store.pins().all().unwrap_err().to_string();
        assert!(message.contains("pins.json is damaged"), "{message}");
        let met = [(name("edge-1"), 1, pin("a"))];
        store.pins().record_new(&met).unwrap_err();
    }
}
