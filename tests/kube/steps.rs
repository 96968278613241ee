//! Steps that each setup must pass for users of kubectl. They do not depend on how the API server reaches nodes.
//!
//! Each step is a trial of its own for each setup, with today's kubectl, which speaks websocket. The steps about bytes of
//! sessions also run with the kubectl of Debian 12, which speaks SPDY. A step leaves pods and edges as it found them.

use crate::full;
use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::nodes::TemporaryNode;
use crate::world::{
    Way, World, assets,
    image::BUSYBOX,
    net,
    process::{PATIENCE, Process, Program, until, within},
    ticker, world,
};

/// Both nodes, by the namespace of their pods.
pub(crate) const NODES: [(&str, &str); 2] = [("a", "edge-1"), ("b", "edge-2")];

/// A step with the kubectl of the same version as the cluster.
pub(crate) type Step = (&'static str, fn(&mut World));

/// A step with either kubectl.
type Session = (&'static str, fn(&World, KubectlVersion));

/// Steps other than sessions. The long silence is last, and runs while others work.
const STEPS: [Step; 6] = [
    ("logs_and_exec", logs_and_exec),
    ("exec_with_a_terminal", exec_with_a_terminal),
    ("nodes_are_proxied_to", nodes_are_proxied_to),
    (
        "a_killed_edge_ends_an_exec_and_is_reported_until_back",
        a_killed_edge_ends_an_exec_and_is_reported_until_back,
    ),
    (
        "two_hundred_execs_are_open_at_once",
        two_hundred_execs_are_open_at_once,
    ),
    ("logs_follow_across_silence", logs_follow_across_silence),
];

/// Steps about the bytes of sessions.
const SESSIONS: [Session; 4] = [
    (
        "exec_carries_streams_and_codes",
        exec_carries_streams_and_codes,
    ),
    (
        "port_forward_takes_50_at_once",
        port_forward_takes_50_at_once,
    ),
    (
        "attach_connects_to_the_running_process",
        attach_connects_to_the_running_process,
    ),
    ("cp_takes_100_mb_both_ways", cp_takes_100_mb_both_ways),
];

/// Returns all trials of a setup, named `way::step`.
pub(crate) fn all(name: &str, way: Way) -> Vec<Trial> {
    trials(name, way, (&SESSIONS, &SESSIONS), &STEPS)
}

/// All with today's kubectl. With Debian's kubectl only some, because its messages are the same in this setup; all if all
/// variants are wanted.
pub(crate) fn most(name: &str, way: Way) -> Vec<Trial> {
    let old = if full() {
        &SESSIONS[..]
    } else {
        &SESSIONS[..2]
    };
    let mut trials = trials(name, way, (&SESSIONS, old), &STEPS);
    trials.extend(variant(name, way, RESTARTED));
    trials
}

/// Returns the trials that depend on the verification of a kubelet's certificate: it decides which node is meant, not how
/// much data passes.
pub(crate) fn some(name: &str, way: Way) -> Vec<Trial> {
    trials(name, way, (&SESSIONS[..3], &SESSIONS[..1]), &STEPS[..4])
}

/// Returns the trial of a step that otherwise one setup runs for all, if all variants are wanted.
pub(crate) fn variant(name: &str, way: Way, (step, run): Step) -> Vec<Trial> {
    full()
        .then(|| by(format!("{name}::{step}"), way, run))
        .into_iter()
        .collect()
}

/// A restarted API server reaches nodes as before.
const RESTARTED: Step = (
    "the_api_server_comes_back_to_the_same_road",
    the_api_server_comes_back_to_the_same_road,
);

/// Another pod takes the name of a deleted one, on the other node.
pub(crate) const MOVED: Step = (
    "a_pod_that_comes_back_elsewhere_is_found_there",
    a_pod_that_comes_back_elsewhere_is_found_there,
);

fn trials(
    name: &str,
    way: Way,
    (new, old): (&[Session], &[Session]),
    steps: &[Step],
) -> Vec<Trial> {
    let new = new.iter().map(|session| (KubectlVersion::New, *session));
    // Parts that sessions have not shown.
    let rest = if full() { &OLD[..] } else { &[] };
    let old = old.iter().chain(rest);
    let old = old.map(|session| (KubectlVersion::Old, *session));
    let sessions = new.chain(old).map(|(which, (step, run))| {
        let title = format!("{name}::{}_{step}", which.name());
        by(title, way, move |world| {
            if which.is_here() {
                run(world, which);
            }
        })
    });
    let steps = steps
        .iter()
        .map(|(step, run)| by(format!("{name}::{step}"), way, *run));
    sessions.chain(steps).collect()
}

/// A test in this setup.
pub(crate) fn by(title: String, way: Way, run: impl Fn(&mut World) + Send + 'static) -> Trial {
    Trial::test(title, move || {
        let mut world = world();
        world.by(way);
        run(&mut world);
        Ok(())
    })
}

/// Version of kubectl.
#[derive(Clone, Copy)]
enum KubectlVersion {
    New,
    Old,
}

impl KubectlVersion {
    fn name(self) -> &'static str {
        match self {
            Self::New => "kubectl",
            Self::Old => "kubectl_1_20",
        }
    }

    /// kubectl with these arguments.
    fn run(self, world: &World, line: &str) -> Program {
        match self {
            Self::New => world.cluster.kubectl(line),
            Self::Old => {
                let program = assets::old_kubectl().expect("the old kubectl was found");
                world.cluster.kubectl_of(&program, line)
            }
        }
    }

    /// The same, in the form that the shell reads.
    fn line(self, world: &World, line: &str) -> String {
        let program = match self {
            Self::New => None,
            Self::Old => assets::old_kubectl(),
        };
        world.cluster.kubectl_line(program, line)
    }

    fn is_here(self) -> bool {
        matches!(self, Self::New) || assets::old_kubectl().is_some() || {
            crate::missing("kubectl 1.20 (run .ci/setup)");
            false
        }
    }
}

/// From each node, the output that only its own pods have; their names are the same on both.
pub(crate) fn logs_and_exec(world: &mut World) {
    logs_and_exec_of_each(world);
}

fn logs_and_exec_of_each(world: &World) {
    for (namespace, node) in NODES {
        let logs = format!("logs -n {namespace} ticker");
        let content = world.cluster.kubectl(&logs).run().ok().text();
        assert!(
            content.starts_with(&format!("ticker on {node}\n")),
            "{content}"
        );
        let exec = format!("exec -n {namespace} ticker -- cat /tmp/node");
        let content = world.cluster.kubectl(&exec).run().ok().text();
        assert_eq!(content, format!("{node}\n"));
    }
}

fn silence() -> Duration {
    Duration::from_secs(if full() { 300 } else { 30 })
}

/// With an old kubectl besides sessions, if all variants are wanted.
const OLD: [Session; 2] = [
    ("logs", logs),
    ("exec_with_a_terminal", exec_with_a_terminal_of),
];

fn logs(world: &World, which: KubectlVersion) {
    for (namespace, node) in NODES {
        let logs = format!("logs -n {namespace} ticker");
        let content = which.run(world, &logs).run().ok().text();
        assert!(
            content.starts_with(&format!("ticker on {node}\n")),
            "{content}"
        );
    }
}

pub(crate) fn the_api_server_comes_back_to_the_same_road(world: &mut World) {
    world.cluster.restart();
    logs_and_exec(world);
}

/// A silent log, followed since the API server uses this setup.
pub(crate) struct SilentLog {
    /// With today's kubectl, and with an old one if all variants are wanted.
    logs: Vec<Process>,
    since: Instant,
}

impl SilentLog {
    /// Follows the log of a pod on `edge-2`, whose edge no step ends.
    pub(crate) fn begin(world: &World) -> Self {
        let line = "logs -n b -f --tail=1 silent";
        let old = full().then(|| old_kubectl(world, line)).flatten();
        let both = [Some(world.cluster.kubectl(line)), old];
        let both = both.into_iter().flatten().enumerate();
        let logs = both.map(|(each, follow)| {
            let mut logs = follow.start(&world.path(format!("follow-{each}.log")));
            logs.says("\n");
            logs
        });
        Self {
            logs: logs.collect(),
            since: Instant::now(),
        }
    }
}

fn logs_follow_across_silence(world: &mut World) {
    let mut quiet = world.quiet();
    // The silence is the subject of the test, and most of it has passed during other tests.
    thread::sleep(silence().saturating_sub(quiet.since.elapsed()));
    let line = format!("after {:?}", quiet.since.elapsed());
    let say = world.cluster.kubectl("exec -n b silent -- sh -c");
    let say = say.args([format!("echo '{line}' >/tmp/say")]);
    say.run().ok();
    for logs in &mut quiet.logs {
        logs.says(&line);
    }
}

fn exec_carries_streams_and_codes(world: &World, which: KubectlVersion) {
    let ran = which
        .run(world, "exec -n a echo -- sh -c")
        .args(["echo out; echo err >&2; exit 7"])
        .run();
    assert_eq!(ran.code, Some(7), "{ran:?}");
    assert_eq!(ran.text(), "out\n");
    assert!(ran.stderr.starts_with("err\n"), "{}", ran.stderr);
    let input = noise(1 << 20);
    let echo = which.run(world, "exec -i -n b echo -- cat");
    let ran = echo.input(input.clone()).run().ok();
    assert!(ran.stdout == input, "{} bytes came back", ran.stdout.len());
}

/// A session by SPDY, which only an old kubectl speaks.
pub(crate) fn spdy(world: &World) {
    if KubectlVersion::Old.is_here() {
        exec_carries_streams_and_codes(world, KubectlVersion::Old);
    }
}

/// An old kubectl with these arguments, which speaks SPDY.
pub(crate) fn old_kubectl(world: &World, line: &str) -> Option<Program> {
    KubectlVersion::Old
        .is_here()
        .then(|| KubectlVersion::Old.run(world, line))
}

fn exec_with_a_terminal(world: &mut World) {
    exec_with_a_terminal_of(world, KubectlVersion::New);
}

fn exec_with_a_terminal_of(world: &World, which: KubectlVersion) {
    let line = "exec -it -n a echo -- sh -c 'tty; read it; echo got $it'";
    let line = which.line(world, line);
    let mut shell = Program::new("script")
        .args(["-qec", &line, "/dev/null"])
        .start(&world.path("terminal.log"));
    shell.says("/dev/pts/");
    shell.send(b"a-line\n");
    shell.says("got a-line");
    assert_eq!(shell.ended().0, Some(0), "{}", shell.output());
}

fn attach_connects_to_the_running_process(world: &World, which: KubectlVersion) {
    let mut attached = which
        .run(world, "attach -i -n b echo")
        .start(&world.path("attach.log"));
    // Input that is sent before the session exists is kept.
    attached.send(b"hello from the cloud\n");
    attached.says("hello from the cloud");
}

fn cp_takes_100_mb_both_ways(world: &World, which: KubectlVersion) {
    let (sent, back) = (world.path("sent"), world.path("back"));
    let bytes = noise(100_000_000);
    fs::write(&sent, &bytes).unwrap();
    let copy = |from: &str, to: &str| {
        let copy = which.run(world, "cp").args([from, to]);
        copy.within(Duration::from_secs(90)).run().ok();
    };
    copy(&text(&sent), "a/echo:/tmp/big");
    let sum = which.run(world, "exec -n a echo -- sha256sum /tmp/big");
    let sum = sum.run().ok().text();
    let wanted = data_encoding::HEXLOWER.encode(&Sha256::digest(&bytes));
    assert!(sum.starts_with(&wanted), "{sum} is not {wanted}");
    copy("a/echo:/tmp/big", &text(&back));
    let same = fs::read(&back).unwrap() == bytes;
    assert!(same, "the echoed bytes differ");
    let tidy = which.run(world, "exec -n a echo -- rm /tmp/big");
    tidy.run().ok();
    for file in [sent, back] {
        fs::remove_file(file).unwrap();
    }
}

fn port_forward_takes_50_at_once(world: &World, which: KubectlVersion) {
    let mut forward = which
        .run(world, "port-forward -n b pod/echo 18080:8080")
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

pub(crate) fn nodes_are_proxied_to(world: &mut World) {
    for (_, node) in NODES {
        let raw = format!("get --raw /api/v1/nodes/{node}/proxy/stats/summary");
        let content = world.cluster.kubectl(&raw).run().ok();
        let stats: serde_json::Value = serde_json::from_slice(&content.stdout).unwrap();
        assert_eq!(stats["node"]["nodeName"], node);
    }
}

/// Bytes to pods and Services pass unchanged.
pub(crate) fn pods_and_services_are_proxied_to(world: &mut World) {
    for (namespace, node) in NODES {
        let raw = format!("get --raw /api/v1/nodes/{node}/proxy/stats/summary");
        let content = world.cluster.kubectl(&raw).run().ok().text();
        assert!(
            content.contains(&format!("\"nodeName\": \"{node}\"")),
            "{content}"
        );
        for what in ["pods/echo:8080", "services/echo:80"] {
            let raw = format!("get --raw /api/v1/namespaces/{namespace}/{what}/proxy/");
            until("its endpoints are known", || {
                let content = world.cluster.kubectl(&raw).run();
                content.code == Some(0) && content.text() == format!("{node}\n")
            });
        }
    }
}

/// Checks two nodes that report pods in one network: its addresses lead to neither, and `said` returns the message. Names
/// work as before.
pub(crate) fn a_network_of_two_nodes_names_neither(world: &World, content: fn(&World) -> String) {
    let proxied = |namespace: &str| {
        let raw = format!("get --raw /api/v1/namespaces/{namespace}/pods/echo:8080/proxy/");
        world.cluster.kubectl(&raw).run().text()
    };
    let twin = TemporaryNode(world, "twin-1");
    world.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": twin.1, "labels": { "causeway.io/edge": "true" } },
        "spec": { "podCIDR": world.nodes[0].pods, "podCIDRs": [world.nodes[0].pods] },
    }));
    until("no route leads to its addresses", || {
        proxied("a").is_empty()
    });
    let mut told = String::new();
    let why = within(PATIENCE, || {
        told = content(world);
        told.contains("several nodes")
    });
    assert!(why, "{told}");
    assert_eq!(proxied("b"), "edge-2\n", "the other network is unchanged");
    logs_and_exec_of_each(world);
    drop(twin);
    until("edge-1 has the address again", || {
        proxied("a") == "edge-1\n"
    });
}

