use super::*;
use crate::cli::operator::{DataDir, PolicyFile, PolicyTest};
use causeway_certs::NodeRecord;
use std::path::PathBuf;

const RULES: &str = "\
rules:
  - name: no shells on gold
    where: { labels: { tier: gold } }
    what: { paths: [/exec] }
    then: deny
  - who: { groups: [ops] }
    then: allow
";

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn ask(&self, node: &str) -> PolicyCheck {
        PolicyCheck {
            file: PolicyFile {
                policy: self.write("policy.yaml", RULES),
            },
            user: Some("ann".into()),
            groups: vec!["ops".into()],
            uris: Vec::new(),
            from: None,
            pool: None,
            labels: Vec::new(),
            upgrade: true,
            service: None,
            pod_namespace: None,
            pod_node: None,
            data: DataDir {
                data_dir: self.0.path().join("data"),
            },
            method: Method::POST,
            url: format!("https://{node}:10250/exec/ns/pod/c?command=sh"),
        }
    }
}

#[test]
fn a_request_without_a_scheme_is_no_url() {
    for url in [
        "edge-1:9100",
        "edge-1:9100/metrics",
        "ftp://edge-1:9100/",
        "/metrics",
    ] {
        let error = RequestSpec::parse(&Method::GET, (url, None), false).unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains("write https://edge-1:10250/metrics"),
            "{error}"
        );
    }
    assert!(RequestSpec::parse(&Method::GET, ("http://edge-1:9100", None), false).is_ok());
    assert!(RequestSpec::parse(&Method::CONNECT, ("edge-1:22", None), false).is_ok());
}

fn decided(ask: &PolicyCheck) -> String {
    let rules = read(&ask.file.policy).unwrap();
    let mut written =
        RequestSpec::parse(&ask.method, (&ask.url, ask.service.as_deref()), ask.upgrade)
            .and_then(|request| request.with_pod(ask.pod_namespace.as_deref()))
            .unwrap();
    let client = Subject {
        user: ask.user.as_deref(),
        groups: &ask.groups,
        uris: &ask.uris,
        source: ask.from,
    };
    let (node, _) = confirmed_node(ask, &mut written.to).unwrap();
    let decision = written.decide(&rules, &ask.method, &client, &node);
    format_decision(&decision, Path::new("policy.yaml"))
}

#[test]
fn a_decision_comes_with_the_line_that_made_it() {
    let files = Files::new();
    let mut ask = files.ask("edge-1");
    assert_eq!(decided(&ask), "allow: rules[1] (policy.yaml:6)");
    assert!(check(&ask).is_ok());
    ask.labels = vec![("tier".into(), "gold".into())];
    assert_eq!(decided(&ask), "deny: no shells on gold (policy.yaml:2)");
    assert!(check(&ask).is_err());
    ask.groups.clear();
    ask.labels.clear();
    assert_eq!(decided(&ask), "deny: no rule of policy.yaml matches");
}

#[test]
fn a_nodes_labels_are_those_that_its_gateway_confirmed() {
    let files = Files::new();
    let ask = files.ask("edge-1");
    let store = Store::open(&ask.data.data_dir, OpenMode::Create).unwrap();
    let record = NodeRecord {
        node: NodeName::parse("edge-1").unwrap(),
        addresses: Vec::new(),
        pool: None,
        labels: [("tier".to_owned(), "gold".to_owned())].into(),
        enrolled_at: 0,
        order: None,
        serial: "1".into(),
        root: None,
        not_after: None,
        revoked: None,
        follows_cluster: false,
        join_key: None,
        other: causeway_certs::OtherFields::new(),
    };
    store.nodes().put(record).unwrap();
    assert_eq!(decided(&ask), "deny: no shells on gold (policy.yaml:2)");
}

#[test]
fn a_direct_target_is_decided_by_address_and_a_node_by_its_name() {
    let files = Files::new();
    let text = "\
rules:
  - { name: services, where: { direct: [10.96.0.0/12] }, then: allow }
  - { name: north, where: { nodes: [edge-1] }, then: allow }
";
    let mut ask = files.ask("edge-1");
    ask.file.policy = files.write("direct.yaml", text);
    ask.method = Method::CONNECT;
    let store = Store::open(&ask.data.data_dir, OpenMode::Create).unwrap();
    let record = NodeRecord {
        addresses: vec!["10.1.0.1".parse().unwrap()],
        ..NodeRecord::name_only(&NodeName::parse("edge-1").unwrap(), 0)
    };
    store.nodes().put(record).unwrap();
    for (target, said) in [
        ("10.96.0.10:443", "allow: services (policy.yaml:2)"),
        ("10.1.0.2:443", "deny: no rule of policy.yaml matches"),
        ("10.1.0.1:443", "allow: north (policy.yaml:3)"),
        ("edge-1:443", "allow: north (policy.yaml:3)"),
    ] {
        ask.url = target.to_owned();
        assert_eq!(decided(&ask), said, "{target}");
    }
}

