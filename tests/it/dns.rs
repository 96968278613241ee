//! Names of nodes by DNS: real queries to a gateway, by dig and through a real `CoreDNS`.

use crate::world::{
    World,
    app::App,
    gateway::loopback,
    netns::{self, SharedNetwork},
    process::{GatewayProcess, OPEN, causeway},
    tool::{Running, Tool, coredns, full, need},
    until,
};
use causeway_gateway::config::Dns;
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};
use std::{
    ffi::OsStr,
    net::SocketAddr,
    path::Path,
    sync::atomic::{AtomicU8, Ordering},
    time::{Duration, Instant},
};
use test_summary::unused_port;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
};

const ZONE: &str = "nodes.example.internal";
/// Addresses to which the names of edge nodes resolve here.
const LISTENERS: [&str; 2] = ["192.0.2.20", "2001:db8::20"];
/// Types of records.
const A: u8 = 1;
const SOA: u8 = 6;
/// Time within which the name of a joining edge exists, on an idle machine.
const FRESH: Duration = Duration::from_secs(1);

fn dns() -> Dns {
    Dns {
        listen: loopback(),
        zones: vec![ZONE.to_owned()],
        addresses: LISTENERS.iter().map(|text| text.parse().unwrap()).collect(),
        ..Dns::default()
    }
}

async fn world() -> World {
    World::build()
        .config(|config| config.dns = dns().into())
        .start()
        .await
}

/// Returns the output of dig for a query to `server` with these words, split at blanks.
async fn dig(server: SocketAddr, line: &str) -> String {
    let (at, port) = (format!("@{}", server.ip()), server.port().to_string());
    let dig = Tool::new("dig").args([&at, "-p", &port, "+time=60", "+tries=1"]);
    dig.args(line.split(' ')).run().await.ok().text()
}

/// Returns only the data of the answer, one line for each record.
async fn short(server: SocketAddr, line: &str) -> String {
    dig(server, &format!("+short {line}"))
        .await
        .trim_end()
        .to_owned()
}

/// Waits for this answer of a `CoreDNS`, which fails queries while this machine stops the gateway for some seconds.
async fn until_short(server: SocketAddr, line: &str, expected: &str) {
    let what = format!("{line}: {expected}");
    until(&what, async || short(server, line).await == expected).await;
}

/// Returns the status of an answer in dig's words, such as `NXDOMAIN`.
async fn status(server: SocketAddr, line: &str) -> String {
    let message = dig(server, line).await;
    let status = message
        .split("status: ")
        .nth(1)
        .unwrap_or_else(|| panic!("{message}"));
    status.split(',').next().unwrap().to_owned()
}

/// Sends the query without a separate program, whose start would take time.
async fn assert_has_an_address_at_once(server: SocketAddr, name: &str) {
    let begun = Instant::now();
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(server).await.unwrap();
    let mut answer = [0; 512];
    until("the name has an address", async || {
        socket.send(&question(name, A)).await.unwrap();
        socket.recv(&mut answer).await.unwrap();
        let (code, answers) = (answer[3] & 0x0f, answer[7]);
        code == 0 && answers > 0
    })
    .await;
    let took = begun.elapsed();
    assert!(!full() || took < FRESH, "{took:?}");
}

/// Whether the server still answers, over UDP and TCP.
async fn assert_answers(server: SocketAddr) {
    for over in ["+notcp", "+tcp"] {
        // Datagrams that nobody has read yet may leave no room for the query.
        let line = format!("{over} +time=2 +tries=30 {ZONE} SOA");
        assert!(short(server, &line).await.starts_with("ns.dns."), "{over}");
    }
}

#[tokio::test]
async fn an_edge_name_resolves_within_a_second_and_while_disconnected() {
    need!("dig");
    let world = world().await;
    let (server, name) = (world.dns(), format!("edge-1.{ZONE}"));
    assert_eq!(status(server, &name).await, "NXDOMAIN");
    let mut edge = world.edge("edge-1").join().await;
    assert_has_an_address_at_once(server, &name).await;
    assert_eq!(short(server, &name).await, LISTENERS[0]);
    assert_eq!(short(server, &format!("{name} AAAA")).await, LISTENERS[1]);
    assert_eq!(
        short(server, &format!("+tcp EDGE-1.{ZONE}")).await,
        LISTENERS[0]
    );
    // A service resolves like its node, whether it exists or not.
    assert_eq!(
        short(server, &format!("printer.{name}")).await,
        LISTENERS[0]
    );
    let message = dig(server, &name).await;
    assert!(message.contains("flags: qr aa rd;"), "{message}");
    assert!(message.contains("udp: 1232"), "{message}");

    edge.stop().await;
    world.until_tunnels("edge-1", 0).await;
    assert_eq!(
        short(server, &name).await,
        LISTENERS[0],
        "the gateway logs the reason"
    );
    let metrics = world.metrics().await;
    assert_eq!(metrics.sum("dns_queries_total", &[("outcome", "edge")]), 7);
    assert_eq!(metrics.sum("dns_queries_total", &[("outcome", "none")]), 1);
}

