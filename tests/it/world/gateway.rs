//! The gateway of a world: built, run, stopped, started again at the same addresses.
//!
//! On the test's own thread unless it asks for workers. The `https` listener exists from the beginning; a test adds others
//! with their differences.

use super::{GATEWAY_NAME, PATIENCE, World, client::ListenerAddress, folder, log::Log, until};
use causeway_certs::{
    Ca, OpenMode, StaticTokens, Store, StoreError, TrustDomain, install_provider,
};
use causeway_gateway::{
    BindError, Config, Gateway, ReloadSummary, Reloader,
    config::{AccessLog, ListenAddr, Listener, ListenerProtocol},
    proxy::{access_review::ReviewClient, authz::Authorize, pod_route::PodLookup},
    server::BoundAddresses,
    state::{NodesWriter, PolicyReader},
    worker::Workers,
};
use std::{
    fs::OpenOptions,
    io::Write,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};
use tempfile::TempDir;
use tokio::{task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::subscriber::DefaultGuard;

/// Limit of a wait for the end of a stopped gateway.
const DRAIN: Duration = Duration::from_millis(400);

/// Any port of loopback.
pub(crate) fn loopback() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

/// Listener of this kind and name on loopback; if it has TLS, clients show a certificate of the world's CA.
pub(crate) fn listener(name: &str, kind: ListenerProtocol) -> Listener {
    Listener {
        names: vec![GATEWAY_NAME.to_owned(), "127.0.0.1".to_owned()],
        ..Listener::new(name, kind, ListenAddr::Tcp(loopback()))
    }
}

/// Returns a listener without authentication.
pub(crate) fn anonymous(name: &str, kind: ListenerProtocol) -> Listener {
    Listener {
        anonymous: true,
        ..listener(name, kind)
    }
}

/// A listener for one port of one node.
pub(crate) fn fixed(name: &str, kind: ListenerProtocol, node: &str, port: u16) -> Listener {
    Listener {
        node: Some(node.to_owned()),
        port: Some(port),
        ..listener(name, kind)
    }
}

/// The data directory of the gateway of a world.
pub(super) fn store(folder: &Path) -> Store {
    Store::open(folder.join("gateway"), OpenMode::Create).unwrap()
}

/// A gateway before it starts.
pub(crate) struct Build {
    config: Config,
    authorizer: Option<Arc<dyn Authorize>>,
    policy: Option<PolicyReader>,
    pods: Option<Arc<dyn PodLookup>>,
    reviews: Option<Arc<dyn ReviewClient>>,
    workers: Option<usize>,
    log: Log,
    _listening: DefaultGuard,
    folder: TempDir,
}

impl Build {
    pub(super) fn new() -> Self {
        install_provider();
        let folder = folder();
        let mut config = Config {
            data_dir: folder.path().join("gateway"),
            listeners: vec![listener("https", ListenerProtocol::Https)],
            access_log: AccessLog::All,
            ..Config::default()
        };
        config.tunnel.listen = loopback();
        config.admin.listen = loopback();
        config.timeouts.drain = DRAIN;
        // Many clients and edges share the test's thread, and a busy machine stops it for seconds.
        config.timeouts.tls = PATIENCE;
        config.timeouts.header = PATIENCE;
        config.timeouts.connect = PATIENCE;
        config.tunnel.handshake_timeout = PATIENCE;
        config.tunnel.hello_timeout = PATIENCE;
        // Other tests fill the same kernel's buffers.
        config.limits.tcp_memory = usize::MAX;
        // Tests of errors expect them at once.
        config.timeouts.reconnect = Duration::ZERO;
        let log = Log::default();
        Self {
            config,
            authorizer: None,
            policy: None,
            pods: None,
            reviews: None,
            workers: None,
            _listening: log.listen(),
            log,
            folder,
        }
    }

    /// Adds a listener; one of the same name is replaced.
    pub(crate) fn listener(mut self, listener: Listener) -> Self {
        self.config
            .listeners
            .retain(|old| old.name != listener.name);
        self.config.listeners.push(listener);
        self
    }

    /// Changes the configuration.
    pub(crate) fn config(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// Sets the authorizer.
    pub(crate) fn authorizer(mut self, authorizer: impl Authorize) -> Self {
        self.authorizer = Some(Arc::new(authorizer));
        self
    }

    /// Sets these rules as the policy.
    pub(crate) fn policy(mut self, policy: PolicyReader) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Sets the lookup of pods.
    pub(crate) fn pods(mut self, pods: impl PodLookup) -> Self {
        self.pods = Some(Arc::new(pods));
        self
    }

    /// Sets the client that authenticates clients and reviews their access to kubelets.
    pub(crate) fn reviews(mut self, reviews: impl ReviewClient) -> Self {
        self.reviews = Some(Arc::new(reviews));
        self
    }

    /// Runs on this many threads of its own.
    pub(crate) fn workers(mut self, workers: usize) -> Self {
        self.workers = Some(workers);
        self
    }

    /// A bearer token for a client; its hash goes to [`Build::static_tokens`].
    pub(crate) fn token(&self, client: &str) -> String {
        let (token, line) = StaticTokens::generate(client, &[]).unwrap();
        let mut file = OpenOptions::new();
        let file = file.append(true).create(true).open(self.tokens());
        writeln!(file.unwrap(), "{line}").unwrap();
        token.expose().to_owned()
    }

    /// The file for a listener's `client_auth.tokens`.
    pub(crate) fn tokens(&self) -> PathBuf {
        self.folder().join("clients")
    }

    /// A directory that goes with the world.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn log(&self) -> Log {
        self.log.clone()
    }

    /// Makes the CA and starts the gateway.
    pub(crate) async fn start(mut self) -> World {
        let ca = Ca::create(&TrustDomain::parse("world.test").unwrap()).unwrap();
        store(self.folder()).save_ca(&ca).unwrap();
        World {
            gateway: Some(Box::pin(self.run()).await),
            build: self,
            ca,
            files: AtomicUsize::new(0),
        }
    }

    /// Binds and runs; from then on the configuration has the chosen addresses.
    pub(super) async fn run(&mut self) -> Running {
        let mut bound = None;
        until(
            "the gateway's addresses and directory are free",
            async || {
                bound = match self.bind() {
                    // A child that another test has forked keeps sockets and locks until it executes its program.
                    Err(BindError::Listen { .. } | BindError::Store(StoreError::InUse { .. })) => {
                        None
                    }
                    other => Some(other.unwrap()),
                };
                bound.is_some()
            },
        )
        .await;
        let bound = bound.expect("the gateway is bound");
        let (config, reloader) = (self.config.clone(), bound.reloader());
        let nodes = bound.nodes();
        let addresses = bound.addresses();
        self.config.tunnel.listen = addresses.tunnel;
        self.config.admin.listen = addresses.admin;
        if let (Some(dns), Some(address)) = (&mut self.config.dns.0, addresses.dns) {
            dns.listen = address;
        }
        self.config.listeners = placed(&config.listeners, &addresses);
        let stop = CancellationToken::new();
        let mut task = JoinSet::new();
        let run = bound.run(stop.clone());
        task.spawn(async {
            run.await;
        });
        Running {
            addresses,
            listeners: self.config.listeners.clone(),
            config,
            reloader,
            nodes,
            stop,
            task,
        }
    }

    fn bind(&self) -> Result<causeway_gateway::Bound, BindError> {
        let workers = match self.workers {
            Some(count) => Workers::start(count).unwrap(),
            None => Workers::on_current_runtime(),
        };
        let mut gateway = Gateway::new(self.config.clone()).workers(workers);
        if let Some(authorizer) = &self.authorizer {
            gateway = gateway.authorizer(authorizer.clone());
        }
        if let Some(policy) = &self.policy {
            gateway = gateway.policy(policy.clone());
        }
        if let Some(pods) = &self.pods {
            gateway = gateway.pods(pods.clone());
        }
        if let Some(reviews) = &self.reviews {
            gateway = gateway.reviews(reviews.clone());
        }
        gateway.bind()
    }
}

/// A running gateway.
pub(super) struct Running {
    pub(super) addresses: BoundAddresses,
    listeners: Vec<Listener>,
    /// The original configuration, with ports that the system chooses.
    config: Config,
    reloader: Reloader,
    /// The table of nodes, which a cluster fills.
    pub(super) nodes: NodesWriter,
    stop: CancellationToken,
    task: JoinSet<()>,
}

/// The listeners, at the chosen addresses.
fn placed(listeners: &[Listener], addresses: &BoundAddresses) -> Vec<Listener> {
    let place = |listener: &Listener| Listener {
        listen: addresses
            .listener(&listener.name)
            .map_or_else(|| listener.listen.clone(), ListenAddr::Tcp),
        ..listener.clone()
    };
    listeners.iter().map(place).collect()
}

impl Running {
    /// Gives the gateway a changed configuration. Applies `rules` when the old listeners have stopped.
    pub(super) fn reload(
        &mut self,
        change: impl FnOnce(&mut Config),
        rules: Option<impl FnOnce()>,
    ) -> Result<ReloadSummary, BindError> {
        let mut config = self.config.clone();
        change(&mut config);
        let changed = self.reloader.prepare(&config)?.apply_with(rules);
        self.addresses.listeners = self.reloader.listeners();
        self.listeners = placed(&config.listeners, &self.addresses);
        self.config = config;
        Ok(changed)
    }

    pub(super) fn place(&self, name: &str) -> ListenerAddress {
        let listener = self.listeners.iter().find(|listener| listener.name == name);
        let listener = listener.unwrap_or_else(|| panic!("there is no listener {name:?}"));
        match &listener.listen {
            ListenAddr::Unix(path) => ListenerAddress::Unix(path.clone()),
            ListenAddr::Tcp(address) if listener.has_tls() => ListenerAddress::Tls(*address),
            ListenAddr::Tcp(address) => ListenerAddress::Plain(*address),
        }
    }

    pub(super) fn ask(&self) {
        self.stop.cancel();
    }

    pub(super) async fn stop(mut self) {
        self.ask();
        let ended = timeout(PATIENCE, self.task.join_next()).await;
        ended.expect("the gateway stops").unwrap().unwrap();
    }

    pub(super) async fn kill(mut self) {
        self.task.shutdown().await;
    }
}
