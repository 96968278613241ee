use super::*;
use crate::config::policy::{
    self as file, NodeSelector, PortRange, RequestMatch, Rule, SourceNetworks, Subjects,
};
use causeway_config::Specified;
use rand::{RngExt, SeedableRng, rngs::StdRng};

fn rule(then: Effect) -> Rule {
    Rule {
        name: None,
        who: Specified::default(),
        r#where: Specified::default(),
        what: Specified::default(),
        then,
        line: 0,
    }
}

fn texts<const N: usize>(texts: [&str; N]) -> Specified<Vec<String>> {
    Specified::from(texts.map(str::to_owned).to_vec())
}

fn who(who: Subjects) -> Rule {
    Rule {
        who: who.into(),
        ..rule(Effect::Allow)
    }
}

fn what(then: Effect, what: RequestMatch) -> Rule {
    Rule {
        what: what.into(),
        ..rule(then)
    }
}

fn compiled(rules: impl Into<Vec<Rule>>) -> Policy {
    let policy = file::Policy {
        rules: rules.into(),
    };
    Policy::compile(&policy).unwrap()
}

/// Request that tests modify.
struct PolicyCase {
    user: &'static str,
    groups: Vec<String>,
    uris: Vec<String>,
    known: bool,
    from: Option<IpAddr>,
    node: NodeName,
    direct: Option<IpAddr>,
    pool: Option<&'static str>,
    labels: BTreeMap<String, String>,
    service: Option<&'static str>,
    pod: PodInput<'static>,
    port: u16,
    act: Action,
    method: &'static str,
    path: String,
}

impl PolicyCase {
    fn new() -> Self {
        Self {
            user: "ann",
            groups: vec!["ops".into()],
            uris: vec!["spiffe://td/client/ann".into()],
            known: true,
            from: Some("10.1.2.3".parse().unwrap()),
            node: NodeName::parse("edge-1").unwrap(),
            direct: None,
            pool: Some("north"),
            labels: [("tier", "gold"), ("site", "a")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            service: None,
            pod: PodInput::None,
            port: 10250,
            act: Action::Request,
            method: "GET",
            path: "/metrics/cadvisor".into(),
        }
    }

    fn question(&self) -> PolicyInput<'_> {
        PolicyInput {
            user: self.user,
            groups: &self.groups,
            uris: &self.uris,
            is_authenticated: self.known,
            client_address: self.from,
            node: self.direct.is_none().then_some(&self.node),
            direct_address: self.direct,
            pool: self.pool.filter(|_| self.direct.is_none()),
            labels: &self.labels,
            service: self.service,
            pod: self.pod,
            port: Some(self.port).filter(|_| self.service.is_none()),
            action: self.act,
            method: self.method,
            path: &self.path,
        }
    }

    fn of(&self, policy: &Policy) -> bool {
        policy.decide(&self.question()).allow
    }
}

fn asked(change: impl FnOnce(&mut PolicyCase)) -> PolicyCase {
    let mut asked = PolicyCase::new();
    change(&mut asked);
    asked
}

#[test]
fn requests_without_a_matching_rule_are_denied() {
    let decision = Policy::default().decide(&PolicyCase::new().question());
    assert_eq!(
        decision,
        Decision {
            allow: false,
            matched: None
        }
    );
    assert!(!PolicyCase::new().of(&compiled([])));
}

#[test]
fn the_first_rule_that_matches_decides_and_is_named() {
    let named = |name: &str, then, line| Rule {
        name: Some(name.into()),
        line,
        ..rule(then)
    };
    let policy = compiled([
        Rule {
            who: Subjects {
                users: texts(["bob"]),
                ..Subjects::default()
            }
            .into(),
            ..named("not ann", Effect::Deny, 2)
        },
        named("all", Effect::Allow, 5),
        named("too late", Effect::Deny, 7),
    ]);
    let decision = policy.decide(&PolicyCase::new().question());
    let by = MatchedRule {
        rule: "all".into(),
        line: 5,
    };
    assert_eq!(
        decision,
        Decision {
            allow: true,
            matched: Some(by)
        }
    );
    assert!(!asked(|asked| asked.user = "bob").of(&policy));
}

