//! Edges that join by their identity in the cluster: `certificates.k8s.io`, with the rights of `examples/egress` and
//! `examples/certificates` and no others.
//!
//! A gateway of the test's own runs on this machine. The requesters are users of the cluster, with certificates of its CA.

use std::{
    fmt::Write,
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
};
use serde_json::{Value, json};

use crate::{
    full,
    nodes::{TemporaryNode, delete, node, number, started, watching},
    state::delete_secrets,
    trial,
    world::{
        World,
        causeway::BINARY,
        net::CLOUD,
        process::{Process, Program, until, within},
        world,
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "certificates::a_node_gets_only_its_own_certificate",
            a_node_gets_only_its_own_certificate,
        ),
        trial(
            "certificates::an_api_outage_is_survived_and_missing_permissions_are_named",
            an_api_outage_is_survived_and_missing_permissions_are_named,
        ),
        trial(
            "certificates::an_edge_known_to_its_cluster_joins_and_renews_without_token",
            an_edge_known_to_its_cluster_joins_and_renews_without_token,
        ),
        trial(
            "certificates::tunnels_requests_and_renewals_go_on_during_a_long_api_outage",
            tunnels_requests_and_renewals_go_on_during_a_long_api_outage,
        ),
        trial(
            "certificates::certificates_of_the_cluster_signers_let_a_node_join",
            certificates_of_the_cluster_signers_let_a_node_join,
        ),
        trial(
            "certificates::a_gateway_gets_and_renews_its_kubelet_client_certificate",
            a_gateway_gets_and_renews_its_kubelet_client_certificate,
        ),
        trial(
            "certificates::a_gateway_waits_for_its_certificate_and_requests_new_names",
            a_gateway_waits_for_its_certificate_and_requests_new_names,
        ),
    ]
}

const TUNNEL: u16 = 11_462;
const ADMIN: u16 = 11_465;
const CALLED: &str = "127.0.0.2:11464";
const DOMAIN: &str = "causeway.local";
/// Signers of the cluster itself: for approved clients, and for kubelets.
const CLIENTS: &str = "kubernetes.io/kube-apiserver-client";
const KUBELETS: &str = "kubernetes.io/kube-apiserver-client-kubelet";

/// Objects of earlier tests are removed.
pub(crate) fn clean(world: &World) {
    let deletes = [
        "csr --field-selector=spec.signerName=example.com/gateways",
        "csr --field-selector=spec.signerName=causeway.io/edge",
        "csr --field-selector=spec.signerName=kubernetes.io/kube-apiserver-client",
        "csr --field-selector=spec.signerName=kubernetes.io/kube-apiserver-client-kubelet",
        "-n kube-system configmap causeway-ca --ignore-not-found",
        "-n default events.events.k8s.io --field-selector=reason=SignError",
    ];
    for what in deletes {
        world.cluster.kubectl("delete").words(what).run().ok();
    }
    for rights in ["rbac.yaml", "own.yaml"] {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/certificates");
        let delete = world.cluster.kubectl("delete --ignore-not-found -f");
        delete.args([examples.join(rights)]).run().ok();
    }
}

/// A gateway that signs, or tries to, in this folder.
fn gateway(world: &World, folder: &Path) -> Process {
    by(world, folder, &json!({}))
}

/// The same with these rules.
fn by(world: &World, folder: &Path, certificates: &Value) -> Process {
    fs::create_dir_all(folder).unwrap();
    let kubeconfig = world.cluster.account("egress");
    let rules = json!({ "kubeconfig": kubeconfig, "certificates": certificates });
    watching(folder, (TUNNEL, ADMIN), &rules)
}

/// Submits a request as the user of this kubeconfig.
fn ask(world: &World, kubeconfig: &str, name: &str, wanted: &RequestedCertificate) {
    Program::new(world.cluster.assets.join("kubectl"))
        .args(["--kubeconfig", kubeconfig])
        .words("create -f -")
        .input(wanted.object(name).to_string())
        .run()
        .ok();
}

/// Returns the chain that a request got, if any, and whether it was approved.
fn got(world: &World, name: &str) -> (Option<String>, bool) {
    let request = world.cluster.get(&format!("csr {name}")).unwrap();
    let status = &request["status"];
    let chain = status["certificate"].as_str().map(|chain| {
        let chain = data_encoding::BASE64.decode(chain.as_bytes()).unwrap();
        String::from_utf8(chain).unwrap()
    });
    let conditions = status["conditions"].as_array();
    (chain, conditions.is_some_and(|all| !all.is_empty()))
}

