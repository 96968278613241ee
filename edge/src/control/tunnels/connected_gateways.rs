//! Table of the connected gateways and the tunnel groups that own them, for an edge that has tunnels at several of them.
//!
//! A name may lead to several addresses of one gateway: IPv4 and IPv6, or its own address and that of a load balancer. One
//! address of a load balancer may lead to several gateways. A gateway uses only the newest tunnel of an edge, so two
//! [`TunnelGroup`]s at one gateway would close each other's tunnels for ever. The first group owns the gateway, and the
//! others wait until it is lost. A group owns only one gateway, even if its address leads to several.

use super::gateway_selection::AddressState;
use crate::control::dial::GatewayAddr;
use causeway_rt::backoff::Backoff;
use causeway_tunnel::wire::MAX_GATEWAYS_PER_EDGE;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::info;

/// Minimum time of a connection for a gateway to count as useful. A gateway that is lost right after its discovery does not
/// count as lost.
pub(super) const MIN_USEFUL_DURATION: Duration = Duration::from_secs(10);

/// Time for which the edge searches another gateway in place of a crowded one. Perhaps no other gateway can be found.
const REPLACEMENT_SEARCH: Duration = Duration::from_mins(2);
/// Time for which addresses that lead to a gateway the edge has left, because it was crowded, are not dialled for it without need.
const RETURN_DELAY: Duration = Duration::from_mins(10);

#[derive(Debug, Default)]
struct OwnersByInstance {
    /// Owner of each gateway process.
    owners: BTreeMap<String, GatewayOwner>,
    /// Groups whose slots run.
    groups: BTreeMap<TunnelGroup, RunningGroup>,
    /// Number of times that a useful gateway began to drain or was lost.
    lost_count: u64,
    /// Addresses at which no server answers.
    unreachable: BTreeSet<GatewayAddr>,
    /// Gateways that the edge left because they had too many edges, and the times until which it does not return without need.
    left_crowded: BTreeMap<String, Instant>,
}

impl OwnersByInstance {
    /// Whether the edge has left this gateway, or is leaving it, because it had too many edges.
    fn has_left_crowded(&self, instance: &str) -> bool {
        let is_leaving = |group: &RunningGroup| {
            group.leave.is_cancelled()
                && matches!(&group.crowded, Some(crowded) if crowded.instance == instance)
        };
        let until = self.left_crowded.get(instance);
        until.is_some_and(|until| Instant::now() < *until) || self.groups.values().any(is_leaving)
    }

    /// Whether no gateway is connected that does not drain.
    fn has_only_draining(&self) -> bool {
        self.owners.values().all(GatewayOwner::is_draining)
    }
}

/// Gateway that has more edges than others.
#[derive(Debug)]
struct CrowdedGateway {
    instance: String,
    /// End of the search for a gateway in its place.
    until: Instant,
}

/// Table of the connected gateways. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ConnectedGateways {
    table: Arc<watch::Sender<OwnersByInstance>>,
    next_group: Arc<AtomicU64>,
    /// Number of gateways that the edge wants at most.
    max_gateways: u32,
}

/// Identifier of the tunnels of an edge that are at one gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TunnelGroup(u64);

#[derive(Debug)]
struct RunningGroup {
    /// Token that requests the tunnels of the group to leave.
    leave: CancellationToken,
    /// Whether the gateway was discovered behind an address that other tunnels use.
    is_discovered: bool,
    /// Time of the first failure since the group had a gateway. Also set while another group owns its gateway.
    unavailable_since: Option<Instant>,
    /// Whether another group owns its gateway now.
    is_duplicate: bool,
    /// Its gateway, if that has too many edges. The order of groups depends on it also after the search has ended.
    crowded: Option<CrowdedGateway>,
}

#[derive(Debug)]
struct GatewayOwner {
    group: TunnelGroup,
    since: Instant,
    tunnels: usize,
    /// Whether the gateway has accepted a tunnel. Before that it may still refuse this edge.
    is_registered: bool,
    /// Time at which the gateway began to drain. It still serves streams, but accepts no new clients.
    draining_since: Option<Instant>,
    /// Number of gateways, as this gateway announces it.
    replicas: Option<u32>,
}

impl GatewayOwner {
    fn is_draining(&self) -> bool {
        self.draining_since.is_some()
    }

    fn is_useful(&self) -> bool {
        self.since.elapsed() >= MIN_USEFUL_DURATION
    }
}

