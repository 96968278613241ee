//! Server names (SNI) that clients may not send, or in an unusual form: each reaches its own node, or the client gets
//! an alert.

use crate::world::{
    PATIENCE, World,
    app::{App, Script},
    edge::Edge,
    gateway::{anonymous, listener},
    tool::{Tool, need},
    until,
};
use causeway_edge::config::Protocol;
use causeway_gateway::{
    config::{Listener, ListenerProtocol, policy},
    state::{Policy, PolicyReader, PolicyWriter},
};
use serde_json::{Value, json};
use std::{io::ErrorKind, net::SocketAddr, path::Path};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

fn policy(rules: &Value) -> PolicyReader {
    let rules: policy::Policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
    PolicyWriter::new(Some(Policy::compile(&rules).unwrap())).reader()
}

/// Bytes behind their length of two bytes.
fn with_length(bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
    [&length, bytes].concat()
}

/// Returns the `server_name` extension with these names of the type `host_name` (RFC 6066, section 3).
pub(crate) fn server_name_extension(names: &[&[u8]]) -> Vec<u8> {
    let entry = |name: &&[u8]| [&[0], &*with_length(name)].concat();
    let list: Vec<u8> = names.iter().flat_map(entry).collect();
    [&[0, 0], &*with_length(&with_length(&list))].concat()
}

/// Returns the record with the ClientHello of a TLS 1.2 client, which no listener of the gateway serves.
pub(crate) fn client_hello(server_names: &[u8]) -> Vec<u8> {
    let schemes = [&[0, 13], &*with_length(&with_length(&[4, 3, 8, 4]))].concat();
    let body = [
        &[3, 3][..],
        &[7; 32],
        &[0],
        &with_length(&0xc02f_u16.to_be_bytes()),
        &[1, 0],
        &with_length(&[&*schemes, server_names].concat()),
    ]
    .concat();
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    let message = [&[1], &length[1..], &body].concat();
    [&[22, 3, 1], &*with_length(&message)].concat()
}

/// Sends bytes. Returns the alert of the answer, `reset` for a reset without an answer, or else the answer as text.
pub(crate) async fn answer_to(address: SocketAddr, hello: &[u8]) -> String {
    let mut wire = TcpStream::connect(address).await.unwrap();
    wire.write_all(hello).await.unwrap();
    let mut answer = Vec::new();
    // An app that ends without reading resets the connection after its answer.
    let reading = timeout(PATIENCE, wire.read_to_end(&mut answer)).await;
    let ended = reading.expect("the connection ends");
    let is_reset = ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset);
    match *answer {
        [] if is_reset => RESET.to_owned(),
        // A fatal alert of two bytes (RFC 8446, section 6).
        [21, 3, _, 0, 2, 2, description] => {
            assert!(!is_reset, "a reset behind alert {description}");
            format!("alert {description}")
        }
        _ => String::from_utf8_lossy(&answer).into_owned(),
    }
}

/// End of a session that the policy denies.
pub(crate) const RESET: &str = "reset";
/// `unrecognized_name`, and the alerts of rustls for a name that no ClientHello may have.
pub(crate) const UNRECOGNIZED: &str = "alert 112";
const MALFORMED: &str = "alert 50";
const ILLEGAL: &str = "alert 47";
/// `handshake_failure`: once the `https` listener has accepted the name, it finds no parameters of TLS 1.3 in
/// [`client_hello`].
const ACCEPTED: &str = "alert 40";

