//! Request path. [`Proxy::handle`] is the entry point: its steps are the files below, in order.
//!
//! The steps are: (1) `listener` accepts, finishes TLS and describes the connection. (2) `authn` identifies the client. (3)
//! `route` finds node and target. (4) `authz` decides. (5) The registry selects a tunnel, and `limits` admits a stream on it. (6)
//! `forward`, `upgrade` or `relay` opens the stream, unless `upstream` speaks TLS through a stream or `direct` dials an address
//! that no edge serves. (7) Only `error_response` turns failures into responses. (8) `access_log` writes one record per stream.
//! No step writes a table. Each wait for the control plane is bounded, whether it is for a decision of another service (such as
//! `access_review`) or for a missing key.

mod context;

pub mod listener;

pub mod authn;
pub mod request;
pub mod route;

mod member;
pub mod pod_route;

pub mod access_review;
pub mod authz;
pub mod limits;
pub mod recheck;

mod counted_body;
pub mod forward;
pub mod forwarding_headers;
pub mod identity_headers;
mod repeat;
mod request_body;

mod client_session;
pub mod relay;
pub mod upgrade;
mod upload_budget;

pub mod direct;
pub mod egress;
pub mod peer;
pub mod upstream;

mod gateway_resources;

pub mod error_response;
pub mod response_body;
mod response_head;

pub mod access_log;
mod trace_context;

use crate::{
    config::ErrorFormat,
    error::{Error, Reason},
    state::registry::SelectedTunnel,
};
use access_log::{AccessRecord, GrantedAccess};
use authn::{AuthMethod, AuthnContext, ClientIdentity, jwt::Expired};
use authz::{Action, AuthzRequest, Destination};
use causeway_tunnel::{StreamKind, Target, headers, informational::ExchangeId};
pub use context::{Proxy, ProxyState, StreamContext};
use error_response::ErrorProtocol;
use gateway_resources::GatewayResource;
use http::{HeaderValue, Method, Request, Response, Version, header::EXPECT};
use http_body::Body;
use hyper::body::Incoming;
use listener::ClientConnection;
use pod_route::PodRouting;
use request_body::RequestBody;
use response_body::ResponseBody;
use route::{Route, RouteInput};
use std::{pin::pin, sync::Arc};

impl Proxy {
    /// Handles one request from a client. Returns the upstream's response, or an error response.
    pub async fn handle(
        &self,
        connection: &Arc<ClientConnection>,
        request: Request<Incoming>,
        exchange: ExchangeId,
    ) -> Response<ResponseBody> {
        let record = AccessRecord::begin(
            &self.shared.streams,
            (&self.listener, self.worker),
            connection,
            &request,
        );
        let protocol = ErrorProtocol::of(&request);
        let resource = GatewayResource::find(&request, &self.listener);
        let asks_gateway = resource.is_some();
        let expects_continue = !request.body().is_end_stream()
            && headers::contains_token(request.headers(), &EXPECT, "100-continue");
        let discarding = (&self.shared.limits, &self.tasks);
        let request =
            request.map(|body| RequestBody::new(body, expects_continue, discarding, connection));
        // RFC 9110 §9.3.2. hyper ensures this only for HTTP/1.1.
        let is_http2_head =
            request.method() == Method::HEAD && request.version() == Version::HTTP_2;
        let serving = pin!(self.serve(connection, (request, resource), exchange, &record));
        match record.run_unless_terminated(serving).await.flatten() {
            Ok(response) => response,
            Err(error) => {
                let error = self.ended_by_drain(&record, error);
                let form = (protocol, asks_gateway);
                let reply = error_response::error_response(&self.listener, &record, form, &error);
                if is_http2_head {
                    return reply.map(|_| ResponseBody::empty());
                }
                reply
            }
        }
    }

    /// Returns the error of a failed request. If the gateway itself closed the tunnel at the end of a drain, the drain is the
    /// error.
    fn ended_by_drain(&self, record: &AccessRecord, error: Error) -> Error {
        if error.reason == Reason::TunnelLost && self.shared.registry.is_drain_expired() {
            record.record_failure(&error);
            return record.failure().unwrap_or(error);
        }
        error
    }

