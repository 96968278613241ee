//! One HTTP/1.1 connection to an upstream, over TLS, over a stream of the node's tunnel.
//!
//! A separate task drives the connection ([`drive`]) from its first request to its end, and puts it into the pool while it is
//! idle. A request holds the connection as `InUse`. If `InUse` is dropped before the response is complete, the stream below is
//! reset. Otherwise an upstream could take an abandoned request for a complete one (design trap 3). All waits have timeouts.

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
    connection::Alpn,
    http1::{Http1Io, handshake, while_moving},
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

/// Time that an unused connection gets to close normally.
pub(super) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

impl Http1Connection {
    /// Opens a new connection, also for upgrades. Its first request has this rest of its target.
    ///
    /// # Errors
    /// The errors of [`UpstreamConnection::open`].
    pub(super) async fn open(
        ctx: StreamContext<'_>,
        upstream_tls: &Arc<UpstreamTls>,
        overflow: Option<TargetOverflow>,
    ) -> Result<Self, Error> {
        let connection = UpstreamConnection::open(ctx, upstream_tls, Alpn::Http1).await?;
        Self::begin(ctx, upstream_tls, connection, overflow).await
    }

    /// Starts HTTP/1.1 on a connection.
    ///
    /// # Errors
    /// If hyper does not accept the connection.
    pub(super) async fn begin(
        ctx: StreamContext<'_>,
        upstream_tls: &Arc<UpstreamTls>,
        UpstreamConnection {
            guarded,
            conn_state: life,
        }: UpstreamConnection,
        overflow: Option<TargetOverflow>,
    ) -> Result<Self, Error> {
        let shared = &ctx.proxy.shared;
        let head_limits = (shared.max_headers, Some(wire::MAX_HEAD));
        let (sender, connection, answering) = handshake(guarded, overflow, head_limits)
            .await
            .map_err(|error| http_error(ctx, &error))?;
        let (return_sender, return_receiver) = mpsc::channel(1);
        let driver_config = DriverConfig {
            connection,
            life: life.clone(),
            return_receiver,
            key: pool_key(ctx, upstream_tls),
            tunnel_leaving: ctx.leaving_token(),
            retired: upstream_tls.retired().clone(),
            read_timeout: shared.timeouts.upload,
        };
        let pressure = shared.limits.memory_budget().clone();
        let pool = Arc::downgrade(shared.upstream_tls_ports.pool());
        let task = async move {
            let buffered = driver_config.life.waiting.clone();
            let driver = pin!(drive(driver_config, pool));
            track_buffered(&pressure, &buffered, driver).await;
        };
        shared
            .upstream_tls_ports
            .pool()
            .spawn(debug_span!("app"), task);
        Ok(Self {
            sender,
            life,
            answering,
            back: return_sender,
        })
    }
}

/// Configuration of a connection's task.
struct DriverConfig {
    connection: http1::Connection<Http1Io<GuardedIo>, UpstreamRequestBody>,
    life: Arc<ConnState>,
    return_receiver: mpsc::Receiver<Http1Connection>,
    key: ConnectionPoolKey,
    tunnel_leaving: CancellationToken,
    retired: CancellationToken,
    read_timeout: Duration,
}

/// Drives a connection to its end. An idle connection ends normally, any other is reset.
async fn drive(config: DriverConfig, pool: Weak<ConnectionPool>) {
    let DriverConfig {
        connection,
        life,
        return_receiver: returned,
        key,
        tunnel_leaving: leaving,
        retired,
        read_timeout: patience,
    } = config;
    let retire_signal = async {
        tokio::select! {
            () = leaving.cancelled() => {}
            () = retired.cancelled() => {}
        }
    };
    let idle_loop = pool_while_idle((&life, &key), returned, retire_signal, &pool);
    // An upgrade takes the connection out of this future.
    let connection = pin!(connection.with_upgrades());
    tokio::select! {
        biased;
        () = life.cancel_token.cancelled() => {}
        result = connection => if let Err(error) = result {
            tracing::debug!(%error, "a connection to an app ended");
        },
        () = idle_loop => {}
        () = wait_stalled(&life, patience) => {
            life.is_stalled.store(true, Relaxed);
            tracing::debug!("an app does not read a request body");
        }
    }
    if let Some(pool) = pool.upgrade() {
        pool.remove(&key, &life);
    }
}

/// Puts the connection into the pool whenever it becomes idle. Returns when the connection has to end at once.
async fn pool_while_idle(
    (shared, key): (&Arc<ConnState>, &ConnectionPoolKey),
    mut return_receiver: mpsc::Receiver<Http1Connection>,
    retire_signal: impl Future<Output = ()>,
    pool: &Weak<ConnectionPool>,
) {
    let mut retire_signal = pin!(retire_signal);
    let mut is_retired = false;
    let Some(idle_timeout) = pool.upgrade().map(|pool| pool.idle_timeout()) else {
        return;
    };
    let mut next = None;
    loop {
        let connection = match next.take() {
            Some(line) => line,
            None => match return_receiver.recv().await {
                Some(line) => line,
                // The connection has no users any more: it ends by itself, or was upgraded.
                None => return std::future::pending().await,
            },
        };
        let Some(line) = wait_ready(connection, idle_timeout).await else {
            return;
        };
        let is_pooled = (!is_retired)
            .then(|| pool.upgrade())
            .flatten()
            .is_some_and(|pool| pool.worker_pool(key).checkin(key.clone(), line));
        if is_pooled {
            tokio::select! {
                line = return_receiver.recv() => {
                    next = line;
                    continue;
                }
                () = &mut retire_signal => is_retired = true,
                () = sleep(idle_timeout) => {}
            }
            let was_removed = pool.upgrade().is_none_or(|pool| pool.remove(key, shared));
            if !was_removed {
                // The connection carries a new request.
                continue;
            }
        }
        // Without its sender, the connection ends normally.
        return sleep(SHUTDOWN_TIMEOUT).await;
    }
}

/// Waits until the next request can be sent, as long as the last request body makes progress. Returns `None` if the connection
/// cannot be used again.
async fn wait_ready(
    mut connection: Http1Connection,
    stall_timeout: Duration,
) -> Option<Http1Connection> {
    let Http1Connection { sender, life, .. } = &mut connection;
    if while_moving(stall_timeout, &life.taken, sender.ready())
        .await?
        .is_ok()
    {
        return Some(connection);
    }
    // The connection has ended; TLS closes normally if the tunnel accepts the data in time.
    sleep(SHUTDOWN_TIMEOUT).await;
    None
}

/// Returns when a part of a request body has waited for the upstream for one to two times `read_timeout`.
async fn wait_stalled(life: &ConnState, read_timeout: Duration) {
    let mut previous = None;
    loop {
        sleep(read_timeout).await;
        let current = life.waiting.is_blocked().then(|| life.taken.load(Relaxed));
        if current.is_some() && current == previous {
            return;
        }
        previous = current;
    }
}

/// Returns the error of a request without a response.
pub(super) fn http_error(ctx: StreamContext<'_>, error: &hyper::Error) -> Error {
    // The stream may have failed because of the client's own data.
    let known = ctx.record.failure();
    known.unwrap_or_else(|| error::response_error(ctx.route, error, "before it sent a response"))
}