/// Numbers of connected and existing gateways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GatewayCount {
    /// Number of connected gateways that do not drain.
    pub(super) connected: u32,
    /// Number of existing gateways, if a connected gateway announces it. Announcements of draining gateways count only if all
    /// drain.
    pub(super) total: Option<u32>,
    /// Number of gateways that the edge searches: `total`, or the configured number if that is lower. If all connected gateways
    /// drain, at least one, because another one may be behind an address that the edge knows.
    pub(super) wanted: Option<u32>,
    /// Whether the edge has enough gateways, so that a search is for a replacement of a crowded one.
    pub(super) replaces_only: bool,
    /// Number of gateways with tunnels, draining or not.
    with_tunnels: u32,
    /// Number of times that a useful gateway began to drain or was lost.
    pub(super) lost_count: u64,
}

impl GatewayCount {
    /// Whether there are gateways that are wanted and not connected.
    pub(super) fn has_missing(self) -> bool {
        // Bounds the tunnels, whatever number gateways announce and however often they drain.
        self.with_tunnels < 2 * MAX_GATEWAYS_PER_EDGE
            && self.wanted.is_some_and(|wanted| wanted > self.connected)
    }

    fn from_table(table: &OwnersByInstance, max_gateways: u32) -> Self {
        // A gateway that has not accepted a tunnel may still refuse this edge.
        let active = table.owners.values();
        let active = active.filter(|owner| owner.is_registered && !owner.is_draining());
        let reached = active.count();
        let announced_replicas = |owner: &GatewayOwner| {
            owner
                .replicas
                .filter(|_| reached == 0 || !owner.is_draining())
        };
        let total = table.owners.values().filter_map(announced_replicas).max();
        let total = total.map(|of| of.min(MAX_GATEWAYS_PER_EDGE));
        let to_u32 = |many: usize| u32::try_from(many).unwrap_or(u32::MAX);
        let searches = |owner: &&GatewayOwner| {
            if owner.is_draining() {
                return false;
            }
            let running = table.groups.get(&owner.group);
            let crowded = running.and_then(|group| group.crowded.as_ref());
            crowded.is_some_and(|crowded| Instant::now() < crowded.until)
        };
        let to_replace = to_u32(table.owners.values().filter(searches).count());
        let all_drain = !table.owners.is_empty() && table.has_only_draining();
        Self {
            connected: to_u32(reached),
            total,
            wanted: total
                .map(|of| of.min(max_gateways.saturating_add(to_replace)))
                .max(all_drain.then_some(1)),
            replaces_only: total.is_some_and(|of| to_u32(reached) >= of.min(max_gateways)),
            with_tunnels: to_u32(table.owners.len()),
            lost_count: table.lost_count,
        }
    }
}

/// Ownership of a gateway, which ends when the last lease is dropped.
#[derive(Debug)]
pub(super) struct GatewayLease {
    connected_gateways: ConnectedGateways,
    instance: String,
}

/// Returns the delay of tunnels whose address led to another gateway than their own. The load balancer may select another
/// gateway at the next attempt.
pub(super) fn wrong_gateway_backoff(backoff: &mut Backoff) -> Duration {
    let delay = backoff.refused(None, rand::random());
    info!(retry_in = ?delay, "the address led to a different gateway; reconnecting");
    delay
}

impl Default for ConnectedGateways {
    fn default() -> Self {
        Self::new(u32::MAX)
    }
}

impl ConnectedGateways {
    /// Creates an empty table for an edge that wants this many gateways at most.
    pub(crate) fn new(max_gateways: u32) -> Self {
        Self {
            table: Arc::default(),
            next_group: Arc::default(),
            max_gateways,
        }
    }

    /// Adds a group whose slots begin to run.
    pub(super) fn add_group(
        &self,
        group: TunnelGroup,
        leave: CancellationToken,
        is_discovered: bool,
    ) {
        let running = RunningGroup {
            leave,
            is_discovered,
            unavailable_since: None,
            is_duplicate: false,
            crowded: None,
        };
        self.table.send_modify(|table| {
            table.groups.insert(group, running);
        });
    }

    /// Removes a group whose slots have ended.
    pub(super) fn remove_group(&self, group: TunnelGroup) {
        self.table.send_modify(|table| {
            let Some(removed) = table.groups.remove(&group) else {
                return;
            };
            if let Some(crowded) = removed.crowded.filter(|_| removed.leave.is_cancelled()) {
                let now = Instant::now();
                table.left_crowded.retain(|_, until| now < *until);
                table
                    .left_crowded
                    .insert(crowded.instance, now + RETURN_DELAY);
            }
        });
    }

