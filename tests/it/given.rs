//! Certificates that an external CA issues and renews: here openssl is a company's PKI.

use crate::{
    certificates::{PACE, app, nothing_is_lost, span},
    world::{
        app::App,
        client::{Client, ListenerAddress},
        log::Log,
        process::{Causeway, GatewayProcess, Process, causeway},
        tool::{Tool, need},
        until,
    },
};
use causeway_certs::LeafCertificate;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::Value;
use std::{collections::BTreeSet, fs, path::PathBuf};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

/// Makes in `$1` the root `$2-root.pem` and, signed by it, `$2.pem`, which signs all other certificates.
const COMPANY: &str = r#"
set -e; cd "$1"
new() { openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$1.key" -subj "/CN=$1" "${@:2}"; }
new "$2-root" -x509 -days 30 -addext keyUsage=critical,keyCertSign,cRLSign -out "$2-root.pem"
new "$2" -out "$2.csr"
printf '%s\n' 'basicConstraints=critical,CA:TRUE,pathlen:0' 'keyUsage=critical,keyCertSign' >"$2.ext"
openssl x509 -req -in "$2.csr" -CA "$2-root.pem" -CAkey "$2-root.key" -days 30 -extfile "$2.ext" -out "$2.pem"
"#;
/// Makes `$2.key` and `$2.pem`, followed by the issuer's certificate, in `$1`: usage `$3`, names `$4`, by `$5.pem`, for
/// `$6` days.
const ISSUE: &str = r#"
set -e; cd "$1"
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$2.key" -subj "/CN=$2" -out "$2.csr"
printf '%s\n' 'basicConstraints=critical,CA:FALSE' "extendedKeyUsage=$3" "subjectAltName=$4" >"$2.ext"
openssl x509 -req -in "$2.csr" -CA "$5.pem" -CAkey "$5.key" -days "${6:-2}" -extfile "$2.ext" -out "$2.own"
cat "$2.own" "$5.pem" >"$2.pem"
"#;
const GATEWAY: &str = "URI:spiffe://company.test/gateway";
const EDGE_1: &str = "URI:spiffe://company.test/edge/edge-1";

/// A company, with certificates for a gateway, a listener, two edges and a client.
async fn company() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    found(&folder, "company").await;
    for (name, usage, names) in [
        ("gateway", "serverAuth", GATEWAY),
        ("listener", "serverAuth", "DNS:edge-1,DNS:edge-2"),
        ("alice", "clientAuth", "DNS:alice"),
        ("edge-1", "clientAuth", EDGE_1),
        (
            "edge-2",
            "clientAuth",
            "URI:spiffe://company.test/edge/edge-2",
        ),
    ] {
        issue(&folder, (name, usage, names), "company").await;
    }
    // Certificates that the clients of these tests show.
    fs::rename(
        folder.path().join("alice.key"),
        folder.path().join("alice-key.pem"),
    )
    .unwrap();
    folder
}

async fn found(folder: &TempDir, name: &str) {
    let made = Tool::new("bash").args(["-c", COMPANY, "bash"]);
    made.args([folder.path().to_str().unwrap(), name])
        .run()
        .await
        .ok();
}

async fn issue(folder: &TempDir, (name, usage, names): (&str, &str, &str), by: &str) {
    let made = Tool::new("sh").args(["-c", ISSUE, "sh"]);
    let folder = folder.path().to_str().unwrap();
    made.args([folder, name, usage, names, by]).run().await.ok();
}

fn tunnel(folder: &TempDir, more: &str) -> String {
    let at = folder.path().display();
    format!(
        "tunnel: {{ identity: {{ chain: {at}/gateway.pem, key: {at}/gateway.key, client_ca: [{at}/company-root.pem]{more} }} }}\n"
    )
}

