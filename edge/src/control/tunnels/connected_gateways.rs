//! Table of the connected gateways and the tunnel groups that own them, for an edge that has tunnels at all of them.
//!
//! A name may lead to several addresses of one gateway (IPv4 and IPv6, or one of its own and a load balancer's), and one
//! address to several gateways (a balancer's). A gateway takes the newest tunnel of an edge for the one that counts, so two
//! [`TunnelGroup`]s at one gateway would end each other's tunnels for ever. The first group owns the gateway; the others
//! wait until it is lost. A group owns one gateway: by an address that leads to several it does not come to have tunnels at
//! two.

use crate::control::dial::GatewayAddr;
use causeway_rt::backoff::Backoff;
use causeway_tunnel::wire::MOST_GATEWAYS;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{sync::watch, time::Instant};
use tracing::info;

/// A gateway that was reached for this long counts when it is lost: one that is found and lost again at once is of no use.
pub(super) const OF_USE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct OwnersByInstance {
    /// Of each gateway's process who holds it.
    held: BTreeMap<String, GatewayOwner>,
    /// How often a gateway that was of use began to drain or was lost.
    lost: u64,
    /// Addresses at which nothing answers.
    dead: BTreeSet<GatewayAddr>,
}

/// Table of the connected gateways. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectedGateways {
    table: Arc<watch::Sender<OwnersByInstance>>,
    parties: Arc<AtomicU64>,
}

/// The tunnels of an edge that belong together: those at one gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TunnelGroup(u64);

#[derive(Debug)]
struct GatewayOwner {
    by: TunnelGroup,
    since: Instant,
    tunnels: usize,
    /// Whether it drains: it still serves, but is of no use to new clients.
    drains: bool,
    /// How many gateways there are, as it says.
    replicas: Option<u32>,
}

impl GatewayOwner {
    fn is_of_use(&self) -> bool {
        self.since.elapsed() >= OF_USE
    }
}

/// How many gateways are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GatewayCount {
    /// Those that do not drain.
    pub(super) reached: u32,
    /// And how many there are, if one of those says so; of those that drain, where all do.
    pub(super) of: Option<u32>,
    /// Number of gateways with tunnels, whether these are of use or not.
    held: u32,
    /// How often one that was of use began to drain or was lost.
    pub(super) lost: u64,
}

impl GatewayCount {
    /// Whether there are others, of which those that are reached know.
    pub(super) fn is_short(self) -> bool {
        // Bounds the tunnels, whatever number gateways announce and however often they drain.
        self.held < 2 * MOST_GATEWAYS && self.of.is_some_and(|of| of > self.reached)
    }

    fn of(table: &OwnersByInstance) -> Self {
        let stay = || table.held.values().filter(|hold| !hold.drains);
        let reached = stay().count();
        let word = |hold: &GatewayOwner| hold.replicas.filter(|_| reached == 0 || !hold.drains);
        let of = table.held.values().filter_map(word).max();
        let number = |many: usize| u32::try_from(many).unwrap_or(u32::MAX);
        Self {
            reached: number(reached),
            of: of.map(|of| of.min(MOST_GATEWAYS)),
            held: number(table.held.len()),
            lost: table.lost,
        }
    }
}

/// Lease of a gateway, which lasts as long as this lives.
#[derive(Debug)]
pub(super) struct GatewayLease {
    reached: ConnectedGateways,
    instance: String,
}

/// How long tunnels wait whose address led to another gateway than theirs: a balancer leads elsewhere the next time.
pub(super) fn wrong_gateway_backoff(backoff: &mut Backoff) -> Duration {
    let delay = backoff.refused(None, rand::random());
    info!(retry_in = ?delay, "the address led to a different gateway; reconnecting");
    delay
}

impl ConnectedGateways {
    /// Someone who may hold a gateway.
    pub(super) fn party(&self) -> TunnelGroup {
        TunnelGroup(self.parties.fetch_add(1, Relaxed))
    }

