//! Pods of real kubelets: the gateway of each overlay.
//!
//! The test does the work of controllers by hand: it makes the pods from the templates and assigns them to nodes. The rest is
//! as in `deploy/`: accounts and their rights, security, probes, files, Secrets. The tested binary replaces the static one.

use std::sync::Once;

use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::{kustomized, named, objects, pod};
use crate::{
    trial,
    world::{
        World,
        causeway::BINARY,
        image,
        net::CLOUD,
        process::{PATIENCE, Program, within},
        world,
    },
};

pub(super) fn trials() -> [Trial; 1] {
    [trial(
        "deploy::gateway_pods_of_each_kind_run_as_their_manifests_say",
        gateway_pods_of_each_kind_run_as_their_manifests_say,
    )]
}

/// Port for the health of the edge's pod, because the tests' own edge has the usual port.
const ADMIN: (&str, &str) = ("10266", "10276");

/// Workload kinds, whose controllers do not run here.
const BY_HAND: [&str; 2] = ["Deployment", "DaemonSet"];

/// Placeholder in the manifests for the address of the gateways.
const ANYWHERE: &str = "gw.example.com";

/// All created objects, which are removed with it, except the namespaces.
pub(super) struct CreatedObjects<'a> {
    world: &'a World,
    all: Vec<Value>,
}

impl<'a> CreatedObjects<'a> {
    /// Creates all objects of the way except workloads, with other names for objects without a namespace, because the
    /// tests' gateway has the usual names. The image is imported too. `name` is the gateways' address.
    pub(super) fn new(world: &'a World, way: &str, name: &str) -> Self {
        let text = kustomized(world, way).replace(ADMIN.0, ADMIN.1);
        let text = text.replace(ANYWHERE, name);
        let mut all = objects(world, &text);
        with_own_roles(&mut all);
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
        import(world);
        made
    }

    /// Starts the way's gateway as a pod, waits until it is ready, and returns its address; the CA is a new one.
    pub(super) fn gateway(&self) -> String {
        let made = Program::new(BINARY).words("k8s ca-secret").run().ok();
        self.world
            .cluster
            .kubectl("apply -f -")
            .input(made.stdout)
            .run()
            .ok();
        self.begin(
            "Deployment",
            "causeway-gateway",
            "causeway-gateway",
            gateway,
        );
        self.ready("causeway", "causeway-gateway");
        let at = &status(self.world, "causeway", "causeway-gateway")["podIP"];
        at.as_str().unwrap().to_owned()
    }

    /// The world in which it was made.
    pub(super) fn world(&self) -> &'a World {
        self.world
    }

    /// Starts a pod of this workload on the first node, with this name and changed by `change`.
    pub(super) fn begin(&self, kind: &str, of: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let mut pod = pod(named(&self.all, kind, of));
        pod["metadata"]["name"] = json!(name);
        pod["spec"]["nodeName"] = json!(self.world.nodes[0].name);
        change(&mut pod["spec"]);
        self.world.cluster.apply(&pod);
    }

    /// Replaces this text in the configuration of a side.
    pub(super) fn configure(&self, side: &str, from: &str, to: &str) {
        let mut map = named(&self.all, "ConfigMap", &format!("causeway-{side}")).clone();
        let text = &mut map["data"][format!("{side}.yaml")];
        let before = text.as_str().unwrap().to_owned();
        assert!(before.contains(from), "{before}");
        *text = json!(before.replace(from, to));
        self.world.cluster.apply(&map);
    }

    /// Waits until a pod is ready.
    pub(super) fn ready(&self, namespace: &str, name: &str) {
        let ready = within(2 * PATIENCE, || {
            let is = status(self.world, namespace, name);
            is["containerStatuses"][0]["ready"] == true
        });
        let logs = format!("logs -n {namespace} {name}");
        let message = || self.world.cluster.kubectl(&logs).run().text();
        assert!(
            ready,
            "{}{}",
            message(),
            status(self.world, namespace, name)
        );
    }

    /// Ends a pod as a drain does, within its grace.
    pub(super) fn end(&self, namespace: &str, name: &str) {
        let end = format!("delete -n {namespace} pod {name} --timeout=50s");
        self.world.cluster.kubectl(&end).run().ok();
    }
}

