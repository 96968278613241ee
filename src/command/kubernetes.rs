//! The cluster beside a gateway: what keeps its table of nodes in step with the API, and a hosts file in step with the
//! table, where these are configured; and that of an edge, which says who it is.
//!
//! A build without the feature `k8s` refuses such a configuration: a gateway that silently knew no node would be worse.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;

#[cfg(feature = "k8s")]
use causeway_certs::{OpenMode, Store};
use causeway_gateway::config::{DiscoveredEndpoints, NodePorts, ReloadSender};
use causeway_gateway::{Bound, Config, Gateway};
#[cfg(feature = "k8s")]
use causeway_gateway::{config::Kubernetes, server::names};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Client with which an edge requests its certificate from the cluster, in place of a token.
pub(super) type CsrClientHandle = Option<std::sync::Arc<dyn causeway_edge::CsrClient>>;

/// The cluster of an edge, if one is configured.
#[cfg(feature = "k8s")]
#[allow(
    clippy::unnecessary_wraps,
    reason = "the build without the feature has the same signature"
)]
pub(super) fn vouching(config: &causeway_edge::Config) -> anyhow::Result<CsrClientHandle> {
    let rules = config.kubernetes.clone();
    Ok(rules.map(|rules| std::sync::Arc::new(causeway_k8s::NodeCsrClient::new(rules)) as _))
}

/// As above, in a build that knows no cluster.
#[cfg(not(feature = "k8s"))]
pub(super) fn vouching(config: &causeway_edge::Config) -> anyhow::Result<CsrClientHandle> {
    if config.kubernetes.is_some() {
        anyhow::bail!(
            "kubernetes: this build does not support Kubernetes; build it with --features k8s"
        );
    }
    Ok(None)
}

/// Runs for as long as the gateway does.
pub(super) type ControllerFuture = Pin<Box<dyn Future<Output = Infallible>>>;

/// Destinations for the ports and addresses that a cluster reports.
#[cfg_attr(
    not(feature = "k8s"),
    expect(dead_code, reason = "only a cluster reports any")
)]
pub(super) struct ClusterSenders {
    pub(super) ports: watch::Sender<Option<NodePorts>>,
    /// Endpoints at which edges reach the gateway.
    pub(super) advertised: watch::Sender<DiscoveredEndpoints>,
    pub(super) reloads: ReloadSender,
}

/// A cluster, if one is configured.
#[cfg(feature = "k8s")]
pub(super) struct KubernetesControllers(Option<Inner>);

#[cfg(feature = "k8s")]
struct Inner {
    rules: Kubernetes,
    client: causeway_k8s::Client,
    /// Asks for this gateway's own certificate.
    own: Option<causeway_k8s::GatewayCertificate>,
    /// Ask for the client certificates of apps.
    app_clients: Vec<causeway_k8s::GatewayCertificate>,
    /// Addresses that the hosts file gives for the nodes of edges.
    addresses: Vec<std::net::IpAddr>,
    /// Nothing else says where edges reach the gateway.
    nowhere: bool,
}

#[cfg(feature = "k8s")]
impl KubernetesControllers {
    /// Reads how its API is reached; nothing is dialled.
    pub(super) async fn read(config: &Config) -> anyhow::Result<Self> {
        let Some(rules) = config.kubernetes.clone() else {
            return Ok(Self(None));
        };
        let client = causeway_k8s::client(rules.kubeconfig.as_deref()).await?;
        Ok(Self(Some(Inner {
            own: own(&client, config)?,
            app_clients: app_clients(&client, config)?,
            rules,
            client,
            addresses: config.hosted_addresses(),
            nowhere: config.tunnel.advertise.is_empty(),
        })))
    }

    /// Returns once there is what a gateway cannot begin without: its own certificate, where the cluster makes that.
    pub(super) async fn begin(
        &self,
        config: &Config,
        tell: &(dyn Fn(&str) + Sync),
    ) -> anyhow::Result<()> {
        if let Some(own) = self.0.as_ref().and_then(|parts| parts.own.as_ref()) {
            own.first(&names(config)?, tell).await;
        }
        Ok(())
    }

    /// Adds the lookup of pods and the reviews of clients by the cluster to a gateway.
    pub(super) fn attach_to(&self, gateway: Gateway) -> Gateway {
        match &self.0 {
            Some(parts) => {
                let pods = causeway_k8s::PodLookup::new(parts.client.clone());
                let reviews = causeway_k8s::ReviewClient::new(parts.client.clone());
                let gateway = gateway.pods(std::sync::Arc::new(pods));
                gateway.reviews(std::sync::Arc::new(reviews))
            }
            None => gateway,
        }
    }

