//! Routing: the node and target of a stream.
//!
//! 1. The node is the SNI's if the SNI names a node, else the original destination's (DNAT), else the listener's fixed one (or the
//!    member of its node set that `member` selects), else the authority's (by name, then by confirmed address, then by pod
//!    network).
//! 2. An authority that names no node is ordinary (kube-apiserver sends its own) and passes unchanged. An authority that names
//!    *another* node than the other sources is refused, because an ambiguous route is never guessed.
//! 3. While the nodes of a cluster are not loaded (`Nodes::pending_reason`), only the name of a recorded node names a node. All
//!    other names and addresses are refused as `dependency_unavailable`, and never treated as addresses that no edge serves.
//! 4. `SERVICE.NODE` means a service of the node, if nothing else names a node: as the SNI, or as the authority. A node that has
//!    this name itself comes first. Behind a fixed node or a node set, such a name is an ordinary one.
//! 5. If Pod objects are followed (`state::pods`), they alone say on which node a pod is. `POD.NAMESPACE.pod` as the SNI or as the
//!    authority means this pod. An address in the networks of pods that no pod has, or several have, is refused even if another
//!    source names a node.
//! 6. The port is the authority's if the authority names this node, else the original destination's, else the listener's node
//!    port. The port on which the listener listens is never used. A service has one port, which only its edge knows.

use crate::{
    error::{Error, Reason},
    state::{
        Nodes,
        nodes::AddressMatch,
        pods::{DestinationPod, PodMatch},
    },
};
use causeway_certs::NodeName;
use causeway_tunnel::{Target, target};
use std::net::{IpAddr, SocketAddr};

/// Input of routing, from a stream's connection, listener and head.
#[derive(Clone, Debug, Default)]
pub struct RouteInput<'a> {
    /// Server name of the ClientHello.
    pub sni: Option<&'a str>,
    /// Destination before DNAT.
    pub original: Option<SocketAddr>,
    /// Fixed node of the listener.
    pub fixed: Option<&'a NodeName>,
    /// Node port of the requests to the listener.
    pub port: Option<u16>,
    /// Host, `:authority` or CONNECT authority.
    pub authority: Option<&'a str>,
    /// Use of the names of services.
    pub services: ServiceNames,
    /// Whether names of pods, `POD.NAMESPACE.pod`, lead to pods.
    pub has_pod_names: bool,
    /// Names of the listener itself, which are not names of services or pods.
    pub own_names: &'a [String],
    /// Whether the listener is a proxy, whose clients send the target in the request.
    pub is_proxy: bool,
}

impl RouteInput<'_> {
    fn is_own_name(&self, host: &str) -> bool {
        let host = host.strip_suffix('.').unwrap_or(host);
        let mut names = self.own_names.iter();
        names.any(|name| name.eq_ignore_ascii_case(host))
    }
}

/// Use of the names of services, `SERVICE.NODE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceNames {
    /// Such a name is an ordinary one, because the listener serves certain nodes.
    #[default]
    Ordinary,
    /// Such a name means the service. A port beside it is the one at which the client has reached the gateway.
    Service,
    /// Such a name means the service, and a port beside it has to be the port of the service.
    ServiceAndPort,
}

/// Node and target of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The node.
    pub node: NodeName,
    /// Target that its edge dials: the node itself by its name, one of its services, or a pod's address.
    pub target: Target,
    /// Pod that has the address in the target, for the policy. It stays the same while the stream is open.
    pub pod: DestinationPod,
}

impl Route {
    /// Returns the route to a target that no Pod object names.
    pub fn new(node: NodeName, target: Target) -> Self {
        Self {
            node,
            target,
            pod: DestinationPod::None,
        }
    }

    /// Finds the pod to which the route leads.
    pub(crate) fn with_pod(mut self, nodes: &Nodes) -> Self {
        if self.is_to_pod()
            && let Some(address) = self.target.ip()
        {
            self.pod = nodes.destination_pod(address, Some(&self.node));
        }
        self
    }

