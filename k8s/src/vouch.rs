//! An edge's side of `certificates.k8s.io`: asks the cluster for the node's certificate, with the node's own credentials.
//!
//! These are its kubelet's, or a pod's token; they are read anew for each question, since kubelet replaces its certificate,
//! and may not have any yet. What is asked for is what `certificates` approves, and nothing more.

use crate::{
    certificates::{KEY, USAGES},
    client::{client, said},
    objects::{CertificateSigningRequest, RequestSpec},
};
use causeway_certs::ClusterSubject;
use causeway_edge::{Answer, Cluster, NoAnswer, config::Kubernetes};
use futures_util::future::BoxFuture;
use k8s_openapi::{
    ByteString,
    api::{authentication::v1::SelfSubjectReview, core::v1::ConfigMap},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{Api, Client, ResourceExt, api::PostParams};
use std::{future::Future, time::Duration};
use tokio::time::timeout;

/// How long one question may take.
const BOUND: Duration = Duration::from_secs(10);
/// Life of what a signer of the cluster's own makes, in seconds: it is shown to a gateway, and not needed any more.
pub(crate) const SHOWN_WITHIN: i64 = 2 * 60 * 60;
/// Where a token of a pod says on which node that is.
pub(crate) const NODE: &str = "authentication.kubernetes.io/node-name";

/// Whom an edge asks who it is.
#[derive(Debug)]
pub struct Vouch {
    rules: Kubernetes,
}

impl Vouch {
    /// By this section of an edge's configuration.
    pub fn new(rules: Kubernetes) -> Self {
        Self { rules }
    }

    async fn client(&self) -> Result<Client, NoAnswer> {
        let client = client(self.rules.kubeconfig.as_deref()).await;
        client.map_err(|error| NoAnswer::Refused(error.to_string()))
    }
}

impl Cluster for Vouch {
    fn node(&self) -> BoxFuture<'_, Result<String, NoAnswer>> {
        Box::pin(async {
            let api = Api::<SelfSubjectReview>::all(self.client().await?);
            let (nothing, parameters) = (SelfSubjectReview::default(), PostParams::default());
            let review = bounded(api.create(&parameters, &nothing)).await?;
            named(review)
        })
    }

    fn roots(&self) -> BoxFuture<'_, Result<String, NoAnswer>> {
        Box::pin(async {
            let Kubernetes {
                namespace, name, ..
            } = &self.rules;
            let api = Api::<ConfigMap>::namespaced(self.client().await?, namespace);
            let map = bounded(api.get_opt(name)).await?;
            let data = map.and_then(|map| map.data);
            data.and_then(|mut data| data.remove(KEY)).ok_or_else(|| {
                NoAnswer::Refused(format!(
                    "there is no ConfigMap {namespace}/{name} with the key {KEY} yet: a gateway with kubernetes.certificates publishes its CA there"
                ))
            })
        })
    }

    fn ask<'a>(
        &'a self,
        node: &'a str,
        request: &'a str,
    ) -> BoxFuture<'a, Result<String, NoAnswer>> {
        Box::pin(async move {
            let short = self.subject().map(|_| SHOWN_WITHIN);
            let wanted = CertificateSigningRequest {
                metadata: ObjectMeta {
                    generate_name: Some(format!("causeway-edge-{node}-")),
                    ..ObjectMeta::default()
                },
                spec: RequestSpec {
                    request: ByteString(request.as_bytes().to_vec()),
                    signer_name: self.rules.signer.clone(),
                    usages: USAGES.map(str::to_owned).into(),
                    expiration_seconds: short,
                    ..RequestSpec::default()
                },
                status: None,
            };
            let api = Api::<CertificateSigningRequest>::all(self.client().await?);
            let made = bounded(api.create(&PostParams::default(), &wanted)).await?;
            let name = made.name_any();
            tracing::info!(
                request = name,
                signer = self.rules.signer,
                "asked the cluster for this node's certificate"
            );
            Ok(name)
        })
    }

    fn subject(&self) -> Option<ClusterSubject> {
        ClusterSubject::of(&self.rules.signer)
    }

    fn answer<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Answer, NoAnswer>> {
        Box::pin(async move {
            let api = Api::<CertificateSigningRequest>::all(self.client().await?);
            let request = bounded(api.get_opt(name)).await?;
            Ok(answer(name, request))
        })
    }
}

async fn bounded<T>(asked: impl Future<Output = kube::Result<T>>) -> Result<T, NoAnswer> {
    match timeout(BOUND, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error @ kube::Error::Api(_))) => Err(NoAnswer::Refused(said(&error))),
        Ok(Err(error)) => Err(NoAnswer::Silent(format!(
            "the cluster's API does not answer: {}",
            said(&error)
        ))),
        Err(_) => Err(NoAnswer::Silent(
            "the cluster's API does not answer in time".to_owned(),
        )),
    }
}

