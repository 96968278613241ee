//! Requests in a closed loop: over one connection for each client, or over a new one each time.
//!
//! Kept connections are opened before the clock starts. A request in flight when the time is over does not count. A new
//! connection counts from its first packet to the last byte of its answer.

use crate::{
    cli,
    http1::Connection,
    measure::{Failures, Latencies, per_second},
    report::{self, rounded},
    route::Route,
};
use anyhow::{Context, bail, ensure};
use serde_json::json;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::Barrier,
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

/// Pause after a failure, so that failures do not make a tight loop.
const PAUSE: Duration = Duration::from_millis(10);

struct Client {
    route: Arc<Route>,
    request: Vec<u8>,
    new: bool,
    met: CallOutcome,
}

/// Results of one client.
struct CallOutcome {
    latencies: Latencies,
    failures: Failures,
    full: u64,
    resumed: u64,
    opened: u64,
}

/// Runs the load and reports.
pub(super) async fn run(asked: &cli::Connect, route: Arc<Route>) -> anyhow::Result<()> {
    let connection = if asked.new {
        "Connection: close\r\n"
    } else {
        ""
    };
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: {}\r\n{connection}\r\n",
        asked.path, asked.target
    );
    let start = Arc::new(Barrier::new(asked.clients + 1));
    let mut callers = JoinSet::new();
    for _ in 0..asked.clients {
        let caller = Client {
            route: route.clone(),
            request: request.clone().into_bytes(),
            new: asked.new,
            met: CallOutcome::new(),
        };
        callers.spawn(caller.call(start.clone(), asked.lasting));
    }
    start.wait().await;
    report::say(&json!({"event": "ready", "callers": asked.clients}));
    let began = Instant::now();
    let mut all = CallOutcome::new();
    while let Some(met) = callers.join_next().await {
        all.join(met.context("a client panicked")?);
    }
    let took = began.elapsed().min(asked.lasting);
    let requests = all.latencies.count();
    report::say(&json!({
        "event": "result",
        "callers": asked.clients,
        "requests": requests,
        "seconds": rounded(took.as_secs_f64(), 3),
        "per_second": per_second(requests, took),
        "latency_us": all.latencies.summary(),
        "failed": all.failures.count(),
        "failures": all.failures,
        "connections": all.opened,
        "full": all.full,
        "resumed": all.resumed,
    }));
    ensure!(requests > 0, "no request was answered");
    Ok(())
}

impl CallOutcome {
    fn new() -> Self {
        Self {
            latencies: Latencies::new(),
            failures: Failures::default(),
            full: 0,
            resumed: 0,
            opened: 0,
        }
    }

    fn join(&mut self, other: Self) {
        self.latencies.join(&other.latencies);
        self.failures.join(other.failures);
        self.full += other.full;
        self.resumed += other.resumed;
        self.opened += other.opened;
    }
}

impl Client {
    async fn call(mut self, start: Arc<Barrier>, lasting: Duration) -> CallOutcome {
        let mut kept = None;
        if !self.new {
            // A failure here repeats below, where it is counted.
            kept = self.open().await.ok();
        }
        start.wait().await;
        let over = sleep_until(Instant::now() + lasting);
        tokio::select! {
            biased;
            () = over => {}
            () = self.repeat(&mut kept) => {}
        }
        self.met
    }

    /// Sends requests without end.
    async fn repeat(&mut self, kept: &mut Option<Connection>) {
        loop {
            let began = Instant::now();
            match self.once(kept).await {
                Ok(()) => self.met.latencies.add(began.elapsed()),
                Err(error) => {
                    *kept = None;
                    self.met.failures.add(format!("{error:#}"));
                    sleep(PAUSE).await;
                }
            }
        }
    }

    async fn once(&mut self, kept: &mut Option<Connection>) -> anyhow::Result<()> {
        let mut line = match kept.take() {
            Some(line) => line,
            None => self.open().await?,
        };
        let head = line.ask(&self.request).await?;
        ensure!(head.status == 200, "{} {}", head.status, head.reason);
        let Some(length) = head.length else {
            bail!("an answer without a length");
        };
        line.skip(length).await?;
        if !self.new && !head.close {
            *kept = Some(line);
        }
        Ok(())
    }

    async fn open(&mut self) -> anyhow::Result<Connection> {
        let opened = self.route.open().await?;
        self.met.opened += 1;
        match opened.resumed {
            Some(true) => self.met.resumed += 1,
            Some(false) => self.met.full += 1,
            None => {}
        }
        Ok(opened.line)
    }
}
