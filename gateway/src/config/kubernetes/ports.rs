//! Configuration section `kubernetes.ports`: node ports that a `ConfigMap` lists, updated while the gateway runs.
//!
//! A listed port gets its own listener, because a pod does not see the original destination. The listener is otherwise a copy of
//! the listener named for its protocol. If the named listener does see the original destination, the port is redirected to it
//! instead. Ports in the configuration file take precedence. A `connect` listener serves listed ports without another listener;
//! they are only announced to edges.

use std::collections::BTreeSet;

use causeway_config::{ConfigErrors, ListenAddr};
use serde::{Deserialize, Serialize};

use super::coredns_hosts::check_names;
use crate::config::listener::{Listener, ListenerProtocol};

/// Node ports that a `ConfigMap` of the cluster lists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PortList {
    /// Namespace of the `ConfigMap` and of the Service.
    pub namespace: String,
    /// Name of the `ConfigMap`, with the keys of OpenYurt's `yurt-tunnel-server-cfg`: `http-proxy-ports`, `https-proxy-ports`, `localhost-proxy-ports`.
    pub name: String,
    /// The `https` listener that is the template for `https-proxy-ports`. The entry of `upstream_tls` for its own port gives the TLS files for these upstreams.
    pub https: Option<String>,
    /// The `http` listener that is the template for `http-proxy-ports`.
    pub http: Option<String>,
    /// Service that gets a port for each of these ports. Without this key the gateway changes no Service.
    pub service: Option<String>,
}

impl Default for PortList {
    fn default() -> Self {
        Self {
            namespace: "kube-system".to_owned(),
            name: "causeway-ports".to_owned(),
            https: None,
            http: None,
            service: None,
        }
    }
}

/// Node ports that a `ConfigMap` lists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct NodePorts {
    /// Ports of upstreams that speak HTTP without TLS.
    pub http: BTreeSet<u16>,
    /// Ports of upstreams that speak TLS.
    pub https: BTreeSet<u16>,
    /// Ports that edges dial on loopback, without a listener at the gateway.
    pub loopback: BTreeSet<u16>,
}

impl NodePorts {
    /// Returns the ports with a listener.
    pub fn served(&self) -> impl Iterator<Item = u16> {
        self.http.iter().chain(&self.https).copied()
    }
}

impl PortList {
    /// Returns the listeners that this section names, by key.
    pub(in crate::config) fn listeners(
        &self,
    ) -> impl Iterator<Item = (&'static str, ListenerProtocol, &str)> {
        let named = [
            ("https", ListenerProtocol::Https, self.https.as_deref()),
            ("http", ListenerProtocol::Http, self.http.as_deref()),
        ];
        named
            .into_iter()
            .filter_map(|(key, kind, name)| Some((key, kind, name?)))
    }

    pub(in crate::config) fn validate(&self, listeners: &[Listener], faults: &mut ConfigErrors) {
        let names = [
            ("namespace", Some(&self.namespace)),
            ("name", Some(&self.name)),
            ("service", self.service.as_ref()),
        ];
        check_names("kubernetes.ports", names, faults);
        let is_connect = |listener: &Listener| listener.protocol == ListenerProtocol::Connect;
        if self.listeners().next().is_none() && !listeners.iter().any(is_connect) {
            let message = "lists ports but no listener; set \"http\" or \"https\" to a listener, or remove this key";
            faults.add("kubernetes.ports", message);
        }
        for (key, protocol, name) in self.listeners() {
            let path = format!("kubernetes.ports.{key}");
            match listeners.iter().find(|listener| listener.name == name) {
                None => faults.add(path, format!("there is no listener \"{name}\"")),
                Some(listener) if listener.protocol != protocol => {
                    let message = format!(
                        "listener \"{name}\" does not have the protocol {}",
                        protocol.as_str()
                    );
                    faults.add(path, message);
                }
                Some(listener) if matches!(listener.listen, ListenAddr::Unix(_)) => {
                    let message =
                        format!("listener \"{name}\" does not listen on an IP address and port");
                    faults.add(path, message);
                }
                Some(listener) if listener.node.is_some() => {
                    let message = format!("listener \"{name}\" serves only one node");
                    faults.add(path, message);
                }
                Some(_) => {}
            }
        }
    }
}
