//! Selection of the current source, and the switch to another one. [`source_policy`](super::source_policy) decides which
//! source to use, and this module gathers the facts for that decision.
//!
//! The selection is repeated when another leader is named, when a gateway connects or disconnects, when a source ends, and
//! every 10 s. Stores follow the selected source (`sync`). After a switch a store reconnects and continues from its version,
//! so its own clients do not notice the switch. A leader that failed is probed until it has a fresh view again.

use super::{
    gateway_source::GatewaySource,
    member_server::MemberTls,
    member_source::{MemberSource, RESPONSE_TIMEOUT},
    membership::Membership,
    selected_source::{SelectedSource, SourceKind, SourceLost},
    source_policy::{Freshness, SelectionInput, SourceChoice, choose_source, freshest_member},
};
use crate::metrics::Metrics;
use causeway_rt::task::TaskGroup;
use causeway_tunnel::control_stream::NodePoolMember;
use causeway_watch_cache::{ListWatch, ReflectorError, Store, WatchCache};
use futures_util::{StreamExt, future::BoxFuture, stream::iter};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout_at},
};
use tracing::info;

/// Time without a tunnel after which gateways count as unreachable. A restart of a gateway must not cause a switch.
const GATEWAY_LOST_AFTER: Duration = Duration::from_secs(5);
/// Interval at which the selection is repeated in any case.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Time between the request to the leader and the requests to the other members.
const LEADER_HEAD_START: Duration = Duration::from_millis(300);
/// Maximum number of simultaneous requests to members.
const MAX_CONCURRENT_REQUESTS: usize = 16;
/// Time that the other members have to answer, once one with a fresh view has answered.
const STRAGGLER_WAIT: Duration = Duration::from_millis(300);
/// Shortest and longest pause between two rounds of requests to all members. Each round costs each member a handshake.
const POLL_BACKOFF_MIN: Duration = Duration::from_secs(1);
const POLL_BACKOFF_MAX: Duration = Duration::from_secs(40);

/// Selects the source that the API cache is filled from, and switches it when the source fails.
pub(super) struct SourceSelector {
    pub(super) node: String,
    pub(super) cache: Arc<WatchCache>,
    pub(super) membership: Membership,
    pub(super) tls: MemberTls,
    pub(super) tasks: Arc<TaskGroup>,
    pub(super) gateway_source: Arc<GatewaySource>,
    /// Number of open tunnels.
    pub(super) tunnel_count: watch::Receiver<usize>,
    pub(super) selected: watch::Sender<Arc<SelectedSource>>,
    pub(super) source_lost: mpsc::Receiver<SourceLost>,
    pub(super) metrics: Arc<Metrics>,
}

/// Facts about the leader and the other members, and the requests in progress.
#[derive(Default)]
struct SelectorState {
    has_leader_failed: bool,
    /// Time since when the leader has not answered.
    leader_silent_since: Option<Instant>,
    /// Request for the freshness of the leader's view, once the leader failed.
    leader_check: Option<BoxFuture<'static, Option<Freshness>>>,
    /// Request to all members for the one with the freshest view.
    poll: Option<BoxFuture<'static, Option<NodePoolMember>>>,
    /// Pause before the next round of requests.
    poll_pause: Duration,
    /// Time until which a gateway counts as reachable even without a tunnel.
    gateway_ok_until: Option<Instant>,
    /// Whether a tunnel was open at the last check.
    had_tunnel: bool,
}

impl SourceSelector {
    /// Selects the source for as long as it is polled.
    pub(super) async fn run(mut self) {
        let mut state = SelectorState {
            gateway_ok_until: Some(Instant::now() + GATEWAY_LOST_AFTER),
            ..SelectorState::default()
        };
        let mut members = self.membership.changes();
        let mut poll_tick = interval(POLL_INTERVAL);
        poll_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_leader = self.leader();
        loop {
            state.update_tunnel_state(*self.tunnel_count.borrow() > 0);
            self.update_source(&mut state);
            tokio::select! {
                view = poll_pending(&mut state.leader_check) => {
                    state.leader_check = None;
                    if view.is_some_and(Freshness::is_fresh) {
                        state.reset_leader();
                    }
                }
                best = poll_pending(&mut state.poll) => {
                    state.poll = None;
                    self.handle_poll_result(best, &mut state);
                }
                _ = members.changed() => {
                    members.mark_unchanged();
                    let leader = self.leader();
                    // A newly announced leader, or a leader with a new address, has not failed yet.
                    if leader != last_leader {
                        last_leader = leader;
                        state.reset_leader();
                    }
                    state.poll = None;
                }
                _ = self.tunnel_count.changed() => {}
                () = sleep_until_some(state.gateway_ok_until) => state.gateway_ok_until = None,
                Some(lost) = self.source_lost.recv() => self.handle_source_lost(&lost, &mut state),
                _ = poll_tick.tick() => if state.has_leader_failed && state.leader_check.is_none() {
                    state.leader_check = self.check_leader();
                },
            }
        }
    }