    /// Returns the maximum length of a request target at this listener, in bytes.
    pub(crate) fn max_target_bytes(&self) -> usize {
        match self.listener.error_format {
            ErrorFormat::Problem => self.shared.max_uri_bytes,
            ErrorFormat::Kubernetes => self.shared.max_kubernetes_uri_bytes,
        }
    }

    fn request_limits(&self) -> request::RequestLimits {
        request::RequestLimits {
            target_bytes: self.max_target_bytes(),
            header_bytes: self.shared.header_bytes,
            max_headers: self.shared.max_headers,
        }
    }

    /// Returns the format of the listener's errors, and the maximum length of a request target in bytes.
    pub(crate) fn error_format(&self) -> (ErrorFormat, usize) {
        (self.listener.error_format, self.max_target_bytes())
    }

    /// Returns the pod lookup for a request, if this listener looks up pods.
    fn pod_routing(&self, client: &ClientIdentity, kind: &StreamKind) -> Option<PodRouting<'_>> {
        let asks = self.listener.error_format == ErrorFormat::Kubernetes
            && client.method != AuthMethod::Anonymous
            && !matches!(kind, StreamKind::Tcp);
        let lookup = self.shared.pods.as_deref().filter(|_| asks)?;
        Some(PodRouting {
            lookup,
            nodes: &self.shared.nodes,
            port: self.listener.port,
            bound: self.shared.timeouts.authorize,
        })
    }

    async fn serve(
        &self,
        connection: &Arc<ClientConnection>,
        (mut request, resource): (Request<RequestBody>, Option<GatewayResource>),
        exchange: ExchangeId,
        record: &Arc<AccessRecord>,
    ) -> Result<Response<ResponseBody>, Error> {
        if self.listener.is_closed_to_streams() {
            let detail = "the configuration of this listener has changed; open a new connection";
            return Err(Reason::Draining.error(detail));
        }
        request::check(&request, self.request_limits())?;
        if let Some(resource) = resource {
            let from = (&**connection, request.method(), request.headers());
            return Box::pin(self.serve_resource(resource, from, record)).await;
        }
        let kind = request::stream_kind(&request, self.listener.protocol)?;
        self.listener.replace_host(&mut request);
        let route_input = self.listener.route_input(connection, &request)?;
        if matches!(kind, StreamKind::Tcp)
            && let Some(direct_target) = direct::direct_target(
                &self.listener.direct_networks,
                &route_input,
                &self.shared.nodes,
            )
        {
            let connecting = self.connect_directly(connection, request, &direct_target, record);
            return Box::pin(connecting).await;
        }
        let credential = self.credential(&request);
        let (client, routed) = self
            .resolve_and_authenticate(connection, credential, &route_input)
            .await?;
        record.set_client(&client);
        let pods = self.pod_routing(&client, &kind);
        let route = pod_route::or_route(pods, request.uri().path(), routed).await?;
        let action = Action::from(&kind);
        let from = (&**connection, credential);
        record.record_granted_access(GrantedAccess::new(action, &request, from));
        if let Some(set) = self.open_node_set(&route_input, &route) {
            let from = (connection, &client, record);
            let serving = self.serve_by_member(set, from, (kind, request, exchange), &route);
            return Box::pin(serving).await;
        }
        let authz_request = AuthzRequest {
            client: &client,
            remote_address: connection.peer,
            destination: Destination::Node(&route),
            action,
            method: request.method(),
            path: request.uri().path(),
        };
        let selected = self.admit(&authz_request, &route, record).await?;
        let ctx = StreamContext {
            proxy: self,
            connection,
            client: &client,
            route: &route,
            tunnel: &selected.tunnel,
            peer: selected.peer.as_ref(),
            id: selected.id,
            record,
            exchange,
        };
        ctx.open(kind, request).await
    }

    /// Authorizes a stream to the node of a route, selects its tunnel, and admits it there.
    ///
    /// # Errors
    /// If the client may not open the stream, the node has no tunnel, or a limit is reached.
    pub(crate) async fn admit(
        &self,
        ask: &AuthzRequest<'_>,
        route: &Route,
        record: &AccessRecord,
    ) -> Result<SelectedTunnel, Error> {
        record.set_route(route);
        self.authorize(&ask.with_route(route), record).await?;
        self.admit_client(ask.client, record)?;
        let selected = self.select_tunnel(route).await?;
        // Another pod may have got the address during the waits.
        self.check_same_pod(ask.client, route)?;
        record.set_node_permit(self.shared.limits.admit_node(&selected.streams)?);
        record.set_tunnel(selected.id);
        Ok(selected)
    }

    /// Checks that the address of a route still belongs to the pod that was authorized. An anonymous client does not learn that
    /// it belongs to another one.
    pub(crate) fn check_same_pod(
        &self,
        client: &ClientIdentity,
        route: &Route,
    ) -> Result<(), Error> {
        let checked = route.check_same_pod(&self.shared.nodes);
        checked.map_err(|error| match error.reason {
            Reason::NodeUnknown if client.method == AuthMethod::Anonymous => {
                self.listener.authentication.missing_credentials()
            }
            _ => error,
        })
    }

    /// Takes the client's permit for the stream of a record, unless the record has one.
    ///
    /// # Errors
    /// If a limit is reached.
    pub(crate) fn admit_client(
        &self,
        client: &ClientIdentity,
        record: &AccessRecord,
    ) -> Result<(), Error> {
        record.ensure_client_permit(|| self.shared.limits.admit_client(&client.open_streams))
    }

    /// Identifies the client, and connects it to an address that no edge serves.
    async fn connect_directly(
        &self,
        connection: &Arc<ClientConnection>,
        request: Request<RequestBody>,
        target: &Target,
        record: &Arc<AccessRecord>,
    ) -> Result<Response<ResponseBody>, Error> {
        let credential = self.credential(&request);
        let client = self
            .identify(connection, credential, Some(target.port))
            .await?;
        record.set_client(&client);
        let from = (&**connection, credential);
        record.record_granted_access(GrantedAccess::new(Action::Connect, &request, from));
        let direct = direct::DirectConnect {
            proxy: self,
            connection,
            client: &client,
            target,
            record,
        };
        direct::connect(direct, request).await
    }

    /// Identifies the client and finds the route. The route is looked up first, because the admission of anonymous clients
    /// depends on the real port. Only an identified client receives the error of a wrong route.
    pub(crate) async fn authenticate_and_route(
        &self,
        connection: &ClientConnection,
        credential: Option<&HeaderValue>,
        route_input: &RouteInput<'_>,
    ) -> Result<(ClientIdentity, Route), Error> {
        let (client, routed) = self
            .resolve_and_authenticate(connection, credential, route_input)
            .await?;
        Ok((client, routed?))
    }

    /// Returns the credential of a request for this listener.
    fn credential<'a, B>(&self, request: &'a Request<B>) -> Option<&'a HeaderValue> {
        authn::credential(
            self.listener.is_proxy(),
            request.method(),
            request.headers(),
        )
    }

    async fn resolve_and_authenticate(
        &self,
        connection: &ClientConnection,
        credential: Option<&HeaderValue>,
        route_input: &RouteInput<'_>,
    ) -> Result<(ClientIdentity, Result<Route, Error>), Error> {
        let routed = self.find_route(connection, route_input);
        let port = routed.as_ref().ok().and_then(Route::port);
        let client = self.identify(connection, credential, port).await?;
        let is_undecided =
            matches!(&routed, Err(error) if error.reason == Reason::DependencyUnavailable);
        let is_to_edge_pod = routed.as_ref().is_ok_and(Route::is_to_pod);
        // An anonymous client learns nothing about pods to which no route leads.
        if client.method == AuthMethod::Anonymous
            && !is_undecided
            && !is_to_edge_pod
            && route::names_pod(route_input, &self.shared.nodes)
        {
            return Err(self.listener.authentication.missing_credentials());
        }
        Ok((client, routed))
    }

    async fn identify(
        &self,
        connection: &ClientConnection,
        credential: Option<&HeaderValue>,
        port: Option<u16>,
    ) -> Result<ClientIdentity, Error> {
        self.identify_with(connection, (credential, Expired::Reject), port)
            .await
    }

    /// Identifies the client. With [`Expired::AcceptFor`], an expired token identifies it as well.
    async fn identify_with(
        &self,
        connection: &ClientConnection,
        presented: (Option<&HeaderValue>, Expired<'_>),
        port: Option<u16>,
    ) -> Result<ClientIdentity, Error> {
        if !self.listener.serves_network(connection.peer) {
            let detail = "this listener does not serve clients from this address without TLS";
            return Err(Reason::Unauthenticated.error(detail));
        }
        let authentication = &self.listener.authentication;
        let client = authentication
            .identify(
                (&connection.credentials, connection.peer),
                presented,
                port,
                AuthnContext {
                    limits: &self.shared.limits,
                    reviews: self.shared.reviews.as_ref(),
                    bound: self.shared.timeouts.authorize,
                },
            )
            .await?;
        if !self.listener.trusts_root(client.root) {
            let why = "certificate: its root is no longer trusted";
            return Err(Reason::Unauthenticated.error(why));
        }
        client.is_welcome(&self.listener.revoked, self.listener.disconnect_expired)?;
        Ok(client)
    }

    /// Authorizes the request and records the decision in the access log.
    pub(crate) async fn authorize(
        &self,
        ask: &AuthzRequest<'_>,
        record: &AccessRecord,
    ) -> Result<(), Error> {
        let (authorizer, wait_limit) = (&self.shared.authorizer, self.shared.timeouts.authorize);
        let (matched_rule, decision) = authz::check(authorizer.as_ref(), ask, wait_limit).await;
        if let Some(rule) = matched_rule {
            record.set_matched_rule(rule);
        }
        let reviews = self.shared.reviews.as_ref();
        let reviewing = access_review::check(&self.listener.kubelets, reviews, ask);
        let result = match decision {
            Ok(()) => reviewing.await,
            refused => refused,
        };
        // An anonymous client gets the same answer for a pod that it may not reach and for one that does not exist.
        let is_hidden = ask.client.method == AuthMethod::Anonymous
            && self.shared.nodes.follows_pods()
            && match &ask.destination {
                Destination::Node(route) => route.is_to_pod(),
                Destination::Direct(address, _) => self.shared.nodes.is_pod_address(address.ip()),
            };
        result.map_err(|error| match error.reason {
            Reason::Forbidden if is_hidden => self.listener.authentication.missing_credentials(),
            _ => error,
        })
    }

    /// Selects the tunnel to use, or returns the reason why there is none. Waits for a node that is likely to reconnect soon.
    pub(crate) async fn select_tunnel(&self, route: &Route) -> Result<SelectedTunnel, Error> {
        if self.shared.registry.worker(&route.node) != self.worker {
            self.shared.metrics.count_worker_crossing();
        }
        self.shared
            .registry
            .select_tunnel_within(&route.node, self.shared.timeouts.reconnect)
            .await
            .map_err(|unavailable| Error::from_unavailable(&route.node, &unavailable))
    }
}

impl StreamContext<'_> {
    /// Runs the last step: opens the stream, or sends the request to the upstream through one. This future is moved as a whole at
    /// each request. Only the path of most requests is therefore a part of it, and the larger futures are allocated.
    async fn open(
        self,
        kind: StreamKind,
        request: Request<RequestBody>,
    ) -> Result<Response<ResponseBody>, Error> {
        match (
            kind,
            self.proxy
                .shared
                .upstream_tls_ports
                .find_upstream(self.route),
        ) {
            (StreamKind::Request, None) => forward::forward_request(self, request).await,
            (StreamKind::Request, Some(upstream_tls)) => {
                Box::pin(upstream::forward::forward_request(
                    self,
                    &upstream_tls,
                    request,
                ))
                .await
            }
            (StreamKind::Upgrade(token), None) => {
                Box::pin(upgrade::forward_upgrade(self, request, &token)).await
            }
            (StreamKind::Upgrade(token), Some(upstream_tls)) => {
                Box::pin(upstream::upgrade::forward_upgrade(
                    self,
                    &upstream_tls,
                    request,
                    &token,
                ))
                .await
            }
            (StreamKind::Tcp, _) => Box::pin(relay::connect(self, request)).await,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
