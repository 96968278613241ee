//! The chart: the objects that it makes from its values, and the values that it refuses.

use std::fs;

use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::{ADDRESS, ON_HOSTS, WAYS, file, helm, kustomized, named, objects, templated};
use crate::{
    state, trial,
    world::{process::Program, world},
};

pub(super) fn trials() -> [Trial; 7] {
    [
        trial(
            "deploy::rendered_manifests_are_current",
            rendered_manifests_are_current,
        ),
        trial(
            "deploy::a_drained_node_keeps_no_gateway_from_the_other",
            a_drained_node_keeps_no_gateway_from_the_other,
        ),
        trial(
            "deploy::helm_refuses_ineffective_values",
            helm_refuses_ineffective_values,
        ),
        trial(
            "deploy::release_objects_have_their_labels_and_include_no_namespace",
            release_objects_have_their_labels_and_include_no_namespace,
        ),
        trial(
            "deploy::each_value_changes_its_named_setting",
            each_value_changes_its_named_setting,
        ),
        trial(
            "deploy::metrics_are_served_apart_from_the_admin_listener",
            metrics_are_served_apart_from_the_admin_listener,
        ),
        trial(
            "deploy::pods_are_read_only_if_the_gateway_follows_them",
            pods_are_read_only_if_the_gateway_follows_them,
        ),
    ]
}

/// The manifests and the table of values.
fn rendered_manifests_are_current() {
    let world = world();
    let copy = world.path("deploy-render");
    fs::create_dir_all(&copy).unwrap();
    let copied = Program::new("cp").args(["-r".into(), file("deploy/."), copy.clone()]);
    copied.run().ok();
    let render = Program::new("sh").args([copy.join("render")]);
    let kubectl = world.cluster.assets.join("kubectl");
    render.env("KUBECTL", kubectl).run().ok();
    let diff = Program::new("diff").args(["-r".into(), file("deploy"), copy.clone()]);
    let diff = diff.run();
    assert_eq!(diff.text(), "", "run deploy/render");
    let readme = fs::read_to_string(copy.join("chart/README.md")).unwrap();
    for row in [
        "| `gateway.service.type` | `\"\"` | Type of the Service",
        "| `gateway.metrics.podMonitor.interval` | `30s` | Interval",
        "| `patches` | `[]` | For everything else",
    ] {
        assert!(readme.contains(row), "{readme}");
    }
}

/// The scheduler spreads pods only over nodes on which they may run.
fn a_drained_node_keeps_no_gateway_from_the_other() {
    let world = world();
    for (way, _) in WAYS {
        let helm = templated(&world, way, &["--no-hooks"]);
        for text in [Some(kustomized(&world, way)), helm].into_iter().flatten() {
            let all = objects(&world, &text);
            let gateway = &named(&all, "Deployment", "causeway-gateway")["spec"]["template"];
            let spread = &gateway["spec"]["topologySpreadConstraints"];
            assert_eq!(spread.as_array().unwrap().len(), 1, "{way}");
            // On hosts the gateway of a drained host waits, because another host needs only one.
            let policy = if ON_HOSTS.contains(&way) {
                "Ignore"
            } else {
                "Honor"
            };
            assert_eq!(spread[0]["nodeTaintsPolicy"], policy, "{way}");
            assert_eq!(spread[0]["whenUnsatisfiable"], "DoNotSchedule", "{way}");
            assert_eq!(
                spread[0]["matchLabelKeys"],
                json!(["pod-template-hash"]),
                "{way}"
            );
            assert_eq!(spread[0]["topologyKey"], "kubernetes.io/hostname");
            let apart = &gateway["spec"]["affinity"]["podAntiAffinity"];
            assert!(apart.is_null(), "{way}: {apart}");
        }
    }
}

fn helm_refuses_ineffective_values() {
    let world = world();
    let chart = file("deploy/chart");
    for (values, says) in [
        ("way=clients", "address is required: HOST:PORT"),
        ("address=gw.example.org", "/address"),
        ("way=calls", "/way"),
        ("gateway.replica=2", "'replica' not allowed"),
        (
            "gateway.config.tunnels.advertise=x",
            "'tunnels' not allowed",
        ),
        ("gateway.config.limits.streams=many", "/limits/streams"),
        ("edge.config.gateway=x", "'gateway' not allowed"),
        ("image.digest=abc", "/image/digest"),
        (
            "patches[0].kind=Service,patches[0].name=tunnels,patches[0].patch.x=y",
            "way clients has no Service of the name tunnels",
        ),
        (
            "way=egress,gateway.service.type=NodePort",
            "way egress has no Service",
        ),
        (
            "gateway.config.kubernetes.ca_secret=our-ca",
            "use gateway.caSecret",
        ),
        (
            "gateway.config.kubernetes.state=causeway/our-state",
            "rights only to the Secrets default/causeway-state",
        ),
        (
            "gateway.config.kubernetes.state=null",
            "each gateway makes a CA of its own",
        ),
        (
            "gateway.metrics.podMonitor.enabled=true",
            "nothing to read without gateway.metrics.enabled",
        ),
    ] {
        let Some(helm) = helm(&world) else {
            return;
        };
        let mut made = helm.words("template causeway --kube-version 1.36.0");
        if !says.contains("address is required") {
            made = made.args(["--set", ADDRESS]);
        }
        let message = made.args(["--set", values]).args([&chart]).run().failed();
        assert!(message.contains(says), "{values}: {message}");
    }
}

