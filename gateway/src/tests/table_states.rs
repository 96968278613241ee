//! Decisions of the request path for each state of the tables that it reads.
//!
//! A table is *not yet* filled, *stale* (its source stopped answering after it had filled the table) or *gone* (its source lost
//! its data). In none of these states may a client get more than it gets from a filled table.
//!
//! | table | not yet | stale | gone |
//! | --- | --- | --- | --- |
//! | nodes, addresses and pods of the cluster | undecided, nothing is dialled | as last known | an address is nobody's once the cluster says so |
//! | Pod objects of the cluster | undecided, for addresses and names of pods only | as last known for 5 minutes, then undecided | an address is nobody's |
//! | namespaces of pods, for the policy | undecided, for addresses and names of pods only | as last known for 5 minutes, then undecided | no rule that allows pods matches, and each rule that denies some |
//! | labels and pools, for the policy | undecided | as last known | no rule that names one matches |
//! | records and revocations | the gateway does not start | as last read | as last read |
//! | policy | the gateway does not start | as last read | as last read (`src/reload.rs`) |
//! | pins | no key is trusted | as last read | as last read |
//! | keys of issuers (JWKS, tests of `state::jwks`) | undecided | as last known, up to their maximum age | undecided |
//! | reviews (tests of `proxy::access_review`) | undecided | until an answer's TTL is over, then undecided | undecided |
//! | names (DNS, tests of `control::dns::handler`) | SERVFAIL if no record has the name | as last known | NXDOMAIN |

use crate::{
    Config, Gateway, Reason,
    config::policy::{Effect, NodeSelector, Policy as File, RequestMatch, Rule, Subjects},
    control::{node_sync, pin_writer::PinWriter},
    proxy::{
        authn::ClientIdentity,
        authz::{self, Action, AuthzRequest, Destination, PolicyAuthorizer},
        direct,
        route::{self, Route, RouteInput},
    },
    state::{
        ClusterNode, Node, Nodes, NodesWriter, Pod, Policy, PolicyWriter, pins,
        pods::DestinationPod,
    },
};
use causeway_certs::{
    Fingerprint, NodeName, NodeRecord, OpenMode, Pin, PinTable, Revocation, Store, StoreError,
};
use causeway_config::Specified;
use causeway_rt::listener::RemoteAddr;
use causeway_tunnel::Target;
use http::Method;
use std::{collections::BTreeMap, path::PathBuf, time::Duration};

fn name(text: &str) -> NodeName {
    NodeName::parse(text).unwrap()
}

/// Returns the cluster's edge-1 with its address and label.
fn members() -> BTreeMap<NodeName, ClusterNode> {
    let member = ClusterNode {
        is_edge: true,
        addresses: vec!["10.0.0.1".parse().unwrap()],
        pod_networks: vec!["10.244.1.0/24".parse().unwrap()],
        labels: [("site".to_owned(), "north".to_owned())].into(),
        ..ClusterNode::default()
    };
    [(name("edge-1"), member)].into()
}

/// Returns the node tables in the three states (not yet, stale, gone) of a gateway whose record of edge-9 has an address.
fn tables() -> [NodesWriter; 3] {
    let table = || {
        let writer = NodesWriter::default();
        let node = Node {
            addresses: vec!["10.0.0.9".parse().unwrap()],
            ..Node::default()
        };
        writer.upsert(name("edge-9"), node);
        writer.set_pending("not known yet");
        writer
    };
    let [not_yet, stale, gone] = [table(), table(), table()];
    stale.replace_cluster(members());
    // The informer reports this for an unavailable API, with or without an earlier list.
    stale.set_pending("the API is away");
    gone.replace_cluster(members());
    gone.replace_cluster(BTreeMap::new());
    [not_yet, stale, gone]
}

fn routed(nodes: &Nodes, asked: &RouteInput<'_>) -> Result<String, Reason> {
    let route = route::find_route(asked, nodes).map_err(|error| error.reason)?;
    Ok(route.target.to_string())
}

fn by(authority: &str) -> RouteInput<'_> {
    RouteInput {
        authority: Some(authority),
        ..RouteInput::default()
    }
}

