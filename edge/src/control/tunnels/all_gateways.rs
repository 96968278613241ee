//! Tunnels at every gateway: at each address that the gateways' names resolve to.
//!
//! The names are resolved again at an interval, whenever the network changes, and when a gateway announces other names. A new
//! address gets its own tunnels. Tunnels stay open at an address that no name resolves to any more. A name server may be
//! wrong, and a gateway that stops announces that itself. When a tunnel at such an address ends, the address is not dialled
//! again. A name that cannot be resolved changes nothing. If an address leads to several gateways, `discovery` finds those
//! that its first connection did not reach.

use super::{
    context::{LEAVE_TIMEOUT, TunnelContext},
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

/// Maximum number of addresses. Names that resolve to more cannot all lead to gateways.
const MAX_ADDRESSES: usize = 64;

/// State of the tunnels at all gateways of an edge.
struct AllGateways<'a> {
    context: Arc<TunnelContext>,
    tasks: &'a TaskGroup,
    /// Current addresses of the gateways.
    places: watch::Sender<BTreeSet<GatewayAddr>>,
    /// Addresses with tunnels. The token is cancelled when the tunnels of an address have ended.
    slots: BTreeMap<GatewayAddr, CancellationToken>,
    /// Last logged resolution error of each name.
    resolve_errors: BTreeMap<String, String>,
}

/// Maintains tunnels at every gateway until the edge stops, then closes them in order.
pub(super) async fn run(context: Arc<TunnelContext>, changes: NetworkMonitor) {
    let tasks = TaskGroup::default();
    let (addresses_tx, addresses_rx) = watch::channel(BTreeSet::new());
    let gateways = AllGateways {
        context: context.clone(),
        tasks: &tasks,
        places: addresses_tx,
        slots: BTreeMap::new(),
        resolve_errors: BTreeMap::new(),
    };
    let discovery = GatewayDiscovery::new(context.clone(), addresses_rx);
    tokio::join!(
        gateways.run(changes.clone()),
        discovery.run(changes.clone(), &tasks)
    );
    // Each address waits first for its slots, and then for open streams.
    let grace = context.config.timeouts.drain + 3 * LEAVE_TIMEOUT;
    tasks.drain(grace).await;
}

impl AllGateways<'_> {
    /// Resolves the names repeatedly, until the edge stops.
    async fn run(mut self, mut changes: NetworkMonitor) {
        let context = self.context.clone();
        let (stop, config) = (&context.stop, &context.config);
        let mut backoff = context.backoff();
        let mut gateway_changes = context.gateways.changes();
        loop {
            changes.mark_seen();
            context.gateways.remove_expired().await;
            gateway_changes.mark_unchanged();
            let gateways = context.gateways.all();
            let resolving = context.connector.resolve_all(&gateways);
            let Some(results) = stop.run_until_cancelled(resolving).await else {
                break;
            };
            let all_resolved = results.iter().all(|(_, places)| places.is_ok());
            let delay = if all_resolved {
                backoff.reset();
                // Jitter for edges that started at the same time.
                let jitter = 0.75 + rand::random::<f64>() / 4.0;
                config.tunnels.resolve_after.mul_f64(jitter)
            } else {
                backoff.silent(rand::random())
            };
            self.update_slots(results, delay, &changes);
            tokio::select! {
                () = sleep(delay) => {}
                () = changes.changed() => {}
                // The sender lives at least as long as this task.
                _ = gateway_changes.changed() => {}
                () = stop.cancelled() => break,
            }
        }
    }

    /// Starts tunnels at each new address. If a name could not be resolved, its known addresses stay.
    fn update_slots(
        &mut self,
        results: Vec<(String, Result<Vec<GatewayAddr>, ConnectError>)>,
        retry_in: Duration,
        changes: &NetworkMonitor,
    ) {
        self.slots.retain(|_, over| !over.is_cancelled());
        let gateway_names: BTreeSet<String> =
            results.iter().map(|(gateway, _)| gateway.clone()).collect();
        self.resolve_errors
            .retain(|gateway, _| gateway_names.contains(gateway));
        let mut addresses = BTreeSet::new();
        for (gateway, resolved) in results {
            match resolved {
                Ok(found) => {
                    self.mark_resolved(&gateway);
                    addresses.extend(found);
                }
                Err(error) => {
                    self.mark_unresolved(&gateway, &error, retry_in);
                    let known_addresses =
                        self.slots.keys().filter(|place| place.gateway == gateway);
                    addresses.extend(known_addresses.cloned());
                }
            }
        }
        let addresses = self.distinct_addresses(addresses);
        let previous = self.places.send_replace(addresses.clone());
        for place in previous.difference(&addresses) {
            if self.slots.contains_key(place) {
                info!(%place, "no gateway name resolves to this address any more");
            }
        }
        for addr in addresses {
            if !self.slots.contains_key(&addr) {
                let slot_end = self.spawn_slots(addr.clone(), changes.clone());
                self.slots.insert(addr, slot_end);
            }
        }
    }

    /// Returns each address once. An address that is already known keeps its name.
    fn distinct_addresses(&self, places: BTreeSet<GatewayAddr>) -> BTreeSet<GatewayAddr> {
        let (known, new): (Vec<_>, Vec<_>) = places
            .into_iter()
            .partition(|place| self.slots.contains_key(place));
        let mut addresses = BTreeSet::new();
        let mut distinct = BTreeSet::new();
        for addr in known.into_iter().chain(new) {
            let is_new = addr.address.is_none_or(|address| addresses.insert(address));
            if is_new && distinct.len() < MAX_ADDRESSES {
                distinct.insert(addr);
            }
        }
        distinct
    }

    fn spawn_slots(&self, place: GatewayAddr, changes: NetworkMonitor) -> CancellationToken {
        let slot_end = CancellationToken::new();
        let end_guard = slot_end.clone().drop_guard();
        let stop = self.context.stop.clone();
        let span = info_span!("gateway", %place);
        let slots = TunnelSlots::at_gateway(self.context.clone(), place, self.places.subscribe());
        self.tasks.spawn(span, async move {
            let leaving = slots.run(None, changes).await;
            // The address may be dialled again meanwhile.
            drop(end_guard);
            leaving.end(&stop).await;
        });
        slot_end
    }

    fn mark_resolved(&mut self, gateway: &str) {
        if self.resolve_errors.remove(gateway).is_some() {
            info!(gateway, "the gateway name resolves again");
            self.context.status.clear_error(gateway);
        }
    }

    fn mark_unresolved(&mut self, gateway: &str, error: &ConnectError, retry_in: Duration) {
        let what = error.detail();
        self.context
            .status
            .set_error(gateway, what, false, retry_in);
        let previous = self
            .resolve_errors
            .insert(gateway.to_owned(), what.to_owned());
        if previous.as_deref() != Some(what) {
            warn!(gateway, what, "cannot resolve a gateway name");
        }
    }
}
