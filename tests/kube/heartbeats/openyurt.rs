//! Rows of the table with `OpenYurt`: a kubelet behind a `YurtHub`, whose Lease the kubelet renews at the `YurtHub` only.
//!
//! 1. `YurtHub` v1.7: no controller of `OpenYurt` acts on delegated heartbeats, so the gateway does everything.
//! 2. `YurtHub` and yurt-manager v1.6.1, whose delegate-lease controller works beside the gateway. Each of both does its part, and
//!    the node ends in the right state. These rows run if the folder of the programs also has `yurthub-1.6.1`,
//!    `yurt-manager-1.6.1`, and `openyurt-1.6.1.yaml`: the objects of `OpenYurt`'s charts, with an endpoint of the webhooks at this
//!    cloud.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    recorder::{Recorder, State},
    rows::{
        BEYOND_GRACE, begin, delegate_is_cut_off, first_beat, kept, lasts, leading_gateway_dies,
        minutes, no_storm, pool_is_cut_off, requested, undone, uplink_flaps,
    },
    scene::{POOL, Scene, Setup},
};
use crate::{
    add_skipped,
    world::{
        World, assets,
        net::CLOUD,
        node::Serving,
        process::{PATIENCE, Process, Program, within},
        yurthub,
    },
};

/// Maximum time that yurt-manager takes to start.
const STARTS: Duration = Duration::from_secs(90);
fn part(name: &str) -> Option<PathBuf> {
    let part = assets::folder()?.join(name);
    part.exists().then_some(part)
}

pub(super) fn a_kubelet_behind_a_yurthub_beside_yurt_manager() {
    let parts = ["yurthub-1.6.1", "yurt-manager-1.6.1", "openyurt-1.6.1.yaml"].map(part);
    let [Some(hub), Some(manager), Some(objects)] = parts else {
        add_skipped(
            "needs OpenYurt v1.6.1",
            "KUBEBUILDER_ASSETS=FOLDER cargo test --test kube",
        );
        return;
    };
    let setup = Setup {
        gateways: 2,
        taint: false,
        ..Setup::new("heartbeats-openyurt")
    };
    let row = "the same with YurtHub and yurt-manager v1.6.1";
    let (mut world, mut scene, recorder) = begin(setup, row, &["edge-1"]);
    let manager = runs_manager(&world, &scene, (&manager, &objects));
    let hub = runs_hub(&world, &scene, (&hub, ""));
    kubelet_uses_hub(&mut world, &recorder);
    one_node_is_cut_off(&world, &scene, &recorder);
    delegate_is_cut_off(&world, &scene, &recorder);
    pool_is_cut_off(&world, &scene, &recorder);
    uplink_flaps(&world, &scene, &recorder);
    leading_gateway_dies(&world, &mut scene, &recorder);
    let message = manager.output();
    let conflicts = message.matches("the object has been modified").count();
    recorder.mark(format!("conflicts of yurt-manager: {conflicts}"));
    drop(manager);
    remove_openyurt(&world, &objects);
    kubelet_uses_api(&mut world, &recorder);
    drop(hub);
}

pub(super) fn a_kubelet_behind_a_yurthub_without_a_controller_of_openyurt() {
    let Some(hub) = part("yurthub") else {
        add_skipped("needs YurtHub", "tests/kube/assets/build");
        return;
    };
    let setup = Setup {
        gateways: 2,
        ..Setup::new("heartbeats-yurthub")
    };
    let (mut world, mut scene, recorder) = begin(setup, "the same with YurtHub v1.7", &["edge-1"]);
    let hub = runs_hub(&world, &scene, (&hub, &format!("--nodepool-name={POOL}")));
    kubelet_uses_hub(&mut world, &recorder);
    one_node_is_cut_off(&world, &scene, &recorder);
    delegate_is_cut_off(&world, &scene, &recorder);
    // No row with the whole pool: nothing is delegated there, and behind YurtHub v1.7 a kubelet reports that it is ready only
    // minutes after the return.
    uplink_flaps(&world, &scene, &recorder);
    leading_gateway_dies(&world, &mut scene, &recorder);
    kubelet_uses_api(&mut world, &recorder);
    drop(hub);
}

