//! Validation of a request: it must be exactly the one that a node may make. A pure function of the request and the
//! configuration.
//!
//! The requester is the identity that the API server has authenticated, never a claim in the request. It is a node's own
//! credentials, or the token of a service account that was given to a pod on that node. A request for more or less than an
//! edge needs is invalid: the gateway approves no request that a person should examine.

use crate::csr_client::{CERTIFICATE_SECONDS, CSR_USAGES, POD_NODE_KEY};
use causeway_certs::{NodeName, VerifiedPublicKey};
use causeway_gateway::{config::CsrSigning, control::signer::Signer};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use rustls_pki_types::{CertificateSigningRequestDer, pem::PemObject};
use std::time::Duration;

/// A valid request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ValidCsr {
    /// Node that requests the certificate for itself.
    pub(super) node: NodeName,
    /// The request in DER.
    pub(super) request: Vec<u8>,
    /// Requested lifetime of the certificate, if any.
    pub(super) lifetime: Option<Duration>,
}

pub(super) fn validate(
    csr: &CertificateSigningRequest,
    settings: &CsrSigning,
    signer: &Signer,
) -> Result<ValidCsr, String> {
    let node = requesting_node(csr, &settings.service_accounts)?;
    let request = decode_request(csr)?;
    let (key_result, lifetime) = match settings.subject() {
        Some(subject) => (
            VerifiedPublicKey::verify_subject(&request, subject, &node),
            requested_lifetime(csr)?,
        ),
        None => (
            signer.verify_request(&request, &node),
            granted_lifetime(csr, signer.max_lifetime())?,
        ),
    };
    check_usages(csr)?;
    key_result.map_err(|error| error.to_string())?;
    Ok(ValidCsr {
        node,
        request,
        lifetime,
    })
}

/// Whether a request is an edge's, because the cluster's own signers also receive other requests.
pub(super) fn is_edge_request(csr: &CertificateSigningRequest, settings: &CsrSigning) -> bool {
    let request = decode_request(csr).unwrap_or_default();
    let subject = settings.subject();
    subject.is_none_or(|subject| subject.is_edge_request(&request))
}

/// Returns the request in DER.
fn decode_request(csr: &CertificateSigningRequest) -> Result<Vec<u8>, String> {
    let request = CertificateSigningRequestDer::from_pem_slice(&csr.spec.request.0);
    let request =
        request.map_err(|error| format!("the certificate request is not valid PEM: {error:?}"))?;
    Ok(request.to_vec())
}

/// Returns the node that sent the request.
fn requesting_node(
    csr: &CertificateSigningRequest,
    accounts: &[String],
) -> Result<NodeName, String> {
    let spec = &csr.spec;
    let username = spec.username.as_deref().unwrap_or_default();
    let name = if let Some(name) = username.strip_prefix("system:node:") {
        if !spec
            .groups
            .iter()
            .flatten()
            .any(|group| group == "system:nodes")
        {
            return Err(format!(
                "{username} is not in the group system:nodes, so it is not a node"
            ));
        }
        name
    } else {
        let account = username
            .strip_prefix("system:serviceaccount:")
            .unwrap_or_default();
        let account = account.replacen(':', "/", 1);
        if !accounts.contains(&account) {
            return Err(format!(
                "the requester is \"{username}\": neither a node nor listed in kubernetes.certificates.service_accounts"
            ));
        }
        let extra = spec
            .extra
            .as_ref()
            .and_then(|extra| extra.get(POD_NODE_KEY));
        match extra.map(Vec::as_slice) {
            Some([name]) => name,
            _ => {
                return Err(format!(
                    "the token of {username} does not name its node: it must be the token of a pod, and the cluster must be version 1.32 or newer"
                ));
            }
        }
    };
    match NodeName::parse(name) {
        Ok(node) if node.as_str() == name => Ok(node),
        Ok(_) => Err(format!("the node's name \"{name}\" is not in lower case")),
        Err(error) => Err(error.to_string()),
    }
}

fn check_usages(csr: &CertificateSigningRequest) -> Result<(), String> {
    let mut usages: Vec<&str> = csr
        .spec
        .usages
        .iter()
        .flatten()
        .map(String::as_str)
        .collect();
    usages.sort_unstable();
    if usages == CSR_USAGES {
        return Ok(());
    }
    Err(format!(
        "it requests the usages {}; the certificate of an edge has {}",
        usages.join(", "),
        CSR_USAGES.join(", ")
    ))
}

fn granted_lifetime(
    csr: &CertificateSigningRequest,
    max_lifetime: Duration,
) -> Result<Option<Duration>, String> {
    let Some(seconds) = csr.spec.expiration_seconds else {
        return Ok(None);
    };
    let lifetime = Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
    if lifetime.is_zero() || lifetime > max_lifetime {
        return Err(format!(
            "it requests a lifetime of {seconds} s; the certificate of an edge is valid for at most {} s (tunnel.edge_certificate_lifetime)",
            max_lifetime.as_secs()
        ));
    }
    Ok(Some(lifetime))
}

