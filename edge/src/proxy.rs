//! Data path on the node: stream → policy → target → upstream. Read `Proxy::serve` first.
//!
//! 1. `policy` decides whether this edge serves the stream's target, and selects the upstream.
//! 2. `dial` resolves the target, checks each address, and connects only to an address that it has checked.
//! 3. `forward`, `upgrade` or `relay` sends the request to the upstream. Interim responses are passed on meanwhile.
//! 4. The head of the response is sent to the client. Then bytes are copied until both directions have ended.
//!
//! This module does not depend on how tunnels are maintained. When a client disconnects, the future of the stream is dropped,
//! and with it the connection to the upstream. There is no other cancellation.

pub(crate) mod policy;

pub(crate) mod dial;

mod upstream;
mod upstream_tls;

mod informational;
mod request_body;

mod http1_pool;
mod http2_pool;

mod response;

mod forward;
mod upgrade;

mod relay;

mod health_check;

pub(crate) use health_check::PortCheck;
pub(crate) use policy::{LocalNode, Policy};
pub use upstream_tls::TlsError;

use crate::{
    config::Timeouts,
    metrics::{Metrics, StreamGuard, StreamOutcome},
};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    RejectCode, StreamError, StreamKind, StreamReceiver, Target,
    body::{PumpError, pump},
    edge_side::{StreamRequest, StreamResponder},
    error::Rejected,
    eviction::Eviction,
    request_target::{OverflowBuffer, TargetOverflow},
};
use dial::{Connected, Dialer};
use forward::UpstreamClient;
use futures_util::future::OptionFuture;
use http::Request;
use http1_pool::ConnectionPool;
use informational::InformationalQueue;
use response::{ResponseTail, UpstreamResponse};
use std::{future::pending, net::SocketAddr, pin::pin, sync::Arc};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};
use upstream::{RequestError, Upstream, UpstreamKey};

/// Request of a stream, whose parts the exchange with the upstream takes.
struct UnsentRequest {
    head: Request<()>,
    /// Body of the request, or the far half of a session.
    body: Option<StreamReceiver>,
    /// Number of the body's first bytes that are the rest of the target.
    target_overflow_len: usize,
    /// Client of a TCP session.
    source: Option<SocketAddr>,
}

impl UnsentRequest {
    fn new(
        head: Request<()>,
        (body, target_overflow_len, source): (StreamReceiver, usize, Option<SocketAddr>),
    ) -> Self {
        Self {
            head,
            body: Some(body),
            target_overflow_len,
            source,
        }
    }

    /// Takes the stream of a session.
    fn take_session(&mut self) -> Result<StreamReceiver, RequestError> {
        self.body.take().ok_or(RequestError::Client)
    }
}

/// Server of the streams of all tunnels.
pub(crate) struct Proxy {
    client: UpstreamClient,
    /// Token that is cancelled once the owner has applied another configuration.
    replaced: CancellationToken,
}

impl Proxy {
    pub(crate) fn new(
        policy: Policy,
        (timeouts, max_response_headers): (Timeouts, usize),
        metrics: Arc<Metrics>,
        tasks: Arc<TaskGroup>,
    ) -> Self {
        let client = UpstreamClient {
            dialer: Dialer::new(policy, timeouts.dial, metrics.clone()),
            pool: ConnectionPool::new(timeouts.upstream_idle),
            upgrade_bound: timeouts.upgrade,
            most_fields: max_response_headers,
            metrics,
            tasks,
        };
        Self {
            client,
            replaced: CancellationToken::new(),
        }
    }

    /// Sets the token. Once `replaced` is cancelled, the newest policy checks the open streams.
    #[must_use]
    pub(crate) fn with_replaced_token(self, replaced: CancellationToken) -> Self {
        Self { replaced, ..self }
    }

    /// Returns the token that is cancelled once the owner has applied another configuration.
    pub(crate) fn replaced(&self) -> &CancellationToken {
        &self.replaced
    }

    /// Serves a stream from its request to the upstream's response. The stream ends early if it is evicted because the
    /// upstream does not read its buffered bytes. It also ends early if the policy of `current_proxy` refuses it.
    pub(crate) async fn serve(
        &self,
        request: Box<StreamRequest>,
        current_proxy: impl Fn() -> Arc<Self>,
    ) {
        let mut served = StreamGuard::new(&self.client.metrics, &request.kind);
        let eviction = request.body.eviction_handle();
        let evicted = OptionFuture::from(eviction.as_ref().map(Eviction::wait_for_eviction));
        tokio::select! {
            biased;
            () = self.serve_unless_evicted(request, current_proxy, &mut served) => return,
            Some(()) = evicted => {}
        }
        served.set_outcome(StreamOutcome::Evicted);
    }

