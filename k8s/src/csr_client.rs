//! Client of `CertificateSigningRequests`: submits a request to the cluster, and polls it until there is an outcome.
//!
//! The constants are the agreement between edges, which request certificates (`node_csr`), and the gateway, which validates
//! and signs the requests (`csr_controller`).

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

/// Usages that edges need, since they sign a handshake as clients.
pub(crate) const CSR_USAGES: [&str; 2] = ["client auth", "digital signature"];
/// Lifetime of a certificate of the cluster's own signer, in seconds. The edge presents it once to a gateway and does not
/// need it any more.
pub(crate) const CERTIFICATE_SECONDS: i32 = 2 * 60 * 60;
/// Key in a pod's token under which the API reports the pod's node.
pub(crate) const POD_NODE_KEY: &str = "authentication.kubernetes.io/node-name";
/// Key of the roots in the `ConfigMap`, as Kubernetes itself names it in `kube-root-ca.crt`.
pub(crate) const CA_BUNDLE_KEY: &str = "ca.crt";

/// Time limit of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Contents of a certificate request.
#[derive(Debug)]
pub(crate) struct CsrSpec<'a> {
    /// Unique name of the request.
    pub(crate) name: &'a str,
    pub(crate) signer: &'a str,
    pub(crate) usages: [&'a str; 2],
    /// Requested lifetime of the certificate, unless the signer decides.
    pub(crate) expiration_seconds: Option<i32>,
    /// PKCS #10 in PEM.
    pub(crate) request_pem: &'a str,
}

/// Submits the request, unless it exists already.
pub(crate) async fn submit(client: Client, spec: &CsrSpec<'_>) -> Result<(), CsrRequestError> {
    let request = CertificateSigningRequest {
        metadata: ObjectMeta {
            name: Some(spec.name.to_owned()),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(spec.request_pem.as_bytes().to_vec()),
            signer_name: spec.signer.to_owned(),
            usages: Some(spec.usages.map(str::to_owned).into()),
            expiration_seconds: spec.expiration_seconds,
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    let api = Api::<CertificateSigningRequest>::all(client);
    let creation = async {
        match api.create(&PostParams::default(), &request).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(false),
            Err(error) => Err(error),
        }
    };
    if with_timeout(creation).await? {
        let (request, signer) = (spec.name, spec.signer);
        tracing::info!(request, signer, "requested a certificate from the cluster");
    }
    Ok(())
}

impl CsrSpec<'_> {
    /// Whether a request in the cluster is equal to this one, and not another request with the same name.
    fn matches(&self, request: &CertificateSigningRequestSpec) -> bool {
        let usages = request.usages.iter().flatten().map(String::as_str);
        request.signer_name == self.signer
            && usages.eq(self.usages)
            && csr::is_same_request(&request.request.0, self.request_pem.as_bytes())
    }
}

/// Approves our own request, unless it is approved or denied already. Returns `false` if the request with this name has
/// another requester. An approval of that request would issue a certificate for any user that it names.
pub(crate) async fn approve(client: Client, spec: &CsrSpec<'_>) -> Result<bool, CsrRequestError> {
    let (name, signer) = (spec.name, spec.signer);
    let api = Api::<CertificateSigningRequest>::all(client);
    let Some(request) = with_timeout(api.get_opt(name)).await? else {
        return Ok(true);
    };
    if !spec.matches(&request.spec) {
        return Ok(false);
    }
    if ["Approved", "Denied"]
        .iter()
        .any(|condition_type| find_condition(&request, condition_type).is_some())
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
    match with_timeout(patched).await {
        Ok(_) => {
            tracing::info!(
                request = name,
                signer,
                "approved this gateway's own certificate request"
            );
            Ok(true)
        }
        // The API server does not report which permission is missing.
        Err(CsrRequestError::Refused(why)) if why.contains("not permitted") => {
            Err(CsrRequestError::Refused(format!(
                "{why} (the gateway needs the verb \"approve\" on resource \"signers\" named {signer} in API group \"certificates.k8s.io\")"
            )))
        }
        Err(why) => Err(why),
    }
}

/// Returns the condition of this type (`Approved`, `Denied` or `Failed`).
pub(crate) fn find_condition<'a>(
    request: &'a CertificateSigningRequest,
    condition_type: &str,
) -> Option<&'a CertificateSigningRequestCondition> {
    let conditions = request.status.as_ref()?.conditions.as_ref()?;
    conditions
        .iter()
        .find(|condition| condition.type_ == condition_type)
}

/// Returns the present status of the request of this name.
pub(crate) async fn poll_status(client: Client, name: &str) -> Result<CsrStatus, CsrRequestError> {
    let api = Api::<CertificateSigningRequest>::all(client);
    let request = with_timeout(api.get_opt(name)).await?;
    Ok(parse_status(name, request))
}

pub(crate) async fn with_timeout<T>(
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, CsrRequestError> {
    match timeout(REQUEST_TIMEOUT, request).await {
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

fn parse_status(name: &str, request: Option<CertificateSigningRequest>) -> CsrStatus {
    let Some(request) = request else {
        return CsrStatus::Refused(format!("the request {name} no longer exists"));
    };
    for (condition_type, outcome) in [("Denied", "was denied"), ("Failed", "has failed")] {
        if let Some(condition) = find_condition(&request, condition_type) {
            let message = condition.message.as_deref().unwrap_or_default();
            return CsrStatus::Refused(format!("the request {name} {outcome}: {message}"));
        }
    }
    let certificate = request
        .status
        .as_ref()
        .and_then(|status| status.certificate.as_ref());
    match certificate.filter(|certificate| !certificate.0.is_empty()) {
        Some(ByteString(chain)) => CsrStatus::Signed(String::from_utf8_lossy(chain).into_owned()),
        None if find_condition(&request, "Approved").is_some() => {
            CsrStatus::Pending(format!("the request {name} is approved but not signed yet"))
        }
        None => CsrStatus::Pending(format!(
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
        let waits = |kinds, part: &str| match parse_status("x", request(kinds, "")) {
            CsrStatus::Pending(why) => assert!(why.contains(part), "{why}"),
            other => panic!("{other:?}"),
        };
        waits(&[], "x is not approved yet");
        waits(&["Approved"], "not signed yet");
        for (request, part) in [
            (request(&["Denied"], ""), "was denied: said so"),
            (request(&["Approved", "Failed"], ""), "has failed: said so"),
            (None, "no longer exists"),
        ] {
            match parse_status("x", request) {
                CsrStatus::Refused(why) => assert!(why.contains(part), "{why}"),
                other => panic!("{other:?}"),
            }
        }
        let signed = parse_status("x", request(&["Approved"], "PEM"));
        assert_eq!(signed, CsrStatus::Signed("PEM".to_owned()));
    }

    #[tokio::test]
    async fn a_gateway_approves_only_its_own_request() {
        let [key, others] = [(); 2].map(|()| PrivateKey::generate().unwrap());
        let request = key.user_request("gateway").unwrap();
        let wanted = CsrSpec {
            name: "x",
            signer: "kubernetes.io/kube-apiserver-client",
            usages: CLIENT,
            expiration_seconds: None,
            request_pem: &request,
        };
        for (key, user, signer, own) in [
            (&key, "gateway", wanted.signer, true),
            (&key, "admin", wanted.signer, false),
            (&others, "gateway", wanted.signer, false),
            (&key, "gateway", "kubernetes.io/kubelet-serving", false),
        ] {
            let found = CertificateSigningRequest {
                spec: CertificateSigningRequestSpec {
                    request: ByteString(key.user_request(user).unwrap().into_bytes()),
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
