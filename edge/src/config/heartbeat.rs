//! Configuration of delegated heartbeats: a node that has lost its gateways has another member of its pool report that its
//! kubelet is alive.

use causeway_config::{ConfigErrors, DurationStr, SocketAddrStr};
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, time::Duration};

/// Interval of the health checks of the kubelet.
pub(crate) const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// Delegated heartbeats over the listener for pool members (`api_cache.members`). Gateways accept them with `kubernetes.heartbeats.enabled`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Heartbeat {
    /// Address of the kubelet's health check, which is asked for `/healthz` over HTTP (`healthzBindAddress` and `healthzPort` of the kubelet's configuration).
    #[serde(with = "SocketAddrStr")]
    pub kubelet: SocketAddr,
    /// Time for which a successful health check of the kubelet counts. At least 5 s, which is the interval of the checks. No heartbeat is sent after this time, or after two failed checks in succession.
    #[serde(with = "DurationStr")]
    pub alive_for: Duration,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self {
            // The kubelet's own default.
            kubelet: SocketAddr::from(([127, 0, 0, 1], 10248)),
            // Two checks.
            alive_for: Duration::from_secs(10),
        }
    }
}

impl Heartbeat {
    /// Checks these keys. `has_members` is whether this node has a listener for pool members.
    pub(super) fn validate(&self, has_members: bool, faults: &mut ConfigErrors) {
        if !has_members {
            let message = "heartbeats are delegated to other members of the pool over the listener for pool members, which is not configured, so there is no delegate; add api_cache.members";
            faults.add("heartbeat", message);
        }
        if self.alive_for < PROBE_INTERVAL {
            let message = format!(
                "must be at least {PROBE_INTERVAL:?}, because the kubelet is checked every {PROBE_INTERVAL:?}"
            );
            faults.add("heartbeat.alive_for", message);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use causeway_config::Validate;
    use serde_json::{Value, json};

    fn faults(heartbeat: &Value, members: bool) -> Vec<String> {
        let site = json!({ "listen": "10.1.0.5:10271", "addresses": ["10.1.0.5:10271"] });
        let api_cache = if members {
            json!({ "members": site })
        } else {
            json!({})
        };
        let config = json!({ "heartbeat": heartbeat, "api_cache": api_cache });
        let config: Config = serde_json::from_value(config).unwrap();
        let faults = config.validate().into_iter();
        faults
            .map(|fault| format!("{}: {}", fault.path, fault.message))
            .collect()
    }

    #[test]
    fn heartbeats_need_the_listener_for_pool_members() {
        assert_eq!(faults(&json!({}), true), Vec::<String>::new());
        let without = faults(&json!({}), false);
        assert!(
            without.len() == 1 && without[0].contains("there is no delegate"),
            "{without:#?}"
        );
        let short = faults(&json!({ "alive_for": "4s" }), true);
        assert!(
            short.len() == 1 && short[0].starts_with("heartbeat.alive_for"),
            "{short:#?}"
        );
    }
}
