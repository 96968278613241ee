//! `causeway edge`: an edge of a configuration, until a signal.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use causeway_certs::{OpenMode, Store};
use causeway_edge::{Config, Edge, Error, Reloader};

use super::{admin_client, kubernetes, rlimit as open_files};
use crate::cli::EdgeLeave;
use crate::config_loader::{self, ConfigSources};
use crate::error_text::explain;
use crate::output::{errln, outln};
use crate::reload::{self, FileHashes, ReloadTriggers};
use crate::signal::Signals;
use crate::systemd::SystemdNotifier;

/// Joins if it has to, dials the gateways, serves until SIGTERM or SIGINT, then drains.
/// Reads `sources` anew whenever there is a reason.
pub(crate) async fn run(
    config: Config,
    sources: ConfigSources,
    rejoin: bool,
) -> anyhow::Result<()> {
    // A pool's leader has some hundreds of neighbours, and its own way to the cloud must never want for a file.
    open_files::raise();
    // Joining may take days: what changes meanwhile is a change.
    let mut noted = FileHashes::default();
    noted.files(files(&config, &sources));
    let mut signals = Signals::listen()?;
    let hangup = signals.hangup.take();
    let stop = signals.stop.clone();
    let notify = SystemdNotifier::from_environment();
    let live = async {
        let drain = config.timeouts.drain;
        let tell = |why: &str| notify.not_joined(why);
        let cluster = kubernetes::vouching(&config)?;
        let opening = Box::pin(Edge::open_by(config, cluster, (&stop, &tell)));
        let bound = match Box::pin(notify.joining(opening)).await {
            // Asked to stop before it had joined: nothing was begun.
            Err(Error::Stopped) => return Ok(()),
            opened => opened?.rejoin(rejoin).bind().await?,
        };
        let (reloads, asked) = causeway_config::reloads();
        let bound = bound.reloads(reloads);
        let reloader = bound.reloader();
        let store = bound.store().clone();
        // On a full disk an edge is needed all the same: `causeway health` then wants to be told the address.
        if let Err(error) = store.write_runtime(admin_client::NAME, &bound.local_addr().to_string())
        {
            tracing::warn!(%error, "the admin address could not be noted");
        }
        let (reader, grace) = (bound.reader(), (stop.clone(), drain));
        let running = bound.run(stop.clone());
        let reasons = ReloadTriggers {
            hangup,
            asked,
            files: noted,
        };
        let again = Arc::new(move |noted: &mut FileHashes| {
            let done = reloaded(&sources, &reloader, noted);
            done.inspect_err(|_| reloader.refused())
        });
        let live = notify.edge(reader, grace, running);
        let ended = Box::pin(reload::run_with_reload(live, reasons, again)).await;
        // A process that followed this one has noted its own address.
        if let Ok(_claim) = store.claim()
            && let Err(error) = admin_client::forget(&store)
        {
            tracing::debug!(%error, "the admin address stays noted");
        }
        Ok(ended?)
    };
    match signals.run(Box::pin(live)).await {
        Some(outcome) => outcome.inspect_err(|error| notify.status(&explain(error))),
        None => bail!("ended at once by a second signal; what was open is cut"),
    }
}

fn reloaded(
    sources: &ConfigSources,
    reloader: &Reloader,
    noted: &mut FileHashes,
) -> anyhow::Result<String> {
    noted.files(sources.file.clone());
    let config: Config = config_loader::reload(sources)?;
    noted.files(config.files());
    Ok(reloader.prepare(&config)?.apply().to_string())
}

/// Gives up the identity in an edge's data directory.
pub(super) fn leave(ask: &EdgeLeave) -> anyhow::Result<()> {
    let shown = ask.data_dir.display();
    let store = Store::open(&ask.data_dir, OpenMode::Existing).with_context(|| {
        format!("{shown} is no data directory of an edge; name that by --data-dir")
    })?;
    let _claim = store.claim().with_context(|| {
        format!("an edge runs in {shown}; stop it first, as by `systemctl stop causeway-edge`")
    })?;
    let Some(kept) = store.leave_edge()? else {
        bail!("there is no identity in {shown}: nothing to give up");
    };
    outln!(
        "this node has no identity any more; the one before is kept as {}",
        kept.display()
    )?;
    outln!(
        "it joins anew with a token of `causeway token create --node NODE`; a gateway that is to forget the node: `causeway node remove NODE` there"
    )?;
    Ok(())
}

/// Reads what the configuration names, as far as an edge would run without it.
pub(crate) fn check(config: &Config) -> anyhow::Result<()> {
    causeway_edge::check(config)?;
    // A gateway may come by a flag or variable of the process that runs.
    if !causeway_edge::knows_gateway(config) {
        errln!(
            "warning: no gateway is known: an edge needs one, as gateways, --gateway or CAUSEWAY_GATEWAYS"
        );
    }
    Ok(())
}

/// All files that count.
fn files(config: &Config, sources: &ConfigSources) -> Vec<PathBuf> {
    sources.file.iter().cloned().chain(config.files()).collect()
}
