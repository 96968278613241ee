//! The commands of `deploy/README.md`, unchanged: with pods, and with helm.
//!
//! The programs of these commands are small scripts in a folder of the path. `kubectl` finds the cluster, and a pod in
//! place of a Deployment. The test does the work of Deployments by hand, as in `pods`.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    thread,
};

use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::{
    file, helm, objects,
    pods::{CreatedObjects, gateway, import, status, with_own_roles},
    ports::KEPT,
    replicas::{GATEWAYS, edge, names},
};
use crate::{
    book, steps, trial,
    world::{
        Way, World,
        causeway::BINARY,
        process::{PATIENCE, Process, Program, ToolOutput, until, within},
    },
};

pub(super) fn trials() -> [Trial; 4] {
    [
        trial(
            "deploy::each_block_of_commands_is_known",
            each_block_of_commands_is_known,
        ),
        steps::by(
            "deploy::an_edge_follows_its_gateways_to_another_ca".to_owned(),
            Way::Address,
            an_edge_follows_its_gateways_to_another_ca,
        ),
        steps::by(
            "deploy::commands_of_the_readme_make_and_rotate_the_ca".to_owned(),
            Way::Address,
            commands_of_the_readme_make_and_rotate_the_ca,
        ),
        steps::by(
            "deploy::helm_validates_the_configuration_and_keeps_user_objects".to_owned(),
            Way::Address,
            helm_validates_the_configuration_and_keeps_user_objects,
        ),
    ]
}

/// Returns the README's blocks in a language, in order.
pub(super) fn blocks(language: &str) -> Vec<String> {
    let text = fs::read_to_string(file("deploy/README.md")).unwrap();
    let start = format!("```{language}\n");
    let parts = text.split(&start).skip(1);
    let blocks = parts.map(|part| part.split("```").next().unwrap().to_owned());
    blocks.collect()
}

/// Returns the block that contains this text.
pub(super) fn block(part: &str) -> String {
    let mut found = blocks("sh").into_iter().filter(|it| it.contains(part));
    let one = found.next().unwrap_or_else(|| panic!("no block: {part}"));
    assert!(found.next().is_none(), "two blocks: {part}");
    one
}

/// A part of each block, and the tests that run the block.
const BLOCKS: [(&str, &str); 17] = [
    ("kubectl kustomize overlays/clients", "commands"),
    ("openssl req", "commands"),
    ("docker run", "commands"),
    // By its effect: the test makes the folders in the same way, and the gateway serves.
    ("systemd-tmpfiles", "pods"),
    ("rollout status daemonset", "rollouts"),
    ("rollout undo", "rollouts"),
    ("delete -k", "rollouts"),
    ("rollout restart", "rollouts"),
    ("ca rotate", "commands"),
    ("in_pod ca csr", "commands"),
    // The same patch, and a client in the pods' network.
    ("patch configmap causeway-ports", "ports"),
    ("token create", "commands"),
    ("helm install", "commands"),
    ("create namespace causeway-edge", "commands"),
    ("helm upgrade", "rollouts"),
    ("helm rollback", "rollouts"),
    ("helm uninstall", "commands"),
];

fn each_block_of_commands_is_known() {
    let all = blocks("sh");
    assert_eq!(all.len(), BLOCKS.len(), "{all:#?}");
    for ((part, _), text) in BLOCKS.iter().zip(&all) {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// A folder in which the README's commands run, like a user's copy of `deploy`.
pub(super) struct Shell<'a> {
    world: &'a World,
    pub(super) folder: PathBuf,
}

/// Finds the cluster. The newest gateway's pod takes the part of its Deployment; a wait for the Deployment is a wait for
/// its pods.
const KUBECTL: &str = r#"#!/bin/sh
gateway() { "$REAL" "$CONFIG" -n causeway "$@" -l app.kubernetes.io/component=gateway; }
case " $* " in
*" rollout status "*) gateway wait pod --for=condition=Ready --timeout=110s; exit ;;
*" apply -k "*) set -- "$@" --dry-run=server ;;
*" deploy/causeway-gateway "*)
  newest=$(gateway get pod --sort-by=.metadata.creationTimestamp -o name | tail -n 1)
  for word; do
    shift
    [ "$word" != deploy/causeway-gateway ] || word=$newest
    set -- "$@" "$word"
  done
  ;;
esac
exec "$REAL" "$CONFIG" "$@"
"#;

