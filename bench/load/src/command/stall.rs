//! Readers that stop: each asks for a large answer, reads its head, and then nothing, or a little each second.

use crate::{cli, files, http1::Line, report, road::Road, stop::Stop};
use anyhow::{Context, ensure};
use serde_json::json;
use std::{sync::Arc, time::Duration};
use tokio::{
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};

/// How often one that reads at a rate reads.
const TICK: Duration = Duration::from_millis(50);

/// Opens them, and holds them until it is told to stop.
pub(crate) async fn run(asked: cli::Stall, stop: Stop) -> anyhow::Result<()> {
    files::enough(asked.count)?;
    let road = Arc::new(Road::of(&asked.url, asked.to, &asked.caller).await?);
    let request = Arc::new(request(&asked.url));
    let mut opening = JoinSet::new();
    for _ in 0..asked.count {
        let (road, request) = (road.clone(), request.clone());
        opening.spawn(async move { begin(&road, &request).await });
    }
    let mut readers = Vec::new();
    let opened = async {
        while let Some(opened) = opening.join_next().await {
            readers.push(opened.context("a reader panicked")??);
        }
        anyhow::Ok(())
    };
    match stop.token.run_until_cancelled(opened).await {
        Some(opened) => opened?,
        None => return Ok(()),
    }
    report::say(&json!({"event": "ready", "count": readers.len()}));
    let mut reading = JoinSet::new();
    if let Some(rate) = asked.rate {
        for line in readers.drain(..) {
            let stop = stop.token.clone();
            reading.spawn(async move {
                let mut bytes = 0;
                // One that ends before its time shows in the bytes.
                let _ = stop.run_until_cancelled(sip(line, rate, &mut bytes)).await;
                bytes
            });
        }
    }
    stop.token.cancelled().await;
    let bytes: u64 = reading.join_all().await.iter().sum();
    report::say(&json!({"event": "end", "bytes": bytes}));
    Ok(())
}

/// What asks for the URL's path.
pub(super) fn request(url: &http::Uri) -> Vec<u8> {
    let path = url.path_and_query().map_or("/", |path| path.as_str());
    let host = url.authority().map_or("", |host| host.as_str());
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes()
}

async fn begin(road: &Road, request: &[u8]) -> anyhow::Result<Line> {
    let mut line = road.open().await?.line;
    let head = line.ask(request).await?;
    ensure!(
        head.status == 200,
        "a reader was answered {} {}",
        head.status,
        head.reason
    );
    Ok(line)
}

async fn sip(mut line: Line, rate: u64, bytes: &mut u64) -> anyhow::Result<()> {
    let mut ticks = interval(TICK);
    // One that came too late has nothing to make up for.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let share = u64::try_from(u128::from(rate) * TICK.as_millis() / 1000)?.max(1);
    loop {
        ticks.tick().await;
        let mut left = share;
        while left > 0 {
            match line.some(left).await? {
                0 => return Ok(()),
                read => left -= read,
            }
        }
        *bytes += share;
    }
}
