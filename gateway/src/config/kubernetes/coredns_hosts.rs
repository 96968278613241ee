//! Configuration section `kubernetes.hosts`: the hosts file of node names that `CoreDNS` reads from a `ConfigMap`.
//!
//! Defaults follow from the format, whose object names users of OpenYurt already use. As for the gateway's own DNS server, the
//! addresses for an edge's name are never guessed. Loopback is not a valid address here, because other machines read this file.

use std::net::IpAddr;
use std::time::Duration;

use causeway_config::{ConfigErrors, DurationStr};
use serde::{Deserialize, Serialize};

use crate::config::dns;

/// Minimum lease duration. A shorter lease is lost at each short pause of the API, and lease times are whole seconds.
const MIN_LEASE: Duration = Duration::from_secs(3);
/// Maximum lease duration. A file should not remain unchanged for longer after its writer has died.
const MAX_LEASE: Duration = Duration::from_hours(1);
/// Maximum length of a Kubernetes object name, with room for the number of a further file.
const MAX_NAME: usize = 240;

/// Hosts file of all nodes in a `ConfigMap`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CoreDnsHosts {
    /// `causeway`: a line for each address of a node, by name. `openyurt`: one line for each node, as OpenYurt's tunnel server writes it, with that server's object names by default.
    pub format: HostsFormat,
    /// Namespace of the `ConfigMap` and of the Lease.
    pub namespace: String,
    /// Name of the `ConfigMap`; by default `causeway-nodes`, or `yurt-tunnel-nodes`. If one is too small for all nodes, further ones have this name with a number appended.
    pub name: Option<String>,
    /// Key of the file in the `ConfigMap`; by default `hosts`, or `tunnel-nodes`.
    pub key: Option<String>,
    /// Zones in which nodes have names as well, `NODE.ZONE`.
    pub zones: Vec<String>,
    /// Addresses that the name of an edge's node resolves to: those at which clients reach the listeners. Without this key: `dns.addresses`, or the addresses of the listeners.
    pub addresses: Vec<IpAddr>,
    /// Name of the Lease that selects the one gateway that writes; by default that of the `ConfigMap`.
    pub lease: Option<String>,
    /// Time after which another gateway replaces a writer that has died, in whole seconds.
    #[serde(with = "DurationStr")]
    pub lease_duration: Duration,
}

impl Default for CoreDnsHosts {
    fn default() -> Self {
        Self {
            format: HostsFormat::Causeway,
            namespace: "kube-system".to_owned(),
            name: None,
            key: None,
            zones: Vec::new(),
            addresses: Vec::new(),
            lease: None,
            // The default of Kubernetes' own components.
            lease_duration: Duration::from_secs(15),
        }
    }
}

/// Format of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HostsFormat {
    /// Sorted by name, a line for each address.
    Causeway,
    /// The format of OpenYurt's tunnel server.
    OpenYurt,
}

impl CoreDnsHosts {
    /// Returns the name of the `ConfigMap`.
    pub fn name(&self) -> &str {
        let default_name = match self.format {
            HostsFormat::Causeway => "causeway-nodes",
            HostsFormat::OpenYurt => "yurt-tunnel-nodes",
        };
        self.name.as_deref().unwrap_or(default_name)
    }

    /// Returns the key of the file in the `ConfigMap`.
    pub fn key(&self) -> &str {
        let default_name = match self.format {
            HostsFormat::Causeway => "hosts",
            HostsFormat::OpenYurt => "tunnel-nodes",
        };
        self.key.as_deref().unwrap_or(default_name)
    }

    /// Returns the name of the Lease.
    pub fn lease(&self) -> &str {
        self.lease.as_deref().unwrap_or_else(|| self.name())
    }

    pub(in crate::config) fn validate(&self, named: &[IpAddr], faults: &mut ConfigErrors) {
        let objects = [
            ("namespace", Some(&self.namespace)),
            ("name", self.name.as_ref()),
            ("lease", self.lease.as_ref()),
        ];
        check_names("kubernetes.hosts", objects, faults);
        let plain = |each: char| each.is_ascii_alphanumeric() || "-_.".contains(each);
        let key = self.key();
        if key.is_empty() || key.len() > MAX_NAME || !key.chars().all(plain) {
            let message = format!("\"{key}\" is not a valid key; use letters, digits, -, _ and .");
            faults.add("kubernetes.hosts.key", message);
        }
        if self.format == HostsFormat::OpenYurt && !self.zones.is_empty() {
            let message =
                "OpenYurt's format has only one name in each line; use the format of causeway";
            faults.add("kubernetes.hosts.zones", message);
        }
        if let Some(index) = self.zones.iter().position(|zone| zone == ".") {
            let path = format!("kubernetes.hosts.zones[{index}]");
            faults.add(
                path,
                "is the root zone, but names without a zone are always written; remove it",
            );
        }
        dns::check_zones("kubernetes.hosts.zones", &self.zones, faults);
        dns::check_addresses("kubernetes.hosts.addresses", &self.addresses, faults);
        if self.addresses.is_empty() && named.iter().all(IpAddr::is_loopback) {
            let message = "the addresses for edge node names are not known, because the listeners listen on all addresses or only on this \
                           machine's loopback addresses; list the addresses at which clients reach the listeners";
            faults.add("kubernetes.hosts.addresses", message);
        }
        let lease_duration = self.lease_duration;
        if lease_duration.subsec_nanos() != 0 || !(MIN_LEASE..=MAX_LEASE).contains(&lease_duration)
        {
            let message = "must be whole seconds, from 3s to 1h";
            faults.add("kubernetes.hosts.lease_duration", message);
        }
    }
}

/// Checks names of objects, by key.
pub(super) fn check_names<'a>(
    section: &str,
    names: impl IntoIterator<Item = (&'static str, Option<&'a String>)>,
    faults: &mut ConfigErrors,
) {
    for (key, name) in names {
        if let Some(name) = name.filter(|name| !is_name(name)) {
            let message = format!(
                "\"{name}\" is not a valid object name; use lower-case letters, digits, - and ."
            );
            faults.add(format!("{section}.{key}"), message);
        }
    }
}

/// Whether an object can have this name (RFC 1123, as Kubernetes requires).
pub(super) fn is_name(name: &str) -> bool {
    let label = |label: &str| {
        let plain = |each: char| each.is_ascii_lowercase() || each.is_ascii_digit() || each == '-';
        !label.is_empty()
            && label.chars().all(plain)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= MAX_NAME && name.split('.').all(label)
}

/// Whether the text has the form `NAMESPACE/NAME` of an object.
pub(in crate::config) fn is_namespaced_name(text: &str) -> bool {
    let parts = text.split_once('/');
    parts.is_some_and(|(namespace, name)| is_name(namespace) && is_name(name))
}