fn release_objects_have_their_labels_and_include_no_namespace() {
    let world = world();
    for (way, _) in WAYS {
        let Some(made) = templated(&world, way, &[]) else {
            return;
        };
        let all = objects(&world, &made);
        for object in &all {
            let labels = &object["metadata"]["labels"];
            for (label, is) in [
                ("app.kubernetes.io/name", "causeway"),
                ("app.kubernetes.io/instance", "causeway"),
                ("app.kubernetes.io/version", env!("CARGO_PKG_VERSION")),
                ("app.kubernetes.io/part-of", "causeway"),
                ("app.kubernetes.io/managed-by", "Helm"),
                (
                    "helm.sh/chart",
                    concat!("causeway-", env!("CARGO_PKG_VERSION")),
                ),
            ] {
                assert_eq!(labels[label], is, "{way}: {}", object["metadata"]);
            }
        }
        // The namespace of edges is made if it does not exist, and stays.
        let spaces: Vec<_> = all.iter().filter(|it| it["kind"] == "Namespace").collect();
        assert_eq!(spaces.len(), 1, "{way}");
        let state: Vec<_> = state::secret_names().collect();
        let state = state.iter().map(|name| named(&all, "Secret", name));
        for kept in state.chain([spaces[0]]) {
            let policy = &kept["metadata"]["annotations"]["helm.sh/resource-policy"];
            assert_eq!(policy, "keep", "{way}");
        }
        let own = ["--set", "edge.createNamespace=false"];
        let made = templated(&world, way, &own).unwrap();
        assert!(!made.contains("kind: Namespace"), "{way}");
        for (kind, name) in [
            ("Deployment", "causeway-gateway"),
            ("DaemonSet", "causeway-edge"),
        ] {
            // Neither is part of the selector of pods, which cannot be changed.
            let spec = &named(&all, kind, name)["spec"];
            assert_eq!(
                spec["selector"]["matchLabels"].as_object().unwrap().len(),
                2
            );
            let labels = &spec["template"]["metadata"]["labels"];
            assert_eq!(labels["app.kubernetes.io/instance"], "causeway");
        }
    }
}

const VALUES: &str = r#"
image: { repository: r.example/causeway, pullSecrets: [registry], digest: "sha256:1111111111111111111111111111111111111111111111111111111111111111" }
gateway:
  replicas: 3
  caSecret: our-ca
  secrets: [own-tls]
  extraArgs: [--log-format, json]
  nodeSelector: { disk: ssd }
  tolerations: [{ key: cloud, operator: Exists }]
  affinity: { podAntiAffinity: {} }
  service: { type: NodePort, nodePort: 30262, annotations: { a: b } }
edge:
  secrets: [app-ca]
  extraArgs: [--log-format=json]
  nodeSelector: { site: north }
"#;

