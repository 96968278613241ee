//! Table of what each client and each edge may reach, one test for each way in and for the way back.
//!
//! All tests have the same nodes, policy and rules of egress. A row names the subject, the destination, and the exact
//! outcome.

mod pods;

use crate::{
    laptop::{command, opened},
    server_names::{self, RESET, UNRECOGNIZED, client_hello, server_name_extension},
    world::{
        GATEWAY_NAME, LIFE, PATIENCE, World,
        app::{App, Script},
        client::{Client, whole},
        edge::Edge,
        gateway::{Build, anonymous, listener, loopback},
        tool::{Tool, need},
        until,
    },
};
use causeway_edge::config::{Egress, EgressListener, EgressProxy, Port, Protocol, Service};
use causeway_gateway::{
    config::{ClientAuth, Listener, ListenerProtocol, policy},
    state::{Policy, PolicyReader, PolicyWriter},
};
use http_body_util::BodyExt;
use hyper::{Method, Request, Version};
use serde_json::{Value, json};
use std::{collections::BTreeSet, net::SocketAddr, path::Path};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// The access policy. Groups are those of certificates, `robot` has a token, and `system:anonymous` has no credential.
fn policy() -> PolicyReader {
    let rules = json!({ "rules": [
        { "who": { "groups": ["team-a"] }, "where": { "nodes": ["edge-1"] },
              "what": { "ports": [9100, 9109, 9200] }, "then": "allow" },
        { "who": { "groups": ["team-a"] }, "where": { "nodes": ["edge-1"], "services": ["printer"] }, "then": "allow" },
        { "who": { "groups": ["team-d"] }, "where": { "nodes": ["edge-1"], "services": ["printer"] }, "then": "allow" },
        { "who": { "groups": ["team-b"] }, "where": { "nodes": ["edge-2"] }, "then": "allow" },
        { "who": { "groups": ["team-b"] }, "where": { "nodes": ["edge-2"], "services": ["*"] }, "then": "allow" },
        { "who": { "users": ["robot"] }, "where": { "pools": ["mill"] },
              "what": { "ports": [9100], "methods": ["GET"] }, "then": "allow" },
        { "who": { "users": ["system:anonymous"] }, "where": { "nodes": ["edge-3"] },
              "what": { "ports": [9100, 9200] }, "then": "allow" },
        { "who": { "users": ["system:anonymous"] }, "where": { "nodes": ["edge-3"], "services": ["camera", "radio"] },
          "then": "allow" },
        { "who": { "spiffe": ["spiffe://world.test/edge/edge-1"] }, "where": { "nodes": ["edge-2"] },
              "what": { "ports": [9200] }, "then": "allow" },
        // The name of an edge is no identity.
        { "who": { "users": ["edge-2"] }, "then": "allow" },
    ] });
    let rules: policy::Policy = serde_json::from_value(rules).unwrap();
    PolicyWriter::new(Some(Policy::compile(&rules).unwrap())).reader()
}

/// Three nodes, two of them in the pool `mill`. Each serves 9100 (HTTP) and 9200 (bytes), which answer with the name of
/// the node, and the services `printer`, `camera` (HTTP) and `radio` (bytes).
struct Site {
    world: World,
    token: String,
    /// Port of the services.
    port: u16,
    apps: Vec<App>,
    edges: Vec<Edge>,
}

impl Site {
    async fn start(build: Build) -> Self {
        Self::with_egress(
            build,
            &[Egress::default(), Egress::default(), Egress::default()],
        )
        .await
    }

    /// With these listeners of the edges.
    async fn with_egress(build: Build, egress: &[Egress; 3]) -> Self {
        let token = build.token("robot");
        let world = Box::pin(build.policy(policy()).start()).await;
        let behind = App::saying("behind").await;
        let radio = App::tcp(Script::new().write("radio").close()).await;
        let (mut apps, mut edges) = (Vec::new(), Vec::new());
        for (node, egress) in ["edge-1", "edge-2", "edge-3"].into_iter().zip(egress) {
            let (http, bytes) = (
                App::saying(node).await,
                App::tcp(Script::new().write(node).close()).await,
            );
            let pool = if node == "edge-3" { "quay" } else { "mill" };
            let edge = world.edge(node).pool(pool).label("site", pool);
            let edge = edge.port(9100, http.address());
            let edge = edge.port_as(9200, Protocol::Tcp, bytes.address());
            let edge = edge.config(|config| {
                config.egress = Some(egress.clone());
                for (name, app) in [("printer", &behind), ("camera", &behind), ("radio", &radio)] {
                    let port = Port {
                        target: Some(app.address().to_string()),
                        ..Port::default()
                    };
                    config.services.insert(name.into(), Service(port));
                }
            });
            edges.push(Box::pin(edge.join()).await);
            apps.extend([http, bytes]);
        }
        let port = behind.port();
        apps.extend([behind, radio]);
        Self {
            world,
            token,
            port,
            apps,
            edges,
        }
    }

    /// Returns a client of a listener: with a certificate of this group, with a token, or with nothing.
    fn client(&self, listener: &str, who: &str) -> Client {
        let client = self.world.client_at(listener).nobody();
        match who {
            "anonymous" => client,
            "robot" => client.bearer(&self.token),
            "intruder" => client.bearer("cwc1-wrong"),
            group => {
                let groups = [group.to_owned()];
                let leaf = self.world.ca().issue_client("tester", &groups, LIFE);
                client.certificate(&leaf.unwrap())
            }
        }
    }

