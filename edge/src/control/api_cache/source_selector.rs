//! Selection of the current source, and the change to another: [`source_policy`](super::source_policy) decides which source
//! to use, this module gathers the facts for it.
//!
//! It looks again when another leader is named, when a gateway comes or goes, when a source ends, and every 10 s. Stores
//! follow the selected source (`sync`). A change costs them a connection and no version, so their own clients do not notice.
//! A leader that failed is probed until it has a fresh view again.

use super::{
    gateway_source::GatewaySource,
    member_server::MemberTls,
    member_source::{ANSWER, MemberSource},
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

/// A gateway is out of touch when no tunnel has stood for this long: one that restarts is no reason to go elsewhere.
const GATEWAY_LOST_AFTER: Duration = Duration::from_secs(5);
/// Interval at which it looks in any case.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// The leader is asked this long before the others are.
const LEADER_HEAD_START: Duration = Duration::from_millis(300);
/// Members that are asked at once.
const AT_ONCE: usize = 16;
/// How long the others have, once one with a fresh view has answered.
const STRAGGLER_WAIT: Duration = Duration::from_millis(300);
/// Between two rounds of questions to all members, when none of them is in touch: each costs each of them a handshake.
const POLL_BACKOFF_MIN: Duration = Duration::from_secs(1);
const POLL_BACKOFF_MAX: Duration = Duration::from_secs(40);

/// Selects the source that the API cache is filled from, and switches it when the source fails.
pub(super) struct SourceSelector {
    pub(super) own: String,
    pub(super) pool: Arc<WatchCache>,
    pub(super) told: Membership,
    pub(super) tls: MemberTls,
    pub(super) tasks: Arc<TaskGroup>,
    pub(super) gateway: Arc<GatewaySource>,
    /// How many tunnels stand.
    pub(super) standing: watch::Receiver<usize>,
    pub(super) at: watch::Sender<Arc<SelectedSource>>,
    pub(super) fallen: mpsc::Receiver<SourceLost>,
    pub(super) metrics: Arc<Metrics>,
}

/// Facts known of the leader and of the other members, and the requests in progress.
#[derive(Default)]
struct SelectorState {
    leader_fails: bool,
    /// Since when the leader has not answered.
    silent: Option<Instant>,
    /// Request for the freshness of the leader's view, once the leader failed.
    look: Option<BoxFuture<'static, Option<Freshness>>>,
    /// Request to all members for the one with the freshest view.
    round: Option<BoxFuture<'static, Option<NodePoolMember>>>,
    /// Before the next round.
    pause: Duration,
    /// A gateway is in touch until then, whether a tunnel stands or not.
    touch: Option<Instant>,
    /// A tunnel stood when it last looked.
    stood: bool,
}

impl SourceSelector {
    /// Chooses for as long as it is polled.
    pub(super) async fn run(mut self) {
        let mut known = SelectorState {
            touch: Some(Instant::now() + GATEWAY_LOST_AFTER),
            ..SelectorState::default()
        };
        let mut members = self.told.changes();
        let mut look = interval(POLL_INTERVAL);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut named = self.leader();
        loop {
            known.touched(*self.standing.borrow() > 0);
            self.choose(&mut known);
            tokio::select! {
                view = asked(&mut known.look) => {
                    known.look = None;
                    if view.is_some_and(Freshness::is_fresh) {
                        known.anew();
                    }
                }
                found = asked(&mut known.round) => {
                    known.round = None;
                    self.found(found, &mut known);
                }
                _ = members.changed() => {
                    members.mark_unchanged();
                    let leader = self.leader();
                    // A newly announced leader, or a leader with a new address, has not failed yet.
                    if leader != named {
                        named = leader;
                        known.anew();
                    }
                    known.round = None;
                }
                _ = self.standing.changed() => {}
                () = until(known.touch) => known.touch = None,
                Some(fallen) = self.fallen.recv() => self.fell(&fallen, &mut known),
                _ = look.tick() => if known.leader_fails && known.look.is_none() {
                    known.look = self.look_at_the_leader();
                },
            }
        }
    }

    fn wants(&self, known: &SelectorState) -> SourceChoice {
        let told = self.told.now();
        choose_source(SelectionInput {
            own: &self.own,
            told: &told,
            leader_fails: known.leader_fails,
            gateway: *self.standing.borrow() > 0 || known.touch.is_some(),
        })
    }

    /// Changes to the source that should be used now; begins to ask the members if it is not known.
    fn choose(&self, known: &mut SelectorState) {
        let now = self.at.borrow().who.clone();
        let who = match self.wants(known) {
            SourceChoice::Gateway => SourceKind::Gateway,
            SourceChoice::Leader(leader) => SourceKind::Leader(leader),
            SourceChoice::Freshest(members) => match &now {
                SourceKind::Neighbour(member) if members.contains(member) => return,
                _ => {
                    if known.round.is_none() {
                        known.round = Some(self.ask_all(&members, known.pause));
                    }
                    SourceKind::Nobody
                }
            },
        };
        if who != SourceKind::Nobody {
            (known.round, known.pause) = (None, Duration::ZERO);
        }
        if who != now {
            self.turn_to(who);
        }
    }

    fn turn_to(&self, who: SourceKind) {
        let source: Option<Arc<dyn ListWatch>> = match &who {
            SourceKind::Nobody => None,
            SourceKind::Gateway => Some(self.gateway.clone()),
            SourceKind::Leader(member) | SourceKind::Neighbour(member) => {
                Some(Arc::new(self.neighbour(member)))
            }
        };
        info!(at = %who, "API cache source changed");
        self.metrics.reads_elsewhere();
        let turn = self.at.borrow().turn + 1;
        let rests = who != SourceKind::Gateway;
        self.at
            .send_replace(Arc::new(SelectedSource { turn, who, source }));
        if rests {
            self.gateway.rest();
        }
    }

    fn neighbour(&self, member: &NodePoolMember) -> MemberSource {
        MemberSource::new(member.clone(), self.tls.clone(), self.tasks.clone())
    }

    /// A store's source has ended.
    fn fell(&self, fallen: &SourceLost, known: &mut SelectorState) {
        let at = self.at.borrow().clone();
        // One disconnected store does not move the others to another source.
        if fallen.turn != at.turn || self.pool.stores().iter().any(|store| in_touch(store)) {
            return;
        }
        let broken = matches!(fallen.why, ReflectorError::Broken(_));
        match &at.who {
            SourceKind::Nobody => {}
            // An unreachable gateway is dialled again, and then another one if it is still unreachable.
            SourceKind::Gateway if broken => {}
            SourceKind::Gateway => self.gateway.elsewhere(),
            SourceKind::Leader(leader) => {
                if known.fails(broken, fallen.lasted) {
                    info!(node = leader.node, why = ?fallen.why, "cannot read from the pool leader");
                    known.leader_fails = true;
                }
            }
            SourceKind::Neighbour(_) => self.turn_to(SourceKind::Nobody),
        }
    }

    /// A round of questions is over.
    fn found(&self, found: Option<NodePoolMember>, known: &mut SelectorState) {
        match found {
            Some(member) => self.turn_to(SourceKind::Neighbour(member)),
            None => known.pause = (known.pause * 2).clamp(POLL_BACKOFF_MIN, POLL_BACKOFF_MAX),
        }
    }

    /// Returns the path by which a view is judged: one resource stands for all.
    fn path(&self) -> Option<String> {
        let first = self.pool.stores().first()?;
        Some(first.resource().path())
    }

    /// The leader, where it is another node.
    fn leader(&self) -> Option<NodePoolMember> {
        let told = self.told.now();
        let leader = told.leader.filter(|leader| *leader != self.own)?;
        let mut members = told.members.into_iter();
        members.find(|member| member.node == leader)
    }

    fn look_at_the_leader(&self) -> Option<BoxFuture<'static, Option<Freshness>>> {
        let (leader, path) = (self.neighbour(&self.leader()?), self.path()?);
        Some(Box::pin(async move { leader.view(&path).await }))
    }

    /// Asks all of them for their views, after a pause; the first is the leader.
    fn ask_all(
        &self,
        members: &[NodePoolMember],
        pause: Duration,
    ) -> BoxFuture<'static, Option<NodePoolMember>> {
        let members: Vec<_> = members
            .iter()
            .map(|member| self.neighbour(member))
            .collect();
        let path = self.path().unwrap_or_default();
        let stores = self.pool.stores();
        let has_a_view = stores.iter().all(|store| store.status().synced);
        // Jitter for members that lost their gateway at the same time.
        let pause = pause.mul_f64(1.0 - rand::random::<f64>() / 4.0);
        Box::pin(async move {
            sleep(pause).await;
            freshest_member(views(members, &path).await, has_a_view)
        })
    }
}