/// Server names, and the answers of an `https` listener, a `passthrough` listener, and one with edge-3 as default node.
fn server_name_rows() -> Vec<(Vec<u8>, [&'static str; 3])> {
    let one = |name: &str| server_name_extension(&[name.as_bytes()]);
    let unknown = [UNRECOGNIZED; 3];
    let malformed = [MALFORMED; 3];
    let illegal = [ILLEGAL; 3];
    let edge_1 = [ACCEPTED, "edge-1", "edge-1"];
    // Not a name: the connection has none.
    let unnamed = [ACCEPTED, UNRECOGNIZED, "edge-3"];
    let labels = format!("{}edge-1", format!("{}.", "a".repeat(60)).repeat(4));
    // `padding` (RFC 7685).
    let padding = [&[0, 21][..], &with_length(&[0; 12 << 10])].concat();
    vec![
        (one("edge-1"), edge_1),
        ([padding, one("edge-1")].concat(), edge_1),
        (one("EDGE-1"), edge_1),
        (one("edge-1."), edge_1),
        (one("eDGE-1."), edge_1),
        (Vec::new(), unnamed),
        (one("127.0.0.1"), unnamed),
        (one("169.254.169.254"), unnamed),
        (one("::1"), unnamed),
        (one(""), malformed),
        (server_name_extension(&[]), malformed),
        (server_name_extension(&[b"edge-1", b"edge-2"]), malformed),
        ([one("edge-1"), one("edge-2")].concat(), malformed),
        (one("edge-1.."), illegal),
        (one(".edge-1"), illegal),
        (one("edge-1\0"), illegal),
        (one("edge-1\0.edge-2"), illegal),
        (one("edge-1 "), illegal),
        (one("edge-1,edge-2"), illegal),
        (one("edge-1:9100"), illegal),
        (one("[::1]"), illegal),
        (one("*"), illegal),
        (one("*.edge-1"), illegal),
        (one("edge-*"), illegal),
        (one("\u{e9}dge-1"), illegal),
        (one(&"a".repeat(64)), illegal),
        (one(&"a".repeat(255)), illegal),
        // 255 bytes, and the 253 that a name may have.
        (one(&format!("{labels}.aaaa")), illegal),
        (one(&format!("{labels}.aa")), unknown),
        (one("xn--dge-1-9ra"), unknown),
        (one("edge-9"), unknown),
        (one("edge-1.evil.test"), unknown),
        (one("edge_1"), unknown),
    ]
}

/// Three nodes. The policy excludes edge-2, and edge-3 is the default node of one listener.
struct NamedNodes {
    world: World,
    https: Vec<App>,
    raw: Vec<App>,
    _edges: Vec<Edge>,
}

impl NamedNodes {
    async fn start() -> Self {
        let rules = policy(&json!([
            { "where": { "nodes": ["edge-1", "edge-3"] }, "then": "allow" },
        ]));
        let through = |name: &str, node: Option<&str>| Listener {
            node: node.map(str::to_owned),
            port: Some(9200),
            ..anonymous(name, ListenerProtocol::Passthrough)
        };
        let web = Listener {
            port: Some(9100),
            ..listener("https", ListenerProtocol::Https)
        };
        let world = World::build().policy(rules).listener(web);
        let world = world.listener(through("named", None));
        let world = world.listener(through("default", Some("edge-3")));
        let world = Box::pin(world.start()).await;
        let (mut https, mut raw, mut edges) = (Vec::new(), Vec::new(), Vec::new());
        for node in ["edge-1", "edge-2", "edge-3"] {
            let app = App::saying(node).await;
            let bytes = App::tcp(Script::new().write(node).close()).await;
            let edge = world.edge(node).port(9100, app.address());
            let edge = edge.port_as(9200, Protocol::Tcp, bytes.address());
            edges.push(Box::pin(edge.join()).await);
            https.push(app);
            raw.push(bytes);
        }
        Self {
            world,
            https,
            raw,
            _edges: edges,
        }
    }

    /// Sends a request with this Host by openssl, which sends any server name. Returns the answer.
    async fn request(&self, server_name: &str, host: &str) -> String {
        let leaf = self.world.client_leaf("tester");
        let both = format!("{}{}", leaf.chain_pem(), leaf.key_pem().expose());
        let certificate = self.world.write(&both);
        let address = self.world.listener("https").to_string();
        let openssl = Tool::new("openssl").args(["s_client", "-quiet", "-connect", &address]);
        let openssl = openssl.args(["-servername", server_name]);
        let openssl = openssl.args([Path::new("-cert"), &certificate]);
        let openssl = openssl.args([Path::new("-key"), &certificate]);
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        openssl.input(request).run().await.text()
    }
}

#[tokio::test]
async fn a_server_name_reaches_its_own_node_or_gets_an_alert() {
    let nodes = Box::pin(NamedNodes::start()).await;
    let rows = server_name_rows();
    let mut refused = 0;
    for (names, expected) in &rows {
        let hello = client_hello(names);
        for (listener, expected) in ["https", "named", "default"].into_iter().zip(expected) {
            let answer = answer_to(nodes.world.listener(listener), &hello).await;
            let name = String::from_utf8_lossy(names);
            assert_eq!(answer, *expected, "{name:?} at {listener}");
            refused += u64::from(answer.starts_with("alert"));
        }
    }
    // Each refusal is counted with its reason.
    let metrics = nodes.world.metrics().await;
    let reasons = ["unrecognized_name", "hello", "handshake"];
    let counted = reasons.map(|why| metrics.sum("handshakes_failed_total", &[("why", why)]));
    assert_eq!(counted.iter().sum::<u64>(), refused, "{counted:?}");
    // A node that the policy excludes is not reached by any writing of its name.
    for name in ["edge-2", "EDGE-2", "edge-2."] {
        for listener in ["named", "default"] {
            let hello = client_hello(&server_name_extension(&[name.as_bytes()]));
            let answer = answer_to(nodes.world.listener(listener), &hello).await;
            assert_eq!(answer, RESET, "{name} at {listener}");
        }
    }
    let denied = async || {
        let records = nodes.world.log().records().into_iter();
        let denied = records.filter(|record| record["reason"] == "forbidden");
        denied.filter(|record| record["node"] == "edge-2").count() == 6
    };
    until("each refused session has a record", denied).await;
    assert_eq!(nodes.raw[1].connections(), 0);
}

#[tokio::test]
async fn a_host_beside_another_server_name_is_misdirected() {
    need!("openssl");
    let nodes = Box::pin(NamedNodes::start()).await;
    for (server_name, host, expected) in [
        ("edge-1", "edge-1:9100", "edge-1"),
        ("EDGE-1.", "edge-1:9100", "edge-1"),
        ("edge-1.", "EDGE-1.:9100", "edge-1"),
        ("127.0.0.1", "edge-1:9100", "edge-1"),
        ("edge-1", "elsewhere.test", "edge-1"),
        ("edge-1.", "edge-3:9100", "misdirected"),
        ("EDGE-1", "edge-2.:9100", "misdirected"),
        ("edge-3", "EDGE-1.", "misdirected"),
        ("127.0.0.1", "edge-2.:9100", "forbidden"),
        ("edge-2.", "edge-1:9100", "misdirected"),
        ("edge-2.", "elsewhere.test", "forbidden"),
        ("127.0.0.1", "elsewhere.test", "node_unknown"),
    ] {
        let answer = nodes.request(server_name, host).await;
        let body = answer.rsplit("\r\n").next().unwrap();
        let reason = serde_json::from_str::<Value>(body);
        let outcome = reason.map_or(body.to_owned(), |problem| {
            problem["reason"].as_str().unwrap().to_owned()
        });
        assert_eq!(outcome, expected, "{server_name} {host}: {answer}");
    }
    assert_eq!(nodes.https[1].connections(), 0);
}
