use super::*;
use causeway_gateway::config::{Kubernetes, PodObjects};
use serde_json::{Value, json};

fn object(name: &str, labels: &Value, addresses: &[(&str, &str)], pods: &[&str]) -> Node {
    let addresses: Vec<_> = addresses
        .iter()
        .map(|(kind, address)| json!({ "type": kind, "address": address }))
        .collect();
    serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": name, "labels": labels },
        "spec": { "podCIDRs": pods },
        "status": { "addresses": addresses },
    }))
    .unwrap()
}

fn rules() -> Kubernetes {
    Kubernetes {
        pod_networks: vec!["10.244.0.0/16".parse().unwrap()],
        ..Kubernetes::default()
    }
}

fn texts(addresses: &[IpAddr]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}

#[test]
fn edge_nodes_have_labels_of_causeway_openyurt_or_superedge() {
    for (labels, edge) in [
        (json!({ "causeway.io/edge": "true" }), true),
        (json!({ "openyurt.io/is-edge-worker": "true" }), true),
        (json!({ "openyurt.io/is-edge-worker": "false" }), false),
        (json!({ "superedge.io/node-edge": "enable" }), true),
        (json!({}), false),
    ] {
        let node = object("n", &labels, &[], &[]);
        assert_eq!(cluster_node(&node, &rules()).is_edge, edge, "{labels}");
    }
    let any = Kubernetes {
        edge_labels: vec![Label::try_from("site".to_owned()).unwrap()],
        ..Kubernetes::default()
    };
    let node = object("n", &json!({ "site": "north" }), &[], &[]);
    assert!(cluster_node(&node, &any).is_edge);
}

#[test]
fn of_addresses_only_those_count_that_can_be_one_nodes_own() {
    let claimed = [
        ("ExternalIP", "2001:db8::1"),
        ("InternalIP", "10.0.0.1"),
        ("InternalIP", "::ffff:10.0.0.1"),
        ("Hostname", "10.0.0.9"),
        ("InternalIP", "127.0.0.1"),
        ("InternalIP", "0.0.0.0"),
        ("InternalIP", "169.254.169.254"),
        ("InternalIP", "fe80::1"),
        ("InternalIP", "224.0.0.1"),
        ("InternalIP", "nonsense"),
    ];
    let node = object("n", &json!({}), &claimed, &[]);
    let member = cluster_node(&node, &rules());
    assert_eq!(texts(&member.addresses), ["10.0.0.1", "2001:db8::1"]);
}

#[test]
fn node_addresses_are_limited_and_the_age_is_the_clusters() {
    let claimed: Vec<_> = (1..100).map(|last| format!("10.0.0.{last}")).collect();
    let claimed: Vec<_> = claimed.iter().map(|text| ("InternalIP", &**text)).collect();
    let mut node = object("n", &json!({}), &claimed, &[]);
    let when = json!("2026-11-25T18:00:00Z");
    node.metadata.creation_timestamp = serde_json::from_value(when).unwrap();
    for events in [
        vec![Event::Apply(node.clone())],
        vec![Event::Init, Event::InitApply(node), Event::InitDone],
    ] {
        let mut known = NodeCache::default();
        for event in events {
            known.apply(reduce_event(&event, &rules()));
        }
        let member = known.nodes.values().next().unwrap();
        assert_eq!(member.addresses.len(), MAX_ADDRESSES);
        assert_eq!(texts(&member.addresses[..1]), ["10.0.0.1"]);
        assert_eq!(member.external_addresses.len(), MAX_ADDRESSES);
        assert_eq!(member.created_at, 1_795_629_600);
    }
}

#[test]
fn only_protected_and_configured_labels_count() {
    let labels = json!({
        "tier": "gold", "site": "north", "node-restriction.kubernetes.io/tier": "tin",
        "apps.openyurt.io/nodepool": "east",
    });
    let node = object("n", &labels, &[], &[]);
    let silent = cluster_node(&node, &rules());
    let keys = |member: &ClusterNode| member.labels.keys().cloned().collect::<Vec<_>>();
    let restricted = "node-restriction.kubernetes.io/tier";
    assert_eq!(keys(&silent), [restricted]);
    assert_eq!(
        (silent.pool.as_deref(), silent.is_policy_pool),
        (Some("east"), false)
    );
    let listing = Kubernetes {
        policy_labels: vec!["site".to_owned(), "apps.openyurt.io/nodepool".to_owned()],
        ..rules()
    };
    let listed = cluster_node(&node, &listing);
    assert_eq!(
        keys(&listed),
        ["apps.openyurt.io/nodepool", restricted, "site"]
    );
    assert!(listed.is_policy_pool);
}

