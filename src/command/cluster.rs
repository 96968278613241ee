//! The cluster beside a gateway: what keeps its table of nodes in step with the API, where a cluster is configured.
//!
//! A build without the feature `k8s` refuses such a configuration: a gateway that silently knew no node would be worse.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;

use causeway_gateway::Bound;
use causeway_gateway::config::Kubernetes;

/// Runs for as long as the gateway does.
pub(super) type Work = Pin<Box<dyn Future<Output = Infallible>>>;

/// Prepares what follows the cluster's nodes; nothing is dialled before it is polled. The gateway is not ready
/// (`/readyz`) before the nodes are known.
#[cfg(feature = "k8s")]
pub(super) async fn follow(rules: Option<Kubernetes>, bound: &Bound) -> anyhow::Result<Work> {
    use causeway_k8s::{client, nodes::Informer};

    let Some(rules) = rules else {
        return Ok(Box::pin(std::future::pending()));
    };
    let informer = Informer {
        client: client::client(rules.kubeconfig.as_deref()).await?,
        rules,
        nodes: bound.nodes(),
        metrics: bound.metrics(),
    };
    let hold = bound.hold("the nodes of the cluster are not known yet");
    Ok(Box::pin(async move {
        informer.run(hold).await;
        std::future::pending().await
    }))
}

/// As above, in a build that knows no cluster.
#[cfg(not(feature = "k8s"))]
#[allow(clippy::unused_async, reason = "the other build waits here")]
pub(super) async fn follow(rules: Option<Kubernetes>, _: &Bound) -> anyhow::Result<Work> {
    if rules.is_some() {
        anyhow::bail!("kubernetes: this build knows no Kubernetes; build it with --features k8s");
    }
    Ok(Box::pin(std::future::pending()))
}

/// Does `work` beside what runs, and ends with that.
pub(super) async fn beside<T>(live: impl Future<Output = T>, work: Work) -> T {
    tokio::select! {
        outcome = live => outcome,
        never = work => match never {},
    }
}
