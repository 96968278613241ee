//! Discovery of the gateways' addresses from a Service, for edges and for the gateway's certificates.
//!
//! 1. `addresses` reads the addresses of the Service: its annotation, else the address from its load balancer, else its port of
//!    each node of the cloud.
//! 2. `replicas` counts the gateways behind it. Edges are to find all of them.
//! 3. The gateway applies both as it applies a changed configuration.
//! 4. A Service that has no addresses, or loses them, changes nothing: edges keep their known addresses, and the log states the
//!    reason.
//!
//! Never ends the process.

use crate::{client::watch_error_message, log_throttle::LogThrottle, replicas};
use causeway_gateway::{
    config::{self, DiscoveredEndpoints, ReloadSender},
    control::drain::ReadinessBlock,
    state::NodesWriter,
};
use causeway_rt::backoff::Backoff;
use causeway_tunnel::target::Target;
use futures_util::{StreamExt, TryStreamExt, future::OptionFuture};
use k8s_openapi::api::core::v1::{Service, ServicePort};
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher::watch_object},
};
use std::{convert::Infallible, net::IpAddr, pin::pin, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

/// Annotation by which the owner of the Service states addresses that its status does not have.
const ADVERTISE_ANNOTATION: &str = "causeway.io/advertise";
/// Maximum pauses between attempts: while the API does not respond, and while it refuses.
const BACKOFF_RANGE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(1));
/// Maximum number of addresses that edges accept.
const MAX_ADDRESSES: usize = 64;

/// Controller that synchronizes the addresses that edges receive with a Service.
pub(crate) struct ServiceWatcher {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the Service.
    pub settings: config::AdvertisedService,
    /// Channel by which the gateway's configuration receives the addresses.
    pub discovered: watch::Sender<DiscoveredEndpoints>,
    /// Sender of the reload request that applies them.
    pub reload_sender: ReloadSender,
    /// The table of nodes.
    pub nodes: NodesWriter,
    /// Block on readiness while there is no other source of the gateway's address.
    pub readiness_block: Option<ReadinessBlock>,
}

impl ServiceWatcher {
    /// Runs the controller. Never returns.
    pub(crate) async fn run(mut self) -> Infallible {
        let (namespace, name) = self.settings.names();
        let api = Api::<Service>::namespaced(self.client.clone(), namespace);
        let updates = watch_object(api, name).default_backoff();
        let mut updates = pin!(updates.map_err(|error| watch_error_message(&error)));
        let mut replica_counts =
            replicas::watch_replica_count(self.client.clone(), namespace, name);
        let mut changes = self.nodes.subscribe();
        let mut backoff = Backoff::new(BACKOFF_RANGE.0, BACKOFF_RANGE.1);
        let mut watch_log = LogThrottle::new("watching the Service of the tunnels");
        let mut discovery_log =
            LogThrottle::new("finding the addresses at which edges reach this gateway");
        let mut count_log =
            LogThrottle::new("counting the gateways behind the Service of the tunnels");
        let (mut service, mut count) = (None, None);
        loop {
            let retry_at = match self.reconcile(service.as_ref(), count).await {
                Ok(()) => {
                    backoff.reset();
                    discovery_log.log_recovery();
                    None
                }
                Err(why) => {
                    discovery_log.log_failure(&why);
                    if let Some(block) = &self.readiness_block {
                        block.set_reason(why);
                    }
                    Some(Instant::now() + backoff.refused(None, rand::random()))
                }
            };
            tokio::select! {
                Some(now) = updates.next() => handle_service_update(now, &mut service, &mut watch_log),
                Some(now) = replica_counts.next() => match now {
                    Ok(now) => {
                        count_log.log_recovery();
                        count = now;
                    }
                    Err(why) => count_log.log_failure(&why),
                },
                Ok(()) = changes.changed() => {}
                Some(()) = OptionFuture::from(retry_at.map(sleep_until)) => {}
            }
        }
    }

