//! API cache by the built binary. The gateway takes objects from manifests. curl reads them at edges as clients of Kubernetes
//! do, through outages, restarts and damage.

use crate::world::{
    admin,
    process::{Causeway, GatewayProcess, Process, address_after, causeway},
    tool::{Tool, need},
    until,
};
use serde_json::{Value, json};
use std::{fs, path::Path, time::Instant};
use test_summary::unused_port;

/// The path of all `EndpointSlices`.
const SLICES: &str = "apis/discovery.k8s.io/v1/endpointslices";

/// A gateway with this many `EndpointSlices` and a Service.
async fn gateway(slices: u32) -> (tempfile::TempDir, GatewayProcess) {
    let objects = tempfile::tempdir().unwrap();
    for number in 0..slices {
        write(objects.path(), &format!("slice-{number}"), "10.0.0.1");
    }
    let service = json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "name": "web", "namespace": "shop" }, "spec": { "clusterIP": "10.96.0.7" } });
    fs::write(objects.path().join("web.json"), service.to_string()).unwrap();
    let readers = format!("api_cache: {{ manifests: {} }}", objects.path().display());
    let site = GatewayProcess::with(&readers).await;
    (objects, site)
}

fn write(objects: &Path, name: &str, address: &str) {
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": { "name": name, "namespace": "shop", "labels": { "kubernetes.io/service-name": "web" } },
        "addressType": "IPv4",
        "endpoints": [{ "addresses": [address] }],
    });
    fs::write(objects.join(format!("{name}.json")), slice.to_string()).unwrap();
}

/// Returns the objects of a resource that edge-1 has saved; nothing if there is no file.
async fn saved(site: &GatewayProcess, resource: &str) -> String {
    let file = format!("pool/{resource}.pool");
    let file = site.edge_data("edge-1").join(file);
    // A checksum precedes the compressed objects.
    let read = r#"tail -n +2 "$0" | gzip -dc"#;
    let read = Tool::new("sh").args(["-c".as_ref(), read.as_ref(), file.as_os_str()]);
    read.run().await.text()
}

/// Waits until edge-1 has saved the Service, and that slice-9 was added and slice-0 removed.
async fn until_saved(site: &GatewayProcess) {
    until("the last changes are on the disk", async || {
        let slices = saved(site, "discovery.k8s.io_v1_endpointslices").await;
        let services = saved(site, "v1_services").await;
        let has_slices = slices.contains("slice-9") && !slices.contains("slice-0");
        has_slices && services.contains("web")
    })
    .await;
}

/// An edge with an API cache.
struct ApiCacheEdge {
    edge: Process,
    at: String,
}

impl ApiCacheEdge {
    async fn of(edge: Causeway, reader: &str) -> Self {
        let mut edge = edge.flag("--api-cache", reader).start();
        let line = edge
            .wait_for_line("the API cache is ready for programs on this node")
            .await;
        let at = address_after(&line, "address=");
        Self { edge, at }
    }

    /// A node that joins as a member of a pool.
    async fn join(site: &GatewayProcess, node: &str, reader: &str) -> Self {
        let token = site.token(&format!("--node {node} --pool north")).await;
        Self::of(site.edge(node, 1).flag("--join", token), reader).await
    }

