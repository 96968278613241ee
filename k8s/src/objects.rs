//! Objects of the API, with no more of them than is read.
//!
//! A whole Pod or Node has hundreds of fields: reading them would cost memory with every page of a list, and the code that
//! does would be megabytes of the image. What is missing here is skipped where it is parsed. The names are those of
//! `k8s.io/api/core/v1`.

use k8s_openapi::{
    ClusterResourceScope, Metadata, NamespaceResourceScope, Resource,
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde::Deserialize;

/// Of a Node: where it is.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Node {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: Option<NodeSpec>,
    pub(crate) status: Option<NodeStatus>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct NodeSpec {
    #[serde(rename = "podCIDRs")]
    pub(crate) pod_cidrs: Option<Vec<String>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct NodeStatus {
    pub(crate) addresses: Option<Vec<NodeAddress>>,
}

/// As the node's kubelet wrote it: nothing of it is believed yet.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct NodeAddress {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) address: String,
}

/// Of a Pod: its node.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Pod {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: Option<PodSpec>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct PodSpec {
    #[serde(rename = "nodeName")]
    pub(crate) node_name: Option<String>,
}

/// Of a Service: its version.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Service {
    pub(crate) metadata: ObjectMeta,
}

/// What an API of v1 wants to know of a kind to ask for it.
macro_rules! kinds {
    ($($kind:ident at $path:literal in $scope:ty;)*) => {$(
        impl Resource for $kind {
            const API_VERSION: &'static str = "v1";
            const GROUP: &'static str = "";
            const KIND: &'static str = stringify!($kind);
            const VERSION: &'static str = "v1";
            const URL_PATH_SEGMENT: &'static str = $path;
            type Scope = $scope;
        }

        impl Metadata for $kind {
            type Ty = ObjectMeta;

            fn metadata(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn metadata_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    )*};
}

kinds! {
    Node at "nodes" in ClusterResourceScope;
    Pod at "pods" in NamespaceResourceScope;
    Service at "services" in NamespaceResourceScope;
}
