//! Addresses of gateways: the configured ones, and those that gateways announced.
//!
//! Each gateway replaces only its own announcement, and the list is the union of all announcements. So gateways that announce
//! only their own addresses do not displace each other. After the last tunnel of a gateway has ended, its addresses stay for
//! [`ADDRESS_LIFETIME`], because the gateway may return, or may still run without a tunnel of this edge. They go at once if
//! another process with the same gateway name announces other addresses.
//!
//! The announced addresses are saved in the data directory, so that an edge whose configured gateway is gone finds the other
//! gateways after a restart. The gateway that was connected last is tried first.

use super::identity_store::IdentityStore;
use crate::status::StatusWriter;
use causeway_config::host_port;
use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{sync::watch, time::Instant};
use tracing::{info, warn};

/// Maximum number of announced addresses. A longer list can only be a mistake.
const MAX_GATEWAYS: usize = 64;

/// Time for which the addresses of a gateway without a tunnel stay in the list. A machine may be repaired within a day, and
/// an obsolete address costs one failed dial a minute at most.
const ADDRESS_LIFETIME: Duration = Duration::from_hours(24);

/// Addresses of the gateways that the edge dials.
#[derive(Clone, Debug)]
pub(crate) struct GatewayList(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    configured: Vec<String>,
    announced: Mutex<Announcements>,
    identity_store: IdentityStore,
    last_connected: Mutex<Option<String>>,
    status: Arc<StatusWriter>,
    changed: watch::Sender<()>,
}

/// Announcements of all gateways.
#[derive(Debug, Default)]
struct Announcements {
    /// Announcements of the connected gateways, oldest first.
    current: Vec<Announcement>,
    /// Addresses that only gateways without a tunnel announced.
    former: Vec<FormerAddress>,
    /// Union of the announcements when it was last saved.
    saved: Vec<String>,
}

/// Announcement of one gateway process.
#[derive(Debug)]
struct Announcement {
    source: AnnouncementSource,
    addresses: Vec<String>,
    /// Number of tunnels at this gateway process.
    tunnels: usize,
}

/// Gateway process that announces addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AnnouncementSource {
    /// Name of the gateway, which a restart does not change.
    pub(crate) gateway: String,
    /// Instance name of the process.
    pub(crate) instance: String,
}

#[derive(Debug)]
struct FormerAddress {
    address: String,
    /// Name of the gateway that announced the address. `None` if it was read from the disk or received at enrolment.
    gateway: Option<String>,
    until: Instant,
}

impl Announcements {
    fn from_saved(saved: Vec<String>) -> Self {
        let mut announcements = Self {
            saved: saved.clone(),
            ..Self::default()
        };
        announcements.add_former(saved, None);
        announcements
    }

    /// Returns the addresses of all announcements without duplicates.
    fn union(&self) -> Vec<String> {
        let now = Instant::now();
        let former = self.former.iter().filter(|former| former.until > now);
        let former = former.map(|former| &former.address);
        let current = self.current.iter().flat_map(|each| &each.addresses);
        let mut union: Vec<String> = Vec::new();
        for address in current.chain(former) {
            if !union.contains(address) {
                union.push(address.clone());
            }
        }
        union.truncate(MAX_GATEWAYS);
        union
    }

    /// Returns the union if it differs from the saved one.
    fn take_change(&mut self) -> Option<Vec<String>> {
        let now = Instant::now();
        self.former.retain(|former| former.until > now);
        let union = self.union();
        if union == self.saved {
            return None;
        }
        self.saved.clone_from(&union);
        Some(union)
    }

    /// Adds the addresses as those of a gateway without a tunnel, unless they are known.
    fn add_former(&mut self, addresses: Vec<String>, gateway: Option<&str>) {
        let until = Instant::now() + ADDRESS_LIFETIME;
        let known: BTreeSet<String> = self.union().into_iter().collect();
        for address in addresses {
            if !known.contains(&address) {
                self.former.push(FormerAddress {
                    address,
                    gateway: gateway.map(ToOwned::to_owned),
                    until,
                });
            }
        }
        let excess = self.former.len().saturating_sub(MAX_GATEWAYS);
        self.former.drain(..excess);
    }

