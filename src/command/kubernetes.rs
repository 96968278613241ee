//! The cluster of a gateway or of an edge, if one is configured. At a gateway, controllers synchronise the table of nodes
//! with the API, and a hosts file with the table. At an edge, the cluster issues the certificate that identifies the edge.
//!
//! A build without the feature `k8s` refuses such a configuration: a gateway that silently knew no node would be worse.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

#[cfg(feature = "k8s")]
use causeway_certs::{OpenMode, Store};
use causeway_gateway::config::{DiscoveredEndpoints, NodePorts, ReloadSender};
use causeway_gateway::shared_state::StateEngine;
use causeway_gateway::{Bound, Config, Gateway};
#[cfg(feature = "k8s")]
use causeway_gateway::{config::Kubernetes, server::advertised_names};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Client with which an edge requests its certificate from the cluster, in place of a token.
pub(super) type CsrClientHandle = Option<Arc<dyn causeway_edge::CsrClient>>;

/// The cluster of an edge, if one is configured.
#[cfg(feature = "k8s")]
#[allow(
    clippy::unnecessary_wraps,
    reason = "the build without the feature has the same signature"
)]
pub(super) fn csr_client(config: &causeway_edge::Config) -> anyhow::Result<CsrClientHandle> {
    let settings = config.kubernetes.clone();
    Ok(settings.map(|rules| Arc::new(causeway_k8s::NodeCsrClient::new(rules)) as _))
}

/// Refuses a configured cluster, in a build without support for clusters.
#[cfg(not(feature = "k8s"))]
pub(super) fn csr_client(config: &causeway_edge::Config) -> anyhow::Result<CsrClientHandle> {
    if config.kubernetes.is_some() {
        anyhow::bail!(
            "kubernetes: this build does not support Kubernetes; build it with --features k8s"
        );
    }
    Ok(None)
}

/// Controllers, which run as long as the gateway.
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
    pub(super) reload_sender: ReloadSender,
}

/// A cluster, if one is configured.
#[cfg(feature = "k8s")]
pub(super) struct KubernetesControllers(Option<Inner>);

#[cfg(feature = "k8s")]
struct Inner {
    settings: Kubernetes,
    client: causeway_k8s::Client,
    /// Requester of this gateway's own certificate.
    own_certificate: Option<causeway_k8s::GatewayCertificate>,
    /// Requesters of the client certificates for apps.
    app_clients: Vec<causeway_k8s::GatewayCertificate>,
    /// Addresses that the hosts file gives for the nodes of edges.
    addresses: Vec<std::net::IpAddr>,
    /// Whether no other source names the gateway's address for edges.
    has_no_address: bool,
}

#[cfg(feature = "k8s")]
impl KubernetesControllers {
    /// Reads the configuration of the API client. No connection is made yet.
    pub(super) async fn from_config(config: &Config) -> anyhow::Result<Self> {
        let Some(settings) = config.kubernetes.clone() else {
            return Ok(Self(None));
        };
        let client = causeway_k8s::build_client(settings.kubeconfig.as_deref()).await?;
        Ok(Self(Some(Inner {
            own_certificate: own_certificate(&client, config)?,
            app_clients: app_clients(&client, config)?,
            settings,
            client,
            addresses: config.hosts_file_addresses(),
            has_no_address: config.tunnel.advertise.is_empty(),
        })))
    }

    /// Waits for the gateway's own certificate, without which a gateway cannot start, if the cluster issues it.
    pub(super) async fn wait_for_certificate(
        &self,
        config: &Config,
        report: &(dyn Fn(&str) + Sync),
    ) -> anyhow::Result<()> {
        if let Some(own_certificate) = self
            .0
            .as_ref()
            .and_then(|parts| parts.own_certificate.as_ref())
        {
            own_certificate
                .wait_for_first(&advertised_names(config)?, report)
                .await;
        }
        Ok(())
    }

