//! Tunnels at several gateways: at each address that the gateways' names resolve to, or at the number of them that is
//! configured (`gateway_selection`).
//!
//! The names are resolved again at an interval, whenever the network changes, and when a gateway announces other names. A new
//! address gets its own tunnels. Tunnels stay open at an address that no name resolves to any more. A name server may be
//! wrong, and a gateway that stops announces that itself. When a tunnel at such an address ends, the address is not dialled
//! again. A name that cannot be resolved changes nothing. If an address leads to several gateways, `discovery` finds those
//! that its first connection did not reach.

use super::{
    connected_gateways::TunnelGroup,
    context::{LEAVE_TIMEOUT, TunnelContext},
    discovery::{GatewayDiscovery, sleep_until_some},
    gateway_selection::{self, AddressState, SelectionChanges, SelectionDelays},
    slots::TunnelSlots,
};
use crate::control::{
    connect_error::ConnectError, dial::GatewayAddr, network_monitor::NetworkMonitor,
};
use causeway_rt::task::TaskGroup;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, info_span, warn};

/// Maximum number of addresses. Names that resolve to more cannot all lead to gateways.
const MAX_ADDRESSES: usize = 64;

/// State of the tunnels of an edge at several gateways.
struct AllGateways<'a> {
    context: Arc<TunnelContext>,
    tasks: &'a TaskGroup,
    /// Current addresses of the gateways.
    places: watch::Sender<BTreeSet<GatewayAddr>>,
    /// Whether all current addresses are dialled, so that only a search can find further gateways.
    is_exhausted: watch::Sender<bool>,
    /// Addresses with tunnels.
    slots: BTreeMap<GatewayAddr, AddressSlots>,
    /// Random part of the delays of the next move, from 0 to 1.
    jitter: f64,
    /// Last logged resolution error of each name.
    resolve_errors: BTreeMap<String, String>,
}

/// Tunnels at one address.
struct AddressSlots {
    group: TunnelGroup,
    /// Token that requests the tunnels to leave.
    leave: CancellationToken,
    /// Whether the tunnels leave because the gateway drains. The address is not dialled again before they have ended.
    has_drained: Arc<AtomicBool>,
    /// Token that is cancelled when the address may be dialled again.
    end: CancellationToken,
}