fn listeners(folder: &TempDir) -> String {
    let at = folder.path().display();
    format!(
        "listeners: [{{ name: web, protocol: https, listen: \"127.0.0.1:0\", port: 9100, certificate: {{ chain: {at}/listener.pem, key: {at}/listener.key }}, client_auth: {{ client_ca: [{at}/company-root.pem] }} }}]\n"
    )
}

/// A gateway without a CA, which admits added nodes, or any node.
async fn site(more: &str) -> GatewayProcess {
    let folder = company().await;
    let configuration = tunnel(&folder, more) + &listeners(&folder);
    GatewayProcess::of(folder, "127.0.0.1:0", &configuration).await
}

fn brings(site: &GatewayProcess, edge: Causeway, name: &str) -> Causeway {
    let at = site.path("").display().to_string();
    edge.flag(
        "--identity",
        format!("{{ chain: {at}/{name}.pem, key: {at}/{name}.key, ca: {at}/company-root.pem }}"),
    )
}

fn edge(site: &GatewayProcess, name: &str, app: u16) -> Causeway {
    brings(site, site.edge(name, app), name)
}

async fn add(site: &GatewayProcess, node: &str) {
    let added = causeway("node add").args([node]);
    let added = added.flag("--data-dir", site.data()).run().await.ok();
    assert_eq!(added.stdout, format!("{node} is admitted\n"));
}

async fn stands(site: &GatewayProcess, name: &str, app: u16) -> Process {
    let mut edge = edge(site, name, app).start();
    edge.wait_for_line("tunnel registered").await;
    edge
}

/// The client alice with a certificate of the company.
async fn calls(site: &GatewayProcess, node: &str) -> String {
    let curl = site
        .curl(node, "")
        .args(["--cacert".into(), site.path("company-root.pem")]);
    curl.args(["-w", " %{http_code}"]).run().await.ok().text()
}

async fn nodes(site: &GatewayProcess) -> Vec<Value> {
    let asked = causeway("status -o json").flag("--data-dir", site.data());
    serde_json::from_str(&asked.run().await.ok().stdout).unwrap()
}

#[tokio::test]
async fn a_gateway_without_a_ca_serves_with_external_certificates() {
    need!("openssl", "curl");
    let app = App::saying("it").await;
    let site = site("").await;
    let mut stranger = edge(&site, "edge-1", app.port()).start();
    stranger.wait_for_line("`causeway node add edge-1`").await;
    stranger.kill().await;
    add(&site, "edge-1").await;
    let edge_1 = stands(&site, "edge-1", app.port()).await;
    assert_eq!(calls(&site, "edge-1").await, "it 200");
    for (folder, file) in [
        (site.data(), "ca.json"),
        (site.edge_data("edge-1"), "edge.json"),
    ] {
        assert!(
            !folder.join(file).exists(),
            "{file}: no key leaves its machine"
        );
    }
    let token = causeway("token create --node edge-2").flag("--data-dir", site.data());
    token.run().await.failed(&["no CA in"]);
    let url = format!("https://{}/v1/enrol", site.tunnel);
    let asked = Tool::curl().args(["-k", "-d", "{}", &url, "-w", " %{http_code}"]);
    let content = asked.run().await.text();
    assert!(
        content.contains("certificates_given") && content.ends_with(" 501"),
        "{content}"
    );

    // Confirmed facts of a node can be confirmed again, and both ends reconnect after a restart.
    let again = causeway("node add edge-1 --pool north").flag("--data-dir", site.data());
    again.run().await.ok();
    assert_eq!(nodes(&site).await[0]["pool"], "north");
    edge_1.stop().await.ok();
    let site = site.restart(|_| {}).await;
    let _edge = stands(&site, "edge-1", app.port()).await;
    assert_eq!(calls(&site, "edge-1").await, "it 200");
}

