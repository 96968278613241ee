//! API cache as a part of an edge. Its listeners are bound with the admin listener, and it starts with the tunnels. When the
//! tunnels have ended, it saves its objects on the disk.

use super::{SUCCESSOR_CHECK_INTERVAL, error::Error, reload::Reloadable};
use crate::{
    config::Config,
    control::{
        api_cache::{self, ApiCacheConfig, ApiCacheContext, FinalSave},
        heartbeat::{HeartbeatRelay, HeartbeatSender},
        identity_store::IdentityStore,
        tunnels::context::TunnelContext,
    },
    metrics::Metrics,
    status::StatusReader,
};
use causeway_rt::listener;
use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::info_span;

/// Time for which binding is retried while an address is in use.
const BIND_TIMEOUT: Duration = Duration::from_secs(2);

/// Listeners of the API cache for this node's programs, pool members and `YurtHub`s.
pub(super) struct ApiCacheListeners {
    pub(super) local: TcpListener,
    pub(super) members: Option<TcpListener>,
    pub(super) yurthub: Option<TcpListener>,
}

impl ApiCacheListeners {
    /// Binds the listeners, if the API cache is configured.
    pub(super) fn bind(config: &Config) -> Result<Option<Self>, Error> {
        let Some(api_cache) = &config.api_cache else {
            return Ok(None);
        };
        let (members, yurthub) = (api_cache.members.as_ref(), api_cache.yurthub.as_ref());
        Ok(Some(Self {
            local: bind(api_cache.listen, "api_cache.listen")?,
            members: members
                .map(|site| bind(site.listen, "api_cache.members.listen"))
                .transpose()?,
            yurthub: yurthub
                .map(|hubs| bind(hubs.listen, "api_cache.yurthub.listen"))
                .transpose()?,
        }))
    }

    /// Returns the address of the listener for this node's programs.
    pub(super) fn local_addr(&self) -> Option<SocketAddr> {
        self.local.local_addr().ok()
    }

    /// Returns the address of the listener for pool members.
    pub(super) fn members_addr(&self) -> Option<SocketAddr> {
        self.members.as_ref()?.local_addr().ok()
    }

    /// Returns the address of the listener for `YurtHub`s.
    pub(super) fn yurthub_addr(&self) -> Option<SocketAddr> {
        self.yurthub.as_ref()?.local_addr().ok()
    }
}

/// Returns the ports of the listeners without authentication. A range in the gateway's list opens none of them.
pub(super) fn own_ports(admin: SocketAddr, listeners: Option<&ApiCacheListeners>) -> Vec<u16> {
    let endpoint = listeners.and_then(ApiCacheListeners::local_addr);
    let all = [Some(admin), endpoint].into_iter().flatten();
    all.map(|address| address.port()).collect()
}

/// Builds the API cache of this node, if it is configured.
pub(super) fn from_config(
    (config, parts): (&Config, &Reloadable),
    identity_store: &IdentityStore,
    listeners: Option<ApiCacheListeners>,
) -> Result<Option<ApiCacheConfig>, Error> {
    let (Some(cache_config), Some(listeners)) = (&config.api_cache, listeners) else {
        return Ok(None);
    };
    let to_bind_error = bind_error(cache_config.listen, "api_cache.listen");
    let ApiCacheListeners {
        local,
        members,
        yurthub,
    } = listeners;
    let listeners = api_cache::ApiCacheListeners {
        local: (
            local,
            cache_config
                .tls
                .is_some()
                .then(|| parts.endpoint_tls.subscribe()),
        ),
        members,
        yurthub: yurthub.map(|listener| (listener, parts.yurthub_tls.subscribe())),
    };
    let cache = ApiCacheConfig::new((cache_config, &config.data_dir), identity_store, listeners);
    cache.map(Some).map_err(to_bind_error)
}

/// Starts the API cache, if it is configured.
pub(super) fn start(
    cache: Option<ApiCacheConfig>,
    (context, parts): (&Arc<TunnelContext>, &Reloadable),
    (status, close_listeners): (&StatusReader, &CancellationToken),
) -> Option<FinalSave> {
    let api_cache = cache?;
    if let Some(sender) = heartbeat_sender(&api_cache, (context, parts), status) {
        parts.tasks.spawn(info_span!("heartbeat"), async move {
            sender.run().await;
        });
    }
    let relay = context.heartbeats.as_ref();
    let run_context = ApiCacheContext {
        context: context.clone(),
        status,
        tasks: &parts.tasks,
        member_routes: relay.map(HeartbeatRelay::routes).unwrap_or_default(),
        close_listeners: close_listeners.clone(),
    };
    Some(api_cache.start(run_context))
}

/// Returns the relay of heartbeats of other pool members, if heartbeats are configured.
pub(super) fn heartbeat_relay(config: &Config, metrics: &Arc<Metrics>) -> Option<HeartbeatRelay> {
    let enabled = config.heartbeat.is_some() && config.api_cache.is_some();
    enabled.then(|| HeartbeatRelay::new(metrics))
}

/// Returns the sender of this node's heartbeats, if they are configured.
fn heartbeat_sender(
    api_cache: &ApiCacheConfig,
    (context, parts): (&Arc<TunnelContext>, &Reloadable),
    status: &StatusReader,
) -> Option<HeartbeatSender> {
    Some(HeartbeatSender {
        config: context.config.heartbeat.clone()?,
        identity: context.identity_store.clone(),
        peers: api_cache.peers(&context.node, &parts.tasks),
        tunnel_count: status.open_tunnels(),
        metrics: context.metrics.clone(),
        status: context.status.clone(),
    })
}

/// Saves the cached objects on the disk.
pub(super) async fn shutdown(final_save: Option<FinalSave>) {
    if let Some(final_save) = final_save {
        final_save.end().await;
    }
}

/// Binds all listeners. While an address is in use, retries for a moment, because an earlier process may be about to close
/// its listeners.
pub(super) async fn bind_all(
    config: &Config,
) -> Result<(TcpListener, Option<ApiCacheListeners>), Error> {
    let bind_once = || {
        let admin = bind(config.admin.listen, "admin.listen")?;
        Ok((admin, ApiCacheListeners::bind(config)?))
    };
    let deadline = Instant::now() + BIND_TIMEOUT;
    loop {
        match bind_once() {
            Err(Error::Bind { source, .. })
                if source.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline =>
            {
                sleep(SUCCESSOR_CHECK_INTERVAL).await;
            }
            bound => return bound,
        }
    }
}

/// Binds a listener for the configuration key `key`.
pub(super) fn bind(address: SocketAddr, key: &'static str) -> Result<TcpListener, Error> {
    let to_bind_error = bind_error(address, key);
    match listener::BoundSocket::tcp(address) {
        Ok(listener::BoundSocket::Tcp(listener)) => Ok(listener),
        Ok(listener::BoundSocket::Unix(..)) => {
            Err(to_bind_error(io::ErrorKind::Unsupported.into()))
        }
        Err(source) => Err(to_bind_error(source)),
    }
}

/// Returns a function that converts an I/O error into the error of this address.
pub(super) fn bind_error(
    address: SocketAddr,
    key: &'static str,
) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Bind {
        address,
        key,
        source,
    }
}