/// An app on the machine of `cloud-1`, which has no edge.
pub(crate) fn cloud_targets_are_dialled_directly(world: &mut World) {
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

/// All requested at once.
fn two_hundred_execs_are_open_at_once(world: &mut World) {
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
        assert_eq!(exec.ended().0, Some(0), "{}", exec.output());
        assert_eq!(exec.output(), format!("{node}\nthis is {number}\n"));
    }
}

fn a_killed_edge_ends_an_exec_and_is_reported_until_back(world: &mut World) {
    let mut exec = world
        .cluster
        .kubectl("exec -n a echo -- sh -c")
        .args(["echo on; exec sleep 1000"])
        .start(&world.path("exec.log"));
    exec.says("on");
    world.road().kill(0);
    let (code, took) = exec.ended();
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
    assert!(took < Duration::from_secs(5), "{took:?}: {}", exec.output());
    for line in [
        "logs -n a ticker",
        "exec -n a ticker -- true",
        "get --raw /api/v1/nodes/edge-1/proxy/healthz",
    ] {
        let ran = world.cluster.kubectl(line).run();
        assert!(ran.took < Duration::from_secs(5), "{line}: {ran:?}");
        let content = ran.failed();
        assert!(
            content.contains("edge-1 is not connected"),
            "{line}: {content}"
        );
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

fn a_pod_that_comes_back_elsewhere_is_found_there(world: &mut World) {
    let exec = |world: &World| {
        let exec = "exec -n a mover -- cat /tmp/node";
        world.cluster.kubectl(exec).run()
    };
    let gone = "delete pod -n a mover --ignore-not-found --force --grace-period=0";
    for (_, node) in NODES {
        world.cluster.kubectl(gone).run().ok();
        world.cluster.pod("a", "mover", node, &ticker(node));
        world.cluster.wait("a", "pod/mover", "Ready");
        // The API server has the pod's node from the kubelet: it must no longer use the old one.
        let first = exec(world).ok().text();
        assert_eq!(first, format!("{node}\n"));
        let logs = world.cluster.kubectl("logs -n a mover").run().ok().text();
        assert!(logs.starts_with(&format!("ticker on {node}\n")), "{logs}");
    }
    world.cluster.kubectl(gone).run().ok();
}

/// Checks the errors of `get --raw` for the proxies of these nodes.
pub(crate) fn failures_tell(world: &World, failures: &[(&str, &str)]) {
    for (node, wanted) in failures {
        let raw = format!("get --raw /api/v1/nodes/{node}/proxy/");
        let content = world.cluster.kubectl(&raw).run().failed();
        assert!(content.contains(wanted), "{node}: {content}");
    }
}

/// Bytes that cannot be compressed.
pub(crate) fn noise(count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    let mut source = fs::File::open("/dev/urandom").unwrap();
    source.read_exact(&mut bytes).unwrap();
    bytes
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