/// Runs the program itself in place of its image, whose name is the argument after --log-driver none.
const DOCKER: &str = r#"#!/bin/sh
[ "$1 $2 $3 $4 $5" = "run --rm -i --log-driver none" ] || exit 9
shift 6
exec causeway "$@"
"#;

impl<'a> Shell<'a> {
    pub(super) fn new(world: &'a World, name: &str) -> Self {
        let folder = world.path(name);
        fs::create_dir_all(folder.join("bin")).unwrap();
        let copied = Program::new("cp").args(["-r".into(), file("deploy/."), folder.clone()]);
        copied.run().ok();
        let shell = Self { world, folder };
        shell.script("kubectl", KUBECTL);
        shell.script("docker", DOCKER);
        let helm = world.cluster.assets.join("helm").display().to_string();
        shell.script(
            "helm",
            &format!("#!/bin/sh\nexec {helm} \"$CONFIG\" \"$@\" $HELM_MORE\n"),
        );
        shell.script("causeway", &format!("#!/bin/sh\nexec {BINARY} \"$@\"\n"));
        shell
    }

    pub(super) fn script(&self, name: &str, text: &str) {
        let path = self.folder.join("bin").join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }

    pub(super) fn program(&self, text: &str) -> Program {
        let config = self.world.cluster.pki.path("admin.kubeconfig");
        let path = std::env::var("PATH").unwrap();
        let kubectl = self.world.cluster.assets.join("kubectl");
        Program::new("sh")
            .args([
                "-c",
                &format!("set -e\ncd {}\n{text}", self.folder.display()),
            ])
            .env("PATH", format!("{}/bin:{path}", self.folder.display()))
            .env("REAL", kubectl)
            .env("CONFIG", format!("--kubeconfig={config}"))
            .env("HOME", &self.world.folder)
            .within(4 * PATIENCE)
    }

    pub(super) fn run(&self, text: &str) -> ToolOutput {
        self.program(text).run()
    }
}

/// Asks the gateway of this pod whether the node is connected.
fn connects(world: &World, pod: &str) {
    let line = format!("exec -n causeway {pod} -c gateway -- /causeway status");
    until("the edge is connected", || {
        let message = world.cluster.kubectl(&line).run().text();
        message
            .lines()
            .any(|row| row.contains("edge-1") && row.contains("connected"))
    });
}

/// Simulates a new installation without a backup of the Secret.
fn an_edge_follows_its_gateways_to_another_ca(world: &mut World) {
    let world = &*world;
    let node = &world.nodes[0];
    node.at("rm").words(KEPT).run().ok();
    let made = CreatedObjects::new(world, "clients", GATEWAYS);
    let _names = names(world);
    let another_ca = || {
        let secret = Program::new(BINARY).words("k8s ca-secret").run().ok();
        let apply = world.cluster.kubectl("apply -f -");
        apply.input(secret.stdout).run().ok();
    };
    another_ca();
    made.begin("Deployment", "causeway-gateway", "first", gateway);
    made.begin("DaemonSet", "causeway-edge", "edge", edge);
    made.ready("causeway", "first");
    made.ready("causeway-edge", "edge");
    connects(world, "first");
    made.end("causeway", "first");
    another_ca();
    made.begin("Deployment", "causeway-gateway", "second", gateway);
    made.ready("causeway", "second");
    connects(world, "second");
    let logs = world
        .cluster
        .kubectl("logs -n causeway-edge edge")
        .run()
        .text();
    assert!(logs.contains("this node's identity is replaced"), "{logs}");
    let kept = node.at("ls").args(["/var/lib/causeway-edge"]).run().ok();
    let kept = kept.text();
    assert!(kept.contains("edge-replaced-"), "{kept}");
    let is = status(world, "causeway-edge", "edge");
    assert_eq!(is["containerStatuses"][0]["restartCount"], 0, "{is:#}");
    drop(made);
    node.at("rm").words(KEPT).run().ok();
}

/// Runs a step of the rotation after the previous one has finished, and replaces the gateway's pod.
fn step(made: &CreatedObjects<'_>, shell: &Shell<'_>, (old, new): (&str, &str), line: &str) {
    let mut message = String::new();
    let through = within(2 * PATIENCE, || {
        let ran = shell.run(line);
        message = format!("{}{}", ran.text(), ran.stderr);
        ran.code == Some(0)
    });
    assert!(through, "{line}: {message}");
    made.begin("Deployment", "causeway-gateway", new, gateway);
    made.ready("causeway", new);
    connects(made.world(), new);
    made.end("causeway", old);
}

