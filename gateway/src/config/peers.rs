//! Configuration section `peers`: other gateways that serve the same nodes.

use std::time::Duration;

use causeway_config::{ConfigErrors, DurationStr, host_port};
use serde::{Deserialize, Serialize};

/// Other gateways to which this gateway forwards requests for nodes that they hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Peers {
    /// Tunnel ports of the gateways, `host:port`. A host may have the addresses of all gateways, and its own address among them does not matter.
    pub addresses: Vec<String>,
    /// Interval in which hosts are resolved again, so that new gateways are found.
    #[serde(with = "DurationStr")]
    #[schemars(with = "String")]
    pub resolve_after: Duration,
}

impl Default for Peers {
    fn default() -> Self {
        Self {
            addresses: Vec::new(),
            resolve_after: Duration::from_secs(5),
        }
    }
}

impl Peers {
    pub(super) fn validate(&self, faults: &mut ConfigErrors) {
        if self.addresses.is_empty() {
            let message = "is empty; list the tunnel ports of the gateways, such as gateways.example.com:10262";
            faults.add("peers.addresses", message);
        }
        for (index, address) in self.addresses.iter().enumerate() {
            if let Err(message) = host_port(address) {
                faults.add(format!("peers.addresses[{index}]"), message);
            }
        }
        if self.resolve_after.is_zero() {
            faults.add("peers.resolve_after", "must be longer than 0s");
        }
    }
}