/// Name, usage, names and signer of certificates with one fault.
const SPOILT: [(&str, &str, &str, &str); 6] = [
    ("server", "serverAuth", EDGE_1, "company"),
    (
        "elsewhere",
        "clientAuth",
        "URI:spiffe://other.test/edge/edge-1",
        "company",
    ),
    (
        "both",
        "clientAuth",
        "URI:spiffe://company.test/edge/edge-1,URI:spiffe://company.test/edge/edge-2",
        "company",
    ),
    ("gate", "clientAuth", GATEWAY, "company"),
    ("by-stranger", "clientAuth", EDGE_1, "stranger"),
    ("by-leaf", "clientAuth", EDGE_1, "edge-2"),
];

/// Tests a valid certificate at the wrong listener, and certificates with one fault.
#[tokio::test]
async fn of_one_ca_an_edge_is_no_client_and_a_client_no_edge() {
    need!("openssl", "curl");
    let site = site(", any_node: true").await;
    let folder = site.folder();
    found(folder, "stranger").await;
    for (name, usage, names, by) in SPOILT {
        issue(folder, (name, usage, names), by).await;
    }
    fs::copy(site.path("alice-key.pem"), site.path("alice.key")).unwrap();
    for (name, content) in [
        ("alice", "0 identities"),
        ("server", "extended key usage"),
        ("elsewhere", "is not of trust domain company.test"),
        ("both", "2 identities"),
        (
            "gate",
            "a certificate of kind gateway cannot be used as edge",
        ),
        ("by-stranger", "UnknownIssuer"),
        ("by-leaf", "CaUsedAsEndEntity|EndEntityUsedAsCa"),
    ] {
        let before = site.gateway.written();
        let dial = Tool::new("openssl").args(["s_client", "-alpn", "rh2", "-ign_eof"]);
        let dial = dial.args(["-connect", &site.tunnel]);
        let dial = dial.args(["-cert".into(), site.path(&format!("{name}.own"))]);
        let dial = dial.args(["-key".into(), site.path(&format!("{name}.key"))]);
        let dial = dial.args(["-cert_chain".into(), site.path(&format!("{name}.pem"))]);
        dial.run().await;
        let any = |line: &str| content.split('|').any(|content| line.contains(content));
        let news = || async {
            let now = site.gateway.written();
            now.stdout[before.stdout.len()..].lines().any(any)
                || now.stderr[before.stderr.len()..].lines().any(any)
        };
        until(&format!("{name} is refused: {content}"), news).await;
    }
    assert!(
        nodes(&site).await.is_empty(),
        "none of these edges has connected"
    );
    for name in ["edge-1", "both", "gate"] {
        let curl = site.curl_as_nobody("edge-1", "");
        let curl = curl.args(["--cacert".into(), site.path("company-root.pem")]);
        let curl = curl.args(["--cert".into(), site.path(&format!("{name}.pem"))]);
        let curl = curl.args(["--key".into(), site.path(&format!("{name}.key"))]);
        let content = curl.args(["-w", " %{http_code}"]).run().await.text();
        assert!(
            content.contains("cannot be used as client") && content.ends_with(" 401"),
            "{name}: {content}"
        );
    }
}

