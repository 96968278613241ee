//! The conversation with one edge: hello, registration, lines both ways, and the end.
//!
//! HTTP/2 begins on the core of the node. The gateway says hello and hears who the edge is, within a bound.
//! The edge is judged: certificate, version, known node. Its tunnel is registered; what that replaced is
//! told. Then lines pass until the tunnel ends, or one end sends the other away. A tunnel from which another one
//! has taken over closes when its last stream has ended by itself. The guard of the
//! registration unregisters on every path, and only what it has registered.

use super::{
    Admission, Arrived,
    end::End,
    link::{Leaving, Link, Registered, explain, over, retire},
};
use crate::control::{
    announce::listing,
    expel::{postponement, retired, unwelcome},
    rotation,
};
use crate::state::{Admitted, registry::Shown};
use arc_swap::ArcSwapOption;
use causeway_certs::{Fingerprint, NodeName, PeerRefused};
use causeway_tunnel::{
    Ended, Tunnel,
    hello::{Control, ControlError, Dismissal, Hello, ToEdge, ToGateway, Welcome},
    wire,
};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

/// Lines that wait for an edge; one that does not read them is about to end.
const LINES: usize = 8;
/// Longest name that an edge may give its process.
const MAX_INSTANCE: usize = 64;

/// Sets the tunnel to what the edge says of itself.
fn heed(tunnel: &Tunnel, welcome: &Welcome) {
    if welcome.turns {
        tunnel.give_turns();
    }
    if let Some(bytes) = welcome.bulk_after {
        tunnel.load().set_bulk(bytes);
    }
    tunnel.allow_long_targets(welcome.long_targets);
    tunnel.allow_upgrade_bodies(welcome.upgrade_bodies);
}

/// Talks with an edge until its tunnel is gone.
pub(super) async fn run(admission: Arc<Admission>, arrived: Box<Arrived>) {
    let (node, from) = (arrived.node.clone(), arrived.from);
    let certificate = arrived.certificate.clone().unwrap_or_default();
    // What comes once is boxed and gone when the tunnel idles.
    let mut link = match Box::pin(Link::open(&admission, arrived)).await {
        Ok(link) => link,
        Err(ended) => {
            debug!(why = %ended, "an edge hung up before its hello");
            return admission.metrics.registration(ended.word());
        }
    };
    let (node, end) = match Box::pin(admission.hello(&mut link, node, (from, certificate))).await {
        Ok((mut conversation, node)) => {
            if let Some(reading) = &admission.reading {
                reading.stir();
            }
            let end = conversation.talk(&mut link).await;
            let ended = link.close().await;
            let end = end.blame(ended);
            admission.metrics.tunnel_ended(end.word());
            (node, end)
        }
        Err((name, end)) => {
            let end = match (end, link.close().await) {
                // An edge that broke the protocol did not just hang up.
                (End::Control(_), Ended::Failed(why)) => End::Tunnel(Ended::Failed(why)),
                (end, _) => end,
            };
            admission.metrics.registration(end.word());
            return end.log_refusal(&name, from, &admission.early);
        }
    };
    info!("{node} disconnected: {end}");
}

/// What both ends say once the tunnel is registered.
struct Conversation {
    control: Control,
    lines: mpsc::Receiver<Box<ToEdge>>,
    /// Another tunnel has taken over.
    taken_over: CancellationToken,
    /// What the edge believes.
    roots: Arc<ArcSwapOption<Vec<Fingerprint>>>,
    drain: Duration,
    registered: Registered,
}

