//! Configuration section `kubernetes`: the cluster whose nodes a gateway serves, and how far it trusts their Node objects.
//!
//! A kubelet writes its own Node object. The gateway trusts the addresses and pods in it only within the networks that are
//! configured here. The policy trusts only labels that the kubelet cannot write.
//!
//! Node ports (`ports`) that a `ConfigMap` lists are updated while the gateway runs.
//! A listed port gets its own listener, because a pod does not see the original destination. The listener is otherwise a copy of
//! the listener named for its protocol. If the named listener does see the original destination, the port is redirected to it
//! instead. Ports in the configuration file take precedence. A `connect` listener serves listed ports without another listener;
//! they are only announced to edges.

mod certificates;
mod coredns_hosts;

use super::listener::{Listener, ListenerProtocol};
use causeway_config::{ConfigErrors, DurationStr, IpNetList, ListenAddr};
pub use certificates::CsrSigning;
use coredns_hosts::check_names;
pub(super) use coredns_hosts::is_namespaced_name;
pub use coredns_hosts::{CoreDnsHosts, HostsFormat};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, path::PathBuf, time::Duration};

/// A cluster's API, from which the gateway learns the nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Kubernetes {
    /// Kubeconfig file for the API server. Without this key the gateway is a pod of the cluster.
    pub kubeconfig: Option<PathBuf>,
    /// Labels of edge nodes, `KEY=VALUE`, or `KEY` for any value. A node with one of these labels is an edge node.
    pub edge_labels: Vec<Label>,
    /// Label whose value is the pool of a node whose pool no token has set; empty for none. A kubelet can write labels of its own Node, except those of `node-restriction.kubernetes.io/`. The policy uses this pool only if it trusts the label (`policy_labels`).
    pub pool_label: String,
    /// Keys of labels of Node objects that the policy trusts, beside those of `node-restriction.kubernetes.io/`, which no kubelet can write. List only labels that you keep kubelets from writing. A label in a join token takes precedence.
    pub policy_labels: Vec<String>,
    /// Networks in which addresses of Node objects are trusted, 16 addresses of each Node at most. Empty is all, which a listener with `direct_networks` does not permit. A kubelet can write any address into its own Node.
    #[serde(with = "IpNetList")]
    pub address_networks: Vec<IpNet>,
    /// The cluster's pod networks, in which clients reach pods of edge nodes by address; empty is none.
    #[serde(with = "IpNetList")]
    pub pod_networks: Vec<IpNet>,
    /// Follows the cluster's Pod objects, which then say which node has a pod, for networks of pods that are not those of `spec.podCIDRs` (Calico, Cilium). Pods also have names, `POD.NAMESPACE.pod`. Requires `pod_networks`, and the right to list and watch pods. Without this key: the networks in `spec.podCIDRs` of Node objects say which node has a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pods: Option<PodObjects>,
    /// Cache TTL of allowed `SubjectAccessReview`s.
    #[serde(with = "DurationStr")]
    pub review_allowed_for: Duration,
    /// Cache TTL of refused `SubjectAccessReview`s.
    #[serde(with = "DurationStr")]
    pub review_refused_for: Duration,
    /// Cache TTL of tokens that a `TokenReview` has accepted. A withdrawn token is accepted for this long.
    #[serde(with = "DurationStr")]
    pub token_allowed_for: Duration,
    /// Cache TTL of tokens that a `TokenReview` has refused.
    #[serde(with = "DurationStr")]
    pub token_refused_for: Duration,
    /// Writes a hosts file of all nodes into a `ConfigMap`, for the plugin `hosts` of `CoreDNS`. Without this key: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hosts: Option<CoreDnsHosts>,
    /// Serves the node ports that a `ConfigMap` lists, and follows its changes. Without this key: only those of `listeners`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<PortList>,
    /// Announces to edges the gateway addresses that a Service has, beside `tunnel.advertise`, and adds them to the gateway's certificates. Without this key: `tunnel.advertise` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advertise: Option<AdvertisedService>,
    /// Signs certificate requests of edges in the cluster's `certificates.k8s.io`, in place of join tokens. Without this key: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificates: Option<CsrSigning>,
    /// Directs `YurtHub`s (`OpenYurt` v1.6.1 and later) to edges of their pool that have `api_cache.yurthub`, by the `ConfigMap` `leader-hub-POOL`. Without this key: nothing is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yurthub: Option<YurtHub>,
    /// Renews the Leases of nodes that have lost their gateways, while another member of their pool reports that their kubelet is alive.
    pub heartbeats: Heartbeats,
    /// Shares all durable state with the other gateways that name the same `NAMESPACE/NAME`: nodes and their enrolments, revocations, join tokens, the keys of `upstream_tls.*.pin`, and the CA. The state is in 16 Secrets, `NAME` and `NAME-1` to `NAME-15`, and in that of `ca_secret`, which must exist (`examples/state/rbac.yaml`). A change is at the other gateways about a second later, and a new pod has the state from its start. Without this key: the state is in `data_dir` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Name of the Secret with the CA of `state`, in the same namespace. `causeway k8s ca-secret` makes it. A gateway that has a CA stores it in an empty Secret.
    pub ca_secret: String,
}

