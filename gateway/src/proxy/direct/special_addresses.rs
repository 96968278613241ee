//! Addresses that a network in `direct_networks` includes.
//!
//! A network is written for remote machines, and is often wide. Other addresses in the network, such as those of this host and a
//! cloud's metadata service, are included only by a network that contains nothing else.

use ipnet::IpNet;
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

/// Networks that a wide network does not include: this host and its link, metadata services of clouds, and addresses that do not
/// belong to one machine. A metadata service gives machines their credentials.
static SPECIAL_NETWORKS: LazyLock<Vec<IpNet>> = LazyLock::new(|| {
    let networks = [
        "0.0.0.0/8",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/127",
        "fe80::/10",
        "ff00::/8",
        // Metadata services and similar services of Alibaba Cloud, Azure, Oracle Cloud, AWS and Google Cloud that are not
        // link-local.
        "100.100.100.200/32",
        "168.63.129.16/32",
        "192.0.0.192/32",
        "fd00:ec2::/32",
        "fd20:ce::/32",
    ];
    networks.iter().filter_map(|net| net.parse().ok()).collect()
});

/// NAT64 prefixes of 96 bits, behind which an IPv4 address is reached by IPv6 (RFC 6052, RFC 8215).
const NAT64_PREFIXES: [u128; 2] = [0x64_ff9b << 96, 0x64_ff9b_0001 << 80];

/// Whether a network includes this address. Special addresses and this host's own addresses are included only by networks that
/// contain nothing else.
pub(in crate::proxy) fn is_allowed_in(address: IpAddr, network: &IpNet, is_own: bool) -> bool {
    let address = address.to_canonical();
    if !network.contains(&address) {
        return false;
    }
    let is_exact = network.prefix_len() == network.max_prefix_len();
    let mut containing = SPECIAL_NETWORKS
        .iter()
        .filter(|net| net.contains(&strip_nat64(address)));
    let contains_network = |special: &IpNet| special.contains(network);
    is_exact || (!is_own && containing.all(contains_network))
}

/// Whether an address is neither special nor this host's own.
pub(in crate::proxy) fn is_ordinary(address: IpAddr, is_own: bool) -> bool {
    let address = strip_nat64(address.to_canonical());
    !is_own && !SPECIAL_NETWORKS.iter().any(|net| net.contains(&address))
}

/// Returns the IPv4 address behind a NAT64 address, or else the address itself.
fn strip_nat64(address: IpAddr) -> IpAddr {
    let IpAddr::V6(ipv6) = address else {
        return address;
    };
    let (bits, low_mask) = (ipv6.to_bits(), u128::from(u32::MAX));
    let translated = NAT64_PREFIXES.contains(&(bits & !low_mask));
    let ipv4 = u32::try_from(bits & low_mask).ok().filter(|_| translated);
    ipv4.map_or(address, |four| IpAddr::V4(four.into()))
}

/// Whether an address is one of this host's interfaces, also behind NAT64.
pub(in crate::proxy) fn is_own(address: IpAddr) -> bool {
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
            tracing::warn!(%error, "the addresses of this host cannot be listed: listeners with direct continue with the previous list");
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
    fn a_wide_network_excludes_the_gateways_host_and_metadata() {
        let all = "0.0.0.0/0,::/0,10.0.0.0/8,127.0.0.0/8,127.0.0.1,169.254.0.0/16,::1,100.64.0.0/10,\
                   fd00::/8,10.0.0.7/32,64:ff9b::/96,64:ff9b::a9fe:a9fe,fd00:ec2::/32";
        let own: [IpAddr; 2] = ["10.0.0.7", "2001:db8::7"].map(|text| text.parse().unwrap());
        for (address, meant) in [
            ("10.1.2.3", "0.0.0.0/0,10.0.0.0/8"),
            ("::ffff:10.1.2.3", "0.0.0.0/0,10.0.0.0/8"),
            ("127.0.0.1", "127.0.0.0/8,127.0.0.1"),
            ("::ffff:127.0.0.1", "127.0.0.0/8,127.0.0.1"),
            ("169.254.169.254", "169.254.0.0/16"),
            ("::1", "::1"),
            ("fe80::1", ""),
            ("2001:db8::1", "::/0"),
            // Addresses of this host.
            ("10.0.0.7", "10.0.0.7/32"),
            ("::ffff:10.0.0.7", "10.0.0.7/32"),
            ("2001:db8::7", ""),
            ("10.0.0.8", "0.0.0.0/0,10.0.0.0/8"),
            // Addresses that do not belong to one machine.
            ("0.0.0.0", ""),
            ("0.1.2.3", ""),
            ("::", ""),
            ("224.0.0.1", ""),
            ("255.255.255.255", ""),
            ("ff02::1", ""),
            // Metadata services, also behind NAT64.
            ("100.100.100.200", ""),
            ("100.100.100.201", "0.0.0.0/0,100.64.0.0/10"),
            ("168.63.129.16", ""),
            ("192.0.0.192", ""),
            ("fd00:ec2::254", "fd00:ec2::/32"),
            ("fd00:ec3::254", "::/0,fd00::/8"),
            ("64:ff9b::a9fe:a9fe", "64:ff9b::a9fe:a9fe"),
            ("64:ff9b:1::7f00:1", ""),
            ("64:ff9b::a01:203", "::/0,64:ff9b::/96"),
        ] {
            let networks = all.split(',').map(str::trim).filter(|text| {
                let net = text
                    .parse::<IpNet>()
                    .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
                let address: IpAddr = address.parse().unwrap();
                let is_own = own.contains(&address.to_canonical());
                is_allowed_in(address, &net.unwrap(), is_own)
            });
            let found: Vec<_> = networks.collect();
            assert_eq!(found.join(","), meant, "{address}");
        }
        assert_eq!(SPECIAL_NETWORKS.len(), 13, "each of them is a network");
    }

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
