//! Data path on the node: stream → policy → target → upstream. Read `Proxy::serve` first.
//!
//! 1. `policy` decides whether this edge serves the stream's target, and selects the upstream.
//! 2. `dial` resolves it, checks each address, and dials exactly the address that was checked.
//! 3. `forward`, `upgrade` or `relay` sends the request to the upstream; interim answers pass while it works.
//! 4. The answer's head goes back, then bytes until both ends are done.
//!
//! Nothing here knows how tunnels are maintained. A client that goes away ends the stream's future, and with it the
//! connection to the upstream: there is no other cancellation.

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
    edge_side::StreamRequest,
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
use upstream::{RequestError, Upstream};

/// Server of the streams of all tunnels.
pub(crate) struct Proxy {
    client: UpstreamClient,
    /// The owner has put another configuration into force.
    replaced: CancellationToken,
}

impl Proxy {
    pub(crate) fn new(
        policy: Policy,
        (timeouts, most_fields): (Timeouts, usize),
        metrics: Arc<Metrics>,
        tasks: Arc<TaskGroup>,
    ) -> Self {
        let client = UpstreamClient {
            dialer: Dialer::new(policy, timeouts.dial, metrics.clone()),
            kept: ConnectionPool::new(timeouts.upstream_idle),
            upgrade_bound: timeouts.upgrade,
            most_fields,
            metrics,
            tasks,
        };
        Self {
            client,
            replaced: CancellationToken::new(),
        }
    }

    /// Has the open streams checked by the newest policy once `replaced` is cancelled.
    #[must_use]
    pub(crate) fn until(self, replaced: CancellationToken) -> Self {
        Self { replaced, ..self }
    }

    /// Returns the token that is cancelled once the owner has put another configuration into force.
    pub(crate) fn replaced(&self) -> &CancellationToken {
        &self.replaced
    }

    /// Serves a stream from its request to the upstream's answer, unless the stream is evicted because the upstream does not
    /// take the bytes that wait for it, or the policy of the `newest` data path refuses it.
    pub(crate) async fn serve(&self, asked: StreamRequest, newest: impl Fn() -> Arc<Self>) {
        let mut served = StreamGuard::new(&self.client.metrics, &asked.kind);
        let eviction = asked.body.eviction();
        let evicted = OptionFuture::from(eviction.as_ref().map(Eviction::evicted));
        tokio::select! {
            biased;
            () = self.serve_unless_evicted(asked, newest, &mut served) => return,
            Some(()) = evicted => {}
        }
        served.end(StreamOutcome::Evicted);
    }

    async fn serve_unless_evicted(
        &self,
        asked: StreamRequest,
        newest: impl Fn() -> Arc<Self>,
        served: &mut StreamGuard<'_>,
    ) {
        let StreamRequest {
            kind,
            target,
            head,
            target_rest,
            body,
            mut reply,
        } = asked;
        let interim = InformationalQueue::default();
        let withdrawal = reply.withdrawal();
        let app = self.client.dialer.policy.decide(&target, &kind);
        let stream = (app.clone().ok(), &target, &kind);
        let connected = Connected::default();
        let mut refused_later = pin!(self.refused_later(stream, &connected, newest));
        let answer = {
            let content = (body, target_rest);
            let progress = (&interim, &connected);
            let mut asking = pin!(self.ask(app, &kind, (head, content), progress));
            loop {
                tokio::select! {
                    biased;
                    // This drops the future that owns the upstream connection.
                    _ = reply.reset() => return served.end(StreamOutcome::ClientClosed),
                    head = interim.next() => match head {
                        Some(head) => drop(reply.interim(head)),
                        None => break Err(endless(&target)),
                    },
                    answer = &mut asking => break answer,
                    refused = &mut refused_later => break Err(refused.into()),
                }
            }
        };
        while let Some(head) = interim.pop() {
            // An error of a reset stream is returned below.
            let _ = reply.interim(head);
        }
        match answer {
            Err(RequestError::Client) => served.end(StreamOutcome::ClientClosed),
            Err(RequestError::Refused(refused)) => {
                debug!(%target, reason = refused.refusal.word(), detail = %refused.detail, "stream refused");
                served.end(StreamOutcome::Refused(refused.refusal));
                reply.refuse(&refused);
            }
            Ok(UpstreamResponse { head, then }) => {
                let end = matches!(&then, ResponseTail::Body(body) if body.is_end());
                let Ok(send) = reply.send(head, end) else {
                    return served.end(StreamOutcome::ClientClosed);
                };
                let mut passing = pin!(self.pass(then, send, end));
                tokio::select! {
                    biased;
                    ending = &mut passing => served.end(ending),
                    refused = &mut refused_later => {
                        info!(%target, detail = %refused.detail, "closing a stream that `allow` and `ports` no longer permit");
                        withdrawal.withdraw();
                        served.end(StreamOutcome::Refused(refused.refusal));
                    }
                }
            }
        }
    }

