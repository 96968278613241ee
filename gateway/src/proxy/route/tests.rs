//! One test for each rule of routing.

use super::*;
use crate::state::{Node, NodesWriter};

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
