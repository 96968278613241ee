//! An image that one node pushes to a registry of the cloud, and another pulls from it, through the proxies of their edges.
//!
//! The registry is Debian's, behind TLS. Its clients are containerd's: `ctr`, and the one that a kubelet drives.

use std::{fs, path::Path, time::Duration};

use serde_json::json;

use super::{NODE, always_ready, scene::Scene};
use crate::{
    full,
    world::{
        assets, image,
        net::{MACHINE, Machine},
        node::IMAGE_PROXY,
        process::{Process, within},
    },
};

const REGISTRY: &str = "registry.example.com";
const IMAGE: &str = "registry.example.com/large:1";
/// Maximum time for an image to be copied once.
const PATIENCE: Duration = Duration::from_mins(3);

pub(super) fn a_node_pushes_a_large_image_and_another_runs_it(scene: &mut Scene) {
    let Some(program) = assets::registry() else {
        return crate::missing("docker-registry (run .ci/setup)");
    };
    let machine = Machine::new();
    let registry = serve(scene, &machine, &program);
    let megabytes = if full() { 500 } else { 100 };
    let (archive, hash) = image::large(&scene.folder, IMAGE, megabytes);
    let recorder = scene.recorder("an image through the tunnel");
    let [reader, writer] = &scene.nodes;

    let import = writer.at("ctr").words("-n k8s.io images import");
    import.args([archive]).within(PATIENCE).run().ok();
    let push = writer.at("ctr").words("-n k8s.io images push --tlscacert");
    let push = push.args([&scene.cluster.pki.path("ca.pem"), IMAGE]);
    let begun = recorder.mark(format!("edge-2 pushes {megabytes} MB"));
    let push = push.env("HTTPS_PROXY", IMAGE_PROXY).within(PATIENCE);
    let pushed = push.run().ok();
    recorder.mark(format!("pushed within {:.1} s", pushed.took.as_secs_f64()));

    let hosts = reader.path("registries").join(REGISTRY);
    fs::create_dir_all(&hosts).unwrap();
    let ca = scene.cluster.pki.path("ca.pem");
    let text = format!("[host.\"https://{REGISTRY}\"]\nca = \"{ca}\"\n");
    fs::write(hosts.join("hosts.toml"), text).unwrap();
    scene.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "large", "namespace": "a" },
        "spec": {
            "nodeName": NODE, "terminationGracePeriodSeconds": 0, "dnsPolicy": "Default",
            "containers": [{
                "name": "it", "image": IMAGE, "imagePullPolicy": "Always",
                "command": ["sh", "-c", "sha256sum /large; exec cat"], "stdin": true,
            }],
        },
    }));
    let pulled = recorder.mark(format!("{NODE} pulls it"));
    let printed = || scene.cluster.kubectl("logs -n a large").run().text();
    let runs = within(PATIENCE, || printed().ends_with("/large\n"));
    let seen = || {
        scene
            .cluster
            .kubectl("describe -n a pod/large")
            .run()
            .text()
    };
    assert!(runs, "{}\n{}", seen(), registry.output());
    assert_eq!(printed(), format!("{hash}  /large\n"));
    let events = scene.cluster.kubectl("events -n a --for pod/large").run();
    let events = events.ok().text();
    let line = events.lines().find(|line| line.contains("Pulled"));
    recorder.mark(line.unwrap_or_default());
    recorder.until(pulled + Duration::from_secs(15));
    always_ready(&recorder, begun);
}

/// Starts the registry on the machine of the cloud.
fn serve(scene: &Scene, machine: &Machine, program: &Path) -> Process {
    let (folder, pki) = (scene.folder.join("registry"), &scene.cluster.pki);
    fs::create_dir_all(&folder).unwrap();
    pki.server("registry", &[REGISTRY], &[]);
    let config = folder.join("config.yml");
    let text = json!({
        "version": 0.1,
        "storage": { "filesystem": { "rootdirectory": folder.join("data") } },
        "http": {
            "addr": format!("{MACHINE}:443"),
            "tls": { "certificate": pki.path("registry.pem"), "key": pki.path("registry.key") },
        },
    });
    fs::write(&config, text.to_string()).unwrap();
    let registry = machine.at(&program.display().to_string()).words("serve");
    let mut registry = registry.args([config]).start(&folder.join("log"));
    registry.says("listening on");
    registry
}
