//! Step 3b: the member of a listener's node set that serves a connection or a request.
//!
//! The worker that accepts a connection chooses a member, and the socket moves to the member's worker. An HTTP connection keeps
//! its member as long as that is available. A client that may not reach the chosen member gets another one, if there is one that
//! it may reach. A stream whose target cannot be reached goes to the next member, provided that no server has received any of it.

use super::{
    Proxy, StreamContext,
    access_log::AccessRecord,
    authn::ClientIdentity,
    authz::{Action, AuthzDecision, AuthzRequest, Destination},
    listener::ClientConnection,
    request::is_repeatable,
    request_body::RequestBody,
    response_body::ResponseBody,
    route::{self, Route, RouteInput},
};
use crate::{
    error::{Error, Reason},
    state::{NodeSet, policy::Decision, registry::NodeRank},
};
use causeway_certs::NodeName;
use causeway_tunnel::{StreamKind, Target, informational::ExchangeId};
use futures_util::{StreamExt, stream::FuturesUnordered};
use http::{Request, Response};
use http_body::Body;
use std::{pin::pin, sync::Arc};
use tokio::time::Instant;

/// Maximum number of members for whose tunnels a stream waits if none is connected.
const MAX_AWAITED: usize = 8;
/// Maximum number of repetitions of a request.
const MAX_REPETITIONS: usize = 3;

impl Proxy {
    /// Returns the member with which a new connection begins, if the listener serves a set of nodes and one is available.
    pub(super) fn first_member(&self) -> Option<NodeName> {
        let set = self.listener.node_set.as_ref()?;
        set.pending_reason(&self.shared.nodes).is_none().then(|| {
            let candidates = set.candidates(
                &self.shared.nodes,
                &self.shared.registry,
                self.listener.port,
                |_| true,
            );
            candidates.into_iter().next()
        })?
    }

    /// Returns the listener's node set, if neither the connection nor the authority names a node. A route to a pod leads to the node
    /// of the pod, also if the pod has ended since.
    pub(super) fn open_node_set(&self, input: &RouteInput<'_>, route: &Route) -> Option<&NodeSet> {
        let (set, nodes) = (self.listener.node_set.as_ref()?, &self.shared.nodes);
        let is_named = route.is_to_pod()
            || route::bound_node(input, nodes).is_some()
            || route::authority_node(input, nodes).is_some();
        (!is_named).then_some(set)
    }

    /// Finds the route of a stream. At a listener for a set of nodes, a member takes the place of a fixed node: the one that the
    /// authority names, or that of the connection.
    ///
    /// # Errors
    /// As [`route::find_route`]; also if the set has no member, or the authority names a node outside the set.
    pub(super) fn find_route(
        &self,
        connection: &ClientConnection,
        input: &RouteInput<'_>,
    ) -> Result<Route, Error> {
        let nodes = &self.shared.nodes;
        let Some(set) = &self.listener.node_set else {
            return route::find_route(input, nodes);
        };
        if let Some(reason) = set.pending_reason(nodes) {
            return Err(Reason::DependencyUnavailable.error(reason.to_string()));
        }
        if let Some(bound) = route::bound_node(input, nodes) {
            if set.contains(&bound, nodes) {
                return route::find_route(input, nodes);
            }
            return Err(Reason::Misdirected.error(format!(
                "the connection is for {bound}, which is not one of the nodes of this listener"
            )));
        }
        let member = match route::authority_node(input, nodes) {
            Some(named) if set.contains(&named, nodes) => named,
            Some(other) => {
                let host = input.authority.unwrap_or_default();
                return Err(Reason::Misdirected.error(format!(
                    "the Host {host:?} names {other}, which is not one of the nodes of this listener"
                )));
            }
            None => self.current_member(set, connection).ok_or_else(|| {
                Reason::NodeNotConnected.error("no node has joined that this listener serves")
            })?,
        };
        let input = RouteInput {
            fixed: Some(&member),
            ..input.clone()
        };
        route::find_route(&input, nodes)
    }

    /// Returns the member of the connection if it is still available, else the best one. Without an available member, returns any.
    fn current_member(&self, set: &NodeSet, connection: &ClientConnection) -> Option<NodeName> {
        let (nodes, registry) = (&self.shared.nodes, &self.shared.registry);
        if let Some(member) = &*connection.member.load()
            && set.contains(member, nodes)
            && self.is_available(member)
        {
            return Some(NodeName::clone(member));
        }
        let best = set
            .candidates(nodes, registry, self.listener.port, |_| true)
            .into_iter()
            .next();
        best.or_else(|| set.members(nodes).first().cloned())
    }

