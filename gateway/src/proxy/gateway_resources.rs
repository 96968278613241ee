//! Resources of the gateway itself at `connect` listeners: the nodes that a client may reach, and the gateway's CAs.
//!
//! A `connect` listener serves no upstream by a path, so these paths hide none. A request for an `http://` target is meant for
//! another host and is never served here. A request for an `https://` target is one to the gateway itself in HTTP/2, whose
//! requests always contain scheme and authority (RFC 9113 §8.3.1); a proxy gets a CONNECT for such targets. The gateway is the
//! origin server of these resources and no proxy: their clients authenticate by `Authorization`. A client that the listener does
//! not admit receives only the CAs, which are public.
//!
//! A web page whose name resolves to the address of the listener (DNS rebinding) has no credential and no certificate of the
//! listener's name. So an anonymous client without TLS receives the lists only under a name of the listener.

use super::{
    Proxy,
    access_log::AccessRecord,
    authn::{AuthMethod, ClientIdentity},
    authz::{Action, AuthzDecision, AuthzRequest, Destination},
    listener::{ClientConnection, Listener},
    response_body::ResponseBody,
    route::Route,
};
use crate::{
    config::ListenerProtocol,
    error::{Error, Reason},
    state::{TargetGroup, directory::HeldState, target_group},
};
use causeway_certs::NodeName;
use causeway_tunnel::{Target, control_stream::EdgeHello};
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version,
    header::{AUTHORIZATION, CONTENT_TYPE, HOST},
    uri::Scheme,
};
use serde::{Serialize, Serializer};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// Number of decisions after which other tasks of the worker run.
const DECISIONS_PER_TURN: usize = 256;

/// Resource of the gateway.
#[derive(Clone, Debug)]
pub(super) enum GatewayResource {
    /// The nodes that the client may reach.
    Nodes,
    /// The same as targets for the HTTP service discovery of Prometheus, with the query of the request.
    ServiceDiscovery(Option<String>),
    /// The CAs that verify the listener's certificate.
    Ca(Arc<str>),
}

impl GatewayResource {
    /// Returns the resource that a request asks for, if it asks for one. The method may be wrong.
    pub(super) fn find<B>(request: &Request<B>, listener: &Listener) -> Option<Self> {
        let uri = request.uri();
        let is_for_gateway = match request.version() {
            Version::HTTP_2 => uri.scheme() == Some(&Scheme::HTTPS),
            _ => uri.authority().is_none(),
        };
        let is_own = listener.protocol == ListenerProtocol::Connect && is_for_gateway;
        match request.uri().path() {
            _ if !is_own => None,
            "/.well-known/causeway/nodes" if listener.has_node_list => Some(Self::Nodes),
            "/.well-known/causeway/http_sd" if listener.has_node_list => {
                Some(Self::ServiceDiscovery(uri.query().map(str::to_owned)))
            }
            "/.well-known/causeway/ca.pem" => {
                let tls = listener.tls.as_ref()?.load();
                tls.client_roots.clone().map(Self::Ca)
            }
            _ => None,
        }
    }
}

/// Nodes that a client may reach, as JSON.
#[derive(Debug, Serialize)]
struct NodeList<'a> {
    /// Name of the client.
    client: &'a str,
    nodes: Vec<ReachableNode>,
}

/// Node that a client may reach.
#[derive(Debug, Serialize)]
struct ReachableNode {
    node: NodeName,
    /// Whether the node has a tunnel to this gateway or to another one.
    connected: bool,
    #[serde(flatten)]
    targets: ReachableTargets,
    /// Confirmed pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    /// Confirmed labels.
    labels: BTreeMap<String, String>,
}

/// Ports and services that an edge reports and that a client may reach.
#[derive(Debug, Default, Serialize)]
struct ReachableTargets {
    ports: Vec<u16>,
    /// Whether the client may open a TCP session to some port, rather than only send it some requests.
    connect: bool,
    /// Port of each service. The list of nodes has the names only.
    #[serde(
        skip_serializing_if = "BTreeMap::is_empty",
        serialize_with = "serialize_keys"
    )]
    services: BTreeMap<String, u16>,
}

fn serialize_keys<S: Serializer>(map: &BTreeMap<String, u16>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(map.keys())
}

