//! The cluster beside a gateway: what keeps its table of nodes in step with the API, where a cluster is configured.
//!
//! A build without the feature `k8s` refuses such a configuration: a gateway that silently knew no node would be worse.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;

use causeway_gateway::config::Kubernetes;
use causeway_gateway::{Bound, Gateway};

/// Runs for as long as the gateway does.
pub(super) type Work = Pin<Box<dyn Future<Output = Infallible>>>;

/// A cluster, if one is configured.
#[cfg(feature = "k8s")]
pub(super) struct Cluster(Option<(Kubernetes, causeway_k8s::Client)>);

#[cfg(feature = "k8s")]
impl Cluster {
    /// Reads how its API is reached; nothing is dialled.
    pub(super) async fn read(rules: Option<Kubernetes>) -> anyhow::Result<Self> {
        let Some(rules) = rules else {
            return Ok(Self(None));
        };
        let client = causeway_k8s::client(rules.kubeconfig.as_deref()).await?;
        Ok(Self(Some((rules, client))))
    }

    /// A gateway that asks it where pods are, and about callers.
    pub(super) fn beside(&self, gateway: Gateway) -> Gateway {
        match &self.0 {
            Some((_, client)) => {
                let pods = causeway_k8s::Pods::new(client.clone());
                let reviews = causeway_k8s::Reviews::new(client.clone());
                let gateway = gateway.pods(std::sync::Arc::new(pods));
                gateway.reviews(std::sync::Arc::new(reviews))
            }
            None => gateway,
        }
    }

    /// What follows its nodes, once it is polled. The gateway is not ready (`/readyz`) before they are known.
    pub(super) fn follow(self, bound: &Bound) -> Work {
        let Some((rules, client)) = self.0 else {
            return Box::pin(std::future::pending());
        };
        let informer = causeway_k8s::Informer {
            client,
            rules,
            nodes: bound.nodes(),
            metrics: bound.metrics(),
        };
        let hold = bound.hold("the nodes of the cluster are not known yet");
        Box::pin(async move {
            informer.run(hold).await;
            std::future::pending().await
        })
    }
}

/// As above, in a build that knows no cluster.
#[cfg(not(feature = "k8s"))]
pub(super) struct Cluster;

#[cfg(not(feature = "k8s"))]
#[allow(
    clippy::unused_async,
    clippy::unused_self,
    reason = "as the other build has them"
)]
impl Cluster {
    pub(super) async fn read(rules: Option<Kubernetes>) -> anyhow::Result<Self> {
        if rules.is_some() {
            anyhow::bail!(
                "kubernetes: this build knows no Kubernetes; build it with --features k8s"
            );
        }
        Ok(Self)
    }

    pub(super) fn beside(&self, gateway: Gateway) -> Gateway {
        gateway
    }

    pub(super) fn follow(self, _: &Bound) -> Work {
        Box::pin(std::future::pending())
    }
}

/// Does `work` beside what runs, and ends with that.
pub(super) async fn beside<T>(live: impl Future<Output = T>, work: Work) -> T {
    tokio::select! {
        outcome = live => outcome,
        never = work => match never {},
    }
}
