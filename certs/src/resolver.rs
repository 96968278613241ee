//! Selection of the leaf that a server presents, by SNI within the handshake.
//!
//! `SniCertResolver` issues a leaf for a node's name on demand and stores it in a bounded cache. It issues leaves only for
//! names that the gateway knows, so a stranger cannot make it sign without end. Names of services are an exception: only the
//! edges know their services, so every name of a service of a known node gets a leaf. The signature is a small part of the
//! handshake, and these leaves have a cache of their own, so a stranger with many names removes no leaf of a node. Concurrent
//! clients that request the same name wait for one signature (about 50 µs). A leaf is presented for half of its remaining lifetime, at most 84 h. A client that
//! dialled a node's address and sends no server name finds that address in its leaf (`SniCertResolver::for_address`).
//! `ReloadableCert` presents one leaf that can be replaced without a new configuration.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use causeway_tls::{HostName, ListenerName, NodeName};
use moka::sync::Cache;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::UnixTime;

use crate::ca::{Ca, CaError, CaVersion, LiveCa};
use crate::leaf::LeafCertificate;

/// Validity of an issued leaf.
const LEAF_LIFETIME: Duration = Duration::from_hours(24 * 7);
/// Maximum period for which a leaf is presented: half of its validity, so that a client never receives a leaf that is about
/// to expire. A leaf that ends earlier, with its issuer, is presented for half of its remaining time.
const MAX_CACHE_AGE: Duration = Duration::from_hours(24 * 7 / 2);
/// Maximum number of cached leaves: at about 2 KiB each, 40 MiB.
const MAX_LEAVES: u64 = 20_000;

/// Maximum number of cached leaves of services, 4 MiB.
const MAX_SERVICE_LEAVES: u64 = 2_000;

/// Name for which leaves are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KnownName {
    /// Name of a node.
    Node,
    /// Name of a service of a node, which may not exist.
    Service,
}

/// Lookup of a name in lower case. Returns `None` if it is neither of a node nor of a service.
pub type FindName = Arc<dyn Fn(&str) -> Option<KnownName> + Send + Sync>;

/// Destination for which a leaf is issued.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum CertTarget {
    /// The listener itself.
    Listener,
    /// A node, by its name.
    Node(NodeName),
    /// A service of a node, by its name.
    Service(NodeName),
    /// A node, by its name and the address that was dialled.
    Address(NodeName, IpAddr),
}

/// A leaf in the cache.
#[derive(Clone)]
struct CachedLeaf {
    certified: Arc<CertifiedKey>,
    /// Last second in which the leaf is presented, in Unix time. The cache's own clock stands still while a machine is
    /// suspended.
    show_until: u64,
}

impl CachedLeaf {
    fn new(leaf: &LeafCertificate, now: UnixTime) -> Self {
        let remaining = leaf.not_after().as_secs().saturating_sub(now.as_secs());
        Self {
            certified: leaf.certified_key(),
            show_until: now.as_secs() + MAX_CACHE_AGE.as_secs().min(remaining / 2),
        }
    }
}

/// Resolver of the leaves of a listener.
pub struct SniCertResolver {
    ca: LiveCa,
    names: Vec<ListenerName>,
    find_name: FindName,
    /// Cached leaves, by the version of the CA and by target.
    cache: Cache<(CaVersion, CertTarget), CachedLeaf>,
    /// The same for the leaves of services.
    service_cache: Cache<(CaVersion, CertTarget), CachedLeaf>,
}

