//! Sender of this node's heartbeats while it has no gateway.
//!
//! The tunnel is closed 15 s after the last byte from a gateway. The first heartbeat follows some seconds later, so that it
//! arrives within 25 s of the cut. kube-controller-manager waits for 40 s, and since Kubernetes 1.32 for 50 s.

use super::member_client::OpenMember;
use crate::{
    config::{self, PROBE_INTERVAL},
    control::{api_cache::member_source::MemberPeers, identity_store::IdentityStore},
    metrics::Metrics,
    status::{HeartbeatStatus, StatusWriter},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use causeway_certs::HeartbeatStatement;
use causeway_rt::http_client;
use causeway_tunnel::heartbeat::{DelegatedHeartbeat, KubeletState, NONCE_INTERVAL};
use futures_util::{StreamExt, stream};
use http::{Request, StatusCode, header::HOST};
use http_body_util::Full;
use rand::seq::SliceRandom;
use std::{convert::Infallible, future::pending, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    net::TcpStream,
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout},
};
use tracing::{debug, info, warn};

/// Time limit of one check.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Failed checks in succession after which the kubelet is not alive.
const MAX_FAILURES: u32 = 2;

/// Time without a tunnel after which the node has lost its gateways; one that restarts is back sooner.
const CUT_OFF_AFTER: Duration = Duration::from_secs(3);
/// Members that are asked at once.
const CONCURRENT: usize = 8;
/// Members that are asked in one round. If all of a large pool is cut off, each handshake costs all members.
const MAX_ASKED: usize = 64;
/// Pauses after a round in which no member has accepted the heartbeat.
const RETRY_MIN: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = NONCE_INTERVAL;

/// Sends heartbeats of this node to members of its pool while no tunnel is open.
pub(crate) struct HeartbeatSender {
    pub(crate) config: config::Heartbeat,
    pub(crate) identity: IdentityStore,
    pub(crate) peers: MemberPeers,
    /// Number of open tunnels.
    pub(crate) tunnel_count: watch::Receiver<usize>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) status: Arc<StatusWriter>,
}

impl HeartbeatSender {
    /// Runs the sender. Never returns.
    pub(crate) async fn run(self) {
        let (health_tx, health) = watch::channel(KubeletHealth::default());
        let probe = probe_kubelet(self.config.kubelet, health_tx);
        tokio::join!(probe, self.report(health.clone()), self.send(health));
    }

    fn is_alive(&self, health: &KubeletHealth) -> bool {
        health.is_alive(self.config.alive_for)
    }

    /// Updates the state of the kubelet in the status and in the metrics.
    async fn report(&self, mut health: watch::Receiver<KubeletHealth>) {
        while health.changed().await.is_ok() {
            let alive = self.is_alive(&health.borrow_and_update());
            self.metrics.heartbeat.set_kubelet_alive(alive);
            self.change(|status| status.kubelet = if alive { "alive" } else { "not_alive" });
        }
    }

    async fn send(&self, mut health: watch::Receiver<KubeletHealth>) {
        let (mut tunnels, mut tunnels_again) =
            (self.tunnel_count.clone(), self.tunnel_count.clone());
        loop {
            // The status table owns the sender of the count and outlives this task.
            let _ = tunnels.wait_for(|count| *count == 0).await;
            let sending = async {
                sleep(CUT_OFF_AFTER).await;
                self.send_while_cut_off(&mut health).await
            };
            tokio::select! {
                _ = tunnels_again.wait_for(|count| *count > 0) => {}
                never = sending => match never {},
            }
            self.change(|status| {
                if status.delegate.is_some() {
                    info!(
                        "this node has a gateway again; its heartbeats are not delegated any more"
                    );
                }
                status.clear();
            });
        }
    }

    async fn send_while_cut_off(&self, health: &mut watch::Receiver<KubeletHealth>) -> Infallible {
        info!("this node has no gateway; it asks members of its pool to carry its heartbeats");
        let (mut delegate, mut pause) = (None, RETRY_MIN);
        loop {
            self.wait_until_alive(health).await;
            let began_at = Instant::now();
            match self.send_heartbeat(delegate.as_deref(), health).await {
                Ok(node) => {
                    self.metrics.heartbeat.count_sent(true);
                    if delegate.is_none() {
                        info!(
                            node,
                            "the heartbeats of this node are delegated to a member of its pool"
                        );
                    }
                    self.change(|status| status.sent(&node));
                    delegate = Some(node);
                    pause = RETRY_MIN;
                    sleep_until(began_at + NONCE_INTERVAL).await;
                }
                Err(why) => {
                    self.metrics.heartbeat.count_sent(false);
                    if pause == RETRY_MIN {
                        warn!(
                            why,
                            "no member of the pool carries the heartbeat of this node; retrying"
                        );
                    }
                    self.change(|status| status.failed(why));
                    delegate = None;
                    // The nodes of a site that is cut off as a whole must not ask at the same time.
                    sleep(pause.mul_f64(1.0 + rand::random::<f64>() / 4.0)).await;
                    pause = (pause * 2).min(RETRY_MAX);
                }
            }
        }
    }

    /// Waits until the kubelet is alive.
    async fn wait_until_alive(&self, health: &mut watch::Receiver<KubeletHealth>) {
        if self.is_alive(&health.borrow()) {
            return;
        }
        warn!("this node has no gateway and its kubelet is not alive; no heartbeat is sent");
        self.change(HeartbeatStatus::clear);
        if health
            .wait_for(|health| self.is_alive(health))
            .await
            .is_err()
        {
            // The probe has ended, and with it this task.
            pending::<()>().await;
        }
    }

