//! A site with its own Kubernetes behind NAT: kubectl in the cloud reaches its kube-apiserver through any of three edges.
//!
//! The gateway has one `tcp` listener for the site's node pool. The TLS of kubectl passes through to the kube-apiserver, whose
//! certificate and client certificates it uses unchanged.

use std::{fs, net::IpAddr, path::PathBuf};

use libtest_mimic::Trial;
use serde_json::json;

use crate::{
    trial,
    world::{
        World,
        causeway::BINARY,
        net::{CLOUD, Site},
        pki::Pki,
        process::{Process, Program, ToolOutput, until},
        world,
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial(
        "site_api::kubectl_reaches_the_site_while_one_edge_is_left",
        kubectl_reaches_the_site_while_one_edge_is_left,
    )]
}

/// Number of the site's network.
const NUMBER: u8 = 9;
const EDGES: usize = 3;
/// Ports of the gateway.
const TUNNEL: u16 = 12262;
const LISTENER: u16 = 12643;
const ADMIN: u16 = 12265;

/// A site's network, its control plane, and a gateway in the cloud.
struct SiteCluster {
    folder: PathBuf,
    assets: PathBuf,
    pki: Pki,
    site: Site,
    api: Option<Process>,
    edges: [Option<Process>; EDGES],
    _etcd: Process,
    _gateway: Process,
}

impl SiteCluster {
    fn start(world: &World) -> Self {
        let folder = world.path("site-api");
        fs::create_dir_all(&folder).unwrap();
        let assets = world.cluster.assets.clone();
        let site = Site::new(NUMBER);
        let pki = Pki::new(&folder.join("pki"));
        // kubectl uses the listener's address, and the health check the site's.
        let addresses = [IpAddr::from([127, 0, 0, 1]), site.address()];
        pki.server("apiserver", &["kubernetes"], &addresses);
        pki.client("admin", "admin", Some("system:masters"));
        pki.kubeconfig("admin", &format!("https://127.0.0.1:{LISTENER}"));
        let etcd = site
            .at(assets.join("etcd"))
            .args([format!("--data-dir={}", folder.join("etcd").display())])
            .words("--unsafe-no-fsync --log-level=warn")
            .start(&folder.join("etcd.log"));
        let gateway = gateway(&folder);
        let mut cluster = Self {
            folder,
            assets,
            pki,
            site,
            api: None,
            edges: [const { None }; EDGES],
            _etcd: etcd,
            _gateway: gateway,
        };
        cluster.start_api();
        for number in 0..EDGES {
            let create = format!("token create --pool site --node site-{number}");
            let token = cluster.causeway(&create).run().ok().text();
            cluster.start_edge(number, Some(token.trim()));
        }
        cluster
    }

    /// A command beside the gateway.
    fn causeway(&self, line: &str) -> Program {
        let causeway = Program::new(BINARY).words(line);
        causeway.env("CAUSEWAY_DATA_DIR", self.folder.join("gateway"))
    }

    fn start_api(&mut self) {
        let (path, address) = (|name| self.pki.path(name), self.site.address());
        let api = self.site.at(self.assets.join("kube-apiserver"));
        let api = api
            .words("--etcd-servers=http://127.0.0.1:2379 --secure-port=6443")
            .words("--authorization-mode=RBAC --service-cluster-ip-range=10.96.0.0/16")
            .words("--service-account-issuer=https://kubernetes.default.svc")
            .args([
                format!("--bind-address={address}"),
                format!("--advertise-address={address}"),
                format!("--tls-cert-file={}", path("apiserver.pem")),
                format!("--tls-private-key-file={}", path("apiserver.key")),
                format!("--client-ca-file={}", path("ca.pem")),
                format!("--service-account-key-file={}", path("sa.pub")),
                format!("--service-account-signing-key-file={}", path("sa.key")),
            ]);
        self.api = Some(api.start(&self.folder.join("api.log")));
    }