fn each_value_changes_its_named_setting() {
    let world = world();
    let values = world.path("values.yaml");
    fs::write(&values, VALUES).unwrap();
    let values = values.display().to_string();
    let values = ["--values", &values, "--namespace", "gateways", "--no-hooks"];
    let Some(made) = templated(&world, "clients", &values) else {
        return;
    };
    let all = objects(&world, &made);
    let gateway = &named(&all, "Deployment", "causeway-gateway")["spec"];
    let edge = &named(&all, "DaemonSet", "causeway-edge")["spec"];
    let image = format!("r.example/causeway@sha256:{}", "1".repeat(64));
    for workload in [gateway, edge] {
        let pod = &workload["template"]["spec"];
        assert_eq!(pod["containers"][0]["image"], image);
        assert_eq!(pod["imagePullSecrets"], json!([{ "name": "registry" }]));
    }
    assert_eq!(gateway["replicas"], 3);
    let (cloud, node) = (&gateway["template"]["spec"], &edge["template"]["spec"]);
    assert_eq!(cloud["nodeSelector"], json!({ "disk": "ssd" }));
    assert_eq!(cloud["tolerations"][0]["key"], "cloud");
    assert_eq!(cloud["affinity"], json!({ "podAntiAffinity": {} }));
    assert_eq!(node["nodeSelector"], json!({ "site": "north" }));
    let text = cloud.to_string();
    for part in [
        r#""mountPath":"/etc/causeway-secrets/own-tls""#,
        r#""--log-format","json""#,
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = node.to_string();
    assert!(text.contains("/etc/causeway-secrets/app-ca"), "{text}");
    let service = named(&all, "Service", "causeway-tunnels");
    assert_eq!(service["metadata"]["annotations"]["a"], "b");
    assert_eq!(service["spec"]["type"], "NodePort");
    assert_eq!(service["spec"]["ports"][0]["nodePort"], 30262);
    // The addresses that gateways get contain the release's namespace.
    let config = &named(&all, "ConfigMap", "causeway-gateway")["data"]["gateway.yaml"];
    let config = config.as_str().unwrap();
    for part in [
        "gateways/causeway-state",
        "gateways/causeway-tunnels",
        "ca_secret: our-ca",
    ] {
        assert!(config.contains(part), "{config}");
    }
    let rules = &named(&all, "Role", "causeway-gateway-state")["rules"];
    assert_eq!(rules[0]["resourceNames"][0], "causeway-state");
    assert_eq!(rules[1]["resourceNames"], json!(["our-ca"]));
}

/// The right to read pods comes with the key, in the namespace of the release.
fn pods_are_read_only_if_the_gateway_follows_them() {
    let world = world();
    let config = r#"gateway.config={"kubernetes":{"pod_networks":["10.250.0.0/16"],"pods":{"max_pods":5000}}}"#;
    let with_pods = [
        "--set-json",
        config,
        "--namespace",
        "gateways",
        "--no-hooks",
    ];
    let off = r#"gateway.config={"kubernetes":{"pods":null}}"#;
    for (way, _) in WAYS {
        let Some(made) = templated(&world, way, &with_pods) else {
            return;
        };
        let all = objects(&world, &made);
        let role = named(&all, "ClusterRole", "causeway-gateway-pods");
        let rules =
            json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"] }]);
        assert_eq!(role["rules"], rules, "{way}");
        let binding = named(&all, "ClusterRoleBinding", "causeway-gateway-pods");
        assert_eq!(binding["roleRef"]["name"], "causeway-gateway-pods", "{way}");
        let gateway = &named(&all, "Deployment", "causeway-gateway");
        let subject = &binding["subjects"][0];
        assert_eq!(
            subject["namespace"], gateway["metadata"]["namespace"],
            "{way}"
        );
        let account = &gateway["spec"]["template"]["spec"]["serviceAccountName"];
        assert_eq!(&subject["name"], account, "{way}");
        let files = &named(&all, "ConfigMap", "causeway-gateway")["data"];
        let config = files["gateway.yaml"].as_str().unwrap();
        assert!(config.contains("max_pods: 5000"), "{way}: {config}");
        for values in [&["--no-hooks"][..], &["--set-json", off, "--no-hooks"]] {
            let made = templated(&world, way, values).unwrap();
            assert!(!made.contains("causeway-gateway-pods"), "{way} {values:?}");
        }
    }
}

fn rule(policy: &Value, port: u64) -> Option<&Value> {
    let rules = policy["spec"]["ingress"].as_array().unwrap().iter();
    rules
        .into_iter()
        .find(|rule| rule["ports"][0]["port"] == port)
}

fn metrics_are_served_apart_from_the_admin_listener() {
    let world = world();
    let on = "gateway.metrics.enabled=true,gateway.metrics.podMonitor.enabled=true,gateway.metrics.podMonitor.labels.release=p";
    let Some(made) = templated(&world, "clients", &["--no-hooks", "--set", on]) else {
        return;
    };
    // kubectl does not know the kind PodMonitor.
    let (monitor, rest): (Vec<_>, Vec<_>) = made
        .split("\n---\n")
        .partition(|text| text.contains("kind: PodMonitor"));
    let monitor = monitor.concat();
    for part in ["port: metrics", "release: p", "namespace: causeway"] {
        assert!(monitor.contains(part), "{monitor}");
    }
    let all = objects(&world, &rest.join("\n---\n"));
    super::sound(&world, "metrics", &all);
    let config = &named(&all, "ConfigMap", "causeway-gateway")["data"]["gateway.yaml"];
    let config = config.as_str().unwrap();
    assert!(config.contains("metrics_listen: 0.0.0.0:10271"), "{config}");
    let gateway = &named(&all, "Deployment", "causeway-gateway")["spec"]["template"]["spec"];
    let ports = &gateway["containers"][0]["ports"];
    assert_eq!(
        ports[1],
        json!({ "name": "metrics", "containerPort": 10271 })
    );
    let policy = named(&all, "NetworkPolicy", "causeway-gateway");
    assert!(rule(policy, 10271).is_some(), "{policy:#}");
    assert!(rule(policy, 10265).is_none(), "{policy:#}");
    let without = templated(&world, "clients", &["--no-hooks"]).unwrap();
    assert!(!without.contains("10271") && !without.contains("PodMonitor"));
    // A named port would be a port of the host.
    let on_host = templated(&world, "egress", &["--no-hooks", "--set", on]).unwrap();
    assert!(!on_host.contains("containerPort"), "{on_host}");
    for part in [
        "metrics_listen: 0.0.0.0:10271",
        r#"replacement: "$1:10271""#,
        "__meta_kubernetes_pod_ip",
    ] {
        assert!(on_host.contains(part), "{part}: {on_host}");
    }
}