    /// Checks that the address still belongs to the pod that was authorized.
    ///
    /// # Errors
    /// [`Reason::NodeUnknown`], or [`Reason::DependencyUnavailable`] if the pods are not known any more.
    pub(super) fn check_same_pod(&self, nodes: &Nodes) -> Result<(), Error> {
        let Some(address) = self.target.ip().filter(|_| self.is_to_pod()) else {
            return Ok(());
        };
        // Rules permit an unknown pod only if they permit every pod, so it may be known now: the table of this gateway may be
        // later than that of the gateway which forwards.
        if matches!(
            self.pod,
            DestinationPod::Unknown | DestinationPod::Undecided(_)
        ) {
            return Ok(());
        }
        match nodes.destination_pod(address, Some(&self.node)) {
            current if current == self.pod => Ok(()),
            DestinationPod::Undecided(reason) => {
                Err(Reason::DependencyUnavailable.error(reason.to_string()))
            }
            _ => Err(changed_pod_error(address)),
        }
    }

    /// Returns the service of the node, if the route leads to one.
    pub fn service(&self) -> Option<&str> {
        self.target.service_of(self.node.as_str())
    }

    /// Whether the route leads to a pod by its address.
    pub(super) fn is_to_pod(&self) -> bool {
        *self.target.host != *self.node.as_str() && self.target.ip().is_some()
    }

    /// Returns the port of the node or pod; `None` for a service, of which only the edge knows the port.
    pub fn port(&self) -> Option<u16> {
        self.service().is_none().then_some(self.target.port)
    }
}

/// Source of a connection's node, with the service if the source names one.
struct Binding {
    node: NodeName,
    service: Option<String>,
    /// Address of the pod whose name the source is.
    pod: Option<IpAddr>,
    source: &'static str,
}

/// Returns the node that the connection or the listener names before HTTP is parsed.
pub fn bound_node(input: &RouteInput<'_>, nodes: &Nodes) -> Option<NodeName> {
    find_binding(input, nodes)
        .ok()
        .flatten()
        .map(|binding| binding.node)
}

/// Returns the node that the authority names; `None` also if the authority is invalid or has several meanings.
pub(super) fn authority_node(input: &RouteInput<'_>, nodes: &Nodes) -> Option<NodeName> {
    match_authority(input, input.authority?, nodes).ok()?.node
}

/// Meaning of an authority.
#[derive(Debug)]
struct AuthorityMatch {
    node: Option<NodeName>,
    /// Address of a pod, which the edge dials unchanged.
    pod: Option<IpAddr>,
    port: Option<u16>,
    /// Whether an address, rather than a name, names the node or one of its pods.
    is_by_address: bool,
}

