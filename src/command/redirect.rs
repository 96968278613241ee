//! `causeway redirect`: leads callers of nodes' addresses to gateways elsewhere, until a signal.
//!
//! Which addresses these are is the word of the cluster's Node objects, which are followed as a gateway follows them: a
//! gateway's own listeners tell nobody on another host.

use anyhow::{Context, bail};
use causeway_gateway::redirector::{Config, Redirector};
use causeway_k8s::Informer;

use super::{cluster, explain, files};
use crate::notify::Notify;
use crate::signal::Signals;

/// Binds everything, passes callers on until SIGTERM or SIGINT, then drains.
pub(crate) async fn run(mut config: Config) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let stop = signals.stop.clone();
    let notify = Notify::from_environment();
    let told = |error: &anyhow::Error| notify.status(&explain(error));
    // The caller's connection and the gateway's.
    config.limits.connections = files::allow(config.limits.connections, 2);
    let (rules, grace) = (config.kubernetes.rules(), config.timeouts.drain);
    let client = causeway_k8s::client(rules.kubeconfig.as_deref()).await;
    let client = client.map_err(anyhow::Error::from).inspect_err(told)?;
    let bound = Redirector::bind(config).map_err(anyhow::Error::from);
    let bound = bound.inspect_err(told)?;
    let informer = Informer {
        client,
        rules,
        nodes: bound.nodes(),
        metrics: bound.metrics().cluster(),
    };
    let hold = bound.hold("the nodes of the cluster are not known yet");
    let fares = bound.fares();
    let live = notify.redirector(fares, (stop.clone(), grace), bound.run(stop));
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
