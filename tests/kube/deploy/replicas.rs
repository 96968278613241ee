//! Two gateways as pods, the edge of their node, and a client in the cluster that connects to any ready gateway.
//!
//! The test does the work of a Service by hand: the client uses one of the addresses that the `EndpointSlices` list as
//! ready. The cluster itself provides these and the addresses of the gateways' name: its controllers and a real `CoreDNS`.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::pods::{CreatedObjects, gateway, status, told};
use crate::{
    steps,
    world::{
        Way, World,
        causeway::BINARY,
        image,
        process::{Process, Program, until},
    },
};

pub(super) fn trials() -> [Trial; 1] {
    [steps::by(
        "deploy::an_in_cluster_client_loses_no_request_as_gateways_change".to_owned(),
        Way::Address,
        an_in_cluster_client_loses_no_request_as_gateways_change,
    )]
}

/// The headless Service, as the cluster names it.
pub(super) const GATEWAYS: &str = "causeway-gateways.causeway.svc.cluster.local";

/// The cluster's DNS, on the node's loopback.
pub(super) fn names(world: &World) -> Process {
    let file = world.path("Corefile.cluster");
    let admin = world.cluster.pki.path("admin.kubeconfig");
    let text = format!(
        "cluster.local:53 {{\n bind 127.0.0.1\n kubernetes cluster.local {{\n kubeconfig {admin}\n }}\n}}\n"
    );
    fs::write(&file, text).unwrap();
    let coredns = world.cluster.assets.join("coredns");
    let mut names = world.nodes[0]
        .at(&coredns.display().to_string())
        .args(["-conf".as_ref(), file.as_os_str()])
        .start(&world.path("coredns.cluster.log"));
    names.says("CoreDNS-");
    names
}

/// Makes the CA's Secret as `deploy/README.md` does, with listeners below the cluster's own CA.
const CA_SECRET: &str = r#"
set -e; cd "$1"
"$2" ca init --data-dir ca >&2
"$2" ca csr --data-dir ca >causeway.csr
printf 'basicConstraints=critical,CA:TRUE,pathlen:0\nkeyUsage=critical,keyCertSign\nextendedKeyUsage=serverAuth\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n' >ca.ext
openssl x509 -req -in causeway.csr -CA "$3" -CAkey "$4" -days 30 -extfile ca.ext -out signed.crt
cat signed.crt "$3" >chain.pem
"$2" ca import chain.pem --data-dir ca >&2
exec "$2" k8s ca-secret --data-dir ca
"#;

pub(super) fn ca_secret(world: &World) {
    let pki = |name| world.cluster.pki.path(name);
    let folder = world.path("ca-secret");
    fs::create_dir_all(&folder).unwrap();
    let made = Program::new("sh")
        .args(["-c", CA_SECRET, "sh"])
        .args([folder.display().to_string(), BINARY.to_owned()])
        .args([pki("ca.pem"), pki("ca.key")]);
    let secret = made.run().ok();
    let create = world.cluster.kubectl("create -f -");
    create.input(secret.stdout).run().ok();
}

/// Returns the number of roots that edges trust.
fn published(world: &World) -> usize {
    let map = world.cluster.get("-n kube-system configmap causeway-ca");
    let text = map.map(|map| map["data"]["ca.crt"].as_str().unwrap().to_owned());
    text.unwrap_or_default()
        .matches("BEGIN CERTIFICATE")
        .count()
}

/// Client that authenticates by the token of an account of the namespace `monitoring`.
struct Client<'a> {
    world: &'a World,
    token: String,
}