/// Returns the route of a stream.
///
/// # Errors
/// [`Reason::NodeUnknown`], [`Reason::Misdirected`] or [`Reason::Malformed`], with the names.
pub fn find_route(input: &RouteInput<'_>, nodes: &Nodes) -> Result<Route, Error> {
    check_original_pod(input, nodes)?;
    let authority_match = input
        .authority
        .map(|text| match_authority(input, text, nodes))
        .transpose()?;
    let named_node = authority_match
        .as_ref()
        .and_then(|meant| meant.node.clone());
    let binding = find_binding(input, nodes)?;
    if named_node.is_none()
        && let Some(route) = find_service_route(input, binding.as_ref(), nodes)?
    {
        return Ok(route);
    }
    let is_named = named_node.is_some()
        && authority_match
            .as_ref()
            .is_some_and(|meant| !meant.is_by_address);
    if binding.is_none() && !is_named {
        check_nodes_loaded(nodes)?;
    }
    let named_pod = authority_match.as_ref().and_then(|meant| meant.pod);
    let bound_pod = binding.as_ref().and_then(|binding| binding.pod);
    let node = match (binding, named_node.clone()) {
        (Some(binding), Some(other))
            if binding.node != other
                || binding.service.is_some()
                || bound_pod.is_some_and(|bound| {
                    named_pod.is_none_or(|named| !nodes.is_same_pod(bound, named))
                }) =>
        {
            return Err(contradiction(input, &binding, other.as_str()));
        }
        (Some(Binding { node, .. }), _) | (None, Some(node)) => node,
        (None, None) => return Err(unknown_node_error(input)),
    };
    let own_match = authority_match.filter(|_| named_node.is_some());
    let port = own_match
        .as_ref()
        .and_then(|meant| meant.port)
        .or(input.original.map(|address| address.port()))
        .or(input.port)
        .ok_or_else(|| {
            Reason::Malformed.error(format!(
                "the request names no port of {node}; write {node}:<port>"
            ))
        })?;
    let target = match named_pod
        .or(bound_pod)
        .or_else(|| pod_destination(input.original, &node, nodes))
    {
        Some(pod) => Target::new(pod.to_string(), port),
        None => Target::new(&node, port),
    };
    Ok(Route::new(node, target).with_pod(nodes))
}

/// Returns the route to a service, if the SNI or the authority names one, and the authority names no node.
fn find_service_route(
    input: &RouteInput<'_>,
    binding: Option<&Binding>,
    nodes: &Nodes,
) -> Result<Option<Route>, Error> {
    if input.services == ServiceNames::Ordinary {
        return Ok(None);
    }
    let authority = input
        .authority
        .and_then(|text| target::split_host_port(text).ok());
    let named = authority.filter(|(host, _)| !input.is_own_name(host));
    let named = named.and_then(|(host, port)| Some((nodes.service_by_name(host)?, port)));
    match (binding, named) {
        (Some(binding), Some(((node, service), _)))
            if binding.node != node
                || binding.service.as_ref().is_some_and(|own| *own != service) =>
        {
            Err(contradiction(input, binding, &format!("{service}.{node}")))
        }
        // The node itself was named before. It may serve such a host.
        (Some(Binding { service: None, .. }), _) | (None, None) => Ok(None),
        (
            Some(Binding {
                node,
                service: Some(service),
                ..
            }),
            None,
        ) => Ok(Some(service_route(node, service, None))),
        (_, Some(((node, service), port))) => {
            let port = port.filter(|_| input.services == ServiceNames::ServiceAndPort);
            Ok(Some(service_route(&node, &service, port)))
        }
    }
}

fn service_route(node: &NodeName, service: &str, port: Option<u16>) -> Route {
    Route::new(node.clone(), Target::service(service, node.as_str(), port))
}

/// Returns the error of a request whose sources name different nodes or services.
fn contradiction(input: &RouteInput<'_>, binding: &Binding, other: &str) -> Error {
    let Binding { node, source, .. } = binding;
    let bound = match (&binding.service, binding.pod) {
        (Some(service), _) => format!("{service}.{node}"),
        (None, Some(_)) => format!("a pod of {node}"),
        (None, None) => node.to_string(),
    };
    let host = input.authority.unwrap_or_default();
    Reason::Misdirected.error(format!(
        "{source} names {bound}, and the Host {host:?} names {other}; one of them is wrong"
    ))
}

/// Returns the node that the connection or the listener is bound to, and the source of that binding.
fn find_binding(input: &RouteInput<'_>, nodes: &Nodes) -> Result<Option<Binding>, Error> {
    let to_node = |source| {
        move |node| Binding {
            node,
            service: None,
            pod: None,
            source,
        }
    };
    if let Some(node) = input.sni.and_then(|name| nodes.by_name(name)) {
        return Ok(Some(to_node("the SNI")(node)));
    }
    if let Some(binding) = find_pod_binding(input, nodes)? {
        return Ok(Some(binding));
    }
    if let Some(original) = input.original {
        check_nodes_loaded(nodes)?;
        if let Some(node) = match_address(original.ip(), nodes)?.node {
            return Ok(Some(to_node("the original destination")(node)));
        }
    }
    let fixed = input.fixed.cloned().map(to_node("this listener"));
    Ok(fixed.or_else(|| find_service_binding(input, nodes)))
}

