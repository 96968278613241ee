//! Servers of a gateway beside its listeners for clients: the tunnel port, the admin listeners, DNS, and the redirection rules.

use super::reload::Reloadable;
use crate::{
    control::{
        admin,
        api_cache::leaders::LeaderAssigner,
        dns, http,
        nat::{self, Nat},
        rebalance::Rebalancer,
        tunnel_listener::TunnelListener,
    },
    metrics::Metrics,
};
use axum::Router;
use causeway_certs::Store;
use causeway_rt::{
    listener::{self, BoundSocket},
    task::TaskGroup,
};
use futures_util::future::OptionFuture;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tracing::info_span;

/// Tokens by which the parts of a running gateway end.
#[derive(Clone, Debug)]
pub(super) struct EndTokens {
    /// Cancelled when no tunnels are accepted any more.
    pub(super) accept: CancellationToken,
    /// Cancelled when the drain time begins.
    pub(super) drain: CancellationToken,
    /// Cancelled when no edge is being enrolled any more.
    pub(super) enrolment_ended: CancellationToken,
    /// Cancelled when no commands are accepted any more. Cancelled with `close`.
    pub(super) admin: CancellationToken,
    /// Cancelled when DNS and redirection have to end. Cancelled with `close`.
    pub(super) names: CancellationToken,
    /// Cancelled when everything has to end.
    pub(super) close: CancellationToken,
}

impl Default for EndTokens {
    fn default() -> Self {
        let close = CancellationToken::new();
        Self {
            accept: CancellationToken::new(),
            drain: CancellationToken::new(),
            enrolment_ended: CancellationToken::new(),
            admin: close.child_token(),
            names: close.child_token(),
            close,
        }
    }
}

/// Servers beside the listeners for clients, whose sockets are bound.
#[derive(Debug)]
pub(super) struct ControlServers {
    pub(super) tunnel_listener: TunnelListener,
    pub(super) tunnel_socket: listener::BoundSocket,
    pub(super) admin: AdminListeners,
    pub(super) admin_state: admin::AdminState,
    pub(super) dns: Option<dns::BoundSockets>,
    pub(super) nat: Option<Nat>,
}

/// Listeners of the section `admin`.
#[derive(Debug)]
pub(super) struct AdminListeners {
    pub(super) admin: listener::BoundSocket,
    /// Listener for scrapers on other hosts, which serves only metrics.
    pub(super) metrics: Option<listener::BoundSocket>,
}

impl ControlServers {
    /// Returns the takeover of redirections from another process, if there is one.
    pub(super) fn redirect_takeover(&self) -> Option<nat::Takeover> {
        self.nat.as_ref()?.takeover()
    }

    /// Starts the servers.
    pub(super) fn spawn(
        self,
        parts: &Reloadable,
        store: &Store,
        (tasks, runtime): (&TaskGroup, &Handle),
        tokens: &EndTokens,
    ) {
        let control = self.tunnel_listener.workers.control().clone();
        spawn_edge_tasks((&self.tunnel_listener, parts), (tasks, &control), tokens);
        let admission = self.tunnel_listener.run(
            self.tunnel_socket,
            (tokens.accept.clone(), tokens.drain.clone()),
            tokens.enrolment_ended.clone(),
        );
        tasks.spawn_on(runtime, info_span!("admission"), admission);
        let stop = http::Stop {
            end_announced: tokens.accept.clone(),
            end: tokens.admin.clone(),
        };
        // Its connections do not count against the limit of the admin listener.
        let admin = (self.admin, admin_socket(store));
        let metrics = parts.shared.metrics.clone();
        let admin = serve_admin(admin, self.admin_state, metrics, stop);
        tasks.spawn_on(&control, info_span!("admin"), admin);
        if let Some(bound) = self.dns {
            if let Some(address) = bound.local_addr() {
                tracing::info!(%address, "answering DNS queries for node names");
            }
            let answering = dns::run(bound, parts.names.clone(), tokens.names.clone());
            tasks.spawn_on(runtime, info_span!("dns"), answering);
        }
        if let Some(nat) = self.nat {
            let redirecting = nat.run(tokens.names.clone());
            tasks.spawn_on(runtime, info_span!("redirect"), redirecting);
        }
    }
}

/// Starts the tasks that send messages to some edges until no tunnels are accepted any more.
fn spawn_edge_tasks(
    (tunnel_listener, parts): (&TunnelListener, &Reloadable),
    (tasks, runtime): (&TaskGroup, &Handle),
    tokens: &EndTokens,
) {
    let (registry, stop) = (&tunnel_listener.registry, &tokens.accept);
    if let Some(api_cache) = &tunnel_listener.api_cache {
        let nodes = &parts.authority.node_sync.nodes;
        let has_peers = tunnel_listener.peer_streams.is_some();
        let instance = has_peers.then(|| tunnel_listener.instance.clone());
        let leaders = LeaderAssigner::new(api_cache, (registry, instance), nodes);
        let leaders = leaders.run(stop.clone(), tokens.close.clone());
        tasks.spawn_on(runtime, info_span!("leaders"), leaders);
    }
    if tunnel_listener.peer_streams.is_some() {
        let rebalancer = Rebalancer::new(registry.clone());
        let rebalancing = rebalancer.run(stop.clone());
        tasks.spawn_on(runtime, info_span!("rebalance"), rebalancing);
    }
    if let Some(heartbeats) = tunnel_listener.heartbeats.clone() {
        let nonces = heartbeats.run(registry.clone(), stop.clone());
        tasks.spawn_on(runtime, info_span!("heartbeats"), nonces);
    }
}

/// Serves the admin listener, the metrics listener, and the socket for commands if there is one. Each has its own connection
/// limit.
async fn serve_admin(
    (listeners, socket): (AdminListeners, Option<listener::BoundSocket>),
    state: admin::AdminState,
    metrics: Arc<Metrics>,
    stop: http::Stop,
) {
    let (admin_router, metrics_router) =
        (admin::router(state.clone()), admin::metrics_router(state));
    let serve = |name, bound, router: &Router| {
        let limit = metrics.connection_limit(name, http::MAX_CONNECTIONS);
        http::run(bound, router.clone(), limit, stop.clone())
    };
    let socket = socket.map(|socket| serve("admin_socket_connections", socket, &admin_router));
    let metrics_server = listeners
        .metrics
        .map(|bound| serve("metrics_connections", bound, &metrics_router));
    tokio::join!(
        serve("admin_connections", listeners.admin, &admin_router),
        OptionFuture::from(socket),
        OptionFuture::from(metrics_server),
    );
}

/// Binds the socket for commands. This process holds the lock of the directory, so an existing socket belongs to a dead process.
fn admin_socket(store: &Store) -> Option<BoundSocket> {
    let bound = BoundSocket::unix_replacing(&store.admin_socket());
    bound
        .inspect_err(|error| {
            tracing::warn!(%error, "the Unix socket for commands is not available: commands use the admin listener");
        })
        .ok()
}
