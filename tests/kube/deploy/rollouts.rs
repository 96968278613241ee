//! Each shipped way for a cluster, as its users run it: installed, updated and rolled back under counted requests, removed.
//!
//! Real controllers and a real scheduler make and place all pods, in the Dockerfile's folders, modes and user. The commands
//! are those of `deploy/README.md`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::{
    ON_HOSTS,
    commands::{Shell, block, blocks, own_names},
    fleet::{Client, Counted, Fleet, VERSIONS, dns},
    helm, kustomized, objects,
    pods::with_own_roles,
    replicas::{GATEWAYS, ca_secret},
};
use crate::{
    state, trial,
    world::{
        World,
        node::Node,
        process::{PATIENCE, Program, ToolOutput},
        world,
    },
};

pub(super) fn trials() -> [Trial; 7] {
    [
        trial(
            "deploy::rollouts_of_clients_are_counted",
            rollouts_of_clients_are_counted,
        ),
        trial(
            "deploy::rollouts_of_dns_are_counted",
            rollouts_of_dns_are_counted,
        ),
        trial(
            "deploy::rollouts_of_ports_are_counted",
            rollouts_of_ports_are_counted,
        ),
        trial(
            "deploy::rollouts_on_hosts_are_counted",
            rollouts_on_hosts_are_counted,
        ),
        trial(
            "deploy::rollouts_on_several_hosts_change_the_gateway_of_each",
            rollouts_on_several_hosts_change_the_gateway_of_each,
        ),
        trial(
            "deploy::rollouts_by_helm_are_counted",
            rollouts_by_helm_are_counted,
        ),
        trial(
            "deploy::a_restart_and_a_drain_of_three_gateways_are_counted",
            a_restart_and_a_drain_of_three_gateways_are_counted,
        ),
    ]
}

/// The overlay as a user has edited it: the address of the gateways, and names of the tests.
fn edited(fleet: &Fleet<'_>, way: &str) -> Vec<Value> {
    let world = fleet.world;
    let on_hosts = ON_HOSTS.contains(&way);
    let address = fleet.cloud().site.address().to_string();
    let name = if on_hosts { address.as_str() } else { GATEWAYS };
    let text = kustomized(world, way).replace("gw.example.com", name);
    let mut all = objects(world, &text);
    with_own_roles(&mut all);
    for workload in &mut all {
        if workload["kind"] == "DaemonSet" || workload["kind"] == "Deployment" {
            let spec = workload["spec"]["template"]["spec"].as_object_mut();
            spec.unwrap().extend(dns().as_object().unwrap().clone());
        }
    }
    all
}

/// The overlay's folder of the README's commands is a file with the objects.
const KUBECTL: &str = r#"#!/bin/sh
case " $* " in *" -k overlays/"*) verb=$1; shift 3; set -- "$verb" -f overlay.json "$@" ;; esac
exec "$REAL" "$CONFIG" "$@"
"#;

/// Runs a block of the README.
fn run(shell: &Shell<'_>, text: &str) {
    shell.program(text).within(8 * PATIENCE).run().ok();
}

/// Installs the overlay, updates and rolls back both workloads under requests, and removes it.
fn rolls(fleet: &Fleet<'_>, way: &str, client: Client<'_>) -> [Counted; 2] {
    let world = fleet.world;
    let shell = Shell::new(world, &format!("rollouts-{way}"));
    shell.script("kubectl", KUBECTL);
    let all = edited(fleet, way);
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": all }).to_string();
    let overlay = |version: &str| {
        let text = list.replace(VERSIONS[0], version);
        fs::write(shell.folder.join("overlay.json"), text).unwrap();
    };
    overlay(VERSIONS[0]);
    run(&shell, "kubectl apply -k overlays/clients");
    let old = "delete -n causeway secret causeway-ca --ignore-not-found";
    world.cluster.kubectl(old).run().ok();
    ca_secret(world);
    fleet.is_up();
    let update = fleet.under_requests(client, || {
        overlay(VERSIONS[1]);
        run(&shell, &block("rollout status daemonset"));
        fleet.runs(VERSIONS[1]);
    });
    update.report(&format!("{way}: update"));
    let back = fleet.under_requests(client, || {
        run(&shell, &block("rollout undo"));
        fleet.is_up();
        fleet.runs(VERSIONS[0]);
    });
    back.report(&format!("{way}: rollback"));
    run(&shell, &block("delete -k"));
    is_left(fleet, way, &[]);
    [update, back]
}

