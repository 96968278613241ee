//! Configuration section `tunnel.identity`: certificates of gateways and edges that an external CA issues.

use causeway_certs::TrustDomain;
use causeway_config::ConfigErrors;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Certificates that an external CA (cert-manager, Vault, a company's PKI) issues and renews, in files, each of which is watched.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Identity {
    /// File of the gateway's certificate and the intermediates after it; its one URI is `spiffe://TRUST-DOMAIN/gateway`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chain: Option<PathBuf>,
    /// File of the private key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// In place of both: name of the signer from which the gateway requests, and renews, that certificate through the cluster's `certificates.k8s.io`. It is stored in `data_dir`. Another system approves and signs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signer: Option<String>,
    /// With `signer`: the trust domain of the requested certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust_domain: Option<String>,
    /// Files of the CAs of edges, whose certificates have the one URI `spiffe://TRUST-DOMAIN/edge/NODE`.
    pub client_ca: Vec<PathBuf>,
    /// Admits each node that has such a certificate; otherwise only those of `causeway node add`.
    pub any_node: bool,
}

impl Identity {
    /// Returns the signer and the trust domain of the requested certificate, if one is requested.
    pub fn certificate_request(&self) -> Option<(&str, TrustDomain)> {
        let domain = TrustDomain::parse(self.trust_domain.as_deref()?).ok()?;
        Some((self.signer.as_deref()?, domain))
    }

    pub(super) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        self.chain.iter().chain(&self.key).chain(&self.client_ca)
    }

    pub(super) fn validate(&self, of_a_cluster: bool, faults: &mut ConfigErrors) {
        let mut fault = |key: &str, message: String| {
            faults.add(format!("tunnel.identity{key}"), message);
        };
        if self.client_ca.is_empty() {
            let message = "is empty, so no edge would be admitted; set a file of CA certificates";
            fault(".client_ca", message.to_owned());
        }
        let files = [&self.chain, &self.key].map(Option::is_some);
        match (&self.signer, files) {
            (None, [true, true]) | (Some(_), [false, false]) => {}
            (None, _) => {
                let message = "needs the files chain and key, or a signer that issues them";
                fault("", message.to_owned());
            }
            (Some(_), _) => {
                let message = "has a signer that issues chain and key; keep one of the two";
                fault("", message.to_owned());
            }
        }
        match (&self.signer, &self.trust_domain) {
            (Some(_), None) => fault(
                ".trust_domain",
                "is required: the certificate that the signer issues contains it".to_owned(),
            ),
            (None, Some(_)) => fault(
                ".trust_domain",
                "is read from the file chain; this key is for signer alone".to_owned(),
            ),
            (Some(_), Some(domain)) => {
                if let Err(error) = TrustDomain::parse(domain) {
                    fault(".trust_domain", error.to_string());
                }
            }
            (None, None) => {}
        }
        let Some(signer) = &self.signer else {
            return;
        };
        if !of_a_cluster {
            let message = "needs a cluster that issues the certificate; add the section kubernetes";
            fault(".signer", message.to_owned());
        }
        let domain = signer.split_once('/').map(|(domain, _)| domain);
        if !domain.is_some_and(|domain| domain.contains('.')) {
            let message = format!("\"{signer}\" is not a valid signer name; write DOMAIN/NAME");
            fault(".signer", message);
        } else if signer.starts_with("kubernetes.io/") {
            let message = format!(
                "\"{signer}\" issues no certificates for gateways: the built-in signers of Kubernetes issue them for clients of the API server and for kubelets"
            );
            fault(".signer", message);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use causeway_config::Validate;
    use serde_json::{Value, json};

    fn config(identity: &Value) -> Config {
        let config =
            json!({ "data_dir": "/data", "kubernetes": {}, "tunnel": { "identity": identity } });
        serde_json::from_value(config).unwrap()
    }

    fn faults(identity: &Value) -> String {
        let text: Vec<_> = config(identity)
            .validate()
            .iter()
            .map(ToString::to_string)
            .collect();
        text.join("\n")
    }

    #[test]
    fn external_certificates_come_from_files_or_on_demand() {
        let asked =
            json!({ "signer": "example.com/gateways", "trust_domain": "td", "client_ca": ["c"] });
        assert_eq!(faults(&asked), "");
        let kept = config(&asked)
            .with_certificate_paths()
            .tunnel
            .identity
            .unwrap();
        assert_eq!(kept.chain, Some("/data/identity.pem".into()));
        assert_eq!(kept.key, kept.chain);
        let files = json!({ "chain": "a", "key": "b", "client_ca": ["c"] });
        assert_eq!(faults(&files), "");
        assert_eq!(config(&files).with_certificate_paths(), config(&files));
        for (change, says) in [
            (json!({ "chain": "a" }), "keep one of the two"),
            (json!({ "signer": null }), "or a signer"),
            (json!({ "signer": "gateways" }), "DOMAIN/NAME"),
            (
                json!({ "signer": "kubernetes.io/kubelet-serving" }),
                "no certificates for gateways",
            ),
            (json!({ "trust_domain": null }), "is required"),
            (json!({ "trust_domain": "a/b" }), "trust_domain"),
            (json!({ "client_ca": [] }), "no edge would be admitted"),
        ] {
            let mut wrong = asked.clone();
            wrong
                .as_object_mut()
                .unwrap()
                .extend(change.as_object().unwrap().clone());
            let text = faults(&wrong);
            assert!(text.contains(says), "{change}: {text}");
        }
        let files = json!({ "chain": "a", "key": "b", "client_ca": ["c"], "trust_domain": "td" });
        assert!(faults(&files).contains("for signer alone"));
    }
}
