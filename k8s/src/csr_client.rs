//! Client of `CertificateSigningRequests`: submits a request to the cluster, and polls it until there is an outcome.

use crate::client::error_message;
use causeway_certs::csr;
use causeway_edge::{CsrRequestError, CsrStatus};
use k8s_openapi::{
    ByteString,
    api::certificates::v1::{
        CertificateSigningRequest, CertificateSigningRequestCondition,
        CertificateSigningRequestSpec,
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use std::{future::Future, time::Duration};
use tokio::time::timeout;

/// Time limit of one request.
const BOUND: Duration = Duration::from_secs(10);

/// Contents of a certificate request.
#[derive(Debug)]
pub(crate) struct CsrSpec<'a> {
    /// The request's name, which is unique.
    pub(crate) name: &'a str,
    pub(crate) signer: &'a str,
    pub(crate) usages: [&'a str; 2],
    /// Requested lifetime of the certificate, unless the signer decides.
    pub(crate) seconds: Option<i32>,
    /// PKCS #10 in PEM.
    pub(crate) request: &'a str,
}

/// Submits the request, unless it exists already.
pub(crate) async fn submit(client: Client, wanted: &CsrSpec<'_>) -> Result<(), CsrRequestError> {
    let request = CertificateSigningRequest {
        metadata: ObjectMeta {
            name: Some(wanted.name.to_owned()),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(wanted.request.as_bytes().to_vec()),
            signer_name: wanted.signer.to_owned(),
            usages: Some(wanted.usages.map(str::to_owned).into()),
            expiration_seconds: wanted.seconds,
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    let api = Api::<CertificateSigningRequest>::all(client);
    let made = async {
        match api.create(&PostParams::default(), &request).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(false),
            Err(error) => Err(error),
        }
    };
    if bounded(made).await? {
        let (request, signer) = (wanted.name, wanted.signer);
        tracing::info!(request, signer, "requested a certificate from the cluster");
    }
    Ok(())
}

impl CsrSpec<'_> {
    /// Whether a request in the cluster is this one, and not another's of the same name.
    fn is(&self, request: &CertificateSigningRequestSpec) -> bool {
        let usages = request.usages.iter().flatten().map(String::as_str);
        request.signer_name == self.signer
            && usages.eq(self.usages)
            && csr::asks_the_same(&request.request.0, self.request.as_bytes())
    }
}

/// Approves the own request, unless it is approved or denied already. Returns `false` if the request of its name is another
/// requester's. An approval of that request would issue a certificate for any user that it names.
pub(crate) async fn approve(client: Client, wanted: &CsrSpec<'_>) -> Result<bool, CsrRequestError> {
    let (name, signer) = (wanted.name, wanted.signer);
    let api = Api::<CertificateSigningRequest>::all(client);
    let Some(request) = bounded(api.get_opt(name)).await? else {
        return Ok(true);
    };
    if !wanted.is(&request.spec) {
        return Ok(false);
    }
    if ["Approved", "Denied"]
        .iter()
        .any(|kind| condition(&request, kind).is_some())
    {
        return Ok(true);
    }
    let status = json!({ "conditions": [{
        "type": "Approved", "status": "True", "reason": "CausewayGateway",
        "message": "the gateway requests its own client certificate",
        "lastUpdateTime": Time(Timestamp::now()),
    }] });
    let patch = json!({
        "metadata": { "resourceVersion": request.metadata.resource_version }, "status": status,
    });
    let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
    let patched = api.patch_subresource("approval", name, &parameters, &patch);
    match bounded(patched).await {
        Ok(_) => {
            tracing::info!(
                request = name,
                signer,
                "approved this gateway's own certificate request"
            );
            Ok(true)
        }
        // The API server does not say which right is missing.
        Err(CsrRequestError::Refused(why)) if why.contains("not permitted") => {
            Err(CsrRequestError::Refused(format!(
                "{why} (the gateway needs the verb \"approve\" on resource \"signers\" named {signer} in API group \"certificates.k8s.io\")"
            )))
        }
        Err(why) => Err(why),
    }
}

/// Returns the condition of this type (`Approved`, `Denied` or `Failed`).
pub(crate) fn condition<'a>(
    request: &'a CertificateSigningRequest,
    kind: &str,
) -> Option<&'a CertificateSigningRequestCondition> {
    let conditions = request.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

/// Returns the present status of the request of this name.
pub(crate) async fn status(client: Client, name: &str) -> Result<CsrStatus, CsrRequestError> {
    let api = Api::<CertificateSigningRequest>::all(client);
    let request = bounded(api.get_opt(name)).await?;
    Ok(read(name, request))
}

pub(crate) async fn bounded<T>(
    asked: impl Future<Output = kube::Result<T>>,
) -> Result<T, CsrRequestError> {
    match timeout(BOUND, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error @ kube::Error::Api(_))) => {
            Err(CsrRequestError::Refused(error_message(&error)))
        }
        Ok(Err(error)) => Err(CsrRequestError::Silent(format!(
            "the cluster's API does not answer: {}",
            error_message(&error)
        ))),
        Err(_) => Err(CsrRequestError::Silent(
            "the cluster's API did not answer in time".to_owned(),
        )),
    }
}

