//! Thousands of nodes, each with an edge: tests their cost for a gateway, its requests to the API server while nothing happens,
//! and how fast they join at once.
//!
//! The edges are the light ones of the bench. The tests run only with `CAUSEWAY_TEST_FULL=1`; otherwise the bench would be
//! built for them alone. `BENCH_LOAD` names a build of `bench/load`, as for `bench/run`.

use std::{
    env, fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use causeway_k8s::build_client;
use futures_util::{StreamExt, stream};
use libtest_mimic::Trial;
use serde_json::{Value, json};
use tokio::runtime::Builder;

use crate::{
    certificates, full,
    nodes::{number, started},
    state, trial,
    world::{
        World,
        process::{Process, Program, ToolOutput, within},
        world,
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    let full = full();
    let thousands = trial(
        "fleet::five_thousand_nodes_with_five_thousand_edges",
        five_thousand_nodes_with_five_thousand_edges,
    );
    let joining = trial(
        "fleet::two_thousand_nodes_join_within_a_minute",
        two_thousand_nodes_join_within_a_minute,
    );
    full.then_some([thousands, joining])
        .into_iter()
        .flatten()
        .collect()
}

/// Edges that stay, and edges that come and go.
const STEADY: u64 = 4_500;
const FLAPPING: u64 = 500;
/// The kubelets' own nodes exist as well.
const NODES: u64 = STEADY + FLAPPING + 2;

const TUNNEL: u16 = 12_262;
const ADMIN: u16 = 12_265;
const DNS: u16 = 12_253;
/// Address that the names of nodes at the edge resolve to.
const MEANING: &str = "192.0.2.20";

/// Time limit of a DNS answer, on a machine that also runs 5,000 edges.
const ANSWERED: Duration = Duration::from_secs(1);

/// Creates this many Node objects, with an address each.
fn create(world: &World, prefix: &str, count: u64, network: u64) {
    let node = |number: u64| {
        let address = format!("10.{network}.{}.{}", number / 250, number % 250 + 1);
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": format!("{prefix}{number}"), "labels": { "causeway.io/edge": "true" } },
            "status": { "addresses": [{ "type": "InternalIP", "address": address }] },
        })
    };
    let items: Vec<Value> = (1..=count).map(node).collect();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
    let create = world.cluster.kubectl("create --validate=false -f -");
    let create = create.input(list.to_string());
    create.within(Duration::from_mins(10)).run().ok();
}

/// The load generator of the bench.
fn load() -> PathBuf {
    if let Some(built) = env::var_os("BENCH_LOAD") {
        return built.into();
    }
    let bench = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/load");
    let build =
        Program::new("cargo").words("build -q --release --locked --offline --manifest-path");
    let build = build.args([bench.join("Cargo.toml")]);
    build.within(Duration::from_mins(15)).run().ok();
    let target = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target = target.unwrap_or_else(|| bench.join("target"));
    target.join("release/causeway-bench-load")
}

struct Fleet {
    load: PathBuf,
    folder: PathBuf,
}

impl Fleet {
    fn identities(&self, prefix: &str) -> PathBuf {
        self.folder.join(format!("{prefix}identities"))
    }

    fn mint(&self, prefix: &str, count: u64) {
        let mint = Program::new(&self.load).words(&format!(
            "mint --prefix {prefix} --nodes {count} --data-dir"
        ));
        let mint = mint.args([self.folder.join("data")]).args(["--out"]);
        let mint = mint.args([self.identities(prefix)]);
        mint.within(Duration::from_mins(5)).run().ok();
    }

    /// Edges of these nodes, which run while the value exists.
    fn edges(&self, prefix: &str) -> Process {
        Program::new(&self.load)
            .words(&format!("fleet --gateway 127.0.0.1:{TUNNEL} --identities"))
            .args([self.identities(prefix)])
            .start(&self.folder.join(format!("{prefix}log")))
    }
}

fn metric(name: &str) -> u64 {
    let url = format!("http://127.0.0.1:{ADMIN}/metrics");
    let all = Program::new("curl").words("-sS").args([url]).run();
    number(&all.ok().text(), name)
}

fn tunnels() -> u64 {
    metric("causeway_gateway_tunnels ")
}

/// Returns the memory of a process, in KiB.
fn memory(process: &Process) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.unwrap().trim().strip_suffix(" kB");
    kib.unwrap().parse().unwrap()
}

/// Returns the address that a name resolves to, and how long the query took.
fn ask(name: &str) -> (String, Duration) {
    let began = Instant::now();
    let dig = format!("+short +time=5 +tries=1 -p {DNS} @127.0.0.1 {name}.nodes.example");
    let message: ToolOutput = Program::new("dig").words(&dig).run().ok();
    (message.text().trim().to_owned(), began.elapsed())
}

/// Returns the number of requests that the API server has received from the gateway's account.
fn requests(world: &World) -> u64 {
    let all = world
        .cluster
        .kubectl("get --raw /metrics")
        .run()
        .ok()
        .text();
    let ours = |line: &&str| {
        line.starts_with("apiserver_flowcontrol_dispatched_requests_total{")
            && line.contains("flow_schema=\"causeway\"")
    };
    let counts = all
        .lines()
        .filter(ours)
        .filter_map(|line| line.split(' ').next_back());
    counts.map(|count| count.parse::<u64>().unwrap()).sum()
}