/// Checks that the original destination is not an address of pods that no pod, or no known one, has.
fn check_original_pod(input: &RouteInput<'_>, nodes: &Nodes) -> Result<(), Error> {
    match input.original {
        Some(original) if nodes.is_pod_address(original.ip()) => {
            match_address(original.ip(), nodes).map(drop)
        }
        _ => Ok(()),
    }
}

/// Returns the pod that the SNI names.
fn find_pod_binding(input: &RouteInput<'_>, nodes: &Nodes) -> Result<Option<Binding>, Error> {
    // The SNI of a client of a proxy is the name of the gateway.
    let is_read = input.has_pod_names && !input.is_proxy;
    let Some(sni) = input.sni.filter(|sni| is_read && !input.is_own_name(sni)) else {
        return Ok(None);
    };
    Ok(find_pod(sni, nodes)?.map(|(node, address)| Binding {
        node,
        service: None,
        pod: Some(address),
        source: "the SNI",
    }))
}

/// Returns the edge node and the address of the pod with this name; `None` if the name is not that of a pod, or the pod is on a node
/// that is not at the edge.
fn find_pod(name: &str, nodes: &Nodes) -> Result<Option<(NodeName, IpAddr)>, Error> {
    match nodes.pod_by_name(name) {
        None | Some(PodMatch::Elsewhere(_)) => Ok(None),
        Some(PodMatch::Pod(node, address)) => Ok(Some((node, address))),
        Some(PodMatch::Unknown) => Err(unknown_pod_error(name)),
        Some(PodMatch::Undecided(reason)) => {
            Err(Reason::DependencyUnavailable.error(reason.to_string()))
        }
    }
}

/// Returns the error of a stream whose address has another pod than the one that was authorized.
pub(super) fn changed_pod_error(address: IpAddr) -> Error {
    Reason::NodeUnknown.error(format!(
        "{address} belongs to another pod than a moment ago; try again"
    ))
}

fn unknown_pod_error(host: &str) -> Error {
    Reason::NodeUnknown.error(format!(
        "no running pod of a known node has {host}, or several pods have the same address"
    ))
}

/// Whether a source of the route can only mean a pod, which need not exist.
pub(super) fn names_pod(input: &RouteInput<'_>, nodes: &Nodes) -> bool {
    let authority = input
        .authority
        .and_then(|text| target::split_host_port(text).ok());
    let hosts = [input.sni, authority.map(|(host, _)| host)];
    let is_pod = |host: &str| match host.parse() {
        Ok(address) => nodes.is_pod_address(address),
        Err(_) => nodes.is_pod_name(host),
    };
    nodes.follows_pods()
        && (hosts.into_iter().flatten().any(is_pod)
            || input
                .original
                .is_some_and(|original| nodes.is_pod_address(original.ip())))
}

/// Checks that the gateway itself may dial this address, which no name or address of a node means. Within the networks of pods it
/// dials only pods that are known to be elsewhere.
///
/// # Errors
/// [`Reason::NodeUnknown`], or [`Reason::DependencyUnavailable`] while the pods are not known.
pub(super) fn check_pod_elsewhere(address: IpAddr, nodes: &Nodes) -> Result<(), Error> {
    if !nodes.is_pod_address(address) {
        return Ok(());
    }
    match match_address(address, nodes)?.node {
        None => Ok(()),
        Some(node) => Err(Reason::NodeUnknown.error(format!(
            "{address} is a pod of {node}; use the address of the pod, or its name, as the target"
        ))),
    }
}

