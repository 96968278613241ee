//! Nodes that reach nothing but the tunnel port of a gateway: their kubelets use the API server through the edge (egress).
//!
//! The files are those that `docs/howto/edge-to-cloud.md` prints, with this cloud's addresses. With `CAUSEWAY_TEST_FULL=1` the
//! tests of the kubelet and of YurtHub last ten minutes each.

mod images;
mod scene;

use std::{collections::BTreeMap, time::Duration};

use libtest_mimic::Trial;
use serde::Deserialize;
use serde_json::json;

use crate::{
    full,
    heartbeats::recorder::{Recorder, State},
    world::{
        net::CLOUD,
        node::Node,
        process::{PATIENCE, Process, Program, within},
        ticker, yurthub,
    },
};
use scene::{API, BRIDGE, KUBELET_API, SERVICE, SERVICE_NAME, Scene, TUNNEL};

/// Function that runs a trial.
type Run = fn(&mut Scene);

pub(crate) fn trials() -> Vec<Trial> {
    let trials: [(&str, Run); 4] = [
        (
            "a_kubelet_survives_restarts_of_the_gateway",
            a_kubelet_survives_restarts_of_the_gateway,
        ),
        (
            "a_pod_calls_a_service_of_another_node",
            a_pod_calls_a_service_of_another_node,
        ),
        (
            "a_node_pushes_a_large_image_and_another_runs_it",
            images::a_node_pushes_a_large_image_and_another_runs_it,
        ),
        (
            "a_yurthub_survives_restarts_of_the_gateway",
            a_yurthub_survives_restarts_of_the_gateway,
        ),
    ];
    let trial = |(name, run): (&str, Run)| {
        Trial::test(format!("only_tunnel::{name}"), move || {
            let mut scene = scene::scene();
            scene.whole();
            run(&mut scene);
            Ok(())
        })
    };
    trials.into_iter().map(trial).collect()
}

/// The node of the first and the third test.
const NODE: &str = "edge-1";

/// Number of Services that the kubelet and the informer list, and of those that they get by their watches.
fn thousands() -> usize {
    if full() { 2_500 } else { 1_000 }
}

fn lasts(short: u64, long: u64) -> Duration {
    Duration::from_secs(if full() { long } else { short })
}

/// Waits until the node has renewed its Lease after this time, and marks the renewal.
fn renews(recorder: &Recorder, after: Duration, what: &str) {
    let mut renewed = None;
    let found = within(3 * PATIENCE, || {
        let samples = recorder.since(NODE, after).into_iter();
        let mut times = samples.map(|sample| sample.at.saturating_sub(sample.age));
        // Samples are a second apart.
        renewed = times.find(|at| *at > after + Duration::from_secs(1));
        renewed.is_some()
    });
    assert!(found, "no Lease is renewed after: {what}");
    let took = renewed.unwrap_or_default().saturating_sub(after);
    recorder.mark(format!("Lease renewed {} s after: {what}", took.as_secs()));
}

/// Checks that the node was always ready since this time; prints the largest age of its Lease.
fn always_ready(recorder: &Recorder, since: Duration) {
    let ages = recorder.since(NODE, since).into_iter();
    let oldest = ages.map(|sample| sample.age).max().unwrap_or_default();
    recorder.mark(format!("the oldest Lease had {} s", oldest.as_secs()));
    recorder.always((NODE, since), "ready", |state| {
        state.is_ready() && !state.evicts
    });
}

fn a_kubelet_survives_restarts_of_the_gateway(scene: &mut Scene) {
    let recorder = scene.recorder("a kubelet that has only the tunnel");
    let mut site = Site::start(scene, recorder, "kubelet", Duration::ZERO);
    site.survives_restart();
    site.survives_kill();
    let next = site.recorder.mark("another gateway takes over");
    site.scene.gateway_is_replaced();
    renews(&site.recorder, next, "the start of the next gateway");
    site.recorder.until(site.begun + lasts(0, 600));
    site.works("last");
    let failed = failed_requests(&site.scene.nodes[0]);
    site.end().mark(failed);
}

/// A node that has only the tunnel, with its kubelet, an informer of all Services, and what a user does there.
struct Site<'a> {
    scene: &'a mut Scene,
    recorder: Recorder,
    informer: Informer,
    /// Begins the names of pods and Services.
    prefix: &'static str,
    /// Time since which the node must be ready.
    begun: Duration,
}

impl<'a> Site<'a> {
    /// `since` is the time from which the node is expected.
    fn start(
        scene: &'a mut Scene,
        recorder: Recorder,
        prefix: &'static str,
        since: Duration,
    ) -> Self {
        recorder.sees((NODE, since), "ready", State::is_ready);
        pod_runs(scene, &format!("{prefix}-first"));
        scene.services(&format!("{prefix}-listed"), thousands());
        let mut informer = Informer::start(scene);
        informer.process.says("\"synced\"");
        scene.services(&format!("{prefix}-watched"), thousands());
        informer.sees_all(scene);
        only_the_tunnel_is_open(&scene.nodes[0]);
        let begun = recorder.mark("all is ready");
        Self {
            scene,
            recorder,
            informer,
            prefix,
            begun,
        }
    }

