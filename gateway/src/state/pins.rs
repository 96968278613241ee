//! Pinned keys of upstreams that are trusted from their first use on.
//!
//! 1. A request reads the pinned key of a node's port, without waiting.
//! 2. A request that meets an upstream for the first time has its key pinned and waits for that. The key that is then pinned
//!    counts: if two requests met different keys at once, one of them gets the other's.
//!
//! This module never writes the disk. A key is in this table only when it is on the disk, so that no key is trusted that a
//! restart forgets.

use arc_swap::ArcSwap;
use causeway_certs::{Fingerprint, NodeName, Pin, PinTable};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

/// Maximum number of first keys that wait to be pinned; further requests wait too.
const MAX_PENDING_PINS: usize = 1_024;

/// Read access to the pins: a cheap clone that waits only when an upstream is met for the first time.
#[derive(Clone, Debug)]
pub struct Pins {
    table: Arc<ArcSwap<PinTable>>,
    new_pins: mpsc::Sender<NewPin>,
}

/// Key of an upstream that is met for the first time.
#[derive(Debug)]
pub struct NewPin {
    /// Node of the upstream.
    pub node: NodeName,
    /// Port of the upstream on the node.
    pub port: u16,
    /// The key that it has proven to hold.
    pub key: Fingerprint,
    /// Sender for the request that waits: the key that is then pinned, or the reason why none is.
    pub responder: oneshot::Sender<Result<Pin, String>>,
}

/// Write access to the pins. Clones write the same table.
#[derive(Clone, Debug)]
pub struct PinsWriter {
    table: Arc<ArcSwap<PinTable>>,
    /// Locked while a new table is built, including the write to the disk.
    write_lock: Arc<Mutex<()>>,
}

/// Returns a table of the keys that are already pinned, and the receiver of those to be pinned. No key is pinned until the
/// receiver is read.
pub fn pins(stored: PinTable) -> (Pins, PinsWriter, mpsc::Receiver<NewPin>) {
    let table = Arc::new(ArcSwap::from_pointee(stored));
    let (new_pins, meetings) = mpsc::channel(MAX_PENDING_PINS);
    let writer = PinsWriter {
        table: table.clone(),
        write_lock: Arc::default(),
    };
    (Pins { table, new_pins }, writer, meetings)
}

impl Pins {
    /// Returns the pinned key of this port.
    pub fn get(&self, node: &NodeName, port: u16) -> Option<Pin> {
        self.table.load().get(node)?.get(&port).copied()
    }

    /// Has this key pinned, unless another one is. Returns the key that is then pinned.
    ///
    /// # Errors
    /// The reason why none is pinned; after `wait_limit` at the latest.
    pub async fn pin_first_use(
        &self,
        (node, port): (&NodeName, u16),
        key: Fingerprint,
        wait_limit: Duration,
    ) -> Result<Pin, String> {
        let (responder, response) = oneshot::channel();
        let new_pin = NewPin {
            node: node.clone(),
            port,
            key,
            responder,
        };
        let pinning = async {
            // A writer that has ended receives no further requests.
            self.new_pins.send(new_pin).await.ok()?;
            response.await.ok()
        };
        let timeout_message =
            || format!("the data directory did not store the key within {wait_limit:?}");
        let result = timeout(wait_limit, pinning)
            .await
            .map_err(|_| timeout_message())?;
        result.unwrap_or_else(|| Err("the gateway is shutting down".to_owned()))
    }
}

impl PinsWriter {
    /// Whether no key is known.
    pub fn is_empty(&self) -> bool {
        self.table.load().is_empty()
    }

    /// Replaces all pins by those that `write_pins` has put on the disk. The table is locked meanwhile.
    ///
    /// # Errors
    /// The error of `write_pins`; then the table is unchanged.
    pub fn replace<E>(&self, write_pins: impl FnOnce() -> Result<PinTable, E>) -> Result<(), E> {
        let _making = self
            .write_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.table.store(Arc::new(write_pins()?));
        Ok(())
    }

    /// Returns the pinned key of this port.
    pub fn get(&self, node: &NodeName, port: u16) -> Option<Pin> {
        self.table.load().get(node)?.get(&port).copied()
    }
}