    /// Starts an edge in the site's network. Each stands for a node of its own.
    fn start_edge(&mut self, number: usize, token: Option<&str>) {
        let name = format!("site-{number}");
        let (file, address) = (
            self.folder.join(format!("{name}.yaml")),
            self.site.address(),
        );
        let config = json!({
            "node": name, "gateways": [format!("{CLOUD}:{TUNNEL}")],
            "data_dir": self.folder.join(&name),
            "admin": { "listen": format!("127.0.0.1:{}", 12266 + number) },
            "allow": { "hosts": [address.to_string()] },
            "ports": { "6443": {
                "target": format!("{address}:6443"), "scheme": "https", "ca": self.pki.path("ca.pem"),
                "health_check": { "path": "/readyz", "interval": "200ms", "unhealthy_threshold": 2 },
            } },
        });
        fs::write(&file, config.to_string()).unwrap();
        let mut edge = self.site.at(BINARY).words("edge --config").args([&file]);
        if let Some(token) = token {
            edge = edge.env("CAUSEWAY_JOIN", token);
        }
        let mut edge = edge.start(&self.folder.join(format!("{name}.log")));
        edge.says("tunnel registered");
        self.edges[number] = Some(edge);
    }

    /// Runs kubectl in the cloud, through the gateway.
    fn kubectl(&self, line: &str) -> ToolOutput {
        let config = format!("--kubeconfig={}", self.pki.path("admin.kubeconfig"));
        let kubectl = Program::new(self.assets.join("kubectl")).args([config]);
        let kubectl = kubectl.words("--request-timeout=20s").words(line);
        kubectl.env("HOME", &self.folder).run()
    }

    fn status(&self) -> String {
        self.causeway("status").run().ok().text()
    }
}

fn gateway(folder: &std::path::Path) -> Process {
    let causeway = || Program::new(BINARY).env("CAUSEWAY_DATA_DIR", folder.join("gateway"));
    causeway().words("ca init").run().ok();
    let config = json!({
        "tunnel": { "listen": format!("{CLOUD}:{TUNNEL}") },
        "admin": { "listen": format!("127.0.0.1:{ADMIN}") },
        "timeouts": { "reconnect": "0s" },
        "listeners": [{
            "name": "site-api", "protocol": "tcp", "listen": format!("127.0.0.1:{LISTENER}"),
            "pool": "site", "port": 6443, "anonymous": true,
        }],
    });
    let file = folder.join("gateway.yaml");
    fs::write(&file, config.to_string()).unwrap();
    let gateway = causeway().words("gateway --config").args([&file]);
    let mut gateway = gateway.start(&folder.join("gateway.log"));
    gateway.says("gateway ready");
    gateway
}

fn kubectl_reaches_the_site_while_one_edge_is_left() {
    let world = world();
    let mut cluster = SiteCluster::start(&world);
    until("the site's API is ready through the gateway", || {
        cluster.kubectl("get --raw /readyz").code == Some(0)
    });
    until("the health checks of all edges succeed", || {
        !cluster.status().contains("unhealthy")
    });
    let make = |cluster: &SiteCluster, name: &str| {
        let create = format!("create configmap {name} --from-literal=by={name}");
        cluster.kubectl(&create).ok();
        let read = format!("get configmap {name} -o jsonpath={{.data.by}}");
        assert_eq!(cluster.kubectl(&read).ok().text(), name);
    };
    make(&cluster, "three");
    drop(cluster.edges[0].take());
    make(&cluster, "two");
    drop(cluster.edges[2].take());
    for _ in 0..5 {
        make(&cluster, "one");
        cluster.kubectl("delete configmap one").ok();
    }
    drop(cluster.edges[1].take());
    cluster.kubectl("get configmaps").failed();
    cluster.start_edge(0, None);
    make(&cluster, "again");

    cluster.api = None;
    until("the gateway knows that the API is away", || {
        cluster
            .status()
            .contains("unhealthy: the health check fails at site-0, port 6443")
    });
    cluster.start_api();
    until("the site is back", || {
        cluster.kubectl("get --raw /readyz").code == Some(0)
    });
    make(&cluster, "back");
}
