//! The tunnels that an edge has at one gateway.
//!
//! Each slot is one task that goes through the states of a tunnel:
//! 1. dial the gateways in turn, or the one address; on trouble wait (`trouble`, `changes`) and dial again;
//! 2. say hello (`session`); what the gateway refuses is trouble like any other;
//! 3. serve streams until the tunnel ends, which is trouble, or the gateway drains;
//! 4. on a drain, or with a new certificate, first go back to 1, and leave the old one when the new one stands: its
//!    streams go on there until they end. Where only one address is dialled a drain is waited for.
//!
//! Slot 0 always has a tunnel; a further one has it while the one before moves bulk.

use super::{
    bulk::BulkTracker,
    connected_gateways::{TunnelGroup, wrong_gateway_backoff},
    context::{LEAVING, TunnelContext, TunnelUnavailable},
    session::{SessionEnd, SessionHandle, SessionOwner, TunnelSession, request_drain},
};
use crate::control::{
    connect_error::ConnectError, dial::GatewayAddr, network_monitor::NetworkMonitor,
};
use crate::status::ANY;
use causeway_rt::{backoff::Backoff, log_throttle::FailureThrottle, task::TaskGroup};
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::{
    sync::{oneshot, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, info_span, warn};

/// The tunnels at one gateway. Cheap to clone.
#[derive(Clone)]
pub(super) struct TunnelSlots {
    links: Arc<TunnelContext>,
    /// Tracker of those of these slots that move bulk.
    bulk: Arc<BulkTracker>,
    party: TunnelGroup,
    /// The one address that is dialled.
    place: Option<GatewayAddr>,
    /// Addresses that names resolve to: the address is dialled for as long as it is among these. `None` if a gateway was found
    /// behind it (`discovery`): it is not dialled again for that gateway, since it may lead to any other.
    wanted: Option<watch::Receiver<BTreeSet<GatewayAddr>>>,
}

/// A tunnel that was dialled already, and what says since then that it is to be dialled anew.
pub(super) type PredialledTunnel = (TunnelSession, watch::Receiver<()>);

/// Tunnels that were asked to leave.
pub(super) struct Leaving {
    sessions: Arc<TaskGroup>,
    /// Time that their streams get once the edge stops.
    grace: Duration,
}

impl Leaving {
    /// Waits until their streams have ended: without a bound, until the edge stops.
    pub(super) async fn end(self, stop: &CancellationToken) {
        if stop
            .run_until_cancelled(self.sessions.idle())
            .await
            .is_some()
        {
            return;
        }
        let left = self.sessions.drain(self.grace).await;
        if left > 0 {
            info!(
                left,
                "tunnels were closed, although some of their streams had not ended in time"
            );
        }
    }
}

/// Why a slot looks at its tunnel again.
enum SlotEvent {
    Ended(ConnectError),
    /// Nothing to wait for but the loss of what this gateway is reached by.
    Reached(String),
    Draining,
    Renewed,
    Stopped,
}

impl TunnelSlots {
    /// Creates slots at any gateway that answers first.
    pub(super) fn anywhere(links: Arc<TunnelContext>) -> Self {
        Self {
            party: links.reached.party(),
            links,
            bulk: Arc::default(),
            place: None,
            wanted: None,
        }
    }

    /// At this place, for as long as it is among those `wanted` or its tunnel stands.
    pub(super) fn at(
        links: Arc<TunnelContext>,
        place: GatewayAddr,
        wanted: watch::Receiver<BTreeSet<GatewayAddr>>,
    ) -> Self {
        Self {
            wanted: Some(wanted),
            ..Self::found(links, place)
        }
    }

    /// At a gateway that this place may lead to, for as long as its tunnel stands.
    pub(super) fn found(links: Arc<TunnelContext>, place: GatewayAddr) -> Self {
        Self {
            place: Some(place),
            ..Self::anywhere(links)
        }
    }

    /// Like `run`, and waits for the streams of the tunnels.
    pub(super) async fn keep(self, begun: Option<PredialledTunnel>, changes: NetworkMonitor) {
        let stop = self.links.stop.clone();
        let leaving = self.run(begun, changes).await;
        leaving.end(&stop).await;
    }

    /// Keeps the tunnels, of which the first may have `begun`, until the edge stops, or until their place is wanted no more;
    /// then leaves. Returns the tunnels that still have streams.
    pub(super) async fn run(
        self,
        mut begun: Option<PredialledTunnel>,
        changes: NetworkMonitor,
    ) -> Leaving {
        let tasks = Arc::new(TaskGroup::default());
        let all = TaskGroup::default();
        let enough = self.links.stop.child_token();
        let most = u32::try_from(self.links.config.tunnels.max).unwrap_or(u32::MAX);
        for slot in 0..most {
            let (slots, enough, changes, tasks) =
                (self.clone(), enough.clone(), changes.clone(), tasks.clone());
            let begun = begun.take();
            all.spawn(info_span!("tunnel", slot), async move {
                if slot == 0 {
                    Box::pin(slots.hold((0, begun), &enough, changes, &tasks)).await;
                    // The additional tunnels end with the first one.
                    enough.cancel();
                } else {
                    Box::pin(slots.hold_while_bulky(slot, &enough, changes, &tasks)).await;
                }
            });
        }
        enough.cancelled().await;
        self.links.state.mended(&self.whose());
        if let Some(place) = self.named() {
            self.links.reached.answers(place, true);
        }
        // Each task ends once it has asked its tunnel to leave.
        all.drain(LEAVING).await;
        Leaving {
            grace: self.links.config.timeouts.drain + LEAVING,
            sessions: tasks,
        }
    }

    /// A further tunnel, for as long as there is bulk.
    async fn hold_while_bulky(
        &self,
        slot: u32,
        stop: &CancellationToken,
        changes: NetworkMonitor,
        tasks: &Arc<TaskGroup>,
    ) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.bulk.wait(slot - 1) => {}
            }
            let enough = stop.child_token();
            let idle = async {
                self.bulk.idle(self.links.config.tunnels.bulk_idle).await;
                info!("no bulk transfer any more: closing the additional tunnel");
                enough.cancel();
            };
            tokio::join!(
                enough.run_until_cancelled(idle),
                self.hold((slot, None), &enough, changes.clone(), tasks),
            );
        }
    }

    /// A first tunnel at another gateway than those that are reached.
    pub(super) async fn begin(&self) -> Result<PredialledTunnel, TunnelUnavailable> {
        // Subscribed first, so that a certificate that arrives meanwhile counts as new.
        let anew = self.links.anew.subscribe();
        Ok((self.connect(None, 0, None).await?, anew))
    }

    /// Keeps one slot's tunnel until `stop`, and dials it unless it has begun.
    async fn hold(
        &self,
        (slot, begun): (u32, Option<PredialledTunnel>),
        stop: &CancellationToken,
        mut changes: NetworkMonitor,
        tasks: &Arc<TaskGroup>,
    ) {
        let mut backoff = self.links.backoff();
        let mut said = FailureThrottle::default();
        let mut old: Option<SessionHandle> = None;
        let (mut begun, anew) = begun.unzip();
        let mut anew = anew.unwrap_or_else(|| self.links.anew.subscribe());
        while begun.is_some() || old.is_some() || self.is_wanted(slot) {
            // A change during an attempt causes another attempt at once.
            changes.forget();
            if begun.is_none() {
                anew.mark_unchanged();
            }
            let connected = Box::pin(self.connect(begun.take(), slot, old.as_ref()));
            let Some(connected) = stop.run_until_cancelled(connected).await else {
                break;
            };
            let (event, served) = match connected {
                Err(TunnelUnavailable::Trouble(trouble)) => (SlotEvent::Ended(trouble), None),
                Err(TunnelUnavailable::Reached(instance)) => (SlotEvent::Reached(instance), None),
                Ok(session) => {
                    backoff.reset();
                    said = FailureThrottle::default();
                    request_drain(old.take());
                    self.stand(session, (stop, &mut anew), tasks).await
                }
            };
            match event {
                SlotEvent::Stopped => {
                    request_drain(served);
                    break;
                }
                SlotEvent::Draining if self.place.is_some() => self.outlast(served, stop).await,
                SlotEvent::Draining => {
                    info!("the gateway is draining: connecting to another gateway");
                    old = served.map(SessionHandle::draining);
                }
                SlotEvent::Renewed => {
                    info!("reconnecting with this node's new certificate");
                    old = served;
                }
                SlotEvent::Reached(instance) if old.is_none() && self.is_to_stand_by(slot) => {
                    self.stand_by(&instance, stop).await;
                }
                // A load balancer led to another gateway than the one of these tunnels.
                SlotEvent::Reached(_) => {
                    let woken = (sleep(wrong_gateway_backoff(&mut backoff)), &mut anew, stop);
                    self.wait(woken, &mut backoff, old.as_ref()).await;
                    old = standing(old, &mut backoff);
                }
                SlotEvent::Ended(_) if old.is_none() && !self.is_wanted(slot) => {}
                SlotEvent::Ended(trouble) => {
                    let woken = (&mut changes, &mut anew, stop);
                    let pace = (&mut backoff, &mut said);
                    self.pause(&trouble, pace, woken, old.as_ref()).await;
                    old = standing(old, &mut backoff);
                }
            }
        }
        request_drain(old);
    }

    /// Dials, and says hello, unless that has been done.
    async fn connect(
        &self,
        begun: Option<TunnelSession>,
        slot: u32,
        old: Option<&SessionHandle>,
    ) -> Result<TunnelSession, TunnelUnavailable> {
        if let Some(session) = begun {
            return Ok(session);
        }
        let links = &self.links;
        let attempt = async {
            let dialled = if let Some(place) = &self.place {
                links.dialler.dial_at(place).await?
            } else {
                let avoid = old.filter(|old| old.drains).map(|old| &old.place);
                links.dialler.dial(&links.gateways.all(), avoid).await?
            };
            let whose = SessionOwner {
                party: self.party,
                slot,
                keeps: old.is_some_and(|old| !old.over.is_cancelled()),
                bulk: self.bulk.clone(),
            };
            TunnelSession::register(&self.links, dialled, whose).await
        };
        let attempted = attempt.await;
        // While an address does not respond, only its first tunnel is dialled.
        if let Some(place) = self.named().filter(|_| slot == 0) {
            let is_dead = matches!(&attempted, Err(TunnelUnavailable::Trouble(trouble)) if !trouble.is_refusal());
            links.reached.answers(place, !is_dead);
        }
        let outcome = match &attempted {
            Ok(_) => "registered",
            Err(TunnelUnavailable::Reached(_)) => "reached",
            Err(TunnelUnavailable::Trouble(trouble)) => trouble.word(),
        };
        self.links.metrics.attempted(outcome);
        attempted
    }

    /// The one address that is dialled, if names lead there and no search did.
    fn named(&self) -> Option<&GatewayAddr> {
        self.place.as_ref().filter(|_| self.wanted.is_some())
    }

    /// Whether this slot's tunnel is dialled when there is none. At a gateway that was found a further one is for as long as
    /// the first stands.
    fn is_wanted(&self, slot: u32) -> bool {
        match (&self.place, &self.wanted) {
            (None, _) => true,
            (Some(_), None) => slot > 0,
            (Some(place), Some(wanted)) => wanted.borrow().contains(place),
        }
    }

    /// Waits until no name leads to the one address any more.
    async fn unwanted(&self) {
        match self.place.as_ref().zip(self.wanted.clone()) {
            // An error means that the edge is stopping.
            Some((place, mut wanted)) => {
                drop(wanted.wait_for(|wanted| !wanted.contains(place)).await);
            }
            None => std::future::pending().await,
        }
    }

    /// A gateway that drains serves on until it closes the tunnel: there is no other place to go to.
    async fn outlast(&self, served: Option<SessionHandle>, stop: &CancellationToken) {
        let Some(served) = served else { return };
        info!("the gateway is draining");
        tokio::select! {
            () = served.over.cancelled() => {}
            () = stop.cancelled() => request_drain(Some(served)),
        }
    }

    /// Whether this slot waits where its gateway is reached already: not if it belongs to tunnels at another one.
    fn is_to_stand_by(&self, slot: u32) -> bool {
        slot == 0 && !self.links.reached.is_by(self.party)
    }

    /// Waits until the gateway of this instance is not reached elsewhere any more.
    async fn stand_by(&self, instance: &str, stop: &CancellationToken) {
        info!("another address already leads to this gateway: waiting");
        self.links.state.mended(&self.whose());
        tokio::select! {
            () = self.links.reached.lost(instance) => {}
            () = self.unwanted() => {}
            () = stop.cancelled() => {}
        }
    }

    /// Returns the gateway for which failures are reported.
    fn whose(&self) -> String {
        let place = self.place.as_ref();
        place.map_or_else(|| ANY.to_owned(), GatewayAddr::to_string)
    }

    /// Serves a tunnel with a task of its own, since it may outlive its slot's interest in it, until there is
    /// something to do for the slot.
    async fn stand(
        &self,
        mut session: TunnelSession,
        (stop, anew): (&CancellationToken, &mut watch::Receiver<()>),
        tasks: &Arc<TaskGroup>,
    ) -> (SlotEvent, Option<SessionHandle>) {
        let served = SessionHandle {
            place: session.place().clone(),
            drains: false,
            leave: CancellationToken::new(),
            over: CancellationToken::new(),
        };
        if self.place.is_none() {
            self.links.gateways.stood(&served.place.gateway);
        }
        let (leave, over) = (served.leave.clone(), served.over.clone().drop_guard());
        let (told, ended) = oneshot::channel();
        let gateway = served.place.gateway.clone();
        let (held, changed) = (self.links.held.clone(), anew.clone());
        let disbelieved = held.disbelieve(session.shown(), changed);
        tasks.spawn(info_span!("session"), async move {
            tokio::select! {
                () = session.serve(leave, told) => {}
                () = disbelieved => {
                    warn!(gateway, "the gateway's CA is no longer trusted (identity.ca): closed the tunnel");
                }
            }
            drop(over);
        });
        let event = tokio::select! {
            () = stop.cancelled() => SlotEvent::Stopped,
            // The sender lives at least as long as this task.
            _ = anew.changed() => SlotEvent::Renewed,
            finish = ended => match finish {
                Ok(SessionEnd::Draining) => SlotEvent::Draining,
                Ok(SessionEnd::Ended(trouble)) => SlotEvent::Ended(trouble),
                Err(_) => SlotEvent::Ended(ConnectError::silent("the tunnel was closed")),
            },
        };
        (event, Some(served))
    }

    /// Waits as long as the trouble asks for, or until there is something else to dial with.
    async fn pause(
        &self,
        trouble: &ConnectError,
        (backoff, said): (&mut Backoff, &mut FailureThrottle),
        (changes, anew, stop): (
            &mut NetworkMonitor,
            &mut watch::Receiver<()>,
            &CancellationToken,
        ),
        old: Option<&SessionHandle>,
    ) {
        // If another gateway is connected, the network works and only this address does not respond.
        let is_alone = self.place.is_none() || !self.links.reached.is_any();
        let delay = if is_alone {
            trouble.delay(backoff, rand::random())
        } else {
            trouble.delay_of_one(backoff, rand::random())
        };
        let (whose, refused) = (self.whose(), trouble.is_refusal());
        let what = match &self.place {
            Some(_) => format!("{whose}: {}", trouble.what()),
            None => trouble.what().to_owned(),
        };
        if said.is_news(&what) {
            warn!(reason = trouble.word(), what, retry_in = ?delay, "cannot open a tunnel");
        } else {
            debug!(reason = trouble.word(), what, retry_in = ?delay, "still cannot open a tunnel");
        }
        self.links.state.trouble(&whose, &what, refused, delay);
        if let Some(refusal) = trouble.identity_refusal() {
            self.links.rejoin.refusals.send_replace(Some(refusal));
        }
        let wait = async {
            let paused = async {
                if trouble.may_be_the_network() {
                    changes.wait(delay).await;
                } else {
                    sleep(delay).await;
                }
            };
            tokio::select! {
                () = paused => false,
                () = self.links.reached.none(), if !is_alone && !trouble.is_refusal() => true,
            }
        };
        let mut lost = false;
        let wait = async { lost = wait.await };
        self.wait((wait, anew, stop), backoff, old).await;
        if lost {
            // The network may have failed. Jitter for edges that lost their last gateway together.
            backoff.reset();
            sleep(backoff.silent(rand::random())).await;
        }
    }

    /// Waits for `pause`, or until there is something else to dial with, or nothing to dial for.
    async fn wait(
        &self,
        (pause, anew, stop): (
            impl Future<Output = ()>,
            &mut watch::Receiver<()>,
            &CancellationToken,
        ),
        backoff: &mut Backoff,
        old: Option<&SessionHandle>,
    ) {
        let old_is_over = async {
            match old {
                Some(old) => old.over.cancelled().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = pause => {}
            // The sender lives at least as long as this task.
            _ = anew.changed() => backoff.reset(),
            () = stop.cancelled() => {}
            () = old_is_over => {}
            // While the old tunnel is open, the next attempt is still made on schedule.
            () = self.unwanted(), if old.is_none() => {}
        }
    }
}

/// Returns the old tunnel if it stands. With its end the back-off begins anew: its gateway is probably restarting, and attempts
/// beside a tunnel that stood say nothing of how long that takes.
fn standing(old: Option<SessionHandle>, backoff: &mut Backoff) -> Option<SessionHandle> {
    let old = old?;
    if old.over.is_cancelled() {
        backoff.reset();
        return None;
    }
    Some(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_old_tunnel_resets_the_backoff() {
        let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_mins(1));
        let old = SessionHandle {
            place: GatewayAddr {
                gateway: "gateway:10262".to_owned(),
                address: None,
            },
            drains: true,
            leave: CancellationToken::new(),
            over: CancellationToken::new(),
        };
        let over = old.over.clone();
        let before: Vec<_> = (0..4).map(|_| backoff.silent(1.0)).collect();
        let old = standing(Some(old), &mut backoff);
        assert!(old.is_some() && backoff.silent(1.0) > before[0]);
        over.cancel();
        assert!(standing(old, &mut backoff).is_none());
        assert_eq!(backoff.silent(1.0), before[0]);
    }
}
