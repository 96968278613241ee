//! Revocation of gateways' certificates at a running gateway.
//!
//! The list is in the data directory, and in the state that gateways share. From it this gateway refuses other gateways, replaces
//! its own certificate if that one is revoked, and signs the CRLs that edges receive. An edge then refuses such a gateway.

use super::broadcast::announce;
use crate::state::{Registry, registry::NewTunnel};
use arc_swap::ArcSwapOption;
use causeway_certs::{Fingerprint, LiveCa, RevokedGateways, RevokedSerials, Store, StoreError};
use causeway_tunnel::control_stream::GatewayMessage;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{sync::watch, time::sleep};

/// Interval of checks whether the certificate of another gateway was revoked.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Number of the connected nodes that know the revocations of gateways' certificates.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct RevocationStatus {
    /// Number of revoked certificates.
    revoked: usize,
    /// Number of nodes that are connected to this gateway.
    connected: usize,
    /// Number of these nodes that have confirmed all revocations. Edges of earlier versions do not confirm them.
    informed: usize,
}

/// Revocations of gateways' certificates. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GatewayRevocation(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    ca: LiveCa,
    /// Whether an external CA issues the certificates of gateways, which then revokes them itself.
    is_external: bool,
    /// List and roots with which the CRLs were signed.
    signed: Mutex<(RevokedGateways, Vec<Fingerprint>)>,
    revoked: RevokedSerials,
    /// CRLs as PEM, unless nothing is revoked.
    crls: ArcSwapOption<String>,
    changes: watch::Sender<()>,
}

impl GatewayRevocation {
    /// Loads the revocations of the data directory. Has none, now or later, if `is_external`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn load(store: &Store, ca: &LiveCa, is_external: bool) -> Result<Self, StoreError> {
        let revocation = Self(Arc::new(Inner {
            store: store.clone(),
            ca: ca.clone(),
            is_external,
            signed: Mutex::default(),
            revoked: RevokedSerials::default(),
            crls: ArcSwapOption::default(),
            changes: watch::Sender::new(()),
        }));
        revocation.reload()?;
        Ok(revocation)
    }

    /// Returns the revoked serial numbers, now and in the future.
    pub fn revoked(&self) -> RevokedSerials {
        self.0.revoked.clone()
    }

    /// Returns a receiver that is notified of changes of the list.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.0.changes.subscribe()
    }

    /// Loads the revocations of the data directory, and signs the CRLs with the present CA. Returns whether the list or the CA has
    /// changed. Blocks on the disk.
    ///
    /// # Errors
    /// If the file cannot be read. Nothing has changed then.
    fn reload(&self) -> Result<bool, StoreError> {
        let inner = &self.0;
        if inner.is_external {
            return Ok(false);
        }
        let mut signed = inner.signed.lock().unwrap_or_else(PoisonError::into_inner);
        let (next, ca) = (inner.store.revoked_gateways()?, inner.ca.get());
        let next_signed = (next, ca.fingerprints());
        if *signed == next_signed {
            return Ok(false);
        }
        let (list, next) = (&signed.0, &next_signed.0);
        let is_new = |serial: &str| list.iter().all(|(known, _)| known != serial);
        for (serial, revoked) in next.iter().filter(|(serial, _)| is_new(serial)) {
            let reason = &revoked.reason;
            tracing::warn!(serial, ?reason, "the certificate of a gateway is revoked");
        }
        let crls = ca.sign_crls(next);
        let crls = crls.unwrap_or_else(|error| {
            tracing::error!(%error, "the CRLs of gateways cannot be signed: edges do not learn of revocations");
            None
        });
        inner.revoked.replace(next.serials().collect());
        inner.crls.store(crls.map(Arc::new));
        *signed = next_signed;
        inner.changes.send_replace(());
        Ok(true)
    }

    /// Loads the revocations and signs the CRLs, and sends the CRLs to the connected edges. Blocks on the disk.
    ///
    /// # Errors
    /// If the file cannot be read. Nothing has changed then.
    pub fn reload_and_announce(&self, registry: &Registry) -> Result<(), StoreError> {
        if self.reload()? {
            announce(registry, |edge| self.message(&edge.tunnel));
        }
        Ok(())
    }

    /// Returns how many of the connected nodes have the present list.
    pub(crate) fn status(&self, registry: &Registry) -> RevocationStatus {
        let signed = self.0.signed.lock().unwrap_or_else(PoisonError::into_inner);
        let revoked = signed.0.iter().count();
        drop(signed);
        let digest = self.0.crls.load_full();
        let digest = digest.map(|pem| Fingerprint::digest(pem.as_bytes()));
        let (mut connected, mut informed) = (BTreeSet::new(), BTreeSet::new());
        for (node, edge) in registry.all() {
            if digest.is_none() || edge.tunnel.crls.load().as_deref() == digest.as_ref() {
                informed.insert(node.clone());
            }
            connected.insert(node);
        }
        RevocationStatus {
            revoked,
            connected: connected.len(),
            informed: informed.len(),
        }
    }

    /// Returns the CRLs for an edge, if there are any and the edge supports the message.
    pub(crate) fn message(&self, tunnel: &NewTunnel) -> Option<GatewayMessage> {
        let accepts_crls = tunnel.hello.crls && tunnel.certificate.external_chain.is_none();
        let pem = self.0.crls.load_full().filter(|_| accepts_crls)?;
        Some(GatewayMessage::Crls {
            pem: pem.as_ref().clone(),
        })
    }
}

/// Waits until the certificate with this serial number is revoked.
pub(crate) async fn wait_revoked(revoked: &RevokedSerials, serial: &str) {
    while !revoked.contains(serial) {
        sleep(CHECK_INTERVAL).await;
    }
}
