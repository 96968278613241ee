//! A real Kubernetes for the tests: a cluster in the cloud, and two nodes behind NAT.
//!
//! The first test that needs it starts it, and it ends with the process namespace that `cage` makes. Tests run one after
//! the other; each states the flags of the API server that it needs.

pub(crate) mod assets;
pub(crate) mod cage;
pub(crate) mod causeway;
pub(crate) mod cluster;
pub(crate) mod image;
pub(crate) mod net;
pub(crate) mod node;
pub(crate) mod pki;
pub(crate) mod process;
pub(crate) mod yurthub;

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use causeway::{CausewayProcesses, Clients};
use cluster::{Cluster, Flags};
use node::Node;

use crate::steps::SilentLog;

/// The cluster and its nodes.
pub(crate) struct World {
    pub(crate) folder: PathBuf,
    pub(crate) cluster: Cluster,
    pub(crate) nodes: [Node; 2],
    road: Option<CausewayProcesses>,
    /// The silent log, with the number of the API server that it goes through.
    quiet: Option<(usize, SilentLog)>,
}

/// How the API server reaches nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    /// An egress selector that dials a unix socket.
    Unix,
    /// An egress selector that dials TCP, with certificates on both sides.
    Tcp,
    /// A unix socket again, for addresses of nodes, pods and Services, as the documentation recommends it.
    Address,
    /// The API server dials names, for which DNS returns the gateway's address.
    Names(Checks),
    /// The same, but `CoreDNS` has the names from the hosts file that the gateway writes.
    Hosts(Checks),
    /// The API server dials the nodes' own addresses, which are redirected to the gateway.
    Addresses(Checks),
}

impl Way {
    /// The folder of its example.
    pub(crate) fn example(self) -> &'static str {
        match self {
            Self::Unix | Self::Tcp | Self::Address => "egress",
            Self::Names(_) | Self::Hosts(_) => "dns",
            Self::Addresses(_) => "addresses",
        }
    }

    /// Returns the name of its gateway; a gateway of another name is configured differently.
    pub(crate) fn gateway(self) -> &'static str {
        match self {
            Self::Hosts(_) => "hosts",
            _ => self.example(),
        }
    }
}

/// Whether the API server verifies the certificates of kubelets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Checks {
    On,
    Off,
}

/// Returns the world, which the first call makes, with the pods that tests use.
pub(crate) fn world() -> MutexGuard<'static, World> {
    static WORLD: OnceLock<Mutex<World>> = OnceLock::new();
    let world = WORLD.get_or_init(|| Mutex::new(World::start()));
    // A failed test has left it usable.
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the command of the pod `ticker`: it prints a line a second, the first of which names the node.
pub(crate) fn ticker(node: &str) -> String {
    format!(
        "echo ticker on {node}; echo {node} >/tmp/node; i=0; \
         while :; do i=$((i+1)); echo $i; sleep 1; done"
    )
}

impl World {
    fn start() -> Self {
        let folder = cage::inside().expect("the tests run inside");
        let assets = assets::folder().expect("the outer program has checked");
        net::cloud();
        image::pack(&folder);
        let cluster = Cluster::start(&folder, &assets);
        let nodes = [1, 2].map(|number| Node::start(&folder, &cluster, number));
        let world = Self {
            folder,
            cluster,
            nodes,
            road: None,
            quiet: None,
        };
        world.furnish();
        world
    }

    /// In each node's namespace, `a` and `b`, pods of the same names.
    fn furnish(&self) {
        for node in &self.nodes {
            let name = &node.name;
            process::until("the kubelet has made its Node", || {
                self.cluster.get(&format!("node {name}")).is_some()
            });
            self.cluster
                .wait("default", &format!("node/{name}"), "Ready");
            self.cluster.gives_pods(name, &node.pods);
        }
        for (namespace, node) in ["a", "b"].into_iter().zip(&self.nodes) {
            let cluster = &self.cluster;
            let name = &node.name;
            cluster.pod(namespace, "ticker", name, &ticker(name));
            let echo = format!(
                "echo {name} >/tmp/node; mkdir /tmp/www; cp /tmp/node /tmp/www/index.html; httpd -p 8080 -h /tmp/www; exec cat"
            );
            cluster.pod(namespace, "echo", name, &echo);
            let silent = format!(
                "echo {name} >/tmp/node; mkfifo /tmp/say; echo first; while :; do cat /tmp/say; done"
            );
            cluster.pod(namespace, "silent", name, &silent);
        }
        for namespace in ["a", "b"] {
            // Early: after each restart of the API server, its backoff for endpoints takes longer.
            let expose = format!("expose -n {namespace} pod echo --port=80 --target-port=8080");
            self.cluster.kubectl(&expose).run().ok();
            for pod in ["ticker", "echo", "silent"] {
                self.cluster.wait(namespace, &format!("pod/{pod}"), "Ready");
            }
        }
    }

    /// Lets the API server reach nodes in this setup: a gateway in the cloud, and an edge on each node.
    pub(crate) fn by(&mut self, way: Way) {
        self.lets_in(way, Clients::Server);
    }

    /// The same, for a test that starts gateway and edges itself.
    pub(crate) fn lets_in(&mut self, way: Way, clients: Clients) {
        let road = if let Some(road) = &mut self.road {
            road.serves(way, clients, &self.cluster);
            road
        } else {
            let road =
                CausewayProcesses::start(&self.folder, &self.cluster, &self.nodes, (way, clients));
            self.road.insert(road)
        };
        let egress = road.egress(way);
        let flags = match way {
            Way::Unix | Way::Tcp | Way::Address => Flags {
                egress,
                authority: Some(self.cluster.pki.path("ca.pem").into()),
                addresses: if way == Way::Address {
                    "InternalIP"
                } else {
                    "Hostname"
                },
                ..Flags::default()
            },
            Way::Names(checks) | Way::Hosts(checks) => Flags {
                egress,
                authority: road.authority(checks, &self.cluster),
                addresses: "Hostname",
                resolver: Some(road.resolver(way)),
                ..Flags::default()
            },
            Way::Addresses(checks) => Flags {
                egress,
                authority: road.authority(checks, &self.cluster),
                addresses: "InternalIP",
                ..Flags::default()
            },
        };
        self.cluster.with(flags);
        let begun = self.cluster.started;
        if self.quiet.as_ref().is_none_or(|(then, _)| *then != begun) {
            self.quiet = Some((begun, SilentLog::begin(self)));
        }
    }

    /// Changes the gateway of this setup. The next test finds the original.
    pub(crate) fn otherwise(&mut self, way: Way, change: impl Fn(String) -> String) {
        let road = self.road.as_mut().expect("`by` comes first");
        road.otherwise(way, &self.cluster, change);
    }

    /// The log that is followed since the API server was started for this setup.
    pub(crate) fn quiet(&mut self) -> SilentLog {
        self.quiet.take().expect("`by` comes first").1
    }

    /// The gateway and its edges.
    pub(crate) fn road(&mut self) -> &mut CausewayProcesses {
        self.road.as_mut().expect("`by` comes first")
    }

    /// The same, for a test that changes nothing of it.
    pub(crate) fn the_road(&self) -> &CausewayProcesses {
        self.road.as_ref().expect("`by` comes first")
    }

    /// Starts the edge of a node again.
    pub(crate) fn rejoin(&mut self, number: usize) {
        let road = self.road.as_mut().expect("`by` comes first");
        road.join(&self.nodes, number, None);
    }

    /// A file of the world's.
    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.folder.join(name)
    }
}
