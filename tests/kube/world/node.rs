//! A node at the edge: a real kubelet with a real containerd, behind NAT.
//!
//! Each has a network and mounts of its own, so that both have the usual paths of such machines, and a cgroup of its own.
//! The cloud has no route to its pods' network; pods reach the API server.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    cage,
    cluster::Cluster,
    image,
    net::{CLOUD, Site},
    process::{Process, Program, until},
};

/// Programs that `main` requires.
pub(crate) const NEEDS: [&str; 4] = ["containerd", "runc", "ctr", image::BUSYBOX];

/// Folder of the CNI plugins in Debian.
pub(crate) const PLUGINS: &str = "/usr/lib/cni";

/// Proxy through which containerd reaches registries. Only tests of images have it, and no other test needs an image of a registry.
pub(crate) const IMAGE_PROXY: &str = "http://127.0.0.1:1080";

/// A node with a running kubelet.
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) site: Site,
    /// Its pods' network.
    pub(crate) pods: String,
    branch: String,
    folder: PathBuf,
    anchor: Process,
    _containerd: Process,
    kubelet: Option<Process>,
}

/// Issuer of a kubelet's serving certificate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Serving {
    /// The cluster's CA.
    Signed,
    /// The kubelet itself, the default of kubelets.
    Own,
    /// The cluster's CA, and the kubelet agrees on HTTP/2 as those before 1.36 do.
    Http2,
    /// The same with HTTP/2 switched off.
    Http1,
}

impl Node {
    /// Starts the node with this number, from 1. It is ready some seconds later.
    pub(crate) fn start(folder: &Path, cluster: &Cluster, number: u8) -> Self {
        let mut node = Self::without_kubelet(folder, cluster, number);
        node.serves(cluster, Serving::Signed);
        node
    }

    /// Makes the node with this number, from 1, with a running containerd. Its kubelet has credentials and is not started.
    pub(crate) fn without_kubelet(folder: &Path, cluster: &Cluster, number: u8) -> Self {
        let (name, site) = (format!("edge-{number}"), Site::new(number));
        let place = folder.join(&name);
        fs::create_dir_all(&place).unwrap();
        let anchor = anchor(&place, &site);
        let at = |program: &str| at(&anchor, program);
        let pods = format!("10.244.{number}.0/24");
        let config = containerd(&place, &pods);
        fs::write(place.join("containerd.toml"), config).unwrap();
        let runtime = at("containerd")
            .args(["--config".into(), place.join("containerd.toml")])
            .env("HTTPS_PROXY", IMAGE_PROXY)
            .start(&place.join("containerd.log"));
        let archive = folder.join("image/image.tar").display().to_string();
        until("containerd takes the image", || {
            let import = at("ctr").words("-n k8s.io images import");
            import.args([&archive]).run().code == Some(0)
        });
        credentials(cluster, &name, &site);
        cgroup(folder, &name);
        let branch = format!("/{}/{name}", cage::branch(folder));
        Self {
            name,
            site,
            pods,
            branch,
            folder: place,
            anchor,
            _containerd: runtime,
            kubelet: None,
        }
    }

    /// Starts its kubelet, in place of the running one. Pods stay.
    pub(crate) fn serves(&mut self, cluster: &Cluster, serving: Serving) {
        drop(self.kubelet.take());
        let config = kubelet(cluster, (&self.name, serving), &self.branch);
        fs::write(self.path("kubelet.yaml"), config).unwrap();
        let kubelet = self
            .at(&cluster.assets.join("kubelet").display().to_string())
            .args([
                format!("--config={}", self.path("kubelet.yaml").display()),
                format!(
                    "--kubeconfig={}",
                    cluster.pki.path(&format!("{}.kubeconfig", self.name))
                ),
                format!("--hostname-override={}", self.name),
                format!("--node-ip={}", self.site.address()),
            ])
            .words("--node-labels=openyurt.io/is-edge-worker=true,causeway.io/edge=true")
            // So that a client that scrapes every 10 s always finds new figures; it needs two.
            .words("--housekeeping-interval=4s")
            .env(
                "GODEBUG",
                if serving == Serving::Http1 {
                    "http2server=0"
                } else {
                    ""
                },
            )
            .start(&self.path("kubelet.log"));
        self.kubelet = Some(kubelet);
    }

    /// Gives new pods addresses of another network. Pods that run stay.
    pub(crate) fn new_pods_from(&self, network: &str) {
        write_pod_network(&self.folder, "pool0", network);
    }

    /// Ends its kubelet. Pods stay.
    pub(crate) fn kubelet_dies(&mut self) {
        drop(self.kubelet.take());
    }

