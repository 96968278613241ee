//! Clients that a real API server authenticates, at a real kubelet: RBAC decides their access.
//!
//! A gateway in the cloud has the kubelet's client key and shows it for all of them; the edge passes bytes. The gateway's
//! account has the rights of `examples/egress/rbac.yaml` and `reviews.yaml` and no others.

use std::{fs, net::SocketAddr, path::PathBuf, time::Duration};

use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::{
    trial,
    world::{
        World,
        causeway::BINARY,
        net::CLOUD,
        process::{PATIENCE, Process, Program, until, within},
        world,
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial(
        "reviews::the_cluster_authorizes_kubelet_clients",
        the_cluster_authorizes_kubelet_clients,
    )]
}

/// Lifetime of cached answers here.
const KEPT: Duration = Duration::from_secs(2);
/// Name of the namespace, and of the bindings in it.
const PLACE: &str = "reviews";

/// A gateway, and an edge on the first node.
struct ReviewSetup {
    _gateway: Process,
    _edge: Process,
    ca: PathBuf,
}

/// The listeners: two for tokens of the API server, in both formats of errors; one for tokens of this gateway; one for
/// certificates.
fn listener(name: &str, port: u16, more: &Value) -> Value {
    let mut listener = json!({
        "name": name, "protocol": "https", "listen": format!("127.0.0.1:{port}"), "port": 10250,
        "subject_access_review": [10250],
    });
    let own = listener.as_object_mut().unwrap();
    own.extend(more.as_object().unwrap().clone());
    listener
}

const API: u16 = 11270;
const WORDS: u16 = 11271;
const OURS: u16 = 11272;
const CERTIFICATES: u16 = 11273;

impl ReviewSetup {
    fn start(world: &World) -> Self {
        let folder = world.path("reviews");
        fs::create_dir_all(&folder).unwrap();
        let data = folder.join("data");
        let causeway = || Program::new(BINARY).env("CAUSEWAY_DATA_DIR", &data);
        causeway().words("ca init").run().ok();
        let pki = |name: &str| world.cluster.pki.path(name);
        let any = json!({ "client_auth": { "own_ca": false, "token_review": {} } });
        let words = json!({ "client_auth": { "own_ca": false, "token_review": {} }, "errors": "kubernetes" });
        let ours = json!({ "client_auth": { "own_ca": false, "token_review": { "audiences": ["causeway"] } } });
        let certificates =
            json!({ "client_auth": { "own_ca": false, "client_ca": [pki("ca.pem")] } });
        let config = json!({
            "tunnel": { "listen": format!("{CLOUD}:11262") }, "admin": { "listen": "127.0.0.1:11265" },
            "kubernetes": {
                "kubeconfig": world.cluster.account("egress"),
                "review_allowed_for": format!("{}s", KEPT.as_secs()), "review_refused_for": "1s",
                "token_allowed_for": format!("{}s", KEPT.as_secs()), "token_refused_for": "1s",
            },
            "upstream_tls": { "10250": {
                "ca": pki("ca.pem"), "certificate": pki("kubelet-client.pem"), "key": pki("kubelet-client.key"),
            } },
            "listeners": [
                listener("api", API, &any), listener("words", WORDS, &words), listener("ours", OURS, &ours),
                listener("certificates", CERTIFICATES, &certificates),
            ],
        });
        let file = folder.join("gateway.yaml");
        fs::write(&file, config.to_string()).unwrap();
        let mut gateway = causeway()
            .words("gateway --config")
            .args([&file])
            .start(&folder.join("log"));
        gateway.says("gateway ready");
        let node = &world.nodes[0];
        let token = causeway().words("token create --node").args([&node.name]);
        let token = token.run().ok().text();
        let file = node.path("reviews-edge.yaml");
        let config = json!({
            "node": node.name, "gateways": [format!("{CLOUD}:11262")],
            "data_dir": node.path("reviews-edge"), "ports": { "10250": { "scheme": "tcp" } },
        });
        fs::write(&file, config.to_string()).unwrap();
        let mut edge = node
            .at(BINARY)
            .words("edge --config")
            .args([&file])
            .env("CAUSEWAY_JOIN", token.trim())
            .start(&node.path("reviews-edge.log"));
        edge.says("tunnel registered");
        Self {
            _gateway: gateway,
            _edge: edge,
            ca: data.join("ca.pem"),
        }
    }