    /// Has the gateway apply the addresses of the Service, once they are known, and the number of its replicas.
    async fn reconcile(
        &mut self,
        service: Option<&ServiceState>,
        count: Option<u32>,
    ) -> Result<(), String> {
        let advertised = service
            .map(|service| self.discover_addresses(service))
            .transpose();
        let previous = self.discovered.borrow().clone();
        let new_addresses = advertised.clone().ok().flatten();
        let endpoints = DiscoveredEndpoints {
            addresses: new_addresses.unwrap_or_else(|| previous.addresses.clone()),
            replicas: count,
        };
        if endpoints != previous {
            self.apply_endpoints(endpoints, previous).await?;
        }
        if advertised?.is_some() {
            self.readiness_block = None;
        }
        Ok(())
    }

    /// Returns the addresses at which edges reach the gateways, from this Service; or the reason why there are none.
    fn discover_addresses(&self, service: &ServiceState) -> Result<Vec<String>, String> {
        let nodes = self.nodes.reader().external_addresses();
        let found = service.as_ref().map_err(|why| (*why).to_owned());
        let found =
            found.and_then(|service| service_addresses(service, &self.settings.port, &nodes));
        found.map_err(|why| format!("Service {}: {why}", self.settings.service))
    }

    async fn apply_endpoints(
        &self,
        endpoints: DiscoveredEndpoints,
        previous: DiscoveredEndpoints,
    ) -> Result<(), String> {
        let DiscoveredEndpoints {
            addresses,
            replicas,
        } = &endpoints;
        let (addresses, replicas) = (addresses.clone(), *replicas);
        self.discovered.send_replace(endpoints);
        match self.reload_sender.request_reload().await {
            Some(Ok(done)) => {
                tracing::info!(
                    ?addresses,
                    replicas,
                    done,
                    "the Service sets the addresses at which edges reach this gateway"
                );
                Ok(())
            }
            outcome => {
                self.discovered.send_replace(previous);
                let shutting_down = || "the gateway is shutting down".to_owned();
                Err(outcome.and_then(Result::err).unwrap_or_else(shutting_down))
            }
        }
    }
}

/// The Service, or that there is none.
type ServiceState = Result<Service, &'static str>;

fn handle_service_update(
    update: Result<Option<Service>, String>,
    service: &mut Option<ServiceState>,
    watch_log: &mut LogThrottle,
) {
    match update {
        Ok(now) => {
            watch_log.log_recovery();
            *service = Some(now.ok_or("it is not there"));
        }
        Err(why) => watch_log.log_failure(&why),
    }
}

/// Returns the `host:port` of a Service, or the reason why there is none. Uses its port of this name if it has several, and these
/// addresses of nodes.
fn service_addresses(
    service: &Service,
    port: &str,
    nodes: &[IpAddr],
) -> Result<Vec<String>, String> {
    let annotations = service.metadata.annotations.as_ref();
    if let Some(text) = annotations.and_then(|message| message.get(ADVERTISE_ANNOTATION)) {
        let entries = text
            .split(',')
            .map(str::trim)
            .filter(|each| !each.is_empty());
        let entries = entries.map(|each| config::host_port(each).map(|_| each.to_owned()));
        let all = entries.collect::<Result<Vec<_>, _>>();
        let all = all.map_err(|why| format!("its annotation {ADVERTISE_ANNOTATION}: {why}"))?;
        if !all.is_empty() {
            return Ok(all);
        }
    }
    let spec = service.spec.as_ref();
    let ports = spec.and_then(|spec| spec.ports.as_deref());
    let port = find_port(ports.unwrap_or_default(), port)?;
    let service_type = spec.and_then(|spec| spec.type_.as_deref());
    let mut all: Vec<String> = match service_type.unwrap_or_default() {
        "LoadBalancer" => {
            let port = to_port_number(port.port)?;
            let status = service.status.as_ref();
            let load_balancer = status.and_then(|status| status.load_balancer.as_ref());
            let ingress = load_balancer.and_then(|balancer| balancer.ingress.as_ref());
            let hosts = ingress.into_iter().flatten();
            let hosts = hosts.filter_map(|at| at.ip.as_deref().or(at.hostname.as_deref()));
            let hosts = hosts.filter(|host| !host.is_empty());
            hosts
                .map(|host| Target::new(host, port).to_host_port())
                .collect()
        }
        "NodePort" => {
            let port = to_port_number(port.node_port.ok_or("its port has no node port yet")?)?;
            let nodes = nodes.iter();
            nodes
                .map(|node| Target::new(node.to_string(), port).to_host_port())
                .collect()
        }
        other => {
            return Err(format!(
                "it is of type {other}, which is not reachable from outside the cluster; change it to LoadBalancer or NodePort, or set the addresses in its annotation {ADVERTISE_ANNOTATION}"
            ));
        }
    };
    if all.is_empty() {
        return Err("it has no address yet".to_owned());
    }
    if all.len() > MAX_ADDRESSES {
        tracing::warn!(
            addresses = all.len(),
            "edges accept at most {MAX_ADDRESSES} addresses and receive only the first ones; use a name in tunnel.advertise that resolves to all of them"
        );
        all.truncate(MAX_ADDRESSES);
    }
    Ok(all)
}

