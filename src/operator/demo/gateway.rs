//! The demo's gateway, which SIGUSR1 stops and starts again, and the cluster objects that its edges read from it.
//!
//! The gateway restarts at the same addresses: edges dial the address that they know, and printed commands continue to work.

use crate::{
    operator::{admin_client, manifests},
    output::outln,
};
use anyhow::Context;
use causeway_certs::{Ca, OpenMode, Store, TrustDomain};
use causeway_gateway::{
    Bound, Config, Gateway,
    config::{AccessLog, ApiCache, ListenAddr, Listener, ListenerProtocol},
    server::BoundAddresses,
};
use hyper::StatusCode;
use serde_json::{Value, json};
use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    pin::pin,
    time::Duration,
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

/// The node port at which each app is reachable.
pub(super) const PORT: u16 = 9100;
/// Name of the client in the printed commands.
pub(super) const CLIENT_NAME: &str = "demo";
/// Maximum time for the start. Edges and their first requests take milliseconds, but more on a loaded machine.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum time for the drain. It is short, so that Ctrl-C seems immediate.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// Path of all `EndpointSlices`.
pub(super) const SLICES_PATH: &str = "/apis/discovery.k8s.io/v1/endpointslices";
/// Maximum number of attempts to bind a free address.
const MAX_BIND_ATTEMPTS: usize = 3;
/// Interval between two requests for the objects that an edge has read.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A gateway that is bound.
pub(super) struct DemoGateway {
    pub(super) addresses: BoundAddresses,
    pub(super) listener: SocketAddr,
    bound: Bound,
    /// Configuration with the addresses that were bound.
    config: Config,
    toggle_signal: Signal,
}

impl DemoGateway {
    /// Binds a gateway on free ports, and its listener for clients at `listen` if that is set.
    pub(super) fn bind(dir: &Path, listen: Option<SocketAddr>) -> anyhow::Result<Self> {
        let toggle_signal = signal(SignalKind::user_defined1())
            .context("cannot install the handler for SIGUSR1")?;
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let mut config = Config {
            data_dir: dir.to_owned(),
            api_cache: Some(ApiCache {
                manifests: Some(dir.join("objects")),
                ..ApiCache::default()
            }),
            ..Config::default()
        };
        config.tunnel.listen = loopback;
        config.admin.listen = loopback;
        config.timeouts.drain = DRAIN_TIMEOUT;
        config.access_log = AccessLog::None;
        write_objects(&dir.join("objects"))?;
        let bound = match listen {
            Some(listen) => bind_gateway(&with_listener(&config, listen))?,
            // Another demo may take this address first; enough others remain.
            None => (0..MAX_BIND_ATTEMPTS)
                .find_map(|_| bind_gateway(&with_listener(&config, find_free_address(PORT))).ok())
                .map_or_else(|| bind_gateway(&with_listener(&config, loopback)), Ok)?,
        };
        let addresses = bound.addresses();
        let listener = addresses.listener("https");
        let listener = listener.context("the https listener has an address")?;
        config.tunnel.listen = addresses.tunnel;
        config.admin.listen = addresses.admin;
        Ok(Self {
            config: with_listener(&config, listener),
            addresses,
            listener,
            bound,
            toggle_signal,
        })
    }

    /// Serves until `stop`, with an interruption while the gateway is switched off.
    pub(super) async fn run(self, stop: CancellationToken) -> anyhow::Result<()> {
        let Self {
            mut bound,
            config,
            toggle_signal: mut switch,
            ..
        } = self;
        loop {
            let run_stop = stop.child_token();
            let mut running = pin!(bound.run(run_stop.clone()));
            tokio::select! {
                _ = running.as_mut() => return Ok(()),
                _ = switch.recv() => {
                    run_stop.cancel();
                    running.await;
                }
            }
            // The demo continues if standard output is closed.
            let _ = outln!("\nthe gateway has stopped; send SIGUSR1 again to start it");
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                _ = switch.recv() => {}
            }
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                begun = rebind(&config) => bound = begun?,
            }
            let _ = outln!("the gateway is running again");
        }
    }
}

/// Returns the same configuration with its listener at this address.
fn with_listener(config: &Config, listener: SocketAddr) -> Config {
    let listener = Listener {
        port: Some(PORT),
        ..Listener::new("https", ListenerProtocol::Https, ListenAddr::Tcp(listener))
    };
    Config {
        listeners: vec![listener],
        ..config.clone()
    }
}