impl Proxy {
    /// Serves a resource of the gateway.
    ///
    /// # Errors
    /// [`Reason::MethodNotAllowed`], [`Reason::Unauthenticated`], [`Reason::Misdirected`], or
    /// [`Reason::DependencyUnavailable`] if the policy cannot decide yet.
    pub(super) async fn serve_resource(
        &self,
        resource: GatewayResource,
        (connection, method, fields): (&ClientConnection, &Method, &HeaderMap),
        record: &AccessRecord,
    ) -> Result<Response<ResponseBody>, Error> {
        if method != Method::GET {
            let detail = "this resource of the gateway is served to GET only";
            return Err(Reason::MethodNotAllowed.error(detail));
        }
        let query = match resource {
            GatewayResource::Ca(text) => {
                return Ok(respond(record, "application/x-pem-file", text.to_string()));
            }
            GatewayResource::Nodes => None,
            GatewayResource::ServiceDiscovery(query) => Some(query),
        };
        // An anonymous client may reach some ports of nodes only. The lists have no others.
        let port = self.listener.authentication.anonymous_ports.first();
        let client = self
            .identify(connection, fields.get(AUTHORIZATION), port.copied())
            .await?;
        record.set_client(&client);
        if client.method == AuthMethod::Anonymous && !connection.tls {
            check_host(&self.listener, fields)?;
        }
        self.admit_client(&client, record)?;
        let text = if let Some(query) = query {
            let port = target_group::requested_port(query.as_deref());
            let port = port.map_err(|why| Reason::Malformed.error(why))?;
            let nodes = self.reachable_nodes((connection, &client), port).await?;
            let groups = |row: &ReachableNode| {
                let data = self.shared.nodes.get(&row.node).unwrap_or_default();
                let ReachableTargets {
                    ports, services, ..
                } = &row.targets;
                let services = services.iter().map(|(name, port)| (name.as_str(), *port));
                TargetGroup::for_node((&row.node, &data), ports, services)
            };
            serde_json::to_string(&nodes.iter().flat_map(groups).collect::<Vec<_>>())
        } else {
            let nodes = self.reachable_nodes((connection, &client), None).await?;
            let client = &client.name;
            serde_json::to_string(&NodeList { client, nodes })
        };
        let text = text.map_err(|error| Reason::DependencyUnavailable.error(error.to_string()))?;
        Ok(respond(record, "application/json", text))
    }

    /// Returns the nodes of which the client may reach a port or a service, in the order of their names. Without `port`, these
    /// are the ports and services that edges report to this gateway.
    async fn reachable_nodes(
        &self,
        from: (&ClientConnection, &ClientIdentity),
        port: Option<u16>,
    ) -> Result<Vec<ReachableNode>, Error> {
        let registry = &self.shared.registry;
        let mut names: BTreeSet<_> = self.shared.nodes.names().into_iter().collect();
        let mut hellos: BTreeMap<NodeName, Arc<EdgeHello>> = BTreeMap::new();
        registry.for_each_tunnel(|node, tunnel| {
            hellos.insert(node.clone(), tunnel.tunnel.hello.clone());
        });
        names.extend(hellos.keys().cloned());
        for peer in registry.directory().peers().iter() {
            names.extend(peer.node_names());
        }
        let samples = self.sample_targets();
        let mut search = TargetSearch {
            proxy: self,
            from,
            port,
            decisions: 0,
        };
        let mut reachable = Vec::new();
        for node in names {
            // A listener for one node refuses all others.
            if self
                .listener
                .node
                .as_ref()
                .is_some_and(|only| *only != node)
            {
                continue;
            }
            let hello = hellos.remove(&node);
            let found = search.find_targets(&node, hello.as_deref(), &samples);
            let Some(targets) = found.await? else {
                continue;
            };
            let data = self.shared.nodes.get(&node).unwrap_or_default();
            if data.revoked.is_none() {
                reachable.push(ReachableNode {
                    connected: self.is_connected(&node),
                    targets,
                    pool: data.pool,
                    labels: data.labels,
                    node,
                });
            }
        }
        Ok(reachable)
    }

    /// Returns ports and services for nodes that report none.
    fn sample_targets(&self) -> (Vec<u16>, Vec<String>) {
        let authorizer = &self.shared.authorizer;
        let mut ports = authorizer.sample_ports();
        ports.extend(&self.listener.authentication.anonymous_ports);
        (ports, authorizer.sample_services())
    }

    fn is_connected(&self, node: &NodeName) -> bool {
        let registry = &self.shared.registry;
        let holders = || registry.directory().holders(node);
        registry.has_tunnel(node)
            || holders()
                .iter()
                .any(|(_, state)| *state == HeldState::Connected)
    }
}

/// Checks that an anonymous request names the listener. A request of HTTP/1.0 without a `Host` comes from no browser.
fn check_host(listener: &Listener, fields: &HeaderMap) -> Result<(), Error> {
    let host = fields.get(HOST).map(HeaderValue::to_str);
    let host = host.map(Result::unwrap_or_default);
    if host.is_none_or(|host| listener.is_own_host(host)) {
        return Ok(());
    }
    let detail = "without TLS and a credential, this resource of the gateway is served only under an address, localhost or a \
        name in names of the listener";
    Err(Reason::Misdirected.error(detail))
}

