//! The cloud's network and the edge's: sites behind routers that admit no connections from outside.
//!
//! The inner program itself is in the cloud, on a bridge. Each site is a router and a node behind it, which reaches the
//! outside through the router's NAT. The cloud has no route to a node, and the routers forward only answers.

use std::{
    ffi::OsStr,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddrV4},
    path::Path,
};

use super::process::{Program, must};

/// The cloud's address: API server, gateway and clients.
pub(crate) const CLOUD: Ipv4Addr = Ipv4Addr::new(10, 97, 0, 1);

/// Address of the DNS server for names that come from a hosts file.
pub(crate) const HOSTED: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 53);

/// Names of the nodes in the cloud. kube-apiserver resolves a name before it proxies to it, even if it then asks for the name
/// by CONNECT.
pub(crate) const HOSTS: &str = "127.0.0.1 localhost\n10.97.0.50 cloud-1 registry.example.com\n10.1.1.11 edge-1\n10.1.2.12 edge-2\n";

/// The address of the cloud's node.
pub(crate) const MACHINE: Ipv4Addr = Ipv4Addr::new(10, 97, 0, 50);

/// Makes the cloud's bridge.
pub(crate) fn cloud() {
    must("ip link add cloud type bridge");
    must(&format!("ip addr add {CLOUD}/24 dev cloud"));
    must("ip link set cloud up");
}

/// Gives the cloud a default route, as any machine has one, which leads to no host: the kernel looks for a route before it
/// applies rules that redirect.
pub(crate) fn leads_on() {
    must("ip route replace default via 10.97.0.254");
}

/// A program that finds nodes only by this `resolv.conf`: its `hosts` has none of them.
pub(crate) fn asking(resolver: &Path, program: &Path) -> Program {
    let hosts = resolver.with_extension("hosts");
    fs::write(&hosts, "127.0.0.1 localhost\n").unwrap();
    let script = "mount --bind $0 /etc/resolv.conf && mount --bind $1 /etc/hosts && \
         shift && exec \"$@\"";
    let shell = Program::new("unshare")
        .words("--mount sh -c")
        .args([script]);
    shell.args([resolver, &hosts, program])
}

/// A node's network behind a router.
pub(crate) struct Site {
    router: String,
    space: String,
    address: Ipv4Addr,
}

impl Site {
    /// The site with this number, from 1.
    pub(crate) fn new(number: u8) -> Self {
        let (router, space) = (format!("router-{number}"), format!("site-{number}"));
        let site = Self {
            address: Ipv4Addr::new(10, 1, number, 10 + number),
            router,
            space,
        };
        let (router, space) = (&site.router, &site.space);
        for name in [router, space] {
            must(&format!("ip netns add {name}"));
            must(&format!("ip -n {name} link set lo up"));
        }
        must(&format!(
            "ip link add wan{number} type veth peer name wan netns {router}"
        ));
        must(&format!("ip link set wan{number} master cloud up"));
        must(&format!(
            "ip -n {router} addr add 10.97.0.{}/24 dev wan",
            100 + number
        ));
        must(&format!("ip -n {router} link set wan up"));
        must(&format!(
            "ip -n {router} link add lan type veth peer name eth0 netns {space}"
        ));
        must(&format!(
            "ip -n {router} addr add 10.1.{number}.1/24 dev lan"
        ));
        must(&format!("ip -n {router} link set lan up"));
        must(&format!(
            "ip -n {space} addr add {}/24 dev eth0",
            site.address
        ));
        must(&format!("ip -n {space} link set eth0 up"));
        must(&format!(
            "ip -n {space} route add default via 10.1.{number}.1"
        ));
        site.shut();
        site
    }

    /// Makes the site a network of the cloud: the cloud and the sites of these numbers reach it and the network of its pods.
    pub(crate) fn admits(&self, pods: &str, from: impl IntoIterator<Item = u8>) {
        self.at_router("nft").words("flush ruleset").run().ok();
        let number = self.address.octets()[2];
        let gateway = Ipv4Addr::new(10, 97, 0, 100 + number);
        must(&format!(
            "ip -n {} route add {pods} via {}",
            self.router, self.address
        ));
        let routers = from.into_iter().map(|it| format!("-n router-{it}"));
        for at in routers.chain([String::new()]) {
            for network in [pods, &format!("10.1.{number}.0/24")] {
                must(&format!("ip {at} route add {network} via {gateway}"));
            }
        }
    }

