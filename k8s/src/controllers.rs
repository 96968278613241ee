//! The controllers of a gateway, built from its configuration and run together.

use crate::{
    address_conflicts::ConflictEvents,
    advertise::ServiceWatcher,
    api_cache_source::ApiCacheSource,
    client::{ClientError, build_client},
    coredns_hosts::HostsController,
    csr_controller::CsrController,
    gateway_certificate::{GatewayCertificate, Purpose},
    heartbeat::{HeartbeatController, warn_about_delegated_nodes},
    node_informer::NodeInformer,
    pod_informer::PodInformer,
    pods::PodLookup,
    port_list::PortListController,
    reviews::ReviewClient,
    yurthub_leaders::YurtHubLeaders,
};
use causeway_certs::{HostName, OpenMode, Store, StoreError};
use causeway_gateway::{
    Bound, Config, Gateway,
    config::{DiscoveredEndpoints, Kubernetes, NodePorts, ReloadSender},
};
use futures_util::future::{LocalBoxFuture, join_all};
use kube::Client;
use std::{convert::Infallible, future::Future, mem, net::IpAddr, sync::Arc};
use tokio::{join, sync::watch};
use tokio_util::sync::CancellationToken;

/// Destinations for the ports and addresses that a cluster reports.
pub struct ClusterSenders {
    /// Ports that a `ConfigMap` lists.
    pub ports: watch::Sender<Option<NodePorts>>,
    /// Endpoints at which edges reach the gateway.
    pub advertised: watch::Sender<DiscoveredEndpoints>,
    /// Trigger of a reload.
    pub reload_sender: ReloadSender,
}

/// Error of a configuration of the cluster.
#[derive(Debug, thiserror::Error)]
pub enum ControllersError {
    /// The kubeconfig is not valid.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The data directory cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Controllers of a gateway.
pub struct Controllers {
    settings: Kubernetes,
    client: Client,
    /// Name of this gateway in the cluster.
    gateway: String,
    /// Requester of this gateway's own certificate.
    own_certificate: Option<GatewayCertificate>,
    /// Requesters of the client certificates for apps.
    app_clients: Vec<GatewayCertificate>,
    /// Addresses that the hosts file gives for the nodes of edges.
    addresses: Vec<IpAddr>,
    /// Whether no other source names the gateway's address for edges.
    has_no_address: bool,
}

impl Controllers {
    /// Reads the configuration of the API client, if the configuration names a cluster. No connection is made yet. Other gateways
    /// know this one by the name `gateway`.
    ///
    /// # Errors
    /// If the kubeconfig is not valid, or the data directory cannot be opened.
    pub async fn from_config(
        config: &Config,
        gateway: String,
    ) -> Result<Option<Self>, ControllersError> {
        let Some(settings) = config.kubernetes.clone() else {
            return Ok(None);
        };
        let client = build_client(settings.kubeconfig.as_deref()).await?;
        let this_gateway = (&client, gateway.as_str());
        Ok(Some(Self {
            own_certificate: own_certificate(this_gateway, config)?,
            app_clients: app_clients(this_gateway, config)?,
            settings,
            client,
            gateway,
            addresses: config.hosts_file_addresses(),
            has_no_address: config.tunnel.advertise.is_empty(),
        }))
    }

    /// Waits for the gateway's own certificate for these names, without which a gateway cannot start, if the cluster issues it.
    pub async fn wait_for_certificate(&self, names: &[HostName], report: &(dyn Fn(&str) + Sync)) {
        if let Some(own_certificate) = &self.own_certificate {
            own_certificate.wait_for_first(names, report).await;
        }
    }

    /// Adds the lookup of pods, and the cluster's reviews of clients, to a gateway.
    pub fn attach_to(&self, gateway: Gateway) -> Gateway {
        let pods = PodLookup::new(self.client.clone());
        let reviews = ReviewClient::new(self.client.clone());
        gateway.pods(Arc::new(pods)).reviews(Arc::new(reviews))
    }

