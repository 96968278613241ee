//! Addresses of this host's network interfaces.

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
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

/// Whether an address is one of this host's interfaces, also behind NAT64 or mapped to IPv6. Loopback is none of them.
#[must_use]
pub fn is_own(address: IpAddr) -> bool {
    own_addresses().contains(&strip_nat64(address.to_canonical()))
}

/// Returns the addresses of this host's interfaces without loopback, which is always special.
fn own_addresses() -> Arc<BTreeSet<IpAddr>> {
    static CACHE: Mutex<Option<(Instant, Arc<BTreeSet<IpAddr>>)>> = Mutex::new(None);
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, addresses)) = cache
        .as_ref()
        .filter(|(since, _)| since.elapsed() < CACHE_TTL)
    {
        return addresses.clone();
    }
    let own = match getifaddrs() {
        Ok(all) => Arc::new(all.filter_map(|each| own_address(&each)).collect()),
        Err(error) => {
            tracing::warn!(%error, "the addresses of this host cannot be listed: checks of own addresses continue with the previous list");
            cache.take().map(|(_, own)| own).unwrap_or_default()
        }
    };
    *cache = Some((Instant::now(), own.clone()));
    own
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
        let own = own_addresses();
        assert!(!own.contains(&IpAddr::from([127, 0, 0, 1])));
        // The source address of this host's packets, if it can send any.
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        if socket.connect("192.0.2.1:9").is_ok() {
            let from = socket.local_addr().unwrap().ip();
            assert!(from.is_loopback() || own.contains(&from), "{from} {own:?}");
        }
    }
}