impl fmt::Debug for SniCertResolver {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SniCertResolver")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl SniCertResolver {
    /// Returns a resolver that presents a leaf for `names` to clients that request no known node. Fails if that leaf cannot
    /// be issued.
    pub fn new(ca: LiveCa, names: Vec<ListenerName>, find_name: FindName) -> Result<Self, CaError> {
        let cache_of = |capacity| {
            Cache::builder()
                .max_capacity(capacity)
                .time_to_live(MAX_CACHE_AGE)
                .build()
        };
        let cache = cache_of(MAX_LEAVES);
        let (current, now) = (ca.get(), UnixTime::now());
        let default_leaf = CachedLeaf::new(&current.issue_listener(&names, LEAF_LIFETIME)?, now);
        cache.insert(
            (current.version_at(now), CertTarget::Listener),
            default_leaf,
        );
        Ok(Self {
            ca,
            names,
            find_name,
            cache,
            service_cache: cache_of(MAX_SERVICE_LEAVES),
        })
    }

    /// Returns the leaf for an SNI, or for a client without SNI.
    pub fn leaf_for_sni(&self, server_name: Option<&str>) -> Option<Arc<CertifiedKey>> {
        self.cached_leaf(
            &self
                .target_for_sni(server_name)
                .unwrap_or(CertTarget::Listener),
        )
    }

    /// Whether a server name is that of a known node or of its services, or one of the listener's own names.
    pub fn recognizes(&self, server_name: &str) -> bool {
        self.target_for_sni(Some(server_name)).is_some() || self.is_own_name(server_name)
    }

    fn is_own_name(&self, server_name: &str) -> bool {
        let server_name = without_root(server_name);
        self.names.iter().any(|name| match name {
            HostName::Dns(name) => name.eq_ignore_ascii_case(server_name),
            HostName::Ip(_) => false,
        })
    }

    /// Returns a resolver of the same leaves for a client that has dialled this address of the node. Clients that request no
    /// known node receive a leaf with the address.
    pub fn for_address(
        self: &Arc<Self>,
        node: NodeName,
        address: IpAddr,
    ) -> Arc<dyn ResolvesServerCert> {
        Arc::new(AddressCertResolver {
            resolver: self.clone(),
            default_target: CertTarget::Address(node, address.to_canonical()),
        })
    }

    fn target_for_sni(&self, server_name: Option<&str>) -> Option<CertTarget> {
        let name = NodeName::parse(without_root(server_name?)).ok()?;
        match (self.find_name)(name.as_str())? {
            KnownName::Node => Some(CertTarget::Node(name)),
            KnownName::Service if self.is_own_name(name.as_str()) => None,
            KnownName::Service => Some(CertTarget::Service(name)),
        }
    }

    fn cached_leaf(&self, shown: &CertTarget) -> Option<Arc<CertifiedKey>> {
        self.cached_leaf_at(shown, UnixTime::now())
    }

    fn cached_leaf_at(&self, shown: &CertTarget, now: UnixTime) -> Option<Arc<CertifiedKey>> {
        let ca = self.ca.get();
        let key = (ca.version_at(now), shown.clone());
        let cache = match shown {
            CertTarget::Service(_) => &self.service_cache,
            CertTarget::Listener | CertTarget::Node(_) | CertTarget::Address(..) => &self.cache,
        };
        let cached = cache.get(&key);
        if cached.is_some_and(|cached| cached.show_until < now.as_secs()) {
            cache.invalidate(&key);
        }
        let leaf = cache.try_get_with(key, || self.issue(&ca, shown, now));
        leaf.inspect_err(
            |error| tracing::error!(%error, ?shown, "cannot issue a certificate for the listener"),
        )
        .ok()
        .map(|leaf| leaf.certified)
    }

    fn issue(&self, ca: &Ca, target: &CertTarget, now: UnixTime) -> Result<CachedLeaf, CaError> {
        let leaf = match target {
            CertTarget::Node(name) | CertTarget::Service(name) => {
                ca.issue_listener(&[HostName::from(name)], LEAF_LIFETIME)?
            }
            CertTarget::Address(node, address) => {
                let names = [HostName::from(node), HostName::Ip(*address)];
                ca.issue_listener(&names, LEAF_LIFETIME)?
            }
            CertTarget::Listener => ca.issue_listener(&self.names, LEAF_LIFETIME)?,
        };
        Ok(CachedLeaf::new(&leaf, now))
    }
}

