//! Addresses of gateways: the configured ones, and those that a gateway announced.
//!
//! The announced addresses are saved in the data directory, so that an edge whose configured gateway is gone finds the other
//! gateways after a restart. A new list replaces the previous one. The gateway that was connected last is tried first.

use super::identity_store::IdentityStore;
use crate::status::StatusWriter;
use causeway_config::host_port;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use tracing::{info, warn};

/// Maximum number of announced addresses. A longer list can only be a mistake.
const MAX_GATEWAYS: usize = 64;

/// Addresses of the gateways that the edge dials.
#[derive(Debug)]
pub(crate) struct GatewayList {
    configured: Vec<String>,
    announced: Mutex<Vec<String>>,
    identity_store: IdentityStore,
    last_connected: Mutex<Option<String>>,
    status: Arc<StatusWriter>,
    changed: watch::Sender<()>,
}

impl GatewayList {
    pub(crate) fn new(
        configured: Vec<String>,
        identity_store: IdentityStore,
        status: Arc<StatusWriter>,
    ) -> Self {
        let gateways = Self {
            configured,
            announced: Mutex::new(identity_store.identity().gateways),
            identity_store,
            last_connected: Mutex::default(),
            status,
            changed: watch::Sender::default(),
        };
        gateways.status.set_gateways(gateways.all());
        gateways
    }

    /// Returns all addresses without duplicates. The gateway that was connected last comes first.
    pub(crate) fn all(&self) -> Vec<String> {
        let last_connected = locked(&self.last_connected).clone();
        let announced = locked(&self.announced).clone();
        let mut all: Vec<String> = Vec::new();
        for gateway in last_connected
            .into_iter()
            .chain(self.configured.iter().cloned())
            .chain(announced)
        {
            if !all.contains(&gateway) {
                all.push(gateway);
            }
        }
        all
    }

    /// Returns a receiver that is notified when the announced addresses change.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Records that a tunnel to this gateway is open.
    pub(crate) fn mark_connected(&self, gateway: &str) {
        *locked(&self.last_connected) = Some(gateway.to_owned());
    }

    /// Takes over the gateway addresses that a gateway announced.
    pub(crate) async fn update_announced(&self, announced: Vec<String>) {
        let mut valid: Vec<String> = announced
            .into_iter()
            .filter(|each| host_port(each).is_ok())
            .take(MAX_GATEWAYS)
            .collect();
        valid.dedup();
        {
            let mut current = locked(&self.announced);
            if *current == valid || valid.is_empty() {
                return;
            }
            current.clone_from(&valid);
        }
        info!(gateways = ?valid, "the gateway announced its addresses");
        self.changed.send_replace(());
        let saved = self
            .identity_store
            .update(|identity| identity.gateways = valid)
            .await;
        if let Err(error) = saved {
            warn!(%error, "cannot save the gateway's addresses; they are lost at the next restart");
        }
        // The status shows the addresses only after they are on the disk.
        self.status.set_gateways(self.all());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
