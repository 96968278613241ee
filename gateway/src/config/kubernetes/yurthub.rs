//! Configuration section `kubernetes.hubs`: directs `YurtHub`s to edges of their pool.

use causeway_config::ConfigErrors;
use serde::{Deserialize, Serialize};

use crate::config::Config;

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

impl Config {
    pub(in crate::config) fn validate_hubs(&self, faults: &mut ConfigErrors) {
        let rules = self.kubernetes.as_ref();
        let Some(hubs) = rules.and_then(|rules| rules.hubs.as_ref()) else {
            return;
        };
        if hubs.namespace.is_empty() {
            let message = "is empty; name the namespace of the hubs, kube-system with most";
            faults.add("kubernetes.hubs.namespace", message);
        }
        if self.readers.is_none() {
            let message = "there is nothing that hubs could read at edges; add the section readers";
            faults.add("kubernetes.hubs", message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_config::Validate;
    use serde_json::json;

    #[test]
    fn hubs_need_something_to_read() {
        for (config, expected) in [
            (json!({ "kubernetes": { "hubs": {} }, "readers": {} }), None),
            (
                json!({ "kubernetes": { "hubs": {} } }),
                Some("kubernetes.hubs"),
            ),
            (
                json!({ "kubernetes": { "hubs": { "namespace": "" } }, "readers": {} }),
                Some("kubernetes.hubs.namespace"),
            ),
        ] {
            let config: Config = serde_json::from_value(config).unwrap();
            let faults = config.validate();
            let found = faults
                .iter()
                .find(|fault| fault.path.starts_with("kubernetes.hubs"));
            assert_eq!(found.map(|fault| fault.path.as_str()), expected);
        }
    }
}