    /// Returns the task of all controllers. The gateway is not ready (`/readyz`) before the nodes are known. When `stop` is
    /// cancelled, the controller of the hosts file releases its Lease, so that no other gateway has to wait.
    pub fn into_task(
        mut self,
        bound: &Bound,
        senders: ClusterSenders,
        stop: CancellationToken,
    ) -> LocalBoxFuture<'static, Infallible> {
        let (hosts_controller, service_watcher) = (
            self.hosts_controller(bound),
            self.service_watcher(bound, &senders),
        );
        let port_list = self.port_list(bound, senders);
        let csr_controller = self.csr_controller(bound);
        let (api_cache_source, yurthub_leaders) =
            (self.api_cache_source(bound), self.yurthub_leaders(bound));
        let heartbeats = self.heartbeats(bound, stop.clone());
        let app_clients = mem::take(&mut self.app_clients).into_iter().map(|client| {
            let why =
                "the client certificate for apps (upstream_tls.*.signer) has not been issued yet";
            client.run_with_readiness_block(bound.hold(why))
        });
        let app_clients = join_all(app_clients);
        let pods = self.pod_informer(bound);
        let reloader = bound.reloader();
        let informer = NodeInformer {
            client: self.client,
            settings: self.settings,
            nodes: bound.nodes(),
            metrics: bound.metrics().kubernetes_metrics(),
        };
        let conflicts = ConflictEvents {
            client: informer.client.clone(),
            nodes: bound.nodes(),
            gateway: self.gateway,
        };
        let own = self.own_certificate;
        let nodes = run_node_informer(informer, bound);
        let hosts = async move {
            if let Some(hosts) = hosts_controller {
                hosts.run(stop).await;
            }
        };
        Box::pin(async move {
            let ((), (), (), never, ..) = join!(
                nodes,
                hosts,
                heartbeats,
                run_or_pend(port_list.map(PortListController::run)),
                run_or_pend(csr_controller.map(CsrController::run)),
                run_or_pend(service_watcher.map(ServiceWatcher::run)),
                run_or_pend(own.map(|own| own.run(|| reloader.names()))),
                run_or_pend(api_cache_source.map(ApiCacheSource::run)),
                run_or_pend(yurthub_leaders.map(YurtHubLeaders::run)),
                run_or_pend(pods),
                conflicts.run(),
                app_clients,
            );
            never
        })
    }

    /// Returns the task that follows the pods of the cluster. A gateway that is starting waits for their first list.
    fn pod_informer(&self, bound: &Bound) -> Option<impl Future<Output = Infallible> + use<>> {
        let settings = self.settings.pods.as_ref()?;
        let informer = PodInformer {
            client: self.client.clone(),
            pods: bound.nodes().pods(settings.max_pods)?,
            metrics: bound.metrics().pod_metrics(),
            readiness: bound.readiness(),
        };
        let hold = bound.hold("the pods of the cluster have not been loaded yet");
        Some(informer.run(hold))
    }

    fn port_list(&self, bound: &Bound, senders: ClusterSenders) -> Option<PortListController> {
        let port_list = self.settings.ports.clone()?;
        Some(PortListController {
            client: self.client.clone(),
            readiness: bound.readiness(),
            settings: port_list,
            ports_sender: senders.ports,
            reload_sender: senders.reload_sender,
            metrics: bound.metrics(),
            gateway: self.gateway.clone(),
            store: bound.store().clone(),
        })
    }

    /// Starts the discovery of the gateway's address. If no address is configured either, clients wait until edges can learn one.
    fn service_watcher(&self, bound: &Bound, senders: &ClusterSenders) -> Option<ServiceWatcher> {
        let service = self.settings.advertise.clone()?;
        let why = format!("Service {} has not been loaded yet", service.service);
        Some(ServiceWatcher {
            client: self.client.clone(),
            settings: service,
            discovered: senders.advertised.clone(),
            reload_sender: senders.reload_sender.clone(),
            nodes: bound.nodes(),
            readiness_block: self.has_no_address.then(|| bound.hold(why)),
        })
    }

    fn csr_controller(&self, bound: &Bound) -> Option<CsrController> {
        Some(CsrController {
            client: self.client.clone(),
            settings: self.settings.certificates.clone()?,
            signer: bound.signer(),
            roots: bound.roots(),
            nodes: bound.nodes(),
            metrics: bound.metrics(),
            gateway: self.gateway.clone(),
        })
    }

