//! Pods of real kubelets: the gateway of each way, and for one way all of it, with an edge on the same node and callers.
//!
//! What controllers would do is done by hand: the pods are made of the templates, where they are to be is said, and a claim
//! on a volume is an empty one. The rest is as `deploy/` has it: accounts and their rights, security, probes, files, Secrets. The tested
//! binary stands for the static one.

use std::{fs, sync::Once};

use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::{kustomized, named, objects, pod};
use crate::{
    steps, trial,
    world::{
        Way, World,
        causeway::BINARY,
        image,
        net::CLOUD,
        process::{PATIENCE, within},
        world,
    },
};

pub(super) fn trials() -> [Trial; 2] {
    [
        trial(
            "deploy::the_gateway_of_each_way_runs_as_a_pod_made_as_the_manifests_say",
            the_gateway_of_each_way_runs_as_a_pod_made_as_the_manifests_say,
        ),
        steps::by(
            "deploy::a_caller_of_the_cluster_reaches_an_app_through_pods_made_as_the_manifests_say"
                .to_owned(),
            Way::Address,
            a_caller_of_the_cluster_reaches_an_app_through_pods_made_as_the_manifests_say,
        ),
    ]
}

/// The tests' own edge has the usual port for its health.
const ADMIN: (&str, &str) = ("10266", "10276");

/// What others would look at, but nobody here: workloads, and claims on volumes.
const BY_HAND: [&str; 3] = ["Deployment", "DaemonSet", "PersistentVolumeClaim"];

/// All that was made, which goes with it, but for the namespaces.
struct Made<'a> {
    world: &'a World,
    all: Vec<Value>,
}

impl<'a> Made<'a> {
    /// Everything of the way but what runs, with names of its own for what has no namespace: the tests' gateway has those.
    /// The Secrets that a gateway needs are there too, and the image.
    fn new(world: &'a World, way: &str) -> Self {
        let text = kustomized(world, way).replace(ADMIN.0, ADMIN.1);
        let mut all = objects(world, &text);
        for object in &mut all {
            if object["kind"].as_str().unwrap().starts_with("ClusterRole") {
                object["metadata"]["name"] = own(&object["metadata"]["name"]);
            }
            if object["roleRef"]["name"] == "causeway-gateway" {
                object["roleRef"]["name"] = own(&object["roleRef"]["name"]);
            }
        }
        let config = all
            .iter_mut()
            .find(|it| it["kind"] == "ConfigMap" && it["metadata"]["name"] == "causeway-edge");
        let config = &mut config.unwrap()["data"]["edge.yaml"];
        let own = format!("admin: {{ listen: 127.0.0.1:{} }}\n", ADMIN.1);
        *config = json!(config.as_str().unwrap().to_owned() + &own);
        let made = Self { world, all };
        for object in &made.all {
            if !BY_HAND.contains(&object["kind"].as_str().unwrap()) {
                world.cluster.apply(object);
            }
        }
        let pki = |name| fs::read_to_string(world.cluster.pki.path(name)).unwrap();
        let signer = json!({ "tls.crt": pki("ca.pem"), "tls.key": pki("ca.key") });
        secret(world, "causeway", "causeway-ca", &signer);
        let client = ("kubelet-client.pem", "kubelet-client.key");
        let client = json!({ "tls.crt": pki(client.0), "tls.key": pki(client.1) });
        secret(world, "causeway", "causeway-kubelet-client", &client);
        import(world);
        made
    }

    /// The way's gateway as a pod, which is ready, and its address.
    fn gateway(&self) -> String {
        self.pod("Deployment", "causeway-gateway", gateway);
        let at = &status(self.world, "causeway", "causeway-gateway")["podIP"];
        at.as_str().unwrap().to_owned()
    }

    /// A pod of this workload on the first node, changed by `change`, once it is ready.
    fn pod(&self, kind: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let mut pod = pod(named(&self.all, kind, name));
        pod["spec"]["nodeName"] = json!(self.world.nodes[0].name);
        change(&mut pod["spec"]);
        self.world.cluster.apply(&pod);
        let namespace = pod["metadata"]["namespace"].as_str().unwrap();
        let ready = within(2 * PATIENCE, || {
            let is = status(self.world, namespace, name);
            is["containerStatuses"][0]["ready"] == true
        });
        let logs = format!("logs -n {namespace} {name}");
        let said = || self.world.cluster.kubectl(&logs).run().text();
        assert!(ready, "{}{}", said(), status(self.world, namespace, name));
    }

    /// Ends a pod as a drain does, within its grace.
    fn end(&self, namespace: &str, name: &str) {
        let end = format!("delete -n {namespace} pod {name} --timeout=50s");
        self.world.cluster.kubectl(&end).run().ok();
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        for namespace in ["causeway", "causeway-edge"] {
            let pods = format!("delete pods -n {namespace} --all --now");
            self.world.cluster.kubectl(&pods).run();
        }
        let gone = |it: &&Value| it["kind"] != "Namespace";
        let all: Vec<_> = self.all.iter().filter(gone).collect();
        let all = json!({ "apiVersion": "v1", "kind": "List", "items": all });
        let delete = "delete --ignore-not-found --wait=false -f -";
        let delete = self.world.cluster.kubectl(delete);
        delete.input(all.to_string()).run();
    }
}

fn own(name: &Value) -> Value {
    json!(format!("deploy-{}", name.as_str().unwrap()))
}

/// A Secret with these texts.
fn secret(world: &World, namespace: &str, name: &str, texts: &Value) {
    world.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name, "namespace": namespace },
        "stringData": texts,
    }));
}

