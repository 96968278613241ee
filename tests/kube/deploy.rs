//! `deploy/`: a real API server accepts the output of kustomize and helm, and real kubelets run it.
//!
//! Its rights are those of the examples, with which all other tests run: nothing here grants more.

mod chart;
mod commands;
mod fleet;
mod pods;
mod ports;
mod replicas;
mod rollouts;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::{
    full, trial,
    world::{World, causeway::BINARY, process::Program, world},
};

pub(crate) fn trials() -> Vec<Trial> {
    let judged = [
        trial(
            "deploy::the_api_server_takes_each_way_without_a_warning",
            the_api_server_takes_each_way_without_a_warning,
        ),
        trial(
            "deploy::gateways_are_restricted_pods_where_their_namespace_says_so",
            gateways_are_restricted_pods_where_their_namespace_says_so,
        ),
        trial(
            "deploy::rights_are_those_of_the_examples",
            rights_are_those_of_the_examples,
        ),
        trial(
            "deploy::each_configuration_is_sound",
            each_configuration_is_sound,
        ),
        trial(
            "deploy::a_gateway_that_waits_at_startup_is_not_killed",
            a_gateway_that_waits_at_startup_is_not_killed,
        ),
        trial(
            "deploy::the_next_gateway_of_a_host_can_run_beside_the_previous_one",
            the_next_gateway_of_a_host_can_run_beside_the_previous_one,
        ),
        trial(
            "deploy::edges_may_join_by_tokens_all_the_same",
            edges_may_join_by_tokens_all_the_same,
        ),
        trial(
            "deploy::the_chart_is_made_of_the_overlays",
            the_chart_is_made_of_the_overlays,
        ),
        trial(
            "deploy::helm_and_kustomize_render_the_same_objects",
            helm_and_kustomize_render_the_same_objects,
        ),
        trial(
            "deploy::values_override_rendered_objects",
            values_override_rendered_objects,
        ),
        trial(
            "deploy::the_list_of_ports_is_in_the_releases_namespace",
            the_list_of_ports_is_in_the_releases_namespace,
        ),
    ];
    let run = pods::trials().into_iter().chain(replicas::trials());
    let run = run.chain(ports::trials()).chain(commands::trials());
    // Each takes minutes.
    let rollouts = full().then(rollouts::trials);
    let run = run.chain(rollouts.into_iter().flatten());
    let judged = judged.into_iter().chain(chart::trials());
    judged.chain(run).collect()
}

/// File of the rights with which edges join, in all ways.
const JOINING: &str = "certificates/rbac.yaml";
/// File of the rights with which gateways keep revocations and pinned keys, in all ways.
const STATE: &str = "state/rbac.yaml";

/// Each way, with the further files of rights with which it is tested.
const WAYS: [(&str, &[&str]); 5] = [
    (
        "clients",
        &[
            "egress/rbac.yaml",
            "egress/reviews.yaml",
            "advertise/rbac.yaml",
        ],
    ),
    (
        "dns",
        &[
            "dns/rbac.yaml",
            "advertise/rbac.yaml",
            "kubelet-client/rbac.yaml",
        ],
    ),
    (
        "addresses",
        &["addresses/rbac.yaml", "kubelet-client/rbac.yaml"],
    ),
    ("egress", &["egress/rbac.yaml"]),
    (
        "ports",
        &["egress/rbac.yaml", "advertise/rbac.yaml", "ports/rbac.yaml"],
    ),
];

/// Ways with one gateway on each host of kube-apiserver.
const ON_HOSTS: [&str; 2] = ["addresses", "egress"];

/// A file of the repository.
fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Returns the output of kustomize for an overlay.
fn kustomized(world: &World, way: &str) -> String {
    let overlay = file(&format!("deploy/overlays/{way}"));
    let made = world.cluster.kubectl("kustomize").args([overlay]);
    made.run().ok().text()
}

/// The placeholder of the manifests for the gateways' address.
const ADDRESS: &str = "address=gw.example.com:10262";

/// helm, if it is available.
fn helm(world: &World) -> Option<Program> {
    let helm = world.cluster.assets.join("helm");
    if !helm.exists() {
        crate::missing("helm (tests/kube/assets/build)");
        return None;
    }
    Some(Program::new(helm).env("HOME", &world.folder))
}