fn commands_of_the_readme_make_and_rotate_the_ca(world: &mut World) {
    let world = &*world;
    let node = &world.nodes[0];
    node.at("rm").words(KEPT).run().ok();
    let shell = Shell::new(world, "deploy-commands");
    let made = CreatedObjects::new(world, "clients", GATEWAYS);
    let _names = names(world);
    // As the README of the repository has it, in whose folder `deploy` is; then as the one of `deploy` has it.
    symlink(".", shell.folder.join("deploy")).unwrap();
    for commands in [
        book::block("README.md", "kubectl apply -k"),
        block("kubectl kustomize overlays/clients"),
        block("docker run"),
    ] {
        shell.run(&commands).ok();
        let delete = "delete -n causeway secret causeway-ca --ignore-not-found";
        world.cluster.kubectl(delete).run().ok();
    }
    let unlabel = "label node edge-1 causeway.io/edge-";
    world.cluster.kubectl(unlabel).run().ok();
    let making = block("openssl req");
    // It waits until the Secret exists.
    made.begin("Deployment", "causeway-gateway", "first", gateway);
    shell.run(&making).ok();
    // The node has the label now.
    made.begin("DaemonSet", "causeway-edge", "edge", edge);
    made.ready("causeway-edge", "edge");
    connects(world, "first");

    let tokens = shell.run(&block("token create"));
    tokens.ok();
    let delete = "delete -n causeway-edge secret causeway-join";
    world.cluster.kubectl(delete).run().ok();

    let rotation = block("ca rotate");
    let steps: Vec<&str> = rotation.lines().collect();
    assert_eq!(steps.len(), 3, "{steps:?}");
    let pods = ["first", "second", "third", "fourth"];
    for (line, pair) in steps.iter().zip(pods.windows(2)) {
        step(&made, &shell, (pair[0], pair[1]), line);
    }
    let renewed = shell.run(&block("in_pod ca csr")).ok();
    assert!(renewed.text().contains("imported"), "{}", renewed.text());
    made.begin("Deployment", "causeway-gateway", "fifth", gateway);
    made.ready("causeway", "fifth");
    connects(world, "fifth");
    let map = world
        .cluster
        .get("-n kube-system configmap causeway-ca")
        .unwrap();
    let roots = map["data"]["ca.crt"].as_str().unwrap();
    assert_eq!(roots.matches("BEGIN CERTIFICATE").count(), 1, "{roots}");
    drop(made);
    node.at("rm").words(KEPT).run().ok();
}

/// The chart, with other names for objects without a namespace, because the tests' gateway has the usual names.
pub(super) fn own_names(world: &World, chart: &Path) {
    let manifest = chart.join("manifests/clients.yaml");
    let mut all = objects(world, &fs::read_to_string(&manifest).unwrap());
    with_own_roles(&mut all);
    let texts: Vec<_> = all.iter().map(Value::to_string).collect();
    fs::write(manifest, texts.join("\n---\n")).unwrap();
}

/// The controller of Jobs, which does not run in the tests' cluster.
fn jobs(world: &World) -> Process {
    let config = world.cluster.pki.path("admin.kubeconfig");
    Program::new(world.cluster.assets.join("kube-controller-manager"))
        .args([format!("--kubeconfig={config}")])
        .words("--controllers=job-controller --leader-elect=false --secure-port=0")
        .start(&world.path("jobs.log"))
}

/// Puts pods of Jobs on the first node, as a scheduler would.
fn bind(world: &World) {
    let waiting = "pods -n causeway -l app.kubernetes.io/component=check-config --field-selector=spec.nodeName=";
    let waiting = world.cluster.get(waiting).unwrap_or_default();
    for pod in waiting["items"].as_array().into_iter().flatten() {
        let name = &pod["metadata"]["name"];
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name },
            "target": { "apiVersion": "v1", "kind": "Node", "name": world.nodes[0].name },
        });
        let name = name.as_str().unwrap();
        let create = format!("create --raw /api/v1/namespaces/causeway/pods/{name}/binding -f -");
        let create = world.cluster.kubectl(&create);
        create.input(binding.to_string()).run();
    }
}

/// Runs commands while the test schedules their Jobs.
fn scheduled(shell: &Shell<'_>, text: &str) -> ToolOutput {
    let program = shell.program(text);
    thread::scope(|scope| {
        let ran = scope.spawn(|| program.run());
        within(5 * PATIENCE, || {
            bind(shell.world);
            ran.is_finished()
        });
        ran.join().unwrap()
    })
}