/// Counts the requests that the gateway's account sends by itself.
fn count_requests(world: &World) {
    let everything = json!({ "verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": true, "namespaces": ["*"] });
    let elsewhere = json!({ "verbs": ["*"], "nonResourceURLs": ["*"] });
    let account = json!({ "name": "causeway-gateway", "namespace": "kube-system" });
    world.cluster.apply(&json!({
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "FlowSchema",
        "metadata": { "name": "causeway" },
        "spec": {
            "matchingPrecedence": 100,
            "priorityLevelConfiguration": { "name": "workload-low" },
            "rules": [{
                "subjects": [{ "kind": "ServiceAccount", "serviceAccount": account }],
                "resourceRules": [everything], "nonResourceRules": [elsewhere],
            }],
        },
    }));
}

fn five_thousand_nodes_with_five_thousand_edges() {
    let world = world();
    let folder = world.path("fleet");
    fs::create_dir_all(&folder).unwrap();
    let fleet = Fleet {
        load: load(),
        folder,
    };
    for (prefix, count, network) in [("steady-", STEADY, 110), ("flapping-", FLAPPING, 140)] {
        fleet.mint(prefix, count);
        create(&world, prefix, count, network);
    }
    let kubeconfig = world.cluster.account("egress");
    count_requests(&world);
    let config = json!({
        "data_dir": fleet.folder.join("data"),
        "tunnel": { "listen": format!("127.0.0.1:{TUNNEL}") },
        "admin": { "listen": format!("127.0.0.1:{ADMIN}") },
        "dns": { "listen": format!("127.0.0.1:{DNS}"), "zones": ["nodes.example"], "addresses": [MEANING] },
        "kubernetes": { "kubeconfig": kubeconfig },
    });
    let began = Instant::now();
    let gateway = started(&fleet.folder, &config.to_string());
    let known = || metric("causeway_gateway_cluster_nodes{place=\"edge\"} ") == NODES;
    assert!(within(Duration::from_mins(1), known), "not all are known");
    println!(
        "{NODES} nodes are known {:?} after the start",
        began.elapsed()
    );
    println!("memory with no edge: {} KiB", memory(&gateway));
    let began = Instant::now();
    let _steady = fleet.edges("steady-");
    let flapping = fleet.edges("flapping-");
    let all = || tunnels() == STEADY + FLAPPING;
    assert!(
        within(Duration::from_mins(3), all),
        "{} edges are here",
        tunnels()
    );
    println!(
        "{} edges are here {:?} after their start",
        STEADY + FLAPPING,
        began.elapsed()
    );
    println!("memory with all edges: {} KiB", memory(&gateway));
    drop(flapping);
    flap(&world, &fleet);
    println!("memory after the flapping: {} KiB", memory(&gateway));
    rest(&world);
    assert!(memory(&gateway) < 700 << 10, "{} KiB", memory(&gateway));
    drop(gateway);
    let line = "delete nodes -l causeway.io/edge=true --wait=false --field-selector metadata.name!=edge-1,metadata.name!=edge-2";
    let delete = world.cluster.kubectl(line).within(Duration::from_mins(10));
    delete.run().ok();
    world
        .cluster
        .kubectl("delete flowschema causeway")
        .run()
        .ok();
}

/// 500 edges connect and disconnect at once, while clients resolve names.
fn flap(world: &World, fleet: &Fleet) {
    const ROUNDS: u64 = 6;
    let (mut asked, mut slowest) = (0, Duration::ZERO);
    let before = requests(world);
    for round in 1..=ROUNDS {
        let flapping = fleet.edges("flapping-");
        let mut number = round;
        let here = || {
            for name in [
                format!("steady-{number}"),
                format!("flapping-{}", number % FLAPPING + 1),
            ] {
                let (meaning, took) = ask(&name);
                assert_eq!(meaning, MEANING, "{name}");
                (asked, slowest) = (asked + 1, slowest.max(took));
            }
            number += 7;
            tunnels() == STEADY + FLAPPING
        };
        assert!(
            within(Duration::from_mins(1), here),
            "{} edges are here",
            tunnels()
        );
        drop(flapping);
        let gone = || tunnels() == STEADY;
        assert!(
            within(Duration::from_mins(1), gone),
            "{} edges are here",
            tunnels()
        );
    }
    println!(
        "{asked} names were answered, the slowest after {slowest:?}, while 500 edges came and went 6 times"
    );
    let (requests, reconnects) = (requests(world) - before, ROUNDS * FLAPPING);
    println!("requests of the API server in {reconnects} reconnects: {requests}");
    // The rest are watches that begin again, as in a time without changes.
    assert!(requests * 50 < reconnects, "{requests} requests");
    assert!(slowest < ANSWERED, "{slowest:?}");
}

