//! Builds the bytes of an answer from those of a query and the current tables.
//!
//! The module is pure: it has no socket, no clock, and no state of earlier queries. A node that joins is therefore found by the
//! next query. The module never queries another server, and never answers a response, because two servers would otherwise do so
//! forever. A query that cannot be parsed is answered with a header of twelve bytes or not at all. A forged source address
//! therefore receives no more bytes than were sent here.

use super::zones::{NEGATIVE_TTL, Zone, Zones};
use crate::state::nodes::{NodeLocation, Nodes};
use causeway_certs::NodeName;
use causeway_tunnel::target;
use hickory_proto::{
    op::{Edns, Header, HeaderCounts, Message, MessageType, Metadata, OpCode, ResponseCode},
    rr::{
        DNSClass, Name, RData, Record, RecordType,
        rdata::{A, AAAA, HINFO},
    },
    serialize::binary::{BinDecodable, BinDecoder},
};
use std::net::IpAddr;

/// Maximum UDP payload that passes every path without fragmentation (DNS Flag Day 2020): 1280, the minimum MTU of IPv6, less the
/// headers.
const MAX_UDP_PAYLOAD: u16 = 1232;

/// Transport of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// UDP: an answer that does not fit is marked as truncated.
    Udp,
    /// TCP.
    Tcp,
}

/// Outcome of a query, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryOutcome {
    /// Found a node that is connected by an edge, or a name of a pod.
    Edge,
    /// Found a node that is not behind a tunnel.
    Elsewhere,
    /// Found the zone itself, or its name server.
    Zone,
    /// Found no node.
    None,
    /// Not looked up: the name is outside our zones, or the query is not supported.
    Refused,
    /// A query that cannot be parsed.
    Malformed,
}

impl QueryOutcome {
    /// Returns the value of the metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Edge => "edge",
            Self::Elsewhere => "elsewhere",
            Self::Zone => "zone",
            Self::None => "none",
            Self::Refused => "refused",
            Self::Malformed => "malformed",
        }
    }
}

/// Result of looking up the queried name.
enum QueryMatch {
    Node(NodeLocation),
    /// A pod, which may not exist, and which this gateway serves in any case.
    Pod,
    Apex,
    Server,
    /// No node, but there is a name below it.
    EmptyNonTerminal,
    NxDomain,
}

/// Function that returns the addresses to which the name of a node at the edge resolves.
pub type EdgeAddressesFn<'a> = &'a dyn Fn(&NodeName) -> Vec<IpAddr>;

/// Returns the answer to `question`, or `None` if it is not answered, and the outcome.
pub fn answer(
    question: &[u8],
    transport: Transport,
    (zones, nodes): (&Zones, &Nodes),
    edge_addresses: EdgeAddressesFn<'_>,
) -> (QueryOutcome, Option<Vec<u8>>) {
    let Ok(head) = Header::read(&mut BinDecoder::new(question)) else {
        return (QueryOutcome::Malformed, None);
    };
    if head.message_type == MessageType::Response {
        return (QueryOutcome::Malformed, None);
    }
    if head.op_code != OpCode::Query {
        return (
            QueryOutcome::Refused,
            header_only_reply(&head, ResponseCode::NotImp),
        );
    }
    let has_plain_counts = has_plain_counts(head.counts);
    let Some(query) = has_plain_counts
        .then(|| Message::from_vec(question).ok())
        .flatten()
    else {
        return (
            QueryOutcome::Malformed,
            header_only_reply(&head, ResponseCode::FormErr),
        );
    };
    let mut reply = reply_to(&query);
    let outcome = fill_reply(&mut reply, &query, (zones, nodes), edge_addresses);
    let limit = match transport {
        Transport::Udp => query.max_payload().min(MAX_UDP_PAYLOAD),
        Transport::Tcp => u16::MAX,
    };
    let mut bytes = reply.to_vec().ok();
    if bytes
        .as_ref()
        .is_some_and(|bytes| bytes.len() > usize::from(limit))
    {
        bytes = reply.truncate().to_vec().ok();
    }
    (outcome, bytes)
}

/// Whether the header announces one question and at most the allowed records beside it: the SOA of a transfer, EDNS and a
/// signature. The check precedes parsing, because parsing takes memory and time for as many records as the header claims.
fn has_plain_counts(counts: HeaderCounts) -> bool {
    counts.queries == 1 && counts.answers == 0 && counts.authorities <= 1 && counts.additionals <= 2
}

/// Returns an answer that is a header only.
fn header_only_reply(head: &Header, code: ResponseCode) -> Option<Vec<u8>> {
    let mut reply = Message::error_msg(head.id, head.op_code, code);
    reply.metadata.recursion_desired = head.recursion_desired;
    reply.to_vec().ok()
}

/// Returns an answer without records.
fn reply_to(query: &Message) -> Message {
    let mut reply = Message::response(query.id, query.op_code);
    reply.metadata = Metadata::response_from_request(&query.metadata);
    reply.add_queries(query.queries.iter().cloned());
    if let Some(client_edns) = &query.edns {
        let mut edns = Edns::new();
        edns.set_max_payload(MAX_UDP_PAYLOAD)
            .set_dnssec_ok(client_edns.flags().dnssec_ok);
        reply.set_edns(edns);
    }
    reply
}

