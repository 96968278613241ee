//! Health of this node's kubelet, by its health check over HTTP.

use crate::config::heartbeat::PROBE_INTERVAL;
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
use tracing::info;

/// Time limit of one check.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Failed checks in succession after which the kubelet is not alive.
const MAX_MISSES: u32 = 2;

/// Result of the health checks so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KubeletHealth {
    last_good: Option<Instant>,
    misses: u32,
}

impl KubeletHealth {
    /// Whether the kubelet counts as alive, if a good answer counts for this long.
    pub(super) fn is_alive(&self, alive_for: Duration) -> bool {
        let recent = |good: Instant| good.elapsed() <= alive_for;
        self.misses < MAX_MISSES && self.last_good.is_some_and(recent)
    }

    /// Takes the result of a check that began at this time.
    fn checked(&mut self, began: Instant, good: bool) {
        if good {
            (self.last_good, self.misses) = (Some(began), 0);
        } else {
            self.misses = self.misses.saturating_add(1);
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
        let began = Instant::now();
        let checked = timeout(PROBE_TIMEOUT, check(address)).await;
        let checked = checked.unwrap_or_else(|_| Err("no answer in time".to_owned()));
        if let Err(why) = &checked
            && !failing
        {
            info!(%address, why, "the health check of the kubelet fails");
        } else if checked.is_ok() && failing {
            info!(%address, "the kubelet is healthy again");
        }
        failing = checked.is_err();
        health.send_modify(|health| health.checked(began, checked.is_ok()));
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
    async fn two_misses_or_an_old_answer_end_the_kubelets_life() {
        let alive_for = Duration::from_secs(10);
        let mut health = KubeletHealth::default();
        assert!(!health.is_alive(alive_for), "it was never asked");
        health.checked(Instant::now(), true);
        assert!(health.is_alive(alive_for));
        health.checked(Instant::now(), false);
        assert!(health.is_alive(alive_for), "one miss");
        health.checked(Instant::now(), false);
        assert!(!health.is_alive(alive_for), "two misses");
        health.checked(Instant::now(), true);
        advance(alive_for).await;
        assert!(health.is_alive(alive_for));
        advance(Duration::from_millis(1)).await;
        assert!(!health.is_alive(alive_for), "the answer is too old");
    }
}