    /// Records that the gateway of this group cannot be reached now, or that another group owns it.
    pub(super) fn mark_unavailable(&self, group: TunnelGroup) {
        self.table.send_if_modified(|table| {
            let running = table.groups.get_mut(&group);
            let Some(running) = running.filter(|group| group.unavailable_since.is_none()) else {
                return false;
            };
            running.unavailable_since = Some(Instant::now());
            true
        });
    }

    /// Sets whether another group owns the gateway of this group, so that its address is one more of the same gateway.
    pub(super) fn set_duplicate(&self, group: TunnelGroup, is_duplicate: bool) {
        self.table.send_if_modified(|table| {
            let running = table.groups.get_mut(&group);
            running.is_some_and(|running| {
                std::mem::replace(&mut running.is_duplicate, is_duplicate) != is_duplicate
            })
        });
    }

    /// Whether another group owns the gateway of this group.
    pub(super) fn is_duplicate(&self, group: TunnelGroup) -> bool {
        let table = self.table.borrow();
        table
            .groups
            .get(&group)
            .is_some_and(|group| group.is_duplicate)
    }

    /// Returns the state of the tunnels of this group, whose slots run.
    pub(super) fn address_state(&self, group: TunnelGroup) -> AddressState {
        let table = self.table.borrow();
        let owner = table.owners.values().find(|owner| owner.group == group);
        if let Some(owner) = owner.filter(|owner| owner.is_registered) {
            return match owner.draining_since {
                Some(since) => AddressState::Draining(since),
                None => AddressState::Connected(owner.since),
            };
        }
        let running = table.groups.get(&group);
        let unavailable_since = running.and_then(|group| group.unavailable_since);
        unavailable_since.map_or(AddressState::Connecting, AddressState::Unavailable)
    }

    /// Returns the connected gateways that were discovered, crowded ones last, and otherwise oldest first: the time of the
    /// connection, and the token that requests their tunnels to leave.
    pub(super) fn discovered_gateways(&self) -> Vec<(Instant, CancellationToken)> {
        let table = self.table.borrow();
        let active = table.owners.values().filter(|owner| !owner.is_draining());
        let discovered = active.filter_map(|owner| {
            let running = table.groups.get(&owner.group)?;
            let rank = (running.crowded.is_some(), owner.since);
            (running.is_discovered && !running.leave.is_cancelled())
                .then(|| (rank, running.leave.clone()))
        });
        let mut discovered: Vec<_> = discovered.collect();
        discovered.sort_by_key(|(rank, _)| *rank);
        discovered
            .into_iter()
            .map(|((_, since), leave)| (since, leave))
            .collect()
    }

    /// Returns a receiver that is notified of all changes that concern the selection of addresses.
    pub(super) fn changes(&self) -> TableChanges {
        TableChanges(self.table.subscribe())
    }

    /// Returns a new group, which owns no gateway yet.
    pub(super) fn new_group(&self) -> TunnelGroup {
        TunnelGroup(self.next_group.fetch_add(1, Relaxed))
    }

    /// Takes a lease of this gateway for this group. Returns `None` if another group owns the gateway, or if this group owns
    /// another one. With `only_held` the group must own the gateway already.
    pub(super) fn claim(
        &self,
        instance: &str,
        group: TunnelGroup,
        only_held: bool,
    ) -> Option<GatewayLease> {
        let mut is_owner = false;
        self.change(|table| {
            let is_bound = only_held || table.owners.values().any(|hold| hold.group == group);
            if is_bound && !table.owners.contains_key(instance) {
                return;
            }
            let owner = table
                .owners
                .entry(instance.to_owned())
                .or_insert(GatewayOwner {
                    group,
                    since: Instant::now(),
                    tunnels: 0,
                    is_registered: false,
                    draining_since: None,
                    replicas: None,
                });
            is_owner = owner.group == group;
            owner.tunnels += usize::from(is_owner);
        });
        is_owner.then(|| GatewayLease {
            connected_gateways: self.clone(),
            instance: instance.to_owned(),
        })
    }

    /// Whether this group owns a gateway.
    pub(super) fn has_group(&self, group: TunnelGroup) -> bool {
        let table = self.table.borrow();
        table.owners.values().any(|hold| hold.group == group)
    }