fn fill_reply(
    reply: &mut Message,
    query: &Message,
    (zones, nodes): (&Zones, &Nodes),
    edge_addresses: EdgeAddressesFn<'_>,
) -> QueryOutcome {
    let refuse = |reply: &mut Message, code| {
        reply.metadata.response_code = code;
        QueryOutcome::Refused
    };
    let Some(question) = query.queries.first() else {
        return refuse(reply, ResponseCode::FormErr);
    };
    if query.version() > 0 {
        return refuse(reply, ResponseCode::BADVERS);
    }
    let is_transfer = matches!(question.query_type, RecordType::AXFR | RecordType::IXFR);
    let zone_of_name = zones.find_zone(&question.name);
    let Some(zone) = zone_of_name.filter(|_| question.query_class == DNSClass::IN && !is_transfer)
    else {
        return refuse(reply, ResponseCode::Refused);
    };
    reply.metadata.authoritative = true;
    let query_match = match_name(&question.name, zone, nodes);
    let is_unknown =
        matches!(query_match, QueryMatch::NxDomain) && nodes.pending_reason().is_some();
    // Resolvers cache that a name does not exist. In the root zone, forwarders try another server only after NXDOMAIN, and the
    // name of the cluster's API may be one of these names.
    if is_unknown && !zone.apex.is_root() {
        return refuse(reply, ResponseCode::ServFail);
    }
    if let QueryMatch::NxDomain = query_match {
        reply.metadata.response_code = ResponseCode::NXDomain;
    } else {
        let record_type = question.query_type;
        let records = records(&query_match, record_type, (zone, zones), edge_addresses);
        let to_record = |data| Record::from_rdata(question.name.clone(), zones.ttl, data);
        reply.add_answers(records.into_iter().map(to_record));
    }
    if reply.answers.is_empty() {
        // The TTL of the SOA is the time for which resolvers may cache a negative answer (RFC 2308).
        let soa = RData::SOA(zone.soa.clone());
        reply.add_authority(Record::from_rdata(zone.apex.clone(), NEGATIVE_TTL, soa));
    }
    match query_match {
        QueryMatch::Node(NodeLocation::Edge(_)) | QueryMatch::Pod => QueryOutcome::Edge,
        QueryMatch::Node(NodeLocation::Elsewhere(_)) => QueryOutcome::Elsewhere,
        QueryMatch::Apex | QueryMatch::Server | QueryMatch::EmptyNonTerminal => QueryOutcome::Zone,
        QueryMatch::NxDomain => QueryOutcome::None,
    }
}

fn match_name(name: &Name, zone: &Zone, nodes: &Nodes) -> QueryMatch {
    let Some(node) = zone.node_name_in(name) else {
        return QueryMatch::NxDomain;
    };
    if node.is_empty() {
        return QueryMatch::Apex;
    }
    if let Some(location) = nodes.location(&node) {
        return QueryMatch::Node(location);
    }
    match node.to_ascii_lowercase().as_str() {
        "ns.dns" => QueryMatch::Server,
        "dns" => QueryMatch::EmptyNonTerminal,
        // A client of DNS is not authenticated, and does not learn which pods exist: each name of a pod exists.
        name if nodes.is_pod_name(name) => QueryMatch::Pod,
        name if nodes.follows_pods() && is_above_pods(name) => QueryMatch::EmptyNonTerminal,
        // Only its edge knows the services of a node, and a client of DNS is not authenticated: each name of a service exists.
        name => nodes
            .service_by_name(name)
            .map_or(QueryMatch::NxDomain, |(node, _)| {
                QueryMatch::Node(NodeLocation::Edge(node))
            }),
    }
}

/// Whether names of pods, `POD.NAMESPACE.pod`, are below this name (RFC 8020).
fn is_above_pods(name: &str) -> bool {
    let namespace = name.strip_suffix(".pod");
    name == "pod" || namespace.is_some_and(target::is_service_name)
}

/// Returns the records of this type.
fn records(
    meaning: &QueryMatch,
    record_type: RecordType,
    (zone, zones): (&Zone, &Zones),
    edge_addresses: EdgeAddressesFn<'_>,
) -> Vec<RData> {
    if record_type == RecordType::ANY && !matches!(meaning, QueryMatch::EmptyNonTerminal) {
        // A full answer would help amplification attacks with forged sources (RFC 8482).
        return vec![RData::HINFO(HINFO::new(
            "RFC8482".to_owned(),
            String::new(),
        ))];
    }
    match meaning {
        QueryMatch::Node(NodeLocation::Edge(node)) => {
            records_of_family(&edge_addresses(node), record_type)
        }
        QueryMatch::Server | QueryMatch::Pod => records_of_family(&zones.addresses, record_type),
        QueryMatch::Node(NodeLocation::Elsewhere(addresses)) => {
            records_of_family(addresses, record_type)
        }
        QueryMatch::Apex => match record_type {
            RecordType::SOA => vec![RData::SOA(zone.soa.clone())],
            RecordType::NS => vec![RData::NS(zone.ns.clone())],
            _ => Vec::new(),
        },
        QueryMatch::EmptyNonTerminal | QueryMatch::NxDomain => Vec::new(),
    }
}

fn records_of_family(addresses: &[IpAddr], record_type: RecordType) -> Vec<RData> {
    let record = |address: &IpAddr| match (address.to_canonical(), record_type) {
        (IpAddr::V4(address), RecordType::A) => Some(RData::A(A(address))),
        (IpAddr::V6(address), RecordType::AAAA) => Some(RData::AAAA(AAAA(address))),
        _ => None,
    };
    addresses.iter().filter_map(record).collect()
}

#[cfg(test)]
mod tests;
