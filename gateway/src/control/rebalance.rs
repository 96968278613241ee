//! Even distribution of edges over the gateways behind one address.
//!
//! A load balancer in front of several gateways does not know how many edges each of them has. A gateway that has just started has
//! few, and the others would keep theirs. So a gateway with more nodes than the average requests some edges to use another gateway
//! in its place. An edge follows only if it found this gateway behind a shared address (`movable`). With addresses of their own,
//! edges select gateways by rendezvous hashing, which is even without this. An edge leaves only when it is connected to the other
//! gateway, and its open streams continue, so no request fails.
//!
//! The gateway does not know whether its edges can reach the gateways with fewer edges: these may be in another network. So the first
//! batch of requests is small, and the next one is twice as large if most edges of the last one have left. If they stay, the gateway
//! pauses. A gateway that has no fewer edges than the average tells edges that search for such a replacement (`crowded`), so that
//! edges do not move in circles.

use crate::state::{Registry, directory::Peer};
use causeway_certs::NodeName;
use causeway_tunnel::control_stream::GatewayMessage;
use rand::seq::SliceRandom;
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

/// Mean interval of the checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Time until an edge that has received the request receives another one.
const REQUEST_INTERVAL: Duration = Duration::from_hours(1);
/// Number of edges in the first batch.
const FIRST_BATCH: usize = 8;
/// Time for a batch to leave: an edge searches for two minutes, and then keeps both gateways for half a minute.
const BATCH_TIME: Duration = Duration::from_mins(3);
/// First pause after a batch that has not left, which doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_mins(10);
const MAX_PAUSE: Duration = Duration::from_hours(6);
/// Maximum number of processes of peers that are remembered.
const MAX_KNOWN_PEERS: usize = 1024;
/// Divisor of the average for the surplus that is accepted.
const TOLERANCE: usize = 20;

type Control = mpsc::Sender<Box<GatewayMessage>>;

/// Requests edges to use other gateways while this one has more than the average.
#[derive(Debug)]
pub struct Rebalancer {
    registry: Registry,
    /// Nodes whose edges have received the request, and the time.
    requested: HashMap<NodeName, Instant>,
    pace: Pace,
    /// Instances of the peers so far.
    peers: HashSet<String>,
}

/// Nodes of this gateway at one moment.
#[derive(Debug, Default)]
struct Tally {
    /// Nodes with a tunnel that does not leave.
    active: HashSet<NodeName>,
    /// Edges that can move: the number of their streams, the node, and the channel to the edge.
    movable: Vec<(usize, NodeName, Control)>,
}

impl Rebalancer {
    /// Creates the task.
    pub fn new(registry: Registry) -> Self {
        Self {
            registry,
            requested: HashMap::new(),
            pace: Pace::default(),
            peers: HashSet::new(),
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
        let is_comparable =
            |peer: &&Arc<Peer>| peer.is_synchronized() && !peer.is_suspect() && !peer.is_draining();
        let peers: Vec<_> = peers.iter().filter(is_comparable).collect();
        let others: Vec<usize> = peers.iter().map(|peer| peer.active_node_count()).collect();
        let instances: HashSet<_> = peers.iter().map(|peer| peer.instance.clone()).collect();
        if !instances.is_subset(&self.peers) {
            // Another gateway may be within reach.
            self.pace = Pace::default();
            if self.peers.len() > MAX_KNOWN_PEERS {
                self.peers.clear();
            }
            self.peers.extend(instances);
        }
        let tally = self.tally();
        let surplus = Surplus::new(tally.active.len(), &others);
        self.registry.set_crowded(surplus.is_crowded);
        let count = self.pace.next_batch(surplus.edges, &tally.active);
        if count > 0 {
            self.request(tally, count);
        }
    }

    fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        self.registry.for_each_tunnel(|node, edge| {
            if edge.is_leaving() {
                return;
            }
            tally.active.insert(node.clone());
            let hello = &edge.tunnel.hello;
            if hello.movable && hello.slot == 0 && !self.requested.contains_key(node) {
                let control = edge.tunnel.control.clone();
                tally.movable.push((edge.streams(), node.clone(), control));
            }
        });
        tally
    }

    /// Sends the request to this number of edges, at random, but to those without streams first.
    fn request(&mut self, tally: Tally, count: usize) {
        let mut movable = tally.movable;
        movable.shuffle(&mut rand::rng());
        movable.sort_by_key(|(streams, _, _)| *streams);
        let mut batch = Vec::new();
        for (_, node, control) in movable.into_iter().take(count) {
            // An edge that does not take the message ends soon.
            if control
                .try_send(Box::new(GatewayMessage::Rebalance))
                .is_ok()
            {
                self.requested.insert(node.clone(), Instant::now());
                batch.push(node);
            }
        }
        if !batch.is_empty() {
            info!(
                nodes = tally.active.len(),
                edges = batch.len(),
                "this gateway has more edges than the average: requested some to use another gateway"
            );
            self.pace.begin(batch);
        }
    }
}