    /// Returns the destination of a row, in which `SERVICE` stands for the port of the services.
    fn destination(&self, row: &str) -> String {
        row.replace("SERVICE", &self.port.to_string())
    }

    /// Returns the number of connections to all apps.
    fn connections(&self) -> usize {
        self.apps.iter().map(App::connections).sum()
    }
}

/// Returns the text of a success, or else status and reason.
fn outcome(status: u16, body: &str) -> String {
    if status == 200 {
        return body.to_owned();
    }
    let problem: Value = serde_json::from_str(body).unwrap_or_default();
    format!("{status} {}", problem["reason"].as_str().unwrap_or(body))
}

fn with_tokens(build: &Build, listener: Listener) -> Listener {
    Listener {
        client_auth: ClientAuth {
            tokens: Some(build.tokens()),
            ..ClientAuth::default()
        },
        ..listener
    }
}

#[tokio::test]
async fn nodes_and_services_at_https_listeners() {
    let build = World::build();
    let own = with_tokens(&build, listener("https", ListenerProtocol::Https));
    let open = with_tokens(&build, anonymous("open", ListenerProtocol::Https));
    let site = Box::pin(Site::start(build.listener(own).listener(open))).await;
    for (listener, who, destination, expected) in [
        ("https", "team-a", "edge-1:9100", "edge-1"),
        ("https", "team-a", "edge-1:9101", "403 forbidden"),
        ("https", "team-a", "edge-1:9109", "403 edge_policy"),
        ("https", "team-a", "edge-1:9200", "403 edge_policy"),
        ("https", "team-a", "edge-2:9100", "403 forbidden"),
        ("https", "team-a", "printer.edge-1", "behind"),
        ("https", "team-a", "printer.edge-1:9999", "behind"),
        ("https", "team-a", "camera.edge-1", "403 forbidden"),
        ("https", "team-a", "printer.edge-2", "403 forbidden"),
        ("https", "team-a", "scanner.edge-1", "403 forbidden"),
        ("https", "team-b", "edge-1:9100", "403 forbidden"),
        ("https", "team-b", "edge-2:9100", "edge-2"),
        ("https", "team-b", "edge-2:9101", "403 edge_policy"),
        ("https", "team-b", "camera.edge-2", "behind"),
        ("https", "team-b", "scanner.edge-2", "404 service_unknown"),
        ("https", "robot", "edge-1:9100", "edge-1"),
        ("https", "robot", "edge-2:9100", "edge-2"),
        ("https", "robot", "edge-3:9100", "403 forbidden"),
        ("https", "robot", "printer.edge-1", "403 forbidden"),
        ("https", "team-c", "edge-1:9100", "403 forbidden"),
        ("https", "team-c", "edge-3:9100", "403 forbidden"),
        ("https", "anonymous", "edge-3:9100", "401 unauthenticated"),
        ("https", "anonymous", "camera.edge-3", "401 unauthenticated"),
        ("https", "intruder", "edge-3:9100", "401 unauthenticated"),
        ("open", "anonymous", "edge-3:9100", "edge-3"),
        ("open", "anonymous", "edge-1:9100", "403 forbidden"),
        ("open", "anonymous", "camera.edge-3", "behind"),
        ("open", "anonymous", "printer.edge-3", "403 forbidden"),
        ("open", "intruder", "edge-3:9100", "401 unauthenticated"),
        ("open", "team-a", "edge-1:9100", "edge-1"),
        ("open", "team-c", "edge-3:9100", "403 forbidden"),
    ] {
        for client in [
            site.client(listener, who),
            site.client(listener, who).http2(),
        ] {
            let answer = client.get(&format!("https://{destination}/")).await;
            let found = outcome(answer.status, &answer.text());
            assert_eq!(found, expected, "{who} to {destination} at {listener}");
        }
    }
}

/// Sends nothing, and returns what a `tcp` or `passthrough` listener sends: the name of a node, or nothing.
async fn read_all(wire: &mut (impl tokio::io::AsyncRead + Unpin)) -> String {
    let mut answer = Vec::new();
    // A refused session is reset.
    let reading = timeout(PATIENCE, wire.read_to_end(&mut answer)).await;
    let _ = reading.expect("the connection ends");
    String::from_utf8_lossy(&answer).into_owned()
}

/// Listener for a set of nodes, client, and the outcomes of several connections: names of nodes, or a refusal. TCP has
/// no error messages.
const MEMBERS: [(&str, &str, &[&str]); 23] = [
    ("pool", "team-a", &["edge-1"]),
    ("pool", "team-b", &["edge-2"]),
    ("pool", "robot", &["edge-1", "edge-2"]),
    ("pool", "team-c", &["403 forbidden"]),
    ("pool", "anonymous", &["401 unauthenticated"]),
    ("pool", "intruder", &["401 unauthenticated"]),
    ("nodes", "team-a", &["403 forbidden"]),
    ("nodes", "team-b", &["edge-2"]),
    ("nodes", "robot", &["edge-2"]),
    ("labels", "team-a", &["edge-1"]),
    ("labels", "robot", &["edge-1", "edge-2"]),
    ("labels", "anonymous", &["401 unauthenticated"]),
    ("open labels", "anonymous", &["edge-3"]),
    ("open labels", "team-b", &["edge-2"]),
    ("open labels", "intruder", &["401 unauthenticated"]),
    ("tcp pool", "team-a", &["edge-1"]),
    ("tcp pool", "team-b", &["edge-2"]),
    ("tcp pool", "team-c", &[""]),
    ("tcp pool", "robot", &[""]),
    ("tcp pool", "anonymous", &[""]),
    ("open tcp pool", "anonymous", &[""]),
    ("tcp nodes", "team-b", &["edge-2"]),
    ("tcp nodes", "team-a", &[""]),
];

