//! Synchronisation with the selected source: fills each store from it, and asks for the version of the cloud's API.
//!
//! When another source is selected, the store continues there from the version that it has. When its source ends, the store
//! reports that and tries again after a pause, as long as no other source is selected.

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

/// A source that was followed for this long was good: the next trouble begins anew.
const GOOD: Duration = Duration::from_secs(10);
/// Most that is read of what an API says its version is, in bytes.
const RELEASE: usize = 64 * 1024;

/// Keeps the store filled for as long as it is polled.
pub(super) async fn sync_store(
    store: Arc<Store>,
    mut at: watch::Receiver<Arc<SelectedSource>>,
    fallen: mpsc::Sender<SourceLost>,
    bounds: Backoff,
) {
    let mut backoff = bounds;
    let mut last: Option<(Arc<dyn ListWatch>, Instant)> = None;
    loop {
        let now = at.borrow_and_update().clone();
        let Some(source) = &now.source else {
            // The previous source may have been silent before it was given up.
            let silent = last
                .take()
                .map(|(was, began)| was.silent().min(began.elapsed()));
            store.lost_for(silent.unwrap_or_default());
            if at.changed().await.is_err() {
                return;
            }
            continue;
        };
        let began = Instant::now();
        last = Some((source.clone(), began));
        let why = tokio::select! {
            why = reflect(&store, &**source) => why,
            changed = at.changed() => match changed {
                Ok(()) => {
                    backoff.reset();
                    continue;
                }
                Err(_) => return,
            },
        };
        let lasted = began.elapsed();
        debug!(resource = %store.resource(), ?why, "API cache source closed or failed");
        if lasted > GOOD {
            backoff.reset();
        }
        let random = rand::random();
        let pause = match &why {
            ReflectorError::Broken(_) => backoff.silent(random),
            // Jitter for clients that received the same delay from the source.
            ReflectorError::Refused(_, _, Some(asked)) => asked.mul_f64(1.0 + random / 2.0),
            ReflectorError::Refused(..) => backoff.refused(None, random),
            // A member without a source may find one soon.
            ReflectorError::Stale(..) => backoff.refused(None, random).min(GOOD),
        };
        let turn = now.turn;
        if fallen.send(SourceLost { turn, why, lasted }).await.is_err() {
            return;
        }
        tokio::select! {
            () = sleep(pause) => {}
            changed = at.changed() => match changed {
                Ok(()) => {
                    at.mark_changed();
                    backoff.reset();
                }
                Err(_) => return,
            },
        }
    }
}

/// Asks the selected source for the version of the cloud's API, for as long as it is polled.
pub(super) async fn poll_version(
    pool: Arc<WatchCache>,
    mut at: watch::Receiver<Arc<SelectedSource>>,
) {
    loop {
        let source = at.borrow_and_update().source.clone();
        tokio::select! {
            said = query_version(source.as_deref()) => {
                pool.release(said.into());
                if at.changed().await.is_err() {
                    return;
                }
            }
            changed = at.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

/// Asks until there is an answer.
async fn query_version(source: Option<&dyn ListWatch>) -> Vec<u8> {
    let Some(source) = source else {
        return std::future::pending().await;
    };
    loop {
        if let Ok(answer) = source.get("/version".to_owned()).await
            && answer.status.is_success()
        {
            let mut body = answer.body;
            let mut text = Vec::new();
            while let Some(Ok(bytes)) = body.next().await
                && text.len() <= RELEASE
            {
                text.extend_from_slice(&bytes);
            }
            if serde_json::from_slice::<IgnoredAny>(&text).is_ok() {
                return text;
            }
        }
        sleep(GOOD).await;
    }
}