/// Both gateways forward requests to each other, so both know which one has the tunnel.
#[tokio::test]
async fn a_name_resolves_to_the_gateway_that_holds_the_node_and_follows_it() {
    const ADDRESSES: [&str; 2] = ["192.0.2.1", "192.0.2.2"];
    need!("dig", "curl");
    let address = || SocketAddr::from(([127, 0, 0, 1], unused_port()));
    let (tunnels, servers) = ([address(), address()], [address(), address()]);
    let configuration = |number: usize| {
        let [first, second] = tunnels;
        let (server, own) = (servers[number], ADDRESSES[number]);
        format!(
            "{OPEN}\npeers: {{ addresses: [\"{first}\", \"{second}\"] }}\n\
             dns: {{ listen: \"{server}\", zones: [{ZONE}], addresses: [\"{own}\"], holders: true }}"
        )
    };
    let tunnel = tunnels[0].to_string();
    let first = GatewayProcess::listening(&tunnel, &configuration(0)).await;
    first.join("edge-1", 1).await.stop().await.ok();
    first.forget_gateways("edge-1");
    let tunnel = tunnels[1].to_string();
    let second = Box::pin(first.replica_with(&tunnel, &configuration(1))).await;
    let name = format!("edge-1.{ZONE}");
    let until_answer = async |expected: &[&str]| {
        for server in servers {
            until(&format!("{server} answers {expected:?}"), async || {
                let answer = short(server, &name).await;
                let mut answer: Vec<_> = answer.lines().collect();
                answer.sort_unstable();
                answer == expected
            })
            .await;
        }
    };
    // The clients of a node that is away hear so from each gateway.
    until_answer(&ADDRESSES).await;
    for (holder, site) in [(0, &first), (1, &second), (0, &first)] {
        let edge = causeway("edge --admin-listen 127.0.0.1:0 --tunnels-gateways one")
            .flag("--gateways", &site.tunnel)
            .flag("--data-dir", first.edge_data("edge-1"))
            .flag("--ports", "{9100: {}}");
        let mut edge = edge.start();
        edge.wait_for_line("tunnel registered").await;
        until_answer(&ADDRESSES[holder..=holder]).await;
        // The next process must not learn the other gateway from this one.
        edge.stop().await.ok();
        first.forget_gateways("edge-1");
        until_answer(&ADDRESSES).await;
    }
}

#[tokio::test]
async fn unknown_nodes_are_nxdomain_and_foreign_names_refused() {
    need!("dig");
    let world = world().await;
    let server = world.dns();
    let message = dig(server, &format!("nobody.{ZONE}")).await;
    assert!(message.contains("status: NXDOMAIN"), "{message}");
    assert!(
        message.contains(&format!("{ZONE}.\t1\tIN\tSOA")),
        "{message}"
    );
    for (line, expected) in [
        ("example.com", "REFUSED"),
        ("+opcode=notify edge-1", "NOTIMP"),
        ("+opcode=update edge-1", "NOTIMP"),
        ("-c CH version.bind TXT", "REFUSED"),
        (&format!("+edns=1 +noednsneg {ZONE} SOA"), "BADVERS"),
    ] {
        assert_eq!(status(server, line).await, expected, "{line}");
    }
    let message = dig(server, &format!("{ZONE} AXFR")).await;
    assert!(message.contains("Transfer failed"), "{message}");
    assert!(
        short(server, &format!("+notcp {ZONE} ANY"))
            .await
            .contains("RFC8482")
    );
    assert_eq!(
        short(server, &format!("{ZONE} NS")).await,
        format!("ns.dns.{ZONE}.")
    );
}