    /// Takes this gateway for this party; `None` where another one has it, or where this party holds another gateway, or
    /// `keeps` to one that it holds and holds none any more.
    pub(super) fn claim(
        &self,
        instance: &str,
        by: TunnelGroup,
        keeps: bool,
    ) -> Option<GatewayLease> {
        let mut ours = false;
        self.change(|table| {
            let stays = keeps || table.held.values().any(|hold| hold.by == by);
            if stays && !table.held.contains_key(instance) {
                return;
            }
            let hold = table
                .held
                .entry(instance.to_owned())
                .or_insert(GatewayOwner {
                    by,
                    since: Instant::now(),
                    tunnels: 0,
                    drains: false,
                    replicas: None,
                });
            ours = hold.by == by;
            hold.tunnels += usize::from(ours);
        });
        ours.then(|| GatewayLease {
            reached: self.clone(),
            instance: instance.to_owned(),
        })
    }

    /// Whether this party holds a gateway.
    pub(super) fn is_by(&self, party: TunnelGroup) -> bool {
        let table = self.table.borrow();
        table.held.values().any(|hold| hold.by == party)
    }

    /// Whether any gateway is reached: then the network is well, and an address that does not answer is dead.
    pub(super) fn is_any(&self) -> bool {
        !self.table.borrow().held.is_empty()
    }

    /// Waits until no gateway is reached.
    pub(super) async fn none(&self) {
        let mut table = self.table.subscribe();
        // The sender lives at least as long as this task.
        let _ = table.wait_for(|table| table.held.is_empty()).await;
    }

    /// Notes whether something answers at this address.
    pub(super) fn answers(&self, place: &GatewayAddr, answers: bool) {
        self.table.send_if_modified(|table| {
            if answers {
                table.dead.remove(place);
            } else {
                table.dead.insert(place.clone());
            }
            // No waiting task depends on this change.
            false
        });
    }

    /// Whether nothing answers at this address.
    pub(super) fn is_dead(&self, place: &GatewayAddr) -> bool {
        self.table.borrow().dead.contains(place)
    }

    /// How many there are now.
    pub(super) fn count(&self) -> GatewayCount {
        GatewayCount::of(&self.table.borrow())
    }

    /// Waits until there is another count than this.
    pub(super) async fn other_than(&self, count: GatewayCount) {
        let mut table = self.table.subscribe();
        // The sender lives at least as long as this task.
        let _ = table
            .wait_for(|table| GatewayCount::of(table) != count)
            .await;
    }

    /// Waits until this gateway is reached nowhere.
    pub(super) async fn lost(&self, instance: &str) {
        let mut table = self.table.subscribe();
        // The sender lives at least as long as this task.
        let _ = table
            .wait_for(|table| !table.held.contains_key(instance))
            .await;
    }

    /// Changes the table. Wakes no task if no gateway has come, gone or announced another state.
    fn change(&self, change: impl FnOnce(&mut OwnersByInstance)) {
        self.table.send_if_modified(|table| {
            let before = GatewayCount::of(table);
            change(table);
            before != GatewayCount::of(table)
        });
    }
}

impl GatewayLease {
    /// How many gateways there are, as this one says.
    pub(super) fn says(&self, replicas: Option<u32>) {
        self.reached.change(|table| {
            if let Some(hold) = table.held.get_mut(&self.instance) {
                hold.replicas = replicas;
            }
        });
    }

    /// This gateway drains.
    pub(super) fn drains(&self) {
        self.reached.change(|table| {
            if let Some(hold) = table.held.get_mut(&self.instance) {
                table.lost += u64::from(!hold.drains && hold.is_of_use());
                hold.drains = true;
            }
        });
    }
}

