//! Host, `:authority` and SNI: every input leads to one known node and a valid target, or to an error.
//!
//! Three lines: Host, the target's authority (may be empty), SNI.

#![no_main]

use causeway_certs::NodeName;
use causeway_gateway::{
    proxy::{
        request,
        route::{self, RouteInput},
    },
    state::{Node, Nodes, NodesWriter},
};
use causeway_tunnel::{Target, target};
use http::{HeaderValue, Request, Uri, header::HOST};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static NODES: LazyLock<Nodes> = LazyLock::new(|| {
    let nodes = NodesWriter::default();
    for (name, address) in [
        ("edge-1", "10.0.0.1"),
        ("10.0.0.2", "fd00::2"),
        ("a.b", "fd00::3"),
    ] {
        let node = Node {
            addresses: vec![address.parse().expect("an address")],
            pod_networks: vec!["10.42.0.0/24".parse().expect("a network")],
            ..Node::default()
        };
        nodes.upsert(NodeName::parse(name).expect("a node's name"), node);
    }
    nodes.reader()
});

/// The default limits of a gateway.
const BOUNDS: request::RequestLimits = request::RequestLimits {
    target_bytes: 65_536,
    header_bytes: 65_536,
    max_headers: 100,
};

fuzz_target!(|bytes: &[u8]| {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let [host, authority, sni] = [(); 3].map(|()| lines.next().unwrap_or_default());
    split(host);
    let Some(request) = asked(host, authority) else {
        return;
    };
    let Ok(named) = request::check(&request, BOUNDS).and_then(|()| request::authority(&request))
    else {
        return;
    };
    let asked = RouteInput {
        sni: std::str::from_utf8(sni).ok(),
        authority: named,
        port: Some(9100),
        ..RouteInput::default()
    };
    let Ok(route) = route::find_route(&asked, &NODES) else {
        return;
    };
    assert!(NODES.get(&route.node).is_some(), "{route:?}");
    let text = route.target.to_string();
    assert_eq!(
        text.parse(),
        Ok(route.target),
        "what travels is what was meant"
    );
    HeaderValue::try_from(text).expect("a target fits into a field");
    if let Some(node) = route::bound_node(&asked, &NODES) {
        assert_eq!(node, route.node, "the SNI and the Host lead to one node");
    }
});

fn asked(host: &[u8], authority: &[u8]) -> Option<Request<()>> {
    let mut request = Request::new(());
    request
        .headers_mut()
        .insert(HOST, HeaderValue::from_bytes(host).ok()?);
    if !authority.is_empty() {
        let uri = Uri::builder()
            .scheme("https")
            .authority(authority)
            .path_and_query("/");
        *request.uri_mut() = uri.build().ok()?;
    }
    Some(request)
}

/// Checks that splitting and joining returns the same text.
fn split(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let Ok((host, port)) = target::split_host_port(text) else {
        return;
    };
    assert!(host.is_ascii() && !host.is_empty());
    let target = Target::new(host, port.unwrap_or(1));
    assert_eq!(target.to_string().parse(), Ok(target));
}
