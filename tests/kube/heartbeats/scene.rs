//! Gateways, the edges of a pool, and the controller that judges nodes.
//!
//! The pool has three members in a network that they share: two nodes with kubelets, and one without. A fourth node, in the cloud,
//! is always ready, so that the controller never takes the failure of a pool for that of the whole cluster. The gateways have the
//! rights of `deploy/components/heartbeats` and of `examples/api-cache`, and no others.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};

use super::{
    api::Api,
    light::{Light, health},
};
use crate::{
    nodes,
    world::{
        World,
        causeway::BINARY,
        cluster::Flags,
        net::{CLOUD, Site, neighbours},
        process::{PATIENCE, Process, Program, until, within},
    },
};

/// The pool, which is a zone of the cluster as well.
pub(super) const POOL: &str = "north";
/// Ports of the tunnels and of the admin listener of each gateway.
const GATEWAYS: [(u16, u16); 2] = [(12262, 12265), (12362, 12365)];
const EDGE_ADMIN: u16 = 12266;
/// The nodes without a kubelet: a member of the pool, and the node of the cloud.
pub(super) const THIRD: &str = "edge-3";
const CLOUD_NODE: &str = "cloud-1";

/// The running parts.
pub(super) struct Scene {
    pub(super) api: Api,
    pub(super) folder: PathBuf,
    pub(super) light: Light,
    gateways: Vec<Option<Process>>,
    edges: Vec<Process>,
    _health: Process,
    _controllers: Process,
}

/// Settings of a scene.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    pub(super) name: &'static str,
    pub(super) gateways: usize,
    /// Whether the gateways manage taints, which another controller does otherwise.
    pub(super) taint: bool,
    /// Offset of the clock of the member without a kubelet.
    pub(super) clock: SignedDuration,
}

impl Setup {
    pub(super) fn new(name: &'static str) -> Self {
        Self {
            name,
            gateways: 1,
            taint: true,
            clock: SignedDuration::ZERO,
        }
    }
}

/// The site of the member without a kubelet. The first call connects all members.
fn third(world: &World) -> &'static Site {
    static THIRD: OnceLock<Site> = OnceLock::new();
    THIRD.get_or_init(|| {
        let site = Site::new(3);
        let [one, two] = &world.nodes;
        let at = |number| member_address(number);
        neighbours(
            "field",
            &[(&one.site, at(0)), (&two.site, at(1)), (&site, at(2))],
        );
        site
    })
}

/// The site of a member by its number, from 0.
pub(super) fn site(world: &World, number: usize) -> &Site {
    world
        .nodes
        .get(number)
        .map_or_else(|| third(world), |node| &node.site)
}

/// The address of a member in the network of the pool.
pub(super) fn member_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 2, 0, u8::try_from(number + 1).unwrap())
}

pub(super) fn member_name(number: usize) -> String {
    format!("edge-{}", number + 1)
}

impl Scene {
    pub(super) fn start(world: &mut World, setup: Setup) -> Self {
        audited(world);
        let world = &*world;
        let folder = world.path(setup.name);
        fs::create_dir_all(&folder).unwrap();
        let api = Api::new(&world.cluster);
        let light = Light::start(&api);
        third(world);
        light.add(world, &[THIRD.to_owned()], Some(POOL), setup.clock);
        light.add(world, &[CLOUD_NODE.to_owned()], None, SignedDuration::ZERO);
        let cloud = format!(
            "label --overwrite node {CLOUD_NODE} openyurt.io/is-edge-worker=false causeway.io/edge-"
        );
        world.cluster.kubectl(&cloud).run().ok();
        for number in 0..3 {
            let line = format!(
                "label --overwrite node {} apps.openyurt.io/nodepool={POOL} topology.kubernetes.io/zone={POOL}",
                member_name(number)
            );
            world.cluster.kubectl(&line).run().ok();
        }
        // A failed test has left links cut.
        for number in 0..3 {
            let site = site(world, number);
            site.mend();
            site.at("ip").words("route flush type blackhole").run().ok();
        }
        rights(world);
        let mut scene = Self {
            _health: health(third(world), &folder),
            _controllers: world.cluster.node_lifecycle(&folder),
            gateways: Vec::new(),
            edges: Vec::new(),
            api,
            folder,
            light,
        };
        for number in 0..setup.gateways {
            let gateway = scene.gateway(world, setup, number);
            scene.gateways.push(Some(gateway));
        }
        for number in 0..3 {
            let edge = scene.edge(world, setup.gateways, number);
            scene.edges.push(edge);
        }
        for number in 0..3 {
            until("all members know each other", || {
                let status = Self::status(world, number);
                let members = status["api_cache"]["members"].as_array();
                members.is_some_and(|members| members.len() == 3)
                    && status["heartbeat"]["kubelet"] == "alive"
            });
            // The API server makes the namespace of Leases some time after its start.
            let lease = format!("lease -n kube-node-lease {}", member_name(number));
            let found = within(2 * PATIENCE, || world.cluster.get(&lease).is_some());
            assert!(found, "{} has no Lease", member_name(number));
        }
        scene
    }

