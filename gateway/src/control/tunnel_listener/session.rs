//! Session with one edge: hello, registration, messages both ways, and the end.
//!
//! HTTP/2 begins on the worker of the node. The gateway sends its hello and receives the hello of the edge within a timeout. It
//! checks the edge's certificate, version and node. It registers the tunnel, and notifies the tunnels that this one replaced.
//! Then messages pass until the tunnel ends, or one side disconnects the other. A tunnel that was replaced by another one closes
//! when its last stream has ended by itself. The guard of the registration unregisters on every path, and removes only its own
//! entry.

use super::{
    connection::{
        DrainingTunnel, Registration, TunnelConnection, register_error, retire_replaced,
        wait_drained,
    },
    context::{CloseReason, HandshakenEdge, TunnelListener},
};
use crate::control::{
    broadcast::ports_message,
    ca_rotation,
    eligibility::{rejection_reason, retry_later_message, untrusted_reason},
    heartbeat::HeartbeatVerifier,
};
use crate::state::{NewTunnel, registry::EdgeCertificate};
use arc_swap::ArcSwapOption;
use causeway_certs::{Fingerprint, NodeName, PeerRejected};
use causeway_tunnel::{
    Tunnel, TunnelEnd,
    control_stream::{
        ControlStream, ControlStreamError, EdgeHello, EdgeMessage, GatewayHello, GatewayMessage,
        GoAway,
    },
    wire,
};
use futures_util::future::OptionFuture;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

/// Maximum number of messages that wait for an edge. An edge that does not read them is about to end.
const MAX_QUEUED_MESSAGES: usize = 8;
/// Maximum length of the instance identifier of an edge process.
const MAX_INSTANCE: usize = 64;

/// Minimum interval of the notices to peers about the health of a node's upstreams: upstreams of many nodes may flap.
const HEALTH_NOTICE_INTERVAL: Duration = Duration::from_secs(1);

/// Applies the announced settings of the edge to the tunnel.
fn apply_edge_settings(tunnel: &Tunnel, hello: &EdgeHello) {
    if let Some(bytes) = hello.bulk_after {
        tunnel.load().set_bulk_threshold(bytes);
    }
    tunnel.allow_long_targets(hello.long_targets);
    tunnel.allow_upgrade_bodies(hello.upgrade_bodies);
}

/// Returns the ports that an edge reports as unhealthy, at most as many as it may report; `None` if there are none.
fn limit_unhealthy_ports(reported: &[u16]) -> Option<Arc<Vec<u16>>> {
    let ports: Vec<u16> = reported
        .iter()
        .copied()
        .take(wire::MAX_UNHEALTHY_PORTS)
        .collect();
    (!ports.is_empty()).then(|| Arc::new(ports))
}

/// Runs the session with an edge until its tunnel has ended.
pub(super) async fn run(admission: Arc<TunnelListener>, edge: Box<HandshakenEdge>) {
    let (node, from) = (edge.node.clone(), edge.from);
    let certificate = edge.certificate.clone().unwrap_or_default();
    // The state that is needed once is boxed, so that an idle tunnel does not hold it.
    let mut connection = match Box::pin(TunnelConnection::open(&admission, edge)).await {
        Ok(link) => link,
        Err(ended) => {
            debug!(why = %ended, "an edge closed the connection before its hello");
            return admission.metrics.count_registration(ended.as_str());
        }
    };
    let (node, end) =
        match Box::pin(admission.handshake(&mut connection, node, (from, certificate))).await {
            Ok((mut session, node)) => {
                if let Some(api_cache) = &admission.api_cache {
                    api_cache.request_leader_check();
                }
                let end = session.run(&mut connection).await;
                let tunnel_end = connection.close().await;
                let end = end.prefer_tunnel_end(tunnel_end);
                admission.metrics.count_tunnel_end(end.word());
                (node, end)
            }
            Err((name, end)) => {
                let end = match (end, connection.close().await) {
                    // A protocol violation by an edge is not an ordinary disconnect.
                    (CloseReason::Control(_), TunnelEnd::Failed(why)) => {
                        CloseReason::Tunnel(TunnelEnd::Failed(why))
                    }
                    (end, _) => end,
                };
                admission.metrics.count_registration(end.word());
                return end.log_refusal(&name, from, &admission.early_throttle);
            }
        };
    info!("{node} disconnected: {end}");
}

