//! Configuration section `kubernetes.state`: a Secret with the state of gateways that outlives their pods.

use causeway_config::ConfigErrors;

use super::coredns_hosts::is_name;
use crate::config::Config;

impl Config {
    pub(in crate::config) fn validate_state(&self, faults: &mut ConfigErrors) {
        let rules = self.kubernetes.as_ref();
        let Some(secret) = rules.and_then(|rules| rules.state.as_deref()) else {
            return;
        };
        let parts = secret.split_once('/');
        if !parts.is_some_and(|(namespace, name)| is_name(namespace) && is_name(name)) {
            let message = format!("\"{secret}\" is not a valid Secret name; write NAMESPACE/NAME");
            faults.add("kubernetes.state", message);
        }
    }
}