/// Starts the gateway with its listeners for sets of nodes.
async fn site_of_sets() -> Site {
    let build = World::build();
    let pool = |listener: Listener, port| Listener {
        pool: Some("mill".to_owned()),
        port: Some(port),
        ..listener
    };
    let labels = |listener: Listener| Listener {
        node_selector: Some("site in (mill,quay)".to_owned()),
        port: Some(9100),
        ..listener
    };
    let nodes = |listener: Listener| Listener {
        nodes: Some(vec!["edge-2".to_owned(), "edge-3".to_owned()]),
        port: Some(9100),
        ..listener
    };
    let tcp_nodes = Listener {
        port: Some(9200),
        ..nodes(listener("tcp nodes", ListenerProtocol::Tcp))
    };
    let https = |name: &str| with_tokens(&build, listener(name, ListenerProtocol::Https));
    let open = with_tokens(&build, anonymous("open labels", ListenerProtocol::Https));
    let listeners = [
        pool(https("pool"), 9100),
        nodes(https("nodes")),
        labels(https("labels")),
        labels(open),
        pool(listener("tcp pool", ListenerProtocol::Tcp), 9200),
        pool(anonymous("open tcp pool", ListenerProtocol::Tcp), 9200),
        tcp_nodes,
    ];
    let build = listeners.into_iter().fold(build, Build::listener);
    Box::pin(Site::start(build)).await
}

#[tokio::test]
async fn members_at_listeners_for_sets_of_nodes() {
    let site = Box::pin(site_of_sets()).await;
    for (listener, who, expected) in MEMBERS {
        let client = site.client(listener, who);
        let mut found = BTreeSet::new();
        for _ in 0..4 {
            found.insert(match listener {
                "tcp pool" | "tcp nodes" => match client.tls_stream(GATEWAY_NAME, &[]).await {
                    Ok(mut wire) => read_all(&mut wire).await,
                    Err(_) => String::new(),
                },
                "open tcp pool" => read_all(&mut client.tcp_stream().await).await,
                _ => {
                    let answer = client.get(&format!("https://{GATEWAY_NAME}/")).await;
                    outcome(answer.status, &answer.text())
                }
            });
        }
        let found: Vec<_> = found.iter().map(String::as_str).collect();
        assert_eq!(found, expected, "{who} at {listener}");
    }
    for listener in ["tcp pool", "open tcp pool"] {
        let counted = async || site.world.metrics().await.outcomes(listener, "forbidden") == 4;
        until("each refused session is counted", counted).await;
    }
}

#[tokio::test]
async fn nodes_and_services_at_passthrough_listeners() {
    let through = |name: &str, node: Option<&str>| Listener {
        node: node.map(str::to_owned),
        port: Some(9200),
        ..anonymous(name, ListenerProtocol::Passthrough)
    };
    let build = World::build().listener(through("named", None));
    let build = build.listener(through("default", Some("edge-1")));
    let build = build.listener(Listener {
        port: Some(9109),
        ..through("closed", None)
    });
    let site = Box::pin(Site::start(build)).await;
    for (listener, server_name, expected) in [
        ("named", "edge-3", "edge-3"),
        ("default", "edge-3", "edge-3"),
        ("named", "radio.edge-3", "radio"),
        ("named", "printer.edge-3", RESET),
        ("named", "scanner.edge-3", RESET),
        ("named", "radio.edge-1", RESET),
        ("named", "edge-1", RESET),
        ("named", "edge-2", RESET),
        ("named", "edge-9", UNRECOGNIZED),
        ("default", "edge-2", RESET),
        ("default", "edge-9", UNRECOGNIZED),
        ("closed", "edge-3", RESET),
        // No name: the default node, which the policy excludes.
        ("default", "127.0.0.1", RESET),
        ("named", "127.0.0.1", UNRECOGNIZED),
    ] {
        let before = site.connections();
        let hello = client_hello(&server_name_extension(&[server_name.as_bytes()]));
        let address = site.world.listener(listener);
        let answer = server_names::answer_to(address, &hello).await;
        assert_eq!(answer, expected, "{server_name} at {listener}");
        let reached = usize::from(![RESET, UNRECOGNIZED].contains(&expected));
        assert_eq!(site.connections() - before, reached, "{server_name}");
    }
    let counted = async || site.world.metrics().await.outcomes("named", "forbidden") == 5;
    until("each refused session is counted", counted).await;
}

/// Forms of a request to a `connect` listener.
const FORMS: [&str; 4] = [
    "CONNECT",
    "CONNECT over HTTP/2",
    "absolute",
    "absolute over HTTP/2",
];

