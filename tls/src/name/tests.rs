use super::*;

#[test]
fn a_name_is_lower_cased() {
    assert_eq!(
        NodeName::parse("Edge-1.Site.Example").unwrap().as_str(),
        "edge-1.site.example"
    );
}

#[test]
fn invalid_dns_names_are_refused() {
    let long_label = "a".repeat(64);
    let long_name = vec!["a".repeat(63); 4].join(".");
    for bad in [
        "",
        ".",
        "a..b",
        "-a",
        "a-",
        "a_b",
        "a/b",
        "a b",
        "é",
        "a.",
        &long_label,
        &long_name,
    ] {
        assert!(NodeName::parse(bad).is_err(), "{bad}");
    }
    assert!(NodeName::parse(&"a".repeat(63)).is_ok());
}

#[test]
fn a_name_survives_json_and_a_bad_one_does_not() {
    let name: NodeName = serde_json::from_str("\"Edge-1\"").unwrap();
    assert_eq!(serde_json::to_string(&name).unwrap(), "\"edge-1\"");
    assert!(serde_json::from_str::<NodeName>("\"../x\"").is_err());
}

#[test]
fn a_node_named_by_its_address_becomes_an_address() {
    let node = NodeName::parse("10.0.0.7").unwrap();
    assert_eq!(HostName::from(&node), HostName::Ip([10, 0, 0, 7].into()));
    assert_eq!(HostName::parse("::1").unwrap().to_string(), "::1");
    assert_eq!(
        HostName::parse("GW.example").unwrap().to_string(),
        "gw.example"
    );
}

#[test]
fn a_clients_name_needs_no_quoting() {
    assert!(check_client("system:serviceaccount:ns:name").is_ok());
    for bad in ["", "a b", "a,b", "a/b", "a\n", "%41", &"a".repeat(65)] {
        assert!(check_client(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn a_pattern_matches_the_labels_of_its_stars() {
    let means = |pattern: &str, node: &str| {
        let node = NodeName::parse(node).unwrap();
        NodePattern::parse(pattern).unwrap().matches(&node)
    };
    for (pattern, node) in [
        ("edge-1", "edge-1"),
        ("Edge-*", "edge-1"),
        ("*", "a"),
        ("*.*", "a.b"),
        ("rack-*.site.example", "rack-7.site.example"),
        ("10.0.0.*", "10.0.0.7"),
        ("localhost", "localhost"),
        ("*-eu", "edge-1-eu"),
        ("a*b*c", "abc"),
        ("a*b*c", "a-b-bc"),
        ("a*ab", "aab"),
    ] {
        assert!(means(pattern, node), "{pattern} {node}");
    }
    for (pattern, node) in [
        ("edge-1", "edge-10"),
        ("edge-*", "hedge-1"),
        ("a*b*c", "acb"),
        ("ab*ba", "aba"),
        ("*-eu", "edge-1-eu-2"),
        ("*", "a.b"),
        ("*", "10.0.0.7"),
        ("*", "localhost"),
    ] {
        assert!(!means(pattern, node), "{pattern} {node}");
    }
    for bad in ["", "edge_*", "a..*", "-*"] {
        assert!(NodePattern::parse(bad).is_err(), "{bad}");
    }
    assert_eq!(NodePattern::parse("a*").unwrap().node(), None);
}
