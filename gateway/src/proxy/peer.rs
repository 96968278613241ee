//! Requests for nodes of other gateways: forwarded over a link to the gateway that holds the node, and served there.
//!
//! The gateway that the client has reached does everything that depends on the client: it authenticates, authorizes, limits,
//! counts and logs. The holder checks its own policy and the limits of the node, opens the stream to the edge, says so by an
//! interim response, joins both streams, and writes an access record of its own (`record`). A request passes between gateways at
//! most once: the holder uses only its own tunnels. If it has none, it refuses before it has read the body, and the request goes
//! elsewhere. If its tunnel does not answer at present, it does so too, provided that the sender says that another gateway holds
//! the node. If its tunnel stops answering later, it says so by another interim response, and the sender may repeat the request
//! (`repeat`). Connections to upstreams of `upstream_tls` are pooled, so the holder decides about the request with which a
//! connection begins.

mod record;

use super::{
    authn::{AuthMethod, ClientIdentity},
    authz::{self, Action, AuthzRequest, Destination},
    context::{ProxyState, StreamContext},
    limits::{ClientPermit, Counter, CounterGuard},
    request::is_repeatable,
    route::Route,
};
use crate::{
    error::{Error, Reason},
    state::{
        NodeUnavailable,
        directory::{ForwardingGateway, MIN_LATE, PeerRefusal, REFUSAL_TIME, until_unanswered},
        pods::DestinationPod,
        policy::MatchedRule,
        registry::SelectedTunnel,
    },
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use causeway_certs::NodeName;
use causeway_rt::listener::RemoteAddr;
use causeway_tunnel::{
    StreamError, StreamKind, StreamReceiver, Tunnel,
    body::{PumpError, pump},
    edge_side::{self, ForwardedFields, StreamRequest, StreamResponder},
    eviction::Eviction,
    gateway_side::{OpenStream, StreamResponse},
    wire,
};
use futures_util::future::OptionFuture;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Body;
use record::ForwardedRecord;
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, SocketAddr},
    pin::pin,
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};

/// Time after which the link to a peer that has not accepted a request is probed.
const PROBE_AFTER: Duration = Duration::from_secs(1);
/// Time after which a request without effects goes elsewhere, beside the time for the decision of the peer's policy.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of the reports to another gateway that the tunnel of its request does not answer.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Time without an answer to a probe of the link after which a request with effects fails if the peer has not accepted it. It
/// must not be sent again, so the time is longer than for other requests: some links are silent for seconds.
const SUSPECT_AFTER: Duration = Duration::from_secs(5);
/// Maximum number of gateways that are asked for one request, beside those that leave it to another one because their tunnel is
/// late. The first one has usually just lost the node.
const MAX_ATTEMPTS: usize = 3;
/// Maximum number of gateways that may leave one request to another one.
const MAX_LATE_REFUSALS: usize = 2;
/// Number of interim responses that pass at once, and the interval of further ones: an edge must not flood the other gateway.
const INTERIM_BURST: usize = 4;
const INTERIM_INTERVAL: Duration = Duration::from_secs(1);

/// Client of a forwarded request, for the access policy of the holder.
#[derive(Debug, Serialize, Deserialize)]
struct ForwardedClient {
    name: String,
    groups: Vec<String>,
    uris: Vec<String>,
    /// Whether a credential has identified the client.
    authenticated: bool,
    /// Address of the client; a unix socket has none.
    address: Option<IpAddr>,
    action: Action,
    /// Method and path of the request inside a TCP stream, if the gateway itself speaks TLS with the upstream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    inner: Option<(String, String)>,
}

