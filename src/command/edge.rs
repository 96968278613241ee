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
    // A pool leader has hundreds of members, and its own tunnels must never lack a file descriptor.
    open_files::raise();
    // Joining may take days, so files are noted before it.
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
            // Stopped before the edge had joined; nothing was started.
            Err(Error::Stopped) => return Ok(()),
            opened => opened?.rejoin(rejoin).bind().await?,
        };
        let (reloads, asked) = causeway_config::reloads();
        let bound = bound.reloads(reloads);
        let reloader = bound.reloader();
        let store = bound.store().clone();
        // The edge must also run with a full disk; `causeway health` then needs --admin.
        if let Err(error) = store.write_runtime(admin_client::NAME, &bound.local_addr().to_string())
        {
            tracing::warn!(%error, "cannot write the admin address to the data directory; `causeway status` and `causeway health` need --admin");
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
        // A successor process has already written its own address.
        if let Ok(_claim) = store.claim()
            && let Err(error) = admin_client::forget(&store)
        {
            tracing::debug!(%error, "cannot remove the admin address from the data directory");
        }
        Ok(ended?)
    };
    match signals.run(Box::pin(live)).await {
        Some(outcome) => outcome.inspect_err(|error| notify.status(&explain(error))),
        None => bail!("stopped at once by a second signal; open streams were cut"),
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
        format!("{shown} is not the data directory of an edge; give that directory with --data-dir")
    })?;
    let _claim = store.claim().with_context(|| {
        format!("an edge is running on the data directory {shown}; stop it first, for example with `systemctl stop causeway-edge`")
    })?;
    let Some(kept) = store.leave_edge()? else {
        bail!("there is no identity in {shown}; there is nothing to give up");
    };
    outln!(
        "this node no longer has an identity; the old identity is kept as {}",
        kept.display()
    )?;
    outln!(
        "to join again, it needs a new token (`causeway token create --node NODE`); to remove the node from a gateway, run `causeway node remove NODE` there"
    )?;
    Ok(())
}

/// Reads what the configuration names, as far as an edge would run without it.
pub(crate) fn check(config: &Config) -> anyhow::Result<()> {
    causeway_edge::check(config)?;
    // The running process may get a gateway by a flag or variable, so this is only a warning.
    if !causeway_edge::knows_gateway(config) {
        errln!(
            "warning: no gateway is configured; an edge needs one: set gateways, --gateway or CAUSEWAY_GATEWAYS"
        );
    }
    Ok(())
}

/// All files that count.
fn files(config: &Config, sources: &ConfigSources) -> Vec<PathBuf> {
    sources.file.iter().cloned().chain(config.files()).collect()
}