/// Returns the service that the SNI names.
fn find_service_binding(input: &RouteInput<'_>, nodes: &Nodes) -> Option<Binding> {
    let is_read = match input.services {
        ServiceNames::Ordinary => false,
        ServiceNames::Service => true,
        // The SNI of a client of a proxy is the name of the gateway.
        ServiceNames::ServiceAndPort => !input.is_proxy,
    };
    let sni = input.sni.filter(|sni| is_read && !input.is_own_name(sni))?;
    let (node, service) = nodes.service_by_name(sni)?;
    Some(Binding {
        node,
        service: Some(service),
        pod: None,
        source: "the SNI",
    })
}

fn match_authority(
    input: &RouteInput<'_>,
    authority: &str,
    nodes: &Nodes,
) -> Result<AuthorityMatch, Error> {
    let (host, port) = target::split_host_port(authority).map_err(|why| {
        Reason::Malformed.error(format!("{authority:?} is not a valid target: {why}"))
    })?;
    if let Some(node) = nodes.by_name(host) {
        return Ok(AuthorityMatch {
            node: Some(node),
            pod: None,
            port,
            is_by_address: false,
        });
    }
    if let Ok(address) = host.parse() {
        return match_address(address, nodes).map(|meant| AuthorityMatch { port, ..meant });
    }
    let is_read = input.has_pod_names && !input.is_own_name(host);
    let pod = if is_read {
        find_pod(host, nodes)?
    } else {
        None
    };
    let (node, pod) = pod.unzip();
    Ok(AuthorityMatch {
        node,
        pod,
        port,
        is_by_address: false,
    })
}

fn match_address(address: IpAddr, nodes: &Nodes) -> Result<AuthorityMatch, Error> {
    let (node, pod) = match nodes.by_address(address) {
        AddressMatch::Node(node) => (Some(node), None),
        AddressMatch::Pod(node) => (Some(node), Some(address.to_canonical())),
        AddressMatch::Unknown => (None, None),
        AddressMatch::NoPod => return Err(unknown_pod_error(&address.to_string())),
        AddressMatch::Undecided(reason) => {
            return Err(Reason::DependencyUnavailable.error(reason.to_string()));
        }
        AddressMatch::Several(several) => {
            let names: Vec<_> = several.iter().map(NodeName::as_str).collect();
            return Err(Reason::Misdirected.error(format!(
                "{address} is an address of several nodes ({}); use the name of the node",
                names.join(", ")
            )));
        }
    };
    Ok(AuthorityMatch {
        node,
        pod,
        port: None,
        is_by_address: true,
    })
}

/// Returns an error while the nodes of the cluster are not loaded. An address without a node may be an edge's, and an address in
/// a record may belong to another node.
fn check_nodes_loaded(nodes: &Nodes) -> Result<(), Error> {
    match nodes.pending_reason() {
        Some(reason) => Err(Reason::DependencyUnavailable.error(reason.to_string())),
        None => Ok(()),
    }
}

/// Returns the original destination, if it is a pod of this node.
fn pod_destination(original: Option<SocketAddr>, node: &NodeName, nodes: &Nodes) -> Option<IpAddr> {
    let address = original?.ip();
    let is_own_pod =
        matches!(nodes.by_address(address), AddressMatch::Pod(holder) if holder == *node);
    is_own_pod.then(|| address.to_canonical())
}

fn unknown_node_error(input: &RouteInput<'_>) -> Error {
    let candidates: Vec<String> = [
        input.sni.map(|name| format!("SNI {name:?}")),
        input
            .original
            .map(|address| format!("original destination {address}")),
        input.authority.map(|text| format!("Host {text:?}")),
    ]
    .into_iter()
    .flatten()
    .collect();
    if candidates.is_empty() {
        return Reason::Malformed.error("neither SNI, original destination nor Host names a node");
    }
    Reason::NodeUnknown.error(format!("no node matches {}", candidates.join(" or ")))
}

#[cfg(test)]
mod tests;