/// Checks which objects and folders stay. Each node with an edge keeps its identity.
fn is_left(fleet: &Fleet<'_>, way: &str, objects: &[&str]) {
    let left = left(fleet);
    eprintln!("counted: {way}: left: {left:?}");
    let edges = fleet
        .edges
        .iter()
        .map(|node| format!("{}: /var/lib/causeway-edge", node.name));
    let on_host = ON_HOSTS.contains(&way);
    let host = on_host.then(|| format!("{}: /var/lib/causeway", fleet.cloud().name));
    let socket = (way == "egress").then(|| format!("{}: /run/causeway", fleet.cloud().name));
    let objects = objects.iter().map(|&it| it.to_owned());
    let wanted: BTreeSet<_> = objects.chain(edges).chain(host).chain(socket).collect();
    assert_eq!(left, wanted, "{way}");
}

/// Objects and folders with the name of Causeway.
fn left(fleet: &Fleet<'_>) -> BTreeSet<String> {
    let kinds = "get namespace,clusterrole,clusterrolebinding,role,rolebinding,configmap,secret,service,serviceaccount,\
         deployment,daemonset,job,lease,networkpolicy,poddisruptionbudget -A --no-headers \
         -o custom-columns=K:.kind,NS:.metadata.namespace,NAME:.metadata.name";
    let text = fleet.world.cluster.kubectl(kinds).run().ok().text();
    // The account with which the gateways of other tests run is there.
    let of_tests = |line: &str| line.contains("kube-system") && !line.contains("causeway-ca");
    // Kubernetes puts these into each namespace.
    let of_namespace =
        |line: &str| line.ends_with(" kube-root-ca.crt") || line.ends_with(" default");
    let ours = text.lines().map(str::trim_end);
    let ours =
        ours.filter(|line| line.contains("causeway") && !of_tests(line) && !of_namespace(line));
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut all: BTreeSet<_> = ours.map(words).collect();
    for node in fleet.nodes() {
        let find = node.at("find").args(["/var/lib", "/run", "/etc"]);
        let find = find.words("-maxdepth 1 -name causeway*").run();
        let found = find.text();
        all.extend(found.lines().map(|it| format!("{}: {it}", node.name)));
    }
    all
}

/// curl, which fails on an error's status.
fn curl(program: Program) -> Program {
    program.words("-sS --fail-with-body --max-time 20")
}

/// A client of kubelets with kube-apiserver's certificate.
fn as_kube_apiserver(world: &World, program: Program) -> Program {
    let pki = |name| world.cluster.pki.path(name);
    curl(program)
        .args(["--cacert".to_owned(), pki("ca.pem")])
        .args(["--cert".to_owned(), pki("kubelet-client.pem")])
        .args(["--key".to_owned(), pki("kubelet-client.key")])
}

fn prometheus(world: &World) -> String {
    for object in [
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "monitoring" } }),
        json!({ "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": { "name": "prometheus", "namespace": "monitoring" } }),
    ] {
        world.cluster.apply(&object);
    }
    let token = "create token -n monitoring prometheus --audience causeway";
    let token = world.cluster.kubectl(token).run().ok().text();
    format!("Authorization: Bearer {}", token.trim())
}

/// A client of apps by the token of an account.
fn scrape(world: &World, token: &str, node: &Node, at: Option<&str>) -> ToolOutput {
    scrapes(world, (token, ""), node, at)
}

/// A client that sends twenty requests at once, all of which must succeed.
fn burst(world: &World, token: &str, node: &Node, at: Option<&str>) -> ToolOutput {
    scrapes(world, (token, "?[1-20]"), node, at)
}

/// Sends a request for each value of the query, a range of curl.
fn scrapes(
    world: &World,
    (token, query): (&str, &str),
    node: &Node,
    at: Option<&str>,
) -> ToolOutput {
    let name = &node.name;
    curl(Program::new("curl"))
        .words("--no-progress-meter --parallel --fail-early --cacert")
        .args([world.cluster.pki.path("ca.pem")])
        .args([
            "--connect-to",
            &format!("::{}:9100", at.unwrap_or_default()),
        ])
        .args(["-H", token, &format!("https://{name}:9100/metrics{query}")])
        .run()
}

