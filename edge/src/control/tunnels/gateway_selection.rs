//! Selection of the gateway addresses at which an edge has tunnels.
//!
//! Each edge ranks the addresses by their rendezvous weights (also called highest random weight hashing). The weight is a hash
//! of the node name and the address, so edges spread evenly over the gateways, and a gateway that goes or comes changes only
//! the edges that have or get a tunnel at it. The edge has tunnels at the first K addresses of its ranking. Further rules:
//! - If an address is unavailable, the next one takes its place after [`REPLACEMENT_DELAY`]. The edge still dials the
//!   unavailable address, at growing intervals.
//! - If K addresses with a higher rank have been connected for `tunnels.resolve_after`, the tunnels at a lower one leave. So a
//!   new tunnel is open and proven before an old one leaves.
//! - Both delays have jitter, because a gateway that fails or returns concerns many edges at once.
//!
//! Gateways that were found behind the address of a load balancer (`discovery`) have no address of their own. They rank below
//! all addresses, the oldest first.

use crate::control::dial::GatewayAddr;
use sha2::{Digest, Sha256};
use std::{net::SocketAddr, time::Duration};
use tokio::time::Instant;

/// Time after which the next address replaces an unavailable one, while another gateway is connected. A tunnel that was only
/// interrupted is open again by then.
const REPLACEMENT_DELAY: Duration = Duration::from_millis(500);
/// Maximum additional time before the replacement.
const REPLACEMENT_JITTER: Duration = Duration::from_secs(2);

/// Returns the rendezvous weight of an address for this node. It is the same on all machines and in all versions, because
/// the ranking of an edge must survive an update.
pub(super) fn rendezvous_weight(node: &str, addr: &GatewayAddr) -> u64 {
    // The scope of an IPv6 address is local to this machine.
    let resolved = addr
        .address
        .map(|address| SocketAddr::new(address.ip(), address.port()).to_string());
    let address = resolved.as_ref().unwrap_or(&addr.gateway);
    let mut hash = Sha256::new();
    hash.update(node);
    // Neither a node name nor an address contains a zero byte.
    hash.update([0]);
    hash.update(address);
    let digest = hash.finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    u64::from_be_bytes(first)
}

/// Sorts the addresses by their rendezvous weights for this node, highest first.
pub(super) fn rank(
    node: &str,
    addresses: impl IntoIterator<Item = GatewayAddr>,
) -> Vec<GatewayAddr> {
    let mut ranked: Vec<_> = addresses
        .into_iter()
        .map(|addr| (rendezvous_weight(node, &addr), addr))
        .collect();
    ranked.sort_unstable_by(|(one, at), (other, other_at)| other.cmp(one).then(at.cmp(other_at)));
    ranked.into_iter().map(|(_, addr)| addr).collect()
}

/// State of the tunnels at one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AddressState {
    /// The edge does not dial the address.
    Idle,
    /// The edge dials the address, and no attempt has failed since the last tunnel.
    Connecting,
    /// The edge has tunnels at a gateway through this address since then.
    Connected(Instant),
    /// Attempts have failed since then, or another address leads to the same gateway.
    Unavailable(Instant),
    /// The gateway has been draining since then.
    Draining(Instant),
    /// The tunnels were requested to leave, and the address cannot be dialled again yet.
    Leaving,
}

/// Delays of the selection, with their jitter.
#[derive(Clone, Copy, Debug)]
pub(super) struct SelectionDelays {
    /// Time for which a gateway must be connected before tunnels at another one leave.
    settle: Duration,
    replace: Duration,
}

impl SelectionDelays {
    /// Returns the delays of one move. `random` is from 0 to 1.
    pub(super) fn new(resolve_after: Duration, random: f64) -> Self {
        Self {
            settle: resolve_after.mul_f64(1.0 + random),
            replace: REPLACEMENT_DELAY + REPLACEMENT_JITTER.mul_f64(random),
        }
    }
}

/// Changes that the rules require, as indices of the ranking.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SelectionChanges {
    /// Idle addresses that the edge starts to dial.
    pub(super) start: Vec<usize>,
    /// Addresses whose tunnels leave.
    pub(super) leave: Vec<usize>,
    /// Whether no address is idle afterwards.
    pub(super) is_exhausted: bool,
    /// Time of the next change, if no state changes before.
    pub(super) next_check: Option<Instant>,
}

