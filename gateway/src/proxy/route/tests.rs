//! One test for each rule of routing.

use super::*;
use crate::state::{ClusterNode, Node, NodesWriter, Pod, PodsWriter};

fn nodes() -> Nodes {
    let writer = NodesWriter::default();
    for (name, address, pods) in [
        ("edge-1", "10.0.0.1", "10.244.1.0/24"),
        ("edge-2", "10.0.0.2", "10.244.2.0/24"),
        ("twin-1", "192.168.0.9", "10.250.0.0/24"),
        ("twin-2", "192.168.0.9", "10.250.0.0/24"),
    ] {
        let node = Node {
            addresses: vec![address.parse().unwrap()],
            pod_networks: vec![pods.parse().unwrap()],
            ..Node::default()
        };
        writer.upsert(NodeName::parse(name).unwrap(), node);
    }
    writer.reader()
}

type Routed = Result<(String, String), Reason>;

fn route(asked: &RouteInput<'_>) -> Routed {
    match find_route(asked, &nodes()) {
        Ok(route) => to(route.node.as_str(), &route.target.to_string()),
        Err(error) => Err(error.reason),
    }
}

#[allow(clippy::unnecessary_wraps, reason = "compared with a possible error")]
fn to(node: &str, target: &str) -> Routed {
    Ok((node.to_owned(), target.to_owned()))
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn the_sni_comes_first_and_a_foreign_host_passes() {
    let asked = RouteInput {
        sni: Some("edge-1"),
        authority: Some("10.97.0.1:6443"),
        port: Some(10250),
        ..RouteInput::default()
    };
    assert_eq!(route(&asked), to("edge-1", "edge-1:10250"));
}

#[test]
fn the_original_destination_comes_second() {
    let asked = RouteInput {
        sni: Some("gateway.example"),
        original: Some(address("10.0.0.2:10255")),
        authority: Some("10.97.0.1:6443"),
        port: Some(10250),
        ..RouteInput::default()
    };
    assert_eq!(route(&asked), to("edge-2", "edge-2:10255"));
}

#[test]
fn the_fixed_node_comes_third() {
    let fixed = NodeName::parse("edge-2").unwrap();
    let asked = RouteInput {
        fixed: Some(&fixed),
        authority: Some("whatever.example"),
        port: Some(22),
        ..RouteInput::default()
    };
    assert_eq!(route(&asked), to("edge-2", "edge-2:22"));
}

#[test]
fn the_host_comes_last_by_name_address_and_pod_network() {
    for (authority, expected) in [
        ("edge-1:9100", to("edge-1", "edge-1:9100")),
        ("EDGE-1:9100", to("edge-1", "edge-1:9100")),
        ("10.0.0.2:9100", to("edge-2", "edge-2:9100")),
        ("[::ffff:10.0.0.2]:9100", to("edge-2", "edge-2:9100")),
        ("10.244.1.7:8080", to("edge-1", "10.244.1.7:8080")),
    ] {
        let asked = RouteInput {
            authority: Some(authority),
            ..RouteInput::default()
        };
        assert_eq!(route(&asked), expected, "{authority}");
    }
}

#[test]
fn two_different_nodes_are_misdirected() {
    let named = RouteInput {
        sni: Some("edge-1"),
        authority: Some("edge-2:10250"),
        ..RouteInput::default()
    };
    assert_eq!(route(&named), Err(Reason::Misdirected));
    let addressed = RouteInput {
        sni: Some("edge-1"),
        authority: Some("10.0.0.2:10250"),
        ..RouteInput::default()
    };
    assert_eq!(route(&addressed), Err(Reason::Misdirected));
}

#[test]
fn an_address_of_two_nodes_is_refused_and_their_names_are_not() {
    let by_address = RouteInput {
        authority: Some("192.168.0.9:80"),
        ..RouteInput::default()
    };
    assert_eq!(route(&by_address), Err(Reason::Misdirected));
    let by_name = RouteInput {
        authority: Some("twin-2:80"),
        ..RouteInput::default()
    };
    assert_eq!(route(&by_name), to("twin-2", "twin-2:80"));
}

#[test]
fn the_port_is_the_hosts_only_where_the_host_names_this_node() {
    let ours = RouteInput {
        sni: Some("edge-1"),
        authority: Some("edge-1:9100"),
        port: Some(10250),
        ..RouteInput::default()
    };
    assert_eq!(route(&ours), to("edge-1", "edge-1:9100"));
    let bare = RouteInput {
        authority: Some("edge-1"),
        ..ours.clone()
    };
    assert_eq!(route(&bare), to("edge-1", "edge-1:10250"));
    let foreign = RouteInput {
        authority: Some("10.97.0.1:6443"),
        ..ours
    };
    assert_eq!(route(&foreign), to("edge-1", "edge-1:10250"));
}

#[test]
fn a_pod_before_dnat_stays_the_target() {
    let asked = RouteInput {
        original: Some(address("10.244.2.8:8443")),
        ..RouteInput::default()
    };
    assert_eq!(route(&asked), to("edge-2", "10.244.2.8:8443"));
}

#[test]
fn a_pod_of_another_node_is_no_target_for_the_snis_node() {
    let asked = RouteInput {
        sni: Some("edge-1"),
        original: Some(address("10.244.2.8:8443")),
        ..RouteInput::default()
    };
    assert_eq!(route(&asked), to("edge-1", "edge-1:8443"));
}

#[test]
fn an_unknown_name_is_unknown_and_an_empty_one_is_malformed() {
    let unknown = RouteInput {
        authority: Some("edge-9:80"),
        ..RouteInput::default()
    };
    assert_eq!(route(&unknown), Err(Reason::NodeUnknown));
    assert_eq!(route(&RouteInput::default()), Err(Reason::Malformed));
    let no_port = RouteInput {
        authority: Some("edge-1"),
        ..RouteInput::default()
    };
    assert_eq!(route(&no_port), Err(Reason::Malformed));
    let nonsense = RouteInput {
        authority: Some("edge-1:99999"),
        ..RouteInput::default()
    };
    assert_eq!(route(&nonsense), Err(Reason::Malformed));
}

fn at_any_name<'a>(sni: Option<&'a str>, authority: &'a str) -> RouteInput<'a> {
    RouteInput {
        sni,
        authority: Some(authority),
        services: ServiceNames::Service,
        port: Some(10250),
        ..RouteInput::default()
    }
}

#[test]
fn a_service_is_named_by_the_sni_or_by_the_host() {
    let printer = || to("edge-1", "printer.edge-1");
    for asked in [
        at_any_name(None, "printer.edge-1"),
        at_any_name(None, "Printer.Edge-1."),
        at_any_name(None, "printer.edge-1:10263"),
        at_any_name(Some("printer.edge-1"), "printer.edge-1:443"),
        at_any_name(Some("printer.edge-1"), "other.example"),
        at_any_name(Some("gateway.example"), "printer.edge-1"),
    ] {
        assert_eq!(route(&asked), printer(), "{asked:?}");
    }
    let session = RouteInput {
        authority: None,
        ..at_any_name(Some("printer.edge-1"), "")
    };
    assert_eq!(route(&session), printer());
    for host in ["a.printer.edge-1", "_x.edge-1", "printer.edge-9"] {
        let asked = at_any_name(None, host);
        assert_eq!(route(&asked), Err(Reason::NodeUnknown), "{host}");
    }
}

#[test]
fn sources_that_name_different_services_are_refused() {
    for (sni, host) in [
        ("printer.edge-1", "scanner.edge-1"),
        ("printer.edge-1", "printer.edge-2"),
        ("printer.edge-1", "edge-1"),
        ("printer.edge-1", "10.0.0.1"),
        ("edge-2", "printer.edge-1"),
    ] {
        let asked = at_any_name(Some(sni), host);
        assert_eq!(route(&asked), Err(Reason::Misdirected), "{sni} {host}");
    }
}

#[test]
fn a_name_below_that_of_a_node_is_ordinary_if_the_node_is_named_before() {
    let by_name = at_any_name(Some("edge-1"), "www.edge-1");
    let by_address = RouteInput {
        original: Some(address("10.0.0.1:10250")),
        ..at_any_name(Some("www.edge-1"), "www.edge-1")
    };
    let node = NodeName::parse("edge-1").unwrap();
    let by_listener = RouteInput {
        fixed: Some(&node),
        services: ServiceNames::Ordinary,
        ..at_any_name(Some("www.edge-1"), "www.edge-1")
    };
    for asked in [by_name, by_address, by_listener] {
        assert_eq!(route(&asked), to("edge-1", "edge-1:10250"), "{asked:?}");
    }
    let own_names = ["gateway.edge-1".to_owned()];
    let at_gateway = RouteInput {
        own_names: &own_names,
        ..at_any_name(Some("Gateway.edge-1"), "edge-2")
    };
    assert_eq!(route(&at_gateway), to("edge-2", "edge-2:10250"));
    let own_host = RouteInput {
        authority: Some("gateway.edge-1:443"),
        ..at_gateway
    };
    assert_eq!(route(&own_host), Err(Reason::NodeUnknown));
}

#[test]
fn only_the_target_of_a_proxy_names_the_port_of_a_service() {
    let asked = RouteInput {
        services: ServiceNames::ServiceAndPort,
        is_proxy: true,
        ..at_any_name(Some("proxy.edge-2"), "printer.edge-1:631")
    };
    assert_eq!(route(&asked), to("edge-1", "printer.edge-1:631"));
    // The SNI counts for a CONNECT at another listener.
    let contradicts = RouteInput {
        is_proxy: false,
        ..asked.clone()
    };
    assert_eq!(route(&contradicts), Err(Reason::Misdirected));
    let route = find_route(&asked, &nodes()).unwrap();
    assert_eq!((route.service(), route.port()), (Some("printer"), None));
}

#[test]
fn a_node_with_the_name_of_a_service_comes_first() {
    let writer = NodesWriter::default();
    for name in ["edge-1", "printer.edge-1"] {
        writer.upsert(NodeName::parse(name).unwrap(), Node::default());
    }
    assert_eq!(writer.reader().service_by_name("printer.edge-1"), None);
    for (sni, host) in [
        (None, "printer.edge-1"),
        (Some("printer.edge-1"), "other.example"),
    ] {
        let route = find_route(&at_any_name(sni, host), &writer.reader()).unwrap();
        assert_eq!(route.node.as_str(), "printer.edge-1");
        assert_eq!((route.service(), route.port()), (None, Some(10250)));
    }
}

/// Returns nodes of a cluster whose pods are followed: `edge-1`, whose `podCIDRs` name the wrong pods, `edge-2` and `cloud-1`.
fn nodes_with_pods() -> (NodesWriter, PodsWriter) {
    let writer = NodesWriter::default();
    let networks = ["10.240.0.0/12", "fd10::/64"].map(|net| net.parse().unwrap());
    writer.follow_pods(&networks);
    let member = |is_edge, address: &str| ClusterNode {
        is_edge,
        addresses: vec![address.parse().unwrap()],
        pod_networks: vec!["10.244.1.0/24".parse().unwrap()],
        ..ClusterNode::default()
    };
    let name = |text: &str| NodeName::parse(text).unwrap();
    let members = [
        (name("edge-1"), member(true, "10.0.0.1")),
        // A node whose own address is in the networks of pods.
        (name("edge-2"), member(true, "10.240.0.2")),
        (name("cloud-1"), member(false, "10.0.0.3")),
        (name("cloud-2"), member(false, "10.240.0.3")),
        // It claims the address of a pod of `edge-1`.
        (
            name("edge-4"),
            ClusterNode {
                pod_addresses: vec!["10.250.7.7".parse().unwrap()],
                ..member(true, "10.250.7.7")
            },
        ),
        // It claims the address of a pod in the cloud.
        (name("edge-3"), member(true, "10.250.9.12")),
    ];
    writer.replace_cluster(members.into());
    let mut pods = writer.pods(100).unwrap();
    let pod = |pod: &str, node: &str, address: &str| Pod {
        name: pod.into(),
        node: name(node),
        addresses: [address.parse().unwrap()].into(),
        ends_at: None,
    };
    let all = [
        pod("a/web", "edge-1", "10.250.7.7"),
        pod("a/other", "edge-1", "10.250.7.8"),
        Pod {
            addresses: [address("10.250.7.9:0").ip(), address("[fd10::7]:0").ip()].into(),
            ..pod("a/dual", "edge-1", "10.250.7.9")
        },
        pod("b/web", "edge-2", "10.244.1.9"),
        pod("c/web", "cloud-1", "10.244.1.10"),
        pod("d/web", "edge-9", "10.244.1.11"),
        pod("e/thief", "edge-2", "10.250.9.9"),
        pod("e/victim", "edge-1", "10.250.9.9"),
        pod("f/evil", "edge-1", "10.240.0.2"),
        pod("g/webhook", "cloud-1", "10.250.9.10"),
        pod("g/thief", "edge-1", "10.250.9.10"),
        pod("h/thief", "edge-1", "10.240.0.3"),
        pod("h/webhook", "cloud-1", "10.250.9.12"),
    ];
    pods.replace(all.into()).unwrap();
    (writer, pods)
}

fn to_pods<'a>(sni: Option<&'a str>, host: Option<&'a str>) -> RouteInput<'a> {
    RouteInput {
        sni,
        authority: host,
        port: Some(80),
        has_pod_names: true,
        ..RouteInput::default()
    }
}

fn route_in(nodes: &Nodes, asked: &RouteInput<'_>) -> Routed {
    match find_route(asked, nodes) {
        Ok(route) => to(route.node.as_str(), &route.target.to_string()),
        Err(error) => Err(error.reason),
    }
}

/// Checks the routes by these SNIs and hosts in a cluster whose pods are followed.
fn assert_routes(cases: &[(Option<&str>, Option<&str>, Routed)]) {
    let (writer, _pods) = nodes_with_pods();
    for (sni, host, expected) in cases {
        let asked = to_pods(*sni, *host);
        let found = route_in(&writer.reader(), &asked);
        assert_eq!(found, *expected, "{sni:?} {host:?}");
    }
}

#[test]
fn pod_objects_and_not_pod_networks_name_the_node_of_a_pod() {
    use Reason::NodeUnknown;
    let by_address = |host, expected| (None, Some(host), expected);
    assert_routes(&[
        by_address("10.250.7.7:8080", to("edge-1", "10.250.7.7:8080")),
        by_address("10.244.1.9", to("edge-2", "10.244.1.9:80")),
        // A pod in the cloud, no pod, a pod of an unknown node, and addresses of two pods.
        by_address("10.244.1.10", Err(NodeUnknown)),
        by_address("10.244.1.77", Err(NodeUnknown)),
        by_address("10.244.1.11", Err(NodeUnknown)),
        by_address("10.250.9.9", Err(NodeUnknown)),
        by_address("10.250.9.10", Err(NodeUnknown)),
        // A pod takes no address from a node, at the edge or elsewhere, and a node at the edge takes none from a pod elsewhere.
        by_address("10.240.0.2", to("edge-2", "edge-2:80")),
        by_address("10.240.0.3", Err(NodeUnknown)),
        by_address("10.250.9.12", Err(NodeUnknown)),
    ]);
    let (writer, _pods) = nodes_with_pods();
    for (original, expected) in [
        ("10.250.7.7:443", to("edge-1", "10.250.7.7:443")),
        ("10.244.1.77:443", Err(NodeUnknown)),
    ] {
        let fixed = NodeName::parse("edge-1").unwrap();
        let asked = RouteInput {
            sni: (original == "10.244.1.77:443").then_some("edge-1"),
            original: Some(address(original)),
            fixed: Some(&fixed),
            ..RouteInput::default()
        };
        assert_eq!(route_in(&writer.reader(), &asked), expected, "{original}");
    }
}

#[test]
fn the_name_of_a_pod_leads_to_its_address() {
    use Reason::NodeUnknown;
    let web = |port| to("edge-1", &format!("10.250.7.7:{port}"));
    assert_routes(&[
        (None, Some("web.a.pod:8080"), web(8080)),
        (None, Some("Web.A.Pod."), web(80)),
        (Some("web.a.pod"), None, web(80)),
        (Some("web.a.pod"), Some("app.example:9"), web(80)),
        (Some("web.a.pod"), Some("web.a.pod:9"), web(9)),
        (Some("web.a.pod"), Some("10.250.7.7:9"), web(9)),
        (None, Some("web.b.pod"), to("edge-2", "10.244.1.9:80")),
        (None, Some("web.c.pod"), Err(NodeUnknown)),
        (None, Some("web.d.pod"), Err(NodeUnknown)),
        (None, Some("victim.e.pod"), Err(NodeUnknown)),
        (None, Some("evil.f.pod"), Err(NodeUnknown)),
        (None, Some("nobody.a.pod"), Err(NodeUnknown)),
        // Both addresses of one pod, and the cluster's own name of an address, which is an ordinary host.
        (
            Some("dual.a.pod"),
            Some("[fd10::7]:9"),
            to("edge-1", "[fd10::7]:9"),
        ),
        (
            Some("edge-1"),
            Some("10-250-7-7.a.pod"),
            to("edge-1", "edge-1:80"),
        ),
    ]);
}

#[test]
fn a_pod_that_contradicts_another_source_or_is_unknown_is_refused() {
    use Reason::{Misdirected, NodeUnknown};
    assert_routes(&[
        (Some("web.a.pod"), Some("other.a.pod"), Err(Misdirected)),
        (Some("web.a.pod"), Some("10.250.7.8"), Err(Misdirected)),
        (Some("web.a.pod"), Some("edge-1"), Err(Misdirected)),
        (Some("edge-2"), Some("web.a.pod"), Err(Misdirected)),
        (Some("edge-1"), Some("10.244.1.77"), Err(NodeUnknown)),
        (Some("edge-1"), Some("nobody.a.pod"), Err(NodeUnknown)),
        (Some("nobody.a.pod"), Some("edge-1"), Err(NodeUnknown)),
        (
            Some("edge-1"),
            Some("10.250.7.7"),
            to("edge-1", "10.250.7.7:80"),
        ),
        // The host of a pod in the cloud is an ordinary one.
        (
            Some("edge-1"),
            Some("10.244.1.10:6443"),
            to("edge-1", "edge-1:80"),
        ),
    ]);
}

#[test]
fn names_of_pods_are_ordinary_at_listeners_for_certain_nodes() {
    let (writer, _pods) = nodes_with_pods();
    let fixed = NodeName::parse("edge-2").unwrap();
    for host in ["web.a.pod", "nobody.a.pod"] {
        let asked = RouteInput {
            fixed: Some(&fixed),
            has_pod_names: false,
            ..to_pods(Some(host), Some(host))
        };
        assert_eq!(
            route_in(&writer.reader(), &asked),
            to("edge-2", "edge-2:80")
        );
    }
    let own_names = ["web.a.pod".to_owned()];
    let at_gateway = RouteInput {
        own_names: &own_names,
        ..to_pods(Some("web.a.pod"), Some("edge-2"))
    };
    assert_eq!(
        route_in(&writer.reader(), &at_gateway),
        to("edge-2", "edge-2:80")
    );
}

#[test]
fn a_node_and_a_zone_come_before_the_name_of_a_pod() {
    let (writer, _pods) = nodes_with_pods();
    writer.upsert(NodeName::parse("web.b.pod").unwrap(), Node::default());
    writer.replace_zones(&["nodes.example".to_owned()]);
    for (host, expected) in [
        ("web.b.pod", to("web.b.pod", "web.b.pod:80")),
        ("web.a.pod.nodes.example", to("edge-1", "10.250.7.7:80")),
        ("web.a.pod.other.example", Err(Reason::NodeUnknown)),
    ] {
        let asked = to_pods(None, Some(host));
        assert_eq!(route_in(&writer.reader(), &asked), expected, "{host}");
    }
}

#[test]
fn the_gateway_dials_only_pods_that_are_known_to_be_elsewhere() {
    let (writer, _pods) = nodes_with_pods();
    let nodes = writer.reader();
    for (address, is_dialled) in [
        ("10.244.1.10", true),
        ("10.250.9.10", true),
        ("192.0.2.1", true),
        ("10.0.0.3", true),
        ("10.240.0.3", true),
        ("10.250.9.12", true),
        ("10.250.7.7", false),
        ("10.244.1.77", false),
        ("10.250.9.9", false),
    ] {
        let checked = check_pod_elsewhere(address.parse().unwrap(), &nodes);
        assert_eq!(checked.is_ok(), is_dialled, "{address}");
    }
}

#[test]
fn a_route_has_the_only_pod_with_the_address_as_it_was() {
    let (writer, mut pods) = nodes_with_pods();
    let nodes = writer.reader();
    let pod = |name: &str| DestinationPod::Pod(name.into());
    let routed = |host: &str| find_route(&to_pods(None, Some(host)), &nodes).unwrap();
    for (host, expected) in [
        ("10.250.7.7", pod("a/web")),
        ("[::ffff:10.250.7.7]:80", pod("a/web")),
        ("web.a.pod", pod("a/web")),
        ("fd10::7", pod("a/dual")),
        // Addresses and names of nodes, also if a pod claims the address.
        ("edge-1", DestinationPod::None),
        ("10.240.0.2", DestinationPod::None),
    ] {
        let host = match host.parse() {
            Ok(IpAddr::V6(_)) => format!("[{host}]"),
            _ => host.to_owned(),
        };
        assert_eq!(routed(&host).pod, expected, "{host}");
    }
    let route = routed("10.250.7.7");
    pods.remove("a/web");
    let unknown = route.clone().with_pod(&nodes);
    assert_eq!(unknown.pod, DestinationPod::Unknown);
    let other = Pod {
        name: "z/other".into(),
        node: route.node.clone(),
        addresses: [address("10.250.7.7:0").ip()].into(),
        ends_at: None,
    };
    pods.upsert(other).unwrap();
    assert_eq!(routed("10.250.7.7").pod, pod("z/other"));
    assert_eq!(route.pod, pod("a/web"), "the stream leads to the old pod");
    assert!(route.check_same_pod(&nodes).is_err());
    unknown.check_same_pod(&nodes).unwrap();
}

#[test]
fn an_address_that_the_gateway_dials_has_the_pod_outside_the_edges() {
    let (writer, mut pods) = nodes_with_pods();
    let nodes = writer.reader();
    let at = |text: &str| nodes.destination_pod(text.parse().unwrap(), None);
    let pod = |name: &str| DestinationPod::Pod(name.into());
    for (address, expected) in [
        ("10.244.1.10", pod("c/web")),
        // A pod at the edge takes no address from a pod elsewhere.
        ("10.250.9.10", pod("g/webhook")),
        // Nodes elsewhere, a pod at the edge, no pod, and pods at the edge with one address.
        ("10.0.0.3", DestinationPod::None),
        ("10.240.0.3", DestinationPod::None),
        ("10.250.7.7", DestinationPod::Unknown),
        ("10.244.1.77", DestinationPod::Unknown),
        ("10.250.9.9", DestinationPod::Unknown),
        ("192.0.2.1", DestinationPod::None),
    ] {
        assert_eq!(at(address), expected, "{address}");
    }
    let second = Pod {
        name: "x/second".into(),
        node: NodeName::parse("cloud-1").unwrap(),
        addresses: [address("10.244.1.10:0").ip()].into(),
        ends_at: None,
    };
    pods.upsert(second).unwrap();
    assert_eq!(at("10.244.1.10"), DestinationPod::Unknown);
}

#[test]
fn addresses_that_lead_to_pods_of_edges_are_listed() {
    let (writer, mut pods) = nodes_with_pods();
    let nodes = writer.reader();
    let listed = || {
        let all = nodes.edge_pod_addresses().unwrap();
        all.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    // Neither addresses of nodes, nor of pods elsewhere, nor of several pods, nor in the network of a node elsewhere.
    assert_eq!(
        listed(),
        ["10.250.7.7", "10.250.7.8", "10.250.7.9", "fd10::7"]
    );
    assert!(!nodes.awaits_pods());
    let mut changes = writer.subscribe_pods().unwrap();
    pods.remove("a/web");
    assert!(changes.has_changed().unwrap());
    changes.mark_unchanged();
    assert_eq!(listed(), ["10.250.7.8", "10.250.7.9", "fd10::7"]);
    pods.remove("a/web");
    assert!(!changes.has_changed().unwrap());

    let writer = NodesWriter::default();
    assert!(writer.subscribe_pods().is_none() && !writer.reader().awaits_pods());
    writer.follow_pods(&["10.240.0.0/12".parse().unwrap()]);
    assert!(writer.reader().awaits_pods());
    assert_eq!(writer.reader().edge_pod_addresses(), None);
    let changes = writer.subscribe_pods().unwrap();
    writer.pods(1).unwrap().set_lost("forbidden");
    assert!(!writer.reader().awaits_pods() && changes.has_changed().unwrap());
    assert_eq!(writer.reader().edge_pod_addresses(), None);
}
