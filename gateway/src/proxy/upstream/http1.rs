//! One HTTP/1.1 connection to an upstream, over TLS, over a stream of the node's tunnel.
//!
//! A task of its own drives it ([`drive`]) from its first request to its end, and puts it into the pool while it is idle. A
//! request holds it as `InUse`. If that is dropped before its answer came to an end, the stream below is reset, so that no
//! upstream takes an abandoned request for a complete one (design trap 3). All its waits have a bound.

use super::{
    connect::{GuardedIo, UpstreamConnection, pool_key},
    error,
    pool::{ConnectionPool, ConnectionPoolKey, Http1Connection},
    request_body::{ConnState, UpstreamRequestBody},
    tls::UpstreamTls,
};
use crate::{
    error::Error,
    proxy::{context::StreamContext, upload_budget::track_buffered},
};
use causeway_tunnel::{request_target::TargetOverflow, wire};
use causeway_upstream::{
    alpn::Alpn,
    http1::{Http1Io, handshake},
    progress::while_moving,
};
use hyper::client::conn::http1;
use std::{
    pin::pin,
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{sync::mpsc, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

/// Time in which a connection that is no longer needed may end in order.
pub(super) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

impl Http1Connection {
    /// Opens a new connection, for upgrades too. Its first request has this rest of its target.
    ///
    /// # Errors
    /// As [`UpstreamConnection::to`].
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
    /// If hyper does not accept the connection.
    pub(super) async fn begin(
        way: StreamContext<'_>,
        app: &Arc<UpstreamTls>,
        UpstreamConnection { guarded, life }: UpstreamConnection,
        rest: Option<TargetOverflow>,
    ) -> Result<Self, Error> {
        let shared = &way.proxy.shared;
        let most = (shared.max_headers, Some(wire::MAX_HEAD));
        let (sender, connection, answering) = handshake(guarded, rest, most)
            .await
            .map_err(|error| of_http(way, &error))?;
        let (back, returned) = mpsc::channel(1);
        let driven = DriverConfig {
            connection,
            life: life.clone(),
            returned,
            key: pool_key(way, app),
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
        Ok(Self {
            sender,
            life,
            answering,
            back,
        })
    }
}

/// Configuration of a connection's task.
struct DriverConfig {
    connection: http1::Connection<Http1Io<GuardedIo>, UpstreamRequestBody>,
    life: Arc<ConnState>,
    returned: mpsc::Receiver<Http1Connection>,
    key: ConnectionPoolKey,
    leaving: CancellationToken,
    retired: CancellationToken,
    patience: Duration,
}

/// Drives a connection to its end, which is in order only if the connection is idle.
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
            tracing::debug!("an app does not read a request body");
        }
    }
    if let Some(kept) = kept.upgrade() {
        kept.remove(&key, &life);
    }
}

/// Puts the connection into the pool whenever it becomes idle. Returns when it is to be ended at once.
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
                // The connection has no more users: it ends by itself, or it is an upgraded connection.
                None => return std::future::pending().await,
            },
        };
        let Some(line) = quiet(line, bound).await else {
            return;
        };
        let idle = (!is_unwanted)
            .then(|| kept.upgrade())
            .flatten()
            .is_some_and(|kept| kept.of(key).checkin(key.clone(), line));
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
                // The connection carries a new request.
                continue;
            }
        }
        // Without its sender, the connection ends normally.
        return sleep(SHUTDOWN_TIMEOUT).await;
    }
}

/// Waits until the next request can be sent, for as long as the last one's body moves. Returns `None` if the connection cannot
/// be used again.
async fn quiet(mut line: Http1Connection, bound: Duration) -> Option<Http1Connection> {
    let Http1Connection { sender, life, .. } = &mut line;
    if while_moving(bound, &life.taken, sender.ready())
        .await?
        .is_ok()
    {
        return Some(line);
    }
    // The connection has ended; TLS closes normally if the tunnel accepts the data in time.
    sleep(SHUTDOWN_TIMEOUT).await;
    None
}

/// Returns when a part of a request's body has waited for the upstream for `patience`, or for twice that.
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

/// Returns the error of a request without an answer.
pub(super) fn of_http(way: StreamContext<'_>, error: &hyper::Error) -> Error {
    // The stream may have failed because of the client's own data.
    let known = way.record.failure();
    known.unwrap_or_else(|| error::of_answer(way.route, error, "before it sent a response"))
}