/// Returns the requested lifetime. Without one, the cluster's signer issues for a year.
fn requested_lifetime(csr: &CertificateSigningRequest) -> Result<Option<Duration>, String> {
    match csr.spec.expiration_seconds {
        Some(1..=CERTIFICATE_SECONDS) => Ok(None),
        other => Err(format!(
            "it requests a lifetime of {} s; an edge uses the cluster's certificate only once, so its lifetime is at most {CERTIFICATE_SECONDS} s",
            other.map_or_else(|| "unlimited".to_owned(), |seconds| seconds.to_string())
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::certificates::v1::CertificateSigningRequestSpec as Spec;

    fn asked(username: &str, groups: &[&str]) -> CertificateSigningRequest {
        CertificateSigningRequest {
            spec: Spec {
                username: Some(username.to_owned()),
                groups: Some(groups.iter().map(ToString::to_string).collect()),
                usages: Some(vec![
                    "digital signature".to_owned(),
                    "client auth".to_owned(),
                ]),
                ..Spec::default()
            },
            ..CertificateSigningRequest::default()
        }
    }

    fn refused(asked: &CertificateSigningRequest) -> String {
        requesting_node(asked, &["edges/edge".to_owned()]).unwrap_err()
    }

    #[test]
    fn a_node_is_identified_by_the_api_server_user() {
        let kubelet = asked(
            "system:node:edge-1",
            &["system:nodes", "system:authenticated"],
        );
        assert_eq!(requesting_node(&kubelet, &[]).unwrap().as_str(), "edge-1");
        let outside = asked("system:node:edge-1", &["system:authenticated"]);
        assert!(refused(&outside).contains("system:nodes"));
        for who in [
            "alice",
            "system:node",
            "system:masters",
            "system:serviceaccount:edges:other",
            "",
        ] {
            let message = refused(&asked(who, &["system:nodes"]));
            assert!(message.contains(&format!("\"{who}\"")), "{message}");
        }
        let nameless = asked("system:node:", &["system:nodes"]);
        assert!(refused(&nameless).contains("empty"));
        let loud = asked("system:node:Edge-1", &["system:nodes"]);
        assert!(refused(&loud).contains("lower case"));
    }

    #[test]
    fn a_service_account_represents_the_node_of_its_bound_token() {
        let mut pod = asked("system:serviceaccount:edges:edge", &[]);
        assert!(refused(&pod).contains("does not name its node"));
        pod.spec.extra = Some([(POD_NODE_KEY.to_owned(), vec!["edge-2".to_owned()])].into());
        let accounts = ["edges/edge".to_owned()];
        assert_eq!(requesting_node(&pod, &accounts).unwrap().as_str(), "edge-2");
        let two = vec!["edge-1".to_owned(), "edge-2".to_owned()];
        pod.spec.extra = Some([(POD_NODE_KEY.to_owned(), two)].into());
        assert!(refused(&pod).contains("does not name its node"));
        assert!(
            requesting_node(&pod, &[])
                .unwrap_err()
                .contains("service_accounts")
        );
        // An account with the same name in a similarly named namespace is a different account.
        let alike = asked("system:serviceaccount:edges/edge", &[]);
        assert!(requesting_node(&alike, &accounts).is_err());
    }

    #[test]
    fn certificates_of_the_cluster_signer_last_for_hours_only() {
        let mut csr = asked("", &[]);
        for (seconds, fits) in [
            (None, false),
            (Some(0), false),
            (Some(CERTIFICATE_SECONDS), true),
            (Some(CERTIFICATE_SECONDS + 1), false),
        ] {
            csr.spec.expiration_seconds = seconds;
            assert_eq!(requested_lifetime(&csr).is_ok(), fits, "{seconds:?}");
        }
    }

    #[test]
    fn usages_must_match_an_edge_and_lifetimes_are_capped() {
        let mut csr = asked("", &[]);
        check_usages(&csr).unwrap();
        csr.spec
            .usages
            .as_mut()
            .unwrap()
            .push("server auth".to_owned());
        assert!(check_usages(&csr).unwrap_err().contains("server auth"));
        csr.spec.usages = Some(vec!["client auth".to_owned()]);
        assert!(check_usages(&csr).is_err());
        let hour = Duration::from_hours(1);
        assert_eq!(granted_lifetime(&csr, hour), Ok(None));
        csr.spec.expiration_seconds = Some(3600);
        assert_eq!(granted_lifetime(&csr, hour), Ok(Some(hour)));
        for seconds in [3601, 0, -1] {
            csr.spec.expiration_seconds = Some(seconds);
            assert!(
                granted_lifetime(&csr, hour)
                    .unwrap_err()
                    .contains("at most 3600 s")
            );
        }
    }
}