    /// Adds the lookup of pods, and the cluster's reviews of clients, to a gateway.
    pub(super) fn attach_to(&self, gateway: Gateway) -> Gateway {
        match &self.0 {
            Some(inner) => {
                let pods = causeway_k8s::PodLookup::new(inner.client.clone());
                let reviews = causeway_k8s::ReviewClient::new(inner.client.clone());
                let gateway = gateway.pods(Arc::new(pods));
                gateway.reviews(Arc::new(reviews))
            }
            None => gateway,
        }
    }

    /// Returns the task that watches the cluster's nodes. The gateway is not ready (`/readyz`) before the nodes are known.
    /// When `stop` is cancelled, the controller of the hosts file releases its Lease, so that no other gateway has to wait.
    pub(super) fn spawn_controllers(
        self,
        bound: &Bound,
        senders: ClusterSenders,
        stop: CancellationToken,
    ) -> ControllerFuture {
        let Some(inner) = self.0 else {
            return Box::pin(std::future::pending());
        };
        let (hosts_controller, service_watcher) = (
            inner.hosts_controller(bound),
            inner.service_watcher(bound, &senders),
        );
        let port_list = inner.port_list(bound, senders);
        let csr_controller = inner.csr_controller(bound);
        let (api_cache_source, yurthub_leaders) =
            (inner.api_cache_source(bound), inner.yurthub_leaders(bound));
        let heartbeats = inner.heartbeats(bound, stop.clone());
        let app_clients = inner.app_clients.into_iter().map(|client| {
            let why =
                "the client certificate for apps (upstream_tls.*.signer) has not been issued yet";
            client.run_with_readiness_block(bound.hold(why))
        });
        let app_clients = futures_util::future::join_all(app_clients);
        let (own, reloader) = (inner.own_certificate, bound.reloader());
        let informer = causeway_k8s::NodeInformer {
            client: inner.client,
            settings: inner.settings,
            nodes: bound.nodes(),
            metrics: bound.metrics().kubernetes_metrics(),
        };
        let conflicts = causeway_k8s::ConflictEvents {
            client: informer.client.clone(),
            nodes: bound.nodes(),
            gateway: gateway_name(),
        };
        let nodes = run_node_informer(informer, bound);
        let hosts = async move {
            if let Some(hosts) = hosts_controller {
                hosts.run(stop).await;
            }
        };
        Box::pin(async move {
            let ((), (), (), never, ..) = tokio::join!(
                nodes,
                hosts,
                heartbeats,
                run_or_pend(port_list.map(causeway_k8s::PortListController::run)),
                run_or_pend(csr_controller.map(causeway_k8s::CsrController::run)),
                run_or_pend(service_watcher.map(causeway_k8s::ServiceWatcher::run)),
                run_or_pend(own.map(|own| own.run(|| reloader.names()))),
                run_or_pend(api_cache_source.map(causeway_k8s::ApiCacheSource::run)),
                run_or_pend(yurthub_leaders.map(causeway_k8s::YurtHubLeaders::run)),
                conflicts.run(),
                app_clients,
            );
            never
        })
    }
}

#[cfg(feature = "k8s")]
impl Inner {
    fn port_list(
        &self,
        bound: &Bound,
        senders: ClusterSenders,
    ) -> Option<causeway_k8s::PortListController> {
        let port_list = self.settings.ports.clone()?;
        Some(causeway_k8s::PortListController {
            client: self.client.clone(),
            readiness: bound.readiness(),
            settings: port_list,
            ports_sender: senders.ports,
            reload_sender: senders.reload_sender,
            metrics: bound.metrics(),
            gateway: gateway_name(),
            store: bound.store().clone(),
        })
    }

    /// Starts the discovery of the gateway's address. If no address is configured either, clients wait until edges can learn one.
    fn service_watcher(
        &self,
        bound: &Bound,
        senders: &ClusterSenders,
    ) -> Option<causeway_k8s::ServiceWatcher> {
        let service = self.settings.advertise.clone()?;
        let why = format!("Service {} has not been loaded yet", service.service);
        Some(causeway_k8s::ServiceWatcher {
            client: self.client.clone(),
            settings: service,
            discovered: senders.advertised.clone(),
            reload_sender: senders.reload_sender.clone(),
            nodes: bound.nodes(),
            readiness_block: self.has_no_address.then(|| bound.hold(why)),
        })
    }

