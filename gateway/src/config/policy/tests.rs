use super::*;
use serde_json::{Value, from_value, json};

fn faults(rule: Value) -> Vec<String> {
    let mut rule = rule;
    if rule.get("then").is_none() {
        rule["then"] = "allow".into();
    }
    let policy: Policy = from_value(json!({ "rules": [rule] })).unwrap();
    let faults = policy.validate().into_iter();
    faults.map(|fault| fault.path).collect()
}

#[test]
fn a_rule_with_conditions_is_valid() {
    let rule = json!({
        "name": "scraping",
        "who": { "users": ["prometheus", "*"], "groups": ["ops"], "spiffe": ["spiffe://td/ns/*"], "networks": ["10.0.0.0/8", "::1"] },
        "where": { "nodes": ["edge-*", "a.b"], "pools": ["north"], "labels": { "tier": "gold" } },
        "what": { "ports": [9100, "30000-32767"], "methods": ["GET", "M-SEARCH"], "paths": ["/", "/metrics"], "streams": ["request"] },
        "then": "deny",
    });
    assert_eq!(faults(rule.clone()), [""; 0]);
    assert_eq!(faults(json!({})), [""; 0]);
    let direct = json!({ "where": { "direct": ["10.96.0.0/12", "fd00::1"] } });
    assert_eq!(faults(direct), [""; 0]);
    for place in [
        json!({ "pod_namespaces": ["shop", "team-*"], "nodes": ["edge-*"] }),
        json!({ "pod_namespaces": ["*"], "direct": ["10.244.0.0/16"] }),
    ] {
        assert_eq!(faults(json!({ "where": place })), [""; 0]);
    }
    for rule in [rule, json!({ "then": "allow" })] {
        let read: Rule = from_value(rule).unwrap();
        let written = serde_json::to_value(&read).unwrap();
        assert_eq!(from_value::<Rule>(written).unwrap(), read);
    }
}

#[test]
fn a_present_but_empty_list_is_a_fault_and_never_any() {
    for (rule, path) in [
        (json!({ "who": {} }), "rules[0].who"),
        (json!({ "who": { "users": [] } }), "rules[0].who.users"),
        (
            json!({ "who": { "networks": [] } }),
            "rules[0].who.networks",
        ),
        (json!({ "where": {} }), "rules[0].where"),
        (json!({ "where": { "nodes": [] } }), "rules[0].where.nodes"),
        (
            json!({ "where": { "labels": {} } }),
            "rules[0].where.labels",
        ),
        (
            json!({ "where": { "direct": [] } }),
            "rules[0].where.direct",
        ),
        (
            json!({ "where": { "services": [] } }),
            "rules[0].where.services",
        ),
        (
            json!({ "where": { "pod_namespaces": [] } }),
            "rules[0].where.pod_namespaces",
        ),
        (json!({ "what": {} }), "rules[0].what"),
        (
            json!({ "what": { "streams": [] } }),
            "rules[0].what.streams",
        ),
        (json!({ "name": " " }), "rules[0].name"),
    ] {
        assert_eq!(faults(rule), [path]);
    }
}

#[test]
fn a_condition_on_pods_that_cannot_match_is_a_fault() {
    let path = "rules[0].where.pod_namespaces";
    let name = json!({ "where": { "pod_namespaces": ["shop", "web.shop"] } });
    assert_eq!(faults(name), [format!("{path}[1]")]);
    let service = json!({ "where": { "pod_namespaces": ["shop"], "services": ["ssh"] } });
    assert_eq!(faults(service), [path]);
}

