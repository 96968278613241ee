//! The cluster whose nodes a gateway is for, and what is believed of its Node objects.
//!
//! A kubelet writes its own Node object: what it says of addresses and pods counts only as far as the networks here
//! allow, and of labels the policy believes those alone that it cannot write.

mod advertise;
mod certificates;
mod coredns_hosts;
mod ports;
mod state;
mod yurthub;

use std::path::PathBuf;
use std::time::Duration;

use causeway_config::{ConfigErrors, DurationStr, IpNetList};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::Config;

pub use advertise::{AdvertisedService, DiscoveredEndpoints};
pub use certificates::CsrSigning;
pub use coredns_hosts::{CoreDnsHosts, HostsFormat};
pub use ports::{NodePorts, PortList};
pub use yurthub::YurtHub;

/// A cluster's API, from which the gateway learns the nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Kubernetes {
    /// File that says how to reach the API server; without it the gateway is a pod of the cluster.
    pub kubeconfig: Option<PathBuf>,
    /// Labels of nodes at the edge, `KEY=VALUE`, or `KEY` for any value; a node with one of them is.
    pub edge_labels: Vec<Label>,
    /// Label whose value is the pool of a node that no token has given one; empty for none. A kubelet can write labels of its own Node, but for those of `node-restriction.kubernetes.io/`: the policy goes by this pool only where the label counts there (`policy_labels`).
    pub pool_label: String,
    /// Keys of labels of Node objects that count in the policy, beside those of `node-restriction.kubernetes.io/`, which no kubelet can write. List those that you keep kubelets from writing. What a join token says of a label holds before.
    pub policy_labels: Vec<String>,
    /// Networks in which addresses of Node objects are believed, 16 of each at most; empty is all, which a front with `direct` does not permit. A kubelet can write any address into its own.
    #[serde(with = "IpNetList")]
    pub address_networks: Vec<IpNet>,
    /// The cluster's pod networks, in which pods of edge nodes are reached by address; empty is none.
    #[serde(with = "IpNetList")]
    pub pod_networks: Vec<IpNet>,
    /// How long counts what a `SubjectAccessReview` has allowed.
    #[serde(with = "DurationStr")]
    pub review_allowed_for: Duration,
    /// How long counts what one has refused.
    #[serde(with = "DurationStr")]
    pub review_refused_for: Duration,
    /// How long counts a token that a `TokenReview` knows: so long is one taken that was withdrawn.
    #[serde(with = "DurationStr")]
    pub token_allowed_for: Duration,
    /// How long one counts for nothing that a `TokenReview` does not know.
    #[serde(with = "DurationStr")]
    pub token_refused_for: Duration,
    /// Keep a hosts file of all nodes in a `ConfigMap`, for `CoreDNS`' plugin `hosts`. Without this key: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hosts: Option<CoreDnsHosts>,
    /// Serve the node ports that a `ConfigMap` lists, as it lists them. Without this key: none but those of `fronts`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<PortList>,
    /// Tell edges where gateways are by what a Service says, beside `tunnel.advertise`, and have it in the gateway's certificates. Without this key: `tunnel.advertise` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advertise: Option<AdvertisedService>,
    /// Sign what edges ask the cluster's `certificates.k8s.io` for, in place of join tokens. Without this key: nothing is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificates: Option<CsrSigning>,
    /// Tell `YurtHub`s (`OpenYurt` v1.6.1 and later) to read at edges of their pool, where these have `reader.hubs`, by the `ConfigMap` `leader-hub-POOL`. Without this key: nothing is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hubs: Option<YurtHub>,
    /// Keep revocations of nodes and the keys of `apps.*.pin` in this Secret as well, `NAMESPACE/NAME`, which is to be there. All gateways that name it have the same, within some seconds, and a new pod has it from its start. Without this key: they are in `data_dir` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
}

impl Default for Kubernetes {
    fn default() -> Self {
        let label = |key: &str, value: &str| Label {
            key: key.to_owned(),
            value: Some(value.to_owned()),
        };
        Self {
            kubeconfig: None,
            // Ours, OpenYurt's and SuperEdge's: whoever comes from there has labelled them already.
            edge_labels: vec![
                label("causeway.io/edge", "true"),
                label("openyurt.io/is-edge-worker", "true"),
                label("superedge.io/node-edge", "enable"),
            ],
            // Who comes from OpenYurt has labelled them already.
            pool_label: "apps.openyurt.io/nodepool".to_owned(),
            policy_labels: Vec::new(),
            address_networks: Vec::new(),
            pod_networks: Vec::new(),
            // As kubelet keeps them (authorization.webhook of its configuration).
            review_allowed_for: Duration::from_mins(5),
            review_refused_for: Duration::from_secs(30),
            // As kubelet and kube-apiserver keep the first (authentication.webhook.cacheTTL).
            token_allowed_for: Duration::from_mins(2),
            token_refused_for: Duration::from_secs(10),
            hosts: None,
            ports: None,
            advertise: None,
            certificates: None,
            hubs: None,
            state: None,
        }
    }
}

/// Keys under which a kubelet can write no label of its own Node (the admission plugin `NodeRestriction`).
const RESTRICTED: &str = "node-restriction.kubernetes.io";

impl Kubernetes {
    /// Whether the policy goes by labels of Node objects with this key.
    pub fn counts_label(&self, key: &str) -> bool {
        is_restricted(key) || self.policy_labels.iter().any(|listed| listed == key)
    }
}

impl Config {
    pub(super) fn validate_cluster(&self, faults: &mut ConfigErrors) {
        let Some(rules) = &self.kubernetes else {
            return;
        };
        for (index, key) in rules.policy_labels.iter().enumerate() {
            let sound = Label::try_from(key.clone()).is_ok_and(|label| label.value.is_none());
            if !sound {
                let message = format!(
                    "\"{key}\" is no key of a label; write it without a value, such as example.com/site"
                );
                faults.add(format!("kubernetes.policy_labels[{index}]"), message);
            }
        }
        let dialling = self.fronts.iter().find(|front| !front.direct.is_empty());
        if let Some(front) = dialling.filter(|_| rules.address_networks.is_empty()) {
            let message = format!(
                "is required where a front dials itself (front \"{}\", direct): a kubelet can write any address into its Node, a Service's too; name the networks in which nodes are",
                front.name
            );
            faults.add("kubernetes.address_networks", message);
        }
    }
}

/// Whether no kubelet can write a label of this key.
pub fn is_restricted(key: &str) -> bool {
    key.split_once('/').is_some_and(|(prefix, _)| {
        prefix
            .strip_suffix(RESTRICTED)
            .is_some_and(|sub| sub.is_empty() || sub.ends_with('.'))
    })
}

/// A label that is asked for, as Kubernetes writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Label {
    /// Its key.
    pub key: String,
    /// Its value; any will do where there is none.
    pub value: Option<String>,
}

impl TryFrom<String> for Label {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (text.as_str(), None),
        };
        let fits = |part: &str| {
            let plain = |each: char| each.is_ascii_alphanumeric() || "-_./".contains(each);
            part.len() <= 317 && part.chars().all(plain)
        };
        if key.is_empty() || !fits(key) || !value.as_deref().is_none_or(fits) {
            return Err(format!(
                "\"{text}\" is no label; write KEY=VALUE or KEY, such as causeway.io/edge=true"
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_goes_by_labels_that_no_kubelet_can_write_and_by_listed_ones() {
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
            assert_eq!(rules.counts_label(key), counts, "{key}");
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
            assert!(fault.contains("is no label"), "{text}");
        }
    }
}