impl Admission {
    /// Says hello, judges the answer, registers. An error comes with the best name there is.
    async fn hello(
        &self,
        link: &mut Link,
        node: Result<NodeName, PeerRefused>,
        shown: (SocketAddr, Shown),
    ) -> Result<(Conversation, NodeName), (String, End)> {
        let name = node
            .as_ref()
            .map_or_else(|_| "(unknown)".to_owned(), ToString::to_string);
        if let Ok(node) = &node
            && !self.can_judge(node, link.bound / 2).await
        {
            let end = self.postpone(link, &name).await;
            return Err((name, end));
        }
        // Who is refused whatever it says is refused for that, and not for having said nothing.
        let refused = match &node {
            Ok(node) => match self.arrive(node, link.bound).await {
                Ok(()) => unwelcome(&self.nodes, node, &shown.1),
                Err(why) => Some(why),
            },
            Err(refused) => Some(refused.to_string()),
        };
        let failed = |end: End| match (end, &refused) {
            (End::Control(_), Some(why)) => (
                name.clone(),
                End::Dismissed(Dismissal::Unwelcome, why.clone()),
            ),
            (end, _) => (name.clone(), end),
        };
        let asked = timeout(link.bound, self.ask(link, &name)).await;
        let (mut control, heard) = asked
            .map_err(|_| failed(ControlError::TooSlow(link.bound).into()))?
            .map_err(|error| failed(error.into()))?;
        let welcome = match heard {
            Ok(welcome) => welcome,
            Err(error @ (ControlError::TooLong | ControlError::Malformed(_))) => {
                let detail = error.to_string();
                let end = link
                    .dismiss(&mut control, Dismissal::Malformed, detail)
                    .await;
                return Err(failed(end));
            }
            Err(error) => return Err(failed(error.into())),
        };
        let judged = match (node, &refused) {
            (Ok(node), None) => Self::judge(&welcome).map(|()| node),
            (_, why) => Err((Dismissal::Unwelcome, why.clone().unwrap_or_default())),
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

    /// Has an edge come again that cannot be judged yet.
    async fn postpone(&self, link: &mut Link, name: &str) -> End {
        // One that does not listen comes again as well.
        if let Ok(Ok((mut control, _))) = timeout(link.bound, self.ask(link, name)).await {
            link.send_away(&mut control, &postponement()).await;
        }
        End::Early
    }

    /// Notes a node that nobody has let join, where that is not asked for.
    async fn arrive(&self, node: &NodeName, bound: Duration) -> Result<(), String> {
        if !self.tls.load().lets_any_in() {
            return Ok(());
        }
        // Half of what the edge waits for its hello: it is to hear why.
        let noted = timeout(bound / 2, self.ledger.arrived(node)).await;
        let late = || format!("the data directory was not written within {:?}", bound / 2);
        let noted = noted.map_or_else(
            |_| Err(late()),
            |noted| noted.map_err(|why| why.to_string()),
        );
        noted.map_err(|why| {
            tracing::error!(%node, %why, "a node that comes first cannot be noted");
            format!("node {node} cannot be noted at this gateway; its log says why")
        })
    }

    /// Opens the control stream, says hello, and hears one line.
    async fn ask(
        &self,
        link: &Link,
        node: &str,
    ) -> Result<(Control, Result<Welcome, ControlError>), ControlError> {
        let mut control = link.tunnel.control().await?;
        let (told, own) = (self.advertised.all(), &self.settings.advertise);
        let hello = Hello {
            protocol: wire::VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            gateway: own.first().map_or("gateway", String::as_str).to_owned(),
            instance: Some(self.instance.to_string()),
            node: node.to_owned(),
            gateways: told.gateways,
            replicas: told.replicas,
        };
        control.tell(&ToEdge::Hello(hello)).await?;
        let heard = control.hear().await.and_then(|line| match line {
            ToGateway::Welcome(welcome) => Ok(*welcome),
            _ => Err(ControlError::Closed),
        });
        Ok((control, heard))
    }

    /// Whether an edge that says this may stay.
    fn judge(welcome: &Welcome) -> Result<(), (Dismissal, String)> {
        if welcome.protocol != wire::VERSION {
            let detail = format!(
                "the edge speaks version {} of the tunnel's protocol and this gateway {}",
                welcome.protocol,
                wire::VERSION
            );
            return Err((Dismissal::Malformed, detail));
        }
        let instance = welcome.instance.as_bytes();
        if instance.is_empty() || instance.len() > MAX_INSTANCE {
            let detail = format!(
                "an instance has 1 to {MAX_INSTANCE} bytes, not {}",
                instance.len()
            );
            return Err((Dismissal::Malformed, detail));
        }
        Ok(())
    }

    /// Enters the tunnel and tells what it replaced.
    async fn register(
        &self,
        link: &mut Link,
        mut control: Control,
        node: &NodeName,
        (welcome, (from, certificate)): (Welcome, (SocketAddr, Shown)),
    ) -> Result<Conversation, End> {
        let by = certificate.clone();
        let unwelcome = || {
            let retired = || retired(self.tls.load().believes(&by), node, &by);
            unwelcome(&self.nodes, node, &by).or_else(retired)
        };
        // An edge may take its time to say its welcome; nobody makes room for one that is not welcome any more.
        if let Some(why) = unwelcome() {
            return Err(link.dismiss(&mut control, Dismissal::Unwelcome, why).await);
        }
        let (tell, lines) = mpsc::channel(LINES);
        let taken_over = CancellationToken::new();
        let version = welcome.version.clone();
        let (slot, instance) = (welcome.slot, welcome.instance.clone());
        heed(&link.tunnel, &welcome);
        let roots = welcome.roots.as_deref().map(rotation::named);
        let roots = Arc::new(ArcSwapOption::new(roots.map(Arc::new)));
        let admitted = Admitted {
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
                let (why, detail) = explain(node, &refused);
                return Err(link.dismiss(&mut control, why, detail).await);
            }
        };
        let registered = Registered::new(self, node, id, &link.tunnel);
        retire(node, from, replaced);
        // Whoever was sent away between the two was not here to be sent away.
        if let Some(why) = unwelcome() {
            link.tunnel.drain();
            return Err(link.dismiss(&mut control, Dismissal::Unwelcome, why).await);
        }
        control.queue(&ToEdge::Registered)?;
        // What changed before it was registered is told here, and what changes now to all that are.
        for line in rotation::missing(&self.ca.get(), &admitted, || self.registry.connected()) {
            control.queue(&line)?;
        }
        if let Some(line) = listing(&admitted, &self.listed) {
            control.queue(&line)?;
        }
        self.metrics.registration("ok");
        info!(%node, %from, slot, ?instance, ?version, "{node} connected");
        Ok(Conversation {
            control,
            lines,
            taken_over,
            roots,
            drain: self.drain,
            registered,
        })
    }
}

impl Conversation {
    /// Passes lines both ways until the tunnel ends or one end leaves. A line that the edge does not take yet waits for as
    /// long as the tunnel lives: streams go on meanwhile.
    async fn talk(&mut self, link: &mut Link) -> End {
        let tunnel = link.tunnel.clone();
        let mut leaving: Option<Leaving> = None;
        loop {
            let goes = leaving.is_some();
            let behind = self.control.is_behind();
            let message = tokio::select! {
                biased;
                ended = link.ended() => return End::Tunnel(ended),
                () = over(&mut leaving) => {
                    return leaving.map_or(End::TakenOver, |leaving| leaving.end);
                }
                () = self.taken_over.cancelled(), if !goes => {
                    leaving = Some(Leaving::new(&tunnel, None, End::TakenOver));
                    continue;
                }
                Some(next) = self.lines.recv(), if !behind => *next,
                bytes = tunnel.turn(), if !behind => ToEdge::Window { bytes },
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
            if let ToEdge::Dismiss { why, detail, .. } = &message {
                let (why, detail) = (*why, detail.clone());
                if why != Dismissal::Superseded {
                    return link.dismiss(&mut self.control, why, detail).await;
                }
                // The other process may live as well: its streams go on until they end.
                leaving = Some(Leaving::new(&tunnel, None, End::Dismissed(why, detail)));
            }
            if let Err(error) = self.control.queue(&message) {
                return error.into();
            }
        }
    }

    /// Takes up a line of the edge. Returns how the tunnel leaves, if the edge says that it does.
    fn hear(&self, line: ToGateway, tunnel: &Tunnel) -> Option<Leaving> {
        match line {
            ToGateway::Window { bytes } => tunnel.turn_over(bytes),
            ToGateway::Leave {
                detail,
                until_idle,
                serves,
            } => {
                debug!(?detail, until_idle, serves, "the edge leaves");
                self.registered.leaves();
                if serves {
                    return None;
                }
                tunnel.drain();
                let until = (!until_idle).then(|| Instant::now() + self.drain);
                return Some(Leaving::new(tunnel, until, End::Left(detail)));
            }
            ToGateway::Roots { roots } => {
                self.roots.store(Some(Arc::new(rotation::named(&roots))));
            }
            ToGateway::Welcome(_) => debug!("the edge says a second welcome"),
            ToGateway::Unknown => debug!("the edge says something that is not known here"),
        }
        None
    }
}
