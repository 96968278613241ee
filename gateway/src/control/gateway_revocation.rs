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
    loaded: Mutex<LoadedList>,
    revoked: RevokedSerials,
    /// CRLs as PEM, unless nothing is revoked. If the list that is loaded cannot be signed, these are the CRLs before it.
    crls: ArcSwapOption<String>,
    changes: watch::Sender<()>,
}

/// List of revocations as it was last loaded.
#[derive(Debug, Default)]
struct LoadedList {
    list: RevokedGateways,
    /// Roots of the CA that signs the CRLs.
    roots: Vec<Fingerprint>,
    /// Whether the CRLs have this list, and are signed below these roots.
    is_signed: bool,
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
            loaded: Mutex::default(),
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

    /// Loads the revocations of the data directory, and signs the CRLs with the present CA. Returns whether the CRLs have changed.
    /// A list that cannot be signed is in force at this gateway, and the next call tries to sign it again. Blocks on the disk.
    ///
    /// # Errors
    /// If the file cannot be read. Nothing has changed then.
    fn reload(&self) -> Result<bool, StoreError> {
        let inner = &self.0;
        if inner.is_external {
            return Ok(false);
        }
        let mut loaded = inner.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let (list, ca) = (inner.store.revoked_gateways()?, inner.ca.get());
        let roots = ca.fingerprints();
        let is_same = loaded.list == list && loaded.roots == roots;
        if is_same && loaded.is_signed {
            return Ok(false);
        }
        let is_new = |serial: &str| loaded.list.iter().all(|(known, _)| known != serial);
        for (serial, revoked) in list.iter().filter(|(serial, _)| is_new(serial)) {
            let reason = &revoked.reason;
            tracing::warn!(serial, ?reason, "the certificate of a gateway is revoked");
        }
        inner.revoked.replace(list.serials().collect());
        let signed = ca.sign_crls(&list);
        let is_signed = signed.is_ok();
        match signed {
            Ok(crls) => inner.crls.store(crls.map(Arc::new)),
            Err(error) if !is_same => {
                tracing::error!(%error, "the CRLs of gateways cannot be signed: edges do not learn of revocations");
            }
            Err(_) => {}
        }
        *loaded = LoadedList {
            list,
            roots,
            is_signed,
        };
        inner.changes.send_replace(());
        Ok(is_signed)
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
        let loaded = self.0.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let (revoked, is_signed) = (loaded.list.iter().count(), loaded.is_signed);
        let crls = self.0.crls.load_full().filter(|_| is_signed);
        drop(loaded);
        let digest = crls.map(|pem| Fingerprint::digest(pem.as_bytes()));
        let (mut connected, mut informed) = (BTreeSet::new(), BTreeSet::new());
        for (node, edge) in registry.all() {
            let confirmed = edge.tunnel.crls.load();
            if revoked == 0 || digest.is_some() && confirmed.as_deref() == digest.as_ref() {
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