#[tokio::test]
async fn an_answer_that_is_too_large_for_a_datagram_comes_over_tcp() {
    need!("dig");
    let many = (1..=100).map(|last| format!("192.0.2.{last}").parse().unwrap());
    let dns = Dns {
        addresses: many.collect(),
        ..dns()
    };
    let world = World::build().config(|config| config.dns = dns.into());
    let world = world.start().await;
    let _edge = world.edge("edge-1").join().await;
    let (server, name) = (world.dns(), format!("edge-1.{ZONE}"));
    let cut = dig(server, &format!("+ignore {name}")).await;
    assert!(
        cut.contains("flags: qr aa tc rd;") && cut.contains("ANSWER: 0"),
        "{cut}"
    );
    let whole = short(server, &name).await;
    assert_eq!(whole.lines().count(), 100);
}

#[tokio::test]
async fn an_answer_comes_from_the_address_that_was_asked() {
    need!("dig");
    for (listen, asked) in [
        ("0.0.0.0:0", "127.0.0.2"),
        ("[::]:0", "127.0.0.2"),
        ("[::]:0", "::1"),
    ] {
        let dns = Dns {
            listen: listen.parse().unwrap(),
            ..dns()
        };
        let world = World::build().config(|config| config.dns = dns.into());
        let world = world.start().await;
        let asked = SocketAddr::new(asked.parse().unwrap(), world.dns().port());
        // dig accepts no answer from another address.
        assert_answers(asked).await;
    }
}

#[tokio::test]
async fn a_reload_changes_names_and_reports_what_needs_a_restart() {
    need!("dig");
    let mut world = world().await;
    let _edge = world.edge("edge-1").join().await;
    let server = world.dns();
    let changed = world.reload(|config| {
        let dns = config.dns.0.as_mut().unwrap();
        dns.zones = vec!["other.test".to_owned(), ".".to_owned()];
        dns.addresses = vec!["192.0.2.77".parse().unwrap()];
        dns.ttl = Duration::from_secs(9);
    });
    let changed = changed.unwrap();
    assert!(changed.dns && changed.needs_restart.is_empty(), "{changed}");
    for name in ["edge-1.other.test", "edge-1"] {
        let message = dig(server, name).await;
        assert!(
            message.contains("\t9\tIN\tA\t192.0.2.77"),
            "{name}: {message}"
        );
    }
    assert_eq!(
        status(server, &format!("edge-1.{ZONE}")).await,
        "NXDOMAIN",
        "a name below the root"
    );
    let again = world.reload(|_| {}).unwrap();
    assert!(!again.dns, "{again}");
    let moved = world.reload(|config| config.dns.0.as_mut().unwrap().listen.set_port(1));
    assert_eq!(moved.unwrap().needs_restart, ["dns.listen"]);
    let gone = world.reload(|config| config.dns.0 = None).unwrap();
    assert_eq!(gone.needs_restart, ["dns"]);
    assert_eq!(
        short(server, "edge-1").await,
        "192.0.2.77",
        "it stays until then"
    );
}

#[tokio::test]
async fn malformed_queries_do_not_stop_the_dns_listener() {
    need!("dig");
    let world = world().await;
    let server = world.dns();
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(server).await.unwrap();
    // A query for the zone's SOA, which is truncated and corrupted.
    let sound = question(ZONE, SOA);
    let mut random = StdRng::seed_from_u64(8);
    for round in 0..4000 {
        let packet = spoilt(&sound, &mut random);
        socket.send(&packet).await.unwrap();
        if round % 500 == 0 {
            assert_answers(server).await;
        }
    }
    for _ in 0..300 {
        let mut stream = TcpStream::connect(server).await.unwrap();
        let packet = spoilt(&sound, &mut random);
        // Half of the messages have a wrong length.
        let length = if random.random() {
            u16::try_from(packet.len()).unwrap()
        } else {
            random.random()
        };
        let _ = stream.write_all(&length.to_be_bytes()).await;
        let _ = stream.write_all(&packet).await;
    }
    assert_answers(server).await;
    let metrics = world.metrics().await;
    assert!(metrics.sum("dns_queries_total", &[("outcome", "malformed")]) > 1000);
    let mut last = [0; 4096];
    while let Ok(length) = socket.try_recv(&mut last) {
        assert!(length <= 1232, "no answer is larger than fits");
    }
}