/// A minute in which nothing happens, except the two kubelets' heartbeats.
fn rest(world: &World) {
    let before = requests(world);
    assert!(before > 0, "the gateway's requests are not counted");
    // Time is the subject: a minute without any client.
    thread::sleep(Duration::from_mins(1));
    let asked = requests(world) - before;
    println!("requests of the API server in a minute at rest: {asked}");
    assert!(asked <= 6, "{asked}");
}

/// Nodes that join by requests to the cluster at once, and the longest time that this may take.
const JOINING: u64 = 2_000;
const JOINED: Duration = Duration::from_mins(1);
/// Nodes that join by tokens at once. The tests' gateway is not optimized, and more nodes would repeat their handshakes faster
/// than it completes them.
const BY_TOKEN: u64 = 300;
/// Requests that are sent to the API server at once.
const CONCURRENT: usize = 32;

/// Nodes join by requests to the cluster, and then others by tokens. The state is in Secrets.
fn two_thousand_nodes_join_within_a_minute() {
    let world = world();
    certificates::clean(&world);
    state::delete_secrets(&world);
    for rights in ["certificates/rbac.yaml", "state/rbac.yaml"] {
        world.cluster.apply_example(rights);
    }
    let folder = world.path("joining");
    fs::create_dir_all(&folder).unwrap();
    create(&world, "joining-", JOINING, 150);
    let kubeconfig = world.cluster.account("egress");
    let config = json!({
        "data_dir": folder.join("data"),
        "tunnel": { "listen": format!("127.0.0.1:{TUNNEL}") },
        "admin": { "listen": format!("127.0.0.1:{ADMIN}") },
        "timeouts": { "edges": "0s" },
        "kubernetes": { "kubeconfig": kubeconfig, "certificates": {}, "state": "kube-system/causeway-state" },
    });
    let gateway = started(&folder, &config.to_string());
    let known = || metric("causeway_gateway_cluster_nodes{place=\"edge\"} ") == JOINING + 2;
    assert!(within(Duration::from_mins(1), known), "not all are known");

    let before = state::writes(&world);
    let began = Instant::now();
    let asking = world.cluster.kubeconfig("admin");
    submit_requests(Path::new(&asking), JOINING);
    println!(
        "{JOINING} requests were submitted within {:?}",
        began.elapsed()
    );
    let signed = || metric("causeway_gateway_cluster_certificates_total{outcome=\"signed\"} ");
    let are_signed = within(JOINED, || signed() >= JOINING);
    assert!(are_signed, "{} are signed", signed());
    let took = began.elapsed();
    println!("{JOINING} requests were submitted and signed within {took:?}");
    print_writes(&world, before);

    assert!(took < JOINED);
    join_by_tokens(&world, &folder);

    drop(gateway);
    let delete = world.cluster.kubectl("delete nodes -l causeway.io/edge=true --wait=false --field-selector metadata.name!=edge-1,metadata.name!=edge-2");
    delete.within(Duration::from_mins(10)).run().ok();
    let delete = world.cluster.kubectl("delete csr --all --wait=false");
    delete.within(Duration::from_mins(10)).run().ok();
    state::delete_secrets(&world);
    certificates::clean(&world);
}

/// Nodes join at once with a token each.
fn join_by_tokens(world: &World, folder: &Path) {
    let before = state::writes(world);
    let join = format!(
        "join --gateway 127.0.0.1:{TUNNEL} --nodes {BY_TOKEN} --prefix by-token --tokens-of-their-own --data-dir"
    );
    // It would stop at the end of a pipe.
    let join_program = Program::new("sh").args(["-c", "exec \"$0\" \"$@\" </dev/null"]);
    let join = join_program
        .args([load()])
        .words(&join)
        .args([folder.join("data")]);
    let joined = join.within(Duration::from_mins(5)).run().ok().text();
    let result = joined
        .lines()
        .find(|line| line.contains("\"result\""))
        .unwrap();
    println!("{result}");
    let result: Value = serde_json::from_str(result).unwrap();
    assert_eq!(result["joined"], BY_TOKEN);
    print_writes(world, before);
    assert!(result["seconds"].as_f64().unwrap() < JOINED.as_secs_f64());
}

/// Prints the writes of Secrets since then.
fn print_writes(world: &World, before: u64) {
    println!("writes of Secrets: {}", state::writes(world) - before);
}

/// Submits a certificate request of each node, as its kubelet would.
fn submit_requests(kubeconfig: &Path, count: u64) {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = build_client(Some(kubeconfig)).await.unwrap();
        let submissions = (1..=count).map(|number| {
            let client = client.clone();
            async move {
                let node = format!("joining-{number}");
                let object = certificates::RequestedCertificate::edge(&node).object(&node);
                let request = axum::http::Request::post(
                    "/apis/certificates.k8s.io/v1/certificatesigningrequests",
                )
                .header("content-type", "application/json")
                .header("impersonate-user", format!("system:node:{node}"))
                .header("impersonate-group", "system:nodes")
                .header("impersonate-group", "system:authenticated")
                .body(object.to_string().into_bytes());
                client.request_text(request.unwrap()).await.unwrap();
            }
        });
        let submissions = stream::iter(submissions).buffer_unordered(CONCURRENT);
        submissions.collect::<Vec<_>>().await;
    });
}
