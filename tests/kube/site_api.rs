//! A site with its own Kubernetes behind NAT: kubectl in the cloud reaches its kube-apiserver through any of three edges.
//!
//! The edges are on three machines of the site's network, each with its own uplink; the control plane is on the first. The gateway
//! has one `tcp` listener for the site's node pool. The TLS of kubectl passes through to the kube-apiserver, whose certificate and
//! client certificates it uses unchanged.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
};

use libtest_mimic::Trial;
use serde_json::json;

use crate::{
    trial,
    world::{
        World,
        causeway::BINARY,
        net::{self, CLOUD, Site},
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

/// Numbers of the uplinks of the site's machines.
const UPLINKS: [u8; 3] = [9, 10, 11];
/// Address of the control plane in the site's network.
const API: Ipv4Addr = Ipv4Addr::new(10, 3, 0, 1);
/// Ports of the gateway.
const TUNNEL: u16 = 12262;
const LISTENER: u16 = 12643;
const ADMIN: u16 = 12265;

/// A site's network, its control plane, and a gateway in the cloud.
struct SiteCluster {
    folder: PathBuf,
    assets: PathBuf,
    pki: Pki,
    machines: [Site; UPLINKS.len()],
    api: Option<Process>,
    edges: [Option<Process>; UPLINKS.len()],
    _etcd: Process,
    _gateway: Process,
}

impl SiteCluster {
    fn start(world: &World) -> Self {
        let folder = world.path("site-api");
        fs::create_dir_all(&folder).unwrap();
        let assets = world.cluster.assets.clone();
        let machines = UPLINKS.map(Site::new);
        let [first, second, third] = &machines;
        let at = |number| Ipv4Addr::new(10, 3, 0, number);
        net::neighbours("shop", &[(first, API), (second, at(2)), (third, at(3))]);
        let pki = Pki::new(&folder.join("pki"));
        // kubectl uses the listener's address, and the health check the site's.
        let addresses = [Ipv4Addr::LOCALHOST, API].map(IpAddr::V4);
        pki.server("apiserver", &["kubernetes"], &addresses);
        pki.client("admin", "admin", Some("system:masters"));
        pki.kubeconfig("admin", &format!("https://127.0.0.1:{LISTENER}"));
        let etcd = first
            .at(assets.join("etcd"))
            .args([format!("--data-dir={}", folder.join("etcd").display())])
            .words("--unsafe-no-fsync --log-level=warn")
            .start(&folder.join("etcd.log"));
        let gateway = gateway(&folder);
        let mut cluster = Self {
            folder,
            assets,
            pki,
            machines,
            api: None,
            edges: [const { None }; UPLINKS.len()],
            _etcd: etcd,
            _gateway: gateway,
        };
        cluster.start_api();
        for number in 0..UPLINKS.len() {
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
        let path = |name| self.pki.path(name);
        let api = self.machines[0].at(self.assets.join("kube-apiserver"));
        let api = api
            .words("--etcd-servers=http://127.0.0.1:2379 --secure-port=6443")
            .words("--authorization-mode=RBAC --service-cluster-ip-range=10.96.0.0/16")
            .words("--service-account-issuer=https://kubernetes.default.svc")
            .args([
                format!("--bind-address={API}"),
                format!("--advertise-address={API}"),
                format!("--tls-cert-file={}", path("apiserver.pem")),
                format!("--tls-private-key-file={}", path("apiserver.key")),
                format!("--client-ca-file={}", path("ca.pem")),
                format!("--service-account-key-file={}", path("sa.pub")),
                format!("--service-account-signing-key-file={}", path("sa.key")),
            ]);
        self.api = Some(api.start(&self.folder.join("api.log")));
    }

    /// Starts the edge of a machine.
    fn start_edge(&mut self, number: usize, token: Option<&str>) {
        let name = format!("site-{number}");
        let file = self.folder.join(format!("{name}.yaml"));
        let config = json!({
            "node": name, "gateways": [format!("{CLOUD}:{TUNNEL}")],
            "data_dir": self.folder.join(&name),
            "admin": { "listen": format!("127.0.0.1:{}", 12266 + number) },
            "allow": { "hosts": [API.to_string()] },
            "ports": { "6443": {
                "target": format!("{API}:6443"), "scheme": "https", "ca": self.pki.path("ca.pem"),
                "health_check": { "path": "/readyz", "interval": "1s", "unhealthy_threshold": 2 },
            } },
        });
        fs::write(&file, config.to_string()).unwrap();
        let mut edge = self.machines[number]
            .at(BINARY)
            .words("edge --config")
            .args([&file]);
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
    // A connection that is cut says nothing: the gateway notices it by the missing heartbeats.
    cluster.machines[2].cut();
    until("the gateway has noticed that the uplink is cut", || {
        cluster.status().matches(" connected ").count() == 1
    });
    for _ in 0..5 {
        make(&cluster, "one");
        cluster.kubectl("delete configmap one").ok();
    }
    drop(cluster.edges[1].take());
    until("the last edge has left", || {
        !cluster.status().contains(" connected ")
    });
    cluster.kubectl("get configmaps").failed();
    cluster.start_edge(0, None);
    make(&cluster, "again");
    cluster.machines[2].mend();

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
