//! State of a running gateway that depends on the CA, and the replacement of the CA.
//!
//! 1. The reload reads the CA of the data directory, and ends if the CA has not changed.
//! 2. It builds everything that presents or trusts a certificate: the tunnel port, its leaf, the listeners.
//! 3. It installs the result, which cannot fail: new handshakes use the new CA, and open connections continue.
//! 4. It notifies the edges. If a root was removed, edges whose certificates depend on it are disconnected. Clients whose
//!    certificates depend on it cannot begin a new request (`proxy.rs`).

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

/// State that a change of the CA updates.
#[derive(Debug)]
pub(super) struct CaReload {
    pub(super) store: Store,
    pub(super) ca: LiveCa,
    pub(super) tls: LiveTls,
    pub(super) identity: TunnelIdentity,
    pub(super) listeners: Arc<Listeners>,
    pub(super) registry: Registry,
    pub(super) node_sync: NodeSync,
    pub(super) record_writer: NodeRecordWriter,
    /// Roots that edges have to trust, as PEM.
    pub(super) roots: watch::Sender<String>,
    /// Serializes changes.
    pub(super) change_lock: Mutex<()>,
}

impl CaReload {
    /// Loads the CA of the data directory, and returns whether it has changed. Blocks on the disk.
    ///
    /// # Errors
    /// If the CA cannot be read or used. The state is then unchanged.
    pub(super) fn reload_ca(&self) -> Result<bool, BindError> {
        let _changing = self
            .change_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(next) = self.store.ca()? else {
            if !self.ca.get().is_trusted() {
                return Ok(false);
            }
            return Err(BindError::NoCa(self.store.root_path()));
        };
        if next.version() == self.ca.get().version() {
            return Ok(false);
        }
        let same_domain = next.trust_domain() == self.ca.get().trust_domain();
        if !same_domain && !self.ca.get().is_trusted() {
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
        let tunnel_update = self.identity.prepare_ca(&next)?;
        let listeners = self.listeners.prepare_ca(&next)?;
        let next_roots = next.fingerprints();
        let current_roots = self.ca.get().fingerprints();
        let gone = !current_roots.iter().all(|root| next_roots.contains(root));
        let before = self.ca.get();
        self.roots.send_replace(next.bundle_pem());
        self.ca.swap(next);
        if let Some((tls, leaf)) = tunnel_update {
            self.tls.store(Arc::new(tls));
            self.identity.replace_certificate(leaf);
        }
        listeners.apply();
        log_change(&before, &self.ca.get());
        ca_rotation::announce_rotation(&self.ca.get(), &self.registry);
        // Each root has its own issuer of gateways, which signs its own CRL.
        let revocation = &self.node_sync.gateway_revocation;
        if let Err(error) = revocation.reload_and_announce(&self.registry) {
            tracing::error!(%error, "the revocations of gateways could not be loaded");
        }
        if gone {
            self.node_sync.spawn_refresh();
        }
        Ok(true)
    }

    /// Reloads the nodes of the data directory.
    pub(super) fn refresh_nodes(&self) {
        self.node_sync.spawn_refresh();
    }

    /// Installs the new TLS of the tunnel port, and disconnects edges that it does not trust.
    pub(super) fn install_tls(&self, tls: Tls) {
        self.tls.store(Arc::new(tls));
        self.node_sync.spawn_refresh();
    }
}

/// Logs the change: the roots, the imported chain of listeners, or both.
fn log_change(previous: &Ca, current: &Ca) {
    let (signs, other) = (current.fingerprint(), current.other());
    if (signs, other) != (previous.fingerprint(), previous.other()) {
        tracing::info!(%signs, ?other, "another CA is in use");
    }
    let chain = current.listener_ca();
    if chain == previous.listener_ca() {
        return;
    }
    let Some(chain) = chain else {
        tracing::info!(
            "the imported chain is removed: listeners present certificates of Causeway's own CA"
        );
        return;
    };
    let ends = Duration::from_secs(chain.first_to_expire.not_after.as_secs());
    tracing::info!(
        chain = chain.intermediate.subject,
        root = chain.root.subject,
        root_sha256 = %chain.root.fingerprint,
        ends = %humantime::format_rfc3339_seconds(UNIX_EPOCH + ends),
        "listeners present certificates below an imported chain"
    );
}
