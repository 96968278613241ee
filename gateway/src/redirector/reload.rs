//! Another configuration for a redirector that runs: whoever comes from then on is passed on by it.
//!
//! Connections that are open stay with the gateways that took them. What cannot change while it runs is named, and takes
//! effect at the next start.

use super::{Config, Gateways, Passing};
use crate::control::nat::Ports;
use arc_swap::ArcSwap;
use std::{collections::BTreeMap, fmt, net::SocketAddr, sync::Arc};
use tokio::sync::watch;

/// Node ports that are led away, and the gateways of each.
pub(super) type ByPort = BTreeMap<u16, Arc<Gateways>>;

/// The gateways of this configuration. Of a port whose gateways are `before` as well, those go on, with what they know.
pub(super) fn by_port(config: &Config, before: &ByPort) -> ByPort {
    let gateways = |port: &u16, all: &Vec<String>| {
        let same = before.get(port).filter(|gateways| gateways.are(all));
        same.cloned()
            .unwrap_or_else(|| Arc::new(Gateways::new(all.clone())))
    };
    let ports = config.ports.iter();
    ports
        .map(|(port, all)| (*port, gateways(port, all)))
        .collect()
}

/// What can change in a redirector that runs. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Reloader(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    /// What it began with.
    began: Config,
    passing: Arc<Passing>,
    listens: SocketAddr,
    led: watch::Sender<Ports>,
}

/// What a reload has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// The node ports that are led away.
    pub ports: Vec<u16>,
    /// Keys that differ from what it began with, and wait for its next start.
    pub at_restart: Vec<&'static str>,
}

impl Reloader {
    pub(super) fn new(
        began: Config,
        passing: Arc<Passing>,
        (listens, led): (SocketAddr, watch::Sender<Ports>),
    ) -> Self {
        Self(Arc::new(Parts {
            began,
            passing,
            listens,
            led,
        }))
    }

    /// Puts `config`, which has been validated, into force, for each caller who comes from now on.
    pub fn apply(&self, config: &Config) -> Changed {
        let Parts {
            began,
            passing,
            listens,
            led,
        } = &*self.0;
        let next: &ArcSwap<ByPort> = &passing.ports;
        next.store(Arc::new(by_port(config, &next.load())));
        // Behind the gateways, so that nobody is led here for whom there are none.
        led.send_replace(Ports::all_to(*listens, config.ports.keys().copied()));
        passing.metrics.reloaded(true);
        Changed {
            ports: config.ports.keys().copied().collect(),
            at_restart: at_restart(began, config),
        }
    }

    /// Notes that a configuration was refused.
    pub fn refused(&self) {
        self.0.passing.metrics.reloaded(false);
    }
}

/// Of the top keys: which a redirector that runs does not take up.
fn at_restart(began: &Config, now: &Config) -> Vec<&'static str> {
    let keys = [
        ("listen", began.listen != now.listen),
        ("kubernetes", began.kubernetes != now.kubernetes),
        ("table", began.table != now.table),
        ("admin", began.admin != now.admin),
        ("limits", began.limits != now.limits),
        ("timeouts", began.timeouts != now.timeouts),
        ("log", began.log != now.log),
    ];
    let differs = keys.into_iter().filter(|(_, differs)| *differs);
    differs.map(|(key, _)| key).collect()
}

/// For people, in one line.
impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ports: Vec<_> = self.ports.iter().map(u16::to_string).collect();
        write!(f, "leads {} away", ports.join(", "))?;
        if !self.at_restart.is_empty() {
            let keys = self.at_restart.join(", ");
            write!(f, "; waits for the next start: {keys}")?;
        }
        Ok(())
    }
}