/// Returns a loopback address at which `port` is free, so that URLs can name the node's own port, or else any free port.
fn find_free_address(port: u16) -> SocketAddr {
    (1..=254)
        .map(|last| SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), port)))
        .find(|address| std::net::TcpListener::bind(address).is_ok())
        .unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
}

/// Binds like [`bind_gateway`], with retries for [`START_TIMEOUT`]. While the gateway was stopped, another process may have
/// taken a port for a connection of its own.
async fn rebind(config: &Config) -> anyhow::Result<Bound> {
    let deadline = Instant::now() + START_TIMEOUT;
    let mut is_logged = false;
    loop {
        match bind_gateway(config) {
            Err(error) if Instant::now() < deadline => {
                if !std::mem::replace(&mut is_logged, true) {
                    let _ = outln!("the gateway cannot start again yet: {error:#}");
                }
                sleep(POLL_INTERVAL).await;
            }
            bound => return bound,
        }
    }
}

/// Binds a gateway that serves the demo's objects.
fn bind_gateway(config: &Config) -> anyhow::Result<Bound> {
    let bound = Gateway::new(config.clone()).bind()?;
    let dir = config
        .api_cache
        .as_ref()
        .and_then(|api_cache| api_cache.manifests.as_ref());
    if let Some((dir, cache)) = dir.zip(bound.watch_cache()) {
        manifests::read_manifests(dir, cache)?.load();
    }
    Ok(bound)
}

/// Writes manifests of one Service with two slices and one Service with a single slice.
fn write_objects(dir: &Path) -> anyhow::Result<()> {
    let service = |name: &str, address: &str| {
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": name, "namespace": "demo" },
            "spec": { "clusterIP": address, "ports": [{ "port": PORT }] },
        })
    };
    let slice = |name: &str, service_name: &str, address: &str| {
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": { "name": name, "namespace": "demo", "labels": { "kubernetes.io/service-name": service_name } },
            "addressType": "IPv4",
            "endpoints": [{ "addresses": [address] }],
            "ports": [{ "port": PORT }],
        })
    };
    let items = [
        service("web", "10.96.0.10"),
        slice("web-1", "web", "10.244.1.10"),
        slice("web-2", "web", "10.244.2.10"),
        service("db", "10.96.0.11"),
        slice("db-1", "db", "10.244.1.11"),
    ];
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
    let file = dir.join("demo.json");
    fs::create_dir_all(dir)
        .and_then(|()| fs::write(&file, format!("{list:#}\n")))
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Returns the number of slices that the edge serves, once it has them.
pub(super) async fn count_slices(cache_address: SocketAddr) -> anyhow::Result<usize> {
    loop {
        let (status, body) =
            admin_client::get(&cache_address.to_string().into(), SLICES_PATH).await?;
        if status == StatusCode::OK {
            let list: Value = serde_json::from_slice(&body)?;
            return Ok(list["items"].as_array().map_or(0, Vec::len));
        }
        // The edge has not read them yet.
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Files in the data directory that the demo and its user need.
pub(super) struct DemoFiles {
    pub(super) dir: PathBuf,
    pub(super) store: Store,
    pub(super) root: PathBuf,
    /// Certificate and key of the client in one file, as curl's `--cert` takes them.
    pub(super) client: PathBuf,
}

impl DemoFiles {
    pub(super) fn create(dir: &Path) -> anyhow::Result<Self> {
        let store = Store::open(dir, OpenMode::Create)?;
        let ca = if let Some(ca) = store.ca()? {
            ca
        } else {
            let ca = Ca::create(&TrustDomain::parse("demo.causeway")?)?;
            store.save_ca(&ca)?;
            ca
        };
        let leaf = ca.issue_client(CLIENT_NAME, &[], Duration::from_hours(24))?;
        let (root, client) = (dir.join("demo-ca.pem"), dir.join("demo-client.pem"));
        write(&root, &ca.root_pem())?;
        write(
            &client,
            &format!("{}{}", leaf.chain_pem(), leaf.key_pem().expose()),
        )?;
        Ok(Self {
            dir: dir.to_owned(),
            store,
            root,
            client,
        })
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let written = options
        .open(path)
        .and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()));
    written.with_context(|| format!("cannot write {}", path.display()))
}