#[tokio::test]
async fn automatically_admitted_nodes_are_recorded_and_revocable() {
    need!("openssl", "curl");
    let app = App::saying("it").await;
    let site = site(", any_node: true").await;
    let edge_1 = stands(&site, "edge-1", app.port()).await;
    let edge_2 = stands(&site, "edge-2", app.port()).await;
    assert_eq!(calls(&site, "edge-2").await, "it 200");
    let revoke = causeway("node revoke edge-2 --reason stolen").flag("--data-dir", site.data());
    revoke.run().await.ok();
    assert!(calls(&site, "edge-2").await.ends_with(" 503"));
    edge_2.kill().await;
    let early =
        causeway("node revoke edge-3 --unseen --reason lost").flag("--data-dir", site.data());
    early.run().await.ok();
    let typo = causeway("node revoke egde-1 --reason lost").flag("--data-dir", site.data());
    let content = typo.run().await.failed(&["no node egde-1"]);
    assert!(
        content.contains("edge-1") && content.contains("--unseen"),
        "{content}"
    );
    let add = causeway("node add edge-2").flag("--data-dir", site.data());
    add.run()
        .await
        .failed(&["is revoked: stolen", "causeway node allow edge-2"]);
    // This is also so after a restart of the gateway, with any certificate.
    issue(
        site.folder(),
        (
            "edge-2",
            "clientAuth",
            "URI:spiffe://company.test/edge/edge-2",
        ),
        "company",
    )
    .await;
    let site = site.restart(|_| {}).await;
    let mut edge_2 = edge(&site, "edge-2", app.port()).start();
    edge_2.wait_for_line("node edge-2 is revoked: stolen").await;
    let states: Vec<_> = nodes(&site)
        .await
        .iter()
        .map(|node| node["state"].clone())
        .collect();
    assert_eq!(
        states[1..],
        ["revoked", "revoked"],
        "edge-3 is not connected yet"
    );
    edge_1.stop().await.ok();
}

/// Replaces a certificate in use as renewal programs do: one file after the other.
async fn renew(site: &GatewayProcess, (name, usage, names): (&str, &str, &str)) {
    let folder = site.folder();
    issue(folder, ("next", usage, names), "company").await;
    for kind in ["key", "pem"] {
        let at = |name: &str| site.path(&format!("{name}.{kind}"));
        fs::rename(at("next"), at(name)).unwrap();
    }
}

/// Returns the certificates of its tunnels; a tunnel that was replaced stays while it has streams.
async fn serials(site: &GatewayProcess) -> BTreeSet<String> {
    let node = site.node("edge-1").await;
    let tunnels = node["details"].as_array().unwrap().iter();
    tunnels
        .map(|tunnel| tunnel["certificate"].to_string())
        .collect()
}

#[tokio::test]
async fn renewed_files_are_loaded_without_dropped_requests() {
    need!("openssl", "curl");
    let span = span();
    let app = app(span).await;
    let site = site(", any_node: true").await;
    let mut edge = stands(&site, "edge-1", app.port()).await;
    let root = CertificateDer::from_pem_file(site.path("company-root.pem")).unwrap();
    let text = |name: &str| fs::read_to_string(site.path(name)).unwrap();
    let leaf = LeafCertificate::load(&text("alice.pem"), &text("alice-key.pem")).unwrap();
    let place = ListenerAddress::Tls(site.listener.parse().unwrap());
    let client = Client::new(place, &root, Log::default()).certificate(&leaf);
    let (ends, mut seen) = (Instant::now() + span, BTreeSet::new());
    let renewals = async {
        let mut rounds = 0;
        // On a busy machine a few renewals take longer than the other clients send requests.
        while rounds < 3 || Instant::now() < ends - span / 4 {
            rounds += 1;
            seen.extend(serials(&site).await);
            let before = seen.len();
            renew(&site, ("edge-1", "clientAuth", EDGE_1)).await;
            renew(&site, ("gateway", "serverAuth", GATEWAY)).await;
            until("the edge connects with its new certificate", async || {
                seen.extend(serials(&site).await);
                seen.len() > before
            })
            .await;
            // Otherwise the gateway could take two renewals for one.
            let taken_up = "tunnel.identity files changed";
            let patience = crate::world::PATIENCE;
            site.gateway.wrote(taken_up, rounds, patience).await;
            // Time is the subject: certificates live for a while.
            sleep(PACE * 20).await;
        }
    };
    Box::pin(nothing_is_lost(&client, (span, ends), renewals)).await;
    assert!(seen.len() > 3, "{seen:?}");
    edge.wait_for_line("this node's certificate or trusted CAs were replaced")
        .await;
}

