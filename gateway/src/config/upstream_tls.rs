//! TLS from the gateway itself to a node port, in place of the node's edge.
//!
//! A powerful client key, such as that of a kubelet's client, is then only in the cloud. The edge passes bytes: its port has the
//! scheme `tcp`. The kind of verification must be explicit: `ca`, or `pin: true`, or `verify: false`.

use std::path::PathBuf;

use causeway_config::ConfigErrors;
use serde::{Deserialize, Serialize};

/// TLS to a port of every node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UpstreamTls {
    /// PEM file of the CAs that may sign the upstream's certificate, which must name the node, or an address that is confirmed to be the node's.
    pub ca: Option<PathBuf>,
    /// PEM file of the client certificate presented to the upstream.
    pub certificate: Option<PathBuf>,
    /// PEM file of the certificate's private key.
    pub key: Option<PathBuf>,
    /// In place of both: name of the signer from which the gateway requests that certificate through the cluster's `certificates.k8s.io`, such as `kubernetes.io/kube-apiserver-client`, and again when two thirds of its lifetime are over. It is stored in `data_dir`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signer: Option<String>,
    /// With `signer`: the user that the certificate names (its common name), to be bound to `system:kubelet-api-admin`.
    pub user: String,
    /// With `signer`: whether the gateway approves its own request. Its service account may then approve every request to that signer. Otherwise another system approves each request.
    pub approve: bool,
    /// Whether the upstream is trusted by the key that it has at the first connection: the key is stored for each node in the data directory, and from then on no other key is accepted. Names, validity and issuer of its certificate do not count. `causeway node pins` lists these keys, `causeway node unpin` removes one.
    pub pin: bool,
    /// Whether the upstream's certificate is verified. `false` accepts any certificate.
    pub verify: bool,
}

impl Default for UpstreamTls {
    fn default() -> Self {
        Self {
            ca: None,
            certificate: None,
            key: None,
            signer: None,
            user: "causeway-gateway".to_owned(),
            approve: false,
            // An attacker between the gateway and an app at the first connection would be trusted permanently.
            pin: false,
            // Unverified TLS must be explicit.
            verify: true,
        }
    }
}

impl UpstreamTls {
    fn validate_signer(&self, path: &str, has_cluster: bool, faults: &mut ConfigErrors) {
        let Some(signer) = &self.signer else {
            if self.approve {
                let why = "is only for a signer that issues the certificate, and no signer is set";
                faults.add(format!("{path}.approve"), why);
            }
            return;
        };
        let mut fault = |why: &str| faults.add(format!("{path}.signer"), why);
        if self.certificate.is_some() || self.key.is_some() {
            fault(
                "issues the certificate, but files of a certificate are set too; keep one of the two",
            );
        }
        if !has_cluster {
            fault("needs a cluster that issues the certificate; add the section kubernetes");
        }
        let domain = signer.split_once('/').map(|(domain, _)| domain);
        if !domain.is_some_and(|domain| domain.contains('.')) {
            fault("is not a valid signer name; write DOMAIN/NAME");
        } else if signer == "kubernetes.io/kube-apiserver-client-kubelet" {
            fault(
                "signs certificates only for nodes; write kubernetes.io/kube-apiserver-client, or a signer of your own",
            );
        }
        if self.user.is_empty() || self.user.starts_with("system:") {
            let why = "is not a user that a gateway may use; remove this key, or set a user that is bound to system:kubelet-api-admin";
            faults.add(format!("{path}.user"), why);
        }
    }

    pub(super) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let files = [&self.ca, &self.certificate, &self.key];
        files.into_iter().flatten()
    }

    /// Adds the faults of the entry for this port. `has_cluster` says whether a cluster is configured.
    pub(super) fn validate(&self, port: u16, has_cluster: bool, faults: &mut ConfigErrors) {
        let path = format!("upstream_tls.{port}");
        self.validate_signer(&path, has_cluster, faults);
        if port == 0 {
            let why = "0 is not a valid node port; use a port from 1 to 65535";
            faults.add(path.as_str(), why);
        }
        match (&self.ca, self.pin, self.verify) {
            (None, false, true) => faults.add(
                path.as_str(),
                "needs \"ca\", the file of the CA that signed the app's certificate; to trust the key that the app \
                 shows first, set pin: true; to accept any certificate, set verify: false",
            ),
            (Some(_), _, false) => faults.add(
                format!("{path}.verify"),
                "false accepts any certificate, but \"ca\" requires its CA; remove one of them",
            ),
            (Some(_), true, true) => faults.add(
                format!("{path}.pin"),
                "true checks only the app's key, but \"ca\" requires a CA; remove one of them",
            ),
            (None, true, false) => faults.add(
                format!("{path}.verify"),
                "false accepts any certificate, but \"pin\" requires one key; remove one of them",
            ),
            _ => {}
        }
        match (&self.certificate, &self.key) {
            (Some(_), None) => faults.add(
                format!("{path}.certificate"),
                "needs \"key\", the file of the certificate's private key",
            ),
            (None, Some(_)) => faults.add(
                format!("{path}.key"),
                "needs \"certificate\", the file of the key's certificate",
            ),
            _ => {}
        }
        let files = [
            ("ca", &self.ca),
            ("certificate", &self.certificate),
            ("key", &self.key),
        ];
        for (key, file) in files {
            if let Some(file) = file {
                faults.check_file(format!("{path}.{key}"), file);
            }
        }
    }
}
