use super::*;
use crate::{
    config::{Config, Dns},
    state::{ClusterNode, Node, NodesWriter},
};
use causeway_certs::NodeName;
use hickory_proto::op::Query;
use std::{collections::BTreeMap, time::Duration};

const TTL: u32 = 7;

fn zones(zones: &[&str], addresses: &[&str]) -> Zones {
    let dns = Dns {
        zones: zones.iter().map(|zone| (*zone).to_owned()).collect(),
        addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        ttl: Duration::from_secs(TTL.into()),
        ..Dns::default()
    };
    let config = Config {
        dns: dns.into(),
        ..Config::default()
    };
    Zones::from_config(&config).unwrap()
}

fn name(text: &str) -> NodeName {
    NodeName::parse(text).unwrap()
}

/// `edge-1`, `edge-1.site-a` and `far` are at the edge; `cloud-1` has an IPv4 address and `cloud-2` none.
fn table() -> NodesWriter {
    let writer = NodesWriter::default();
    for edge in ["edge-1", "edge-1.site-a", "far"] {
        writer.upsert(name(edge), Node::default());
    }
    let at = |addresses| ClusterNode {
        addresses,
        ..ClusterNode::default()
    };
    let elsewhere = [
        (name("cloud-1"), at(vec!["192.0.2.1".parse().unwrap()])),
        (name("cloud-2"), at(Vec::new())),
    ];
    writer.replace_cluster(BTreeMap::from(elsewhere));
    writer
}

struct TestServer {
    zones: Zones,
    nodes: Nodes,
}

impl TestServer {
    fn new() -> Self {
        Self {
            zones: zones(&["nodes.Example.internal"], &["10.96.0.20", "fd00::20"]),
            nodes: table().reader(),
        }
    }

    fn bytes(&self, question: &[u8], over: Transport) -> (QueryOutcome, Option<Vec<u8>>) {
        let tables = (&self.zones, &self.nodes);
        answer(question, over, tables, &|_| self.zones.addresses.clone())
    }

    fn message(&self, question: &Message, over: Transport) -> (QueryOutcome, Message) {
        let (found, bytes) = self.bytes(&question.to_vec().unwrap(), over);
        (found, Message::from_vec(&bytes.unwrap()).unwrap())
    }

    fn ask(&self, name: &str, kind: RecordType) -> (QueryOutcome, Message) {
        self.message(&question(name, kind), Transport::Udp)
    }

    /// Returns the outcome, the code, and the data of the answer.
    fn short(&self, name: &str, kind: RecordType) -> (QueryOutcome, ResponseCode, Vec<String>) {
        let (found, message) = self.ask(name, kind);
        let data = message.answers.iter().map(|record| record.data.to_string());
        (found, message.response_code, data.collect())
    }
}

