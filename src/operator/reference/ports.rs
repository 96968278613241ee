//! The page of the reference that lists ports.

use std::fmt::Write;

use crate::operator::config_loader::{ConfigKey, ProcessConfig, keys, plain_text};

/// Socket at which a process listens.
struct Listener {
    key: &'static str,
    protocol: &'static str,
    clients: &'static str,
    firewall: &'static str,
    purpose: &'static str,
}

const LOOPBACK: &str = "nothing to open: loopback";

const GATEWAY: &[Listener] = &[
    Listener {
        key: "tunnel.listen",
        protocol: "TCP: TLS 1.3; tunnels with certificates of both sides",
        clients: "edges",
        firewall: "inbound at the gateway, from the networks of all edges",
        purpose: "tunnels, joining and renewal, reads of the API cache",
    },
    Listener {
        key: "listeners[].listen",
        protocol: "TCP: HTTPS, HTTP, CONNECT or plain TCP (`listeners[].protocol`); or a unix socket",
        clients: "clients of nodes, such as kube-apiserver, Prometheus and curl",
        firewall: "inbound at the gateway, from clients",
        purpose: "requests to nodes",
    },
    Listener {
        key: "dns.listen",
        protocol: "UDP and TCP: DNS",
        clients: "CoreDNS, resolvers of clients",
        firewall: "inbound at the gateway, from resolvers, if the address is not on loopback",
        purpose: "names of nodes",
    },
    Listener {
        key: "admin.listen",
        protocol: "TCP: HTTP",
        clients: "operators, probes, scrapers on the same host",
        firewall: LOOPBACK,
        purpose: "health, metrics, [admin API](admin-api.md)",
    },
    Listener {
        key: "admin.metrics_listen",
        protocol: "TCP: HTTP; or a unix socket",
        clients: "scrapers on other hosts",
        firewall: "inbound at the gateway, from scrapers",
        purpose: "metrics",
    },
];

const EDGE: &[Listener] = &[
    Listener {
        key: "admin.listen",
        protocol: "TCP: HTTP",
        clients: "operators, probes, scrapers on the node",
        firewall: LOOPBACK,
        purpose: "health, metrics, [status](admin-api.md#status)",
    },
    Listener {
        key: "api_cache.listen",
        protocol: "TCP: HTTP, or HTTPS with `api_cache.tls`",
        clients: "programs on the node, such as kube-proxy",
        firewall: LOOPBACK,
        purpose: "cached objects of the cluster",
    },
    Listener {
        key: "api_cache.members.listen",
        protocol: "TCP: TLS, both sides with certificates of nodes",
        clients: "edges of the same node pool",
        firewall: "inbound at the node, from the site's network",
        purpose: "the leader of the pool serves the members; members carry [heartbeats](../howto/heartbeats.md)",
    },
    Listener {
        key: "api_cache.yurthub.listen",
        protocol: "TCP: TLS with certificates of the cluster's nodes",
        clients: "YurtHubs of the same node pool",
        firewall: "inbound at the node, from the site's network",
        purpose: "cached objects of the cluster",
    },
    Listener {
        key: "egress.listeners[].listen",
        protocol: "TCP: what the destination speaks",
        clients: "programs on the node; pods, if the address is that of a bridge",
        firewall: "nothing to open: loopback, or an address on the node",
        purpose: "connections to [the cloud or to other nodes](../howto/edge-to-cloud.md)",
    },
    Listener {
        key: "egress.proxy.listen",
        protocol: "TCP: SOCKS5 and HTTP",
        clients: "programs on the node; pods, if the address is that of a bridge",
        firewall: "nothing to open: loopback, or an address on the node",
        purpose: "connections to [the cloud or to other nodes](../howto/edge-to-cloud.md)",
    },
];

