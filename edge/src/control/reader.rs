//! Reading at the edge: what the cluster has of some resources, kept here and served on, with the cloud or without.
//!
//! 1. what was read before is there at the start (`keep`), and the endpoint serves it (`endpoint`);
//! 2. a gateway tells with whom this node reads, and who leads (`told`);
//! 3. who is read from follows from that and from who answers (`source`, `choose`): a gateway, the leader, or another neighbour;
//! 4. each store is kept filled from there (`hold`), and served to neighbours (`site`) and to `YurtHub`s (`hubs`), who come in by a `door`,
//!    as to this node's own programs;
//! 5. `report` says how it goes.
//!
//! Nothing here waits for a tunnel or is in a stream's way, and without `reader` in the configuration none of it runs.

mod choose;
mod door;
mod endpoint;
mod gateway;
mod hold;
mod hubs;
mod keep;
mod line;
mod neighbour;
mod report;
mod share;
mod site;
mod source;
mod told;

use super::{held::Held, link::Links, listen};
use crate::{config, metrics::Metrics, state};
use causeway_certs::verify::{Hubs, Shown};
use causeway_pool::{Limits, Pool, Resource};
use causeway_tunnel::{backoff::Backoff, task::Tasks};
use choose::{At, Chooser};
use door::Door;
use endpoint::Endpoint;
use futures_util::future::{BoxFuture, select_all};
use gateway::Gateway;
use keep::Keep;
use report::Report;
use site::{Neighbours, Tls};
use std::{io, sync::Arc};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};
use tokio_util::sync::CancellationToken;
pub(crate) use told::{Told, Voice};
use tracing::{Span, info, info_span};

/// What a node reads with, before it does.
pub(crate) struct Reading {
    config: config::Reader,
    pool: Arc<Pool>,
    told: Told,
    keep: Keep,
    tls: Tls,
    endpoint: Endpoint,
    site: Option<TcpListener>,
    hubs: Option<(TcpListener, watch::Receiver<Option<Hubs>>)>,
}

/// Where is listened.
pub(crate) struct Listeners {
    /// For this node's own programs, with what they are shown if they read over TLS.
    pub(crate) endpoint: (
        std::net::TcpListener,
        Option<watch::Receiver<Option<Shown>>>,
    ),
    /// For its neighbours.
    pub(crate) site: Option<std::net::TcpListener>,
    /// For hubs, with whom of them to let in.
    pub(crate) hubs: Option<(std::net::TcpListener, watch::Receiver<Option<Hubs>>)>,
}

/// What is to be done when a node that reads ends.
pub(crate) struct Last(Keep);

/// Who is read from, and how many tunnels stand.
type Heard = (watch::Receiver<Arc<At>>, watch::Receiver<usize>);

/// What it runs with, and until when.
pub(crate) struct With<'a> {
    pub(crate) links: Arc<Links>,
    pub(crate) state: &'a state::Reader,
    pub(crate) tasks: &'a Arc<Tasks>,
    /// Ends its listeners, with whatever is open there.
    pub(crate) done: CancellationToken,
}

impl Reading {
    /// Of what `config` names, by these listeners.
    ///
    /// # Errors
    /// If the runtime cannot take the listeners.
    pub(crate) fn new(
        (config, data_dir): (&config::Reader, &std::path::Path),
        held: &Held,
        listeners: Listeners,
    ) -> io::Result<Self> {
        let mut resources: Vec<Resource> = Vec::new();
        // What does not read is a fault of the configuration.
        for resource in config.resources.iter().filter_map(|text| text.parse().ok()) {
            if !resources.contains(&resource) {
                resources.push(resource);
            }
        }
        let bytes = |size: usize| u64::try_from(size).unwrap_or(u64::MAX);
        let limits = Limits {
            cache: bytes(config.cache),
            window: config.window,
        };
        let pool = Pool::new(&resources, &limits);
        let told = Told::load(held.store());
        let saved = (data_dir.join("pool"), bytes(config.save));
        let known = (told.clone(), held.store().clone());
        Ok(Self {
            keep: Keep::new(pool.clone(), saved, known),
            tls: Tls::new(held.clone(), told.clone()),
            endpoint: Endpoint {
                listener: TcpListener::from_std(listeners.endpoint.0)?,
                shown: listeners.endpoint.1,
            },
            site: listeners.site.map(TcpListener::from_std).transpose()?,
            hubs: listeners
                .hubs
                .map(|(listener, known)| TcpListener::from_std(listener).map(|tcp| (tcp, known)))
                .transpose()?,
            config: config.clone(),
            pool,
            told,
        })
    }