/// Replaces a certificate in use by one for this use and so many days. Returns the old certificate and its key.
async fn replace(
    site: &GatewayProcess,
    (name, usage, names, days): (&str, &str, &str, &str),
) -> [Vec<u8>; 2] {
    let of = |name: &str, kind: &str| site.path(&format!("{name}.{kind}"));
    let before = ["pem", "key"].map(|kind| fs::read(of(name, kind)).unwrap());
    let folder = site.path("").display().to_string();
    let made = Tool::new("sh").args(["-c", ISSUE, "sh"]);
    let made = made.args([&folder, "next", usage, names, "company", days]);
    made.run().await.ok();
    for kind in ["key", "pem"] {
        fs::rename(of("next", kind), of(name, kind)).unwrap();
    }
    before
}

#[tokio::test]
async fn an_expired_or_wrong_purpose_renewal_replaces_no_certificate() {
    need!("openssl", "curl");
    let app = App::saying("it").await;
    let folder = company().await;
    let client = ("client", "clientAuth", "DNS:gateway");
    issue(&folder, client, "company").await;
    let at = folder.path().display();
    let apps = format!(
        "upstream_tls: {{ 10250: {{ ca: {at}/company-root.pem, certificate: {at}/client.pem, key: {at}/client.key }} }}\n"
    );
    let configuration = tunnel(&folder, ", any_node: true") + &listeners(&folder) + &apps;
    let mut site = GatewayProcess::of(folder, "127.0.0.1:0", &configuration).await;
    let mut edge = stands(&site, "edge-1", app.port()).await;
    let (listener, period) = (
        "DNS:edge-1,DNS:edge-2",
        "the new certificate is valid from ",
    );
    for (name, usage, names, days, content) in [
        ("edge-1", "clientAuth", EDGE_1, "-1", period),
        ("gateway", "serverAuth", GATEWAY, "-1", period),
        ("listener", "serverAuth", listener, "-1", period),
        (
            "listener",
            "clientAuth",
            listener,
            "2",
            "the extended key usage of the certificate does not contain serverAuth",
        ),
        ("client", "clientAuth", "DNS:gateway", "-1", period),
        (
            "client",
            "serverAuth",
            "DNS:gateway",
            "2",
            "the extended key usage of the certificate does not contain clientAuth",
        ),
    ] {
        let good = replace(&site, (name, usage, names, days)).await;
        let refused = format!("{name}.pem: {content}");
        let who = if name == "edge-1" {
            &mut edge
        } else {
            &mut site.gateway
        };
        who.wait_for_line(&refused).await;
        assert_eq!(
            calls(&site, "edge-1").await,
            "it 200",
            "{name} {usage} {days}"
        );
        for (kind, text) in ["pem", "key"].iter().zip(good) {
            fs::write(site.path("good"), text).unwrap();
            fs::rename(site.path("good"), site.path(&format!("{name}.{kind}"))).unwrap();
        }
    }
    let check = causeway("gateway --check-config --config");
    let check = check.args([site.path("gateway.yaml")]).run().await;
    check.ok();
}

