//! Configuration of the API cache: the cluster objects that a node caches for its own programs and the members of its node
//! pool.
//!
//! There are three listeners, and none has a list of single clients. Any program that reaches the first one may read. So it
//! must be on loopback, with or without TLS. The second one serves the members of the node pool, over TLS. The third one
//! serves `YurtHub`s, and authenticates them by their cluster's certificates. A gateway announces the members, and which of
//! them reads from the gateway. None of that is configured here.

use super::Config;
use causeway_config::{ByteSize, ConfigErrors, DurationStr, ListenAddrs, SocketAddrStr, host_port};
use causeway_tunnel::control_stream::YurtHubAddr;
use causeway_watch_cache::GroupVersionResource;
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, path::PathBuf, time::Duration};

/// Maximum number of addresses of one node that other members receive.
const MAX_ADDRESSES: usize = 8;

/// Cluster objects that are cached, saved to disk, and served on this node while the cloud is unreachable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ApiCache {
    /// Address at which this node's programs read, over HTTP, or over TLS if `tls` is set. It has no authentication, so it must be on loopback.
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
    /// Certificate of this listener, for programs that read with `https://`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<ServerCertificate>,
    /// Resources that are cached: group, version and plural (`discovery.k8s.io/v1/endpointslices`, `v1/services`). The gateway must have them in its `api_cache.resources`.
    pub resources: Vec<String>,
    /// Listener for the members of this node's pool. Without it, this node does not serve pool members and never becomes the leader.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub members: Option<MemberListener>,
    /// Listener for `YurtHub`s of this node's pool, which read Services, Endpoints and `EndpointSlice`s from it as from a leader `YurtHub`; disabled if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yurthub: Option<YurtHubListener>,
    /// Maximum size of each resource on the disk, compressed, in the data directory.
    #[serde(with = "ByteSize")]
    pub save: usize,
    /// Maximum time until a change is written to disk.
    #[serde(with = "DurationStr")]
    pub save_every: Duration,
    /// Maximum memory for cached encoded responses.
    #[serde(with = "ByteSize")]
    pub cache: usize,
    /// Maximum memory for recent changes of each resource, from which a watch can resume.
    #[serde(with = "ByteSize")]
    pub event_buffer: usize,
}

impl Default for ApiCache {
    fn default() -> Self {
        Self {
            // Differs from the admin listener's port and YurtHub's ports.
            listen: SocketAddr::from(([127, 0, 0, 1], 10270)),
            tls: None,
            resources: GroupVersionResource::defaults()
                .iter()
                .map(ToString::to_string)
                .collect(),
            members: None,
            yurthub: None,
            // Tens of thousands of slices, compressed.
            save: 64 << 20,
            // A power failure loses at most this much, and the next list restores it; each write wears flash storage.
            save_every: Duration::from_secs(5),
            // With 16 MiB this was half of the memory of an API cache; a larger value did not make responses faster.
            cache: 4 << 20,
            event_buffer: 4 << 20,
        }
    }
}

impl ApiCache {
    /// Returns the files that this configuration names.
    pub(super) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let certificate_files = self.tls.iter().flat_map(ServerCertificate::files);
        certificate_files.chain(self.yurthub.iter().flat_map(YurtHubListener::files))
    }

    /// Returns a copy without the paths of [`Self::files`].
    pub(crate) fn without_files(&self) -> Self {
        let mut copy = self.clone();
        if let Some(ServerCertificate { certificate, key }) = &mut copy.tls {
            for path in [certificate, key] {
                path.clear();
            }
        }
        if let Some(yurthub) = &mut copy.yurthub {
            for path in [&mut yurthub.certificate, &mut yurthub.key, &mut yurthub.ca] {
                path.clear();
            }
        }
        copy
    }

    /// Returns the addresses at which pool members read, or none without a listener for members.
    pub fn member_addresses(&self) -> Vec<String> {
        let members = self.members.as_ref();
        members
            .map(|site| site.addresses.clone())
            .unwrap_or_default()
    }

    /// Returns the resources that `YurtHub`s read here: the cached resources that a pool shares. All others are for this
    /// node's own programs.
    pub fn yurthub_resources(&self) -> Vec<GroupVersionResource> {
        let mut shared = GroupVersionResource::defaults();
        shared.retain(|one| self.resources.contains(&one.to_string()));
        shared
    }

    /// Returns the address and the resources for `YurtHub`s.
    pub fn yurthub_addr(&self) -> Option<YurtHubAddr> {
        let at = self.yurthub.as_ref()?.listen.ip().to_canonical();
        let resources = self
            .yurthub_resources()
            .iter()
            .map(ToString::to_string)
            .collect();
        Some(YurtHubAddr { at, resources })
    }
}