/// The folder with the chart, the README's values, and the namespace of edges as in the README.
fn furnished(world: &World) -> Shell<'_> {
    import(world);
    let shell = Shell::new(world, "deploy-helm");
    own_names(world, &shell.folder.join("chart"));
    let values = blocks("yaml").concat();
    let values = values.replace("registry.example/causeway", "causeway");
    // The only node has the label of edge nodes.
    let values = values.replace(
        "gateway:\n",
        "gateway:\n  affinity: { podAntiAffinity: {} }\n",
    );
    fs::write(shell.folder.join("values.yaml"), values).unwrap();
    let gone = "delete namespace causeway-edge --ignore-not-found --timeout=50s";
    world.cluster.kubectl(gone).run().ok();
    shell.run(&block("create namespace causeway-edge")).ok();
    shell
}

/// Returns the configuration that the release gives to gateways.
fn installed(world: &World) -> Option<Value> {
    let map = world
        .cluster
        .get("configmap -n causeway causeway-gateway")?;
    Some(map["data"].clone())
}

fn a_bad_configuration_changes_no_object(shell: &Shell<'_>) {
    let cluster = &shell.world.cluster;
    let more = "export HELM_MORE='--take-ownership --timeout 3m'\n";
    let policy = r#"gateway.policy={\"rules\":[{\"then\":\"allow\",\"who\":{}}]}"#;
    let bad = format!("{more}HELM_MORE=\"$HELM_MORE --set-json {policy}\"\n");
    let install = block("helm install");
    let message = scheduled(shell, &format!("{bad}{install}")).failed();
    assert!(message.contains("pre-install"), "{message}");
    let made = cluster.get("deployment -n causeway causeway-gateway");
    assert!(made.is_none());
    let logs = cluster.kubectl("logs -n causeway job/causeway-check-config");
    let logs = logs.run().text();
    assert!(logs.contains("policy.yaml:"), "{logs}");
    assert!(logs.contains("set users, groups"), "{logs}");
    let uninstall = shell.run("helm uninstall causeway --namespace causeway");
    uninstall.ok();

    scheduled(shell, &format!("{more}{install}")).ok();
    let before = installed(shell.world).unwrap();
    let job = cluster.get("job -n causeway causeway-check-config");
    assert!(job.is_none());
    let upgrade = install.lines().next().unwrap();
    let upgrade = upgrade.replace("install", "upgrade");
    let upgrade = upgrade.replace("--create-namespace", "");
    scheduled(shell, &format!("{bad}{upgrade}")).failed();
    assert_eq!(installed(shell.world).unwrap(), before);
}

fn user_objects_outlive_the_release(shell: &Shell<'_>) {
    let cluster = &shell.world.cluster;
    let secret = "create secret generic -n causeway-edge mine --from-literal=a=b";
    cluster.kubectl(secret).run().ok();
    let ca = Program::new(BINARY).words("k8s ca-secret").run().ok();
    cluster.kubectl("apply -f -").input(ca.stdout).run().ok();
    // No gateway runs here, which would publish it.
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": "causeway-ca", "namespace": "kube-system" },
    }));
    let removal = block("helm uninstall");
    let (uninstall, rest) = removal.split_once('\n').unwrap();
    shell.run(uninstall).ok();
    assert!(installed(shell.world).is_none());
    for kept in [
        "secret -n causeway-edge mine",
        "secret -n causeway causeway-state",
        "secret -n causeway causeway-state-15",
        "secret -n causeway causeway-ca",
    ] {
        assert!(cluster.get(kept).is_some(), "{kept}");
    }
    shell.run(rest).ok();
    for gone in [
        "namespace causeway-edge",
        "configmap -n kube-system causeway-ca",
        "secret -n causeway causeway-state",
        "secret -n causeway causeway-state-15",
    ] {
        assert!(cluster.get(gone).is_none(), "{gone}");
    }
}

fn helm_validates_the_configuration_and_keeps_user_objects(world: &mut World) {
    if helm(world).is_none() {
        return;
    }
    let _jobs = jobs(world);
    let shell = furnished(world);
    a_bad_configuration_changes_no_object(&shell);
    user_objects_outlive_the_release(&shell);
    let left = "delete -n causeway job,configmap causeway-check-config --ignore-not-found";
    world.cluster.kubectl(left).run().ok();
}
