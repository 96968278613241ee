//! Tunnels at every gateway: at each address that the gateways' names lead to.
//!
//! The names are resolved anew from time to time, whenever the network changes, and when a gateway announces other names. A
//! new address gets tunnels of its own. Tunnels stay at an address to which no name leads any more, for a name server may be
//! wrong and a gateway that leaves announces that itself. A tunnel there that has ended is not dialled again. A name that
//! cannot be resolved changes nothing. If an address leads to several gateways, `discovery` finds those to which it did not
//! lead at first.

use super::{
    context::{LEAVING, TunnelContext},
    discovery::GatewayDiscovery,
    slots::TunnelSlots,
};
use crate::control::{
    connect_error::ConnectError, dial::GatewayAddr, network_monitor::NetworkMonitor,
};
use causeway_rt::task::TaskGroup;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, info_span, warn};

/// Names that lead to more addresses than this lead to no gateways.
const MOST: usize = 64;

/// All gateways of an edge.
struct AllGateways<'a> {
    links: Arc<TunnelContext>,
    tasks: &'a TaskGroup,
    /// Current addresses of the gateways.
    places: watch::Sender<BTreeSet<GatewayAddr>>,
    /// Addresses with tunnels, until the token is cancelled.
    at: BTreeMap<GatewayAddr, CancellationToken>,
    /// Why names cannot be resolved, as far as it has been said.
    unresolved: BTreeMap<String, String>,
}

/// Keeps tunnels at every gateway until the edge stops, then leaves in order.
pub(super) async fn run(links: Arc<TunnelContext>, changes: NetworkMonitor) {
    let tasks = TaskGroup::default();
    let (places, found) = watch::channel(BTreeSet::new());
    let every = AllGateways {
        links: links.clone(),
        tasks: &tasks,
        places,
        at: BTreeMap::new(),
        unresolved: BTreeMap::new(),
    };
    let seeker = GatewayDiscovery::at(links.clone(), found);
    tokio::join!(
        every.run(changes.clone()),
        seeker.run(changes.clone(), &tasks)
    );
    // Each address waits for its slots, and then for open streams.
    let grace = links.config.timeouts.drain + 3 * LEAVING;
    tasks.drain(grace).await;
}

impl AllGateways<'_> {
    /// Follows the names until the edge stops.
    async fn run(mut self, mut changes: NetworkMonitor) {
        let links = self.links.clone();
        let (stop, config) = (&links.stop, &links.config);
        let mut backoff = links.backoff();
        let mut told = links.gateways.changes();
        loop {
            changes.forget();
            told.mark_unchanged();
            let gateways = links.gateways.all();
            let found = links.dialler.places_of(&gateways);
            let Some(found) = stop.run_until_cancelled(found).await else {
                break;
            };
            let resolved = found.iter().all(|(_, places)| places.is_ok());
            let delay = if resolved {
                backoff.reset();
                // Jitter for edges that started at the same time.
                let jitter = 0.75 + rand::random::<f64>() / 4.0;
                config.tunnels.resolve_after.mul_f64(jitter)
            } else {
                backoff.silent(rand::random())
            };
            self.follow(found, delay, &changes);
            tokio::select! {
                () = sleep(delay) => {}
                () = changes.next() => {}
                // The sender lives at least as long as this task.
                _ = told.changed() => {}
                () = stop.cancelled() => break,
            }
        }
    }

    /// Keeps tunnels where gateways are now.
    fn follow(
        &mut self,
        found: Vec<(String, Result<Vec<GatewayAddr>, ConnectError>)>,
        again: Duration,
        changes: &NetworkMonitor,
    ) {
        self.at.retain(|_, over| !over.is_cancelled());
        let named: BTreeSet<String> = found.iter().map(|(gateway, _)| gateway.clone()).collect();
        self.unresolved.retain(|gateway, _| named.contains(gateway));
        let mut wanted = BTreeSet::new();
        for (gateway, places) in found {
            match places {
                Ok(places) => {
                    self.resolved(&gateway);
                    wanted.extend(places);
                }
                Err(trouble) => {
                    self.unresolved(&gateway, &trouble, again);
                    let known = self.at.keys().filter(|place| place.gateway == gateway);
                    wanted.extend(known.cloned());
                }
            }
        }
        let wanted = self.distinct(wanted);
        let before = self.places.send_replace(wanted.clone());
        for place in before.difference(&wanted) {
            if self.at.contains_key(place) {
                info!(%place, "no gateway name resolves to this address any more");
            }
        }
        for place in wanted {
            if !self.at.contains_key(&place) {
                let over = self.keep(place.clone(), changes.clone());
                self.at.insert(place, over);
            }
        }
    }

    /// Returns each address once, by the name under which it is known already if there is one.
    fn distinct(&self, places: BTreeSet<GatewayAddr>) -> BTreeSet<GatewayAddr> {
        let (known, new): (Vec<_>, Vec<_>) = places
            .into_iter()
            .partition(|place| self.at.contains_key(place));
        let mut addresses = BTreeSet::new();
        let mut distinct = BTreeSet::new();
        for place in known.into_iter().chain(new) {
            let is_new = place
                .address
                .is_none_or(|address| addresses.insert(address));
            if is_new && distinct.len() < MOST {
                distinct.insert(place);
            }
        }
        distinct
    }

    fn keep(&self, place: GatewayAddr, changes: NetworkMonitor) -> CancellationToken {
        let over = CancellationToken::new();
        let ended = over.clone().drop_guard();
        let stop = self.links.stop.clone();
        let span = info_span!("gateway", %place);
        let slots = TunnelSlots::at(self.links.clone(), place, self.places.subscribe());
        self.tasks.spawn(span, async move {
            let leaving = slots.run(None, changes).await;
            // The address may be dialled again meanwhile.
            drop(ended);
            leaving.end(&stop).await;
        });
        over
    }

    fn resolved(&mut self, gateway: &str) {
        if self.unresolved.remove(gateway).is_some() {
            info!(gateway, "the gateway name resolves again");
            self.links.state.mended(gateway);
        }
    }

    fn unresolved(&mut self, gateway: &str, trouble: &ConnectError, again: Duration) {
        let what = trouble.what();
        self.links.state.trouble(gateway, what, false, again);
        let said = self.unresolved.insert(gateway.to_owned(), what.to_owned());
        if said.as_deref() != Some(what) {
            warn!(gateway, what, "cannot resolve a gateway name");
        }
    }
}
