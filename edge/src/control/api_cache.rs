//! API cache: the cluster's objects of some resources, cached at the edge and served with the cloud or without.
//!
//! 1. The objects of the last run are loaded at the start (`disk`), and the endpoint serves them (`local_server`).
//! 2. A gateway announces the members of this node's pool, and the leader (`membership`).
//! 3. The source follows from that and from the sources that answer (`source_policy`, `source_selector`): a gateway, the
//!    leader, or another member.
//! 4. Each store is filled from there (`sync`). It is served to members (`member_server`) and to `YurtHub`s
//!    (`yurthub_server`), which connect through a `tls_acceptor`, and to this node's own programs.
//! 5. `status` reports the state.
//!
//! Nothing here waits for a tunnel or is in the data path of a stream. Without `api_cache` in the configuration none of it
//! runs.

mod changes;
mod disk;
mod gateway_source;
mod list_watch_http;
mod local_server;
mod member_server;
mod member_source;
pub(crate) mod membership;
mod quota;
mod selected_source;
mod source_policy;
mod source_selector;
mod status;
mod sync;
mod tls_acceptor;
mod yurthub_server;

use super::{http_server, identity_store::IdentityStore, tunnels::context::TunnelContext};
use crate::{config, metrics::Metrics, status::StatusReader};
use causeway_certs::verify::{ServerOnlyTls, YurtHubServerTls};
use causeway_rt::{backoff::Backoff, task::TaskGroup};
use causeway_watch_cache::{CacheLimits, GroupVersionResource, WatchCache};
use disk::DiskWriter;
use futures_util::future::BoxFuture;
use gateway_source::GatewaySource;
use local_server::LocalServer;
use member_server::{MemberClients, MemberTls};
use membership::Membership;
use selected_source::SelectedSource;
use source_selector::SourceSelector;
use status::StatusReporter;
use std::{io, sync::Arc};
use tls_acceptor::QuotaAcceptor;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};
use tokio_util::sync::CancellationToken;
use tracing::{Span, info, info_span};

/// API cache of a node, built and not yet running.
pub(crate) struct ApiCacheConfig {
    config: config::ApiCache,
    pool: Arc<WatchCache>,
    told: Membership,
    keep: DiskWriter,
    tls: MemberTls,
    endpoint: LocalServer,
    site: Option<TcpListener>,
    hubs: Option<(TcpListener, watch::Receiver<Option<YurtHubServerTls>>)>,
}

/// Sockets of the API cache's listeners.
pub(crate) struct ApiCacheListeners {
    /// For this node's own programs, with what they are shown if they read over TLS.
    pub(crate) endpoint: (
        std::net::TcpListener,
        Option<watch::Receiver<Option<ServerOnlyTls>>>,
    ),
    /// Listener for the members of the pool.
    pub(crate) site: Option<std::net::TcpListener>,
    /// Listener for `YurtHub`s, with the certificates by which they are admitted.
    pub(crate) hubs: Option<(
        std::net::TcpListener,
        watch::Receiver<Option<YurtHubServerTls>>,
    )>,
}

/// Final save of the cache when a node that reads ends.
pub(crate) struct FinalSave(DiskWriter);

/// Watches of the selected source and of the number of tunnels that stand.
type SourceWatches = (watch::Receiver<Arc<SelectedSource>>, watch::Receiver<usize>);

/// Context that the cache runs in, and the token that ends it.
pub(crate) struct ApiCacheContext<'a> {
    pub(crate) links: Arc<TunnelContext>,
    pub(crate) state: &'a StatusReader,
    pub(crate) tasks: &'a Arc<TaskGroup>,
    /// Ends the cache's listeners, with all connections that are open there.
    pub(crate) done: CancellationToken,
}