#[test]
fn an_address_is_an_edges_or_undecided_until_nodes_are_known() {
    use Reason::{DependencyUnavailable as Undecided, NodeUnknown};
    let to = |target: &str| Ok(target.to_owned());
    for (authority, states) in [
        (
            "10.0.0.1:80",
            [Err(Undecided), to("edge-1:80"), Err(NodeUnknown)],
        ),
        (
            "10.244.1.7:80",
            [Err(Undecided), to("10.244.1.7:80"), Err(NodeUnknown)],
        ),
        (
            "edge-1:80",
            [Err(Undecided), to("edge-1:80"), Err(NodeUnknown)],
        ),
        (
            "10.8.8.8:80",
            [Err(Undecided), Err(NodeUnknown), Err(NodeUnknown)],
        ),
        (
            "web.cluster.example:80",
            [Err(Undecided), Err(NodeUnknown), Err(NodeUnknown)],
        ),
        // The cluster may assign the address of a record to another node, but not its name.
        (
            "10.0.0.9:80",
            [Err(Undecided), to("edge-9:80"), to("edge-9:80")],
        ),
        (
            "edge-9:80",
            [to("edge-9:80"), to("edge-9:80"), to("edge-9:80")],
        ),
    ] {
        let networks = ["0.0.0.0/0".parse().unwrap()];
        for (table, expected) in tables().iter().zip(states) {
            let (nodes, asked) = (table.reader(), by(authority));
            let dials = direct::direct_target(&networks, &asked, &nodes).is_some();
            assert_eq!(dials, expected == Err(NodeUnknown), "{authority}");
            assert_eq!(routed(&nodes, &asked), expected, "{authority}");
            let (ip, _) = authority.split_once(':').unwrap();
            let Ok(ip) = ip.parse() else { continue };
            // A listener's fixed node does not apply to a redirected address that may belong to another node.
            let fixed = name("edge-9");
            let redirected = RouteInput {
                original: Some((std::net::IpAddr::V4(ip), 80).into()),
                fixed: Some(&fixed),
                ..RouteInput::default()
            };
            let falls_back = Err(NodeUnknown) == expected;
            let expected = if falls_back {
                to("edge-9:80")
            } else {
                expected
            };
            assert_eq!(routed(&nodes, &redirected), expected, "{authority}");
        }
    }
}

/// Returns the nodes of a cluster whose Pod objects are followed: the pods are not loaded, lost for this time, or gone.
async fn tables_with_pods(lost_for: Duration) -> [Nodes; 3] {
    let all: [_; 3] = std::array::from_fn(|_| {
        let writer = NodesWriter::default();
        writer.follow_pods(&["10.244.0.0/16".parse().unwrap()]);
        writer.replace_cluster(members());
        let pods = writer.pods(9).unwrap();
        (writer.reader(), pods)
    });
    let [(not_yet, early), (stale, mut away), (gone, mut empty)] = all;
    early.set_lost("forbidden");
    let pod = Pod {
        name: "a/web".into(),
        node: name("edge-1"),
        addresses: ["10.244.9.7".parse().unwrap()].into(),
        ends_at: None,
    };
    away.replace(vec![pod.clone()]).unwrap();
    away.set_lost("the API is away");
    empty.replace(vec![pod]).unwrap();
    empty.replace(Vec::new()).unwrap();
    tokio::time::advance(lost_for).await;
    [not_yet, stale, gone]
}

#[tokio::test(start_paused = true)]
async fn only_targets_in_networks_of_pods_depend_on_pod_objects() {
    use Reason::{DependencyUnavailable as Undecided, NodeUnknown};
    let to = |target: &str| Ok(target.to_owned());
    let networks = ["0.0.0.0/0".parse().unwrap()];
    for (minutes, known) in [(4, to("10.244.9.7:80")), (6, Err(Undecided))] {
        let unknown = if known.is_ok() {
            NodeUnknown
        } else {
            Undecided
        };
        let tables = tables_with_pods(Duration::from_mins(minutes)).await;
        for (authority, states) in [
            (
                "10.244.9.7:80",
                [Err(Undecided), known.clone(), Err(NodeUnknown)],
            ),
            (
                "web.a.pod:80",
                [Err(Undecided), known.clone(), Err(NodeUnknown)],
            ),
            // The node's podCIDR has this address, and is never used.
            (
                "10.244.1.7:80",
                [Err(Undecided), Err(unknown), Err(NodeUnknown)],
            ),
            (
                "edge-1:80",
                [to("edge-1:80"), to("edge-1:80"), to("edge-1:80")],
            ),
            (
                "10.0.0.1:80",
                [to("edge-1:80"), to("edge-1:80"), to("edge-1:80")],
            ),
        ] {
            for (nodes, expected) in tables.iter().zip(states) {
                let asked = RouteInput {
                    has_pod_names: true,
                    ..by(authority)
                };
                assert_eq!(routed(nodes, &asked), expected, "{authority} {minutes}");
                let target = direct::direct_target(&networks, &asked, nodes);
                assert_eq!(target, None, "{authority} {minutes}");
            }
        }
        for nodes in &tables {
            for authority in ["10.96.0.1:443", "web.example:80"] {
                let target = direct::direct_target(&networks, &by(authority), nodes);
                assert!(target.is_some(), "{authority}");
            }
        }
    }
}