impl Drop for CreatedObjects<'_> {
    fn drop(&mut self) {
        for namespace in ["causeway", "causeway-edge"] {
            let pods = format!("delete pods -n {namespace} --all --now");
            self.world.cluster.kubectl(&pods).run();
        }
        // Removes the CA, the data that gateways have published, and the requests of edges.
        let left = [
            "-n causeway secret causeway-ca",
            "-n kube-system configmap causeway-ca",
            "csr --field-selector=spec.signerName=causeway.io/edge",
            "csr --field-selector=spec.signerName=kubernetes.io/kube-apiserver-client",
        ];
        for what in left {
            let delete = self.world.cluster.kubectl("delete --ignore-not-found");
            delete.words(what).run();
        }
        let gone = |it: &&Value| it["kind"] != "Namespace";
        let all: Vec<_> = self.all.iter().filter(gone).collect();
        let all = json!({ "apiVersion": "v1", "kind": "List", "items": all });
        let delete = "delete --ignore-not-found --wait=false -f -";
        let delete = self.world.cluster.kubectl(delete);
        delete.input(all.to_string()).run();
    }
}

/// Gives objects without a namespace other names, because the tests' gateway has the usual names.
pub(super) fn with_own_roles(all: &mut [Value]) {
    let own = |name: &Value| json!(format!("deploy-{}", name.as_str().unwrap()));
    for object in all {
        if object["kind"].as_str().unwrap().starts_with("ClusterRole") {
            object["metadata"]["name"] = own(&object["metadata"]["name"]);
        }
        let role = &mut object["roleRef"];
        if role["kind"] == "ClusterRole" && !role["name"].to_string().contains("system:") {
            role["name"] = own(&role["name"]);
        }
    }
}

/// Imports the image into the first node's runtime, once.
pub(super) fn import(world: &World) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let archive = image::ours(&world.folder, BINARY);
        let import = world.nodes[0].at("ctr").words("-n k8s.io images import");
        import.args([archive]).run().ok();
    });
}

/// Changes the pod of a gateway for the test: it may run on a node at the edge.
pub(super) fn gateway(spec: &mut Value) {
    let own = spec.as_object_mut().unwrap();
    own.remove("affinity").unwrap();
    own.remove("nodeSelector");
    told(spec);
}

/// Sets the address of the API, since no kube-proxy redirects its Service here.
pub(super) fn told(spec: &mut Value) {
    let env = spec["containers"][0]["env"].as_array_mut().unwrap();
    for (name, value) in [("HOST", CLOUD.to_string()), ("PORT", "6443".to_owned())] {
        env.push(json!({ "name": format!("KUBERNETES_SERVICE_{name}"), "value": value }));
    }
}

/// Returns the status of a pod as kubelet reports it.
pub(super) fn status(world: &World, namespace: &str, name: &str) -> Value {
    let pod = world.cluster.get(&format!("pod -n {namespace} {name}"));
    pod.unwrap()["status"].clone()
}

fn gateway_pods_of_each_kind_run_as_their_manifests_say() {
    let world = world();
    let node = &world.nodes[0];
    // As deploy/README.md does for `egress`, there with systemd-tmpfiles.
    let folders = node.at("install").words("-d -m 700 -o 65532 -g 65532");
    let folders = folders.args(["/var/lib/causeway", "/run/causeway"]);
    folders.run().ok();
    let made = CreatedObjects::new(&world, "egress", ANYWHERE);
    made.gateway();
    let owner = node.at("stat").words("-c %u:%a");
    let owner = owner.args(["/run/causeway/kube-apiserver.sock"]).run().ok();
    assert_eq!(owner.text(), "65532:600\n");
    drop(made);
    node.at("rm").words("-r /var/lib/causeway").run().ok();

    let made = CreatedObjects::new(&world, "addresses", ANYWHERE);
    made.gateway();
    let rules = node.at("nft").words("list table inet causeway").run().ok();
    let other = world.nodes[1].site.address().to_string();
    assert!(rules.text().contains(&other), "{}", rules.text());
    drop(made);
    let tables = node.at("nft").words("list tables").run().ok().text();
    assert!(!tables.contains("inet causeway"), "{tables}");

    let made = CreatedObjects::new(&world, "dns", ANYWHERE);
    let at = made.gateway();
    let dig = node.at("dig").words("+short -p 10253");
    let dig = dig.args([format!("@{at}"), "edge-2.nodes.example.internal".into()]);
    assert_eq!(dig.run().ok().text(), "10.96.0.20\n");
}
