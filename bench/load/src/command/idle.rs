//! Idle upgrades: opened, left open, and checked at the end with an echo.

use super::connect::upgrade;
use crate::{
    cli, files,
    http1::Connection,
    measure::Failures,
    report::{self, rounded},
    route::Route,
    stop::Stop,
};
use anyhow::{Context, ensure};
use serde_json::json;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, timeout},
};

/// Bytes that each connection sends at the end and expects back.
const WORD: &[u8; 8] = b"still on";
/// Maximum time for the echo.
const BOUND: Duration = Duration::from_secs(10);

/// Opens the upgrades, leaves them open until it is asked to stop, and checks each.
pub(crate) async fn run(asked: cli::Idle, stop: Stop) -> anyhow::Result<()> {
    files::enough(asked.count)?;
    let route = Arc::new(Route::of(&asked.url, asked.to, &asked.caller).await?);
    let path = asked.url.path_and_query().map_or("/", |path| path.as_str());
    let host = asked.url.authority().map_or("", |host| host.as_str());
    let request = Arc::new(upgrade(path, host));
    let turns = Arc::new(Semaphore::new(asked.at_once));
    let began = Instant::now();
    let mut opening = JoinSet::new();
    for _ in 0..asked.count {
        let (route, request, turns) = (route.clone(), request.clone(), turns.clone());
        opening.spawn(async move {
            let _turn = turns.acquire().await?;
            open(&route, &request).await
        });
    }
    let mut lines = Vec::new();
    let opened = async {
        while let Some(opened) = opening.join_next().await {
            lines.push(opened.context("an upgrade panicked")??);
        }
        anyhow::Ok(())
    };
    match stop.token.run_until_cancelled(opened).await {
        Some(opened) => opened?,
        None => return Ok(()),
    }
    let took = rounded(began.elapsed().as_secs_f64(), 3);
    report::say(&json!({"event": "ready", "count": lines.len(), "seconds": took}));
    stop.token.cancelled().await;
    let mut asking = JoinSet::new();
    for line in lines {
        asking.spawn(alive(line));
    }
    let mut failures = Failures::default();
    for alive in asking.join_all().await {
        if let Err(error) = alive {
            failures.add(format!("{error:#}"));
        }
    }
    let dead = failures.count();
    let alive = u64::try_from(asked.count)?.saturating_sub(dead);
    report::say(&json!({"event": "end", "alive": alive, "dead": dead, "failures": failures}));
    Ok(())
}

async fn open(route: &Route, request: &[u8]) -> anyhow::Result<Connection> {
    let mut line = route.open().await?.line;
    let head = line.ask(request).await?;
    ensure!(
        head.status == 101,
        "an upgrade was answered {} {}",
        head.status,
        head.reason
    );
    Ok(line)
}

async fn alive(mut line: Connection) -> anyhow::Result<()> {
    let asked = async {
        line.send(WORD).await?;
        let mut heard = [0; WORD.len()];
        line.exact(&mut heard).await?;
        ensure!(heard == *WORD, "an echo differs");
        Ok(())
    };
    timeout(BOUND, asked).await.context("no echo in time")?
}