fn signed(world: &World, name: &str) -> String {
    until("it is signed", || got(world, name).0.is_some());
    got(world, name).0.unwrap()
}

/// Returns the events on a request.
fn told(world: &World, name: &str) -> Vec<String> {
    let line = format!(
        "-n default events.events.k8s.io --field-selector regarding.name={name},reason=SignError"
    );
    let events = world.cluster.get(&line).unwrap();
    let note = |event: &Value| event["note"].as_str().unwrap().to_owned();
    let events = events["items"].as_array().unwrap().iter();
    events.map(note).collect()
}

/// Certificate request of a requester.
pub(crate) struct RequestedCertificate {
    signer: &'static str,
    subject: DistinguishedName,
    names: Vec<SanType>,
    life: Option<u32>,
    usages: Vec<&'static str>,
}

impl RequestedCertificate {
    /// Returns the request of an edge.
    pub(crate) fn edge(node: &str) -> Self {
        let uri = format!("spiffe://{DOMAIN}/edge/{node}");
        Self {
            signer: "causeway.io/edge",
            subject: DistinguishedName::new(),
            names: vec![SanType::URI(uri.try_into().unwrap())],
            life: None,
            usages: vec!["digital signature", "client auth"],
        }
    }

    /// Returns a request to the cluster's signer for client certificates.
    fn client(organization: &str, name: &str) -> Self {
        let mut subject = DistinguishedName::new();
        subject.push(DnType::OrganizationName, organization);
        subject.push(DnType::CommonName, name);
        Self {
            signer: CLIENTS,
            subject,
            names: Vec::new(),
            life: Some(3600),
            usages: vec!["digital signature", "client auth"],
        }
    }

    /// Returns the object for the API server, under this name.
    pub(crate) fn object(&self, name: &str) -> Value {
        let request = data_encoding::BASE64.encode(self.request().as_bytes());
        json!({
            "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
            "metadata": { "name": name },
            "spec": { "signerName": self.signer, "usages": self.usages, "request": request, "expirationSeconds": self.life },
        })
    }

    fn request(&self) -> String {
        let mut params = CertificateParams::default();
        params.distinguished_name = self.subject.clone();
        params.subject_alt_names.clone_from(&self.names);
        let key = KeyPair::generate().unwrap();
        params.serialize_request(&key).unwrap().pem().unwrap()
    }
}

/// The kubeconfig of a node, as its kubelet has one.
pub(crate) fn kubelet(world: &World, name: &str) -> String {
    let user = format!("system:node:{name}");
    world.cluster.pki.client(name, &user, Some("system:nodes"));
    world.cluster.kubeconfig(name)
}

fn metric(outcome: &str) -> u64 {
    let url = format!("http://127.0.0.1:{ADMIN}/metrics");
    let all = Program::new("curl").words("-sS").args([url]).run().text();
    let name = format!("causeway_gateway_cluster_certificates_total{{outcome=\"{outcome}\"}} ");
    number(&all, &name)
}

