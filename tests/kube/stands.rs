//! The cluster runs, and without Causeway no process in the cloud reaches a node behind NAT.

use libtest_mimic::Trial;

use crate::{trial, world::world};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("the_cluster_stands", the_cluster_stands),
        trial(
            "without_causeway_no_node_is_reached",
            without_causeway_no_node_is_reached,
        ),
    ]
}

fn the_cluster_stands() {
    let world = world();
    for (namespace, node) in ["a", "b"].into_iter().zip(&world.nodes) {
        let pod = world.cluster.get(&format!("pod -n {namespace} ticker"));
        let pod = pod.unwrap();
        assert_eq!(pod["spec"]["nodeName"], node.name);
        assert_eq!(pod["status"]["phase"], "Running", "{pod:#}");
        let node = world.cluster.get(&format!("node {}", node.name)).unwrap();
        let address = &node["status"]["addresses"][0]["address"];
        let site = &world.nodes[usize::from(namespace == "b")].site;
        assert_eq!(*address, site.address().to_string());
    }
}

fn without_causeway_no_node_is_reached() {
    let world = world();
    for line in ["logs -n a ticker", "exec -n a ticker -- true"] {
        let message = world.cluster.kubectl(line).run().failed();
        assert!(message.contains("10250"), "{message}");
    }
}