#[test]
fn a_rule_matches_any_name_group_or_uri_and_any_network() {
    let networks = |text: &str| Specified::from(SourceNetworks(vec![text.parse().unwrap()]));
    let some = Subjects {
        users: texts(["bob"]),
        groups: texts(["op*"]),
        ..Subjects::default()
    };
    assert!(PolicyCase::new().of(&compiled([who(some.clone())])));
    let near = Subjects {
        networks: networks("10.1.0.0/16"),
        ..some.clone()
    };
    let policy = compiled([who(near)]);
    assert!(PolicyCase::new().of(&policy));
    assert!(asked(|asked| asked.from = Some("::ffff:10.1.9.9".parse().unwrap())).of(&policy));
    assert!(!asked(|asked| asked.from = Some("10.2.0.1".parse().unwrap())).of(&policy));
    assert!(!asked(|asked| asked.from = None).of(&policy));
    let mapped = Subjects {
        networks: networks("::ffff:10.1.0.0/112"),
        ..some
    };
    assert!(PolicyCase::new().of(&compiled([who(mapped)])));
    let every = |text| {
        compiled([who(Subjects {
            networks: networks(text),
            ..Subjects::default()
        })])
    };
    assert!(PolicyCase::new().of(&every("0.0.0.0/0")));
    assert!(!PolicyCase::new().of(&every("::/0")));
    let six = asked(|asked| asked.from = Some("2001:db8::1".parse().unwrap()));
    assert!(
        six.of(&every("2001:db8::/32")) && six.of(&every("::/0")) && !six.of(&every("0.0.0.0/0"))
    );
}

#[test]
fn an_anonymous_client_has_no_user_and_no_groups_of_its_own() {
    let users = |name: &str| {
        compiled([who(Subjects {
            users: Specified::from(vec![name.to_owned()]),
            ..Subjects::default()
        })])
    };
    let groups = |name: &str| {
        compiled([who(Subjects {
            groups: Specified::from(vec![name.to_owned()]),
            ..Subjects::default()
        })])
    };
    // The log of a client without a name has its address.
    let nobody = asked(|asked| {
        (asked.known, asked.user) = (false, "10.1.2.3");
        asked.groups.clear();
    });
    assert!(!nobody.of(&users("10.*")));
    assert!(nobody.of(&users(ANONYMOUS)) && nobody.of(&groups(UNAUTHENTICATED)));
    assert!(!nobody.of(&users("*")) && !nobody.of(&groups("system:*")));
    assert!(!nobody.of(&groups(AUTHENTICATED)));
    assert!(PolicyCase::new().of(&groups(AUTHENTICATED)));
    let boaster = asked(|asked| asked.groups = vec![UNAUTHENTICATED.into()]);
    assert!(!boaster.of(&groups(UNAUTHENTICATED)));
}

#[test]
fn a_node_is_named_by_all_that_is_given() {
    let at = |place: NodeSelector| {
        compiled([Rule {
            r#where: place.into(),
            ..rule(Effect::Allow)
        }])
    };
    let labels = |pairs: &[(&str, &str)]| {
        let pair = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Specified::from(pairs.iter().map(pair).collect::<BTreeMap<_, _>>())
    };
    let place = |nodes, pools, labels| {
        at(NodeSelector {
            nodes: texts([nodes]),
            pools: texts([pools]),
            labels,
            ..NodeSelector::default()
        })
    };
    let all = [("tier", "gold"), ("site", "a")];
    assert!(PolicyCase::new().of(&place("edge-*", "north", labels(&all))));
    assert!(!PolicyCase::new().of(&place("edge-2*", "north", labels(&all))));
    assert!(!PolicyCase::new().of(&place("edge-*", "south", labels(&all))));
    for other in [
        [("tier", "gold"), ("site", "b")],
        [("tier", "tin"), ("site", "a")],
    ] {
        assert!(!PolicyCase::new().of(&place("*", "*", labels(&other))));
    }
    let bare = asked(|asked| asked.pool = None);
    assert!(!bare.of(&place("*", "*", labels(&all))));
}