impl Default for Kubernetes {
    fn default() -> Self {
        let label = |key: &str, value: &str| Label {
            key: key.to_owned(),
            value: Some(value.to_owned()),
        };
        Self {
            kubeconfig: None,
            // The labels of Causeway, OpenYurt and SuperEdge. Users of these systems have already labelled their nodes.
            edge_labels: vec![
                label("causeway.io/edge", "true"),
                label("openyurt.io/is-edge-worker", "true"),
                label("superedge.io/node-edge", "enable"),
            ],
            // Users of OpenYurt have already labelled their nodes.
            pool_label: "apps.openyurt.io/nodepool".to_owned(),
            policy_labels: Vec::new(),
            address_networks: Vec::new(),
            pod_networks: Vec::new(),
            pods: None,
            // The defaults of kubelet (authorization.webhook of its configuration).
            review_allowed_for: Duration::from_mins(5),
            review_refused_for: Duration::from_secs(30),
            // The first value is the default of kubelet and kube-apiserver (authentication.webhook.cacheTTL).
            token_allowed_for: Duration::from_mins(2),
            token_refused_for: Duration::from_secs(10),
            hosts: None,
            ports: None,
            advertise: None,
            certificates: None,
            yurthub: None,
            heartbeats: Heartbeats::default(),
            state: None,
            ca_secret: "causeway-ca".to_owned(),
        }
    }
}

/// Pod objects of the cluster, which say which node has a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PodObjects {
    /// Maximum number of pods with addresses of their own, about 350 bytes of memory each, and twice that while the list is read again. In a cluster with more pods, no pod is reached.
    pub max_pods: usize,
}

impl Default for PodObjects {
    fn default() -> Self {
        // More than Kubernetes supports in one cluster (150,000).
        Self { max_pods: 200_000 }
    }
}

impl PodObjects {
    pub(in crate::config) fn validate(&self, networks: &[IpNet], faults: &mut ConfigErrors) {
        if networks.is_empty() {
            let message = "no address of a pod is trusted; set kubernetes.pod_networks";
            faults.add("kubernetes.pods", message);
        }
        if self.max_pods == 0 {
            faults.add("kubernetes.pods.max_pods", "must be at least 1");
        }
    }
}

/// The Service through which edges reach the gateways.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AdvertisedService {
    /// The Service, `NAMESPACE/NAME`. Its annotation `causeway.io/advertise` (`host:port,…`) takes precedence over its load balancer's addresses (`LoadBalancer`), or its port of each cloud node (`NodePort`).
    pub service: String,
    /// Name of the Service's port for tunnels, if it has several ports.
    pub port: String,
}

impl Default for AdvertisedService {
    fn default() -> Self {
        Self {
            service: "causeway/causeway-tunnels".to_owned(),
            port: "tunnels".to_owned(),
        }
    }
}

impl AdvertisedService {
    /// Returns the namespace and name of the Service.
    pub fn names(&self) -> (&str, &str) {
        self.service.split_once('/').unwrap_or_default()
    }
}

/// Gateway addresses of a Service, and the number of gateways behind it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscoveredEndpoints {
    /// The `host:port` at which edges reach the gateways.
    pub addresses: Vec<String>,
    /// Number of gateways, if it can be determined.
    pub replicas: Option<u32>,
}

/// `ConfigMap` `leader-hub-POOL` of `OpenYurt` v1.6.1 and later, which gateways maintain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct YurtHub {
    /// Namespace in which `YurtHub`s look for the `ConfigMap` (their `--namespace`).
    pub namespace: String,
}