/// Renders the chart with these values, if helm is available.
fn templated(world: &World, way: &str, values: &[&str]) -> Option<String> {
    let made = helm(world)?
        // Without the flag some builds assume an old cluster.
        .words("template causeway --namespace causeway --kube-version 1.36.0 --set")
        .args([format!("way={way}"), "--set".into(), ADDRESS.into()])
        .args(values)
        .args([file("deploy/chart")]);
    Some(made.run().ok().text())
}

/// The objects of a text, with all fields.
fn objects(world: &World, text: &str) -> Vec<Value> {
    let read = "create --dry-run=client --validate=false -o json -f -";
    let read = world.cluster.kubectl(read).input(text).run().ok();
    let read = serde_json::Deserializer::from_slice(&read.stdout);
    read.into_iter().map(Result::unwrap).collect()
}

/// The only object of this kind and name.
fn named<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let mut found = objects
        .iter()
        .filter(|it| it["kind"] == kind && it["metadata"]["name"] == name);
    let one = found.next().unwrap_or_else(|| panic!("no {kind} {name}"));
    assert!(found.next().is_none(), "two of {kind} {name}");
    one
}

/// Creates objects of these kinds.
fn make(world: &World, objects: &[Value], kinds: &[&str]) {
    for object in objects {
        if kinds.iter().any(|kind| object["kind"] == *kind) {
            world.cluster.apply(object);
        }
    }
}

/// The pod that a Deployment or `DaemonSet` would make.
fn pod(of: &Value) -> Value {
    let template = &of["spec"]["template"];
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": of["metadata"]["name"], "namespace": of["metadata"]["namespace"],
            "labels": template["metadata"]["labels"],
        },
        "spec": template["spec"],
    })
}

/// Kinds that the API server needs in order to check the two workloads, created for real: their namespaces and accounts.
const SURROUNDINGS: [&str; 2] = ["Namespace", "ServiceAccount"];

fn the_api_server_takes_each_way_without_a_warning() {
    let world = world();
    for (way, _) in WAYS {
        let text = kustomized(&world, way);
        let all = objects(&world, &text);
        make(&world, &all, &SURROUNDINGS);
        let helm = templated(&world, way, &[]);
        for text in [Some(text), helm].into_iter().flatten() {
            let take = "apply --dry-run=server -f -";
            let taken = world.cluster.kubectl(take).input(text).run().ok();
            assert_eq!(taken.stderr, "", "{way}");
            let message = taken.text();
            for what in ["deployment.apps/", "daemonset.apps/", "configmap/"] {
                assert!(message.contains(what), "{way}: {message}");
            }
        }
        // A controller would make it, so that no test would otherwise see its faults.
        let edge = pod(named(&all, "DaemonSet", "causeway-edge")).to_string();
        let take = world.cluster.kubectl("create --dry-run=server -f -");
        let taken = take.input(edge).run().ok();
        assert_eq!(taken.stderr, "", "{way}");
    }
}

fn gateways_are_restricted_pods_where_their_namespace_says_so() {
    let world = world();
    let of = |way| objects(&world, &kustomized(&world, way));
    let restricted = of("clients");
    make(&world, &restricted, &SURROUNDINGS);
    let level = |objects: &[Value]| {
        let labels = &named(objects, "Namespace", "causeway")["metadata"]["labels"];
        labels["pod-security.kubernetes.io/enforce"].clone()
    };
    for (way, _) in WAYS {
        let all = of(way);
        let gateway = pod(named(&all, "Deployment", "causeway-gateway")).to_string();
        let take = world.cluster.kubectl("create --dry-run=server -f -");
        let taken = take.input(gateway).run();
        if level(&all) == "restricted" {
            assert_eq!(taken.ok().stderr, "", "{way}");
        } else {
            let message = taken.failed();
            assert!(message.contains("violates PodSecurity"), "{way}: {message}");
        }
    }
    assert_eq!(level(&restricted), "restricted");
    for way in ["dns", "ports"] {
        assert_eq!(level(&of(way)), "restricted");
    }
}

