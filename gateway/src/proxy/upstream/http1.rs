//! A line: one HTTP/1.1 connection to an app, over TLS, over a stream of the node's tunnel.
//!
//! A task of its own drives it ([`drive`]) from its first request to its end, and lays it by while it rests. Whoever asks
//! holds it as [`Asking`]; one that is dropped before its answer came to an end resets the stream below, so that no app
//! takes what was given up for what was wanted (invariant 3). All that it waits for has a bound.

use super::{
    body::UpstreamRequestBody,
    connect::{ResetOnDrop, UpstreamConnection},
    error,
    pool::{ConnectionPool, ConnectionPoolKey},
    tls::{Alpn, UpstreamTls},
};
use crate::{
    error::Error,
    proxy::{
        StreamContext,
        upload_budget::{BufferedBody, track_buffered},
    },
};
use causeway_certs::Fingerprint;
use causeway_tunnel::{
    error::is_close,
    eviction::Eviction,
    request_target::{TargetOverflow, TargetWriter},
    wire,
};
use hyper::{
    Request, Response,
    body::Incoming,
    client::conn::{TrySendError, http1},
};
use hyper_util::rt::TokioIo;
use std::{
    pin::pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

/// What a line that is not wanted any more has for ending in order.
pub(super) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// A line that somebody may ask on.
#[derive(Debug)]
pub(super) struct Http1Connection {
    sender: http1::SendRequest<UpstreamRequestBody>,
    pub(super) life: Arc<ConnState>,
    /// To its task, when it is to rest.
    back: mpsc::Sender<Http1Connection>,
}

/// What a line's task shares with whoever asks on it.
#[derive(Debug, Default)]
pub(super) struct ConnState {
    /// By which the app was believed, where it is known by its key.
    pub(super) key: Option<Fingerprint>,
    /// Of the stream below.
    pub(super) eviction: Option<Eviction>,
    /// Ends it at once, by a reset.
    pub(super) end: CancellationToken,
    /// How many parts of requests' bodies it has taken.
    pub(super) taken: AtomicUsize,
    /// What of them waits.
    pub(super) waiting: BufferedBody,
    /// It has taken nothing for too long.
    pub(super) stalled: AtomicBool,
    /// The app has sent a byte since the last request.
    pub(super) answering: AtomicBool,
    /// It is no line of HTTP any more.
    pub(super) switched: AtomicBool,
}

/// A line while somebody asks on it. Dropped, it is reset.
#[derive(Debug)]
pub(super) struct InUse(Option<Http1Connection>);

impl Http1Connection {
    /// A new one, for upgrades too. Its first request has this rest of its target.
    ///
    /// # Errors
    /// As [`Dialled::to`].
    pub(super) async fn open(
        way: StreamContext<'_>,
        app: &Arc<UpstreamTls>,
        rest: Option<TargetOverflow>,
    ) -> Result<Self, Error> {
        let dialled = UpstreamConnection::to(way, app, Alpn::Http1).await?;
        Self::begin(way, app, dialled, rest).await
    }

    /// Begins HTTP/1.1.
    ///
    /// # Errors
    /// If the engine does not take the connection.
    pub(super) async fn begin(
        way: StreamContext<'_>,
        app: &Arc<UpstreamTls>,
        UpstreamConnection { guarded, life }: UpstreamConnection,
        rest: Option<TargetOverflow>,
    ) -> Result<Self, Error> {
        let shared = &way.proxy.shared;
        let (sender, connection) = http1::Builder::new()
            .title_case_headers(true)
            .max_headers(shared.max_headers)
            .max_buf_size(wire::MAX_HEAD)
            .handshake(TokioIo::new(TargetWriter::new(guarded, rest)))
            .await
            .map_err(|error| error::of_http(way, &error))?;
        let (back, returned) = mpsc::channel(1);
        let driven = DriverConfig {
            connection,
            life: life.clone(),
            returned,
            key: ConnectionPoolKey::of(way, app),
            leaving: way.tunnel.leaving().clone(),
            retired: app.retired().clone(),
            patience: shared.timeouts.upload,
        };
        let pressure = shared.limits.pressure().clone();
        let kept = Arc::downgrade(shared.apps.kept());
        let task = async move {
            let waiting = driven.life.waiting.clone();
            let driving = pin!(drive(driven, kept));
            track_buffered(&pressure, &waiting, driving).await;
        };
        shared.apps.kept().spawn(debug_span!("app"), task);
        Ok(Self { sender, life, back })
    }

    /// Whether it can be asked on, as far as is known.
    pub(super) fn is_alive(&self) -> bool {
        !self.sender.is_closed() && !self.life.end.is_cancelled()
    }

    pub(super) fn asking(self) -> InUse {
        InUse(Some(self))
    }
}

impl InUse {
    /// Asks, and waits for the answer's head.
    pub(super) async fn ask(
        &mut self,
        request: Request<UpstreamRequestBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<UpstreamRequestBody>>> {
        let line = self.0.as_mut().expect("a line that is asked on is there");
        line.life.answering.store(false, Relaxed);
        line.sender.try_send_request(request).await
    }

    /// Whether the app closed the line without a byte of an answer to the last request, which failed with `error`.
    pub(super) fn closed_unanswered(&self, error: &hyper::Error) -> bool {
        let closed = error.is_incomplete_message() || is_close(error);
        closed
            && self
                .life()
                .is_some_and(|life| !life.answering.load(Relaxed))
    }

    pub(super) fn life(&self) -> Option<&Arc<ConnState>> {
        self.0.as_ref().map(|line| &line.life)
    }

    /// Whether it took nothing of a request's body for too long.
    pub(super) fn is_stalled(&self) -> bool {
        self.life().is_some_and(|life| life.stalled.load(Relaxed))
    }

    /// The answer came to its end: the line may rest, and be used again.
    pub(super) fn settle(&mut self) {
        if let Some(line) = self.0.take() {
            let back = line.back.clone();
            // A line whose task is over needs no rest.
            let _ = back.try_send(line);
        }
    }

    /// It is no line of HTTP any more, but what was switched to.
    pub(super) fn switched(&mut self) {
        if let Some(line) = self.0.take() {
            line.life.switched.store(true, Relaxed);
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(line) = &self.0 {
            line.life.end.cancel();
        }
    }
}

/// What the task of a line goes by.
struct DriverConfig {
    connection: http1::Connection<TokioIo<TargetWriter<ResetOnDrop>>, UpstreamRequestBody>,
    life: Arc<ConnState>,
    returned: mpsc::Receiver<Http1Connection>,
    key: ConnectionPoolKey,
    leaving: CancellationToken,
    retired: CancellationToken,
    patience: Duration,
}

/// Drives a line to its end, which is in order only if it rests.
async fn drive(driven: DriverConfig, kept: Weak<ConnectionPool>) {
    let DriverConfig {
        connection,
        life,
        returned,
        key,
        leaving,
        retired,
        patience,
    } = driven;
    let unwanted = async {
        tokio::select! {
            () = leaving.cancelled() => {}
            () = retired.cancelled() => {}
        }
    };
    let rests = rest((&life, &key), returned, unwanted, &kept);
    // An upgrade takes the connection out of this.
    let connection = pin!(connection.with_upgrades());
    tokio::select! {
        biased;
        () = life.end.cancelled() => {}
        ended = connection => if let Err(error) = ended {
            tracing::debug!(%error, "a connection to an app ended");
        },
        () = rests => {}
        () = stalls(&life, patience) => {
            life.stalled.store(true, Relaxed);
            tracing::debug!("an app takes nothing of a request's body");
        }
    }
    if let Some(kept) = kept.upgrade() {
        kept.remove(&key, &life);
    }
}

/// Lays the line by whenever it comes to rest. Returns when it is to be ended at once.
async fn rest(
    (shared, key): (&Arc<ConnState>, &ConnectionPoolKey),
    mut returned: mpsc::Receiver<Http1Connection>,
    unwanted: impl Future<Output = ()>,
    kept: &Weak<ConnectionPool>,
) {
    let mut unwanted = pin!(unwanted);
    let mut is_unwanted = false;
    let Some(bound) = kept.upgrade().map(|kept| kept.bound()) else {
        return;
    };
    let mut next = None;
    loop {
        let line = match next.take() {
            Some(line) => line,
            None => match returned.recv().await {
                Some(line) => line,
                // Nobody has it any more: it ends by itself, or is what was switched to.
                None => return std::future::pending().await,
            },
        };
        let Some(line) = quiet(line, bound).await else {
            return;
        };
        let idle = (!is_unwanted)
            .then(|| kept.upgrade())
            .flatten()
            .is_some_and(|kept| kept.put(key, line));
        if idle {
            tokio::select! {
                line = returned.recv() => {
                    next = line;
                    continue;
                }
                () = &mut unwanted => is_unwanted = true,
                () = sleep(bound) => {}
            }
            let gone = kept.upgrade().is_none_or(|kept| kept.remove(key, shared));
            if !gone {
                // Somebody asks on it again.
                continue;
            }
        }
        // Without its sender it ends in order.
        return sleep(SHUTDOWN_TIMEOUT).await;
    }
}

/// Waits until the next request can be sent, for as long as the last one's body moves: an app may answer and read on for
/// hours. `None` if it cannot be used again.
async fn quiet(mut line: Http1Connection, bound: Duration) -> Option<Http1Connection> {
    loop {
        let taken = line.life.taken.load(Relaxed);
        match timeout(bound, line.sender.ready()).await {
            Ok(Ok(())) => return Some(line),
            Ok(Err(_)) => {
                // It is over, and ends in order if the tunnel takes that.
                sleep(SHUTDOWN_TIMEOUT).await;
                return None;
            }
            Err(_) if line.life.taken.load(Relaxed) == taken => return None,
            Err(_) => {}
        }
    }
}

/// Returns when a part of a request's body has waited for the app for `patience`, or for twice that.
async fn stalls(life: &ConnState, patience: Duration) {
    let mut before = None;
    loop {
        sleep(patience).await;
        let now = life.waiting.waits().then(|| life.taken.load(Relaxed));
        if now.is_some() && now == before {
            return;
        }
        before = now;
    }
}