    /// Returns the response of edge-1's kubelet, or of the gateway before it, at a listener.
    fn ask(&self, port: u16, path: &str, more: &[&str]) -> (u16, String) {
        let listener = SocketAddr::from(([127, 0, 0, 1], port));
        let ran = Program::new("curl")
            .words("-sS --path-as-is -w \\n%{http_code} --cacert")
            .args([&self.ca])
            .args(["--connect-to", &format!("::{listener}")])
            .args(more)
            .args([format!("https://edge-1:10250{path}")])
            .run()
            .ok();
        let text = ran.text();
        let (body, status) = text.rsplit_once('\n').unwrap();
        (status.parse().unwrap(), body.to_owned())
    }

    /// The same with a token.
    fn get(&self, port: u16, token: &str, path: &str) -> (u16, String) {
        self.ask(
            port,
            path,
            &["-H", &format!("Authorization: Bearer {token}")],
        )
    }
}

/// Creates an account with this right for nodes.
fn account(world: &World, name: &str, resources: &[&str], verbs: &[&str]) {
    let kubectl = |line: &str| world.cluster.kubectl(line);
    world.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": name, "namespace": PLACE },
    }));
    world.cluster.apply(&json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": format!("{PLACE}-{name}") },
        "rules": [{ "apiGroups": [""], "resources": resources, "verbs": verbs }],
    }));
    let bind = format!(
        "create clusterrolebinding {PLACE}-{name} --clusterrole={PLACE}-{name} --serviceaccount={PLACE}:{name} --user={name}"
    );
    kubectl(&bind).run().ok();
}

fn token(world: &World, name: &str, more: &str) -> String {
    let line = format!("create token {name} -n {PLACE} {more}");
    let made = world.cluster.kubectl(&line).run().ok();
    made.text().trim().to_owned()
}

fn the_cluster_authorizes_kubelet_clients() {
    let world = world();
    world.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": PLACE },
    }));
    account(&world, "prom", &["nodes/metrics"], &["get"]);
    account(&world, "all", &["nodes/proxy"], &["get", "create"]);
    let site = ReviewSetup::start(&world);
    let prom = token(&world, "prom", "");
    rights_that_are_missing_are_named(&world, &site, &prom);
    until("prom's rights are known", || {
        let (status, text) = site.get(API, &prom, "/metrics");
        status == 200 && text.contains("kubelet_")
    });
    each_client_has_the_permissions_of_its_role(&world, &site, &prom);
    no_spelling_gets_more(&site, &prom);
    audiences_and_certificates_count(&world, &site, &prom);
    a_deleted_account_is_refused_in_time(&world, &site, &prom);
}

fn rights_that_are_missing_are_named(world: &World, site: &ReviewSetup, prom: &str) {
    let (status, text) = site.get(API, prom, "/metrics");
    let says =
        "the cluster does not allow this gateway to create tokenreviews.authentication.k8s.io";
    assert!(status == 503 && text.contains(says), "{status} {text}");
    let log = fs::read_to_string(world.path("reviews/log")).unwrap();
    let cause = "cannot create resource \\\"tokenreviews\\\"";
    let plain = cause.replace('\\', "");
    assert!(log.contains(cause) || log.contains(&plain), "{log}");
    world.cluster.apply_example("egress/reviews.yaml");
}

