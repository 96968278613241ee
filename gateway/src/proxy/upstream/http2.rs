//! HTTP/2 connections to an upstream, which requests share ([`http2_pool`](causeway_upstream::http2_pool)), normally one.
//!
//! A connection is a tunnel within the node's tunnel. The same HTTP/2 code drives it, with the same budget for buffered bytes,
//! the same limits on floods and the same resets. If an upstream chose HTTP/1.1 last time, requests do not wait for each other,
//! and each dials its own connection.

use super::{
    connect::{UpstreamConnection, pool_key},
    error,
    http1::SHUTDOWN_TIMEOUT,
    pin,
    pool::{
        ConnectionPool, ConnectionPoolKey, Http2Connection, UpstreamHttp2Pool, UpstreamStreamPermit,
    },
    tls::UpstreamTls,
};
use crate::{error::Error, proxy::context::StreamContext};
use causeway_rt::socket::CountedIo;
use causeway_tunnel::{
    gateway_side::{self, GatewaySideConfig},
    load::TunnelLoad,
};
use causeway_upstream::{http2_observer::observe, http2_pool::Checkout};
use std::{
    pin::pin,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

/// Whether a connection may get further requests.
fn is_alive(connection: &Http2Connection, way: StreamContext<'_>, app: &UpstreamTls) -> bool {
    let holds = pin::holds(app.pins(), way.route, connection.key);
    if !holds {
        // The next request must open a new connection to the app.
        connection.tunnel.close();
    }
    holds && !connection.tunnel.leaving_token().is_cancelled()
}

/// Returns a slot on a connection with a number above `after_number`, or the right to dial a connection.
///
/// # Errors
/// If neither is available in time.
pub(super) async fn checkout<'p>(
    pool: &'p UpstreamHttp2Pool,
    way: StreamContext<'_>,
    app: &UpstreamTls,
    after_number: u64,
) -> Result<Checkout<'p, Http2Connection>, Error> {
    let deadline = Instant::now() + way.proxy.shared.timeouts.connect;
    let alive = |connection: &Http2Connection| is_alive(connection, way, app);
    let turn = pool.checkout_until(deadline, after_number, alive).await;
    turn.map_err(|what| error::upstream_timeout(way.route, what))
}

/// Starts HTTP/2 on a connection, and returns a permit for a stream on it.
///
/// # Errors
/// If the upstream does not start it in time.
pub(super) async fn start_http2(
    pool: &UpstreamHttp2Pool,
    way: StreamContext<'_>,
    app: &Arc<UpstreamTls>,
    UpstreamConnection {
        guarded,
        conn_state: life,
    }: UpstreamConnection,
) -> Result<UpstreamStreamPermit, Error> {
    let shared = &way.proxy.shared;
    let deadline = Instant::now() + shared.timeouts.connect;
    let counted_io = CountedIo::new(guarded);
    let traffic = counted_io.traffic();
    let (observed_io, mut max_streams) = observe(counted_io);
    let settings = GatewaySideConfig {
        max_streams: usize::MAX,
        round_trip: way.tunnel.round_trip(),
        ..way.tunnel.nested_config()
    };
    let handshake = gateway_side::connect(observed_io, traffic, settings).await;
    let (tunnel, driver) = handshake
        .map_err(|ended| error::broken_upstream(way.route, &format!("failed: {ended}")))?;
    let pool_tasks = shared.upstream_tls_ports.pool();
    let number = pool.allocate_id();
    let driver_config = DriverConfig {
        number,
        load: tunnel.load().clone(),
        leaving: [
            tunnel.leaving_token().clone(),
            way.leaving_token(),
            app.retired().clone(),
        ],
        key: pool_key(way, app),
    };
    let task = drive(driver.run(), driver_config, Arc::downgrade(pool_tasks));
    pool_tasks.spawn(debug_span!("app"), task);
    // SETTINGS are the first frame that an app sends (RFC 9113 §3.4).
    let accepts_streams =
        max_streams.wait_for(|allowed| allowed.is_some_and(|streams| streams > 0));
    let settings_received = timeout_at(deadline, accepts_streams).await;
    if !matches!(settings_received, Ok(Ok(_))) {
        tunnel.close();
        let what = "negotiated HTTP/2, but did not start it in time or accepts no request";
        return Err(error::broken_upstream(way.route, what));
    }
    drop(settings_received);
    let key = life.key;
    Ok(pool.insert(number, Http2Connection { tunnel, key }, max_streams))
}

/// Configuration of a connection's task. It holds no handle, because the connection ends normally without handles and streams.
struct DriverConfig {
    number: u64,
    load: Arc<TunnelLoad>,
    /// Cancelled when the connection itself, the tunnel below, or its credentials are retired.
    leaving: [CancellationToken; 3],
    key: ConnectionPoolKey,
}

/// Drives a connection to its end. Without open streams, the connection ends normally.
async fn drive<E: std::fmt::Display>(
    run: impl Future<Output = E>,
    config: DriverConfig,
    pool: Weak<ConnectionPool>,
) {
    let DriverConfig {
        number,
        load,
        leaving: [own, tunnel, retired],
        key,
    } = config;
    let Some(idle_timeout) = pool.upgrade().map(|pool| pool.idle_timeout()) else {
        return;
    };
    let remove_from_pool = || {
        if let Some(pool) = pool.upgrade() {
            pool.close_to_streams(&key, number);
        }
    };
    let mut driver = pin!(run);
    let retire_signal = async {
        tokio::select! {
            () = own.cancelled() => {}
            () = tunnel.cancelled() => {}
            () = retired.cancelled() => {}
            () = wait_idle(&load, idle_timeout) => {}
        }
    };
    tokio::select! {
        biased;
        ended = &mut driver => {
            tracing::debug!(%ended, "a connection to an app ended");
            return remove_from_pool();
        }
        () = retire_signal => remove_from_pool(),
    }
    // Open streams continue; streams that do not end in time are reset.
    while timeout(SHUTDOWN_TIMEOUT, &mut driver).await.is_err() && load.open_streams() > 0 {}
}

/// Returns when no request was sent for one to two times `idle_timeout`.
async fn wait_idle(load: &TunnelLoad, idle_timeout: Duration) {
    let mut previous = load.streams_opened();
    loop {
        sleep(idle_timeout).await;
        let opened = load.streams_opened();
        if opened == previous && load.open_streams() == 0 {
            return;
        }
        previous = opened;
    }
}
