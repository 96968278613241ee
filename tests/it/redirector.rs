//! `causeway redirect`: callers of the nodes' own addresses on a host where no gateway runs.
//!
//! Real processes and a real kernel: the gateway, edges and a cluster's API on the hub, callers on a host of their own,
//! whose rules lead them there, or on one that sends by it.

use crate::world::{
    PATIENCE,
    app::{App, End, Script, answer},
    cluster::Cluster,
    netns::{HUB, Host, NEED, Street},
    process::{Process, Site, address_after, causeway},
    tool::{Ran, Tool, need},
    until,
};
use causeway_tunnel::socket::Abort;
use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// A bound of what takes milliseconds.
const SOON: Duration = Duration::from_mins(2);

/// Of whom headers are believed: of the one host that redirects.
const CONFIGURATION: &str = r#"
fronts:
  - { name: nodes, kind: https, listen: "[::]:0", port: 9100, original_destination: true, anonymous: true, proxy_protocol: [10.77.0.2/32] }
  - { name: bytes, kind: tcp, listen: "[::]:0", original_destination: true, anonymous: true, proxy_protocol: [10.77.0.2/32] }
timeouts: { drain: 1s }
"#;

/// Everything but who redirects.
struct Scene {
    site: Site,
    cluster: Cluster,
    folder: TempDir,
    edges: Vec<Process>,
    apps: Vec<App>,
    /// The ports of the fronts.
    fronts: [u16; 2],
}

impl Scene {
    /// A gateway without edges.
    async fn new(street: &Street) -> Self {
        street.opens_up();
        let mut site = Site::with_fronts(CONFIGURATION).await;
        let bytes = site.gateway.line("bytes", |line| {
            line.contains("front open") && line.contains("bytes")
        });
        let bytes = address_after(&bytes.await, "address=");
        let port = |address: &str| address.parse::<SocketAddr>().unwrap().port();
        let fronts = [port(&site.front), port(&bytes)];
        Self {
            site,
            cluster: Cluster::at(HUB).await,
            folder: tempfile::tempdir().unwrap(),
            edges: Vec::new(),
            apps: Vec::new(),
            fronts,
        }
    }

    /// A node with these addresses, whose port 9100 says its name and whose port 9200 is `app`.
    async fn joins(&mut self, node: &'static str, addresses: &[&str], app: App) {
        let name = App::http(move |_| answer::ok(node)).await;
        let told = addresses
            .iter()
            .map(|address| format!("--address {address}"));
        let told = told.collect::<Vec<_>>().join(" ");
        let token = self.site.token(&format!("--node {node} {told}")).await;
        let to = |number: u16, app: &App| {
            format!("{number}: {{ target: \"127.0.0.1:{}\" }}", app.port())
        };
        let ports = format!("{{ {}, {} }}", to(9100, &name), to(9200, &app));
        let edge = causeway("edge --admin-listen 127.0.0.1:0")
            .flag("--gateway", &self.site.tunnel)
            .flag("--data-dir", self.site.edge_data(node))
            .flag("--ports", ports)
            .flag("--join", token);
        let mut edge = edge.start();
        edge.said("tunnel registered").await;
        self.edges.push(edge);
        self.apps.extend([name, app]);
        self.cluster.node(node, true, addresses);
    }

    /// The configuration of one that redirects to these gateways before the one that there is.
    fn configuration(&self, before: &[String], further: &str) -> PathBuf {
        let to = |front: u16| {
            let all = before.iter().cloned().chain([format!("{HUB}:{front}")]);
            let all: Vec<_> = all.map(|gateway| format!("{gateway:?}")).collect();
            format!("[{}]", all.join(", "))
        };
        let [nodes, bytes] = self.fronts;
        let text = format!(
            "listen: \"[::]:0\"\nadmin: {{ listen: \"127.0.0.1:0\" }}\nports: {{ 9100: {}, 9200: {} }}\n\
             kubernetes: {{ kubeconfig: {} }}\n{further}\n",
            to(nodes),
            to(bytes),
            self.cluster.kubeconfig().display()
        );
        let file = self.folder.path().join("redirect.yaml");
        fs::write(&file, text).unwrap();
        file
    }