impl Default for YurtHub {
    fn default() -> Self {
        Self {
            namespace: "kube-system".to_owned(),
        }
    }
}

impl YurtHub {
    pub(super) fn validate(&self, has_api_cache: bool, faults: &mut ConfigErrors) {
        if self.namespace.is_empty() {
            let message = "is empty; set the namespace of the YurtHubs, usually kube-system";
            faults.add("kubernetes.yurthub.namespace", message);
        }
        if !has_api_cache {
            let message = "YurtHubs can read nothing at the edges; add the section api_cache";
            faults.add("kubernetes.yurthub", message);
        }
    }
}

/// Prefix of label keys that a kubelet cannot write on its own Node (the admission plugin `NodeRestriction`).
const RESTRICTED_PREFIX: &str = "node-restriction.kubernetes.io";

impl Kubernetes {
    /// Checks that the Secret with the CA is none of the Secrets with the other entries of the state.
    pub(super) fn validate_ca_secret(&self, faults: &mut ConfigErrors) {
        check_names("kubernetes", [("ca_secret", Some(&self.ca_secret))], faults);
        let state = self
            .state
            .as_deref()
            .and_then(|state| state.split_once('/'));
        let rest = state.and_then(|(_, name)| self.ca_secret.strip_prefix(name));
        let is_number = |text: &str| text.parse::<u8>().is_ok_and(|number| number < 16);
        let is_entries =
            |rest: &str| rest.is_empty() || rest.strip_prefix('-').is_some_and(is_number);
        if rest.is_some_and(is_entries) {
            let message = "is one of the 16 Secrets of kubernetes.state; use another name";
            faults.add("kubernetes.ca_secret", message);
        }
    }

    /// Whether the policy trusts labels of Node objects with this key.
    pub fn trusts_label(&self, key: &str) -> bool {
        is_restricted(key) || self.policy_labels.iter().any(|listed| listed == key)
    }
}

/// Whether no kubelet can write a label with this key.
pub fn is_restricted(key: &str) -> bool {
    key.split_once('/').is_some_and(|(prefix, _)| {
        prefix
            .strip_suffix(RESTRICTED_PREFIX)
            .is_some_and(|sub| sub.is_empty() || sub.ends_with('.'))
    })
}

/// Required label, in the notation of Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Label {
    /// Key of the label.
    pub key: String,
    /// Value of the label; `None` matches any value.
    pub value: Option<String>,
}

impl TryFrom<String> for Label {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (text.as_str(), None),
        };
        let is_label_part = |part: &str| {
            let plain = |each: char| each.is_ascii_alphanumeric() || "-_./".contains(each);
            part.len() <= 317 && part.chars().all(plain)
        };
        if key.is_empty() || !is_label_part(key) || !value.as_deref().is_none_or(is_label_part) {
            return Err(format!(
                "\"{text}\" is not a valid label; write KEY=VALUE or KEY, such as causeway.io/edge=true"
            ));
        }
        Ok(Self {
            key: key.to_owned(),
            value,
        })
    }
}

impl From<Label> for String {
    fn from(label: Label) -> Self {
        match label.value {
            Some(value) => format!("{}={value}", label.key),
            None => label.key,
        }
    }
}

/// Renewal of the Leases of nodes that have lost their gateways and whose kubelet is alive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Heartbeats {
    /// Renews the Leases in `kube-node-lease` of nodes whose edges have a `heartbeat` section. Requires `api_cache`: edges learn the members of their pools with it.
    pub enabled: bool,
    /// Taints such nodes with `node.openyurt.io/unschedulable=true:NoSchedule`, and keeps their condition `Ready`. Set this to `false` if yurt-manager's delegate-lease controller (v1.6.1 and earlier) does it.
    pub taint: bool,
    /// Number of successive delegated heartbeats after which a node is tainted.
    pub threshold: u32,
    /// Namespace of the Lease `causeway-heartbeats`, which selects the one gateway that manages taints, conditions and the return of nodes.
    pub namespace: String,
}

impl Default for Heartbeats {
    fn default() -> Self {
        Self {
            enabled: false,
            taint: true,
            // As OpenYurt's controller: about 40 s.
            threshold: 4,
            namespace: "kube-system".to_owned(),
        }
    }
}

