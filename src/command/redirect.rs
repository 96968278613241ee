//! `causeway redirect`: leads callers of nodes' addresses to gateways elsewhere, until a signal.
//!
//! Which addresses these are is the word of the cluster's Node objects, which are followed as a gateway follows them: a
//! gateway's own listeners tell nobody on another host. The configuration is read anew as a gateway's is.

use std::sync::Arc;

use anyhow::{Context, bail};
use causeway_gateway::redirector::{Config, Redirector, Reloader};
use causeway_k8s::Informer;

use super::{cluster, explain, files};
use crate::notify::Notify;
use crate::reload::{self, Noted, Reasons};
use crate::settings::{self, Sources};
use crate::signal::Signals;

/// Binds everything, passes callers on until SIGTERM or SIGINT, then drains. Reads `sources` anew whenever there is a
/// reason.
pub(crate) async fn run(config: Config, sources: Sources) -> anyhow::Result<()> {
    let mut noted = Noted::default();
    noted.files(sources.file.clone());
    let mut signals = Signals::listen()?;
    let stop = signals.stop.clone();
    let notify = Notify::from_environment();
    let told = |error: &anyhow::Error| notify.status(&explain(error));
    let config = within_files(config);
    let (rules, grace) = (config.kubernetes.rules(), config.timeouts.drain);
    let client = causeway_k8s::client(rules.kubeconfig.as_deref()).await;
    let client = client.map_err(anyhow::Error::from).inspect_err(told)?;
    let bound = Redirector::bind(config).map_err(anyhow::Error::from);
    let (reloads, asked) = causeway_config::reloads();
    let bound = bound.inspect_err(told)?.reloads(reloads);
    let informer = Informer {
        client,
        rules,
        nodes: bound.nodes(),
        metrics: bound.metrics().cluster(),
    };
    let hold = bound.hold("the nodes of the cluster are not known yet");
    let reasons = Reasons {
        hangup: signals.hangup.take(),
        asked,
        files: noted,
    };
    let (fares, reloader) = (bound.fares(), bound.reloader());
    let again = Arc::new(move |noted: &mut Noted| {
        let done = reloaded(&sources, &reloader, noted);
        done.inspect_err(|_| reloader.refused())
    });
    let live = notify.redirector(fares, (stop.clone(), grace), bound.run(stop));
    let live = Box::pin(reload::beside(live, reasons, again));
    let live = cluster::beside(
        live,
        Box::pin(async move {
            informer.run(hold).await;
            std::future::pending().await
        }),
    );
    match signals.run(Box::pin(live)).await {
        Some(ended) => ended.context("cannot serve"),
        None => bail!("ended at once by a second signal; what was open is cut"),
    }
}

fn reloaded(sources: &Sources, reloader: &Reloader, noted: &mut Noted) -> anyhow::Result<String> {
    noted.files(sources.file.clone());
    let config = within_files(settings::load_anew(sources)?);
    Ok(reloader.apply(&config).to_string())
}

/// Of each caller there are two connections: its own and the gateway's.
fn within_files(mut config: Config) -> Config {
    config.limits.connections = files::allow(config.limits.connections, 2);
    config
}
