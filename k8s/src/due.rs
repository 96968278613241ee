//! The wait until something is to be done, if anything is.

use std::future::pending;
use tokio::time::{Instant, sleep_until};

/// Waits until then; for ever where nothing is due.
pub(crate) async fn due(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}
