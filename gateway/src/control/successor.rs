//! Progress of a handover, as the process that hands over sees it.
//!
//! 1. `ready`: the successor has bound its sockets. This process stops accepting tunnels and commands.
//! 2. `released`: this process enrols no edge any more. The successor reads the data directory again, and edges connect to it.
//! 3. `serving`: the successor accepts clients. This process closes its listeners and drains.

use std::time::Duration;
use tokio::{sync::watch, time::timeout};
use tokio_util::sync::CancellationToken;

/// Progress of a handover to a successor. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Successor {
    /// Cancelled when the successor has bound its sockets.
    pub ready: CancellationToken,
    /// Cancelled when this process enrols no edge any more.
    pub released: CancellationToken,
    /// Cancelled when the successor accepts clients.
    pub serving: CancellationToken,
    /// Whether a successor that is ready is connected.
    pub connected: watch::Sender<bool>,
}

impl Default for Successor {
    fn default() -> Self {
        Self {
            ready: CancellationToken::new(),
            released: CancellationToken::new(),
            serving: CancellationToken::new(),
            connected: watch::Sender::new(false),
        }
    }
}

impl Successor {
    /// Waits until a successor accepts clients. If the successor has ended before, waits for another one at most `wait`.
    pub async fn wait_until_serving(&self, wait: Duration) {
        let mut connected = self.connected.subscribe();
        let abandoned = async {
            loop {
                // The sender lives as long as this value.
                let _ = connected.wait_for(|connected| !connected).await;
                let next = connected.wait_for(|connected| *connected);
                if timeout(wait, next).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = self.serving.cancelled() => {}
            () = abandoned => {}
        }
    }
}
