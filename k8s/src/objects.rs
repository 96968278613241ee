//! Objects of the API, with no more of them than is read.
//!
//! A whole Pod or Node has hundreds of fields: reading them would cost memory with every page of a list, and the code that
//! does would be megabytes of the image. What is missing here is skipped where it is parsed. The names are those of
//! `k8s.io/api`.

use k8s_openapi::{
    ByteString, ClusterResourceScope, Metadata, NamespaceResourceScope, Resource,
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

/// Of a Service: where it is reached.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Service {
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    pub(crate) spec: ServiceSpec,
    #[serde(default)]
    pub(crate) status: ServiceStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ServiceSpec {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) ports: Vec<ServicePort>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ServicePort {
    pub(crate) name: String,
    pub(crate) port: u16,
    pub(crate) node_port: Option<u16>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ServiceStatus {
    pub(crate) load_balancer: LoadBalancer,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct LoadBalancer {
    pub(crate) ingress: Vec<Ingress>,
}

/// One of the two, as whoever runs the balancer wrote it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Ingress {
    pub(crate) ip: Option<String>,
    pub(crate) hostname: Option<String>,
}

/// Of an `EndpointSlice`: who is behind a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EndpointSlice {
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    pub(crate) address_type: String,
    pub(crate) endpoints: Option<Vec<Endpoint>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Endpoint {
    pub(crate) addresses: Vec<String>,
    pub(crate) conditions: EndpointConditions,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EndpointConditions {
    pub(crate) ready: Option<bool>,
    pub(crate) terminating: Option<bool>,
}

/// What somebody asks a signer for.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct CertificateSigningRequest {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: RequestSpec,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<RequestStatus>,
}

/// It never changes; who asks and when is the API server's word.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RequestSpec {
    /// In PEM.
    pub(crate) request: ByteString,
    pub(crate) signer_name: String,
    #[serde(default)]
    pub(crate) usages: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) expiration_seconds: Option<i64>,
    #[serde(default, skip_serializing)]
    pub(crate) username: String,
    #[serde(default, skip_serializing)]
    pub(crate) groups: Vec<String>,
    #[serde(default, skip_serializing)]
    pub(crate) extra: BTreeMap<String, Vec<String>>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct RequestStatus {
    #[serde(default)]
    pub(crate) conditions: Vec<RequestCondition>,
    /// In PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) certificate: Option<ByteString>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct RequestCondition {
    /// `Approved`, `Denied` or `Failed`.
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default)]
    pub(crate) message: String,
}

impl CertificateSigningRequest {
    /// Its condition of this kind.
    pub(crate) fn condition(&self, kind: &str) -> Option<&RequestCondition> {
        let conditions = &self.status.as_ref()?.conditions;
        conditions.iter().find(|condition| condition.kind == kind)
    }
}

/// What an API of v1 wants to know of a kind to ask for it.
macro_rules! kinds {
    ($($kind:ident at $path:literal of $group:literal, $api:literal in $scope:ty;)*) => {$(
        impl Resource for $kind {
            const API_VERSION: &'static str = $api;
            const GROUP: &'static str = $group;
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
    Node at "nodes" of "", "v1" in ClusterResourceScope;
    Pod at "pods" of "", "v1" in NamespaceResourceScope;
    Service at "services" of "", "v1" in NamespaceResourceScope;
    EndpointSlice at "endpointslices" of "discovery.k8s.io", "discovery.k8s.io/v1" in NamespaceResourceScope;
    CertificateSigningRequest at "certificatesigningrequests" of "certificates.k8s.io", "certificates.k8s.io/v1"
        in ClusterResourceScope;
}
