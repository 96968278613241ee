//! A network of a test's own: hosts in network namespaces around a street, whose links a test cuts and restores.
//!
//! The street is a bridge in a namespace of its own, in which the gateway and its clients run; a pair of interfaces
//! connects each host to it. A cut drops packets on arrival, at both ends and after they were sent, as a dead link does:
//! there is no notice, and no FIN passes. Hosts of one site may also have a switch, which no cut affects. Names contain
//! this process's id and are unique. Everything is removed with the value, also when the test fails. Sockets and children
//! belong to the namespace in which the thread is when it makes them, and each test has its own thread.

use super::process::{Causeway, am_root, binary, program};
use nix::sched::{CloneFlags, setns};
use std::{
    fs::{self, File},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};
use tokio::net::TcpStream;

/// Requirements for `need!`.
pub(crate) const NEED: &str = "root and ip netns";

/// Address of the gateway and its clients.
pub(crate) const HUB: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// The same, for a street with routes to other networks.
const HUB6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1);

static NEXT: AtomicU32 = AtomicU32::new(0);

/// Whether this process can make namespaces, with nftables in them.
pub(crate) fn possible() -> bool {
    static POSSIBLE: OnceLock<bool> = OnceLock::new();
    *POSSIBLE.get_or_init(|| {
        let name = unique();
        let made = am_root() && run("ip", &["netns", "add", &name]).is_ok();
        let filters = made
            && run(
                "ip",
                &["netns", "exec", &name, "nft", "add", "table", "inet", "cut"],
            )
            .is_ok();
        if made {
            let _ = run("ip", &["netns", "del", &name]);
        }
        filters
    })
}

