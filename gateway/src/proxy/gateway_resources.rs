//! Resources of the gateway itself at `connect` listeners: the nodes that a client may reach, and the gateway's CAs.
//!
//! A `connect` listener serves no upstream by a path, so these paths hide none. A request for an `http://` target is meant for another
//! host and is never served here. A request for an `https://` target is one to the gateway itself in HTTP/2, whose requests always
//! contain scheme and authority (RFC 9113 §8.3.1); a proxy gets a CONNECT for such targets. A client that the listener does not admit receives only the CAs, which are public.

use super::{
    Proxy,
    access_log::AccessRecord,
    authn::ClientIdentity,
    authz::{Action, AuthzDecision, AuthzRequest, Destination},
    listener::{ClientConnection, Listener},
    response_body::ResponseBody,
    route::Route,
};
use crate::{
    config::ListenerProtocol,
    error::{Error, Reason},
    state::{TargetGroup, directory::HeldState, policy::Decision, target_group},
};
use causeway_certs::NodeName;
use causeway_tunnel::Target;
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Version, header::CONTENT_TYPE, uri::Scheme,
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// Number of nodes after which other tasks of the worker run.
const NODES_PER_TURN: usize = 128;

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
    /// Returns the resource that a request asks for, if it asks for one.
    pub(super) fn find<B>(request: &Request<B>, listener: &Listener) -> Option<Self> {
        let uri = request.uri();
        let is_for_gateway = match request.version() {
            Version::HTTP_2 => uri.scheme() == Some(&Scheme::HTTPS),
            _ => uri.authority().is_none(),
        };
        let is_own = listener.protocol == ListenerProtocol::Connect
            && request.method() == Method::GET
            && is_for_gateway;
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
    /// Ports that the edge reports and that the client may reach.
    ports: Vec<u16>,
    /// Confirmed pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    /// Confirmed labels.
    labels: BTreeMap<String, String>,
}

impl Proxy {
    /// Serves a resource of the gateway.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`], or [`Reason::DependencyUnavailable`] if the policy cannot decide yet.
    pub(super) async fn serve_resource(
        &self,
        resource: GatewayResource,
        (connection, credential): (&ClientConnection, Option<&HeaderValue>),
        record: &AccessRecord,
    ) -> Result<Response<ResponseBody>, Error> {
        let query = match resource {
            GatewayResource::Ca(text) => {
                return Ok(respond(record, "application/x-pem-file", text.to_string()));
            }
            GatewayResource::Nodes => None,
            GatewayResource::ServiceDiscovery(query) => Some(query),
        };
        let client = self.identify(connection, credential, None).await?;
        record.set_client(&client);
        self.admit_client(&client, record)?;
        let text = if let Some(query) = query {
            let port = target_group::requested_port(query.as_deref());
            let port = port.map_err(|why| Reason::Malformed.error(why))?;
            let nodes = self.reachable_nodes((connection, &client), port).await?;
            let group = |row: &ReachableNode| {
                let data = self.shared.nodes.get(&row.node).unwrap_or_default();
                TargetGroup::new(&row.node, &row.ports, &data)
            };
            serde_json::to_string(&nodes.iter().filter_map(group).collect::<Vec<_>>())
        } else {
            let nodes = self.reachable_nodes((connection, &client), None).await?;
            let client = &client.name;
            serde_json::to_string(&NodeList { client, nodes })
        };
        let text = text.map_err(|error| Reason::DependencyUnavailable.error(error.to_string()))?;
        Ok(respond(record, "application/json", text))
    }

    /// Returns the nodes of which the client may reach a port, in the order of their names. Without `port`, these are the ports that
    /// edges report to this gateway.
    async fn reachable_nodes(
        &self,
        (connection, client): (&ClientConnection, &ClientIdentity),
        port: Option<u16>,
    ) -> Result<Vec<ReachableNode>, Error> {
        let registry = &self.shared.registry;
        let mut names: BTreeSet<_> = self.shared.nodes.names().into_iter().collect();
        let mut ports: BTreeMap<NodeName, Vec<u16>> = BTreeMap::new();
        registry.for_each_tunnel(|node, tunnel| {
            ports.insert(node.clone(), tunnel.tunnel.hello.ports.clone());
        });
        names.extend(ports.keys().cloned());
        for peer in registry.directory().peers().iter() {
            names.extend(peer.node_names());
        }
        let sample_ports = self.shared.authorizer.sample_ports();
        let mut reachable = Vec::new();
        for (index, node) in names.into_iter().enumerate() {
            if index % NODES_PER_TURN == NODES_PER_TURN - 1 {
                tokio::task::yield_now().await;
            }
            // A listener for one node refuses all others.
            if self
                .listener
                .node
                .as_ref()
                .is_some_and(|only| *only != node)
            {
                continue;
            }
            let reported = match port {
                Some(port) => vec![port],
                None => ports.remove(&node).unwrap_or_default(),
            };
            let may_reach = |port: &u16| self.may_connect(connection, client, (&node, *port));
            let data = self.shared.nodes.get(&node).unwrap_or_default();
            let mut allowed = Vec::new();
            for port in &reported {
                if may_reach(port)? {
                    allowed.push(*port);
                }
            }
            let mut is_reachable = !allowed.is_empty();
            // An edge may serve ports that it does not report, and a node that is away reports none.
            for port in sample_ports.iter().filter(|_| reported.is_empty()) {
                is_reachable = is_reachable || may_reach(port)?;
            }
            if is_reachable && data.revoked.is_none() {
                reachable.push(ReachableNode {
                    connected: self.is_connected(&node),
                    ports: allowed,
                    pool: data.pool,
                    labels: data.labels,
                    node,
                });
            }
        }
        Ok(reachable)
    }

    fn is_connected(&self, node: &NodeName) -> bool {
        let registry = &self.shared.registry;
        let holders = || registry.directory().holders(node);
        registry.has_tunnel(node)
            || holders()
                .iter()
                .any(|(_, state)| *state == HeldState::Connected)
    }

    /// Whether the authorizer lets the client connect to a port of a node. A decision that another service makes counts as a
    /// refusal here. The review of kubelet ports by the cluster's API happens at each request only.
    fn may_connect(
        &self,
        connection: &ClientConnection,
        client: &ClientIdentity,
        (node, port): (&NodeName, u16),
    ) -> Result<bool, Error> {
        let route = Route::new(node.clone(), Target::new(node, port));
        let request = AuthzRequest {
            client,
            remote_address: connection.peer,
            destination: Destination::Node(&route),
            action: Action::Connect,
            method: &Method::CONNECT,
            path: "",
        };
        match self.shared.authorizer.authorize(&request) {
            AuthzDecision::Allow | AuthzDecision::Policy(Decision { allow: true, .. }) => Ok(true),
            AuthzDecision::Deny(_) | AuthzDecision::Policy(_) | AuthzDecision::Pending(_) => {
                Ok(false)
            }
            AuthzDecision::DependencyUnavailable(why) => {
                Err(Reason::DependencyUnavailable.error(why))
            }
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
