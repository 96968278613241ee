//! Configuration section `kubernetes.advertise`: a Service of the cluster gives the addresses at which edges reach gateways.
//!
//! Addresses of the configuration itself remain, after those of the Service.

use causeway_config::ConfigErrors;
use serde::{Deserialize, Serialize};

use super::coredns_hosts::is_name;
use crate::config::Config;

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

impl Config {
    /// Returns this configuration with the endpoints that the cluster gives.
    #[must_use]
    pub fn advertising(mut self, found: &DiscoveredEndpoints) -> Self {
        let rules = self.kubernetes.as_ref();
        if rules.is_some_and(|rules| rules.advertise.is_some()) {
            let own = std::mem::take(&mut self.tunnel.advertise);
            let all = &mut self.tunnel.advertise;
            for each in found.addresses.iter().cloned().chain(own) {
                if !all.contains(&each) {
                    all.push(each);
                }
            }
            // A number that the user sets explicitly is intended.
            self.tunnel.replicas = self.tunnel.replicas.or(found.replicas);
        }
        self
    }

    pub(in crate::config) fn validate_advertise(&self, faults: &mut ConfigErrors) {
        let rules = self.kubernetes.as_ref();
        let Some(rules) = rules.and_then(|rules| rules.advertise.as_ref()) else {
            return;
        };
        let (namespace, name) = rules.names();
        if !is_name(namespace) || !is_name(name) {
            let message = format!(
                "\"{}\" is not a valid Service name; write NAMESPACE/NAME",
                rules.service
            );
            faults.add("kubernetes.advertise.service", message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_config::Validate;
    use serde_json::json;

    fn config(advertise: &serde_json::Value) -> Config {
        let config = json!({
            "kubernetes": { "advertise": advertise },
            "tunnel": { "advertise": ["gw.example.com:10262"] },
        });
        serde_json::from_value(config).unwrap()
    }

    #[test]
    fn service_addresses_precede_configured_ones_without_duplicates() {
        let found = DiscoveredEndpoints {
            addresses: ["192.0.2.1:10262", "gw.example.com:10262"]
                .map(str::to_owned)
                .to_vec(),
            replicas: Some(3),
        };
        let with = config(&json!({})).advertising(&found);
        assert_eq!(with.tunnel.advertise, found.addresses);
        assert_eq!(with.tunnel.replicas, Some(3));
        let without = config(&json!(null)).advertising(&found);
        assert_eq!(without.tunnel.advertise, found.addresses[1..]);
        assert_eq!(without.tunnel.replicas, None);
        let mut own = config(&json!({}));
        own.tunnel.replicas = Some(2);
        assert_eq!(own.advertising(&found).tunnel.replicas, Some(2));
    }

    #[test]
    fn an_invalid_service_name_is_a_fault() {
        assert!(config(&json!({})).validate().is_empty());
        for service in ["tunnels", "a/b/c", "A/b", "/b"] {
            let said = config(&json!({ "service": service })).validate();
            let said: Vec<_> = said.iter().map(ToString::to_string).collect();
            assert!(
                said.join("").contains("NAMESPACE/NAME"),
                "{service}: {said:?}"
            );
        }
    }
}