/// Rules by account, one entry for each permitted action: the names of roles and the namespace of an account are not
/// compared.
fn rights(objects: &[Value]) -> BTreeSet<String> {
    let mut rights = BTreeSet::new();
    let bindings = ["RoleBinding", "ClusterRoleBinding"];
    let bound = objects
        .iter()
        .filter(|object| bindings.contains(&object["kind"].as_str().unwrap()));
    for binding in bound {
        let role = &binding["roleRef"];
        let here = objects.iter().find(|object| {
            object["kind"] == role["kind"] && object["metadata"]["name"] == role["name"]
        });
        assert!(here.is_none_or(|role| role["aggregationRule"].is_null()));
        let rules = here.map(|role| role["rules"].as_array().unwrap().clone());
        // A role of the cluster itself is identified by its name.
        for rule in rules.unwrap_or_else(|| vec![role["name"].clone()]) {
            for subject in binding["subjects"].as_array().unwrap() {
                let (kind, name) = (&subject["kind"], &subject["name"]);
                rights.insert(format!("{} {kind} {name} {rule}", binding["kind"]));
            }
        }
    }
    rights
}

fn rights_are_those_of_the_examples() {
    let world = world();
    for (way, examples) in WAYS {
        let all = objects(&world, &kustomized(&world, way));
        let mut of_examples = Vec::new();
        for example in examples.iter().chain([&JOINING, &STATE]) {
            let text = fs::read_to_string(file("examples").join(example)).unwrap();
            of_examples.extend(objects(&world, &text));
        }
        let wanted = rights(&of_examples);
        assert!(wanted.len() >= 2, "{wanted:?}");
        assert_eq!(rights(&all), wanted, "{way}");
    }
}

/// Has the program check the files of the two configurations.
fn sound(world: &World, way: &str, objects: &[Value]) {
    let folder = world.path("deploy").join(way);
    fs::create_dir_all(&folder).unwrap();
    let place = |name: &str| folder.join(name).display().to_string();
    let pki = |name: &str| world.cluster.pki.path(name);
    let here = [
        ("/etc/causeway/", place("")),
        (
            "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt",
            pki("ca.pem"),
        ),
    ];
    for side in ["gateway", "edge"] {
        let config = named(objects, "ConfigMap", &format!("causeway-{side}"));
        for (name, text) in config["data"].as_object().unwrap() {
            let mut text = text.as_str().unwrap().to_owned();
            for (theirs, ours) in &here {
                text = text.replace(theirs, ours);
            }
            fs::write(place(name), text).unwrap();
        }
        let check = Program::new(BINARY).args([side, "--check-config", "--config"]);
        let check = check.args([place(&format!("{side}.yaml"))]);
        let check = check.env("CAUSEWAY_DATA_DIR", place(side));
        // The pod gets it from its own status.
        check.env("POD_IP", "127.0.0.1").run().ok();
    }
}

fn each_configuration_is_sound() {
    let world = world();
    for (way, _) in WAYS {
        let all = objects(&world, &kustomized(&world, way));
        sound(&world, way, &all);
    }
}

/// Until an edge has joined, or a gateway has all that it requires to start, no process answers; this may take days.
fn a_gateway_that_waits_at_startup_is_not_killed() {
    let world = world();
    for (way, _) in WAYS {
        let all = objects(&world, &kustomized(&world, way));
        for (kind, name) in [
            ("Deployment", "causeway-gateway"),
            ("DaemonSet", "causeway-edge"),
        ] {
            let pod = pod(named(&all, kind, name));
            let container = &pod["spec"]["containers"][0];
            let (start, live) = (&container["startupProbe"], &container["livenessProbe"]);
            let mut start = start.clone();
            if let Some(Value::Array(command)) = start.pointer_mut("/exec/command") {
                command.retain(|argument| argument != SAME_CONTAINER);
            }
            for asked in ["exec", "httpGet"] {
                assert_eq!(start[asked], live[asked], "{way}: {name}");
            }
            let seconds = |field: &str| start[field].as_u64().unwrap_or_default();
            let waits = seconds("periodSeconds") * seconds("failureThreshold");
            assert!(waits > 14 * 24 * 3600, "{way}: {name} has {waits} s");
        }
    }
}

/// Option of a probe that asks only the process of its own container.
const SAME_CONTAINER: &str = "--same-container";