    /// Starts it on that host, and waits until it leads callers of this address away.
    async fn redirect(&self, host: &Host<'_>, file: PathBuf, address: &str) -> Redirect {
        let program = host.causeway().args(["redirect"]).flag("--config", file);
        let mut process = program.start();
        let ready = process.said("redirect ready").await;
        listed(host, address, true).await;
        Redirect {
            listen: address_after(&ready, "listen=").parse().unwrap(),
            admin: address_after(&ready, "admin="),
            process,
        }
    }

    /// A caller on that host.
    async fn curl(&self, url: &str, host: &Host<'_>) -> Ran {
        let running = {
            let _there = host.enter();
            let curl = Tool::curl().args(["--max-time", "5", "--cacert"]);
            let curl = curl.args([self.site.data().join("ca.pem")]);
            curl.args(["-g", url]).start()
        };
        running.finish().await
    }
}

/// One that redirects.
struct Redirect {
    process: Process,
    listen: SocketAddr,
    admin: String,
}

impl Redirect {
    async fn page(&self, host: &Host<'_>, path: &str) -> Ran {
        let running = {
            let _there = host.enter();
            let url = format!("http://{}{path}", self.admin);
            Tool::curl().args(["--max-time", "5", &url]).start()
        };
        running.finish().await
    }

    /// The value of a metric.
    async fn metric(&self, host: &Host<'_>, name: &str) -> String {
        let all = self.page(host, "/metrics").await.ok().text();
        let line = all.lines().find_map(|line| {
            let rest = line.strip_prefix("causeway_redirect_")?;
            rest.strip_prefix(name)?
                .strip_prefix(' ')
                .map(str::to_owned)
        });
        line.unwrap_or_else(|| panic!("no {name} in {all}"))
    }
}

fn set(host: &Host<'_>) -> String {
    let set = host.nft("list set inet causeway edges4");
    set.unwrap_or_default()
}

async fn listed(host: &Host<'_>, address: &str, there: bool) {
    until(&format!("{address} is redirected: {there}"), async || {
        set(host).contains(address) == there
    })
    .await;
}

/// A caller of bytes on that host.
async fn dial(host: &Host<'_>, address: SocketAddr) -> io::Result<TcpStream> {
    let _there = host.enter();
    let dialled = timeout(SOON, TcpStream::connect(address)).await;
    dialled.expect("neither taken nor refused")
}

/// A caller of bytes on that host is reset, at once or a moment later.
async fn is_reset(host: &Host<'_>, address: SocketAddr) {
    let read = async { dial(host, address).await?.read(&mut [0; 1]).await };
    let read = timeout(SOON, read).await.unwrap();
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

/// The node's app behind its port 9200.
const BYTES: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 0, 0, 11)), 9200);

#[tokio::test]
async fn whoever_dials_a_nodes_address_where_no_gateway_runs_arrives_at_that_node() {
    need!(NEED, "curl");
    let street = Street::new();
    let mut scene = Scene::new(&street).await;
    for (node, addresses) in [
        ("edge-1", ["10.0.0.11", "fd00::11"]),
        ("edge-2", ["10.0.0.12", "fd00::12"]),
    ] {
        let app = App::saying(node).await;
        scene.joins(node, &addresses, app).await;
    }
    scene.cluster.node("cloud-1", false, &["10.0.0.50"]);
    let (host, behind) = (street.host(), street.host());
    host.opens_up();
    behind.sends_by(&host);
    let file = scene.configuration(&[], "");
    let redirect = scene.redirect(&host, file, "10.0.0.11").await;
    assert!(
        !set(&host).contains("10.0.0.50"),
        "no edge's: {}",
        set(&host)
    );
    for (node, v4, v6) in [
        ("edge-1", "10.0.0.11", "[fd00::11]"),
        ("edge-2", "10.0.0.12", "[fd00::12]"),
    ] {
        for (from, address) in [(&host, v4), (&host, v6), (&behind, v4)] {
            // The gateway ends TLS, with a certificate for the address that was dialled here.
            for url in [
                format!("https://{address}:9100/"),
                format!("http://{address}:9200/"),
            ] {
                let said = scene.curl(&url, from).await;
                assert_eq!(said.ok().text(), node, "{url} from {}", from.address());
            }
        }
    }
    // The gateway knows the callers and not who passed them on.
    for caller in ["10.77.0.2", "10.77.0.3", "fd77::2"] {
        scene.site.gateway.said(&format!("caller={caller:?}")).await;
    }
    assert_eq!(redirect.metric(&host, "connections_total").await, "12");
    assert_eq!(redirect.metric(&host, "addresses").await, "4");
    redirect.page(&host, "/readyz").await.ok();
    // Whom no rule has led here is nobody's caller.
    let own = SocketAddr::from((host.address(), redirect.listen.port()));
    is_reset(&behind, own).await;
}