impl ApiCacheConfig {
    /// Of what `config` names, by these listeners.
    ///
    /// # Errors
    /// If the runtime cannot take the listeners.
    pub(crate) fn new(
        (config, data_dir): (&config::ApiCache, &std::path::Path),
        held: &IdentityStore,
        listeners: ApiCacheListeners,
    ) -> io::Result<Self> {
        let mut resources: Vec<GroupVersionResource> = Vec::new();
        // Validation of the configuration reports unparsable resources.
        for resource in config.resources.iter().filter_map(|text| text.parse().ok()) {
            if !resources.contains(&resource) {
                resources.push(resource);
            }
        }
        let bytes = |size: usize| u64::try_from(size).unwrap_or(u64::MAX);
        let limits = CacheLimits {
            cache: bytes(config.cache),
            window: config.event_buffer,
        };
        let pool = WatchCache::new(&resources, &limits);
        let told = Membership::load(held.store());
        let saved = (data_dir.join("pool"), bytes(config.save));
        let known = (told.clone(), held.store().clone());
        Ok(Self {
            keep: DiskWriter::new(pool.clone(), saved, known),
            tls: MemberTls::new(held.clone(), told.clone()),
            endpoint: LocalServer {
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

    /// Returns the membership that gateways update.
    pub(crate) fn hears(&self) -> Membership {
        self.told.clone()
    }

    /// Reads and serves, in tasks, until what it runs with ends.
    pub(crate) fn begin(self, with: ApiCacheContext<'_>) -> FinalSave {
        let last = FinalSave(self.keep.clone());
        let ApiCacheContext {
            links,
            state,
            tasks,
            done,
        } = with;
        let gateway = Arc::new(GatewaySource::new(links.clone(), tasks.clone()));
        let (at, chosen) = watch::channel(SelectedSource::nobody());
        let (tell, fallen) = mpsc::channel(16);
        let report = StatusReporter {
            own: links.node.clone(),
            pool: self.pool.clone(),
            told: self.told.clone(),
            at: chosen.clone(),
            gateway: Arc::downgrade(&gateway),
        };
        state.reads(report.clone().status());
        let chooser = SourceSelector {
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
            Box::pin(sync::sync_store(
                store,
                chosen.clone(),
                tell.clone(),
                backoff,
            ))
        });
        let mut parts: Vec<BoxFuture<'static, ()>> = holds.collect();
        parts.push(Box::pin(sync::poll_version(
            self.pool.clone(),
            chosen.clone(),
        )));
        parts.push(Box::pin(chooser.run()));
        parts.push(Box::pin(report.run()));
        let heard = (chosen.clone(), state.standing());
        let spawn = (tasks.clone(), links.node.clone(), heard);
        let ends = (links.stop.clone(), done);
        tasks.spawn(
            info_span!("api_cache"),
            Box::pin(self.run(parts, spawn, metrics, ends)) as BoxFuture<'static, ()>,
        );
        last
    }

    async fn run(
        self,
        parts: Vec<BoxFuture<'static, ()>>,
        (tasks, node, (at, standing)): (Arc<TaskGroup>, String, SourceWatches),
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
        // Requests are served only after the saved data has been loaded.
        keep.load().await;
        if let Ok(address) = endpoint.listener.local_addr() {
            let tls = endpoint.shown.is_some();
            info!(%address, tls, resources = ?config.resources, "the API cache is ready for programs on this node");
        }
        let closing = |router| http_server::announcing_close(router, stop.clone());
        let router = closing(local_server::serve_options(pool.clone(), None, None));
        let mut parts = parts;
        if let Some(listener) = site {
            let router = closing(local_server::serve_options(
                pool.clone(),
                Some(at.clone()),
                None,
            ));
            let at = at.clone();
            let door = QuotaAcceptor {
                listener,
                host: Arc::new(MemberClients { tls, at }),
                guests: "neighbour",
                metrics: metrics.clone(),
                most: member_server::max_connections(config.resources.len()),
                each: member_server::max_per_member(config.resources.len()),
            };
            parts.push(Box::pin(door.run(router, done.clone())));
        }
        if let Some((listener, known)) = hubs {
            let touch = yurthub_server::UpstreamHealth { at, standing };
            let router = closing(yurthub_server::serving(
                pool,
                config.of_hubs(),
                touch.clone(),
            ));
            let door = QuotaAcceptor {
                listener,
                host: Arc::new(yurthub_server::YurtHubClients { known, touch }),
                guests: "hub",
                metrics: metrics.clone(),
                most: yurthub_server::MAX_CONNECTIONS,
                each: yurthub_server::MAX_PER_CLIENT,
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

impl FinalSave {
    /// Leaves on the disk what is known.
    pub(crate) async fn end(self) {
        self.0.end().await;
    }
}

#[cfg(test)]
mod tests;
