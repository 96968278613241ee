//! `causeway gateway`: a gateway of a configuration, until a signal.

use anyhow::bail;
use causeway_gateway::{Config, Gateway};

use crate::signal::Signals;

/// Where `causeway status` looks for the admin address.
const ADMIN: &str = "admin";

/// Binds everything, serves until SIGTERM or SIGINT, then drains.
pub(crate) async fn run(config: Config) -> anyhow::Result<()> {
    let signals = Signals::listen()?;
    let stop = signals.stop.clone();
    let bound = Gateway::new(config).bind()?;
    let store = bound.store().clone();
    store.write_runtime(ADMIN, &bound.addresses().admin.to_string())?;
    let ended = signals.run(bound.run(stop)).await;
    store.remove_runtime(ADMIN)?;
    if ended.is_none() {
        bail!("ended at once by a second signal; what was open is cut");
    }
    Ok(())
}
