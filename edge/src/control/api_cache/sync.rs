//! Synchronisation with the selected source: fills each store from the source, and requests the version of the cloud's API.
//!
//! When another source is selected, the store continues there from its own version. When its source ends, the store reports
//! that. It retries after a pause, as long as no other source is selected.

use super::selected_source::{SelectedSource, SourceLost};
use causeway_rt::backoff::Backoff;
use causeway_watch_cache::{ListWatch, ReflectorError, Store, WatchCache, reflect};
use futures_util::StreamExt;
use serde::de::IgnoredAny;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep},
};
use tracing::debug;

/// Time after which a source counts as stable. The back-off restarts when such a source ends.
const MIN_GOOD_DURATION: Duration = Duration::from_secs(10);
/// Maximum size of an API's version document, in bytes.
const MAX_VERSION_BYTES: usize = 64 * 1024;

/// Fills the store for as long as it is polled.
pub(super) async fn sync_store(
    store: Arc<Store>,
    mut selected: watch::Receiver<Arc<SelectedSource>>,
    lost_tx: mpsc::Sender<SourceLost>,
    initial_backoff: Backoff,
) {
    let mut backoff = initial_backoff;
    let mut last_source: Option<(Arc<dyn ListWatch>, Instant)> = None;
    loop {
        let current = selected.borrow_and_update().clone();
        let Some(source) = &current.source else {
            // The previous source may have been silent before it was given up.
            let silent_for = last_source
                .take()
                .map(|(previous, began)| previous.time_since_contact().min(began.elapsed()));
            store.mark_lost(silent_for.unwrap_or_default());
            if selected.changed().await.is_err() {
                return;
            }
            continue;
        };
        let started = Instant::now();
        last_source = Some((source.clone(), started));
        let why = tokio::select! {
            why = reflect(&store, &**source) => why,
            changed = selected.changed() => match changed {
                Ok(()) => {
                    backoff.reset();
                    continue;
                }
                Err(_) => return,
            },
        };
        let duration = started.elapsed();
        debug!(resource = %store.resource(), ?why, "API cache source closed or failed");
        if duration > MIN_GOOD_DURATION {
            backoff.reset();
        }
        let delay = retry_delay(&why, &mut backoff);
        let generation = current.generation;
        if lost_tx
            .send(SourceLost {
                generation,
                error: why,
                duration,
            })
            .await
            .is_err()
        {
            return;
        }
        tokio::select! {
            () = sleep(delay) => {}
            changed = selected.changed() => match changed {
                Ok(()) => {
                    selected.mark_changed();
                    backoff.reset();
                }
                Err(_) => return,
            },
        }
    }
}

/// Returns how long the store waits before it reads again at a source that ended with this error.
fn retry_delay(error: &ReflectorError, backoff: &mut Backoff) -> Duration {
    let random = rand::random();
    match error {
        ReflectorError::Broken(_) => backoff.silent(random),
        // Jitter for clients that received the same delay from the source.
        ReflectorError::Refused(_, _, Some(retry_after)) => retry_after.mul_f64(1.0 + random / 2.0),
        ReflectorError::Refused(..) => backoff.refused(None, random),
        // A member without a source may find one soon.
        ReflectorError::Stale(..) => backoff.refused(None, random).min(MIN_GOOD_DURATION),
    }
}

/// Requests the version of the cloud's API from the selected source, for as long as it is polled.
pub(super) async fn poll_version(
    cache: Arc<WatchCache>,
    mut selected: watch::Receiver<Arc<SelectedSource>>,
) {
    loop {
        let source = selected.borrow_and_update().source.clone();
        tokio::select! {
            version = query_version(source.as_deref()) => {
                cache.set_version_info(version.into());
                if selected.changed().await.is_err() {
                    return;
                }
            }
            changed = selected.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

/// Requests the version until the source returns one.
async fn query_version(source: Option<&dyn ListWatch>) -> Vec<u8> {
    let Some(source) = source else {
        return std::future::pending().await;
    };
    loop {
        if let Ok(response) = source.get("/version".to_owned()).await
            && response.status.is_success()
        {
            let mut body = response.body;
            let mut text = Vec::new();
            while let Some(Ok(bytes)) = body.next().await
                && text.len() <= MAX_VERSION_BYTES
            {
                text.extend_from_slice(&bytes);
            }
            if serde_json::from_slice::<IgnoredAny>(&text).is_ok() {
                return text;
            }
        }
        sleep(MIN_GOOD_DURATION).await;
    }
}
