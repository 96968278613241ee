//! `causeway edge`: an edge of a configuration, until a signal.

use anyhow::bail;
use causeway_edge::{Config, Edge, Error};

use super::admin;
use crate::signal::Signals;

/// Joins if it has to, dials the gateways, serves until SIGTERM or SIGINT, then drains.
pub(crate) async fn run(config: Config) -> anyhow::Result<()> {
    let signals = Signals::listen()?;
    let stop = signals.stop.clone();
    let live = async {
        let bound = match Edge::open(config, &stop).await {
            // Asked to stop before it had joined: nothing was begun.
            Err(Error::Stopped) => return Ok(()),
            opened => opened?.bind()?,
        };
        let store = bound.store().clone();
        store.write_runtime(admin::NAME, &bound.local_addr().to_string())?;
        let ended = bound.run(stop.clone()).await;
        store.remove_runtime(admin::NAME)?;
        Ok(ended?)
    };
    match signals.run(Box::pin(live)).await {
        Some(outcome) => outcome,
        None => bail!("ended at once by a second signal; what was open is cut"),
    }
}
