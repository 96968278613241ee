//! Request path. Read [`Proxy::handle`] first: its steps are the files below, in order.
//!
//! Step by step: (1) `listener` accepts, finishes TLS and describes the connection; (2) `authn` identifies the client; (3)
//! `route` finds node and target; (4) `authz` decides; (5) the registry selects a tunnel, and `limits` admits a stream on it; (6)
//! `forward`, `upgrade` or `relay` opens the stream, unless `upstream` speaks TLS through one or `direct` dials an address that
//! is at no edge; (7) only `error_response` turns failures into bytes; (8) `access_log` writes one record per stream. Nothing
//! here writes a table. Each wait for the control plane has a bound: for a decision of another service (such as `access_review`),
//! or for a missing key.

mod context;

pub mod listener;

pub mod authn;
pub mod request;
pub mod route;

pub mod pod_route;

pub mod access_review;
pub mod authz;
pub mod limits;
pub mod recheck;

mod counted_body;
pub mod forward;
pub mod forwarding_headers;
pub mod identity_headers;
mod request_body;

pub mod relay;
pub mod upgrade;
mod upload_budget;

pub mod direct;
pub mod upstream;

pub mod error_response;
pub mod response_body;

pub mod access_log;
mod trace_context;

use crate::{
    config::ErrorFormat,
    error::{Error, Reason},
    state::{NodeUnavailable, registry::SelectedTunnel},
};
use access_log::{AccessRecord, GrantedAccess};
use authn::{AuthMethod, AuthnContext, ClientIdentity, jwt::Expired};
use authz::{Action, AuthzRequest, Destination};
use causeway_certs::NodeName;
use causeway_tunnel::{StreamKind, headers, informational::ExchangeId};
pub use context::{Proxy, ProxyState, StreamContext};
use error_response::ErrorProtocol;
use http::{HeaderMap, Method, Request, Response, Version, header::EXPECT};
use http_body::Body;
use hyper::body::Incoming;
use listener::ClientConnection;
use pod_route::PodRouting;
use request_body::RequestBody;
use response_body::ResponseBody;
use route::{Route, RouteInput};
use std::{pin::pin, sync::Arc, time::SystemTime};