    /// What hears with whom this node reads.
    pub(crate) fn hears(&self) -> Told {
        self.told.clone()
    }

    /// Reads and serves, in tasks, until what it runs with ends.
    pub(crate) fn begin(self, with: With<'_>) -> Last {
        let last = Last(self.keep.clone());
        let With {
            links,
            state,
            tasks,
            done,
        } = with;
        let gateway = Arc::new(Gateway::new(links.clone(), tasks.clone()));
        let (at, chosen) = watch::channel(At::nobody());
        let (tell, fallen) = mpsc::channel(16);
        let report = Report {
            own: links.node.clone(),
            pool: self.pool.clone(),
            told: self.told.clone(),
            at: chosen.clone(),
            gateway: Arc::downgrade(&gateway),
        };
        state.reads(report.clone().status());
        let chooser = Chooser {
            own: links.node.clone(),
            pool: self.pool.clone(),
            told: self.told.clone(),
            tls: self.tls.clone(),
            tasks: tasks.clone(),
            gateway,
            standing: state.standing(),
            at,
            fallen,
            metrics: links.metrics.clone(),
        };
        let metrics = links.metrics.clone();
        let bounds = &links.config.backoff;
        let backoff = Backoff::new(bounds.silent_max, bounds.refused_max);
        let stores = self.pool.stores().iter().cloned();
        let holds = stores.map(|store| -> BoxFuture<'static, ()> {
            Box::pin(hold::run(store, chosen.clone(), tell.clone(), backoff))
        });
        let mut parts: Vec<BoxFuture<'static, ()>> = holds.collect();
        parts.push(Box::pin(hold::release(self.pool.clone(), chosen.clone())));
        parts.push(Box::pin(chooser.run()));
        parts.push(Box::pin(report.run()));
        let heard = (chosen.clone(), state.standing());
        let spawn = (tasks.clone(), links.node.clone(), heard);
        let ends = (links.stop.clone(), done);
        tasks.spawn(
            info_span!("reader"),
            Box::pin(self.run(parts, spawn, metrics, ends)) as BoxFuture<'static, ()>,
        );
        last
    }

    async fn run(
        self,
        parts: Vec<BoxFuture<'static, ()>>,
        (tasks, node, (at, standing)): (Arc<Tasks>, String, Heard),
        metrics: Arc<Metrics>,
        (stop, done): (CancellationToken, CancellationToken),
    ) {
        let Self {
            config,
            pool,
            keep,
            tls,
            endpoint,
            site,
            hubs,
            ..
        } = self;
        // Nobody is answered before what is known is there.
        keep.load().await;
        if let Ok(address) = endpoint.listener.local_addr() {
            let tls = endpoint.shown.is_some();
            info!(%address, tls, resources = ?config.resources, "programs on this node can read");
        }
        let closing = |router| listen::announcing_close(router, stop.clone());
        let router = closing(endpoint::serving(pool.clone(), None, None));
        let mut parts = parts;
        if let Some(listener) = site {
            let router = closing(endpoint::serving(pool.clone(), Some(at.clone()), None));
            let at = at.clone();
            let door = Door {
                listener,
                host: Arc::new(Neighbours { tls, at }),
                guests: "neighbour",
                metrics: metrics.clone(),
                most: site::most(config.resources.len()),
                each: site::each(config.resources.len()),
            };
            parts.push(Box::pin(door.run(router, done.clone())));
        }
        if let Some((listener, known)) = hubs {
            let touch = hubs::Touch { at, standing };
            let router = closing(hubs::serving(pool, config.of_hubs(), touch.clone()));
            let door = Door {
                listener,
                host: Arc::new(hubs::Guests { known, touch }),
                guests: "hub",
                metrics: metrics.clone(),
                most: hubs::MOST,
                each: hubs::EACH,
            };
            parts.push(Box::pin(door.run(router, done.clone())));
        }
        parts.push(Box::pin(endpoint.run((router, node), metrics, done)));
        parts.push(Box::pin(keep.run(config.save_every)));
        for part in parts {
            tasks.spawn(Span::current(), part);
        }
    }
}

impl Last {
    /// Leaves on the disk what is known.
    pub(crate) async fn end(self) {
        self.0.end().await;
    }
}

/// Waits until one of these stores is another, or has lost or found its source.
async fn any(changes: &mut [watch::Receiver<u64>]) {
    if changes.is_empty() {
        return std::future::pending().await;
    }
    // A store is there as long as whoever waits for it.
    let _ = select_all(changes.iter_mut().map(|one| Box::pin(one.changed()))).await;
}

#[cfg(test)]
mod tests;