/// Starts the kubelet of the first node behind its YurtHub.
fn kubelet_uses_hub(world: &mut World, recorder: &Recorder) {
    let World { cluster, nodes, .. } = world;
    cluster.pki.kubeconfig("edge-1", yurthub::URL);
    nodes[0].serves(cluster, Serving::Signed);
    let begun = recorder.mark("the kubelet of edge-1 is behind its YurtHub");
    recorder.until(begun + Duration::from_secs(30));
    recorder.sees(
        ("edge-1", begun + Duration::from_secs(20)),
        "whole",
        State::is_whole,
    );
}

/// The first node loses its uplink, and gets it back.
fn one_node_is_cut_off(world: &World, scene: &Scene, recorder: &Recorder) {
    let before = requested(world);
    scene.cut(world, 0);
    let cut = recorder.mark("edge-1 is cut off");
    first_beat(recorder, "edge-1", cut);
    recorder.until(cut + lasts(BEYOND_GRACE, minutes(15)));
    recorder.sees(("edge-1", cut), "tainted", |state| state.tainted);
    kept(recorder, "edge-1", cut);
    scene.mend(world, 0);
    let back = recorder.mark("edge-1 is back");
    undone(recorder, "edge-1", back);
    // Nothing puts it back afterwards.
    let whole = recorder.mark("edge-1 is whole");
    recorder.until(whole + Duration::from_secs(30));
    recorder.always(("edge-1", whole), "whole", State::is_whole);
    kept(recorder, "edge-1", cut);
    no_storm(recorder, world, before);
}

fn runs_manager(world: &World, scene: &Scene, (manager, objects): (&Path, &Path)) -> Process {
    let cluster = &world.cluster;
    let apply = cluster.kubectl("apply --server-side -f").args([objects]);
    apply.within(2 * PATIENCE).run().ok();
    let certificates = scene.folder.join("webhooks");
    fs::create_dir_all(&certificates).unwrap();
    let manager = Program::new(manager)
        .args([format!(
            "--kubeconfig={}",
            cluster.pki.path("admin.kubeconfig")
        )])
        .words("--controllers=-nodelifecycle,* --working-namespace=kube-system --v=4")
        .words("--leader-elect-resource-name=cloud-yurt-manager")
        .env("WEBHOOK_CERT_DIR", &certificates)
        .start(&scene.folder.join("yurt-manager.log"));
    let ready = within(STARTS, || {
        let ask = Program::new("curl").words("-q -sS --fail http://127.0.0.1:10272/readyz");
        ask.run().code == Some(0)
    });
    assert!(ready, "{}", manager.output());
    manager
}

/// A YurtHub on the first node.
fn runs_hub(world: &World, scene: &Scene, (hub, flags): (&Path, &str)) -> Process {
    let server = format!("https://{CLOUD}:6443");
    yurthub::start(
        (&world.cluster, &world.nodes[0]),
        (hub, flags),
        &server,
        &scene.folder.join("hub"),
    )
}

/// Removes the objects of `OpenYurt`, and its webhooks first: nothing answers them any more.
fn remove_openyurt(world: &World, objects: &Path) {
    let webhooks = "delete --ignore-not-found --wait=false mutatingwebhookconfigurations,validatingwebhookconfigurations --all";
    world.cluster.kubectl(webhooks).run().ok();
    let delete = "delete --ignore-not-found --wait=false -f";
    let delete = world.cluster.kubectl(delete).args([objects]);
    delete.within(2 * PATIENCE).run().ok();
}

/// Starts the kubelet of the first node without a YurtHub again.
fn kubelet_uses_api(world: &mut World, recorder: &Recorder) {
    let World { cluster, nodes, .. } = world;
    let url = format!("https://{CLOUD}:6443");
    cluster.pki.kubeconfig("edge-1", &url);
    nodes[0].serves(cluster, Serving::Signed);
    let direct = recorder.mark("the kubelet of edge-1 has no YurtHub any more");
    recorder.sees(("edge-1", direct), "whole", State::is_whole);
}
