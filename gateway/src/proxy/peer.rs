//! Requests for nodes of other gateways: forwarded over a link to the gateway that holds the node, and served there.
//!
//! The gateway that the client has reached does everything that depends on the client: it authenticates, authorizes, limits and
//! logs. The holder checks its own policy and the limits of the node, opens the stream to the edge, says so by an interim
//! response, and joins both streams. A request passes between gateways at most once: the holder uses only its own tunnels. If it
//! has none, it refuses before it has read the body, and the request goes to the next holder.

use super::{
    authn::{AuthMethod, ClientIdentity},
    authz::{self, Action, AuthzRequest, Destination},
    context::{ProxyState, StreamContext},
    limits::{Counter, Permit},
    route::Route,
};
use crate::error::{Error, Reason};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use causeway_certs::NodeName;
use causeway_rt::listener::RemoteAddr;
use causeway_tunnel::{
    StreamError, StreamKind, Target, Tunnel,
    body::{PumpError, pump},
    edge_side::{ForwardedFields, StreamRequest, StreamResponder},
    eviction::Eviction,
    gateway_side::{OpenStream, StreamResponse},
    wire,
};
use futures_util::future::OptionFuture;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::Body;
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, SocketAddr},
    pin::pin,
};

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
    method: String,
    path: String,
}

/// Opens a stream to the node of the route: on its tunnel, or through a peer that holds the node.
///
/// # Errors
/// If the stream cannot be opened, or no peer has a tunnel of the node any more.
pub(super) async fn open_stream(
    ctx: StreamContext<'_>,
    head: Request<()>,
    kind: &StreamKind,
    end_stream: bool,
) -> Result<OpenStream, Error> {
    if ctx.peer.is_some() {
        return Box::pin(forward_stream(ctx, head, kind, end_stream)).await;
    }
    let opening = ctx
        .tunnel
        .open(head, kind, &ctx.route.target, end_stream)
        .await;
    opening.map_err(|error| stream_error(ctx, &error))
}

fn stream_error(ctx: StreamContext<'_>, error: &StreamError) -> Error {
    Error::from_stream_error(ctx.route.node.as_str(), error)
}

/// Opens a stream through a peer. If the peer has no tunnel of the node, one more holder is tried.
async fn forward_stream(
    ctx: StreamContext<'_>,
    mut head: Request<()>,
    kind: &StreamKind,
    end_stream: bool,
) -> Result<OpenStream, Error> {
    let registry = &ctx.proxy.shared.registry;
    forwarded_fields(ctx)?.set(head.headers_mut());
    let metrics = &ctx.proxy.shared.metrics;
    metrics.count_forwarded_stream();
    let request = (kind, &ctx.route.target, end_stream);
    let refusal = match open_at_peer(ctx, ctx.tunnel, head.clone(), request).await {
        Err(OpenError::NotHeld(refusal)) => refusal,
        Err(OpenError::Failed(error)) => return Err(error),
        Ok(opened) => return Ok(opened),
    };
    metrics.count_stale_holder();
    let (node, worker) = (&ctx.route.node, registry.worker(&ctx.route.node));
    let excluded = ctx.peer.map(AsRef::as_ref);
    let Some(next) = registry.directory().select(node, worker, excluded) else {
        return Err(refusal);
    };
    ctx.record.set_tunnel(next.link.id);
    match open_at_peer(ctx, &next.link.tunnel, head, request).await {
        Err(OpenError::NotHeld(error) | OpenError::Failed(error)) => Err(error),
        Ok(opened) => Ok(opened),
    }
}

