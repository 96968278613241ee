//! Identity of this edge, in memory and in the data directory. Both hold the same identity.
//!
//! `gateway_list` changes it when a gateway announces addresses. `renew` and `external_certificate` change it when there is a
//! new certificate. Changes are made one after the other, each to the newest identity. Each change is on the disk before it
//! becomes visible. A change that has begun is completed even if no task waits for it any more.

use causeway_certs::{EdgeIdentity, Store, StoreError};
use rustls_pki_types::CertificateDer;
use std::{
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};
use tokio::{sync::watch, task::spawn_blocking};
use tracing::warn;

/// Identity of this edge. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct IdentityStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    current: Mutex<EdgeIdentity>,
    /// Whether another process owns the data directory now, so that this process must not write to it.
    released: AtomicBool,
    /// Lock that is held during a write to the disk, by threads that may block.
    write_lock: Mutex<()>,
    /// Notifies of each change.
    changes: watch::Sender<()>,
}

/// Reason why a change is not stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityStoreError {
    /// The data directory cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The runtime is stopping.
    #[error(transparent)]
    Stopping(#[from] io::Error),
}

impl IdentityStore {
    pub(crate) fn new(identity: EdgeIdentity, store: Store) -> Self {
        Self(Arc::new(Inner {
            store,
            current: Mutex::new(identity),
            released: AtomicBool::new(false),
            write_lock: Mutex::default(),
            changes: watch::Sender::new(()),
        }))
    }

    /// Returns the current identity.
    pub(crate) fn identity(&self) -> EdgeIdentity {
        locked(&self.0.current).clone()
    }

    /// Releases the data directory to another process. Later changes stay in memory only.
    pub(crate) fn release(&self) {
        self.0.released.store(true, Relaxed);
    }

    /// Returns the store in the data directory.
    pub(crate) fn store(&self) -> &Store {
        &self.0.store
    }

    /// Changes the identity, first on the disk and then in memory. Revocations of gateways are in force even if they cannot be
    /// stored.
    ///
    /// # Errors
    /// If the identity could not be stored. Nothing has changed then.
    pub(crate) async fn update(
        &self,
        change: impl FnOnce(&mut EdgeIdentity) + Send + 'static,
    ) -> Result<(), IdentityStoreError> {
        let this = self.clone();
        let update_task = spawn_blocking(move || {
            let _changing = locked(&this.0.write_lock);
            let (previous, mut next) = (this.identity(), this.identity());
            change(&mut next);
            let is_released = this.0.released.load(Relaxed);
            // For a certificate of an external CA only the gateways are stored here.
            let should_save = !next.is_external || next.gateways != previous.gateways;
            if should_save && !is_released {
                this.0.store.save_edge(&next)?;
            }
            let revoked = &next.revoked_gateways;
            if *revoked != previous.revoked_gateways
                && !is_released
                && let Err(error) = this.0.store.save_gateway_revocations(revoked)
            {
                warn!(%error, "the revocations of gateways are in force until this edge restarts, because they cannot be stored");
            }
            this.set_current(next);
            Ok(())
        });
        update_task.await.map_err(io::Error::from)?
    }

    /// Replaces the identity by one that was obtained with the join token of this id or from the cluster, first on the disk
    /// and then in memory. Returns the path at which the old identity is saved.
    ///
    /// # Errors
    /// If the identity could not be stored. Nothing has changed then.
    pub(crate) async fn replace(
        &self,
        next: EdgeIdentity,
        token: Option<String>,
    ) -> Result<Option<PathBuf>, IdentityStoreError> {
        let this = self.clone();
        let replace_task = spawn_blocking(move || {
            let _changing = locked(&this.0.write_lock);
            if this.0.released.load(Relaxed) {
                return Ok(None);
            }
            let backup_path = this.0.store.replace_edge(&next, token.as_deref())?;
            let revoked_gateways = this.identity().revoked_gateways;
            this.set_current(EdgeIdentity {
                revoked_gateways,
                ..next
            });
            Ok(backup_path)
        });
        replace_task.await.map_err(io::Error::from)?
    }

    fn set_current(&self, next: EdgeIdentity) {
        *locked(&self.0.current) = next;
        self.0.changes.send_replace(());
    }

    /// Returns the reason once the gateway with this certificate chain is not trusted any more: its certificate is revoked, or the
    /// configured CAs are others. The caller then closes the tunnel and its streams at once. Tunnels that depend on a retired root
    /// of the own CA are replaced, and do not end here.
    pub(crate) async fn wait_until_untrusted(
        self,
        gateway_chain: Vec<CertificateDer<'static>>,
    ) -> String {
        let mut changes = self.0.changes.subscribe();
        loop {
            // The identity may have changed since the gateway was dialled.
            let identity = self.identity();
            if let Some(serial) = identity.revoked_serial(&gateway_chain) {
                return format!("the gateway's certificate with serial number {serial} is revoked");
            }
            if identity.is_external && !identity.trusts_gateway(&gateway_chain) {
                return "the gateway's CA is no longer trusted (identity.ca)".to_owned();
            }
            // The sender lives as long as this value.
            let _ = changes.changed().await;
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