    /// The request stays boxed until here, because each future holds its arguments twice.
    async fn serve_unless_evicted(
        &self,
        request: Box<StreamRequest>,
        current_proxy: impl Fn() -> Arc<Self>,
        stream_guard: &mut StreamGuard<'_>,
    ) {
        let StreamRequest {
            kind,
            target,
            head,
            target_overflow_len,
            body,
            mut responder,
            source,
            ..
        } = *request;
        let (informational, connected) = (InformationalQueue::default(), Connected::default());
        let withdrawal = responder.withdrawal_handle();
        let app = self.client.dialer.policy.select_upstream(&target, &kind);
        let stream_key = (app.clone().ok(), &target, &kind);
        let mut revocation = pin!(self.wait_for_revocation(stream_key, &connected, current_proxy));
        let response = {
            let mut request = UnsentRequest::new(head, (body, target_overflow_len, source));
            let progress = (&informational, &connected);
            let mut exchange = pin!(self.request_upstream(app, &kind, &mut request, progress));
            loop {
                tokio::select! {
                    biased;
                    // This drops the future that owns the upstream connection.
                    _ = responder.wait_for_reset() => return stream_guard.set_outcome(StreamOutcome::ClientClosed),
                    head = informational.next() => match head {
                        Some(head) => drop(responder.send_informational(head)),
                        None => break Err(too_many_informational(&target)),
                    },
                    response = &mut exchange => break response,
                    rejection = &mut revocation => break Err(rejection.into()),
                }
            }
        };
        while let Some(head) = informational.pop() {
            // An error of a reset stream is returned below.
            let _ = responder.send_informational(head);
        }
        match response {
            Err(RequestError::Client) => stream_guard.set_outcome(StreamOutcome::ClientClosed),
            Err(RequestError::Refused(rejection)) => {
                stream_guard.set_outcome(StreamOutcome::Refused(rejection.code));
                refuse(responder, &target, &rejection);
            }
            Ok(UpstreamResponse { head, then: tail }) => {
                let is_end = matches!(&tail, ResponseTail::Body(body) if body.is_end());
                let Ok(sender) = responder.send(head, is_end) else {
                    return stream_guard.set_outcome(StreamOutcome::ClientClosed);
                };
                let mut sending = pin!(self.send_tail(tail, sender, is_end));
                tokio::select! {
                    biased;
                    outcome = &mut sending => stream_guard.set_outcome(outcome),
                    rejection = &mut revocation => {
                        info!(%target, detail = %rejection.detail, "closing a stream that `allow` and `ports` no longer permit");
                        withdrawal.withdraw();
                        stream_guard.set_outcome(StreamOutcome::Refused(rejection.code));
                    }
                }
            }
        }
    }

    /// Waits until the owner applies a policy that refuses this stream, or the address that it is connected to.
    async fn wait_for_revocation(
        &self,
        (upstream, target, kind): (Option<Arc<Upstream>>, &Target, &StreamKind),
        connected: &Connected,
        current_proxy: impl Fn() -> Arc<Self>,
    ) -> Rejected {
        let Some(upstream) = upstream else {
            return pending().await;
        };
        // Borrowed, because cloning the token for each stream takes a lock that all threads share.
        self.replaced.cancelled().await;
        let mut address = None;
        loop {
            let current = current_proxy();
            if let Err(rejection) = current.permits((&upstream, address), target, kind) {
                return rejection;
            }
            let replaced = current.replaced.clone();
            drop(current);
            tokio::select! {
                () = replaced.cancelled() => {}
                // The stream keeps dialling with the policy under which it began.
                other = connected.wait_for_change_from(address) => address = Some(other),
            }
        }
    }

    /// Checks whether a stream to this upstream, and to this address if it is connected, would be permitted now. Nothing but the
    /// configuration says where the name of a service leads.
    fn permits(
        &self,
        (upstream, address): (&Upstream, Option<SocketAddr>),
        target: &Target,
        kind: &StreamKind,
    ) -> Result<(), Rejected> {
        let policy = &self.client.dialer.policy;
        let current = policy.select_upstream(target, kind)?;
        let has_moved =
            matches!(upstream.id, UpstreamKey::Service(_)) && current.target != upstream.target;
        let is_forbidden = |address| policy.permitted_address(upstream, address).is_none();
        if has_moved || address.is_some_and(is_forbidden) {
            return Err(policy.not_allowed(&upstream.target));
        }
        Ok(())
    }