#[test]
fn a_session_is_denied_if_any_possible_request_is_denied() {
    let paths = RequestMatch {
        paths: texts(["/exec"]),
        ..RequestMatch::default()
    };
    let methods = RequestMatch {
        methods: texts(["POST"]),
        ..RequestMatch::default()
    };
    let session = asked(|asked| {
        (asked.act, asked.method) = (Action::Connect, "CONNECT");
        asked.path.clear();
    });
    for narrow in [&paths, &methods] {
        // A rule that denies some of the values denies a session, and a rule that allows only some of them does not allow it.
        assert!(!session.of(&compiled([
            what(Effect::Deny, narrow.clone()),
            rule(Effect::Allow)
        ])));
        assert!(!session.of(&compiled([what(Effect::Allow, narrow.clone())])));
        assert!(PolicyCase::new().of(&compiled([
            what(Effect::Deny, narrow.clone()),
            rule(Effect::Allow)
        ])));
    }
    let requests = RequestMatch {
        streams: vec![Action::Request, Action::Upgrade].into(),
        ..paths
    };
    assert!(session.of(&compiled([
        what(Effect::Deny, requests),
        rule(Effect::Allow)
    ])));
    let connect = RequestMatch {
        methods: texts(["CONNECT"]),
        ..RequestMatch::default()
    };
    assert!(session.of(&compiled([what(Effect::Allow, connect)])));
}

#[test]
fn ambiguous_paths_and_methods_match_deny_rules_only() {
    let paths = |path| RequestMatch {
        paths: texts([path]),
        ..RequestMatch::default()
    };
    let denies = compiled([what(Effect::Deny, paths("/exec")), rule(Effect::Allow)]);
    let allows = compiled([what(Effect::Allow, paths("/metrics"))]);
    for path in [
        "/metrics/../exec/a",
        "/metrics/%2e%2e/exec",
        "//exec/a",
        "/%65xec/a",
        "/exec;x/a",
        "/metrics%2f..%2fexec",
        "/exec%00",
        "/exec\\a",
        "*",
    ] {
        let odd = asked(|asked| asked.path = path.into());
        assert!(!odd.of(&denies), "{path}");
        assert!(!odd.of(&allows), "{path}");
    }
    assert!(PolicyCase::new().of(&denies) && PolicyCase::new().of(&allows));
    let post = RequestMatch {
        methods: texts(["POST"]),
        ..RequestMatch::default()
    };
    let posts = asked(|asked| asked.method = "post");
    assert!(!posts.of(&compiled([
        what(Effect::Deny, post.clone()),
        rule(Effect::Allow)
    ])));
    assert!(!posts.of(&compiled([what(Effect::Allow, post)])));
}

#[test]
fn deny_rules_ignore_case() {
    let path = |then, path| {
        let paths = texts([path]);
        what(
            then,
            RequestMatch {
                paths,
                ..RequestMatch::default()
            },
        )
    };
    let exec = asked(|asked| asked.path = "/EXEC/a".into());
    assert!(!exec.of(&compiled([
        path(Effect::Deny, "/exec"),
        rule(Effect::Allow)
    ])));
    assert!(!exec.of(&compiled([path(Effect::Allow, "/exec")])));
    let forward = asked(|asked| asked.path = "/portforward/a".into());
    assert!(!forward.of(&compiled([
        path(Effect::Deny, "/portForward"),
        rule(Effect::Allow)
    ])));
    assert!(forward.of(&compiled([
        path(Effect::Deny, "/port"),
        rule(Effect::Allow)
    ])));
}

#[test]
fn rules_with_an_empty_condition_do_not_compile() {
    let empty = Rule {
        who: Subjects::default().into(),
        ..rule(Effect::Allow)
    };
    let policy = file::Policy { rules: vec![empty] };
    assert_eq!(
        Policy::compile(&policy).unwrap_err()[0].path,
        "rules[0].who"
    );
}

#[test]
fn rules_can_be_replaced_while_they_are_read() {
    let writer = PolicyWriter::new(Some(compiled([])));
    let reader = writer.reader();
    assert!(!reader.decide(&PolicyCase::new().question()).allow);
    writer.replace(Some(compiled([rule(Effect::Allow)])));
    assert!(reader.decide(&PolicyCase::new().question()).allow);
    writer.replace(Some(compiled([])));
    assert!(!reader.allows_all());
    writer.replace(None);
    assert!(reader.allows_all() && reader.decide(&PolicyCase::new().question()).allow);
}

/// Returns one of these values, or an absent key.
fn pick<T: Clone>(random: &mut StdRng, from: &[T]) -> Specified<Vec<T>> {
    if random.random_bool(0.5) {
        return Specified(None);
    }
    let first = random.random_range(0..from.len());
    let last = random.random_range(first..from.len());
    from[first..=last].to_vec().into()
}

