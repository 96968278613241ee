//! Health check of a port's upstream.

use causeway_config::DurationStr;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Maximum number of ports with a health check, which limits the messages to gateways.
pub(crate) const MAX_HEALTH_CHECKS: usize = causeway_tunnel::wire::MAX_UNHEALTHY_PORTS;

/// Minimum interval of a health check: gateways tell each other the results.
pub(crate) const MIN_HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// Health check of the upstream. While it fails, listeners for sets of nodes (`nodes`, `pool`, `node_selector` of the gateway) do not select this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HealthCheck {
    /// Path of a GET request to an upstream with the scheme `http` or `https`. A status from 200 to 399 counts as success. If absent, a connection counts as success (with `https`, its TLS handshake).
    pub path: Option<String>,
    /// Time between the end of one check and the begin of the next, at least `1s`.
    #[serde(with = "DurationStr")]
    pub interval: Duration,
    /// Maximum duration of a check.
    #[serde(with = "DurationStr")]
    pub timeout: Duration,
    /// Failures in succession after which the upstream is unhealthy.
    pub unhealthy_threshold: u32,
    /// Successes in succession after which an unhealthy upstream is healthy. The first check after the start counts at once.
    pub healthy_threshold: u32,
}

impl Default for HealthCheck {
    fn default() -> Self {
        Self {
            path: None,
            // With three failures, clients avoid a dead upstream after 15 s. Sooner, they find out by themselves.
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(2),
            // The defaults of Kubernetes' readiness probes.
            unhealthy_threshold: 3,
            healthy_threshold: 1,
        }
    }
}