    /// Sends one heartbeat. Returns the member that has accepted it.
    ///
    /// The member that accepted the last one is asked second. A stolen member may accept heartbeats and drop them: so it gets at
    /// most every second one, and the node's Lease is still renewed in time.
    async fn send_heartbeat(
        &self,
        last: Option<&str>,
        health: &watch::Receiver<KubeletHealth>,
    ) -> Result<String, String> {
        let mut peers = self.peers.all();
        // So that the nodes of a site have several delegates, and each round asks others.
        peers.shuffle(&mut rand::rng());
        let mut failure = "no other member of the pool is known".to_owned();
        let last = peers.iter().position(|peer| Some(peer.node()) == last);
        if let Some(last) = last.map(|last| peers.swap_remove(last)) {
            for peer in peers.pop().into_iter().chain([last]) {
                match self.deliver(OpenMember::open(peer).await, health).await {
                    Ok(node) => return Ok(node),
                    Err(why) => failure = why,
                }
            }
        }
        peers.truncate(MAX_ASKED);
        let mut opened = stream::iter(peers)
            .map(OpenMember::open)
            .buffer_unordered(CONCURRENT);
        while let Some(opened) = opened.next().await {
            match self.deliver(opened, health).await {
                Ok(node) => return Ok(node),
                Err(why) => {
                    debug!(why, "a member of the pool does not carry the heartbeat");
                    failure = why;
                }
            }
        }
        Err(failure)
    }

    async fn deliver(
        &self,
        opened: Result<OpenMember, String>,
        health: &watch::Receiver<KubeletHealth>,
    ) -> Result<String, String> {
        let mut member = opened?;
        if !self.is_alive(&health.borrow()) {
            return Err("the kubelet of this node does not answer any more".to_owned());
        }
        member.deliver(&self.sign(&member.nonce)?).await?;
        Ok(member.node)
    }

    /// Returns the heartbeat for this nonce, signed with the key of this node's certificate.
    fn sign(&self, nonce: &str) -> Result<DelegatedHeartbeat, String> {
        let identity = self.identity.identity();
        let kubelet = KubeletState::Alive;
        let statement = HeartbeatStatement {
            nonce,
            node: &identity.node,
            kubelet: kubelet.as_str(),
        };
        let signature = statement.sign(&identity.leaf);
        let signature = signature.map_err(|error| error.to_string())?;
        Ok(DelegatedHeartbeat {
            node: identity.node.to_string(),
            nonce: nonce.to_owned(),
            chain: identity.leaf.chain_pem(),
            signature: BASE64_STANDARD.encode(signature),
            kubelet,
        })
    }

    fn change(&self, change: impl FnOnce(&mut HeartbeatStatus)) {
        self.status.heartbeat(change);
    }
}

/// Result of the health checks so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KubeletHealth {
    last_success: Option<Instant>,
    failures: u32,
}

impl KubeletHealth {
    /// Whether the kubelet counts as alive, if a success counts for this long.
    pub(super) fn is_alive(&self, alive_for: Duration) -> bool {
        let is_recent = |success: Instant| success.elapsed() <= alive_for;
        self.failures < MAX_FAILURES && self.last_success.is_some_and(is_recent)
    }

    /// Records the result of a check that began at this time.
    fn record(&mut self, began_at: Instant, is_ok: bool) {
        if is_ok {
            (self.last_success, self.failures) = (Some(began_at), 0);
        } else {
            self.failures = self.failures.saturating_add(1);
        }
    }
}

/// Checks the kubelet's health at this address, for as long as it is polled.
pub(super) async fn probe_kubelet(address: SocketAddr, health: watch::Sender<KubeletHealth>) {
    let mut ticks = interval(PROBE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        ticks.tick().await;
        let began_at = Instant::now();
        let result = timeout(PROBE_TIMEOUT, check(address)).await;
        let result = result.unwrap_or_else(|_| Err(format!("no answer within {PROBE_TIMEOUT:?}")));
        if let Err(why) = &result
            && !failing
        {
            warn!(%address, why, "the health check of this node's kubelet fails; after two failures no heartbeat is delegated");
        } else if result.is_ok() && failing {
            info!(%address, "the health check of this node's kubelet succeeds again");
        }
        failing = result.is_err();
        health.send_modify(|health| health.record(began_at, result.is_ok()));
    }
}

async fn check(address: SocketAddr) -> Result<(), String> {
    let tcp = TcpStream::connect(address).await;
    let tcp = tcp.map_err(|error| error.to_string())?;
    let request = Request::get("/healthz")
        .header(HOST, address.to_string())
        .body(Full::<Bytes>::default())
        .map_err(|error| error.to_string())?;
    let answered = http_client::send(tcp, request).await;
    let (answer, _connection) = answered.map_err(|error| error.to_string())?;
    match answer.status() {
        StatusCode::OK => Ok(()),
        status => Err(format!("status {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn a_kubelet_is_not_alive_after_two_failures_or_an_old_success() {
        let alive_for = Duration::from_secs(10);
        let mut health = KubeletHealth::default();
        assert!(!health.is_alive(alive_for), "it was never checked");
        health.record(Instant::now(), true);
        assert!(health.is_alive(alive_for));
        health.record(Instant::now(), false);
        assert!(health.is_alive(alive_for), "one failure");
        health.record(Instant::now(), false);
        assert!(!health.is_alive(alive_for), "two failures");
        health.record(Instant::now(), true);
        advance(alive_for).await;
        assert!(health.is_alive(alive_for));
        advance(Duration::from_millis(1)).await;
        assert!(!health.is_alive(alive_for), "the success is too old");
    }
}