#[tokio::test]
async fn a_gateway_that_is_away_is_passed_over_and_where_none_is_left_callers_are_reset() {
    need!(NEED, "curl");
    let street = Street::new();
    let mut scene = Scene::new(&street).await;
    let app = App::saying("edge-1").await;
    scene.joins("edge-1", &["10.0.0.11"], app).await;
    let host = street.host();
    let away = TcpListener::bind((HUB, 0)).unwrap().local_addr().unwrap();
    // One that refuses, one that is silent, and one whose address leads back here.
    let before = [
        away.to_string(),
        "10.77.0.99:1".to_owned(),
        "10.0.0.11:9200".to_owned(),
    ];
    let file = scene.configuration(&before, "timeouts: { open: 4s }");
    let redirect = scene.redirect(&host, file, "10.0.0.11").await;
    for _ in 0..2 {
        let said = scene.curl("https://10.0.0.11:9100/", &host).await;
        assert_eq!(said.ok().text(), "edge-1");
    }
    assert_eq!(redirect.metric(&host, "gateways_failed_total").await, "3");

    let Scene { site, .. } = &scene;
    site.gateway.signal("KILL").await;
    for _ in 0..3 {
        is_reset(&host, BYTES).await;
    }
    let lost = r#"connections_failed_total{why="no_gateway"}"#;
    assert_eq!(redirect.metric(&host, lost).await, "3");
    let told = "no gateway takes callers";
    redirect.process.wrote(told, 1, PATIENCE).await;
    let written = redirect.process.written();
    assert_eq!(written.count(told), 1, "{written:?}");
    let line = written.line(|line| line.contains(told)).unwrap();
    for part in [away.to_string(), "leads back here".to_owned()] {
        assert!(line.contains(&part), "{line}");
    }
    redirect.page(&host, "/readyz").await.ok();
}

/// The kernel takes its connections, and nobody reads them.
#[tokio::test]
async fn a_gateway_that_hangs_costs_one_client_a_while_and_the_next_one_answers() {
    need!(NEED, "curl");
    let street = Street::new();
    let mut scene = Scene::new(&street).await;
    let app = App::saying("edge-1").await;
    scene.joins("edge-1", &["10.0.0.11"], app).await;
    let host = street.host();
    let hung = TcpListener::bind((HUB, 0)).unwrap();
    let before = [hung.local_addr().unwrap().to_string()];
    let file = scene.configuration(&before, "timeouts: { answer: 1s }");
    let redirect = scene.redirect(&host, file, "10.0.0.11").await;
    for _ in 0..3 {
        let said = scene.curl("https://10.0.0.11:9100/", &host).await;
        assert_eq!(said.ok().text(), "edge-1");
    }
    assert_eq!(redirect.metric(&host, "gateways_failed_total").await, "1");
    let told = "does not answer in time";
    redirect.process.wrote(told, 1, PATIENCE).await;
    let written = redirect.process.written();
    assert_eq!(written.count(told), 1, "{written:?}");
    drop(hung);
}