    /// Whether any gateway is connected and does not drain. Then the network works, and a silent address is dead.
    pub(super) fn is_any_connected(&self) -> bool {
        !self.table.borrow().has_only_draining()
    }

    /// Waits until no gateway is connected, or all drain.
    pub(super) async fn wait_until_none(&self) {
        let mut table = self.table.subscribe();
        // The sender lives at least as long as this task.
        let _ = table.wait_for(OwnersByInstance::has_only_draining).await;
    }

    /// Records whether a server answers at this address.
    pub(super) fn set_reachable(&self, addr: &GatewayAddr, answers: bool) {
        self.table.send_if_modified(|table| {
            if answers {
                table.unreachable.remove(addr);
            } else {
                table.unreachable.insert(addr.clone());
            }
            // No waiting task depends on this change.
            false
        });
    }

    /// Whether no server answers at this address.
    pub(super) fn is_unreachable(&self, addr: &GatewayAddr) -> bool {
        self.table.borrow().unreachable.contains(addr)
    }

    /// Returns the current numbers of gateways.
    pub(super) fn count(&self) -> GatewayCount {
        GatewayCount::from_table(&self.table.borrow(), self.max_gateways)
    }

    /// Waits until the numbers of gateways differ from these.
    pub(super) async fn wait_for_change_from(&self, count: GatewayCount) {
        let mut table = self.table.subscribe();
        // The sender lives at least as long as this task.
        let _ = table
            .wait_for(|table| GatewayCount::from_table(table, self.max_gateways) != count)
            .await;
    }

    /// Waits until no group owns this gateway. If the edge left it because it had too many edges, waits also until other gateways
    /// are missing.
    pub(super) async fn wait_until_lost(&self, instance: &str) {
        let mut table = self.table.subscribe();
        let is_wanted = |table: &OwnersByInstance| {
            let count = GatewayCount::from_table(table, self.max_gateways);
            !table.owners.contains_key(instance)
                && (!table.has_left_crowded(instance) || !count.replaces_only)
        };
        // The sender lives at least as long as this task.
        let _ = table.wait_for(is_wanted).await;
    }

    /// Changes the table. Wakes waiting tasks only if the numbers of gateways have changed.
    fn change(&self, change: impl FnOnce(&mut OwnersByInstance)) {
        self.table.send_if_modified(|table| {
            let before = GatewayCount::from_table(table, self.max_gateways);
            change(table);
            before != GatewayCount::from_table(table, self.max_gateways)
        });
    }
}

/// Receiver of the changes of the table.
pub(super) struct TableChanges(watch::Receiver<OwnersByInstance>);

impl TableChanges {
    /// Waits for the next change.
    pub(super) async fn changed(&mut self) {
        // The sender lives at least as long as this task.
        let _ = self.0.changed().await;
    }

    /// Ignores the changes so far.
    pub(super) fn mark_unchanged(&mut self) {
        self.0.mark_unchanged();
    }
}

impl GatewayLease {
    /// Records that the gateway has accepted the tunnel.
    pub(super) fn mark_registered(&self) {
        self.connected_gateways.table.send_if_modified(|table| {
            let owner = table.owners.get_mut(&self.instance);
            let Some(owner) = owner.filter(|owner| !owner.is_registered) else {
                return false;
            };
            owner.is_registered = true;
            if let Some(running) = table.groups.get_mut(&owner.group) {
                running.unavailable_since = None;
            }
            true
        });
    }

    /// Records the number of gateways that this gateway announces.
    pub(super) fn set_replicas(&self, replicas: Option<u32>) {
        self.connected_gateways.change(|table| {
            if let Some(owner) = table.owners.get_mut(&self.instance) {
                owner.replicas = replicas;
            }
        });
    }

    /// Records that this gateway has more edges than others. Has no effect unless the gateway was discovered: the gateways of
    /// other addresses are selected by their rank.
    pub(super) fn mark_crowded(&self) {
        self.connected_gateways.change(|table| {
            let group = table.owners.get(&self.instance).map(|owner| owner.group);
            let running = group.and_then(|group| table.groups.get_mut(&group));
            if let Some(running) = running.filter(|running| running.is_discovered) {
                running.crowded = Some(CrowdedGateway {
                    instance: self.instance.clone(),
                    until: Instant::now() + REPLACEMENT_SEARCH,
                });
            }
        });
    }