#[test]
fn a_label_that_only_the_cluster_knows_is_not_guessed() {
    let files = Files::new();
    let key = "node-restriction.kubernetes.io/tier";
    let mut ask = files.ask("edge-1");
    ask.file.policy = files.write(
        "restricted.yaml",
        &RULES.replace("tier:", &format!("{key}:")),
    );
    let error = check(&ask).unwrap_err().to_string();
    assert!(error.contains(key) && error.contains("--label"), "{error}");
    // The policy does not use it.
    ask.url = "https://edge-1:10250/metrics".to_owned();
    assert!(check(&ask).is_ok());
    ask.url = files.ask("edge-1").url;
    for (value, may) in [("tin", true), ("gold", false)] {
        ask.labels = vec![(key.to_owned(), value.to_owned())];
        assert_eq!(check(&ask).is_ok(), may, "{value}");
    }
    // A token has confirmed it.
    ask.labels.clear();
    let store = Store::open(&ask.data.data_dir, OpenMode::Create).unwrap();
    let record = NodeRecord {
        labels: [(key.to_owned(), "tin".to_owned())].into(),
        ..NodeRecord::name_only(&NodeName::parse("edge-1").unwrap(), 0)
    };
    store.nodes().put(record).unwrap();
    assert!(check(&ask).is_ok());
}

#[test]
fn a_pool_that_only_the_cluster_knows_is_not_guessed() {
    let files = Files::new();
    let mut ask = files.ask("edge-1");
    let by_pool = "where: { pools: [\"north*\"], labels: { tier: gold } }";
    for rules in [
        RULES.replace("labels: { tier: gold }", "pools: [\"north*\"]"),
        RULES.replace("where: { labels: { tier: gold } }", by_pool),
    ] {
        ask.file.policy = files.write("pools.yaml", &rules);
        let error = check(&ask).unwrap_err();
        assert!(!error.is::<Denied>(), "{error}");
        let error = error.to_string();
        assert!(
            error.contains("pool of edge-1") && error.contains("--pool"),
            "{error}"
        );
    }
    // The policy does not use it.
    let url = std::mem::replace(&mut ask.url, "https://edge-1:10250/metrics".to_owned());
    assert!(check(&ask).is_ok());
    ask.url = url;
    for (pool, may) in [("south", true), ("", true), ("north-1", true)] {
        ask.pool = Some(pool.to_owned());
        assert_eq!(check(&ask).is_ok(), may, "{pool}: a label is missing");
    }
    ask.labels = vec![("tier".into(), "gold".into())];
    assert!(check(&ask).unwrap_err().is::<Denied>());
    // For a gateway that knows the node, no token has given the node a pool.
    ask.pool = None;
    let store = Store::open(&ask.data.data_dir, OpenMode::Create).unwrap();
    let record = NodeRecord::name_only(&NodeName::parse("edge-1").unwrap(), 0);
    store.nodes().put(record).unwrap();
    assert!(check(&ask).is_ok());
}

#[test]
fn a_label_that_no_node_can_have_is_named_with_its_rules() {
    let files = Files::new();
    let text = RULES.replace(
        "tier: gold",
        "tier: gold, site: a, node-restriction.kubernetes.io/x: y",
    );
    let rules = read(&files.write("labels.yaml", &text)).unwrap();
    let kubernetes = Kubernetes {
        policy_labels: vec!["site".to_owned()],
        ..Kubernetes::default()
    };
    let idle = |given: &str| {
        let counts = |key: &str| kubernetes.trusts_label(key) || key == given;
        let all = unusable_labels(&rules, counts);
        all.map(|(by, key)| format!("{} {key}", by.rule))
            .collect::<Vec<_>>()
    };
    assert_eq!(idle(""), ["no shells on gold tier"]);
    assert_eq!(idle("tier"), [""; 0]);
}

#[test]
fn a_malformed_request_is_reported_with_an_example() {
    for (method, url, says) in [
        (Method::GET, "/metrics", "https://edge-1:10250/metrics"),
        (Method::GET, "https://edge-1/metrics", "edge-1:10250"),
        (Method::CONNECT, "edge-1", "edge-1:10250"),
        (Method::GET, "https://edge_1:1/", "not the name of a node"),
    ] {
        let error = RequestSpec::parse(&method, (url, None), false).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains(says), "{url}: {error}");
    }
}