fn the_next_gateway_of_a_host_can_run_beside_the_previous_one() {
    let world = world();
    for (way, _) in WAYS {
        let all = objects(&world, &kustomized(&world, way));
        let gateway = &named(&all, "Deployment", "causeway-gateway")["spec"];
        let update = &gateway["strategy"]["rollingUpdate"];
        assert_eq!(
            *update,
            json!({ "maxUnavailable": 0, "maxSurge": 1 }),
            "{way}"
        );
        let pod = &gateway["template"]["spec"];
        let container = &pod["containers"][0];
        let has = |field: &Value, wanted: &str| {
            let words = field.as_array().unwrap();
            words.iter().any(|word| word == wanted)
        };
        let on_host = ON_HOSTS.contains(&way);
        assert_eq!(pod["hostNetwork"] == true, on_host, "{way}");
        // A named port would be a port of the host.
        assert_eq!(container["ports"].is_null(), on_host, "{way}");
        for option in ["--take-over", "--await-stop"] {
            assert_eq!(has(&container["args"], option), on_host, "{way}: {option}");
        }
        let probe = |name: &str| has(&container[name]["exec"]["command"], SAME_CONTAINER);
        for name in ["startupProbe", "readinessProbe"] {
            assert_eq!(probe(name), on_host, "{way}: {name}");
        }
        // The previous pod lives while the next one serves.
        assert!(!probe("livenessProbe"), "{way}");
    }
}

fn edges_may_join_by_tokens_all_the_same() {
    let world = world();
    let copy = world.path("deploy-tokens");
    fs::create_dir_all(&copy).unwrap();
    let copied = Program::new("cp").args(["-r".into(), file("deploy/."), copy.clone()]);
    copied.run().ok();
    let overlay = copy.join("overlays/clients");
    let change = |name: &str, from: &str, to: &str| {
        let text = fs::read_to_string(overlay.join(name)).unwrap();
        assert!(text.contains(from), "{name}: {text}");
        fs::write(overlay.join(name), text.replace(from, to)).unwrap();
    };
    let with = "patches:\n";
    let component = format!("components: [../../components/tokens]\n{with}");
    change("kustomization.yaml", with, &component);
    change("edge.yaml", "kubernetes: {}", "# by a token");
    let made = world.cluster.kubectl("kustomize").args([overlay]);
    let all = objects(&world, &made.run().ok().text());
    make(&world, &all, &SURROUNDINGS);
    let edge = pod(named(&all, "DaemonSet", "causeway-edge"));
    let container = &edge["spec"]["containers"][0];
    let message = container["env"].to_string() + &container["volumeMounts"].to_string();
    assert!(message.contains("CAUSEWAY_JOIN_FILE"), "{message}");
    assert!(message.contains("/etc/causeway-join\""), "{message}");
    let take = world.cluster.kubectl("create --dry-run=server -f -");
    assert_eq!(take.input(edge.to_string()).run().ok().stderr, "");
    sound(&world, "tokens", &all);
}

/// Sorted, without namespaces, and without fields that only a release sets in its objects.
fn sorted(objects: Vec<Value>) -> BTreeMap<String, Value> {
    let of_release =
        ["instance", "version", "managed-by"].map(|it| format!("app.kubernetes.io/{it}"));
    let named = objects.into_iter().map(|mut object| {
        for at in ["/metadata/labels", "/spec/template/metadata/labels"] {
            if let Some(Value::Object(labels)) = object.pointer_mut(at) {
                labels.retain(|label, _| label != "helm.sh/chart" && !of_release.contains(label));
            }
        }
        if let Some(Value::Object(of)) = object.pointer_mut("/metadata/annotations") {
            of.retain(|name, _| !name.starts_with("helm.sh/"));
        }
        let at = object["metadata"].as_object_mut().unwrap();
        at.retain(|key, value| key != "annotations" || *value != json!({}));
        let at = &object["metadata"];
        let name = format!("{} {} {}", object["kind"], at["namespace"], at["name"]);
        (name, object)
    });
    named.filter(|(_, it)| it["kind"] != "Namespace").collect()
}

fn the_chart_is_made_of_the_overlays() {
    let world = world();
    for (way, _) in WAYS {
        let rendered = file(&format!("deploy/chart/manifests/{way}.yaml"));
        let rendered = fs::read_to_string(rendered).unwrap();
        let is = objects(&world, &rendered);
        let is_to_be = objects(&world, &kustomized(&world, way));
        assert_eq!(is, is_to_be, "{way}: run deploy/render");
        let gateway = named(&is, "Deployment", "causeway-gateway");
        let image = &gateway["spec"]["template"]["spec"]["containers"][0]["image"];
        assert_eq!(*image, concat!("causeway:", env!("CARGO_PKG_VERSION")));
    }
    let chart = fs::read_to_string(file("deploy/chart/Chart.yaml")).unwrap();
    let version = concat!("\nappVersion: ", env!("CARGO_PKG_VERSION"), "\n");
    assert!(chart.contains(version), "{chart}");
}

