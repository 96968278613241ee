//! Configuration section `kubernetes.yurthub`: directs `YurtHub`s to edges of their pool.

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
        let Some(hubs) = rules.and_then(|rules| rules.yurthub.as_ref()) else {
            return;
        };
        if hubs.namespace.is_empty() {
            let message = "is empty; set the namespace of the YurtHubs, usually kube-system";
            faults.add("kubernetes.yurthub.namespace", message);
        }
        if self.api_cache.is_none() {
            let message = "YurtHubs can read nothing at the edges; add the section api_cache";
            faults.add("kubernetes.yurthub", message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_config::Validate;
    use serde_json::json;

    #[test]
    fn yurthubs_need_resources_to_read() {
        for (config, expected) in [
            (
                json!({ "kubernetes": { "yurthub": {} }, "api_cache": {} }),
                None,
            ),
            (
                json!({ "kubernetes": { "yurthub": {} } }),
                Some("kubernetes.yurthub"),
            ),
            (
                json!({ "kubernetes": { "yurthub": { "namespace": "" } }, "api_cache": {} }),
                Some("kubernetes.yurthub.namespace"),
            ),
        ] {
            let config: Config = serde_json::from_value(config).unwrap();
            let faults = config.validate();
            let found = faults
                .iter()
                .find(|fault| fault.path.starts_with("kubernetes.yurthub"));
            assert_eq!(found.map(|fault| fault.path.as_str()), expected);
        }
    }
}