#[tokio::test]
async fn a_ca_that_is_believed_no_more_sends_its_edges_away() {
    need!("openssl", "curl");
    let app = App::saying("it").await;
    // A separate file of the gateway: otherwise the edge could read it first, and leave by itself.
    let folder = company().await;
    fs::copy(
        folder.path().join("company-root.pem"),
        folder.path().join("edges.pem"),
    )
    .unwrap();
    let given = tunnel(&folder, ", any_node: true").replace("company-root.pem", "edges.pem");
    let configuration = given + &listeners(&folder);
    let mut site = GatewayProcess::of(folder, "127.0.0.1:0", &configuration).await;
    let mut edge = stands(&site, "edge-1", app.port()).await;
    found(site.folder(), "other").await;
    let clients = fs::read(site.path("company-root.pem")).unwrap();
    let put = |site: &GatewayProcess, from: &[u8]| {
        fs::write(site.path("next"), from).unwrap();
        fs::rename(site.path("next"), site.path("edges.pem")).unwrap();
    };
    put(&site, &fs::read(site.path("other-root.pem")).unwrap());
    edge.wait_for_line("is no longer trusted by this gateway")
        .await;
    until("it has no tunnel", async || {
        nodes(&site).await[0]["state"] == "away"
    })
    .await;
    let (taken_up, patience) = ("tunnel.identity files changed", crate::world::PATIENCE);
    site.gateway.wrote(taken_up, 1, patience).await;
    put(&site, &clients);
    site.gateway.wrote(taken_up, 2, patience).await;
    edge.stop().await.ok();
    let mut edge = stands(&site, "edge-1", app.port()).await;
    assert_eq!(calls(&site, "edge-1").await, "it 200");

    // Neither end uses a certificate without its key.
    fs::copy(site.path("edge-2.pem"), site.path("edge-1.pem")).unwrap();
    edge.wait_for_line("private key does not match").await;
    fs::copy(site.path("edge-2.key"), site.path("edge-1.key")).unwrap();
    edge.wait_for_line("the certificate is for node edge-2 of trust domain company.test, but this edge stays edge-1")
        .await;
    fs::copy(site.path("alice.pem"), site.path("gateway.pem")).unwrap();
    site.gateway.wait_for_line("tunnel.identity: ").await;
    assert_eq!(calls(&site, "edge-1").await, "it 200");
}

#[tokio::test]
async fn repaired_files_connect_an_edge_and_any_root_keeps_it() {
    need!("openssl", "curl");
    let app = App::saying("it").await;
    let folder = company().await;
    let text = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    // The intermediate then counts as a root, and is the one that is found first.
    fs::write(
        folder.path().join("edges.pem"),
        text("company.pem") + &text("company-root.pem"),
    )
    .unwrap();
    let given = tunnel(&folder, ", any_node: true");
    let given = given.replace("company-root.pem", "edges.pem");
    found(&folder, "stranger").await;
    issue(&folder, ("edge-1", "clientAuth", EDGE_1), "stranger").await;
    let configuration = given + &listeners(&folder);
    let mut site = GatewayProcess::of(folder, "127.0.0.1:0", &configuration).await;
    let mut edge = edge(&site, "edge-1", app.port()).start();
    edge.wait_for_line("does not accept this node's certificate")
        .await;
    // Otherwise it would stay away for a minute.
    renew(&site, ("edge-1", "clientAuth", EDGE_1)).await;
    edge.wait_for_line("tunnel registered").await;

    fs::copy(site.path("company-root.pem"), site.path("next")).unwrap();
    fs::rename(site.path("next"), site.path("edges.pem")).unwrap();
    site.gateway
        .wait_for_line("tunnel.identity files changed")
        .await;
    assert_eq!(calls(&site, "edge-1").await, "it 200");
    let ended = site.gateway.written().ended().join("\n");
    assert!(ended.is_empty(), "{ended}");
    found(site.folder(), "other").await;
    fs::rename(site.path("other-root.pem"), site.path("edges.pem")).unwrap();
    edge.wait_for_line("is no longer trusted by this gateway")
        .await;
}

/// Checks that a gateway with a stolen key keeps no edge that has learned of another CA.
#[tokio::test]
async fn an_edge_leaves_a_gateway_whose_ca_it_no_longer_trusts() {
    need!("openssl", "curl");
    let app = App::saying("it").await;
    let site = site(", any_node: true").await;
    found(site.folder(), "other").await;
    fs::copy(site.path("company-root.pem"), site.path("gateways.pem")).unwrap();
    let at = site.path("").display().to_string();
    let identity =
        format!("{{ chain: {at}/edge-1.pem, key: {at}/edge-1.key, ca: {at}/gateways.pem }}");
    let edge = site.edge("edge-1", app.port()).flag("--identity", identity);
    let mut edge = edge.start();
    edge.wait_for_line("tunnel registered").await;
    assert_eq!(calls(&site, "edge-1").await, "it 200");
    fs::rename(site.path("other-root.pem"), site.path("gateways.pem")).unwrap();
    edge.wait_for_line("the gateway's CA is no longer trusted")
        .await;
    until("the gateway has no edge", async || {
        calls(&site, "edge-1").await.ends_with(" 503")
    })
    .await;
    fs::copy(site.path("company-root.pem"), site.path("gateways.pem")).unwrap();
    until("it is back", async || {
        calls(&site, "edge-1").await == "it 200"
    })
    .await;
}