    /// Stops the gateway, changes Services while it is away, and starts it.
    fn survives_restart(&mut self) {
        self.recorder.until(self.begun + lasts(15, 180));
        let asked = self.recorder.mark("the gateway is asked to stop");
        self.scene.gateway_stops();
        let ended = self.recorder.mark("the gateway has ended");
        self.misses("restart");
        self.scene.gateway_starts();
        renews(&self.recorder, asked, "the request to stop");
        renews(&self.recorder, ended, "the end of the gateway");
        self.works("restarted");
        self.recorder.until(ended + lasts(15, 180));
    }

    /// Kills the gateway, and starts it after a time that is longer than the edge waits for a gateway. Returns the time of the start.
    fn survives_kill(&mut self) -> Duration {
        let killed = self.recorder.mark("the gateway is killed");
        self.scene.gateway_dies();
        self.misses("kill");
        self.recorder.until(killed + Duration::from_secs(15));
        self.scene.gateway_starts();
        let back = self.recorder.mark("the gateway runs again");
        renews(&self.recorder, killed, "the kill");
        renews(&self.recorder, back, "the start");
        self.works("killed");
        back
    }

    /// Creates Services of which the node does not learn yet.
    fn misses(&self, when: &str) {
        let name = format!("{}-missed-by-{when}", self.prefix);
        self.scene.services(&name, 20);
    }

    /// Checks that the node learns of all Services, and runs a new pod.
    fn works(&self, when: &str) {
        let name = format!("{}-{when}", self.prefix);
        self.scene.services(&name, 20);
        self.informer.sees_all(self.scene);
        pod_runs(self.scene, &name);
    }

    /// Checks that the node used only the tunnel, and was always ready.
    fn end(self) -> Recorder {
        only_the_tunnel_is_open(&self.scene.nodes[0]);
        always_ready(&self.recorder, self.begun);
        self.recorder
    }
}

/// Runs a new pod, whose log and shell a user reaches.
fn pod_runs(scene: &Scene, name: &str) {
    scene.cluster.pod("a", name, NODE, &ticker(NODE));
    scene.cluster.wait("a", &format!("pod/{name}"), "Ready");
    let logs = scene.cluster.kubectl(&format!("logs -n a {name}"));
    let logs = logs.run().ok().text();
    assert!(logs.starts_with(&format!("ticker on {NODE}\n")), "{logs}");
    let exec = format!("exec -n a {name} -- cat /tmp/node");
    let content = scene.cluster.kubectl(&exec).run().ok().text();
    assert_eq!(content, format!("{NODE}\n"));
}

/// Checks that the node has connections to the tunnel port, and none to another port of the cloud, and that it can open no other one.
fn only_the_tunnel_is_open(node: &Node) {
    let open = node
        .at("ss")
        .words("-Htn state established dst")
        .args([format!("{CLOUD}/24")]);
    let open = open.run().ok().text();
    let peers: Vec<&str> = open
        .lines()
        .filter_map(|line| line.split_whitespace().nth(3))
        .collect();
    let tunnel = TUNNEL.to_string();
    assert!(
        peers.len() >= 2 && peers.iter().all(|peer| *peer == tunnel),
        "{open}"
    );
    assert!(!scene::reaches(node, &format!("https://{API}/readyz")));
    assert!(scene::reaches(node, &format!("{KUBELET_API}/readyz")));
}

/// Returns the number of requests that failed in the kubelet's view, by the first words of its message.
fn failed_requests(node: &Node) -> String {
    let log = std::fs::read_to_string(node.path("kubelet.log")).unwrap();
    let mut counted = BTreeMap::<&str, usize>::new();
    for line in log.lines().filter(|line| line.contains(KUBELET_API)) {
        let message = line.split_once("] ").map_or(line, |(_, message)| message);
        let message = message.get(..60).unwrap_or(message);
        *counted.entry(message).or_default() += 1;
    }
    let total: usize = counted.values().sum();
    format!("failed requests in the kubelet's log: {total} {counted:#?}")
}

/// A line of an informer.
#[derive(Deserialize)]
struct InformerLine {
    event: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    version: String,
}

/// An informer of client-go on the node, with the kubelet's kubeconfig, which reads all Services from where the kubelet reads.
struct Informer {
    process: Process,
}

impl Informer {
    fn start(scene: &Scene) -> Self {
        let node = &scene.nodes[0];
        let program = scene.cluster.assets.join("informer").display().to_string();
        let kubeconfig = scene.cluster.pki.path(&format!("{NODE}.kubeconfig"));
        let informer = node.at(&program).words("-resource v1/services -kubeconfig");
        let process = informer
            .args([kubeconfig])
            .start(&node.path("informer.log"));
        Self { process }
    }