    /// Replaces the announcement of this gateway process, if it has a tunnel.
    fn replace(&mut self, source: &AnnouncementSource, addresses: Vec<String>) {
        let Some(index) = self.current.iter().position(|each| each.source == *source) else {
            return;
        };
        self.former.retain(|former| {
            former.gateway.as_ref() != Some(&source.gateway) && !addresses.contains(&former.address)
        });
        self.current[index].addresses = addresses;
    }

    fn add_tunnel(&mut self, source: &AnnouncementSource) {
        let known = self.current.iter_mut().find(|each| each.source == *source);
        match known {
            Some(known) => known.tunnels += 1,
            None => self.current.push(Announcement {
                source: source.clone(),
                addresses: Vec::new(),
                tunnels: 1,
            }),
        }
    }

    fn remove_tunnel(&mut self, source: &AnnouncementSource) {
        let Some(index) = self.current.iter().position(|each| each.source == *source) else {
            return;
        };
        self.current[index].tunnels -= 1;
        if self.current[index].tunnels == 0 {
            let last = self.current.remove(index);
            self.add_former(last.addresses, Some(&source.gateway));
        }
    }
}

/// Handle through which one tunnel passes on the announcements of its gateway. They are current while a tunnel has one.
pub(crate) struct Announcer {
    gateways: GatewayList,
    source: AnnouncementSource,
}

impl Announcer {
    /// Takes over the gateway addresses that the gateway announces. An empty list, or a list without a valid address, changes
    /// nothing.
    pub(crate) async fn update(&self, announced: Vec<String>) {
        let valid = valid_addresses(announced);
        if valid.is_empty() {
            return;
        }
        let change = {
            let mut announcements = locked(&self.gateways.0.announced);
            announcements.replace(&self.source, valid);
            announcements.take_change()
        };
        self.gateways.publish(change).await;
    }
}

impl fmt::Debug for Announcer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Announcer").field(&self.source).finish()
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        locked(&self.gateways.0.announced).remove_tunnel(&self.source);
    }
}

impl GatewayList {
    pub(crate) fn new(
        configured: Vec<String>,
        identity_store: IdentityStore,
        status: Arc<StatusWriter>,
    ) -> Self {
        let saved = identity_store.identity().gateways;
        let gateways = Self(Arc::new(Inner {
            configured,
            announced: Mutex::new(Announcements::from_saved(saved)),
            identity_store,
            last_connected: Mutex::default(),
            status,
            changed: watch::Sender::default(),
        }));
        gateways.0.status.set_gateways(gateways.all());
        gateways
    }

    /// Returns all addresses without duplicates. The gateway that was connected last comes first.
    pub(crate) fn all(&self) -> Vec<String> {
        let last_connected = locked(&self.0.last_connected).clone();
        let announced = locked(&self.0.announced).union();
        let mut all: Vec<String> = Vec::new();
        for gateway in last_connected
            .into_iter()
            .chain(self.0.configured.iter().cloned())
            .chain(announced)
        {
            if !all.contains(&gateway) {
                all.push(gateway);
            }
        }
        all
    }