#[test]
fn a_foreign_host_passes_beside_a_name_that_is_known() {
    let asked = RouteInput {
        sni: Some("edge-9"),
        authority: Some("10.97.0.1:6443"),
        port: Some(10250),
        ..RouteInput::default()
    };
    for table in tables() {
        assert_eq!(
            routed(&table.reader(), &asked),
            Ok("edge-9:10250".to_owned())
        );
    }
}

/// Returns a policy that denies nodes with one label, or of one pool, and allows all else.
fn policy(denied: NodeSelector) -> PolicyWriter {
    let rule = |then, r#where| Rule {
        name: None,
        who: Subjects {
            users: Specified::from(vec!["*".to_owned()]),
            ..Subjects::default()
        }
        .into(),
        r#where,
        what: Specified::<RequestMatch>::default(),
        then,
        line: 0,
    };
    let rules = vec![
        rule(Effect::Deny, denied.into()),
        rule(Effect::Allow, Specified::default()),
    ];
    PolicyWriter::new(Some(Policy::compile(&File { rules }).unwrap()))
}

async fn decided(nodes: &Nodes, policy: &PolicyWriter) -> Result<(), Reason> {
    let route = Route::new(name("edge-1"), Target::new("edge-1", 80));
    decided_about(nodes, policy, Destination::Node(&route)).await
}

async fn decided_about(
    nodes: &Nodes,
    policy: &PolicyWriter,
    destination: Destination<'_>,
) -> Result<(), Reason> {
    let authorizer = PolicyAuthorizer {
        policy: policy.reader(),
        nodes: nodes.clone(),
    };
    let ask = AuthzRequest {
        client: &ClientIdentity::for_test("alice"),
        remote_address: RemoteAddr::Unix(0),
        destination,
        action: Action::Request,
        method: &Method::GET,
        path: "/",
    };
    let (_, decided) = authz::check(&authorizer, &ask, Duration::from_secs(3)).await;
    decided.map_err(|error| error.reason)
}

#[tokio::test(start_paused = true)]
async fn a_label_rule_denies_or_is_undecided_while_labels_are_missing() {
    let [not_yet, stale, _] = tables().map(|table| table.reader());
    let by_label = policy(NodeSelector {
        labels: Specified::from(BTreeMap::from([("site".to_owned(), "north".to_owned())])),
        ..NodeSelector::default()
    });
    assert_eq!(
        decided(&not_yet, &by_label).await,
        Err(Reason::DependencyUnavailable)
    );
    assert_eq!(decided(&stale, &by_label).await, Err(Reason::Forbidden));
    let by_pool = policy(NodeSelector {
        pools: Specified::from(vec!["secret".to_owned()]),
        ..NodeSelector::default()
    });
    assert_eq!(
        decided(&not_yet, &by_pool).await,
        Err(Reason::DependencyUnavailable)
    );
    // Rules without labels and pools need no cluster.
    let by_name = policy(NodeSelector {
        nodes: Specified::from(vec!["edge-2".to_owned()]),
        ..NodeSelector::default()
    });
    assert_eq!(decided(&not_yet, &by_name).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_rule_about_pods_denies_or_is_undecided_while_pods_are_missing() {
    let [_, lost, _] = tables_with_pods(Duration::from_mins(6)).await;
    let [not_yet, stale, gone] = tables_with_pods(Duration::from_mins(4)).await;
    let namespaces = |name: &str| {
        policy(NodeSelector {
            pod_namespaces: Specified::from(vec![name.to_owned()]),
            ..NodeSelector::default()
        })
    };
    let (own, other) = (namespaces("a"), namespaces("b"));
    let undecided = Err(Reason::DependencyUnavailable);
    for (table, by_own, by_other) in [
        (&not_yet, undecided, undecided),
        (&lost, undecided, undecided),
        (&stale, Err(Reason::Forbidden), Ok(())),
        (&gone, Err(Reason::Forbidden), Err(Reason::Forbidden)),
    ] {
        let target = Target::new("10.244.9.7", 80);
        let route = Route::new(name("edge-1"), target).with_pod(table);
        let to_pod = Destination::Node(&route);
        assert_eq!(decided_about(table, &own, to_pod).await, by_own);
        assert_eq!(decided_about(table, &other, to_pod).await, by_other);
        // Rules about pods do not depend on the table for other destinations.
        assert_eq!(decided(table, &own).await, Ok(()));
        let address = "10.244.9.7:80".parse().unwrap();
        let pod = table.destination_pod("10.244.9.7".parse().unwrap(), None);
        let direct = Destination::Direct(address, &pod);
        let by_direct = if by_own == undecided {
            undecided
        } else {
            Err(Reason::Forbidden)
        };
        assert_eq!(decided_about(table, &own, direct).await, by_direct);
    }
}

#[tokio::test]
async fn a_rule_about_pods_is_undecided_if_pods_are_not_followed() {
    let nodes = NodesWriter::default();
    nodes.replace_cluster(members());
    let nodes = nodes.reader();
    let of_pods = policy(NodeSelector {
        pod_namespaces: Specified::from(vec!["a".to_owned()]),
        ..NodeSelector::default()
    });
    let undecided = Err(Reason::DependencyUnavailable);
    let to_pod = Route::new(name("edge-1"), Target::new("10.244.1.7", 80)).with_pod(&nodes);
    let to_pod = Destination::Node(&to_pod);
    assert_eq!(decided_about(&nodes, &of_pods, to_pod).await, undecided);
    let pod = DestinationPod::None;
    let direct = Destination::Direct("10.244.1.7:80".parse().unwrap(), &pod);
    assert_eq!(decided_about(&nodes, &of_pods, direct).await, undecided);
    assert_eq!(decided(&nodes, &of_pods).await, Ok(()));
}

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("data"), OpenMode::Create).unwrap();
    (folder, store)
}