    fn csr_controller(&self, bound: &Bound) -> Option<causeway_k8s::CsrController> {
        Some(causeway_k8s::CsrController {
            client: self.client.clone(),
            settings: self.settings.certificates.clone()?,
            signer: bound.signer(),
            roots: bound.roots(),
            nodes: bound.nodes(),
            metrics: bound.metrics(),
            gateway: gateway_name(),
        })
    }

    /// Returns the source that fills the API cache of edges.
    fn api_cache_source(&self, bound: &Bound) -> Option<causeway_k8s::ApiCacheSource> {
        Some(causeway_k8s::ApiCacheSource {
            client: self.client.clone(),
            cache: bound.watch_cache()?,
        })
    }

    /// Returns the publisher that announces to YurtHubs where to read.
    fn yurthub_leaders(&self, bound: &Bound) -> Option<causeway_k8s::YurtHubLeaders> {
        Some(causeway_k8s::YurtHubLeaders {
            client: self.client.clone(),
            settings: self.settings.yurthub.clone()?,
            endpoints: bound.watch_yurthub_endpoints()?,
            nodes: bound.nodes().reader(),
            gateway: gateway_name(),
        })
    }

    /// Returns the task that renews the Leases of nodes without a gateway, or warns of delegated nodes if that is disabled.
    fn heartbeats(
        &self,
        bound: &Bound,
        stop: CancellationToken,
    ) -> Pin<Box<dyn Future<Output = ()>>> {
        let Some(accepted) = bound.heartbeats() else {
            let warning = causeway_k8s::warn_about_delegated_nodes(bound.nodes());
            return Box::pin(async move {
                stop.run_until_cancelled(warning).await;
            });
        };
        let controller = causeway_k8s::HeartbeatController {
            client: self.client.clone(),
            rules: self.settings.heartbeats.clone(),
            accepted,
            nodes: bound.nodes().reader(),
            metrics: bound.metrics(),
            gateway: gateway_name(),
        };
        Box::pin(controller.run(stop))
    }

    fn hosts_controller(&self, bound: &Bound) -> Option<causeway_k8s::HostsController> {
        Some(causeway_k8s::HostsController {
            client: self.client.clone(),
            settings: self.settings.hosts.clone()?,
            addresses: self.addresses.clone(),
            nodes: bound.nodes(),
            metrics: bound.metrics(),
            gateway: gateway_name(),
        })
    }
}

/// Watches the cluster's nodes. The gateway is not ready before they are loaded.
#[cfg(feature = "k8s")]
fn run_node_informer(
    informer: causeway_k8s::NodeInformer,
    bound: &Bound,
) -> impl Future<Output = ()> + use<> {
    let nodes_block = bound.hold("the nodes of the cluster have not been loaded yet");
    let state_loaded = bound.state_loaded();
    // Nodes of the cluster are admitted only after revocations are known.
    async move {
        state_loaded.await;
        informer.run(nodes_block).await;
    }
}

/// Runs the controller if there is one, else never returns.
#[cfg(feature = "k8s")]
async fn run_or_pend(controller: Option<impl Future<Output = Infallible>>) -> Infallible {
    match controller {
        Some(controller) => controller.await,
        None => std::future::pending().await,
    }
}

/// Returns the engine that stores the shared state in Secrets, if the configuration names them.
#[cfg(feature = "k8s")]
pub(super) async fn state_engine(config: &Config) -> anyhow::Result<Option<Arc<dyn StateEngine>>> {
    let settings = config.kubernetes.as_ref();
    let named = settings.and_then(|settings| Some((settings, settings.state.as_deref()?)));
    let Some((settings, (namespace, name))) =
        named.and_then(|(settings, state)| Some((settings, state.split_once('/')?)))
    else {
        return Ok(None);
    };
    let client = causeway_k8s::build_client(settings.kubeconfig.as_deref()).await?;
    let engine = causeway_k8s::SecretEngine::new(client, namespace, name);
    Ok(Some(Arc::new(engine)))
}

