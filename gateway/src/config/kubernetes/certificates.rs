//! Configuration section `kubernetes.certificates`: edges join by their identity in the cluster instead of tokens.
//!
//! The gateway can only be a signer with its own name. Signers of `kubernetes.io` are the cluster's, and other nodes, users and
//! components also have certificates of these signers. An edge presents a client certificate of such a signer once, in exchange
//! for a certificate of our own CA.

use causeway_certs::SignerProfile;
use causeway_config::ConfigErrors;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

use super::coredns_hosts::{check_names, is_name, is_namespaced_name};

/// Signing of certificate requests of edges in the cluster's `certificates.k8s.io`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CsrSigning {
    /// Name of the signer that this gateway is, `DOMAIN/NAME`; edges have it as their `kubernetes.signer`. Or one of the cluster's own signers for clients: `kubernetes.io/kube-apiserver-client` (the gateway approves), `kubernetes.io/kube-apiserver-client-kubelet` (the cluster approves, and for nodes alone).
    pub signer: String,
    /// Files of the CA certificates of the cluster's own signers (PEM); for these signers only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub client_ca: Vec<PathBuf>,
    /// Service accounts `NAMESPACE/NAME` whose tokens may request for the node that their pod runs on. A node's own kubelet always may.
    pub service_accounts: Vec<String>,
    /// Namespace of the `ConfigMap` in which edges find the CA.
    pub namespace: String,
    /// Name of that `ConfigMap`; its key is `ca.crt`.
    pub name: String,
}

impl Default for CsrSigning {
    fn default() -> Self {
        Self {
            signer: "causeway.io/edge".to_owned(),
            client_ca: Vec::new(),
            service_accounts: Vec::new(),
            namespace: "kube-system".to_owned(),
            name: "causeway-ca".to_owned(),
        }
    }
}

impl CsrSigning {
    /// Returns the profile by which the signer names nodes, if it is one of the cluster's own signers.
    pub fn subject(&self) -> Option<SignerProfile> {
        SignerProfile::from_signer_name(&self.signer)
    }

    pub(in crate::config) fn validate(&self, external_ca: bool, faults: &mut ConfigErrors) {
        self.validate_signer(faults);
        let names = [
            ("namespace", Some(&self.namespace)),
            ("name", Some(&self.name)),
        ];
        check_names("kubernetes.certificates", names, faults);
        for (index, account) in self.service_accounts.iter().enumerate() {
            if !is_namespaced_name(account) {
                let path = format!("kubernetes.certificates.service_accounts[{index}]");
                let message =
                    format!("\"{account}\" is not a valid service account; write NAMESPACE/NAME");
                faults.add(path, message);
            }
        }
        let is_kubelet_signer = self.subject() == Some(SignerProfile::Kubelet);
        if is_kubelet_signer && !self.service_accounts.is_empty() {
            let message = "the cluster approves the requests to this signer itself, and only for nodes; remove the accounts, or write signer: kubernetes.io/kube-apiserver-client";
            faults.add("kubernetes.certificates.service_accounts", message);
        }
        let path = "kubernetes.certificates.client_ca";
        match (self.subject(), self.client_ca.is_empty()) {
            (Some(_), true) => {
                let message = "the cluster signs the certificates, so the gateway needs the cluster's client CA; set this key to its file (kubeadm: /etc/kubernetes/pki/ca.crt)";
                faults.add(path, message);
            }
            (None, false) => {
                let message =
                    "this gateway signs the certificates with its own CA; remove this key";
                faults.add(path, message);
            }
            _ => {}
        }
        if external_ca {
            let message = "edges use certificates of an external CA (tunnel.identity), so this gateway signs no certificates; keep one of the two";
            faults.add("kubernetes.certificates", message);
        }
    }

    fn validate_signer(&self, faults: &mut ConfigErrors) {
        let path = "kubernetes.certificates.signer";
        let of = self.signer.split_once('/');
        match of {
            _ if self.subject().is_some() => {}
            Some((domain, _))
                if domain == "kubernetes.io" || domain.ends_with(".kubernetes.io") =>
            {
                let message = format!(
                    "\"{}\" is a built-in signer of Kubernetes that this gateway cannot implement, and it does not sign client certificates; write a name in another domain, such as causeway.io/edge, or kubernetes.io/kube-apiserver-client",
                    self.signer
                );
                faults.add(path, message);
            }
            Some((domain, name)) if domain.contains('.') && is_name(domain) && is_name(name) => {}
            _ => {
                let message = format!(
                    "\"{}\" is not a valid signer name; write DOMAIN/NAME, such as causeway.io/edge",
                    self.signer
                );
                faults.add(path, message);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use causeway_config::Validate;
    use serde_json::json;

    fn faults(certificates: &serde_json::Value) -> String {
        let config = json!({ "kubernetes": { "certificates": certificates } });
        let config: Config = serde_json::from_value(config).unwrap();
        let text: Vec<_> = config.validate().iter().map(ToString::to_string).collect();
        text.join("\n")
    }

    #[test]
    fn a_cluster_owned_or_malformed_signer_is_refused() {
        assert_eq!(faults(&json!({})), "");
        let all = json!({ "signer": "example.com/edges.site", "service_accounts": ["causeway-edge/causeway-edge"] });
        assert_eq!(faults(&all), "");
        for (given, says) in [
            (
                json!({ "signer": "kubernetes.io/kubelet-serving" }),
                "a built-in signer",
            ),
            (
                json!({ "signer": "x.kubernetes.io/edge" }),
                "a built-in signer",
            ),
            (json!({ "signer": "edge" }), "DOMAIN/NAME"),
            (json!({ "signer": "causeway/edge" }), "DOMAIN/NAME"),
            (json!({ "signer": "causeway.io/edge/1" }), "DOMAIN/NAME"),
            (json!({ "service_accounts": ["edge"] }), "NAMESPACE/NAME"),
            (json!({ "name": "A b" }), "not a valid object name"),
        ] {
            let text = faults(&given);
            assert!(text.contains(says), "{given}: {text}");
        }
    }

    #[test]
    fn no_certificates_are_signed_for_edges_of_an_external_ca() {
        let config = json!({
            "kubernetes": { "certificates": {} },
            "tunnel": { "identity": { "chain": "a", "key": "b", "client_ca": ["c"] } },
        });
        let config: Config = serde_json::from_value(config).unwrap();
        let text: Vec<_> = config.validate().iter().map(ToString::to_string).collect();
        assert!(text.join("\n").contains("keep one of the two"), "{text:?}");
    }
}
