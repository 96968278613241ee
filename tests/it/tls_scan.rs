//! Results of OpenSSL's scan of each port that speaks TLS: versions, suites, renegotiation, ALPN. A client that shows no
//! certificate gets no byte of an answer.
//!
//! Each refusal is the server's own alert: the test sets OpenSSL to offer parameters that it would not offer by itself.

use crate::world::{
    GATEWAY_NAME, LIFE, World,
    app::App,
    edge::Edge,
    gateway::{fixed, listener},
    tool::{Tool, ToolOutput, need},
};
use causeway_certs::{Ca, NodeName, PrivateKey, TrustDomain, VerifiedPublicKey};
use causeway_gateway::config::ListenerProtocol;
use std::{net::SocketAddr, path::PathBuf};

/// Kinds of listener that speak TLS.
const LISTENERS: [&str; 3] = ["https", "connect", "bytes"];
/// OpenSSL's keyword for all its parameters.
const ALL: &str = "ALL:COMPLEMENTOFALL@SECLEVEL=0";
/// The same without today's secure parameters: ephemeral keys, and authenticated ciphers.
const WEAK: &str =
    "ALL:COMPLEMENTOFALL:!kECDHE+AESGCM:!kECDHE+CHACHA20:-ECDHE+AESGCM:-ECDHE+CHACHA20@SECLEVEL=0";

/// How rustls refuses an old version: before 1.2 it misses an extension first.
const TOO_OLD: [&str; 2] = ["protocol version", "handshake failure"];

struct Scan {
    world: World,
    app: App,
    _edge: Edge,
}

impl Scan {
    async fn new() -> Self {
        let app = App::saying("it").await;
        let build = World::build().listener(listener("connect", ListenerProtocol::Connect));
        let build = build.listener(fixed("bytes", ListenerProtocol::Tcp, "edge-1", 9100));
        let world = build.start().await;
        let edge = world.edge("edge-1").port(9100, app.address()).join().await;
        Self {
            world,
            app,
            _edge: edge,
        }
    }

    /// `openssl s_client`, which sends this and reads to the end.
    async fn client(&self, to: SocketAddr, arguments: &str, input: &str) -> ToolOutput {
        self.tool(to, arguments).input(input).run().await
    }

    fn tool(&self, to: SocketAddr, arguments: &str) -> Tool {
        self.tool_by(Tool::new("openssl"), to, arguments)
    }

    /// The same by `program`, which finally executes OpenSSL.
    fn tool_by(&self, program: Tool, to: SocketAddr, arguments: &str) -> Tool {
        let to = to.to_string();
        program
            .args(["s_client", "-servername", GATEWAY_NAME, "-connect", &to])
            .args(["-CAfile".into(), self.world.root_path()])
            .args(arguments.split_whitespace())
    }

    /// The alert that a handshake ends with.
    async fn alert(&self, to: SocketAddr, arguments: &str) -> String {
        let ran = self.client(to, arguments, "").await;
        let alert = ran
            .stderr
            .lines()
            .find_map(|line| line.split("alert ").nth(1));
        let alert = alert
            .unwrap_or_else(|| panic!("{arguments}: no alert\n{}\n{}", ran.text(), ran.stderr));
        alert.split(':').next().unwrap().to_owned()
    }

    /// Returns the parameters that a handshake agrees on.
    async fn agreed(&self, to: SocketAddr, arguments: &str) -> String {
        let ran = self.client(to, arguments, "").await;
        let text = ran.text();
        assert!(
            !text.contains("Cipher is (NONE)"),
            "{arguments}: {text}\n{}",
            ran.stderr
        );
        text
    }

    fn client_files(&self) -> String {
        let leaf = self.world.client_leaf("scanner");
        self.files(&leaf.chain_pem(), leaf.key_pem().expose())
    }

    fn files(&self, chain: &str, key: &str) -> String {
        let (chain, key): (PathBuf, PathBuf) = (self.world.write(chain), self.world.write(key));
        format!("-cert {} -key {}", chain.display(), key.display())
    }
}

/// An edge's certificate from this CA.
fn edge_of(ca: &Ca) -> (String, String) {
    let key = PrivateKey::generate().unwrap();
    let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let issued = ca
        .issue_edge(&csr, &NodeName::parse("edge-1").unwrap(), LIFE)
        .unwrap();
    (issued.pem(), key.key_pem().expose().to_owned())
}

#[tokio::test]
async fn listeners_accept_tls_1_2_and_1_3_only() {
    need!("openssl");
    let scan = Scan::new().await;
    for name in LISTENERS {
        let to = scan.world.listener(name);
        for (version, words) in [
            ("-tls1_2", "TLSv1.2, Cipher is"),
            ("-tls1_3", "TLSv1.3, Cipher is"),
        ] {
            let message = scan
                .agreed(to, &format!("{version} {}", scan.client_files()))
                .await;
            assert!(message.contains(words), "{name}: {message}");
            assert!(message.contains("Compression: NONE"), "{name}: {message}");
        }
        for version in ["-tls1", "-tls1_1"] {
            let alert = scan.alert(to, &format!("{version} -cipher {ALL}")).await;
            assert!(
                TOO_OLD.contains(&alert.as_str()),
                "{name} {version}: {alert}"
            );
        }
    }
}