impl<'a> Client<'a> {
    fn new(world: &'a World, account: &str) -> Self {
        world.cluster.apply(&json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "monitoring" },
        }));
        world.cluster.apply(&json!({
            "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": { "name": account, "namespace": "monitoring" },
        }));
        let token = format!("create token -n monitoring {account} --audience causeway");
        let token = world.cluster.kubectl(&token).run().ok().text();
        Self {
            world,
            token: token.trim().to_owned(),
        }
    }

    /// Returns the answer's code and its body, or curl's error message.
    fn ask(&self, at: &str, path: &str) -> (String, String) {
        let ran = self.world.nodes[0]
            .at("curl")
            .words("-sS --max-time 20 -w \\n%{http_code} --cacert")
            .args([self.world.cluster.pki.path("ca.pem")])
            .args(["--connect-to", &format!("::{at}:9100")])
            .args(["-H", &format!("Authorization: Bearer {}", self.token)])
            .args([format!("https://edge-1:9100{path}")])
            .run();
        let message = ran.text();
        let (body, code) = message.rsplit_once('\n').unwrap_or_default();
        (code.to_owned(), format!("{body}{}", ran.stderr))
    }

    /// Sends requests to the ready gateways in turn, until it is stopped. Returns the failed requests, and counts the others.
    fn asks_on(&self, stop: &AtomicBool, answered: &AtomicUsize) -> Vec<String> {
        let mut failed = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let ready = ready(self.world);
            let turn = answered.load(Ordering::Relaxed) % ready.len().max(1);
            let Some(at) = ready.get(turn) else {
                failed.push("no gateway is ready".to_owned());
                continue;
            };
            match self.ask(at, "/metrics") {
                (code, body) if code == "200" && body == "up 1\n" => {
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                (code, body) => failed.push(format!("{at}: {code} {body}")),
            }
        }
        failed
    }
}

/// The addresses to which the Service of the listeners leads.
fn ready(world: &World) -> Vec<String> {
    ready_behind(world, "causeway-listeners")
}

/// The addresses to which a Service of gateways leads.
pub(super) fn ready_behind(world: &World, service: &str) -> Vec<String> {
    let line = format!("endpointslices -n causeway -l kubernetes.io/service-name={service}");
    let slices = world.cluster.get(&line).unwrap();
    let slices = slices["items"].as_array().unwrap().clone();
    let all = slices
        .iter()
        .filter_map(|slice| slice["endpoints"].as_array());
    all.flatten()
        .filter(|endpoint| endpoint["conditions"]["ready"] == true)
        .map(|endpoint| endpoint["addresses"][0].as_str().unwrap().to_owned())
        .collect()
}

/// Sets the flag when it is dropped, also by a panic: the thread that reads the flag would not end otherwise.
pub(super) struct Ends<'a>(pub(super) &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The node's app.
fn app(world: &World, www: &Path) -> Process {
    fs::create_dir_all(www).unwrap();
    fs::write(www.join("metrics"), "up 1\n").unwrap();
    let app = world.nodes[0].at(image::BUSYBOX);
    let app = app.words("httpd -f -p 127.0.0.1:9100 -h").args([www]);
    app.start(&world.path("deploy-app.log"))
}

/// Changes the pod of an edge for the test: it asks the cluster's DNS. It has no token, and needs none.
pub(super) fn edge(spec: &mut Value) {
    told(spec);
    spec["dnsPolicy"] = json!("None");
    spec["dnsConfig"] = json!({ "nameservers": ["127.0.0.1"] });
}

/// By the file that all gateways have.
fn a_node_that_is_revoked_is_out_at_each(made: &CreatedObjects<'_>, client: &Client<'_>) {
    let world = client.world;
    for at in ready(world) {
        assert_eq!(client.ask(&at, "/metrics").0, "200");
    }
    made.configure("gateway", "tunnel:\n", "tunnel:\n  revoked: [edge-1]\n");
    // kubelet gives it to them when it checks them next.
    let stir = "annotate pods -n causeway -l app.kubernetes.io/component=gateway stirred=now";
    world.cluster.kubectl(stir).run().ok();
    for at in ready(world) {
        until("its tunnel has ended", || {
            client.ask(&at, "/metrics").0 == "503"
        });
    }
    let logs = "logs -n causeway-edge edge";
    until("the edge logs the reason", || {
        let message = world.cluster.kubectl(logs).run().text();
        message.contains("tunnel.revoked names it")
    });
}