fn rollouts_of_clients_are_counted() {
    let world = world();
    let Some(fleet) = Fleet::start(&world, 3) else {
        return;
    };
    let token = prometheus(&world);
    let ask = |node: &Node, at: Option<&str>| scrape(&world, &token, node, at);
    let both = rolls(&fleet, "clients", (Some("causeway-listeners"), &ask));
    both.iter().for_each(Counted::none_failed);
}

fn rollouts_of_dns_are_counted() {
    let world = world();
    let Some(fleet) = Fleet::start(&world, 13) else {
        return;
    };
    let kubelet = |node: &Node, at: Option<&str>| {
        let to = format!("::{}:10250", at.unwrap_or_default());
        let curl = as_kube_apiserver(&world, Program::new("curl"));
        let curl = curl.args(["--connect-to", &to]);
        curl.args([format!("https://{}:10250/healthz", node.name)])
            .run()
    };
    let both = rolls(&fleet, "dns", (Some("causeway-listeners"), &kubelet));
    both.iter().for_each(Counted::none_failed);
}

fn rollouts_of_ports_are_counted() {
    let world = world();
    let Some(fleet) = Fleet::start(&world, 43) else {
        return;
    };
    // From the bridge of the pods' network.
    let pod = |node: &Node, at: Option<&str>| {
        let to = format!("::{}:10255", at.unwrap_or_default());
        let curl = curl(fleet.cloud().at("curl")).args(["--connect-to", &to]);
        curl.args([format!("http://{}:10255/metrics", node.name)])
            .run()
    };
    let both = rolls(&fleet, "ports", (Some("causeway-clients"), &pod));
    both.iter().for_each(Counted::none_failed);
}

fn rollouts_on_hosts_are_counted() {
    let world = world();
    let Some(fleet) = Fleet::start(&world, 23) else {
        return;
    };
    let address = |node: &Node, _: Option<&str>| {
        let curl = as_kube_apiserver(&world, fleet.cloud().at("curl"));
        let url = format!("https://{}:10250/healthz", node.site.address());
        curl.args([url]).run()
    };
    let both = rolls(&fleet, "addresses", (None, &address));
    both.iter().for_each(Counted::none_failed);
    let folders = fleet
        .cloud()
        .at("install")
        .words("-d -m 700 -o 65532 -g 65532");
    let folders = folders.args(["/var/lib/causeway", "/run/causeway"]);
    fleet
        .cloud()
        .at("rm")
        .words("-rf /var/lib/causeway")
        .run()
        .ok();
    folders.run().ok();
    let socket = |node: &Node, _: Option<&str>| {
        let line = format!(
            "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.settimeout(20)\ns.connect('/run/causeway/kube-apiserver.sock')\ns.sendall(b'CONNECT {0}:10250 HTTP/1.1\\r\\nHost: {0}:10250\\r\\n\\r\\n')\nh=s.recv(999)\nsys.exit(0 if b' 200 ' in h[:20] else str(h))",
            node.name
        );
        fleet.cloud().at("python3").args(["-c", &line]).run()
    };
    let both = rolls(&fleet, "egress", (None, &socket));
    both.iter().for_each(Counted::none_failed);
}