#[tokio::test]
async fn no_listener_takes_a_weak_suite() {
    need!("openssl");
    let scan = Scan::new().await;
    for name in LISTENERS {
        let to = scan.world.listener(name);
        let alert = scan.alert(to, &format!("-tls1_2 -cipher {WEAK}")).await;
        assert_eq!(alert, "handshake failure", "{name}");
        for suite in [
            "ECDHE-ECDSA-AES256-GCM-SHA384",
            "ECDHE-ECDSA-CHACHA20-POLY1305",
        ] {
            let message = scan.agreed(to, &format!("-tls1_2 -cipher {suite}")).await;
            assert!(message.contains(suite), "{name}: {message}");
        }
        let alert = scan
            .alert(to, "-tls1_3 -ciphersuites TLS_AES_128_CCM_SHA256")
            .await;
        assert_eq!(alert, "handshake failure", "{name}");
    }
}

#[tokio::test]
async fn no_listener_renegotiates() {
    need!("openssl");
    let mut scan = Scan::new().await;
    let mut clients = Vec::new();
    for name in LISTENERS {
        let line = format!("-tls1_2 {}", scan.client_files());
        // Its messages are among the lines of its output then.
        let program = Tool::new("sh").args(["-c", "exec openssl \"$@\" 2>&1", "openssl"]);
        let running = scan.tool_by(program, scan.world.listener(name), &line);
        let mut running = running.start();
        while !running.line().await.contains("Verify return code: 0") {}
        // OpenSSL takes a line that begins like this for a command.
        running.send("R\n").await;
        while !running.line().await.contains("RENEGOTIATING") {}
        clients.push((name, running));
    }
    // It takes longer than any handshake, and ends waits for an answer.
    scan.world.stop_gateway().await;
    for (name, running) in clients {
        let behind = running.over().await.text();
        // A full handshake would verify the chain again.
        assert!(!behind.contains("verify return"), "{name}: {behind}");
    }
}

#[tokio::test]
async fn listeners_agree_on_protocols_that_they_serve_or_refuse() {
    need!("openssl");
    let scan = Scan::new().await;
    for (name, offered, chosen) in [
        ("https", "h2,http/1.1", "h2"),
        ("https", "http/1.1", "http/1.1"),
        ("https", "spdy/3,http/1.1", "http/1.1"),
        ("connect", "http/1.1", "http/1.1"),
    ] {
        let message = scan
            .agreed(scan.world.listener(name), &format!("-alpn {offered}"))
            .await;
        assert!(
            message.contains(&format!("ALPN protocol: {chosen}\n")),
            "{name} {offered}: {message}"
        );
    }
    for name in ["https", "connect"] {
        let to = scan.world.listener(name);
        assert!(
            scan.agreed(to, "").await.contains("No ALPN negotiated"),
            "{name}"
        );
        for other in ["rh2", "http/0.9", "imap"] {
            let alert = scan.alert(to, &format!("-alpn {other}")).await;
            assert_eq!(alert, "no application protocol", "{name} {other}");
        }
    }
}

#[tokio::test]
async fn the_tunnel_port_speaks_tls_1_3_with_edges_of_our_own() {
    need!("openssl");
    let scan = Scan::new().await;
    let to = scan.world.tunnel();
    let (chain, key) = edge_of(scan.world.ca());
    let ours = scan.files(&chain, &key);
    let message = scan.agreed(to, &format!("-alpn rh2 {ours}")).await;
    for words in [
        "TLSv1.3, Cipher is TLS_",
        "ALPN protocol: rh2",
        "Verification: OK",
    ] {
        assert!(message.contains(words), "{message}");
    }
    for version in ["-tls1", "-tls1_1", "-tls1_2"] {
        for alpn in ["rh2", "h2", "http/1.1"] {
            let line = format!("{version} -alpn {alpn} -cipher {ALL} {ours}");
            let alert = scan.alert(to, &line).await;
            assert!(TOO_OLD.contains(&alert.as_str()), "{line}: {alert}");
        }
    }
    let alert = scan.alert(to, &format!("-alpn imap {ours}")).await;
    assert_eq!(alert, "no application protocol");
    let message = scan.agreed(to, &ours).await;
    assert!(
        message.contains("No ALPN negotiated"),
        "to join needs none: {message}"
    );
    let other = Ca::create(&TrustDomain::parse("other.test").unwrap()).unwrap();
    let (chain, key) = edge_of(&other);
    let theirs = scan.files(&chain, &key);
    for (line, wanted) in [
        (String::new(), "certificate required"),
        (theirs, "unknown ca"),
    ] {
        let ran = scan
            .client(
                to,
                &format!("-quiet -alpn rh2 {line}"),
                "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            )
            .await;
        assert!(ran.stderr.contains(wanted), "{line}: {}", ran.stderr);
        assert_eq!(ran.text(), "", "no byte of an answer");
    }
}

#[tokio::test]
async fn without_a_certificate_no_listener_gives_a_byte_of_service() {
    need!("openssl");
    let scan = Scan::new().await;
    let get = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n";
    let connect = "CONNECT edge-1:9100 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let before = scan.app.connections();
    for (name, asks, status) in [
        ("https", get, "HTTP/1.1 401"),
        ("connect", connect, "HTTP/1.1 407"),
        ("bytes", get, ""),
    ] {
        let ran = scan.client(scan.world.listener(name), "-quiet", asks).await;
        let text = ran.text();
        assert!(
            text.starts_with(status) && (!status.is_empty() || text.is_empty()),
            "{name}: {text}"
        );
        assert!(!text.contains("it\n"), "{name}: {text}");
    }
    assert_eq!(scan.app.connections(), before);
}