/// Opens a stream to the node of the route: on its tunnel, or through a peer that holds the node. Also returns the tunnel or link
/// of the stream, if it is not that of the context. A plain request may be sent again with the same head (`repeat`).
///
/// # Errors
/// If the stream cannot be opened, or no peer has a tunnel of the node any more.
pub(super) async fn open_stream(
    ctx: StreamContext<'_>,
    head: &mut Request<()>,
    kind: &StreamKind,
    end_stream: bool,
) -> Result<(OpenStream, Option<SelectedTunnel>), Error> {
    if ctx.peer.is_some() {
        return Box::pin(forward_stream(ctx, head, (kind, end_stream))).await;
    }
    let target = &ctx.route.target;
    let opening = ctx.tunnel.open_kept(head, kind, target, end_stream).await;
    let opened = opening.map_err(|error| stream_error(ctx, &error))?;
    Ok((opened, None))
}

/// Returns the error of a stream that failed before its response.
pub(super) fn stream_error(ctx: StreamContext<'_>, error: &StreamError) -> Error {
    Error::from_stream_error(ctx.route.node.as_str(), error)
}

/// Opens a stream for a repeated request (`repeat`), on the tunnel or through the peer of the context only.
///
/// # Errors
/// If the stream cannot be opened there.
pub(super) async fn open_repeated(
    ctx: StreamContext<'_>,
    head: Request<()>,
) -> Result<OpenStream, Error> {
    if ctx.peer.is_some() {
        ctx.proxy.shared.metrics.count_forwarded_stream();
    }
    let opened = open_once(ctx, head, (&StreamKind::Request, true), true).await;
    opened.map_err(|error| match error {
        OpenError::Refused(_, error) | OpenError::Unreachable(error) | OpenError::Failed(error) => {
            error
        }
    })
}

/// Opens a stream through a peer. If the peer has no tunnel of the node that answers, the request goes to this gateway's own tunnel
/// or to another holder, and waits for one like a request without a tunnel.
async fn forward_stream(
    ctx: StreamContext<'_>,
    head: &Request<()>,
    request: (&StreamKind, bool),
) -> Result<(OpenStream, Option<SelectedTunnel>), Error> {
    let shared = &ctx.proxy.shared;
    shared.metrics.count_forwarded_stream();
    let (directory, node) = (shared.registry.directory(), &ctx.route.node);
    let mut moved_to: Option<SelectedTunnel> = None;
    let (mut attempts, mut late_refusals) = (1, 0);
    let deadline = Instant::now() + shared.timeouts.reconnect;
    loop {
        let at = ctx.moved_to(moved_to.as_ref());
        let holder = at.peer.map(AsRef::as_ref);
        let has_alternative = late_refusals < MAX_LATE_REFUSALS
            && directory
                .alternative(node, ctx.proxy.worker, holder)
                .is_some();
        let error = match open_once(at, head.clone(), request, has_alternative).await {
            Ok(opened) => return Ok((opened, moved_to)),
            Err(OpenError::Failed(error)) => return Err(error),
            Err(OpenError::Unreachable(error)) => error,
            Err(OpenError::Refused(refusal, error)) => {
                if refusal == PeerRefusal::Late && has_alternative {
                    // Such a holder serves the request if the others cannot.
                    (late_refusals, attempts) = (late_refusals + 1, attempts - 1);
                }
                error
            }
        };
        attempts += 1;
        if attempts > MAX_ATTEMPTS {
            return Err(error);
        }
        let Ok(next) = select_again(ctx, deadline).await else {
            return Err(error);
        };
        // Another pod may have got the address during the waits.
        ctx.proxy.check_same_pod(ctx.client, ctx.route)?;
        ctx.record.set_tunnel(next.id);
        moved_to = Some(next);
    }
}

/// Opens a stream on the tunnel or through the peer of the context. With `has_alternative`, another gateway can be asked instead.
async fn open_once(
    ctx: StreamContext<'_>,
    mut head: Request<()>,
    (kind, end_stream): (&StreamKind, bool),
    has_alternative: bool,
) -> Result<OpenStream, OpenError> {
    let (shared, node) = (&ctx.proxy.shared, &ctx.route.node);
    let Some(holder) = ctx.peer else {
        let target = &ctx.route.target;
        let opening = ctx.tunnel.open(head, kind, target, end_stream).await;
        return opening.map_err(|error| OpenError::Failed(stream_error(ctx, &error)));
    };
    let fields = forwarded_fields(ctx, kind).map_err(OpenError::Failed)?;
    let fields = ForwardedFields {
        has_alternative,
        ..fields
    };
    fields.set(head.headers_mut());
    let opened = open_at_peer(ctx, head, (kind, end_stream), has_alternative).await;
    if let Err(OpenError::Refused(refusal, _)) = &opened {
        holder.record_refusal(node, *refusal);
        if *refusal == PeerRefusal::NotHeld {
            shared.metrics.count_stale_holder();
            shared.registry.record_left_peer(node, &holder.address);
        }
    }
    opened
}

