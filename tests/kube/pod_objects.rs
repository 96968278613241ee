//! Pods whose addresses are in no `podCIDR` that the gateway trusts, with the right of `deploy/components/pods`.

use std::{fs, path::Path};

use libtest_mimic::Trial;

use crate::{
    steps::{NODES, by},
    world::{Way, World, process::until},
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![by(
        "pod_objects::pods_in_no_pod_cidr_are_reached_by_their_objects".to_owned(),
        Way::Unix,
        pods_in_no_pod_cidr_are_reached_by_their_objects,
    )]
}

/// The networks of pods in the example's configuration.
const EXAMPLE: &str = "pod_networks: [10.244.0.0/16]";
/// The lower half of each node's network. All pods of the tests are in it, and no `podCIDR` is within it.
const HALVES: &str = "pod_networks: [10.244.1.0/25, 10.244.2.0/25]";

fn pods_in_no_pod_cidr_are_reached_by_their_objects(world: &mut World) {
    let proxied = |world: &World, namespace: &str| {
        let raw = format!("get --raw /api/v1/namespaces/{namespace}/pods/echo:8080/proxy/");
        world.cluster.kubectl(&raw).run()
    };
    let halves = |more: &str| {
        let halves = format!("{HALVES}{more}");
        move |text: String| {
            assert!(text.contains(EXAMPLE), "{text}");
            text.replace(EXAMPLE, &halves)
        }
    };
    // The gateway dials the pods itself, and has no route to them.
    world.otherwise(Way::Unix, halves(""));
    for (namespace, _) in NODES {
        assert_ne!(proxied(world, namespace).code, Some(0), "{namespace}");
    }
    world.otherwise(Way::Unix, halves("\n  pods: {}"));
    let refused = proxied(world, "a");
    assert!(refused.text().is_empty(), "the gateway may not list pods");
    let rights = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/components/pods/rbac.yaml");
    let rights = fs::read_to_string(rights).unwrap();
    let ours = rights.replace("namespace: causeway", "namespace: kube-system");
    assert_ne!(rights, ours);
    let apply = world.cluster.kubectl("apply -f -");
    apply.input(ours).run().ok();
    for (namespace, node) in NODES {
        until("the pods are known", || {
            proxied(world, namespace).text() == format!("{node}\n")
        });
    }
}
