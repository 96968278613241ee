//! Configuration section `redirect`: connections to node addresses that are redirected to listeners.
//!
//! This module defines the section and its checks. It does not know the addresses of nodes, which come from the table of nodes.
//! Only ports and pods that the section names are redirected.

use super::listener::{Listener, ListenerProtocol};
use causeway_config::{ConfigErrors, ListenAddr};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

/// Rules in the kernel of this host that redirect connections to the nodes' own addresses to listeners. Needs `CAP_NET_ADMIN`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Redirect {
    /// Listeners with `original_destination`, each for the node port that it stands for.
    pub listeners: Vec<String>,
    /// Further node ports, and the listener for each.
    pub ports: BTreeMap<u16, String>,
    /// A `tcp` listener with `original_destination` to which all TCP connections to pods of edge nodes are redirected, to any port. The pods' networks are those of Node objects within `kubernetes.pod_networks`. With `kubernetes.pods` only the addresses of running pods at the edge are redirected, except those in the `podCIDRs` of nodes that are not at the edge. Without this key: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pods: Option<String>,
    /// Name of the nftables table (family inet) of these rules, which no one else may use.
    pub table: String,
}

impl Default for Redirect {
    fn default() -> Self {
        Self {
            listeners: Vec::new(),
            ports: BTreeMap::new(),
            pods: None,
            table: "causeway".to_owned(),
        }
    }
}

impl Redirect {
    /// Returns each redirected node port and its listener. Invalid entries are left out.
    pub(crate) fn by_port<'a>(&'a self, listeners: &'a [Listener]) -> BTreeMap<u16, &'a Listener> {
        let named = |name: &str| listeners.iter().find(|listener| listener.name == name);
        let own = self.listeners.iter().filter_map(|name| {
            let listener = named(name)?;
            Some((listener.node_port()?, listener))
        });
        let further = self.ports.iter();
        let further = further.filter_map(|(port, name)| Some((*port, named(name)?)));
        own.chain(further).collect()
    }

    /// Returns the listener to which connections to pods are redirected.
    pub(crate) fn pod_listener<'a>(&self, listeners: &'a [Listener]) -> Option<&'a Listener> {
        let name = self.pods.as_ref()?;
        listeners.iter().find(|listener| listener.name == *name)
    }

    /// Checks the section. `networks` are the trusted pod networks.
    pub(super) fn check(
        &self,
        listeners: &[Listener],
        networks: &[IpNet],
        faults: &mut ConfigErrors,
    ) {
        if self.listeners.is_empty() && self.ports.is_empty() && self.pods.is_none() {
            faults.add(
                "redirect",
                "redirects nothing; set listeners, or set ports with a listener for each, or remove this key",
            );
        }
        let mut used_ports = BTreeMap::new();
        for (index, name) in self.listeners.iter().enumerate() {
            let path = format!("redirect.listeners[{index}]");
            let Some(listener) = find_redirect_listener(&path, name, listeners, faults) else {
                continue;
            };
            let Some(port) = listener.node_port() else {
                let message = format!(
                    "listener \"{name}\" has no node port; set its \"port\", or name it in redirect.ports"
                );
                faults.add(path, message);
                continue;
            };
            if let Some(other) = used_ports.insert(port, name) {
                let message =
                    format!("node port {port} is already redirected to listener \"{other}\"");
                faults.add(path, message);
            }
        }
        for (port, name) in &self.ports {
            let path = format!("redirect.ports.{port}");
            if *port == 0 {
                faults.add(
                    &path,
                    "0 is not a valid node port; use a port from 1 to 65535",
                );
            }
            if let Some(other) = used_ports.get(port) {
                let message =
                    format!("node port {port} is already redirected to listener \"{other}\"");
                faults.add(&path, message);
            }
            find_redirect_listener(&path, name, listeners, faults);
        }
        self.check_pods(listeners, networks, faults);
        check_table("redirect.table", &self.table, faults);
    }

    fn check_pods(&self, listeners: &[Listener], networks: &[IpNet], faults: &mut ConfigErrors) {
        let Some(name) = &self.pods else {
            return;
        };
        let path = "redirect.pods";
        if let Some(listener) = find_redirect_listener(path, name, listeners, faults)
            && listener.protocol != ListenerProtocol::Tcp
        {
            let message = format!(
                "listener \"{name}\" has the protocol {}, but clients of pods may use any protocol; name a tcp listener",
                listener.protocol.as_str()
            );
            faults.add(path, message);
        }
        if networks.is_empty() {
            let message = "no pod network is trusted; set kubernetes.pod_networks";
            faults.add(path, message);
        }
    }
}

/// Checks that the text is a valid name of a table.
fn check_table(path: &str, table: &str, faults: &mut ConfigErrors) {
    let mut letters = table.chars();
    let has_valid_start = letters.next().is_some_and(|c| c.is_ascii_alphabetic());
    let has_valid_rest = letters.all(|c| c.is_ascii_alphanumeric() || c == '_');
    if !(has_valid_start && has_valid_rest && table.len() <= MAX_TABLE) {
        let message = format!(
            "{table:?} is not a valid table name; use a letter, then letters, digits and _, at most {MAX_TABLE} characters in all"
        );
        faults.add(path, message);
    }
}

/// Maximum length of a table's name, well below the kernel's limit.
const MAX_TABLE: usize = 64;

/// Returns the listener with this name, and adds a fault if connections cannot be redirected to it.
fn find_redirect_listener<'a>(
    path: &str,
    name: &str,
    listeners: &'a [Listener],
    faults: &mut ConfigErrors,
) -> Option<&'a Listener> {
    let Some(listener) = listeners.iter().find(|listener| listener.name == name) else {
        faults.add(path, format!("there is no listener \"{name}\""));
        return None;
    };
    if !listener.original_destination {
        let message = format!(
            "listener \"{name}\" does not have original_destination: true, so it cannot find the target of a redirected connection"
        );
        faults.add(path, message);
    }
    if !matches!(listener.listen, ListenAddr::Tcp(address) if receives_redirected(address)) {
        let message = format!(
            "listener \"{name}\" is on {}, which receives no redirected connections; let it listen on 0.0.0.0, [::], 127.0.0.1 or [::1]",
            listener.listen
        );
        faults.add(path, message);
    }
    Some(listener)
}

/// Whether redirected connections reach this address. The kernel redirects a connection from another host to the address at
/// which it arrived, and one from this host to loopback.
fn receives_redirected(listen: SocketAddr) -> bool {
    let own = [
        IpAddr::from(Ipv4Addr::LOCALHOST),
        Ipv6Addr::LOCALHOST.into(),
    ];
    listen.ip().is_unspecified() || own.contains(&listen.ip())
}
