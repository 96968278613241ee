//! An edge's side of `certificates.k8s.io`: requests the node's certificate from the cluster, with the node's own
//! credentials.
//!
//! The credentials are those of its kubelet, or a pod's token. They are read again for each request, since kubelet replaces
//! its certificate, and may not have one yet. The request is exactly the one that `csr_controller` approves.

use crate::{
    client::build_client,
    csr_client::{
        self, CA_BUNDLE_KEY, CERTIFICATE_SECONDS, CSR_USAGES, CsrSpec, POD_NODE_KEY, with_timeout,
    },
};
use causeway_certs::SignerProfile;
use causeway_edge::{CsrClient, CsrRequestError, CsrStatus, config::Kubernetes};
use futures_util::future::BoxFuture;
use k8s_openapi::api::{authentication::v1::SelfSubjectReview, core::v1::ConfigMap};
use kube::{Api, Client, api::PostParams};

/// Client by which an edge requests its identity from its cluster.
#[derive(Debug)]
pub struct NodeCsrClient {
    rules: Kubernetes,
}

impl NodeCsrClient {
    /// Returns a client for this section of an edge's configuration.
    pub fn new(settings: Kubernetes) -> Self {
        Self { rules: settings }
    }

    async fn client(&self) -> Result<Client, CsrRequestError> {
        let client = build_client(self.rules.kubeconfig.as_deref()).await;
        client.map_err(|error| CsrRequestError::Refused(error.to_string()))
    }
}

impl CsrClient for NodeCsrClient {
    fn node_name(&self) -> BoxFuture<'_, Result<String, CsrRequestError>> {
        Box::pin(async {
            let api = Api::<SelfSubjectReview>::all(self.client().await?);
            let (empty_review, parameters) = (SelfSubjectReview::default(), PostParams::default());
            let review = with_timeout(api.create(&parameters, &empty_review)).await?;
            node_of_user(review)
        })
    }

    fn roots(&self) -> BoxFuture<'_, Result<String, CsrRequestError>> {
        Box::pin(async {
            let Kubernetes {
                namespace, name, ..
            } = &self.rules;
            let api = Api::<ConfigMap>::namespaced(self.client().await?, namespace);
            let map = with_timeout(api.get_opt(name)).await?;
            let data = map.and_then(|map| map.data);
            data.and_then(|mut data| data.remove(CA_BUNDLE_KEY)).ok_or_else(|| {
                CsrRequestError::Refused(format!(
                    "there is no ConfigMap {namespace}/{name} with the key {CA_BUNDLE_KEY} yet: a gateway with kubernetes.certificates publishes its CA there"
                ))
            })
        })
    }

    fn submit<'a>(
        &'a self,
        name: &'a str,
        request: &'a str,
    ) -> BoxFuture<'a, Result<(), CsrRequestError>> {
        Box::pin(async move {
            let spec = CsrSpec {
                name,
                signer: &self.rules.signer,
                usages: CSR_USAGES,
                expiration_seconds: self.signer_profile().map(|_| CERTIFICATE_SECONDS),
                request_pem: request,
            };
            csr_client::submit(self.client().await?, &spec).await
        })
    }

    fn signer_profile(&self) -> Option<SignerProfile> {
        SignerProfile::from_signer_name(&self.rules.signer)
    }

    fn request_status<'a>(
        &'a self,
        name: &'a str,
    ) -> BoxFuture<'a, Result<CsrStatus, CsrRequestError>> {
        Box::pin(async move { csr_client::poll_status(self.client().await?, name).await })
    }
}

/// Returns the node of a user: the user is the node itself, or a pod on it.
fn node_of_user(review: SelfSubjectReview) -> Result<String, CsrRequestError> {
    let user = review
        .status
        .and_then(|status| status.user_info)
        .unwrap_or_default();
    let username = user.username.unwrap_or_default();
    if let Some(node) = username.strip_prefix("system:node:") {
        return Ok(node.to_owned());
    }
    let mut extra = user.extra.unwrap_or_default();
    match extra.remove(POD_NODE_KEY).as_deref() {
        Some([node]) => Ok(node.clone()),
        _ => Err(CsrRequestError::Refused(format!(
            "the cluster identifies this edge as \"{username}\", which is neither a node nor a pod on a node; set kubernetes.kubeconfig to the file of the node's kubelet"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::authentication::v1::{SelfSubjectReviewStatus, UserInfo};

    fn review(who: &str, node: &[&str]) -> SelfSubjectReview {
        let node = node.iter().map(ToString::to_string).collect();
        SelfSubjectReview {
            status: Some(SelfSubjectReviewStatus {
                user_info: Some(UserInfo {
                    username: Some(who.to_owned()),
                    extra: Some([(POD_NODE_KEY.to_owned(), node)].into()),
                    ..UserInfo::default()
                }),
            }),
            ..SelfSubjectReview::default()
        }
    }

    #[test]
    fn a_node_name_comes_from_node_credentials_or_a_pod_token() {
        let name = |who, node: &[&str]| node_of_user(review(who, node));
        assert_eq!(name("system:node:edge-1", &[]).unwrap(), "edge-1");
        let account = "system:serviceaccount:edges:edge";
        assert_eq!(name(account, &["edge-2"]).unwrap(), "edge-2");
        for nobody in [
            name(account, &[]),
            name("ann", &[]),
            node_of_user(SelfSubjectReview::default()),
        ] {
            let Err(CsrRequestError::Refused(why)) = nobody else {
                panic!("{nobody:?}");
            };
            assert!(why.contains("kubernetes.kubeconfig"), "{why}");
        }
    }
}
