//! The configuration of `causeway redirect`: typed, with a default and a reason for each number.
//!
//! Doc comments here are what a user reads, as those of the gateway's.

use crate::config::{
    Kubernetes, Label,
    redirect::{check_table, reached},
};
use causeway_config::{
    Fault, Faults, HumanAddress, HumanDuration, HumanNetworks, Listeners, Log, Validate, host_port,
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

/// The configuration of `causeway redirect`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Node ports that are led away, and for each the `host:port` of gateways' fronts, which are tried in turn.
    pub ports: BTreeMap<u16, Vec<String>>,
    /// The `host:port` of gateways' `tcp` fronts to which all TCP to pods of nodes at the edge is led, whatever its port, tried in turn. Empty is none.
    pub pods: Vec<String>,
    /// Where the kernel leads callers: loopback is for IPv4 callers on this host alone, `[::]:PORT` for IPv6 and for those whose packets pass through it, too.
    #[serde(with = "HumanAddress")]
    pub listen: SocketAddr,
    /// The cluster whose nodes these are.
    pub kubernetes: Cluster,
    /// Name of the nftables table (family inet) of the rules, which is this process's alone.
    pub table: String,
    /// Health and metrics.
    pub admin: Admin,
    /// What is passed on at most.
    pub limits: Limits,
    /// How long is waited at most.
    pub timeouts: Timeouts,
    /// The log.
    pub log: Log,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            ports: BTreeMap::new(),
            pods: Vec::new(),
            listen: SocketAddr::from(([127, 0, 0, 1], 10267)),
            kubernetes: Cluster::default(),
            // A gateway's as well: two that redirect on one host would be one too many.
            table: "causeway".to_owned(),
            admin: Admin::default(),
            limits: Limits::default(),
            timeouts: Timeouts::default(),
            log: Log::default(),
        }
    }
}

impl AsRef<Log> for Config {
    fn as_ref(&self) -> &Log {
        &self.log
    }
}

/// A cluster's API, from which the addresses of nodes at the edge are learned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    /// File that says how to reach the API server; without it this is a pod of the cluster.
    pub kubeconfig: Option<PathBuf>,
    /// Labels of nodes at the edge, `KEY=VALUE`, or `KEY` for any value; a node with one of them is.
    pub edge_labels: Vec<Label>,
    /// Networks in which addresses of Node objects are believed; empty is all. A kubelet can write any address into its own.
    #[serde(with = "HumanNetworks")]
    pub address_networks: Vec<IpNet>,
    /// Networks in which pods are believed to be on the node whose object says so (`podCIDRs`); for `pods`.
    #[serde(with = "HumanNetworks")]
    pub pod_networks: Vec<IpNet>,
}

impl Default for Cluster {
    fn default() -> Self {
        let Kubernetes {
            kubeconfig,
            edge_labels,
            address_networks,
            pod_networks,
            ..
        } = Kubernetes::default();
        Self {
            kubeconfig,
            edge_labels,
            address_networks,
            pod_networks,
        }
    }
}

impl Cluster {
    /// The same, as a gateway has it that is asked for nothing else.
    pub fn rules(&self) -> Kubernetes {
        Kubernetes {
            kubeconfig: self.kubeconfig.clone(),
            edge_labels: self.edge_labels.clone(),
            address_networks: self.address_networks.clone(),
            pod_networks: self.pod_networks.clone(),
            ..Kubernetes::default()
        }
    }
}

/// The admin listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Admin {
    /// Address of health and metrics; it authenticates nobody, so keep it on loopback.
    #[serde(with = "HumanAddress")]
    pub listen: SocketAddr,
}

impl Default for Admin {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 10268)),
        }
    }
}

/// What is passed on at most; whoever comes beyond it is reset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Callers' connections.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // Two descriptors each: below the 20,000 that distributions commonly allow a service.
            connections: 8000,
        }
    }
}

/// How long is waited at most.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// Until a gateway takes a connection, all that are tried together.
    #[serde(with = "HumanDuration")]
    pub open: Duration,
    /// Until a gateway answers a client that begins a TLS handshake; then the next one is given the same. A gateway that hangs is asked last for 30 s.
    #[serde(with = "HumanDuration")]
    pub answer: Duration,
    /// What open connections get to end when this stops.
    #[serde(with = "HumanDuration")]
    pub drain: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            // As a gateway waits for an edge: kube-apiserver gives up a dial after 30 s.
            open: Duration::from_secs(10),
            // A gateway may wait 5 s for an edge (timeouts.reconnect); many clients give up a handshake after 10 s.
            answer: Duration::from_secs(6),
            // Kubernetes' default grace before it kills.
            drain: Duration::from_secs(30),
        }
    }
}

impl Validate for Config {
    fn validate(&self) -> Vec<Fault> {
        let mut faults = Faults::default();
        if self.ports.is_empty() && self.pods.is_empty() {
            faults.add(
                "ports",
                "redirects nothing; name node ports, and for each the fronts of gateways, such as { 10250: [gateway.example:10263] }",
            );
        }
        for (port, gateways) in &self.ports {
            let path = format!("ports.{port}");
            if *port == 0 {
                faults.add(&path, "0 is no node port; ports run from 1 to 65535");
            }
            if gateways.is_empty() {
                faults.add(&path, "leads nowhere; name HOST:PORT of a gateway's front");
            }
            check_gateways(&path, gateways, &mut faults);
        }
        check_gateways("pods", &self.pods, &mut faults);
        if !self.pods.is_empty() && self.kubernetes.pod_networks.is_empty() {
            faults.add(
                "pods",
                "no pod is believed to be anywhere; name the cluster's networks of pods as kubernetes.pod_networks",
            );
        }
        if !reached(self.listen) {
            let message = format!(
                "nothing is led to {}; listen on 127.0.0.1, [::1], 0.0.0.0 or [::]",
                self.listen
            );
            faults.add("listen", message);
        }
        let mut listeners = Listeners::default();
        listeners.add("listen", "listen", self.listen, &mut faults);
        listeners.add(
            "admin.listen",
            "admin.listen",
            self.admin.listen,
            &mut faults,
        );
        check_table("table", &self.table, &mut faults);
        faults.at_least_one("limits", &[("connections", self.limits.connections)]);
        let timeouts = &self.timeouts;
        faults.not_zero(
            "timeouts",
            &[
                ("open", timeouts.open),
                ("answer", timeouts.answer),
                ("drain", timeouts.drain),
            ],
        );
        faults.into_vec()
    }

    fn validate_files(&self) -> Vec<Fault> {
        let mut faults = Faults::default();
        if let Some(file) = &self.kubernetes.kubeconfig {
            faults.file("kubernetes.kubeconfig", file);
        }
        faults.into_vec()
    }
}

fn check_gateways(path: &str, gateways: &[String], faults: &mut Faults) {
    for (index, text) in gateways.iter().enumerate() {
        if let Err(message) = host_port(text) {
            faults.add(format!("{path}[{index}]"), message);
        }
    }
}
