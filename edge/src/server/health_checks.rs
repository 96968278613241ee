//! Health checks of the upstreams of this node, and their results, which tunnels report to gateways.

use super::reload::CurrentProxy;
use crate::{
    config::HealthCheck,
    control::tunnels::context::UnhealthyPorts,
    metrics::Metrics,
    proxy::{PortCheck, Proxy},
};
use futures_util::{StreamExt, stream::FuturesUnordered};
use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    future::pending,
    sync::Arc,
    time::Duration,
};
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

/// Health of one upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct UpstreamHealth {
    /// `None` until the first check has ended.
    is_healthy: Option<bool>,
    /// Number of the last results in succession that contradict `is_healthy`.
    contrary_results: u32,
    /// Whether `is_healthy` is the result of another check of the same target. The first result of this check counts at once.
    is_provisional: bool,
}

impl UpstreamHealth {
    /// Records the result of a check. Returns whether the health has changed.
    fn record(&mut self, succeeded: bool, check: &HealthCheck) -> bool {
        let is_provisional = std::mem::take(&mut self.is_provisional);
        if self.is_healthy == Some(succeeded) {
            self.contrary_results = 0;
            return false;
        }
        self.contrary_results += 1;
        let threshold = match self.is_healthy {
            // Nothing is known that a single result could contradict by accident.
            None => 1,
            Some(_) if is_provisional => 1,
            Some(true) => check.unhealthy_threshold,
            Some(false) => check.healthy_threshold,
        };
        let changes = self.contrary_results >= threshold;
        if changes {
            (self.is_healthy, self.contrary_results) = (Some(succeeded), 0);
        }
        changes
    }
}

/// Checks of the ports, and what is known of their upstreams.
type KnownHealth = BTreeMap<u16, (PortCheck, UpstreamHealth)>;

/// Runner of the health checks of the current configuration.
pub(super) struct HealthChecks {
    pub(super) current_proxy: CurrentProxy,
    pub(super) unhealthy_ports: watch::Sender<UnhealthyPorts>,
    pub(super) metrics: Arc<Metrics>,
}

impl HealthChecks {
    /// Runs the checks. Never returns.
    pub(super) async fn run(self) {
        let mut known = KnownHealth::new();
        loop {
            let proxy = self.current_proxy.load_full();
            known = with_checks(known, proxy.health_checks());
            self.publish(&known);
            tokio::select! {
                never = self.run_checks(&proxy, &mut known) => match never {},
                () = proxy.replaced().cancelled() => {}
            }
        }
    }

    async fn run_checks(&self, proxy: &Proxy, known: &mut KnownHealth) -> Infallible {
        let check_after = async |delay, port, check: HealthCheck| {
            sleep(delay).await;
            let result = proxy.check_health(port, &check).await;
            (port, check, result)
        };
        let checks = known.iter();
        let mut running: FuturesUnordered<_> = checks
            .map(|(port, (port_check, _))| {
                check_after(Duration::ZERO, *port, port_check.check.clone())
            })
            .collect();
        while let Some((port, check, result)) = running.next().await {
            if let Some((_, health)) = known.get_mut(&port)
                && health.record(result.is_ok(), &check)
            {
                match &result {
                    Ok(()) => info!(port, "the health check of an upstream succeeds"),
                    Err(why) => warn!(
                        port,
                        why,
                        "the health check of an upstream fails: gateways do not select this node in sets of nodes"
                    ),
                }
                self.publish(known);
            }
            running.push(check_after(check.interval, port, check));
        }
        pending().await
    }

    fn publish(&self, known: &KnownHealth) {
        let healthy = |health: &UpstreamHealth| health.is_healthy == Some(true);
        let unhealthy = known.iter().filter(|(_, (_, health))| !healthy(health));
        let unhealthy: BTreeSet<u16> = unhealthy.map(|(port, _)| *port).collect();
        let states = known
            .iter()
            .map(|(port, (_, health))| (*port, healthy(health)));
        self.metrics.set_upstream_health(states);
        self.unhealthy_ports.send_if_modified(|current| {
            let changes = **current != unhealthy;
            if changes {
                *current = Arc::new(unhealthy);
            }
            changes
        });
    }
}

/// Returns these checks. The health of a target stays known; if its check has changed, until the first result. The health of
/// another target is unknown, and counts as unhealthy until the first result.
fn with_checks(mut known: KnownHealth, checks: Vec<(u16, PortCheck)>) -> KnownHealth {
    let checks = checks.into_iter().map(|(port, check)| {
        let health = match known.remove(&port) {
            Some((before, health)) if before == check => health,
            Some((before, health)) if before.is_same_target(&check) => UpstreamHealth {
                contrary_results: 0,
                is_provisional: true,
                ..health
            },
            _ => UpstreamHealth::default(),
        };
        (port, (check, health))
    });
    checks.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Protocol;

    fn check() -> HealthCheck {
        HealthCheck {
            unhealthy_threshold: 3,
            healthy_threshold: 2,
            ..HealthCheck::default()
        }
    }

    #[test]
    fn health_changes_after_results_in_succession_and_at_once_at_first() {
        for (results, healthy) in [
            (&[][..], None),
            (&[true][..], Some(true)),
            (&[false][..], Some(false)),
            (&[true, false, false], Some(true)),
            (&[true, false, false, true, false, false], Some(true)),
            (&[true, false, false, false], Some(false)),
            (&[false, true], Some(false)),
            (&[false, true, false, true], Some(false)),
            (&[false, true, true], Some(true)),
        ] {
            let mut health = UpstreamHealth::default();
            for result in results {
                health.record(*result, &check());
            }
            assert_eq!(health.is_healthy, healthy, "{results:?}");
        }
    }

    #[test]
    fn a_reload_keeps_the_health_of_a_target_and_forgets_it_with_the_target() {
        let port_check = |target: &str, check: HealthCheck| PortCheck {
            check,
            target: target.parse().unwrap(),
            scheme: Protocol::Http,
        };
        let old = |port| (port, port_check("10.0.0.1:80", check()));
        let mut known = with_checks(KnownHealth::new(), (80..=83).map(old).collect());
        for (_, health) in known.values_mut() {
            health.record(true, &check());
        }
        let other = HealthCheck {
            path: Some("/readyz".to_owned()),
            ..check()
        };
        let with_scheme = PortCheck {
            scheme: Protocol::Https,
            ..old(83).1
        };
        let checks = vec![
            old(80),
            (81, port_check("10.0.0.1:80", other.clone())),
            (82, port_check("10.0.0.2:80", check())),
            (83, with_scheme),
            old(84),
        ];
        let mut known = with_checks(known, checks);
        let health = [80, 81, 82, 83, 84].map(|port| known[&port].1.is_healthy);
        assert_eq!(health, [Some(true), Some(true), None, None, None]);
        let mut record = |port: u16, check| known.get_mut(&port).unwrap().1.record(false, check);
        assert!(
            record(81, &other),
            "the first result of a changed check counts"
        );
        assert!(!record(80, &check()), "one result of three");
    }
}