/// Replaces the gateways of two hosts. Each host has one gateway before and after, and its socket always answers.
fn rollouts_on_several_hosts_change_the_gateway_of_each() {
    let world = world();
    let Some(fleet) = Fleet::start(&world, 53) else {
        return;
    };
    let hosts = [fleet.cloud(), &fleet.edges[0]];
    let labels =
        "causeway.io/edge- openyurt.io/is-edge-worker- node-role.kubernetes.io/control-plane=";
    let line = format!("label node {} {labels}", hosts[1].name);
    world.cluster.kubectl(&line).run().ok();
    for host in hosts {
        let folders = host.at("install").words("-d -m 700 -o 65532 -g 65532");
        let folders = folders.args(["/var/lib/causeway", "/run/causeway"]);
        folders.run().ok();
    }
    let mut all = edited(&fleet, "egress");
    for object in &mut all {
        if object["kind"] == "Deployment" {
            object["spec"]["replicas"] = json!(hosts.len());
        }
    }
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": all }).to_string();
    let apply = |version: &str| {
        let list = list.replace(VERSIONS[0], version);
        world.cluster.kubectl("apply -f -").input(list).run().ok();
        fleet.is_up();
    };
    let old = "delete -n causeway secret causeway-ca --ignore-not-found";
    world.cluster.kubectl("create namespace causeway").run();
    world.cluster.kubectl(old).run().ok();
    ca_secret(&world);
    apply(VERSIONS[0]);
    let first = gateways(&world);
    let names: BTreeSet<_> = hosts.map(|host| host.name.clone()).into();
    assert_eq!(first.keys().cloned().collect::<BTreeSet<_>>(), names);
    // Any response will do, because edges reach only the gateway of the first host.
    let socket = |node: &Node, _: Option<&str>| {
        let host = if node.name == hosts[1].name {
            hosts[1]
        } else {
            hosts[0]
        };
        let line = "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.settimeout(20)\ns.connect('/run/causeway/kube-apiserver.sock')\ns.sendall(b'CONNECT nobody:1 HTTP/1.1\\r\\nHost: nobody:1\\r\\n\\r\\n')\nh=s.recv(999)\nsys.exit(0 if h.startswith(b'HTTP/1.1 ') else str(h))";
        host.at("python3").args(["-c", line]).run()
    };
    let update = fleet.under_requests((None, &socket), || apply(VERSIONS[1]));
    update.report("two hosts: update").none_failed();
    let second = gateways(&world);
    assert_eq!(second.keys().cloned().collect::<BTreeSet<_>>(), names);
    for (host, pod) in &second {
        assert_eq!(pod["spec"]["containers"][0]["image"], VERSIONS[1]);
        let container = &pod["status"]["containerStatuses"][0];
        assert_eq!(container["restartCount"], 0, "{host}: {pod:#}");
        assert_ne!(pod["metadata"]["uid"], first[host]["metadata"]["uid"]);
    }
    let delete = "delete --ignore-not-found -f -";
    let delete = world.cluster.kubectl(delete).input(list);
    delete.within(8 * PATIENCE).run().ok();
}

/// Returns the gateways' pods that are not being deleted, by the names of their nodes. Panics if a node has two.
fn gateways(world: &World) -> BTreeMap<String, Value> {
    let pods = "pods -n causeway -l app.kubernetes.io/component=gateway";
    let pods = world.cluster.get(pods).unwrap();
    let mut by_node = BTreeMap::new();
    for pod in pods["items"].as_array().unwrap() {
        if pod["metadata"]["deletionTimestamp"].is_null() {
            let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
            let other = by_node.insert(node.to_owned(), pod.clone());
            assert!(other.is_none(), "{node} has two gateways: {pods:#}");
        }
    }
    by_node
}

/// Writes the values of the README for helm, with the names of the tests, and with DNS for the pods.
fn write_values(shell: &Shell<'_>) {
    let values = blocks("yaml").concat();
    let values = values.replace("registry.example/causeway", "causeway");
    let values = values.replace("gw.example.com", GATEWAYS);
    let patches = [
        ("DaemonSet", "causeway-edge"),
        ("Deployment", "causeway-gateway"),
    ];
    let patches = patches.map(|(kind, name)| {
        let patch = json!({ "spec": { "template": { "spec": dns() } } });
        let patch = json!({ "kind": kind, "name": name, "patch": patch });
        format!("  - {patch}\n")
    });
    fs::write(
        shell.folder.join("values.yaml"),
        format!("{values}{}", patches.concat()),
    )
    .unwrap();
}

/// Installs the chart as its users do, with further options of helm.
fn installed_by_helm<'a>(fleet: &Fleet<'a>, options: &str) -> Shell<'a> {
    let world = fleet.world;
    let shell = Shell::new(world, "deploy-rollouts");
    shell.script("kubectl", "#!/bin/sh\nexec \"$REAL\" \"$CONFIG\" \"$@\"\n");
    own_names(world, &shell.folder.join("chart"));
    write_values(&shell);
    let run = |text: &str| run(&shell, text);
    run("kubectl create namespace causeway || true");
    run("kubectl -n causeway delete secret causeway-ca --ignore-not-found");
    ca_secret(world);
    run("kubectl delete namespace causeway-edge --ignore-not-found --timeout=100s");
    let install = block("helm install");
    run(&format!("export HELM_MORE='{options}'\n{install}"));
    fleet.is_up();
    shell
}