    fn desired_source(&self, state: &SelectorState) -> SourceChoice {
        let membership = self.membership.current();
        choose_source(SelectionInput {
            node: &self.node,
            members: &membership,
            has_leader_failed: state.has_leader_failed,
            is_gateway_reachable: *self.tunnel_count.borrow() > 0
                || state.gateway_ok_until.is_some(),
        })
    }

    /// Switches to the source that should be used now. If that depends on the members' views, starts the requests to the
    /// members.
    fn update_source(&self, state: &mut SelectorState) {
        let current = self.selected.borrow().kind.clone();
        let kind = match self.desired_source(state) {
            SourceChoice::Gateway => SourceKind::Gateway,
            SourceChoice::Leader(leader) => SourceKind::Leader(leader),
            SourceChoice::Freshest(members) => match &current {
                SourceKind::Member(member) if members.contains(member) => return,
                _ => {
                    if state.poll.is_none() {
                        state.poll = Some(self.poll_members(&members, state.poll_pause));
                    }
                    SourceKind::Unselected
                }
            },
        };
        if kind != SourceKind::Unselected {
            (state.poll, state.poll_pause) = (None, Duration::ZERO);
        }
        if kind != current {
            self.switch_to(kind);
        }
    }

    fn switch_to(&self, kind: SourceKind) {
        let source: Option<Arc<dyn ListWatch>> = match &kind {
            SourceKind::Unselected => None,
            SourceKind::Gateway => Some(self.gateway_source.clone()),
            SourceKind::Leader(member) | SourceKind::Member(member) => {
                Some(Arc::new(self.member_source(member)))
            }
        };
        info!(at = %kind, "API cache source changed");
        self.metrics.count_source_change();
        let generation = self.selected.borrow().generation + 1;
        let leaves_gateway = kind != SourceKind::Gateway;
        self.selected.send_replace(Arc::new(SelectedSource {
            generation,
            kind,
            source,
        }));
        if leaves_gateway {
            self.gateway_source.disconnect();
        }
    }

    fn member_source(&self, member: &NodePoolMember) -> MemberSource {
        MemberSource::new(member.clone(), self.tls.clone(), self.tasks.clone())
    }

    /// Handles the end of a store's source.
    fn handle_source_lost(&self, lost: &SourceLost, state: &mut SelectorState) {
        let selected = self.selected.borrow().clone();
        // One disconnected store does not move the others to another source.
        if lost.generation != selected.generation
            || self.cache.stores().iter().any(|store| is_in_touch(store))
        {
            return;
        }
        let is_broken = matches!(lost.error, ReflectorError::Broken(_));
        match &selected.kind {
            SourceKind::Unselected => {}
            // An unreachable gateway is dialled again, and then another one if it is still unreachable.
            SourceKind::Gateway if is_broken => {}
            SourceKind::Gateway => self.gateway_source.switch_gateway(),
            SourceKind::Leader(leader) => {
                if state.is_leader_failed(is_broken, lost.duration) {
                    info!(node = leader.node, why = ?lost.error, "cannot read from the pool leader");
                    state.has_leader_failed = true;
                }
            }
            SourceKind::Member(_) => self.switch_to(SourceKind::Unselected),
        }
    }

    /// Handles the result of a round of requests to the members.
    fn handle_poll_result(&self, found: Option<NodePoolMember>, state: &mut SelectorState) {
        match found {
            Some(member) => self.switch_to(SourceKind::Member(member)),
            None => {
                state.poll_pause = (state.poll_pause * 2).clamp(POLL_BACKOFF_MIN, POLL_BACKOFF_MAX);
            }
        }
    }

    /// Returns the path by which the freshness of a view is checked. The first resource represents all resources.
    fn path(&self) -> Option<String> {
        let first = self.cache.stores().first()?;
        Some(first.resource().path())
    }

    /// Returns the leader if it is another node.
    fn leader(&self) -> Option<NodePoolMember> {
        let membership = self.membership.current();
        let leader = membership.leader.filter(|leader| *leader != self.node)?;
        let mut members = membership.members.into_iter();
        members.find(|member| member.node == leader)
    }