#[test]
fn a_rule_that_cannot_match_is_a_fault() {
    for (rule, path) in [
        (
            json!({ "where": { "labels": { "tier": "g*" } } }),
            "rules[0].where.labels",
        ),
        (
            json!({ "where": { "labels": { "tier": "" } } }),
            "rules[0].where.labels",
        ),
        (
            json!({ "where": { "direct": ["10.0.0.0/8"], "nodes": ["*"] } }),
            "rules[0].where.direct",
        ),
        (
            json!({ "where": { "direct": ["10.0.0.0/8"], "services": ["*"] } }),
            "rules[0].where.direct",
        ),
        (
            json!({ "where": { "services": ["printer.edge-1"] } }),
            "rules[0].where.services[0]",
        ),
        (
            json!({ "where": { "services": ["ssh"] }, "what": { "ports": [22] } }),
            "rules[0].what.ports",
        ),
        (json!({ "who": { "users": [""] } }), "rules[0].who.users[0]"),
        (
            json!({ "who": { "groups": ["ops "] } }),
            "rules[0].who.groups[0]",
        ),
        (
            json!({ "who": { "spiffe": ["*"] } }),
            "rules[0].who.spiffe[0]",
        ),
        (
            json!({ "where": { "nodes": ["edge-1", "Edge-2"] } }),
            "rules[0].where.nodes[1]",
        ),
        (
            json!({ "where": { "nodes": ["edge-[12]"] } }),
            "rules[0].where.nodes[0]",
        ),
        (
            json!({ "what": { "methods": ["get"] } }),
            "rules[0].what.methods[0]",
        ),
        (
            json!({ "what": { "paths": ["metrics"] } }),
            "rules[0].what.paths[0]",
        ),
        (
            json!({ "what": { "paths": ["/metrics/"] } }),
            "rules[0].what.paths[0]",
        ),
        (
            json!({ "what": { "paths": ["/metrics/*"] } }),
            "rules[0].what.paths[0]",
        ),
        (
            json!({ "what": { "paths": ["/a%2fb"] } }),
            "rules[0].what.paths[0]",
        ),
        (
            json!({ "what": { "paths": ["/%61"] } }),
            "rules[0].what.paths[0]",
        ),
    ] {
        assert_eq!(faults(rule), [path]);
    }
}

#[test]
fn ports_are_one_or_from_one_to_another() {
    for (text, first, last) in [("22", 22, 22), ("1-65535", 1, 65535), ("80 - 90", 80, 90)] {
        assert_eq!(text.parse(), Ok(PortRange(first..=last)));
    }
    for text in [
        "0", "65536", "9-5", "-", "1-", "-5", "http", "", "0-5", "1-2-3",
    ] {
        assert!(
            text.parse::<PortRange>()
                .unwrap_err()
                .contains("30000-32767"),
            "{text}"
        );
    }
    assert!(from_value::<PortRange>(json!(-1)).is_err());
    assert_eq!(
        from_value::<PortRange>(json!(22)).unwrap().to_string(),
        "22"
    );
}

#[test]
fn a_path_that_apps_read_alike_is_decoded() {
    for (sent, means) in [
        ("/", "/"),
        ("/metrics", "/metrics"),
        ("/logs/", "/logs/"),
        ("/%65xec/a%20b", "/exec/a b"),
        ("/a:b@c,d=e+f~g!$&'()*", "/a:b@c,d=e+f~g!$&'()*"),
        ("/%C3%A9", "/é"),
    ] {
        assert_eq!(canonical(sent).as_deref(), Some(means), "{sent}");
    }
}

#[test]
fn an_ambiguous_path_is_not_normalized() {
    for sent in [
        "",
        "*",
        "metrics",
        "//exec",
        "/a//b",
        "/a/../exec",
        "/a/%2e%2e/exec",
        "/./exec",
        "/..",
        "/a%2fexec",
        "/a%2Fexec",
        "/a%5cexec",
        "/a\\exec",
        "/exec;x=1",
        "/exec%3bx",
        "/%2565xec",
        "/exec%00",
        "/exec%0a",
        "/%ff",
        "/exec%3fx",
        "/a%",
        "/a%zz",
    ] {
        assert_eq!(canonical(sent), None, "{sent}");
    }
}