/// Returns a server name without the dot of the root. Clients have to leave it out (RFC 6066 section 3), and some do not.
fn without_root(server_name: &str) -> &str {
    server_name.strip_suffix('.').unwrap_or(server_name)
}

/// Resolver of the leaves of a listener, for one address.
#[derive(Debug)]
struct AddressCertResolver {
    resolver: Arc<SniCertResolver>,
    default_target: CertTarget,
}

impl ResolvesServerCert for AddressCertResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let target = self.resolver.target_for_sni(hello.server_name());
        self.resolver
            .cached_leaf(target.as_ref().unwrap_or(&self.default_target))
    }
}

impl ResolvesServerCert for SniCertResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.leaf_for_sni(hello.server_name())
    }
}

/// A leaf that can be replaced while it is in use.
#[derive(Debug)]
pub struct ReloadableCert(ArcSwap<LeafCertificate>);

impl ReloadableCert {
    /// Returns a certificate that is `leaf` until another is swapped in.
    pub fn new(leaf: LeafCertificate) -> Self {
        Self(ArcSwap::from_pointee(leaf))
    }

    /// Replaces the leaf for new handshakes; finished ones are not affected.
    pub fn swap(&self, leaf: LeafCertificate) {
        self.0.store(Arc::new(leaf));
    }

    /// Returns the present leaf.
    pub fn get(&self) -> Arc<LeafCertificate> {
        self.0.load_full()
    }
}

impl ResolvesServerCert for ReloadableCert {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load().certified_key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrustDomain;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn nodes(known: impl Fn(&str) -> bool + Send + Sync + 'static) -> FindName {
        Arc::new(move |name| known(name).then_some(KnownName::Node))
    }

    fn resolver(known: impl Fn(&str) -> bool + Send + Sync + 'static) -> SniCertResolver {
        let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let names = vec![ListenerName::parse("127.0.0.1").unwrap()];
        SniCertResolver::new(LiveCa::new(ca), names, nodes(known)).unwrap()
    }

    #[test]
    fn a_known_node_gets_its_own_leaf_once() {
        let resolver = resolver(|name| name == "edge-1");
        let first = resolver.leaf_for_sni(Some("edge-1")).unwrap();
        let again = resolver.leaf_for_sni(Some("EDGE-1")).unwrap();
        assert!(Arc::ptr_eq(&first, &again));
        assert!(!Arc::ptr_eq(&first, &resolver.leaf_for_sni(None).unwrap()));
    }

    #[test]
    fn unknown_names_share_the_default_leaf() {
        let resolver = resolver(|_| false);
        let default = resolver.leaf_for_sni(None).unwrap();
        for name in ["edge-9", "", "not a name", "*"] {
            assert!(
                Arc::ptr_eq(&default, &resolver.leaf_for_sni(Some(name)).unwrap()),
                "{name}"
            );
        }
        resolver.cache.run_pending_tasks();
        assert_eq!(resolver.cache.entry_count(), 1);
    }

    #[test]
    fn names_of_nodes_and_of_the_listener_are_recognized() {
        let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let names = ["gw.example", "127.0.0.1"].map(|name| ListenerName::parse(name).unwrap());
        let known = nodes(|name| name == "edge-1");
        let resolver = SniCertResolver::new(LiveCa::new(ca), names.into(), known).unwrap();
        for (name, recognized) in [
            ("edge-1", true),
            ("EDGE-1", true),
            ("edge-1.", true),
            ("GW.example", true),
            ("gw.example.", true),
            ("edge-1..", false),
            ("edge-2", false),
            ("127.0.0.1", false),
            ("gw.example.com", false),
            ("", false),
        ] {
            assert_eq!(resolver.recognizes(name), recognized, "{name}");
        }
    }

