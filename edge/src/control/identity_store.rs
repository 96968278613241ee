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

    /// Changes the identity, first on the disk and then in memory.
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
            let mut next = this.identity();
            change(&mut next);
            // For a certificate of an external CA only the gateways are stored here.
            let should_save = !next.is_external || next.gateways != this.identity().gateways;
            if should_save && !this.0.released.load(Relaxed) {
                this.0.store.save_edge(&next)?;
            }
            *locked(&this.0.current) = next;
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
            *locked(&this.0.current) = next;
            Ok(backup_path)
        });
        replace_task.await.map_err(io::Error::from)?
    }

    /// Returns once the CA that issued `gateway_chain` is not trusted any more. The caller then closes the tunnel and its
    /// streams at once. The trusted CAs change only together with a `reconnect`. Never returns if the identity is not of an
    /// external CA.
    pub(crate) async fn wait_until_untrusted(
        self,
        gateway_chain: Vec<CertificateDer<'static>>,
        mut reconnect: watch::Receiver<()>,
    ) {
        while self.identity().is_external {
            // The identity may have changed since the gateway was dialled.
            if !self.identity().trusts_gateway(&gateway_chain) {
                return;
            }
            if reconnect.changed().await.is_err() {
                break;
            }
        }
        std::future::pending::<()>().await;
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