/// Health that an edge reports, and the notices to peers about its changes.
struct HealthReports {
    /// Ports whose health checks fail.
    unhealthy_ports: Arc<ArcSwapOption<Vec<u16>>>,
    /// Time of the next notice; `None` if peers know the present health.
    notice_at: Option<Instant>,
    /// Earliest time of a notice.
    earliest_notice: Instant,
}

impl HealthReports {
    fn new(unhealthy_ports: Arc<ArcSwapOption<Vec<u16>>>) -> Self {
        Self {
            unhealthy_ports,
            notice_at: None,
            earliest_notice: Instant::now(),
        }
    }

    /// Stores the ports that the edge reports as unhealthy. Returns whether they have changed.
    fn store(&mut self, reported: &[u16]) -> bool {
        let unhealthy = limit_unhealthy_ports(reported);
        let has_changed = self.unhealthy_ports.load_full() != unhealthy;
        if has_changed {
            self.unhealthy_ports.store(unhealthy);
            self.notice_at.get_or_insert(self.earliest_notice);
        }
        has_changed
    }

    /// Records that peers are notified now.
    fn notice_sent(&mut self) {
        self.notice_at = None;
        self.earliest_notice = Instant::now() + HEALTH_NOTICE_INTERVAL;
    }
}

/// Session of a registered tunnel.
struct TunnelSession {
    control: ControlStream,
    outgoing: mpsc::Receiver<Box<GatewayMessage>>,
    /// Cancelled when another tunnel has replaced this one.
    taken_over: CancellationToken,
    /// Roots that the edge trusts.
    roots: Arc<ArcSwapOption<Vec<Fingerprint>>>,
    /// Digest of the CRLs that the edge has acknowledged.
    crls: Arc<ArcSwapOption<Fingerprint>>,
    health: HealthReports,
    drain: Duration,
    registration: Registration,
    node: NodeName,
    heartbeats: Option<HeartbeatVerifier>,
}

impl TunnelListener {
    /// Exchanges hellos, checks the edge, and registers the tunnel. An error includes the best known name of the edge.
    async fn handshake(
        &self,
        connection: &mut TunnelConnection,
        node: Result<NodeName, PeerRejected>,
        peer: (SocketAddr, EdgeCertificate),
    ) -> Result<(TunnelSession, NodeName), (String, CloseReason)> {
        let name = node
            .as_ref()
            .map_or_else(|_| "(unknown)".to_owned(), ToString::to_string);
        if let Ok(node) = &node
            && !self.wait_until_checkable(node, connection.bound / 2).await
        {
            let end = self.ask_to_retry(connection, &name).await;
            return Err((name, end));
        }
        // An edge that would be refused anyway receives that reason, and not the error that its hello is missing.
        let rejection = match &node {
            Ok(node) => match self.record_arrival(node, connection.bound).await {
                Ok(()) => rejection_reason(&self.nodes, node, &peer.1),
                Err(why) => Some(why),
            },
            Err(refused) => Some(refused.to_string()),
        };
        let with_name = |end: CloseReason| match (end, &rejection) {
            (CloseReason::Control(_), Some(why)) => (
                name.clone(),
                CloseReason::Dismissed(GoAway::NotAdmitted, why.clone()),
            ),
            (end, _) => (name.clone(), end),
        };
        let exchanged = timeout(connection.bound, self.exchange_hello(connection, &name)).await;
        let (mut control, received) = exchanged
            .map_err(|_| with_name(ControlStreamError::TooSlow(connection.bound).into()))?
            .map_err(|error| with_name(error.into()))?;
        let edge_hello = match received {
            Ok(welcome) => welcome,
            Err(error @ (ControlStreamError::TooLong | ControlStreamError::Malformed(_))) => {
                let detail = error.to_string();
                let end = connection
                    .dismiss(&mut control, GoAway::Malformed, detail)
                    .await;
                return Err(with_name(end));
            }
            Err(error) => return Err(with_name(error.into())),
        };
        let checked = match (node, &rejection) {
            (Ok(node), None) => Self::check_hello(&edge_hello).map(|()| node),
            (_, why) => Err((GoAway::NotAdmitted, why.clone().unwrap_or_default())),
        };
        let node = match checked {
            Ok(node) => node,
            Err((why, detail)) => {
                return Err(with_name(
                    connection.dismiss(&mut control, why, detail).await,
                ));
            }
        };
        match self
            .register(connection, control, &node, (edge_hello, peer))
            .await
        {
            Ok(conversation) => Ok((conversation, node)),
            Err(end) => Err(with_name(end)),
        }
    }

