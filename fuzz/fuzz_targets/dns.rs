//! A DNS query: every answer is a DNS message, answers that query, and is not larger than fits.

#![no_main]

use causeway_certs::NodeName;
use causeway_gateway::{
    Config,
    config::Dns,
    control::dns::{QueryOutcome, Transport, Zones, answer},
    state::{Node, Nodes, NodesWriter},
};
use hickory_proto::op::{Message, MessageType, ResponseCode};
use libfuzzer_sys::fuzz_target;
use std::{net::IpAddr, sync::LazyLock};

static TABLES: LazyLock<(Zones, Nodes, Vec<IpAddr>)> = LazyLock::new(|| {
    let many = (0..60).flat_map(|last| [format!("192.0.2.{last}"), format!("2001:db8::{last}")]);
    let addresses: Vec<IpAddr> = many.map(|text| text.parse().expect("an address")).collect();
    let dns = Dns {
        zones: vec![".".to_owned(), "nodes.example".to_owned()],
        addresses: addresses.clone(),
        ..Dns::default()
    };
    let config = Config {
        dns: dns.into(),
        ..Config::default()
    };
    let nodes = NodesWriter::default();
    for name in ["edge-1", "edge-1.site-a"] {
        let name = NodeName::parse(name).expect("a node's name");
        nodes.upsert(name, Node::default());
    }
    let zones = Zones::from_config(&config).expect("zones");
    (zones, nodes.reader(), addresses)
});

fuzz_target!(|question: &[u8]| {
    let (zones, nodes, addresses) = &*TABLES;
    for (over, limit) in [(Transport::Udp, 1232), (Transport::Tcp, 65_535)] {
        let edge_addresses = |_: &NodeName| addresses.clone();
        let answered = answer(question, over, (zones, nodes), &edge_addresses);
        let (found, Some(bytes)) = answered else {
            continue;
        };
        assert!(
            question.len() >= 12 && question[2] & 0x80 == 0,
            "an answer is not answered"
        );
        assert!(bytes.len() <= limit);
        let message = Message::from_vec(&bytes).expect("an answer can be read");
        assert_eq!(bytes[..2], question[..2], "the id");
        assert_eq!(message.message_type, MessageType::Response);
        assert!(!message.recursion_available);
        match found {
            QueryOutcome::Malformed => assert_eq!(
                (bytes.len(), message.response_code),
                (12, ResponseCode::FormErr)
            ),
            QueryOutcome::Edge => {
                assert!(message.authoritative && message.response_code == ResponseCode::NoError)
            }
            QueryOutcome::None => assert_eq!(message.response_code, ResponseCode::NXDomain),
            QueryOutcome::Refused => {
                assert!(
                    message.answers.is_empty() && message.response_code != ResponseCode::NoError
                )
            }
            QueryOutcome::Elsewhere | QueryOutcome::Zone => {}
        }
    }
});