/// A query for the records of this type.
fn question(name: &str, kind: u8) -> Vec<u8> {
    let mut bytes = vec![0, 8, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.extend_from_slice(&[0, 0, kind, 0, 1]);
    bytes
}

/// A valid query, truncated; with some changed bytes; or only noise.
fn spoilt(sound: &[u8], random: &mut StdRng) -> Vec<u8> {
    let mut packet = sound.to_vec();
    match random.random_range(0..3) {
        0 => packet.truncate(random.random_range(0..sound.len())),
        1 => {
            for _ in 0..random.random_range(1..8) {
                let place = random.random_range(0..packet.len());
                packet[place] = random.random();
            }
        }
        _ => {
            packet = vec![0; random.random_range(0..1500)];
            random.fill_bytes(&mut packet);
        }
    }
    packet
}

#[tokio::test]
async fn silent_connections_do_not_block_queries() {
    need!("dig");
    let world = world().await;
    let server = world.dns();
    let mut held = Vec::new();
    for _ in 0..400 {
        held.push(TcpStream::connect(server).await.unwrap());
    }
    // Before dig runs: after ten seconds silent connections end by themselves.
    assert!(answered(server).await, "the oldest silent connection ends");
    let metrics = world.metrics().await;
    let evicted = [("limit", "dns_connections"), ("outcome", "evicted")];
    // One address may have three quarters of the 256 connections.
    let turned_away = metrics.sum("connections_rejected_total", &evicted);
    assert_eq!(turned_away, 400 - 192 + 1);
    let line = format!("+notcp {ZONE} SOA");
    assert!(short(server, &line).await.starts_with("ns.dns."));
    drop(held);
}

/// Whether a query over TCP is answered.
async fn answered(server: SocketAddr) -> bool {
    let question = question(ZONE, SOA);
    let length = u16::try_from(question.len()).unwrap();
    let asked = async {
        let mut stream = TcpStream::connect(server).await?;
        stream
            .write_all(&[&length.to_be_bytes()[..], &question].concat())
            .await?;
        stream.read_u16().await
    };
    asked.await.is_ok_and(|length| length > 12)
}

#[tokio::test]
async fn several_questions_come_over_one_connection_and_in_pieces() {
    let world = world().await;
    let mut stream = TcpStream::connect(world.dns()).await.unwrap();
    let mut framed = question(ZONE, SOA);
    let length = u16::try_from(framed.len()).unwrap();
    framed.splice(0..0, length.to_be_bytes());
    let twice = framed.repeat(2);
    for piece in twice.chunks(7) {
        stream.write_all(piece).await.unwrap();
    }
    for _ in 0..2 {
        let length = stream.read_u16().await.unwrap();
        let mut answer = vec![0; usize::from(length)];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer[..2], [0, 8], "the id of the question");
        let code = answer[3] & 0x0f;
        assert_eq!(code, 0, "no error");
    }
}