fn unique() -> String {
    format!("cw{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}

fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let ran = Command::new(program)
        .args(arguments)
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if ran.status.success() {
        return Ok(String::from_utf8_lossy(&ran.stdout).into_owned());
    }
    let message = String::from_utf8_lossy(&ran.stderr).into_owned();
    Err(format!("{program} {}: {message}", arguments.join(" ")))
}

fn must(program: &str, line: &str) {
    let arguments: Vec<&str> = line.split_whitespace().collect();
    run(program, &arguments).unwrap();
}

/// This thread is in a namespace; dropping the value returns it to the previous one.
pub(crate) struct NamespaceGuard(File);

impl NamespaceGuard {
    fn enter(name: &str) -> Self {
        let before = File::open("/proc/thread-self/ns/net").unwrap();
        let there = File::open(format!("/run/netns/{name}")).unwrap();
        setns(there, CloneFlags::CLONE_NEWNET).unwrap();
        Self(before)
    }
}

impl Drop for NamespaceGuard {
    fn drop(&mut self) {
        // A thread that cannot return must not continue in the wrong namespace.
        setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
    }
}

/// A namespace; dropping it removes it.
struct Space(String);

impl Space {
    fn new() -> Self {
        let space = Self(unique());
        must("ip", &format!("netns add {}", space.0));
        space.ip("link set lo up");
        space
    }

    fn ip(&self, line: &str) {
        must("ip", &format!("-n {} {line}", self.0));
    }

    fn nft(&self, line: &str) {
        must("ip", &format!("netns exec {} nft {line}", self.0));
    }

    /// Runs `nft` there. Returns its output, or its error if it fails.
    fn says(&self, line: &str) -> Result<String, String> {
        let line = line.split_whitespace();
        let all: Vec<&str> = ["netns", "exec", &self.0, "nft"]
            .into_iter()
            .chain(line)
            .collect();
        run("ip", &all)
    }

    /// Adds a table for rules that drop arriving packets.
    fn filter(&self) {
        self.nft("add table inet cut");
        self.nft("add chain inet cut in { type filter hook prerouting priority raw ; }");
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        let _ = run("ip", &["netns", "del", &self.0]);
        let _ = fs::remove_dir_all(settings(&self.0));
    }
}

/// Returns the folder that `ip netns exec` mounts over `/etc`.
fn settings(name: &str) -> PathBuf {
    PathBuf::from("/etc/netns").join(name)
}

/// The street, with the gateway's host on it. The thread that made it is in that namespace.
pub(crate) struct SharedNetwork {
    _inside: NamespaceGuard,
    hub: Space,
    hosts: AtomicU32,
    switches: AtomicU32,
}

impl SharedNetwork {
    /// A street without hosts.
    pub(crate) fn new() -> Self {
        let hub = Space::new();
        hub.ip("link add street type bridge");
        hub.ip(&format!("addr add {HUB}/24 dev street"));
        hub.ip("link set street up");
        hub.filter();
        hub.nft("add set inet cut away { type ipv4_addr ; }");
        hub.nft("add rule inet cut in ip saddr @away drop");
        Self {
            _inside: NamespaceGuard::enter(&hub.0),
            hub,
            hosts: AtomicU32::new(0),
            switches: AtomicU32::new(0),
        }
    }

    /// The hub has IPv6, and a default route.
    pub(crate) fn opens_up(&self) {
        self.hub.ip(&format!("addr add {HUB6}/64 dev street nodad"));
        self.hub.ip("route add default dev street");
        self.hub.ip("-6 route add default dev street");
    }

    /// Runs `nft` in the hub. Returns its output, or its error if it fails.
    pub(crate) fn nft(&self, line: &str) -> Result<String, String> {
        self.hub.says(line)
    }

    /// The hub's TCP retransmits at least each second, if the kernel (6.15 and later) has that setting.
    pub(crate) fn insists(&self) -> bool {
        let told = "net.ipv4.tcp_rto_max_ms=1000";
        run("ip", &["netns", "exec", &self.hub.0, "sysctl", "-qw", told]).is_ok()
    }

    /// A host with its link up.
    pub(crate) fn host(&self) -> Host<'_> {
        let number = self.hosts.fetch_add(1, Relaxed) + 1;
        let last = u8::try_from(number + 1).expect("a street is short");
        let (space, port) = (Space::new(), format!("port{number}"));
        let (hub, own) = (&self.hub.0, &space.0);
        self.hub.ip(&format!(
            "link add {port} netns {hub} type veth peer name eth0 netns {own}"
        ));
        self.hub.ip(&format!("link set {port} master street up"));
        space.filter();
        let host = Host {
            street: self,
            space,
            address: Ipv4Addr::new(10, 77, 0, last),
        };
        host.space
            .ip(&format!("addr add {}/24 dev eth0", host.address));
        host.up();
        host
    }

    /// A switch for hosts of one site, which leads nowhere else.
    pub(crate) fn switch(&self) -> Switch {
        let number = self.switches.fetch_add(1, Relaxed) + 1;
        let space = Space::new();
        space.ip("link add switch type bridge");
        space.ip("link set switch up");
        Switch {
            space,
            number: u8::try_from(number).expect("a street has few sites"),
            hosts: AtomicU32::new(0),
        }
    }
}

/// Switch that connects the hosts of one site, independent of the street.
pub(crate) struct Switch {
    space: Space,
    number: u8,
    hosts: AtomicU32,
}

impl Switch {
    /// Connects a host; returns its address there.
    pub(crate) fn takes(&self, host: &Host<'_>) -> Ipv4Addr {
        let last = self.hosts.fetch_add(1, Relaxed) + 1;
        let port = format!("port{last}");
        let last = u8::try_from(last).expect("a site is small");
        let (switch, own) = (&self.space.0, &host.space);
        self.space.ip(&format!(
            "link add {port} netns {switch} type veth peer name eth1 netns {}",
            own.0
        ));
        self.space.ip(&format!("link set {port} master switch up"));
        let address = Ipv4Addr::new(10, 78, self.number, last);
        own.ip(&format!("addr add {address}/24 dev eth1"));
        own.ip("link set eth1 up");
        address
    }
}