    /// Records that this gateway drains.
    pub(super) fn mark_draining(&self) {
        self.connected_gateways.change(|table| {
            if let Some(owner) = table.owners.get_mut(&self.instance) {
                table.lost_count += u64::from(!owner.is_draining() && owner.is_useful());
                owner.draining_since.get_or_insert_with(Instant::now);
            }
        });
    }
}

impl Drop for GatewayLease {
    fn drop(&mut self) {
        self.connected_gateways.change(|table| {
            let Some(owner) = table.owners.get_mut(&self.instance) else {
                return;
            };
            owner.tunnels -= 1;
            if owner.tunnels == 0 {
                table.lost_count += u64::from(owner.is_useful());
                table.owners.remove(&self.instance);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AddressState::{Connected, Connecting, Draining, Unavailable};
    use futures_util::FutureExt;

    #[tokio::test]
    async fn one_group_holds_a_gateway_until_its_last_tunnel_ends() {
        let reached = ConnectedGateways::default();
        let (four, six) = (reached.new_group(), reached.new_group());
        let first = reached.claim("a", four, false).unwrap();
        let second = reached.claim("a", four, true).unwrap();
        assert!(reached.claim("a", six, false).is_none());
        assert!(reached.claim("b", six, false).is_some());
        drop(first);
        assert!(reached.wait_until_lost("a").now_or_never().is_none());
        let lost = reached.wait_until_lost("a");
        drop(second);
        lost.await;
        assert!(reached.claim("a", six, false).is_some());
    }

    #[test]
    fn later_tunnels_of_a_group_reach_only_its_gateway() {
        let reached = ConnectedGateways::default();
        let (one, two) = (reached.new_group(), reached.new_group());
        let a = reached.claim("a", one, false).unwrap();
        let b = reached.claim("b", two, false).unwrap();
        assert_eq!(reached.count().connected, 0, "they may refuse");
        a.mark_registered();
        b.mark_registered();
        assert!(reached.claim("b", one, true).is_none());
        // The group cannot claim an unknown gateway either, even for a first tunnel that is dialled again beside an
        // additional one.
        assert!(reached.claim("c", one, true).is_none());
        assert!(reached.claim("c", one, false).is_none());
        assert!(reached.has_group(one) && !reached.has_group(reached.new_group()));
        assert_eq!(reached.count().connected, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowded_gateway_leaves_before_the_one_in_its_place() {
        let reached = ConnectedGateways::new(2);
        let tokens = [0; 3].map(|_| CancellationToken::new());
        let groups = [(0, false), (1, true), (2, true)].map(|(index, is_discovered)| {
            let group = reached.new_group();
            reached.add_group(
                group,
                CancellationToken::clone(&tokens[index]),
                is_discovered,
            );
            group
        });
        let connect = |index: usize| {
            let lease = reached.claim(["a", "b", "c"][index], groups[index], false);
            let lease = lease.unwrap();
            lease.mark_registered();
            lease.set_replicas(Some(3));
            lease
        };
        let a = connect(0);
        assert!(
            !reached.count().replaces_only,
            "a crowded gateway is better than none"
        );
        let b = connect(1);
        assert!(!reached.count().has_missing() && reached.count().replaces_only);
        a.mark_crowded();
        assert!(
            !reached.count().has_missing(),
            "it has an address of its own"
        );
        b.mark_crowded();
        assert!(reached.count().has_missing());
        tokio::time::advance(REPLACEMENT_SEARCH).await;
        assert!(!reached.count().has_missing(), "no other gateway was found");
        b.mark_crowded();
        assert!(reached.count().has_missing());
        let _c = connect(2);
        assert!(!reached.count().has_missing());
        for (_, leave) in reached.discovered_gateways().iter().skip(1) {
            leave.cancel();
        }
        assert_eq!(
            tokens.map(|token| token.is_cancelled()),
            [false, true, false]
        );
        // An address that leads to the gateway, too, is not dialled for it while there are enough others.
        let mut lost = Box::pin(reached.wait_until_lost("b"));
        assert!((&mut lost).now_or_never().is_none());
        drop(b);
        assert!((&mut lost).now_or_never().is_none());
        reached.remove_group(groups[1]);
        assert!((&mut lost).now_or_never().is_none());
        drop(a);
        lost.await;
    }

    /// Takes a lease of a gateway that has accepted a tunnel.
    fn connect(reached: &ConnectedGateways, instance: &str) -> GatewayLease {
        let lease = reached.claim(instance, reached.new_group(), false);
        let lease = lease.unwrap();
        lease.mark_registered();
        lease
    }

    /// Regression case of kubernetes-sigs/apiserver-network-proxy#739: a gateway that announces an old, lower count during a rolling
    /// update does not lower the count.
    #[test]
    fn the_highest_reported_gateway_count_is_wanted_up_to_64() {
        let reached = ConnectedGateways::default();
        let short = || {
            let count = reached.count();
            (count.has_missing(), count.connected, count.total)
        };
        assert_eq!(short(), (false, 0, None));
        let a = connect(&reached, "a");
        assert_eq!(short(), (false, 1, None));
        a.set_replicas(Some(2));
        assert_eq!(short(), (true, 1, Some(2)));
        let b = connect(&reached, "b");
        assert_eq!(short(), (false, 2, Some(2)));
        // One gateway knows fewer gateways, and one drains.
        b.set_replicas(Some(1));
        assert_eq!(short(), (false, 2, Some(2)));
        a.mark_draining();
        assert_eq!(short(), (false, 1, Some(1)));
        b.set_replicas(Some(u32::MAX));
        assert_eq!(short(), (true, 1, Some(64)));
        // All gateways drain and are replaced.
        b.set_replicas(Some(1));
        b.mark_draining();
        assert_eq!(short(), (true, 0, Some(2)));
        drop((a, b));
        // No gateway is left.
        assert_eq!(short(), (false, 0, None));
    }

    #[test]
    fn a_search_ends_when_the_wanted_number_is_connected() {
        let reached = ConnectedGateways::new(2);
        let a = connect(&reached, "a");
        a.set_replicas(Some(3));
        assert!(reached.count().has_missing());
        let _b = connect(&reached, "b");
        let count = reached.count();
        assert!(!count.has_missing());
        assert_eq!((count.total, count.wanted), (Some(3), Some(2)));
        a.mark_draining();
        assert!(
            !reached.count().has_missing(),
            "the other gateway knows no number"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_state_of_a_group_follows_its_tunnels() {
        let reached = ConnectedGateways::default();
        let (group, other) = (reached.new_group(), reached.new_group());
        let states = || (reached.address_state(group), reached.address_state(other));
        for running in [group, other] {
            reached.add_group(running, CancellationToken::new(), running == other);
        }
        let now = Instant::now();
        reached.mark_unavailable(other);
        assert_eq!(states(), (Connecting, Unavailable(now)));
        let lease = reached.claim("a", group, false).unwrap();
        let found = reached.claim("b", other, false).unwrap();
        assert_eq!(states(), (Connecting, Unavailable(now)), "they may refuse");
        lease.mark_registered();
        found.mark_registered();
        assert_eq!(states(), (Connected(now), Connected(now)));
        assert_eq!(reached.discovered_gateways().len(), 1);
        lease.mark_draining();
        drop(found);
        assert_eq!(states(), (Draining(now), Connecting));
        reached.remove_group(other);
        assert!(reached.discovered_gateways().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_useful_gateway_counts_when_draining_and_when_lost() {
        let reached = ConnectedGateways::default();
        let brief = reached.claim("brief", reached.new_group(), false).unwrap();
        brief.mark_draining();
        drop(brief);
        assert_eq!(reached.count().lost_count, 0);
        let (rolls, dies) = (
            reached.claim("rolls", reached.new_group(), false).unwrap(),
            reached.claim("dies", reached.new_group(), false).unwrap(),
        );
        tokio::time::advance(MIN_USEFUL_DURATION).await;
        rolls.mark_draining();
        rolls.mark_draining();
        assert_eq!(reached.count().lost_count, 1);
        drop(rolls);
        assert_eq!(reached.count().lost_count, 2);
        drop(dies);
        assert_eq!(reached.count().lost_count, 3);
        assert!(!reached.is_any_connected());
        reached.wait_until_none().await;
    }

    #[test]
    fn gateways_that_drain_at_once_do_not_cause_endless_discovery() {
        let reached = ConnectedGateways::default();
        let stays = reached.claim("stays", reached.new_group(), false).unwrap();
        stays.set_replicas(Some(64));
        let mut claims = Vec::new();
        while reached.count().has_missing() {
            assert!(claims.len() < 200, "without end");
            let name = claims.len().to_string();
            let claim = reached.claim(&name, reached.new_group(), false).unwrap();
            claim.mark_draining();
            claims.push(claim);
        }
        claims.pop();
        assert!(reached.count().has_missing());
    }
}