impl Site {
    /// Sends a request in this form to a `connect` listener. Returns `connected` for an accepted CONNECT.
    async fn through_connect(
        &self,
        (listener, who): (&str, &str),
        form: &str,
        destination: &str,
    ) -> String {
        let client = self.client(listener, who);
        if form.ends_with("HTTP/2") {
            return self.through_http2(client, (who, form), destination).await;
        }
        let token = match who {
            "robot" => format!("Proxy-Authorization: Bearer {}\r\n", self.token),
            "intruder" => "Proxy-Authorization: Bearer cwc1-wrong\r\n".to_owned(),
            _ => String::new(),
        };
        let line = match form {
            "CONNECT" => format!("CONNECT {destination}"),
            _ => format!("GET http://{destination}/"),
        };
        let head = format!("{line} HTTP/1.1\r\nHost: x\r\n{token}\r\n");
        let answer = client.raw(GATEWAY_NAME, head).await;
        if answer.status == 200 && form == "CONNECT" {
            return "connected".to_owned();
        }
        outcome(answer.status, &answer.text())
    }

    async fn through_http2(
        &self,
        client: Client,
        (who, form): (&str, &str),
        destination: &str,
    ) -> String {
        let connection = client.http2().connect(GATEWAY_NAME).await;
        let request = match form {
            "CONNECT over HTTP/2" => Request::builder().method(Method::CONNECT).uri(destination),
            _ => Request::get(format!("http://{destination}/")),
        };
        let request = match who {
            "robot" => request.header("proxy-authorization", format!("Bearer {}", self.token)),
            "intruder" => request.header("proxy-authorization", "Bearer cwc1-wrong"),
            _ => request,
        };
        let request = request.version(Version::HTTP_2).body(whole("")).unwrap();
        let answer = connection.unwrap().open_as_is(request).await.unwrap();
        if answer.status() == 200 && form == "CONNECT over HTTP/2" {
            return "connected".to_owned();
        }
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        outcome(status, &String::from_utf8_lossy(&body))
    }
}

#[tokio::test]
async fn nodes_and_services_at_a_connect_listener() {
    let build = World::build();
    let proxy = with_tokens(&build, listener("proxy", ListenerProtocol::Connect));
    let site = Box::pin(Site::start(build.listener(proxy))).await;
    let same = |outcome| [outcome; 2];
    for (who, destination, [connect, absolute]) in [
        ("team-a", "edge-1:9100", ["connected", "edge-1"]),
        ("team-a", "edge-1:9200", ["connected", "403 edge_policy"]),
        ("team-a", "edge-1:9101", same("403 forbidden")),
        ("team-a", "edge-1:9109", same("403 edge_policy")),
        ("team-a", "edge-2:9100", same("403 forbidden")),
        ("team-a", "edge-3:9100", same("403 forbidden")),
        ("team-a", "edge-9:9100", same("404 node_unknown")),
        ("team-a", "localhost:9100", same("404 node_unknown")),
        ("team-a", "127.0.0.1:9100", same("404 node_unknown")),
        ("team-a", "169.254.169.254:80", same("404 node_unknown")),
        ("team-a", "printer.edge-1:SERVICE", ["connected", "behind"]),
        ("team-a", "printer.edge-1:1", same("403 edge_policy")),
        ("team-a", "camera.edge-1:SERVICE", same("403 forbidden")),
        ("team-a", "scanner.edge-1:SERVICE", same("403 forbidden")),
        ("team-b", "edge-1:9100", same("403 forbidden")),
        ("team-b", "edge-2:9100", ["connected", "edge-2"]),
        ("team-b", "camera.edge-2:SERVICE", ["connected", "behind"]),
        (
            "team-b",
            "scanner.edge-2:SERVICE",
            same("404 service_unknown"),
        ),
        // Only GET is allowed: a session could carry any method.
        ("robot", "edge-1:9100", ["403 forbidden", "edge-1"]),
        ("robot", "edge-3:9100", same("403 forbidden")),
        ("team-c", "edge-1:9100", same("403 forbidden")),
        ("anonymous", "edge-3:9100", same("407 unauthenticated")),
        ("anonymous", "edge-9:9100", same("407 unauthenticated")),
        (
            "anonymous",
            "camera.edge-3:SERVICE",
            same("407 unauthenticated"),
        ),
        ("intruder", "edge-3:9100", same("407 unauthenticated")),
    ] {
        let destination = site.destination(destination);
        for form in FORMS {
            let found = site
                .through_connect(("proxy", who), form, &destination)
                .await;
            let expected = if form.starts_with("CONNECT") {
                connect
            } else {
                absolute
            };
            assert_eq!(found, expected, "{who} to {destination} by {form}");
        }
    }
}

/// Starts the gateway with two `connect` listeners without TLS, of which `open` serves clients without a credential.
async fn site_without_tls() -> Site {
    let build = World::build();
    let plain = |listener: Listener| Listener {
        plaintext_networks: vec!["127.0.0.1/32".parse().unwrap()],
        ..with_tokens(&build, listener)
    };
    let closed = plain(listener("closed", ListenerProtocol::Connect));
    let open = plain(anonymous("open", ListenerProtocol::Connect));
    Box::pin(Site::start(build.listener(closed).listener(open))).await
}

