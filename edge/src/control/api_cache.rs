//! API cache: the cluster's objects of some resources, cached at the edge and served with or without the cloud.
//!
//! 1. The objects of the last run are loaded at the start (`disk`), and the local listener serves them (`local_server`).
//! 2. A gateway announces the members of this node's pool, and the leader (`membership`).
//! 3. The source is chosen from these and from the sources that answer (`source_policy`, `source_selector`). It is a gateway,
//!    the leader, or another member.
//! 4. Each store is filled from the source (`sync`). The stores are served to this node's own programs, to members
//!    (`member_server`) and to `YurtHub`s (`yurthub_server`). The last two connect through a `tls_acceptor`.
//! 5. `status` reports the state.
//!
//! Nothing here waits for a tunnel or is in the data path of a stream. The cache does not run if the configuration has no
//! `api_cache`.

mod disk;
mod gateway_source;
mod list_watch_http;
mod local_server;
mod member_server;
pub(crate) mod member_source;
pub(crate) mod membership;
mod selected_source;
mod source_policy;
mod source_selector;
mod status;
mod sync;
mod tls_acceptor;
mod yurthub_server;

use super::{http_server, identity_store::IdentityStore, tunnels::context::TunnelContext};
use crate::{config, metrics::Metrics, status::StatusReader};
use axum::Router;
use causeway_certs::verify::{ServerOnlyTls, YurtHubServerTls};
use causeway_rt::{backoff::Backoff, task::TaskGroup};
use causeway_watch_cache::{CacheLimits, GroupVersionResource, WatchCache};
use disk::DiskWriter;
use futures_util::future::BoxFuture;
use gateway_source::GatewaySource;
use local_server::LocalServer;
use member_server::{MemberClients, MemberTls};
use member_source::MemberPeers;
use membership::Membership;
use selected_source::SelectedSource;
use source_selector::SourceSelector;
use status::StatusReporter;
use std::{io, sync::Arc};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};
use tokio_util::sync::CancellationToken;
use tracing::{Span, info, info_span};

/// API cache of a node, built and not yet running.
pub(crate) struct ApiCacheConfig {
    config: config::ApiCache,
    cache: Arc<WatchCache>,
    membership: Membership,
    disk_writer: DiskWriter,
    member_tls: MemberTls,
    local: LocalServer,
    member_listener: Option<TcpListener>,
    yurthub_listener: Option<(TcpListener, watch::Receiver<Option<YurtHubServerTls>>)>,
}

/// Sockets of the API cache's listeners.
pub(crate) struct ApiCacheListeners {
    /// Listener for this node's own programs, with its certificate if it uses TLS.
    pub(crate) local: (
        std::net::TcpListener,
        Option<watch::Receiver<Option<ServerOnlyTls>>>,
    ),
    /// Listener for the members of the pool.
    pub(crate) members: Option<std::net::TcpListener>,
    /// Listener for `YurtHub`s, with its certificate and the roots for the clients' certificates.
    pub(crate) yurthub: Option<(
        std::net::TcpListener,
        watch::Receiver<Option<YurtHubServerTls>>,
    )>,
}

/// Final save of the cache, for the end of the edge.
pub(crate) struct FinalSave(DiskWriter);

/// Watches of the selected source and of the number of open tunnels, and further routes for pool members.
type ServedWith = (
    watch::Receiver<Arc<SelectedSource>>,
    watch::Receiver<usize>,
    Router,
);

/// Context in which the cache runs, and the token that closes its listeners.
pub(crate) struct ApiCacheContext<'a> {
    pub(crate) context: Arc<TunnelContext>,
    pub(crate) status: &'a StatusReader,
    pub(crate) tasks: &'a Arc<TaskGroup>,
    /// Further routes of the listener for pool members.
    pub(crate) member_routes: Router,
    /// Token that closes the cache's listeners and all their connections.
    pub(crate) close_listeners: CancellationToken,
}

impl ApiCacheConfig {
    /// Builds the cache that `config` describes, with these listeners.
    ///
    /// # Errors
    /// If a listener cannot be registered with the runtime.
    pub(crate) fn new(
        (config, data_dir): (&config::ApiCache, &std::path::Path),
        identity_store: &IdentityStore,
        listeners: ApiCacheListeners,
    ) -> io::Result<Self> {
        let mut resources: Vec<GroupVersionResource> = Vec::new();
        // Validation of the configuration reports unparsable resources.
        for resource in config.resources.iter().filter_map(|text| text.parse().ok()) {
            if !resources.contains(&resource) {
                resources.push(resource);
            }
        }
        let to_u64 = |size: usize| u64::try_from(size).unwrap_or(u64::MAX);
        let limits = CacheLimits {
            response_bytes: to_u64(config.cache),
            event_buffer_bytes: config.event_buffer,
        };
        let cache = WatchCache::new(&resources, &limits);
        let membership = Membership::load(identity_store.store());
        let snapshots = (data_dir.join("pool"), to_u64(config.save));
        let membership_store = (membership.clone(), identity_store.store().clone());
        Ok(Self {
            disk_writer: DiskWriter::new(cache.clone(), snapshots, membership_store),
            member_tls: MemberTls::new(identity_store.clone(), membership.clone()),
            local: LocalServer {
                listener: TcpListener::from_std(listeners.local.0)?,
                certificate: listeners.local.1,
            },
            member_listener: listeners.members.map(TcpListener::from_std).transpose()?,
            yurthub_listener: listeners
                .yurthub
                .map(|(listener, tls)| TcpListener::from_std(listener).map(|tcp| (tcp, tls)))
                .transpose()?,
            config: config.clone(),
            cache,
            membership,
        })
    }