    fn check_leader(&self) -> Option<BoxFuture<'static, Option<Freshness>>> {
        let (leader, path) = (self.member_source(&self.leader()?), self.path()?);
        Some(Box::pin(async move { leader.freshness(&path).await }))
    }

    /// Requests the freshness of all members' views, after a pause. The leader is the first of `members`.
    fn poll_members(
        &self,
        members: &[NodePoolMember],
        poll_pause: Duration,
    ) -> BoxFuture<'static, Option<NodePoolMember>> {
        let members: Vec<_> = members
            .iter()
            .map(|member| self.member_source(member))
            .collect();
        let path = self.path().unwrap_or_default();
        let stores = self.cache.stores();
        let has_a_view = stores.iter().all(|store| store.status().synced);
        // Jitter for members that lost their gateway at the same time.
        let pause = poll_pause.mul_f64(1.0 - rand::random::<f64>() / 4.0);
        Box::pin(async move {
            sleep(pause).await;
            freshest_member(query_freshness(members, &path).await, has_a_view)
        })
    }
}

impl SelectorState {
    /// Records whether a tunnel is open.
    fn update_tunnel_state(&mut self, has_tunnel: bool) {
        if has_tunnel {
            self.had_tunnel = true;
            self.gateway_ok_until = None;
        } else if std::mem::take(&mut self.had_tunnel) {
            self.gateway_ok_until = Some(Instant::now() + GATEWAY_LOST_AFTER);
        }
    }

    /// Forgets the failures of the leader.
    fn reset_leader(&mut self) {
        (
            self.has_leader_failed,
            self.leader_silent_since,
            self.leader_check,
        ) = (false, None, None);
    }

    /// Whether the leader has failed, after its source has ended. A leader that refuses or reports a stale view has failed at
    /// once. A leader that does not answer has failed after the response timeout.
    fn is_leader_failed(&mut self, is_broken: bool, duration: Duration) -> bool {
        let now = Instant::now();
        // The timeout of a leader that was connected until now starts now.
        let since = if duration > RESPONSE_TIMEOUT + POLL_INTERVAL / 20 {
            self.leader_silent_since = None;
            now
        } else {
            now.checked_sub(duration).unwrap_or(now)
        };
        let since = *self.leader_silent_since.get_or_insert(since);
        !is_broken || now.duration_since(since) + POLL_INTERVAL / 50 >= RESPONSE_TIMEOUT
    }
}

async fn sleep_until_some(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// Waits for the result of the request, or for ever if there is none.
async fn poll_pending<T>(request: &mut Option<BoxFuture<'static, T>>) -> T {
    match request {
        Some(request) => request.await,
        None => std::future::pending().await,
    }
}

fn is_in_touch(store: &Store) -> bool {
    let status = store.status();
    status.synced && status.lost.is_none()
}

/// Returns the views of all members that answer in time, in the order of `members`.
async fn query_freshness(
    members: Vec<MemberSource>,
    path: &str,
) -> Vec<(NodePoolMember, Freshness)> {
    let all: Vec<_> = members.iter().cloned().enumerate().collect();
    let requests = all.into_iter().map(|(index, member)| {
        let path = path.to_owned();
        async move {
            if index > 0 {
                sleep(LEADER_HEAD_START).await;
            }
            (index, member.freshness(&path).await)
        }
    });
    let mut requests = iter(requests).buffer_unordered(MAX_CONCURRENT_REQUESTS);
    let (mut responses, mut deadline) = (Vec::new(), Instant::now() + POLL_BACKOFF_MAX);
    while let Ok(Some((nth, view))) = timeout_at(deadline, requests.next()).await {
        let Some(view) = view else { continue };
        if view.is_fresh() {
            deadline = deadline.min(Instant::now() + STRAGGLER_WAIT);
        }
        responses.push((nth, view));
    }
    responses.sort_by_key(|(nth, _)| *nth);
    let member = |nth: usize| members.get(nth).map(|source| source.member.clone());
    let ordered = responses.into_iter();
    ordered
        .filter_map(|(nth, view)| Some((member(nth)?, view)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn a_leader_has_five_seconds_to_answer_unless_it_reports_stale() {
        let second = Duration::from_secs(1);
        assert!(SelectorState::default().is_leader_failed(false, second));
        // A silent leader uses up the whole time at once.
        assert!(SelectorState::default().is_leader_failed(true, RESPONSE_TIMEOUT));
        // A leader that refuses connections gets repeated requests.
        let mut refuses = SelectorState::default();
        for _ in 0..5 {
            assert!(!refuses.is_leader_failed(true, Duration::ZERO));
            advance(second).await;
        }
        assert!(refuses.is_leader_failed(true, Duration::ZERO));
        // The timeout of a leader that was connected until now starts now.
        let mut was_there = SelectorState::default();
        assert!(!was_there.is_leader_failed(true, 60 * second));
        advance(4 * second).await;
        assert!(!was_there.is_leader_failed(true, Duration::ZERO));
        assert!(!was_there.is_leader_failed(true, 60 * second));
        advance(5 * second).await;
        assert!(was_there.is_leader_failed(true, Duration::ZERO));
    }
}
