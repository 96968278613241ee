//! Streams that edges open: to the cloud, where the gateway dials, or to another edge, through that edge's tunnel (egress).
//!
//! Each stream is a CONNECT. The rules of the configuration decide, and what no rule allows is denied. A name is resolved here, each of
//! its addresses is checked, and the gateway dials exactly a checked address. A stream to another edge takes the ordinary request path,
//! with the client `spiffe://TRUST-DOMAIN/edge/NODE`, so the access policy and the policy of the other edge apply as well. Open streams
//! are checked again, and end soon after a change of the rules or of the node's labels that denies them.

mod limited_io;
mod rules;

#[cfg(test)]
mod tests;

use super::{
    access_log::AccessRecord,
    authn::{AuthMethod, ClientIdentity},
    authz::{Action, AuthzRequest, Destination},
    context::{Proxy, ProxyState, StreamContext},
    direct,
    forwarding_headers::ForwardingHeaders,
    identity_headers::IdentityHeaderFields,
    limits::{self, CounterGuard},
    listener::{ClientConnection, Listener, accept::AcceptedSocket},
    relay,
    route::{self, Route, RouteInput},
};
use crate::{
    config::{self, ListenAddr, ListenerProtocol},
    error::{Error, Reason},
    proxy::authn::Authenticator,
    state::{egress::NodeEgress, pods::DestinationPod},
    worker::WorkerId,
};
use causeway_certs::{NodeName, TrustDomain, edge_uri};
use causeway_rt::{
    connection_limit::ConnectionLimit, host_addresses, listener::RemoteAddr,
    log_throttle::LogThrottle, socket::ResetOnClose, task::TaskGroup,
};
use causeway_tunnel::{
    StreamKind, StreamReceiver, StreamSender, Target,
    copy::{self, ByteCounters, CopyOutcome, MeteredIo},
    edge_side::StreamRequest,
    informational::ExchangeId,
    stream_io::StreamIo,
};
use http::{Method, Response, StatusCode};
use limited_io::LimitedIo;
use rules::{EgressTarget, Subject};
use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Name of these streams in metrics and logs, in the place of a listener's.
pub(crate) const LISTENER_NAME: &str = "egress";
/// Maximum number of connections, each of which has many streams. It is above any fleet: open files run out first.
const MAX_CONNECTIONS: usize = 65_536;
/// Interval of the checks whether an open stream is still allowed.
const RECHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Request path for the streams of all edges.
#[derive(Debug)]
pub struct Egress {
    shared: Arc<ProxyState>,
    listener: Arc<Listener>,
    tasks: Arc<TaskGroup>,
    /// Cancelled when listeners and connections have to finish.
    finish: CancellationToken,
    trust_domain: TrustDomain,
    connections: ConnectionLimit,
}

/// Connection on which an edge opens streams.
#[derive(Debug)]
pub struct EgressConnection {
    proxy: Proxy,
    connection: Arc<ClientConnection>,
    client: ClientIdentity,
    node: NodeName,
    usage: Arc<NodeEgress>,
    finish: CancellationToken,
    end: DropGuard,
}

/// Stream that was opened to the destination.
enum DestinationIo {
    /// Connection that the gateway has dialled.
    Tcp(TcpStream),
    /// Stream to another edge.
    Stream(Box<StreamIo>),
}

/// Destination of an open stream, for later checks.
enum OpenDestination {
    Address(EgressTarget, SocketAddr, DestinationPod),
    Node(Route),
}

impl Egress {
    /// Returns the request path for edges of this trust domain. Its streams are part of `tasks`, and there are no new ones after
    /// `finish`.
    pub fn new(
        shared: &Arc<ProxyState>,
        trust_domain: TrustDomain,
        (tasks, finish): (&Arc<TaskGroup>, &CancellationToken),
    ) -> Self {
        Self {
            listener: Arc::new(listener(shared)),
            tasks: tasks.clone(),
            finish: finish.clone(),
            trust_domain,
            connections: shared
                .metrics
                .connection_limit("egress_connections", MAX_CONNECTIONS),
            shared: shared.clone(),
        }
    }