impl Drop for GatewayLease {
    fn drop(&mut self) {
        self.reached.change(|table| {
            let Some(hold) = table.held.get_mut(&self.instance) else {
                return;
            };
            hold.tunnels -= 1;
            if hold.tunnels == 0 {
                table.lost += u64::from(hold.is_of_use());
                table.held.remove(&self.instance);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn one_group_holds_a_gateway_until_its_last_tunnel_ends() {
        let reached = ConnectedGateways::default();
        let (four, six) = (reached.party(), reached.party());
        let first = reached.claim("a", four, false).unwrap();
        let second = reached.claim("a", four, true).unwrap();
        assert!(reached.claim("a", six, false).is_none());
        assert!(reached.claim("b", six, false).is_some());
        drop(first);
        assert!(reached.lost("a").now_or_never().is_none());
        let lost = reached.lost("a");
        drop(second);
        lost.await;
        assert!(reached.claim("a", six, false).is_some());
    }

    #[test]
    fn later_tunnels_of_a_group_reach_only_its_gateway() {
        let reached = ConnectedGateways::default();
        let (one, two) = (reached.party(), reached.party());
        let _a = reached.claim("a", one, false).unwrap();
        let _b = reached.claim("b", two, false).unwrap();
        assert!(reached.claim("b", one, true).is_none());
        // Nor to an unknown gateway, even by a first tunnel that is dialled again beside an additional one.
        assert!(reached.claim("c", one, true).is_none());
        assert!(reached.claim("c", one, false).is_none());
        assert!(reached.is_by(one) && !reached.is_by(reached.party()));
        assert_eq!(reached.count().reached, 2);
    }

    #[test]
    fn the_highest_reported_gateway_count_is_wanted_up_to_64() {
        let reached = ConnectedGateways::default();
        let short = || {
            let count = reached.count();
            (count.is_short(), count.reached, count.of)
        };
        assert_eq!(short(), (false, 0, None));
        let a = reached.claim("a", reached.party(), false).unwrap();
        assert_eq!(short(), (false, 1, None));
        a.says(Some(2));
        assert_eq!(short(), (true, 1, Some(2)));
        let b = reached.claim("b", reached.party(), false).unwrap();
        assert_eq!(short(), (false, 2, Some(2)));
        // One gateway knows fewer gateways, and one drains.
        b.says(Some(1));
        assert_eq!(short(), (false, 2, Some(2)));
        a.drains();
        assert_eq!(short(), (false, 1, Some(1)));
        b.says(Some(u32::MAX));
        assert_eq!(short(), (true, 1, Some(64)));
        // All gateways drain and are replaced.
        b.says(Some(1));
        b.drains();
        assert_eq!(short(), (true, 0, Some(2)));
        drop((a, b));
        // No gateway is left.
        assert_eq!(short(), (false, 0, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_useful_gateway_counts_when_draining_and_when_lost() {
        let reached = ConnectedGateways::default();
        let brief = reached.claim("brief", reached.party(), false).unwrap();
        brief.drains();
        drop(brief);
        assert_eq!(reached.count().lost, 0);
        let (rolls, dies) = (
            reached.claim("rolls", reached.party(), false).unwrap(),
            reached.claim("dies", reached.party(), false).unwrap(),
        );
        tokio::time::advance(OF_USE).await;
        rolls.drains();
        rolls.drains();
        assert_eq!(reached.count().lost, 1);
        drop(rolls);
        assert_eq!(reached.count().lost, 2);
        drop(dies);
        assert_eq!(reached.count().lost, 3);
        assert!(!reached.is_any());
        reached.none().await;
    }

    #[test]
    fn gateways_that_drain_at_once_do_not_cause_endless_discovery() {
        let reached = ConnectedGateways::default();
        let stays = reached.claim("stays", reached.party(), false).unwrap();
        stays.says(Some(64));
        let mut claims = Vec::new();
        while reached.count().is_short() {
            assert!(claims.len() < 200, "without end");
            let name = claims.len().to_string();
            let claim = reached.claim(&name, reached.party(), false).unwrap();
            claim.drains();
            claims.push(claim);
        }
        claims.pop();
        assert!(reached.count().is_short());
    }
}