    /// Waits until its view is the state of the API server.
    fn sees_all(&self, scene: &Scene) {
        let once = Program::new(scene.cluster.assets.join("informer"));
        let once = once.words("-once -resource v1/services -kubeconfig");
        let once = once.args([scene.cluster.pki.path("admin.kubeconfig")]);
        let truth = view(&once.run().ok().text());
        let agrees = within(PATIENCE, || view(&self.process.output()) == truth);
        let seen = view(&self.process.output());
        assert!(agrees, "{} of {} Services", seen.len(), truth.len());
    }
}

/// Returns the version of each object after these events.
fn view(output: &str) -> BTreeMap<String, String> {
    let mut objects = BTreeMap::new();
    // The last line may be incomplete, and client-go has messages of its own.
    let lines = output
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    for line in lines {
        let InformerLine {
            event,
            namespace,
            name,
            version,
        } = line;
        let key = format!("{namespace}/{name}");
        match event.as_str() {
            "deleted" => drop(objects.remove(&key)),
            "synced" => {}
            _ => drop(objects.insert(key, version)),
        }
    }
    objects
}

fn a_pod_calls_a_service_of_another_node(scene: &mut Scene) {
    let node = &scene.nodes[0];
    let cluster = &scene.cluster;
    cluster.pki.client("kube-proxy", "system:kube-proxy", None);
    let kubeconfig = scene.kubeconfig("kube-proxy");
    let config = node.path("kube-proxy.yaml");
    let text = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": "nftables", "clusterCIDR": "10.244.0.0/16",
        "clientConnection": { "kubeconfig": kubeconfig }, "conntrack": { "maxPerCore": 0 },
    });
    std::fs::write(&config, text.to_string()).unwrap();
    let program = cluster.assets.join("kube-proxy").display().to_string();
    let proxy = node.at(&program).args(["--config".into(), config]);
    let proxy = proxy.args(["--hostname-override", NODE]);
    let proxy = proxy.start(&node.path("kube-proxy.log"));

    let serve =
        "mkdir /tmp/www; echo of edge-1 >/tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www";
    cluster.pod("a", "web", NODE, serve);
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "web", "namespace": "a" },
        "spec": {
            "clusterIP": SERVICE, "selector": { "app": "web" },
            "ports": [{ "port": 80, "targetPort": 8080 }],
        },
    }));
    // The name of the Service has this address, as by `hostAliases`.
    let client = format!("echo {} {SERVICE_NAME} >>/etc/hosts; exec cat", BRIDGE.ip());
    cluster.pod("b", "client", "edge-2", &client);
    cluster.wait("a", "pod/web", "Ready");
    cluster.wait("b", "pod/client", "Ready");
    let call = format!(
        "exec -n b client -- wget -q -O - http://{SERVICE_NAME}:{}/",
        BRIDGE.port()
    );
    let mut answer = None;
    let answered = within(PATIENCE, || {
        let called = cluster.kubectl(&call).run();
        let is_right = called.text() == "of edge-1\n";
        answer = Some(called);
        is_right
    });
    assert!(
        answered,
        "{answer:?}\n{}\n{}",
        scene.output(),
        proxy.output()
    );

    // With kube-proxy there are so many connections that the edge has changed their windows.
    let recorder = scene.recorder("a kubelet and kube-proxy through one connection");
    let before = scene.lost_connections();
    recorder.until(Duration::from_secs(20));
    assert_eq!(scene.lost_connections(), before, "{}", scene.output());
}

/// The kubelet and an informer use the YurtHub, and the YurtHub uses the edge.
fn a_yurthub_survives_restarts_of_the_gateway(scene: &mut Scene) {
    let hub = scene.cluster.assets.join("yurthub");
    if !hub.exists() {
        return crate::missing("YurtHub (tests/kube/assets/build)");
    }
    yurthub::create_objects(&scene.cluster);
    scene.cluster.certifies(&[[127, 0, 0, 1].into()]);
    let folder = scene.nodes[0].path("hub");
    let place = (&scene.cluster, &scene.nodes[0]);
    let hub = yurthub::start(place, (&hub, "--nodepool-name=north"), KUBELET_API, &folder);
    scene.cluster.pki.kubeconfig(NODE, yurthub::URL);
    scene.kubelet_starts(0);
    let recorder = scene.recorder("a kubelet behind a YurtHub that has only the tunnel");
    let begun = recorder.mark("the kubelet is behind its YurtHub");
    renews(&recorder, begun, "the start of the kubelet");
    let mut site = Site::start(scene, recorder, "hub", begun);
    site.survives_restart();
    let back = site.survives_kill();
    let end = (back + lasts(15, 0)).max(begun + lasts(0, 600));
    site.recorder.until(end);
    site.works("last");
    always_ready(&site.end(), begun);
    drop(hub);
}