#[tokio::test]
async fn another_configuration_is_taken_up_and_what_is_open_stays_where_it_is() {
    need!(NEED, "curl");
    let street = Street::new();
    let mut scene = Scene::new(&street).await;
    let app = App::tcp(Script::new().echo()).await;
    scene.joins("edge-1", &["10.0.0.11"], app).await;
    let host = street.host();
    let file = scene.configuration(&[], "");
    let redirect = scene.redirect(&host, file.clone(), "10.0.0.11").await;
    let mut stream = dial(&host, BYTES).await.unwrap();
    let mut echoed = [0; 4];
    stream.write_all(b"once").await.unwrap();
    stream.read_exact(&mut echoed).await.unwrap();

    // One port less, and a key that waits.
    let [nodes, _] = scene.fronts;
    let text = fs::read_to_string(&file).unwrap();
    let (before, _) = text.split_once("ports:").unwrap();
    let (_, behind) = text.split_once("kubernetes:").unwrap();
    let ports = format!("ports: {{ 9100: [\"{HUB}:{nodes}\"] }}");
    let less = format!("{before}{ports}\nkubernetes:{behind}limits: {{ connections: 7 }}\n");
    fs::write(&file, less).unwrap();
    let mut process = redirect.process;
    let said = process.said("the configuration is in force").await;
    assert!(said.contains("leads 9100 away"), "{said}");
    assert!(said.contains("waits for the next start: limits"), "{said}");
    let said = scene.curl("https://10.0.0.11:9100/", &host).await;
    assert_eq!(said.ok().text(), "edge-1");
    until("nobody is led away from the other port", async || {
        let rules = host.nft("list table inet causeway").unwrap_or_default();
        rules.contains("9100") && !rules.contains("9200")
    })
    .await;
    stream.write_all(b"more").await.unwrap();
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"more");

    // What is wrong is refused, to whoever asks as well.
    fs::write(&file, "ports: { 9100: [nowhere] }\n").unwrap();
    let asked = host.causeway().args(["reload", "--admin", &redirect.admin]);
    let asked = asked.run().await.with_code(2);
    assert!(asked.stderr.contains("nowhere"), "{asked:?}");
    fs::write(&file, text).unwrap();
    until("all is as it was", async || {
        let rules = host.nft("list table inet causeway").unwrap_or_default();
        rules.contains("9200")
    })
    .await;
    let mut stream = dial(&host, BYTES).await.unwrap();
    stream.write_all(b"anew").await.unwrap();
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"anew");
}

#[tokio::test]
async fn the_rules_follow_the_nodes_and_go_with_the_process_however_it_ends() {
    need!(NEED, "curl");
    let street = Street::new();
    let mut scene = Scene::new(&street).await;
    let app = App::saying("edge-1").await;
    scene.joins("edge-1", &["10.0.0.11"], app).await;
    let host = street.host();
    let file = scene.configuration(&[], "");
    let redirect = scene.redirect(&host, file.clone(), "10.0.0.11").await;
    scene.cluster.node("edge-2", true, &["10.0.0.12"]);
    listed(&host, "10.0.0.12", true).await;
    scene
        .cluster
        .node("edge-2", true, &["10.0.0.11", "10.0.0.13"]);
    // An address that two nodes at the edge claim leads to the gateway, which says so.
    listed(&host, "10.0.0.13", true).await;
    assert!(set(&host).contains("10.0.0.11"));
    scene.cluster.gone("edge-2");
    listed(&host, "10.0.0.13", false).await;
    // One that a node elsewhere claims as well leads nowhere.
    scene.cluster.node("cloud-2", false, &["10.0.0.11"]);
    listed(&host, "10.0.0.11", false).await;
    scene.cluster.gone("cloud-2");
    listed(&host, "10.0.0.11", true).await;
    // Nobody else changes them, and what is known holds while the API is away.
    scene.cluster.falls_silent().await;
    host.nft("flush ruleset").unwrap();
    assert!(host.nft("delete table inet causeway").is_err());
    let said = scene.curl("https://10.0.0.11:9100/", &host).await;
    assert_eq!(said.ok().text(), "edge-1");
    let table = || host.nft("list table inet causeway");
    redirect.process.kill().await;
    assert!(table().is_err(), "killed, and its rules are there");

    // Something that was left under the name; and an API that is away is waited for.
    host.nft("add table inet causeway").unwrap();
    host.nft("add chain inet causeway stale").unwrap();
    let program = host.causeway().args(["redirect"]).flag("--config", &file);
    let mut again = program.start();
    let ready = again.said("redirect ready").await;
    assert!(!table().unwrap().contains("stale"));
    let again = Redirect {
        listen: address_after(&ready, "listen=").parse().unwrap(),
        admin: address_after(&ready, "admin="),
        process: again,
    };
    let page = again.page(&host, "/readyz").await.ok().text();
    assert!(page.contains("not known yet"), "{page}");
    // A second would take its table.
    let second = host.causeway().args(["redirect"]).flag("--config", &file);
    second.run().await.failed(&["owns the nftables table"]);
    again.process.stop().await.ok();
    assert!(table().is_err(), "stopped, and its rules are there");
}

