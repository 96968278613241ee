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

impl Resource for Node {
    const API_VERSION: &'static str = "v1";
    const GROUP: &'static str = "";
    const KIND: &'static str = "Node";
    const VERSION: &'static str = "v1";
    const URL_PATH_SEGMENT: &'static str = "nodes";
    type Scope = ClusterResourceScope;
}

impl Metadata for Node {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
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

impl Resource for Pod {
    const API_VERSION: &'static str = "v1";
    const GROUP: &'static str = "";
    const KIND: &'static str = "Pod";
    const VERSION: &'static str = "v1";
    const URL_PATH_SEGMENT: &'static str = "pods";
    type Scope = NamespaceResourceScope;
}

impl Metadata for Pod {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
