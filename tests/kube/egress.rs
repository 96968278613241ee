//! The egress selector's way: kube-apiserver asks a `connect` front for nodes, by name.
//!
//! Each promise is made to kubectl as it is today, which speaks websocket, and where bytes of sessions are concerned to
//! that of Debian 12, which speaks SPDY; over a unix socket, and the first of them over TCP with certificates as well.

use std::{
    env, fs,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    thread,
    time::Duration,
};

use libtest_mimic::Trial;
use sha2::{Digest, Sha256};

use crate::{
    trial,
    world::{
        Way, World, assets,
        causeway::CLOSED,
        image::BUSYBOX,
        net,
        process::{Program, until, within},
        world,
    },
};

/// Both nodes, by the namespace of their pods.
const NODES: [(&str, &str); 2] = [("a", "edge-1"), ("b", "edge-2")];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = vec![
        trial("egress_tcp_logs_and_exec", || basics(Way::Tcp)),
        trial("egress_unix_logs_and_exec", || basics(Way::Unix)),
        trial("egress_by_address_logs_and_exec", || basics(Way::Address)),
        trial(
            "pods_and_services_are_proxied_to",
            pods_and_services_are_proxied_to,
        ),
        trial(
            "what_is_in_the_cloud_is_dialled_from_there",
            what_is_in_the_cloud_is_dialled_from_there,
        ),
        trial("logs_follow_across_silence", logs_follow_across_silence),
        trial("exec_with_a_terminal", exec_with_a_terminal),
        trial("nodes_are_proxied_to", nodes_are_proxied_to),
        trial(
            "two_hundred_execs_are_open_at_once",
            two_hundred_execs_are_open_at_once,
        ),
        trial(
            "an_edge_that_dies_ends_an_exec_and_says_so_until_it_is_back",
            an_edge_that_dies_ends_an_exec_and_says_so_until_it_is_back,
        ),
        trial("failures_tell_what_to_do", failures_tell_what_to_do),
        trial(
            "the_api_server_comes_back_to_the_same_road",
            the_api_server_comes_back_to_the_same_road,
        ),
    ];
    for (name, which) in [("kubectl", Which::New), ("kubectl_1_20", Which::Old)] {
        let tests: [(&str, Promise); 4] = [
            (
                "exec_carries_streams_and_codes",
                exec_carries_streams_and_codes,
            ),
            ("attach_talks_to_what_runs", attach_talks_to_what_runs),
            ("cp_takes_100_mb_both_ways", cp_takes_100_mb_both_ways),
            (
                "port_forward_takes_50_at_once",
                port_forward_takes_50_at_once,
            ),
        ];
        for (promise, test) in tests {
            let test = move || {
                test(which);
                Ok(())
            };
            trials.push(Trial::test(format!("{name}_{promise}"), test));
        }
    }
    trials
}

/// A test for either kubectl.
type Promise = fn(Which);

/// Which kubectl.
#[derive(Clone, Copy)]
enum Which {
    New,
    Old,
}

impl Which {
    /// kubectl with these words; nothing where that one is not here.
    fn run(self, world: &World, line: &str) -> Program {
        match self {
            Self::New => world.cluster.kubectl(line),
            Self::Old => {
                let program = assets::old_kubectl().expect("it was looked for");
                world.cluster.kubectl_of(&program, line)
            }
        }
    }

    fn is_here(self) -> bool {
        matches!(self, Self::New) || assets::old_kubectl().is_some() || {
            crate::missing("kubectl 1.20 (run .ci/setup)");
            false
        }
    }
}

fn basics(way: Way) {
    let mut world = world();
    world.by(way);
    for (namespace, node) in NODES {
        let logs = format!("logs -n {namespace} ticker");
        let said = world.cluster.kubectl(&logs).run().ok().text();
        assert!(said.starts_with(&format!("ticker on {node}\n")), "{said}");
        let exec = format!("exec -n {namespace} ticker -- cat /tmp/node");
        let said = world.cluster.kubectl(&exec).run().ok().text();
        assert_eq!(said, format!("{node}\n"));
    }
}

fn silence() -> Duration {
    let full = env::var_os("CAUSEWAY_TEST_FULL").is_some();
    Duration::from_secs(if full { 300 } else { 30 })
}

fn logs_follow_across_silence() {
    let mut world = world();
    world.by(Way::Unix);
    let mut logs = world
        .cluster
        .kubectl("logs -n a -f silent")
        .start(&world.path("follow.log"));
    logs.says("first");
    // The silence is what is tested.
    thread::sleep(silence());
    let say = "exec -n a silent -- sh -c";
    let say = world.cluster.kubectl(say).args(["echo last >/tmp/say"]);
    say.run().ok();
    logs.says("last");
}