    /// Makes an edge retry later, because the gateway cannot check it yet.
    async fn ask_to_retry(&self, link: &mut TunnelConnection, name: &str) -> CloseReason {
        // An edge that does not read the message reconnects as well.
        if let Ok(Ok((mut control, _))) = timeout(link.bound, self.exchange_hello(link, name)).await
        {
            link.send_goaway(&mut control, &retry_later_message()).await;
        }
        CloseReason::NodesPending
    }

    /// Records a node that connects without an enrolment, if the configuration admits such nodes.
    async fn record_arrival(&self, node: &NodeName, wait_limit: Duration) -> Result<(), String> {
        if !self.tls.load().admits_any_node() {
            return Ok(());
        }
        // Half of the time that the edge waits for the answer to its hello, so that it receives the reason.
        let recorded = timeout(wait_limit / 2, self.record_writer.ensure_record(node)).await;
        let timeout_message = || {
            format!(
                "the data directory could not be written within {:?}",
                wait_limit / 2
            )
        };
        let noted = recorded.map_or_else(
            |_| Err(timeout_message()),
            |noted| noted.map_err(|why| why.to_string()),
        );
        noted.map_err(|why| {
            tracing::error!(%node, %why, "a new node cannot be recorded");
            format!("node {node} cannot be recorded at this gateway; see its log for the cause")
        })
    }

    /// Opens the control stream, sends the hello, and receives one message.
    async fn exchange_hello(
        &self,
        link: &TunnelConnection,
        node: &str,
    ) -> Result<(ControlStream, Result<EdgeHello, ControlStreamError>), ControlStreamError> {
        let mut control = link.tunnel.open_control_stream().await?;
        let (advertised, own_addresses) = (self.advertised.get(), &self.settings.advertise);
        let hello = GatewayHello {
            protocol: wire::VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            gateway: own_addresses
                .first()
                .map_or("gateway", String::as_str)
                .to_owned(),
            instance: Some(self.instance.to_string()),
            node: node.to_owned(),
            gateways: advertised.gateways,
            replicas: advertised.replicas,
            crowded: self.registry.is_crowded(),
        };
        control.send(&GatewayMessage::Hello(hello)).await?;
        let received = control.receive().await.and_then(|line| match line {
            EdgeMessage::Welcome(welcome) => Ok(*welcome),
            _ => Err(ControlStreamError::Closed),
        });
        Ok((control, received))
    }

    /// Checks whether an edge with this hello may stay.
    fn check_hello(hello: &EdgeHello) -> Result<(), (GoAway, String)> {
        if hello.protocol != wire::VERSION {
            let detail = format!(
                "the edge uses version {} of the tunnel protocol, but this gateway uses version {}",
                hello.protocol,
                wire::VERSION
            );
            return Err((GoAway::Malformed, detail));
        }
        let instance = hello.instance.as_bytes();
        if instance.is_empty() || instance.len() > MAX_INSTANCE {
            let detail = format!(
                "the instance id must have 1 to {MAX_INSTANCE} bytes, but has {}",
                instance.len()
            );
            return Err((GoAway::Malformed, detail));
        }
        Ok(())
    }