    /// Sends a request; returns status, head and body.
    async fn get(&self, path: &str) -> (u16, String, Value) {
        let url = format!("http://{}/{path}", self.at);
        let output = Tool::curl()
            .args(["-i", "--max-time", "120", &url])
            .run()
            .await;
        let text = output.ok().text();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_owned(), serde_json::from_str(body).unwrap())
    }

    /// Returns the names of the listed objects, or nothing.
    async fn names(&self, path: &str) -> Vec<String> {
        let (status, _, list) = self.get(path).await;
        if status != 200 {
            return Vec::new();
        }
        let items = list["items"].as_array().unwrap();
        items
            .iter()
            .map(|item| item["metadata"]["name"].as_str().unwrap().to_owned())
            .collect()
    }

    async fn has(&self, count: usize) {
        until("all objects can be read", async || {
            self.names(SLICES).await.len() == count
        })
        .await;
    }

    /// Waits until the slice has this address.
    async fn says(&self, name: &str, address: &str) {
        let path = format!("apis/discovery.k8s.io/v1/namespaces/shop/endpointslices/{name}");
        until("the change is there", async || {
            self.get(&path).await.2["endpoints"][0]["addresses"][0] == address
        })
        .await;
    }

    /// Returns the page of the edge's admin listener at this path.
    async fn page(&self, path: &str) -> String {
        let written = self.edge.written();
        let line = written
            .line(|line| line.contains("edge is running"))
            .unwrap();
        admin::get(&address_after(line, "admin="), &format!("/{path}")).await
    }

    async fn status(&self) -> Value {
        let text = self.page("status").await;
        serde_json::from_str::<Value>(&text).unwrap()["api_cache"].clone()
    }

    /// Checks that the whole configuration is in effect.
    async fn is_well(&self) -> bool {
        let metrics = self.page("metrics").await;
        metrics.contains("causeway_edge_last_reload_successful 1\n")
    }
}

#[tokio::test]
async fn a_node_reads_gateway_state_from_its_edge_during_outages() {
    need!("curl");
    let (objects, site) = gateway(3).await;
    let node = ApiCacheEdge::join(&site, "edge-1", "{ listen: \"127.0.0.1:0\" }").await;
    node.has(3).await;
    let (_, head, list) = node
        .get(&format!(
            "{SLICES}?labelSelector=kubernetes.io/service-name%3Dweb&limit=2"
        ))
        .await;
    assert_eq!(list["items"].as_array().unwrap().len(), 2, "{list}");
    assert!(
        list["metadata"]["continue"].is_string() && !head.contains("warning"),
        "{head}"
    );
    // The edge reads each resource by itself.
    until("the services can be read", async || {
        node.names("api/v1/services").await == ["web"]
    })
    .await;
    let (status, _, refused) = node.get("api/v1/pods").await;
    assert_eq!((status, &refused["kind"]), (404, &"Status".into()));

    write(objects.path(), "slice-1", "10.0.0.2");
    write(objects.path(), "slice-9", "10.0.0.9");
    node.says("slice-1", "10.0.0.2").await;
    node.has(4).await;
    // An invalid manifest changes nothing, and is reported.
    fs::write(objects.path().join("bad.yaml"), "kind: [").unwrap();
    let mut site = site;
    site.gateway.wait_for_line("bad.yaml").await;
    fs::remove_file(objects.path().join("bad.yaml")).unwrap();

    // Without a gateway the edge continues to serve, and reports the age of its data.
    let gone = objects.path().join("slice-0.json");
    let site = site.restart(|_| fs::remove_file(gone).unwrap()).await;
    node.has(3).await;
    site.gateway.signal("KILL").await;
    until("answers have a warning about their age", async || {
        let (status, head, list) = node.get(SLICES).await;
        assert_eq!(
            (status, list["items"].as_array().unwrap().len()),
            (200, 3),
            "{list}"
        );
        head.to_lowercase().contains("\r\nage: ")
            && head.to_lowercase().contains("\r\nwarning: 299 causeway")
    })
    .await;
    assert_eq!(node.status().await["ready"], false);

    // Also after a reboot.
    until_saved(&site).await;
    node.edge.kill().await;
    let again = ApiCacheEdge::of(site.edge("edge-1", 1), "{ listen: \"127.0.0.1:0\" }").await;
    assert_eq!(again.names(SLICES).await.len(), 3);
    assert_eq!(again.names("api/v1/services").await, ["web"]);
    let site = site
        .restart(|_| write(objects.path(), "slice-9", "10.0.0.10"))
        .await;
    again.says("slice-9", "10.0.0.10").await;
    until("it is connected again", async || {
        again.status().await["ready"] == true
    })
    .await;
    drop(site);
}