/// Certificate of a listener. An external CA issues and renews it; the files are watched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ServerCertificate {
    /// PEM file of the certificate and its intermediates, for the names and addresses that programs on this node use (`127.0.0.1`, `localhost`, or names that resolve to them).
    pub certificate: PathBuf,
    /// PEM file of the certificate's private key.
    pub key: PathBuf,
}

impl ServerCertificate {
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.certificate, &self.key].into_iter()
    }
}

/// The listener of the site network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemberListener {
    /// Address at which pool members read, over TLS with the certificates of their nodes.
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
    /// Addresses (`host:port`) at which pool members reach this listener. The gateway announces them.
    pub addresses: Vec<String>,
}

/// Listener for `YurtHub`s (`OpenYurt` v1.6.1 and later). Their gateway's `kubernetes.yurthub` announces it to them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct YurtHubListener {
    /// Address at which `YurtHub`s read, over TLS. `YurtHub`s learn the IP of this address, and connect to their own port number (`--multiplexer-port`), 10269 by default. If this node's own `YurtHub` uses that port, choose another address.
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
    /// PEM file of the certificate for that IP, issued by the CA of the `YurtHub`s' cluster.
    pub certificate: PathBuf,
    /// PEM file of the certificate's private key.
    pub key: PathBuf,
    /// PEM file of the CA that issues the certificates of the cluster's nodes, with which `YurtHub`s authenticate.
    pub ca: PathBuf,
}

impl YurtHubListener {
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.certificate, &self.key, &self.ca].into_iter()
    }

    fn validate(&self, errors: &mut ConfigErrors) {
        let ip = self.listen.ip().to_canonical();
        if ip.is_unspecified() || ip.is_loopback() {
            let message = format!(
                "{} is not an address at which other nodes can reach this node, and YurtHubs learn this address; write IP:{}",
                self.listen,
                self.listen.port()
            );
            errors.add("api_cache.yurthub.listen", message);
        }
    }
}

impl Config {
    /// Checks the keys of `api_cache`.
    pub(super) fn validate_api_cache(&self, errors: &mut ConfigErrors) {
        let Some(api_cache) = &self.api_cache else {
            return;
        };
        self.validate_listeners(api_cache, errors);
        if !api_cache.listen.ip().to_canonical().is_loopback() {
            let message = format!(
                "{} is not a loopback address, and this listener has no authentication; write 127.0.0.1:{}",
                api_cache.listen,
                api_cache.listen.port()
            );
            errors.add("api_cache.listen", message);
        }
        if api_cache.resources.is_empty() {
            let message = "is an empty list; name at least one resource, or remove the key to cache the resources that kube-proxy and CoreDNS read";
            errors.add("api_cache.resources", message);
        }
        for (index, text) in api_cache.resources.iter().enumerate() {
            if let Err(error) = text.parse::<GroupVersionResource>() {
                errors.add(format!("api_cache.resources[{index}]"), error.to_string());
            }
        }
        let sizes = [
            ("save", api_cache.save),
            ("cache", api_cache.cache),
            ("event_buffer", api_cache.event_buffer),
        ];
        errors.check_at_least_one("api_cache", &sizes);
        errors.check_not_zero("api_cache", &[("save_every", api_cache.save_every)]);
        if let Some(members) = &api_cache.members {
            self.validate_members(members, errors);
        }
        if let Some(yurthub) = &api_cache.yurthub {
            yurthub.validate(errors);
            if api_cache.yurthub_resources().is_empty() {
                let message = "YurtHubs read Services, Endpoints and EndpointSlices, but api_cache.resources contains none of them; add v1/services there";
                errors.add("api_cache.yurthub", message);
            }
        }
    }

    /// Reports listeners with conflicting addresses.
    fn validate_listeners(&self, api_cache: &ApiCache, errors: &mut ConfigErrors) {
        let mut listeners = ListenAddrs::default();
        let all = [
            (
                "admin.listen",
                "the admin listener",
                Some(self.admin.listen),
            ),
            ("api_cache.listen", "the API cache", Some(api_cache.listen)),
            (
                "api_cache.members.listen",
                "the API cache's listener for pool members",
                api_cache.members.as_ref().map(|site| site.listen),
            ),
            (
                "api_cache.yurthub.listen",
                "the API cache's listener for YurtHubs",
                api_cache.yurthub.as_ref().map(|hubs| hubs.listen),
            ),
        ];
        for (path, name, listen) in all {
            if let Some(listen) = listen {
                listeners.add(path, name, listen, errors);
            }
        }
    }

