//! State that depends on the CA in a running gateway, and the replacement of the CA.
//!
//! 1. Reads the CA of the data directory; does nothing if it has not changed.
//! 2. Builds everything that presents or trusts a certificate: the tunnel port, its leaf, the listeners.
//! 3. Installs it, which cannot fail: new handshakes use the new CA, open connections go on.
//! 4. Informs the edges. If a root is gone, edges whose certificates depend on it are disconnected, and clients whose
//!    certificates do cannot begin a new request (`proxy.rs`).

use super::{error::BindError, listeners::Listeners, tunnel_identity::TunnelIdentity};
use crate::{
    control::{
        ca_rotation,
        node_records::NodeRecordWriter,
        node_sync::NodeSync,
        tunnel_listener::{LiveTls, Tls},
    },
    state::Registry,
};
use causeway_certs::{Ca, LiveCa, Store};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, UNIX_EPOCH},
};
use tokio::sync::watch;

/// State that a change of the CA touches.
#[derive(Debug)]
pub(super) struct CaReload {
    pub(super) store: Store,
    pub(super) ca: LiveCa,
    pub(super) tls: LiveTls,
    pub(super) identity: TunnelIdentity,
    pub(super) listeners: Arc<Listeners>,
    pub(super) registry: Registry,
    pub(super) roll: NodeSync,
    pub(super) ledger: NodeRecordWriter,
    /// The roots that edges are to trust, as PEM.
    pub(super) roots: watch::Sender<String>,
    /// Serializes changes.
    pub(super) changing: Mutex<()>,
}

impl CaReload {
    /// Loads the CA of the data directory, and returns whether it has changed. Blocks on the disk.
    ///
    /// # Errors
    /// If the CA cannot be read or used; then nothing changes.
    pub(super) fn take_up(&self) -> Result<bool, BindError> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(next) = self.store.ca()? else {
            if !self.ca.get().is_believed() {
                return Ok(false);
            }
            return Err(BindError::NoCa(self.store.root_path()));
        };
        if next.state() == self.ca.get().state() {
            return Ok(false);
        }
        let same_domain = next.trust_domain() == self.ca.get().trust_domain();
        if !same_domain && !self.ca.get().is_believed() {
            let (found, here) = (next.trust_domain().clone(), self.ca.get());
            tracing::error!(
                %found,
                here = %here.trust_domain(),
                "the CA in the data directory has another trust domain than tunnel.identity and is ignored; remove ca.json before the next start, which would otherwise fail"
            );
            return Ok(false);
        }
        if !same_domain {
            let why = "the CA in the data directory has another trust domain; it takes effect at the next start";
            return Err(BindError::Name(why.to_owned()));
        }
        let port = self.identity.turn_to(&next)?;
        let listeners = self.listeners.turn_to(&next)?;
        let stays = next.fingerprints();
        let gone = self.ca.get().fingerprints();
        let gone = !gone.iter().all(|root| stays.contains(root));
        let before = self.ca.get();
        self.roots.send_replace(next.bundle_pem());
        self.ca.swap(next);
        if let Some((tls, leaf)) = port {
            self.tls.store(Arc::new(tls));
            self.identity.show(leaf);
        }
        listeners.apply();
        log_change(&before, &self.ca.get());
        ca_rotation::tell(&self.ca.get(), &self.registry);
        if gone {
            self.roll.look();
        }
        Ok(true)
    }

    /// Reloads the nodes of the data directory.
    pub(super) fn look(&self) {
        self.roll.look();
    }

    /// Installs the tunnel port's new TLS, and disconnects edges that it does not trust.
    pub(super) fn turn(&self, tls: Tls) {
        self.tls.store(Arc::new(tls));
        self.roll.look();
    }
}

/// Logs what has changed: the roots, the imported chain of listeners, or both.
fn log_change(before: &Ca, now: &Ca) {
    let (signs, other) = (now.fingerprint(), now.other());
    if (signs, other) != (before.fingerprint(), before.other()) {
        tracing::info!(%signs, ?other, "another CA is in use");
    }
    let chain = now.listener_ca();
    if chain == before.listener_ca() {
        return;
    }
    let Some(chain) = chain else {
        tracing::info!(
            "the imported chain is removed: listeners present certificates of Causeway's own CA"
        );
        return;
    };
    let ends = Duration::from_secs(chain.first_to_end.not_after.as_secs());
    tracing::info!(
        chain = chain.intermediate.subject,
        root = chain.root.subject,
        root_sha256 = %chain.root.fingerprint,
        ends = %humantime::format_rfc3339_seconds(UNIX_EPOCH + ends),
        "listeners present certificates below an imported chain"
    );
}