impl Proxy {
    /// Handles one request from a client. Returns the upstream's answer, or the reply that explains why there is none.
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
        let is_awaited = !request.body().is_end_stream()
            && headers::lists(request.headers(), &EXPECT, "100-continue");
        let is_http1 = request.version() != Version::HTTP_2;
        let condition = is_http1.then_some(&connection.condition);
        let discarding = (&self.shared.limits, &self.tasks, connection.peer);
        let request = request.map(|body| RequestBody::new(body, is_awaited, discarding, condition));
        // RFC 9110 §9.3.2. hyper ensures this only for HTTP/1.1.
        let bodiless = request.method() == Method::HEAD && request.version() == Version::HTTP_2;
        let served = pin!(self.serve(connection, request, exchange, &record));
        match record.unless_ended(served).await.flatten() {
            Ok(response) => response,
            Err(error) => {
                let error = self.ended_by_drain(&record, error);
                let reply = error_response::of(&self.listener, &record, (protocol, &error));
                if bodiless {
                    return reply.map(|_| ResponseBody::empty());
                }
                reply
            }
        }
    }

    /// Returns the error of a request that failed, which is of the drain if this gateway itself has closed the tunnel.
    fn ended_by_drain(&self, record: &AccessRecord, error: Error) -> Error {
        if error.reason == Reason::TunnelLost && self.shared.registry.is_over() {
            record.failed(&error);
            return record.failure().unwrap_or(error);
        }
        error
    }

    /// Returns how many bytes of a request's target this listener takes.
    pub(crate) fn most_target(&self) -> usize {
        match self.listener.errors {
            ErrorFormat::Problem => self.shared.uri_bytes,
            ErrorFormat::Kubernetes => self.shared.kubernetes_uri_bytes,
        }
    }

    fn bounds(&self) -> request::Bounds {
        request::Bounds {
            target: self.most_target(),
            header_bytes: self.shared.header_bytes,
            headers: self.shared.max_headers,
        }
    }

    /// Returns the form of the listener's errors, and the longest target that it takes.
    pub(crate) fn form(&self) -> (ErrorFormat, usize) {
        (self.listener.errors, self.most_target())
    }

    /// Returns the lookup of pods for a request, if this listener looks for them.
    fn pod_routing(&self, client: &ClientIdentity, kind: &StreamKind) -> Option<PodRouting<'_>> {
        let asks = self.listener.errors == ErrorFormat::Kubernetes
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
        request: Request<RequestBody>,
        exchange: ExchangeId,
        record: &Arc<AccessRecord>,
    ) -> Result<Response<ResponseBody>, Error> {
        if self.listener.is_over() {
            let why = "the configuration of this listener has changed; open a new connection";
            return Err(Reason::Draining.error(why));
        }
        request::check(&request, self.bounds())?;
        let kind = request::kind(&request, self.listener.kind)?;
        let asked = self
            .listener
            .asked(connection, request::authority(&request)?);
        if matches!(kind, StreamKind::Tcp)
            && let Some(target) = direct::target(&self.listener.direct, &asked, &self.shared.nodes)
        {
            let client = self.identify(connection, request.headers(), Some(target.port));
            let client = client.await?;
            record.client(&client);
            record.allow(GrantedAccess::new(Action::Connect, &request, connection));
            let direct = direct::DirectConnect {
                proxy: self,
                connection,
                client: &client,
                target: &target,
                record,
            };
            return Box::pin(direct::connect(direct, request)).await;
        }
        let (client, routed) = self
            .resolve_and_authenticate(connection, request.headers(), &asked)
            .await?;
        record.client(&client);
        let pods = self.pod_routing(&client, &kind);
        let route = pod_route::or_route(pods, request.uri().path(), routed).await?;
        record.route(&route);
        let act = Action::from(&kind);
        let ask = AuthzRequest {
            client: &client,
            from: connection.peer,
            destination: Destination::Node(&route),
            act,
            method: request.method(),
            path: request.uri().path(),
        };
        record.allow(GrantedAccess::new(act, &request, connection));
        self.authorize(&ask, record).await?;
        let picked = self.select_tunnel(&route).await?;
        record.permit(self.shared.limits.admit(&client.open, &picked.streams)?);
        record.tunnel(picked.id);
        let way = StreamContext {
            proxy: self,
            connection,
            client: &client,
            route: &route,
            tunnel: &picked.tunnel,
            id: picked.id,
            record,
            exchange,
        };
        way.open(kind, request).await
    }

    /// Identifies the client and finds the route. The route is looked up first, because the admission of anonymous clients
    /// depends on the real port. Only an identified client learns that a route is wrong.
    pub(crate) async fn authenticate_and_route(
        &self,
        connection: &ClientConnection,
        fields: &HeaderMap,
        asked: &RouteInput<'_>,
    ) -> Result<(ClientIdentity, Route), Error> {
        let (client, routed) = self
            .resolve_and_authenticate(connection, fields, asked)
            .await?;
        Ok((client, routed?))
    }

    async fn resolve_and_authenticate(
        &self,
        connection: &ClientConnection,
        fields: &HeaderMap,
        asked: &RouteInput<'_>,
    ) -> Result<(ClientIdentity, Result<Route, Error>), Error> {
        let routed = route::of(asked, &self.shared.nodes);
        let port = routed.as_ref().ok().map(|route| route.target.port);
        let client = self.identify(connection, fields, port).await?;
        Ok((client, routed))
    }

    async fn identify(
        &self,
        connection: &ClientConnection,
        fields: &HeaderMap,
        port: Option<u16>,
    ) -> Result<ClientIdentity, Error> {
        self.identify_by(connection, (fields, Expired::Refused), port)
            .await
    }

    /// Says who calls, by a JWT that has expired too if that is so wanted.
    async fn identify_by(
        &self,
        connection: &ClientConnection,
        presented: (&HeaderMap, Expired<'_>),
        port: Option<u16>,
    ) -> Result<ClientIdentity, Error> {
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
        if !self.listener.believes(client.root) {
            let why = "certificate: its root is no longer trusted";
            return Err(Reason::Unauthenticated.error(why));
        }
        client.is_welcome(&self.listener.revoked, self.listener.disconnect_expired)?;
        Ok(client)
    }

    /// The tunnel to use, or why there is none. Waits for a node that is probably back soon.
    pub(crate) async fn select_tunnel(&self, route: &Route) -> Result<SelectedTunnel, Error> {
        if self.shared.registry.worker(&route.node) != self.worker {
            self.shared.metrics.crossed();
        }
        self.shared
            .registry
            .pick_within(&route.node, self.shared.timeouts.reconnect)
            .await
            .map_err(|away| unavailable_error(&route.node, &away))
    }
}

impl StreamContext<'_> {
    /// Runs the last step: opens the stream, or sends the request to the upstream through one. This future is moved as a whole at
    /// each request. So only the path of most requests is a part of it; the larger futures are allocated.
    async fn open(
        self,
        kind: StreamKind,
        request: Request<RequestBody>,
    ) -> Result<Response<ResponseBody>, Error> {
        match (kind, self.proxy.shared.apps.of(self.route)) {
            (StreamKind::Request, None) => forward::run(self, request).await,
            (StreamKind::Request, Some(app)) => {
                Box::pin(upstream::forward::run(self, &app, request)).await
            }
            (StreamKind::Upgrade(token), None) => {
                Box::pin(upgrade::run(self, request, &token)).await
            }
            (StreamKind::Upgrade(token), Some(app)) => {
                Box::pin(upstream::upgrade::run(self, &app, request, &token)).await
            }
            (StreamKind::Tcp, _) => Box::pin(relay::connect(self, request)).await,
        }
    }
}

fn unavailable_error(node: &NodeName, away: &NodeUnavailable) -> Error {
    match away {
        NodeUnavailable::Never => Reason::NodeNotConnected.error(format!(
            "{node} is not connected and has not connected since this gateway started"
        )),
        NodeUnavailable::Last { seen, from } => {
            let ago = SystemTime::now().duration_since(*seen).unwrap_or_default();
            Reason::NodeNotConnected.error(format!(
                "{node} is not connected; it was last seen at {}, {} s ago; its last tunnel came from {from}",
                humantime::format_rfc3339_seconds(*seen),
                ago.as_secs()
            ))
        }
        NodeUnavailable::Suspect { from } => Reason::NodeNotConnected.error(format!(
            "{node} does not answer on its tunnel from {from}; the link is probably down"
        )),
        NodeUnavailable::Draining => Reason::Draining.error(format!(
            "{node} is disconnecting from this gateway and accepts no new streams"
        )),
    }
}