#[test]
fn an_outside_client_uses_external_addresses_else_internal_ones() {
    let outward = |claimed: &[(&str, &str)]| {
        let narrow = Kubernetes {
            address_networks: vec!["10.1.0.0/16".parse().unwrap()],
            ..rules()
        };
        texts(&cluster_node(&object("n", &json!({}), claimed, &[]), &narrow).external_addresses)
    };
    let inside = ("InternalIP", "10.0.0.1");
    assert_eq!(outward(&[inside, ("Hostname", "n")]), ["10.0.0.1"]);
    let both = [inside, ("ExternalIP", "192.0.2.1")];
    assert_eq!(outward(&both), ["192.0.2.1"]);
}

#[test]
fn an_address_in_the_networks_of_pods_is_for_pods_unless_it_is_listed_for_nodes() {
    let net = |text: &str| text.parse().unwrap();
    let claimed = [("InternalIP", "10.0.0.1"), ("InternalIP", "10.244.1.9")];
    let for_pods = |rules: &Kubernetes| {
        let node = cluster_node(&object("n", &json!({}), &claimed, &[]), rules);
        assert_eq!(texts(&node.addresses), ["10.0.0.1", "10.244.1.9"]);
        texts(&node.pod_addresses)
    };
    let follows = Kubernetes {
        pods: Some(PodObjects::default()),
        pod_networks: vec![net("10.244.0.0/16")],
        ..rules()
    };
    assert_eq!(for_pods(&follows), ["10.244.1.9"]);
    let overlapping = Kubernetes {
        address_networks: vec![net("10.0.0.0/8")],
        ..follows
    };
    assert!(for_pods(&overlapping).is_empty());
    assert!(for_pods(&rules()).is_empty());
}

#[test]
fn a_label_of_a_node_names_its_pool() {
    let pool =
        |labels, rules: &Kubernetes| cluster_node(&object("n", &labels, &[], &[]), rules).pool;
    let openyurt = json!({ "apps.openyurt.io/nodepool": "north" });
    assert_eq!(pool(openyurt.clone(), &rules()).as_deref(), Some("north"));
    assert_eq!(pool(json!({ "other": "north" }), &rules()), None);
    assert_eq!(
        pool(json!({ "apps.openyurt.io/nodepool": "" }), &rules()),
        None
    );
    let none = Kubernetes {
        pool_label: String::new(),
        ..rules()
    };
    assert_eq!(pool(openyurt, &none), None);
}

#[test]
fn addresses_outside_of_the_networks_are_ignored() {
    let addresses = [("InternalIP", "10.0.0.1"), ("InternalIP", "10.96.0.1")];
    let pods = ["10.244.1.0/24", "10.0.0.0/8", "0.0.0.0/0", "nonsense"];
    let node = object("n", &json!({}), &addresses, &pods);
    let narrow = Kubernetes {
        address_networks: vec!["10.0.0.0/16".parse().unwrap()],
        ..rules()
    };
    let believed = cluster_node(&node, &narrow);
    assert_eq!(texts(&believed.addresses), ["10.0.0.1"]);
    assert_eq!(believed.pod_networks, ["10.244.1.0/24".parse().unwrap()]);
    let silent = Kubernetes::default();
    assert!(cluster_node(&node, &silent).pod_networks.is_empty());
}

#[test]
fn a_list_replaces_all_nodes_and_a_heartbeat_changes_none() {
    let node =
        |name: &str, address: &str| object(name, &json!({}), &[("InternalIP", address)], &[]);
    let mut known = NodeCache::default();
    let mut take = |event| known.apply(reduce_event(&event, &rules()));
    assert!(!take(Event::Init));
    assert!(!take(Event::InitApply(node("a", "10.0.0.1"))));
    assert!(!take(Event::InitApply(node("b", "10.0.0.2"))));
    assert!(take(Event::InitDone));
    assert!(!take(Event::Apply(node("a", "10.0.0.1"))), "a heartbeat");
    assert!(take(Event::Apply(node("a", "10.0.0.3"))));
    assert!(take(Event::Delete(node("b", "10.0.0.2"))));
    assert!(!take(Event::Delete(node("b", "10.0.0.2"))));
    // A list that never becomes complete changes nothing.
    assert!(!take(Event::Init));
    assert!(!take(Event::InitApply(node("c", "10.0.0.4"))));
    assert_eq!(
        known.nodes.keys().map(NodeName::as_str).collect::<Vec<_>>(),
        ["a"]
    );
    assert!(known.apply(reduce_event(&Event::InitDone, &rules())));
    assert_eq!(
        known.nodes.keys().map(NodeName::as_str).collect::<Vec<_>>(),
        ["c"]
    );
}