    /// Returns the membership that gateways update.
    pub(crate) fn membership(&self) -> Membership {
        self.membership.clone()
    }

    /// Returns connections to the other members, for this node.
    pub(crate) fn peers(&self, own: &str, tasks: &Arc<TaskGroup>) -> MemberPeers {
        MemberPeers::new(
            own,
            (self.membership.clone(), self.member_tls.clone()),
            tasks,
        )
    }

    /// Starts the tasks that fill and serve the cache. They run until `run_context` ends them.
    pub(crate) fn start(self, run_context: ApiCacheContext<'_>) -> FinalSave {
        let final_save = FinalSave(self.disk_writer.clone());
        let ApiCacheContext {
            context,
            status,
            tasks,
            member_routes,
            close_listeners,
        } = run_context;
        let gateway = Arc::new(GatewaySource::new(context.clone(), tasks.clone()));
        let (selected_tx, selected) = watch::channel(SelectedSource::unselected());
        let (lost_tx, lost_rx) = mpsc::channel(16);
        let reporter = StatusReporter {
            node: context.node.clone(),
            cache: self.cache.clone(),
            membership: self.membership.clone(),
            selected: selected.clone(),
            gateway: Arc::downgrade(&gateway),
        };
        status.set_api_cache_source(reporter.clone().status());
        let selector = SourceSelector {
            node: context.node.clone(),
            cache: self.cache.clone(),
            membership: self.membership.clone(),
            tls: self.member_tls.clone(),
            tasks: tasks.clone(),
            gateway_source: gateway,
            tunnel_count: status.open_tunnels(),
            selected: selected_tx,
            source_lost: lost_rx,
            metrics: context.metrics.clone(),
        };
        let metrics = context.metrics.clone();
        let backoff_config = &context.config.backoff;
        let backoff = Backoff::new(backoff_config.silent_max, backoff_config.refused_max);
        let stores = self.cache.stores().iter().cloned();
        let sync_tasks = stores.map(|store| -> BoxFuture<'static, ()> {
            Box::pin(sync::sync_store(
                store,
                selected.clone(),
                lost_tx.clone(),
                backoff,
            ))
        });
        let mut futures: Vec<BoxFuture<'static, ()>> = sync_tasks.collect();
        futures.push(Box::pin(sync::poll_version(
            self.cache.clone(),
            selected.clone(),
        )));
        futures.push(Box::pin(selector.run()));
        futures.push(Box::pin(reporter.run()));
        let served_with = (selected.clone(), status.open_tunnels(), member_routes);
        let spawn_context = (tasks.clone(), context.node.clone(), served_with);
        let stop_tokens = (context.stop.clone(), close_listeners);
        tasks.spawn(
            info_span!("api_cache"),
            Box::pin(self.run(futures, spawn_context, metrics, stop_tokens))
                as BoxFuture<'static, ()>,
        );
        final_save
    }

    async fn run(
        self,
        futures: Vec<BoxFuture<'static, ()>>,
        (tasks, node, (selected, tunnel_count, member_routes)): (
            Arc<TaskGroup>,
            String,
            ServedWith,
        ),
        metrics: Arc<Metrics>,
        (stop, close_listeners): (CancellationToken, CancellationToken),
    ) {
        let Self {
            config,
            cache,
            disk_writer,
            member_tls,
            local,
            member_listener,
            yurthub_listener,
            ..
        } = self;
        // Requests are served only after the saved data has been loaded.
        disk_writer.load().await;
        if let Ok(address) = local.listener.local_addr() {
            let tls = local.certificate.is_some();
            info!(%address, tls, resources = ?config.resources, "the API cache is ready for programs on this node");
        }
        let with_close = |router| http_server::with_connection_close(router, stop.clone());
        let router = with_close(local_server::cache_router(cache.clone(), None, None));
        let mut futures = futures;
        if let Some(listener) = member_listener {
            let cache_router =
                local_server::cache_router(cache.clone(), Some(selected.clone()), None);
            let router = with_close(member_routes.merge(cache_router));
            let clients = MemberClients {
                tls: member_tls,
                selected: selected.clone(),
            };
            let resource_count = config.resources.len();
            let acceptor = clients.into_acceptor(listener, resource_count, metrics.clone());
            futures.push(Box::pin(acceptor.run(router, close_listeners.clone())));
        }
        if let Some((listener, yurthub_tls)) = yurthub_listener {
            let health = yurthub_server::UpstreamHealth {
                selected,
                tunnel_count,
            };
            let router = with_close(yurthub_server::router(
                cache,
                config.yurthub_resources(),
                health.clone(),
            ));
            let clients = yurthub_server::YurtHubClients {
                tls: yurthub_tls,
                health,
            };
            let acceptor = clients.into_acceptor(listener, metrics.clone());
            futures.push(Box::pin(acceptor.run(router, close_listeners.clone())));
        }
        futures.push(Box::pin(local.run(
            (router, node),
            metrics,
            close_listeners,
        )));
        futures.push(Box::pin(disk_writer.run(config.save_every)));
        for future in futures {
            tasks.spawn(Span::current(), future);
        }
    }
}

impl FinalSave {
    /// Saves the cached objects on the disk.
    pub(crate) async fn end(self) {
        self.0.final_save().await;
    }
}

#[cfg(test)]
mod tests;