    /// Begins a connection of an edge, or returns `None` if this gateway has too many. If the edge has too many, its oldest one ends.
    pub fn connect(
        &self,
        node: NodeName,
        address: SocketAddr,
        worker: WorkerId,
    ) -> Option<EgressConnection> {
        let usage = self.shared.egress_usage.node(&node);
        let peer = RemoteAddr::Tcp(address);
        let room = self.connections.admit(peer).ok()?;
        let end = usage.add_link().drop_guard();
        let proxy = Proxy {
            shared: self.shared.clone(),
            listener: self.listener.clone(),
            worker,
            tasks: self.tasks.clone(),
        };
        let uri = edge_uri(&self.trust_domain, &node);
        let limits = &self.shared.limits;
        // The name of a node alone could be the name of another client in the policy.
        let client = ClientIdentity::new(&uri, Vec::new(), AuthMethod::Certificate, limits)
            .with_uris(vec![uri.clone()]);
        let socket = AcceptedSocket {
            peer,
            original: None,
            member: None,
            room,
        };
        let connection = socket.connection(&proxy, None, true, Ok(Some(client.clone())));
        Some(EgressConnection {
            proxy,
            connection: Arc::new(connection),
            client,
            node,
            usage,
            finish: self.finish.clone(),
            end,
        })
    }
}

impl EgressConnection {
    /// Returns the token that is cancelled when newer connections of the edge replace this one.
    pub fn replaced(&self) -> CancellationToken {
        self.end.token().clone()
    }

    /// Returns the usage of the node on all its connections.
    pub fn usage(&self) -> Arc<NodeEgress> {
        self.usage.clone()
    }

    /// Whether the edge must use another connection for new streams. An edge without another gateway, whose tunnels therefore stay
    /// here in a drain, is served until the listeners close. It could not connect again, because the tunnel port is closed.
    pub fn must_leave(&self) -> bool {
        let registry = &self.proxy.shared.registry;
        let stays = || {
            let (tunnels, _) = registry.node_tunnels(&self.node);
            tunnels.iter().any(|edge| !edge.is_leaving())
        };
        self.finish.is_cancelled() || (registry.is_draining() && !stays())
    }

    /// Serves one stream to its end, or to the end of the drain time.
    pub async fn serve(&self, request: StreamRequest) {
        if self.must_leave() {
            let detail = "this gateway is stopping; use another gateway";
            let reason = Reason::Draining.word();
            return request.responder.reject_forwarded(reason, detail);
        }
        self.proxy.tasks.track(self.serve_stream(request)).await;
    }