    /// Returns a receiver that is notified when the announced addresses change.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.0.changed.subscribe()
    }

    /// Records that a tunnel to this gateway is open.
    pub(crate) fn mark_connected(&self, gateway: &str) {
        *locked(&self.0.last_connected) = Some(gateway.to_owned());
    }

    /// Returns the handle for the announcements that arrive over one tunnel.
    pub(crate) fn announcer(&self, source: AnnouncementSource) -> Announcer {
        locked(&self.0.announced).add_tunnel(&source);
        Announcer {
            gateways: self.clone(),
            source,
        }
    }

    /// Adds the gateway addresses of a new identity, and saves the union, because the new identity has only its own addresses
    /// on the disk.
    pub(crate) async fn add(&self, addresses: Vec<String>) {
        let union = {
            let mut announcements = locked(&self.0.announced);
            announcements.add_former(valid_addresses(addresses), None);
            announcements.saved = announcements.union();
            announcements.saved.clone()
        };
        self.publish(Some(union)).await;
    }

    /// Removes the addresses that no gateway has announced for [`ADDRESS_LIFETIME`].
    pub(crate) async fn remove_expired(&self) {
        let change = locked(&self.0.announced).take_change();
        self.publish(change).await;
    }

    /// Saves a changed union of the announcements, and notifies the tasks that dial.
    async fn publish(&self, change: Option<Vec<String>>) {
        let Some(union) = change else {
            return;
        };
        info!(gateways = ?union, "the addresses that gateways announce have changed");
        self.0.changed.send_replace(());
        let update = |identity: &mut causeway_certs::EdgeIdentity| identity.gateways = union;
        if let Err(error) = self.0.identity_store.update(update).await {
            warn!(%error, "cannot save the gateway's addresses; they are lost at the next restart");
        }
        // The status shows the addresses only after they are on the disk.
        self.0.status.set_gateways(self.all());
    }
}

fn valid_addresses(announced: Vec<String>) -> Vec<String> {
    let mut valid: Vec<String> = announced
        .into_iter()
        .filter(|each| host_port(each).is_ok())
        .take(MAX_GATEWAYS)
        .collect();
    valid.dedup();
    valid
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(gateway: &str, instance: &str) -> AnnouncementSource {
        AnnouncementSource {
            gateway: gateway.to_owned(),
            instance: instance.to_owned(),
        }
    }

    fn addresses(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn announcements_of_several_gateways_are_a_union() {
        let mut all = Announcements::default();
        let (a, b) = (source("a", "1"), source("b", "1"));
        all.add_tunnel(&a);
        all.add_tunnel(&b);
        all.replace(&a, addresses(&["a:1", "x:1"]));
        all.replace(&b, addresses(&["b:1", "x:1"]));
        assert_eq!(all.union(), ["a:1", "x:1", "b:1"]);
        assert!(all.take_change().is_some() && all.take_change().is_none());
        // The other gateway still announces the address.
        all.replace(&a, addresses(&["a:1"]));
        assert_eq!(all.union(), ["a:1", "b:1", "x:1"]);
        // No gateway announces the address any more.
        all.replace(&b, addresses(&["b:1"]));
        assert_eq!(all.union(), ["a:1", "b:1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_of_a_lost_gateway_stay_for_a_day_or_until_its_successor_announces() {
        let mut all = Announcements::from_saved(addresses(&["saved:1"]));
        let (a, b) = (source("a", "1"), source("b", "1"));
        for gateway in [&a, &a, &b] {
            all.add_tunnel(gateway);
        }
        all.replace(&a, addresses(&["a:1"]));
        all.replace(&b, addresses(&["b:1"]));
        all.remove_tunnel(&a);
        all.remove_tunnel(&b);
        assert_eq!(all.union(), ["a:1", "saved:1", "b:1"]);
        // A restart of the gateway at another address.
        let restarted = source("b", "2");
        all.add_tunnel(&restarted);
        all.replace(&restarted, addresses(&["b:2"]));
        assert_eq!(all.union(), ["a:1", "b:2", "saved:1"]);
        tokio::time::advance(ADDRESS_LIFETIME).await;
        assert_eq!(all.union(), ["a:1", "b:2"]);
        assert!(all.take_change().is_some() && all.former.is_empty());
    }

    #[test]
    fn the_number_of_addresses_is_bounded() {
        let mut all = Announcements::default();
        for number in 0..100 {
            let gateway = source("a", &number.to_string());
            all.add_tunnel(&gateway);
            all.replace(&gateway, vec![format!("a:{number}")]);
            assert!(all.union().contains(&format!("a:{number}")));
            all.remove_tunnel(&gateway);
        }
        all.add_former((0..100).map(|port| format!("b:{port}")).collect(), None);
        assert_eq!((all.union().len(), all.former.len()), (64, 64));
    }
}
