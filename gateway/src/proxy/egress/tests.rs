//! Decisions by the rules.

use super::rules::{EgressTarget, Subject};
use crate::{config::Egress, proxy::route::Route, state::pods::DestinationPod};
use causeway_certs::NodeName;
use causeway_tunnel::Target;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

fn egress(rules: &Value) -> Egress {
    let destinations = json!({
        "kube-apiserver": "10.0.0.7:6443",
        "registry": "registry.example:5000",
        "local": "127.0.0.1:53",
    });
    serde_json::from_value(json!({ "destinations": destinations, "rules": rules })).unwrap()
}

fn egress_target(target: &str, rules: &Egress) -> EgressTarget {
    let target: Target = target.parse().unwrap();
    EgressTarget::new(&target, rules).unwrap()
}

fn with_subject<T>(node: &str, read: impl FnOnce(Subject<'_>) -> T) -> T {
    let labels = BTreeMap::from([("site".to_owned(), "berlin".to_owned())]);
    read(Subject {
        node: &NodeName::parse(node).unwrap(),
        pool: Some("factory"),
        labels: &labels,
    })
}

/// Returns the name of the rule that allows a connection to this address for this target. The address 10.0.0.7 is the gateway's own.
fn allowed_by(rules: &Value, target: &str, address: &str) -> Option<String> {
    let rules = egress(rules);
    let target = egress_target(target, &rules);
    let ip: IpAddr = address.parse().unwrap();
    let address = SocketAddr::new(ip, target.host_port.port);
    let is_own = ip.to_canonical() == IpAddr::from([10, 0, 0, 7]);
    with_subject("edge-1", |subject| {
        let address = (address, is_own, &DestinationPod::None);
        let rule = subject.address_rule(&target, address, &rules)?;
        assert!(
            subject.may_reach((&target, None), &rules),
            "{target} is resolved"
        );
        Some(rule.rule.to_string())
    })
}

#[test]
fn a_rule_allows_only_its_subjects() {
    for (who, allowed) in [
        (json!({ "nodes": ["edge-*"] }), true),
        (json!({ "nodes": ["edge-2", "edge-1"] }), true),
        (json!({ "nodes": ["edge-2"] }), false),
        (json!({ "pools": ["fact*"] }), true),
        (json!({ "pools": ["office"] }), false),
        (json!({ "labels": { "site": "berlin" } }), true),
        (json!({ "labels": { "site": "bonn" } }), false),
        (json!({ "nodes": ["edge-1"], "pools": ["office"] }), false),
    ] {
        let rules = json!([{ "who": who, "to": { "names": ["*"] } }]);
        let found = allowed_by(&rules, "example.com:443", "93.184.216.34");
        assert_eq!(found.is_some(), allowed, "{who}");
    }
    let nobody = json!([]);
    assert_eq!(
        allowed_by(&nobody, "example.com:443", "93.184.216.34"),
        None
    );
}

#[test]
fn names_networks_and_ports_restrict_a_rule() {
    let rules = json!([
        { "name": "api", "to": { "destinations": ["kube-apiserver", "registry"] } },
        { "name": "hub", "to": { "names": ["*.docker.io", "quay.io"], "ports": [443] } },
        { "name": "net", "to": { "networks": ["10.1.0.0/16", "2001:db8::/32"], "ports": ["8000-8999"] } },
    ]);
    for (target, address, rule) in [
        ("kube-apiserver:443", "10.0.0.7", Some("api")),
        ("KUBE-apiserver.:1", "10.0.0.7", Some("api")),
        ("registry:443", "93.184.216.34", Some("api")),
        ("local:53", "127.0.0.1", None),
        ("index.docker.io:443", "93.184.216.34", Some("hub")),
        ("QUAY.io.:443", "93.184.216.34", Some("hub")),
        ("quay.io:80", "93.184.216.34", None),
        ("docker.io:443", "93.184.216.34", None),
        ("quay.io.evil.example:443", "93.184.216.34", None),
        ("10.1.2.3:8080", "10.1.2.3", Some("net")),
        ("[::ffff:10.1.2.3]:8080", "::ffff:10.1.2.3", Some("net")),
        ("anything.example:8080", "10.1.2.3", Some("net")),
        ("10.2.2.3:8080", "10.2.2.3", None),
        ("10.1.2.3:80", "10.1.2.3", None),
        ("[2001:db8::1]:8999", "2001:db8::1", Some("net")),
    ] {
        let found = allowed_by(&rules, target, address);
        assert_eq!(found.as_deref(), rule, "{target} at {address}");
    }
}

/// A name may resolve to any address, so each address is checked, whatever rule allows the name.
#[test]
fn special_addresses_are_refused_unless_a_rule_lists_them() {
    let wide = json!([
        { "to": { "names": ["*"], "networks": ["0.0.0.0/0", "::/0"] } },
        { "to": { "destinations": ["registry"] } },
    ]);
    for address in [
        "127.0.0.1",
        "127.8.9.1",
        "::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "fd00:ec2::254",
        "100.100.100.200",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "255.255.255.255",
        "fe80::1",
        "ff02::1",
        // The gateway's own.
        "10.0.0.7",
        "::ffff:10.0.0.7",
    ] {
        for target in ["rebinding.example:80", "registry:80"] {
            let found = allowed_by(&wide, target, address);
            assert_eq!(found, None, "{target} at {address}");
        }
        let explicit = json!([{ "to": { "networks": [address] } }]);
        let mut target = Target::new(address, 80).to_string();
        if address == "0.0.0.0" || address == "::" {
            target = "any.example:80".to_owned();
        }
        let canonical = address.parse::<IpAddr>().unwrap().to_canonical();
        let listed = canonical.to_string() == address;
        assert_eq!(
            allowed_by(&explicit, &target, address).is_some(),
            listed,
            "{address}"
        );
    }
    let named = json!([{ "to": { "destinations": ["local"] } }]);
    assert!(allowed_by(&named, "local:1", "127.0.0.1").is_some());
    assert_eq!(allowed_by(&named, "localhost:53", "127.0.0.1"), None);
}

#[test]
fn a_name_is_resolved_only_if_a_rule_can_allow_it() {
    for (to, resolved) in [
        (json!({ "names": ["*.example.com"] }), false),
        (json!({ "nodes": ["edge-2"] }), false),
        (json!({ "names": ["secret.internal"] }), true),
        (json!({ "networks": ["10.0.0.0/8"] }), true),
        (json!({ "networks": ["10.0.0.0/8"], "ports": [80] }), false),
    ] {
        let rules = egress(&json!([{ "to": to }]));
        let target = egress_target("secret.internal:443", &rules);
        let found = with_subject("edge-1", |subject| {
            subject.may_reach((&target, None), &rules)
        });
        assert_eq!(found, resolved, "{to}");
    }
}

#[test]
fn nodes_are_reached_only_by_rules_for_nodes() {
    let node = NodeName::parse("edge-2").unwrap();
    let route = Route::new(node, Target::new("edge-2", 9100));
    for (to, allowed) in [
        (json!({ "nodes": ["edge-2"] }), true),
        (json!({ "nodes": ["*"], "ports": [9100] }), true),
        (json!({ "nodes": ["*"], "ports": [22] }), false),
        (json!({ "nodes": ["edge-3"] }), false),
        (json!({ "names": ["*"], "networks": ["0.0.0.0/0"] }), false),
    ] {
        let rules = egress(&json!([{ "to": to }]));
        let rule = with_subject("edge-1", |subject| subject.node_rule(&route, &rules));
        assert_eq!(rule.is_some(), allowed, "{to}");
    }
}

#[test]
fn a_destination_is_current_while_its_name_has_the_same_address() {
    let before = egress(&json!([]));
    let (named, host) = (
        egress_target("registry:1", &before),
        egress_target("a.example:1", &before),
    );
    let with = |destinations: Value| -> Egress {
        serde_json::from_value(json!({ "destinations": destinations })).unwrap()
    };
    for (destinations, is_current) in [
        (json!({ "registry": "registry.example:5000" }), true),
        (json!({ "registry": "registry.example:5001" }), false),
        (json!({ "registry": "other.example:5000" }), false),
        (json!({}), false),
    ] {
        let after = with(destinations);
        assert_eq!(named.is_current(&after), is_current, "{after:?}");
        assert!(host.is_current(&after));
    }
}

#[test]
fn pods_are_reached_by_rules_for_their_namespaces() {
    let pod = DestinationPod::Pod("shop/web".into());
    let node = NodeName::parse("edge-2").unwrap();
    let mut route = Route::new(node, Target::new("10.250.0.7", 80));
    let address: SocketAddr = "10.250.0.7:80".parse().unwrap();
    for (to, allowed) in [
        (json!({ "pod_namespaces": ["shop"] }), true),
        (json!({ "pod_namespaces": ["sh*"], "ports": [80] }), true),
        (json!({ "pod_namespaces": ["sh*"], "ports": [22] }), false),
        (json!({ "pod_namespaces": ["bank"] }), false),
    ] {
        let rules = egress(&json!([{ "to": to }]));
        let by_name = egress_target("web.shop.pod:80", &rules);
        let by_address = egress_target("10.250.0.7:80", &rules);
        let is_allowed = |pod: &DestinationPod, is_own| {
            with_subject("edge-1", |subject| {
                let address = (address, is_own, pod);
                subject.address_rule(&by_address, address, &rules).is_some()
            })
        };
        assert_eq!(is_allowed(&pod, false), allowed, "{to}");
        for other in [DestinationPod::None, DestinationPod::Unknown] {
            assert!(!is_allowed(&other, false), "{to} {other:?}");
            route.pod = other;
            let rule = with_subject("edge-1", |subject| subject.node_rule(&route, &rules));
            assert_eq!(rule, None, "{to}");
        }
        assert!(!is_allowed(&pod, true), "the gateway's own address");
        route.pod = pod.clone();
        let rule = with_subject("edge-1", |subject| subject.node_rule(&route, &rules));
        assert_eq!(rule.is_some(), allowed, "{to}");
        let may_reach = |target, namespace| {
            with_subject("edge-1", |subject| {
                subject.may_reach((target, namespace), &rules)
            })
        };
        assert_eq!(may_reach(&by_name, Some("shop")), allowed, "{to}");
        assert!(!may_reach(&egress_target("a.example:80", &rules), None));
    }
}