impl SelectionChanges {
    /// Compares the states of all addresses, highest rank first, with the number of gateways that the edge wants.
    pub(super) fn new(states: &[AddressState], wanted: usize, delays: SelectionDelays) -> Self {
        let now = Instant::now();
        let mut changes = Self {
            is_exhausted: true,
            ..Self::default()
        };
        let all_connected = states
            .iter()
            .filter(|state| matches!(state, AddressState::Connected(_)))
            .count();
        // Without any gateway there is no time to lose.
        let replace = delays.replace * u32::from(all_connected > 0);
        // Numbers of the addresses so far that count for the wanted ones, that are connected, and that have been so for long.
        let (mut counted, mut connected, mut settled) = (0, 0, 0);
        let mut has_passed = |since: Instant, delay: Duration| {
            let is_due = now >= since + delay;
            if !is_due {
                let next = changes.next_check.get_or_insert(since + delay);
                *next = (*next).min(since + delay);
            }
            is_due
        };
        for (index, state) in states.iter().enumerate() {
            match *state {
                AddressState::Idle if counted < wanted => {
                    changes.start.push(index);
                    counted += 1;
                }
                AddressState::Idle => changes.is_exhausted = false,
                AddressState::Connected(_) if settled >= wanted => changes.leave.push(index),
                AddressState::Connected(since) => {
                    counted += 1;
                    connected += 1;
                    settled += usize::from(has_passed(since, delays.settle));
                }
                // A gateway that drains waits for edges that have connected to others.
                AddressState::Draining(_) if all_connected >= wanted => changes.leave.push(index),
                AddressState::Connecting | AddressState::Unavailable(_) if connected >= wanted => {
                    changes.leave.push(index);
                }
                AddressState::Connecting => counted += 1,
                AddressState::Leaving => {}
                AddressState::Unavailable(since) | AddressState::Draining(since) => {
                    counted += usize::from(!has_passed(since, replace));
                }
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AddressState::{Connected, Connecting, Draining, Idle, Leaving, Unavailable};
    use std::collections::BTreeMap;

    const SETTLE: Duration = Duration::from_secs(15);

    fn gateways(count: usize) -> Vec<GatewayAddr> {
        let addr = |number| GatewayAddr {
            gateway: "gateways.example.com:10262".to_owned(),
            address: Some(format!("192.0.2.{number}:10262").parse().unwrap()),
        };
        (1..=count).map(addr).collect()
    }

    fn top(node: usize, gateways: &[GatewayAddr], wanted: usize) -> Vec<GatewayAddr> {
        let mut ranked = rank(&format!("edge-{node}"), gateways.to_vec());
        ranked.truncate(wanted);
        ranked
    }

    #[test]
    fn weights_are_the_same_in_all_versions() {
        let weight = |addr| rendezvous_weight("edge-1", &addr);
        let named = |gateway: &str, address: Option<&str>| GatewayAddr {
            gateway: gateway.to_owned(),
            address: address.map(|address| address.parse().unwrap()),
        };
        // First bytes of `printf 'edge-1\0a:1' | sha256sum`, and the same for the address.
        assert_eq!(
            weight(named("a:1", Some("192.0.2.1:10262"))),
            0x76f5_25c3_8ef7_f419
        );
        assert_eq!(
            weight(named("b:1", Some("192.0.2.1:10262"))),
            0x76f5_25c3_8ef7_f419
        );
        assert_eq!(weight(named("a:1", None)), 0xe32d_efae_8d41_e43e);
        let scoped = weight(named("a:1", Some("[fe80::1%2]:1")));
        assert_eq!(scoped, weight(named("a:1", Some("[fe80::1%3]:1"))));
    }

    #[test]
    fn ten_thousand_nodes_spread_evenly_over_the_gateways() {
        for (count, wanted) in [(3, 1), (3, 2), (4, 1), (4, 2), (4, 3)] {
            let gateways = gateways(count);
            let mut nodes: BTreeMap<GatewayAddr, usize> = BTreeMap::new();
            for node in 0..10_000 {
                for addr in top(node, &gateways, wanted) {
                    *nodes.entry(addr).or_default() += 1;
                }
            }
            let share = 10_000 * wanted / count;
            for (addr, number) in &nodes {
                // Three standard deviations are about 145 nodes.
                assert!(
                    number.abs_diff(share) < 150,
                    "{number} of {share} at {addr}"
                );
            }
            assert_eq!(nodes.len(), count);
        }
    }

    #[test]
    fn only_the_nodes_of_a_removed_gateway_move() {
        let before = gateways(4);
        let (removed, after) = before.split_last().unwrap();
        let mut moved: BTreeMap<GatewayAddr, usize> = BTreeMap::new();
        for node in 0..10_000 {
            let (was, is) = (top(node, &before, 2), top(node, after, 2));
            let new: Vec<_> = is.iter().filter(|addr| !was.contains(addr)).collect();
            assert_eq!(new.len(), usize::from(was.contains(removed)));
            for addr in new {
                *moved.entry(addr.clone()).or_default() += 1;
            }
        }
        // Half of the nodes had a tunnel there. The other gateways share them.
        assert!(
            moved.values().all(|number| number.abs_diff(1_667) < 150),
            "{moved:?}"
        );
    }

    fn changes(states: &[AddressState]) -> SelectionChanges {
        SelectionChanges::new(states, 2, SelectionDelays::new(SETTLE, 0.0))
    }

    fn started(states: &[AddressState]) -> Vec<usize> {
        let changes = changes(states);
        assert!(changes.leave.is_empty(), "{changes:?}");
        changes.start
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_address_replaces_an_unavailable_one_after_a_delay() {
        assert_eq!(started(&[Idle; 4]), [0, 1]);
        assert_eq!(started(&[Connecting, Connecting, Idle, Idle]), [0; 0]);
        let now = Instant::now();
        let failed = [Connected(now), Unavailable(now), Idle, Idle];
        assert_eq!(started(&failed), [0; 0]);
        assert_eq!(changes(&failed).next_check, Some(now + REPLACEMENT_DELAY));
        assert!(!changes(&failed).is_exhausted);
        tokio::time::advance(REPLACEMENT_DELAY).await;
        assert_eq!(started(&failed), [2]);
        assert_eq!(started(&[Connected(now), Draining(now), Idle, Idle]), [2]);
        let now = Instant::now();
        assert_eq!(started(&[Leaving, Connected(now), Idle, Idle]), [2]);
        // No gateway is connected.
        assert_eq!(
            started(&[Unavailable(now), Unavailable(now), Idle, Idle]),
            [2, 3]
        );
        assert_eq!(started(&[Unavailable(now), Connecting, Idle, Idle]), [2]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lower_tunnel_leaves_once_higher_ones_have_settled() {
        let now = Instant::now();
        let returned = [Connected(now), Connected(now), Connected(now), Idle];
        assert_eq!(started(&returned), [0; 0]);
        assert_eq!(changes(&returned).next_check, Some(now + SETTLE));
        tokio::time::advance(SETTLE).await;
        assert_eq!(changes(&returned).leave, [2]);
        // A lower one that is not connected has no reason to wait.
        let fresh = Instant::now();
        let states = [
            Connected(now),
            Connected(fresh),
            Unavailable(now),
            Connecting,
        ];
        assert_eq!(changes(&states).leave, [2, 3]);
        // A higher one that is not connected replaces none.
        let states = [Unavailable(now), Connecting, Connected(now), Connected(now)];
        assert_eq!(started(&states), [0; 0]);
        assert!(changes(&states).is_exhausted);
        let states = [Draining(now), Connected(now), Connected(fresh), Idle];
        assert_eq!(changes(&states).leave, [0], "its gateway waits for that");
    }

    #[tokio::test(start_paused = true)]
    async fn an_edge_that_wants_all_gateways_leaves_none() {
        let now = Instant::now();
        tokio::time::advance(2 * SETTLE).await;
        let states = [Connected(now), Idle, Draining(now), Unavailable(now), Idle];
        let delays = SelectionDelays::new(SETTLE, 0.0);
        for wanted in [5, usize::MAX] {
            let changes = SelectionChanges::new(&states, wanted, delays);
            assert_eq!((changes.start, changes.leave), (vec![1, 4], vec![]));
        }
    }
}