    /// Registers the tunnel and notifies the tunnels that it replaced.
    async fn register(
        &self,
        connection: &mut TunnelConnection,
        mut control: ControlStream,
        node: &NodeName,
        (hello, (from, certificate)): (EdgeHello, (SocketAddr, EdgeCertificate)),
    ) -> Result<TunnelSession, CloseReason> {
        let by = certificate.clone();
        let current_rejection = || {
            let retired_root =
                || untrusted_reason(self.tls.load().is_still_trusted(&by), node, &by);
            rejection_reason(&self.nodes, node, &by).or_else(retired_root)
        };
        // The edge may take some time to send its welcome; if it was rejected meanwhile, it replaces no other tunnel.
        if let Some(why) = current_rejection() {
            return Err(connection
                .dismiss(&mut control, GoAway::NotAdmitted, why)
                .await);
        }
        let (message_sender, message_receiver) = mpsc::channel(MAX_QUEUED_MESSAGES);
        let hello = Arc::new(hello);
        apply_edge_settings(&connection.tunnel, &hello);
        let roots = hello.roots.as_deref().map(ca_rotation::parse_roots);
        let new_tunnel = NewTunnel {
            tunnel: connection.tunnel.clone(),
            hello: hello.clone(),
            remote_address: from,
            certificate,
            roots: Arc::new(roots.map(Arc::new).into()),
            crls: Arc::default(),
            unhealthy_ports: Arc::new(limit_unhealthy_ports(&hello.unhealthy).into()),
            control: message_sender,
            taken_over: CancellationToken::new(),
        };
        let (id, replaced) = match self.registry.register(node, new_tunnel.clone()) {
            Ok(entered) => entered,
            Err(refused) => {
                let (why, detail) = register_error(node, &refused);
                return Err(connection.dismiss(&mut control, why, detail).await);
            }
        };
        let registration = Registration::new(self, node, id, &connection.tunnel);
        retire_replaced(node, from, replaced);
        // A node that was revoked between the two checks was not registered yet and could not be disconnected.
        if let Some(why) = current_rejection() {
            connection.tunnel.drain();
            return Err(connection
                .dismiss(&mut control, GoAway::NotAdmitted, why)
                .await);
        }
        control.enqueue(&GatewayMessage::Registered)?;
        self.enqueue_announcements((&mut control, node), &new_tunnel)?;
        self.metrics.count_registration("ok");
        let (slot, instance, version) = (hello.slot, &hello.instance, &hello.version);
        info!(%node, %from, slot, ?instance, ?version, "{node} connected");
        Ok(TunnelSession {
            control,
            outgoing: message_receiver,
            taken_over: new_tunnel.taken_over,
            roots: new_tunnel.roots,
            crls: new_tunnel.crls,
            health: HealthReports::new(new_tunnel.unhealthy_ports),
            drain: self.drain,
            registration,
            node: node.clone(),
            heartbeats: self.heartbeats.clone(),
        })
    }

    /// Queues the roots, ports and CRLs that were announced before the tunnel was registered. Later changes are sent to all
    /// registered tunnels.
    fn enqueue_announcements(
        &self,
        (control, node): (&mut ControlStream, &NodeName),
        tunnel: &NewTunnel,
    ) -> Result<(), ControlStreamError> {
        let connected_nodes = || self.registry.connected_nodes();
        for message in ca_rotation::pending_messages(&self.ca.get(), tunnel, connected_nodes) {
            enqueue_or_log((control, node), &message)?;
        }
        let ports = ports_message(tunnel, &self.announced_ports);
        let crls = self.gateway_revocation.message(tunnel);
        for message in ports.into_iter().chain(crls) {
            enqueue_or_log((control, node), &message)?;
        }
        Ok(())
    }
}