/// A host on the street.
pub(crate) struct Host<'a> {
    street: &'a SharedNetwork,
    space: Space,
    address: Ipv4Addr,
}

impl Host<'_> {
    /// Its address.
    pub(crate) fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Adds an address, which the hub knows.
    pub(crate) fn has(&self, address: IpAddr) {
        self.space.ip(&format!("addr add {address} dev eth0"));
        let hub = &self.street.hub;
        hub.ip(&format!("route replace {address} via {}", self.address));
    }

    /// Adds an address to the hub itself.
    pub(crate) fn hub_has(&self, address: IpAddr) {
        let hub = &self.street.hub;
        hub.ip(&format!("addr add {address} dev lo"));
    }

    /// It sends IPv6 to the hub, in a street with routes to other networks.
    pub(crate) fn opens_up(&self) {
        let [.., last] = self.address.octets();
        self.space
            .ip(&format!("addr add fd77::{last}/64 dev eth0 nodad"));
        self.space.ip(&format!("-6 route add default via {HUB6}"));
    }

    /// Moves this thread to the host: sockets that listen from now on listen on that host.
    pub(crate) fn enter(&self) -> NamespaceGuard {
        NamespaceGuard::enter(&self.space.0)
    }

    /// The binary, to run on the host.
    pub(crate) fn causeway(&self) -> Causeway {
        self.program(binary())
    }

    /// Any program, to run on the host.
    pub(crate) fn program(&self, path: &str) -> Causeway {
        program("ip").args(["netns", "exec", &self.space.0, path])
    }

    /// Connects to a port of its loopback.
    pub(crate) fn dial(&self, port: u16) -> io::Result<TcpStream> {
        let there = self.enter();
        // Loopback answers at once, with or without an error.
        let dialled = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        drop(there);
        let stream = dialled?;
        stream.set_nonblocking(true)?;
        TcpStream::from_std(stream)
    }

    /// From now on nothing passes between it and the street, without notice.
    pub(crate) fn cut(&self) {
        self.space.nft("add rule inet cut in iifname eth0 drop");
        let away = format!("add element inet cut away {{ {} }}", self.address);
        self.street.hub.nft(&away);
    }

    /// Everything passes again.
    pub(crate) fn mend(&self) {
        self.street.hub.nft(&format!(
            "delete element inet cut away {{ {} }}",
            self.address
        ));
        self.accept_packets();
    }

    /// From now on no packet of the other host arrives. Packets to it still pass.
    pub(crate) fn drop_packets_of(&self, other: &Host<'_>) {
        let rule = format!("add rule inet cut in ip saddr {} drop", other.address);
        self.space.nft(&rule);
    }

    /// Packets of all hosts arrive again.
    pub(crate) fn accept_packets(&self) {
        self.space.nft("flush chain inet cut in");
    }

    /// Takes its link down, which the host itself notices.
    pub(crate) fn down(&self) {
        self.space.ip("link set eth0 down");
    }

    /// Brings its link up, with the default route.
    pub(crate) fn up(&self) {
        self.space.ip("link set eth0 up");
        self.space.ip(&format!("route replace default via {HUB}"));
    }

    /// Gives it another address in place of its own.
    pub(crate) fn moves_to(&mut self, last: u8) {
        let address = Ipv4Addr::new(10, 77, 0, last);
        self.space
            .ip(&format!("addr del {}/24 dev eth0", self.address));
        self.space.ip(&format!("addr add {address}/24 dev eth0"));
        self.address = address;
        self.up();
    }

    /// Sets its name server, for `causeway` processes.
    pub(crate) fn asks(&self, server: IpAddr) {
        let folder = settings(&self.space.0);
        fs::create_dir_all(&folder).unwrap();
        let text = format!("nameserver {server}\noptions timeout:30 attempts:1\n");
        fs::write(folder.join("resolv.conf"), text).unwrap();
    }
}