    #[test]
    fn names_of_services_have_leaves_that_replace_no_leaf_of_a_node() {
        let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let names = vec![ListenerName::parse("gw.edge-1").unwrap()];
        let find = |name: &str| match name {
            "edge-1" => Some(KnownName::Node),
            name => name.ends_with(".edge-1").then_some(KnownName::Service),
        };
        let resolver = SniCertResolver::new(LiveCa::new(ca), names, Arc::new(find)).unwrap();
        let node = resolver.leaf_for_sni(Some("edge-1")).unwrap();
        for service in 0..MAX_SERVICE_LEAVES + 100 {
            let name = format!("s{service}.edge-1");
            let leaf = resolver.leaf_for_sni(Some(&name)).unwrap();
            assert!(!Arc::ptr_eq(&leaf, &node));
        }
        resolver.service_cache.run_pending_tasks();
        assert!(resolver.service_cache.entry_count() <= MAX_SERVICE_LEAVES);
        let again = resolver.leaf_for_sni(Some("edge-1")).unwrap();
        assert!(Arc::ptr_eq(&again, &node));
        // The listener itself is no service.
        let own = resolver.leaf_for_sni(Some("gw.edge-1")).unwrap();
        assert!(Arc::ptr_eq(&own, &resolver.leaf_for_sni(None).unwrap()));
    }

    #[test]
    fn an_address_has_a_leaf_of_its_own_once() {
        let resolver = resolver(|_| false);
        let at = |text: &str| {
            let node = NodeName::parse("edge-1").unwrap();
            let leaf = resolver.cached_leaf(&CertTarget::Address(node, text.parse().unwrap()));
            leaf.unwrap()
        };
        assert!(Arc::ptr_eq(&at("10.0.0.1"), &at("10.0.0.1")));
        assert!(!Arc::ptr_eq(&at("10.0.0.1"), &at("10.0.0.2")));
    }

    #[test]
    fn another_root_signs_other_leaves_from_then_on() {
        let resolver = resolver(|name| name == "edge-1");
        let before = resolver.leaf_for_sni(Some("edge-1")).unwrap();
        let next = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        resolver.ca.swap(next);
        let after = resolver.leaf_for_sni(Some("edge-1")).unwrap();
        assert_ne!(before.cert[1], after.cert[1]);
        assert!(Arc::ptr_eq(
            &after,
            &resolver.leaf_for_sni(Some("edge-1")).unwrap()
        ));
    }

    #[test]
    fn a_leaf_that_ends_with_its_issuer_is_shown_for_half_of_its_life() {
        let now = UnixTime::now();
        let later = |hours: u64| {
            UnixTime::since_unix_epoch(Duration::from_secs(now.as_secs() + hours * 3600))
        };
        for (ends, shown) in [(10, 5), (24 * 30, 24 * 7 / 2)] {
            let ca = Ca::ending(later(ends));
            let resolver = SniCertResolver::new(LiveCa::new(ca), vec![], nodes(|_| false));
            let resolver = resolver.unwrap();
            let at = |hours| {
                resolver
                    .cached_leaf_at(&CertTarget::Listener, later(hours))
                    .unwrap()
            };
            let first = at(0);
            assert!(Arc::ptr_eq(&first, &at(shown - 1)), "{ends}");
            assert!(!Arc::ptr_eq(&first, &at(shown + 1)), "{ends}");
        }
    }

    #[test]
    fn clients_at_once_share_one_signature() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let resolver = resolver(move |_| count.fetch_add(1, Ordering::Relaxed) < 64);
        let leaves: Vec<_> = std::thread::scope(|scope| {
            let ask = || resolver.leaf_for_sni(Some("edge-1")).unwrap();
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(leaves.iter().all(|leaf| Arc::ptr_eq(leaf, &leaves[0])));
        assert_eq!(asked.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn a_live_leaf_is_swapped_in_place() {
        let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let mint = || ca.issue_listener(&[], LEAF_LIFETIME).unwrap();
        let live = ReloadableCert::new(mint());
        let old = live.get();
        live.swap(mint());
        assert_ne!(live.get().chain(), old.chain());
    }
}