/// Queues a message for an edge. A message that is too long for the edge is only logged, and the tunnel continues without it.
fn enqueue_or_log(
    (control, node): (&mut ControlStream, &NodeName),
    message: &GatewayMessage,
) -> Result<(), ControlStreamError> {
    match control.enqueue(message) {
        Err(error @ ControlStreamError::TooLong) => {
            warn!(%node, %error, "cannot send a control message to an edge");
            Ok(())
        }
        result => result,
    }
}

impl TunnelSession {
    /// Passes messages both ways until the tunnel ends or one side leaves. A message that the edge does not accept yet waits as
    /// long as the tunnel is open; streams continue meanwhile.
    async fn run(&mut self, link: &mut TunnelConnection) -> CloseReason {
        let tunnel = link.tunnel.clone();
        let mut draining: Option<DrainingTunnel> = None;
        loop {
            let is_draining = draining.is_some();
            let has_unsent = self.control.has_unsent();
            let message = tokio::select! {
                biased;
                ended = link.wait_ended() => return CloseReason::Tunnel(ended),
                () = wait_drained(&mut draining) => {
                    return draining.map_or(CloseReason::TakenOver, |leaving| leaving.end);
                }
                () = self.taken_over.cancelled(), if !is_draining => {
                    draining = Some(DrainingTunnel::new(&tunnel, None, CloseReason::TakenOver));
                    continue;
                }
                Some(next) = self.outgoing.recv(), if !has_unsent => *next,
                Some(()) = OptionFuture::from(self.health.notice_at.map(sleep_until)) => {
                    self.health.notice_sent();
                    self.registration.notify_change();
                    continue;
                }
                exchanged = self.control.exchange() => match exchanged {
                    Ok(edge_message) => {
                        if let Some(leave) = edge_message.and_then(|text| self.handle_message(text, &tunnel)) {
                            draining = Some(leave);
                        }
                        continue;
                    }
                    Err(error) => return error.into(),
                },
            };
            if let GatewayMessage::Dismiss { why, detail, .. } = &message {
                let (why, detail) = (*why, detail.clone());
                if why != GoAway::Superseded {
                    return link.dismiss(&mut self.control, why, detail).await;
                }
                // The other process may live as well: its streams go on until they end.
                draining = Some(DrainingTunnel::new(
                    &tunnel,
                    None,
                    CloseReason::Dismissed(why, detail),
                ));
            }
            if let Err(error) = enqueue_or_log((&mut self.control, &self.node), &message) {
                return error.into();
            }
        }
    }

    /// Handles a message of the edge. Returns the draining tunnel, if the edge announces that the tunnel leaves.
    fn handle_message(&mut self, message: EdgeMessage, tunnel: &Tunnel) -> Option<DrainingTunnel> {
        match message {
            EdgeMessage::Leave {
                detail,
                until_idle,
                serves,
            } => {
                debug!(?detail, until_idle, serves, "the edge is disconnecting");
                self.registration.mark_leaving();
                if serves {
                    return None;
                }
                tunnel.drain();
                let until = (!until_idle).then(|| Instant::now() + self.drain);
                return Some(DrainingTunnel::new(
                    tunnel,
                    until,
                    CloseReason::EdgeLeft(detail),
                ));
            }
            EdgeMessage::Roots { roots } => {
                self.roots
                    .store(Some(Arc::new(ca_rotation::parse_roots(&roots))));
            }
            EdgeMessage::Crls { digest } => self.crls.store(digest.parse().ok().map(Arc::new)),
            EdgeMessage::Health { unhealthy } => {
                if self.health.store(&unhealthy) {
                    debug!(node = %self.node, ports = ?unhealthy, "other health checks fail at the node");
                }
            }
            EdgeMessage::DelegatedHeartbeat(heartbeat) => {
                if let Some(heartbeats) = &self.heartbeats {
                    heartbeats.receive(&self.node, &heartbeat);
                }
            }
            EdgeMessage::Welcome(_) => debug!("the edge sent a second welcome message"),
            EdgeMessage::Unknown => debug!("the edge sent a message of an unknown type"),
        }
        None
    }
}
