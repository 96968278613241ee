//! A webhook behind a Service whose endpoint is a pod at the edge, in the setup by addresses.
//!
//! kube-apiserver dials endpoints (`--enable-aggregator-routing=true`), whose addresses rules redirect to the gateway. A
//! program of this machine answers in the pod's network, because the image has no program that speaks TLS.

use std::fs;

use libtest_mimic::Trial;
use serde_json::json;

use crate::{
    addresses,
    steps::by,
    world::{
        World,
        process::{PATIENCE, Process, Program, within},
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![by(
        "webhooks::a_webhook_of_a_pod_at_the_edge_is_asked".to_owned(),
        addresses::CHECKED,
        a_webhook_of_a_pod_at_the_edge_is_asked,
    )]
}

/// A port of pods for which the listener exists.
const PORT: u16 = 9443;

/// Refuses all requests.
const REFUSES: &str = "
import http.server, json, ssl, sys
class Hook(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        status = {'message': 'the edge does not want this'}
        response = {'uid': asked['request']['uid'], 'allowed': False, 'status': status}
        said = json.dumps({'apiVersion': 'admission.k8s.io/v1', 'kind': 'AdmissionReview', 'response': response})
        self.send_response(200)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[3], sys.argv[4])
server = http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Hook)
server.socket = context.wrap_socket(server.socket, server_side=True)
print('serving', flush=True)
server.serve_forever()
";

/// The webhook, removed with the test: otherwise a change of its objects would wait for it.
struct Hook<'a> {
    world: &'a World,
    _app: Process,
}

impl Drop for Hook<'_> {
    fn drop(&mut self) {
        for line in [
            "delete validatingwebhookconfiguration hook --ignore-not-found",
            "delete service -n a hook --ignore-not-found",
            "delete pod -n a hook --ignore-not-found --force --grace-period=0",
        ] {
            // A failed test has a more important message.
            self.world.cluster.kubectl(line).run();
        }
    }
}

impl<'a> Hook<'a> {
    fn start(world: &'a World) -> Self {
        let (cluster, node) = (&world.cluster, &world.nodes[0]);
        cluster.pki.server("hook", &["hook.a.svc"], &[]);
        cluster.pod("a", "hook", &node.name, "exec sleep 1000000");
        cluster.wait("a", "pod/hook", "Ready");
        let pod = cluster.get("pod -n a hook").unwrap();
        let container = &pod["status"]["containerStatuses"][0]["containerID"];
        let container = container.as_str().unwrap().replace("containerd://", "");
        let tasks = node.at("ctr").words("-n k8s.io tasks ls").run().ok().text();
        let task = tasks.lines().find(|line| line.starts_with(&container));
        let process = task.unwrap().split_whitespace().nth(1).unwrap();
        let python = Program::new("nsenter").args(["--net", "--target", process, "python3"]);
        let python = python.args(["-c", REFUSES, "0.0.0.0", &PORT.to_string()]);
        let files = ["hook.pem", "hook.key"].map(|file| cluster.pki.path(file));
        let mut app = python.args(files).start(&node.path("hook.log"));
        app.says("serving");
        Self { world, _app: app }
    }

    /// A Service whose endpoint is the pod, and a webhook configuration for `ConfigMaps` with its label.
    fn is_asked(&self) {
        let cluster = &self.world.cluster;
        let pod = cluster.get("pod -n a hook").unwrap();
        cluster.apply(&json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": "hook", "namespace": "a" },
            "spec": { "ports": [{ "name": "https", "port": 443, "targetPort": PORT }] },
        }));
        cluster.apply(&json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": "hook", "namespace": "a", "labels": { "kubernetes.io/service-name": "hook" },
            },
            "addressType": "IPv4",
            "endpoints": [{ "addresses": [pod["status"]["podIP"]], "conditions": { "ready": true } }],
            "ports": [{ "name": "https", "port": PORT, "protocol": "TCP" }],
        }));
        let signer = fs::read(cluster.pki.path("ca.pem")).unwrap();
        cluster.apply(&json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "metadata": { "name": "hook" },
            "webhooks": [{
                "name": "hook.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
                "failurePolicy": "Fail", "timeoutSeconds": 10,
                "objectSelector": { "matchLabels": { "hook": "asked" } },
                "rules": [{
                    "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"],
                }],
                "clientConfig": {
                    "caBundle": data_encoding::BASE64.encode(&signer),
                    "service": { "name": "hook", "namespace": "a", "port": 443, "path": "/" },
                },
            }],
        }));
    }
}

fn a_webhook_of_a_pod_at_the_edge_is_asked(world: &mut World) {
    let hook = Hook::start(world);
    hook.is_asked();
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": "hook", "namespace": "a", "labels": { "hook": "asked" } },
    });
    let wanted =
        "admission webhook \"hook.example.com\" denied the request: the edge does not want this";
    let mut message = String::new();
    let asked = within(PATIENCE, || {
        let create = world.cluster.kubectl("create --dry-run=server -f -");
        message = create.input(object.to_string()).run().stderr;
        message.contains(wanted)
    });
    assert!(asked, "{message}");
}