    async fn serve_stream(&self, request: StreamRequest) {
        let StreamRequest {
            kind,
            target,
            head,
            body,
            mut responder,
            ..
        } = request;
        // It may be large, and the stream may last.
        drop(head);
        let shared = &self.proxy.shared;
        let record = AccessRecord::egress(
            &shared.streams,
            (&self.proxy.listener, self.proxy.worker),
            &self.connection,
            &target.to_host_port(),
        );
        record.set_client(&self.client);
        let opened = {
            let mut opening = pin!(self.open(&kind, &target, &record));
            tokio::select! {
                biased;
                opened = &mut opening => opened,
                _ = responder.wait_for_reset() => return,
            }
        };
        let (far_end, destination, _stream_guard) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                record.record_failure(&error);
                record.response_started(error.reason.status());
                return responder.reject_forwarded(error.reason.word(), &error.detail);
            }
        };
        record.session_started(StatusCode::OK);
        let Ok(send) = responder.send(Response::new(()), false) else {
            if let DestinationIo::Tcp(tcp) = far_end {
                tcp.abort();
            }
            return;
        };
        match far_end {
            DestinationIo::Tcp(tcp) => self.relay(tcp, (send, body), (&destination, &record)).await,
            DestinationIo::Stream(stream) => {
                self.relay(*stream, (send, body), (&destination, &record))
                    .await;
            }
        }
    }

    /// Decides about a stream, and connects it to its destination.
    async fn open(
        &self,
        kind: &StreamKind,
        target: &Target,
        record: &Arc<AccessRecord>,
    ) -> Result<(DestinationIo, OpenDestination, CounterGuard), Error> {
        let shared = &self.proxy.shared;
        if *kind != StreamKind::Tcp {
            return Err(
                Reason::MethodNotAllowed.error("an edge can open connections by CONNECT only")
            );
        }
        let max = shared.egress.load().limits.connections;
        let Some(guard) = limits::acquire(&self.usage.streams, max) else {
            shared.metrics.count_limit_reached("egress_streams");
            let detail = format!(
                "{} has reached its limit of {max} open connections (egress.limits.connections)",
                self.node
            );
            return Err(Reason::LimitReached.error(detail));
        };
        let target = EgressTarget::new(target, &shared.egress.load())?;
        if !target.is_named_destination() {
            let authority = target.host_port.to_host_port();
            let route_input = RouteInput {
                authority: Some(&authority),
                has_pod_names: true,
                ..RouteInput::default()
            };
            match route::find_route(&route_input, &shared.nodes) {
                Ok(route) => {
                    let stream = self.open_to_node((&route, &target), record).await?;
                    return Ok((
                        DestinationIo::Stream(Box::new(stream)),
                        OpenDestination::Node(route),
                        guard,
                    ));
                }
                Err(error) if error.reason == Reason::NodeUnknown => {}
                Err(error) => return Err(error),
            }
        }
        self.proxy.admit_client(&self.client, record)?;
        let (tcp, address, pod) = self.dial(&target, record).await?;
        Ok((
            DestinationIo::Tcp(tcp),
            OpenDestination::Address(target, address, pod),
            guard,
        ))
    }

    /// Opens a stream to another edge.
    async fn open_to_node(
        &self,
        (route, requested): (&Route, &EgressTarget),
        record: &Arc<AccessRecord>,
    ) -> Result<StreamIo, Error> {
        self.authorize_node(route, record).map_err(|error| {
            // A node learns nothing about pods to which no rule can lead.
            let is_hidden = route.is_to_pod() && self.proxy.shared.nodes.follows_pods();
            if is_hidden {
                self.denied(requested)
            } else {
                error
            }
        })?;
        let ask = self.authz_request(route);
        let selected = Box::pin(self.proxy.admit(&ask, route, record)).await?;
        let ctx = StreamContext {
            proxy: &self.proxy,
            connection: &self.connection,
            client: &self.client,
            route,
            tunnel: &selected.tunnel,
            peer: selected.peer.as_ref(),
            id: selected.id,
            record,
            exchange: ExchangeId::None,
        };
        let connect_timeout = self.proxy.shared.timeouts.connect;
        let opening = relay::open_tcp_stream(ctx, None, connect_timeout);
        let (send, receive) = Box::pin(opening).await?;
        Ok(StreamIo::new(send, receive))
    }

    /// Resolves the destination, and dials the first of its addresses that a rule allows and that answers.
    async fn dial(
        &self,
        target: &EgressTarget,
        record: &AccessRecord,
    ) -> Result<(TcpStream, SocketAddr, DestinationPod), Error> {
        let shared = &self.proxy.shared;
        let namespace = shared.nodes.pod_namespace(&target.host_port.host);
        let requested = (target, namespace.as_deref());
        let deadline = Instant::now() + shared.timeouts.connect;
        // A node learns nothing about names to which no rule can lead.
        if !self.with_subject(|subject| subject.may_reach(requested, &shared.egress.load())) {
            return Err(self.denied(target));
        }
        let resolving = direct::resolve_target(&shared.nodes, &target.host_port, deadline);
        let addresses = resolving.await.map_err(|error| match error.reason {
            Reason::NodeUnknown => {
                let detail = format!("this gateway cannot resolve {}", target.host_port.host);
                Error {
                    reason: Reason::TargetUnresolved,
                    detail: detail.into(),
                    ..error
                }
            }
            _ => error,
        })?;
        let (mut candidates, mut last_error) = (Vec::new(), None);
        for address in addresses {
            let pod = shared.nodes.destination_pod(address.ip(), None);
            match self.authorize_address(target, (address, &pod), record) {
                Ok(()) => candidates.push((address, pod)),
                Err(error) => last_error = Some(error),
            }
        }
        for (attempts, (address, pod)) in candidates.iter().enumerate() {
            let remaining_time = deadline.saturating_duration_since(Instant::now());
            let attempts_left = u32::try_from(candidates.len() - attempts).unwrap_or(u32::MAX);
            if let Err(unknown) = direct::check_same_pod(&shared.nodes, address.ip(), pod) {
                last_error = Some(unknown);
                continue;
            }
            let dialling = direct::dial_address(
                (&target.host_port, *address),
                remaining_time / attempts_left,
                &self.proxy.listener.exhaustion_throttle,
            );
            match dialling.await {
                Ok(tcp) => {
                    record.set_direct_address(*address, pod.clone());
                    return Ok((tcp, *address, pod.clone()));
                }
                Err(error) => last_error = Some(error),
            }
        }
        Err(last_error.unwrap_or_else(|| self.denied(target)))
    }

    /// Relays bytes and half-closes in both directions, until both have ended or a rule no longer allows the stream. Otherwise both
    /// sides end with a reset.
    async fn relay<F>(
        &self,
        far_end: F,
        (send, receive): (StreamSender, StreamReceiver),
        (destination, record): (&OpenDestination, &Arc<AccessRecord>),
    ) where
        F: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
    {
        let rules = self.proxy.shared.egress.clone();
        let counted = MeteredIo::new(far_end, &record.bytes);
        let limited = LimitedIo::new(counted, self.usage.clone(), rules);
        // The record counts bytes as the node sees them: up is to the destination.
        let uncounted = ByteCounters::default();
        let relaying = pin!(copy::relay(limited, send, receive, &uncounted, false));
        let outcome = tokio::select! {
            biased;
            outcome = record.run_unless_terminated(relaying) => outcome,
            error = self.wait_until_denied(destination, record) => return record.record_failure(&error),
        };
        match outcome {
            Ok(CopyOutcome::Clean) => record.mark_session_ended(),
            Ok(CopyOutcome::Socket(error)) => {
                let detail = format!("the destination aborted the connection: {error}");
                record.record_failure(&Reason::TargetBroken.error(detail));
            }
            Ok(CopyOutcome::Stream(error)) => {
                record.record_abandoned(&format!("the node aborted the connection: {error}"));
            }
            Err(_terminated) => {}
        }
    }

    /// Waits until the open stream is no longer allowed.
    async fn wait_until_denied(
        &self,
        destination: &OpenDestination,
        record: &AccessRecord,
    ) -> Error {
        let mut ticks = interval(RECHECK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let result = match destination {
                OpenDestination::Address(target, address, pod) => {
                    if target.is_current(&self.proxy.shared.egress.load()) {
                        self.authorize_address(target, (*address, pod), record)
                    } else {
                        Err(self.denied(target))
                    }
                }
                OpenDestination::Node(route) => match self.authorize_node(route, record) {
                    Ok(()) => {
                        self.proxy
                            .authorize(&self.authz_request(route), record)
                            .await
                    }
                    denied => denied,
                },
            };
            match result {
                Err(error) if error.reason == Reason::Forbidden => return error,
                // A stream without a decision continues.
                _ => {}
            }
        }
    }

    fn authz_request<'a>(&'a self, route: &'a Route) -> AuthzRequest<'a> {
        AuthzRequest {
            client: &self.client,
            remote_address: self.connection.peer,
            destination: Destination::Node(route),
            action: Action::Connect,
            method: &Method::CONNECT,
            path: "",
        }
    }

    /// Checks that a rule allows this address of a pod, or of no pod, and records the rule.
    fn authorize_address(
        &self,
        target: &EgressTarget,
        (address, pod): (SocketAddr, &DestinationPod),
        record: &AccessRecord,
    ) -> Result<(), Error> {
        let shared = &self.proxy.shared;
        // Also if this host is a node of the cluster: an edge must not reach its services by a wide rule.
        let is_own = host_addresses::is_own(address.ip());
        let egress = shared.egress.load();
        let address = (address, is_own, pod);
        let rule = self.with_subject(|subject| subject.address_rule(target, address, &egress));
        let rule = rule.ok_or_else(|| match pod {
            DestinationPod::Undecided(reason) if egress.depends_on_pods() => {
                Reason::DependencyUnavailable.error(reason.to_string())
            }
            _ => self.denied(target),
        })?;
        record.set_matched_rule(rule);
        Ok(())
    }

    /// Checks that a rule allows connections to this node, and records the rule.
    fn authorize_node(&self, route: &Route, record: &AccessRecord) -> Result<(), Error> {
        let egress = self.proxy.shared.egress.load();
        let rule = self.with_subject(|subject| subject.node_rule(route, &egress));
        let rule = rule.ok_or_else(|| {
            let Route { node, target, .. } = route;
            self.denial(&format!("port {} of node {node}", target.port))
        })?;
        record.set_matched_rule(rule);
        Ok(())
    }

    fn with_subject<T>(&self, read: impl FnOnce(Subject<'_>) -> T) -> T {
        self.proxy.shared.nodes.with(&self.node, |known| {
            read(Subject {
                node: &self.node,
                pool: known.policy_pool.as_deref(),
                labels: &known.labels,
            })
        })
    }

    fn denied(&self, target: &EgressTarget) -> Error {
        self.denial(&target.to_string())
    }

    /// Returns the error of a connection that no rule allows. While the nodes of the cluster are not loaded, a rule may allow it later.
    fn denial(&self, destination: &str) -> Error {
        let shared = &self.proxy.shared;
        match shared.nodes.pending_reason() {
            Some(reason) if shared.egress.load().depends_on_nodes() => {
                Reason::DependencyUnavailable.error(reason.to_string())
            }
            _ => Reason::Forbidden.error(format!(
                "no rule of the gateway (egress.rules) allows {} to connect to {destination}",
                self.node
            )),
        }
    }
}