    fn validate_members(&self, site: &MemberListener, errors: &mut ConfigErrors) {
        let path = "api_cache.members.addresses";
        if self.identity.is_some() {
            let message = "pool members authenticate each other with certificates of Causeway's own CA, but an external CA issues this node's certificate (identity); remove one of the two keys";
            errors.add("api_cache.members", message);
        }
        if site.addresses.is_empty() {
            let message = "is an empty list; write the addresses at which pool members reach this node: [HOST:PORT]";
            errors.add(path, message);
        }
        if site.addresses.len() > MAX_ADDRESSES {
            let message = format!(
                "must have at most {MAX_ADDRESSES} entries, because pool members try them one after the other"
            );
            errors.add(path, message);
        }
        for (index, text) in site.addresses.iter().enumerate() {
            if let Err(message) = host_port(text) {
                errors.add(format!("{path}[{index}]"), message);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_config::Validate;
    use serde_json::{Value, json};

    fn faults(api_cache: &Value) -> Vec<String> {
        let config = json!({ "api_cache": api_cache, "admin": { "listen": "127.0.0.1:10266" } });
        let config: Config = serde_json::from_value(config).unwrap();
        let faults = config.validate().into_iter();
        faults
            .map(|fault| format!("{}: {}", fault.path, fault.message))
            .collect()
    }

    #[test]
    fn default_resources_are_those_of_kube_proxy_and_coredns() {
        assert_eq!(faults(&json!({})), Vec::<String>::new());
        let names = ApiCache::default().resources;
        assert!(names.iter().any(|name| name == "v1/services"), "{names:?}");
    }

    #[test]
    fn a_non_loopback_endpoint_or_listener_conflict_is_a_fault() {
        let site = |listen: &str| json!({ "members": { "listen": listen, "addresses": ["10.1.0.5:10271"] } });
        let hubs = |listen: &str| json!({ "yurthub": { "listen": listen, "certificate": "c", "key": "k", "ca": "a" } });
        for (api_cache, part) in [
            (
                json!({ "listen": "10.0.0.5:10270" }),
                "this listener has no authentication",
            ),
            (
                json!({ "listen": "0.0.0.0:10270" }),
                "this listener has no authentication",
            ),
            (
                json!({ "listen": "127.0.0.1:10266" }),
                "overlaps with the admin listener",
            ),
            (site("0.0.0.0:10270"), "overlaps with the API cache"),
            (hubs("0.0.0.0:10269"), "YurtHubs learn this address"),
            (hubs("127.0.0.1:10269"), "YurtHubs learn this address"),
            (
                json!({
                    "resources": ["v1/pods"],
                    "yurthub": { "listen": "10.1.0.5:10269", "certificate": "c", "key": "k", "ca": "a" },
                }),
                "contains none of them",
            ),
            (json!({ "resources": [] }), "is an empty list"),
            (
                json!({ "resources": ["services"] }),
                "api_cache.resources[0]",
            ),
            (json!({ "event_buffer": 0 }), "api_cache.event_buffer"),
            (
                json!({ "members": { "listen": "10.1.0.5:10271", "addresses": [] } }),
                "is an empty list; write the addresses",
            ),
            (
                json!({ "members": { "listen": "10.1.0.5:10271", "addresses": ["10.1.0.5"] } }),
                "HOST:PORT",
            ),
        ] {
            let faults = faults(&api_cache);
            assert!(
                faults.len() == 1 && faults[0].contains(part),
                "{api_cache}: {faults:#?}"
            );
        }
        assert_eq!(faults(&site("10.1.0.5:10271")), Vec::<String>::new());
        assert_eq!(faults(&hubs("10.1.0.5:10269")), Vec::<String>::new());
    }

    #[test]
    fn a_node_with_an_external_certificate_has_no_neighbours() {
        let config = json!({
            "identity": { "chain": "a", "key": "b", "ca": "c" },
            "api_cache": { "members": { "listen": "10.1.0.5:10271", "addresses": ["10.1.0.5:10271"] } },
        });
        let config: Config = serde_json::from_value(config).unwrap();
        let faults = config.validate();
        assert!(
            faults.iter().any(|fault| fault.path == "api_cache.members"),
            "{faults:?}"
        );
    }
}