    fn gateway(&self, world: &World, setup: Setup, number: usize) -> Process {
        let folder = self.folder.join(format!("gateway-{number}"));
        let data = folder.join("data");
        if number > 0 {
            fs::create_dir_all(&data).unwrap();
            for file in ["ca.json", "tickets.key"] {
                let first = self.folder.join("gateway-0/data").join(file);
                fs::copy(first, data.join(file)).unwrap();
            }
        } else {
            fs::create_dir_all(&folder).unwrap();
        }
        let (tunnel, admin) = GATEWAYS[number];
        let config = json!({
            "data_dir": data,
            "tunnel": {
                "listen": format!("{CLOUD}:{tunnel}"), "advertise": [format!("{CLOUD}:{tunnel}")],
            },
            "admin": { "listen": format!("127.0.0.1:{admin}") },
            "kubernetes": {
                "kubeconfig": world.cluster.account("api-cache"),
                "heartbeats": { "enabled": true, "taint": setup.taint },
            },
            "api_cache": { "resources": ["v1/services"] },
            "timeouts": { "edges": "0s" },
            "listeners": [{
                "name": "it", "protocol": "connect",
                "listen": format!("unix:{}", folder.join("it.sock").display()),
            }],
        });
        nodes::started(&folder, &config.to_string())
    }

    fn edge(&self, world: &World, gateways: usize, number: usize) -> Process {
        let at = format!("{}:12271", member_address(number));
        let ports = [12270, EDGE_ADMIN];
        let config = self.edge_config(gateways, &member_name(number), &at, ports);
        self.joins(site(world, number), &member_name(number), &config)
    }

    /// Configuration of an edge that serves other members at this address.
    pub(super) fn edge_config(
        &self,
        gateways: usize,
        name: &str,
        at: &str,
        [reading, admin]: [u16; 2],
    ) -> Value {
        let known = GATEWAYS.iter().take(gateways);
        let known: Vec<String> = known
            .map(|(tunnel, _)| format!("{CLOUD}:{tunnel}"))
            .collect();
        json!({
            "data_dir": self.folder.join(name).join("data"),
            "gateways": known,
            "tunnels": { "gateways": if gateways > 1 { "every" } else { "one" } },
            "admin": { "listen": format!("127.0.0.1:{admin}") },
            "api_cache": {
                "listen": format!("127.0.0.1:{reading}"), "resources": ["v1/services"],
                "members": { "listen": at, "addresses": [at] },
            },
            "heartbeat": {},
        })
    }

    /// Starts an edge in the network of this site.
    pub(super) fn joins(&self, site: &Site, name: &str, config: &Value) -> Process {
        let mut edge = self.joining(site, name, config);
        edge.says("tunnel registered");
        edge
    }

    /// The same, without waiting for its tunnel.
    pub(super) fn joining(&self, site: &Site, name: &str, config: &Value) -> Process {
        let create = format!("token create --node {name} --data-dir");
        let create = Program::new(BINARY).words(&create);
        let token = create.args([self.folder.join("gateway-0/data")]).run();
        let own = self.folder.join(name);
        fs::create_dir_all(&own).unwrap();
        let file = own.join("edge.yaml");
        fs::write(&file, config.to_string()).unwrap();
        let edge = site.at(BINARY).words("edge --config").args([file]);
        let edge = edge.env("CAUSEWAY_JOIN", token.ok().text().trim());
        edge.start(&own.join("edge.log"))
    }