fn find_port<'a>(ports: &'a [ServicePort], name: &str) -> Result<&'a ServicePort, String> {
    match ports {
        [only] => Ok(only),
        several => several
            .iter()
            .find(|port| port.name.as_deref().unwrap_or_default() == name)
            .ok_or_else(|| {
                format!("it has no port with the name {name} (kubernetes.advertise.port)")
            }),
    }
}

fn to_port_number(port: i32) -> Result<u16, String> {
    u16::try_from(port).map_err(|_| format!("{port} is not a port number"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn found(more: &Value, nodes: &[&str]) -> Result<Vec<String>, String> {
        let mut service = json!({
            "metadata": { "name": "causeway-tunnels" },
            "spec": { "type": "LoadBalancer", "ports": [{ "name": "tunnels", "port": 10262, "nodePort": 31262 }] },
        });
        for (key, value) in more.as_object().unwrap() {
            let part = service
                .as_object_mut()
                .unwrap()
                .entry(key)
                .or_insert(json!({}));
            part.as_object_mut()
                .unwrap()
                .extend(value.as_object().unwrap().clone());
        }
        let nodes: Vec<IpAddr> = nodes.iter().map(|node| node.parse().unwrap()).collect();
        service_addresses(&serde_json::from_value(service).unwrap(), "tunnels", &nodes)
    }

    #[test]
    fn load_balancer_addresses_are_used_with_the_service_port() {
        let none = found(&json!({}), &[]).unwrap_err();
        assert!(none.contains("no address yet"), "{none}");
        let ingress =
            json!([{ "ip": "192.0.2.1" }, { "ip": "2001:db8::1" }, { "hostname": "lb.example" }]);
        let status = json!({ "status": { "loadBalancer": { "ingress": ingress } } });
        let all = found(&status, &["10.0.0.1"]).unwrap();
        assert_eq!(
            all,
            ["192.0.2.1:10262", "[2001:db8::1]:10262", "lb.example:10262"]
        );
    }

    #[test]
    fn a_node_port_is_had_at_each_node_of_the_cloud() {
        let kind = json!({ "spec": { "type": "NodePort" } });
        let all = found(&kind, &["192.0.2.1", "2001:db8::1"]).unwrap();
        assert_eq!(all, ["192.0.2.1:31262", "[2001:db8::1]:31262"]);
        assert!(found(&kind, &[]).unwrap_err().contains("no address yet"));
        let many: Vec<String> = (0..100).map(|n| format!("10.0.0.{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(found(&kind, &many).unwrap().len(), MAX_ADDRESSES);
    }

    #[test]
    fn an_annotation_comes_first_and_its_faults_are_named() {
        let annotated = |text: &str| {
            let message = json!({ "metadata": { "annotations": { ADVERTISE_ANNOTATION: text } }, "spec": { "type": "ClusterIP" } });
            found(&message, &[])
        };
        assert_eq!(
            annotated("a.example:1, 192.0.2.1:2").unwrap(),
            ["a.example:1", "192.0.2.1:2"]
        );
        assert!(annotated("a.example").unwrap_err().contains("HOST:PORT"));
        assert!(annotated("").unwrap_err().contains("of type ClusterIP"));
        let ports = json!([{ "name": "a", "port": 1 }, { "name": "b", "port": 2 }]);
        let several = found(&json!({ "spec": { "ports": ports } }), &[]);
        assert!(
            several
                .unwrap_err()
                .contains("no port with the name tunnels")
        );
    }
}