fn question(name: &str, kind: RecordType) -> Message {
    let mut message = Message::new(4711, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message
}

#[test]
fn an_edge_maps_to_this_gateway_and_other_nodes_to_themselves() {
    let desk = TestServer::new();
    let zone = "nodes.example.internal.";
    for (node, kind, found, data) in [
        (
            "edge-1",
            RecordType::A,
            QueryOutcome::Edge,
            &["10.96.0.20"][..],
        ),
        (
            "edge-1",
            RecordType::AAAA,
            QueryOutcome::Edge,
            &["fd00::20"],
        ),
        ("edge-1", RecordType::TXT, QueryOutcome::Edge, &[]),
        (
            "edge-1.site-a",
            RecordType::A,
            QueryOutcome::Edge,
            &["10.96.0.20"],
        ),
        (
            "cloud-1",
            RecordType::A,
            QueryOutcome::Elsewhere,
            &["192.0.2.1"],
        ),
        ("cloud-1", RecordType::AAAA, QueryOutcome::Elsewhere, &[]),
        ("cloud-2", RecordType::A, QueryOutcome::Elsewhere, &[]),
    ] {
        let (what, code, answers) = desk.short(&format!("{node}.{zone}"), kind);
        assert_eq!(
            (what, code),
            (found, ResponseCode::NoError),
            "{node} {kind}"
        );
        assert_eq!(answers, data, "{node} {kind}");
    }
}

#[test]
fn each_name_of_a_pod_maps_to_this_gateway_where_pods_are_followed() {
    let zone = "nodes.example.internal.";
    let names = [
        "web-0.shop.pod",
        "Nobody.Shop.Pod",
        "etcd.example.kube-system.pod",
    ];
    let desk = TestServer::new();
    for name in names {
        let (_, code, _) = desk.short(&format!("{name}.{zone}"), RecordType::A);
        assert_eq!(code, ResponseCode::NXDomain, "{name}");
    }
    let writer = table();
    // No pod is known, and the pods are not loaded.
    writer.follow_pods(&["10.244.0.0/16".parse().unwrap()]);
    let desk = TestServer {
        nodes: writer.reader(),
        ..desk
    };
    for name in names {
        let answer = desk.short(&format!("{name}.{zone}"), RecordType::A);
        let expected = vec!["10.96.0.20".to_owned()];
        assert_eq!(
            answer,
            (QueryOutcome::Edge, ResponseCode::NoError, expected),
            "{name}"
        );
    }
    for (name, code) in [
        // Resolvers may not look up names below a name that does not exist.
        ("shop.pod", ResponseCode::NoError),
        ("pod", ResponseCode::NoError),
        ("web_0.shop.pod", ResponseCode::NXDomain),
        ("web-0.shop.svc", ResponseCode::NXDomain),
    ] {
        let answer = desk.short(&format!("{name}.{zone}"), RecordType::A);
        assert_eq!((answer.1, answer.2), (code, Vec::new()), "{name}");
    }
}

#[test]
fn case_is_ignored_and_the_answer_repeats_the_queried_name() {
    let desk = TestServer::new();
    let (found, message) = desk.ask("eDGe-1.noDES.example.INTERNAL.", RecordType::A);
    assert_eq!(found, QueryOutcome::Edge);
    assert_eq!(
        message.answers[0].name.to_ascii(),
        "eDGe-1.noDES.example.INTERNAL."
    );
    assert_eq!(message.answers[0].ttl, TTL);
    assert!(message.authoritative && !message.recursion_available && message.recursion_desired);
    assert_eq!(
        (message.id, message.message_type),
        (4711, MessageType::Response)
    );
    assert_eq!(
        message.queries,
        question("eDGe-1.noDES.example.INTERNAL.", RecordType::A).queries
    );
}

#[test]
fn unknown_names_are_nxdomain_and_expire_within_a_second() {
    let desk = TestServer::new();
    for node in [
        "edge-2",
        "edge-1.site-b",
        "site-a",
        "*",
        "_tcp",
        "x_y.edge-1",
        "a.b.edge-1",
        "x.cloud-1",
        r"edge-1\.site-a",
    ] {
        let (found, message) = desk.ask(&format!("{node}.nodes.example.internal."), RecordType::A);
        assert_eq!(
            (found, message.response_code),
            (QueryOutcome::None, ResponseCode::NXDomain),
            "{node}"
        );
        assert!(message.authoritative && message.answers.is_empty());
        assert_negative(&message);
    }
    let (_, message) = desk.ask("cloud-1.nodes.example.internal.", RecordType::AAAA);
    assert_negative(&message);
}

fn assert_negative(message: &Message) {
    let [soa] = message.authorities.as_slice() else {
        panic!("{message}");
    };
    let RData::SOA(data) = &soa.data else {
        panic!("{message}");
    };
    assert_eq!((soa.ttl, data.minimum), (1, 1));
    assert_eq!(soa.name.to_ascii(), "nodes.example.internal.");
}

#[test]
fn a_name_of_a_service_resolves_like_its_node() {
    let desk = TestServer::new();
    let ask = |name: &str| desk.short(&format!("{name}.nodes.example.internal."), RecordType::A);
    for name in ["printer.edge-1", "Printer.EDGE-1", "x.edge-1.site-a"] {
        assert_eq!(ask(name), ask("edge-1"), "{name}");
        assert_eq!(ask(name).0, QueryOutcome::Edge);
    }
}

#[test]
fn an_edge_that_joins_is_found_by_the_next_question() {
    let (table, mut desk) = (table(), TestServer::new());
    desk.nodes = table.reader();
    let ask = || desk.short("late.nodes.example.internal.", RecordType::A);
    assert_eq!(ask().1, ResponseCode::NXDomain);
    table.upsert(name("late"), Node::default());
    assert_eq!(ask().2, ["10.96.0.20"]);
    table.remove(&name("late"));
    assert_eq!(ask().1, ResponseCode::NXDomain);
}

#[test]
fn the_zone_has_an_apex_with_a_server_that_has_an_address() {
    let desk = TestServer::new();
    let (found, code, soa) = desk.short("nodes.example.internal.", RecordType::SOA);
    assert_eq!(
        (found, code, soa.len()),
        (QueryOutcome::Zone, ResponseCode::NoError, 1)
    );
    let (_, _, ns) = desk.short("NODES.example.internal.", RecordType::NS);
    assert_eq!(ns, ["ns.dns.nodes.example.internal."]);
    assert_eq!(desk.short(&ns[0], RecordType::A).2, ["10.96.0.20"]);
    for empty in ["nodes.example.internal.", "dns.nodes.example.internal."] {
        let (found, message) = desk.ask(empty, RecordType::A);
        assert_eq!(
            (found, message.response_code),
            (QueryOutcome::Zone, ResponseCode::NoError)
        );
        assert_negative(&message);
    }
}

#[test]
fn foreign_zones_are_refused() {
    let desk = TestServer::new();
    for (name, kind) in [
        ("example.internal.", RecordType::A),
        ("edge-1.", RecordType::A),
        (".", RecordType::NS),
        ("edge-1.othernodes.example.internal.", RecordType::A),
        ("edge-1.xnodes.example.internal.", RecordType::A),
        ("nodes.example.internal.", RecordType::AXFR),
        ("nodes.example.internal.", RecordType::IXFR),
    ] {
        let (found, message) = desk.ask(name, kind);
        assert_eq!(
            (found, message.response_code),
            (QueryOutcome::Refused, ResponseCode::Refused),
            "{name}"
        );
        assert!(message.answers.is_empty() && message.authorities.is_empty());
        assert!(!message.authoritative);
    }
    let mut chaos = question("edge-1.nodes.example.internal.", RecordType::A);
    chaos.queries[0].set_query_class(DNSClass::CH);
    let (_, message) = desk.message(&chaos, Transport::Udp);
    assert_eq!(message.response_code, ResponseCode::Refused);
}

#[test]
fn the_root_zone_answers_bare_names_and_the_longest_zone_wins() {
    let mut desk = TestServer::new();
    desk.zones = zones(&[".", "far.", "nodes.example"], &["10.96.0.20"]);
    assert_eq!(desk.short("edge-1.", RecordType::A).2, ["10.96.0.20"]);
    assert_eq!(
        desk.short("edge-1.site-a.", RecordType::A).2,
        ["10.96.0.20"]
    );
    assert_eq!(desk.short("com.", RecordType::A).1, ResponseCode::NXDomain);
    assert_eq!(
        desk.short("edge-1.nodes.example.", RecordType::A).2.len(),
        1
    );
    assert_eq!(desk.short(".", RecordType::NS).2, ["ns.dns."]);
    // A name that is both a node and a zone resolves as the zone.
    assert_eq!(desk.short("far.", RecordType::A).0, QueryOutcome::Zone);
}

#[test]
fn an_any_query_gets_a_minimal_answer() {
    let desk = TestServer::new();
    let (_, message) = desk.ask("edge-1.nodes.example.internal.", RecordType::ANY);
    let [record] = message.answers.as_slice() else {
        panic!("{message}");
    };
    assert!(matches!(&record.data, RData::HINFO(_)), "{message}");
    let nobody = desk.short("nobody.nodes.example.internal.", RecordType::ANY);
    assert_eq!(nobody.1, ResponseCode::NXDomain);
}

#[test]
fn an_answer_that_does_not_fit_says_so_and_is_whole_over_tcp() {
    let mut desk = TestServer::new();
    let many: Vec<String> = (0..100).map(|last| format!("fd00::{last:x}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    desk.zones = zones(&["nodes.example.internal"], &many);
    let mut asked = question("edge-1.nodes.example.internal.", RecordType::AAAA);
    let whole = desk.message(&asked, Transport::Tcp).1;
    assert_eq!((whole.truncation, whole.answers.len()), (false, 100));
    for (offered, limit) in [(None, 512), (Some(40), 512), (Some(4096), 1232)] {
        asked.edns = offered.map(|size| {
            let mut edns = Edns::new();
            edns.set_max_payload(size).set_dnssec_ok(true);
            edns
        });
        let (_, bytes) = desk.bytes(&asked.to_vec().unwrap(), Transport::Udp);
        let bytes = bytes.unwrap();
        let short = Message::from_vec(&bytes).unwrap();
        assert!(short.truncation && bytes.len() <= limit);
        assert_eq!((short.id, short.queries.len()), (4711, 1));
        assert_eq!(short.edns.is_some(), offered.is_some());
    }
    // 28 records of 28 bytes fit into the size that EDNS offers, and not into 512 bytes.
    desk.zones = zones(&["nodes.example.internal"], &many[..28]);
    let (_, message) = desk.message(&asked, Transport::Udp);
    assert_eq!((message.truncation, message.answers.len()), (false, 28));
    let edns = message.edns.as_ref().unwrap();
    assert_eq!((edns.max_payload(), edns.version()), (1232, 0));
    assert!(edns.flags().dnssec_ok, "it is copied (RFC 3225)");
    asked.edns = None;
    assert!(desk.message(&asked, Transport::Udp).1.truncation);
}

#[test]
fn another_edns_version_gets_the_supported_version() {
    let desk = TestServer::new();
    let mut asked = question("edge-1.nodes.example.internal.", RecordType::A);
    let mut edns = Edns::new();
    edns.set_version(1);
    asked.edns = Some(edns);
    let (found, message) = desk.message(&asked, Transport::Udp);
    assert_eq!(found, QueryOutcome::Refused);
    // The code has two names in the library, so its number is compared.
    assert_eq!(u16::from(message.response_code), 16);
    assert_eq!(message.version(), 0);
    assert!(message.answers.is_empty());
}

#[test]
fn only_queries_are_answered_and_errors_are_never_larger() {
    let desk = TestServer::new();
    let asked = question("edge-1.nodes.example.internal.", RecordType::A);
    let bytes = asked.to_vec().unwrap();
    for operation in [1, 2, 4, 5, 6, 15] {
        let mut other = bytes.clone();
        other[2] = operation << 3;
        let (found, answer) = desk.bytes(&other, Transport::Udp);
        let answer = Message::from_vec(&answer.unwrap()).unwrap();
        assert_eq!(
            (found, answer.response_code),
            (QueryOutcome::Refused, ResponseCode::NotImp)
        );
    }
    let mut response = bytes.clone();
    response[2] |= 0x80;
    assert_eq!(
        desk.bytes(&response, Transport::Udp),
        (QueryOutcome::Malformed, None)
    );
    for count in [0, 2, 255] {
        let mut several = bytes.clone();
        several[4..6].copy_from_slice(&[count, count]);
        assert_malformed(&desk, &several);
    }
    for (place, most) in [(7, 0), (9, 1), (11, 2)] {
        let mut records = bytes.clone();
        records[place] = most + 1;
        // The root, A, IN, no data: the shortest possible record.
        records.extend_from_slice(&[0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0].repeat(3));
        assert_malformed(&desk, &records);
    }
    for length in 0..bytes.len() {
        assert_malformed(&desk, &bytes[..length]);
    }
}

fn assert_malformed(desk: &TestServer, question: &[u8]) {
    let (found, answer) = desk.bytes(question, Transport::Udp);
    assert_eq!(found, QueryOutcome::Malformed, "{question:?}");
    let Some(answer) = answer else {
        return assert!(question.len() < 12);
    };
    assert!(answer.len() == 12 && question.len() >= 12);
    let answer = Message::from_vec(&answer).unwrap();
    assert_eq!(
        (answer.id, answer.response_code),
        (4711, ResponseCode::FormErr)
    );
}

#[test]
fn without_the_section_everything_is_refused() {
    let mut desk = TestServer::new();
    desk.zones = Zones::from_config(&Config::default()).unwrap();
    assert_eq!(
        desk.short("edge-1.", RecordType::A).1,
        ResponseCode::Refused
    );
}

/// A resolver would cache a negative answer.
#[test]
fn unknown_names_are_servfail_until_the_nodes_are_known() {
    let writer = NodesWriter::default();
    writer.upsert(name("edge-1"), Node::default());
    writer.set_pending("not known yet");
    let desk = TestServer {
        nodes: writer.reader(),
        ..TestServer::new()
    };
    let code = |node: &str| {
        let asked = format!("{node}.nodes.example.internal.");
        desk.short(&asked, RecordType::A).1
    };
    assert_eq!(code("edge-1"), ResponseCode::NoError);
    assert_eq!(code("edge-2"), ResponseCode::ServFail);
    let root = TestServer {
        zones: zones(&["."], &["10.96.0.20"]),
        nodes: writer.reader(),
    };
    let (_, elsewhere, _) = root.short("kube-apiserver.example.", RecordType::A);
    assert_eq!(elsewhere, ResponseCode::NXDomain);
    writer.replace_cluster(BTreeMap::new());
    assert_eq!(code("edge-2"), ResponseCode::NXDomain);
}
