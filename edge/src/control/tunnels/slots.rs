//! Tunnels that an edge has at one gateway.
//!
//! Each slot is one task that goes through the states of a tunnel:
//! 1. Dial the gateways in turn, or the one address. After an error wait (`connect_error`, `network_monitor`) and dial again.
//! 2. Exchange the hellos (`session`). A refusal by the gateway is an error like any other.
//! 3. Serve streams until the tunnel ends, which is an error, or until the gateway drains.
//! 4. On a drain or with a new certificate, go back to step 1 and keep the old tunnel until the new one is open. The streams
//!    of the old tunnel continue there until they end. If there is only one address, wait for the end of the drain instead, or
//!    for a successor of the gateway at that address.
//!
//! Slot 0 always has a tunnel. A further slot has one while the slot before has bulk transfers.

use super::{
    bulk::BulkTracker,
    connected_gateways::{TunnelGroup, wrong_gateway_backoff},
    context::{LEAVE_TIMEOUT, TunnelContext, TunnelUnavailable},
    session::{SessionEnd, SessionHandle, SessionOwner, TunnelSession, request_drain},
};
use crate::control::{
    connect_error::ConnectError, dial::GatewayAddr, network_monitor::NetworkMonitor,
};
use crate::status::ANY_GATEWAY;
use causeway_rt::{backoff::Backoff, log_throttle::FailureThrottle, task::TaskGroup};
use std::{collections::BTreeSet, ops::ControlFlow, sync::Arc, time::Duration};
use tokio::{
    sync::{oneshot, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, info_span, warn};

/// Tunnels at one gateway. Cheap to clone.
#[derive(Clone)]
pub(super) struct TunnelSlots {
    context: Arc<TunnelContext>,
    /// Tracker of the slots with bulk transfers.
    bulk_tracker: Arc<BulkTracker>,
    group: TunnelGroup,
    /// The one address that is dialled, or `None` for any gateway.
    gateway_addr: Option<GatewayAddr>,
    /// Addresses that the gateways' names resolve to. The address is dialled as long as it is among these. `None` if a
    /// gateway was discovered behind the address (`discovery`): the address may lead to another gateway, so it is not dialled
    /// again for this one.
    resolved: Option<watch::Receiver<BTreeSet<GatewayAddr>>>,
    /// Token that requests all tunnels to leave. It is cancelled when the edge stops.
    leave: CancellationToken,
}

/// Tunnel that is already open, and the receiver that requests its replacement.
pub(super) type PredialledTunnel = (TunnelSession, watch::Receiver<()>);

/// Tunnels that were requested to leave.
pub(super) struct Leaving {
    sessions: Arc<TaskGroup>,
    /// Time that their streams get once the edge stops.
    grace: Duration,
}

impl Leaving {
    /// Waits until the streams of the tunnels have ended. The time is limited only once the edge stops.
    pub(super) async fn end(self, stop: &CancellationToken) {
        if stop
            .run_until_cancelled(self.sessions.wait_until_idle())
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

/// One of the slots, while its task runs.
struct Slot<'a> {
    slots: &'a TunnelSlots,
    number: u32,
    stop: &'a CancellationToken,
    /// Owner of the tasks that serve tunnels, which may outlive the slot's interest in them.
    tasks: &'a Arc<TaskGroup>,
    changes: NetworkMonitor,
    /// Changes whenever the tunnel is to be dialled anew.
    reconnect: watch::Receiver<()>,
    backoff: Backoff,
    throttle: FailureThrottle,
    /// An earlier tunnel, which stays open until the next one is.
    old_session: Option<SessionHandle>,
}

/// Reason why a slot handles its tunnel again.
enum SlotEvent {
    Ended(ConnectError),
    /// Another group owns the gateway, so this slot can only wait until that group loses it.
    AlreadyConnected(String),
    Draining,
    Reconnect,
    Stopped,
}

impl TunnelSlots {
    /// Creates slots at any gateway that answers first.
    pub(super) fn at_any_gateway(context: Arc<TunnelContext>) -> Self {
        Self {
            group: context.connected_gateways.new_group(),
            leave: context.stop.child_token(),
            context,
            bulk_tracker: Arc::default(),
            gateway_addr: None,
            resolved: None,
        }
    }

    /// Creates slots at this address. They run while the address is in `resolved` or its tunnel is open.
    pub(super) fn at_gateway(
        context: Arc<TunnelContext>,
        gateway_addr: GatewayAddr,
        resolved: watch::Receiver<BTreeSet<GatewayAddr>>,
    ) -> Self {
        Self {
            resolved: Some(resolved),
            ..Self::at_discovered_gateway(context, gateway_addr)
        }
    }

    /// Creates slots at a gateway that was discovered behind this address. They run while its tunnel is open.
    pub(super) fn at_discovered_gateway(
        context: Arc<TunnelContext>,
        gateway_addr: GatewayAddr,
    ) -> Self {
        Self {
            gateway_addr: Some(gateway_addr),
            ..Self::at_any_gateway(context)
        }
    }

    /// Returns the identifier of these tunnels.
    pub(super) fn group(&self) -> TunnelGroup {
        self.group
    }

    /// Returns the token that requests all tunnels to leave.
    pub(super) fn leave_token(&self) -> CancellationToken {
        self.leave.clone()
    }

    /// Runs the slots like [`Self::run`], and then waits for the streams of their tunnels.
    pub(super) async fn run_to_end(
        self,
        predialled: Option<PredialledTunnel>,
        changes: NetworkMonitor,
    ) {
        let stop = self.context.stop.clone();
        let (connected_gateways, group) = (self.context.connected_gateways.clone(), self.group);
        connected_gateways.add_group(group, self.leave.clone(), true);
        let leaving = self.run(predialled, changes).await;
        connected_gateways.remove_group(group);
        leaving.end(&stop).await;
    }

    /// Maintains the tunnels until they are requested to leave, or until the address is not resolved any more, and then leaves.
    /// The first slot may start with `predialled`. Returns the tunnels that still have streams.
    pub(super) async fn run(
        self,
        mut predialled: Option<PredialledTunnel>,
        changes: NetworkMonitor,
    ) -> Leaving {
        let tasks = Arc::new(TaskGroup::default());
        let slot_tasks = TaskGroup::default();
        let stop_slots = self.leave.child_token();
        let max_tunnels = u32::try_from(self.context.config.tunnels.max).unwrap_or(u32::MAX);
        for slot in 0..max_tunnels {
            let (slots, stop_slots, changes, tasks) = (
                self.clone(),
                stop_slots.clone(),
                changes.clone(),
                tasks.clone(),
            );
            let predialled = predialled.take();
            slot_tasks.spawn(info_span!("tunnel", slot), async move {
                if slot == 0 {
                    Box::pin(slots.run_slot((0, predialled), &stop_slots, changes, &tasks)).await;
                    // The additional tunnels end with the first one.
                    stop_slots.cancel();
                } else {
                    Box::pin(slots.run_bulk_slot(slot, &stop_slots, changes, &tasks)).await;
                }
            });
        }
        stop_slots.cancelled().await;
        self.context.status.clear_error(&self.gateway_label());
        if let Some(gateway_addr) = self.named_gateway() {
            self.context
                .connected_gateways
                .set_reachable(gateway_addr, true);
        }
        // Each task ends once it has asked its tunnel to leave.
        slot_tasks.drain(LEAVE_TIMEOUT).await;
        Leaving {
            grace: self.context.config.timeouts.drain + LEAVE_TIMEOUT,
            sessions: tasks,
        }
    }

    /// Maintains an additional tunnel while there are bulk transfers.
    async fn run_bulk_slot(
        &self,
        slot: u32,
        stop: &CancellationToken,
        changes: NetworkMonitor,
        tasks: &Arc<TaskGroup>,
    ) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.bulk_tracker.wait_for_bulk(slot - 1) => {}
            }
            let stop_slot = stop.child_token();
            let idle = async {
                self.bulk_tracker
                    .wait_until_idle(self.context.config.tunnels.bulk_idle)
                    .await;
                info!("no bulk transfer any more: closing the additional tunnel");
                stop_slot.cancel();
            };
            tokio::join!(
                stop_slot.run_until_cancelled(idle),
                self.run_slot((slot, None), &stop_slot, changes.clone(), tasks),
            );
        }
    }

    /// Opens the first tunnel at a gateway that is not connected yet.
    pub(super) async fn dial_first(&self) -> Result<PredialledTunnel, TunnelUnavailable> {
        // Subscribed first, so that a certificate that arrives meanwhile counts as new.
        let reconnect = self.context.reconnect.subscribe();
        Ok((self.connect(None, 0, None).await?, reconnect))
    }

    /// Maintains the tunnel of one slot until `stop`. Begins with `predialled`, or dials.
    async fn run_slot(
        &self,
        (number, predialled): (u32, Option<PredialledTunnel>),
        stop: &CancellationToken,
        changes: NetworkMonitor,
        tasks: &Arc<TaskGroup>,
    ) {
        let (predialled, reconnect) = predialled.unzip();
        let slot = Slot {
            slots: self,
            number,
            stop,
            tasks,
            changes,
            reconnect: reconnect.unwrap_or_else(|| self.context.reconnect.subscribe()),
            backoff: self.context.backoff(),
            throttle: FailureThrottle::default(),
            old_session: None,
        };
        slot.run(predialled).await;
    }

    /// Dials and exchanges the hellos, unless the tunnel is `predialled`.
    async fn connect(
        &self,
        predialled: Option<TunnelSession>,
        slot: u32,
        old_session: Option<&SessionHandle>,
    ) -> Result<TunnelSession, TunnelUnavailable> {
        if let Some(session) = predialled {
            return Ok(session);
        }
        let context = &self.context;
        let attempt = async {
            let dialled = if let Some(gateway_addr) = &self.gateway_addr {
                context.connector.dial_addr(gateway_addr).await?
            } else {
                let avoid = old_session
                    .filter(|old| old.is_draining && !old.successor.is_cancelled())
                    .map(|old| &old.gateway_addr);
                context
                    .connector
                    .dial(&context.gateways.all(), avoid)
                    .await?
            };
            let owner = SessionOwner {
                group: self.group,
                slot,
                only_held: old_session
                    .is_some_and(|old| !old.ended.is_cancelled() && !old.successor.is_cancelled()),
                is_discovered: self.gateway_addr.is_some() && self.resolved.is_none(),
                bulk_tracker: self.bulk_tracker.clone(),
            };
            TunnelSession::register(&self.context, dialled, owner).await
        };
        let attempted = attempt.await;
        // While an address does not respond, only its first tunnel is dialled.
        if let Some(gateway_addr) = self.named_gateway().filter(|_| slot == 0) {
            let is_dead = matches!(&attempted, Err(TunnelUnavailable::ConnectFailed(error)) if !error.is_refusal());
            context
                .connected_gateways
                .set_reachable(gateway_addr, !is_dead);
        }
        let outcome = match &attempted {
            Ok(_) => "registered",
            Err(TunnelUnavailable::AlreadyConnected(_)) => "reached",
            Err(TunnelUnavailable::ConnectFailed(error)) => error.label(),
        };
        self.context.metrics.count_attempt(outcome);
        attempted
    }

    /// Returns the one address that is dialled, if names resolve to it. Returns `None` for a discovered gateway.
    fn named_gateway(&self) -> Option<&GatewayAddr> {
        self.gateway_addr
            .as_ref()
            .filter(|_| self.resolved.is_some())
    }

    /// Whether a tunnel of this slot is dialled if there is none. For a discovered gateway only additional tunnels are
    /// dialled, while the first one is open.
    fn should_dial(&self, slot: u32) -> bool {
        match (&self.gateway_addr, &self.resolved) {
            (None, _) => true,
            (Some(_), None) => slot > 0,
            (Some(place), Some(wanted)) => wanted.borrow().contains(place),
        }
    }

    /// Waits until no name resolves to the one address any more.
    async fn wait_until_unresolved(&self) {
        match self.gateway_addr.as_ref().zip(self.resolved.clone()) {
            // An error means that the edge is stopping.
            Some((place, mut wanted)) => {
                drop(wanted.wait_for(|wanted| !wanted.contains(place)).await);
            }
            None => std::future::pending().await,
        }
    }

    /// Waits for the end of a draining tunnel, which serves until the gateway closes it, because there is no other address to
    /// dial. Returns the tunnel if the gateway has a successor at this address, which is dialled beside it.
    async fn wait_for_drain_end(
        &self,
        handle: Option<SessionHandle>,
        stop: &CancellationToken,
    ) -> Option<SessionHandle> {
        let handle = handle?;
        info!("the gateway is draining");
        let has_address = self.named_gateway().is_some();
        tokio::select! {
            () = handle.ended.cancelled() => None,
            () = stop.cancelled() => {
                request_drain(Some(handle));
                None
            }
            () = handle.successor.cancelled(), if has_address => {
                info!("the gateway has a successor at the same address: connecting to it");
                Some(handle)
            }
        }
    }

    /// Whether this slot waits while another group owns its gateway. It does not wait if its own group owns another gateway.
    fn should_stand_by(&self, slot: u32) -> bool {
        slot == 0 && !self.context.connected_gateways.has_group(self.group)
    }

    /// Waits until no other group owns the gateway with this instance name.
    async fn stand_by(&self, instance: &str, stop: &CancellationToken) {
        info!("another address already leads to this gateway: waiting");
        let connected_gateways = &self.context.connected_gateways;
        connected_gateways.mark_unavailable(self.group);
        connected_gateways.set_duplicate(self.group, true);
        self.context.status.clear_error(&self.gateway_label());
        tokio::select! {
            () = connected_gateways.wait_until_lost(instance) => {}
            () = self.wait_until_unresolved() => {}
            () = stop.cancelled() => {}
        }
        connected_gateways.set_duplicate(self.group, false);
    }

    /// Returns the gateway for which failures are reported.
    fn gateway_label(&self) -> String {
        let gateway_addr = self.gateway_addr.as_ref();
        gateway_addr.map_or_else(|| ANY_GATEWAY.to_owned(), GatewayAddr::to_string)
    }
}