/// Selects a tunnel or a peer after a failed attempt. A peer that has refused the request may be asked again after a moment.
async fn select_again(
    ctx: StreamContext<'_>,
    deadline: Instant,
) -> Result<SelectedTunnel, NodeUnavailable> {
    let (registry, node) = (&ctx.proxy.shared.registry, &ctx.route.node);
    let remaining = deadline.saturating_duration_since(Instant::now());
    let mut selecting = pin!(registry.select_tunnel_within(node, remaining));
    tokio::select! {
        biased;
        selected = &mut selecting => selected,
        () = sleep(REFUSAL_TIME) => {
            registry.wake_waiting(node);
            selecting.await
        }
    }
}

/// Returns the private fields that a peer needs.
fn forwarded_fields(ctx: StreamContext<'_>, kind: &StreamKind) -> Result<ForwardedFields, Error> {
    let action = (ctx.record.granted_access()).map_or(Action::Connect, |granted| granted.action);
    let is_inside = *kind == StreamKind::Tcp && action != Action::Connect;
    let (method, path) = ctx.record.method_and_path(action);
    let client = ForwardedClient {
        name: ctx.client.name.to_string(),
        groups: ctx.client.groups.to_vec(),
        uris: ctx.client.uris.to_vec(),
        authenticated: ctx.client.method != AuthMethod::Anonymous,
        address: ctx.connection.peer.ip(),
        action,
        inner: is_inside.then(|| (method.to_string(), path.to_owned())),
    };
    let malformed = |error: Box<dyn std::error::Error + Send + Sync>| {
        Reason::Malformed.with_source("the request cannot be forwarded to another gateway", error)
    };
    let json = serde_json::to_vec(&client).map_err(|error| malformed(error.into()))?;
    let client = HeaderValue::try_from(URL_SAFE_NO_PAD.encode(json));
    let trace = HeaderValue::from_str(ctx.record.trace().as_str());
    let trace = trace.map(|mut trace| {
        // It never repeats, so it must not take the place of other values in the table of HPACK.
        trace.set_sensitive(true);
        trace
    });
    Ok(ForwardedFields {
        node: HeaderValue::from_str(ctx.route.node.as_str()).ok(),
        client: Some(client.map_err(|error| malformed(error.into()))?),
        trace: trace.ok(),
        has_alternative: false,
        takes_late_reports: true,
    })
}

/// Error of a stream that was to be opened through a peer.
enum OpenError {
    /// The peer has no usable tunnel of the node, or prefers that another gateway serves the request. The edge has received nothing.
    Refused(PeerRefusal, Error),
    /// The link to the peer is lost or full, or the peer does not answer. The request may be sent again.
    Unreachable(Error),
    /// The peer refused the stream for another reason, or was lost after it may have opened it.
    Failed(Error),
}