fn exec_carries_streams_and_codes(which: Which) {
    if !which.is_here() {
        return;
    }
    let mut world = world();
    world.by(Way::Unix);
    let ran = which
        .run(&world, "exec -n a echo -- sh -c")
        .args(["echo out; echo err >&2; exit 7"])
        .run();
    assert_eq!(ran.code, Some(7), "{ran:?}");
    assert_eq!(ran.text(), "out\n");
    assert!(ran.stderr.starts_with("err\n"), "{}", ran.stderr);
    let input = noise(1 << 20);
    let echo = which.run(&world, "exec -i -n b echo -- cat");
    let ran = echo.input(input.clone()).run().ok();
    assert!(ran.stdout == input, "{} bytes came back", ran.stdout.len());
}

fn exec_with_a_terminal() {
    let mut world = world();
    world.by(Way::Unix);
    let line = "exec -it -n a echo -- sh -c 'tty; read it; echo got $it'";
    let line = world.cluster.kubectl_line(line);
    let mut shell = Program::new("script")
        .args(["-qec", &line, "/dev/null"])
        .start(&world.path("terminal.log"));
    shell.says("/dev/pts/");
    shell.send(b"a-line\n");
    shell.says("got a-line");
    assert_eq!(shell.ended().0, Some(0), "{}", shell.said());
}

fn attach_talks_to_what_runs(which: Which) {
    if !which.is_here() {
        return;
    }
    let mut world = world();
    world.by(Way::Unix);
    let mut attached = which
        .run(&world, "attach -i -n b echo")
        .start(&world.path("attach.log"));
    // What is sent before the session stands is kept.
    attached.send(b"hello from the cloud\n");
    attached.says("hello from the cloud");
}

fn cp_takes_100_mb_both_ways(which: Which) {
    if !which.is_here() {
        return;
    }
    let mut world = world();
    world.by(Way::Unix);
    let (sent, back) = (world.path("sent"), world.path("back"));
    let bytes = noise(100_000_000);
    fs::write(&sent, &bytes).unwrap();
    let copy = |from: &str, to: &str| {
        let copy = which.run(&world, "cp").args([from, to]);
        copy.within(Duration::from_secs(90)).run().ok();
    };
    copy(&text(&sent), "a/echo:/tmp/big");
    let sum = which.run(&world, "exec -n a echo -- sha256sum /tmp/big");
    let sum = sum.run().ok().text();
    let wanted = data_encoding::HEXLOWER.encode(&Sha256::digest(&bytes));
    assert!(sum.starts_with(&wanted), "{sum} is not {wanted}");
    copy("a/echo:/tmp/big", &text(&back));
    let same = fs::read(&back).unwrap() == bytes;
    assert!(same, "what came back differs");
    let tidy = which.run(&world, "exec -n a echo -- rm /tmp/big");
    tidy.run().ok();
    for file in [sent, back] {
        fs::remove_file(file).unwrap();
    }
}

fn port_forward_takes_50_at_once(which: Which) {
    if !which.is_here() {
        return;
    }
    let mut world = world();
    world.by(Way::Unix);
    let mut forward = which
        .run(&world, "port-forward -n b pod/echo 18080:8080")
        .start(&world.path("forward.log"));
    forward.says("Forwarding from 127.0.0.1:18080");
    let gets: Vec<_> = (0..50).map(|_| thread::spawn(get)).collect();
    for get in gets {
        let answer = get.join().unwrap();
        assert!(answer.ends_with("\r\n\r\nedge-2\n"), "{answer}");
    }
}

fn get() -> String {
    let mut app = TcpStream::connect("127.0.0.1:18080").unwrap();
    app.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    app.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    app.read_to_string(&mut answer).unwrap();
    answer
}

fn nodes_are_proxied_to() {
    let mut world = world();
    world.by(Way::Unix);
    for (_, node) in NODES {
        let raw = format!("get --raw /api/v1/nodes/{node}/proxy/stats/summary");
        let said = world.cluster.kubectl(&raw).run().ok();
        let stats: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
        assert_eq!(stats["node"]["nodeName"], node);
    }
}