    /// Sends the request to the upstream, according to the stream's kind. An upgrade is boxed, because it is rare and larger
    /// than a request, and this future is moved as a whole with each stream. The request is borrowed, because a future has room
    /// for an argument twice.
    async fn request_upstream(
        &self,
        upstream: Result<Arc<Upstream>, Rejected>,
        kind: &StreamKind,
        request: &mut UnsentRequest,
        (informational, connected): (&InformationalQueue, &Connected),
    ) -> Result<UpstreamResponse, RequestError> {
        if request.target_overflow_len > 0
            && let Some(body) = &mut request.body
        {
            let reading = read_target_overflow(body, request.target_overflow_len);
            let overflow = Box::pin(reading).await?;
            request.head.extensions_mut().insert(overflow);
        }
        let upstream = upstream?;
        match kind {
            StreamKind::Request => {
                let request = (&mut request.head, &mut request.body);
                let progress = (informational, connected);
                forward::send_request(&self.client, &upstream, request, progress).await
            }
            StreamKind::Upgrade(token) => {
                let request = (std::mem::take(&mut request.head), request.take_session()?);
                let progress = (informational, connected);
                Box::pin(upgrade::send_upgrade(
                    &self.client,
                    &upstream,
                    token,
                    request,
                    progress,
                ))
                .await
            }
            StreamKind::Tcp => {
                let dialer = &self.client.dialer;
                let client = (request.take_session()?, request.source);
                relay::dial_upstream(dialer, &upstream, client, connected).await
            }
        }
    }

    /// Copies the content behind the head, until both directions have ended.
    async fn send_tail(
        &self,
        tail: ResponseTail,
        mut send: causeway_tunnel::StreamSender,
        ended: bool,
    ) -> StreamOutcome {
        match tail {
            ResponseTail::Bytes(socket, receive) => {
                relay::relay_bytes(*socket, send, receive).await
            }
            ResponseTail::Body(mut body) => {
                if !ended && let Err(error) = pump(&mut body, &mut send, None).await {
                    return pump_outcome(&error);
                }
                // The client's stream must not stay open until the upstream connection is idle.
                drop(send);
                body.return_connection(&self.client.pool).await;
                StreamOutcome::Done
            }
        }
    }

    /// Closes expired idle connections to upstreams.
    pub(crate) fn sweep(&self) {
        self.client.pool.evict_expired();
    }
}

fn refuse(responder: StreamResponder, target: &Target, rejection: &Rejected) {
    debug!(%target, reason = rejection.code.as_str(), detail = %rejection.detail, "stream refused");
    responder.reject(rejection);
}

fn pump_outcome<E: std::fmt::Display>(error: &PumpError<E>) -> StreamOutcome {
    match error {
        PumpError::Body(error) => {
            debug!(%error, "an upstream closed the connection during its response");
            StreamOutcome::UpstreamFailed
        }
        PumpError::Stream(StreamError::Lost { .. }) => StreamOutcome::TunnelLost,
        PumpError::Stream(StreamError::Evicted) => StreamOutcome::Evicted,
        PumpError::Stream(_) | PumpError::Stalled(_) => StreamOutcome::ClientClosed,
    }
}

/// Reads the rest of a request's target, which is at the beginning of the stream.
async fn read_target_overflow(
    body: &mut StreamReceiver,
    length: usize,
) -> Result<TargetOverflow, RequestError> {
    let mut overflow = OverflowBuffer::default();
    while overflow.len() < length {
        let Some(chunk) = body.next_chunk().await else {
            return Err(RequestError::Client);
        };
        let mut chunk = chunk.map_err(|_| RequestError::Client)?;
        let missing = length - overflow.len();
        if chunk.len() > missing {
            body.put_back(chunk.split_off(missing));
        }
        if !overflow.append(&chunk) {
            let detail = "the edge has no memory left for requests with long targets";
            return Err(RejectCode::Busy.with_detail(detail).into());
        }
    }
    Ok(overflow.finish())
}

fn too_many_informational(target: &causeway_tunnel::Target) -> RequestError {
    let detail = format!("{target} sent too many interim responses without a final response");
    RejectCode::TargetBroken.with_detail(detail).into()
}

#[cfg(test)]
mod tests;