/// Gives the first node's runtime the image, once.
fn import(world: &World) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let archive = image::ours(&world.folder, BINARY);
        let import = world.nodes[0].at("ctr").words("-n k8s.io images import");
        import.args([archive]).run().ok();
    });
}

/// What a gateway's pod is here: on a node that says to be at the edge, without a claim on a volume, and told where the API
/// is, since nobody leads its Service anywhere.
fn gateway(spec: &mut Value) {
    let own = spec.as_object_mut().unwrap();
    own.remove("affinity").unwrap();
    own.remove("nodeSelector");
    for volume in spec["volumes"].as_array_mut().unwrap() {
        if !volume["persistentVolumeClaim"].is_null() {
            *volume = json!({ "name": volume["name"], "emptyDir": {} });
        }
    }
    let env = spec["containers"][0]["env"].as_array_mut().unwrap();
    for (name, value) in [("HOST", CLOUD.to_string()), ("PORT", "6443".to_owned())] {
        env.push(json!({ "name": format!("KUBERNETES_SERVICE_{name}"), "value": value }));
    }
}

/// What kubelet says of a pod.
fn status(world: &World, namespace: &str, name: &str) -> Value {
    let pod = world.cluster.get(&format!("pod -n {namespace} {name}"));
    pod.unwrap()["status"].clone()
}

/// The answer's code to an account of the namespace `monitoring`, and its body.
fn ask(world: &World, front: &str, account: &str, path: &str) -> (String, String) {
    let token = format!("create token -n monitoring {account} --audience causeway");
    let token = world.cluster.kubectl(&token).run().ok().text();
    let ran = world.nodes[0]
        .at("curl")
        .words("-sS -w \\n%{http_code} --cacert")
        .args([world.cluster.pki.path("ca.pem")])
        .args(["--connect-to", &format!("::{front}")])
        .args(["-H", &format!("Authorization: Bearer {}", token.trim())])
        .args([format!("https://edge-1:9100{path}")])
        .run()
        .ok()
        .text();
    let (body, code) = ran.rsplit_once('\n').unwrap();
    (code.to_owned(), body.to_owned())
}

fn a_caller_of_the_cluster_reaches_an_app_through_pods_made_as_the_manifests_say(
    world: &mut World,
) {
    let world = &*world;
    let node = &world.nodes[0];
    let made = Made::new(world, "callers");
    let at = made.gateway();
    let create = "exec -n causeway causeway-gateway -- /causeway token create --node * --uses 1";
    let token = world.cluster.kubectl(create).run().ok().text();
    let token = json!({ "token": token });
    secret(world, "causeway-edge", "causeway-join", &token);
    let edge = |spec: &mut Value| {
        spec["hostAliases"] = json!([{ "ip": &at, "hostnames": ["gw.example.com"] }]);
    };
    made.pod("DaemonSet", "causeway-edge", edge);
    // It comes back as who it is: the token is spent.
    made.end("causeway-edge", "causeway-edge");
    made.pod("DaemonSet", "causeway-edge", edge);

    let www = world.path("deploy-www");
    fs::create_dir_all(&www).unwrap();
    fs::write(www.join("metrics"), "up 1\n").unwrap();
    let app = node.at(image::BUSYBOX);
    let app = app.words("httpd -f -p 127.0.0.1:9100 -h").args([&www]);
    let _app = app.start(&world.path("deploy-app.log"));
    world.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "monitoring" },
    }));
    for account in ["prometheus", "grafana"] {
        world.cluster.apply(&json!({
            "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": { "name": account, "namespace": "monitoring" },
        }));
    }
    let front = format!("{at}:9100");
    let (code, body) = ask(world, &front, "prometheus", "/metrics");
    assert_eq!((code.as_str(), body.as_str()), ("200", "up 1\n"));
    assert_eq!(ask(world, &front, "prometheus", "/else").0, "403");
    assert_eq!(ask(world, &front, "grafana", "/metrics").0, "403");
    for (namespace, name) in [
        ("causeway", "causeway-gateway"),
        ("causeway-edge", "causeway-edge"),
    ] {
        let is = status(world, namespace, name);
        assert_eq!(is["containerStatuses"][0]["restartCount"], 0, "{is:#}");
        made.end(namespace, name);
    }
}

fn the_gateway_of_each_way_runs_as_a_pod_made_as_the_manifests_say() {
    let world = world();
    let node = &world.nodes[0];
    // As deploy/README.md has it for `egress`, by systemd-tmpfiles there.
    let folders = node.at("install").words("-d -m 700 -o 65532 -g 65532");
    let folders = folders.args(["/var/lib/causeway", "/run/causeway"]);
    folders.run().ok();
    let made = Made::new(&world, "egress");
    made.gateway();
    let owner = node.at("stat").words("-c %u:%a");
    let owner = owner.args(["/run/causeway/kube-apiserver.sock"]).run().ok();
    assert_eq!(owner.text(), "65532:600\n");
    drop(made);
    node.at("rm").words("-r /var/lib/causeway").run().ok();

    let made = Made::new(&world, "addresses");
    made.gateway();
    let rules = node.at("nft").words("list table inet causeway").run().ok();
    let other = world.nodes[1].site.address().to_string();
    assert!(rules.text().contains(&other), "{}", rules.text());
    drop(made);
    let tables = node.at("nft").words("list tables").run().ok().text();
    assert!(!tables.contains("inet causeway"), "{tables}");

    let made = Made::new(&world, "dns");
    let at = made.gateway();
    let dig = node.at("dig").words("+short -p 10253");
    let dig = dig.args([format!("@{at}"), "edge-2.nodes.example.internal".into()]);
    assert_eq!(dig.run().ok().text(), "10.96.0.20\n");
}
