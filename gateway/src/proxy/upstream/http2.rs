//! HTTP/2 connections to an upstream, which requests share ([`http2_pool`](causeway_upstream::http2_pool)): one as a rule.
//!
//! A connection is a tunnel within the node's tunnel: the same HTTP/2 code drives it, with the same budget for buffered bytes,
//! the same bounds on floods and the same resets. If an upstream chose HTTP/1.1 last time, requests do not wait for each other:
//! each dials for itself.

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

/// Whether requests may still go to a connection.
fn is_alive(connection: &Http2Connection, way: StreamContext<'_>, app: &UpstreamTls) -> bool {
    let holds = pin::holds(app.pins(), way.route, connection.key);
    if !holds {
        // The next request must open a new connection to the app.
        connection.tunnel.close();
    }
    holds && !connection.tunnel.leaving().is_cancelled()
}

/// A place on a connection with a number above `after`, or the turn to dial one.
///
/// # Errors
/// If neither comes in time.
pub(super) async fn turn<'p>(
    pool: &'p UpstreamHttp2Pool,
    way: StreamContext<'_>,
    app: &UpstreamTls,
    after: u64,
) -> Result<Checkout<'p, Http2Connection>, Error> {
    let deadline = Instant::now() + way.proxy.shared.timeouts.connect;
    let alive = |connection: &Http2Connection| is_alive(connection, way, app);
    let turn = pool.turn_until(deadline, after, alive).await;
    turn.map_err(|what| error::slow(way.route, what))
}

/// Begins HTTP/2 on a connection, and returns a permit for a stream on it.
///
/// # Errors
/// If the upstream does not begin it in time.
pub(super) async fn begin(
    pool: &UpstreamHttp2Pool,
    way: StreamContext<'_>,
    app: &Arc<UpstreamTls>,
    UpstreamConnection { guarded, life }: UpstreamConnection,
) -> Result<UpstreamStreamPermit, Error> {
    let shared = &way.proxy.shared;
    let deadline = Instant::now() + shared.timeouts.connect;
    let counted = CountedIo::new(guarded);
    let traffic = counted.traffic();
    let (heard, mut allowed) = observe(counted);
    let settings = GatewaySideConfig {
        max_streams: usize::MAX,
        round_trip: way.tunnel.round_trip(),
        ..way.tunnel.within()
    };
    let connected = gateway_side::connect(heard, traffic, settings).await;
    let (tunnel, driver) =
        connected.map_err(|ended| error::broken(way.route, &format!("failed: {ended}")))?;
    let kept = shared.apps.kept();
    let number = pool.next();
    let watched = DriverConfig {
        number,
        load: tunnel.load().clone(),
        leaving: [
            tunnel.leaving().clone(),
            way.tunnel.leaving().clone(),
            app.retired().clone(),
        ],
        key: pool_key(way, app),
    };
    let task = drive(driver.run(), watched, Arc::downgrade(kept));
    kept.spawn(debug_span!("app"), task);
    // SETTINGS are the first frame that an app sends (RFC 9113 §3.4).
    let takes = allowed.wait_for(|allowed| allowed.is_some_and(|streams| streams > 0));
    let settled = timeout_at(deadline, takes).await;
    if !matches!(settled, Ok(Ok(_))) {
        tunnel.close();
        let what = "negotiated HTTP/2, but did not start it in time or accepts no request";
        return Err(error::broken(way.route, what));
    }
    drop(settled);
    let key = life.key;
    Ok(pool.add(number, Http2Connection { tunnel, key }, allowed))
}

/// Configuration of a connection's task. It holds no handle: without one, and without streams, the connection ends in order.
struct DriverConfig {
    number: u64,
    load: Arc<TunnelLoad>,
    /// Cancelled when the connection itself, the tunnel below, or its credentials are retired.
    leaving: [CancellationToken; 3],
    key: ConnectionPoolKey,
}

/// Drives a connection to its end, which is in order where nothing is under way.
async fn drive<E: std::fmt::Display>(
    run: impl Future<Output = E>,
    watched: DriverConfig,
    kept: Weak<ConnectionPool>,
) {
    let DriverConfig {
        number,
        load,
        leaving: [own, tunnel, retired],
        key,
    } = watched;
    let Some(bound) = kept.upgrade().map(|kept| kept.bound()) else {
        return;
    };
    let forget = || {
        if let Some(kept) = kept.upgrade() {
            kept.forget(&key, number);
        }
    };
    let mut run = pin!(run);
    let unwanted = async {
        tokio::select! {
            () = own.cancelled() => {}
            () = tunnel.cancelled() => {}
            () = retired.cancelled() => {}
            () = rests(&load, bound) => {}
        }
    };
    tokio::select! {
        biased;
        ended = &mut run => {
            tracing::debug!(%ended, "a connection to an app ended");
            return forget();
        }
        () = unwanted => forget(),
    }
    // Open streams continue; streams that do not end in time are reset.
    while timeout(SHUTDOWN_TIMEOUT, &mut run).await.is_err() && load.streams() > 0 {}
}

/// Returns when nothing was asked for `bound`, or for twice that.
async fn rests(load: &TunnelLoad, bound: Duration) {
    let mut before = load.opened();
    loop {
        sleep(bound).await;
        let opened = load.opened();
        if opened == before && load.streams() == 0 {
            return;
        }
        before = opened;
    }
}
