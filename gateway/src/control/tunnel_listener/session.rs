//! Session with one edge: hello, registration, messages both ways, and the end.
//!
//! HTTP/2 begins on the worker of the node. The gateway sends its hello and receives that of the edge, within a timeout. It
//! checks the edge's certificate, version and node. It registers the tunnel, and informs the tunnels that this one replaced. Then
//! messages pass until the tunnel ends, or one side disconnects the other. A tunnel from which another one has taken over closes
//! when its last stream has ended by itself. The guard of the registration unregisters on every path, and only what it has
//! registered.

use super::{
    close_reason::CloseReason,
    connection::{
        DrainingTunnel, Registration, TunnelConnection, drained, register_error, retire_replaced,
    },
    context::{HandshakenEdge, TunnelListener},
};
use crate::control::{
    broadcast::listing,
    ca_rotation,
    eligibility::{rejection_reason, retry_later_message, untrusted_reason},
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
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

/// Maximum number of messages that wait for an edge; an edge that does not read them is about to end.
const LINES: usize = 8;
/// Maximum length of the name that an edge gives its process.
const MAX_INSTANCE: usize = 64;

/// Applies the settings that the edge announces to the tunnel.
fn heed(tunnel: &Tunnel, welcome: &EdgeHello) {
    if welcome.turns {
        tunnel.give_turns();
    }
    if let Some(bytes) = welcome.bulk_after {
        tunnel.load().set_bulk(bytes);
    }
    tunnel.allow_long_targets(welcome.long_targets);
    tunnel.allow_upgrade_bodies(welcome.upgrade_bodies);
}

/// Runs the session with an edge until its tunnel is gone.
pub(super) async fn run(admission: Arc<TunnelListener>, arrived: Box<HandshakenEdge>) {
    let (node, from) = (arrived.node.clone(), arrived.from);
    let certificate = arrived.certificate.clone().unwrap_or_default();
    // The state that is needed once is boxed, so that an idle tunnel does not hold it.
    let mut link = match Box::pin(TunnelConnection::open(&admission, arrived)).await {
        Ok(link) => link,
        Err(ended) => {
            debug!(why = %ended, "an edge closed the connection before its hello");
            return admission.metrics.registration(ended.word());
        }
    };
    let (node, end) =
        match Box::pin(admission.handshake(&mut link, node, (from, certificate))).await {
            Ok((mut conversation, node)) => {
                if let Some(reading) = &admission.reading {
                    reading.stir();
                }
                let end = conversation.run(&mut link).await;
                let ended = link.close().await;
                let end = end.blame(ended);
                admission.metrics.tunnel_ended(end.word());
                (node, end)
            }
            Err((name, end)) => {
                let end = match (end, link.close().await) {
                    // A protocol violation by an edge is not an ordinary disconnect.
                    (CloseReason::Control(_), TunnelEnd::Failed(why)) => {
                        CloseReason::Tunnel(TunnelEnd::Failed(why))
                    }
                    (end, _) => end,
                };
                admission.metrics.registration(end.word());
                return end.log_refusal(&name, from, &admission.early);
            }
        };
    info!("{node} disconnected: {end}");
}

/// Session of a registered tunnel.
struct TunnelSession {
    control: ControlStream,
    lines: mpsc::Receiver<Box<GatewayMessage>>,
    /// Cancelled when another tunnel has taken over.
    taken_over: CancellationToken,
    /// Roots that the edge trusts.
    roots: Arc<ArcSwapOption<Vec<Fingerprint>>>,
    drain: Duration,
    registered: Registration,
}

impl TunnelListener {
    /// Exchanges hellos, checks the edge, and registers the tunnel. An error comes with the best known name of the edge.
    async fn handshake(
        &self,
        link: &mut TunnelConnection,
        node: Result<NodeName, PeerRejected>,
        shown: (SocketAddr, EdgeCertificate),
    ) -> Result<(TunnelSession, NodeName), (String, CloseReason)> {
        let name = node
            .as_ref()
            .map_or_else(|_| "(unknown)".to_owned(), ToString::to_string);
        if let Ok(node) = &node
            && !self.can_judge(node, link.bound / 2).await
        {
            let end = self.defer(link, &name).await;
            return Err((name, end));
        }
        // An edge that would be refused anyway receives that reason, and not the error that its hello is missing.
        let refused = match &node {
            Ok(node) => match self.record_arrival(node, link.bound).await {
                Ok(()) => rejection_reason(&self.nodes, node, &shown.1),
                Err(why) => Some(why),
            },
            Err(refused) => Some(refused.to_string()),
        };
        let failed = |end: CloseReason| match (end, &refused) {
            (CloseReason::Control(_), Some(why)) => (
                name.clone(),
                CloseReason::Dismissed(GoAway::Unwelcome, why.clone()),
            ),
            (end, _) => (name.clone(), end),
        };
        let asked = timeout(link.bound, self.ask(link, &name)).await;
        let (mut control, heard) = asked
            .map_err(|_| failed(ControlStreamError::TooSlow(link.bound).into()))?
            .map_err(|error| failed(error.into()))?;
        let welcome = match heard {
            Ok(welcome) => welcome,
            Err(error @ (ControlStreamError::TooLong | ControlStreamError::Malformed(_))) => {
                let detail = error.to_string();
                let end = link.dismiss(&mut control, GoAway::Malformed, detail).await;
                return Err(failed(end));
            }
            Err(error) => return Err(failed(error.into())),
        };
        let judged = match (node, &refused) {
            (Ok(node), None) => Self::judge(&welcome).map(|()| node),
            (_, why) => Err((GoAway::Unwelcome, why.clone().unwrap_or_default())),
        };
        let node = match judged {
            Ok(node) => node,
            Err((why, detail)) => {
                return Err(failed(link.dismiss(&mut control, why, detail).await));
            }
        };
        match self.register(link, control, &node, (welcome, shown)).await {
            Ok(conversation) => Ok((conversation, node)),
            Err(end) => Err(failed(end)),
        }
    }

    /// Makes an edge retry that cannot be checked yet.
    async fn defer(&self, link: &mut TunnelConnection, name: &str) -> CloseReason {
        // An edge that does not read the message reconnects as well.
        if let Ok(Ok((mut control, _))) = timeout(link.bound, self.ask(link, name)).await {
            link.send_away(&mut control, &retry_later_message()).await;
        }
        CloseReason::Early
    }

    /// Records a node that connects without having joined, if the configuration admits such nodes.
    async fn record_arrival(&self, node: &NodeName, bound: Duration) -> Result<(), String> {
        if !self.tls.load().lets_any_in() {
            return Ok(());
        }
        // Half of the time that the edge waits for the answer to its hello, so that it receives the reason.
        let noted = timeout(bound / 2, self.ledger.arrived(node)).await;
        let late = || {
            format!(
                "the data directory could not be written within {:?}",
                bound / 2
            )
        };
        let noted = noted.map_or_else(
            |_| Err(late()),
            |noted| noted.map_err(|why| why.to_string()),
        );
        noted.map_err(|why| {
            tracing::error!(%node, %why, "a new node cannot be recorded");
            format!("node {node} cannot be recorded at this gateway; see its log for the cause")
        })
    }

    /// Opens the control stream, sends the hello, and receives one message.
    async fn ask(
        &self,
        link: &TunnelConnection,
        node: &str,
    ) -> Result<(ControlStream, Result<EdgeHello, ControlStreamError>), ControlStreamError> {
        let mut control = link.tunnel.control().await?;
        let (told, own) = (self.advertised.all(), &self.settings.advertise);
        let hello = GatewayHello {
            protocol: wire::VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            gateway: own.first().map_or("gateway", String::as_str).to_owned(),
            instance: Some(self.instance.to_string()),
            node: node.to_owned(),
            gateways: told.gateways,
            replicas: told.replicas,
        };
        control.tell(&GatewayMessage::Hello(hello)).await?;
        let heard = control.hear().await.and_then(|line| match line {
            EdgeMessage::Welcome(welcome) => Ok(*welcome),
            _ => Err(ControlStreamError::Closed),
        });
        Ok((control, heard))
    }

    /// Checks whether an edge with this hello may stay.
    fn judge(welcome: &EdgeHello) -> Result<(), (GoAway, String)> {
        if welcome.protocol != wire::VERSION {
            let detail = format!(
                "the edge uses version {} of the tunnel protocol, but this gateway uses version {}",
                welcome.protocol,
                wire::VERSION
            );
            return Err((GoAway::Malformed, detail));
        }
        let instance = welcome.instance.as_bytes();
        if instance.is_empty() || instance.len() > MAX_INSTANCE {
            let detail = format!(
                "the instance id must have 1 to {MAX_INSTANCE} bytes, but has {}",
                instance.len()
            );
            return Err((GoAway::Malformed, detail));
        }
        Ok(())
    }

    /// Registers the tunnel and informs those that it replaced.
    async fn register(
        &self,
        link: &mut TunnelConnection,
        mut control: ControlStream,
        node: &NodeName,
        (welcome, (from, certificate)): (EdgeHello, (SocketAddr, EdgeCertificate)),
    ) -> Result<TunnelSession, CloseReason> {
        let by = certificate.clone();
        let unwelcome = || {
            let retired = || untrusted_reason(self.tls.load().believes(&by), node, &by);
            rejection_reason(&self.nodes, node, &by).or_else(retired)
        };
        // The edge may take some time to send its welcome; if it was rejected meanwhile, it replaces no other tunnel.
        if let Some(why) = unwelcome() {
            return Err(link.dismiss(&mut control, GoAway::Unwelcome, why).await);
        }
        let (tell, lines) = mpsc::channel(LINES);
        let taken_over = CancellationToken::new();
        let version = welcome.version.clone();
        let (slot, instance) = (welcome.slot, welcome.instance.clone());
        heed(&link.tunnel, &welcome);
        let roots = welcome.roots.as_deref().map(ca_rotation::named);
        let roots = Arc::new(ArcSwapOption::new(roots.map(Arc::new)));
        let admitted = NewTunnel {
            tunnel: link.tunnel.clone(),
            welcome: Arc::new(welcome),
            from,
            certificate,
            roots: roots.clone(),
            control: tell,
            taken_over: taken_over.clone(),
        };
        let (id, replaced) = match self.registry.register(node, admitted.clone()) {
            Ok(entered) => entered,
            Err(refused) => {
                let (why, detail) = register_error(node, &refused);
                return Err(link.dismiss(&mut control, why, detail).await);
            }
        };
        let registered = Registration::new(self, node, id, &link.tunnel);
        retire_replaced(node, from, replaced);
        // A node that was revoked between the two checks was not registered yet and could not be disconnected.
        if let Some(why) = unwelcome() {
            link.tunnel.drain();
            return Err(link.dismiss(&mut control, GoAway::Unwelcome, why).await);
        }
        control.queue(&GatewayMessage::Registered)?;
        // Changes before the registration are sent here; later changes are sent to all registered tunnels.
        for line in ca_rotation::missing(&self.ca.get(), &admitted, || self.registry.connected()) {
            control.queue(&line)?;
        }
        if let Some(line) = listing(&admitted, &self.listed) {
            control.queue(&line)?;
        }
        self.metrics.registration("ok");
        info!(%node, %from, slot, ?instance, ?version, "{node} connected");
        Ok(TunnelSession {
            control,
            lines,
            taken_over,
            roots,
            drain: self.drain,
            registered,
        })
    }
}

impl TunnelSession {
    /// Passes messages both ways until the tunnel ends or one side leaves. A message that the edge does not take yet waits as
    /// long as the tunnel lives: streams continue meanwhile.
    async fn run(&mut self, link: &mut TunnelConnection) -> CloseReason {
        let tunnel = link.tunnel.clone();
        let mut leaving: Option<DrainingTunnel> = None;
        loop {
            let goes = leaving.is_some();
            let behind = self.control.is_behind();
            let message = tokio::select! {
                biased;
                ended = link.ended() => return CloseReason::Tunnel(ended),
                () = drained(&mut leaving) => {
                    return leaving.map_or(CloseReason::TakenOver, |leaving| leaving.end);
                }
                () = self.taken_over.cancelled(), if !goes => {
                    leaving = Some(DrainingTunnel::new(&tunnel, None, CloseReason::TakenOver));
                    continue;
                }
                Some(next) = self.lines.recv(), if !behind => *next,
                bytes = tunnel.turn(), if !behind => GatewayMessage::Window { bytes },
                heard = self.control.exchange() => match heard {
                    Ok(said) => {
                        if let Some(leave) = said.and_then(|said| self.hear(said, &tunnel)) {
                            leaving = Some(leave);
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
                leaving = Some(DrainingTunnel::new(
                    &tunnel,
                    None,
                    CloseReason::Dismissed(why, detail),
                ));
            }
            if let Err(error) = self.control.queue(&message) {
                return error.into();
            }
        }
    }

    /// Handles a message of the edge. Returns the draining tunnel, if the edge says that the tunnel leaves.
    fn hear(&self, line: EdgeMessage, tunnel: &Tunnel) -> Option<DrainingTunnel> {
        match line {
            EdgeMessage::Window { bytes } => tunnel.turn_over(bytes),
            EdgeMessage::Leave {
                detail,
                until_idle,
                serves,
            } => {
                debug!(?detail, until_idle, serves, "the edge is disconnecting");
                self.registered.leaves();
                if serves {
                    return None;
                }
                tunnel.drain();
                let until = (!until_idle).then(|| Instant::now() + self.drain);
                return Some(DrainingTunnel::new(
                    tunnel,
                    until,
                    CloseReason::Left(detail),
                ));
            }
            EdgeMessage::Roots { roots } => {
                self.roots.store(Some(Arc::new(ca_rotation::named(&roots))));
            }
            EdgeMessage::Welcome(_) => debug!("the edge sent a second welcome message"),
            EdgeMessage::Unknown => debug!("the edge sent a message of an unknown type"),
        }
        None
    }
}
