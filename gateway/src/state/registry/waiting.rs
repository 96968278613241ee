//! Requests that wait for a tunnel, and the drain of this gateway, which ends the waiting.

use super::{MAX_WAITING_REQUESTS, NodeUnavailable, Registry, SelectedTunnel, WaitPermit};
use causeway_certs::NodeName;
use std::{pin::pin, sync::atomic::Ordering::Relaxed, time::Duration};
use tokio::time::{Instant, timeout};

impl Registry {
    /// Selects a tunnel like [`Registry::select_tunnel`]. If the node's last tunnel ended less than `wait_limit` ago, waits for a
    /// new tunnel until `wait_limit` is over. Any node is awaited for that time after this gateway has begun to serve clients,
    /// because its edge is probably dialling. A gateway that drains waits only for other gateways, which the edges can reach.
    ///
    /// # Errors
    /// The reason why no tunnel can be selected.
    pub async fn select_tunnel_within(
        &self,
        node: &NodeName,
        wait_limit: Duration,
    ) -> Result<SelectedTunnel, NodeUnavailable> {
        match self.select_tunnel(node) {
            Err(unavailable) => match self.wait_permit() {
                Some(permit) => {
                    self.select_tunnel_permitted(node, wait_limit, &permit)
                        .await
                }
                None => Err(unavailable),
            },
            selected => selected,
        }
    }

    /// Records that this gateway begins to serve clients. After a takeover, edges may still be connected to its predecessor.
    pub fn record_serving(&self) {
        self.serving_since.get_or_init(Instant::now);
    }

    /// Returns the permit of one request to wait for tunnels; `None` if too many requests wait.
    pub fn wait_permit(&self) -> Option<WaitPermit<'_>> {
        self.wait_permits.try_acquire().ok().map(WaitPermit)
    }

    /// Selects a tunnel like [`Registry::select_tunnel_within`], for a request that has a permit. It may wait for several nodes.
    ///
    /// # Errors
    /// The reason why no tunnel can be selected.
    pub async fn select_tunnel_permitted(
        &self,
        node: &NodeName,
        wait_limit: Duration,
        _permit: &WaitPermit<'_>,
    ) -> Result<SelectedTunnel, NodeUnavailable> {
        let unavailable = match self.select_tunnel(node) {
            Err(away) if !self.is_draining() || self.directory.has_active_peer() => away,
            picked => return picked,
        };
        let offline_for = match unavailable {
            NodeUnavailable::LastSeen { ended_at, .. }
            | NodeUnavailable::LeftPeer { ended_at, .. } => ended_at.elapsed(),
            NodeUnavailable::NeverSeen => {
                let serving_since = self.serving_since.get();
                serving_since.unwrap_or(&self.started_at).elapsed()
            }
            NodeUnavailable::Draining => Duration::ZERO,
            NodeUnavailable::Suspect { .. } => return Err(unavailable),
        };
        let remaining = wait_limit.saturating_sub(offline_for);
        let next_tunnel = async {
            tokio::select! {
                picked = self.wait_for_tunnel(node) => Some(picked),
                () = self.no_tunnel_can_arrive() => None,
            }
        };
        match timeout(remaining, next_tunnel).await {
            Ok(Some(picked)) => Ok(picked),
            _ => self.select_tunnel(node),
        }
    }

    /// Waits until nodes can get no further tunnel: this gateway drains without any other gateway, or its drain time is over.
    async fn no_tunnel_can_arrive(&self) {
        self.drain_token.cancelled().await;
        if self.directory.has_active_peer() {
            self.drain_expired.cancelled().await;
        }
    }

    /// Waits until a tunnel of the node can be selected.
    async fn wait_for_tunnel(&self, node: &NodeName) -> SelectedTunnel {
        loop {
            let notify = {
                let mut shard = self.shard(node);
                let entry = shard.entry(node);
                entry.tunnel_registered.get_or_insert_default().clone()
            };
            let mut notified = pin!(notify.notified());
            // A change that arrives before the check below is noticed as well.
            notified.as_mut().enable();
            if let Ok(picked) = self.select_tunnel(node) {
                return picked;
            }
            notified.await;
        }
    }

    /// Whether a request waits for a tunnel.
    pub fn has_waiting_requests(&self) -> bool {
        self.wait_permits.available_permits() < MAX_WAITING_REQUESTS
    }

    /// Records that this gateway drains. Requests wait for tunnels only if there are other gateways.
    pub fn start_drain(&self) {
        self.is_draining.store(true, Relaxed);
        self.drain_token.cancel();
    }

    /// Waits until this gateway drains.
    pub async fn drain_started(&self) {
        self.drain_token.cancelled().await;
    }

    /// Whether this gateway drains.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Relaxed)
    }

    /// Records that the drain time is over, which is then the reason for the end of open streams. No request waits any more.
    pub fn expire_drain(&self) {
        self.drain_expired.cancel();
    }

    /// Whether the drain time is over.
    pub fn is_drain_expired(&self) -> bool {
        self.drain_expired.is_cancelled()
    }
}
