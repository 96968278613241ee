//! `causeway edge`: runs an edge with a configuration until a signal.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use causeway_certs::{OpenMode, Store};
use causeway_edge::{Config, Edge, Error, Reloader};

use super::{admin_client, kubernetes, rlimit as open_files};
use crate::cli::operator::EdgeLeave;
use crate::operator::config_loader::{self, ConfigSources};
use crate::operator::config_reload::{self, FileHashes, ReloadTriggers};
use crate::operator::systemd::SystemdNotifier;
use crate::output::{errln, explain, outln};
use crate::signal::Signals;

/// Joins if necessary, dials the gateways, serves until SIGTERM or SIGINT, then drains. Reads `sources` again at each trigger
/// of a reload.
pub(crate) async fn run(
    config: Config,
    sources: ConfigSources,
    rejoin: bool,
) -> anyhow::Result<()> {
    // A pool leader has hundreds of members, and its own tunnels must never lack a file descriptor.
    open_files::raise_limit();
    // Joining may take days, so file hashes are recorded before it.
    let mut file_hashes = FileHashes::default();
    file_hashes.record(watched_files(&config, &sources));
    let mut signals = Signals::listen()?;
    let hangup = signals.hangup.take();
    let stop = signals.stop.clone();
    let notify = SystemdNotifier::from_environment();
    let live = async {
        let drain = config.timeouts.drain;
        let report = |why: &str| notify.notify_not_joined(why);
        let csr_client = kubernetes::csr_client(&config)?;
        let open = Box::pin(Edge::open_with_csr(config, csr_client, (&stop, &report)));
        let bound = match Box::pin(notify.run_join(open)).await {
            // Stopped before the edge had joined; nothing was started.
            Err(Error::Stopped) => return Ok(()),
            opened => opened?.rejoin(rejoin).bind().await?,
        };
        let (reload_sender, reload_requests) = causeway_config::reload_channel();
        let bound = bound.with_reloads(reload_sender);
        let reloader = bound.reloader();
        let store = bound.store().clone();
        // The edge must also run with a full disk; `causeway health` then needs --admin.
        if let Err(error) = store.write_runtime(
            admin_client::ADMIN_ADDRESS_FILE,
            &bound.local_addr().to_string(),
        ) {
            tracing::warn!(%error, "cannot write the admin address to the data directory; `causeway status` and `causeway health` need --admin");
        }
        let (reader, grace) = (bound.status_reader(), (stop.clone(), drain));
        let running = bound.run(stop.clone());
        let triggers = ReloadTriggers {
            hangup,
            requests: reload_requests,
            file_hashes,
        };
        let on_reload = Arc::new(move |file_hashes: &mut FileHashes| {
            let result = reload_config(&sources, &reloader, file_hashes);
            result.inspect_err(|_| reloader.record_refusal())
        });
        let live = notify.run_edge(reader, grace, running);
        let result = Box::pin(config_reload::run_with_reload(live, triggers, on_reload)).await;
        // A successor process has already written its own address.
        if let Ok(_claim) = store.claim()
            && let Err(error) = admin_client::remove_address(&store)
        {
            tracing::debug!(%error, "cannot remove the admin address from the data directory");
        }
        Ok(result?)
    };
    match signals.run(Box::pin(live)).await {
        Some(outcome) => outcome.inspect_err(|error| notify.notify_status(&explain(error))),
        None => bail!("stopped at once by a second signal; open streams were cut"),
    }
}

fn reload_config(
    sources: &ConfigSources,
    reloader: &Reloader,
    file_hashes: &mut FileHashes,
) -> anyhow::Result<String> {
    file_hashes.record(sources.file.clone());
    let config: Config = config_loader::reload(sources)?;
    file_hashes.record(config.files());
    Ok(reloader.prepare(&config)?.apply().to_string())
}

/// Gives up the identity in an edge's data directory.
pub(super) fn leave(args: &EdgeLeave) -> anyhow::Result<()> {
    let path = args.data_dir.display();
    let store = Store::open(&args.data_dir, OpenMode::Existing).with_context(|| {
        format!("{path} is not the data directory of an edge; give that directory with --data-dir")
    })?;
    let _claim = store.claim().with_context(|| {
        format!("an edge is running on the data directory {path}; stop it first, for example with `systemctl stop causeway-edge`")
    })?;
    let Some(backup_path) = store.leave_edge()? else {
        bail!("there is no identity in {path}; there is nothing to give up");
    };
    outln!(
        "this node no longer has an identity; the old identity is kept as {}",
        backup_path.display()
    )?;
    outln!(
        "to join again, it needs a new token (`causeway token create --node NODE`); to remove the node from a gateway, run `causeway node remove NODE` there"
    )?;
    Ok(())
}

/// Reads the files that the configuration names, as far as an edge would need them to run.
pub(crate) fn check(config: &Config) -> anyhow::Result<()> {
    causeway_edge::check_files(config)?;
    // The running process may get a gateway by a flag or variable, so this is only a warning.
    if !causeway_edge::knows_gateway(config) {
        errln!(
            "warning: no gateway is configured; an edge needs one: set gateways, --gateway or CAUSEWAY_GATEWAYS"
        );
    }
    Ok(())
}

/// Returns the files whose changes cause a reload.
fn watched_files(config: &Config, sources: &ConfigSources) -> Vec<PathBuf> {
    sources.file.iter().cloned().chain(config.files()).collect()
}