#[tokio::test]
async fn half_closes_and_resets_pass_both_ways() {
    need!(NEED);
    let street = Street::new();
    let mut scene = Scene::new(&street).await;
    let app = App::tcp(Script::new().read_to_end().write("answered")).await;
    scene.joins("edge-1", &["10.0.0.11"], app).await;
    let breaks = App::tcp(Script::new().write("half").reset()).await;
    scene.joins("edge-2", &["10.0.0.12"], breaks).await;
    let host = street.host();
    let file = scene.configuration(&[], "");
    let redirect = scene.redirect(&host, file, "10.0.0.12").await;

    let mut stream = dial(&host, BYTES).await.unwrap();
    stream.write_all(b"asked").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut said = String::new();
    let read = timeout(SOON, stream.read_to_string(&mut said)).await;
    read.unwrap().unwrap();
    assert_eq!(said, "answered");
    assert_eq!(scene.apps[1].body().await, b"asked");
    assert_eq!(scene.apps[1].end().await, End::Finished);

    let mut stream = dial(&host, BYTES).await.unwrap();
    stream.write_all(b"asked").await.unwrap();
    until("the app has it", async || scene.apps[1].connections() == 2).await;
    stream.abort();
    drop(stream);
    assert_eq!(scene.apps[1].end().await, End::Reset);

    let mut stream = dial(&host, SocketAddr::new([10, 0, 0, 12].into(), 9200))
        .await
        .unwrap();
    let mut said = Vec::new();
    let read = timeout(SOON, stream.read_to_end(&mut said)).await.unwrap();
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    until("nothing is left open", async || {
        redirect.metric(&host, "open_connections").await == "0"
    })
    .await;
}

#[tokio::test]
async fn a_stop_refuses_who_comes_and_lets_what_is_open_end_and_a_limit_resets_who_is_too_many() {
    need!(NEED, "curl");
    let street = Street::new();
    let mut scene = Scene::new(&street).await;
    let app = App::tcp(Script::new().echo()).await;
    scene.joins("edge-1", &["10.0.0.11"], app).await;
    let host = street.host();
    let file = scene.configuration(&[], "limits: { connections: 1 }");
    let redirect = scene.redirect(&host, file, "10.0.0.11").await;
    let mut stream = dial(&host, BYTES).await.unwrap();
    let mut echoed = [0; 4];
    stream.write_all(b"once").await.unwrap();
    stream.read_exact(&mut echoed).await.unwrap();

    is_reset(&host, BYTES).await;
    let limit = r#"connections_failed_total{why="limit"}"#;
    assert_eq!(redirect.metric(&host, limit).await, "1");

    redirect.process.signal("TERM").await;
    until("it takes nobody any more", async || {
        let refused = dial(&host, BYTES).await;
        refused.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    })
    .await;
    let page = redirect.page(&host, "/readyz").await.ok().text();
    assert!(page.contains("drained"), "{page}");
    stream.write_all(b"more").await.unwrap();
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"more");
    drop(stream);
    redirect.process.ended().await.ok();
    assert!(host.nft("list table inet causeway").is_err());
}