    pub(super) fn status(world: &World, number: usize) -> Value {
        let url = format!("http://127.0.0.1:{EDGE_ADMIN}/status");
        let asked = site(world, number)
            .at("curl")
            .words("-q -sS")
            .args([url])
            .run();
        serde_json::from_slice(&asked.stdout).unwrap_or_default()
    }

    /// Cuts the uplink of a member.
    pub(super) fn cut(&self, world: &World, number: usize) {
        site(world, number).cut();
        if number == 2 {
            self.light.pause(&[THIRD.to_owned()]);
        }
    }

    /// Restores the uplink of a member.
    pub(super) fn mend(&self, world: &World, number: usize) {
        site(world, number).mend();
        if number == 2 {
            self.light.resume(&[THIRD.to_owned()], SignedDuration::ZERO);
        }
    }

    /// Returns the value of a metric of a gateway, 0 if it does not run.
    pub(super) fn metric(&self, gateway: usize, name: &str) -> u64 {
        if self.gateways.get(gateway).is_none_or(Option::is_none) {
            return 0;
        }
        let (_, admin) = GATEWAYS[gateway];
        let ask = Program::new("curl").words(&format!("-q -sS http://127.0.0.1:{admin}/metrics"));
        nodes::number(&ask.run().text(), name)
    }

    /// Returns the number of delegated heartbeats with this result, at all gateways.
    pub(super) fn beats(&self, result: &str) -> u64 {
        let name = format!("causeway_gateway_delegated_heartbeats_total{{result=\"{result}\"}} ");
        (0..self.gateways.len())
            .map(|gateway| self.metric(gateway, &name))
            .sum()
    }

    /// Returns the number of the gateway that manages delegated nodes.
    pub(super) fn leader(&self) -> usize {
        let name = "causeway_gateway_delegated_nodes_leading ";
        let mut leader = None;
        until("a gateway manages delegated nodes", || {
            let mut all = 0..self.gateways.len();
            leader = all.find(|gateway| self.metric(*gateway, name) == 1);
            leader.is_some()
        });
        leader.unwrap()
    }

    /// Ends a gateway at once.
    pub(super) fn gateway_dies(&mut self, number: usize) {
        self.gateways[number] = None;
    }

    /// Returns the audit log of the requests of gateways, as verb, resource, and name.
    pub(super) fn requests(world: &World) -> Vec<String> {
        let log = fs::read_to_string(policy(world).with_extension("log")).unwrap();
        let line = |line: &str| {
            let event: Value = serde_json::from_str(line).ok()?;
            let object = &event["objectRef"];
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let part = text(&object["subresource"]);
            let resource = text(&object["resource"]);
            let resource = if part.is_empty() {
                resource
            } else {
                format!("{resource}/{part}")
            };
            let code = &event["responseStatus"]["code"];
            Some(format!(
                "{} {resource} {} {code}",
                text(&event["verb"]),
                text(&object["name"])
            ))
        };
        log.lines().filter_map(line).collect()
    }
}

fn policy(world: &World) -> PathBuf {
    world.path("audit.yaml")
}

/// Lets the API server log the requests of gateways about Leases and Nodes.
fn audited(world: &mut World) {
    let rules = json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
        "rules": [
            {
                "level": "Metadata", "users": ["system:serviceaccount:kube-system:causeway-gateway"],
                "verbs": ["get", "update", "patch", "create", "delete"],
                "resources": [
                    { "group": "", "resources": ["nodes", "nodes/status"] },
                    { "group": "coordination.k8s.io", "resources": ["leases"] },
                ],
            },
            { "level": "None" },
        ],
    });
    let policy = policy(world);
    fs::write(&policy, rules.to_string()).unwrap();
    world.cluster.with(Flags {
        authority: Some(world.cluster.pki.path("ca.pem").into()),
        addresses: "Hostname",
        audit: Some(policy),
        ..Flags::default()
    });
}

fn rights(world: &World) {
    let rights =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/components/heartbeats/rbac.yaml");
    let rights = fs::read_to_string(rights).unwrap();
    let rights = rights.replace("namespace: causeway }", "namespace: kube-system }");
    let apply = world.cluster.kubectl("apply -f -");
    apply.input(rights).run().ok();
}