    /// The certificate that its kubelet makes, and the key, if they exist.
    pub(crate) fn own_certificate(&self) -> [PathBuf; 2] {
        ["crt", "key"].map(|end| self.path(&format!("lib/kubelet/pki/kubelet.{end}")))
    }

    /// A program to run on the node.
    pub(crate) fn at(&self, program: &str) -> Program {
        at(&self.anchor, program)
    }

    /// A file of the node's own.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

fn at(anchor: &Process, program: &str) -> Program {
    let of = anchor.id().to_string();
    Program::new("nsenter").args(["--target", &of, "--net", "--mount", program])
}

/// The process that keeps the node's namespaces.
fn anchor(place: &Path, site: &Site) -> Process {
    let script = "set -e; mount -t tmpfs tmpfs /run; \
         for over in lib log; do mkdir $0/$over; mount --bind $0/$over /var/$over; done; \
         echo ready; exec sleep 2000000000";
    let mut anchor = Program::new("nsenter")
        .args([&format!("--net={}", site.network()), "unshare", "--mount"])
        .args(["sh", "-c", script, &place.display().to_string()])
        .start(&place.join("anchor.log"));
    anchor.says("ready");
    anchor
}

fn credentials(cluster: &Cluster, name: &str, site: &Site) {
    let user = format!("system:node:{name}");
    cluster.pki.client(name, &user, Some("system:nodes"));
    let server = format!("https://{CLOUD}:6443");
    cluster.pki.kubeconfig(name, &server);
    let serving = format!("{name}-kubelet");
    cluster.pki.server(&serving, &[name], &[site.address()]);
}

/// Makes the node's cgroup, which has all of the machine's cores.
fn cgroup(folder: &Path, name: &str) {
    for hierarchy in cage::hierarchies() {
        let branch = hierarchy.join(cage::branch(folder));
        for cgroup in [branch.clone(), branch.join(name)] {
            fs::create_dir_all(&cgroup).unwrap();
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(all) = fs::read(hierarchy.join(file)) {
                    fs::write(cgroup.join(file), all).unwrap();
                }
            }
        }
    }
}

/// Writes the configuration of the network of pods. containerd reads it again when it changes.
fn write_pod_network(place: &Path, bridge: &str, network: &str) {
    let networks = place.join("cni");
    fs::create_dir_all(&networks).unwrap();
    let list = serde_json::json!({
        "cniVersion": "1.0.0", "name": "pods",
        "plugins": [{
            "type": "bridge", "bridge": bridge, "isGateway": true, "ipMasq": true,
            "ipam": {
                "type": "host-local", "ranges": [[{ "subnet": network }]],
                "routes": [{ "dst": format!("{CLOUD}/32") }],
            },
        }],
    });
    fs::write(networks.join("pods.conflist"), list.to_string()).unwrap();
}

fn containerd(place: &Path, pods: &str) -> String {
    write_pod_network(place, "cni0", pods);
    format!(
        "version = 2\n\
         [plugins.\"io.containerd.grpc.v1.cri\"]\n\
         sandbox_image = \"{}\"\n\
         disable_apparmor = true\n\
         restrict_oom_score_adj = true\n\
         [plugins.\"io.containerd.grpc.v1.cri\".cni]\n\
         bin_dir = \"{PLUGINS}\"\n\
         conf_dir = \"{}\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".registry]\n\
         config_path = \"{}\"\n",
        image::NAME,
        place.join("cni").display(),
        place.join("registries").display()
    )
}

fn kubelet(cluster: &Cluster, (name, serving): (&str, Serving), branch: &str) -> String {
    let path = |file: String| cluster.pki.path(&file);
    let signed =
        |end: &str| (serving != Serving::Own).then(|| path(format!("{name}-kubelet.{end}")));
    serde_json::json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "address": "0.0.0.0", "port": 10250, "healthzPort": 10248,
        "tlsCertFile": signed("pem"), "tlsPrivateKeyFile": signed("key"),
        "authentication": {
            "anonymous": { "enabled": false }, "webhook": { "enabled": true },
            "x509": { "clientCAFile": path("ca.pem".into()) },
        },
        "authorization": { "mode": "Webhook" },
        // While it reloads its clients' CAs, its TLS offers no protocols.
        "featureGates": { "ReloadKubeletClientCAFile": !matches!(serving, Serving::Http1 | Serving::Http2) },
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs", "cgroupRoot": branch, "failCgroupV1": false,
        "failSwapOn": false, "registerNode": true, "resolvConf": "", "oomScoreAdj": 0,
        "evictionHard": { "nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "1Mi" },
        "imageGCHighThresholdPercent": 100,
    })
    .to_string()
}