/// Number of edges that this gateway has too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Surplus {
    edges: usize,
    /// Whether this gateway has no fewer edges than the average.
    is_crowded: bool,
}

impl Surplus {
    /// Compares the number of nodes of this gateway with those of the others.
    fn new(own: usize, others: &[usize]) -> Self {
        let all = others.iter().sum::<usize>() + own;
        let average = all.div_ceil(others.len() + 1);
        let surplus = own.saturating_sub(average);
        let is_tolerable = surplus <= (average / TOLERANCE).max(1);
        Self {
            edges: if is_tolerable { 0 } else { surplus },
            is_crowded: own >= average,
        }
    }
}

/// Sizes and times of the batches.
#[derive(Debug)]
struct Pace {
    size: usize,
    /// Nodes of the last batch, and its time.
    batch: Option<(Vec<NodeName>, Instant)>,
    /// Number of batches in a row whose edges have not left.
    failures: u32,
    paused_until: Option<Instant>,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            size: FIRST_BATCH,
            batch: None,
            failures: 0,
            paused_until: None,
        }
    }
}

impl Pace {
    /// Returns the maximum number of edges that receive the request now. Half of the surplus moves at once, because the last of it is
    /// within the tolerance.
    fn next_batch(&mut self, surplus: usize, active: &HashSet<NodeName>) -> usize {
        if self
            .paused_until
            .is_some_and(|until| Instant::now() < until)
        {
            return 0;
        }
        let has_paused = self.paused_until.take().is_some();
        if let Some((nodes, began)) = &self.batch {
            let left = nodes.iter().filter(|node| !active.contains(*node)).count();
            if left * 2 > nodes.len() {
                self.size *= 2;
                self.failures = 0;
            } else if began.elapsed() < BATCH_TIME {
                return 0;
            } else if !has_paused {
                let pause = FIRST_PAUSE * 2_u32.pow(self.failures.min(6));
                self.failures += 1;
                self.size = FIRST_BATCH;
                self.paused_until = Some(Instant::now() + pause.min(MAX_PAUSE));
                debug!(?pause, "edges found no other gateway");
                // Edges with a long `tunnels.resolve_after` may leave meanwhile.
                return 0;
            }
            self.batch = None;
        }
        self.size.min(surplus.div_ceil(2))
    }

    fn begin(&mut self, batch: Vec<NodeName>) {
        self.batch = Some((batch, Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(numbers: std::ops::Range<usize>) -> Vec<NodeName> {
        numbers
            .map(|number| NodeName::parse(&format!("edge-{number}")).unwrap())
            .collect()
    }

    #[test]
    fn a_small_surplus_is_accepted() {
        for (own, others, edges, is_crowded) in [
            (8_000, &[][..], 0, true),
            (8_000, &[8_000, 8_000], 0, true),
            (8_000, &[8_000, 0], 2_666, true),
            (5_600, &[5_400, 5_000], 0, true),
            (5_700, &[5_300, 5_000], 366, true),
            (5_200, &[5_300, 5_500], 0, false),
            (0, &[8_000, 8_000], 0, false),
            (2, &[0, 0], 0, true),
            (3, &[0, 0], 2, true),
            (1, &[0], 0, true),
        ] {
            let surplus = Surplus { edges, is_crowded };
            assert_eq!(Surplus::new(own, others), surplus, "{own} and {others:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn batches_grow_while_edges_leave_and_never_exceed_the_surplus() {
        let (mut pace, mut active) = (Pace::default(), names(0..8_000));
        let mut sizes = Vec::new();
        for _ in 0..100 {
            let surplus = active.len() - 5_334;
            let present = active.iter().cloned().collect();
            let count = pace.next_batch(surplus, &present);
            assert_eq!(
                pace.next_batch(surplus, &present),
                count,
                "no message was sent"
            );
            if count == 0 {
                break;
            }
            let batch = active.split_off(active.len() - count);
            pace.begin(batch.clone());
            let present = active.iter().chain(&batch).cloned().collect();
            assert_eq!(pace.next_batch(surplus, &present), 0, "they have not left");
            sizes.push(count);
        }
        assert_eq!(sizes[..9], [8, 16, 32, 64, 128, 256, 512, 825, 413]);
        assert_eq!(active.len(), 5_334);
    }

    #[tokio::test(start_paused = true)]
    async fn edges_that_cannot_leave_are_left_alone_for_longer_and_longer() {
        let (mut pace, present) = (Pace::default(), names(0..8_000).into_iter().collect());
        let (begun, mut requests) = (Instant::now(), 0);
        while begun.elapsed() < Duration::from_hours(24) {
            let count = pace.next_batch(2_666, &present);
            if count > 0 {
                requests += count;
                pace.begin(names(0..count));
            }
            tokio::time::advance(CHECK_INTERVAL).await;
        }
        assert_eq!(requests, 9 * FIRST_BATCH);
    }
}