fn a_node_gets_only_its_own_certificate() {
    let world = world();
    clean(&world);
    world.cluster.apply_example("certificates/rbac.yaml");
    let folder = world.path("certificates");
    let running = gateway(&world, &folder);
    let _nodes = ["csr-1", "csr-2"].map(|name| TemporaryNode(&world, name));
    node(&world, "csr-1", true, &[]);
    node(&world, "csr-2", false, &[]);
    let own = kubelet(&world, "csr-1");
    ask(&world, &own, "right", &RequestedCertificate::edge("csr-1"));
    is_of_the_node(&folder, &signed(&world, "right"));
    let map = world.cluster.get("-n kube-system configmap causeway-ca");
    let root = fs::read_to_string(folder.join("data/ca.pem")).unwrap();
    assert_eq!(map.unwrap()["data"]["ca.crt"], json!(root));

    let wrong = ask_wrongly(&world, &own);
    for (name, why) in wrong {
        until("the reason is reported", || !told(&world, name).is_empty());
        let told = told(&world, name);
        assert!(told[0].contains(why), "{name}: {told:?}");
    }
    // An approval by another user does not make a request valid.
    let approve = "certificate approve by-a-user for-another";
    world.cluster.kubectl(approve).run().ok();
    for name in ["by-a-user", "for-another"] {
        until("this is reported, too", || {
            let mut all = told(&world, name).into_iter();
            all.any(|told| told.contains("approved, but was not signed"))
        });
    }

    // Another gateway, or this one after a restart, writes no new events.
    running.stop(Duration::from_secs(1));
    let _running = gateway(&world, &folder);
    until("all requests are checked again", || metric("left") == 6);
    let label = "label node csr-2 causeway.io/edge=true";
    world.cluster.kubectl(label).run().ok();
    signed(&world, "at-no-edge");
    for (name, _) in wrong.iter().filter(|(name, _)| *name != "at-no-edge") {
        let (chain, approved) = got(&world, name);
        let by_hand = ["by-a-user", "for-another"].contains(name);
        assert_eq!((chain, approved), (None, by_hand), "{name}");
        let told = told(&world, name);
        assert_eq!(told.len(), 1 + usize::from(by_hand), "{name}: {told:?}");
    }
    assert_eq!((metric("approved"), metric("signed")), (1, 1));
    clean(&world);
}

/// Whether it is a client's certificate of `csr-1`, and nothing else.
fn is_of_the_node(folder: &Path, chain: &str) {
    let file = folder.join("right.pem");
    fs::write(&file, chain).unwrap();
    let shown = Program::new("openssl")
        .words("x509 -noout -subject -ext subjectAltName,basicConstraints,extendedKeyUsage -in")
        .args([&file])
        .run()
        .ok()
        .text();
    for part in [
        "CN = csr-1",
        "URI:spiffe://causeway.local/edge/csr-1",
        "TLS Web Client Authentication",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    for part in ["CA:TRUE", "Server"] {
        assert!(!shown.contains(part), "{part}: {shown}");
    }
}

/// Submits all kinds of invalid requests; returns their names, and the reasons.
fn ask_wrongly(world: &World, own: &str) -> [(&'static str, &'static str); 6] {
    let mut name = RequestedCertificate::edge("csr-1");
    let more = SanType::DnsName("gateway".try_into().unwrap());
    name.names.push(more);
    let mut usage = RequestedCertificate::edge("csr-1");
    usage.usages.push("server auth");
    let admin = world.cluster.pki.path("admin.kubeconfig");
    let (elsewhere, nowhere) = (kubelet(world, "csr-2"), kubelet(world, "csr-3"));
    ask(
        world,
        own,
        "for-another",
        &RequestedCertificate::edge("csr-2"),
    );
    ask(world, own, "a-name-more", &name);
    ask(world, own, "a-usage-more", &usage);
    ask(
        world,
        &admin,
        "by-a-user",
        &RequestedCertificate::edge("csr-1"),
    );
    ask(
        world,
        &elsewhere,
        "at-no-edge",
        &RequestedCertificate::edge("csr-2"),
    );
    ask(
        world,
        &nowhere,
        "of-no-node",
        &RequestedCertificate::edge("csr-3"),
    );
    [
        ("for-another", "spiffe://causeway.local/edge/csr-2"),
        ("a-name-more", "gateway"),
        ("a-usage-more", "server auth"),
        ("by-a-user", "\"admin\": neither a node"),
        ("at-no-edge", "Node csr-2 is not an edge node"),
        ("of-no-node", "the cluster has no Node csr-3"),
    ]
}

fn an_api_outage_is_survived_and_missing_permissions_are_named() {
    let mut world = world();
    clean(&world);
    let running = gateway(&world, &world.path("certificates-rights"));
    let says = |part: &str| until(part, || running.output().contains(part));
    says("cannot list resource \\\"certificatesigningrequests\\\"");
    says("cannot list resource \\\"configmaps\\\"");
    world.cluster.apply_example("certificates/rbac.yaml");
    let patch = r#"[{"op": "remove", "path": "/rules/2"}]"#;
    let line = "patch clusterrole causeway-gateway-certificates --type json -p";
    world.cluster.kubectl(line).args([patch]).run().ok();
    node(&world, "csr-4", true, &[]);
    let own = kubelet(&world, "csr-4");
    ask(&world, &own, "first", &RequestedCertificate::edge("csr-4"));
    says("named causeway.io/edge in API group");
    world.cluster.apply_example("certificates/rbac.yaml");
    signed(&world, "first");

    world.cluster.stop();
    until("the loss of the API is logged", || {
        running
            .output()
            .contains("continues with the last known nodes")
    });
    world.cluster.restart();
    ask(&world, &own, "second", &RequestedCertificate::edge("csr-4"));
    signed(&world, "second");
    delete(&world, "csr-4");
    clean(&world);
}

/// Returns one of the example's files with these replacements.
fn text(name: &str, places: &[(&str, &str)]) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/certificates")
        .join(name);
    let text = fs::read_to_string(file).unwrap();
    places.iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "{name} has {from}");
        text.replace(from, to)
    })
}