fn each_client_has_the_permissions_of_its_role(world: &World, site: &ReviewSetup, prom: &str) {
    let run = "/run/a/echo/it?cmd=cat%20/tmp/node";
    let bearer = |token: &str| format!("Authorization: Bearer {token}");
    let forbidden = "does not allow system:serviceaccount:reviews:prom";
    for path in [
        "/exec/a/echo/it?command=id",
        "/pods",
        "/stats/summary",
        "/logs/",
        "/configz",
    ] {
        let (status, text) = site.get(API, prom, path);
        assert!(
            status == 403 && text.contains(forbidden),
            "{path}: {status} {text}"
        );
    }
    let (status, text) = site.ask(API, run, &["-X", "POST", "-H", &bearer(prom)]);
    assert!(
        status == 403 && text.contains("create nodes/proxy"),
        "{status} {text}"
    );
    // As kubectl shows it.
    let (status, text) = site.get(WORDS, prom, "/exec/a/echo/it?command=id");
    assert!(
        status == 502 && text.starts_with("the cluster "),
        "{status} {text}"
    );
    assert!(text.contains(forbidden), "{text}");
    for wrong in ["wrong", &format!("{prom}x")] {
        let (status, text) = site.get(API, wrong, "/metrics");
        assert!(
            status == 401 && text.contains("token_review: "),
            "{status} {text}"
        );
    }
    let all = token(world, "all", "");
    let (status, text) = site.ask(API, run, &["-X", "POST", "-H", &bearer(&all)]);
    assert_eq!((status, text.trim()), (200, "edge-1"));
    let (status, text) = site.get(API, &all, "/pods");
    assert!(
        status == 200 && text.contains("\"PodList\""),
        "{status} {text}"
    );
    let (status, text) = site.get(API, &all, "/metrics");
    assert!(
        status == 403 && text.contains("nodes/metrics"),
        "{status} {text}"
    );
}

fn no_spelling_gets_more(site: &ReviewSetup, prom: &str) {
    for path in [
        "/metrics/../exec/a/echo/it?command=id",
        "/metrics/%2e%2e/pods",
        "/metrics%2f..%2fpods",
        "//metrics",
        "/metrics//../pods",
        "/metrics;/../pods",
        "/%256detrics",
        "/./pods",
    ] {
        let (status, text) = site.get(API, prom, path);
        assert!(
            status == 403 && text.contains("get nodes/proxy"),
            "{path}: {status} {text}"
        );
    }
}

fn audiences_and_certificates_count(world: &World, site: &ReviewSetup, prom: &str) {
    let (status, _) = site.get(OURS, prom, "/metrics");
    assert_eq!(
        status, 401,
        "a token for the API server is invalid for this gateway"
    );
    let ours = token(world, "prom", "--audience causeway");
    let (status, text) = site.get(OURS, &ours, "/metrics");
    assert_eq!(status, 200, "{text}");
    let (status, _) = site.get(API, &ours, "/metrics");
    assert_eq!(status, 401, "and the other way round");
    world.cluster.pki.client("prom", "prom", None);
    let pki = |name: &str| world.cluster.pki.path(name);
    let (certificate, key) = (pki("prom.pem"), pki("prom.key"));
    let shown = ["--cert", &certificate, "--key", &key];
    let (status, text) = site.ask(CERTIFICATES, "/metrics", &shown);
    assert_eq!(status, 200, "{text}");
    let (status, text) = site.ask(CERTIFICATES, "/pods", &shown);
    assert_eq!(status, 403, "{text}");
}

fn a_deleted_account_is_refused_in_time(world: &World, site: &ReviewSetup, prom: &str) {
    assert_eq!(site.get(API, prom, "/metrics").0, 200);
    let delete = format!("delete serviceaccount prom -n {PLACE}");
    world.cluster.kubectl(&delete).run().ok();
    let refused = within(PATIENCE, || site.get(API, prom, "/metrics").0 == 401);
    assert!(
        refused,
        "a deleted account's token counts no longer than answers are kept"
    );
    let (status, text) = site.get(API, prom, "/metrics");
    let says = "token_review: the cluster does not accept the token";
    assert!(status == 401 && text.contains(says), "{status} {text}");
}