#[test]
fn a_table_counts_met_cases_and_names_the_others() {
    let files = Files::new();
    files.write("policy.yaml", RULES);
    let request = "groups: [ops], method: POST, url: 'https://edge-1:10250/exec/a', upgrade: true";
    let test = |nodes: &str, then: &str| {
        let text = format!(
            "policy: policy.yaml\nnodes: {nodes}\nexpect:\n  - {{ as: ann, {request}, {then} }}\n  - {{ method: CONNECT, url: 'edge-1:22', then: deny }}\n  - {{ method: CONNECT, url: '10.96.0.1:443', then: deny }}\n"
        );
        let table = files.write("table.yaml", &text);
        test_table::run(&PolicyTest {
            policy: None,
            table,
        })
        .map_err(|error| format!("{error:#}"))
    };
    assert_eq!(test("{}", "then: allow, rule: 'rules[1]'"), Ok(()));
    let gold = "{ edge-1: { labels: { tier: gold } } }";
    assert_eq!(test(gold, "then: deny, rule: no shells on gold"), Ok(()));
    assert!(test(gold, "then: allow").unwrap_err().starts_with("1 of 3"));
    assert!(
        test("{}", "then: allow, rule: other")
            .unwrap_err()
            .starts_with("1 of 3")
    );
    let odd = test("{ Edge_1: {} }", "then: allow").unwrap_err();
    assert!(odd.contains("table.yaml:2:"), "{odd}");
}

#[test]
fn a_rule_that_could_not_be_meant_is_a_fault_with_its_line() {
    let files = Files::new();
    let text = "\
rules:
  - who: { users: [] }
    then: allow
  - who:
    then: allow
  - where: { nodes: [Edge-1] }
    what: { ports: [0, 9-5], methods: [get], paths: [/a/../b, /logs/, metrics], streams: [dance] }
    then: permit
  - name: twice
    then: deny
  - name: twice
    when: later
    then: deny
";
    let file = files.write("policy.yaml", text);
    let refused = read(&file).unwrap_err().to_string();
    for says in [
        "policy.yaml:2:19: rules[0].who.users: is empty",
        "rules[1].who: is empty",
        "rules[2].what.streams[0]: \"dance\" is not one of request, upgrade, connect",
        "rules[2].then: \"permit\" is not one of allow, deny",
        "policy.yaml:12:5: rules[4].when: unknown key",
    ] {
        assert!(refused.contains(says), "{says}\n{refused}");
    }
}

#[test]
fn the_service_of_a_request_is_given_by_its_own_argument() {
    let rules = serde_json::json!({
        "rules": [{ "where": { "services": ["printer"] }, "then": "allow" }],
    });
    let rules: policy::Policy = serde_json::from_value(rules).unwrap();
    let rules = Rules::compile(&rules).unwrap();
    let decides = |url: &str, service: Option<&str>| {
        let request = RequestSpec::parse(&Method::GET, (url, service), false).unwrap();
        let client = Subject {
            user: Some("ann"),
            groups: &[],
            uris: &[],
            source: None,
        };
        let node = Node::default();
        request.decide(&rules, &Method::GET, &client, &node).allow
    };
    assert!(decides("https://edge-1/jobs", Some("printer")));
    assert!(!decides("https://edge-1/jobs", Some("scanner")));
    assert!(!decides("https://edge-1:631/jobs", None));
}

#[test]
fn the_pod_of_a_request_is_given_by_its_namespace_and_its_node() {
    let files = Files::new();
    let text = "\
rules:
  - { name: shops, where: { pod_namespaces: [shop] }, then: allow }
  - { name: north, where: { nodes: [edge-1] }, what: { ports: [9100] }, then: allow }
";
    let mut ask = files.ask("edge-1");
    ask.file.policy = files.write("pods.yaml", text);
    for (method, url, namespace, said) in [
        (
            Method::GET,
            "https://edge-1:8080/",
            Some("shop"),
            "allow: shops (policy.yaml:2)",
        ),
        (
            Method::GET,
            "https://edge-1:8080/",
            Some("bank"),
            "deny: no rule of policy.yaml matches",
        ),
        (
            Method::GET,
            "https://edge-1:8080/",
            None,
            "deny: no rule of policy.yaml matches",
        ),
        (
            Method::GET,
            "https://edge-1:9100/",
            Some("bank"),
            "allow: north (policy.yaml:3)",
        ),
        (
            Method::CONNECT,
            "10.250.0.7:80",
            Some("shop"),
            "allow: shops (policy.yaml:2)",
        ),
        (
            Method::CONNECT,
            "10.250.0.7:80",
            None,
            "deny: no rule of policy.yaml matches",
        ),
    ] {
        ask.method = method;
        ask.url = url.to_owned();
        ask.pod_namespace = namespace.map(str::to_owned);
        assert_eq!(decided(&ask), said, "{url} {namespace:?}");
    }
}