/// Listener, client, destination, and the outcomes of a CONNECT and of a request in absolute form.
#[rustfmt::skip]
const PLAIN_ROWS: [(&str, &str, &str, [&str; 2]); 21] = [
    // Only GET is allowed: a session could carry any method.
    ("closed", "robot", "edge-1:9100", ["403 forbidden", "edge-1"]),
    ("closed", "robot", "edge-2:9100", ["403 forbidden", "edge-2"]),
    ("closed", "robot", "edge-1:9200", ["403 forbidden", "403 forbidden"]),
    ("closed", "robot", "edge-3:9100", ["403 forbidden", "403 forbidden"]),
    ("closed", "robot", "edge-9:9100", ["404 node_unknown", "404 node_unknown"]),
    ("closed", "robot", "169.254.169.254:80", ["404 node_unknown", "404 node_unknown"]),
    ("closed", "robot", "printer.edge-1:SERVICE", ["403 forbidden", "403 forbidden"]),
    // Without TLS no client can show its certificate.
    ("closed", "team-a", "edge-1:9100", ["407 unauthenticated", "407 unauthenticated"]),
    ("closed", "anonymous", "edge-3:9100", ["407 unauthenticated", "407 unauthenticated"]),
    ("closed", "anonymous", "edge-9:9100", ["407 unauthenticated", "407 unauthenticated"]),
    ("closed", "intruder", "edge-3:9100", ["407 unauthenticated", "407 unauthenticated"]),
    ("open", "anonymous", "edge-3:9100", ["connected", "edge-3"]),
    ("open", "anonymous", "edge-3:9200", ["connected", "403 edge_policy"]),
    ("open", "anonymous", "edge-3:9101", ["403 forbidden", "403 forbidden"]),
    ("open", "anonymous", "edge-1:9100", ["403 forbidden", "403 forbidden"]),
    ("open", "anonymous", "camera.edge-3:SERVICE", ["connected", "behind"]),
    ("open", "anonymous", "printer.edge-3:SERVICE", ["403 forbidden", "403 forbidden"]),
    ("open", "team-a", "edge-1:9100", ["403 forbidden", "403 forbidden"]),
    ("open", "robot", "edge-1:9100", ["403 forbidden", "edge-1"]),
    ("open", "robot", "edge-3:9100", ["403 forbidden", "403 forbidden"]),
    ("open", "intruder", "edge-3:9100", ["407 unauthenticated", "407 unauthenticated"]),
];

#[tokio::test]
async fn nodes_and_services_at_connect_listeners_without_tls() {
    let site = Box::pin(site_without_tls()).await;
    for (listener, who, destination, [connect, absolute]) in PLAIN_ROWS {
        let destination = site.destination(destination);
        for form in FORMS {
            let found = site
                .through_connect((listener, who), form, &destination)
                .await;
            let expected = if form.starts_with("CONNECT") {
                connect
            } else {
                absolute
            };
            assert_eq!(
                found, expected,
                "{who} to {destination} by {form} at {listener}"
            );
        }
    }
}

impl Site {
    /// Returns a list of the gateway itself at a `connect` listener, or status and reason.
    async fn list(&self, (listener, who): (&str, &str), path: &str) -> Result<Value, String> {
        let url = format!("https://{GATEWAY_NAME}/.well-known/causeway/{path}");
        let answer = self.client(listener, who).get(&url).await;
        match answer.status {
            200 => Ok(answer.json()),
            status => Err(outcome(status, &answer.text())),
        }
    }

    /// Returns the targets for Prometheus, separated by blanks. `SERVICE` and `RADIO` stand for the ports of the services.
    async fn targets(&self, from: (&str, &str), query: &str) -> String {
        let groups = match self.list(from, &format!("http_sd{query}")).await {
            Ok(groups) => groups,
            Err(refusal) => return refusal,
        };
        let groups = groups.as_array().unwrap().iter();
        let all = groups.flat_map(|group| group["targets"].as_array().unwrap().clone());
        let all: Vec<_> = all
            .map(|target| target.as_str().unwrap().to_owned())
            .collect();
        let radio = self.apps.last().unwrap().port();
        let all = all.join(" ");
        let all = all.replace(&format!(":{}", self.port), ":SERVICE");
        all.replace(&format!(":{radio}"), ":RADIO")
    }

    /// Returns the nodes that a client may reach, each with its ports and services.
    async fn nodes(&self, from: (&str, &str)) -> String {
        let list = match self.list(from, "nodes").await {
            Ok(list) => list,
            Err(refusal) => return refusal,
        };
        let rows = list["nodes"].as_array().unwrap().iter();
        let rows = rows.map(|row| {
            let services = row["services"].as_array();
            let services = services.map_or_else(String::new, |names| json!(names).to_string());
            format!(
                "{} {}{services}",
                row["node"].as_str().unwrap(),
                row["ports"]
            )
        });
        rows.collect::<Vec<_>>().join(" ")
    }
}

/// Starts the gateway with three `connect` listeners: `open` serves clients without a credential, and `ports` only at one port.
async fn site_of_lists() -> Site {
    let build = World::build();
    let proxy = with_tokens(&build, listener("proxy", ListenerProtocol::Connect));
    let open = with_tokens(&build, anonymous("open", ListenerProtocol::Connect));
    let ports = Listener {
        anonymous_ports: vec![9100],
        ..with_tokens(&build, anonymous("ports", ListenerProtocol::Connect))
    };
    let listeners = [proxy, open, ports];
    Box::pin(Site::start(
        listeners.into_iter().fold(build, Build::listener),
    ))
    .await
}

