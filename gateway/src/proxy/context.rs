//! Context of a request: the state of the gateway, the listener that accepted the client, and the stream that is about to be
//! opened.

use super::{
    access_log::{AccessRecord, OpenStreams},
    access_review::{self, ReviewCache},
    authn::ClientIdentity,
    authz::{self, Authorize, AuthzRequest},
    limits::{Counter, Limits},
    listener::{ClientConnection, Listener},
    pod_route::PodLookup,
    route::Route,
    upstream::UpstreamTlsPorts,
};
use crate::{
    config::Timeouts,
    error::Error,
    metrics::Metrics,
    state::{Nodes, Registry, TunnelId},
    worker::WorkerId,
};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::informational::ExchangeId;
use std::sync::Arc;

/// State that all listeners of a gateway share.
#[derive(Debug)]
pub struct ProxyState {
    /// The nodes that are known.
    pub nodes: Nodes,
    /// The tunnels that are here.
    pub registry: Registry,
    /// How many streams may be open.
    pub limits: Arc<Limits>,
    /// Sessions that are dialled from here.
    pub direct_streams: Counter,
    /// The streams that are open.
    pub streams: Arc<OpenStreams>,
    /// Upstreams to which this gateway itself speaks TLS.
    pub upstream_tls_ports: UpstreamTlsPorts,
    /// Lookup of the nodes of pods, if there is one.
    pub pods: Option<Arc<dyn PodLookup>>,
    /// Cache of the reviews of clients by the cluster's API, if there is one.
    pub reviews: Option<ReviewCache>,
    /// Authorizer of requests.
    pub authorizer: Arc<dyn Authorize>,
    /// Metrics of the gateway.
    pub metrics: Arc<Metrics>,
    /// The bounds of waits.
    pub timeouts: Timeouts,
    /// Longest target of a request, in bytes.
    pub max_uri_bytes: usize,
    /// Longest target at listeners whose errors are for kubectl, in bytes.
    pub max_kubernetes_uri_bytes: usize,
    /// Largest fields of a request, in bytes.
    pub header_bytes: usize,
    /// Most fields in a request head.
    pub max_headers: usize,
}

/// One listener on one worker.
#[derive(Clone, Debug)]
pub struct Proxy {
    /// State that all listeners share.
    pub shared: Arc<ProxyState>,
    /// The listener.
    pub listener: Arc<Listener>,
    /// The worker that serves the connection.
    pub worker: WorkerId,
    /// The owner of tasks that outlive a request: request bodies, upgraded sessions.
    pub tasks: Arc<TaskGroup>,
}

impl Proxy {
    /// Whether they may, which the record notes.
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
        decision?;
        let reviews = self.shared.reviews.as_ref();
        access_review::check(&self.listener.kubelets, reviews, ask).await
    }
}

/// Context of a stream that is about to be opened, for the last steps of the request path.
#[derive(Clone, Copy, Debug)]
pub struct StreamContext<'a> {
    /// The listener and the shared state.
    pub proxy: &'a Proxy,
    /// The client's connection.
    pub connection: &'a Arc<ClientConnection>,
    /// Identity of the client.
    pub client: &'a ClientIdentity,
    /// The node and port that it goes to.
    pub route: &'a Route,
    /// The tunnel that was picked.
    pub tunnel: &'a causeway_tunnel::Tunnel,
    /// Its identity.
    pub id: TunnelId,
    /// The record of this stream.
    pub record: &'a Arc<AccessRecord>,
    /// Exchange that interim answers belong to.
    pub exchange: ExchangeId,
}
