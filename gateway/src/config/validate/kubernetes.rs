//! Checks of the section `kubernetes`, and of the reviews of clients that listeners request from the cluster's API.
//!
//! A key without effect is a fault, and so is one that makes all clients wait for an answer that cannot arrive.

use causeway_config::ConfigErrors;

use crate::config::kubernetes::{Kubernetes, Label, is_namespaced_name};
use crate::config::{Config, ListenAddr, Listener};

impl Config {
    pub(super) fn validate_kubernetes(&self, faults: &mut ConfigErrors) {
        let Some(rules) = &self.kubernetes else {
            return;
        };
        self.validate_trust(rules, faults);
        if let Some(hosts) = &rules.hosts {
            hosts.validate(&self.node_name_addresses(), faults);
        }
        if let Some(yurthub) = &rules.yurthub {
            yurthub.validate(self.api_cache.is_some(), faults);
        }
        rules.heartbeats.validate(self.api_cache.is_some(), faults);
        if let Some(pods) = &rules.pods {
            pods.validate(&rules.pod_networks, faults);
        }
        if let Some(ports) = &rules.ports {
            ports.validate(&self.listeners, faults);
        }
        if let Some(certificates) = &rules.certificates {
            certificates.validate(self.tunnel.identity.is_some(), faults);
        }
        rules.validate_ca_secret(faults);
        let names = [
            (
                "advertise.service",
                "Service",
                rules.advertise.as_ref().map(|rules| &rules.service),
            ),
            ("state", "Secret", rules.state.as_ref()),
        ];
        for (key, kind, name) in names {
            if let Some(name) = name.filter(|name| !is_namespaced_name(name)) {
                let message =
                    format!("\"{name}\" is not a valid {kind} name; write NAMESPACE/NAME");
                faults.add(format!("kubernetes.{key}"), message);
            }
        }
    }

    /// Checks which contents of Node objects the gateway trusts.
    fn validate_trust(&self, rules: &Kubernetes, faults: &mut ConfigErrors) {
        for (index, key) in rules.policy_labels.iter().enumerate() {
            let is_valid = Label::try_from(key.clone()).is_ok_and(|label| label.value.is_none());
            if !is_valid {
                let message = format!(
                    "\"{key}\" is not a valid label key; write the key without a value, such as example.com/site"
                );
                faults.add(format!("kubernetes.policy_labels[{index}]"), message);
            }
        }
        let direct_listener = self
            .listeners
            .iter()
            .find(|listener| !listener.direct_networks.is_empty());
        if let Some(listener) = direct_listener.filter(|_| rules.address_networks.is_empty()) {
            let message = format!(
                "is required if a listener dials targets itself (listener \"{}\", direct_networks): a kubelet can write any address into its Node, even the address of a Service; list the networks that contain the nodes",
                listener.name
            );
            faults.add("kubernetes.address_networks", message);
        }
    }

    pub(super) fn check_reviews(&self, faults: &mut ConfigErrors) {
        if let Some(kubernetes) = &self.kubernetes {
            faults.check_not_zero(
                "kubernetes",
                &[
                    ("review_allowed_for", kubernetes.review_allowed_for),
                    ("review_refused_for", kubernetes.review_refused_for),
                    ("token_allowed_for", kubernetes.token_allowed_for),
                    ("token_refused_for", kubernetes.token_refused_for),
                ],
            );
        }
        for (index, listener) in self.listeners.iter().enumerate() {
            self.check_listener_reviews(listener, &format!("listeners[{index}]"), faults);
        }
    }

    fn check_listener_reviews(&self, listener: &Listener, path: &str, faults: &mut ConfigErrors) {
        let (token, access) = (
            format!("{path}.client_auth.token_review"),
            format!("{path}.subject_access_review"),
        );
        let tokens = listener.client_auth.token_review.as_ref();
        for (key, given) in [
            (&token, tokens.is_some()),
            (&access, !listener.subject_access_review.is_empty()),
        ] {
            if given && self.kubernetes.is_none() {
                let message = "needs the API of a cluster; add the section \"kubernetes\"";
                faults.add(key.as_str(), message);
            }
        }
        if tokens.is_some() && listener.protocol.is_opaque() {
            let message = "a plain TCP connection cannot carry a token; use client_auth.client_ca";
            faults.add(token.as_str(), message);
        }
        if tokens.is_some() && matches!(listener.listen, ListenAddr::Unix(_)) {
            let message = "clients of a Unix socket are identified by the kernel and send no token; remove this key";
            faults.add(token.as_str(), message);
        }
        let audiences = tokens.map_or(&[][..], |review| &review.audiences);
        if let Some(empty) = audiences.iter().position(String::is_empty) {
            let message = "is empty; write an audience, or remove the key to use the audience of the API server";
            faults.add(format!("{token}.audiences[{empty}]"), message);
        }
        if let Some(zero) = listener
            .subject_access_review
            .iter()
            .position(|port| *port == 0)
        {
            let message = "0 is not a valid node port; use a port from 1 to 65535";
            faults.add(format!("{access}[{zero}]"), message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_config::Validate;
    use serde_json::json;

    #[test]
    fn an_invalid_service_name_is_a_fault() {
        let faults = |advertise| {
            let config = json!({ "kubernetes": { "advertise": advertise } });
            let config: Config = serde_json::from_value(config).unwrap();
            config.validate()
        };
        assert!(faults(json!({})).is_empty());
        for service in ["tunnels", "a/b/c", "A/b", "/b"] {
            let text = faults(json!({ "service": service }));
            let text: Vec<_> = text.iter().map(ToString::to_string).collect();
            assert!(
                text.join("").contains("NAMESPACE/NAME"),
                "{service}: {text:?}"
            );
        }
    }

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