    /// Returns the source that fills the API cache of edges.
    fn api_cache_source(&self, bound: &Bound) -> Option<ApiCacheSource> {
        Some(ApiCacheSource {
            client: self.client.clone(),
            cache: bound.watch_cache()?,
        })
    }

    /// Returns the publisher that announces to YurtHubs where to read.
    fn yurthub_leaders(&self, bound: &Bound) -> Option<YurtHubLeaders> {
        Some(YurtHubLeaders {
            client: self.client.clone(),
            settings: self.settings.yurthub.clone()?,
            endpoints: bound.watch_yurthub_endpoints()?,
            nodes: bound.nodes().reader(),
            gateway: self.gateway.clone(),
        })
    }

    /// Returns the task that renews the Leases of nodes without a gateway, or warns of delegated nodes if that is disabled.
    fn heartbeats(&self, bound: &Bound, stop: CancellationToken) -> LocalBoxFuture<'static, ()> {
        let Some(accepted) = bound.heartbeats() else {
            let warning = warn_about_delegated_nodes(bound.nodes());
            return Box::pin(async move {
                stop.run_until_cancelled(warning).await;
            });
        };
        let controller = HeartbeatController {
            client: self.client.clone(),
            rules: self.settings.heartbeats.clone(),
            accepted,
            nodes: bound.nodes().reader(),
            metrics: bound.metrics(),
            gateway: self.gateway.clone(),
        };
        Box::pin(controller.run(stop))
    }

    fn hosts_controller(&self, bound: &Bound) -> Option<HostsController> {
        Some(HostsController {
            client: self.client.clone(),
            settings: self.settings.hosts.clone()?,
            addresses: self.addresses.clone(),
            nodes: bound.nodes(),
            metrics: bound.metrics(),
            gateway: self.gateway.clone(),
        })
    }
}

/// Watches the cluster's nodes. The gateway is not ready before they are loaded.
fn run_node_informer(informer: NodeInformer, bound: &Bound) -> impl Future<Output = ()> + use<> {
    let nodes_block = bound.hold("the nodes of the cluster have not been loaded yet");
    let state_loaded = bound.state_loaded();
    // Nodes of the cluster are admitted only after revocations are known.
    async move {
        state_loaded.await;
        informer.run(nodes_block).await;
    }
}

/// Runs the controller if there is one, else never returns.
async fn run_or_pend(controller: Option<impl Future<Output = Infallible>>) -> Infallible {
    match controller {
        Some(controller) => controller.await,
        None => std::future::pending().await,
    }
}

/// Returns the requester of this gateway's own certificate, if the cluster is to issue it.
fn own_certificate(
    (client, gateway): (&Client, &str),
    config: &Config,
) -> Result<Option<GatewayCertificate>, StoreError> {
    let identity = config.tunnel.identity.as_ref();
    let Some((signer, domain)) =
        identity.and_then(causeway_gateway::config::Identity::certificate_request)
    else {
        return Ok(None);
    };
    Ok(Some(GatewayCertificate {
        client: client.clone(),
        signer: signer.to_owned(),
        purpose: Purpose::TunnelPort(domain),
        approve: false,
        store: Store::open(&config.data_dir, OpenMode::Create)?,
        gateway: gateway.to_owned(),
    }))
}

/// Returns the requesters of the client certificates for apps, if the cluster is to issue them.
fn app_clients(
    (client, gateway): (&Client, &str),
    config: &Config,
) -> Result<Vec<GatewayCertificate>, StoreError> {
    let apps = config.upstream_tls.iter();
    let with_signer = apps.filter_map(|(port, app)| Some((*port, app, app.signer.clone()?)));
    with_signer
        .map(|(port, app, signer)| {
            Ok(GatewayCertificate {
                client: client.clone(),
                signer,
                purpose: Purpose::AppClient(port, app.user.clone()),
                approve: app.approve,
                store: Store::open(&config.data_dir, OpenMode::Create)?,
                gateway: gateway.to_owned(),
            })
        })
        .collect()
}
