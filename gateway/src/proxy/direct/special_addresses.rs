//! Addresses that a network in `direct_networks` includes.
//!
//! A network is written for remote machines, and is often wide. Other addresses in the network, such as those of this host and a
//! cloud's metadata service, are included only by a network that contains nothing else.

use causeway_rt::host_addresses::strip_nat64;
use ipnet::IpNet;
use std::{net::IpAddr, sync::LazyLock};

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
}