fn rollouts_by_helm_are_counted() {
    let world = world();
    if helm(&world).is_none() {
        return;
    }
    let Some(fleet) = Fleet::start(&world, 33) else {
        return;
    };
    let token = prometheus(&world);
    let ask = |node: &Node, at: Option<&str>| scrape(&world, &token, node, at);
    let client: Client<'_> = (Some("causeway-listeners"), &ask);
    let shell = installed_by_helm(&fleet, "");
    let run = |text: &str| run(&shell, text);
    let update = fleet.under_requests(client, || {
        run(&block("helm upgrade"));
        fleet.is_up();
        fleet.runs(VERSIONS[1]);
    });
    update.report("helm: update").none_failed();
    let back = fleet.under_requests(client, || {
        run(&block("helm rollback"));
        fleet.is_up();
        fleet.runs(VERSIONS[0]);
    });
    back.report("helm: rollback").none_failed();
    let removal = block("helm uninstall");
    let (uninstall, rest) = removal.split_once('\n').unwrap();
    run(uninstall);
    let state = state::secret_names().map(|name| format!("Secret causeway {name}"));
    let state: Vec<String> = state.collect();
    let mut kept = vec![
        "Namespace <none> causeway",
        "Namespace <none> causeway-edge",
        "ConfigMap kube-system causeway-ca",
        "Secret causeway causeway-ca",
    ];
    kept.extend(state.iter().map(String::as_str));
    run(rest.lines().next().unwrap());
    is_left(&fleet, "helm", &kept);
    run(rest);
    is_left(&fleet, "helm", &kept[..1]);
}

/// Replaces three gateways on three nodes as `kubectl rollout restart` does, and drains two of these nodes at once.
fn a_restart_and_a_drain_of_three_gateways_are_counted() {
    let world = world();
    if helm(&world).is_none() {
        return;
    }
    let Some(fleet) = Fleet::with_clouds(&world, 63, 3) else {
        return;
    };
    let token = prometheus(&world);
    let ask = |node: &Node, at: Option<&str>| burst(&world, &token, node, at);
    let client: Client<'_> = (Some("causeway-listeners"), &ask);
    let shell = installed_by_helm(&fleet, "--set gateway.replicas=3");
    let nodes: Vec<_> = fleet.clouds.iter().map(|node| node.name.as_str()).collect();
    let first = gateways(&world);
    assert!(first.keys().eq(&nodes), "{first:#?}");
    let restart = fleet.under_requests(client, || {
        let line = "rollout restart deployment/causeway-gateway";
        run(&shell, &block(line));
        fleet.runs(VERSIONS[0]);
    });
    restart.report("three gateways: restart").none_failed();
    let second = gateways(&world);
    assert!(second.keys().eq(&nodes), "{second:#?}");
    for (node, pod) in &second {
        assert_ne!(pod["metadata"]["uid"], first[node]["metadata"]["uid"]);
    }
    let budget = "poddisruptionbudget -n causeway causeway-gateway";
    let budget = &world.cluster.get(budget).unwrap()["status"];
    assert_eq!(budget["desiredHealthy"], 2, "{budget}");
    let drain = fleet.under_requests(client, || {
        let drained = nodes[..2].join(" ");
        // The controller that taints cordoned nodes does not run here.
        let taint = "node.kubernetes.io/unschedulable:NoSchedule";
        run(&shell, &format!("kubectl taint node {drained} {taint}"));
        let options = "--ignore-daemonsets --delete-emptydir-data";
        run(&shell, &format!("kubectl drain {drained} {options}"));
        fleet.is_up();
        fleet.runs(VERSIONS[0]);
    });
    drain
        .report("three gateways: drain of two nodes")
        .none_failed();
    let removal = block("helm uninstall");
    run(&shell, removal.lines().next().unwrap());
}