/// Opens a stream through the link of the context, and waits until the peer has opened its own stream to the node.
async fn open_at_peer(
    ctx: StreamContext<'_>,
    head: Request<()>,
    (kind, end_stream): (&StreamKind, bool),
    has_alternative: bool,
) -> Result<OpenStream, OpenError> {
    let (link, target) = (ctx.tunnel, &ctx.route.target);
    let peer_error = |error| stream_error(ctx, &error);
    let classify = |may_repeat, error| {
        if may_repeat {
            OpenError::Unreachable(error)
        } else {
            OpenError::Failed(error)
        }
    };
    let is_repeatable = is_repeatable(kind, head.method(), end_stream);
    let opened = link.open(head, kind, target, end_stream).await;
    let mut opened = opened.map_err(|error| {
        let is_of_link = matches!(&error, StreamError::Lost { .. } | StreamError::Busy);
        classify(is_of_link || error.is_refused(), peer_error(error))
    })?;
    let accepting = opened.response.next_informational();
    let limits = if is_repeatable {
        let give_up_after = ACCEPT_TIMEOUT + ctx.proxy.shared.timeouts.authorize;
        (has_alternative.then_some(MIN_LATE), Some(give_up_after))
    } else {
        (Some(SUSPECT_AFTER), None)
    };
    let accepted = wait_for_acceptance(link, accepting, limits).await;
    let interim = accepted.ok_or_else(|| {
        let detail = format!(
            "the gateway that has the tunnel of {} does not answer",
            ctx.route.node
        );
        classify(is_repeatable, Reason::TunnelLost.error(detail))
    })?;
    // A request that the peer has not read, or one without effects (RFC 9110 §9.2.1), may be sent again.
    let interim = interim
        .map_err(|error| classify(error.is_refused() || is_repeatable, peer_error(error)))?;
    if interim.is_some_and(|interim| interim.headers().contains_key(wire::ACCEPTED)) {
        return Ok(opened);
    }
    let answer = opened.response.await;
    let answer = answer.map_err(|error| OpenError::Failed(peer_error(error)))?;
    let header = |name| answer.headers().get(name)?.to_str().ok();
    let detail = header(wire::DETAIL).unwrap_or("the other gateway did not serve the request");
    let with_detail = |reason: Reason| reason.error(detail.to_owned());
    let word = header(wire::REASON).unwrap_or_default();
    if word == wire::LATE {
        let error = with_detail(Reason::NodeNotConnected);
        return Err(OpenError::Refused(PeerRefusal::Late, error));
    }
    Err(match Reason::parse(word) {
        Some(reason @ (Reason::NodeNotConnected | Reason::Draining)) => {
            OpenError::Refused(PeerRefusal::NotHeld, with_detail(reason))
        }
        reason => OpenError::Failed(with_detail(reason.unwrap_or(Reason::TunnelLost))),
    })
}

/// Checks the error that the peer of the context reports after it has accepted a request.
///
/// # Errors
/// The error of the peer.
pub(super) fn check_rejection(ctx: StreamContext<'_>, fields: &HeaderMap) -> Result<(), Error> {
    let header = |name| fields.get(name)?.to_str().ok();
    let Some(word) = header(wire::REASON).filter(|_| ctx.peer.is_some()) else {
        return Ok(());
    };
    let detail = header(wire::DETAIL).unwrap_or("the other gateway failed the request");
    let reason = Reason::parse(word).unwrap_or(Reason::TunnelLost);
    Err(reason.error(detail.to_owned()))
}

/// Whether the peer of the context says by this interim response that its tunnel does not answer at present.
pub(super) fn says_late(ctx: StreamContext<'_>, interim: &Response<()>) -> bool {
    let word = interim.headers().get(wire::REASON);
    ctx.peer.is_some() && word.is_some_and(|word| word == wire::LATE)
}

/// Waits for the first interim response. A link that is late is probed. Returns `None` if the link does not answer the probe for
/// `unanswered`, or after `give_up_after`.
async fn wait_for_acceptance<T>(
    link: &Tunnel,
    accepting: impl Future<Output = T>,
    (unanswered, give_up_after): (Option<Duration>, Option<Duration>),
) -> Option<T> {
    let mut accepting = pin!(accepting);
    if let Ok(accepted) = timeout(PROBE_AFTER, accepting.as_mut()).await {
        return Some(accepted);
    }
    link.request_probe();
    let silent = unanswered.map(|limit| until_unanswered(link, limit));
    let remaining = give_up_after.map(|limit| sleep(limit.saturating_sub(PROBE_AFTER)));
    tokio::select! {
        biased;
        accepted = accepting => Some(accepted),
        Some(()) = OptionFuture::from(silent) => None,
        Some(()) = OptionFuture::from(remaining) => None,
    }
}

