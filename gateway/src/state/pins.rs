//! The keys by which apps are known that are believed from their first use on.
//!
//! 1. A reader takes the key that is noted of a node's port, without waiting.
//! 2. One that meets an app for the first time has its key noted and waits for that. What is noted then is what counts:
//!    of two that met different keys at once, one is told the other's.
//!
//! Never writes the disk. A key is in this table only when it is there, so that none is believed that a restart forgets.

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

/// First meetings that wait to be noted, at most; whoever comes with more waits too.
const WAITING: usize = 1_024;

/// The reading side: a cheap clone that never waits but where an app is met for the first time.
#[derive(Clone, Debug)]
pub struct Pins {
    table: Arc<ArcSwap<PinTable>>,
    met: mpsc::Sender<NewPin>,
}

/// An app that is met for the first time.
#[derive(Debug)]
pub struct NewPin {
    /// Where.
    pub node: NodeName,
    /// At which port of it.
    pub port: u16,
    /// The key that it has proven to hold.
    pub key: Fingerprint,
    /// Who waits for what is noted of it then, or why that is nothing.
    pub tell: oneshot::Sender<Result<Pin, String>>,
}

/// The writing side. Clones write the same table.
#[derive(Clone, Debug)]
pub struct PinsWriter {
    table: Arc<ArcSwap<PinTable>>,
    /// Held while a new table is made, from the disk on.
    making: Arc<Mutex<()>>,
}

/// A table of what is noted already, and what is to be noted. Nobody notes anything before the last of these is read.
pub fn pins(noted: PinTable) -> (Pins, PinsWriter, mpsc::Receiver<NewPin>) {
    let table = Arc::new(ArcSwap::from_pointee(noted));
    let (met, meetings) = mpsc::channel(WAITING);
    let writer = PinsWriter {
        table: table.clone(),
        making: Arc::default(),
    };
    (Pins { table, met }, writer, meetings)
}

impl Pins {
    /// What is noted of this port.
    pub fn get(&self, node: &NodeName, port: u16) -> Option<Pin> {
        self.table.load().get(node)?.get(&port).copied()
    }

    /// Has this key noted, unless another one is. What is noted then.
    ///
    /// # Errors
    /// Why nothing is; after `bound` at the latest.
    pub async fn first(
        &self,
        (node, port): (&NodeName, u16),
        key: Fingerprint,
        bound: Duration,
    ) -> Result<Pin, String> {
        let (tell, told) = oneshot::channel();
        let met = NewPin {
            node: node.clone(),
            port,
            key,
            tell,
        };
        let noting = async {
            // Whoever ends is not asked any more.
            self.met.send(met).await.ok()?;
            told.await.ok()
        };
        let late = || format!("the data directory did not take it within {bound:?}");
        let noted = timeout(bound, noting).await.map_err(|_| late())?;
        noted.unwrap_or_else(|| Err("the gateway is ending".to_owned()))
    }
}

impl PinsWriter {
    /// Whether no key is known.
    pub fn is_empty(&self) -> bool {
        self.table.load().is_empty()
    }

    /// Replaces all by what `written` says is on the disk now; nobody else changes them meanwhile.
    ///
    /// # Errors
    /// As writing says; then all is as it was.
    pub fn replace<E>(&self, written: impl FnOnce() -> Result<PinTable, E>) -> Result<(), E> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        self.table.store(Arc::new(written()?));
        Ok(())
    }

    /// What is noted of this port.
    pub fn get(&self, node: &NodeName, port: u16) -> Option<Pin> {
        self.table.load().get(node)?.get(&port).copied()
    }
}