#[tokio::test]
async fn targets_of_service_discovery() {
    let mut site = Box::pin(site_of_lists()).await;
    for (listener, who, query, expected) in [
        // Without a port: all ports and services that the edges report, and that the client may reach.
        (
            "proxy",
            "team-a",
            "",
            "edge-1:9100 edge-1:9200 printer.edge-1:SERVICE",
        ),
        (
            "proxy",
            "team-b",
            "",
            "edge-2:9100 edge-2:9200 camera.edge-2:SERVICE printer.edge-2:SERVICE radio.edge-2:RADIO",
        ),
        ("proxy", "team-c", "", ""),
        ("proxy", "team-d", "", "printer.edge-1:SERVICE"),
        // A GET suffices.
        ("proxy", "robot", "", "edge-1:9100 edge-2:9100"),
        ("proxy", "robot", "?port=9100", "edge-1:9100 edge-2:9100"),
        ("proxy", "robot", "?port=9200", ""),
        ("proxy", "anonymous", "", "401 unauthenticated"),
        ("proxy", "intruder", "", "401 unauthenticated"),
        ("proxy", "team-a", "?port=9100", "edge-1:9100"),
        // The policy allows this port, which the edge does not report.
        ("proxy", "team-a", "?port=9109", "edge-1:9109"),
        ("proxy", "team-a", "?port=22", ""),
        ("proxy", "team-b", "?port=22", "edge-2:22"),
        ("proxy", "team-c", "?port=9100", ""),
        ("proxy", "anonymous", "?port=9100", "401 unauthenticated"),
        ("proxy", "team-a", "?port=0", "400 malformed"),
        ("proxy", "team-a", "?port=", "400 malformed"),
        ("proxy", "team-a", "?port=65536", "400 malformed"),
        (
            "open",
            "anonymous",
            "",
            "edge-3:9100 edge-3:9200 camera.edge-3:SERVICE radio.edge-3:RADIO",
        ),
        ("open", "intruder", "", "401 unauthenticated"),
        ("ports", "anonymous", "", "edge-3:9100"),
        ("ports", "anonymous", "?port=9100", "edge-3:9100"),
        ("ports", "anonymous", "?port=9200", ""),
        (
            "ports",
            "team-a",
            "",
            "edge-1:9100 edge-1:9200 printer.edge-1:SERVICE",
        ),
    ] {
        let found = site.targets((listener, who), query).await;
        assert_eq!(found, expected, "{who} {query:?} at {listener}");
    }
    // A node that is away reports no port, and remains a target at a given one.
    site.edges[0].stop().await;
    site.world.until_tunnels("edge-1", 0).await;
    for (query, expected) in [("", ""), ("?port=9100", "edge-1:9100")] {
        let found = site.targets(("proxy", "team-a"), query).await;
        assert_eq!(found, expected, "{query:?}");
    }
}

