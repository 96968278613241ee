//! Even distribution of edges over the gateways behind one address.
//!
//! A load balancer in front of several gateways does not know how many edges each of them has. A gateway that has just started has
//! few, and the others would keep theirs. So a gateway with more nodes than the average requests some edges to use another gateway
//! in its place. An edge follows only if it found this gateway behind a shared address (`movable`). With addresses of their own,
//! edges select gateways by rendezvous hashing, which is even without this. An edge leaves only when it is connected to the other
//! gateway, and its open streams continue, so no request fails.

use crate::state::Registry;
use causeway_certs::NodeName;
use causeway_tunnel::control_stream::GatewayMessage;
use rand::seq::SliceRandom;
use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::info;

/// Mean interval of the checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Time until an edge that has received the request receives another one. Perhaps it finds no other gateway.
const REQUEST_INTERVAL: Duration = Duration::from_hours(1);
/// Divisor of the surplus that one check moves: an edge leaves up to two checks after the request.
const CHECKS_PER_SURPLUS: usize = 4;
/// Divisor of the average for the surplus that is accepted.
const TOLERANCE: usize = 20;

type Control = mpsc::Sender<Box<GatewayMessage>>;

/// Requests edges to use other gateways while this one has more than the average.
#[derive(Debug)]
pub struct Rebalancer {
    registry: Registry,
    /// Nodes whose edges have received the request, and the time.
    requested: HashMap<NodeName, Instant>,
}

impl Rebalancer {
    /// Creates the task.
    pub fn new(registry: Registry) -> Self {
        Self {
            registry,
            requested: HashMap::new(),
        }
    }

    /// Checks the number of nodes at intervals until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            // The gateways of a fleet check at different times.
            let delay = CHECK_INTERVAL.mul_f64(0.5 + rand::random::<f64>());
            if stop.run_until_cancelled(sleep(delay)).await.is_none() {
                return;
            }
            self.check();
        }
    }

    fn check(&mut self) {
        self.requested
            .retain(|_, at| at.elapsed() < REQUEST_INTERVAL);
        let peers = self.registry.directory().peers();
        let peers = peers
            .iter()
            .filter(|peer| peer.is_synchronized() && !peer.is_suspect() && !peer.is_draining());
        let others: Vec<usize> = peers.map(|peer| peer.node_count()).collect();
        let own = self.registry.connected_nodes();
        let count = edges_to_move(own, &others);
        if count == 0 {
            return;
        }
        let mut sent = 0;
        for (node, control) in self.candidates().into_iter().take(count) {
            // An edge that does not take the message ends soon.
            if control
                .try_send(Box::new(GatewayMessage::Rebalance))
                .is_ok()
            {
                self.requested.insert(node, Instant::now());
                sent += 1;
            }
        }
        if sent > 0 {
            info!(
                nodes = own,
                edges = sent,
                "other gateways have fewer edges: requested some to use those"
            );
        }
    }

    /// Returns the edges that can move, in random order, but those without streams first.
    fn candidates(&self) -> Vec<(NodeName, Control)> {
        let (mut candidates, mut leaving) = (Vec::new(), HashSet::new());
        self.registry.for_each_tunnel(|node, edge| {
            let hello = &edge.tunnel.hello;
            if edge.is_leaving() {
                leaving.insert(node.clone());
            } else if hello.movable && hello.slot == 0 && !self.requested.contains_key(node) {
                candidates.push((edge.streams(), node.clone(), edge.tunnel.control.clone()));
            }
        });
        candidates.retain(|(_, node, _)| !leaving.contains(node));
        candidates.shuffle(&mut rand::rng());
        candidates.sort_by_key(|(streams, _, _)| *streams);
        candidates
            .into_iter()
            .map(|(_, node, control)| (node, control))
            .collect()
    }
}

/// Returns the number of edges that one check moves, from the numbers of nodes of this gateway and of the others.
fn edges_to_move(own: usize, others: &[usize]) -> usize {
    let all = others.iter().sum::<usize>() + own;
    let average = all.div_ceil(others.len() + 1);
    let surplus = own.saturating_sub(average);
    if surplus <= (average / TOLERANCE).max(1) {
        return 0;
    }
    surplus.div_ceil(CHECKS_PER_SURPLUS)
}

#[cfg(test)]
mod tests {
    use super::edges_to_move;

    #[test]
    fn a_quarter_of_the_surplus_moves_at_each_check() {
        for (own, others, count) in [
            (8_000, &[][..], 0),
            (8_000, &[8_000, 8_000], 0),
            (8_000, &[8_000, 0], 667),
            (5_600, &[5_400, 5_000], 0),
            (5_700, &[5_300, 5_000], 92),
            (0, &[8_000, 8_000], 0),
            (12, &[12, 0], 1),
            (2, &[0, 0], 0),
            (3, &[0, 0], 1),
            (1, &[0], 0),
        ] {
            assert_eq!(edges_to_move(own, others), count, "{own} and {others:?}");
        }
    }

    #[test]
    fn repeated_checks_end_in_balance_without_overshoot() {
        let mut nodes = [8_000, 8_000, 0];
        for _ in 0..40 {
            for index in 0..3 {
                let others: Vec<_> = (0..3)
                    .filter(|other| *other != index)
                    .map(|other| nodes[other])
                    .collect();
                let moved = edges_to_move(nodes[index], &others);
                nodes[index] -= moved;
                nodes[2] += moved;
            }
        }
        assert!(
            nodes.iter().all(|count| (4_750..=5_650).contains(count)),
            "{nodes:?}"
        );
    }
}