fn pods_and_services_are_proxied_to() {
    let mut world = world();
    world.by(Way::Address);
    for (namespace, node) in NODES {
        let expose = format!("expose -n {namespace} pod echo --port=80 --target-port=8080");
        world.cluster.kubectl(&expose).run().ok();
        let raw = format!("get --raw /api/v1/nodes/{node}/proxy/stats/summary");
        let said = world.cluster.kubectl(&raw).run().ok().text();
        assert!(
            said.contains(&format!("\"nodeName\": \"{node}\"")),
            "{said}"
        );
        for what in ["pods/echo:8080", "services/echo:80"] {
            let raw = format!("get --raw /api/v1/namespaces/{namespace}/{what}/proxy/");
            until("its endpoints are known", || {
                let said = world.cluster.kubectl(&raw).run();
                said.code == Some(0) && said.text() == format!("{node}\n")
            });
        }
    }
}

fn what_is_in_the_cloud_is_dialled_from_there() {
    let mut world = world();
    world.by(Way::Address);
    let machine = net::Machine::new();
    let www = world.path("www");
    fs::create_dir_all(&www).unwrap();
    fs::write(www.join("index.html"), "from the cloud\n").unwrap();
    let _app = machine
        .at(BUSYBOX)
        .words("httpd -f -p 8080 -h")
        .args([&www])
        .start(&world.path("app.log"));
    let raw = "get --raw /api/v1/nodes/http:cloud-1:8080/proxy/";
    until("the app in the cloud answers", || {
        world.cluster.kubectl(raw).run().text() == "from the cloud\n"
    });
}

/// All of them asked for at once.
fn two_hundred_execs_are_open_at_once() {
    let mut world = world();
    world.by(Way::Unix);
    let pods = ["ticker", "echo", "silent"];
    let mut open = Vec::new();
    for number in 0..200 {
        let (namespace, node) = NODES[number % 2];
        let pod = pods[number / 2 % 3];
        let exec = format!("exec -i -n {namespace} {pod} -- sh -c");
        let exec = world.cluster.kubectl(&exec);
        let exec = exec.args(["cat /tmp/node; exec cat"]);
        let log = world.path(format!("exec-{number}.log"));
        open.push((node, number, exec.start(&log)));
    }
    for (node, _, exec) in &mut open {
        exec.says(&format!("{node}\n"));
    }
    for (node, number, exec) in &mut open {
        exec.send(format!("this is {number}\n").as_bytes());
        exec.says("this is");
        exec.close_input();
        assert_eq!(exec.ended().0, Some(0), "{}", exec.said());
        assert_eq!(exec.said(), format!("{node}\nthis is {number}\n"));
    }
}

fn an_edge_that_dies_ends_an_exec_and_says_so_until_it_is_back() {
    let mut world = world();
    world.by(Way::Unix);
    let mut exec = world
        .cluster
        .kubectl("exec -n a echo -- sh -c")
        .args(["echo on; exec sleep 1000"])
        .start(&world.path("exec.log"));
    exec.says("on");
    world.road().kill(0);
    let (code, took) = exec.ended();
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
    assert!(took < Duration::from_secs(5), "{took:?}: {}", exec.said());
    for line in [
        "logs -n a ticker",
        "exec -n a ticker -- true",
        "get --raw /api/v1/nodes/edge-1/proxy/healthz",
    ] {
        let ran = world.cluster.kubectl(line).run();
        assert!(ran.took < Duration::from_secs(5), "{line}: {ran:?}");
        let said = ran.failed();
        assert!(said.contains("edge-1 is not connected"), "{line}: {said}");
    }
    let others = "exec -n b ticker -- true";
    world.cluster.kubectl(others).run().ok();
    world.rejoin(0);
    let back = within(Duration::from_secs(10), || {
        let exec = world.cluster.kubectl("exec -n a ticker -- true");
        exec.run().code == Some(0)
    });
    assert!(back, "no exec after the edge is back");
}

fn failures_tell_what_to_do() {
    let mut world = world();
    world.by(Way::Unix);
    let refused = format!("http:edge-1:{CLOSED}");
    for (node, wanted) in [
        (
            refused.as_str(),
            "edge-1 could not dial 127.0.0.1:9998: connection refused",
        ),
        ("http:edge-1:9997", "edge-1 does not serve port 9997"),
        ("https:cloud-1:10250", "no node is known by"),
    ] {
        let raw = format!("get --raw /api/v1/nodes/{node}/proxy/");
        let said = world.cluster.kubectl(&raw).run().failed();
        assert!(said.contains(wanted), "{node}: {said}");
    }
}

fn the_api_server_comes_back_to_the_same_road() {
    let mut world = world();
    world.by(Way::Unix);
    world.cluster.restart();
    drop(world);
    basics(Way::Unix);
}

/// Bytes that no compression makes smaller.
fn noise(count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    let mut source = fs::File::open("/dev/urandom").unwrap();
    source.read_exact(&mut bytes).unwrap();
    bytes
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