/// Maintains tunnels at every gateway, or at the configured number of them, until the edge stops, then closes them in order.
pub(super) async fn run(context: Arc<TunnelContext>, changes: NetworkMonitor) {
    let tasks = TaskGroup::default();
    let (addresses_tx, addresses_rx) = watch::channel(BTreeSet::new());
    let (exhausted_tx, exhausted_rx) = watch::channel(false);
    let gateways = AllGateways {
        context: context.clone(),
        tasks: &tasks,
        places: addresses_tx,
        is_exhausted: exhausted_tx,
        slots: BTreeMap::new(),
        jitter: rand::random(),
        resolve_errors: BTreeMap::new(),
    };
    let discovery = GatewayDiscovery::new(context.clone(), addresses_rx, exhausted_rx);
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
        let mut table_changes = context.connected_gateways.changes();
        'resolve: loop {
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
                let delay = backoff.silent(rand::random());
                let is_connected = context.connected_gateways.is_any_connected();
                // A name that other nodes know, but not this one, does not cause endless queries.
                if is_connected {
                    delay.max(config.tunnels.resolve_after)
                } else {
                    delay
                }
            };
            self.update_addresses(results, delay);
            let resolve_at = Instant::now() + delay;
            loop {
                table_changes.mark_unchanged();
                let next_check = self.update_slots(&changes);
                tokio::select! {
                    () = table_changes.changed() => {}
                    () = sleep_until_some(next_check) => {}
                    () = sleep_until(resolve_at) => break,
                    () = changes.changed() => break,
                    // The sender lives at least as long as this task.
                    _ = gateway_changes.changed() => break,
                    () = stop.cancelled() => break 'resolve,
                }
            }
        }
    }

    /// Updates the current addresses. If a name could not be resolved, its known addresses stay.
    fn update_addresses(
        &mut self,
        results: Vec<(String, Result<Vec<GatewayAddr>, ConnectError>)>,
        retry_in: Duration,
    ) {
        self.slots.retain(|_, slots| !slots.end.is_cancelled());
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
                    let known_addresses = self.known_addresses();
                    addresses.extend(
                        known_addresses
                            .into_iter()
                            .filter(|place| place.gateway == gateway),
                    );
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
    }

    /// Returns the addresses that names resolved to last, and those with tunnels.
    fn known_addresses(&self) -> BTreeSet<GatewayAddr> {
        let mut known = self.places.borrow().clone();
        known.extend(self.slots.keys().cloned());
        known
    }

    /// Starts and ends tunnels as `gateway_selection` requires. Returns the time of the next check.
    fn update_slots(&mut self, changes: &NetworkMonitor) -> Option<Instant> {
        self.slots.retain(|_, slots| !slots.end.is_cancelled());
        let context = self.context.clone();
        let ranked = gateway_selection::rank(&context.node, self.known_addresses());
        let mode = context.config.tunnels.gateways;
        let wanted = usize::try_from(mode.max_gateways()).unwrap_or(usize::MAX);
        let is_duplicate = |addr: &&GatewayAddr| {
            let slots = self.slots.get(addr);
            slots.is_some_and(|slots| context.connected_gateways.is_duplicate(slots.group))
        };
        let distinct = ranked.len() - ranked.iter().filter(is_duplicate).count();
        context.status.set_wanted_gateways(mode.count(), distinct);
        let discovered = context.connected_gateways.discovered_gateways();
        let mut states: Vec<_> = ranked.iter().map(|addr| self.address_state(addr)).collect();
        states.extend(
            discovered
                .iter()
                .map(|(since, _)| AddressState::Connected(*since)),
        );
        let delays = SelectionDelays::new(context.config.tunnels.resolve_after, self.jitter);
        let selected = SelectionChanges::new(&states, wanted, delays);
        for &index in &selected.leave {
            if let Some(addr) = ranked.get(index) {
                self.leave(addr, states[index]);
            } else {
                info!(
                    "enough other gateways are connected: closing the tunnels to a discovered one"
                );
                discovered[index - ranked.len()].1.cancel();
            }
        }
        for &index in &selected.start {
            let slots = self.spawn_slots(ranked[index].clone(), changes.clone());
            self.slots.insert(ranked[index].clone(), slots);
        }
        if !(selected.start.is_empty() && selected.leave.is_empty()) {
            self.jitter = rand::random();
        }
        self.is_exhausted.send_if_modified(|is_exhausted| {
            std::mem::replace(is_exhausted, selected.is_exhausted) != selected.is_exhausted
        });
        selected.next_check
    }

    fn address_state(&self, addr: &GatewayAddr) -> AddressState {
        match self.slots.get(addr) {
            None => AddressState::Idle,
            Some(slots) if slots.leave.is_cancelled() => AddressState::Leaving,
            Some(slots) => self.context.connected_gateways.address_state(slots.group),
        }
    }

    /// Requests the tunnels at this address to leave.
    fn leave(&self, addr: &GatewayAddr, state: AddressState) {
        let Some(slots) = self.slots.get(addr) else {
            return;
        };
        if matches!(state, AddressState::Draining(_)) {
            slots.has_drained.store(true, Relaxed);
        }
        info!(place = %addr, "enough other gateways are connected: closing the tunnels at this address");
        slots.leave.cancel();
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

    fn spawn_slots(&self, place: GatewayAddr, changes: NetworkMonitor) -> AddressSlots {
        let connected_gateways = self.context.connected_gateways.clone();
        let stop = self.context.stop.clone();
        let span = info_span!("gateway", %place);
        let slots = TunnelSlots::at_gateway(self.context.clone(), place, self.places.subscribe());
        let address_slots = AddressSlots {
            group: slots.group(),
            leave: slots.leave_token(),
            has_drained: Arc::default(),
            end: CancellationToken::new(),
        };
        let group = slots.group();
        connected_gateways.add_group(group, slots.leave_token(), false);
        let has_drained = address_slots.has_drained.clone();
        let end_guard = address_slots.end.clone().drop_guard();
        self.tasks.spawn(span, async move {
            let leaving = slots.run(None, changes).await;
            if has_drained.load(Relaxed) {
                leaving.end(&stop).await;
                drop(end_guard);
                connected_gateways.remove_group(group);
            } else {
                // The address may be dialled again meanwhile.
                drop(end_guard);
                connected_gateways.remove_group(group);
                leaving.end(&stop).await;
            }
        });
        address_slots
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