    /// Returns the task that watches the cluster's nodes once it is polled. The gateway is not ready (`/readyz`) before the
    /// nodes are known. With `stop` the task gives up what others wait for.
    pub(super) fn follow(
        self,
        bound: &Bound,
        listing: ClusterSenders,
        stop: CancellationToken,
    ) -> ControllerFuture {
        let Some(parts) = self.0 else {
            return Box::pin(std::future::pending());
        };
        let (hosts, advertised) = (parts.hosts(bound), parts.advertised(bound, &listing));
        let listed = parts.listed(bound, listing);
        let certificates = parts.certificates(bound);
        let (read, hubs) = (parts.read(bound), parts.hubs(bound));
        let state = parts.state(bound);
        let app_clients = parts.app_clients.into_iter().map(|client| {
            let why =
                "the client certificate for apps (upstream_tls.*.signer) has not been issued yet";
            client.run_holding(bound.hold(why))
        });
        let app_clients = futures_util::future::join_all(app_clients);
        let (own, reloader) = (parts.own, bound.reloader());
        let informer = causeway_k8s::NodeInformer {
            client: parts.client,
            rules: parts.rules,
            nodes: bound.nodes(),
            metrics: bound.metrics().cluster(),
        };
        let conflicts = causeway_k8s::ConflictEvents {
            client: informer.client.clone(),
            nodes: bound.nodes(),
            gateway: this_gateway(),
        };
        let unread = state
            .is_some()
            .then(|| bound.hold("revocations and pinned keys have not been loaded yet"));
        let hold = bound.hold("the nodes of the cluster have not been loaded yet");
        // Nodes of the cluster are admitted only after revocations are known.
        let nodes = async move {
            let Some((state, unread)) = state.zip(unread) else {
                return informer.run(hold).await;
            };
            state.initial_sync(unread).await;
            tokio::join!(informer.run(hold), state.run());
        };
        let hosts = async move {
            if let Some(hosts) = hosts {
                hosts.run(stop).await;
            }
        };
        Box::pin(async move {
            let ((), (), never, ..) = tokio::join!(
                nodes,
                hosts,
                endless(listed.map(causeway_k8s::PortListController::run)),
                endless(certificates.map(causeway_k8s::CsrController::run)),
                endless(advertised.map(causeway_k8s::ServiceWatcher::run)),
                endless(own.map(|own| own.run(|| reloader.names()))),
                endless(read.map(causeway_k8s::ApiCacheSource::run)),
                endless(hubs.map(causeway_k8s::YurtHubLeaders::run)),
                conflicts.run(),
                app_clients,
            );
            never
        })
    }
}

#[cfg(feature = "k8s")]
impl Inner {
    fn listed(
        &self,
        bound: &Bound,
        listing: ClusterSenders,
    ) -> Option<causeway_k8s::PortListController> {
        let rules = self.rules.ports.clone()?;
        Some(causeway_k8s::PortListController {
            client: self.client.clone(),
            readiness: bound.readiness(),
            rules,
            listed: listing.ports,
            reloads: listing.reloads,
            metrics: bound.metrics(),
            gateway: this_gateway(),
            store: bound.store().clone(),
        })
    }

    /// Starts the discovery of the gateway's address. If no address is configured either, clients wait until edges can learn one.
    fn advertised(
        &self,
        bound: &Bound,
        listing: &ClusterSenders,
    ) -> Option<causeway_k8s::ServiceWatcher> {
        let rules = self.rules.advertise.clone()?;
        let why = format!("Service {} has not been loaded yet", rules.service);
        Some(causeway_k8s::ServiceWatcher {
            client: self.client.clone(),
            rules,
            found: listing.advertised.clone(),
            reloads: listing.reloads.clone(),
            nodes: bound.nodes(),
            hold: self.nowhere.then(|| bound.hold(why)),
        })
    }

    fn certificates(&self, bound: &Bound) -> Option<causeway_k8s::CsrController> {
        Some(causeway_k8s::CsrController {
            client: self.client.clone(),
            rules: self.rules.certificates.clone()?,
            signer: bound.signer(),
            roots: bound.roots(),
            nodes: bound.nodes(),
            metrics: bound.metrics(),
            gateway: this_gateway(),
        })
    }

    /// Task that keeps revocations and pinned keys in a Secret.
    fn state(&self, bound: &Bound) -> Option<causeway_k8s::SharedState> {
        let (namespace, name) = self.rules.state.as_deref()?.split_once('/')?;
        Some(causeway_k8s::SharedState {
            client: self.client.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            roll: bound.roll(),
        })
    }

