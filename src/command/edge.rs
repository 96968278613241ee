//! `causeway edge`: an edge of a configuration, until a signal.

use anyhow::bail;
use causeway_edge::{Config, Edge, Error};

use super::{admin, explain};
use crate::notify::Notify;
use crate::signal::Signals;

/// Joins if it has to, dials the gateways, serves until SIGTERM or SIGINT, then drains.
pub(crate) async fn run(config: Config) -> anyhow::Result<()> {
    let signals = Signals::listen()?;
    let stop = signals.stop.clone();
    let notify = Notify::from_environment();
    let live = async {
        let drain = config.timeouts.drain;
        let tell = |why: &str| notify.not_joined(why);
        let opening = Box::pin(Edge::open_telling(config, &stop, &tell));
        let bound = match Box::pin(notify.joining(opening)).await {
            // Asked to stop before it had joined: nothing was begun.
            Err(Error::Stopped) => return Ok(()),
            opened => opened?.bind()?,
        };
        let store = bound.store().clone();
        // On a full disk an edge is needed all the same: `causeway health` then wants to be told the address.
        if let Err(error) = store.write_runtime(admin::NAME, &bound.local_addr().to_string()) {
            tracing::warn!(%error, "the admin address could not be noted");
        }
        let (reader, asked) = (bound.reader(), (stop.clone(), drain));
        let running = Box::pin(bound.run(stop.clone()));
        let ended = notify.edge(reader, asked, running).await;
        if let Err(error) = store.remove_runtime(admin::NAME) {
            tracing::debug!(%error, "the admin address stays noted");
        }
        Ok(ended?)
    };
    match signals.run(Box::pin(live)).await {
        Some(outcome) => outcome.inspect_err(|error| notify.status(&explain(error))),
        None => bail!("ended at once by a second signal; what was open is cut"),
    }
}