#[test]
fn records_that_vanish_from_the_disk_end_no_revocation() {
    let (folder, store) = store();
    let nodes = NodesWriter::default();
    node_sync::reload_records(&nodes, &store).expect("there are none yet");
    let mut record = NodeRecord::name_only(&name("edge-1"), 7);
    let reason = "stolen".to_owned();
    record.revoked = Some(Revocation {
        at: 8,
        reason,
        other: causeway_certs::OtherFields::new(),
    });
    store.nodes().put(record).unwrap();
    node_sync::reload_records(&nodes, &store).unwrap();
    let file = folder.path().join("data/nodes.json");
    let text = std::fs::read(&file).unwrap();
    for broken in [Some("{"), None] {
        match broken {
            Some(text) => std::fs::write(&file, text).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        node_sync::reload_records(&nodes, &store).unwrap_err();
        assert!(
            nodes.reader().revocation_reason(&name("edge-1")).is_some(),
            "{broken:?}"
        );
    }
    std::fs::write(&file, text).unwrap();
    node_sync::reload_records(&nodes, &store).unwrap();
}

#[test]
fn pins_that_vanish_from_the_disk_believe_no_other_key() {
    let (folder, store) = store();
    let nodes = NodesWriter::default();
    nodes.upsert(name("edge-1"), Node::default());
    let (pins, writer, _meetings) = pins::pins(PinTable::new());
    let keeper = PinWriter {
        shared_state: None,
        store: store.clone(),
        nodes: nodes.reader(),
        follows_cluster: false,
        writer,
    };
    keeper.refresh().expect("there are none yet");
    let key: Fingerprint = "a".repeat(64).parse().unwrap();
    store
        .pins()
        .record_new(&[(name("edge-1"), 443, Pin { key, since: 1 })])
        .unwrap();
    keeper.refresh().unwrap();
    let file = folder.path().join("data/pins.json");
    for broken in [Some("{"), None] {
        match broken {
            Some(text) => std::fs::write(&file, text).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        keeper.refresh().unwrap_err();
        let known = pins.get(&name("edge-1"), 443).map(|pin| pin.key);
        assert_eq!(known, Some(key), "{broken:?}");
    }
    assert!(matches!(keeper.refresh(), Err(StoreError::Missing { .. })));
}

#[test]
fn a_policy_that_was_not_read_starts_no_gateway() {
    let (folder, store) = store();
    let domain = causeway_certs::TrustDomain::parse("a.test").unwrap();
    causeway_certs::install_provider();
    store
        .save_ca(&causeway_certs::Ca::create(&domain).unwrap())
        .unwrap();
    let config = Config {
        data_dir: folder.path().join("data"),
        policy: PathBuf::from("policy.yaml").into(),
        ..Config::default()
    };
    let why = Gateway::new(config).bind().unwrap_err().to_string();
    assert!(why.contains("policy.yaml"), "{why}");
}