    /// Returns the source that fills the API cache of edges.
    fn read(&self, bound: &Bound) -> Option<causeway_k8s::ApiCacheSource> {
        Some(causeway_k8s::ApiCacheSource {
            client: self.client.clone(),
            pool: bound.pool()?,
        })
    }

    /// Returns the publisher that tells YurtHubs where to read.
    fn hubs(&self, bound: &Bound) -> Option<causeway_k8s::YurtHubLeaders> {
        Some(causeway_k8s::YurtHubLeaders {
            client: self.client.clone(),
            rules: self.rules.yurthub.clone()?,
            hubs: bound.hubs()?,
            nodes: bound.nodes().reader(),
            gateway: this_gateway(),
        })
    }

    fn hosts(&self, bound: &Bound) -> Option<causeway_k8s::HostsController> {
        Some(causeway_k8s::HostsController {
            client: self.client.clone(),
            rules: self.rules.hosts.clone()?,
            addresses: self.addresses.clone(),
            nodes: bound.nodes(),
            metrics: bound.metrics(),
            gateway: this_gateway(),
        })
    }
}

/// Some work, if there is any.
#[cfg(feature = "k8s")]
async fn endless(work: Option<impl Future<Output = Infallible>>) -> Infallible {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}

/// Returns the requester of this gateway's own certificate, if the cluster is to issue it.
#[cfg(feature = "k8s")]
fn own(
    client: &causeway_k8s::Client,
    config: &Config,
) -> anyhow::Result<Option<causeway_k8s::GatewayCertificate>> {
    let identity = config.tunnel.identity.as_ref();
    let Some((signer, domain)) = identity.and_then(causeway_gateway::config::Identity::asked)
    else {
        return Ok(None);
    };
    Ok(Some(causeway_k8s::GatewayCertificate {
        client: client.clone(),
        signer: signer.to_owned(),
        purpose: causeway_k8s::Purpose::TunnelPort(domain),
        approve: false,
        store: Store::open(&config.data_dir, OpenMode::Create)?,
        gateway: this_gateway(),
    }))
}

/// Task that asks for the client certificates of apps, where the cluster is to be asked for them.
#[cfg(feature = "k8s")]
fn app_clients(
    client: &causeway_k8s::Client,
    config: &Config,
) -> anyhow::Result<Vec<causeway_k8s::GatewayCertificate>> {
    let apps = config.upstream_tls.iter();
    let asked = apps.filter_map(|(port, app)| Some((*port, app, app.signer.clone()?)));
    asked
        .map(|(port, app, signer)| {
            Ok(causeway_k8s::GatewayCertificate {
                client: client.clone(),
                signer,
                purpose: causeway_k8s::Purpose::AppClient(port, app.user.clone()),
                approve: app.approve,
                store: Store::open(&config.data_dir, OpenMode::Create)?,
                gateway: this_gateway(),
            })
        })
        .collect()
}

/// Its name to others: the host's.
#[cfg(feature = "k8s")]
fn this_gateway() -> String {
    let name = nix::unistd::gethostname().ok();
    let name = name.and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| "gateway".to_owned())
}

/// As above, in a build that knows no cluster.
#[cfg(not(feature = "k8s"))]
pub(super) struct KubernetesControllers;

#[cfg(not(feature = "k8s"))]
#[allow(
    clippy::unused_async,
    clippy::unused_self,
    reason = "as the other build has them"
)]
impl KubernetesControllers {
    pub(super) async fn read(config: &Config) -> anyhow::Result<Self> {
        if config.kubernetes.is_some() {
            anyhow::bail!(
                "kubernetes: this build does not support Kubernetes; build it with --features k8s"
            );
        }
        Ok(Self)
    }

    pub(super) async fn begin(&self, _: &Config, _: &(dyn Fn(&str) + Sync)) -> anyhow::Result<()> {
        Ok(())
    }

    pub(super) fn attach_to(&self, gateway: Gateway) -> Gateway {
        gateway
    }

    pub(super) fn follow(
        self,
        _: &Bound,
        _: ClusterSenders,
        _: CancellationToken,
    ) -> ControllerFuture {
        Box::pin(std::future::pending())
    }
}

/// Runs `work` while `live` runs, and ends when `live` ends.
pub(super) async fn beside<T>(live: impl Future<Output = T>, work: ControllerFuture) -> T {
    tokio::select! {
        outcome = live => outcome,
        never = work => match never {},
    }
}