    /// NAT for outgoing connections; only answers come in.
    fn shut(&self) {
        let rules = "table ip nat {\n\
             chain out { type nat hook postrouting priority 100; oifname \"wan\" masquerade; }\n\
             chain through { type filter hook forward priority 0; policy drop;\n\
             iifname \"lan\" accept; ct state established,related accept; }\n}\n";
        self.at_router("nft").words("-f -").input(rules).run().ok();
        let forward = self.at_router("sysctl");
        forward.words("-qw net.ipv4.ip_forward=1").run().ok();
    }

    /// Lets the router pass nothing but connections from the node to this address.
    pub(crate) fn permits_only(&self, address: SocketAddrV4) {
        let (ip, port) = (address.ip(), address.port());
        let rules = format!(
            "flush chain ip nat through\n\
             add rule ip nat through iifname \"lan\" ip daddr {ip} tcp dport {port} accept\n\
             add rule ip nat through iifname \"wan\" ct state established accept\n"
        );
        self.at_router("nft").words("-f -").input(rules).run().ok();
    }

    fn at_router(&self, program: &str) -> Program {
        // Not `ip netns exec`, which would hide the cgroups behind a sysfs of its own.
        Program::new("nsenter").args([&format!("--net=/run/netns/{}", self.router), program])
    }

    /// A program to run in the node's network, without the node's mounts.
    pub(crate) fn at(&self, program: impl AsRef<OsStr>) -> Program {
        let network = format!("--net={}", self.network());
        Program::new("nsenter")
            .args([network])
            .args([program.as_ref()])
    }

    /// Drops all packets to and from the cloud; the node's interface stays up.
    pub(crate) fn cut(&self) {
        must(&format!("ip -n {} link set wan down", self.router));
    }

    /// Passes all packets again.
    pub(crate) fn mend(&self) {
        must(&format!("ip -n {} link set wan up", self.router));
    }

    /// The node's own address.
    pub(crate) fn address(&self) -> IpAddr {
        IpAddr::V4(self.address)
    }

    /// The file of the node's network namespace.
    pub(crate) fn network(&self) -> String {
        format!("/run/netns/{}", self.space)
    }
}

/// Connects nodes to a network of this name that they share, with an address each: it works when all links to the cloud are cut.
pub(crate) fn neighbours(network: &str, sites: &[(&Site, Ipv4Addr)]) {
    must(&format!("ip netns add {network}"));
    must(&format!("ip -n {network} link add field type bridge"));
    must(&format!("ip -n {network} link set field up"));
    for (number, (site, address)) in sites.iter().enumerate() {
        neighbour((network, number), site, *address);
    }
}

/// Connects another node to that network, with a number of its own.
pub(crate) fn neighbour((network, number): (&str, usize), site: &Site, address: Ipv4Addr) {
    let space = &site.space;
    must(&format!(
        "ip -n {network} link add node{number} type veth peer name field netns {space}"
    ));
    must(&format!(
        "ip -n {network} link set node{number} master field up"
    ));
    must(&format!("ip -n {space} addr add {address}/24 dev field"));
    must(&format!("ip -n {space} link set field up"));
}

/// A machine of the cloud, which the gateway's host can dial.
pub(crate) struct Machine {
    space: &'static str,
}

impl Machine {
    /// Connects the machine of the node `cloud-1` to the cloud's bridge.
    pub(crate) fn new() -> Self {
        let (space, address) = ("machine", MACHINE);
        let machine = Self { space };
        must(&format!("ip netns add {space}"));
        must(&format!(
            "ip link add {space} type veth peer name eth0 netns {space}"
        ));
        must(&format!("ip link set {space} master cloud up"));
        must(&format!("ip -n {space} addr add {address}/24 dev eth0"));
        for link in ["lo", "eth0"] {
            must(&format!("ip -n {space} link set {link} up"));
        }
        machine
    }

    /// A program to run on that machine.
    pub(crate) fn at(&self, program: &str) -> Program {
        Program::new("nsenter").args([&format!("--net=/run/netns/{}", self.space), program])
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // A failed test has a more important message.
        Program::new("ip")
            .words("netns del")
            .args([self.space])
            .run();
    }
}
