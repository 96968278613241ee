//! Addresses of gateways: the configured ones, and those that a gateway announced.
//!
//! The announced addresses are saved in the data directory, so that an edge whose configured gateway is gone still finds the
//! others after a restart. The newest list replaces the older; the one that stood last is tried first.

use super::identity_store::IdentityStore;
use crate::status::StatusWriter;
use causeway_config::host_port;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use tracing::{info, warn};

/// More addresses than this are no gateways but a mistake.
const MOST: usize = 64;

/// The addresses at which gateways are looked for.
#[derive(Debug)]
pub(crate) struct GatewayList {
    configured: Vec<String>,
    told: Mutex<Vec<String>>,
    held: IdentityStore,
    last: Mutex<Option<String>>,
    state: Arc<StatusWriter>,
    changed: watch::Sender<()>,
}

impl GatewayList {
    pub(crate) fn new(
        configured: Vec<String>,
        held: IdentityStore,
        state: Arc<StatusWriter>,
    ) -> Self {
        let gateways = Self {
            configured,
            told: Mutex::new(held.identity().gateways),
            held,
            last: Mutex::default(),
            state,
            changed: watch::Sender::default(),
        };
        gateways.state.gateways(gateways.all());
        gateways
    }

    /// All of them, each once; the one that stood last comes first.
    pub(crate) fn all(&self) -> Vec<String> {
        let last = locked(&self.last).clone();
        let told = locked(&self.told).clone();
        let mut all: Vec<String> = Vec::new();
        for gateway in last
            .into_iter()
            .chain(self.configured.iter().cloned())
            .chain(told)
        {
            if !all.contains(&gateway) {
                all.push(gateway);
            }
        }
        all
    }

    /// Changes whenever there are others.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// This one stands.
    pub(crate) fn stood(&self, gateway: &str) {
        *locked(&self.last) = Some(gateway.to_owned());
    }

    /// Takes the addresses of gateways that a gateway announced.
    pub(crate) async fn learn(&self, told: Vec<String>) {
        let mut sound: Vec<String> = told
            .into_iter()
            .filter(|each| host_port(each).is_ok())
            .take(MOST)
            .collect();
        sound.dedup();
        {
            let mut told = locked(&self.told);
            if *told == sound || sound.is_empty() {
                return;
            }
            told.clone_from(&sound);
        }
        info!(gateways = ?sound, "the gateway announced its addresses");
        self.changed.send_replace(());
        let kept = self.held.change(|identity| identity.gateways = sound).await;
        if let Err(error) = kept {
            warn!(%error, "cannot save the gateway's addresses; they are lost at the next restart");
        }
        // The status shows them once they are on the disk.
        self.state.gateways(self.all());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