/// Connections that gateway and edge open: from, to, port, protocol, purpose.
const OUTBOUND: [[&str; 5]; 10] = [
    [
        "edge",
        "gateways (`gateways`, and those that gateways announce)",
        "that of `tunnel.listen`",
        "TCP: TLS 1.3; through `proxy` if set",
        "tunnels, joining, renewal, connections of programs on the node (`egress`)",
    ],
    [
        "edge",
        "upstreams (`ports`, `listed_ports`, `allow.hosts`)",
        "as configured",
        "TCP",
        "requests of clients; most upstreams are on loopback",
    ],
    [
        "edge",
        "API server of the cluster (`kubernetes.kubeconfig`)",
        "6443 in most clusters",
        "TCP: HTTPS",
        "the first certificate, with `kubernetes` alone",
    ],
    [
        "edge",
        "edges of its node pool (`api_cache.members`)",
        "as configured",
        "TCP: TLS",
        "reads at the leader, delegated heartbeats",
    ],
    [
        "edge",
        "kubelet of its node (`heartbeat.kubelet`)",
        "10248",
        "TCP: HTTP, on loopback",
        "health of the kubelet",
    ],
    [
        "gateway",
        "API server of the cluster (`kubernetes.kubeconfig`)",
        "6443 in most clusters",
        "TCP: HTTPS",
        "nodes, certificates, reviews, lists of ports, objects of the API cache, Leases",
    ],
    [
        "gateway",
        "issuers of JWTs (`listeners[].client_auth.jwt[].jwks`)",
        "443 as a rule",
        "TCP: HTTPS",
        "keys of issuers",
    ],
    [
        "gateway",
        "addresses that no edge serves (`listeners[].direct_networks`)",
        "as requested",
        "TCP",
        "requests of clients",
    ],
    [
        "gateway",
        "destinations of nodes (`egress.rules`)",
        "as requested",
        "TCP",
        "connections that programs on nodes open",
    ],
    [
        "gateway, edge",
        "name servers of the machine",
        "53",
        "UDP and TCP: DNS",
        "names in the configuration and in targets",
    ],
];

/// Returns the page as Markdown.
pub(super) fn page() -> String {
    let mut text = "# Ports\n\n\
        This page lists the sockets at which a gateway and an edge listen, and the connections that they open. Only the gateway needs ports that\n\
        are open to the Internet. A node behind NAT needs none.\n"
        .to_owned();
    listeners::<causeway_gateway::Config>(&mut text, "gateway", GATEWAY);
    text.push_str(
        "\nFurther ports of the gateway:\n\n\
         - `kubernetes.ports` opens a listener for each port that the cluster lists.\n\
         - `redirect` has no socket of its own: rules of the kernel lead connections to listeners.\n\
         - `run-admin.sock` in `data_dir` is a unix socket for commands; see [files](files.md).\n",
    );
    listeners::<causeway_edge::Config>(&mut text, "edge", EDGE);
    text.push_str(
        "\n`ports` and `listed_ports` of the edge open no socket: the edge serves these ports through its tunnels.\n\
         `run-admin.sock` in `data_dir` is a unix socket for commands.\n\n\
         ## Outbound connections\n\n\
         | from | to | port | protocol | purpose |\n| --- | --- | --- | --- | --- |\n",
    );
    for [from, to, port, protocol, purpose] in OUTBOUND {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "| {from} | {to} | {port} | {protocol} | {purpose} |");
    }
    text
}

fn listeners<C: ProcessConfig>(text: &mut String, side: &str, listeners: &[Listener]) {
    let _ = write!(
        text,
        "\n## Ports of the {side}\n\n\
         | key | default | protocol | clients | firewall | purpose |\n| --- | --- | --- | --- | --- | --- |\n"
    );
    for listener in listeners {
        let Listener {
            key,
            protocol,
            clients,
            firewall,
            purpose,
        } = listener;
        let default = default::<C>(key);
        let _ = writeln!(
            text,
            "| `{key}` | {default} | {protocol} | {clients} | {firewall} | {purpose} |"
        );
    }
}

/// Returns the default of an address.
fn default<C: ProcessConfig>(key: &str) -> String {
    if key == "listeners[].listen" {
        let config = causeway_gateway::Config::default();
        let addresses = config.listeners.iter();
        let addresses: Vec<_> = addresses
            .map(|listener| format!("`{}`", listener.listen))
            .collect();
        return addresses.join(", ");
    }
    let all = keys::<C>();
    let found: Option<&ConfigKey> = all.iter().find(|found| found.name == key);
    let default = found.and_then(|key| key.default.as_ref());
    default.map_or("none".into(), |default| {
        format!("`{}`", plain_text(default))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<C: ProcessConfig>(listeners: &[Listener]) {
        let dialled = ["heartbeat.kubelet"];
        let found = keys::<C>().into_iter().filter(|key| key.kind == "address");
        let found = found.filter(|key| !dialled.contains(&&*key.name));
        let mut found: Vec<String> = found.map(|key| key.name).collect();
        let mut listed: Vec<_> = listeners.iter().map(|listener| listener.key).collect();
        found.sort();
        listed.sort_unstable();
        assert_eq!(listed, found);
    }

    #[test]
    fn each_address_of_a_configuration_is_listed() {
        check::<causeway_gateway::Config>(GATEWAY);
        check::<causeway_edge::Config>(EDGE);
    }
}