impl SelectorState {
    /// A tunnel stands, or none does.
    fn touched(&mut self, stands: bool) {
        if stands {
            self.stood = true;
            self.touch = None;
        } else if std::mem::take(&mut self.stood) {
            self.touch = Some(Instant::now() + GATEWAY_LOST_AFTER);
        }
    }

    /// Nothing is known against the leader.
    fn anew(&mut self) {
        (self.leader_fails, self.silent, self.look) = (false, None, None);
    }

    /// Whether a leader fails whose source ended so: at once where it says so itself, and where it does not answer after the time
    /// that an answer may take.
    fn fails(&mut self, broken: bool, lasted: Duration) -> bool {
        let now = Instant::now();
        // The timeout of a leader that was connected until now starts now.
        let since = if lasted > ANSWER + POLL_INTERVAL / 20 {
            self.silent = None;
            now
        } else {
            now.checked_sub(lasted).unwrap_or(now)
        };
        let since = *self.silent.get_or_insert(since);
        !broken || now.duration_since(since) + POLL_INTERVAL / 50 >= ANSWER
    }
}

async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// Waits for the result of the request, or for ever if there is none.
async fn asked<T>(asking: &mut Option<BoxFuture<'static, T>>) -> T {
    match asking {
        Some(asking) => asking.await,
        None => std::future::pending().await,
    }
}

