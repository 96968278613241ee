//! API cache as a part of an edge: its listeners are bound with the admin listener, it begins with the tunnels, and when
//! these are gone it saves its objects on the disk.

use super::{LOOK, error::Error, reload::Reloadable};
use crate::{
    config::Config,
    control::{
        api_cache::{self, ApiCacheConfig, ApiCacheContext, FinalSave},
        identity_store::IdentityStore,
        tunnels::context::TunnelContext,
    },
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

/// How long addresses that are in use are asked for.
const GIVEN_UP: Duration = Duration::from_secs(2);

/// Listeners of the API cache for this node's programs, pool members and `YurtHub`s.
pub(super) struct ApiCacheListeners {
    pub(super) endpoint: TcpListener,
    pub(super) site: Option<TcpListener>,
    pub(super) hubs: Option<TcpListener>,
}

impl ApiCacheListeners {
    /// Takes what is configured, if anything is.
    pub(super) fn bind(config: &Config) -> Result<Option<Self>, Error> {
        let Some(api_cache) = &config.api_cache else {
            return Ok(None);
        };
        let (site, hubs) = (api_cache.members.as_ref(), api_cache.yurthub.as_ref());
        Ok(Some(Self {
            endpoint: bind(api_cache.listen, "api_cache.listen")?,
            site: site
                .map(|site| bind(site.listen, "api_cache.members.listen"))
                .transpose()?,
            hubs: hubs
                .map(|hubs| bind(hubs.listen, "api_cache.yurthub.listen"))
                .transpose()?,
        }))
    }

    /// Returns the address of the endpoint's listener.
    pub(super) fn endpoint(&self) -> Option<SocketAddr> {
        self.endpoint.local_addr().ok()
    }

    /// Returns the address of the site's listener.
    pub(super) fn site(&self) -> Option<SocketAddr> {
        self.site.as_ref()?.local_addr().ok()
    }

    /// Returns the address of the listener for `YurtHub`s.
    pub(super) fn hubs(&self) -> Option<SocketAddr> {
        self.hubs.as_ref()?.local_addr().ok()
    }
}

/// Returns the ports of listeners that have no authentication: the gateway's list opens none of them by a range.
pub(super) fn own_ports(admin: SocketAddr, reading: Option<&ApiCacheListeners>) -> Vec<u16> {
    let endpoint = reading.and_then(ApiCacheListeners::endpoint);
    let all = [Some(admin), endpoint].into_iter().flatten();
    all.map(|address| address.port()).collect()
}

/// Builds the API cache of this node, if it is configured.
pub(super) fn from_config(
    (config, parts): (&Config, &Reloadable),
    held: &IdentityStore,
    listeners: Option<ApiCacheListeners>,
) -> Result<Option<ApiCacheConfig>, Error> {
    let (Some(rules), Some(listeners)) = (&config.api_cache, listeners) else {
        return Ok(None);
    };
    let fault = fault(rules.listen, "api_cache.listen");
    let ApiCacheListeners {
        endpoint,
        site,
        hubs,
    } = listeners;
    let listeners = api_cache::ApiCacheListeners {
        endpoint: (
            endpoint,
            rules.tls.is_some().then(|| parts.shown.subscribe()),
        ),
        site,
        hubs: hubs.map(|listener| (listener, parts.hubs.subscribe())),
    };
    let reading = ApiCacheConfig::new((rules, &config.data_dir), held, listeners);
    reading.map(Some).map_err(fault)
}

/// Begins to read.
pub(super) fn start(
    reading: Option<ApiCacheConfig>,
    (links, parts): (&Arc<TunnelContext>, &Reloadable),
    (state, done): (&StatusReader, &CancellationToken),
) -> Option<FinalSave> {
    let with = ApiCacheContext {
        links: links.clone(),
        state,
        tasks: &parts.tasks,
        done: done.clone(),
    };
    Some(reading?.begin(with))
}

/// Leaves on the disk what is known.
pub(super) async fn shutdown(last: Option<FinalSave>) {
    if let Some(last) = last {
        last.end().await;
    }
}

/// Takes the addresses of all listeners. Those that are in use are asked for again for a moment: a process before this one may
/// be about to give them up.
pub(super) async fn bind_all(
    config: &Config,
) -> Result<(TcpListener, Option<ApiCacheListeners>), Error> {
    let bind_once = || {
        let admin = bind(config.admin.listen, "admin.listen")?;
        Ok((admin, ApiCacheListeners::bind(config)?))
    };
    let deadline = Instant::now() + GIVEN_UP;
    loop {
        match bind_once() {
            Err(Error::Bind { source, .. })
                if source.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline =>
            {
                sleep(LOOK).await;
            }
            bound => return bound,
        }
    }
}

/// Takes an address.
pub(super) fn bind(address: SocketAddr, key: &'static str) -> Result<TcpListener, Error> {
    let fault = fault(address, key);
    match listener::BoundSocket::tcp(address) {
        Ok(listener::BoundSocket::Tcp(listener)) => Ok(listener),
        Ok(listener::BoundSocket::Unix(..)) => Err(fault(io::ErrorKind::Unsupported.into())),
        Err(source) => Err(fault(source)),
    }
}

/// Why an address cannot be had.
pub(super) fn fault(address: SocketAddr, key: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Bind {
        address,
        key,
        source,
    }
}
