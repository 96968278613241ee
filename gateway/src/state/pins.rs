//! Pinned keys of upstreams that are trusted on first use.
//!
//! 1. A request reads the pinned key of a node's port, without waiting.
//! 2. The first request to an upstream requests that the key be pinned, and waits for it. The key that is then pinned is the
//!    valid one. If two requests receive different keys at once, only one of the keys is pinned.
//!
//! This module never writes the disk. A key is in this table only if it is on the disk, so that no trusted key is lost at a
//! restart.

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

/// Maximum number of first keys that wait to be pinned. Further requests wait for a free place.
const MAX_PENDING_PINS: usize = 1_024;

/// Read access to the pins. Cheap to clone. Waits only at the first use of an upstream.
#[derive(Clone, Debug)]
pub struct Pins {
    table: Arc<ArcSwap<PinTable>>,
    new_pins: mpsc::Sender<NewPin>,
}

/// Key of an upstream at its first use.
#[derive(Debug)]
pub struct NewPin {
    /// Node of the upstream.
    pub node: NodeName,
    /// Port of the upstream on the node.
    pub port: u16,
    /// Key that the upstream has proven to hold.
    pub key: Fingerprint,
    /// Sender for the waiting request: the key that was pinned, or the reason why none was.
    pub responder: oneshot::Sender<Result<Pin, String>>,
}

/// Write access to the pins. Clones share the same table.
#[derive(Clone, Debug)]
pub struct PinsWriter {
    table: Arc<ArcSwap<PinTable>>,
    /// Locked while a new table is built, including the write to the disk.
    write_lock: Arc<Mutex<()>>,
}

/// Returns a table of the keys that are already pinned, and the receiver of new keys. No new key is pinned while the receiver is
/// not read.
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

    /// Pins this key, unless another key is pinned. Returns the pinned key.
    ///
    /// # Errors
    /// The reason why no key was pinned, at the latest after `wait_limit`.
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
            // The send fails if the writer has ended.
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
    /// Whether no key is pinned.
    pub fn is_empty(&self) -> bool {
        self.table.load().is_empty()
    }

    /// Replaces all pins with those that `write_pins` has written to the disk. The table is locked during the call.
    ///
    /// # Errors
    /// The error of `write_pins`. The table is then unchanged.
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