/// Returns the listener that stands for egress in access log and metrics. No socket listens for it.
fn listener(shared: &ProxyState) -> Listener {
    let address = SocketAddr::new(IpAddr::from([127, 0, 0, 1]), 0);
    let protocol = ListenerProtocol::Connect;
    let config = config::Listener::new(LISTENER_NAME, protocol, ListenAddr::Tcp(address));
    Listener {
        forwarding: ForwardingHeaders::new(&config),
        name: config.name,
        protocol,
        node: None,
        node_set: None,
        port: None,
        has_node_list: false,
        names: Vec::new(),
        bound_port: None,
        tls: None,
        authentication: Authenticator::default(),
        kubelets: Vec::new(),
        revoked: BTreeSet::new(),
        disconnect_expired: false,
        forward_authorization: false,
        identity_headers: IdentityHeaderFields::default(),
        error_format: config.errors,
        original_destination: false,
        direct_networks: Vec::new(),
        proxy_protocol: Vec::new(),
        plaintext_networks: Vec::new(),
        metrics: shared.metrics.listener(LISTENER_NAME),
        tls_refusal_throttle: LogThrottle::default(),
        exhaustion_throttle: LogThrottle::default(),
        retired_at: OnceLock::new(),
        successor: OnceLock::new(),
    }
}