impl Heartbeats {
    /// Checks these keys. `has_api_cache` is whether edges may read the API cache.
    pub(in crate::config) fn validate(&self, has_api_cache: bool, faults: &mut ConfigErrors) {
        if self.enabled && !has_api_cache {
            let message = "edges learn the members of their pools with the API cache, and without it there is no delegate; add the section \"api_cache\"";
            faults.add("kubernetes.heartbeats.enabled", message);
        }
        if self.threshold == 0 {
            faults.add("kubernetes.heartbeats.threshold", "must be at least 1");
        }
        let names = [("namespace", Some(&self.namespace))];
        check_names("kubernetes.heartbeats", names, faults);
    }
}

/// Node ports that a `ConfigMap` of the cluster lists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PortList {
    /// Namespace of the `ConfigMap` and of the Service.
    pub namespace: String,
    /// Name of the `ConfigMap`, with the keys of OpenYurt's `yurt-tunnel-server-cfg`: `http-proxy-ports`, `https-proxy-ports`, `localhost-proxy-ports`.
    pub name: String,
    /// The `https` listener that is the template for `https-proxy-ports`. The entry of `upstream_tls` for its own port gives the TLS files for these upstreams.
    pub https: Option<String>,
    /// The `http` listener that is the template for `http-proxy-ports`.
    pub http: Option<String>,
    /// Service that gets a port for each of these ports. Without this key the gateway changes no Service.
    pub service: Option<String>,
}

impl Default for PortList {
    fn default() -> Self {
        Self {
            namespace: "kube-system".to_owned(),
            name: "causeway-ports".to_owned(),
            https: None,
            http: None,
            service: None,
        }
    }
}

/// Node ports that a `ConfigMap` lists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct NodePorts {
    /// Ports of upstreams that speak HTTP without TLS.
    pub http: BTreeSet<u16>,
    /// Ports of upstreams that speak TLS.
    pub https: BTreeSet<u16>,
    /// Ports that edges dial on loopback, without a listener at the gateway.
    pub loopback: BTreeSet<u16>,
}

impl NodePorts {
    /// Returns the ports with a listener.
    pub fn served(&self) -> impl Iterator<Item = u16> {
        self.http.iter().chain(&self.https).copied()
    }
}

impl PortList {
    /// Returns the listeners that this section names, by key.
    pub(in crate::config) fn listeners(
        &self,
    ) -> impl Iterator<Item = (&'static str, ListenerProtocol, &str)> {
        let named = [
            ("https", ListenerProtocol::Https, self.https.as_deref()),
            ("http", ListenerProtocol::Http, self.http.as_deref()),
        ];
        named
            .into_iter()
            .filter_map(|(key, kind, name)| Some((key, kind, name?)))
    }