/// The example's gateway, whose edges' certificates are valid for 20 s, with further keys of its `kubernetes`.
fn example(world: &World, folder: &Path, further_keys: &str) -> Process {
    let kubeconfig = world.cluster.account("egress") + further_keys;
    let places = [("/etc/causeway/gateway.kubeconfig", kubeconfig.as_str())];
    let rest = json!({
        "data_dir": folder.join("data"),
        "tunnel": {
            "listen": format!("127.0.0.1:{TUNNEL}"), "advertise": [format!("127.0.0.1:{TUNNEL}")],
            "edge_certificate_lifetime": "20s",
        },
        "admin": { "listen": format!("127.0.0.1:{ADMIN}") },
        // Other nodes of the cluster have no edge.
        "timeouts": { "edges": "0s" },
        "listeners": [{
            "name": "plain", "protocol": "http", "listen": CALLED, "port": 9052, "anonymous": true,
        }],
    });
    let mut config = text("gateway.yaml", &places);
    for (key, value) in rest.as_object().unwrap() {
        writeln!(config, "{key}: {value}").unwrap();
    }
    started(folder, &config)
}

/// The example's edge, with only these credentials.
fn edge(folder: &Path, name: &str, kubeconfig: &str) -> Process {
    let places = [
        ("/etc/kubernetes/kubelet.conf", kubeconfig),
        ("gw.example.com:10262", &format!("127.0.0.1:{TUNNEL}")),
        ("10250: { scheme: tcp }", "9052: {}"),
    ];
    let data = folder.join(name);
    let config = text("edge.yaml", &places)
        + &format!(
            "data_dir: {}\nadmin: {{ listen: 127.0.0.1:0 }}\n",
            data.display()
        );
    let file = folder.join(format!("{name}.yaml"));
    fs::write(&file, config).unwrap();
    let edge = Program::new(BINARY).words("edge --config").args([&file]);
    edge.start(&folder.join(format!("{name}.log")))
}

/// An edge that joins with a token.
fn edge_with_token(folder: &Path, name: &str, token: &str) -> Process {
    let config = json!({
        "gateways": [format!("127.0.0.1:{TUNNEL}")],
        "join": token,
        "data_dir": folder.join(name),
        "admin": { "listen": "127.0.0.1:0" },
        "ports": { "9052": {} },
    });
    let file = folder.join(format!("{name}.yaml"));
    fs::write(&file, config.to_string()).unwrap();
    let edge = Program::new(BINARY).words("edge --config").args([&file]);
    edge.start(&folder.join(format!("{name}.log")))
}

/// As kubelet stores it: key and certificate in one file, which has both roles.
fn in_one_file(world: &World, name: &str) -> String {
    let kubeconfig = kubelet(world, name);
    let path = |end: &str| world.cluster.pki.path(&format!("{name}{end}"));
    let (certificate, key) = (path(".pem"), path(".key"));
    let both = fs::read_to_string(&certificate).unwrap() + &fs::read_to_string(&key).unwrap();
    let file = path("-current.pem");
    fs::write(&file, both).unwrap();
    let text = fs::read_to_string(&kubeconfig).unwrap();
    fs::write(
        &kubeconfig,
        text.replace(&certificate, &file).replace(&key, &file),
    )
    .unwrap();
    kubeconfig
}

fn status(node: &str) -> String {
    Program::new("curl")
        .words("-s -o /dev/null -w %{http_code} -H")
        .args([format!("Host: {node}:9052"), format!("http://{CALLED}/")])
        .run()
        .text()
}