fn in_touch(store: &Store) -> bool {
    let status = store.status();
    status.synced && status.lost.is_none()
}

/// The views of all that answer in time, in the order of `members`.
async fn views(members: Vec<MemberSource>, path: &str) -> Vec<(NodePoolMember, Freshness)> {
    let all: Vec<_> = members.iter().cloned().enumerate().collect();
    let asking = all.into_iter().map(|(nth, member)| {
        let path = path.to_owned();
        async move {
            if nth > 0 {
                sleep(LEADER_HEAD_START).await;
            }
            (nth, member.view(&path).await)
        }
    });
    let mut asking = iter(asking).buffer_unordered(AT_ONCE);
    let (mut answered, mut until) = (Vec::new(), Instant::now() + POLL_BACKOFF_MAX);
    while let Ok(Some((nth, view))) = timeout_at(until, asking.next()).await {
        let Some(view) = view else { continue };
        if view.is_fresh() {
            until = until.min(Instant::now() + STRAGGLER_WAIT);
        }
        answered.push((nth, view));
    }
    answered.sort_by_key(|(nth, _)| *nth);
    let member = |nth: usize| members.get(nth).map(|one| one.member.clone());
    let named = answered.into_iter();
    named
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
        assert!(SelectorState::default().fails(false, second));
        // A silent leader uses up the whole time at once.
        assert!(SelectorState::default().fails(true, ANSWER));
        // A leader that refuses is asked repeatedly.
        let mut refuses = SelectorState::default();
        for _ in 0..5 {
            assert!(!refuses.fails(true, Duration::ZERO));
            advance(second).await;
        }
        assert!(refuses.fails(true, Duration::ZERO));
        // The timeout of a leader that was connected until now starts now.
        let mut was_there = SelectorState::default();
        assert!(!was_there.fails(true, 60 * second));
        advance(4 * second).await;
        assert!(!was_there.fails(true, Duration::ZERO));
        assert!(!was_there.fails(true, 60 * second));
        advance(5 * second).await;
        assert!(was_there.fails(true, Duration::ZERO));
    }
}