    pub(in crate::config) fn validate(&self, listeners: &[Listener], faults: &mut ConfigErrors) {
        let names = [
            ("namespace", Some(&self.namespace)),
            ("name", Some(&self.name)),
            ("service", self.service.as_ref()),
        ];
        check_names("kubernetes.ports", names, faults);
        let is_connect = |listener: &Listener| listener.protocol == ListenerProtocol::Connect;
        if self.listeners().next().is_none() && !listeners.iter().any(is_connect) {
            let message = "lists ports but no listener; set \"http\" or \"https\" to a listener, or remove this key";
            faults.add("kubernetes.ports", message);
        }
        for (key, protocol, name) in self.listeners() {
            let path = format!("kubernetes.ports.{key}");
            match listeners.iter().find(|listener| listener.name == name) {
                None => faults.add(path, format!("there is no listener \"{name}\"")),
                Some(listener) if listener.protocol != protocol => {
                    let message = format!(
                        "listener \"{name}\" does not have the protocol {}",
                        protocol.as_str()
                    );
                    faults.add(path, message);
                }
                Some(listener) if matches!(listener.listen, ListenAddr::Unix(_)) => {
                    let message =
                        format!("listener \"{name}\" does not listen on an IP address and port");
                    faults.add(path, message);
                }
                Some(listener) if !listener.node_keys().is_empty() => {
                    let message = format!("listener \"{name}\" serves only certain nodes");
                    faults.add(path, message);
                }
                Some(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use causeway_config::Validate;
    use serde_json::{Value, json};

    #[test]
    fn the_policy_uses_protected_and_listed_labels_only() {
        let rules = Kubernetes {
            policy_labels: vec!["site".to_owned(), "example.com/tier".to_owned()],
            ..Kubernetes::default()
        };
        for (key, counts) in [
            ("node-restriction.kubernetes.io/tier", true),
            ("example.com.node-restriction.kubernetes.io/tier", true),
            ("site", true),
            ("example.com/tier", true),
            ("tier", false),
            ("evil-node-restriction.kubernetes.io/tier", false),
            ("node-restriction.kubernetes.io.evil/tier", false),
            ("node-restriction.kubernetes.io", false),
            ("kubernetes.io/hostname", false),
            ("causeway.io/edge", false),
        ] {
            assert_eq!(rules.trusts_label(key), counts, "{key}");
        }
    }

    #[test]
    fn a_label_is_a_key_with_or_without_a_value() {
        for text in ["causeway.io/edge=true", "edge", "edge="] {
            let label = Label::try_from(text.to_owned()).unwrap();
            assert_eq!(String::from(label), text);
        }
        for text in ["", "=true", "edge==x", "ed ge=1", "edge=a,b"] {
            let fault = Label::try_from(text.to_owned()).unwrap_err();
            assert!(fault.contains("is not a valid label"), "{text}");
        }
    }

    #[test]
    fn pod_objects_need_networks_of_pods_and_room() {
        for (pods, networks, part) in [
            (json!({}), json!(["10.244.0.0/16"]), None),
            (json!({}), json!([]), Some("set kubernetes.pod_networks")),
            (
                json!({ "max_pods": 0 }),
                json!(["10.244.0.0/16"]),
                Some("kubernetes.pods.max_pods"),
            ),
        ] {
            let config = json!({ "kubernetes": { "pods": pods, "pod_networks": networks } });
            let config: Config = serde_json::from_value(config).unwrap();
            let faults: Vec<String> = config.validate().iter().map(ToString::to_string).collect();
            let expected = usize::from(part.is_some());
            assert_eq!(faults.len(), expected, "{pods} {faults:?}");
            assert!(
                faults
                    .iter()
                    .all(|fault| fault.contains(part.unwrap_or_default())),
                "{faults:?}"
            );
        }
    }

    #[test]
    fn the_ca_has_a_secret_of_its_own() {
        for (state, ca, part) in [
            ("a/causeway-state", "causeway-ca", None),
            ("a/causeway-state", "causeway-state-ca", None),
            ("a/causeway-state", "causeway-state-16", None),
            ("a/causeway-state", "causeway-state", Some("one of the 16")),
            (
                "a/causeway-state",
                "causeway-state-15",
                Some("one of the 16"),
            ),
            ("a/causeway-state", "a/causeway-ca", Some("not a valid")),
        ] {
            let config = json!({ "kubernetes": { "state": state, "ca_secret": ca } });
            let config: Config = serde_json::from_value(config).unwrap();
            let faults: Vec<String> = config.validate().iter().map(ToString::to_string).collect();
            assert_eq!(faults.len(), usize::from(part.is_some()), "{ca} {faults:?}");
            let is_expected = |fault: &String| fault.contains(part.unwrap_or_default());
            assert!(faults.iter().all(is_expected), "{ca} {faults:?}");
        }
    }

    fn faults(heartbeats: &Value, api_cache: &Value) -> Vec<String> {
        let config = json!({
            "kubernetes": { "heartbeats": heartbeats },
            "api_cache": api_cache,
        });
        let config: Config = serde_json::from_value(config).unwrap();
        let faults = config.validate().into_iter();
        faults.map(|fault| fault.to_string()).collect()
    }

    #[test]
    fn delegated_heartbeats_need_the_api_cache() {
        let (on, none) = (json!({ "enabled": true }), Vec::<String>::new());
        assert_eq!(faults(&on, &json!({})), none);
        assert_eq!(faults(&json!({}), &json!(null)), none);
        for (heartbeats, api_cache, part) in [
            (on, json!(null), "there is no delegate"),
            (json!({ "threshold": 0 }), json!({}), "at least 1"),
            (
                json!({ "namespace": "A" }),
                json!({}),
                "kubernetes.heartbeats.namespace",
            ),
        ] {
            let faults = faults(&heartbeats, &api_cache);
            assert!(
                faults.len() == 1 && faults[0].contains(part),
                "{heartbeats}: {faults:#?}"
            );
        }
    }
}
