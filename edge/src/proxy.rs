//! THE WAY on the node: stream → policy → target → app. Read `Way::serve` first.
//!
//! 1. `policy` decides whether this edge serves what the stream asks for, and which app that is.
//! 2. `target` resolves it, checks each address, and dials exactly the address that was checked.
//! 3. `forward`, `upgrade` or `relay` asks the app; interim answers pass while it thinks.
//! 4. The answer's head goes back, then bytes until both ends are done.
//!
//! Nothing here knows how tunnels are kept. A caller that goes away ends the stream's future, and with it
//! the app's connection: there is no other cancellation.

pub(crate) mod policy;

pub(crate) mod target;

mod app;
mod tls;

mod body;
mod interim;
mod kept;

mod shared;

mod forward;
mod upgrade;

mod relay;

pub(crate) use policy::{Own, Policy};
pub use tls::TlsError;

use crate::{
    config::Timeouts,
    metrics::{Ending, Metrics, Served},
};
use app::App;
use causeway_tunnel::{
    Receive, Refusal, StreamError, Target,
    body::{PumpError, pump},
    copy::Outcome,
    error::Refused,
    eviction::Eviction,
    request_target::{RestBuffer, TargetRest},
    server::{Asked, Kind},
    task::Tasks,
};
use futures_util::future::OptionFuture;
use http::{Request, Response};
use interim::Interim;
use kept::Kept;
use std::{future::pending, net::SocketAddr, pin::pin, sync::Arc};
use target::Connected;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

/// What serves the streams of all tunnels.
pub(crate) struct Way {
    policy: Policy,
    kept: Kept,
    timeouts: Timeouts,
    /// Fields of an answer at most.
    most_fields: usize,
    metrics: Arc<Metrics>,
    exhaustion: target::ExhaustionLog,
    /// The owner has put another configuration into force.
    replaced: CancellationToken,
    /// Owns what drives HTTP/2 connections to apps.
    tasks: Arc<Tasks>,
}

/// An app's answer.
struct Answer {
    head: Response<()>,
    then: Then,
}

/// What follows the head.
enum Then {
    /// A body.
    Body(Box<body::Body>),
    /// Bytes both ways.
    Bytes(Box<app::Replayed>, Receive),
}

/// Why there is no answer.
#[derive(Debug)]
enum Failed {
    /// The caller is told why.
    Refused(Refused),
    /// The caller's own side failed: there is nobody to tell.
    Caller,
}

impl From<Refused> for Failed {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

impl Way {
    pub(crate) fn new(
        policy: Policy,
        (timeouts, most_fields): (Timeouts, usize),
        metrics: Arc<Metrics>,
        tasks: Arc<Tasks>,
    ) -> Self {
        Self {
            policy,
            kept: Kept::new(timeouts.app_idle),
            timeouts,
            most_fields,
            metrics,
            exhaustion: target::ExhaustionLog::default(),
            replaced: CancellationToken::new(),
            tasks,
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

    /// From a stream to an app and back, unless the stream is evicted because the app does not take what waits for it, or the
    /// policy of the `newest` way refuses it.
    pub(crate) async fn serve(&self, asked: Asked, newest: impl Fn() -> Arc<Self>) {
        let mut served = Served::new(&self.metrics, &asked.kind);
        let eviction = asked.body.eviction();
        let evicted = OptionFuture::from(eviction.as_ref().map(Eviction::evicted));
        tokio::select! {
            biased;
            () = self.serve_unless_evicted(asked, newest, &mut served) => return,
            Some(()) = evicted => {}
        }
        served.end(Ending::Evicted);
    }

    async fn serve_unless_evicted(
        &self,
        asked: Asked,
        newest: impl Fn() -> Arc<Self>,
        served: &mut Served<'_>,
    ) {
        let Asked {
            kind,
            target,
            head,
            target_rest,
            body,
            mut reply,
        } = asked;
        let interim = Interim::default();
        let withdrawal = reply.withdrawal();
        let app = self.policy.decide(&target, &kind);
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
                    // The future that holds the app's connection is dropped here.
                    _ = reply.reset() => return served.end(Ending::CallerGone),
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
            // A stream that was reset says so below.
            let _ = reply.interim(head);
        }
        match answer {
            Err(Failed::Caller) => served.end(Ending::CallerGone),
            Err(Failed::Refused(refused)) => {
                debug!(%target, reason = refused.refusal.word(), detail = %refused.detail, "stream refused");
                served.end(Ending::Refused(refused.refusal));
                reply.refuse(&refused);
            }
            Ok(Answer { head, then }) => {
                let end = matches!(&then, Then::Body(body) if body.is_end());
                let Ok(send) = reply.send(head, end) else {
                    return served.end(Ending::CallerGone);
                };
                let mut passing = pin!(self.pass(then, send, end));
                tokio::select! {
                    biased;
                    ending = &mut passing => served.end(ending),
                    refused = &mut refused_later => {
                        info!(%target, detail = %refused.detail, "a stream ended that the policy does not allow any more");
                        withdrawal.withdraw();
                        served.end(Ending::Refused(refused.refusal));
                    }
                }
            }
        }
    }

    /// Waits until the owner puts a policy into force that refuses this stream or the address that it is connected to.
    async fn refused_later(
        &self,
        (app, target, kind): (Option<Arc<App>>, &Target, &Kind),
        connected: &Connected,
        newest: impl Fn() -> Arc<Self>,
    ) -> Refused {
        let Some(app) = app else {
            return pending().await;
        };
        // Borrowed: a token that is cloned for each stream takes a lock that all cores share.
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
                // The stream goes on dialling by the policy under which it began.
                other = connected.other_than(address) => address = Some(other),
            }
        }
    }