/// Which node somebody is, or is on.
fn named(review: SelfSubjectReview) -> Result<String, NoAnswer> {
    let user = review
        .status
        .and_then(|status| status.user_info)
        .unwrap_or_default();
    let who = user.username.unwrap_or_default();
    if let Some(node) = who.strip_prefix("system:node:") {
        return Ok(node.to_owned());
    }
    let mut extra = user.extra.unwrap_or_default();
    match extra.remove(NODE).as_deref() {
        Some([node]) => Ok(node.clone()),
        _ => Err(NoAnswer::Refused(format!(
            "to the cluster this is \"{who}\", which is no node and on none; give kubernetes.kubeconfig the file of the node's kubelet"
        ))),
    }
}

fn answer(name: &str, request: Option<CertificateSigningRequest>) -> Answer {
    let Some(request) = request else {
        return Answer::Refused(format!("the request {name} is not there any more"));
    };
    for (kind, what) in [("Denied", "was denied"), ("Failed", "has failed")] {
        if let Some(condition) = request.condition(kind) {
            return Answer::Refused(format!("the request {name} {what}: {}", condition.message));
        }
    }
    let certificate = request
        .status
        .as_ref()
        .and_then(|status| status.certificate.as_ref());
    match certificate.filter(|certificate| !certificate.0.is_empty()) {
        Some(ByteString(chain)) => Answer::Signed(String::from_utf8_lossy(chain).into_owned()),
        None if request.condition("Approved").is_some() => {
            Answer::Waiting(format!("the request {name} is approved and not signed yet"))
        }
        None => Answer::Waiting(format!(
            "the request {name} is not approved yet; `kubectl describe csr {name}` says why, if a gateway leaves it as it is"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{RequestCondition, RequestStatus};
    use k8s_openapi::api::authentication::v1::{SelfSubjectReviewStatus, UserInfo};

    fn review(who: &str, node: &[&str]) -> SelfSubjectReview {
        let node = node.iter().map(ToString::to_string).collect();
        SelfSubjectReview {
            status: Some(SelfSubjectReviewStatus {
                user_info: Some(UserInfo {
                    username: Some(who.to_owned()),
                    extra: Some([(NODE.to_owned(), node)].into()),
                    ..UserInfo::default()
                }),
            }),
            ..SelfSubjectReview::default()
        }
    }

    #[test]
    fn a_node_knows_its_name_by_its_own_credentials_or_by_a_pods_token() {
        let name = |who, node: &[&str]| named(review(who, node));
        assert_eq!(name("system:node:edge-1", &[]).unwrap(), "edge-1");
        let account = "system:serviceaccount:edges:edge";
        assert_eq!(name(account, &["edge-2"]).unwrap(), "edge-2");
        for nobody in [
            name(account, &[]),
            name("ann", &[]),
            named(SelfSubjectReview::default()),
        ] {
            let Err(NoAnswer::Refused(why)) = nobody else {
                panic!("{nobody:?}");
            };
            assert!(why.contains("kubernetes.kubeconfig"), "{why}");
        }
    }

    #[test]
    fn what_became_of_a_request_is_told_in_words() {
        let request = |kinds: &[&str], certificate: &str| {
            let condition = |kind: &&str| RequestCondition {
                kind: (*kind).to_owned(),
                message: "said so".to_owned(),
            };
            Some(CertificateSigningRequest {
                status: Some(RequestStatus {
                    conditions: kinds.iter().map(condition).collect(),
                    certificate: Some(ByteString(certificate.as_bytes().to_vec())),
                }),
                ..CertificateSigningRequest::default()
            })
        };
        let waits = |kinds, part: &str| match answer("x", request(kinds, "")) {
            Answer::Waiting(why) => assert!(why.contains(part), "{why}"),
            other => panic!("{other:?}"),
        };
        waits(&[], "x is not approved yet");
        waits(&["Approved"], "not signed yet");
        for (request, part) in [
            (request(&["Denied"], ""), "was denied: said so"),
            (request(&["Approved", "Failed"], ""), "has failed: said so"),
            (None, "not there any more"),
        ] {
            match answer("x", request) {
                Answer::Refused(why) => assert!(why.contains(part), "{why}"),
                other => panic!("{other:?}"),
            }
        }
        let signed = answer("x", request(&["Approved"], "PEM"));
        assert_eq!(signed, Answer::Signed("PEM".to_owned()));
    }
}
