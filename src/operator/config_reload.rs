//! Reload of a running process's configuration: on SIGHUP, when one of its files changes, and on a request to the admin
//! listener.
//!
//! All three do the same, on a thread of its own, since a disk may hang and the calling thread serves requests. A rejected
//! configuration changes nothing, and the log states its faults. The log states them again at each further attempt until they
//! are corrected. `file_watch` detects changes of the files, and waits until writers have finished.

mod file_watch;

pub(crate) use file_watch::{FileHashes, WatchedFiles};

use std::convert::Infallible;
use std::sync::Arc;

use causeway_config::ReloadReceiver;
use tokio::signal::unix::Signal;
use tokio::task::spawn_blocking;

use crate::output::explain;
use crate::telemetry::audit_log;

/// Function that reads everything and puts it into force, and returns a description of the result. It records the watched
/// files before it reads them.
pub(crate) type ReloadFn = Arc<dyn Fn(&mut FileHashes) -> anyhow::Result<String> + Send + Sync>;

/// Triggers of a reload.
pub(crate) struct ReloadTriggers {
    /// SIGHUP, if the process handles it.
    pub(crate) hangup: Option<Signal>,
    /// The admin listener.
    pub(crate) requests: ReloadReceiver,
    /// Hashes of the watched files at the time when they were read.
    pub(crate) file_hashes: FileHashes,
}

/// Runs `future` to its end, and calls `reload` meanwhile at each trigger.
pub(crate) async fn run_with_reload<T>(
    future: impl Future<Output = T>,
    triggers: ReloadTriggers,
    reload: ReloadFn,
) -> T {
    tokio::select! {
        outcome = future => outcome,
        never = run(triggers, reload) => match never {},
    }
}

/// Calls `reload` at each trigger. Never ends.
async fn run(mut triggers: ReloadTriggers, reload: ReloadFn) -> Infallible {
    let mut files = WatchedFiles::watch(std::mem::take(&mut triggers.file_hashes));
    loop {
        let (why, request) = tokio::select! {
            () = wait_for_hangup(&mut triggers.hangup) => ("SIGHUP", None),
            asked = triggers.requests.recv() => ("admin request", Some(asked)),
            () = files.changed() => ("a file has changed", None),
        };
        files.wait_until_stable().await;
        tracing::info!(why, "reloading the configuration");
        let (outcome, hashes) = reload_once(reload.clone(), files.hashes()).await;
        files = files.with_hashes(hashes);
        match &outcome {
            Ok(done) => tracing::info!(done, "the configuration was reloaded"),
            Err(error) => {
                tracing::error!(%error, "the configuration was rejected; the previous one stays in effect");
            }
        }
        if let Some(request) = request {
            request.respond(outcome);
        }
    }
}

/// Makes one attempt. After a rejected configuration, its files are watched beside those that are in force: a change of any
/// of them causes another attempt.
async fn reload_once(
    reload: ReloadFn,
    previous: FileHashes,
) -> (Result<String, String>, FileHashes) {
    let unchanged = previous.clone();
    let task = spawn_blocking(move || {
        // First, because logrotate has moved the file even if the configuration is invalid.
        audit_log::reopen();
        // Changes after this point cause another reload.
        let current = previous.rehash();
        let mut hashes = FileHashes::default();
        match reload(&mut hashes) {
            Ok(done) => (Ok(done), hashes),
            Err(error) => (Err(explain(&error)), current.merge(hashes)),
        }
    });
    task.await.unwrap_or_else(|join_error| {
        let why = format!("the reload failed halfway, which is a bug in Causeway: {join_error}");
        (Err(why), unchanged)
    })
}

async fn wait_for_hangup(hangup: &mut Option<Signal>) {
    let signal = match hangup {
        Some(hangup) => hangup.recv().await,
        None => None,
    };
    if signal.is_none() {
        std::future::pending::<()>().await;
    }
}
