//! Revocation of gateways' certificates at a running gateway.
//!
//! The list is in the data directory, and in the state that gateways share. From it this gateway refuses other gateways, replaces
//! its own certificate if that one is revoked, and signs the CRLs that edges receive. An edge then refuses such a gateway.

use super::broadcast::announce;
use crate::state::{Registry, registry::NewTunnel};
use arc_swap::ArcSwapOption;
use causeway_certs::{
    Fingerprint, LiveCa, NodeName, RevokedGateways, RevokedSerials, Store, StoreError,
};
use causeway_tunnel::control_stream::GatewayMessage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
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
    /// Number of nodes that are connected to this gateway, or to another one that this gateway is connected to.
    connected: usize,
    /// Number of these nodes that have confirmed all revocations. Edges of earlier versions do not confirm them.
    informed: usize,
    /// Other gateways whose confirmations are not counted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    uncounted: Vec<UncountedGateway>,
}

/// Gateway whose confirmations are not counted.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct UncountedGateway {
    /// Address at which this gateway reaches it, `host:port`.
    address: String,
    /// Reason why its confirmations are not counted.
    error: String,
}

/// Nodes of a gateway that do not know its revocations of gateways' certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RevocationProgress {
    /// Digest of the revoked serial numbers.
    #[serde(default)]
    list: Option<Fingerprint>,
    /// Connected nodes that have not confirmed all revocations.
    #[serde(default)]
    uninformed: BTreeSet<NodeName>,
}

impl RevocationProgress {
    /// Splits the progress into parts with at most this number of nodes each.
    pub(super) fn into_parts(self, max_nodes: usize) -> Vec<Self> {
        let nodes: Vec<_> = self.uninformed.into_iter().collect();
        let with_nodes = nodes.chunks(max_nodes).map(|chunk| Self {
            list: None,
            uninformed: chunk.iter().cloned().collect(),
        });
        let with_list = Self {
            list: self.list,
            uninformed: BTreeSet::new(),
        };
        with_nodes.chain([with_list]).collect()
    }

    /// Adds a part.
    pub(super) fn merge(&mut self, mut part: Self) {
        self.list = self.list.or(part.list);
        self.uninformed.append(&mut part.uninformed);
    }
}

/// Progress of the revocations at another gateway.
#[derive(Debug)]
pub(crate) struct PeerRevocations {
    /// Address at which this gateway reaches it.
    pub(super) address: String,
    /// Nodes that it held before it was asked.
    pub(super) nodes: Vec<NodeName>,
    /// Its answer, or the reason why there is none.
    pub(super) progress: Result<RevocationProgress, String>,
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

    /// Returns how many of the connected nodes have the present list, at this gateway and at the others.
    pub(crate) fn status(
        &self,
        registry: &Registry,
        others: Vec<PeerRevocations>,
    ) -> RevocationStatus {
        let (own, mut connected) = self.own_progress(registry);
        let mut informed: BTreeSet<_> = connected.difference(&own.uninformed).cloned().collect();
        let mut uncounted = Vec::new();
        for other in others {
            let is_same = |progress: &RevocationProgress| progress.list == own.list;
            let different = || "it does not have the same revocations".to_owned();
            let progress = other.progress.and_then(|progress| {
                let same = is_same(&progress).then_some(progress);
                same.ok_or_else(different)
            });
            let nodes: BTreeSet<_> = other.nodes.into_iter().collect();
            match progress {
                Ok(progress) => informed.extend(nodes.difference(&progress.uninformed).cloned()),
                Err(error) => uncounted.push(UncountedGateway {
                    address: other.address,
                    error,
                }),
            }
            connected.extend(nodes);
        }
        RevocationStatus {
            revoked: self.count(),
            connected: connected.len(),
            informed: informed.len(),
            uncounted,
        }
    }

    /// Returns the nodes at this gateway that do not know the present list.
    pub(crate) fn progress(&self, registry: &Registry) -> RevocationProgress {
        self.own_progress(registry).0
    }

    /// Returns the number of revocations.
    pub(crate) fn count(&self) -> usize {
        let loaded = self.0.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.list.iter().count()
    }

    /// Returns the progress at this gateway, and all connected nodes.
    fn own_progress(&self, registry: &Registry) -> (RevocationProgress, BTreeSet<NodeName>) {
        let loaded = self.0.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let (serials, is_signed): (Vec<_>, _) = (loaded.list.serials().collect(), loaded.is_signed);
        let crls = self.0.crls.load_full().filter(|_| is_signed);
        drop(loaded);
        let digest = crls.map(|pem| Fingerprint::digest(pem.as_bytes()));
        let (mut connected, mut informed) = (BTreeSet::new(), BTreeSet::new());
        for (node, edge) in registry.all() {
            let confirmed = edge.tunnel.crls.load();
            if serials.is_empty() || digest.is_some() && confirmed.as_deref() == digest.as_ref() {
                informed.insert(node.clone());
            }
            connected.insert(node);
        }
        let progress = RevocationProgress {
            list: Some(Fingerprint::digest(serials.join("\n").as_bytes())),
            uninformed: connected.difference(&informed).cloned().collect(),
        };
        (progress, connected)
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
