//! Waiting for changes of stores.

use futures_util::future::select_all;
use tokio::sync::watch;

/// Waits until one of these stores has changed, or has lost or found its source.
pub(super) async fn any_changed(changes: &mut [watch::Receiver<u64>]) {
    if changes.is_empty() {
        return std::future::pending().await;
    }
    // The store lives at least as long as this task.
    let _ = select_all(changes.iter_mut().map(|one| Box::pin(one.changed()))).await;
}