    /// Returns the route to the member that serves a stream, and makes it the member of the connection: the member of `ask` if it
    /// is available and the client may reach it, else the best one of which both are true. Members in `tried` are left out. If the
    /// client may reach none that is available, returns `None`, and the authorization of `ask` says why. Waits for a member that
    /// is likely to reconnect soon.
    ///
    /// # Errors
    /// If no member is available, or all of them were tried.
    pub(super) async fn select_member(
        &self,
        set: &NodeSet,
        connection: &ClientConnection,
        ask: &AuthzRequest<'_>,
        tried: &[NodeName],
    ) -> Result<Option<Route>, Error> {
        let is_left = |name: &NodeName| !tried.contains(name) && self.may_reach(ask, name);
        let current = ask.destination.node();
        let current = current.filter(|name| self.is_available(name) && is_left(name));
        let selected = match current {
            Some(name) => name.clone(),
            None => match self.next_member(set, ask, tried).await? {
                Some(name) => name,
                None => return Ok(None),
            },
        };
        let route = member_route(ask, &selected);
        connection.member.store(Some(selected.into()));
        Ok(Some(route))
    }

    /// Returns the best member that is available, that the client may reach, and that was not tried; see
    /// [`Proxy::select_member`].
    async fn next_member(
        &self,
        set: &NodeSet,
        ask: &AuthzRequest<'_>,
        tried: &[NodeName],
    ) -> Result<Option<NodeName>, Error> {
        let (nodes, registry) = (&self.shared.nodes, &self.shared.registry);
        let port = self.listener.port;
        let is_left = |name: &NodeName| !tried.contains(name) && self.may_reach(ask, name);
        let available = set.candidates(nodes, registry, port, is_left);
        if let Some(name) = available.into_iter().next() {
            return Ok(Some(name));
        }
        if !tried.is_empty() {
            return Err(self.unavailable(set));
        }
        if !set.candidates(nodes, registry, port, |_| true).is_empty() {
            return Ok(None);
        }
        let members = set.members(nodes);
        let permitted = members.iter().filter(|name| self.may_reach(ask, name));
        let permitted: Vec<_> = permitted.take(MAX_AWAITED).collect();
        if permitted.is_empty() {
            return Ok(None);
        }
        let connected = self.wait_for_member(&permitted).await;
        connected.map(Some).ok_or_else(|| self.unavailable(set))
    }

    fn rank(&self, name: &NodeName) -> Option<NodeRank> {
        self.shared.registry.rank(name, self.listener.port)
    }

    /// Whether a member is healthy, and one of its tunnels answers and does not drain.
    fn is_available(&self, name: &NodeName) -> bool {
        self.rank(name).is_some_and(NodeRank::is_good)
    }

    /// Waits until one of these members is connected and healthy. Returns `None` if none is likely to connect soon.
    async fn wait_for_member(&self, members: &[&NodeName]) -> Option<NodeName> {
        let (registry, timeout) = (&self.shared.registry, self.shared.timeouts.reconnect);
        let permit = registry.wait_permit()?;
        let away = members.iter().filter(|name| self.rank(name).is_none());
        let waiting = away.map(async |name| {
            let selecting = registry.select_tunnel_permitted(name, timeout, &permit);
            selecting.await.ok()?;
            let rank = self.rank(name)?;
            (!rank.is_unhealthy).then(|| NodeName::clone(name))
        });
        let waiting: FuturesUnordered<_> = waiting.collect();
        let mut connected = pin!(waiting.filter_map(std::future::ready));
        connected.next().await
    }

    /// Whether the policy lets the client reach this member. A decision of another service counts as yes: it is awaited later.
    fn may_reach(&self, ask: &AuthzRequest<'_>, name: &NodeName) -> bool {
        let route = member_route(ask, name);
        match self.shared.authorizer.authorize(&ask.with_route(&route)) {
            AuthzDecision::Allow
            | AuthzDecision::Policy(Decision { allow: true, .. })
            | AuthzDecision::Pending(_) => true,
            AuthzDecision::Deny(_)
            | AuthzDecision::Policy(Decision { allow: false, .. })
            | AuthzDecision::DependencyUnavailable(_) => false,
        }
    }