fn words(random: &mut StdRng, from: &[&str]) -> Specified<Vec<String>> {
    let from: Vec<String> = from.iter().map(|text| (*text).to_owned()).collect();
    pick(random, &from)
}

/// A key without a value counts as absent.
fn said<T: Default + PartialEq>(value: T) -> Specified<T> {
    Specified((value != T::default()).then_some(value))
}

fn some_rule(random: &mut StdRng) -> Rule {
    let networks = [
        "10.0.0.0/8",
        "10.1.2.3/32",
        "192.168.0.0/16",
        "2001:db8::/32",
        "::/0",
    ];
    let networks = networks.map(|text| text.parse().unwrap());
    let labels: Vec<_> = [("tier", "gold"), ("tier", "tin"), ("site", "a")].into();
    let ports =
        ["1-65535", "10250", "9000-9999", "22"].map(|text| text.parse::<PortRange>().unwrap());
    let labels = pick(random, &labels).0.map(|labels| {
        let pair = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        labels.iter().map(pair).collect()
    });
    Rule {
        who: said(Subjects {
            users: words(random, &["ann", "a*", "*", "bob", ANONYMOUS]),
            groups: words(random, &["ops", "dev*", AUTHENTICATED, UNAUTHENTICATED]),
            spiffe: words(random, &["spiffe://td/client/*", "spiffe://other/*"]),
            networks: Specified(pick(random, &networks).0.map(SourceNetworks)),
        }),
        r#where: said(NodeSelector {
            nodes: words(random, &["edge-1", "*-2", "e*e-1", "*"]),
            pools: words(random, &["north", "s*"]),
            labels: Specified(labels),
            ..NodeSelector::default()
        }),
        what: said(RequestMatch {
            ports: pick(random, &ports),
            methods: words(random, &["GET", "POST", "CONNECT"]),
            paths: words(random, &["/", "/metrics", "/metrics/cadvisor", "/exec"]),
            streams: pick(random, &[Action::Request, Action::Upgrade, Action::Connect]),
        }),
        ..rule(if random.random_bool(0.5) {
            Effect::Allow
        } else {
            Effect::Deny
        })
    }
}

fn like(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((before, rest)) => text.strip_prefix(before).is_some_and(|text| {
            (0..=text.len()).any(|skip| text.get(skip..).is_some_and(|text| like(rest, text)))
        }),
    }
}

/// Evaluates a rule directly, condition by condition.
fn matches(rule: &Rule, asked: &PolicyCase) -> bool {
    fn any<T>(list: &Specified<Vec<T>>, fits: impl Fn(&T) -> bool) -> bool {
        list.0.as_ref().is_none_or(|list| list.iter().any(fits))
    }
    let (who, place, what) = (
        rule.who.0.clone().unwrap_or_default(),
        rule.r#where.0.clone().unwrap_or_default(),
        rule.what.0.clone().unwrap_or_default(),
    );
    let nobody = who.users.0.is_none() && who.groups.0.is_none() && who.spiffe.0.is_none();
    let given = |list: &Specified<Vec<String>>, texts: &[String]| {
        let fits = |pattern: &String| texts.iter().any(|text| like(pattern, text));
        list.0.as_ref().is_some_and(|list| list.iter().any(fits))
    };
    let mut groups = asked.groups.clone();
    groups.push(AUTHENTICATED.into());
    let says = |list: &Specified<Vec<String>>, word: &str| {
        list.0
            .as_ref()
            .is_some_and(|list| list.iter().any(|one| one == word))
    };
    let unknown = says(&who.users, ANONYMOUS) || says(&who.groups, UNAUTHENTICATED);
    let known = given(&who.users, &[asked.user.to_owned()])
        || given(&who.groups, &groups)
        || given(&who.spiffe, &asked.uris);
    let identity = nobody || if asked.known { known } else { unknown };
    let from = who.networks.0.is_none_or(|nets| {
        nets.0
            .iter()
            .any(|net| asked.from.is_some_and(|from| net.contains(&from)))
    });
    let labels = place.labels.0.is_none_or(|labels| {
        labels
            .iter()
            .all(|(key, value)| asked.labels.get(key) == Some(value))
    });
    let session = asked.act == Action::Connect;
    let hidden = session && rule.then == Effect::Deny;
    identity
        && from
        && labels
        && any(&place.nodes, |text| like(text, asked.node.as_str()))
        && any(&place.pools, |text| {
            asked.pool.is_some_and(|pool| like(text, pool))
        })
        && any(&what.ports, |ports| ports.0.contains(&asked.port))
        && any(&what.streams, |act| *act == asked.act)
        && (any(&what.methods, |method| method == asked.method) || hidden)
        && (hidden
            || any(&what.paths, |path| {
                let below = path.trim_end_matches('/').to_owned() + "/";
                !session && (asked.path == *path || asked.path.starts_with(&below))
            }))
}

