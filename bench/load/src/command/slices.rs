//! `EndpointSlices` of a realistic cluster, made in its API or changed at a rate, each change marked with its time.
//!
//! 1. A slice has ten endpoints with the fields that kube-controller-manager writes, so that its size is realistic.
//! 2. A change is a PUT of the whole slice, like that controller's: while a Service rolls out, one endpoint is not ready,
//!    the next time another.
//! 3. Changes are due at their times whether or not the one before is answered: a slow API gets as many.

mod slice;

use crate::{
    cli, files,
    http1::Connection,
    measure::{Failures, Latencies, per_second},
    report::{self, rounded},
    route::Route,
    stop::Stop,
};
use anyhow::{Context, ensure};
use serde_json::json;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};

/// Names of the slices in the API.
const PATH: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";

/// Arguments and progress of one writer.
struct Work {
    asked: cli::EndpointSlices,
    route: Route,
    next: AtomicUsize,
    began: Instant,
}

/// Makes or changes them all, and reports the time that the API took.
pub(crate) async fn run(asked: cli::EndpointSlices, stop: Stop) -> anyhow::Result<()> {
    ensure!(
        asked.count > 0 && asked.rate > 0 && asked.clients > 0,
        "--count, --rate and --clients are at least 1"
    );
    files::enough(asked.clients)?;
    let route = Route::of(&asked.url, None, &asked.caller).await?;
    let callers = asked.clients;
    let work = Arc::new(Work {
        asked,
        route,
        next: AtomicUsize::new(0),
        began: Instant::now(),
    });
    let mut working = JoinSet::new();
    for _ in 0..callers {
        working.spawn(ask(work.clone()));
    }
    let (mut latencies, mut failures) = (Latencies::new(), Failures::default());
    let worked = async {
        while let Some(one) = working.join_next().await {
            match one.context("a client panicked")? {
                Ok(took) => latencies.join(&took),
                Err(error) => failures.add(format!("{error:#}")),
            }
        }
        anyhow::Ok(())
    };
    match stop.token.run_until_cancelled(worked).await {
        Some(worked) => worked?,
        None => return Ok(()),
    }
    let took = work.began.elapsed();
    report::say(&json!({
        "event": "result", "requests": latencies.count(), "failed": failures.count(), "failures": failures,
        "seconds": rounded(took.as_secs_f64(), 3), "per_second": per_second(latencies.count(), took),
        "latency_us": latencies.summary(),
    }));
    Ok(())
}

async fn ask(work: Arc<Work>) -> anyhow::Result<Latencies> {
    let mut line = work.route.open().await?.line;
    let mut latencies = Latencies::new();
    loop {
        let turn = work.next.fetch_add(1, Ordering::Relaxed);
        if turn >= work.asked.changes.unwrap_or(work.asked.count) {
            return Ok(latencies);
        }
        if work.asked.changes.is_some() {
            sleep_until(work.due(turn)).await;
        }
        let began = Instant::now();
        one(&mut line, &work.request(turn)).await?;
        latencies.add(began.elapsed());
    }
}

impl Work {
    fn due(&self, turn: usize) -> Instant {
        let turn = u32::try_from(turn).unwrap_or(u32::MAX);
        self.began + Duration::from_secs(1) * turn / self.asked.rate
    }

    /// Returns the request of this turn, with the present time.
    fn request(&self, turn: usize) -> Vec<u8> {
        let number = turn % self.asked.count;
        let (method, path, mark, step) = if self.asked.changes.is_some() {
            let path = format!("{PATH}/{}", slice::name(number));
            let step = self.asked.step + turn / self.asked.count;
            ("PUT", path, self.asked.mark, step)
        } else {
            ("POST", PATH.to_owned(), '0', 0)
        };
        let body = slice::of(number, step, mark).to_string();
        let host = self.asked.url.authority().map_or("", |host| host.as_str());
        format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: kube-controller-manager\r\nAccept: application/json\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes()
    }
}

async fn one(line: &mut Connection, request: &[u8]) -> anyhow::Result<()> {
    line.send(request).await?;
    let head = line.any_head().await?;
    ensure!(
        matches!(head.status, 200 | 201),
        "a slice was answered {} {}",
        head.status,
        head.reason
    );
    line.pass(&head).await
}