impl Slot<'_> {
    /// Keeps the tunnel until `stop`, and dials it unless it has begun.
    async fn run(mut self, mut predialled: Option<TunnelSession>) {
        while predialled.is_some()
            || self.old_session.is_some()
            || self.slots.should_dial(self.number)
        {
            // A change during an attempt causes another attempt at once.
            self.changes.mark_seen();
            if predialled.is_none() {
                self.reconnect.mark_unchanged();
            }
            let old = self.old_session.as_ref();
            let connected = Box::pin(self.slots.connect(predialled.take(), self.number, old));
            let Some(connected) = self.stop.run_until_cancelled(connected).await else {
                break;
            };
            let (event, handle) = match connected {
                Err(TunnelUnavailable::ConnectFailed(error)) => (SlotEvent::Ended(error), None),
                Err(TunnelUnavailable::AlreadyConnected(instance)) => {
                    (SlotEvent::AlreadyConnected(instance), None)
                }
                Ok(session) => {
                    self.backoff.reset();
                    self.throttle = FailureThrottle::default();
                    request_drain(self.old_session.take());
                    self.serve_session(session).await
                }
            };
            if self.handle_event(event, handle).await.is_break() {
                break;
            }
        }
        request_drain(self.old_session);
    }

    /// Waits until the slot is to dial again. A tunnel that stays open until then becomes the old session.
    async fn handle_event(
        &mut self,
        event: SlotEvent,
        handle: Option<SessionHandle>,
    ) -> ControlFlow<()> {
        match event {
            SlotEvent::Stopped => {
                request_drain(handle);
                return ControlFlow::Break(());
            }
            SlotEvent::Draining if self.slots.gateway_addr.is_some() => {
                self.old_session = self.slots.wait_for_drain_end(handle, self.stop).await;
            }
            SlotEvent::Draining => {
                info!("the gateway is draining: connecting to another gateway");
                self.old_session = handle.map(SessionHandle::into_draining);
            }
            SlotEvent::Reconnect => {
                info!("reconnecting with this node's new certificate");
                self.old_session = handle;
            }
            SlotEvent::AlreadyConnected(instance)
                if self.old_session.is_none() && self.slots.should_stand_by(self.number) =>
            {
                self.slots.stand_by(&instance, self.stop).await;
            }
            // A load balancer led to another gateway than the one of these tunnels.
            SlotEvent::AlreadyConnected(_) => {
                let delay = wrong_gateway_backoff(&mut self.backoff);
                self.wait(sleep(delay)).await;
                self.old_session = if_open(self.old_session.take(), &mut self.backoff);
            }
            SlotEvent::Ended(_)
                if self.old_session.is_none() && !self.slots.should_dial(self.number) => {}
            SlotEvent::Ended(error) => {
                self.pause(&error).await;
                self.old_session = if_open(self.old_session.take(), &mut self.backoff);
            }
        }
        ControlFlow::Continue(())
    }

    /// Starts a task that serves the tunnel, and waits for the next event of the slot. The tunnel has its own task because it
    /// may stay open after the slot has replaced it.
    async fn serve_session(
        &mut self,
        mut session: TunnelSession,
    ) -> (SlotEvent, Option<SessionHandle>) {
        let handle = SessionHandle {
            gateway_addr: session.gateway_addr().clone(),
            is_draining: false,
            leave_token: CancellationToken::new(),
            successor: CancellationToken::new(),
            ended: CancellationToken::new(),
        };
        let context = &self.slots.context;
        if self.slots.gateway_addr.is_none() {
            context
                .gateways
                .mark_connected(&handle.gateway_addr.gateway);
        }
        let tokens = (handle.leave_token.clone(), handle.successor.clone());
        let end_guard = handle.ended.clone().drop_guard();
        let (end_tx, end_rx) = oneshot::channel();
        let gateway = handle.gateway_addr.gateway.clone();
        let identity_store = context.identity_store.clone();
        let untrusted = identity_store.wait_until_untrusted(session.take_gateway_chain());
        self.tasks.spawn(info_span!("session"), async move {
            tokio::select! {
                () = session.serve(tokens, end_tx) => {}
                why = untrusted => warn!(gateway, "{why}: closed the tunnel"),
            }
            drop(end_guard);
        });
        let event = tokio::select! {
            () = self.stop.cancelled() => SlotEvent::Stopped,
            // The sender lives at least as long as this task.
            _ = self.reconnect.changed() => SlotEvent::Reconnect,
            finish = end_rx => match finish {
                Ok(SessionEnd::Draining) => SlotEvent::Draining,
                Ok(SessionEnd::Ended(error)) => SlotEvent::Ended(error),
                Err(_) => SlotEvent::Ended(ConnectError::silent("the tunnel was closed")),
            },
        };
        (event, Some(handle))
    }

    /// Waits for the delay that the error requires, or until there is a new certificate.
    async fn pause(&mut self, error: &ConnectError) {
        let (slots, context) = (self.slots, &self.slots.context);
        if self.number == 0 && self.old_session.is_none() {
            context.connected_gateways.mark_unavailable(slots.group);
        }
        // If another gateway is connected, the network works and only this address does not respond.
        let is_only_address =
            slots.gateway_addr.is_none() || !context.connected_gateways.is_any_connected();
        let delay = if is_only_address {
            error.delay(&mut self.backoff, rand::random())
        } else {
            error.delay_while_connected(&mut self.backoff, rand::random())
        };
        let (label, refused) = (slots.gateway_label(), error.is_refusal());
        let what = match &slots.gateway_addr {
            Some(_) => format!("{label}: {}", error.detail()),
            None => error.detail().to_owned(),
        };
        if self.throttle.should_log(&what) {
            warn!(reason = error.label(), what, retry_in = ?delay, "cannot open a tunnel");
        } else {
            debug!(reason = error.label(), what, retry_in = ?delay, "still cannot open a tunnel");
        }
        context.status.set_error(&label, &what, refused, delay);
        if let Some(refusal) = error.identity_refusal() {
            context.rejoin.refusals.send_replace(Some(refusal));
        }
        let mut changes = self.changes.clone();
        let wait = async {
            let paused = async {
                if error.may_be_network_error() {
                    changes.sleep_unless_changed(delay).await;
                } else {
                    sleep(delay).await;
                }
            };
            tokio::select! {
                () = paused => false,
                () = context.connected_gateways.wait_until_none(), if !is_only_address && !error.is_refusal() => true,
            }
        };
        let mut all_lost = false;
        let wait = async { all_lost = wait.await };
        self.wait(wait).await;
        if all_lost {
            // The network may have failed. Jitter for edges that lost their last gateway together.
            self.backoff.reset();
            sleep(self.backoff.silent(rand::random())).await;
        }
    }

    /// Waits for `pause`, for a new certificate, or until there is no reason to dial any more.
    async fn wait(&mut self, pause: impl Future<Output = ()>) {
        let old_ended = async {
            match &self.old_session {
                Some(old_session) => old_session.ended.cancelled().await,
                None => std::future::pending().await,
            }
        };
        let successor_found = async {
            match &self.old_session {
                Some(old_session) if !old_session.successor.is_cancelled() => {
                    old_session.successor.cancelled().await;
                }
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            () = pause => {}
            // The sender lives at least as long as this task.
            _ = self.reconnect.changed() => self.backoff.reset(),
            () = self.stop.cancelled() => {}
            () = old_ended => {}
            () = successor_found => self.backoff.reset(),
            // While the old tunnel is open, the next attempt is still made on schedule.
            () = self.slots.wait_until_unresolved(), if self.old_session.is_none() => {}
        }
    }
}

/// Returns the old tunnel if it is still open. If it has ended, resets the back-off: its gateway is probably restarting, and
/// earlier attempts beside an open tunnel do not show how long that takes.
fn if_open(old_session: Option<SessionHandle>, backoff: &mut Backoff) -> Option<SessionHandle> {
    let old_session = old_session?;
    if old_session.ended.is_cancelled() {
        backoff.reset();
        return None;
    }
    Some(old_session)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_old_tunnel_resets_the_backoff() {
        let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_mins(1));
        let old = SessionHandle {
            gateway_addr: GatewayAddr {
                gateway: "gateway:10262".to_owned(),
                address: None,
            },
            is_draining: true,
            leave_token: CancellationToken::new(),
            successor: CancellationToken::new(),
            ended: CancellationToken::new(),
        };
        let over = old.ended.clone();
        let before: Vec<_> = (0..4).map(|_| backoff.silent(1.0)).collect();
        let old = if_open(Some(old), &mut backoff);
        assert!(old.is_some() && backoff.silent(1.0) > before[0]);
        over.cancel();
        assert!(if_open(old, &mut backoff).is_none());
        assert_eq!(backoff.silent(1.0), before[0]);
    }
}