#[test]
fn a_direct_target_is_matched_by_address_and_by_no_node_key() {
    let place = |place: NodeSelector, then| Rule {
        r#where: place.into(),
        ..rule(then)
    };
    let direct = |nets: &[&str]| NodeSelector {
        direct: SourceNetworks(nets.iter().map(|net| net.parse().unwrap()).collect()).into(),
        ..NodeSelector::default()
    };
    let nodes = |name: &str| NodeSelector {
        nodes: texts([name]),
        ..NodeSelector::default()
    };
    let pools = NodeSelector {
        pools: texts(["*"]),
        ..NodeSelector::default()
    };
    let labels = NodeSelector {
        labels: Specified::from(BTreeMap::from([("tier".to_owned(), "gold".to_owned())])),
        ..NodeSelector::default()
    };
    let services = || place(direct(&["10.96.0.0/12", "2001:db8::/32"]), Effect::Allow);
    let denied = || place(direct(&["10.96.0.1/32"]), Effect::Deny);
    for (rules, address, allowed) in [
        (vec![], "10.96.0.10", false),
        (vec![rule(Effect::Allow)], "10.96.0.10", true),
        (vec![services()], "10.96.0.10", true),
        (vec![services()], "::ffff:10.96.0.10", true),
        (vec![services()], "2001:db8::7", true),
        (vec![services()], "10.0.0.1", false),
        (vec![denied(), services()], "10.96.0.1", false),
        (vec![denied(), services()], "10.96.0.2", true),
        (vec![place(nodes("*"), Effect::Allow)], "10.96.0.10", false),
        (vec![place(pools, Effect::Allow)], "10.96.0.10", false),
        (vec![place(labels, Effect::Allow)], "10.96.0.10", false),
    ] {
        let policy = compiled(rules.clone());
        let asked = asked(|asked| {
            asked.direct = Some(address.parse().unwrap());
            asked.act = Action::Connect;
            asked.method = "CONNECT";
            asked.labels.clear();
        });
        assert_eq!(asked.of(&policy), allowed, "{address} by {rules:?}");
    }
    assert!(
        !PolicyCase::new().of(&compiled([services()])),
        "a node has no such address"
    );
}