/// The nodes' app, which serves the folder.
fn app(folder: &Path) -> Process {
    let app = Program::new("python3")
        .words("-u -m http.server --bind 127.0.0.1 9052 --directory")
        .args([folder]);
    let mut app = app.start(&folder.join("app.log"));
    app.says("Serving HTTP");
    app
}

fn an_edge_known_to_its_cluster_joins_and_renews_without_token() {
    let world = world();
    clean(&world);
    world.cluster.apply_example("certificates/rbac.yaml");
    let folder = world.path("certificates-edge");
    fs::create_dir_all(&folder).unwrap();
    let _node = TemporaryNode(&world, "csr-5");
    node(&world, "csr-5", true, &[]);
    let _app = app(&folder);

    let mut own = edge(&folder, "edge", &in_one_file(&world, "csr-5"));
    own.says("there is no ConfigMap kube-system/causeway-ca");
    let _gateway = example(&world, &folder, "");
    own.says("tunnel registered");
    assert_eq!(status("csr-5"), "200");

    // A pod's token contains its node.
    let apply = |object: Value| world.cluster.apply(&object);
    let named = json!({ "name": "causeway-edge", "namespace": "causeway-edge" });
    apply(
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "causeway-edge" } }),
    );
    apply(json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": named }));
    let token = |more: &str| {
        let line = format!("create token -n causeway-edge causeway-edge {more}");
        world
            .cluster
            .kubectl(&line)
            .run()
            .ok()
            .text()
            .trim()
            .to_owned()
    };
    let bound = token("--bound-object-kind Node --bound-object-name edge-1");
    let bound = world.cluster.with_token("bound", &bound);
    let mut pod = edge(&folder, "pod", &bound);
    pod.says("tunnel registered");
    assert_eq!(status("edge-1"), "200");
    let free = world.cluster.with_token("free", &token(""));
    ask(
        &world,
        &free,
        "unbound",
        &RequestedCertificate::edge("edge-1"),
    );
    until("it is reported", || !told(&world, "unbound").is_empty());
    assert!(told(&world, "unbound")[0].contains("does not name its node"));

    // From here on the gateway renews, and the edge makes no further request.
    own.says("this node's certificate is renewed");
    assert_eq!(status("csr-5"), "200");
    assert_eq!(metric("signed"), 2);
    drop((own, pod));
    let delete = "delete namespace causeway-edge --wait=false";
    world.cluster.kubectl(delete).run().ok();
    clean(&world);
}

/// The state of the gateway is in Secrets, so nodes cannot join either, and say why.
fn tunnels_requests_and_renewals_go_on_during_a_long_api_outage() {
    let mut world = world();
    clean(&world);
    delete_secrets(&world);
    for rights in ["certificates/rbac.yaml", "state/rbac.yaml"] {
        world.cluster.apply_example(rights);
    }
    let folder = world.path("certificates-outage");
    fs::create_dir_all(&folder).unwrap();
    let names = ["csr-8", "csr-9"];
    for name in names {
        node(&world, name, true, &[]);
    }
    let _app = app(&folder);
    let gateway = example(&world, &folder, "\n  state: kube-system/causeway-state");
    let mut own = edge(&folder, "own", &in_one_file(&world, "csr-8"));
    own.says("tunnel registered");
    assert_eq!(status("csr-8"), "200");

    world.cluster.stop();
    let mut late = edge(&folder, "late", &in_one_file(&world, "csr-9"));
    serves_during_outage("csr-8");
    let renewals = own.output().matches("certificate is renewed").count();
    assert!(renewals >= 2, "{renewals} renewals: {}", own.output());
    // The edge comes back without the API too.
    drop(own);
    let mut own = edge(&folder, "own", &in_one_file(&world, "csr-8"));
    own.says("tunnel registered");
    assert_eq!(status("csr-8"), "200");
    let token = Program::new(BINARY).words("token create --node token-1 --data-dir");
    let token = token.args([folder.join("data")]).run().ok().text();
    let mut by_token = edge_with_token(&folder, "token-1", token.trim());
    by_token.says("the shared state of the gateways cannot be reached");
    late.says("the cluster's API does not answer");
    for waiting in [&late, &by_token] {
        assert!(!waiting.output().contains("tunnel registered"));
    }

    world.cluster.restart();
    for waiting in [&late, &by_token] {
        // Its pauses between attempts have grown to a minute and more.
        let joined = || waiting.output().contains("tunnel registered");
        assert!(
            within(Duration::from_mins(4), joined),
            "{}",
            waiting.output()
        );
    }
    until("the new node serves", || status("csr-9") == "200");
    let revoke = Program::new(BINARY).words("node revoke csr-8 --reason outage --data-dir");
    revoke.args([folder.join("data")]).run().ok();
    until("the revoked node is shut out", || status("csr-8") != "200");
    drop((own, late, by_token, gateway));
    for name in names {
        delete(&world, name);
    }
    delete_secrets(&world);
    clean(&world);
}