#[tokio::test]
async fn names_are_answered_while_the_gateway_drains() {
    need!("dig");
    let build = World::build().config(|config| {
        config.dns = dns().into();
        config.timeouts.drain = Duration::from_mins(1);
    });
    let mut world = build.start().await;
    let _edge = world.edge("edge-1").join().await;
    let server = world.dns();
    world.drain_gateway();
    until("it drains", async || {
        world.admin_text("/readyz").await.0 == 503
    })
    .await;
    assert_eq!(short(server, &format!("edge-1.{ZONE}")).await, LISTENERS[0]);
    world.kill_gateway().await;
    until("the socket goes with the gateway", async || {
        UdpSocket::bind(server).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_port_that_is_taken_is_named() {
    let taken = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let folder = tempfile::tempdir().unwrap();
    let init = causeway("ca init --data-dir data").within(folder.path());
    init.run().await.ok();
    let gateway = causeway(
        "gateway --data-dir data --tunnel-listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --listeners [] \
         --dns-zones . --dns-addresses 192.0.2.20",
    );
    let gateway = gateway.flag("--dns-listen", &address).within(folder.path());
    let message = gateway.run().await.with_code(1).stderr;
    let expected = format!("the DNS server (dns.listen) cannot listen on {address}: ");
    assert!(message.contains(&expected), "{message}");
}

/// A `CoreDNS` at this address, for this zone and its subdomains.
async fn running(world: &World, at: SocketAddr, zone: &str, plugins: &str) -> Running {
    let (host, port) = (at.ip(), at.port());
    let corefile = format!("{zone}:{port} {{\n bind {host}\n {plugins}\n}}\n");
    let file = world.write(&corefile);
    let tool = Tool::new(coredns().unwrap());
    let running = tool.args(["-conf".as_ref(), file.as_os_str()]).start();
    until("it answers", async || answered(at).await).await;
    running
}

/// A `CoreDNS` that forwards `ZONE` to the gateway, with further plugins.
async fn forwarding(world: &World, at: SocketAddr, plugins: &str) -> Running {
    let gateway = world.dns();
    let plugins = format!("{plugins}\n forward . {gateway}");
    running(world, at, ZONE, &plugins).await
}

/// Returns a free address. `CoreDNS` chooses no port itself. The address is a loopback address that only this process and
/// this call use, with a port that the system assigns to no other socket.
fn apart() -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let own = NEXT.fetch_add(1, Ordering::Relaxed);
    SocketAddr::from(([127, high | 0x80, low, own], 5353))
}

#[tokio::test]
async fn coredns_forwards_the_zone_and_follows_a_join_within_a_second() {
    need!("dig", "coredns");
    let world = world().await;
    let name = format!("edge-1.{ZONE}");
    let (plain, caching) = (apart(), apart());
    let _plain = forwarding(&world, plain, "").await;
    let _caching = forwarding(&world, caching, "cache 30").await;
    for server in [plain, caching] {
        until("the gateway has answered", async || {
            status(server, &name).await == "NXDOMAIN"
        })
        .await;
    }
    let _edge = world.edge("edge-1").join().await;
    assert_has_an_address_at_once(plain, &name).await;
    until_short(plain, &name, LISTENERS[0]).await;
    until_short(plain, &format!("+tcp {name} AAAA"), LISTENERS[1]).await;
    assert_eq!(status(plain, "example.com").await, "REFUSED");
    // It caches every answer for 5 s, independent of the answer's TTL.
    until_short(caching, &name, LISTENERS[0]).await;
}

/// Waits until `script` succeeds with output that begins with `expected`, under this `resolv.conf`. A query fails if
/// this machine stops the gateway for some seconds.
async fn until_resolved(resolv: &Path, script: &str, arguments: &[&OsStr], expected: &str) {
    let run = format!(r#"mount --bind "$0" /etc/resolv.conf && exec {script}"#);
    until(&format!("{script}: {expected}"), async || {
        let shell = Tool::new("unshare").args(["--mount", "sh", "-c", &run]);
        let ran = shell.args([resolv.as_os_str()]).args(arguments).run().await;
        ran.status.success() && ran.text().starts_with(expected)
    })
    .await;
}

/// A separate network, because `resolv.conf` cannot contain a port.
#[tokio::test]
async fn a_client_behind_coredns_reaches_a_node_by_its_bare_name() {
    need!(netns::NEED, "mounts", "curl", "coredns");
    let _street = SharedNetwork::new();
    let listeners = Dns {
        addresses: vec!["127.0.0.1".parse().unwrap()],
        ..dns()
    };
    let world = World::build().config(|config| config.dns = listeners.into());
    let world = world.start().await;
    let (app, port) = (App::saying("edge-1").await, world.listener("https").port());
    let _edge = world.edge("edge-1").port(port, app.address()).join().await;
    let _coredns = forwarding(&world, SocketAddr::from(([127, 0, 0, 1], 53)), "").await;
    let resolv = world.write(&format!("nameserver 127.0.0.1\nsearch {ZONE}\n"));
    for name in ["edge-1", "EDGE-1", "edge-1.nodes.example.internal"] {
        let script = r#"getent -s dns ahostsv4 "$1""#;
        until_resolved(&resolv, script, &[name.as_ref()], "127.0.0.1 ").await;
    }
    let leaf = world.client_leaf("curl");
    let both = format!("{}{}", leaf.chain_pem(), leaf.key_pem().expose());
    let (root, own) = (world.root_path(), world.write(&both));
    let url = format!("https://edge-1:{port}/");
    let script = r#"curl -q -sS --cacert "$1" --cert "$2" "$3""#;
    let arguments = [root.as_os_str(), own.as_os_str(), url.as_ref()];
    until_resolved(&resolv, script, &arguments, "edge-1").await;
}

#[tokio::test]
async fn the_root_zone_answers_bare_names_and_passes_on_the_rest() {
    need!("dig", "coredns");
    let bare = Dns {
        zones: vec![".".to_owned()],
        ..dns()
    };
    let world = World::build().config(|config| config.dns = bare.into());
    let world = world.start().await;
    let _edge = world.edge("edge-1").join().await;
    // Another gateway's DNS server takes the part of the internet.
    let rest = self::world().await;
    let _there = rest.edge("edge-2").join().await;
    let (gateway, next, at) = (world.dns(), rest.dns(), apart());
    let plugins = format!("forward . {gateway} {{\n next NXDOMAIN\n }}\n forward . {next}");
    let _coredns = running(&world, at, ".", &plugins).await;
    until_short(at, "edge-1", LISTENERS[0]).await;
    until_short(at, &format!("edge-2.{ZONE}"), LISTENERS[0]).await;
}
