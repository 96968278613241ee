//! Health of this node's kubelet, by its health check over HTTP.

use crate::config::PROBE_INTERVAL;
use bytes::Bytes;
use causeway_rt::http_client;
use http::{Request, StatusCode, header::HOST};
use http_body_util::Full;
use std::{net::SocketAddr, time::Duration};
use tokio::{
    net::TcpStream,
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tracing::{info, warn};

/// Time limit of one check.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Failed checks in succession after which the kubelet is not alive.
const MAX_FAILURES: u32 = 2;

/// Result of the health checks so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KubeletHealth {
    last_success: Option<Instant>,
    failures: u32,
}

impl KubeletHealth {
    /// Whether the kubelet counts as alive, if a success counts for this long.
    pub(super) fn is_alive(&self, alive_for: Duration) -> bool {
        let is_recent = |success: Instant| success.elapsed() <= alive_for;
        self.failures < MAX_FAILURES && self.last_success.is_some_and(is_recent)
    }

    /// Records the result of a check that began at this time.
    fn record(&mut self, began_at: Instant, is_ok: bool) {
        if is_ok {
            (self.last_success, self.failures) = (Some(began_at), 0);
        } else {
            self.failures = self.failures.saturating_add(1);
        }
    }
}

/// Checks the kubelet's health at this address, for as long as it is polled.
pub(super) async fn probe(address: SocketAddr, health: watch::Sender<KubeletHealth>) {
    let mut ticks = interval(PROBE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        ticks.tick().await;
        let began_at = Instant::now();
        let result = timeout(PROBE_TIMEOUT, check(address)).await;
        let result = result.unwrap_or_else(|_| Err(format!("no answer within {PROBE_TIMEOUT:?}")));
        if let Err(why) = &result
            && !failing
        {
            warn!(%address, why, "the health check of this node's kubelet fails; after two failures no heartbeat is delegated");
        } else if result.is_ok() && failing {
            info!(%address, "the health check of this node's kubelet succeeds again");
        }
        failing = result.is_err();
        health.send_modify(|health| health.record(began_at, result.is_ok()));
    }
}

async fn check(address: SocketAddr) -> Result<(), String> {
    let tcp = TcpStream::connect(address).await;
    let tcp = tcp.map_err(|error| error.to_string())?;
    let request = Request::get("/healthz")
        .header(HOST, address.to_string())
        .body(Full::<Bytes>::default())
        .map_err(|error| error.to_string())?;
    let answered = http_client::send(tcp, request).await;
    let (answer, _connection) = answered.map_err(|error| error.to_string())?;
    match answer.status() {
        StatusCode::OK => Ok(()),
        status => Err(format!("status {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn a_kubelet_is_not_alive_after_two_failures_or_an_old_success() {
        let alive_for = Duration::from_secs(10);
        let mut health = KubeletHealth::default();
        assert!(!health.is_alive(alive_for), "it was never checked");
        health.record(Instant::now(), true);
        assert!(health.is_alive(alive_for));
        health.record(Instant::now(), false);
        assert!(health.is_alive(alive_for), "one failure");
        health.record(Instant::now(), false);
        assert!(!health.is_alive(alive_for), "two failures");
        health.record(Instant::now(), true);
        advance(alive_for).await;
        assert!(health.is_alive(alive_for));
        advance(Duration::from_millis(1)).await;
        assert!(!health.is_alive(alive_for), "the success is too old");
    }
}
