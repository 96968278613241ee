//! Edges of a world: they join with a real token over the wire and run in this process.
//!
//! An edge counts as joined when the gateway reports it. A test can stop it in order, kill it, and start it again from its
//! data directory.

use super::{LOOK, PATIENCE, World, gateway::loopback, link::Link, until};
use causeway_certs::{NodeAttributes, NodeName, StoreError};
use causeway_edge::{
    Config, Error, Reloader,
    config::{Port, Protocol, Secret, Service, TunnelMode},
    status::{Status, StatusReader},
};
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// Limit of a wait for the end of a stopped edge.
const DRAIN: Duration = Duration::from_millis(400);
/// Limit of a wait for edges that reconnect.
const SILENT: Duration = Duration::from_millis(100);

/// An edge before it joins.
pub(crate) struct Plan<'a> {
    world: &'a World,
    node: String,
    confirmed: NodeAttributes,
    config: Config,
}

impl<'a> Plan<'a> {
    pub(super) fn new(world: &'a World, node: &str) -> Self {
        let mut config = Config {
            data_dir: world.folder().join(node),
            gateways: vec![world.tunnel().to_string()],
            ..Config::default()
        };
        config.admin.listen = loopback();
        config.timeouts.drain = DRAIN;
        // As at the gateway, whose limit is longer: the edge's reason is the better one.
        config.timeouts.dial = PATIENCE / 2;
        // Other tests fill the same kernel's buffers.
        config.limits.tcp_memory = usize::MAX;
        config.backoff.silent_max = SILENT;
        Self {
            world,
            node: node.to_owned(),
            confirmed: NodeAttributes::default(),
            config,
        }
    }

    /// Serves the node's port `number` by the app at `app`.
    pub(crate) fn port(self, number: u16, app: SocketAddr) -> Self {
        self.port_as(number, Protocol::Http, app)
    }

    /// The same for an app that speaks another protocol.
    pub(crate) fn port_as(mut self, number: u16, scheme: Protocol, app: SocketAddr) -> Self {
        let port = Port {
            target: Some(app.to_string()),
            scheme,
            ..Port::default()
        };
        self.config.ports.insert(number, port);
        self
    }

    /// Serves the app at `app` as a service behind the node.
    pub(crate) fn service(mut self, name: &str, app: SocketAddr) -> Self {
        let port = Port {
            target: Some(app.to_string()),
            ..Port::default()
        };
        self.config.services.insert(name.into(), Service(port));
        self
    }

    /// An address of the node that its token confirms.
    pub(crate) fn address(mut self, address: &str) -> Self {
        self.confirmed.addresses.push(address.parse().unwrap());
        self
    }

    /// A label of the node that its token confirms.
    pub(crate) fn label(mut self, key: &str, value: &str) -> Self {
        self.confirmed.labels.insert(key.into(), value.into());
        self
    }

    /// The pool of the node that its token confirms.
    pub(crate) fn pool(mut self, pool: &str) -> Self {
        self.confirmed.pool = Some(pool.into());
        self
    }

    /// Joins with this token instead of one of the world's.
    pub(crate) fn token(mut self, token: &str) -> Self {
        self.config.join = Some(Secret::new(token));
        self
    }

    /// Uses no other way to the gateway than this link. An edge with tunnels at several gateways would use the address that the
    /// gateway announces as soon as the link is cut.
    pub(crate) fn only_by(mut self, link: &Link) -> Self {
        self.config.gateways = vec![link.address().to_string()];
        self.config.tunnels.gateways = TunnelMode::One;
        self
    }

