//! Addresses of this host's network interfaces.

use crate::log_throttle::LogThrottle;
use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Time for which the addresses of this host are cached, because there may be thousands.
const CACHE_TTL: Duration = Duration::from_secs(5);

/// Interfaces on which a cluster's proxies put addresses of Services, which are remote nevertheless (kube-proxy with IPVS,
/// `NodeLocal` `DNSCache`).
const SERVICE_INTERFACES: [&str; 2] = ["kube-ipvs0", "nodelocaldns"];

/// NAT64 prefixes of 96 bits, behind which an IPv4 address is reached by IPv6 (RFC 6052, RFC 8215).
const NAT64_PREFIXES: [u128; 2] = [0x64_ff9b << 96, 0x64_ff9b_0001 << 80];

/// Returns the IPv4 address behind a NAT64 address, or else the address itself.
#[must_use]
pub fn strip_nat64(address: IpAddr) -> IpAddr {
    let IpAddr::V6(ipv6) = address else {
        return address;
    };
    let (bits, low_mask) = (ipv6.to_bits(), u128::from(u32::MAX));
    let translated = NAT64_PREFIXES.contains(&(bits & !low_mask));
    let ipv4 = u32::try_from(bits & low_mask).ok().filter(|_| translated);
    ipv4.map_or(address, |four| IpAddr::V4(four.into()))
}

/// Addresses of this host, as they were read at a time.
struct Cached {
    read_at: Instant,
    addresses: Arc<BTreeSet<IpAddr>>,
}

/// Whether an address is one of this host's interfaces, also behind NAT64 or mapped to IPv6. Loopback is none of them. Each
/// address is, if the interfaces cannot be read.
#[must_use]
pub fn is_own(address: IpAddr) -> bool {
    is_among(address, own_addresses().as_deref())
}

fn is_among(address: IpAddr, own: Option<&BTreeSet<IpAddr>>) -> bool {
    own.is_none_or(|own| own.contains(&strip_nat64(address.to_canonical())))
}

/// Returns the addresses of this host's interfaces without loopback, which is always special; `None` if they could never be read.
fn own_addresses() -> Option<Arc<BTreeSet<IpAddr>>> {
    static CACHE: Mutex<Option<Cached>> = Mutex::new(None);
    let lock = || CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut cache = lock();
    let Some(cached) = &mut *cache else {
        let addresses = read_interfaces()?;
        *cache = Some(Cached {
            read_at: Instant::now(),
            addresses: addresses.clone(),
        });
        return Some(addresses);
    };
    let previous = cached.addresses.clone();
    if cached.read_at.elapsed() < CACHE_TTL {
        return Some(previous);
    }
    // Other threads use the previous list meanwhile: reading may wait for changes of the network.
    cached.read_at = Instant::now();
    drop(cache);
    let addresses = read_interfaces().unwrap_or(previous);
    if let Some(cached) = &mut *lock() {
        cached.addresses = addresses.clone();
    }
    Some(addresses)
}

/// Returns `None`, and logs the reason, if the system does not list the interfaces.
fn read_interfaces() -> Option<Arc<BTreeSet<IpAddr>>> {
    static THROTTLE: LazyLock<LogThrottle> = LazyLock::new(LogThrottle::default);
    match getifaddrs() {
        Ok(all) => Some(Arc::new(
            all.filter_map(|each| own_address(&each)).collect(),
        )),
        Err(error) => {
            if THROTTLE.record().is_some() {
                tracing::warn!(%error, "the addresses of this host cannot be listed: the previous list is used, and without one each address counts as its own");
            }
            None
        }
    }
}

fn own_address(interface: &InterfaceAddress) -> Option<IpAddr> {
    if SERVICE_INTERFACES.contains(&interface.interface_name.as_str()) {
        return None;
    }
    let address = interface.address.as_ref()?;
    let ipv4 = address
        .as_sockaddr_in()
        .map(|address| IpAddr::V4(address.ip()));
    let ipv6 = || {
        address
            .as_sockaddr_in6()
            .map(|address| IpAddr::V6(address.ip()))
    };
    ipv4.or_else(ipv6).filter(|address| !address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_addresses_are_those_of_interfaces_except_loopback() {
        let own = own_addresses().unwrap();
        assert!(!own.contains(&IpAddr::from([127, 0, 0, 1])));
        // The source address of this host's packets, if it can send any.
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        if socket.connect("192.0.2.1:9").is_ok() {
            let from = socket.local_addr().unwrap().ip();
            assert!(from.is_loopback() || own.contains(&from), "{from} {own:?}");
        }
    }

    #[test]
    fn each_address_is_own_if_the_interfaces_cannot_be_read() {
        let (own, other) = (IpAddr::from([10, 0, 0, 5]), IpAddr::from([10, 0, 0, 6]));
        let listed = BTreeSet::from([own]);
        for (list, expected) in [(Some(&listed), [true, false]), (None, [true, true])] {
            assert_eq!([own, other].map(|each| is_among(each, list)), expected);
        }
    }
}
