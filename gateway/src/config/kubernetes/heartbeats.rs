//! Configuration section `kubernetes.heartbeats`: delegated heartbeats of nodes that have lost their gateways.

use causeway_config::ConfigErrors;
use serde::{Deserialize, Serialize};

use super::coredns_hosts::check_names;

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

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use causeway_config::Validate;
    use serde_json::{Value, json};

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
