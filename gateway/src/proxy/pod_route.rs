//! Routing by pod, if nothing else in a kube-apiserver's request names a node.
//!
//! Without `--kubelet-certificate-authority`, the upgrades of a kube-apiserver carry no SNI, and the kube-apiserver's own Host.
//! Then only the path names the target, `/exec/NAMESPACE/POD/CONTAINER` and similar paths (kubelet's API). Another service
//! returns the node of the pod, and the gateway waits for it with a timeout: one of the two waits that the request path permits.
//! The lookup serves only identified clients, and only at listeners for kube-apiservers.

use super::route::Route;
use crate::{
    error::{Error, Reason},
    state::Nodes,
};
use causeway_certs::NodeName;
use causeway_tunnel::Target;
use futures_util::future::BoxFuture;
use std::{borrow::Cow, fmt::Debug, time::Duration};

/// Lookup of the node of a pod.
pub trait PodLookup: Debug + Send + Sync + 'static {
    /// Returns the node of the pod with this namespace and name, or the reason why it is unknown.
    fn find_node(
        &self,
        namespace: &str,
        name: &str,
    ) -> BoxFuture<'static, Result<NodeName, Cow<'static, str>>>;
}

/// Input of a lookup.
#[derive(Clone, Copy, Debug)]
pub(super) struct PodRouting<'a> {
    pub(super) lookup: &'a dyn PodLookup,
    pub(super) nodes: &'a Nodes,
    /// Node port of the requests to this listener.
    pub(super) port: Option<u16>,
    /// Maximum time of a lookup.
    pub(super) bound: Duration,
}

/// Returns the result in `routed`, or the route to the pod that the path names.
///
/// # Errors
/// The reason why there is no route.
pub(super) async fn or_route(
    pods: Option<PodRouting<'_>>,
    path: &str,
    routed: Result<Route, Error>,
) -> Result<Route, Error> {
    let error = match routed {
        Ok(route) => return Ok(route),
        Err(error) => error,
    };
    let pods = pods.filter(|_| error.reason == Reason::NodeUnknown);
    let (Some(pods), Some((namespace, name))) = (pods, pod_of_path(path)) else {
        return Err(error);
    };
    let bound = pods.bound;
    let node = match tokio::time::timeout(bound, pods.lookup.find_node(namespace, name)).await {
        Ok(Ok(found)) => found,
        Ok(Err(reason)) => {
            let detail = format!("the node of pod {namespace}/{name} could not be found: {reason}");
            return Err(Reason::NodeUnknown.error(detail));
        }
        Err(_) => {
            let detail =
                format!("the node of pod {namespace}/{name} was not found within {bound:?}");
            return Err(Reason::DependencyUnavailable.error(detail));
        }
    };
    // A cloud node never has a tunnel.
    let Some(node) = pods.nodes.by_name(node.as_str()) else {
        let detail = format!("pod {namespace}/{name} is on {node}, which is not an edge node");
        return Err(Reason::NodeUnknown.error(detail));
    };
    let port = pods.port.ok_or(error)?;
    let target = Target::new(&node, port);
    Ok(Route::new(node, target))
}

/// Returns the namespace and name of the pod in a path of kubelet's API.
fn pod_of_path(path: &str) -> Option<(&str, &str)> {
    let mut parts = path.strip_prefix('/')?.split('/');
    let api = parts.next()?;
    if !["exec", "attach", "portForward", "containerLogs"].contains(&api) {
        return None;
    }
    let (namespace, name) = (parts.next()?, parts.next()?);
    (is_name(namespace) && is_name(name)).then_some((namespace, name))
}

/// Whether the text is a name of a Kubernetes pod (RFC 1123), which has no special meaning in a path.
fn is_name(text: &str) -> bool {
    let is_name_byte =
        |each: u8| each.is_ascii_lowercase() || each.is_ascii_digit() || b"-.".contains(&each);
    let is_alphanumeric = |each: Option<&u8>| each.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 253
        && bytes.iter().copied().all(is_name_byte)
        && is_alphanumeric(bytes.first())
        && is_alphanumeric(bytes.last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_kubelets_api_means_a_pod_and_no_other_path_does() {
        for path in [
            "/exec/default/web-1/app",
            "/attach/default/web-1/app",
            "/portForward/default/web-1",
            "/containerLogs/default/web-1/app",
            "/exec/default/web-1/0f3c/app",
        ] {
            assert_eq!(pod_of_path(path), Some(("default", "web-1")), "{path}");
        }
        for path in [
            "/",
            "/pods",
            "/exec",
            "/exec/default",
            "/exec//web-1",
            "/exec/default/",
            "/exec/../web-1",
            "/exec/default/..",
            "/exec/default/%2e%2e/x",
            "/exec/default/Web",
            "/run/default/web-1/app",
            "/execs/default/web-1",
            "exec/default/web-1",
        ] {
            assert_eq!(pod_of_path(path), None, "{path}");
        }
    }
}
