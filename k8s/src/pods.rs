//! Lookup of the node of a pod: one request to the API for all waiting clients. Successful results are not cached.
//!
//! A pod never changes its node. But another pod may take its name on another node, while the old kubelet still runs the old
//! pod. A client that was routed by an outdated result would reach the wrong pod. An error is cached for a second, which is
//! long enough for a burst of clients and short enough for a pod that is starting.

use causeway_certs::NodeName;
use causeway_gateway::proxy::pod_route::PodLookup as Asked;
use causeway_rt::task::TaskGroup;
use causeway_rt::{Cache, CachedValue};
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use std::{borrow::Cow, fmt, sync::Arc, time::Duration};
use tokio::{runtime::Handle, sync::oneshot, time::timeout};
use tracing::info_span;

/// Period for which a failed lookup is cached.
const FAILURE_TTL: Duration = Duration::from_secs(1);
/// Maximum number of pods with a pending or failed lookup. Beyond it, more requests are sent to the API.
const MAX_CACHED_PODS: u64 = 10_000;
/// Time limit of one request; the waiting client has a time limit as well.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Namespace and name of a pod.
type PodName = (String, String);
type LookupResult = Result<NodeName, Arc<str>>;

/// Lookup of the nodes of pods.
pub(crate) struct PodLookup {
    client: Client,
    cache: Cache<PodName, LookupResult>,
    /// Runtime of the client, which sends the requests.
    runtime: Handle,
    tasks: TaskGroup,
}

impl PodLookup {
    /// Returns a lookup that uses this client, on the calling runtime.
    pub(crate) fn new(client: Client) -> Self {
        Self {
            client,
            cache: Cache::new(MAX_CACHED_PODS),
            runtime: Handle::current(),
            tasks: TaskGroup::default(),
        }
    }
}

impl fmt::Debug for PodLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PodLookup").finish_non_exhaustive()
    }
}

impl Asked for PodLookup {
    fn find_node(
        &self,
        namespace: &str,
        name: &str,
    ) -> BoxFuture<'static, Result<NodeName, Cow<'static, str>>> {
        let (result_sender, result_receiver) = oneshot::channel();
        let pod = (namespace.to_owned(), name.to_owned());
        let (cache, client) = (self.cache.clone(), self.client.clone());
        let lookup = async move {
            let fetch = async {
                let value = fetch_node(client, &pod).await;
                let ttl = ttl_of(&value);
                CachedValue { value, ttl }
            };
            // A client that has disconnected waits for no result.
            let _ = result_sender.send(cache.get_or_fetch(pod.clone(), fetch).await);
        };
        self.tasks
            .spawn_on(&self.runtime, info_span!("pod"), lookup);
        Box::pin(async move {
            match result_receiver.await {
                Ok(Ok(node)) => Ok(node),
                Ok(Err(why)) => Err(Cow::Owned(why.to_string())),
                Err(_) => Err(Cow::Borrowed("the gateway is shutting down")),
            }
        })
    }
}

async fn fetch_node(client: Client, (namespace, name): &PodName) -> LookupResult {
    let pods = Api::<Pod>::namespaced(client, namespace);
    let pod = match timeout(REQUEST_TIMEOUT, pods.get(name)).await {
        Ok(Ok(pod)) => pod,
        Ok(Err(kube::Error::Api(status))) => return Err(status.message.as_str().into()),
        Ok(Err(error)) => return Err(error.to_string().into()),
        Err(_) => return Err("the cluster's API does not answer".into()),
    };
    let node = pod.spec.and_then(|spec| spec.node_name);
    let node = node.ok_or("the pod is on no node yet")?;
    NodeName::parse(&node).map_err(|error| error.to_string().into())
}

/// Returns the period for which a result is cached for clients that did not wait for it.
fn ttl_of(result: &LookupResult) -> Duration {
    if result.is_ok() {
        Duration::ZERO
    } else {
        FAILURE_TTL
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use kube::client::Body;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    #[tokio::test(start_paused = true)]
    async fn concurrent_lookups_of_a_pod_share_one_request() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let api = tower::service_fn(move |_: Request<Body>| {
            let number = count.fetch_add(1, Relaxed) + 1;
            async move {
                tokio::time::sleep(Duration::from_millis(50)).await;
                let spec =
                    serde_json::json!({ "nodeName": format!("edge-{number}"), "containers": [] });
                let pod = serde_json::json!({ "metadata": { "name": "it" }, "spec": spec });
                Ok::<_, kube::Error>(Response::new(Body::from(pod.to_string().into_bytes())))
            }
        });
        let pods = PodLookup::new(Client::new(api, "a"));
        for (round, node) in ["edge-1", "edge-2"].into_iter().enumerate() {
            let all = (0..20).map(|_| pods.find_node("a", "it"));
            for found in futures_util::future::join_all(all).await {
                assert_eq!(found.unwrap().as_str(), node);
            }
            assert_eq!(asked.load(Relaxed), round + 1);
        }
    }
}