    /// Waits until the owner puts a policy into force that refuses this stream or the address that it is connected to.
    async fn refused_later(
        &self,
        (app, target, kind): (Option<Arc<Upstream>>, &Target, &StreamKind),
        connected: &Connected,
        newest: impl Fn() -> Arc<Self>,
    ) -> Rejected {
        let Some(app) = app else {
            return pending().await;
        };
        // Borrowed, because cloning the token for each stream takes a lock that all threads share.
        self.replaced.cancelled().await;
        let mut address = None;
        loop {
            let newest = newest();
            if let Err(refused) = newest.permits((&app, address), target, kind) {
                return refused;
            }
            let replaced = newest.replaced.clone();
            drop(newest);
            tokio::select! {
                () = replaced.cancelled() => {}
                // The stream keeps dialling with the policy under which it began.
                other = connected.other_than(address) => address = Some(other),
            }
        }
    }

    /// Whether a stream to this upstream, connected to this address if to any, could begin now.
    fn permits(
        &self,
        (app, address): (&Upstream, Option<SocketAddr>),
        target: &Target,
        kind: &StreamKind,
    ) -> Result<(), Rejected> {
        self.client.dialer.policy.decide(target, kind)?;
        match address {
            Some(address) if self.client.dialer.policy.check(app, address).is_none() => {
                Err(self.client.dialer.policy.forbidden(&app.target))
            }
            _ => Ok(()),
        }
    }

    /// Sends the request to the upstream, according to the stream's kind. An upgrade is allocated, since it is rare and
    /// needs more room than a request: this future is moved as a whole with each stream.
    async fn ask(
        &self,
        app: Result<Arc<Upstream>, Rejected>,
        kind: &StreamKind,
        (mut head, (mut body, rest)): (Request<()>, (StreamReceiver, usize)),
        (interim, connected): (&InformationalQueue, &Connected),
    ) -> Result<UpstreamResponse, RequestError> {
        if rest > 0 {
            let rest = Box::pin(read_rest(&mut body, rest)).await?;
            head.extensions_mut().insert(rest);
        }
        let app = app?;
        match kind {
            StreamKind::Request => {
                let progress = (interim, connected);
                forward::send_request(&self.client, &app, (head, body), progress).await
            }
            StreamKind::Upgrade(token) => {
                let asked = (head, body);
                let progress = (interim, connected);
                Box::pin(upgrade::ask(&self.client, &app, token, asked, progress)).await
            }
            StreamKind::Tcp => relay::ask(&self.client.dialer, &app, body, connected).await,
        }
    }

    /// Passes what follows the head, until both ends are done.
    async fn pass(
        &self,
        then: ResponseTail,
        mut send: causeway_tunnel::StreamSender,
        ended: bool,
    ) -> StreamOutcome {
        match then {
            ResponseTail::Bytes(socket, receive) => relay::pass(*socket, send, receive).await,
            ResponseTail::Body(mut body) => {
                if !ended && let Err(error) = pump(&mut *body, &mut send, None).await {
                    return ending(&error);
                }
                // The client's stream must not stay open until the upstream connection is idle.
                drop(send);
                body.keep(&self.client.kept).await;
                StreamOutcome::Done
            }
        }
    }

    /// Closes idle connections to upstreams that have had their time.
    pub(crate) fn sweep(&self) {
        self.client.kept.evict_expired();
    }
}

fn ending<E: std::fmt::Display>(error: &PumpError<E>) -> StreamOutcome {
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

/// Reads the rest of a request's target, which is the beginning of the stream.
async fn read_rest(
    body: &mut StreamReceiver,
    length: usize,
) -> Result<TargetOverflow, RequestError> {
    let mut rest = OverflowBuffer::default();
    while rest.len() < length {
        let Some(chunk) = body.data().await else {
            return Err(RequestError::Client);
        };
        let chunk = chunk.map_err(|_| RequestError::Client)?;
        if rest.len() + chunk.len() > length {
            let detail = "the remaining bytes of the request target do not end at a frame boundary";
            return Err(RejectCode::Malformed.because(detail).into());
        }
        if !rest.append(&chunk) {
            let detail = "the edge has no memory left for requests with long targets";
            return Err(RejectCode::Busy.because(detail).into());
        }
    }
    Ok(rest.finish())
}

fn endless(target: &causeway_tunnel::Target) -> RequestError {
    let detail = format!("{target} sent too many interim responses without a final response");
    RejectCode::TargetBroken.because(detail).into()
}

#[cfg(test)]
mod tests;