    /// Changes the configuration.
    pub(crate) fn config(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// Joins, and waits until the gateway has its tunnel.
    pub(crate) async fn join(self) -> Edge {
        let (world, node) = (self.world, self.node.clone());
        // Boxed: joining is large, and most tests contain it.
        let edge = Box::pin(self.open()).await.unwrap();
        let what = format!("{node} is connected");
        until(&what, async || {
            world.node(&node).await["state"] == "connected"
        })
        .await;
        edge
    }

    /// Joins and runs; the gateway may still refuse its tunnel.
    pub(crate) async fn open(mut self) -> Result<Edge, Error> {
        if self.config.join.is_none() {
            let token = self.issued();
            self.config.join = Some(Secret::new(token));
        }
        let mut edge = Edge::new(self.config);
        Box::pin(edge.start()).await.map(|()| edge)
    }

    fn issued(&self) -> String {
        let node = NodeName::parse(&self.node).unwrap();
        let tokens = self.world.store().tokens().unwrap();
        let token = tokens.create(&node, super::LIFE, self.confirmed.clone());
        token.unwrap().text().expose().to_owned()
    }
}

/// An edge; dropping it kills it.
pub(crate) struct Edge {
    config: Config,
    rejoin: bool,
    running: Option<Running>,
}

struct Running {
    stop: CancellationToken,
    task: JoinSet<Result<(), Error>>,
    reader: StatusReader,
    reloader: Reloader,
    admin: SocketAddr,
}

impl Edge {
    fn new(config: Config) -> Self {
        Self {
            config,
            rejoin: false,
            running: None,
        }
    }

    /// Starts it, from its data directory if it has joined before.
    pub(crate) async fn start(&mut self) -> Result<(), Error> {
        assert!(self.running.is_none(), "the edge runs");
        let stop = CancellationToken::new();
        let opening = async {
            loop {
                let bound = async {
                    let opened = causeway_edge::Edge::open(self.config.clone(), &stop).await?;
                    opened.rejoin(self.rejoin).bind().await
                };
                let bound = bound.await;
                let Err(Error::Store(StoreError::InUse { .. })) = bound else {
                    return bound;
                };
                // A child that another test has forked keeps the lock of this directory until it executes its program.
                sleep(LOOK[0]).await;
            }
        };
        let bound = timeout(PATIENCE, opening).await;
        let bound = bound.expect("the edge joins or is refused")?;
        let (reader, reloader) = (bound.status_reader(), bound.reloader());
        let admin = bound.local_addr();
        let mut task = JoinSet::new();
        task.spawn(bound.run(stop.clone()));
        self.running = Some(Running {
            stop,
            task,
            reader,
            reloader,
            admin,
        });
        Ok(())
    }

    /// From now on it has no token.
    pub(crate) fn forget_token(&mut self) {
        self.config.join = None;
    }

    /// From now on it has this token.
    pub(crate) fn take_token(&mut self, token: &causeway_certs::JoinToken) {
        self.config.join = Some(token.text());
    }

    /// From now on it starts with `--rejoin`.
    pub(crate) fn rejoin(&mut self) {
        self.rejoin = true;
    }

    /// From now on its configuration names this node.
    pub(crate) fn rename(&mut self, node: &str) {
        self.config.node = Some(node.to_owned());
    }

    /// Gives it a changed configuration.
    pub(crate) fn reload(&mut self, change: impl FnOnce(&mut Config)) {
        change(&mut self.config);
        let prepared = self.running().reloader.prepare(&self.config);
        prepared.unwrap().apply();
    }

    /// Stops it in order and waits for its end.
    pub(crate) async fn stop(&mut self) {
        let mut running = self.running.take().expect("the edge runs");
        running.stop.cancel();
        let ended = timeout(PATIENCE, running.task.join_next()).await;
        ended.expect("the edge stops").unwrap().unwrap().unwrap();
    }

    /// Requests its shutdown; it drains meanwhile.
    pub(crate) fn drain(&self) {
        self.running().stop.cancel();
    }

    /// Ends it without a shutdown.
    pub(crate) async fn kill(&mut self) {
        let mut running = self.running.take().expect("the edge runs");
        running.task.shutdown().await;
    }

    /// The address of its admin listener.
    pub(crate) fn admin(&self) -> SocketAddr {
        self.running().admin
    }

    /// Returns the edge's status.
    pub(crate) fn status(&self) -> Status {
        self.running().reader.status()
    }

    /// Its data directory.
    pub(crate) fn folder(&self) -> PathBuf {
        self.config.data_dir.clone()
    }

    fn running(&self) -> &Running {
        self.running.as_ref().expect("the edge runs")
    }
}