#[tokio::test]
async fn an_unusable_configuration_is_refused_with_the_missing_part() {
    need!("openssl");
    let folder = company().await;
    let (given, listeners) = (tunnel(&folder, ""), listeners(&folder));
    let bare = "listeners: [{ name: web, protocol: https, listen: \"127.0.0.1:0\" }]\n";
    let refused = async |configuration: String, words: &[&str]| {
        GatewayProcess::refused(&folder, &configuration)
            .await
            .failed(words);
    };
    refused(
        given.clone() + bare,
        &["listener \"web\" lacks certificate", "there is no CA"],
    )
    .await;
    let nobody = listeners
        .replace(", client_auth: { client_ca: [", ", names: [")
        .replace("] } }]", "] }]");
    refused(
        given.clone() + &nobody,
        &[
            "lacks client_auth",
            "client_ca, tokens, jwt or token_review",
        ],
    )
    .await;
    let edges = given.replace("gateway.", "edge-1.");
    refused(
        edges + &listeners,
        &[
            "edge-1.pem",
            "the certificate is for edge edge-1",
            "/gateway",
        ],
    )
    .await;
    let no_ca = given.replace("company-root.pem", "alice.pem");
    refused(no_ca + &listeners, &["alice.pem", "may not sign"]).await;
    let init = causeway("ca init --trust-domain other.test");
    init.flag("--data-dir", folder.path().join("gateway"))
        .run()
        .await
        .ok();
    refused(
        given + &listeners,
        &["trust domain company.test", "trust domain other.test"],
    )
    .await;
}

/// Causeway's CA then only serves listeners and clients, and its rotation does not affect the edges.
#[tokio::test]
async fn beside_a_ca_of_its_own_a_gateway_takes_edges_by_another() {
    need!("openssl", "curl");
    let folder = company().await;
    let init = causeway("ca init --trust-domain company.test");
    let data: PathBuf = folder.path().join("gateway");
    init.flag("--data-dir", &data).run().await.ok();
    let made = causeway("client certificate --name alice").flag("--out", folder.path());
    fs::remove_file(folder.path().join("alice.pem")).unwrap();
    fs::remove_file(folder.path().join("alice-key.pem")).unwrap();
    made.flag("--data-dir", &data).run().await.ok();
    let app = App::saying("it").await;
    let bare = "listeners: [{ name: web, protocol: https, listen: \"127.0.0.1:0\", port: 9100 }]\n";
    let configuration = tunnel(&folder, ", any_node: true") + bare;
    let site = GatewayProcess::of(folder, "127.0.0.1:0", &configuration).await;
    let _edge = stands(&site, "edge-1", app.port()).await;
    let content = async || site.curl("edge-1", "").run().await.ok().text();
    assert_eq!(content().await, "it");
    for step in ["prepare", "activate", "retire"] {
        let step = causeway("ca rotate")
            .args([step])
            .flag("--data-dir", site.data());
        step.run().await.ok();
    }
    let made = causeway("client certificate --name bob").flag("--out", site.path("."));
    made.flag("--data-dir", site.data()).run().await.ok();
    let curl = site.curl_as_nobody("edge-1", "");
    let curl = curl.args(["--cert".into(), site.path("bob.pem")]);
    let curl = curl.args(["--key".into(), site.path("bob-key.pem")]);
    assert_eq!(curl.run().await.ok().text(), "it");
    assert_eq!(nodes(&site).await[0]["tunnels"], 1);
}