/// Returns the private fields that a peer needs.
fn forwarded_fields(ctx: StreamContext<'_>) -> Result<ForwardedFields, Error> {
    let granted = ctx.record.granted_access().map(|(granted, ..)| granted);
    let client = ForwardedClient {
        name: ctx.client.name.to_string(),
        groups: ctx.client.groups.to_vec(),
        uris: ctx.client.uris.to_vec(),
        authenticated: ctx.client.method != AuthMethod::Anonymous,
        address: ctx.connection.peer.ip(),
        action: granted
            .as_ref()
            .map_or(Action::Connect, |granted| granted.action),
        method: granted.as_ref().map_or_else(
            || Method::CONNECT.to_string(),
            |granted| granted.method.to_string(),
        ),
        path: granted.map_or_else(String::new, |granted| granted.path.clone()),
    };
    let malformed = |error: Box<dyn std::error::Error + Send + Sync>| {
        Reason::Malformed.with_source("the request cannot be forwarded to another gateway", error)
    };
    let json = serde_json::to_vec(&client).map_err(|error| malformed(error.into()))?;
    let client = HeaderValue::try_from(URL_SAFE_NO_PAD.encode(json));
    Ok(ForwardedFields {
        node: HeaderValue::from_str(ctx.route.node.as_str()).ok(),
        client: Some(client.map_err(|error| malformed(error.into()))?),
    })
}

/// Error of a stream that was to be opened through a peer.
enum OpenError {
    /// The peer has no usable tunnel of the node, or cannot be reached. The edge has received nothing.
    NotHeld(Error),
    /// The peer refused the stream for another reason, or was lost after it may have opened it.
    Failed(Error),
}

/// Opens a stream through this link, and waits until the peer has opened its own stream to the node.
async fn open_at_peer(
    ctx: StreamContext<'_>,
    link: &Tunnel,
    head: Request<()>,
    (kind, target, end_stream): (&StreamKind, &Target, bool),
) -> Result<OpenStream, OpenError> {
    let peer_error = |error| stream_error(ctx, &error);
    let is_repeatable = *kind == StreamKind::Request && end_stream && head.method().is_safe();
    let opened = link.open(head, kind, target, end_stream).await;
    let mut opened = opened.map_err(|error| OpenError::NotHeld(peer_error(error)))?;
    let interim = opened.response.next_informational().await;
    let interim = interim.map_err(|error| {
        // A request that the peer has not read, or one without effects (RFC 9110 §9.2.2), may be sent again.
        let may_repeat = error.is_refused() || is_repeatable;
        let error = peer_error(error);
        if may_repeat {
            OpenError::NotHeld(error)
        } else {
            OpenError::Failed(error)
        }
    })?;
    if interim.is_some_and(|interim| interim.headers().contains_key(wire::ACCEPTED)) {
        return Ok(opened);
    }
    let answer = opened.response.await;
    let answer = answer.map_err(|error| OpenError::Failed(peer_error(error)))?;
    let header = |name| answer.headers().get(name)?.to_str().ok();
    let reason = header(wire::REASON).and_then(Reason::parse);
    let detail = header(wire::DETAIL).unwrap_or("the other gateway did not serve the request");
    let error = reason
        .unwrap_or(Reason::TunnelLost)
        .error(detail.to_owned());
    Err(match reason {
        Some(Reason::NodeNotConnected | Reason::Draining) => OpenError::NotHeld(error),
        _ => OpenError::Failed(error),
    })
}

/// Serves a request that another gateway has forwarded: on a tunnel of this gateway, never through a third one.
pub(crate) async fn serve(shared: &ProxyState, request: StreamRequest) {
    let eviction = request.body.eviction_handle();
    let evicted = OptionFuture::from(eviction.as_ref().map(Eviction::wait_for_eviction));
    tokio::select! {
        biased;
        () = serve_unless_evicted(shared, request) => {}
        // Dropping the streams resets them.
        Some(()) = evicted => {}
    }
}

async fn serve_unless_evicted(shared: &ProxyState, request: StreamRequest) {
    let StreamRequest {
        kind,
        target,
        head,
        target_overflow_len,
        body,
        mut responder,
        forwarded,
    } = request;
    let framing = (target_overflow_len, body.is_end_stream());
    let opened = {
        let mut opening = pin!(open_own_stream(
            shared,
            (&kind, &target),
            (head, framing),
            &forwarded
        ));
        tokio::select! {
            biased;
            opened = &mut opening => opened,
            _ = responder.wait_for_reset() => return,
        }
    };
    let (opened, _permit, node) = match opened {
        Ok(opened) => opened,
        Err(error) => return reject(responder, &error),
    };
    if responder.send_informational(accepted()).is_err() {
        return;
    }
    let OpenStream { mut send, response } = opened;
    let mut upload = pin!(pump(body, &mut send, None));
    let mut download = pin!(return_response(responder, response, &node));
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
                // A session or a request may continue in the other direction.
                if downloaded && !is_uploaded {
                    let _ = upload.await;
                }
                return;
            }
        }
    }
}