/// Way in which a client may reach a target.
#[derive(Clone, Copy)]
enum Access {
    /// By some request.
    Any,
    /// By a TCP session.
    Session,
}

/// Search for the ports and services of nodes that a client may reach.
struct TargetSearch<'a> {
    proxy: &'a Proxy,
    from: (&'a ClientConnection, &'a ClientIdentity),
    /// The only port of interest, if the client names one.
    port: Option<u16>,
    /// Number of decisions so far.
    decisions: usize,
}

impl TargetSearch<'_> {
    /// Returns the ports and services of a node that the client may reach, of those that its edge reports in `hello`. `None`
    /// means that the client may reach nothing there, and none of the samples if the edge reports nothing.
    async fn find_targets(
        &mut self,
        node: &NodeName,
        hello: Option<&EdgeHello>,
        (sample_ports, sample_services): &(Vec<u16>, Vec<String>),
    ) -> Result<Option<ReachableTargets>, Error> {
        let mut targets = ReachableTargets::default();
        if let Some(port) = self.port {
            targets.ports.push(port);
            let is_reachable = self.may_reach(Access::Any, node, Target::new(node, port));
            return Ok(is_reachable.await?.then_some(targets));
        }
        for port in hello.iter().flat_map(|hello| &hello.ports) {
            let target = Target::new(node, *port);
            if self.may_reach(Access::Any, node, target.clone()).await? {
                targets.ports.push(*port);
                targets.connect |=
                    !targets.connect && self.may_reach(Access::Session, node, target).await?;
            }
        }
        let service_target = |service: &str| Target::service(service, node.as_str(), None);
        for (service, port) in hello.iter().flat_map(|hello| hello.services()) {
            if self.proxy.shared.nodes.hides_service(service, node) {
                continue;
            }
            let target = service_target(service);
            if self.may_reach(Access::Any, node, target).await? {
                targets.services.insert(service.to_owned(), port);
            }
        }
        let mut is_reachable = !targets.ports.is_empty() || !targets.services.is_empty();
        // An edge may serve ports that it does not report, and a node that is away reports nothing.
        let has_no_port = hello.is_none_or(|hello| hello.ports.is_empty());
        for port in sample_ports.iter().filter(|_| has_no_port) {
            let target = Target::new(node, *port);
            is_reachable =
                is_reachable || self.may_reach(Access::Any, node, target.clone()).await?;
            targets.connect =
                targets.connect || self.may_reach(Access::Session, node, target).await?;
            if targets.connect {
                break;
            }
        }
        let reports_none = hello.is_none_or(|hello| hello.service_ports.is_none());
        for service in sample_services.iter().filter(|_| reports_none) {
            let target = service_target(service);
            is_reachable = is_reachable || self.may_reach(Access::Any, node, target).await?;
        }
        Ok(is_reachable.then_some(targets))
    }

    /// Whether the client may reach a target of a node. A decision that another service makes counts as a refusal here. The
    /// review of kubelet ports by the cluster's API happens at each request only.
    async fn may_reach(
        &mut self,
        access: Access,
        node: &NodeName,
        target: Target,
    ) -> Result<bool, Error> {
        self.decisions += 1;
        if self.decisions.is_multiple_of(DECISIONS_PER_TURN) {
            tokio::task::yield_now().await;
        }
        let Proxy {
            shared, listener, ..
        } = self.proxy;
        let (connection, client) = self.from;
        let route = Route::new(node.clone(), target);
        if client.method == AuthMethod::Anonymous
            && !listener.authentication.serves_anonymously(route.port())
        {
            return Ok(false);
        }
        let connect = AuthzRequest {
            client,
            remote_address: connection.peer,
            destination: Destination::Node(&route),
            action: Action::Connect,
            method: &Method::CONNECT,
            path: "",
        };
        let decision = match access {
            Access::Any => shared.authorizer.authorize_destination(&connect),
            Access::Session => shared.authorizer.authorize(&connect),
        };
        match decision {
            AuthzDecision::DependencyUnavailable(why) => {
                Err(Reason::DependencyUnavailable.error(why))
            }
            decision => Ok(decision.is_allowed()),
        }
    }
}

fn respond(
    record: &AccessRecord,
    content_type: &'static str,
    text: String,
) -> Response<ResponseBody> {
    record.response_started(StatusCode::OK);
    let mut response = Response::new(ResponseBody::text(text));
    let content_type = HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}