/// Serves a request that another gateway has forwarded: on a tunnel of this gateway, never through a third one.
pub(crate) async fn serve(
    shared: &ProxyState,
    request: StreamRequest,
    forwarded_by: ForwardingGateway,
) {
    let (node, client) = match parse_forwarded(&request.forwarded) {
        Ok(forwarded) => forwarded,
        Err(error) => return reject(request.responder, &error),
    };
    let route = Route::new(node, request.target.clone()).with_pod(&shared.nodes);
    let record = ForwardedRecord::begin((shared, forwarded_by), &client, &route, &request);
    let eviction = request.body.eviction_handle();
    let evicted = OptionFuture::from(eviction.as_ref().map(Eviction::wait_for_eviction));
    tokio::select! {
        biased;
        () = serve_unless_evicted(shared, request, client, &record) => {}
        // Dropping the streams resets them.
        Some(()) = evicted => record.record_stream_error(&StreamError::Evicted),
    }
}

async fn serve_unless_evicted(
    shared: &ProxyState,
    request: StreamRequest,
    client: ForwardedClient,
    record: &ForwardedRecord,
) {
    let StreamRequest {
        kind,
        mut head,
        target_overflow_len,
        body,
        mut responder,
        source,
        forwarded,
        ..
    } = request;
    if let Some(source) = source {
        edge_side::set_source(head.headers_mut(), source);
    }
    let framing = (target_overflow_len, body.is_end_stream());
    let opened = {
        let mut opening = pin!(open_own_stream(
            shared,
            (client, &kind),
            (head, framing),
            (&forwarded, record)
        ));
        tokio::select! {
            biased;
            opened = &mut opening => opened,
            _ = responder.wait_for_reset() => return,
        }
    };
    let own = match opened {
        Ok(Some(own)) => own,
        Ok(None) => {
            let detail = "the tunnel of the node does not answer at present";
            record.record_failure(&Reason::NodeNotConnected.error(detail));
            return responder.reject_forwarded(wire::LATE, detail);
        }
        Err(error) => {
            record.record_failure(&error);
            return reject(responder, &error);
        }
    };
    if (responder.send_informational(interim(wire::ACCEPTED, "1"))).is_err() {
        return;
    }
    join_streams(&kind, (body, responder), own, record).await;
}

/// Carries the stream of the other gateway to the edge, and the responses of the edge back.
async fn join_streams(
    kind: &StreamKind,
    (body, responder): (StreamReceiver, StreamResponder),
    OwnStream {
        stream: OpenStream { mut send, response },
        watched,
        _permits,
    }: OwnStream,
    record: &ForwardedRecord,
) {
    let mut upload = pin!(pump(record.count_up(body), &mut send, None));
    let mut download = pin!(return_response(
        responder,
        response,
        watched.as_ref(),
        record
    ));
    let mut is_uploaded = false;
    loop {
        tokio::select! {
            biased;
            uploaded = &mut upload, if !is_uploaded => match uploaded {
                Ok(()) | Err(PumpError::Stream(_) | PumpError::Stalled(_)) => is_uploaded = true,
                // The other gateway has reset the stream.
                Err(PumpError::Body(_)) => return,
            },
            downloaded = &mut download => {
                if !downloaded {
                    return;
                }
                // A session or a request may continue in the other direction.
                let is_aborted = !is_uploaded && matches!(upload.await, Err(PumpError::Body(_)));
                if *kind == StreamKind::Request || !is_aborted {
                    record.mark_complete();
                }
                return;
            }
        }
    }
}

/// Returns an interim response of this gateway to the other one.
fn interim(name: HeaderName, value: &'static str) -> Response<()> {
    let mut head = Response::new(());
    *head.status_mut() = StatusCode::PROCESSING;
    head.headers_mut()
        .insert(name, HeaderValue::from_static(value));
    head
}

