//! Handshakes in a closed loop: dial, TLS, hello if requested, hang up.
//!
//! A TLS 1.3 client finishes before its server has verified the certificate. Therefore a handshake counts when the
//! gateway's first byte after it arrives: HTTP/2's preface, which a gateway sends first.

use super::{
    super::mint::Identity,
    Fleet,
    node::{Failed, dial, greet_once},
};
use crate::{
    cli,
    measure::{Latencies, per_second},
    report::{self, rounded},
};
use causeway_rt::{socket::ResetOnClose, task::TaskGroup};
use serde_json::json;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    io::AsyncReadExt,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::Span;

/// Maximum time until the gateway's first byte.
const BOUND: Duration = Duration::from_secs(5);
/// Pause after a failure, so that failures do not make a tight loop.
const PAUSE: Duration = Duration::from_millis(10);

/// Runs for that time and reports.
pub(super) async fn run(
    fleet: &Arc<Fleet>,
    identities: Vec<Identity>,
    asked: &cli::Fleet,
    lasting: Duration,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    anyhow::ensure!(
        asked.clients <= identities.len(),
        "{} clients need a node each, and there are {}",
        asked.clients,
        identities.len()
    );
    report::say(&json!({"event": "ready", "callers": asked.clients}));
    let all = Arc::new(Mutex::new(Latencies::new()));
    let callers = TaskGroup::default();
    let began = Instant::now();
    let until = began + lasting;
    for identity in identities.into_iter().take(asked.clients) {
        let (fleet, all, hello) = (fleet.clone(), all.clone(), asked.hello);
        let stop = stop.clone();
        callers.spawn(Span::none(), async move {
            let mut own = Latencies::new();
            let over = async {
                tokio::select! {
                    () = sleep_until(until) => {}
                    () = stop.cancelled() => {}
                }
            };
            tokio::select! {
                () = over => {}
                () = shake(&fleet, &identity, hello, &mut own) => {}
            }
            all.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .join(&own);
        });
    }
    callers.drain(lasting + 2 * BOUND).await;
    let took = began.elapsed().min(lasting);
    let all = all.lock().unwrap_or_else(PoisonError::into_inner);
    let (full, resumed) = fleet.roll.handshakes();
    report::say(&json!({
        "event": "result",
        "handshakes": all.count(),
        "seconds": rounded(took.as_secs_f64(), 3),
        "per_second": per_second(all.count(), took),
        "full": full,
        "resumed": resumed,
        "latency_us": all.summary(),
        "counts": fleet.roll.counts(),
    }));
    Ok(())
}

/// Dials without end.
async fn shake(fleet: &Arc<Fleet>, identity: &Identity, hello: bool, own: &mut Latencies) {
    loop {
        let began = Instant::now();
        match once(fleet, identity, hello).await {
            Ok(()) => own.add(began.elapsed()),
            Err(failed) => {
                fleet.roll.failed(&failed);
                sleep(PAUSE).await;
            }
        }
    }
}

async fn once(fleet: &Arc<Fleet>, identity: &Identity, hello: bool) -> Result<(), Failed> {
    let mut dialled = dial(identity, fleet, 0).await?;
    if hello {
        let greeted = timeout(BOUND, greet_once(dialled, identity, fleet)).await;
        return greeted.unwrap_or_else(|_| Err(Failed::Silent("no hello in time".into())));
    }
    let io = &mut dialled.0;
    let mut first = [0; 64];
    match timeout(BOUND, io.read(&mut first)).await {
        Ok(Ok(1..)) => {
            // A reset on close: ports must not wait for stray segments of thousands of connections.
            io.get_ref().0.abort();
            Ok(())
        }
        Ok(Ok(_)) => Err(Failed::Silent("the gateway hung up after TLS".into())),
        Ok(Err(error)) => Err(Failed::Silent(format!("after TLS: {error}"))),
        Err(_) => Err(Failed::Silent("nothing after TLS in time".into())),
    }
}
