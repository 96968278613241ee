//! The cluster of a gateway or of an edge, if one is configured. At a gateway, controllers synchronise the table of nodes
//! with the API, and a hosts file with the table. At an edge, the cluster issues the certificate that identifies the edge.
//!
//! A build without the feature `k8s` refuses such a configuration: a gateway that silently knew no node would be worse.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use causeway_gateway::shared_state::StateEngine;
use causeway_gateway::{Bound, Config, Gateway};
#[cfg(feature = "k8s")]
pub(super) use causeway_k8s::ClusterSenders;
use tokio_util::sync::CancellationToken;
#[cfg(not(feature = "k8s"))]
use {
    causeway_gateway::config::{DiscoveredEndpoints, NodePorts, ReloadSender},
    tokio::sync::watch,
};

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

/// A cluster, if one is configured.
#[cfg(feature = "k8s")]
pub(super) struct KubernetesControllers(Option<causeway_k8s::Controllers>);

#[cfg(feature = "k8s")]
impl KubernetesControllers {
    /// Reads the configuration of the API client. No connection is made yet.
    pub(super) async fn from_config(config: &Config) -> anyhow::Result<Self> {
        let controllers = causeway_k8s::Controllers::from_config(config, gateway_name());
        Ok(Self(controllers.await?))
    }

    /// Waits for the gateway's own certificate, without which a gateway cannot start, if the cluster issues it.
    pub(super) async fn wait_for_certificate(
        &self,
        config: &Config,
        report: &(dyn Fn(&str) + Sync),
    ) -> anyhow::Result<()> {
        if let Some(controllers) = &self.0 {
            let names = causeway_gateway::server::advertised_names(config)?;
            controllers.wait_for_certificate(&names, report).await;
        }
        Ok(())
    }

    /// Adds the lookup of pods, and the cluster's reviews of clients, to a gateway.
    pub(super) fn attach_to(&self, gateway: Gateway) -> Gateway {
        match &self.0 {
            Some(controllers) => controllers.attach_to(gateway),
            None => gateway,
        }
    }

    /// Returns the task of all controllers.
    pub(super) fn into_task(
        self,
        bound: &Bound,
        senders: ClusterSenders,
        stop: CancellationToken,
    ) -> ControllerFuture {
        match self.0 {
            Some(controllers) => controllers.into_task(bound, senders, stop),
            None => Box::pin(std::future::pending()),
        }
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
    let ca = &settings.ca_secret;
    let engine = causeway_k8s::SecretEngine::new(client, namespace, name, ca);
    Ok(Some(Arc::new(engine)))
}

/// Refuses a configured cluster, in a build without support for clusters.
#[cfg(not(feature = "k8s"))]
#[allow(clippy::unused_async, reason = "as the other build has it")]
pub(super) async fn state_engine(config: &Config) -> anyhow::Result<Option<Arc<dyn StateEngine>>> {
    KubernetesControllers::from_config(config).await?;
    Ok(None)
}

/// Returns the host's name, by which other gateways know this gateway.
#[cfg(feature = "k8s")]
fn gateway_name() -> String {
    let name = nix::unistd::gethostname().ok();
    let name = name.and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| "gateway".to_owned())
}

/// Destinations for the ports and addresses that a cluster reports.
#[cfg(not(feature = "k8s"))]
#[expect(dead_code, reason = "only a cluster reports any")]
pub(super) struct ClusterSenders {
    pub(super) ports: watch::Sender<Option<NodePorts>>,
    pub(super) advertised: watch::Sender<DiscoveredEndpoints>,
    pub(super) reload_sender: ReloadSender,
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

    pub(super) fn into_task(
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
