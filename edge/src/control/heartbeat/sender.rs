//! Sender of this node's heartbeats while it has no gateway.
//!
//! The tunnel is closed 15 s after the last byte from a gateway. The first heartbeat follows some seconds later, so that it
//! arrives within 25 s of the cut: kube-controller-manager waits for 40 s, and since Kubernetes 1.32 for 50 s.

use super::{
    kubelet::{self, KubeletHealth},
    member_client::OpenMember,
};
use crate::{
    config,
    control::{api_cache::member_peers::MemberPeers, identity_store::IdentityStore},
    metrics::Metrics,
    status::{HeartbeatStatus, StatusWriter},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use causeway_certs::HeartbeatStatement;
use causeway_tunnel::heartbeat::{DelegatedHeartbeat, KubeletState, NONCE_INTERVAL};
use futures_util::{StreamExt, stream};
use rand::seq::SliceRandom;
use std::{convert::Infallible, future::pending, sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::{debug, info, warn};

/// Time without a tunnel after which the node has lost its gateways; one that restarts is back sooner.
const CUT_OFF_AFTER: Duration = Duration::from_secs(3);
/// Members that are asked at once, after the one that has answered last.
const CONCURRENT: usize = 8;
/// Members that are asked in one round. If all of a large pool is cut off, each handshake costs all members.
const MAX_ASKED: usize = 64;
/// Pauses after a round in which no member has taken the heartbeat.
const RETRY_MIN: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = NONCE_INTERVAL;

/// Sends heartbeats of this node to members of its pool while no tunnel stands.
pub(crate) struct HeartbeatSender {
    pub(crate) config: config::Heartbeat,
    pub(crate) identity: IdentityStore,
    pub(crate) peers: MemberPeers,
    /// Number of tunnels that stand.
    pub(crate) standing: watch::Receiver<usize>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) status: Arc<StatusWriter>,
}

impl HeartbeatSender {
    /// Runs for as long as it is polled.
    pub(crate) async fn run(self) {
        let (health, checked) = watch::channel(KubeletHealth::default());
        let probing = kubelet::probe(self.config.kubelet, health);
        tokio::join!(probing, self.report(checked.clone()), self.send(checked));
    }

    /// Keeps the state of the kubelet in the status and in the metrics.
    async fn report(&self, mut checked: watch::Receiver<KubeletHealth>) {
        while checked.changed().await.is_ok() {
            let alive = checked.borrow_and_update().is_alive(self.config.alive_for);
            self.metrics.heartbeat.kubelet_alive(alive);
            self.change(|status| status.kubelet = if alive { "alive" } else { "not_alive" });
        }
    }

    async fn send(&self, mut checked: watch::Receiver<KubeletHealth>) {
        let mut standing = self.standing.clone();
        loop {
            // The status table, which owns the sender, outlives this task.
            let _ = standing.wait_for(|standing| *standing == 0).await;
            let cut = async {
                sleep(CUT_OFF_AFTER).await;
                self.send_while_cut_off(&mut checked).await
            };
            let mut connected = self.standing.clone();
            let sent = tokio::select! {
                _ = connected.wait_for(|standing| *standing > 0) => true,
                never = cut => match never {},
            };
            if sent {
                self.change(|status| (status.delegate, status.trouble) = (None, None));
            }
        }
    }

    async fn send_while_cut_off(&self, checked: &mut watch::Receiver<KubeletHealth>) -> Infallible {
        info!("this node has no gateway; its heartbeats are delegated to members of its pool");
        let (mut delegate, mut pause) = (None, RETRY_MIN);
        loop {
            self.alive(checked).await;
            let began = Instant::now();
            match self.beat(delegate.as_deref(), checked).await {
                Ok(node) => {
                    self.metrics.heartbeat.sent(true);
                    if delegate.as_ref() != Some(&node) {
                        info!(
                            node,
                            "the heartbeats of this node are delegated to a member of its pool"
                        );
                    }
                    self.change(|status| status.sent(&node));
                    delegate = Some(node);
                    pause = RETRY_MIN;
                    sleep_until(began + NONCE_INTERVAL).await;
                }
                Err(why) => {
                    self.metrics.heartbeat.sent(false);
                    if pause == RETRY_MIN {
                        warn!(
                            why,
                            "no member of the pool takes the heartbeat of this node; retrying"
                        );
                    } else {
                        debug!(
                            why,
                            "no member of the pool takes the heartbeat of this node"
                        );
                    }
                    self.change(|status| (status.delegate, status.trouble) = (None, Some(why)));
                    delegate = None;
                    // A whole site that is cut off must not ask at the same time.
                    sleep(pause.mul_f64(1.0 + rand::random::<f64>() / 4.0)).await;
                    pause = (pause * 2).min(RETRY_MAX);
                }
            }
        }
    }

    /// Waits until the kubelet is alive.
    async fn alive(&self, checked: &mut watch::Receiver<KubeletHealth>) {
        let alive = |health: &KubeletHealth| health.is_alive(self.config.alive_for);
        if checked.wait_for(alive).await.is_err() {
            // The probe has ended, and with it this task.
            pending::<()>().await;
        }
    }

    /// Sends one heartbeat. Returns the member that has taken it.
    async fn beat(
        &self,
        last: Option<&str>,
        checked: &watch::Receiver<KubeletHealth>,
    ) -> Result<String, String> {
        let mut peers = self.peers.all();
        let mut failures = Vec::new();
        let preferred = peers.iter().position(|peer| Some(peer.node()) == last);
        if let Some(preferred) = preferred {
            let opened = OpenMember::open(peers.remove(preferred)).await;
            match self.deliver(opened, checked).await {
                Ok(node) => return Ok(node),
                Err(why) => failures.push(why),
            }
        }
        // So that the nodes of a site have several delegates, and each round asks others.
        peers.shuffle(&mut rand::rng());
        peers.truncate(MAX_ASKED);
        let mut opening = stream::iter(peers)
            .map(OpenMember::open)
            .buffer_unordered(CONCURRENT);
        while let Some(opened) = opening.next().await {
            match self.deliver(opened, checked).await {
                Ok(node) => return Ok(node),
                Err(why) => failures.push(why),
            }
        }
        // The last reason is that of the slowest member.
        failures.pop().map_or_else(
            || Err("no other member of the pool is known".to_owned()),
            Err,
        )
    }

    async fn deliver(
        &self,
        opened: Result<OpenMember, String>,
        checked: &watch::Receiver<KubeletHealth>,
    ) -> Result<String, String> {
        let mut member = opened?;
        if !checked.borrow().is_alive(self.config.alive_for) {
            return Err("the kubelet does not answer any more".to_owned());
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
            kubelet: kubelet.word(),
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
