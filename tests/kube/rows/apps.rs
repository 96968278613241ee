//! Apps on a node that accept a connection and misbehave. Connections to the port are redirected to such an app.
//!
//! A gateway that speaks TLS to kubelets reports their fault. If the API server itself speaks TLS, through the gateway, the
//! message is its own.

use libtest_mimic::Trial;

use super::{Firewall, REQUESTS, UPGRADES, each_says};
use crate::{
    full, names,
    steps::by,
    world::{
        Way, World,
        causeway::{CLOSED, REFUSING},
        process::Process,
    },
};

/// Ports of upstreams that send nothing at first, and of those that begin with TLS.
const PLAIN: u16 = 9970;
const SECURE: u16 = 9980;

/// Behaviours of an upstream once it has received bytes, as offsets that are added to these ports.
const RESTS: u16 = 0;
const CLOSES: u16 = 1;
const RESETS: u16 = 2;
const RAVES: u16 = 3;

/// The ways whose messages differ; those of addresses are the same as those of names.
pub(super) fn trials(name: &str, way: Way) -> Vec<Trial> {
    let title = format!("{name}::apps_that_do_not_behave_are_told");
    match way {
        Way::Unix => vec![by(title, way, api_server_tells)],
        way if way == names::CHECKED || full() => {
            vec![by(title, way, move |world| gateway_tells(world, way))]
        }
        _ => Vec::new(),
    }
}

/// All of them, on the first node.
pub(super) fn ill(world: &World) -> Process {
    let signed = |end: &str| world.cluster.pki.path(&format!("edge-1-kubelet.{end}"));
    let python = world.nodes[0].at("python3").args(["-c", APPS]);
    let python = python.args([PLAIN, SECURE].map(|port| port.to_string()));
    let mut apps = python
        .args([signed("pem"), signed("key")])
        .start(&world.path("ill.log"));
    apps.says("all listen");
    apps
}

/// An app that reads a request and never answers it, in place of the one at `REFUSING`.
pub(super) fn resting(world: &World) -> Firewall<'_> {
    Firewall::leading(world, &REFUSING.to_string(), PLAIN + RESTS)
}

const APPS: &str = r"
import socket, ssl, struct, sys, threading
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[3], sys.argv[4])
def met(peer, secure, does):
    try:
        if secure:
            peer = context.wrap_socket(peer, server_side=True)
        print('heard', len(peer.recv(65536)), 'bytes by', does, flush=True)
        if does == 'rests':
            while peer.recv(65536): pass
        if does == 'resets':
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        if does == 'raves':
            peer.sendall(b'220 who is there?\r\n')
            while peer.recv(65536): pass
        peer.close()
    except OSError as error:
        print(error, flush=True)
def serve(listener, *how):
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=met, args=(peer, *how)).start()
for secure, first in enumerate(sys.argv[1:3]):
    for more, does in enumerate(['rests', 'closes', 'resets', 'raves']):
        listener = socket.create_server(('127.0.0.1', int(first) + more), backlog=64)
        threading.Thread(target=serve, args=(listener, secure, does)).start()
print('all listen', flush=True)
";

fn gateway_tells(world: &mut World, way: Way) {
    let _apps = ill(world);
    // No idle connection to the kubelet is left, which would be used first.
    let soon = "\ntimeouts: { connect: 1s, upgrade_first_byte: 1s }\n";
    world.otherwise(way, |text| text + soon);
    let all = [UPGRADES, REQUESTS].concat();
    for (port, says) in [
        (PLAIN + RESTS, "did not "),
        (
            PLAIN + CLOSES,
            "closed the connection during the TLS handshake",
        ),
        (
            PLAIN + RESETS,
            "reset the connection during the TLS handshake",
        ),
        (PLAIN + RAVES, "does not speak TLS"),
        (
            SECURE + CLOSES,
            "closed the connection before it sent a response",
        ),
        (
            SECURE + RESETS,
            "reset the connection before it sent a response",
        ),
        (SECURE + RAVES, "sent an answer that is not HTTP"),
    ] {
        let _led = Firewall::leading(world, "10250", port);
        each_says(world, &format!("port 10250 of edge-1 {says}"), &all);
    }
    // A log may be silent without limit, so that a request has no time limit.
    let led = Firewall::leading(world, "10250", SECURE + RESTS);
    let says = "port 10250 of edge-1 did not answer the upgrade within 1s";
    each_says(world, says, &UPGRADES);
    drop(led);
    let scheme = if way == names::CHECKED {
        "https"
    } else {
        "http"
    };
    let raw = format!("get --raw /api/v1/nodes/{scheme}:edge-1:{REFUSING}/proxy/");
    for (port, says) in [
        (PLAIN + CLOSES, "closed the connection"),
        (PLAIN + RESETS, "broke the connection"),
        (PLAIN + RAVES, "sent an answer that is not HTTP"),
    ] {
        let _led = Firewall::leading(world, &REFUSING.to_string(), port);
        each_says(
            world,
            &format!("127.0.0.1:{REFUSING} on edge-1 {says}"),
            &[&raw],
        );
    }
}

/// Over a unix socket, which has no reset.
fn api_server_tells(world: &mut World) {
    let _apps = ill(world);
    // The kubelet's port has open connections, which requests would use.
    let raw = format!("get --raw /api/v1/nodes/https:edge-1:{CLOSED}/proxy/");
    let all = [&UPGRADES[..], &[&raw]].concat();
    for (port, says) in [
        (PLAIN + CLOSES, "EOF"),
        (
            PLAIN + RAVES,
            "tls: first record does not look like a TLS handshake",
        ),
        (SECURE + CLOSES, "EOF"),
        (SECURE + RAVES, "malformed HTTP status code"),
    ] {
        let _led = Firewall::leading(world, &format!("10250, {CLOSED}"), port);
        each_says(world, says, &all);
    }
}