/// The edge notices a silent gateway by its missing answers to pings. The age counts from the gateway's last message.
#[tokio::test]
async fn state_of_a_hung_gateway_is_as_old_as_its_last_message() {
    need!("curl");
    let began = Instant::now();
    let (_objects, site) = gateway(3).await;
    let node = ApiCacheEdge::join(&site, "edge-1", "{ listen: \"127.0.0.1:0\" }").await;
    node.has(3).await;
    site.gateway.signal("STOP").await;
    let mut told = None;
    until("answers have a warning about their age", async || {
        let (_, head, _) = node.get(SLICES).await;
        let head = head.to_lowercase();
        let age = head.lines().find_map(|line| line.strip_prefix("age: "));
        told = age.and_then(|age| age.trim().parse::<u64>().ok());
        told.is_some()
    })
    .await;
    // By the clock of the edge: it waits 10 s for the answer to a ping, and 3 s until it mentions the age, which has whole
    // seconds. If the age counted from the end of the connection, it would be 10 s.
    let (told, most) = (told.unwrap(), began.elapsed().as_secs());
    assert!((12..=most).contains(&told), "{told} of {most} s");
    site.gateway.signal("CONT").await;
    until("it is connected again", async || {
        node.status().await["ready"] == true
    })
    .await;
}

#[tokio::test]
async fn one_pool_member_reads_for_the_others_and_is_replaced() {
    need!("curl");
    let (objects, site) = gateway(3).await;
    let mut nodes = Vec::new();
    for number in 1..=3 {
        let at = format!("127.0.0.1:{}", unused_port());
        let reader = format!(
            "{{ listen: \"127.0.0.1:0\", members: {{ listen: \"{at}\", addresses: [\"{at}\"] }} }}"
        );
        nodes.push((
            ApiCacheEdge::join(&site, &format!("edge-{number}"), &reader).await,
            reader,
        ));
    }
    for (node, _) in &nodes {
        node.has(3).await;
    }
    let role = async |role: &str| {
        let mut found = Vec::new();
        for (at, (node, _)) in nodes.iter().enumerate() {
            if node.status().await["role"] == role {
                found.push(at);
            }
        }
        found
    };
    let mut leader = 0;
    until("one leads and two follow", async || {
        let leaders = role("leader").await;
        leader = leaders.first().copied().unwrap_or_default();
        leaders.len() == 1 && role("follower").await.len() == 2
    })
    .await;
    // Only this edge reads from the gateway.
    until("one reads at the gateway", async || {
        site.metrics().await.sum("api_cache_connections", &[]) == 1
    })
    .await;
    write(objects.path(), "slice-1", "10.0.0.2");
    for (node, _) in &nodes {
        node.says("slice-1", "10.0.0.2").await;
    }
    let (gone, _) = nodes.remove(leader);
    gone.edge.kill().await;
    write(objects.path(), "slice-2", "10.0.0.3");
    for (node, _) in &nodes {
        node.says("slice-2", "10.0.0.3").await;
    }
    let mut leaders = 0;
    until("another edge leads", async || {
        leaders = 0;
        for (node, _) in &nodes {
            leaders += usize::from(node.status().await["role"] == "leader");
        }
        leaders == 1
    })
    .await;
}

/// Makes the self-signed certificate that the endpoint shows to programs, in a folder.
fn show(folder: &Path) {
    let names = ["kubernetes.default.svc", "127.0.0.1"].map(str::to_owned);
    let key = rcgen::KeyPair::generate().unwrap();
    let made = rcgen::CertificateParams::new(names).unwrap();
    let made = made.self_signed(&key).unwrap();
    fs::write(folder.join("key.pem"), key.serialize_pem()).unwrap();
    fs::write(folder.join("endpoint.pem"), made.pem()).unwrap();
}

/// Runs curl at an endpoint with TLS. curl trusts the CA that is or was in the folder.
fn over_tls(node: &ApiCacheEdge, ca: &Path, path: &str) -> Tool {
    let url = format!("https://{}/{path}", node.at);
    let ca = ca.display().to_string();
    Tool::curl().args(["--no-buffer", "--max-time", "600", "--cacert", &ca, &url])
}

/// If certificate and key do not match, the edge keeps the previous pair.
async fn spoilt(node: &mut ApiCacheEdge, folder: &Path) {
    let kept = folder.join("kept.pem");
    fs::copy(folder.join("endpoint.pem"), &kept).unwrap();
    fs::write(folder.join("key.pem"), "no key").unwrap();
    let told = node
        .edge
        .wait_for_line("the previous one stays in use")
        .await;
    assert!(told.contains("api_cache.tls"), "{told}");
    let version = over_tls(node, &kept, "version").run().await;
    assert!(version.text().contains("gitVersion"));
}

