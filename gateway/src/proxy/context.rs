//! Context of a request: the state of the gateway, the listener that accepted the client, and the stream to open.

use super::{
    access_log::{AccessRecord, OpenStreams},
    access_review::ReviewCache,
    authn::ClientIdentity,
    authz::Authorize,
    limits::{Counter, Limits},
    listener::{ClientConnection, Listener},
    pod_route::PodLookup,
    route::Route,
    upstream::UpstreamTlsPorts,
};
use crate::{
    config::Timeouts,
    metrics::Metrics,
    state::{
        EgressRules, EgressUsage, Nodes, Registry, TunnelId, directory::Peer,
        registry::SelectedTunnel,
    },
    worker::WorkerId,
};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::informational::ExchangeId;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// State that all listeners of a gateway share.
#[derive(Debug)]
pub struct ProxyState {
    /// The known nodes.
    pub nodes: Nodes,
    /// The connected tunnels.
    pub registry: Registry,
    /// Limits on open streams.
    pub limits: Arc<Limits>,
    /// Counter of the sessions that the gateway dials itself.
    pub direct_streams: Counter,
    /// The open streams.
    pub streams: Arc<OpenStreams>,
    /// Upstreams with which the gateway itself speaks TLS.
    pub upstream_tls_ports: UpstreamTlsPorts,
    /// Lookup of the nodes of pods, if configured.
    pub pods: Option<Arc<dyn PodLookup>>,
    /// Cache of reviews by the cluster's API, if configured.
    pub reviews: Option<ReviewCache>,
    /// Rules for the connections that edges open.
    pub egress: EgressRules,
    /// Connections that the edges of each node have opened.
    pub egress_usage: EgressUsage,
    /// Authorizer of requests.
    pub authorizer: Arc<dyn Authorize>,
    /// Metrics of the gateway.
    pub metrics: Arc<Metrics>,
    /// Timeouts of waits.
    pub timeouts: Timeouts,
    /// Maximum length of a request target, in bytes.
    pub max_uri_bytes: usize,
    /// Maximum length of a request target at listeners with errors for kubectl, in bytes.
    pub max_kubernetes_uri_bytes: usize,
    /// Maximum size of the header fields of a request, in bytes.
    pub header_bytes: usize,
    /// Maximum number of header fields of a request.
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
    /// Task group that owns tasks that outlive a request: request bodies and upgraded sessions.
    pub tasks: Arc<TaskGroup>,
}

/// Context of a stream to open, for the last steps of the request path.
#[derive(Clone, Copy, Debug)]
pub struct StreamContext<'a> {
    /// The listener and the shared state.
    pub proxy: &'a Proxy,
    /// The client's connection.
    pub connection: &'a Arc<ClientConnection>,
    /// Identity of the client.
    pub client: &'a ClientIdentity,
    /// Node and target of the stream.
    pub route: &'a Route,
    /// The selected tunnel, or the link to `peer`.
    pub tunnel: &'a causeway_tunnel::Tunnel,
    /// The other gateway that holds the node, if this gateway does not.
    pub peer: Option<&'a Arc<Peer>>,
    /// Identifier of the tunnel.
    pub id: TunnelId,
    /// The record of this stream.
    pub record: &'a Arc<AccessRecord>,
    /// Exchange of the interim responses.
    pub exchange: ExchangeId,
}

impl<'a> StreamContext<'a> {
    /// Returns the context of the same stream on another tunnel, if there is one.
    pub(super) fn moved_to<'b>(self, selected: Option<&'b SelectedTunnel>) -> StreamContext<'b>
    where
        'a: 'b,
    {
        match selected {
            Some(selected) => StreamContext {
                tunnel: &selected.tunnel,
                peer: selected.peer.as_ref(),
                id: selected.id,
                ..self
            },
            None => self,
        }
    }

    /// Returns the token that is cancelled when connections through the tunnel should end once they are idle.
    pub(super) fn leaving_token(&self) -> CancellationToken {
        let leaving = match self.peer {
            Some(peer) => peer.leaving_token(&self.route.node),
            None => self.tunnel.leaving_token().clone(),
        };
        if self.record.tunnel() == Some(self.id) {
            return leaving;
        }
        // The peer has refused the request, which went elsewhere. A connection that begins there is used once.
        let left = CancellationToken::new();
        left.cancel();
        left
    }
}