#[tokio::test]
async fn nodes_and_services_in_the_list_of_a_client() {
    let mut site = Box::pin(site_of_lists()).await;
    for (listener, who, expected) in [
        ("proxy", "team-a", r#"edge-1 [9100,9200]["printer"]"#),
        (
            "proxy",
            "team-b",
            r#"edge-2 [9100,9200]["camera","printer","radio"]"#,
        ),
        ("proxy", "team-c", ""),
        ("proxy", "team-d", r#"edge-1 []["printer"]"#),
        ("proxy", "robot", "edge-1 [9100] edge-2 [9100]"),
        ("proxy", "anonymous", "401 unauthenticated"),
        (
            "open",
            "anonymous",
            r#"edge-3 [9100,9200]["camera","radio"]"#,
        ),
        ("ports", "anonymous", "edge-3 [9100]"),
    ] {
        let found = site.nodes((listener, who)).await;
        assert_eq!(found, expected, "{who} at {listener}");
    }
    // Of a node that is away neither ports nor services are known.
    site.edges[0].stop().await;
    site.world.until_tunnels("edge-1", 0).await;
    for (who, expected) in [
        ("team-a", "edge-1 []"),
        ("team-d", "edge-1 []"),
        ("team-c", ""),
        ("robot", "edge-1 [] edge-2 [9100]"),
    ] {
        assert_eq!(site.nodes(("proxy", who)).await, expected, "{who}");
    }
}

/// Egress of an edge: a listener for each of these destinations, and a proxy.
fn egress(destinations: &[String]) -> Egress {
    let listener = |to: &String| EgressListener {
        listen: loopback(),
        to: to.clone(),
    };
    Egress {
        listeners: destinations.iter().map(listener).collect(),
        proxy: Some(EgressProxy { listen: loopback() }),
        ..Egress::default()
    }
}

/// Returns the address of the listener for a destination, or of the proxy.
async fn egress_listener(edge: &Edge, to: Option<&str>) -> SocketAddr {
    let find = || {
        let listeners = edge.status().egress?.listeners;
        let mut listeners = listeners.into_iter();
        listeners.find(|listener| listener.to.as_deref() == to)
    };
    until("the listener is open", async || find().is_some()).await;
    find().unwrap().listen
}

/// Sends bytes to a listener of an edge, and returns all that it answers.
async fn answer_to(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut wire = TcpStream::connect(address).await.unwrap();
    let _ = wire.write_all(bytes).await;
    let mut answer = Vec::new();
    // A refused connection to a listener with one destination is reset.
    let reading = timeout(PATIENCE, wire.read_to_end(&mut answer)).await;
    let _ = reading.expect("the connection ends");
    answer
}

/// Answers of the ways out to a destination: of a listener for it, of a proxy by HTTP, and of a proxy by SOCKS5.
async fn by_each_way(edge: &Edge, destination: &str) -> (String, String, String) {
    let fixed = egress_listener(edge, Some(destination)).await;
    let fixed = answer_to(fixed, b"").await;
    let proxy = egress_listener(edge, None).await;
    let head = format!("CONNECT {destination} HTTP/1.1\r\nHost: x\r\n\r\n");
    let http = String::from_utf8(answer_to(proxy, head.as_bytes()).await).unwrap();
    let (head, body) = http.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap();
    let (host, port) = destination.rsplit_once(':').unwrap();
    let port: u16 = port.parse().unwrap();
    let request = [
        &[5, 1, 0, 5, 1, 0, 3, u8::try_from(host.len()).unwrap()],
        host.as_bytes(),
        &port.to_be_bytes(),
    ];
    let socks = answer_to(proxy, &request.concat()).await;
    let rest = String::from_utf8_lossy(socks.get(12..).unwrap_or_default());
    (
        String::from_utf8(fixed).unwrap(),
        format!("{status} {}", body.trim_end()),
        format!("{} {rest}", socks[3]),
    )
}

/// Rows of egress: number of the edge, destination, answer of the app, and the sentence of a refusal.
fn egress_rows(
    cloud_port: u16,
    other_port: u16,
) -> Vec<(usize, String, &'static str, &'static str)> {
    let local = |port: u16| format!("127.0.0.1:{port}");
    let no_rule = "no rule of the gateway";
    let policy = "the policy does not allow spiffe://world.test/edge/";
    vec![
        (1, "registry:443".to_owned(), "cloud", ""),
        (2, "registry:443".to_owned(), "", no_rule),
        (3, "registry:443".to_owned(), "", no_rule),
        (1, local(other_port), "other", ""),
        (2, local(other_port), "other", ""),
        (3, local(other_port), "", no_rule),
        (1, local(cloud_port), "", no_rule),
        (1, format!("localhost:{cloud_port}"), "", no_rule),
        (1, "169.254.169.254:80".to_owned(), "", no_rule),
        (1, "edge-2:9200".to_owned(), "edge-2", ""),
        (2, "edge-2:9200".to_owned(), "", policy),
        (2, "edge-1:9200".to_owned(), "", policy),
        (1, "edge-3:9200".to_owned(), "", policy),
        (3, "edge-2:9200".to_owned(), "", no_rule),
        (1, "edge-2:9100".to_owned(), "", no_rule),
        (1, "edge-2:9109".to_owned(), "", policy),
        (1, "printer.edge-2:9200".to_owned(), "", no_rule),
    ]
}

#[tokio::test]
async fn destinations_of_egress() {
    let cloud = App::tcp(Script::new().write("cloud").close()).await;
    let other = App::tcp(Script::new().write("other").close()).await;
    let (cloud_port, other_port) = (cloud.port(), other.port());
    let rules = json!({
        "destinations": { "registry": cloud.address().to_string() },
        "rules": [
            { "who": { "nodes": ["edge-1"] }, "to": { "destinations": ["registry"] } },
            { "who": { "pools": ["mill"] }, "to": { "nodes": ["edge-*"], "ports": [9200, 9109] } },
            { "who": { "labels": { "site": "mill" } }, "to": { "networks": ["127.0.0.1/32"], "ports": [other_port] } },
            { "to": { "names": ["localhost"], "networks": ["0.0.0.0/0"], "ports": [80, cloud_port] } },
        ],
    });
    let rows = egress_rows(cloud_port, other_port);
    let of = |edge: usize| {
        let own = rows.iter().filter(|row| row.0 == edge);
        egress(&own.map(|row| row.1.clone()).collect::<Vec<_>>())
    };
    let build = World::build().config(|config| {
        config.egress = Some(serde_json::from_value(rules).unwrap());
    });
    let site = Box::pin(Site::with_egress(build, &[of(1), of(2), of(3)])).await;
    for (edge, destination, app, sentence) in &rows {
        let (fixed, http, socks) = by_each_way(&site.edges[edge - 1], destination).await;
        let row = format!("edge-{edge} to {destination}");
        assert_eq!(fixed, *app, "{row}");
        if sentence.is_empty() {
            assert_eq!(
                (http, socks),
                (format!("200 {app}"), format!("0 {app}")),
                "{row}"
            );
        } else {
            assert!(
                http.starts_with("403 ") && http.contains(sentence),
                "{row}: {http}"
            );
            assert_eq!(socks, "2 ", "{row}");
        }
    }
    // The ways of three rows that lead to an app of the test, and of one to another edge.
    assert_eq!((cloud.connections(), other.connections()), (3, 6));
    assert_eq!(site.connections(), 3);
}

/// Runs a command of a user with the profile of this subject.
fn by_profile(site: &Site, who: &str, line: &str) -> Tool {
    let home = site.world.folder().join("home");
    command(&home, line).args(["--profile", who])
}

/// Logs in each subject, with a profile of its name.
async fn log_in(site: &Site) {
    let address = site.world.listener("proxy");
    for who in ["team-a", "team-b", "team-c", "robot"] {
        let login = by_profile(site, who, &format!("login {address}"));
        let login = login.args([Path::new("--ca"), &site.world.root_path()]);
        let login = if who == "robot" {
            let file = site.world.write(&site.token);
            login.args([Path::new("--token-file"), &file])
        } else {
            let leaf = site
                .world
                .ca()
                .issue_client("tester", &[who.to_owned()], LIFE);
            let leaf = leaf.unwrap();
            let certificate = site.world.write(&leaf.chain_pem());
            let key = site.world.write(leaf.key_pem().expose());
            let login = login.args([Path::new("--cert"), &certificate]);
            login.args([Path::new("--key"), &key])
        };
        login.run().await.ok();
    }
}

/// Rows of the commands of users: who, destination, and the text of the app or a part of the sentence.
fn command_rows() -> [(
    &'static str,
    &'static str,
    Result<&'static str, &'static str>,
); 10] {
    [
        ("team-a", "edge-1:9200", Ok("edge-1")),
        (
            "team-a",
            "edge-1:9101",
            Err("does not allow tester to connect to port 9101 of edge-1"),
        ),
        (
            "team-a",
            "edge-1:9109",
            Err("edge-1 does not serve port 9109"),
        ),
        (
            "team-a",
            "edge-2:9200",
            Err("does not allow tester to connect to port 9200 of edge-2"),
        ),
        ("team-a", "edge-9:9200", Err("no node matches")),
        (
            "team-a",
            "camera.edge-1:SERVICE",
            Err("does not allow tester to connect to the service camera of edge-1"),
        ),
        ("team-b", "edge-2:9200", Ok("edge-2")),
        (
            "team-b",
            "scanner.edge-2:1",
            Err("edge-2 has no service scanner"),
        ),
        (
            "team-c",
            "edge-1:9200",
            Err("does not allow tester to connect to port 9200 of edge-1"),
        ),
        (
            "robot",
            "edge-1:9100",
            Err("does not allow robot to connect to port 9100 of edge-1"),
        ),
    ]
}

/// Starts the gateway of these tests, with all users logged in.
async fn site_of_users() -> Site {
    let build = World::build();
    let proxy = with_tokens(&build, listener("proxy", ListenerProtocol::Connect));
    let site = Box::pin(Site::start(build.listener(proxy))).await;
    log_in(&site).await;
    site
}

#[tokio::test]
async fn destinations_of_the_commands_connect_and_ssh() {
    let site = Box::pin(site_of_users()).await;
    for (who, destination, expected) in command_rows() {
        let destination = site.destination(destination);
        let ran = by_profile(&site, who, &format!("connect {destination}"))
            .run()
            .await;
        let row = format!("{who} to {destination}: {ran:?}");
        match expected {
            Ok(app) => assert_eq!(
                (ran.text().as_str(), ran.status.code()),
                (app, Some(0)),
                "{row}"
            ),
            Err(sentence) => {
                assert_eq!(
                    (ran.text().as_str(), ran.status.code()),
                    ("", Some(1)),
                    "{row}"
                );
                assert!(ran.stderr.contains(sentence), "{row}");
            }
        }
    }
    need!("ssh");
    let ssh = by_profile(&site, "team-a", "ssh root@edge-2");
    let ran = ssh.args(["--", "-F", "none", "-oBatchMode=yes", "-p9200", "true"]);
    let ran = ran.run().await;
    assert_eq!(ran.status.code(), Some(255), "{ran:?}");
    assert!(
        ran.stderr.contains("to connect to port 9200 of edge-2"),
        "{ran:?}"
    );
}

#[tokio::test]
async fn destinations_of_the_commands_forward_and_proxy() {
    let site = Box::pin(site_of_users()).await;
    for who in ["team-a", "team-b", "team-c", "robot"] {
        let mut proxy = by_profile(&site, who, "proxy --listen 127.0.0.1:0 --json").start();
        let local = opened(&mut proxy).await;
        let rows = command_rows().into_iter().filter(|row| row.0 == who);
        for (_, destination, expected) in rows {
            let destination = site.destination(destination);
            let row = format!("{who} to {destination}");
            let head = format!("CONNECT {destination} HTTP/1.1\r\nHost: x\r\n\r\n");
            let answer = String::from_utf8(answer_to(local, head.as_bytes()).await).unwrap();
            let event = proxy.json().await;
            assert_eq!(event["target"], destination, "{row}");
            match expected {
                Ok(app) => {
                    assert!(
                        answer.starts_with("HTTP/1.1 200 ") && answer.ends_with(app),
                        "{row}: {answer}"
                    );
                    assert_eq!(event["event"], "connection", "{row}");
                }
                Err(sentence) => {
                    assert!(answer.contains(sentence), "{row}: {answer}");
                    assert_eq!(event["event"], "refused", "{row}");
                }
            }
        }
    }
    let mut forward = by_profile(&site, "team-a", "forward edge-1 :9200 :9101 --json").start();
    let [allowed, denied] = [opened(&mut forward).await, opened(&mut forward).await];
    assert_eq!(answer_to(allowed, b"").await, b"edge-1");
    assert_eq!(forward.json().await["event"], "connection");
    assert_eq!(answer_to(denied, b"").await, b"");
    let event = forward.json().await;
    assert_eq!(event["event"], "refused", "{event}");
    let reason = event["reason"].as_str().unwrap();
    assert!(
        reason.contains("to connect to port 9101 of edge-1"),
        "{reason}"
    );
}
