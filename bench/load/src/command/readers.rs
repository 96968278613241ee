//! Readers of `EndpointSlices` like kube-proxy: each has a watch that begins with all objects, on a connection of its own.
//!
//! 1. Each sends the request of client-go's defaults, `sendInitialEvents` and bookmarks, in protobuf or JSON.
//! 2. `ready` is printed when all clients have received everything.
//! 3. For each change with the mark the age is recorded; `result` is printed when each client has seen all of them.
//! 4. A watch that the server ends, as kube-apiserver does if a reader is too slow, continues at the last version.
//! 5. All keep reading until they are asked to stop, so that their cost at the other end can be measured.

pub(crate) mod stamp;
mod version;

use crate::{
    cli, files,
    http1::Connection,
    measure::Latencies,
    report::{self, rounded},
    route::Route,
    stop::Stop,
};
use anyhow::{Context, bail, ensure};
use bytes::{Buf, BytesMut};
use serde_json::json;
use std::sync::Arc;
use tokio::{sync::mpsc, task::JoinSet, time::Instant};

/// Path of the watch.
const PATH: &str = "/apis/discovery.k8s.io/v1/endpointslices?watch=true&allowWatchBookmarks=true&timeoutSeconds=3600";
/// From its beginning, with all objects.
const BEGINNING: &str = "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
/// The annotation of the bookmark after all initial objects.
const COMPLETE: &[u8] = b"k8s.io/initial-events-end";

/// Report of a watch client.
enum ReaderReport {
    /// The client has received all objects, in this many bytes.
    Ready(u64),
    /// The client has seen all changes: their latencies, and the bytes since it was ready.
    Seen(Latencies, u64),
    /// The watch of the client ended, and the client continues.
    Again,
}

/// Task of one watch client: its connection and the changes that it looks for.
struct WatchTask {
    route: Route,
    host: String,
    accept: &'static str,
    mark: u8,
    changes: u64,
}

/// Bytes that a watch client has received and not examined yet.
#[derive(Default)]
struct WatchState {
    /// Including some examined bytes, which may contain a version.
    unread: BytesMut,
    looked: usize,
    version: Option<u64>,
}

/// Begins to read, reports when all objects have arrived and when all readers have seen all changes, and reads until it is
/// stopped.
pub(crate) async fn run(asked: cli::Readers, stop: Stop) -> anyhow::Result<()> {
    let count = asked.url.len() * asked.count;
    files::enough(count)?;
    let (telling, told) = mpsc::channel(count.max(1));
    let mut reading = JoinSet::new();
    for url in &asked.url {
        let one = Arc::new(WatchTask {
            route: Route::of(url, None, &asked.caller).await?,
            host: url.authority().map_or("", |host| host.as_str()).to_owned(),
            accept: if asked.json {
                "application/json"
            } else {
                "application/vnd.kubernetes.protobuf;stream=watch"
            },
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

/// Prints the sum of all reports, and then waits without end.
async fn tell(mut told: mpsc::Receiver<ReaderReport>, count: usize) {
    let began = Instant::now();
    let (mut ready, mut seen) = ((0, 0), (0, 0));
    let (mut latencies, mut again) = (Latencies::new(), 0);
    while let Some(told) = told.recv().await {
        match told {
            ReaderReport::Again => again += 1,
            ReaderReport::Ready(bytes) => {
                ready = (ready.0 + 1, ready.1 + bytes);
                if ready.0 == count {
                    let took = rounded(began.elapsed().as_secs_f64(), 3);
                    report::say(
                        &json!({"event": "ready", "count": count, "seconds": took, "bytes": ready.1}),
                    );
                }
            }
            ReaderReport::Seen(own, bytes) => {
                latencies.join(&own);
                seen = (seen.0 + 1, seen.1 + bytes);
                if seen.0 == count {
                    report::say(&json!({
                        "event": "result", "count": count, "changes": latencies.count(), "bytes": seen.1, "again": again,
                        "latency_us": latencies.summary(), "latency_counts": latencies.counts(),
                    }));
                }
            }
        }
    }
    std::future::pending::<()>().await;
}

/// One reader, without end.
async fn read(reading: Arc<WatchTask>, telling: mpsc::Sender<ReaderReport>) -> anyhow::Result<()> {
    let mut line = reading.watch(BEGINNING).await?;
    let bytes = complete(&mut line).await?;
    telling.send(ReaderReport::Ready(bytes)).await?;
    let (mut latencies, mut watching, mut bytes) = (Latencies::new(), WatchState::default(), 0);
    loop {
        let began = watching.version;
        while let Ok(Some(chunk)) = line.chunk().await {
            bytes += u64::try_from(chunk.len())?;
            let before = latencies.count();
            watching.look(&chunk, reading.mark, &mut latencies);
            if before < reading.changes && latencies.count() >= reading.changes {
                telling
                    .send(ReaderReport::Seen(latencies.clone(), bytes))
                    .await?;
            }
        }
        let version = watching
            .version
            .context("a watch ended before any change")?;
        ensure!(began != Some(version), "a watch ended twice at {version}");
        telling.send(ReaderReport::Again).await?;
        watching.unread.clear();
        watching.looked = 0;
        line = reading
            .watch(&format!("&resourceVersion={version}"))
            .await?;
    }
}

impl WatchTask {
    /// Opens a watch from this version on.
    async fn watch(&self, from: &str) -> anyhow::Result<Connection> {
        let mut line = self.route.open().await?.line;
        let (host, accept) = (&self.host, self.accept);
        let request = format!(
            "GET {PATH}{from} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: kube-proxy\r\nAccept: {accept}\r\n\r\n"
        );
        line.send(request.as_bytes()).await?;
        let head = line.any_head().await?;
        ensure!(
            head.status == 200 && head.chunked,
            "a watch was answered {} {}",
            head.status,
            head.reason
        );
        Ok(line)
    }
}

impl WatchState {
    /// Examines the received bytes.
    fn look(&mut self, chunk: &[u8], mark: u8, latencies: &mut Latencies) {
        self.unread.extend_from_slice(chunk);
        let mut last = None;
        self.looked += stamp::all(&self.unread[self.looked..], mark, |at, age| {
            last = Some(self.looked + at);
            if let Some(age) = age {
                latencies.add(age);
            }
        });
        if let Some(last) = last {
            let ahead = &self.unread[last.saturating_sub(version::AHEAD)..last];
            self.version = version::last(ahead).or(self.version);
        }
        let done = self.looked.saturating_sub(version::AHEAD);
        self.unread.advance(done);
        self.looked -= done;
    }
}

/// Reads until the bookmark after all initial objects, and counts.
async fn complete(line: &mut Connection) -> anyhow::Result<u64> {
    let (mut unread, mut bytes) = (BytesMut::new(), 0);
    while let Some(chunk) = line.chunk().await? {
        bytes += u64::try_from(chunk.len())?;
        unread.extend_from_slice(&chunk);
        if unread.windows(COMPLETE.len()).any(|at| at == COMPLETE) {
            return Ok(bytes);
        }
        // The bookmark may be split between two reads.
        unread.advance(unread.len().saturating_sub(COMPLETE.len()));
    }
    bail!("a watch ended before all objects had arrived")
}
