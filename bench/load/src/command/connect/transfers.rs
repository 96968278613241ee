//! Bulk: each client moves its bytes once, all beginning at the same moment.
//!
//! The time is from that moment until the last client is done. For an upload that is when the app has sent its count of
//! bytes; a count that differs from the sent number is an error.

use crate::{
    cli,
    http1::Connection,
    measure::per_second,
    report::{self, rounded},
    route::Route,
};
use anyhow::{Context, ensure};
use serde_json::json;
use std::{sync::Arc, time::Duration};
use tokio::{sync::Barrier, task::JoinSet, time::Instant};

/// Block of bytes to send.
static BLOCK: [u8; 64 << 10] = [b'.'; 64 << 10];
/// Longest answer to an upload.
const SHORT: u64 = 64;

/// Direction of a transfer, with the number of bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Down(u64),
    Up(u64),
}

/// Runs them and reports.
pub(super) async fn run(asked: &cli::Connect, route: Arc<Route>, kind: Kind) -> anyhow::Result<()> {
    let start = Arc::new(Barrier::new(asked.clients + 1));
    let mut callers = JoinSet::new();
    for _ in 0..asked.clients {
        let (route, start) = (route.clone(), start.clone());
        let (host, upgrade) = (asked.target.clone(), asked.upgrade.clone());
        callers.spawn(async move {
            let opened = route.open().await;
            // The barrier does not wait for a client that failed.
            start.wait().await;
            let began = Instant::now();
            transfer(opened?.line, kind, &host, upgrade.as_deref()).await?;
            anyhow::Ok(began.elapsed())
        });
    }
    start.wait().await;
    report::say(&json!({"event": "ready", "callers": asked.clients}));
    let began = Instant::now();
    let mut each = Vec::new();
    while let Some(done) = callers.join_next().await {
        let took: Duration = done.context("a client panicked")??;
        each.push(rounded(took.as_secs_f64(), 3));
    }
    let took = began.elapsed();
    let (direction, bytes) = match kind {
        Kind::Down(bytes) => ("down", bytes),
        Kind::Up(bytes) => ("up", bytes),
    };
    let bytes = bytes.saturating_mul(u64::try_from(asked.clients)?);
    report::say(&json!({
        "event": "result",
        "callers": asked.clients,
        "way": direction,
        "bytes": bytes,
        "seconds": rounded(took.as_secs_f64(), 3),
        "mb_per_second": rounded(per_second(bytes, took) / 1e6, 2),
        "each_seconds": each,
    }));
    Ok(())
}

async fn transfer(
    mut line: Connection,
    kind: Kind,
    host: &str,
    upgrade: Option<&str>,
) -> anyhow::Result<()> {
    let (request, wanted) = match (upgrade, kind) {
        (Some(path), _) => (super::upgrade(path, host), 101),
        (None, Kind::Down(bytes)) => (
            format!("GET /{bytes} HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes(),
            200,
        ),
        (None, Kind::Up(bytes)) => (
            format!("PUT /sink HTTP/1.1\r\nHost: {host}\r\nContent-Length: {bytes}\r\n\r\n")
                .into_bytes(),
            200,
        ),
    };
    line.send(&request).await?;
    match kind {
        Kind::Down(bytes) => {
            answered(&mut line, wanted).await?;
            line.skip(bytes).await
        }
        Kind::Up(bytes) => {
            if upgrade.is_some() {
                answered(&mut line, wanted).await?;
            }
            pour(&mut line, bytes).await?;
            let message = if upgrade.is_some() {
                line.finish().await?;
                line.rest().await?
            } else {
                let length = answered(&mut line, wanted).await?;
                let mut message = vec![0; usize::try_from(length.unwrap_or(0).min(SHORT))?];
                line.exact(&mut message).await?;
                message
            };
            let message = String::from_utf8_lossy(&message);
            ensure!(
                message.trim() == bytes.to_string(),
                "of {bytes} bytes the app reports {message:?}"
            );
            Ok(())
        }
    }
}

async fn answered(line: &mut Connection, wanted: u16) -> anyhow::Result<Option<u64>> {
    let head = line.head().await?;
    ensure!(
        head.status == wanted,
        "a transfer was answered {} {}",
        head.status,
        head.reason
    );
    Ok(head.length)
}

async fn pour(line: &mut Connection, mut left: u64) -> anyhow::Result<()> {
    while left > 0 {
        let length = usize::try_from(left).unwrap_or(usize::MAX).min(BLOCK.len());
        line.send(BLOCK.get(..length).unwrap_or_default()).await?;
        left -= u64::try_from(length)?;
    }
    Ok(())
}