#[tokio::test]
async fn clients_read_over_tls_with_late_and_renewed_certificates() {
    need!("curl");
    let (objects, site) = gateway(1).await;
    let folder = tempfile::tempdir().unwrap();
    let (shown, kept) = (
        folder.path().join("endpoint.pem"),
        folder.path().join("kept.pem"),
    );
    let key = folder.path().join("key.pem").display().to_string();
    let reader = format!(
        "{{ listen: \"127.0.0.1:0\", tls: {{ certificate: {}, key: {key} }} }}",
        shown.display()
    );
    let check = causeway("edge").args(["--check-config"]);
    let check = check.flag("--api-cache", &reader).run().await;
    assert!(
        check.code != Some(0) && check.stderr.contains("api_cache.tls"),
        "{}",
        check.stderr
    );
    // An edge is useful without the API cache, too.
    let mut node = ApiCacheEdge::join(&site, "edge-1", &reader).await;
    let told = node
        .edge
        .wait_for_line("this listener refuses all clients until the error is corrected")
        .await;
    assert!(
        told.contains("api_cache.tls") && told.contains("endpoint.pem"),
        "{told}"
    );
    until("it reads nevertheless", async || {
        node.status().await["ready"] == true
    })
    .await;
    assert!(!node.is_well().await);
    show(folder.path());
    let version = async |ca: &Path| over_tls(&node, ca, "version").run().await.text();
    until("programs read over TLS", async || {
        version(&shown).await.contains("gitVersion")
    })
    .await;
    until("all is in effect", async || node.is_well().await).await;
    let plain = Tool::curl().args([format!("http://{}/version", node.at)]);
    assert!(!plain.run().await.status.success());

    let mut watch = over_tls(&node, &shown, &format!("{SLICES}?watch=true")).start();
    let event = watch.json().await;
    assert_eq!(event["object"]["metadata"]["name"], "slice-0", "{event}");
    fs::copy(&shown, &kept).unwrap();
    show(folder.path());
    until("the upstream shows another certificate", async || {
        version(&shown).await.contains("gitVersion")
    })
    .await;
    assert_eq!(version(&kept).await, "");
    spoilt(&mut node, folder.path()).await;
    write(objects.path(), "slice-0", "10.0.0.2");
    let event = watch.json().await;
    assert_eq!(
        event["object"]["endpoints"][0]["addresses"][0], "10.0.0.2",
        "{event}"
    );
}

#[tokio::test]
async fn damaged_files_are_set_aside_and_read_again() {
    need!("curl");
    let (_objects, site) = gateway(2).await;
    let reader = "{ listen: \"127.0.0.1:0\", save_every: 100ms }";
    let node = ApiCacheEdge::join(&site, "edge-1", reader).await;
    node.has(2).await;
    // An edge that stops gives up the last write to a slow disk.
    until("each resource has a file", async || {
        let folder = fs::read_dir(site.edge_data("edge-1").join("pool"));
        let files = folder.into_iter().flatten().flatten();
        let is_saved = |path: &Path| path.extension().is_some_and(|end| end == "pool");
        files.filter(|file| is_saved(&file.path())).count() == 3
    })
    .await;
    let ended = node.edge.stop().await.ok();
    assert!(!ended.stderr.contains("panicked"), "{ended:#?}");
    let mut damaged = 0;
    let mut folders = vec![site.edge_data("edge-1")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "pool") {
                let mut bytes = fs::read(&path).unwrap();
                let last = bytes.len() - 1;
                bytes[last] ^= 1;
                fs::write(&path, bytes).unwrap();
                damaged += 1;
            }
        }
    }
    assert_eq!(damaged, 3, "a file for each resource");
    let node = ApiCacheEdge::of(site.edge("edge-1", 1), reader).await;
    node.edge.wrote("checksum", 3, crate::world::PATIENCE).await;
    node.has(2).await;
}
