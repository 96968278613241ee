//! Readers of `EndpointSlices`, as kube-proxy is one: a watch each that begins with all there is, on a connection of its own.
//!
//! 1. Each asks as client-go does by default, `sendInitialEvents` and bookmarks, in protobuf or JSON.
//! 2. `ready` is said when all have been told everything.
//! 3. Of each change with the mark it is noted how long ago it was made; `result` is said when each has seen all of them.
//! 4. All keep reading until they are told to stop: what they cost at the other end can be looked at.

pub(crate) mod stamp;

use crate::{
    cli, files,
    http1::Line,
    measure::Latencies,
    report::{self, rounded},
    road::Road,
    stop::Stop,
};
use anyhow::{Context, bail, ensure};
use bytes::{Buf, BytesMut};
use serde_json::json;
use std::{sync::Arc, time::Duration};
use tokio::{sync::mpsc, task::JoinSet, time::Instant};

/// What they watch.
const PATH: &str = "/apis/discovery.k8s.io/v1/endpointslices?watch=true&sendInitialEvents=true\
     &resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=3600";
/// The annotation of the bookmark behind all that there is at the beginning.
const COMPLETE: &[u8] = b"k8s.io/initial-events-end";

/// What a reader has to tell.
enum Told {
    /// It has been told all there is, in so many bytes.
    Ready(u64),
    /// It has seen all changes; how long they took, and bytes since it was ready.
    Seen(Latencies, u64),
}

/// What one of them reads, and what it looks for.
struct Reading {
    road: Road,
    request: Vec<u8>,
    mark: u8,
    changes: u64,
}

/// Begins to read, says when all are there and when all have seen everything, and reads until it is told to stop.
pub(crate) async fn run(asked: cli::Readers, stop: Stop) -> anyhow::Result<()> {
    let count = asked.url.len() * asked.count;
    files::enough(count)?;
    let (telling, told) = mpsc::channel(count.max(1));
    let mut reading = JoinSet::new();
    for url in &asked.url {
        let one = Arc::new(Reading {
            road: Road::of(url, None, &asked.caller).await?,
            request: request(url, asked.json),
            mark: u8::try_from(asked.mark).context("the mark is one letter of ASCII")?,
            changes: asked.changes,
        });
        for _ in 0..asked.count {
            reading.spawn(read(one.clone(), telling.clone()));
        }
    }
    let failed = async {
        match reading.join_next().await {
            Some(Ok(Err(error))) => Err(error),
            Some(Err(error)) => Err(error).context("a reader panicked"),
            Some(Ok(Ok(()))) | None => bail!("a watch ended"),
        }
    };
    tokio::select! {
        () = stop.token.cancelled() => Ok(()),
        failed = failed => failed,
        () = tell(told, count) => Ok(()),
    }
}

/// Says what all have told, and then waits for ever.
async fn tell(mut told: mpsc::Receiver<Told>, count: usize) {
    let began = Instant::now();
    let (mut ready, mut seen) = ((0, 0), (0, 0));
    let mut latencies = Latencies::new();
    while let Some(told) = told.recv().await {
        match told {
            Told::Ready(bytes) => {
                ready = (ready.0 + 1, ready.1 + bytes);
                if ready.0 == count {
                    let took = rounded(began.elapsed().as_secs_f64(), 3);
                    report::say(
                        &json!({"event": "ready", "count": count, "seconds": took, "bytes": ready.1}),
                    );
                }
            }
            Told::Seen(own, bytes) => {
                latencies.join(&own);
                seen = (seen.0 + 1, seen.1 + bytes);
                if seen.0 == count {
                    report::say(&json!({
                        "event": "result", "count": count, "changes": latencies.count(), "bytes": seen.1,
                        "latency_us": latencies.summary(), "latency_counts": latencies.counts(),
                    }));
                }
            }
        }
    }
    std::future::pending().await
}

fn request(url: &http::Uri, json: bool) -> Vec<u8> {
    let host = url.authority().map_or("", |host| host.as_str());
    let accept = if json {
        "application/json"
    } else {
        "application/vnd.kubernetes.protobuf;stream=watch"
    };
    format!(
        "GET {PATH} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: kube-proxy\r\nAccept: {accept}\r\n\r\n"
    )
    .into_bytes()
}

/// One reader, until its watch ends.
async fn read(reading: Arc<Reading>, telling: mpsc::Sender<Told>) -> anyhow::Result<()> {
    let mut line = reading.road.open().await?.line;
    line.send(&reading.request).await?;
    let head = line.any_head().await?;
    ensure!(
        head.status == 200 && head.chunked,
        "a watch was answered {} {}",
        head.status,
        head.reason
    );
    let bytes = complete(&mut line).await?;
    telling.send(Told::Ready(bytes)).await?;
    let (mut latencies, mut held, mut bytes) = (Latencies::new(), BytesMut::new(), 0);
    while let Some(chunk) = line.chunk().await? {
        bytes += u64::try_from(chunk.len())?;
        held.extend_from_slice(&chunk);
        let before = latencies.count();
        let looked = stamp::ages(&held, reading.mark, |age: Duration| latencies.add(age));
        held.advance(looked);
        if before < reading.changes && latencies.count() >= reading.changes {
            telling.send(Told::Seen(latencies.clone(), bytes)).await?;
        }
    }
    Ok(())
}

/// Reads until the bookmark behind all there is, and counts.
async fn complete(line: &mut Line) -> anyhow::Result<u64> {
    let (mut held, mut bytes) = (BytesMut::new(), 0);
    while let Some(chunk) = line.chunk().await? {
        bytes += u64::try_from(chunk.len())?;
        held.extend_from_slice(&chunk);
        if held.windows(COMPLETE.len()).any(|at| at == COMPLETE) {
            return Ok(bytes);
        }
        // It may be cut in two.
        held.advance(held.len().saturating_sub(COMPLETE.len()));
    }
    bail!("a watch ended before all was told")
}