/// Checks which clients the policy admits at each gateway.
fn the_policy_decides(world: &World) -> Client<'_> {
    let [prometheus, grafana] = ["prometheus", "grafana"].map(|name| Client::new(world, name));
    for at in ready(world) {
        let (code, body) = prometheus.ask(&at, "/metrics");
        assert_eq!((code.as_str(), body.as_str()), ("200", "up 1\n"));
        assert_eq!(prometheus.ask(&at, "/else").0, "403");
        assert_eq!(grafana.ask(&at, "/metrics").0, "403");
    }
    prometheus
}

/// Drains the first of two gateways and then the second, with another one in their place, while the client sends requests.
fn all_are_answered_as_gateways_change(made: &CreatedObjects<'_>, client: &Client<'_>) {
    let world = client.world;
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let more_are_answered = || {
        let before = answered.load(Ordering::Relaxed);
        until("two more requests are answered", || {
            answered.load(Ordering::Relaxed) >= before + 2
        });
    };
    let failed = thread::scope(|scope| {
        let asking = scope.spawn(|| client.asks_on(&stop, &answered));
        let ends = Ends(&stop);
        more_are_answered();
        // Runs a step of a rotation, which later pods have as well.
        let rotate = "exec -n causeway second -c gateway -- /causeway ca rotate prepare";
        world.cluster.kubectl(rotate).run().ok();
        // One is drained and another takes its place; then only that one is left.
        let delete = "delete -n causeway pod first --wait=false";
        world.cluster.kubectl(delete).run().ok();
        begin_gateway(made, "third");
        made.ready("causeway", "third");
        made.end("causeway", "second");
        until("only one gateway is ready", || ready(world).len() == 1);
        let before = status(world, "causeway", "third")["podIP"].clone();
        assert_eq!(json!(ready(world)), json!([before]));
        more_are_answered();
        drop(ends);
        asking.join().unwrap()
    });
    assert!(
        failed.is_empty(),
        "{answered:?} answered, and not: {failed:#?}"
    );
}

fn begin_gateway(made: &CreatedObjects<'_>, name: &str) {
    made.begin("Deployment", "causeway-gateway", name, gateway);
}

fn an_in_cluster_client_loses_no_request_as_gateways_change(world: &mut World) {
    let world = &*world;
    let made = CreatedObjects::new(world, "clients", GATEWAYS);
    ca_secret(world);
    let _names = names(world);
    let _app = app(world, &world.path("deploy-www"));
    for name in ["first", "second"] {
        begin_gateway(&made, name);
    }
    made.begin("DaemonSet", "causeway-edge", "edge", edge);
    for name in ["first", "second"] {
        made.ready("causeway", name);
    }
    made.ready("causeway-edge", "edge");
    until("the Service leads to both", || ready(world).len() == 2);
    let prometheus = the_policy_decides(world);

    all_are_answered_as_gateways_change(&made, &prometheus);
    assert_eq!(published(world), 2);
    // The edge returns with its identity, and has sent the cluster one request.
    made.end("causeway-edge", "edge");
    made.begin("DaemonSet", "causeway-edge", "edge", edge);
    made.ready("causeway-edge", "edge");
    for at in ready(world) {
        assert_eq!(prometheus.ask(&at, "/metrics").0, "200");
    }
    let asked = "csr --field-selector=spec.signerName=causeway.io/edge";
    let asked = world.cluster.get(asked).unwrap();
    assert_eq!(asked["items"].as_array().unwrap().len(), 1, "{asked:#}");
    begin_gateway(&made, "fourth");
    made.ready("causeway", "fourth");
    until("the Service leads to both", || ready(world).len() == 2);
    a_node_that_is_revoked_is_out_at_each(&made, &prometheus);
    for (namespace, name) in [("causeway", "third"), ("causeway-edge", "edge")] {
        let is = status(world, namespace, name);
        assert_eq!(is["containerStatuses"][0]["restartCount"], 0, "{is:#}");
    }
}