    /// Whether a stream to this app, connected to this address if to any, could begin now.
    fn permits(
        &self,
        (app, address): (&App, Option<SocketAddr>),
        target: &Target,
        kind: &Kind,
    ) -> Result<(), Refused> {
        self.policy.decide(target, kind)?;
        match address {
            Some(address) if self.policy.check(app, address).is_none() => {
                Err(self.policy.forbidden(&app.target))
            }
            _ => Ok(()),
        }
    }

    /// Asks the app, as the stream's kind wants it. An upgrade is allocated, since it is rare and needs more room than a
    /// request: this future is moved as a whole with each stream.
    async fn ask(
        &self,
        app: Result<Arc<App>, Refused>,
        kind: &Kind,
        (mut head, (mut body, rest)): (Request<()>, (Receive, usize)),
        (interim, connected): (&Interim, &Connected),
    ) -> Result<Answer, Failed> {
        if rest > 0 {
            let rest = Box::pin(read_rest(&mut body, rest)).await?;
            head.extensions_mut().insert(rest);
        }
        let app = app?;
        match kind {
            Kind::Request => {
                let progress = (interim, connected);
                forward::ask(self, &app, (head, body), progress).await
            }
            Kind::Upgrade(token) => {
                let asked = (head, body);
                let progress = (interim, connected);
                Box::pin(upgrade::ask(self, &app, token, asked, progress)).await
            }
            Kind::Tcp => relay::ask(self, &app, body, connected).await,
        }
    }

    /// Passes what follows the head, until both ends are done.
    async fn pass(&self, then: Then, mut send: causeway_tunnel::Send, ended: bool) -> Ending {
        match then {
            Then::Bytes(socket, receive) => relay::pass(*socket, send, receive).await,
            Then::Body(mut body) => {
                if !ended && let Err(error) = pump(&mut *body, &mut send, None).await {
                    return ending(&error);
                }
                // What holds the stream open must not wait for the app's connection to come to rest.
                drop(send);
                body.keep(&self.kept).await;
                Ending::Done
            }
        }
    }

    /// Closes idle connections to apps that have had their time.
    pub(crate) fn sweep(&self) {
        self.kept.sweep();
    }
}

fn ending<E: std::fmt::Display>(error: &PumpError<E>) -> Ending {
    match error {
        PumpError::Body(error) => {
            debug!(%error, "an app broke off its answer");
            Ending::AppBroke
        }
        PumpError::Stream(StreamError::Lost { .. }) => Ending::TunnelLost,
        PumpError::Stream(StreamError::Evicted) => Ending::Evicted,
        PumpError::Stream(_) | PumpError::Stalled(_) => Ending::CallerGone,
    }
}

fn relayed(outcome: &Outcome) -> Ending {
    match outcome {
        Outcome::Clean => Ending::Done,
        Outcome::Near(_) => Ending::AppBroke,
        Outcome::Far(StreamError::Lost { .. }) => Ending::TunnelLost,
        Outcome::Far(StreamError::Evicted) => Ending::Evicted,
        Outcome::Far(_) => Ending::CallerGone,
    }
}

/// Reads the rest of a request's target, which is the beginning of the stream.
async fn read_rest(body: &mut Receive, length: usize) -> Result<TargetRest, Failed> {
    let mut rest = RestBuffer::default();
    while rest.len() < length {
        let Some(chunk) = body.data().await else {
            return Err(Failed::Caller);
        };
        let chunk = chunk.map_err(|_| Failed::Caller)?;
        if rest.len() + chunk.len() > length {
            let detail = "the rest of the request's target does not end with a frame";
            return Err(Refusal::Malformed.because(detail).into());
        }
        if !rest.append(&chunk) {
            let detail =
                "the requests with long targets need more memory than the edge has for them";
            return Err(Refusal::Busy.because(detail).into());
        }
    }
    Ok(rest.finish())
}

/// The app answered, but not as it should.
fn broken(app: &App, what: &str) -> Failed {
    let detail = format!("{} {what}", app.sentence());
    Refusal::TargetBroken.because(detail).into()
}

fn endless(target: &causeway_tunnel::Target) -> Failed {
    let detail = format!("{target} sent interim answers without end instead of an answer");
    Refusal::TargetBroken.because(detail).into()
}

#[cfg(test)]
mod tests;