fn read(name: &str, request: Option<CertificateSigningRequest>) -> CsrStatus {
    let Some(request) = request else {
        return CsrStatus::Refused(format!("the request {name} no longer exists"));
    };
    for (kind, what) in [("Denied", "was denied"), ("Failed", "has failed")] {
        if let Some(condition) = condition(&request, kind) {
            let message = condition.message.as_deref().unwrap_or_default();
            return CsrStatus::Refused(format!("the request {name} {what}: {message}"));
        }
    }
    let certificate = request
        .status
        .as_ref()
        .and_then(|status| status.certificate.as_ref());
    match certificate.filter(|certificate| !certificate.0.is_empty()) {
        Some(ByteString(chain)) => CsrStatus::Signed(String::from_utf8_lossy(chain).into_owned()),
        None if condition(&request, "Approved").is_some() => {
            CsrStatus::Waiting(format!("the request {name} is approved but not signed yet"))
        }
        None => CsrStatus::Waiting(format!(
            "the request {name} is not approved yet; if a gateway does not approve it, `kubectl describe csr {name}` shows the reason"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::PrivateKey;
    use k8s_openapi::api::certificates::v1::CertificateSigningRequestStatus;
    use kube::client::Body;
    use std::{
        future::ready,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering::SeqCst},
        },
    };

    const CLIENT: [&str; 2] = ["client auth", "digital signature"];

    #[test]
    fn the_outcome_of_a_request_is_described() {
        let request = |kinds: &[&str], certificate: &str| {
            let condition = |kind: &&str| CertificateSigningRequestCondition {
                type_: (*kind).to_owned(),
                message: Some("said so".to_owned()),
                ..CertificateSigningRequestCondition::default()
            };
            Some(CertificateSigningRequest {
                status: Some(CertificateSigningRequestStatus {
                    conditions: Some(kinds.iter().map(condition).collect()),
                    certificate: Some(ByteString(certificate.as_bytes().to_vec())),
                }),
                ..CertificateSigningRequest::default()
            })
        };
        let waits = |kinds, part: &str| match read("x", request(kinds, "")) {
            CsrStatus::Waiting(why) => assert!(why.contains(part), "{why}"),
            other => panic!("{other:?}"),
        };
        waits(&[], "x is not approved yet");
        waits(&["Approved"], "not signed yet");
        for (request, part) in [
            (request(&["Denied"], ""), "was denied: said so"),
            (request(&["Approved", "Failed"], ""), "has failed: said so"),
            (None, "no longer exists"),
        ] {
            match read("x", request) {
                CsrStatus::Refused(why) => assert!(why.contains(part), "{why}"),
                other => panic!("{other:?}"),
            }
        }
        let signed = read("x", request(&["Approved"], "PEM"));
        assert_eq!(signed, CsrStatus::Signed("PEM".to_owned()));
    }

    #[tokio::test]
    async fn a_gateway_approves_only_its_own_request() {
        let [key, others] = [(); 2].map(|()| PrivateKey::generate().unwrap());
        let request = key.request_of_user("gateway").unwrap();
        let wanted = CsrSpec {
            name: "x",
            signer: "kubernetes.io/kube-apiserver-client",
            usages: CLIENT,
            seconds: None,
            request: &request,
        };
        for (key, user, signer, own) in [
            (&key, "gateway", wanted.signer, true),
            (&key, "admin", wanted.signer, false),
            (&others, "gateway", wanted.signer, false),
            (&key, "gateway", "kubernetes.io/kubelet-serving", false),
        ] {
            let found = CertificateSigningRequest {
                spec: CertificateSigningRequestSpec {
                    request: ByteString(key.request_of_user(user).unwrap().into_bytes()),
                    signer_name: signer.to_owned(),
                    usages: Some(CLIENT.map(str::to_owned).into()),
                    ..CertificateSigningRequestSpec::default()
                },
                ..CertificateSigningRequest::default()
            };
            let patches = Arc::new(AtomicUsize::new(0));
            let count = patches.clone();
            let api = tower::service_fn(move |asked: http::Request<Body>| {
                if asked.method() == http::Method::PATCH {
                    count.fetch_add(1, SeqCst);
                }
                let answer = Body::from(serde_json::to_vec(&found).unwrap());
                ready(Ok::<_, kube::Error>(http::Response::new(answer)))
            });
            let approved = approve(Client::new(api, "it"), &wanted).await;
            assert_eq!(approved.unwrap(), own, "{user} by {signer}");
            assert_eq!(patches.load(SeqCst), usize::from(own));
        }
    }
}