fn reject(responder: StreamResponder, error: &Error) {
    responder.reject_forwarded(error.reason.word(), &error.detail);
}

/// Stream of a forwarded request on a tunnel of this gateway.
struct OwnStream {
    stream: OpenStream,
    /// The tunnel, if the other gateway can send the request elsewhere when the tunnel does not answer.
    watched: Option<Tunnel>,
    /// Permits at this gateway and for the node.
    _permits: (ClientPermit, CounterGuard),
}

/// Checks the request and opens its stream to the edge. Returns `None` if the tunnel does not answer at present, and another gateway
/// should serve the request.
async fn open_own_stream(
    shared: &ProxyState,
    (client, kind): (ForwardedClient, &StreamKind),
    (head, framing): (Request<()>, (usize, bool)),
    (forwarded, record): (&ForwardedFields, &ForwardedRecord),
) -> Result<Option<OwnStream>, Error> {
    let route = record.route();
    check_known_pod(shared, route)?;
    let (rule, decision) = authorize(shared, route, (client, kind, &head)).await?;
    record.set_matched_rule(rule);
    decision?;
    route.check_same_pod(&shared.nodes)?;
    let Route { node, target, .. } = route;
    let (selected, _) = shared
        .registry
        .select_own_tunnel(node)
        .map_err(|unavailable| Error::from_unavailable(node, &unavailable))?;
    if forwarded.has_alternative && selected.is_late() {
        return Ok(None);
    }
    record.set_tunnel(selected.id);
    // The other gateway limits the streams of the client.
    let permits = (
        shared.limits.admit_client(&Counter::default())?,
        shared.limits.admit_node(&selected.streams)?,
    );
    let is_watched = forwarded.takes_late_reports && is_repeatable(kind, head.method(), framing.1);
    let stream = selected
        .tunnel
        .open_forwarded(head, (kind, target), framing)
        .await
        .map_err(|error| match error {
            // The edge has received nothing, so the other gateway may try another holder.
            StreamError::Lost { .. } => Reason::NodeNotConnected.error(error.to_string()),
            error => Error::from_stream_error(node.as_str(), &error),
        })?;
    shared.metrics.count_served_for_peer();
    Ok(Some(OwnStream {
        stream,
        watched: is_watched.then_some(selected.tunnel),
        _permits: permits,
    }))
}

/// Checks that this gateway knows the pod of a route that another gateway has found, if its policy depends on pods. This gateway may
/// learn later than the other one of a new pod, so a decision about an unknown one could be wrong.
fn check_known_pod(shared: &ProxyState, route: &Route) -> Result<(), Error> {
    if route.pod == DestinationPod::Unknown && shared.authorizer.depends_on_pods() {
        return Err(Reason::DependencyUnavailable.error(format!(
            "the gateway that has the tunnel of {} does not know the pod at {} yet, or several pods have the address; try again",
            route.node, route.target.host
        )));
    }
    Ok(())
}

fn parse_forwarded(forwarded: &ForwardedFields) -> Result<(NodeName, ForwardedClient), Error> {
    let malformed = || Reason::Malformed.error("another gateway forwarded an invalid request");
    let node = forwarded
        .node
        .as_ref()
        .and_then(|node| NodeName::parse(node.to_str().ok()?).ok());
    let client = forwarded.client.as_ref().and_then(|client| {
        let json = URL_SAFE_NO_PAD.decode(client.as_bytes()).ok()?;
        serde_json::from_slice(&json).ok()
    });
    node.zip(client).ok_or_else(malformed)
}

