//! Pods whose addresses are in no `podCIDR` that the gateway trusts, with the right of `deploy/components/pods`.

use std::{fs, path::Path};

use libtest_mimic::Trial;

use crate::{
    listeners,
    steps::{NODES, by},
    world::{
        Way, World,
        process::{Program, ToolOutput, until},
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        by(
            "pod_objects::pods_in_no_pod_cidr_are_reached_by_their_objects".to_owned(),
            Way::Unix,
            pods_in_no_pod_cidr_are_reached_by_their_objects,
        ),
        by(
            "pod_objects::pods_of_a_second_pool_are_reached_by_address_and_name".to_owned(),
            Way::Unix,
            pods_of_a_second_pool_are_reached_by_address_and_name,
        ),
    ]
}

/// The networks of pods in the example's configuration.
const EXAMPLE: &str = "pod_networks: [10.244.0.0/16]";
/// The lower half of each node's network. All pods of the tests are in it, and no `podCIDR` is within it.
const HALVES: &str = "pod_networks: [10.244.1.0/25, 10.244.2.0/25]";

fn pods_in_no_pod_cidr_are_reached_by_their_objects(world: &mut World) {
    let proxied = |world: &World, namespace: &str| proxied(world, namespace, "echo");
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
    may_list_pods(world);
    for (namespace, node) in NODES {
        until("the pods are known", || {
            proxied(world, namespace).text() == format!("{node}\n")
        });
    }
}

/// Allows the gateway to list and watch pods.
fn may_list_pods(world: &World) {
    let rights = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/components/pods/rbac.yaml");
    let rights = fs::read_to_string(rights).unwrap();
    let ours = rights.replace("namespace: causeway", "namespace: kube-system");
    assert_ne!(rights, ours);
    let apply = world.cluster.kubectl("apply -f -");
    apply.input(ours).run().ok();
}

/// Requests a page of a pod by kube-apiserver.
fn proxied(world: &World, namespace: &str, pod: &str) -> ToolOutput {
    let raw = format!("get --raw /api/v1/namespaces/{namespace}/pods/{pod}:8080/proxy/");
    world.cluster.kubectl(&raw).run()
}

/// The address of the `connect` listener.
const PROXY: &str = "127.0.0.1:10275";

/// The pool and the configuration are those of the page `addresses.md`.
fn pods_of_a_second_pool_are_reached_by_address_and_name(world: &mut World) {
    may_list_pods(world);
    for ((namespace, name), node) in NODES.into_iter().zip(&world.nodes) {
        node.new_pods_from(&node.pods.replace("10.244.", "10.250."));
        let script = format!(
            "mkdir /tmp/www; echo {name} >/tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www"
        );
        world.cluster.pod(namespace, "pooled", name, &script);
    }
    for (namespace, _) in NODES {
        world.cluster.wait(namespace, "pod/pooled", "Ready");
        let pod = world.cluster.get(&format!("pod -n {namespace} pooled"));
        let address = pod.unwrap()["status"]["podIP"].to_string();
        assert!(address.starts_with("\"10.250."), "{address}");
    }
    world.otherwise(Way::Unix, |text| {
        assert!(text.contains(EXAMPLE), "{text}");
        let pools = "pod_networks: [10.244.0.0/16, 10.250.0.0/16]";
        text.replace(EXAMPLE, pools)
    });
    for (namespace, _) in NODES {
        let unknown = proxied(world, namespace, "pooled");
        assert_ne!(unknown.code, Some(0), "no podCIDR has the address");
    }
    world.otherwise(Way::Unix, |text| {
        let pools = "pod_networks: [10.244.0.0/16, 10.250.0.0/16]\n  pods: {}";
        text.replace(EXAMPLE, pools)
    });
    let listener = format!(
        "{{ name: proxy, protocol: connect, listen: \"{PROXY}\", plaintext_networks: [127.0.0.0/8], anonymous: true }}"
    );
    listeners::open(world, &listener, PROXY);
    for (namespace, node) in NODES {
        until("the pod is known", || {
            proxied(world, namespace, "pooled").text() == format!("{node}\n")
        });
        let curl = Program::new("curl")
            .words("-q -sS --fail -x")
            .args([format!("http://{PROXY}")]);
        let by_name = curl.args([format!("http://pooled.{namespace}.pod:8080/")]);
        assert_eq!(by_name.run().ok().text(), format!("{node}\n"));
    }
    for ((namespace, _), node) in NODES.into_iter().zip(&world.nodes) {
        let delete = format!("delete -n {namespace} pod pooled --wait=false");
        world.cluster.kubectl(&delete).run().ok();
        node.new_pods_from(&node.pods);
    }
}