/// Sends requests to a node as long as the outage lasts. The gateway stays ready, and says what it cannot do.
fn serves_during_outage(node: &str) {
    let length = Duration::from_secs(if full() { 600 } else { 45 });
    let (begun, mut requests) = (Instant::now(), 0);
    while begun.elapsed() < length {
        assert_eq!(status(node), "200", "after {:?}", begun.elapsed());
        let probed = ready();
        assert!(probed.starts_with("ready\n"), "{probed}");
        requests += 1;
        thread::sleep(Duration::from_millis(200));
    }
    let probed = ready();
    assert!(
        probed.contains("the shared state cannot be synchronized: Secret"),
        "{probed}"
    );
    println!("{requests} requests succeeded during {length:?} without the API");
}

/// The answer to the gateway's readiness probe.
fn ready() -> String {
    let url = format!("http://127.0.0.1:{ADMIN}/readyz");
    Program::new("curl").words("-sS").args([url]).run().text()
}

fn certificates_of_the_cluster_signers_let_a_node_join() {
    let world = world();
    clean(&world);
    world.cluster.apply_example("certificates/rbac.yaml");
    let folder = world.path("certificates-signers");
    let rules =
        |signer| json!({ "signer": signer, "client_ca": [world.cluster.pki.path("ca.pem")] });
    let _node = TemporaryNode(&world, "csr-6");
    node(&world, "csr-6", true, &[]);
    let own = kubelet(&world, "csr-6");
    let by_signer = |name: &str, signer: &str| {
        let lines = format!("{own}\n  signer: {signer}");
        edge(&folder, name, &lines)
    };

    // The gateway approves valid requests, and the cluster signs them.
    let running = by(&world, &folder, &rules(CLIENTS));
    let mut asking = by_signer("client", CLIENTS);
    let says = |part: &str| until(part, || running.output().contains(part));
    says("named kubernetes.io/kube-apiserver-client in API group");
    let names = json!([{ "op": "replace", "path": "/rules/2/resourceNames/0", "value": CLIENTS }]);
    let line = "patch clusterrole causeway-gateway-certificates --type json -p";
    let patched = world.cluster.kubectl(line).args([names.to_string()]);
    patched.run().ok();
    asking.says("joined with a certificate of the cluster");
    asking.says("tunnel registered");
    ask(
        &world,
        &own,
        "another",
        &RequestedCertificate::client("causeway:edges", "causeway:edge:csr-7"),
    );
    ask(
        &world,
        &own,
        "no-edge",
        &RequestedCertificate::client("others", "somebody"),
    );
    until("it is reported", || !told(&world, "another").is_empty());
    assert!(told(&world, "another")[0].contains("for node csr-7, and not for csr-6"));
    assert_eq!(got(&world, "another"), (None, false));
    // The gateway does not touch other requesters' requests to that signer.
    assert_eq!(
        (told(&world, "no-edge"), got(&world, "no-edge")),
        (vec![], (None, false))
    );
    assert_eq!(metric("approved"), 1);
    drop(asking);
    running.stop(Duration::from_secs(1));

    // The cluster itself approves requests of kubelets.
    let binding = "create clusterrolebinding nodes-ask-for-themselves --group=system:nodes --clusterrole=system:certificates.k8s.io:certificatesigningrequests:selfnodeclient";
    world.cluster.kubectl(binding).run().ok();
    let folder = world.path("certificates-kubelets");
    let _running = by(&world, &folder, &rules(KUBELETS));
    let lines = format!("{own}\n  signer: {KUBELETS}");
    let mut asking = edge(&folder, "kubelet", &lines);
    asking.says("joined with a certificate of the cluster");
    asking.says("tunnel registered");
    let delete = "delete clusterrolebinding nodes-ask-for-themselves";
    world.cluster.kubectl(delete).run().ok();
    drop(asking);
    clean(&world);
}