fn helm_and_kustomize_render_the_same_objects() {
    let world = world();
    for (way, _) in WAYS {
        let Some(helm) = templated(&world, way, &["--no-hooks"]) else {
            return;
        };
        let helm = sorted(objects(&world, &helm));
        let kustomize = sorted(objects(&world, &kustomized(&world, way)));
        assert_eq!(helm, kustomize, "{way}");
    }
}

fn values_override_rendered_objects() {
    let world = world();
    let patch = r#"patches=[{"kind":"Service","name":"causeway-tunnels","patch":{"spec":{"loadBalancerIP":"192.0.2.10"}}}]"#;
    let values = [
        "--set-json",
        r#"gateway.config={"tunnel":{"advertise":["gw.example.org:10262"]}}"#,
        "--set-json",
        r#"edge.config={"gateways":["gw.example.org:10262"],"ports":{"9101":{}}}"#,
        "--set-json",
        patch,
        "--set",
        "image.repository=registry.example/causeway,edge.namespace=edges,gateway.resources.limits.memory=2Gi",
        "--no-hooks",
    ];
    let Some(made) = templated(&world, "dns", &values) else {
        return;
    };
    let all = objects(&world, &made);
    sound(&world, "values", &all);
    let data = |name| named(&all, "ConfigMap", name)["data"].to_string();
    for (name, wanted) in [
        ("causeway-gateway", "gw.example.org:10262"),
        ("causeway-gateway", "nodes.example.internal"),
        ("causeway-edge", "9101"),
    ] {
        assert!(data(name).contains(wanted), "{name}: {}", data(name));
    }
    let service = &named(&all, "Service", "causeway-tunnels")["spec"];
    assert_eq!(service["loadBalancerIP"], "192.0.2.10");
    assert_eq!(service["type"], "LoadBalancer");
    let gateway = &named(&all, "Deployment", "causeway-gateway")["spec"]["template"]["spec"];
    let container = &gateway["containers"][0];
    assert_eq!(container["image"], "registry.example/causeway:0.1.0");
    assert_eq!(container["resources"]["limits"]["memory"], "2Gi");
    assert_eq!(container["resources"]["requests"]["cpu"], "100m");
    let edge = named(&all, "DaemonSet", "causeway-edge");
    assert_eq!(edge["metadata"]["namespace"], "edges");
    named(&all, "Namespace", "edges");
    assert!(data("causeway-gateway").contains("edges/causeway-edge"));
    let subjects = &named(&all, "ClusterRoleBinding", "causeway-edge")["subjects"];
    assert_eq!(subjects[0]["namespace"], "edges");
    let publishes = named(&all, "RoleBinding", "causeway-gateway-ca");
    assert_eq!(publishes["metadata"]["namespace"], "kube-system");
    let unmade = all
        .iter()
        .all(|it| it["kind"] != "Namespace" || it["metadata"]["name"] == "edges");
    assert!(unmade, "helm makes the release's namespace");
    let without = templated(&world, "egress", &["--set", "edge.enabled=false"]).unwrap();
    assert!(!without.contains("edge.yaml"), "{without}");
}

/// Gateways read the file there, and no other mount covers it.
fn the_list_of_ports_is_in_the_releases_namespace() {
    let world = world();
    let config = r#"gateway.config={"tunnel":{"advertise":["gw.example.org:10262"]}}"#;
    let values = [
        "--namespace",
        "gateways",
        "--no-hooks",
        "--set-json",
        config,
    ];
    let Some(made) = templated(&world, "ports", &values) else {
        return;
    };
    let all = objects(&world, &made);
    let list = named(&all, "ConfigMap", "causeway-ports");
    assert_eq!(list["metadata"]["namespace"], "gateways");
    assert_eq!(list["data"], json!({ "http-proxy-ports": "9100" }));
    let config = named(&all, "ConfigMap", "causeway-gateway")["data"].to_string();
    for wanted in [
        "namespace: gateways",
        "gw.example.org:10262",
        "$(POD_IP):10255",
    ] {
        assert!(config.contains(wanted), "{config}");
    }
}
