//! Reads the configuration of a process that runs anew: on SIGHUP, when a file of it changes, when it is asked.
//!
//! All three do the same, on a thread of its own, since a disk may hang and this one serves. What is refused leaves
//! everything as it was, and the log says where it is wrong; so does the next attempt, as long as the file is.
//! `watch` knows the files, and when they have been written to their end.

mod file_watch;

pub(crate) use file_watch::{FileHashes, WatchedFiles};

use std::convert::Infallible;
use std::sync::Arc;

use causeway_config::ReloadReceiver;
use tokio::signal::unix::Signal;
use tokio::task::spawn_blocking;

use crate::error_text::explain;
use crate::telemetry;

/// Reads everything and puts it into force; says what that did. Notes the files that count before it reads them.
pub(crate) type ReloadFn = Arc<dyn Fn(&mut FileHashes) -> anyhow::Result<String> + Send + Sync>;

/// Triggers of a reload.
pub(crate) struct ReloadTriggers {
    /// SIGHUP, if the process handles it.
    pub(crate) hangup: Option<Signal>,
    /// The admin listener.
    pub(crate) asked: ReloadReceiver,
    /// Files that count, as they were when they were read.
    pub(crate) files: FileHashes,
}

/// Runs `live` to its end, and calls `reload` meanwhile whenever there is a reason.
pub(crate) async fn run_with_reload<T>(
    live: impl Future<Output = T>,
    reasons: ReloadTriggers,
    reload: ReloadFn,
) -> T {
    tokio::select! {
        outcome = live => outcome,
        never = run(reasons, reload) => match never {},
    }
}

/// Calls `reload` whenever there is a reason. Never ends.
async fn run(mut reasons: ReloadTriggers, reload: ReloadFn) -> Infallible {
    let mut files = WatchedFiles::watch(std::mem::take(&mut reasons.files));
    loop {
        let (why, asked) = tokio::select! {
            () = hung_up(&mut reasons.hangup) => ("SIGHUP", None),
            asked = reasons.asked.next() => ("admin request", Some(asked)),
            () = files.changed() => ("a file has changed", None),
        };
        files.settled().await;
        tracing::info!(why, "reloading the configuration");
        let (outcome, noted) = attempt(reload.clone(), files.noted()).await;
        files = files.replaced(noted);
        match &outcome {
            Ok(done) => tracing::info!(done, "the configuration was reloaded"),
            Err(error) => {
                tracing::error!(%error, "the configuration was rejected; the previous one stays in effect");
            }
        }
        if let Some(asked) = asked {
            asked.answer(outcome);
        }
    }
}

/// One attempt. What is refused counts its own files beside those that are in force: whichever is mended is a reason.
async fn attempt(reload: ReloadFn, before: FileHashes) -> (Result<String, String>, FileHashes) {
    let begun = before.clone();
    let attempt = spawn_blocking(move || {
        // First, because logrotate has moved the file even if the configuration is invalid.
        telemetry::reopen_audit_log();
        // Changes after this point cause another reload.
        let before = before.anew();
        let mut noted = FileHashes::default();
        match reload(&mut noted) {
            Ok(done) => (Ok(done), noted),
            Err(error) => (Err(explain(&error)), before.and(noted)),
        }
    });
    attempt.await.unwrap_or_else(|failed| {
        let why = format!("the reload failed halfway, which is a bug in Causeway: {failed}");
        (Err(why), begun)
    })
}

async fn hung_up(hangup: &mut Option<Signal>) {
    let heard = match hangup {
        Some(hangup) => hangup.recv().await,
        None => None,
    };
    if heard.is_none() {
        std::future::pending::<()>().await;
    }
}