/// Refuses a configured cluster, in a build without support for clusters.
#[cfg(not(feature = "k8s"))]
#[allow(clippy::unused_async, reason = "as the other build has it")]
pub(super) async fn state_engine(config: &Config) -> anyhow::Result<Option<Arc<dyn StateEngine>>> {
    KubernetesControllers::from_config(config).await?;
    Ok(None)
}

/// Returns the requester of this gateway's own certificate, if the cluster is to issue it.
#[cfg(feature = "k8s")]
fn own_certificate(
    client: &causeway_k8s::Client,
    config: &Config,
) -> anyhow::Result<Option<causeway_k8s::GatewayCertificate>> {
    let identity = config.tunnel.identity.as_ref();
    let Some((signer, domain)) =
        identity.and_then(causeway_gateway::config::Identity::certificate_request)
    else {
        return Ok(None);
    };
    Ok(Some(causeway_k8s::GatewayCertificate {
        client: client.clone(),
        signer: signer.to_owned(),
        purpose: causeway_k8s::Purpose::TunnelPort(domain),
        approve: false,
        store: Store::open(&config.data_dir, OpenMode::Create)?,
        gateway: gateway_name(),
    }))
}

/// Returns the requesters of the client certificates for apps, if the cluster is to issue them.
#[cfg(feature = "k8s")]
fn app_clients(
    client: &causeway_k8s::Client,
    config: &Config,
) -> anyhow::Result<Vec<causeway_k8s::GatewayCertificate>> {
    let apps = config.upstream_tls.iter();
    let with_signer = apps.filter_map(|(port, app)| Some((*port, app, app.signer.clone()?)));
    with_signer
        .map(|(port, app, signer)| {
            Ok(causeway_k8s::GatewayCertificate {
                client: client.clone(),
                signer,
                purpose: causeway_k8s::Purpose::AppClient(port, app.user.clone()),
                approve: app.approve,
                store: Store::open(&config.data_dir, OpenMode::Create)?,
                gateway: gateway_name(),
            })
        })
        .collect()
}

/// Returns the host's name, by which other gateways know this gateway.
#[cfg(feature = "k8s")]
fn gateway_name() -> String {
    let name = nix::unistd::gethostname().ok();
    let name = name.and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| "gateway".to_owned())
}

/// Replacement in a build without support for clusters.
#[cfg(not(feature = "k8s"))]
pub(super) struct KubernetesControllers;

#[cfg(not(feature = "k8s"))]
#[allow(
    clippy::unused_async,
    clippy::unused_self,
    reason = "as the other build has them"
)]
impl KubernetesControllers {
    pub(super) async fn from_config(config: &Config) -> anyhow::Result<Self> {
        if config.kubernetes.is_some() {
            anyhow::bail!(
                "kubernetes: this build does not support Kubernetes; build it with --features k8s"
            );
        }
        Ok(Self)
    }

    pub(super) async fn wait_for_certificate(
        &self,
        _: &Config,
        _: &(dyn Fn(&str) + Sync),
    ) -> anyhow::Result<()> {
        Ok(())
    }

    pub(super) fn attach_to(&self, gateway: Gateway) -> Gateway {
        gateway
    }

    pub(super) fn spawn_controllers(
        self,
        _: &Bound,
        _: ClusterSenders,
        _: CancellationToken,
    ) -> ControllerFuture {
        Box::pin(std::future::pending())
    }
}

/// Runs `work` while `serving` runs, and ends when `serving` ends.
pub(super) async fn run_alongside<T>(
    serving: impl Future<Output = T>,
    controllers: ControllerFuture,
) -> T {
    tokio::select! {
        outcome = serving => outcome,
        never = controllers => match never {},
    }
}