/// External signer, which issues each requested certificate.
struct ExternalSigner(Issuer<'static, KeyPair>);

impl ExternalSigner {
    /// With its CA in that file.
    fn new(root: &Path) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        fs::write(root, params.self_signed(&key).unwrap().pem()).unwrap();
        Self(Issuer::new(params, key))
    }

    /// Approves and signs the pending request. Returns its content.
    fn signs(&self, world: &World) -> Vec<String> {
        let waiting = || {
            let line = "csr --field-selector=spec.signerName=example.com/gateways";
            let all = world.cluster.get(line).unwrap();
            let all = all["items"].as_array().unwrap().clone();
            all.into_iter()
                .find(|request| request["status"]["certificate"].is_null())
        };
        until("it sends a request", || waiting().is_some());
        let request = waiting().unwrap();
        let name = request["metadata"]["name"].as_str().unwrap();
        assert!(name.starts_with("causeway-gateway-"), "{name}");
        let usages = json!(["server auth", "digital signature"]);
        assert_eq!(request["spec"]["usages"], usages);
        let approve = format!("certificate approve {name}");
        world.cluster.kubectl(&approve).run().ok();
        let pem = request["spec"]["request"].as_str().unwrap();
        let pem = data_encoding::BASE64.decode(pem.as_bytes()).unwrap();
        let pem = String::from_utf8(pem).unwrap();
        let mut asked = CertificateSigningRequestParams::from_pem(&pem).unwrap();
        let names = asked.params.subject_alt_names.iter();
        let names = names.map(|name| format!("{name:?}")).collect();
        asked.params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let made = asked.signed_by(&self.0).unwrap().pem();
        let made = data_encoding::BASE64.encode(made.as_bytes());
        let patch = json!({ "status": { "certificate": made } }).to_string();
        let line = format!("patch csr {name} --subresource=status --type=merge -p");
        world.cluster.kubectl(&line).args([patch]).run().ok();
        names
    }
}

/// Returns the names in the certificate of the tunnel port.
fn shown() -> String {
    let line = format!("s_client -connect 127.0.0.1:{TUNNEL} -alpn h2 -showcerts");
    let shown = Program::new("openssl")
        .words(&line)
        .input(String::new())
        .run()
        .text();
    let names = "x509 -noout -ext subjectAltName";
    let names = Program::new("openssl").words(names).input(shown).run();
    names.text()
}

/// The configuration of a gateway that requests its certificate, and can be reached there.
fn asking(world: &World, folder: &Path, address: &str) -> String {
    json!({
        "data_dir": folder.join("data"),
        "kubernetes": { "kubeconfig": world.cluster.account("egress") },
        "tunnel": {
            "listen": format!("127.0.0.1:{TUNNEL}"), "advertise": [address],
            "identity": {
                "signer": "example.com/gateways", "trust_domain": "example.com",
                "client_ca": [folder.join("root.pem")],
            },
        },
        "admin": { "listen": format!("127.0.0.1:{ADMIN}") },
        // Other nodes of the cluster have no edge.
        "timeouts": { "edges": "0s" },
        "listeners": [{
            "name": "plain", "protocol": "http", "listen": CALLED, "port": 9052, "anonymous": true,
        }],
    })
    .to_string()
}