    /// Returns the error of a stream for which no member is available.
    fn unavailable(&self, set: &NodeSet) -> Error {
        let (nodes, registry) = (&self.shared.nodes, &self.shared.registry);
        let count = set.members(nodes).len();
        let connected = set.connected_members(nodes, registry);
        let ranks = connected.iter().map(|name| self.rank(name));
        let nodes = if count == 1 { "node" } else { "nodes" };
        let unhealthy = ranks.flatten().filter(|rank| rank.is_unhealthy).count();
        let detail = match (unhealthy, self.listener.port) {
            (1.., Some(port)) => format!(
                "this listener serves {count} {nodes}; {unhealthy} of them fail the health check of port {port}, and none of the others is connected"
            ),
            _ => format!("this listener serves {count} {nodes}, and none is connected"),
        };
        Reason::NodeNotConnected.error(detail)
    }

    /// Sends a request to a member of the set, and to the next one if it may be repeated.
    ///
    /// # Errors
    /// As for a request to one node, or if no member is available.
    pub(super) async fn serve_by_member(
        &self,
        set: &NodeSet,
        (connection, client, record): (&Arc<ClientConnection>, &ClientIdentity, &Arc<AccessRecord>),
        (kind, mut request, exchange): (StreamKind, Request<RequestBody>, ExchangeId),
        routed: &Route,
    ) -> Result<Response<ResponseBody>, Error> {
        self.admit_client(client, record)?;
        let deadline = Instant::now() + self.shared.timeouts.connect;
        let (mut tried, mut last_error) = (Vec::new(), None);
        loop {
            let ask = AuthzRequest {
                client,
                remote_address: connection.peer,
                destination: Destination::Node(routed),
                action: Action::from(&kind),
                method: request.method(),
                path: request.uri().path(),
            };
            let member = match self.select_member(set, connection, &ask, &tried).await {
                Ok(member) => member,
                Err(error) => return Err(last_error.unwrap_or(error)),
            };
            let route = member.as_ref().unwrap_or(routed);
            let (copy, error) = match self.admit(&ask, route, record).await {
                Ok(selected) => {
                    let copy = copy_repeatable(&kind, &request);
                    let ctx = StreamContext {
                        proxy: self,
                        connection,
                        client,
                        route,
                        tunnel: &selected.tunnel,
                        peer: selected.peer.as_ref(),
                        id: selected.id,
                        record,
                        exchange,
                    };
                    match ctx.open(kind.clone(), request).await {
                        Ok(response) => return Ok(response),
                        Err(error) => (copy, error),
                    }
                }
                // No part of the request was sent.
                Err(error) => (Some(request), error),
            };
            // A lost tunnel is noticed late.
            let has_time = Instant::now() < deadline || error.reason == Reason::TunnelLost;
            // A request that has broken its server must not break the next one too.
            let may_repeat = error.reason != Reason::TargetBroken
                && record_failure(set, connection, (route, &error));
            match copy.filter(|_| may_repeat && has_time && tried.len() < MAX_REPETITIONS) {
                Some(copy) => request = copy,
                None => return Err(error),
            }
            tracing::debug!(node = %route.node, %error, "a request goes to the next node");
            tried.push(route.node.clone());
            last_error = Some(error);
        }
    }
}

/// Records that a stream to the member of a route has failed. Returns whether another member may serve the stream.
pub(super) fn record_failure(
    set: &NodeSet,
    connection: &ClientConnection,
    (route, error): (&Route, &Error),
) -> bool {
    let is_of_node = error.reason.is_of_node();
    if is_of_node {
        set.record_failure(&route.node);
        connection.member.store(None);
    }
    is_of_node
}

/// Returns a copy of a request that may be sent again.
fn copy_repeatable(
    kind: &StreamKind,
    request: &Request<RequestBody>,
) -> Option<Request<RequestBody>> {
    let is_repeatable = is_repeatable(kind, request.method(), request.body().is_end_stream());
    is_repeatable.then(|| {
        let mut copy = Request::new(RequestBody::empty());
        request.method().clone_into(copy.method_mut());
        request.uri().clone_into(copy.uri_mut());
        *copy.version_mut() = request.version();
        request.headers().clone_into(copy.headers_mut());
        request.extensions().clone_into(copy.extensions_mut());
        copy
    })
}

/// Returns the route to another member at the port of `ask`.
fn member_route(ask: &AuthzRequest<'_>, name: &NodeName) -> Route {
    match ask.destination {
        Destination::Node(route) if route.node == *name => route.clone(),
        // A listener for a set of nodes serves no services.
        destination => Route::new(
            name.clone(),
            Target::new(name, destination.port().unwrap_or(0)),
        ),
    }
}