/// Returns the interim response to a request that is forwarded to the node.
fn accepted() -> Response<()> {
    let mut head = Response::new(());
    *head.status_mut() = StatusCode::PROCESSING;
    let value = HeaderValue::from_static("1");
    head.headers_mut().insert(wire::ACCEPTED, value);
    head
}

fn reject(responder: StreamResponder, error: &Error) {
    responder.reject_forwarded(error.reason.word(), &error.detail);
}

/// Checks the request and opens its stream to the edge.
async fn open_own_stream(
    shared: &ProxyState,
    (kind, target): (&StreamKind, &Target),
    (head, framing): (Request<()>, (usize, bool)),
    forwarded: &ForwardedFields,
) -> Result<(OpenStream, Permit, NodeName), Error> {
    let (node, client) = parse_forwarded(forwarded)?;
    let route = Route {
        node,
        target: target.clone(),
    };
    authorize(shared, &route, client).await?;
    let node = route.node;
    let (selected, _) = shared
        .registry
        .select_own_tunnel(&node)
        .map_err(|unavailable| Error::from_unavailable(&node, &unavailable))?;
    // The other gateway limits the streams of the client.
    let limits = (&Counter::default(), &selected.streams);
    let permit = shared.limits.admit_stream(limits.0, limits.1)?;
    let opened = selected
        .tunnel
        .open_forwarded(head, (kind, target), framing)
        .await
        .map_err(|error| Error::from_stream_error(node.as_str(), &error))?;
    shared.metrics.count_served_for_peer();
    Ok((opened, permit, node))
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

/// Decides by the policy of this gateway, which may differ from that of the other one.
async fn authorize(
    shared: &ProxyState,
    route: &Route,
    forwarded: ForwardedClient,
) -> Result<(), Error> {
    let method = if forwarded.authenticated {
        AuthMethod::Certificate
    } else {
        AuthMethod::Anonymous
    };
    let client = ClientIdentity::new(&forwarded.name, forwarded.groups, method, &shared.limits)
        .with_uris(forwarded.uris);
    let request_method = Method::from_bytes(forwarded.method.as_bytes())
        .map_err(|_| Reason::Malformed.error("another gateway forwarded an invalid method"))?;
    let remote_address = forwarded.address.map_or(RemoteAddr::Unix(0), |address| {
        RemoteAddr::Tcp(SocketAddr::new(address, 0))
    });
    let request = AuthzRequest {
        client: &client,
        remote_address,
        destination: Destination::Node(route),
        action: forwarded.action,
        method: &request_method,
        path: &forwarded.path,
    };
    let (_, decision) = authz::check(
        shared.authorizer.as_ref(),
        &request,
        shared.timeouts.authorize,
    )
    .await;
    decision
}

/// Sends the edge's responses to the other gateway. Returns whether the final one was sent to its end.
async fn return_response(
    mut responder: StreamResponder,
    mut response: StreamResponse,
    node: &NodeName,
) -> bool {
    let answer = loop {
        let interim = tokio::select! {
            biased;
            interim = response.next_informational() => interim,
            _ = responder.wait_for_reset() => return false,
        };
        match interim {
            // A stream that was reset is noticed above.
            Ok(Some(interim)) => drop(responder.send_informational(interim)),
            Ok(None) => break response.await,
            Err(error) => break Err(error),
        }
    };
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            reject(responder, &Error::from_stream_error(node.as_str(), &error));
            return false;
        }
    };
    let (parts, body) = answer.into_parts();
    let is_end = body.is_end_stream();
    let Ok(mut send) = responder.send(Response::from_parts(parts, ()), is_end) else {
        return false;
    };
    if is_end {
        return true;
    }
    let eviction = body.eviction_handle();
    let evicted = OptionFuture::from(eviction.as_ref().map(Eviction::wait_for_eviction));
    tokio::select! {
        biased;
        result = pump(body, &mut send, None) => result.is_ok(),
        Some(()) = evicted => false,
    }
}
