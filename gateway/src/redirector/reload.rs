//! Another configuration for a redirector that runs: whoever comes from then on is passed on by it.
//!
//! Connections that are open stay with the gateways that took them. What cannot change while it runs is named, and takes
//! effect at the next start.

use super::{Config, Gateways, Passing};
use crate::{
    control::nat::Ports,
    state::{Nodes, nodes::Named},
};
use std::{collections::BTreeMap, fmt, net::SocketAddr, sync::Arc};
use tokio::sync::watch;

/// Who takes what is led away.
#[derive(Debug, Default)]
pub(super) struct Takers {
    /// Of each node port.
    ports: BTreeMap<u16, Arc<Gateways>>,
    /// Of pods.
    pods: Option<Arc<Gateways>>,
}

impl Takers {
    /// The gateways of this configuration. Those who are as they were `before` go on, with what they know.
    pub(super) fn of(config: &Config, before: &Self) -> Self {
        let taker = |all: &Vec<String>, before: Option<&Arc<Gateways>>| {
            let same = before.filter(|gateways| gateways.are(all));
            same.cloned()
                .unwrap_or_else(|| Arc::new(Gateways::new(all.clone())))
        };
        let ports = config.ports.iter();
        let pods = Some(&config.pods).filter(|all| !all.is_empty());
        Self {
            ports: ports
                .map(|(port, all)| (*port, taker(all, before.ports.get(port))))
                .collect(),
            pods: pods.map(|all| taker(all, before.pods.as_ref())),
        }
    }

    /// Those for this destination, if it is led away.
    pub(super) fn for_destination(&self, to: SocketAddr, nodes: &Nodes) -> Option<Arc<Gateways>> {
        let pods = self.pods.as_ref();
        let pods = pods.filter(|_| matches!(nodes.by_address(to.ip()), Named::Pod(_)));
        pods.or_else(|| self.ports.get(&to.port())).cloned()
    }
}

/// What the kernel leads to a listener at this address.
pub(super) fn led(config: &Config, to: SocketAddr) -> Ports {
    Ports::all_to(to, config.ports.keys().copied(), !config.pods.is_empty())
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
    /// Pods are as well.
    pub pods: bool,
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
        let next = Takers::of(config, &passing.takers.load());
        passing.takers.store(Arc::new(next));
        // Behind the gateways, so that nobody is led here for whom there are none.
        led.send_replace(self::led(config, *listens));
        passing.metrics.reloaded(true);
        Changed {
            ports: config.ports.keys().copied().collect(),
            pods: !config.pods.is_empty(),
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
        let ports = self.ports.iter().map(u16::to_string);
        let pods = self.pods.then(|| "pods".to_owned());
        let led: Vec<_> = ports.chain(pods).collect();
        write!(f, "leads {} away", led.join(", "))?;
        if !self.at_restart.is_empty() {
            let keys = self.at_restart.join(", ");
            write!(f, "; waits for the next start: {keys}")?;
        }
        Ok(())
    }
}