/// Decides by the policy of this gateway, which may differ from that of the other one. Also returns the rule that decided.
async fn authorize(
    shared: &ProxyState,
    route: &Route,
    (forwarded, kind, head): (ForwardedClient, &StreamKind, &Request<()>),
) -> Result<(Option<MatchedRule>, Result<(), Error>), Error> {
    let authentication = if forwarded.authenticated {
        AuthMethod::Certificate
    } else {
        AuthMethod::Anonymous
    };
    let client = ClientIdentity::new(
        &forwarded.name,
        forwarded.groups,
        authentication,
        &shared.limits,
    )
    .with_uris(forwarded.uris);
    let invalid = |_| Reason::Malformed.error("another gateway forwarded an invalid method");
    let (method, path) = match (&forwarded.inner, kind) {
        (Some((method, path)), StreamKind::Tcp) => (
            Method::from_bytes(method.as_bytes()).map_err(invalid)?,
            path.as_str(),
        ),
        (None, StreamKind::Tcp) => (Method::CONNECT, ""),
        (_, StreamKind::Request | StreamKind::Upgrade(_)) => {
            (head.method().clone(), head.uri().path())
        }
    };
    let remote_address = forwarded.address.map_or(RemoteAddr::Unix(0), |address| {
        RemoteAddr::Tcp(SocketAddr::new(address, 0))
    });
    let request = AuthzRequest {
        client: &client,
        remote_address,
        destination: Destination::Node(route),
        action: forwarded.action,
        method: &method,
        path,
    };
    let authorizer = shared.authorizer.as_ref();
    Ok(authz::check(authorizer, &request, shared.timeouts.authorize).await)
}

/// Waits until a tunnel does not answer, after a pause.
async fn until_late(tunnel: &Tunnel, pause: Duration) {
    sleep(pause).await;
    until_unanswered(tunnel, MIN_LATE).await;
}

/// Sends the edge's responses to the other gateway, and before the final one each second whether the `watched` tunnel does not answer.
/// Returns whether the final one was sent to its end.
async fn return_response(
    mut responder: StreamResponder,
    mut response: StreamResponse,
    watched: Option<&Tunnel>,
    record: &ForwardedRecord,
) -> bool {
    let (mut interims, mut last_interim) = (0, Instant::now());
    let next_report = |pause| OptionFuture::from(watched.map(|tunnel| until_late(tunnel, pause)));
    let mut report = pin!(next_report(Duration::ZERO));
    let answer = loop {
        let received = tokio::select! {
            biased;
            received = response.next_informational() => received,
            _ = responder.wait_for_reset() => return false,
            Some(()) = &mut report => {
                // A stream that was reset is noticed above.
                let _ = responder.send_informational(interim(wire::REASON, wire::LATE));
                report.set(next_report(REPORT_INTERVAL));
                continue;
            }
        };
        match received {
            Ok(Some(mut interim)) => {
                interims += 1;
                if interims <= INTERIM_BURST || last_interim.elapsed() >= INTERIM_INTERVAL {
                    last_interim = Instant::now();
                    strip_gateway_fields(interim.headers_mut());
                    // A stream that was reset is noticed above.
                    let _ = responder.send_informational(interim);
                }
            }
            Ok(None) => break response.await,
            Err(error) => break Err(error),
        }
    };
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            record.record_stream_error(&error);
            let node = record.route().node.as_str();
            reject(responder, &Error::from_stream_error(node, &error));
            return false;
        }
    };
    let (mut parts, body) = answer.into_parts();
    record.response_started(parts.status, &parts.headers);
    strip_gateway_fields(&mut parts.headers);
    let is_end = body.is_end_stream();
    let Ok(mut send) = responder.send(Response::from_parts(parts, ()), is_end) else {
        return false;
    };
    if is_end {
        return true;
    }
    let eviction = body.eviction_handle();
    let evicted = OptionFuture::from(eviction.as_ref().map(Eviction::wait_for_eviction));
    let result = tokio::select! {
        biased;
        result = pump(record.count_down(body), &mut send, None) => result,
        Some(()) = evicted => Err(PumpError::Body(StreamError::Evicted)),
    };
    if let Err(PumpError::Body(error)) = &result {
        record.record_stream_error(error);
    }
    result.is_ok()
}

/// Removes the fields by which a gateway speaks to another one. An edge must not speak in the name of a gateway.
fn strip_gateway_fields(fields: &mut HeaderMap) {
    fields.remove(wire::REASON);
    fields.remove(wire::ACCEPTED);
}

#[cfg(test)]
mod tests;