#[test]
fn the_name_of_a_pod_needs_its_node() {
    let files = Files::new();
    let text = "rules: [{ where: { nodes: [edge-1], pod_namespaces: [shop] }, then: allow }]\n";
    let mut ask = files.ask("edge-1");
    ask.file.policy = files.write("pods.yaml", text);
    ask.method = Method::GET;
    for (url, node, is_allowed) in [
        ("https://web-1.shop.pod:8080/", "edge-1", true),
        ("https://web-1.shop.pod:8080/", "edge-2", false),
        ("https://web-1.bank.pod:8080/", "edge-1", false),
    ] {
        ask.url = url.to_owned();
        ask.pod_node = Some(node.to_owned());
        match check(&ask) {
            Ok(()) => assert!(is_allowed, "{url} {node}"),
            Err(error) => assert!(!is_allowed && error.is::<Denied>(), "{url} {node}: {error}"),
        }
    }
    for (url, node, says) in [
        ("https://edge-1:8080/", "edge-1", "with the name of a pod"),
        (
            "https://web-1.shop.pod:8080/",
            "edge 1",
            "is not the name of a node",
        ),
    ] {
        ask.url = url.to_owned();
        ask.pod_node = Some(node.to_owned());
        let error = check(&ask).unwrap_err();
        assert!(!error.is::<Denied>(), "{url}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
}

#[test]
fn the_name_of_a_pod_is_not_looked_up() {
    let files = Files::new();
    let mut ask = files.ask("edge-1");
    for (url, namespace, says) in [
        ("https://web.shop.pod:80/", None, "--pod-node"),
        (
            "https://web.shop.pod:80/",
            Some("shop"),
            "--pod-namespace shop",
        ),
        (
            "https://edge-1:80/",
            Some("web.shop"),
            "not the name of a namespace",
        ),
        (
            "https://10.250.0.7:80/",
            Some("shop"),
            "for a pod at the edge write its node",
        ),
    ] {
        ask.url = url.to_owned();
        ask.pod_namespace = namespace.map(str::to_owned);
        let error = check(&ask).unwrap_err();
        assert!(!error.is::<Denied>(), "{url}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
}

#[test]
fn a_table_tests_requests_to_pods() {
    let files = Files::new();
    let rules = "rules: [{ where: { pod_namespaces: [shop] }, then: allow }]\n";
    files.write("policy.yaml", rules);
    let test = |request: &str| {
        let text = format!(
            "policy: policy.yaml\nexpect:\n  - {{ as: ann, method: GET, {request}, then: allow }}\n"
        );
        let table = files.write("table.yaml", &text);
        test_table::run(&PolicyTest {
            policy: None,
            table,
        })
        .map_err(|error| format!("{error:#}"))
    };
    let url = "url: 'https://edge-1:80/'";
    assert_eq!(test(&format!("{url}, pod_namespace: shop")), Ok(()));
    for (request, says) in [
        (format!("{url}, pod_namespace: bank"), "1 of 1"),
        (url.to_owned(), "1 of 1"),
        (
            format!("{url}, pod_namespace: shop, service: db"),
            "both service and pod_namespace",
        ),
        (
            "url: 'https://web.shop.pod:80/'".to_owned(),
            "pod_namespace: shop",
        ),
    ] {
        let error = test(&request).unwrap_err();
        assert!(error.contains(says), "{request}: {error}");
    }
}

#[test]
fn rules_about_pods_are_refused_without_pod_objects() {
    let files = Files::new();
    let text = "rules:\n  - { where: { pod_namespaces: [shop] }, then: deny }\n";
    let rules = read(&files.write("pods.yaml", text)).unwrap();
    let error = check_pods(&rules, Some(&Kubernetes::default())).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("rules[0] (line 2)") && error.contains("set kubernetes.pods"),
        "{error}"
    );
    let kubernetes = Kubernetes {
        pods: Some(config::PodObjects::default()),
        ..Kubernetes::default()
    };
    assert!(check_pods(&rules, Some(&kubernetes)).is_ok());
    let other = read(&files.write("other.yaml", RULES)).unwrap();
    assert!(check_pods(&other, None).is_ok());
}