fn a_gateway_waits_for_its_certificate_and_requests_new_names() {
    let world = world();
    clean(&world);
    let folder = world.path("certificates-own");
    fs::create_dir_all(&folder).unwrap();
    let root = folder.join("root.pem");
    let signer = ExternalSigner::new(&root);
    let config = |address| asking(&world, &folder, address);
    let file = folder.join("gateway.yaml");
    fs::write(&file, config("gw-1.example.com:10262")).unwrap();
    let gateway = Program::new(BINARY).words("gateway --config").args([&file]);
    let mut gateway = gateway.start(&folder.join("gateway.log"));
    gateway.says("cannot create resource \\\"certificatesigningrequests\\\"");
    world.cluster.apply_example("certificates/own.yaml");
    gateway.says("not approved and signed yet");
    let asked = signer.signs(&world).join(" ");
    assert!(
        asked.contains("spiffe://example.com/gateway") && asked.contains("gw-1.example.com"),
        "{asked}"
    );
    gateway.says("gateway ready");
    until("it is shown", || shown().contains("gw-1.example.com"));

    // Other names: another certificate replaces the one that serves meanwhile.
    fs::write(&file, config("gw-2.example.com:10262")).unwrap();
    let asked = signer.signs(&world).join(" ");
    assert!(asked.contains("gw-2.example.com"), "{asked}");
    until("it is shown", || shown().contains("gw-2.example.com"));
    assert!(shown().contains("URI:spiffe://example.com/gateway"));

    // The stored certificate is enough to start, while the signer does nothing.
    gateway.stop(Duration::from_secs(5));
    let again = Program::new(BINARY).words("gateway --config").args([&file]);
    let mut again = again.start(&folder.join("again.log"));
    again.says("gateway ready");
    assert!(shown().contains("gw-2.example.com"));
    drop(again);
    clean(&world);
}

/// A certificate of the user with its key, of which more than two thirds of its lifetime are over.
fn outlived(user: &str) -> String {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let issuer = Issuer::new(params, &key);
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, user);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let now = std::time::SystemTime::now();
    params.not_before = (now - Duration::from_hours(3)).into();
    params.not_after = (now + Duration::from_hours(1)).into();
    let own = KeyPair::generate().unwrap();
    let made = params.signed_by(&own, &issuer).unwrap();
    format!("names: \nmade: 0\n{}\n{}", made.pem(), own.serialize_pem())
}

fn a_gateway_gets_and_renews_its_kubelet_client_certificate() {
    let world = world();
    clean(&world);
    let rights = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/kubelet-client/rbac.yaml");
    let delete = world.cluster.kubectl("delete --ignore-not-found -f");
    delete.args([&rights]).run().ok();
    let folder = world.path("certificates-app");
    fs::create_dir_all(&folder).unwrap();
    let config = json!({
        "data_dir": folder.join("data"),
        "kubernetes": { "kubeconfig": world.cluster.account("egress") },
        "tunnel": { "listen": format!("127.0.0.1:{TUNNEL}") },
        "admin": { "listen": format!("127.0.0.1:{ADMIN}") },
        "upstream_tls": { "10250": { "verify": false, "signer": CLIENTS, "approve": true } },
        "listeners": [{
            "name": "plain", "protocol": "http", "listen": CALLED, "port": 9052, "anonymous": true,
        }],
    })
    .to_string();
    let ask = |path: &str| {
        let url = format!("http://127.0.0.1:{ADMIN}{path}");
        Program::new("curl").words("-sS").args([url]).run().text()
    };
    let ends = || {
        let metric =
            "causeway_gateway_certificate_expiry_timestamp_seconds{certificate=\"app:10250\"} ";
        number(&ask("/metrics"), metric)
    };
    let gateway = started(&folder, &config);
    until("it reports the missing right", || {
        ask("/readyz").contains("certificatesigningrequests")
    });
    world.cluster.apply_example("kubelet-client/rbac.yaml");
    until("clients can connect", || ask("/readyz") == "ready\n");
    until("the certificate is in use", || ends() > 0);
    let file = folder.join("data/app-10250.pem");
    let server = format!("--server https://{CLOUD}:6443 --certificate-authority");
    let who = Program::new(world.cluster.assets.join("kubectl"))
        .words("--kubeconfig /dev/null auth whoami -o json")
        .words(&server)
        .args([&world.cluster.pki.path("ca.pem")])
        .args(["--client-certificate", &file.display().to_string()])
        .args(["--client-key", &file.display().to_string()])
        .run();
    let who = who.ok().text();
    assert!(who.contains("\"username\": \"causeway-gateway\""), "{who}");
    gateway.stop(Duration::from_secs(5));

    // A certificate that is due for renewal serves until the next one exists.
    fs::write(&file, outlived("causeway-gateway")).unwrap();
    let gateway = started(&folder, &config);
    let first = ends();
    until("another one is in use", || ends() > first + 24 * 3600);
    let message = gateway.output();
    assert!(
        message.contains("a new certificate from its cluster"),
        "{message}"
    );
    drop(gateway);
    let delete = world.cluster.kubectl("delete --ignore-not-found -f");
    delete.args([&rights]).run().ok();
    clean(&world);
}