#[test]
fn compiled_rules_decide_like_the_written_rules() {
    let mut random = StdRng::seed_from_u64(7);
    let mut decided = [0; 3];
    for round in 0..300 {
        let rules: Vec<Rule> = (0..random.random_range(1..150))
            .map(|_| some_rule(&mut random))
            .collect();
        let policy = compiled(rules.clone());
        for _ in 0..20 {
            let mut one = |from: &[&'static str]| from[random.random_range(0..from.len())];
            let mut asked = PolicyCase::new();
            asked.user = one(&["ann", "bob", "al", "zoe"]);
            asked.groups = vec![one(&["ops", "devs", "none"]).to_owned()];
            asked.from = Some(
                one(&[
                    "10.1.2.3",
                    "10.9.9.9",
                    "192.168.1.1",
                    "2001:db8::1",
                    "172.16.0.1",
                ])
                .parse()
                .unwrap(),
            );
            if random.random_bool(0.1) {
                asked.from = None;
            }
            asked.known = random.random_bool(0.8);
            let mut one = |from: &[&'static str]| from[random.random_range(0..from.len())];
            asked.node = NodeName::parse(one(&["edge-1", "edge-2", "x"])).unwrap();
            asked.pool = [None, Some("north"), Some("south")][random.random_range(0..3)];
            asked.labels.retain(|_, _| random.random_bool(0.7));
            asked.port = [22, 9100, 10250][random.random_range(0..3)];
            asked.act =
                [Action::Request, Action::Upgrade, Action::Connect][random.random_range(0..3)];
            let mut one = |from: &[&'static str]| from[random.random_range(0..from.len())];
            asked.method = one(&["GET", "POST", "PUT"]);
            asked.path =
                one(&["/", "/metrics", "/metrics/cadvisor", "/metricsx", "/exec/a"]).to_owned();
            if asked.act == Action::Connect {
                asked.method = "CONNECT";
                asked.path.clear();
            }
            let first = rules.iter().position(|rule| matches(rule, &asked));
            let expected = first.map(|index| format!("rules[{index}]"));
            let found = policy.decide(&asked.question());
            let by = found.matched.as_ref().map(|by| by.rule.to_string());
            assert_eq!(by, expected, "round {round}");
            assert_eq!(
                found.allow,
                first.is_some_and(|index| rules[index].then == Effect::Allow)
            );
            decided[first.map_or(2, |index| usize::from(rules[index].then == Effect::Allow))] += 1;
        }
    }
    // Fails if one of the three cases did not occur, because then nothing was compared.
    assert!(decided.iter().all(|count| *count > 100), "{decided:?}");
}

#[test]
fn sample_ports_are_the_borders_of_all_ranges() {
    let ports = |then, ranges: &[&str]| {
        let ports = ranges
            .iter()
            .map(|range| range.parse::<PortRange>().unwrap());
        let ports = ports.collect::<Vec<_>>().into();
        what(
            then,
            RequestMatch {
                ports,
                ..RequestMatch::default()
            },
        )
    };
    let policy = compiled([
        ports(Effect::Deny, &["1000"]),
        ports(Effect::Allow, &["1000-2000", "65535"]),
        rule(Effect::Deny),
    ]);
    assert_eq!(policy.sample_ports(), [1, 1000, 1001, 2001, 65535]);
    assert_eq!(compiled([]).sample_ports(), [1]);
}

#[test]
fn sample_services_match_each_pattern() {
    let services = Rule {
        r#where: NodeSelector {
            services: texts(["printer", "cam*"]),
            ..NodeSelector::default()
        }
        .into(),
        ..rule(Effect::Allow)
    };
    let policy = compiled([rule(Effect::Deny), services.clone(), services]);
    assert_eq!(policy.sample_services(), ["camx", "printer"]);
}

#[test]
fn a_destination_is_allowed_if_some_request_to_it_is() {
    let some = |then| {
        let methods = RequestMatch {
            methods: texts(["GET"]),
            ..RequestMatch::default()
        };
        let paths = RequestMatch {
            paths: texts(["/metrics"]),
            ..RequestMatch::default()
        };
        let streams = RequestMatch {
            streams: vec![Action::Upgrade].into(),
            ..RequestMatch::default()
        };
        [methods, paths, streams].map(|request| what(then, request))
    };
    let port = |port| RequestMatch {
        ports: vec![PortRange(port..=port)].into(),
        ..RequestMatch::default()
    };
    let at_port = |then, number| what(then, port(number));
    let connect = asked(|asked| {
        (asked.act, asked.method) = (Action::Connect, "CONNECT");
        asked.path.clear();
    });
    let decide = |rules: Vec<Rule>| {
        compiled(rules)
            .decide_destination(&connect.question())
            .allow
    };
    for partial in some(Effect::Allow) {
        assert!(decide(vec![partial.clone()]), "{partial:?}");
        assert!(!decide(vec![rule(Effect::Deny), partial.clone()]));
        assert!(decide(vec![at_port(Effect::Deny, 22), partial.clone()]));
        assert!(!decide(vec![at_port(Effect::Deny, 10250), partial.clone()]));
        let elsewhere = Rule {
            what: RequestMatch {
                ports: port(22).ports,
                ..partial.what.0.unwrap()
            }
            .into(),
            ..rule(Effect::Allow)
        };
        assert!(!decide(vec![elsewhere]));
    }
    for partial in some(Effect::Deny) {
        assert!(decide(vec![partial.clone(), rule(Effect::Allow)]));
        assert!(!decide(vec![partial]));
    }
    assert!(!decide(Vec::new()));
}

#[test]
fn only_rules_that_name_services_allow_them() {
    let node = |services: Specified<Vec<String>>, then| Rule {
        r#where: NodeSelector {
            nodes: texts(["edge-*"]),
            services,
            ..NodeSelector::default()
        }
        .into(),
        ..rule(then)
    };
    let absent = Specified::default;
    let service = asked(|asked| asked.service = Some("printer"));
    let of_node = PolicyCase::new();
    let decide = |rules: Vec<Rule>| {
        let policy = compiled(rules);
        (service.of(&policy), of_node.of(&policy))
    };
    let anything = rule(Effect::Allow);
    let denies = |ports| {
        let ports = RequestMatch {
            ports: vec![PortRange(ports)].into(),
            ..RequestMatch::default()
        };
        what(Effect::Deny, ports)
    };
    let named = |name: &str| node(texts([name]), Effect::Allow);
    for (rules, expected) in [
        (vec![anything.clone()], (false, true)),
        (vec![node(absent(), Effect::Allow)], (false, true)),
        (vec![named("printer")], (true, false)),
        (vec![named("print*")], (true, false)),
        (vec![named("*"), anything.clone()], (true, true)),
        (vec![named("scanner")], (false, false)),
        // A rule that denies a node denies its services, but a port of the node is no port of a service.
        (
            vec![node(absent(), Effect::Deny), named("printer")],
            (false, false),
        ),
        (vec![rule(Effect::Deny), named("*")], (false, false)),
        (
            vec![denies(10250..=10250), named("printer"), anything.clone()],
            (true, false),
        ),
        (vec![denies(1..=u16::MAX), named("printer")], (false, false)),
        (
            vec![
                node(texts(["scanner"]), Effect::Deny),
                named("*"),
                anything.clone(),
            ],
            (true, true),
        ),
        (
            vec![node(texts(["printer"]), Effect::Deny), named("*"), anything],
            (false, true),
        ),
    ] {
        assert_eq!(decide(rules.clone()), expected, "{rules:?}");
    }
}

#[test]
fn a_condition_on_pods_matches_only_known_pods() {
    let of = |namespaces: Specified<Vec<String>>, then| Rule {
        r#where: NodeSelector {
            pod_namespaces: namespaces,
            ..NodeSelector::default()
        }
        .into(),
        ..rule(then)
    };
    let to = |pod| asked(|asked| asked.pod = pod);
    let all = [
        PodInput::None,
        PodInput::Namespace("shop"),
        PodInput::Namespace("bank"),
        PodInput::Unknown,
    ];
    let anything = rule(Effect::Allow);
    let on_edge_2 = |then| Rule {
        r#where: NodeSelector {
            pod_namespaces: texts(["*"]),
            nodes: texts(["edge-2"]),
            ..NodeSelector::default()
        }
        .into(),
        ..rule(then)
    };
    for (rules, allowed) in [
        (vec![anything.clone()], [true; 4]),
        (
            vec![of(texts(["shop"]), Effect::Allow)],
            [false, true, false, false],
        ),
        (
            vec![of(texts(["b*", "s*"]), Effect::Allow)],
            [false, true, true, false],
        ),
        (
            vec![of(texts(["*"]), Effect::Allow)],
            [false, true, true, false],
        ),
        // A pod that is not known may be in the denied namespace.
        (
            vec![of(texts(["shop"]), Effect::Deny), anything.clone()],
            [true, false, true, false],
        ),
        (vec![on_edge_2(Effect::Allow)], [false; 4]),
        (vec![on_edge_2(Effect::Deny), anything.clone()], [true; 4]),
    ] {
        let policy = compiled(rules.clone());
        assert_eq!(all.map(|pod| to(pod).of(&policy)), allowed, "{rules:?}");
    }
    let of_pods = compiled([of(texts(["shop"]), Effect::Deny)]);
    assert!(of_pods.depends_on_pods() && !compiled([anything]).depends_on_pods());
}

#[test]
fn a_rule_about_pods_does_not_deny_services_of_a_node() {
    let all_pods = Rule {
        r#where: NodeSelector {
            pod_namespaces: texts(["*"]),
            ..NodeSelector::default()
        }
        .into(),
        ..rule(Effect::Deny)
    };
    let printer = Rule {
        r#where: NodeSelector {
            services: texts(["printer"]),
            ..NodeSelector::default()
        }
        .into(),
        ..rule(Effect::Allow)
    };
    let service = asked(|asked| asked.service = Some("printer"));
    assert!(service.of(&compiled([all_pods, printer])));
}
